"""SpikeSlab: initialisers with an exact mean, the KL in 50 digits and its gradient, hashes, draws."""

import math
import warnings
from dataclasses import FrozenInstanceError, replace

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune import kernels
from pacprune.data import trace
from pacprune.masking import criteria, spikeslab, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_weights, kl, kl_per_layer

SAMPLED = 2e-6
"""A keep_prob nearer to 1 than this could not be sampled as such, so that sparsity 0 is met to this only."""


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))


def first_layer(model: nn.Module) -> dict[str, torch.Tensor]:
    return {"0.weight": weights.prunable(model)["0.weight"]}


def slab_of(lam: object, mean: object = 0.0, std: object = 0.0) -> SpikeSlab:
    """A SpikeSlab of one tensor w, without a model."""
    keep_prob = torch.as_tensor(lam)
    return SpikeSlab(
        keep_prob={"w": keep_prob},
        mean={"w": torch.as_tensor(mean).expand(keep_prob.shape)},
        std={"w": torch.as_tensor(std)},
        rest={},
        total=keep_prob.numel(),
    )


def everywhere(slab: SpikeSlab) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in slab.keep_prob.values()]).double()


# --- Initialisers


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_isotropic_has_one_keep_prob_and_the_requested_sparsity(sparsity):
    slab = pp.isotropic(net(), sparsity=sparsity, std=0.1)
    assert list(slab.keep_prob) == ["0.weight", "2.weight"]
    assert everywhere(slab).sub(1 - sparsity).abs().max() < 1e-7
    assert slab.sparsity == pytest.approx(sparsity, abs=1e-7)
    assert slab.total == 900


def test_a_slab_holds_copies_of_all_tensors():
    model = net()
    weights.mark_seen(model, trace.of(torch.tensor([3, 1]), torch.tensor([4])))
    slab = pp.isotropic(model, sparsity=0.5, std=0.1)
    before = slab.hash
    assert slab.seen.examples.tolist() == [1, 3]
    assert set(slab.mean) | set(slab.rest) == set(model.state_dict())
    assert set(slab.mean).isdisjoint(slab.rest)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert slab.hash == before
    with pytest.raises(FrozenInstanceError):
        slab.total = 3


def test_sparsity_counts_the_weights_that_are_never_pruned():
    model = net()
    slab = pp.isotropic(model, sparsity=0.5, prunable=first_layer)
    assert slab.total == 900
    assert slab.sparsity == pytest.approx(0.5, abs=1e-7)
    assert everywhere(slab).sub(1 - 450 / 600).abs().max() < 1e-7
    assert "2.weight" in slab.rest
    monotone = pp.score_monotone(model, criteria.magnitude(model, prunable=first_layer), sparsity=0.5)
    assert monotone.sparsity == pytest.approx(0.5, abs=1e-6)
    for make in (
        lambda: pp.isotropic(model, sparsity=0.7, prunable=first_layer),
        lambda: pp.score_monotone(model, criteria.magnitude(model, prunable=first_layer), sparsity=0.7),
    ):
        with pytest.raises(ValueError, match=r"sparsity 0\.7 of 900 weights cannot be met by pruning 600 of them"):
            make()


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("eps", [1e-5, 1e-4, 1e-3])
def test_block_isotropic_has_two_values_and_the_mean_of_its_mask(sparsity, eps):
    model = net()
    mask = pp.top_k(criteria.magnitude(model), sparsity=sparsity)
    slab = pp.block_isotropic(model, mask, eps=eps)
    keep = torch.cat([m.reshape(-1) for m in mask.values()])
    k, p = int(keep.sum()), everywhere(slab)
    assert float(p.mean()) == pytest.approx(k / 900, abs=SAMPLED)
    assert torch.allclose(p[~keep], torch.tensor(eps).double(), rtol=1e-5)
    assert torch.allclose(p[keep], torch.tensor(1 - (900 - k) * eps / k).double(), atol=1.1e-6)


def test_an_eps_too_large_for_the_sparsity_is_refused():
    model = net()
    mask = pp.top_k(criteria.magnitude(model), sparsity=0.9)
    with pytest.raises(ValueError, match=r"eps 0\.2 is too large for sparsity 0\.9000.*use an eps below 0\.1"):
        pp.block_isotropic(model, mask, eps=0.2)
    for eps in (0.0, 1e-6, 0.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"eps is .*; it must lie in \[1e-05, 0\.5\)"):
            pp.block_isotropic(model, mask, eps=eps)
    with pytest.raises(ValueError, match="the mask keeps 0 of 900 weights"):
        pp.block_isotropic(model, {n: torch.zeros_like(m) for n, m in mask.items()}, eps=1e-3)
    with pytest.raises(ValueError, match=r"'3\.weight' is not among the model's weights: 0\.weight, 2\.weight"):
        pp.block_isotropic(model, {**mask, "3.weight": mask["0.weight"]}, eps=1e-3)


