"""How much of a one-shot mask PFT keeps, and how networks stand noise on their weights.

The paper's figure of the weights shared by masks before and after PFT, here with the level of chance, and of the drop
in performance when Gaussian noise is added to the weights of dense, pruned and fine-tuned networks.
"""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import data, masks, philox, scores, weights
from pacprune.config import Config
from pacprune.evaluate import error
from pacprune.experiments import contest, figures, pft_vs_osp
from pacprune.experiments.contest import Setting
from pacprune.experiments.figures import Drawn, Job
from pacprune.experiments.plots import Table
from pacprune.pipelines import osp, pft, together

_KEPT = 0.1
"""The share of weights kept by the networks that are given noise."""
NOISE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Standard deviations of the noise, in one of the UNITS."""
UNITS = {
    "dense": "in units of the dense layer's rms weight",
    "own": "in units of the layer's own rms kept weight",
}
"""The same noise for every network, as in the paper; or as much for its size, since BatchNorm makes sizes arbitrary."""
_CRITERIA = ("magnitude", "snip", "random")

SETTINGS: dict[str, Setting] = {
    "smoke": replace(pft_vs_osp.SETTINGS["smoke"][0], sparsities=(0.6, 0.9), rates=(0.1,), gated=((0.1, 100.0),)),
    "reduced": replace(
        pft_vs_osp.SETTINGS["reduced"][-1], sparsities=(0.6, 0.8, 0.9, 0.95, 0.98), rates=(0.1,), gated=((0.1, 100.0),)
    ),
    "paper": replace(
        pft_vs_osp.SETTINGS["reduced"][-1],
        sparsities=(0.6, 0.7, 0.8, 0.9, 0.95, 0.98),
        rates=(0.1,),
        gated=((0.1, 100.0),),
        seeds=5,
        dense=Config(epochs=120, lr=0.1, schedule="step", augment=True, weight_decay=5e-4),
        after=replace(pft_vs_osp.SETTINGS["reduced"][-1].after, epochs=180),
    ),
}
_DRAWS = {"smoke": 2, "reduced": 10, "paper": 20}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """Two figures: shared weights against sparsity, and test error against the width of the noise."""
    setting = contest.on_device(SETTINGS[job.scale], job)
    seeds = f"mean and 95 % interval over {setting.seeds} seeds"
    shared = figures.draw(
        job,
        f"shared-weights-{setting.name}",
        f"share of the one-shot mask that PFT keeps, {setting.data}, {setting.model}; {seeds} (weights, data order and "
        "masks are random).",
        lambda: _shared(setting, job),
        _paint_shared,
    )
    noisy = figures.draw(
        job,
        f"weight-noise-{setting.name}",
        f"test error with Gaussian noise on the weights that are kept and BatchNorm's statistics as trained, "
        f"{setting.data}, {setting.model}; {seeds} (weights, data order, masks and noise are random).",
        lambda: _noisy(setting, job),
        _paint_noisy,
    )
    shares = figures.means(shared.rows, "shared", "criterion", "sparsity")
    return [shared, noisy], {f"shared, {criterion} at {sparsity}": s for (criterion, sparsity), s in shares.items()}


def _start(setting: Setting, job: Job) -> tuple[Any, tuple[Tensor, Tensor], dict[int, nn.Module]]:
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    on = split.train.x.to(job.device), split.train.y.to(job.device)
    return split, on, contest.dense_networks(setting, split, on, job.seeds(setting.seeds), job, "dense")


def _shared(setting: Setting, job: Job) -> Table:
    _, on, dense = _start(setting, job)
    criteria = [criterion for criterion in _CRITERIA if criterion in setting.criteria]
    entries = [(c, s, seed) for c in criteria for s in setting.sparsities for seed in dense]
    rows = []
    for part in contest.chunks(entries, job):
        nets = [copy.deepcopy(dense[seed]) for _, _, seed in part]
        before = [
            masks.top_k(scores.score(criterion, net, on, seed=seed), sparsity=sparsity)
            for (criterion, sparsity, seed), net in zip(part, nets, strict=True)
        ]
        found = together(
            pft,
            nets,
            on,
            replace(setting.after, lr=setting.rates[0]),
            criterion=[entry[0] for entry in part],
            sparsity=[entry[1] for entry in part],
            seed=[entry[2] for entry in part],
            progress=job.progress,
        )
        for (criterion, sparsity, seed), old, new in zip(part, before, found, strict=True):
            shared, chance = masks.overlap(old, new.mask)
            rows.append(
                {
                    "dataset": setting.data,
                    "model": setting.model,
                    "criterion": criterion,
                    "sparsity": sparsity,
                    "seed": seed,
                    "shared": shared,
                    "chance": chance,
                }
            )
    return rows


def _noisy(setting: Setting, job: Job) -> Table:
    split, on, dense = _start(setting, job)
    test = split.test.x.to(job.device), split.test.y.to(job.device)
    seeds, config = list(dense), replace(setting.after, lr=setting.rates[0])
    shared = {"sparsity": 1 - _KEPT, "seed": seeds, "progress": job.progress}
    nets = {"dense": list(dense.values())}
    for name, verb in (("osp", osp), ("pft", pft)):
        found = together(verb, [copy.deepcopy(net) for net in dense.values()], on, config, **shared)
        nets[name] = [result.model for result in found]
    rows = []
    for method, trained in nets.items():
        for seed, net, whole in zip(seeds, trained, dense.values(), strict=True):
            for units, width in [(units, width) for units in UNITS for width in NOISE]:
                scale = whole if units == "dense" else net
                crowd = [_with_noise(net, scale, width, seed, k) for k in range(_DRAWS[job.scale] if width else 1)]
                errors = [e for part in contest.chunks(crowd, job) for e in error(part, test)]
                found = {"method": method, "seed": seed, "units": units, "noise": width, "draws": len(errors)}
                rows.append(found | {"test_error": sum(errors) / len(errors)})
    return rows


@torch.no_grad()
def _with_noise(net: nn.Module, like: nn.Module, width: float, seed: int, number: int) -> nn.Module:
    """A copy with N(0, (width r)^2) added to weights other than 0; r is the rms of these in `like`'s layer."""
    noisy, scale = copy.deepcopy(net), weights.prunable(like)
    start = 0
    for name, w in weights.prunable(noisy).items():
        z = philox.normal(w.numel(), seed=seed, step=number, stream=philox.SLAB, offset=start, device=w.device)
        rms = (scale[name].square().sum() / (scale[name] != 0).sum().clamp(min=1)).sqrt()
        w.add_((w != 0) * width * rms * z.reshape(w.shape))
        start += w.numel()
    return noisy


