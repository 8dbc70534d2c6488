"""K models at once beside the same K one after another."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import models
from pacprune.bench.timing import SPARSITY, Finding, Row, Target, largest_that_fits, wait
from pacprune.masking import attachment, criteria, spikeslab
from pacprune.methods.pft import COUPLING
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import fit


def population(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """K models at once beside the same K one after another, dense and with the masks and the budget of pft."""
    sizes = {"smoke": [2], "cuda": [32, 16, 8]}.get(scale, [8])
    yield from largest_that_fits(sizes, lambda k: _population(k, device, scale), device, unit="models at once")


class _Way(NamedTuple):
    """One way to train: a stage, dense or PFT, of one model or of many at once."""

    stage: str
    members: int
    setting: str
    config: Config

    def __str__(self) -> str:
        count = "one model" if self.members == 1 else f"{self.members} models"
        return f"{self.stage} step, {count}, {self.setting}"


Readings = dict[_Way, list[float]]
"""Seconds per model-step of each way, one reading per epoch."""


def _population(k: int, device: torch.device, scale: str) -> Iterator[Finding]:
    if device.type == "cuda":
        name, make, shape = "ResNet20", lambda seed: models.resnet20(seed=seed), (3, 32, 32)
    else:
        name, make, shape = "MLP 64-300-100-10", lambda seed: models.mlp(64, seed=seed), (64,)
    steps, epochs = {"smoke": (2, 3), "cuda": (30, 5)}.get(scale, (20, 3))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(128 * steps, *shape, device=device, generator=generator)
    y = torch.randint(10, (128 * steps,), device=device, generator=generator)
    readings: Readings = {}
    problems: set[str] = set()
    for way in _plan(k, device, scale):
        nets: list[nn.Module] = [make(seed).to(device) for seed in range(way.members)]
        try:
            seconds = _time_epochs(nets, (x, y), way, epochs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as failure:
            problem = f"{way} could not be run: {str(failure).partition(chr(10))[0]}"
            if problem not in problems:
                problems.add(problem)
                yield problem
        else:
            readings.setdefault(way, []).extend(seconds)
    yield from _rows(name, k, readings, device, scale)


def _plan(k: int, device: torch.device, scale: str) -> list[_Way]:
    """The ways to measure, in this order."""
    if device.type == "cuda":
        fast = {"compiled, bfloat16": _config("compiled", amp=True)}
        single = {"eager": _config(), "graph": _config("graph"), "graph, bfloat16": _config("graph", amp=True), **fast}
    else:
        fast = single = {"eager": _config()}
    ways = [_Way("dense", 1, setting, config) for setting, config in single.items()]
    ways += [
        _Way("PFT", 1, setting, config)
        for setting, config in single.items()
        if setting == "graph, bfloat16" or device.type == "cpu"
    ]
    ways += [_Way(stage, k, setting, config) for setting, config in fast.items() for stage in ("dense", "PFT")]
    if device.type == "cuda":
        # Forward and backward: the first way is also measured last. A compiled way is measured once.
        return ways + [way for way in reversed(ways) if way.config.execution != "compiled"]
    return ways * (1 if scale == "smoke" else 5)


def _config(execution: str = "eager", *, amp: bool = False) -> Config:
    return Config(lr=0.01, gate_lr=0.1, execution=execution, amp=amp)


def _time_epochs(nets: list[nn.Module], data: tuple[Tensor, Tensor], way: _Way, epochs: int) -> list[float]:
    """Seconds per model-step of every epoch except the first, which allocates memory and builds kernels."""
    device, per_epoch = data[0].device, len(data[1]) // way.config.batch_size
    budget = None
    if way.stage == "PFT":
        budget = Budget(SPARSITY, schedule="cubic", sharpen=4.0)
        for net in nets:
            slab = spikeslab.score_monotone(net, criteria.magnitude(net), sparsity=SPARSITY)
            attachment.attach(net, slab, coupling=COUPLING)
    ends: dict[int, float] = {}

    def progress(stage: str, step: int, total: int, row: dict[str, Any]) -> None:
        if step % per_epoch == 0:  # called twice: after the last step of an epoch, and after its row is written
            wait(device)
            ends[step] = time.perf_counter()

    config = replace(way.config, epochs=epochs)
    if len(nets) == 1:
        fit(nets[0], data, config, budget=budget, progress=progress)
    else:
        seeds, budgets = list(range(len(nets))), budget and [budget] * len(nets)
        fit(nets, data, config, seed=seeds, budget=budgets, progress=progress)
    return list(np.diff([ends[step] for step in sorted(ends)]) / (per_epoch * len(nets)))


def _rows(name: str, k: int, readings: Readings, device: torch.device, scale: str) -> Iterator[Row]:
    """Each way beside the best way of a single model, the PFT stage beside the dense one, and k models in sequence."""
    best = {}
    for stage, members in itertools.product(("dense", "PFT"), (1, k)):
        ways = [way for way in readings if (way.stage, way.members) == (stage, members)]
        if ways:
            best[stage, members] = min(ways, key=lambda way: float(np.median(readings[way])))
    full_size = scale == "cuda" and k == 32
    limits = {best.get(("dense", k)): 0.40, best.get(("dense", 1)): 2.0} if full_size else {}
    for way in readings:
        reference = best.get((way.stage, 1))
        if reference is not None:
            value = float(np.median(readings[way])) * 1e3 if device.type == "cuda" else None
            target = Target("value", "at most", limits[way]) if way in limits else None
            yield _ratio(f"{name}, {way}", readings, way, reference, "best single model", target, value)
    if ("PFT", k) in best and ("dense", k) in best:
        target = Target("ratio", "at most", 1.25) if full_size else None
        words = f"{name}, PFT / dense, {k} models"
        yield _ratio(words, readings, best["PFT", k], best["dense", k], "dense, best", target)
    for stage in ("dense", "PFT"):
        if (stage, k) in best and (stage, 1) in best:
            target = Target("ratio", "at least", 4.0) if full_size else None
            words = f"{name}, {k} {stage} models in sequence / as a population"
            yield _ratio(words, readings, best[stage, 1], best[stage, k], "population, best", target)


def _ratio(
    name: str,
    readings: Readings,
    way: _Way,
    reference: _Way,
    relative_to: str,
    target: Target | None,
    value: float | None = None,
) -> Row:
    ratios = np.array(readings[way]) / np.median(readings[reference])
    low, ratio, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
    return Row(name, value, "ms per model-step" if value is not None else "", ratio, (low, high), relative_to, target)
