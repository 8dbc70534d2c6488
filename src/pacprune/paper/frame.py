"""What recipes share: the job they are given, figures with the CSV behind each, and intervals over seeds."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pacprune.files import write_atomically
from pacprune.masking import masks
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.types import Progress, Table

SCALES = ("smoke", "reduced", "paper")
STRIDE = 1000
"""Seeds of one job; those of --seed 0 and --seed 1 do not meet."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_S = TypeVar("_S", bound=_Named)


@dataclass(frozen=True)
class Job:
    """What a recipe is asked for."""

    scale: str
    out: Path
    seed: int
    device: torch.device
    data_dir: Path | None
    progress: Progress
    only: str | None = None
    """The one setting that is asked for, by its name; None is all of them."""

    def chosen(self, settings: Sequence[_S]) -> list[_S]:
        """Those that are asked for."""
        return [one for one in settings if self.only in (None, one.name)]

    def seeds(self, count: int) -> list[int]:
        """The seeds of `count` independent repetitions."""
        return [self.seed * STRIDE + k for k in range(count)]


def on_device(config: Config, job: Job) -> Config:
    """The same stage in float32 by the fastest means of the device."""
    return replace(config, execution="graph") if job.device.type == "cuda" else config


class Drawn(NamedTuple):
    """One figure: its files, what a reader should see in it, and its rows as the CSV has them."""

    name: str
    caption: str
    csv: Path
    png: Path | None
    rows: Table


def draw(job: Job, name: str, caption: str, rows: Callable[[], Table], paint: Callable[[Any, Table], None]) -> Drawn:
    """Leaves NAME.csv and, with matplotlib, NAME.png; rows that are there from a run that was broken off are kept."""
    path = job.out / f"{name}.csv"
    if not path.is_file():
        write_atomically(path, plots.csv_of(rows()))
    found = read(path)
    picture = plots.png_of(paint, found)
    if picture is not None:
        write_atomically(path.with_suffix(".png"), picture)
    return Drawn(name, caption, path, None if picture is None else path.with_suffix(".png"), found)


def read(path: Path) -> Table:
    """The rows of a CSV: numbers as floats, nothing as None."""

    def value(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text or None

    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def agreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """(shared - chance) / (1 - chance): 0 for independent masks, 1 for equal ones; kept and pruned weights alike."""
    shared, chance = masks.overlap(*({name: part.cpu() for name, part in mask.items()} for mask in (a, b)))
    return (shared - chance) / (1 - chance)


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """mean ± t s / sqrt(n), Student's 95 % interval over independent repetitions; one value has no interval (NaN)."""
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) < 2:
        return Interval(mean, math.nan, math.nan)
    half = _student(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


def correlation(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Pearson's r and its 95 % interval by Fisher's transform, tanh(artanh r ± 1.96 / sqrt(runs - 3)).

    NaN where one of the two does not vary, an interval of NaN for fewer than four runs.
    """
    spread = [float(np.ptp(values)) for values in (x, y)]
    if not min(spread) > 0:
        return Interval(math.nan, math.nan, math.nan)
    r = float(np.corrcoef(x, y)[0, 1])
    if len(x) < 4:
        return Interval(r, math.nan, math.nan)
    middle, half = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, r))), 1.959964 / math.sqrt(len(x) - 3)
    return Interval(r, math.tanh(middle - half), math.tanh(middle + half))


def _student(freedom: int) -> float:
    """t with Pr(|T| < t) = 0.95: with T = sqrt(freedom) tan(angle), the angle has density cos^(freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    height = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, mass / mass[-1], angle)))


def means(rows: Table, y: str, *by: str) -> dict[tuple[Any, ...], float]:
    """The mean of y over the rows that agree in all columns `by`, under their values."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), []).append(row[y])
    return {key: interval(values).mean for key, values in found.items()}


def lines(axes: Any, rows: Table, *, x: str, y: str, by: str, style: dict[str, tuple[str, str, str]]) -> None:
    """One line per value of `by`: the mean of y over the rows with equal x, and its interval.

    style: value -> (label, colour, marker).
    """
    for key, (label, colour, marker) in style.items():
        own = [row for row in rows if row[by] == key]
        places = sorted({row[x] for row in own})
        found = [interval([row[y] for row in own if row[x] == place]) for place in places]
        axes.plot(places, [i.mean for i in found], color=colour, marker=marker, ms=5, lw=1.8, label=label)
        if not any(math.isnan(i.low) for i in found):
            axes.fill_between(places, [i.low for i in found], [i.high for i in found], color=colour, alpha=0.2, lw=0)
