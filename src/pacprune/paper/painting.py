"""What painters share: styles of methods and criteria, lines with intervals, axes of sparsities and errors, titles."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from pacprune.masking.criteria import CRITERIA
from pacprune.methods.table import METHODS
from pacprune.paper.frame import Setting
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.types import Table

SKY, RED = "#56B4E9", "#D55E00"
PALETTE = (plots.BLUE, RED, plots.GREEN, plots.PURPLE, plots.ORANGE, SKY, "black")
"""Colours of values without an order, one after another."""
GAP, SPREAD = 3.5, 30.0
"""Points between lines that lie side by side, and between the first and the last of them at most."""
NAMES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "tinyshakespeare": "Tiny Shakespeare",
    "mlp": "MLP",
    "lenet5": "LeNet-5",
    "resnet20": "ResNet20",
    "wide-resnet": "wide ResNet",
    "convnext": "ConvNeXt",
    "vgg": "VGG",
    "vit": "ViT",
    "mixer": "Mixer",
    "lstm": "LSTM",
    "gpt": "GPT",
    "snip": "SNIP",
    "grasp": "GraSP",
    "synflow": "SynFlow",
}
"""Data sets, networks and criteria as people write them, by their names in code; others are written the same."""
FAR = 4.0
"""Errors that differ by a larger factor have a logarithmic axis."""
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


def named(*codes: str) -> str:
    """Data sets, networks and criteria as people write them, with commas between."""
    return ", ".join(NAMES.get(code, code) for code in codes)


def lines(
    axes: Any, rows: Table, *, x: str, y: str, by: str, styles: Mapping[str, Style], side_by_side: bool = False
) -> None:
    """One line per value of `by` that the rows have: the mean of y over the rows with equal x, and its interval.

    Intervals are bands. Lines that lie `side_by_side` have bars, every line is moved a little to a side of its own, and
    every second one is dashed, so that none hides another.
    """
    present = [(key, style) for key, style in styles.items() if any(row[by] == key for row in rows)]
    for number, (key, style) in enumerate(present):
        places = groups([row for row in rows if row[by] == key], x)
        along = sorted(place for (place,) in places)
        spans = [interval([row[y] for row in places[place,]]) for place in along]
        where = moved_aside(axes, number, len(present)) if side_by_side else axes.transData
        look = {"color": style.colour, "transform": where}
        dash = dash_of(number) if side_by_side else "-"
        line = {"marker": style.marker, "ms": 5, "lw": 1.8, "ls": dash, "label": style.label}
        axes.plot(along, [span.mean for span in spans], **line, **look)
        axes.update_datalim([(place, span.mean) for place, span in zip(along, spans, strict=True)])
        if any(math.isnan(span.low) for span in spans):
            continue
        ends = [span.low for span in spans], [span.high for span in spans]
        if side_by_side:
            axes.vlines(along, *ends, lw=1.1, alpha=0.7, **look)
        else:
            axes.fill_between(along, *ends, alpha=0.2, **(look | {"lw": 0}))


def moved_aside(axes: Any, number: int, count: int) -> Any:
    """The transform of the data for one of so many lines side by side, which together are at most SPREAD wide.

    Axes do not see what is drawn by it: call update_datalim with the points.
    """
    from matplotlib.transforms import offset_copy

    gap = min(GAP, SPREAD / count)
    return offset_copy(axes.transData, fig=axes.figure, x=gap * (number - (count - 1) / 2), units="points")


def dash_of(number: int) -> Any:
    """How one of several lines side by side is drawn: every second one is dashed."""
    return (0, (5, 2)) if number % 2 else "-"


def seed_marks(axes: Any, at: float, values: Sequence[float], style: Style, *, label: str | None = None) -> None:
    """A mark per repetition at one place, and a short line at their mean."""
    look = {"color": style.colour, "marker": style.marker, "label": label, "s": 18, "zorder": 3}
    axes.scatter([at] * len(values), values, **look)
    axes.hlines(sum(values) / len(values), at - 0.1, at + 0.1, color=style.colour)


def sparsity_lines(axes: Any, rows: Table, *, y: str, by: str, styles: Mapping[str, Style]) -> None:
    """`lines` side by side over sparsity, where every factor of kept weights has the same width.

    So 98 and 99 % are as far apart as 80 and 90 %.
    """
    placed = [row | {"place": sparsity_place(row["sparsity"])} for row in rows]
    lines(axes, placed, x="place", y=y, by=by, styles=styles, side_by_side=True)
    sparsity_ticks(axes, [row["sparsity"] for row in rows])


def sparsity_ticks(axes: Any, sparsities: Iterable[float]) -> None:
    """Ticks at these sparsities, on an axis of `sparsity_place`."""
    levels = sorted(set(sparsities))
    places = [sparsity_place(level) for level in levels]
    room = 0.08 * (places[-1] - places[0]) or 0.5  # for lines that are moved aside
    axes.set_xlim(places[0] - room, places[-1] + room)
    axes.set_xticks(places, [f"{100 * level:g}" for level in levels])
    axes.set_xlabel("sparsity in % (weights pruned)")


def in_percent(axis: Any) -> None:
    """Labels the ticks of fractions in %."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def error_axis(axes: Any, values: Iterable[float], label: str = "test error in %") -> None:
    """An axis of errors in % that has room for these values, as means are.

    It is logarithmic where they lie far apart: else one that is large would press all others together. Intervals may
    go beyond it, since those of few seeds go beyond any error.
    """
    errors = sorted(values)
    low, high = errors[0], errors[-1]
    axes.set_ylabel(label)
    if high > FAR * max(low, 1e-4):
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(max(low, 1e-4) / 1.2, min(1.2 * high, 1.0))
    else:
        room = (high - low) or 0.1 * high or 0.01
        axes.set_ylim(max(0.0, low - 0.15 * room), high + 0.25 * room)
    in_percent(axes.yaxis)


