"""The notebook runs from the first cell to the last, and prints and draws what it has stored, up to noise."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[1] / "docs"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
SPREAD = 5.0
"""How far a number may lie from the stored one, in points: another machine rounds otherwise, and trains otherwise."""


def run(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return runpy.run_path(str(DOCS / "run_notebook.py"))["run"](cells)


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def drawn(outputs: list[dict[str, Any]]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def test_the_notebook_shows_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    for i, (cell, outputs) in enumerate(zip(cells, run(cells), strict=True)):
        stored = cell.get("outputs", [])
        assert NUMBER.sub("#", printed(outputs)) == NUMBER.sub("#", printed(stored)), f"cell {i}"
        assert numbers(printed(outputs)) == pytest.approx(numbers(printed(stored)), abs=SPREAD), f"cell {i}"
        assert drawn(outputs) == drawn(stored), f"cell {i}"
    assert sum(drawn(cell.get("outputs", [])) for cell in cells) == 1


def test_the_notebook_is_one_that_others_read() -> None:
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= set(cell)
        assert all(len(line.rstrip("\n")) <= 90 for line in cell["source"] if cell["cell_type"] == "code")
