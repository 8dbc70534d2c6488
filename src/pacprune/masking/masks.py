"""From scores to masks: exact top-k, its soft forms with an exact mean, and two numbers that describe masks."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from pacprune.data import trace
from pacprune.distributed import Across, across, count, like, local, refuse_sharded
from pacprune.kernels.law import LOGIT_MAX
from pacprune.masking import patterns
from pacprune.masking.weights import matches, some
from pacprune.types import Diverged, check_name

BLIND_TRIALS = 5
"""Trials of `logit_shift` that does not wait. A Halley step makes an error e about e^3, so that from the last tau three
would do; the others are for the start of a schedule."""

Scores = Mapping[str, Tensor]
Mask = dict[str, Tensor]
Ranking = Callable[[list[Tensor], list[Tensor] | None, int], list[Tensor]]
"""(flat scores, ties, k) -> which are the k largest."""

SCOPES: dict[str, Callable[[torch.Size], float] | None] = {
    "global": None,
    "layer": lambda shape: 1.0,
    "row": lambda shape: 1.0,
    "erk": lambda shape: sum(shape) / math.prod(shape),
}
"""What `top_k` ranks: the density of a tensor of this shape, up to a factor; None is one ranking of all tensors. With
"row", the number that follows for a tensor is that of its rows together."""
ROW = "row"


def check_sparsity(sparsity: float) -> float:
    """Refuses a sparsity outside [0, 1)."""
    if not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
        raise ValueError(
            f"sparsity {sparsity!r} is outside [0, 1): it is the fraction pruned, so 0.9 keeps one weight in ten"
        )
    return sparsity


def asked_sparsity(sparsity: float | Mapping[str, float] | None, pattern: str | None) -> float:
    """The sparsity that is requested by itself, or by an N:M pattern; by both when they agree.

    Of tensors with sparsities of their own, the largest.
    """
    if isinstance(sparsity, Mapping):
        if pattern is not None or not sparsity:
            raise ValueError(
                f"sparsity has {len(sparsity)} names of tensors and pattern is {pattern!r}; give sparsities by name, "
                "or one N:M pattern"
            )
        return max(check_sparsity(entry) for entry in sparsity.values())
    if pattern is None:
        if sparsity is None:
            raise ValueError("neither a sparsity nor a pattern is given; give sparsity=0.9, say, or pattern='2:4'")
        return check_sparsity(sparsity)
    implied = patterns.sparsity(pattern)
    if sparsity is not None and abs(sparsity - implied) > 1e-9:
        raise ValueError(
            f"sparsity is {sparsity}, but the pattern {pattern} has sparsity {implied}; leave one of them out"
        )
    return implied


def density(sparsity: float, *, size: int, total: int) -> float:
    """1 - sparsity * total / size: the mean keep_prob of `size` weights with which all `total` have this sparsity."""
    keep = 1 - sparsity * total / size
    if keep <= 0:
        raise ValueError(
            f"sparsity {sparsity} of {total} weights cannot be met by pruning {size} of them; "
            "lower the sparsity or let more layers be pruned"
        )
    return keep


def top_k(
    scores: Scores,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    ties: Scores | None = None,
    total: int | None = None,
) -> Mask:
    """Keeps the k = round((1 - sparsity) * D) largest scores: exactly k, always.

    Args:
        scores: One number per weight, by tensor; larger = keep.
        sparsity: Fraction to prune, such as 0.9. Leave it out where a pattern is given. A mapping from patterns of
            names to fractions, such as {"conv*": 0.5, "fc*": 0.9}, gives every tensor its own: that of the first
            pattern that fits. A tensor that none fits is kept whole.
        pattern: "2:4", "1:4" or "4:8": the N largest of every M consecutive scores of a row are kept, and the sparsity
            is 1 - N / M.
        scope: "global" is one ranking of all scores. "layer" is the same sparsity in every tensor. "erk" is a density
            proportional to sum(shape) / prod(shape) (Evci et al. 2020). "row" is the same number in every row of a
            tensor, which is all that makes one output. Where a tensor's number cannot be divided by its rows, those
            with the best next scores keep one more.
        min_per_layer: How many weights of every tensor are kept at least, such as 1.
        ties: Ranks equal scores: larger = keep. Scores that are equal in this, too, are ranked by position (earlier
            tensor, lower index first).
        total: D, where some weights are never pruned and have no score; the others then give all the zeros. By
            default the number of scores.

    Returns:
        A mask: True where a weight is kept.

    Raises:
        ValueError: If the sparsity cannot be met, or if a score is NaN.

    Example:
        >>> mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in mask.values())  # of 1,184
        118
    """
    layers = sparsity if isinstance(sparsity, Mapping) else None
    sparsity = asked_sparsity(sparsity, pattern)
    check_name("scope", scope, SCOPES)
    _check_scores(scores)
    if pattern is not None:
        if scope != "global" or min_per_layer:
            raise ValueError(
                f"the pattern {pattern} keeps the same share of every layer, so that scope={scope!r} and "
                f"min_per_layer={min_per_layer} have nothing to decide; leave them out"
            )
        return patterns.top(scores, pattern, ties)  # which carries the trace
    between = across(scores.values())
    rank = _largest if between is None else between.largest
    if scope == ROW:
        refuse_sharded(scores.values(), "scope", scope)
    flat = [_flat(s) for s in scores.values()]
    second = [_flat(ties[name]) for name in scores] if ties is not None else None
    sizes = [s.numel() for s in scores.values()]
    density_of = SCOPES[scope]
    if layers is None and density_of is None:
        k = _kept_count(sizes, sparsity, total)
        chosen = _largest_overall(flat, second, k, _floors(sizes, min_per_layer, k, sparsity), rank)
    else:
        if layers is not None:
            counts = _counts_of_layers(scores, layers, scope, min_per_layer)
        else:
            k = _kept_count(sizes, sparsity, total)
            densities = [1.0 if density_of is None else density_of(s.shape) for s in scores.values()]
            counts = _apportion(densities, sizes, _floors(sizes, min_per_layer, k, sparsity), k)
        if scope == ROW:
            chosen = _largest_of_each_row(scores, ties, counts)
        else:
            chosen = _largest_of_each(flat, second, counts, rank)
    pairs = zip(scores.items(), chosen, strict=True)
    if between is None:
        mask = {name: keep.reshape(s.shape) for (name, s), keep in pairs}
    else:
        mask = {name: like(keep.reshape(local(s).shape), s) for (name, s), keep in pairs}
    trace.note(mask, trace.noted([*scores.values(), *({} if ties is None else ties).values()]))
    return mask


def layer_sparsities(names: Iterable[str], layers: Mapping[str, float]) -> dict[str, float]:
    """The sparsity of every tensor that a pattern fits: that of the first one; refuses patterns that have none."""
    names = list(names)
    fits: dict[str, list[str]] = {}
    for pattern in layers:
        if not isinstance(pattern, str):
            raise ValueError(
                f"sparsity names {pattern!r}, a {type(pattern).__name__}; give patterns of the weights' names"
            )
        fits[pattern] = [name for name in names if matches(pattern, [name])]
        if not fits[pattern]:
            raise ValueError(
                f"sparsity names {pattern!r}, which fits none of the {len(names)} weights; they are {some(names)}"
            )
    first = {name: pattern for pattern in reversed(list(layers)) for name in fits[pattern]}
    for pattern in layers:
        if pattern not in first.values():
            raise ValueError(
                f"sparsity names {pattern!r}, but patterns before it fit all of its weights, {some(fits[pattern])}; "
                "the first that fits counts, so put it before them, or leave it out"
            )
    return {name: layers[first[name]] for name in names if name in first}


def layer_ratios(
    layers: Sequence[Mapping[str, float] | None],
    sizes: Mapping[str, int],
    *,
    shape: Sequence[int],
    device: torch.device,
) -> list[Tensor] | None:
    """By tensor, its sparsity as a multiple of that of all tensors; None without such `layers`.

    A tensor's density is 1 - (1 - d) ratio where that of all is d.

    Args:
        layers: For every member of a population, or the only model, the sparsity of each tensor.
        sizes: How many weights a member's tensors have.
        shape: (), or (K,) for K members.
        device: Where the ratios are wanted.
    """
    if layers[0] is None:
        return None
    total, rows = sum(sizes.values()), []
    for entry in layers:
        by_name = layer_sparsities(sizes, entry or {})
        overall = sum(by_name.get(name, 0.0) * n for name, n in sizes.items()) / total
        rows.append([by_name.get(name, 0.0) / overall if overall else 0.0 for name in sizes])
    return list(torch.tensor(rows, dtype=torch.float64, device=device).T.reshape(len(sizes), *shape))


def _counts_of_layers(scores: Scores, layers: Mapping[str, float], scope: str, min_per_layer: int) -> list[int]:
    """How many weights are kept of every tensor, where each has a sparsity of its own."""
    if scope not in ("global", ROW):
        raise ValueError(
            f"sparsity names layers of its own, so that scope={scope!r} has nothing to decide; leave it out"
        )
    sizes = {name: score.numel() for name, score in scores.items()}
    return [max(min(min_per_layer, sizes[name]), k) for name, k in layer_counts(sizes, layers).items()]


def all_kept(weights: Scores) -> Mask:
    """The mask that prunes nothing."""
    mask = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
    trace.note(mask, trace.Trace())
    return mask


def _check_scores(scores: Scores) -> None:
    """Refuses what cannot be ranked."""
    if not scores:
        raise ValueError("there are no scores: the model has nothing to prune")
    for name, s in scores.items():
        bad = count(torch.isnan(s))
        if bad:
            raise Diverged(f"the scores of {name} hold {bad} NaN of {s.numel()}; check the weights and the loss")


def _kept_count(sizes: list[int], sparsity: float, total: int | None) -> int:
    """k: how many of the scored weights are kept, so that D = `total` weights have this sparsity."""
    free = sum(sizes)
    everything = free if total is None else total
    k = free - (everything - round((1 - sparsity) * everything))
    if k < 0:
        raise ValueError(
            f"sparsity {sparsity} of {everything} weights needs {free - k} zeros, but only {free} may be pruned; "
            "lower the sparsity or let more layers be pruned"
        )
    return k


def _floors(sizes: list[int], min_per_layer: int, k: int, sparsity: float) -> list[int]:
    """How many weights of every tensor are kept at least."""
    if min_per_layer < 0:
        raise ValueError(f"min_per_layer is {min_per_layer}; it must be 0 or a number of weights to keep")
    floors = [min(min_per_layer, n) for n in sizes]
    if sum(floors) > k:
        raise ValueError(
            f"min_per_layer={min_per_layer} needs {sum(floors)} kept weights, but sparsity {sparsity} keeps {k}; "
            "lower one of them"
        )
    return floors


def _flat(score: Tensor) -> Tensor:
    """One dimension, in a type that can be ranked: float64 stays float64, bool and integers become float32."""
    return local(score.detach()).reshape(-1).to(torch.promote_types(score.dtype, torch.float32))


def _largest(scores: list[Tensor], ties: list[Tensor] | None, k: int) -> list[Tensor]:
    """Which of several flat tensors' numbers are the k largest; equals at the edge by `ties`, then by position."""
    device = scores[0].device
    score = torch.cat([s.to(device) for s in scores])
    n = score.numel()
    if k == 0 or k == n:
        keep = torch.full((n,), k == n, dtype=torch.bool, device=device)
    else:
        # kthvalue is one block's work on a GPU, which sorts a hundred times faster.
        edge = score.sort().values[n - k] if score.is_cuda else torch.kthvalue(score, n - k + 1).values
        keep = score > edge
        level = torch.nonzero(score == edge).reshape(-1)
        if ties is not None:
            second = torch.cat([t.to(device) for t in ties])
            level = level[torch.argsort(second[level], descending=True, stable=True)]
        keep[level[: k - int(keep.sum())]] = True
    return [part.to(s.device) for part, s in zip(keep.split([len(s) for s in scores]), scores, strict=True)]


