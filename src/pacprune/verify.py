"""Checks a certificate folder without data, without torch and without the rest of this package: numpy alone.

Every hash, the KL, every bound, the account of delta and the sentence are computed again from the files, by arithmetic
that was written for this file only, so that a fault of the issuing code is not repeated. It runs by itself, too:

    python verify.py FOLDER

prints what was checked and what is taken on trust; exit 0: valid, 1: a rule fails, 2: the folder cannot be read.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION, RECORD = "pacprune certificate", 1, "certificate.json"
FILES = {
    "pac-bayes": {f"{name}.safetensors" for name in ("distributions", "draws", "single_draw", "thresholded")},
    "held-out": {"model.safetensors"},
}
EVALUATION = {"mode": "eval", "dtype": "float32", "autocast": False, "tf32": False, "augmentation": False}
FAMILIES = ("seeger", "catoni", "excess")
SHARES = {
    **dict.fromkeys(("seeger", "paper", "catoni", "q_equals_p", "vote"), (0.2, 0.0, 0.0)),
    "excess": (0.2, 0.2, 0.0),
    "thresholded": (0.2, 0.0, 0.2),
    **dict.fromkeys(("single_draw", "held_out"), (0.0, 0.0, 0.0)),
}
"""The fractions of delta that each bound spends on Monte Carlo, the reference network and unlabelled inputs."""
SEEDS = {
    "monte_carlo/posterior": "posterior draws",
    "monte_carlo/prior": "prior draws",
    "single_draw": "single draw",
    "thresholded": "unlabelled draws",
}
DTYPES = {
    **{"F64": ("float64", "<f8"), "F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")},
    **{"I64": ("int64", "<i8"), "I32": ("int32", "<i4"), "U8": ("uint8", "u1"), "BOOL": ("bool", "?")},
}
"""Types of tensors: their names in torch, and in numpy (which has no bfloat16)."""
TRUSTED = (
    "the counts: errors of the reference, single and thresholded networks and of every draw; disagreements",
    "the split: that its parts are disjoint, were cut at random and are the examples that their hashes name",
    "the order in time: that prior and reference were fixed before anybody looked at the bound examples",
    "the draws: that they come from Q and P by the seeds, which are checked, and that none was left out",
    "the data: its files, duplicates and standardisation, and that new data follow the same distribution",
    "the model: that the tensors belong to the network in use, evaluated as the certificate says",
    "the numbers of priors and of certificates tried on these examples, as the ledger states them",
)

Array = NDArray[Any]
Slab = dict[str, tuple[Array, Array, Array]]  # keep_prob, mean and std of every tensor, in float64


@dataclass(frozen=True)
class Report:
    """What a verification found: the rules that hold, the first one that fails, and what is taken on trust."""

    valid: bool
    checks: tuple[str, ...]
    failure: str | None
    trusted: tuple[str, ...] = TRUSTED

    def __str__(self) -> str:
        lines = [f"  checked: {check}" for check in self.checks] + [f"  on trust: {what}" for what in self.trusted]
        return "\n".join([*lines, "VALID" if self.valid else f"INVALID: {self.failure}"])


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file: the name of its type in torch, its bytes, and its values (bfloat16 as float32)."""

    dtype: str
    raw: memoryview
    values: Array


class _Refused(Exception):
    """A rule that does not hold: the certificate can be read, and is false."""


def verify(folder: str | Path) -> Report:
    """Recomputes all that follows from the files of a certificate folder; ValueError when they cannot be read."""
    checks: list[str] = []
    try:
        for check in _rules(Path(folder)):
            checks.append(check)  # noqa: PERF402 - one by one, so that those before a failure are known
    except _Refused as refusal:
        return Report(False, tuple(checks), str(refusal))
    return Report(True, tuple(checks), None)


def _rules(folder: Path) -> Iterator[str]:
    """A line for every group of rules that holds, in order; _Refused at the first rule that does not."""
    record = _record(folder)
    yield f"{RECORD}: its own SHA-256 and its standard form"
    kind = record("kind", str)
    if kind not in FILES:
        raise ValueError(f"{RECORD} is of the unknown kind {kind!r}; this checks the kinds {' and '.join(FILES)}")
    files, changed = _files(folder, record, FILES[kind])
    slabs = _slabs(record, files) if kind == "pac-bayes" else ()
    _require(changed is None, f"files: the SHA-256 of {changed} is not the one that {RECORD} states")
    yield f"files: the SHA-256 of {', '.join(sorted(files))}"
    n, size, evaluation = record("n", int), record("split/sizes/bound", int), record("evaluation", dict)
    _require(n == size >= 1, f"n is {n}, but the split has {size} bound examples")
    _require(evaluation == EVALUATION, f"evaluation is {evaluation}, but must be {EVALUATION}")
    yield f"n = {n:,} is the number of bound examples; evaluated without augmentation"
    yield from _pac_bayes(record, files, *slabs) if slabs else _held_out(record, files["model.safetensors"])


# --- The two kinds of certificate.


