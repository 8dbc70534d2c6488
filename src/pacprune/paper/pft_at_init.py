"""PFT at initialisation: masks are learned on weights that were never trained, and beside it one-shot pruning there.

The paper's figure of MNIST, Fashion-MNIST (MLP 1000x3) and CIFAR-10 (ResNet20): the dense training is left out, and all
else is as with it. One-shot pruning has the same fine-tuning, or as many epochs in all as PFT.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pacprune.paper import comparison, painting, paper_pft
from pacprune.paper.comparison import Contest
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.paper_pft import EQUAL_EPOCHS, ONE_SHOT, OURS, WRITTEN
from pacprune.paper.statistics import groups, means
from pacprune.runs import plots
from pacprune.types import Table

STYLES = {
    ONE_SHOT: Style("one-shot, same fine-tuning", "black", "o"),
    EQUAL_EPOCHS: Style("one-shot, equal epochs", plots.GREY, "^"),
    WRITTEN: Style("PFT, the paper's recipe", painting.RED, "D"),
    OURS: Style('PFT, recipe "coupled"', "#A0522D", "x"),
}
"""What is compared, all from every criterion but the recipe "coupled", which starts from magnitude."""


def _at_init(setting: Setting[Contest], **changes: Any) -> Setting[Contest]:
    """Without the dense training, whose epochs the fine-tuning keeps."""
    written = paper_pft.as_written(setting, *STYLES)
    return written.changed(dense=replace(setting.dense, epochs=0), **changes)


_MODELS = ("mnist-mlp", "fashion-mnist-mlp", "cifar10-resnet20")
_PAPER = {setting.name: setting for setting in paper_pft.SETTINGS["paper"]}
_SHORT = {"mnist-mlp": (6, 6), "fashion-mnist-mlp": (14, 6), "cifar10-resnet20": (6, 3)}
"""Epochs of the fine-tuning and of the mask stage at the scale `reduced`."""
SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (
        _at_init(
            paper_pft.lasting(paper_pft.SETTINGS["smoke"][0], 4, 2),
            sparsities=(0.9, 0.98),
            criteria=("magnitude", "snip", "random"),
        ),
    ),
    "reduced": tuple(
        _at_init(paper_pft.lasting(_PAPER[name], *_SHORT[name]), sparsities=(0.9, 0.98), seeds=2) for name in _MODELS
    ),
    "paper": tuple(_at_init(_PAPER[name], seeds=3) for name in _MODELS),
}
"""`paper` has the paper's data, networks and epochs; `reduced` a fifth of them, on CIFAR-10 a twentieth."""


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error against sparsity, and how far PFT is below one-shot pruning from the same criterion."""
    tuning = dict(setting.options.contender(ONE_SHOT).config)["epochs"]
    yield Figure(
        f"pft-at-init-{setting.name}",
        f"{painting.network(setting)}: test error without dense training. One-shot masks are those of "
        f"initialisation; PFT learns its mask in {setting.pruning.epochs - tuning} epochs, with the weights. Both have "
        f"{tuning} epochs of fine-tuning; one-shot pruning also as many as PFT in all. Mean and 95 % interval over "
        f"{setting.seeds} seeds (weights, data order and masks are random).",
        lambda: comparison.run(setting, job),
        paint,
        lambda rows: margins(setting, rows),
    )


def margins(setting: Setting[Contest], rows: Table) -> dict[str, float]:
    """How far the paper's PFT is below one-shot pruning by the same criterion, by both protocols."""
    errors = means(rows, "test_error", "method", "criterion", "sparsity")
    return {
        f"{setting.name}, {criterion} at {sparsity}, {STYLES[name].label} - PFT": errors[name, criterion, sparsity]
        - errors[WRITTEN, criterion, sparsity]
        for criterion in setting.options.criteria
        for sparsity in setting.sparsities
        for name in (ONE_SHOT, EQUAL_EPOCHS)
    }


def paint(canvas: Any, rows: Table) -> None:
    """A panel per criterion: test error against sparsity."""
    # The first published rows are without the paper's recipe, and one-shot pruning has as many epochs as PFT there.
    names = {} if any(row["method"] == WRITTEN for row in rows) else {ONE_SHOT: EQUAL_EPOCHS}
    table = [row | {"method": names.get(row["method"], row["method"])} for row in rows]
    sparse = [row for row in table if row["criterion"] and row["kept"]]  # others are dense, or diverged
    panels = groups(sparse, "criterion")

    def levels(part: Table) -> list[float]:
        return list(means(part, "test_error", "method", "sparsity").values())

    # One that fails has an axis of its own, the others share theirs.
    least = min(min(levels(part)) for part in panels.values())
    alike = [error for part in panels.values() if max(levels(part)) <= painting.FAR * least for error in levels(part)]
    canvas.set_size_inches(1 + 3.6 * len(panels), 4.4)
    grid = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((criterion,), part) in zip(grid, panels.items(), strict=True):
        painting.sparsity_lines(axes, part, y="test_error", by="method", styles=STYLES)
        errors = levels(part)
        painting.error_axis(axes, alike if max(errors) <= max(alike, default=0) else errors)
        painting.heading(axes, f"from {painting.named(criterion)}")
    for axes in grid[1:]:
        axes.set_ylabel("")
    handles = {label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    painting.canvas_heading(canvas, f"{painting.subject(rows)}, from initialisation; {painting.over_seeds(rows)}")
