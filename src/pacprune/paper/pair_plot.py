"""How bound, test error, alpha and KL/n go together over a table of certificates: the paper's pair plot."""

import math
from collections.abc import Mapping
from typing import Any

from pacprune.paper import painting
from pacprune.paper.statistics import correlation, means
from pacprune.runs import plots
from pacprune.types import Table

LABELS = {"bound": "bound on the error", "test_error": "test error of Q", "alpha": "alpha", "kl_per_n": "log10 KL/n"}


def rows(certificates: Table) -> Table:
    """What the figure has of every certificate."""
    names = ("dataset", "model", "sparsity", "alpha", "seed", "test_error")
    return [
        {name: row[name] for name in names} | {"bound": row["gibbs_certificate"], "kl_per_n": row["kl"] / row["n"]}
        for row in certificates
    ]


def _in_decades(rows: Table) -> Table:
    """The rows with log10 KL/n for KL/n, which runs over decades; a Q that did not move has the least of the others."""
    least = min((row["kl_per_n"] for row in rows if row["kl_per_n"] > 0), default=1.0)
    return [row | {"kl_per_n": math.log10(max(row["kl_per_n"], least))} for row in rows]


def correlations(rows: Table) -> dict[str, float]:
    """r of the pairs that the paper speaks of, as the figure has them, and the mean KL/n of every alpha."""
    columns = {name: [row[name] for row in _in_decades(rows)] for name in LABELS}
    numbers = {
        f"r of {LABELS[x]} and {LABELS[y]}": correlation(columns[x], columns[y]).mean
        for x, y in (("bound", "test_error"), ("bound", "kl_per_n"), ("alpha", "kl_per_n"))
    }
    numbers |= {f"KL/n at alpha {alpha:g}": mean for (alpha,), mean in sorted(means(rows, "kl_per_n", "alpha").items())}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def paint(canvas: Any, rows: Table) -> None:
    """A scatter plot of every pair, and histograms on the diagonal; a colour per alpha, larger where sparser."""
    canvas.set_size_inches(10, 9)
    rows = _in_decades(rows)
    sparsities, alphas = (sorted({row[name] for row in rows}) for name in ("sparsity", "alpha"))
    colours = dict(zip(alphas, painting.PALETTE, strict=False))
    sizes = {sparsity: 14 + 22 * place for place, sparsity in enumerate(sparsities)}
    names = list(LABELS)
    grid = canvas.subplots(len(names), len(names), squeeze=False)
    for y, panels in zip(names, grid, strict=True):
        for x, axes in zip(names, panels, strict=True):
            if x == y:
                values = [[row[x] for row in rows if row["alpha"] == alpha] for alpha in alphas]
                axes.hist(values, bins=12, stacked=True, color=[colours[alpha] for alpha in alphas])
            else:
                _scatter(axes, rows, x, y, colours, sizes)
            if x == "alpha":
                axes.set_xticks(alphas)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(LABELS[x] if y == names[-1] else "", fontsize=9)
            axes.set_ylabel("runs" if x == y else LABELS[y] if x == names[0] else "", fontsize=9)
    marks = [grid[0][0].scatter([], [], color=colours[alpha], label=f"alpha {alpha:g}") for alpha in alphas]
    marks += [grid[0][0].scatter([], [], s=sizes[s], color=plots.GREY, label=f"sparsity {s:g}") for s in sparsities]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    plots.title(
        canvas,
        f"{painting.subject(rows)}: {len(rows)} runs of PAC-Bayes pruning",
        f"weights, data order, drawn networks; {painting.seed_count(rows)} seeds",
    )


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
    if y == "alpha":
        axes.set_yticks(list(colours))
    r = correlation(*places)
    if math.isfinite(r.mean):
        axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=8)