def _held_out(record: "_Record", model: dict[str, Tensor]) -> Iterator[str]:
    _equal("hashes.model", record("hashes/model", str), tensor_hash(model))
    n, total, sparsity = record("n", int), record("total", int), record("sparsity")
    weights = [t.values for t in model.values() if t.values.ndim >= 2 and t.values.dtype.kind == "f"]
    size, zeros = sum(w.size for w in weights), sum(int((w == 0).sum()) for w in weights)
    # Buffers of two or more dimensions are no weights, and the file does not tell which they are.
    _require(1 <= total <= size, f"total is {total}, but the file holds {size} numbers in two or more dimensions")
    stated = round(sparsity * total)
    _close("sparsity", sparsity, stated / total)
    _require(zeros + total - size <= stated <= zeros, f"sparsity means {stated} zeros, but {zeros} are counted")
    yield f"the hash of the network; sparsity {sparsity:.4f} of {total:,} weights"
    delta = sum(_ledgers(record, {"held_out"})["held_out"])
    found = {"held_out": clopper_pearson(_count(record, "reference/errors", n), n, delta)}
    subject = f"over the draw of the {n:,} bound examples, the error rate on new data of this network (sparsity"
    yield from _claim(record, found, ("held_out",), f"{subject} {sparsity:.4f})")


def _pac_bayes(record: "_Record", files: dict[str, dict[str, Tensor]], p: Slab, q: Slab) -> Iterator[str]:
    n, total, sparsity = record("n", int), record("total", int), record("sparsity")
    tensors, draws = files["distributions.safetensors"], files["draws.safetensors"]
    rest = _under("rest/", tensors)
    parts = {whose: [_under(f"{whose}/{part}/", tensors) for part in ("keep_prob", "mean", "std")] for whose in
             ("prior", "posterior")}
    found = {whose: tensor_hash(*parts.get(whose, []), rest) for whose in ("prior", "posterior", "rest")}
    for whose, value in found.items():
        _equal(f"hashes.{whose}", record(f"hashes/{whose}", str), value)
    for where, purpose in SEEDS.items():
        content = f"{found['prior']}/{found['posterior']}/{purpose}"
        seed = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 1
        _equal(f"seed of the {purpose}", record(f"{where}/seed", int), seed)
    yield "the hashes of P, of Q and of what they share; the seeds that follow from them"

    _check_slabs(p, q)
    size = sum(lam.size for lam, _, _ in q.values())
    most = size + sum(t.values.size for t in rest.values() if t.values.ndim >= 2)
    _require(size <= total <= most, f"total is {total}, but the tensors hold {size} to {most} weights")
    _close("sparsity", sparsity, math.fsum(float((1 - lam).sum()) for lam, _, _ in q.values()) / total)
    yield f"gates that can be sampled exactly; expected sparsity {sparsity:.4f} of {total:,} weights"

    kl, stated = record("kl"), {name: record(f"kl_per_tensor/{name}") for name in q}
    for name in q:
        _rounded_up(f"kl_per_tensor of {name}", stated[name], divergence(*q[name], *p[name]), q[name][0].size)
    _rounded_up("kl", kl, math.fsum(stated.values()), 1)
    yield f"KL(Q||P) of {len(q)} tensors in float64, rounded up: {kl:.6g} nats"

    inputs = record("split/sizes/unlabelled", int)
    _equal("thresholded.inputs", record("thresholded/inputs", int), inputs)
    ledgers = _ledgers(record, set(SHARES) - (set() if inputs else {"thresholded"}))
    yield f"the shares of delta {record('bounds/seeger/ledger/delta'):g} for {len(ledgers)} bounds"
    gibbs, delta = ledgers["seeger"], sum(ledgers["held_out"])
    risk, risk_of_p = (_monte_carlo(record, whose, draws, gibbs[1]) for whose in ("posterior", "prior"))
    count, batch = record("monte_carlo/posterior/draws", int), record("monte_carlo/batch", int)
    yield f"Monte Carlo: {count:,} draws, mean risk, betting and Chernoff bounds; the same for Q = P"
    ratio = _single_draw(record, p, q, draws, files["single_draw.safetensors"])
    _thresholded(record, q, files["thresholded.safetensors"])
    yield "the weights of the single and of the thresholded network, their zeros, and log dQ/dP"

    reference, seeger = _count(record, "reference/errors", n), kl_inverse(risk, complexity(n, kl, gibbs[0]))
    c, half = complexity(n, kl, ledgers["excess"][0] / 2), ledgers["excess"][1] / 2
    plus = betting(draws["posterior/plus"].values / batch, half)
    minus = 1 - betting(1 - draws["posterior/minus"].values / batch, half)
    excess = clopper_pearson(reference, n, ledgers["excess"][2]) + kl_inverse(plus, c) - kl_inverse_lower(minus, c)
    bounds = {
        "seeger": seeger,
        "paper": paper(risk, n, kl, gibbs[0]),
        "catoni": catoni(risk, n, kl, gibbs[0]),
        "excess": min(1.0, max(0.0, excess)),
        "q_equals_p": kl_inverse(risk_of_p, complexity(n, 0.0, gibbs[0])),
        "vote": min(1.0, 2 * seeger),
        "single_draw": kl_inverse(_count(record, "single_draw/errors", n) / n, max(0.0, complexity(n, ratio, delta))),
        "held_out": clopper_pearson(reference, n, delta),
    }
    _count(record, "thresholded/errors", n)
    disagreements = _count(record, "thresholded/disagreements", inputs)
    if inputs:
        other = clopper_pearson(disagreements, inputs, ledgers["thresholded"][3])
        bounds["thresholded"] = min(1.0, kl_inverse(risk, complexity(n, kl, ledgers["thresholded"][0])) + other)
    subject = f"over the draw of the {n:,} bound examples and of the {count:,} sampled networks, the error rate on new "
    yield from _claim(record, bounds, FAMILIES, f"{subject}data of a network drawn from Q (expected sparsity {sparsity:.4f})")
