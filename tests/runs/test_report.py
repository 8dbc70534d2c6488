"""Figures and report.html of a run folder, read as files and in a browser."""

import base64
import csv
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacprune.certification.bounds_table import BOUNDS
from pacprune.certification.certificate import Certificate
from pacprune.certification.decode import load
from pacprune.cli import app
from pacprune.methods.table import METHODS
from pacprune.runs import report, store

PNG = b"\x89PNG\r\n\x1a\n"
COMMAND = "pacprune pbp --seed 3 --dense-epochs 4 --epochs 4 --posterior-epochs 2 --delta 0.1 --draws 50"
FIGURES = ["methods", "certificate", "layers", "curves", "keep_prob"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of pbp, which has every figure."""
    out = tmp_path_factory.mktemp("runs") / "pbp"
    result = CliRunner().invoke(app.build(), [*COMMAND.split()[1:], "--out", str(out), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == store.result(out)
    return out


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def certificate(folder: Path) -> Certificate:
    return load(folder / "certificate")


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "figures" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_result_repeats_the_certificate(folder: Path, certificate: Certificate) -> None:
    result = store.result(folder)
    assert result["certificate"] == certificate.bound
    for name in ("risk", "risk_upper", "draws", "kl", "n", "bounds", "winner", "statement"):
        assert result[name] == getattr(certificate, name)
    assert result["delta"] == pytest.approx(0.1)
    assert result["expected_sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert result["sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert 0 <= result["thresholded_error"] <= 1


def test_the_report_has_no_script_and_loads_nothing(page: str) -> None:
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", page)
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == len(FIGURES)
    for source in sources:
        kind, content = source.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content, validate=True).startswith(PNG)


def test_every_file_that_is_linked_is_in_the_page(page: str, folder: Path) -> None:
    links = re.findall(r'<a download="([^"]*)" href="data:[\w/]+;base64,([^"]*)"', page)
    assert len(links) == page.count("href=") == len(FIGURES) + 1
    for name, content in links:
        (file,) = folder.glob(f"*/{name}")
        assert base64.b64decode(content, validate=True) == file.read_bytes()


def test_the_report_states_the_certificate_its_assumptions_and_its_commands(
    page: str, certificate: Certificate
) -> None:
    text = unescape(page)
    assert certificate.statement in text
    assert report.sentence(certificate.winner) in text
    assert all(report.sentence(line) in text for line in certificate.record["assumptions"])
    assert '<pre id="verify">pacprune verify certificate</pre>' in text
    assert f'<pre id="command">{COMMAND}</pre>' in text


def test_the_report_lists_every_bound_and_marks_the_claim(page: str, certificate: Certificate) -> None:
    (table,) = re.findall(r'<table id="bounds">(.*?)</table>', unescape(page), re.DOTALL)
    assert table.count("<tr>") == 1 + len(certificate.bounds) == 1 + len(BOUNDS)
    assert "What its delta of 0.1 pays for" in table
    for name, value in certificate.bounds.items():
        assert BOUNDS[name].label in table
        assert f"<td>{report.percent_up(value)}</td>" in table
    label, bound = BOUNDS["seeger"].label, report.percent_up(certificate.bound)
    claim = f"<strong>{label}</strong><small>the claim</small></th><td>{bound}</td>"
    assert f"{claim}<td>0.08 PAC-Bayes + 0.02 Monte Carlo</td>" in table
    assert "They do not hold all at once" in page


def test_a_test_error_that_counts_examples_has_its_interval(page: str, folder: Path) -> None:
    result = store.result(folder)
    (dense, _), examples = result["rows"], result["test_examples"]
    wrong = round(dense["test_error"] * examples)
    assert f"{report.percent(dense['test_error'])}<small>{wrong} of {examples}<br>" in page
    assert page.count(f" of {examples}<br>") == 1  # the other one is a mean over drawn networks


def test_the_report_says_what_the_method_does_and_what_comes_next(page: str) -> None:
    assert METHODS["pbp"].steps in unescape(page)
    assert '<pre id="next">pacprune export . --out small.safetensors\npacprune profile .</pre>' in page


def test_bounds_are_rounded_up(page: str, folder: Path) -> None:
    (dense, pbp) = store.result(folder)["rows"]
    assert f"<td>{report.percent_up(pbp['certificate'])}</td><td>{report.percent_up(pbp['held_out'])}</td>" in page
    assert report.percent_up(0.0900001) == "9.01 %"
    assert dense["certificate"] is None


def test_figures_are_small_and_have_their_numbers(folder: Path, certificate: Certificate) -> None:
    assert sorted(f.name for f in (folder / "figures").iterdir()) == sorted(
        f"{name}.{kind}" for name in FIGURES for kind in ("csv", "png")
    )
    assert all(f.stat().st_size < 100_000 for f in (folder / "figures").iterdir())
    assert len(table(folder, "curves")) == 4 + 4 + 2
    layers = table(folder, "layers")
    pruned = sum(float(row["sparsity"]) * int(row["weights"]) for row in layers)
    assert pruned / sum(int(row["weights"]) for row in layers) == pytest.approx(store.result(folder)["sparsity"])
    assert sum(int(row["posterior"]) for row in table(folder, "keep_prob")) == 50_200
    for pieces, name in zip(table(folder, "certificate"), ("seeger", "q_equals_p", "held_out"), strict=True):
        parts = [float(pieces[part] or 0) for part in ("empirical risk", "Monte Carlo", "confidence", "KL")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(certificate.bounds[name])


def test_report_rebuilds_what_was_deleted(folder: Path, page: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "figures")
    (copy / "report.html").unlink()
    result = CliRunner().invoke(app.build(), ["report", str(copy)])
    assert result.stdout == f"Report: {copy / 'report.html'}\n"
    assert (copy / "report.html").read_text() == page


def test_report_can_be_written_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    result = CliRunner().invoke(app.build(), ["report", str(folder), "--out", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["report"] == str(tmp_path / "report.html")
    links = re.findall(r'href="([^"]*)"', (tmp_path / "report.html").read_text())
    assert all(link.startswith("data:") for link in links)  # nothing to follow to another place
    assert {f: f.stat().st_mtime_ns for f in folder.rglob("*")} == before


def test_without_matplotlib_the_numbers_remain(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = report.write(folder, store.result(folder), out=tmp_path)
    assert 'pip install "pacprune[plot]"' in unescape(path.read_text())
    assert sorted(f.suffix for f in (tmp_path / "figures").iterdir()) == [".csv"] * len(FIGURES)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
def test_a_browser_shows_the_table_and_the_figures(folder: Path, page: str, tmp_path: Path) -> None:
    # The copy counts its pictures and the rows that take up space on the screen; the report itself has no script.
    probe = """<script>onload = () => {
      document.body.dataset.widths = [...document.images].map(image => image.naturalWidth);
      const rows = [...document.querySelectorAll("#results tbody tr")];
      document.body.dataset.rows = rows.filter(row => row.offsetHeight > 0).length;
    }</script></body>"""
    (tmp_path / "report.html").write_text(page.replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    process = subprocess.run(
        ["chromium", *flags, (tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    (widths,) = re.findall(r'data-widths="([\d,]*)"', process.stdout)
    assert len(widths.split(",")) == len(FIGURES)
    assert all(int(width) > 500 for width in widths.split(","))
    assert 'data-rows="2"' in process.stdout
    assert store.result(folder)["statement"] in unescape(process.stdout)
