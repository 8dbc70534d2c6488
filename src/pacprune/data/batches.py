"""Data in any form (a pair of tensors, a Part, a Dataset, a DataLoader) as batches on a device; augmentation there."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    default_collate,
)

from pacprune.data import splits, trace
from pacprune.data.trace import Trace
from pacprune.types import Data


class Contents(NamedTuple):
    """What is noted of the examples of a Dataset or a DataLoader: hashes of x and y, and `trace.sketches` of x."""

    x: Tensor
    y: Tensor
    sketches: Tensor


_reads: ContextVar[dict[int, tuple[Any, Contents]] | None] = ContextVar("reads", default=None)
"""Datasets and DataLoaders that were read `reading_once`, by id."""
_hashes: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], Tensor]] = {}
"""Hashes of tensors by id, with the state that changes when a tensor is written to."""


def tensors(data: Data) -> tuple[Tensor, Tensor] | None:
    """The (x, y) behind a Part or a pair, or None when the data is a Dataset or a DataLoader."""
    if isinstance(data, splits.Part):
        pair = (data.x, data.y)
    elif isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        pair = data
    elif isinstance(data, (Dataset, DataLoader)):
        if isinstance(_source(data), IterableDataset):
            raise ValueError(f"data is a stream, a {type(_source(data)).__name__}; give a map-style Dataset")
        _check_size(data)
        return None
    else:
        types = f" of {', '.join(type(t).__name__ for t in data)}" if isinstance(data, tuple) else ""
        raise ValueError(
            f"data is a {type(data).__name__}{types}; give (x, y) tensors (torch.from_numpy makes them of arrays), "
            "a Part, a Dataset or a DataLoader"
        )
    if len(pair[0]) != len(pair[1]):
        raise ValueError(f"x has {len(pair[0])} examples but y has {len(pair[1])}; they must pair up")
    _check_size(pair[0])
    return pair


def _check_size(data: Any) -> None:
    if len(data) == 0:
        raise ValueError("the data is empty: 0 examples; choose another split, fraction or batch size")


def size(data: Data) -> int:
    """The number of examples."""
    pair = tensors(data)
    return len(pair[0]) if pair else len(_source(data))


def _source(data: Data) -> Any:
    """What a DataLoader reads from; anything else is its own source."""
    return data.dataset if isinstance(data, DataLoader) else data


def use_of(data: Data) -> Trace:
    """What training or scoring on these data leaves behind.

    Examples that something was evaluated on before count as used, too: the result may have decided what is trained now.
    """
    part = _part(data)
    if part is not None:
        return part.trace | trace.looked()
    pair = tensors(data)
    x, y = _read(data)[:2] if pair is None else (_hashes_of(pair[0]), trace.label_hashes(pair[1]))
    return trace.of(x, trace.labelled(x, y)) | trace.looked()


def look_at(data: Data) -> None:
    """Notes that something is evaluated on these data."""
    part, pair = _part(data), tensors(data)
    if part is not None:
        trace.look(part.known.examples)
    elif pair is not None:
        trace.look(_hashes_of(pair[0]), lambda: trace.sketches(pair[0]))
    else:
        contents = _read(data)
        trace.look(contents.x, lambda: contents.sketches)


def _part(data: Data) -> splits.Part | None:
    """The part that the data are read from, if nothing else can come in between."""
    source = _source(data)
    # A subclass could read anything, and so could a collate_fn.
    if isinstance(data, DataLoader) and (type(data) is not DataLoader or data.collate_fn is not default_collate):
        return None
    if type(source) is splits.Augmented:
        source = source.part
    if type(source) is not splits.Part:
        return None
    indices = _fixed_indices(data)
    return source if indices is None else source.subset(torch.as_tensor(indices, dtype=torch.int64))


def _fixed_indices(data: Data) -> Sequence[int] | None:
    """The only examples that a DataLoader can read, where a SubsetRandomSampler has a list of them; None: all."""
    batch_sampler = data.batch_sampler if type(data) is DataLoader else None
    if type(batch_sampler) is not BatchSampler or type(batch_sampler.sampler) is not SubsetRandomSampler:
        return None
    indices = batch_sampler.sampler.indices
    return [int(i) for i in indices] if type(indices) in (list, tuple, range, Tensor, np.ndarray) else None


def example_hashes(data: Data) -> Tensor:
    """64-bit hashes of all examples by their content, in their order."""
    part, pair = _part(data), tensors(data)
    if part is not None:
        return part.example_hashes
    return _read(data)[0] if pair is None else _hashes_of(pair[0])


def _hashes_of(x: Tensor) -> Tensor:
    """`trace.example_hashes`, once for a tensor that is used again, as by the members of a population."""
    if x.is_inference():  # such a tensor has no version counter
        return trace.example_hashes(x)
    key, state = id(x), (x._version, _checksum(x), *x.shape)
    entry = _hashes.get(key)
    if entry is None or entry[0]() is not x or entry[1] != state:
        _hashes[key] = entry = weakref.ref(x, lambda _: _hashes.pop(key, None)), state, trace.example_hashes(x)
    return entry[2]


def _checksum(x: Tensor) -> int:
    """The sum of the bits: writing to x through numpy or a custom kernel does not change its version."""
    whole = x.detach().contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(whole.element_size())
    return int(whole.view(-1).view(integers).sum(dtype=torch.int64)) if integers and whole.numel() else 0


def label_hashes(data: Data) -> Tensor:
    """64-bit hashes of all labels, in the order of the examples."""
    pair = tensors(data)
    return _read(data)[1] if pair is None else trace.label_hashes(pair[1])


def _read(data: Data) -> Contents:
    """What is noted of all examples of a Dataset or a DataLoader."""
    reads = _reads.get()
    if reads is not None and id(data) in reads:
        return reads[id(data)][1]
    with isolated_rng(torch.device("cpu"), data, seed=0):  # random augmentation gives the same hashes every time
        rows = [
            (trace.example_hashes(x), trace.label_hashes(torch.as_tensor(y)), trace.sketches(x))
            for x, y in _pairs(data, _source(data))
        ]
    contents = Contents(*(torch.cat(column) for column in zip(*rows, strict=True)))
    if reads is not None:
        reads[id(data)] = data, contents
    return contents


@contextmanager
def reading_once() -> Iterator[None]:
    """Reads a Dataset or a DataLoader for its hashes once meanwhile: that may take as long as an epoch.

    Not for longer than one training: it could be filled with other examples before the next.
    """
    token = _reads.set({} if _reads.get() is None else _reads.get())
    try:
        yield
    finally:
        _reads.reset(token)


def _pairs(data: Any, source: Any) -> Iterator[Any]:
    """Every example of a Dataset or a DataLoader, in batches of one or as they come."""
    if isinstance(data, DataLoader) and (type(data) is not DataLoader or data.batch_sampler is None):
        yield from data  # a subclass may give other batches; without a sampler of batches, what it reads are batches
        return
    collate = data.collate_fn if isinstance(data, DataLoader) else default_collate
    indices = _fixed_indices(data)
    for i in range(len(source)) if indices is None else indices:
        yield collate([source[i]])


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lives."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to train; give another model")
    return first.device


def generators(data: Data) -> list[torch.Generator]:
    """The generators that a DataLoader shuffles by. A DataLoader without any uses torch's global generator."""
    if not isinstance(data, DataLoader):
        return []
    samplers = (data.sampler, getattr(data.batch_sampler, "sampler", None))
    candidates = (data.generator, *(getattr(sampler, "generator", None) for sampler in samplers))
    return [generator for generator in candidates if generator is not None]


