"""The ways of watching that reproduce monitor-delay compares: each as it is defined, and its false alarms."""

import math

import numpy as np
from scipy import stats

from pacprune.bounds import sequential
from pacprune.paper import monitor_delay
from pacprune.paper.monitor_delay import ALPHA, LIMIT

LATE = np.r_[np.zeros(5000), np.random.default_rng(0).random(20_000) < 0.2].astype(float)


def test_the_monitor_is_that_of_the_library() -> None:
    watch = sequential.advance(sequential.Watch(LIMIT, ALPHA), LATE[:7000])
    assert monitor_delay._mixture(sequential.STARTS)(LATE) == watch.alarm_at
    assert watch.alarm_at is not None


def test_a_window_alarms_when_its_exact_p_value_is_below_its_share() -> None:
    for number in (1, 2, 7):
        share, errors = ALPHA / (number * (number + 1)), monitor_delay._least_errors(1000, number)
        assert stats.binom.sf(errors - 1, 1000, LIMIT) <= share < stats.binom.sf(errors - 2, 1000, LIMIT)
    assert monitor_delay._windows(1000)(LATE) == 6000


def test_cusum_is_the_largest_log_ratio_of_all_changes() -> None:
    errors = LATE[4990:5040]
    steps = np.where(errors > 0, math.log(0.12 / 0.10), math.log(0.88 / 0.90))
    expected = [max(0.0, *(steps[start : end + 1].sum() for start in range(end + 1))) for end in range(50)]
    assert np.allclose(monitor_delay._cusum_path(errors), expected)


def test_hoeffdings_mixture_stays_below_its_exact_value() -> None:
    """The alarm comes no earlier than that of 2 sqrt(rho/(v + rho)) exp(z²/2) Phi(z) itself."""
    v, rho = np.arange(1, LATE.size + 1) / 4, 10_000 / 32
    z = np.cumsum(LATE - LIMIT) / np.sqrt(v + rho)
    wealth = math.log(2) + 0.5 * np.log(rho / (v + rho)) + z**2 / 2 + stats.norm.logcdf(z)
    exact = int(np.flatnonzero(wealth >= math.log(1 / ALPHA))[0]) + 1
    alarm_at = monitor_delay._hoeffding(LATE)
    assert alarm_at is not None
    assert exact <= alarm_at <= exact + 5


def test_a_row_keeps_false_alarms_and_misses_out_of_the_delays() -> None:
    row = monitor_delay._row("monitor", 0.01, 100, np.array([50.0, 150.0, 160.0, 170.0, math.inf]))
    assert (row["false_alarms"], row["missed"], row["trials"]) == (1, 1, 5)
    assert (row["delay_median"], row["delay_90_percent"]) == (70.0, None)
