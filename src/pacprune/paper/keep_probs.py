"""Keep probabilities: their entropy against the bound, and where training takes them.

The paper's figures of mask entropy against bound (Fashion-MNIST), and of probabilities that start as a random mask,
after stage 2 and after stage 3 (MNIST): histograms, a 3-D map and heat maps of the output and of a middle layer.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pacprune import data, models
from pacprune.masking import weights
from pacprune.masking.attachment import attach, read
from pacprune.masking.spikeslab import SpikeSlab, isotropic
from pacprune.methods.pbp import pbp
from pacprune.methods.pipeline import together
from pacprune.paper import kl_weight, painting
from pacprune.paper.frame import Figure, Job, Setting, dense_networks
from pacprune.paper.statistics import correlation, groups, interval
from pacprune.runs import plots
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

STAGES = ("at the start", "after stage 2", "after stage 3")
LAYERS = ("output", "middle")
BINS = 35
"""So that 0.1, where a random mask at sparsity 0.9 starts, lies within a bin."""
SIDE = 100
"""A layer with more rows or columns is shown by the means of blocks."""

KeepProbs = dict[str, dict[str, Tensor]]
"""By stage and layer, the keep probabilities of one network."""


@dataclass(frozen=True)
class Gates:
    """What the figures need beyond the grid of the entropy, which is the setting itself.

    Args:
        eps_grid: Values of eps in the grid.
        maps_data: The data set of histograms and maps.
        maps_sparsity: Sparsity of the random mask that their network starts from.
        maps_gate_lr: gate_lr of their stage 2; larger ones take nearly every gate to 0 or 1 within an epoch.
    """

    eps_grid: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    maps_data: str = "mnist"
    maps_sparsity: float = 0.9
    maps_gate_lr: float = 1.0


_GREY = Setting(
    data="fashion-mnist",
    model="mlp",
    sparsities=(0.8, 0.9, 0.95),
    alphas=(0.5,),
    seeds=3,
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    prior=Config(epochs=10, lr=0.05, schedule="cosine"),
    posterior=Config(epochs=10, lr=0.1, schedule="cosine"),
    amp=False,
    options=Gates(),
)
SETTINGS: dict[str, tuple[Setting[Gates], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits",
            maps_data="digits",
            sparsities=(0.9,),
            seeds=2,
            dense=Config(epochs=6, lr=0.1, schedule="cosine"),
            prior=Config(epochs=8, lr=0.1, schedule="cosine"),
            posterior=Config(epochs=3, lr=0.1, schedule="cosine"),
            draws=200,
        ),
    ),
    "reduced": (_GREY,),
    "paper": (
        _GREY.changed(
            seeds=5,
            sparsities=(0.6, 0.8, 0.9, 0.95, 0.975),
            dense=Config(epochs=30, lr=0.01),
            prior=Config(epochs=30, lr=0.01),
            posterior=replace(_GREY.posterior, epochs=30),
        ),
    ),
}


def figures(setting: Setting[Gates], job: Job) -> Iterator[Figure]:
    """Entropy against bound, histograms, and maps."""
    options, seeds = setting.options, f"{setting.seeds} seeds"
    yield Figure(
        f"mask-entropy-{setting.name}",
        f"{setting.data}, {setting.model}: mean binary entropy of Q's keep probabilities against its bound, over "
        f"sparsities, eps and {seeds} (weights, data order and draws are random); r is Pearson's correlation with its "
        "95 % interval over the runs.",
        lambda: entropy_rows(setting, job),
        paint_entropy,
        entropy_numbers,
    )
    networks = functools.cache(lambda: keep_probs(setting, job))  # one run for two figures
    start = f"{options.maps_data}, {setting.model}, from a random mask at sparsity {options.maps_sparsity:g}"
    yield Figure(
        f"keep-probs-{options.maps_data}-{setting.model}",
        f"{start}: share of a layer's weights by keep probability, mean and 95 % interval over {seeds} (weights and "
        "data order are random).",
        lambda: histogram_rows(networks()),
        paint_histogram,
        histogram_numbers,
    )
    yield Figure(
        f"keep-prob-maps-{options.maps_data}-{setting.model}",
        f"{start}: keep probabilities of one network (the first seed) after stage 3, weight by weight in the output "
        "layer, as means of blocks in a layer too large for that.",
        lambda: map_rows(networks()),
        paint_maps,
    )


def entropy(slab: SpikeSlab) -> float:
    """Mean over all weights of H(p) = -p log2 p - (1 - p) log2(1 - p), in bits."""
    bits, size = 0.0, 0
    for keep in slab.keep_prob.values():
        p = keep.double()
        bits += float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum()) / math.log(2)
        size += p.numel()
    return bits / size


def entropy_rows(setting: Setting[Gates], job: Job) -> Table:
    """One row per run: priors with several eps and sparsities, all trained as one population."""
    split = data.load(setting.data, prior_fraction=setting.alphas[0], seed=job.seed, data_dir=job.data_dir)
    seeds = job.seeds(setting.seeds)
    cells = [(s, eps, seed) for s in setting.sparsities for eps in setting.options.eps_grid for seed in seeds]
    results = together(
        pbp,
        [models.build(setting.model, split, seed=seed).to(job.device) for _, _, seed in cells],
        split,
        setting.prior,
        dense=setting.dense,
        posterior=setting.posterior,
        sparsity=[s for s, _, _ in cells],
        eps=[eps for _, eps, _ in cells],
        seed=[seed for _, _, seed in cells],
        std=setting.std,
        grid=len(cells),
        draws=setting.draws,
        progress=job.progress,
    )
    table: Table = []
    for (sparsity, eps, seed), result in zip(cells, results, strict=True):
        row = {"dataset": setting.data, "model": setting.model, "sparsity": sparsity, "eps": eps, "seed": seed}
        row |= {"entropy": entropy(result.posterior), "prior_entropy": entropy(result.prior)}
        table.append(row | kl_weight.certificate_numbers(result.certificate, result.model, split))
    return table


def keep_probs(setting: Setting[Gates], job: Job) -> list[KeepProbs]:
    """Per seed: the keep probabilities of the output layer and of the middle one, stage by stage."""
    options = setting.options
    split = data.load(options.maps_data, prior_fraction=setting.alphas[0], seed=job.seed, data_dir=job.data_dir)
    networks = dense_networks(
        replace(setting, data=options.maps_data),
        lambda seed: models.build(setting.model, split, seed=seed),
        split.prior,
        job,
    )
    nets, common = list(networks.values()), {"seed": list(networks), "progress": job.progress}
    for seed, net in networks.items():
        # As dropout does: the mean of the random network is the dense one, without which hardly a signal gets through.
        with torch.no_grad():
            for weight in weights.prunable(net).values():
                weight.div_(1 - options.maps_sparsity)
        attach(net, isotropic(net, sparsity=options.maps_sparsity, std=setting.std), seed=seed)
    start = [read(net) for net in nets]
    budget = Budget(options.maps_sparsity)
    second = replace(setting.prior, gate_lr=options.maps_gate_lr)
    fit(nets, split.prior, second, stage="prior", budget=budget, **common)
    priors = [read(reestimate_batchnorm(net, split.prior)) for net in nets]
    fit_posterior(nets, priors, split, setting.posterior, budget=budget, **common)
    return [
        dict(zip(STAGES, (_layers(slab) for slab in slabs), strict=True))
        for slabs in zip(start, priors, [read(net) for net in nets], strict=True)
    ]


def _layers(slab: SpikeSlab) -> dict[str, Tensor]:
    """The last layer and the middle one, as matrices on the CPU."""
    matrices = [p.flatten(1).cpu() for p in slab.keep_prob.values()]
    return dict(zip(LAYERS, (matrices[-1], matrices[len(matrices) // 2]), strict=True))


def histogram_rows(networks: list[KeepProbs]) -> Table:
    """One row per seed, layer, stage and bin; `moved` is the mean change of the layer's probabilities since before."""
    edges, table = np.linspace(0, 1, BINS + 1), []
    for run, stages in enumerate(networks):
        before: dict[str, Tensor] = {}
        for stage, layers in stages.items():
            for layer, p in layers.items():
                cell = {"layer": layer, "stage": stage, "run": run}
                moved = float((p - before[layer]).abs().mean()) if layer in before else 0.0
                shares = np.histogram(p.numpy(), edges)[0] / p.numel()
                table += [
                    cell | {"from": low, "to": high, "share": share, "moved": moved}
                    for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True)
                ]
            before = layers
    return table


