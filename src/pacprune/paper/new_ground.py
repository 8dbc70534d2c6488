"""Pruning methods on networks, optimisers and data that no default was tuned on.

Every network is trained with one optimiser, weight decay and, where it is usual, clipping: dense, and by all methods.
A method tries as many learning rates as any other, at the middle sparsity with one seed, on a tenth of the training
data. `tune` writes what was best to points.json, with the setting that it holds for. `report` refuses to run without
that file, or when it was written for another setting; test data are read by its networks alone.

Both phases keep their rows as they are made. So each can be run by itself, for some methods only, and goes on where it
was interrupted, on another machine if the folder comes along:

    job = Job("reduced", folder, 0, torch.device("cuda"), data_dir, progress, only="cifar10-vit")
    for setting in job.select(new_ground.SETTINGS[job.scale]):
        setting = new_ground.prepared(setting, job, methods=("pft", "gmp"))
        new_ground.tune(setting, job)
        new_ground.report(setting, job)
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pacprune import data, models
from pacprune.data.splits import Split
from pacprune.files import write_atomically
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.paper import characters, comparison, painting
from pacprune.paper.characters import Text
from pacprune.paper.comparison import Contest, Point, Task, same_grid
from pacprune.paper.frame import Figure, Job, Setting, Settings, digest, on_device, read
from pacprune.paper.statistics import LEVEL, MARGIN, SUBJECT, cells, groups, highest, means, share
from pacprune.training.config import Config
from pacprune.types import Table

POINTS = "points.json"
"""The file that says with which learning rate every method is reported."""
COLUMNS = (
    "dataset",
    "model",
    "label",
    "method",
    "criterion",
    "sparsity",
    "seed",
    "lr",
    "epochs",
    "kept",
    "total",
    *("measure", "value"),
)
COMPARED = tuple(name for name in pruning_methods() if not name.startswith("pft-"))
"""All methods; of PFT the default alone."""
FORERUNNERS = ("osp", "feather")
"""What PFT contains: a single step of it, and itself without learned offsets."""


@dataclass(frozen=True, kw_only=True)
class Images(Contest):
    """A contest on images.

    Args:
        examples: Training images that are used, the first of a random order; None takes all.
        network: What the network has other than by default.
    """

    examples: int | None = None
    network: Mapping[str, Any] = field(default_factory=dict)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "vit": lambda shape, classes, **sizes: models.vit(shape[0], shape[-1], classes, **sizes),
    "convnext": lambda shape, classes, **sizes: models.convnext(shape[0], classes, **sizes),
    "wide-resnet": lambda shape, classes, **sizes: models.wide_resnet(shape[0], classes, **sizes),
    "resnet20": lambda shape, classes, **sizes: models.resnet20(shape[0], classes, **sizes),
    "lstm": lambda shape, classes, **sizes: models.lstm(shape[0] * shape[-1], classes, **sizes),
    "mlp": lambda shape, classes, **sizes: models.mlp(math.prod(shape), classes, **sizes),
    "lenet5": lambda shape, classes, **sizes: models.lenet5(shape[0], shape[-1], classes, **sizes),
    "vgg": lambda shape, classes, **sizes: models.vgg(shape[0], shape[-1], classes, **sizes),
    "mixer": lambda shape, classes, **sizes: models.mixer(shape[0], shape[-1], classes, **sizes),
}
"""(shape of an image, number of classes, seed=, sizes) -> network."""
_CONVOLUTIONS = ("convnext", "resnet20", "vgg", "wide-resnet")


# --- The settings.


def _setting(
    data: str,
    model: str,
    dense: Config,
    *,
    epochs: int,
    sparsities: tuple[float, ...],
    rates: tuple[float, ...],
    label: str = "",
    options: Callable[..., Contest] = Images,
    **sizes: Any,
) -> Setting[Any]:
    """All methods after the same dense networks, trained as these, with rates from one grid."""
    dense = replace(dense, schedule="cosine", warmup=0.05)
    grid = same_grid(*rates)
    return Setting(
        data=data,
        model=model,
        label=label,
        seeds=3,
        sparsities=sparsities,
        dense=dense,
        pruning=replace(dense, epochs=epochs),
        options=options(methods=COMPARED, tuned_at=sparsities[1], **grid, **sizes),
    )


_ADAMW = Config(epochs=12, lr=1e-3, optimizer="adamw", weight_decay=0.05)
_SGD = Config(epochs=12, lr=0.1, weight_decay=5e-4)
_ADAM = Config(epochs=8, lr=1e-3, optimizer="adam", weight_decay=1e-5)
_IMAGES = 25_600
"""200 whole batches; with as many steps, half of CIFAR-10 leaves methods twice as many epochs to be cut into."""

_REDUCED: tuple[Setting[Any], ...] = (
    _setting(
        "cifar10",
        "vit",
        replace(_ADAMW, augment=True, clip=1.0),
        epochs=10,
        sparsities=(0.9, 0.95, 0.98),
        rates=(3e-4, 1e-3, 3e-3),
        examples=_IMAGES,
    ),
    _setting(
        "cifar10",
        "convnext",
        replace(_ADAMW, augment=True),
        epochs=10,
        sparsities=(0.9, 0.95, 0.98),
        rates=(3e-4, 1e-3, 3e-3),
        examples=_IMAGES,
    ),
    _setting(
        "cifar10",
        "wide-resnet",
        replace(_SGD, augment=True),
        epochs=10,
        sparsities=(0.95, 0.98, 0.99),
        rates=(0.03, 0.1, 0.3),
        examples=_IMAGES,
    ),
    _setting(
        "cifar10",
        "resnet20",
        replace(_SGD, augment=True),
        epochs=10,
        sparsities=(0.95, 0.98, 0.99),
        rates=(0.03, 0.1, 0.3),
        examples=_IMAGES,
    ),
    _setting(
        "tinyshakespeare",
        "gpt",
        replace(_ADAMW, weight_decay=0.1, clip=1.0, batch_size=32),
        epochs=8,
        sparsities=(0.8, 0.9, 0.95),
        rates=(3e-4, 1e-3, 3e-3),
        options=Text,
        stride=128,
        context=128,
        network={"width": 128, "depth": 4, "heads": 4, "dropout": 0.1},
    ),
    _setting(
        "fashion-mnist",
        "lstm",
        replace(_ADAM, lr=3e-3, clip=1.0),
        epochs=10,
        sparsities=(0.9, 0.95, 0.98),
        rates=(1e-3, 3e-3, 1e-2),
        examples=_IMAGES,
    ),
    _setting(
        "fashion-mnist",
        "mlp",
        _ADAM,
        epochs=10,
        sparsities=(0.95, 0.98, 0.99),
        rates=(3e-4, 1e-3, 3e-3),
        examples=_IMAGES,
        network={"hidden": (300, 100)},
    ),
    _setting(
        "fashion-mnist",
        "lenet5",
        replace(_SGD, epochs=8),
        epochs=10,
        sparsities=(0.95, 0.98, 0.99),
        rates=(0.02, 0.06, 0.2),
        examples=_IMAGES,
    ),
    # Chosen after all defaults had been frozen; run once.
    _setting(
        "cifar10",
        "vgg",
        replace(_SGD, augment=True),
        epochs=10,
        sparsities=(0.95, 0.98, 0.99),
        rates=(0.03, 0.1, 0.3),
        label="untouched",
        examples=_IMAGES,
    ),
    _setting(
        "cifar10",
        "mixer",
        replace(_ADAMW, augment=True, clip=1.0),
        epochs=10,
        sparsities=(0.9, 0.95, 0.98),
        rates=(3e-4, 1e-3, 3e-3),
        label="untouched",
        examples=_IMAGES,
    ),
)


def _smoke(setting: Setting[Any], data: str, **changes: Any) -> Setting[Any]:
    """A setting that runs in seconds."""
    dense, pruning = (replace(stage, epochs=3) for stage in (setting.dense, setting.pruning))
    sizes = {"seeds": 2, "sparsities": (0.8, 0.9, 0.95), "tuned_at": 0.9}
    grid = same_grid(*setting.options.rates[1:])
    return setting.changed(data=data, dense=dense, pruning=pruning, **sizes, **grid, **changes)


_BY_MODEL = {setting.model: setting for setting in _REDUCED}
SETTINGS: dict[str, tuple[Setting[Any], ...]] = {
    "smoke": (
        _smoke(
            _BY_MODEL["vit"],
            "digits",
            examples=384,
            network={"patch": 4, "width": 16, "depth": 1, "heads": 2},
        ),
        _smoke(
            _BY_MODEL["gpt"],
            "babble",
            methods=("osp", "pft", "gmp", "feather"),
            stride=64,
            context=16,
            network={"width": 16, "depth": 1, "heads": 2, "dropout": 0.0},
        ),
        _smoke(_BY_MODEL["mlp"], "digits", examples=384, network={"hidden": (32,)}),
    ),
    "reduced": _REDUCED,
    "full": tuple(
        setting.changed(
            dense=replace(setting.dense, epochs=5 * setting.dense.epochs),
            pruning=replace(setting.pruning, epochs=5 * setting.pruning.epochs),
            seeds=5,
            **({} if isinstance(setting.options, Text) else {"examples": None}),
        )
        for setting in _REDUCED
    ),
}
"""`smoke` shows that it runs, `full` has all data, five times the epochs and five seeds."""


# --- What is computed.


def prepared(setting: Setting[Any], job: Job, methods: Sequence[str] = ()) -> Setting[Any]:
    """The setting by the means of the job's device; with `methods`, with these alone.

    On a GPU a step is a CUDA graph, and convolutions are compiled. The others would take longer to compile than to
    train.
    """
    setting = on_device(setting, job.device)
    if job.device.type == "cuda":
        execution = "compiled" if setting.model in _CONVOLUTIONS else "graph"
        dense, pruning = (replace(stage, execution=execution) for stage in (setting.dense, setting.pruning))
        setting = replace(setting, dense=dense, pruning=pruning)
    return setting.changed(methods=tuple(methods)) if methods else setting


def tune(setting: Setting[Any], job: Job) -> None:
    """Chooses the learning rates of the setting's methods on validation data, and writes them to points.json."""
    path, terms = job.out / POINTS, _terms(setting, job)
    records = _records(path)
    record = records.get(setting.name, {"terms": terms, "setting": _readable(setting), "points": []})
    _check_terms(path, setting, record["terms"], terms)
    points = comparison.tune(setting, lambda: _tasks(setting, job)[0], job)
    kept = [entry for entry in record["points"] if (entry["method"], entry["criterion"]) not in points]
    chosen = [
        {"method": method, "criterion": criterion, "lr": lr, "ratio": ratio}
        for (method, criterion), (lr, ratio) in points.items()
    ]
    records[setting.name] = record | {"points": kept + chosen}
    write_atomically(path, (json.dumps(records, indent=1) + "\n").encode())


