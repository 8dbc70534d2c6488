"""Models that torch's fully_shard has cut into rows, one part for every rank: the rows, what they add up to, top-k.

The parameters of such a model are DTensors: they have the shape of the whole and hold this rank's rows of it, and so do
the scores, masks and keep probabilities that are made of them. Of plain tensors every function here gives back what it
was given. A single number that is computed from a DTensor belongs to this rank until `whole` has asked the others.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacprune.distributed import ranks

_BLOCK = 2**24
"""How many numbers are looked at in one go: what that takes in memory must not grow with the model."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which every rank has its rows."""
    # Importing DTensor takes a second, and whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def some(tensors: Iterable[Tensor]) -> bool:
    """Whether there is a sharded tensor among these."""
    return any(is_sharded(tensor) for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, over the same memory and differentiable."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(rows: Tensor, model: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded like `model`, differentiable."""
    if not is_sharded(model):
        return rows
    given: Any = model
    kind = sys.modules["torch.distributed.tensor"].DTensor
    shape, stride = given.shape, torch.empty(given.shape, device="meta").stride()
    return kind.from_local(rows, given.device_mesh, given.placements, run_check=False, shape=shape, stride=stride)


def full_value(value: Tensor) -> Tensor:
    """The sum, minimum, any, ... of all rows, from that of each rank's; every rank has to ask."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def count(which: Tensor) -> int:
    """How many are True."""
    return int(full_value(which.sum()))


def span(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest number."""
    rows = local(tensor.detach())
    ends = torch.stack([rows.min(), -rows.max()]) if rows.numel() else rows.new_full((2,), math.inf)
    low, high = least(ends, [tensor]).tolist()
    return low, -high


def start(tensor: Tensor) -> int:
    """The place of this rank's first number in the flat whole; 0 where the rank has none."""
    if not is_sharded(tensor):
        return 0
    rows = math.ceil(tensor.shape[0] / ranks.world()) * ranks.rank()  # as torch.chunk cuts
    return rows * tensor.shape[1:].numel() if rows < tensor.shape[0] else 0


def total(value: Tensor, of: Iterable[Tensor]) -> Tensor:
    """The sum over ranks of what each has computed `of` its rows; its derivative in this rank's value is 1."""
    return ranks.sum_(value.detach().clone()) + (value - value.detach()) if some(of) else value


def least(value: Tensor, of: Iterable[Tensor]) -> Tensor:
    """The minimum over ranks of what each has computed `of` its rows."""
    return ranks.least_(value.clone()) if some(of) else value


def ensure_resharded(model: nn.Module) -> bool:
    """Whether the model is sharded; from then on it is so after every forward pass too. Refuses shards of other kinds.

    fully_shard leaves the outermost module's parameters whole after a forward pass, until it has gone backward.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    inside: list[Any] = [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    if not inside and not some(model.parameters()):
        return False
    if model not in inside:
        some_of_it = f"{len(inside)} of the modules inside it are" if inside else "some of its parameters are DTensors"
        raise ValueError(
            f"{type(model).__name__} is not sharded itself, but {some_of_it}; "
            "call fully_shard on the model, too, after its parts"
        )
    for module in inside:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    for name, p in model.named_parameters():
        _check_cut(name, p)
    return True


def _check_cut(name: str, tensor: Any) -> None:
    """Refuses what is not cut into rows over all ranks."""
    how = "whole" if not is_sharded(tensor) else f"{tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}"
    cut = is_sharded(tensor) and len(tensor.placements) == 1 and tensor.placements[0].is_shard(0)
    if not cut or (tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()) != (ranks.world(), ranks.rank()):
        raise ValueError(
            f"{name} is {how}, but of a sharded model every parameter must be Shard(0) over all {ranks.world()} ranks; "
            "call fully_shard on the plain model and leave its mesh and placements as they are by default"
        )


def check_alike(tensor: Tensor, weight: Tensor, *, what: str) -> None:
    """Refuses to use a whole tensor with a sharded weight, and the other way round."""
    if is_sharded(tensor) != is_sharded(weight):
        one, other = ("sharded", "whole") if is_sharded(tensor) else ("whole", "sharded")
        raise ValueError(
            f"{what} is {one}, but the model's weight is {other}; make it from this model, or gather it by "
            ".full_tensor() for a whole one"
        )


def refuse(tensors: Iterable[Tensor], what: str, instead: str) -> None:
    """Says that something cannot be done with a sharded model."""
    if some(tensors):
        raise ValueError(f"{what} needs whole weights, but those of this model are sharded by fully_shard; {instead}")


def largest(scores: Sequence[Tensor], ties: Sequence[Tensor] | None, k: int) -> list[Tensor]:
    """Which of all ranks' numbers are the k largest: exactly k; equals by `ties`, then by tensor, rank and place.

    Flat rows of several tensors, one ranking. What is exchanged are counts, 2 KiB for each byte of a number.
    """
    if any(s.dtype == torch.float64 for s in scores):
        scores = [s.double() for s in scores]
    keep = [torch.zeros(s.shape, dtype=torch.bool, device=s.device) for s in scores]
    level = [torch.arange(len(s), device=s.device) for s in scores]
    for key in (scores, ties):
        if key is not None and k:
            here = [values[index] for values, index in zip(key, level, strict=True)]
            edge = _edge(here, k)
            for kept, index, values in zip(keep, level, here, strict=True):
                kept[index[values > edge]] = True
            k -= _count([values > edge for values in here])
            level = [index[values == edge] for index, values in zip(level, here, strict=True)]
    everyone = ranks.gathered([len(index) for index in level])
    for i, (kept, index) in enumerate(zip(keep, level, strict=True)):
        each = [counts[i] for counts in everyone]
        kept[index[: max(0, k - sum(each[: ranks.rank()]))]] = True
        k = max(0, k - sum(each))
    return keep


def _count(which: Sequence[Tensor]) -> int:
    """How many are True on all ranks."""
    return int(ranks.sum_(torch.stack([one.sum() for one in which]).sum()))


def _edge(scores: Sequence[Tensor], k: int) -> float:
    """The k-th largest number of all ranks, 8 bits after 8 bits of its place in the order of floating-point numbers."""
    wide = scores[0].dtype == torch.float64
    kind, bits, size = (np.float64, np.int64, 64) if wide else (np.float32, np.int32, 32)
    found, device = 0, scores[0].device
    for shift in range(size - 8, -1, -8):
        top = shift == size - 8  # whose highest bit is a sign
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        for block in (block for s in scores for block in s.split(_BLOCK)):
            place = _place(block)
            digit = (place >> shift) + 128 if top else (place >> shift)[place >> (shift + 8) == found] & 255
            counts += torch.bincount(digit, minlength=256)
        above = ranks.sum_(counts).flip(0).cumsum(0).tolist()
        index = next(i for i, count in enumerate(above) if count >= k)
        k -= above[index - 1] if index else 0
        found = 127 - index if top else (found << 8) + 255 - index
    return math.copysign(float(np.array(abs(found), bits).view(kind)), found)


def _place(numbers: Tensor) -> Tensor:
    """The place of numbers in the order of all floating-point numbers, 0 for both zeros."""
    bits = numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32).long()
    size = torch.iinfo(torch.int64 if numbers.dtype == torch.float64 else torch.int32).max
    return torch.where(bits < 0, -(bits & size), bits)
