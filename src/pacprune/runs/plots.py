"""Figures of a run folder, each with the CSV behind it; without matplotlib the CSVs alone are written."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from pacprune import bounds
from pacprune.bounds import Ledger
from pacprune.bounds.numeric import rounded_up
from pacprune.certification.certificate import Certificate
from pacprune.certification.decode import load as load_certificate
from pacprune.files import write_atomically
from pacprune.kernels.law import LOGIT_MAX
from pacprune.methods.table import METHODS
from pacprune.runs import store
from pacprune.types import Table

HINT = 'no figures were drawn, since matplotlib is not installed: pip install "pacprune[plot]"'
# Okabe and Ito's colours: colour-blind readers can distinguish them.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#7F7F7F"
STAGES = {"dense": GREY, "masks": ORANGE, "prior": ORANGE, "posterior": PURPLE, "tune": BLUE}
DENSE = "#CCCCCC"
"""The colour of the network before pruning; those of the methods are in METHODS."""


def colour(method: str) -> str:
    """The colour of a row, by its method or `dense`."""
    return DENSE if method == "dense" else METHODS[method].colour


def percent(value: float) -> str:
    """A fraction in percent, to a hundredth."""
    return f"{100.0 * value:.2f} %"


def percent_up(value: float) -> str:
    """A bound in percent, rounded up as everywhere."""
    return percent(float(rounded_up(value)))


def called(method: str) -> str:
    """How people call the method of a row."""
    return method if method == "dense" else METHODS[method].label


@dataclass(frozen=True)
class Figure:
    """One figure of a report: its files and what a reader should see in it."""

    name: str
    caption: str
    csv: Path
    png: Path | None


def draw(folder: Path, result: dict[str, Any], out: Path) -> list[Figure]:
    """Writes OUT/figures/NAME.csv and, with matplotlib, figures/NAME.png for everything the run has to show."""
    figures = []
    for name, (table, caption, paint) in _PLOTS.items():
        rows = table(folder, result)
        if not rows:
            continue
        path = out / "figures" / f"{name}.csv"
        write_atomically(path, csv_of(rows))
        picture = png_of(paint, rows)
        if picture is not None:
            write_atomically(path.with_suffix(".png"), picture)
        figures.append(Figure(name, caption, path, None if picture is None else path.with_suffix(".png")))
    return figures


def certificate_of(folder: Path) -> Certificate | None:
    """The certificate in a run folder, where there is one."""
    path = folder / store.CERTIFICATE
    return load_certificate(path) if path.exists() else None


def csv_of(rows: Table) -> bytes:
    """The rows as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, fieldnames=list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def title(canvas: Any, what: str, random: str) -> None:
    """The title says what is shown and what was random in it."""
    canvas.suptitle(f"{what} (random: {random})", x=0.01, ha="left", fontsize=11)


