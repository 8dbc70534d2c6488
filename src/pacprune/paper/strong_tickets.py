"""Strong lottery tickets: a network whose weights are never trained, and masks that are.

The paper's figure on CIFAR-10 with ResNet20: test error of networks drawn from the trained stochastic mask, started
from an isotropic mask or from SNIP's. The paper lets the expected sparsity go where it will. So the figure shows that,
too, and networks that keep exactly so many of the likeliest weights. Beside it, masks that are held to the sparsity.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pacprune import data
from pacprune.masking import criteria, masks
from pacprune.masking.attachment import attach, harden, read, resample_
from pacprune.masking.spikeslab import block_isotropic, isotropic, top_mask
from pacprune.paper import comparison, painting, paper_pft
from pacprune.paper.comparison import Contest, Task
from pacprune.paper.frame import Figure, Job, Setting, compute_rows
from pacprune.paper.painting import Style
from pacprune.paper.statistics import half_width, means
from pacprune.runs import plots
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.types import Table


class Way(NamedTuple):
    """How masks are trained on weights that stay.

    Args:
        gate_lr: The constant learning rate of the gates.
        mapping: How gates become keep probabilities.
        held: Whether the expected sparsity is held.
    """

    gate_lr: float
    mapping: str
    held: bool


WRITTEN, HELD = "paper", "held"
WAYS = {WRITTEN: Way(0.5, "clamp", held=False), HELD: Way(20.0, "sigmoid", held=True)}
"""The paper's way, and ours."""
EPS = 0.01
"""Keep probability, at the start, of the weights that SNIP would prune."""
DRAWS = 10
"""Networks drawn from every trained mask."""
STARTS = ("random", "snip")


def _frozen(setting: Setting[Contest], epochs: int, **changes: Any) -> Setting[Contest]:
    """No dense training, and so many epochs in which only the gates learn."""
    frozen = Config(epochs=epochs, lr=0.0, augment=setting.pruning.augment)
    return setting.changed(dense=Config(epochs=0), pruning=frozen, **changes)


_COLOUR = paper_pft.SETTINGS["paper"][-1].changed(sparsities=(0.3, 0.5, 0.7, 0.9, 0.95, 0.98), seeds=3)
SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (_frozen(paper_pft.SETTINGS["smoke"][0], 10, sparsities=(0.5, 0.9), seeds=2),),
    "reduced": (_frozen(_COLOUR, 10, sparsities=(0.5, 0.9, 0.98), seeds=2),),
    "paper": (_frozen(_COLOUR, 100),),
}
"""`paper` has the paper's data, network and epochs; `reduced` has a tenth of the epochs."""


