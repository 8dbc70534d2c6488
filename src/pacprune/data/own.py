"""Data of one's own by a name: arrays in a file, a folder of images, or package.module:loader."""

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pacprune import imports, philox
from pacprune.data.download import Folder
from pacprune.data.splits import Examples, Split, cut, split

FOLDER = "folder:"
FORMS = "folder:PATH, FILE.npz, FILE.safetensors or package.module:loader"
"""How data of one's own are named."""
NAMES = ("x", "y", "x_test", "y_test", "x_bound")
"""The arrays of a file, the last three of which may be missing."""
DECLARED = "split_declared_random"
"""One number beside x_bound, other than 0, by which who made the file says what `pp.data.split` asks for."""
TEST = 0.2
"""Share of the examples that become the test part where there is none."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
ARRAYS = (".npy", ".npz")
_COMMON = (torch.uint8, torch.int64, torch.bool)
"""Types of whole numbers that all operations have."""
CHANNELS = (1, 3, 4)
"""How many channels an image can have."""


def is_own(name: str) -> bool:
    """Whether a name has one of FORMS."""
    return ":" in name or is_file(name)


def is_code(name: str) -> bool:
    """Whether a name is package.module:loader, which is imported and called."""
    return is_own(name) and not is_file(name)


def is_file(name: str) -> bool:
    """Whether a name has a path in it."""
    return name.startswith(FOLDER) or name.endswith(tuple(READERS))


def load(name: str, *, prior_fraction: float, seed: int, unlabelled: int, data_dir: Folder) -> Split:
    """The data of such a name; see `pp.data.load`."""
    sizes: dict[str, Any] = {"prior_fraction": prior_fraction, "seed": seed, "unlabelled": unlabelled}
    if name.startswith(FOLDER):
        return _check(name, _image_folder(Path(name.removeprefix(FOLDER)), **sizes))
    if name.endswith(tuple(READERS)):
        return _check(name, _cut(Path(name).name, _read(Path(name)), **sizes))
    content = imports.call(name, {**sizes, "data_dir": data_dir}, what="data set")
    if isinstance(content, Split):
        _check_sizes(name, content, sizes)
        return _check(name, content)
    if isinstance(content, tuple) and len(content) in (2, 4):
        content = dict(zip(NAMES, content, strict=False))  # the last ones may be missing
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{name} returned a {type(content).__name__}; it must return a pp.data.Split, arrays (x, y) or (x, y, "
            f"x_test, y_test), or a dictionary of {', '.join(NAMES)}"
        )
    return _check(name, _cut(name, content, **sizes))


def _check(name: str, parts: Split) -> Split:
    """The split, if a classifier can be trained and tested on it."""
    if parts.classes < 2 or len(parts.test) == 0:
        raise ValueError(
            f"{name} has {parts.classes} classes and {len(parts.test)} test examples; a classifier needs at least 2 "
            "classes, numbered from 0, and 1 test example"
        )
    return parts


def _check_sizes(name: str, parts: Split, asked: dict[str, Any]) -> None:
    """Refuses a loader that cuts its data otherwise than the run says."""
    actual = {"prior_fraction": parts.prior_fraction, "seed": parts.seed, "unlabelled": len(parts.unlabelled)}
    if not parts.bound.has_labels:  # whose size is that of the inputs
        del actual["prior_fraction"]
    for option, value in asked.items():
        if actual.get(option, value) != value:
            raise ValueError(
                f"{name} returned a split whose {option} is {actual[option]}, but {value} is asked for; let the "
                f"function take a parameter {option!r}, or return x and y to be cut here"
            )


def _plain(name: str) -> str:
    """The name as a certificate can hold it: printable ASCII without quotes."""
    return re.sub(r'[^!-~]|"', "_", name)[-200:]


# --- Arrays.


def _read(path: Path) -> Mapping[str, Any]:
    """The arrays of a file."""
    if not path.is_file():
        raise ValueError(f"the data file {path} does not exist; name one with arrays {', '.join(NAMES)}")
    try:
        return READERS[path.suffix](path)
    except (ValueError, OSError, EOFError, MemoryError, BadZipFile, SafetensorError) as error:
        raise ValueError(f"the data file {path} cannot be read ({error}); write it again, without pickles") from None


def _npz(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; that of an .npy file has no name."""
    loaded = np.load(io.BytesIO(content), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {"": loaded}
    with loaded as arrays:
        return dict(arrays)


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".npz": lambda path: _npz(path.read_bytes()),
    ".safetensors": load_file,
}