def largest(score: Tensor, k: int) -> Tensor:
    """Where the k largest numbers of a tensor lie; of equals the first ones."""
    return _largest([_flat(score)], None, k)[0].reshape(score.shape)


def largest_of_rows(score: Tensor, k: int, *, ties: Tensor | None = None) -> Tensor:
    """The k largest of a matrix, with the same number in every row.

    What is left over when k is divided by the number of rows goes, one each, to the rows whose next number is largest.
    """
    height, width = score.shape
    order = patterns.ranked(score, ties)
    base, rest = divmod(k, height)
    counts = torch.full((height, 1), base, device=score.device)
    if rest:
        following = [key.gather(1, order[:, base : base + 1]).flatten() for key in (score, ties) if key is not None]
        counts[_largest(following[:1], following[1:] or None, rest)[0]] += 1
    places = torch.arange(width, device=score.device).expand_as(score)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, places < counts)


def layer_counts(
    sizes: Mapping[str, int], sparsity: float | Mapping[str, float], *, total: int | None = None
) -> dict[str, int]:
    """How many weights of every tensor are kept when each has the same sparsity, or its own.

    With one sparsity their sum is that of `top_k`.
    """
    if isinstance(sparsity, Mapping):
        by_name = layer_sparsities(sizes, sparsity)
        return {name: round((1 - by_name.get(name, 0.0)) * n) for name, n in sizes.items()}
    k = _kept_count(list(sizes.values()), sparsity, total)
    counts = _apportion([1.0] * len(sizes), list(sizes.values()), [0] * len(sizes), k)
    return dict(zip(sizes, counts, strict=True))


