"""Keep probabilities: their entropy against the bound, and where training takes them.

The paper's figures of mask entropy against bound (Fashion-MNIST), and of probabilities that start as a random mask,
after stage 2 and after stage 3 (MNIST): histograms, a 3-D map and heat maps of the output and of a middle layer.
"""

import functools
import itertools
import math
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
from pacprune.paper import frame, kl_weight
from pacprune.paper.frame import Drawn, Job, on_device
from pacprune.runs import plots
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

STAGES = ("at the start", "after stage 2", "after stage 3")
BINS = 35
"""So that 0.1, where a random mask at sparsity 0.9 starts, lies within a bin."""
SIDE = 100
"""A layer with more rows or columns is shown by the means of blocks."""


@dataclass(frozen=True)
class Setting:
    """The grid of the entropy, the run whose probabilities are shown, and how the three stages of both are trained."""

    entropy_data: str
    shown_data: str
    sparsities: tuple[float, ...]
    eps: tuple[float, ...]
    seeds: int
    dense: Config
    prior: Config
    posterior: Config
    std: float
    draws: int
    model: str = "mlp"
    alpha: float = 0.5
    sparsity: float = 0.9
    """Of the random mask whose probabilities are shown."""
    shown_gate_lr: float = 1.0
    """Of its stage 2: larger ones take nearly every gate to 0 or 1 within an epoch."""


