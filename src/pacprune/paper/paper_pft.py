"""The paper's PFT as written, against one-shot pruning by two protocols that are fair in different ways.

By the paper's protocol one-shot pruning gets the same fine-tuning as PFT has after its mask stage. With equal epochs it
gets the epochs of the mask stage as well. Either has a row as the paper says it, with one learning rate for everything,
and one with learning rates that were chosen on validation data from grids of the same size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pacprune import data
from pacprune.paper import comparison, painting
from pacprune.paper.comparison import Contender, Contest, Point, report_task, validation_task
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, means
from pacprune.runs import plots
from pacprune.training.config import GATE_RATIO, Config
from pacprune.types import Table

SAME, EQUAL, BOTH = "same fine-tuning", "equal epochs", "both"
"""What one-shot pruning gets: the paper's protocol, or as many epochs in all; PFT is the same in both."""


class Variant(NamedTuple):
    """One way of pruning.

    Args:
        method: The key of METHODS.
        protocol: SAME, EQUAL or BOTH.
        mapping: How the gates of PFT become keep probabilities.
        noise: Whether the masks of PFT are random, 1 or 0.
        tuned: Whether learning rates are chosen on validation data; else all have the paper's.
    """

    method: str
    protocol: str
    mapping: str = ""
    noise: float | None = None
    tuned: bool = False

    @property
    def label(self) -> str:
        """Its name in the legend; whether it is tuned says the panel."""
        if self.method == "osp":
            return f"one-shot, {self.protocol}"
        return f"PFT, {self.mapping}" + ("" if self.noise else ", no noise")


VARIANTS: dict[str, Variant] = {
    "osp": Variant("osp", SAME),
    "osp-equal": Variant("osp", EQUAL),
    "pft": Variant("pft-paper", BOTH, "clamp", 1.0),
    "osp-tuned": Variant("osp", SAME, tuned=True),
    "osp-equal-tuned": Variant("osp", EQUAL, tuned=True),
    "pft-tuned": Variant("pft-paper", BOTH, "clamp", 1.0, tuned=True),
    "pft-sigmoid-tuned": Variant("pft-paper", BOTH, "sigmoid", 1.0, tuned=True),
    "pft-still-tuned": Variant("pft-paper", BOTH, "clamp", 0.0, tuned=True),
}
"""What is compared; those without tuning are the paper's words."""
COLUMNS = (
    *("dataset", "model", "method", "protocol", "mapping", "noise", "tuned", "criterion", "sparsity", "seed"),
    *("lr", "gate_lr", "mask_epochs", "tune_epochs", "kept", "total", "test_error"),
)
RATIOS = {"clamp": (1.0, 10.0, 100.0), "sigmoid": (1.0, 100.0, 10_000.0)}
"""gate_lr / lr that are tried. The slope of a sigmoid at a keep_prob of 1e-4 is 1e-4: its gates need larger steps."""


def _setting(
    name: str,
    model: str,
    dense: Config,
    mask_epochs: int,
    rates: tuple[float, ...],
    gated: tuple[float, ...],
    **rest: Any,
) -> Setting[Contest]:
    """The fine-tuning repeats the dense training, and the mask stage has its learning rate and schedule.

    Args:
        name: The data set.
        model: The network.
        dense: Stage 1 of the paper.
        mask_epochs: Epochs of its stage 2.
        rates: The lr that tuned one-shot pruning tries.
        gated: The lr that tuned PFT tries, with every ratio.
        **rest: Other fields of the setting and of its options.
    """
    setting = Setting(
        data=name,
        model=model,
        sparsities=(0.9, 0.95, 0.98, 0.99),
        seeds=5,
        dense=dense,
        pruning=replace(dense, epochs=mask_epochs + dense.epochs),
        options=Contest(
            criteria=("magnitude", "snip", "random"),
            methods=tuple(VARIANTS),
            tuned_at=0.98,
            rates=rates,
            gated=tuple((lr, 1.0) for lr in rates),
            grids={key: _grid(variant, dense.lr, rates, gated) for key, variant in VARIANTS.items()},
            contenders={key: _contender(variant, dense.epochs, mask_epochs) for key, variant in VARIANTS.items()},
        ),
    )
    return setting.changed(**rest)


def _grid(variant: Variant, lr: float, rates: tuple[float, ...], gated: tuple[float, ...]) -> tuple[Point, ...]:
    """The paper's point alone, or the points of a variant that is tuned; one-shot pruning has no gates."""
    if not variant.tuned:
        return ((lr, 1.0),)
    if variant.method == "osp":
        return tuple((rate, 1.0) for rate in rates)
    return tuple((rate, ratio) for rate in gated for ratio in RATIOS[variant.mapping])


