"""What every test shares: one thread, a cache of its own, and data."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pacprune import data

torch.set_num_threads(1)  # the workers of pytest-xdist share the cores
# torch.compile would build three small programs to see which instructions the compiler knows.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

FOLDERS = {"mnist": "mnist", "fashion-mnist": "fashion-mnist", "cifar10": "cifar-10-batches-bin"}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache or ledger, or opens a window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("MPLBACKEND", "Agg")
        yield


@pytest.fixture(autouse=True, scope="module")
def _own_looks() -> None:
    """What the tests of another file evaluated on is no concern of what this file's fixtures train."""
    from pacprune.data import trace

    trace._looks.clear()


@pytest.fixture(autouse=True)
def _own_start() -> None:
    """No test depends on the random numbers that another one took, or on the examples that it looked at."""
    from pacprune.data import trace

    torch.manual_seed(0)
    trace._looks.clear()


@pytest.fixture(scope="session")
def at_full_size() -> bool:
    """Whether tests that repeat something many times do so in full: `make test-all` asks for it."""
    return os.environ.get("PACPRUNE_TEST_ALL") == "1"


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """real_data("mnist") is the folder for `data_dir`, or skips the test when it lacks that data set."""

    def folder(name: str) -> Path:
        root = Path(os.environ.get("PACPRUNE_DATA", ""))
        if "PACPRUNE_DATA" not in os.environ or not (root / FOLDERS[name]).is_dir():
            pytest.skip(f"PACPRUNE_DATA holds no {FOLDERS[name]}")
        return root

    return folder


@pytest.fixture(scope="session")
def digits() -> "data.Split":
    from pacprune import data

    return data.digits(prior_fraction=0.5, seed=0)
