"""verify.py: true certificates pass; changed ones are refused by digests or arithmetic; broken ones are named."""

import ast
import copy
import hashlib
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_certify import seed_of
from torch import nn

import pacprune as pp
from pacprune import bounds
from pacprune.bounds import montecarlo
from pacprune.certification import certificate, certify
from pacprune.certification.verify import verify
from pacprune.files import mask_gaps

arithmetic = importlib.import_module("pacprune.certification.verify")  # pacprune.verify is the name of a function, too
FILES = ("distributions", "draws", "single_draw", "thresholded")
Record = dict[str, Any]


def issued(
    folder: Path,
    *,
    model: nn.Module | None = None,
    std: float = 3e-3,
    epochs: int = 2,
    unlabelled: int = 100,
    names: str = "",
    train_std: bool = False,
    **options: Any,
) -> Path:
    """A small certificate, saved: 64-32-10 on the digits, 80 % sparse, 200 draws."""
    split = pp.data.digits(prior_fraction=0.5, seed=0, unlabelled=unlabelled)
    model = pp.models.mlp(64, 10, hidden=(32,)) if model is None else model
    pp.fit(model, split.prior, pp.Config(epochs=5, lr=0.05))
    scores = {name: s for name, s in pp.scores.magnitude(model).items() if name.startswith(names)}
    slab = pp.block_isotropic(model, pp.top_k(scores, sparsity=0.8), eps=1e-2, std=std)
    pp.attach(model, slab, train_std=train_std)
    pp.fit(model, split.prior, pp.Config(epochs=2, lr=0.05, gate_lr=1.0))
    prior = pp.read(model)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=epochs, lr=0.1 if std else 0.0, gate_lr=1.0))
    return certify.certify(model, prior, split, draws=200, **options).save(folder)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issued(tmp_path_factory.mktemp("valid"))


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "copy"))


def read(folder: Path) -> Record:
    return json.loads((folder / "certificate.json").read_text())


