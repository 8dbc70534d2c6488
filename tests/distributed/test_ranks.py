"""Two gloo processes on this CPU against one: the same masks to the bit, the same weights up to rounding."""

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
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
    *("population", "images", "unused", "pft", "posterior", "wrapped", "wrapped_gradual"),
]
"""Cases in which two ranks train what one process trains."""
ALL = [*EQUAL, "norm", "pbp", "certificate", "draws", "refusals", "broken"]
LIMIT = ranks._PATIENCE.total_seconds() / 2
"""Seconds after which a test gives up: a dead rank has to be noticed at once, not after the ranks' patience."""


Run = Callable[..., list[tuple[int, str]]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def forking(*modules: str) -> Iterator[Run]:
    """run(folder, "dense", world=2) runs cases of the first module on so many ranks; returns codes and outputs."""
    command = [sys.executable, "-W", "error", forks.__file__, *modules]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(folder: Path, *cases: str, world: int = 2, **extra: str) -> list[tuple[int, str]]:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
            folder.mkdir(exist_ok=True)
            request = {"folder": str(folder), "cases": cases, "limit": LIMIT, "env": variables | extra}
            print(json.dumps(request), file=requests, flush=True)
            codes = json.loads(answers.readline())
            return [(code, forks.log(folder, rank).read_text()) for rank, code in enumerate(codes)]

        yield run


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forking("ranks_cases", "torch._dynamo") as run:
        yield run


def results(folder: Path, case: str, world: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}-{rank}.result", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def two(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases after two ranks ran them."""
    folder = tmp_path_factory.mktemp("two")
    for code, output in run(folder, *ALL):
        assert code == 0, output
    return folder


def close(first: dict[str, Tensor], second: dict[str, Tensor], most: float = 1e-5) -> bool:
    """Whether tensors differ by at most this, relative to their largest number."""
    assert first.keys() == second.keys()
    return all(
        float((t.double() - second[n].double()).abs().max()) <= most * max(float(t.double().abs().max()), 1e-30)
        for n, t in first.items()
    )


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[n]) for n, t in first.items())


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_train_what_one_process_trains(two: Path, tmp_path: Path, case: str) -> None:
    single = getattr(ranks_cases, case)(tmp_path)
    rank0, rank1 = results(two, case)
    assert equal(rank0["state"], rank1["state"])
    assert close(single["state"], rank0["state"])
    assert equal(single.get("mask", {}), rank0.get("mask", {}))
    assert rank0["history"] == rank1["history"]
    for row, other in zip(single["history"], rank0["history"], strict=True):
        numbers, others = ({k: v for k, v in pair.items() if k != "stage"} for pair in (row, other))
        assert others == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_the_ranks_share_batchnorms_statistics_and_the_decision_to_stop(two: Path) -> None:
    rank0, rank1 = results(two, "norm")
    assert equal(rank0["state"], rank1["state"])
    assert rank0["history"] == rank1["history"]


def test_pbp_ends_with_one_certificate_for_all_ranks(two: Path) -> None:
    rank0, rank1 = results(two, "pbp")
    assert rank0["posterior"] == rank1["posterior"]
    assert rank0["record"] == rank1["record"]
    assert rank0["history"] == rank1["history"]
    assert (two / "pbp" / "pbp" / "prior.safetensors").exists()


def test_three_ranks_do_not_change_frozen_values_by_a_bit(run: Run, tmp_path: Path) -> None:
    assert [code for code, _ in run(tmp_path, "thirds", world=3)] == [0, 0, 0]
    rank0, rank1, rank2 = results(tmp_path, "thirds", world=3)
    assert rank0["record"] == rank1["record"] == rank2["record"]
    assert equal(rank0["state"], rank2["state"])
    assert close(ranks_cases.thirds(tmp_path)["state"], rank0["state"])


def test_two_ranks_share_the_draws_of_a_certificate_and_issue_that_of_one_process(two: Path, tmp_path: Path) -> None:
    single, (rank0, rank1) = ranks_cases.certificate(tmp_path), results(two, "certificate")
    assert single["record"] == rank0["record"] == rank1["record"]
    assert single["last"] == rank0["last"] == rank1["last"]
    for name, tensors in single["tensors"].items():
        assert equal(tensors, rank0["tensors"][name])
        assert equal(tensors, rank1["tensors"][name])


