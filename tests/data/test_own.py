"""Data of one's own by a name: files of arrays, folders of images, and functions; and what is refused of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pacprune import data
from pacprune.certification import rules

LOADERS = """
from pacprune import data
import torch
x, y = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
def pair(): return x, y
def four(): return x[:40], y[:40], x[40:], y[40:]
def table(): return {"x": x.numpy(), "y": y.numpy().tolist()}
def whole(prior_fraction, seed, unlabelled): return data.split(x, y, test=0.5, prior_fraction=prior_fraction, seed=seed)
def stubborn(): return data.split(x, y, test=0.5, prior_fraction=0.3)
def untested(): return data.split(x, y)
def folder(data_dir="none"): return {"x": x, "y": y, "place": data_dir}
def needs(size): return x, y
def number(): return 5
def three(): return x, y, x
def nested(): return (x[:9], y[:9]), (x[9:], y[9:])
def leaves(): raise SystemExit("bye")
"""


LEAKS = pytest.mark.filterwarnings("ignore:.* test examples are also among")
"""Of data that are tested on themselves."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "loaders", raising=False)
    Path("loaders.py").write_text(LOADERS)


def arrays(n: int = 60) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).random((n, 4)).astype(np.float32), "y": np.arange(n) % 3}


def image_folder(root: Path, *, classes: int = 3, each: int = 12, shape: tuple[int, ...] = (6, 6)) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (classes * each, *shape), dtype=np.uint8)
    for i, image in enumerate(pixels):
        path = root / f"class-{i % classes}" / f"{i:03}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, image)
    return root


# --- Files and functions.


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_is_cut_by_the_seed(suffix: str) -> None:
    content = arrays()
    if suffix == ".npz":
        np.savez("mine.npz", **content)
    else:
        save_file({name: torch.as_tensor(values) for name, values in content.items()}, "mine.safetensors")
    split = data.load(f"mine{suffix}", prior_fraction=0.25, seed=3, unlabelled=8)
    assert (len(split.prior), len(split.bound), len(split.unlabelled), len(split.test)) == (10, 30, 8, 12)
    expected = data.split(*map(torch.as_tensor, content.values()), prior_fraction=0.25, seed=3, unlabelled=8, test=0.2)
    assert torch.equal(split.train.x, expected.train.x)
    assert split.dataset == f"mine{suffix}"
    rules.refuse_split(split)


@LEAKS
def test_a_test_part_of_the_file_is_taken_as_it_is() -> None:
    more = arrays(9)
    np.savez("mine.npz", **arrays(), x_test=more["x"], y_test=more["y"], note="kept out")
    split = data.load("mine.npz")
    assert (len(split.train), len(split.test)) == (60, 9)
    assert split.test.y.tolist() == more["y"].tolist()


