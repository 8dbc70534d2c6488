"""Options and run folders: names, config files, and who owns a folder."""

import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacprune import data, files, models
from pacprune.certification import decode
from pacprune.paper import frame, pft_vs_osp
from pacprune.runs import commands, locks, store
from pacprune.runs import options as opt
from pacprune.runs.options import Demo, Osp, Pbp, Pft
from pacprune.types import Progress

SHORT: dict[str, Any] = {"dense_epochs": 2, "epochs": 2}


def quiet(*_: Any) -> None:
    """A progress that does nothing."""


def run(options: Any, out: Path, progress: Progress = quiet) -> dict[str, Any]:
    return commands.execute(type(options).__name__.lower(), options, commands.single, out=out, progress=progress)


# --- Names.


@pytest.mark.parametrize(
    ("command", "options", "name"),
    [
        # Literal on purpose: another hash here means that every finished run of every user would be run again.
        ("pft", Pft(), "pft-44136fa355"),
        ("osp", Osp(sparsity=0.95, seed=3), "osp-ba17a1a033"),
        ("pbp", opt.resolve(Pbp, {"data": "mnist", "lr": 0.02}), "pbp-72650bcf27"),
        ("demo", Demo(), "demo"),
        ("demo", Demo(seed=1), "demo-fbe47f6d82"),
    ],
)
def test_a_run_is_named_by_its_changed_options(command: str, options: Any, name: str) -> None:
    assert opt.run_name(command, options) == name


def test_where_a_run_happens_does_not_change_its_name() -> None:
    assert opt.run_name("osp", Osp(device="cuda", data_dir="/data")) == opt.run_name("osp", Osp())


def test_a_preset_is_a_default() -> None:
    plain, spelled = opt.resolve(Pft, {"data": "mnist"}), opt.resolve(Pft, {"data": "mnist", "lr": 0.1})
    assert plain == spelled
    assert plain.lr == 0.1
    assert opt.changes(plain) == {"data": "mnist"}


def test_later_options_win() -> None:
    options = opt.resolve(Osp, {"data": "cifar10", "lr": 0.3, "seed": 1}, {"seed": 2})
    assert (options.model, options.augment, options.lr, options.seed) == ("resnet20", True, 0.3, 2)


@pytest.mark.parametrize("command", opt.COMMANDS)
def test_presets_name_options_that_exist(command: str) -> None:
    names = {f.name for f in fields(opt.COMMANDS[command])}
    for name in data.NAMES:
        assert set(opt.preset(opt.COMMANDS[command], name)) <= names


def test_each_network_has_the_learning_rate_that_was_tuned_for_it() -> None:
    lenet = {"data": "fashion-mnist", "model": "lenet5"}
    assert [opt.resolve(kind, lenet).lr for kind in (Osp, Pft, opt.Dpf)] == [0.1, 0.05, 0.02]
    assert opt.resolve(Pft, {"data": "fashion-mnist"}).lr == 0.1
    assert opt.changes(opt.resolve(Pft, lenet)) == lenet
    assert opt.command_line("pft", opt.resolve(Pft, lenet)) == "pacprune pft --data fashion-mnist --model lenet5"


def test_presets_are_the_settings_of_the_published_table() -> None:
    """`pacprune pft` without flags is the row "pft, magnitude" of results/pft-vs-osp.csv."""
    for setting in pft_vs_osp.SETTINGS["reduced"]:
        for kind in (Osp, Pft, opt.Gmp):
            options = opt.resolve(kind, {"data": setting.data, "model": setting.model})
            pruning = replace(setting.pruning, lr=options.lr)
            assert commands.stage(options) == pruning
            assert commands.dense_stage(options) == replace(setting.dense, warmup=pruning.warmup)


@pytest.mark.parametrize("kind", [Osp, Pft, opt.Gmp, opt.Pbp])
def test_steps_on_a_gpu_are_graphs(kind: type) -> None:
    for device, execution in (("cpu", "eager"), ("cuda", "graph"), ("cuda:1", "graph")):
        options = opt.resolve(kind, {"device": device})
        assert commands.stage(options).execution == commands.dense_stage(options).execution == execution


def test_published_learning_rates_are_the_best_on_validation_data() -> None:
    trials: dict[tuple[str, ...], list[tuple[float, float, float]]] = {}
    for row in frame.read(Path(__file__).parents[2] / "results" / "pft-vs-osp-tuning.csv"):
        if row["criterion"] == "magnitude" and row["method"] in opt.COMMANDS:
            key = row["dataset"], row["model"], row["method"]
            trials.setdefault(key, []).append((row["validation_error"], row["lr"], row["gate_ratio"]))
    for (name, model, method), rates in trials.items():
        _, lr, ratio = min(rates)
        assert opt.resolve(opt.COMMANDS[method], {"data": name, "model": model}).lr == lr
        assert ratio == 100  # the default


