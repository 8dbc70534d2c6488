"""The site builds strictly, knows every public name, and asks nothing of the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pacprune
from pacprune.cli import app

ROOT = Path(__file__).parents[1]
pytest.importorskip("zensical")
pytest.importorskip("latex2mathml")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    built = subprocess.run([sys.executable, ROOT / "docs" / "build.py", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert [name for name in pacprune.__all__ if f'id="pp-{name.rstrip("_").lower()}"' not in text] == []
    assert not (site / "reference" / "more.html").exists(), "a public name has no section in docs/build.py"


def test_every_command_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "command-line.html").read_text()
    assert [name for name in app.all_commands() if f'id="pacprune-{name}"' not in text] == []


def test_every_field_of_a_certificate_is_in_the_reference(site: Path) -> None:
    source = (ROOT / "src" / "pacprune" / "certification" / "record.py").read_text()
    text = (site / "reference" / "certificate.html").read_text()
    names = re.findall(r"^    (\w+): ", source, re.MULTILINE)
    assert [name for name in names if f"<code>{name}</code>" not in text] == []


def test_links_lead_to_files_and_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        if page.name == "404.html" or page.is_relative_to(site / "files"):
            continue
        for link in re.findall(r'<(?:a|img|link|script)\b[^>]*?(?:href|src)="([^"#?]+)', text):
            if not link.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / link).exists(), f"{page.relative_to(site)} links to {link}, which is not there"
        loaded = re.findall(r'<(?:img|script|iframe)\b[^>]*?src="(https?:[^"]*)', text)
        loaded += re.findall(r'<link\b[^>]*?rel="stylesheet"[^>]*?href="(https?:[^"]*)', text)
        assert loaded == [], f"{page.relative_to(site)} asks the network for {loaded}"


def test_formulas_are_drawn(site: Path) -> None:
    text = (site / "concepts.html").read_text()
    assert text.count("<math") > 20
    assert 'class="arithmatex"' not in text


def test_pages_are_in_the_navigation() -> None:
    config = (ROOT / "docs" / "zensical.toml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f'"{page.name}"' not in config] == []