def sparsity_place(sparsity: float) -> float:
    """Where a sparsity lies on the axis."""
    return -math.log(1 - sparsity)


def dense_line(axes: Any, values: list[float], label: str = DENSE.label) -> None:
    """A horizontal line at the mean of the dense networks."""
    axes.axhline(interval(values).mean, color="black", lw=1, ls=":", label=label)


def label_ends(axes: Any) -> None:
    """The labels of the lines where these end on the right, in place of a legend; call it when the axes have limits."""
    axes.autoscale_view()  # where nobody has set them
    place = axes.transScale + axes.transLimits
    ends = [
        (float(place.transform((line.get_xdata()[-1], line.get_ydata()[-1]))[1]), line)
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    ]
    ends = sorted(((min(max(height, 0.0), 1.0), line) for height, line in ends), key=lambda end: end[0])
    heights = apart([height for height, _ in ends], 0.18 / axes.figure.get_figheight())  # 13 points of text
    for height, (_, line) in zip(heights, ends, strict=True):
        look = {"color": line.get_color(), "transform": axes.transAxes}
        axes.plot([1.02], [height], marker=line.get_marker(), ms=5, clip_on=False, **look)
        axes.text(1.04, height, line.get_label(), fontsize=8.5, va="center", **look)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, from the lowest up; those that are nearer than the gap are spread around their middle."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and min(_spread(clusters[-1], gap)) < max(_spread(clusters[-2], gap)) + gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [place for cluster in clusters for place in _spread(cluster, gap)]


def _spread(cluster: Sequence[float], gap: float) -> list[float]:
    """As many heights around the middle of the cluster."""
    middle = sum(cluster) / len(cluster)
    return [middle + gap * (place - (len(cluster) - 1) / 2) for place in range(len(cluster))]


def network(setting: Setting[Any]) -> str:
    """The data set and the network of a setting."""
    return named(setting.data, setting.model)


def subject(rows: Table) -> str:
    """The data set and the network of the rows."""
    return named(rows[0]["dataset"], rows[0]["model"])


def over_seeds(rows: Table) -> str:
    """What means and bands are taken over."""
    count = seed_count(rows)
    return f"mean and 95 % interval over {count} seeds" if count > 1 else "one seed"


def seed_count(rows: Table) -> int:
    """How many repetitions the rows have."""
    return len({row["seed"] for row in rows})


def heading(axes: Any, text: str) -> None:
    """The title of the only axes."""
    axes.set_title(text, loc="left", fontsize=9)


def canvas_heading(canvas: Any, text: str) -> None:
    """The title above several axes."""
    canvas.suptitle(text, x=0.01, ha="left", fontsize=9)