def _contender(variant: Variant, tune_epochs: int, mask_epochs: int) -> Contender:
    if variant.protocol == SAME:
        return Contender("osp", config=(("epochs", tune_epochs),))
    if variant.protocol == EQUAL:
        return Contender("osp")
    share = mask_epochs / (mask_epochs + tune_epochs)
    options = {"recipe": "paper", "mask_share": share, "mapping": variant.mapping, "noise": variant.noise}
    return Contender("pft", tuple(options.items()))


_GREY: dict[str, Any] = {"rates": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "gated": (0.01, 0.1)}
_COLOUR: dict[str, Any] = {"rates": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), "gated": (0.1, 0.2)}
_STEP = Config(lr=0.1, schedule="step", augment=True)
_SHORT: dict[str, Any] = {"seeds": 3, "sparsities": (0.9, 0.98)}

SETTINGS: dict[str, tuple[Setting[Contest], ...]] = {
    "smoke": (
        _setting(
            *("digits", "mlp", Config(epochs=2, lr=0.1), 1),
            rates=(0.05, 0.1, 0.2),
            gated=(0.1,),
            seeds=2,
            sparsities=(0.9,),
            tuned_at=0.9,
            criteria=("magnitude", "random"),
        ),
    ),
    "reduced": (
        _setting("mnist", "mlp", Config(epochs=6, lr=0.01), 6, **_GREY, **_SHORT),
        _setting("fashion-mnist", "lenet5", Config(epochs=14, lr=0.01), 6, **_GREY, **_SHORT),
        _setting("fashion-mnist", "mlp", Config(epochs=14, lr=0.01), 6, **_GREY, **_SHORT),
        _setting("cifar10", "resnet20", replace(_STEP, epochs=24), 12, **_COLOUR, **_SHORT),
    ),
    "paper": (
        _setting("mnist", "mlp", Config(epochs=30, lr=0.01), 30, **_GREY),
        _setting("fashion-mnist", "lenet5", Config(epochs=70, lr=0.01), 30, **_GREY),
        _setting("fashion-mnist", "mlp", Config(epochs=70, lr=0.01), 30, **_GREY),
        _setting("cifar10", "resnet20", replace(_STEP, epochs=120), 60, **_COLOUR),
    ),
}
"""Data sets and networks: `paper` has the paper's constants, `reduced` a fifth of its epochs and fewer sparsities."""


def lasting(setting: Setting[Contest], dense_epochs: int, mask_epochs: int, **changes: Any) -> Setting[Contest]:
    """The setting with other numbers of epochs; the fine-tuning still repeats the dense training."""
    contenders = {
        name: _contender(VARIANTS[name], dense_epochs, mask_epochs) if name in VARIANTS else contender
        for name, contender in setting.options.contenders.items()
    }
    return setting.changed(
        dense=replace(setting.dense, epochs=dense_epochs),
        pruning=replace(setting.pruning, epochs=mask_epochs + dense_epochs),
        contenders=contenders,
        **changes,
    )


ONE_SHOT, EQUAL_EPOCHS, WRITTEN, OURS = "osp", "osp-equal", "pft-paper", "pft-coupled"
"""Contenders of figures that take PFT as it is written: one-shot pruning by both protocols, PFT, and ours beside."""


def as_written(setting: Setting[Contest], *methods: str, **changes: Any) -> Setting[Contest]:
    """The setting with the paper's learning rates alone, nothing being tuned; each change is one of a field.

    The recipe "coupled" beside it has as many epochs as the paper's PFT, and a schedule and rates of its own.
    """
    lr, contenders = setting.dense.lr, setting.options.contenders
    coupled = Contender(OURS, config=(("schedule", "cosine"), ("warmup", 0.05)))
    chosen = {
        WRITTEN: contenders["pft"],
        OURS: coupled,
        **{name: contenders[name] for name in (ONE_SHOT, EQUAL_EPOCHS)},
    }
    return setting.changed(
        methods=methods,
        contenders=chosen,
        grids=dict.fromkeys((ONE_SHOT, EQUAL_EPOCHS, WRITTEN), ((lr, 1.0),)),
        rates=(0.1,),
        gated=((0.1, GATE_RATIO),),
    ).changed(**changes)


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error against sparsity, and how far the paper's PFT is below one-shot pruning by both protocols."""
    mask_epochs = setting.pruning.epochs - setting.dense.epochs
    yield Figure(
        f"paper-pft-{setting.name}",
        f"{painting.network(setting)}: test error of the paper's PFT ({mask_epochs} epochs of masks and "
        f"{setting.dense.epochs} of fine-tuning) and of one-shot pruning with the same fine-tuning, or with as many "
        f"epochs in all; mean and 95 % interval over {setting.seeds} seeds (weights, data order and masks are random).",
        lambda: run(setting, job),
        paint,
        lambda rows: margins(setting, rows),
    )


