"""Callbacks that carry a `Pruner` through other packages' trainers, one file each; language models in folders."""

import inspect
from typing import Any

import torch
from torch import nn

from pacprune.distributed import is_sharded
from pacprune.methods.pipeline import Pruned
from pacprune.methods.pruner import Pruner, Unfinished

_KNOWN_TO_TRAINERS = ("model", "steps", "scaler")


def check_options(options: dict[str, Any]) -> None:
    """Refuses what the trainer says by itself, and what a `Pruner` does not take."""
    takes = [name for name in inspect.signature(Pruner).parameters if name not in _KNOWN_TO_TRAINERS]
    for name in options:
        if name in _KNOWN_TO_TRAINERS:
            raise ValueError(f"PruningCallback is given {name}, which it learns from the trainer; leave it out")
        if name not in takes:
            raise ValueError(f"PruningCallback is given {name}, which is unknown; a Pruner takes {', '.join(takes)}")


def check_storable(model: nn.Module, *, remedy: str) -> None:
    """Refuses a model of which a checkpoint would hold the pruner's rows of a single rank."""
    if any(is_sharded(weight) for weight in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is cut into shards, and a checkpoint of it cannot hold its pruner; {remedy}"
        )


def start_pruner(
    model: nn.Module,
    options: dict[str, Any],
    *,
    steps: int,
    steps_before: int,
    scaler: torch.amp.GradScaler | None,
    state: dict[str, Any] | None,
) -> Pruner:
    """A pruner for a run that begins, or for one that goes on after `steps_before` steps, from the pruner's state."""
    if steps_before and state is None:
        raise ValueError(
            f"the checkpoint of step {steps_before} holds no state of a pruner; go on from a whole checkpoint that was "
            "written with this PruningCallback, or start anew from its weights"
        )
    pruner = Pruner(model, steps=steps, scaler=scaler, **options)
    if steps_before and state is not None:
        pruner.load_state_dict(state)
    return pruner


def finish_pruner(pruner: Pruner, *, settings: str) -> Pruned:
    """Leaves the plain model; of a run that stopped too early, names the trainer's settings that say how long it is."""
    try:
        return pruner.finish()
    except Unfinished:
        raise Unfinished(
            f"training stopped after {pruner.steps_done} of {pruner.steps} steps, before sparsity "
            f"{pruner.final_sparsity:g} was reached; let it run to its end, or set {settings} to what it takes"
        ) from None
