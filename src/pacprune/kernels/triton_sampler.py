# pyright: reportMissingImports=false, reportMissingParameterType=false
# ruff: noqa: SIM108  Triton decides an `if` on constants when it compiles
"""The sampler in Triton: one launch for the draws of all tensors, one per tensor for the gradients, no host contact.

Counters, shifts and sharpness are read from the device's memory. The addresses of all tensors come from a table, which
is made once and reused until a tensor moves. So a launch can be captured in a CUDA graph.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from pacprune.kernels import reference, triton_groups
from pacprune.kernels.law import MAPPINGS, MODES, THRESHOLDED, Law, SampleInputs, layout, no_branch

NAME = "triton"
VERSION = triton.__version__
BLOCK = 2048
"""Weights of one program."""
WARPS, FEWER_WARPS = 8, 4
"""Of a program that draws without std, and of one with more to hold in its registers."""

_FIELDS = tl.constexpr(20)
_LOW, _HIGH = tl.constexpr(1e-5), tl.constexpr(1 - 1e-5)
_TWO32 = tl.constexpr(2.0**32)
_ROUND = tl.constexpr(1.5 * 2.0**52)
_WIDE, _ODDS = tl.constexpr(1.2), tl.constexpr(2.3978952727983707)
_MAPPINGS, _MODES = range(3), range(6)
"""The numbers that `_sampler` has branches for."""
_KEPT = 2048
_TABLES: collections.OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = collections.OrderedDict()
_CAPTURED: list[tuple[Tensor, Tensor]] = []


@triton.jit
def _words(seed, step, stream: tl.constexpr, block):
    """The four words of each Philox block; Triton's own Philox4x32-10 is ours, and so is its key."""
    low = block.to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, (block >> 32).to(tl.uint32), zero + step, zero + stream)


