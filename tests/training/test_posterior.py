"""fit_posterior: its objective, the frozen parameters, the written prior and its refusals."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune import bounds
from pacprune.masking import attachment, weights
from pacprune.training.posterior import OBJECTIVES, bounded_cross_entropy, flat

CONFIG = pp.Config(epochs=2, lr=0.1, batch_size=16)
G = torch.Generator().manual_seed(1)
X = torch.randn(80, 4, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
SPLIT = pp.data.split(X, Y, prior_fraction=0.5, seed=0)


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def with_prior(
    data: object = SPLIT.prior, *, std: float = 0.05, epochs: int = 5, **options
) -> tuple[nn.Module, pp.SpikeSlab]:
    """A network after stages 1 and 2 on `data`, and its distribution."""
    model = net()
    pp.fit(model, data, dataclasses.replace(CONFIG, epochs=epochs))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
    pp.attach(model, pp.block_isotropic(model, mask, eps=0.05, std=std), **options)
    return model, pp.read(model)


# --- The surrogate and the bound.


def test_the_surrogate_lies_in_the_unit_interval() -> None:
    logits = torch.tensor([[0.0, 0.0], [100.0, 0.0], [100.0, 0.0], [math.log(9.0), 0.0]])
    risks = [bounded_cross_entropy(logits[i : i + 1], y) for i, y in enumerate(torch.tensor([[0], [0], [1], [1]]))]
    assert [float(v) for v in risks] == pytest.approx([math.log(2) / math.log(1e4), 0.0, 1.0, 0.25], abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_step_descends_the_bound(objective: str) -> None:
    """Gates move by -gate_lr * d bound/d gate; means by the gradient of the risk, then the proximal step of the KL."""
    n, lr, gate_lr = len(SPLIT.bound), 1e-3, 0.5
    function = getattr(bounds, objective)
    model, prior = with_prior()
    with torch.no_grad():  # away from P, where the KL has a slope
        for site in attachment.sites(model):
            site.gate.add_(0.3)
            site.mean.add_(0.01)
    start = {site.name: (site.mean.detach().clone(), site.gate.detach().clone()) for site in attachment.sites(model)}

    twin, _ = with_prior()
    twin.load_state_dict(model.state_dict())
    pp.resample_(twin.eval())
    for site in attachment.sites(twin):
        site.sampler.train()
    risk = bounded_cross_entropy(twin(SPLIT.bound.x), SPLIT.bound.y)
    divergence = pp.kl(attachment.read(twin, detach=False), prior)
    q, k, h = risk.item(), divergence.item(), 1e-4

    def bound(q: float, k: float) -> float:
        return function(q, n=n, kl=k, delta=bounds.Ledger.split(0.05).pac_bayes)

    price = (bound(q, k + h) - bound(q, k - h)) / (2 * h)
    slope = (bound(q + h, k) - bound(q - h, k)) / (2 * h)
    sites = attachment.sites(twin)
    parameters = [site.gate for site in sites] + [site.mean for site in sites]
    of_risk = torch.autograd.grad(risk, parameters, retain_graph=True)
    of_kl = torch.autograd.grad(divergence, parameters)

    config = pp.Config(epochs=1, lr=lr, gate_lr=gate_lr, momentum=0.0, batch_size=n)
    row = pp.fit_posterior(model, prior, SPLIT, config, objective=objective)[0]
    assert row["loss"] == pytest.approx(bound(q, k), rel=1e-4)
    for i, site in enumerate(attachment.sites(model)):
        mean, gate = start[site.name]
        step = gate_lr * (slope * of_risk[i] + price * of_kl[i])
        assert torch.allclose(site.gate, gate - step, atol=1e-2 * float(step.abs().max()))
        moved = mean - lr * slope * of_risk[i + len(sites)]
        pull = lr * price * torch.sigmoid(site.gate) / prior.std[site.name] ** 2
        expected = (moved + pull * prior.mean[site.name]) / (1 + pull)
        moved = expected.detach() - mean
        assert torch.allclose(site.mean - mean, moved, atol=2e-2 * float(moved.abs().max()))


@pytest.mark.parametrize(
    "options", [{"momentum": 0.0}, {}, {"lr": 1.0}, {"lr": 1e-3, "gate_lr": 0.05, "optimizer": "adam"}], ids=str
)
def test_the_bound_falls_with_every_optimiser_and_learning_rate(options: dict) -> None:
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    split = pp.data.split(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long(), prior_fraction=0.05, seed=0)
    model, prior = with_prior(split.prior, epochs=2, std=0.1)
    rows = pp.fit_posterior(model, prior, split, pp.Config(**{"epochs": 20, "lr": 0.1, "gate_lr": 10.0, **options}))
    assert rows[-1]["loss"] < rows[1]["loss"] - 0.002
    assert 0.5 < float(pp.kl(pp.read(model), prior)) < 5


# --- Frozen parameters, the written prior, refusals.


@pytest.mark.parametrize("options", [{}, {"train_std": True}, {"mapping": "clamp"}])
def test_only_the_parameters_of_q_change(options: dict) -> None:
    model, prior = with_prior(**options)
    before = {n: t.clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    pp.fit_posterior(model, prior, SPLIT, CONFIG)
    changed = {n for n, t in (*model.named_parameters(), *model.named_buffers()) if not torch.equal(t, before[n])}
    parts = ["original0", "original1", "0.step"] + ["original2"] * bool(options.get("train_std"))
    assert changed == {f"{i}.parametrizations.weight.{part}" for i in (0, 4) for part in parts}
    assert "1.running_mean" in before
    after = pp.read(model)
    assert all(torch.equal(after.rest[n], t) for n, t in prior.rest.items())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_large_step_with_a_tiny_std_is_stable(optimizer: str) -> None:
    model, prior = with_prior(std=1e-4)
    rows = pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=5, lr=1.0, gate_lr=1.0, optimizer=optimizer))
    assert all(math.isfinite(row["loss"]) and row["loss"] < 1 for row in rows)
    assert float(pp.kl(pp.read(model), prior)) < 1000


def test_without_a_std_only_the_gates_change() -> None:
    model, prior = with_prior(std=0.0)
    pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=3, lr=0.1, gate_lr=10.0))
    posterior = pp.read(model)
    assert all(torch.equal(posterior.mean[n], m) for n, m in prior.mean.items())
    assert 0 < float(pp.kl(posterior, prior)) < math.inf


def test_the_budget_holds_the_sparsity_of_q() -> None:
    for budget, exact in ((None, False), (pp.Budget(0.5), True)):
        model, prior = with_prior()
        pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=3, lr=0.1, gate_lr=300.0), budget=budget)
        assert (abs(pp.read(model).sparsity - 0.5) < 1e-6) == exact


def test_p_is_written_before_the_bound_set_is_read(tmp_path: Path) -> None:
    model, prior = with_prior()
    broken = dataclasses.replace(SPLIT, bound=dataclasses.replace(SPLIT.bound, y=SPLIT.bound.y + 7))
    with pytest.raises(ValueError, match="labels run from 7"):
        pp.fit_posterior(model, prior, broken, CONFIG, out=tmp_path)
    written = load_file(tmp_path / "prior.safetensors")
    assert set(written) == set(flat(prior))
    assert all(torch.equal(t, written[n]) for n, t in flat(prior).items())
    assert weights.notes(model).receipt is None
    pp.fit_posterior(model, prior, SPLIT, CONFIG, out=tmp_path)
    assert weights.notes(model).receipt == {
        "prior": prior.hash,
        "bound": SPLIT.bound.hash,
        "written": str(tmp_path),
    }


LEAKS = {
    "the training data": (SPLIT.train, 40),
    "raw tensors": ((SPLIT.bound.x[:3].clone(), SPLIT.bound.y[:3].clone()), 3),
    "a part of it": (SPLIT.bound.subset(torch.arange(5)), 5),
    "a dataset": (TensorDataset(SPLIT.bound.x[:4], SPLIT.bound.y[:4]), 4),
    "a loader": (DataLoader(SPLIT.bound, 16), 40),
    "another split": (pp.data.split(X, Y, prior_fraction=0.9, seed=0).prior, 32),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_prior_fitted_to_the_bound_set_is_refused(leak: str, tmp_path: Path) -> None:
    data, touched = LEAKS[leak]
    model, prior = with_prior(data)
    with pytest.raises(ValueError, match=f"the prior has seen the bound set: {touched} of its 40 examples"):
        pp.fit_posterior(model, prior, SPLIT, CONFIG, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "use", ["snip", "grasp", "BatchNorm", "validation", "early stop", "the posterior of an earlier run"]
)
def test_a_network_that_saw_the_bound_set_in_any_other_way_is_refused(use: str) -> None:
    model = net()
    if use == "snip":
        pp.scores.snip(model, SPLIT.bound)
    elif use == "grasp":
        pp.scores.grasp(model, SPLIT.bound)
    elif use == "BatchNorm":
        pp.reestimate_batchnorm(model, SPLIT.bound)
    elif use in ("validation", "early stop"):
        config = dataclasses.replace(CONFIG, patience=int(use == "early stop"))
        pp.fit(model, SPLIT.prior, config, validation=SPLIT.bound)
    else:
        model, prior = with_prior()
        pp.fit_posterior(model, prior, SPLIT, CONFIG)
        pp.harden(model)
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.05))
    with pytest.raises(ValueError, match="the prior has seen the bound set"):
        pp.fit_posterior(model, pp.read(model), SPLIT, CONFIG)


def test_an_exact_duplicate_in_the_prior_part_is_no_leak() -> None:
    split = pp.data.split(torch.cat([X, X]), torch.cat([Y, Y]), prior_fraction=0.5, seed=0)
    assert split.duplicates > 0
    model, prior = with_prior(split.prior)
    pp.fit_posterior(model, prior, split, CONFIG)


def test_bad_objectives_deltas_and_plain_models_are_refused(tmp_path: Path) -> None:
    model, prior = with_prior()
    with pytest.raises(ValueError, match=f"objective 'catoni' is unknown; use one of {', '.join(OBJECTIVES)}"):
        pp.fit_posterior(model, prior, SPLIT, CONFIG, objective="catoni")
    with pytest.raises(ValueError, match="delta is 5"):
        pp.fit_posterior(model, prior, SPLIT, CONFIG, delta=5, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"call pp\.attach"):
        pp.fit_posterior(net(), prior, SPLIT, CONFIG, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_prior_with_gradients_is_refused() -> None:
    """A slab with gradients is for the KL, and does not carry the seen examples."""
    model, _ = with_prior()
    with pytest.raises(ValueError, match=r"the prior carries gradients .*; take it by pp\.read\(model\)"):
        pp.fit_posterior(model, pp.read(model, detach=False), SPLIT, pp.Config(epochs=1))


def test_a_prior_without_a_folder_is_deleted_when_python_ends(tmp_path: Path) -> None:
    text = """
import pathlib, tempfile, pacprune as pp
split = pp.data.digits(seed=0)
model = pp.models.mlp(64)
pp.attach(model, pp.block_isotropic(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9), eps=1e-3, std=0.01))
prior = pp.read(model)
pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
print(len(list(pathlib.Path(tempfile.gettempdir()).rglob("prior.safetensors"))))
"""
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(pp.__file__).parents[1])}
    process = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=600)
    assert process.stdout.split() == ["1"], process.stderr
    assert list(tmp_path.iterdir()) == []
