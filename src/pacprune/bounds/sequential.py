"""Watching a risk while examples arrive: an alarm, and an interval, that hold at all times at once.

Values X_1, X_2, ... in [0, 1] arrive one by one: errors, bounded losses, disagreements; a difference D in [-1, 1] comes
as (1 + D)/2. The hypothesis is "given all that came before, the mean of the next value is at most r". A gambler bets
against it, and the wealth

    M_t = sum_k w_k mean_j prod_{s = start_k..t} (1 + l_j (X_s - r)),    l_j = f_j / r,  f_j in BETTING_GRID,

mixes start times start_k = 1, 2, 4, ... with the weights w_k = 1/(k (k + 1)), which add up to 1. A start time that is
still to come counts as wealth 1. Under the hypothesis every factor has a conditional mean of at most 1 and is at least
1 - f_j > 0, so that M_t is a nonnegative supermartingale that begins at 1. By Ville's inequality it ever reaches
1/alpha with probability at most alpha. While all is quiet a wealth decays; a late start time has lost less than the
first, and costs log(k (k + 1)) nats at most.

    >>> from pacprune.bounds import sequential
    >>> watch = sequential.advance(sequential.Watch(limit=0.1, alpha=0.05), [0, 0, 1, 0] * 100)
    >>> watch.alarm_at
    55
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pacprune.bounds.montecarlo import BETTING_GRID, betting, betting_lower
from pacprune.bounds.numeric import check_delta

LEVELS = 1000
"""The interval rounds values outward to multiples of 1/LEVELS, so that counts are enough; 0, 0.5 and 1 stay."""
STARTS = 1
"""Start times from one power of 2 to the next, a power of 2 itself; they share the weight 1/(k (k + 1))."""
PACE = 1.1
"""Points of a course are kept at times that grow by this factor, whatever the sizes of the batches."""

Floats = NDArray[np.float64]


class Point(NamedTuple):
    """What was known after so many examples: their mean, the interval around the risk, and log M_t."""

    examples: int
    mean: float
    lower: float
    upper: float
    log_wealth: float


@dataclass(frozen=True)
class Watch:
    """All that is known of the values so far, in a size that hardly grows: course has log(examples)/log(PACE) points.

    Args:
        limit: r, the mean that the values should not exceed.
        alpha: Probability with which there is ever a false alarm, and with which the interval ever misses.
        examples: How many values have arrived.
        alarm_at: The first time at which M_t reached 1/alpha; None before.
        total: Sum of the values.
        log_wealths: For every bet, the log of its wealth, summed over the start times so far with their weights.
        floors: How many values, rounded down, have each level; from 0 to LEVELS.
        ceilings: The same for values that are rounded up.
        course: What was known earlier, for a figure.
    """

    limit: float
    alpha: float
    examples: int = 0
    alarm_at: int | None = None
    total: float = 0.0
    log_wealths: tuple[float, ...] = (-math.inf,) * len(BETTING_GRID)
    floors: tuple[int, ...] = (0,) * (LEVELS + 1)
    ceilings: tuple[int, ...] = (0,) * (LEVELS + 1)
    course: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        check_limit(self.limit)
        check_delta(self.alpha, name="alpha")

    def __repr__(self) -> str:
        return (
            f"Watch(limit {self.limit:g}, alpha {self.alpha:g}, {self.examples:,} examples, alarm_at {self.alarm_at})"
        )

    @property
    def log_wealth(self) -> float:
        """log M_t."""
        return float(_mixed(np.array(self.log_wealths)[:, None], self.examples)[0]) if self.examples else 0.0

    @property
    def point(self) -> Point:
        """What is known now."""
        lower, upper = interval(self.floors, self.ceilings, alpha=self.alpha)
        return Point(self.examples, self.total / max(self.examples, 1), lower, upper, self.log_wealth)


def check_limit(limit: float) -> float:
    """A limit that values in [0, 1] can respect and can exceed."""
    if not 0.0 < limit < 1.0:
        raise ValueError(
            f"the limit is {limit}, but it must lie strictly between 0 and 1: no mean of values in [0, 1] is above 1, "
            "and one value above 0 refutes 0"
        )
    return float(limit)


def check_values(values: ArrayLike) -> Floats:
    """At least one value, each in [0, 1]."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if not x.size:
        raise ValueError("there are 0 values, but a batch has at least 1: wait until examples have arrived")
    bad = np.flatnonzero(~((x >= 0.0) & (x <= 1.0)))
    if bad.size:
        raise ValueError(
            f"value {bad[0] + 1} of the batch is {x[bad[0]]}, but every value must lie in [0, 1]: give errors as 0 or "
            "1, losses as fractions, and a difference D as (1 + D)/2"
        )
    return x


def advance(watch: Watch, values: ArrayLike) -> Watch:
    """The watch after these values, in their order; the same however they are cut into batches.

    Args:
        watch: What is known before.
        values: X_t in [0, 1], in the order of arrival.

    Returns:
        What is known after them.
    """
    x = check_values(values)
    while x.size:
        milestone = math.ceil(PACE * watch.course[-1].examples) if watch.course else 1
        watch, x = _advance(watch, x[: milestone - watch.examples]), x[milestone - watch.examples :]
        if watch.examples == milestone:
            watch = replace(watch, course=(*watch.course, watch.point))
    return watch


