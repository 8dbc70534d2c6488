"""Several processes at once: the only folder that knows torch.distributed.

`ranks` is about processes that train together, `sharded` about models that torch's fully_shard has cut into rows, one
part for every rank. What other folders ask about tensors they ask here. A plain model gets its answer at once, and
nothing of `sharded` is called for it: `across` gives None, and whoever is handed None reduces over nothing.

The parameters of a sharded model are DTensors. They have the shape of the whole and hold this rank's rows of it, and so
do the scores, masks and keep probabilities that are made of them.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.distributed import sharded
from pacprune.distributed.sharded import Across
from pacprune.types import check_module

__all__ = [
    "Across",
    "across",
    "across_model",
    "check_alike",
    "count",
    "first_index",
    "full_value",
    "is_sharded",
    "like",
    "local",
    "refuse_sharded",
    "span",
    "unwrapped",
]

_WHOLE = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which every rank has its rows."""
    if type(tensor) in _WHOLE:
        return False
    # Importing DTensor takes a second, and where there is one it has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def across(tensors: Iterable[Tensor]) -> Across | None:
    """How to reduce over the ranks that hold the rows of these tensors; None where all of them are whole."""
    listed = list(tensors)
    return Across(sum(t.numel() for t in listed)) if any(is_sharded(t) for t in listed) else None


def across_model(model: nn.Module) -> Across | None:
    """`across` of a model's parameters, which from then on are sharded after every forward pass, too."""
    check_module(model)
    # fully_shard leaves the outermost parameters whole after a forward pass, so that their type does not tell.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapped: list[Any] = [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    if wrapped or any(is_sharded(p) for p in model.parameters()):
        return sharded.reshard(model, wrapped)
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain model inside of what DistributedDataParallel, DataParallel and torch.compile put around it."""
    check_module(model)
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile's, whose class is not imported for plain models
            model = model.get_submodule("_orig_mod")
        else:
            return model


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, over the same memory and differentiable; all of a whole tensor."""
    return sharded.local(tensor) if is_sharded(tensor) else tensor


def like(rows: Tensor, whole: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded like `whole`, differentiable."""
    return sharded.like(rows, whole) if is_sharded(whole) else rows


def first_index(tensor: Tensor) -> int:
    """The place of this rank's first number in the flat whole: 0 of a whole tensor, or where the rank has none."""
    return sharded.first_index(tensor) if is_sharded(tensor) else 0


def full_value(value: Tensor) -> Tensor:
    """The sum, minimum, any, ... of all rows, from that of each rank's; every rank has to ask."""
    return sharded.full_value(value) if is_sharded(value) else value


def count(which: Tensor) -> int:
    """How many are True, on all ranks."""
    return int(full_value(which.sum()))


def span(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest number, of all ranks."""
    if is_sharded(tensor):
        return sharded.span(tensor)
    if not tensor.numel():
        return math.inf, -math.inf
    low, high = torch.stack(tensor.detach().aminmax()).tolist()
    return low, high


def check_alike(tensor: Tensor, weight: Tensor, *, what: str) -> None:
    """Refuses to use a whole tensor with a sharded weight, and the other way round."""
    if is_sharded(tensor) != is_sharded(weight):
        how, weights = ("sharded", "whole") if is_sharded(tensor) else ("whole", "sharded")
        raise ValueError(
            f"{what} is {how}, but the model's weight is {weights}; make it from this model, or gather it by "
            ".full_tensor() for a whole one"
        )


def refuse_sharded(tensors: Iterable[Tensor], what: str, *values: object) -> None:
    """Says that something cannot be done with a sharded model; `what` is a key of `sharded.REFUSALS`."""
    if any(is_sharded(tensor) for tensor in tensors):
        raise ValueError(sharded.refusal(what, *values))
