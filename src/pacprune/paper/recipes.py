"""`pacprune reproduce`: the table from names to recipes, and what it leaves in a folder."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from pacprune import __version__
from pacprune.files import write_atomically
from pacprune.paper import (
    characters,
    choosing,
    compress,
    data_scarce,
    documents,
    error_vs_sparsity,
    flow_chart,
    keep_probs,
    kl_weight,
    language_model,
    linear_model,
    mask_entropy,
    mask_stability,
    monitor_delay,
    new_ground,
    overview,
    pair_plot,
    paper_pbp,
    paper_pft,
    pft_at_init,
    pft_vs_osp,
    posteriors,
    prior_pruners,
    shared_weights,
    strong_tickets,
    weak_magnitude,
    weight_noise,
)
from pacprune.paper.frame import NOT_MEASURED, STRIDE, Drawing, Job, Line, Recipe, reproduce
from pacprune.runs import commands, plots, store
from pacprune.types import Progress, check_name

_CONTEST = "tables.md#learned-masks-against-one-shot-and-gradual-pruning-at-equal-budget"
_CERTIFICATES = "certificate_tables.md#certificates-of-sparse-networks"
_SCARCE = "certificate_tables.md#few-examples-a-posterior-against-a-held-out-certificate"
_REORDERED = "tables.md#does-the-mask-depend-on-the-order-of-the-data"
_GATES = "certificate_tables.md#where-keep-probabilities-go"
_LINEAR = "linear.md#5-the-figures"

RECIPES: dict[str, Recipe] = {
    "linear-model": Recipe(
        linear_model.SETTINGS,
        linear_model.figures,
        lines=(
            Line("penalty of the KL", "5", "paper", "agrees", _LINEAR, cpu=3.2),
            Line("masks in linear models", see=_LINEAR, cpu=3.2),
        ),
    ),
    "flow-chart": Recipe(
        flow_chart.SETTINGS,
        flow_chart.figures,
        lines=(Line("stages of OSP, PFT, PBP", "3", "paper", "agrees", "tutorial.md", scale="paper", cpu=0.1),),
    ),
    "overview": Recipe(
        overview.SETTINGS, overview.figures, lines=(Line("the picture of the README", see="index.md", cpu=0.1),)
    ),
    "pft-vs-osp": Recipe(
        pft_vs_osp.SETTINGS,
        pft_vs_osp.figures,
        several=True,
        lines=(Line("PFT at equal epochs", "1, 6", "other", "agrees", _CONTEST),),
    ),
    "paper-pft": Recipe(
        paper_pft.SETTINGS,
        paper_pft.figures,
        several=True,
        lines=(
            Line("PFT and one-shot", "1", "paper", NOT_MEASURED, scale="paper"),
            Line("PFT on CIFAR-10", "6", "paper", NOT_MEASURED, scale="paper", only="cifar10-resnet20"),
        ),
    ),
    "new-ground": Recipe(
        new_ground.SETTINGS,
        new_ground.figures,
        several=True,
        lines=(Line("eleven methods, untuned", see="tables.md#methods-on-new-ground"),),
    ),
    "weak-magnitude": Recipe(
        weak_magnitude.SETTINGS,
        weak_magnitude.figures,
        several=True,
        lines=(Line("where size says little", see="tables.md#methods-on-new-ground"),),
    ),
    "pft-at-init": Recipe(
        pft_at_init.SETTINGS,
        pft_at_init.figures,
        several=True,
        lines=(Line("PFT at initialisation", "7", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "shared-weights": Recipe(
        shared_weights.SETTINGS,
        shared_weights.figures,
        lines=(Line("weights in common", "2", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "weight-noise": Recipe(
        weight_noise.SETTINGS,
        weight_noise.figures,
        several=True,
        lines=(Line("noise on the weights", "2", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "strong-tickets": Recipe(
        strong_tickets.SETTINGS,
        strong_tickets.figures,
        lines=(Line("strong lottery tickets", "8", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "mask-stability": Recipe(
        mask_stability.SETTINGS,
        mask_stability.figures,
        several=True,
        lines=(
            Line("masks by data order", "16", "paper", NOT_MEASURED, scale="paper", only="mnist-mlp"),
            Line("masks by data order", "17", "paper", NOT_MEASURED, scale="paper", only="cifar10-resnet20"),
            Line("masks, layers 9-15", "18", "paper", NOT_MEASURED, scale="paper", only="cifar10-resnet20"),
        ),
    ),
    "characters": Recipe(
        characters.SETTINGS,
        characters.figures,
        lines=(Line("a character GPT", see="tables.md#a-character-gpt"),),
    ),
    "language-model": Recipe(
        language_model.SETTINGS,
        language_model.figures,
        several=True,
        together=True,
        lines=(Line("a language model of C", scale="full"),),
    ),
    "error-vs-sparsity": Recipe(
        error_vs_sparsity.settings,
        error_vs_sparsity.figures,
        several=True,
        lines=(Line("errors and certificates", "4", "other", "does not agree", _CERTIFICATES),),
    ),
    "paper-pbp": Recipe(
        paper_pbp.SETTINGS,
        paper_pbp.figures,
        several=True,
        lines=(Line("the paper's own prior", "4", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "prior-pruners": Recipe(
        prior_pruners.settings,
        prior_pruners.figures,
        several=True,
        lines=(Line("pruner of the prior"),),
    ),
    "kl-weight": Recipe(
        kl_weight.SETTINGS,
        kl_weight.figures,
        several=True,
        lines=(Line("weight of the KL", "9", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "mask-entropy": Recipe(
        mask_entropy.SETTINGS,
        mask_entropy.figures,
        several=True,
        lines=(Line("entropy and bound", "10", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "keep-probs": Recipe(
        keep_probs.SETTINGS,
        keep_probs.figures,
        several=True,
        lines=(
            Line("keep probabilities", "11", "paper", NOT_MEASURED, scale="paper"),
            Line("their maps", "12-14", "paper", NOT_MEASURED, scale="paper"),
        ),
    ),
    "pair-plot": Recipe(
        pair_plot.SETTINGS,
        pair_plot.figures,
        lines=(Line("pairs of four numbers", "15", "paper", NOT_MEASURED, scale="paper"),),
    ),
    "data-scarce": Recipe(
        data_scarce.SETTINGS,
        data_scarce.figures,
        several=True,
        lines=(Line("few examples", see=_SCARCE),),
    ),
    "posteriors": Recipe(
        posteriors.SETTINGS,
        posteriors.figures,
        several=True,
        lines=(Line("what a posterior earns", see="certificate_tables.md#what-a-posterior-earns"),),
    ),
    "compress": Recipe(
        compress.SETTINGS,
        compress.figures,
        several=True,
        lines=(Line("limits that are proved", see="certificate_tables.md#compress-with-a-guarantee", h200=6),),
    ),
    "choosing": Recipe(
        choosing.SETTINGS,
        choosing.figures,
        several=True,
        lines=(
            Line(
                "which certificate",
                see="choosing.md#measured-over-bound-examples-and-over-what-is-tried",
                only="mnist-lenet5",
            ),
            Line("the same, language model", see="choosing.md#a-language-model", only="tinyshakespeare-gpt"),
        ),
    ),
    "documents": Recipe(
        documents.SETTINGS,
        documents.figures,
        lines=(Line("documents, not tokens", see="documents.md#why-documents-and-not-tokens"),),
    ),
    "monitor-delay": Recipe(
        monitor_delay.SETTINGS,
        monitor_delay.figures,
        lines=(Line("delay of an alarm", see="monitor.md#how-soon-it-notices", scale="full", cpu=2.5),),
    ),
}
"""A new figure is one file, with its settings, rows, painter and `figures`, and one row here with its lines."""

SEVERAL = tuple(name for name, recipe in RECIPES.items() if recipe.several)
"""Recipes with several settings, of which --only names one."""
RECIPE = "recipe.json"
"""The file that says which recipe a folder belongs to."""
PROGRAM = "pacprune reproduce"
LEGEND = """\
Fig.: the figure's number in the paper. Setting: how the published numbers were
made, as the paper says (paper), so with fewer epochs or seeds (reduced), or in
another way (other). Numbers: whether they agree with what the paper says.
H200, CPU: minutes that the command took on an H200 and on two cores, where
somebody took the time. docs/paper.md goes through the paper item by item, and
docs/tables.md and docs/certificate_tables.md have the numbers."""


def run(
    name: str,
    *,
    scale: str = "reduced",
    only: str | None = None,
    out: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    data_dir: Path | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Runs a recipe in its folder: returns at once when it is finished there, keeps the figures that are there.

    Args:
        name: Key of RECIPES.
        scale: How much is computed, one of those of the recipe.
        only: Of a recipe with several settings (a data set and a network each), the one to compute; None is all.
        out: The folder; None is runs/NAME-SCALE[-ONLY], or runs/NAME-SCALE where all settings share one.
        seed: Seed of everything.
        device: Where to compute.
        data_dir: Folder of the data files; None is the default one.
        progress: Called after every step.

    Returns:
        What was asked for, the main numbers and the figures.

    Raises:
        ValueError: If there is no such recipe, scale or setting, or the folder belongs to another run.
    """
    place = _check(name, scale, seed, device, data_dir)
    if only is not None:
        _check_only(name, scale, only)
    owner = None if RECIPES[name].together else only
    folder = Path("runs") / "-".join(part for part in (name, scale, owner) if part) if out is None else out
    request = {"recipe": name, "scale": scale, "seed": seed, "only": owner}
    if _claim(folder, request):
        return store.result(folder)
    drawings, numbers = reproduce(RECIPES[name], Job(scale, folder, seed, place, data_dir, progress, only))
    result = request | {
        "folder": str(folder),
        "version": __version__,
        "numbers": numbers,
        "figures": [_record(drawing) for drawing in drawings],
    }
    if only == owner:  # else it is a part of what the folder is for
        store.finish(folder, result)
    return result


