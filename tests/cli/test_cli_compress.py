"""`pacprune compress`: the folder that it leaves, and what it refuses."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pacprune.certification import verify
from pacprune.certification.decode import load
from pacprune.cli import app

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
    assert result["headline"].startswith(f"Compressed to {result['sparsity']:.2%} sparsity")
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


def test_if_none_passes_the_exit_code_is_1_and_nothing_is_certified(tmp_path: Path) -> None:
    words = ("--dense-epochs", "8", "--epochs", "0", "--method", "osp", "--max-disagreement", "0.03", "--sparsities")
    failed = call("compress", *words, "0.97", "--refinements", "0", "--out", str(tmp_path / "run"))
    assert failed.exit_code == 1, failed.stderr
    assert "No candidate passed" in failed.stdout
    assert not (tmp_path / "run" / "certificate").exists()
    assert not (tmp_path / "run" / "packed.safetensors").exists()
    assert call("compress", *words, "0.97", "--refinements", "0", "--out", str(tmp_path / "run")).exit_code == 1


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
