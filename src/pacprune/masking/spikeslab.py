"""SpikeSlab: a distribution over pruned networks as a value; its initialisers, its KL divergence and its draws."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import kernels
from pacprune.data import trace
from pacprune.data.trace import Trace
from pacprune.distributed import across, check_alike, count, full_value, is_sharded, local, span
from pacprune.kernels.law import bounded
from pacprune.masking import masks, patterns, weights
from pacprune.types import Diverged

ETA = kernels.ETA
"""Keep probabilities under the clamp mapping live in [ETA, 1 - ETA]: a prior at 0 or 1 makes the KL infinite."""

_noted: set[bytes] = set()
"""The `_whole_hash` of every SpikeSlab that pacprune has made in this process."""


@dataclass(frozen=True, eq=False)
class SpikeSlab:
    """w_i = b_i * N(mean_i, std_i^2) with b_i ~ Bernoulli(keep_prob_i), independent: a prior P or a posterior Q.

    With std = 0 it is a stochastic mask. Every mapping has the parameter names of the plain module as keys.

    Args:
        keep_prob: The probability of keeping each weight.
        mean: The value of a kept weight, or the mean of its values.
        std: The standard deviation of a kept weight: one number per tensor, or one per weight.
        rest: Every other parameter and buffer, by value.
        total: D, the number of weights that sparsity is counted in.
        seen: What was used to shape all of this.

    Example:
        >>> pp.isotropic(model, sparsity=0.9)
        SpikeSlab(2 tensors, 1,184 weights, expected sparsity 0.9000)
    """

    keep_prob: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    std: Mapping[str, Tensor]
    rest: Mapping[str, Tensor]
    total: int
    seen: Trace = field(default_factory=Trace)

    @property
    def sparsity(self) -> float:
        """Expected fraction pruned: sum(1 - keep_prob) / D."""
        pruned = (full_value((1 - p.detach().double()).sum()) for p in self.keep_prob.values())
        return float(sum(pruned)) / self.total

    @property
    def hash(self) -> str:
        """SHA-256 over names, shapes and bytes of keep_prob, mean, std and rest."""
        digest = hashlib.sha256()
        for part in (self.keep_prob, self.mean, self.std, self.rest):
            for name, tensor in sorted(part.items()):
                data = tensor.detach().cpu().contiguous()
                digest.update(f"{name} {data.dtype} {tuple(data.shape)};".encode())
                digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def note(self) -> None:
        """Remembers that these very tensors were made together: others that are put in their place are not known."""
        trace.note({str(i): t for i, t in enumerate(self._tensors())}, self.seen)
        if not any(is_sharded(t) for t in self._tensors()):
            _noted.add(self._whole_hash)

    @property
    def origin(self) -> Trace:
        """What was used to shape all of this, and that something is not known where a tensor was put in by hand.

        A copy, also by pickle, is known by its content.
        """
        known = trace.noted(self._tensors())
        if trace.UNKNOWN_MASK in known.labelled and self._whole_hash in _noted:
            return self.seen
        return self.seen | known

    @property
    def _whole_hash(self) -> bytes:
        """SHA-256 of the distribution and of what it has seen."""
        digest = hashlib.sha256(self.hash.encode())
        for hashes in (self.seen.examples, self.seen.labelled):
            digest.update(hashes.numpy().tobytes())
        return digest.digest()

    def _tensors(self) -> list[Tensor]:
        parts = (self.keep_prob, self.mean, self.std, self.rest)
        return [tensor for part in parts for tensor in part.values()]

    def __repr__(self) -> str:
        return (
            f"SpikeSlab({len(self.keep_prob)} tensors, {self.total:,} weights, expected sparsity {self.sparsity:.4f})"
        )


def _around(
    model: nn.Module,
    keep_prob: Mapping[str, Tensor],
    std: float | Mapping[str, Tensor],
    made_from: Mapping[str, Tensor] | None = None,
) -> SpikeSlab:
    """The SpikeSlab with these keep probabilities, made from scores or a mask, around the model's present weights."""
    plain = weights.all_weights(model)
    weights.refuse_computed(model, [name for name in keep_prob if name in plain])
    unknown = [name for name in keep_prob if name not in plain]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not among the model's weights: {', '.join(plain)}; use their names")
    chosen = {name: w.detach().clone() for name, w in plain.items() if name in keep_prob}
    if isinstance(std, (int, float)):
        if not 0 <= std < float("inf"):
            raise ValueError(f"std is {std}; it must be 0 (a stochastic mask) or a positive number")
        std = {name: torch.tensor(float(std), device=w.device) for name, w in chosen.items()}
    slab = SpikeSlab(
        keep_prob={name: kernels.quantised(keep_prob[name]) for name in chosen},
        mean=chosen,
        std=dict(std),
        rest=rest_of(model, set(chosen)),
        total=weights.total(model),
        seen=weights.origin(model)
        | (Trace() if made_from is None else trace.noted(made_from.values()).without(trace.UNTRAINED)),
    )
    slab.note()
    return slab


