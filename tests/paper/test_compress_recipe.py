"""The recipe of compress: what each arm promises, and that promises are those of the certificates."""

from collections.abc import Callable
from pathlib import Path

import pytest

import pacprune as pp
from pacprune import bounds
from pacprune.certification.risks import Tally
from pacprune.paper import compress
from pacprune.paper.compress import ARMS, COUNT, LIMITS, Counts
from pacprune.paper.frame import Job
from pacprune.training.config import Config
from pacprune.types import Table

TINY = compress.SETTINGS["smoke"][0].changed(
    seeds=1,
    dense=Config(epochs=10, lr=0.1, schedule="cosine"),
    pruning=Config(epochs=2, lr=0.05, schedule="cosine"),
    grid=(0.2, 0.5),
    rates=(1.0, 0.2),
)
N = 10_000
COUNTS = Counts(
    [Tally(N, -1, plus, minus) for plus, minus in ((60, 55), (80, 60), (150, 90), (400, 100))],
    [505, 520, 560, 800],
    500,
)


def test_there_is_a_promise_for_every_limit_and_arm() -> None:
    entries = compress.entries([0, 1])
    assert len(entries) == len({*entries}) == 2 * (3 * 4 + 3 * 2)
    assert sum(len(limits) for limits in LIMITS.values()) == COUNT == 6


@pytest.mark.parametrize(("limit", "expected"), [(0.005, (0, 0, None, None)), (0.01, (1, 1, 0, None))])
def test_what_the_chain_and_the_paired_risk_are_worth(limit: float, expected: tuple[int | None, ...]) -> None:
    order = range(4)
    assert tuple(way.choose(COUNTS, order, limit, 0.05) for way in ARMS.values()) == expected


def test_the_chain_ends_at_the_first_that_fails_and_the_union_bound_does_not() -> None:
    counts = Counts([COUNTS.tallies[0], COUNTS.tallies[3], COUNTS.tallies[1]], [505, 800, 520], 500)
    assert ARMS["chain"].choose(counts, range(3), 0.01, 0.05) == 0
    assert ARMS["chain"].choose(counts, [0, 2], 0.01, 0.05) == 2
    assert ARMS["union"].choose(counts, range(3), 0.01, 0.05) == 2


def test_of_each_sparsity_the_better_candidate_is_in_the_chain() -> None:
    tallies = [Tally(100, plus=plus) for plus in (3, 2, 5, 9)]
    assert compress.chain(TINY, tallies, 500) == ([1, 2], [tallies[1], tallies[2]])


def test_two_bounds_share_delta() -> None:
    upper = bounds.clopper_pearson(520, n=N, delta=0.025)
    lower = 1 - bounds.clopper_pearson(N - 500, n=N, delta=0.025)
    assert compress._difference(COUNTS, 1, 0.025, 0.025) == upper - lower


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compress")


@pytest.fixture(scope="module")
def rows(folder: Path, make_job: Callable[..., Job]) -> Table:
    return compress.rows(TINY, make_job(folder))


def test_rows_say_what_is_promised(rows: Table) -> None:
    assert len(rows) == 18
    for row in rows:
        assert row["sparsity_all"] <= row["sparsity"] <= 0.5
        assert (row["bytes"] is None) == (row["sparsity"] == 0) == (row["test_value"] is None)
        if row["sparsity"] == 0:
            assert row["test_error"] == row["dense_test_error"]
    assert any(row["sparsity"] > 0 for row in rows)


def test_the_certificates_of_the_first_seed_verify(rows: Table, folder: Path) -> None:
    promised = {(row["risk"], row["limit"]) for row in rows if row["arm"] == "chain" and row["sparsity"] > 0}
    for risk, limit in promised:
        place = folder / "certificates" / f"digits-mlp-{risk}-{limit:g}"
        assert pp.verify(place).valid
    assert len(list((folder / "certificates").iterdir())) == len(promised)


def test_rows_are_kept(
    rows: Table, folder: Path, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "promises", lambda *_: pytest.fail("they were computed again"))
    assert compress.rows(TINY, make_job(folder)) == rows
