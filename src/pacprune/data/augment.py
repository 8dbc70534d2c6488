# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""Random crops and flips on a GPU in one pass, written with the channels of all members innermost.

Needs Triton; `batches.crop_flip` is the same in plain torch, which writes the images and their indices several times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 128
"""Channels that one program writes."""


@triton.jit
def _crop(
    x,
    word,
    out,
    n,
    channels,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PER_MEMBER: tl.constexpr,
    PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One row of an image, some channels of all members; the words' bits are read as `batches.crop_flip` does."""
    image, row = tl.program_id(0) // HIGH, tl.program_id(0) % HIGH
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    source = channel // PER_MEMBER * n + image
    bits = tl.load(word + source, mask=is_channel, other=0)
    source_row = row - PAD + ((bits & 0xFFFF) % (2 * PAD + 1)).to(tl.int32)
    first_column = ((bits >> 16 & 0x7FFF) % (2 * PAD + 1)).to(tl.int32) - PAD
    column = tl.arange(0, COLUMNS)
    mirrored = tl.where((bits >> 31 > 0)[None, :], WIDE - 1 - column[:, None], column[:, None])
    source_column = first_column[None, :] + mirrored
    written = (column < WIDE)[:, None] & is_channel[None, :]
    inside = ((source_row >= 0) & (source_row < HIGH))[None, :] & (source_column >= 0) & (source_column < WIDE)
    plane = source.to(tl.int64) * PER_MEMBER + channel % PER_MEMBER
    pixels = tl.load(
        x + ((plane * HIGH + source_row) * WIDE)[None, :] + source_column, mask=written & inside, other=0.0
    )
    to = (tl.program_id(0).to(tl.int64) * WIDE + column)[:, None] * channels + channel[None, :]
    tl.store(out + to, pixels, mask=written)


def crop_flip(x: Tensor, word: Tensor, *, pad: int) -> Tensor:
    """`batches.crop_flip` of images [n, c, h, w] or [K, n, c, h, w]; in memory [n, h, w, c] or [n, h, w, K, c]."""
    *members, n, c, h, w = x.shape
    k = members[0] if members else 1
    out = torch.empty(n, h, w, k, c, dtype=x.dtype, device=x.device)
    size = min(_MOST, triton.next_power_of_2(k * c))
    if out.numel():
        _crop[n * h, triton.cdiv(k * c, size)](
            x.contiguous(),
            word.contiguous(),
            out,
            n,
            k * c,
            HIGH=h,
            WIDE=w,
            PER_MEMBER=c,
            PAD=pad,
            COLUMNS=triton.next_power_of_2(w),
            CHANNELS=size,
        )
    return out.permute(3, 0, 4, 1, 2).reshape(x.shape) if members else out.squeeze(3).permute(0, 3, 1, 2)
