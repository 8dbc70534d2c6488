"""The sampler in plain torch: the truth that the faster backends are held to, and what every transform can trace."""

import math
from typing import Any

import torch
from torch import Tensor

from pacprune import philox
from pacprune.kernels.law import (
    CLAMP,
    ETA,
    GAMMA,
    GIVEN,
    HARD,
    NOISELESS,
    STRAIGHT_THROUGH,
    STRETCHED,
    ZETA,
    Law,
    SampleInputs,
    bounded,
    members,
    shape,
)

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


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
    found = raw(law, mean, gate)
    if shift is not None:
        found = found - _rows(shift, found)
    if sharpness is not None:
        found = _rows(sharpness, found) * found
    # The value is bounded, the gradient is not: a gate beyond the edge can still be pulled back.
    return bounded(found).detach() + (found - found.detach())


def probability(law: Law, mean: Tensor, gate: Tensor, shift: Tensor | None, sharpness: Tensor | None) -> Tensor:
    """The keep_prob of the hard gate: the sigmoid of `logit`, or the clamped gate itself; `quantised`."""
    if law.mapping == GIVEN:
        return gate
    if law.mapping == CLAMP:
        return quantised(gate.detach().clamp(ETA, 1 - ETA))
    return keep_prob(logit(law, mean, gate, shift, sharpness))


def _noise(part: SampleInputs) -> dict[str, Any]:
    """Where philox finds the numbers of this part: one row per member when there are several."""
    seed, step, k = part.seed, part.step, members(part)
    if k is not None:
        seed, step = seed.reshape(-1, 1).expand(k, 1), step.reshape(-1, 1).expand(k, 1)
    return {"seed": seed, "step": step, "offset": part.offset, "device": part.mean.device}


def _size(part: SampleInputs) -> int:
    """Weights of one member."""
    return part.mean.numel() // (members(part) or 1) if not part.shared else part.mean.numel()


def _inputs(part: SampleInputs) -> tuple[Tensor, Tensor]:
    """mean and gate, ready to be broadcast over the members that share them."""
    if part.shared and members(part) is not None:
        return part.mean.unsqueeze(0), part.gate.unsqueeze(0)
    return part.mean, part.gate


def _gates(part: SampleInputs, law: Law) -> tuple[Tensor, Tensor]:
    """(gate used for the weight, the logit of the relaxed gate that its gradient goes through)."""
    mean, gate = _inputs(part)
    given = (law, mean, gate, part.shift, part.sharpness)
    if law.mode == NOISELESS:
        x = (logit(*given).detach() / law.beta).expand(shape(part))
        return torch.sigmoid(x), x
    word = philox.words(_size(part), stream=philox.GATE, **_noise(part)).reshape(shape(part))
    if law.mode == HARD:
        hard = _opened(probability(*given), word).to(torch.float32)
        return hard, hard
    u = philox.uniform(word)
    x = (logit(*given).detach() + (torch.log(u) - torch.log1p(-u))) / law.beta
    if law.mode == STRETCHED:
        x = x - math.log(-ZETA / GAMMA)
        return (GAMMA + (ZETA - GAMMA) * torch.sigmoid(x)).clamp(0, 1), x
    if law.mode == STRAIGHT_THROUGH:
        return _opened(probability(*given), word).to(torch.float32), x
    return torch.sigmoid(x), x


def _wide(part: SampleInputs) -> Tensor:
    """What the part gives as std, laid along the members."""
    assert part.std is not None
    return _rows(part.std, part.mean) if members(part) is not None and not part.shared else part.std


def _std(part: SampleInputs, law: Law) -> Tensor:
    return torch.exp(_wide(part)) if law.log_std else _wide(part)


def summed(each: Tensor, part: SampleInputs) -> Tensor:
    """Gradients of one std per weight, summed where weights share their std."""
    assert part.std is not None
    return each.sum_to_size(_wide(part).shape).reshape(part.std.shape)


def _normals(part: SampleInputs) -> Tensor:
    return philox.normal(_size(part), stream=philox.SLAB, **_noise(part)).reshape(shape(part))


def draw(part: SampleInputs, law: Law) -> Tensor:
    """w = gate * (mean + std * z)."""
    gate, _ = _gates(part, law)
    mean, _ = _inputs(part)
    slab = mean if part.std is None else mean.float() + _std(part, law) * _normals(part)
    drawn = torch.where(gate > 0, slab, 0.0) if law.mode in (HARD, STRAIGHT_THROUGH) else gate * slab
    return drawn.to(part.dtype or part.mean.dtype)


def gradients(part: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """d/dmean = gate; d/dgate = slab * soft (1 - soft) / beta * dlogit/dgate; d/dstd = gate * z; None if not needed.

    In straight-through mode the gate is hard in d/dmean and d/dstd, soft in d/dgate; in hard mode d/dgate is zero, and
    in hard-concrete mode wherever the gate is clamped, and elsewhere ZETA - GAMMA times as much.
    """
    given = out.float()
    gate, x = _gates(part, law)
    to_mean = (given * gate).to(part.mean.dtype) if needs[0] else None
    slab, to_std = part.mean.float(), None
    if part.std is not None:
        z, std = _normals(part), _std(part, law)
        slab = slab + std * z
        if needs[2]:
            to_std = summed(given * gate * z * (std if law.log_std else 1.0), part)
    if not needs[1]:
        return to_mean, None, to_std
    if law.mode == HARD:
        return to_mean, torch.zeros_like(part.gate), to_std
    # Not 1 - soft: by subtraction no digits would be left where the slope of a clamped gate is large.
    to_gate = given * slab * torch.sigmoid(x) * torch.sigmoid(-x) / law.beta * _slope(part, law)
    if law.mode == STRETCHED:
        to_gate = torch.where((gate > 0) & (gate < 1), (ZETA - GAMMA) * to_gate, 0.0)
    return to_mean, to_gate, to_std


def _slope(part: SampleInputs, law: Law) -> Tensor | float:
    """dlogit/dgate: sharpness, or 1 / (p (1 - p)) inside the clamp and 0 outside."""
    if law.mapping == CLAMP:
        p = part.gate.clamp(ETA, 1 - ETA)
        return torch.where(p == part.gate, 1 / (p * (1 - p)), 0.0)
    return 1.0 if part.sharpness is None else _rows(part.sharpness, part.gate)


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
        offset: int,
        dtype: torch.dtype | None,
        law: Law,
    ) -> Tensor:
        return draw(SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype), law)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:7])
        ctx.offset, ctx.dtype, ctx.law = inputs[7:]

    @staticmethod
    def backward(ctx: Any, *out: Tensor) -> tuple[Tensor | None, ...]:
        mean, gate, std, seed, step, shift, sharpness = ctx.saved_tensors
        part = SampleInputs(mean, gate, std, seed, step, ctx.offset, shift, sharpness, ctx.dtype)
        return *gradients(part, ctx.law, out[0], ctx.needs_input_grad[:3]), *[None] * 7


def sample(part: SampleInputs, law: Law) -> Tensor:
    """The differentiable draw that torch.func can transform."""
    mean, gate, std, seed, step, offset, shift, sharpness, dtype, _ = part
    return _Sample.apply(mean, gate, std, seed, step, shift, sharpness, offset, dtype, law)
