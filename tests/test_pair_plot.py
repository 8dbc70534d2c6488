"""The pair plot: its rows are certificates that hold at once, and its correlations are Pearson's."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import pacprune as pp
from pacprune.experiments import pair_plot, plots
from pacprune.experiments.figures import Job

TINY = replace(
    pair_plot.SETTINGS["smoke"],
    dense=pp.Config(epochs=2, lr=0.1),
    prior=pp.Config(epochs=1, lr=0.1),
    posterior=pp.Config(epochs=1, lr=0.1),
    draws=50,
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> plots.Table:
    job = Job("smoke", tmp_path_factory.mktemp("pairs"), 0, torch.device("cpu"), None, lambda *_: None)
    return pair_plot.rows(TINY, job)


def test_one_row_per_alpha_sparsity_and_seed(rows: plots.Table) -> None:
    cells = {(row["alpha"], row["sparsity"], row["seed"]) for row in rows}
    assert len(cells) == len(rows) == len(TINY.alphas) * len(TINY.sparsities) * TINY.seeds
    for row in rows:
        assert row["n"] == len(pp.data.digits(prior_fraction=row["alpha"], seed=0).bound)
        assert row["kl_per_n"] == row["kl"] / row["n"]
        assert 0 <= row["test_error"] <= 1


def test_every_certificate_pays_for_all_of_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paid = []

    def stop(*_: object, **given: object) -> list:
        paid.append(given["grid"])
        return []

    monkeypatch.setattr(pair_plot, "together", stop)
    job = Job("smoke", tmp_path, 0, torch.device("cpu"), None, lambda *_: None)
    with pytest.raises(ValueError, match="zip"):
        pair_plot.rows(TINY, job)
    assert paid == [len(TINY.alphas) * len(TINY.sparsities) * TINY.seeds]


def test_a_prior_part_lies_in_that_of_a_larger_alpha() -> None:
    small, large = (pp.data.digits(prior_fraction=alpha, seed=0).prior.index for alpha in TINY.alphas)
    assert torch.isin(small, large).all()


@pytest.mark.parametrize("runs", [4, 12, 60])
def test_the_correlation_and_its_interval_are_pearsons(runs: int) -> None:
    x, noise = np.random.default_rng(runs).normal(size=(2, runs))
    y = x + noise
    theirs = stats.pearsonr(x, y)
    low, high = theirs.confidence_interval(0.95)
    assert pair_plot.correlation(list(x), list(y)) == pytest.approx((theirs.statistic, low, high), rel=1e-5)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert all(math.isnan(value) for value in pair_plot.correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert pair_plot.correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).mean == pytest.approx(1)


def test_a_posterior_that_did_not_move_can_be_painted(rows: plots.Table) -> None:
    still = [row | {"kl": 0.0, "kl_per_n": 0.0} for row in rows]
    for table in (still, [*rows[1:], still[0]]):
        assert plots.png_of(pair_plot.paint, table)[:4] == b"\x89PNG"
    assert all(math.isfinite(value) for value in pair_plot.correlations(still).values())