_GREY = Setting(
    entropy_data="fashion-mnist",
    shown_data="mnist",
    sparsities=(0.8, 0.9, 0.95),
    eps=(1e-4, 1e-3, 1e-2),
    seeds=3,
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    prior=Config(epochs=10, lr=0.05, schedule="cosine"),
    posterior=Config(epochs=10, lr=0.1, schedule="cosine"),
    std=5e-3,
    draws=5_000,
)
SETTINGS = {
    "smoke": replace(
        _GREY,
        entropy_data="digits",
        shown_data="digits",
        sparsities=(0.9,),
        eps=(1e-4, 1e-3, 1e-2),
        dense=Config(epochs=6, lr=0.1, schedule="cosine"),
        prior=Config(epochs=15, lr=0.1, schedule="cosine"),
        posterior=Config(epochs=6, lr=0.1, schedule="cosine"),
        draws=200,
    ),
    "reduced": _GREY,
    "paper": replace(
        _GREY,
        seeds=5,
        sparsities=(0.6, 0.8, 0.9, 0.95, 0.975),
        dense=Config(epochs=30, lr=0.01),
        prior=Config(epochs=30, lr=0.01),
        posterior=replace(_GREY.posterior, epochs=30),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """Three figures: entropy against bound, histograms, and maps."""
    setting = SETTINGS[job.scale]
    stages = functools.cache(lambda: trained(setting, job))  # one run for two figures
    seeds = f"{setting.seeds} seeds"
    entropies = frame.draw(
        job,
        f"mask-entropy-{setting.entropy_data}-{setting.model}",
        f"{setting.entropy_data}, {setting.model}: mean binary entropy of Q's keep probabilities against its bound, "
        f"over sparsities, eps and {seeds} (weights, data order and draws are random); r is Pearson's correlation "
        "with its 95 % interval over the runs.",
        lambda: entropy_rows(setting, job),
        paint_entropy,
    )
    shown = f"{setting.shown_data}, {setting.model}, from a random mask at sparsity {setting.sparsity:g}"
    counts = frame.draw(
        job,
        f"keep-probs-{setting.shown_data}-{setting.model}",
        f"{shown}: share of a layer's weights by keep probability, mean and 95 % interval over {seeds} (weights and "
        "data order are random).",
        lambda: histogram_rows(stages()),
        paint_histogram,
    )
    maps = frame.draw(
        job,
        f"keep-prob-maps-{setting.shown_data}-{setting.model}",
        f"{shown}: keep probabilities of one network (the first seed) after stage 3, weight by weight in the output "
        "layer, as means of blocks in a layer too large for that.",
        lambda: map_rows(stages()),
        paint_maps,
    )
    return [entropies, counts, maps], numbers(entropies.rows, counts.rows)


def entropy(slab: SpikeSlab) -> float:
    """Mean over all weights of H(p) = -p log2 p - (1 - p) log2(1 - p), in bits."""
    bits, size = 0.0, 0
    for keep in slab.keep_prob.values():
        p = keep.double()
        bits += float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum()) / math.log(2)
        size += p.numel()
    return bits / size


def entropy_rows(setting: Setting, job: Job) -> Table:
    """One row per run: priors with several eps and sparsities, all trained as one population."""
    split = data.load(setting.entropy_data, prior_fraction=setting.alpha, seed=job.seed, data_dir=job.data_dir)
    cells = [(s, eps, seed) for s in setting.sparsities for eps in setting.eps for seed in job.seeds(setting.seeds)]
    results = together(
        pbp,
        [models.build(setting.model, split, seed=seed).to(job.device) for _, _, seed in cells],
        split,
        on_device(setting.prior, job),
        dense=on_device(setting.dense, job),
        posterior=on_device(setting.posterior, job),
        sparsity=[s for s, _, _ in cells],
        eps=[eps for _, eps, _ in cells],
        seed=[seed for _, _, seed in cells],
        std=setting.std,
        grid=len(cells),
        draws=setting.draws,
        progress=job.progress,
    )
    found: Table = []
    for (sparsity, eps, seed), result in zip(cells, results, strict=True):
        own = {"dataset": setting.entropy_data, "model": setting.model, "sparsity": sparsity, "eps": eps, "seed": seed}
        own |= {"entropy": entropy(result.posterior), "prior_entropy": entropy(result.prior)}
        found.append(own | kl_weight.measured(result.certificate, result.model, split))
    return found


def trained(setting: Setting, job: Job) -> list[dict[str, dict[str, Tensor]]]:
    """Per seed, by stage: the keep probabilities of the output layer and of the middle one."""
    split = data.load(setting.shown_data, prior_fraction=setting.alpha, seed=job.seed, data_dir=job.data_dir)
    seeds = job.seeds(setting.seeds)
    nets = [models.build(setting.model, split, seed=seed).to(job.device) for seed in seeds]
    given = {"seed": seeds, "progress": job.progress}
    fit(nets, split.prior, on_device(setting.dense, job), stage="dense", **given)
    for net, seed in zip(nets, seeds, strict=True):
        # As dropout does: the mean of the random network is the dense one, without which hardly a signal gets through.
        with torch.no_grad():
            for weight in weights.prunable(net).values():
                weight.div_(1 - setting.sparsity)
        attach(net, isotropic(net, sparsity=setting.sparsity, std=setting.std), seed=seed)
    start = [read(net) for net in nets]
    budget = Budget(setting.sparsity)
    second = replace(on_device(setting.prior, job), gate_lr=setting.shown_gate_lr)
    fit(nets, split.prior, second, stage="prior", budget=budget, **given)
    priors = [read(reestimate_batchnorm(net, split.prior)) for net in nets]
    fit_posterior(nets, priors, split, on_device(setting.posterior, job), budget=budget, **given)
    return [
        dict(zip(STAGES, (_layers(slab) for slab in slabs), strict=True))
        for slabs in zip(start, priors, [read(net) for net in nets], strict=True)
    ]


def _layers(slab: SpikeSlab) -> dict[str, Tensor]:
    """The last layer and the middle one, as matrices on the CPU."""
    every = [p.flatten(1).cpu() for p in slab.keep_prob.values()]
    return {"output": every[-1], "middle": every[len(every) // 2]}


def histogram_rows(found: list[dict[str, dict[str, Tensor]]]) -> Table:
    """One row per seed, layer, stage and bin; `moved` is the mean change of the layer's probabilities since before."""
    edges, rows = np.linspace(0, 1, BINS + 1), []
    for seed, stages in enumerate(found):
        before: dict[str, Tensor] = {}
        for stage, layers in stages.items():
            for layer, p in layers.items():
                moved = float((p - before[layer]).abs().mean()) if layer in before else 0.0
                counts = np.histogram(p.numpy(), edges)[0] / p.numel()
                for low, high, share in zip(edges[:-1], edges[1:], counts, strict=True):
                    own = {"layer": layer, "stage": stage, "run": seed, "from": low, "to": high}
                    rows.append(own | {"share": share, "moved": moved})
            before = layers
    return rows


def map_rows(found: list[dict[str, dict[str, Tensor]]]) -> Table:
    """The probabilities of the first network after stage 3, one row per weight, or per block of a large layer."""
    rows = []
    for layer, p in found[0][STAGES[-1]].items():
        high, wide = (1, 1) if layer == "output" else (math.ceil(size / SIDE) for size in p.shape)
        # Blocks at the edges are smaller, and their means are of what they have.
        shown = F.avg_pool2d(p[None, None], (high, wide), ceil_mode=True)[0, 0]
        for i, row in enumerate(shown.tolist()):
            for j, value in enumerate(row):
                rows.append(
                    {"layer": layer, "output": i * high, "input": j * wide, "block": high * wide, "keep_prob": value}
                )
    return rows


def numbers(entropies: Table, counts: Table) -> dict[str, float]:
    """How entropy and bound go together, and how far the probabilities move in each stage."""
    r = frame.correlation([row["entropy"] for row in entropies], [row["bound"] for row in entropies]).mean
    found = {"r of entropy and bound": r} if math.isfinite(r) else {}
    for layer in ("output", "middle"):
        for stage in STAGES[1:]:
            own = [row for row in counts if (row["layer"], row["stage"]) == (layer, stage)]
            found[f"{layer}: mean change {stage}"] = frame.interval([row["moved"] for row in own]).mean
            inner = [row["share"] for row in own if row["from"] >= 0.05 and row["to"] <= 0.95]
            found[f"{layer}: share in (0.05, 0.95) {stage}"] = sum(inner) / len({row["run"] for row in own})
    return found


def paint_entropy(canvas: Any, rows: Table) -> None:
    """Bound, and test error beside it, against the mean entropy; the line is the least-squares one."""
    canvas.set_size_inches(10, 4.2)
    sparsities = sorted({row["sparsity"] for row in rows})
    colours = dict(zip(sparsities, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=False))
    markers = dict(zip(sorted({row["eps"] for row in rows}), "osD^v", strict=False))
    panels = canvas.subplots(1, 2)
    shown = {"bound": "bound on the error", "test_error": "test error of Q"}
    for axes, (what, label) in zip(panels, shown.items(), strict=True):
        x, y = [row["entropy"] for row in rows], [row[what] for row in rows]
        for row in rows:
            axes.scatter(row["entropy"], row[what], color=colours[row["sparsity"]], marker=markers[row["eps"]], s=26)
        if max(x) > min(x):
            slope, cut = np.polyfit(x, y, 1)
            axes.plot([min(x), max(x)], [cut + slope * min(x), cut + slope * max(x)], color="black", lw=1)
        r = frame.correlation(x, y)
        axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=9)
        axes.set_xlabel("mean entropy of a gate of Q, in bits")
        axes.set_ylabel(label)
    marks = [panels[0].scatter([], [], color=colours[s], label=f"sparsity {s:g}") for s in sparsities]
    marks += [panels[0].scatter([], [], color=plots.GREY, marker=m, label=f"eps {e:g}") for e, m in markers.items()]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    runs = len({row["seed"] for row in rows})
    plots.title(
        canvas,
        f"{rows[0]['dataset']}, {rows[0]['model']}: mask entropy and bound, {len(rows)} runs",
        f"weights, data order, draws; {runs} seeds",
    )


def paint_histogram(canvas: Any, rows: Table) -> None:
    """A panel per layer and stage: the mean share of every bin, with its interval over seeds."""
    canvas.set_size_inches(10, 5)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    least = min(row["share"] for row in rows if row["share"] > 0)
    grid = canvas.subplots(len(layers), len(STAGES), sharex=True, sharey=True, squeeze=False)
    for line, layer in zip(grid, layers, strict=True):
        for axes, stage in zip(line, STAGES, strict=True):
            own = [row for row in rows if (row["layer"], row["stage"]) == (layer, stage)]
            starts = sorted({row["from"] for row in own})
            found = [frame.interval([row["share"] for row in own if row["from"] == low]) for low in starts]
            edges = [*starts, 1.0]
            axes.stairs([one.mean for one in found], edges, fill=True, color=plots.BLUE)
            middle = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
            for place, one in zip(middle, found, strict=True):
                if one.mean > 0 and math.isfinite(one.low):
                    axes.plot([place, place], [max(one.low, least / 2), one.high], color="black", lw=0.8)
            axes.set_yscale("log")
            axes.set_ylim(least / 2, 1.5)
            axes.set_title(f"{layer} layer, {stage}", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("keep probability")
    for line in grid:
        line[0].set_ylabel("share of the weights")
    runs = len({row["run"] for row in rows})
    plots.title(
        canvas,
        "Keep probabilities that start as a random mask",
        f"weights, data order; bars are 95 % intervals over {runs} seeds",
    )


def paint_maps(canvas: Any, rows: Table) -> None:
    """A 3-D map and a heat map of the output layer, a heat map of the middle layer."""
    canvas.set_size_inches(11, 7)
    values = {layer: _matrix([row for row in rows if row["layer"] == layer]) for layer in ("output", "middle")}
    cells = canvas.add_gridspec(2, 2, height_ratios=(3, 2))
    space = canvas.add_subplot(cells[0, 0], projection="3d")
    high, wide = values["output"].shape
    x, y = np.meshgrid(np.arange(wide), np.arange(high))
    space.plot_surface(x, y, values["output"], cmap="viridis", vmin=0, vmax=1, rstride=1, cstride=math.ceil(wide / 200))
    space.set_zlim(0, 1)
    space.set_xlabel("input")
    space.set_ylabel("class")
    space.set_zlabel("keep probability")
    space.set_title("output layer" + (f", every {math.ceil(wide / 200)}th input" if wide > 200 else ""), fontsize=9)
    middle = canvas.add_subplot(cells[0, 1])
    flat = canvas.add_subplot(cells[1, :])
    block = int(max(row["block"] for row in rows if row["layer"] == "middle"))
    each = "every weight" if block == 1 else f"means of blocks of {block} weights"
    for axes, layer in ((flat, "output"), (middle, "middle")):
        top = 1.0 if layer == "output" or block == 1 else float(values[layer].max())
        picture = axes.imshow(values[layer], aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        canvas.colorbar(picture, ax=axes)
        axes.set_title(f"{layer} layer, {each if layer == 'middle' else 'every weight'}", fontsize=9)
        axes.set_xlabel("input" if block == 1 or layer == "output" else "input (block)")
        axes.set_ylabel("class" if layer == "output" else "output" if block == 1 else "output (block)")
        axes.spines[["top", "right"]].set_visible(True)
    plots.title(canvas, "Keep probabilities after stage 3 of one network", "weights, data order")


def _matrix(rows: Table) -> np.ndarray:
    """The rows of one layer as a matrix."""
    outputs, inputs = ({int(row[name]): None for row in rows} for name in ("output", "input"))
    values = np.array([row["keep_prob"] for row in rows], dtype=np.float64)
    return values.reshape(len(outputs), len(inputs))
