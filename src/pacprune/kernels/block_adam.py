"""Adam with an 8-bit mean and one second moment for every block of 256 numbers of a row: about 1 byte per number.

    mean   <- momentum mean + (1 - momentum) grad                       as int8, times the largest |mean| of its block
    square <- BETA2 square + (1 - BETA2) mean of grad^2 in the block    one number per block
    p      <- (1 - rate decay) p - rate unbiased(mean) / (sqrt(unbiased(square)) + EPS)

The mean is rounded at random to its 255 levels, and p to bfloat16 if it is of that type, so that steps far below a
level add up. The random numbers follow from (step, index). Blocks lie within rows, so that a tensor cut into rows has
the same ones.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pacprune import philox
from pacprune.kernels.dispatch import backend

BLOCK = 256
LEVELS = 127
BETA2, EPS = 0.999, 1e-8


class Rows(NamedTuple):
    """How a tensor is cut into rows: by its first dimension if it has two or more."""

    rows: int
    inner: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return max(1, -(-self.inner // BLOCK))


def rows(p: Tensor) -> Rows:
    """The rows of a tensor."""
    return Rows(p.shape[0], p.shape[1:].numel()) if p.ndim > 1 else Rows(1, p.numel())


class State(NamedTuple):
    """What is kept of one tensor between steps."""

    mean: Tensor
    """int8, of the tensor's shape."""
    scale: Tensor
    """What a level of a block's mean is worth, [rows, blocks]."""
    square: Tensor
    """[rows, blocks]."""
    step: Tensor
    """How many steps were taken."""
    first: Tensor
    """The number of the first block, which the random numbers follow from."""


def new_state(p: Tensor) -> State:
    """The state before the first step."""
    form = rows(p)
    per_block = torch.zeros(form.rows, form.blocks, device=p.device)
    counts = [torch.zeros((), dtype=torch.int64, device=p.device) for _ in range(2)]
    mean = torch.zeros(p.shape, dtype=torch.int8, device=p.device)
    return State(mean, per_block, per_block.clone(), *counts)


def step_(p: Tensor, grad: Tensor, state: State, rate: Tensor, momentum: float, decay: float) -> None:
    """Moves p by one step, in place; `state.step` counts this step already."""
    if not p.numel():
        return
    if backend(p.device) == "triton" and p.dtype in (torch.float32, torch.bfloat16):
        from pacprune.kernels import triton_block_adam

        triton_block_adam.step_(p, grad, state, rate, momentum, decay)
    else:
        step_reference_(p, grad, state, rate, momentum, decay)


def step_reference_(p: Tensor, grad: Tensor, state: State, rate: Tensor, momentum: float, decay: float) -> None:
    """`step_` in plain torch."""
    form = rows(p)

    def cut(tensor: Tensor) -> Tensor:
        flat = tensor.reshape(form.rows, form.inner).float()
        return F.pad(flat, (0, form.blocks * BLOCK - form.inner)).unflatten(1, (form.blocks, BLOCK))

    def join(tensor: Tensor) -> Tensor:
        return tensor.flatten(1)[:, : form.inner].reshape(p.shape)

    t, new = state.step.double(), cut(grad)
    mean = momentum * (cut(state.mean) * state.scale[..., None]) + (1 - momentum) * new
    sizes = torch.full((form.blocks,), float(BLOCK), device=p.device)
    sizes[-1] = form.inner - BLOCK * (form.blocks - 1)
    state.square.mul_(BETA2).add_(new.square().sum(-1) / sizes, alpha=1 - BETA2)
    size = torch.sqrt(state.square / (1 - BETA2**t).float()) + EPS
    pace = rate / (1 - momentum**t).float()
    value = cut(p) * (1 - rate * decay) - pace * mean / size[..., None]

    most = mean.abs().amax(-1)
    state.scale.copy_(most / LEVELS)
    place = {"stream": philox.ROUND, "offset": int(state.first) * BLOCK, "device": p.device}
    word = philox.words(value.numel(), seed=0, step=state.step, **place).reshape(value.shape)
    level = mean / torch.where(most > 0, state.scale, 1.0)[..., None] + (word >> 16).float() * 2.0**-16
    state.mean.copy_(join(level.floor().clamp(-LEVELS, LEVELS)))
    if p.dtype == torch.bfloat16:
        rounded = ((value.view(torch.int32).long() + (word & 0xFFFF)) & ~0xFFFF).to(torch.int32)
        value = torch.where(value.isfinite(), rounded.view(torch.float32), value)
    p.copy_(join(value))