@triton.jit
def _side_by_side(a, b, c, d, SIZE: tl.constexpr):
    """a0 b0 c0 d0 a1 b1 ...: a thread that made four neighbours keeps them, and reads and writes them together."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE,))


@triton.jit
def _pair(radius_word, angle_word):
    """Two normals from two words, by Box-Muller; sin and cos by reduction to [-pi / 4, pi / 4]."""
    radius = tl.sqrt(-2.0 * tl.log((radius_word.to(tl.float32) + 1.0) * 2.3283064365386963e-10))
    angle = angle_word.to(tl.float32) * 1.4629180792671596e-9
    quarter = (angle * 0.6366197723675814 + 0.5).to(tl.int32)
    n = quarter.to(tl.float32)
    r = angle - n * 1.5703125
    r = r - n * 4.837512969970703e-4
    r = r - n * 7.549789948768648e-8
    z = r * r
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    odd = (quarter & 1) == 1
    first = tl.where(odd, cosine, sine)
    second = tl.where(odd, sine, cosine)
    first = tl.where((quarter & 2) == 2, -first, first)
    second = tl.where(((quarter + 1) & 2) == 2, -second, second)
    return radius * second, radius * first


@triton.jit
def _sampler(
    table,
    programs,
    out,
    to_draw,
    to_gate,
    to_std,
    coupling,
    sharper,
    theta,
    steepness,
    MAPPING: tl.constexpr,
    MODE: tl.constexpr,
    STD: tl.constexpr,
    LOG_STD: tl.constexpr,
    COUPLED: tl.constexpr,
    NOISY: tl.constexpr,
    SCORE: tl.constexpr,
    BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    BACKWARD: tl.constexpr,
    TO_MEAN: tl.constexpr,
    TO_GATE: tl.constexpr,
    TO_STD: tl.constexpr,
    SIZE: tl.constexpr,
):
    """SIZE weights of one row of one tensor: their draws, or with BACKWARD the gradients that TO_... select.

    With SCORE it is the scores of the next draw.
    """
    pid = tl.program_id(0)
    entry = table + tl.load(programs + pid).to(tl.int64) * _FIELDS
    chunk = pid - tl.load(entry + 8)
    per_row = tl.load(entry + 9)
    n = tl.load(entry + 10)
    offset = tl.load(entry + 11)
    row = chunk // per_row
    first = (chunk % per_row) * SIZE
    start_in = row * tl.load(entry + 12)
    start_out = tl.load(entry + 7) + row * n
    mean_at = tl.load(entry)
    gate_at = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        n = tl.multiple_of(n, 4)
        start_in = tl.multiple_of(start_in, 4)
        start_out = tl.multiple_of(start_out, 4)
        gate_at = tl.multiple_of(gate_at, 16)
        at = first + tl.arange(0, SIZE)
        inside = at < n
    else:
        at = first - (offset & 3) + tl.arange(0, SIZE)
        inside = (at >= 0) & (at < n)
    if BF16:
        mean_from = mean_at.to(tl.pointer_type(tl.bfloat16))
    else:
        mean_from = mean_at.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        mean_from = tl.multiple_of(mean_from, 16)
    mean = tl.load(mean_from + start_in + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_at + start_in + at, mask=inside, other=0.5)
    seed = tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.int64)) + row * tl.load(entry + 15))
    step = tl.load(tl.load(entry + 4).to(tl.pointer_type(tl.int64)) + row * tl.load(entry + 16)).to(tl.uint32)
    if SCORE:
        step = step + 1
    block = (offset >> 2) + first // 4 + tl.arange(0, SIZE // 4)
    a, b, c, d = _words(seed, step, 0, block)
    word = _side_by_side(a, b, c, d, SIZE)

    sharpness = 1.0
    p = gate
    logit = gate
    depth = gate
    score = gate
    if MAPPING == 0:
        shift = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32)) + row * tl.load(entry + 17))
        sharpness = tl.load(tl.load(entry + 6).to(tl.pointer_type(tl.float32)) + row * tl.load(entry + 18))
        if COUPLED:
            # The quick logarithm, of one instruction instead of twenty, where no hard gate depends on its last bits.
            size = tl.abs(mean) + 1e-8
            if (MODE == 1 or MODE == 2) or MODE == 5:
                logit = gate + coupling * tl.log(size)
            else:
                logit = gate + coupling * libdevice.fast_logf(size)
        if NOISY:
            noise = tl.load(tl.load(entry + 14).to(tl.pointer_type(tl.float32)) + row * tl.load(entry + 19))
            free = (word >> 9).to(tl.float32) + 0.5
            logit = logit + noise * tl.log(free / (8388608.0 - free))
        score = logit
        depth = logit - shift
        logit = sharpness * depth
        # Not minimum and maximum: these would hide a NaN.
        logit = tl.where(logit < -14.0, -14.0, logit)
        logit = tl.where(logit > 14.0, 14.0, logit)
    elif MAPPING == 1:
        p = tl.where(gate < _LOW, _LOW, gate)
        p = tl.where(p > _HIGH, _HIGH, p)
        logit = tl.log(p) - tl.log(1.0 - p)

    x = logit * sharper
    if (MODE == 0 or MODE == 3) or (TO_GATE and MODE == 1):  # not in a chain, which Triton may refuse
        # u and 1 - u are multiples of 2^-24 and exact, so that one logarithm gives logit(u).
        u = (word >> 9).to(tl.float32) + 0.5
        odds = u / (8388608.0 - u)
        if MAPPING == 0:
            x = (logit + libdevice.fast_logf(odds)) * sharper
        else:  # a small p multiplies what the quick logarithm is off by
            x = (logit + tl.log(odds)) * sharper
        if MODE == 3:
            x = x - _ODDS
    soft = 1.0 / (1.0 + tl.exp(-x))
    multiplier = soft
    if MODE == 3:
        multiplier = _WIDE * soft - 0.1
        multiplier = tl.where(multiplier < 0.0, 0.0, multiplier)
        multiplier = tl.where(multiplier > 1.0, 1.0, multiplier)
    elif MODE == 5:
        above = depth > 0.0
        share = -libdevice.expm1(-steepness * tl.where(above, depth, 1.0))
        multiplier = tl.where(above, libdevice.cbrt(share), tl.where(depth == depth, 0.0, depth))
    elif MODE == 1 or MODE == 2:
        # A word opens the gate when word >= 2^32 - p 2^32; all these numbers are integers that float64 holds.
        if MAPPING == 0:
            chance = (1.0 / (1.0 + tl.exp(-logit.to(tl.float64)))).to(tl.float32).to(tl.float64) * _TWO32
        else:
            chance = p.to(tl.float64) * _TWO32
        if MAPPING == 2:
            chance = chance.to(tl.int64).to(tl.float64)
        else:
            chance = (chance + _ROUND) - _ROUND
        multiplier = tl.where(word.to(tl.float64) + chance >= _TWO32, 1.0, 0.0)

    slab = mean
    z = gate
    std = gate
    if STD != 0:
        a, b, c, d = _words(seed, step, 1, block)
        z0, z1 = _pair(a, b)
        z2, z3 = _pair(c, d)
        z = _side_by_side(z0, z1, z2, z3, SIZE)
        std_at = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        std_start = row * tl.load(entry + 13)
        if STD == 2:
            if ALIGNED:
                std_at = tl.multiple_of(std_at, 16)
                std_start = tl.multiple_of(std_start, 4)
            std = tl.load(std_at + std_start + at, mask=inside, other=0.0)
        else:
            std = tl.load(std_at + std_start) + tl.zeros((SIZE,), dtype=tl.float32)
        if LOG_STD:
            std = tl.exp(std)
        slab = mean + std * z

    if BACKWARD:
        g = tl.load(to_draw + start_out + at, mask=inside, other=0.0).to(tl.float32)
        if TO_MEAN:
            through = multiplier
            if MODE == 5:  # straight through
                through = tl.where(depth > 0.0, 1.0, theta)
            tl.store(out + start_out + at, (g * through).to(out.dtype.element_ty), mask=inside)
        if TO_STD:
            slope_std = g * multiplier * z
            if LOG_STD:
                slope_std = slope_std * std
            tl.store(to_std + start_out + at, slope_std, mask=inside)
        if TO_GATE:
            if MODE == 2:
                slope = gate * 0.0
            else:
                closed = 1.0 - soft
                if MAPPING == 1:  # no digits would be left by subtraction where the slope of a clamped gate is large
                    closed = 1.0 / (1.0 + tl.exp(x))
                slope = g * slab * soft * closed * sharper
                if MODE == 3:
                    slope = tl.where((multiplier > 0.0) & (multiplier < 1.0), _WIDE * slope, 0.0)
                if MAPPING == 1:
                    slope = tl.where(p == gate, slope / (p * (1.0 - p)), 0.0)
                else:
                    slope = slope * sharpness
            tl.store(to_gate + start_out + at, slope, mask=inside)
    else:
        weights = multiplier * slab
        if MODE == 1 or MODE == 2:
            weights = tl.where(multiplier > 0.0, slab, 0.0)
        if SCORE:
            weights = score
        tl.store(out + start_out + at, weights.to(out.dtype.element_ty), mask=inside)


class _Ready(NamedTuple):
    """One tensor's inputs, contiguous, with what decides which kernel takes them."""

    inputs: SampleInputs
    std: Tensor | None
    numbers: tuple[int, ...]
    """Addresses and sizes: all that the table needs."""
    shape: torch.Size
    k: int
    n: int
    kind: tuple[int, bool, bool, bool]
    """(0 without std, 1 with one per row, 2 with one per weight; noise; bfloat16 means; aligned to four weights)."""


