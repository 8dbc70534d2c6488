"""The official files of MNIST, Fashion-MNIST, CIFAR-10 and Tiny Shakespeare: where they lie and how to get them."""

import gzip
import hashlib
import http.client
import os
import shlex
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Folder = str | os.PathLike[str] | None
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Source:
    """One data set: its folder, its mirrors, the published md5 of each download and the md5 of each file's content."""

    folder: str
    mirrors: tuple[str, ...]
    downloads: dict[str, str]
    contents: dict[str, str]


SOURCES = {
    "mnist": Source(
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
    ),
    "fashion-mnist": Source(
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
    ),
    "cifar10": Source(
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
    ),
    "tinyshakespeare": Source(
        folder="tinyshakespeare",
        mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
        downloads={"input.txt": "6fb458f1232090904fb40fe944165e91"},
        contents={"input.txt": "6fb458f1232090904fb40fe944165e91"},
    ),
}


def data_folder(data_dir: Folder = None) -> Path:
    """The folder of the data files: `data_dir`, else $PACPRUNE_DATA, else pacprune/ in the user's cache folder."""
    chosen = data_dir or os.environ.get("PACPRUNE_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pacprune"


def read(name: str, file: str, data_dir: Folder = None) -> bytes:
    """The decompressed content of one official file, checked by md5.

    Looks for FILE.gz and FILE in DIR/<data set>/, then in DIR itself. The md5 is that of the content, so that a
    recompressed or unpacked file is as good as the published one.
    """
    source, folder = SOURCES[name], data_folder(data_dir)
    given = f" --data-dir {shlex.quote(os.fspath(data_dir))}" if data_dir else ""
    again = f"run `pacprune data fetch {name}{given}`"
    places = [place / spelling for place in (folder / source.folder, folder) for spelling in (f"{file}.gz", file)]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise ValueError(f"{file} of {name} is neither in {folder / source.folder} nor in {folder}; {again}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): truncated or damaged; delete it and {again}") from None
    found = _md5(content)
    if found != source.contents[file]:
        raise ValueError(
            f"{path} holds content of md5 {found}, the official file of {name} has {source.contents[file]}; "
            f"delete it and {again}"
        )
    return content


def fetch(
    name: str, data_dir: Folder = None, *, progress: Progress | None = None, mirrors: Sequence[str] | None = None
) -> Path:
    """Downloads what is missing of one data set into DIR/<data set>/ and returns that folder.

    Complete files are skipped, a broken download is resumed from its NAME.part, and a file gets its name only after
    its md5 was right. `progress(file, done, total)` is called as bytes arrive; total is 0 when the server hides it.
    """
    if name not in SOURCES:
        raise ValueError(
            f"there is nothing to download for {name!r}; choose one of {', '.join(SOURCES)} "
            "(the digits come with the package)"
        )
    source = SOURCES[name]
    folder = data_folder(data_dir) / source.folder
    for download, md5 in source.downloads.items():
        archive = folder / download
        packed = download.endswith(".tar.gz")
        files = source.contents if packed else [download.removesuffix(".gz")]
        if all(_complete(name, file, data_dir) for file in files):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made ({error}); name another folder with --data-dir") from None
        _from_any([f"{mirror.rstrip('/')}/{download}" for mirror in mirrors or source.mirrors], archive, md5, progress)
        if packed:
            _unpack(archive, source, folder)
    return folder


def _complete(name: str, file: str, data_dir: Folder) -> bool:
    try:
        read(name, file, data_dir)
    except ValueError:
        return False
    return True


def _from_any(urls: list[str], target: Path, md5: str, progress: Progress | None) -> None:
    """Downloads from the first mirror that delivers the right bytes."""
    if target.is_file() and _md5(target.read_bytes()) == md5:
        return
    reasons = []
    for url in urls:
        try:
            _download(url, target, md5, progress)
            return
        except (OSError, http.client.HTTPException, ValueError) as error:
            reasons.append(f"{url} ({error})")
    raise ValueError(
        f"could not download {' or '.join(reasons)}; check the network and try again, or put the file {target.name} "
        f"into {target.parent} yourself"
    )


def _download(url: str, target: Path, md5: str, progress: Progress | None) -> None:
    """Receives into NAME.part, going on for as long as every new connection brings new bytes."""
    part = target.with_name(target.name + ".part")
    old = part.exists()
    while True:
        start = part.stat().st_size if part.exists() else 0
        if _receive(url, part, start, progress):
            found = _md5(part.read_bytes())
            if found == md5:
                os.replace(part, target)
                return
            part.unlink()
            # A .part left by an earlier call may be of something else: it earns one fresh start.
            if not old:
                raise ValueError(f"its md5 is {found}, the official one is {md5}")
            old = False
        elif part.stat().st_size <= start:
            raise ConnectionError(f"the connection broke after {start:,} bytes")


def _receive(url: str, part: Path, start: int, progress: Progress | None) -> bool:
    """Appends one response to `part`, from byte `start` on; False when it was cut short."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: there is nothing after `start`, so the part is whole (or not ours: its md5 decides).
        if error.code == 416 and start:
            return True
        raise
    with response:
        done = start if response.status == 206 else 0  # 200: the server sends everything again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else 0
        with part.open("ab" if done else "wb") as file:
            try:
                while chunk := response.read(1 << 16):
                    file.write(chunk)
                    done += len(chunk)
                    if progress:
                        progress(part.stem, done, total)
            except (ConnectionError, TimeoutError, http.client.HTTPException):
                return False
    return done >= total


def _unpack(archive: Path, source: Source, folder: Path) -> None:
    """Takes the named members, and nothing else, out of a checked .tar.gz, then deletes it."""
    with tarfile.open(archive) as tar:
        for file in source.contents:
            member = tar.extractfile(f"{source.folder}/{file}")
            assert member is not None, f"{file} is a plain file in the archive whose md5 was checked"
            part = folder / f"{file}.part"
            part.write_bytes(member.read())
            os.replace(part, folder / file)
    archive.unlink()


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
