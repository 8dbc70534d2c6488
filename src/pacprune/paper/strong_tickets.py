"""Strong lottery tickets: a network whose weights are never trained, and masks that are.

The paper's figure on CIFAR-10 with ResNet20: test error of networks drawn from the trained stochastic mask, started
from an isotropic mask or from SNIP's, and beside it the one network that keeps the likeliest weights.
"""

import copy
import math
from dataclasses import replace
from typing import Any

from torch import nn

from pacprune import data, models
from pacprune.masking import criteria, masks
from pacprune.masking.attachment import attach, harden, read, resample_
from pacprune.masking.spikeslab import block_isotropic, isotropic, top_mask
from pacprune.paper import comparison, frame, pft_vs_osp
from pacprune.paper.comparison import Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.types import Table

_FROZEN = Config(lr=0.0, gate_lr=20.0, momentum=0.9)
"""Only the gates learn."""
DRAWS = 10
"""Networks drawn from every trained mask."""
STARTS = ("random", "snip")

SETTINGS: dict[str, Setting] = {
    "smoke": replace(pft_vs_osp.SETTINGS["smoke"][0], sparsities=(0.5, 0.9), seeds=2, after=replace(_FROZEN, epochs=4)),
    "reduced": replace(
        pft_vs_osp.SETTINGS["reduced"][-1],
        sparsities=(0.3, 0.5, 0.7, 0.9, 0.95),
        after=replace(_FROZEN, epochs=30, augment=True),
    ),
    "paper": replace(
        pft_vs_osp.SETTINGS["reduced"][-1],
        sparsities=(0.3, 0.5, 0.7, 0.9, 0.95),
        after=replace(_FROZEN, epochs=100, augment=True),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """One figure: test error of untrained networks against sparsity."""
    setting = comparison.on_device(SETTINGS[job.scale], job)
    caption = (
        f"{setting.data}, {setting.model}, weights never trained: test error of {DRAWS} networks drawn from the "
        "trained mask, which share BatchNorm's statistics, and of its thresholded network, which has its own; "
        f"mean and 95 % interval over {setting.seeds} seeds (weights, "
        "data order and masks are random)."
    )
    found = frame.draw(job, f"strong-tickets-{setting.name}", caption, lambda: _rows(setting, job), _paint)
    errors = frame.means(found.rows, "thresholded_error", "start", "sparsity")
    return [found], {f"thresholded error from {start} at {sparsity}": e for (start, sparsity), e in errors.items()}


def _rows(setting: Setting, job: Job) -> Table:
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    on, test = ((part.x.to(job.device), part.y.to(job.device)) for part in (split.train, split.test))
    entries = [(start, s, seed) for start in STARTS for s in setting.sparsities for seed in job.seeds(setting.seeds)]
    rows = []
    for part in comparison.chunks(entries, job):
        nets: list[nn.Module] = []
        for start, sparsity, seed in part:
            net = models.build(setting.model, split, seed=seed).to(job.device)
            if start == "random":
                slab = isotropic(net, sparsity=sparsity)
            else:
                mask = masks.top_k(criteria.snip(net, on), sparsity=sparsity)
                slab = block_isotropic(net, mask, eps=0.01 * min(1.0, (1 - sparsity) / sparsity))
            nets.append(attach(net, slab, seed=seed))
        budgets = [Budget(sparsity) for _, sparsity, _ in part]
        seeds = [seed for _, _, seed in part]
        fit(nets, on, setting.after, budget=budgets, seed=seeds, stage="masks", progress=job.progress)
        for net in nets:
            reestimate_batchnorm(net, on)
        drawn = [error([resample_(net) for net in nets], test) for _ in range(DRAWS)]
        wanted = zip(nets, (sparsity for _, sparsity, _ in part), strict=True)
        fixed = [harden(copy.deepcopy(net), top_mask(read(net), sparsity=sparsity)) for net, sparsity in wanted]
        for net in fixed:
            reestimate_batchnorm(net, on)
        for k, ((start, sparsity, seed), wrong) in enumerate(zip(part, error(fixed, test), strict=True)):
            own = [errors[k] for errors in drawn]
            rows.append(
                {
                    "dataset": setting.data,
                    "model": setting.model,
                    "start": start,
                    "sparsity": sparsity,
                    "seed": seed,
                    "gibbs_error": sum(own) / DRAWS,
                    "gibbs_std": (sum((e - sum(own) / DRAWS) ** 2 for e in own) / (DRAWS - 1)) ** 0.5,
                    "thresholded_error": wrong,
                }
            )
    return rows


def _paint(canvas: Any, rows: Table) -> None:
    axes = canvas.subplots()
    kinds = {"gibbs_error": "drawn networks", "thresholded_error": "thresholded"}
    colours = {"random": "#D55E00", "snip": "#009E73"}
    markers = {"gibbs_error": "o", "thresholded_error": "s"}
    for kind, words in kinds.items():
        for start, colour in colours.items():
            own = [row | {"place": -math.log(1 - row["sparsity"])} for row in rows if row["start"] == start]
            style = {start: (f"{words}, from {start}", colour, markers[kind])}
            frame.lines(axes, own, x="place", y=kind, by="start", style=style)
    places = {-math.log(1 - row["sparsity"]): f"{row['sparsity']:g}" for row in rows}
    axes.set_xticks(list(places), list(places.values()))
    axes.set_ylim(0, 1)
    seeds = len({row["seed"] for row in rows})
    axes.set_title(
        f"{rows[0]['dataset']}, {rows[0]['model']}, weights never trained; mean and 95 % interval over {seeds} seeds",
        loc="left",
        fontsize=9,
    )
    axes.set_xlabel("sparsity (fraction of the weights pruned)")
    axes.set_ylabel("test error")
    axes.legend(frameon=False, fontsize=8)
