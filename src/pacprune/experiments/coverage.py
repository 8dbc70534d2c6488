"""How often every bound fails, on synthetic populations whose true risk is known exactly and that try to break it.

A bound at delta may lie below the true risk in at most a fraction delta of all samples. The populations spend their KL
on the sample, stop at the worst time or sit just above a value of the bound; planted faults show that the same
populations catch a bound that is wrong.

    >>> rows = run(200)
    >>> all(row.ok for row in rows)
    True
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds, montecarlo
from pacprune.loop import Progress
from pacprune.numeric import check_count, check_delta

CONFIDENCE = 0.999
"""Of the two-sided Clopper-Pearson interval around an observed rate."""

NETWORKS = 10_000
"""Independent networks of equal risk, P uniform over them, Q on the one with the fewest errors: KL = log 10,000."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CountBound = Callable[[int, int], float]
"""(errors, examples) -> upper bound on a risk; increasing in errors."""


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


@dataclass(frozen=True)
class Finding:
    """What a study saw: in which trials a bound, or a planted fault, lay below the true risk."""

    bound: str
    predictor: str
    population: str
    violated: NDArray[np.bool_]
    planted_fault: bool = False


def run(trials: int, *, seed: int = 0, delta: float = 0.05, progress: Progress | None = None) -> list[Row]:
    """All studies with so many samples each; a few hundred tell faults from bounds, 10,000 resolve a rate to .01."""
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


# --- Populations: the fewest errors of many networks, and the risk at which a bound fails most often.


