"""Sweeps on this machine: the same folders as those of single runs, each made once, and errors for bad files."""

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from pacprune.cli.actions import sweep as sweep_command
from pacprune.runs import cluster, commands, locks, options, store, sweep, sweep_table

FIXED = "dense_epochs = 1\nepochs = 2\n"
POSTERIOR, PAID = "posterior_epochs = 1\ndraws = 20\n", "grid = [2]\n"
TWO = "[grid]\nsparsity = [0.9, 0.95]\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def few_reports(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draws the report of one command only: a report takes longer than so small a run."""
    if "[pft]" not in request.node.name:
        monkeypatch.setattr(commands.report, "write", lambda *_: None)


def write_sweep(*parts: str, command: str = "osp", name: str = "mine.toml") -> Path:
    Path(name).write_text(f'command = "{command}"\n' + "".join(parts))
    return Path(name)


def quiet(*_: Any) -> None:
    """A progress that does nothing."""


def single(command: str, entry: sweep.Entry, out: Path) -> dict[str, Any]:
    return commands.execute(command, entry.options, commands.single, out=out, progress=quiet)


def events(folder: Path, name: str, event: str) -> list[dict[str, Any]]:
    return [line for line in locks.lines(folder, name) if line["event"] == event]


def assert_alike(actual: Any, expected: Any) -> None:
    """Equal, numbers up to rounding."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_alike(actual[key], expected[key])
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_alike(actual_item, expected_item)
    else:
        assert actual == (pytest.approx(expected, rel=1e-3, abs=1e-6) if isinstance(expected, float) else expected)


# --- Finished sweeps.


@pytest.mark.usefixtures("few_reports")
@pytest.mark.parametrize("command", sweep.COMMANDS)
def test_a_population_leaves_what_single_runs_leave(command: str, tmp_path: Path) -> None:
    more = (FIXED, POSTERIOR, TWO, PAID) if command == "pbp" else (FIXED, TWO)
    plan = sweep.read(write_sweep(*more, command=command))
    status = sweep.run(Path("mine.toml"))
    assert (status["folder"], status["finished"], len(status["runs"])) == ("runs/mine", 2, 2)
    for entry, row in zip(plan.entries, status["runs"], strict=True):
        assert row["point"]["sparsity"] == entry.options.sparsity
        assert row["route"] == "population of 2"
        alone, here = tmp_path / entry.name, Path("runs/mine") / entry.name
        expected = single(command, entry, alone)
        result = store.result(here)
        assert result.pop("route") == "population of 2"
        assert {f.relative_to(here) for f in here.rglob("*")} == {f.relative_to(alone) for f in alone.rglob("*")}
        assert (here / "config.toml").read_bytes() == (alone / "config.toml").read_bytes()
        assert_alike(store.metrics(here), store.metrics(alone))
        state, other = load_file(here / "model.safetensors"), load_file(alone / "model.safetensors")
        for name, tensor in other.items():
            assert torch.equal(state[name] == 0, tensor == 0)
            torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5)
        if command == "pbp":  # its 20 draws follow from Q to the bit
            assert result["certificate"] == pytest.approx(expected["certificate"], abs=0.1)
            assert result["kl"] == pytest.approx(expected["kl"], rel=1e-3)
            assert store.certificate(here).is_dir()
        else:
            assert_alike({**result, "folder": ""}, {**expected, "folder": ""})


def test_a_run_outside_a_population_is_the_single_run_to_the_bit(tmp_path: Path) -> None:
    plan = sweep.read(write_sweep(FIXED, "[grid]\nseed = [0, 1]\n"))
    status = sweep.run(Path("mine.toml"), out=tmp_path / "out")
    assert [row["route"] for row in status["runs"]] == ["alone", "alone"]
    for entry in plan.entries:
        expected = single("osp", entry, tmp_path / entry.name)
        assert store.result(tmp_path / "out" / entry.name) == {
            **expected,
            "folder": str(tmp_path / "out" / entry.name),
        }
        for name in ("model.safetensors", "metrics.jsonl", "config.toml"):
            assert (tmp_path / "out" / entry.name / name).read_bytes() == (tmp_path / entry.name / name).read_bytes()


@pytest.mark.usefixtures("few_reports")
def test_finished_runs_are_skipped_even_those_of_single_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweep.read(write_sweep(FIXED, TWO))
    single("osp", plan.entries[0], Path("out") / plan.entries[0].name)
    status = sweep.run(Path("mine.toml"), out=Path("out"))
    assert [row["route"] for row in status["runs"]] == ["alone", "alone"]
    monkeypatch.setattr(commands, "prepare", lambda _: pytest.fail("a finished run was begun again"))
    assert sweep.run(Path("mine.toml"), out=Path("out")) == status


def test_runs_are_grouped_by_what_they_share() -> None:
    grid = "[grid]\nseed = [0, 1]\nepochs = [1, 2]\nlr = [0.1, 0.2]\ncriterion = ['magnitude', 'snip', 'random']\n"
    chunks = sweep._chunks(sweep.read(write_sweep(grid)), Path("out"))
    assert [len(chunk) for chunk in chunks] == [6] * 4
    for chunk in chunks:
        assert len({(entry.options.seed, entry.options.epochs) for entry in chunk}) == 1
    many = f"[grid]\nsparsity = {[k / 100 for k in range(50, 70)]}\n"
    assert [len(chunk) for chunk in sweep._chunks(sweep.read(write_sweep(many)), Path("out"))] == [8, 8, 4]


@pytest.mark.usefixtures("few_reports")
def test_every_split_has_its_own_population(tmp_path: Path) -> None:
    plan = sweep.read(write_sweep(FIXED, TWO, "split_seed = [0, 1]\n"))
    status = sweep.run(Path("mine.toml"))
    assert {row["route"] for row in status["runs"]} == {"population of 2"}
    for entry in plan.entries:
        expected, result = single("osp", entry, tmp_path / entry.name), store.result(Path("runs/mine") / entry.name)
        assert result["split_seed"] == entry.point["split_seed"]
        assert_alike(result, {**expected, "folder": result["folder"], "route": "population of 2"})
        assert_alike(store.metrics(Path("runs/mine") / entry.name), store.metrics(tmp_path / entry.name))


@pytest.mark.parametrize("command", sweep.COMMANDS)
def test_what_data_and_network_are_made_of_is_shared_by_a_population(command: str) -> None:
    kind, used = options.COMMANDS[command], set()

    class Watched(kind):
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    watched = Watched()
    split, _ = commands.prepare(watched)
    commands.training_part(watched, split)
    needed = used & set(options.types_of(kind))
    assert {"data", "data_dir", "split_seed", "prior_fraction", "seed", "model", "device"} <= needed
    assert needed <= set(options.shared(kind()))
    assert ("unlabelled" if command == "pbp" else "train_on") in needed


@pytest.mark.usefixtures("few_reports")
def test_equal_dense_networks_are_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    monkeypatch.setattr(sweep, "fit", lambda model, *a, fit=sweep.fit, **k: models.append(model) or fit(model, *a, **k))
    sweep.run(write_sweep(FIXED, TWO, "gate_lr = [1.0, 2.0]\n", command="pft"))
    assert len(models) == 1
    assert isinstance(models[0], torch.nn.Module)
    sweep.run(write_sweep(FIXED, TWO, "lr = [0.05, 0.2]\n", name="rates.toml"))
    assert len(models[1]) == 2


# --- Failures.


@pytest.mark.usefixtures("few_reports")
def test_the_failure_of_one_run_does_not_stop_the_others() -> None:
    status = sweep.run(write_sweep(FIXED, "[grid]\nlr = [0.1, 1e30, 0.2]\n"))
    good, bad, last = status["runs"]
    assert (good["state"], last["state"], status["failed"]) == ("finished", "finished", 1)
    assert bad["state"] == "failed"
    assert bad["reason"].startswith("the loss became")
    assert sorted(f.name for f in Path("runs/mine").iterdir()) == sorted(
        ["log", "sweep.toml", good["run"], last["run"]]
    )
    assert len(events(Path("runs/mine"), good["run"], "finished")) == 1
    assert sweep.status(Path("runs/mine")) == status


@pytest.mark.usefixtures("few_reports")
def test_an_unexpected_error_is_noted_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(commands, "single", broken)
    status = sweep.run(write_sweep(FIXED, "[grid]\nseed = [3]\n"))
    assert status["runs"][0]["reason"] == "RuntimeError: out of luck"
    assert "in broken" in events(Path("runs/mine"), status["runs"][0]["run"], "failed")[0]["traceback"]


@pytest.mark.usefixtures("few_reports")
@pytest.mark.parametrize("stage", ["dense", "masks", "tune", "stored"])
def test_an_interrupted_population_resumes_to_the_bit(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sweep('dense_epochs = 2\nepochs = 4\nrecipe = "coupled"\n', TWO, command="pft")
    calls: list[str] = []
    stop = ""

    def watch(_: Any) -> Any:
        def progress(name: str, done: int, total: int, row: Any) -> None:
            calls.append(name)
            if name == stop and done > total // 2:
                raise KeyboardInterrupt

        return progress

    def finish(folder: Path, result: Any, finish: Any = store.finish) -> None:
        if stop == "stored" and list(Path("broken").glob("*/result.json")):  # one run is stored, the other is not
            raise KeyboardInterrupt
        finish(folder, result)

    monkeypatch.setattr(locks, "watch", watch)
    monkeypatch.setattr(store, "finish", finish)
    whole = sweep.run(path, out=Path("whole"))
    needed, stop = len(calls), stage
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(path, out=Path("broken"))
    assert sweep.status(Path("broken"))["finished"] == (stage == "stored")
    stop = ""
    assert sweep.run(path, out=Path("broken"))["runs"] == whole["runs"]
    assert len(calls) <= needed + 13  # an epoch calls progress for each of its 12 steps and at its end
    for row in whole["runs"]:
        for name in ("model.safetensors", "metrics.jsonl"):
            assert Path("broken", row["run"], name).read_bytes() == Path("whole", row["run"], name).read_bytes()
        assert len(events(Path("broken"), row["run"], "finished")) == 1
    assert not Path("broken", sweep.POPULATIONS).exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sparsity = ", r"mine.toml cannot be read \(Invalid value \(at end of document\)\)"),
        ('command = "osp"\nlr = = 1', r"cannot be read .*line 2"),
        (TWO, "in mine.toml, command None is unknown; use one of osp, pft"),
        ('command = "demo"\n' + TWO, "in mine.toml, command 'demo' is unknown"),
        ('command = "osp"', r"\[grid\] in mine.toml is missing; add a table of lists"),
        ('command = "osp"\ngrid = 3', r"\[grid\] in mine.toml is 3"),
        ('command = "osp"\nsparsty = 0.9\n' + TWO, "mine.toml has an unknown key 'sparsty'"),
        ('command = "osp"\ndense-epochs = 2\n' + TWO, "unknown key 'dense-epochs'; did you mean dense_epochs?"),
        ('command = "osp"\n[grid]\nrecipe = ["paper"]', "unknown key 'recipe'"),
        ('command = "osp"\n[grid]\nsparsity = 0.9', r"sparsity in \[grid\] of mine.toml is 0.9; it must be a list"),
        ('command = "osp"\n[grid]\nsparsity = []', "must be a list of at least one value"),
        ('command = "osp"\n[grid]\nsparsity = ["high"]', "sparsity in mine.toml is 'high', but it must be a float"),
        ('command = "osp"\nsparsity = 0.5\n' + TWO, "is 0.5 and also in"),
        ('command = "osp"\n[grid]\nsparsity = [0.9, 0.9]', "names a value twice"),
        ('command = "pbp"\ncommit = true\n' + TWO, "commit in mine.toml would stop every run at its first seal"),
        ('command = "osp"\n[grid]\ndevice = ["cpu", "cuda"]', "the same run more than once"),
        ('command = "osp"\n[grid]\nsparsity = [0.9, 1.5]', "sparsity .*1.5"),
        ('command = "osp"\ncriterion = "best"\n' + TWO, "'best' is unknown"),
        ('command = "osp"\ndata_dir = "none"\n' + TWO, "none does not exist"),
        (
            'command = "pbp"\n' + TWO + "grid = [1]",
            "asks for 2 certificates on the same examples, but grid is 1, so that",
        ),
        ('command = "osp"\nray = 2\n' + TWO, "ray in mine.toml is 2, but it must be a table"),
        ('command = "osp"\n' + TWO + "[ray]\ncpus = 2", "unknown key 'cpus'; use one of num_cpus, num_gpus"),
        ('command = "osp"\n' + TWO + "[ray]\nnum_cpus = -1", r"num_cpus in \[ray\] of mine.toml is -1.0"),
    ],
)
def test_a_bad_file_is_refused_and_nothing_is_written(content: str, words: str) -> None:
    Path("mine.toml").write_text(content)
    with pytest.raises(ValueError, match=words) as refusal:
        sweep.run(Path("mine.toml"))
    assert "\n" not in str(refusal.value)
    assert [f.name for f in Path().iterdir()] == ["mine.toml"]


def test_certificates_on_the_same_examples_pay_for_a_choice_among_all() -> None:
    Path("mine.toml").write_text('command = "pbp"\n' + TWO + 'data = ["digits", "mnist"]\n')
    assert [entry.options.grid for entry in sweep.read(Path("mine.toml")).entries] == [2, 2, 2, 2]


def test_folders_of_other_runs_and_missing_files_are_refused() -> None:
    path = write_sweep(FIXED, TWO)
    for folder in (Path("run"), Path("out") / sweep.read(path).entries[0].name):
        store.begin(folder, "osp", options.Osp(seed=5))
    with pytest.raises(ValueError, match="run is a file or the folder of one run; choose another --out"):
        sweep.run(path, out=Path("run"))
    with pytest.raises(ValueError, match="belongs to another run"):
        sweep.run(path, out=Path("out"))
    with pytest.raises(ValueError, match=r"out holds no sweep.toml"):
        sweep.status(Path("out"))
    with pytest.raises(ValueError, match="none does not exist; name the folder of a sweep"):
        sweep.status(Path("none"))
    with pytest.raises(ValueError, match=r"the sweep file none.toml cannot be read"):
        sweep.run(Path("none.toml"))


def test_the_device_of_the_call_replaces_that_of_the_file() -> None:
    plan = sweep.read(write_sweep(TWO), device="cuda")
    assert {entry.options.device for entry in plan.entries} == {"cuda"}
    assert plan.resources == sweep.Resources(num_gpus=1.0)
    assert sweep.read(write_sweep(TWO, "[ray]\nnum_gpus = 0.25\n"), device="cuda").resources.num_gpus == 0.25
    assert sweep.read(write_sweep(TWO)).resources == sweep.Resources()


# --- Locks.


def test_a_lock_is_released_when_its_holder_dies() -> None:
    code = "import sys; from pathlib import Path; from pacprune.runs import locks\n" + (
        "with locks.exclusive(Path('out'), 'one') as note:\n"
        "    locks.begin(note); note('running', stage='dense', done=3, total=9, epoch=1); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdin=subprocess.PIPE) as holder:
        while len(locks.lines(Path("out"), "one")) < 2:
            assert holder.poll() is None, "the holder ended by itself"
            time.sleep(0.05)
        state = locks.state(Path("out"), "one")
        assert (state["state"], state["stage"], state["epoch"]) == ("running", "dense", 1)
        holder.kill()
    assert locks.state(Path("out"), "one") == {"state": "waiting", "stage": "dense", "epoch": 1, "done": 3, "total": 9}
    with locks.exclusive(Path("out"), "one"):
        assert locks.state(Path("out"), "one")["state"] == "running"


def test_two_sweeps_at_once_do_every_run_once() -> None:
    path = write_sweep(FIXED, TWO, "seed = [0, 1]\n")
    code = "from pathlib import Path; from pacprune.runs import sweep; sweep.run(Path('mine.toml'))"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ) as other:
        while not list(Path().glob("runs/mine/**/config.toml")) and other.poll() is None:
            time.sleep(0.01)
        sweep.run(path)
        assert other.wait() == 0
    for entry in sweep.read(path).entries:
        assert len(events(Path("runs/mine"), entry.name, "finished")) == 1
        assert len(events(Path("runs/mine"), entry.name, "begun")) == 1


def test_readers_do_not_take_each_other_for_workers() -> None:
    with locks.exclusive(Path("out"), "one") as note:
        locks.begin(note)
    code = "from pathlib import Path; from pacprune.runs import locks\n" + (
        "assert {locks.state(Path('out'), 'one')['state'] for _ in range(1000)} == {'waiting'}"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ) as watcher:
        while watcher.poll() is None:
            assert locks.state(Path("out"), "one")["state"] == "waiting"
            time.sleep(0.001)
    assert watcher.returncode == 0


def test_a_file_system_without_locks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ValueError, match=r"out lies on a file system without locks .No locks available"):
        locks.exclusive(Path("out"), "one").__enter__()


def test_the_table_shows_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweep.read(write_sweep("[grid]\nseed = [0, 1, 2, 3, 4]\n"))
    names = [entry.name for entry in plan.entries]
    store.finish(Path("out") / names[0], {"test_error": 0.125})
    for name, event in (names[1], "failed"), (names[2], "running"), (names[3], "running"):
        with locks.exclusive(Path("out"), name) as note:
            locks.begin(note)
            note(event, reason="no luck", stage="dense", done=3, total=9, epoch=1)
    output = io.StringIO()
    monkeypatch.setattr(sweep_table, "Console", partial(Console, file=output, force_terminal=True, width=160))
    with locks.exclusive(Path("out"), names[2]), sweep_table.live(partial(sweep.status_of, Path("out"), plan)):
        pass
    lines = {name: next(line for line in output.getvalue().splitlines() if name in line) for name in names}
    for name, words in zip(
        names,
        ("finished", "no luck", "dense, epoch 2, 3 of 9 steps", "interrupted in dense, epoch 2", "waiting"),
        strict=True,
    ):
        assert words in lines[name]
    assert "0.1250" in lines[names[0]]
    assert "1 finished, 1 running, 2 waiting, 1 failed" in output.getvalue()
    assert json.loads(json.dumps(sweep.status_of(Path("out"), plan)))["running"] == 0


@pytest.mark.usefixtures("few_reports")
def test_a_log_gets_a_line_when_a_run_begins_or_ends(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (entry.name for entry in sweep.read(write_sweep(FIXED, "[grid]\nlr = [0.1, 1e30]\n")).entries)
    sweep.run(Path("mine.toml"))
    lines = capsys.readouterr().err.splitlines()
    (finished,) = [line for line in lines if "finished" in line]
    assert finished.startswith(f"{first} (lr 0.1): finished, test error 0.")
    (failed,) = [line for line in lines if "failed" in line]
    assert failed.startswith(f"{second} (lr 1e+30): failed, the loss became")
    assert all("running, since" in line for line in lines if line not in (finished, failed))
    sweep.run(Path("mine.toml"))
    assert first not in capsys.readouterr().err, "it was finished before"


def test_a_log_gets_lines_about_runs_that_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"run": "osp-1", "point": {"lr": 0.1, "seed": 3}, "state": "waiting"}
    running = {"state": "running", "since": 0, "host": "here", "stage": "dense", "epoch": 0, "done": 1, "total": 9}
    states = iter([row, row | running, row | running, row | running])
    clock = iter([0.0, 10.0, 40.0])
    monkeypatch.setattr(sweep_table, "INTERVAL", 1e9)  # it looks when the test asks it to, below
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(stderr=True, width=40)
    with sweep_table._lines(lambda: {"runs": [next(states)]}, console) as look:
        for _ in range(2):
            look()
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith("osp-1 (lr 0.1, seed 3): running, since ")
    assert first.endswith("on here: dense, epoch 1, 1 of 9 steps")


def test_the_table_shows_certificates_and_what_each_pays() -> None:
    plan = sweep.read(write_sweep(TWO, command="pbp"))
    first, second = (entry.name for entry in plan.entries)
    sweep.begin(plan, Path("out"))
    assert not sweep_table.payment(sweep.status(Path("out")))
    store.finish(Path("out") / first, {"test_error": 0.125, "certificate": 0.21771, "grid": 2})
    assert sweep_table.payment(sweep.status(Path("out"))) == ["1 certificate; each pays delta/2"]
    store.finish(Path("out") / second, {"test_error": 0.125, "certificate": 0.3, "grid": 2})
    result = call("status", "out")
    assert result.exit_code == 0
    for words in ("Certificate", "0.2178", "0.3000"):  # rounded up
        assert words in result.stdout
    assert result.stdout.splitlines()[-1] == "2 certificates; each pays delta/2"
    assert json.loads(call("status", "out", "--json").stdout)["runs"][0]["certificate"] == 0.21771


# --- The command.


def call(*words: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(sweep_command)
    return CliRunner().invoke(app, list(words))


@pytest.mark.usefixtures("few_reports")
def test_the_command_runs_a_sweep_and_prints_its_state() -> None:
    write_sweep(FIXED, "[grid]\nlr = [0.1, 1e30]\n")
    result = call("mine.toml", "--json")
    assert result.exit_code == 1  # one run fails
    status = json.loads(result.stdout)
    assert (status["finished"], status["failed"]) == (1, 1)
    assert json.loads(call("status", "runs/mine", "--json").stdout) == status
    table = call("status", "runs/mine")
    assert table.exit_code == 1
    for words in ("the loss", "1 finished, 0 running, 0 waiting, 1 failed", "Runs: runs/mine"):
        assert words in table.stdout
    assert call("status", "--help").stdout.count("Ray cluster") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status",), "the folder for `pacprune sweep status` is missing; name one, such as runs/mine"),
        (("status", "none"), "none does not exist; name the folder of a sweep"),
        (("mine.toml", "out"), "there is a second argument, out, after mine.toml; give the runs' folder as --out"),
        (("mine.toml",), "sparsity in mine.toml is 'high', but it must be a float; change it"),
    ],
)
def test_the_command_refuses_in_one_sentence(words: tuple[str, ...], message: str) -> None:
    write_sweep('[grid]\nsparsity = ["high"]\n')
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"pacprune: error: {message}\n")
    assert [f.name for f in Path().iterdir()] == ["mine.toml"]


# --- Refusals that need no Ray cluster.


@pytest.mark.parametrize("address", ["nowhere", "ray://host:10001", "host:port"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"--ray is .*; give auto, or HOST:PORT"):
        cluster._check_reachable(address)


def test_a_cluster_that_does_not_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster answers at 127.0.0.1:9 \(.*\); check the address"):
        cluster._check_reachable("127.0.0.1:9")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray cannot be imported .*; pip install \"pacprune\[sweep\]\""):
        sweep.run(write_sweep(TWO), work=cluster.work_at("auto"))
    assert not Path("runs").exists()


def test_a_numbered_gpu_is_refused_with_ray() -> None:
    path = write_sweep('device = "cuda:1"\n', TWO)
    with pytest.raises(ValueError, match="device is 'cuda:1', but Ray gives every run a GPU of its own; use cuda"):
        sweep.run(path, work=cluster.work_at("auto"))
