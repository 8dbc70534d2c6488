"""How networks stand noise on their weights, and whether it helps that PFT learned its mask with noise.

The paper's figure of the drop in performance when Gaussian noise is added to the weights of dense, pruned and
fine-tuned networks; beside it PFT without noise, and how far every network's confidence is from its accuracy.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import data, philox
from pacprune.masking import weights
from pacprune.paper import comparison, painting, pft_vs_osp
from pacprune.paper.comparison import Contest, Entry, Task
from pacprune.paper.frame import Figure, Job, Setting, dense_networks
from pacprune.paper.statistics import means
from pacprune.training.evaluate import BATCH, evaluating
from pacprune.types import Table

NOISE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Standard deviations of the noise, in one of the UNITS."""
UNITS = {
    "dense": "in units of the dense layer's rms weight",
    "own": "in units of the layer's own rms kept weight",
}
"""The same noise for every network, as in the paper; or as much for its size, since BatchNorm makes sizes arbitrary."""
BINS = 15
DRAWS = {"smoke": 2, "reduced": 10, "paper": 20}
"""Noisy copies of every network and width, by scale."""


def _at_90(setting: Setting[Contest]) -> Setting[Contest]:
    """All methods from magnitude at 90 %, with one learning rate."""
    return setting.changed(
        sparsities=(0.9,),
        criteria=("magnitude",),
        methods=("osp", "pft", "pft-coupled", "pft-still"),
        rates=(0.1,),
        gated=((0.1, 100.0),),
    )


_COLOUR = _at_90(pft_vs_osp.SETTINGS["reduced"][-1])
SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (_at_90(pft_vs_osp.SETTINGS["smoke"][0]),),
    "reduced": (_at_90(pft_vs_osp.SETTINGS["reduced"][-2]), _COLOUR),
    "paper": (pft_vs_osp.at_paper_length(_COLOUR),),
}


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error against the width of the noise, and the calibration error of every method."""
    yield Figure(
        f"weight-noise-{setting.name}",
        f"{setting.data}, {setting.model}: test error with Gaussian noise on the weights that are kept and "
        f"BatchNorm's statistics as trained; mean and 95 % interval over {setting.seeds} seeds (weights, data order, "
        "masks and noise are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: numbers(setting, rows),
    )


def numbers(setting: Setting[Contest], rows: Table) -> dict[str, float]:
    """The mean calibration error of every method."""
    plain = [row for row in rows if row["calibration_error"] is not None]
    errors = means(plain, "calibration_error", "method")
    return {f"{setting.name}, {method}: calibration error": mean for (method,), mean in errors.items()}


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per method, seed, unit and width of the noise."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    task = comparison.report_task(setting, split, job)
    dense = dense_networks(setting, task.build, task.data, job)
    networks = {"dense": list(dense.values())}
    for method, criterion in setting.options.pairs():
        point = setting.options.points(method)[0]
        entries = [Entry(method, criterion, setting.sparsities[0], seed, *point) for seed in dense]
        networks[method] = [result.model for result in comparison.prune(setting, entries, dense, task.data, job)]
    table: Table = []
    for method, nets in networks.items():
        for seed, net in zip(dense, nets, strict=True):
            common = {"dataset": setting.data, "model": setting.model, "method": method, "seed": seed}
            calibration = calibration_error(net, job.tensors(split.test))
            for (units, width), errors in _noisy_errors(net, dense[seed], seed, task, job).items():
                mean = {"units": units, "noise": width, "draws": len(errors), "test_error": sum(errors) / len(errors)}
                table.append(common | mean | {"calibration_error": None if width else calibration})
    return table


def _noisy_errors(
    net: nn.Module, dense: nn.Module, seed: int, task: Task, job: Job
) -> dict[tuple[str, float], list[float]]:
    """The test errors of noisy copies, under (units, width)."""
    errors: dict[tuple[str, float], list[float]] = {(units, width): [] for units in UNITS for width in NOISE}
    draws = [(place, k) for place in errors for k in range(DRAWS[job.scale] if place[1] else 1)]
    for portion in job.portions(draws):
        copies = [with_noise(net, dense if units == "dense" else net, width, seed, k) for (units, width), k in portion]
        for (place, _), error in zip(portion, task.measure(copies), strict=True):
            errors[place].append(error)
    return errors


@torch.no_grad()
def with_noise(net: nn.Module, like: nn.Module, width: float, seed: int, number: int) -> nn.Module:
    """A copy with N(0, (width r)^2) added to weights other than 0; r is the rms of these in `like`'s layer."""
    noisy, scale = copy.deepcopy(net), weights.prunable(like)
    start = 0
    for name, w in weights.prunable(noisy).items():
        z = philox.normal(w.numel(), seed=seed, step=number, stream=philox.SLAB, offset=start, device=w.device)
        rms = (scale[name].square().sum() / (scale[name] != 0).sum().clamp(min=1)).sqrt()
        w.add_((w != 0) * width * rms * z.reshape(w.shape))
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


def paint(canvas: Any, rows: Table) -> None:
    """Test error against the width of the noise, a panel per unit."""
    panels = canvas.subplots(1, len(UNITS), sharey=True)
    styles = {"dense": painting.DENSE, **painting.method_styles(", 90 % pruned")}
    for axes, (units, words) in zip(panels, UNITS.items(), strict=True):
        part = [row for row in rows if row["units"] == units]
        painting.lines(axes, part, x="noise", y="test_error", by="method", styles=styles)
        axes.set_xlabel(f"v, the noise's standard deviation\n{words}", fontsize=8)
    what = f"{painting.subject(rows)}: Gaussian noise on the kept weights"
    painting.canvas_heading(canvas, f"{what}; {painting.over_seeds(rows)}")
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("test error")
    panels[0].legend(frameon=False, fontsize=8)
