"""Entropy of Q's mask against its bound: the paper's figure for an MLP 1000x3 on Fashion-MNIST.

One panel has the density of the runs, one the least-squares line through them. Runs differ in sparsity, in eps and in
their seeds; all are trained by the three stages of PAC-Bayes pruning as the paper writes them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pacprune import data
from pacprune.data.splits import Split
from pacprune.masking.attachment import read
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.paper import painting, pbp_stages
from pacprune.paper.frame import Figure, Job, Setting, compute_rows
from pacprune.paper.pbp_stages import Start
from pacprune.paper.statistics import correlation
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.types import Table


@dataclass(frozen=True)
class Starts:
    """The values of eps that priors start with."""

    eps_grid: tuple[float, ...]


_PAPER = Setting(
    data="fashion-mnist",
    model="mlp",
    sparsities=(0.6, 0.8, 0.9, 0.95, 0.975),
    alphas=(0.5,),
    seeds=5,
    dense=Config(epochs=70, lr=0.01),
    prior=Config(epochs=30, lr=0.01),
    posterior=Config(epochs=30, lr=math.exp(-5.5)),
    std=math.exp(-5),
    draws=2_000,
    amp=False,
    options=Starts((1e-4, 1e-3, 3e-3, 1e-2, 2e-2)),
)
_FEWER: dict[str, Any] = {"sparsities": (0.8, 0.9, 0.95), "eps_grid": (1e-4, 1e-3, 1e-2), "seeds": 2}
_DIGITS = _PAPER.changed(
    data="digits",
    sparsities=(0.8, 0.9, 0.95),
    dense=Config(epochs=30, lr=0.1),
    prior=Config(epochs=30, lr=0.1),
    posterior=Config(epochs=30, lr=math.exp(-3)),
)
SETTINGS: dict[str, tuple[Setting[Starts], ...]] = {
    "smoke": (
        _DIGITS.changed(
            **_FEWER,
            dense=Config(epochs=6, lr=0.1),
            prior=Config(epochs=6, lr=0.1),
            posterior=Config(epochs=2, lr=math.exp(-3)),
            draws=100,
        ),
    ),
    "reduced": (
        _PAPER.changed(
            **_FEWER,
            dense=Config(epochs=14, lr=0.01),
            prior=Config(epochs=6, lr=0.01),
            posterior=Config(epochs=6, lr=math.exp(-5.5)),
        ),
        _DIGITS,
    ),
    "paper": (_PAPER,),
}
"""`paper` has the paper's data, network and epochs, and one std and one learning rate of Q out of the paper's ranges.
`reduced` has a fifth of the epochs, and the digits, for a CPU."""


def figures(setting: Setting[Starts], job: Job) -> Iterator[Figure]:
    """Bound against entropy: its density, and its line."""
    yield Figure(
        f"mask-entropy-{setting.name}",
        f"{painting.network(setting)}: mean binary entropy of Q's keep probabilities against its bound, over "
        f"sparsities, eps and {setting.seeds} seeds (weights, data order and draws are random): the density of the "
        "runs, and the least-squares line; r is Pearson's correlation with its 95 % interval over the runs.",
        lambda: rows(setting, job),
        paint,
        lambda rows: {f"{setting.name}, {name}": number for name, number in numbers(rows).items()},
    )


def numbers(rows: Table) -> dict[str, float]:
    """How entropy goes together with the bound and with the test error."""
    entropies = [row["entropy"] for row in rows]
    table = {
        f"r of entropy and {name}": correlation(entropies, [row[name] for row in rows]).mean
        for name in (_bound(rows), "test_error")
    }
    return {name: r for name, r in table.items() if math.isfinite(r)}


def entropy(slab: SpikeSlab) -> float:
    """Mean over all weights of H(p) = -p log2 p - (1 - p) log2(1 - p), in bits."""
    bits, size = 0.0, 0
    for keep in slab.keep_prob.values():
        p = keep.double()
        bits += float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum()) / math.log(2)
        size += p.numel()
    return bits / size


def rows(setting: Setting[Starts], job: Job) -> Table:
    """One row per run; certificates pay for all of them."""
    (alpha,) = setting.alphas
    split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
    starts = [
        Start("magnitude", sparsity, eps, seed)
        for sparsity in setting.sparsities
        for eps in setting.options.eps_grid
        for seed in job.seeds(setting.seeds)
    ]
    table = compute_rows(
        starts,
        lambda portion: _runs(setting, portion, len(starts), split, job),
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda start: start.mapping,
        portions=job.portions,
    )
    return [{"dataset": setting.data, "model": setting.model, "alpha": alpha} | row for row in table]


def _runs(setting: Setting[Starts], starts: Sequence[Start], grid: int, split: Split, job: Job) -> Table:
    """All three stages of some runs, as a population."""
    nets = pbp_stages.begin(setting, starts, split, job)
    priors = pbp_stages.train_priors(setting, nets, starts, split, job)
    pbp_stages.train_posteriors(setting, nets, priors, starts, split, job)
    return [
        {"entropy": entropy(read(net)), "prior_entropy": entropy(prior)}
        | pbp_stages.certificate_numbers(setting, net, prior, split, job, grid=grid)
        for net, prior in zip(nets, priors, strict=True)
    ]


# --- What is drawn.

_LEVELS = 8
"""Contours of the density."""
_CELLS = 120
"""Points of the grid, along each axis, that the density is computed at."""


def _bound(rows: Table) -> str:
    """The column with the bound that is drawn; the first published rows have none by the paper's theorem."""
    return "paper_bound" if "paper_bound" in rows[0] else "bound"


