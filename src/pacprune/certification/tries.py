"""Tries: every certificate on a pool of examples is counted, across processes, in a file of the user's.

Best of many certificates is a choice that has to be paid for. What was declared beforehand (grid=, certified=) is paid
in the bound itself. What was not is counted here and printed beside the claim: as the j-th try that nobody declared, it
would have to hold at delta / (j (j + 1)), since these add up to delta over all j.

The file is `certificates.jsonl` in $XDG_STATE_HOME/pacprune, or ~/.local/state/pacprune: a line for each certificate.
PACPRUNE_LEDGER=off turns the count off, and the text says so.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacprune.data import trace
from pacprune.distributed import ranks

FILE = "certificates.jsonl"
_known: dict[str, tuple[list[int], int]] = {}
"""Pools by the subjects of this process, and when the certificate was first known."""
_memory: list[dict[str, Any]] = []
"""The tries of this process, where the file cannot be written."""


@dataclass(frozen=True)
class Tries:
    """How many certificates there were on a pool, and what this one would be if nobody had declared it.

    Args:
        number: Which try on these examples this is, counted on this machine; None where nobody counts.
        declared: How many tries the bound pays for.
        undeclared_bound: The bound at delta / (j (j + 1)), j being `number`; None where nobody counts.
        kept: Whether the count is written to the file.
        walk: What is left at that level of candidates that were tested one after another, in words; of all other
            certificates the bound says it.
        later: Whether the networks were trained or loaded, in this process, after another certificate on these
            examples was known.
        evaluated: Among how many networks these are that were evaluated on the bound examples in this process.
    """

    number: int | None
    declared: int
    undeclared_bound: float | None
    kept: bool = True
    walk: str | None = None
    later: bool = False
    evaluated: int = 1

    @property
    def paid(self) -> bool:
        """Whether all that is counted was declared."""
        return self.number is not None and max(self.number, self.evaluated) <= self.declared

    def __str__(self) -> str:
        if self.number is None:
            return "tries are not counted (PACPRUNE_LEDGER=off): that there were no others is the issuer's word"
        where = "on this machine" if self.kept else "in this process (the ledger file cannot be written)"
        looks = f", and one of {self.evaluated} networks that were evaluated on them" if self.evaluated > 1 else ""
        count = (
            f"certificate number {self.number} on these examples {where}{looks}; {self.declared} declared and paid for"
        )
        if self.paid:
            return count
        most = max(self.number, self.evaluated)
        level = f"delta / ({most} x {most + 1})"
        text = f"{count}: if this is chosen among them, take {self.undeclared_bound:.4f} instead, the bound at {level}"
        if self.walk is not None:
            text = f"{count}: if this is chosen among them, the tests have to be passed at {level}; {self.walk}"
        elif self.undeclared_bound == 1.0:
            text = f"{count}: if this is chosen among them, nothing is proved, since the bound at {level} is 1"
        if self.later:
            text += (
                "; what is certified was trained or loaded after one of the others was known: if it was made because "
                "of that, no level is small enough, and only new examples tell"
            )
        return text


def count(
    pool: Sequence[int],
    subject: str,
    *,
    declared: int,
    bound_at: Callable[[float], float],
    walk_at: Callable[[float], str] | None = None,
    trained: int | None = None,
    evaluated: int = 1,
) -> Tries:
    """Counts a certificate, the same subject once; on rank 0, whose count all ranks get.

    Args:
        pool: A sample of the hashes of all examples that the split was cut from, the smallest ones: another cut is
            another try on the same examples, and so is one of half of them.
        subject: The hash of what is certified, of the split and of what was declared.
        declared: How many tries the bound pays for.
        bound_at: A share of delta in (0, 1] -> the bound of this certificate with that share.
        walk_at: The same -> what is left of candidates that were tested one after another, in words.
        trained: When the networks were last trained or loaded, as `trace.now` counts; None where that is no matter.
        evaluated: Among how many networks these are that were evaluated on the examples in this process.
    """
    later = trained is not None and any(
        moment < trained and _same(known, list(pool)) for key, (known, moment) in _known.items() if key != subject
    )
    _known.setdefault(subject, (list(pool), trace.now()))
    if os.environ.get("PACPRUNE_LEDGER", "").lower() == "off":
        return Tries(None, declared, None, evaluated=evaluated)
    number, kept = ranks.on_rank0(lambda: _number(list(pool), subject))
    most = max(number, evaluated)
    share = 1 / (most * (most + 1))
    walk = None if walk_at is None else walk_at(share)
    return Tries(number, declared, bound_at(share), kept, walk, later, evaluated)


def folder() -> Path:
    """Where the count is kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pacprune"


def _number(pool: list[int], subject: str) -> tuple[int, bool]:
    """Which of the pool's subjects this is, in the order of their first certificates, and whether that is kept."""
    entry = {"pool": pool, "subject": subject}
    try:
        folder().mkdir(parents=True, exist_ok=True)
        if entry not in _entries():
            # One short line in one write: two processes do not mix theirs, and each then reads both.
            with (folder() / FILE).open("a") as file:
                file.write(json.dumps(entry) + "\n")
        entries, kept = _entries(), True
    except (OSError, RuntimeError):  # the latter where nobody knows the user's home
        if entry not in _memory:
            _memory.append(entry)
        entries, kept = _memory, False
    subjects = dict.fromkeys(e["subject"] for e in entries if _same(e["pool"], pool))
    return list(subjects).index(subject) + 1, kept


def _same(first: list[int], second: list[int]) -> bool:
    """Whether two pools are one: about half of the smaller one's examples are in the other one too."""
    return 2 * len({*first} & {*second}) >= min(len(first), len(second))


def _entries() -> list[dict[str, Any]]:
    """All lines of the file; what is no entry, such as a line that was cut short, is passed over."""
    path = folder() / FILE
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("pool"), list) and isinstance(entry.get("subject"), str):
            entries.append({key: entry[key] for key in ("pool", "subject")})
    return entries
