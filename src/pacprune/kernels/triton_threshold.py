# pyright: reportMissingImports=false, reportMissingParameterType=false, reportIndexIssue=false
# ruff: noqa: SIM108, RET505  Triton decides an `if` on constants when it compiles
"""The mode "thresholded" for whole networks in Triton: a dozen launches a step, however many tensors there are.

`Network` has the addresses of all tensors in one table on the device. Its launches read the numbers of a step from the
device's memory and never wait, so that a CUDA graph can hold them. Between two steps it keeps nothing of the weights'
size but what training keeps anyway.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from pacprune.kernels.law import LOGIT_MAX, Law

_SIZE = 1024
"""Weights of one program that goes through tensors from end to end."""
_BLOCKS = (256, 1024, 2048, 4096)
"""Weights of an output that a program holds at a time; longer outputs go through the third in turns."""
_PER_THREAD = 4
"""Weights of an output that a thread holds: with 8, registers are short, and it takes half as long again."""
_WINDOW_SHARE, _LEAST_WINDOW = 32, 4096
"""Of every so many scores one has room in the window, and so many have at least."""
_COLUMNS, _PLACES = tl.constexpr(20), tl.constexpr(5)
_STATE = tl.constexpr(6)
"""Numbers of every member: digits and rank so far; scores above the window, in it, and whether the threshold is."""
_BINS = tl.constexpr(256)
_LEAST = tl.constexpr(-1e9)
_MOST = tl.constexpr(LOGIT_MAX)
_KEPT_TABLES = 16
_EAGER_STEPS = 3
"""How often `show` launches its kernels before it records them."""
_LARGEST_RECORDED = 2**24
"""Weights of a network beyond which launches take less time than the kernels, and are not worth the memory."""


@triton.jit
def _score(gate, mean, coupling):
    """The score of a weight; every kernel computes it by this function, to the bit."""
    return gate + coupling * tl.log(tl.abs(mean) + 1e-8)


@triton.jit
def _place(at, n, entry, STRIDED: tl.constexpr):
    """Where weight number `at` of a tensor lies, with the numbers (per output, inner, outer step, inner step)."""
    if STRIDED:
        inner = tl.load(entry + 1)
        within = at % n
        return (
            (at // n) * tl.load(entry) + (within // inner) * tl.load(entry + 2) + (within % inner) * tl.load(entry + 3)
        )
    else:
        return at


@triton.jit
def _ordered(x):
    """The bits of float32 numbers as whole numbers in [0, 2^32) that are in the numbers' order."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def _read_scores(
    table,
    programs,
    scores,
    state,
    edges,
    window,
    room,
    coupling,
    HIDDEN: tl.constexpr,
    STRIDED: tl.constexpr,
    BF16: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The scores of all weights, which are also copied to where they are kept as trained; HIDDEN ones are there.

    Scores near the last threshold are gathered in the window, and those above it are counted.
    """
    pid = tl.program_id(0)
    entry = table + tl.load(programs + pid).to(tl.int64) * _COLUMNS
    chunk = pid - tl.load(entry + 6)
    per_member, count, n = tl.load(entry + 7), tl.load(entry + 4), tl.load(entry + 5)
    at = (chunk % per_member) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    member = chunk // per_member
    start = member * count
    if BF16:
        kind = tl.pointer_type(tl.bfloat16)
    else:
        kind = tl.pointer_type(tl.float32)
    row_at, trained_at = tl.load(entry + 2).to(kind), tl.load(entry).to(kind)
    gate_at = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    if HIDDEN:
        mean = tl.load(trained_at + start + at, mask=inside, other=0.0)
    else:
        mean = tl.load(row_at + _place(start + at, n, entry + 11, STRIDED), mask=inside, other=0.0)
        tl.store(trained_at + start + at, mean, mask=inside)
    gate = tl.load(gate_at + start + at, mask=inside, other=0.0)
    score = _score(gate, mean.to(tl.float32), coupling)
    tl.store(scores + tl.load(entry + 10) + start + at, score, mask=inside)
    if not HIDDEN:
        high = tl.load(edges + 2 * member + 1)
        # A score that is NaN counts as above, as its bits say.
        above = inside & ((score > high) | (score != score))
        near = inside & (score > tl.load(edges + 2 * member)) & (score <= high)
        tl.atomic_add(state + _STATE * member + 2, tl.sum(above.to(tl.int32), 0).to(tl.int64))
        found = tl.sum(near.to(tl.int32), 0)
        if found > 0:
            first = tl.atomic_add(state + _STATE * member + 3, found.to(tl.int64))
            place = first + tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(window + member * room + place, score, mask=near & (place < room))


@triton.jit
def _begin(state, density, size, room, step):
    """Says of every member how many scores are above its threshold, and whether it lies in the window."""
    member = tl.program_id(0)
    rank = libdevice.rint(tl.load(density + member * step).to(tl.float64) * size.to(tl.float64)).to(tl.int64)
    above, found = tl.load(state + _STATE * member + 2), tl.load(state + _STATE * member + 3)
    near = (rank >= above) & (rank < above + found) & (found <= room)
    tl.store(state + _STATE * member, 0)
    tl.store(state + _STATE * member + 1, tl.where(near, rank - above, rank))
    tl.store(state + _STATE * member + 4, near.to(tl.int64))


@triton.jit
def _add_digits(x, inside, state, histogram, member, DIGIT: tl.constexpr, SIZE: tl.constexpr):
    """Counts the digits of those scores that begin with the digits so far."""
    x = _ordered(x)
    if DIGIT < 3:
        inside = inside & ((x >> (8 * DIGIT + 8)) == tl.load(state + _STATE * member))
    # The others are spread over as many bins again: counts of one bin wait for each other.
    digit = tl.where(inside, (x >> (8 * DIGIT)) & 255, 256 + (tl.arange(0, SIZE) & 255)).to(tl.int32)
    found = tl.histogram(digit, 2 * _BINS)
    bins = tl.arange(0, 2 * _BINS)
    tl.atomic_add(histogram + member * _BINS + bins, found, mask=(bins < _BINS) & (found > 0))


@triton.jit
def _count_all(table, programs, scores, state, histogram, DIGIT: tl.constexpr, SIZE: tl.constexpr):
    """Counts one digit of all scores of the members whose threshold is not in the window."""
    pid = tl.program_id(0)
    entry = table + tl.load(programs + pid).to(tl.int64) * _COLUMNS
    chunk = pid - tl.load(entry + 6)
    per_member = tl.load(entry + 7)
    member = chunk // per_member
    if tl.load(state + _STATE * member + 4) == 0:
        count = tl.load(entry + 4)
        at = (chunk % per_member) * SIZE + tl.arange(0, SIZE)
        inside = at < count
        x = tl.load(scores + tl.load(entry + 10) + member * count + at, mask=inside, other=0.0)
        _add_digits(x, inside, state, histogram, member, DIGIT, SIZE)


@triton.jit
def _count_window(window, room, state, histogram, DIGIT: tl.constexpr, SIZE: tl.constexpr):
    """Counts one digit of the scores in the window of the members whose threshold is there."""
    member = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * SIZE
    found = tl.load(state + _STATE * member + 3)
    if (tl.load(state + _STATE * member + 4) != 0) & (first < found):
        at = first + tl.arange(0, SIZE)
        inside = at < found
        x = tl.load(window + member * room + at, mask=inside, other=0.0)
        _add_digits(x, inside, state, histogram, member, DIGIT, SIZE)


@triton.jit
def _pick_digit(state, histogram, edges, shift, room, step, DIGIT: tl.constexpr):
    """The next digit of every member's threshold, after its last one the threshold; leaves the histogram empty.

    The threshold is the score that round(density * size) scores are above. The next window lies around it.
    """
    member = tl.program_id(0)
    bins = tl.arange(0, _BINS)
    found = tl.load(histogram + member * _BINS + bins).to(tl.int64)
    tl.store(histogram + member * _BINS + bins, tl.zeros((_BINS,), dtype=tl.int32))
    digits, rank = tl.load(state + _STATE * member), tl.load(state + _STATE * member + 1)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)
    here = (above <= rank) & (rank < above + found)
    digits = digits * 256 + tl.sum(tl.where(here, bins, 0).to(tl.int64), 0)
    tl.store(state + _STATE * member, digits)
    tl.store(state + _STATE * member + 1, rank - tl.sum(tl.where(here, above, 0), 0))
    if DIGIT == 0:
        bits = tl.where(digits >= 0x80000000, digits - 0x80000000, 0xFFFFFFFF - digits)
        bits = tl.where(bits >= 0x80000000, bits - 0x100000000, bits)  # as int32 has them
        tau = bits.to(tl.int32).to(tl.float32, bitcast=True)
        none = tl.sum(here.to(tl.int32), 0) == 0  # everything is kept
        tau = tl.where(none | (tau < _LEAST), _LEAST, tau)
        last = tl.load(shift + member * step)
        tl.store(shift + member * step, tau)
        # As wide as the threshold may move in a step; narrower where the room would not do.
        width = (tl.load(edges + 2 * member + 1) - tl.load(edges + 2 * member)) * 0.5
        moved = tl.abs(tau - last)
        width = tl.where(moved > 16.0, 1.0, tl.maximum(3.0 * moved, 0.8 * width))
        full = tl.load(state + _STATE * member + 3) > room // 2
        width = tl.maximum(tl.where(full, tl.minimum(0.4 * width, 3.0 * moved), width), 1e-4)
        tl.store(edges + 2 * member, tau - width)
        tl.store(edges + 2 * member + 1, tau + width)
        tl.store(state + _STATE * member + 2, 0)
        tl.store(state + _STATE * member + 3, 0)


@triton.jit
def _opening(depth, steepness):
    """What is left of a weight so far above its threshold: (1 - exp(-steepness depth))^(1/3); a NaN stays one."""
    above = depth > 0.0
    x = steepness * tl.where(above, depth, 1.0)
    series = x * (1.0 - x * (0.5 - x * (0.16666666666666666 - x * 0.041666666666666664)))
    share = tl.where(x < 0.05, series, 1.0 - tl.exp(-x))
    return tl.where(above, tl.exp2(tl.log2(share) * 0.3333333333333333), tl.where(depth == depth, 0.0, depth))


@triton.jit
def _shrink(
    table,
    programs,
    scores,
    shift,
    out,
    step,
    steepness,
    FLAT: tl.constexpr,
    STRIDED: tl.constexpr,
    BF16: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The weights that the network computes with, and its mask; with FLAT into `out` alone."""
    pid = tl.program_id(0)
    entry = table + tl.load(programs + pid).to(tl.int64) * _COLUMNS
    chunk = pid - tl.load(entry + 6)
    per_member, count, n = tl.load(entry + 7), tl.load(entry + 4), tl.load(entry + 5)
    at = (chunk % per_member) * SIZE + tl.arange(0, SIZE)
    member = chunk // per_member
    inside = at < count
    start = member * count
    if BF16:
        kind = tl.pointer_type(tl.bfloat16)
    else:
        kind = tl.pointer_type(tl.float32)
    mean = tl.load(tl.load(entry).to(kind) + start + at, mask=inside, other=0.0).to(tl.float32)
    depth = tl.load(scores + tl.load(entry + 10) + start + at, mask=inside, other=0.0) - tl.load(shift + member * step)
    weight = _opening(depth, steepness) * mean
    if FLAT:
        tl.store(out + tl.load(entry + 10) + start + at, weight.to(out.dtype.element_ty), mask=inside)
    else:
        row_at = tl.load(entry + 2).to(kind)
        keep_at = tl.load(entry + 3).to(tl.pointer_type(tl.int8))
        tl.store(row_at + _place(start + at, n, entry + 11, STRIDED), weight.to(row_at.dtype.element_ty), mask=inside)
        kept = tl.where(weight == 0.0, 0, 1).to(tl.int8)
        tl.store(keep_at + _place(start + at, n, entry + 15, STRIDED), kept, mask=inside)


