"""A method that is added to METHODS has its command, help, flags and run without another change."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pacprune

SCRIPT = """
    from pacprune.cli.app import main
    from pacprune.methods.one_shot import osp
    from pacprune.methods.table import METHODS, Method

    METHODS["halves"] = Method(
        osp, "Halving", "prune once, as an example", "halves", "#abcdef", "o", steps="Nothing new.",
        flags=("criterion", "min_per_layer"),
    )
    main()
"""


def run(*arguments: str, folder: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(Path(pacprune.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_new_row_is_a_command(tmp_path: Path) -> None:
    listed = run("--help", folder=tmp_path)
    assert "halves" in listed
    assert "Halving: prune once, as an example." in listed
    help_text = run("halves", "--help", folder=tmp_path)
    assert "--criterion" in help_text
    assert "What ranks the weights" in help_text
    flags = ("--sparsity", "0.5", "--epochs", "1", "--dense-epochs", "1", "--criterion", "random", "--json")
    result = json.loads(run("halves", *flags, "--out", "run", folder=tmp_path))
    assert result["rows"][-1]["method"] == "halves"
    assert result["sparsity"] == 0.5
    assert "Halving" in (tmp_path / "run" / "report.html").read_text()
