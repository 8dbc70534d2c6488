"""Is the deterministic mask really deterministic? One initialisation, many orders of the data.

The paper's figures: weights whose fate under magnitude pruning depends on the shuffling of the data, by their mean
magnitude and their spread over the runs, coloured by how often they are kept. The middle layers of an MLP 1000x5 on
MNIST, and of ResNet20 on CIFAR-10 the first six layers, and layers 9 to 15.
"""

import functools
import math
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
"""Weights per layer that the figures show at most, drawn at random among those whose fate changes."""
ACROSS = 4
"""Panels in a row."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What is shown of a network.

    Args:
        spans: The first and the last layer of every figure, counted from 1; the files of other figures than the first
            name their layers.
        hidden: Widths of the hidden layers, of an mlp; none for other networks.
    """

    spans: tuple[tuple[int, int], ...]
    hidden: tuple[int, ...] = ()


_GREY = Setting(
    data="mnist",
    model="mlp",
    seeds=30,
    sparsities=(0.9,),
    dense=Config(epochs=30, lr=0.01),
    options=Layers(spans=((2, 5),), hidden=(1000,) * 5),
)
_COLOUR = replace(
    _GREY,
    data="cifar10",
    model="resnet20",
    dense=Config(epochs=120, lr=0.1, schedule="step", augment=True),
    options=Layers(spans=((1, 6), (9, 15))),
)
SETTINGS: dict[str, tuple[Setting[Layers], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits",
            seeds=6,
            dense=Config(epochs=15, lr=0.1),
            options=Layers(spans=((2, 5), (1, 6)), hidden=(32,) * 5),
        ),
    ),
    "reduced": (
        _GREY.changed(dense=replace(_GREY.dense, epochs=6)),
        _COLOUR.changed(dense=replace(_COLOUR.dense, epochs=12)),
    ),
    "paper": (_GREY, _COLOUR),
}
"""`paper` has the paper's data, networks, epochs and 30 runs; `reduced` a fifth of the epochs, on CIFAR-10 a tenth."""


def figures(setting: Setting[Layers], job: Job) -> Iterator[Figure]:
    """Weights whose fate changes with the order of the data, and their share."""
    table = functools.cache(lambda: rows(setting, job))  # one run for all figures
    for place, (first, last) in enumerate(setting.options.spans):
        yield Figure(
            f"mask-stability-{setting.name}" + (f"-layers-{first}-{last}" if place else ""),
            f"{painting.network(setting)}, layers {first} to {last}, {setting.seeds} runs from one initialisation "
            f"that differ in the order of the data{' and its crops and flips' if setting.dense.augment else ''} alone; "
            f"weights that magnitude pruning to {100 * setting.sparsities[0]:g} % keeps in some runs only, at most "
            f"{POINTS} per layer.",
            functools.partial(shown, table, first, last),
            paint,
            lambda rows: numbers(setting, rows),
        )


def shown(table: Any, first: int, last: int) -> Table:
    """The rows of these layers; of the others, which are not `shown`, one row each that counts."""
    parts: Table = []
    for row in table():
        number = row["number"]
        if first <= number <= last:
            parts.append(row | {"shown": 1})
        elif not parts or parts[-1]["number"] != number:
            parts.append(row | dict.fromkeys(_POINT) | {"shown": 0})
    return parts


def numbers(setting: Setting[Layers], rows: Table) -> dict[str, float]:
    """The share of weights whose fate changes, over all layers."""
    layers = {row["layer"]: row for row in rows}.values()
    changing, total = (sum(row[key] for row in layers) for key in ("changing", "weights"))
    return {f"{setting.name}: share of weights whose fate changes": changing / total}


