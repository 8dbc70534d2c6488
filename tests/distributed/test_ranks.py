"""Two gloo processes on this CPU against one: the same masks to the bit, the same weights up to rounding."""

import copy
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks_cases
import torch
import torch.nn.functional as F
from torch import Tensor

import pacprune as pp
from pacprune.distributed import ranks
from pacprune.masking import attachment
from pacprune.training.step import _order

EQUAL = [
    *("dense", "gates", "sparse", "uneven", "joined_last", "lagrangian", "algorithm1", "feedback", "loader"),
    *("population", "images", "unused", "pft", "posterior"),
]
"""Cases in which two ranks train what one process trains."""
ALL = [*EQUAL, "norm", "pbp", "certificate", "draws", "refusals"]


def start(
    rank: int, folder: Path, *cases: str, port: int, script: str = ranks_cases.__file__, **more: str
) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | own | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | more
    command = [sys.executable, "-W", "error", script, str(folder), *cases]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(folder: Path, *cases: str, world: int = 2, **more: str) -> list[tuple[int, str]]:
    """Runs the cases on several ranks; how each ended, and what it said."""
    port = free_port()
    every = [start(rank, folder, *cases, port=port, WORLD_SIZE=str(world), **more) for rank in range(world)]
    try:
        said = [one.communicate(timeout=120)[0] for one in every]
    finally:
        for one in every:
            one.kill()
    return [(one.returncode, text) for one, text in zip(every, said, strict=True)]


def results(folder: Path, case: str, world: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}-{rank}.found", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases after two ranks ran them."""
    folder = tmp_path_factory.mktemp("two")
    for code, said in run(folder, *ALL):
        assert code == 0, said
    return folder


def close(one: dict[str, Tensor], other: dict[str, Tensor], most: float = 1e-5) -> bool:
    """Whether tensors differ by at most this, relative to their largest number."""
    assert one.keys() == other.keys()
    return all(
        float((t.double() - other[n].double()).abs().max()) <= most * max(float(t.double().abs().max()), 1e-30)
        for n, t in one.items()
    )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_train_what_one_process_trains(two: Path, tmp_path: Path, case: str) -> None:
    alone = getattr(ranks_cases, case)(tmp_path)
    zero, one = results(two, case)
    assert equal(zero["state"], one["state"])
    assert close(alone["state"], zero["state"])
    assert equal(alone.get("mask", {}), zero.get("mask", {}))
    assert zero["history"] == one["history"]
    for row, other in zip(alone["history"], zero["history"], strict=True):
        numbers, others = ({k: v for k, v in one.items() if k != "stage"} for one in (row, other))
        assert others == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_the_ranks_share_batchnorms_statistics_and_the_decision_to_stop(two: Path) -> None:
    zero, one = results(two, "norm")
    assert equal(zero["state"], one["state"])
    assert zero["history"] == one["history"]


def test_pbp_ends_with_one_certificate_for_all_ranks(two: Path) -> None:
    zero, one = results(two, "pbp")
    assert zero["posterior"] == one["posterior"]
    assert zero["record"] == one["record"]
    assert zero["history"] == one["history"]
    assert zero["record"]["certify_calls"] == 1
    assert (two / "pbp" / "pbp" / "prior.safetensors").exists()


def test_three_ranks_leave_to_the_bit_what_is_frozen(tmp_path: Path) -> None:
    assert [code for code, _ in run(tmp_path, "thirds", world=3)] == [0, 0, 0]
    zero, one, two = results(tmp_path, "thirds", world=3)
    assert zero["record"] == one["record"] == two["record"]
    assert equal(zero["state"], two["state"])
    assert close(ranks_cases.thirds(tmp_path)["state"], zero["state"])


def test_the_draws_of_a_certificate_are_shared_and_it_is_that_of_one_process(two: Path, tmp_path: Path) -> None:
    alone, (zero, one) = ranks_cases.certificate(tmp_path), results(two, "certificate")
    assert alone["record"] == zero["record"] == one["record"]
    assert alone["last"] == zero["last"] == one["last"]
    for name, tensors in alone["tensors"].items():
        assert equal(tensors, zero["tensors"][name])
        assert equal(tensors, one["tensors"][name])


def test_shared_masks_are_equal_and_independent_ones_are_each_ranks_own(two: Path, tmp_path: Path) -> None:
    alone, (zero, one) = ranks_cases.draws(tmp_path), results(two, "draws")
    assert torch.equal(alone["shared"]["used"], zero["shared"]["used"])
    assert torch.equal(zero["shared"]["used"], one["shared"]["used"])
    assert torch.equal(alone["independent"]["used"], zero["independent"]["used"])
    assert not torch.equal(zero["independent"]["used"], one["independent"]["used"])
    assert equal(zero["independent"]["state"], one["independent"]["state"])
    assert zero["independent"]["steps"] == one["independent"]["steps"] == [1, 1]


