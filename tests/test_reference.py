"""The public interface: every parameter is documented, every function says what it returns, every example runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pacprune
import pacprune as pp

PARAMETER = r"^\s+\*{{0,2}}{name}: \S"
KERNELS_OF_A_GPU = (
    "triton_sampler",
    "triton_threshold",
    "triton_groups",
    "triton_block_adam",
    "grouped",
    "gate_sums",
)  # they import triton, which needs a GPU
EXAMPLES_ALIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> Iterator[tuple[str, Any]]:
    """All public names with their values: those of pacprune, and those of its public modules."""
    for name in pacprune.__all__:
        value = getattr(pacprune, name)
        if not inspect.ismodule(value):
            yield name, value
            continue
        for inner in value.__all__:
            member = getattr(value, inner)
            if not inspect.ismodule(member) and getattr(member, "__module__", "").startswith("pacprune"):
                yield f"{name}.{inner}", member


def documented() -> dict[str, Callable[..., Any]]:
    """Public functions, public classes, and the public methods of these classes."""
    entries = {}
    for name, value in public():
        if inspect.isclass(value):
            entries[name] = value
            methods = {n: m for n, m in vars(value).items() if inspect.isfunction(m) and not n.startswith("_")}
            entries |= {f"{name}.{n}": m for n, m in methods.items() if n != "forward"}
        elif callable(value):
            entries[name] = value
    return entries


DOCUMENTED = documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_parameter_is_documented(name: str) -> None:
    entry = DOCUMENTED[name]
    doc = inspect.getdoc(entry) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    text = section[1] if section else ""
    try:
        parameters = [parameter for parameter in inspect.signature(entry).parameters if parameter != "self"]
    except ValueError:  # a class without a signature of its own
        return
    missing = [p for p in parameters if not re.search(PARAMETER.format(name=re.escape(p)), text, re.MULTILINE)]
    assert missing == [], f"`Args:` of {name} has no line for {missing}"
    listed = re.findall(r"^    \*{0,2}(\w+): ", text, re.MULTILINE)
    assert [p for p in listed if p not in parameters] == [], f"{name} documents parameters that it has not"


@pytest.mark.parametrize("name", [n for n, entry in DOCUMENTED.items() if inspect.isfunction(entry) and "." not in n])
def test_every_function_says_what_it_returns_and_shows_an_example(name: str) -> None:
    doc, signature = inspect.getdoc(DOCUMENTED[name]) or "", inspect.signature(DOCUMENTED[name])
    assert ">>> " in doc, f"{name} shows no example"
    assert "Returns:" in doc or signature.return_annotation is None, f"{name} does not say what it returns"


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(pacprune.__path__, "pacprune.")]
    return [n for n in names if n.rpartition(".")[2] not in (*KERNELS_OF_A_GPU, "__main__")]


@pytest.mark.parametrize("module", modules())
def test_every_example_runs(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples share these names: pp, torch, a small `model`, the digits as `split`, and its training data `x`, `y`."""
    monkeypatch.chdir(tmp_path)
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module):
        if not example.examples:
            continue
        torch.manual_seed(0)
        split = pp.data.digits(prior_fraction=0.5, seed=0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        names = {"pp": pp, "torch": torch, "split": split, "model": model, "x": split.train.x, "y": split.train.y}
        example.globs.update(names)
        report: list[str] = []
        outcome = doctest.DocTestRunner(optionflags=EXAMPLES_ALIKE).run(example, out=report.append)
        assert outcome.failed == 0, "".join(report)


def test_only_public_names_are_shown() -> None:
    assert set(dir(pacprune)) == {*pacprune.__all__, "__version__"}
    public_modules = [value for name in pacprune.__all__ if inspect.ismodule(value := getattr(pacprune, name))]
    assert [module.__name__ for module in public_modules if not hasattr(module, "__all__")] == []