def _paint_shared(canvas: Any, rows: Table) -> None:
    axes = canvas.subplots()
    rows = [row | {"place": -math.log(1 - row["sparsity"])} for row in rows]
    style = {
        "magnitude": ("magnitude", "#0072B2", "o"),
        "snip": ("SNIP", "#009E73", "s"),
        "random": ("random", "#D55E00", "^"),
    }
    shown = {name: look for name, look in style.items() if any(row["criterion"] == name for row in rows)}
    figures.lines(axes, rows, x="place", y="shared", by="criterion", style=shown)
    chance = sorted({(row["place"], row["chance"]) for row in rows})
    axes.plot([p for p, _ in chance], [c for _, c in chance], color="black", lw=1, ls=":", label="two random masks")
    places = {row["place"]: f"{row['sparsity']:g}" for row in rows}
    axes.set_xticks(list(places), list(places.values()))
    axes.set_ylim(0, 1)
    axes.set_title(
        f"{rows[0]['dataset']}, {rows[0]['model']}: weights that one-shot pruning and PFT from it both keep;\n"
        f"mean and 95 % interval over {len({row['seed'] for row in rows})} seeds",
        loc="left",
        fontsize=9,
    )
    axes.set_xlabel("sparsity (fraction of the weights pruned)")
    axes.set_ylabel("share of the kept weights in common")
    axes.legend(frameon=False)


def _paint_noisy(canvas: Any, rows: Table) -> None:
    panels = canvas.subplots(1, len(UNITS), sharey=True)
    style = {
        "dense": ("dense", "black", "o"),
        "osp": ("one-shot, 90 % pruned", "#999999", "s"),
        "pft": ("PFT, 90 % pruned", "#D55E00", "^"),
    }
    for axes, (units, words) in zip(panels, UNITS.items(), strict=True):
        own = [row for row in rows if row["units"] == units]
        figures.lines(axes, own, x="noise", y="test_error", by="method", style=style)
        axes.set_xlabel(f"v, the noise's standard deviation\n{words}", fontsize=8)
    seeds = len({row["seed"] for row in rows})
    panels[0].set_title(
        f"Gaussian noise on the kept weights; mean and 95 % interval over {seeds} seeds", loc="left", fontsize=9
    )
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("test error")
    panels[0].legend(frameon=False, fontsize=8)