def _check(name: str, scale: str, seed: int, device: str, data_dir: Path | None) -> Any:
    """Refuses what cannot be run; returns the device."""
    check_name("recipe", name, RECIPES)
    _check_scale(name, scale)
    largest = 2**32 // STRIDE - 1
    if not 0 <= seed <= largest:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {largest}")
    place = commands.check_device(device)
    if data_dir is not None:
        store.check_folder(data_dir, "the data files")
    return place


def _check_scale(name: str, scale: str) -> None:
    scales = RECIPES[name].scales
    if scale == "paper" and scale not in scales:
        raise ValueError(
            f"{name} has no scale 'paper', since its largest one is not the paper's setting; use one of "
            f"{', '.join(scales)}"
        )
    check_name("scale", scale, scales)


def _check_only(name: str, scale: str, only: str) -> None:
    recipe = RECIPES[name]
    if not recipe.several:
        raise ValueError(f"only is {only!r}, but {name} has one setting; leave it out")
    names = [setting.name for setting in recipe.at(scale)]
    if only not in names:
        raise ValueError(
            f"only is {only!r}, but the settings of {name} at this scale are {', '.join(names)}; give one of them, "
            "or leave it out"
        )


def _claim(folder: Path, request: dict[str, Any]) -> bool:
    """Whether this very recipe is finished in `folder`; when nothing is there yet, writes down that it is begun."""
    path = folder / RECIPE
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another --out")
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no {RECIPE}, so it is no recipe's; choose another --out")
        write_atomically(path, (json.dumps(request) + "\n").encode())
        return False
    owner = json.loads(path.read_text())
    for name, value in request.items():
        if owner.get(name) != value:
            raise ValueError(
                f"{folder} belongs to another run: {name} is {owner.get(name)!r} there and {value!r} here; "
                "choose another --out"
            )
    return (folder / "result.json").is_file()


