"""Two gloo processes with a model cut by fully_shard against one with the whole: the same masks to the bit."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_cases
import test_ranks
import torch
from test_ranks import results
from torch import Tensor

import pacprune as pp

EQUAL = [
    *("dense", "gates", "uneven", "clamped", "lagrangian", "gradual", "feedback", "patience", "own_loop"),
    *("osp", "pft", "paper", "transformer"),
]
"""Cases in which sharded models become what whole ones do."""
ALL = [*EQUAL, "draws", "bfloat16", "memory", "export", "ties", "checkpoints", "refusals", "broken"]


def command(folder: Path, *cases: str) -> list[str]:
    return ["-W", "error", sharded_cases.__file__, str(folder), *cases]


run = functools.partial(test_ranks.run, script=sharded_cases.__file__)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases after two ranks ran them."""
    folder = tmp_path_factory.mktemp("sharded")
    for code, said in run(folder, *ALL):
        assert code == 0, said
    return folder


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether tensors differ by at most 1e-5, relative to their largest number.

    The Lagrangian's multiplier is a sum of small differences from the budget, each rounded like the mean keep_prob of
    about 1/2 that it is a difference of: that is what it can differ by, in each of its at most 50 steps.
    """
    assert one.keys() == other.keys()
    return all(
        float((t.double() - other[n].double()).abs().max())
        <= (50 * 2**-24 if n.endswith("multiplier") else 1e-5 * max(float(t.double().abs().max()), 1e-30))
        for n, t in one.items()
    )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def assert_alike(alone: dict[str, Any], *sharded: dict[str, Any]) -> None:
    for one in sharded:
        assert equal(one["state"], sharded[0]["state"])
        assert one["history"] == sharded[0]["history"]
        assert close(alone["state"], one["state"])
        assert equal(alone.get("mask", {}), one.get("mask", {}))
        assert alone.get("sparsity") == one.get("sparsity")
    for row, other in zip(alone["history"], sharded[0]["history"], strict=True):
        numbers, others = ({k: v for k, v in one.items() if k != "stage"} for one in (row, other))
        assert others == pytest.approx(numbers, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", EQUAL)
def test_a_sharded_model_becomes_what_the_whole_one_does(two: Path, tmp_path: Path, case: str) -> None:
    assert_alike(getattr(sharded_cases, case)(tmp_path), *results(two, case))


def test_three_ranks_of_which_some_have_no_rows_of_small_tensors(tmp_path: Path) -> None:
    for code, said in run(tmp_path, "thirds", world=3):
        assert code == 0, said
    assert_alike(sharded_cases.thirds(tmp_path / "alone"), *results(tmp_path, "thirds", world=3))


def test_every_rank_draws_the_rows_that_the_whole_model_would_draw(two: Path, tmp_path: Path) -> None:
    alone = sharded_cases.draws(tmp_path)
    for one in results(two, "draws"):
        assert len(alone["first"]) == 6
        for name in ("first", "last", "outputs"):
            assert all(torch.equal(a, b) for a, b in zip(alone[name], one[name], strict=True))
        assert (one["error"], one["training"]) == (alone["error"], alone["training"])


def test_no_rank_keeps_more_than_its_rows(two: Path) -> None:
    whole = {"0.weight": 512 * 256, "2.weight": 512 * 512}
    for one in results(two, "memory"):
        for name, size in whole.items():
            drawn, (owner, _, tensor) = one["own"][name], name.rpartition(".")
            gates = [one["own"][f"{owner}.parametrizations.{tensor}.original{k}"] for k in range(2)]
            assert [drawn, *gates] == [size // 2] * 3
        assert one["largest"] == 4 * whole["2.weight"] // 2  # bytes: neither a draw nor a gradient is left whole


def test_the_state_dict_that_torch_gathers_loads_into_the_plain_model(two: Path) -> None:
    zero, one = results(two, "export")
    assert one["state"] == {}  # torch gives it to rank 0 alone
    model = sharded_cases.Tied()
    model.load_state_dict(zero["state"])
    assert model.head.weight is model.embed.weight
    size = sum(w.numel() for w in pp.prunable(model).values())
    nonzero = {name: w.detach() != 0 for name, w in pp.prunable(model).items()}
    assert equal(nonzero, zero["mask"])
    assert sum(int(keep.sum()) for keep in nonzero.values()) == round(0.1 * size)


def test_weights_are_gathered_in_bfloat16_where_the_user_asks_fully_shard_for_it(two: Path, tmp_path: Path) -> None:
    alone, (zero, one) = sharded_cases.bfloat16(tmp_path), results(two, "bfloat16")
    assert equal(zero["state"], one["state"])
    assert set(zero["used"]) == {torch.bfloat16}
    for name, tensor in alone["state"].items():
        assert zero["state"][name].dtype == torch.float32
        torch.testing.assert_close(zero["state"][name], tensor, rtol=0.03, atol=0.01)


def test_tied_weights_stay_tied(two: Path) -> None:
    assert [one["tied"] for one in results(two, "transformer")] == [True, True]


def test_top_k_of_shards_is_that_of_the_whole_with_any_ties(two: Path) -> None:
    for one in results(two, "ties"):
        assert (one["wrong"], one["count"]) == (0, 56)
        for whole, cut in one["pairs"]:
            assert cut == pytest.approx(whole, rel=1e-12)


def test_ranks_go_on_from_the_last_checkpoint_that_all_have(two: Path) -> None:
    for rank, one in enumerate(results(two, "checkpoints")):
        lost, other = one.pop("one is lost"), one.pop("three ranks")
        assert one == {"none": None, "whole": (1, rank), "one has written": (1, rank), "one has renamed": (2, rank)}
        assert lost.startswith("rank 1 has no part of the checkpoint ")
        assert other.startswith(
            "the checkpoint cut.pt.0-of-3 was written by another number of ranks, and 2 are running"
        )


def test_what_shards_cannot_do_is_refused_in_one_sentence(two: Path) -> None:
    zero, one = results(two, "refusals")
    assert zero == one
    sharded = "needs whole weights, but those of this model are sharded by fully_shard; "
    expected = {
        "mask": "the mask of 0.weight is whole, but the model's weight is sharded; make it from this model",
        "slab": "0.weight of the SpikeSlab is sharded, but the model's weight is whole; make it from this model",
        "inside": "Sequential is not sharded itself, but 1 of the modules inside it are; call fully_shard on the model",
        "late": "0.weight was attached before it was sharded, so that gates would be gathered",
        "columns": "weight is (Shard(dim=1),) on a mesh of (2,), but of a sharded model every parameter must be",
        "nan": "0.weight has 128 NaN or infinite weights of 264",
        "population": f"a population {sharded}train the models one by one",
        "pbp": f"a certificate {sharded}use pp.pft",
        "pattern": f"the pattern 2:4 {sharded}give a sparsity",
        "top_k": f"the pattern 2:4 {sharded}give a sparsity",
        "attach": f"the pattern 2:4 {sharded}attach gates with the sigmoid mapping",
        "std": f"a std of its own for every weight {sharded}attach gates with",
        "grasp": f"the criterion grasp {sharded}use magnitude, snip or random",
        "synflow": f"the criterion synflow {sharded}use magnitude, snip or random",
        "samples": f"Algorithm 1 (samples=2) {sharded}use samples=0",
        "independent": f"a mask for every rank (masks='independent') {sharded}use masks='shared'",
        "amp": f"amp=True {sharded}give fully_shard a MixedPrecisionPolicy",
        "compiled": f"execution='compiled' {sharded}use execution='eager'",
    }
    assert zero["said"].keys() == expected.keys()
    for name, sentence in expected.items():
        assert zero["said"][name].startswith(sentence)
        assert "\n" not in zero["said"][name]


def test_a_rank_that_dies_ends_the_job_and_the_next_start_goes_on(two: Path, tmp_path: Path) -> None:
    (code, said), (fatal, other) = run(tmp_path / "torn", "broken", FATAL="tune")
    assert fatal == 7, other
    assert code == 1, said
    assert "rank 0 of 2 lost contact with the others, of which one has ended" in said
    assert "start all ranks again" in said
    parts = sorted(path.name for path in (tmp_path / "torn" / "broken" / "broken").iterdir())
    assert parts == [f"{stage}.pt.{rank}-of-2" for stage in ("masks", "tune") for rank in range(2)]

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    again = subprocess.run(
        [*launch, *command(tmp_path / "torn", "broken")[2:]],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    torn, whole = results(tmp_path / "torn", "broken"), results(two, "broken")
    assert equal(torn[0]["state"], whole[0]["state"])
    assert equal(torn[1]["mask"], whole[0]["mask"])
    assert torn[0]["history"] == torn[1]["history"] == whole[0]["history"]
