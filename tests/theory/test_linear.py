"""Closed forms of the linear model against autograd, enumeration of all masks, and Monte Carlo."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import pacprune as pp
from pacprune.masking import masks
from pacprune.theory import linear
from pacprune.theory.linear import Problem

# (n, D): ordinary, one weight, fewer examples than weights, one example, the largest that is enumerated here.
SIZES = [(30, 4), (9, 1), (4, 7), (1, 3), (40, 12)]


def example(n: int, size: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Correlated features, targets, weights and keep probabilities."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=g, dtype=torch.float64)
    psi = torch.randn(n, size, generator=g, dtype=torch.float64) @ mix
    y, w = torch.randn(n, generator=g, dtype=torch.float64), torch.randn(size, generator=g, dtype=torch.float64)
    return psi, y, w, torch.rand(size, generator=g, dtype=torch.float64)


def every_mask(size: int) -> Tensor:
    return torch.tensor(list(product((0.0, 1.0), repeat=size)), dtype=torch.float64)


def enumerated_risk(psi: Tensor, y: Tensor, w: Tensor, lam: Tensor) -> Tensor:
    """The Gibbs risk by its definition: sum over masks of Pr(b) mean (psi'(b * w) - y)^2 / 2."""
    b = every_mask(len(w))
    chance = torch.where(b > 0, lam, 1 - lam).prod(-1)
    return chance @ ((b * w) @ psi.T - y).square().mean(-1) / 2


def diagonal(size: int, *, seed: int = 0) -> tuple[Problem, Tensor, Tensor]:
    """A problem with uncorrelated features, weights and a prior."""
    g = torch.Generator().manual_seed(seed)
    v, a, w, prior = torch.rand(4, size, generator=g, dtype=torch.float64)
    return Problem(torch.diag(v + 0.5), 2 * a - 1, torch.tensor(2.0).double()), 3 * w - 1, 0.1 + 0.8 * prior


def pair(rho: float, c: float) -> Problem:
    return Problem(
        torch.tensor([[1, rho], [rho, 1]]).double(), torch.tensor([1, c]).double(), torch.tensor(9.0).double()
    )


# --- Risks


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_gibbs_risk_and_its_gradients_are_those_of_the_enumeration(n: int, size: int):
    psi, y, w, lam = example(n, size)
    w.requires_grad_(), lam.requires_grad_()
    p = linear.problem(psi, y)
    truth = enumerated_risk(psi, y, w, lam)
    torch.testing.assert_close(linear.gibbs_risk(p, w, lam), truth, rtol=1e-9, atol=1e-9)
    d_w, d_lam = torch.autograd.grad(truth, (w, lam))
    torch.testing.assert_close(linear.weight_gradient(p, w, lam), d_w, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(linear.keep_prob_gradient(p, w, lam), d_lam, rtol=1e-9, atol=1e-9)
    again = torch.autograd.grad(linear.gibbs_risk(p, w, lam), (w, lam))
    torch.testing.assert_close(again, (d_w, d_lam), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_gibbs_risk_is_the_risk_of_the_mean_plus_the_penalty(n: int, size: int):
    psi, y, w, lam = example(n, size)
    p = linear.problem(psi, y)
    mean = ((lam * w) @ psi.T - y).square().mean() / 2
    torch.testing.assert_close(linear.risk(p, lam * w), mean)
    variance = (lam * (1 - lam) * w**2 * psi.square().mean(0)).sum() / 2
    torch.testing.assert_close(linear.variance_penalty(p, w, lam), variance)
    torch.testing.assert_close(enumerated_risk(psi, y, w, lam) - mean, variance, rtol=1e-9, atol=1e-9)


def test_gibbs_risk_is_the_mean_over_drawn_masks():
    psi, y, w, lam = example(30, 6)
    draws = (torch.rand(200_000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) < lam).double()
    losses = ((draws * w) @ psi.T - y).square().mean(-1) / 2
    error = float(losses.std()) / math.sqrt(len(losses))
    assert abs(float(losses.mean() - linear.gibbs_risk(linear.problem(psi, y), w, lam))) < 4 * error


def test_gibbs_risk_at_keep_prob_0_and_1_and_at_zero_weights():
    psi, y, w, _ = example(12, 5)
    p = linear.problem(psi, y)
    for end, weights in ((1.0, w), (0.0, 0 * w)):
        lam = torch.full((5,), end)
        torch.testing.assert_close(linear.gibbs_risk(p, w, lam), linear.risk(p, weights))
        assert float(linear.variance_penalty(p, w, lam)) == 0
    assert float(linear.gibbs_risk(p, 0 * w, torch.rand(5))) == pytest.approx(float(p.power) / 2)
    assert not linear.keep_prob_gradient(p, 0 * w, torch.rand(5)).any()


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_gradients_at_the_ends_of_keep_prob_and_at_zero_weights_are_those_of_the_enumeration(n: int, size: int):
    psi, y, w, lam = example(n, size)
    p = linear.problem(psi, y)
    ends = [(w, torch.zeros(size).double()), (w, torch.ones(size).double()), (w, lam.round()), (0 * w, lam)]
    for weights, at in ends:
        leaves = weights.clone().requires_grad_(), at.clone().requires_grad_()
        d_w, d_lam = torch.autograd.grad(enumerated_risk(psi, y, *leaves), leaves)
        torch.testing.assert_close(linear.weight_gradient(p, weights, at), d_w, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(linear.keep_prob_gradient(p, weights, at), d_lam, rtol=1e-9, atol=1e-9)


def test_a_batch_of_problems_gives_the_results_of_its_members():
    members = [example(20, 5, seed=s) for s in range(3)]
    psi, y, w, lam = (torch.stack(x) for x in zip(*members, strict=True))
    p, singles = linear.problem(psi, y), [linear.problem(m[0], m[1]) for m in members]
    prior = torch.full((5,), 0.3)
    calls = [
        lambda p, w, lam: linear.gibbs_risk(p, w, lam),
        lambda p, w, lam: linear.keep_prob_gradient(p, w, lam),
        lambda p, w, lam: linear.weight_gradient(p, w, lam),
        lambda p, w, lam: linear.least_squares(p),
        lambda p, w, lam: linear.catoni_gradient(p, w, lam, prior=prior, kappa=0.1),
        lambda p, w, lam: linear.flow(
            lambda x: linear.keep_prob_gradient(p, w, x), lam, lr=0.01, steps=5, sparsity=0.6
        )[-1],
    ]
    for call in calls:
        one_by_one = torch.stack([call(s, m[2], m[3]) for s, m in zip(singles, members, strict=True)])
        torch.testing.assert_close(call(p, w, lam), one_by_one, rtol=1e-9, atol=1e-9)


# --- Least squares


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_least_squares_is_the_minimiser_of_least_norm(n: int, size: int):
    psi, y, _, _ = example(n, size)
    p = linear.problem(psi, y)
    torch.testing.assert_close(linear.least_squares(p), torch.linalg.pinv(psi) @ y, rtol=1e-6, atol=1e-9)


def test_fewer_examples_than_weights_are_fitted_exactly():
    psi, y, _, _ = example(4, 7)
    p = linear.problem(psi, y)
    w = linear.least_squares(p)
    assert abs(float(linear.risk(p, w))) < 1e-9
    assert linear.best_mask(p, w).mask.all()
    path = linear.flow(lambda lam: linear.keep_prob_gradient(p, w, lam), torch.full((7,), 0.5), lr=0.01, steps=50)
    assert (linear.gibbs_risk(p, w, path).diff() <= 1e-12).all()


def test_a_repeated_feature_shares_its_weight():
    psi, y, _, _ = example(30, 1)
    w = linear.least_squares(linear.problem(psi, y))
    of_copies = linear.least_squares(linear.problem(torch.cat([psi, psi], 1), y))
    torch.testing.assert_close(of_copies, torch.cat([w, w]) / 2)


def test_least_squares_is_differentiable():
    psi, y, _, _ = example(10, 3)
    assert torch.autograd.gradcheck(lambda y: linear.least_squares(linear.problem(psi, y)), y.requires_grad_())


def test_with_least_squares_weights_keeping_all_is_optimal():
    psi, y, _, _ = example(40, 8)
    p = linear.problem(psi, y)
    w = linear.least_squares(p)
    assert linear.best_mask(p, w).mask.all()
    slope = linear.keep_prob_gradient(p, w, torch.ones(8))
    torch.testing.assert_close(slope, -(w**2) * p.covariance.diagonal() / 2, rtol=1e-9, atol=1e-9)


# --- Masks


@pytest.mark.parametrize(("n", "size"), SIZES)
@pytest.mark.parametrize("kept", [None, 0, 1, "all"])
def test_the_best_mask_has_the_least_risk_of_all_masks(n: int, size: int, kept: int | str | None):
    psi, y, w, _ = example(n, size)
    k = size if kept == "all" else kept
    b = every_mask(size)
    b = b if k is None else b[b.sum(-1) == k]
    risks = ((b * w) @ psi.T - y).square().mean(-1) / 2
    best = linear.best_mask(linear.problem(psi, y), w, kept=k)  # type: ignore[arg-type]
    assert best.exact
    assert k is None or int(best.mask.sum()) == k
    torch.testing.assert_close(best.risk, risks.min(), rtol=1e-9, atol=1e-9)


def test_the_best_mask_is_at_least_as_good_as_every_distribution():
    psi, y, w, _ = example(20, 6)
    p = linear.problem(psi, y)
    lam = torch.rand(1000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert linear.best_mask(p, w).risk <= linear.gibbs_risk(p, w, lam).min()


@pytest.mark.parametrize("kept", [None, 7])
def test_the_exchange_search_ends_where_no_exchange_helps(kept: int | None):
    psi, y, w, _ = example(60, 20)
    p = linear.problem(psi, y)
    w = linear.least_squares(p) + 0.1 * w
    best = linear.best_mask(p, w, kept=kept)
    assert not best.exact
    assert kept is None or int(best.mask.sum()) == kept
    for out in best.mask.nonzero()[:, 0]:
        for into in (~best.mask).nonzero()[:, 0]:
            other = best.mask.clone()
            other[out], other[into] = False, True
            assert linear.risk(p, other * w) >= best.risk - 1e-9


def test_the_exchange_search_is_near_the_exact_optimum(monkeypatch: pytest.MonkeyPatch):
    exact, searched = [], []
    for seed in range(20):
        psi, y, w, _ = example(30, 10, seed=seed)
        p = linear.problem(psi, y)
        exact.append(linear.best_mask(p, w, kept=4).risk)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "ENUMERATE", 0)
            searched.append(linear.best_mask(p, w, kept=4).risk)
    assert all(s >= e - 1e-9 for s, e in zip(searched, exact, strict=True))
    assert sum(float(s - e) < 1e-9 for s, e in zip(searched, exact, strict=True)) >= 12


# --- Gradient flow


def test_flow_descends_to_a_mask_and_without_a_budget_keeps_all_of_least_squares():
    psi, y, _, _ = example(40, 6)
    p = linear.problem(psi, y)
    w = linear.least_squares(p)
    path = linear.flow(lambda lam: linear.keep_prob_gradient(p, w, lam), torch.full((6,), 0.9), lr=0.02, steps=5000)
    assert (linear.gibbs_risk(p, w, path).diff() <= 1e-12).all()
    torch.testing.assert_close(path[-1], torch.ones(6, dtype=torch.float64))


def test_flow_with_a_budget_holds_it_and_ranks_uncorrelated_features_by_normalised_alignment():
    p, _, _ = diagonal(8)
    w = linear.least_squares(p)
    start = torch.full((8,), 0.25)
    path = linear.flow(lambda lam: linear.keep_prob_gradient(p, w, lam), start, lr=0.05, steps=3000, sparsity=0.75)
    torch.testing.assert_close(path.mean(-1), torch.full((3001,), 0.25, dtype=torch.float64), rtol=0, atol=1e-9)
    score = p.alignment.abs() / p.covariance.diagonal().sqrt()
    mask = masks.top_k({"w": path[-1]}, sparsity=0.75)["w"]
    assert torch.equal(mask, masks.top_k({"w": score}, sparsity=0.75)["w"])
    assert torch.equal(mask, linear.best_mask(p, w, kept=2).mask)


def test_the_flow_of_one_weight_and_of_zero_weights():
    psi, y, _, _ = example(9, 1)
    p = linear.problem(psi, y)
    w = linear.least_squares(p)
    start = torch.full((1,), 0.5)
    slope = lambda lam: linear.keep_prob_gradient(p, w, lam)  # noqa: E731
    assert linear.flow(slope, start, lr=100.0, steps=50)[-1].tolist() == [1.0]
    assert linear.flow(slope, start, lr=100.0, steps=50, sparsity=0.5)[-1].tolist() == pytest.approx([0.5], abs=1e-9)
    path = linear.flow(lambda lam: linear.keep_prob_gradient(p, 0 * w, lam), start, lr=100.0, steps=5)
    assert path.unique().tolist() == [0.5]
    assert not linear.best_mask(p, 0 * w).mask.any()  # of equal masks the first
    assert linear.fixed_point(start, linear.drift(p, 0 * w), kappa=0.1).keep_prob.tolist() == [0.5]


# --- The PAC-Bayes objective


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_the_objective_is_risk_plus_kl_and_its_gradient_is_that_of_autograd(n: int, size: int):
    psi, y, w, lam = example(n, size)
    p, prior = linear.problem(psi, y), torch.full((size,), 0.3).double()
    lam.requires_grad_()
    value = linear.catoni_objective(p, w, lam, prior=prior, kappa=0.2)
    divergence = sum(pp.bounds.kl_bernoulli(a, b) for a, b in zip(lam.tolist(), prior.tolist(), strict=True))
    assert float((value - linear.gibbs_risk(p, w, lam)).detach()) == pytest.approx(0.2 * divergence, rel=1e-9)
    (slope,) = torch.autograd.grad(value, lam)
    torch.testing.assert_close(linear.catoni_gradient(p, w, lam, prior=prior, kappa=0.2), slope, rtol=1e-9, atol=1e-9)


def test_kl_at_keep_prob_0_and_1():
    lam, prior = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 0.5]), torch.tensor([0.3, 0.3, 0.0, 1.0, 0.0, 1.0])
    expected = torch.tensor([-math.log1p(-0.3), -math.log(0.3), 0, 0, math.inf, math.inf]).double()
    torch.testing.assert_close(linear.kl(lam, prior), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kappa", [0.01, 0.3, 5.0])
def test_the_fixed_point_minimises_the_objective(kappa: float):
    p, w, prior = diagonal(9)
    delta = linear.drift(p, w)
    point = linear.fixed_point(prior, delta, kappa=kappa)
    lam = point.keep_prob.clamp(1e-9, 1 - 1e-9)
    slope = linear.catoni_gradient(p, w, lam, prior=prior, kappa=kappa)
    inside = (point.keep_prob > 1e-9) & (point.keep_prob < 1 - 1e-9)
    torch.testing.assert_close(slope[inside], torch.zeros_like(slope[inside]), rtol=0, atol=1e-9)
    torch.testing.assert_close(point.kl, linear.kl(point.keep_prob, prior), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(point.value, delta * point.keep_prob + kappa * point.kl, rtol=1e-9, atol=1e-9)
    objective = linear.catoni_objective(p, w, point.keep_prob, prior=prior, kappa=kappa)
    torch.testing.assert_close(objective, p.power / 2 + point.value.sum(), rtol=1e-9, atol=1e-9)
    grid = torch.linspace(0, 1, 1001).double()[:, None]
    assert (delta * grid + kappa * linear.kl(grid, prior) >= point.value - 1e-12).all()


def test_the_flow_of_the_objective_ends_at_the_fixed_point():
    p, w, prior = diagonal(5)
    path = linear.flow(
        lambda lam: linear.catoni_gradient(p, w, lam, prior=prior, kappa=0.5), prior, lr=0.05, steps=2000, eta=1e-4
    )
    torch.testing.assert_close(path[-1], linear.fixed_point(prior, linear.drift(p, w), kappa=0.5).keep_prob)


def test_the_fixed_point_is_differentiable_and_its_value_has_slope_lam():
    _, _, prior = diagonal(4)
    delta = torch.tensor([-0.7, -0.1, 0.2, 1.1]).double().requires_grad_()
    value = linear.fixed_point(prior, delta, kappa=0.4)
    (slope,) = torch.autograd.grad(value.value.sum(), delta)
    torch.testing.assert_close(slope, value.keep_prob)


def test_small_and_large_drift_approach_the_fixed_point():
    prior = torch.tensor([0.05, 0.3, 0.5, 0.9]).double()
    for sign in (-1.0, 1.0):
        errors = []
        for eta in (1e-2, 1e-3):
            delta = torch.full((4,), sign * eta * 0.2).double()
            exact, near = (f(prior, delta, kappa=0.2) for f in (linear.fixed_point, linear.small_drift))
            errors.append([(a - b).abs() for a, b in zip(near, exact, strict=True)])
        # The order of each error: a tenth of the drift leaves a hundredth of keep_prob's, a thousandth of the others'.
        for coarse, fine, order in zip(*errors, (2, 3, 3), strict=True):
            assert (fine <= 1.1 * coarse / 10**order + 1e-15).all()
        delta = torch.full((4,), sign * 40 * 0.2).double()
        exact, far = (f(prior, delta, kappa=0.2) for f in (linear.fixed_point, linear.large_drift))
        for a, b in zip(far, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_prior_at_an_end_stays_there_and_huge_drifts_stay_finite():
    prior = torch.tensor([0.0, 1.0, 0.4, 0.4])
    point = linear.fixed_point(prior, torch.tensor([3.0, -3.0, 1e6, -1e6]), kappa=0.1)
    torch.testing.assert_close(point.keep_prob, torch.tensor([0.0, 1.0, 0.0, 1.0]).double())
    assert point.kl[:2].abs().max() == 0
    assert point.kl[2:].tolist() == pytest.approx([-math.log(0.6), -math.log(0.4)], rel=1e-6)


# --- Two correlated features


@pytest.mark.parametrize(("rho", "c"), [(0.9, 0.5), (-0.4, 1.7), (0.3, -2.0)])
def test_the_formulas_of_a_correlated_pair_agree_with_autograd(rho: float, c: float):
    p = pair(rho, c)
    w = linear.pair_least_squares(p)
    torch.testing.assert_close(w, linear.least_squares(p), rtol=1e-9, atol=1e-9)
    lam = linear.pair_stationary(p, w).requires_grad_()
    mean = lam * w
    risk = linear.risk(p, mean) + (lam * (1 - lam) * w**2).sum() / 2  # lam may lie outside [0, 1] here
    (slope,) = torch.autograd.grad(risk, lam)
    torch.testing.assert_close(slope, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-9)
    ratio = linear.pair_ratio(torch.tensor(c).double(), torch.tensor(rho).double())
    torch.testing.assert_close(ratio, lam[0] / lam[1], rtol=1e-6, atol=1e-9)


def test_the_stationary_point_of_a_pair_is_a_saddle():
    p = pair(0.9, 0.5)
    w = linear.pair_least_squares(p)
    lam = linear.pair_stationary(p, w)
    assert ((lam > 0) & (lam < 1)).all()
    hessian = torch.autograd.functional.hessian(lambda x: linear.gibbs_risk(p, w, x), lam)
    h = 0.9 * w.prod()
    torch.testing.assert_close(torch.linalg.eigvalsh(hessian), torch.stack([-h.abs(), h.abs()]), rtol=1e-6, atol=1e-9)


def test_pair_least_squares_allows_variances_other_than_one():
    p = Problem(torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([1.0, -0.4]).double(), torch.tensor(4.0))
    torch.testing.assert_close(linear.pair_least_squares(p), torch.linalg.solve(p.covariance, p.alignment))


# --- Refusals

P = linear.problem(*example(10, 3)[:2])
W, L = torch.ones(3), torch.full((3,), 0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear.problem(torch.ones(4, 2), torch.ones(3)), r"\(4, 2\) and targets \(3,\)"),
        (lambda: linear.problem(torch.ones(0, 2), torch.ones(0)), "n and D at least 1"),
        (lambda: linear.problem(torch.tensor([[math.nan]]), torch.ones(1)), "1 features and 0 targets"),
        (lambda: linear.gibbs_risk(P, torch.ones(2), L), r"weights has shape \(2,\)"),
        (lambda: linear.gibbs_risk(P, W, (3 * L).requires_grad_()), "from 1.5 to 1.5"),
        (lambda: linear.best_mask(P, W, kept=4), "kept is 4, but there are 3"),
        (lambda: linear.best_mask(P, torch.ones(2, 3)), "one problem"),
        (lambda: linear.drift(P, W), "correlated"),
        (lambda: linear.fixed_point(L, W, kappa=0.0), "kappa is 0.0"),
        (lambda: linear.fixed_point(2 * W, W, kappa=1.0), "prior runs"),
        (lambda: linear.flow(lambda x: x, L, lr=0.0, steps=1), "lr is 0.0"),
        (lambda: linear.flow(lambda x: x, L, lr=0.1, steps=1, sparsity=90), "outside"),
        (lambda: linear.pair_least_squares(P), "2 features, not 3"),
        (lambda: linear.pair_least_squares(pair(1.0, 1.0)), "singular"),
        (lambda: linear.pair_stationary(pair(0.0, 1.0), torch.ones(2)), "no isolated"),
    ],
)
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
