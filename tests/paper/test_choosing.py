"""The study of choosing: what a choice among m costs each certificate follows from the counts of one cell."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import pacprune as pp
from pacprune import bounds, philox
from pacprune.data.splits import Part
from pacprune.paper import choosing, data_scarce, documents

TINY = choosing.SETTINGS["smoke"][0].changed(sizes=(60,), inputs=80, draws=60)


@cache
def table(folder: Path, make: Any) -> list[dict[str, Any]]:
    return choosing.rows(TINY, make(folder))


@pytest.fixture
def rows(make_job: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return table(tmp_path_factory.getbasetemp() / "choosing", make_job)


def test_there_is_a_row_for_every_cell_and_number_of_networks(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if not row["computed"]]
    assert [(row["seed"], row["tried"]) for row in measured] == [(0, m) for m in choosing.TRIED]
    assert {(row["n"], row["inputs"], row["posteriors"]) for row in measured} == {(30, 80, 4)}
    assert [row["n"] for row in rows if row["computed"]] == [choosing.LONGEST]


def test_networks_pay_for_a_choice_and_posteriors_do_not(rows: list[dict[str, Any]]) -> None:
    part = [row for row in rows if not row["computed"]]
    for row in part:
        share = 0.05 / row["tried"]
        assert row["held_out"] == bounds.clopper_pearson(row["pruned_errors"], n=30, delta=share)
        dense = bounds.clopper_pearson(row["dense_errors"], n=30, delta=0.025)
        differs = bounds.clopper_pearson(row["disagreements"], n=80, delta=share / 2)
        assert row["transfer"] == min(1.0, dense + differs)
        assert row["disagreement"] == bounds.clopper_pearson(row["disagreements"], n=80, delta=share)
    for arm in ("chosen", "q_equals_p"):
        assert len({row[arm] for row in part}) == 1
    for arm in ("held_out", "certified", "single_draw"):
        values = [row[arm] for row in part]
        assert values == sorted(values)
    assert part[0]["certified"] == pytest.approx(part[0]["chosen"], abs=1e-12)


def test_a_text_has_one_prior_for_all_cells_and_means_over_documents_beside_them(make_job: Any, tmp_path: Path) -> None:
    setting = choosing.SETTINGS["smoke"][1].changed(draws=30)
    rows = choosing.rows(setting, make_job(tmp_path))
    measured = [row for row in rows if not row["computed"]]
    assert {row["n"] for row in measured} == {30, 60}
    assert [row["documents"] for row in rows if row["computed"]] == [None]
    for n in (30, 60):
        values = [row["documents"] for row in measured if row["n"] == n]
        assert values == sorted(values)
    assert all(0 < row["single_draw"] <= 1 for row in measured)
    halves = documents.speeches(setting.data, 16, 0, make_job(tmp_path))
    split, inputs = choosing._text_split(setting, halves, choosing.Entry(30, 0))
    (other, _) = choosing._text_split(setting, halves, choosing.Entry(60, 0))
    assert torch.equal(split.prior.x, other.prior.x)
    assert torch.equal(split.bound.x, other.bound.x[:30])
    assert len(inputs) == 40
    with pytest.raises(ValueError, match="documents are asked for, but there are"):
        choosing._text_split(setting.changed(sizes=(100_000,)), halves, choosing.Entry(30, 0))


def test_examples_that_settings_were_chosen_on_are_left_out() -> None:
    train = Part("train", torch.zeros(60_000, 1), torch.arange(60_000) % 10, philox.permutation(60_000, seed=5))
    tuned = philox.permutation(60_000, seed=data_scarce.ORDER)[data_scarce.CHOSEN_ON]
    largest = max(choosing.SETTINGS["reduced"][0].options.sizes) + 10_000
    first, second = (choosing._examples(train, largest, seed).index for seed in (0, 1))
    assert len(first.unique()) == largest == 50_000
    assert not torch.isin(first, tuned).any()
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="50001 examples are asked for, but there are 50000"):
        choosing._examples(train, 50_001, 0)


def test_disagreement_is_counted_against_the_dense_network() -> None:
    dense, pruned = pp.models.mlp(64, 10, hidden=(8,)), pp.models.mlp(64, 10, hidden=(8,))
    part = pp.data.digits(seed=0).bound
    assert choosing._disagreements(dense, dense, {}, part) == 0
    with torch.no_grad():
        expected = int((dense(part.x).argmax(1) != pruned(part.x).argmax(1)).sum())
    assert choosing._disagreements(dense, pruned, {}, part) == expected
