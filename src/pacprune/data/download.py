"""Official files of data sets: where they lie, whether they are right, and how to get them."""

import gzip
import hashlib
import http.client
import lzma
import os
import shlex
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacprune.files import write_atomically

Folder = str | os.PathLike[str] | None
BytesProgress = Callable[[str, int, int], None]
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
"""How a file may be packed, by what its name then ends with."""


@dataclass(frozen=True)
class Source:
    """The official files of one data set."""

    name: str
    folder: str
    """Where the files lie in the folder of all data files."""
    mirrors: tuple[str, ...]
    """Addresses of the same downloads, the first choice first."""
    downloads: dict[str, str]
    """The published md5 of each download, or its SHA-256."""
    contents: dict[str, str]
    """The md5 or the SHA-256 of the content of each file, once it is decompressed."""
    package: str = ""
    """The Debian package that is the only download, as apt-get names it with its version; then there are no mirrors."""
    convert: Callable[[bytes], bytes] | None = None
    """What makes the content of the only file of a package."""


def data_folder(data_dir: Folder = None) -> Path:
    """The folder of the data files: `data_dir`, else $PACPRUNE_DATA, else pacprune/ in the user's cache folder.

    Args:
        data_dir: The folder to use before all others, or None.

    Returns:
        The folder, which need not exist yet.

    Example:
        >>> pp.data.data_folder("files").name
        'files'
    """
    chosen = data_dir or os.environ.get("PACPRUNE_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pacprune"


def read(source: Source, file: str, data_dir: Folder = None) -> bytes:
    """The decompressed content of one official file, checked by its digest.

    Looks for FILE.gz, FILE.xz and FILE in DIR/<data set>/, then in DIR itself. The digest is that of the content, so
    that a recompressed or unpacked file is as good as the published one.
    """
    folder = data_folder(data_dir)
    option = f" --data-dir {shlex.quote(os.fspath(data_dir))}" if data_dir else ""
    remedy = f"run `pacprune data fetch {source.name}{option}`"
    path = place_of(source, file, data_dir)
    if path is None:
        raise ValueError(f"{file} of {source.name} is neither in {folder / source.folder} nor in {folder}; {remedy}")
    try:
        content = DECOMPRESS.get(path.suffix, bytes)(path.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read ({error}): truncated or damaged; delete it and {remedy}") from None
    kind, digest = _digest(content, source.contents[file])
    if digest != source.contents[file]:
        raise ValueError(
            f"{path} holds content of {kind} {digest}, the official file of {source.name} has {source.contents[file]}; "
            f"delete it and {remedy}"
        )
    return content


def place_of(source: Source, file: str, data_dir: Folder = None) -> Path | None:
    """Where one official file lies, packed or not; None if it is not there."""
    folder = data_folder(data_dir)
    spellings = [f"{file}{suffix}" for suffix in (*DECOMPRESS, "")]
    places = [place / spelling for place in (folder / source.folder, folder) for spelling in spellings]
    return next((path for path in places if path.is_file()), None)


def fetch(source: Source, data_dir: Folder, *, progress: BytesProgress | None, mirrors: Sequence[str] | None) -> Path:
    """Downloads what is missing of one source into DIR/<data set>/ and returns that folder; see `datasets.fetch`."""
    folder = data_folder(data_dir) / source.folder
    for download, md5 in source.downloads.items():
        archive = folder / download
        packed = download.endswith((".tar.gz", ".deb"))
        files = source.contents if packed else [download.removesuffix(".gz")]
        if all(_complete(source, file, data_dir) for file in files):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made ({error}); name another folder with --data-dir") from None
        if source.package:
            _download_package(source, archive, md5)
            _convert(archive, source, folder)
            continue
        urls = [f"{mirror.rstrip('/')}/{download}" for mirror in mirrors or source.mirrors]
        _download_from_any(urls, archive, md5, progress)
        if packed:
            _unpack(archive, source, folder)
    return folder


def _complete(source: Source, file: str, data_dir: Folder) -> bool:
    try:
        read(source, file, data_dir)
    except ValueError:
        return False
    return True


def _download_from_any(urls: list[str], target: Path, md5: str, progress: BytesProgress | None) -> None:
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


def _download(url: str, target: Path, md5: str, progress: BytesProgress | None) -> None:
    """Receives into NAME.part, and connects again as long as every connection brings new bytes."""
    part = target.with_name(target.name + ".part")
    from_earlier_call = part.exists()
    while True:
        start = part.stat().st_size if part.exists() else 0
        if _receive(url, part, start, progress):
            part_md5 = _md5(part.read_bytes())
            if part_md5 == md5:
                os.replace(part, target)
                return
            part.unlink()
            # The .part of an earlier call may belong to another file: start afresh, once.
            if not from_earlier_call:
                raise ValueError(f"its md5 is {part_md5}, the official one is {md5}")
            from_earlier_call = False
        elif part.stat().st_size <= start:
            raise ConnectionError(f"the connection broke after {start:,} bytes")


def _receive(url: str, part: Path, start: int, progress: BytesProgress | None) -> bool:
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
        received = start if response.status == 206 else 0  # 200: the server sends everything again
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else 0
        with part.open("ab" if received else "wb") as file:
            try:
                while chunk := response.read(1 << 16):
                    file.write(chunk)
                    received += len(chunk)
                    if progress:
                        progress(part.stem, received, total)
            except (ConnectionError, TimeoutError, http.client.HTTPException):
                return False
    return received >= total


def _download_package(source: Source, target: Path, sha256: str) -> None:
    """Has apt-get download a package, if it is not there; no rights are needed, but its lists have to be fresh."""
    if target.is_file() and _digest(target.read_bytes(), sha256)[1] == sha256:
        return
    reason = "there is no apt-get here"
    if program := shutil.which("apt-get"):
        command = [program, "download", source.package]
        process = subprocess.run(command, cwd=target.parent, capture_output=True, text=True, check=False)
        right = target.is_file() and _digest(target.read_bytes(), sha256)[1] == sha256
        if process.returncode == 0 and right:
            return
        reason = process.stderr.strip().rpartition("\n")[2] or f"its SHA-256 is not {sha256}"
    raise ValueError(
        f"{source.package} could not be downloaded ({reason}); on a Debian system that has this version, "
        f"`apt-get update` and `apt-get download {source.package}` get {target.name}; put it into {target.parent} and "
        f"run `pacprune data fetch {source.name}` again"
    )


def _convert(archive: Path, source: Source, folder: Path) -> None:
    """Leaves the only file of a checked package, packed as FILE.xz, and deletes the package."""
    assert source.convert is not None, "a package says what it is converted by"
    ((file, expected),) = source.contents.items()
    content = source.convert(archive.read_bytes())
    assert _digest(content, expected)[1] == expected, "the content follows from the package, whose digest was checked"
    write_atomically(folder / f"{file}.xz", lzma.compress(content, preset=6))
    archive.unlink()


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


def _digest(content: bytes, like: str) -> tuple[str, str]:
    """The kind of a digest, and that of the content: SHA-256 or md5, by the length of another one."""
    if len(like) == 64:
        return "SHA-256", hashlib.sha256(content).hexdigest()
    return "md5", _md5(content)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
