"""Estimators of the gates' gradient against exact enumeration, and enumeration against its definition."""

import itertools

import pytest
import torch
from enumeration import enumerate_gibbs
from torch import nn

import pacprune as pp
from pacprune import kernels, philox
from pacprune.masking import attachment
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.training import estimators
from pacprune.training.estimators import algorithm1_

X = torch.tensor([[1.0, -0.5, 0.8, 0.3], [0.2, 1.1, -0.7, 0.9], [-1.3, 0.4, 0.6, -0.2]])
Y = torch.tensor([0.7, -0.4, 0.5])


def regression(size: int, p: list[float], *, mapping: str = "sigmoid") -> nn.Module:
    """One neuron with `size` stochastic weights."""
    model = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, -0.6, 1.2, 0.5]])[:, :size])
    slab = SpikeSlab(
        keep_prob={"weight": torch.tensor([p])},
        mean={"weight": model.weight.detach().clone()},
        std={"weight": torch.tensor(0.0)},
        rest={},
        total=size,
    )
    return pp.attach(model, slab, mapping=mapping)


def squared(weight: torch.Tensor) -> torch.Tensor:
    """A loss that is not linear in the weights."""
    return ((torch.tanh(X[:, : weight.shape[1]].to(weight.dtype) @ weight[0]) - Y.to(weight.dtype)) ** 2).mean()


