"""What painters share: styles of methods and criteria, lines with intervals, one sparsity axis, titles."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from pacprune.masking.criteria import CRITERIA
from pacprune.methods.table import METHODS
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.types import Table

SKY, RED = "#56B4E9", "#D55E00"
PALETTE = (plots.BLUE, RED, plots.GREEN, plots.PURPLE, plots.ORANGE, SKY, "black")
"""Colours of values without an order, one after another."""
_CRITERION_COLOURS = {
    "magnitude": plots.BLUE,
    "snip": plots.GREEN,
    "random": RED,
    "grasp": plots.PURPLE,
    "synflow": plots.ORANGE,
}


class Style(NamedTuple):
    """How a line looks."""

    label: str
    colour: str
    marker: str


DENSE = Style("dense", plots.GREY, "p")
"""The network before pruning."""


def method_styles(suffix: str = "") -> dict[str, Style]:
    """The look of every method, as METHODS has it; the suffix goes to the labels."""
    return {name: Style(method.label + suffix, method.colour, method.marker) for name, method in METHODS.items()}


def criterion_colours() -> dict[str, str]:
    """The colour of every criterion; a new one takes the next of the colours that are left."""
    free = cycle([colour for colour in PALETTE if colour not in _CRITERION_COLOURS.values()])
    return {name: _CRITERION_COLOURS.get(name) or next(free) for name in CRITERIA}


def lines(axes: Any, rows: Table, *, x: str, y: str, by: str, styles: Mapping[str, Style]) -> None:
    """One line per value of `by` that the rows have: the mean of y over the rows with equal x, and its interval."""
    for key, style in styles.items():
        places = groups([row for row in rows if row[by] == key], x)
        if not places:
            continue
        along = sorted(place for (place,) in places)
        spans = [interval([row[y] for row in places[place,]]) for place in along]
        means = [span.mean for span in spans]
        axes.plot(along, means, color=style.colour, marker=style.marker, ms=5, lw=1.8, label=style.label)
        if not any(math.isnan(span.low) for span in spans):
            ends = [span.low for span in spans], [span.high for span in spans]
            axes.fill_between(along, *ends, color=style.colour, alpha=0.2, lw=0)


def seed_marks(axes: Any, at: float, values: Sequence[float], style: Style, *, label: str | None = None) -> None:
    """A mark per repetition at one place, and a short line at their mean."""
    look = {"color": style.colour, "marker": style.marker, "label": label, "s": 18, "zorder": 3}
    axes.scatter([at] * len(values), values, **look)
    axes.hlines(sum(values) / len(values), at - 0.1, at + 0.1, color=style.colour)


def sparsity_lines(axes: Any, rows: Table, *, y: str, by: str, styles: Mapping[str, Style]) -> None:
    """`lines` over sparsity, where every factor of kept weights has the same width.

    So 0.98 and 0.99 are as far apart as 0.8 and 0.9.
    """
    placed = [row | {"place": sparsity_place(row["sparsity"])} for row in rows]
    lines(axes, placed, x="place", y=y, by=by, styles=styles)
    ticks = {row["place"]: f"{row['sparsity']:g}" for row in placed}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("sparsity (fraction of the weights pruned)")


def sparsity_place(sparsity: float) -> float:
    """Where a sparsity lies on the axis."""
    return -math.log(1 - sparsity)


def dense_line(axes: Any, values: list[float], label: str = DENSE.label) -> None:
    """A horizontal line at the mean of the dense networks."""
    axes.axhline(interval(values).mean, color="black", lw=1, ls=":", label=label)


def subject(rows: Table) -> str:
    """The data set and the network of the rows."""
    return f"{rows[0]['dataset']}, {rows[0]['model']}"


def over_seeds(rows: Table) -> str:
    """What means and bands are taken over."""
    return f"mean and 95 % interval over {seed_count(rows)} seeds"


def seed_count(rows: Table) -> int:
    """How many repetitions the rows have."""
    return len({row["seed"] for row in rows})


def heading(axes: Any, text: str) -> None:
    """The title of the only axes."""
    axes.set_title(text, loc="left", fontsize=9)


def canvas_heading(canvas: Any, text: str) -> None:
    """The title above several axes."""
    canvas.suptitle(text, x=0.01, ha="left", fontsize=9)
