"""`pacprune compress`: the folder that it leaves, and what it refuses."""

import csv
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from pacprune.certification import verify
from pacprune.certification.decode import load
from pacprune.cli import app
from pacprune.cli.console import as_flags, user_errors

SHORT = (
    *("--dense-epochs", "8", "--epochs", "3", "--max-drop", "0.08", "--sparsities", "0.5,0.8", "--refinements", "1"),
    *("--seed", "3"),
)


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), list(words), prog_name="pacprune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    result = call("compress", *SHORT, "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_the_folder_holds_what_a_user_ships(folder: Path, result: dict[str, Any]) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {"certificate", "packed.safetensors", "order.json", "report.html", "figures", "model.safetensors"}
    assert "checkpoints" not in names
    assert (folder / "packed.safetensors").stat().st_size == result["bytes"]
    assert result["passed"] > 0
    assert result["certificate"] == result["limit"] == 0.08
    order = json.loads((folder / "order.json").read_text())
    assert [entry["sparsity"] for entry in order["networks"]] == [
        point["sparsity"] for point in result["points"] if point["order"] is not None
    ]


def test_the_certificate_verifies_by_the_library_and_by_the_file_alone(folder: Path) -> None:
    checked = call("verify", str(folder), "--recount")
    assert checked.exit_code == 0, checked.stdout
    assert "VALID (level 2" in checked.stdout
    script = [sys.executable, verify.__file__, str(folder / "certificate")]
    assert "VALID" in subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert load(folder / "certificate").limit == 0.08


