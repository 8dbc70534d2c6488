"""How much of a one-shot mask PFT keeps.

The paper's figure of the weights shared by masks before and after PFT, here with the level of chance.
"""

from collections.abc import Iterator
from typing import Any

from pacprune import data
from pacprune.masking import criteria, masks
from pacprune.paper import comparison, painting, pft_vs_osp
from pacprune.paper.comparison import Contest, Entry
from pacprune.paper.frame import Figure, Job, Setting, dense_networks
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.types import Table

_CRITERIA = {"magnitude": ("magnitude", "o"), "snip": ("SNIP", "s"), "random": ("random", "^")}
"""Their labels and markers."""
_ONE_RATE: dict[str, Any] = {"methods": ("pft-coupled",), "rates": (0.1,), "gated": ((0.1, 100.0),)}
_COLOUR = pft_vs_osp.SETTINGS["reduced"][-1].changed(sparsities=(0.6, 0.8, 0.9, 0.95, 0.98), **_ONE_RATE)

SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (pft_vs_osp.SETTINGS["smoke"][0].changed(sparsities=(0.6, 0.9), **_ONE_RATE),),
    "reduced": (_COLOUR,),
    "paper": (pft_vs_osp.at_paper_length(_COLOUR, sparsities=(0.6, 0.7, 0.8, 0.9, 0.95, 0.98)),),
}


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Shared weights against sparsity."""
    yield Figure(
        f"shared-weights-{setting.name}",
        f"share of the one-shot mask that PFT keeps, {setting.data}, {setting.model}; mean and 95 % interval over "
        f"{setting.seeds} seeds (weights, data order and masks are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: {
            f"shared, {criterion} at {sparsity}": share
            for (criterion, sparsity), share in means(rows, "shared", "criterion", "sparsity").items()
        },
    )


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per criterion, sparsity and seed."""
    task = comparison.report_task(setting, data.load(setting.data, seed=0, data_dir=job.data_dir), job)
    dense = dense_networks(setting, task.build, task.data, job)
    entries = [
        Entry("pft-coupled", criterion, sparsity, seed, *setting.options.points("pft-coupled")[0])
        for criterion in _CRITERIA
        if criterion in setting.options.criteria
        for sparsity in setting.sparsities
        for seed in dense
    ]
    table: Table = []
    for portion in job.portions(entries):
        results = comparison.prune(setting, portion, dense, task.data, job)
        for entry, result in zip(portion, results, strict=True):
            scores = criteria.score(entry.criterion, dense[entry.seed], task.data, seed=entry.seed)
            before = masks.top_k(scores, sparsity=entry.sparsity)
            shared, chance = masks.overlap(before, result.mask)
            table.append(
                {"dataset": setting.data, "model": setting.model, "criterion": entry.criterion}
                | {"sparsity": entry.sparsity, "seed": entry.seed, "shared": shared, "chance": chance}
            )
    return table


def paint(canvas: Any, rows: Table) -> None:
    """The share in common against sparsity, a line per criterion."""
    axes = canvas.subplots()
    colours = painting.criterion_colours()
    styles = {name: Style(label, colours[name], marker) for name, (label, marker) in _CRITERIA.items()}
    painting.sparsity_lines(axes, rows, y="shared", by="criterion", styles=styles)
    chance = sorted({(painting.sparsity_place(row["sparsity"]), row["chance"]) for row in rows})
    axes.plot(*zip(*chance, strict=True), color="black", lw=1, ls=":", label="two random masks")
    axes.set_ylim(0, 1)
    what = "weights that one-shot pruning and PFT from it both keep"
    painting.heading(axes, f"{painting.subject(rows)}: {what};\n{painting.over_seeds(rows)}")
    axes.set_ylabel("share of the kept weights in common")
    axes.legend(frameon=False)
