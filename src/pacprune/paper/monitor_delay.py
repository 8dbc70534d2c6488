"""`pacprune reproduce monitor-delay`: how many examples a monitor needs to notice that a risk exceeds its limit.

Errors arrive at a risk below the limit, and from some time on at one above it. All ways of watching see the same
errors, and all but the CUSUM promise that they ever raise a false alarm with probability at most ALPHA.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bounds import sequential
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import RED, SKY, Style, dash_of, in_percent, moved_aside
from pacprune.paper.statistics import groups
from pacprune.runs.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, title
from pacprune.types import Table

LIMIT, BEFORE, ALPHA = 0.10, 0.09, 0.05
SHIFTS = (0.01, 0.02, 0.05)
"""How far the risk lies above the limit after the change."""
CHANGES = (0, 1_000, 10_000)
"""How many examples arrive before the change."""
BLOCK = 4096
"""Examples that are looked at before a simulation asks whether it can stop."""
CALIBRATED = 20_000
"""Examples for which the CUSUM's threshold is calibrated."""

Floats = NDArray[np.float64]
Detector = Callable[[Floats], int | None]
"""From errors to the time of the alarm."""


@dataclass(frozen=True)
class Sizes:
    """For how many examples after the change an alarm is waited for, and the simulations behind CUSUM's threshold."""

    horizon: int
    calibrations: int


SETTINGS: dict[str, tuple[Setting[Sizes], ...]] = {
    "smoke": (Setting(seeds=3, options=Sizes(2_000, 100)),),
    "reduced": (Setting(seeds=100, options=Sizes(50_000, 2_000)),),
    "full": (Setting(seeds=1_000, options=Sizes(100_000, 10_000)),),
}
CAPTION = (
    "Median number of examples from the change to the alarm, over how far the risk lies above the limit of 0.10 after "
    "it; the risk before is 0.09. A median beyond the last example that was simulated is left out."
)
METHODS = {
    "monitor": Style("monitor (start times 1, 2, 4, ...)", ORANGE, "o"),
    "16 starts": Style("16 start times per power of 2", RED, "X"),
    "single start": Style("one start time", BLUE, "s"),
    "windows of 1,000": Style("Clopper-Pearson, windows of 1,000", GREEN, "^"),
    "windows of 5,000": Style("Clopper-Pearson, windows of 5,000", PURPLE, "v"),
    "Hoeffding": Style("Hoeffding, normal mixture", SKY, "D"),
    "CUSUM": Style(f"CUSUM (holds for {CALIBRATED:,} examples)", GREY, "P"),
}


def figures(setting: Setting[Sizes], job: Job) -> Iterator[Figure]:
    """The one figure."""
    yield Figure("monitor-delay", CAPTION, lambda: rows(setting, job), paint, numbers)


# --- The ways of watching.


def _mixture(starts: int) -> Detector:
    """The wealth of a monitor with so many start times from one power of 2 to the next."""

    def alarm_at(errors: Floats) -> int | None:
        state: dict[str, Any] = {}
        for place in range(0, errors.size, BLOCK):
            values = errors[place : place + BLOCK]
            paths, total = sequential.wealth_path(values, limit=LIMIT, examples=place, starts=starts, **state)
            if alarm := sequential.first_alarm(total, alpha=ALPHA, examples=place):
                return alarm
            state = {"log_wealths": paths[:, -1].tolist()}
        return None

    return alarm_at


def _single_start(errors: Floats) -> int | None:
    """The wealth of the first start time alone, with all of the weight."""
    current: Any = 0.0
    for place in range(0, errors.size, BLOCK):
        logs = np.cumsum(sequential.bet_steps(errors[place : place + BLOCK], limit=LIMIT), axis=1) + current
        if alarm := sequential.first_alarm(sequential.log_mean(logs), alpha=ALPHA, examples=place):
            return alarm
        current = logs[:, -1:]
    return None


@functools.cache
def _least_errors(window: int, number: int) -> int:
    """The least errors in the window of this number whose lower Clopper-Pearson bound at its share exceeds LIMIT."""
    share = ALPHA / (number * (number + 1))
    errors = math.ceil(LIMIT * window)
    while bounds.clopper_pearson(window - errors, n=window, delta=share) >= 1 - LIMIT:
        errors += 1
    return errors