def test_the_command_line_names_the_changed_options() -> None:
    options = opt.resolve(Osp, {"data": "cifar10", "augment": False, "lr": 0.05})
    assert opt.command_line("osp", options) == "pacprune osp --data cifar10 --lr 0.05 --no-augment"


# --- Config files.


@pytest.mark.parametrize("command", opt.COMMANDS)
def test_a_config_file_reads_back_as_it_was_written(command: str, tmp_path: Path) -> None:
    options = opt.COMMANDS[command](seed=7, device='a "quoted" \\ name')
    (tmp_path / "run.toml").write_text(opt.to_toml(command, options))
    read_command, values = opt.from_toml(tmp_path / "run.toml", command)
    assert read_command == command
    assert opt.resolve(opt.COMMANDS[command], values) == options
    assert values == {name: value for name, value in asdict(options).items() if value is not None}


def test_an_older_config_with_a_criterion_for_every_method_can_be_read(tmp_path: Path) -> None:
    old = opt.to_toml("gmp", opt.Gmp(seed=7)) + 'criterion = "{}"\n'
    (tmp_path / "config.toml").write_text(old.format("magnitude"))
    assert store.read_config(tmp_path) == ("gmp", opt.Gmp(seed=7))
    (tmp_path / "config.toml").write_text(old.format("snip"))
    with pytest.raises(ValueError, match="unknown key 'criterion'"):
        store.read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sparsty = 0.9", "unknown key 'sparsty'"),
        ("batch-size = 64", "unknown key 'batch-size'; did you mean batch_size?"),
        ('sparsity = "high"', "must be a float"),
        ("augment = 1", "must be a bool"),
        ('command = "pbp"', "is for the command 'pbp'"),
        ("sparsity = ", "cannot be read"),
    ],
)
def test_a_wrong_config_file_is_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(ValueError, match=words):
        opt.from_toml(tmp_path / "run.toml", "osp")


def test_a_whole_number_is_a_float_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 1")
    assert isinstance(opt.from_toml(tmp_path / "run.toml", "osp")[1]["lr"], float)


