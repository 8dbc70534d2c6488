"""The draw as an operation that torch differentiates: in eager mode, under torch.compile and under torch.func.

Under torch.compile it is the operators pacprune::sample and pacprune::sample_gradient, called as they are.
"""

from typing import Any

import torch
from torch import Tensor

from pacprune.kernels import dispatch, reference
from pacprune.kernels.law import Law, SampleInputs


def sample(inputs: SampleInputs, law: Law, weights: Tensor | None = None) -> Tensor:
    """One draw, differentiable in mean, gate and std; `weights` is its value if it was computed before."""
    if inputs.shared:
        raise ValueError("draws that share their mean have no gradient; use `draw`, or stack the means")
    mean, gate, std, seed, step, offset, shift, sharpness, dtype, _, noise = inputs
    if torch.compiler.is_compiling():
        static = (offset, dtype, law.mapping, law.coupling, law.mode, law.beta, law.log_std, law.theta)
        return torch.ops.pacprune.sample(mean, gate, std, seed, step, shift, sharpness, noise, *static)
    if torch._C._are_functorch_transforms_active():
        return reference.sample(inputs, law)
    return _EagerSample.apply(mean, gate, std, inputs, law, () if weights is None else (weights,))


class _EagerSample(torch.autograd.Function):
    """The differentiable draw in eager mode. It saves its inputs alone; `weights` is empty or holds the draw."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        gate: Tensor,
        std: Tensor | None,
        inputs: SampleInputs,
        law: Law,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        ctx.save_for_backward(mean, gate, std, *inputs.counters)
        ctx.offset, ctx.dtype, ctx.law = inputs.offset, inputs.dtype, law
        # A new tensor over the same memory: autograd marks what it returns, and the slice serves more than one read.
        return weights[0].detach() if weights else dispatch.draw([inputs], law)[0]

    @staticmethod
    def backward(ctx: Any, *out: Tensor) -> tuple[Tensor | None, ...]:
        mean, gate, std, seed, step, shift, sharpness, noise = ctx.saved_tensors
        inputs = SampleInputs(mean, gate, std, seed, step, ctx.offset, shift, sharpness, ctx.dtype, False, noise)
        # Plain torch where a gradient of this gradient is wanted.
        differentiate = reference.gradients if torch.is_grad_enabled() else dispatch.gradients
        return *differentiate(inputs, ctx.law, out[0], ctx.needs_input_grad[:3]), None, None, None


@torch.library.custom_op("pacprune::sample", mutates_args=())
def _sample(
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
    mapping: str,
    coupling: float,
    mode: str,
    beta: float,
    log_std: bool,
    theta: float,
) -> Tensor:
    inputs = SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype, False, noise)
    return dispatch.draw([inputs], Law(mapping, coupling, mode, beta, log_std, theta))[0]


@_sample.register_fake
def _(mean: Tensor, *rest: Any) -> Tensor:
    return mean.new_empty(mean.shape, dtype=rest[8] or mean.dtype)


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
    noise: Tensor | None,
    offset: int,
    dtype: torch.dtype | None,
    mapping: str,
    coupling: float,
    mode: str,
    beta: float,
    log_std: bool,
    theta: float,
    needs: list[bool],
) -> list[Tensor]:
    inputs = SampleInputs(mean, gate, std, seed, step, offset, shift, sharpness, dtype, False, noise)
    law = Law(mapping, coupling, mode, beta, log_std, theta)
    gradients = dispatch.gradients(inputs, law, out, (needs[0], needs[1], needs[2]))
    return [gradient for gradient in gradients if gradient is not None]


@_sample_gradient.register_fake
def _(out: Tensor, mean: Tensor, gate: Tensor, std: Tensor | None, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip((mean, gate, std), rest[-1], strict=True) if need and t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.static = inputs[8:]


def _backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
    mean, gate, std, *counters = ctx.saved_tensors
    needs = [need and t is not None for need, t in zip(ctx.needs_input_grad, (mean, gate, std), strict=False)]
    gradients = iter(torch.ops.pacprune.sample_gradient(out, mean, gate, std, *counters, *ctx.static, needs))
    return *[next(gradients) if need else None for need in needs], *[None] * 13


_sample.register_autograd(_backward, setup_context=_save)
