"""Strong lottery tickets: a network whose weights are never trained, and masks that are.

The paper's figure on CIFAR-10 with ResNet20: test error of networks drawn from the trained stochastic mask, started
from an isotropic mask or from SNIP's, and beside it the one network that keeps the likeliest weights.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pacprune import data
from pacprune.masking import criteria, masks
from pacprune.masking.attachment import attach, harden, read, resample_
from pacprune.masking.spikeslab import block_isotropic, isotropic, top_mask
from pacprune.paper import comparison, painting, pft_vs_osp
from pacprune.paper.comparison import Contest, Task
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.types import Table

_FROZEN = Config(lr=0.0, gate_lr=20.0, momentum=0.9)
"""Only the gates learn."""
DRAWS = 10
"""Networks drawn from every trained mask."""
STARTS = ("random", "snip")
_COLOUR = pft_vs_osp.SETTINGS["reduced"][-1].changed(
    sparsities=(0.3, 0.5, 0.7, 0.9, 0.95), pruning=replace(_FROZEN, epochs=30, augment=True)
)

SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (
        pft_vs_osp.SETTINGS["smoke"][0].changed(sparsities=(0.5, 0.9), seeds=2, pruning=replace(_FROZEN, epochs=4)),
    ),
    "reduced": (_COLOUR,),
    "paper": (_COLOUR.changed(pruning=replace(_COLOUR.pruning, epochs=100)),),
}


class Entry(NamedTuple):
    """One untrained network and the mask that it starts from."""

    start: str
    sparsity: float
    seed: int


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error of untrained networks against sparsity."""
    yield Figure(
        f"strong-tickets-{setting.name}",
        f"{setting.data}, {setting.model}, weights never trained: test error of {DRAWS} networks drawn from the "
        "trained mask, which share BatchNorm's statistics, and of its thresholded network, which has its own; mean "
        f"and 95 % interval over {setting.seeds} seeds (weights, data order and masks are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: {
            f"thresholded error from {start} at {sparsity}": mean
            for (start, sparsity), mean in means(rows, "thresholded_error", "start", "sparsity").items()
        },
    )


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per start, sparsity and seed."""
    task = comparison.report_task(setting, data.load(setting.data, seed=0, data_dir=job.data_dir), job)
    entries = [
        Entry(start, sparsity, seed)
        for start in STARTS
        for sparsity in setting.sparsities
        for seed in job.seeds(setting.seeds)
    ]
    table: Table = []
    for portion in job.portions(entries):
        nets = [_start(entry, task, job) for entry in portion]
        seeds, budgets = [entry.seed for entry in portion], [Budget(entry.sparsity) for entry in portion]
        fit(nets, task.data, setting.pruning, budget=budgets, seed=seeds, stage="masks", progress=job.progress)
        errors = _errors(nets, [entry.sparsity for entry in portion], task)
        for entry, (draws, thresholded) in zip(portion, errors, strict=True):
            mean = sum(draws) / DRAWS
            table.append(
                {"dataset": setting.data, "model": setting.model, **entry._asdict(), "gibbs_error": mean}
                | {"gibbs_std": (sum((draw - mean) ** 2 for draw in draws) / (DRAWS - 1)) ** 0.5}
                | {"thresholded_error": thresholded}
            )
    return table


def _start(entry: Entry, task: Task, job: Job) -> nn.Module:
    """The untrained network with its stochastic mask."""
    net = task.build(entry.seed).to(job.device)
    if entry.start == "random":
        slab = isotropic(net, sparsity=entry.sparsity)
    else:
        mask = masks.top_k(criteria.snip(net, task.data), sparsity=entry.sparsity)
        slab = block_isotropic(net, mask, eps=0.01 * min(1.0, (1 - entry.sparsity) / entry.sparsity))
    return attach(net, slab, seed=entry.seed)


def _errors(nets: list[nn.Module], sparsities: list[float], task: Task) -> list[tuple[list[float], float]]:
    """For every network, the errors of its draws and of the one that keeps the likeliest weights."""
    for net in nets:
        reestimate_batchnorm(net, task.data)
    draws = [task.measure([resample_(net) for net in nets]) for _ in range(DRAWS)]
    thresholded = [
        harden(copy.deepcopy(net), top_mask(read(net), sparsity=sparsity))
        for net, sparsity in zip(nets, sparsities, strict=True)
    ]
    for net in thresholded:
        reestimate_batchnorm(net, task.data)
    by_net = [list(errors) for errors in zip(*draws, strict=True)]
    return list(zip(by_net, task.measure(thresholded), strict=True))


def paint(canvas: Any, rows: Table) -> None:
    """Test error against sparsity, a line per start for drawn networks and one for thresholded ones."""
    axes = canvas.subplots()
    colours = painting.criterion_colours()
    kinds = {"gibbs_error": ("drawn networks", "o"), "thresholded_error": ("thresholded", "s")}
    styles = {
        f"{kind} {start}": Style(f"{label}, from {start}", colours[start], marker)
        for kind, (label, marker) in kinds.items()
        for start in STARTS
    }
    long = [
        {"sparsity": row["sparsity"], "line": f"{kind} {row['start']}", "error": row[kind]}
        for kind in kinds
        for row in rows
    ]
    painting.sparsity_lines(axes, long, y="error", by="line", styles=styles)
    axes.set_ylim(0, 1)
    painting.heading(axes, f"{painting.subject(rows)}, weights never trained; {painting.over_seeds(rows)}")
    axes.set_ylabel("test error")
    axes.legend(frameon=False, fontsize=8)