def write(folder: Path, record: Record, *, digests: bool) -> None:
    """Writes the record; with `digests`, as a forger does: the hashes of files and record are brought up to date."""
    if digests:
        paths = {name: folder / name for name in record["files"] if (folder / name).is_file()}
        record["files"] |= {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
        record["digest"] = certificate.digest(record)
    (folder / "certificate.json").write_text(json.dumps(record, indent=2) + "\n")


def refused(folder: Path) -> str:
    """The rule that fails, or why the folder cannot be read; empty if it is valid."""
    try:
        report = verify(folder)
    except ValueError as error:
        return f"ValueError: {error}"
    assert report.valid == (report.failure is None)
    return report.failure or ""


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in a record, truth values among them."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from numbers(child, (*path, key))
    if isinstance(value, (int, float)):
        yield path


def matching(record: Record, pattern: str) -> list[tuple[Any, ...]]:
    return [path for path in numbers(record) if re.fullmatch(pattern, "/".join(map(str, path)))]


def put(record: Record, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Record:
    """A copy with one value changed."""
    parent = changed = copy.deepcopy(record)
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = change(parent.get(path[-1]) if isinstance(parent, dict) else parent[path[-1]])
    return changed


def other_number(value: Any, rng: np.random.Generator) -> Any:
    """Another number: nearly the same, of the same size, or far away."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return int(value + rng.choice([-3, -1, 1, 2, 10, 1000]))
    return float(rng.choice([0.99999 * value - 1e-7, 1.00001 * value + 1e-7, value * 1.5 + 0.01, value / 2 - 0.01]))


# --- True certificates.


def test_a_true_certificate_is_valid(valid: Path) -> None:
    report = verify(valid)
    assert (report.valid, report.failure) == (True, None)
    assert min(len(report.checks), len(report.trusted)) > 4
    assert str(report).endswith("\nVALID (level 1: the arithmetic follows from the stated counts)")
    assert all(line in str(report) for line in (*report.checks, *report.trusted))


SORTS: dict[str, Callable[[], Record]] = {
    "Q = P": lambda: {"epochs": 0},
    "masks alone": lambda: {"std": 0.0},
    "trained std": lambda: {"train_std": True},
    "excess loss, a grid, a choice": lambda: {"family": "excess", "grid": 3, "certified": 2, "delta": 0.1},
    "a declared share": lambda: {"shares": {"main": (2, 0.25), "rest": (30, 0.75)}, "group": "main"},
    "Catoni, no unlabelled inputs": lambda: {"family": "catoni", "unlabelled": 0},
    "Catoni, its own c": lambda: {"family": "catoni", "expected_risk": 0.1},
    "one layer of two": lambda: {"names": "layers.0"},
    "buffers": lambda: {
        "model": nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    },
}


@pytest.mark.parametrize("sort", SORTS)
def test_certificates_of_all_sorts_are_valid(sort: str, tmp_path: Path) -> None:
    assert refused(issued(tmp_path, **SORTS[sort]())) == ""


def test_held_out_certificates_are_valid_and_checked(tmp_path: Path) -> None:
    split = pp.data.digits(prior_fraction=0.5, seed=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    pp.fit(model, split.prior, pp.Config(epochs=3, lr=0.05))
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.5))
    record = read(pp.certify_held_out(model, split, certified=2).save(tmp_path))
    assert refused(tmp_path) == ""
    rng = np.random.default_rng(0)
    for path in matching(record, f"(?!({TRUSTED}|split/sizes/unlabelled)$).*"):
        write(tmp_path, put(record, path, lambda value: other_number(value, rng)), digests=True)
        assert refused(tmp_path), path


# --- Changed certificates.


def test_a_thousand_changes_are_refused_by_their_digests(valid: Path, folder: Path) -> None:
    rng, record, changes, passed = np.random.default_rng(0), read(valid), 0, []
    paths = list(numbers(record))
    for changes in range(1, 501):
        path = paths[changes % len(paths)]
        write(folder, put(record, path, lambda value: other_number(value, rng)), digests=False)
        passed += [] if refused(folder) else [path]
    shutil.copy(valid / "certificate.json", folder)
    names = [f"{name}.safetensors" for name in FILES] + ["certificate.json"] * 2
    for changes in range(501, 1001):
        name = names[changes % len(names)]
        content = bytearray((valid / name).read_bytes())
        offset = int(rng.integers(len(content) if changes % 4 < 2 else 1000))  # half of them in the first 1000 bytes
        content[offset] ^= int(rng.integers(1, 256))
        (folder / name).write_bytes(content)
        passed += [] if refused(folder) else [(name, offset)]
        shutil.copy(valid / name, folder)
    assert (passed, changes, refused(folder)) == ([], 1000, "")


# What nothing that can be computed from the folder depends on: it takes the data to check it.
TRUSTED = (
    r"monte_carlo/tolerance|thresholded/errors|examples_seen|data/classes"
    r"|standardisation/(mean|std)/\d+|split/(seed|prior_fraction|duplicates|repeats|sizes/prior)"
)


def test_changed_numbers_are_refused_by_arithmetic_when_the_digests_are_made_to_fit(folder: Path) -> None:
    rng, record, changes, passed = np.random.default_rng(1), read(folder), 0, []
    for path in matching(record, f"(?!({TRUSTED})$).*") * 4:
        write(folder, put(record, path, lambda value: other_number(value, rng)), digests=True)
        passed += [] if refused(folder) else [path]
        changes += 1
    assert (passed, changes > 400) == ([], True)


def test_what_is_taken_on_trust_is_known(folder: Path) -> None:
    record = read(folder)
    paths = matching(record, TRUSTED)
    assert len(paths) >= 10
    for path in paths:
        write(folder, put(record, path, lambda x: x + 1 if isinstance(x, int) else x / 2), digests=True)
        assert refused(folder) == "", path


def test_changed_tensors_are_refused_by_arithmetic_when_the_digests_are_made_to_fit(valid: Path, folder: Path) -> None:
    """In some trials the hashes of P, Q and the rest are made to fit, too, with the seeds that follow from them."""
    rng, changes, passed = np.random.default_rng(2), 0, []
    for file in FILES:
        tensors = load_file(valid / f"{file}.safetensors")
        for trial in range(60):
            record, changed = read(valid), {key: t.clone() for key, t in tensors.items()}
            key = sorted(changed)[trial % len(changed)]
            flat = changed[key].view(-1)
            nonzero = torch.nonzero(flat).view(-1)
            position = nonzero[int(rng.integers(len(nonzero)))]
            half = flat[position] / 2 if re.search("keep_prob|std", key) else 0.5
            flat[position] += -half if flat.is_floating_point() else 1
            save_file(changed, folder / f"{file}.safetensors")
            if file == "distributions" and trial // len(changed) % 2:
                record = rehashed(record, changed)
            write(folder, record, digests=True)
            passed += [] if refused(folder) else [(key, int(position))]
            changes += 1
        shutil.copy(valid / f"{file}.safetensors", folder)
    assert (passed, changes) == ([], 240)


def rehashed(record: Record, tensors: dict[str, torch.Tensor]) -> Record:
    arrays, hashes = {key: t.numpy() for key, t in tensors.items()}, {}
    for whose, parts in (("prior", 3), ("posterior", 3), ("rest", 0)):
        prefixes = [f"{whose}/{part}/" for part in ("keep_prob", "mean", "std")[:parts]]
        hashes[whose] = arithmetic.tensor_hash(arrays, *prefixes, "rest/")
    changed = copy.deepcopy(record) | {"hashes": hashes}
    base = f"{hashes['prior']}/{hashes['posterior']}"
    for whose in ("posterior", "prior"):
        changed["monte_carlo"][whose]["seed"] = seed_of(base, f"{whose} draws")
    changed["single_draw"]["seed"] = seed_of(base, "single draw")
    changed["thresholded"]["seed"] = seed_of(base, "unlabelled draws")
    return changed


@pytest.mark.parametrize(
    ("paths", "change", "rule"),
    [
        ("n", lambda x: 2 * x, r"n is \d+, but the split has \d+ bound examples"),
        (
            "bounds/seeger/bound|claim/bound",
            lambda x: 0.9 * x,
            r"bounds\.seeger\.bound: .* is stated, .* is recomputed",
        ),
        ("n|split/sizes/bound|reference/errors|.*draw/errors", lambda x: 2 * x, r"bounds\.seeger\.bound"),
        ("bounds/.*/certified", lambda x: x + 1, r"assumptions are not in the words that this certificate must have"),
        ("bounds/.*/ledger/[dpmru].*", lambda x: 2 * x, r"monte_carlo\.posterior\.risk_upper"),
        ("bounds/[^/]*/ledger/pac_bayes", lambda x: x - 0.001, r"bounds\.\w+\.ledger\.pac_bayes"),
        ("kl|kl_per_tensor/.*", lambda x: x / 2, r"kl_per_tensor\.layers"),
        ("monte_carlo/posterior/risk.*", lambda x: x / 2, r"monte_carlo\.posterior\.risk"),
        ("sparsity|total", lambda x: x / 2 if x < 1 else 2 * x, r"total is \d+, but"),
        ("evaluation/augmentation", lambda x: not x, r"evaluation\.augmentation: True is stated, False"),
    ],
)
def test_lies_that_agree_with_each_other_are_refused_by_name(
    folder: Path, paths: str, change: Callable[[Any], Any], rule: str
) -> None:
    record = read(folder)
    for path in matching(record, paths):
        record = put(record, path, change)
    write(folder, record, digests=True)
    assert re.match(rule, refused(folder))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate under declared shares, which may be chosen among three."""
    shares = {"main": (2, 0.25), "rest": (30, 0.75)}
    return issued(tmp_path_factory.mktemp("shared"), shares=shares, group="main", certified=3)


def _without_shares(record: Record) -> None:
    """As version 2 had it."""
    record["version"] = 2
    record.pop("shares")
    for entry in record["bounds"].values():
        entry["ledger"].pop("share", None)


def _wider_group(record: Record) -> None:
    record["shares"]["groups"]["main"]["share"] = 0.5
    for entry in record["bounds"].values():
        entry["ledger"]["share"] = 0.25


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_wider_group, "the declared shares of delta add up to 1.25, but must be 1 or less"),
        (lambda r: r["shares"]["groups"].pop("main"), "shares.group is 'main', but must be one of"),
        (lambda r: r["shares"]["groups"]["rest"].update(share=0.0), "the group 'rest' has the impossible share 0.0"),
        (lambda r: r["shares"]["groups"]["main"].update(certificates=1), "monte_carlo."),
        (lambda r: r.update(shares=None), "monte_carlo."),
        (_without_shares, "monte_carlo."),
        (lambda r: r.update(version=2), "'shares' is a key that no certificate has"),
        (lambda r: r["bounds"]["seeger"]["ledger"].pop("share"), "bounds.seeger.ledger.'share' is missing"),
        (lambda r: r["bounds"]["seeger"]["ledger"].update(share=0.2), "bounds.seeger.ledger.share: 0.2 is stated"),
    ],
)
def test_shares_that_were_changed_are_refused(
    shared: Path, tmp_path: Path, change: Callable[[Record], Any], rule: str
) -> None:
    folder = shutil.copytree(shared, tmp_path / "changed")
    record = read(folder)
    change(record)
    record["assumptions"] = arithmetic.assumptions(record)
    write(folder, record, digests=True)
    assert refused(folder).startswith(rule)


