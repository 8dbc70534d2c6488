"""How much of a one-shot mask PFT keeps.

The paper's figure of the weights shared by masks before and after PFT, here with the level of chance, and beside it
faster gates and the recipe "coupled". Masks are final when they have been learned, so nothing is fine-tuned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pacprune import data
from pacprune.masking import criteria, masks
from pacprune.paper import comparison, painting, paper_pft
from pacprune.paper.comparison import Contender, Contest, Entry, Task
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, dense_networks
from pacprune.paper.painting import Style
from pacprune.paper.paper_pft import OURS, WRITTEN
from pacprune.paper.statistics import means
from pacprune.training.config import GATE_RATIO
from pacprune.types import Table

FAST = "pft-paper-fast"
"""The paper's PFT with GATE_RATIO times the learning rate for its gates."""
_CRITERIA = {"magnitude": "o", "snip": "s", "random": "^"}
"""Their markers."""


def _masks_alone(setting: Setting[Contest], **changes: Any) -> Setting[Contest]:
    """All epochs of pruning are those of the paper's mask stage; one-shot masks need none."""
    dense = setting.dense
    written = Contender("pft", (("recipe", "paper"), ("mask_share", 1.0)))
    fast = Contender("pft-paper", (("mask_share", 1.0),))
    ours = Contender(OURS, (("mask_share", 1.0),), (("schedule", "cosine"), ("warmup", 0.05)))
    return paper_pft.as_written(
        setting,
        *(WRITTEN, FAST, OURS),
        contenders={WRITTEN: written, FAST: fast, OURS: ours},
        grids={WRITTEN: ((dense.lr, 1.0),), FAST: ((dense.lr, GATE_RATIO),)},
        pruning=replace(setting.pruning, epochs=setting.pruning.epochs - dense.epochs),
    ).changed(**changes)


_COLOUR = paper_pft.SETTINGS["paper"][-1]
SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (
        _masks_alone(paper_pft.SETTINGS["smoke"][0], sparsities=(0.6, 0.9, 0.95), criteria=_COLOUR.options.criteria),
    ),
    "reduced": (_masks_alone(paper_pft.lasting(_COLOUR, 12, 6), sparsities=(0.6, 0.8, 0.9, 0.95, 0.98), seeds=2),),
    "paper": (_masks_alone(_COLOUR, sparsities=(0.6, 0.7, 0.8, 0.9, 0.95, 0.98)),),
}
"""`paper` has the paper's data, network, epochs and 5 runs; `reduced` has a tenth of the epochs."""


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Shared weights against sparsity."""
    yield Figure(
        f"shared-weights-{setting.name}",
        f"{painting.network(setting)}: share of the weights of a one-shot mask that the mask of PFT keeps, which "
        f"is learned in {setting.pruning.epochs} epochs after {setting.dense.epochs} dense ones. The paper's recipe "
        f"from three criteria; from magnitude also with gates {GATE_RATIO:g} times as fast, and by the recipe "
        f'"coupled". Mean and 95 % interval over {setting.seeds} seeds (weights, data order and masks are random).',
        lambda: rows(setting, job),
        paint,
        numbers,
    )


def numbers(rows: Table) -> dict[str, float]:
    """The mean shares."""
    kept = [row for row in rows if row["shared"] is not None]
    return {
        f"shared, {method}, {criterion} at {sparsity}": share
        for (method, criterion, sparsity), share in means(kept, "shared", "method", "criterion", "sparsity").items()
    }


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per method, criterion, sparsity and seed."""
    task = comparison.report_task(setting, data.load(setting.data, seed=0, data_dir=job.data_dir), job)
    dense = dense_networks(setting, task.build, task.data, job)
    entries = [
        Entry(method, criterion, sparsity, seed, *setting.options.points(method)[0])
        for method, criterion in setting.options.pairs()
        for sparsity in setting.sparsities
        for seed in dense
    ]

    def attempt(portion: list[Entry]) -> Table:
        results = comparison.prune(setting, portion, dense, task.data, job)
        return _shares(portion, [result.mask for result in results], dense, task)

    table = compute_rows(
        entries,
        lambda portion: comparison.despite_divergence(portion, attempt, {"shared": None, "chance": None}),
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry.method,
        portions=job.portions,
    )
    names = ("method", "criterion", "sparsity", "seed", "shared", "chance")
    subject = {"dataset": setting.data, "model": setting.model}
    return [subject | {name: row[name] for name in names} for row in table]


def _shares(entries: Sequence[Entry], learned: Sequence[Mapping[str, Tensor]], dense: Any, task: Task) -> Table:
    """What every learned mask shares with the one-shot mask of its criterion, and what two random masks would."""
    table: Table = []
    for entry, mask in zip(entries, learned, strict=True):
        scores = criteria.score(entry.criterion, dense[entry.seed], task.data, seed=entry.seed)
        shared, chance = masks.overlap(masks.top_k(scores, sparsity=entry.sparsity), mask)
        table.append({"shared": shared, "chance": chance})
    return table


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """The look of every method and criterion; the criterion's colour is that of the first method."""
    colours = painting.criterion_colours()
    words = {WRITTEN: "", FAST: f", gates {GATE_RATIO:g} times as fast", OURS: ', recipe "coupled"'}
    looks = {}
    for method in methods:
        for criterion, marker in _CRITERIA.items():
            colour, mark = (colours[criterion], marker) if method == methods[0] else _ASIDE[method]
            label = f"PFT from {painting.named(criterion)}{words[method]}"
            looks[f"{method} {criterion}"] = Style(label, colour, mark)
    return looks


_ASIDE = {FAST: (painting.SKY, "v"), OURS: ("#A0522D", "x")}


def paint(canvas: Any, rows: Table) -> None:
    """The share in common against sparsity, a line per method and criterion."""
    canvas.set_size_inches(7.6, 4.8)
    axes = canvas.subplots()
    # The first published rows are all of the recipe "coupled", and do not name it.
    kept: Table = [{"method": OURS} | row for row in rows if row["shared"] is not None]
    methods = [name for name in (WRITTEN, FAST, OURS) if any(row["method"] == name for row in kept)]
    lines = [row | {"line": f"{row['method']} {row['criterion']}"} for row in kept]
    painting.sparsity_lines(axes, lines, y="shared", by="line", styles=styles(methods))
    chance = sorted({(painting.sparsity_place(row["sparsity"]), row["chance"]) for row in kept})
    axes.plot(*zip(*chance, strict=True), color="black", lw=1, ls=":", label="two random masks")
    axes.set_ylim(0, min(1.02, 1.15 * max(row["shared"] for row in kept)))
    painting.in_percent(axes.yaxis)
    what = "weights that a one-shot mask and the mask of PFT from it share"
    painting.heading(axes, f"{painting.subject(rows)}: {what};\n{painting.over_seeds(rows)}")
    axes.set_ylabel("shared weights in % of those kept")
    painting.label_ends(axes)
