"""Documents: what they are read from, and the parts that follow from their names."""

import hashlib
import io
import json
import lzma
import stat
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacprune.cli import app
from pacprune.data import datasets, text
from pacprune.data.download import data_folder
from pacprune.data.text import Document

CODE = {
    "linux/fs/inode.c": b"int main(void) { return 0; }\n",
    "linux/fs/inode.h": b"extern int a;\n",
    "linux/fs/copy.h": b"extern int a;\n",
    "linux/arch/empty.c": b"  \n",
    "linux/fs/latin.c": "/* Jos\u00e9 */".encode("latin-1"),
    "linux/fs/large.h": b"#define A 1\n" * 10_000,
    "linux/README": b"read me",
}


def tar(files: dict[str, bytes], mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    """A package as dpkg makes it: an ar archive with a tar archive, which holds another one."""
    data = tar({"./usr/src/linux.tar.xz": tar(files, "w:xz"), "./usr/share/doc/x.c": b"int x;"}, "w:xz")
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}
    package = b"!<arch>\n"
    for name, content in parts.items():
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        package += head + content + b"\n" * (len(content) % 2)
    return package


def names(documents: list[Document]) -> list[str]:
    return [document.name for document in documents]


def test_the_c_files_of_a_package_are_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "linux.deb"
    path.write_bytes(deb(CODE))
    documents = text.read(path)
    assert names(documents) == ["fs/copy.h", "fs/inode.c", "usr/share/doc/x.c"[4:]]  # once, and in order
    assert documents[1].text == CODE["linux/fs/inode.c"].decode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"zip" + content, "does not begin as a Debian package"),
        (lambda content: content[:-50], "in the middle of a member"),
        (lambda content: content.replace(b"data.tar", b"dato.tar"), "no data.tar"),
        (lambda content: content[:-50] + b"\0" * 50, "cannot be read"),
    ],
)
def test_a_damaged_package_is_one_sentence(damage, message: str, tmp_path: Path) -> None:
    (tmp_path / "linux.deb").write_bytes(damage(deb(CODE)))
    with pytest.raises(ValueError, match=message):
        text.read(tmp_path / "linux.deb")


def test_a_folder_has_a_document_per_file(tmp_path: Path) -> None:
    for name, content in {"b.txt": b"b", "a/c.md": b"c", ".git/d": b"d", "e.bin": b"\0\1", "f.txt": b"\xff"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert names(text.read(tmp_path)) == ["a/c.md", "b.txt"]


def test_a_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    content = "".join(f"line {k} of a long text\n" for k in range(1000))
    (tmp_path / "book.txt").write_text(content)
    sections = text.read(tmp_path / "book.txt")
    assert "".join(section.text for section in sections) == content
    assert len(sections) > 2
    assert all(section.text.endswith("\n") for section in sections)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_lines_of_json_are_read_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    documents = [Document("a", "ä\n"), Document("b", "two\u2028lines")]
    content = text.lines(documents)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(lzma.compress(content) if suffix.endswith("xz") else content)
    assert text.read(path) == documents


@pytest.mark.parametrize("line", ["nothing", "[1]", '{"words": "a"}', '{"text": 3}'])
def test_a_line_without_a_text_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 3 of text\.jsonl is no JSON object with a field"):
        text.read(path)


def test_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the text .*nowhere does not exist; give a text file"):
        text.read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no words"):
        text.read(tmp_path / "empty")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"cannot be read .* in UTF-8"):
        text.read(tmp_path / "latin.txt")


def test_parts_follow_from_names_and_have_their_shares() -> None:
    documents = [Document(f"fs/{k}.c", str(k)) for k in range(20_000)]
    parts = text.by_part(documents)
    assert list(parts) == ["train", "calibration", "validation", "certify", "test"]
    assert abs(sum(text.PARTS.values()) - 1) < 1e-9
    for part, share in text.PARTS.items():
        assert len(parts[part]) / len(documents) == pytest.approx(share, abs=0.01)
    assert text.part_of("fs/ext4/inode.c") == "train"  # for good: other parts would make old results wrong


def test_documents_that_are_used_and_counted_on_are_refused() -> None:
    used, fresh = [Document("a", "same"), Document("b", "else")], [Document("c", "new")]
    text.check_apart(used, fresh, what="certification documents")
    with pytest.raises(ValueError, match="1 of the certification documents were used to prune as well, such as d"):
        text.check_apart(used, [*fresh, Document("d", "same")], what="certification documents")


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A tiny package in place of the kernel's, and its digests."""
    source, package = datasets.SOURCES["linux-c"], deb(CODE | {"linux/arch/x86/a.c": b"int b;"})
    content = datasets._linux_documents(package)
    monkeypatch.setitem(source.downloads, next(iter(source.downloads)), hashlib.sha256(package).hexdigest())
    monkeypatch.setitem(source.contents, datasets.LINUX_C, hashlib.sha256(content).hexdigest())
    return package


def apt(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "apt-get"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_fetch_has_apt_download_the_package_and_keeps_its_documents(
    linux: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").write_bytes(linux)
    (file,) = datasets.SOURCES["linux-c"].downloads
    apt(tmp_path, f'echo "$@" > {tmp_path}/words; cp {tmp_path}/package {file}', monkeypatch)
    folder = datasets.fetch("linux-c", tmp_path / "data")
    assert (tmp_path / "words").read_text().split() == ["download", datasets.SOURCES["linux-c"].package]
    assert [path.name for path in folder.iterdir()] == ["linux-c.jsonl.xz"]
    documents = text.read(folder / "linux-c.jsonl.xz")
    assert names(documents) == ["fs/copy.h", "fs/inode.c"]  # of some folders
    assert datasets.read("linux-c", datasets.LINUX_C, tmp_path / "data") == text.lines(documents)
    (tmp_path / "apt-get").unlink()
    assert datasets.fetch("linux-c", tmp_path / "data") == folder  # complete: nothing is downloaded
    result = CliRunner().invoke(app.build("data"), ["data", "list", "--data-dir", str(tmp_path / "data"), "--json"])
    states = {state["name"]: state for state in json.loads(result.stdout)["data"]}
    assert states["linux-c"]["usable"]
    assert not states["mnist"]["present"]


def test_a_package_that_lies_there_is_taken(linux: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (file,) = datasets.SOURCES["linux-c"].downloads
    folder = data_folder(tmp_path) / "linux-c"
    folder.mkdir()
    (folder / file).write_bytes(linux)
    assert datasets.fetch("linux-c", tmp_path) == folder


@pytest.mark.parametrize(
    ("script", "reason"), [(None, "there is no apt-get here"), ("echo E: no such version >&2; exit 100", "E: no such")]
)
def test_without_apt_two_commands_are_named(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    if script is not None:
        apt(tmp_path, script, monkeypatch)
    message = rf"could not be downloaded \({reason}.*`apt-get update` and `apt-get download linux-source-6"
    with pytest.raises(ValueError, match=message):
        datasets.fetch("linux-c", tmp_path / "data")
