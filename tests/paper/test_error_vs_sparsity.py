"""The recipe of the headline figure: its grids, its rows, its picture; the smoke scale is run with all recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacprune.paper import certificate_grid, error_vs_sparsity, frame
from pacprune.paper.certificate_grid import Setting
from pacprune.paper.error_vs_sparsity import declared
from pacprune.paper.frame import Job


def job(out: Path, **other: Any) -> Job:
    given = {"scale": "smoke", "seed": 0, "device": torch.device("cpu"), "data_dir": None, "progress": lambda *_: None}
    return Job(**(given | {"out": out} | other))


def rows_of(setting: Setting) -> list[dict[str, Any]]:
    """Rows as the harness gives them, with made-up numbers."""
    numbers = dict.fromkeys((*certificate_grid.COLUMNS[5:], "prior_test_error", "digest"), 0.125)
    return [
        {"dataset": setting.data, "model": setting.model, **cell._asdict()} | numbers | {"held_out_certificate": 0.1}
        for cell in setting.cells()
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No training."""
    monkeypatch.setattr(certificate_grid, "run", lambda grid, setting, job: rows_of(setting))
    line = {"sparsity": 0.9, "seed": 0, "test_error": 0.5}
    monkeypatch.setattr(certificate_grid, "snip", lambda setting, job: [line, line | {"seed": 1}])


@pytest.mark.usefixtures("quick")
def test_every_setting_has_a_figure_and_the_tables_hold_every_row(tmp_path: Path) -> None:
    drawn, numbers = error_vs_sparsity.reproduce(job(tmp_path, scale="reduced"))
    grid = declared("reduced", [0])
    kinds = ("error-vs-sparsity", "pair-plot")
    assert [one.name for one in drawn] == [f"{kind}-{setting.name}" for setting in grid.settings for kind in kinds]
    assert len(frame.read(tmp_path / "certificates.csv")) == grid.size - grid.tried
    assert numbers["K"] == grid.size
    first = drawn[0].rows
    assert {row["what"] for row in first} == {
        "gibbs_certificate",
        "held_out_certificate",
        "prior_test_error",
        "snip",
        "test_error",
    }
    assert numbers["mnist-lenet5, held_out_certificate at 0.9, alpha 0.4"] == pytest.approx(0.1)
    assert numbers["mnist-lenet5, snip at 0.9, alpha 1"] == 0.5
    assert all("the split is not" in one.caption for one in drawn[::2])


def test_the_published_grid_has_its_own_seeds() -> None:
    assert declared("smoke", [1000, 1001, 1002]).settings[0].seeds == (1000, 1001, 1002)
    with pytest.raises(ValueError, match="the first seed would be 1000, but the grid declares 0"):
        declared("reduced", [1000, 1001, 1002])


def test_nothing_is_certified_without_the_declared_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(error_vs_sparsity, "DECLARED", tmp_path / "grid.toml")
    with pytest.raises(ValueError, match=r"grid\.toml is not there, and nothing may be certified without it"):
        declared("reduced", [0, 1, 2])


def test_the_paper_scale_is_a_grid_of_its_own_with_the_papers_epochs() -> None:
    reduced, paper = declared("reduced", [0]), declared("paper", [0])
    assert [one.name for one in paper.settings] == [one.name for one in reduced.settings]
    last = paper.settings[-1]
    assert (last.data, last.dense.epochs, last.pruning.epochs, last.posterior.epochs) == ("cifar10", 120, 60, 60)
    assert paper.size == 4 * 2 * 4 * 5 + paper.tried
    with pytest.raises(ValueError, match="alphas of cifar10-resnet20"):
        reduced.check(last)


def test_snip_is_trained_on_all_of_s_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = declared("smoke", [0, 1]).settings
    short = {"epochs": 1, "lr": 0.1}
    setting = replace(
        setting, dense=replace(setting.dense, **short), pruning=replace(setting.pruning, **short), sparsities=(0.9,)
    )
    rows = certificate_grid.snip(setting, job(tmp_path))
    assert [(row["sparsity"], row["seed"]) for row in rows] == [(0.9, 0), (0.9, 1)]
    assert all(0 < row["test_error"] < 0.9 for row in rows)
    monkeypatch.setattr(certificate_grid, "together", lambda *_, **__: pytest.fail("it was trained again"))
    assert certificate_grid.snip(setting, job(tmp_path)) == rows
