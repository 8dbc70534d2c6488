"""True certificates, and seeded changes of them: wrong, odd and hostile folders for every verifier to get through."""

import copy
import hashlib
import importlib
import json
import math
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import bounds_table, held_out, risks, rules
from pacprune.certification.certificate import percent, rounded_down
from pacprune.certification.drawn_networks import Counts
from pacprune.data import trace

arithmetic = importlib.import_module("pacprune.certification.verify")  # pacprune.verify is the name of a function, too
RECORD, PACKED = "certificate.json", "packed.safetensors"
Record = dict[str, Any]
Entry = tuple[str, list[int], bytes]  # type, shape and bytes of a tensor


# --- Folders.


@dataclass(frozen=True)
class Odd:
    """Something in a folder that is no ordinary file: a link, a pipe, a directory, or a file that is mostly a hole."""

    kind: str
    target: str = ""
    size: int = 0


Files = dict[str, "bytes | Odd"]


@dataclass(frozen=True)
class Case:
    """A changed folder, and how it came about."""

    name: str
    base: str
    files: Files


def read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content.kind == "link":
            path.symlink_to(content.target)
        elif content.kind == "pipe":
            os.mkfifo(path)
        elif content.kind == "directory":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(content.size)
    return folder


# --- True certificates, each of some hundred weights.


class Half(nn.Sequential):
    """A network with weights in bfloat16 that takes and gives float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10))


def _pac_bayes(
    *,
    std: float = 3e-3,
    unlabelled: int = 40,
    half: bool = False,
    look: bool = False,
    seal: bool = False,
    prior_fraction: float = 0.5,
    **options: Any,
) -> pp.Certificate:
    split = pp.data.digits(unlabelled=unlabelled, prior_fraction=prior_fraction)
    model = Half(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10)).bfloat16() if half else _network()
    if prior_fraction:
        pp.fit(model, split.prior, pp.Config(epochs=4, lr=0.1))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.8)
    train_std = options.pop("train_std", False)
    prior = pp.read(pp.attach(model, pp.block_isotropic(model, mask, eps=0.01, std=std), train_std=train_std))
    commitment = pp.commit(prior, split, draws=60, **options) if seal else None
    if look:
        pp.error(_network(), split.bound)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.1 if std else 0.0, gate_lr=1.0))
    if commitment is not None:
        options |= {"commitment": commitment.sealed(model), "beacon": "9f2c51d0a3b6e874"}
    return pp.certify(model, prior, split, draws=60, **options)


def _held_out(*, half: bool = False, **options: Any) -> pp.Certificate:
    split = pp.data.digits()
    model = Half(nn.Flatten(), nn.Linear(64, 10)).bfloat16() if half else _network()
    pp.fit(model, split.prior, pp.Config(epochs=3, lr=0.05))
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.5))
    return pp.certify_held_out(model, split, **options)


def _pruned(split: pp.data.Split, *sparsities: float) -> tuple[nn.Module, list[nn.Module]]:
    """A dense network, and pruned copies of it."""
    dense = _network()
    pp.fit(dense, split.prior, pp.Config(epochs=3, lr=0.05))
    copies = [copy.deepcopy(dense) for _ in sparsities]
    for network, sparsity in zip(copies, sparsities, strict=True):
        pp.apply_mask(network, pp.top_k(pp.scores.magnitude(network), sparsity=sparsity))
    return dense, copies


def _risk(risk: Any, *, pair: bool = False, compare: bool = False, **options: Any) -> pp.Certificate:
    split = pp.data.digits()
    dense, (network,) = _pruned(split, 0.6)
    data = (split.test.x, None if risk == "disagreement" else split.test.y) if pair else split
    return pp.certify_held_out(network, data, risk=risk, reference=dense if compare else None, **options)


def _sequence(**options: Any) -> pp.Certificate:
    split = pp.data.digits()
    dense, candidates = _pruned(split, 0.3, 0.5, 0.7, 0.9)
    reference = dense if options["risk"] in ("drop", "disagreement") else None
    return held_out.certify_sequence(candidates, split, reference=reference, **options)


def language(documents: int = 120) -> tuple[pp.data.Split, nn.Module, nn.Module]:
    """Documents of different lengths, a network that predicts their next tokens, and the same pruned."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.softmax(3 * torch.randn(12, 12, generator=generator), -1)
    texts = []
    for length in torch.randint(3, 30, (documents,), generator=generator).tolist():
        tokens = [int(torch.randint(12, (1,), generator=generator))]
        for _ in range(length):
            tokens.append(int(torch.multinomial(chain[tokens[-1]], 1, generator=generator)))
        texts.append(tokens)
    split = pp.data.split(*pp.data.documents(texts, length=20))
    dense = pp.models.gpt(12, width=16, depth=1, heads=2, context=20, dropout=0.0)
    pp.fit(dense, split.prior, pp.Config(epochs=10, lr=3e-3, optimizer="adamw"), loss=pp.models.next_character)
    network = copy.deepcopy(dense)
    pp.apply_mask(network, pp.top_k(pp.scores.magnitude(network), sparsity=0.5))
    return split, dense, network


def _tokens(risk: str, *, compare: bool = False, **options: Any) -> pp.Certificate:
    split, dense, network = language()
    return pp.certify_held_out(network, split, risk=risk, reference=dense if compare else None, **options)


