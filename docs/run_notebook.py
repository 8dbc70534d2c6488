"""Runs the cells of a notebook in order, and stores what they print and draw.

python docs/run_notebook.py [NOTEBOOK]: nothing but this file and matplotlib is needed.
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")


def run(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The outputs of the cells, which share one namespace; a figure that a cell leaves open is one of its outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [outputs(cell, i, namespace) if cell["cell_type"] == "code" else [] for i, cell in enumerate(cells)]


def outputs(cell: dict[str, Any], number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What one cell prints and draws, as nbformat has it."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    shown: list[dict[str, Any]] = []
    if stream.getvalue():
        text = stream.getvalue().splitlines(keepends=True)
        shown.append({"name": "stdout", "output_type": "stream", "text": text})
    for picture in pictures():
        data = {"image/png": base64.b64encode(picture).decode(), "text/plain": ["<Figure>"]}
        shown.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return shown


def pictures() -> list[bytes]:
    """The open figures as PNG files, which are closed then."""
    import matplotlib.pyplot as plt

    drawn = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
        drawn.append(file.getvalue())
    plt.close("all")
    return drawn


def main(path: Path) -> None:
    """Writes the outputs into the notebook."""
    import matplotlib

    matplotlib.use("agg")
    notebook = json.loads(path.read_text())
    for cell, shown in zip(notebook["cells"], run(notebook["cells"]), strict=True):
        if cell["cell_type"] == "code":
            cell["outputs"] = shown
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