def run(setting: Setting[Contest], job: Job) -> Table:
    """One row per network, in COLUMNS, the dense ones first; what an interrupted run has finished is kept."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    points = comparison.tune(setting, lambda: validation_task(setting, split, job), job)
    rows = comparison.contest(setting, points, report_task(setting, split, job), job)
    return [{name: content[name] for name in COLUMNS} for content in (_row(setting, row) for row in rows)]


def _row(setting: Setting[Contest], row: Mapping[str, Any]) -> dict[str, Any]:
    """What the comparison says of a network, and which variant it is."""
    subject = {"dataset": setting.data, "model": setting.model, "mask_epochs": 0, "gate_lr": None}
    if row["method"] == "dense":
        nothing = {"protocol": "", "mapping": "", "noise": None, "tuned": 0}
        return {**row, **subject, **nothing, "tune_epochs": setting.dense.epochs}
    variant, mask_epochs = VARIANTS[row["method"]], setting.pruning.epochs - setting.dense.epochs
    stages = {
        SAME: {"tune_epochs": setting.dense.epochs},
        EQUAL: {"tune_epochs": setting.pruning.epochs},
        BOTH: {
            "mask_epochs": mask_epochs,
            "tune_epochs": setting.dense.epochs,
            "gate_lr": row["lr"] * row["ratio"],
        },
    }
    return {**row, **subject, **variant._asdict(), "tuned": int(variant.tuned), **stages[variant.protocol]}


_KEY = ("method", "protocol", "mapping", "noise", "tuned")


def _labelled(rows: Table) -> Table:
    """The rows of pruned networks as the CSV has them, with the label of their variant."""
    labels = {tuple(value or None for value in variant): variant.label for variant in VARIANTS.values()}
    return [
        row | {"label": labels[tuple(row[name] or None for name in _KEY)]} for row in rows if row["method"] != "dense"
    ]


def paint(canvas: Any, rows: Table) -> None:
    """A panel per criterion (across) and with or without tuning (down)."""
    labels = list(dict.fromkeys(variant.label for variant in VARIANTS.values()))
    colours = ("black", plots.GREY, painting.RED, plots.BLUE, plots.GREEN)
    looks = zip(labels, colours, "o^DsX", strict=True)
    styles = {label: Style(label, colour, marker) for label, colour, marker in looks}
    panels = groups(_labelled(rows), "tuned", "criterion")
    across = len({criterion for _, criterion in panels})
    canvas.set_size_inches(1 + 3.4 * across, 6.5)
    grid = canvas.subplots(2, across, sharex=True, sharey="col", squeeze=False).flatten()
    for axes, ((tuned, criterion), part) in zip(grid, sorted(panels.items()), strict=True):
        painting.sparsity_lines(axes, [row for row in part if row["kept"]], y="test_error", by="label", styles=styles)
        painting.dense_line(axes, [row["test_error"] for row in rows if row["method"] == "dense"])
        painting.heading(axes, f"{painting.named(criterion)}, {'tuned' if tuned else 'as written'}")
        column = [row for row in rows if row["kept"] and (row["criterion"] or criterion) == criterion]
        painting.error_axis(axes, [row["test_error"] for row in column])
        if not tuned:
            axes.set_xlabel("")
    canvas.legend(*grid[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    painting.canvas_heading(canvas, f"{painting.subject(rows)}; {painting.over_seeds(rows)}")


def margins(setting: Setting[Contest], rows: Table) -> dict[str, float]:
    """How far the paper's PFT is below one-shot pruning, per protocol, criterion and sparsity, as written and tuned."""
    errors = means(_labelled(rows), "test_error", "label", "tuned", "criterion", "sparsity")
    pft, ways = VARIANTS["pft"].label, ("as written", "tuned")
    return {
        f"{setting.name}, {criterion} at {sparsity}, {ways[tuned]}, {protocol}: one-shot - PFT": (
            errors[f"one-shot, {protocol}", tuned, criterion, sparsity] - errors[pft, tuned, criterion, sparsity]
        )
        for criterion in setting.options.criteria
        for sparsity in setting.sparsities
        for tuned in (0, 1)
        for protocol in (SAME, EQUAL)
    }
