"""The data sets that have a name: one function and one row of DATA_SETS each."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from pacprune import philox
from pacprune.data import download, own, text
from pacprune.data.download import BytesProgress, Folder, Source
from pacprune.data.splits import Examples, Split, cut
from pacprune.types import check_name

_DIGITS_TEST_SEED = 1998
_DIGITS_TEST_SIZE = 360

_MNIST = Source(
    name="mnist",
    folder="mnist",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    contents={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)
_FASHION_MNIST = Source(
    name="fashion-mnist",
    folder="fashion-mnist",
    mirrors=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        # The authors' own bucket answers plain http only; the md5 below is what makes it safe to use.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    contents={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)
_CIFAR10 = Source(
    name="cifar10",
    folder="cifar-10-batches-bin",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    contents={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)
_TINY_SHAKESPEARE = Source(
    name="tinyshakespeare",
    folder="tinyshakespeare",
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
    downloads={"input.txt": "6fb458f1232090904fb40fe944165e91"},
    contents={"input.txt": "6fb458f1232090904fb40fe944165e91"},
)
LINUX_C = "linux-c.jsonl"
"""The file of documents that is made of the package of Linux."""
_LINUX_FOLDERS = (
    *("block/", "crypto/", "fs/", "kernel/", "lib/", "mm/", "net/", "security/", "sound/"),
    *("drivers/acpi/", "drivers/infiniband/", "drivers/input/", "drivers/media/", "drivers/mtd/", "drivers/net/"),
    *("drivers/scsi/", "drivers/tty/", "drivers/usb/"),
)
"""As much as 45 MB hold when it is compressed."""


def _linux_documents(package: bytes) -> bytes:
    """The C files of some folders of a package of Linux, as lines of JSON."""
    documents = text.apart(text.of_package(package, "the package"))
    return text.lines(document for document in documents if document.name.startswith(_LINUX_FOLDERS))


_LINUX = Source(
    name="linux-c",
    folder="linux-c",
    mirrors=(),
    downloads={
        "linux-source-6.1_6.1.176-1_all.deb": "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094"
    },
    contents={LINUX_C: "647c4e786ddb3462df7eac398ff11ecaa8ecd90ab1bc15b7b37d58bc339d23cd"},
    package="linux-source-6.1=6.1.176-1",
    convert=_linux_documents,
)


def digits(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0) -> Split:
    """The 8x8 digits that come with the package: 1,437 images to train, and 360 to test, the same at every seed.

    Args:
        prior_fraction: Share of the training images in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        unlabelled: How many training images to set apart as `unlabelled`, such as 0.

    Returns:
        A Split of 1,797 images of shape (1, 8, 8) in 10 classes, standardised by the prior part unless that is empty.

    Example:
        >>> pp.data.digits(prior_fraction=0.5, seed=0)
        Split(digits, seed 0: 718 prior + 719 bound = 1,437 train, 360 test; 10 classes)
    """
    content = resources.files("pacprune").joinpath("assets/digits.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        x, y = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))
    images = Examples(x.unsqueeze(1) / 16.0, y, {"digits.npz": hashlib.sha256(content).hexdigest()})
    fixed = philox.permutation(len(x), seed=_DIGITS_TEST_SEED)
    test_order, pool = fixed[:_DIGITS_TEST_SIZE].sort().values, fixed[_DIGITS_TEST_SIZE:].sort().values
    return cut(
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
    """MNIST from its official idx files: 60,000 images of shape (1, 28, 28) to train, 10,000 to test.

    Args:
        prior_fraction: Share of the training images in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        unlabelled: How many training images to set apart as `unlabelled`, such as 0.
        data_dir: Folder of the files; None means that of `data_folder`.

    Returns:
        A Split in 10 classes, standardised by the prior part unless that is empty; `test` are the official 10,000.

    Raises:
        ValueError: If a file is missing or damaged; `fetch` downloads it.

    Example:
        >>> split = pp.data.mnist(prior_fraction=0.5)  # doctest: +SKIP
    """
    return _official(_MNIST, prior_fraction, seed, unlabelled, data_dir)


def fashion_mnist(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None) -> Split:
    """Fashion-MNIST from its official idx files: 60,000 images of shape (1, 28, 28) to train, 10,000 to test.

    Args:
        prior_fraction: Share of the training images in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        unlabelled: How many training images to set apart as `unlabelled`, such as 0.
        data_dir: Folder of the files; None means that of `data_folder`.

    Returns:
        A Split in 10 classes, standardised by the prior part unless that is empty; `test` are the official 10,000.

    Raises:
        ValueError: If a file is missing or damaged; `fetch` downloads it.

    Example:
        >>> split = pp.data.fashion_mnist(prior_fraction=0.5)  # doctest: +SKIP
    """
    return _official(_FASHION_MNIST, prior_fraction, seed, unlabelled, data_dir)


def cifar10(*, prior_fraction: float = 0.5, seed: int = 0, unlabelled: int = 0, data_dir: Folder = None) -> Split:
    """CIFAR-10 from its official binary files: 50,000 images of shape (3, 32, 32) to train, 10,000 to test.

    Args:
        prior_fraction: Share of the training images in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        unlabelled: How many training images to set apart as `unlabelled`, such as 0.
        data_dir: Folder of the files; None means that of `data_folder`.

    Returns:
        A Split in 10 classes, standardised by the prior part unless that is empty; `test` are the official 10,000.

    Raises:
        ValueError: If a file is missing or damaged; `fetch` downloads it.

    Example:
        >>> split = pp.data.cifar10(prior_fraction=0.5)  # doctest: +SKIP
    """
    return _official(_CIFAR10, prior_fraction, seed, unlabelled, data_dir)


def _official(source: Source, prior_fraction: float, seed: int, unlabelled: int, data_dir: Folder) -> Split:
    train_files = [file for file in source.contents if file.startswith(("train", "data"))]
    test_files = [file for file in source.contents if file not in train_files]
    train, test = (
        _parse({file: download.read(source, file, data_dir) for file in files}) for files in (train_files, test_files)
    )
    return cut(
        train,
        philox.permutation(len(train.x), seed=seed),
        test,
        torch.arange(len(test.x)),
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        dataset=source.name,
        classes=10,
    )


def _parse(contents: dict[str, bytes]) -> Examples:
    """Images and labels from CIFAR-10's binary batches, or from one idx file each."""
    if all(file.endswith(".bin") for file in contents):
        # A record is one label byte, then 3 x 32 x 32 pixel bytes.
        records = np.frombuffer(b"".join(contents.values()), np.uint8).reshape(-1, 3073)
        x, y = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    else:
        images, y = map(_idx, contents.values())
        x = images[:, None]
    files = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    return Examples(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()), files)


