"""Upper confidence bounds on error rates: plain float64 functions, each rounded outward.

Every function returns the upper end of its bracket: rounding errors can only make a bound larger, never smaller than
the true value. Risks are fractions in [0, 1]; logs are natural; delta is the probability with which a bound may fail.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NotRequired, TypedDict

import numpy as np

from pacprune.bounds.numeric import (
    ROUND_UP,
    ROUNDING,
    check_count,
    check_delta,
    check_fraction,
    check_nonnegative,
    check_part,
    log_sum_exp,
    upper_end,
)

__all__ = [
    "CATONI_GRID",
    "Ledger",
    "agreement",
    "catoni",
    "catoni_constant",
    "clopper_pearson",
    "complexity",
    "disintegrated",
    "excess_loss",
    "kl_bernoulli",
    "kl_inverse",
    "kl_inverse_lower",
    "paper",
    "seeger",
    "vote",
    "xi",
]

CATONI_GRID = tuple(0.02 * 400.0 ** (j / 19) for j in range(20))
"""Constants c of `catoni`: 20 geometric values from 0.02 to 8, fixed so that no run can choose them by its data.

The best c is the log odds ratio of bound and risk: 0.03 at risk 0.5, n = 60,000 and KL = 0; 5 at risk 0.005 and KL =
n/2. The bound is flat around it. For risks from 0.005 to 0.5 and n from 500 to 60,000, the best of these 20 is at most
1.3 % further above the risk than the best of all.
"""

# --- The binary relative entropy and its inverses.


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

    Args:
        q: Fraction in [0, 1], such as an empirical risk.
        p: Fraction in [0, 1], such as the risk on new data.

    Returns:
        kl(q||p) in nats.

    Example:
        >>> round(pp.bounds.kl_bernoulli(0.1, 0.2), 4)
        0.0367
    """
    q, p = check_fraction("q", q), check_fraction("p", p)
    return _divergence(q, p, p - q) + _divergence(1.0 - q, 1.0 - p, q - p)


def kl_inverse(q: float, c: float) -> float:
    """Largest p with kl(q||p) <= c: sup{p in [q, 1]: kl(q||p) <= c}, from above.

    kl_inverse(0, c) = 1 - exp(-c), kl_inverse(1, c) = 1, kl_inverse(q, 0) = q, kl_inverse(q, inf) = 1.

    Args:
        q: Fraction in [0, 1], such as an empirical risk.
        c: Complexity in nats per example, at least 0; see `complexity`.

    Returns:
        p, rounded up.

    Example:
        >>> round(pp.bounds.kl_inverse(0.1, 0.05), 4)
        0.2201
    """
    q, c = check_fraction("q", q), check_nonnegative("c", c)
    if c == 0.0:
        return q
    # The margin covers the rounding of kl_bernoulli, the additive one where numbers are subnormal.
    target = c * (1.0 + 1e-14) + 1e-300
    # kl(q||p) >= (p - q)^2 / (2p) gives a first upper end of the right order of magnitude.
    upper = min(1.0, (q + c + math.sqrt(c * (c + 2.0 * q))) * (1.0 + 1e-12))
    if kl_bernoulli(q, upper) < target:
        upper = 1.0
    return upper_end(q, upper, lambda p: kl_bernoulli(q, p) >= target)


def kl_inverse_lower(q: float, c: float) -> float:
    """Smallest p with kl(q||p) <= c: inf{p in [0, q]: kl(q||p) <= c}, from below.

    kl_inverse_lower(0, c) = 0, kl_inverse_lower(1, c) = exp(-c), kl_inverse_lower(q, 0) = q, kl_inverse_lower(q, inf)
    = 0. Found directly: 1 - kl_inverse(1 - q, c), the same number on paper, has no correct digit where it is small.

    Args:
        q: Fraction in [0, 1], such as an empirical risk.
        c: Complexity in nats per example, at least 0; see `complexity`.

    Returns:
        p, rounded down.

    Example:
        >>> round(pp.bounds.kl_inverse_lower(0.1, 0.05), 4)
        0.0313
    """
    q, c = check_fraction("q", q), check_nonnegative("c", c)
    if c == 0.0:
        return q
    target = c * (1.0 + 1e-14) + 1e-300
    # The bracket is mirrored: kl(q||-p) increases in p above -q, and is infinite at the end where -p = 0 < q.
    return abs(upper_end(-q, -0.0, lambda p: kl_bernoulli(q, -p) >= target))


