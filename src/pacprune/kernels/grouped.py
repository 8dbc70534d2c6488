# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""Grouped convolutions with few channels per group in Triton: forward, and the gradients in the input and the weights.

Images are channels-last, [n, height, width, groups * channels] in memory; weights are [groups, taps, inputs, outputs].
A program serves one group, so that its matrix products have the group's own size instead of several groups' at once,
and neighbouring programs serve neighbouring groups, whose channels share lines of memory. Sums are in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PLACES = 128
"""Pixels that one program multiplies at a time."""
_PROGRAMS = 2048
"""About how many programs the gradient in the weights is divided into."""


@triton.jit
def _split(place, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(image, row, column) of a pixel's number."""
    return place // (ROWS * COLUMNS), place // COLUMNS % ROWS, place % COLUMNS


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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    place = tl.program_id(0) // GROUPS * SIZE + tl.arange(0, SIZE)
    image, row, column = _split(place, ROWS, COLUMNS)
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = place < places
    total = tl.zeros((SIZE, OUT), dtype=tl.float32)
    weight += group * (TAPS_DOWN * TAPS_RIGHT * INPUTS * OUTPUTS) + i[:, None] * OUTPUTS + o[None, :]
    known = (i[:, None] < INPUTS) & (o[None, :] < OUTPUTS)
    for a in tl.static_range(TAPS_DOWN):
        for b in tl.static_range(TAPS_RIGHT):
            y, z = row * DOWN + (a - TOP), column * RIGHT + (b - LEFT)
            there = inside & (y >= 0) & (y < HIGH) & (z >= 0) & (z < WIDE)
            at = ((image.to(tl.int64) * HIGH + y) * WIDE + z) * (GROUPS * INPUTS) + group * INPUTS
            patch = tl.load(x + at[:, None] + i[None, :], mask=there[:, None] & (i[None, :] < INPUTS), other=0.0)
            tap = tl.load(weight + (a * TAPS_RIGHT + b) * (INPUTS * OUTPUTS), mask=known, other=0.0)
            total = tl.dot(patch, tap, total, input_precision=PRECISION)
    to = place.to(tl.int64) * (GROUPS * OUTPUTS) + group * OUTPUTS
    kept = inside[:, None] & (o[None, :] < OUTPUTS)
    tl.store(out + to[:, None] + o[None, :], total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _to_input(
    out,
    weight,
    x,
    pixels,
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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    pixel = tl.program_id(0) // GROUPS * SIZE + tl.arange(0, SIZE)
    image, y, z = _split(pixel, HIGH, WIDE)
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = pixel < pixels
    total = tl.zeros((SIZE, IN), dtype=tl.float32)
    weight += group * (TAPS_DOWN * TAPS_RIGHT * INPUTS * OUTPUTS) + i[None, :] * OUTPUTS + o[:, None]
    known = (i[None, :] < INPUTS) & (o[:, None] < OUTPUTS)
    for a in tl.static_range(TAPS_DOWN):
        for b in tl.static_range(TAPS_RIGHT):
            # The one output whose tap (a, b) lies on this pixel, if there is one.
            down, right = y + (TOP - a), z + (LEFT - b)
            row, column = down // DOWN, right // RIGHT
            hit = inside & (down >= 0) & (right >= 0) & (row < ROWS) & (column < COLUMNS)
            hit = hit & (down % DOWN == 0) & (right % RIGHT == 0)
            at = ((image.to(tl.int64) * ROWS + row) * COLUMNS + column) * (GROUPS * OUTPUTS) + group * OUTPUTS
            slope = tl.load(out + at[:, None] + o[None, :], mask=hit[:, None] & (o[None, :] < OUTPUTS), other=0.0)
            tap = tl.load(weight + (a * TAPS_RIGHT + b) * (INPUTS * OUTPUTS), mask=known, other=0.0)
            total = tl.dot(slope, tap, total, input_precision=PRECISION)
    to = pixel.to(tl.int64) * (GROUPS * INPUTS) + group * INPUTS
    kept = inside[:, None] & (i[None, :] < INPUTS)
    tl.store(x + to[:, None] + i[None, :], total.to(x.dtype.element_ty), mask=kept)


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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One group, one tap and one chunk of the outputs; the chunks' sums are added afterwards, in a fixed order."""
    group, tap, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    a, b = tap // TAPS_RIGHT, tap % TAPS_RIGHT
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    total = tl.zeros((IN, OUT), dtype=tl.float32)
    for number in range(BLOCKS):
        place = (part * BLOCKS + number) * SIZE + tl.arange(0, SIZE)
        image, row, column = _split(place, ROWS, COLUMNS)
        inside = place < places
        at = place.to(tl.int64) * (GROUPS * OUTPUTS) + group * OUTPUTS
        slope = tl.load(out + at[:, None] + o[None, :], mask=inside[:, None] & (o[None, :] < OUTPUTS), other=0.0)
        y, z = row * DOWN + a - TOP, column * RIGHT + b - LEFT
        there = inside & (y >= 0) & (y < HIGH) & (z >= 0) & (z < WIDE)
        at = ((image.to(tl.int64) * HIGH + y) * WIDE + z) * (GROUPS * INPUTS) + group * INPUTS
        patch = tl.load(x + at[:, None] + i[None, :], mask=there[:, None] & (i[None, :] < INPUTS), other=0.0)
        total = tl.dot(tl.trans(patch), slope, total, input_precision=PRECISION)
    to = ((part * GROUPS + group) * (TAPS_DOWN * TAPS_RIGHT) + tap) * (INPUTS * OUTPUTS)
    known = (i[:, None] < INPUTS) & (o[None, :] < OUTPUTS)
    tl.store(parts + to + i[:, None] * OUTPUTS + o[None, :], total, mask=known)


def _options(sizes: Sequence[int], x: Tensor) -> list[Any]:
    """The last arguments of all three kernels."""
    inputs, outputs = sizes[5:7]
    exact = x.dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]
    padded = (max(16, triton.next_power_of_2(n)) for n in (inputs, outputs))  # the least that a product takes
    return [*sizes, *padded, _PLACES, "ieee" if exact else "tf32"]


def forward(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """[n, rows, columns, groups * outputs] of x [n, height, width, groups * inputs].

    sizes: height, width, rows, columns, groups, inputs, outputs, taps down and right, stride down and right, padding
    above and left.
    """
    rows, columns, groups, outputs = *sizes[2:5], sizes[6]
    out = x.new_empty(len(x), rows, columns, groups * outputs)
    places = len(x) * rows * columns
    _forward[(groups * triton.cdiv(places, _PLACES),)](x, weight, out, places, *_options(sizes, x))
    return out


def to_input(out: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient in x of the gradient in `out`."""
    high, wide, groups, inputs = *sizes[:2], *sizes[4:6]
    x = out.new_empty(len(out), high, wide, groups * inputs)
    pixels = len(out) * high * wide
    _to_input[(groups * triton.cdiv(pixels, _PLACES),)](out, weight, x, pixels, *_options(sizes, out))
    return x


def to_weight(out: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient in the weights, [groups, taps, inputs, outputs] in float32."""
    rows, columns, groups, inputs, outputs = sizes[2:7]
    taps, places = sizes[7] * sizes[8], len(x) * rows * columns
    wanted = max(1, _PROGRAMS // (groups * taps))
    blocks = triton.cdiv(places, wanted * _PLACES)
    chunks = triton.cdiv(places, blocks * _PLACES)
    parts = x.new_empty(chunks, groups, taps, inputs, outputs, dtype=torch.float32)
    _to_weight[groups, taps, chunks](out, x, parts, places, blocks, *_options(sizes, x))
    return parts.sum(0)
