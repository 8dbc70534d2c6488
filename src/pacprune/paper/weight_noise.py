"""How networks stand noise on their weights, and whether it helps that PFT learned its mask with noise.

The paper's figure of the drop in performance when Gaussian noise of one width v is added to the weights of dense,
pruned and fine-tuned networks. Beside it: noise in proportion to the weights, PFT by the recipe "coupled" with and
without noise, and how far every network's confidence is from its accuracy.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pacprune import data, philox
from pacprune.masking import weights
from pacprune.paper import comparison, painting, paper_pft
from pacprune.paper.comparison import Contest, Task
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, dense_networks
from pacprune.paper.paper_pft import ONE_SHOT, OURS, WRITTEN
from pacprune.paper.statistics import groups, means
from pacprune.training.evaluate import BATCH, evaluating
from pacprune.types import Table

ONE_WIDTH = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
"""Standard deviations of noise that is the same for all weights."""
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Standard deviations of noise in proportion to the weights."""


class Unit(NamedTuple):
    """What noise of width v means.

    Args:
        label: In words.
        widths: The v that are tried.
        like: Whose weights v is a share of, by their root mean square in each layer: those of the dense network, the
            network's own, or nobody's.
        everywhere: Whether pruned weights have noise, too.
    """

    label: str
    widths: tuple[float, ...]
    like: str = ""
    everywhere: bool = False


UNITS: dict[str, Unit] = {
    "one": Unit("the same v for all kept weights", ONE_WIDTH),
    "everywhere": Unit("the same v for all weights, pruned ones too", ONE_WIDTH, everywhere=True),
    "dense": Unit("v times the rms weight of the dense layer", SHARES, like="dense"),
    "own": Unit("v times the rms kept weight of the layer", SHARES, like="own"),
}
"""The paper's v, on the weights that a network has, or to the letter on all of them. And ours, since BatchNorm makes
sizes of layers arbitrary: the same noise for every network, or as much for its size."""
BINS = 15
DRAWS = {"smoke": 2, "reduced": 3, "paper": 10}
"""Noisy copies of every network and width, by scale."""
STILL = "pft-still"
METHODS = (ONE_SHOT, WRITTEN, OURS, STILL)


def _at_90(setting: Setting[Contest], **changes: Any) -> Setting[Contest]:
    """All methods from magnitude at 90 %."""
    changed = paper_pft.as_written(setting, *METHODS, sparsities=(0.9,), criteria=("magnitude",))
    contenders = changed.options.contenders
    return changed.changed(contenders={**contenders, STILL: contenders[OURS]._replace(method=STILL)}, **changes)


_REDUCED = {setting.name: setting for setting in paper_pft.SETTINGS["reduced"]}
SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (_at_90(paper_pft.SETTINGS["smoke"][0]),),
    "reduced": (
        _at_90(_REDUCED["fashion-mnist-lenet5"]),
        _at_90(paper_pft.lasting(_REDUCED["cifar10-resnet20"], 12, 6), seeds=3),
    ),
    "paper": (_at_90(paper_pft.SETTINGS["paper"][-1]),),
}
"""`paper` has the paper's data, network and epochs; `reduced` has a tenth of its epochs, and LeNet-5."""


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """The drop in accuracy against the width of the noise, and the calibration error of every method."""
    yield Figure(
        f"weight-noise-{setting.name}",
        f"{painting.network(setting)}: the drop in accuracy, as a fraction of the accuracy without noise, when "
        "N(0, v^2) is added to the weights; dense and 90 % pruned networks, BatchNorm's statistics as trained; mean "
        f"and 95 % interval over {setting.seeds} seeds (weights, data order, masks and noise are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: numbers(setting, rows),
    )


def numbers(setting: Setting[Contest], rows: Table) -> dict[str, float]:
    """The mean calibration error of every method, and its mean drop at every v of the paper's kind."""
    plain = [row for row in rows if row["calibration_error"] is not None]
    errors = means(plain, "calibration_error", "method")
    table = {f"{setting.name}, {method}: calibration error": mean for (method,), mean in errors.items()}
    paper_kind = [row for row in with_drops(rows) if row["units"] == "one"]
    return table | {
        f"{setting.name}, {method}: drop at v = {v:g}": mean
        for (method, v), mean in means(paper_kind, "drop", "method", "noise").items()
    }


class Cell(NamedTuple):
    """One network, of a method or dense."""

    method: str
    seed: int


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per method, seed, unit and width of the noise."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    task = comparison.report_task(setting, split, job)
    dense = dense_networks(setting, task.build, task.data, job)

    def compute(portion: list[Cell]) -> Table:
        nets = _networks(setting, portion, dense, task, job)
        return [
            {
                "calibration_error": calibration_error(net, job.tensors(split.test)),
                "errors": _noisy_errors(net, dense[cell.seed], cell.seed, task, job),
            }
            for cell, net in zip(portion, nets, strict=True)
        ]

    cells = compute_rows(
        [Cell(method, seed) for method in ("dense", *setting.options.methods) for seed in dense],
        compute,
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda cell: cell.method,
        portions=job.portions,
    )
    table: Table = []
    for cell in cells:
        common = {"dataset": setting.data, "model": setting.model, "method": cell["method"], "seed": cell["seed"]}
        for units, width, count, error in cell["errors"]:
            row = common | {"units": units, "noise": width, "draws": count, "test_error": error}
            table.append(row | {"calibration_error": None if width else cell["calibration_error"]})
    return table


