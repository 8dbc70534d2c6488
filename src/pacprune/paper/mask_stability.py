"""Is the deterministic mask really deterministic? One initialisation, many orders of the data.

The paper's figure: weights whose fate under magnitude pruning depends on the shuffling of the data, by their mean
magnitude and its spread over the runs, coloured by how often they are kept; MLP 1000x5 on MNIST, ResNet20 on CIFAR-10.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pacprune import data, models, philox
from pacprune.masking import criteria, masks, weights
from pacprune.paper import comparison, frame
from pacprune.paper.comparison import Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.types import Table

POINTS = 500
"""Weights per layer that the figure shows at most, drawn at random among those whose fate changes."""
PANELS = 4
"""Layers that the figure shows, from the second on, as in the paper; of the others the rows count weights alone."""


@dataclass(frozen=True)
class _Study:
    """One network trained in many orders of the data, and pruned to a sparsity."""

    setting: Setting
    runs: int
    sparsity: float
    make: Callable[[data.Split, int], nn.Module]

    @property
    def name(self) -> str:
        """How its files end."""
        return self.setting.name


def _deep(split: data.Split, seed: int) -> nn.Module:
    return models.mlp(split.train.x[0].numel(), split.classes, hidden=(1000,) * 5, seed=seed)


def _small(split: data.Split, seed: int) -> nn.Module:
    return models.mlp(split.train.x[0].numel(), split.classes, hidden=(32, 32, 32), seed=seed)


def _resnet(split: data.Split, seed: int) -> nn.Module:
    return models.resnet20(split.train.x.shape[1], split.classes, seed=seed)


_BASE = Setting(
    data="mnist",
    model="mlp",
    sparsities=(),
    criteria=(),
    methods=(),
    seeds=1,
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    after=Config(),
    rates=(),
    gated=(),
    tuned_at=0.9,
)
_COLOUR = replace(
    _BASE,
    data="cifar10",
    model="resnet20",
    dense=Config(epochs=24, lr=0.1, schedule="cosine", augment=True, weight_decay=5e-4),
)
STUDIES: dict[str, tuple[_Study, ...]] = {
    "smoke": (_Study(replace(_BASE, data="digits", dense=Config(epochs=3, lr=0.1)), 4, 0.9, _small),),
    "reduced": (_Study(_BASE, 30, 0.9, _deep), _Study(_COLOUR, 30, 0.9, _resnet)),
    "paper": (
        _Study(replace(_BASE, dense=replace(_BASE.dense, epochs=30)), 30, 0.9, _deep),
        _Study(replace(_COLOUR, dense=replace(_COLOUR.dense, epochs=120)), 30, 0.9, _resnet),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure per network, and the share of weights whose fate changes with the order of the data."""
    drawn, numbers = [], {}
    for study in job.chosen(STUDIES[job.scale]):
        study = replace(study, setting=comparison.on_device(study.setting, job))
        name = f"mask-stability-{study.name}"
        caption = (
            f"{study.setting.data}, {study.setting.model}, {study.runs} runs from one initialisation that differ in "
            f"the order of the data{' and its crops and flips' if study.setting.dense.augment else ''} alone; weights "
            f"that magnitude pruning to {study.sparsity:g} keeps in some runs only, at most {POINTS} per layer."
        )
        found = frame.draw(job, name, caption, lambda study=study: _rows(study, job), _paint)
        drawn.append(found)
        layers = {row["layer"]: row for row in found.rows}.values()
        changing, total = (sum(row[key] for row in layers) for key in ("changing", "weights"))
        numbers[f"{study.name}: share of weights whose fate changes"] = changing / total
    return drawn, numbers


def _rows(study: _Study, job: Job) -> Table:
    split = data.load(study.setting.data, seed=0, data_dir=job.data_dir)
    on = split.train.x.to(job.device), split.train.y.to(job.device)
    nets = [study.make(split, job.seed).to(job.device) for _ in range(study.runs)]
    for part in comparison.chunks(list(zip(nets, job.seeds(study.runs), strict=True)), job):
        crowd, orders = [net for net, _ in part], [seed for _, seed in part]
        fit(crowd, on, study.setting.dense, seed=orders, stage="dense", progress=job.progress)
    kept = [masks.top_k(criteria.magnitude(net), sparsity=study.sparsity) for net in nets]
    rows, names = [], list(weights.prunable(nets[0]))
    panels = names[1:-1][:PANELS] or names[:1]
    for number, name in enumerate(names):
        often = torch.stack([mask[name] for mask in kept]).float().mean(0).flatten()
        size = torch.stack([weights.prunable(net)[name].detach().abs() for net in nets]).flatten(1)
        mean, spread = size.mean(0), size.std(0)
        changing = torch.nonzero((often > 0) & (often < 1)).flatten()
        shown = changing[philox.permutation(len(changing), seed=number)[:POINTS].to(changing.device)]
        common = {
            "dataset": study.setting.data,
            "model": study.setting.model,
            "layer": name,
            "weights": often.numel(),
            "changing": len(changing),
        }
        points = zip(*(t[shown].tolist() for t in (mean, spread, often)), strict=True)
        none = [(None, None, None)]  # a layer that is not shown, or in which no fate changes, still counts its weights
        found = [*points] if name in panels else []
        rows += [common | {"magnitude": m, "spread": s, "kept": p} for m, s, p in found or none]
    return rows


def _paint(canvas: Any, rows: Table) -> None:
    panels = list(dict.fromkeys(row["layer"] for row in rows if row.get("kept") is not None)) or [rows[0]["layer"]]
    grid = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    points = None
    for axes, name in zip(grid, panels, strict=True):
        own = [row for row in rows if row["layer"] == name]
        shown = [row for row in own if row.get("kept") is not None]
        x, y, colour = ([row[key] for row in shown] for key in ("magnitude", "spread", "kept"))
        points = axes.scatter(x, y, c=colour, s=4, cmap="viridis", vmin=0, vmax=1)
        changing, total = int(own[0]["changing"]), int(own[0]["weights"])
        share = f"{100 * changing / total:.1f} % of {total:,}"
        axes.set_title(f"{name.removesuffix('.weight')}\n{share}", loc="left", fontsize=8)
        axes.set_xlabel("mean |w|", fontsize=8)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(axis="x", labelsize=7)  # larger ones run into each other in so narrow a panel
    grid[0].set_ylabel("standard deviation of |w| over the runs")
    canvas.suptitle(
        f"{rows[0]['dataset']}, {rows[0]['model']}: weights whose fate changes with the order of the data",
        x=0.01,
        ha="left",
        fontsize=9,
    )
    canvas.colorbar(points, ax=list(grid), label="share of runs that keep the weight")