# --- PAC-Bayes bounds on the Gibbs risk.


@lru_cache
def xi(n: int) -> float:
    """Maurer's constant of the PAC-Bayes-kl theorem, between sqrt(n) and 2 sqrt(n).

        xi(n) = sum_{k=0..n} binom(n,k) (k/n)^k (1-k/n)^(n-k)

    Abel's identity turns the sum into 1 + sum_{m=1..n} prod_{i<m} (1 - i/n) (one plus Ramanujan's Q), whose terms need
    no binomials. (Maurer, "A note on the PAC-Bayesian theorem", 2004.)

    Args:
        n: Number of bound examples, such as 10_000.

    Returns:
        xi(n), rounded up.

    Example:
        >>> round(pp.bounds.xi(10_000), 1)
        126.0
    """
    n = check_count("n", n)
    # Product m is below exp(-m(m-1)/2n): those left out are e^-50 of the sum. The margin covers them and the rounding.
    terms = min(n, 10 * math.isqrt(n) + 10)
    total = 1.0 + float(np.cumprod(1.0 - np.arange(terms) / n).sum())
    return total * (1.0 + 1e-15 * math.sqrt(n))


def complexity(n: int, kl: float, delta: float) -> float:
    """Complexity term of the PAC-Bayes-kl theorem: (KL(Q||P) + log(xi(n)/delta)) / n.

    Args:
        n: Number of bound examples, such as 10_000.
        kl: KL(Q||P) in nats, at least 0.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        Nats per example, rounded up; `kl_inverse` takes them.

    Example:
        >>> round(pp.bounds.complexity(10_000, 50.0, 0.05), 4)
        0.0058
    """
    n, kl, delta = check_count("n", n), check_nonnegative("kl", kl), check_delta(delta)
    return (kl + math.log(xi(n)) - math.log(delta)) / n * ROUND_UP


def seeger(risk: float, *, n: int, kl: float, delta: float) -> float:
    """Seeger-Maurer bound on the Gibbs risk: R(Q) <= kl_inverse(risk, (KL + log(xi(n)/delta))/n).

    Holds with probability 1 - delta over n i.i.d. examples, for all Q at once and one P that did not see them.
    (Seeger 2002; with the constant xi(n), Maurer 2004.)

    Args:
        risk: Gibbs risk on the bound set, or an upper bound on it, as a fraction.
        n: Number of bound examples, such as 10_000.
        kl: KL(Q||P) in nats, at least 0.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        An upper bound on the Gibbs risk on new data.

    Example:
        >>> round(pp.bounds.seeger(0.1, n=10_000, kl=50.0, delta=0.05), 4)
        0.1353
    """
    return kl_inverse(check_fraction("risk", risk), complexity(n, kl, delta))


def paper(risk: float, *, n: int, kl: float, delta: float) -> float:
    """The paper's theorem: risk + min{e + sqrt(e(e + 2 risk)), sqrt(e/2)}, e = (KL + log(2 sqrt(n)/delta))/n.

    Both terms relax the inverse of kl, by kl(q||p) >= (p-q)^2/(2p) and by Pinsker's inequality: never below `seeger`.

    Args:
        risk: Gibbs risk on the bound set, or an upper bound on it, as a fraction.
        n: Number of bound examples, such as 10_000.
        kl: KL(Q||P) in nats, at least 0.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        An upper bound on the Gibbs risk on new data.

    Example:
        >>> round(pp.bounds.paper(0.1, n=10_000, kl=50.0, delta=0.05), 4)
        0.1405
    """
    risk, n = check_fraction("risk", risk), check_count("n", n)
    kl, delta = check_nonnegative("kl", kl), check_delta(delta)
    e = (kl + math.log(2.0 * math.sqrt(n)) - math.log(delta)) / n
    gap = min(e + math.sqrt(e * (e + 2.0 * risk)), math.sqrt(e / 2.0))
    return min(1.0, (risk + gap) * ROUND_UP)


