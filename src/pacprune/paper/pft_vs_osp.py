"""PFT against one-shot pruning and against GMP, DPF, IMP and L0 over sparsity, at equal budget.

The paper's figures of test error against sparsity (MNIST, Fashion-MNIST, CIFAR-10), with the baselines it lacks.
"""

import math
from dataclasses import replace
from typing import Any

from pacprune.masking.criteria import CRITERIA
from pacprune.paper import comparison, frame
from pacprune.paper.comparison import METHODS, Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config
from pacprune.types import Table

_AFTER = Config(schedule="cosine", warmup=0.05)
_GREY = Setting(
    data="mnist",
    model="mlp",
    sparsities=(0.9, 0.95, 0.98, 0.99),
    criteria=("magnitude", "snip", "random"),
    methods=tuple(METHODS),
    seeds=5,
    dense=Config(epochs=12, lr=0.05, schedule="cosine"),
    after=replace(_AFTER, epochs=12),
    rates=(0.02, 0.05, 0.1, 0.2),
    gated=((0.05, 100.0), (0.1, 100.0), (0.2, 100.0), (0.1, 500.0)),
    tuned_at=0.98,
)
_COLOUR = replace(
    _GREY,
    data="cifar10",
    model="resnet20",
    sparsities=(0.8, 0.9, 0.95, 0.98, 0.99),
    criteria=tuple(CRITERIA),
    seeds=3,
    gated=((0.1, 100.0), (0.2, 100.0), (0.1, 500.0), (0.2, 500.0)),
    dense=Config(epochs=20, lr=0.1, schedule="cosine", warmup=0.05, augment=True, weight_decay=5e-4),
    after=replace(_AFTER, epochs=16, augment=True),
)

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "smoke": (
        replace(
            _GREY,
            data="digits",
            sparsities=(0.9, 0.98),
            criteria=("magnitude", "random"),
            seeds=3,
            dense=Config(epochs=4, lr=0.1, schedule="cosine"),
            after=replace(_AFTER, epochs=4),
            rates=(0.05, 0.1),
            gated=((0.1, 100.0), (0.1, 500.0)),
        ),
    ),
    "reduced": (
        _GREY,
        replace(_GREY, data="fashion-mnist"),
        replace(_GREY, data="fashion-mnist", model="lenet5"),
        _COLOUR,
    ),
    "paper": (
        replace(
            _COLOUR,
            sparsities=(0.9, 0.95, 0.98),
            criteria=("magnitude",),
            methods=("osp", "pft", "gmp"),
            rates=(0.2,),  # what was best for all three at the reduced scale
            gated=((0.2, 100.0),),
            dense=replace(_COLOUR.dense, epochs=120),
            after=replace(_COLOUR.after, epochs=180),
            mask_share=1 / 3,  # 60 + 120 epochs
        ),
    ),
}
"""Data sets, networks and grids: `smoke` shows that it runs, `paper` has the paper's number of epochs."""