def _ready(inputs: SampleInputs) -> _Ready:
    inputs = inputs._replace(mean=inputs.mean.contiguous(), gate=inputs.gate.contiguous())
    rows, device = layout(inputs), inputs.mean.device
    shift = _constant(0.0, device) if inputs.shift is None else inputs.shift
    sharpness = _constant(1.0, device) if inputs.sharpness is None else inputs.sharpness
    noise = _constant(0.0, device) if inputs.noise is None else inputs.noise
    counters = (inputs.seed, inputs.step, shift, sharpness, noise)
    pointers = [t.data_ptr() for t in (inputs.mean, inputs.gate)] + [0 if rows.std is None else rows.std.data_ptr()]
    aligned = inputs.offset % 4 == 0 and rows.n % 4 == 0 and all(p % 16 == 0 for p in pointers)
    steps = [int(t.ndim > 0) for t in counters]
    numbers = (*pointers, *(t.data_ptr() for t in counters), rows.n, inputs.offset, rows.row, rows.std_row, *steps)
    widths = 0 if rows.std is None else 1 + rows.std_column
    kind = (widths, inputs.noise is not None, inputs.mean.dtype == torch.bfloat16, aligned)
    return _Ready(inputs, rows.std, numbers, rows.shape, rows.k, rows.n, kind)


_CONSTANTS: dict[tuple[float, torch.device], Tensor] = {}


def _constant(value: float, device: torch.device) -> Tensor:
    if (value, device) not in _CONSTANTS:
        _CONSTANTS[value, device] = torch.full((), value, device=device)  # which no copy from the host fills
    return _CONSTANTS[value, device]


