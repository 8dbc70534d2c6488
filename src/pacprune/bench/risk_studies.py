"""Studies of held-out certificates of any risk: how often they fail where the risk is known, and mistakes beside them.

A certificate fails if the risk of a network, of one of its groups, or of a candidate lies above what is stated of it.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bench.synthetic import Bools, Floats, Violations, ever_below, worst_case
from pacprune.bounds.montecarlo import BETTING_GRID
from pacprune.certification.risks import LEVELS, Tally

CANDIDATES, LIMIT = 10, 0.1
"""Networks of a sequence, and the risk that they should not exceed."""
_ABOVE = 1.0 + 1e-9


def _each(function: Callable[..., bool], *columns: NDArray) -> Bools:
    """function(*row) of every trial, called once for each row that occurs."""
    rows, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in rows.tolist()])[inverse.reshape(-1)]


def _any(table: NDArray) -> Bools:
    """Whether something is true in the row of a trial."""
    return np.asarray(table.any(axis=1))


def _clopper_pearson(delta: float) -> Callable[[int, int], float]:
    return lambda k, n: bounds.clopper_pearson(k, n=n, delta=delta)


# --- One network.


def counted(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Values of 0 and 1: errors, top-k errors and disagreements, also where all or none are 1."""
    for name, n in (("error", 1), ("top-k", 50), ("disagreement", 500)):
        _, risk, _ = worst_case(_clopper_pearson(delta), sizes=(n,))
        for true in (0.0, risk, 1.0):
            errors = rng.binomial(n, true, trials)
            failed = _each(lambda k, n=n, true=true: Tally(n, plus=k).bound(delta) < true, errors)
            yield Violations(name, "held-out", f"n = {n}, risk {true:.3f}", failed)