def test_shared_masks_are_equal_on_all_ranks_and_independent_ones_differ(two: Path, tmp_path: Path) -> None:
    single, (rank0, rank1) = ranks_cases.draws(tmp_path), results(two, "draws")
    assert torch.equal(single["shared"]["used"], rank0["shared"]["used"])
    assert torch.equal(rank0["shared"]["used"], rank1["shared"]["used"])
    assert torch.equal(single["independent"]["used"], rank0["independent"]["used"])
    assert not torch.equal(rank0["independent"]["used"], rank1["independent"]["used"])
    assert equal(rank0["independent"]["state"], rank1["independent"]["state"])
    assert rank0["independent"]["steps"] == rank1["independent"]["steps"] == [1, 1]


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
            site.sampler.step.fill_(1)
        for p in attachment.rest_parameters(model):
            assert p.grad is not None
            p.sub_(config.lr * p.grad)
    assert close(dict(model.state_dict()), results(two, "draws")[0]["independent"]["state"])


def test_unknown_kind_of_masks_is_refused() -> None:
    with pytest.raises(ValueError, match="masks 'own' is unknown; use one of shared, independent"):
        pp.Config(masks="own")


def test_ranks_that_cannot_train_together_are_refused_in_one_sentence(two: Path) -> None:
    rank0, rank1 = results(two, "refusals")
    assert rank0 == rank1
    expected = {
        "batch": "batch_size 25 cannot be split over 2 ranks; choose a multiple of 2",
        "data": "rank 1 differs from rank 0 in its data",
        "masks": "rank 1 differs from rank 0 in its masks",
        "weights": "rank 1 differs from rank 0 in its weights",
        "prior": "rank 1 differs from rank 0 in its prior",
        "settings": "rank 1 differs from rank 0 in its settings",
        "checkpoint again": "rank 1 differs from rank 0 in its checkpoint (none and epoch 1, step 0)",
        "pruner": "rank 1 differs from rank 0 in its weights",
        "sampler": "the DataLoader has a DistributedSampler, which gives each of 2 ranks other batches",
    }
    assert rank0["messages"].keys() == expected.keys()
    for name, sentence in expected.items():
        assert rank0["messages"][name].startswith(sentence)
        assert "\n" not in rank0["messages"][name]
    assert rank0["written"] == ["0.pt"]


def test_a_dying_rank_ends_the_job_and_the_next_start_resumes(run: Run, two: Path, tmp_path: Path) -> None:
    (code, output), (killed_code, _) = run(tmp_path / "torn", "broken", FATAL="1")
    assert killed_code == 7
    assert code == 1
    assert "rank 0 of 2 lost contact with the others, of which one has ended" in output
    assert "start all ranks again" in output

    stored = tmp_path / "torn" / "broken" / "broken.pt"
    assert stored.exists()
    content = stored.read_bytes()

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, ranks_cases.__file__, str(tmp_path / "torn"), "broken"]
    again = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    resumed, whole = results(tmp_path / "torn", "broken"), results(two, "broken")
    assert equal(resumed[0]["state"], resumed[1]["state"])
    assert equal(resumed[0]["state"], whole[0]["state"])
    assert resumed[0]["history"] == whole[0]["history"]

    # One process resumes from the checkpoint of two.
    (tmp_path / "broken.pt").write_bytes(content)
    single = ranks_cases.broken(tmp_path)
    assert [row["epoch"] for row in single["history"]] == [1, 2, 3]
    assert single["history"][0] == whole[0]["history"][0]


def test_gradients_of_more_than_one_bucket_are_sent_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "_BUCKET", 100)

    class Handle:
        def wait(self) -> None:
            """All ranks have the same gradients, so that the sum is twice this one's."""

    def all_reduce(flat: Tensor, async_op: bool = False) -> Handle:
        sent.append(len(flat))
        flat.mul_(2)
        return Handle()

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


def test_a_single_process_never_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a single process has no other ranks")

    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "monitored_barrier"):
        monkeypatch.setattr(ranks.dist, name, never)
    ranks_cases.gates(Path())
    assert (ranks.world(), ranks.rank(), ranks.part(5), ranks.on_rank0(lambda: 3)) == (1, 0, (0, 5), 3)
    with ranks.joined() as device:
        assert device == torch.device("cpu")
