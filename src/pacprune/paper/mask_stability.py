"""Is the deterministic mask really deterministic? One initialisation, many orders of the data.

The paper's figure: weights whose fate under magnitude pruning depends on the shuffling of the data, by their mean
magnitude and its spread over the runs, coloured by how often they are kept; MLP 1000x5 on MNIST, ResNet20 on CIFAR-10.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import data, models, philox
from pacprune.data.splits import Split
from pacprune.masking import criteria, masks, weights
from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, dense_networks
from pacprune.training.config import Config
from pacprune.types import Table

POINTS = 500
"""Weights per layer that the figure shows at most, drawn at random among those whose fate changes."""
PANELS = 4
"""Layers that the figure shows, from the second on, as in the paper; of the others the rows count weights alone."""


@dataclass(frozen=True)
class Widths:
    """Widths of the hidden layers of an mlp; none for other networks."""

    hidden: tuple[int, ...] = ()


_GREY = Setting(
    data="mnist",
    model="mlp",
    seeds=30,
    sparsities=(0.9,),
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    options=Widths((1000,) * 5),
)
_COLOUR = replace(
    _GREY,
    data="cifar10",
    model="resnet20",
    dense=Config(epochs=24, lr=0.1, schedule="cosine", augment=True, weight_decay=5e-4),
    options=Widths(),
)
SETTINGS: dict[str, tuple[Setting[Widths], ...]] = {
    "smoke": (replace(_GREY, data="digits", seeds=4, dense=Config(epochs=3, lr=0.1), options=Widths((32, 32, 32))),),
    "reduced": (_GREY, _COLOUR),
    "paper": (
        replace(_GREY, dense=replace(_GREY.dense, epochs=30)),
        replace(_COLOUR, dense=replace(_COLOUR.dense, epochs=120)),
    ),
}


def figures(setting: Setting[Widths], job: Job) -> Iterator[Figure]:
    """Weights whose fate changes with the order of the data, and their share."""
    yield Figure(
        f"mask-stability-{setting.name}",
        f"{setting.data}, {setting.model}, {setting.seeds} runs from one initialisation that differ in the order of "
        f"the data{' and its crops and flips' if setting.dense.augment else ''} alone; weights that magnitude pruning "
        f"to {setting.sparsities[0]:g} keeps in some runs only, at most {POINTS} per layer.",
        lambda: rows(setting, job),
        paint,
        lambda rows: numbers(setting, rows),
    )


def numbers(setting: Setting[Widths], rows: Table) -> dict[str, float]:
    """The share of weights whose fate changes, over all layers."""
    layers = {row["layer"]: row for row in rows}.values()
    changing, total = (sum(row[key] for row in layers) for key in ("changing", "weights"))
    return {f"{setting.name}: share of weights whose fate changes": changing / total}


def rows(setting: Setting[Widths], job: Job) -> Table:
    """One row per weight in the figure; a layer without such weights has one that counts."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    # One initialisation: seeds choose the order of the data alone.
    nets = dense_networks(setting, lambda _: _build(setting, split, job.seed), job.tensors(split.train), job)
    keep = [masks.top_k(criteria.magnitude(net), sparsity=setting.sparsities[0]) for net in nets.values()]
    table, names = [], list(weights.prunable(next(iter(nets.values()))))
    panels = names[1:-1][:PANELS] or names[:1]
    for number, name in enumerate(names):
        often = torch.stack([mask[name] for mask in keep]).float().mean(0).flatten()
        sizes = torch.stack([weights.prunable(net)[name].detach().abs() for net in nets.values()]).flatten(1)
        changing = torch.nonzero((often > 0) & (often < 1)).flatten()
        layer = {"dataset": setting.data, "model": setting.model, "layer": name}
        layer |= {"weights": often.numel(), "changing": len(changing)}
        points = _points(sizes, often, changing, seed=number) if name in panels else []
        table += [layer | point for point in points or [dict.fromkeys(("magnitude", "spread", "kept"))]]
    return table


def _build(setting: Setting[Widths], split: Split, seed: int) -> nn.Module:
    hidden = setting.options.hidden
    if not hidden:
        return models.build(setting.model, split, seed=seed)
    return models.mlp(split.train.x[0].numel(), split.classes, hidden=hidden, seed=seed)


def _points(sizes: Tensor, often: Tensor, changing: Tensor, *, seed: int) -> Table:
    """At most POINTS of the weights whose fate changes, drawn at random."""
    chosen = changing[philox.permutation(len(changing), seed=seed)[:POINTS].to(changing.device)]
    columns = (values[chosen].tolist() for values in (sizes.mean(0), sizes.std(0), often))
    return [dict(zip(("magnitude", "spread", "kept"), values, strict=True)) for values in zip(*columns, strict=True)]


def paint(canvas: Any, rows: Table) -> None:
    """A panel per layer: magnitude and spread of the weights whose fate changes."""
    panels = list(dict.fromkeys(row["layer"] for row in rows if row.get("kept") is not None)) or [rows[0]["layer"]]
    grid = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    points = None
    for axes, name in zip(grid, panels, strict=True):
        layer = [row for row in rows if row["layer"] == name]
        marks = [row for row in layer if row.get("kept") is not None]
        x, y, colour = ([row[key] for row in marks] for key in ("magnitude", "spread", "kept"))
        points = axes.scatter(x, y, c=colour, s=4, cmap="viridis", vmin=0, vmax=1)
        changing, total = int(layer[0]["changing"]), int(layer[0]["weights"])
        share = f"{100 * changing / total:.1f} % of {total:,}"
        axes.set_title(f"{name.removesuffix('.weight')}\n{share}", loc="left", fontsize=8)
        axes.set_xlabel("mean |w|", fontsize=8)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(axis="x", labelsize=7)  # larger ones run into each other in so narrow a panel
    grid[0].set_ylabel("standard deviation of |w| over the runs")
    painting.canvas_heading(canvas, f"{painting.subject(rows)}: weights whose fate changes with the order of the data")
    canvas.colorbar(points, ax=list(grid), label="share of runs that keep the weight")
