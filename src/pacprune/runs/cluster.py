"""Sweeps over machines: every run is a Ray task.

Ray is an extra. Only this module imports it, and only when a sweep uses it.
"""

import logging
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pacprune.data.own import FOLDER, is_file
from pacprune.imports import extra
from pacprune.runs import locks, sweep, sweep_table
from pacprune.runs.sweep import Entry, Resources, Sweep, Work

TIMEOUT = 5.0
"""Seconds that a head node has to accept a connection."""


def work_at(address: str) -> Work:
    """How to run a sweep on the Ray cluster at `address`: HOST:PORT, or auto for the one of this machine."""
    return partial(_run, address)


def _run(address: str, content: Sweep, folder: Path, waiting: list[Entry]) -> None:
    """Hands every run to Ray and waits. Ray restarts a run whose worker or node dies, on another node if need be.

    The shared folder records which runs are finished and how far the others are: a killed driver can be restarted.
    """
    waiting, folder = [_anywhere(entry) for entry in waiting], folder.absolute()
    with _connected(address) as ray:
        _check_resources(ray, content.resources)
        reservation = {"num_cpus": content.resources.num_cpus, "num_gpus": content.resources.num_gpus}
        _rehearse(ray, reservation, [_anywhere(Entry("", options, {})).options for options in content.rehearsed])
        sweep.begin(content, folder)
        task = ray.remote(**reservation, max_retries=content.resources.max_retries)(_task)
        pending = {task.remote(folder, content.command, entry): entry for entry in waiting}
        with sweep_table.live(partial(sweep.status_of, folder, content)):
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1)
                _settle(ray, ready[0], folder, pending.pop(ready[0]), content.resources)


def _task(folder: Path, command: str, entry: Entry) -> str:
    """One run, on a worker; returns the machine's name."""
    sweep.run_alone(folder, command, entry)
    return socket.gethostname()


def _settle(ray: Any, task: Any, folder: Path, entry: Entry, resources: Resources) -> None:
    """Checks the run of a task that ended. An error outside the run goes into its log, too."""
    try:
        host = ray.get(task)
        if locks.is_over(folder, entry.name):
            return
        reason = f"{host} has done this run, but not in {folder} as it is here; give --out a folder that they share"
    except ray.exceptions.RayError as failure:
        name = type(failure).__name__
        reason = f"its workers died {resources.max_retries + 1} times ({name}); see the logs of Ray for the reason"
        if isinstance(failure, ray.exceptions.RayTaskError):
            reason = f"its worker could not run it ({_last_line(failure)}); see the logs of Ray"
    with locks.exclusive(folder, entry.name) as note:
        note("failed", reason=reason)


def _rehearse(ray: Any, reservation: dict[str, float], options: list[Any]) -> None:
    """The rehearsal on a worker: this machine may have neither the data nor the device."""
    try:
        ray.get(ray.remote(**reservation)(sweep.rehearse).remote(options))
    except ray.exceptions.RayTaskError as failure:
        if isinstance(failure.cause, ValueError):
            raise ValueError(str(failure.cause)) from None
        raise ValueError(
            f"a worker of the cluster cannot begin ({_last_line(failure)}); install the same pacprune on all machines"
        ) from None
    except ray.exceptions.RayError as failure:
        raise ValueError(
            f"the worker that rehearsed the sweep died ({type(failure).__name__}); give a run more in [ray], such as "
            "num_cpus = 2, or look into the logs of Ray"
        ) from None


def _last_line(failure: Exception) -> str:
    return str(failure).strip().splitlines()[-1]


def _anywhere(entry: Entry) -> Entry:
    """An entry that means the same on every machine."""
    options = entry.options
    if options.device.startswith("cuda:"):
        raise ValueError(f"device is {options.device!r}, but Ray gives every run a GPU of its own; use cuda")
    if is_file(options.data) and not Path(options.data.removeprefix(FOLDER)).is_absolute():
        raise ValueError(f"data is {options.data!r}, which means another place on every machine; give an absolute path")
    if options.data_dir is not None:
        options = replace(options, data_dir=os.path.abspath(options.data_dir))
    return replace(entry, options=options)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module ray, connected to a running cluster."""
    ray = extra("ray", "sweep")
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as failure:  # Ray raises many kinds
        raise ValueError(
            f"no Ray cluster can be joined at {address!r} ({' '.join(str(failure).split())[:200]}); run ray start on "
            "this machine first, with --head or with --address=HOST:PORT of a head node"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuses an address where no cluster answers; `ray.init` would try for minutes and warn every second."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ValueError(f"--ray is {address!r}; give auto, or HOST:PORT of the cluster's head node")
    reason = "something else than Ray listens there"
    health_check = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT).close()
        if subprocess.run(health_check, capture_output=True, timeout=3 * TIMEOUT).returncode == 0:
            return
    except subprocess.TimeoutExpired:
        pass
    except (OSError, OverflowError) as failure:
        reason = str(failure)
    raise ValueError(
        f"no Ray cluster answers at {address} ({reason}); check the address, or start one with ray start --head"
    )


def _check_resources(ray: Any, resources: Resources) -> None:
    """Warns when no machine of the cluster can take a run now; a cluster that grows may still get such a machine."""
    for kind, name in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        need = getattr(resources, name)
        most = max((node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        if need > most:
            warnings.warn(
                f"a run needs {need:g} {kind}s, but no machine of the cluster has more than {most:g}; the runs wait "
                f"for one, or set {name} in [ray] and start again",
                stacklevel=2,
            )
