# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""The first convolutions of K networks in Triton: of images with so few channels that all taps fit into one product.

Images are [K, n, channels, height, width], where neighbours in a row lie side by side; what comes out is channels-last,
[n, rows, columns, K * outputs] in memory, as the next convolution wants it. Weights are [K, channels * taps, outputs].
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pacprune.kernels.conv.grouped import PROGRAMS, options


@triton.jit
def _patch(
    x,
    member,
    place,
    n,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_RIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    INNER: tl.constexpr,
):
    """[places, channels * taps]: the pixels under the taps."""
    j = tl.arange(0, INNER)
    c, a, b = j // (TAPS_DOWN * TAPS_RIGHT), j // TAPS_RIGHT % TAPS_DOWN, j % TAPS_RIGHT
    image, row, column = place // (ROWS * COLUMNS), place // COLUMNS % ROWS, place % COLUMNS
    y = (row * DOWN - TOP)[:, None] + a[None, :]
    z = (column * RIGHT - LEFT)[:, None] + b[None, :]
    is_pixel = (image < n)[:, None] & (j < INPUTS * TAPS_DOWN * TAPS_RIGHT)[None, :]
    is_pixel = is_pixel & (y >= 0) & (y < HIGH) & (z >= 0) & (z < WIDE)
    plane = (member.to(tl.int64) * n + image)[:, None] * INPUTS + c[None, :]
    return tl.load(x + plane * (HIGH * WIDE) + y * WIDE + z, mask=is_pixel, other=0.0)


@triton.jit
def _forward(
    x,
    weight,
    out,
    n,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_RIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    member = tl.program_id(0) % GROUPS  # neighbours write into the same lines of memory
    place = tl.program_id(0) // GROUPS * SIZE + tl.arange(0, SIZE)
    patch = _patch(
        x, member, place, n, HIGH, WIDE, ROWS, COLUMNS, INPUTS, TAPS_DOWN, TAPS_RIGHT, DOWN, RIGHT, TOP, LEFT, INNER
    )
    j, o = tl.arange(0, INNER), tl.arange(0, OUTER)
    is_tap = (j < INPUTS * TAPS_DOWN * TAPS_RIGHT)[:, None] & (o < OUTPUTS)[None, :]
    at = (member * (INPUTS * TAPS_DOWN * TAPS_RIGHT) + j)[:, None] * OUTPUTS + o[None, :]
    total = tl.dot(patch, tl.load(weight + at, mask=is_tap, other=0.0), input_precision=PRECISION)
    inside = (place < n * (ROWS * COLUMNS))[:, None] & (o < OUTPUTS)[None, :]
    to = place.to(tl.int64)[:, None] * (GROUPS * OUTPUTS) + member * OUTPUTS + o[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _to_weight(
    out,
    x,
    parts,
    n,
    BLOCKS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_RIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One member and one chunk of the places; the chunks are added afterwards, in a fixed order."""
    member, part = tl.program_id(0), tl.program_id(1)
    j, o = tl.arange(0, INNER), tl.arange(0, OUTER)
    total = tl.zeros((INNER, OUTER), dtype=tl.float32)
    for number in range(BLOCKS):
        place = (part * BLOCKS + number) * SIZE + tl.arange(0, SIZE)
        patch = _patch(
            x, member, place, n, HIGH, WIDE, ROWS, COLUMNS, INPUTS, TAPS_DOWN, TAPS_RIGHT, DOWN, RIGHT, TOP, LEFT, INNER
        )
        inside = (place < n * (ROWS * COLUMNS))[:, None] & (o < OUTPUTS)[None, :]
        at = place.to(tl.int64)[:, None] * (GROUPS * OUTPUTS) + member * OUTPUTS + o[None, :]
        slope = tl.load(out + at, mask=inside, other=0.0)
        total = tl.dot(tl.trans(patch), slope, total, input_precision=PRECISION)
    is_tap = (j < INPUTS * TAPS_DOWN * TAPS_RIGHT)[:, None] & (o < OUTPUTS)[None, :]
    to = ((part * GROUPS + member) * (INPUTS * TAPS_DOWN * TAPS_RIGHT) + j)[:, None] * OUTPUTS + o[None, :]
    tl.store(parts + to, total, mask=is_tap)


def forward(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """[n, rows, columns, K * outputs] of x [K, n, channels, height, width]; sizes as `grouped.forward` takes them."""
    n, (rows, columns, groups, inputs, outputs, down, right) = x.shape[1], sizes[2:9]
    out = x.new_empty(n, rows, columns, groups * outputs)
    launch = options(sizes, x, inner=inputs * down * right, outer=outputs)
    _forward[(groups * triton.cdiv(n * rows * columns, launch["SIZE"]),)](x, weight, out, n, **launch)
    return out


def to_weight(out: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient in the weights, [K, channels * taps, outputs] in float32."""
    n, (rows, columns, groups, inputs, outputs, down, right) = x.shape[1], sizes[2:9]
    launch = options(sizes, x, inner=inputs * down * right, outer=outputs)
    blocks = triton.cdiv(n * rows * columns, max(1, PROGRAMS // groups) * launch["SIZE"])
    chunks = triton.cdiv(n * rows * columns, blocks * launch["SIZE"])
    parts = x.new_empty(chunks, groups, inputs * down * right, outputs, dtype=torch.float32)
    _to_weight[groups, chunks](out, x, parts, n, blocks, **launch)
    return parts.sum(0)
