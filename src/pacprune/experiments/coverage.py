"""How often every bound fails, on synthetic populations whose true risk is known exactly and that try to break it.

A bound at delta may lie below the true risk in at most a fraction delta of all samples. Planted faults, on the same
populations, show that a bound that is wrong would be caught.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacprune import bounds
from pacprune.experiments.populations import STUDIES, Finding
from pacprune.loop import Progress
from pacprune.numeric import check_count, check_delta

CONFIDENCE = 0.999
"""Of the two-sided Clopper-Pearson interval around an observed rate."""


@dataclass(frozen=True)
class Row:
    """How often one bound failed on one population: `violations` of `trials`, with the interval (ci_low, ci_high).

    `ok` says that a valid bound does not exceed its delta beyond the interval, and that a planted fault does.
    """

    bound: str
    predictor: str
    population: str
    trials: int
    violations: int
    rate: float
    ci_low: float
    ci_high: float
    delta: float
    planted_fault: bool
    ok: bool


def run(trials: int, *, seed: int = 0, delta: float = 0.05, progress: Progress | None = None) -> list[Row]:
    """All studies with so many samples each: 100 are enough to catch every fault, 10,000 resolve a rate to .01."""
    trials, delta = check_count("trials", trials), check_delta(delta)
    rows = []
    for done, study in enumerate(STUDIES):
        for found in study(np.random.default_rng([seed, done]), trials, delta):
            rows.append(_row(found, delta))
        if progress:
            progress("coverage", done + 1, len(STUDIES), {})
    return rows


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A header and one line per row, ready to print."""
    head = ("Bound", "Predictor", "Population", "Violations", f"Rate [{CONFIDENCE:.1%} interval]", "delta", "Verdict")
    verdicts = {(False, True): "holds", (False, False): "FAILS", (True, True): "caught", (True, False): "MISSED"}
    lines = [
        (
            row.bound,
            row.predictor,
            row.population,
            f"{row.violations} / {row.trials}",
            f"{row.rate:.4f} [{row.ci_low:.4f}, {row.ci_high:.4f}]",
            f"{row.delta:g}",
            verdicts[row.planted_fault, row.ok],
        )
        for row in rows
    ]
    return [head, *lines]


def _row(found: Finding, delta: float) -> Row:
    trials, violations = found.violated.size, int(found.violated.sum())
    tail = (1.0 - CONFIDENCE) / 2.0
    low = 1.0 - bounds.clopper_pearson(trials - violations, n=trials, delta=tail)
    return Row(
        bound=found.bound,
        predictor=found.predictor,
        population=found.population,
        trials=trials,
        violations=violations,
        rate=violations / trials,
        ci_low=low,
        ci_high=bounds.clopper_pearson(violations, n=trials, delta=tail),
        delta=delta,
        planted_fault=found.planted_fault,
        ok=(low > delta) == found.planted_fault,
    )