def report(setting: Setting[Any], job: Job) -> Table:
    """One row per reported network, in COLUMNS, dense ones first, with the learning rates of points.json.

    Args:
        setting: Whose networks are reported.
        job: Where files lie and what device computes.

    Returns:
        The rows.

    Raises:
        ValueError: If points.json is missing, was written on other terms, or lacks a method.
    """
    points = frozen_points(setting, job)
    task = _tasks(setting, job)[1]
    common = {"dataset": setting.data, "model": setting.model, "label": setting.label, "measure": task.column}
    rows = comparison.contest(setting, points, task, job)
    return [{name: (common | row | {"value": row[task.column]})[name] for name in COLUMNS} for row in rows]


def frozen_points(setting: Setting[Any], job: Job) -> dict[tuple[str, str], Point]:
    """What points.json says of the setting's methods."""
    path = job.out / POINTS
    record = _records(path).get(setting.name)
    if record is None:
        raise ValueError(f"{path} has no learning rates for {setting.name}; run `tune` before `report`")
    _check_terms(path, setting, record["terms"], _terms(setting, job))
    points = {(entry["method"], entry["criterion"]): (entry["lr"], entry["ratio"]) for entry in record["points"]}
    missing = [method for method, criterion in setting.options.pairs() if (method, criterion) not in points]
    if missing:
        raise ValueError(f"{path} has no learning rates of {', '.join(missing)} for {setting.name}; tune them first")
    return points


