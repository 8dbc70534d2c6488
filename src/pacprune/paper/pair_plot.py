"""How bound, test error, alpha and KL/n go together over runs of PAC-Bayes pruning: the paper's pair plot.

Its runs are on CIFAR-10 with ResNet20 from magnitude, here with one std of P for all of them: a P that is wider for one
alpha lets Q move further there, and then KL/n says more of the std than of alpha. A table of certificates can be drawn
in the same way.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pacprune import data
from pacprune.paper import painting, pbp_stages
from pacprune.paper.frame import Figure, Job, Setting, compute_rows
from pacprune.paper.pbp_stages import Start
from pacprune.paper.statistics import correlation, means
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.types import Table

_PAPER: Setting[None] = Setting(
    data="cifar10",
    model="resnet20",
    sparsities=(0.8, 0.9, 0.95, 0.975),
    alphas=(0.4, 0.8),
    seeds=5,
    dense=Config(epochs=120, lr=0.1, schedule="step", augment=True),
    prior=Config(epochs=60, lr=0.1, schedule="step", augment=True),
    posterior=Config(epochs=60, lr=math.exp(-2), schedule="step", augment=True),
    std=math.exp(-6),
    draws=2_000,
    options=None,
)
SETTINGS: dict[str, tuple[Setting[None], ...]] = {
    "smoke": (
        _PAPER.changed(
            data="digits",
            model="mlp",
            sparsities=(0.8, 0.9, 0.95),
            seeds=2,
            dense=Config(epochs=6, lr=0.1),
            prior=Config(epochs=6, lr=0.1),
            posterior=Config(epochs=3, lr=0.1),
            std=math.exp(-4),
            draws=100,
        ),
    ),
    "reduced": (
        _PAPER.changed(
            sparsities=(0.9, 0.975),
            seeds=2,
            dense=Config(epochs=12, lr=0.1, schedule="step", augment=True),
            prior=Config(epochs=6, lr=0.1, schedule="step", augment=True),
            posterior=Config(epochs=6, lr=math.exp(-2), schedule="step", augment=True),
            draws=500,
        ),
    ),
    "paper": (_PAPER,),
}
"""`paper` has the paper's data, network and epochs, and one std and one learning rate of Q out of the paper's ranges;
`reduced` has a tenth of the epochs."""
LABELS = {
    "bound": "bound in %",
    "test_error": "test error of Q in %",
    "alpha": "alpha",
    "kl_per_n": "KL/n",
}
DECADES = 2.0
"""KL/n that runs over more decades is drawn by its logarithm."""


def figures(setting: Setting[None], job: Job) -> Iterator[Figure]:
    """Every pair of the four numbers."""
    count = len(setting.alphas) * len(setting.sparsities) * setting.seeds
    yield Figure(
        f"pair-plot-{setting.name}",
        f"{painting.network(setting)}, from magnitude, one std of P: every pair of bound (the paper's theorem), "
        f"test error, alpha and KL/n over {count} runs of PAC-Bayes pruning; r is Pearson's correlation, with its 95 % "
        "interval over them.",
        lambda: runs(setting, job),
        paint,
        correlations,
    )


class Run(NamedTuple):
    """One posterior."""

    alpha: float
    sparsity: float
    seed: int


def runs(setting: Setting[None], job: Job) -> Table:
    """One row per run; bounds pay for all of them."""
    entries = [
        Run(alpha, sparsity, seed)
        for alpha in setting.alphas
        for sparsity in setting.sparsities
        for seed in job.seeds(setting.seeds)
    ]
    table = compute_rows(
        entries,
        lambda portion: _train(setting, portion, len(entries), job),
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda run: run.alpha,
        portions=job.portions,
    )
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def _train(setting: Setting[None], entries: Sequence[Run], grid: int, job: Job) -> Table:
    """All three stages of runs of one alpha, as a population."""
    (alpha,) = {run.alpha for run in entries}
    split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
    starts = [Start("magnitude", run.sparsity, setting.eps, run.seed) for run in entries]
    nets = pbp_stages.begin(setting, starts, split, job)
    priors = pbp_stages.train_priors(setting, nets, starts, split, job)
    pbp_stages.train_posteriors(setting, nets, priors, starts, split, job)
    table: Table = []
    for net, prior in zip(nets, priors, strict=True):
        numbers = pbp_stages.certificate_numbers(setting, net, prior, split, job, grid=grid)
        table.append(numbers | {"bound": numbers.pop("paper_bound"), "certificate": numbers["bound"]})
    return table


def rows(certificates: Table) -> Table:
    """What the figure has of every row of a table of certificates."""
    names = ("dataset", "model", "sparsity", "alpha", "seed", "test_error")
    return [
        {name: row[name] for name in names} | {"bound": row["gibbs_certificate"], "kl_per_n": row["kl"] / row["n"]}
        for row in certificates
    ]


def _in_decades(rows: Table) -> tuple[Table, str]:
    """The rows with log10 KL/n for KL/n where it runs over decades, and what it is called then.

    A Q that did not move has the least of the others.
    """
    positive = [row["kl_per_n"] for row in rows if row["kl_per_n"] > 0]
    if not positive or max(positive) <= 10**DECADES * min(positive):
        return rows, LABELS["kl_per_n"]
    least = min(positive)
    return [row | {"kl_per_n": math.log10(max(row["kl_per_n"], least))} for row in rows], "log10 KL/n"


def correlations(rows: Table) -> dict[str, float]:
    """r of the pairs that the paper speaks of, as the figure has them, and the mean KL/n of every alpha."""
    table, kl_label = _in_decades(rows)
    words = {"bound": "bound", "test_error": "test error", "alpha": "alpha", "kl_per_n": kl_label}
    columns = {name: [row[name] for row in table] for name in LABELS}
    numbers = {
        f"r of {words[x]} and {words[y]}": correlation(columns[x], columns[y]).mean
        for x, y in (("bound", "test_error"), ("bound", "kl_per_n"), ("alpha", "kl_per_n"))
    }
    numbers |= {f"KL/n at alpha {alpha:g}": mean for (alpha,), mean in sorted(means(rows, "kl_per_n", "alpha").items())}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def paint(canvas: Any, rows: Table) -> None:
    """A scatter plot of every pair, and histograms on the diagonal; a colour per alpha, larger where sparser."""
    canvas.set_size_inches(10, 9)
    rows, kl_label = _in_decades(rows)
    labels = LABELS | {"kl_per_n": kl_label}
    sparsities, alphas = (sorted({row[name] for row in rows}) for name in ("sparsity", "alpha"))
    colours = dict(zip(alphas, painting.PALETTE, strict=False))
    sizes = {sparsity: 14 + 22 * place for place, sparsity in enumerate(sparsities)}
    names = list(LABELS)
    grid = canvas.subplots(len(names), len(names), squeeze=False)
    for y, panels in zip(names, grid, strict=True):
        for x, axes in zip(names, panels, strict=True):
            if x == y:
                _histogram(axes, rows, x, colours)
            else:
                _scatter(axes, rows, x, y, colours, sizes)
            _ticks(axes, alphas, x, "" if x == y else y)
            axes.set_xlabel(labels[x] if y == names[-1] else "", fontsize=9)
            axes.set_ylabel("runs" if x == y else labels[y] if x == names[0] else "", fontsize=9)
    marks = [grid[0][0].scatter([], [], color=colours[alpha], label=f"alpha {alpha:g}") for alpha in alphas]
    marks += [
        grid[0][0].scatter([], [], s=sizes[s], color=plots.GREY, label=f"sparsity {100 * s:g} %") for s in sparsities
    ]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    what = f"{painting.subject(rows)}: {len(rows)} runs of PAC-Bayes pruning"
    seeds = f"{painting.seed_count(rows)} seeds (weights, data order, drawn networks)"
    painting.canvas_heading(canvas, f"{what}, {seeds}; r with its 95 % interval")


def _ticks(axes: Any, alphas: Sequence[float], x: str, y: str) -> None:
    """Errors in %, a tick for every alpha, whole numbers of runs."""
    axes.tick_params(labelsize=7)
    for name, axis in ((x, axes.xaxis), (y, axes.yaxis)):
        axis.get_major_locator().set_params(nbins=4, integer=not name)
        if name == "kl_per_n":
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        if name in ("bound", "test_error"):
            painting.in_percent(axis)
        if name == "alpha":
            axis.set_ticks(alphas)


def _histogram(axes: Any, rows: Table, name: str, colours: Mapping[float, str]) -> None:
    """How often the values occur, the runs of every alpha on top of those of the one before."""
    if name == "alpha":
        for alpha, colour in colours.items():
            axes.bar(alpha, sum(row["alpha"] == alpha for row in rows), width=0.1, color=colour)
        return
    values = [[row[name] for row in rows if row["alpha"] == alpha] for alpha in colours]
    axes.hist(values, bins=12, stacked=True, color=list(colours.values()))


def _scatter(
    axes: Any, rows: Table, x: str, y: str, colours: Mapping[float, str], sizes: Mapping[float, float]
) -> None:
    """One pair, with its correlation above."""
    places = [row[x] for row in rows], [row[y] for row in rows]
    axes.scatter(
        *places,
        s=[sizes[row["sparsity"]] for row in rows],
        color=[colours[row["alpha"]] for row in rows],
        alpha=0.7,
        lw=0,
    )
    r = correlation(*places)
    if math.isfinite(r.mean):
        axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=8)
