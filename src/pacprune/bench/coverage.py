"""How often every bound fails, on synthetic populations that try to break it and whose true risk is known exactly.

A bound at delta may lie below the true risk in at most a fraction delta of all samples. Planted faults on the same
populations show that a wrong bound would be caught.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pacprune import bounds
from pacprune.bench import compress_study, risk_studies, synthetic
from pacprune.bench.synthetic import Violations
from pacprune.bounds.numeric import check_count, check_delta
from pacprune.types import Progress

STUDIES = (
    *synthetic.STUDIES,
    *risk_studies.STUDIES,
    *compress_study.STUDIES,
    synthetic.choosing,
    risk_studies.of_documents,
)
CONFIDENCE = 0.999
"""Of the two-sided Clopper-Pearson interval around an observed rate."""
FEWEST = 60
"""Samples per population; with fewer, the interval around a planted fault's rate may still reach down to 0.05."""


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
    """All studies with `trials` samples each: FEWEST catch every fault, 10,000 resolve a rate to 0.01."""
    trials, delta = check_count("trials", trials, least=FEWEST), check_delta(delta)
    rows = []
    for number, study in enumerate(STUDIES):
        for violations in study(np.random.default_rng([seed, number]), trials, delta):
            rows.append(_row(violations, delta))
        if progress:
            progress("coverage", number + 1, len(STUDIES), {})
    return rows


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """A heading, two lines per row of at most 80 characters, and a verdict."""
    verdicts = {(False, True): "holds", (False, False): "FAILS", (True, True): "caught", (True, False): "MISSED"}
    trials, delta = rows[0].trials, rows[0].delta
    yield f"Rate of failure in {trials:,} samples [{CONFIDENCE:.1%} interval]; delta allows {delta:g}."
    for row in rows:
        rate = f"{row.rate:.4f} [{row.ci_low:.4f}, {row.ci_high:.4f}]"
        yield f"{verdicts[row.planted_fault, row.ok]:<6} {rate}  {row.bound} ({row.predictor})"
        yield f"       {row.population}"
    failed, missed = (
        [row.bound for row in rows if not row.ok and row.planted_fault == fault] for fault in (False, True)
    )
    if failed:
        yield f"A bound fails more often than delta allows: {'; '.join(failed)}."
    if missed:
        yield f"A planted fault was missed: {'; '.join(missed)}. Use more trials, or a delta nearer to 0.05."
    if not failed and not missed:
        yield "All bounds hold, and every planted fault was caught."


def _row(study: Violations, delta: float) -> Row:
    trials, violations = study.violated.size, int(study.violated.sum())
    tail = (1.0 - CONFIDENCE) / 2.0
    low = 1.0 - bounds.clopper_pearson(trials - violations, n=trials, delta=tail)
    return Row(
        bound=study.bound,
        predictor=study.predictor,
        population=study.population,
        trials=trials,
        violations=violations,
        rate=violations / trials,
        ci_low=low,
        ci_high=bounds.clopper_pearson(violations, n=trials, delta=tail),
        delta=delta,
        planted_fault=study.planted_fault,
        ok=(low > delta) == study.planted_fault,
    )
