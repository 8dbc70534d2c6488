"""Bounds on a mean difference, and p-values: against scipy, against one another, and by enumeration."""

import math

import numpy as np
import pytest
from scipy import stats

from pacprune import bounds
from pacprune.bounds import held_out, montecarlo


@pytest.mark.parametrize(("errors", "n", "limit"), [(0, 1, 0.5), (3, 100, 0.1), (0, 50, 0.02), (970, 10_000, 0.1)])
def test_the_p_value_of_errors_is_the_binomial_tail(errors, n, limit):
    assert held_out.binomial_p_value(errors, n=n, limit=limit) == pytest.approx(stats.binom.cdf(errors, n, limit))
    assert held_out.binomial_p_value(n, n=n, limit=limit) == 1.0


@pytest.mark.parametrize("counts", [(0, 0), (5, 0), (0, 3), (20, 3), (3, 20), (275, 225), (1000, 0), (0, 1000)])
@pytest.mark.parametrize("limit", [-0.3, -0.01, 0.0, 0.005, 0.05, 0.5])
def test_a_p_value_is_the_delta_at_which_the_bound_is_the_limit(counts, limit):
    plus, minus = counts
    p_value = held_out.difference_p_value(plus, minus, n=1000, limit=limit)
    if p_value == 1.0:
        assert held_out.difference(plus, minus, n=1000, delta=0.999) > limit - 0.002
    elif p_value > 1e-14:  # differences of two numbers near 1 lose the digits below that
        assert held_out.difference(plus, minus, n=1000, delta=p_value) == pytest.approx(limit, abs=1e-9)
        assert held_out.difference(plus, minus, n=1000, delta=p_value / 1.01) > limit


def test_the_bound_on_a_difference_is_that_of_its_two_sides():
    upper = stats.beta.ppf(1 - 0.025, 8, 93)
    lower = stats.beta.ppf(0.025, 4, 97)
    assert held_out.difference(7, 4, n=100, delta=0.05) == pytest.approx(upper - lower)
    assert held_out.difference(1, 0, n=1, delta=0.05) == 1.0
    assert held_out.difference(0, 1, n=1, delta=0.05) == pytest.approx(0.95)


@pytest.mark.parametrize(("plus", "minus"), [(0.3, 0.0), (0.3, 0.2), (0.05, 0.05), (0.0, 0.4), (0.6, 0.4)])
def test_no_difference_fails_more_often_than_delta_allows(plus, minus):
    """All outcomes of 12 examples."""
    n, delta = 12, 0.2
    failure = 0.0
    for a in range(n + 1):
        for b in range(n - a + 1):
            if held_out.difference(a, b, n=n, delta=delta) < plus - minus:
                failure += stats.multinomial.pmf([a, b, n - a - b], n, [plus, minus, 1 - plus - minus])
    assert failure <= delta


def test_two_sides_are_tighter_than_betting_at_five_percent_disagreement():
    """The numbers that decided which rule a drop is certified by."""
    slack = held_out.difference(275, 225, n=10_000, delta=0.05) - 0.005
    by_betting = montecarlo.betting_difference([-1, 0, 1], counts=[225, 9500, 275], delta=0.05) - 0.005
    apart = (
        bounds.clopper_pearson(1025, n=10_000, delta=0.025) + bounds.clopper_pearson(9025, n=10_000, delta=0.025) - 1
    )
    assert (round(slack, 4), round(by_betting, 4)) == (0.0062, 0.0072)
    assert apart - 0.005 > 0.01


@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6])
def test_the_p_value_of_betting_is_the_delta_of_its_bound(delta):
    losses = np.random.default_rng(0).random(300) ** 3
    bound = montecarlo.betting(losses, delta=delta)
    assert montecarlo.betting_p_value(losses, limit=bound) == pytest.approx(delta, rel=1e-6)
    assert montecarlo.betting_p_value(losses, limit=bound * 1.01) < delta
    assert montecarlo.betting_p_value(losses, limit=float(losses.mean())) == 1.0
    assert montecarlo.betting_p_value([], limit=0.5) == 1.0


def test_a_p_value_is_rounded_up():
    for n in (10**3, 10**6):
        k = n // 20
        exact = stats.binom.cdf(k, n, 0.0505 if n > 1000 else 0.06)
        assert exact <= held_out.binomial_p_value(k, n=n, limit=0.0505 if n > 1000 else 0.06) <= exact * (1 + 1e-6)
        assert math.isfinite(exact)
