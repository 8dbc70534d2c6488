"""The table of a sweep's runs, printed once or kept up to date while they go on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from pacprune.runs import report
from pacprune.runs.locks import STATES


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
    """The table on stderr, updated while the block runs. Running runs come first, since a long table is cut."""
    order = ("running", "failed", "waiting", "finished")

    def sorted_table() -> Table:
        current = status()
        return table(current | {"runs": sorted(current["runs"], key=lambda row: order.index(row["state"]))})

    console = Console(stderr=True)
    if not console.is_terminal:  # a log file cannot show a table that changes
        yield
        return
    with Live(get_renderable=sorted_table, console=console, refresh_per_second=1, transient=True):
        yield