def _cdf(n: int, p: float) -> Floats:
    """Pr[Binomial(n, p) <= k] for k = 0..n."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    return np.minimum(np.cumsum(np.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))), 1.0)


def _fewest(rng: np.random.Generator, trials: int, *, n: int, risk: float, networks: int) -> Ints:
    """The smallest of `networks` independent Binomial(n, risk), by the inverse of its distribution function."""
    u = -np.expm1(np.log1p(-rng.random(trials)) / networks)
    return np.minimum(np.searchsorted(_cdf(n, risk), u), n)


def worst_case(bound: CountBound, *, sizes: Sequence[int], networks: int = 1) -> tuple[int, float, float]:
    """The (n, risk) where `bound` at the fewest errors of the networks fails most often, and how often: exact.

    For a risk in (bound(k), bound(k+1)] the bound fails iff there are at most k errors, which is the more probable the
    smaller the risk: only the risks just above a value of the bound need be tried.
    """
    found = (sizes[0], 0.5, 0.0)
    for n in sizes:
        for k in range(n):
            risk = bound(k, n) * (1.0 + 1e-12)
            if risk < 1.0:
                rate = -math.expm1(networks * math.log1p(-_cdf(n, risk)[k]))
                found = max(found, (n, risk, rate), key=lambda case: case[2])
    return found


def _each(function: Callable[..., float], *columns: NDArray) -> Floats:
    """function(*row) of every trial, called once for each row that occurs."""
    rows, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in rows.tolist()])[inverse.reshape(-1)]


def _ever_below(
    rng: np.random.Generator, trials: int, bound: CountBound, *, means: float | Floats, risk: float, draws: int
) -> NDArray[np.bool_]:
    """Whether bound(errors, t) < risk at any time t <= draws, for draws that err with probability `means`."""
    safe, k = [], 0
    for t in range(1, draws + 1):
        while k <= t and bound(k, t) < risk:  # the least safe number of errors never falls
            k += 1
        safe.append(k)
    below = np.empty(trials, dtype=bool)
    p = np.broadcast_to(means, trials)[:, None]
    for start in range(0, trials, 1000):
        part = slice(start, start + 1000)
        errors = (rng.random((len(p[part]), draws)) < p[part]).cumsum(axis=1)
        below[part] = (errors < np.array(safe)).any(axis=1)
    return below


# --- The studies. Each yields what it found, valid bounds first.


def _gibbs(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """PAC-Bayes bounds where they are worst: one network with P = Q, and Q on the best of 10,000."""
    every = {
        "Seeger-Maurer": bounds.seeger,
        "paper": bounds.paper,
        "Catoni, grid of 20": bounds.catoni,
        "Catoni, c = 8": lambda risk, **rest: bounds.catoni(risk, c=8.0, **rest),
    }
    few, more = (1, 2, 5, 10, 20, 50, 100, 200), (50, 100, 200, 500)
    for networks, sizes, predictor in ((1, few, "Q = P"), (NETWORKS, more, "Gibbs")):
        kl = math.log(networks)
        for name, function in every.items():

            def bound(k: int, n: int, function: Callable[..., float] = function, kl: float = kl) -> float:
                return function(k / n, n=n, kl=kl, delta=delta)

            n, risk, _ = worst_case(bound, sizes=sizes, networks=networks)
            errors = _fewest(rng, trials, n=n, risk=risk, networks=networks)
            population = f"best of {networks:,} networks" if networks > 1 else "one network"
            population += f", n = {n}, risk {risk:.3f}"
            yield Finding(name, predictor, population, _each(lambda k: bound(k, n), errors) < risk)  # noqa: B023
            if function is bounds.seeger and networks > 1:
                twice = _each(lambda k: bounds.seeger(k / n, n=2 * n, kl=kl, delta=delta), errors)  # noqa: B023
                yield Finding("Seeger-Maurer, n counted twice", predictor, population, twice < risk, True)
                free = _each(lambda k: bounds.seeger(k / n, n=n, kl=0.0, delta=delta), errors)  # noqa: B023
                name = "Seeger-Maurer, delta not divided among priors"
                yield Finding(name, "Q = P", population.replace("networks", "priors"), free < risk, True)


def _held_out(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """Clopper-Pearson for one fixed network, and for the best of 20 priors with and without the union bound."""
    for name, priors, grid in (
        ("Clopper-Pearson", 1, 1),
        ("Clopper-Pearson, delta/20", 20, 20),
        ("Clopper-Pearson, delta not divided", 20, 1),
    ):
        each = bounds.Ledger.split(delta, grid=grid).delta_each

        def bound(k: int, n: int, each: float = each) -> float:
            return bounds.clopper_pearson(k, n=n, delta=each)

        n, risk, _ = worst_case(bound, sizes=(100,), networks=priors)
        errors = _fewest(rng, trials, n=n, risk=risk, networks=priors)
        population = ("one network" if priors == 1 else f"best of {priors} priors") + f", n = {n}, risk {risk:.3f}"
        violated = _each(lambda k: bound(k, n), errors) < risk  # noqa: B023
        yield Finding(name, "held-out", population, violated, planted_fault=grid < priors)


def _monte_carlo(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """Bounds on a known mean from draws: at a fixed time, or at the worst time of 1,000."""

    def chernoff(k: int, t: int) -> float:
        return montecarlo.chernoff(k / t, draws=t, delta=delta)

    def betting(k: int, t: int) -> float:
        return montecarlo.betting([0.0, 1.0], counts=[t - k, k], delta=delta)

    def lower(k: int, t: int) -> float:
        # k draws of 0 speak for a small mean, as k draws of 1 do for a large one.
        return 1.0 - montecarlo.betting_lower([0.0, 1.0], counts=[k, t - k], delta=delta)

    def difference(k: int, t: int) -> float:
        # f errs where the draw is right in t - k draws of one example, and never where the draw errs.
        return 1.0 + montecarlo.betting_difference([-1.0, 0.0], counts=[t - k, k], delta=delta)

    n, risk, _ = worst_case(chernoff, sizes=(100,))
    errors = _fewest(rng, trials, n=n, risk=risk, networks=1)
    violated = _each(lambda k: chernoff(k, n), errors) < risk
    yield Finding("Chernoff", "Monte Carlo", f"{n} draws, mean {risk:.3f}", violated)
    for name, bound, mean, fault in (
        ("betting", betting, 0.5, False),
        ("betting, lower", lower, 0.5, False),
        ("betting, control variate", difference, 0.5, False),
        ("Chernoff, stopped at will", chernoff, 0.5, True),
    ):
        violated = _ever_below(rng, trials, bound, means=mean, risk=mean, draws=1000)
        yield Finding(name, "Monte Carlo", f"worst time of 1,000 draws, mean {mean}", violated, fault)


def _composition(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """Seeger-Maurer at the betting bound: so many examples that the Monte-Carlo step alone can fail."""
    ledger, n, risk = bounds.Ledger.split(delta), 10**6, 0.5

    def chain(k: int, t: int) -> float:
        upper = montecarlo.betting([0.0, 1.0], counts=[t - k, k], delta=ledger.monte_carlo)
        return bounds.seeger(upper, n=n, kl=0.0, delta=ledger.pac_bayes)

    means = rng.binomial(n, risk, trials) / n
    violated = _ever_below(rng, trials, chain, means=means, risk=risk, draws=1000)
    population = f"worst time of 1,000 draws, n = {n:,}, risk {risk}"
    yield Finding("Seeger-Maurer at betting", "Gibbs", population, violated)
    draws = 200
    mean = _each(
        lambda k: bounds.seeger(k / draws, n=n, kl=0.0, delta=ledger.pac_bayes), rng.binomial(draws, means, trials)
    )
    name = "Seeger-Maurer at the mean of the draws"
    yield Finding(name, "Gibbs", f"{draws} draws, n = {n:,}, risk {risk}", mean < risk, True)


def _excess(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """Excess loss against a reference network: Q is the reference itself, or the best of 100 x 100 changes to it."""
    ledger = bounds.Ledger.split(delta, monte_carlo_share=0.0, reference_share=0.5)

    def bound(errors: int, plus: int, minus: int, n: int, kl: float) -> float:
        return bounds.excess_loss(
            reference_errors=errors,
            plus=plus / n,
            minus=minus / n,
            n=n,
            kl=kl,
            delta_reference=ledger.reference,
            delta=ledger.pac_bayes,
        )

    n = 10_000
    risk = bound(n // 2, 0, 0, n, 0.0) * (1.0 + 1e-12)
    violated = _each(lambda k: bound(k, 0, 0, n, 0.0), rng.binomial(n, risk, trials)) < risk
    yield Finding("excess loss", "Gibbs", f"Q = reference, n = {n:,}, risk {risk:.3f}", violated)

    n, own, added, mended, side = 200, 0.2, 0.1, 0.5, 100
    errors = rng.binomial(n, own, trials)
    plus, minus = np.empty_like(errors), np.empty_like(errors)
    for count in np.unique(errors).tolist():
        at = errors == count
        plus[at] = _fewest(rng, int(at.sum()), n=n - count, risk=added, networks=side)
        minus[at] = count - _fewest(rng, int(at.sum()), n=count, risk=1.0 - mended, networks=side)
    risk = own + (1.0 - own) * added - own * mended
    violated = _each(lambda *counts: bound(*counts, n, math.log(side**2)), errors, plus, minus) < risk
    yield Finding("excess loss", "Gibbs", f"best of {side**2:,} networks, n = {n}, risk {risk:.3f}", violated)


def _single_draw(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """One network drawn from the Gibbs posterior Q ~ exp(-2 errors) over 10,000 networks, its log ratio exact."""
    n, sharpness = 50, 2.0
    _, risk, _ = worst_case(
        lambda k, n: bounds.seeger(k / n, n=n, kl=math.log(NETWORKS), delta=delta), sizes=(n,), networks=NETWORKS
    )
    # How many networks make k errors is all that Q depends on.
    networks = rng.multinomial(NETWORKS, np.diff(_cdf(n, risk), prepend=0.0), size=trials)
    weights = networks * np.exp(-sharpness * np.arange(n + 1))
    total = weights.sum(axis=1)
    errors = (weights.cumsum(axis=1) < (rng.random(trials) * total)[:, None]).sum(axis=1)
    ratio = math.log(NETWORKS) - sharpness * errors - np.log(total)
    found = [
        bounds.disintegrated(k, n=n, log_ratio=r, delta=delta)
        for k, r in zip(errors.tolist(), ratio.tolist(), strict=True)
    ]
    population = f"Gibbs posterior over {NETWORKS:,} networks, n = {n}, risk {risk:.3f}"
    yield Finding("disintegrated", "single draw", population, np.array(found) < risk)


def _transfer(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Finding]:
    """Where the inequalities behind agreement and vote are equalities."""
    n, ledger = 10**6, bounds.Ledger.split(delta, monte_carlo_share=0.0, unlabelled_share=0.5)
    never = bounds.seeger(0.0, n=n, kl=0.0, delta=ledger.pac_bayes)

    def agreement(k: int, m: int) -> float:
        return bounds.agreement(never, disagreements=k, m=m, delta=ledger.unlabelled)

    m, risk, _ = worst_case(agreement, sizes=(100,))
    violated = _each(lambda k: agreement(k, m), rng.binomial(m, risk, trials)) < risk
    population = f"Q never errs, {m} inputs, n = {n:,}, risk {risk:.3f}"
    yield Finding("agreement", "thresholded", population, violated)

    def vote(k: int, n: int) -> float:
        return bounds.vote(bounds.seeger(k / (2 * n), n=n, kl=0.0, delta=delta))

    n, risk, _ = worst_case(vote, sizes=(20, 50, 100))
    violated = _each(lambda k: vote(k, n), rng.binomial(n, risk, trials)) < risk
    yield Finding("vote", "vote", f"half of Q errs on k of n = {n} inputs, risk {risk:.3f}", violated)
