"""Official files of data sets: where they lie, whether they are right, and how to get them."""

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
BytesProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Source:
    """The official files of one data set."""

    name: str
    folder: str
    """Where the files lie in the folder of all data files."""
    mirrors: tuple[str, ...]
    """Addresses of the same downloads, the first choice first."""
    downloads: dict[str, str]
    """The published md5 of each download."""
    contents: dict[str, str]
    """The md5 of the content of each file, once it is decompressed."""


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
    """The decompressed content of one official file, checked by md5.

    Looks for FILE.gz and FILE in DIR/<data set>/, then in DIR itself. The md5 is that of the content, so that a
    recompressed or unpacked file is as good as the published one.
    """
    folder = data_folder(data_dir)
    option = f" --data-dir {shlex.quote(os.fspath(data_dir))}" if data_dir else ""
    remedy = f"run `pacprune data fetch {source.name}{option}`"
    places = [place / spelling for place in (folder / source.folder, folder) for spelling in (f"{file}.gz", file)]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise ValueError(f"{file} of {source.name} is neither in {folder / source.folder} nor in {folder}; {remedy}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): truncated or damaged; delete it and {remedy}") from None
    md5 = _md5(content)
    if md5 != source.contents[file]:
        raise ValueError(
            f"{path} holds content of md5 {md5}, the official file of {source.name} has {source.contents[file]}; "
            f"delete it and {remedy}"
        )
    return content


def fetch(source: Source, data_dir: Folder, *, progress: BytesProgress | None, mirrors: Sequence[str] | None) -> Path:
    """Downloads what is missing of one source into DIR/<data set>/ and returns that folder; see `datasets.fetch`."""
    folder = data_folder(data_dir) / source.folder
    for download, md5 in source.downloads.items():
        archive = folder / download
        packed = download.endswith(".tar.gz")
        files = source.contents if packed else [download.removesuffix(".gz")]
        if all(_complete(source, file, data_dir) for file in files):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made ({error}); name another folder with --data-dir") from None
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