class Entry(NamedTuple):
    """One untrained network, the mask that it starts from, and how that is trained."""

    way: str
    start: str
    sparsity: float
    seed: int


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error of untrained networks against sparsity."""
    yield Figure(
        f"strong-tickets-{setting.name}",
        f"{painting.network(setting)}, weights never trained, {setting.pruning.epochs} epochs of the masks, gates "
        f"with learning rate {WAYS[WRITTEN].gate_lr:g}, eps {EPS:g}. Test error of networks drawn from the trained "
        f"mask, which share BatchNorm's statistics: a mark for each of {setting.seeds} seeds, with the 95 % interval "
        f"over {DRAWS} draws. Expected sparsity of the trained mask; test error of its thresholded network.",
        lambda: rows(setting, job),
        paint,
        numbers,
    )


def numbers(rows: Table) -> dict[str, float]:
    """The means of every way, start and sparsity."""
    table = {}
    for name in ("gibbs_error", "thresholded_error", "trained_sparsity"):
        for key, mean in means(rows, name, "way", "start", "sparsity").items():
            table[f"{name}, {', '.join(str(part) for part in key)}"] = mean
    return table


def rows(setting: Setting[Contest], job: Job) -> Table:
    """One row per way, start, sparsity and seed."""
    task = comparison.report_task(setting, data.load(setting.data, seed=0, data_dir=job.data_dir), job)
    table = compute_rows(
        [
            Entry(way, start, sparsity, seed)
            for way in WAYS
            for start in STARTS
            for sparsity in setting.sparsities
            for seed in job.seeds(setting.seeds)
        ],
        lambda portion: _train(setting, portion, task, job),
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry.way,
        portions=job.portions,
    )
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def _train(setting: Setting[Contest], entries: list[Entry], task: Task, job: Job) -> Table:
    """Trains the masks of one way as a population; returns what is to be known of each."""
    (name,) = {entry.way for entry in entries}
    way, seeds = WAYS[name], [entry.seed for entry in entries]
    nets = [_start(entry, way, task, job) for entry in entries]
    budgets = [Budget(entry.sparsity) for entry in entries] if way.held else None
    before = _drawn_errors(nets, task)
    config = replace(setting.pruning, gate_lr=way.gate_lr)
    fit(nets, task.data, config, budget=budgets, seed=seeds, stage="masks", progress=job.progress)
    trained = [read(net).sparsity for net in nets]
    drawn, thresholded = _drawn_errors(nets, task), _thresholded_errors(nets, entries, task)
    return [
        {"start_error": _mean(errors[0]), "gibbs_error": _mean(errors[1]), "gibbs_std": _std(errors[1])}
        | {"trained_sparsity": sparsity, "thresholded_error": error}
        for errors, sparsity, error in zip(zip(before, drawn, strict=True), trained, thresholded, strict=True)
    ]


def _start(entry: Entry, way: Way, task: Task, job: Job) -> nn.Module:
    """The untrained network with its stochastic mask."""
    net = task.build(entry.seed).to(job.device)
    if entry.start == "random":
        slab = isotropic(net, sparsity=entry.sparsity)
    else:
        mask = masks.top_k(criteria.snip(net, task.data), sparsity=entry.sparsity)
        slab = block_isotropic(net, mask, eps=EPS)
    return attach(net, slab, mapping=way.mapping, seed=entry.seed)


def _drawn_errors(nets: list[nn.Module], task: Task) -> list[list[float]]:
    """For every network, the errors of its draws."""
    for net in nets:
        reestimate_batchnorm(net, task.data)
    draws = [task.measure([resample_(net) for net in nets]) for _ in range(DRAWS)]
    return [list(errors) for errors in zip(*draws, strict=True)]


def _thresholded_errors(nets: list[nn.Module], entries: list[Entry], task: Task) -> list[float]:
    """The errors of the networks that keep the likeliest weights, as many as the sparsity says."""
    thresholded = [
        harden(copy.deepcopy(net), top_mask(read(net), sparsity=entry.sparsity))
        for net, entry in zip(nets, entries, strict=True)
    ]
    for net in thresholded:
        reestimate_batchnorm(net, task.data)
    return task.measure(thresholded)


def _mean(errors: list[float]) -> float:
    return sum(errors) / len(errors)


def _std(errors: list[float]) -> float:
    mean = _mean(errors)
    return (sum((error - mean) ** 2 for error in errors) / (len(errors) - 1)) ** 0.5


def styles(rows: Table) -> dict[str, Style]:
    """The look of every way and start that the rows have."""
    looks = {(WRITTEN, "random"): (painting.RED, "o"), (WRITTEN, "snip"): (plots.GREEN, "s")}
    looks |= {(HELD, "random"): (plots.PURPLE, "^"), (HELD, "snip"): (painting.SKY, "D")}
    words = {WRITTEN: "", HELD: ", sparsity held"}
    present = {(row["way"], row["start"]) for row in rows}
    return {
        f"{way} {start}": Style(f"PFT from {painting.named(start)}{words[way]}", *look)
        for (way, start), look in looks.items()
        if (way, start) in present
    }


def paint(canvas: Any, rows: Table) -> None:
    """Errors of drawn and of thresholded networks; the sparsity that masks end with, where it is free."""
    # The first published rows are all held to their sparsity, and say nothing of it.
    table: Table = [{"way": HELD, "trained_sparsity": row["sparsity"]} | row for row in rows]
    table = [row | {"line": f"{row['way']} {row['start']}"} for row in table]
    looks = styles(table)
    free = any(row["way"] != HELD for row in table)  # else masks end as sparse as they began
    canvas.set_size_inches(13 if free else 10, 4.6)
    drawn, thresholded, *others = canvas.subplots(1, 3 if free else 2)
    _paint_drawn(drawn, table, looks)
    painting.sparsity_lines(thresholded, table, y="thresholded_error", by="line", styles=looks)
    painting.heading(thresholded, "networks that keep the likeliest weights")
    errors = [row.get(name) for row in table for name in ("gibbs_error", "thresholded_error", "start_error")]
    for axes in (drawn, thresholded):
        painting.error_axis(axes, [error for error in errors if error is not None])
    for axes in others:
        _paint_sparsity(axes, table, looks)
    canvas.legend(*drawn.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    what = f"{painting.subject(rows)}, weights never trained: {painting.seed_count(rows)} seeds"
    painting.canvas_heading(canvas, f"{what}; bars are 95 % intervals, on the left over {DRAWS} draws of one mask")


def _paint_sparsity(sparsity: Any, table: Table, looks: dict[str, Style]) -> None:
    """The sparsity that masks end with which are not held to the first."""
    painting.sparsity_lines(sparsity, table, y="trained_sparsity", by="line", styles=looks)
    ends = [painting.sparsity_place(level) for level in sorted({row["sparsity"] for row in table})]
    sparsity.plot(ends, sorted({row["sparsity"] for row in table}), color="black", lw=1, ls=":")
    sparsity.set_xlabel("sparsity at the start, in %")
    sparsity.set_ylabel("expected sparsity of the trained mask, in %")
    painting.heading(sparsity, "what sparsity the mask ends with (dotted: as at the start)")
    painting.in_percent(sparsity.yaxis)


def _paint_drawn(axes: Any, rows: Table, looks: dict[str, Style]) -> None:
    """A mark for every trained mask, with the interval over its draws; a line through the means over seeds."""
    for number, (line, style) in enumerate(looks.items()):
        part = [row | {"place": painting.sparsity_place(row["sparsity"])} for row in rows if row["line"] == line]
        look = {"color": style.colour, "transform": painting.moved_aside(axes, number, len(looks))}
        dash = painting.dash_of(number)
        average = sorted((place, mean) for (place,), mean in means(part, "gibbs_error", "place").items())
        axes.plot(*zip(*average, strict=True), lw=1.8, ls=dash, marker=style.marker, ms=5, label=style.label, **look)
        for row in part:
            half = half_width(row["gibbs_std"], DRAWS)
            axes.plot(row["place"], row["gibbs_error"], "_", ms=7, **look)
            axes.vlines(row["place"], row["gibbs_error"] - half, row["gibbs_error"] + half, lw=1.1, **look)
    before = [row["start_error"] for row in rows if row.get("start_error") is not None]
    if before:
        painting.dense_line(axes, before, "before the masks are trained")
    painting.sparsity_ticks(axes, [row["sparsity"] for row in rows])
    painting.heading(axes, f"networks drawn from the mask, {DRAWS} of each")
