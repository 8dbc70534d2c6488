"""The table of a sweep's runs, printed once, or as a live table or lines of a log while they go on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from pacprune.runs import report
from pacprune.runs.locks import STATES

INTERVAL, WAIT = 1.0, 30.0
"""Seconds between two looks at the runs, and between two lines of a log about one that goes on."""


def table(status: dict[str, Any]) -> Table:
    """The runs of a sweep, as `sweep.status` returns them."""
    rows = status["runs"]
    names = list(rows[0]["point"])
    numbers = [key for key in ("test_error", "certificate") if key == "test_error" or any(key in row for row in rows)]
    titles = [report.COLUMNS[key] for key in numbers]
    grid = Table(Column("Run", no_wrap=True), *names, "State", *titles, Column("Detail", overflow="fold"))
    for row in rows:
        cells = [report.cell(key, row[key]) if key in row else "" for key in numbers]
        grid.add_row(row["run"], *(str(row["point"][name]) for name in names), row["state"], *cells, _detail(row))
    grid.caption = ", ".join(f"{status[name]} {name}" for name in STATES)
    return grid


def payment(status: dict[str, Any]) -> list[str]:
    """A line about how many certificates there are and what each of them pays; none without a certificate."""
    shares = [row["grid"] for row in status["runs"] if "certificate" in row]
    if not shares:
        return []
    words = " or ".join(f"delta/{share}" for share in sorted(set(shares)))
    return [f"{len(shares)} certificate{'s' * (len(shares) > 1)}; each pays {words}"]


def _detail(row: dict[str, Any]) -> str:
    position = ""
    if "stage" in row:
        position = f"{row['stage']}, epoch {row['epoch'] + 1}, {row['done']} of {row['total']} steps"
    if row["state"] == "running":
        since = time.strftime("%d %b %H:%M:%S", time.localtime(row["since"])) if row["since"] else "?"
        return f"since {since} on {row['host']}" + (f": {position}" if position else "")
    if row["state"] == "waiting":
        return f"interrupted in {position}" if position else ""
    return row["reason"] if row["state"] == "failed" else row["route"]


@contextmanager
def live(status: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Shows on stderr how the runs go on while the block runs: a table in a terminal, lines in a log."""
    console = Console(stderr=True)
    with _table(status, console) if console.is_terminal else _lines(status, console):
        yield


def _table(status: Callable[[], dict[str, Any]], console: Console) -> Live:
    """A table that is updated. Running runs come first, since a long table is cut."""
    order = ("running", "failed", "waiting", "finished")

    def sorted_table() -> Table:
        current = status()
        return table(current | {"runs": sorted(current["runs"], key=lambda row: order.index(row["state"]))})

    return Live(get_renderable=sorted_table, console=console, refresh_per_second=1, transient=True)


@contextmanager
def _lines(status: Callable[[], dict[str, Any]], console: Console) -> Iterator[Callable[[], None]]:
    """A line for every run that begins or ends, and every WAIT seconds about one that goes on.

    Yields what looks at the runs and prints these lines, every INTERVAL seconds and at the end of the block.
    """
    # What failed before is tried again.
    states = {row["run"]: row["state"] for row in status()["runs"] if row["state"] == "finished"}
    printed: dict[str, float] = {}

    def print_changes() -> None:
        now = time.monotonic()
        for row in status()["runs"]:
            name, state = row["run"], row["state"]
            goes_on = state == "running" and now - printed.get(name, now) >= WAIT
            if goes_on or state != states.get(name, "waiting"):
                states[name], printed[name] = state, now
                console.print(_line(row), soft_wrap=True, highlight=False, markup=False)

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(INTERVAL):
            print_changes()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield print_changes
    finally:
        ended.set()
        thread.join()
        print_changes()


def _line(row: dict[str, Any]) -> str:
    """A run as a line: its name, its point of the grid, its state and the details of that."""
    point = ", ".join(f"{name} {value}" for name, value in row["point"].items())
    keys = [key for key in ("test_error", "certificate") if key in row]
    numbers = [f"{report.COLUMNS[key].lower()} {report.cell(key, row[key])}" for key in keys]
    return f"{row['run']} ({point}): " + ", ".join(filter(None, [row["state"], *numbers, _detail(row)]))
