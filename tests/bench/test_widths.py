"""How tight the rules are: each is its formula, and the table says what the documentation says."""

import math

import numpy as np
import pytest

from pacprune.bench import widths


def test_the_rules_are_their_formulas() -> None:
    losses = np.array([0.0, 0.25, 0.5, 1.0])
    assert widths.hoeffding(losses, 0.05) == pytest.approx(0.4375 + math.sqrt(math.log(20) / 8))
    price = math.log(40)
    spread = math.sqrt(2 * np.var(losses, ddof=1) * price / 4) + 7 * price / 9
    assert widths.empirical_bernstein(losses, 0.05) == pytest.approx(0.4375 + spread)
    assert widths.counted(losses, 0.05) == math.inf
    assert widths.counted(np.array([0.0, 0.5, 0.5, 1.0]), 0.05) < 1


def test_counts_are_the_tightest_where_there_are_some_and_betting_mostly_elsewhere() -> None:
    rows = widths.table(sizes=(100, 1000), samples=3)
    for row in rows:
        slacks = {name: row[name] for name in widths.RULES if name in row}
        assert min(slacks.values()) > 0
        assert min(slacks, key=lambda name: slacks[name]) == ("counts" if "counts" in row else "betting")
    text = list(widths.lines(rows))
    assert len(text) == 2 + len(rows)
    assert all(line.count("**") == 2 for line in text[2:])
