"""docs/paper.md: every item of the paper has a row, and what a row names and refers to exists."""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pacprune as pp
from pacprune.bench import subjects
from pacprune.paper import frame, recipes

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "paper.md").read_text()
ERRATA = [f"S{number}" for number in range(1, 32) if number not in (16, 21, 27)]
LINK = re.compile(r'\[[^\]]+\]\(([^) ]+)(?: "(\w+)")?\)')
REFERENCE = re.compile(r"\[(S\d+)\]")
VERDICT = re.compile(r"(agrees in direction|agrees|does not agree|corrected|not yet measured)(?= for α| \(|: \[S|;|$)")


class Item(NamedTuple):
    """A row of the tables of items."""

    number: str
    item: str
    where: str
    place: str
    setting: str
    verdict: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


ITEMS = [Item(*cells(line)) for line in PAGE.partition("\n## Items\n")[2].splitlines() if re.match(r"\| \d", line)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that headings of a page have on GitHub."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def check_link(target: str, title: str = "") -> None:
    """The file is there, and has the heading or the test."""
    name, _, anchor = target.partition("#")
    path = (DOCS / name).resolve()
    assert path.is_file(), f"{target} names no file"
    assert not anchor or anchor in anchors(path), f"{name} has no heading for #{anchor}"
    assert not title or f"def {title}(" in path.read_text(), f"{name} has no {title}"


def resolve(name: str) -> Any:
    value: Any = pp
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def named(pattern: str) -> set[int]:
    """The numbers that the column "where in the paper" has behind a word."""
    return {int(number) for item in ITEMS for number in re.findall(rf"{pattern} (\d+)", item.where)}


def test_no_item_of_the_paper_is_missing() -> None:
    assert [int(item.number) for item in ITEMS] == list(range(1, 148))
    assert f"in {len(ITEMS)} rows" in PAGE
    assert named("Figure") == set(range(1, 19))
    assert named("Eq.") == set(range(1, 21))
    assert named("Theorem") == named("Lemma") == {1, 2}
    assert named("Algorithm") == {1}
    for section in ("1", "2", "2.1", "3", "3.1", "4", "5.1", "6", "6.1", "7.1", "8", "9", "A.1", "A.2", "A.3", "B.1"):
        assert any(section in item.where.split(", ") for item in ITEMS), section
    for section in ("B.2", "B.3", "B.4", "C.1", "C.2", "C.3", "C.4", "D.1", "D.2", "D.3", "E.1", "E.2", "E.3"):
        assert any(section in item.where.split(", ") for item in ITEMS), section
    assert all(any(f"F.{k}" in item.where for item in ITEMS) for k in range(1, 6))


@pytest.mark.parametrize("item", ITEMS, ids=[item.number for item in ITEMS])
def test_a_row_names_what_exists(item: Item) -> None:
    assert item.setting in frame.PROCEDURES
    code = re.findall(r"`([^`]+)`", item.place)
    assert code or item.place == "–"
    for name in code:
        words = name.split()
        if words[:2] == ["pacprune", "reproduce"]:
            check_command(words[2:])
        elif words[:2] == ["pacprune", "bench"]:
            assert words[2] in subjects.SUBJECTS
        else:
            assert name.startswith("pp.")
            resolve(name)


def check_command(words: list[str]) -> None:
    """Recipe, scale and setting exist."""
    name, *rest = words
    flags = dict(zip(rest[::2], rest[1::2], strict=True))
    recipe, scale = recipes.RECIPES[name], flags.pop("--scale", "reduced")
    assert scale in recipe.scales
    only = flags.pop("--only", None)
    assert only is None or only in [setting.name for setting in recipe.at(scale)]
    assert not flags


@pytest.mark.parametrize("item", ITEMS, ids=[item.number for item in ITEMS])
def test_a_verdict_has_what_backs_it(item: Item) -> None:
    match = VERDICT.match(item.verdict)
    assert match, item.verdict
    links, errata = LINK.findall(item.verdict), REFERENCE.findall(item.verdict)
    # What another procedure gave may stand behind "not yet measured".
    assert links or errata or match[1] == frame.NOT_MEASURED
    assert bool(errata) or match[1] != "corrected"
    for target, title in links:
        check_link(target, title)
        assert title or not target.endswith(".py"), "name the test"
    # A measurement is linked by its numbers, and a formula by its check.
    if "pacprune reproduce" in item.place and item.setting != "paper":
        assert errata or any("#" in target for target, _ in links) or match[1] == frame.NOT_MEASURED


def test_every_erratum_has_a_row_and_every_link_of_the_page_a_target() -> None:
    references = dict(re.findall(r"^\[(S\d+)\]: (\S+)$", PAGE, re.M))
    assert set(REFERENCE.findall("".join(item.verdict for item in ITEMS))) == set(references) == set(ERRATA)
    for number, target in references.items():
        check_link(target)
        assert f"errata.md#{number.lower()}-" in target
    for target, title in LINK.findall(PAGE):
        check_link(target, title)


def test_every_erratum_quotes_the_paper_says_what_is_right_and_checks_both() -> None:
    parts = re.split(r"^### (S\d+)\. ", (DOCS / "errata.md").read_text(), flags=re.M)
    entries = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert sorted(entries, key=lambda number: int(number[1:])) == ERRATA
    for number, text in entries.items():
        assert "*The paper" in text, number
        assert "*Right" in text or "*What we do*" in text, number
        code = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
        assert "assert" in code, f"{number} has no check"


# --- The table of figures


def figures_table() -> str:
    """The lines of all recipes as the page has them."""
    lines = ["| figure | shows | command | setting | numbers | H200 | CPU |", "|---|---|---|---|---|---|---|"]
    for row in recipes.listing():
        words = row["verdict"] or ("published" if row["see"] else "not yet")
        numbers = f"[{words}]({row['see']})" if row["see"] else words
        minutes = ["–" if row[key] is None else f"{row[key]:g}" for key in ("h200", "cpu")]
        start = row["figure"] or "ours", row["title"], f"`{row['command']}`", row["procedure"] or "–"
        lines.append(f"| {' | '.join([*start, numbers, *minutes])} |")
    return "\n".join(lines)


def test_the_table_of_figures_is_that_of_the_recipes() -> None:
    table = figures_table()
    assert f"\n\n{table}\n\n" in PAGE, f"the table of figures in docs/paper.md should be\n{table}"


def test_figures_and_items_have_one_verdict() -> None:
    for row in recipes.listing():
        same = [item for item in ITEMS if f"`{row['command']}`" == item.place and item.setting == row["procedure"]]
        for number in frame.Line("", row["figure"]).numbers:
            about = [item for item in same if re.search(rf"Figure {number}\b", item.where)]
            verdicts = [match[1] for item in about if (match := VERDICT.match(item.verdict))]
            assert row["verdict"] in verdicts, f"{row['command']}, figure {number}"