@pytest.mark.parametrize("size", [500, 540, 1000, 1010, 1049, 26_661])
def test_equal_blocks_give_a_warning_for_every_size(size):
    model = nn.Linear(size, 1)
    mask = pp.top_k(criteria.magnitude(model), sparsity=0.99)
    with pytest.warns(UserWarning, match="the mask is forgotten"):
        slab = pp.block_isotropic(model, mask, eps=0.01)
    assert slab.sparsity == pytest.approx(1 - int(mask["weight"].sum()) / size, abs=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pp.block_isotropic(model, mask, eps=1e-3)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("criterion", ["magnitude", "grasp", "random"])
def test_score_monotone_keeps_the_order_and_the_budget(criterion, sparsity):
    model = net()
    x, y = torch.randn(40, 20, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
    scores = criteria.score(criterion, model, (x, y))
    slab = pp.score_monotone(model, scores, sparsity=sparsity)
    assert slab.sparsity == pytest.approx(sparsity, abs=SAMPLED if sparsity == 0 else 1e-6)
    assert slab.sparsity >= sparsity
    order = torch.cat([s.reshape(-1) for s in scores.values()]).argsort()
    p = everywhere(slab)[order]
    assert (p.diff() >= 0).all()
    assert p.min() > 0
    assert p.max() < 1
    if sparsity == 0.5:
        assert p[-1] > p[0]
        scaled = pp.score_monotone(model, {n: 1e-12 * s for n, s in scores.items()}, sparsity=sparsity)
        assert torch.allclose(everywhere(scaled)[order], p, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e300])
def test_equal_scores_get_equal_probabilities(value):
    model = net()
    equal = {n: torch.full_like(w, value, dtype=torch.float64) for n, w in weights.prunable(model).items()}
    assert everywhere(pp.score_monotone(model, equal, sparsity=0.9)).sub(0.1).abs().max() < 1e-6


@pytest.mark.parametrize("std", [-1.0, math.inf, math.nan])
def test_an_invalid_std_is_refused(std):
    with pytest.raises(ValueError, match=r"std is .*; it must be 0"):
        pp.isotropic(net(), sparsity=0.5, std=std)


@pytest.mark.parametrize("sparsity", [1.0, -0.1, math.nan])
def test_a_wrong_sparsity_is_refused(sparsity):
    model = net()
    for make in (pp.isotropic, lambda m, sparsity: pp.score_monotone(m, criteria.magnitude(m), sparsity=sparsity)):
        with pytest.raises(ValueError, match=r"is outside \[0, 1\)"):
            make(model, sparsity=sparsity)


# --- KL


def exact_kl(lam: float, lam0: float, m: float, m0: float, s: float, s0: float) -> mpmath.mpf:
    """The divergence of one weight in 50 digits; 0 log 0 = 0."""
    lam, lam0, m, m0, s, s0 = (mpmath.mpf(v) for v in (lam, lam0, m, m0, s, s0))
    gate = sum((a * mpmath.log(a / b) for a, b in ((lam, lam0), (1 - lam, 1 - lam0)) if a > 0), mpmath.mpf(0))
    return gate + lam / 2 * (((m - m0) / s0) ** 2 + (s / s0) ** 2 - mpmath.log((s / s0) ** 2) - 1)


def test_kl_agrees_with_50_digit_arithmetic_weight_by_weight():
    rng = np.random.default_rng(0)
    size = 300
    lam, lam0 = (np.float32(1 / (1 + np.exp(rng.uniform(-14, 14, size)))) for _ in range(2))
    lam[:100] = np.float32(np.clip(lam0[:100] * (1 + 1e-3 * rng.standard_normal(100)), 0, 1))  # near its prior
    lam[100:120], lam[120:140] = 0.0, 1.0
    mean, mean0 = (np.float32(rng.standard_normal(size)) for _ in range(2))
    std, std0 = (np.float32(np.exp(rng.uniform(-9, 0, size))) for _ in range(2))
    with mpmath.workdps(50):
        for i in range(size):
            q, p = slab_of(lam[i : i + 1], mean[i], std[i]), slab_of(lam0[i : i + 1], mean0[i], std0[i])
            row = [float(v[i]) for v in (lam, lam0, mean, mean0, std, std0)]
            assert float(kl(q, p)) == pytest.approx(float(exact_kl(*row)), rel=1e-12), row
            row[2:] = [0.0, 0.0, 1.0, 1.0]  # the gates alone, down to the smallest
            gate = float(kl(slab_of(lam[i : i + 1]), slab_of(lam0[i : i + 1])))
            assert gate == pytest.approx(float(exact_kl(*row)), rel=1e-9, abs=1e-18), row


@pytest.mark.parametrize(
    ("lam", "lam0", "expected"),
    [
        (0.0, 0.25, -math.log(0.75)),
        (1.0, 0.25, -math.log(0.25)),
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 0.0),
        (0.5, 0.0, math.inf),
        (0.5, 1.0, math.inf),
        (1.0, 0.0, math.inf),
        (0.0, 1.0, math.inf),
        (2.0**-32, 0.0, math.inf),
        (math.nan, 0.5, math.inf),
        (0.5, math.nan, math.inf),
        (-0.5, 0.5, math.inf),
        (1.5, 0.5, math.inf),
    ],
)
def test_kl_at_and_beyond_the_ends(lam, lam0, expected):
    assert float(kl(slab_of([lam]), slab_of([lam0]))) == pytest.approx(expected)


