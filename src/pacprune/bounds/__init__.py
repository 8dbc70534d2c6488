"""Upper confidence bounds on error rates: plain float64 functions, each rounded outward.

Every function returns the upper end of its bracket: rounding errors can only make a bound larger, never smaller than
the true value. Risks are fractions in [0, 1]; logs are natural; delta is the probability with which a bound may fail.

    >>> from pacprune import bounds
    >>> round(bounds.seeger(0.10, n=12_000, kl=500.0, delta=0.05), 3)
    0.209
"""

from pacprune.bounds import risk
from pacprune.bounds.risk import *  # noqa: F403

__all__: list[str] = []
__all__ += risk.__all__
