# pyright: reportMissingImports=false, reportMissingParameterType=false
"""The step of `block_adam` in Triton: one launch for a tensor, one pass over it."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pacprune import philox
from pacprune.kernels.block_adam import BETA2, BLOCK, EPS, LEVELS, State, rows

TILE = 8
"""Blocks of one program."""
WARPS = 8

_BETA2, _EPS, _LEVELS = tl.constexpr(BETA2), tl.constexpr(EPS), tl.constexpr(float(LEVELS))
_STREAM = tl.constexpr(philox.ROUND)


@triton.jit
def _step(
    p_at,
    grad_at,
    mean_at,
    scale_at,
    square_at,
    step_at,
    rate_at,
    momentum,
    decay,
    count,
    blocks,
    inner,
    first_at,
    BF16: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE blocks of a tensor."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = number // blocks
    start = (number % blocks) * BLOCK
    column = start[:, None] + tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * inner + column
    listed = number < count
    inside = listed[:, None] & (column < inner)
    grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_at + number, mask=listed, other=0.0)
    mean = tl.load(mean_at + at, mask=inside, other=0).to(tl.float32) * scale[:, None]
    mean = momentum * mean + (1.0 - momentum) * grad
    size = tl.maximum(tl.minimum(inner - start, BLOCK), 1).to(tl.float32)
    square = tl.load(square_at + number, mask=listed, other=0.0)
    square = _BETA2 * square + (1.0 - _BETA2) * (tl.sum(grad * grad, axis=1) / size)
    tl.store(square_at + number, square, mask=listed)
    steps = tl.load(step_at)
    t = steps.to(tl.float32)
    rate = tl.load(rate_at)
    spread = tl.sqrt(square / (1.0 - tl.exp(t * tl.log(_BETA2)))) + _EPS
    pace = rate / (1.0 - tl.exp(t * tl.log(momentum)))
    value = tl.load(p_at + at, mask=inside, other=0.0).to(tl.float32)
    value = value * (1.0 - rate * decay) - pace * mean / spread[:, None]

    most = tl.max(tl.abs(mean), axis=1)
    scale = most / _LEVELS
    tl.store(scale_at + number, scale, mask=listed)
    block = ((tl.load(first_at) + number) * (BLOCK // 4))[:, None] + tl.arange(0, BLOCK // 4)[None, :]
    low = block.to(tl.uint32)
    zero = low * 0
    seed = (steps * 0).to(tl.int64)
    a, b, c, d = tl.philox(seed, low, (block >> 32).to(tl.uint32), zero + steps.to(tl.uint32), zero + _STREAM)
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE, BLOCK))
    level = mean / tl.where(most > 0.0, scale, 1.0)[:, None] + (word >> 16).to(tl.float32) * (2.0**-16)
    level = tl.minimum(tl.maximum(tl.floor(level), -_LEVELS), _LEVELS)
    tl.store(mean_at + at, level.to(tl.int8), mask=inside)
    if BF16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + (word & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < float("inf"), rounded, value)
    tl.store(p_at + at, value.to(p_at.dtype.element_ty), mask=inside)


def step_(p: Tensor, grad: Tensor, state: State, rate: Tensor, momentum: float, decay: float) -> None:
    """`block_adam.step_`."""
    form, place, kernel = rows(p), p if p.is_contiguous() else p.contiguous(), _step
    count = form.rows * form.blocks
    if not p.numel():
        return
    launch: Any = kernel
    with torch.cuda.device_of(p):
        launch[(triton.cdiv(count, TILE),)](
            place,
            grad.contiguous(),
            state.mean,
            state.scale,
            state.square,
            state.step,
            rate,
            float(momentum),
            float(decay),
            count,
            form.blocks,
            form.inner,
            state.first,
            BF16=p.dtype == torch.bfloat16,
            TILE=TILE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    if place is not p:
        p.copy_(place)