def _largest_of_each_row(scores: Scores, ties: Scores | None, counts: list[int]) -> list[Tensor]:
    """So many of every tensor, by rows."""
    chosen = []
    for (name, score), k in zip(scores.items(), counts, strict=True):
        rows = [_flat(t[name]).reshape(len(score), -1) for t in (scores, ties) if t is not None]
        chosen.append(largest_of_rows(rows[0], k, ties=rows[1] if ties is not None else None).reshape(-1))
    return chosen


def _largest_of_each(flat: list[Tensor], ties: list[Tensor] | None, counts: list[int], rank: Ranking) -> list[Tensor]:
    """The largest of every tensor by itself, so many of each."""
    return [rank([f], None if ties is None else [ties[i]], counts[i])[0] for i, f in enumerate(flat)]


def _largest_overall(
    flat: list[Tensor], ties: list[Tensor] | None, k: int, floors: list[int], rank: Ranking
) -> list[Tensor]:
    """One ranking over all tensors, after each tensor's own best `floors` weights are set aside."""
    if not any(floors):
        return rank(flat, ties, k)
    keep = _largest_of_each(flat, ties, floors, rank)
    rest = [torch.nonzero(~mask).reshape(-1) for mask in keep]
    second = None if ties is None else [t[index] for t, index in zip(ties, rest, strict=True)]
    chosen = rank([f[index] for f, index in zip(flat, rest, strict=True)], second, k - sum(floors))
    for mask, index, kept_too in zip(keep, rest, chosen, strict=True):
        mask[index[kept_too]] = True
    return keep