def test_kl_of_a_distribution_to_itself_is_zero_and_to_others_the_sum_over_layers():
    model = net()
    q = pp.score_monotone(model, criteria.magnitude(model), sparsity=0.9, std=0.01)
    p = pp.isotropic(net(1), sparsity=0.8, std=0.02)
    assert float(kl(q, q)) == 0
    layers = kl_per_layer(q, p)
    assert list(layers) == ["0.weight", "2.weight"]
    assert all(float(v) > 0 for v in layers.values())
    assert float(kl(q, p)) == pytest.approx(sum(float(v) for v in layers.values()))
    assert kl(q, p).dtype == torch.float64
    assert float(kl(q, p, dtype=torch.float32)) == pytest.approx(float(kl(q, p)), rel=1e-5)


def test_kl_in_float32_stays_finite_where_the_prior_is_nearly_zero():
    q, p = slab_of([0.5, 1 - 2.0**-24]), slab_of([2.0**-32, 8.4e-7])
    assert float(kl(q, p, dtype=torch.float32)) == pytest.approx(float(kl(q, p)), rel=1e-6)


def test_gradients_of_kl_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    lam, lam0 = (0.02 + 0.96 * torch.rand(12, generator=generator, dtype=torch.float64) for _ in range(2))
    mean, mean0 = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    std = 0.1 + torch.rand(12, generator=generator, dtype=torch.float64)
    prior = slab_of(lam0, mean0, torch.tensor(0.5).double())
    inputs = [t.requires_grad_() for t in (lam, mean, std)]
    assert torch.autograd.gradcheck(lambda a, m, s: kl(slab_of(a, m, s), prior), inputs)
    # And far from the prior, where the two formulas of the logarithm meet.
    ends = torch.tensor([1e-6, 0.3, 0.6, 1 - 1e-6], dtype=torch.float64, requires_grad=True)
    for other in ([0.9, 0.15, 0.3, 1e-6], [1e-5, 0.149, 0.301, 0.5]):
        gradient = torch.autograd.grad(kl(slab_of(ends), slab_of(torch.tensor(other).double())), ends)[0]
        expected = torch.logit(ends) - torch.logit(torch.tensor(other).double())
        assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-9)


def test_an_infinite_kl_of_slabs_is_an_error_that_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"means differ by up to 0\.5 but std is 0.*train the gates only, or give a std"
    ):
        kl(slab_of([0.5], 1.0), slab_of([0.5], 0.5))
    for std, std0 in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="std is 0 in one of Q and P only"):
            kl(slab_of([0.5], std=std), slab_of([0.5], std=std0))
    assert float(kl(slab_of([0.5], 1.0), slab_of([0.25], 1.0))) > 0
    with pytest.raises(ValueError, match="different tensors"):
        kl(slab_of([0.5]), replace(slab_of([0.5]), keep_prob={"v": torch.tensor([0.5])}))
    with pytest.raises(ValueError, match=r"w has shape \(1,\) in Q but \(2,\) in P"):
        kl(slab_of([0.5]), slab_of([0.5, 0.5]))


def stacked(slabs: list[SpikeSlab]) -> SpikeSlab:
    """The members as one value, every tensor with a leading model dimension."""
    parts = {}
    for part in ("keep_prob", "mean", "std"):
        values = [getattr(slab, part) for slab in slabs]
        parts[part] = {n: torch.stack([value[n].expand_as(slabs[0].mean[n]) for value in values]) for n in values[0]}
    return SpikeSlab(**parts, rest={}, total=slabs[0].total)


