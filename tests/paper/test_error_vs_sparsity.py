"""The recipe of the headline figure: its grids, its rows, its picture; the smoke scale is run with all recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacprune.paper import certificate_grid, error_vs_sparsity, frame, recipes
from pacprune.paper.certificate_grid import Declaration, cells_of
from pacprune.paper.error_vs_sparsity import declared_grid
from pacprune.paper.frame import Job, Setting

RECIPE = recipes.RECIPES["error-vs-sparsity"]


def rows_of(setting: Setting[Declaration]) -> list[dict[str, Any]]:
    """Rows as the harness gives them, with made-up numbers."""
    numbers = dict.fromkeys((*certificate_grid.COLUMNS[5:], "prior_test_error", "digest"), 0.125)
    return [
        {"dataset": setting.data, "model": setting.model, **cell._asdict()} | numbers | {"held_out_certificate": 0.1}
        for cell in cells_of(setting, range(setting.seeds))
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No training."""
    monkeypatch.setattr(certificate_grid, "run", lambda grid, name, job: rows_of(grid[name]))
    line = {"sparsity": 0.9, "seed": 0, "test_error": 0.5}
    monkeypatch.setattr(certificate_grid, "snip", lambda setting, job: [line, line | {"seed": 1}])


@pytest.mark.usefixtures("quick")
def test_every_setting_has_a_figure_and_the_tables_hold_every_row(job: Job) -> None:
    drawings, numbers = frame.reproduce(RECIPE, replace(job, scale="reduced"))
    grid = declared_grid("reduced")
    names = [f"{kind}-{setting.name}" for setting in grid.settings for kind in ("error-vs-sparsity", "pair-plot")]
    assert [drawing.name for drawing in drawings] == names
    assert len(frame.read(job.out / "certificates.csv")) == grid.size - grid.unpublished
    assert numbers["K"] == grid.size
    assert {row["what"] for row in drawings[0].rows} == {
        "gibbs_certificate",
        "held_out_certificate",
        "prior_test_error",
        "snip",
        "test_error",
    }
    assert numbers["mnist-lenet5, held_out_certificate at 0.9, alpha 0.4"] == pytest.approx(0.1)
    assert numbers["mnist-lenet5, snip at 0.9, alpha 1"] == 0.5
    assert all("the split is not" in drawing.caption for drawing in drawings[::2])


@pytest.mark.usefixtures("quick")
def test_the_published_grid_has_its_own_seeds(job: Job) -> None:
    frame.reproduce(RECIPE, replace(job, seed=1))
    with pytest.raises(ValueError, match="the first seed would be 1000, but the grid declares 0"):
        frame.reproduce(RECIPE, replace(job, scale="reduced", seed=1))


def test_nothing_is_certified_without_the_declared_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(error_vs_sparsity, "GRID_FILE", tmp_path / "grid.toml")
    with pytest.raises(ValueError, match=r"grid\.toml is not there, and nothing may be certified without it"):
        declared_grid("reduced")


def test_the_paper_scale_is_a_grid_of_its_own_with_the_papers_epochs() -> None:
    reduced, paper = declared_grid("reduced"), declared_grid("paper")
    assert [setting.name for setting in paper.settings] == [setting.name for setting in reduced.settings]
    last = paper.settings[-1]
    assert (last.data, last.dense.epochs, last.pruning.epochs, last.posterior.epochs) == ("cifar10", 120, 60, 60)
    assert paper.size == 4 * 2 * 4 * 5 + paper.unpublished
    assert reduced.terms != paper.terms


def test_snip_is_trained_on_all_of_s_and_only_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = declared_grid("smoke").settings
    dense, pruning = replace(setting.dense, epochs=1), replace(setting.pruning, epochs=1)
    setting = setting.changed(dense=dense, pruning=pruning, sparsities=(0.9,), seeds=2)
    rows = certificate_grid.snip(setting, job)
    assert [(row["sparsity"], row["seed"]) for row in rows] == [(0.9, 0), (0.9, 1)]
    assert all(0 < row["test_error"] < 0.9 for row in rows)
    monkeypatch.setattr(certificate_grid, "together", lambda *_, **__: pytest.fail("it was trained again"))
    assert certificate_grid.snip(setting, job) == rows
