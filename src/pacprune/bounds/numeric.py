"""What the bounds share: checks of their arguments, float64 arithmetic rounded outward, and a kl inverse to train on.

A check returns the value as a plain Python number, so that a float32 scalar cannot lower the precision.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


NEWTON_STEPS = 7
"""Five give every digit of kl_inverse from its first guess (grid: tests/bounds/test_numeric.py); two are spare."""


def kl_inverse(q: Tensor, c: Tensor) -> Tensor:
    """sup{p in [q, 1]: kl(q||p) <= c} of every element, differentiable, and without waiting for the device.

    dp/dc = p(1-p)/(p-q) and dp/dq = dp/dc * log(p(1-q)/(q(1-p))), held finite at q = 0 and c = 0. In float64, returned
    in the wider type of q and c. It is for training: near bounds.kl_inverse (to 1e-12), but not rounded upward.
    """
    value = _KlInverse.apply(*torch.broadcast_tensors(q.double(), c.double()))
    return value.to(torch.promote_types(q.dtype, c.dtype))


class _KlInverse(torch.autograd.Function):
    """Newton's method in r = log((1-q)/(1-p)), where kl = (1-q) r - q log(p/q) is convex with the slope (p-q)/p.

    It starts to the right of the root, so that it falls towards it: kl >= (p-q)^2/(2p) bounds p - q, and kl >=
    (1-q)(r - 1 + exp(-r)) >= (1-q) r^2/(2+r) bounds r; the nearer of the two is within a factor of two.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, c: Tensor) -> Tensor:
        # Numbers that change no digit: q / q and 0 log 0 stay finite, and exp(-r) is 0 long before r = 1000.
        q, c = q.clamp(1e-300, 1 - 2.0**-53), c.clamp(0.0, 1000.0)
        rest = 1 - q
        a = c / rest
        far = ((c + torch.sqrt(c * (c + 2 * q))) / rest).clamp_max(1.0)
        r = torch.minimum((a + torch.sqrt(a * (a + 8))) / 2, -torch.log1p(-far))
        for _ in range(NEWTON_STEPS):
            d = -rest * torch.expm1(-r)
            excess = rest * r - q * torch.log1p(d / q) - c
            r = torch.minimum(r, r - excess * (q + d) / d.clamp_min(1e-300)).clamp_min(0.0)
        d = -rest * torch.expm1(-r)
        p, least = q + d, d.clamp_min(1e-12)  # the limit of the slopes at c = 0, to a distance of 1e-12
        to_c = p.clamp_min(1e-12) / least * rest * torch.exp(-r)
        log_odds = torch.log1p(least / q.clamp_min(1e-9)) + torch.maximum(r, least / rest.clamp_min(1e-9))
        ctx.save_for_backward(to_c * log_odds, to_c)
        return p

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        to_q, to_c = ctx.saved_tensors
        return gradients[0] * to_q, gradients[0] * to_c
