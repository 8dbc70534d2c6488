"""Sparse variational dropout: its KL and its price, one step by its formula, and which weights stay."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pacprune as pp
from pacprune import kernels, philox
from pacprune.masking import attachment
from pacprune.masking.spikeslab import dropout_kl, log_alpha
from pacprune.training import budget
from pacprune.training.budget import Budget

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=20, lr=0.1, batch_size=30)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


def noisy(std: float) -> nn.Module:
    slab = pp.isotropic(net(), sparsity=0.0, std=std)
    return pp.attach(net(), slab, estimator=kernels.NOISELESS, train_std=True, seed=5)


def test_the_kl_is_that_of_the_log_uniform_prior_up_to_what_its_authors_fitted() -> None:
    z = torch.linspace(-12, 12, 400_000, dtype=torch.float64)
    weight = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for number in (-6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0):
        root = math.exp(number / 2)
        # E log|1 + sqrt(alpha) z| - log(alpha) / 2 falls to E log|z| where alpha is infinite, and the KL to 0.
        mean_log = (weight * torch.log((1 + root * z).abs() + 1e-12)).sum() - number / 2
        limit = (weight * torch.log(z.abs() + 1e-12)).sum()
        exact = float(mean_log - limit)
        assert float(dropout_kl(torch.tensor(number))) == pytest.approx(exact, abs=0.01)


def test_a_log_uniform_prior_bounds_nothing() -> None:
    """KL(Q||P), Q = N(.1, .01^2), p(w) = 1 / (2 |w| log(b/a)) on a < |w| < b: a prior only while it is cut off."""
    q = torch.distributions.Normal(torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64))
    w = torch.linspace(0.02, 0.18, 100_001, dtype=torch.float64)
    share = q.log_prob(w).exp() * (w[1] - w[0])
    # Beyond the cut, say at b = 0.3, Q has a share and P none: the KL is infinite for every a and b.
    assert math.erfc((0.3 - 0.1) / 0.01 / math.sqrt(2)) > 0
    # Cut off as well, Q pays log(2 log(b/a)) for every weight, beside what the cut leaves alone: no b/a is the last.
    costs = []
    for reach in (1e2, 1e4, 1e8, 1e16):
        log_p = -torch.log(w) - math.log(2 * reach)
        costs.append(float((share * (q.log_prob(w) - log_p)).sum()))
    for before, after, factor in zip(costs, costs[1:], (1e2, 1e4, 1e8), strict=False):
        assert after - before == pytest.approx(math.log(factor), rel=1e-6)


def test_alpha_is_the_variance_by_the_squared_mean_and_a_zero_is_all_noise() -> None:
    mean, std = torch.tensor([0.5, -2.0]), torch.tensor([0.1, 3.0])
    torch.testing.assert_close(log_alpha(mean, std.log()), (std**2 / mean**2).log())
    zero = torch.zeros(1, requires_grad=True)
    dropout_kl(log_alpha(zero, torch.zeros(1))).sum().backward()
    assert zero.grad is not None
    assert float(zero.grad) == 0


def test_one_step_is_its_formula() -> None:
    model, plan = noisy(0.1), Budget(0.8, control="variational", strength=1 / 32, patience=2.0)
    config = pp.Config(epochs=2, lr=0.1, std_lr=0.01, gate_lr=None, momentum=0.0, batch_size=32)
    means: list[dict[str, torch.Tensor]] = []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if len(means) < step:
            means.append({site.name: site.mean.detach().clone() for site in attachment.sites(model)})

    pp.fit(model, (X[:32], Y[:32]), config, budget=plan, progress=progress)
    twin, values = net(), {name: p.detach().clone() for name, p in net().named_parameters()}
    names = list(pp.prunable(twin))
    widths = {name: torch.full_like(values[name], math.log(0.1)) for name in names}
    for step, price in ((1, 0.0), (2, 0.5)):
        leaves = {name: value.requires_grad_() for name, value in values.items()}
        log_stds, offset, drawn = {name: width.requires_grad_() for name, width in widths.items()}, 0, dict(leaves)
        for name in names:
            size = leaves[name].numel()
            z = philox.normal(size, seed=5, step=step, stream=philox.SLAB, offset=offset).reshape(leaves[name].shape)
            drawn[name], offset = leaves[name] + log_stds[name].exp() * z, offset + size
        kl = sum(dropout_kl(log_alpha(leaves[name], log_stds[name])).sum() for name in names)
        (F.cross_entropy(functional_call(twin, drawn, (X[:32],)), Y[:32]) + price / 32 * kl).backward()
        values = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in leaves.items()}  # type: ignore[operator]
        for name in names:
            torch.testing.assert_close(means[step - 1][name], values[name], rtol=1e-4, atol=1e-5)
        # Adam's first step has the length of its rate.
        widths = {name: (w - 0.01 * w.grad.sign()).detach() for name, w in log_stds.items()}  # type: ignore[union-attr]


def test_the_price_rises_in_the_steps_of_the_warm_up_and_stays() -> None:
    model, plan = noisy(0.1), Budget(0.8, control="variational", strength=0.5, patience=4.0)
    sites = attachment.sites(model)
    kl = sum(dropout_kl(log_alpha(s.mean, s.log_std)).sum().item() for s in sites if s.log_std is not None)
    prices = [budget.variational_penalty(sites, plan, torch.tensor(0.2)).item() / kl for _ in range(7)]
    assert prices == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_a_std_that_is_not_trained_is_refused() -> None:
    model = pp.attach(net(), pp.isotropic(net(), sparsity=0.0))
    with pytest.raises(ValueError, match="prices a std that is not trained here; attach with train_std=True"):
        pp.fit(model, (X, Y), CONFIG, budget=Budget(0.8, control="variational"))


def test_the_weights_with_the_smallest_log_alpha_stay_as_their_means() -> None:
    model, last = net(), {}

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if stage == "masks":
            slab = pp.read(model)
            last.update({name: (mean, log_alpha(mean, slab.std[name].log())) for name, mean in slab.mean.items()})

    result = pp.svd(model, (X, Y), CONFIG, sparsity=0.8, mask_share=1.0, progress=progress)
    alphas = torch.cat([alpha.reshape(-1) for _, alpha in last.values()])
    limit = alphas.sort().values[35]  # of 180 weights 36 are kept
    for name, (mean, alpha) in last.items():
        assert torch.equal(result.mask[name], alpha <= limit)
        assert torch.equal(dict(model.named_parameters())[name].detach(), mean * result.mask[name])


def test_inputs_that_say_nothing_lose_their_weights() -> None:
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(2))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    result = pp.svd(net(), (x, y), pp.Config(epochs=30, lr=0.1, batch_size=100), sparsity=0.9, mask_share=0.8)
    first = result.mask["0.weight"]
    assert int(first[:, :2].sum()) > 4 * int(first[:, 2:].sum())
    assert pp.error(result.model, (x, y)) < 0.1
