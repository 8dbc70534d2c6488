"""Progress on stderr: bars in a terminal, lines in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WAIT = 30.0
"""Seconds between two lines of a log about one stage."""


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """A function to call as (stage or file, done, total, last epoch's row), which reports on stderr."""
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else _lines(console) as update:
        yield update


@contextmanager
def _bars(console: Console) -> Iterator[Callable[..., None]]:
    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
    tasks: dict[str, Any] = {}

    def update(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        if not tasks:
            bar.start()  # not before, since an error message should stand alone
        if stage not in tasks:
            settle()
            tasks[stage] = bar.add_task(stage, note="")
        bar.update(tasks[stage], completed=done, total=total or None, note=_note(row or {}))

    def settle() -> None:
        # A stage that ends early, such as drawing up to a tolerance, is shown as complete.
        for task in bar.tasks:
            bar.update(task.id, total=task.completed)

    try:
        yield update
        settle()
    finally:
        if tasks:
            bar.stop()


@contextmanager
def _lines(console: Console) -> Iterator[Callable[..., None]]:
    """A line about a stage when it ends, and every WAIT seconds before; rich would write its bars at the very end."""
    current_stage, last_done, start, last_print, pending_line = "", 0, 0.0, 0.0, ""

    def update(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        nonlocal current_stage, last_done, start, last_print, pending_line
        now = time.monotonic()
        if stage != current_stage or done < last_done:
            settle()
            current_stage, start, last_print = stage, now, now
        last_done = done
        elapsed, out_of = timedelta(seconds=int(now - start)), f"/{total}" if total else ""
        pending_line = f"{stage:<18} {done}{out_of} {elapsed} {_note(row or {})}".rstrip()
        if now - last_print >= WAIT:
            settle()
            last_print = now

    def settle() -> None:
        nonlocal pending_line
        if pending_line:
            console.print(pending_line, soft_wrap=True, highlight=False, markup=False)
        pending_line = ""

    try:
        yield update
    finally:
        settle()


def _note(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]:.4f}" for name in ("loss", "bound") if name in row)
