"""Bounds and p-values for one fixed network, from what was counted on n examples; plain float64, rounded outward.

A difference is that of two errors on one example: 1 where only the first network is wrong, -1 where only the second is.
"""

import math
from collections.abc import Callable

from pacprune.bounds.numeric import ROUNDING, check_part, upper_end
from pacprune.bounds.risk import clopper_pearson, log_binomial_tail


def difference(plus: int, minus: int, *, n: int, delta: float) -> float:
    """Upper bound on the mean of differences in {-1, 0, 1}: Clopper-Pearson from above for 1, from below for -1.

    The mean is Pr[1] - Pr[-1]. Each of the two bounds fails with probability at most delta/2.

    Args:
        plus: How often the difference was 1.
        minus: How often it was -1.
        n: Number of examples.
        delta: Probability with which the bound may fail.

    Returns:
        An upper bound on the mean, in [-1, 1].
    """
    upper = clopper_pearson(plus, n=n, delta=delta / 2.0)
    lower = 1.0 - clopper_pearson(n - minus, n=n, delta=delta / 2.0)
    return min(1.0, upper - lower + ROUNDING)


def binomial_p_value(errors: int, *, n: int, limit: float) -> float:
    """p-value of "the error rate is above the limit": Pr[Binomial(n, limit) <= errors]; 1 where errors/n >= limit.

    Args:
        errors: Number of wrong answers.
        n: Number of examples.
        limit: The error rate that the hypothesis exceeds, below 1.

    Returns:
        The p-value, rounded up.
    """
    errors, n = check_part("errors", errors, "n", n)
    return 1.0 if limit <= errors / n else _tail(errors, n)(limit)


def difference_p_value(plus: int, minus: int, *, n: int, limit: float) -> float:
    """p-value of "the mean difference is above the limit": the smallest delta at which `difference` is at most it.

    For every u, 2 max(Pr[Binomial(n, u) <= plus], Pr[Binomial(n, u - limit) >= minus]) is such a delta; it is least
    where the two probabilities are equal, since the first falls in u and the second rises.

    Args:
        plus: How often the difference was 1.
        minus: How often it was -1.
        n: Number of examples.
        limit: The mean that the hypothesis exceeds, above -1 and below 1.

    Returns:
        The p-value, rounded up.
    """
    (plus, n), (minus, _) = check_part("plus", plus, "n", n), check_part("minus", minus, "n", n)
    if limit <= (plus - minus) / n:
        return 1.0
    few_plus, many_minus = _tail(plus, n), _tail(n - minus, n)
    if not minus:  # its bound from below is 0 at every delta
        return min(1.0, 2.0 * few_plus(limit))

    def tails(u: float) -> tuple[float, float]:
        return few_plus(u), many_minus(1.0 - max(u - limit, 0.0))

    u = upper_end(plus / n, min(1.0, minus / n + limit), lambda u: tails(u)[0] <= tails(u)[1])
    return min(1.0, 2.0 * max(tails(u)))


def _tail(errors: int, n: int) -> Callable[[float], float]:
    """Pr[Binomial(n, p) <= errors], rounded up, as a function of p from errors/n - 10/sqrt(n) on."""
    log_tail = log_binomial_tail(errors, n)

    def tail(p: float) -> float:
        if errors >= n or p <= 0.0:
            return 1.0
        return 0.0 if p >= 1.0 else min(1.0, math.exp(log_tail(p)))

    return tail
