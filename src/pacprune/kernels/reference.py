"""The sampler in plain torch: every transform can trace it, and the tests hold the faster backends to it."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacprune import philox
from pacprune.kernels.law import (
    CLAMP,
    ETA,
    GAMMA,
    GIVEN,
    HARD,
    KEY,
    KEY_MAX,
    MODES,
    NOISELESS,
    POWER,
    SOFT,
    STRAIGHT_THROUGH,
    STRETCHED,
    THRESHOLDED,
    ZETA,
    Law,
    SampleInputs,
    bounded,
    members,
    shape,
)

NAME = "reference"
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""In mean, gate and std; None where it is not needed."""


def keep_prob(logit: Tensor) -> Tensor:
    """sigmoid(logit), as the float32 multiple of 2**-32 that the hard gate really has as its probability."""
    return quantised(torch.sigmoid(logit.detach().double()))


def quantised(p: Tensor) -> Tensor:
    """p rounded to float32 and to a multiple of 2**-32: a 32-bit word is below p * 2**32 with probability exactly p."""
    return (torch.round(p.to(torch.float32).double() * 2.0**32) * 2.0**-32).to(torch.float32)


def hard_gate(p: Tensor, word: Tensor) -> Tensor:
    """1[u > 1 - p] as a comparison of integers, so that every backend gives the same bits; p must be `quantised`."""
    return _opened(p, word.unflatten(-1, p.shape))


def _opened(p: Tensor, word: Tensor) -> Tensor:
    return word >= 2**32 - (p.double() * 2.0**32).to(torch.int64)


def _rows(value: Tensor, like: Tensor) -> Tensor:
    """One number per member, laid along the first dimension of `like`; a single number stays as it is."""
    return value.reshape(-1, *[1] * (like.ndim - 1)) if value.ndim == 1 else value


def raw(law: Law, mean: Tensor, gate: Tensor) -> Tensor:
    """gate + coupling * log(|mean| + 1e-8): the logit before shift and sharpness; log |mean| carries no gradient."""
    return gate + law.coupling * torch.log(mean.detach().abs().float() + 1e-8) if law.coupling else gate


def logit(law: Law, mean: Tensor, gate: Tensor, shift: Tensor | None, sharpness: Tensor | None) -> Tensor:
    """The logit of keep_prob, in [-14, 14], differentiable in the gate."""
    if law.mapping == CLAMP:
        p = gate.clamp(ETA, 1 - ETA)
        return torch.log(p) - torch.log1p(-p)
    free = raw(law, mean, gate)
    if shift is not None:
        free = free - _rows(shift, free)
    if sharpness is not None:
        free = _rows(sharpness, free) * free
    # The value is bounded, the gradient is not: a gate beyond the edge can still be pulled back.
    return bounded(free).detach() + (free - free.detach())


def probability(law: Law, mean: Tensor, gate: Tensor, shift: Tensor | None, sharpness: Tensor | None) -> Tensor:
    """The keep_prob of the hard gate: the sigmoid of `logit`, or the clamped gate itself; `quantised`."""
    if law.mapping == GIVEN:
        return gate
    if law.mapping == CLAMP:
        return quantised(gate.detach().clamp(ETA, 1 - ETA))
    return keep_prob(logit(law, mean, gate, shift, sharpness))


# --- Gates


def _noise(inputs: SampleInputs) -> dict[str, Any]:
    """Where philox finds the numbers of this tensor: one row per member when there are several."""
    seed, step, k = inputs.seed, inputs.step, members(inputs)
    if k is not None:
        seed, step = seed.reshape(-1, 1).expand(k, 1), step.reshape(-1, 1).expand(k, 1)
    return {"seed": seed, "step": step, "offset": inputs.offset, "device": inputs.mean.device}


def _size(inputs: SampleInputs) -> int:
    """Weights of one member."""
    return inputs.mean.numel() // (members(inputs) or 1) if not inputs.shared else inputs.mean.numel()


def _words(inputs: SampleInputs) -> Tensor:
    """The random word behind each gate."""
    return philox.words(_size(inputs), stream=philox.GATE, **_noise(inputs)).reshape(shape(inputs))