def test_the_new_account_cannot_pass_for_the_old_one(tmp_path: Path) -> None:
    record = read(folder := issued(tmp_path, certified=3))
    assert refused(folder) == ""
    _without_shares(record)
    record["assumptions"] = arithmetic.assumptions(record)
    write(folder, record, digests=True)
    assert refused(folder).startswith("bounds.seeger.bound: ")


LEDGER = dict.fromkeys(("delta", "pac_bayes", "monte_carlo", "reference", "unlabelled"), 0.01) | {
    "grid": 1,
    "certified": 1,
    "share": 1.0,
}


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("claim/family", "held_out", "claim.family is 'held_out'"),
        ("statement", "With probability 1, the error rate is 0.", "statement: "),
        ("hashes/prior", "0" * 64, "hashes.prior: 0000"),
        ("bounds/another", {"bound": 0.0}, "bounds.another.'ledger' is missing"),
        ("bounds/another", {"bound": 0.0, "ledger": LEDGER}, "bounds are given for"),
        ("kind", "wish", "ValueError: certificate.json is of the kind 'wish'"),
        ("reference/errors", None, "reference.errors is None, which is no count"),
        ("reference/errors", True, "reference.errors is True, which is no count"),
        ("kl", "0.1", "kl is '0.1', which is no number"),
        ("kl", -1.0, "kl is -1.0, which is no number"),
        ("n", 10**400, "n is 10000"),
        ("split", [], "split is no table"),
        ("assumptions", {}, "assumptions is no list"),
    ],
)
def test_other_values_are_refused_by_name(folder: Path, path: str, value: Any, rule: str) -> None:
    write(folder, put(read(folder), tuple(path.split("/")), lambda _: value), digests=True)
    failure = refused(folder).replace(f"{folder}/", "")
    assert failure.startswith(rule)
    assert "\n" not in failure


