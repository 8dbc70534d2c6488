"""Synthetic populations whose true risk is known exactly, each with the bounds that it tries to break.

They spend the KL on the sample, stop at the worst time, or have a risk just above a value that the bound takes.
"""

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bounds import montecarlo, sequential

NETWORKS = 10_000
"""Independent networks of equal risk, P uniform over them, Q on the one with the fewest errors: KL = log 10,000."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
CountBound = Callable[[int, int], float]
"""(errors, examples) -> upper bound on a risk; increasing in errors."""


@dataclass(frozen=True)
class Violations:
    """In which trials of a study a bound, or a planted fault, lay below the true risk."""

    bound: str
    predictor: str
    population: str
    violated: Bools
    planted_fault: bool = False


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

    For a risk in (bound(k), bound(k+1)] the bound fails iff there are at most k errors. That is more probable for a
    smaller risk, so only the risks just above a value of the bound have to be tried.
    """
    worst = (sizes[0], 0.5, 0.0)
    for n in sizes:
        for k in range(n):
            risk = bound(k, n) * (1.0 + 1e-12)
            if risk < 1.0:
                rate = 1.0 - (1.0 - _cdf(n, risk)[k]) ** networks
                worst = max(worst, (n, risk, rate), key=lambda case: round(case[2], 6))
    return worst


def _per_trial(function: Callable[..., float], *columns: NDArray) -> Floats:
    """function(*row) of every trial, called once for each row that occurs."""
    rows, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in rows.tolist()])[inverse.reshape(-1)]


def _at_worst(
    rng: np.random.Generator, trials: int, bound: CountBound, *, sizes: Sequence[int], networks: int = 1
) -> tuple[int, float, Ints, Bools]:
    """The worst case of `bound`: (n, risk), the fewest errors of the networks in every trial, and where it failed."""
    n, risk, _ = worst_case(bound, sizes=sizes, networks=networks)
    errors = _fewest(rng, trials, n=n, risk=risk, networks=networks)
    return n, risk, errors, _per_trial(lambda k: bound(k, n), errors) < risk


def ever_below(
    rng: np.random.Generator, trials: int, bound: CountBound, *, means: float | Floats, risk: float, draws: int
) -> Bools:
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