def catoni(risk: float, *, n: int, kl: float, delta: float, c: float | None = None) -> float:
    """Catoni's bound on the Gibbs risk: R(Q) <= (1 - exp(-c risk - (KL + log(1/delta))/n)) / (1 - exp(-c)).

    Holds for one c > 0 that does not depend on the bound set; one chosen with other data is fixed, and costs nothing.
    Without c it is the least over CATONI_GRID, each at delta/20 (union bound: log 20 more nats). There is no xi(n) in
    it, which makes it the tighter one for small KL. (Catoni, "PAC-Bayesian supervised classification", 2007, theorem
    1.2.6.)

    Args:
        risk: Gibbs risk on the bound set, or an upper bound on it, as a fraction.
        n: Number of bound examples, such as 10_000.
        kl: KL(Q||P) in nats, at least 0.
        delta: Probability with which the bound may fail, such as 0.05.
        c: The constant, fixed without the bound set; None tries CATONI_GRID. See `catoni_constant`.

    Returns:
        An upper bound on the Gibbs risk on new data.

    Example:
        >>> round(pp.bounds.catoni(0.1, n=10_000, kl=50.0, delta=0.05, c=0.34), 4)
        0.1337
    """
    risk, n = check_fraction("risk", risk), check_count("n", n)
    kl, delta = check_nonnegative("kl", kl), check_delta(delta)
    if c is None:
        return min(catoni(risk, n=n, kl=kl, delta=delta / len(CATONI_GRID), c=c) for c in CATONI_GRID)
    if not 0.0 < c < math.inf:
        raise ValueError(f"c is {c}, but it must be positive and finite: 1 suits most risks, None tries 20 values")
    exponent = (c * risk + (kl - math.log(delta)) / n) * ROUND_UP
    return min(1.0, math.expm1(-exponent) / math.expm1(-c) * ROUND_UP)


def catoni_constant(risk: float, *, n: int, kl: float, delta: float) -> float:
    """The c of `catoni` that is best for a risk and a KL that are expected before the bound set is looked at.

    Of a geometric grid from 0.01 to 10, fine enough that the next value would not be better by a hundredth of the gap.

    Args:
        risk: The expected risk, as a fraction.
        n: Number of bound examples, such as 10_000.
        kl: The expected KL in nats; 0 will do.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        The constant c.

    Example:
        >>> round(pp.bounds.catoni_constant(0.1, n=10_000, kl=50.0, delta=0.05), 4)
        0.34
    """
    check_fraction("risk", risk)
    return min((0.01 * 1.1**k for k in range(73)), key=lambda c: catoni(risk, n=n, kl=kl, delta=delta, c=c))


def excess_loss(
    *, reference_errors: int, plus: float, minus: float, n: int, kl: float, delta_reference: float, delta: float
) -> float:
    """Bound on the Gibbs risk through a reference network h* that did not see the bound set.

    R(Q) = R(h*) + E_Q Pr[h wrong, h* right] - E_Q Pr[h right, h* wrong], each term bounded on the same n examples:

        R(Q) <= clopper_pearson(h*; delta_reference) + kl_inverse(plus, C) - kl_inverse_lower(minus, C),
        C = (KL + log(2 xi(n)/delta))/n;    fails with probability at most delta + delta_reference.

    Where Q and h* mostly agree, plus and minus are small, and the price of the KL is that of a small risk. (Mhammedi,
    Grünwald and Guedj 2019; the split into two kl: Wu and Seldin 2022.)

    Args:
        reference_errors: Wrong answers of h* on the bound set.
        plus: Mean share of examples on which a draw errs and h* does not, or an upper bound on it.
        minus: Mean share of examples on which h* errs and a draw does not, or a lower bound on it.
        n: Number of bound examples, such as 10_000.
        kl: KL(Q||P) in nats, at least 0.
        delta_reference: Probability with which the bound on h* may fail.
        delta: Probability with which the bound on the two differences may fail.

    Returns:
        An upper bound on the Gibbs risk on new data.

    Example:
        >>> bound = pp.bounds.excess_loss(
        ...     reference_errors=900, plus=0.02, minus=0.01, n=10_000, kl=50.0, delta_reference=0.01, delta=0.04
        ... )
        >>> round(bound, 4)
        0.1333
    """
    plus, minus = check_fraction("plus", plus), check_fraction("minus", minus)
    c = complexity(n, kl, check_delta(delta) / 2.0)
    reference = clopper_pearson(reference_errors, n=n, delta=check_delta(delta_reference, name="delta_reference"))
    return _cap(reference + kl_inverse(plus, c) - kl_inverse_lower(minus, c))


# --- Bounds on the error rate of one network.


