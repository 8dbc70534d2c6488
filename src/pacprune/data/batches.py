"""Data in any form (a pair of tensors, a Part, a Dataset, a DataLoader) as batches on a device; augmentation there.

A batch is a pair (x, y), or any nest of tensors in mappings, lists and tuples; `Objective` says what becomes of it.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
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
from pacprune.types import Data, Forward, Loss


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
    elif isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, (Tensor, np.ndarray)) for t in data):
        pair = torch.as_tensor(data[0]), torch.as_tensor(data[1])  # over the same memory
    elif isinstance(data, (Dataset, DataLoader)):
        if not is_stream(data):
            _check_size(data)
        return None
    else:
        types = f" of {', '.join(type(t).__name__ for t in data)}" if isinstance(data, tuple) else ""
        raise ValueError(
            f"data is a {type(data).__name__}{types}; give (x, y) tensors or arrays, a Part, a Dataset or a DataLoader"
        )
    if len(pair[0]) != len(pair[1]):
        raise ValueError(f"x has {len(pair[0])} examples but y has {len(pair[1])}; they must pair up")
    _check_size(pair[0])
    return pair


def _check_size(data: Any) -> None:
    if len(data) == 0:
        raise ValueError("the data is empty: 0 examples; choose another split, fraction or batch size")


def is_stream(data: Data) -> bool:
    """Whether examples come one after another, perhaps without an end, and cannot be asked for by number."""
    return isinstance(_source(data), IterableDataset)


def refuse_stream(data: Data, purpose: str) -> None:
    """Refuses a stream where all examples are needed."""
    if is_stream(data):
        raise ValueError(
            f"the data are a stream, a {type(_source(data)).__name__}, but {purpose} needs all examples; give a "
            "map-style Dataset"
        )


def size(data: Data) -> int:
    """The number of examples."""
    refuse_stream(data, "an order of them")
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
    if is_stream(data):  # to read it for its hashes would take examples from it
        return trace.foreign() | trace.looked()
    pair = tensors(data)
    x, y = _read(data)[:2] if pair is None else (_hashes_of(pair[0]), trace.label_hashes(pair[1]))
    return trace.of(x, trace.labelled(x, y)) | trace.looked()


def train_on(data: Data, networks: Sequence[int | None]) -> None:
    """Notes that networks of these fingerprints are about to be trained on these data, which tells what they lose.

    The prior part of a split is there to be trained on. That of another cut has bound examples of this one among its
    own; whoever certifies by several cuts would have to declare that each time.
    """
    if is_stream(data):  # to read it for its hashes would take examples from it
        return
    part = _part(data)
    if part is None or part.name != "prior":
        hashes = example_hashes(data) if part is None else part.ids.reshape(-1)
        trace.look(hashes, networks=networks, trained=True)


def look_at(data: Data, networks: Sequence[int | None] = ()) -> None:
    """Notes that networks of these fingerprints are evaluated on these data."""
    refuse_stream(data, "an evaluation")
    if isinstance(data, splits.Part) and not data.has_labels:
        raise ValueError(
            f"the {len(data)} examples of the {data.name} part have no labels, so that nothing can be counted as right "
            "or wrong; give labelled ones, or certify a disagreement"
        )
    part, pair = _part(data), tensors(data)
    if part is not None:
        trace.look(part.known.examples, networks=networks)
    elif pair is not None:
        trace.look(_hashes_of(pair[0]), lambda: trace.sketches(pair[0]), networks=networks)
    else:
        contents = _read(data)
        trace.look(contents.x, lambda: contents.sketches, networks=networks)


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
    splits.refuse_overwritten(source)
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
    """64-bit hashes of all examples by their content, in their order; a stream has none."""
    if is_stream(data):
        return torch.empty(0, dtype=torch.int64)
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
    """64-bit hashes of all labels, in the order of the examples; a stream has none."""
    if is_stream(data):
        return torch.empty(0, dtype=torch.int64)
    pair = tensors(data)
    return _read(data)[1] if pair is None else trace.label_hashes(pair[1])


def _read(data: Data) -> Contents:
    """What is noted of all examples of a Dataset or a DataLoader."""
    reads = _reads.get()
    if reads is not None and id(data) in reads:
        return reads[id(data)][1]
    with isolated_rng(torch.device("cpu"), data, seed=0):  # random augmentation gives the same hashes every time
        parts = [_contents(batch) for batch in _collated(data, _source(data))]
    contents = Contents(*(torch.cat(column) for column in zip(*parts, strict=True)))
    if reads is not None:
        reads[id(data)] = data, contents
    return contents


def _contents(batch: Any) -> Contents:
    """What is noted of a batch. One that is no (x, y) has no labels that could be told from the rest of it."""
    if is_pair(batch) and isinstance(batch[0], Tensor) and not isinstance(batch[1], Mapping):
        x, y = batch
        return Contents(trace.example_hashes(x), trace.label_hashes(torch.as_tensor(y)), trace.sketches(x))
    count = rows(batch)
    examples = torch.cat([trace.example_hashes(t) for t in leaves(batch) if t.ndim and len(t) == count])
    return Contents(examples, torch.zeros_like(examples), torch.empty(len(examples), 0))


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


def _collated(data: Any, source: Any) -> Iterator[Any]:
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


def per_epoch(data: Data, batch_size: int, steps: int | None = None) -> int:
    """The number of steps of an epoch: that of a stream is given; a DataLoader has its own batches."""
    if is_stream(data) != (steps is not None):
        kind = f"a stream, a {type(_source(data)).__name__}" if steps is None else f"a {type(data).__name__}, no stream"
        remedy = "give Config(steps_per_epoch=), or a map-style Dataset" if steps is None else "leave it out"
        raise ValueError(f"steps_per_epoch is {steps} and the data are {kind}; {remedy}")
    if steps is not None:
        return steps
    return len(data) if isinstance(data, DataLoader) else len(portions(torch.arange(size(data)), batch_size))


def batches(
    data: Data, batch_size: int, *, device: torch.device, order: Tensor | None = None, limit: int | None = None
) -> Iterator[Any]:
    """Batches on `device`, in `order` (default: as stored; a DataLoader keeps its own), of `limit` examples at most.

    An `order` is cut by `portions`. Tensors move to the device once, whole, so that an epoch has no copies in it.
    """
    if isinstance(data, DataLoader) or is_stream(data):
        loader = data if isinstance(data, DataLoader) else DataLoader(_source(data), batch_size)
        for batch in loader:
            yield to_device(batch, device)
            if limit is not None and (limit := limit - rows(batch)) <= 0:
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
            yield to_device(default_collate([_source(data)[int(i)] for i in index]), device)


def first_batch(data: Data, examples: int, *, device: torch.device) -> Any:
    """A batch of the first examples; a DataLoader's whole first batch."""
    batch = next(batches(data, examples, device=device, limit=examples), None)
    if batch is None:
        raise ValueError(f"the data, a {type(_source(data)).__name__}, gave no example; check what it reads")
    rows(batch)
    return batch


