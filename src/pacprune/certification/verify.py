"""Checks a certificate folder without data, without torch and without the rest of this package: numpy alone.

Hashes, KL, bounds, shares of delta and sentence are computed again by arithmetic of this file's own: a fault of the
issuing code is not repeated. `python verify.py FOLDER` exits with 0: valid, 1: a rule fails, 2: cannot be read.

Nothing in a folder is believed. Only regular files with the known names are opened, sizes are checked before memory is
asked for, and everything that is read is hashed.
"""

import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSIONS, RECORD, PACKED = "pacprune certificate", (2, 3), "certificate.json", "packed.safetensors"
ADDED = ("share", "shares")
"""Keys that version 3 has and version 2 has not; version 2 divides all of delta by `certified`."""
FILES = {
    "pac-bayes": ("distributions", "draws", "single_draw", "thresholded"),
    "held-out": ("model",),
    "risk": ("model", "reference", "examples"),  # of which a record has those that it needs
}
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
PACKED_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "u1",
    "bool": "?",
}
MOST_RECORD, MOST_FILE, MOST_HEADER, MOST_UNPACKED, MOST_GROWTH = 2**22, 2**30, 2**23, 2**27, 10_000
"""Bytes of certificate.json, of a file beside it, of its header, and of what is packed; how many times it may grow."""
MOST_DEPTH = 16
"""Tables and lists of JSON inside one another: less than what any Python can read."""
MOST_COUNT = 10**9
"""The largest number of examples, draws or weights."""
MOST_SUMS = 1_000_000
"""So many sums are tried to find which tensors of a network are no weights."""
MOST_EFFORT = 300_000
"""The number of tests of a risk times the square root of n, to which the time for their bounds is in proportion."""
EVALUATION = {"mode": "eval", "dtype": "float32", "autocast": False, "tf32": False, "augmentation": False}
PARTS, COUNTS, BOTH = ("keep_prob", "mean", "std"), ("wrong", "plus", "minus"), ("posterior", "prior")
PURPOSES = ("posterior draws", "prior draws", "single draw", "unlabelled draws")
# Every bound, with what it spends of delta on Monte Carlo, the reference network and unlabelled inputs.
SHARES = {
    **dict.fromkeys(("seeger", "paper", "catoni", "vote", "q_equals_p"), (0.2, 0.0, 0.0)),
    "excess": (0.2, 0.2, 0.0),
    **dict.fromkeys(("single_draw", "held_out"), (0.0, 0.0, 0.0)),
    "thresholded": (0.2, 0.0, 0.2),  # stated if there are unlabelled inputs
}
FAMILIES = ["seeger", "catoni", "excess"]  # the bounds that can be claimed
# Every risk, with what a sentence calls it and how it names the reference network; others are module:function.
RISKS = {
    "error": ("error rate", ""),
    "drop": ("drop in accuracy", " against the reference network"),
    "disagreement": ("rate of disagreement", " with the reference network"),
    "brier": ("mean Brier loss", ""),
    "cross-entropy": ("mean bounded cross-entropy", ""),
    "token-error": ("token error rate per document", ""),
    "token-loss": ("token log-loss per document (clipped at log 10000, in units of it)", ""),
    "token-drop": ("drop in token accuracy per document", " against the reference network"),
    "token-loss-rise": (
        "rise of the token log-loss per document (clipped at log 10000, in units of it)",
        " against the reference network",
    ),
    "token-disagreement": ("rate of token disagreement per document", " with the reference network"),
}
SIGNED = ("drop", "token-drop", "token-loss-rise")  # the risks whose values lie in [-1, 1]
LEAST_TESTED = 1e-8  # p-values are exact to 1e-12, so that at a smaller delta a false one could pass
RISK_LEVELS = 2**16  # values that are no whole numbers are so many parts of their range
LEVELS = {
    1: "the arithmetic follows from the stated counts",
    2: "the fixed networks err on the data as stated; the rest follows from the stated counts",
    3: "fixed and drawn networks err on the data as stated",
}
"""What a verdict of each level means; the first needs no data and says nothing about the network."""
Array = np.ndarray
Tensors = dict[str, Array]  # bfloat16, which numpy lacks, as uint16
Slab = dict[str, list[Array]]  # keep_prob, mean and std of every tensor, in float64
Rules = Iterator[tuple[str, dict[str, Any], float]]  # what is checked, what the record must state, absolute rounding


@dataclass(frozen=True)
class Report:
    """What a verification found: the rules that hold, the first one that fails, and what is taken on trust.

    Args:
        valid: Whether every rule of this level holds.
        level: 1 for the arithmetic, 2 with fixed networks counted again, 3 with draws made again.
        checks: What was checked.
        failure: The first rule that does not hold, or None.
        trusted: What nobody checked.
        findings: What else was computed on the way, such as the bound by the verifier's own draws.
    """

    valid: bool
    level: int
    checks: tuple[str, ...]
    failure: str | None
    trusted: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """VALID with the level and what it means, or INVALID with the first rule that fails."""
        return f"VALID (level {self.level}: {LEVELS[self.level]})" if self.valid else f"INVALID: {self.failure}"

    def __str__(self) -> str:
        checks, trusted = [f"  checked: {x}" for x in self.checks], [f"  on trust: {x}" for x in self.trusted]
        findings = [f"  found: {x}" for x in self.findings]
        words = self.verdict.split(" ")
        hashes = {x for x in words if re.fullmatch("[0-9a-f]{64}", x)}
        if len({x[:12] for x in hashes}) == len(hashes):  # else what is short would look alike
            words = [f"{x[:12]}..." if x in hashes else x for x in words]
        verdict = " ".join(words)
        lines = [*checks, *findings, *trusted, verdict] if self.valid else [*checks, verdict]
        return "\n".join(printable(line) for line in lines)


class Refused(Exception):
    """A rule that does not hold: the certificate can be read, and is false."""


@dataclass(frozen=True)
class Folder:
    """What a certificate folder holds, once its form is right: record, tensors by file, and SHA-256 of the files."""

    record: dict[str, Any]
    tensors: dict[str, Tensors]
    hashes: dict[str, str]


def verify(folder: str | Path, *, seals: tuple[str, ...] = ()) -> Report:
    """Recomputes all that follows from the files of a certificate folder; ValueError when they cannot be read.

    Args:
        folder: The folder that holds certificate.json, or that whose folder `certificate` does.
        seals: SHA-256 digests that the issuer published beforehand; the certificate must have been made under them.
    """
    try:
        contents = read(folder)
    except Refused as refusal:
        return Report(False, 1, (), str(refusal))
    return check(contents, seals)


def check(contents: Folder, seals: tuple[str, ...] = ()) -> Report:
    """Recomputes all that follows from what was read."""
    checks: list[str] = []
    try:
        with np.errstate(all="ignore"):  # what is infinite or no number is refused by its name
            for rule, expected, slack in _rules(contents, seals):
                _compare(contents.record, expected, slack=slack)
                checks.append(rule)
    except Refused as refusal:
        return Report(False, 1, tuple(checks), str(refusal))
    except ArithmeticError as error:
        return Report(False, 1, tuple(checks), f"a bound cannot be computed ({error})")
    return Report(True, 1, tuple(checks), None, trusted(contents.record, 1))


# --- What is taken on trust.


def assumptions(record: dict[str, Any]) -> list[str]:
    """What no computation can show, in the words that a certificate must have."""
    if record["kind"] == "risk":
        return _risk_assumptions(record)
    split, ledger = record["split"], record["bounds"]["held_out"]["ledger"]
    random = record["kind"] == "pac-bayes"
    counts = f"(grid {ledger['grid']}, certified {ledger['certified']})"
    later = "nothing was trained because of what an earlier try showed"
    declared = "bound family, Monte-Carlo method, most draws and Catoni's constant were declared before they were used"
    if random and record["version"] > 2:
        if record["shares"] is not None:
            certificates = [group["certificates"] for group in record["shares"]["groups"].values()]
            counts += f" times the {sum(certificates)} certificates that share delta"
        later = (
            "no prior was made because of what an earlier try showed; any number of its posteriors may have been tried"
        )
        declared += ", and are the same for all posteriors of this prior"
    lines = [
        "bound examples and new data are independent draws from one distribution, with labels as noisy as these",
        "the split is random, as the issuer declares"
        if split["declared"]
        else "the seed of the split was fixed before anything was known about its parts",
        f"no more was tried on these bound examples than the ledger pays for {counts}, and {later}",
    ]
    subject = "prior" if random else "network"
    if record["declaration"] is None:
        lines.append(
            f"all that shaped the {subject} is in pacprune's notes, and its first weights knew no bound example"
        )
    else:
        lines.append(f'what pacprune could not trace is as the issuer states: "{record["declaration"]}"')
    if random and record["commitment"] is None:
        lines += [
            "the prior was written before the bound examples were used to train Q",
            declared,
            "Q was not changed because of its draws, which follow from Q: nobody sealed it before they were known",
        ]
    if record["commitment"] is not None:
        lines += [
            "the first seal was published before Q was trained, and no second Q was sealed under it",
            f"the beacon is the one that was sealed: {record['commitment']['source']}",
        ]
    return lines