def trials(setting: Setting[Any], job: Job) -> Table:
    """One row per network that was tried in tuning; none where there was one rate."""
    path = job.out / f"{setting.name}-tuning.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    common = {"dataset": setting.data, "model": setting.model, "label": setting.label}
    columns = ("method", "criterion", "sparsity", "seed", "lr")
    return [
        common | {name: row[name] for name in columns} | {"measure": measure, "value": row[measure]}
        for row in rows
        for measure in row
        if measure.startswith("validation")
    ]


def _records(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _terms(setting: Setting[Any], job: Job) -> str:
    """Stands for all that is frozen: the whole setting, whatever methods are asked for at a time."""
    return digest(setting.changed(methods=()), job.seed)


def _check_terms(path: Path, setting: Setting[Any], before: str, terms: str) -> None:
    if before != terms:
        raise ValueError(
            f"{path} froze {setting.name} on the terms {before}, but those of now are {terms}; go back to those terms, "
            "or begin in another --out"
        )


def _readable(setting: Setting[Any]) -> dict[str, Any]:
    """What a reader of points.json wants to know of a setting."""
    options = asdict(setting.options)
    del options["methods"], options["gated"]
    return {
        "seeds": setting.seeds,
        "sparsities": setting.sparsities,
        "dense": setting.dense.changes(),
        "pruning": setting.pruning.changes() | {"lr": "of the grid"},
        **options,
    }


def _tasks(setting: Setting[Any], job: Job) -> tuple[Task, Task]:
    """What learning rates are chosen on, and what is reported."""
    tuning, final = (_text_tasks if isinstance(setting.options, Text) else _image_tasks)(setting, job)
    return tuning._replace(name="tuning", file=f"{setting.name}-tuning"), final._replace(
        name="dense", file=setting.name
    )


def _image_tasks(setting: Setting[Images], job: Job) -> tuple[Task, Task]:
    split, options = _split(setting.data, job.data_dir), setting.options
    if options.examples is not None:
        split = replace(split, train=split.train.subset(torch.arange(options.examples)))
    shape = tuple(split.train.x.shape[1:])

    def build(seed: int) -> nn.Module:
        return NETWORKS[setting.model](shape, split.classes, seed=seed, **options.network)

    tuning, final = (make(setting, split, job) for make in (comparison.validation_task, comparison.report_task))
    return tuning._replace(build=build), final._replace(build=build)


def _text_tasks(setting: Setting[Text], job: Job) -> tuple[Task, Task]:
    """A network that diverged counts as one that guesses."""
    guess = math.log(characters.encoded(setting, job)[1])
    tuning, final = characters.tasks(setting, job)
    return tuning._replace(worst=guess), final._replace(worst=guess)


@functools.lru_cache(maxsize=1)
def _split(name: str, data_dir: Path | None) -> Split:
    """Read once for the settings in a row that share it: CIFAR-10 takes longer to read than a method to train."""
    return data.load(name, seed=0, data_dir=data_dir)


# --- What is drawn.


def figures_of(
    name: str, settings: Mapping[str, Settings], about: str
) -> Callable[[Setting[Any], Job], Iterator[Figure]]:
    """The figures of a recipe with these settings: one per setting, and in the end those of all."""

    def figures(setting: Setting[Any], job: Job) -> Iterator[Figure]:
        setting = prepared(setting, job)
        chosen = [prepared(choice, job) for choice in job.select(settings[job.scale])]
        yield Figure(
            f"{name}-{setting.name}",
            f"{painting.network(setting)}: {about} {setting.pruning.epochs} epochs after {setting.dense.epochs} "
            f"dense ones; mean over {setting.seeds} seeds (weights, data order and masks are random).",
            lambda: _rows(setting, job),
            paint,
        )
        if setting.name == chosen[-1].name:
            tables = [read(job.out / f"{name}-{choice.name}.csv") for choice in chosen]
            yield from overview(name, [row for table in tables for row in table])
            tried = [row for choice in chosen for row in trials(choice, job)]
            if tried:
                yield _tuning_figure(name, tried)

    return figures


def _rows(setting: Setting[Any], job: Job) -> Table:
    tune(setting, job)
    return report(setting, job)


def overview(name: str, rows: Table) -> Iterator[Figure]:
    """The figures of all networks, from the rows of `report` of every setting."""
    seeds = painting.seed_count(rows)
    yield Figure(
        name,
        "Test error (loss, where the network predicts characters) against sparsity, a panel per network and a line per "
        f"method; mean over {seeds} seeds. Every method has the same number of epochs and of learning rates tried.",
        lambda: rows,
        paint,
    )
    yield Figure(
        f"{name}-cells",
        "How far PFT is below each method, in points: percent of the test examples, or 100 times the loss in nats. "
        f"Blue: below by more than the paired 95 % interval over {seeds} seeds. Orange: above by more than the "
        f"interval plus {MARGIN:g} points. Bold: apart at {100 * LEVEL:g} % also when Holm corrects for all cells.",
        lambda: cells(rows),
        paint_cells,
        summary,
    )


def _tuning_figure(name: str, rows: Table) -> Figure:
    return Figure(
        f"{name}-tuning",
        "Validation error (loss, where the network predicts characters) against the learning rate, one network each; "
        "each method is reported with its best rate.",
        lambda: rows,
        paint_tuning,
    )


def summary(table: Table) -> dict[str, float]:
    """How often PFT is worse than another method, and how often it is better at the two highest sparsities."""
    worse = [row for row in table if row["verdict"] == "worse"]
    numbers = {
        "cells": float(len(table)),
        f"cells where PFT is worse by more than interval + {MARGIN:g} points": float(len(worse)),
        "of these, after Holm's correction": float(sum(row["holm"] <= LEVEL for row in worse)),
        "the most that another method is ahead on average, points": max(0.0, *(row["difference"] for row in table)),
    }
    high = highest(table)
    rivals = [row for row in high if row["method"] not in FORERUNNERS]
    if rivals:
        numbers["two highest sparsities: share of cells below all but one-shot and Feather"] = share(rivals, "better")
    for (method,), part in groups(high, "method").items():
        numbers[f"two highest sparsities: share of cells below {METHODS[method].label}"] = share(part, "better")
    return numbers


_NEAR = 2.0
"""How many times the least number at a place is still within a panel."""


def _title(subject: Sequence[Any]) -> str:
    """A network, its data and what is special, in few words."""
    dataset, model, label = subject
    return painting.named(*(part for part in (model, dataset, label) if part))


def _short(method: str) -> str:
    """The label of a method without what follows a comma."""
    return METHODS[method].label.partition(",")[0]


def paint(canvas: Any, rows: Table) -> None:
    """The number against sparsity, a panel per network and a line per method."""
    placed = [row | {"place": painting.sparsity_place(row["sparsity"])} for row in rows]
    ticks = {row["place"]: f"{100 * row['sparsity']:g}" for row in placed}

    def set_ticks(axes: Any, places: list[float]) -> None:
        axes.set_xticks(places, [ticks[place] for place in places])

    _panels(canvas, placed, "place", "weights pruned, %", set_ticks)


def paint_tuning(canvas: Any, rows: Table) -> None:
    """The number against the learning rate, a panel per network and a line per method."""

    def set_ticks(axes: Any, places: list[float]) -> None:
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()

    _panels(canvas, rows, "lr", "learning rate", set_ticks)


def _panels(canvas: Any, rows: Table, x: str, name: str, set_ticks: Callable[[Any, list[float]], None]) -> None:
    """Small multiples, two in a row, above one legend."""
    parts = groups(rows, *SUBJECT)
    across = min(2, len(parts))
    down = math.ceil(len(parts) / across)
    canvas.set_size_inches(4.8, 1.3 + 1.75 * down)
    grid = canvas.subplots(down, across, squeeze=False).flatten()
    for axes, (subject, part) in zip(grid, parts.items(), strict=False):
        _panel(axes, part, x)
        set_ticks(axes, sorted({row[x] for row in part if row["method"] != "dense"}))
        axes.set_title(_title(subject), loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[len(parts) :]:
        axes.set_axis_off()
    for axes in grid[: len(parts)][-across:]:
        axes.set_xlabel(name, fontsize=8)
    lines = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    canvas.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=8, columnspacing=1.0)


def _panel(axes: Any, part: Table, x: str) -> None:
    """One line per method; what is far above the best is left out, and so is the band of three seeds."""
    loss = "loss" in part[0]["measure"]
    factor = 1 if loss else 100
    sparse = [row for row in part if row["method"] != "dense"]
    values = means(sparse, "value", "method", x)
    for method, style in painting.method_styles().items():
        along = sorted(place for name, place in values if name == method)
        heights = [factor * values[method, place] for place in along]
        emphasis = {"lw": 2.4, "ms": 5, "zorder": 4} if method == "pft" else {"lw": 1.1, "ms": 4}
        if along:
            axes.plot(along, heights, color=style.colour, marker=style.marker, label=_short(method), **emphasis)
    dense = [factor * row["value"] for row in part if row["method"] == "dense" and row["epochs"]]
    if dense:
        painting.dense_line(axes, dense)
    levels = [[value for (_, p), value in values.items() if p == place] for place in {p for _, p in values}]
    near = [factor * value for level in levels for value in level if value <= _NEAR * min(level)] + dense
    room = 0.08 * (max(near) - min(near)) or 0.1
    axes.set_ylim(min(near) - room, max(near) + room)
    axes.set_ylabel("loss, nats" if loss else "error, %", fontsize=8)


_SHADES = {"better": "#9ecae1", "level": "#f2f2f2", "worse": "#f4a259"}


def paint_cells(canvas: Any, rows: Table) -> None:
    """A row per network and sparsity, a column per method: how far PFT is below it, shaded by the verdict."""
    places = list(groups(rows, *SUBJECT, "sparsity"))
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    canvas.set_size_inches(5.2, 1.1 + 0.2 * len(places))
    axes = canvas.subplots()
    for row in rows:
        column = methods.index(row["method"])
        line = places.index(tuple(row[name] for name in (*SUBJECT, "sparsity")))
        axes.fill_between([column, column + 1], line, line + 1, color=_SHADES[row["verdict"]], lw=0)
        text = f"{0.0 - round(row['difference'], 1):.1f}".replace("-", "\N{MINUS SIGN}")
        weight = "bold" if row["holm"] <= LEVEL else "normal"
        axes.text(column + 0.5, line + 0.5, text, ha="center", va="center", fontsize=7.5, weight=weight)
    axes.set_xlim(0, len(methods))
    axes.set_ylim(len(places), 0)
    axes.set_xticks([k + 0.5 for k in range(len(methods))], [_short(method) for method in methods])
    axes.tick_params(axis="x", labeltop=True, labelbottom=False, labelrotation=60, labelsize=8, length=0)
    axes.set_yticks([k + 0.5 for k in range(len(places))], _row_labels(places))
    axes.tick_params(axis="y", labelsize=8, length=0)
    for k, (before, after) in enumerate(itertools.pairwise(places)):
        if before[:-1] != after[:-1]:
            axes.axhline(k + 1, color="white", lw=3)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _row_labels(places: Sequence[tuple[Any, ...]]) -> list[str]:
    """The network at its first sparsity, and every sparsity."""
    labels, before = [], None
    for *subject, sparsity in places:
        first = "" if subject == before else f"{painting.named(subject[1])} {subject[2] or ''}".rstrip() + "  "
        labels.append(f"{first}{100 * sparsity:g}")
        before = subject
    return labels


figures = figures_of("new-ground", SETTINGS, "every method after tuning its learning rate on validation data,")
"""The figures of the recipe."""
