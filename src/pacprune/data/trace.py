"""What has been used: examples are known by hashes of their content, their origin and their labels.

A certificate holds only if nothing that shaped a network knew the bound examples. So every training and scoring leaves
a `Trace`, evaluations are noted as looks, and masks carry the trace of what they were computed from.
"""

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOREIGN = -1
"""In `Trace.labelled`: the weights were changed by something other than pacprune."""
UNKNOWN_MASK = -2
"""In `Trace.labelled`: a mask was applied that pacprune did not compute."""
UNTRAINED = -3
"""In `Trace.labelled`: pacprune has never trained it, or never a layer of it."""
_PORTION = 4096
"""Examples whose canonical form is in memory at once."""
_MEANS, _ROWS = 64, 256
"""How near copies are looked for: by so many means of an image, for so many images at a time."""
_PAIRS = 2**14
"""Pairs of images whose pixels are compared at a time."""
_PIXELS = 64
"""The fewest values of a channel that are told from others by their shape alone, whatever their scale."""


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Trace:
    """What training, scoring or choosing has used; `a | b` is both.

    Args:
        examples: Sorted hashes under which the examples are known, labels aside; an example may have several.
        labelled: Sorted hashes of every example together with the label that it was used with.
    """

    examples: Tensor = field(default_factory=_empty)
    labelled: Tensor = field(default_factory=_empty)

    def __or__(self, other: "Trace") -> "Trace":
        if self is other or not len(other.examples) + len(other.labelled):
            return self
        if not len(self.examples) + len(self.labelled):
            return other
        return Trace(_union(self.examples, other.examples), _union(self.labelled, other.labelled))

    def __repr__(self) -> str:
        return f"Trace({len(self.labelled):,} labelled examples)"

    def without(self, kind: int) -> "Trace":
        """The same without the note that something of this kind is not known."""
        return Trace(self.examples, self.labelled[self.labelled != kind]) if kind in self.labelled else self

    @property
    def count(self) -> int:
        """How many labelled examples there are."""
        return len(self.labelled) - sum(kind in self.labelled for kind in (FOREIGN, UNKNOWN_MASK, UNTRAINED))

    def equal(self, other: "Trace") -> bool:
        """Whether both hold the same."""
        return torch.equal(self.examples, other.examples) and torch.equal(self.labelled, other.labelled)


def _union(*hashes: Tensor) -> Tensor:
    """All that occur, once, sorted; by numpy, which sorts integers twenty times as fast as torch."""
    return torch.from_numpy(np.unique(np.concatenate([np.empty(0, np.int64), *(part.numpy() for part in hashes)])))


def foreign(kind: int = FOREIGN) -> Trace:
    """The trace of something that pacprune knows nothing about."""
    return Trace(labelled=torch.tensor([kind]))


def of(examples: Tensor, with_label: Tensor) -> Trace:
    """A trace of these hashes, in any order."""
    return Trace(_union(examples.cpu()), _union(with_label.cpu()))


# --- Hashes.


def example_hashes(x: Tensor) -> Tensor:
    """One 64-bit blake2b per example, of its canonical form.

    Of an image that is each channel's range cut into 256 parts: another standardisation, another float type and noise
    below that change nothing. Of other floating x it is float32, of whole numbers int64.
    """
    portions = [_digests(_canonical(part)) for part in x.detach().cpu().split(_PORTION)]
    return torch.cat([_empty(), *portions])


def label_hashes(y: Tensor) -> Tensor:
    """One 64-bit blake2b per label: of its value as int64 or float32."""
    y = y.detach().cpu()
    return _digests(y.float() if y.is_floating_point() else y.long())


def labelled(examples: Tensor, labels: Tensor) -> Tensor:
    """One hash per example of the pair of its hash and its label's."""
    a, b = (t.numpy().view(np.uint64) for t in (examples, labels))
    with np.errstate(over="ignore"):
        mixed = (a ^ (b * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31))).view(np.int64))


def _is_image(x: Tensor) -> bool:
    """Whether x has channels of so many numbers that their shape alone tells examples apart."""
    return x.ndim > 2 and x[:1, :1].numel() >= _PIXELS and (x.is_floating_point() or x.dtype == torch.uint8)


def _canonical(x: Tensor) -> Tensor:
    """The form that is hashed: equal for examples that are to be taken for one."""
    if not _is_image(x):
        return x.float() if x.is_floating_point() else x.long()
    flat = x.flatten(2).float()
    low, high = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    constants = torch.where(high > low, 0.0, low).view(torch.int32)
    return torch.cat([_scaled(x).unflatten(1, flat.shape[1:]).int(), constants], dim=-1)


