"""Sampling of spike-and-slab weights: w = gate * (mean + std * z), with noise made on the spot and never stored.

One uniform u per weight gives both gates: relaxed sigmoid((logit + logit u) / beta), which is the two-class
Gumbel-softmax in distribution, and hard 1[u > 1 - keep_prob], the exact Bernoulli. Backward makes the noise again.
"""

from typing import Any

import torch
from torch import Tensor

from pacprune import philox

SOFT, STRAIGHT_THROUGH, HARD = "concrete", "straight-through", "hard"


def keep_prob(logit: Tensor) -> Tensor:
    """sigmoid(logit), as the float32 multiple of 2**-32 that the hard gate really has as its probability."""
    return quantised(torch.sigmoid(logit.detach().double()))


def quantised(p: Tensor) -> Tensor:
    """p rounded to float32 and to a multiple of 2**-32: a 32-bit word is below p * 2**32 with probability exactly p."""
    return (torch.round(p.to(torch.float32).double() * 2.0**32) * 2.0**-32).to(torch.float32)


def hard_gate(p: Tensor, word: Tensor) -> Tensor:
    """1[u > 1 - p] as a comparison of integers, so that every backend gives the same bits; p must be `quantised`."""
    return word.unflatten(-1, p.shape) >= 2**32 - (p.double() * 2.0**32).to(torch.int64)


def sample(
    mean: Tensor,
    logit: Tensor,
    std: Tensor | None,
    *,
    seed: Tensor,
    step: Tensor,
    offset: int,
    mode: str,
    beta: float,
) -> Tensor:
    """One draw of the weights whose first index is `offset`; differentiable in mean, logit and std.

    Gradients: d/dmean = gate; d/dlogit = slab * soft (1 - soft) / beta (zero in hard mode); d/dstd = gate * z. In
    straight-through mode the gate is hard in the forward pass and in d/dmean, soft in d/dlogit.
    """
    return _Sample.apply(mean, logit, std, seed, step, offset, mode, beta)


def _gates(logit: Tensor, seed: Tensor, step: Tensor, offset: int, mode: str, beta: float) -> tuple[Tensor, Tensor]:
    """(gate used for the weight, relaxed gate)."""
    word = philox.words(logit.numel(), seed=seed, step=step, stream=philox.GATE, offset=offset, device=logit.device)
    if mode == HARD:
        gate = hard_gate(keep_prob(logit), word).to(torch.float32)
        return gate, gate
    u = philox.uniform(word).reshape(logit.shape)
    soft = torch.sigmoid((logit + (torch.log(u) - torch.log1p(-u))) / beta)
    if mode == SOFT:
        return soft, soft
    return hard_gate(keep_prob(logit), word).to(torch.float32), soft


def _normals(mean: Tensor, seed: Tensor, step: Tensor, offset: int) -> Tensor:
    z = philox.normal(mean.numel(), seed=seed, step=step, stream=philox.SLAB, offset=offset, device=mean.device)
    return z.reshape(mean.shape)


class _Sample(torch.autograd.Function):
    """Saves its inputs alone; the noise is a function of (seed, step, index) and is made twice instead of kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor, logit: Tensor, std: Tensor | None, seed: Tensor, step: Tensor, offset: int, mode: str, beta: float
    ) -> Tensor:
        gate, _ = _gates(logit, seed, step, offset, mode, beta)
        slab = mean if std is None else mean.float() + std * _normals(mean, seed, step, offset)
        return (gate * slab).to(mean.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        mean, logit, std, seed, step, ctx.offset, ctx.mode, ctx.beta = inputs
        ctx.has_std = std is not None
        ctx.save_for_backward(mean, logit, seed, step, *([std] if ctx.has_std else []))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, logit, seed, step, *rest = ctx.saved_tensors
        out = gradients[0].float()
        gate, soft = _gates(logit, seed, step, ctx.offset, ctx.mode, ctx.beta)
        slab, to_std = mean.float(), None
        if ctx.has_std:
            z = _normals(mean, seed, step, ctx.offset)
            slab = slab + rest[0] * z
            to_std = (out * gate * z).sum_to_size(rest[0].shape) if ctx.needs_input_grad[2] else None
        to_logit = out * slab * soft * (1 - soft) / ctx.beta if ctx.mode != HARD else torch.zeros_like(logit)
        return (out * gate).to(mean.dtype), to_logit, to_std, None, None, None, None, None
