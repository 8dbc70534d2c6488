"""Error and certificate against sparsity for several alpha = |S_P|/|S|, with SNIP as the reference.

The paper's headline figure and its pair plot, from the table of certificates that `certificates` fills. The grid of
the scale `reduced` is the one that is declared in results/grid.toml; `paper` has the paper's alphas, epochs and number
of seeds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pacprune.paper import certificate_grid, frame, pair_plot
from pacprune.paper.certificate_grid import Grid, Motion, Setting, read_grid
from pacprune.paper.frame import Drawn, Job
from pacprune.runs import plots
from pacprune.types import Table

DECLARED = Path(__file__).parents[3] / "results" / "grid.toml"
"""The published grid, in a checkout of the repository."""
SMOKE = """
delta = 0.05
[[setting]]
data = "digits"
model = "mlp"
split_seed = 0
alphas = [0.4, 0.8]
sparsities = [0.9, 0.975]
seeds = [0, 1, 2]
margin = 0.002
eps = 1e-5
std = [0.003, 0.003]
expected_risk = 0.1
draws = 1000
tolerance = 0.003
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
_STYLE = {
    "gibbs_certificate": ("certificate of Q", plots.BLUE, "o"),
    "test_error": ("test error of Q", plots.ORANGE, "s"),
    "prior_test_error": ("test error of P", plots.GREEN, "^"),
    "held_out_certificate": ("held-out certificate of the thresholded P", plots.PURPLE, "v"),
}
_SNIP = "test error of one-shot SNIP, each seed"


def declared(scale: str, seeds: list[int]) -> Grid:
    """The grid of a scale; the published one has its own seeds."""
    if scale == "smoke":
        grid = read_grid(SMOKE)
        return replace(grid, settings=tuple(replace(one, seeds=tuple(seeds)) for one in grid.settings))
    if not DECLARED.is_file():
        raise ValueError(f"{DECLARED} is not there, and nothing may be certified without it; run in a checkout")
    grid = read_grid(DECLARED.read_text())
    if seeds[0] != grid.settings[0].seeds[0]:
        raise ValueError(
            f"the first seed would be {seeds[0]}, but the grid declares {grid.settings[0].seeds[0]}; leave --seed at 0"
        )
    return grid if scale == "reduced" else replace(grid, settings=tuple(_paper(one) for one in grid.settings))


def _paper(setting: Setting) -> Setting:
    """The paper's alphas, epochs, eps and five seeds, without moved images; a grid, and a K, of its own."""
    first, then = PAPER_EPOCHS[setting.data]
    return replace(
        setting,
        alphas=(0.4, 0.8),
        sparsities=(0.8, 0.9, 0.95, 0.975),
        seeds=tuple(range(5)),
        eps=1e-4,
        std=(setting.std[0], setting.std[-1]),
        motion=Motion(),
        dense=replace(setting.dense, epochs=first),
        pruning=replace(setting.pruning, epochs=then),
        posterior=replace(setting.posterior, epochs=then),
    )


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """Two figures per data set and network, the tables of all certificates, mean certificates and correlations."""
    grid = declared(job.scale, job.seeds(3))
    drawn, numbers, table = [], {"K": grid.size}, []
    for setting in job.chosen(grid.settings):
        caption = (
            f"{setting.data}, {setting.model}: certificates, of which all {grid.size} of the grid hold at once with "
            f"probability {1 - grid.delta:g}, and test errors; mean and 95 % interval over {len(setting.seeds)} seeds "
            "(weights, data order, masks and draws are random, the split is not). SNIP prunes once and trains on all "
            "of S; what it has above the panels is in the CSV alone."
        )

        def rows(setting: Setting = setting) -> Table:
            return _table(setting, certificate_grid.run(grid, setting, job), certificate_grid.snip(setting, job))

        found = frame.draw(job, f"error-vs-sparsity-{setting.name}", caption, rows, paint)
        drawn.append(found)
        numbers |= means(setting, found.rows)
        own = certificate_grid.run(grid, setting, job)
        caption = (
            f"{setting.data}, {setting.model}: every pair of certificate, test error, alpha and KL/n over the same "
            f"{len(own)} certificates; r is Pearson's correlation, with its 95 % interval over them."
        )
        pairs = frame.draw(
            job, f"pair-plot-{setting.name}", caption, lambda own=own: pair_plot.rows(own), pair_plot.paint
        )
        drawn.append(pairs)
        numbers |= {f"{setting.name}, {name}": r for name, r in pair_plot.correlations(pairs.rows).items()}
        table += own
        certificate_grid.write_tables(table, job.out)
    return drawn, numbers


def _table(setting: Setting, rows: Table, snip: Table) -> Table:
    """One line per number of the figure; SNIP, which is trained on all of S, has alpha 1."""
    own = {"dataset": setting.data, "model": setting.model}
    found = [
        {**own, **{key: row[key] for key in ("alpha", "sparsity", "seed")}, "what": what, "value": row[what]}
        for row in rows
        for what in _STYLE
        if what in row
    ]
    return found + [
        {**own, "alpha": 1.0, "sparsity": row["sparsity"], "seed": row["seed"], "what": "snip"}
        | {"value": row["test_error"]}
        for row in snip
    ]


def paint(canvas: Any, rows: Table) -> None:
    """One panel per alpha: certificate and errors against sparsity."""
    alphas = sorted({row["alpha"] for row in rows if row["what"] != "snip"})
    canvas.set_size_inches(max(9.0, 3.6 * len(alphas)), 4)  # the title needs so much
    for axes, alpha in zip(canvas.subplots(1, len(alphas), sharey=True, squeeze=False)[0], alphas, strict=True):
        shown = [row for row in rows if row["alpha"] == alpha]
        frame.lines(axes, shown, x="sparsity", y="value", by="what", style=_STYLE)
        # One mark per seed: where SNIP falls apart and the others do not, its interval would fill the panel.
        marks = [(row["sparsity"], row["value"]) for row in rows if row["what"] == "snip"]
        axes.scatter(*zip(*marks, strict=True), s=14, color=plots.GREY, marker="D", label=_SNIP, zorder=3)
        axes.set_title(f"alpha = {alpha:g}", loc="left", fontsize=10)
        axes.set_xlabel("sparsity")
        axes.set_xticks(sorted({row["sparsity"] for row in rows}))
    axes = canvas.axes[0]
    axes.set_ylim(0, 1.5 * max(row["value"] for row in rows if row["what"] != "snip"))
    axes.set_ylabel("error rate")
    axes.legend(fontsize=7)
    seeds = len({row["seed"] for row in rows})
    what = f"{rows[0]['dataset']}, {rows[0]['model']}: mean and 95 % interval over {seeds} seeds"
    plots.title(canvas, what, "weights, data order, masks, draws")


def means(setting: Setting, rows: Table) -> dict[str, float]:
    """The mean over seeds of every line of the figure."""
    keys = dict.fromkeys((row["what"], row["sparsity"], row["alpha"]) for row in rows)
    return {
        f"{setting.name}, {what} at {sparsity:g}, alpha {alpha:g}": frame.interval(
            [row["value"] for row in rows if (row["what"], row["sparsity"], row["alpha"]) == (what, sparsity, alpha)]
        ).mean
        for what, sparsity, alpha in keys
    }
