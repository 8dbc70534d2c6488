"""Every code block of README.md and docs/*.md runs, in order, in one namespace and one empty folder per file."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pacprune

ROOT = Path(__file__).parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_CODE = {"", "text", "toml", "json"}


def run_command(line: str, folder: Path) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{line!r} names no target of the Makefile, which has {targets}"
    elif words[:1] == ["pacprune"] or words[:3] == ["python", "-m", "pacprune"]:
        arguments = words[words.index("pacprune") + 1 :]
        # The package under test, wherever it was imported from, also from the new working directory.
        env = os.environ | {"PYTHONPATH": str(Path(pacprune.__file__).parents[1])}
        command = [sys.executable, "-m", "pacprune", *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line!r} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    else:
        assert words[:2] == ["pip", "install"], f"{line!r} is not a command that this test can check"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for needed in re.findall(r"^<!-- needs (.*) -->$", text, re.MULTILINE):
        for package in needed.split():
            pytest.importorskip(package)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in FENCE.finditer(text):
        kind, body = block["kind"].strip(), block["body"]
        line = text.count("\n", 0, block.start("body"))
        if kind == "python":
            # Blank lines before the block make a traceback show the line of the page.
            exec(compile("\n" * line + body, page, "exec"), namespace)
        elif kind == "console":
            for command in re.findall(r"^\$ (.*)$", body.replace("\\\n", ""), re.MULTILINE):
                run_command(command, tmp_path)
        else:
            assert kind in NOT_CODE, f"{page.name}:{line}: a block is python, console or one of {sorted(NOT_CODE)}"


def test_every_fence_is_seen() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*(?:```|~~~)", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(FENCE.findall(page.read_text())), f"{page.name} has a fence that is not run"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_and_tables_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    package = ROOT / "src" / "pacprune"
    for name in re.findall(r"`([\w/]+\.(?:py|cpp|html|md))`", text):
        places = [ROOT / name, package / name, package.parent / name, *package.rglob(name if "/" not in name else "-")]
        assert any(place.is_file() for place in places), f"{page} names {name}, which does not exist"
    for table, file in re.findall(r"`([A-Z_]+)`(?:,)?(?: both)? in `([\w/]+\.py)`", text):
        assert re.search(rf"^{table}\b", (package / file).read_text(), re.MULTILINE), f"{file} has no {table}"