def _risk_assumptions(record: dict[str, Any]) -> list[str]:
    """The same for a certificate of a risk."""
    split, ledger, risk = record["split"], record["bounds"]["held_out"]["ledger"], record["risk"]["name"]
    labels = "" if risk in ("disagreement", "token-disagreement") else ", with labels as noisy as these"
    lines = [f"bound examples and new data are independent draws from one distribution{labels}"]
    if split["sizes"]["prior"] == 0:
        lines.append("no network was trained on a bound example, nor on a changed copy of one")
    elif split["declared"]:
        lines.append("the split is random, as the issuer declares")
    else:
        lines.append("the seed of the split was fixed before anything was known about its parts")
    lines.append(
        f"no more was tried on these bound examples than the ledger pays for (certified {ledger['certified']}), and "
        "nothing was trained because of what an earlier try showed"
    )
    if record["declaration"] is None:
        lines.append(
            "all that shaped the networks is in pacprune's notes, and their first weights knew no bound example"
        )
    else:
        lines.append(f'what pacprune could not trace is as the issuer states: "{record["declaration"]}"')
    if len(record["order"]) > 1:
        lines.append("the candidates and their order were fixed before anything was known about the bound examples")
    if any(test["group"] is not None for test in record["tests"]):
        lines.append("the groups were fixed before anything was known about the bound examples")
    if risk.startswith("token-"):
        lines.append(
            "every bound example is a document or its first tokens, no two are of one document, and new data are "
            "documents that are cut in the same way"
        )
    if ":" in risk:
        lines.append("the loss is the issuer's function of that name, and looks at one example at a time")
    return lines


def trusted(record: dict[str, Any], level: int) -> tuple[str, ...]:
    """What a verification of this level takes on trust."""
    random, lines = record["kind"] == "pac-bayes", []
    if level < 2:
        lines += [
            "the counts: errors of every network, and disagreements",
            "the data: files, parts, indices, duplicates and standardisation",
        ]
    if level == 2 and random:
        lines.append("the draws: their errors and disagreements, which --replay makes again")
    if level == 2 and record["kind"] == "risk" and len(record["tests"]) > 1 and len(record["order"]) > 1:
        lines.append("the counts of the candidates that are not in the folder")
    return (
        *lines,
        "the model: that these tensors are the network in use",
        "the software that is named",
        *record["assumptions"],
    )


# --- The rules.


def _rules(contents: Folder, seals: tuple[str, ...]) -> Rules:
    record = contents.record
    yield f"the form and the SHA-256 of {RECORD}", {"format": FORMAT}, 0.0
    yield f"the SHA-256 of {', '.join(contents.hashes)}", {"files": contents.hashes}, 0.0
    n, size = record["n"], record["split"]["sizes"]["bound"]
    _require(n == size, f"n is {n}, but the split has {size} bound examples")
    repeats = record["split"]["repeats"]
    _require(
        repeats * 100 <= n or record["declaration"] is not None,
        f"{repeats} of the {n} bound examples repeat others, which needs a declaration of the issuer",
    )
    # A prior on no data has seen none: its first weights are on trust, like those of a network that was trained on.
    unseen = record["kind"] == "pac-bayes" and record["split"]["sizes"]["prior"] == 0
    _require(
        record["declaration"] is not None or unseen or record["examples_seen"] > 0,
        "pacprune has not seen what shaped the network, which needs a declaration of the issuer",
    )
    _require(
        record["declaration"] is not None or not unseen or record["examples_seen"] == 0,
        "the prior has seen examples, but the split has none for it, which needs a declaration of the issuer",
    )
    yield f"n = {n:,} is the size of the bound set; evaluation", {"evaluation": EVALUATION}, 0.0
    _require("held_out" in record["bounds"], "bounds are given without held_out, whose ledger the others follow")
    _require(
        record["assumptions"] == assumptions(record), "assumptions are not in the words that this certificate must have"
    )
    yield from _commitment(record, seals)
    tensors = [contents.tensors[name] for name in files_of(record)]
    if record["kind"] == "risk":
        yield from _risk(record, n, contents.tensors)
    else:
        yield from (_held_out if record["kind"] == "held-out" else _pac_bayes)(record, n, *tensors)


def _commitment(record: dict[str, Any], seals: tuple[str, ...]) -> Rules:
    """Both seals follow from what they seal, the plan is what was done, and the seals are those that were published."""
    commitment, stated = record["commitment"], []
    if commitment is not None:
        plan, hashes, monte_carlo = commitment["plan"], record["hashes"], record["monte_carlo"]
        split = {key: record["split"][key] for key in ("parts", "indices")}
        sealed = {"prior": hashes["prior"], "split": split, "plan": plan, "source": commitment["source"]}
        first = digest(sealed)
        second = digest({"commitment": first, "posterior": hashes["posterior"]})
        stated = [first, second]
        yield "the seals of the commitment", {"commitment": {"digest": first, "seal": second}}, 0.0
        ledger = record["bounds"]["held_out"]["ledger"]
        plan_as_done = {
            "family": record["claim"]["family"],
            "catoni_c": record["catoni_c"],
            **{key: monte_carlo[key] for key in ("method", "tolerance")},
            **{key: ledger[key] for key in ("delta", "grid", "certified")},
        }
        if record["version"] > 2:
            sealed_shares, shares = (json.dumps(where["shares"]) for where in (plan, record))
            _require(sealed_shares == shares, "the commitment's plan has other shares of delta than the certificate")
        for key, value in plan_as_done.items():
            _require(plan[key] == value, f"the commitment's plan has {key} {plan[key]}, but {value} was done")
        for made in (monte_carlo[whose]["draws"] for whose in BOTH):
            # Chernoff's bound holds for a number of draws that was fixed beforehand, betting at every time.
            as_planned = made == plan["draws"] or (made < plan["draws"] and plan["method"] == "betting")
            _require(as_planned, f"the commitment's plan has {plan['draws']} draws, but {made} were made")
        yield "the plan of the commitment is what was done", {}, 0.0
    for seal in seals:
        _require(seal in stated, f"the certificate was not made under the published seal {seal}")
        yield f"the published seal {seal[:12]}", {}, 0.0


def _bound_examples(n: int) -> str:
    return f"{n:,} bound example{'s' * (n != 1)}"


def _held_out(record: dict[str, Any], n: int, model: Tensors) -> Rules:
    sparsity, taken = _sparsity(record, model)
    expected = {"hashes": {"model": tensor_hash(model, "")}, "sparsity": sparsity}
    yield f"hash and zeros of the network{taken}", expected, 1e-12
    ledgers, shares = _ledgers(record, ["held_out"])
    bound = clopper_pearson(_count(record, "reference", "errors", most=n), n, sum(shares["held_out"]))
    subject = f"the {_bound_examples(n)}, the error rate on new data of this network (sparsity"
    yield from _claim(record, ledgers, {"held_out": bound}, ["held_out"], subject)


def _sparsity(record: dict[str, Any], model: Tensors) -> tuple[float, str]:
    """The share of zeros of a network, and what has to be taken on the issuer's word for it.

    Buffers of two or more dimensions are no weights, and the file does not tell which they are. But they are whole
    tensors, with all of their zeros.
    """
    total, sparsity = record["total"], record["sparsity"]
    weights = [_values(w) for w in model.values() if w.ndim >= 2 and _values(w).dtype.kind == "f"]
    size, zeros = sum(w.size for w in weights), sum(int((w == 0).sum()) for w in weights)
    _require(total <= size, f"total is {total}, but the file holds {size} numbers in two or more dimensions")
    if total == size:
        return zeros / total, ""
    pruned, tensors = round(sparsity * total), sorted((w.size, int((w == 0).sum())) for w in weights)
    left_out = {(0, 0)}
    for count, none in tensors:
        if len(left_out) * len(tensors) > MOST_SUMS:
            break  # of so many tensors almost any choice can be made
        left_out |= {(a + count, b + none) for a, b in left_out if a + count <= size - total and b + none <= zeros}
    possible = len(left_out) * len(tensors) > MOST_SUMS or (size - total, zeros - pruned) in left_out
    _require(possible, f"no choice of the network's tensors holds {total} numbers, {pruned} of which are zero")
    taken = f" (that {size - total} of {size} numbers in two or more dimensions are buffers is the issuer's word)"
    return min(max(zeros + total - size, pruned), zeros) / total, taken