def _scaled(x: Tensor) -> Tensor:
    """Images with every channel scaled to whole numbers from 0 to 256, as int16 in one row for each."""
    flat = x.flatten(2).float()
    low, high = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    # An 8-bit image never lies halfway between two of these, so that rounding is the same after every scaling.
    return torch.where(high > low, (flat - low) / (high - low) * 256, 0.0).round().short().flatten(1)


def near_copies(x: Tensor, others: Tensor) -> Tensor:
    """Which examples have one among the `others` that is the same but for a 256th of its range, in every pixel.

    Examples that are no images, and images with a channel of one value, have to be equal. A Boolean for each of x.
    """
    near = torch.isin(example_hashes(x), example_hashes(others))
    if not (_is_image(x) and len(x) and len(others)):
        return near
    pixels = [torch.cat([_scaled(part) for part in t.detach().cpu().split(_PORTION)]) for t in (x, others)]
    # Equal but for 1 in every pixel, two images differ by at most 1 in every mean over pixels.
    for i, j in _close_pairs(_means(pixels[0]), _means(pixels[1])):
        near[i[_equal(pixels[0][i], pixels[1][j])]] = True
    return near


def repeats(x: Tensor) -> Tensor:
    """Which examples are copies of earlier ones: equal, or images that are but for a 256th of their range.

    Images that differ mostly in brightness or contrast are no copies: of signals, that may be the class. A Boolean for
    each of x.
    """
    x = x.detach().cpu()
    hashes = _digests(x.float() if x.is_floating_point() else x.long())
    copies = torch.ones(len(x), dtype=torch.bool)
    copies[torch.from_numpy(np.unique(hashes.numpy(), return_index=True)[1])] = False
    places = (~copies).nonzero().flatten()
    if not (_is_image(x) and len(places)):
        return copies
    flat = x[places].flatten(2).float()
    pixels, spread = _scaled(flat), flat.amax(-1) - flat.amin(-1)
    # A 256th less or more at both ends of a range moves its logarithm by a 128th.
    features = torch.cat([_means(pixels), 128 * spread.clamp_min(1e-30).log()], dim=1)
    for i, j in _close_pairs(features, features):
        later = i > j
        i, j = i[later], j[later]
        same = _equal(pixels[i], pixels[j]) & _differ_in_shape(flat[i], flat[j])
        copies[places[i[same]]] = True
    return copies


def _differ_in_shape(a: Tensor, b: Tensor) -> Tensor:
    """Whether at most half of the squared difference of two images is one of brightness and contrast."""
    difference, pattern = a - b, b - b.mean(-1, keepdim=True)
    slope = (difference * pattern).sum(-1) / pattern.square().sum(-1).clamp_min(1e-30)
    rest = difference - difference.mean(-1, keepdim=True) - slope[..., None] * pattern
    return rest.square().sum((1, 2)) >= 0.5 * difference.square().sum((1, 2))


def sketches(x: Tensor) -> Tensor:
    """Of each image 64 means, by which near copies are found later on; examples that are no images have none."""
    if not _is_image(x):
        return torch.empty(len(x), 0)
    return torch.cat([_means(_scaled(part)) for part in x.detach().cpu().split(_PORTION)])


def _means(pixels: Tensor) -> Tensor:
    return torch.stack([part.float().mean(1) for part in pixels.chunk(_MEANS, 1)], 1)


def _equal(pixels: Tensor, others: Tensor) -> Tensor:
    """Whether two images, as `_scaled` gives them, differ by at most 1 in every pixel, and are no constants."""
    return ((pixels - others).abs() <= 1).all(1) & (pixels > 0).any(1)