def confidence(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss of one's own."""
    return 1 - output.softmax(-1).gather(-1, batch[1][:, None])[:, 0]


SORTS: dict[str, Callable[[], pp.Certificate]] = {
    "usual": _pac_bayes,
    "usual, packed": _pac_bayes,
    "Catoni, no inputs": lambda: _pac_bayes(family="catoni", unlabelled=0),
    "Catoni at one c, packed": lambda: _pac_bayes(family="catoni", expected_risk=0.2),
    "excess, choices, packed": lambda: _pac_bayes(family="excess", grid=3, certified=2, delta=0.1),
    "shares": lambda: _pac_bayes(shares={"main": (2, 0.25), "rest": (7, 0.5)}, group="main", certified=3),
    "committed, shares, packed": lambda: _pac_bayes(seal=True, shares={"all": (3, 1.0)}, group="all"),
    "Chernoff": lambda: _pac_bayes(method="chernoff", delta=0.001),
    "declared, packed": lambda: _pac_bayes(declare="it came from elsewhere - as {x} <b>said</b> & 'done'"),
    "committed": lambda: _pac_bayes(seal=True),
    "committed, Chernoff, packed": lambda: _pac_bayes(seal=True, method="chernoff"),
    "masks alone, packed": lambda: _pac_bayes(std=0.0),
    "trained std": lambda: _pac_bayes(train_std=True),
    "looked at, packed": lambda: _pac_bayes(look=True),
    "bfloat16": lambda: _pac_bayes(half=True, std=0.1),
    "a prior on no data": lambda: _pac_bayes(prior_fraction=0),
    "held-out": _held_out,
    "held-out, packed": lambda: _held_out(certified=2, delta=0.3),
    "held-out, declared": lambda: _held_out(declare="its first weights came from elsewhere"),
    "held-out, bfloat16": lambda: _held_out(half=True),
    "top-k": lambda: _risk("top3", certified=3),
    "drop, packed": lambda: _risk("drop", compare=True),
    "drop by class": lambda: _risk("drop", compare=True, groups="class"),
    "disagreement, all examples, packed": lambda: _risk("disagreement", pair=True, compare=True),
    "loss, declared": lambda: _risk(confidence, declare="its first weights came from elsewhere"),
    "Brier by key, packed": lambda: _risk("brier", groups=["odd" if i % 2 else "even" for i in range(719)]),
    "tokens, packed": lambda: _tokens("token-error", groups=["odd" if i % 2 else "even" for i in range(60)]),
    "tokens, a rise": lambda: _tokens("token-loss-rise", compare=True),
    "sequence, packed": lambda: _sequence(risk="drop", limit=0.3),
    "sequence of losses": lambda: _sequence(risk="cross-entropy", limit=0.5, delta=0.2),
    "sequence, all pass": lambda: _sequence(risk="error", limit=0.99),
    "front": lambda: _sequence(risk="disagreement", limit=0.1, front=True),
}


def certificates() -> dict[str, Files]:
    """True certificates of all sorts, as files."""
    made = {}
    for sort, issue in SORTS.items():
        torch.manual_seed(0)
        trace._looks.clear()
        with TemporaryDirectory() as folder:
            made[sort] = read(issue().save(folder, packed="packed" in sort))
    trace._looks.clear()
    return made


# --- Parts of a folder.


def record_of(files: Files) -> Record:
    content = files[RECORD]
    assert isinstance(content, bytes)
    return json.loads(content)


def layout(record: Any) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


def stored(files: Files, record: Record, *, fit: bool = True) -> Files:
    """The folder with this record; with `fit`, as a forger does it: hashes of files and record follow from them."""
    record = copy.deepcopy(record)
    if fit and isinstance(record.get("files"), dict):
        hashes = {name: hashlib.sha256(c).hexdigest() for name, c in files.items() if isinstance(c, bytes)}
        record["files"] = {name: hashes.get(name, digest) for name, digest in record["files"].items()}
    if fit:
        record.pop("digest", None)
        record["digest"] = arithmetic.digest(record)
    return files | {RECORD: layout(record)}


def parsed(content: bytes) -> tuple[dict[str, Entry], Any]:
    """Tensors and metadata of a safetensors file."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, stop = (start + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], entry["shape"], content[begin:stop])
    return tensors, metadata


def header_of(tensors: dict[str, Entry], metadata: Any = None) -> tuple[Record, bytes]:
    header: Record = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return header, data


def packed_up(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    """A safetensors file of a header, which is text or becomes JSON, and of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def rehashed(files: Files) -> Files:
    """The folder with hashes of tensors, and seeds, that follow from its present tensors: a forger who does it all."""
    record = record_of(files)
    names = arithmetic.files_of(record)
    try:
        if PACKED in files:
            tensors = arithmetic.unpack(files[PACKED], names)
        else:
            tensors = {name: arithmetic.read_tensors(files[f"{name}.safetensors"]) for name in names}
        if record["kind"] in ("held-out", "risk"):
            old = record["hashes"]["model"]
            for name in record["hashes"]:
                record["hashes"][name] = arithmetic.tensor_hash(tensors[name], "")
            for test in record.get("tests", []):
                test["network"] = record["hashes"]["model"] if test["network"] == old else test["network"]
            if "order" in record:
                record["order"] = [record["hashes"]["model"] if h == old else h for h in record["order"]]
        else:
            for whose, parts in (("prior", arithmetic.PARTS), ("posterior", arithmetic.PARTS), ("rest", ())):
                prefixes = (f"{whose}/{part}/" for part in parts)
                record["hashes"][whose] = arithmetic.tensor_hash(tensors["distributions"], *prefixes, "rest/")
            for key, value in arithmetic._seeds(record, record["hashes"]).items():
                for whose, seed in value.items() if key == "monte_carlo" else ((None, value),):
                    (record[key] if whose is None else record[key][whose]).update(seed)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        pass  # what cannot be read has no hash
    return stored(files, record)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from paths(child, (*path, key))


def value_at(record: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        record = record[key]
    return record


def changed(record: Record, path: tuple[Any, ...], value: Any) -> Record:
    record = copy.deepcopy(record)
    value_at(record, path[:-1])[path[-1]] = value
    return record


def _leaves(record: Record, *kinds: type) -> list[tuple[Any, ...]]:
    return [path for path in paths(record) if type(value_at(record, path)) in kinds]


# --- Changes of the record.

Mutation = Callable[[random.Random, Files], "Files | None"]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """A row of the table; a mutation gives None where it does not apply."""
    MUTATIONS[function.__name__] = function
    return function


def _fit(rng: random.Random) -> bool:
    return rng.random() < 0.8


@mutation
def nudge_a_number(rng: random.Random, files: Files) -> Files:
    """By a rounding error, or by a little more."""
    record = record_of(files)
    path = rng.choice(_leaves(record, int, float))
    value, sign = value_at(record, path), rng.choice([-1, 1])
    if isinstance(value, int):
        nudged: Any = value + sign * rng.choice([1, 2, 10, 1000])
    else:
        nudged = value + sign * (abs(value) * 10.0 ** rng.randint(-17, -1) + rng.choice([0.0, 1e-15, 1e-13, 1e-9]))
    return stored(files, changed(record, path, nudged), fit=_fit(rng))


@mutation
def take_another_number(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    path = rng.choice(_leaves(record, int, float, bool))
    numbers: list[Any] = [0, 1, 2, -1, 0.0, -0.0, 1.0, 0.5, 1e-300, 5e-324, 1e300, 10**9, 10**9 + 1, 2**53, 2**63 - 1]
    numbers += [2**63, 2**64, 10**30, 10**400, -(10**30), 0.1 + 0.2, 1 / 3, 1e16, 1e22, 123456789.125, True, False]
    return stored(files, changed(record, path, rng.choice(numbers)), fit=_fit(rng))


@mutation
def take_another_type(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    path = rng.choice(list(paths(record)))
    value = value_at(record, path)
    others = [None, True, "", "0", str(value), [], {}, [value], {"a": value}, 0, 0.0]
    if isinstance(value, (int, float)):
        others += [float(value), int(value), bool(value)] * 3
    return stored(files, changed(record, path, rng.choice(others)), fit=_fit(rng))


@mutation
def write_no_number(rng: random.Random, files: Files) -> Files:
    """NaN and infinities, which JSON lacks, and numbers that no float holds."""
    record = record_of(files)
    path = rng.choice(_leaves(record, int, float))
    text = layout(changed(record, path, "@")).decode()
    spelling = rng.choice(["NaN", "Infinity", "-Infinity", "1e400", "-1e999", "1" * 5000, "9" * 4300, "-" + "9" * 4301])
    return files | {RECORD: text.replace('"@"', spelling).encode()}


@mutation
def spell_a_number_otherwise(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    path = rng.choice(_leaves(record, int, float))
    value = value_at(record, path)
    spellings = [f"{value}0", f"{value}e0", f"{value:.17e}", f"{value:E}", f"+{value}", f"0{value}", f" {value}"]
    spellings += [
        f"{value}.",
        f"-{value}",
        f"{value:.25f}",
        "-0",
        "-0.0",
        "0e5",
        "1E+2",
        f"{value}e-0",
        f"0x{int(value):x}",
    ]
    text = layout(changed(record, path, "@")).decode()
    return files | {RECORD: text.replace('"@"', rng.choice(spellings)).encode()}


@mutation
def add_remove_or_rename_a_key(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    tables = [(), *(path for path in paths(record) if isinstance(value_at(record, path), dict))]
    table = value_at(record, rng.choice(tables))
    key = rng.choice([*table, "error at most 0.0001"])
    name = rng.choice([f"{key} ", key.upper(), "x", "", "__proto__", "constructor", "0", "*", "optional"])
    if (how := rng.randrange(3)) == 0:
        table[name] = rng.choice([None, 0, 0.5, "x", {}, "0" * 64, {"bound": 0.0}])
    elif how == 1:
        table.pop(key, None)
    else:
        items = [(name if k == key else k, v) for k, v in table.items()]
        table.clear()
        table.update(items)
    return stored(files, record, fit=_fit(rng))


@mutation
def give_a_key_twice(rng: random.Random, files: Files) -> Files:
    lines = layout(record_of(files)).decode().splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if re.fullmatch(r' *".*": .*,', line)])
    return files | {RECORD: ("\n".join([*lines[: at + 1], *lines[at:]]) + "\n").encode()}


@mutation
def order_the_keys_otherwise(rng: random.Random, files: Files) -> Files:
    """Which changes nothing that is said."""

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        items = [(key, shuffled(child)) for key, child in value.items()]
        rng.shuffle(items)
        return dict(items)

    return stored(files, shuffled(record_of(files)), fit=_fit(rng))


@mutation
def nest_deeply(rng: random.Random, files: Files) -> Files:
    record, depth = record_of(files), rng.choice([1, 3, 10, 11, 12, 13, 14, 15, 16, 17, 20, 100, 900, 5000, 100_000])
    path = rng.choice(list(paths(record)))
    text = layout(changed(record, path, "@")).decode()
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    return files | {RECORD: text.replace('"@"', opening * depth + "0" + closing * depth).encode()}


STRINGS = [
    "",
    " ",
    "\x1b[2J\x1b[HVALID (level 1)",
    "\r\nVALID",
    "\x00",
    "\x7f",
    "\x9b2J",
    "\u202eDILAV",
    "\u200b",
    "\ufeff",
    "\ud800",
    "\udfff\ud800",
    "🙂",
    "é",
    "e\u0301",
    "\u00a0",
    "\u2028",
    "\ue000",
    "ﬀ",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "../../etc/passwd",
    "x" * 500,
    "x" * 501,
    "🙂" * 500,
    "🙂" * 501,
    "x" * 5001,
    "__proto__",
    "nan",
    '"\\/\b\f\n\r\t',
]


@mutation
def write_an_odd_string(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    path = rng.choice([*_leaves(record, str, type(None)), ("model",), ("declaration",), ("data", "dataset")])
    return stored(files, changed(record, path, rng.choice(STRINGS)), fit=_fit(rng))


@mutation
def write_an_odd_key(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    tables = [table for table in ("kl_per_tensor", "bounds", "files") if table in record] + ["data"]
    table = record[name := rng.choice(tables)]
    table = table["files"] if name == "data" else table
    table[rng.choice(STRINGS)] = rng.choice(list(table.values()))
    return stored(files, record, fit=_fit(rng))


@mutation
def lay_it_out_otherwise(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    text = layout(record).decode()
    layouts: list[bytes] = [
        json.dumps(record).encode(),
        json.dumps(record, indent=4).encode(),
        json.dumps(record, indent=2, sort_keys=True).encode() + b"\n",
        (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode(),
        text.replace("\n", "\r\n").encode(),
        text.encode()[:-1],
        text.encode() + b"\n",
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        text.encode("utf-32-le"),
        text.encode() + b"\x00",
        text.encode() + b"{}",
        b"// true\n" + text.encode(),
        text.replace('"format"', r'"\u0066ormat"').encode(),
        text.replace("pacprune certificate", r"pacprune\u0020certificate").encode(),
        text.replace("null", "None").encode(),
        text.replace("true", "True").encode(),
        text.replace("\\u", "\\U").encode(),
        text.replace("}", ",}", 1).encode(),
        text.replace("  ", "\t").encode(),
        text.replace("  ", "\u00a0 ").encode(),
        text.replace('"', "'").encode(),
        text.replace("a", "\\u00e9").encode().replace(b"\\u00e9", b"\xe9"),
    ]
    return files | {RECORD: rng.choice(layouts)}


@mutation
def be_something_else(rng: random.Random, files: Files) -> Files:
    values: list[bytes] = [b"", b"\n", b"[]", b"{}", b"0", b'"x"', b"null", b"true", b"NaN", b"\xff\xfe", b"[" * 1000]
    record = record_of(files)
    headers = [
        (None, 2),
        *(("pacprune certificate", version) for version in (1, 2, 3, 4, 2.0, 3.0, True, "2", "3", [3])),
    ]
    headers += [(["pacprune certificate"], 3)]
    values += [layout(record | {"format": f, "version": v}) for f, v in headers]
    values += [
        layout(record | {"kind": kind}) for kind in ("held-out", "pac-bayes", "risk", "wish", None, [], 0, "__proto__")
    ]
    values += [layout({"format": "pacprune certificate", "version": v, "kind": record["kind"]}) for v in (2, 3)]
    return files | {RECORD: rng.choice(values)}


@mutation
def change_some_bytes(rng: random.Random, files: Files) -> Files:
    name = rng.choice([name for name in files for _ in range(4 if name == RECORD else 1)])
    content = files[name]
    assert isinstance(content, bytes)
    at, length = rng.randrange(len(content)), rng.choice([1, 1, 1, 2, 10, 1000])
    new = rng.choice([b"", rng.randbytes(length), rng.choice(b'0123456789",:{}[]\\-. e').to_bytes()])
    return files | {name: content[:at] + new + content[at + rng.choice([0, len(new), length]) :]}


@mutation
def copy_a_value(rng: random.Random, files: Files) -> Files:
    """From one place to another, where it is of the right type."""
    record = record_of(files)
    to = rng.choice(_leaves(record, int, float, str, bool))
    alike = [path for path in paths(record) if type(value_at(record, path)) is type(value_at(record, to))]
    return stored(files, changed(record, to, value_at(record, rng.choice(alike))), fit=_fit(rng))


@mutation
def agree_on_a_lie(rng: random.Random, files: Files) -> Files:
    """Several places that say the same are changed together, and everything is made to fit."""
    record = record_of(files)
    pattern, change = rng.choice(
        [
            ("n|split/sizes/bound", lambda x: 2 * x),
            ("n|split/sizes/bound", lambda x: 0),
            ("n|split/sizes/bound|reference/errors|single_draw/errors|thresholded/errors", lambda x: 0),
            ("bounds/[^/]*/ledger/delta", lambda x: x / 2),
            ("bounds/.*/(delta|pac_bayes|monte_carlo|reference|unlabelled)", lambda x: x / 2),
            ("bounds/.*/(delta|pac_bayes|monte_carlo|reference|unlabelled)", lambda x: x * 1e-310),
            ("bounds/.*/(grid|certified)|commitment/plan/(grid|certified)", lambda x: x + 1),
            ("bounds/.*/(grid|certified)", lambda x: 0),
            ("bounds/[^/]*/bound|claim/bound", lambda x: x * 0.9),
            ("bounds/[^/]*/bound|claim/bound", lambda x: x * (1 - 2e-9)),
            ("bounds/[^/]*/bound|claim/bound", lambda x: x * (1 - 1e-10)),
            ("bounds/[^/]*/bound|claim/bound", lambda x: 1),
            ("kl|kl_per_tensor/.*", lambda x: x * 0.99),
            ("sparsity|total", lambda x: 2 * x if isinstance(x, int) else x / 2),
            (".*/errors", lambda x: max(0, x - 1)),
            (".*seed", lambda x: x + 1),
            ("monte_carlo/.*/(risk|risk_upper|chernoff)", lambda x: x * 0.9),
            ("split/(repeats|duplicates)", lambda x: x + 50),
            ("claim/family", lambda x: rng.choice(["seeger", "catoni", "excess", "paper", "held_out"])),
            ("declaration", lambda x: "nothing was tried"),
            ("assumptions/.*", lambda x: "none"),
            ("split/declared", lambda x: not x),
            ("commitment", lambda x: None),
            ("single_draw/fresh", lambda x: not x),
        ]
    )
    for path in paths(copy.deepcopy(record)):
        if re.fullmatch(pattern, "/".join(map(str, path))):
            record = changed(record, path, change(value_at(record, path)))
    return stored(files, record)


@mutation
def change_what_is_on_trust(rng: random.Random, files: Files) -> Files:
    """Fields that no computation can check."""
    record = record_of(files)
    path, value = rng.choice(
        [
            ("examples_seen", rng.randrange(10**6)),
            ("model", rng.choice(["mlp", "a model of my own", "größer", "🙂"])),
            ("software/torch", "9.9.9"),
            ("data/dataset", "own"),
            ("data/classes", 7),
            (
                "data/files",
                {"a\tb": "0" * 64} if rng.random() < 0.3 else {"0": "0" * 64, "10": "1" * 64, "9": "2" * 64},
            ),
            ("split/seed", rng.randrange(2**63)),
            ("split/prior_fraction", rng.choice([0, 1, 0.1, 1e-7, 0.30000000000000004])),
            ("split/duplicates", 5),
            ("split/repeats", rng.randrange(12)),
            ("split/parts/bound", "a" * 64),
            ("standardisation/mean", [rng.gauss(0, 10.0 ** rng.randint(-30, 15)) for _ in range(5)]),
            ("monte_carlo/tolerance", rng.choice([0, 1, 1e-7, 12345678901234567, 1e16, 1e15])),
        ]
    )
    if path.split("/")[0] not in record:
        return stored(files, record)
    return stored(files, changed(record, tuple(path.split("/")), value))


@mutation
def state_fewer_bounds(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    for name in rng.sample(list(record["bounds"]), rng.randrange(1 + len(record["bounds"]))):
        if name != "held_out" or rng.random() < 0.2:
            del record["bounds"][name]
    return stored(files, record)


@mutation
def seal_another_plan(rng: random.Random, files: Files) -> Files | None:
    """With seals and seeds that fit it."""
    record = record_of(files)
    if (sealed := record["commitment"]) is None:
        return None
    key = rng.choice(list(sealed["plan"]))
    others = {"draws": [59, 60, 61, 10**9], "method": ["betting", "chernoff", "x"], "family": ["seeger", "catoni", "x"]}
    number = rng.choice([0, 1, 2, 1.0, 0.05, 0.5, None])
    sealed["plan"][key] = rng.choice(others[key]) if key in others else number
    sealed["beacon"] = rng.choice([sealed["beacon"], "9f2c51d0a3b6e875", "round 5", "🙂", "", "9F2C51D0A3B6E874"])
    split = {key: record["split"][key] for key in ("parts", "indices")}
    first = arithmetic.digest({"prior": record["hashes"]["prior"], "split": split, "plan": sealed["plan"]})
    sealed |= {
        "digest": first,
        "seal": arithmetic.digest({"commitment": first, "posterior": record["hashes"]["posterior"]}),
    }
    words = f"from the commitment {first[:12]} and"
    record["statement"] = re.sub(r"from the commitment \w+ and", words, record["statement"])
    return rehashed(stored(files, record))


# --- True in themselves: counts are invented, and everything that follows from them is computed by the library.


@mutation
def invent_the_counts(rng: random.Random, files: Files) -> Files | None:
    """What level 1 cannot refuse: other counts, n and delta, with everything computed anew."""
    record = record_of(files)
    noise = np.random.default_rng(rng.randrange(2**32))
    n = rng.choice([1, 2, 3, 10, 100, 199, 200, 201, 202, 1000, 12_345, 60_000, 1_000_000])
    delta = rng.choice([0.05, 0.01, 0.1, 0.5, 1e-6, 1e-12, 0.025, 1001 / 8192, 0.3, 1 / 3])
    choices: dict[str, Any] = {"grid": rng.choice([1, 1, 3, 552]), "certified": rng.choice([1, 1, 2, 20])}
    errors = rng.choice([0, n, n // 2, int(n * 0.03), int(n * rng.random())])
    record["split"]["repeats"] = 0
    if record["kind"] == "risk":
        return _invented_tests(files, record, n, delta, rng)
    record["n"] = record["split"]["sizes"]["bound"] = n
    record["reference"]["errors"] = errors
    if record["commitment"] is not None:
        return None
    if record["kind"] == "held-out":
        ledger = bounds_table.BOUNDS["held_out"].ledger(delta, **choices)
        bound = pp.bounds.clopper_pearson(errors, n=n, delta=ledger.delta_each)
        record["bounds"] = {"held_out": {"bound": bound, "ledger": ledger.as_dict()}}
        return _restated(files, record, "held_out", delta, chance="", network="this network (sparsity")
    if PACKED in files:
        return None
    record["shares"] = rng.choice([None, {"group": "b", "groups": {"a": _group(3, 0.7), "b": _group(40, 0.3)}}])
    choices["share"] = 0.3 / 40 if record["shares"] else 1.0
    if rng.random() < 0.3:  # as version 2 had it
        record["version"], choices["share"] = 2, 1.0
        choices["undivided"] = False
        del record["shares"]
    files, counts = _invented_draws(files, record, noise, rng)
    return _with_bounds(files, record, counts, delta, choices, rng)


def _invented_tests(files: Files, record: Record, n: int, delta: float, rng: random.Random) -> Files | None:
    """Other counts of every test; groups and levels are in a file, and stay as they are."""
    if not record["risk"]["whole"] or any(test["group"] for test in record["tests"]):
        return None
    lowest, limit = -1 if record["risk"]["name"] == "drop" else 0, rng.choice([0.001, 0.02, 0.3, 0.5, 0.97])
    sequence, tests = record["rule"] == "sequence", []
    place = len(record["tests"]) - 1
    for i, test in enumerate(record["tests"]):
        plus = rng.choice([0, n, n // 2, int(n * 0.03), int(n * rng.random() ** 3)])
        tally = risks.Tally(n, lowest, plus, rng.randrange(n - plus + 1) if lowest else 0)
        p_value = tally.p_value(limit) if sequence else None
        passed = None if p_value is None else p_value <= delta
        bound = None if passed else tally.bound(delta if sequence else delta / len(record["tests"]))
        test |= {"n": n, "mean": tally.mean, "counts": {"plus": tally.plus, "minus": tally.minus}}
        tests.append(test | {"p_value": p_value, "passed": passed, "bound": bound})
        place = i if test["network"] == record["hashes"]["model"] else place
    if sequence and [test["passed"] for test in tests] != [i <= place for i in range(len(tests))]:
        return None
    record["n"] = record["split"]["sizes"]["bound"] = n
    record["tests"], record["limit"] = tests, limit if sequence else None
    bound = limit if sequence else tests[-1]["bound"]
    ledger = bounds_table.BOUNDS["held_out"].ledger(delta)
    record["bounds"] = {"held_out": {"bound": bound, "ledger": ledger.as_dict()}}
    record["claim"]["bound"] = bound
    old = re.search("over the draw of the ([0-9,]+ bound examples?)", record["statement"])
    assert old is not None
    words = record["statement"].replace(old[1], rules.bound_examples(n), 1)
    words = re.sub("at least [0-9.]+ %", f"at least {percent(delta)} %", words)
    record["statement"] = re.sub("(at most|that is) -?[0-9]+[.][0-9]{4}", rf"\1 {rounded_up(bound)}", words, count=1)
    record["assumptions"] = arithmetic.assumptions(record)
    return stored(files, record)


def _group(certificates: int, share: float) -> Record:
    return {"certificates": certificates, "share": share}


def _invented_draws(
    files: Files, record: Record, noise: np.random.Generator, rng: random.Random
) -> tuple[Files, dict[str, Counts]]:
    """Draws of P and Q against a reference with these errors."""
    content = files["draws.safetensors"]
    assert isinstance(content, bytes)
    entries, metadata = parsed(content)
    batch, risk = min(25, record["n"]), record["reference"]["errors"] / record["n"]
    draws, worse, better = rng.choice([1, 5, 60, 1000]), noise.random() ** 3, noise.random()
    counts = {}
    for whose in ("posterior", "prior"):
        reference = noise.binomial(batch, risk, draws)
        plus, minus = noise.binomial(batch - reference, worse), noise.binomial(reference, better)
        arrays = {"wrong": reference + plus - minus, "plus": plus, "minus": minus}
        for key, array in arrays.items():
            entries[f"{whose}/{key}"] = ("I32", [draws], array.astype("<i4").tobytes())
        counts[whose] = Counts(batch, *(torch.from_numpy(array.astype(np.int32)) for array in arrays.values()))
    record["monte_carlo"]["batch"] = batch
    return files | {"draws.safetensors": packed_up(*header_of(entries, metadata))}, counts


def _with_bounds(
    files: Files, record: Record, counts: dict[str, Counts], delta: float, choices: dict[str, Any], rng: random.Random
) -> Files:
    n, inputs = record["n"], rng.choice([0, 1, 40, 5000])
    record["single_draw"] |= {"errors": rng.randrange(n + 1), "fresh": rng.random() < 0.8}
    record["thresholded"] |= {"inputs": inputs, "disagreements": rng.randrange(inputs + 1), "errors": 0}
    record["split"]["sizes"]["unlabelled"] = inputs
    record["catoni_c"] = rng.choice([None, None, 1, 0.001, 0.3, 7.5, 100.0])
    record["monte_carlo"]["method"] = method = rng.choice(["betting", "betting", "chernoff"])
    family = rng.choice(bounds_table.FAMILIES)
    ledger = bounds_table.BOUNDS["seeger"].ledger(delta, **choices)
    for whose, drawn in counts.items():
        seed = record["monte_carlo"][whose]["seed"]
        record["monte_carlo"][whose] = bounds_table.summarise(
            drawn, record["reference"]["errors"] / n, delta=ledger.monte_carlo_each, method=method, seed=seed
        )
    record["bounds"] = bounds_table.all_bounds(record, counts["posterior"], delta=delta, **choices)  # type: ignore[arg-type]
    chance = f" and of the {len(counts['posterior']):,} sampled networks"
    return _restated(files, record, family, delta, chance=chance, network="a network drawn from Q (expected sparsity")


def _restated(files: Files, record: Record, family: str, delta: float, *, chance: str, network: str) -> Files:
    """Claim, sentence and assumptions as they follow."""
    bound = record["bounds"][family]["bound"]
    record["claim"], examples = {"family": family, "bound": bound}, rules.bound_examples(record["n"])
    record["statement"] = (
        f"With probability at least {percent(delta)} % over the draw of the {examples}{chance}, "
        f"the error rate on new data of {network} {rounded_down(record['sparsity'])}) is at most {rounded_up(bound)}."
    )
    if record["declaration"] is not None:
        record["statement"] += f' The issuer states: "{record["declaration"]}".'
    record["assumptions"] = arithmetic.assumptions(record)
    return stored(files, record)


# --- Changes of the tensors.


def _pick_file(rng: random.Random, files: Files) -> tuple[str, dict[str, Entry], Any]:
    name = rng.choice([name for name in files if name.endswith(".safetensors")])
    content = files[name]
    assert isinstance(content, bytes)
    return name, *parsed(content)


def _saved(rng: random.Random, files: Files, name: str, content: bytes) -> Files:
    """The folder with a changed file: hashes as they were, or of files, or of files and tensors made to fit."""
    files = files | {name: content}
    fit = rng.randrange(5)
    if fit == 0:
        return files
    return stored(files, record_of(files)) if fit < 3 else rehashed(files)


@mutation
def change_a_number_of_a_tensor(rng: random.Random, files: Files) -> Files:
    name, tensors, metadata = _pick_file(rng, files)
    key = rng.choice([key for key, entry in tensors.items() if entry[2]])
    dtype, shape, content = tensors[key]
    size = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}.get(dtype, 1)
    at = size * rng.randrange(len(content) // size)
    if dtype in ("F32", "F64") and rng.random() < 0.8:
        code = "<f" if dtype == "F32" else "<d"
        (value,) = struct.unpack(code, content[at : at + size])
        others = [0.0, -0.0, -value, value / 2, value * 1.001, math.nextafter(value, 2), math.nan, math.inf, -math.inf]
        others += [1e-45, 3e38, 0.5, 2.0**-20, 1 - 2.0**-24, 1e-6, 1.0]
        new = struct.pack(code, rng.choice(others))
    else:
        new = rng.choice([rng.randbytes(size), b"\x00" * size, b"\xff" * size, b"\x01" + b"\x00" * (size - 1)])
    return _saved(
        rng,
        files,
        name,
        packed_up(*header_of(tensors | {key: (dtype, shape, content[:at] + new + content[at + size :])}, metadata)),
    )


@mutation
def rename_add_or_remove_a_tensor(rng: random.Random, files: Files) -> Files:
    name, tensors, metadata = _pick_file(rng, files)
    key, other = rng.choice(list(tensors)), rng.choice([*STRINGS, "rest/x", "prior/mean/x", "posterior/mean", "0"])
    if (how := rng.randrange(3)) == 0:
        tensors = {other if k == key else k: entry for k, entry in tensors.items()}
    elif how == 1:
        del tensors[key]
    else:
        tensors[other] = rng.choice([tensors[key], ("F32", [], b"\x00" * 4), ("F32", [0], b""), ("F32", [0, 3], b"")])
    return _saved(rng, files, name, packed_up(*header_of(tensors, metadata)))


@mutation
def reshape_a_tensor(rng: random.Random, files: Files) -> Files:
    """Into a shape of the same size, or of another one."""
    name, tensors, metadata = _pick_file(rng, files)
    key = rng.choice(list(tensors))
    dtype, shape, content = tensors[key]
    size = math.prod(shape)
    shapes: list[Any] = [shape[::-1], [size], [1, size], [size, 1], [*shape, 1], [1] * 33, [-size], [-1, -size], []]
    shapes += [[0], [size + 1], [2**40, 2**40], [0, 2**40, 2**40], [0, 2**41], [float(size)], [True, size], [[size]]]
    shapes += [size, str(size), None, {}, [str(size)], [10**30], [0] * 32]
    return _saved(
        rng, files, name, packed_up(*header_of(tensors | {key: (dtype, rng.choice(shapes), content)}, metadata))
    )


@mutation
def call_a_tensor_another_type(rng: random.Random, files: Files) -> Files:
    name, tensors, metadata = _pick_file(rng, files)
    key = rng.choice(list(tensors))
    types: list[Any] = ["F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "I8", "U16", "U32", "F8_E4M3", "C64"]
    types += ["S2000000000", "V8", "O", "f4", "", None, 4, ["F32"], "__proto__", "toString"]
    _, shape, content = tensors[key]
    return _saved(
        rng, files, name, packed_up(*header_of(tensors | {key: (rng.choice(types), shape, content)}, metadata))
    )


@mutation
def convert_a_tensor(rng: random.Random, files: Files) -> Files | None:
    """The same numbers in another type."""
    name, tensors, metadata = _pick_file(rng, files)
    keys = [key for key, entry in tensors.items() if entry[0] in ("F32", "I32")]
    if not keys:
        return None
    key = rng.choice(keys)
    dtype, shape, content = tensors[key]
    array = np.frombuffer(content, "<f4" if dtype == "F32" else "<i4")
    code, numpy_code = rng.choice([("F64", "<f8"), ("F16", "<f2"), ("I64", "<i8"), ("U8", "u1")])
    with np.errstate(all="ignore"):
        converted = (code, shape, array.astype(numpy_code).tobytes())
    return _saved(rng, files, name, packed_up(*header_of(tensors | {key: converted}, metadata)))


@mutation
def reorder_or_share_tensors(rng: random.Random, files: Files) -> Files:
    name, tensors, metadata = _pick_file(rng, files)
    keys = list(tensors)
    first, second = rng.choice(keys), rng.choice(keys)
    if rng.random() < 0.5:
        rng.shuffle(keys)  # which changes nothing that is said
        tensors = {key: tensors[key] for key in keys}
    else:
        tensors = tensors | {first: tensors[second], second: tensors[first]}
    return _saved(rng, files, name, packed_up(*header_of(tensors, metadata)))


@mutation
def spoil_a_header(rng: random.Random, files: Files) -> Files:
    """Offsets that overlap, leave gaps or lie outside; fields too many or too few; lengths that are wrong."""
    name, tensors, metadata = _pick_file(rng, files)
    header, data = header_of(tensors, metadata)
    key = rng.choice(list(tensors))
    entry = header[key]
    begin, stop = entry["data_offsets"]
    offsets: list[Any] = [[begin + 1, stop + 1], [begin, stop + 4], [begin - 4, stop], [stop, begin], [0, stop - begin]]
    offsets += [[begin, 2**63], [-1, stop], [float(begin), stop], [begin, float(stop)], [False, stop], [begin], begin]
    offsets += [[begin, stop, stop], str(begin), None, {"a": begin, "b": stop}, [None, None], [begin, None], ["0", "4"]]
    spoiled: list[Any] = [header | {key: entry | {"data_offsets": value}} for value in offsets]
    spoiled += [header | {key: entry | {"more": 0}}, header | {key: value_without(entry, rng.choice(list(entry)))}]
    spoiled += [header | {key: value} for value in (None, [], "x", 0, {}, [entry], {"data_offsets": [begin, stop]})]
    spoiled += [
        header | {"__metadata__": value} for value in (None, {}, {"a": "b"}, "index", ["index"], {"a": math.nan})
    ]
    spoiled += [header | {"__metadata__": [10**5000, 0][1:]}, [header], [], 0, "x", None, {}, {key: entry}]
    text = json.dumps(header)
    spoiled += [text.encode("utf-16"), text.encode("utf-32"), b"\xef\xbb\xbf" + text.encode(), b"", b" ", b"\xff" * 20]
    spoiled += [f"{text}   ".encode(), f" {text}".encode(), f"{text}x".encode(), b"[" * 5000, f"[{text}]".encode()]
    spoiled += [f'{{"__metadata__": {"[" * depth}{"]" * depth}}}'.encode() for depth in (15, 16, 100)]
    spoiled += [f"{text[:-1]}, {json.dumps(key)}: {json.dumps(entry)}}}".encode()]
    content = packed_up(rng.choice(spoiled), data)
    if rng.random() < 0.3:
        size = len(text)
        lengths = [0, 1, size - 1, size + 1, size + len(data), size + len(data) + 1, 2**23, 2**32, 2**63, 2**64 - 1]
        content = packed_up(text.encode(), data, length=rng.choice(lengths))
    if rng.random() < 0.15:
        whole = packed_up(header, data)
        content = rng.choice([b"", whole[:7], whole[:8], whole[:-1], whole + b"\x00", whole * 2, whole[8:]])
    return _saved(rng, files, name, content)


def value_without(table: Record, key: str) -> Record:
    return {k: v for k, v in table.items() if k != key}


# --- Changes of what is packed.


@mutation
def spoil_the_index(rng: random.Random, files: Files) -> Files | None:
    if PACKED not in files:
        return None
    _, blobs, metadata = _pick_file(rng, files)
    index = json.loads(metadata["index"])
    file = rng.choice(list(index))
    name = rng.choice(list(index[file]))
    entry = index[file][name]
    dtype, shape, values, *bits = entry
    size, others = math.prod(shape), list(blobs)
    entries: list[Any] = [
        [*entry, values, values][:5],
        [dtype, shape, values, values, values],
        entry[:2],
        [],
        None,
        "float32",
        {"0": dtype},
        [dtype, shape, values],
        [dtype, shape, values, None],
        [dtype, shape, rng.choice(others)],
        [dtype, shape, rng.choice(others), *bits],
        [dtype, shape, values, rng.choice(others)],
        [dtype, shape, "missing"],
        [dtype, shape, 0],
        [dtype, shape, [values]],
        [dtype, shape, values, ["x"]],
        [dtype, shape, values, ""],
    ]
    types = ["float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "S2000000000", "V8", "O", "<f4", None]
    entries += [[rng.choice(types), shape, values, *bits]] * 5
    shapes = [shape[::-1], [size], [size + 1], [2 * size], [size, 1000], [2**30], [2**40, 2**40], [0, 2**40], [-1], "x"]
    entries += [[dtype, rng.choice(shapes), values, *bits]] * 5
    index[file][name] = rng.choice(entries)
    return _saved(rng, files, PACKED, packed_up(*header_of(blobs, metadata | {"index": json.dumps(index)})))


@mutation
def spoil_the_metadata(rng: random.Random, files: Files) -> Files | None:
    if PACKED not in files:
        return None
    _, blobs, metadata = _pick_file(rng, files)
    index = json.loads(metadata["index"])
    file = rng.choice(list(index))
    indices: list[Any] = [
        json.dumps(value_without(index, file)),
        json.dumps(index | {"more.safetensors": {}}),
        json.dumps(index | {"more": index[file]}),
        json.dumps(list(index)),
        json.dumps(index | {file: list(index[file].values())}),
        json.dumps(index | {file: {}}),
        json.dumps(dict(reversed(index.items()))),
        json.dumps(index, indent=3) + "\n",
        "\ufeff" + json.dumps(index),
        json.dumps(index)[:-1] + f', "{file}": {{}}}}',
        "",
        "x",
        index,
        None,
        0,
        ["index"],
    ]
    header, data = header_of(blobs, metadata | {"index": rng.choice(indices)})
    if rng.random() < 0.2:
        header["__metadata__"]["more"] = "x"
    return _saved(rng, files, PACKED, packed_up(header, data))


@mutation
def spoil_a_blob(rng: random.Random, files: Files) -> Files | None:
    """Bits behind the last entry, masks and values that do not fit one another, blobs that nothing refers to."""
    if PACKED not in files:
        return None
    _, blobs, metadata = _pick_file(rng, files)
    key = rng.choice(list(blobs))
    dtype, shape, content = blobs[key]
    size = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}.get(dtype, 1)
    count = len(content) // size
    others: list[Entry] = [
        (dtype, [count + 1], content + b"\x00" * size),
        (dtype, [max(0, count - 1)], content[:-size]),
        (dtype, [1, *shape], content),
        (dtype, [0], b""),
        (dtype, [1], content[:size]),
        (dtype, [2], content[: 2 * size]),
        (dtype, shape, content[:-1] + b"\xff"),
        (dtype, shape, b"\x00" * len(content)),
        (dtype, shape, b"\xff" * len(content)),
    ]
    blobs = blobs | ({"unused": blobs[key]} if rng.random() < 0.1 else {key: rng.choice(others)})
    return _saved(rng, files, PACKED, packed_up(*header_of(blobs, metadata)))


def rice_code(places: list[int], r: int) -> bytes:
    """A mask by the gaps before its ones, of which r low bits are written as they are; digit by digit."""
    gaps = [place - before - 1 for before, place in zip([-1, *places], places, strict=False)]
    low = "".join(f"{gap % 2**r:0{r}b}" for gap in gaps) if r else ""
    high = "".join("0" * (gap >> r) + "1" for gap in gaps)
    digits = [text + "0" * (-len(text) % 8) for text in (low, high)]
    return (
        bytes([r])
        + len(places).to_bytes(5, "little")
        + bytes(int(d[i : i + 8], 2) for d in digits for i in range(0, len(d), 8))
    )


def spoiled_code(rng: random.Random, code: bytes) -> bytes:
    """Lengths, counts and bits that do not fit one another; one time in ten, the code as it is."""
    at, count = rng.randrange(len(code)), int.from_bytes(code[1:6], "little")
    codes = [code, code + b"\x00", code + b"\x80", code[:-1], code[: rng.randrange(7)], code[:6] + code[7:]]
    codes += [bytes([r]) + code[1:] for r in (0, code[0] + 1, 40, 41, 255)]
    codes += [
        code[:1] + k.to_bytes(5, "little") + code[6:] for k in (0, count + 1, max(0, count - 1), 2**31, 2**40 - 1)
    ]
    codes += [code[:-1] + bytes([code[-1] | 1]), code[:6] + b"\xff" * len(code[6:]), code[:6] + b"\x00" * len(code[6:])]
    codes += [code[:at] + rng.randbytes(1) + code[at + 1 :]] * 8
    return code if rng.random() < 0.1 else rng.choice(codes)


@mutation
def say_a_mask_by_gaps(rng: random.Random, files: Files) -> Files | None:
    """In another code than it was, or in one that is wrong."""
    if PACKED not in files:
        return None
    _, blobs, metadata = _pick_file(rng, files)
    index = json.loads(metadata["index"])
    file, name = rng.choice([(f, n) for f, table in index.items() for n, entry in table.items() if len(entry) > 3])
    dtype, shape, values, bits, *gaps = index[file][name]
    stored_mask = np.frombuffer(blobs[bits or gaps[0]][2], np.uint8)
    mask = np.unpackbits(stored_mask) if bits else arithmetic.mask_of_gaps(stored_mask, math.prod(shape))
    code = rice_code(np.flatnonzero(mask).tolist(), rng.choice([0, 1, 2, 2, 3, 3, 4, 5, 40]))
    code = spoiled_code(rng, code)
    blobs["gaps"] = ("U8", [len(code)], code)
    others: list[Any] = [
        ["gaps"],
        ["gaps", None],
        ["gaps", "gaps"],
        [values, "gaps"],
        [None, values],
        [None, "gaps", None],
    ]
    index[file][name] = [dtype, shape, values, *rng.choice([[None, "gaps"]] * 20 + others)]
    used = {key for table in index.values() for entry in table.values() for key in entry[2:]}
    blobs = {key: entry for key, entry in blobs.items() if key in used}
    return _saved(rng, files, PACKED, packed_up(*header_of(blobs, metadata | {"index": json.dumps(index)})))


@mutation
def explode_when_unpacked(rng: random.Random, files: Files) -> Files | None:
    """A few bytes that would become many."""
    if PACKED not in files:
        return None
    _, blobs, metadata = _pick_file(rng, files)
    index = json.loads(metadata["index"])
    many, weights = rng.choice([1, 10, 100, 1000]), 8 * rng.choice([100, 10_000, 300_000])
    length, mask = rng.choice([(weights // 8, ["zeros"]), (6, [None, "zeros"])])  # by bits, or by no gaps
    blobs |= {"zeros": ("U8", [length], b"\x00" * length), "one": ("F64", [1], b"\x00" * 8)}
    for table in index.values():
        table |= {f"rest/bomb{i}": ["float64", [weights], "one", *mask] for i in range(many)}
    return _saved(rng, files, PACKED, packed_up(*header_of(blobs, metadata | {"index": json.dumps(index)})))


# --- Changes of the folder.


@mutation
def lose_or_replace_a_file(rng: random.Random, files: Files) -> Files:
    name = rng.choice(list(files))
    content = files[name]
    assert isinstance(content, bytes)
    other = rng.choice(
        [b"", content[: len(content) // 2], content * 2, rng.randbytes(100), files[rng.choice(list(files))]]
    )
    if rng.random() < 0.3:
        return {key: value for key, value in files.items() if key != name}
    files = files | {name: other}
    return files if name == RECORD or rng.random() < 0.5 else stored(files, record_of(files))


@mutation
def put_something_odd_in_its_place(rng: random.Random, files: Files) -> Files:
    """Links, pipes, devices, directories, and files with a terabyte of nothing."""
    name = rng.choice(list(files))
    odd = [Odd("link", "/dev/zero"), Odd("link", "/dev/null"), Odd("link", "nowhere"), Odd("link", name), Odd("pipe")]
    odd += [Odd("directory"), Odd("sparse", size=2**40), Odd("sparse", size=2**30 + 1), Odd("sparse", size=2**22 + 1)]
    if (content := rng.choice([*odd, None])) is None:
        return files | {name: Odd("link", "elsewhere"), "elsewhere": files[name]}
    return files | {name: content}


@mutation
def name_other_files(rng: random.Random, files: Files) -> Files:
    record = record_of(files)
    names = list(record["files"])
    others = [
        PACKED,
        "../x.safetensors",
        "/etc/passwd",
        "model.safetensors",
        "draws.safetensors",
        "packed.safetensors ",
        "",
    ]
    other = rng.choice(others)
    if rng.random() < 0.5:
        record["files"][other] = "0" * 64
    else:
        record["files"][other] = record["files"].pop(rng.choice(names))
    return stored(files, record)


@mutation
def put_more_files_beside_it(rng: random.Random, files: Files) -> Files:
    """Which nobody reads."""
    return files | {
        rng.choice(["model.safetensors ", "README", "certificate.json~", "extra.safetensors"]): b"\x00" * 10
    }


@mutation
def be_very_long(rng: random.Random, files: Files) -> Files:
    """JSON that takes much more memory than its text."""
    record, size = record_of(files), rng.choice([10**5, 2**22 - 20_000, 2**22 + 1])
    unit = rng.choice(["[],", '{"a":0},', "0.5,", '"",', "1" * 4000 + ",", "0." + "1" * 10_000 + ","])
    text = layout(record | {"declaration": "@"}).decode()
    return files | {RECORD: text.replace('"@"', f"[{(unit * (size // len(unit)))[:-1]}]", 1).encode()}


# --- All of them.


def cases(bases: dict[str, Files], count: int, *, seed: int = 0) -> Iterator[Case]:
    """So many changed folders, every mutation equally often; case i is a function of the seed and i alone."""
    names = list(MUTATIONS)
    for i in range(count):
        name, rng = names[i % len(names)], random.Random(f"{seed}/{i}")
        base = rng.choice(list(bases))
        while (files := MUTATIONS[name](rng, dict(bases[base]))) is None:
            base = rng.choice(list(bases))
        yield Case(name, base, files)
