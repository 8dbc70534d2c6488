"""Starts ranks as forks of one process, so that torch is imported once: `forks.py CASES MODULE...`.

A line of its input asks for ranks that run some of the cases, a line of its output has their exit codes. What a rank
prints goes to a file. The modules are imported as well, since ranks would import them one by one.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def become(rank: int, request: dict[str, Any]) -> None:
    with log(Path(request["folder"]), rank).open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(request["env"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.modules[sys.argv[1]].main(Path(request["folder"]), request["cases"])


def log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def exit_code(pid: int, until: float) -> int:
    """That of a rank; one that still runs at that time is killed."""
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status[1])


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        request, pids = json.loads(line), []
        for rank in range(int(request["env"]["WORLD_SIZE"])):
            pids.append(os.fork())
            if pids[-1] == 0:
                become(rank, request)
                return
        until = time.monotonic() + request["limit"]
        print(json.dumps([exit_code(pid, until) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
