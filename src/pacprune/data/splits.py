"""Examples cut at random into parts that are named by their use."""

import hashlib
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pacprune import philox
from pacprune.data import trace
from pacprune.data.trace import Trace, as_bytes, example_hashes

_SKETCH = 64
"""How many hashes of its examples a pool is known by."""
_CHANNELS = (1, 3, 4)
"""How many channels images of bytes have: grey, colour, or colour with transparency."""
NO_LABEL = -1
"""What stands for the label of an example that has none."""
IGNORED = -100
"""The label of a token that does not count, such as padding: torch's cross_entropy and transformers leave it out."""


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """One part of a data set as the model sees it; also a map-style Dataset of (x, y) pairs.

    Args:
        name: What the part is for: prior, bound, train, unlabelled or test.
        x: The inputs, one example per row, standardised.
        y: The labels (int64) or targets (float32), one per example.
        index: Positions of the examples in the source's own order.
        source: Names what `index` points into; empty when unknown.
        raw: Hashes of the examples before they were standardised, or None. Training on the raw tensors counts as
            having seen these examples.
        origin: The part that these examples are changed copies of, or None. Training on them is training on it.

    Example:
        >>> split.bound
        Part(bound: 719 examples of shape (1, 8, 8))
        >>> image, label = split.bound[0]
    """

    name: str
    x: Tensor
    y: Tensor
    index: Tensor
    source: str = ""
    raw: Tensor | None = None
    origin: "Part | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_checksums", _checksums(self))

    def __repr__(self) -> str:
        return f"Part({self.name}: {len(self):,} examples of shape {tuple(self.x.shape[1:])})"

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int | Tensor) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    @cached_property
    def has_labels(self) -> bool:
        """Whether its examples have labels: those of a `bound` part without any are all -1."""
        return not len(self) or not bool((self.y == NO_LABEL).all())

    @cached_property
    def example_hashes(self) -> Tensor:
        """One 64-bit hash per example, of the canonical form of x."""
        return example_hashes(self.x)

    @cached_property
    def known(self) -> Trace:
        """All that these examples are known by: content, origin, and content before it was standardised.

        With its label, an example is known by its content alone.
        """
        contents = [self.example_hashes] if self.raw is None else [self.example_hashes, *self.raw.T]
        labels = trace.label_hashes(self.y)
        pairs = torch.cat([trace.labelled(content.contiguous(), labels) for content in contents])
        return trace.of(self.ids.reshape(-1), pairs)

    @cached_property
    def trace(self) -> Trace:
        """What training on this part leaves behind."""
        if self.origin is not None:  # content of its own, and what it was made from
            return Trace(examples=self.known.examples) | self.origin.trace
        pairs = trace.labelled(self.example_hashes, trace.label_hashes(self.y))
        return trace.of(self.ids.reshape(-1), pairs)

    @cached_property
    def ids(self) -> Tensor:
        """All 64-bit hashes of each example, one row for each kind: content, place in its source, raw content.

        Two splits of one source may standardise by different constants, so that contents differ; the others agree.
        """
        place = [self.index + int(self.source[:15], 16)] if self.source else []
        return torch.stack([self.example_hashes, *place, *(() if self.raw is None else self.raw.T)])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the bytes of x, y and index."""
        return _sha256(self.x, self.y, self.index)

    def augmented(self, transform: Callable[[Tensor], Tensor]) -> "Augmented":
        """The part as a Dataset whose inputs pass through `transform` each time they are read.

        Training on it is traced to this part, so that a certificate needs no declaration. That the transform looks at
        nothing but its input is the issuer's word.

        Args:
            transform: (one input) -> the input that the network sees; it may be random.

        Returns:
            A map-style Dataset of (x, y) pairs.

        Example:
            >>> noisy = split.prior.augmented(lambda image: image + 0.1 * torch.randn_like(image))
            >>> history = pp.fit(model, noisy, pp.Config(epochs=1, lr=0.1))
            >>> certificate = pp.certify_held_out(model, split)
        """
        return Augmented(self, transform)

    def loader(self, batch_size: int, *, transform: Callable[[Tensor], Tensor] | None = None, **options: Any) -> Any:
        """A DataLoader over this part, traced to it.

        Args:
            batch_size: Examples per batch.
            transform: As of `augmented`; None leaves the inputs as they are.
            **options: What else `torch.utils.data.DataLoader` takes, such as shuffle=True; no collate_fn, which could
                read anything.

        Returns:
            The DataLoader, of (x, y) batches.

        Example:
            >>> x, y = next(iter(split.prior.loader(32, shuffle=True)))
            >>> x.shape
            torch.Size([32, 1, 8, 8])
        """
        source: Any = self if transform is None else self.augmented(transform)
        return DataLoader(source, batch_size, **options)

    def subset(self, positions: Tensor) -> "Part":
        """The examples at some positions of this part.

        Args:
            positions: int64 positions, or a Boolean mask with one entry per example.

        Returns:
            A Part of the same name and source.
        """
        x, y, index = self.x[positions], self.y[positions], self.index[positions]
        raw = None if self.raw is None else self.raw[positions]
        return Part(self.name, x, y, index, self.source, raw, self.origin)


def _checksums(part: Part) -> list[int]:
    """Of inputs, labels and places: of their bytes, since writing through numpy changes no version of a tensor."""
    return [zlib.crc32(as_bytes(values).data) for values in (part.x, part.y, part.index)]


def refuse_overwritten(*parts: Part) -> None:
    """Refuses parts whose tensors were written to since they were made: what is known of them is about others."""
    for part in parts:
        for name, before, now in zip(("x", "y", "index"), part._checksums, _checksums(part), strict=True):  # type: ignore[attr-defined]
            if before != now:
                raise ValueError(
                    f"{name} of the {part.name} part was overwritten since the part was made (checksum {before:08x}, "
                    f"now {now:08x}); make the split anew, and give what changes tensors a copy of them"
                )


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """A part whose inputs pass through a transform each time they are read."""

    def __init__(self, part: Part, transform: Callable[[Tensor], Tensor]) -> None:
        self.part, self.transform = part, transform

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.part[i]
        return self.transform(x), y


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """A data set named by use: `prior` and `bound` make up `train`; nothing is in two of the other parts.

    Args:
        prior: S_P, what the prior P may see.
        bound: S without S_P, on which the bound is computed.
        train: S, both of them, for training without a certificate; without a `bound` that has no labels.
        unlabelled: Examples whose labels are not used, for the agreement bound.
        test: Examples that nothing but an evaluation sees.
        dataset: The name of the data set, such as digits.
        seed: The seed of the random order.
        prior_fraction: Share of `train` that is in `prior`.
        mean: What standardisation subtracts, per channel or feature, from `prior` alone; empty when there was none, as
            where `prior` is empty.
        std: What standardisation divides by, likewise.
        files: SHA-256 of the (decompressed) content of each source file or tensor.
        classes: Number of classes; 0 for regression.
        declared: True when the user gave the index lists and declared them random. Such a split cannot be replayed.

    Example:
        >>> split
        Split(digits, seed 0: 718 prior + 719 bound = 1,437 train, 360 test; 10 classes)
        >>> len(split.train), split.duplicates
        (1437, 0)
    """

    prior: Part
    bound: Part
    train: Part
    unlabelled: Part
    test: Part
    dataset: str
    seed: int
    prior_fraction: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: dict[str, str]
    classes: int
    declared: bool = False

    def __repr__(self) -> str:
        sizes = f"{len(self.prior):,} prior + {len(self.bound):,} bound = {len(self.train):,} train"
        if not self.bound.has_labels:
            sizes = f"{len(self.prior):,} prior = train, {len(self.bound):,} bound without labels"
        if len(self.unlabelled):
            sizes += f", {len(self.unlabelled):,} unlabelled"
        order = "declared random" if self.declared else f"seed {self.seed}"
        labels = f"{self.classes} classes" if self.classes else "regression"
        return f"Split({self.dataset}, {order}: {sizes}, {len(self.test):,} test; {labels})"

    @cached_property
    def duplicates(self) -> int:
        """How many examples of `bound` also occur in `prior`, images up to their scale and a 256th of their range."""
        return int(trace.near_copies(self.bound.x, self.prior.x).sum())

    @cached_property
    def test_copies(self) -> int:
        """How many examples of `test` also occur in `train`, to the bit: mistakes on these say nothing of new data."""
        contents = [part.example_hashes if part.raw is None else part.raw[:, -1] for part in (self.test, self.train)]
        return int(torch.isin(*contents).sum())

    @cached_property
    def repeats(self) -> int:
        """How many examples of `bound` are copies of earlier ones, images up to a 256th of their range.

        Images that differ mostly in brightness or contrast are none.
        """
        return int(trace.repeats(self.bound.x).sum())

    @cached_property
    def pool(self) -> list[int]:
        """The smallest hashes of all examples that the parts were cut from: equal for every split of a data set.

        Pools that share most of their examples share most of these.
        """
        parts = [self.prior, self.bound, self.unlabelled]
        if not self.bound.has_labels:  # which were not cut from the others
            parts = [self.bound]
        elif self.test.source == self.bound.source:  # cut from the same examples, by the seed
            parts.append(self.test)
        hashes = [part.example_hashes if part.raw is None else part.raw[:, 0] for part in parts]
        return torch.cat(hashes).unique()[:_SKETCH].tolist()


def index_hash(part: Part) -> str:
    """SHA-256 of the positions of a part's examples in their source."""
    return hashlib.sha256(part.index.numpy().tobytes()).hexdigest()