def _gibbs(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """PAC-Bayes bounds: one network with P = Q, and Q on the best of 10,000."""

    def bound_at(function: Callable[..., float], kl: float, **fixed: float) -> CountBound:
        return lambda k, n: function(k / n, n=n, kl=kl, delta=delta, **fixed)

    small, large, kl = (1, 2, 5, 10, 20, 50, 100, 200), (50, 100, 200, 500), math.log(NETWORKS)
    for name, function, fixed in (
        ("Seeger-Maurer", bounds.seeger, {}),
        ("paper", bounds.paper, {}),
        ("Catoni, grid of 20", bounds.catoni, {}),
        ("Catoni, c = 8", bounds.catoni, {"c": 8.0}),
    ):
        n, risk, _, violated = _at_worst(rng, trials, bound_at(function, 0.0, **fixed), sizes=small)
        yield Violations(name, "Q = P", f"one network, n = {n}, risk {risk:.3f}", violated)
        n, risk, _, violated = _at_worst(rng, trials, bound_at(function, kl, **fixed), sizes=large, networks=NETWORKS)
        yield Violations(name, "Gibbs", f"best of {NETWORKS:,} networks, n = {n}, risk {risk:.3f}", violated)
    n, risk, errors, _ = _at_worst(rng, trials, bound_at(bounds.seeger, kl), sizes=large, networks=NETWORKS)
    sizes = f"n = {n}, risk {risk:.3f}"
    doubled = _per_trial(lambda k: bounds.seeger(k / n, n=2 * n, kl=kl, delta=delta), errors)
    yield Violations(
        "Seeger-Maurer, n counted twice", "Gibbs", f"best of {NETWORKS:,} networks, {sizes}", doubled < risk, True
    )
    undivided = _per_trial(lambda k: bounds.seeger(k / n, n=n, kl=0.0, delta=delta), errors)
    name = "Seeger-Maurer, delta not divided"
    yield Violations(name, "Q = P", f"best of {NETWORKS:,} priors, {sizes}", undivided < risk, True)


def _held_out(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Clopper-Pearson for one fixed network, and for the best of 20 priors with and without the union bound."""

    def bound_with(grid: int) -> CountBound:
        share = bounds.Ledger.split(delta, grid=grid).delta_each
        return lambda k, n: bounds.clopper_pearson(k, n=n, delta=share)

    for name, priors, grid in (
        ("Clopper-Pearson", 1, 1),
        ("Clopper-Pearson, delta/20", 20, 20),
        ("Clopper-Pearson, delta not divided", 20, 1),
    ):
        n, risk, _, violated = _at_worst(rng, trials, bound_with(grid), sizes=(100,), networks=priors)
        population = ("one network" if priors == 1 else f"best of {priors} priors") + f", n = {n}, risk {risk:.3f}"
        yield Violations(name, "held-out", population, violated, planted_fault=grid < priors)


def _monte_carlo(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Bounds on a known mean from draws: at a fixed time, or at the worst time of 500."""

    def chernoff(k: int, t: int) -> float:
        return montecarlo.chernoff(k / t, draws=t, delta=delta)

    def betting(k: int, t: int) -> float:
        return montecarlo.betting([0.0, 1.0], counts=[t - k, k], delta=delta)

    def lower(k: int, t: int) -> float:
        # The mean of 1 - X, from k draws of X = 0.
        return 1.0 - montecarlo.betting_lower([0.0, 1.0], counts=[k, t - k], delta=delta)

    def difference(k: int, t: int) -> float:
        # k draws, of one example each, err where f does not; the others agree with f.
        return montecarlo.betting_difference([0.0, 1.0], counts=[t - k, k], delta=delta)

    n, risk, _, violated = _at_worst(rng, trials, chernoff, sizes=(100,))
    yield Violations("Chernoff", "Monte Carlo", f"{n} draws, mean {risk:.3f}", violated)
    for name, bound in (("betting", betting), ("betting, lower", lower), ("betting, control variate", difference)):
        violated = ever_below(rng, trials, bound, means=0.7, risk=0.7, draws=500)
        yield Violations(name, "Monte Carlo", "worst time of 500 draws, mean 0.7", violated)
    fewest = _fewest(rng, trials, n=n, risk=risk, networks=20)
    violated = _per_trial(lambda k: chernoff(k, n), fewest) < risk
    yield Violations("Chernoff, best of 20 seeds", "Monte Carlo", f"{n} draws, mean {risk:.3f}", violated, True)


def _composition(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Seeger-Maurer at the betting bound: so many examples that the Monte-Carlo step alone can fail."""
    ledger, n, risk = bounds.Ledger.split(delta), 10**6, 0.5

    def chain(k: int, t: int) -> float:
        upper = montecarlo.betting([0.0, 1.0], counts=[t - k, k], delta=ledger.monte_carlo)
        return bounds.seeger(upper, n=n, kl=0.0, delta=ledger.pac_bayes)

    means = rng.binomial(n, risk, trials) / n
    violated = ever_below(rng, trials, chain, means=means, risk=risk, draws=500)
    population = f"worst time of 500 draws, n = {n:,}, risk {risk}"
    yield Violations("Seeger-Maurer at betting", "Gibbs", population, violated)
    draws = 200
    mean = _per_trial(
        lambda k: bounds.seeger(k / draws, n=n, kl=0.0, delta=ledger.pac_bayes), rng.binomial(draws, means, trials)
    )
    name = "Seeger-Maurer at the mean of the draws"
    yield Violations(name, "Gibbs", f"{draws} draws, n = {n:,}, risk {risk}", mean < risk, True)


def _excess(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
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
    violated = _per_trial(lambda k: bound(k, 0, 0, n, 0.0), rng.binomial(n, risk, trials)) < risk
    yield Violations("excess loss", "Gibbs", f"Q = reference, n = {n:,}, risk {risk:.3f}", violated)

    n, reference_risk, added, mended, side = 200, 0.2, 0.1, 0.5, 100
    errors = rng.binomial(n, reference_risk, trials)
    plus, minus = np.empty_like(errors), np.empty_like(errors)
    for count in np.unique(errors).tolist():
        has_count = errors == count
        plus[has_count] = _fewest(rng, int(has_count.sum()), n=n - count, risk=added, networks=side)
        minus[has_count] = count - _fewest(rng, int(has_count.sum()), n=count, risk=1.0 - mended, networks=side)
    risk = reference_risk + (1.0 - reference_risk) * added - reference_risk * mended
    violated = _per_trial(lambda e, p, m: bound(e, p, m, n, math.log(side**2)), errors, plus, minus) < risk
    yield Violations("excess loss", "Gibbs", f"best of {side**2:,} networks, n = {n}, risk {risk:.3f}", violated)


def _single_draw(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """One network drawn from the Gibbs posterior Q ~ exp(-2 errors) over 10,000 networks, its log ratio exact."""
    n, sharpness = 50, 2.0
    _, risk, _ = worst_case(
        lambda k, n: bounds.seeger(k / n, n=n, kl=math.log(NETWORKS), delta=delta), sizes=(n,), networks=NETWORKS
    )
    # Q depends only on how many networks make k errors.
    networks = rng.multinomial(NETWORKS, np.diff(_cdf(n, risk), prepend=0.0), size=trials)
    weights = networks * np.exp(-sharpness * np.arange(n + 1))
    total = weights.sum(axis=1)
    errors = (weights.cumsum(axis=1) < (rng.random(trials) * total)[:, None]).sum(axis=1)
    ratio = math.log(NETWORKS) - sharpness * errors - np.log(total)
    upper = [
        bounds.disintegrated(k, n=n, log_ratio=r, delta=delta)
        for k, r in zip(errors.tolist(), ratio.tolist(), strict=True)
    ]
    population = f"Gibbs posterior over {NETWORKS:,} networks, n = {n}, risk {risk:.3f}"
    yield Violations("disintegrated", "single draw", population, np.array(upper) < risk)


def _transfer(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """Populations for which the inequalities behind agreement and vote are equalities."""
    n, ledger = 10**6, bounds.Ledger.split(delta, monte_carlo_share=0.0, unlabelled_share=0.5)
    never = bounds.seeger(0.0, n=n, kl=0.0, delta=ledger.pac_bayes)

    def agreement(k: int, m: int) -> float:
        return bounds.agreement(never, disagreements=k, m=m, delta=ledger.unlabelled)

    m, risk, _, violated = _at_worst(rng, trials, agreement, sizes=(100,))
    population = f"Q never errs, {m} inputs, n = {n:,}, risk {risk:.3f}"
    yield Violations("agreement", "thresholded", population, violated)

    def vote(k: int, n: int) -> float:
        return bounds.vote(bounds.seeger(k / (2 * n), n=n, kl=0.0, delta=delta))

    n, risk, _, violated = _at_worst(rng, trials, vote, sizes=(20, 50, 100))
    yield Violations("vote", "vote", f"half of Q errs at once, n = {n}, risk {risk:.3f}", violated)


# --- Real networks over a finite domain: every pruned network and every example can be listed.

INPUTS, HIDDEN, NOISE = 5, 2, 0.3

FLIPS = (0.5, 0.35, 0.2, 0.1, 0.03, 0.001)
"""Posteriors around a mask, its centre: every gate differs from the centre's with this probability; .5 is P itself."""


def small_networks(w: Floats, v: Floats) -> tuple[Floats, Bools, Floats]:
    """All prunings of [v relu(w x) > 0] on x in {-1, 1}^INPUTS: probability[a], wrong[mask, a], gibbs[flip, centre, a].

    Atom a = 2x + y is input x with label y, which is the class given by the unpruned network, flipped with probability
    NOISE. Bit i of a mask keeps weight i, those of w first. gibbs is the probability that a mask drawn from the
    posterior around a centre errs on the atom.
    """
    gates = w.size + v.size
    masks = np.arange(2**gates)[:, None] >> np.arange(gates) & 1
    x = 2.0 * (np.arange(2**INPUTS)[:, None] >> np.arange(INPUTS) & 1) - 1.0
    active = np.maximum(np.einsum("xi,mhi->mxh", x, masks[:, : w.size].reshape(-1, *w.shape) * w), 0.0)
    says_one = np.einsum("mxh,mh->mx", active, masks[:, w.size :] * v) > 0.0
    wrong = np.stack([says_one, ~says_one], axis=2).reshape(len(masks), -1)
    gibbs = np.stack([wrong.astype(np.float64)] * len(FLIPS))
    flip = np.array(FLIPS)[:, None, None]
    for gate in range(gates):
        gibbs = (1.0 - flip) * gibbs + flip * gibbs[:, np.arange(len(masks)) ^ (1 << gate)]
    return np.where(wrong[-1], NOISE, 1.0 - NOISE) / 2**INPUTS, wrong, gibbs


def _real(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """A whole certificate for real networks, in blocks of trials that fit into memory."""
    weights = np.random.default_rng(1)  # one network for every seed of the trials
    networks = small_networks(weights.standard_normal((HIDDEN, INPUTS)), weights.standard_normal(HIDDEN))
    blocks = [list(_certificates(rng, min(250, trials - start), delta, *networks)) for start in range(0, trials, 250)]
    for parts in zip(*blocks, strict=True):
        yield replace(parts[0], violated=np.concatenate([part.violated for part in parts]))


def _certificates(
    rng: np.random.Generator, trials: int, delta: float, probability: Floats, wrong: Bools, gibbs: Floats
) -> Iterator[Violations]:
    """A Q of small bound on the sample; its KL, its draws on the sample, and every bound that is made of them."""
    n, draws, inputs, gates = 50, 200, 100, len(wrong).bit_length() - 1
    sample = rng.choice(probability.size, p=probability, size=(trials, n))
    counts = np.stack([np.bincount(row, minlength=probability.size) for row in sample])

    # For every kind of Q the centre of least empirical risk; among these, the kind of least bound (Pinsker's).
    empirical = (counts / n @ gibbs.reshape(-1, probability.size).T).reshape(trials, len(FLIPS), -1)
    kls = [gates * bounds.kl_bernoulli(flip, 0.5) for flip in FLIPS]
    price = [math.sqrt(bounds.complexity(n, kl, delta) / 2.0) for kl in kls]
    kind = (empirical.min(axis=2) + price).argmin(axis=1)
    centre = empirical[np.arange(trials), kind].argmin(axis=1)
    q, flip = gibbs[kind, centre], np.array(FLIPS)[kind]

    def draw(number: int) -> tuple[Ints, Ints]:
        """`number` masks from the Q of every trial, and how many of their gates differ from the centre's."""
        flipped = rng.random((trials, number, gates)) < flip[:, None, None]
        return centre[:, None] ^ (flipped @ (1 << np.arange(gates))), flipped.sum(axis=2)

    examples = np.take_along_axis(sample, rng.integers(n, size=(trials, draws)), axis=1)
    errors = wrong[draw(draws)[0], examples].sum(axis=1)
    whole, less = bounds.Ledger.split(delta), bounds.Ledger.split(delta, unlabelled_share=0.2)

    def certificate(k: int, kind: int, ledger: bounds.Ledger) -> float:
        upper = montecarlo.betting([0.0, 1.0], counts=[draws - k, k], delta=ledger.monte_carlo)
        return bounds.seeger(upper, n=n, kl=kls[kind], delta=ledger.pac_bayes)

    population = f"{len(wrong):,} prunings of a {INPUTS}-{HIDDEN}-1 network, labels {NOISE:.0%} noise, n = {n}"
    bound = _per_trial(lambda k, kind: certificate(k, kind, whole), errors, kind)
    yield Violations("Seeger-Maurer at betting", "Gibbs", population, bound < q @ probability)
    # A tie counts as an error of the vote.
    yield Violations("vote", "vote", population, _per_trial(bounds.vote, bound) < (q >= 0.5) @ probability)

    x = rng.integers(2**INPUTS, size=(trials, inputs))
    disagreements = (wrong[draw(inputs)[0], 2 * x] != wrong[centre[:, None], 2 * x]).sum(axis=1)

    def agreement(k: int, kind: int, disagreements: int) -> float:
        gibbs_bound = certificate(k, kind, less)
        return bounds.agreement(gibbs_bound, disagreements=disagreements, m=inputs, delta=less.unlabelled)

    bound = _per_trial(agreement, errors, kind, disagreements)
    yield Violations("agreement", "thresholded", population, bound < wrong[centre] @ probability)

    mask, distance = (column[:, 0] for column in draw(1))

    def disintegrated(k: int, distance: int, kind: int) -> float:
        flip = FLIPS[kind]
        ratio = gates * math.log(2.0) + distance * math.log(flip) + (gates - distance) * math.log1p(-flip)
        return bounds.disintegrated(k, n=n, log_ratio=ratio, delta=delta)

    bound = _per_trial(disintegrated, (counts * wrong[mask]).sum(axis=1), distance, kind)
    yield Violations("disintegrated", "single draw", population, bound < wrong[mask] @ probability)

    fitted = (counts / n @ wrong.T.astype(np.float64)).argmin(axis=1)
    for name, mask, fault in (
        ("Clopper-Pearson", np.full(trials, len(wrong) - 1), False),
        ("Clopper-Pearson, network saw the data", fitted, True),
    ):
        bound = _per_trial(lambda k: bounds.clopper_pearson(k, n=n, delta=delta), (counts * wrong[mask]).sum(axis=1))
        yield Violations(name, "held-out", population, bound < wrong[mask] @ probability, fault)


def _tries(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """The best of many tries: networks that nobody declared; posteriors that are moved until their draw is lucky."""
    shares = [delta / (j * (j + 1)) for j in range(1, 21)]
    n, risk, _ = worst_case(lambda k, n: bounds.clopper_pearson(k, n=n, delta=shares[0]), sizes=(100,))
    errors = rng.binomial(n, risk, (trials, len(shares)))
    values = [
        _per_trial(lambda k, s=share: bounds.clopper_pearson(k, n=n, delta=s), errors[:, j])
        for j, share in enumerate(shares)
    ]
    population = f"best of {len(shares)} undeclared tries, n = {n}, risk {risk:.3f}"
    violated = np.stack(values).min(0) < risk
    yield Violations("Clopper-Pearson, delta/(j(j+1))", "held-out", population, violated)

    def drawn(k: int, n: int) -> float:
        return bounds.disintegrated(k, n=n, log_ratio=0.0, delta=delta)

    for name, draws in (("disintegrated, Q sealed", 1), ("disintegrated, Q moved until lucky", 6000)):
        fewest = _fewest(rng, trials, n=500, risk=0.5, networks=draws)
        population = f"Q moved {draws:,} times, n = 500, risk 0.5" if draws > 1 else "Q sealed, n = 500, risk 0.5"
        violated = _per_trial(lambda k: drawn(k, 500), fewest) < 0.5
        yield Violations(name, "single draw", population, violated, planted_fault=draws > 1)


POSTERIORS = 1_000
"""Posteriors of one prior, among which the best is chosen."""


def choosing(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """The best of 1,000 posteriors of one prior, by fresh draws and by draws that chose; and of 1,000 single draws.

    P is uniform over 1,000 networks, and posterior j is network j. A draw errs on a random bound example.
    """
    best, kl, ledger = f"best of {POSTERIORS:,}", math.log(POSTERIORS), bounds.Ledger.split(delta, certified=POSTERIORS)

    def certificate(errors: int, draws: int, n: int, delta_draws: float) -> float:
        upper = montecarlo.chernoff(errors / draws, draws=draws, delta=delta_draws)
        return bounds.seeger(upper, n=n, kl=kl, delta=ledger.pac_bayes_each)

    n, risk, fewest, violated = _at_worst(
        rng,
        trials,
        lambda k, n: bounds.seeger(k / n, n=n, kl=kl, delta=ledger.pac_bayes_each),
        sizes=(50, 100, 200, 500),
        networks=POSTERIORS,
    )
    population = f"{best} posteriors, n = {n}, risk {risk:.3f}"
    yield Violations("Seeger-Maurer, one share for all Q", "Gibbs", population, violated)
    draws = 100
    fresh = rng.binomial(draws, fewest / n)
    violated = _per_trial(lambda k: certificate(k, draws, n, ledger.monte_carlo), fresh) < risk
    yield Violations("Seeger-Maurer at Chernoff", "Gibbs", f"{population}, {draws} fresh draws", violated)

    n = 10**6  # so many examples that only the draws can fail
    _, risk, _ = worst_case(lambda k, t: certificate(k, t, n, ledger.monte_carlo), sizes=(draws,))
    means = rng.binomial(n, risk, trials) / n
    # All networks err on the same examples, and each draws for itself.
    luckiest = np.array([rng.binomial(draws, mean, POSTERIORS).min() for mean in means])
    population = f"{best} posteriors, n = {n:,}, risk {risk:.3f}"
    for name, share, errors, kind in (
        ("Seeger-Maurer at Chernoff", ledger.monte_carlo, rng.binomial(draws, means), "fresh"),
        (f"Seeger-Maurer at Chernoff, delta/{POSTERIORS:,}", ledger.monte_carlo_each, luckiest, "choosing"),
        ("Seeger-Maurer at the draws that chose", ledger.monte_carlo, luckiest, "choosing"),
    ):
        violated = _per_trial(lambda k, share=share: certificate(k, draws, n, share), errors) < risk
        fault = kind == "choosing" and share == ledger.monte_carlo
        yield Violations(name, "Gibbs", f"{population}, {draws} {kind} draws", violated, fault)
    for name, share in (
        (f"disintegrated, delta/{POSTERIORS:,}", ledger.delta_each),
        ("disintegrated, delta not divided", ledger.delta),
    ):
        n, risk, _, violated = _at_worst(
            rng,
            trials,
            lambda k, n, share=share: bounds.disintegrated(k, n=n, log_ratio=0.0, delta=share),
            sizes=(50,),
            networks=POSTERIORS,
        )
        population = f"{best} single draws, n = {n}, risk {risk:.3f}"
        yield Violations(name, "single draw", population, violated, planted_fault=share == ledger.delta)


WATCHED, LIMIT = 2000, 0.1
"""Examples that a monitor sees, and the risk that it should not find exceeded."""


def _steady_errors(rng: np.random.Generator) -> Floats:
    """The risk is the limit."""
    return (rng.random(WATCHED) < LIMIT).astype(np.float64)


def _errors_in_waves(rng: np.random.Generator) -> Floats:
    """The risk goes from 0 to the limit and back, ten times."""
    risks = LIMIT * np.sin(np.arange(WATCHED) * (10 * np.pi / WATCHED)) ** 2
    return (rng.random(WATCHED) < risks).astype(np.float64)


def _dependent_losses(rng: np.random.Generator) -> Floats:
    """Given the past, the mean is the limit: an error is followed by a sure loss of that size, until a coin ends it."""
    errors, ends = rng.random(WATCHED) < LIMIT, rng.random(WATCHED) < 0.5
    losses, sure = errors.astype(np.float64), False
    for t in range(WATCHED):
        if sure:
            losses[t], sure = LIMIT, not ends[t]
        else:
            sure = bool(errors[t])
    return losses


def _watching(rng: np.random.Generator, trials: int, delta: float) -> Iterator[Violations]:
    """False alarms of a monitor, and misses of its interval, at any time; and what a bound for one time does there."""
    for population, sample in (
        (f"risk {LIMIT}", _steady_errors),
        (f"risk from 0 to {LIMIT}, in waves", _errors_in_waves),
        (f"losses that depend on the past, mean {LIMIT} given it", _dependent_losses),
    ):
        paths = (sequential.wealth_path(sample(rng), limit=LIMIT)[1] for _ in range(trials))
        alarms = np.array([sequential.first_alarm(path, alpha=delta) is not None for path in paths])
        yield Violations("alarm", "monitor", f"{WATCHED:,} examples, {population}", alarms)

    draws, risk = 150, 0.3
    wrong = (rng.random((trials, draws)) < risk).cumsum(axis=1)
    inside = [_counts_inside(t, risk, delta) for t in range(1, draws + 1)]
    fewest, most = np.array(inside).T
    outside = ((wrong < fewest) | (wrong > most)).any(axis=1)
    yield Violations("interval", "monitor", f"worst time of {draws} examples, risk {risk}", outside)

    def right_at_most(right: int, t: int) -> float:
        return bounds.clopper_pearson(right, n=t, delta=delta)

    peeked = ever_below(rng, trials, right_at_most, means=1 - LIMIT, risk=1 - LIMIT, draws=1000)
    yield Violations("Clopper-Pearson after each example", "monitor", f"1,000 examples, risk {LIMIT}", peeked, True)


def _counts_inside(t: int, risk: float, alpha: float) -> tuple[int, int]:
    """The fewest and the most errors among t with which the interval of a monitor holds the risk."""

    def ends(errors: int) -> tuple[float, float]:
        counts = [t - errors, *[0] * (sequential.LEVELS - 1), errors]
        return sequential.interval(counts, counts, alpha=alpha)

    fewest = bisect.bisect_left(range(t + 1), True, key=lambda errors: ends(errors)[1] >= risk)
    most = bisect.bisect_left(range(t + 1), True, key=lambda errors: ends(errors)[0] > risk) - 1
    return fewest, most


STUDIES = (_gibbs, _held_out, _monte_carlo, _composition, _excess, _single_draw, _transfer, _real, _tries, _watching)
