"""The package itself: its public names come when they are used, and public modules have a second name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pacprune


def run(script: str) -> str:
    env = os.environ | {"PYTHONPATH": str(Path(pacprune.__file__).parents[1])}
    process = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_package_alone_imports_no_torch() -> None:
    assert run("import pacprune, sys; pacprune.__version__; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("alias_first", [True, False])
def test_a_public_module_has_two_names_and_exists_once(alias_first: bool) -> None:
    script = f"""
import pacprune as pp
from importlib import import_module
for name, place in pp.ALIASES.items():
    places = [f"pacprune.{{name}}", f"pacprune.{{place}}"][:: 1 if {alias_first} else -1]
    first, second = map(import_module, places)
    assert first is second is getattr(pp, name), name
    assert first.__name__ == first.__spec__.name == f"pacprune.{{place}}", name
from pacprune import *
print(fit.__module__, scores.__name__, pp.data.NAMES[0])
"""
    assert run(script) == "pacprune.training.fit pacprune.masking.criteria digits"


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name in ("prune_it", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'pacprune' has no attribute '{name}'"):
            getattr(pacprune, name)
