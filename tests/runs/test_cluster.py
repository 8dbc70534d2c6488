"""Sweeps on a real Ray cluster of two nodes: whatever is killed, every run is finished once, as without Ray.

No test depends on speed: a run that will be killed waits until then.
"""

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
EPOCHS, HELD = 12, 6
"""Dense epochs of a run, and the epoch in which it waits while the test holds it."""
LIMIT = 600.0
"""Seconds after which a test gives up waiting."""
DRIVER = """
import sys, time
from pathlib import Path
from pacprune.runs import cluster, locks, sweep

file, out, held = map(Path, sys.argv[1:4])

def task(folder, command, entry, last=HELD):
    watch = locks.watch

    def holding(notes):
        progress = watch(notes)

        def update(stage, done, total, row):
            progress(stage, done, total, row)
            while stage == "dense" and row.get("epoch", 0) >= last and (held / entry.name).exists():
                time.sleep(0.05)

        return update

    locks.INTERVAL, locks.watch = 0.0, holding
    try:
        return original(folder, command, entry)
    finally:
        locks.watch = watch

original, cluster._task = cluster._task, task
try:
    status = sweep.run(file, out=out, work=cluster.work_at(sys.argv[4]))
except ValueError as failure:
    sys.exit(str(failure))
sys.exit(status["finished"] != len(status["runs"]))
""".replace("HELD", str(HELD))
"""A sweep whose runs note every step, and wait in the middle while a file has their name."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes with one CPU each. A dead one is noticed in ten seconds: on a busy machine a live one may pause.

    Workers are as important as what else the machine does; else they would wait for it.
    """
    settings = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 20,
        "worker_niceness": 0,
    }
    ray_cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": settings}
    )
    ray_cluster.add_node(**NODE)
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.fixture
def driver(nodes: Any, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts `pacprune sweep` on the cluster, as a process that can be killed."""
    drivers = []

    def start() -> subprocess.Popen[bytes]:
        paths = [tmp_path / name for name in ("mine.toml", "out", "held")]
        with (tmp_path / f"driver-{len(drivers)}.txt").open("wb") as output:
            command = [sys.executable, "-c", DRIVER, *paths, nodes.address]
            drivers.append(subprocess.Popen(command, stderr=output, stdout=output))
        return drivers[-1]

    yield start
    for process in drivers:
        process.kill()
        process.wait()


def hold(tmp_path: Path, entries: list[sweep.Entry]) -> None:
    """Makes these runs wait in the middle."""
    (tmp_path / "held").mkdir(exist_ok=True)
    for entry in entries:
        (tmp_path / "held" / entry.name).touch()


def release(tmp_path: Path) -> None:
    """Lets all runs go on."""
    for path in (tmp_path / "held").iterdir():
        path.unlink()


def write_sweep(tmp_path: Path, seeds: int, more: str = "") -> list[sweep.Entry]:
    fixed = f'command = "osp"\nprior_fraction = 0.1\ntrain_on = "prior"\nepochs = 1\ndense_epochs = {EPOCHS}\n'
    (tmp_path / "mine.toml").write_text(f"{fixed}[grid]\nseed = {list(range(seeds))}\n{more}")
    return sweep.read(tmp_path / "mine.toml").entries


def until(condition: Callable[[], Any]) -> Any:
    """Waits until `condition` returns a true value, and returns it; fails after LIMIT."""
    end = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.05)
    return value


def waiting_run(
    out: Path, entries: list[sweep.Entry], accepts: Callable[[int], bool] = lambda _: True
) -> sweep.Entry | None:
    """A run that waits in the middle, on a worker whose pid `accepts` is true of."""
    for entry in entries:
        # One reading of the log: the state alone would mix a new worker's lock with an old worker's last line.
        lines = locks.lines(out, entry.name)
        starts = [number for number, line in enumerate(lines) if line["event"] == "begun"]
        waits = starts and accepts(lines[starts[-1]]["pid"]) and lines[-1].get("epoch", 0) >= HELD
        if waits and locks.state(out, entry.name)["state"] == "running":
            return entry
    return None


def worker(out: Path, entry: sweep.Entry) -> int:
    return [line["pid"] for line in locks.lines(out, entry.name) if line["event"] == "begun"][-1]


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat")
    return int(stat.read_text().rpartition(")")[2].split()[1]) if stat.exists() else 0


def first_epochs(out: Path, entry: sweep.Entry) -> list[int]:
    """The first epoch in the log after each start of a run."""
    epochs: list[int] = []
    fresh = False
    for line in locks.lines(out, entry.name):
        if line["event"] == "running" and fresh:
            epochs.append(line["epoch"])
        fresh = line["event"] == "begun"
    return epochs


@pytest.fixture(scope="module")
def reference_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs without Ray."""
    folder = tmp_path_factory.mktemp("alone")
    for entry in write_sweep(folder, 3):
        commands.execute("osp", entry.options, commands.single, out=folder / entry.name, progress=lambda *_: None)
    return folder


def assert_as_without_ray(out: Path, entries: list[sweep.Entry], reference_runs: Path) -> None:
    for entry in entries:
        assert [line["event"] for line in locks.lines(out, entry.name)].count("finished") == 1
        expected = store.result(reference_runs / entry.name)
        assert store.result(out / entry.name) == {**expected, "folder": str(out / entry.name)}
        for name in FILES:
            assert (out / entry.name / name).read_bytes() == (reference_runs / entry.name / name).read_bytes()
        assert not (out / entry.name / store.CHECKPOINTS).exists()


def test_killing_a_driver_and_a_worker_loses_nothing(driver: Any, reference_runs: Path, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", write_sweep(tmp_path, 3)
    finished, killed, last = entries
    hold(tmp_path, [killed, last])
    first = driver()
    until((out / finished.name / "result.json").exists)
    written = (out / finished.name / "result.json").stat().st_mtime_ns
    until(lambda: waiting_run(out, [killed]) and waiting_run(out, [last]))
    first.kill()
    first.wait()
    # Ray ends the workers of a dead driver.
    until(lambda: all(locks.state(out, entry.name)["state"] == "waiting" for entry in (killed, last)))
    before = worker(out, killed)
    second = driver()
    until(lambda: waiting_run(out, [killed], lambda pid: pid != before))
    os.kill(worker(out, killed), signal.SIGKILL)
    release(tmp_path)
    assert second.wait(LIMIT) == 0, (tmp_path / "driver-1.txt").read_text()
    assert (out / finished.name / "result.json").stat().st_mtime_ns == written
    assert len(first_epochs(out, finished)) == 1
    assert len(first_epochs(out, killed)) == 3
    assert len(first_epochs(out, last)) == 2
    assert min(first_epochs(out, killed)[1:] + first_epochs(out, last)[1:]) >= HELD  # they went on from a checkpoint
    assert_as_without_ray(out, entries, reference_runs)


def test_a_run_whose_workers_die_too_often_has_failed(driver: Any, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", write_sweep(tmp_path, 1, "[ray]\nmax_retries = 0\n")
    hold(tmp_path, entries)
    process = driver()
    until(lambda: waiting_run(out, entries))
    os.kill(worker(out, entries[0]), signal.SIGKILL)
    assert process.wait(LIMIT) == 1
    status = sweep.status(out)
    assert status["failed"] == 1
    assert status["runs"][0]["reason"].startswith("its workers died 1 times (WorkerCrashedError); see the logs of Ray")


def test_a_workers_refusal_is_reported_and_nothing_is_written(driver: Any, tmp_path: Path) -> None:
    write_sweep(tmp_path, 1, "sparsity = [0.9, 1.5]\n")
    assert driver().wait(LIMIT) == 1
    message = (tmp_path / "driver-0.txt").read_text().splitlines()[-1]
    assert message.startswith("sparsity 1.5 is outside [0, 1)")
    assert not (tmp_path / "out").exists()


def test_killing_a_node_loses_nothing(nodes: Any, driver: Any, reference_runs: Path, tmp_path: Path) -> None:
    out, entries = tmp_path / "out", write_sweep(tmp_path, 3)
    (node,) = (node for node in nodes.list_all_nodes() if node is not nodes.head_node)
    (raylet,) = (process_info.process.pid for process_info in node.all_processes["raylet"])
    hold(tmp_path, entries)
    process = driver()
    moved = until(lambda: waiting_run(out, entries, lambda pid: parent(pid) == raylet))
    lost_pid = worker(out, moved)
    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(**NODE)  # as many as the other tests expect
    until(lambda: not Path(f"/proc/{lost_pid}").exists())
    release(tmp_path)
    assert process.wait(LIMIT) == 0, (tmp_path / "driver-0.txt").read_text()
    first, *later = first_epochs(out, moved)
    assert first == 0
    assert later
    assert min(later) >= HELD
    assert_as_without_ray(out, entries, reference_runs)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    write_sweep(tmp_path, 1)
    for address in ("127.0.0.1:9", "nowhere.invalid:6379"):
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"):
            sweep.run(tmp_path / "mine.toml", out=tmp_path / "out", work=cluster.work_at(address))
    assert not (tmp_path / "out").exists()