def _apportion(densities: list[float], sizes: list[int], floors: list[int], k: int) -> list[int]:
    """Integers with sum k near clip(c * density * size, floor, size), c by bisection.

    Largest remainders are raised.
    """

    def share(c: float) -> list[float]:
        return [min(max(c * w * n, f), n) for w, n, f in zip(densities, sizes, floors, strict=True)]

    low, high = 0.0, 1 / min(densities)
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if sum(share(c)) <= k else (low, c)
    ideal = share(low)  # its sum is at most k, so that the counts are only ever raised
    counts = [math.floor(x) for x in ideal]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - ideal[i], i))
    for i in by_remainder[: k - sum(counts)]:
        counts[i] += 1
    return counts


@torch.no_grad()
def logit_shift(
    logits: list[Tensor],
    density: float | Tensor,
    *,
    sharpness: float | Tensor = 1.0,
    start: float | Tensor | None = None,
    members: bool = False,
    wait: bool = True,
    between: Across | None = None,
) -> Tensor:
    """tau with mean(sigmoid(sharpness * (logit - tau))) = density, by Halley steps inside a bisection bracket.

    The mean falls in tau, so the root is unique. Exact to 5e-7 relative, or to a step of tau in float32 where that is
    larger, and never above: a network asked to be 90 % sparse is at least that. A density beyond what logits in
    [-14, 14] can give is met as nearly as they can.

    Args:
        logits: The logits of all tensors; of a sharded model, this rank's rows.
        density: The mean to reach.
        sharpness: Multiplies the logits.
        start: A first guess, such as the last step's tau.
        members: Whether the first dimension of every logit is K models. tau then has K values, and density, sharpness
            and start may be K numbers.
        wait: Whether to ask the device after every trial if tau is there. Without, tau is the best of BLIND_TRIALS.
        between: How to reduce over the ranks of a sharded model.

    Returns:
        tau, in float32.
    """
    rows, blocks, size = _blocks(logits, members)
    size = size if between is None else between.size
    device = logits[0].device
    gamma = _row(sharpness, rows, device)
    edge = 1 / (1 + math.exp(-LOGIT_MAX))
    goal = _row(density, rows, device).clamp(1 - edge, edge) * (1 - 3e-7)  # p's rounding to float32 must not lift it
    low, high = _range(blocks, between)
    low, high = low - LOGIT_MAX / gamma, high + LOGIT_MAX / gamma
    first = (low + high) / 2 if start is None else _row(start, rows, device).clamp(low, high)
    tau = best = first.float()  # as the sampler stores it
    infinity, nearest = torch.full_like(tau, math.inf), torch.full_like(goal, math.inf)
    most, least = goal * (1 - 1e-7), goal / 2
    for trial in range(100 if wait else BLIND_TRIALS):
        sums = _moments(blocks, tau, gamma.float())
        mean, slope, bend = (sums if between is None else between.sum(sums)) / size
        steep, far = gamma * slope, tau.abs()
        step = torch.nextafter(far, infinity) - far
        # The middle of a margin below the goal: 2e-7 of it, or a float32 step of tau, so that it holds such a tau.
        aim = torch.addcmul(goal, steep, step, value=-0.5).clamp(least, most)
        # Solved for the logit of the mean, which is nearly linear in tau: a far start, too, is a few steps away.
        excess = torch.logit(mean) - torch.logit(aim)
        low, high = torch.where(excess > 0, tau, low), torch.where(excess > 0, high, tau)
        if wait:
            done = (mean <= goal) & (mean >= 2 * aim - goal)
            # Nothing left between the ends: a handful of weights, whose own rounding leaves the margin empty.
            over = done | (high - low <= step)
            best = torch.where(done, tau, high.float())
            if bool(over.all()):
                break
        else:
            over = excess.abs() >= nearest
            best, nearest = torch.where(over, best, tau), torch.minimum(nearest, excess.abs())
        spread = mean * (1 - mean)
        bent = 1 - excess / 2 * (bend * spread / slope**2 - 1 + 2 * mean)
        guess = tau + excess * spread / steep / bent.clamp(0.5, 2.0)
        inside = (low < guess) & (guess < high) if trial < 20 else torch.zeros_like(over)
        following = torch.where(inside, guess, (low + high) / 2).float()
        tau = torch.where(over, tau, following) if wait else following
    return best if members else best[0]


