"""The state of the house: sizes, words, versions, docstrings and dependencies."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pacprune

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Private paths, and words about how the text came about: a reader can use neither. The brackets keep this file clean.
PRIVATE = re.compile(r"/[w]ork/|/[f]arm/|\b[S]PEC\.md|\b[D]ESIGN\.md|\b[P]EERS\.md")
UNFINISHED = re.compile(r"\b[T]ODO\b|\b[F]IXME\b|\b[X]XX\b|[f]uture work|\b[p]art [2-7] of\b|\b[i]ssue #?\d", re.I)
MAKING = re.compile(r"\b[s]ubagent|\b[A]I (agent|assistant)|\b[h]elper (session|agent)", re.I)
SHARED = re.compile(r"\.\./[s]hared")


def repository_files() -> list[Path]:
    """What git tracks or would add; skips outside a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and its signature."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return 0 if not body or function.end_lineno is None else function.end_lineno - body[0].lineno + 1


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: str(f.relative_to(ROOT / "src")))
def test_every_function_fits_on_a_screen(source: Path) -> None:
    functions = [f for f in ast.walk(ast.parse(source.read_text())) if isinstance(f, ast.FunctionDef)]
    kernels = [f for f in functions if any("triton" in ast.unparse(d) for d in f.decorator_list)]
    long = {f.name: body_lines(f) for f in functions if f not in kernels and body_lines(f) > 60}
    assert long == {}, "a function is one thought: give the parts names of their own"


def test_no_file_is_over_one_mebibyte() -> None:
    kept = ROOT / "results" / "certificates"  # the weights of certified networks, so that anyone can check them
    assert [f for f in repository_files() if f.stat().st_size > 2**20 and kept not in f.parents] == []


def test_the_repository_speaks_of_the_product_alone() -> None:
    found = []
    for file in repository_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # not text
        # The continuous-integration script is the one place that knows where it may find the real data.
        patterns = [PRIVATE, UNFINISHED, MAKING] + ([] if file == ROOT / ".ci" / "run" else [SHARED])
        words = [match[0] for pattern in patterns for match in pattern.finditer(text)]
        found += [f"{file.relative_to(ROOT)}: {word}" for word in words]
    assert found == []


def test_the_version_is_the_same_everywhere() -> None:
    assert pacprune.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", pacprune.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(pacprune, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        doc = inspect.getdoc(value) or ""
        # A dataclass without a docstring is given its signature as one.
        assert doc, f"pacprune.{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"pacprune.{name} has no docstring"


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: str(f.relative_to(ROOT / "src")))
def test_only_core_dependencies_are_imported(source: Path) -> None:
    allowed = {"pacprune", "torch", "numpy", "safetensors"}
    if source.parent.name in ("cli", "paper", "bench", "runs"):
        allowed |= {"typer", "rich", "matplotlib", "filelock"}
    if source.parent.name == "integrations":
        allowed |= {source.stem} & {"transformers", "lightning"}
    if source.name in (
        "triton_sampler.py",
        "triton_threshold.py",
        "triton_groups.py",
        "triton_block_adam.py",
        "grouped.py",
        "gate_sums.py",
    ):
        allowed.add("triton")
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").split(".")[0])
    assert imported - allowed - sys.stdlib_module_names == set()