def _networks(
    setting: Setting[Contest], cells: Sequence[Cell], dense: dict[int, nn.Module], task: Task, job: Job
) -> list[nn.Module]:
    """The networks of one method."""
    (method,) = {cell.method for cell in cells}
    if method == "dense":
        return [dense[cell.seed] for cell in cells]
    point = setting.options.points(method)[0]
    entries = [comparison.Entry(method, "magnitude", setting.sparsities[0], cell.seed, *point) for cell in cells]
    return [result.model for result in comparison.prune(setting, entries, dense, task.data, job)]


def _noisy_errors(
    net: nn.Module, dense: nn.Module, seed: int, task: Task, job: Job
) -> list[tuple[str, float, int, float]]:
    """(unit, width, draws, mean test error) of noisy copies."""
    errors: dict[tuple[str, float], list[float]] = {(name, v): [] for name, unit in UNITS.items() for v in unit.widths}
    draws = [(place, k) for place in errors for k in range(DRAWS[job.scale] if place[1] else 1)]
    references = {"": None, "dense": dense, "own": net}
    for portion in job.portions(draws):
        copies = []
        for (name, v), k in portion:
            unit = UNITS[name]
            like, everywhere = references[unit.like], unit.everywhere
            copies.append(with_noise(net, like, v, seed=seed, number=k, everywhere=everywhere))
        for (place, _), error in zip(portion, task.measure(copies), strict=True):
            errors[place].append(error)
    return [(*place, len(values), sum(values) / len(values)) for place, values in errors.items()]


@torch.no_grad()
def with_noise(
    net: nn.Module, like: nn.Module | None, width: float, *, seed: int, number: int, everywhere: bool = False
) -> nn.Module:
    """A copy with N(0, (width r)^2) added to weights other than 0, or `everywhere`.

    r is the root mean square of the weights other than 0 in the layer of `like`, or 1.
    """
    noisy = copy.deepcopy(net)
    if everywhere:
        weights.apply_mask(noisy, None)  # which would have pruned weights stay zero
    scale = None if like is None else weights.prunable(like)
    start = 0
    for name, w in weights.prunable(noisy).items():
        z = philox.normal(w.numel(), seed=seed, step=number, stream=philox.SLAB, offset=start, device=w.device)
        r = 1.0 if scale is None else (scale[name].square().sum() / (scale[name] != 0).sum().clamp(min=1)).sqrt()
        chosen = torch.ones_like(w) if everywhere else (w != 0).to(w.dtype)
        w.add_(chosen * width * r * z.reshape(w.shape))
        start += w.numel()
    return noisy


def calibration_error(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Expected calibration error: sum_b |B_b| / n |accuracy(B_b) - confidence(B_b)| over 15 bins of equal width.

    A bin holds the examples whose largest softmax probability, the confidence, lies in it (Guo et al. 2017).
    """
    x, y = test
    with evaluating(net):
        confidence, answers = torch.cat([net(part) for part in x.split(BATCH)]).double().softmax(1).max(1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.bincount(place, weights=confidence - (answers == y).double(), minlength=BINS)
    return float(gaps.abs().sum() / len(y))


def with_drops(rows: Table) -> Table:
    """The rows with noise, each with its `drop`: 1 - accuracy / accuracy of the same network without noise."""
    quiet = groups([row for row in rows if not row["noise"]], "method", "seed", "units")
    plain = {key: part[0]["test_error"] for key, part in quiet.items()}
    return [
        row | {"drop": 1 - (1 - row["test_error"]) / (1 - plain[row["method"], row["seed"], row["units"]])}
        for row in rows
        if row["noise"]
    ]


def paint(canvas: Any, rows: Table) -> None:
    """The drop against the width of the noise, a panel per unit."""
    units = [name for name in UNITS if any(row["units"] == name for row in rows)]
    canvas.set_size_inches(10.5, 1 + 3.6 * len(units) / 2)
    panels = canvas.subplots(-(-len(units) // 2), 2, sharey=True, squeeze=False).flatten()
    styles = {"dense": painting.DENSE._replace(label="unpruned"), **painting.method_styles(", 90 % pruned")}
    drops = with_drops(rows)
    for axes, name in zip(panels, units, strict=True):
        part = [row for row in drops if row["units"] == name]
        painting.lines(axes, part, x="noise", y="drop", by="method", styles=styles, side_by_side=True)
        axes.set_xscale("log")
        axes.set_xlim(min(row["noise"] for row in part) / 1.2, max(row["noise"] for row in part) * 1.2)
        ticks = sorted({row["noise"] for row in part})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("v, the noise's standard deviation")
        axes.axhline(0, color="black", lw=0.6)
        painting.heading(axes, UNITS[name].label)
    for axes in panels[::2]:
        axes.set_ylabel("drop in accuracy in %")
    panels[0].set_ylim(-0.05, 1)
    painting.in_percent(panels[0].yaxis)
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    what = f"{painting.subject(rows)}: what Gaussian noise on the weights takes of the accuracy"
    painting.canvas_heading(canvas, f"{what}; {painting.over_seeds(rows)}")
