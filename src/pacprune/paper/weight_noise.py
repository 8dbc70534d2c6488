"""How networks stand noise on their weights, and whether it helps that PFT learned its mask with noise.

The paper's figure of the drop in performance when Gaussian noise is added to the weights of dense, pruned and
fine-tuned networks; beside it PFT without noise, and how far every network's confidence is from its accuracy.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import data, philox
from pacprune.masking import weights
from pacprune.methods.pipeline import together
from pacprune.paper import comparison, frame, pft_vs_osp
from pacprune.paper.comparison import METHODS, Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config
from pacprune.training.evaluate import BATCH, error, evaluating
from pacprune.types import Table

NOISE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Standard deviations of the noise, in one of the UNITS."""
UNITS = {
    "dense": "in units of the dense layer's rms weight",
    "own": "in units of the layer's own rms kept weight",
}
"""The same noise for every network, as in the paper; or as much for its size, since BatchNorm makes sizes arbitrary."""
BINS = 15
_DRAWS = {"smoke": 2, "reduced": 10, "paper": 20}
_METHODS = ("osp", "pft", "pft-still")


def _alike(setting: Setting) -> Setting:
    """All methods from magnitude at 90 %, with one learning rate."""
    given: dict[str, Any] = {"sparsities": (0.9,), "criteria": ("magnitude",), "methods": _METHODS}
    return replace(setting, **given, rates=(0.1,), gated=((0.1, 100.0),))


_COLOUR = _alike(pft_vs_osp.SETTINGS["reduced"][-1])
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "smoke": (_alike(pft_vs_osp.SETTINGS["smoke"][0]),),
    "reduced": (_alike(pft_vs_osp.SETTINGS["reduced"][-2]), _COLOUR),
    "paper": (
        replace(
            _COLOUR,
            seeds=5,
            dense=Config(epochs=120, lr=0.1, schedule="step", augment=True, weight_decay=5e-4),
            after=replace(_COLOUR.after, epochs=180),
        ),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure of test error against the width of the noise per network, and the calibration error of each method."""
    drawn, numbers = [], {}
    for setting in job.chosen(SETTINGS[job.scale]):
        setting = comparison.on_device(setting, job)
        caption = (
            f"{setting.data}, {setting.model}: test error with Gaussian noise on the weights that are kept and "
            f"BatchNorm's statistics as trained; mean and 95 % interval over {setting.seeds} seeds (weights, data "
            "order, masks and noise are random)."
        )
        name = f"weight-noise-{setting.name}"
        found = frame.draw(job, name, caption, lambda setting=setting: _rows(setting, job), _paint)
        drawn.append(found)
        plain = [row for row in found.rows if row["calibration_error"] is not None]
        means = frame.means(plain, "calibration_error", "method")
        numbers |= {f"{setting.name}, {method}: calibration error": mean for (method,), mean in means.items()}
    return drawn, numbers


def _rows(setting: Setting, job: Job) -> Table:
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    on = split.train.x.to(job.device), split.train.y.to(job.device)
    test = split.test.x.to(job.device), split.test.y.to(job.device)
    dense = comparison.dense_networks(setting, split, on, job.seeds(setting.seeds), job, "dense")
    seeds, config = list(dense), replace(setting.after, lr=setting.rates[0])
    shared = {"sparsity": setting.sparsities[0], "seed": seeds, "progress": job.progress}
    nets = {"dense": list(dense.values())}
    for method in setting.methods:
        verb, options = METHODS[method]
        found = together(verb, [copy.deepcopy(net) for net in dense.values()], on, config, **options, **shared)
        nets[method] = [result.model for result in found]
    rows = []
    for method, trained in nets.items():
        for seed, net, whole in zip(seeds, trained, dense.values(), strict=True):
            common = {"dataset": setting.data, "model": setting.model, "method": method, "seed": seed}
            places = [(units, width) for units in UNITS for width in NOISE]
            draws = [(*place, k) for place in places for k in range(_DRAWS[job.scale] if place[1] else 1)]
            errors: dict[tuple[str, float], list[float]] = {place: [] for place in places}
            for part in comparison.chunks(draws, job):
                crowd = [with_noise(net, whole if units == "dense" else net, v, seed, k) for units, v, k in part]
                for (units, width, _), wrong in zip(part, error(crowd, test), strict=True):
                    errors[units, width].append(wrong)
            plain = calibration_error(net, test)
            for (units, width), found in errors.items():
                own = {"units": units, "noise": width, "draws": len(found), "test_error": sum(found) / len(found)}
                rows.append(common | own | {"calibration_error": None if width else plain})
    return rows


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
        confidence, said = torch.cat([net(part) for part in x.split(BATCH)]).double().softmax(1).max(1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.bincount(place, weights=confidence - (said == y).double(), minlength=BINS)
    return float(gaps.abs().sum() / len(y))


def _paint(canvas: Any, rows: Table) -> None:
    panels = canvas.subplots(1, len(UNITS), sharey=True)
    style = {
        "dense": ("dense", "black", "o"),
        "osp": ("one-shot, 90 % pruned", "#999999", "s"),
        "pft": ("PFT, 90 % pruned", "#D55E00", "^"),
        "pft-still": ("PFT without noise, 90 % pruned", "#8B4513", "d"),
    }
    for axes, (units, words) in zip(panels, UNITS.items(), strict=True):
        own = [row for row in rows if row["units"] == units]
        frame.lines(axes, own, x="noise", y="test_error", by="method", style=style)
        axes.set_xlabel(f"v, the noise's standard deviation\n{words}", fontsize=8)
    canvas.suptitle(
        f"{rows[0]['dataset']}, {rows[0]['model']}: Gaussian noise on the kept weights; mean and 95 % interval over "
        f"{len({row['seed'] for row in rows})} seeds",
        x=0.01,
        ha="left",
        fontsize=9,
    )
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("test error")
    panels[0].legend(frameon=False, fontsize=8)
