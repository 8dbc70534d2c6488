"""The command line on networks and data of one's own: every command takes them, and bad ones get one sentence."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.methods.table import METHODS
from pacprune.runs import cluster, commands, store, sweep
from pacprune.runs import options as opt

CODE = """
import torch
from torch import nn
from pacprune import data
def stripes():
    random = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=random)
    return torch.rand(300, 9, generator=random) + nn.functional.one_hot(y, 9), y
def net(inputs, classes): return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))
def lazy(classes): return nn.LazyLinear(classes)
class Net(nn.Sequential):
    def __init__(self, shape, classes, seed, width=4):
        super().__init__(nn.Linear(shape[0], width), nn.Linear(width, classes))
        self.seed = seed
def wide(): return nn.Linear(10, 3)
def narrow(inputs): return nn.Linear(inputs, 2)
def twice(inputs, classes): return nn.LSTM(inputs, classes)
def number(): return 5
def needs(depth): return net(9, 3)
def fails(): raise RuntimeError("no luck")
"""
SHORT = ("--epochs", "2", "--dense-epochs", "1")
OWN = ("--data", "mine:stripes", "--model", "mine:net")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(CODE)
    Path("faulty.py").write_text("import nothing_like_it")


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), list(words), prog_name="pacprune")


def answer(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refusal(*words: str) -> str:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert list(Path("runs").glob("*")) == []
    return line


def test_a_network_of_ones_own_goes_from_pruning_to_its_certificate() -> None:
    result = answer("pft", *OWN, *SHORT, "--train-on", "prior", "--out", "run")
    assert (result["data"], result["model"], result["total"]) == ("mine:stripes", "mine:net", 16 * 9 + 3 * 16)
    assert (result["input"], result["classes"]) == ({"shape": [9], "dtype": "float32"}, 3)
    assert set(result["files"]) == {"x", "y"}
    report = Path("run/report.html").read_text()
    assert "--model mine:net" in report
    assert result["architecture"] in report
    answer("certify", "run", *OWN)
    record = json.loads(Path("run/certificate/certificate.json").read_text())
    assert (record["model"], record["data"]["dataset"]) == ("mine:net", "mine:stripes")
    assert answer("verify", "run")["level"] == 1
    assert "is mine:net, which pacprune does not have" in refusal("verify", "run", "--data", "mine:stripes")
    assert "give the data as --data" in refusal("verify", "run", "--recount")
    assert answer("verify", "run", *OWN)["level"] == 2
    assert answer("export", "run", *OWN[2:])["bytes"] > 0
    assert answer("profile", "run", *OWN[2:], "--seconds", "0.01")["weights"] == result["total"]
    assert answer("report", "run")["folder"] == "run"


def test_export_makes_no_folders() -> None:
    answer("osp", *OWN, *SHORT, "--out", "run")
    line = refusal("export", "run", *OWN[2:], "--out", "nowhere/net.safetensors")
    assert "nowhere/net.safetensors lies in nowhere, which is no folder; make it first" in line
    assert not Path("nowhere").exists()


def test_layers_are_left_out_by_flags() -> None:
    words = (*OWN, *SHORT, "--sparsity", "0.5")
    result = answer("osp", *words, "--exclude", "2", "--out", "run")
    assert result["kept"] == 16 * 9 // 2 + 3 * 16
    assert 'exclude = "2"' in Path("run/config.toml").read_text()
    assert (
        answer("osp", *words, "--include", "0, 2", "--scope", "layer", "--out", "both")["kept"] == (16 * 9 + 3 * 16) / 2
    )
    assert "--exclude 'head' names no weight of the model" in refusal("osp", *words, "--exclude", "2,head")
    assert "--exclude 'head' names no weight" in refusal("pbp", *words, "--exclude", "head", "--unlabelled", "9")
    assert "leave this layer out by --exclude" in refusal("pft", *OWN, *SHORT, "--pattern", "2:4")
    assert (
        answer("pft", *OWN, *SHORT, "--pattern", "2:4", "--exclude", "0", "--out", "pattern")["kept"] == 16 * 9 + 3 * 8
    )
    report = Path("pattern/report.html").read_text()
    assert "--exclude 0" in report


@pytest.mark.parametrize("command", [name for name, method in METHODS.items() if method.flags is not None])
def test_every_method_has_the_flags_of_what_is_pruned(command: str) -> None:
    assert {"scope", "include", "exclude"} <= set(opt.types_of(opt.COMMANDS[command]))


def test_pbp_certifies_a_network_of_ones_own() -> None:
    words = ("--posterior-epochs", "1", "--draws", "20", "--unlabelled", "9", "--out", "run")
    assert answer("pbp", *OWN, *SHORT, *words)["certificate"] <= 1
    assert answer("verify", "run", *OWN, "--replay", "--draws", "5")["level"] == 3


def test_a_sweep_takes_them_from_its_file() -> None:
    x, y = torch.rand(60, 9), torch.arange(60) % 2
    np.savez("mine.npz", x=x.numpy(), y=y.numpy())
    Path("all.toml").write_text(
        'command = "osp"\nepochs = 1\ndense_epochs = 1\nmodel = "mine:Net"\n[grid]\nsparsity = [0.5, 0.6]\n'
        'data = ["mine.npz", "mine:stripes"]\n'
    )
    status = answer("sweep", "all.toml")
    assert (status["finished"], [row["route"] for row in status["runs"]]) == (4, ["population of 2"] * 4)
    with pytest.raises(ValueError, match=r"data is 'mine.npz', which means another place on every machine"):
        sweep.run(Path("all.toml"), out=Path("other"), work=cluster.work_at("auto"))


def test_a_factory_gets_the_parameters_that_it_names() -> None:
    for seed in (3, 4):
        _, model = commands.prepare(opt.Osp(data="mine:stripes", model="mine:Net", seed=seed))
        assert model.seed == seed
    shapes = {name: commands.prepare(opt.Osp(data="digits", model=name))[1] for name in ("pacprune.models:mlp", "mlp")}
    assert len({commands.architecture(model) for model in shapes.values()}) == 1


@pytest.mark.parametrize("factory", ["mine:net", "mine:lazy"])
def test_the_first_weights_follow_from_the_seed(factory: str) -> None:
    states = []
    for seed in (0, 0, 1):
        torch.rand(1)
        states.append(commands.prepare(opt.Osp(data="mine:stripes", model=factory, seed=seed))[1].state_dict())
    key = next(iter(states[0]))
    assert torch.equal(states[0][key], states[1][key])
    assert not torch.equal(states[0][key], states[2][key])


def test_a_factory_that_changed_is_noticed() -> None:
    answer("osp", *OWN, *SHORT, "--train-on", "prior", "--out", "run")
    Path("mine.py").write_text(CODE.replace("16", "17"))
    sys.modules.pop("mine")
    for command, words in {"export": OWN[2:], "profile": OWN[2:], "certify": OWN}.items():
        assert "the network that was built is not that of run/model.safetensors" in refusal(command, "run", *words)
    result = store.result(Path("run"))
    _, model = commands.prepare(opt.Osp(data="mine:stripes", model="mine:net"))
    assert commands.architecture(model) != result["architecture"]


def test_code_that_only_a_run_folder_names_is_not_imported() -> None:
    answer("pbp", "--commit", *OWN, *SHORT, "--posterior-epochs", "1", "--unlabelled", "9", "--out", "sealed")
    answer("osp", *OWN, *SHORT, "--train-on", "prior", "--out", "run")
    sys.modules.pop("mine")
    Path("mine.py").write_text("raise AssertionError('it was imported')")
    model = "has the model 'mine:net', which is code that would be imported and called; if you trust it, give --model"
    for words in (["export", "run"], ["profile", "run"], ["certify", "run"], ["commit", "sealed"]):
        assert model in refusal(*words)
        assert model in refusal(*words, "--model", "mine:other")
    assert model in refusal("certify", "sealed", "--beacon", "88888888888877aa")
    assert "has the data 'mine:stripes', which is code" in refusal("certify", "run", *OWN[2:])
    # Names of files are none of networks: what stands before the colon would be imported.
    config = Path("run/config.toml")
    for name in ("folder:net", "mine:net.npz"):
        config.write_text(re.sub("^model = .*", f'model = "{name}"', config.read_text(), flags=re.MULTILINE))
        assert f"has the model '{name}', which is code" in refusal("export", "run")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mine:absent", "the model 'mine:absent' cannot be made (AttributeError"),
        (
            "nowhere.at_all:net",
            "ModuleNotFoundError: No module named 'nowhere'); give package.module:function, of a module",
        ),
        ("mine:fails", "the model 'mine:fails' cannot be made (RuntimeError: no luck); mine:fails itself raised that"),
        ("faulty:net", "No module named 'nothing_like_it'); the import of faulty raised that"),
        ("mine:number", "mine:number made a int; it must make a torch.nn.Module"),
        (
            "mine:needs",
            "'depth'); give package.module:function, whose parameters are among 'shape', 'inputs', 'classes'",
        ),
        ("mine:wide", "the network of mine:wide cannot take examples of shape (9,) (RuntimeError"),
        ("mine:narrow", "gives a Tensor of shape (2, 2) for 2 examples of 3 classes, but it must give (2, 3)"),
        ("mine:twice", "gives a tuple of shape () for 2 examples"),
        (
            "net",
            "model 'net' is unknown; use one of mlp, lenet5, resnet20, or a function such as package.module:factory",
        ),
    ],
)
def test_a_bad_factory_gets_one_sentence(model: str, message: str) -> None:
    assert message in refusal("osp", "--data", "mine:stripes", "--model", model)


def test_bad_data_get_one_sentence() -> None:
    np.savez("mine.npz", x=np.zeros((9, 2)), y=np.zeros(9))
    Path("photos/only").mkdir(parents=True)
    assert "labels are integers or Booleans: one number per example" in refusal("osp", "--data", "mine.npz")
    assert "photos has 1 sub-folder;" in refusal("osp", "--data", "folder:photos")
    assert "cannot be made" in refusal("pbp", "--data", "mine:absent")


def test_a_test_part_that_leaked_is_said_in_the_report() -> None:
    x, y = np.random.default_rng(0).random((90, 9), dtype=np.float32), np.arange(90) % 3
    np.savez("leak.npz", x=x, y=y, x_test=x[:30], y_test=y[:30])
    with pytest.warns(UserWarning, match="30 of the 30 test examples are also among the 90"):
        done = call("osp", "--data", "leak.npz", "--model", "mine:net", *SHORT, "--out", "run")
    sentence = "30 of the 30 test examples are also among the training data, so that the test errors have leaked."
    assert sentence in done.stdout
    assert sentence in Path("run/report.html").read_text()


@pytest.mark.parametrize("command", ["pft", "osp", "pbp"])
def test_inputs_that_the_network_does_not_take_are_one_sentence(command: str) -> None:
    np.savez("tokens.npz", x=np.arange(3000).reshape(300, 10), y=np.arange(300) % 3)
    line = refusal(command, "--data", "tokens.npz", "--model", "mlp")
    assert "the network of mlp cannot take examples of shape (10,) in torch.int64" in line


def test_a_reference_may_have_another_factory() -> None:
    words = ("--train-on", "prior", "--data", "mine:stripes")
    answer("osp", *words, *SHORT, "--model", "mine:net", "--sparsity", "0.5", "--out", "small")
    answer("osp", *words, *SHORT, "--model", "mine:Net", "--sparsity", "0", "--out", "large")
    asked = (
        "certify",
        "small",
        "--risk",
        "drop",
        "--reference",
        "large",
        "--data",
        "mine:stripes",
        "--model",
        "mine:net",
    )
    assert "if you trust it, give --reference-model mine:Net" in call(*asked).stderr
    assert answer(*asked, "--reference-model", "mine:Net")["n"] > 0
