"""How far bounds on a mean loss lie above it, by four rules, for several losses and numbers of examples."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pacprune import bounds
from pacprune.bounds import held_out, montecarlo
from pacprune.types import Table

SIZES = (100, 1000, 10_000)
SAMPLES = 20
"""Samples whose slack is averaged."""

Floats = NDArray[np.float64]


def _beta(a: float, b: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, n: rng.beta(a, b, n)


LOSSES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "0 or 1, mean 0.05": lambda rng, n: (rng.random(n) < 0.05).astype(np.float64),
    "0 or 1, mean 0.5": lambda rng, n: (rng.random(n) < 0.5).astype(np.float64),
    "Brier-like, mean 0.05": _beta(0.1, 1.9),
    "around 0.3, std 0.05": _beta(25.0, 58.3),
    "from 0 to 1, uniform": lambda rng, n: rng.random(n),
    "drop, 5 % differ, mean 0.005": lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.0225, 0.95, 0.0275]),
}
"""Losses in [0, 1]; a drop D comes as (1 + D)/2."""


def hoeffding(losses: Floats, delta: float) -> float:
    """mean + sqrt(log(1/delta) / (2 n)) (Hoeffding 1963)."""
    return float(losses.mean()) + math.sqrt(-math.log(delta) / (2.0 * losses.size))


def empirical_bernstein(losses: Floats, delta: float) -> float:
    """mean + sqrt(2 V log(2/delta) / n) + 7 log(2/delta) / (3 (n - 1)), V the sample variance (Maurer, Pontil 2009)."""
    n, price = losses.size, math.log(2.0 / delta)
    return float(losses.mean()) + math.sqrt(2.0 * float(losses.var(ddof=1)) * price / n) + 7.0 * price / (3.0 * (n - 1))


def kl(losses: Floats, delta: float) -> float:
    """kl_inverse(mean, log(1/delta) / n) (Hoeffding 1963, theorem 1)."""
    return montecarlo.chernoff(float(losses.mean()), draws=losses.size, delta=delta)


def betting(losses: Floats, delta: float) -> float:
    """Betting with 20 fixed bets, which a certificate of a loss uses."""
    return montecarlo.betting(losses, delta=delta)


def counted(losses: Floats, delta: float) -> float:
    """Clopper-Pearson for 0 and 1, twice for differences: what a certificate uses for counts; infinite for others."""
    values, n = np.unique(losses), losses.size
    ones, zeros = int((losses == 1.0).sum()), int((losses == 0.0).sum())
    if set(values) <= {0.0, 1.0}:
        return bounds.clopper_pearson(ones, n=n, delta=delta)
    if set(values) <= {0.0, 0.5, 1.0}:
        return (1.0 + held_out.difference(ones, zeros, n=n, delta=delta)) / 2.0
    return math.inf


RULES = {
    "counts": counted,
    "betting": betting,
    "empirical Bernstein": empirical_bernstein,
    "Hoeffding": hoeffding,
    "kl": kl,
}
"""From losses and delta to an upper bound on their mean."""


def table(*, sizes: Sequence[int] = SIZES, samples: int = SAMPLES, seed: int = 0, delta: float = 0.05) -> Table:
    """The mean slack of every rule, bound - mean, for every loss and size; of a drop in units of the drop."""
    rows: Table = []
    for loss, sample in LOSSES.items():
        scale = 2.0 if loss.startswith("drop") else 1.0
        for n in sizes:
            rng = np.random.default_rng([seed, n])
            drawn = [sample(rng, n) for _ in range(samples)]
            slacks = {
                name: scale * float(np.mean([min(1.0, rule(x, delta)) - x.mean() for x in drawn]))
                for name, rule in RULES.items()
                if rule(drawn[0], delta) < math.inf
            }
            rows.append({"loss": loss, "n": n, **slacks})
    return rows


def lines(rows: Table) -> Iterator[str]:
    """The table in Markdown; the smallest slack of a row is bold."""
    yield f"| loss | n | {' | '.join(RULES)} |"
    yield "|---" * (2 + len(RULES)) + "|"
    for row in rows:
        least = min(row[name] for name in RULES if name in row)
        cells = [
            "" if name not in row else f"**{row[name]:.4f}**" if row[name] == least else f"{row[name]:.4f}"
            for name in RULES
        ]
        yield f"| {row['loss']} | {row['n']:,} | {' | '.join(cells)} |"