@torch.no_grad()
def threshold(
    scores: list[Tensor], density: float | Tensor, *, members: bool = False, between: Across | None = None
) -> Tensor:
    """tau that exactly k = round(density * n) scores exceed, or fewer where several scores equal tau; never waits.

    tau is score number k + 1 by size; -1e9 where everything is kept.

    Args:
        scores: The scores of all tensors; of a sharded model, this rank's rows.
        density: The share to keep.
        members: Whether the first dimension of every score is K models. tau then has K values, and density may be K
            numbers.
        between: How to reduce over the ranks of a sharded model.

    Returns:
        tau, in float32.
    """
    rows = scores[0].shape[0] if members else 1
    flat = torch.cat([x.detach().float().reshape(rows, -1) for x in scores], dim=1)
    size = flat.shape[1] if between is None else between.size
    kept_count = torch.round(_row(density, rows, flat.device) * size).long()
    if flat.device.type == "cpu":
        edges = [_edge(row, kept, size, between) for row, kept in zip(flat, kept_count.tolist(), strict=True)]
        tau = torch.stack(edges).clamp_min(-1e9)
    else:
        tau = _edge_by_bits(flat, kept_count, between)
    return tau if members else tau[0]


def _edge(row: Tensor, kept_count: int, size: int, between: Across | None) -> Tensor:
    """The largest number that is not kept; -1e9 where all are."""
    if kept_count == size:
        return row.new_tensor(-1e9)
    if between is None:
        return row.kthvalue(size - kept_count).values
    return row.new_tensor(between.kth_largest(row, kept_count + 1))


