"""From scores to masks: exact top-k, its soft forms with an exact mean, and two numbers that describe masks."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LOGIT_MAX = 14.0
"""Logits live in [-14, 14]: beyond about 17, sigmoid is 1 in float32 and the sampled probability would be a lie."""

Scores = Mapping[str, Tensor]
Mask = dict[str, Tensor]


def check_sparsity(sparsity: float) -> float:
    """Refuses a sparsity outside [0, 1)."""
    if not 0 <= sparsity < 1:
        raise ValueError(
            f"sparsity {sparsity} is outside [0, 1): it is the fraction pruned, so 0.9 keeps one weight in ten"
        )
    return sparsity


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
    sparsity: float,
    scope: str = "global",
    min_per_layer: int = 0,
    ties: Scores | None = None,
    total: int | None = None,
) -> Mask:
    """Keeps the k = round((1 - sparsity) * D) largest scores: exactly k, always.

    `scope` is "global" (one ranking), "layer" (the same sparsity in every tensor) or "erk" (density proportional to
    sum(shape) / prod(shape), Evci et al. 2020). Equal scores are ranked by `ties`, then by position (earlier tensor,
    lower index first). `min_per_layer` keeps at least so many of every tensor. D is the number of scores, or `total`
    when some weights are never pruned; then the others must give all the zeros.
    """
    check_sparsity(sparsity)
    sizes = [s.numel() for s in scores.values()]
    if not sizes:
        raise ValueError("there are no scores: the model has nothing to prune")
    for name, s in scores.items():
        if torch.isnan(s).any():
            raise ValueError(
                f"the scores of {name} hold {int(torch.isnan(s).sum())} NaN of {s.numel()}; "
                "check the weights and the loss"
            )
    free = sum(sizes)
    everything = free if total is None else total
    k = free - (everything - round((1 - sparsity) * everything))
    if k < 0:
        raise ValueError(
            f"sparsity {sparsity} of {everything} weights needs {free - k} zeros, but only {free} may be pruned; "
            "lower the sparsity or let more layers be pruned"
        )
    if min_per_layer < 0:
        raise ValueError(f"min_per_layer is {min_per_layer}; it must be 0 or a number of weights to keep")
    floors = [min(min_per_layer, n) for n in sizes]
    if sum(floors) > k:
        raise ValueError(
            f"min_per_layer={min_per_layer} needs {sum(floors)} kept weights, but sparsity {sparsity} keeps {k}; "
            "lower one of them"
        )
    flat = [_flat(s) for s in scores.values()]
    second = [_flat(ties[name]) for name in scores] if ties is not None else None
    if scope == "global":
        kept = _global(flat, second, k, floors)
    elif scope in ("layer", "erk"):
        shapes = [tuple(s.shape) for s in scores.values()]
        want = [1.0] * len(sizes) if scope == "layer" else [sum(shape) / math.prod(shape) for shape in shapes]
        counts = _apportion(want, sizes, floors, k)
        kept = [_largest(f, None if second is None else second[i], counts[i]) for i, f in enumerate(flat)]
    else:
        raise ValueError(f"scope {scope!r} is unknown; use 'global', 'layer' or 'erk'")
    return {name: keep.reshape(s.shape) for (name, s), keep in zip(scores.items(), kept, strict=True)}


def _flat(score: Tensor) -> Tensor:
    """One dimension, in a type that can be ranked: float64 stays float64, bool and integers become float32."""
    return score.detach().reshape(-1).to(torch.promote_types(score.dtype, torch.float32))


def _largest(score: Tensor, ties: Tensor | None, k: int) -> Tensor:
    """A flat bool tensor with the k largest of `score` True; equals at the edge by `ties`, then by position."""
    n = score.numel()
    if k == 0 or k == n:
        return torch.full((n,), k == n, dtype=torch.bool, device=score.device)
    edge = torch.kthvalue(score, n - k + 1).values
    keep = score > edge
    level = torch.nonzero(score == edge).reshape(-1)
    order = level if ties is None else level[torch.argsort(ties[level], descending=True, stable=True)]
    keep[order[: k - int(keep.sum())]] = True
    return keep


def _global(flat: list[Tensor], ties: list[Tensor] | None, k: int, floors: list[int]) -> list[Tensor]:
    """One ranking over all tensors, after each tensor's own best `floors` weights are set aside."""
    device = flat[0].device
    score = torch.cat([f.to(device) for f in flat])
    second = None if ties is None else torch.cat([t.to(device) for t in ties])
    keep = torch.zeros(score.numel(), dtype=torch.bool, device=device)
    start = 0
    for f, floor in zip(flat, floors, strict=True):
        span = slice(start, start + f.numel())
        if floor:
            keep[span] = _largest(score[span], None if second is None else second[span], floor)
        start += f.numel()
    rest = torch.nonzero(~keep).reshape(-1)
    chosen = _largest(score[rest], None if second is None else second[rest], k - sum(floors))
    keep[rest[chosen]] = True
    return [part.to(f.device) for part, f in zip(keep.split([f.numel() for f in flat]), flat, strict=True)]


