"""One layer at a time: which weights are kept, and what the kept ones become, so that its output changes least.

A layer turns inputs X into X W'. With H = X'X over the calibration tokens, the error of other weights V is
tr((V - W) H (V - W)'). A solver takes the weights as [groups, outputs, inputs], with what `Solver.measure` has added up
of the inputs, and returns weights and mask. A new solver is such a function and a row of SOLVERS.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pacprune.masking import calibration, masks
from pacprune.masking.calibration import Measure

COLUMNS = 128
"""Inputs whose weights SparseGPT decides about at once; every group of an N:M pattern lies in one such block."""
RHO = 0.1
"""What ALPS begins with as penalty of its two copies of the weights being different."""
ADMM_STEPS, ADMM_SETTLED, CHECK_EVERY = 300, 30, 3
"""ALPS: steps at most, steps after which a support that hardly changes will do, and steps between two looks at it."""
CG_STEPS, CG_TOLERANCE = 50, 1e-5
"""ALPS: steps at most of the last least-squares problem, and the relative residual at which it ends."""


@dataclass(frozen=True)
class Target:
    """What a solver must reach.

    Args:
        kept: How many weights of the tensor are kept.
        pattern: (N, M) where of every M weights in a row N are kept; None: no pattern.
        damping: What is added to the diagonal of H, as a share of its mean.
    """

    kept: int
    pattern: tuple[int, int] | None = None
    damping: float = 0.01


class Solve(Protocol):
    """A solver's function."""

    def __call__(self, weight: Tensor, sums: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """(weights, mask) of the weights [groups, outputs, inputs] and what was measured of the inputs."""
        ...


@dataclass(frozen=True)
class Solver:
    """A row of SOLVERS.

    Args:
        solve: (weights, sums, target) -> (weights, mask).
        measure: What it wants to know of the inputs; None: nothing, and no batch is run.
    """

    solve: Solve
    measure: Measure | None


def magnitude(weight: Tensor, sums: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Keeps the largest weights of the tensor, and changes none."""
    keep = _support(weight, target)
    return weight * keep, keep


def wanda(weight: Tensor, sums: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Keeps those of every output with the largest |w| times the norm of the input, and changes none (Sun et al. 2023).

    Each is the root of the error of pruning this weight alone: H is taken for its diagonal.
    """
    score = weight.abs() * sums.sqrt().unsqueeze(1)
    if target.pattern:
        keep = _best(score, target)
    else:
        keep = masks.largest_of_rows(score.flatten(0, 1), target.kept, ties=weight.abs().flatten(0, 1))
    keep = keep.reshape(weight.shape)
    return weight * keep, keep


def _best(score: Tensor, target: Target) -> Tensor:
    """The N best of every M in a row, the first of equals."""
    n, m = target.pattern or (1, 1)
    members = [member.contiguous() for member in score.unflatten(-1, (-1, m)).unbind(-1)]
    ranks = [torch.zeros_like(member, dtype=torch.int8) for member in members]
    for j in range(m):  # of so few numbers, comparing all is five times as fast as sorting them
        for i in range(j):
            is_before = members[j] > members[i]
            ranks[i] += is_before
            ranks[j] += ~is_before
    return torch.stack([rank < n for rank in ranks], dim=-1).reshape(score.shape)


# --- SparseGPT.


def damped(moments: Tensor, damping: float) -> Tensor:
    """H with a share of its mean diagonal added to the diagonal, in float64 where the device has it.

    An input that was always zero has only that: it is linked with no other.
    """
    wide = moments if moments.device.type == "mps" else moments.double()
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    extra = damping * diagonal.mean(-1)
    extra = torch.where(diagonal.sum(-1) > 0, extra, 1.0)  # no input was ever anything but zero
    return wide + torch.diag_embed(extra.unsqueeze(-1).expand(diagonal.shape))


def factorised(matrix: Tensor, damping: float) -> Tensor:
    """The lower Cholesky factor; refuses a matrix that has none."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        raise ValueError(
            f"inputs of a layer depend on each other so much that damping={damping:g} leaves H without an inverse; "
            "take more, such as damping=0.01 or 0.1"
        )
    return factor


def inverse_diagonal(moments: Tensor, damping: float) -> Tensor:
    """The diagonal of H^-1, damped, [groups, inputs]."""
    inverse = torch.cholesky_inverse(factorised(damped(moments, damping), damping))
    return inverse.diagonal(dim1=-2, dim2=-1)


def _inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """The upper triangular U with H^-1 = U'U.

    Its row j from column j on, divided by U_jj, is that of the inverse of what is left of H without the inputs before
    j, divided by its diagonal: what elimination would make step by step.
    """
    # H = R R' with R upper triangular: the Cholesky factor of H read backwards. Then U = R^-1.
    upper = factorised(damped(moments, damping).flip(-1, -2), damping).flip(-1, -2)
    identity = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    return torch.linalg.solve_triangular(upper, identity, upper=True)


def sparsegpt(weight: Tensor, sums: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Prunes input after input, and the weights of later inputs make up for it (Frantar and Alistarh 2023).

    Pruning w_j alone costs w_j^2 / [H^-1]_jj if all later weights answer. Without a pattern, each block of 128 inputs
    loses its share of the zeros where that costs least, counted so that shares add up to the exact number. With one,
    each group of M does. A weight whose input was always zero costs nothing: it goes first, smaller ones before larger.
    """
    result, keep = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    factor = _inverse_factor(sums, target.damping).to(weight.dtype)
    dead = sums.diagonal(dim1=-2, dim2=-1) == 0
    width, zeros = weight.shape[-1], weight.numel() - target.kept
    for start in range(0, width, COLUMNS):
        stop = min(start + COLUMNS, width)
        share = zeros * stop // width - zeros * start // width
        part = slice(start, stop)
        errors = _prune_block(result[..., part], keep[..., part], factor[:, part, part], dead[:, part], share, target)
        result[..., stop:] -= errors @ factor[:, part, stop:]
    return result, keep


def _prune_block(block: Tensor, keep: Tensor, factor: Tensor, dead: Tensor, zeros: int, target: Target) -> Tensor:
    """Prunes a block of inputs, in place; returns what its pruned weights have left to later ones."""
    diagonal = factor.diagonal(dim1=-2, dim2=-1)

    def cost(part: slice) -> Tensor:
        weight = block[..., part]
        free = dead[:, part].unsqueeze(1)
        return torch.where(free, -1 / (1 + weight.abs()), (weight / diagonal[:, part].unsqueeze(1)).square())

    if target.pattern is None:
        keep.copy_(masks.largest(cost(slice(None)), block.numel() - zeros))
    errors = torch.zeros_like(block)
    for i in range(block.shape[-1]):
        if target.pattern is not None and i % target.pattern[1] == 0:
            group = slice(i, i + target.pattern[1])
            keep[..., group] = _best(cost(group), target)
        pruned = block[..., i].masked_fill(keep[..., i], 0)
        errors[..., i] = pruned / diagonal[:, None, i]
        block[..., i:] -= errors[..., i : i + 1] * factor[:, i : i + 1, i:]
        block[..., i].masked_fill_(~keep[..., i], 0)  # not just nearly
    return errors


# --- ALPS.


def alps(weight: Tensor, sums: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """All weights are fitted together while a penalty draws them to a sparse copy (ALPS, Meng et al. 2024).

    ADMM on the error of the layer, split into weights B and a copy D with the exact number of nonzeros; the penalty rho
    grows while D's support moves. Inputs are scaled to equal norms before. Then the kept weights solve their
    least-squares problem, by conjugate gradients.
    """
    moments = damped(sums, target.damping)
    scale = moments.diagonal(dim1=-2, dim2=-1).sqrt()
    moments = moments / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    dead = sums.diagonal(dim1=-2, dim2=-1) == 0
    norms = torch.where(dead, 1e-6 * scale, scale).to(weight.dtype).unsqueeze(1)  # what is always zero goes first
    dense, narrow = weight * norms, moments.to(weight.dtype)
    right = dense @ narrow
    keep = _admm_support(dense, right, moments, target)
    fitted = _least_squares(dense * keep, right, narrow, keep)
    return fitted / norms, keep


def _support(values: Tensor, target: Target) -> Tensor:
    """Where the largest lie."""
    return _best(values.abs(), target) if target.pattern else masks.largest(values.abs(), target.kept)


def _admm_support(dense: Tensor, right: Tensor, moments: Tensor, target: Target) -> Tensor:
    """The support that ADMM ends with."""
    rho, grows = RHO, False
    inverse = _shifted_inverse(moments, rho).to(dense.dtype)
    before = start = _support(dense, target)
    sparse, dual, fitted = dense * start, torch.zeros_like(dense), dense
    for step in range(1, ADMM_STEPS + 1):
        fitted = (right - dual + rho * sparse) @ inverse
        support = _support(fitted + dual / rho, target)
        sparse = (fitted + dual / rho) * support
        dual = dual + rho * (fitted - sparse)
        if step % CHECK_EVERY:
            continue
        change = int((support != before).sum()) / target.kept if target.kept else 0.0
        before = support
        if (change == 0 and grows) or (step >= ADMM_SETTLED and change < 3e-4):
            break
        factor = _growth(change)
        grows = grows or factor > 1.1
        if not grows:  # the penalty was too strong from the start for the support to move
            rho, sparse, dual, before = rho / 5, dense * start, torch.zeros_like(dense), start
        else:
            rho *= factor
        inverse = _shifted_inverse(moments, rho).to(dense.dtype)
    return _support(fitted, target)


def _growth(change: float) -> float:
    """How much the penalty grows when this share of the support has moved."""
    return 1.3 if change > 0.1 else 1.2 if change > 0.005 else 1.1


def _shifted_inverse(moments: Tensor, rho: float) -> Tensor:
    """(H + rho)^-1."""
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return torch.cholesky_inverse(factorised(moments + rho * identity, rho))


def _least_squares(start: Tensor, right: Tensor, moments: Tensor, keep: Tensor) -> Tensor:
    """The kept weights V with (V H)_kept = right_kept, all outputs side by side, by conjugate gradients from `start`.

    H has a diagonal of ones, which is Jacobi's preconditioner.
    """
    solution = start
    residual = (right - solution @ moments) * keep
    direction, size = residual, residual.square().sum(-1, keepdim=True)
    enough = CG_TOLERANCE**2 * (right * keep).square().sum(-1, keepdim=True)
    for _ in range(CG_STEPS):
        if bool((size <= enough).all()):
            break
        image = (direction @ moments) * keep
        step = size / (direction * image).sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        step = torch.where(size > enough, step, 0.0)
        solution = solution + step * direction
        residual = residual - step * image
        size, last = residual.square().sum(-1, keepdim=True), size
        direction = residual + size / last.clamp_min(torch.finfo(size.dtype).tiny) * direction
    return solution


SOLVERS: dict[str, Solver] = {
    "magnitude": Solver(magnitude, None),
    "wanda": Solver(wanda, calibration.squares),
    "sparsegpt": Solver(sparsegpt, calibration.second_moments),
    "alps": Solver(alps, calibration.second_moments),
}
"""Every solver by the name that `pp.layerwise` takes."""