@pytest.mark.parametrize("std", [0.0, 0.1])
def test_the_kl_of_members_is_that_of_each_member(std):
    models = [net(0), net(1), net(2)]
    q = [pp.score_monotone(m, criteria.magnitude(m), sparsity=0.9, std=std) for m in models]
    p = [pp.isotropic(m, sparsity=s, std=2 * std) for m, s in zip(models, (0.9, 0.5, 0.1), strict=True)]
    expected = torch.stack([kl(a, b) for a, b in zip(q, p, strict=True)])
    for check in (True, False):
        divergences = kl(stacked(q), stacked(p), members=True, check=check)
        assert torch.allclose(divergences, expected, rtol=1e-12)
        assert float(kl(stacked(q), stacked(p), check=check)) == pytest.approx(float(expected.sum()), rel=1e-12)


def test_without_the_check_an_infinite_kl_is_infinite():
    assert float(kl(slab_of([0.5, 0.5]), slab_of([0.5, 0.5]), check=False)) == 0
    assert float(kl(slab_of([0.5], 1.0), slab_of([0.5], 0.5), check=False)) == math.inf
    for std, std0 in ((0.0, 1.0), (1.0, 0.0)):
        assert float(kl(slab_of([0.5], std=std), slab_of([0.5], std=std0), check=False)) == math.inf
    lam = torch.tensor([0.2, 0.5], requires_grad=True)
    gradient = torch.autograd.grad(kl(slab_of(lam), slab_of([0.5, 0.5]), check=False), lam)[0]
    assert torch.allclose(gradient, torch.logit(lam.detach()), atol=1e-6)


# --- Hash and draws


def test_the_hash_depends_on_every_tensor_but_not_on_their_order():
    slab = pp.isotropic(net(), sparsity=0.5, std=0.1)
    hashes = {slab.hash}
    for part in ("keep_prob", "mean", "std", "rest"):
        for name, tensor in getattr(slab, part).items():
            changed = tensor.clone()
            changed.reshape(-1)[-1] += 1
            other = replace(slab, **{part: {**getattr(slab, part), name: changed}})
            hashes.add(other.hash)
        hashes.add(replace(slab, **{part: {f"x{n}": t for n, t in getattr(slab, part).items()}}).hash)
    reshaped = {n: p.T.contiguous() for n, p in slab.keep_prob.items()}
    hashes |= {replace(slab, keep_prob=reshaped).hash}
    hashes |= {replace(slab, std={n: s.double() for n, s in slab.std.items()}).hash}
    assert len(hashes) == 1 + 2 + 2 + 2 + 7 + 4 + 2
    reordered = {n: t.clone() for n, t in reversed(list(slab.mean.items()))}
    assert replace(slab, mean=reordered).hash == slab.hash
    assert len(slab.hash) == 64


def test_a_draw_is_a_function_of_seed_and_step():
    model = net()
    slab = pp.isotropic(model, sparsity=0.5, std=0.1)
    before = torch.get_rng_state()
    first, again = draw_weights(slab, seed=3, step=5), draw_weights(slab, seed=3, step=5)
    assert torch.equal(before, torch.get_rng_state())
    for name, w in first.items():
        assert torch.equal(w, again[name])
        assert w.dtype == slab.mean[name].dtype
        assert not torch.equal(w, draw_weights(slab, seed=4, step=5)[name])
        assert not torch.equal(w, draw_weights(slab, seed=3, step=6)[name])
        assert 0.35 < float((w == 0).float().mean()) < 0.65


def test_a_draw_without_width_is_the_mean_or_exactly_zero():
    slab = pp.isotropic(net(), sparsity=0.5)
    for name, w in draw_weights(slab, seed=0, step=0).items():
        assert torch.equal(w, torch.where(w != 0, slab.mean[name], 0.0))


@pytest.mark.parametrize("std", [0.0, 0.1])
def test_a_draw_equals_the_weights_of_the_attached_model(std):
    model = net()
    pp.attach(model, pp.score_monotone(model, criteria.magnitude(model), sparsity=0.7, std=std), seed=11).eval()
    for step in range(1, 4):
        pp.resample_(model)
        weights = draw_weights(pp.read(model), seed=11, step=step)
        assert torch.equal(weights["0.weight"], model[0].weight)
        assert torch.equal(weights["2.weight"], model[2].weight)


def test_gates_of_probability_0_and_1_never_vary():
    slab = slab_of(torch.tensor([0.0, 1.0]).repeat(50_000), mean=1.0)
    assert torch.equal(draw_weights(slab, seed=0, step=0)["w"], slab.keep_prob["w"])


def test_probabilities_are_stored_as_they_are_sampled():
    model = net()
    slab = pp.score_monotone(model, criteria.magnitude(model), sparsity=0.9)
    for p in slab.keep_prob.values():
        assert p.dtype == torch.float32
        assert torch.equal(kernels.quantised(p), p)
    assert repr(slab) == "SpikeSlab(2 tensors, 900 weights, expected sparsity 0.9000)"
    assert spikeslab.ETA >= 1e-5