def clopper_pearson(errors: int, *, n: int, delta: float) -> float:
    """Exact one-sided upper bound on an error rate: sup{p: Pr[Binomial(n, p) <= errors] >= delta}.

    Holds with probability 1 - delta for a fixed predictor and n i.i.d. examples; 1 if errors = n, 1 - delta^(1/n) if
    errors = 0; equal to the (1 - delta)-quantile of Beta(errors + 1, n - errors). (Clopper and Pearson, 1934.)

    Args:
        errors: Number of wrong answers.
        n: Number of examples.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        An upper bound on the error rate on new data.

    Example:
        >>> round(pp.bounds.clopper_pearson(1_000, n=10_000, delta=0.05), 4)
        0.1051
    """
    (errors, n), delta = check_part("errors", errors, "n", n), check_delta(delta)
    if errors == n:
        return 1.0
    log_tail, target = log_binomial_tail(errors, n), math.log(delta)
    # Hoeffding: at this lower end the tail is above 1 - e^-200.
    return upper_end(max(0.0, errors / n - 10.0 / math.sqrt(n)), 1.0, lambda p: log_tail(p) <= target)


def log_binomial_tail(errors: int, n: int) -> Callable[[float], float]:
    """log Pr[Binomial(n, p) <= errors], rounded up, as a function of p >= errors/n - 10/sqrt(n), for errors < n."""
    # Above that p, the terms left out are below e^-800.
    k = np.arange(max(0, errors - math.ceil(30.0 * math.sqrt(n))), errors + 1)
    log_choose = math.lgamma(n + 1) - np.array([math.lgamma(i + 1) + math.lgamma(n - i + 1) for i in k.tolist()])
    # The margin covers the rounding of numbers of size n log n.
    margin = 4e-15 * n * math.log(n + 2)

    def log_tail(p: float) -> float:
        return log_sum_exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p)) + margin

    return log_tail


def disintegrated(errors: int, *, n: int, log_ratio: float, delta: float) -> float:
    """Bound on the error rate of ONE network h drawn from Q: kl_inverse(errors/n, (log_ratio + log(xi(n)/delta))/n).

    Holds with probability 1 - delta over the examples and the draw. A log_ratio below -log(xi(n)/delta) makes the right
    side negative, which only happens when the bound fails: it is then read as 0, and the bound is errors/n itself.
    (Catoni 2007; with kl and xi(n), Rivasplata et al., "PAC-Bayes analysis beyond the usual bounds", 2020.)

    Args:
        errors: Wrong answers of h on the bound set.
        n: Number of bound examples, such as 10_000.
        log_ratio: log dQ/dP(h), whose mean under Q is the KL.
        delta: Probability with which the bound may fail, such as 0.05.

    Returns:
        An upper bound on the error rate of h on new data.

    Example:
        >>> round(pp.bounds.disintegrated(1_000, n=10_000, log_ratio=50.0, delta=0.05), 4)
        0.1353
    """
    (errors, n), delta = check_part("errors", errors, "n", n), check_delta(delta)
    if not log_ratio > -math.inf:
        raise ValueError(f"log_ratio is {log_ratio}, but it must be above -inf: give log dQ/dP of an h drawn from Q")
    constant = math.log(xi(n)) - math.log(delta)
    # The sum may cancel: its rounding is that of its terms.
    c = max(log_ratio + constant + (abs(log_ratio) + constant) * ROUNDING, 0.0) / n
    return kl_inverse(min(1.0, errors / n * ROUND_UP), c * ROUND_UP)


def agreement(gibbs_bound: float, *, disagreements: int, m: int, delta: float) -> float:
    """Bound on the error rate of a fixed network f that mostly agrees with Q: R(f) <= R(Q) + Pr[h(x) != f(x)].

    f errs only where a draw h errs too or differs from it. The second probability is bounded by Clopper-Pearson from
    the disagreements on m fresh inputs, without labels, each with its own independent draw h. f and Q are fixed before
    these inputs are seen.

    Args:
        gibbs_bound: A bound on the Gibbs risk of Q.
        disagreements: Number of inputs on which f and the draw differ.
        m: Number of unlabelled inputs.
        delta: Probability with which this bound may fail beyond that of `gibbs_bound`.

    Returns:
        An upper bound on the error rate of f on new data.

    Example:
        >>> round(pp.bounds.agreement(0.15, disagreements=20, m=1_000, delta=0.01), 4)
        0.1829
    """
    disagreements, m = check_part("disagreements", disagreements, "m", m)
    return _cap(check_fraction("gibbs_bound", gibbs_bound) + clopper_pearson(disagreements, n=m, delta=delta))


