"""Confidence bounds on the mean of random draws: how far the estimated Gibbs risk can be from the exact one.

Plain float64 functions, each rounded outward. Draw t is a fresh network from Q on a fresh minibatch, drawn with
replacement from the bound set, and its value X_t the error rate: i.i.d. in [0, 1], with the empirical Gibbs risk q as
their mean.

    >>> from pacprune.bounds import montecarlo
    >>> errors = [2, 0, 3, 1, 4] * 200  # of 25 examples each: mean 0.08
    >>> round(montecarlo.betting([e / 25 for e in errors], delta=0.01), 4)
    0.0888
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bounds.numeric import ROUND_UP, ROUNDING, check_count, check_delta, check_fraction, log_sum_exp, upper_end

BETTING_GRID = tuple(0.95 * 950.0 ** (j / 19 - 1.0) for j in range(20))
"""Bets f_j of `betting`: 20 geometric values from 0.001 to 0.95, fixed so that no run can choose them by its data."""

Values = Sequence[float] | NDArray[np.floating]
Frequencies = Sequence[int] | NDArray[np.integer]


def chernoff(risk: float, *, draws: int, delta: float) -> float:
    """Chernoff-Hoeffding bound on the mean of i.i.d. values in [0, 1]: kl_inverse(risk, log(1/delta)/draws).

    Let p be the mean of the values. By Hoeffding (1963, theorem 1), Pr[risk <= x] <= exp(-draws kl(x||p)) for x <= p.
    The bound fails only in this one tail, so that log(1/delta) is enough and the two-sided log(2/delta) is not needed.

    Args:
        risk: The sample mean.
        draws: How many values it is the mean of, fixed beforehand.
        delta: Probability with which the bound may fail.

    Returns:
        An upper bound on the mean.
    """
    risk, draws, delta = check_fraction("risk", risk), check_count("draws", draws), check_delta(delta)
    return bounds.kl_inverse(risk, -math.log(delta) / draws * ROUND_UP)


def betting(values: Values, *, delta: float, counts: Frequencies | None = None) -> float:
    """Betting bound on the mean q of values X_1, X_2, ... in [0, 1] with E[X_t | past] = q; 1 without values.

    The smallest mu with wealth(mu) >= 1/delta, where

        wealth(mu) = mean_j prod_t (1 + f_j (mu - X_t)/(1 - mu)),    f_j in BETTING_GRID.

    At mu = q every factor has conditional mean 1 and is at least 1 - f_j > 0. The wealth is therefore a nonnegative
    martingale that starts at 1, and by Ville's inequality it ever reaches 1/delta with probability at most delta. It
    increases in mu, so that q lies below the bound with probability 1 - delta at all times t at once. One may
    therefore stop drawing whenever the bound is good enough. (Waudby-Smith and Ramdas, "Estimating means of bounded
    random variables by betting", 2024.)

    The slack is at least about log(20/delta) / (number of values), even without variance: many draws on small
    minibatches are worth more than few on large ones.

    The product does not depend on the order of the draws, but only on how often each value occurred. The draws of
    several workers, none left out, therefore merge by adding counts, and the bound of a growing run costs the same
    after each chunk:

        levels = np.arange(batch + 1) / batch
        counts += np.bincount(errors_of_the_chunk, minlength=batch + 1)
        upper = betting(levels, counts=counts, delta=0.01)

    Args:
        values: The values X_t, or the distinct ones if there are `counts`.
        delta: Probability with which the bound may ever fail.
        counts: How often each of the values occurred; None for once each.

    Returns:
        An upper bound on the mean.
    """
    delta = check_delta(delta)
    x, times = _histogram(values, counts, least=0.0)
    draws = int(times.sum())
    if draws == 0:
        return 1.0
    log_wealth = _log_wealth(x, times)
    # At the sample mean no bet has gained (Jensen), which makes it a lower end.
    return upper_end(float((times * x).sum()) / draws, 1.0, lambda mu: log_wealth(mu) >= -math.log(delta))


def betting_p_value(values: Values, *, limit: float, counts: Frequencies | None = None) -> float:
    """p-value of "the mean is above the limit": min(1, 1/wealth(limit)), with the wealth of `betting`.

    It is at most delta where the bound of `betting` at delta is at most the limit.

    Args:
        values: The values X_t in [0, 1], or the distinct ones if there are `counts`.
        limit: The mean that the hypothesis exceeds, below 1.
        counts: How often each of the values occurred; None for once each.

    Returns:
        The p-value, rounded up.
    """
    x, times = _histogram(values, counts, least=0.0)
    if not times.sum() or limit <= float((times * x).sum()) / int(times.sum()):
        return 1.0
    return min(1.0, math.exp(-max(0.0, _log_wealth(x, times)(limit))))


def _log_wealth(x: NDArray[np.float64], times: NDArray[np.int64]) -> Callable[[float], float]:
    """The log of `betting`'s wealth as a function of mu, rounded down."""
    bets = np.array(BETTING_GRID)[:, None]
    # The margin covers the rounding of a log of at most 37 and of their sum, which numpy takes in pairs along a row.
    margin = math.log(len(bets)) + 2e-13 * (int(times.sum()) + 1)

    def log_wealth(mu: float) -> float:
        return log_sum_exp((times * np.log(1.0 + bets * ((mu - x) / (1.0 - mu)))).sum(axis=1)) - margin

    return log_wealth


def betting_lower(values: Values, *, delta: float, counts: Frequencies | None = None) -> float:
    """Betting bound from below on the mean of values in [0, 1]: 1 - betting(1 - values), rounded down.

    Args:
        values: The values, or the distinct ones if there are `counts`.
        delta: Probability with which the bound may ever fail.
        counts: How often each of the values occurred; None for once each.

    Returns:
        A lower bound on the mean.
    """
    x, times = _histogram(values, counts, least=0.0)
    return max(0.0, 1.0 - betting(1.0 - x, counts=times, delta=delta) - ROUNDING)


def betting_difference(differences: Values, *, delta: float, counts: Frequencies | None = None) -> float:
    """Betting bound on the mean of differences Y_t in [-1, 1]: 2 betting((1 + Y)/2) - 1.

    The way to a tighter bound on q from the same number of draws (a control variate):

        q <= (error rate of f on the whole bound set) + betting_difference(Y),
        Y_t = error rate of draw t - error rate of f, both on the minibatch of draw t.

    f is one network fixed before the draws, and its error rate on the bound set is exact. Where the draws mostly err
    on the examples on which f errs too, Y_t varies far less than the error rate of draw t. If draw and f differ in
    error on a share d of the examples, E examples in all give a slack of about sqrt(2 d log(20/delta) / E). This is so
    as long as a minibatch has at most d / slack of them; larger ones give a larger slack.

    Args:
        differences: The values Y_t, or the distinct ones if there are `counts`.
        delta: Probability with which the bound may ever fail.
        counts: How often each of the values occurred; None for once each.

    Returns:
        An upper bound on the mean difference.
    """
    y, times = _histogram(differences, counts, least=-1.0)
    return min(1.0, 2.0 * betting(0.5 + 0.5 * y, counts=times, delta=delta) - 1.0 + ROUNDING)


def _histogram(
    values: Values, counts: Frequencies | None, *, least: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The distinct values, checked to lie in [least, 1], and how often each occurred."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    bad = np.flatnonzero(~((x >= least) & (x <= 1.0)))
    if bad.size:
        raise ValueError(f"value {bad[0]} is {x[bad[0]]}, but every value must lie in [{least:g}, 1]: give fractions")
    if counts is None:
        return np.unique(x, return_counts=True)
    times = np.asarray(counts).reshape(-1)
    if times.shape != x.shape:
        raise ValueError(f"there are {times.size} counts for {x.size} values: give one count for each value")
    bad = np.flatnonzero(~((times >= 0) & (times % 1 == 0)))
    if bad.size:
        raise ValueError(f"count {bad[0]} is {times[bad[0]]}, but it must be a whole number of at least 0: count draws")
    return x, times.astype(np.int64)
