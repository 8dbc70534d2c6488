"""Jobs on the CPU, at the scale smoke, in a folder of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacprune.paper.frame import Job


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """make_job(folder, seed=1) is a job in that folder."""

    def make(folder: Path, **changes: Any) -> Job:
        return replace(Job("smoke", folder, 0, torch.device("cpu"), None, lambda *_: None), **changes)

    return make


@pytest.fixture
def job(make_job: Callable[..., Job], tmp_path: Path) -> Job:
    return make_job(tmp_path)
