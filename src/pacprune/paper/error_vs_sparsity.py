"""Error and certificate against sparsity for several alpha = |S_P|/|S|, with SNIP as the reference.

The paper's headline figure and its pair plot, from the table of certificates that `certificate_grid` fills. The grid
of the scale `reduced` is the one that is declared in results/grid.toml; `paper` has the paper's alphas, epochs and
number of seeds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pacprune.methods.table import METHODS
from pacprune.paper import certificate_grid, painting, pair_plot
from pacprune.paper.certificate_grid import Declaration, Grid, Motion, read_grid
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.runs import plots
from pacprune.types import Table

GRID_FILE = Path(__file__).parents[3] / "results" / "grid.toml"
"""The published grid, in a checkout of the repository."""
SMOKE = """
delta = 0.05
[[setting]]
data = "digits"
model = "mlp"
split_seed = 0
alphas = [0.4, 0.8]
sparsities = [0.9, 0.975]
seeds = [0, 1]
margin = 0.002
eps = 1e-5
std = [0.003, 0.003]
expected_risk = 0.1
draws = 200
tolerance = 0.01
[setting.dense]
epochs = 6
lr = 0.1
schedule = "cosine"
[setting.pruning]
epochs = 6
lr = 0.1
schedule = "cosine"
[setting.prior]
epochs = 0
[setting.posterior]
epochs = 2
lr = 0.1
"""
PAPER_EPOCHS = {"mnist": (30, 30), "fashion-mnist": (70, 30), "cifar10": (120, 60)}
"""Epochs of stage 1, and of stages 2 and 3."""
STYLES = {
    "gibbs_certificate": Style("certificate of Q", plots.BLUE, "o"),
    "test_error": Style("test error of Q", plots.ORANGE, "s"),
    "prior_test_error": Style("test error of P", plots.GREEN, "^"),
    "held_out_certificate": Style("held-out certificate of the thresholded P", plots.PURPLE, "v"),
}


def declared_grid(scale: str) -> Grid:
    """The grid of a scale."""
    if scale == "smoke":
        return read_grid(SMOKE)
    if not GRID_FILE.is_file():
        raise ValueError(f"{GRID_FILE} is not there, and nothing may be certified without it; run in a checkout")
    grid = read_grid(GRID_FILE.read_text())
    return grid if scale == "reduced" else replace(grid, settings=tuple(_paper(setting) for setting in grid.settings))


def settings(scale: str) -> tuple[Setting[Declaration], ...]:
    """The settings of a scale's grid."""
    return declared_grid(scale).settings


def _paper(setting: Setting[Declaration]) -> Setting[Declaration]:
    """The paper's alphas, epochs, eps and five seeds, without moved images; a grid, and a K, of its own."""
    first, then = PAPER_EPOCHS[setting.data]
    stds = setting.options.stds
    return setting.changed(
        alphas=(0.4, 0.8),
        sparsities=(0.8, 0.9, 0.95, 0.975),
        seeds=5,
        eps=1e-4,
        stds=(stds[0], stds[-1]),
        motion=Motion(),
        dense=replace(setting.dense, epochs=first),
        pruning=replace(setting.pruning, epochs=then),
        posterior=replace(setting.posterior, epochs=then),
    )


