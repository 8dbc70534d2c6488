"""Who works on a run of a sweep: a lock that dies with its holder, and a log of what became of the run.

Both are one file, LOG/NAME.jsonl in the sweep's folder: whoever works on the run holds the lock on it. The system takes
the lock back when that process dies, so that there is nothing to expire and nothing to clean up.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from pacprune.runs import report, store
from pacprune.types import Progress

LOG = "log"
STATES = ("finished", "running", "waiting", "failed")
EVERY = 1.0
"""Seconds from one line of progress to the next."""

Note = Callable[..., None]
"""Called with (event, more=...): writes a line into a log."""


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[Note]:
    """The sole right to a run, for this block and at most for the life of this process; waits until it is free."""
    import fcntl  # not on Windows, where the rest of the package has no need of it

    path = folder / LOG / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as failure:
            raise ValueError(
                f"{folder} lies on a file system without locks ({failure.strerror}), where a run could be done twice; "
                "choose another --out"
            ) from None

        def note(event: str, **more: Any) -> None:
            file.write((json.dumps({"event": event, "time": time.time(), **more}) + "\n").encode())

        yield note


def begin(note: Note) -> None:
    """Notes who begins, or goes on with, the run."""
    note("begun", host=socket.gethostname(), pid=os.getpid())


def fail(note: Note, failure: Exception) -> None:
    """Notes why a run failed: a sentence for what a user did, the place as well for what nobody foresaw."""
    if isinstance(failure, ValueError):
        note("failed", reason=str(failure))
    else:
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        note("failed", reason=reason, traceback="".join(traceback.format_exception(failure)))


def watch(notes: Sequence[Note]) -> Progress:
    """A progress that tells logs how far their runs are."""
    last = [-EVERY]

    def progress(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        now = time.monotonic()
        if now - last[0] >= EVERY:
            last[0] = now
            for note in notes:
                note("running", stage=stage, done=done, total=total, epoch=(row or {}).get("epoch", 0))

    return progress


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The log of a run; a line that is being written is left out."""
    path = folder / LOG / f"{name}.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def state(folder: Path, name: str) -> dict[str, Any]:
    """What became of a run: its state, one of STATES, and what there is to say about it."""
    if (folder / name / "result.json").exists():
        result = store.result(folder / name)
        return {"state": "finished", "test_error": result["test_error"], "route": result.get("route", "alone")}
    log = lines(folder, name)
    if not log:
        return {"state": "waiting"}
    last, begun = log[-1], next((line for line in reversed(log) if line["event"] == "begun"), {})
    far = {key: last[key] for key in ("stage", "epoch", "done", "total") if key in last}
    if _held(folder / LOG / f"{name}.jsonl"):
        return {"state": "running", "since": begun.get("time"), "host": begun.get("host"), **far}
    if last["event"] == "failed":
        return {"state": "failed", "reason": last["reason"]}
    return {"state": "waiting", **far}


def _held(path: Path) -> bool:
    """Whether somebody works on the run of this log."""
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def table(found: dict[str, Any]) -> Table:
    """The runs of a sweep, as `sweep.status` finds them."""
    rows = found["runs"]
    names = list(rows[0]["point"])
    shown = Table(Column("Run", no_wrap=True), *names, "State", "Test error", Column("Detail", overflow="fold"))
    for row in rows:
        wrong = report.cell("test_error", row["test_error"]) if "test_error" in row else ""
        shown.add_row(row["run"], *(str(row["point"][name]) for name in names), row["state"], wrong, _detail(row))
    shown.caption = ", ".join(f"{found[name]} {name}" for name in STATES)
    return shown


def _detail(row: dict[str, Any]) -> str:
    far = f"{row['stage']}, epoch {row['epoch'] + 1}, {row['done']} of {row['total']} steps" if "stage" in row else ""
    if row["state"] == "running":
        since = time.strftime("%d %b %H:%M:%S", time.localtime(row["since"])) if row["since"] else "?"
        return f"since {since} on {row['host']}" + (f": {far}" if far else "")
    if row["state"] == "waiting":
        return f"broken off in {far}" if far else ""
    return row["reason"] if row["state"] == "failed" else row["route"]


@contextmanager
def live(look: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """The table on stderr, kept up to date while the block runs: what moves comes first, if it is too long."""
    order = ("running", "failed", "waiting", "finished")

    def now() -> Table:
        found = look()
        return table(found | {"runs": sorted(found["runs"], key=lambda row: order.index(row["state"]))})

    console = Console(stderr=True)
    if not console.is_terminal:  # a log file has no use of a table that moves
        yield
        return
    with Live(get_renderable=now, console=console, refresh_per_second=1, transient=True):
        yield