# --- Folders.


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no config"):
        run(Osp(**SHORT), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_of_another_run_is_refused_and_untouched(tmp_path: Path) -> None:
    store.begin(tmp_path, "osp", Osp(seed=1))
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ValueError, match="seed is 1 there and 2 here"):
        run(Osp(seed=2), tmp_path)
    with pytest.raises(ValueError, match="holds a run of 'osp', this is 'pft'"):
        run(Pft(seed=1), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_bytes() == before


def test_a_run_folder_holds_the_options_and_the_result(tmp_path: Path) -> None:
    result = run(Osp(**SHORT), tmp_path / "run")
    files = {f.name for f in (tmp_path / "run").iterdir()}
    made = {"config.toml", "metrics.jsonl", "model.safetensors", "result.json", "figures", "report.html", store.TRACE}
    assert files == made
    assert store.read_config(tmp_path / "run") == ("osp", Osp(**SHORT))
    assert store.result(tmp_path / "run") == result
    assert [row["stage"] for row in store.metrics(tmp_path / "run")] == ["dense", "dense", "tune", "tune"]
    assert result["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert result["kept"] == 5020


def test_a_finished_run_returns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(Osp(**SHORT), tmp_path)
    monkeypatch.setattr(commands, "prepare", lambda options: pytest.fail("a finished run was begun again"))
    assert run(Osp(**SHORT), tmp_path) == first


@pytest.mark.parametrize("options", [Pft(**SHORT), Pbp(**SHORT, posterior_epochs=2, draws=20)], ids=["pft", "pbp"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(options: Any, tmp_path: Path) -> None:
    whole = run(options, tmp_path / "whole")
    stages = dict.fromkeys(row["stage"] for row in store.metrics(tmp_path / "whole"))
    for stage in stages:

        def stop(name: str, done: int, total: int, row: Any, stage: str = stage) -> None:
            if name == stage and done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(options, tmp_path / "broken", stop)
        assert not (tmp_path / "broken" / "result.json").exists()
    again = run(options, tmp_path / "broken")
    assert again == {**whole, "folder": str(tmp_path / "broken")}
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "broken" / store.CHECKPOINTS).exists()


def test_a_run_interrupted_after_it_certified_counts_one_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # where certificates are counted
    options = Pbp(dense_epochs=1, epochs=1, posterior_epochs=1, draws=20)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commands, "gibbs_error", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(options, tmp_path / "run")
    assert run(options, tmp_path / "run")["tries"]["number"] == 1
    certificate = decode.load(tmp_path / "run" / store.CERTIFICATE)
    assert sorted(f.name for f in (tmp_path / "run" / store.CERTIFICATE).iterdir()) == sorted(
        ["certificate.json", *certificate.tensors]
    )


def test_train_on_chooses_the_training_part() -> None:
    split, _ = commands.prepare(Osp())
    assert commands.training_part(Osp(), split) is split.train
    assert commands.training_part(Pft(train_on="prior"), split) is split.prior
    assert commands.training_part(Pbp(), split) is split.prior
    assert len(commands.prepare(Pbp())[0].unlabelled) == 100


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for out in (tmp_path / "new", tmp_path):
        with pytest.raises(ValueError, match="loss became"):
            run(Osp(lr=1e9), out)
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_the_stages_that_were_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("found too late")

    with monkeypatch.context() as patch:
        patch.setattr(commands, "prune", refused)
        with pytest.raises(ValueError, match="found too late"):
            run(Osp(**SHORT), tmp_path / "run")
    checkpoint = tmp_path / "run" / store.CHECKPOINTS / "dense.pt"
    before = checkpoint.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(commands, "prune", refused)
        with pytest.raises(ValueError, match="found too late"):
            run(Osp(**SHORT), tmp_path / "run")
    assert checkpoint.stat().st_mtime_ns == before, "it was trained again"
    assert run(Osp(**SHORT), tmp_path / "run") == run(Osp(**SHORT), tmp_path / "other") | {
        "folder": str(tmp_path / "run")
    }


# --- Several processes, and full disks.


def test_a_second_process_is_told_that_the_first_is_at_it(tmp_path: Path) -> None:
    folder = store.begin(tmp_path / "run", "osp", Osp(**SHORT))
    with (
        locks.alone(folder),
        pytest.raises(ValueError, match=f"another process is working on the run in {folder}; wait"),
    ):
        run(Osp(**SHORT), folder)
    assert [file.name for file in folder.iterdir()] == ["config.toml"]
    assert run(Osp(**SHORT), folder)["folder"] == str(folder)


def test_a_process_that_comes_second_leaves_the_run_of_the_first_alone(tmp_path: Path) -> None:
    folder, locked = tmp_path / "run", ExitStack()

    def overtaken(options: Any, begin: Any, progress: Any) -> dict[str, Any]:
        locked.enter_context(locks.alone(store.begin(folder, "osp", options)))
        begin()
        raise AssertionError("not reached")

    with locked, pytest.raises(ValueError, match="another process is working"):
        commands.execute("osp", Osp(**SHORT), overtaken, out=folder, progress=quiet)
    assert (folder / "config.toml").is_file()


def test_a_process_that_others_overtook_says_so(tmp_path: Path) -> None:
    def overtaken(options: Any, begin: Any, progress: Any) -> dict[str, Any]:
        run(options, tmp_path / "run")
        begin()
        raise AssertionError("not reached")

    with pytest.raises(ValueError, match="another process has just finished the run"):
        commands.execute("osp", Osp(**SHORT), overtaken, out=tmp_path / "run", progress=quiet)
    assert store.result(tmp_path / "run")["sparsity"] == pytest.approx(0.9, abs=1e-5)


def test_bad_input_of_a_second_process_leaves_the_run_of_the_first_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def refused(options: Any, begin: Any, progress: Any) -> dict[str, Any]:
        store.begin(folder, "osp", options)
        raise ValueError("no such device")

    with pytest.raises(ValueError, match="no such device"):
        commands.execute("osp", Osp(**SHORT), refused, out=folder, progress=quiet)
    assert (folder / "config.toml").is_file()


def test_one_of_several_processes_does_the_work(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pacprune.runs import commands, options\n"
        "chosen = options.Osp(dense_epochs=1, epochs=1)\n"
        "commands.execute('osp', chosen, commands.single, out=Path(sys.argv[1]), progress=lambda *_: None)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    env = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    refusals = [error for code, error in zip(codes, errors, strict=True) if code]
    assert all("ValueError: another process" in error for error in refusals), refusals
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.parametrize("supported", [True, False])
def test_a_config_is_written_once(supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:

        def unsupported(*_: Any) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr("os.link", unsupported)
    files.write_atomically(tmp_path / "file", b"first", replace=False)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "file", b"second", replace=False)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"first")]


def test_a_full_disk_is_named_by_the_file_that_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*run.config.toml'"):
            run(Osp(**SHORT), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    monkeypatch.setattr(commands.report, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*run'"):
        run(Osp(**SHORT), tmp_path / "run")


def test_a_network_with_tied_weights_is_stored_and_read(tmp_path: Path) -> None:
    net, other = (models.gpt(9, width=8, depth=1, heads=2, context=4, seed=seed) for seed in (0, 1))
    store.write_model(tmp_path / "model.safetensors", net)
    store.read_model(tmp_path / "model.safetensors", other)
    assert torch.equal(other.tokens.weight, net.head.weight)
    assert other.head.weight is other.tokens.weight