def map_rows(networks: list[KeepProbs]) -> Table:
    """The probabilities of the first network after stage 3, one row per weight, or per block of a large layer."""
    table = []
    for layer, p in networks[0][STAGES[-1]].items():
        high, wide = (1, 1) if layer == "output" else (math.ceil(size / SIDE) for size in p.shape)
        # Blocks at the edges are smaller, and their means are of what they have.
        blocks = F.avg_pool2d(p[None, None], (high, wide), ceil_mode=True)[0, 0].tolist()
        table += [
            {"layer": layer, "output": i * high, "input": j * wide, "block": high * wide, "keep_prob": value}
            for i, row in enumerate(blocks)
            for j, value in enumerate(row)
        ]
    return table


def entropy_numbers(rows: Table) -> dict[str, float]:
    """How entropy and bound go together."""
    r = correlation([row["entropy"] for row in rows], [row["bound"] for row in rows]).mean
    return {"r of entropy and bound": r} if math.isfinite(r) else {}


def histogram_numbers(rows: Table) -> dict[str, float]:
    """How far the probabilities move in every stage, and how many are undecided after it."""
    cells, numbers = groups(rows, "layer", "stage"), {}
    for layer in LAYERS:
        for stage in STAGES[1:]:
            cell = cells[layer, stage]
            numbers[f"{layer}: mean change {stage}"] = interval([row["moved"] for row in cell]).mean
            inner = [row["share"] for row in cell if row["from"] >= 0.05 and row["to"] <= 0.95]
            numbers[f"{layer}: share in (0.05, 0.95) {stage}"] = sum(inner) / len({row["run"] for row in cell})
    return numbers


