# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""Grouped convolutions with few channels per group in Triton: forward, and the gradients in the input and the weights.

Images are channels-last, [n, height, width, groups * channels] in memory; weights are [groups, taps, inputs, outputs].
A program serves one group: its matrix products have the size of that group, not of several. Neighbouring programs serve
neighbouring groups, whose channels share lines of memory. The taps of one row and the channels are one dimension of the
product, since 16 channels of a single tap would fill no tensor core. Sums are in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIZES = ("HIGH", "WIDE", "ROWS", "COLUMNS", "GROUPS", "INPUTS", "OUTPUTS")
_SIZES += ("TAPS_DOWN", "TAPS_RIGHT", "DOWN", "RIGHT", "TOP", "LEFT")
_PLACES = 64
"""Pixels that one program multiplies at a time."""
_WARPS = 4
PROGRAMS = 2048
"""About how many programs the gradient in the weights is divided into."""


@triton.jit
def _forward(
    x,
    weight,
    out,
    places,
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
    group = tl.program_id(0) % GROUPS
    start = tl.program_id(0) // GROUPS * SIZE
    place = start + tl.arange(0, SIZE)
    first = start // (ROWS * COLUMNS)  # images are counted from it, so that offsets within the tile have 32 bits
    image, row, column = place // (ROWS * COLUMNS) - first, place // COLUMNS % ROWS, place % COLUMNS
    inside = place < places
    c, o = tl.arange(0, INNER), tl.arange(0, OUTER)
    b, i = c // INPUTS, c % INPUTS
    x += first.to(tl.int64) * (HIGH * WIDE * GROUPS * INPUTS) + group * INPUTS
    weight += group * (TAPS_DOWN * TAPS_RIGHT * INPUTS * OUTPUTS) + c[:, None] * OUTPUTS + o[None, :]
    is_tap = (c[:, None] < TAPS_RIGHT * INPUTS) & (o[None, :] < OUTPUTS)
    z = (column * RIGHT - LEFT)[:, None] + b[None, :]
    across = inside[:, None] & (z >= 0) & (z < WIDE) & (c[None, :] < TAPS_RIGHT * INPUTS)
    along = (image * (HIGH * WIDE))[:, None] + z
    total = tl.zeros((SIZE, OUTER), dtype=tl.float32)
    for a in tl.static_range(TAPS_DOWN):
        y = row * DOWN + (a - TOP)
        at = (along + (y * WIDE)[:, None]) * (GROUPS * INPUTS) + i[None, :]
        patch = tl.load(x + at, mask=across & ((y >= 0) & (y < HIGH))[:, None], other=0.0)
        taps = tl.load(weight + a * (TAPS_RIGHT * INPUTS * OUTPUTS), mask=is_tap, other=0.0)
        total = tl.dot(patch, taps, total, input_precision=PRECISION)
    to = (tl.arange(0, SIZE) * (GROUPS * OUTPUTS))[:, None] + o[None, :]
    out += start.to(tl.int64) * (GROUPS * OUTPUTS) + group * OUTPUTS
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & (o[None, :] < OUTPUTS))