def test_the_report_leads_with_the_result(folder: Path, result: dict[str, Any]) -> None:
    page = (folder / "report.html").read_text()
    assert result["headline"].startswith(f"Compressed to {round(result['sparsity'], 4):.2%} sparsity")
    assert page.index(result["headline"]) < page.index("<table")
    assert 'id="compression"' in page
    with (folder / "figures" / "compression.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(result["points"])


def test_a_finished_run_is_printed_again(folder: Path, result: dict[str, Any]) -> None:
    again = call("compress", *SHORT, "--out", str(folder))
    assert again.exit_code == 0
    assert result["headline"] in again.stdout
    assert result["statement"] in again.stdout


def test_its_network_can_be_exported(folder: Path, tmp_path: Path) -> None:
    done = call("export", str(folder), "--format", "dense", "--out", str(tmp_path / "net.safetensors"))
    assert done.exit_code == 0, done.stderr


def test_the_command_line_of_the_report_makes_the_same_run(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "pacprune compress" in page
    assert "--max-drop 0.08" in page


FAILING = (
    *("--dense-epochs", "8", "--epochs", "0", "--method", "osp", "--max-disagreement", "0.03", "--sparsities", "0.97"),
    *("--refinements", "0"),
)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "failed"
    return out, call("compress", *FAILING, "--out", str(out))


def test_if_none_passes_the_exit_code_is_1_and_nothing_is_certified(failed: tuple[Path, Result]) -> None:
    run, answer = failed
    assert answer.exit_code == 1, answer.stderr
    assert answer.stdout.count("No candidate passed") == 1
    assert not (run / "certificate").exists()
    assert not (run / "packed.safetensors").exists()
    assert call("compress", *FAILING, "--out", str(run)).exit_code == 1


def test_what_a_failed_run_leaves_says_so_to_every_reader(failed: tuple[Path, Result]) -> None:
    """No certificate: the bound of the densest network, and how many examples would be needed."""
    run, _ = failed
    result = json.loads((run / "result.json").read_text())
    assert (result["passed"], result["certificate"], result["packed"]) == (0, None, None)
    assert result["densest"]["sparsity"] == pytest.approx(0.97, abs=1e-3)
    assert result["densest"]["bound"] > 0.03
    assert "examples_needed" in result["densest"]
    for command in ("verify", "certify", "monitor"):
        refused = call(command, str(run))
        assert refused.exit_code == 2
        assert "there is no certificate in" in refused.stderr
        assert "No candidate passed: nothing shows that" in refused.stderr
    page = (run / "report.html").read_text()
    assert "<h1>No network of the chain is proved to keep the limit</h1>" in page


SIGNS = """
import torch
from torch import nn
def network(inputs, classes):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))
def one(inputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))
def pretrained(inputs):
    model = one(inputs)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0, 0], model[0].weight[1, 0], model[2].weight[0, 0], model[2].weight[0, 1] = 1, -1, 1, -1
        model[0].bias.zero_(), model[2].bias.zero_()
    return model
"""


@pytest.fixture
def signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Examples with four labels each, and a module of networks in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_signs.py").write_text(SIGNS)
    x = np.random.default_rng(0).standard_normal((1500, 6)).astype(np.float32)
    return x, (x[:, :4] > 0).astype(np.int64)


def compress_signs(data: str, model: str, *words: str) -> Result:
    chain = ("--sparsities", "0.3", "--refinements", "0", "--epochs", "4", "--dense-epochs", "4", "--lr", "0.3")
    return call("compress", "--data", data, "--model", model, *chain, *words, "--out", "run", "--json")


def test_one_logit_several_labels_and_inputs_without_labels_serve(signs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = signs
    np.savez("one.npz", x=x, y=y[:, 0])
    np.savez("several.npz", x=x, y=y)
    np.savez("bound.npz", x=x[:800], y=y[:800], x_bound=x[800:], split_declared_random=True)
    for data, model, limit, n in (
        ("one.npz", "mine_signs:one", "--max-drop", 600),
        ("several.npz", "mine_signs:network", "--max-error", 600),
        ("bound.npz", "mine_signs:network", "--max-disagreement", 700),
    ):
        done = compress_signs(data, model, limit, "0.4")
        assert done.exit_code == 0, done.stderr
        assert (json.loads(done.stdout)["passed"], json.loads(done.stdout)["n"]) == (1, n)
        checked = call("verify", "run", "--data", data, "--model", model)
        assert "VALID (level 2" in checked.stdout, checked.stderr
        assert call("export", "run", "--model", model, "--format", "dense", "--out", "net").exit_code == 0
        shutil.rmtree("run")
    refused = call("compress", "--data", "bound.npz", "--model", "mine_signs:network", "--max-drop", "0.1")
    assert "the 700 bound examples have none, but mistakes cannot be counted without them" in refused.stderr
    for data, model, words in (
        ("one.npz", "mine_signs:one", "has 1 output for 2 classes, but pacprune pft trains networks with an output"),
        ("several.npz", "mlp", "labels of shape (4,) for each example, but pacprune pft trains networks that choose"),
    ):
        assert words in call("pft", "--data", data, "--model", model).stderr


def test_a_network_that_was_trained_elsewhere_is_declared(signs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = signs
    np.savez("one.npz", x=x, y=y[:, 0])
    words = ("--dense-epochs", "0", "--max-drop", "0.1")
    refused = compress_signs("one.npz", "mine_signs:pretrained", *words)
    assert refused.exit_code == 2
    assert 'or say what shaped it: --declare "it was trained on ..."' in refused.stderr
    assert not Path("run").exists()
    done = compress_signs("one.npz", "mine_signs:pretrained", *words, "--declare", "its weights were set by hand")
    assert done.exit_code == 0, done.stderr
    assert 'The issuer states: "its weights were set by hand".' in json.loads(done.stdout)["statement"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "there is no limit; give exactly one of --max-error, --max-drop, --max-disagreement"),
        (("--max-error", "0.1", "--max-drop", "0.1"), "--max-error is 0.1 and --max-drop is 0.1; give exactly one"),
        (("--max-drop", "0.1", "--sparsities", "a,b"), "sparsities is 'a,b'; give fractions separated by commas"),
        (("--max-drop", "0.1", "--sparsities", "0.9,0.5"), "sparsities has 0.9 before 0.5"),
        (("--max-drop", "0.1", "--method", "pbp"), "method 'pbp' is unknown"),
        (("--max-drop", "0.1", "--dense-epochs", "0"), "pacprune has never trained the model"),
        (("--max-error", "0.02", "--dense-epochs", "1"), "limit of the error is 0.02, but before pruning it is 0."),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    refused = call("compress", *words, "--out", str(tmp_path / "run"))
    assert refused.exit_code == 2
    assert refused.stdout == ""
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("pacprune: error: ")
    assert sentence in line
    assert not (tmp_path / "run").exists()


def test_own_networks_and_data_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_compress.py").write_text(
        "import torch\n"
        "def network(classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 16), torch.nn.ReLU(),"
        " torch.nn.Linear(16, classes))\n"
        "def data():\n"
        "    x = torch.randn(900, 6, generator=torch.Generator().manual_seed(0))\n"
        "    return x, (x[:, 0] > 0).long()\n"
    )
    words = ("--data", "mine_compress:data", "--model", "mine_compress:network", "--max-error", "0.25")
    done = call("compress", *words, "--sparsities", "0.3", "--refinements", "0", "--out", "run", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["passed"] == 1
    assert call("verify", "run").exit_code == 0


def test_messages_of_the_library_name_flags_on_the_command_line() -> None:
    names = ("max_drop", "reference", "declare", "risk", "delta", "augment")
    for message, line in {
        "give exactly one of max_drop": "give exactly one of --max-drop",
        "max_drop is 2; give a fraction": "--max-drop is 2; give a fraction",
        "delta is 0.0; the delta of a test": "--delta is 0.0; the delta of a test",
        "there is none: give reference=": "there is none: give --reference",
        "as reference= (--reference package.module:factory)": "as --reference package.module:factory",
        'say declare="it was trained on ..."': 'say --declare "it was trained on ..."',
        "augment=True needs images": "--augment needs images",
        "a parameter 'max_drop' of /max_drop/x": "a parameter 'max_drop' of /max_drop/x",
        "the risk is high, and delta is small": "the risk is high, and delta is small",
    }.items():
        assert as_flags(message, names) == line


def test_layers_are_left_out_by_flags(tmp_path: Path) -> None:
    words = (*SHORT, "--refinements", "0", "--exclude", "layers.4*, layers.2*", "--scope", "layer", "--method", "osp")
    result = json.loads(call("compress", *words, "--out", str(tmp_path / "run"), "--json").stdout)
    assert [point["selected_sparsity"] for point in result["points"]] == pytest.approx([0.5, 0.8])
    assert all(point["sparsity"] < point["selected_sparsity"] for point in result["points"])
    assert 'exclude = "layers.4*, layers.2*"' in (tmp_path / "run" / "config.toml").read_text()
    refused = call("compress", *SHORT, "--include", "head*", "--out", str(tmp_path / "none"))
    assert refused.exit_code == 2
    assert "--include 'head*' names no weight of the model" in refused.stderr
    assert not (tmp_path / "none").exists()


def test_a_warning_names_flags() -> None:
    with pytest.warns(UserWarning, match="name them by --include to prune them"), user_errors(["include"]):
        warnings.warn("19 weights are frozen; name them by include= to prune them", stacklevel=1)