def _risk(record: dict[str, Any], n: int, tensors: dict[str, Tensors]) -> Rules:
    """A risk of one network, of its groups, of several networks at once, or of those that passed in a sequence."""
    names = [name for name in ("model", "reference") if name in tensors]
    hashes = {name: tensor_hash(tensors[name], "") for name in names}
    _require(set(record["hashes"]) == set(hashes), f"hashes are of {list(record['hashes'])}, but must be of {names}")
    sparsity, taken = _sparsity(record, tensors["model"])
    expected = {"hashes": hashes, "sparsity": sparsity}
    yield f"hashes of {' and '.join(names)}, and zeros of the network{taken}", expected, 1e-12
    ledgers, shares = _ledgers(record, ["held_out"])
    _require(ledgers["held_out"]["grid"] == 1, "the ledger has a grid of priors, but there is no prior")
    delta, tests, sequence = sum(shares["held_out"]), record["tests"], record["rule"] == "sequence"
    exact = not sequence or delta >= LEAST_TESTED
    _require(exact, f"tests are made at {delta}, but p-values are exact to 1e-12 alone: at least {LEAST_TESTED}")
    place = _risk_order(record, hashes["model"])
    rows = _risk_rows(record, n, tensors.get("examples", {}))
    for number, (test, row) in enumerate(zip(tests, rows, strict=True)):
        if sequence:
            _require(test["p_value"] is not None, f"tests[{number}].p_value is missing")
            p_value, passed = row.p_value(record["limit"]), test["p_value"] <= delta
            bound = None if passed else row.bound(delta)
            # The issuer rounds up by what the rounding of n logarithms can be.
            _compare(test["p_value"], p_value, f"tests[{number}].p_value", slack=1e-12 + 3e-13 * n * p_value)
        else:
            passed, bound = None, row.bound(delta / len(tests))
            _require(test["p_value"] is None, f"tests[{number}].p_value is stated without a limit")
        for key, value in {"passed": passed, "mean": row.mean, "bound": bound}.items():
            _compare(test[key], value, f"tests[{number}].{key}", slack=1e-12)
    yield f"{len(tests)} tests: counts, means, bounds and p-values", {}, 0.0
    own = [test["bound"] for test in tests if test["network"] == hashes["model"]]
    bound = float(record["limit"] if sequence else max(own))
    masks = [mask for name, mask in tensors.get("examples", {}).items() if name.startswith("group/")]
    outside = n - int(np.logical_or.reduce(masks).sum()) if masks else 0
    yield from _risk_claim(record, ledgers["held_out"], bound, place, outside)


def _risk_order(record: dict[str, Any], model: str) -> int:
    """The place of the certified network in the declared order, once the tests were made in that order."""
    order, tests, rule = record["order"], record["tests"], record["rule"]
    _require(rule in ("all", "sequence"), f"rule is {rule!r}, but must be 'all' or 'sequence'")
    _require(len(order) > 0 < len(tests), "there is no candidate, or no test of one")
    effort = len(tests) * math.sqrt(record["n"])
    _require(effort <= MOST_EFFORT, f"{len(tests)} tests on {record['n']} examples are more than anyone recomputes")
    _require(
        (record["limit"] is not None) == (rule == "sequence"), "a limit belongs to a sequence, and to nothing else"
    )
    made, groups = [test["network"] for test in tests], [test["group"] for test in tests]
    sparsities = [test["sparsity"] for test in tests]
    if len(order) == 1 and rule == "all":
        _require(set(made) == set(order), "a test is of a network that is not among the candidates")
        named = [group for group in groups if group is not None]
        _require(len(set(groups)) == len(groups) and len(named) in (0, len(tests)), "the groups are not told apart")
        place = 0
    else:
        _require(made == order[: len(made)], "the tests are not those of the candidates in their declared order")
        _require(groups == [None] * len(tests), "several candidates are certified on all bound examples alone")
        _require(sparsities == sorted(sparsities), "the candidates are not in the order of their sparsity")
        place = len(made) - 1
    if rule == "sequence":
        passed = [test["passed"] for test in tests]
        place = sum(flag is True for flag in passed) - 1
        stopped = passed == [True] * (place + 1) + [False] or (all(passed) and len(tests) == len(order))
        _require(place >= 0 and stopped, f"the tests have passed: {passed}; they end with the first that does not pass")
    else:
        _require(len(order) in (1, len(tests)), f"there are {len(order)} candidates, but {len(tests)} tests")
    _require(order[place] == model, "the network in the folder is not the certified candidate")
    of_model = {test["sparsity"] for test in tests if test["network"] == model}
    _require(of_model == {record["sparsity"]}, f"the network has sparsity {record['sparsity']}, its tests {of_model}")
    return place


@dataclass(frozen=True)
class _Tally:
    """What was counted in one test: how often a value was 1 and -1, or levels; and the least value there can be."""

    n: int
    lowest: int
    plus: int
    minus: int
    levels: Array | None

    @property
    def mean(self) -> float:
        if self.levels is None:
            return (self.plus - self.minus) / self.n
        return self.lowest + (1 - self.lowest) * float(self.levels.mean())

    def bound(self, delta: float) -> float:
        """Clopper-Pearson; for differences from above and from below, at delta/2 each; betting for levels."""
        if self.levels is not None:
            return self.lowest + (1 - self.lowest) * betting(self.levels, delta)
        if not self.lowest:
            return clopper_pearson(self.plus, self.n, delta)
        below = 1 - clopper_pearson(self.n - self.minus, self.n, delta / 2)
        return min(1.0, clopper_pearson(self.plus, self.n, delta / 2) - below)

    def p_value(self, limit: float) -> float:
        """Of "the risk is above the limit"."""
        if limit <= self.mean:
            return 1.0
        if self.levels is not None:
            return betting_p_value(self.levels, (limit - self.lowest) / (1 - self.lowest))
        if not self.lowest:
            return binomial_tail(self.plus, self.n)(limit)
        few, many = binomial_tail(self.plus, self.n), binomial_tail(self.n - self.minus, self.n)
        if not self.minus:
            return min(1.0, 2 * few(limit))

        def tails(u: float) -> tuple[float, float]:
            return few(u), many(1 - max(0.0, u - limit))

        high = min(1.0, self.minus / self.n + limit)
        return min(1.0, 2 * max(tails(_bisect(self.plus / self.n, high, lambda u: tails(u)[0] <= tails(u)[1]))))


def _risk_rows(record: dict[str, Any], n: int, examples: Tensors) -> list[_Tally]:
    """What every test has counted, once its counts, levels and groups fit."""
    lowest = -1 if record["risk"]["name"] in SIGNED else 0
    limit = record["limit"]
    _require(limit is None or lowest < limit < 1, f"limit is {limit}, but must lie between {lowest} and 1")
    rows = []
    for i, test in enumerate(record["tests"]):
        size, counts = n, test["counts"]
        mask = slice(None)
        if test["group"] is not None:
            mask = _take(examples, f"group/{i}", (n,), kind="b").astype(bool)
            size = int(mask.sum())
        _require(test["n"] == size > 0, f"tests[{i}].n is {test['n']}, but {size} examples are in it")
        _require((counts is not None) == record["risk"]["whole"], f"tests[{i}] has counts where it has levels, or none")
        if counts is not None:
            plus, minus = counts["plus"], counts["minus"]
            fits = plus + minus <= size and (lowest < 0 or minus == 0)
            _require(fits, f"tests[{i}].counts are {plus} and {minus}, which do not fit {size} examples")
            rows.append(_Tally(size, lowest, plus, minus, None))
            continue
        levels = _take(examples, f"levels/{record['order'].index(test['network'])}", (n,), kind="i")
        _require(((levels >= 0) & (levels <= RISK_LEVELS)).all(), f"levels do not lie in [0, {RISK_LEVELS}]")
        rows.append(_Tally(size, lowest, 0, 0, levels[mask] / RISK_LEVELS))
    return rows


def _risk_words(risk: str) -> tuple[str, str]:
    """What a sentence calls a risk, and how it names the reference network."""
    if ":" in risk:
        # A name with spaces could go on as a sentence of its own.
        _require(" " not in risk, f"the loss {risk!r} has a space in its name, which no function has")
        return f"mean of the loss {risk}", ""
    top = re.fullmatch("top([1-9][0-9]{0,3})", risk)
    _require(top or risk in RISKS, f"the risk {risk!r} is unknown")
    return (f"top-{top[1]} error rate", "") if top else RISKS[risk]


