"""Who works on a run: the lock of its folder, and the lock and the log of each run of a sweep.

The process that works in a run folder holds the lock on its config.toml; a second one is refused. In a sweep, processes
wait for one another instead: lock and log of a run are one file there, LOG/NAME.jsonl in the sweep's folder. The system
releases a lock when the process dies: no lock expires, and none has to be cleaned up.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, lock_descriptor

from pacprune.runs import store
from pacprune.types import Progress

LOG = "log"
STATES = ("finished", "running", "waiting", "failed")
INTERVAL = 1.0
"""Seconds from one line of progress to the next."""

Note = Callable[..., None]
"""Called with (event, **details): writes a line into a log."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The lock on a run folder that holds its config.toml, for this block; refuses if another process has it.

    Where the file system has no locks, nothing is locked: a single run needs none.
    """
    with (folder / store.CONFIG).open("rb+") as file:
        free = True
        with suppress(OSError):
            free = lock_descriptor(file.fileno(), blocking=False)
        if not free:
            raise ValueError(
                f"another process is working on the run in {folder}; wait until it ends, or choose another --out"
            )
        yield


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[Note]:
    """The lock on a run, for this block and at most for the life of this process; waits until it is free."""
    path = folder / LOG / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        try:
            lock_descriptor(file.fileno())
        except OSError as failure:
            raise ValueError(
                f"{folder} lies on a file system without locks ({failure.strerror}), where a run could be done twice; "
                "choose another --out"
            ) from None

        def note(event: str, **details: Any) -> None:
            file.write((json.dumps({"event": event, "time": time.time(), **details}) + "\n").encode())

        yield note


def begin(note: Note) -> None:
    """Notes the host and the process that begin or resume the run."""
    note("begun", host=socket.gethostname(), pid=os.getpid())


def fail(note: Note, failure: Exception) -> None:
    """Notes why a run failed: one sentence for a user's error, with a traceback for any other."""
    if isinstance(failure, ValueError):
        note("failed", reason=str(failure))
    else:
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        note("failed", reason=reason, traceback="".join(traceback.format_exception(failure)))


def watch(notes: Sequence[Note]) -> Progress:
    """A progress that writes into these logs how far their runs are."""
    last_time = -INTERVAL

    def progress(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= INTERVAL:
            last_time = time.monotonic()
            for note in notes:
                note("running", stage=stage, done=done, total=total, epoch=(row or {}).get("epoch", 0))

    return progress


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The log of a run; a line that is being written is left out."""
    path = folder / LOG / f"{name}.jsonl"
    complete = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in complete.splitlines()]


def is_over(folder: Path, name: str) -> bool:
    """Whether a run has ended: it is finished, or the last line of its log says that it failed."""
    log = lines(folder, name)
    return (folder / name / "result.json").exists() or (bool(log) and log[-1]["event"] == "failed")


def state(folder: Path, name: str) -> dict[str, Any]:
    """The state of a run, one of STATES, and the details of that state."""
    if (folder / name / "result.json").exists():
        result = store.result(folder / name)
        row = {"state": "finished", "test_error": result["test_error"], "route": result.get("route", "alone")}
        return row | {name: result[name] for name in ("certificate", "grid") if "certificate" in result}
    log = lines(folder, name)
    if not log:
        return {"state": "waiting"}
    last, begun = log[-1], next((line for line in reversed(log) if line["event"] == "begun"), {})
    position = {key: last[key] for key in ("stage", "epoch", "done", "total") if key in last}
    if _is_locked(folder / LOG / f"{name}.jsonl"):
        return {"state": "running", "since": begun.get("time"), "host": begun.get("host"), **position}
    if last["event"] == "failed":
        return {"state": "failed", "reason": last["reason"]}
    return {"state": "waiting", **position}


def _is_locked(path: Path) -> bool:
    """Whether a process works on the run of this log.

    The only way to ask is to take the lock for a moment. A guard lets one process ask at a time; two would take each
    other for a worker.
    """
    writable = os.access(path, os.W_OK)  # a reader without this right asks unguarded; network locks may need it
    guard = FileLock(path.parent / "look.lock", fallback_to_soft=False) if writable else nullcontext()
    with guard, path.open("rb+" if writable else "rb") as file:
        return not lock_descriptor(file.fileno(), blocking=False)
