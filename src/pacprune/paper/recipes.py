"""`pacprune reproduce`: the table from names to recipes, and what it leaves in a folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from pacprune import __version__
from pacprune.files import write_atomically
from pacprune.paper import (
    characters,
    choosing,
    compress,
    data_scarce,
    error_vs_sparsity,
    flow_chart,
    keep_probs,
    kl_weight,
    linear_model,
    mask_entropy,
    mask_stability,
    monitor_delay,
    new_ground,
    pair_plot,
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
from pacprune.paper.frame import SCALES, STRIDE, Drawing, Job, Recipe, reproduce
from pacprune.runs import commands, plots, store
from pacprune.types import Progress, check_name

RECIPES: dict[str, Recipe] = {
    "linear-model": Recipe(linear_model.SETTINGS, linear_model.figures),
    "flow-chart": Recipe(flow_chart.SETTINGS, flow_chart.figures),
    "pft-vs-osp": Recipe(pft_vs_osp.SETTINGS, pft_vs_osp.figures, several=True),
    "paper-pft": Recipe(paper_pft.SETTINGS, paper_pft.figures, several=True),
    "new-ground": Recipe(new_ground.SETTINGS, new_ground.figures, several=True),
    "weak-magnitude": Recipe(weak_magnitude.SETTINGS, weak_magnitude.figures, several=True),
    "pft-at-init": Recipe(pft_at_init.SETTINGS, pft_at_init.figures, several=True),
    "shared-weights": Recipe(shared_weights.SETTINGS, shared_weights.figures),
    "weight-noise": Recipe(weight_noise.SETTINGS, weight_noise.figures, several=True),
    "strong-tickets": Recipe(strong_tickets.SETTINGS, strong_tickets.figures),
    "mask-stability": Recipe(mask_stability.SETTINGS, mask_stability.figures, several=True),
    "characters": Recipe(characters.SETTINGS, characters.figures),
    "error-vs-sparsity": Recipe(error_vs_sparsity.settings, error_vs_sparsity.figures, several=True),
    "prior-pruners": Recipe(prior_pruners.settings, prior_pruners.figures, several=True),
    "pair-plot": Recipe(pair_plot.SETTINGS, pair_plot.figures),
    "kl-weight": Recipe(kl_weight.SETTINGS, kl_weight.figures, several=True),
    "mask-entropy": Recipe(mask_entropy.SETTINGS, mask_entropy.figures, several=True),
    "keep-probs": Recipe(keep_probs.SETTINGS, keep_probs.figures, several=True),
    "data-scarce": Recipe(data_scarce.SETTINGS, data_scarce.figures, several=True),
    "posteriors": Recipe(posteriors.SETTINGS, posteriors.figures, several=True),
    "compress": Recipe(compress.SETTINGS, compress.figures, several=True),
    "choosing": Recipe(choosing.SETTINGS, choosing.figures),
    "monitor-delay": Recipe(monitor_delay.SETTINGS, monitor_delay.figures),
}
"""A new figure is one file, with its settings, rows, painter and `figures`, and one row here."""

SEVERAL = tuple(name for name, recipe in RECIPES.items() if recipe.several)
"""Recipes with several settings, of which --only names one."""
RECIPE = "recipe.json"
"""The file that says which recipe a folder belongs to."""


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
        scale: How much is computed, one of SCALES.
        only: Of a recipe with several settings (a data set and a network each), the one to compute; None is all.
        out: The folder; None is runs/NAME-SCALE[-ONLY].
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
    folder = Path("runs") / "-".join(part for part in (name, scale, only) if part) if out is None else out
    request = {"recipe": name, "scale": scale, "seed": seed, "only": only}
    if _claim(folder, request):
        return store.result(folder)
    drawings, numbers = reproduce(RECIPES[name], Job(scale, folder, seed, place, data_dir, progress, only))
    result = request | {
        "folder": str(folder),
        "version": __version__,
        "numbers": numbers,
        "figures": [_record(drawing) for drawing in drawings],
    }
    store.finish(folder, result)
    return result


def _check(name: str, scale: str, seed: int, device: str, data_dir: Path | None) -> Any:
    """Refuses what cannot be run; returns the device."""
    check_name("recipe", name, RECIPES)
    check_name("scale", scale, SCALES)
    largest = 2**32 // STRIDE - 1
    if not 0 <= seed <= largest:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {largest}")
    place = commands.check_device(device)
    if data_dir is not None:
        store.check_folder(data_dir, "the data files")
    return place


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