def _advance(watch: Watch, x: Floats) -> Watch:
    """The watch after some values, between two points of its course."""
    paths, log_wealth = wealth_path(x, limit=watch.limit, examples=watch.examples, log_wealths=watch.log_wealths)
    alarm_at = watch.alarm_at
    if alarm_at is None:
        alarm_at = first_alarm(log_wealth, alpha=watch.alpha, examples=watch.examples)
    return replace(
        watch,
        examples=watch.examples + x.size,
        alarm_at=alarm_at,
        total=float(np.cumsum(np.append(watch.total, x))[-1]),
        log_wealths=tuple(paths[:, -1].tolist()),
        floors=_counted(watch.floors, np.floor(x * LEVELS)),
        ceilings=_counted(watch.ceilings, np.ceil(x * LEVELS)),
    )


def wealth_path(
    values: Floats,
    *,
    limit: float,
    examples: int = 0,
    log_wealths: Sequence[float] = Watch.log_wealths,
    starts: int = STARTS,
) -> tuple[Floats, Floats]:
    """The log wealth of every bet after each value, (bets, values), and log M_t after each value.

    Args:
        values: X_t in [0, 1].
        limit: r.
        examples: How many values came before.
        log_wealths: The log wealth of every bet after those.
        starts: How many start times there are from one power of 2 to the next.

    Returns:
        The log wealths by bet, and that of their mixture with the start times that are still to come.
    """
    steps = bet_steps(values, limit=limit)
    paths, current, place = np.empty_like(steps), np.array(log_wealths), 0
    while place < values.size:
        time = examples + place + 1
        gap, weight = _start_times(time, starts)
        if time % gap == 0:
            current = np.logaddexp(current, math.log(weight))
        end = min(values.size, place + gap - time % gap)
        # cumsum adds from left to right, so that cutting a batch in two changes no digit.
        paths[:, place:end] = np.cumsum(np.column_stack([current, steps[:, place:end]]), axis=1)[:, 1:]
        current, place = paths[:, end - 1], end
    return paths, _mixed(paths, examples + 1 + np.arange(values.size), starts)


def _start_times(time: int, starts: int) -> tuple[int, float]:
    """The distance from one start time to the next around this time, all multiples of it, and the weight of each."""
    number = time.bit_length()
    count = min(starts, 1 << (number - 1))
    return (1 << (number - 1)) // count, 1.0 / (number * (number + 1) * count)


def first_alarm(log_wealth: Floats, *, alpha: float, examples: int = 0) -> int | None:
    """The first time at which a wealth reaches 1/alpha, where its log is known from time examples + 1 on; or None."""
    times = examples + 1 + np.arange(log_wealth.size)
    # The margin covers the rounding of so many logs and of their sum.
    alarms = np.flatnonzero(log_wealth >= -math.log(alpha) + 2e-13 * (times + 1))
    return int(times[alarms[0]]) if alarms.size else None


def bet_steps(values: Floats, *, limit: float) -> Floats:
    """log(1 + f_j (X_t - r)/r), (bets, values)."""
    return np.log(1.0 + np.array(BETTING_GRID)[:, None] * ((values - limit) / limit))


def _mixed(log_wealths: Floats, examples: int | NDArray[np.int64], starts: int = STARTS) -> Floats:
    """log M_t: the mean over bets, and the weights of all start times that are still to come."""
    power, number = np.frexp(examples)  # 2 power - 1 is how far examples has come from one power of 2 to the next
    count = np.minimum(starts, 2.0 ** (number - 1))
    begun = np.floor((2.0 * power - 1.0) * count) + 1.0
    to_come = 1.0 / (number + 1.0) + (1.0 - begun / count) / (number * (number + 1.0))
    return np.logaddexp(log_mean(log_wealths), np.log(to_come))


def log_mean(logs: Floats) -> Floats:
    """log(mean(exp(logs))) over the first axis, without overflow; -inf where all are so."""
    top = np.maximum(logs.max(axis=0), -1e300)
    with np.errstate(divide="ignore"):
        return top + np.log(np.exp(logs - top).mean(axis=0))


def _counted(counts: tuple[int, ...], levels: Floats) -> tuple[int, ...]:
    return tuple((np.array(counts) + np.bincount(levels.astype(np.int64), minlength=LEVELS + 1)).tolist())


def interval(floors: Sequence[int], ceilings: Sequence[int], *, alpha: float) -> tuple[float, float]:
    """A confidence sequence: where a constant mean lies at all times at once, with probability 1 - alpha.

    Each side is a betting bound at alpha/2 (montecarlo.betting): the r at which a gambler who began with the first
    value has not reached 2/alpha. The sides round values outward, which keeps them valid.

    Args:
        floors: How many values, rounded down, have each level.
        ceilings: The same for values that are rounded up.
        alpha: Probability with which the interval may ever miss.

    Returns:
        Its lower and its upper end.
    """
    ends = []
    for bound, counts in ((betting_lower, floors), (betting, ceilings)):
        times = np.array(counts)
        levels = np.flatnonzero(times)
        ends.append(bound(levels / LEVELS, counts=times[levels], delta=alpha / 2.0))
    return ends[0], ends[1]
