"""Means, intervals and correlations over repetitions, and how far two masks agree."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pacprune.masking import masks
from pacprune.types import Table


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


def _student(freedom: int) -> float:
    """t with Pr(|T| < t) = 0.95: with T = sqrt(freedom) tan(angle), the angle has density cos^(freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    height = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, mass / mass[-1], angle)))


def correlation(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Pearson's r and its 95 % interval by Fisher's transform, tanh(artanh r ± 1.96 / sqrt(runs - 3)).

    NaN where x or y does not vary. Fewer than four runs have no interval (NaN).
    """
    spread = [float(np.ptp(values)) for values in (x, y)]
    if not min(spread) > 0:
        return Interval(math.nan, math.nan, math.nan)
    r = float(np.corrcoef(x, y)[0, 1])
    if len(x) < 4:
        return Interval(r, math.nan, math.nan)
    middle, half = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, r))), 1.959964 / math.sqrt(len(x) - 3)
    return Interval(r, math.tanh(middle - half), math.tanh(middle + half))


def groups(rows: Table, *by: str) -> dict[tuple[Any, ...], Table]:
    """The rows that agree in all columns `by`, under their values."""
    parts: dict[tuple[Any, ...], Table] = {}
    for row in rows:
        parts.setdefault(tuple(row[name] for name in by), []).append(row)
    return parts


def means(rows: Table, y: str, *by: str) -> dict[tuple[Any, ...], float]:
    """The mean of y over the rows that agree in all columns `by`, under their values."""
    return {key: interval([row[y] for row in part]).mean for key, part in groups(rows, *by).items()}


def agreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """(shared - chance) / (1 - chance): 0 for independent masks, 1 for equal ones; kept and pruned weights alike."""
    shared, chance = masks.overlap(*({name: part.cpu() for name, part in mask.items()} for mask in (a, b)))
    return (shared - chance) / (1 - chance)