@triton.jit
def _to_input(
    out,
    weight,
    x,
    images,
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
    """Pixels that agree modulo the stride lie under the same taps; `weight` is [groups, taps, outputs, inputs]."""
    group, across, below = tl.program_id(0) % GROUPS, tl.program_id(1) % RIGHT, tl.program_id(1) // RIGHT
    high, wide = tl.cdiv(HIGH - below, DOWN), tl.cdiv(WIDE - across, RIGHT)
    start = tl.program_id(0) // GROUPS * SIZE
    pixel = start + tl.arange(0, SIZE)
    first = start // (high * wide)
    image, row, column = pixel // (high * wide) - first, pixel // wide % high, pixel % wide
    inside = first + image < images
    c, i = tl.arange(0, INNER), tl.arange(0, OUTER)
    o = c % OUTPUTS
    out += first.to(tl.int64) * (ROWS * COLUMNS * GROUPS * OUTPUTS) + group * OUTPUTS
    weight += group * (TAPS_DOWN * TAPS_RIGHT * INPUTS * OUTPUTS)
    # Taps a, a + DOWN, ... of the outputs in rows y, y - 1, ... lie on this pixel; so do b and x across.
    a, y = (below + TOP) % DOWN, row + (below + TOP) // DOWN
    b = (across + LEFT) % RIGHT + c // OUTPUTS * RIGHT
    x_out = (column + (across + LEFT) // RIGHT)[:, None] - (c // OUTPUTS)[None, :]
    is_output = inside[:, None] & (x_out >= 0) & (x_out < COLUMNS) & (b < TAPS_RIGHT)[None, :]
    along = (image * (ROWS * COLUMNS))[:, None] + x_out
    is_tap = (b[:, None] < TAPS_RIGHT) & (i[None, :] < INPUTS)
    total = tl.zeros((SIZE, OUTER), dtype=tl.float32)
    for step in tl.static_range((TAPS_DOWN + DOWN - 1) // DOWN):
        tap, y_out = a + step * DOWN, y - step
        hit = (y_out >= 0) & (y_out < ROWS) & (tap < TAPS_DOWN)
        at = (along + (y_out * COLUMNS)[:, None]) * (GROUPS * OUTPUTS) + o[None, :]
        slope = tl.load(out + at, mask=is_output & hit[:, None], other=0.0)
        at = ((tap * TAPS_RIGHT + b) * OUTPUTS + o)[:, None] * INPUTS + i[None, :]
        taps = tl.load(weight + at, mask=is_tap & (tap < TAPS_DOWN), other=0.0)
        total = tl.dot(slope, taps, total, input_precision=PRECISION)
    to = (image * HIGH + row * DOWN + below) * WIDE + column * RIGHT + across
    x += first.to(tl.int64) * (HIGH * WIDE * GROUPS * INPUTS) + group * INPUTS
    to = (to * (GROUPS * INPUTS))[:, None] + i[None, :]
    tl.store(x + to, total.to(x.dtype.element_ty), mask=inside[:, None] & (i[None, :] < INPUTS))


@triton.jit
def _to_weight(
    out,
    x,
    parts,
    places,
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
    """One group, one row of taps and one chunk of the outputs; the chunks are added afterwards, in a fixed order."""
    group, a, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c, o = tl.arange(0, INNER), tl.arange(0, OUTER)
    b, i = c // INPUTS, c % INPUTS
    start = part * BLOCKS * SIZE
    first = start // (ROWS * COLUMNS)
    x += first.to(tl.int64) * (HIGH * WIDE * GROUPS * INPUTS) + group * INPUTS
    out += start.to(tl.int64) * (GROUPS * OUTPUTS) + group * OUTPUTS
    total = tl.zeros((INNER, OUTER), dtype=tl.float32)
    for number in range(BLOCKS):
        step = number * SIZE + tl.arange(0, SIZE)
        place = start + step
        image, row, column = place // (ROWS * COLUMNS) - first, place // COLUMNS % ROWS, place % COLUMNS
        inside = place < places
        at = (step * (GROUPS * OUTPUTS))[:, None] + o[None, :]
        slope = tl.load(out + at, mask=inside[:, None] & (o[None, :] < OUTPUTS), other=0.0)
        y = row * DOWN + a - TOP
        z = (column * RIGHT - LEFT)[:, None] + b[None, :]
        is_pixel = (inside & (y >= 0) & (y < HIGH))[:, None] & (z >= 0) & (z < WIDE)
        is_pixel = is_pixel & (c[None, :] < TAPS_RIGHT * INPUTS)
        at = (((image * HIGH + y) * WIDE)[:, None] + z) * (GROUPS * INPUTS) + i[None, :]
        patch = tl.load(x + at, mask=is_pixel, other=0.0)
        total = tl.dot(tl.trans(patch), slope, total, input_precision=PRECISION)
    to = ((part * GROUPS + group) * TAPS_DOWN + a) * (TAPS_RIGHT * INPUTS * OUTPUTS)
    is_tap = (c[:, None] < TAPS_RIGHT * INPUTS) & (o[None, :] < OUTPUTS)
    tl.store(parts + to + c[:, None] * OUTPUTS + o[None, :], total, mask=is_tap)


def options(sizes: Sequence[int], x: Tensor, *, inner: int, outer: int) -> dict[str, Any]:
    """The last arguments of all three kernels, which multiply [places, inner] and [inner, outer] matrices."""
    exact = x.dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]
    padded = (max(16, triton.next_power_of_2(n)) for n in (inner, outer))  # the least that a product takes
    tile = dict(zip(("INNER", "OUTER"), padded, strict=True)) | {"SIZE": _PLACES, "num_warps": _WARPS}
    return dict(zip(_SIZES, sizes, strict=True)) | tile | {"PRECISION": "ieee" if exact else "tf32"}


def forward(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """[n, rows, columns, groups * outputs] of x [n, height, width, groups * inputs].

    sizes: height, width, rows, columns, groups, inputs, outputs, taps down and right, stride down and right, padding
    above and left.
    """
    rows, columns, groups, inputs, outputs = sizes[2:7]
    out = x.new_empty(len(x), rows, columns, groups * outputs)
    places, launch = len(x) * rows * columns, options(sizes, x, inner=sizes[8] * inputs, outer=outputs)
    _forward[(groups * triton.cdiv(places, launch["SIZE"]),)](x, weight, out, places, **launch)
    return out


def to_input(out: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient in x of the gradient in `out`; the weights are [groups, taps, outputs, inputs] here."""
    high, wide, groups, inputs, outputs, down, right = *sizes[:2], *sizes[4:7], *sizes[9:11]
    x = out.new_empty(len(out), high, wide, groups * inputs)
    taps = triton.cdiv(sizes[8], right)
    launch = options(sizes, out, inner=taps * outputs, outer=inputs)
    pixels = len(out) * triton.cdiv(high, down) * triton.cdiv(wide, right)
    grid = groups * triton.cdiv(pixels, launch["SIZE"]), down * right
    _to_input[grid](out, weight, x, len(out), **launch)
    return x


def to_weight(out: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient in the weights, [groups, taps, inputs, outputs] in float32."""
    rows, columns, groups, inputs, outputs, down, right = sizes[2:9]
    places, launch = len(x) * rows * columns, options(sizes, x, inner=sizes[8] * inputs, outer=outputs)
    blocks = triton.cdiv(places, max(1, PROGRAMS // (groups * down)) * launch["SIZE"])
    chunks = triton.cdiv(places, blocks * launch["SIZE"])
    parts = x.new_empty(chunks, groups, down * right, inputs, outputs, dtype=torch.float32)
    _to_weight[groups, down, chunks](out, x, parts, places, blocks, **launch)
    return parts.sum(0)
