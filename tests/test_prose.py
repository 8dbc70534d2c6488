"""The prose of README and docs/: short sentences, no goals of ours, leading zeros, code that fits a page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```[^\n]*\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
GOALS = re.compile(r"\b(aimed at|goal that was set|we aim|our goal|our target)\b|\|\s*(target|goal)\s*\|")
LONGEST_SENTENCE, LONGEST_LINE = 40, 90


def prose(text: str) -> str:
    """The running text: without code, tables, headings and the addresses of links."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"^\s*\|.*$|^#+ .*$|^\[[^\]]+\]: .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\$\$.*?^\$\$$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$[^$\n]+\$", "x", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """The sentences of the running text; a list item begins a new one, and `code` counts as one word."""
    for paragraph in re.split(r"\n\s*\n", prose(text).strip()):
        words = re.sub(r"`[^`]*`", "Code", " ".join(paragraph.split()))
        yield from re.split(r"(?<=[.!?:])[)*\"']*\s+(?=[(*\"'A-Z0-9])", words)


def length(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_over_40_words(page: Path) -> None:
    assert [s for s in sentences(page.read_text()) if length(s) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_have_a_leading_zero(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", FENCE.sub("", page.read_text()))
    assert re.findall(r"(?<![\w.])\.\d+", text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_goals_of_ours_are_no_news(page: Path) -> None:
    assert GOALS.findall(FENCE.sub("", page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_code_fit_a_page(page: Path) -> None:
    lines = [line for block in FENCE.finditer(page.read_text()) for line in block["body"].splitlines()]
    assert [line for line in lines if len(line) > LONGEST_LINE] == []


def test_the_rules_notice_what_they_forbid() -> None:
    many = " ".join(["word"] * 41)
    assert [length(s) for s in sentences(f"A short one. {many.capitalize()}. `code` ends it.")] == [3, 41, 3]
    assert [length(s) for s in sentences(f"Before.\n\n| {many} |\n\n```text\n{many}\n```\n\nAfter.")] == [1, 1]
    assert GOALS.search("| measure | target | measured |")