def _mean_and_gate(inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """Both ready to be broadcast over the members that share them."""
    if inputs.shared and members(inputs) is not None:
        return inputs.mean.unsqueeze(0), inputs.gate.unsqueeze(0)
    return inputs.mean, inputs.gate


def _logit(inputs: SampleInputs, law: Law) -> Tensor:
    return logit(law, *_mean_and_gate(inputs), inputs.shift, inputs.sharpness).detach()


def _relaxed_logit(inputs: SampleInputs, law: Law, word: Tensor) -> Tensor:
    """(logit + logit u) / beta."""
    u = philox.uniform(word)
    return (_logit(inputs, law) + (torch.log(u) - torch.log1p(-u))) / law.beta


def _binary(inputs: SampleInputs, law: Law, word: Tensor) -> Tensor:
    """1[u > 1 - keep_prob]."""
    p = probability(law, *_mean_and_gate(inputs), inputs.shift, inputs.sharpness)
    return _opened(p, word).to(torch.float32)


def score(inputs: SampleInputs, law: Law) -> Tensor:
    """What the mode "thresholded" compares with the shift: `raw`, and noise * logit u where there is noise."""
    free = raw(law, *_mean_and_gate(inputs))
    if inputs.noise is None:
        return free.expand(shape(inputs))
    u = philox.uniform(_words(inputs))
    return free + _rows(inputs.noise, u) * (torch.log(u) - torch.log1p(-u))


def next_scores(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`score` of the draw after the present one, of every tensor."""
    return [score(inputs._replace(step=inputs.step + 1), law) for inputs in all_inputs]


def opening(law: Law, depth: Tensor) -> Tensor:
    """The gate of a score so far above the threshold: (1 - exp(-POWER depth / coupling))^(1 / POWER), or 0 below."""
    above = depth > 0
    kept_share = -torch.expm1(-law.steepness * torch.where(above, depth, 1.0))
    return torch.where(above, kept_share ** (1 / POWER), torch.where(depth.isnan(), depth, 0.0))


class _Gate(NamedTuple):
    """A gate, and what its gradient goes through."""

    value: Tensor
    relaxed_logit: Tensor | None
    """x of the relaxed gate sigmoid(x) whose slope is used; None for a gate without a gradient."""
    unclamped: Tensor | None = None
    """Where a stretched gate lies inside (0, 1), and has a gradient; None for a gate that is not stretched."""
    through: Tensor | None = None
    """What the gradient in the mean is multiplied by; None for the gate itself."""


def _concrete(inputs: SampleInputs, law: Law) -> _Gate:
    x = _relaxed_logit(inputs, law, _words(inputs))
    return _Gate(torch.sigmoid(x), x)


def _straight_through(inputs: SampleInputs, law: Law) -> _Gate:
    word = _words(inputs)
    return _Gate(_binary(inputs, law, word), _relaxed_logit(inputs, law, word))


def _hard(inputs: SampleInputs, law: Law) -> _Gate:
    return _Gate(_binary(inputs, law, _words(inputs)), None)


def _hard_concrete(inputs: SampleInputs, law: Law) -> _Gate:
    x = _relaxed_logit(inputs, law, _words(inputs)) - math.log(-ZETA / GAMMA)
    value = (GAMMA + (ZETA - GAMMA) * torch.sigmoid(x)).clamp(0, 1)
    return _Gate(value, x, (value > 0) & (value < 1))


def _noiseless(inputs: SampleInputs, law: Law) -> _Gate:
    x = (_logit(inputs, law) / law.beta).expand(shape(inputs))
    return _Gate(torch.sigmoid(x), x)


def _thresholded(inputs: SampleInputs, law: Law) -> _Gate:
    depth = score(inputs, law)
    if inputs.shift is not None:
        depth = depth - _rows(inputs.shift, depth)
    x = depth if inputs.sharpness is None else _rows(inputs.sharpness, depth) * depth
    return _Gate(opening(law, depth), bounded(x) / law.beta, through=torch.where(depth > 0, 1.0, law.theta))


GATES: dict[str, Callable[[SampleInputs, Law], _Gate]] = {
    SOFT: _concrete,
    STRAIGHT_THROUGH: _straight_through,
    HARD: _hard,
    STRETCHED: _hard_concrete,
    NOISELESS: _noiseless,
    THRESHOLDED: _thresholded,
}
"""The gate of every mode."""


# --- Groups of weights


@functools.cache
def choices(n: int, m: int) -> list[tuple[int, ...]]:
    """The sets of N out of M."""
    return list(itertools.combinations(range(m), n))


def sums(entries: Sequence[Tensor], lists: Sequence[Sequence[int]]) -> Tensor:
    """Sums over listed entries, stacked last: a product with a 0/1 matrix that autocast cannot round."""
    return torch.stack([sum((entries[j] for j in rest), entries[first]) for first, *rest in lists], dim=-1)


def kept_in(values: Tensor, n: int, m: int) -> Tensor:
    """[..., M] numbers of weights as [..., C(M, N)] of choices: sums over what a choice keeps."""
    return sums(values.unbind(-1), choices(n, m))


def membership(choice_probs: Tensor, n: int, m: int) -> Tensor:
    """[..., C(M, N)] numbers of choices as [..., M] of weights: sums over the choices that keep them."""
    return sums(choice_probs.unbind(-1), [[c for c, kept in enumerate(choices(n, m)) if i in kept] for i in range(m)])


def group_logits(law: Law, mean: Tensor, gate: Tensor, sharpness: Tensor | None) -> Tensor:
    """sharpness * (gate + coupling * log(|mean| + 1e-8)), in the gate's precision or float32 at least."""
    x = gate if gate.dtype == torch.float64 else gate.float()
    if law.coupling:
        x = x + law.coupling * torch.log(mean.detach().abs().to(x.dtype) + 1e-8)
    return x if sharpness is None else _rows(sharpness, x).to(x.dtype) * x


def likeliest(keys: Tensor, n: int) -> Tensor:
    """Which of the last dimension's integers are the N largest, the first of equals first."""
    m = keys.shape[-1]
    unique = keys * m + torch.arange(m - 1, -1, -1, device=keys.device)
    return unique >= unique.topk(n, dim=-1).values[..., -1:]


def top_probability(logits: Tensor, n: int) -> Tensor:
    """Pr(a weight is among the N largest of logits + Gumbel numbers), [..., M]: N draws without replacement.

    By the orders in which a set can be drawn, one weight after another (Plackett-Luce).
    """
    m, a = logits.shape[-1], torch.softmax(logits.double(), -1).unbind(-1)
    drawn: dict[tuple[int, ...], Tensor] = {(): torch.ones_like(a[0])}
    for size in range(1, n + 1):
        larger = {}
        for kept in itertools.combinations(range(m), size):
            ways = []
            for i in kept:
                before = tuple(j for j in kept if j != i)
                # The sum over what is left, not 1 minus what is gone: no digits would be left where that is near 1.
                rest = sum((a[j] for j in range(m) if j not in before), torch.zeros_like(a[0]))
                ways.append(drawn[before] * (a[i] / rest.clamp_min(1e-300)))
            larger[kept] = torch.stack(ways).sum(0)
        drawn = larger
    return torch.stack([sum(p for kept, p in drawn.items() if i in kept) for i in range(m)], dim=-1).float()  # type: ignore[arg-type]


def _group_x(inputs: SampleInputs, law: Law) -> Tensor:
    """x of every weight, [groups, M] of all members; of hard gates in float64."""
    assert law.pattern is not None
    mean, gate = _mean_and_gate(inputs)
    precise = law.mode == HARD
    x = group_logits(law, mean, gate.detach().double() if precise else gate.detach(), inputs.sharpness)
    x = x.expand(shape(inputs))
    if law.mode != NOISELESS:
        u = philox.uniform(_words(inputs))
        x = x - torch.log(-torch.log(u.double() if precise else u))
    return x.reshape(-1, law.pattern[1])


def _choice_probs(inputs: SampleInputs, law: Law) -> Tensor:
    """The relaxed choice of every group, [groups, C(M, N)]."""
    assert law.pattern is not None
    return torch.softmax(kept_in(_group_x(inputs, law) / law.beta, *law.pattern), -1)


def _group_gate(inputs: SampleInputs, law: Law) -> Tensor:
    """The gate of every weight of a pattern."""
    assert law.pattern is not None
    if law.mode == HARD:
        keys = torch.round(_group_x(inputs, law).clamp(-KEY_MAX, KEY_MAX) * KEY).to(torch.int64)
        kept = likeliest(keys, law.pattern[0]).to(torch.float32)
    else:
        kept = membership(_choice_probs(inputs, law), *law.pattern)
    return kept.reshape(shape(inputs))


def _group_gradients(
    inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    """d/dmean = gate; d/dgate_j = sharpness / beta * sum_i out_i mean_i Cov(i kept, j kept); of hard gates 0."""
    assert law.pattern is not None
    (n, m), to_draw, to_mean, to_gate = law.pattern, out.float(), None, None
    if needs[0]:
        to_mean = (to_draw * _group_gate(inputs, law)).to(inputs.mean.dtype)
    if needs[1] and law.mode == HARD:
        to_gate = torch.zeros_like(inputs.gate)
    elif needs[1]:
        probs = _choice_probs(inputs, law)
        worth = kept_in((to_draw * inputs.mean.float()).reshape(-1, m), n, m)
        covariance = probs * (worth - (probs * worth).sum(-1, keepdim=True))
        to_gate = membership(covariance, n, m).reshape(inputs.mean.shape) / law.beta
        if inputs.sharpness is not None:
            to_gate = to_gate * _rows(inputs.sharpness, to_gate)
        to_gate = to_gate.to(inputs.gate.dtype)
    return to_mean, to_gate, None


# --- Slabs


def _laid_std(inputs: SampleInputs) -> Tensor:
    """std, or its logarithm, laid along the members."""
    assert inputs.std is not None
    return _rows(inputs.std, inputs.mean) if members(inputs) is not None and not inputs.shared else inputs.std


def _std(inputs: SampleInputs, law: Law) -> Tensor:
    return torch.exp(_laid_std(inputs)) if law.log_std else _laid_std(inputs)


def summed(per_weight: Tensor, inputs: SampleInputs) -> Tensor:
    """Gradients of one std per weight, summed where weights share their std."""
    assert inputs.std is not None
    return per_weight.sum_to_size(_laid_std(inputs).shape).reshape(inputs.std.shape)


def _normals(inputs: SampleInputs) -> Tensor:
    return philox.normal(_size(inputs), stream=philox.SLAB, **_noise(inputs)).reshape(shape(inputs))


# --- Draws


def draw(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """w = gate * (mean + std * z) of every tensor."""
    return [_draw(inputs, law) for inputs in all_inputs]


def _draw(inputs: SampleInputs, law: Law) -> Tensor:
    gate = GATES[law.mode](inputs, law).value if law.pattern is None else _group_gate(inputs, law)
    mean, _ = _mean_and_gate(inputs)
    slab = mean if inputs.std is None else mean.float() + _std(inputs, law) * _normals(inputs)
    weights = torch.where(gate > 0, slab, 0.0) if MODES[law.mode].is_binary else gate * slab
    return weights.to(inputs.dtype or inputs.mean.dtype)


def gradients(inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """d/dmean = gate; d/dgate = slab * soft (1 - soft) / beta * dlogit/dgate; d/dstd = gate * z; None if not needed.

    `out` is the gradient in the draw. In straight-through mode the gate is hard in d/dmean and d/dstd, soft in d/dgate.
    In hard mode d/dgate is zero. In hard-concrete mode it is zero wherever the gate is clamped, and elsewhere
    ZETA - GAMMA times as much. In thresholded mode d/dmean is 1 above the threshold and theta below.
    """
    if law.pattern is not None:
        return _group_gradients(inputs, law, out, needs)
    to_draw = out.float()
    gate = GATES[law.mode](inputs, law)
    through = gate.value if gate.through is None else gate.through
    to_mean = (to_draw * through).to(inputs.mean.dtype) if needs[0] else None
    slab, to_std = inputs.mean.float(), None
    if inputs.std is not None:
        z, std = _normals(inputs), _std(inputs, law)
        slab = slab + std * z
        if needs[2]:
            to_std = summed(to_draw * gate.value * z * (std if law.log_std else 1.0), inputs)
    return to_mean, _to_gate(inputs, law, to_draw * slab, gate) if needs[1] else None, to_std


def _to_gate(inputs: SampleInputs, law: Law, to_value: Tensor, gate: _Gate) -> Tensor:
    """The gradient in the gate parameter, from that in the gate's value."""
    x = gate.relaxed_logit
    if x is None:
        return torch.zeros_like(inputs.gate)
    # Not 1 - soft: by subtraction no digits would be left where the slope of a clamped gate is large.
    to_gate = to_value * torch.sigmoid(x) * torch.sigmoid(-x) / law.beta * _slope(inputs, law)
    return to_gate if gate.unclamped is None else torch.where(gate.unclamped, (ZETA - GAMMA) * to_gate, 0.0)


def _slope(inputs: SampleInputs, law: Law) -> Tensor | float:
    """dlogit/dgate: sharpness, or 1 / (p (1 - p)) inside the clamp and 0 outside."""
    if law.mapping == CLAMP:
        p = inputs.gate.clamp(ETA, 1 - ETA)
        return torch.where(p == inputs.gate, 1 / (p * (1 - p)), 0.0)
    return 1.0 if inputs.sharpness is None else _rows(inputs.sharpness, inputs.gate)


class _Sample(torch.autograd.Function):
    """Saves its inputs alone; the noise is a function of (seed, step, index) and is made twice instead of kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor,
        gate: Tensor,
        std: Tensor | None,
        seed: Tensor,
        step: Tensor,
        shift: Tensor | None,
        sharpness: Tensor | None,
        noise: Tensor | None,
        offset: int,
        dtype: torch.dtype | None,
        law: Law,
    ) -> Tensor:
        return _draw(SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype, False, noise), law)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:8])
        ctx.offset, ctx.dtype, ctx.law = inputs[8:]

    @staticmethod
    def backward(ctx: Any, *out: Tensor) -> tuple[Tensor | None, ...]:
        mean, gate, std, seed, step, shift, sharpness, noise = ctx.saved_tensors
        inputs = SampleInputs(mean, gate, std, seed, step, ctx.offset, shift, sharpness, ctx.dtype, False, noise)
        return *gradients(inputs, ctx.law, out[0], ctx.needs_input_grad[:3]), *[None] * 8


def sample(inputs: SampleInputs, law: Law) -> Tensor:
    """The differentiable draw that torch.func can transform."""
    mean, gate, std, seed, step, offset, shift, sharpness, dtype, _, noise = inputs
    return _Sample.apply(mean, gate, std, seed, step, shift, sharpness, noise, offset, dtype, law)
