"""Texts as documents: from a file, a folder, lines of JSON or a Debian package of sources; parts by hashes of names.

The document is the unit that is independent of others, as far as anything is: tokens of one document are not. So a
document lies in one part as a whole. Its part follows from its name alone: no seed, no order, and a document stays
where it is when others come.
"""

import io
import itertools
import json
import lzma
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pacprune.data.own import name_share

PARTS = {"train": 0.8, "calibration": 0.02, "validation": 0.06, "certify": 0.06, "test": 0.06}
"""The share of the documents in each part: what trains, what scores weights, what chooses among settings, what a
certificate counts on, and what is reported."""
SECTION = 5_000
"""Characters after which a single file of text is cut at the next line end: it has no documents of its own."""
SOURCES = (".c", ".h")
"""How the files of a package end that count as documents."""
LARGEST = 100_000
"""Bytes of the largest document that is taken from a package: what is longer is mostly a generated table."""
FORMS = 'a text file, a folder of text files, a .jsonl file with a field "text", or a .deb of sources'


class Document(NamedTuple):
    """A text with its name."""

    name: str
    text: str

    @property
    def part(self) -> str:
        """The key of PARTS that this document belongs to."""
        return part_of(self.name)


def part_of(name: str) -> str:
    """The part of a document: where a number in [0, 1) that follows from its name by SHA-256 lies among PARTS."""
    share, ends = name_share(name), itertools.accumulate(PARTS.values())
    *_, last = PARTS  # the shares may add up to a little less than 1
    return next((part for part, end in zip(PARTS, ends, strict=True) if share < end), last)


def by_part(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """The documents of every part, in their order."""
    parts: dict[str, list[Document]] = {part: [] for part in PARTS}
    for document in documents:
        parts[document.part].append(document)
    return parts


def read(path: str | Path, *, skipped: list[str] | None = None) -> list[Document]:
    """The documents of a path, in the order of their names; a text that occurs twice counts under its first name.

    Args:
        path: FORMS. The lines of a .jsonl file, which may be compressed as .jsonl.xz, may have a "name" each. Of a
            folder, all files count that are UTF-8. A single file of text is cut into sections.
        skipped: A list to which the names of a folder's files that are no UTF-8 text are appended.

    Returns:
        The documents, at least one.

    Raises:
        ValueError: If there is no such path, it cannot be read, or it holds no text.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"the text {path} does not exist; give {FORMS}")
    reader = next((reader for suffix, reader in READERS.items() if path.name.endswith(suffix)), _sections)
    try:
        documents = apart(_folder(path, [] if skipped is None else skipped) if path.is_dir() else reader(path))
    except (UnicodeDecodeError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise ValueError(f"the text {path} cannot be read ({error}); give {FORMS}, in UTF-8") from None
    if not documents:
        raise ValueError(f"the text {path} holds no words; give {FORMS}")
    return documents


def apart(documents: Iterable[Document]) -> list[Document]:
    """Documents in the order of their names, without those that are empty or equal an earlier one.

    A copy in another part would have been trained on.
    """
    texts: dict[str, Document] = {}
    for document in sorted(documents):
        if document.text.strip():
            texts.setdefault(document.text, document)
    return list(texts.values())


def check_apart(used: Iterable[Document], held_out: Iterable[Document], *, what: str) -> None:
    """Refuses documents that are held out and used as well: with the same text, whatever their names.

    Args:
        used: Documents that train, score or choose.
        held_out: Documents that are to be counted on.
        what: What the held-out ones are called, such as "certification documents".

    Raises:
        ValueError: If there are any.
    """
    texts = {document.text for document in used}
    common = [document.name for document in held_out if document.text in texts]
    if common:
        raise ValueError(
            f"{len(common)} of the {what} were used to prune as well, such as {common[0]}; what is counted on them "
            "says nothing about new text, so take others"
        )


def lines(documents: Iterable[Document]) -> bytes:
    """Documents as lines of JSON, which `read` takes."""
    rows = (json.dumps(document._asdict(), ensure_ascii=False) for document in documents)
    return "".join(f"{row}\n" for row in rows).encode()


# --- What documents are read from.


def _sections(path: Path) -> Iterator[Document]:
    """A file of text, cut at line ends."""
    pieces = re.findall(rf"(?s).{{1,{SECTION}}}[^\n]*\n?", path.read_text(encoding="utf-8"))
    for number, piece in enumerate(pieces):
        yield Document(f"{path.name}#{number:06}", piece)


def _folder(root: Path, skipped: list[str]) -> Iterator[Document]:
    """Every file of a folder and of those inside, but for hidden ones and such that are no text."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            text = _decoded(path.read_bytes())
            if text is None:
                skipped.append(name.as_posix())
            else:
                yield Document(name.as_posix(), text)


def _decoded(content: bytes) -> str | None:
    """Bytes as text; None if they are not UTF-8."""
    try:
        return None if b"\0" in content else content.decode()
    except UnicodeDecodeError:
        return None


def _lines(path: Path) -> Iterator[Document]:
    content = path.read_bytes()
    yield from of_lines(lzma.decompress(content) if path.suffix == ".xz" else content, path.name)


def of_lines(content: bytes, file: str) -> Iterator[Document]:
    """The documents of lines of JSON, each an object with a "text" and perhaps a "name"."""
    for number, line in enumerate(content.decode().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            row = error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f'line {number} of {file} is no JSON object with a field "text"; give one per document')
        yield Document(str(row.get("name", f"{file}#{number:06}")), row["text"])


def _package(path: Path) -> Iterator[Document]:
    yield from of_package(path.read_bytes(), path.name)


def of_package(content: bytes, file: str) -> Iterator[Document]:
    """The source files of a Debian package, also of those packed in it; neither dpkg nor ar is needed.

    A package is an ar archive whose member data.tar.* has the files. Of them count those that end like SOURCES, have at
    most LARGEST bytes and are UTF-8. Their names begin behind the first folder of their archive.
    """
    data = next((body for name, body in _members(content, file) if name.startswith("data.tar")), None)
    if data is None:
        raise ValueError(f"{file} has no data.tar, so it is no whole Debian package; download it again")
    with tarfile.open(fileobj=io.BytesIO(data)) as outer:
        yield from _source_files(outer)
        for member in outer.getmembers():
            packed = outer.extractfile(member) if re.search(r"\.tar\.\w+$", member.name) else None
            if packed is not None:
                with tarfile.open(fileobj=packed, mode="r|*") as inner:
                    yield from _source_files(inner)


def _members(content: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ar archive: after 8 bytes, each member has a head of 60 and begins at an even place."""
    if not content.startswith(b"!<arch>\n"):
        raise ValueError(f"{file} does not begin as a Debian package does; download it again")
    place = 8
    while place + 60 <= len(content):
        head = content[place : place + 60]
        size = int(head[48:58])
        body = content[place + 60 : place + 60 + size]
        if len(body) < size:
            raise ValueError(f"{file} ends after {len(content):,} bytes, in the middle of a member; download it again")
        yield head[:16].decode("ascii", "replace").strip().rstrip("/"), body
        place += 60 + size + size % 2


def _source_files(archive: tarfile.TarFile) -> Iterator[Document]:
    for member in archive:
        if member.isfile() and member.name.endswith(SOURCES) and member.size <= LARGEST:
            file = archive.extractfile(member)
            text = None if file is None else _decoded(file.read())
            if text is not None:
                yield Document(member.name.removeprefix("./").partition("/")[2], text)


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".deb": _package,
    ".jsonl": _lines,
    ".jsonl.xz": _lines,
}
"""How files are read, by how their names end; any other is a text."""
