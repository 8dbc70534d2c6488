# pyright: reportMissingImports=false, reportMissingParameterType=false
# ruff: noqa: SIM108  Triton decides an `if` on constants when it compiles
"""N:M patterns in Triton: one launch for the draw of a tensor, and one for its gradients, with nothing in between.

A program has SIZE groups, as one vector for each of a group's places: a group lies in one thread, and its sets of kept
weights are unrolled sums over registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pacprune.kernels.law import HARD, KEY, KEY_MAX, NOISELESS, Law, SampleInputs, layout
from pacprune.kernels.reference import Gradients, choices

GROUPS = {4: 512, 8: 128}
"""Groups of one program, by their size: a thread has four of them, or one with many sets to hold in its registers."""
WARPS = 4

_KEY, _KEY_MAX = tl.constexpr(KEY), tl.constexpr(KEY_MAX)
_ROUND = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def _words(seed, step, block):
    low = block.to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, (block >> 32).to(tl.uint32), zero + step, zero)


@triton.jit
def _places(x, M: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE * M] neighbours as a vector for each place of a group."""
    if M == 4:
        even, odd = tl.split(tl.reshape(x, (SIZE, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        places = (x0, x1, x2, x3)
    else:
        even, odd = tl.split(tl.reshape(x, (SIZE, 2, 2, 2)))
        e0, e1 = tl.split(even)
        o0, o1 = tl.split(odd)
        x0, x4 = tl.split(e0)
        x2, x6 = tl.split(e1)
        x1, x5 = tl.split(o0)
        x3, x7 = tl.split(o1)
        places = (x0, x1, x2, x3, x4, x5, x6, x7)
    return places


@triton.jit
def _neighbours(x, M: tl.constexpr, SIZE: tl.constexpr):
    """The other way round."""
    if M == 4:
        joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
        joined = tl.join(even, odd)
    return tl.reshape(joined, (SIZE * M,))


@triton.jit
def _set_sum(x, SETS: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """The sum over what set number S keeps."""
    total = x[SETS[S * N]]
    for k in tl.static_range(1, N):
        total += x[SETS[S * N + k]]
    return total


@triton.jit
def _hard(x, KEEP: tl.constexpr, M: tl.constexpr):
    """1 where fewer than KEEP integers of the group come before."""
    gates = ()
    for i in tl.static_range(M):
        before = (x[0] * 0).to(tl.int32)
        for j in tl.static_range(M):
            if j < i:
                before += (x[j] >= x[i]).to(tl.int32)
            else:
                before += (x[j] > x[i]).to(tl.int32)
        gates = gates + (tl.where(before < KEEP, 1.0, 0.0),)
    return gates


@triton.jit
def _shares(x, SETS: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr):
    """Softmax over the sums of the sets."""
    most = _set_sum(x, SETS, 0, N)
    for s in tl.static_range(1, COUNT):
        total = _set_sum(x, SETS, s, N)
        most = tl.where(total > most, total, most)
    shares = ()
    whole = most * 0.0
    for s in tl.static_range(COUNT):
        share = tl.exp(_set_sum(x, SETS, s, N) - most)
        whole += share
        shares = shares + (share,)
    normal = ()
    for s in tl.static_range(COUNT):
        normal = normal + (shares[s] / whole,)
    return normal


@triton.jit
def _kept(shares, SETS: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """The sums over the sets that keep each place."""
    gates = ()
    for i in tl.static_range(M):
        gate = shares[0] * 0.0
        for s in tl.static_range(COUNT):
            for k in tl.static_range(N):
                if SETS[s * N + k] == i:
                    gate += shares[s]
        gates = gates + (gate,)
    return gates


@triton.jit
def _slopes(shares, worth, SETS: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """The gradient in the logits: of every place, sum over the sets that keep it of share (worth - mean worth)."""
    mean = shares[0] * 0.0
    for s in tl.static_range(COUNT):
        mean += shares[s] * _set_sum(worth, SETS, s, N)
    parts = ()
    for s in tl.static_range(COUNT):
        parts = parts + (shares[s] * (_set_sum(worth, SETS, s, N) - mean),)
    return _kept(parts, SETS, COUNT, N, M)


@triton.jit
def _groups(
    mean_at,
    gate_at,
    seed_at,
    step_at,
    sharpness_at,
    to_draw,
    out,
    to_gate,
    n,
    row_in,
    offset,
    seed_row,
    step_row,
    sharpness_row,
    coupling,
    sharper,
    SETS: tl.constexpr,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    IS_HARD: tl.constexpr,
    NOISY: tl.constexpr,
    COUPLED: tl.constexpr,
    SHARPENED: tl.constexpr,
    BACKWARD: tl.constexpr,
    TO_MEAN: tl.constexpr,
    TO_GATE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """SIZE groups of one row: their draw, or with BACKWARD the gradients that TO_... select."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * (SIZE * M)
    at = first + tl.arange(0, SIZE * M)
    inside = at < n
    start = row * row_in
    mean_row = tl.load(mean_at + start + at, mask=inside, other=0.0).to(tl.float32)
    mean = _places(mean_row, M, SIZE)
    gate = _places(tl.load(gate_at + start + at, mask=inside, other=0.0).to(tl.float32), M, SIZE)
    sharpness = 1.0
    if SHARPENED:
        sharpness = tl.load(sharpness_at + row * sharpness_row)
    word = gate
    if NOISY:
        seed = tl.load(seed_at + row * seed_row)
        step = tl.load(step_at + row * step_row).to(tl.uint32)
        block = (offset + first) // 4 + tl.arange(0, SIZE) * (M // 4)
        word = _words(seed, step, block)
        if M == 8:
            word = word + _words(seed, step, block + 1)
    x = ()
    for i in tl.static_range(M):
        if IS_HARD:
            logit = gate[i].to(tl.float64)
            if COUPLED:
                logit += coupling * tl.log(tl.abs(mean[i]).to(tl.float64) + 1e-8)
            u = ((word[i] >> 9).to(tl.float64) + 0.5) * (2.0**-23)
            if SHARPENED:
                logit = sharpness * logit
            logit = logit - tl.log(-tl.log(u))
            logit = tl.where(logit < -_KEY_MAX, -_KEY_MAX, logit)
            logit = tl.where(logit > _KEY_MAX, _KEY_MAX, logit)
            x = x + (((logit * _KEY + _ROUND) - _ROUND).to(tl.int32),)
        else:
            logit = gate[i]
            if COUPLED:
                logit += coupling * tl.log(tl.abs(mean[i]) + 1e-8)
            logit = sharpness * logit
            if NOISY:
                logit = logit - tl.log(-tl.log(((word[i] >> 9).to(tl.float32) + 0.5) * (2.0**-23)))
            x = x + (logit * sharper,)
    if IS_HARD:
        gates = _hard(x, N, M)
        shares = gates
    else:
        shares = _shares(x, SETS, COUNT, N)
        gates = _kept(shares, SETS, COUNT, N, M)
    multiplier = _neighbours(gates, M, SIZE)
    start_out = row * n
    if BACKWARD:
        g = tl.load(to_draw + start_out + at, mask=inside, other=0.0).to(tl.float32)
        if TO_MEAN:
            tl.store(out + start_out + at, (g * multiplier).to(out.dtype.element_ty), mask=inside)
        if TO_GATE:
            if IS_HARD:
                slope = mean_row * 0.0
            else:
                worth = _places(g * mean_row, M, SIZE)
                slope = _neighbours(_slopes(shares, worth, SETS, COUNT, N, M), M, SIZE) * sharper * sharpness
            tl.store(to_gate + start_out + at, slope.to(to_gate.dtype.element_ty), mask=inside)
    else:
        if IS_HARD:
            weights = tl.where(multiplier > 0.0, mean_row, 0.0)
        else:
            weights = multiplier * mean_row
        tl.store(out + start_out + at, weights.to(out.dtype.element_ty), mask=inside)


def _launch(inputs: SampleInputs, law: Law, out: Tensor, back: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
    """The draw into `out`, or with a gradient in it as the first of `back`, the gradients in mean and gate."""
    assert law.pattern is not None
    n, m = law.pattern
    rows, sets = layout(inputs), choices(n, m)
    to_draw, to_mean, to_gate = back
    mean, gate, sharpness = inputs.mean.contiguous(), inputs.gate.contiguous(), inputs.sharpness
    if not rows.n:
        return
    backward = to_draw is not out
    kernel: Any = _groups
    with torch.cuda.device_of(out):
        kernel[(triton.cdiv(rows.n // m, GROUPS[m]), rows.k)](
            mean,
            gate,
            inputs.seed,
            inputs.step,
            inputs.seed if sharpness is None else sharpness,
            to_draw,
            out if to_mean is None else to_mean,
            out if to_gate is None else to_gate,
            rows.n,
            rows.row,
            inputs.offset,
            int(inputs.seed.ndim > 0),
            int(inputs.step.ndim > 0),
            int(sharpness is not None and sharpness.ndim > 0),
            float(law.coupling),
            1.0 / law.beta,
            SETS=tuple(i for kept in sets for i in kept),
            COUNT=len(sets),
            N=n,
            M=m,
            IS_HARD=law.mode == HARD,
            NOISY=law.mode != NOISELESS,
            COUPLED=law.coupling != 0,
            SHARPENED=sharpness is not None,
            BACKWARD=backward,
            TO_MEAN=to_mean is not None,
            TO_GATE=to_gate is not None,
            SIZE=GROUPS[m],
            num_warps=WARPS,
        )


def draw(inputs: SampleInputs, law: Law) -> Tensor:
    """The draw of one tensor."""
    out = torch.empty(layout(inputs).shape, dtype=inputs.dtype or inputs.mean.dtype, device=inputs.mean.device)
    _launch(inputs, law, out, (out, None, None))
    return out


def gradients(inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """`kernels.gradients` of one tensor."""
    mean, gate = inputs.mean, inputs.gate
    to_mean = torch.empty(mean.shape, dtype=mean.dtype, device=mean.device) if needs[0] else None
    to_gate = torch.empty(gate.shape, dtype=gate.dtype, device=mean.device) if needs[1] else None
    to_draw = out.contiguous()
    if to_mean is not None or to_gate is not None:
        _launch(inputs, law, torch.empty(0, dtype=out.dtype, device=out.device), (to_draw, to_mean, to_gate))
    return to_mean, to_gate, None