def paint_entropy(canvas: Any, rows: Table) -> None:
    """Bound, and test error beside it, against the mean entropy; the line is the least-squares one."""
    canvas.set_size_inches(10, 4.2)
    sparsities = sorted({row["sparsity"] for row in rows})
    colours = dict(zip(sparsities, painting.PALETTE, strict=False))
    markers = dict(zip(sorted({row["eps"] for row in rows}), "osD^v", strict=False))
    panels = canvas.subplots(1, 2)
    labels = {"bound": "bound on the error", "test_error": "test error of Q"}
    for axes, (what, label) in zip(panels, labels.items(), strict=True):
        x, y = [row["entropy"] for row in rows], [row[what] for row in rows]
        for row in rows:
            axes.scatter(row["entropy"], row[what], color=colours[row["sparsity"]], marker=markers[row["eps"]], s=26)
        if max(x) > min(x):
            slope, cut = np.polyfit(x, y, 1)
            axes.plot([min(x), max(x)], [cut + slope * min(x), cut + slope * max(x)], color="black", lw=1)
        r = correlation(x, y)
        axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=9)
        axes.set_xlabel("mean entropy of a gate of Q, in bits")
        axes.set_ylabel(label)
    marks = [panels[0].scatter([], [], color=colours[s], label=f"sparsity {s:g}") for s in sparsities]
    marks += [panels[0].scatter([], [], color=plots.GREY, marker=m, label=f"eps {e:g}") for e, m in markers.items()]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    plots.title(
        canvas,
        f"{painting.subject(rows)}: mask entropy and bound, {len(rows)} runs",
        f"weights, data order, draws; {painting.seed_count(rows)} seeds",
    )


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
            axes.set_title(f"{layer} layer, {stage}", fontsize=9)
        panels[0].set_ylabel("share of the weights")
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
            axes.plot([middle, middle], [max(span.low, least / 2), span.high], color="black", lw=0.8)
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
