"""The benchmark: how fast the library is, as ratios that are measured in one run."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from rich.table import Table

from pacprune.bench import timing
from pacprune.bench.certificate import certificate
from pacprune.bench.frozen import frozen
from pacprune.bench.pattern import pattern
from pacprune.bench.population import population
from pacprune.bench.sampler import sample
from pacprune.bench.step import step
from pacprune.runs import commands
from pacprune.types import Progress, check_name

SUBJECTS: dict[str, Callable[..., Iterator[timing.Finding]]] = {
    "sample": sample,
    "step": step,
    "population": population,
    "certificate": certificate,
    "pattern": pattern,
    "frozen": frozen,
}
"""Name -> f(device, scale=...), which yields rows and sentences; a new subject is one function and one row."""


def run(
    subject: str, *, device: str = "cpu", smoke: bool = False, full: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Measures one of SUBJECTS at the device's sizes; `smoke` takes tiny sizes, `full` adds slow ones on a CPU."""
    check_name("subject", subject, SUBJECTS)
    if smoke and full:
        raise ValueError("smoke (tiny sizes) and full (slow ones as well) are both given; give only one of the two")
    torch_device = commands.check_device(device)
    if torch_device.type not in timing.SHORTEST:
        raise ValueError(f"the benchmark runs on {' and '.join(timing.SHORTEST)}, not on {device!r}; use --device cpu")
    scale = "smoke" if smoke else "full" if full and torch_device.type == "cpu" else torch_device.type
    rows, notes = [], []
    on_cuda = torch_device.type == "cuda"
    # CUDA graphs are recorded on the current device, so `device` has to be it.
    with (
        torch.random.fork_rng(devices=[torch_device] if on_cuda else []),
        torch.cuda.device(torch_device) if on_cuda else nullcontext(),
    ):
        for finding in SUBJECTS[subject](torch_device, scale=scale):
            if isinstance(finding, str):
                notes.append(finding)
            else:
                rows.append(timing.as_dict(finding))
            if progress:
                progress(f"bench {subject}", len(rows), 0, {})
    return {
        "subject": subject,
        "sizes": scale,
        "environment": timing.environment(torch_device),
        "rows": rows,
        "notes": notes,
    }


def render(result: dict[str, Any]) -> Iterator[Any]:
    """The machine, the table, and notes on what could not be measured."""
    machine = result["environment"]
    yield (
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, pacprune {machine['pacprune']} "
        f"({machine['commit'] or 'no commit'}), {machine['dtype']}, TF32 {machine['tf32']['matmul']} in matrix products"
        f" and {machine['tf32']['convolution']} in convolutions; weights are sampled by {machine['kernels_status']}"
    )
    table = Table("Measure", "Value", "Ratio", "Relative to", "Target", "Met")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            _value(row),
            _ratio(row),
            row["relative_to"],
            _target(row["target"]),
            {True: "yes", False: "NO", None: ""}[row["met"]],
        )
    yield table
    yield from result["notes"]


def _value(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return ""
    return (f"{row['value']:,.0f}" if abs(row["value"]) >= 1000 else f"{row['value']:.3g}") + f" {row['unit']}"


def _ratio(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:.3g}" + (" [{:.3g}, {:.3g}]".format(*row["spread"]) if row["spread"] else "")


def _target(target: dict[str, Any] | None) -> str:
    return "" if target is None else f"{target['of']} {target['sense']} {target['limit']:g}"