def _close_pairs(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places (i, j) of all pairs of rows whose numbers all differ by at most 1, some pairs at a time."""
    telling = second.var(0, correction=0).argsort(descending=True)
    means = [m[:, telling].contiguous() for m in (first, second)]
    orders = [m[:, 0].argsort() for m in means]
    firsts = [m[order, 0].contiguous() for m, order in zip(means, orders, strict=True)]
    for start in range(0, len(first), _ROWS):
        rows, ends = orders[0][start : start + _ROWS], firsts[0][start : start + _ROWS]
        low, high = torch.searchsorted(firsts[1], torch.stack([ends[0] - 1.01, ends[-1] + 1.01])).tolist()
        for columns in orders[1][low:high].split(_PORTION):
            i, j = (places[hits] for places, hits in zip((rows, columns), _close(means, rows, columns), strict=True))
            yield from zip(i.split(_PAIRS), j.split(_PAIRS), strict=True)


def _close(means: list[Tensor], rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (of a row, of a column) whose means all differ by at most 1: places in `rows` and in `columns`."""
    a, b = means[0][rows], means[1][columns]
    i, j = ((a[:, None, :4] - b[None, :, :4]).abs() <= 1.01).all(-1).nonzero().unbind(1)
    for k in range(4, a.shape[1], 12):
        stays = ((a[i, k : k + 12] - b[j, k : k + 12]).abs() <= 1.01).all(-1)
        i, j = i[stays], j[stays]
    return i, j


def _digests(values: Tensor) -> Tensor:
    digests = bytearray()
    for example in as_bytes(values):
        digests += hashlib.blake2b(example, digest_size=8).digest()
    return torch.from_numpy(np.frombuffer(digests, "<i8").copy())


def as_bytes(values: Tensor) -> np.ndarray:
    """The memory of a tensor as one row of bytes per example."""
    return values.detach().cpu().unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()


# --- Looks: an evaluation may decide what is trained next.


class Look(NamedTuple):
    """When something was evaluated first in this process, on what, and what was.

    Args:
        moment: When that was, as `now` counts.
        hashes: Of the examples.
        sketch: Their `sketches`, where they are of unknown origin; else None.
        trained: Whether it was training, which tells its loss, and no evaluation.
        networks: Fingerprints of the networks that were evaluated, or were about to be trained.
    """

    moment: int
    hashes: Tensor
    sketch: Tensor | None
    trained: bool
    networks: set[int]


_looks: dict[bytes, Look] = {}
"""All looks, by what was looked at."""
_clock = itertools.count(1)


def now() -> int:
    """A number that is larger each time: what comes after what in this process."""
    return next(_clock)


def look(
    hashes: Tensor,
    sketch: Callable[[], Tensor] | None = None,
    *,
    networks: Iterable[int | None] = (),
    trained: bool = False,
) -> None:
    """Notes that something was evaluated on these examples: what is trained afterwards may have been chosen by it.

    `sketch` makes their `sketches`, where they may be near copies of examples that matter. `networks` are known by
    their fingerprints. `trained` is for training, which tells its losses.
    """
    key = hashlib.blake2b(hashes.numpy().tobytes(), digest_size=16).digest() + bytes([trained])
    if key not in _looks:
        _looks[key] = Look(now(), hashes, None if sketch is None else sketch(), trained, set())
    _looks[key].networks.update(network for network in networks if network is not None)


def count_looks() -> int:
    """How many different data were looked at in this process."""
    return len(_looks)


def looked(before: int | None = None, *, trained: bool = False) -> Trace:
    """All that was evaluated on in this process, or before a moment of it; or, with `trained`, trained on."""
    hashes = [
        entry.hashes
        for entry in _looks.values()
        if entry.trained == trained and (before is None or entry.moment < before)
    ]
    return Trace(examples=_union(*hashes)) if hashes else Trace()


def networks_on(examples: Tensor) -> set[int]:
    """Fingerprints of all networks that were evaluated in this process on any of these examples."""
    looks = (entry for entry in _looks.values() if bool(torch.isin(entry.hashes, examples).any()))
    return {network for entry in looks for network in entry.networks}


def near_looks(x: Tensor, seen: Trace) -> Tensor:
    """Which examples are near copies of images that were looked at and are in the trace. A Boolean for each of x."""
    near, sketch = torch.zeros(len(x), dtype=torch.bool), None
    for _, hashes, known, *_ in _looks.values():
        used = None if known is None else known[torch.isin(hashes, seen.examples)]
        if used is None or not used.numel():
            continue
        sketch = sketches(x) if sketch is None else sketch
        if sketch.shape[1:] == used.shape[1:]:
            for i, _ in _close_pairs(sketch, used):
                near[i] = True
    return near & (sketch > 0).any(1) if sketch is not None else near


_UNKNOWN = foreign(UNKNOWN_MASK)

# --- Scores and masks are known with the trace of what they follow from.

_origins: dict[int, tuple[weakref.ref[Tensor], int, Trace]] = {}
"""Traces of tensors by id, each with the version that it is about: a tensor that was written to is another.

An attribute of the tensor would be pickled with it, and torch.load would refuse that.
"""


def note(tensors: Mapping[str, Tensor], trace: Trace) -> None:
    """Remembers of each of these tensors what it follows from."""
    for tensor in tensors.values():
        key = id(tensor)
        _origins[key] = weakref.ref(tensor, lambda _, key=key: _origins.pop(key, None)), version_of(tensor), trace


def noted(tensors: Iterable[Tensor]) -> Trace:
    """What these tensors follow from; where one of them is not known, the trace says so, too."""
    together = Trace()
    for tensor in tensors:
        known, version, trace = _origins.get(id(tensor), (lambda: None, 0, _UNKNOWN))
        together = together | (trace if known() is tensor and version == version_of(tensor) else _UNKNOWN)
    return together


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; tensors of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version