def rest_of(model: nn.Module, chosen: set[str]) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of a plain model that are not among `chosen`."""
    everything = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().clone() for name, t in everything if name not in chosen}


def isotropic(
    model: nn.Module,
    *,
    sparsity: float | Mapping[str, float],
    std: float = 0.0,
    prunable: weights.Prunable = weights.prunable,
) -> SpikeSlab:
    """keep_prob = 1 - sparsity everywhere: every weight is equally likely to go.

    Args:
        model: The network, whose present weights are the means.
        sparsity: The expected fraction pruned, of all D weights, such as 0.9. A mapping from patterns of names to
            fractions, as `pp.top_k` takes it, gives every tensor its own; weights that none fits stay as they are.
        std: Standard deviation of every kept weight, such as 2e-3; 0 is a stochastic mask.
        prunable: Which weights may be pruned: model -> {name: weight}.

    Returns:
        The distribution, which `pp.attach` puts on a model.

    Example:
        >>> slab = pp.isotropic(model, sparsity=0.75)
        >>> float(slab.keep_prob["1.weight"][0, 0])
        0.25
    """
    masks.asked_sparsity(sparsity, None)
    plain = prunable(model)
    if isinstance(sparsity, Mapping):
        keep = {name: 1 - pruned for name, pruned in masks.layer_sparsities(plain, sparsity).items()}
    else:
        size = sum(w.numel() for w in plain.values())
        keep = dict.fromkeys(plain, masks.density(sparsity, size=size, total=weights.total(model)))
    return _around(model, {n: torch.full_like(plain[n], p, dtype=torch.float32) for n, p in keep.items()}, std)


def block_isotropic(model: nn.Module, mask: Mapping[str, Tensor], *, eps: float, std: float = 0.0) -> SpikeSlab:
    """keep_prob = 1 - (D - k) eps / k on the k kept weights, eps on the others; the mean is exactly k / D.

    Args:
        model: The network, whose present weights are the means.
        mask: Which weights are likely to stay, as `pp.top_k` gives it.
        eps: keep_prob of the weights that the mask drops, such as 1e-4; below k / D.
        std: Standard deviation of every kept weight, such as 2e-3; 0 is a stochastic mask.

    Returns:
        The distribution, which `pp.attach` puts on a model.

    Raises:
        ValueError: If eps is so large that the kept weights would get the smaller keep_prob.

    Example:
        >>> mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
        >>> pp.block_isotropic(model, mask, eps=1e-4, std=2e-3)
        SpikeSlab(2 tensors, 1,184 weights, expected sparsity 0.9003)
    """
    size, kept = sum(m.numel() for m in mask.values()), masks.kept(mask)
    if not ETA <= eps < 0.5:
        raise ValueError(
            f"eps is {eps}; it must lie in [{ETA}, 0.5), since a keep_prob nearer to 0 or 1 cannot be sampled"
        )
    if kept == 0:
        raise ValueError(f"the mask keeps 0 of {size} weights; lower the sparsity")
    high = 1 - (size - kept) * eps / kept
    # k is (1 - s) D rounded, which moves `high` by up to this: within it the two blocks are meant to be equal.
    rounding = size * eps / (2 * kept**2)
    if high < eps - rounding:
        raise ValueError(
            f"eps {eps} is too large for sparsity {1 - kept / size:.4f}: kept weights would get keep_prob {high:.4g}; "
            f"use an eps below {kept / size:.4g}"
        )
    if high <= eps + rounding:
        warnings.warn(
            f"eps {eps} at sparsity {1 - kept / size:.4f} gives kept and pruned weights the same keep_prob: "
            f"the mask is forgotten; use an eps well below {kept / size:.4g}",
            stacklevel=2,
        )
        high = eps = kept / size
    high = min(high, 1 - 1e-6)
    return _around(model, {n: torch.where(m, high, eps).to(torch.float32) for n, m in mask.items()}, std, mask)


def score_monotone(
    model: nn.Module,
    scores: Mapping[str, Tensor],
    *,
    sparsity: float,
    sharpness: float = 4.0,
    std: float = 0.0,
) -> SpikeSlab:
    """keep_prob = sigmoid(sharpness * log(score) - tau), tau such that the expected sparsity is exact.

    A smooth top-k: keep_prob rises with the score, and the order of the scores is kept.

    Args:
        model: The network, whose present weights are the means.
        scores: One number per weight, larger = keep, as a criterion gives them.
        sparsity: The expected fraction pruned, of all D weights, such as 0.9.
        sharpness: How steeply keep_prob rises with the logarithm of the score; infinity would be top-k itself.
        std: Standard deviation of every kept weight; 0 is a stochastic mask.

    Returns:
        The distribution, which `pp.attach` puts on a model.

    Example:
        >>> slab = pp.score_monotone(model, pp.scores.magnitude(model), sparsity=0.9)
        >>> round(slab.sparsity, 4)
        0.9
    """
    masks.check_sparsity(sparsity)
    logits = {n: sharpness * x for n, x in log_scores(scores).items()}
    density = masks.density(sparsity, size=sum(s.numel() for s in scores.values()), total=weights.total(model))
    rows, between = [local(x) for x in logits.values()], across(logits.values())
    tau = masks.logit_shift(rows, density, between=between)
    keep_prob = {n: torch.sigmoid(bounded(x - tau).double()) for n, x in logits.items()}
    return _around(model, keep_prob, std, scores)


def check_fits(plain: Mapping[str, Tensor], slab: SpikeSlab, pattern: tuple[int, int] | None) -> None:
    """Refuses a SpikeSlab that does not fit a model's weights, or the N:M pattern that they are to have."""
    for name, p in slab.keep_prob.items():
        if name not in plain:
            raise ValueError(
                f"the SpikeSlab names {name!r}, which is not among the model's weights: {', '.join(plain)}"
            )
        if p.shape != plain[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(p.shape)} in the SpikeSlab but {tuple(plain[name].shape)} in the model"
            )
        check_alike(p, plain[name], what=f"{name} of the SpikeSlab")
        low, high = span(p)
        if not (low >= 0 and high <= 1):
            raise ValueError(f"{name} has keep probabilities outside [0, 1]: {low} to {high}")
        if count(~torch.isfinite(slab.mean[name])):
            raise Diverged(f"{name} has NaN or infinite means in the SpikeSlab; train it again with a smaller lr")
        if pattern is not None:
            patterns.grouped(local(p), pattern[1], name=name)
            if bool((slab.std[name] != 0).any()):
                raise ValueError(
                    f"{name} has std up to {float(slab.std[name].max()):.3g}, but a pattern masks weights that have no "
                    "noise of their own; give the SpikeSlab std=0"
                )


