"""Every code block of README.md and docs/*.md runs, in order, in one namespace and one empty folder per file."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacprune.cli import app
from pacprune.data import trace

ROOT = Path(__file__).parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_CODE = {"", "text", "toml", "json"}
NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def up_to_noise(text: str) -> str:
    """A text without its numbers and its breaks: what another machine prints as well."""
    return " ".join(NUMBER.sub("#", text).split())


def run_command(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{line!r} names no target of the Makefile, which has {targets}"
    elif words[:1] == ["pacprune"] or words[:3] == ["python", "-m", "pacprune"]:
        looks = {**trace._looks}
        trace._looks.clear()  # a command is a process of its own
        done = CliRunner().invoke(app.build(), words[words.index("pacprune") + 1 :], prog_name="pacprune")
        assert done.exit_code == 0, f"{line!r} exited with {done.exit_code}:\n{done.stdout}\n{done.stderr}"
        trace._looks.clear()
        trace._looks.update(looks)
    else:
        assert words[:2] == ["pip", "install"], f"{line!r} is not a command that this test can check"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # a reader of one page has issued nothing before
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # a page may write a module of its own
    text = page.read_text()
    for needed in re.findall(r"^<!-- needs (.*) -->$", text, re.MULTILINE):
        for package in needed.split():
            pytest.importorskip(package)
    namespace: dict[str, object] = {"__name__": "__page__"}
    printed, end = "", 0
    for block in FENCE.finditer(text):
        kind, body = block["kind"].strip(), block["body"]
        line = text.count("\n", 0, block.start("body"))
        if kind == "python":
            # Blank lines before the block make a traceback show the line of the page.
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compile("\n" * line + body, page, "exec"), namespace)
            printed, end = stream.getvalue(), block.end()
        elif kind == "text" and printed and not text[end : block.start()].strip():
            assert up_to_noise(body) in up_to_noise(printed), f"{page.name}:{line}: the block above prints {printed}"
        elif kind == "console":
            for command in re.findall(r"^\$ (.*)$", body.replace("\\\n", ""), re.MULTILINE):
                run_command(command)
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
