"""Upper confidence bounds on error rates: plain float64 functions, each rounded outward.

Every function returns the upper end of its bracket: rounding errors can only make a bound larger, never smaller than
the true value. Risks are fractions in [0, 1]; logs are natural; delta is the probability with which a bound may fail.

    >>> from pacprune import bounds
    >>> round(bounds.seeger(0.10, n=12_000, kl=500.0, delta=0.05), 3)
    0.209
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BETTING_GRID = tuple(0.95 * 950.0 ** (j / 19 - 1.0) for j in range(20))
"""Bets f_j of `betting`: 20 geometric values from .001 to .95, fixed so that no run can choose them by its data."""

_ROUND_UP = 1.0 + 2.0**-50
_BLOCK = 16  # A factor of `betting` lies in [.05, 1e16], so that a product of 16 neither overflows nor underflows.


# --- Checks: each returns the value as a plain Python number, so that a float32 scalar cannot lower the precision.


def _fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, but it must lie in [0, 1]: give a fraction, not a percentage")
    return float(value)


def _delta(value: float, *, name: str = "delta", usual: float = 0.05) -> float:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, but it must lie strictly between 0 and 1: {usual} is the usual choice")
    return float(value)


def _count(name: str, value: int, *, least: int = 1) -> int:
    if not (value >= least and value % 1 == 0):
        raise ValueError(f"{name} is {value}, but it must be a whole number of at least {least}: count them")
    return int(value)


def _nonnegative(name: str, value: float) -> float:
    if not value >= 0.0:
        raise ValueError(f"{name} is {value}, but it must be at least 0: check the distributions it was computed from")
    return float(value)


# --- The binary relative entropy and its inverse.


def _divergence(a: float, b: float, difference: float) -> float:
    """a log(a/b) + b - a >= 0 for a, b in [0, 1], with difference = b - a given exactly where it is small."""
    if a == 0.0:
        return b
    if b == 0.0:
        return math.inf
    x = difference / a
    if abs(x) >= 0.5:
        # The quotient below 1 cannot overflow, even when a or b is subnormal.
        return a * (math.log(a / b) if a < b else -math.log(b / a)) + difference
    # a (x - log(1 + x)) by log(1 + x) = 2 artanh(r): all terms of order x cancel on paper instead of in float64.
    r = x / (2.0 + x)
    series = 0.0
    for odd in range(37, 1, -2):
        series = series * r * r + 1.0 / odd
    return a * (x * r - 2.0 * r**3 * series)


def kl_bernoulli(q: float, p: float) -> float:
    """Binary relative entropy kl(q||p) = q log(q/p) + (1-q) log((1-q)/(1-p)), with 0 log 0 = 0.

    Infinite where q > 0 = p or q < 1 = p. Computed as a sum of two nonnegative terms, so that its relative error stays
    near 1e-15, also for p next to q and next to the ends.
    """
    q, p = _fraction("q", q), _fraction("p", p)
    return _divergence(q, p, p - q) + _divergence(1.0 - q, 1.0 - p, q - p)


def _upper_end(lower: float, upper: float, holds: Callable[[float], bool]) -> float:
    """Bisect to neighbouring floats and return the upper one; `holds` is true at `upper` and increasing."""
    while lower < (middle := lower + (upper - lower) / 2.0) < upper:
        if holds(middle):
            upper = middle
        else:
            lower = middle
    return upper


def kl_inverse(q: float, c: float) -> float:
    """Largest p with kl(q||p) <= c: sup{p in [q, 1]: kl(q||p) <= c}, from above.

    kl_inverse(0, c) = 1 - exp(-c), kl_inverse(1, c) = 1, kl_inverse(q, 0) = q, kl_inverse(q, inf) = 1.
    """
    q, c = _fraction("q", q), _nonnegative("c", c)
    if c == 0.0:
        return q
    # The margin covers the rounding of kl_bernoulli, the additive one where numbers are subnormal.
    target = c * (1.0 + 1e-14) + 1e-300
    # kl(q||p) >= (p - q)^2 / (2p) gives a first upper end of the right order of magnitude.
    upper = min(1.0, (q + c + math.sqrt(c * (c + 2.0 * q))) * (1.0 + 1e-12))
    if kl_bernoulli(q, upper) < target:
        upper = 1.0
    return _upper_end(q, upper, lambda p: kl_bernoulli(q, p) >= target)


# --- PAC-Bayes bounds on the Gibbs risk.


@lru_cache
def xi(n: int) -> float:
    """Maurer's constant of the PAC-Bayes-kl theorem, between sqrt(n) and 2 sqrt(n).

        xi(n) = sum_{k=0..n} binom(n,k) (k/n)^k (1-k/n)^(n-k)

    Abel's identity turns the sum into 1 + sum_{m=1..n} prod_{i<m} (1 - i/n) (one plus Ramanujan's Q), whose terms need
    no binomials. (Maurer, "A note on the PAC-Bayesian theorem", 2004.)
    """
    n = _count("n", n)
    # Product m is below exp(-m(m-1)/2n): those left out are e^-50 of the sum. The margin covers them and the rounding.
    terms = min(n, 10 * math.isqrt(n) + 10)
    total = 1.0 + float(np.cumprod(1.0 - np.arange(terms) / n).sum())
    return total * (1.0 + 1e-15 * math.sqrt(n))


def complexity(n: int, kl: float, delta: float) -> float:
    """Complexity term of the PAC-Bayes-kl theorem: (KL(Q||P) + log(xi(n)/delta)) / n."""
    n, kl, delta = _count("n", n), _nonnegative("kl", kl), _delta(delta)
    return (kl + math.log(xi(n)) - math.log(delta)) / n * _ROUND_UP


def seeger(risk: float, *, n: int, kl: float, delta: float) -> float:
    """Seeger-Maurer bound on the Gibbs risk: R(Q) <= kl_inverse(risk, (KL + log(xi(n)/delta))/n).

    Holds with probability 1 - delta over n i.i.d. examples, for all Q at once and one P that did not see them.
    (Seeger 2002; with the constant xi(n), Maurer 2004.)
    """
    return kl_inverse(_fraction("risk", risk), complexity(n, kl, delta))


def paper(risk: float, *, n: int, kl: float, delta: float) -> float:
    """The paper's theorem: risk + min{e + sqrt(e(e + 2 risk)), sqrt(e/2)}, e = (KL + log(2 sqrt(n)/delta))/n.

    Both terms relax the inverse of kl, by kl(q||p) >= (p-q)^2/(2p) and by Pinsker's inequality: never below `seeger`.
    """
    risk, n = _fraction("risk", risk), _count("n", n)
    kl, delta = _nonnegative("kl", kl), _delta(delta)
    e = (kl + math.log(2.0 * math.sqrt(n)) - math.log(delta)) / n
    gap = min(e + math.sqrt(e * (e + 2.0 * risk)), math.sqrt(e / 2.0))
    return min(1.0, (risk + gap) * _ROUND_UP)


# --- Bounds on the mean of observed values.


def clopper_pearson(errors: int, *, n: int, delta: float) -> float:
    """Exact one-sided upper bound on an error rate: sup{p: Pr[Binomial(n, p) <= errors] >= delta}.

    Holds with probability 1 - delta for a fixed predictor and n i.i.d. examples; 1 if errors = n, 1 - delta^(1/n) if
    errors = 0; equal to the (1 - delta)-quantile of Beta(errors + 1, n - errors). (Clopper and Pearson, 1934.)
    """
    errors, n, delta = _count("errors", errors, least=0), _count("n", n), _delta(delta)
    if errors > n:
        raise ValueError(f"errors is {errors}, but there are only n = {n} examples: give the number of wrong ones")
    if errors == n:
        return 1.0
    # Hoeffding: at `lower` the tail is above 1 - e^-200, and for p above it the terms left out are below e^-800.
    root = math.sqrt(n)
    lower = max(0.0, errors / n - 10.0 / root)
    k = np.arange(max(0, errors - math.ceil(30.0 * root)), errors + 1)
    log_choose = math.lgamma(n + 1) - np.array([math.lgamma(i + 1) + math.lgamma(n - i + 1) for i in k.tolist()])
    # The margin covers the rounding of numbers of size n log n.
    target = math.log(delta) - 4e-15 * n * math.log(n + 2)

    def log_tail(p: float) -> float:
        return _log_sum_exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))

    return _upper_end(lower, 1.0, lambda p: log_tail(p) <= target)


def chernoff(risk: float, *, draws: int, delta: float) -> float:
    """Chernoff-Hoeffding bound on the mean of i.i.d. values in [0, 1]: kl_inverse(risk, log(1/delta)/draws).

    `risk` is the sample mean of `draws` values with mean p. By Hoeffding (1963, theorem 1), Pr[risk <= x] <=
    exp(-draws kl(x||p)) for x <= p; the bound fails only in this one tail, so that log(1/delta) is enough and the
    two-sided log(2/delta) is not needed.
    """
    risk, draws, delta = _fraction("risk", risk), _count("draws", draws), _delta(delta)
    return kl_inverse(risk, -math.log(delta) / draws * _ROUND_UP)


def betting(values: Sequence[float] | NDArray[np.floating], *, delta: float) -> float:
    """Betting bound on the mean q of values X_1, X_2, ... in [0, 1] with E[X_t | past] = q; 1 without values.

    The smallest mu with wealth(mu) >= 1/delta, where

        wealth(mu) = mean_j prod_t (1 + f_j (mu - X_t)/(1 - mu)),    f_j in BETTING_GRID.

    At mu = q every factor has conditional mean 1 and is at least 1 - f_j > 0, so that the wealth is a nonnegative
    martingale that starts at 1; Ville's inequality: it ever reaches 1/delta with probability at most delta. The wealth
    increases in mu, so that q lies below the bound with probability 1 - delta at all times t at once: one may
    stop drawing whenever the bound is good enough. (Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting", 2024.)
    """
    x, delta = np.asarray(values, dtype=np.float64).reshape(-1), _delta(delta)
    bad = np.flatnonzero(~((x >= 0.0) & (x <= 1.0)))
    if bad.size:
        raise ValueError(f"value {bad[0]} is {x[bad[0]]}, but every value must lie in [0, 1]: give error rates")
    if x.size == 0:
        return 1.0
    bets = np.array(BETTING_GRID)
    starts = np.arange(0, x.size, _BLOCK)
    # The margin covers the rounding: about 20 units in the last place for a factor near its least value.
    target = math.log(len(bets)) - math.log(delta) + 1e-14 * (x.size + 1)

    def log_wealths(mu: float) -> float:
        factors = 1.0 + ((mu - x) / (1.0 - mu))[:, None] * bets
        return _log_sum_exp(np.log(np.multiply.reduceat(factors, starts, axis=0)).sum(axis=0))

    # At the sample mean no bet has gained (Jensen), which makes it a lower end.
    return _upper_end(float(x.mean()), 1.0, lambda mu: log_wealths(mu) >= target)


def _log_sum_exp(logs: NDArray[np.float64]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


# --- The account of delta.


@dataclass(frozen=True)
class Ledger:
    """How delta is spent: delta = pac_bayes + monte_carlo, by the union bound.

    With a grid of K priors fixed in advance, of which the best certificate is reported, every bound is computed at
    its share divided by K: `pac_bayes_each`, `monte_carlo_each` and, for the held-out baseline at full delta,
    `delta_each`.

        >>> print(Ledger.split(0.05, grid=10))
        delta 0.05 = 0.04 PAC-Bayes + 0.01 Monte Carlo, each divided by 10 for a grid of 10 priors
    """

    pac_bayes: float = 0.04
    monte_carlo: float = 0.01
    grid: int = 1

    def __post_init__(self) -> None:
        _count("grid", self.grid)
        if not (self.pac_bayes > 0.0 and self.monte_carlo > 0.0 and self.delta < 1.0):
            raise ValueError(
                f"the shares of delta are pac_bayes = {self.pac_bayes} and monte_carlo = {self.monte_carlo}, but both "
                "must be above 0 and their sum below 1: the defaults are 0.04 and 0.01"
            )

    @classmethod
    def split(cls, delta: float = 0.05, *, monte_carlo_share: float = 0.2, grid: int = 1) -> "Ledger":
        """Spend the fraction `monte_carlo_share` of delta on the Monte-Carlo step, the rest on the PAC-Bayes bound."""
        delta = _delta(delta)
        monte_carlo = delta * _delta(monte_carlo_share, name="monte_carlo_share", usual=0.2)
        return cls(pac_bayes=delta - monte_carlo, monte_carlo=monte_carlo, grid=grid)

    @property
    def delta(self) -> float:
        """The probability with which the certificate as a whole may fail."""
        return self.pac_bayes + self.monte_carlo

    @property
    def pac_bayes_each(self) -> float:
        """The delta to use for one prior's PAC-Bayes bound."""
        return self.pac_bayes / self.grid

    @property
    def monte_carlo_each(self) -> float:
        """The delta to use for one prior's Monte-Carlo step."""
        return self.monte_carlo / self.grid

    @property
    def delta_each(self) -> float:
        """The delta to use for one prior's held-out baseline."""
        return self.delta / self.grid

    def as_dict(self) -> dict[str, float]:
        """The fields and delta, ready for JSON."""
        return {"delta": self.delta, **asdict(self)}

    def __str__(self) -> str:
        line = f"delta {self.delta:g} = {self.pac_bayes:g} PAC-Bayes + {self.monte_carlo:g} Monte Carlo"
        if self.grid > 1:
            line += f", each divided by {self.grid} for a grid of {self.grid} priors"
        return line