# --- Files that cannot be read.


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("draws", lambda t: t.pop("prior/plus"), "prior/plus is missing from draws.safetensors"),
        ("draws", lambda t: t.update(another=torch.ones(1)), "another is unknown in draws.safetensors"),
        ("thresholded", lambda t: t.pop("layers.0.bias"), "layers.0.bias is missing from thresholded.safetensors"),
        ("distributions", lambda t: t.pop("rest/layers.0.bias"), "layers.0.bias is unknown in single_draw.safetensors"),
        ("distributions", lambda t: t["prior/mean/layers.0.weight"].fill_(math.nan), "holds NaN"),
    ],
)
def test_a_lost_tensor_or_a_nan_is_told_once_the_digests_fit(
    folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    tensors = load_file(folder / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{file}.safetensors")
    assert refused(folder).startswith(f"files.{file}.safetensors: ")
    write(folder, read(folder), digests=True)
    with pytest.raises(ValueError, match=re.escape(words)):
        verify(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("certificate.json", lambda c: c[:-100], "not valid JSON"),
        ("certificate.json", lambda c: c.replace(b'"kl": ', b'"kl": NaN, "x": '), "not valid JSON"),
        ("certificate.json", lambda c: b"[]", "is list, but this reads"),
        ("certificate.json", lambda c: c.replace(b'"version": 3', b'"version": 1'), "certificate', 1), but this reads"),
        ("certificate.json", None, "certificate.json"),
        ("draws.safetensors", None, "draws.safetensors"),
        ("draws.safetensors", lambda c: b"", "draws.safetensors cannot be read as safetensors"),
        ("draws.safetensors", lambda c: b"\xff" * 100, "draws.safetensors cannot be read as safetensors"),
        ("draws.safetensors", lambda c: c[: len(c) // 2], "draws.safetensors cannot be read as safetensors"),
        ("draws.safetensors", lambda c: c.replace(b'"I32"', b'"F32"', 1), "float32(200,), not finite 'i'(200,)"),
        ("draws.safetensors", lambda c: c.replace(b"[200]", b"[100]", 1), "draws.safetensors cannot be read"),
        (
            "single_draw.safetensors",
            lambda c: c.replace(b"[32,64]", b"[64,32]"),
            "float32(64, 32), not finite 'f'(32, 64)",
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(
    folder: Path, name: str, change: Callable[[bytes], bytes] | None, words: str
) -> None:
    content = (folder / name).read_bytes()
    (folder / name).unlink() if change is None else (folder / name).write_bytes(change(content))
    if name != "certificate.json":
        assert change is None or refused(folder).startswith(f"files.{name}: ")  # as long as the digests do not fit
        write(folder, read(folder), digests=True)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


# --- The arithmetic against that of the package, and the file by itself.


def test_the_arithmetic_agrees_with_that_of_the_package() -> None:
    rng = np.random.default_rng(3)
    for trial in range(100):
        n, risk = int(10 ** rng.uniform(0, 6)), float(rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(), 1.0]))
        kl, delta = float(rng.choice([0.0, 10 ** rng.uniform(-6, 4)])), float(10 ** rng.uniform(-6, -0.3))
        errors = int(rng.integers(n + 1)) if trial % 3 else min(n, trial // 3)
        seeger, paper, catoni = (f(risk, n=n, kl=kl, delta=delta) for f in (bounds.seeger, bounds.paper, bounds.catoni))
        expected = {"seeger": seeger, "paper": paper, "catoni": catoni, "vote": bounds.vote(seeger)}
        assert arithmetic.gibbs(risk, n, kl, delta) == pytest.approx(expected, rel=1e-9)
        exact = bounds.clopper_pearson(errors, n=n, delta=delta)
        assert 0 <= exact - arithmetic.clopper_pearson(errors, n, delta) + 1e-9 * exact <= 1e-7 * exact
        c = bounds.complexity(n, kl, delta)
        assert arithmetic.complexity(n, kl, delta) == pytest.approx(c, rel=1e-9)
        assert 1 - arithmetic.kl_inverse(1 - risk, c) == pytest.approx(bounds.kl_inverse_lower(risk, c), abs=1e-14)
        values = rng.binomial(25, risk, size=int(rng.integers(1, 2000))) / 25
        assert arithmetic.betting(values, delta) == pytest.approx(montecarlo.betting(values, delta=delta), rel=1e-9)


def test_tensors_of_all_types_are_read_and_hashed_as_the_package_does() -> None:
    state = {"half": torch.randn(3, 2).half(), "brain": torch.randn(5).bfloat16(), "double": torch.randn(()).double()}
    state |= {"count": torch.tensor(7), "bytes": torch.arange(9).byte(), "flags": torch.tensor([True, False])}
    state |= {"small": torch.arange(3).int(), "none": torch.zeros(0, 4), "plain": torch.randn(2, 3, 4)}
    arrays = arithmetic.read_tensors(save(state))
    assert arithmetic.tensor_hash(arrays, "") == certify.tensor_hash(state)
    for name, tensor in state.items():
        expected = tensor.float() if name == "brain" else tensor
        assert np.array_equal(arithmetic._values(arrays[name]), expected.numpy())


def test_the_file_needs_numpy_alone_and_runs_by_itself(valid: Path, folder: Path, tmp_path: Path) -> None:
    nodes = list(ast.walk(ast.parse(Path(arithmetic.__file__).read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [f"{'.' * node.level}{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"numpy"}

    lone = shutil.copy(arithmetic.__file__, tmp_path / "lone.py")
    write(folder, put(read(folder), ("kl",), lambda kl: 2 * kl), digests=False)
    for path, code, words in (
        (valid, 0, "VALID"),
        (folder, 1, "INVALID: digest: "),
        (tmp_path, 2, f"{tmp_path} is no"),
    ):
        process = subprocess.run([sys.executable, "-I", lone, path], capture_output=True, text=True, check=False)
        assert process.returncode == code
        assert (process.stdout + process.stderr).splitlines()[-1].startswith(words)
    for words, code in (("--help", 0), ("-h", 0), ("", 2)):
        process = subprocess.run([sys.executable, arithmetic.__file__, *words.split()], capture_output=True, text=True)
        assert (process.returncode, process.stdout.splitlines()[0]) == (code, "usage: python verify.py FOLDER")


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.01, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("size", [56, 1000, 100_000])
def test_a_mask_is_coded_by_its_gaps_in_few_bits(size: int, density: float) -> None:
    mask = np.zeros(size, bool)
    kept = np.random.default_rng(0).choice(size, int(density * size), replace=False)
    mask[kept] = True
    code = mask_gaps(mask)
    assert code == mutations.rice_code(np.flatnonzero(mask).tolist(), code[0])
    choices = math.lgamma(size + 1) - math.lgamma(len(kept) + 1) - math.lgamma(size - len(kept) + 1)
    assert len(code) <= 1.03 * choices / math.log(2) / 8 + 9  # six bytes of numbers, and up to two that are not full
    if len(code) < size / 8:
        assert np.array_equal(arithmetic.mask_of_gaps(np.frombuffer(code, np.uint8), size), mask)


def test_what_is_almost_all_zero_is_packed_as_bits() -> None:
    """By its gaps it would be so small that a verifier has to take it for a trap."""
    tensors = {"model.safetensors": {"w": torch.zeros(3000, 3000)}}
    content = certificate.pack(tensors)
    assert len(content) > 3000 * 3000 / 8
    assert not arithmetic.unpack(content, ("model",))["model"]["w"].any()
