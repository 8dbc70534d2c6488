"""Bounds on the mean of draws: ends, counts, refusals, 50-digit arithmetic, simulated coverage, and slack."""

import doctest
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from pacprune.bounds import montecarlo

# With a failure rate of delta, more failures than this happen once in 1000 runs.
ONCE_IN = 0.001


def test_the_betting_grid_is_geometric():
    assert np.allclose(montecarlo.BETTING_GRID, np.geomspace(0.001, 0.95, 20), rtol=1e-14, atol=0.0)


def test_betting_at_its_ends():
    assert montecarlo.betting([], delta=0.05) == 1.0
    assert montecarlo.betting([1.0], delta=0.05) == 1.0
    assert montecarlo.betting(np.ones(1000), delta=0.05) == 1.0
    assert 0.98 < montecarlo.betting([0.0], delta=0.05) < 1.0
    assert montecarlo.betting(np.zeros(10_000), delta=0.01) < 8.5 / 10_000


def test_lower_and_difference_at_their_ends():
    assert montecarlo.betting_lower([], delta=0.05) == 0.0
    assert montecarlo.betting_lower(np.zeros(1000), delta=0.05) == 0.0
    assert 1.0 - 8.5 / 10_000 < montecarlo.betting_lower(np.ones(10_000), delta=0.01) < 1.0
    assert montecarlo.betting_difference([], delta=0.05) == 1.0
    assert montecarlo.betting_difference([1.0], delta=0.05) == 1.0
    assert -1.0 < montecarlo.betting_difference(-np.ones(10_000), delta=0.01) < -1.0 + 17 / 10_000
    # Without variance the slack is that of the number of draws alone.
    least = math.log(20 / 0.01) / 1000
    assert least < montecarlo.betting_difference(np.zeros(1000), delta=0.01) < 1.1 * least


def test_the_bounds_enclose_the_sample_mean():
    values = np.random.default_rng(0).binomial(25, 0.1, 500) / 25
    mean = float(values.mean())
    assert montecarlo.betting_lower(values, delta=0.05) < mean < montecarlo.betting(values, delta=0.05)
    differences = values - values[::-1] / 2
    assert differences.mean() < montecarlo.betting_difference(differences, delta=0.05) <= 1.0


@pytest.mark.parametrize("bound", [montecarlo.betting, montecarlo.betting_lower, montecarlo.betting_difference])
def test_counts_in_chunks_give_the_bound_of_all_values_in_any_order(bound):
    batch, rng = 25, np.random.default_rng(1)
    errors = rng.binomial(batch, 0.1, 3000)
    levels, counts = np.arange(batch + 1) / batch, np.zeros(batch + 1, dtype=np.int64)
    for chunk in np.split(errors, 6):
        counts += np.bincount(chunk, minlength=batch + 1)
    whole = bound(errors / batch, delta=0.01)
    assert bound(levels, counts=counts, delta=0.01) == whole
    assert bound(rng.permutation(errors) / batch, delta=0.01) == whole
    assert bound(levels.tolist(), counts=counts.tolist(), delta=0.01) == whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: montecarlo.chernoff(math.nan, draws=10, delta=0.05), "risk is nan"),
        (lambda: montecarlo.chernoff(0.1, draws=0, delta=0.05), "draws is 0"),
        (lambda: montecarlo.betting([0.1, 1.2], delta=0.05), "value 1 is 1.2"),
        (lambda: montecarlo.betting([math.nan], delta=0.05), "value 0 is nan"),
        (
            lambda: montecarlo.betting_lower([-0.1], delta=0.05),
            r"value 0 is -0.1, but every value must lie in \[0, 1\]",
        ),
        (lambda: montecarlo.betting_lower([0.1], delta=1.0), "delta is 1.0"),
        (lambda: montecarlo.betting_difference([-1.1], delta=0.05), r"must lie in \[-1, 1\]"),
        (lambda: montecarlo.betting_difference([-0.1], delta=0.0), "delta is 0.0"),
        (lambda: montecarlo.betting([0.1, 0.2], counts=[1], delta=0.05), "1 counts for 2 values"),
        (lambda: montecarlo.betting([0.1, 0.2], counts=[1, -1], delta=0.05), "count 1 is -1"),
        (lambda: montecarlo.betting([0.1], counts=[0.5], delta=0.05), "count 0 is 0.5"),
    ],
)
def test_refusals_name_the_argument_and_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_betting_against_its_definition_in_50_digits():
    values = np.random.default_rng(2).binomial(25, 0.1, 40) / 25

    def wealth(mu: mpmath.mpf) -> mpmath.mpf:
        wealths = [mpmath.fprod(1 + f * (mu - x) / (1 - mu) for x in values.tolist()) for f in montecarlo.BETTING_GRID]
        return mpmath.fsum(wealths) / len(wealths)

    with mpmath.workdps(50):
        for delta in (0.5, 0.01, 1e-100):
            mu = mpmath.mpf(montecarlo.betting(values, delta=delta))
            assert wealth(mu) >= 1 / mpmath.mpf(delta)
            assert wealth(mu - 1e-12) < 1 / mpmath.mpf(delta)


