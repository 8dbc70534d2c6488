"""Counter-based randomness: every random number is a function of (seed, step, stream, index).

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed
bijection of 128-bit counters that passes BigCrush. Number `index` is lane `index % 4` of the block with

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (index // 4 low, index // 4 high, step, stream)

so one block serves four neighbours, nothing is stored between calls, and any backend that follows these two lines
draws the same bits. Streams keep purposes apart: a gate and a slab of the same weight never share a number.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GATE, SLAB, PERMUTATION, BATCH, SCORE, AUGMENT, ROUND = range(7)
"""Streams: mask gates, Gaussian slabs, data permutations, Monte-Carlo minibatches, random scores, image crops,
rounding."""

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CACHED = 2**15
"""Blocks that a CPU's cache holds together."""


def _block(seed: Tensor | int, step: Tensor | int, stream: int, block: Tensor) -> tuple[Tensor, ...]:
    """Ten Philox rounds on the int64 tensor `block`; returns four words in [0, 2**32), as int64."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c2 = torch.zeros_like(block) + (step & _LOW) + (k0 ^ k0)  # as many rows as there are steps or seeds
    c0, c1, c3 = (block & _LOW).expand_as(c2), ((block >> 32) & _LOW).expand_as(c2), torch.full_like(c2, stream)
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves all 64 bits of an unsigned 32x32 product right.
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0 = (p1 >> 32).bitwise_and_(_LOW).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(_LOW).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_LOW), p0.bitwise_and_(_LOW)
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _blocks(
    n: int, seed: Tensor | int, step: Tensor | int, stream: int, offset: int, device: torch.device | None
) -> tuple[Tensor, ...]:
    """The four lanes of all blocks that hold the numbers offset to offset + n - 1."""
    block = torch.arange(offset // 4, (offset + n + 3) // 4, device=device, dtype=torch.int64)
    seed, step = (x[:, None] if isinstance(x, Tensor) and x.ndim == 1 else x for x in (seed, step))
    if block.device.type != "cpu" or len(block) <= _CACHED or torch.compiler.is_compiling():
        return _block(seed, step, stream, block)
    # Some hundred passes over the numbers: three times faster where they stay in the cache.
    parts = [_block(seed, step, stream, part) for part in block.split(_CACHED)]
    return tuple(torch.cat(lane, dim=-1) for lane in zip(*parts, strict=True))


def _lanes(lanes: Sequence[Tensor], n: int, offset: int) -> Tensor:
    """Four lanes laid side by side, from number `offset` on."""
    start = offset % 4
    return torch.stack(tuple(lanes), dim=-1).flatten(-2)[..., start : start + n]


def words(
    n: int, *, seed: Tensor | int, step: Tensor | int, stream: int, offset: int = 0, device: torch.device | None = None
) -> Tensor:
    """The n words with index offset, offset + 1, ...: int64 values uniform on [0, 2**32).

    A one-dimensional tensor of K steps, or of K seeds, gives K rows.
    """
    return _lanes(_blocks(n, seed, step, stream, offset, device), n, offset)


def uniform(word: Tensor) -> Tensor:
    """u = (word's top 23 bits + 1/2) / 2**23: float32, strictly inside (0, 1), so that logit(u) is finite."""
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def normal(
    n: int, *, seed: Tensor | int, step: Tensor | int, stream: int, offset: int = 0, device: torch.device | None = None
) -> Tensor:
    """Standard normals by Box-Muller on pairs of lanes: z = sqrt(-2 ln u1) (cos, sin)(2 pi u2), float32."""
    c = _blocks(n, seed, step, stream, offset, device)
    pairs = []
    for one, two in ((c[0], c[1]), (c[2], c[3])):
        radius = torch.sqrt(-2.0 * torch.log((one.to(torch.float32) + 1.0) * 2.0**-32))
        angle = two.to(torch.float32) * (2.0 * math.pi * 2.0**-32)
        pairs += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return _lanes(pairs, n, offset)


def below(n: Tensor | int, word: Tensor) -> Tensor:
    """A number below n from every two words: 63 bits modulo n, so that none is likelier by more than n / 2**63."""
    return ((word[..., 0::2] << 31) ^ (word[..., 1::2] >> 1)).remainder(n)


def permutation(n: int, *, seed: int) -> Tensor:
    """A permutation of range(n): the order of n 64-bit keys (words 2i and 2i+1), equal keys by index."""
    word = words(2 * n, seed=seed, step=0, stream=PERMUTATION)
    # 63 bits: an int64 sort must not see a sign bit.
    return torch.argsort(word[0::2] * 2**31 + (word[1::2] >> 1), stable=True)
