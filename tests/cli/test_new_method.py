"""A method that is added to METHODS has its command, help, flags and run without another change."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pacprune

SCRIPT = """
    import json
    import sys

    from pacprune.cli.app import main
    from pacprune.methods.one_shot import osp
    from pacprune.methods.table import METHODS, Method

    METHODS["halves"] = Method(
        osp, "Halving", "prune once, as an example", "halves", "#abcdef", "o", steps="Nothing new.",
        flags=("criterion", "min_per_layer"),
    )
    for words in json.loads(sys.argv[1]):
        sys.argv[1:] = words
        try:
            main()
        except SystemExit as end:
            assert not end.code
        print("END")
"""


def run(*commands: list[str], folder: Path) -> list[str]:
    """What the commands print, one after another in a process of their own."""
    env = os.environ | {"PYTHONPATH": str(Path(pacprune.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(commands)]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout.split("END\n")[:-1]


def test_a_new_row_is_a_command(tmp_path: Path) -> None:
    flags = "--sparsity 0.5 --epochs 1 --dense-epochs 1 --criterion random --json --out run"
    listed, help_text, answer = run(["--help"], ["halves", "--help"], ["halves", *flags.split()], folder=tmp_path)
    assert "halves" in listed
    assert "Halving: prune once, as an example." in listed
    assert "--criterion" in help_text
    assert "What ranks the weights" in help_text
    result = json.loads(answer)
    assert result["rows"][-1]["method"] == "halves"
    assert result["sparsity"] == 0.5
    assert "Halving" in (tmp_path / "run" / "report.html").read_text()
