"""Progress bars on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """A function to call as (stage or file, done, total, last epoch's row): each gets a progress bar on stderr."""
    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def update(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        if not tasks:
            bar.start()  # not before, since an error message should stand alone
        if stage not in tasks:
            settle()
            tasks[stage] = bar.add_task(stage, note="")
        bar.update(tasks[stage], completed=done, total=total or None, note=_note(row or {}))

    def settle() -> None:
        # A stage that ends early, such as drawing up to a tolerance, is complete with what it has done.
        for task in bar.tasks:
            bar.update(task.id, total=task.completed)

    try:
        yield update
        settle()
    finally:
        if tasks:
            bar.stop()


def _note(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]:.4f}" for name in ("loss", "bound") if name in row)
