"""Checks a certificate folder without data, without torch and without the rest of this package: numpy alone.

Hashes, KL, bounds, shares of delta and sentence are computed again by arithmetic of this file's own: a fault of the
issuing code is not repeated. `python verify.py FOLDER` exits with 0: valid, 1: a rule fails, 2: cannot be read.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION, RECORD, PACKED = "pacprune certificate", 1, "certificate.json", "packed.safetensors"
FILES = {"pac-bayes": ("distributions", "draws", "single_draw", "thresholded"), "held-out": ("model",)}
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
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
TRUSTED = (
    "the counts: errors of the reference, single and thresholded networks and of every draw; disagreements",
    "the split: that its parts are disjoint, were cut at random and are the examples that their hashes name",
    "the order in time: that priors, reference and catoni_c, as stated, were fixed before the bound set was looked at",
    "the draws: that they come from Q and P by the seeds, which are checked, and that none was left out",
    "the data and the model: files, duplicates, standardisation, and that these tensors are the network in use",
)
Array = np.ndarray
Tensors = dict[str, Array]  # bfloat16, which numpy lacks, as uint16
Slab = dict[str, list[Array]]  # keep_prob, mean and std of every tensor, in float64
Rules = Iterator[tuple[str, dict[str, Any]]]  # what is checked, and what certificate.json must state for it


@dataclass(frozen=True)
class Report:
    """What a verification found: the rules that hold, the first one that fails, and what is taken on trust."""

    valid: bool
    checks: tuple[str, ...]
    failure: str | None
    trusted: tuple[str, ...] = TRUSTED

    def __str__(self) -> str:
        checks, trusted = [f"  checked: {x}" for x in self.checks], [f"  on trust: {x}" for x in self.trusted]
        words = (f"{x[:12]}..." if len(x) == 64 else x for x in f"INVALID: {self.failure}".split(" "))  # short hashes
        return "\n".join([*checks, *trusted, "VALID"] if self.valid else [" ".join(words), *checks])


class Refused(Exception):
    """A rule that does not hold: the certificate can be read, and is false."""


def verify(folder: str | Path) -> Report:
    """Recomputes all that follows from the files of a certificate folder; ValueError when they cannot be read."""
    checks: list[str] = []
    try:
        record = _read_record(Path(folder))
        for check, expected in _rules(Path(folder), record):
            _compare(record, expected, slack=1e-12 + 1e-15 * _get(record, "total", least=1))
            checks.append(check)
    except Refused as refusal:
        return Report(False, tuple(checks), str(refusal))
    except OSError as error:
        raise ValueError(f"{folder} is no whole certificate folder ({error}); ask the issuer for it") from error
    drawn = record["kind"] == "pac-bayes"
    return Report(True, tuple(checks), None, tuple(x for x in TRUSTED if drawn or not x.startswith("the draws")))


def _rules(folder: Path, record: dict[str, Any]) -> Rules:
    yield f"the SHA-256 and the layout of {RECORD}", {"format": FORMAT}
    if (kind := _get(record, "kind", kind=str)) not in FILES:
        raise ValueError(f"{RECORD} is of the kind {kind!r}, but must be one of {list(FILES)}; use a matching verifier")
    files, hashes = _read_files(folder, record, FILES[kind])
    yield f"the SHA-256 of {', '.join(hashes)}", {"files": hashes}
    n, size = _get(record, "n", least=1), _get(record, "split", "sizes", "bound")
    _require(n == size, f"n is {n}, but the split has {size} bound examples")
    yield f"n = {n:,} is the size of the bound set; evaluation", {"evaluation": EVALUATION}
    yield from _held_out(record, n, *files) if kind == "held-out" else _pac_bayes(record, n, *files)


def _held_out(record: dict[str, Any], n: int, model: Tensors) -> Rules:
    total, sparsity = record["total"], _get(record, "sparsity", kind=float)
    weights = [_values(w) for w in model.values() if w.ndim >= 2 and _values(w).dtype.kind == "f"]
    size, zeros = sum(w.size for w in weights), sum(int((w == 0).sum()) for w in weights)
    # Buffers of two or more dimensions are no weights, and the file does not tell which they are.
    _require(total <= size, f"total is {total}, but the file holds {size} numbers in two or more dimensions")
    possible = min(max(zeros + total - size, round(sparsity * total)), zeros)
    yield "hash and zeros of the network", {"hashes": {"model": tensor_hash(model, "")}, "sparsity": possible / total}
    ledgers, shares = _ledgers(record, ["held_out"])
    bound = clopper_pearson(_get(record, "reference", "errors", most=n), n, sum(shares["held_out"]))
    subject = f"the {n:,} bound examples, the error rate on new data of this network (sparsity"
    yield from _claim(record, ledgers, {"held_out": bound}, ["held_out"], subject)


def _pac_bayes(record: dict[str, Any], n: int, tensors: Tensors, draws: Tensors, *nets: Tensors) -> Rules:
    hashes = {w: tensor_hash(tensors, *(f"{w}/{part}/" for part in PARTS), "rest/") for w in BOTH}
    hashes["rest"] = tensor_hash(tensors, "rest/")
    yield "the hashes of P, of Q and of what they share", {"hashes": hashes}
    names, base = record["kl_per_tensor"], f"{hashes['prior']}/{hashes['posterior']}/"
    digests = (hashlib.sha256((base + purpose).encode()).hexdigest() for purpose in PURPOSES)
    of_q, of_p, of_h, of_f = ({"seed": int(digest[:16], 16) >> 1} for digest in digests)
    yield "the seeds", {"monte_carlo": {"posterior": of_q, "prior": of_p}, "single_draw": of_h, "thresholded": of_f}
    for rest in (tensor_hash({f"rest/{key}": net[key] for key in net if key not in names}, "rest/") for net in nets):
        _require(rest == hashes["rest"], f"a network is saved with the frozen tensors {rest} and not {hashes['rest']}")
    q, p = ({name: _slab(tensors, whose, name) for name in names} for whose in BOTH)
    total, size = record["total"], sum(lam.size for lam, _, _ in q.values())
    limit = size + sum(t.size for key, t in tensors.items() if key.startswith("rest/") and t.ndim >= 2)
    _require(size <= total <= limit, f"total is {total}, but the tensors hold {size} to {limit} weights")
    sparsity = sum(float((1 - lam).sum()) for lam, _, _ in q.values()) / total
    kl = sum((terms := {name: divergence(name, *q[name], *p[name]) for name in q}).values())
    yield f"sparsity and KL, {kl:.6g} nats, in float64", {"sparsity": sparsity, "kl_per_tensor": terms, "kl": kl}
    inputs, batch = _get(record, "split", "sizes", "unlabelled"), _get(record, "monte_carlo", "batch")
    ledgers, shares = _ledgers(record, [name for name in SHARES if inputs or name != "thresholded"])
    errors, single, _ = (_get(record, w, "errors", most=n) for w in ("reference", "single_draw", "thresholded"))
    method, delta = record["monte_carlo"].get("method"), shares["seeger"][1]
    drawn = {w: _monte_carlo(draws, w, batch, errors / n, delta, method) for w in BOTH}
    yield "Monte Carlo: draws, mean risk, betting and Chernoff bounds, of Q and of P", {"monte_carlo": drawn}
    ratio, zeros = _single_draw(p, q, draws, nets[0])
    yield "the single network and log dQ/dP", {"single_draw": {"log_ratio": ratio, "sparsity": zeros / total}}
    zeros = _thresholded(q, nets[1], size - total + round((1 - record["sparsity"]) * total))
    yield "the thresholded network", {"thresholded": {"sparsity": zeros / total, "inputs": inputs}}
    risk, count = drawn["posterior"]["risk_upper"], drawn["posterior"]["draws"]
    pac, delta = shares["seeger"][0], sum(shares["held_out"])
    c = None if record.get("catoni_c") is None else _get(record, "catoni_c", kind=float)
    _require(c is None or 1e-3 <= c <= 100, f"catoni_c is {c}, but must be null or lie in [0.001, 100]")
    values = gibbs(risk, n, kl, pac, c) | {
        "q_equals_p": kl_inverse(drawn["prior"]["risk_upper"], complexity(n, 0.0, pac)),
        "single_draw": kl_inverse(single / n, max(0.0, complexity(n, ratio, delta))),
        "held_out": clopper_pearson(errors, n, delta),
    }
    pac, mc, ref, _ = shares["excess"]
    plus, minus = draws["posterior/plus"] / batch, 1 - draws["posterior/minus"] / batch
    gained, lost = (kl_inverse(betting(x, mc / 2), complexity(n, kl, pac / 2)) for x in (plus, minus))
    values["excess"] = min(1.0, max(0.0, clopper_pearson(errors, n, ref) + gained - (1 - lost)))
    disagreements = _get(record, "thresholded", "disagreements", most=inputs)
    if inputs:
        pac, _, _, agree = shares["thresholded"]
        transfer = clopper_pearson(disagreements, inputs, agree)
        values["thresholded"] = min(1.0, kl_inverse(risk, complexity(n, kl, pac)) + transfer)
    subject = f"the {n:,} bound examples and of the {count:,} sampled networks, the error rate on new data of a network"
    subject += " drawn from Q (expected sparsity"
    yield from _claim(record, ledgers, values, FAMILIES, subject)


def _claim(record: Any, ledgers: dict[str, Any], values: dict[str, float], families: list[str], subject: str) -> Rules:
    yield "all bounds and their ledgers", {"bounds": {x: {"ledger": ledgers[x], "bound": values[x]} for x in values}}
    family = _get(record, "claim", "family", kind=str)
    _require(family in families, f"claim.family is {family!r}, but must be one of {families}")
    bound, delta = record["bounds"][family]["bound"], ledgers[family]["delta"]
    upper = math.ceil(bound * 1e4 - 1e-9) / 1e4  # a certificate must not be rounded in its own favour
    subject += f" {math.floor(record['sparsity'] * 1e4 + 1e-2) / 1e4:.4f})"
    sure = f"{(100 - 100 * Decimal(f'{delta:.12g}')).normalize():f}"
    statement = f"With probability at least {sure} % over the draw of {subject} is at most {upper:.4f}."
    yield f"the claim, at most {upper:.4f}, and its sentence", {"claim": {"bound": bound}, "statement": statement}


def _ledgers(record: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """How each bound spends delta, in fixed fractions, and its shares as they are used, divided by the choices made."""
    delta = _get(record, "bounds", "held_out", "ledger", "delta", kind=float)
    choices = {key: _get(record, "bounds", "held_out", "ledger", key) for key in ("grid", "certified")}
    _require(0 < delta < 1 <= min(choices.values()), f"the ledgers have the impossible delta {delta} or {choices}")
    _require(
        set(record["bounds"]) == set(names), f"bounds are given for {list(record['bounds'])}, not for {tuple(names)}"
    )
    ledgers, shares = {}, {}
    for name in names:
        a, b, c, d = spent = [delta * part for part in (1 - sum(SHARES[name]), *SHARES[name])]
        ledgers[name] = {"delta": delta, "pac_bayes": a, "monte_carlo": b, "reference": c, "unlabelled": d, **choices}
        shares[name] = [share / math.prod(choices.values()) for share in spent]
    return ledgers, shares


def _monte_carlo(draws: Tensors, whose: str, batch: int, reference: float, delta: float, method: Any) -> dict[str, Any]:
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


def clopper_pearson(errors: int, n: int, delta: float) -> float:
    """The largest p with Pr[Binomial(n, p) <= errors] >= delta."""
    j = np.arange(errors, max(0, errors - 40 * math.sqrt(n)), -1.0)  # terms further away are nothing in float64
    steps, change = np.arange(len(j) + 1), np.append(0, np.cumsum(np.log(j / (n - j + 1))))
    choose = math.lgamma(n + 1) - math.lgamma(errors + 1) - math.lgamma(n - errors + 1)

    def rare(p: float) -> bool:
        terms = np.logaddexp.reduce(change + steps * math.log((1 - p) / p))  # relative to the term of `errors`
        return choose + errors * math.log(p) + (n - errors) * math.log1p(-p) + terms <= math.log(delta)

    return 1.0 if errors == n else _bisect(max(0.0, errors / n - 10 / math.sqrt(n)), 1.0, rare)


def betting(values: Array, delta: float) -> float:
    """The smallest mu with mean_j prod_t (1 + f_j (mu - X_t)/(1 - mu)) >= 1/delta, over 20 fixed bets f_j."""
    x, times = np.unique(values, return_counts=True)
    f, goal = 0.95 * 950.0 ** (np.arange(20) / 19 - 1)[:, None], math.log(20) - math.log(delta)
    return _bisect(float(x[0]), 1.0, lambda m: np.logaddexp.reduce(np.log1p(f * ((m - x) / (1 - m))) @ times) >= goal)


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise Refused(rule)


def _get(value: Any, *keys: str, kind: type = int, least: int = 0, most: int = 2**53) -> Any:
    """What a record holds under the keys, once it is of this kind and, if it is a count, within these limits."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if type(value) is not kind and not (kind is float and type(value) is int and abs(value) <= 2**53):
        raise ValueError(f"{RECORD} needs {'.'.join(keys)} of type {kind.__name__}, not {value!r}; ask the issuer")
    _require(kind is not int or least <= value <= most, f"{'.'.join(keys)} is {value}, not in [{least}, {most}]")
    return value


