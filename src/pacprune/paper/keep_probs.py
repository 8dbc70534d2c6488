"""Keep probabilities: where training takes them.

The paper's figures of probabilities that start as a random mask, after stage 2 and after stage 3 (MNIST): histograms, a
3-D map and heat maps of the output and of a middle layer. A second setting divides the weights by the keep probability
at the start, as dropout does: without that hardly a signal gets through a network with a tenth of its weights.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pacprune import data
from pacprune.masking.attachment import read, sites
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.paper import painting, pbp_stages
from pacprune.paper.frame import Figure, Job, Setting, compute_rows
from pacprune.paper.pbp_stages import RANDOM, Start
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.types import Table

STAGES = {
    "at the start": "at the start (init prior)",
    "after stage 2": "after stage 2 (init posterior)",
    "after stage 3": "after stage 3 (final posterior)",
}
"""With the words of the paper."""
LAYERS = ("output", "middle")
BINS = 35
"""So that 0.1, where a random mask at sparsity 0.9 starts, lies within a bin."""
SIDE = 100
"""A layer with more rows or columns is shown by the means of blocks."""

KeepProbs = dict[str, dict[str, Tensor]]
"""By stage and layer, the keep probabilities of one network."""


@dataclass(frozen=True)
class Gates:
    """Whether weights are divided by their keep probability before stage 2, so that their means are the dense ones."""

    rescaled: bool = False


_PAPER = Setting(
    data="mnist",
    model="mlp",
    sparsities=(0.9,),
    alphas=(0.8,),
    seeds=5,
    dense=Config(epochs=30, lr=0.01),
    prior=Config(epochs=30, lr=0.01),
    posterior=Config(epochs=30, lr=math.exp(-2.5)),
    std=math.exp(-5),
    amp=False,
    options=Gates(),
)


def _both(setting: Setting[Gates]) -> tuple[Setting[Gates], ...]:
    """The paper's setting, and the one with weights that are rescaled."""
    return setting, setting.changed(label="rescaled", rescaled=True)


_DIGITS = _PAPER.changed(
    data="digits",
    dense=Config(epochs=40, lr=0.1),
    prior=Config(epochs=150, lr=0.1),
    posterior=Config(epochs=40, lr=math.exp(-3)),
)
SETTINGS: dict[str, tuple[Setting[Gates], ...]] = {
    "smoke": _both(
        _DIGITS.changed(
            seeds=2,
            dense=Config(epochs=20, lr=0.1),
            prior=Config(epochs=40, lr=0.1),
            posterior=Config(epochs=10, lr=math.exp(-3)),
        )
    ),
    "reduced": (*_both(_PAPER.changed(seeds=2)), *_both(_DIGITS)),
    "paper": _both(_PAPER),
}
"""`paper` has the paper's data, network and epochs, and one std and one learning rate of Q out of the paper's ranges.
`reduced` has as many epochs, since the isotropic prior needs them, but fewer seeds; and the digits, for a CPU."""


def figures(setting: Setting[Gates], job: Job) -> Iterator[Figure]:
    """Histograms and maps."""
    table = functools.cache(lambda: records(setting, job))  # one run for two figures
    start = f"{painting.network(setting)}, random pruning ({100 * setting.sparsities[0]:g} % at the start)"
    start += ", weights divided by their keep probability at the start" if setting.options.rescaled else ""
    yield Figure(
        f"keep-probs-{setting.name}",
        f"{start}: share of a layer's weights by keep probability, mean and 95 % interval over {setting.seeds} seeds "
        "(weights and data order are random).",
        lambda: [row for record in table() for row in record["histogram"]],
        paint_histogram,
        lambda rows: {f"{setting.name}, {name}": number for name, number in histogram_numbers(rows).items()},
    )
    yield Figure(
        f"keep-prob-maps-{setting.name}",
        f"{start}: keep probabilities of one network (the first seed) after stage 3, weight by weight in the output "
        "layer, as means of blocks in a layer too large for that.",
        lambda: table()[0]["map"],
        paint_maps,
    )


class Run(NamedTuple):
    """One network; the first one is mapped."""

    run: int
    seed: int