def paint(canvas: Any, rows: Table) -> None:
    """The density of the runs, the line through them, and beside it the test error."""
    canvas.set_size_inches(13, 4.4)
    sparsities, grid = (sorted({row[name] for row in rows}) for name in ("sparsity", "eps"))
    colours = dict(zip(sparsities, painting.PALETTE, strict=False))
    markers = dict(zip(grid, "osD^vP", strict=False))
    density, line, errors = canvas.subplots(1, 3)
    x = [row["entropy"] for row in rows]
    for axes, name in ((density, _bound(rows)), (line, _bound(rows)), (errors, "test_error")):
        y = [row[name] for row in rows]
        if axes is density:
            _paint_density(axes, x, y)
        else:
            for row in rows:
                style = {"color": colours[row["sparsity"]], "marker": markers[row["eps"]]}
                axes.scatter(row["entropy"], row[name], s=26, **style)
            _paint_line(axes, x, y)
        axes.set_xlabel("mean entropy of a gate of Q, in bits")
        axes.set_ylabel("test error of Q in %" if name == "test_error" else "bound on the error in %")
        painting.in_percent(axes.yaxis)
    marks = [line.scatter([], [], color=colours[s], label=f"sparsity {100 * s:g} %") for s in sparsities]
    marks += [line.scatter([], [], color=plots.GREY, marker=m, label=f"eps {e:g}") for e, m in markers.items()]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    what = f"{painting.subject(rows)}: mask entropy and bound, {len(rows)} runs"
    painting.canvas_heading(canvas, f"{what}, {painting.seed_count(rows)} seeds (weights, data order, draws)")


def _paint_line(axes: Any, x: list[float], y: list[float]) -> None:
    if max(x) > min(x):
        slope, cut = np.polyfit(x, y, 1)
        axes.plot([min(x), max(x)], [cut + slope * min(x), cut + slope * max(x)], color="black", lw=1)
    r = correlation(x, y)
    painting.heading(axes, f"least-squares line; r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]")


def _paint_density(axes: Any, x: list[float], y: list[float]) -> None:
    """The runs as points over contours of their density, where they vary in both directions."""
    axes.scatter(x, y, s=8, color="black", zorder=3)
    painting.heading(axes, "density of the runs")
    spread = [float(np.ptp(values)) for values in (x, y)]
    if not min(spread) > 0:
        return
    ends = [(min(v) - 0.2 * size, max(v) + 0.2 * size) for v, size in zip((x, y), spread, strict=True)]
    ends = [(max(0.0, low), high) for low, high in ends]
    along, up = (np.linspace(*end, _CELLS) for end in ends)
    axes.contourf(along, up, kernel_density(x, y, along, up), levels=_LEVELS, cmap="Blues", zorder=0)
    axes.set_xlim(*ends[0])
    axes.set_ylim(*ends[1])


def kernel_density(x: Sequence[float], y: Sequence[float], along: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Gaussian kernels at the points, with their covariance times n^(-1/3) (Scott's rule), at [up, along]."""
    points = np.stack([x, y])
    covariance = np.cov(points) * points.shape[1] ** (-1 / 3)
    # Runs that lie on one line have no inverse.
    covariance += np.diag(np.diag(covariance)) * 1e-3
    inverse = np.linalg.inv(covariance)
    places = np.stack(np.meshgrid(along, up))
    gaps = places[:, :, :, None] - points[:, None, None, :]
    height = np.exp(-0.5 * np.einsum("iabn,ij,jabn->abn", gaps, inverse, gaps)).mean(-1)
    return height / (2 * math.pi * math.sqrt(np.linalg.det(covariance)))
