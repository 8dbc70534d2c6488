"""Data sets cut into parts that are named by their use, readers of the official files, and augmentation."""

import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from pacprune import philox
from pacprune.data.download import SOURCES, Folder, read

NAMES = ("digits", "mnist", "fashion-mnist", "cifar10")

_DIGITS_TEST_SEED = 1998
_DIGITS_TEST_SIZE = 360


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a data set as the model sees it; also a map-style Dataset of (x, y) pairs."""

    name: str
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    """Positions in the source's own order."""
    source: str = field(default="", repr=False)
    """Names what `index` points into; empty when unknown."""
    raw: Tensor | None = field(default=None, repr=False)
    """Hashes of the examples before they were standardised: whoever trains on the raw tensors saw them, too."""

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int | Tensor) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    @cached_property
    def example_hashes(self) -> Tensor:
        """One 64-bit hash per example, of the bytes of x."""
        return example_hashes(self.x)

    @cached_property
    def ids(self) -> Tensor:
        """Other 64-bit names of each example: of (source, index), and of its raw bytes; none when unknown.

        Two splits of one source standardise by different constants, so that their `example_hashes` differ;
        their `ids` agree.
        """
        origin = self.index + int(self.source[:15], 16) if self.source else self.index[:0]
        return origin if self.raw is None else torch.cat([origin, self.raw.T.reshape(-1)])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the bytes of x, y and index."""
        return _sha256(self.x, self.y, self.index)

    def subset(self, positions: Tensor) -> "Part":
        """The examples at `positions` (int64, or a Boolean mask) of this part."""
        x, y, index = self.x[positions], self.y[positions], self.index[positions]
        return Part(self.name, x, y, index, self.source, None if self.raw is None else self.raw[positions])


@dataclass(frozen=True, eq=False)
class Split:
    """A data set named by use: `prior` and `bound` make up `train`; nothing is in two of the other parts."""

    prior: Part
    bound: Part
    train: Part
    unlabelled: Part
    test: Part
    dataset: str
    seed: int
    prior_fraction: float
    mean: tuple[float, ...] = field(repr=False)
    std: tuple[float, ...] = field(repr=False)
    """Standardisation constants per channel or feature, from `prior` alone; empty when there was none."""
    files: dict[str, str] = field(repr=False)
    """SHA-256 of the (decompressed) content of each source file or tensor."""
    classes: int
    """Number of classes; 0 for regression."""
    declared: bool = False
    """True when the user brought the index lists and declared them random: nobody can replay such a split."""
    issued: dict[str, list[str]] = field(default_factory=dict, repr=False)
    """Hashes of what was certified on `bound`, by kind: choosing among them must be paid for."""

    @cached_property
    def duplicates(self) -> int:
        """How many examples of `bound` have an x that also occurs in `prior`, to the byte."""
        return int(torch.isin(self.bound.example_hashes, self.prior.example_hashes).sum())


def check_split(split: object) -> None:
    """Refuses what is no Split of classes: prior and bound examples have to be set apart beforehand."""
    if not isinstance(split, Split):
        raise ValueError(
            f"the data is a {type(split).__name__}, but a certificate needs a Split; make one by pp.data.split(x, y)"
        )
    if split.classes == 0 or split.prior.y.ndim > 1:
        raise ValueError(
            f"split has {split.classes} classes and labels of shape {tuple(split.prior.y.shape)}; "
            "a certificate bounds the error of a classifier, so give one class number per example"
        )


def example_hashes(x: Tensor) -> Tensor:
    """One 64-bit hash per example (blake2b of the bytes of x); labels, and how they are coded, do not matter."""
    return _digests(x)


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
) -> Split:
    """Cuts one's own tensors at random, blind to the labels.

    The order of the examples is philox.permutation(len(x), seed=seed); it is read as prior | bound | unlabelled |
    test. A `test` fraction cuts round(test * n) examples, a (x, y) pair is taken as it is, None leaves `test` empty.
    Of the n' examples left before `unlabelled`, the first round(prior_fraction * n') are the prior part: at one seed,
    a smaller prior part is contained in a larger one.

    uint8 x becomes float32 in [0, 1]. Floating x is standardised by the mean and standard deviation of the prior
    part, one pair for each entry of dimension 1 (channels or features). Integer x (token ids) stays as it is.
    Integer y are class labels in [0, classes), by default one more than the largest; floating y means regression.

    `indices` = (prior, bound) brings one's own lists. A certificate is void unless they were drawn at random:
    `split_declared_random=True` says so, and the certificate repeats whose word it is.
    """
    own = _tensors(x, y)
    order = philox.permutation(len(x), seed=seed) if indices is None else _declared(indices, split_declared_random, x)
    if indices is not None and (unlabelled or isinstance(test, float)):
        raise ValueError(f"indices name prior and bound alone; give unlabelled=0 (not {unlabelled}) and test as a pair")
    if isinstance(test, tuple):
        held = _tensors(*test, prefix="test_")
        test_order = torch.arange(len(held.x))
    else:
        if test is not None and not 0 < test < 1:
            raise ValueError(f"test is {test}, but a fraction lies strictly between 0 and 1; or give a pair (x, y)")
        kept = len(order) - round((test or 0.0) * len(order))
        held, test_order, order = own, order[kept:], order[:kept]
    return _cut(
        own,
        order,
        held,
        test_order,
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        standardise=standardise,
        dataset=dataset,
        classes=classes,
        declared=None if indices is None else len(indices[0]),
    )


def _declared(indices: tuple[Tensor, Tensor], declared: bool, x: Tensor) -> Tensor:
    if not declared:
        raise ValueError("a bound needs a random split: if these indices are one, say split_declared_random=True")
    order = torch.cat([torch.as_tensor(part, dtype=torch.int64).reshape(-1) for part in indices])
    outside, shared = int(((order < 0) | (order >= len(x))).sum()), len(order) - len(torch.unique(order))
    if outside:
        raise ValueError(f"{outside} of the indices lie outside 0..{len(x) - 1}; count the examples from 0")
    if shared:
        raise ValueError(f"the prior and bound indices repeat {shared} examples; every example may be named once")
    return order


def digits(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0) -> Split:
    """The 1,797 8x8 digits that come with the package: 1,437 to train and 360 to test, the same 360 at every seed."""
    content = resources.files("pacprune").joinpath("assets/digits.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        x, y = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))
    images = _Raw(x.unsqueeze(1) / 16.0, y, {"digits.npz": hashlib.sha256(content).hexdigest()})
    fixed = philox.permutation(len(x), seed=_DIGITS_TEST_SEED)
    test_order, pool = fixed[:_DIGITS_TEST_SIZE].sort().values, fixed[_DIGITS_TEST_SIZE:].sort().values
    return _cut(
        images,
        pool[philox.permutation(len(pool), seed=seed)],
        images,
        test_order,
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        dataset="digits",
        classes=10,
    )


def mnist(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None) -> Split:
    """MNIST from its official idx files: 60,000 images of shape (1, 28, 28) to train, 10,000 to test."""
    return _official("mnist", prior_fraction, seed, unlabelled, data_dir)


def fashion_mnist(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None) -> Split:
    """Fashion-MNIST from its official idx files: 60,000 images of shape (1, 28, 28) to train, 10,000 to test."""
    return _official("fashion-mnist", prior_fraction, seed, unlabelled, data_dir)


def cifar10(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None) -> Split:
    """CIFAR-10 from its official binary files: 50,000 images of shape (3, 32, 32) to train, 10,000 to test."""
    return _official("cifar10", prior_fraction, seed, unlabelled, data_dir)


def load(
    name: str, *, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None
) -> Split:
    """A data set by its spelling: digits, mnist, fashion-mnist or cifar10."""
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(NAMES)}")
    if name == "digits":
        return digits(prior_fraction=prior_fraction, seed=seed, unlabelled=unlabelled)
    return _official(name, prior_fraction, seed, unlabelled, data_dir)


@dataclass(frozen=True, eq=False)
class _Raw:
    """Examples in their source's order, with the SHA-256 of each file (or tensor) that they came from."""

    x: Tensor
    y: Tensor
    files: dict[str, str]