def test_betting_beats_chernoff_on_minibatch_draws():
    values = np.random.default_rng(3).binomial(25, 0.1, 10_000) / 25
    mean = float(values.mean())
    assert montecarlo.betting(values, delta=0.01) < mean + 0.003
    assert montecarlo.chernoff(mean, draws=10_000, delta=0.01) > mean + 0.008


@pytest.mark.parametrize("kind", ["bernoulli", "rare", "beta", "minibatch"])
def test_bounds_on_the_mean_cover_it(kind):
    trials, draws, delta = 600, 40, 0.1
    rng = np.random.default_rng(4)
    size = (trials, draws)
    mean, values = {
        "bernoulli": (0.3, rng.binomial(1, 0.3, size)),
        "rare": (0.05, rng.binomial(1, 0.05, size)),
        "beta": (0.2, rng.beta(0.5, 2.0, size)),
        "minibatch": (0.1, rng.binomial(10, 0.1, size) / 10),
    }[kind]
    allowed = stats.binom.isf(ONCE_IN, trials, delta)
    assert sum(montecarlo.betting(row, delta=delta) < mean for row in values) <= allowed
    assert sum(montecarlo.betting_lower(row, delta=delta) > mean for row in values) <= allowed
    assert sum(montecarlo.chernoff(row.mean(), draws=draws, delta=delta) < mean for row in values) <= allowed


def test_betting_covers_under_optional_stopping():
    # The draws stop at the first time the bound is below the true mean: the worst stopping rule there is.
    trials, draws, delta, mean = 300, 40, 0.1, 0.5
    values = np.random.default_rng(5).binomial(1, mean, (trials, draws))
    times = range(8, draws + 1, 8)
    failures = sum(any(montecarlo.betting(row[:t], delta=delta) < mean for t in times) for row in values)
    assert failures <= stats.binom.isf(ONCE_IN, trials, delta)


def draws_on_minibatches(
    wrong_probability: np.ndarray, *, draws: int, batch: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Error counts of each draw and of the fixed network (wrong where a draw is more likely wrong) on its minibatch."""
    index = rng.integers(0, len(wrong_probability), (draws, batch))
    p = wrong_probability[index]
    return (rng.random(index.shape) < p).sum(axis=1), (p > 0.5).sum(axis=1)


def test_the_control_variate_covers_the_empirical_risk():
    trials, draws, batch, delta = 600, 60, 5, 0.1
    rng = np.random.default_rng(6)
    p = rng.beta(0.05, 0.4, 500)
    exact, failures = float((p > 0.5).mean()), 0
    for _ in range(trials):
        errors, reference_errors = draws_on_minibatches(p, draws=draws, batch=batch, rng=rng)
        failures += exact + montecarlo.betting_difference((errors - reference_errors) / batch, delta=delta) < p.mean()
    assert failures <= stats.binom.isf(ONCE_IN, trials, delta)


def test_the_control_variate_has_a_slack_below_a_thousandth_after_20_passes():
    n, passes, batch = 30_000, 20, 25
    rng = np.random.default_rng(7)
    p = rng.beta(0.11 * 0.2, 0.89 * 0.2, n)  # risk .11; draw and fixed network differ in error on 2.4 %
    errors, reference_errors = draws_on_minibatches(p, draws=n * passes // batch, batch=batch, rng=rng)
    assert p.mean() == pytest.approx(0.11, abs=0.005)
    upper = float((p > 0.5).mean()) + montecarlo.betting_difference((errors - reference_errors) / batch, delta=0.01)
    assert p.mean() < upper < p.mean() + 0.001
    assert montecarlo.betting(errors / batch, delta=0.01) - errors.mean() / batch > 0.0013


def test_draws_are_counted_by_their_value_so_that_many_cost_no_more_than_few():
    values = np.random.default_rng(0).binomial(25, 0.1, 24_000) / 25
    levels, times = montecarlo._histogram(values, None, least=0.0)
    assert len(levels) <= 26
    assert times.sum() == 24_000
    assert montecarlo.betting(values, delta=0.01) == montecarlo.betting(levels, counts=times, delta=0.01)


def test_docstring_examples_run():
    result = doctest.testmod(montecarlo)
    assert result.attempted >= 3
    assert result.failed == 0