def _windows(window: int) -> Detector:
    """Clopper-Pearson in one window after another; the k-th takes the share 1/(k (k + 1)) of ALPHA."""

    def alarm_at(errors: Floats) -> int | None:
        counts = errors[: errors.size // window * window].reshape(-1, window).sum(axis=1)
        for number, count in enumerate(counts, start=1):
            if count >= _least_errors(window, number):
                return number * window
        return None

    return alarm_at


def _hoeffding(errors: Floats) -> int | None:
    """The normal mixture for values in [0, 1], one-sided, and tightest near 10,000 examples.

    With S = sum_t (X_t - r) and v = t/4, exp(l S - l² v / 2) is a supermartingale for every l > 0 (Hoeffding's lemma).
    Mixed over l = |N(0, 1/rho)| it is 2 sqrt(rho/(v + rho)) exp(z²/2) Phi(z) with z = S/sqrt(v + rho), and Phi(z) is at
    least 1 - exp(-z²/2)/2 for z > 0.
    """
    v = np.arange(1, errors.size + 1) / 4.0
    rho = 10_000 / 4.0 / 8.0
    z = np.cumsum(errors - LIMIT) / np.sqrt(v + rho)
    threshold = np.log(0.5 + np.sqrt((v + rho) / rho) / (2.0 * ALPHA))
    alarms = np.flatnonzero((z > 0) & (z * z / 2.0 >= threshold))
    return int(alarms[0]) + 1 if alarms.size else None


def _cusum_path(errors: Floats) -> Floats:
    """CUSUM's statistic for a change from LIMIT to two points above it."""
    worse = LIMIT + 0.02
    steps = np.where(errors > 0, math.log(worse / LIMIT), math.log((1 - worse) / (1 - LIMIT)))
    sums = np.cumsum(steps, axis=-1)
    return sums - np.minimum(np.minimum.accumulate(sums, axis=-1), 0.0)


def _cusum(calibrations: int, seed: int) -> Detector:
    """CUSUM with the threshold that a risk of LIMIT passes within CALIBRATED examples in a share ALPHA of all cases."""
    rng = np.random.default_rng([seed, CALIBRATED])
    tops = [_cusum_path((rng.random(CALIBRATED) < LIMIT).astype(np.float64)).max() for _ in range(calibrations)]
    threshold = float(np.quantile(tops, 1 - ALPHA))

    def alarm_at(errors: Floats) -> int | None:
        alarms = np.flatnonzero(_cusum_path(errors) > threshold)
        return int(alarms[0]) + 1 if alarms.size else None

    return alarm_at


# --- The simulation.


def rows(setting: Setting[Sizes], job: Job) -> Table:
    """One row per shift, change and way of watching."""
    horizon = setting.options.horizon
    detectors: dict[str, Detector] = {
        "monitor": _mixture(sequential.STARTS),
        "16 starts": _mixture(16),
        "single start": _single_start,
        "windows of 1,000": _windows(1_000),
        "windows of 5,000": _windows(5_000),
        "Hoeffding": _hoeffding,
        "CUSUM": _cusum(setting.options.calibrations, job.seed),
    }
    table: Table = []
    cells = [(shift, change) for change in CHANGES for shift in SHIFTS]
    for number, (shift, change) in enumerate(cells):
        alarms: dict[str, list[float]] = {name: [] for name in detectors}
        for seed in job.seeds(setting.seeds):
            draws = np.random.default_rng([seed, number]).random(change + horizon)
            risks = np.where(np.arange(draws.size) < change, BEFORE, LIMIT + shift)
            errors = (draws < risks).astype(np.float64)
            for name, alarm_at in detectors.items():
                alarms[name].append(alarm_at(errors) or math.inf)
        table += [_row(name, shift, change, np.array(times)) for name, times in alarms.items()]
        job.progress("monitor-delay", number + 1, len(cells), {})
    return table


def _row(name: str, shift: float, change: int, alarms: Floats) -> dict[str, Any]:
    """False alarms are those before the change; delays are those of the others, and infinite without an alarm."""
    delays = alarms[alarms > change] - change

    def quantile(share: float) -> float | None:
        value = np.quantile(delays, share, method="higher") if delays.size else math.inf
        return float(value) if math.isfinite(value) else None

    return {
        "method": name,
        "limit": LIMIT,
        "risk_before": BEFORE,
        "risk_after": round(LIMIT + shift, 6),
        "change_after": change,
        "alpha": ALPHA,
        "trials": alarms.size,
        "false_alarms": int((alarms <= change).sum()),
        "missed": int(np.isinf(alarms).sum()),
        "delay_median": quantile(0.5),
        "delay_90_percent": quantile(0.9),
    }


def numbers(table: Table) -> dict[str, float]:
    """The median delays of the monitor, where there is one."""
    return {
        f"risk {row['risk_after']:g} after {row['change_after']:,.0f} examples: median delay": row["delay_median"]
        for row in table
        if row["method"] == "monitor" and row["delay_median"] is not None
    }


def paint(canvas: Any, table: Table) -> None:
    """A panel for each time of the change."""
    from matplotlib.ticker import LogLocator, NullLocator

    canvas.set_size_inches(10.5, 4.4)
    panels = canvas.subplots(1, len(CHANGES), sharey=True)
    for axes, ((change,), part) in zip(panels, groups(table, "change_after").items(), strict=True):
        for number, (name, style) in enumerate(METHODS.items()):
            points = [(r["risk_after"], r["delay_median"]) for r in part if r["method"] == name and r["delay_median"]]
            x, y = [shift for shift, _ in points], [delay for _, delay in points]
            look = {"color": style.colour, "marker": style.marker, "ls": dash_of(number)}
            where = moved_aside(axes, number, len(METHODS))
            axes.plot(x, y, label=style.label if axes is panels[0] else None, transform=where, **look)
            axes.update_datalim(points)
        axes.margins(x=0.12)
        axes.set_yscale("log")
        axes.set_xticks(sorted({row["risk_after"] for row in part}))
        in_percent(axes.xaxis)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"risk after {change:,.0f} examples, in %")
    panels[0].set_ylabel("examples until the alarm (median)")
    canvas.legend(ncols=3, loc="outside lower center", fontsize=9)
    title(canvas, "Delay of the alarm", f"errors; {table[0]['trials']:,.0f} repetitions")
