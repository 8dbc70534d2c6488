"""The paper's flow chart of one-shot pruning, probabilistic fine-tuning and PAC-Bayes pruning, drawn side by side.

Rows of the chart are stages, so that what the procedures share lies side by side, and what they do not have is empty.
"""

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.runs import plots
from pacprune.types import Table

OSP, PFT, PBP = "one-shot pruning (OSP)", "probabilistic fine-tuning (PFT)", "PAC-Bayes pruning (PBP)"


class Box(NamedTuple):
    """One step of a procedure.

    Args:
        procedure: Its column.
        level: Its row, from the top.
        kind: A key of COLOURS.
        stage: The paper's word for it, if any.
        text: What is done.
        data: What it reads, if anything.
    """

    procedure: str
    level: int
    kind: str
    stage: str
    text: str
    data: str


COLOURS = {
    "train": "#D6E6F2",
    "choose": "#F3F3F3",
    "masks": "#FBE3D4",
    "bound": "#E8D9EE",
    "result": "#D9EFE3",
}
_S, _S_P, _REST = "S", "S_P", "S without S_P"
_SYMBOLS = {_S: "$S$", _S_P: "$S_P$", _REST: r"$S \setminus S_P$"}
BOXES = (
    Box(OSP, 0, "train", "stage 1", "train the dense network", _S),
    Box(PFT, 0, "train", "stage 1", "train the dense network", _S),
    Box(PBP, 0, "train", "stage 1", "train the dense network", _S_P),
    Box(OSP, 1, "choose", "", "score the weights: magnitude, SNIP or random; keep the k largest scores", ""),
    Box(
        PFT,
        1,
        "choose",
        "",
        "begin with keep probabilities in two blocks by a criterion, or equal (isotropic)",
        "",
    ),
    Box(PBP, 1, "choose", "", "begin with such keep probabilities, and with noise around the weights", ""),
    Box(PFT, 2, "masks", "stage 2", "train weights and keep probabilities on the Gibbs risk, with random masks", _S),
    Box(PBP, 2, "masks", "stage 2", "train the prior P, its weights and keep probabilities, on the Gibbs risk", _S_P),
    Box(PFT, 3, "choose", "", "keep the k likeliest weights", ""),
    Box(PBP, 3, "choose", "", "write P down; nothing is thresholded", ""),
    Box(OSP, 4, "train", "", "fine-tune the sparse network", _S),
    Box(PFT, 4, "train", "", "fine-tune the sparse network", _S),
    Box(PBP, 4, "bound", "stage 3", "train the posterior Q from P on the PAC-Bayes bound", _REST),
    Box(OSP, 5, "result", "", "a sparse network", ""),
    Box(PFT, 5, "result", "", "a sparse network", ""),
    Box(PBP, 5, "result", "", "a sparse random network Q, and a bound on its error", ""),
)
SETTINGS: dict[str, tuple[Setting[None], ...]] = dict.fromkeys(("smoke", "reduced", "paper"), (Setting(options=None),))
"""Nothing is computed at any scale."""


def figures(setting: Setting[None], job: Job) -> Iterator[Figure]:
    """The chart."""
    yield Figure(
        "flow-chart",
        "The stages of one-shot pruning, probabilistic fine-tuning and PAC-Bayes pruning. S is the training set, S_P "
        "the part of it that makes the prior.",
        lambda: [box._asdict() for box in BOXES],
        paint,
    )


WIDE, HIGH = 0.86, 0.66
"""Size of a box, where columns and rows are 1 apart."""


def paint(canvas: Any, rows: Table) -> None:
    """A column per procedure, boxes from top to bottom, an arrow from each to the next."""
    columns = list(dict.fromkeys(row["procedure"] for row in rows))
    canvas.set_size_inches(3.5 * len(columns), 8.2)
    axes = canvas.subplots()
    axes.set_axis_off()
    last = int(max(row["level"] for row in rows))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(last + 0.5, -0.85)
    for column, name in enumerate(columns):
        axes.text(column, -0.6, name, ha="center", va="center", weight="bold", fontsize=10)
        levels = [int(row["level"]) for row in rows if row["procedure"] == name]
        _paint_arrows(axes, column, sorted(levels))
    for row in rows:
        _paint_box(axes, columns.index(row["procedure"]), row)
    painting.canvas_heading(canvas, "What the procedures share, and what they do not")


def _paint_box(axes: Any, column: int, row: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    low = (column - WIDE / 2, row["level"] - HIGH / 2)
    look = {"facecolor": COLOURS[row["kind"]], "edgecolor": plots.GREY, "lw": 1}
    axes.add_patch(FancyBboxPatch(low, WIDE, HIGH, boxstyle="round,pad=0,rounding_size=0.05", **look))
    source = f"on {_SYMBOLS[row['data']]}" if row["data"] else ""
    title = ", ".join(part for part in (row["stage"], source) if part)
    lines = textwrap.wrap(row["text"], 38)
    if title:
        axes.text(column, row["level"] - 0.2, title, ha="center", va="center", fontsize=8, weight="bold")
    axes.text(column, row["level"] + (0.08 if title else 0), "\n".join(lines), ha="center", va="center", fontsize=9)


def _paint_arrows(axes: Any, column: int, levels: Sequence[int]) -> None:
    """From the lower edge of every box to the upper edge of the next, however far it is."""
    for level, following in itertools.pairwise(levels):
        ends = {"xytext": (column, level + HIGH / 2), "xy": (column, following - HIGH / 2)}
        axes.annotate("", **ends, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.2})
