# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""Patches of images in Triton: what a strided convolution of K networks multiplies with its weights, and the way back.

Images are [n, height, width, K * channels] in memory, patches [K, n * rows * columns, taps * channels].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
"""Places of the smaller image that one program serves."""


@triton.jit
def _gather(
    image,
    patches,
    count,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_RIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    member = tl.program_id(1)
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    channel = tl.arange(0, WIDTH)
    inside = place < count
    column, row = place % COLUMNS, place // COLUMNS % ROWS
    first = (place // (COLUMNS * ROWS)).to(tl.int64) * HIGH
    to = patches + (member.to(tl.int64) * count + place)[:, None] * (TAPS_DOWN * TAPS_RIGHT * CHANNELS)
    for a in tl.static_range(TAPS_DOWN):
        for b in tl.static_range(TAPS_RIGHT):
            y, x = row * DOWN + (a - TOP), column * RIGHT + (b - LEFT)
            there = inside & (y >= 0) & (y < HIGH) & (x >= 0) & (x < WIDE)
            at = ((first + y) * WIDE + x) * (MEMBERS * CHANNELS) + member * CHANNELS
            known = channel[None, :] < CHANNELS
            value = tl.load(image + at[:, None] + channel[None, :], mask=there[:, None] & known, other=0.0)
            tl.store(to + ((a * TAPS_RIGHT + b) * CHANNELS + channel)[None, :], value, mask=inside[:, None] & known)


@triton.jit
def _spread(
    patches,
    image,
    count,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_RIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    member = tl.program_id(1)
    pixel = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    channel = tl.arange(0, WIDTH)
    inside = pixel < count // (ROWS * COLUMNS) * (HIGH * WIDE)
    x, y = pixel % WIDE, pixel // WIDE % HIGH
    first = (member.to(tl.int64) * count) + (pixel // (WIDE * HIGH)).to(tl.int64) * (ROWS * COLUMNS)
    known = channel[None, :] < CHANNELS
    total = tl.zeros((SIZE, WIDTH), dtype=tl.float32)
    for a in tl.static_range(TAPS_DOWN):
        for b in tl.static_range(TAPS_RIGHT):
            # The places whose tap (a, b) lies on this pixel: at most one each.
            down, right = y + (TOP - a), x + (LEFT - b)
            row, column = down // DOWN, right // RIGHT
            hit = inside & (down >= 0) & (right >= 0) & (down % DOWN == 0) & (right % RIGHT == 0)
            hit = hit & (row < ROWS) & (column < COLUMNS)
            at = (first + row * COLUMNS + column) * (TAPS_DOWN * TAPS_RIGHT * CHANNELS) + (
                a * TAPS_RIGHT + b
            ) * CHANNELS
            value = tl.load(patches + at[:, None] + channel[None, :], mask=hit[:, None] & known, other=0.0)
            total += value.to(tl.float32)
    to = image + pixel.to(tl.int64)[:, None] * (MEMBERS * CHANNELS) + (member * CHANNELS + channel)[None, :]
    tl.store(to, total.to(image.dtype.element_ty), mask=inside[:, None] & known)


def gather(image: Tensor, members: int, shape: tuple[int, int], how: tuple[int, ...]) -> Tensor:
    """Patches of channels-last images [n, K * channels, height, width] for outputs of `shape`.

    how is (taps down, taps right, stride down, stride right, padding above, padding left).
    """
    n, width, high, wide = image.shape
    channels, places = width // members, n * shape[0] * shape[1]
    patches = image.new_empty(members, places, how[0] * how[1] * channels)
    _gather[triton.cdiv(places, _ROWS), members](
        image, patches, places, high, wide, *shape, members, channels, *how, _ROWS, triton.next_power_of_2(channels)
    )
    return patches


def spread(patches: Tensor, size: torch.Size, members: int, shape: tuple[int, int], how: tuple[int, ...]) -> Tensor:
    """The transpose of `gather`: every pixel's sum over the patches it is in, as channels-last images of `size`."""
    n, width, high, wide = size
    image = patches.new_empty(n, high, wide, width)
    grid = triton.cdiv(n * high * wide, _ROWS), members
    channels, places = width // members, n * shape[0] * shape[1]
    _spread[grid](
        patches, image, places, high, wide, *shape, members, channels, *how, _ROWS, triton.next_power_of_2(channels)
    )
    return image.permute(0, 3, 1, 2)