def log_scores(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """log(score / mean score + 1e-8), so that scale does not matter; all raised to at least 0 if some are negative."""
    least = min(span(s)[0] for s in scores.values())
    raised = {n: s.detach().double() - min(least, 0.0) for n, s in scores.items()}
    mean = sum(float(full_value(s.sum())) for s in raised.values()) / sum(s.numel() for s in raised.values())
    return {n: torch.log(s / (mean or 1.0) + 1e-8).float() for n, s in raised.items()}


def top_mask(
    slab: SpikeSlab, *, sparsity: float | Mapping[str, float] | None = None, min_per_layer: int = 0
) -> dict[str, Tensor]:
    """The mask that keeps the top k of keep_prob, ties by magnitude; k is the expected number of kept weights.

    Another `sparsity` gives another k.
    """
    mask = masks.top_k(
        slab.keep_prob,
        sparsity=slab.sparsity if sparsity is None else sparsity,
        min_per_layer=min_per_layer,
        ties={name: m.abs() for name, m in slab.mean.items()},
        total=slab.total,
    )
    trace.note(mask, slab.origin.without(trace.UNTRAINED))
    return mask


def log_alpha(mean: Tensor, log_std: Tensor) -> Tensor:
    """log(std^2 / mean^2), how much noise a weight has for its size: the dropout rate of variational dropout."""
    return 2 * log_std - torch.log(mean.square() + 1e-16)


def dropout_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(m, alpha m^2) || the log-uniform prior) of every weight, up to a constant: 0 where alpha is infinite.

    0.5 log(1 + 1 / alpha) + k1 (1 - sigmoid(k2 + k3 log alpha)), which Molchanov et al. (2017, section 4.2) fitted.
    """
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    return 0.5 * F.softplus(-log_alpha) + k1 * torch.sigmoid(-k2 - k3 * log_alpha)


def kl_per_layer(
    q: SpikeSlab, p: SpikeSlab, *, dtype: torch.dtype = torch.float64, members: bool = False, check: bool = True
) -> dict[str, Tensor]:
    """KL(Q||P) of every tensor; differentiable in q. See `kl`."""
    if q.keep_prob.keys() != p.keep_prob.keys():
        raise ValueError(f"Q and P name different tensors: {sorted(q.keep_prob.keys() ^ p.keep_prob.keys())}")
    layers = {}
    for name in q.keep_prob:
        lam, lam0 = q.keep_prob[name].to(dtype), p.keep_prob[name].to(dtype)
        if lam.shape != lam0.shape:
            raise ValueError(f"{name} has shape {tuple(lam.shape)} in Q but {tuple(lam0.shape)} in P")
        mean, mean0 = q.mean[name].to(dtype), p.mean[name].to(dtype)
        std, std0 = q.std[name].to(dtype), p.std[name].to(dtype)
        if check:
            _check_slab(name, mean, mean0, std, std0)
        divergence = _kl_gate(lam, lam0) + _kl_slab(lam, mean, mean0, std, std0)
        layers[name] = divergence.flatten(1).sum(1) if members else divergence.sum()
    return layers


def kl(
    q: SpikeSlab, p: SpikeSlab, *, dtype: torch.dtype = torch.float64, members: bool = False, check: bool = True
) -> Tensor:
    """KL(Q||P) = sum_i kl(lam||lam0) + lam/2 [(m-m0)^2/s0^2 + s^2/s0^2 - ln(s^2/s0^2) - 1], in nats.

    lam is q's keep_prob, m its mean, s its std, and 0 marks p's. The Gaussian term is paid only where the weight is
    kept (the factor lam). The KL is infinite where lam0 is 0 or 1 and lam differs.

    Args:
        q: The posterior; the value is differentiable in its tensors.
        p: The prior, with the same tensors.
        dtype: What each weight's term is computed in. The sum is always taken in float64.
        members: Whether every tensor has a first dimension of K models, each of which then has its own KL.
        check: Whether to explain slabs that make the KL infinite, for which the host waits on the device. Without,
            the value itself is infinite.

    Returns:
        One number in nats; of K members, K numbers.

    Raises:
        ValueError: If q and p name other tensors; with `check`, also if a std of 0 makes the KL infinite.

    Example:
        >>> p = pp.isotropic(model, sparsity=0.9)
        >>> float(pp.kl(p, p))
        0.0
        >>> round(float(pp.kl(pp.isotropic(model, sparsity=0.5), p)))
        605
    """
    layers = kl_per_layer(q, p, dtype=dtype, members=members, check=check)
    return torch.stack([v.double() for v in layers.values()]).sum(0).clamp_min(0.0)


def _kl_gate(lam: Tensor, lam0: Tensor) -> Tensor:
    """lam log(lam/lam0) + (1-lam) log((1-lam)/(1-lam0)), by log1p where the two are near, with 0 log 0 = 0."""

    def term(a: Tensor, b: Tensor) -> Tensor:
        inside = (a > 0) & (b > 0)
        safe_a, safe_b = torch.where(inside, a, 1.0), torch.where(inside, b, 1.0)
        change = (safe_b - safe_a) / safe_a
        log_ratio = torch.where(change > -0.5, torch.log1p(change.clamp_min(-0.5)), torch.log(safe_b / safe_a))
        # Anything but 0 log 0 = 0 is infinite, NaN and negative numbers too: a broken Q must not look free.
        return torch.where(inside, -safe_a * log_ratio, torch.where(a == 0, 0.0, float("inf")))

    return term(lam, lam0) + term(1 - lam, 1 - lam0)


def _check_slab(name: str, mean: Tensor, mean0: Tensor, std: Tensor, std0: Tensor) -> None:
    """Refuses slabs of width 0 that differ: what makes the KL infinite is easier to mend when it is named."""
    if not (bool((std0 == 0).any()) or bool((std == 0).any())):
        return
    if not (bool((std0 == 0).all()) and bool((std == 0).all())):
        raise ValueError(f"{name}: std is 0 in one of Q and P only, so the KL is infinite; give both a std, or neither")
    if not torch.equal(mean, mean0):
        raise ValueError(
            f"{name}: the means differ by up to {float((mean - mean0).abs().max()):.3g} but std is 0, "
            "so the KL is infinite; train the gates only, or give a std"
        )


def _kl_slab(lam: Tensor, mean: Tensor, mean0: Tensor, std: Tensor, std0: Tensor) -> Tensor:
    """lam/2 [(m-m0)^2/s0^2 + s^2/s0^2 - ln(s^2/s0^2) - 1]; of width 0, equal slabs have 0 and others infinity."""
    point, equal = (std == 0) | (std0 == 0), (std == std0) & (mean == mean0)
    std, std0 = torch.where(point, 1.0, std), torch.where(point, 1.0, std0)
    ratio = (std / std0) ** 2
    wide = lam * 0.5 * (((mean - mean0) / std0) ** 2 + (ratio - 1 - torch.log(ratio)).clamp_min(0.0))
    return torch.where(point, torch.where(equal, 0.0, float("inf")), wide)


@torch.no_grad()
def draw_masks(q: SpikeSlab, *, seed: int, step: Tensor | int) -> dict[str, Tensor]:
    """The mask of draw number `step`: exact Bernoulli gates. A tensor of K steps gives K masks in one tensor."""
    ones = {name: torch.ones_like(p) for name, p in q.keep_prob.items()}
    return {name: gate != 0 for name, gate in _draw(q, ones, {}, seed, step).items()}


@torch.no_grad()
def draw_weights(q: SpikeSlab, *, seed: int, step: Tensor | int) -> dict[str, Tensor]:
    """One network W ~ Q as plain weights, a function of (seed, step) and of nothing else; K of them for K steps."""
    wide = {name: std for name, std in q.std.items() if bool((std != 0).any())}
    return _draw(q, q.mean, wide, seed, step)


def _draw(
    q: SpikeSlab, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], seed: int, step: Tensor | int
) -> dict[str, Tensor]:
    """Hard draws around `mean`, all tensors and all steps at once; a name without a std has none."""
    device = next(iter(q.keep_prob.values())).device
    signed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits, as int64 holds them
    key, draws = (torch.as_tensor(n, device=device, dtype=torch.int64) for n in (signed, step))
    parts, offset = [], 0
    for name, p in q.keep_prob.items():
        parts.append(kernels.SampleInputs(mean[name], p, std.get(name), key, draws, offset, shared=True))
        offset += p.numel()
    values = kernels.draw(parts, kernels.Law(kernels.GIVEN, mode=kernels.HARD))
    return dict(zip(q.keep_prob, values, strict=True))


def _check_resolution(name: str, w: Tensor, std: Tensor, std0: Tensor) -> None:
    """The density of a weight says nothing once its std is lost in the rounding of the stored number."""
    step = float(w.abs().max() * torch.finfo(w.dtype).eps) if w.numel() else 0.0
    least = min(float(std.min()), float(std0.min()))
    if least < 8 * step:
        raise ValueError(
            f"{name} has std {least:.2g}, but its weights are stored in steps of {step:.2g}: one drawn network has no "
            f"density then; use a std of at least {8 * step:.2g}, or 0"
        )


def log_ratio(q: SpikeSlab, p: SpikeSlab, network: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> float:
    """log dQ/dP at one drawn network: its mean over draws of Q is KL(Q||P).

    Sum over pruned weights of log((1-lam)/(1-lam0)), over kept ones of log(lam/lam0) + log N(w; m, s)/N(w; m0, s0), in
    float64, at the weights as they are stored.
    """
    total = 0.0
    for name, w in network.items():
        lam, lam0, keep = q.keep_prob[name].double(), p.keep_prob[name].double(), mask[name]
        gate = torch.where(keep, torch.log(lam) - torch.log(lam0), torch.log1p(-lam) - torch.log1p(-lam0))
        total += float(gate.sum())
        std, std0 = q.std[name].double(), p.std[name].double()
        if bool((std != 0).any()) or bool((std0 != 0).any()):
            x = w.double()
            _check_resolution(name, w[keep], std, std0)
            near, far = (x - q.mean[name].double()) / std, (x - p.mean[name].double()) / std0
            slab = 0.5 * (far**2 - near**2) - torch.log(std / std0)
            total += float(torch.where(keep, slab, 0.0).sum())
    return total
