"""Means, intervals, paired tests and correlations over repetitions, and how far two masks agree."""

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
    half = half_width(float(sample.std(ddof=1)), len(sample))
    return Interval(mean, mean - half, mean + half)


def half_width(std: float, count: int) -> float:
    """t s / sqrt(n), half of Student's 95 % interval over n repetitions, at least 2, with the sample's s."""
    return _student(count - 1) * std / math.sqrt(count)


def _student(freedom: int) -> float:
    """t with Pr(|T| < t) = 0.95: with T = sqrt(freedom) tan(angle), the angle has density cos^(freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    height = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, mass / mass[-1], angle)))


class Paired(NamedTuple):
    """The mean of differences, its 95 % interval, and the two-sided p-value of the t-test of a mean of 0."""

    mean: float
    low: float
    high: float
    p: float


def paired(differences: Sequence[float]) -> Paired:
    """Student's interval and paired t-test over independent repetitions; one repetition has neither (NaN)."""
    mean, low, high = interval(differences)
    freedom = len(differences) - 1
    if not freedom:
        return Paired(mean, low, high, math.nan)
    error = float(np.std(differences, ddof=1)) / math.sqrt(freedom + 1)
    if not error:
        return Paired(mean, low, high, 0.0 if mean else 1.0)
    return Paired(mean, low, high, _two_tails(abs(mean) / error, freedom))


def _two_tails(t: float, freedom: int) -> float:
    """Pr(|T| > t): with T = sqrt(freedom) / tan(angle), the angle has density sin^(freedom - 1) on (0, pi / 2)."""
    angle = np.linspace(0, math.atan2(math.sqrt(freedom), t), 20_001)
    height = np.sin(angle) ** (freedom - 1)
    mass = float(((height[1:] + height[:-1]) / 2).sum()) * float(angle[1])
    whole = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi) / 2
    return min(1.0, mass / whole)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's p-values (1979): those at or below 0.05 are rejected together with at most 5 % chance of any error.

    The k-th smallest of m is multiplied by m + 1 - k, and none is below a smaller one's. NaN counts as 1.
    """
    order = sorted(range(len(p_values)), key=lambda k: (math.isnan(p_values[k]), p_values[k]))
    adjusted, least = [1.0] * len(p_values), 0.0
    for place, k in enumerate(order):
        p = 1.0 if math.isnan(p_values[k]) else p_values[k]
        least = max(least, min(1.0, (len(order) - place) * p))
        adjusted[k] = least
    return adjusted


LEVEL = 0.05
"""The p-value from which on two methods count as level."""
MARGIN = 0.1
"""Points by which a method may be behind another, beyond the interval, and still be level with it."""
SUBJECT = ("dataset", "model", "label")
"""Columns that tell one contest from another."""


def verdict(difference: Paired) -> str:
    """`worse` where the whole interval is above MARGIN, `better` where it is below 0, else `level`.

    One repetition tells nothing, so it is `level`, too.
    """
    return "worse" if difference.low > MARGIN else "better" if difference.high < 0 else "level"


def cells(rows: Table, reference: str = "pft") -> Table:
    """The reference's number minus each other method's, seed by seed: one row per contest, sparsity and method.

    Differences are in points, a hundredth of the number: of an error rate, percent of the examples; of a loss in nats,
    close to percent of the perplexity, its exponential. `holm` corrects p for all rows of the table.

    Args:
        rows: One per network, with the columns SUBJECT, method, sparsity, seed and value.
        reference: The method that the others are compared with.

    Returns:
        The means, the difference with its interval, p-values and the verdict on the reference.
    """
    parts = groups([row for row in rows if row["method"] != "dense"], *SUBJECT, "sparsity", "method")
    values = {key: {row["seed"]: row["value"] for row in part} for key, part in parts.items()}
    table: Table = []
    for key, by_seed in values.items():
        *cell, method = key
        base = values.get((*cell, reference), {})
        seeds = sorted(by_seed.keys() & base.keys())
        if method == reference or not seeds:
            continue
        difference = paired([100 * (base[seed] - by_seed[seed]) for seed in seeds])
        table.append(
            dict(zip((*SUBJECT, "sparsity", "method"), key, strict=True))
            | {"seeds": len(seeds), reference: interval([base[seed] for seed in seeds]).mean}
            | {"other": interval([by_seed[seed] for seed in seeds]).mean, "difference": difference.mean}
            | {"low": difference.low, "high": difference.high, "p": difference.p, "verdict": verdict(difference)}
        )
    return [row | {"holm": p} for row, p in zip(table, holm([row["p"] for row in table]), strict=True)]


def highest(table: Table, count: int = 2) -> Table:
    """The rows at the `count` highest sparsities of every contest."""
    rows: Table = []
    for part in groups(table, *SUBJECT).values():
        sparsities = sorted({row["sparsity"] for row in part})[-count:]
        rows += [row for row in part if row["sparsity"] in sparsities]
    return rows


def share(table: Table, word: str) -> float:
    """The share of the cells with this verdict; NaN without cells."""
    return sum(row["verdict"] == word for row in table) / len(table) if table else math.nan


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