def _edge_by_bits(flat: Tensor, kept_count: Tensor, between: Across | None) -> Tensor:
    """Of every row the largest number that more than so many numbers are equal to or above: bit by bit, no waiting."""
    bits = _swap_order(flat.view(torch.int32))
    edge = torch.full_like(kept_count, -(2**31))
    fused = _fused() if bits.is_cuda else None
    width = 1 if fused is None else 2  # bits that one pass finds
    steps = torch.arange(1, 2**width, device=bits.device)[:, None]
    for bit in reversed(range(0, 32, width)):
        trials = (edge + steps * 2**bit).int()
        above = (bits >= trials[0, :, None]).sum(1)[None] if fused is None else fused.counts(bits, trials)
        above = above if between is None else between.sum(above)
        edge = edge + (above > kept_count).sum(0) * 2**bit
    least = _swap_order(flat.new_full((len(flat),), -1e9).view(torch.int32))
    return _swap_order(torch.maximum(edge.int(), least)).view(torch.float32)


def _swap_order(bits: Tensor) -> Tensor:
    """The bits of float32 numbers as integers that are in the numbers' order, and back again."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _row(value: float | Tensor, rows: int, device: torch.device) -> Tensor:
    """One float64 number per member; a number given once is every member's."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(-1).expand(rows)
    return torch.full((rows,), value, dtype=torch.float64, device=device)