def png_of(paint: Callable[[Any, Table], None], rows: Table) -> bytes | None:
    """The painted figure as a PNG file; None without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return None
    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(style):
        canvas = Canvas(layout="constrained")
        paint(canvas, rows)
        content = io.BytesIO()
        canvas.savefig(content, format="png", dpi=130)
    return content.getvalue()


# --- The chain of `compress`.


def _compression_table(folder: Path, result: dict[str, Any]) -> Table:
    return result.get("points", [])


def draw_compression(points: Table, path: Path) -> None:
    """Draws the chain of `pp.compress` as a PNG file."""
    picture = png_of(_compression, points)
    if picture is None:
        raise ValueError(HINT)
    write_atomically(path, picture)


_SPARSITY_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


def _compression(canvas: Any, rows: Table) -> None:
    canvas.set_size_inches(7, 3.8)
    axes = canvas.subplots()
    places = [-np.log1p(-row["sparsity"]) for row in rows]
    axes.plot(places, [row["validation_risk"] for row in rows], color=GREY, lw=1, marker=".", label="validation part")
    for label, colour, marker, passed in (("passed", BLUE, "o", True), ("failed", ORANGE, "X", False)):
        points = [(place, row["risk"]) for place, row in zip(places, rows, strict=True) if row["passed"] is passed]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, ms=8, label=f"bound set, {label}")
    bounded = [(place, row["bound"]) for place, row in zip(places, rows, strict=True) if row["bound"] is not None]
    if bounded:
        axes.plot(*zip(*bounded, strict=True), "_", color="black", ms=12, mew=2, label="bound")
    proved = ": proved of all that passed" if any(row["passed"] for row in rows) else ", which is not proved"
    axes.axhline(rows[0]["limit"], color="black", lw=1, ls="--", label=f"limit{proved}")
    ticks = [tick for tick in _SPARSITY_TICKS if -np.log1p(-tick) <= max(places) + 0.05]
    axes.set_xticks(-np.log1p(-np.array(ticks)), [f"{100 * tick:g}" for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
    axes.set_xlabel("weights pruned, in %")
    axes.set_ylabel("risk that is limited, in %")
    canvas.legend(ncols=3, loc="outside lower center", fontsize=9)
    title(canvas, "How far the network can be pruned", "bound examples, split, weights, data order")


# --- Test error of every method (where there is more than one to compare).


def _methods_table(folder: Path, result: dict[str, Any]) -> Table:
    return result["rows"] if len(result["rows"]) > 1 else []


def _methods(canvas: Any, rows: Table) -> None:
    canvas.set_size_inches(7, 0.6 + 0.55 * len(rows))
    axes = canvas.subplots()
    names = [f"{called(row['method'])} ({100 * row['sparsity']:.0f} % pruned)" for row in rows]
    values = [100 * row["test_error"] for row in rows]
    axes.barh(names, values, height=0.6, color=[colour(row["method"]) for row in rows])
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:.2f} %", va="center")
    markers = {"certificate": ("D", "certificate"), "held_out": ("s", "held-out baseline")}
    for key, (marker, label) in markers.items():
        points = [(100 * row[key], place) for place, row in enumerate(rows) if row[key] is not None]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker,
                color="black",
                mfc="none" if key == "held_out" else "black",
                label=label,
            )
            axes.legend(loc="upper right")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.set_xlabel("test examples that are wrong, in %")
    title(canvas, "Test error of one run", "split, weights, data order, draws")


# --- Training curves.


def _curves_table(folder: Path, result: dict[str, Any]) -> Table:
    steps: dict[str, int] = {}
    rows = []
    for row in store.metrics(folder):
        method = row.get("method", result["rows"][-1]["method"])  # only the demo has rows of several methods
        steps[method] = steps.get(method, 0) + 1
        rows.append(
            {
                "method": method,
                "stage": row["stage"],
                "epoch": steps[method],
                "loss": row["loss"],
                "sparsity": row.get("expected_sparsity", row.get("sparsity", 0.0)),
            }
        )
    return rows


def _curves(canvas: Any, rows: Table) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    canvas.set_size_inches(max(6.5, 2 * len(methods)), 4.2)
    grid = canvas.subplots(2, len(methods), sharex="col", sharey="row", squeeze=False)
    for (above, below), method in zip(grid.T, methods, strict=True):
        method_rows = [row for row in rows if row["method"] == method]
        for stage in dict.fromkeys(row["stage"] for row in method_rows):
            part = [row for row in method_rows if row["stage"] == stage]
            x = [row["epoch"] for row in part]
            # The rounds of imp have no colour.
            style = {"color": STAGES.get(stage, BLUE), "lw": 2, "marker": ".", "ms": 5}
            above.plot(x, [row["loss"] for row in part], label=stage, **style)
            below.plot(x, [100 * row["sparsity"] for row in part], **style)
        above.set_yscale("log")
        above.set_title(called(method), loc="left")
        above.legend(fontsize=8)
        below.set_xlabel("epoch")
        below.xaxis.get_major_locator().set_params(integer=True)
        below.set_ylim(-3, 103)
    grid[0][0].set_ylabel("training loss")
    grid[1][0].set_ylabel("pruned, in %")
    title(canvas, "Training of one run", "weights, data order, sampled masks")


# --- Sparsity per layer.


def _layers_table(folder: Path, result: dict[str, Any]) -> Table:
    rows = []
    for method in (row["method"] for row in result["rows"]):
        path = folder / (f"model-{method}.safetensors" if result["command"] == "demo" else "model.safetensors")
        if method == "dense" or not path.exists():
            continue
        for name, weight in sorted(load_file(path).items(), key=_natural):
            if weight.ndim >= 2:
                pruned = float((weight == 0).mean())
                rows.append({"method": method, "layer": name, "weights": weight.size, "sparsity": pruned})
    return rows


def _natural(item: tuple[str, Any]) -> list[int | str]:
    """Sorts 2.weight before 10.weight; a file does not keep the order of the network."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _layers(canvas: Any, rows: Table) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    canvas.set_size_inches(7, 1.1 + 0.2 * len(layers) * (1 + len(methods) / 2))
    axes = canvas.subplots()
    height = 0.8 / len(methods)
    for number, method in enumerate(methods):
        layer_rows = {row["layer"]: row for row in rows if row["method"] == method}
        places = [place + (number + 0.5) * height - 0.4 for place in range(len(layers))]
        axes.barh(
            places,
            [100 * layer_rows[layer]["sparsity"] for layer in layers],
            height * 0.9,
            color=colour(method),
            label=called(method),
        )
    sizes = {row["layer"]: row["weights"] for row in rows}
    axes.set_yticks(range(len(layers)), [f"{layer}\n({sizes[layer]:,})" for layer in layers], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("weights of the layer that are zero, in %")
    title(canvas, "Where the zeros of the saved network are", "weights, data order, sampled masks")
    if len(methods) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


# --- Keep probabilities of P and Q.

_EDGES = np.linspace(-LOGIT_MAX, LOGIT_MAX, 57)


def _keep_table(folder: Path, result: dict[str, Any]) -> Table:
    certificate = certificate_of(folder)
    tensors = certificate.tensors.get("distributions.safetensors") if certificate else None
    if tensors is None:
        return []
    counts = {}
    for part in ("prior", "posterior"):
        values = [t.numpy().reshape(-1) for name, t in tensors.items() if name.startswith(f"{part}/keep_prob/")]
        p = np.concatenate(values).astype(np.float64)
        counts[part] = np.histogram(np.clip(np.log(p) - np.log1p(-p), _EDGES[0], _EDGES[-1]), _EDGES)[0]
    chance = 1 / (1 + np.exp(-_EDGES))
    return [
        {"from": float(chance[i]), "to": float(chance[i + 1]), **{part: int(n[i]) for part, n in counts.items()}}
        for i in range(len(_EDGES) - 1)
    ]


def _keep(canvas: Any, rows: Table) -> None:
    canvas.set_size_inches(7, 3)
    axes = canvas.subplots()
    axes.stairs([row["prior"] for row in rows], _EDGES, fill=True, color=ORANGE, alpha=0.55, label="prior P")
    axes.stairs([row["posterior"] for row in rows], _EDGES, color=PURPLE, lw=2, label="posterior Q")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    ticks = {"1e-5": 1e-5, "0.001": 1e-3, "0.1": 0.1, "0.5": 0.5, "0.9": 0.9, "0.999": 0.999, "1-1e-5": 1 - 1e-5}
    axes.set_xticks([np.log(p / (1 - p)) for p in ticks.values()], list(ticks))
    axes.set_xlabel("keep probability (logit scale)")
    axes.set_ylabel("number of weights")
    axes.legend(loc="upper center")
    title(canvas, "Chance of each weight to be kept in a drawn network", "weights, data order")


# --- What a certificate is made of.


def _certificate_table(folder: Path, result: dict[str, Any]) -> Table:
    certificate = certificate_of(folder)
    if certificate is None or certificate.limit is not None:  # whose tests the figure of the chain shows
        return []
    record, total = certificate.record, certificate.bounds
    if record["kind"] == "risk":
        risk, bound = certificate.risk, certificate.bound
        row = {"certificate": "this network", "empirical risk": risk, "confidence": bound - risk, "total": bound}
        return [row] if risk >= 0 else []  # the bars begin at 0
    held_out_risk, held_out = record["reference"]["errors"] / certificate.n, total["held_out"]
    reference = {"empirical risk": held_out_risk, "confidence": held_out - held_out_risk, "total": held_out}
    if record["kind"] == "held-out":
        return [{"certificate": "this network", **reference}]
    delta = Ledger.from_dict(record["bounds"]["seeger"]["ledger"]).pac_bayes_each
    rows = []
    for distribution, key, name in (("posterior", "seeger", "posterior Q"), ("prior", "q_equals_p", "prior P (Q = P)")):
        estimate = record["monte_carlo"][distribution]
        upper = estimate["risk_upper"]
        risk = min(estimate["risk"], upper)  # the plain mean is noisier than what the bound is made from
        free = min(total[key], bounds.seeger(upper, n=certificate.n, kl=0.0, delta=delta))
        pieces = {"empirical risk": risk, "Monte Carlo": upper - risk, "confidence": free - upper}
        rows.append({"certificate": name, **pieces, "KL": total[key] - free, "total": total[key]})
    if (family := record["claim"]["family"]) != "seeger":
        rows.insert(0, {"certificate": f"posterior Q, {family}", "total": certificate.bound})
    return [*rows, {"certificate": "held-out baseline", **reference}]


def _certificate(canvas: Any, rows: Table) -> None:
    canvas.set_size_inches(7, 1.4 + 0.4 * len(rows))
    axes = canvas.subplots()
    colours = {"empirical risk": BLUE, "Monte Carlo": ORANGE, "confidence": "#56B4E9", "KL": PURPLE}
    for place, row in enumerate(rows):
        start = 0.0
        for key, colour in colours.items():
            axes.barh(place, 100 * row.get(key, 0.0), 0.6, left=start, color=colour)
            start += 100 * row.get(key, 0.0)
        if not start:
            axes.barh(place, 100 * row["total"], 0.6, color="#D0D0D0")
        axes.text(100 * row["total"], place, f" {percent_up(row['total'])}", va="center")
    axes.set_yticks(range(len(rows)), [row["certificate"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("bound on the error rate on new data, in %")
    pieces = [key for key in colours if any(key in row for row in rows)]
    blocks = [axes.barh(0, 0, color=colours[key]) for key in pieces]
    canvas.legend(blocks, pieces, ncols=4, loc="outside lower center", fontsize=9)
    title(canvas, "What the certificate is made of", "bound examples, drawn networks")


_PLOTS: dict[str, tuple[Callable[[Path, dict[str, Any]], Table], str, Callable[[Any, Table], None]]] = {
    "compression": (
        _compression_table,
        "The risk of every network of the chain: on the validation part, by which the order was chosen, and on the "
        "bound set, on which the densest is tested first, until one fails. Of every network that passed, the limit is "
        "proved.",
        _compression,
    ),
    "methods": (
        _methods_table,
        "How often each network is wrong on test examples that no training has seen. A certificate of the error, where "
        "one is drawn, is a promise about all new data, so it should lie above the test error.",
        _methods,
    ),
    "certificate": (
        _certificate_table,
        "A certificate, piece by piece: the error on the bound examples, the price of confidence and, for networks "
        "drawn at random (by Seeger and Maurer's bound), the price of sampling and the KL(Q||P) that was paid. "
        "Each total holds by itself.",
        _certificate,
    ),
    "layers": (
        _layers_table,
        "How sparse each layer is; the layers need not be equally so. In brackets: the weights of the layer.",
        _layers,
    ),
    "curves": (
        _curves_table,
        "The training loss per stage, and the sparsity (the expected one wherever the mask is random). In the "
        "posterior stage the loss is the bound itself, which is why its scale differs.",
        _curves,
    ),
    "keep_prob": (
        _keep_table,
        "How sure the random masks are: a weight far to the left is nearly always pruned, one far to the right nearly "
        "always kept.",
        _keep,
    ),
}
"""Name -> (rows of the CSV, caption, painter); a report shows them in this order."""