def records(setting: Setting[Gates], job: Job) -> Table:
    """Per seed: the rows of its histograms, and those of its map."""

    def compute(portion: list[Run]) -> Table:
        networks = keep_probs(setting, [run.seed for run in portion], job)
        return [
            {"histogram": histogram_rows([stages], run.run), "map": map_rows([stages]) if run.run == 0 else []}
            for run, stages in zip(portion, networks, strict=True)
        ]

    return compute_rows(
        [Run(*pair) for pair in enumerate(job.seeds(setting.seeds))],
        compute,
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda _: "all",
        portions=job.portions,
    )


def keep_probs(setting: Setting[Gates], seeds: Sequence[int], job: Job) -> list[KeepProbs]:
    """Per seed: the keep probabilities of the output layer and of the middle one, stage by stage."""
    (sparsity,), (alpha,) = setting.sparsities, setting.alphas
    split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
    starts = [Start(RANDOM, sparsity, setting.eps, seed) for seed in seeds]
    nets = pbp_stages.begin(setting, starts, split, job)
    if setting.options.rescaled:
        with torch.no_grad():
            for site in [site for net in nets for site in sites(net)]:
                site.mean.div_(1 - sparsity)
    start = [read(net) for net in nets]
    priors = pbp_stages.train_priors(setting, nets, starts, split, job)
    pbp_stages.train_posteriors(setting, nets, priors, starts, split, job)
    return [
        dict(zip(STAGES, (_layers(slab) for slab in slabs), strict=True))
        for slabs in zip(start, priors, [read(net) for net in nets], strict=True)
    ]