def vote(gibbs_bound: float) -> float:
    """Bound on the error rate of the majority vote of Q: R(vote) <= 2 R(Q).

    Where the vote errs, draws of probability at least 1/2 err (Markov's inequality; two classes or the most voted of
    more). No further delta is spent.

    Args:
        gibbs_bound: A bound on the Gibbs risk of Q.

    Returns:
        An upper bound on the error rate of the vote on new data.

    Example:
        >>> round(pp.bounds.vote(0.15), 4)
        0.3
    """
    return min(1.0, 2.0 * check_fraction("gibbs_bound", gibbs_bound))


def _cap(bound: float) -> float:
    """A sum of a few fractions, rounded up, within [0, 1]."""
    return min(1.0, max(0.0, bound) + ROUNDING)


# --- The account of delta.


class LedgerEntry(TypedDict):
    """A ledger as JSON holds it: its fields, and delta, which is their sum."""

    delta: float
    """The probability with which the bound may fail."""
    pac_bayes: float
    """Share of the PAC-Bayes bound."""
    monte_carlo: float
    """Share of the Monte-Carlo step."""
    reference: float
    """Share of the reference network."""
    unlabelled: float
    """Share of the disagreements on unlabelled inputs."""
    grid: int
    """Priors, fixed in advance, among which this one was chosen."""
    certified: int
    """Certificates among which this one may be chosen."""
    share: NotRequired[float]
    """What a declared plan gives this certificate of delta; not in certificates of version 2, whose account differs."""