@LEAKS
@pytest.mark.parametrize(("shape", "expected"), [((8, 8), (1, 8, 8)), ((8, 8, 3), (3, 8, 8)), ((3, 8, 8), (3, 8, 8))])
def test_images_have_their_channels_first(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    np.savez("mine.npz", x=np.zeros((20, *shape), np.uint8), y=np.arange(20) % 2)
    assert data.load("mine.npz").train.x.shape[1:] == expected


@LEAKS
@pytest.mark.parametrize("kind", [">f4", "f2", "f8", "u2", ">i4", "?"])
def test_numbers_of_any_type_are_read(kind: str) -> None:
    np.savez("mine.npz", x=np.ones((20, 3)).astype(kind), y=(np.arange(20) % 2).astype("?" if kind == "?" else "u2"))
    split = data.load("mine.npz")
    assert split.train.x.dtype == (torch.float32 if "f" in kind else torch.int64)
    assert split.classes == 2


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [("pair", (48, 12)), ("four", (40, 20)), ("table", (48, 12)), ("whole", (30, 30)), ("folder", (48, 12))],
)
def test_a_loader_returns_arrays_or_a_split(loader: str, sizes: tuple[int, int]) -> None:
    split = data.load(f"loaders:{loader}", prior_fraction=0.4, seed=2)
    assert (len(split.train), len(split.test)) == sizes
    assert (split.prior_fraction, split.seed) == (0.4, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imagenet",
            "'imagenet' is unknown; use one of digits, mnist, fashion-mnist, cifar10, or folder:PATH, FILE.npz",
        ),
        ("absent.npz", "the data file absent.npz does not exist"),
        ("loaders:absent", "the data set 'loaders:absent' cannot be made .AttributeError"),
        ("nowhere:pair", "cannot be made .ModuleNotFoundError"),
        (
            "loaders:needs",
            "missing a required argument: 'size'.; .* among 'prior_fraction', 'seed', 'unlabelled'",
        ),
        ("loaders:leaves", "SystemExit: bye"),
        ("loaders:number", "loaders:number returned a int; it must return a pp.data.Split"),
        (
            "loaders:three",
            "loaders:three returned a tuple; it must return a pp.data.Split, arrays .x, y. or .x, y, x_test",
        ),
        (
            "loaders:nested",
            "x in loaders:nested has shape .. and type tuple; it must hold numbers",
        ),
        (
            "loaders:stubborn",
            "prior_fraction is 0.3, but 0.5 is asked for; let the function take a parameter 'prior_fraction'",
        ),
        ("loaders:untested", "has 3 classes and 0 test examples"),
        ("folder:absent", "the image folder absent does not exist"),
    ],
)
def test_a_bad_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "mine.npz holds y; it needs x and y"),
        ({"x_test": np.zeros((3, 4))}, "mine.npz holds x, y, x_test; .* both x_test and y_test"),
        ({"y": np.arange(50)}, "mine.npz holds 60 examples in x but 50 labels in y"),
        ({"y": np.arange(60) / 2}, "y in mine.npz has shape .60,. and type float64; labels are integers"),
        ({"y": np.array(["cat"] * 60)}, "y in mine.npz has shape .60,. and type <U3; labels are integers"),
        ({"y": np.full((60, 3), 2)}, "y in mine.npz has shape .60, 3. and type int64; labels are integers"),
        ({"y": np.zeros(60, int)}, "mine.npz has 1 classes"),
        ({"y": np.arange(60) - 1}, "labels run from -1 to 58"),
        ({"x": np.zeros((60, 0))}, "x in mine.npz has shape .60, 0. and type float64; it must hold numbers"),
        (
            {"x_test": np.zeros((2, 4), np.uint8), "y_test": np.arange(2)},
            "mine.npz holds bytes .uint8. in x_test alone, which are scaled to .0, 1.; give x and x_test in one type",
        ),
        ({"x": np.zeros(60)}, "x in mine.npz has shape .60,. and type float64; it must hold numbers"),
        ({"x": np.array([["a"]] * 60)}, "x in mine.npz has shape .60, 1. and type <U1; it must hold numbers"),
        ({"x": np.full((60, 4), np.nan)}, "x holds 192 NaN"),
    ],
)
def test_bad_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    np.savez("mine.npz", **{name: values for name, values in (arrays() | change).items() if values is not None})
    with pytest.raises(ValueError, match=message):
        data.load("mine.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing more", b"text"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_damaged_file_is_refused(suffix: str, content: bytes) -> None:
    Path(f"mine{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=r"the data file mine.* cannot be read"):
        data.load(f"mine{suffix}")


def test_pickles_are_not_opened() -> None:
    np.savez("mine.npz", x=np.array([{}] * 5, object), y=np.arange(5))
    with pytest.raises(ValueError, match=r"cannot be read .*; write it again, without pickles"):
        data.load("mine.npz")


# --- Folders of images.


def test_a_folder_is_tested_on_by_the_names_of_its_files() -> None:
    image_folder(Path("photos"))
    splits = [data.load("folder:photos", seed=seed) for seed in (0, 1)]
    assert torch.equal(splits[0].test.index, splits[1].test.index), "another seed, another test part"
    assert not torch.equal(splits[0].prior.index, splits[1].prior.index)
    assert 0 < len(splits[0].test) < 18
    for split in splits:
        assert (split.dataset, split.classes, split.train.x.shape[1:]) == ("folder:photos", 3, (1, 6, 6))
        rules.refuse_split(split)
    names = sorted(path.name for path in Path("photos").rglob("*.npy"))
    tested = {names[int(i) % 12 * 3 + int(i) // 12] for i in splits[0].test.index}
    np.save("photos/class-0/another.npy", np.zeros((6, 6), np.uint8))
    Path("photos/class-1/001.npy").rename("photos/class-2/001.npy")
    again = sorted(Path("photos").rglob("*.npy"))
    kept = {again[int(i)].name for i in data.load("folder:photos").test.index}
    assert kept - {"another.npy"} == tested


def test_the_hash_of_a_folder_follows_names_and_contents() -> None:
    image_folder(Path("photos"))
    first = data.load("folder:photos").files
    assert list(first) == ["folder:photos"]
    assert data.load("folder:photos").files == first
    Path("photos/class-1/001.npy").rename("photos/class-2/001.npy")
    assert data.load("folder:photos").files != first


def test_pictures_are_read_by_pil(monkeypatch: pytest.MonkeyPatch) -> None:
    pil = pytest.importorskip("PIL.Image")
    for i in range(20):
        place = Path("photos") / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        pil.new("RGB", (7, 5), (i, 2 * i, 3 * i)).save(place / f"{i}.png")
    split = data.load("folder:photos")
    assert split.train.x.shape[1:] == (3, 5, 7)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r'PIL.Image cannot be imported .*; pip install "pacprune\[plot\]"'):
        data.load("folder:photos")


def test_arrays_need_no_pil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    image_folder(Path("photos"), shape=(6, 5, 3))
    np.savez("photos/class-0/more.npz", np.zeros((3, 6, 5), np.uint8))
    assert data.load("folder:photos").train.x.shape[1:] == (3, 6, 5)


def test_a_bad_folder_is_refused() -> None:
    pil = pytest.importorskip("PIL.Image")
    image_folder(Path("photos"), classes=1)
    with pytest.raises(ValueError, match=r"photos has 1 sub-folder; an image folder has one per class, .* at least 2"):
        data.load("folder:photos")
    Path("photos/empty").mkdir()
    with pytest.raises(ValueError, match=r"photos.empty holds no images; every sub-folder of photos is a class"):
        data.load("folder:photos")
    wide = Path("photos/empty/wide.png")
    pil.new("L", (9, 6)).save(wide)
    with pytest.raises(ValueError, match=r"wide.png has \(1, 6, 9\) .*uint8, .* \(1, 6, 6\) .*; make all images"):
        data.load("folder:photos")
    for content in (b"", b"no picture"):
        wide.write_bytes(content)
        with pytest.raises(ValueError, match=r"the image .*wide.png cannot be read .*; save it again, or remove it"):
            data.load("folder:photos")
    pil.new("I;16", (6, 6)).save(wide)
    with pytest.raises(ValueError, match="more than 8 bits"):
        data.load("folder:photos")


def test_names_are_written_as_a_certificate_can_hold_them() -> None:
    np.savez('übung "1".npz', **arrays())
    assert data.load('übung "1".npz').dataset == "_bung__1_.npz"


def test_bound_inputs_in_a_file_are_declared_random_there() -> None:
    x, y = np.random.default_rng(0).random((60, 4)), np.arange(60) % 3
    np.savez("silent.npz", x=x[:40], y=y[:40], x_bound=x[40:])
    with pytest.raises(ValueError, match=r"20 inputs x_bound, .* if they were, write split_declared_random=True"):
        data.load("silent.npz")
    np.savez("said.npz", x=x[:40], y=y[:40], x_bound=x[40:], split_declared_random=True)
    assert data.load("said.npz").declared
    tensors = {"x": torch.tensor(x[:40]), "y": torch.tensor(y[:40]), "x_bound": torch.tensor(x[40:])}
    save_file({**tensors, "split_declared_random": torch.tensor([1])}, "said.safetensors")
    assert len(data.load("said.safetensors").bound) == 20


def test_targets_of_a_regression_are_not_to_be_rounded() -> None:
    np.savez("real.npz", x=np.random.default_rng(0).random((60, 4)), y=np.linspace(-1, 1, 60))
    with pytest.raises(ValueError, match="run from -1 to 1 as in regression"):
        data.load("real.npz")
    np.savez("whole.npz", x=np.random.default_rng(0).random((60, 4)), y=np.arange(60) % 3.0)
    with pytest.raises(ValueError, match=r"several; write y\.astype\(int\)"):
        data.load("whole.npz")