def check_split(split: object) -> None:
    """Refuses anything but a Split of classes: a certificate needs prior and bound examples that are set apart."""
    if not isinstance(split, Split):
        raise ValueError(
            f"the data is a {type(split).__name__}, but a certificate needs a Split; make one by pp.data.split(x, y)"
        )
    if split.classes == 0 or split.prior.y.ndim > 1:
        raise ValueError(
            f"split has {split.classes} classes and labels of shape {tuple(split.prior.y.shape)}; "
            "a certificate bounds the error of a classifier, so give one class number per example"
        )
    refuse_unlabelled(split)


def refuse_unlabelled(split: Split) -> None:
    """Refuses bound examples without labels where right answers have to be known."""
    if not split.bound.has_labels:
        raise ValueError(
            f"the {len(split.prior):,} prior examples have labels and the {len(split.bound):,} bound examples have "
            "none, but mistakes cannot be counted without them; give bound examples with labels, or certify a "
            "disagreement"
        )


def split(
    x: Tensor,
    y: Tensor,
    *,
    prior_fraction: float = 0.5,
    seed: int = 0,
    test: tuple[Tensor, Tensor] | float | None = None,
    unlabelled: int = 0,
    standardise: bool = True,
    dataset: str = "own",
    classes: int | None = None,
    indices: tuple[Tensor, Tensor] | None = None,
    split_declared_random: bool = False,
    bound: Tensor | None = None,
) -> Split:
    """Cuts tensors of your own at random, blind to the labels.

    The order of the examples is philox.permutation(len(x), seed=seed). It is read as prior | bound | unlabelled | test.
    Of the n' examples left before `unlabelled`, the first round(prior_fraction * n') are the prior part: at one seed,
    a smaller prior part is contained in a larger one.

    uint8 x becomes float32 in [0, 1]. With 3 or 4 dimensions it is taken for images: channels (1, 3 or 4 of them) that
    come last are put first, and images without channels get one. Floating x is standardised by the mean and standard
    deviation of the prior part, one pair for each entry of dimension 1 (channels or features). Integer x (token ids)
    stays as it is.

    With prior_fraction=0 every training example is a bound example, for a prior that no data shape. Nothing is
    standardised then: all constants would come from bound examples.

    Args:
        x: The inputs, one example per row.
        y: One label or target per example. Integers are class labels; floating y means regression.
        prior_fraction: Share of the training examples in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        test: Test examples: a pair (x, y) is taken as it is, a fraction such as 0.2 is cut off as
            round(fraction * n) examples, None leaves `test` empty.
        unlabelled: How many examples to set apart as `unlabelled`, such as 0.
        standardise: Whether floating x is standardised.
        dataset: The name that certificates give the data.
        classes: Number of classes; None means one more than the largest label.
        indices: Lists (prior, bound) of your own instead of a random order. A certificate is void unless they were
            drawn at random.
        split_declared_random: Says that `indices` were drawn at random, or `bound` independently of x, either of which
            needs it; the certificate says that you declared it.
        bound: Inputs without labels that are the bound part, for a certificate about a disagreement. All of x and y
            but the test part is then the prior part. None cuts the bound part off x and y.

    Returns:
        A Split whose parts share no position. Examples that occur several times may lie in several parts: where that is
        more than 1 % of the test part, it warns.

    Raises:
        ValueError: If a part would be empty, shapes or labels do not fit, or `indices` or `bound` are not declared
            random.

    Example:
        >>> pp.data.split(x, y, test=0.2, prior_fraction=0.5, seed=1)
        Split(own, seed 1: 575 prior + 575 bound = 1,150 train, 287 test; 10 classes)
    """
    examples = _hashed(x, y)
    if indices is None:
        order, declared_prior = philox.permutation(len(x), seed=seed), None
    else:
        order, declared_prior = _declared_order(indices, split_declared_random, x), len(indices[0])
        if unlabelled or isinstance(test, float):
            raise ValueError(
                f"indices name prior and bound alone; give unlabelled=0 (not {unlabelled}) and test as a pair"
            )
    if bound is not None and (unlabelled or indices is not None):
        named = f"indices name {len(indices[1])} bound examples" if indices else f"unlabelled is {unlabelled}"
        raise ValueError(
            f"bound has {len(bound)} inputs, which are all that has no labels, and {named}; give one of both"
        )
    if isinstance(test, tuple):
        test_examples = _hashed(*test, prefix="test_")
        test_order = torch.arange(len(test_examples.x))
    else:
        if test is not None and not 0 < test < 1:
            raise ValueError(f"test is {test}, but a fraction lies strictly between 0 and 1; or give a pair (x, y)")
        end = len(order) - round((test or 0.0) * len(order))
        test_examples, test_order, order = examples, order[end:], order[:end]
    if bound is not None:
        declared_prior = len(order)
        order = torch.cat([order, torch.arange(len(x), len(x) + len(bound))])
        examples = _joined(examples, bound, declared=split_declared_random)
    return cut(
        examples,
        order,
        test_examples,
        test_order,
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        standardise=standardise,
        dataset=dataset,
        classes=classes,
        declared_prior=declared_prior,
        without_labels=0 if bound is None else len(bound),
    )