@triton.jit
def _through(depth, mean, theta):
    """What a gradient is multiplied with straight through the threshold, and where the network has a zero."""
    above = depth > 0.0
    return tl.where(above, 1.0, theta), (depth <= 0.0) | (mean == 0.0)


@triton.jit
def _share(below, norm, limit, least):
    """What is left of a gradient below the threshold, from the squared norms of it and of the weights."""
    norm = tl.sqrt(norm)
    room = limit * tl.where(norm < least, least, norm)
    below = tl.sqrt(below)
    return tl.where(below > room, room / below, tl.where(below == below, 1.0, below))


@triton.jit
def _slope(g, mean, depth, gamma, sharper):
    """The gradient in the gate parameter, as that of a sigmoid."""
    x = gamma * depth
    x = tl.where(x < -_MOST, -_MOST, x)  # not minimum and maximum: these would hide a NaN
    x = tl.where(x > _MOST, _MOST, x) * sharper
    soft = 1.0 / (1.0 + tl.exp(-x))
    return g * mean * soft * (1.0 - soft) * sharper * gamma


@triton.jit
def _pass_gradients(
    table,
    outputs,
    gradients,
    shift,
    sharpness,
    to_gates,
    shares,
    step,
    coupling,
    sharper,
    theta,
    limit,
    least,
    scale,
    LIMITED: tl.constexpr,
    TO_GATE: tl.constexpr,
    STRIDED: tl.constexpr,
    BF16: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The gradients of one output's weights, in place, and of their gate parameters.

    Below the threshold a gradient is multiplied by theta, and by what keeps its norm within `limit` times that of the
    output's weights. WHOLE says that these fit into one block.
    """
    tensor = tl.load(outputs + 2 * tl.program_id(0)).to(tl.int64)
    number = tl.load(outputs + 2 * tl.program_id(0) + 1)
    entry, places = table + tensor * _COLUMNS, gradients + tensor * _PLACES
    output = number - tl.load(entry + 8)
    member = output // tl.load(entry + 9)
    if BF16:
        kind = tl.pointer_type(tl.bfloat16)
    else:
        kind = tl.pointer_type(tl.float32)
    gradient_at = tl.load(places)
    n = tl.where(gradient_at == 0, 0, tl.load(entry + 5))  # a tensor without a gradient is passed over
    length = tl.load(entry + 5)
    gradient_at = gradient_at.to(kind)
    start = output.to(tl.int64) * length
    trained_at = tl.load(entry).to(kind) + start
    gate_at = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + start
    tau, gamma = tl.load(shift + member * step), tl.load(sharpness + member * step)
    share = 1.0
    if WHOLE:
        at = tl.arange(0, SIZE)
        inside = at < n
        place = gradient_at + _place(start + at, length, places + 1, STRIDED)
        g = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(trained_at + at, mask=inside, other=0.0).to(tl.float32)
        depth = _score(tl.load(gate_at + at, mask=inside, other=0.0), mean, coupling) - tau
        through, closed = _through(depth, mean, theta)
        if LIMITED:
            below = tl.sum(tl.where(closed, g * through * g * through, 0.0), 0)
            share = _share(below, tl.sum(mean * mean, 0), limit * scale, least)
            tl.store(shares + number, share)
        tl.store(place, (g * through * tl.where(closed, share, 1.0)).to(place.dtype.element_ty), mask=inside)
        if TO_GATE:
            slope = _slope(g, mean, depth, gamma, sharper) / scale
            tl.store(to_gates + tl.load(entry + 10) + start + at, slope, mask=inside)
    else:
        if LIMITED:
            below, norm = 0.0, 0.0
            for first in range(0, n, SIZE):
                at = first + tl.arange(0, SIZE)
                inside = at < n
                place = gradient_at + _place(start + at, length, places + 1, STRIDED)
                g = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                mean = tl.load(trained_at + at, mask=inside, other=0.0).to(tl.float32)
                depth = _score(tl.load(gate_at + at, mask=inside, other=0.0), mean, coupling) - tau
                through, closed = _through(depth, mean, theta)
                below += tl.sum(tl.where(closed, g * through * g * through, 0.0), 0)
                norm += tl.sum(mean * mean, 0)
            share = _share(below, norm, limit * scale, least)
            tl.store(shares + number, share)
        for first in range(0, n, SIZE):
            at = first + tl.arange(0, SIZE)
            inside = at < n
            place = gradient_at + _place(start + at, length, places + 1, STRIDED)
            g = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            mean = tl.load(trained_at + at, mask=inside, other=0.0).to(tl.float32)
            depth = _score(tl.load(gate_at + at, mask=inside, other=0.0), mean, coupling) - tau
            through, closed = _through(depth, mean, theta)
            tl.store(place, (g * through * tl.where(closed, share, 1.0)).to(place.dtype.element_ty), mask=inside)
            if TO_GATE:
                slope = _slope(g, mean, depth, gamma, sharper) / scale
                tl.store(to_gates + tl.load(entry + 10) + start + at, slope, mask=inside)


class _Layout(NamedTuple):
    """How a tensor's weights lie in memory: steps per output, the inner size, and steps outside and inside of it."""

    output: int
    inner: int
    outer_step: int
    inner_step: int


def _layout(tensor: Tensor, *, members: bool) -> _Layout | None:
    """How a tensor lies in memory, contiguous or channels last; None where it lies otherwise."""
    if tensor.is_contiguous():
        length = tensor.numel() // tensor.shape[: 1 + members].numel()
        return _Layout(length, length, 0, 1)
    steps, shape = tensor.stride(), tensor.shape
    if members or any(steps[d] != steps[d + 1] * shape[d + 1] for d in range(2, tensor.ndim - 1)):
        return None
    return _Layout(steps[0], shape[2:].numel(), steps[1], steps[-1] if tensor.ndim > 2 else 0)


class Network:
    """The weights of a network under one threshold on their scores, in the mode "thresholded".

    Args:
        rows: The weights' memory, which holds those that are trained or, between `shrink` and the next step, those that
            the network computes with.
        trained: Where those that are trained are kept meanwhile; contiguous.
        gates: The parameters behind the scores, float32.
        keeps: The masks.
        density: The share of the weights to keep, one number or one per member.
        shift: The threshold, which `find` writes, float32.
        sharpness: Of the gradient in the gates.
        law: Coupling, theta and temperature.
        members: Whether the first dimension of every tensor is K models.
        recorded: Whether `show` becomes a CUDA graph, where nothing else records it.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        trained: Sequence[Tensor],
        gates: Sequence[Tensor],
        keeps: Sequence[Tensor],
        *,
        density: Tensor,
        shift: Tensor,
        sharpness: Tensor,
        law: Law,
        members: bool,
        recorded: bool = False,
    ) -> None:
        self.rows, self.trained, self.gates, self.keeps = list(rows), list(trained), list(gates), list(keeps)
        self.density, self.shift, self.sharpness, self.law = density, shift, sharpness, law
        self.members = len(density) if members else 1
        self.step = int(members)
        """How far a number of one member lies from that of the next."""
        self.device, self.bf16 = rows[0].device, rows[0].dtype == torch.bfloat16
        dimensions = 2 if members else 1
        self.outputs = [row.shape[:dimensions].numel() for row in rows]
        lengths = [row.numel() // count for row, count in zip(rows, self.outputs, strict=True)]
        self.size = sum(row.numel() for row in rows)
        self._make_table(lengths)
        self.recorded = recorded and self.size <= _LARGEST_RECORDED
        self._shown, self._graph = 0, None
        self._room: list[Tensor] | None = None
        self.state = torch.zeros(self.members, 6, dtype=torch.int64, device=self.device)
        room = max(_LEAST_WINDOW, self.size // self.members // _WINDOW_SHARE)
        self.window = torch.empty(self.members, -(-room // _SIZE) * _SIZE, device=self.device)
        """Scores that are near the threshold of the last step."""
        self.edges = torch.tensor([[-1.0, 1.0]], device=self.device).repeat(self.members, 1)
        """The window's lower and upper end."""
        self.histogram = torch.zeros(self.members, 256, dtype=torch.int32, device=self.device)
        self.shares = torch.ones(sum(self.outputs), device=self.device)
        self._gradient_tables: collections.OrderedDict[tuple[int, ...], Tensor] = collections.OrderedDict()
        self._captured: list[Tensor] = []
        """Tables that CUDA graphs read, and what they are copied from."""

    def _make_table(self, lengths: Sequence[int]) -> None:
        table, programs, outputs, start = [], [0], [0], 0
        pairs = zip(self.rows, self.keeps, strict=True)
        layouts = [[_layout(tensor, members=bool(self.step)) for tensor in pair] for pair in pairs]
        self.strided = not all(t.is_contiguous() for t in (*self.rows, *self.keeps))
        columns = zip(self.rows, self.trained, self.gates, self.keeps, self.outputs, lengths, layouts, strict=True)
        self.starts = []
        for row, trained, gate, keep, count, length, (row_layout, keep_layout) in columns:
            assert row_layout is not None
            assert keep_layout is not None
            size = row.numel() // self.members
            per_member = -(-size // _SIZE)
            pointers = [tensor.data_ptr() for tensor in (trained, gate, row, keep)]
            numbers = [size, length, programs[-1], per_member, outputs[-1], count // self.members, start]
            table.append([*pointers, *numbers, *row_layout, *keep_layout, 0])
            self.starts.append(start)
            start += -(-row.numel() // 32) * 32
            programs.append(programs[-1] + per_member * self.members)
            outputs.append(outputs[-1] + count)
        self.length = start
        self.table = torch.tensor(table, dtype=torch.int64, device=self.device)
        numbers = torch.arange(len(table), dtype=torch.int32)
        self.programs = numbers.repeat_interleave(torch.tensor(programs).diff()).to(self.device)
        self.output_programs = self._output_programs(lengths, outputs)

    def _output_programs(self, lengths: Sequence[int], firsts: Sequence[int]) -> dict[int, Tensor]:
        """By the size of a block, 0 for turns: tensor and number of every output of such a length."""
        tensors = torch.arange(len(lengths)).repeat_interleave(torch.tensor(firsts).diff())
        pairs = torch.stack([tensors, torch.arange(firsts[-1])], dim=1)
        blocks = torch.tensor([next((block for block in _BLOCKS if block >= n), 0) for n in lengths])[tensors]
        return {
            block: pairs[blocks == block].to(torch.int32).to(self.device)
            for block in (*_BLOCKS, 0)
            if bool((blocks == block).any())
        }

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if torch.cuda.current_device() == self.device.index:
            kernel[grid](*args, **constants)
            return
        with torch.cuda.device(self.device):
            kernel[grid](*args, **constants)

    def _elementwise(self, kernel: Any, *args: Any, **constants: Any) -> None:
        self._launch(kernel, (len(self.programs),), self.table, self.programs, *args, **constants, SIZE=_SIZE)

    def show(self) -> None:
        """From trained weights in the rows to the network's, with the threshold that fits the density."""
        if not self.recorded or torch.cuda.is_current_stream_capturing():
            self._show()
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._show()
            self._shown += 1
            self._graph = self._record() if self._shown == _EAGER_STEPS else None

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._show()
        return graph

    def _show(self) -> None:
        scores = self._scores(hidden=False)
        self._find(scores)
        self._shrink(scores, scores, flat=False)

    def network(self) -> list[Tensor]:
        """What `show` has left in the rows, computed again in other memory."""
        out = torch.empty(self.length, dtype=self.rows[0].dtype, device=self.device)
        self._shrink(self._scores(hidden=True), out, flat=True)
        return self._pieces(out)

    def room(self) -> list[Tensor]:
        """Memory for the gradients in all gates, one after another, cut into those of each tensor.

        Where `show` is recorded it is the same memory every time: cutting takes the host longer than the device.
        """
        if self._room is None:
            pieces = self._pieces(torch.empty(self.length, device=self.device))
            self._room = pieces if self.recorded else None
            return pieces
        return self._room

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        pairs = zip(self.rows, self.starts, strict=True)
        return [flat[start : start + row.numel()].view(row.shape) for row, start in pairs]

    def _scores(self, *, hidden: bool) -> Tensor:
        scores = torch.empty(self.length, device=self.device)
        constants = {"HIDDEN": hidden, "STRIDED": self.strided, "BF16": self.bf16}
        near = (self.state, self.edges, self.window, self.window.shape[1])
        self._elementwise(_read_scores, scores, *near, float(self.law.coupling), **constants)
        return scores

    def _find(self, scores: Tensor) -> None:
        """The threshold, digit by digit: among the scores of the window where it lies there, else among all."""
        room = self.window.shape[1]
        members, size = (self.members,), self.size // self.members
        self._launch(_begin, members, self.state, self.density, size, room, self.step, num_warps=1)
        for digit in (3, 2, 1, 0):
            numbers = (self.window, room, self.state, self.histogram)
            self._launch(_count_window, (room // _SIZE, self.members), *numbers, DIGIT=digit, SIZE=_SIZE)
            self._elementwise(_count_all, scores, self.state, self.histogram, DIGIT=digit)
            numbers = (self.state, self.histogram, self.edges, self.shift, room, self.step)
            self._launch(_pick_digit, members, *numbers, DIGIT=digit, num_warps=1)

    def _shrink(self, scores: Tensor, out: Tensor, *, flat: bool) -> None:
        args = (scores, self.shift, out, self.step, self.law.steepness)
        self._elementwise(_shrink, *args, FLAT=flat, STRIDED=self.strided, BF16=self.bf16)

    def convert(
        self,
        gradients: Sequence[Tensor | None],
        to_gates: Sequence[Tensor],
        *,
        limit: float | None,
        least: float,
        scale: float,
    ) -> bool:
        """Makes gradients in the network's weights those in the trained ones, in place.

        Args:
            gradients: One for every tensor, or None.
            to_gates: Where those in the gates are written, as `room` gave it; none where nothing is learned.
            limit: The largest norm below the threshold, as a share of that of an output's weights; None for no limit.
            least: What that norm counts as at least.
            scale: What the loss was multiplied with.

        Returns:
            False, and nothing is done, where a gradient lies in memory as no kernel reads it.
        """
        places = self._places(gradients)
        if places is None:
            return False
        table, strided = places
        args = (
            self.shift,
            self.sharpness,
            to_gates[0] if to_gates else self.shares,
            self.shares,
            self.step,
            float(self.law.coupling),
            1.0 / self.law.beta,
            float(self.law.theta),
            0.0 if limit is None else float(limit),
            float(least),
            float(scale),
        )
        flags = {"LIMITED": limit is not None, "TO_GATE": bool(to_gates), "STRIDED": strided, "BF16": self.bf16}
        for block, outputs in self.output_programs.items():
            size = block or _BLOCKS[2]
            constants = {"WHOLE": block > 0, "SIZE": size, "num_warps": max(1, size // (32 * _PER_THREAD))}
            self._launch(_pass_gradients, (len(outputs),), self.table, outputs, table, *args, **flags, **constants)
        return True

    def share(self, i: int) -> Tensor:
        """What the limit has left of the gradient below the threshold, for every output of tensor i."""
        start = sum(self.outputs[:i])
        row = self.rows[i]
        shape = row.shape[: 2 if self.step else 1]
        return self.shares[start : start + self.outputs[i]].view(*shape, *[1] * (row.ndim - len(shape)))

    def _places(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, bool] | None:
        """Where the gradients lie, on the device; the tables of a few steps are kept, since addresses return."""
        numbers: list[int] = []
        strided = False
        for gradient, row in zip(gradients, self.rows, strict=True):
            if gradient is None:
                numbers += (0, 0, 1, 0, 0)
                continue
            layout = _layout(gradient, members=bool(self.step))
            if layout is None or gradient.dtype != row.dtype:
                return None
            strided = strided or not gradient.is_contiguous()
            numbers += (gradient.data_ptr(), *layout)
        key = tuple(numbers)
        if torch.cuda.is_current_stream_capturing():
            host = torch.tensor(numbers, dtype=torch.int64).pin_memory()
            table = host.to(self.device, non_blocking=True)
            self._captured += [host, table]
            return table, strided
        if key not in self._gradient_tables:
            host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            self._gradient_tables[key] = host.to(self.device, non_blocking=True)
            if len(self._gradient_tables) > _KEPT_TABLES:
                self._gradient_tables.popitem(last=False)
        self._gradient_tables.move_to_end(key)
        return self._gradient_tables[key], strided


def network(*, rows: Sequence[Tensor], keeps: Sequence[Tensor], members: bool, **others: Any) -> Network | None:
    """A `Network` of these tensors, where its kernels can read them all."""
    readable = len({(t.device, t.dtype) for t in rows}) == 1 and rows[0].dtype in (torch.float32, torch.bfloat16)
    plain = all(type(t) is Tensor and t.numel() for t in (*rows, *keeps))
    if not readable or not plain or any(_layout(t, members=members) is None for t in (*rows, *keeps)):
        return None
    return Network(rows=rows, keeps=keeps, members=members, **others)