_NEAR = 2.5
"""How many times the least error at a sparsity is still shown."""
_STYLE = {
    "osp": ("one-shot", "#999999", "o"),
    "pft": ("PFT", "#D55E00", "s"),
    "pft-paper": ("PFT, the paper's recipe", "#E69F00", "D"),
    "pft-still": ("PFT without noise", "#8B4513", "d"),
    "gmp": ("GMP", "#0072B2", "^"),
    "dpf": ("DPF", "#56B4E9", "v"),
    "imp": ("IMP, rewinding", "#009E73", "P"),
    "l0": ("L0, hard concrete", "#CC79A7", "X"),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure and a CSV per data set and network, and the margins of PFT."""
    drawn, numbers = [], {}
    for setting in job.chosen(SETTINGS[job.scale]):
        setting = comparison.on_device(setting, job)
        caption = (
            f"{setting.data}, {setting.model}: test error after {setting.after.epochs} epochs that follow "
            f"{setting.dense.epochs} dense ones; mean and 95 % interval over {setting.seeds} seeds (weights, data "
            "order and masks are random), methods with a criterion from magnitude."
        )
        found = frame.draw(
            job, f"pft-vs-osp-{setting.name}", caption, lambda setting=setting: comparison.run(setting, job), paint
        )
        drawn.append(found)
        numbers |= margins(setting, found.rows)
    return drawn, numbers


def paint(canvas: Any, rows: Table) -> None:
    """Test error against sparsity, a line per method, those with a criterion from magnitude."""
    ranked = [row for row in rows if row["criterion"] == "magnitude"]
    _paint(canvas, rows, ranked, "method", _STYLE)


def paint_criteria(canvas: Any, rows: Table) -> None:
    """Test error against sparsity, a line per method and criterion."""
    ranked = [row | {"kind": f"{row['method']} {row['criterion']}"} for row in rows if row["criterion"]]
    colours = {"magnitude": "#0072B2", "snip": "#009E73", "random": "#D55E00", "grasp": "#CC79A7", "synflow": "#E69F00"}
    style = {
        f"{method} {criterion}": (f"{label}, {criterion}", colour, marker)
        for criterion, colour in colours.items()
        for method, label, marker in (("osp", "one-shot", "o"), ("pft", "PFT", "s"))
    }
    _paint(canvas, rows, ranked, "kind", style)


def _paint(canvas: Any, rows: Table, ranked: Table, by: str, style: dict[str, tuple[str, str, str]]) -> None:
    axes = canvas.subplots()
    # Every factor of kept weights has the same width: 0.98 and 0.99 are as far apart as 0.8 and 0.9.
    ranked = [row | {"place": -math.log(1 - row["sparsity"])} for row in ranked if row["kept"]]  # others diverged
    present = {row[by] for row in ranked}
    shown = {key: look for key, look in style.items() if key in present}
    frame.lines(axes, ranked, x="place", y="test_error", by=by, style=shown)
    dense = [row["test_error"] for row in rows if row["method"] == "dense" and row["epochs"]]
    if dense:
        axes.axhline(frame.interval(dense).mean, color="black", lw=1, ls=":", label="dense")
    seeds, budget = len({row["seed"] for row in rows}), int(ranked[0]["epochs"])
    when = "after dense training" if dense else "from initialisation"
    axes.set_title(
        f"{rows[0]['dataset']}, {rows[0]['model']}, {budget} epochs {when}; mean and 95 % interval over {seeds} seeds",
        loc="left",
        fontsize=9,
    )
    places = {row["place"]: f"{row['sparsity']:g}" for row in ranked}
    axes.set_xticks(list(places), list(places.values()))
    # A method that diverges would hide what the others do, and an interval of few seeds may go beyond any error.
    means = {
        place: [
            frame.interval(errors).mean
            for key in shown
            if (errors := [r["test_error"] for r in ranked if (r["place"], r[by]) == (place, key)])
        ]
        for place in places
    }
    near = [mean for found in means.values() for mean in found if mean <= _NEAR * min(found)]
    hidden = any(mean > _NEAR * min(found) for found in means.values() for mean in found)
    low, high = min([*near, *dense]), max([*near, *dense])
    axes.set_ylim(max(0.0, low - 0.15 * (high - low)), high + 0.25 * (high - low))
    axes.set_xlabel("sparsity (fraction of the weights pruned)")
    axes.set_ylabel("test error" + (f" (above {_NEAR:g} times the least: not shown)" if hidden else ""))
    axes.legend(frameon=False, fontsize=8)


def margins(setting: Setting, rows: Table) -> dict[str, float]:
    """How far PFT is below one-shot pruning by the same criterion, per criterion and sparsity."""
    found = frame.means(rows, "test_error", "method", "criterion", "sparsity")
    return {
        f"{setting.name}, {criterion} at {sparsity}: one-shot - PFT": found["osp", criterion, sparsity]
        - found["pft", criterion, sparsity]
        for criterion in setting.criteria
        for sparsity in setting.sparsities
    }
