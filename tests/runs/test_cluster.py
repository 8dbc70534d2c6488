"""Sweeps on a real Ray cluster of two nodes: whatever is killed, every run is finished, once, and as without Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacprune.runs import cluster, commands, locks, store, sweep

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
FILES = ("model.safetensors", "metrics.jsonl", "config.toml")
SLOW = 400
"""Epochs of dense training on a small part of the digits: some seconds, in which something can be killed."""
DRIVER = """
import sys
from pathlib import Path
from pacprune.runs import cluster, sweep
try:
    found = sweep.run(Path(sys.argv[1]), out=Path(sys.argv[2]), work=cluster.on(sys.argv[3]))
except ValueError as failure:
    sys.exit(str(failure))
sys.exit(found["finished"] != len(found["runs"]))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes with one CPU each; a dead one is noticed after a second instead of half a minute."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 5}
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": quick})
    made.add_node(**NODE)
    yield made
    made.shutdown()


@pytest.fixture
def driver(nodes: Any, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts `pacprune sweep` on the cluster, as a process that can be killed."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DRIVER, tmp_path / "mine.toml", tmp_path / "out", nodes.address]
        with (tmp_path / f"driver-{len(started)}.txt").open("wb") as said:
            started.append(subprocess.Popen(command, stderr=said, stdout=said))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def asked(tmp_path: Path, seeds: int, more: str = "") -> list[sweep.Entry]:
    fixed = f'command = "osp"\nprior_fraction = 0.1\ntrain_on = "prior"\nepochs = 1\ndense_epochs = {SLOW}\n'
    (tmp_path / "mine.toml").write_text(f"{fixed}[grid]\nseed = {list(range(seeds))}\n{more}")
    return sweep.read(tmp_path / "mine.toml").entries


def until(happened: Callable[[], Any], seconds: float = 180) -> Any:
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def running(out: Path, entries: list[sweep.Entry], under: Callable[[int], bool] = lambda _: True) -> sweep.Entry | None:
    """A run that has some epochs behind it, on a worker that is one of those asked for."""
    for entry in entries:
        now = locks.state(out, entry.name)
        if now["state"] == "running" and now.get("epoch", 0) > 5 and under(worker(out, entry)):
            return entry
    return None


def worker(out: Path, entry: sweep.Entry) -> int:
    return [line["pid"] for line in locks.lines(out, entry.name) if line["event"] == "begun"][-1]


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat")
    return int(stat.read_text().rpartition(")")[2].split()[1]) if stat.exists() else 0


def begun(out: Path, entry: sweep.Entry) -> list[int]:
    """The first epoch that is told after every beginning of a run."""
    found: list[int] = []
    fresh = False
    for line in locks.lines(out, entry.name):
        if line["event"] == "running" and fresh:
            found.append(line["epoch"])
        fresh = line["event"] == "begun"
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs without Ray."""
    folder = tmp_path_factory.mktemp("alone")
    for entry in asked(folder, 3):
        commands.execute("osp", entry.options, commands.single, out=folder / entry.name, progress=lambda *_: None)
    return folder


def assert_as_without_ray(out: Path, entries: list[sweep.Entry], alone: Path) -> None:
    for entry in entries:
        assert [line["event"] for line in locks.lines(out, entry.name)].count("finished") == 1
        expected = store.result(alone / entry.name)
        assert store.result(out / entry.name) == {**expected, "folder": str(out / entry.name)}
        for name in FILES:
            assert (out / entry.name / name).read_bytes() == (alone / entry.name / name).read_bytes()
        assert not (out / entry.name / store.CHECKPOINTS).exists()


def test_a_driver_and_a_worker_that_are_killed_lose_nothing(driver: Any, alone: Path, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", asked(tmp_path, 3)
    first = driver()
    done = until(lambda: next((entry for entry in entries if (out / entry.name / "result.json").exists()), None))
    stored = (out / done.name / "result.json").stat().st_mtime_ns
    until(lambda: running(out, entries))
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = driver()
    hit = until(lambda: running(out, entries, lambda pid: parent(pid) > 1))
    os.kill(worker(out, hit), signal.SIGKILL)
    assert second.wait(180) == 0, (tmp_path / "driver-1.txt").read_text()
    assert (out / done.name / "result.json").stat().st_mtime_ns == stored
    assert len(begun(out, done)) == 1
    assert len(begun(out, hit)) > 1
    assert all(epoch > 5 for epoch in begun(out, hit)[1:])  # it went on from a checkpoint
    assert_as_without_ray(out, entries, alone)


def test_a_run_whose_workers_die_too_often_has_failed(driver: Any, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", asked(tmp_path, 1, "[ray]\nmax_retries = 0\n")
    started = driver()
    until(lambda: running(out, entries))
    os.kill(worker(out, entries[0]), signal.SIGKILL)
    assert started.wait(180) == 1
    found = sweep.status(out)
    assert found["failed"] == 1
    assert found["runs"][0]["reason"].startswith("its workers died 1 times (WorkerCrashedError); see the logs of Ray")


def test_what_a_worker_refuses_is_told_and_nothing_is_written(driver: Any, tmp_path: Path) -> None:
    asked(tmp_path, 1, "sparsity = [0.9, 1.5]\n")
    assert driver().wait(180) == 1
    said = (tmp_path / "driver-0.txt").read_text().splitlines()[-1]
    assert said.startswith("sparsity 1.5 is outside [0, 1)")
    assert not (tmp_path / "out").exists()


def test_a_node_that_is_killed_loses_nothing(nodes: Any, driver: Any, alone: Path, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", asked(tmp_path, 3)
    (node,) = (node for node in nodes.list_all_nodes() if node is not nodes.head_node)
    (raylet,) = (made.process.pid for made in node.all_processes["raylet"])
    started = driver()
    hit = until(lambda: running(out, entries, lambda pid: parent(pid) == raylet))
    lost = worker(out, hit)
    nodes.remove_node(node, allow_graceful=False)
    assert started.wait(180) == 0, (tmp_path / "driver-0.txt").read_text()
    assert not Path(f"/proc/{lost}").exists()
    first, *later = begun(out, hit)
    assert later
    assert min(later) > 5 > first
    assert_as_without_ray(out, entries, alone)


def test_a_cluster_that_is_not_there_is_refused(tmp_path: Path) -> None:
    asked(tmp_path, 1)
    for address in ("127.0.0.1:9", "nowhere.invalid:6379"):
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"):
            sweep.run(tmp_path / "mine.toml", out=tmp_path / "out", work=cluster.on(address))
    assert not (tmp_path / "out").exists()