def _record(drawing: Drawing) -> dict[str, Any]:
    picture = None if drawing.png is None else drawing.png.name
    return {"name": drawing.name, "csv": drawing.csv.name, "png": picture, "caption": drawing.caption}


def render(result: dict[str, Any]) -> Iterator[Any]:
    """The main numbers, and where the figures lie."""
    table = Table("Number", "Value")
    for name, value in result["numbers"].items():
        table.add_row(name, f"{value:.4g}")
    yield table
    for figure in result["figures"]:
        yield f"{Path(result['folder']) / (figure['png'] or figure['csv'])}: {figure['caption']}"
    if not all(figure["png"] for figure in result["figures"]):
        yield plots.HINT


def listing(name: str | None = None) -> list[dict[str, Any]]:
    """Every line of the recipes, or of one: figures of the paper in their order, and then our own.

    Args:
        name: Key of RECIPES; None is all.

    Returns:
        The fields of every line, with its recipe and its command.

    Raises:
        ValueError: If there is no such recipe.
    """
    if name is not None:
        check_name("recipe", name, RECIPES)
    chosen = RECIPES if name is None else {name: RECIPES[name]}
    pairs = [(key, line) for key, recipe in chosen.items() for line in recipe.lines]
    # The paper's own procedure comes before ours.
    pairs.sort(key=lambda pair: (*(pair[1].numbers[:1] or (math.inf,)), pair[1].procedure == "other"))
    return [{"recipe": key, "command": f"{PROGRAM} {_command(key, line)}", **line._asdict()} for key, line in pairs]


def _command(name: str, line: Line) -> str:
    """What follows `pacprune reproduce`."""
    scale = "" if line.scale == "reduced" else f"--scale {line.scale}"
    only = f"--only {line.only}" if line.only else ""
    return " ".join(word for word in (name, scale, only) if word)


def render_listing(rows: list[dict[str, Any]]) -> Iterator[Any]:
    """The lines as a table, and what its columns mean."""
    table = Table(
        "Fig.",
        Column("Shows", ratio=4),  # columns with a ratio share what the others leave
        Column(PROGRAM, ratio=6),
        "Setting",
        Column("Numbers", ratio=3),
        *(Column(device, justify="right") for device in ("H200", "CPU")),
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        expand=True,
    )
    last = next((row for row in reversed(rows) if row["figure"]), None)
    for row in rows:
        minutes = ("-" if row[key] is None else f"{row[key]:g}" for key in ("h200", "cpu"))
        words = row["title"], row["command"].removeprefix(PROGRAM).strip(), row["procedure"], row["verdict"]
        table.add_row(row["figure"] or "ours", *words, *minutes, end_section=row is last)
    yield table
    yield LEGEND