@contextmanager
def isolated_rng(device: torch.device, data: Data, *, seed: int | None = None) -> Iterator[None]:
    """Restores torch's global random state, and the state of a DataLoader's generators, at the end.

    `seed` sets the global state meanwhile. torch.manual_seed is not used: it would change accelerators whose state is
    not restored.
    """
    states = [(generator, generator.get_state()) for generator in generators(data)]
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for accelerator in accelerators:
                with torch.cuda.device(accelerator):
                    torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def portions(whole: Tensor, most: int) -> list[Tensor]:
    """`whole` in pieces of size `most`. A last piece of size 1 joins its neighbour: BatchNorm cannot train on it."""
    pieces = list(whole.split(most))
    if len(pieces) > 1 and len(pieces[-1]) == 1 < most:
        pieces[-2:] = [torch.cat(pieces[-2:])]
    return pieces


def per_epoch(data: Data, batch_size: int) -> int:
    """The number of steps of an epoch; a DataLoader has its own batches."""
    return len(data) if isinstance(data, DataLoader) else len(portions(torch.arange(size(data)), batch_size))


def batches(
    data: Data, batch_size: int, *, device: torch.device, order: Tensor | None = None, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (x, y) on `device`, in `order` (default: as stored; a DataLoader keeps its own), `limit` at most.

    An `order` is cut by `portions`. Tensors move to the device once, whole, so that an epoch has no copies in it.
    """
    if isinstance(data, DataLoader):
        for x, y in data:
            yield x.to(device), y.to(device)
            if limit is not None and (limit := limit - len(x)) <= 0:
                return
        return
    pair = tensors(data)
    index = (torch.arange(size(data)) if order is None else order)[:limit].to(device if pair else "cpu")
    cut = index.split(batch_size) if order is None else portions(index, batch_size)
    if pair:
        x, y = ((t if limit is None or order is not None else t[:limit]).to(device) for t in pair)
        for index in cut:
            yield x[index], y[index]
    else:
        for index in cut:
            x, y = default_collate([_source(data)[int(i)] for i in index])
            yield x.to(device), torch.as_tensor(y).to(device)


def crop_flip(x: Tensor, word: Tensor) -> Tensor:
    """A crop after zero padding, and a horizontal flip, of each image of (..., c, h, w), as its random `word` says.

    The padding is 4 pixels, or a seventh of a smaller image than 28 pixels. Zero is the mean pixel of standardised
    images.
    """
    *_, c, h, w = x.shape
    pad = max(1, min(4, h // 7, w // 7))
    word = word.reshape(-1, 1)
    # 16, 15 and 1 bits of a word: two places differ in probability by less than 1 in 3,000.
    row = (word & 0xFFFF) % (2 * pad + 1) + torch.arange(h, device=x.device)
    column = (word >> 16 & 0x7FFF) % (2 * pad + 1) + torch.arange(w, device=x.device)
    column = torch.where(word >> 31 > 0, column.flip(1), column)
    n = len(word)
    padded = F.pad(x.reshape(n, c, h, w), (pad, pad, pad, pad))
    plane = torch.arange(n * c, device=x.device).view(n, c, 1, 1) * (h + 2 * pad)
    # One number per pixel says where it comes from; with an index per dimension torch would write four.
    place = (plane + row.view(n, 1, h, 1)) * (w + 2 * pad) + column.view(n, 1, 1, w)
    return padded.take(place).reshape(x.shape)
