"""Stochastic masks in linear regression, where every quantity of the theory has a closed form.

Features psi_n and targets y_n enter through three averages (`Problem`). Masks are b_i ~ Bernoulli(keep_prob_i),
independent, and the loss of a prediction is (psi'(b * w) - y)^2 / 2. All is float64 and differentiable; dimensions
before the last one (before the last two of features) are a batch.

    p = pp.linear.problem(features, targets)
    w = pp.linear.least_squares(p)
    pp.linear.gibbs_risk(p, w, keep_prob)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from pacprune.masking import masks

__all__ = [
    "ENUMERATE",
    "RANK",
    "BestMask",
    "FixedPoint",
    "Problem",
    "best_mask",
    "catoni_gradient",
    "catoni_objective",
    "drift",
    "fixed_point",
    "flow",
    "gibbs_risk",
    "keep_prob_gradient",
    "kl",
    "large_drift",
    "least_squares",
    "pair_least_squares",
    "pair_ratio",
    "pair_stationary",
    "problem",
    "risk",
    "small_drift",
    "variance_penalty",
    "weight_gradient",
]

ENUMERATE = 16
"""Up to this many weights `best_mask` tries every mask; beyond it searches by exchange."""

RANK = 1e-12
"""Eigenvalues of the covariance below this fraction of the largest count as zero."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The averages of the data that a squared loss depends on: the risk of w is (w'Sigma w - 2 w'A + power) / 2.

    `problem` makes it from features and targets.

    Args:
        covariance: Sigma = mean of psi psi', shape (..., D, D). These are second moments: centre the features for
            true covariances.
        alignment: A = mean of psi y, shape (..., D).
        power: Mean of y^2, shape (...).

    Example:
        >>> p = pp.linear.Problem(torch.eye(2).double(), torch.tensor([1.0, 2.0]).double(), torch.tensor(5.0).double())
        >>> pp.linear.least_squares(p)
        tensor([1., 2.], dtype=torch.float64)
    """

    covariance: Tensor
    alignment: Tensor
    power: Tensor


class BestMask(NamedTuple):
    """What `best_mask` returns.

    Args:
        mask: True where a weight is kept, shape (D,).
        risk: The risk of the masked weights.
        exact: Whether the mask is proved best, since every mask was tried.

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> pp.linear.best_mask(p, torch.tensor([1.0, 2.0]), kept=1).exact
        True
    """

    mask: Tensor
    risk: Tensor
    exact: bool


class FixedPoint(NamedTuple):
    """The minimum over lam of drift * lam + kappa * kl(lam||lam0), for every gate.

    Args:
        keep_prob: Where the minimum is.
        kl: kl(lam||lam0) there, in nats.
        value: The value of the minimum.

    Example:
        >>> point = pp.linear.fixed_point(torch.tensor([0.5]), torch.tensor([0.0]), kappa=0.1)
        >>> point.keep_prob, point.kl
        (tensor([0.5000], dtype=torch.float64), tensor([...], dtype=torch.float64))
    """

    keep_prob: Tensor
    kl: Tensor
    value: Tensor


# --- The problem


def problem(features: Tensor, targets: Tensor) -> Problem:
    """Sigma, A and mean y^2 of features and targets: all that a squared loss depends on.

    Args:
        features: psi of shape (..., n, D); any n >= 1, also n < D.
        targets: y of shape (..., n).

    Returns:
        The `Problem`, in float64.

    Raises:
        ValueError: If the shapes do not fit, or a number is not finite.

    Example:
        >>> p = pp.linear.problem(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
        >>> p.covariance.tolist(), p.alignment.tolist(), float(p.power)
        ([[1.0, 1.0], [1.0, 2.0]], [2.0, 3.0], 5.0)
    """
    if features.ndim < 2 or features.shape[:-1] != targets.shape or 0 in features.shape:
        raise ValueError(
            f"features have shape {tuple(features.shape)} and targets {tuple(targets.shape)}; "
            "give features (..., n, D) and targets (..., n) with n and D at least 1"
        )
    psi, y = features.double(), targets.double()
    if not bool(psi.isfinite().all() and y.isfinite().all()):
        bad = int((~psi.isfinite()).sum()), int((~y.isfinite()).sum())
        raise ValueError(f"{bad[0]} features and {bad[1]} targets are not finite; remove those examples")
    n = psi.shape[-2]
    return Problem(
        covariance=psi.mT @ psi / n,
        alignment=(psi.mT @ y[..., None])[..., 0] / n,
        power=y.square().mean(-1),
    )


def least_squares(p: Problem) -> Tensor:
    """w = Sigma^-1 A; of a singular covariance (n < D, say) the minimiser of least norm, pinv(Sigma) A.

    Args:
        p: The problem.

    Returns:
        Weights of shape (..., D).

    Example:
        >>> p = pp.linear.problem(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
        >>> pp.linear.least_squares(p)
        tensor([1.0000, 1.0000], dtype=torch.float64)
    """
    return _times(torch.linalg.pinv(p.covariance, rtol=RANK, hermitian=True), p.alignment)


# --- Risks


def risk(p: Problem, weights: Tensor) -> Tensor:
    """The risk of one weight vector: (w'Sigma w - 2 w'A + mean y^2) / 2 = mean (psi'w - y)^2 / 2.

    Args:
        p: The problem.
        weights: w of shape (..., D).

    Returns:
        One number for each weight vector.

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> pp.linear.risk(p, torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist()
        [0.0, 1.25]
    """
    w = _vector(p, "weights", weights)
    return ((w * _times(p.covariance, w)).sum(-1) - 2 * (w * p.alignment).sum(-1) + p.power) / 2


def variance_penalty(p: Problem, weights: Tensor, keep_prob: Tensor) -> Tensor:
    """1/2 sum_i lam_i (1 - lam_i) w_i^2 Sigma_ii, which the noise of the mask adds to the risk of the mean.

    Concave in lam and zero at both ends: it pushes lam to 0 or 1, whichever is nearer, not to 0 alone.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].

    Returns:
        One number for each vector of keep probabilities.

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> float(pp.linear.variance_penalty(p, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])))
        0.3125
    """
    w, lam = _vector(p, "weights", weights), _keep_prob(p, keep_prob)
    return (lam * (1 - lam) * w.square() * _variances(p)).sum(-1) / 2


def gibbs_risk(p: Problem, weights: Tensor, keep_prob: Tensor) -> Tensor:
    """Expected risk over masks: R(P) = R(lam * w) + variance_penalty. Multilinear in lam.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].

    Returns:
        One number for each vector of keep probabilities.

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> float(pp.linear.gibbs_risk(p, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])))
        0.625
    """
    mean = _keep_prob(p, keep_prob) * _vector(p, "weights", weights)
    return risk(p, mean) + variance_penalty(p, weights, keep_prob)


def keep_prob_gradient(p: Problem, weights: Tensor, keep_prob: Tensor) -> Tensor:
    """dR(P)/dlam_i = sum_{j != i} lam_j w_i w_j Sigma_ij + w_i^2 Sigma_ii / 2 - w_i A_i.

    That is dR(lam * w)/dlam_i + (1/2 - lam_i) w_i^2 Sigma_ii. It does not depend on lam_i itself.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].

    Returns:
        The gradient, of shape (..., D).

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> pp.linear.keep_prob_gradient(p, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])).tolist()
        [-0.25, -1.0]
    """
    w, lam = _vector(p, "weights", weights), _keep_prob(p, keep_prob)
    return w * (_times(p.covariance, lam * w) - p.alignment) + (0.5 - lam) * w.square() * _variances(p)


def weight_gradient(p: Problem, weights: Tensor, keep_prob: Tensor) -> Tensor:
    """dR(P)/dw_i = lam_i dR(v)/dv_i at v = lam * w, plus lam_i (1 - lam_i) w_i Sigma_ii: the ridge of dropout.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].

    Returns:
        The gradient, of shape (..., D).

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> pp.linear.weight_gradient(p, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])).tolist()
        [0.0, 0.0]
    """
    w, lam = _vector(p, "weights", weights), _keep_prob(p, keep_prob)
    return lam * (_times(p.covariance, lam * w) - p.alignment) + lam * (1 - lam) * w * _variances(p)


# --- Masks


def best_mask(p: Problem, weights: Tensor, *, kept: int | None = None) -> BestMask:
    """The mask b of least risk(b * w) with `kept` ones, at fixed weights, for one problem.

    For D <= 16 all masks are tried, so that the answer is exact. For larger D, weights are added greedily. Then the
    best exchange of a kept and a pruned weight (without `kept`, also the best flip of one weight) is made until none
    lowers the risk. That is a local optimum, marked exact=False. Of equally good masks, the first one is returned.

    Args:
        p: One problem, without batch dimensions.
        weights: w of shape (D,).
        kept: How many weights are kept; None for any number.

    Returns:
        The mask, its risk, and whether it is proved best.

    Raises:
        ValueError: If there is a batch of problems, or `kept` is not in [0, D].

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> best = pp.linear.best_mask(p, torch.tensor([1.0, 2.0]), kept=1)
        >>> best.mask.tolist(), float(best.risk)
        ([False, True], 0.25)
    """
    w = _vector(p, "weights", weights.detach())
    if w.ndim != 1 or p.alignment.ndim != 1:
        raise ValueError(f"best_mask takes one problem, not weights of shape {tuple(w.shape)}; loop over the batch")
    size = len(w)
    if kept is not None and not 0 <= kept <= size:
        raise ValueError(f"kept is {kept}, but there are {size} weights; give a number from 0 to {size}")
    # risk(b * w) = b'Gb/2 - b'a + power/2.
    quadratic, linear = (w[:, None] * w * p.covariance).detach(), (w * p.alignment).detach()
    search = _exchange if size > ENUMERATE else _try_all
    b = search(quadratic, linear, kept)
    return BestMask(mask=b.bool(), risk=risk(p, b * w), exact=size <= ENUMERATE)


def _try_all(quadratic: Tensor, linear: Tensor, kept: int | None) -> Tensor:
    """The best of all masks, or of those with `kept` ones."""
    size = len(linear)
    sizes = range(size + 1) if kept is None else [kept]
    kept_sets = [kept_set for k in sizes for kept_set in combinations(range(size), k)]
    candidates = torch.zeros(len(kept_sets), size, dtype=torch.float64, device=linear.device)
    rows = [row for row, kept_set in enumerate(kept_sets) for _ in kept_set]
    candidates[rows, [i for kept_set in kept_sets for i in kept_set]] = 1.0
    return candidates[((candidates @ quadratic) * candidates / 2 - candidates * linear).sum(-1).argmin()]


def _exchange(quadratic: Tensor, linear: Tensor, kept: int | None) -> Tensor:
    """A mask that no exchange (without `kept`: and no flip) improves, from a greedy start."""
    b = torch.zeros_like(linear)
    while True:
        sign = 1 - 2 * b
        flip = quadratic.diagonal() / 2 + sign * (quadratic @ b - linear)  # change of the risk if b_i flips
        if kept is not None and b.sum() < kept:
            b[flip.masked_fill(b > 0, math.inf).argmin()] = 1.0
            continue
        moves = flip[:, None] + flip - quadratic  # i leaves, j comes: their signs differ
        moves = moves.masked_fill((b[:, None] < 1) | (b > 0), math.inf)
        if kept is None:
            moves = torch.cat([moves, flip[None]])
        best, place = moves.flatten().min(0)
        # A gain below rounding could be undone by the next move, without end.
        if best >= -1e-12 * (quadratic.diagonal().sum() + linear.abs().sum()):
            return b
        i, j = divmod(int(place), len(b))
        for k in {i, j} - {len(b)}:
            b[k] = 1 - b[k]


@torch.no_grad()
def flow(
    gradient: Callable[[Tensor], Tensor],
    keep_prob: Tensor,
    *,
    lr: float,
    steps: int,
    sparsity: float | None = None,
    eta: float = 0.0,
) -> Tensor:
    """The path of projected gradient descent on keep_prob, an Euler scheme of the gradient flow.

    lam <- project(lam - lr * gradient(lam)) onto [eta, 1 - eta]. With `sparsity` it is projected onto the points of
    that box with mean 1 - sparsity.

    Args:
        gradient: keep_prob -> its gradient, such as `keep_prob_gradient` of a problem.
        keep_prob: The start, of shape (..., D).
        lr: The step size, such as 0.1.
        steps: The number of steps.
        sparsity: The fixed value of 1 - mean keep_prob; None leaves it free.
        eta: The distance from 0 and 1; an objective with a kl needs eta > 0, since its slope has poles there.

    Returns:
        The path, of shape (steps + 1, ..., D).

    Raises:
        ValueError: If lr, steps, eta or sparsity lie outside their ranges.

    Example:
        >>> p, w = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0])
        >>> descent = lambda lam: pp.linear.keep_prob_gradient(p, w, lam)
        >>> path = pp.linear.flow(descent, torch.tensor([0.5, 0.5]), lr=0.1, steps=20, sparsity=0.5)
        >>> [round(lam, 4) for lam in path[-1].tolist()]
        [0.0, 1.0]
    """
    if not (lr > 0 and steps >= 0 and 0 <= eta < 0.5):
        raise ValueError(f"lr is {lr}, steps {steps}, eta {eta}; give lr > 0, steps >= 0 and eta in [0, 0.5)")
    density = None if sparsity is None else 1 - masks.check_sparsity(sparsity)

    def project(lam: Tensor) -> Tensor:
        if density is None:
            return lam.clamp(eta, 1 - eta)
        rows = lam.reshape(-1, lam.shape[-1])
        return masks.project([rows], density, eta=eta, members=True)[0].reshape(lam.shape)

    path = [project(keep_prob.double())]
    for _ in range(steps):
        path.append(project(path[-1] - lr * gradient(path[-1])))
    return torch.stack(path)


# --- The PAC-Bayes objective


def kl(keep_prob: Tensor, prior: Tensor) -> Tensor:
    """kl(lam||lam0) of every gate, in nats, with 0 log 0 = 0; infinite where lam0 is 0 or 1 and lam differs.

    Args:
        keep_prob: lam, in [0, 1].
        prior: lam0, in [0, 1].

    Returns:
        One number for each gate.

    Example:
        >>> pp.linear.kl(torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.5]))
        tensor([0.0000, 0.6931], dtype=torch.float64)
    """
    a, b = keep_prob.double(), prior.double()
    return _entropy_against(a, b) + _entropy_against(1 - a, 1 - b)


def catoni_objective(p: Problem, weights: Tensor, keep_prob: Tensor, *, prior: Tensor, kappa: float) -> Tensor:
    """B = R(Q) + kappa sum_i kl(lam_i||lam0_i), kappa = zeta / (N - M), with N - M examples in the bound set.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].
        prior: lam0 of shape (..., D), in (0, 1).
        kappa: The price of a nat, above 0.

    Returns:
        One number for each vector of keep probabilities.

    Example:
        >>> p, half = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0])), torch.tensor([0.5, 0.5])
        >>> float(pp.linear.catoni_objective(p, torch.tensor([1.0, 2.0]), half, prior=half, kappa=0.1))
        0.625
    """
    return gibbs_risk(p, weights, keep_prob) + _kappa(kappa) * kl(keep_prob, prior).sum(-1)


def catoni_gradient(p: Problem, weights: Tensor, keep_prob: Tensor, *, prior: Tensor, kappa: float) -> Tensor:
    """dB/dlam_i = dR(Q)/dlam_i + kappa (logit lam_i - logit lam0_i). Infinite at lam_i = 0 or 1.

    Args:
        p: The problem.
        weights: w of shape (..., D).
        keep_prob: lam of shape (..., D), in [0, 1].
        prior: lam0 of shape (..., D), in (0, 1).
        kappa: The price of a nat, above 0.

    Returns:
        The gradient, of shape (..., D).

    Example:
        >>> p, half = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0])), torch.tensor([0.5, 0.5])
        >>> pp.linear.catoni_gradient(p, torch.tensor([1.0, 2.0]), half, prior=half, kappa=0.1).tolist()
        [-0.25, -1.0]
    """
    change = torch.logit(keep_prob.double()) - torch.logit(prior.double())
    return keep_prob_gradient(p, weights, keep_prob) + _kappa(kappa) * change


def drift(p: Problem, weights: Tensor) -> Tensor:
    """Delta_i = w_i^2 Sigma_ii / 2 - w_i A_i: the slope of the risk in lam_i when features are uncorrelated.

    Args:
        p: The problem, with a diagonal covariance.
        weights: w of shape (..., D).

    Returns:
        One slope per weight, of shape (..., D).

    Raises:
        ValueError: If features are correlated.

    Example:
        >>> p = pp.linear.problem(torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> pp.linear.drift(p, torch.tensor([1.0, 2.0])).tolist()
        [-0.25, -1.0]
    """
    w, off_diagonal = _vector(p, "weights", weights), p.covariance - torch.diag_embed(_variances(p))
    if bool((off_diagonal.abs() > RANK * _variances(p).amax(-1)[..., None, None]).any()):
        raise ValueError(
            f"features are correlated (off-diagonal entries up to {float(off_diagonal.detach().abs().max()):.3g}), so "
            "that the slope is no constant; use keep_prob_gradient, or flow with catoni_gradient"
        )
    return w.square() * _variances(p) / 2 - w * p.alignment


def fixed_point(prior: Tensor, drift: Tensor, *, kappa: float) -> FixedPoint:
    """lam_inf = lam0 / (lam0 + (1 - lam0) e^eta), eta = drift / kappa, exactly.

    Value = -kappa log Z with Z = 1 - lam0 + lam0 e^-eta, kl = -eta lam_inf - log Z. A prior at 0 or 1 stays there.

    Args:
        prior: lam0 of every gate, in [0, 1].
        drift: The slope of the risk in every lam, from `drift`.
        kappa: The price of a nat, above 0.

    Returns:
        The minimum for every gate: keep_prob, kl and value.

    Example:
        >>> point = pp.linear.fixed_point(torch.tensor([0.5, 0.5]), torch.tensor([-0.25, 0.25]), kappa=0.1)
        >>> point.keep_prob
        tensor([0.9241, 0.0759], dtype=torch.float64)
    """
    lam0, eta = _prior(prior), drift.double() / _kappa(kappa)
    keep = torch.sigmoid(torch.logit(lam0) - eta)
    log_z = torch.logaddexp(torch.log1p(-lam0), torch.log(lam0) - eta)
    return FixedPoint(keep_prob=keep, kl=-eta * keep - log_z, value=-kappa * log_z)


def small_drift(prior: Tensor, drift: Tensor, *, kappa: float) -> FixedPoint:
    """For |drift| << kappa: lam0 (1 - eta (1 - lam0)), kl = eta^2 lam0 (1 - lam0) / 2; errors eta^2 and eta^3.

    Args:
        prior: lam0 of every gate, in [0, 1].
        drift: The slope of the risk in every lam, from `drift`.
        kappa: The price of a nat, above 0.

    Returns:
        The approximate minimum for every gate: keep_prob, kl and value.

    Example:
        >>> pp.linear.small_drift(torch.tensor([0.5]), torch.tensor([0.01]), kappa=0.1).keep_prob
        tensor([0.4750], dtype=torch.float64)
    """
    lam0, eta = _prior(prior), drift.double() / _kappa(kappa)
    half = eta.square() * lam0 * (1 - lam0) / 2
    return FixedPoint(keep_prob=lam0 * (1 - eta * (1 - lam0)), kl=half, value=kappa * (eta * lam0 - half))


def large_drift(prior: Tensor, drift: Tensor, *, kappa: float) -> FixedPoint:
    """For |drift| >> kappa, prior inside (0, 1): the kl saturates, at -log(1 - lam0) or, drift < 0, -log lam0.

    lam_inf = lam0 / (1 - lam0) e^-eta, or 1 - (1 - lam0) / lam0 e^eta. Only the value grows, drift - kappa log lam0,
    and for negative drift alone. For positive drift it ends at -kappa log(1 - lam0).

    Args:
        prior: lam0 of every gate, in (0, 1).
        drift: The slope of the risk in every lam, from `drift`.
        kappa: The price of a nat, above 0.

    Returns:
        The approximate minimum for every gate: keep_prob, kl and value.

    Example:
        >>> point = pp.linear.large_drift(torch.tensor([0.5]), torch.tensor([1.0]), kappa=0.1)
        >>> point.keep_prob, point.kl
        (tensor([4.5400e-05], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))
    """
    lam0, eta = _prior(prior), drift.double() / _kappa(kappa)
    odds, tail = lam0 / (1 - lam0), torch.exp(-eta.abs())
    up = eta > 0
    kl = torch.where(up, -torch.log1p(-lam0), -torch.log(lam0))
    return FixedPoint(
        keep_prob=torch.where(up, odds * tail, 1 - tail / odds), kl=kl, value=kappa * (kl + eta.clamp_max(0.0))
    )


# --- Two correlated features


def pair_least_squares(p: Problem) -> Tensor:
    """w_i = (Sigma_jj A_i - Sigma_ij A_j) / (Sigma_ii Sigma_jj - Sigma_ij^2) for D = 2.

    Args:
        p: A problem with two features.

    Returns:
        Weights of shape (..., 2).

    Raises:
        ValueError: If there are not two features, or their covariance is singular.

    Example:
        >>> p = pp.linear.problem(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
        >>> pp.linear.pair_least_squares(p).tolist()
        [1.0, 1.0]
    """
    _pair(p)
    variances, cross = _variances(p), p.covariance[..., 0, 1, None]
    determinant = variances.prod(-1, keepdim=True) - cross.square()
    if bool((determinant <= RANK * variances.prod(-1, keepdim=True)).any()):
        raise ValueError(
            f"the covariance is singular (determinant {float(determinant.detach().min()):.3g}); "
            "use least_squares, which returns the weights of least norm"
        )
    return (variances.flip(-1) * p.alignment - cross * p.alignment.flip(-1)) / determinant


def pair_stationary(p: Problem, weights: Tensor) -> Tensor:
    """The lam at which dR(P)/dlam = 0 for D = 2: lam_j = (2 A_i - w_i Sigma_ii) / (2 w_j Sigma_ij).

    Not restricted to [0, 1]. A saddle always: the Hessian there is [[0, h], [h, 0]], h = w_i w_j Sigma_ij.

    Args:
        p: A problem with two features.
        weights: w of shape (..., 2), none of them 0.

    Returns:
        Keep probabilities of shape (..., 2).

    Raises:
        ValueError: If there are not two features, or a weight or the correlation is 0.

    Example:
        >>> p = pp.linear.problem(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
        >>> pp.linear.pair_stationary(p, torch.tensor([1.0, 1.0])).tolist()
        [2.0, 1.5]
    """
    _pair(p)
    w, cross = _vector(p, "weights", weights), p.covariance[..., 0, 1, None]
    if bool((w * cross == 0).any()):
        raise ValueError(
            f"there is no isolated stationary point with weights {w.tolist()} and correlation {cross.tolist()}; "
            "all of them must differ from 0"
        )
    return ((2 * p.alignment - w * _variances(p)) / (2 * w.flip(-1) * cross)).flip(-1)


def pair_ratio(c: Tensor, rho: Tensor) -> Tensor:
    """lam_i / lam_j at the stationary point, for unit variances and least-squares weights.

    (c - rho)((1 - 2 rho^2) c + rho) / ((1 - rho c)((1 - 2 rho^2) + rho c)); infinite where lam_j or w_i is 0.

    Args:
        c: A_j / A_i, the ratio of the alignments.
        rho: The correlation of the two features.

    Returns:
        The ratio, for every c and rho.

    Example:
        >>> float(pp.linear.pair_ratio(torch.tensor(1.0), torch.tensor(0.5)))
        1.0
    """
    c, rho = c.double(), rho.double()
    s = 1 - 2 * rho.square()
    return (c - rho) * (s * c + rho) / ((1 - rho * c) * (s + rho * c))


# --- Checks


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _variances(p: Problem) -> Tensor:
    return p.covariance.diagonal(dim1=-2, dim2=-1)


def _vector(p: Problem, name: str, values: Tensor) -> Tensor:
    size = p.alignment.shape[-1]
    if values.ndim < 1 or values.shape[-1] != size:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, but there are {size} features; give (..., {size})")
    return values.double()


def _prior(values: Tensor) -> Tensor:
    return _fractions("prior", values.double())


def _keep_prob(p: Problem, values: Tensor) -> Tensor:
    return _fractions("keep_prob", _vector(p, "keep_prob", values))


def _fractions(name: str, values: Tensor) -> Tensor:
    if not bool(((values >= 0) & (values <= 1)).all()):
        low, high = float(values.detach().min()), float(values.detach().max())
        raise ValueError(f"{name} runs from {low} to {high}, but a probability lies in [0, 1]; clamp it")
    return values


def _kappa(kappa: float) -> float:
    if not kappa > 0:
        raise ValueError(f"kappa is {kappa}, but zeta / (N - M) is positive; check both")
    return kappa


def _pair(p: Problem) -> None:
    if p.alignment.shape[-1] != 2:
        raise ValueError(f"this formula is for 2 features, not {p.alignment.shape[-1]}; use least_squares and flow")


def _entropy_against(a: Tensor, b: Tensor) -> Tensor:
    """a log(a / b) with 0 log 0 = 0; infinite for a > 0 = b."""
    return torch.xlogy(a, a) - torch.xlogy(a, b)
