"""`pacprune demo`: one table, one certificate, one report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.deploy import export
from pacprune.runs import commands, store

METHODS = ["dense", "osp", "pft", "pbp"]


def demo(out: Path, *words: str) -> Result:
    return CliRunner().invoke(app.build(), ["demo", "--out", str(out), *words])


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the demo, and its result."""
    out, threads = tmp_path_factory.mktemp("runs") / "demo", torch.get_num_threads()
    result = demo(out, "--json")
    assert result.exit_code == 0, result.stderr
    assert torch.get_num_threads() == threads
    return out, json.loads(result.stdout)


def test_it_trains_120_epochs_of_the_digits(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    assert len(store.metrics(finished_demo[0])) == 120  # about 15 s on one core


def test_it_compares_all_methods(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["method"]: row for row in finished_demo[1]["rows"]}
    assert list(rows) == METHODS
    assert rows["dense"]["sparsity"] == 0
    for name in METHODS[1:]:
        assert rows[name]["sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert all(row["test_error"] < 0.08 for row in rows.values())
    assert rows["pbp"]["certificate"] < 0.15
    assert rows["pbp"]["held_out"] < 0.15
    assert rows["osp"]["certificate"] is None


def test_it_begins_with_a_network_that_keeps_its_promise(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished_demo
    promise, report = result["compressed"], (out / "report.html").read_text()
    assert promise["passed"] >= 1
    assert promise["limit"] == 0.02
    assert promise["sparsity"] >= 0.5
    assert result["headline"].startswith(f"Compressed to {promise['sparsity']:.2%} sparsity")
    assert promise["statement"] in report
    assert report.index("Compressed to") < report.index('id="results"')
    small = export.load(out / "compressed" / "packed.safetensors")
    weights = [weight for weight in small.values() if weight.ndim >= 2]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    assert zeros == pytest.approx(promise["sparsity"], abs=1e-4)
    assert CliRunner().invoke(app.build(), ["verify", str(out / "compressed"), "--recount"]).exit_code == 0


def test_the_second_certificate_pays_for_two(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    assert finished_demo[1]["tries"]["declared"] == 2


def test_it_leaves_two_certificates_and_one_report(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished_demo
    places = [out / "certificate", out / "compressed" / "certificate"]
    assert sorted(path.parent for path in out.rglob("certificate.json")) == places
    assert result["folder"] == str(out)
    assert result["certificate"] == result["rows"][-1]["certificate"]
    assert result["statement"] in (out / "report.html").read_text()
    assert CliRunner().invoke(app.build(), ["verify", str(out), "--recount"]).exit_code == 0
    figures = ["certificate", "compression", "curves", "keep_prob", "layers", "methods"]
    assert sorted(f.name for f in (out / "figures").glob("*.png")) == [f"{name}.png" for name in figures]
    assert not (out / store.CHECKPOINTS).exists()


@pytest.mark.parametrize("method", METHODS)
def test_the_saved_networks_are_as_sparse_as_the_table_says(
    finished_demo: tuple[Path, dict[str, Any]], method: str
) -> None:
    out, result = finished_demo
    weights = [w for w in load_file(out / f"model-{method}.safetensors").values() if w.ndim >= 2]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    assert zeros == pytest.approx(result["rows"][METHODS.index(method)]["sparsity"], abs=1e-4)


def test_a_second_call_trains_nothing_and_shows_the_table(
    finished_demo: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "prepare", lambda _: pytest.fail("a finished demo was begun again"))
    again = demo(finished_demo[0])
    for words in (*METHODS, "Test error", "Certificate", "Held-out baseline", "report.html"):
        assert words in again.stdout
    result = finished_demo[1]
    assert f"{result['statement']}\n{result['tries']['text']}\n" in again.stdout
    assert json.loads(demo(finished_demo[0], "--json").stdout) == finished_demo[1]


def test_another_seed_needs_another_folder(finished_demo: tuple[Path, dict[str, Any]]) -> None:
    refused = demo(finished_demo[0], "--seed", "1")
    assert refused.exit_code == 2
    assert "seed is 0 there and 1 here" in refused.stderr