def endless(data: Data, batch_size: int, *, device: torch.device) -> Iterator[Any]:
    """The batches of a stream; where it ends it begins again."""
    while True:
        empty = True
        for batch in batches(data, batch_size, device=device):
            empty = False
            yield batch
        if empty:
            raise ValueError(
                f"the {type(data).__name__} has no more batches when it is read once more; give one that begins again, "
                "or fewer steps"
            )


@contextmanager
def refusing_unfit(x: Any, who: str) -> Iterator[None]:
    """Meanwhile, what torch raises since a network cannot take the inputs x becomes one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as failure:
        if not isinstance(x, Tensor):
            raise
        reason = str(failure).strip().partition("\n")[0]
        raise ValueError(
            f"{who} cannot take examples of shape {tuple(x.shape[1:])} in {x.dtype} ({reason}); give a network for "
            "such examples, or examples that it takes"
        ) from failure


# --- Batches of any kind.


def is_pair(batch: Any) -> bool:
    """Whether a batch is (x, y); a DataLoader makes a list of it. A tuple with names for its entries is none."""
    return type(batch) in (tuple, list) and len(batch) == 2


def mapped(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same nest of mappings, lists and tuples, of changed things."""
    if isinstance(batch, Mapping):
        return {name: mapped(change, part) for name, part in batch.items()}
    if not isinstance(batch, (tuple, list)) or hasattr(batch, "to"):  # a PackedSequence moves itself
        return change(batch)
    parts = [mapped(change, part) for part in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on a device; numbers, words and None stay as they are."""

    def moved(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            part = torch.as_tensor(part)
        if part is None or isinstance(part, (bool, int, float, str, bytes)):
            return part
        if not callable(getattr(part, "to", None)):
            raise ValueError(
                f"a batch holds a {type(part).__name__}, which has no .to(device); give tensors, in mappings, lists "
                "and tuples, or a collate_fn that makes them"
            )
        return part.to(device)

    return mapped(moved, batch)


def leaves(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in their order."""
    leaves: list[Tensor] = []
    mapped(lambda part: leaves.append(part) if isinstance(part, Tensor) else None, batch)
    return leaves


def rows(batch: Any) -> int:
    """How many examples a batch has: the first dimension of its first tensor that has one."""
    counts = [len(t) for t in leaves(batch) if t.ndim]
    if not counts:
        raise ValueError(
            f"a batch is a {type(batch).__name__} without a tensor whose first dimension counts its examples; give one"
        )
    return counts[0]


def taken(batch: Any, index: Tensor) -> Any:
    """The examples of a batch at an index; what does not count examples stays as it is."""
    count = rows(batch)
    return mapped(lambda part: part[index] if _counts(part, count) else part, batch)


def pieces(batch: Any, sizes: Sequence[int], along: int = 0) -> list[Any]:
    """The batch in pieces of these sizes, along this dimension."""
    if len(sizes) == 1:
        return [batch]
    count = sum(sizes)

    def piece(start: int, length: int) -> Any:
        return mapped(lambda t: t.narrow(along, start, length) if _counts(t, count, along) else t, batch)

    return [piece(sum(sizes[:i]), length) for i, length in enumerate(sizes)]


def _counts(part: Any, count: int, along: int = 0) -> bool:
    return isinstance(part, Tensor) and part.ndim > along and part.shape[along] == count


@dataclass(frozen=True)
class Objective:
    """How a batch becomes a loss: what the network makes of it, and what that is worth.

    Without a `forward`, a pair (x, y) is model(x), and its loss is loss(output, y); a mapping is model(**batch). In all
    other cases the loss is loss(output, batch). Where no loss is given, it is the output itself, if that is one number,
    or its `loss`, and else the cross-entropy with the labels y of a pair.
    """

    loss: Loss = F.cross_entropy
    forward: Forward | None = None

    def is_classification(self, batch: Any) -> bool:
        """Whether the loss is the cross-entropy of model(x) with class numbers."""
        return self.loss is F.cross_entropy and self.forward is None and is_pair(batch)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """What the network makes of a batch."""
        if self.forward is not None:
            return self.forward(model, batch)
        if isinstance(batch, Mapping):
            return _called(model, batch)
        if is_pair(batch):
            return model(batch[0])
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ValueError(
            f"a batch is a {type(batch).__name__}{size}, neither a pair (x, y) nor a mapping of the model's arguments; "
            "give forward=(model, batch) -> output"
        )

    def value(self, output: Any, batch: Any) -> Tensor:
        """The loss of that."""
        if self.forward is None and is_pair(batch):
            return self.loss(output, batch[1])
        if self.loss is not F.cross_entropy:
            return self.loss(output, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        loss = output if isinstance(output, Tensor) and output.ndim == 0 else loss
        if loss is None and isinstance(output, Tensor) and is_pair(batch):
            return F.cross_entropy(output, batch[1])
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"the output for a batch is a {type(output).__name__} without a loss; give the model its labels, or "
                "give loss=(output, batch) -> one number"
            )
        return loss

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        return self.value(self.outputs(model, batch), batch)

    def with_tensors(self, model: nn.Module, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The mean loss of a batch with these parameters and buffers in place of the model's."""
        return functional_call(_Call(model, self), {f"model.{name}": t for name, t in tensors.items()}, (batch,))


def _called(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """model(**batch), where it can be called so."""
    try:
        return model(**batch)
    except TypeError:
        try:
            inspect.signature(model.forward).bind(**batch)
        except TypeError as failure:
            raise ValueError(
                f"a batch has {', '.join(map(str, batch))}, but {type(model).__name__} does not take these as its "
                f"arguments ({failure}); give forward=(model, batch) -> output"
            ) from failure
        raise


class _Call(nn.Module):
    """A model and its objective as one module, whose tensors functional_call can replace."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.training = model.training

    def forward(self, batch: Any) -> Tensor:
        return self.objective(self.model, batch)


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