def _blocks(logits: list[Tensor], members: bool) -> tuple[int, list[Tensor], int]:
    """(members, [members, n] pieces of all logits, weights of a member), in pieces that suit the device.

    On a CPU pieces that stay in its cache, without a copy; elsewhere few launches, and spare memory that is bounded.
    """
    rows = logits[0].shape[0] if members else 1
    flat = [x.detach().float().reshape(rows, -1) for x in logits]
    on_cpu = flat[0].device.type == "cpu"
    flat = flat if on_cpu else [torch.cat(flat, dim=1)]
    width = max(1, (2**17 if on_cpu else 2**24) // rows)
    blocks = [block for part in flat for block in part.split(width, dim=1) if block.numel()]
    return rows, blocks or flat[:1], sum(x.numel() for x in logits) // rows


def _range(blocks: list[Tensor], between: Across | None) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of every member; a rank may have no rows."""
    none = blocks[0].new_full((len(blocks[0]),), math.inf)
    full = [block for block in blocks if block.numel()]
    low = torch.stack([block.amin(1) for block in full]).amin(0) if full else none
    high = torch.stack([block.amax(1) for block in full]).amax(0) if full else -none
    if between is None:
        return low, high
    low, high = between.least(torch.stack([low, -high]))
    return low, -high


@functools.cache
def _fused() -> ModuleType | None:
    """The sums of `_moments` and the counts of `threshold` in one pass, where Triton is installed."""
    try:
        from pacprune.kernels import gate_sums
    except ImportError:
        return None
    return gate_sums


def _moments(blocks: list[Tensor], tau: Tensor, gamma: Tensor) -> Tensor:
    """[3, members]: sums of p, p (1 - p) and p (1 - p) (1 - 2p), p = sigmoid(bounded(gamma * (logit - tau))).

    The first in float64, since it is what is promised; the others only say where to look next.
    """
    if tau.is_cuda and (fused := _fused()) is not None:
        return torch.stack([fused.sums(block, tau, gamma, most=LOGIT_MAX) for block in blocks]).sum(0)
    tau, gamma, by_block = tau[:, None], gamma[:, None], []
    loose = torch.float32 if tau.device.type == "cpu" else torch.float64  # an accelerator widens at no cost
    p_buffer = torch.empty_like(max(blocks, key=Tensor.numel), memory_format=torch.contiguous_format).reshape(-1)
    slope_buffer = torch.empty_like(p_buffer)
    for block in blocks:
        p, slope = (buffer[: block.numel()].view(block.shape) for buffer in (p_buffer, slope_buffer))
        torch.sub(block, tau, out=p).mul_(gamma).clamp_(-LOGIT_MAX, LOGIT_MAX).sigmoid_()
        torch.addcmul(p, p, p, value=-1, out=slope)
        sums = [p.sum(1, dtype=torch.float64), slope.sum(1, dtype=loose).double()]
        sums.append(torch.addcmul(slope, slope, p, value=-2, out=p).sum(1, dtype=loose).double())
        by_block.append(torch.stack(sums))
    return torch.stack(by_block).sum(0)


@torch.no_grad()
def project(
    keep_prob: list[Tensor],
    density: float | Tensor,
    *,
    eta: float,
    members: bool = False,
    wait: bool = True,
    between: Across | None = None,
) -> list[Tensor]:
    """The nearest point with mean = density and eta <= p <= 1 - eta (capped simplex): clamp(p - tau), by bisection.

    Args:
        keep_prob: The probabilities of all tensors; of a sharded model, this rank's rows.
        density: The mean to reach; one number, or one per member.
        eta: How far the probabilities stay from 0 and 1.
        members: Whether the first dimension of every tensor is K models.
        wait: Whether to ask the device after every trial if tau is there. Without, tau is exact to 2^-40 of the range.
        between: How to reduce over the ranks of a sharded model.

    Returns:
        The projected probabilities, shaped like `keep_prob`.
    """
    rows = keep_prob[0].shape[0] if members else 1
    flat = torch.cat([p.detach().reshape(rows, -1) for p in keep_prob], dim=1).double()
    goal = _row(density, rows, flat.device).clamp(eta, 1 - eta)
    low, high = _range([flat], between)
    low, high = low - 1, high + 1
    tau = torch.zeros_like(low)  # a point that meets the budget already stays where it is
    for _ in range(100 if wait else 40):
        mean = _mean((flat - tau[:, None]).clamp_(eta, 1 - eta), between)
        done = (mean - goal).abs() < 1e-10
        if wait and bool(done.all()):
            break
        low, high = torch.where(mean > goal, tau, low), torch.where(mean > goal, high, tau)
        tau = torch.where(done, tau, (low + high) / 2)
    parts = (flat - tau[:, None]).clamp_(eta, 1 - eta).split([p.numel() // rows for p in keep_prob], dim=1)
    return [part.reshape(p.shape).to(p.dtype) for part, p in zip(parts, keep_prob, strict=True)]


def _mean(values: Tensor, between: Across | None) -> Tensor:
    """The mean along the last dimension, over the numbers of all ranks."""
    return values.mean(-1) if between is None else between.sum(values.sum(-1)) / between.size


def kept(mask: Mapping[str, Tensor]) -> int:
    """How many weights a mask keeps."""
    return sum(count(m) for m in mask.values())


class Overlap(NamedTuple):
    """Share of a's kept weights that b keeps too, and the share that chance alone would give (b's density)."""

    shared: float
    chance: float


def overlap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Overlap:
    """|a and b| / |a|, with its chance level |b| / D: two random masks of sparsity s share 1 - s.

    Args:
        a: A mask: by tensor, True where a weight is kept.
        b: A mask of the same tensors.

    Returns:
        `shared`, the share of a's kept weights that b keeps, and `chance`, that share for a random mask of b's density.

    Example:
        >>> half = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
        >>> tenth = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
        >>> pp.overlap(tenth, half)
        Overlap(shared=1.0, chance=0.5)
    """
    if a.keys() != b.keys():
        raise ValueError(
            f"the masks name different tensors: only one of them has {', '.join(sorted(a.keys() ^ b.keys()))}; "
            "make both from one model"
        )
    both, size = kept({n: a[n] & b[n] for n in a}), sum(m.numel() for m in b.values())
    return Overlap(both / max(1, kept(a)), kept(b) / size)


def entropy(keep_prob: Scores) -> float:
    """Mean entropy of the gates in nats: -p log p - (1 - p) log(1 - p), 0 for a deterministic mask, log 2 at most.

    Args:
        keep_prob: The probability that a weight is kept, by tensor, such as `pp.read(model).keep_prob`.

    Returns:
        The mean over all weights.

    Example:
        >>> round(pp.entropy(pp.isotropic(model, sparsity=0.5).keep_prob), 4)
        0.6931
    """
    p = torch.cat([local(v.detach()).double().reshape(-1) for v in keep_prob.values()])
    nats = -torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)
    return float(_mean(nats, across(keep_prob.values())))


def sparsity(mask: Mask, *, total: int | None = None) -> float:
    """The fraction of the mask that is pruned; of `total` weights, when some have no mask since they are all kept."""
    size = sum(m.numel() for m in mask.values())
    return 1 - kept(mask) / size if total is None else (size - kept(mask)) / total