def figures(setting: Setting[Declaration], job: Job) -> Iterator[Figure]:
    """Certificates and errors, the pair plot, and the tables of all certificates."""
    grid = declared_grid(job.scale)
    (first,) = job.seeds(1)
    if first and job.scale != "smoke":
        raise ValueError(f"the first seed would be {first}, but the grid declares 0; leave --seed at 0")
    yield Figure(
        f"error-vs-sparsity-{setting.name}",
        f"{painting.network(setting)}: certificates, of which all {grid.size} of the grid hold at once with "
        f"probability {1 - grid.delta:g}, and test errors; mean and 95 % interval over {setting.seeds} seeds "
        "(weights, data order, masks and draws are random, the split is not). SNIP prunes once and trains on all of "
        "S; what it has above the panels is in the CSV alone.",
        lambda: rows(setting, certificate_grid.run(grid, setting.name, job), certificate_grid.snip(setting, job)),
        paint,
        lambda rows: {"K": grid.size} | numbers(setting, rows),
    )
    certificates = certificate_grid.run(grid, setting.name, job)
    yield Figure(
        f"pair-plot-{setting.name}",
        f"{painting.network(setting)}: every pair of certificate, test error, alpha and KL/n over the same "
        f"{len(certificates)} certificates; r is Pearson's correlation, with its 95 % interval over them.",
        lambda: pair_plot.rows(certificates),
        pair_plot.paint,
        lambda rows: {f"{setting.name}, {name}": r for name, r in pair_plot.correlations(rows).items()},
    )
    names = [declaration.name for declaration in job.select(grid.settings)]
    finished = names[: names.index(setting.name) + 1]
    certificate_grid.write_tables([row for name in finished for row in certificate_grid.run(grid, name, job)], job.out)


def rows(
    setting: Setting[Any], certificates: Table, snip: Table, styles: Mapping[str, Style] = MappingProxyType(STYLES)
) -> Table:
    """One line per number of the figure; SNIP, which is trained on all of S, has alpha 1."""
    common = {"dataset": setting.data, "model": setting.model}
    table = [
        {**common, **{key: row[key] for key in ("alpha", "sparsity", "seed")}, "what": what, "value": row[what]}
        for row in certificates
        for what in styles
        if what in row
    ]
    return table + [
        {**common, "alpha": 1.0, "sparsity": row["sparsity"], "seed": row["seed"], "what": "snip"}
        | {"value": row["test_error"]}
        for row in snip
    ]


def paint(
    canvas: Any, rows: Table, styles: Mapping[str, Style] = MappingProxyType(STYLES), *, one_scale: bool = True
) -> None:
    """One panel per alpha: certificate and errors against sparsity, all on one scale or each on its own."""
    alphas = sorted({row["alpha"] for row in rows if row["what"] != "snip"})
    snip = [(painting.sparsity_place(row["sparsity"]), row["value"]) for row in rows if row["what"] == "snip"]
    canvas.set_size_inches(max(9.0, 3.6 * len(alphas)), 4)  # the title needs so much
    for axes, alpha in zip(canvas.subplots(1, len(alphas), sharey=one_scale, squeeze=False)[0], alphas, strict=True):
        panel = [row for row in rows if row["alpha"] == alpha]
        painting.sparsity_lines(axes, panel, y="value", by="what", styles=styles)
        # One mark per seed: where SNIP falls apart and the others do not, its interval would fill the panel.
        style = {"color": METHODS["osp"].colour, "label": "test error of one-shot SNIP, each seed"}
        axes.scatter(*zip(*snip, strict=True), s=14, marker="D", zorder=3, **style)
        axes.set_title(f"P from {100 * alpha:g} % of the examples (alpha {alpha:g})", loc="left", fontsize=10)
        scale = [row for row in rows if row["what"] != "snip"] if one_scale else panel
        painting.error_axis(axes, [row["value"] for row in scale], "error rate in %")
    for axes in canvas.axes[1:]:
        axes.set_ylabel("")
    canvas.legend(*canvas.axes[0].get_legend_handles_labels(), ncols=3, loc="outside lower center", fontsize=9)
    what = f"{painting.subject(rows)}: {painting.over_seeds(rows)}"
    plots.title(canvas, what, "weights, data order, masks, draws")


def numbers(setting: Setting[Any], rows: Table) -> dict[str, float]:
    """The mean over seeds of every line of the figure."""
    return {
        f"{setting.name}, {what} at {sparsity:g}, alpha {alpha:g}": mean
        for (what, sparsity, alpha), mean in means(rows, "value", "what", "sparsity", "alpha").items()
    }
