"""Two gloo processes with a model cut by fully_shard against one with the whole: the same masks to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_cases
import test_ranks
import torch
from test_ranks import Run, forking, results
from torch import Tensor

import pacprune as pp

EQUAL = [
    *("dense", "gates", "uneven", "clamped", "lagrangian", "gradual", "feedback", "patience", "own_loop"),
    *("osp", "pft", "paper", "frozen", "thresholded", "transformer", "pruner", "pruner_gradual", "zeros_kept"),
]
"""Cases in which sharded models become what whole ones do."""
ALL = [*EQUAL, "pruner_parts", "draws", "bfloat16", "memory", "export", "ties", "checkpoints", "refusals", "broken"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forking("sharded_cases", "torch.distributed.fsdp", "torch._dynamo") as run:
        yield run


@pytest.fixture(scope="module")
def two(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases after two ranks ran them."""
    folder = tmp_path_factory.mktemp("sharded")
    for code, output in run(folder, *ALL):
        assert code == 0, output
    return folder


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether tensors differ by at most 1e-5, relative to their largest number.

    The Lagrangian's multiplier is a sum of differences from the budget, one for each of at most 50 steps. Each
    difference has the rounding error of a mean keep_prob of about 1/2, which the sum can differ by.
    """
    assert first.keys() == second.keys()
    return all(
        float((t.double() - second[n].double()).abs().max())
        <= (50 * 2**-24 if n.endswith("multiplier") else 1e-5 * max(float(t.double().abs().max()), 1e-30))
        for n, t in first.items()
    )


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[n]) for n, t in first.items())


def assert_alike(single: dict[str, Any], *sharded: dict[str, Any]) -> None:
    for outcome in sharded:
        assert equal(outcome["state"], sharded[0]["state"])
        assert outcome["history"] == sharded[0]["history"]
        assert close(single["state"], outcome["state"])
        assert equal(single.get("mask", {}), outcome.get("mask", {}))
        assert single.get("sparsity") == outcome.get("sparsity")
    for row, other in zip(single["history"], sharded[0]["history"], strict=True):
        numbers, others = ({k: v for k, v in outcome.items() if k != "stage"} for outcome in (row, other))
        assert others == pytest.approx(numbers, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", EQUAL)
def test_a_sharded_model_becomes_what_the_whole_one_does(two: Path, tmp_path: Path, case: str) -> None:
    assert_alike(getattr(sharded_cases, case)(tmp_path), *results(two, case))


def test_micro_batches_add_up_before_gradients_are_converted(two: Path, tmp_path: Path) -> None:
    single, (first, second) = sharded_cases.pruner_parts(tmp_path), results(two, "pruner_parts")
    assert equal(first["state"], second["state"])
    assert equal(single["mask"], first["mask"])
    # Just above the threshold, a weight of the network moves by far more than the one that is trained.
    assert test_ranks.close(single["state"], first["state"], most=1e-3)


def test_frozen_weights_of_two_ranks_keep_an_exact_pattern_in_bfloat16(two: Path, tmp_path: Path) -> None:
    single, (first, second) = sharded_cases.frozen(tmp_path), results(two, "frozen")
    assert single["exact"]
    assert first["exact"]
    assert torch.equal(first["half"], second["half"])
    # A rank's gradient is rounded to 16 bits before the sum, so that weights nearly as good may change places.
    assert float((first["half"] == single["half"]).float().mean()) > 0.9
    assert first["loss"] == pytest.approx(single["loss"], rel=0.05)


def test_three_ranks_train_tensors_with_fewer_rows_than_ranks(run: Run, tmp_path: Path) -> None:
    for code, output in run(tmp_path, "thirds", world=3):
        assert code == 0, output
    assert_alike(sharded_cases.thirds(tmp_path / "alone"), *results(tmp_path, "thirds", world=3))


def test_every_rank_draws_the_rows_that_the_whole_model_would_draw(two: Path, tmp_path: Path) -> None:
    single = sharded_cases.draws(tmp_path)
    for outcome in results(two, "draws"):
        assert len(single["first"]) == 6
        for name in ("first", "last", "outputs"):
            assert all(torch.equal(a, b) for a, b in zip(single[name], outcome[name], strict=True))
        assert (outcome["error"], outcome["training"]) == (single["error"], single["training"])


def test_no_rank_keeps_more_than_its_rows(two: Path) -> None:
    whole = {"0.weight": 512 * 256, "2.weight": 512 * 512}
    for outcome in results(two, "memory"):
        for name, size in whole.items():
            mean, (owner, _, tensor) = outcome["sizes"][name], name.rpartition(".")
            gates = [outcome["sizes"][f"{owner}.parametrizations.{tensor}.original{k}"] for k in range(2)]
            assert [mean, *gates] == [size // 2] * 3
        assert outcome["largest"] == 4 * whole["2.weight"] // 2  # bytes: neither a draw nor a gradient is left whole


def test_the_state_dict_that_torch_gathers_loads_into_the_plain_model(two: Path) -> None:
    rank0, rank1 = results(two, "export")
    assert rank1["state"] == {}  # torch gives it to rank 0 alone
    model = sharded_cases.Tied()
    model.load_state_dict(rank0["state"])
    assert model.head.weight is model.embed.weight
    size = sum(w.numel() for w in pp.prunable(model).values())
    nonzero = {name: w.detach() != 0 for name, w in pp.prunable(model).items()}
    assert equal(nonzero, rank0["mask"])
    assert sum(int(keep.sum()) for keep in nonzero.values()) == round(0.1 * size)


def test_weights_are_gathered_in_bfloat16_under_a_mixed_precision_policy(two: Path, tmp_path: Path) -> None:
    single, (rank0, rank1) = sharded_cases.bfloat16(tmp_path), results(two, "bfloat16")
    assert equal(rank0["state"], rank1["state"])
    assert set(rank0["used"]) == {torch.bfloat16}
    for name, tensor in single["state"].items():
        assert rank0["state"][name].dtype == (torch.int64 if name.endswith((".seed", ".step")) else torch.float32)
        torch.testing.assert_close(rank0["state"][name], tensor, rtol=0.03, atol=0.01)


def test_tied_weights_stay_tied(two: Path) -> None:
    assert [outcome["tied"] for outcome in results(two, "transformer")] == [True, True]


def test_top_k_of_shards_equals_top_k_of_the_whole_despite_ties(two: Path) -> None:
    for outcome in results(two, "ties"):
        assert (outcome["wrong"], outcome["count"]) == (0, 56)
        for whole, cut in outcome["pairs"]:
            assert cut == pytest.approx(whole, rel=1e-12)


def test_ranks_resume_from_the_last_checkpoint_that_all_have(two: Path) -> None:
    for rank, outcome in enumerate(results(two, "checkpoints")):
        lost_message, foreign_message = outcome.pop("one is lost"), outcome.pop("three ranks")
        assert outcome == {"none": None, "whole": (1, rank), "one has written": (1, rank), "one has renamed": (2, rank)}
        assert lost_message.startswith("rank 1 has no part of the checkpoint ")
        assert foreign_message.startswith(
            "the checkpoint cut.pt.0-of-3 was written by another number of ranks, and 2 are running"
        )


def test_calls_that_need_whole_weights_are_refused_in_one_sentence(two: Path) -> None:
    rank0, rank1 = results(two, "refusals")
    assert rank0 == rank1
    sharded = "needs whole weights, but those of this model are sharded by fully_shard; "
    expected = {
        "mask": "the mask of 0.weight is whole, but the model's weight is sharded; make it from this model",
        "slab": "0.weight of the SpikeSlab is sharded, but the model's weight is whole; make it from this model",
        "inside": "Sequential is not sharded itself, but 1 of the modules inside it are; call fully_shard on the model",
        "late": "0.weight was attached before it was sharded, so that gates would be gathered",
        "columns": "weight is (Shard(dim=1),) on a mesh of (2,), but of a sharded model every parameter must be",
        "nan": "0.weight has 128 NaN or infinite weights of 264",
        "changed": "something other than an optimiser has changed 0.weight after step 0 of the pruner",
        "population": f"a population {sharded}train the models one by one",
        "pbp": f"a certificate {sharded}use pp.pft",
        "pattern": f"the pattern 2:4 {sharded}give a sparsity",
        "std": f"a std of its own for every weight {sharded}attach gates with",
        "grasp": f"the criterion grasp {sharded}use magnitude, snip or random",
        "synflow": f"the criterion synflow {sharded}use magnitude, snip or random",
        "samples": f"Algorithm 1 (samples=2) {sharded}use samples=0",
        "independent": f"a mask for every rank (masks='independent') {sharded}use masks='shared'",
        "amp": f"amp=True {sharded}give fully_shard a MixedPrecisionPolicy",
        "compiled": f"execution='compiled' {sharded}use execution='eager'",
    }
    assert rank0["messages"].keys() == expected.keys()
    for name, sentence in expected.items():
        assert rank0["messages"][name].startswith(sentence)
        assert "\n" not in rank0["messages"][name]


def test_a_dying_rank_ends_the_job_and_the_next_start_resumes(run: Run, two: Path, tmp_path: Path) -> None:
    (code, output), (killed_code, killed_output) = run(tmp_path / "torn", "broken", FATAL="tune")
    assert killed_code == 7, killed_output
    assert code == 1, output
    assert "rank 0 of 2 lost contact with the others, of which one has ended" in output
    assert "start all ranks again" in output
    parts = sorted(path.name for path in (tmp_path / "torn" / "broken" / "broken").iterdir())
    assert parts == [f"{stage}.pt.{rank}-of-2" for stage in ("masks", "tune") for rank in range(2)]

    for code, output in run(tmp_path / "torn", "broken"):
        assert code == 0, output
    resumed, whole = results(tmp_path / "torn", "broken"), results(two, "broken")
    assert equal(resumed[0]["state"], whole[0]["state"])
    assert equal(resumed[1]["mask"], whole[0]["mask"])
    assert resumed[0]["history"] == resumed[1]["history"] == whole[0]["history"]
