"""The sampler as operators pacprune::sample and pacprune::sample_gradient, which torch.compile calls as they are."""

from typing import Any

import torch
from torch import Tensor

from pacprune import kernels
from pacprune.kernels.law import Law, SampleInputs


@torch.library.custom_op("pacprune::sample", mutates_args=())
def _sample(
    mean: Tensor,
    gate: Tensor,
    std: Tensor | None,
    seed: Tensor,
    step: Tensor,
    shift: Tensor | None,
    sharpness: Tensor | None,
    offset: int,
    dtype: torch.dtype | None,
    mapping: str,
    coupling: float,
    mode: str,
    beta: float,
    log_std: bool,
) -> Tensor:
    part = SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype)
    return kernels.draw([part], Law(mapping, coupling, mode, beta, log_std))[0]


@_sample.register_fake
def _(mean: Tensor, *rest: Any) -> Tensor:
    return mean.new_empty(mean.shape, dtype=rest[7] or mean.dtype)


@torch.library.custom_op("pacprune::sample_gradient", mutates_args=())
def _sample_gradient(
    out: Tensor,
    mean: Tensor,
    gate: Tensor,
    std: Tensor | None,
    seed: Tensor,
    step: Tensor,
    shift: Tensor | None,
    sharpness: Tensor | None,
    offset: int,
    dtype: torch.dtype | None,
    mapping: str,
    coupling: float,
    mode: str,
    beta: float,
    log_std: bool,
    needs: list[bool],
) -> list[Tensor]:
    part = SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype)
    law = Law(mapping, coupling, mode, beta, log_std)
    found = kernels.gradients(part, law, out, (needs[0], needs[1], needs[2]))
    return [gradient for gradient in found if gradient is not None]


@_sample_gradient.register_fake
def _(out: Tensor, mean: Tensor, gate: Tensor, std: Tensor | None, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip((mean, gate, std), rest[-1], strict=True) if need and t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.static = inputs[7:]


def _backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
    mean, gate, std, *rest = ctx.saved_tensors
    needs = [need and t is not None for need, t in zip(ctx.needs_input_grad, (mean, gate, std), strict=False)]
    found = iter(torch.ops.pacprune.sample_gradient(out, mean, gate, std, *rest, *ctx.static, needs))
    return *[next(found) if need else None for need in needs], *[None] * 11


_sample.register_autograd(_backward, setup_context=_save)
