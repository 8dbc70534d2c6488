"""Convolutions of K networks at once that cuDNN is slow at, as the operator pacprune::convolution.

vmap makes them grouped convolutions. cuDNN runs strided ones group by group; the kernels of `grouped` do not. With
stride 1 cuDNN multiplies the channels of several groups at once. It throws most products away, and is still faster.
Images with few channels are padded with zeros for cuDNN, which is slow at them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16
"""cuDNN is fast from so many input channels on."""
_ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""torch.compile need not copy an input into the layout that it had when it was traced."""


@torch.library.custom_op("pacprune::convolution", mutates_args=(), tags=_ANY_LAYOUT)
def _convolution(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding, 1, groups); channels-last on a GPU."""
    if not x.is_cuda:
        return F.conv2d(x, weight, None, stride, padding, 1, groups)
    from pacprune.kernels.conv import grouped

    out = grouped.forward(_innermost(x), _matrices(weight, groups), _sizes(x, weight, stride, padding, groups))
    return out.permute(0, 3, 1, 2)


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int) -> Tensor:
    rows, columns = _sizes(x, weight, stride, padding, groups)[2:4]
    return _like(x, len(weight), rows, columns)


@torch.library.custom_op("pacprune::convolution_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _gradient(
    out: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, to_x: bool
) -> tuple[Tensor, Tensor]:
    """Gradients in x (an empty tensor without `to_x`) and in the weights."""
    if not x.is_cuda:
        gradients = torch.ops.aten.convolution_backward(
            out, x, weight, None, stride, padding, [1, 1], False, [0, 0], groups, [to_x, True, False]
        )
        return gradients[0].contiguous() if to_x else x.new_empty(0), gradients[1].contiguous()
    from pacprune.kernels.conv import grouped

    sizes, slope = _sizes(x, weight, stride, padding, groups), _innermost(out)
    matrices = grouped.to_weight(slope, _innermost(x), sizes).unflatten(1, weight.shape[2:])
    to_weight = matrices.permute(0, 4, 3, 1, 2).reshape(weight.shape).to(weight.dtype).contiguous()  # one group: a view
    if not to_x:
        return x.new_empty(0), to_weight
    return grouped.to_input(slope, _matrices(weight, groups).mT.contiguous(), sizes).permute(0, 3, 1, 2), to_weight


@_gradient.register_fake
def _(
    out: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, to_x: bool
) -> tuple[Tensor, Tensor]:
    return _like(x, *x.shape[1:]) if to_x else x.new_empty(0), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.settings = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad[0]
    to_x, to_weight = _gradient(out, x, weight, *ctx.settings, needed)
    return to_x if needed else None, to_weight, None, None, None


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
) -> tuple[Tensor, int]:
    """The members become groups: their channels lie side by side, as vmap's own rule for convolutions has them."""
    k = info.batch_size
    weight = weight.expand(k, *weight.shape) if dims[1] is None else weight.movedim(dims[1], 0)
    if dims[0] is None and groups == 1:  # one input for all: a plain convolution with all their outputs
        x, weight = filled(x, weight.flatten(0, 1))
        return F.conv2d(x, weight, None, stride, padding).unflatten(1, (k, -1)), 1
    x = x.unsqueeze(1).expand(-1, k, *x.shape[1:]) if dims[0] is None else x.movedim(dims[0], 1)
    out = _convolution(x.flatten(1, 2), weight.flatten(0, 1), stride, padding, groups * k)
    return out.unflatten(1, (k, -1)), 1


def convolution(x: Tensor, weight: Tensor, *, stride: list[int], padding: list[int]) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding), fast under vmap."""
    return _convolution(x, weight, stride, padding, 1)


def filled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pads both with zero channels in half precision, for which cuDNN is fast; otherwise both stay as they are."""
    more = (0, 0, 0, 0, 0, max(0, FEW - x.shape[-3]) if x.is_cuda and x.dtype.itemsize == 2 else 0)
    return (F.pad(x, more), F.pad(weight, more)) if more[-1] else (x, weight)


def _sizes(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int) -> list[int]:
    """What `grouped.forward` takes."""
    taps, image = weight.shape[2:], x.shape[2:]
    out = [(image[i] + 2 * padding[i] - taps[i]) // stride[i] + 1 for i in (0, 1)]
    return [*image, *out, groups, weight.shape[1], len(weight) // groups, *taps, *stride, *padding]


def _like(x: Tensor, channels: int, rows: int, columns: int) -> Tensor:
    if not x.is_cuda:
        return x.new_empty(len(x), channels, rows, columns)
    return x.new_empty(len(x), rows, columns, channels).permute(0, 3, 1, 2)


def _innermost(x: Tensor) -> Tensor:
    """[n, height, width, channels], contiguous: a view of what is channels-last already."""
    return x.permute(0, 2, 3, 1).contiguous()


def _matrices(weight: Tensor, groups: int) -> Tensor:
    """[groups, taps, inputs, outputs]."""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous()