def rows(setting: Setting[Layers], job: Job) -> Table:
    """One row per weight that a figure may show; a layer without such weights has one that counts."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    # One initialisation: seeds choose the order of the data alone.
    nets = dense_networks(setting, lambda _: _build(setting, split, job.seed), job.tensors(split.train), job)
    keep = [masks.top_k(criteria.magnitude(net), sparsity=setting.sparsities[0]) for net in nets.values()]
    table, names = [], list(weights.prunable(next(iter(nets.values()))))
    for number, name in enumerate(names):
        often = torch.stack([mask[name] for mask in keep]).float().mean(0).flatten()
        values = torch.stack([weights.prunable(net)[name].detach() for net in nets.values()]).flatten(1)
        changing = torch.nonzero((often > 0) & (often < 1)).flatten()
        layer = {"dataset": setting.data, "model": setting.model, "layer": name, "number": number + 1}
        layer |= {"weights": often.numel(), "changing": len(changing)}
        points = _points(values, often, changing, seed=number)
        table += [layer | point for point in points or [dict.fromkeys(_POINT)]]
    return table


def _build(setting: Setting[Layers], split: Split, seed: int) -> nn.Module:
    hidden = setting.options.hidden
    if not hidden:
        return models.build(setting.model, split, seed=seed)
    return models.mlp(split.train.x[0].numel(), split.classes, hidden=hidden, seed=seed)


_POINT = ("magnitude", "spread", "deviation", "kept")
"""Of a weight over the runs: the mean and the standard deviation of |w|, the standard deviation of w, and the share of
runs that keep it."""


def _points(values: Tensor, often: Tensor, changing: Tensor, *, seed: int) -> Table:
    """At most POINTS of the weights whose fate changes, drawn at random."""
    chosen = changing[philox.permutation(len(changing), seed=seed)[:POINTS].to(changing.device)]
    sizes = values.abs()
    columns = (column[chosen].tolist() for column in (sizes.mean(0), sizes.std(0), values.std(0), often))
    return [dict(zip(_POINT, point, strict=True)) for point in zip(*columns, strict=True)]


def paint(canvas: Any, rows: Table) -> None:
    """A panel per layer: magnitude and spread of the weights whose fate changes."""
    # The first published rows have the spread of |w| alone, and points of the layers that are shown.
    old = "deviation" not in rows[0]
    what = "spread" if old else "deviation"
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    names = list(dict.fromkeys(row["layer"] for row in rows if (row["kept"] is not None if old else row["shown"])))
    across = 3 if len(names) == 6 else min(ACROSS, len(names))
    down = math.ceil(len(names) / across)
    canvas.set_size_inches(1.5 + 2.5 * across, 1 + 2.4 * down)
    grid = canvas.subplots(down, across, squeeze=False)
    panels, points = grid.flatten(), None
    for axes, name in zip(panels, names, strict=False):
        layer = [row for row in rows if row["layer"] == name]
        marks = [row for row in layer if row["kept"] is not None]
        x, y, colour = ([row[key] for row in marks] for key in ("magnitude", what, "kept"))
        points = axes.scatter(x, y, c=colour, s=4, cmap="viridis", vmin=0, vmax=1)
        share, total = layer[0]["changing"] / layer[0]["weights"], int(layer[0]["weights"])
        # The first published rows have no number, but all layers in their order.
        number = layers.index(name) + 1 if old else int(layer[0]["number"])
        painting.heading(axes, f"layer {number}\n{100 * share:.1f} % of {total:,} change")
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=7)  # larger ones run into each other in so narrow a panel
    for axes in panels[len(names) :]:
        axes.remove()
    canvas.supxlabel("mean |w| over the runs", fontsize=9)
    canvas.supylabel(f"standard deviation of {'|w|' if old else 'w'} over the runs", fontsize=9)
    painting.canvas_heading(canvas, f"{painting.subject(rows)}: weights whose fate changes with the order of the data")
    bar = canvas.colorbar(points, ax=list(panels[: len(names)]), label="runs that keep the weight, in %")
    painting.in_percent(bar.ax.yaxis)