def whole(x: Tensor, y: Tensor) -> Split:
    """Examples that are all bound examples, as they are: for networks that were made elsewhere, or before."""
    x, y = (t.float() if t.is_floating_point() else t for t in (x.detach().cpu(), y.detach().cpu()))
    y = y if y.is_floating_point() else y.long()
    examples = Examples(x, y, {"x": _sha256(x), "y": _sha256(y)})
    for name, values in (("x", x), ("y", y)):
        if not values.isfinite().all():
            raise ValueError(f"{name} holds {int((~values.isfinite()).sum())} NaN or infinite values; remove them")
    index, source = torch.arange(len(x)), _name_source(examples)
    parts = {"prior": slice(0, 0), "bound": slice(None), "train": slice(None), "unlabelled": slice(0, 0)}
    cuts = {name: Part(name, x[rows], y[rows], index[rows], source) for name, rows in parts.items()}
    test = Part("test", x[:0], y[:0], index[:0])
    classes = _count_classes(y, y[:0], None)
    return Split(
        **cuts,
        test=test,
        dataset="own",
        seed=0,
        prior_fraction=0.0,
        mean=(),
        std=(),
        files=examples.files,
        classes=classes,
        declared=True,
    )


def _declared_order(indices: tuple[Tensor, Tensor], declared: bool, x: Tensor) -> Tensor:
    if not declared:
        raise ValueError("a bound needs a random split: if these indices are one, say split_declared_random=True")
    order = torch.cat([torch.as_tensor(part, dtype=torch.int64).reshape(-1) for part in indices])
    outside, shared = int(((order < 0) | (order >= len(x))).sum()), len(order) - len(torch.unique(order))
    if outside:
        raise ValueError(f"{outside} of the indices lie outside 0..{len(x) - 1}; count the examples from 0")
    if shared:
        raise ValueError(f"the prior and bound indices repeat {shared} examples; every example may be named once")
    return order


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples in their source's order, with the SHA-256 of each file (or tensor) that they came from."""

    x: Tensor
    y: Tensor
    files: dict[str, str]


