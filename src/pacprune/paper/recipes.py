"""`pacprune reproduce`: a table from names to recipes, each of which leaves figures with the CSV behind each."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pacprune import __version__
from pacprune.files import write_atomically
from pacprune.paper import (
    characters,
    data_scarce,
    error_vs_sparsity,
    keep_probs,
    kl_weight,
    linear_model,
    mask_stability,
    pft_at_init,
    pft_vs_osp,
    posteriors,
    shared_weights,
    strong_tickets,
    weight_noise,
)
from pacprune.paper.frame import SCALES, STRIDE, Drawn, Job
from pacprune.runs import commands, plots, store
from pacprune.types import Progress

Recipe = Callable[[Job], tuple[list[Drawn], dict[str, Any]]]
"""Draws its figures into job.out and returns them with the main numbers."""

RECIPES: dict[str, Recipe] = {
    "linear-model": linear_model.reproduce,
    "pft-vs-osp": pft_vs_osp.reproduce,
    "pft-at-init": pft_at_init.reproduce,
    "shared-weights": shared_weights.reproduce,
    "weight-noise": weight_noise.reproduce,
    "strong-tickets": strong_tickets.reproduce,
    "mask-stability": mask_stability.reproduce,
    "characters": characters.reproduce,
    "error-vs-sparsity": error_vs_sparsity.reproduce,
    "kl-weight": kl_weight.reproduce,
    "keep-probs": keep_probs.reproduce,
    "data-scarce": data_scarce.reproduce,
    "posteriors": posteriors.reproduce,
}

SETTINGS = "recipe.json"
PARTED: dict[str, Callable[[str], Sequence[Any]]] = {
    "pft-vs-osp": pft_vs_osp.SETTINGS.__getitem__,
    "pft-at-init": pft_at_init.SETTINGS.__getitem__,
    "weight-noise": weight_noise.SETTINGS.__getitem__,
    "mask-stability": mask_stability.STUDIES.__getitem__,
    "error-vs-sparsity": lambda scale: error_vs_sparsity.declared(scale, [0]).settings,
    "data-scarce": data_scarce.SETTINGS.__getitem__,
    "posteriors": posteriors.SETTINGS.__getitem__,
}
"""The settings of the recipes that have several, by scale."""


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

    Of a recipe with several settings (a data set and a network each), `only` runs one.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; use one of {', '.join(RECIPES)}")
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; use one of {', '.join(SCALES)}")
    most = 2**32 // STRIDE - 1
    if not 0 <= seed <= most:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {most}")
    where = commands.check_device(device)
    if data_dir is not None:
        store.check_folder(data_dir, "the data files")
    if only is not None:
        if name not in PARTED:
            raise ValueError(f"only is {only!r}, but {name} has one setting; leave it out")
        names = [one.name for one in PARTED[name](scale)]
        if only not in names:
            raise ValueError(
                f"only is {only!r}, but the settings of {name} at this scale are {', '.join(names)}; give one of them, "
                "or leave it out"
            )
    label = "-".join(part for part in (name, scale, only) if part)
    folder = Path("runs") / label if out is None else out
    asked = {"recipe": name, "scale": scale, "seed": seed, "only": only}
    if _claimed(folder, asked):
        return store.result(folder)
    figures, numbers = RECIPES[name](Job(scale, folder, seed, where, data_dir, progress, only))
    found = asked | {
        "folder": str(folder),
        "version": __version__,
        "numbers": numbers,
        "figures": [
            {"name": one.name, "csv": one.csv.name, "png": one.png and one.png.name, "caption": one.caption}
            for one in figures
        ],
    }
    store.finish(folder, found)
    return found


def _claimed(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether this very recipe is finished in `folder`; when nothing is there yet, writes down that it is begun."""
    path = folder / SETTINGS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another --out")
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty and holds no {SETTINGS}, so it is no recipe's; choose another --out"
            )
        write_atomically(path, (json.dumps(asked) + "\n").encode())
        return False
    there = json.loads(path.read_text())
    for name, value in asked.items():
        if there.get(name) != value:
            raise ValueError(
                f"{folder} belongs to another run: {name} is {there.get(name)!r} there and {value!r} here; "
                "choose another --out"
            )
    return (folder / "result.json").is_file()


def shown(result: dict[str, Any]) -> Iterator[Any]:
    """The main numbers, and where the figures lie."""
    table = Table("Number", "Value")
    for name, value in result["numbers"].items():
        table.add_row(name, f"{value:.4g}")
    yield table
    for figure in result["figures"]:
        yield f"{Path(result['folder']) / (figure['png'] or figure['csv'])}: {figure['caption']}"
    if not all(figure["png"] for figure in result["figures"]):
        yield plots.HINT
