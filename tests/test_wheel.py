"""The built wheel, unpacked into another folder, holds all of the package and passes the unit tests there."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pacprune"
UNIT_TESTS = [
    "test_philox.py",
    "test_models.py",
    "bounds/test_bounds.py",
    "masking/test_masks.py",
    "masking/test_spikeslab.py",
]


def run(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{arguments} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content. It is built from a copy, so that nothing is left in, or comes from, an older build."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignore)
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("pacprune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_holds_every_file_of_the_package(unpacked: Path) -> None:
    def files(package: Path) -> set[Path]:
        return {f.relative_to(package) for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts}

    assert files(unpacked / "pacprune") == files(PACKAGE)
    assert Path("py.typed") in files(unpacked / "pacprune")
    assert {f.name for f in unpacked.iterdir()} == {"pacprune", *(f.name for f in unpacked.glob("*.dist-info"))}


def test_the_metadata_names_licence_and_dependencies(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    core = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert core == {"torch>=2.10", "numpy", "safetensors", "filelock>=3.30", "typer", "rich"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").is_file()


def test_the_wheel_runs_in_another_folder(unpacked: Path, tmp_path: Path) -> None:
    where = run("-c", "import pacprune; print(pacprune.__file__)", cwd=tmp_path, path=unpacked)
    assert Path(where.strip()).parent == unpacked / "pacprune"
    assert "demo" in run("-m", "pacprune", "--help", cwd=tmp_path, path=unpacked)
    digits = "import pacprune as pp; print(len(pp.data.digits().test))"
    assert run("-W", "error", "-c", digits, cwd=tmp_path, path=unpacked) == "360\n"


def test_the_library_loads_nothing_of_the_command_line(unpacked: Path, tmp_path: Path) -> None:
    loaded = run("-c", "import pacprune, sys; pacprune.fit; print(*sys.modules)", cwd=tmp_path, path=unpacked).split()
    assert "torch" in loaded
    assert {"typer", "rich", "matplotlib", "transformers", "lightning"} & set(loaded) == set()


def test_the_wheel_passes_the_unit_tests(unpacked: Path, tmp_path: Path) -> None:
    for name in ["conftest.py", *UNIT_TESTS]:
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = [Path(name).name for name in UNIT_TESTS]
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=tmp_path, path=unpacked)
