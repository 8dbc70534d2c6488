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
    EACH: tl.constexpr,
    PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One row of an image, some channels of all members; the words' bits are read as `batches.crop_flip` does."""
    image, row = tl.program_id(0) // HIGH, tl.program_id(0) % HIGH
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    source = channel // EACH * n + image
    bits = tl.load(word + source, mask=there, other=0)
    y = row - PAD + ((bits & 0xFFFF) % (2 * PAD + 1)).to(tl.int32)
    left = ((bits >> 16 & 0x7FFF) % (2 * PAD + 1)).to(tl.int32) - PAD
    column = tl.arange(0, COLUMNS)
    z = left[None, :] + tl.where((bits >> 31 > 0)[None, :], WIDE - 1 - column[:, None], column[:, None])
    written = (column < WIDE)[:, None] & there[None, :]
    inside = written & ((y >= 0) & (y < HIGH))[None, :] & (z >= 0) & (z < WIDE)
    plane = source.to(tl.int64) * EACH + channel % EACH
    found = tl.load(x + ((plane * HIGH + y) * WIDE)[None, :] + z, mask=inside, other=0.0)
    to = (tl.program_id(0).to(tl.int64) * WIDE + column)[:, None] * channels + channel[None, :]
    tl.store(out + to, found, mask=written)


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
            EACH=c,
            PAD=pad,
            COLUMNS=triton.next_power_of_2(w),
            CHANNELS=size,
        )
    return out.permute(3, 0, 4, 1, 2).reshape(x.shape) if members else out.squeeze(3).permute(0, 3, 1, 2)