def _idx(content: bytes) -> np.ndarray:
    """The idx format: byte 3 is the number of dimensions; the sizes follow as big-endian int32, then the bytes."""
    sizes = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(sizes)


@dataclass(frozen=True)
class DataSet:
    """A row of DATA_SETS: how a data set is loaded, and what a network for it takes and gives.

    Args:
        load: Called with the keywords prior_fraction, seed and unlabelled, and with data_dir where there is a source.
        shape: Shape of one example, such as (1, 28, 28), so that a network can be built where the data are not.
        classes: Number of classes, such as 10.
        source: The official files, or None if nothing has to be downloaded.

    Example:
        >>> pp.data.DATA_SETS["cifar10"].shape
        (3, 32, 32)
    """

    load: Callable[..., Split]
    shape: tuple[int, ...]
    classes: int
    source: Source | None = None


DATA_SETS = {
    "digits": DataSet(digits, (1, 8, 8), 10),
    "mnist": DataSet(mnist, (1, 28, 28), 10, _MNIST),
    "fashion-mnist": DataSet(fashion_mnist, (1, 28, 28), 10, _FASHION_MNIST),
    "cifar10": DataSet(cifar10, (3, 32, 32), 10, _CIFAR10),
}
NAMES = tuple(DATA_SETS)

