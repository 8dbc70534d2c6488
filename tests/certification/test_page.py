"""verify.html in a browser: it gives the answers of verify.py, reaches nobody, and shows text as text."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from mutations import RECORD, Case, Files, Odd, arithmetic, record_of, stored

import pacprune as pp
from pacprune.certification import page
from pacprune.certification.bounds_table import BOUNDS

BROWSER = shutil.which("chromium")
CERTIFICATES = Path(__file__).parents[2] / "results" / "certificates"
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")


class Browser:
    """Chromium without a window, told what to do by the messages of its debugging pipe."""

    def __init__(self, profile: Path) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command = ["chromium", *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 >/dev/null 2>/dev/null', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.watchdog = threading.Timer(1500, self.process.kill)
        self.watchdog.start()
        self.buffer, self.number, self.session = b"", 0, ""
        self.complaints: list[Any] = []
        pages = [info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\0" not in self.buffer:
            content = self.process.stdout.read1(2**20)
            assert content, "Chromium has ended"
            self.buffer += content
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(message["params"])
        return message

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        session = {"sessionId": self.session} if self.session else {}
        self.process.stdin.write(json.dumps(request | session).encode() + b"\0")
        self.process.stdin.flush()
        while (answer := self.message()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, or what its promise gives."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, path: Path) -> None:
        self.complaints.clear()
        self.call("Page.navigate", url=path.as_uri())
        while self.message().get("method") != "Page.loadEventFired":
            pass

    def verdict(self) -> str:
        """What the page shows once it has computed."""
        waiting = """new Promise(resolve => {
            const look = tries => {
                const shown = document.getElementById("verdict");
                if (shown || !tries) resolve(shown ? shown.innerText.replaceAll("\\n", " ") : "nothing");
                else setTimeout(() => look(tries - 1), 20);
            };
            look(3000);
        })"""
        return self.run(waiting)

    def close(self) -> None:
        self.watchdog.cancel()
        self.session = ""
        self.call("Browser.close")
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def bases() -> dict[str, Files]:
    return mutations.certificates()


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def ordinary(files: Files) -> dict[str, bytes]:
    """What a browser can read of a folder: files, and those with a hole in them as far as it would read them."""
    whole = {
        name: bytes(c.size) if isinstance(c, Odd) else c
        for name, c in files.items()
        if not isinstance(c, Odd) or 0 < c.size < 2**24
    }
    return {name: content for name, content in whole.items() if name in page.NAMES}


def by_page(browser: Browser, folders: list[dict[str, bytes]], options: str = "{}") -> list[dict[str, Any]]:
    """What window.pacpruneVerify gives for each folder; a file that several share goes over the pipe once."""
    browser.run("window.kept ??= {}, true")
    results = []
    for files in folders:
        keys = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        for name, key in keys.items():
            text = base64.b64encode(files[name]).decode()
            bytes_of_it = f'Uint8Array.from(atob("{text}"), c => c.charCodeAt(0))'
            if not browser.run(f'Object.hasOwn(kept, "{key}")'):
                browser.run(f'kept["{key}"] = {bytes_of_it}, true')
        taken = ", ".join(f'"{name}": kept["{key}"]' for name, key in keys.items())
        results.append(browser.run(f"pacpruneVerify({{{taken}}}, {options})"))
    return results


def by_script(folder: Path) -> tuple[str, str]:
    """The kind of answer that verify.py gives, and why."""
    try:
        report = arithmetic.verify(folder)
    except ValueError as error:
        return "unreadable", str(error)
    return "valid" if report.valid else "refused", str(report.failure)


def kind(result: dict[str, Any]) -> str:
    return "valid" if result["valid"] else "refused" if result["readable"] else "unreadable"


# --- The same answers.


@in_a_browser
def test_true_certificates_are_valid_by_the_same_rules_and_numbers(
    browser: Browser, bases: dict[str, Files], tmp_path: Path
) -> None:
    browser.open(page.PAGE)
    results = by_page(browser, [ordinary(files) for files in bases.values()])
    for (sort, files), result in zip(bases.items(), results, strict=True):
        report, record = arithmetic.verify(mutations.write(files, tmp_path / sort)), record_of(files)
        assert result["verdict"] == report.verdict, sort
        assert (result["checks"], result["trusted"]) == ([*report.checks], [*report.trusted])
        numbers = result["numbers"]
        assert (numbers["n"], numbers["claim"]) == (record["n"], record["claim"])
        for name, entry in record["bounds"].items():
            assert numbers["bounds"][name]["recomputed"] == pytest.approx(entry["bound"], rel=1e-9)
    assert browser.complaints == []


@in_a_browser
def test_copies_stand_in_the_sentence(browser: Browser, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 4, generator=generator), torch.randint(3, (10,), generator=generator)
    net, told = torch.nn.Linear(4, 3), "it was trained on other examples, and new data repeat as often"
    browser.open(page.PAGE)
    for sort, options in {"error": {}, "brier": {"risk": "brier"}}.items():
        cert = pp.certify_held_out(net, (x.repeat(5, 1), y.repeat(5)), declare=told, **options)
        assert "40 of the 50 bound examples are copies of others." in cert.statement
        folder = cert.save(tmp_path / sort)
        (result,) = by_page(browser, [ordinary(mutations.read(folder))])
        assert (kind(result), by_script(folder)[0]) == ("valid", "valid")


@in_a_browser
def test_it_agrees_with_verify_on_the_certificates_of_the_results(browser: Browser) -> None:
    folders = sorted(path.parent for path in CERTIFICATES.glob(f"*/{RECORD}"))
    browser.open(page.PAGE)
    answers = {}
    for folder in folders:
        (result,) = by_page(browser, [ordinary(mutations.read(folder))])
        browser.run("window.kept = {}, true")
        answers[folder.name] = kind(result)
    assert answers == {folder.name: by_script(folder)[0] for folder in folders}
    assert browser.complaints == []


@in_a_browser
def test_it_agrees_with_verify_on_changed_folders(
    browser: Browser, bases: dict[str, Files], tmp_path: Path, at_full_size: bool
) -> None:
    """In kind, and nearly always in words: both name the first rule that fails."""
    cases: list[Case] = list(mutations.cases(bases, 1000 if at_full_size else 100, seed=1))
    browser.open(page.PAGE)
    differ, other_words = [], []
    for i, case in enumerate(cases):
        (result,) = by_page(browser, [ordinary(case.files)])
        answer, reason = by_script(mutations.write(case.files, tmp_path / str(i)))
        if kind(result) != answer:
            differ.append((case.name, case.base, answer, reason[:200], result["verdict"][:200]))
        elif answer == "refused":
            start = [re.sub(r"[-\d.e'\"]+", "#", text)[:25] for text in (reason, result["failure"])]
            other_words += [(reason[:200], result["failure"][:200])] if start[0] != start[1] else []
        if i % 50 == 49:
            browser.run("window.kept = {}, true")
    assert differ == []
    assert len(other_words) <= len(cases) // 100, other_words
    assert browser.complaints == []  # what is refused or cannot be read is no fault of the page


@in_a_browser
def test_it_decodes_masks_as_verify_does(browser: Browser, at_full_size: bool) -> None:
    rng, cases = random.Random(0), []
    for _ in range(10_000 if at_full_size else 1000):
        size, r = rng.choice([0, 8, 56, 57, 400, 3000]), rng.randrange(8)
        places = sorted(rng.sample(range(size), int(size * rng.choice([0, 0.01, 0.05, 0.2]))))
        code = mutations.spoiled_code(rng, mutations.rice_code(places, r))
        try:
            places = np.flatnonzero(arithmetic.mask_of_gaps(np.frombuffer(code, np.uint8), size)).tolist()
        except ValueError:
            places = None
        cases.append({"code": list(code), "size": size, "places": places})
    browser.open(page.PAGE)
    differs = """(({ code, size, places }) => {
        let found = null;
        try {
            const mask = core.gapsOf(Uint8Array.from(code), size);
            found = [...Array(size).keys()].filter(mask.at);
        } catch (error) {
            if (!(error instanceof core.Unreadable)) throw error;
        }
        return JSON.stringify(found) !== JSON.stringify(places);
    })"""
    assert browser.run(f"{json.dumps(cases)}.filter({differs})") == []
    decoded = sum(case["places"] is not None for case in cases)
    assert 0.1 * len(cases) < decoded < 0.9 * len(cases)


@in_a_browser
def test_without_webcrypto_its_own_sha256_gives_the_same_answers(browser: Browser, bases: dict[str, Files]) -> None:
    browser.open(page.PAGE)
    folders = [ordinary(bases[sort]) for sort in ("usual", "committed", "bfloat16", "held-out, packed")]
    folders.append(folders[0] | {"draws.safetensors": b"x" * 63})
    usual = by_page(browser, folders)
    lengths = [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000]
    hashes = f"Promise.all({lengths}.map(n => core.sha256(new Uint8Array(n).map((_, i) => 7 * i))))"
    expected = [hashlib.sha256(bytes(7 * i % 256 for i in range(n))).hexdigest() for n in lengths]
    assert browser.run(hashes) == expected
    browser.run('Object.defineProperty(globalThis, "crypto", { value: undefined }), true')
    assert browser.run(hashes) == expected
    assert by_page(browser, folders) == usual
    assert [kind(result) for result in usual] == ["valid"] * 4 + ["refused"]


@in_a_browser
def test_published_seals_must_be_those_of_the_certificate(browser: Browser, bases: dict[str, Files]) -> None:
    browser.open(page.PAGE)
    sealed, files = record_of(bases["committed"])["commitment"], ordinary(bases["committed"])
    options = json.dumps({"seals": [sealed["digest"], sealed["seal"]]})
    (result,) = by_page(browser, [files], options)
    assert result["valid"]
    assert result["checks"].count(f"the published seal {sealed['seal'][:12]}") == 1
    (result,) = by_page(browser, [files], json.dumps({"seals": ["0" * 64]}))
    assert result["verdict"] == f"INVALID: the certificate was not made under the published seal {'0' * 64}"


# --- The page.


def test_the_page_is_one_file_that_loads_nothing() -> None:
    text = page.page()
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}' in text
    assert re.findall(r"https?://[^\"'` ]*", text) == ["http://www.w3.org/2000/svg"]  # a name, not a place
    assert not re.search(r"(src|href)=|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
    assert text.count("<script") == 1
    assert all(f'"{family}"' in text or f"{family}:" in text for family in BOUNDS)


@in_a_browser
def test_the_page_reaches_nobody(browser: Browser) -> None:
    browser.open(page.PAGE)
    blocked = """new Promise(resolve => {
        addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
        fetch("http://localhost:9/").catch(() => {});
        setTimeout(() => resolve("nothing was blocked"), 5000);
    })"""
    assert browser.run(blocked) == "connect-src"


@in_a_browser
def test_a_folder_that_is_chosen_is_verified(browser: Browser, bases: dict[str, Files], tmp_path: Path) -> None:
    folder = mutations.write(bases["usual"], tmp_path / "certificate")
    for change, start in (
        (lambda: None, "VALID (level 1: the arithmetic follows from the stated counts)"),
        (lambda: (folder / "draws.safetensors").write_bytes(b""), "INVALID files.draws.safetensors: "),
        (
            lambda: (folder / RECORD).write_bytes(b"{}"),
            "CANNOT BE READ certificate.json is (None, None), but this reads",
        ),
    ):
        change()
        browser.open(page.PAGE)
        assert browser.run("document.getElementById('report').innerText") == ""
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        field = browser.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(path) for path in folder.iterdir()])
        assert browser.verdict().startswith(start)
    assert browser.run("document.querySelectorAll('svg, blockquote').length") == 0  # no picture of what is not valid
    assert browser.complaints == []


@in_a_browser
@pytest.mark.parametrize("sort", ["usual, packed", "committed", "held-out", "sequence, packed", "Brier by key, packed"])
def test_an_embedded_certificate_is_shown_and_called_the_issuers_word(
    browser: Browser, bases: dict[str, Files], tmp_path: Path, sort: str
) -> None:
    folder = mutations.write(bases[sort], tmp_path / "certificate")
    record = record_of(bases[sort])
    browser.open(written(tmp_path / "page.html", page.embedded(folder)))
    assert browser.verdict() == "VALID (level 1: the arithmetic follows from the stated counts)"
    text = browser.run("document.body.innerText")
    assert (
        "This page came with its certificate: it is the issuer's word. "
        "Verify the folder with your own copy of this page." in text
    )
    report = arithmetic.verify(folder)
    for words in (record["statement"], record["digest"], *report.checks, *report.trusted, *record["files"].values()):
        assert words in text
    assert "Level 1 says nothing about the network itself." in text
    assert "pacprune verify FOLDER --recount" in text
    assert ("pacprune verify FOLDER --replay" in text) == (record["kind"] == "pac-bayes")
    bars = (
        browser.run("document.querySelectorAll('svg rect').length"),
        browser.run("document.querySelectorAll('svg rect.claimed').length"),
    )
    tests = record.get("tests", [])
    claimed = sum(test["network"] == record["hashes"]["model"] for test in tests)
    assert bars == ((len(tests), claimed) if tests else (len(record["bounds"]), 1))
    assert browser.complaints == []


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("sort", ["committed", "drop by class"])
def test_it_fits_the_screen(browser: Browser, bases: dict[str, Files], tmp_path: Path, sort: str, width: int) -> None:
    folder = mutations.write(bases[sort], tmp_path / "certificate")
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(written(tmp_path / "page.html", page.embedded(folder)))
    browser.verdict()
    browser.run("new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert browser.run("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll("svg text")].filter(text => {
        const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1;
    }).map(text => text.textContent)"""
    assert browser.run(outside) == []
    browser.call("Emulation.clearDeviceMetricsOverride")