def _tensors(x: Tensor, y: Tensor, prefix: str = "") -> _Raw:
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    return _Raw(x, y, {f"{prefix}x": _sha256(x), f"{prefix}y": _sha256(y)})


def _official(name: str, prior_fraction: float, seed: int, unlabelled: int, data_dir: Folder) -> Split:
    files = list(SOURCES[name].contents)
    train_files = [file for file in files if file.startswith(("train", "data"))]
    test_files = [file for file in files if file not in train_files]
    train, test = (_parse({file: read(name, file, data_dir) for file in part}) for part in (train_files, test_files))
    return _cut(
        train,
        philox.permutation(len(train.x), seed=seed),
        test,
        torch.arange(len(test.x)),
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        dataset=name,
        classes=10,
    )


def _parse(contents: dict[str, bytes]) -> _Raw:
    """Images and labels from CIFAR-10's binary batches, or from one idx file each."""
    if all(file.endswith(".bin") for file in contents):
        # A record is one label byte, then 3 x 32 x 32 pixel bytes.
        records = np.frombuffer(b"".join(contents.values()), np.uint8).reshape(-1, 3073)
        x, y = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    else:
        images, y = map(_idx, contents.values())
        x = images[:, None]
    files = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    return _Raw(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()), files)


def _idx(content: bytes) -> np.ndarray:
    """The idx format: byte 3 is the number of dimensions; the sizes follow as big-endian int32, then the bytes."""
    sizes = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(sizes)