@dataclass(frozen=True)
class Ledger:
    """How delta is spent: delta = pac_bayes + monte_carlo + reference + unlabelled, by the union bound.

    The best may be reported of a `grid` of K priors fixed in advance, and of m `certified` posteriors or networks. A
    PAC-Bayes bound holds for all posteriors of one prior at once, and so does the bound of a reference network that
    follows from the prior: `pac_bayes_each` and `reference_each` are divided by K alone. What is new with every
    certificate is divided by K m: its Monte-Carlo draws, its unlabelled inputs, and a network that it is about.

    Args:
        pac_bayes: Share of the PAC-Bayes bound.
        monte_carlo: Share of the Monte-Carlo step.
        reference: Share of the reference network of `excess_loss`.
        unlabelled: Share of the unlabelled inputs of `agreement`.
        grid: How many priors, fixed in advance, this one was chosen among.
        certified: How many certificates this one may be chosen among.
        share: What a plan that was declared beforehand gives this certificate of delta.
        undivided: Whether what holds for all posteriors of a prior at once is left undivided by `certified`. False is
            the account of certificates of version 2, which divided everything.

    Example:
        >>> print(pp.bounds.Ledger.split(0.05, grid=10))
        delta 0.05 = 0.04 PAC-Bayes + 0.01 Monte Carlo, each divided by 10 for a grid of 10 priors
    """

    pac_bayes: float = 0.04
    monte_carlo: float = 0.01
    reference: float = 0.0
    unlabelled: float = 0.0
    grid: int = 1
    certified: int = 1
    share: float = 1.0
    undivided: bool = True

    def __post_init__(self) -> None:
        check_count("grid", self.grid)
        check_count("certified", self.certified)
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is {self.share}; it must lie in (0, 1]: the fraction of delta that was declared")
        rest = {"monte_carlo": self.monte_carlo, "reference": self.reference, "unlabelled": self.unlabelled}
        if not (self.pac_bayes > 0.0 and all(share >= 0.0 for share in rest.values()) and self.delta < 1.0):
            shares = ", ".join(f"{name} = {share}" for name, share in {"pac_bayes": self.pac_bayes, **rest}.items())
            raise ValueError(
                f"the shares of delta are {shares}, but the first must be above 0, none below 0 and their sum below 1: "
                "the defaults are 0.04, 0.01, 0 and 0"
            )

    @classmethod
    def split(
        cls,
        delta: float = 0.05,
        *,
        monte_carlo_share: float = 0.2,
        reference_share: float = 0.0,
        unlabelled_share: float = 0.0,
        grid: int = 1,
        certified: int = 1,
        share: float = 1.0,
        undivided: bool = True,
    ) -> "Ledger":
        """Spends fractions of delta on the other steps, and what is left on the PAC-Bayes bound.

        Args:
            delta: Probability with which the certificate as a whole may fail.
            monte_carlo_share: Fraction for the Monte-Carlo step.
            reference_share: Fraction for the reference network of `excess_loss`.
            unlabelled_share: Fraction for the unlabelled inputs of `agreement`.
            grid: How many priors, fixed in advance, this one was chosen among.
            certified: How many certificates this one may be chosen among.
            share: What a plan that was declared beforehand gives this certificate of delta.
            undivided: Whether what holds for all posteriors of a prior at once is left undivided by `certified`.

        Returns:
            The ledger.
        """
        delta = check_delta(delta)
        shares = [monte_carlo_share, reference_share, unlabelled_share]
        if not sum(shares) < 1.0:
            raise ValueError(f"the shares of delta are {shares}, but PAC-Bayes needs a rest: let their sum be below 1")
        monte_carlo, reference, unlabelled = (delta * share for share in shares)
        rest = delta - delta * sum(shares)
        return cls(rest, monte_carlo, reference, unlabelled, grid, certified, share, undivided)

    @property
    def delta(self) -> float:
        """The probability with which the certificate as a whole may fail."""
        return self.pac_bayes + self.monte_carlo + self.reference + self.unlabelled

    @property
    def candidates(self) -> int:
        """The number of certificates among which the reported one may have been chosen: grid times certified."""
        return self.grid * self.certified

    @property
    def choices(self) -> dict[str, Any]:
        """What every share is divided by, as `split` takes it."""
        return {name: getattr(self, name) for name in ("grid", "certified", "share", "undivided")}

    def _per_prior(self, amount: float) -> float:
        """What one event that all posteriors of a prior share may spend of an amount."""
        return amount * self.share / (self.grid if self.undivided else self.candidates)

    def _per_certificate(self, amount: float) -> float:
        """What one event of this certificate's own may spend of an amount."""
        return amount * self.share / self.candidates

    @property
    def pac_bayes_each(self) -> float:
        """The delta to use for the PAC-Bayes bound of one prior, which holds for all its posteriors at once."""
        return self._per_prior(self.pac_bayes)

    @property
    def monte_carlo_each(self) -> float:
        """The delta to use for one Monte-Carlo step."""
        return self._per_certificate(self.monte_carlo)

    @property
    def reference_each(self) -> float:
        """The delta to use for one reference network, which follows from its prior."""
        return self._per_prior(self.reference)

    @property
    def unlabelled_each(self) -> float:
        """The delta to use for one count of disagreements on unlabelled inputs."""
        return self._per_certificate(self.unlabelled)

    @property
    def prior_each(self) -> float:
        """The delta to use for one network that follows from a prior alone, such as the held-out baseline."""
        return self._per_prior(self.delta)

    @property
    def delta_each(self) -> float:
        """The delta to use for one network of its own, drawn or held out."""
        return self._per_certificate(self.delta)

    @classmethod
    def from_dict(cls, entry: LedgerEntry) -> "Ledger":
        """The ledger that `as_dict` wrote."""
        return cls(
            entry["pac_bayes"],
            entry["monte_carlo"],
            entry["reference"],
            entry["unlabelled"],
            entry["grid"],
            entry["certified"],
            share=entry.get("share", 1.0),
            undivided="share" in entry,
        )

    def as_dict(self) -> LedgerEntry:
        """The fields and delta, ready for JSON."""
        entry: LedgerEntry = {
            "delta": self.delta,
            "pac_bayes": self.pac_bayes,
            "monte_carlo": self.monte_carlo,
            "reference": self.reference,
            "unlabelled": self.unlabelled,
            "grid": self.grid,
            "certified": self.certified,
        }
        return {**entry, "share": self.share} if self.undivided else entry

    def __str__(self) -> str:
        names = {
            "PAC-Bayes": self.pac_bayes,
            "Monte Carlo": self.monte_carlo,
            "reference network": self.reference,
            "unlabelled inputs": self.unlabelled,
        }
        line = f"delta {self.delta:g} = " + " + ".join(f"{share:g} {name}" for name, share in names.items() if share)
        if self.share != 1.0:
            line += f", of which a declared plan gives this certificate {self.share:.4g}"
        grid = [f"a grid of {self.grid} priors"] * (self.grid > 1)
        choice = [f"a choice among {self.certified} certificates"] * (self.certified > 1)
        for divisor, names, reasons in (
            (self.grid, "each", grid) if self.undivided else (self.candidates, "each", [*grid, *choice]),
            (self.certified, "Monte Carlo, inputs and networks", choice if self.undivided else []),
        ):
            line += f", {names} divided by {divisor} for " + " and ".join(reasons) if reasons else ""
        return line