def _compare(record: dict[str, Any], expected: Any, *keys: str, slack: float = 0.0) -> None:
    """What is recomputed is stated: floats up to rounding, mostly upwards; an infinite one (NaN below) never is."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            _compare(record, value, *keys, key, slack=slack)
        return
    stated = _get(record, *keys, kind=type(expected), most=2**63)
    near = False
    if type(expected) is float:
        above, size = stated - expected, abs(expected)
        near = 0 <= above + 1e-9 * size + slack <= 1e-7 * size + 2 * slack
    _require(near or stated == expected, f"{'.'.join(keys)}: {stated} is stated, {expected} is recomputed")


def _read_record(folder: Path) -> dict[str, Any]:
    content = (path := folder / RECORD).read_bytes()
    try:
        record = json.loads(content.decode())
        layout = json.dumps(record, indent=2, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); ask the issuer for it again") from error
    header = (record.get("format"), record.get("version")) if isinstance(record, dict) else type(record).__name__
    if header != (FORMAT, VERSION):
        raise ValueError(f"{path} is {header}, but this reads {(FORMAT, VERSION)}; use a matching verifier")
    canonical = json.dumps({k: v for k, v in record.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    _compare(record, {"digest": hashlib.sha256(canonical.encode()).hexdigest()})
    # Another space or an 18th digit changes nothing that is computed, but the file is then not the one that was issued.
    _require(content == layout.encode(), f"{RECORD} is not laid out as issued: {len(content)} bytes, not {len(layout)}")
    return record


def _read_files(folder: Path, record: dict[str, Any], files: tuple[str, ...]) -> tuple[list[Tensors], dict[str, str]]:
    """The tensors of all files, which have the names and are the numbers they must be, and the SHA-256 of the files."""
    contents, hashes, packed = [], {}, PACKED in _get(record, "files", kind=dict)
    for path in (folder / name for name in ([PACKED] if packed else [f"{x}.safetensors" for x in files])):
        content = path.read_bytes()
        hashes[path.name] = hashlib.sha256(content).hexdigest()
        try:
            contents += unpack(content, files) if packed else [read_tensors(content)]
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            _compare(record, {"files": hashes})  # a changed file is refused as such, also when it cannot be read
            raise ValueError(f"{path} cannot be read as safetensors ({error}); ask the issuer for it again") from error
    for name, tensors in zip(files, contents, strict=True):
        for key in (key for key, t in tensors.items() if t.dtype.kind in "fu" and np.isnan(_values(t)).any()):
            raise ValueError(f"{key} in {name}.safetensors holds NaN; ask the issuer for another certificate")
    if len(files) > 1:
        names, rest = list(_get(record, "kl_per_tensor", kind=dict)), [x for x in contents[0] if x.startswith("rest/")]
        slabs = [f"{whose}/{part}/{name}" for whose in BOTH for part in PARTS for name in names]
        counts = [f"{whose}/{key}" for whose in BOTH for key in COUNTS] + [f"single_draw/{name}" for name in names]
        nets = [names + [key.removeprefix("rest/") for key in rest]] * 2
        for file, tensors, expected in zip(files, contents, (slabs + rest, counts, *nets), strict=True):
            for name in sorted(set(expected) ^ set(tensors)):
                fault = "missing from" if name in expected else "unknown in"
                raise ValueError(f"{name} is {fault} {file}.safetensors; ask the issuer for the whole folder")
    return contents, hashes


def unpack(content: bytes, files: tuple[str, ...]) -> list[Tensors]:
    """Files packed as one: by the header's index, [dtype, shape, values], or values[0] but where a bit is set."""
    blobs, header = read_tensors(content), json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    index, contents = json.loads(header["__metadata__"]["index"]), []
    for entries in (index[f"{name}.safetensors"] for name in files):
        contents.append(tensors := {})
        for name, (dtype, shape, values, *bits) in entries.items():
            flat = blobs[values].astype(DTYPES["BF16"] if dtype == "bfloat16" else dtype)
            for keep in (np.unpackbits(blobs[x])[: math.prod(shape)] for x in bits):
                flat = flat[np.minimum(np.cumsum(keep), flat.size - 1) * keep]  # the one other value, or one for each
            tensors[name] = flat.reshape(shape)
    return contents


def read_tensors(content: bytes) -> Tensors:
    """The tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, and the raw data."""
    start = 8 + int.from_bytes(content[:8], "little")
    header, data, tensors, end, gap = json.loads(content[8:start]), memoryview(content)[start:], {}, 0, False
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        gap, end = gap or begin != end, stop
    if gap or end != len(data):
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
    digest = hashlib.sha256()
    for prefix, key in ((x, key) for x in prefixes for key in sorted(tensors) if key.startswith(x)):
        name, tensor = key.removeprefix(prefix), tensors[key]
        dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
        digest.update(f"{name} torch.{dtype} {tensor.shape};".encode() + tensor.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        print(report := verify(sys.argv[-1]))
        sys.exit(not report.valid)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
