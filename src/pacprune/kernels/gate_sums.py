# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
"""Sums and counts over all gates in one pass over a GPU's memory, which a budget needs several times a step.

Needs Triton; `masks` has the same in plain torch, which reads and writes the logits some fifteen times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIZE, _ROUNDS = 1024, 8


@triton.jit
def _sums(logit, tau, gamma, out, n, stride, parts, MOST: tl.constexpr, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    shift, sharpness = tl.load(tau + row), tl.load(gamma + row)
    logit += row.to(tl.int64) * stride + part.to(tl.int64) * (ROUNDS * SIZE)
    remaining = n - part * (ROUNDS * SIZE)
    first = tl.zeros((SIZE,), dtype=tl.float32)
    second, third = first, first
    for number in range(ROUNDS):  # not unrolled: that takes 212 registers, and few programs fit beside each other
        at = number * SIZE + tl.arange(0, SIZE)
        x = sharpness * (tl.load(logit + at, mask=at < remaining, other=0.0) - shift)
        x = tl.where(x < -MOST, -MOST, x)  # not minimum and maximum: these would hide a NaN
        x = tl.where(x > MOST, MOST, x)
        # exp(-x) by 2^high (1 + low log 2), since the rounding of x / log 2 alone would be 1e-6 of a small p.
        high = x * -1.4426950408889634
        low = tl.fma(x, -1.4426950216293335, -high) - x * 1.925963033500115e-08
        p = tl.where(at < remaining, 1.0 / (1.0 + tl.exp2(high) * (1.0 + low * 0.6931471805599453)), 0.0)
        slope = p * (1.0 - p)
        first += p
        second += slope
        third += slope * (1.0 - 2.0 * p)
    rows = tl.num_programs(0)
    tl.store(out + row * parts + part, tl.sum(first.to(tl.float64), 0))
    tl.store(out + (rows + row) * parts + part, tl.sum(second.to(tl.float64), 0))
    tl.store(out + (2 * rows + row) * parts + part, tl.sum(third.to(tl.float64), 0))


@triton.jit
def _counts(bits, trials, out, n, stride, parts, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    rows = tl.num_programs(0)
    low, middle, high = tl.load(trials + row), tl.load(trials + rows + row), tl.load(trials + 2 * rows + row)
    bits += row.to(tl.int64) * stride + part.to(tl.int64) * (ROUNDS * SIZE)
    remaining = n - part * (ROUNDS * SIZE)
    first = tl.zeros((SIZE,), dtype=tl.int32)
    second, third = first, first
    for number in range(ROUNDS):
        at = number * SIZE + tl.arange(0, SIZE)
        inside = at < remaining
        x = tl.load(bits + at, mask=inside, other=0)
        first += tl.where(inside & (x >= low), 1, 0)
        second += tl.where(inside & (x >= middle), 1, 0)
        third += tl.where(inside & (x >= high), 1, 0)
    tl.store(out + row * parts + part, tl.sum(first, 0).to(tl.int64))
    tl.store(out + (rows + row) * parts + part, tl.sum(second, 0).to(tl.int64))
    tl.store(out + (2 * rows + row) * parts + part, tl.sum(third, 0).to(tl.int64))


def counts(bits: Tensor, trials: Tensor) -> Tensor:
    """[3, K] int64: how many numbers of a member, int32 [K, n], are at least each of its three trials, int32 [3, K]."""
    rows, n = bits.shape
    parts = max(1, triton.cdiv(n, _SIZE * _ROUNDS))
    out = torch.empty(3, rows, parts, dtype=torch.int64, device=bits.device)
    kernel = _counts
    kernel[(rows, parts)](bits, trials.contiguous(), out, n, bits.stride(0), parts, SIZE=_SIZE, ROUNDS=_ROUNDS)
    return out.sum(2)


def sums(logits: Tensor, tau: Tensor, gamma: Tensor, *, most: float) -> Tensor:
    """[3, K] float64 of logits [K, n]: sums of p, p (1 - p) and p (1 - p) (1 - 2p), p = sigmoid(gamma (logit - tau)).

    gamma (logit - tau) is held to [-most, most]; everything is float32.
    """
    rows, n = logits.shape
    parts = max(1, triton.cdiv(n, _SIZE * _ROUNDS))
    out = torch.empty(3, rows, parts, dtype=torch.float64, device=logits.device)
    kernel = _sums
    kernel[(rows, parts)](
        logits,
        tau.contiguous(),
        gamma.contiguous(),
        out,
        n,
        logits.stride(0),
        parts,
        MOST=most,
        SIZE=_SIZE,
        ROUNDS=_ROUNDS,
    )
    return out.sum(2)