SOURCES = {row.source.name: row.source for row in DATA_SETS.values() if row.source}
SOURCES |= {source.name: source for source in (_TINY_SHAKESPEARE, _LINUX)}
"""The possible downloads: the data sets with official files, and two texts, which are not cut into a Split."""


def load(
    name: str | Callable[..., Split],
    *,
    prior_fraction: float = 0.5,
    seed: int = 0,
    unlabelled: int = 0,
    data_dir: Folder = None,
) -> Split:
    """A data set by its name, or by a function that returns a Split.

    Args:
        name: digits, mnist, fashion-mnist or cifar10; or a function that takes the keywords below. Such a function
            gets `data_dir` only if it is not None. Or data of your own, as one of these:
            FILE.npz or FILE.safetensors with arrays x and y, and perhaps x_test and y_test, and x_bound, inputs without
            labels that are the bound part, with split_declared_random=True as in `split`;
            folder:PATH, a folder of images of one size, with one sub-folder per class;
            package.module:loader, where a function lies that returns a Split, such arrays as a tuple, or a dictionary
            of them; it gets those of the keywords below that it has as parameters.
            Where there is no test part, a fifth of the examples becomes one: by the seed, or of a folder by the hashes
            of the file names.
        prior_fraction: Share of the training examples in the prior part, such as 0.5; 0 leaves that part empty.
        seed: Chooses the random order; one seed gives one split.
        unlabelled: How many training examples to set apart as `unlabelled`, such as 0.
        data_dir: Folder of the official files; None means that of `data_folder`.

    Returns:
        The Split that the data set's function returns.

    Raises:
        ValueError: If there is no data set of this name, or its files or its function are not as they should be.

    Example:
        >>> pp.data.load("digits", prior_fraction=0.4)
        Split(digits, seed 0: 575 prior + 862 bound = 1,437 train, 360 test; 10 classes)
    """
    needs_folder = data_dir is not None
    if isinstance(name, str):
        if name not in DATA_SETS and own.is_own(name):
            return own.load(name, prior_fraction=prior_fraction, seed=seed, unlabelled=unlabelled, data_dir=data_dir)
        check_name("data set", name, DATA_SETS, alternative=f"{own.FORMS}, or a function")
        needs_folder = DATA_SETS[name].source is not None
    function = DATA_SETS[name].load if isinstance(name, str) else name
    folder = {"data_dir": data_dir} if needs_folder else {}
    return function(prior_fraction=prior_fraction, seed=seed, unlabelled=unlabelled, **folder)


def read(name: str, file: str, data_dir: Folder = None) -> bytes:
    """The decompressed content of one official file of a row of SOURCES, checked by its digest."""
    return download.read(SOURCES[name], file, data_dir)


def fetch(
    name: str, data_dir: Folder = None, *, progress: BytesProgress | None = None, mirrors: Sequence[str] | None = None
) -> Path:
    """Downloads what is missing of one data set.

    Complete files are skipped. A broken download is resumed from its NAME.part. A file gets its name only after its
    md5 was right. linux-c is made of a Debian package of Linux, which apt-get downloads; a package of that name that
    lies in its folder is taken as it is.

    Args:
        name: mnist, fashion-mnist, cifar10, tinyshakespeare or linux-c.
        data_dir: Folder to download to; None means that of `data_folder`.
        progress: Called as progress(file, done, total) while bytes arrive; total is 0 when the server hides it.
        mirrors: Addresses to download from, in this order, instead of the official ones.

    Returns:
        The folder of the files, which lies in `data_dir`.

    Raises:
        ValueError: If there is nothing to download by this name, or no mirror delivers the right bytes.

    Example:
        >>> folder = pp.data.fetch("mnist")  # doctest: +SKIP
    """
    if name not in SOURCES:
        raise ValueError(
            f"there is nothing to download for {name!r}; choose one of {', '.join(SOURCES)} "
            "(the digits come with the package)"
        )
    return download.fetch(SOURCES[name], data_dir, progress=progress, mirrors=mirrors)
