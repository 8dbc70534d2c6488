"""What the bounds share: checks of their arguments, float64 arithmetic rounded outward, and how a bound is written.

A check returns the value as a plain Python number, so that a float32 scalar cannot lower the precision.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

ROUNDING = 2.0**-50
"""Covers the rounding of a few operations: absolute for numbers up to 2, relative as the factor ROUND_UP."""

ROUND_UP = 1.0 + ROUNDING

COUNTED = {
    "n": "the bound examples",
    "m": "the unlabelled inputs",
    "errors": "the wrong answers",
    "disagreements": "the inputs on which two networks differ",
    "draws": "the networks that were drawn",
    "grid": "the priors among which to choose",
    "certified": "the networks among which to choose",
    "trials": "the samples of each population",
    "first": "the examples since the monitor began",
}
"""What a number of this name counts."""


def check_fraction(name: str, value: float) -> float:
    """A number in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, but it must lie in [0, 1]: give a fraction, not a percentage")
    return float(value)


def check_delta(value: float, *, name: str = "delta") -> float:
    """A probability of failure: strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, but it must lie strictly between 0 and 1: 0.05 is the usual choice")
    return float(value)


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if not (value >= least and value % 1 == 0):
        counted = f": it counts {COUNTED[name]}" if name in COUNTED else ""
        raise ValueError(f"{name} is {value}, but it must be a whole number of at least {least}{counted}")
    return int(value)


def check_part(name: str, value: int, whole_name: str, whole: int) -> tuple[int, int]:
    """Two counts, the first of which is a part of the second."""
    value, whole = check_count(name, value, least=0), check_count(whole_name, whole)
    if value > whole:
        raise ValueError(f"{name} is {value}, but there are only {whole_name} = {whole} to count it among")
    return value, whole


def check_nonnegative(name: str, value: float) -> float:
    """A number of at least 0, or infinity."""
    if not value >= 0.0:
        raise ValueError(f"{name} is {value}, but it must be at least 0: check the distributions it was computed from")
    return float(value)


def upper_end(lower: float, upper: float, holds: Callable[[float], bool]) -> float:
    """Bisect to neighbouring floats and return the upper one; `holds` is true at `upper` and increasing."""
    while lower < (middle := lower + (upper - lower) / 2.0) < upper:
        if holds(middle):
            upper = middle
        else:
            lower = middle
    return upper


def log_sum_exp(logs: NDArray[np.float64]) -> float:
    """log(sum(exp(logs))) without overflow."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def rounded_up(value: float) -> str:
    """Four digits, rounded up: a certificate must not be rounded in its own favour."""
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
