"""The pair plot of a table of certificates, and the correlations in it, which are Pearson's."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pacprune.paper import pair_plot
from pacprune.paper.statistics import correlation
from pacprune.runs import plots

TABLE: list[dict[str, Any]] = [
    {"dataset": "digits", "model": "mlp", "sparsity": sparsity, "alpha": alpha, "seed": seed, "digest": "00"}
    | {"gibbs_certificate": 0.1 + sparsity / 10 + seed / 100, "test_error": sparsity / 10, "kl": 3.0 * alpha, "n": 300}
    for alpha in (0.4, 0.8)
    for sparsity in (0.9, 0.95)
    for seed in range(3)
]


def test_one_row_per_certificate() -> None:
    rows = pair_plot.rows(TABLE)
    assert len(rows) == len(TABLE)
    assert [row["bound"] for row in rows] == [row["gibbs_certificate"] for row in TABLE]
    assert [row["kl_per_n"] for row in rows] == [pytest.approx(row["alpha"] / 100) for row in TABLE]
    assert "digest" not in rows[0]


@pytest.mark.parametrize("runs", [4, 12, 60])
def test_the_correlation_and_its_interval_are_pearsons(runs: int) -> None:
    x, noise = np.random.default_rng(runs).normal(size=(2, runs))
    y = x + noise
    theirs = stats.pearsonr(x, y)
    low, high = theirs.confidence_interval(0.95)
    assert correlation(list(x), list(y)) == pytest.approx((theirs.statistic, low, high), rel=1e-5)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert all(math.isnan(value) for value in correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).mean == pytest.approx(1)


def test_a_posterior_that_did_not_move_can_be_painted() -> None:
    rows = pair_plot.rows(TABLE)
    still = [row | {"kl_per_n": 0.0} for row in rows]
    for table in (rows, still, [*rows[1:], still[0]]):
        assert plots.png_of(pair_plot.paint, table)[:4] == b"\x89PNG"
    assert all(math.isfinite(value) for value in pair_plot.correlations(still).values())
    assert pair_plot.correlations(rows)["KL/n at alpha 0.4"] == pytest.approx(0.004)
