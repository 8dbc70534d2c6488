import gzip
import hashlib
import io
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pacprune import data
from pacprune.data import datasets


class Mirror(ThreadingHTTPServer):
    """A file server on 127.0.0.1 that understands Range and hangs up after `cut` bytes of a response."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.cut, self.ranges, self.requests = {}, None, True, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        content, start = self.server.files.get(self.path[1:]), 0
        byte_range = self.headers.get("Range")
        self.server.requests.append((self.path[1:], byte_range))
        if content is None:
            self.send_error(404)
            return
        if byte_range and self.server.ranges:
            start = int(byte_range.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.cut])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Mirror() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def files(mirror, monkeypatch):
    """Small stand-ins for MNIST's files, on the mirror and in the table of md5s."""
    source = datasets.SOURCES["mnist"]
    for file in source.contents:
        content = hashlib.sha256(file.encode()).digest() * 100
        packed = gzip.compress(content, mtime=0)
        monkeypatch.setitem(source.contents, file, hashlib.md5(content).hexdigest())
        monkeypatch.setitem(source.downloads, f"{file}.gz", hashlib.md5(packed).hexdigest())
        mirror.files[f"{file}.gz"] = packed
    return mirror.files


def get(mirror, folder, **options):
    return data.fetch("mnist", folder, mirrors=[mirror.url], **options)


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_fetch_downloads_once_and_reports_progress(mirror, files, tmp_path):
    calls = []
    folder = get(mirror, tmp_path, progress=lambda *call: calls.append(call))
    assert folder == tmp_path / "mnist"
    assert names(tmp_path) == sorted(files)
    assert {(name, len(content), len(content)) for name, content in files.items()} <= set(calls)
    get(mirror, tmp_path)
    assert len(mirror.requests) == 4
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    get(mirror, tmp_path)
    assert len(mirror.requests) == 5
    assert all((folder / name).read_bytes() == content for name, content in files.items())


def test_a_cut_connection_is_resumed(mirror, files, tmp_path):
    mirror.cut = 30
    folder = get(mirror, tmp_path)
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert names(tmp_path) == sorted(files)
    first = next(iter(files))
    assert [byte_range for name, byte_range in mirror.requests if name == first][:3] == [None, "bytes=30-", "bytes=60-"]


def test_a_second_call_goes_on_where_the_first_stopped(mirror, files, tmp_path):
    first, content = next(iter(files.items()))
    part = tmp_path / "mnist" / f"{first}.part"
    part.parent.mkdir()
    part.write_bytes(content[:30])
    get(mirror, tmp_path)
    assert mirror.requests[0] == (first, "bytes=30-")
    assert (part.parent / first).read_bytes() == content


@pytest.mark.parametrize("old_part", ["whole", "foreign", "longer"])
def test_any_old_part_leads_to_the_right_file(old_part, mirror, files, tmp_path):
    first, content = next(iter(files.items()))
    part = tmp_path / "mnist" / f"{first}.part"
    part.parent.mkdir()
    part.write_bytes({"whole": content, "foreign": b"x" * 30, "longer": content + b"x"}[old_part])
    get(mirror, tmp_path)
    assert (part.parent / first).read_bytes() == content
    assert names(tmp_path) == sorted(files)


def test_a_server_without_ranges_starts_over(mirror, files, tmp_path):
    mirror.ranges = False
    first, content = next(iter(files.items()))
    part = tmp_path / "mnist" / f"{first}.part"
    part.parent.mkdir()
    part.write_bytes(content[:30])
    get(mirror, tmp_path)
    assert (part.parent / first).read_bytes() == content


def test_a_wrong_checksum_leaves_no_file(mirror, files, tmp_path):
    first = next(iter(files))
    official = hashlib.md5(files[first]).hexdigest()
    files[first] = b"something else"
    received = hashlib.md5(b"something else").hexdigest()
    with pytest.raises(ValueError, match=f"its md5 is {received}, the official one is {official}"):
        get(mirror, tmp_path)
    assert names(tmp_path) == []


def test_the_next_mirror_is_tried(mirror, files, tmp_path):
    data.fetch("mnist", tmp_path, mirrors=[f"{mirror.url}/gone", mirror.url])
    assert names(tmp_path) == sorted(files)


def test_without_a_network_the_error_is_one_sentence(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ValueError, match=r"could not download http://127.*refused.* put the file .* into .* yourself"):
        data.fetch("mnist", tmp_path, mirrors=[url])
    assert names(tmp_path) == []


def test_bad_names_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to download for 'digits'; choose one of mnist, fashion-mnist, cifar"):
        data.fetch("digits", tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be made"):
        data.fetch("mnist", tmp_path / "file")


def test_advice_to_fetch_names_the_users_folder(tmp_path):
    for folder, command in ((None, "`pacprune data fetch mnist`"), ("my data", "fetch mnist --data-dir 'my data'`")):
        with pytest.raises(ValueError, match=f"{command}$"):
            datasets.read("mnist", "no such file", folder)


def test_cifar10_is_unpacked_from_its_archive(mirror, tmp_path, monkeypatch):
    source = datasets.SOURCES["cifar10"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file in [*source.contents, "readme.html", "../../evil"]:
            content = file.encode() * 10
            member = tarfile.TarInfo(f"{source.folder}/{file}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            if file in source.contents:
                monkeypatch.setitem(source.contents, file, hashlib.md5(content).hexdigest())
    mirror.files["cifar-10-binary.tar.gz"] = buffer.getvalue()
    monkeypatch.setitem(source.downloads, "cifar-10-binary.tar.gz", hashlib.md5(buffer.getvalue()).hexdigest())
    folder = data.fetch("cifar10", tmp_path / "deep", mirrors=[mirror.url + "/"])
    assert folder == tmp_path / "deep" / "cifar-10-batches-bin"
    assert names(tmp_path) == sorted(source.contents)
    data.fetch("cifar10", tmp_path / "deep", mirrors=[mirror.url])
    assert len(mirror.requests) == 1
