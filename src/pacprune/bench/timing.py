"""Stopwatch of the benchmark: compared calls run in turn in one process, so that a slow machine slows all of them."""

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pacprune import kernels
from pacprune._version import __version__

Call = Callable[[], Any]
SPARSITY = 0.9
"""Of all networks that are measured."""
ROUNDS = (5, 30)
"""Fewest and most rounds; in a round, every compared call is timed once."""
SHORTEST = {"cpu": 0.01, "cuda": 0.03}
"""Least seconds of one reading: a quicker call is repeated until it takes as long."""


@dataclass(frozen=True)
class Target:
    """The requirement on a row's "ratio" or "value": "at most" or "at least" the limit."""

    of: str
    sense: str
    limit: float


@dataclass(frozen=True)
class Row:
    """One finding.

    Args:
        name: What was measured.
        value: An absolute number, or None.
        unit: The unit of `value`.
        ratio: The measured time divided by that of `relative_to`, or None.
        spread: The middle half of the readings of the ratio, or of the value without a ratio.
        relative_to: What the ratio compares with.
        target: What the ratio or the value must be, or None.
    """

    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    relative_to: str = ""
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        number = getattr(self, self.target.of)
        return number <= self.target.limit if self.target.sense == "at most" else number >= self.target.limit


def as_dict(row: Row) -> dict[str, Any]:
    """The row and its verdict."""
    return asdict(row) | {"met": row.met}


Finding = Row | str
"""A row, or a sentence about what could not be measured."""


@dataclass(frozen=True)
class Times:
    """Seconds per call of everything compared, one reading per round."""

    seconds: Mapping[str, np.ndarray]
    device: torch.device

    def median(self, name: str) -> float:
        """The middle reading."""
        return float(np.median(self.seconds[name]))

    def row(
        self,
        name: str,
        of: str,
        to: str,
        *,
        relative_to: str | None = None,
        factor: float = 1.0,
        timed: str | None = None,
        unit: str = "ms",
        per: float = 1.0,
        target: Target | None = None,
    ) -> Row:
        """factor * time of `of` / time of `to`, the median over rounds; on a GPU also the time of `timed` (or `of`)."""
        ratios = factor * self.seconds[of] / self.seconds[to]
        low, ratio, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
        value = self.absolute(timed or of, unit=unit, per=per)
        return Row(name, value, unit if value is not None else "", ratio, (low, high), relative_to or to, target)

    def absolute(self, name: str, *, unit: str = "ms", per: float = 1.0) -> float | None:
        """The median time in `unit`; None on a CPU, whose clock other programs share."""
        scale = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit.partition(" ")[0]]
        return self.median(name) * scale / per if self.device.type == "cuda" else None


def wait(device: torch.device) -> None:
    """Returns when the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Call, device: torch.device, repeats: int = 1) -> float:
    """Seconds per call."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - start) / repeats


def alternate(calls: Mapping[str, Call], device: torch.device, *, seconds: float) -> Times:
    """Times the calls in turn, A B A B ..., for about `seconds` in all; each is warmed up first."""
    repeats = {}
    for name, call in calls.items():
        seconds_per_call(call, device, 3)
        quickest = max(seconds_per_call(call, device), 1e-6)
        repeats[name] = min(1000, math.ceil(SHORTEST[device.type] / quickest))
    readings: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    fewest, most = ROUNDS
    for number in range(most):
        if number >= fewest and time.perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            readings[name].append(seconds_per_call(call, device, repeats[name]))
    return Times({name: np.array(seconds) for name, seconds in readings.items()}, device)


def linearity(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(a, b, d): the line a + b n, a >= 0, nearest to the times in relative terms, and its largest deviation d."""
    n, t = np.array(sizes, dtype=np.float64), np.array(seconds)
    table = np.stack([1 / t, n / t], axis=1)
    scale = np.abs(table).max(axis=0)
    line = np.linalg.lstsq(table / scale, np.ones_like(t), rcond=None)[0] / scale
    if line[0] < 0:  # a fixed cost cannot be negative
        line = np.array([0.0, table[:, 1].sum() / (table[:, 1] ** 2).sum()])
    return float(line[0]), float(line[1]), float(np.abs(table @ line - 1).max())


def cuda_graph(call: Call, device: torch.device) -> Call:
    """A call that is recorded once as a CUDA graph, and replayed."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(keep_alive: Call = call) -> None:  # the graph points at tensors of the call
        graph.replay()

    return replay


def duration(scale: str, usual: float) -> float:
    """How long to measure; the smallest sizes only show that everything runs."""
    return 0.0 if scale == "smoke" else usual


def largest_that_fits(
    sizes: Sequence[int], measure: Callable[[int], Iterator[Finding]], device: torch.device, *, unit: str
) -> Iterator[Finding]:
    """The findings of the first size that fits into memory, after a sentence for each that does not."""
    for size, smaller in zip(sizes, (*sizes[1:], None), strict=True):
        try:
            findings = list(measure(size))
        except torch.OutOfMemoryError:
            findings = None
        if findings is not None:
            yield from findings
            return
        # Outside the handler, the error no longer holds the tensors that did fit.
        yield out_of_memory(f"{size:,} {unit}", device, None if smaller is None else f"{smaller:,} {unit}")


def out_of_memory(size: str, device: torch.device, smaller: str | None) -> str:
    """A sentence about a size that is too large for the device; frees the cached memory."""
    memory = "the memory"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        memory = f"the {free / 2**30:.1f} GiB that are free of {total / 2**30:.1f} GiB on {device_name(device)}"
    consequence = f"measured with {smaller}" if smaller else "not measured"
    return f"{size} do not fit into {memory}; {consequence}: free the device of other programs, or pass --smoke."


def device_name(device: torch.device) -> str:
    """The model name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    cudnn: Any = torch.backends.cudnn
    return {
        "device": device_name(device),
        "kind": device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "tf32": {"matmul": torch.backends.cuda.matmul.fp32_precision, "convolution": cudnn.conv.fp32_precision},
        "pacprune": __version__,
        "commit": _commit(),
        "kernels": kernels.backend(device),
        "kernels_status": kernels.status(device),
    }


def _commit() -> str | None:
    """The commit of the source tree that the package runs from; None outside one."""
    folder = Path(__file__).parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may lie inside another repository
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
