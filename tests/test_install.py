"""The wheel and the sdist install with pip and with uv, on every supported Python that this machine has.

torch is not installed into these environments. Checked is what the archives hold, and that each Python reads them.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.11", "3.12", "3.13"]
BUILD = "import setuptools.build_meta as build; build.build_sdist('..')"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def interpreter(version: str) -> Path:
    """A Python of this version, or the test is skipped; a shim of pyenv that leads nowhere does not count."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    for place in filter(None, places):
        works = subprocess.run([place, "-c", "import venv"], capture_output=True)
        if works.returncode == 0:
            return Path(place)
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, made from a copy of the sources, and the wheel that is made from the sdist."""
    folder = tmp_path_factory.mktemp("archives")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "source" / "src", ignore=ignore)
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, folder / "source")
    run(sys.executable, "-c", BUILD, cwd=folder / "source")
    (sdist,) = folder.glob("pacprune-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", str(folder), str(sdist), cwd=folder)
    return folder


def test_the_sdist_holds_the_package(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    (wheel,) = archives.glob("*.whl")
    package = ROOT / "src" / "pacprune"
    files = {f"pacprune/{f.relative_to(package)}" for f in package.rglob("*") if f.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in files} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    with zipfile.ZipFile(wheel) as archive:
        assert files == {name for name in archive.namelist() if name.startswith("pacprune/")}


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs(archives: Path, tmp_path: Path, version: str, tool: str) -> None:
    uv = shutil.which("uv")
    if tool == "uv" and uv is None:
        pytest.skip("there is no uv here")
    run(interpreter(version), "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = archives.glob("*.whl")
    if tool == "pip":
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    else:
        run(str(uv), "pip", "install", "-q", "--python", python, "--no-deps", "--offline", wheel)
    where = "import importlib.util as u; print(u.find_spec('pacprune').submodule_search_locations[0])"
    package = Path(run(python, "-c", where, cwd=tmp_path).strip())
    assert package.is_relative_to(tmp_path)
    assert (python.parent / "pacprune").is_file()
    run(python, "-W", "error", "-m", "compileall", "-q", "-f", package)