@in_a_browser
def test_what_a_certificate_holds_is_shown_as_text(browser: Browser, bases: dict[str, Files], tmp_path: Path) -> None:
    """Markup is no markup, and a character that reverses the order of writing is shown by its number."""
    evil = "</script><img src=x onerror=document.title='caught'><b>bold</b>"
    record = record_of(bases["held-out, declared"])
    text = json.dumps(record).replace(json.dumps(record["declaration"])[1:-1], evil)
    files = stored(bases["held-out, declared"], json.loads(text))
    path = tmp_path / "page.html"
    browser.open(written(path, page.embedded(mutations.write(files, tmp_path / "valid"))))
    assert browser.verdict().startswith("VALID")
    assert evil in browser.run("document.getElementById('statement').innerText")
    files = stored(bases["held-out"], record_of(bases["held-out"]) | {"model": "\u202eDILAV\x1b[2J" + evil})
    browser.open(written(path, page.embedded(mutations.write(files, tmp_path / "refused"))))
    verdict = browser.verdict()
    assert verdict.startswith("INVALID model is '\\u202eDILAV\\x1b[2J</script><img")
    assert browser.run("document.querySelectorAll('main img, main b').length") == 0
    assert browser.run("document.title") == "Check a pacprune certificate"
    assert browser.complaints == []


def test_only_regular_files_of_a_certificate_are_embedded(bases: dict[str, Files], tmp_path: Path) -> None:
    folder = mutations.write(bases["usual"] | {"secret.txt": b"secret"}, tmp_path / "certificate")
    (block,) = re.findall(r'<script type="application/json" id="embedded">(.*)</script>', page.embedded(folder))
    embedded = {name: base64.b64decode(text, validate=True) for name, text in json.loads(block).items()}
    assert embedded == bases["usual"]
    (folder / "draws.safetensors").unlink()
    (folder / "draws.safetensors").symlink_to(folder / "secret.txt")
    with pytest.raises(ValueError, match="no whole certificate folder"):
        page.embedded(folder)
    with pytest.raises(ValueError, match=r"no whole certificate folder .*certificate\.json"):
        page.embedded(tmp_path)