def _apportion(want: list[float], sizes: list[int], floors: list[int], k: int) -> list[int]:
    """Integers with sum k near clip(c * want * size, floor, size), c by bisection; largest remainders are raised."""

    def share(c: float) -> list[float]:
        return [min(max(c * w * n, f), n) for w, n, f in zip(want, sizes, floors, strict=True)]

    low, high = 0.0, 1 / min(want)
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if sum(share(c)) <= k else (low, c)
    ideal = share(low)  # its sum is at most k, so that the counts are only ever raised
    counts = [math.floor(x) for x in ideal]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - ideal[i], i))
    for i in by_remainder[: k - sum(counts)]:
        counts[i] += 1
    return counts


def bounded(logit: Tensor) -> Tensor:
    """The logit held to [-14, 14], where float32 still tells keep_prob from 0 and 1."""
    return logit.clamp(-LOGIT_MAX, LOGIT_MAX)


@torch.no_grad()
def shift(logits: list[Tensor], density: float, *, sharpness: float = 1.0, start: float | None = None) -> float:
    """tau with mean(sigmoid(sharpness * (logit - tau))) = density, by Newton steps inside a bisection bracket.

    The mean falls in tau, so the root is unique. Exact to 5e-7 relative, or to a step of tau in float32 where that is
    more, and never above: a network asked to be 90 % sparse is at least that. A density beyond what logits in [-14, 14]
    can give is met as nearly as they can. `start` is a first guess, such as the last step's tau.
    """
    flat = torch.cat([x.detach().reshape(-1) for x in logits]).float()
    top = LOGIT_MAX
    edge = float(torch.sigmoid(torch.tensor(top)))
    density = min(max(density, 1 - edge), edge) * (1 - 3e-7)  # the rounding of p in float32 must not lift it
    low, high = float(flat.min()) - top / sharpness, float(flat.max()) + top / sharpness
    tau = (low + high) / 2 if start is None else min(max(start, low), high)
    for trial in range(100):
        p = torch.sigmoid(bounded(sharpness * (flat - tau)))
        mean = float(p.mean(dtype=torch.float64))
        slope = sharpness * float((p * (1 - p)).mean(dtype=torch.float64))
        # One float32 step of tau (math.ulp is float64's) as the margin: it holds a tau that float32 can tell.
        margin = max(2e-7 * density, slope * math.ulp(tau) * 2**29)
        if density - margin <= mean <= density:
            break
        excess = mean - (density - margin / 2)
        low, high = (tau, high) if excess > 0 else (low, tau)
        newton = tau + excess / slope if slope > 0 else low
        tau = newton if trial < 20 and low < newton < high else (low + high) / 2
    else:  # a handful of weights, whose own rounding leaves the margin empty
        tau = high
    return tau


@torch.no_grad()
def project(keep_prob: list[Tensor], density: float, *, eta: float) -> list[Tensor]:
    """The nearest point with mean = density and eta <= p <= 1 - eta (capped simplex): clamp(p - tau), by bisection."""
    flat = torch.cat([p.detach().reshape(-1) for p in keep_prob]).double()
    density = min(max(density, eta), 1 - eta)
    low, high = float(flat.min()) - 1, float(flat.max()) + 1
    tau = 0.0  # a point that meets the budget already stays where it is
    for _ in range(100):
        mean = float((flat - tau).clamp(eta, 1 - eta).mean())
        if abs(mean - density) < 1e-10:
            break
        low, high = (tau, high) if mean > density else (low, tau)
        tau = (low + high) / 2
    parts = (flat - tau).clamp(eta, 1 - eta).split([p.numel() for p in keep_prob])
    return [part.reshape(p.shape).to(p.dtype) for part, p in zip(parts, keep_prob, strict=True)]


class Overlap(NamedTuple):
    """Share of a's kept weights that b keeps too, and the share that chance alone would give (b's density)."""

    shared: float
    chance: float


def overlap(a: Mask, b: Mask) -> Overlap:
    """|a and b| / |a|, with its chance level |b| / D: two random masks of sparsity s share 1 - s."""
    if a.keys() != b.keys():
        raise ValueError(f"the masks name different tensors: {sorted(a.keys() ^ b.keys())}")
    both = sum(int((a[n] & b[n]).sum()) for n in a)
    size = sum(m.numel() for m in b.values())
    return Overlap(both / max(1, sum(int(m.sum()) for m in a.values())), sum(int(m.sum()) for m in b.values()) / size)


def entropy(keep_prob: Scores) -> float:
    """Mean entropy of the gates in nats: -p log p - (1 - p) log(1 - p), 0 for a deterministic mask, log 2 at most."""
    p = torch.cat([v.detach().double().reshape(-1) for v in keep_prob.values()])
    return float((-torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)).mean())


def sparsity(mask: Mask) -> float:
    """The fraction of the mask that is pruned."""
    return 1 - sum(int(m.sum()) for m in mask.values()) / sum(m.numel() for m in mask.values())
