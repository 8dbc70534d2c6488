"""PFT against one-shot pruning and against GMP, DPF, IMP and L0 over sparsity, at equal budget.

The paper's figures of test error against sparsity (MNIST, Fashion-MNIST, CIFAR-10), with the baselines it lacks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pacprune.paper import comparison, painting
from pacprune.paper.comparison import Contender, Contest
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.training.config import Config
from pacprune.types import Table

_PRUNING = Config(schedule="cosine", warmup=0.05)
_GREY = Setting(
    data="mnist",
    model="mlp",
    sparsities=(0.9, 0.95, 0.98, 0.99),
    seeds=5,
    dense=Config(epochs=12, lr=0.05, schedule="cosine"),
    pruning=replace(_PRUNING, epochs=12),
    options=Contest(
        criteria=("magnitude", "snip", "random"),
        rates=(0.02, 0.05, 0.1, 0.2),
        gated=((0.05, 100.0), (0.1, 100.0), (0.2, 100.0), (0.1, 500.0)),
        tuned_at=0.98,
    ),
)
_COLOUR = _GREY.changed(
    data="cifar10",
    model="resnet20",
    sparsities=(0.8, 0.9, 0.95, 0.98, 0.99),
    criteria=("magnitude", "snip", "grasp", "synflow", "random"),  # the paper's, and two more
    seeds=3,
    gated=((0.1, 100.0), (0.2, 100.0), (0.1, 500.0), (0.2, 500.0)),
    dense=Config(epochs=20, lr=0.1, schedule="cosine", warmup=0.05, augment=True, weight_decay=5e-4),
    pruning=replace(_PRUNING, epochs=16, augment=True, weight_decay=5e-4),
)

SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits",
            sparsities=(0.9, 0.98),
            criteria=("magnitude", "random"),
            seeds=2,
            dense=Config(epochs=4, lr=0.1, schedule="cosine"),
            pruning=replace(_PRUNING, epochs=3),
            rates=(0.05, 0.1),
            gated=((0.1, 100.0), (0.1, 500.0)),
        ),
    ),
    "reduced": (
        _GREY,
        _GREY.changed(data="fashion-mnist"),
        _GREY.changed(data="fashion-mnist", model="lenet5"),
        _COLOUR,
    ),
    "full": (
        _COLOUR.changed(
            sparsities=(0.9, 0.95, 0.98),
            criteria=("magnitude",),
            methods=("osp", "pft", "gmp"),
            rates=(0.2,),  # what was best for all three at the reduced scale
            gated=((0.2, 100.0),),
            dense=replace(_COLOUR.dense, epochs=120),
            pruning=replace(_COLOUR.pruning, epochs=180),
            contenders={"gmp": Contender("gmp", (("mask_share", 1 / 3),))},  # 60 + 120 epochs
        ),
    ),
}
"""Data sets, networks and grids: `smoke` shows that it runs, `full` has the paper's number of epochs."""


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error against sparsity, and the margins of PFT."""
    yield Figure(
        f"pft-vs-osp-{setting.name}",
        f"{painting.network(setting)}: test error after {setting.pruning.epochs} epochs that follow "
        f"{setting.dense.epochs} dense ones; mean and 95 % interval over {setting.seeds} seeds (weights, data order "
        "and masks are random), methods with a criterion from magnitude.",
        lambda: comparison.run(setting, job),
        paint,
        lambda rows: margins(setting, rows),
    )


def paint(canvas: Any, rows: Table) -> None:
    """Test error against sparsity, a line per method, those with a criterion from magnitude."""
    sparse = [row for row in rows if row["criterion"] == "magnitude"]
    _paint(canvas, rows, sparse, "method", painting.method_styles())


def paint_criteria(canvas: Any, rows: Table) -> None:
    """Test error against sparsity, a line per method and criterion, of methods that were started from several."""
    sparse = [row | {"kind": f"{row['method']} {row['criterion']}"} for row in rows if row["criterion"]]
    starts = {(row["method"], row["criterion"]) for row in sparse}
    styles = {
        f"{method} {criterion}": Style(f"{style.label}, {painting.named(criterion)}", colour, style.marker)
        for criterion, colour in painting.criterion_colours().items()
        for method, style in painting.method_styles().items()
        if sum(name == method for name, _ in starts) > 1
    }
    _paint(canvas, rows, sparse, "kind", styles)


def _paint(canvas: Any, rows: Table, sparse: Table, by: str, styles: Mapping[str, Style]) -> None:
    canvas.set_size_inches(7.6, 4.8)
    axes = canvas.subplots()
    sparse = [row for row in sparse if row["kept"]]  # others diverged
    dense = [row["test_error"] for row in rows if row["method"] == "dense" and row["epochs"]]
    painting.sparsity_lines(axes, sparse, y="test_error", by=by, styles=styles)
    if dense:
        painting.dense_line(axes, dense)
    start = "after dense training" if dense else "from initialisation"
    budget = f"{int(sparse[0]['epochs'])} epochs {start}"
    painting.heading(axes, f"{painting.subject(rows)}, {budget}; {painting.over_seeds(rows)}")
    painting.error_axis(axes, [*means(sparse, "test_error", by, "sparsity").values(), *dense])
    painting.label_ends(axes)


def margins(setting: Setting[Contest], rows: Table) -> dict[str, float]:
    """How far PFT is below one-shot pruning by the same criterion, per criterion and sparsity."""
    errors = means(rows, "test_error", "method", "criterion", "sparsity")
    return {
        f"{setting.name}, {criterion} at {sparsity}: one-shot - PFT": errors["osp", criterion, sparsity]
        - errors["pft", criterion, sparsity]
        for criterion in setting.options.criteria
        for sparsity in setting.sparsities
    }