def _risk_claim(record: dict[str, Any], ledger: dict[str, Any], bound: float, place: int, outside: int) -> Rules:
    """The claim and its sentence; so many examples are in no group."""
    phrase, against = _risk_words(record["risk"]["name"])
    needs = "reference" if against else None
    _require(("reference" in record["hashes"]) == bool(needs), "a reference is given, or missing, against the risk")
    yield "the bound and its ledger", {"bounds": {"held_out": {"ledger": ledger, "bound": bound}}}, 1e-12
    stated, tests, count = record["bounds"]["held_out"]["bound"], record["tests"], len(record["order"])
    upper = f"{math.ceil(stated * 1e4 - 1e-9) / 1e4:.4f}"
    network = f"this network (sparsity {math.floor(record['sparsity'] * 1e4 + 1e-2) / 1e4:.4f})"
    if record["rule"] == "sequence":
        claim = (
            f"each of the first {place + 1} of {count} candidates, in the declared order,{against} is at most {upper}"
        )
        claim += f"; the last of these is {network}"
    elif count > 1:
        claim = (
            f"each of the {count} candidates{against} is at most its bound in the list; for {network} that is {upper}"
        )
    elif tests[0]["group"] is not None:
        worst = max(tests, key=lambda test: test["bound"])["group"]
        left_out = f", which leave out {_bound_examples(outside)}" if outside else ""
        # In quotation marks, which no name has: otherwise it could go on as a sentence of its own.
        claim = f"{network}{against} is at most {upper} in each of the {len(tests)} groups{left_out}"
        claim += f'; the largest bound is that of "{worst}"'
    else:
        claim = f"{network}{against} is at most {upper}"
    delta = ledger["delta"]
    sure = f"{(100 - 100 * Decimal(f'{delta:.12g}')).normalize():f}"
    statement = (
        f"With probability at least {sure} % over the draw of the {_bound_examples(record['n'])}, the {phrase} on "
    )
    statement += f"new data of {claim}."
    statement += _beside_the_claim(record)
    claimed = {"family": "held_out", "bound": stated}
    yield f"the claim, at most {upper}, and its sentence", {"claim": claimed, "statement": statement}, 0.0


def _beside_the_claim(record: dict[str, Any]) -> str:
    """What the sentence says after the claim: copies that are more than 1 % of the examples, and the issuer's word."""
    repeats, n, declaration = record["split"]["repeats"], record["n"], record["declaration"]
    copies = f" {repeats} of the {n} bound examples are copies of others." if repeats * 100 > n else ""
    return copies if declaration is None else f'{copies} The issuer states: "{declaration}".'


def _pac_bayes(record: dict[str, Any], n: int, tensors: Tensors, draws: Tensors, *nets: Tensors) -> Rules:
    hashes = {w: tensor_hash(tensors, *(f"{w}/{part}/" for part in PARTS), "rest/") for w in BOTH}
    hashes["rest"] = tensor_hash(tensors, "rest/")
    yield "the hashes of P, of Q and of what they share", {"hashes": hashes}, 0.0
    yield "the seeds", _seeds(record, hashes), 0.0
    names = record["kl_per_tensor"]
    for rest in (tensor_hash({f"rest/{key}": net[key] for key in net if key not in names}, "rest/") for net in nets):
        _require(rest == hashes["rest"], f"a network is saved with the frozen tensors {rest} and not {hashes['rest']}")
    q, p = ({name: _slab(tensors, whose, name) for name in names} for whose in BOTH)
    total, size = record["total"], sum(lam.size for lam, _, _ in q.values())
    limit = size + sum(t.size for key, t in tensors.items() if key.startswith("rest/") and t.ndim >= 2)
    _require(0 < size <= total <= limit, f"total is {total}, but the tensors hold {size} to {limit} weights")
    rounding = 1e-12 + 1e-15 * size
    sparsity = sum(float((1 - lam).sum()) for lam, _, _ in q.values()) / total
    kl = sum((terms := {name: divergence(name, *q[name], *p[name]) for name in q}).values())
    expected = {"sparsity": sparsity, "kl_per_tensor": terms, "kl": kl}
    yield f"sparsity and KL, {kl:.6g} nats, in float64", expected, rounding
    ratio, zeros = _single_draw(p, q, draws, nets[0])
    expected = {"single_draw": {"log_ratio": ratio, "sparsity": zeros / total}}
    yield "the single network and log dQ/dP", expected, rounding
    zeros = _thresholded(q, nets[1], size - total + round((1 - record["sparsity"]) * total))
    inputs = record["split"]["sizes"]["unlabelled"]
    yield "the thresholded network", {"thresholded": {"sparsity": zeros / total, "inputs": inputs}}, 1e-12
    yield from _bounds(record, n, draws, kl, ratio)


