"""Models that torch's fully_shard has cut into rows, one part for every rank: the rows, what they add up to, top-k.

Other folders reach this file through `pacprune.distributed`, and only for sharded tensors. A single number that is
computed from a DTensor belongs to this rank until `full_value` has asked the others.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacprune.distributed import ranks

_BLOCK = 2**24
"""How many numbers are looked at in one go: what that takes in memory must not grow with the model."""

REFUSALS = {
    "pattern": ("the pattern {}", "give a sparsity"),
    "budget pattern": ("the pattern {}", "leave it out"),
    "solver": ("solver={!r}", "prune a plain model before it is sharded"),
    "scope": ("scope={!r}", "use scope='layer'"),
    "std": ("a std of its own for every weight", "attach gates with the sigmoid mapping and one std for each tensor"),
    "control": ("the control {!r}", "use control='magnitude' or 'feedback'"),
    "criterion": ("the criterion {}", "use magnitude, snip or random"),
    "certificate": ("a certificate", "use pp.pft"),
    "population": ("a population", "train the models one by one"),
    "samples": ("Algorithm 1 (samples={})", "use samples=0"),
    "independent masks": ("a mask for every rank (masks='independent')", "use masks='shared'"),
    # autocast would keep its copy of every gathered weight until the backward pass
    "amp": ("amp=True", "give fully_shard a MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    "execution": ("execution={!r}", "use execution='eager'"),
}
"""What cannot be done with a sharded model: what it is called, and what to do instead."""


def refusal(what: str, *values: object) -> str:
    """The sentence of a refusal; `values` fill its name."""
    name, instead = REFUSALS[what]
    return f"{name.format(*values)} needs whole weights, but those of this model are sharded by fully_shard; {instead}"


@dataclass(frozen=True)
class Across:
    """How to reduce over the ranks that hold the rows of some tensors; a plain model has None in its place.

    Args:
        size: How many numbers these tensors have, of all ranks together.
    """

    size: int

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks of what each has computed of its rows; its derivative in this rank's value is 1."""
        return ranks.sum_(value.detach().clone()) + (value - value.detach())

    def least(self, value: Tensor) -> Tensor:
        """The minimum over ranks of what each has computed of its rows."""
        return ranks.least_(value.clone())

    def kth_largest(self, rows: Tensor, k: int) -> float:
        """The k-th largest number of all ranks; waits for the device, and asks the others four times."""
        return _edge([rows], k)

    def largest(self, scores: Sequence[Tensor], ties: Sequence[Tensor] | None, k: int) -> list[Tensor]:
        """Which of all ranks' numbers are the k largest: exactly k; equals by `ties`, then by tensor, rank and place.

        Flat rows of several tensors, one ranking. What is exchanged are counts, 2 KiB for each byte of a number.
        """
        if any(s.dtype == torch.float64 for s in scores):
            scores = [s.double() for s in scores]
        keep = [torch.zeros(s.shape, dtype=torch.bool, device=s.device) for s in scores]
        level = [torch.arange(len(s), device=s.device) for s in scores]
        for key in (scores, ties):
            if key is not None and k:
                candidates = [values[index] for values, index in zip(key, level, strict=True)]
                edge = _edge(candidates, k)
                for mask, index, values in zip(keep, level, candidates, strict=True):
                    mask[index[values > edge]] = True
                k -= _count([values > edge for values in candidates])
                level = [index[values == edge] for index, values in zip(level, candidates, strict=True)]
        counts = ranks.gathered([len(index) for index in level])
        for i, (mask, index) in enumerate(zip(keep, level, strict=True)):
            by_rank = [lengths[i] for lengths in counts]
            mask[index[: max(0, k - sum(by_rank[: ranks.rank()]))]] = True
            k = max(0, k - sum(by_rank))
        return keep


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, over the same memory and differentiable."""
    return tensor.to_local()  # type: ignore[attr-defined]


def like(rows: Tensor, whole: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded like `whole`, differentiable."""
    example: Any = whole
    kind = sys.modules["torch.distributed.tensor"].DTensor
    shape, stride = example.shape, torch.empty(example.shape, device="meta").stride()
    return kind.from_local(rows, example.device_mesh, example.placements, run_check=False, shape=shape, stride=stride)