def exact(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The Gibbs risk and its derivatives in keep_prob and in the mean."""
    q = pp.read(model)
    p = q.keep_prob["weight"].double().requires_grad_()
    mean = q.mean["weight"].double().requires_grad_()
    value = SpikeSlab({"weight": p}, {"weight": mean}, q.std, {}, q.total)
    risk = enumerate_gibbs(value, lambda w: squared(w["weight"]))
    return (risk, *torch.autograd.grad(risk, (p, mean)))


# --- Enumeration


def test_enumeration_is_the_weighted_sum_over_all_masks():
    p, mean = {"a": torch.tensor([0.2, 0.7]), "b": torch.tensor([[0.5]])}, {"a": torch.ones(2), "b": torch.ones(1, 1)}
    q = SpikeSlab(p, mean, {n: torch.tensor(0.0) for n in p}, {}, 3)
    risk = enumerate_gibbs(q, lambda w: w["a"][0] + 10 * w["a"][1] * w["b"][0, 0] + 100)
    assert float(risk) == pytest.approx(0.2 + 10 * 0.7 * 0.5 + 100)
    assert float(enumerate_gibbs(q, lambda w: torch.ones(()))) == pytest.approx(1.0)


def test_gradients_of_the_enumeration_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    p = 0.1 + 0.8 * torch.rand(1, 4, generator=generator, dtype=torch.float64)
    mean = torch.randn(1, 4, generator=generator, dtype=torch.float64)

    def risk(p: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        q = SpikeSlab({"w": p}, {"w": mean}, {"w": torch.tensor(0.0)}, {}, 4)
        return enumerate_gibbs(q, lambda w: squared(w["w"]))

    assert torch.autograd.gradcheck(risk, (p.requires_grad_(), mean.requires_grad_()))
    # The risk is linear in each keep_prob, so a corner of the cube is optimal.
    ends = [risk(torch.tensor([corner], dtype=torch.float64), mean) for corner in itertools.product((0, 1), repeat=4)]
    assert min(ends) <= risk(p, mean) <= max(ends)


def test_enumeration_refuses_many_weights_and_random_slabs():
    with pytest.raises(ValueError, match="takes D <= 16, not 17"):
        enumerate_gibbs(SpikeSlab({"w": torch.rand(17)}, {}, {}, {}, 17), lambda w: torch.ones(()))
    q = SpikeSlab({"w": torch.rand(2)}, {"w": torch.rand(2)}, {"w": torch.tensor(0.1)}, {}, 2)
    with pytest.raises(ValueError, match="std must be 0"):
        enumerate_gibbs(q, lambda w: torch.ones(()))


# --- Algorithm 1


def expectation(
    model: nn.Module, samples: int, monkeypatch: pytest.MonkeyPatch, **extra: object
) -> dict[str, torch.Tensor]:
    """The expected loss and gradients of Algorithm 1, by running it on every possible sequence of masks."""
    (site,) = attachment.sites(model)
    p = pp.read(model).keep_prob["weight"].double().reshape(-1)
    expected = {"loss": torch.zeros(()), "gate": torch.zeros(p.shape), "mean": torch.zeros(p.shape)}
    for bits in itertools.product((0, 1), repeat=samples * len(p)):
        draws = torch.tensor(bits).reshape(samples, -1)
        start = int(site.sampler.step)
        monkeypatch.setenv("PACPRUNE_KERNELS", "reference")  # whose words can be replaced
        monkeypatch.setattr(
            philox, "words", lambda n, *, step, draws=draws, start=start, **_: draws[int(step) - start] * (2**32 - 1)
        )
        model.zero_grad()
        loss = algorithm1_(model, lambda: squared(model.weight), samples=samples)
        chance = float(torch.where(draws > 0, p, 1 - p).prod())
        expected["loss"] += chance * loss
        expected["gate"] += chance * site.gate.grad.reshape(-1)
        expected["mean"] += chance * site.mean.grad.reshape(-1)
    monkeypatch.undo()
    return expected


@pytest.mark.parametrize(("size", "samples"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 5)])
def test_algorithm1_is_the_true_derivative_shrunk_by_a_known_factor(size, samples, monkeypatch):
    p = [0.3, 0.8, 0.05][:size]
    model = regression(size, p)
    mean = expectation(model, samples, monkeypatch)
    risk, to_p, to_mean = exact(model)
    lam = torch.tensor(p).double()
    shrunk = to_p.reshape(-1) * (1 - lam**samples - (1 - lam) ** samples)
    assert mean["loss"].item() == pytest.approx(risk.item(), rel=1e-5)
    assert torch.allclose(mean["gate"].double(), shrunk * lam * (1 - lam), rtol=1e-4, atol=1e-7)
    assert torch.allclose(mean["mean"].double(), to_mean.reshape(-1), rtol=1e-4, atol=1e-6)


def test_algorithm1_under_the_clamp_gives_the_derivative_in_keep_prob_itself(monkeypatch):
    model = regression(2, [0.3, 0.8], mapping="clamp")
    mean = expectation(model, 2, monkeypatch)
    lam = torch.tensor([0.3, 0.8]).double()
    shrunk = exact(model)[1].reshape(-1) * (1 - lam**2 - (1 - lam) ** 2)
    assert torch.allclose(mean["gate"].double(), shrunk, rtol=1e-4, atol=1e-7)


def test_the_indicator_of_algorithm1_does_not_change_a_kl_term(monkeypatch):
    model = regression(3, [0.3, 0.8, 0.5])
    prior = pp.isotropic(regression_plain(model), sparsity=0.5)
    (site,) = attachment.sites(model)

    def penalty() -> torch.Tensor:
        return 0.1 * pp.kl(pp.read(model, detach=False), prior).float()

    expected = torch.autograd.grad(penalty(), site.gate)[0]
    monkeypatch.setenv("PACPRUNE_KERNELS", "reference")
    monkeypatch.setattr(philox, "words", lambda n, **_: torch.full((n,), 2**32 - 1))  # all draws agree: zeta is 0
    algorithm1_(model, lambda: squared(model.weight) + penalty(), samples=4)
    assert torch.allclose(site.gate.grad, expected, rtol=1e-5)
    assert (expected != 0).sum() == 2  # where keep_prob differs from the prior's .5


def regression_plain(model: nn.Module) -> nn.Module:
    """A plain model with the means of an attached one."""
    plain = nn.Linear(model.in_features, 1, bias=False)
    with torch.no_grad():
        plain.weight.copy_(pp.read(model).mean["weight"])
    return plain


def test_algorithm1_restores_modes_adds_to_gradients_and_draws_new_masks():
    model = regression(4, [0.5] * 4)
    model.train()
    (site,) = attachment.sites(model)
    losses = []

    def loss() -> torch.Tensor:
        assert not site.sampler.training
        losses.append(squared(model.weight))
        return losses[-1]

    value = algorithm1_(model, loss, samples=6)
    assert site.sampler.training
    assert int(site.sampler.step) == 5  # the first draw is the present one
    assert value.item() == pytest.approx(sum(v.item() for v in losses) / 6)
    assert len({v.item() for v in losses}) > 1
    first = site.gate.grad.clone()
    site.sampler.step.zero_()
    algorithm1_(model, loss, samples=6)
    assert torch.allclose(site.gate.grad, 2 * first)

    def broken() -> torch.Tensor:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        algorithm1_(model, broken, samples=2)
    assert site.sampler.training
    with pytest.raises(ValueError, match="needs at least 2 samples, not 1"):
        algorithm1_(model, loss, samples=1)


def test_algorithm1_with_frozen_gates_trains_the_weights_alone():
    model = regression(4, [0.5] * 4)
    (site,) = attachment.sites(model)
    site.gate.requires_grad_(False)
    algorithm1_(model, lambda: squared(model.weight), samples=3)
    assert site.gate.grad is None
    assert (site.mean.grad != 0).any()


# --- Relaxations


@pytest.mark.parametrize("estimator", [name for name in kernels.ESTIMATORS if name != kernels.THRESHOLDED])
def test_relaxed_gradients_have_the_direction_of_the_exact_one(estimator):
    model = regression(4, [0.3, 0.8, 0.5, 0.6])
    (site,) = attachment.sites(model)
    site.sampler.estimator = estimator
    model.train()
    total = torch.zeros(4, dtype=torch.float64)
    for _ in range(800):
        pp.resample_(model)
        total += torch.autograd.grad(squared(model.weight), site.gate)[0].reshape(-1)
    p = pp.read(model).keep_prob["weight"].double().reshape(-1)
    true = exact(model)[1].reshape(-1) * p * (1 - p)
    assert float(torch.dot(total, true) / (total.norm() * true.norm())) > 0.8


def test_the_present_gates_are_those_of_the_weights():
    model = regression(4, [0.5] * 4)
    model.eval()
    (site,) = attachment.sites(model)
    for _ in range(5):
        pp.resample_(model)
        assert torch.equal(estimators._present_gate(site), model.weight != 0)
