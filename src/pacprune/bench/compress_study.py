"""A study of the whole walk of `pp.compress`: how often a network that passed exceeds the limit.

The order is chosen by counts on a validation part, as `declared_order` does it. The planted fault chooses it by those
on the bound set.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bench.synthetic import Violations
from pacprune.certification.risks import Tally
from pacprune.methods.compress import declared_order

CANDIDATES, LIMIT = 10, 0.1
VALIDATION, BOUND = 100, 200
"""Examples of the two parts."""
_ABOVE = 1.0 + 1e-9


def compressed(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Chains of ten candidates whose risks are known."""
    k = max(k for k in range(BOUND) if Tally(BOUND, plus=k).p_value(LIMIT) <= delta)
    edge = bounds.clopper_pearson(k, n=BOUND, delta=delta) * _ABOVE  # where the test at this limit is at its worst
    p_values = np.array([Tally(BOUND, plus=k).p_value(edge / _ABOVE) for k in range(BOUND + 1)])
    for population, risks in (
        ("all just above the limit", np.full(CANDIDATES, edge)),
        ("from half of the limit to twice", np.geomspace(edge / 2, edge * 2, CANDIDATES)),
    ):
        chosen_by = rng.binomial(VALIDATION, risks, (trials, CANDIDATES))
        tested = rng.binomial(BOUND, risks, (trials, CANDIDATES))
        failed = _failures(chosen_by, VALIDATION, tested, p_values, risks >= edge, delta)
        where = f"{VALIDATION} validation and {BOUND} bound examples, {population}"
        yield Violations("compress", "sequence", where, failed)
    tested = rng.binomial(BOUND, edge, (trials, CANDIDATES))
    failed = _failures(tested, BOUND, tested, p_values, np.full(CANDIDATES, True), delta)
    where = f"{BOUND} bound examples, all just above the limit"
    yield Violations("compress, ordered by the bound set", "sequence", where, failed, True)


def _failures(
    chosen_by: NDArray[np.int64],
    size: int,
    tested: NDArray[np.int64],
    p_values: NDArray[np.float64],
    exceeds: NDArray[np.bool_],
    delta: float,
) -> NDArray[np.bool_]:
    """In which trials a candidate passes that exceeds the limit."""
    failed = np.zeros(len(tested), dtype=bool)
    for trial, (counts, errors) in enumerate(zip(chosen_by.tolist(), tested.tolist(), strict=True)):
        for place in declared_order([Tally(size, plus=count) for count in counts], n=BOUND, delta=delta):
            if p_values[errors[place]] > delta:
                break
            failed[trial] |= exceeds[place]
    return failed


STUDIES = (compressed,)