def full_value(value: Tensor) -> Tensor:
    """The sum, minimum, any, ... of all rows, from that of each rank's; every rank has to ask."""
    return value.full_tensor()  # type: ignore[attr-defined]


def span(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest number; a rank may have no rows."""
    rows = local(tensor.detach())
    ends = torch.stack([rows.min(), -rows.max()]) if rows.numel() else rows.new_full((2,), math.inf)
    low, high = ranks.least_(ends).tolist()
    return low, -high


def first_index(tensor: Tensor) -> int:
    """The place of this rank's first number in the flat whole; 0 where the rank has none."""
    rows = math.ceil(tensor.shape[0] / ranks.world()) * ranks.rank()  # as torch.chunk cuts
    return rows * tensor.shape[1:].numel() if rows < tensor.shape[0] else 0


def reshard(model: nn.Module, wrapped: Sequence[Any]) -> Across:
    """Makes a model sharded now and after every forward pass; refuses shards of other kinds.

    fully_shard leaves the outermost module's parameters whole after a forward pass, until it has gone backward.

    Args:
        model: Has sharded parameters, or modules that fully_shard was called on.
        wrapped: Those modules.

    Returns:
        How to reduce over the ranks that hold its rows.
    """
    if model not in wrapped:
        inside = f"{len(wrapped)} of the modules inside it are" if wrapped else "some of its parameters are DTensors"
        raise ValueError(
            f"{type(model).__name__} is not sharded itself, but {inside}; "
            "call fully_shard on the model, too, after its parts"
        )
    for module in wrapped:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    for name, p in model.named_parameters():
        _check_cut(name, p)
    return Across(sum(p.numel() for p in model.parameters()))


def _check_cut(name: str, tensor: Any) -> None:
    """Refuses what is not cut into rows over all ranks."""
    whole = not isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor)
    how = "whole" if whole else f"{tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}"
    cut = not whole and len(tensor.placements) == 1 and tensor.placements[0].is_shard(0)
    if not cut or (tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()) != (ranks.world(), ranks.rank()):
        raise ValueError(
            f"{name} is {how}, but of a sharded model every parameter must be Shard(0) over all {ranks.world()} ranks; "
            "call fully_shard on the plain model and leave its mesh and placements as they are by default"
        )


def _count(which: Sequence[Tensor]) -> int:
    """How many are True on all ranks."""
    return int(ranks.sum_(torch.stack([w.sum() for w in which]).sum()))


def _edge(scores: Sequence[Tensor], k: int) -> float:
    """The k-th largest number of all ranks, 8 bits after 8 bits of its place in the order of floating-point numbers."""
    wide = scores[0].dtype == torch.float64
    kind, bits, size = (np.float64, np.int64, 64) if wide else (np.float32, np.int32, 32)
    prefix, device = 0, scores[0].device
    for shift in range(size - 8, -1, -8):
        top = shift == size - 8  # whose highest bit is a sign
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        for block in (block for s in scores for block in s.split(_BLOCK)):
            place = _place(block)
            digit = (place >> shift) + 128 if top else (place >> shift)[place >> (shift + 8) == prefix] & 255
            counts += torch.bincount(digit, minlength=256)
        above = ranks.sum_(counts).flip(0).cumsum(0).tolist()
        index = next(i for i, count in enumerate(above) if count >= k)
        k -= above[index - 1] if index else 0
        prefix = 127 - index if top else (prefix << 8) + 255 - index
    return math.copysign(float(np.array(abs(prefix), bits).view(kind)), prefix)


def _place(numbers: Tensor) -> Tensor:
    """The place of numbers in the order of all floating-point numbers, 0 for both zeros."""
    bits = numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32).long()
    size = torch.iinfo(torch.int64 if numbers.dtype == torch.float64 else torch.int32).max
    return torch.where(bits < 0, -(bits & size), bits)