def _cut(name: str, arrays: Mapping[str, Any], **sizes: Any) -> Split:
    """A split of arrays x and y, tested on x_test and y_test, or on a share of x and y that the seed chooses.

    x_bound are inputs without labels that are the bound part, which have to be declared random.
    """
    missing = [array for array in ("x", "y") if array not in arrays]
    if missing or ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(
            f"{name} holds {', '.join(map(str, arrays)) or 'no arrays'}; it needs x and y, and for a test part both "
            "x_test and y_test"
        )
    tensors = {array: _tensor(name, array, arrays[array]) for array in NAMES if array in arrays}
    for x, y in (("x", "y"), ("x_test", "y_test")):
        if x in tensors and len(tensors[x]) != len(tensors[y]):
            raise ValueError(
                f"{name} holds {len(tensors[x])} examples in {x} but {len(tensors[y])} labels in {y}; give each "
                "example one label"
            )
    kinds = {array: tensors[array].dtype == torch.uint8 for array in ("x", "x_test", "x_bound") if array in tensors}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"{name} holds bytes (uint8) in {' and '.join(array for array in kinds if kinds[array])} alone, which are "
            f"scaled to [0, 1]; give {' and '.join(kinds)} in one type"
        )
    test = (tensors["x_test"], tensors["y_test"]) if "x_test" in tensors else TEST
    bound, declared = tensors.get("x_bound"), bool(np.asarray(arrays.get(DECLARED, False)).all())
    if bound is not None and not declared:
        raise ValueError(
            f"{name} holds {len(bound):,} inputs x_bound, but does not say that they were drawn at random as new data "
            f"are, independently of x; if they were, write {DECLARED}=True beside them"
        )
    parts = {"test": test, "bound": bound, DECLARED: declared}
    return split(tensors["x"], tensors["y"], **parts, dataset=_plain(name), **sizes)


def _tensor(name: str, array: str, values: Any) -> Tensor:
    """An array as a tensor: labels as whole numbers, or as rows of 0 and 1, images with their channels first."""
    tensor = _numbers(values)
    shape = tuple(getattr(values, "shape", ()) if tensor is None else tensor.shape)
    kind = getattr(values, "dtype", type(values).__name__)
    if array.startswith("y"):
        if tensor is None or not _are_labels(tensor):
            raise ValueError(
                f"{array} in {name} has shape {shape} and type {kind}; labels are integers or Booleans: one "
                "number per example, from 0 to the number of classes less 1, or a row of 0 and 1 where an example has "
                f"several; {_label_advice(tensor)}"
            )
        return tensor
    if tensor is None or tensor.ndim < 2 or tensor[0:1].numel() == 0:
        raise ValueError(
            f"{array} in {name} has shape {shape} and type {kind}; it must hold numbers, with one row or one image "
            "per example"
        )
    is_image = tensor.ndim == 4 or (tensor.ndim == 3 and tensor.dtype == torch.uint8)
    return _channels_first(tensor) if is_image else tensor


def _label_advice(y: Tensor | None) -> str:
    """What to do about numbers that are no labels: rounding would ruin those of a regression."""
    if y is None or not y.is_floating_point() or bool((y == y.round()).all()):
        return "write y.astype(int)"
    ends = f"{float(y.min()):.3g} to {float(y.max()):.3g}"
    return f"these run from {ends} as in regression, for which there is pp.pft in Python, with a loss="


def _are_labels(y: Tensor) -> bool:
    """Whether y holds a class for every example, or a row of 0 and 1."""
    if y.is_floating_point() or y.ndim not in (1, 2):
        return False
    return y.ndim == 1 or (y.numel() > 0 and bool(((y == 0) | (y == 1)).all()))


def _numbers(values: Any) -> Tensor | None:
    """Real numbers as a tensor of a type that all operations have; None for anything else."""
    if isinstance(values, Tensor):
        if values.is_complex():
            return None
        values = values.detach().cpu()
        return values if values.dtype in _COMMON or values.is_floating_point() else values.to(torch.int64)
    try:
        array = np.array(values)
    except ValueError:  # rows of unequal lengths
        return None
    if array.dtype.kind not in "biuf":
        return None
    if array.dtype not in (np.uint8, np.float32):  # the types that images have
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return torch.from_numpy(array)


