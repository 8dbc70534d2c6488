"""The picture of the README: learned masks against one-shot ones, and drops in accuracy against their certified limits.

Nothing is computed. The rows are those of published CSVs, so this recipe needs a checkout of the repository.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, read
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.types import Table

RESULTS = Path(__file__).parents[3] / "results"
"""The published rows, in a checkout of the repository."""
ERRORS, GUARANTEES = "errors", "guarantees"
"""The two halves of the picture."""
_NETWORKS = {
    f"{data}-{model}": f"{painting.named(data)}\n{painting.named(model)}"
    for data, model in (("mnist", "lenet5"), ("fashion-mnist", "lenet5"), ("cifar10", "resnet20"))
}
_ONE_SHOT, _PFT, _GMP = "osp", "pft-coupled", "gmp"
SETTINGS: dict[str, tuple[Setting[None], ...]] = dict.fromkeys(("smoke", "reduced", "full"), (Setting(options=None),))
"""Every scale draws the same."""


def figures(setting: Setting[None], job: Job) -> Iterator[Figure]:
    """The picture."""
    yield Figure(
        "overview",
        "Left: test error of a ResNet20 on CIFAR-10, one-shot pruning by five criteria, probabilistic fine-tuning from "
        "the same five starts, and gradual magnitude pruning. Right: how much accuracy networks of pp.compress lose on "
        "test data, beside the limit that is proved.",
        rows,
        paint,
    )


def rows() -> Table:
    """The rows of both halves, from the CSVs in results/."""
    if not RESULTS.is_dir():
        raise ValueError(f"{RESULTS} is not there, and this picture is drawn from its files; run in a checkout")
    published = read(RESULTS / "pft-vs-osp.csv")
    drawn = [
        {"half": ERRORS, "line": f"{row['method']}/{row['criterion']}", "seed": row["seed"]}
        | {"sparsity": row["sparsity"], "value": row["test_error"]}
        for row in published
        if row["dataset"] == "cifar10" and row["method"] in (_ONE_SHOT, _PFT, _GMP)
    ]
    for network in _NETWORKS:
        drawn += [
            {"half": GUARANTEES, "line": network, "seed": row["seed"], "limit": row["limit"]}
            | {"sparsity": row["sparsity"] or 0.0, "value": row["test_value"]}
            for row in read(RESULTS / f"compress-{network}.csv")
            if (row["risk"], row["arm"]) == ("drop", "chain")
        ]
    return drawn


def paint(canvas: Any, rows: Table) -> None:
    """Errors on the left, guarantees on the right."""
    canvas.set_size_inches(10, 4)
    left, right = canvas.subplots(1, 2, width_ratios=(1.15, 1))
    _paint_errors(left, [row for row in rows if row["half"] == ERRORS])
    _paint_guarantees(right, [row for row in rows if row["half"] == GUARANTEES])


def _paint_errors(axes: Any, rows: Table) -> None:
    """A line per method and start; the label at its end."""
    ours, gradual = plots.colour("pft"), plots.colour("gmp")
    looks = {_ONE_SHOT: ("#9A9A9A", "-", 1.4), _PFT: (ours, "-", 1.8), _GMP: (gradual, "--", 1.8)}
    labels = {}
    for line, members in _by(rows, "line").items():
        method, criterion = line.split("/")
        colour, style, width = looks[method]
        means = {
            place: interval([r["value"] for r in same]).mean for (place,), same in groups(members, "sparsity").items()
        }
        along = sorted(means)
        axes.plot(
            [painting.sparsity_place(s) for s in along], [means[s] for s in along], color=colour, ls=style, lw=width
        )
        labels[line] = (means[along[-1]], criterion, method, colour)
    painting.sparsity_ticks(axes, [row["sparsity"] for row in rows])
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.42 * (high - low))
    texts = [(y, painting.named(name), colour) for y, name, m, colour in labels.values() if m == _ONE_SHOT]
    texts += [(y, "gradual (GMP)", colour) for y, _, m, colour in labels.values() if m == _GMP]
    learned = [y for y, _, m, _ in labels.values() if m == _PFT]
    texts.append((sum(learned) / len(learned), "PFT, from all five", ours))
    for y, (_, text, colour) in zip(
        painting.apart([y for y, _, _ in sorted(texts)], 0.026), sorted(texts), strict=True
    ):
        axes.text(high, y, text, color=colour if colour != "#9A9A9A" else "#6A6A6A", va="center", fontsize=8.5)
    axes.set_ylabel("test error in %")
    axes.set_xlabel("weights pruned in %", x=0.36)
    painting.in_percent(axes.yaxis)
    axes.set_ylim(bottom=0.08)
    axes.set_title("Grey: one-shot pruning by five criteria", loc="left", fontsize=10)


def _paint_guarantees(axes: Any, rows: Table) -> None:
    """Per network and limit: what every seed lost, the limit as a line, and how many weights are left."""
    networks, place = _by(rows, "line"), 0.0
    ticks = []
    for members in networks.values():
        first = place
        for limit, same in sorted(_by(members, "limit").items()):
            axes.hlines(limit, place - 0.36, place + 0.36, color="black", lw=2.5)
            measured = [row["value"] for row in same if row["sparsity"]]  # nothing proved: the dense network stays
            axes.scatter([place] * len(measured), measured, s=16, color=plots.colour("pft"), zorder=3)
            left = 1 - interval([row["sparsity"] for row in same]).mean
            share = f"{100 * left:.0f} %" if left >= 0.095 else f"{100 * left:.1f} %"
            axes.text(place, limit + 0.0006, share, ha="center", va="bottom", fontsize=8, color="#444444")
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.6
    axes.axhline(0, color="#BBBBBB", lw=0.8)
    axes.set_xticks(ticks, [_NETWORKS[network] for network in networks])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy lost, in points")
    painting.in_percent(axes.yaxis)
    axes.set_ylim(top=0.0235)
    axes.set_title(
        "Lines: the limit that is proved, and the weights left\nDots: measured on test data", loc="left", fontsize=10
    )


def _by(rows: Table, name: str) -> dict[Any, Table]:
    """The rows by the value of a column, in their order."""
    return {value: [row for row in rows if row[name] == value] for value in dict.fromkeys(row[name] for row in rows)}