def _layers(slab: SpikeSlab) -> dict[str, Tensor]:
    """The last layer and the middle one, as matrices on the CPU."""
    matrices = [p.flatten(1).cpu() for p in slab.keep_prob.values()]
    return dict(zip(LAYERS, (matrices[-1], matrices[len(matrices) // 2]), strict=True))


def histogram_rows(networks: list[KeepProbs], first: int = 0) -> Table:
    """One row per network, layer, stage and bin; `moved` is the mean change of the layer's probabilities since before.

    Networks are numbered from `first` on.
    """
    edges, table = np.linspace(0, 1, BINS + 1).tolist(), []
    for run, stages in enumerate(networks, first):
        before: dict[str, Tensor] = {}
        for stage, layers in stages.items():
            for layer, p in layers.items():
                cell = {"layer": layer, "stage": stage, "run": run}
                moved = float((p - before[layer]).abs().mean()) if layer in before else 0.0
                shares = (np.histogram(p.numpy(), edges)[0] / p.numel()).tolist()
                table += [
                    cell | {"from": low, "to": high, "share": share, "moved": moved}
                    for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True)
                ]
            before = layers
    return table


def map_rows(networks: list[KeepProbs]) -> Table:
    """The probabilities of the first network after stage 3, one row per weight, or per block of a large layer."""
    table = []
    for layer, p in networks[0]["after stage 3"].items():
        high, wide = (1, 1) if layer == "output" else (math.ceil(size / SIDE) for size in p.shape)
        # Blocks at the edges are smaller, and their means are of what they have.
        blocks = F.avg_pool2d(p[None, None], (high, wide), ceil_mode=True)[0, 0].tolist()
        table += [
            {"layer": layer, "output": i * high, "input": j * wide, "block": high * wide, "keep_prob": value}
            for i, row in enumerate(blocks)
            for j, value in enumerate(row)
        ]
    return table


def histogram_numbers(rows: Table) -> dict[str, float]:
    """How far the probabilities move in every stage, and how many are undecided after it."""
    cells, numbers = groups(rows, "layer", "stage"), {}
    for layer in LAYERS:
        for stage in list(STAGES)[1:]:
            cell = cells[layer, stage]
            numbers[f"{layer}: mean change {stage}"] = interval([row["moved"] for row in cell]).mean
            inner = [row["share"] for row in cell if row["from"] >= 0.05 and row["to"] <= 0.95]
            numbers[f"{layer}: share in (0.05, 0.95) {stage}"] = sum(inner) / len({row["run"] for row in cell})
    return numbers


def paint_histogram(canvas: Any, rows: Table) -> None:
    """A panel per layer and stage: the mean share of every bin, with its interval over seeds."""
    canvas.set_size_inches(10, 5)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    least = min(row["share"] for row in rows if row["share"] > 0)
    cells = groups(rows, "layer", "stage")
    grid = canvas.subplots(len(layers), len(STAGES), sharex=True, sharey=True, squeeze=False)
    for panels, layer in zip(grid, layers, strict=True):
        for axes, stage in zip(panels, STAGES, strict=True):
            _paint_bins(axes, cells[layer, stage], least)
            painting.heading(axes, f"{layer} layer, {STAGES[stage]}")
        panels[0].set_ylabel("weights in %")
        painting.in_percent(panels[0].yaxis)
    for axes in grid[-1]:
        axes.set_xlabel("keep probability")
    runs = len({row["run"] for row in rows})
    plots.title(
        canvas,
        "Keep probabilities that start as a random mask",
        f"weights, data order; bars are 95 % intervals over {runs} seeds",
    )


def _paint_bins(axes: Any, rows: Table, least: float) -> None:
    """The histogram of one layer after one stage; `least` is the smallest share above 0."""
    bins = dict(sorted(groups(rows, "from").items()))
    edges = [*(low for (low,) in bins), 1.0]
    spans = [interval([row["share"] for row in part]) for part in bins.values()]
    axes.stairs([span.mean for span in spans], edges, fill=True, color=plots.BLUE)
    for (low, high), span in zip(itertools.pairwise(edges), spans, strict=True):
        if span.mean > 0 and math.isfinite(span.low):
            middle = (low + high) / 2
            axes.vlines(middle, max(span.low, least / 2), span.high, color="black", lw=0.6, alpha=0.6)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 1.5)


def paint_maps(canvas: Any, rows: Table) -> None:
    """A 3-D map and a heat map of the output layer, a heat map of the middle layer."""
    canvas.set_size_inches(11, 7)
    parts = {layer: [row for row in rows if row["layer"] == layer] for layer in LAYERS}
    cells = canvas.add_gridspec(2, 2, height_ratios=(3, 2))
    _paint_surface(canvas.add_subplot(cells[0, 0], projection="3d"), matrix(parts["output"]))
    middle, output = canvas.add_subplot(cells[0, 1]), canvas.add_subplot(cells[1, :])
    canvas.colorbar(_paint_heat(output, parts["output"], rows_are="class"), ax=output)
    canvas.colorbar(_paint_heat(middle, parts["middle"], rows_are="output"), ax=middle)
    plots.title(canvas, "Keep probabilities after stage 3 of one network", "weights, data order")


def _paint_surface(space: Any, values: np.ndarray) -> None:
    high, wide = values.shape
    x, y = np.meshgrid(np.arange(wide), np.arange(high))
    step = math.ceil(wide / 200)
    space.plot_surface(x, y, values, cmap="viridis", vmin=0, vmax=1, rstride=1, cstride=step)
    space.set_zlim(0, 1)
    space.set_xlabel("input")
    space.set_ylabel("class")
    space.set_zlabel("keep probability")
    space.set_title("output layer" + (f", every {step}th input" if wide > 200 else ""), fontsize=9)


def _paint_heat(axes: Any, rows: Table, *, rows_are: str) -> Any:
    """A heat map of one layer; returns what a colour bar is made from."""
    values, block = matrix(rows), int(max(row["block"] for row in rows))
    blocks = "" if block == 1 else " (block)"
    weight = "every weight" if block == 1 else f"means of blocks of {block} weights"
    top = 1.0 if block == 1 else float(values.max())
    picture = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    axes.set_title(f"{rows[0]['layer']} layer, {weight}", fontsize=9)
    axes.set_xlabel("input" + blocks)
    axes.set_ylabel(rows_are + blocks)
    axes.spines[["top", "right"]].set_visible(True)
    return picture


def matrix(rows: Table) -> np.ndarray:
    """The rows of one layer as a matrix."""
    outputs, inputs = ({int(row[name]): None for row in rows} for name in ("output", "input"))
    values = np.array([row["keep_prob"] for row in rows], dtype=np.float64)
    return values.reshape(len(outputs), len(inputs))