def _hashed(x: Tensor, y: Tensor, prefix: str = "") -> Examples:
    x, y = _channels_first(_as_tensor(x, f"{prefix}x")), _as_tensor(y, f"{prefix}y")
    return Examples(x, y, {f"{prefix}x": _sha256(x), f"{prefix}y": _sha256(y)})


def _as_tensor(values: Any, name: str) -> Tensor:
    """Numbers as a tensor; anything else is refused."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} is a {type(values).__name__} that is no array of numbers; give a tensor or a numpy array (of a "
            "Dataset, its tensors; of words, their numbers)"
        ) from None


def _joined(examples: Examples, bound: Tensor, *, declared: bool) -> Examples:
    """The examples, and behind them inputs that have no labels."""
    inputs, y = _channels_first(torch.as_tensor(bound)), examples.y
    kinds = [(tuple(x.shape[1:]), x.dtype) for x in (examples.x, inputs)]
    if kinds[0] != kinds[1] or not len(inputs):
        raise ValueError(
            f"bound has {len(inputs)} inputs of shape {kinds[1][0]} in {kinds[1][1]}, and x has {len(y)} of shape "
            f"{kinds[0][0]} in {kinds[0][1]}; give at least one, of the same shape and type as those of x"
        )
    if y.is_floating_point() and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(
            f"bound has inputs without labels, on which classes can be compared, but y runs from {float(y.min()):.3g} "
            f"to {float(y.max()):.3g} as in regression; leave bound out, or give classes"
        )
    if not declared:
        copies = int(torch.isin(example_hashes(inputs), example_hashes(examples.x)).sum())
        raise ValueError(
            f"no seed has drawn the {len(inputs)} inputs of bound, and {copies} of them are among the {len(y)} of x, "
            "which networks are trained on; if they were drawn at random as new data are, independently of x, say "
            "split_declared_random=True"
        )
    y = y if y.is_floating_point() else y.long()
    none = torch.full((len(inputs), *y.shape[1:]), NO_LABEL, dtype=y.dtype)
    files = examples.files | {"bound_x": _sha256(inputs)}
    return Examples(torch.cat([examples.x, inputs]), torch.cat([y, none]), files)


def _channels_first(x: Tensor) -> Tensor:
    """Images of bytes as (n, channels, height, width): files and arrays often have channels last, or none."""
    if x.dtype != torch.uint8 or x.ndim not in (3, 4):
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.shape[1] in _CHANNELS:
        return x
    if x.shape[3] in _CHANNELS:
        return x.permute(0, 3, 1, 2).contiguous()
    raise ValueError(
        f"x is torch.uint8 of shape {tuple(x.shape)}, of which neither dimension 1 nor dimension 3 counts 1, 3 or 4 "
        "channels; give x.float() / 255 as (n, channels, height, width)"
    )


def cut(
    examples: Examples,
    order: Tensor,
    test_examples: Examples,
    test_order: Tensor,
    *,
    prior_fraction: float,
    seed: int,
    unlabelled: int,
    dataset: str,
    classes: int | None,
    standardise: bool = True,
    declared_prior: int | None = None,
    without_labels: int = 0,
) -> Split:
    """Reads `order` as prior | bound | unlabelled. prior and bound are views of train: no example is stored twice.

    `declared_prior` is the size of the prior part if the user gave the order. The last examples, `without_labels` of
    them, are the bound part then, and not in train.
    """
    _check_shapes(examples, test_examples)
    if declared_prior is None and not 0 <= prior_fraction < 1:
        raise ValueError(
            f"prior_fraction is {prior_fraction}; it must lie in [0, 1), where 0 is for a prior that no data shape"
        )
    n = len(order) - unlabelled
    k = round(prior_fraction * n) if unlabelled >= 0 else 0
    k, prior_fraction = (k, prior_fraction) if declared_prior is None else (declared_prior, declared_prior / n)
    is_data_free = declared_prior is None and prior_fraction == 0 and unlabelled >= 0
    if not (0 < k < n or (is_data_free and n > 0)):
        raise ValueError(
            f"prior_fraction {prior_fraction} of {len(order)} examples less {unlabelled} unlabelled ones leaves a "
            f"prior part of {k} and a bound part of {max(n - k, 0)}; each needs at least one example"
        )
    classes = _count_classes(examples.y[: len(examples.y) - without_labels], test_examples.y, classes)
    (x, y), (test_x, test_y) = _take(examples, order), _take(test_examples, test_order)
    hashes = torch.stack([example_hashes(examples.x[order]), example_hashes(x)], dim=1)
    test_hashes = torch.stack([example_hashes(test_examples.x[test_order]), example_hashes(test_x)], dim=1)
    mean, std = _standardise_(x, test_x, k) if standardise and k and x.is_floating_point() else ((), ())
    source, test_source = (_name_source(part) for part in (examples, test_examples))
    end = k if without_labels else n
    parts = Split(
        prior=Part("prior", x[:k], y[:k], order[:k], source, hashes[:k]),
        bound=Part("bound", x[k:n], y[k:n], order[k:n], source, hashes[k:n]),
        train=Part("train", x[:end], y[:end], order[:end], source, hashes[:end]),
        unlabelled=Part("unlabelled", x[n:], y[n:], order[n:], source, hashes[n:]),
        test=Part("test", test_x, test_y, test_order, test_source, test_hashes),
        dataset=dataset,
        seed=seed,
        prior_fraction=prior_fraction,
        mean=mean,
        std=std,
        files=examples.files | test_examples.files,
        classes=classes,
        declared=declared_prior is not None,
    )
    if parts.test_copies * 100 > len(parts.test):
        warnings.warn(
            f"{parts.test_copies:,} of the {len(parts.test):,} test examples are also among the {len(parts.train):,} "
            "that networks are trained on, so that test errors are not those on new data; take them out, unless new "
            "data repeat as often",
            stacklevel=3,
        )
    return parts


def _name_source(examples: Examples) -> str:
    """SHA-256 of all files together: equal for examples of the same origin, in the same order."""
    return hashlib.sha256("".join(examples.files.values()).encode()).hexdigest()


def _check_shapes(train: Examples, test: Examples) -> None:
    for part in (train, test):
        if len(part.x) != len(part.y):
            raise ValueError(f"x holds {len(part.x)} examples but y holds {len(part.y)}; give each example one y")
    shape, test_shape = tuple(train.x.shape[1:]), tuple(test.x.shape[1:])
    if shape != test_shape:
        raise ValueError(
            f"training examples have shape {shape} but test examples {test_shape}; give both the same shape"
        )


def _count_classes(y: Tensor, test_y: Tensor, classes: int | None) -> int:
    """The number of classes, every label being in range; 0 for floating y."""
    if y.is_floating_point():
        return 0
    labels = torch.cat([y.flatten(), test_y.flatten()])
    if y.ndim > 1:  # an example of several labels may have some that do not count
        labels = labels[labels != IGNORED]
    if not len(labels):
        raise ValueError(
            f"all {y.numel()} labels are {IGNORED}, which does not count, so that there is nothing to predict; give "
            "labels from 0 up, such as the next token of each"
        )
    low, high = int(labels.min()), int(labels.max())
    if classes is None:
        classes = high + 1
    if low < 0 or high >= classes:
        raise ValueError(f"labels run from {low} to {high} but must lie in 0..{classes - 1}; renumber them")
    return classes


def _take(examples: Examples, order: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the examples at `order`: float32 (or integer) x, int64 (or float32) y."""
    x, y = examples.x[order], examples.y[order]
    x = x.float().div_(255.0) if x.dtype == torch.uint8 else x.float() if x.is_floating_point() else x
    y = y.float() if y.is_floating_point() else y.long()
    for name, values in (("x", x), ("y", y)):
        if not values.isfinite().all():
            raise ValueError(f"{name} holds {int((~values.isfinite()).sum())} NaN or infinite values; remove them")
    return x, y


def _standardise_(x: Tensor, test_x: Tensor, k: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """x <- (x - mean) / std in place, the constants being those of x[:k]; a constant channel is only centred."""
    shape = (-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else ()
    over = [d for d in range(x.ndim) if d != 1]
    # Sums in float64, constants in float32: the order in which another machine adds must not change the bytes of x.
    blocks, count = x[:k].split(1024), x[:k].numel() / (x.shape[1] if x.ndim > 1 else 1)
    mean = torch.stack([block.double().sum(over) for block in blocks]).sum(0) / count
    square = torch.stack([(block.double() - mean.view(shape)).square().sum(over) for block in blocks]).sum(0)
    std = (square / count).sqrt()
    std = torch.where(std <= 1e-7 * mean.abs(), 1.0, std).float()
    mean = mean.float()
    for values in (x, test_x):
        values.sub_(mean.view(shape)).div_(std.view(shape))
    return tuple(mean.reshape(-1).tolist()), tuple(std.reshape(-1).tolist())


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(as_bytes(values).data)
    return digest.hexdigest()