def test_independent_masks_give_the_mean_of_the_ranks_gradients(two: Path) -> None:
    model, (x, y), order = ranks_cases.attached(), ranks_cases.pair(20), _order(20, 0, 0)
    model.train()
    for rank, index in enumerate(order.split(10)):
        for site in attachment.sites(model):
            site.sampler.step.fill_(rank * 2**31)
        pp.resample_(model)
        (0.5 * F.cross_entropy(model(x[index]), y[index])).backward()
    config = pp.Config()
    with torch.no_grad():
        for site in attachment.sites(model):
            assert site.mean.grad is not None
            assert site.gate.grad is not None
            site.mean.sub_(config.lr * site.mean.grad)
            site.gate.sub_(float(config.gate_lr or 0) * site.gate.grad)
        for p in attachment.rest_parameters(model):
            assert p.grad is not None
            p.sub_(config.lr * p.grad)
    assert close(dict(model.state_dict()), results(two, "draws")[0]["independent"]["state"])


def test_unknown_kind_of_masks_is_refused() -> None:
    with pytest.raises(ValueError, match="masks 'own' is unknown; use one of shared, independent"):
        pp.Config(masks="own")


def test_ranks_that_cannot_train_together_are_refused_in_one_sentence(two: Path) -> None:
    zero, one = results(two, "refusals")
    assert zero == one
    expected = {
        "batch": "batch_size 25 cannot be split over 2 ranks; choose a multiple of 2",
        "data": "rank 1 differs from rank 0 in its data",
        "masks": "rank 1 differs from rank 0 in its masks",
        "weights": "rank 1 differs from rank 0 in its weights",
        "prior": "rank 1 differs from rank 0 in its prior",
        "settings": "rank 1 differs from rank 0 in its settings",
        "checkpoint again": "rank 1 differs from rank 0 in its checkpoint (none and epoch 1, step 0)",
        "sampler": "the DataLoader has a DistributedSampler, which gives each of 2 ranks other batches",
    }
    assert zero["said"].keys() == expected.keys()
    for name, sentence in expected.items():
        assert zero["said"][name].startswith(sentence)
        assert "\n" not in zero["said"][name]
    assert zero["written"] == ["0.pt"]


def test_a_rank_that_dies_ends_the_job_and_the_next_start_goes_on(tmp_path: Path) -> None:
    began = time.monotonic()
    (code, said), (fatal, _) = run(tmp_path / "torn", "broken", FATAL="1")
    assert fatal == 7
    assert code == 1
    assert "rank 0 of 2 lost contact with the others, of which one has ended" in said
    assert "start all ranks again" in said
    assert time.monotonic() - began < 60
    stored = tmp_path / "torn" / "broken" / "broken.pt"
    assert stored.exists()
    kept = stored.read_bytes()

    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*launch, ranks_cases.__file__, str(tmp_path / "torn"), "broken"]
    again = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert all(code == 0 for code, _ in run(tmp_path / "whole", "broken"))
    torn, whole = results(tmp_path / "torn", "broken"), results(tmp_path / "whole", "broken")
    assert equal(torn[0]["state"], torn[1]["state"])
    assert equal(torn[0]["state"], whole[0]["state"])
    assert torn[0]["history"] == whole[0]["history"]

    # One process goes on from what two had stored.
    (tmp_path / "broken.pt").write_bytes(kept)
    alone = ranks_cases.broken(tmp_path)
    assert [row["epoch"] for row in alone["history"]] == [1, 2, 3]
    assert alone["history"][0] == whole[0]["history"][0]


def test_gradients_of_more_than_one_bucket_are_sent_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "_BUCKET", 100)

    class Done:
        def wait(self) -> None:
            """All ranks have the same gradients, so that the sum is twice this one's."""

    def all_reduce(flat: Tensor, async_op: bool = False) -> Done:
        sent.append(len(flat))
        flat.mul_(2)
        return Done()

    monkeypatch.setattr(ranks.dist, "all_reduce", all_reduce)
    model = ranks_cases.net()
    plain = copy.deepcopy(model)
    x, y = ranks_cases.pair(20)
    gradients = ranks.Gradients(list(model.parameters()))
    with gradients.overlapped():
        F.cross_entropy(model(x), y).backward()
        before = len(sent)
    gradients.sum_()
    F.cross_entropy(plain(x), y).backward()
    assert before == len(sent) == 3
    assert sent == [3 + 96 + 2, 32 + 1, 256 + 1]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, 2 * q.grad)
        assert not p._post_accumulate_grad_hooks


def test_alone_nothing_is_asked_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process by itself has nobody to ask")

    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "monitored_barrier"):
        monkeypatch.setattr(ranks.dist, name, never)
    ranks_cases.gates(Path())
    assert (ranks.world(), ranks.rank(), ranks.part(5), ranks.on_rank0(lambda: 3)) == (1, 0, (0, 5), 3)
    with ranks.joined() as device:
        assert device == torch.device("cpu")
