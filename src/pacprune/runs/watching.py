"""`pacprune monitor`: examples from a CSV file, the state of a monitor in a folder, and the figure of its course."""

import csv
from pathlib import Path
from typing import Any

from pacprune.certification.monitor import Monitor
from pacprune.files import write_atomically
from pacprune.runs import plots, store
from pacprune.types import Table

STATE = "monitor.json"
COLUMNS = ["example", "loss"]
"""Of a CSV file of new examples: the number of the example since the monitor began, and its loss in [0, 1]."""


def watch(certificate: str, *, counts: Path | None, alpha: float, out: Path) -> dict[str, Any]:
    """Feeds a file of new examples to the monitor in a folder, and draws its course.

    Args:
        certificate: Folder of a certificate or of its run, or a limit in digits.
        counts: CSV file with COLUMNS; None counts nothing.
        alpha: Probability with which there is ever a false alarm.
        out: Folder of the state and the figure.

    Returns:
        What is known now, for JSON.
    """
    monitor = Monitor(_limit_or_folder(certificate), alpha=alpha, path=out / STATE)
    course = None
    if counts is not None:
        first, losses = read(counts)
        monitor.update(losses, first=first)
        course = _draw(monitor, out)
    state, point = monitor.watch, monitor.watch.point
    return {
        "alarm_at": state.alarm_at,
        "limit": state.limit,
        "alpha": state.alpha,
        "delta": monitor.delta,
        **point._asdict(),
        "statement": monitor.statement,
        "state": str(out / STATE),
        "course": None if course is None else str(course),
    }


def _limit_or_folder(certificate: str) -> float | Path:
    try:
        return float(certificate)
    except ValueError:
        return store.certificate(Path(certificate))


def read(path: Path) -> tuple[int, list[float]]:
    """The number of the first example of a CSV file, and the losses of all."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; name a CSV file with the columns {','.join(COLUMNS)}")
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if [name.strip() for name in header] != COLUMNS:
        raise ValueError(f"{path} begins with {','.join(header)!r}, but its first line must be {','.join(COLUMNS)}")
    if not rows:
        raise ValueError(f"{path} has 0 examples; give at least 1, a line each")
    examples, losses = zip(*(_row(path, line, row) for line, row in enumerate(rows, start=2)), strict=True)
    for line, example in enumerate(examples, start=2):
        if example != examples[0] + line - 2:
            raise ValueError(
                f"line {line} of {path} has example {example}, but after the line before it must be "
                f"{examples[0] + line - 2}: give every example once, in the order of arrival"
            )
    return examples[0], list(losses)


def _row(path: Path, line: int, row: list[str]) -> tuple[int, float]:
    try:
        example, loss = row
        return int(example), float(loss)
    except ValueError:
        raise ValueError(
            f"line {line} of {path} is {','.join(row)!r}, but it must be the number of an example and its loss, as in "
            "17,0"
        ) from None


def _draw(monitor: Monitor, out: Path) -> Path:
    """Writes the course as CSV and, with matplotlib, as a picture; returns the latter, or the CSV without it."""
    state, table = monitor.watch, out / "monitor.csv"
    points = [*state.course, *([] if state.course[-1].examples == state.examples else [state.point])]
    rows = [{**point._asdict(), "limit": state.limit, "alarm_at": state.alarm_at} for point in points]
    write_atomically(table, plots.csv_of(rows))
    picture = plots.png_of(_paint, rows)
    if picture is None:
        return table
    write_atomically(table.with_suffix(".png"), picture)
    return table.with_suffix(".png")


def _paint(canvas: Any, rows: Table) -> None:
    """The interval around the risk, the limit and the alarm, over the number of examples."""
    canvas.set_size_inches(7, 3.6)
    axes = canvas.subplots()
    times = [row["examples"] for row in rows]
    lower, mean, upper = ([row[name] for row in rows] for name in ("lower", "mean", "upper"))
    axes.fill_between(times, lower, upper, color=plots.BLUE, alpha=0.2, lw=0, label="interval, if the risk is constant")
    axes.plot(times, mean, color=plots.BLUE, lw=1.8, label="mean loss")
    axes.axhline(rows[0]["limit"], color="black", lw=1, ls="--", label="limit")
    if rows[0]["alarm_at"] is not None:
        axes.axvline(rows[0]["alarm_at"], color=plots.ORANGE, lw=2, label=f"ALARM at example {rows[0]['alarm_at']:,}")
    axes.set_xscale("log")
    # The first few examples say nothing; the axis shows what later ones do.
    axes.set_ylim(0, min(1.0, max(2 * rows[0]["limit"], 1.5 * max(mean[len(mean) // 2 :]))))
    axes.set_xlim(1, max(10, 1.05 * times[-1]))
    axes.set_xlabel("examples since the monitor began")
    axes.set_ylabel("loss")
    canvas.legend(ncols=4, loc="outside lower center", fontsize=9)
    plots.title(canvas, "Loss of the deployed network", "which examples arrive")
