"""Strided convolutions of K networks at once, as the operator pacprune::convolution.

vmap makes them grouped convolutions, which cuDNN runs group by group when they are strided. Here the patches of all
members are gathered in one launch and multiplied with all members' weights in another.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("pacprune::convolution", mutates_args=())
def _convolution(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int
) -> tuple[Tensor, Tensor]:
    """(F.conv2d(x, weight, None, stride, padding, 1, groups), what the gradient needs of x); channels-last on a GPU."""
    if not x.is_cuda:
        return F.conv2d(x, weight, None, stride, padding, 1, groups), x.clone()
    from pacprune.kernels import patches

    how, shape = _how(weight, stride, padding), _shape(x, weight, stride, padding)
    gathered = patches.gather(_channels_last(x), groups, shape, how)
    out = x.new_empty(len(x), *shape, len(weight))
    torch.bmm(gathered, _matrices(weight, groups), out=_members(out, groups))
    return out.permute(0, 3, 1, 2), gathered


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int) -> tuple[Tensor, Tensor]:
    high, wide = _shape(x, weight, stride, padding)
    if not x.is_cuda:
        return x.new_empty(len(x), len(weight), high, wide), torch.empty_like(x)
    out = x.new_empty(len(x), high, wide, len(weight)).permute(0, 3, 1, 2)
    return out, x.new_empty(groups, len(x) * high * wide, weight[0].numel())


@torch.library.custom_op("pacprune::convolution_gradient", mutates_args=())
def _gradient(
    out: Tensor, kept: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int], groups: int
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to x, of the given size, and to the weights."""
    if not out.is_cuda:
        found = torch.ops.aten.convolution_backward(
            out, kept, weight, None, stride, padding, [1, 1], False, [0, 0], groups, [True, True, False]
        )
        return found[0].contiguous(), found[1].contiguous()
    from pacprune.kernels import patches

    each = _members(_channels_last(out).permute(0, 2, 3, 1), groups)
    product = torch.bmm(kept.mT, each)
    to_weight = product.unflatten(1, (*weight.shape[2:], weight.shape[1])).permute(0, 4, 3, 1, 2).flatten(0, 1)
    back = torch.bmm(each, _matrices(weight, groups).mT)
    how, shape = _how(weight, stride, padding), (out.shape[2], out.shape[3])
    return patches.spread(back, torch.Size(size), groups, shape, how), to_weight.contiguous()


@_gradient.register_fake
def _(
    out: Tensor, kept: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int], groups: int
) -> tuple[Tensor, Tensor]:
    n, width, high, wide = size
    to_x = out.new_empty(n, high, wide, width).permute(0, 3, 1, 2) if out.is_cuda else out.new_empty(size)
    return to_x, weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.settings = inputs
    ctx.size = list(x.shape)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], weight)


def _backward(ctx: Any, out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    kept, weight = ctx.saved_tensors
    return *_gradient(out, kept, weight, ctx.size, *ctx.settings), None, None, None


_convolution.register_autograd(_backward, setup_context=_setup)


@_convolution.register_vmap
def _(
    info: Any,
    dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    groups: int,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
    """The members become groups: their channels lie side by side, as vmap's own rule for convolutions has them."""
    k = info.batch_size
    weight = weight.expand(k, *weight.shape) if dims[1] is None else weight.movedim(dims[1], 0)
    if dims[0] is None:  # one input for all: one convolution with all their outputs
        out, kept = _convolution(x, weight.flatten(0, 1), stride, padding, groups)
    else:
        x = x.movedim(dims[0], 1).flatten(1, 2)
        out, kept = _convolution(x, weight.flatten(0, 1), stride, padding, groups * k)
    return (out.unflatten(1, (k, -1)), kept), (1, None)


def convolution(x: Tensor, weight: Tensor, *, stride: list[int], padding: list[int]) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding), fast under vmap."""
    return _convolution(x, weight, stride, padding, 1)[0]


def _shape(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> tuple[int, int]:
    high, wide = ((x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in (0, 1))
    return high, wide


def _how(weight: Tensor, stride: list[int], padding: list[int]) -> tuple[int, ...]:
    return (*weight.shape[2:], *stride, *padding)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _matrices(weight: Tensor, groups: int) -> Tensor:
    """[K, taps * channels, outputs]."""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous()


def _members(image: Tensor, groups: int) -> Tensor:
    """A view [K, places, channels] of [n, height, width, K * channels]."""
    return image.flatten(0, 2).unflatten(1, (groups, -1)).transpose(0, 1)
