"""The wealth of a monitor, its alarm and its interval: against brute force, in batches, and at the ends."""

import math

import numpy as np
import pytest

from pacprune.bounds import montecarlo, sequential
from pacprune.bounds.montecarlo import BETTING_GRID
from pacprune.bounds.sequential import LEVELS, Watch, advance, interval, wealth_path


def losses(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(count) ** 3


def start_times(last: int, starts: int) -> list[tuple[int, float]]:
    """Start times up to `last`, with their weights."""
    times = []
    for k in range(1, last.bit_length() + 1):
        power, count = 2 ** (k - 1), min(starts, 2 ** (k - 1))
        times += [(power + q * power // count, 1 / (k * (k + 1) * count)) for q in range(count)]
    return [(time, weight) for time, weight in times if time <= last]


@pytest.mark.parametrize("starts", [1, 4])
def test_the_wealth_is_the_mixture_that_is_documented(starts: int) -> None:
    x, limit = losses(40), 0.3
    _, log_wealth = wealth_path(x, limit=limit, starts=starts)
    for t in range(1, 41):
        begun = start_times(t, starts)
        wealth = 1 - sum(weight for _, weight in begun)
        for time, weight in begun:
            bets = [np.prod(1 + f / limit * (x[time - 1 : t] - limit)) for f in BETTING_GRID]
            wealth += weight * np.mean(bets)
        assert log_wealth[t - 1] == pytest.approx(math.log(wealth), abs=1e-12)


def test_the_expected_wealth_is_one_at_the_limit() -> None:
    """Over all 2^10 sequences of errors with the limit as their risk."""
    limit, n = 0.3, 10
    sequences = np.arange(2**n)[:, None] >> np.arange(n) & 1
    chance = np.where(sequences == 1, limit, 1 - limit).prod(axis=1)
    wealth = np.exp([wealth_path(x.astype(float), limit=limit)[1][-1] for x in sequences])
    assert chance @ wealth == pytest.approx(1.0, abs=1e-12)


def test_batches_change_no_digit() -> None:
    x = losses(1000)
    whole = advance(Watch(0.2, 0.05), x)
    watch = Watch(0.2, 0.05)
    for part in (x[:1], x[1:2], x[2:130], x[130:131], x[131:]):
        watch = advance(watch, part)
    assert watch == whole
    assert watch.examples == 1000
    assert watch.point.mean == pytest.approx(x.mean())


def test_the_order_of_arrival_matters_to_the_alarm_and_not_to_the_interval() -> None:
    x = np.r_[np.zeros(300), np.ones(60)]
    late, early = advance(Watch(0.1, 0.05), x), advance(Watch(0.1, 0.05), x[::-1])
    assert late.alarm_at is not None
    assert early.alarm_at is not None
    assert early.alarm_at < 10 < 300 < late.alarm_at
    assert late.point[1:4] == early.point[1:4]


def test_an_alarm_stays_and_is_the_first_time_of_the_threshold() -> None:
    x = np.r_[np.ones(10), np.zeros(500)]
    watch = advance(Watch(0.1, 0.05), x)
    _, log_wealth = wealth_path(x, limit=0.1)
    assert watch.alarm_at == np.flatnonzero(log_wealth >= math.log(20))[0] + 1
    assert watch.log_wealth == pytest.approx(log_wealth[-1])
    assert watch.log_wealth < math.log(20)
    assert advance(watch, [0.0]).alarm_at == watch.alarm_at


def test_late_start_times_forget_quiet_times() -> None:
    x = np.r_[np.zeros(4095), np.ones(30)]
    first_start = np.cumsum(sequential.bet_steps(x, limit=0.1), axis=1)
    assert sequential.first_alarm(sequential.log_mean(first_start), alpha=0.05) is None
    alarm_at = advance(Watch(0.1, 0.05), x).alarm_at
    assert alarm_at is not None
    assert alarm_at <= 4095 + 10


def test_extreme_values_stay_finite() -> None:
    for limit in (1e-9, 1 - 1e-9):
        for value in (0.0, 1.0):
            watch = advance(Watch(limit, 1e-9), np.full(5000, value))
            assert math.isfinite(watch.log_wealth)
            assert (watch.alarm_at is not None) == (value == 1.0 and limit < 0.5)
            assert watch.point.lower <= value <= watch.point.upper


def test_the_state_hardly_grows() -> None:
    small, large = advance(Watch(0.1, 0.05), losses(2000)), advance(Watch(0.1, 0.05), losses(8000))
    assert len(large.course) - len(small.course) <= math.log(4) / math.log(sequential.PACE) + 2
    assert [point.examples for point in small.course[:5]] == [1, 2, 3, 4, 5]
    assert large.course[: len(small.course)] == small.course, "the same values, and 6,000 more"


def test_the_interval_of_errors_is_that_of_betting_on_both_sides() -> None:
    watch = advance(Watch(0.1, 0.05), [0, 0, 1, 0] * 50)
    assert watch.point.upper == montecarlo.betting([0.0, 1.0], counts=[150, 50], delta=0.025)
    assert watch.point.lower == montecarlo.betting_lower([0.0, 1.0], counts=[150, 50], delta=0.025)
    assert Watch(0.1, 0.05).point == (0, 0.0, 0.0, 1.0, 0.0)


def test_the_interval_of_losses_is_rounded_outward() -> None:
    x = losses(500)
    lower, upper = advance(Watch(0.1, 0.05), x).point[2:4]
    exact = montecarlo.betting_lower(x, delta=0.025), montecarlo.betting(x, delta=0.025)
    assert exact[0] - 2 / LEVELS < lower < exact[0]
    assert exact[1] < upper < exact[1] + 2 / LEVELS
    assert interval([0] * (LEVELS + 1), [0] * (LEVELS + 1), alpha=0.05) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "there are 0 values, but a batch has at least 1"),
        ([0.5, 1.5], r"value 2 of the batch is 1.5, but every value must lie in \[0, 1\]"),
        ([-0.1], "value 1 of the batch is -0.1"),
        ([0.0, math.nan], "value 2 of the batch is nan"),
    ],
)
def test_bad_values_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advance(Watch(0.1, 0.05), values)


@pytest.mark.parametrize("limit", [0.0, 1.0, -0.1, 2, math.nan])
def test_limits_that_no_risk_can_respect_or_exceed_are_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=r"the limit is .*, but it must lie strictly between 0 and 1"):
        Watch(limit, 0.05)


def test_an_alpha_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha is 1.0, but it must lie strictly between 0 and 1"):
        Watch(0.1, 1.0)


def test_what_is_known_is_printed_in_one_line() -> None:
    watch = advance(Watch(0.2, 0.05), np.zeros(1500))
    assert repr(watch) == "Watch(limit 0.2, alpha 0.05, 1,500 examples, alarm_at None)"