def _table(tensors: Sequence[_Ready], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(addresses and sizes of all tensors, the tensor of each program), on the device.

    It is kept, and never freed under a graph. Columns: mean, gate, std, seed, step, shift, sharpness, start in the
    output, first program, programs per row, n, offset, what one row more adds to mean and gate, and to std, noise, then
    what one row more adds to seed, step, shift, sharpness and noise.
    """
    device = tensors[0].inputs.mean.device
    key = (device.index, *(n for ready, s in zip(tensors, starts, strict=True) for n in (ready.k, s, *ready.numbers)))
    capturing = torch.cuda.is_current_stream_capturing()
    if key not in _TABLES:
        if capturing:
            raise RuntimeError("these weights were never drawn before the CUDA graph; run one step before capturing it")
        _TABLES[key] = _new_table(tensors, starts, device)
        if len(_TABLES) > _KEPT:
            _TABLES.popitem(last=False)
    _TABLES.move_to_end(key)
    if capturing and not any(_TABLES[key][0] is table for table, _ in _CAPTURED):
        _CAPTURED.append(_TABLES[key])
    return _TABLES[key]


def _new_table(tensors: Sequence[_Ready], starts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, programs = [], [0]
    for ready, start in zip(tensors, starts, strict=True):
        *pointers, noise, n, offset, row, std_row, s0, s1, s2, s3, s4 = ready.numbers
        per_row = max(1, -(-(n + offset % 4) // BLOCK))
        rows.append([*pointers, start, programs[-1], per_row, n, offset, row, std_row, noise, s0, s1, s2, s3, s4])
        programs.append(programs[-1] + per_row * ready.k)
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    tensor_of_program = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(programs).diff())
    return table, tensor_of_program.to(device)


class _Back(NamedTuple):
    """The gradient in the draw, and room for those that are needed."""

    to_draw: Tensor
    to_mean: Tensor | None
    to_gate: Tensor | None
    to_std: Tensor | None


def _launch(
    tensors: Sequence[_Ready],
    starts: Sequence[int],
    law: Law,
    out: Tensor,
    back: _Back | None,
    *,
    score: bool = False,
) -> None:
    mapping, mode = MAPPINGS[law.mapping].number, MODES[law.mode].number
    if mapping not in _MAPPINGS or mode not in _MODES:
        raise no_branch(law, "triton_sampler.py")
    table, programs = _table(tensors, starts)
    std, noisy, bf16, aligned = tensors[0].kind
    to_draw, to_mean, to_gate, to_std = (None,) * 4 if back is None else back
    kernel: Any = _sampler
    with torch.cuda.device(out.device):
        kernel[(programs.numel(),)](
            table,
            programs,
            out,
            out if to_draw is None else to_draw,
            out if to_gate is None else to_gate,
            out if to_std is None else to_std,
            float(law.coupling),
            1.0 / law.beta,
            float(law.theta),
            law.steepness,
            MAPPING=mapping,
            MODE=mode,
            STD=std,
            LOG_STD=law.log_std,
            COUPLED=law.coupling != 0,
            NOISY=noisy and law.mode == THRESHOLDED,
            SCORE=score,
            BF16=bf16,
            ALIGNED=aligned,
            BACKWARD=back is not None,
            TO_MEAN=to_mean is not None,
            TO_GATE=to_gate is not None,
            TO_STD=to_std is not None,
            SIZE=BLOCK,
            num_warps=WARPS if back is None and not std else FEWER_WARPS,
        )


def draw(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`kernels.draw`: one launch for all tensors that agree in type, kind of std and alignment, which is mostly all."""
    if law.pattern is not None:
        return [triton_groups.draw(inputs, law) for inputs in all_inputs]
    return _draw(all_inputs, law, score=False)


def next_scores(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`kernels.next_scores`: one launch like that of `draw`, so that a draw finds the very same numbers."""
    return _draw([inputs._replace(std=None, dtype=torch.float32) for inputs in all_inputs], law, score=True)


def _draw(all_inputs: Sequence[SampleInputs], law: Law, *, score: bool) -> list[Tensor]:
    groups: dict[Any, list[tuple[int, _Ready]]] = {}
    for index, inputs in enumerate(all_inputs):
        ready = _ready(inputs)
        groups.setdefault((ready.kind, inputs.dtype or inputs.mean.dtype), []).append((index, ready))
    results: list[Tensor] = [all_inputs[0].mean] * len(all_inputs)
    for (_, dtype), group in groups.items():
        tensors, starts, end = [ready for _, ready in group], [], 0
        for ready in tensors:
            starts.append(end)
            end += -(-ready.k * ready.n // 32) * 32
        out = torch.empty(end, dtype=dtype, device=all_inputs[0].mean.device)
        if end:
            _launch(tensors, starts, law, out, None, score=score)
        for (index, ready), start in zip(group, starts, strict=True):
            results[index] = out[start : start + ready.k * ready.n].view(ready.shape)
    return results


def gradients(inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> reference.Gradients:
    """`kernels.gradients`."""
    if law.pattern is not None:
        return triton_groups.gradients(inputs, law, out, needs)
    to_draw = out.contiguous()
    mean, gate = inputs.mean, inputs.gate
    to_mean = torch.empty(mean.shape, dtype=mean.dtype, device=mean.device) if needs[0] else None
    to_gate = torch.empty(gate.shape, device=mean.device) if needs[1] else None
    to_std = torch.empty(mean.shape, device=mean.device) if needs[2] and inputs.std is not None else None
    back = _Back(to_draw, to_mean, to_gate, to_std)
    if mean.numel():
        _launch([_ready(inputs)], [0], law, to_draw if to_mean is None else to_mean, back)
    return to_mean, to_gate, None if to_std is None else reference.summed(to_std, inputs)
