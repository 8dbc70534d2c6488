"""`pacprune demo`: one table, one certificate, one report, in time."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.runs import commands, store

METHODS = ["dense", "osp", "pft", "pbp"]


def demo(out: Path, *words: str) -> Result:
    return CliRunner().invoke(app.build(), ["demo", "--out", str(out), *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    out, began, threads = tmp_path_factory.mktemp("runs") / "demo", time.process_time(), torch.get_num_threads()
    found = demo(out, "--json")
    assert found.exit_code == 0, found.stderr
    assert torch.get_num_threads() == threads
    return out, json.loads(found.stdout), time.process_time() - began


def test_it_takes_at_most_a_minute_of_computing(done: tuple[Path, dict[str, Any], float]) -> None:
    assert done[2] < 60


def test_it_compares_all_methods(done: tuple[Path, dict[str, Any], float]) -> None:
    rows = {row["method"]: row for row in done[1]["rows"]}
    assert list(rows) == METHODS
    assert rows["dense"]["sparsity"] == 0
    for name in METHODS[1:]:
        assert rows[name]["sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert all(row["test_error"] < 0.08 for row in rows.values())
    assert rows["pbp"]["certificate"] < 0.15
    assert rows["pbp"]["held_out"] < 0.15
    assert rows["osp"]["certificate"] is None


def test_it_leaves_one_certificate_and_one_report(done: tuple[Path, dict[str, Any], float]) -> None:
    out, found, _ = done
    assert list(out.rglob("certificate.json")) == [out / "certificate" / "certificate.json"]
    assert found["folder"] == str(out)
    assert found["certificate"] == found["rows"][-1]["certificate"]
    assert found["statement"] in (out / "report.html").read_text()
    assert CliRunner().invoke(app.build(), ["verify", str(out), "--recount"]).stdout.endswith("\nVALID\n")
    figures = ["certificate", "curves", "keep_prob", "layers", "methods"]
    assert sorted(f.name for f in (out / "figures").glob("*.png")) == [f"{name}.png" for name in figures]
    assert not (out / store.CHECKPOINTS).exists()


@pytest.mark.parametrize("method", METHODS)
def test_the_saved_networks_are_as_sparse_as_the_table_says(
    done: tuple[Path, dict[str, Any], float], method: str
) -> None:
    out, found, _ = done
    weights = [w for w in load_file(out / f"model-{method}.safetensors").values() if w.ndim >= 2]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    assert zeros == pytest.approx(found["rows"][METHODS.index(method)]["sparsity"], abs=1e-4)


def test_a_second_call_trains_nothing_and_shows_the_table(
    done: tuple[Path, dict[str, Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "prepare", lambda _: pytest.fail("a finished demo was begun again"))
    again = demo(done[0])
    for words in (*METHODS, "Test error", "Certificate", "Held-out baseline", "report.html"):
        assert words in again.stdout
    assert json.loads(demo(done[0], "--json").stdout) == done[1]


def test_another_seed_needs_another_folder(done: tuple[Path, dict[str, Any], float]) -> None:
    refused = demo(done[0], "--seed", "1")
    assert refused.exit_code == 2
    assert "seed is 0 there and 1 here" in refused.stderr