def drops(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Differences of two errors, mostly 0; the risk is that of a network that errs more often than its reference."""
    for n, plus, minus in ((1, 0.96, 0.0), (1, 0.0, 1.0), (100, 0.037, 0.0), (100, 0.5, 0.5), (1000, 0.03, 0.02)):
        counts = rng.multinomial(n, [plus, minus, 1.0 - plus - minus], trials)
        risk = plus - minus
        failed = _each(lambda a, b, n=n, risk=risk: Tally(n, -1, a, b).bound(delta) < risk, counts[:, 0], counts[:, 1])
        yield Violations("drop", "held-out", f"n = {n:,}, {plus:g} are 1 and {minus:g} are -1", failed)
    n, plus, minus = 1000, 0.01, 0.3
    counts = rng.multinomial(n, [plus, minus, 1.0 - plus - minus], trials)
    # All of delta for one side, and the mean of the other in place of a bound.
    failed = _each(
        lambda a, b: bounds.clopper_pearson(a, n=n, delta=delta) - b / n < plus - minus, counts[:, 0], counts[:, 1]
    )
    yield Violations("drop, one side alone", "held-out", f"n = {n:,}, {plus} are 1 and {minus} are -1", failed, True)


def _tally(losses: Floats) -> Tally:
    levels, times = np.unique(np.ceil(losses * LEVELS).astype(np.int64), return_counts=True)
    return Tally(losses.size, levels=tuple(zip(levels.tolist(), times.tolist(), strict=True)))


def _dependent(rng: np.random.Generator, n: int) -> Floats:
    """Losses of mean LIMIT given the past: a loss of 1 is followed by LIMIT itself until a coin ends that."""
    errors, ends = rng.random(n) < LIMIT, rng.random(n) < 0.5
    losses, sure = errors.astype(np.float64), False
    for t in range(n):
        if sure:
            losses[t], sure = LIMIT, not ends[t]
        else:
            sure = bool(errors[t])
    return losses


POPULATIONS: dict[str, tuple[int, float, Callable[[np.random.Generator, int], Floats]]] = {
    "one loss of 0 or 1": (1, 0.97, lambda rng, n: (rng.random(n) < 0.97).astype(np.float64)),
    "all losses 0": (50, 0.0, lambda rng, n: np.zeros(n)),
    "all losses 1": (50, 1.0, lambda rng, n: np.ones(n)),
    "all losses 0.25": (50, 0.25, lambda rng, n: np.full(n, 0.25)),
    "rare losses of 1": (100, 0.029, lambda rng, n: (rng.random(n) < 0.029).astype(np.float64)),
    "ties: 0, 0.5 or 1": (100, 0.3, lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.5, 0.4, 0.1])),
    "losses from 0 to 1": (200, 0.5, lambda rng, n: rng.random(n)),
    "small losses, some of 1": (200, 0.0595, lambda rng, n: np.where(rng.random(n) < 0.05, 1.0, rng.random(n) / 50)),
    "losses that depend on the past": (500, LIMIT, _dependent),
    "the same, in the order of their size": (500, LIMIT, lambda rng, n: np.sort(_dependent(rng, n))),
}
"""n, the risk, and n losses of a population."""


def bounded(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Losses in [0, 1], by betting with 20 fixed bets; and bets that are chosen for examples that were seen."""
    for population, (n, risk, sample) in POPULATIONS.items():
        # The bound lies below the risk where the p-value at the risk is below delta.
        failed = [risk < 1 and _tally(sample(rng, n)).p_value(risk) < delta for _ in range(trials)]
        yield Violations("bounded loss", "held-out", f"n = {n}, {population}", np.array(failed))
    n, batch = 500, 25
    factors = np.array(BETTING_GRID)[:, None, None]
    failed = []
    for _ in range(trials):
        losses = rng.random(n).reshape(-1, batch)
        log_wealth = np.log1p(factors * ((0.5 - losses) / 0.5)).sum(axis=2).max(axis=0).sum()
        failed.append(log_wealth >= -np.log(delta))
    population = f"n = {n}, losses from 0 to 1, the best bet for every {batch}"
    yield Violations("bounded loss, bets chosen afterwards", "held-out", population, np.array(failed), True)


# --- Documents.

TOKENS, WINDOWS = 100, 50
"""Tokens of a document, and the windows that one is cut into by mistake."""


def _documents(
    rng: np.random.Generator, shape: tuple[int, ...], *, risk: float, correlation: float
) -> NDArray[np.float64]:
    """The chance of an error in every document: a beta variable, so that two tokens of one have this correlation."""
    if correlation == 1.0:
        return (rng.random(shape) < risk).astype(np.float64)
    both = 1.0 / correlation - 1.0
    return rng.beta(risk * both, (1.0 - risk) * both, shape)


def _below(losses: Floats, risk: float, delta: float, lowest: int = 0) -> bool:
    """Whether the bound by these losses of documents lies below the risk."""
    tally = _tally((losses - lowest) / (1 - lowest))
    return Tally(tally.n, lowest, levels=tally.levels).p_value(risk) < delta


def of_documents(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Means over the tokens of documents, which are alike within one; and tokens, or windows, counted instead."""
    n, risk = 100, 0.3
    for correlation in (0.05, 0.3, 1.0):
        wrong = rng.binomial(TOKENS, _documents(rng, (trials, n), risk=risk, correlation=correlation))
        population = f"{n} of {TOKENS} tokens, correlation {correlation:g}"
        failed = [_below(row / TOKENS, risk, delta) for row in wrong]
        yield Violations("documents", "held-out", population, np.array(failed))
        failed = _each(lambda k: bounds.clopper_pearson(k, n=n * TOKENS, delta=delta) < risk, wrong.sum(axis=1))
        yield Violations("documents, tokens counted", "held-out", population, failed, True)
    yield Violations(
        "documents", "held-out", f"{n} of 1 to 1,000 tokens, correlation 0.1", _of_any_length(rng, trials, n, delta)
    )
    chances = _documents(rng, (2, trials, n), risk=risk, correlation=0.1)
    drops = np.diff(rng.binomial(TOKENS, chances) / TOKENS, axis=0)[0]
    failed = np.array([_below(row, 0.0, delta, lowest=-1) for row in drops])
    yield Violations("drop of documents", "held-out", f"{n} of {TOKENS} tokens, correlation 0.1", failed)
    chances = _documents(rng, (trials, n // WINDOWS), risk=risk, correlation=0.1).repeat(WINDOWS, axis=1)
    failed = np.array([_below(row / TOKENS, risk, delta) for row in rng.binomial(TOKENS, chances)])
    population = f"{n} windows of {n // WINDOWS} documents, correlation 0.1"
    yield Violations("documents, windows of the same", "held-out", population, failed, True)


def _of_any_length(rng: np.random.Generator, trials: int, n: int, delta: float) -> Bools:
    """Whether the bound fails where long documents have other errors than short ones: 0.2 against 0.4."""
    long = rng.random((trials, n)) < 0.5
    lengths = np.where(long, rng.integers(500, 1001, (trials, n)), rng.integers(1, 11, (trials, n)))
    low, high = (_documents(rng, (trials, n), risk=risk, correlation=0.1) for risk in (0.2, 0.4))
    wrong = rng.binomial(lengths, np.where(long, low, high))
    return np.array([_below(row, 0.3, delta) for row in wrong / lengths])


# --- Several groups, or several networks.


def grouped(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """A group fails if its bound is below its risk; the certificate fails if one of them does."""
    groups, n = 10, 100
    for name, share in (("groups", delta / groups), ("groups, delta not divided", delta)):
        _, risk, _ = worst_case(_clopper_pearson(share), sizes=(n,))
        failed = np.zeros(trials, dtype=bool)
        for _ in range(groups):
            errors = rng.binomial(n, risk, trials)
            failed |= _each(lambda k, s=share, r=risk: Tally(n, plus=k).bound(s) < r, errors)
        yield Violations(name, "groups", f"{groups} groups, n = {n} each, risk {risk:.3f}", failed, share == delta)
    for name, share in (("front", delta / CANDIDATES), ("front, delta not divided", delta)):
        _, risk, _ = worst_case(_clopper_pearson(share), sizes=(n,))
        errors = rng.binomial(n, risk, (trials, CANDIDATES))
        failed = _each(lambda *ks, s=share, r=risk: Tally(n, plus=min(ks)).bound(s) < r, errors.min(axis=1))
        population = f"{CANDIDATES} candidates, n = {n}, risk {risk:.3f}"
        yield Violations(name, "front", population, failed, share == delta)


def _walked(p_values: Floats, delta: float) -> Bools:
    """Which candidates of every trial pass in a sequence: all before the first whose p-value is above delta."""
    return np.logical_and.accumulate(p_values <= delta, axis=1)


def _errors(rng: np.random.Generator, trials: int, n: int, risks: Floats, *, nested: bool) -> NDArray[np.int64]:
    """Errors of candidates: of independent ones, or each making all the errors of those before it."""
    if not nested:
        return rng.binomial(n, risks, (trials, risks.size))
    u = rng.random((trials, n))
    return np.stack([(u < risk).sum(axis=1) for risk in risks], axis=1)


def sequences(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Fixed-sequence tests, and what goes wrong when the order, the claim or the number of examples is chosen later."""
    n = 200
    k = max(k for k in range(n) if Tally(n, plus=k).p_value(LIMIT) <= delta)
    edge = bounds.clopper_pearson(k, n=n, delta=delta) * _ABOVE  # where the test at this limit is at its worst

    def p_values(errors: NDArray[np.int64]) -> Floats:
        table = np.array([Tally(n, plus=k).p_value(edge / _ABOVE) for k in range(n + 1)])
        return table[errors]

    for population, risks, nested in (
        ("all just above the limit", np.full(CANDIDATES, edge), False),
        ("the same network ten times", np.full(CANDIDATES, edge), True),
        ("from half of the limit to twice", np.geomspace(edge / 2, edge * 2, CANDIDATES), False),
        ("the same, with nested errors", np.geomspace(edge / 2, edge * 2, CANDIDATES), True),
    ):
        errors = _errors(rng, trials, n, risks, nested=nested)
        passed = _walked(p_values(errors), delta)
        failed = _any(passed & (risks >= edge))
        yield Violations("sequence", "sequence", f"n = {n}, {population}", failed)
        first_failed = np.minimum(passed.sum(axis=1), CANDIDATES - 1)
        stopped_at = errors[np.arange(trials), first_failed]
        own = _each(
            lambda k, i, risks=risks: bool(Tally(n, plus=k).bound(delta) < risks[i]), stopped_at, first_failed
        ) & ~passed.all(axis=1)
        name = "sequence, bound of the first failed"
        yield Violations(name, "sequence", f"n = {n}, {population}", failed | own)
    yield from _sequences_of_others(rng, trials, delta)
    yield from _mistakes(rng, trials, delta, n, edge, p_values)


def _sequences_of_others(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Sequences by drops and by losses."""
    n, plus, minus = 200, 0.06, 0.03
    counts = rng.multinomial(n, [plus, minus, 1 - plus - minus], (trials, 3))
    limit = (plus - minus) / _ABOVE
    tests = [
        _each(lambda a, b: Tally(n, -1, a, b).p_value(limit) <= delta, counts[:, i, 0], counts[:, i, 1])
        for i in range(counts.shape[1])
    ]
    failed = _any(np.logical_and.accumulate(np.stack(tests, axis=1), axis=1))
    yield Violations("sequence", "sequence", f"drops, n = {n}, all just above the limit", failed)
    failed = np.array([_tally(rng.choice([0.0, 0.5], 100)).p_value(0.25 / _ABOVE) <= delta for _ in range(trials)])
    yield Violations("sequence", "sequence", "losses of 0 or 0.5, n = 100, just above the limit", failed)


def _mistakes(
    rng: np.random.Generator,
    trials: int,
    delta: float,
    n: int,
    edge: float,
    p_values: Callable[[NDArray[np.int64]], Floats],
) -> Iterator[Violations]:
    """Planted faults of sequences."""
    errors = _errors(rng, trials, n, np.full(CANDIDATES, edge), nested=False)
    population = f"{CANDIDATES} candidates just above the limit, n = {n}"
    sorted_first = _any(_walked(np.sort(p_values(errors), axis=1), delta))
    yield Violations("sequence, in the order of p-values", "sequence", population, sorted_first, True)
    any_passed = _any(p_values(errors) <= delta)
    yield Violations("sequence, going on after a failure", "sequence", population, any_passed, True)
    _, risk, _ = worst_case(_clopper_pearson(delta), sizes=(100,))
    counts = rng.binomial(100, risk, (trials, CANDIDATES))
    table = [Tally(100, plus=k) for k in range(101)]
    passed = _walked(np.array([tally.p_value(0.3) for tally in table])[counts], delta)
    own = np.array([tally.bound(delta) for tally in table])[counts]
    population = f"{CANDIDATES} candidates, n = 100, risk {risk:.3f}, limit 0.3"
    yield Violations("sequence, own bound of each", "sequence", population, _any(passed & (own < risk)), True)
    most = 2000
    ever = ever_below(rng, trials, _clopper_pearson(delta), means=LIMIT, risk=LIMIT, draws=most)
    population = f"risk {LIMIT} is above the limit, a test at every one of {most:,} examples"
    yield Violations("more examples until it passes", "held-out", population, ever, True)


STUDIES = (counted, drops, bounded, grouped, sequences)
