"""How bound, test error, alpha and KL/n go together over a table of certificates: the paper's pair plot."""

import math
from typing import Any

from pacprune.paper import frame
from pacprune.runs import plots
from pacprune.types import Table

SHOWN = {"bound": "bound on the error", "test_error": "test error of Q", "alpha": "alpha", "kl_per_n": "log10 KL/n"}


def rows(certificates: Table) -> Table:
    """What the figure has of every certificate."""
    kept = ("dataset", "model", "sparsity", "alpha", "seed", "test_error")
    return [
        {name: row[name] for name in kept} | {"bound": row["gibbs_certificate"], "kl_per_n": row["kl"] / row["n"]}
        for row in certificates
    ]


def _in_decades(found: Table) -> Table:
    """The rows with log10 KL/n for KL/n, which runs over decades; a Q that did not move has the least of the others."""
    least = min((row["kl_per_n"] for row in found if row["kl_per_n"] > 0), default=1.0)
    return [row | {"kl_per_n": math.log10(max(row["kl_per_n"], least))} for row in found]


def correlations(found: Table) -> dict[str, float]:
    """r of the pairs that the paper speaks of, as the figure has them, and the mean KL/n of every alpha."""
    column = {name: [row[name] for row in _in_decades(found)] for name in SHOWN}
    numbers = {
        f"r of {SHOWN[one]} and {SHOWN[two]}": frame.correlation(column[one], column[two]).mean
        for one, two in (("bound", "test_error"), ("bound", "kl_per_n"), ("alpha", "kl_per_n"))
    }
    for alpha in sorted(set(column["alpha"])):
        own = [row["kl_per_n"] for row in found if row["alpha"] == alpha]
        numbers[f"KL/n at alpha {alpha:g}"] = frame.interval(own).mean
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def paint(canvas: Any, found: Table) -> None:
    """A scatter plot of every pair, and histograms on the diagonal; a colour per alpha, larger where sparser."""
    canvas.set_size_inches(10, 9)
    names, alphas = list(SHOWN), sorted({row["alpha"] for row in found})
    colours = dict(zip(alphas, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False))
    sparsities = sorted({row["sparsity"] for row in found})
    size = {sparsity: 14 + 22 * place for place, sparsity in enumerate(sparsities)}
    found = _in_decades(found)
    grid = canvas.subplots(len(names), len(names), squeeze=False)
    for i, below in enumerate(names):
        for j, along in enumerate(names):
            axes = grid[i][j]
            if i == j:
                values = [[row[along] for row in found if row["alpha"] == alpha] for alpha in alphas]
                axes.hist(values, bins=12, stacked=True, color=[colours[alpha] for alpha in alphas])
            else:
                axes.scatter(
                    [row[along] for row in found],
                    [row[below] for row in found],
                    s=[size[row["sparsity"]] for row in found],
                    color=[colours[row["alpha"]] for row in found],
                    alpha=0.7,
                    lw=0,
                )
                r = frame.correlation([row[along] for row in found], [row[below] for row in found])
                if math.isfinite(r.mean):
                    axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=8)
            if along == "alpha":
                axes.set_xticks(alphas)
            if below == "alpha" and i != j:
                axes.set_yticks(alphas)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(SHOWN[along] if i == len(names) - 1 else "", fontsize=9)
            axes.set_ylabel("runs" if i == j else SHOWN[below] if j == 0 else "", fontsize=9)
    marks = [grid[0][0].scatter([], [], color=colours[alpha], label=f"alpha {alpha:g}") for alpha in alphas]
    marks += [grid[0][0].scatter([], [], s=size[s], color="#7F7F7F", label=f"sparsity {s:g}") for s in sparsities]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    plots.title(
        canvas,
        f"{found[0]['dataset']}, {found[0]['model']}: {len(found)} runs of PAC-Bayes pruning",
        f"weights, data order, drawn networks; {len({row['seed'] for row in found})} seeds",
    )