def _channels_first(images: Tensor) -> Tensor:
    """Images (n, channels, height, width), whether they have no channels, or have them last."""
    if images.ndim == 3:
        return images[:, None]
    channels_last = images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS
    return images.movedim(3, 1).contiguous() if channels_last else images


# --- Folders of images.


def _image_folder(root: Path, *, prior_fraction: float, seed: int, unlabelled: int) -> Split:
    """A folder with one sub-folder per class.

    A file is in the test part if the hash of its name is among the lowest TEST of all hashes: it stays there, at every
    seed, when others come, and when it moves to another class. The other files are cut at random, by the seed.
    """
    files, labels, classes = _listed(root)
    needs_pictures = any(path.suffix.lower() not in ARRAYS for path in files)
    pictures = imports.extra("PIL.Image", "plot") if needs_pictures else None
    contents = [path.read_bytes() for path in files]
    images = [_image(path, content, pictures) for path, content in zip(files, contents, strict=True)]
    for path, image in zip(files, images, strict=True):
        if (image.shape, image.dtype) != (images[0].shape, images[0].dtype):
            raise ValueError(
                f"{path} has {tuple(image.shape)} as (channels, height, width) in {image.dtype}, but {files[0]} has "
                f"{tuple(images[0].shape)} in {images[0].dtype}; make all images alike first"
            )
    sha = hashlib.sha256()
    for path, content in zip(files, contents, strict=True):
        sha.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(content).digest())
    name = _plain(FOLDER + root.resolve().name)
    examples = Examples(torch.stack(images), torch.tensor(labels), {name: sha.hexdigest()})
    is_test = torch.tensor([name_share(path.name) < TEST for path in files])
    pool = (~is_test).nonzero().flatten()
    return cut(
        examples,
        pool[philox.permutation(len(pool), seed=seed)],
        examples,
        is_test.nonzero().flatten(),
        prior_fraction=prior_fraction,
        seed=seed,
        unlabelled=unlabelled,
        dataset=name,
        classes=classes,
    )


def name_share(name: str) -> float:
    """A number in [0, 1] that follows from a name, as if drawn at random."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _listed(root: Path) -> tuple[list[Path], list[int], int]:
    """The image files, their classes in the order of the sub-folders' names, and the number of classes."""
    if not root.is_dir():
        raise ValueError(f"the image folder {root} does not exist; give folder:PATH, with one sub-folder per class")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) < 2:
        raise ValueError(
            f"{root} has {len(folders)} sub-folder{'s' * (len(folders) != 1)}; an image folder has "
            "one per class, and there must be at least 2"
        )
    files, labels = [], []
    for label, folder in enumerate(folders):
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES + ARRAYS and path.is_file())
        if not images:
            raise ValueError(
                f"{folder} holds no images; every sub-folder of {root} is a class, with files such as "
                f"{IMAGES[0]}, {IMAGES[1]} or {ARRAYS[0]}"
            )
        files += images
        labels += [label] * len(images)
    return files, labels, len(folders)


def _image(path: Path, content: bytes, pictures: Any) -> Tensor:
    """The pixels (channels, height, width) of a file with one array, or of one that PIL.Image, `pictures`, can read."""
    try:
        return _array(content) if path.suffix.lower() in ARRAYS else _picture(content, pictures)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"the image {path} cannot be read ({error}); save it again, or remove it") from None


def _picture(content: bytes, pictures: Any) -> Tensor:
    with pictures.open(io.BytesIO(content)) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"its pixels have more than 8 bits, mode {image.mode}")
        pixels = torch.from_numpy(np.array(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")))
    return pixels[None] if pixels.ndim == 2 else pixels.movedim(2, 0)


def _array(content: bytes) -> Tensor:
    arrays = list(_npz(content).values())
    if len(arrays) != 1 or arrays[0].ndim not in (2, 3):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"it holds {shapes}, not one array (channels, height, width) or (height, width)")
    return _channels_first(torch.from_numpy(arrays[0])[None])[0]
