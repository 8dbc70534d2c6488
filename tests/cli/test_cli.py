"""The command line: its output, its errors, and `pacprune` and `python -m pacprune` as one program."""

import functools
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pacprune
from pacprune import __version__, bounds
from pacprune.bounds import montecarlo
from pacprune.cli import app, main
from pacprune.cli.progress import progress_bars
from pacprune.data import datasets
from pacprune.runs import commands
from pacprune.runs import options as opt

COMMANDS = (
    *("demo", "osp", "pft", "pbp", "bound", "certify", "verify", "selftest", "data", "report", "bench", "reproduce"),
    *("gmp", "dpf", "feather", "acdc", "rigl", "str", "imp", "l0", "probmask", "export", "profile", "track", "sweep"),
    *("monitor", "compress", "svd"),
)
SHORT = ("--dense-epochs", "2", "--epochs", "2")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default run folders and data folders lie in the test's temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACPRUNE_DATA", raising=False)


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), list(words), prog_name="pacprune")


@functools.cache
def help_of(command: str) -> str:
    return call(command, "--help").stdout


def answer(*words: str) -> dict[str, Any]:
    """The one JSON object on stdout."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refusal(*words: str) -> str:
    """The one sentence on stderr; nothing on stdout, no traceback, exit code 2, nothing written."""
    result = call(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    *bars, line = result.stderr.splitlines()
    assert line.startswith("pacprune: error: ")
    assert all("Traceback" not in bar for bar in bars)
    assert sorted(Path("runs").glob("*")) == []
    return line


# --- Help.


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    text = help_of(command)
    for flag in ("--seed", "--device", "--out", "--json"):
        assert flag in text
    assert f"Examples:\n    pacprune {command}" in text


def test_all_commands_are_listed() -> None:
    text = call("--help").stdout
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "..." not in text.partition("Commands:")[2], "a summary was cut short"


@pytest.mark.parametrize("command", opt.COMMANDS)
def test_every_option_is_a_flag_with_help(command: str) -> None:
    text = " ".join(help_of(command).split())
    for field in fields(opt.COMMANDS[command]):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"].split(":")[0] in text


def test_defaults_are_written_in_one_way() -> None:
    for command in COMMANDS:
        text = " ".join(help_of(command).split())
        brackets = re.findall(r"(?<=[.)] )\[[^]]*", text.partition("Options:")[2])
        assert all(words.startswith(("[default: ", "[required")) for words in brackets), command
        assert not re.search(r"unless given|\w \[[^]]*\]\.", text.partition("Options:")[2]), command
    assert "[default: off; cifar10: on]" in " ".join(help_of("osp").split())


def test_the_list_of_commands_has_the_first_lines_of_their_help() -> None:
    for name, command in app.all_commands().items():
        lines = [line.strip() for line in help_of(name).splitlines()]
        words = " ".join(lines[lines.index("") + 1 :])
        assert words.startswith(command.summary), name


def program(*words: str, columns: int = 80) -> str:
    """What the program itself prints, and then whether it imported torch."""
    script = "import sys; from pacprune.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    env = os.environ | {"COLUMNS": str(columns), "PYTHONPATH": str(Path(pacprune.__file__).parents[1])}
    process = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("words", ["--help", "--version", "bound --help", "bound --risk 0.1 --n 100 --out ."])
def test_what_computes_nothing_needs_no_torch(words: str) -> None:
    assert program(*words.split()).splitlines()[-1] == "False"


def test_help_is_as_wide_as_the_terminal() -> None:
    for columns in (70, 130):
        *lines, _ = program("bound", "--help", columns=columns).splitlines()
        assert columns - 20 < max(map(len, lines)) <= columns
    assert max(map(len, program("bound", "--help", columns=500).splitlines())) <= app.WIDEST


def test_a_command_that_is_called_has_its_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pacprune", "osp", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert "--criterion" in capsys.readouterr().out


def test_the_examples_use_flags_that_exist() -> None:
    for command in app.all_commands().values():
        for line in command.examples:
            words = [word for word in line.split()[1:] if word.startswith("--")]
            assert all(word in help_of(line.split()[1]) for word in words)


def test_epochs_and_gates_are_explained_where_they_matter() -> None:
    texts = {command: " ".join(help_of(command).split()) for command in ("osp", "pft", "pbp")}
    assert "Epochs of training the prior" in texts["pbp"]
    assert [command for command, text in texts.items() if "--gate-lr" in text] == ["pft", "pbp"]
    assert (
        "the posterior's follows likewise from --posterior-lr. [default: 100 times --lr; recipe paper: --lr]"
        in texts["pbp"]
    )
    assert "[default: 10; recipe coupled: 100 times --lr, both less in more than 3200 steps" in texts["pft"]
    assert not any(word in texts["pft"] for word in ("lower block", "gates", "logit", "beta")), "defined nowhere in it"


def test_only_commands_that_use_a_criterion_have_the_flag() -> None:
    offered = [command for command in opt.COMMANDS if "--criterion" in help_of(command)]
    assert offered == ["osp", "pft", "pbp"]
    assert call("gmp", "--criterion", "magnitude").exit_code == 2


def test_help_names_all_methods_whose_runs_are_accepted() -> None:
    plain = "osp, pft, gmp, dpf, feather, acdc, rigl, str, imp, l0, probmask, svd"
    for command, methods in {"certify": plain, "export": f"{plain}, pbp", "profile": f"{plain}, pbp"}.items():
        assert methods in " ".join(help_of(command).split())


def test_a_stage_that_ends_early_is_shown_as_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    with progress_bars() as progress:
        progress("draws", 1952, 4000)
        progress("more", 1, 2, {"loss": 0.5})
    output = capsys.readouterr().err
    assert "1952/1952" in output
    assert "1/1" in output


def test_a_log_gets_lines_while_a_stage_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 200, 20))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress_bars() as progress:
        for steps in range(4):
            progress("dense", steps, 4, {"loss": 0.5})
        assert capsys.readouterr().err == "dense              2/4 0:00:40 loss 0.5000\n"
        progress("dense", 4, 4)
        progress("dense", 1, 4)
        progress("draws", 1, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "dense              4/4 0:01:20",
        "dense              1/4 0:00:00",
        "draws              1/4000 0:00:00",
    ]


def test_both_spellings_are_one_program() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pacprune", "--version"], capture_output=True, text=True, env=os.environ
    )
    assert (process.stdout, process.stderr) == (f"pacprune {__version__}\n", "")
    assert call("--version").stdout == process.stdout


# --- Runs.


def test_osp_prints_a_table() -> None:
    result = call("osp", *SHORT)
    assert result.exit_code == 0, result.stderr
    (folder,) = Path("runs").iterdir()
    for words in ("dense", "osp", "0.9000", str(folder / "report.html")):
        assert words in result.stdout
    assert "tune" in result.stderr


def test_pft_prints_its_result_as_json() -> None:
    result = answer("pft", *SHORT, "--sparsity", "0.95", "--out", "here")
    assert result["folder"] == "here"
    assert result["command"] == "pft"
    assert result["sparsity"] == pytest.approx(0.95, abs=1e-5)
    assert result["kept"] + round(result["sparsity"] * result["total"]) == result["total"] == 50_200
    assert 0 <= result["test_error"] <= 1
    assert 0 <= result["dense_error"] <= 1
    assert [row["method"] for row in result["rows"]] == ["dense", "pft"]
    assert answer("pft", *SHORT, "--sparsity", "0.95", "--out", "here") == result


def test_the_papers_recipe_of_pft_runs_to_its_report() -> None:
    result = answer("pft", "--recipe", "paper", "--dense-epochs", "1", "--epochs", "2", "--out", "here")
    assert [row["method"] for row in result["rows"]] == ["dense", "pft-paper"]
    for name in ("curves", "layers"):
        lines = Path(f"here/figures/{name}.csv").read_text().splitlines()[1:]
        assert {line.split(",")[0] for line in lines} == {"pft-paper"}
    assert Path("here/report.html").is_file()


def test_masks_of_frozen_weights_are_learned_after_dense_training() -> None:
    words = ["--recipe", "frozen", "--pattern", "2:4", "--dense-epochs", "4", "--epochs", "2", "--out", "here"]
    dense, pruned = answer("pft", *words)["rows"]
    assert dense["test_error"] < 0.3
    assert pruned["test_error"] < 0.3
    assert pruned["sparsity"] == 0.5


def test_flags_override_the_config_file() -> None:
    Path("run.toml").write_text("dense_epochs = 1\nepochs = 1\nsparsity = 0.5\nseed = 4\n")
    result = answer("osp", "--config", "run.toml", "--sparsity", "0.8")
    assert result["sparsity"] == pytest.approx(0.8, abs=1e-5)
    assert (result["seed"], result["epochs"]) == (4, 1)


def test_pruning_at_initialisation_has_no_dense_error() -> None:
    result = answer("osp", "--dense-epochs", "0", "--epochs", "1")
    assert result["dense_error"] is None
    assert [row["method"] for row in result["rows"]] == ["osp"]


def test_an_interrupt_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "execute", interrupted)
    result = call("osp")
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr


# --- Bad input.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("osp --sparsity 1.0", "sparsity 1.0 is outside [0, 1)"),
        ("pbp --sparsity -0.1", "sparsity -0.1 is outside [0, 1)"),
        ("pbp --eps 0.3", "eps 0.3 is too large for sparsity 0.9"),
        ("pft --recipe paper --eps 0.3", "eps 0.3 is too large"),
        ("osp --lr 1e9", "the loss became"),
        ("osp --criterion best", "criterion 'best' is unknown"),
        ("osp --model vgg", "model 'vgg' is unknown"),
        ("osp --model lenet5", "lenet5 takes square images of at least 12x12"),
        ("osp --data imagenet", "data set 'imagenet' is unknown"),
        ("osp --data mnist", "pacprune data fetch mnist"),
        ("osp --data mnist --data-dir .", "run `pacprune data fetch mnist --data-dir .`"),
        ("pbp --prior-fraction 1", "--prior-fraction is 1.0; it must lie in [0, 1)"),
        ("osp --seed -1", "seed is -1"),
        ("osp --device abacus", "the device 'abacus' cannot be used here"),
        ("osp --epochs -1", "epochs is -1"),
        ("osp --min-per-layer 9999", "--min-per-layer 9999"),
        ("osp --scope world", "scope 'world' is unknown"),
        ("pft --mask-share 0", "--mask-share is 0.0"),
        (
            "pbp --prior-fraction 0",
            "no data may shape the prior, but it would be trained for 20 dense and 20 other epochs",
        ),
        ("pbp --recipe best", "recipe 'best' is unknown; use one of held, paper"),
        ("pbp --delta 2", "delta is 2.0"),
        ("pbp --draws 0", "draws is 0"),
        ("pbp --objective best", "objective 'best' is unknown"),
        ("pbp --family best", "family 'best' is unknown"),
        ("pbp --grid 0", "grid is 0"),
        ("pbp --family catoni --expected-risk 5", "--expected-risk is 5.0; it must lie strictly between 0 and 1"),
        ("pbp --expected-risk 0", "--expected-risk is 0.0"),
        ("pbp --tolerance 0", "tolerance is 0.0; it must be more than 0"),
        ("pbp --tolerance nan", "tolerance is nan"),
        ("pbp --unlabelled 5000", "unlabelled is 5000, but of the 1437 training examples of digits, from 0 to 1435"),
        ("osp --data-dir nowhere", "nowhere does not exist"),
        ("osp --data-dir mine.txt", "mine.txt is not a folder"),
        ("osp --out /dev/null/run", "/dev/null/run cannot be read or written (Not a directory); choose another"),
        ("osp --train-on test", "--train-on is 'test'"),
        ("osp --config none.toml", "none.toml cannot be read"),
        ("osp --out .", "is not empty and holds no config.toml"),
        ("bound --risk 3 --n 10", "risk is 3.0"),
        ("bound --n 10", "neither --risk nor --errors is given"),
        ("bound --n 10 --risk 0.1 --errors 1", "give only one of the two"),
        ("bound --n 0 --errors 1", "n is 0, but it must be a whole number of at least 1: it counts the bound examples"),
        ("bound --n 10 --errors 1 --draws 0", "draws is 0"),
        ("bound --n 10 --errors 11", "--errors is 11, but 10 examples give from 0 to 10 errors"),
        ("bound --n 10 --errors 31 --draws 3", "3 networks on 10 examples give from 0 to 30 errors"),
        ("bound --n 10 --risk 0.1 --out mine.txt", "mine.txt cannot be read or written"),
        ("data fetch digits", "is 'digits'; use one of mnist, fashion-mnist, cifar10"),
        ("data fetch", "is missing; use one of mnist, fashion-mnist, cifar10"),
        ("data path imagenet", "is 'imagenet'; use one of mnist"),
        ("data burn", "unknown action 'burn'"),
        ("report .", "is not finished"),
        ("report nowhere", "nowhere does not exist"),
        ("verify nowhere", "nowhere does not exist"),
        ("verify .", "holds neither certificate.json nor certificate/certificate.json"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: str, message: str) -> None:
    Path("mine.txt").write_text("keep me")
    assert message in refusal(*words.split())
    assert [f.name for f in Path().iterdir() if f.name != "runs"] == ["mine.txt"]


def test_an_unknown_flag_is_a_usage_error() -> None:
    assert call("osp", "--sparsty", "0.9").exit_code == 2


@pytest.mark.parametrize(
    "content",
    [b"not gzip at all", gzip.compress(b"other bytes"), gzip.compress(b"cut")[:-4]],
    ids=["no gzip", "other bytes", "truncated"],
)
def test_a_damaged_data_file_is_refused(content: bytes) -> None:
    folder = Path("data/mnist")
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    line = refusal("osp", "--data", "mnist", "--data-dir", "data", "--json")
    assert "train-images-idx3-ubyte.gz" in line
    assert "delete it" in line


# --- Calculator and data.


def test_bound_prints_every_bound() -> None:
    result = answer("bound", "--risk", "0.1", "--n", "12000", "--kl", "500", "--out", "here")
    assert result["seeger"] == bounds.seeger(0.1, n=12_000, kl=500.0, delta=0.05)
    assert result["paper"] == bounds.paper(0.1, n=12_000, kl=500.0, delta=0.05)
    assert result["catoni"] == bounds.catoni(0.1, n=12_000, kl=500.0, delta=0.05)
    assert result["held_out"] == bounds.clopper_pearson(1200, n=12_000, delta=0.05)
    assert json.loads(Path("here/bound.json").read_text()) == result
    assert "0.2088" in call("bound", "--risk", "0.1", "--n", "12000", "--kl", "500").stdout


def test_bound_with_draws_pays_a_share_of_delta() -> None:
    result = answer("bound", "--risk", "0.1", "--n", "12000", "--draws", "1000")
    assert result["risk_upper"] == montecarlo.chernoff(0.1, draws=1000, delta=0.05 * 0.2)
    assert result["seeger"] == bounds.seeger(result["risk_upper"], n=12_000, kl=0.0, delta=0.05 - 0.05 * 0.2)
    assert answer("bound", "--errors", "1200000", "--n", "12000", "--draws", "1000") == result
    assert answer("bound", "--errors", "1200", "--n", "12000") == answer("bound", "--risk", "0.1", "--n", "12000")


def test_data_list_names_missing_data_sets() -> None:
    rows = {row["name"]: row for row in answer("data", "list", "--data-dir", "data")["data"]}
    assert list(rows) == ["digits", "mnist", "fashion-mnist", "cifar10", "tinyshakespeare", "linux-c"]
    assert rows["digits"]["present"]
    assert not rows["mnist"]["present"]
    assert (rows["digits"]["usable"], rows["mnist"]["usable"]) == (True, False)
    assert "data fetch cifar10" in rows["cifar10"]["detail"]
    assert call("data", "list", "--data-dir", "data").stdout.count("missing ") == 5


def test_data_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACPRUNE_DATA", "elsewhere")
    assert call("data", "path").stdout == "elsewhere\n"
    assert answer("data", "path", "--data-dir", "here") == {"folder": "here"}
    assert call("data", "path", "cifar10").stdout == "elsewhere/cifar-10-batches-bin\n"


def test_data_fetch_reports_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "fetch", lambda name, data_dir, progress: progress("file.gz", 1, 2) or Path(data_dir, name)
    )
    assert answer("data", "fetch", "mnist", "--out", "there") == {"name": "mnist", "folder": "there/mnist"}
