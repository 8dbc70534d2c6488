"""How much of a one-shot mask PFT keeps.

The paper's figure of the weights shared by masks before and after PFT, here with the level of chance.
"""

import copy
import math
from dataclasses import replace
from typing import Any

from pacprune import data
from pacprune.masking import criteria, masks
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import together
from pacprune.paper import comparison, frame, pft_vs_osp
from pacprune.paper.comparison import Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config
from pacprune.types import Table

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


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure of shared weights against sparsity."""
    setting = comparison.on_device(SETTINGS[job.scale], job)
    seeds = f"mean and 95 % interval over {setting.seeds} seeds"
    shared = frame.draw(
        job,
        f"shared-weights-{setting.name}",
        f"share of the one-shot mask that PFT keeps, {setting.data}, {setting.model}; {seeds} (weights, data order and "
        "masks are random).",
        lambda: _rows(setting, job),
        _paint,
    )
    shares = frame.means(shared.rows, "shared", "criterion", "sparsity")
    return [shared], {f"shared, {criterion} at {sparsity}": s for (criterion, sparsity), s in shares.items()}


def _rows(setting: Setting, job: Job) -> Table:
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    on = split.train.x.to(job.device), split.train.y.to(job.device)
    dense = comparison.dense_networks(setting, split, on, job.seeds(setting.seeds), job, "dense")
    chosen = [criterion for criterion in _CRITERIA if criterion in setting.criteria]
    entries = [(c, s, seed) for c in chosen for s in setting.sparsities for seed in dense]
    rows = []
    for part in comparison.chunks(entries, job):
        nets = [copy.deepcopy(dense[seed]) for _, _, seed in part]
        before = [
            masks.top_k(criteria.score(criterion, net, on, seed=seed), sparsity=sparsity)
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


def _paint(canvas: Any, rows: Table) -> None:
    axes = canvas.subplots()
    rows = [row | {"place": -math.log(1 - row["sparsity"])} for row in rows]
    style = {
        "magnitude": ("magnitude", "#0072B2", "o"),
        "snip": ("SNIP", "#009E73", "s"),
        "random": ("random", "#D55E00", "^"),
    }
    shown = {name: look for name, look in style.items() if any(row["criterion"] == name for row in rows)}
    frame.lines(axes, rows, x="place", y="shared", by="criterion", style=shown)
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