def _cut(
    raw: _Raw,
    order: Tensor,
    test_raw: _Raw,
    test_order: Tensor,
    *,
    prior_fraction: float,
    seed: int,
    unlabelled: int,
    dataset: str,
    classes: int | None,
    standardise: bool = True,
    declared: int | None = None,
) -> Split:
    """Reads `order` as prior | bound | unlabelled. prior and bound are views of train: no example is stored twice."""
    _check_shapes(raw, test_raw)
    if declared is None and not 0 < prior_fraction < 1:
        raise ValueError(f"prior_fraction is {prior_fraction}; it must lie strictly between 0 and 1")
    n = len(order) - unlabelled
    k = round(prior_fraction * n) if unlabelled >= 0 else 0
    k, prior_fraction = (k, prior_fraction) if declared is None else (declared, declared / n)
    if not 0 < k < n:
        raise ValueError(
            f"prior_fraction {prior_fraction} of {len(order)} examples less {unlabelled} unlabelled ones leaves a "
            f"prior part of {k} and a bound part of {max(n - k, 0)}; each needs at least one example"
        )
    classes = _count_classes(raw.y, test_raw.y, classes)
    (x, y), (test_x, test_y) = _take(raw, order), _take(test_raw, test_order)
    before = torch.stack([_digests(raw.x[order]), _digests(x)], dim=1)
    mean, std = _standardise_(x, test_x, k) if standardise and x.is_floating_point() else ((), ())
    source, test_source = (hashlib.sha256("".join(r.files.values()).encode()).hexdigest() for r in (raw, test_raw))
    return Split(
        prior=Part("prior", x[:k], y[:k], order[:k], source, before[:k]),
        bound=Part("bound", x[k:n], y[k:n], order[k:n], source, before[k:n]),
        train=Part("train", x[:n], y[:n], order[:n], source, before[:n]),
        unlabelled=Part("unlabelled", x[n:], y[n:], order[n:], source, before[n:]),
        test=Part("test", test_x, test_y, test_order, test_source),
        dataset=dataset,
        seed=seed,
        prior_fraction=prior_fraction,
        mean=mean,
        std=std,
        files=raw.files | test_raw.files,
        classes=classes,
        declared=declared is not None,
    )


def _check_shapes(raw: _Raw, test: _Raw) -> None:
    for part in (raw, test):
        if len(part.x) != len(part.y):
            raise ValueError(f"x holds {len(part.x)} examples but y holds {len(part.y)}; give each example one y")
    one, other = tuple(raw.x.shape[1:]), tuple(test.x.shape[1:])
    if one != other:
        raise ValueError(f"training examples have shape {one} but test examples {other}; give both the same shape")


def _count_classes(y: Tensor, test_y: Tensor, classes: int | None) -> int:
    """The number of classes, every label being in range; 0 for floating y."""
    if y.is_floating_point():
        return 0
    labels = torch.cat([y.flatten(), test_y.flatten()])
    low, high = int(labels.min()), int(labels.max())
    if classes is None:
        classes = high + 1
    if low < 0 or high >= classes:
        raise ValueError(f"labels run from {low} to {high} but must lie in 0..{classes - 1}; renumber them")
    return classes


def _take(raw: _Raw, order: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the examples at `order`: float32 (or integer) x, int64 (or float32) y."""
    x, y = raw.x[order], raw.y[order]
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


def _bytes(values: Tensor) -> np.ndarray:
    """The memory of a tensor as one row of bytes per example."""
    return values.detach().cpu().unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(_bytes(values).data)
    return digest.hexdigest()


def _digests(*tensors: Tensor) -> Tensor:
    """One 64-bit blake2b per example, over its bytes in all the tensors."""
    out = bytearray()
    for example in zip(*map(_bytes, tensors), strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for part in example:
            digest.update(part)
        out += digest.digest()
    return torch.from_numpy(np.frombuffer(out, "<i8").copy())
