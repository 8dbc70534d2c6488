"""Drawn weights that autograd need not keep: what a layer saves of one for its backward pass is made again there.

A layer saves its weight, since the gradient in its inputs needs it. Of a model with stochastic masks that would be a
second set of weights. A draw follows from its inputs, so these can be saved in its place, and one layer's draw at a
time is alive.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pacprune import kernels
from pacprune.kernels import Law, SampleInputs


class _Draw(NamedTuple):
    """A draw that a caller holds now, and what it follows from."""

    value: "weakref.ref[Tensor]"
    inputs: SampleInputs
    law: Law


_alive: dict[int, _Draw] = {}
"""By the address of its memory: as long as the draw lives, nothing else has this address."""
_active = [0]
"""How many contexts of `redrawn` are open."""


@dataclass(frozen=True)
class _Recipe:
    """A view of a draw, as its backward pass makes it again."""

    inputs: SampleInputs
    law: Law
    versions: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


def redrawable(value: Tensor, inputs: SampleInputs, law: Law) -> Tensor:
    """The draw itself; inside `redrawn`, layers that save it will save what it follows from."""
    if _active[0]:
        address = value.untyped_storage().data_ptr()
        _alive[address] = _Draw(weakref.ref(value, lambda reference: _forget(address, reference)), inputs, law)
    return value


def _forget(address: int, reference: "weakref.ref[Tensor]") -> None:
    if address in _alive and _alive[address].value is reference:
        del _alive[address]


@contextmanager
def redrawn() -> Iterator[None]:
    """While this lasts, layers do not keep the draws of a pattern's weights for their backward pass."""
    _active[0] += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _active[0] -= 1


def _versions(inputs: SampleInputs) -> tuple[int, ...]:
    return tuple(t._version for t in (inputs.mean, inputs.gate, *inputs.counters) if t is not None)


def _pack(tensor: Tensor) -> "Tensor | _Recipe":
    draw = _alive.get(tensor.untyped_storage().data_ptr())
    value = None if draw is None else draw.value()
    if draw is None or value is None or value._version or tensor.dtype != value.dtype:
        return tensor
    form = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset() - value.storage_offset())
    return _Recipe(draw.inputs, draw.law, _versions(draw.inputs), *form)


def _unpack(packed: "Tensor | _Recipe") -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if _versions(packed.inputs) != packed.versions:
        raise RuntimeError("gates, weights or the number of the draw changed between a forward pass and its backward")
    (value,) = kernels.draw([packed.inputs], packed.law)
    return value.as_strided(packed.size, packed.stride, packed.start)