def _seeds(record: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
    """The seeds of all draws: of the hashes of P and Q, or of the second seal and the beacon that came after it."""
    sealed = record["commitment"]
    base = f"{hashes['prior']}/{hashes['posterior']}" if sealed is None else f"{sealed['seal']}/{sealed['beacon']}"
    hexes = (hashlib.sha256(f"{base}/{purpose}".encode()).hexdigest() for purpose in PURPOSES)
    of_q, of_p, of_h, of_f = ({"seed": int(digits[:16], 16) >> 1} for digits in hexes)
    return {"monte_carlo": {"posterior": of_q, "prior": of_p}, "single_draw": of_h, "thresholded": of_f}


def _bounds(record: dict[str, Any], n: int, draws: Tensors, kl: float, ratio: float) -> Rules:
    """The Monte-Carlo step, and every bound with its ledger."""
    inputs, batch = record["split"]["sizes"]["unlabelled"], record["monte_carlo"]["batch"]
    stated = {"thresholded": inputs > 0, "single_draw": record["single_draw"]["fresh"]}
    ledgers, shares = _ledgers(record, [name for name in SHARES if stated.get(name, True)])
    errors, single, _ = (_count(record, w, "errors", most=n) for w in ("reference", "single_draw", "thresholded"))
    method, delta = record["monte_carlo"]["method"], shares["seeger"][1]
    _require(batch == min(25, n), f"monte_carlo.batch is {batch}, but must be {min(25, n)}: the smaller of 25 and n")
    drawn = {w: _monte_carlo(draws, w, batch, errors / n, delta, method) for w in BOTH}
    yield "Monte Carlo: draws, mean risk, betting and Chernoff bounds, of Q and of P", {"monte_carlo": drawn}, 1e-12
    risk, count = drawn["posterior"]["risk_upper"], drawn["posterior"]["draws"]
    pac, c = shares["seeger"][0], record["catoni_c"]
    _require(c is None or 1e-3 <= c <= 100, f"catoni_c is {c}, but must be null or lie in [0.001, 100]")
    values = gibbs(risk, n, kl, pac, c) | {
        "q_equals_p": kl_inverse(drawn["prior"]["risk_upper"], complexity(n, 0.0, pac)),
        "held_out": clopper_pearson(errors, n, sum(shares["held_out"])),
    }
    if stated["single_draw"]:
        values["single_draw"] = kl_inverse(single / n, max(0.0, complexity(n, ratio, sum(shares["single_draw"]))))
    pac, mc, ref, _ = shares["excess"]
    plus, minus = draws["posterior/plus"] / batch, 1 - draws["posterior/minus"] / batch
    gained, lost = (kl_inverse(betting(x, mc / 2), complexity(n, kl, pac / 2)) for x in (plus, minus))
    values["excess"] = min(1.0, max(0.0, clopper_pearson(errors, n, ref) + gained - (1 - lost)))
    disagreements = _count(record, "thresholded", "disagreements", most=inputs)
    if inputs:
        pac, _, _, agree = shares["thresholded"]
        transfer = clopper_pearson(disagreements, inputs, agree)
        values["thresholded"] = min(1.0, kl_inverse(risk, complexity(n, kl, pac)) + transfer)
    subject = f"the {_bound_examples(n)} and of the {count:,} sampled networks, the error rate on new data of a network"
    subject += " drawn from Q (expected sparsity"
    yield from _claim(record, ledgers, values, FAMILIES, subject)


def _claim(record: Any, ledgers: dict[str, Any], values: dict[str, float], families: list[str], subject: str) -> Rules:
    entries = {x: {"ledger": ledgers[x], "bound": values[x]} for x in values if x in record["bounds"]}
    yield "all bounds and their ledgers", {"bounds": entries}, 1e-12
    family, known = record["claim"]["family"], [x for x in families if x in entries]
    _require(family in known, f"claim.family is {family!r}, but must be one of {known}")
    bound, delta = record["bounds"][family]["bound"], ledgers[family]["delta"]
    upper = math.ceil(bound * 1e4 - 1e-9) / 1e4  # a certificate must not be rounded in its own favour
    subject += f" {math.floor(record['sparsity'] * 1e4 + 1e-2) / 1e4:.4f})"
    sure = f"{(100 - 100 * Decimal(f'{delta:.12g}')).normalize():f}"
    statement = f"With probability at least {sure} % over the draw of {subject} is at most {upper:.4f}."
    if record["commitment"] is not None:
        statement += f" The draws follow from the commitment {record['commitment']['digest'][:12]} and a later beacon."
    statement += _beside_the_claim(record)
    yield f"the claim, at most {upper:.4f}, and its sentence", {"claim": {"bound": bound}, "statement": statement}, 0.0


def _ledgers(record: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """How each bound spends delta, in fixed fractions, and its shares as they are used, divided by the choices made.

    A PAC-Bayes bound holds for all posteriors of its prior at once, and the reference network follows from the prior:
    what they spend is divided by `grid` alone. Draws, inputs, and networks of a certificate's own pay for `certified`.
    """
    held_out = record["bounds"]["held_out"]["ledger"]
    delta, choices = held_out["delta"], {key: held_out[key] for key in ("grid", "certified")}
    possible = 1e-12 <= delta < 1 <= min(choices.values())
    _require(possible, f"the ledgers have the impossible delta {delta} or {choices}")
    per_prior = per_certificate = 1 / math.prod(choices.values())
    if record["version"] > 2:
        choices["share"] = _declared_share(record)
        per_prior, per_certificate = choices["share"] / choices["grid"], choices["share"] * per_certificate
    # A certificate may state fewer bounds than this verifier knows, such as one that is older than a bound.
    strangers = [name for name in record["bounds"] if name not in names]
    _require(not strangers, f"bounds are given for {strangers}, which are not among {tuple(names)}")
    ledgers, shares = {}, {}
    for name in names:
        a, b, c, d = spent = [delta * part for part in (1 - sum(SHARES[name]), *SHARES[name])]
        ledgers[name] = {"delta": delta, "pac_bayes": a, "monte_carlo": b, "reference": c, "unlabelled": d, **choices}
        alone = name == "single_draw" or record["kind"] != "pac-bayes"  # the bound is about a network of its own
        factors = (per_certificate if alone else per_prior, per_certificate, per_prior, per_certificate)
        shares[name] = [share * factor for share, factor in zip(spent, factors, strict=True)]
    return ledgers, shares


def _declared_share(record: dict[str, Any]) -> float:
    """What the declared plan gives this certificate of delta, once the shares of the whole plan are possible."""
    shares = record.get("shares")
    if shares is None:
        return 1.0
    group, groups = shares["group"], shares["groups"]
    _require(group in groups, f"shares.group is {group!r}, but must be one of {list(groups)}")
    total = math.fsum(entry["share"] for entry in groups.values())
    _require(total <= 1 + 1e-12, f"the declared shares of delta add up to {total}, but must be 1 or less")
    for name, entry in groups.items():
        possible = entry["certificates"] > 0 and entry["share"] / entry["certificates"] >= 1e-12
        _require(possible, f"the group {name!r} has the impossible share {entry['share']} of {entry['certificates']}")
    return groups[group]["share"] / groups[group]["certificates"]


def _monte_carlo(draws: Tensors, whose: str, batch: int, reference: float, delta: float, method: str) -> dict[str, Any]:
    """What follows from the counts per draw: the mean risk, its betting bound with the control variate, Chernoff's."""
    wrong, plus, minus = (_take(draws, f"{whose}/{x}", (draws[f"{whose}/wrong"].size,), kind="i") for x in COUNTS)
    fits = (plus >= 0) & (plus <= wrong) & (wrong <= batch) & (minus >= 0) & (minus <= batch - wrong)
    _require(batch > 0 and wrong.size > 0 and fits.all(), f"{whose} draws: counts do not fit batches of {batch}")
    on_batches, examples = float((wrong - plus + minus).mean()) / batch, wrong.size * batch
    # The batches are independent draws of bound examples: by Chernoff, this fails with probability 2 exp(-30).
    plausible = examples * kl_bernoulli(on_batches, reference) <= 30
    _require(plausible, f"the reference errs at {reference}, but on the batches of the {whose} draws at {on_batches}")
    risk, excess = float(wrong.sum()) / examples, 2 * betting((1 + (plus - minus) / batch) / 2, delta) - 1
    chernoff = kl_inverse(risk, -math.log(delta) / wrong.size)
    upper = {"betting": min(1.0, max(0.0, reference + excess)), "chernoff": chernoff}.get(method, math.nan)
    return {"draws": wrong.size, "risk": risk, "risk_upper": upper, "chernoff": chernoff}


def _slab(tensors: Tensors, whose: str, name: str) -> list[Array]:
    """keep_prob, mean and std (a tensor or one number), once keep_prob is a multiple of 2^-32 with |logit| <= 14."""
    shape, edge = tensors[f"posterior/mean/{name}"].shape, 1 / (1 + math.exp(14.01))
    _require(len(shape) >= 2 and all(shape), f"{name} has the shape {shape}, but weights have two or more dimensions")
    lam, mean = (_take(tensors, f"{whose}/{part}/{name}", shape) for part in ("keep_prob", "mean"))
    bad = lam[(lam < edge) | (lam > 1 - edge) | (lam * 2.0**32 % 1 != 0)][:1]
    _require(not bad.size, f"keep_prob of {name} is {bad}, not a multiple of 2^-32 in [{edge:.3g}, 1 - {edge:.3g}]")
    return [lam, mean, _take(tensors, f"{whose}/std/{name}", shape, ())]


def _single_draw(p: Slab, q: Slab, draws: Tensors, drawn: Tensors) -> tuple[float, int]:
    """log dQ/dP(h) and the number of zeros of h, once its weights fit its mask and Q: its normals end at 6.7 std."""
    ratio, zeros = 0.0, 0
    for name, (lam, m, s) in q.items():
        (lam0, m0, s0), w = p[name], _take(drawn, name, m.shape)
        bits = np.unpackbits(_take(draws, f"single_draw/{name}", ((w.size + 7) // 8,), kind="u").astype(np.uint8)) == 1
        keep, near = bits[: w.size].reshape(w.shape), (w != 0) & (np.abs(w - m) <= 7 * s + np.abs(w) / 128)
        fits = not bits[w.size :].any() and not w[~keep].any() and (near if s.any() else w == m)[keep].all()
        _require(fits, f"single draw: the weights of {name} do not fit its mask and Q")
        terms = np.log(np.where(keep, lam / lam0, (1 - lam) / (1 - lam0)))
        if s.any():
            step = 2.0**-7 if drawn[name].dtype.kind == "u" else np.finfo(drawn[name].dtype).eps
            fits = min(s.min(), s0.min()) >= 8 * step * np.abs(w).max()
            _require(fits, f"single draw: the std of {name} is lost in the rounding of its weights")
            terms = terms + keep * ((((w - m0) / s0) ** 2 - ((w - m) / s) ** 2) / 2 - np.log(s / s0))
        ratio, zeros = ratio + float(terms.sum()), zeros + int((w == 0).sum())
    return ratio, zeros


def _thresholded(q: Slab, fixed: Tensors, k: int) -> int:
    """The number of zeros, once the weights are the means of Q at its k largest keep_prob, ties by |mean|, else 0."""
    lam, mean = (np.concatenate([slab[part].ravel() for slab in q.values()]) for part in (0, 1))
    w = np.concatenate([_take(fixed, name, slab[1].shape).ravel() for name, slab in q.items()])
    order = np.lexsort((np.abs(mean), lam))
    # Which of full equals are kept goes by their place in the model, which no file tells: their values are compared.
    top, kept = order[max(0, w.size - k) :], order[w[order] != 0]
    top = top[mean[top] != 0]
    equal = len(top) == len(kept) and all((x[top] == x[kept]).all() for x in (lam, np.abs(mean)))
    _require(equal and (w == mean)[kept].all(), f"thresholded: not the means at the {k} largest keep_prob of Q")
    return int((w == 0).sum())


def divergence(name: str, lam: Array, m: Array, s: Array, lam0: Array, m0: Array, s0: Array) -> float:
    """KL(Q||P) of one tensor: sum of kl(lam||lam0) + lam/2 [(m-m0)^2/s0^2 + s^2/s0^2 - 1 - ln(s^2/s0^2)]."""
    gates = lam * np.log(lam / lam0) + (1 - lam) * np.log((1 - lam) / (1 - lam0))
    if not s.any() and not s0.any() and (m == m0).all():
        return float(gates.sum())
    _require((s > 0).all() and (s0 > 0).all(), f"std of {name} must be positive, or 0 everywhere with equal means")
    return float((gates + lam / 2 * (((m - m0) / s0) ** 2 + (s / s0) ** 2 - 1 - 2 * np.log(s / s0))).sum())


def _bisect(low: float, high: float, above: Callable[[float], bool]) -> float:
    """The upper end of a bracket, relatively 1e-15 wide, of the point from which on `above` is true."""
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


def kl_bernoulli(q: float, p: float) -> float:
    """q ln(q/p) + (1-q) ln((1-q)/(1-p))."""
    return sum(a * (math.log(a / b) if b else math.inf) for a, b in ((q, p), (1 - q, 1 - p)) if a)


def kl_inverse(q: float, c: float) -> float:
    """The largest p with kl(q||p) <= c; the smallest one is 1 - kl_inverse(1 - q, c)."""
    return _bisect(q, 1.0, lambda p: kl_bernoulli(q, p) >= c) if c > 0 else q


def complexity(n: int, kl: float, delta: float) -> float:
    """(KL + ln(xi(n)/delta)) / n, xi(n) = sum_k binom(n,k) (k/n)^k (1-k/n)^(n-k): exact, or by Ramanujan's series."""
    r = math.sqrt(math.pi / (2 * n))
    xi = n * r + 2 / 3 + r / 12 - 4 / (135 * n) + r / (288 * n) + 8 / (2835 * n**2) - 139 * r / (51840 * n**2)
    if n <= 200:
        xi = sum(math.comb(n, k) * k**k * (n - k) ** (n - k) for k in range(n + 1)) / n**n
    return (kl + math.log(xi) - math.log(delta)) / n


def gibbs(risk: float, n: int, kl: float, delta: float, c: float | None = None) -> dict[str, float]:
    """Bounds on the Gibbs risk: Seeger and Maurer's, the paper's, Catoni's at one c or over 20, and the vote's."""
    constants = 0.02 * 400.0 ** (np.arange(20) / 19) if c is None else np.array([c])
    catoni = np.expm1(-constants * risk - (kl + math.log(constants.size) - math.log(delta)) / n) / np.expm1(-constants)
    e = (kl + math.log(2 * math.sqrt(n)) - math.log(delta)) / n
    paper = risk + min(e + math.sqrt(e * (e + 2 * risk)), math.sqrt(e / 2))
    seeger = kl_inverse(risk, complexity(n, kl, delta))
    values = {"seeger": seeger, "paper": paper, "catoni": float(catoni.min()), "vote": 2 * seeger}
    return {name: min(1.0, bound) for name, bound in values.items()}


def _stirling(n: int) -> float:
    """ln n! - (n + 1/2) ln n + n - ln(2 pi)/2."""
    if n < 16:
        return math.log(math.factorial(n)) - (n + 0.5) * math.log(n) + n - math.log(2 * math.pi) / 2
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - n**-2 / 1188) * n**-2) * n**-2) * n**-2) / n


def _log_binomial(k: int, n: int, p: float) -> float:
    """ln Pr[Binomial(n, p) = k] for k < n, as a sum of small numbers: those of size n ln n would cancel (Loader)."""
    if k == 0:
        return n * math.log1p(-p)
    apart = k * math.log(k / n / p) + (n - k) * math.log((n - k) / n / (1 - p))
    return _stirling(n) - _stirling(k) - _stirling(n - k) - apart - math.log(2 * math.pi * k * (n - k) / n) / 2


def _log_tail(errors: int, n: int) -> Callable[[float], float]:
    """ln Pr[Binomial(n, p) <= errors] as a function of p above errors/n - 10/sqrt(n), for errors < n."""
    j = np.arange(errors, max(0, errors - 20 * math.sqrt(n)), -1.0)  # terms further away are nothing in float64
    steps, change = np.arange(len(j) + 1), np.append(0, np.cumsum(np.log(j / (n - j + 1))))

    def log_tail(p: float) -> float:
        terms = change + steps * math.log((1 - p) / p)  # relative to the term of `errors`
        return _log_binomial(errors, n, p) + terms.max() + math.log(np.exp(terms - terms.max()).sum())

    return log_tail


def clopper_pearson(errors: int, n: int, delta: float) -> float:
    """The largest p with Pr[Binomial(n, p) <= errors] >= delta."""
    if errors == n:
        return 1.0
    log_tail, goal = _log_tail(errors, n), math.log(delta)
    return _bisect(max(0.0, errors / n - 10 / math.sqrt(n)), 1.0, lambda p: log_tail(p) <= goal)


def binomial_tail(errors: int, n: int) -> Callable[[float], float]:
    """Pr[Binomial(n, p) <= errors] as a function of p above errors/n - 10/sqrt(n)."""
    if errors == n:
        return lambda p: 1.0
    log_tail = _log_tail(errors, n)
    return lambda p: min(1.0, math.exp(log_tail(p))) if 0 < p < 1 else float(p <= 0)


def betting(values: Array, delta: float) -> float:
    """The smallest mu with mean_j prod_t (1 + f_j (mu - X_t)/(1 - mu)) >= 1/delta, over 20 fixed bets f_j."""
    log_wealth, goal = _log_wealth(values), -math.log(delta)
    return _bisect(float(values.min()), 1.0, lambda mu: log_wealth(mu) >= goal)


def betting_p_value(values: Array, limit: float) -> float:
    """Of "the mean is above the limit": 1 / wealth(limit), at most 1."""
    return math.exp(-max(0.0, _log_wealth(values)(limit)))


def _log_wealth(values: Array) -> Callable[[float], float]:
    """ln mean_j prod_t (1 + f_j (mu - X_t)/(1 - mu)) as a function of mu."""
    x, times = np.unique(values, return_counts=True)
    f = 0.95 * 950.0 ** (np.arange(20) / 19 - 1)[:, None]
    return lambda m: np.logaddexp.reduce(np.log1p(f * ((m - x) / (1 - m))) @ times) - math.log(20)


# --- Reading. Nothing is believed: form and size are checked before memory is asked for.

_NAMES = {"*": "name"}
_LEDGER = {
    **dict.fromkeys(("delta", "pac_bayes", "monte_carlo", "reference", "unlabelled"), "fraction"),
    **dict.fromkeys(("grid", "certified"), "count"),
    "share": "fraction",
}
_SHARES = {"group": "name", "groups": {"*": {"certificates": "count", "share": "fraction"}}}
_DRAWS = {"draws": "count", "risk": "fraction", "risk_upper": "fraction", "chernoff": "fraction", "seed": "seed"}
_PLAN = {
    **{key: _LEDGER[key] for key in ("delta", "grid", "certified")},
    "shares": (None, _SHARES),
    "family": "name",
    "method": "name",
    "tolerance": "number",
    "draws": "count",
    "catoni_c": (None, "number"),
}
_COMMON = {
    "format": "name",
    "version": "count",
    "kind": "name",
    "model": (None, "name"),
    "n": "count",
    "sparsity": "fraction",
    "total": "count",
    "reference": {"errors": "count"},
    "examples_seen": "count",
    "bounds": {"*": {"bound": "fraction", "ledger": _LEDGER}},
    "claim": {"family": "name", "bound": "fraction"},
    "statement": "text",
    "declaration": (None, "name"),
    "data": {"dataset": "name", "files": {"*": "hash"}, "classes": "count"},
    "split": {
        "seed": "seed",
        "prior_fraction": "fraction",
        "sizes": dict.fromkeys(("prior", "bound", "unlabelled"), "count"),
        "declared": "flag",
        "duplicates": "count",
        "repeats": "count",
        "parts": dict.fromkeys(("prior", "bound", "unlabelled"), "hash"),
        "indices": dict.fromkeys(("prior", "bound", "unlabelled"), "hash"),
    },
    "standardisation": {"mean": ["real"], "std": ["real"]},
    "evaluation": {"mode": "name", "dtype": "name", "autocast": "flag", "tf32": "flag", "augmentation": "flag"},
    "assumptions": ["text"],
    "software": {"pacprune": "name", "torch": "name"},
    "files": {"*": "hash"},
    "digest": "hash",
}
_TEST = {
    "network": "hash",
    "sparsity": "fraction",
    "group": (None, "name"),
    "n": "count",
    "counts": (None, {"plus": "count", "minus": "count"}),
    "mean": "real",
    "bound": (None, "real"),
    "p_value": (None, "fraction"),
    "passed": (None, "flag"),
}
FORMS: dict[str, dict[str, Any]] = {
    "held-out": {**_COMMON, "hashes": {"model": "hash"}, "commitment": None},
    "pac-bayes": {
        **_COMMON,
        "hashes": dict.fromkeys(("prior", "posterior", "rest"), "hash"),
        "kl": "number",
        "kl_per_tensor": {"*": "number"},
        "monte_carlo": {
            "method": "name",
            "tolerance": "number",
            "batch": "count",
            "posterior": _DRAWS,
            "prior": _DRAWS,
        },
        "catoni_c": (None, "number"),
        "single_draw": {
            "seed": "seed",
            "errors": "count",
            "log_ratio": "real",
            "sparsity": "fraction",
            "fresh": "flag",
        },
        "thresholded": {
            "seed": "seed",
            "inputs": "count",
            "disagreements": "count",
            "errors": "count",
            "sparsity": "fraction",
        },
        "shares": (None, _SHARES),
        "commitment": (None, {"plan": _PLAN, "source": "name", "digest": "hash", "seal": "hash", "beacon": "beacon"}),
    },
    "risk": {
        **{key: form for key, form in _COMMON.items() if key != "reference"},
        "hashes": {"*": "hash"},
        "commitment": None,
        "bounds": {"*": {"bound": "real", "ledger": _LEDGER}},
        "claim": {"family": "name", "bound": "real"},
        "risk": {"name": "name", "whole": "flag"},
        "rule": "name",
        "limit": (None, "real"),
        "order": ["hash"],
        "tests": [_TEST],
    },
}
"""Every field of certificate.json by its kind: {"*": f} is a table of names, [f] a list, (None, f) may be null."""


def _form(kind: str, version: int) -> dict[str, Any]:
    """The fields that a certificate of this kind and version has."""

    def older(form: Any) -> Any:
        if isinstance(form, tuple):
            return None, older(form[1])
        if isinstance(form, dict):
            return {key: older(value) for key, value in form.items() if key not in ADDED}
        return form

    return FORMS[kind] if version > 2 else older(FORMS[kind])


def _number(value: Any) -> bool:
    """A finite number as JSON has it; no Boolean."""
    return type(value) in (int, float) and abs(value) <= 2.0**63


def _plain(value: Any, most: int) -> bool:
    """Text of printable ASCII characters, which no two readers print in two ways, without spaces to hide behind."""
    fits = type(value) is str and 0 < len(value) <= most and "  " not in value
    return fits and re.fullmatch("[!-~]([ -~]*[!-~])?", value) is not None


LEAVES: dict[str, Callable[[Any], bool]] = {
    "name": lambda v: _plain(v, 500) and '"' not in v,
    "text": lambda v: _plain(v, 1500),
    "beacon": lambda v: type(v) is str and re.fullmatch("[0-9a-f]{16,512}", v) is not None,
    "hash": lambda v: type(v) is str and re.fullmatch("[0-9a-f]{64}", v) is not None,
    "flag": lambda v: type(v) is bool,
    "count": lambda v: type(v) is int and 0 <= v <= MOST_COUNT,
    "seed": lambda v: type(v) is int and 0 <= v < 2**63,
    "fraction": lambda v: _number(v) and 0 <= v <= 1,
    "number": lambda v: _number(v) and v >= 0,
    "real": _number,
}
"""The kinds of values, each with the test of it."""


def _check_form(value: Any, form: Any, path: str = "") -> None:
    """Refuses a record with other keys, or other kinds of values, than a certificate has."""
    if isinstance(form, tuple):
        if value is not None:
            _check_form(value, form[1], path)
    elif isinstance(form, dict):
        _require(isinstance(value, dict), f"{path or RECORD} is no table")
        keys = set(value) if "*" in form else set(form)
        for key in sorted(keys ^ set(value)):
            fault = "is missing" if key in keys else "is a key that no certificate has"
            raise Refused(f"{path}{'.' if path else ''}{key!r} {fault}")
        for key in value:
            _require("*" not in form or LEAVES["name"](key), f"{path} has the unprintable key {key!r}")
            _check_form(value[key], form.get("*", form.get(key)), f"{path}.{key}" if path else key)
    elif isinstance(form, list):
        _require(isinstance(value, list), f"{path} is no list")
        for i, entry in enumerate(value):
            _check_form(entry, form[0], f"{path}[{i}]")
    else:
        holds = value is None if form is None else LEAVES[form](value)
        _require(holds, f"{path} is {value!r:.80}, which is no {form or 'null'}")


def read(folder: str | Path) -> Folder:
    """The one reader of a certificate folder, for every level; ValueError when it cannot be read."""
    try:
        return _read(place(folder))
    except OSError as error:
        raise ValueError(f"{folder} is no whole certificate folder ({error}); ask the issuer for it") from error


def place(folder: str | Path) -> Path:
    """The folder itself, or the folder `certificate` in it, where certificate.json lies there, as in a run."""
    folder = Path(folder)
    inner = folder / "certificate"
    return inner if not (folder / RECORD).exists() and (inner / RECORD).is_file() else folder


def _read(folder: Path) -> Folder:
    record = _read_record(folder)
    files = files_of(record)
    packed = set(record["files"]) == {PACKED}
    names = [PACKED] if packed else [f"{name}.safetensors" for name in files]
    _require(
        set(record["files"]) == set(names), f"files are {list(record['files'])}, but must be {names} or {[PACKED]}"
    )
    tensors, hashes = {}, {}
    for name in names:
        content = _read_bytes(folder / name, MOST_FILE)
        hashes[name] = hashlib.sha256(content).hexdigest()
        _compare(record, {"files": hashes})  # a changed file is refused as such, also when it cannot be read
        try:
            tensors |= unpack(content, files) if packed else {name.removesuffix(".safetensors"): read_tensors(content)}
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{name} cannot be read as safetensors ({error}); ask the issuer for it again") from error
    _check_tensors(record, tensors)
    return Folder(record, tensors, hashes)


def files_of(record: dict[str, Any]) -> tuple[str, ...]:
    """The tensor files that a record has beside it."""
    names = FILES[record["kind"]]
    if record["kind"] != "risk":
        return names
    examples = not record["risk"]["whole"] or any(test["group"] is not None for test in record["tests"])
    needed = {"model": True, "reference": "reference" in record["hashes"], "examples": examples}
    return tuple(name for name in names if needed[name])


def _read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes: no link, no pipe, no device."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file; ask the issuer for the folder itself")
        if status.st_size > most:
            raise ValueError(f"{path} has {status.st_size:,} bytes, but at most {most:,} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)  # memory for as much as is asked for would be taken at once
    finally:
        os.close(descriptor)


def _parsed(text: bytes | str) -> Any:
    """JSON in UTF-8, in which no table names a key twice and nothing lies too deep."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    value = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=table)
    level, depth = [value], 0
    while level:
        inside = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        level, depth = [child for children in inside for child in children], depth + bool(inside)
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} tables or lists lie inside one another")
    return value


def _read_record(folder: Path) -> dict[str, Any]:
    content = _read_bytes(path := folder / RECORD, MOST_RECORD)
    try:
        record = _parsed(content)
        layout = (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); ask the issuer for it again") from error
    header = (record.get("format"), record.get("version")) if isinstance(record, dict) else type(record).__name__
    if header not in [(FORMAT, version) for version in VERSIONS]:
        raise ValueError(f"{path} is {header}, but this reads {(FORMAT, *VERSIONS)}; use a matching verifier")
    kinds = [kind for kind in FORMS if kind != "risk" or record["version"] > 2]
    if record.get("kind") not in kinds:
        kind = record.get("kind")
        raise ValueError(f"{path} is of the kind {kind!r:.80}, but must be one of {kinds}; use another verifier")
    _check_form(record, _form(record["kind"], record["version"]))
    _compare(record, {"digest": digest({key: value for key, value in record.items() if key != "digest"})})
    # Another space or an 18th digit changes nothing that is computed, but the file is then not the one that was issued.
    _require(content == layout, f"{RECORD} is not laid out as issued: {len(content)} bytes, not {len(layout)}")
    return record


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_tensors(record: dict[str, Any], tensors: dict[str, Tensors]) -> None:
    """Refuses tensors with other names than they must have, with names that cannot be printed, and with NaN."""
    for file, entries in tensors.items():
        for name, tensor in entries.items():
            if not LEAVES["name"](name):
                raise ValueError(f"{file}.safetensors holds the unprintable name {name!r:.80}; ask the issuer")
            if tensor.dtype.kind in "fu" and np.isnan(_values(tensor)).any():
                raise ValueError(f"{name} in {file}.safetensors holds NaN; ask the issuer for another certificate")
            if tensor.dtype.kind == "b" and (tensor.view(np.uint8) > 1).any():
                raise ValueError(f"{name} in {file}.safetensors holds other Booleans than 0 and 1; ask the issuer")
    if record["kind"] == "risk":
        _check_names("examples", tensors.get("examples", {}), _example_names(record))
    if record["kind"] != "pac-bayes":
        return
    names, rest = list(record["kl_per_tensor"]), [x for x in tensors["distributions"] if x.startswith("rest/")]
    slabs = [f"{whose}/{part}/{name}" for whose in BOTH for part in PARTS for name in names]
    counts = [f"{whose}/{key}" for whose in BOTH for key in COUNTS] + [f"single_draw/{name}" for name in names]
    network = names + [key.removeprefix("rest/") for key in rest]
    expected = {"distributions": slabs + rest, "draws": counts, "single_draw": network, "thresholded": network}
    for file, entries in tensors.items():
        _check_names(file, entries, expected[file])


def _check_names(file: str, entries: Tensors, expected: list[str]) -> None:
    """Refuses a file that holds other tensors than these."""
    for name in sorted(set(expected) ^ set(entries)):
        fault = "missing from" if name in expected else "unknown in"
        raise ValueError(f"{name} is {fault} {file}.safetensors; ask the issuer for the whole folder")


def _example_names(record: dict[str, Any]) -> list[str]:
    """What is stored of every example: the levels of each network that was tested, and who is in which group."""
    places, tests = {hashed: place for place, hashed in reversed(list(enumerate(record["order"])))}, record["tests"]
    groups = [f"group/{i}" for i, test in enumerate(tests) if test["group"] is not None]
    levels = {f"levels/{places.get(test['network'])}" for test in tests}
    return groups + ([] if record["risk"]["whole"] else sorted(levels))


def unpack(content: bytes, files: tuple[str, ...]) -> dict[str, Tensors]:
    """Files packed as one, by the header's index: [dtype, shape, values], or values[0] but where a mask says otherwise.

    The mask is bits, [dtype, shape, values, bits], or gaps, [dtype, shape, values, null, gaps].
    """
    blobs, header = read_tensors(content), _parsed(content[8 : 8 + int.from_bytes(content[:8], "little")])
    if set(header["__metadata__"]) != {"index"}:
        raise ValueError("its metadata is not an index alone")
    index = _parsed(header["__metadata__"]["index"])
    if set(index) != {f"{name}.safetensors" for name in files}:
        raise ValueError(f"it holds {list(index)} and not {files}")
    entries = [entry for table in index.values() for entry in table.values()]
    unused = set(blobs) - {key for entry in entries for key in entry[2:]}
    if unused:
        raise ValueError(f"nothing refers to {sorted(unused)[:3]}")
    size = sum(_size(entry[1]) * np.dtype(PACKED_DTYPES[entry[0]]).itemsize for entry in entries)
    if size > min(MOST_GROWTH * len(content), MOST_UNPACKED):
        raise ValueError(f"{len(content):,} bytes would become {size:,}")
    return {
        file.removesuffix(".safetensors"): {name: _unpacked(blobs, *entry) for name, entry in table.items()}
        for file, table in index.items()
    }


def _unpacked(
    blobs: Tensors, dtype: str, shape: list[int], values: str, bits: str | None = None, gaps: str | None = None
) -> Array:
    """One packed tensor; every size has to fit before anything is made of it."""
    flat, size = blobs[values], _size(shape)
    exact = flat.dtype == np.dtype(PACKED_DTYPES[dtype])
    if not exact and not (dtype in ("int64", "int32") and flat.dtype == np.uint8):
        raise ValueError(f"{dtype} is stored as {flat.dtype}")
    flat = flat.astype(PACKED_DTYPES[dtype])
    if bits is not None or gaps is not None:
        differs = _mask(blobs, bits, gaps, size)
        if flat.ndim != 1 or flat.size not in (2, 1 + int(differs.sum())):
            raise ValueError(f"{flat.size} values do not fit a mask of {int(differs.sum())}")
        flat = flat[np.minimum(np.cumsum(differs, dtype=np.int64), flat.size - 1) * differs]
    if flat.size != size:
        raise ValueError(f"{flat.size} values do not fit the shape {shape}")
    return flat.reshape(shape)


def _mask(blobs: Tensors, bits: str | None, gaps: str | None, size: int) -> Array:
    """Which of so many entries differ, by bits or by gaps."""
    if bits is not None and gaps is not None:
        raise ValueError("a mask is given twice")
    stored = blobs[gaps if bits is None else bits]  # type: ignore[index]
    if stored.dtype != np.uint8 or stored.ndim != 1:
        raise ValueError(f"a mask is stored as {stored.dtype}{stored.shape}")
    if bits is None:
        return mask_of_gaps(stored, size)
    if stored.size != (size + 7) // 8:
        raise ValueError(f"a mask of {stored.size} bytes does not fit {size} entries")
    mask = np.unpackbits(stored).astype(bool)
    if mask[size:].any():
        raise ValueError("a bit is set behind the last entry")
    return mask[:size]


def mask_of_gaps(code: Array, size: int) -> Array:
    """The mask of so many entries whose gaps, the zeros before each one, are in Rice's code.

    The first byte is the number r of low bits, the next five are the number of ones (the lowest byte first). Then
    follow the low r bits of every gap, highest bit first; then of every gap as many zeros as its other bits say, and a
    one. Both end in the last byte that they need. No code is as long as the mask's bits.
    """
    r, count = int(code[0]) if code.size else 0, int.from_bytes(code[1:6].tobytes(), "little")
    middle = 6 + (count * r + 7) // 8
    if not middle <= code.size < (size + 7) // 8 or r > 40 or count > 8 * (code.size - middle):
        raise ValueError(f"{code.size} bytes hold no {count} gaps with {r} low bits in {size} entries")
    low, ends = np.unpackbits(code[6:middle]), np.flatnonzero(np.unpackbits(code[middle:]))
    whole = middle + (int(ends[-1]) // 8 + 1 if ends.size else 0) == code.size
    if ends.size != count or not whole or low[count * r :].any():
        raise ValueError(f"{count} gaps do not fill {code.size} bytes")
    gaps = np.diff(ends, prepend=-1) - 1
    if count and int(gaps.max()) > size >> r:
        raise ValueError(f"a gap is wider than {size} entries")
    gaps <<= r
    for column in range(r):
        gaps += low[column : count * r : r].astype(np.int64) << (r - 1 - column)
    places = np.cumsum(gaps + 1) - 1
    if count and int(places.max()) >= size:
        raise ValueError(f"gaps lead beyond {size} entries")
    mask = np.zeros(size, bool)
    mask[places] = True
    return mask


def _size(shape: Any) -> int:
    """The number of entries of a shape, if it is one."""
    fits = isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and 0 <= n <= 2**40 for n in shape)
    if not fits or math.prod(max(n, 1) for n in shape) > 2**40:
        raise ValueError(f"{shape!r:.80} is no shape")
    return math.prod(shape)


def read_tensors(content: bytes) -> Tensors:
    """The tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, and the raw data."""
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or start > min(len(content), MOST_HEADER):
        raise ValueError(f"its header would end at byte {start:,} of {len(content):,}")
    header, data, tensors, end = _parsed(content[8:start]), memoryview(content)[start:], {}, 0
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r:.80} has the fields {sorted(entry)}")
        (begin, stop), dtype = entry["data_offsets"], np.dtype(DTYPES[entry["dtype"]])
        size = _size(entry["shape"]) * dtype.itemsize
        if {type(begin), type(stop)} != {int} or begin != end or stop - begin != size or stop > len(data):
            raise ValueError(f"{name!r:.80} does not fill the bytes {begin} to {stop} of {len(data)}")
        tensors[name] = np.frombuffer(data[begin:stop], dtype).reshape(entry["shape"])
        end = stop
    if end != len(data):
        raise ValueError(f"its tensors do not fill its {len(data)} bytes of data one by one")
    return tensors


def _values(tensor: Array) -> Array:
    return (tensor.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == np.uint16 else tensor


def _take(tensors: Tensors, name: str, *shapes: tuple[int, ...], kind: str = "f") -> Array:
    """The values in float64, once they are finite, of this kind and of one of these shapes."""
    values = _values(tensors[name])
    if values.shape not in shapes or values.dtype.kind != kind or not np.isfinite(values).all():
        raise ValueError(f"{name} is {values.dtype}{values.shape}, not finite {kind!r}{shapes[0]}; ask the issuer")
    return values.astype(np.float64)


def tensor_hash(tensors: Tensors, *prefixes: str) -> str:
    """SHA-256 over names, types, shapes and bytes, part by part, in the order of the names."""
    sha256 = hashlib.sha256()
    for prefix, key in ((x, key) for x in prefixes for key in sorted(tensors) if key.startswith(x)):
        name, tensor = key.removeprefix(prefix), tensors[key]
        dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
        sha256.update(f"{name} torch.{dtype} {tensor.shape};".encode() + tensor.tobytes())
    return sha256.hexdigest()


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- Comparing.


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise Refused(rule)


def _count(record: dict[str, Any], *keys: str, most: int) -> int:
    """What a record holds under the keys, once it is at most this."""
    value: Any = record
    for key in keys:
        value = value[key]
    _require(value <= most, f"{'.'.join(keys)} is {value}, not in [0, {most}]")
    return value


def _compare(stated: Any, expected: Any, *keys: str, slack: float = 0.0) -> None:
    """What is recomputed is stated: floats up to rounding, mostly upwards; an infinite one (NaN below) never is."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            _require(isinstance(stated, dict) and key in stated, f"{'.'.join([*keys, key])} is not stated")
            _compare(stated[key], value, *keys, key, slack=slack)
        return
    near = stated == expected and type(stated) is type(expected)
    if type(expected) is float and _number(stated):
        above, size = stated - expected, abs(expected)
        near = 0 <= above + 1e-9 * size + slack <= 1e-7 * size + 2 * slack
    _require(near, f"{'.'.join(keys)}: {stated} is stated, {expected} is recomputed")


def _main(arguments: list[str]) -> int:
    """`python verify.py FOLDER`: prints the report and returns the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(f"usage: python verify.py FOLDER\n\n{__doc__}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        report = verify(arguments[0])
    except ValueError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    print(report)
    return 0 if report.valid else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
