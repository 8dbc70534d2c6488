"""Whether a better pruner makes better certificates: P around networks that two recipes of PFT have pruned.

Data, networks and all stages but the pruning are those of the table of certificates. The examples of its bound sets
have been looked at before. So these certificates, which pay for each other, compare recipes, and are no claims.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pacprune.paper import certificate_grid, error_vs_sparsity, painting
from pacprune.paper.certificate_grid import Declaration, Grid
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.types import Table

RECIPES = {
    "thresholded": Style("thresholded (default)", plots.BLUE, "o"),
    "coupled": Style("coupled (random masks)", plots.ORANGE, "s"),
}
NUMBERS = {
    "gibbs_certificate": "certificate\nof Q",
    "held_out_certificate": "held-out\ncertificate",
    "test_error": "test error\nof Q",
    "pruned_test_error": "test error of the\npruned network",
}
_SETTINGS = ("fashion-mnist-lenet5", "cifar10-resnet20")
_SIZES: dict[str, dict[str, Any]] = {"reduced": {"draws": 5_000, "tolerance": 0.002}}


def declared_grid(scale: str) -> Grid:
    """All rows: settings of the published grid with each recipe, which decay weights alike."""
    grid = error_vs_sparsity.declared_grid("smoke" if scale == "smoke" else "reduced")
    chosen = [setting for setting in grid.settings if scale == "smoke" or setting.name in _SETTINGS]
    sizes = {"alphas": (0.4,), "sparsities": (0.975,), **_SIZES.get(scale, {})}
    changed = [setting.changed(**sizes, stds=setting.options.stds[:1]) for setting in chosen]
    return Grid(tuple(_pruned_by(recipe, setting) for setting in changed for recipe in RECIPES), grid.delta)


def _pruned_by(recipe: str, setting: Setting[Declaration]) -> Setting[Declaration]:
    """The setting with a recipe, whose gates have the rate that is its default."""
    pruning = replace(setting.pruning, gate_lr=Config().gate_lr, weight_decay=5e-4)
    return setting.changed(recipe=recipe, pruning=pruning, label=recipe)


def settings(scale: str) -> tuple[Setting[Declaration], ...]:
    """The settings of a scale."""
    return declared_grid(scale).settings


def figures(setting: Setting[Declaration], job: Job) -> Iterator[Figure]:
    """One figure of all settings, after the last one."""
    grid = declared_grid(job.scale)
    certificate_grid.run(grid, setting.name, job)
    names = [choice.name for choice in job.select(grid.settings)]
    if setting.name == names[-1]:
        yield Figure(
            "prior-pruners",
            f"Certificates and test errors where P is made around networks that a recipe of PFT has pruned; "
            f"{setting.seeds} seeds (weights, data order, masks and draws are random, the split is not), a mark each, "
            f"and their mean. The {grid.size} certificates hold at once with probability {1 - grid.delta:g}.",
            lambda: [row for name in names for row in rows(grid, name, job)],
            paint,
            numbers,
        )


def rows(grid: Grid, name: str, job: Job) -> Table:
    """One row per certificate of a setting, with the recipe that pruned the centre of P."""
    return [{"recipe": grid[name].options.recipe} | row for row in certificate_grid.run(grid, name, job)]


def numbers(rows: Table) -> dict[str, float]:
    """The mean over seeds of every number that is drawn."""
    return {
        f"{dataset}, {model}, {recipe}: {name}": mean
        for name in NUMBERS
        for (dataset, model, recipe), mean in means(rows, name, "dataset", "model", "recipe").items()
    }


def paint(canvas: Any, rows: Table) -> None:
    """A panel per data set: a mark per seed, recipes side by side."""
    subjects = list(dict.fromkeys((row["dataset"], row["model"]) for row in rows))
    canvas.set_size_inches(4.6 * len(subjects), 3.6)
    for axes, subject in zip(canvas.subplots(1, len(subjects), squeeze=False)[0], subjects, strict=True):
        panel = [row for row in rows if (row["dataset"], row["model"]) == subject]
        for side, (recipe, style) in zip((-0.15, 0.15), RECIPES.items(), strict=True):
            part = [row for row in panel if row["recipe"] == recipe]
            for place, name in enumerate(NUMBERS):
                values = [100 * row[name] for row in part]
                label = style.label if place == 0 else None
                painting.seed_marks(axes, place + side, values, style, label=label)
        axes.set_xticks(range(len(NUMBERS)), list(NUMBERS.values()), fontsize=7)
        axes.set_title(painting.named(*subject), loc="left", fontsize=9)
    canvas.axes[0].set_ylabel("%")
    canvas.axes[0].legend(fontsize=8)
    what = f"{100 * rows[0]['sparsity']:g} % pruned, alpha = {rows[0]['alpha']:g}"
    painting.canvas_heading(canvas, f"{what}; {painting.seed_count(rows)} seeds")
