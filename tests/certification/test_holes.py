"""Attacks on certificates that worked once: each is a test by its name, and none works any more.

Most forgeries here have digests that fit, as those of an issuer who writes whatever he likes.
"""

import copy
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_audit import Record, Tensors, check, consistent, forged
from test_certify import FAST, certify_again, digits, issued, ledger, network, prior_of, seed_of  # noqa: F401
from test_verify import read, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typer.testing import CliRunner

import pacprune as pp
from pacprune import bounds
from pacprune.certification import audit, certificate, decode, drawn_networks, rules
from pacprune.cli import app
from pacprune.data import trace
from pacprune.data.splits import Split
from pacprune.masking.spikeslab import log_ratio

DECLARED = "the weights were trained on other data than these"
LEVELS: tuple[dict[str, Any], ...] = ({}, {"recount": True}, {"replay": True, "draws": 300})
"""Options of a verification of each level, for `verdict_of`."""


def verdict_of(folder: Path, **options: Any) -> str:
    """The verdict of a level, or why the folder cannot be read."""
    try:
        return (check(folder, **options) if options else pp.verify(folder)).verdict
    except ValueError as error:
        return f"unreadable: {error}"


def refuse_everywhere(folder: Path, words: str) -> None:
    """Whatever the level, the folder is refused with these words, and quickly."""
    begin = time.process_time()
    for options in LEVELS:
        verdict = verdict_of(folder, **options)
        assert not verdict.startswith("VALID")
        assert words in verdict
        assert verdict.isprintable()
    assert time.process_time() - begin < 10


def rewritten(folder: Path, change: Callable[[Record], None]) -> Path:
    """The folder with its record changed in place and all digests made to fit."""
    record = read(folder)
    change(record)
    write(folder, record, digests=True)
    return folder


def called(*words: str) -> SimpleNamespace:
    """What the command line answers."""
    result = CliRunner().invoke(app.build(), list(words), prog_name="pacprune")
    return SimpleNamespace(code=result.exit_code, text=result.stdout + result.stderr, stdout=result.stdout)


@cache
def held_out() -> pp.Certificate:
    trace._looks.clear()
    model = network()
    pp.fit(model, digits().prior, pp.Config(epochs=2, lr=0.2))
    return pp.certify_held_out(model, digits())


# --- 1. Two readers.


def memorised_files(folder: Path) -> dict[str, str]:
    """The files of another certificate, of a network that has seen the bound set, written beside; SHA-256 by name."""
    record, tensors = copy.deepcopy(issued().cert.record), {f: dict(t) for f, t in issued().cert.tensors.items()}
    for name in ("1.weight", "4.weight"):
        for file in ("single_draw", "thresholded"):
            tensors[f"{file}.safetensors"][name] = 2 * tensors[f"{file}.safetensors"][name]
    place = pp.Certificate(record, tensors).save(folder / "other")
    files = read(place)["files"]
    for name in files:
        (place / name).rename(folder / name)
    return files


def test_packed_files_and_others_beside_them_are_refused(tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path, packed=True)
    others = memorised_files(folder)
    refuse_everywhere(rewritten(folder, lambda record: record["files"].update(others)), "files are ['packed.")


def test_a_file_that_no_certificate_has_is_refused(tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path)
    save_file({"1.weight": torch.zeros(16, 64)}, folder / "override.safetensors")
    others = {"override.safetensors": "0" * 64}
    refuse_everywhere(rewritten(folder, lambda record: record["files"].update(others)), "but must be ['distributions.")


def test_files_that_are_not_named_are_not_read(tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path, packed=True)
    memorised_files(folder)
    for options in LEVELS:
        assert verdict_of(folder, **options).startswith("VALID")
    loaded, stated = decode.load(folder).tensors, issued().cert.tensors
    assert all(torch.equal(t, stated[file][name]) for file in stated for name, t in loaded[file].items())


def test_every_file_that_is_read_is_hashed(tmp_path: Path) -> None:
    for packed in (True, False):
        folder = issued().cert.save(tmp_path / str(packed), packed=packed)
        for path in folder.glob("*.safetensors"):
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            refuse_everywhere(folder, f"files.{path.name}: ")
            path.write_bytes(content)


# --- 2. Two decoders.


def reindexed(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """A packed folder whose index and blobs are changed, all digests made to fit."""
    path = folder / "packed.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    index, blobs = json.loads(header["__metadata__"]["index"]), load_file(path)
    change(index, blobs)
    path.write_bytes(save(blobs, metadata={"index": json.dumps(index)}))
    return rewritten(folder, lambda record: None)


def test_a_tensor_that_is_masked_twice_is_refused(tmp_path: Path) -> None:
    def twice(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        name, entry = next((n, e) for n, e in index["model.safetensors"].items() if len(e[1]) == 2)
        size = math.prod(entry[1])
        bits = torch.from_numpy(np.packbits(np.ones(size, bool)))
        blobs |= {"first": bits, "second": torch.zeros_like(bits)}
        values = torch.cat([torch.zeros(1), blobs[entry[2]]])
        blobs |= {"masked": values}
        del blobs[entry[2]]
        index["model.safetensors"][name] = [*entry[:2], "masked", "first", "second"]

    folder = held_out().save(tmp_path, packed=True)
    refuse_everywhere(reindexed(folder, twice), "packed.safetensors cannot be read")


MASK = torch.arange(1024) % 97 == 5
CODE = mutations.rice_code(MASK.nonzero().flatten().tolist(), 6)
WRONG_CODES = {
    "empty": b"",
    "cut within its numbers": CODE[:5],
    "cut": CODE[:-1],
    "longer than it needs": CODE + b"\x00",
    "a gap too many": CODE + b"\x80",
    "another number of gaps": CODE[:1] + b"\x0c" + CODE[2:],
    "no gaps": CODE[:1] + b"\x00" * 5 + CODE[6:],
    "more gaps than bytes": CODE[:1] + b"\xff" * 5 + CODE[6:],
    "gaps of another width": b"\x05" + CODE[1:],
    "gaps beyond the end": b"\x08" + mutations.rice_code([5, 300, 1024], 8)[1:],
    "gaps beyond any number": b"\x28" + mutations.rice_code([0] * 8 + [2**45], 40)[1:],
    "gaps that are no numbers": b"\xff" + CODE[1:],
    "bits behind the low ones": mutations.rice_code([9, 20, 700], 6)[:8]
    + b"\x01"
    + mutations.rice_code([9, 20, 700], 6)[9:],
    "as long as its bits": mutations.rice_code(list(range(0, 1024, 2)), 1),
}


def by_gaps(code: bytes, *mask: str | None) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """A change after which a weight has two values, and its mask is in this code."""

    def change(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        name, entry = next((n, e) for n, e in index["model.safetensors"].items() if e[1] == [16, 64])
        del blobs[entry[2]]
        blobs |= {"two": torch.tensor([0.0, 0.5]), "gaps": torch.tensor(list(code), dtype=torch.uint8)}
        blobs |= {"bits": torch.from_numpy(np.packbits(MASK.numpy()))} if "bits" in mask else {}
        index["model.safetensors"][name] = [*entry[:2], "two", *mask]

    return change


@pytest.mark.parametrize("kind", WRONG_CODES)
def test_a_mask_in_a_wrong_code_is_refused(tmp_path: Path, kind: str) -> None:
    folder = reindexed(held_out().save(tmp_path, packed=True), by_gaps(WRONG_CODES[kind], None, "gaps"))
    refuse_everywhere(folder, "packed.safetensors cannot be read")


@pytest.mark.parametrize("mask", [("bits", "gaps"), ("gaps",), ("gaps", "gaps"), ("gaps", None), (None, None, "gaps")])
def test_a_mask_has_one_code_that_its_place_tells(tmp_path: Path, mask: tuple[str | None, ...]) -> None:
    refuse_everywhere(
        reindexed(held_out().save(tmp_path, packed=True), by_gaps(CODE, *mask)), "packed.safetensors cannot be read"
    )


def test_every_reader_finds_the_same_mask_in_a_code(tmp_path: Path) -> None:
    folder = reindexed(held_out().save(tmp_path, packed=True), by_gaps(CODE, None, "gaps"))
    (weight,) = (t for t in decode.load(folder).tensors["model.safetensors"].values() if t.shape == (16, 64))
    assert torch.equal(weight, 0.5 * MASK.reshape(16, 64))
    assert verdict_of(folder).startswith("INVALID: hashes.model: ")


@pytest.mark.parametrize("dtype", ["S2000000000", "complex64", "O", "float8_e4m3fn", "<f4", ""])
def test_a_dtype_outside_the_whitelist_is_refused(tmp_path: Path, dtype: str) -> None:
    def other_type(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        next(iter(index["model.safetensors"].values()))[0] = dtype

    refuse_everywhere(reindexed(held_out().save(tmp_path / "packed", packed=True), other_type), "cannot be read")
    folder = held_out().save(tmp_path / "plain")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    changed = header.replace(b'"F32"', json.dumps(dtype).encode(), 1)
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + len(header) :])
    refuse_everywhere(rewritten(folder, lambda record: None), "model.safetensors cannot be read")


def test_a_sparsity_that_no_weight_has_is_refused_at_level_two(tmp_path: Path) -> None:
    """A whole buffer could be a weight as far as the file tells; the model knows better."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(64, 10)
            self.register_buffer("table", torch.zeros(30, 20))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.flatten(1))

    split, model = digits(), Buffered()
    pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
    cert = pp.certify_held_out(model, split)

    assert "(that 600 of 1240 numbers in two or more dimensions are buffers is the issuer's word)" in str(
        pp.verify(cert.save(tmp_path / "honest"))
    )

    def sparse(total: int, record: Record, tensors: Tensors) -> None:
        record["sparsity"], record["total"] = 600 / total, total
        record["statement"] = record["statement"].replace("sparsity 0.0000", f"sparsity {600 / total:.4f}")

    failure = str(pp.verify(forged(tmp_path / "mixed", partial(sparse, 640), cert)).failure)
    assert failure == "no choice of the network's tensors holds 640 numbers, 600 of which are zero"
    folder = forged(tmp_path / "other", partial(sparse, 600), cert)
    assert "sparsity 1.0000" in decode.load(folder).statement
    assert pp.verify(folder).valid
    failure = str(pp.verify(folder, split=split, model=model).failure)
    assert failure.startswith("recount: the certificate is about 600 weights, but the model has 640")


def test_a_total_that_no_tensors_have_is_refused(tmp_path: Path) -> None:
    """Any total passed, so that a network with 30 % zeros was called one of sparsity 1.0000."""
    model = pp.apply_mask(network(), pp.top_k(pp.scores.magnitude(network()), sparsity=0.3))
    cert = pp.certify_held_out(model, digits(), declare=DECLARED)

    def little(record: Record, tensors: Tensors) -> None:
        record["statement"] = re.sub("sparsity [0-9.]+[)]", "sparsity 1.0000)", record["statement"])
        record["sparsity"], record["total"] = 1.0, 100

    folder = forged(tmp_path, little, cert)
    assert "no choice of the network's tensors holds 100 numbers" in str(pp.verify(folder).failure)
    assert "no choice of the network's tensors holds 100 numbers" in mutations.arithmetic.verify(folder).verdict


# --- 3. Shaved draws.


def shave(count: int, record: Record, tensors: Tensors) -> None:
    """One error less in so many draws of Q."""
    draws = tensors["draws.safetensors"]
    changed = {key: draws[f"posterior/{key}"].clone() for key in ("wrong", "plus")}
    places = (changed["plus"] > 0).nonzero().flatten()[:count]
    assert len(places) == count
    for key, tensor in changed.items():
        tensor[places] -= 1
        draws[f"posterior/{key}"] = tensor
    consistent(record, tensors)


@pytest.mark.parametrize("count", [1, 75])
def test_draws_with_one_percent_fewer_errors_are_refused_at_level_three(count: int, tmp_path: Path) -> None:
    """75 examples are 1 % of the 7,500 that the draws were tried on."""
    folder = forged(tmp_path, partial(shave, count))
    assert decode.load(folder).bound < issued().cert.bound
    assert pp.verify(folder).valid
    assert check(folder).valid
    report = check(folder, replay=True, draws=300)
    assert not report.valid
    assert str(report.failure).startswith("replay: draw ")
    assert "(0 of its answers could be turned by rounding)" in str(report.failure)


def test_a_few_disagreements_that_are_kept_quiet_are_refused_at_level_three(tmp_path: Path) -> None:
    disagreements = issued().cert.pac_bayes["thresholded"]["disagreements"]
    assert 0 < disagreements < 10

    def agree(record: Record, tensors: Tensors) -> None:
        record["thresholded"]["disagreements"] = 0
        consistent(record, tensors)

    folder = forged(tmp_path, agree)
    assert check(folder).valid
    failure = str(check(folder, replay=True, draws=5).failure)
    assert failure.startswith(f"replay: the draws disagree with the thresholded network on {disagreements} of 150")


def test_the_rounding_of_another_machine_is_no_fraud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outputs = issued().cert.save(tmp_path), drawn_networks.outputs

    def rounded_otherwise(*args: Any, **options: Any) -> Tensor:
        exact = outputs(*args, **options)
        return exact * (1 + 2e-7 * torch.randn_like(exact))

    monkeypatch.setattr(drawn_networks, "outputs", rounded_otherwise)
    report = check(folder, replay=True, draws=300)
    assert report.valid, report.failure


def test_an_answer_of_the_reference_that_rounding_turns_is_no_fraud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes what many draws are compared with, though none of theirs."""
    split, folder, errors = digits(), issued().cert.save(tmp_path), drawn_networks.errors
    turned, others = split.bound.x[7], split.bound.x[:7]

    def other_errors(plain: nn.Module, weights: dict[str, Tensor], part: pp.data.Part) -> Tensor:
        wrong = errors(plain, weights, part)
        wrong[7] ^= part.name == "bound" and all(torch.equal(weights[name], w) for name, w in reference.items())
        return wrong

    def close_calls(plain: nn.Module, networks: dict[str, Tensor], x: Tensor) -> Tensor:
        fixed = all(torch.equal(networks[name], w) for name, w in reference.items())
        return (x == examples).flatten(1).all(1) & fixed if x.ndim == 4 else torch.zeros(x.shape[:2], dtype=torch.bool)

    reference, examples = drawn_networks.thresholded(issued().prior), turned
    monkeypatch.setattr(drawn_networks, "errors", other_errors)
    assert str(check(folder).failure).startswith("recount: the reference network makes ")
    monkeypatch.setattr(drawn_networks, "close_calls", close_calls)
    report = check(folder, replay=True, draws=300)
    assert report.valid, report.failure
    examples = others[0]
    monkeypatch.setattr(audit._Audit, "recount_failure", lambda self: None)
    assert str(check(folder, replay=True, draws=300).failure).startswith("replay: draw ")


def drowned() -> tuple[Split, nn.Module]:
    """A good network whose answers float32 cannot tell apart, since a large number is added to all of them."""
    split, model = digits(test=digits().test.subset(torch.arange(0))), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    pp.fit(model, split.prior, pp.Config(epochs=5, lr=0.2))
    with torch.no_grad():
        model[1].bias.fill_(1e9)
    return split, model


def test_errors_that_hang_on_rounding_alone_are_refused_at_level_two(tmp_path: Path) -> None:
    """In float64 this network is good, in float32 it answers one class: the tolerance must not hide that."""
    split, model = drowned()
    cert = pp.certify_held_out(model, split, declare="its bias was made large after training on split.prior")
    exact = copy.deepcopy(model).double()
    errors = int((exact(split.bound.x.double()).argmax(1) != split.bound.y).sum())
    assert errors + 300 < cert.record["reference"]["errors"]

    def as_in_float64(record: Record, tensors: Tensors) -> None:
        record["reference"]["errors"] = errors
        bound = bounds.clopper_pearson(errors, n=record["n"], delta=0.05)
        record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = bound
        head, tail = record["statement"].split("is at most ")
        record["statement"] = f"{head}is at most {certificate.rounded_up(bound)}{tail[6:]}"

    folder = forged(tmp_path, as_in_float64, cert)
    assert pp.verify(folder).valid
    report = pp.verify(folder, split=split, model=model)
    assert not report.valid
    assert str(report.failure).startswith("recount: ")


# --- 4. Unchecked fields.


@pytest.mark.parametrize("wording", [["none"], [], None, 3, ["the moon is made of cheese"]])
def test_other_assumptions_are_refused(wording: Any, tmp_path: Path) -> None:
    for name, cert in (("random", issued().cert), ("held-out", held_out())):
        folder = rewritten(cert.save(tmp_path / name), lambda record: record.update(assumptions=wording))
        verdict = verdict_of(folder)
        assert verdict.startswith("INVALID: assumptions ")


def test_one_assumption_less_is_refused(tmp_path: Path) -> None:
    for i in range(len(issued().cert.record["assumptions"])):
        folder = rewritten(issued().cert.save(tmp_path), lambda record, i=i: record["assumptions"].pop(i))
        assert "assumptions are not in the words" in verdict_of(folder)


def tables(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all tables in a record."""
    if not isinstance(value, dict):
        return []
    return [path] + [inner for key, child in value.items() for inner in tables(child, (*path, key))]


@pytest.mark.parametrize("kind", ["random", "held-out"])
def test_an_unknown_key_is_refused_at_every_depth(kind: str, tmp_path: Path) -> None:
    folder = (issued().cert if kind == "random" else held_out()).save(tmp_path)
    record = read(folder)
    paths = tables(record)
    assert len(paths) > 10
    for path in paths:
        changed = copy.deepcopy(record)
        inside(changed, path)["error at most 0.0001"] = 0.0001
        write(folder, changed, digests=True)
        verdict = verdict_of(folder)
        assert verdict.startswith(("INVALID: ", "unreadable: ")), path
        assert "error at most 0.0001" in verdict, path


@pytest.mark.parametrize("kind", ["random", "held-out"])
def test_a_missing_key_is_refused_at_every_depth(kind: str, tmp_path: Path) -> None:
    folder = (issued().cert if kind == "random" else held_out()).save(tmp_path)
    record, count = read(folder), 0
    for path in tables(record):
        for key in inside(record, path):
            if (*path, key)[:2] == ("data", "files") or (*path, key) == ("files",):
                continue  # files have names of the issuer's own; without their hashes nothing can be written here
            if path == ("bounds",) and key not in ("held_out", record["claim"]["family"]):
                continue  # a certificate may state fewer bounds
            changed = copy.deepcopy(record)
            del inside(changed, path)[key]
            write(folder, changed, digests=(*path, key) != ("digest",))
            assert not verdict_of(folder).startswith("VALID"), (*path, key)
            count += 1
    assert count > 50


def inside(record: Any, path: tuple[str, ...]) -> dict[str, Any]:
    """The table at a path."""
    for key in path:
        record = record[key]
    return record


@pytest.mark.parametrize("software", [{}, {"pacprune": 1, "torch": "2"}, {"pacprune": ["1"], "torch": "2"}, "pacprune"])
def test_software_of_another_type_is_refused(software: Any, tmp_path: Path) -> None:
    folder = rewritten(issued().cert.save(tmp_path), lambda record: record.update(software=software))
    assert verdict_of(folder).startswith("INVALID: software")


def with_grid(grid: int, record: Record, tensors: Tensors) -> None:
    """Everything as if so many priors had been paid for, but the assumptions."""
    for entry in record["bounds"].values():
        entry["ledger"]["grid"] = grid
    consistent(record, tensors)


def test_a_grid_that_is_no_longer_paid_for_is_refused_or_said(tmp_path: Path) -> None:
    cert = certify_again(grid=552)

    def said(record: Record, tensors: Tensors) -> None:
        with_grid(1, record, tensors)
        record["assumptions"] = [line.replace("grid 552", "grid 1") for line in record["assumptions"]]

    assert "assumptions are not in the words" in verdict_of(forged(tmp_path / "quiet", partial(with_grid, 1), cert))
    report = pp.verify(forged(tmp_path / "said", said, cert))
    assert report.valid  # nobody can count what an issuer tried
    line = "no more was tried on these bound examples than the ledger pays for (grid 1, certified 1)"
    assert any(trusted.startswith(line) for trusted in report.trusted)
    assert f"on trust: {line}" in str(report)


@cache
def sealed_run() -> SimpleNamespace:
    """A certificate under a commitment, and what it was made from."""
    trace._looks.clear()
    split = digits()
    model, prior = prior_of(split)
    first = pp.commit(prior, split, grid=3, **FAST)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.1))
    second = first.sealed(model)
    cert = pp.certify(model, prior, split, grid=3, commitment=second, beacon="7777777777779f2c", **FAST)
    return SimpleNamespace(split=split, model=model, prior=prior, first=first, second=second, cert=cert)


def test_what_was_sealed_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    def no_grid(record: Record, tensors: Tensors) -> None:
        statement = record["statement"]
        with_grid(1, record, tensors)
        tail = statement[statement.index(" The draws follow") :]
        record["statement"] = (
            f"{statement.split('is at most')[0]}is at most {certificate.rounded_up(record['claim']['bound'])}.{tail}"
        )
        record["assumptions"] = [line.replace("grid 3", "grid 1") for line in record["assumptions"]]

    def new_plan(record: Record, tensors: Tensors) -> None:
        no_grid(record, tensors)
        plan = record["commitment"]["plan"] | {"grid": 1}
        other = dataclasses.replace(sealed_run().second, plan=plan)
        record["commitment"] = other.record(record["commitment"]["beacon"])
        tail = f" The draws follow from the commitment {other.digest[:12]} and a later beacon."
        record["statement"] = record["statement"].split(" The draws follow")[0] + tail

    def family(record: Record, tensors: Tensors) -> None:
        record["claim"] = {"family": "catoni", "bound": record["bounds"]["catoni"]["bound"]}

    def constant(record: Record, tensors: Tensors) -> None:
        record["catoni_c"] = 1.0

    cert = sealed_run().cert
    for name, change, words in (
        ("grid", no_grid, "the commitment's plan has grid 3, but 1 was done"),
        ("plan", new_plan, "is stated"),  # other seals are other draws
        ("family", family, "the commitment's plan has family seeger, but catoni was done"),
        ("constant", constant, "the commitment's plan has catoni_c None, but 1.0 was done"),
    ):
        verdict = verdict_of(forged(tmp_path / name, change, cert))
        assert verdict.startswith("INVALID: ")
        assert words in verdict


def test_a_family_or_a_constant_that_nobody_sealed_is_on_trust(tmp_path: Path) -> None:
    def best(record: Record, tensors: Tensors) -> None:
        record["catoni_c"] = 2.0
        consistent(record, tensors)
        bound = record["bounds"]["catoni"]["bound"]
        record["claim"] = {"family": "catoni", "bound": bound}
        record["statement"] = record["statement"].rsplit(" ", 1)[0] + f" {certificate.rounded_up(bound)}."

    report = pp.verify(forged(tmp_path, best))
    assert report.valid  # nobody can know what an issuer declared
    line = "bound family, Monte-Carlo method, most draws and Catoni's constant were declared before they were used"
    assert f"{line}, and are the same for all posteriors of this prior" in report.trusted
    sealed = pp.verify(sealed_run().cert.save(tmp_path / "sealed"))
    assert sealed.valid, sealed.failure
    assert line not in sealed.trusted


# --- 5. The verdict says its level.


def test_the_verdict_names_its_level_in_text_and_in_json(tmp_path: Path) -> None:
    split, model = pp.data.digits(prior_fraction=0.5, seed=0), pp.models.build("mlp", pp.data.digits())
    pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
    folder = pp.certify_held_out(model, split, name="mlp").save(tmp_path)
    for level, words in enumerate(([], ["--recount"]), start=1):
        text, answer = called("verify", str(folder), *words), called("verify", str(folder), *words, "--json")
        assert (text.code, answer.code) == (0, 0)
        report, verdict = json.loads(answer.stdout), f"VALID (level {level}: "
        assert report["verdict"].startswith(verdict)
        assert report["level"] == level
        assert verdict in " ".join(text.stdout.split())
    assert pp.verify(folder).verdict == "VALID (level 1: the arithmetic follows from the stated counts)"
    rewritten(folder, lambda record: record["claim"].update(bound=0.001))
    text, answer = called("verify", str(folder)), called("verify", str(folder), "--json")
    assert (text.code, answer.code) == (1, 1)
    assert json.loads(answer.stdout)["verdict"].startswith("INVALID: claim.bound: 0.001 is stated")


def test_the_file_alone_names_its_level(tmp_path: Path) -> None:
    folder = held_out().save(tmp_path)
    script = Path(certificate.__file__).with_name("verify.py")
    process = subprocess.run([sys.executable, "-I", script, folder], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "VALID (level 1: the arithmetic follows from the stated counts)"


# --- 6. The test part.


@cache
def random_labels() -> Split:
    """Images whose labels are random numbers: whatever errs on fewer than nine of ten new ones has seen them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 1, 8, 8, generator=generator)
    return pp.data.split(x, torch.randint(10, (500,), generator=generator), test=0.5, prior_fraction=0.2)


def memoriser() -> nn.Module:
    """A network that knows all bound examples by heart, and nothing else."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    pp.fit(model, (random_labels().bound.x, random_labels().bound.y), pp.Config(epochs=60, lr=0.1, batch_size=20))
    return model


@cache
def memorised() -> SimpleNamespace:
    """Certificates that no honest issuer can make: of a memoriser, and of a Q around it."""
    split = random_labels()
    with pytest.MonkeyPatch.context() as patch:
        for rule in ("refuse_untraced", "refuse_if_touched", "refuse_chosen"):
            patch.setattr(rules, rule, lambda *args: None)
        patch.setattr("pacprune.training.posterior.refuse_if_touched", lambda *args: None)
        model = memoriser()
        plain = copy.deepcopy(model)
        fixed = pp.certify_held_out(model, split)
        pp.attach(model, pp.isotropic(model, sparsity=0.01, std=1e-4))
        prior = pp.read(model)
        pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
        return SimpleNamespace(plain=plain, fixed=fixed, random=pp.certify(model, prior, split, **FAST))


@pytest.mark.parametrize("kind", ["fixed", "random"])
@pytest.mark.parametrize("options", [{}, {"replay": True, "draws": 100}])
def test_a_network_that_learnt_the_bound_set_by_heart_is_refuted_by_the_test_set(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    cert = getattr(memorised(), kind)
    assert cert.bound < 0.3
    folder = cert.save(tmp_path)
    assert pp.verify(folder).valid
    report = pp.verify(folder, split=random_labels(), model=memorised().plain, **options)
    assert not report.valid
    assert str(report.failure).startswith("refuted by the test set: ")


def test_a_claim_that_draws_from_q_alone_break_is_refuted_by_the_test_set(tmp_path: Path) -> None:
    cert = memorised().random

    def only_the_claim(record: Record, tensors: Tensors) -> None:
        """Fixed networks are stated so badly that the test set does not refute them."""
        for name in ("reference", "single_draw", "thresholded"):
            record[name]["errors"] = record["n"] - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit._Audit, "_errors_failure", lambda self: None)
        patch.setattr(audit.arithmetic, "check", lambda contents, seals: audit.Report(True, 1, (), None))

        def loose(record: Record, tensors: Tensors) -> None:
            only_the_claim(record, tensors)
            for name in ("held_out", "single_draw"):
                record["bounds"][name]["bound"] = 1.0

        folder = forged(tmp_path, loose, cert)
        report = pp.verify(folder, split=random_labels(), model=memorised().plain)
    assert str(report.failure).startswith("refuted by the test set: a network drawn from Q errs on ")


def test_a_true_claim_is_not_refuted(tmp_path: Path) -> None:
    report = check(issued().cert.save(tmp_path))
    assert report.valid
    assert "360 test examples do not refute the claim" in report.checks


# --- 7. Fishing.


def seeds(record: Any) -> list[int]:
    return [
        record["monte_carlo"]["posterior"]["seed"],
        record["monte_carlo"]["prior"]["seed"],
        record["single_draw"]["seed"],
        record["thresholded"]["seed"],
    ]


def certify_sealed(**changed: Any) -> pp.Certificate:
    run = sealed_run()
    arguments = {"commitment": run.second, "beacon": "7777777777779f2c", "grid": 3} | FAST | changed
    model, prior, split = (arguments.pop(name, getattr(run, name)) for name in ("model", "prior", "split"))
    return pp.certify(model, prior, split, **arguments)


def moved() -> nn.Module:
    """The same Q but for one weight, moved by a millionth."""
    model = copy.deepcopy(sealed_run().model)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "original" in n and p.ndim > 1).view(-1)[0] += 1e-6
    return model


def test_without_a_commitment_a_moved_weight_is_another_draw_and_that_is_said() -> None:
    run = sealed_run()
    certs = [pp.certify(model, run.prior, run.split, grid=3, **FAST) for model in (run.model, moved())]
    assert not set(seeds(certs[0].record)) & set(seeds(certs[1].record))
    for cert in certs:
        assert any("Q was not changed because of its draws" in line for line in cert.record["assumptions"])


def test_under_a_commitment_no_seed_follows_from_q_alone() -> None:
    run = sealed_run()
    again, later = certify_sealed(), certify_sealed(beacon="88888888888877aa")
    assert again.record == run.cert.record
    assert not set(seeds(run.cert.record)) & set(seeds(later.record))
    base = f"{run.second.seal}/7777777777779f2c"
    purposes = ("posterior draws", "prior draws", "single draw", "unlabelled draws")
    assert seeds(run.cert.record) == [seed_of(base, purpose) for purpose in purposes]
    assert not any("seed" in key for key in (*run.first.plan, *vars(run.first)))
    assert not any("Q was not changed" in line for line in run.cert.record["assumptions"])
    assert any("no second Q was sealed under it" in line for line in run.cert.record["assumptions"])
    assert f"The draws follow from the commitment {run.first.digest[:12]} and a later beacon." in run.cert.statement


def test_a_q_that_was_changed_after_its_seal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the commitment has sealed another posterior"):
        certify_sealed(model=moved())
    with pytest.raises(ValueError, match="has sealed a Q already; a second one would be a second try"):
        sealed_run().second.sealed(moved())
    other = sealed_run().first.sealed(moved())
    assert other.digest == sealed_run().second.digest
    assert other.seal != sealed_run().second.seal
    folder = certify_sealed(model=moved(), commitment=other).save(tmp_path)
    assert pp.verify(folder, seals=(other.digest,)).valid
    failure = str(pp.verify(folder, seals=(other.digest, sealed_run().second.seal)).failure)
    assert failure == f"the certificate was not made under the published seal {sealed_run().second.seal}"


@pytest.mark.parametrize("changed", [{"grid": 1}, {"delta": 0.1}, {"draws": 200}, {"family": "catoni"}])
def test_another_plan_than_the_sealed_one_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the commitment has sealed another {next(iter(changed))} of the plan"):
        certify_sealed(**changed)


def test_draws_that_were_broken_off_at_the_best_moment_are_refused(tmp_path: Path) -> None:
    """Chernoff's bound holds for a number of draws that was fixed beforehand; betting may stop at any time."""
    run, monte_carlo = sealed_run(), drawn_networks.monte_carlo

    def broken_off(*args: Any, **options: Any) -> drawn_networks.Counts:
        return monte_carlo(*args, **options | {"draws": 200})

    for method, words in (("betting", "VALID"), ("chernoff", "INVALID: the commitment's plan has 300 draws, but 200")):
        commitment = pp.commit(run.prior, run.split, method=method, **FAST).sealed(run.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawn_networks, "monte_carlo", broken_off)
            cert = certify_sealed(grid=1, method=method, commitment=commitment)
        assert cert.draws == 200
        assert verdict_of(cert.save(tmp_path / method)).startswith(words)
        assert verdict_of(certify_sealed(grid=1, method=method, commitment=commitment).save(tmp_path)).startswith(
            "VALID"
        )


def test_a_commitment_needs_a_second_seal_and_a_beacon() -> None:
    run = sealed_run()
    with pytest.raises(ValueError, match="a commitment and a beacon come together"):
        certify_sealed(beacon=None)
    with pytest.raises(ValueError, match="a commitment and a beacon come together"):
        certify_sealed(commitment=None)
    with pytest.raises(ValueError, match="the commitment has sealed another posterior"):
        certify_sealed(commitment=run.first)
    for beacon in ("", "  ", "\x1b[2J", "9" * 513):
        with pytest.raises(ValueError, match="as 16 or more hexadecimal digits"):
            certify_sealed(beacon=beacon)


def test_published_seals_are_checked_at_every_level(tmp_path: Path) -> None:
    run = sealed_run()
    folder, published = run.cert.save(tmp_path / "sealed"), (run.second.digest, run.second.seal)
    unsealed = issued().cert.save(tmp_path / "unsealed")
    for options in LEVELS:
        report = check(folder, seals=published, **options)
        assert report.valid, report.failure
        assert sum("the published seal" in line for line in report.checks) == 2
        for place, seal in ((folder, "0" * 64), (unsealed, run.second.seal), (folder, "")):
            failure = str(check(place, seals=(seal,), **options).failure)
            assert failure.startswith("the certificate was not made under the published seal")


@pytest.mark.parametrize("key", ["digest", "seal", "beacon"])
def test_a_changed_seal_or_beacon_is_refused(key: str, tmp_path: Path) -> None:
    def change(record: Record) -> None:
        record["commitment"][key] = "0" * 64

    folder = rewritten(sealed_run().cert.save(tmp_path), change)
    words = "monte_carlo.posterior.seed" if key == "beacon" else f"commitment.{key}"
    assert verdict_of(folder).startswith(f"INVALID: {words}: ")


# --- 8. The best seed.

ONE_TRY = """
import sys, torch, pacprune as pp
split = pp.data.digits(prior_fraction=0.5, seed=int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
torch.nn.init.zeros_(model[1].weight)
torch.nn.init.zeros_(model[1].bias)
print(pp.certify_held_out(model, split, declare="all its weights are zero").tries)
"""


def constant_answer() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_twenty_seeds_in_as_many_processes_are_as_many_tries(ledger: Path) -> None:  # noqa: F811
    declared = {"declare": "all its weights are zero"}
    split = pp.data.digits(prior_fraction=0.5, seed=0)
    assert pp.certify_held_out(constant_answer(), split, **declared).tries.number == 1
    words = [sys.executable, "-c", ONE_TRY, "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "certificate number 2 on these examples on this machine; 1 declared and paid for" in process.stdout
    for seed, number in ((1, 2), (0, 1), (2, 3)):
        split = pp.data.digits(prior_fraction=0.5, seed=seed)
        assert pp.certify_held_out(constant_answer(), split, **declared).tries.number == number
    assert len(ledger.read_text().splitlines()) == 3


def test_every_cut_of_one_pool_is_a_try_on_it(ledger: Path) -> None:  # noqa: F811
    """Another fraction, other unlabelled inputs and another standardisation are other cuts of the same examples."""
    x, y = random_labels().train.x, random_labels().train.y
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"prior_fraction": 0.3},
        {"seed": 5},
        {"unlabelled": 20},
        {"standardise": False},
    )
    numbers = [
        pp.certify_held_out(constant_answer(), pp.data.split(x, y, **cut), declare=DECLARED).tries.number
        for cut in cuts
    ]
    assert numbers == list(range(1, len(cuts) + 1))
    other = pp.data.split(x.flip(-1), y)
    assert pp.certify_held_out(constant_answer(), other, declare=DECLARED).tries.number == 1


def test_a_cut_with_another_test_part_is_a_try_on_the_same_pool(ledger: Path) -> None:  # noqa: F811
    x, y = random_labels().train.x, random_labels().train.y
    cuts: tuple[dict[str, Any], ...] = ({"test": 0.2}, {"test": 0.2, "seed": 3}, {"test": 0.3}, {})
    numbers = [
        pp.certify_held_out(constant_answer(), pp.data.split(x, y, **cut), declare=DECLARED).tries.number
        for cut in cuts
    ]
    assert numbers == list(range(1, len(cuts) + 1))


def test_both_numbers_stand_side_by_side_and_the_bytes_stay(ledger: Path, tmp_path: Path) -> None:  # noqa: F811
    before = certify_again()
    assert "instead" not in str(before)
    for seed in range(1, 5):
        pp.certify_held_out(constant_answer(), pp.data.digits(seed=seed, unlabelled=150), declare=DECLARED)
    ledger.write_text("".join(reversed(ledger.read_text().splitlines(keepends=True))))  # now it is the fifth
    after = certify_again()
    assert (before.tries.number, after.tries.number) == (1, 5)
    expected = certify_again(delta=0.05 / 30).bound
    assert after.tries.undeclared_bound == pytest.approx(expected, abs=1e-12)
    assert f"take {expected:.4f} instead, the bound at delta / (5 x 6)" in str(after)
    assert f"is at most {certificate.rounded_up(before.bound)}." in str(after)
    paths = [cert.save(tmp_path / name) for name, cert in (("before", before), ("after", after))]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in paths]
    assert contents[0] == contents[1]
    paid = certify_again(certified=5)
    assert (paid.tries.number, paid.tries.declared) == (5, 5)
    assert "instead" not in str(paid)


def test_a_ledger_that_is_off_or_cannot_be_written_says_so(
    ledger: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = certify_again()
    monkeypatch.setenv("PACPRUNE_LEDGER", "off")
    off = certify_again()
    assert (off.tries.number, off.tries.undeclared_bound) == (None, None)
    assert "tries are not counted (PACPRUNE_LEDGER=off): that there were no others is the issuer's word" in str(off)
    assert off.record == kept.record
    monkeypatch.delenv("PACPRUNE_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", str(ledger))  # a file, in which no folder can be made
    assert "in this process (the ledger file cannot be written)" in str(certify_again())
    assert certify_again().record == kept.record


def test_a_ledger_with_broken_lines_goes_on_counting(ledger: Path) -> None:  # noqa: F811
    assert certify_again().tries.number == 1
    with ledger.open("a") as file:
        file.write('\n{"pool": 1}\n[]\nnull\n{"pool": "x", "subject"')
    assert certify_again().tries.number == 1
    model = issued().model
    assert pp.certify(model, issued().prior, digits(), **FAST).tries.number == 1


# --- 9. Hostile files.

ESCAPES = "\x1b[2J\x1b[HVALID (level 3: ...)\r\n"


def quickly(folder: Path) -> tuple[str, int]:
    """The verdict of level 1 or why there is none, and the most bytes that it took."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        verdict = verdict_of(folder)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - begin < 5
    return verdict, most


def test_terminal_escapes_in_a_tensors_name_are_refused_and_never_printed(tmp_path: Path) -> None:
    folder = held_out().save(tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"1.weight{ESCAPES}": torch.zeros(2)}, folder / "model.safetensors")
    refuse_everywhere(rewritten(folder, lambda record: None), "holds the unprintable name")

    def renamed(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        table = index["model.safetensors"]
        table[ESCAPES] = table.pop(next(iter(table)))

    packed = reindexed(held_out().save(tmp_path / "packed", packed=True), renamed)
    refuse_everywhere(packed, "holds the unprintable name")
    for place in (folder, packed):
        answer = called("verify", str(place))
        assert answer.code == 2
        assert "\x1b[2J" not in answer.text
        assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        ("statement",),
        ("declaration",),
        ("model",),
        ("data", "dataset"),
        ("software", "torch"),
        ("claim", "family"),
        ("hashes", "model"),
        ("assumptions", 0),
        ("data", "files", ESCAPES),
        ("bounds", ESCAPES),
        (ESCAPES,),
    ],
)
def test_terminal_escapes_in_a_record_are_refused_and_never_printed(path: tuple[Any, ...], tmp_path: Path) -> None:
    def change(record: Record) -> None:
        table: Any = record
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = ESCAPES

    folder = rewritten(held_out().save(tmp_path), change)
    refuse_everywhere(folder, "INVALID: ")
    answer = called("verify", str(folder))
    assert answer.code == 1
    assert "\x1b[2J" not in answer.text
    assert "\r" not in answer.text
    report = pp.verify(folder)
    assert all(line.isprintable() for line in str(report).splitlines())
    assert not str(report).startswith("VALID")


@pytest.mark.parametrize("character", ["\x1b", "\x9b", "\u202e", "\u2066", "\x00", "\x7f", "\ud800", "\u200b"])
def test_nothing_that_a_terminal_acts_on_is_a_name_or_text(character: str, tmp_path: Path) -> None:
    folder = rewritten(held_out().save(tmp_path), lambda record: record["software"].update(torch=f"2{character}.0"))
    refuse_everywhere(folder, "software.torch")


@pytest.mark.parametrize("n", [2**53, 10**9, 10**18, 10**400, -1, 0, 1.5e300])
def test_a_huge_number_of_examples_is_refused_before_memory_is_asked_for(n: float, tmp_path: Path) -> None:
    def huge(record: Record) -> None:
        record["n"] = record["split"]["sizes"]["bound"] = n
        record["reference"]["errors"] = n // 2 if isinstance(n, int) else n

    for name, cert in (("fixed", held_out()), ("random", issued().cert)):
        verdict, most = quickly(rewritten(cert.save(tmp_path / name), huge))
        assert verdict.startswith("INVALID: ")
        assert most < 200e6


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("total",), 10**15),
        (("monte_carlo", "batch"), 2**60),
        (("monte_carlo", "posterior", "draws"), 2**60),
        (("split", "sizes", "unlabelled"), 10**9),
        (("bounds", "held_out", "ledger", "delta"), 5e-324),
        (("bounds", "held_out", "ledger", "grid"), 10**9),
        (("sparsity",), 1e308),
        (("kl",), 1e308),
    ],
)
def test_other_huge_numbers_are_refused_quickly(path: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path)
    verdict, most = quickly(rewritten(folder, lambda record: inside(record, path[:-1]).update({path[-1]: value})))
    assert verdict.startswith("INVALID: ")
    assert most < 200e6


@pytest.mark.parametrize("name", ["certificate.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "zero", "fifo", "folder", "loop"])
def test_only_regular_files_are_opened(name: str, kind: str, tmp_path: Path) -> None:
    folder = held_out().save(tmp_path / "folder")
    path = folder / name
    path.rename(tmp_path / name)
    if kind == "link":  # to the very file
        path.symlink_to(tmp_path / name)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    verdict, most = quickly(folder)
    assert verdict.startswith("unreadable: ")
    assert name in verdict
    assert most < 50e6


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = held_out().save(tmp_path)
    for name, size in (("certificate.json", 2**30), ("model.safetensors", 2**40)):
        content = (folder / name).read_bytes()
        with (folder / name).open("r+b") as file:
            file.truncate(size)  # sparse: it takes no place on the disk
        verdict, most = quickly(folder)
        assert verdict.startswith("unreadable: ")
        assert f"has {size:,} bytes" in verdict
        assert most < 50e6
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("value", ["<script>alert(1)</script>", None, [0.5], {"value": 0.5}, True, "0.5"])
def test_a_sparsity_that_is_no_number_is_refused(value: Any, tmp_path: Path) -> None:
    folder = rewritten(held_out().save(tmp_path), lambda record: record.update(sparsity=value))
    refuse_everywhere(folder, "INVALID: sparsity is ")
    with pytest.raises(ValueError, match="is no certificate: sparsity is "):
        decode.load(folder)  # which every report is written from


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "model.safetensors/../model.safetensors", "./model.safetensors", ""]
)
def test_files_outside_the_folder_are_not_opened(name: str, tmp_path: Path) -> None:
    folder = held_out().save(tmp_path / "folder")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())

    def instead(record: Record) -> None:
        record["files"] = {name: record["files"]["model.safetensors"]}

    def beside(record: Record) -> None:
        record["files"] = {"model.safetensors": "", name: "0" * 64}

    for change in (instead, beside):
        refuse_everywhere(rewritten(held_out().save(folder), change), "files")


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    def bomb(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        blobs |= {"values": torch.zeros(2), "bits": torch.zeros(2**20 // 8, dtype=torch.uint8)}
        index["model.safetensors"] |= {f"w{i}": ["float32", [2**10, 2**10], "values", "bits"] for i in range(2000)}

    folder = reindexed(held_out().save(tmp_path, packed=True), bomb)
    assert (folder / "packed.safetensors").stat().st_size < 1e6
    verdict, most = quickly(folder)
    assert verdict.startswith("unreadable: ")
    assert "bytes would become" in verdict
    assert most < 100e6


@pytest.mark.parametrize(
    ("shape", "words"),
    [([2**40, 2**40], "is no shape"), ([-1, 64], "is no shape"), ([16.0, 64], "is no shape"), ("16", "is no shape")],
)
def test_a_shape_that_is_none_is_refused(shape: Any, words: str, tmp_path: Path) -> None:
    def change(index: dict[str, Any], blobs: dict[str, Tensor]) -> None:
        next(entry for entry in index["model.safetensors"].values() if len(entry[1]) == 2)[1] = shape

    verdict, most = quickly(reindexed(held_out().save(tmp_path, packed=True), change))
    assert verdict.startswith("unreadable: ")
    assert words in verdict
    assert most < 50e6


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"format":' * 5000, b'{"n": 1, "n": 2}', b"\xff\xfe", b"NaN", b"1" * 10_000, b"", b"null"],
)
def test_odd_json_is_no_traceback(content: bytes, tmp_path: Path) -> None:
    folder = held_out().save(tmp_path)
    (folder / "certificate.json").write_bytes(content)
    assert verdict_of(folder).startswith("unreadable: ")
    answer = called("verify", str(folder))
    assert answer.code == 2
    assert "Traceback" not in answer.text


# --- 10. Leaks through training.

SHORT = pp.Config(epochs=1, lr=0.1)


def trained(data: Any, **options: Any) -> nn.Module:
    model = network()
    pp.fit(model, data, SHORT, **options)
    return model


def refused(model: nn.Module, *, words: str, split: Split | None = None) -> None:
    """There is no held-out certificate of this network without a declaration."""
    with pytest.raises(ValueError, match=words):
        pp.certify_held_out(model, digits() if split is None else split)


def needs_declaration(model: nn.Module, *, words: str, split: Split | None = None) -> None:
    """There is one, with a declaration alone, and that stands in it."""
    split = digits() if split is None else split
    refused(model, split=split, words=words)
    cert = pp.certify_held_out(model, split, declare=DECLARED)
    assert cert.statement.endswith(f' The issuer states: "{DECLARED}".')


SEEN = "has seen the bound set"
UNTRACED = "not those of split.prior, so that nobody knows whether they tell of the bound set"


class Augmenting(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are changed a little at random whenever they are read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.05 * torch.randn_like(self.x[i]), self.y[i]


def test_an_augmenting_dataset_over_the_bound_set_is_refused() -> None:
    """The labels are random, so that the true risk is 0.9; once, this gave a certificate of 0.0355."""
    split, model = random_labels(), nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(Augmenting(split.train.x, split.train.y), batch_size=20, shuffle=True)
    with pytest.raises(ValueError, match=UNTRACED):
        pp.pbp(model, split, SHORT, sparsity=0.1, data=loader, draws=100)


@pytest.mark.parametrize("whose", ["train", "bound", "prior"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_dataset_of_ones_own_that_changes_its_examples_is_untraced(whose: str, batched: bool) -> None:
    part = getattr(digits(), whose)
    dataset = Augmenting(part.x, part.y)
    needs_declaration(trained(DataLoader(dataset, batch_size=50) if batched else dataset), words=UNTRACED)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset that holds whole batches."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.batches = list(zip(x.split(50), y.split(50), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.batches[i]


def test_a_loader_of_batches_is_read_example_by_example() -> None:
    split = digits()
    refused(trained(DataLoader(Batches(split.train.x, split.train.y), batch_size=None)), words=SEEN)
    trace._looks.clear()  # another process
    accepted = trained(DataLoader(Batches(split.prior.x, split.prior.y), batch_size=None))
    assert pp.certify_held_out(accepted, split).record["declaration"] is None


def test_a_loader_that_puts_batches_together_itself_is_read_as_it_is() -> None:
    split = digits()

    def flattened(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.cat([x for x, _ in items]), torch.cat([y for _, y in items])

    refused(trained(DataLoader(Batches(split.train.x, split.train.y), batch_size=1, collate_fn=flattened)), words=SEEN)

    def from_elsewhere(items: Any) -> tuple[Tensor, Tensor]:
        return split.bound.x[:20], split.bound.y[:20]

    refused(trained(split.prior.loader(20, collate_fn=from_elsewhere)), words=SEEN)


class Elsewhere(DataLoader[Any]):
    """A loader that reads other batches than those of its dataset."""

    def __iter__(self) -> Any:
        yield digits().bound.x, digits().bound.y


class OtherPart(pp.data.Part):
    """A part that gives other examples than it holds."""

    def __getitem__(self, i: int | Tensor) -> tuple[Tensor, Tensor]:
        return digits().bound.x[i % 643], digits().bound.y[i % 643]


@pytest.mark.parametrize("kind", ["loader", "part"])
def test_a_subclass_is_not_taken_at_its_word(kind: str) -> None:
    part = digits().prior
    other = OtherPart(part.name, part.x, part.y, part.index, part.source, part.raw)
    loader = Elsewhere(part, batch_size=20) if kind == "loader" else DataLoader(other, batch_size=20)
    refused(trained(loader), words=f"{SEEN}|{UNTRACED}")


class ToFloat(nn.Module):
    """The first layer of a network that takes numbers of any type."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def trained_on_cast(kind: str, x: Tensor, y: Tensor, layers: nn.Module | None = None) -> nn.Module:
    """A network that was trained on examples that are changed too little to make a difference."""
    casts: dict[str, Callable[[Tensor], Tensor]] = {
        "float64": Tensor.double,
        "float16": Tensor.half,
        "bfloat16": Tensor.bfloat16,
        "noise": lambda x: x + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
        "scale": lambda x: 3.7 * x - 1.3,
    }
    model = nn.Sequential(ToFloat(), network() if layers is None else layers)
    pp.fit(model, (casts[kind](x), y), SHORT)
    return model


@pytest.mark.parametrize("kind", ["float64", "noise", "scale"])
def test_images_are_known_whatever_their_type_scale_and_small_noise(kind: str) -> None:
    split = digits()
    model = trained_on_cast(kind, split.bound.x, split.bound.y)
    refused(model, words=SEEN)
    with pytest.raises(ValueError, match=SEEN):  # no declaration excuses that
        pp.certify_held_out(model, split, declare=DECLARED)
    trace._looks.clear()  # another process
    model = trained_on_cast(kind, split.prior.x, split.prior.y)
    assert pp.certify_held_out(model, split).record["declaration"] is None


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_images_of_less_precision_are_refused(kind: str) -> None:
    refused(trained_on_cast(kind, digits().bound.x, digits().bound.y), words=f"{SEEN}|{UNTRACED}")


@cache
def table() -> Split:
    """Examples that are rows of numbers, which have no scale of their own."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 20, generator=generator)
    return pp.data.split(x, (x[:, :2].sum(1) > 0).long(), prior_fraction=0.5)


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16", "noise", "scale"])
def test_rows_of_numbers_that_are_changed_a_little_are_refused(kind: str) -> None:
    split = table()
    layers = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    model = trained_on_cast(kind, split.bound.x, split.bound.y, layers)
    refused(model, split=split, words=SEEN if kind == "float64" else UNTRACED)


def test_the_tensors_of_another_split_are_refused() -> None:
    """Its prior part holds bound examples of this one, standardised by other constants."""
    other = pp.data.digits(seed=1, unlabelled=150)
    refused(trained(other.prior), words=SEEN)
    refused(trained((other.prior.x, other.prior.y)), words=SEEN)
    x, y = table().train.x, table().train.y
    elsewhere = pp.data.split(torch.cat([x, x.new_ones(5, 20)]), torch.cat([y, y[:5]]), seed=3)
    model = nn.Sequential(nn.Linear(20, 2))
    pp.fit(model, (elsewhere.prior.x, elsewhere.prior.y), SHORT)
    refused(model, split=table(), words=UNTRACED)


def test_the_labels_of_a_teacher_are_untraced() -> None:
    split, teacher = digits(), trained(digits().train)
    with torch.no_grad():
        labels = teacher(split.prior.x).argmax(1)
    assert not torch.equal(labels, split.prior.y)
    needs_declaration(trained((split.prior.x, labels)), words=UNTRACED)
    with torch.no_grad():
        soft = teacher(split.prior.x).softmax(1)
    student = network()
    pp.fit(student, (split.prior.x, soft), SHORT, loss=nn.functional.cross_entropy)
    needs_declaration(student, words=UNTRACED)


def test_a_mask_from_a_copy_that_was_trained_on_everything_is_refused() -> None:
    split, model = digits(), trained(digits().prior)
    copied = copy.deepcopy(model)
    pp.fit(copied, split.train, SHORT)
    mask = pp.top_k(pp.scores.magnitude(copied), sparsity=0.5)
    pruned = pp.apply_mask(copy.deepcopy(model), mask)
    refused(pruned, words=SEEN)
    for scores in (pp.scores.snip(copy.deepcopy(model), split.bound), pp.scores.random(copied)):
        refused(pp.apply_mask(copy.deepcopy(model), pp.top_k(scores, sparsity=0.5)), words=SEEN)
    slab = pp.block_isotropic(model, mask, eps=0.01, std=0.02)
    attached = pp.attach(model, slab)
    with pytest.raises(ValueError, match=SEEN):
        pp.fit_posterior(attached, pp.read(attached), split, pp.Config(epochs=0))


def test_a_mask_that_pacprune_did_not_compute_is_untraced() -> None:
    model = trained(digits().prior)
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
    words = "a mask or a tensor of the network was not computed by pacprune"
    for other in (
        {name: ~keep for name, keep in mask.items()},
        {name: torch.rand(keep.shape) > 0.5 for name, keep in mask.items()},
        copy.deepcopy(mask),
    ):
        needs_declaration(pp.apply_mask(copy.deepcopy(model), other), words=words)
    for keep in mask.values():
        keep.copy_(torch.rand(keep.shape) > 0.5)
    needs_declaration(pp.apply_mask(copy.deepcopy(model), mask), words=words)


def test_early_stopping_by_the_bound_set_is_refused() -> None:
    split, model = digits(), network()
    errors = []
    for _ in range(2):
        pp.fit(model, split.prior, SHORT)
        errors.append(pp.error(model, split.bound))
    refused(model, words=SEEN)
    refused(trained(split.prior), words="before anything is evaluated on split.bound")


@pytest.mark.parametrize("how", ["pair", "loader", "train", "gibbs"])
def test_every_evaluation_on_bound_examples_is_a_look(how: str) -> None:
    split, model = digits(), trained(digits().prior)
    if how == "gibbs":
        pp.gibbs_error(pp.attach(model, pp.isotropic(model, sparsity=0.3)), split.bound, draws=1)
    else:
        data = {"pair": (split.bound.x, split.bound.y), "loader": split.bound.loader(50), "train": split.train}[how]
        pp.error(model, data)
    refused(trained(split.prior), words=SEEN)


def test_what_was_trained_before_the_look_may_be_certified() -> None:
    split, model = digits(), trained(digits().prior)
    pp.error(model, split.bound)
    pp.error(model, split.test)
    assert pp.certify_held_out(model, split).record["declaration"] is None


def test_for_q_under_one_p_a_look_is_free_but_for_the_single_draw(tmp_path: Path) -> None:
    split = digits()
    model, prior = prior_of(split)
    for _ in range(2):
        pp.fit_posterior(model, prior, split, SHORT)
        pp.gibbs_error(model, split.bound, draws=2)
    cert = pp.certify(model, prior, split, **FAST)
    assert cert.pac_bayes["single_draw"]["fresh"] is False
    assert "single_draw" not in cert.bounds
    assert {"seeger", "held_out", "thresholded"} <= cert.bounds.keys()
    assert check(cert.save(tmp_path)).valid

    def stale(record: Record, tensors: Tensors) -> None:
        record["single_draw"]["fresh"] = False

    assert verdict_of(forged(tmp_path / "forged", stale)).startswith("INVALID: bounds are given for ['single_draw']")


@pytest.mark.parametrize("how", ["apply_mask", "attach"])
def test_a_network_that_is_pruned_after_a_look_is_refused(how: str) -> None:
    split, model = digits(), trained(digits().prior)
    errors = {}
    for sparsity in (0.3, 0.5, 0.7):
        mask = pp.top_k(pp.scores.magnitude(model), sparsity=sparsity)
        errors[sparsity] = pp.error(pp.apply_mask(copy.deepcopy(model), mask), split.bound)
    best = min(errors, key=errors.__getitem__)
    if how == "apply_mask":
        refused(pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=best)), words=SEEN)
    else:
        pp.attach(model, pp.isotropic(model, sparsity=best, std=0.02))
        with pytest.raises(ValueError, match=SEEN):
            pp.fit_posterior(model, pp.read(model), split, pp.Config(epochs=0))


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data", "numpy", "own loop", "statistics"])
def test_weights_that_something_else_changed_are_untraced(how: str) -> None:
    model, other = trained(digits().prior), trained(digits().train)
    if how == "load_state_dict":
        model.load_state_dict(other.state_dict())
    elif how == "statistics":
        model.train()(digits().bound.x)
    elif how == "own loop":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(digits().bound.x), digits().bound.y).backward()
        optimizer.step()
    elif how == "numpy":
        model[4].bias.detach().numpy()[0] += 1e-6
    elif how == "data":
        model[4].bias.data = other[4].bias.data
    else:
        with torch.no_grad():
            model[1].weight.copy_(other[1].weight)
    words = "weights of the network were made or changed by something other than pacprune"
    needs_declaration(copy.deepcopy(model), words=words)
    pp.fit(model, digits().prior, SHORT)  # which does not make it forget
    refused(model, words=words)


def test_a_prior_whose_weights_something_else_changed_is_untraced() -> None:
    split, model = digits(), trained(digits().prior)
    model.load_state_dict(trained(split.train).state_dict())
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.02))
    prior = pp.read(model)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="weights of the prior were made or changed by something other than pacprune"):
        pp.certify(model, prior, split, **FAST)
    model, prior = prior_of(split)
    with torch.no_grad():
        next(p for p in model.parameters() if p.ndim == 2).add_(0.01)
    moved_prior = pp.read(model)
    pp.fit_posterior(model, moved_prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="weights of the prior were made or changed by something other than pacprune"):
        pp.certify(model, moved_prior, split, **FAST)


def test_a_prior_with_other_means_than_were_read_is_untraced() -> None:
    split = digits()
    model, prior = prior_of(split)
    other = dataclasses.replace(prior, mean={name: mean + 0.01 for name, mean in prior.mean.items()})
    pp.fit_posterior(model, other, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="declare="):
        pp.certify(model, other, split, **FAST)


def test_layers_that_pacprune_never_trained_are_untraced_beside_others() -> None:
    model = nn.Sequential(trained(digits().prior), nn.Linear(10, 10))
    refused(model, words="declare=")


def test_augmentation_and_loaders_of_a_part_need_no_declaration() -> None:
    split = digits()

    def noisy(image: Tensor) -> Tensor:
        return image + 0.05 * torch.randn_like(image)

    for data in (
        split.prior,
        (split.prior.x, split.prior.y),
        TensorDataset(split.prior.x, split.prior.y),
        split.prior.augmented(noisy),
        split.prior.loader(50, shuffle=True),
        split.prior.loader(50, transform=noisy, shuffle=True),
        DataLoader(split.prior.augmented(noisy), batch_size=50),
        split.prior.subset(torch.arange(300)),
    ):
        cert = pp.certify_held_out(trained(data), split)
        assert cert.record["declaration"] is None
        assert "The issuer states" not in cert.statement
    for part in (split.bound, split.train):
        for data in (part.augmented(noisy), part.loader(50, transform=noisy)):
            refused(trained(data), words=SEEN)
    loader = split.prior.loader(50, transform=noisy)
    cert = pp.pbp(network(), split, SHORT, sparsity=0.5, data=loader, draws=100).certificate
    assert cert.record["declaration"] is None


def test_a_declaration_stands_in_the_sentence_and_on_trust(tmp_path: Path) -> None:
    split, model = digits(), trained(Augmenting(digits().prior.x, digits().prior.y))
    cert = pp.certify_held_out(model, split, declare=f" {DECLARED}.")
    assert cert.record["declaration"] == DECLARED
    assert cert.statement.endswith(f'. The issuer states: "{DECLARED}".')
    assert f'The issuer states: "{DECLARED}".' in str(cert)
    report = pp.verify(cert.save(tmp_path / "true"))
    assert report.valid, report.failure
    assert f'what pacprune could not trace is as the issuer states: "{DECLARED}"' in report.trusted
    traced = pp.verify(held_out().save(tmp_path / "traced"))
    assert any("all that shaped the network is in pacprune's notes" in line for line in traced.trusted)

    def quiet(record: Record) -> None:
        record["declaration"] = None

    def mute(record: Record) -> None:
        record["statement"] = record["statement"].split(" The issuer")[0]

    for name, change, words in (("quiet", quiet, "assumptions are not"), ("mute", mute, "statement: ")):
        assert verdict_of(rewritten(cert.save(tmp_path / name), change)).startswith(f"INVALID: {words}")


@pytest.mark.parametrize(
    "words", ["", "short", "x" * 501, "clean \x1b[2J screen", 'speaks "in quotes" here', "in größeren Worten", True]
)
def test_a_declaration_that_is_no_sentence_is_refused(words: Any) -> None:
    with pytest.raises(ValueError, match="give one sentence of 10 to 500 plain characters"):
        pp.certify_held_out(trained(digits().prior), digits(), declare=words)


def test_no_declaration_excuses_the_bound_set() -> None:
    with pytest.raises(ValueError, match=SEEN):
        pp.certify_held_out(trained(digits().bound), digits(), declare=DECLARED)


# --- 11. Networks that pacprune never trained.


def test_a_network_that_pacprune_never_trained_needs_a_declaration(tmp_path: Path) -> None:
    needs_declaration(
        network(), words="pacprune has never trained the network, or not every layer of it, so that nobody knows"
    )
    cert = pp.certify_held_out(network(), digits(), declare=DECLARED)
    assert cert.record["examples_seen"] == 0
    assert pp.verify(cert.save(tmp_path)).valid
    pruned = network()
    pp.apply_mask(pruned, pp.top_k(pp.scores.magnitude(pruned), sparsity=0.5))
    refused(pruned, words="pacprune has never trained the network")


def test_a_prior_that_pacprune_never_trained_needs_a_declaration() -> None:
    split, model = digits(), network()
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.02))
    prior = pp.read(model)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="pacprune has never trained the prior"):
        pp.certify(model, prior, split, **FAST)
    cert = pp.certify(model, prior, split, declare=DECLARED, **FAST)
    assert cert.record["examples_seen"] == 0
    assert cert.statement.endswith(f' The issuer states: "{DECLARED}".')


def test_an_edited_configuration_of_a_run_is_not_believed(tmp_path: Path) -> None:
    """The run's own training wrote down what it used."""
    folder = tmp_path / "run"
    words = (
        "osp",
        "--data",
        "digits",
        "--sparsity",
        "0.5",
        "--epochs",
        "1",
        "--dense-epochs",
        "1",
        "--out",
        str(folder),
    )
    assert called(*words, "--train-on", "train").code == 0
    assert "trained on the bound set too" in called("certify", str(folder)).text
    config = folder / "config.toml"
    assert 'train_on = "train"' in config.read_text()
    config.write_text(config.read_text().replace('train_on = "train"', 'train_on = "prior"'))
    answer = called("certify", str(folder))
    assert answer.code == 2
    assert "seen the bound set" in " ".join(answer.text.split())
    assert not list(folder.rglob("certificate.json"))


# --- 12. Copies in the bound set.


@cache
def oversampled() -> Split:
    """A hundred copies of fifty examples as the bound set, which once were n = 5,000 without a word."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 1, 8, 8, generator=generator), torch.randint(10, (150,), generator=generator)
    whole = torch.cat([torch.arange(100), torch.arange(100, 150).repeat(100)])
    indices = torch.arange(100), torch.arange(100, 5100)
    return pp.data.split(x[whole], y[whole], indices=indices, split_declared_random=True, classes=10)


def test_copies_in_the_bound_set_are_counted_printed_and_declared(tmp_path: Path) -> None:
    split = oversampled()
    assert (len(split.bound), split.repeats, split.duplicates) == (5000, 4950, 0)
    model = trained(split.prior)
    words = "4950 of the 5000 bound examples are copies of others, and copies are not independent"
    refused(model, split=split, words=words)
    cert = pp.certify_held_out(model, split, declare="new data repeat as often as these")
    assert cert.record["split"]["repeats"] == 4950
    assert "4950 of the 5,000 bound examples are copies of others" in str(cert)
    words = "4950 of the 5000 bound examples are copies of others."
    assert cert.statement.endswith(f' {words} The issuer states: "new data repeat as often as these".')
    report = pp.verify(cert.save(tmp_path), split=split, model=network)
    assert report.valid, report.failure

    def silent(record: Record, tensors: Tensors) -> None:
        record["split"]["repeats"] = 0
        record["statement"] = record["statement"].replace(f" {words}", "")

    folder = forged(tmp_path / "silent", silent, cert)
    assert pp.verify(folder).valid  # as far as arithmetic goes
    failure = str(pp.verify(folder, split=split, model=network).failure)
    assert failure == "split: repeats is 0 in the certificate but 4950 in the data"


def test_copies_without_a_declaration_are_refused_by_arithmetic_alone(tmp_path: Path) -> None:
    n = held_out().n
    for repeats, valid in ((n // 100, True), (n // 100 + 1, False)):
        folder = rewritten(
            held_out().save(tmp_path), lambda record, repeats=repeats: record["split"].update(repeats=repeats)
        )
        assert verdict_of(folder).startswith("VALID" if valid else f"INVALID: {repeats} of the {n} bound examples")


def test_copies_under_a_posterior_are_refused_too() -> None:
    split = oversampled()
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="4950 of the 5000 bound examples are copies"):
        pp.certify(model, prior, split, **FAST)


def test_duplicates_of_prior_examples_are_printed_of_a_held_out_certificate_too() -> None:
    x, y = random_labels().train.x[:100], random_labels().train.y[:100]
    indices = torch.arange(100), torch.arange(100, 150)
    whole = torch.cat([torch.arange(100), torch.arange(50)])
    split = pp.data.split(x[whole], y[whole], indices=indices, split_declared_random=True, classes=10)
    cert = pp.certify_held_out(trained(split.prior), split)
    assert cert.record["split"]["duplicates"] == 50
    assert "50 of the 50 bound examples also occur in the prior part: they are not new" in str(cert)


# --- A second attack.


def turned(folder: Path, change: Callable[[Record, Tensors], None]) -> Path:
    """The issued certificate with record and tensors changed, digests that fit, and the hashes of its networks."""
    return forged(folder, change, issued().cert)


def test_the_thresholded_network_is_that_of_q_where_others_tie(tmp_path: Path) -> None:
    split, model = digits(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(0.1 * torch.sign(model[1].weight))
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    prior = pp.read(model)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    cert = pp.certify(model, prior, split, declare="the signs were drawn at random", **FAST)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    assert pp.verify(cert.save(tmp_path / "honest"), split=split, model=plain).valid
    network = cert.tensors["thresholded.safetensors"]["1.weight"]
    flipped = torch.where(network == 0, 0.1 * torch.sign(prior.mean["1.weight"]), 0.0)  # as many others, all tied
    errors = int(drawn_networks.errors(plain, {"1.weight": flipped}, split.bound).sum())

    def other(record: Record, tensors: Tensors) -> None:
        tensors["thresholded.safetensors"]["1.weight"] = flipped
        record["thresholded"]["errors"] = errors

    folder = forged(tmp_path / "other", other, cert)
    assert pp.verify(folder).valid  # level 1 cannot tell
    report = pp.verify(folder, split=split, model=plain)
    assert report.failure == "recount: the thresholded network is not that of Q (another 1.weight)"


def test_the_single_network_may_differ_by_rounding_alone(tmp_path: Path) -> None:
    std = issued().posterior.std["1.weight"]

    def shaved(record: Record, tensors: Tensors) -> None:
        drawn = tensors["single_draw.safetensors"]["1.weight"]
        tensors["single_draw.safetensors"]["1.weight"] = torch.where(drawn == 0, 0.0, drawn + 3e-4 * std)
        ratio = log_ratio_of(tensors)
        record["single_draw"]["log_ratio"] = ratio + abs(ratio) * 1e-12 + 1e-12
        delta = record["bounds"]["single_draw"]["ledger"]["delta"]
        record["bounds"]["single_draw"]["bound"] = bounds.disintegrated(
            record["single_draw"]["errors"], n=record["n"], log_ratio=ratio, delta=delta
        )

    report = check(turned(tmp_path, shaved), recount=True)
    assert report.failure == "recount: the single draw network is not the draw of its seed (another 1.weight)"


def log_ratio_of(tensors: Tensors) -> float:
    """log dQ/dP of the single network of these files."""
    slabs, plain = {}, pp.harden(copy.deepcopy(issued().model))
    for whose in ("posterior", "prior"):
        slabs[whose] = decode.distribution(pp.Certificate(issued().cert.record, tensors), whose, plain)
    names = list(slabs["prior"].keep_prob)
    network = {name: tensors["single_draw.safetensors"][name] for name in names}
    mask = {name: network[name] != 0 for name in names}
    return log_ratio(slabs["posterior"], slabs["prior"], network, mask)


def test_the_batch_of_the_draws_is_no_choice(tmp_path: Path) -> None:
    folder = turned(tmp_path, lambda record, _: record["monte_carlo"].update(batch=24))
    assert "monte_carlo.batch is 24, but must be 25" in verdict_of(folder)


@pytest.mark.parametrize("beacon", ["7777777777779f2c.", "Round 7", "777777", "7777777777779F2C", "x" * 20])
def test_a_beacon_has_one_spelling(beacon: str, tmp_path: Path) -> None:
    def spelled(record: Record, tensors: Tensors) -> None:
        record["commitment"]["beacon"] = beacon

    refuse_everywhere(forged(tmp_path, spelled, sealed_run().cert), "commitment.beacon is ")
    if beacon.lower() == "7777777777779f2c":
        assert certify_sealed(beacon=f" {beacon} ").record == sealed_run().cert.record


def test_where_the_beacon_comes_from_is_sealed(tmp_path: Path) -> None:
    run = sealed_run()
    other = pp.commit(run.prior, run.split, grid=3, source="a number that the verifier draws", **FAST)
    assert other.digest != run.first.digest
    line = "the beacon is the one that was sealed: the first round of drand's default network after the second seal"
    assert any(words.startswith(line) for words in run.cert.record["assumptions"])

    def moved(record: Record, tensors: Tensors) -> None:
        record["commitment"]["source"] = other.source
        record["assumptions"][-1] = f"the beacon is the one that was sealed: {other.source}"

    assert "commitment.digest" in verdict_of(forged(tmp_path, moved, run.cert))
    for words in ("", 'with "quotes"', "two\nlines", "größer"):
        with pytest.raises(ValueError, match="give a line of plain text"):
            pp.commit(run.prior, run.split, source=words)


def test_a_split_that_its_seed_does_not_cut_is_refused_unless_declared(tmp_path: Path) -> None:
    whole = pp.data.digits(seed=0)
    easy = whole.train.y.sort().indices
    chosen = pp.data.split(
        whole.train.x[easy],
        whole.train.y[easy],
        indices=(torch.arange(700), torch.arange(700, 1437)),
        split_declared_random=True,
    )
    hidden, model = dataclasses.replace(chosen, declared=False), network()
    with pytest.raises(ValueError, match="the parts are not those that the seed 0 cuts"):
        pp.certify_held_out(model, hidden, declare=DECLARED)
    cert = pp.certify_held_out(model, chosen, declare=DECLARED)

    def undeclared(record: Record, tensors: Tensors) -> None:
        record["split"]["declared"] = False
        record["assumptions"][1] = "the seed of the split was fixed before anything was known about its parts"

    folder = forged(tmp_path, undeclared, cert)
    assert "the parts are not those that the seed 0 cuts" in pp.verify(folder, split=hidden, model=model).verdict


@pytest.mark.parametrize(
    "words",
    [
        'it was trained elsewhere". With probability 99.9999 % the error is at most 0.0001',
        "it was trained elsewhere" + 60 * " " + "VALID (level 3: fixed and drawn networks err as stated)",
        "it was trained elsewhere " + "and " * 200,
        "it was trained \u2800 elsewhere",
        "it was trained \U00010d40 elsewhere",
        "it was trained gro\u00df elsewhere",
    ],
)
def test_a_declaration_speaks_in_nobody_elses_voice(words: str, tmp_path: Path) -> None:
    cert = pp.certify_held_out(network(), digits(), declare=DECLARED)

    def said(record: Record, tensors: Tensors) -> None:
        for key in ("statement", "assumptions"):
            text = json.dumps(record[key]).replace(DECLARED, json.dumps(words)[1:-1])
            record[key] = json.loads(text)
        record["declaration"] = words

    assert re.match("INVALID: (declaration|statement) is ", verdict_of(forged(tmp_path, said, cert)))


def test_a_network_whose_training_nobody_saw_needs_a_declaration_at_level_1(tmp_path: Path) -> None:
    folder = rewritten(held_out().save(tmp_path), lambda record: record.update(examples_seen=0))
    assert "pacprune has not seen what shaped the network" in verdict_of(folder)


def test_nothing_is_certain_to_a_hundred_percent(tmp_path: Path) -> None:
    for delta in (1e-30, 0.0, 1.0):
        with pytest.raises(ValueError, match=f"delta is {delta}"):
            pp.certify_held_out(network(), digits(), declare=DECLARED, delta=delta)
    cert = pp.certify_held_out(network(), digits(), declare=DECLARED, delta=1e-12)
    assert cert.statement.startswith("With probability at least 99.9999999999 % ")


def test_cuts_of_one_data_set_by_hand_are_tries_on_one_pool(ledger: Path) -> None:  # noqa: F811
    x, y = digits().train.x, digits().train.y
    numbers = []
    for seed in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, test = order[:1000], order[1000:]
        split = pp.data.split(x[train], y[train], test=(x[test], y[test]), classes=10)
        numbers.append(pp.certify_held_out(network(), split, declare=DECLARED).tries.number)
    other = pp.data.split(x[:200] + torch.rand_like(x[:200]), y[:200], classes=10)
    numbers.append(pp.certify_held_out(network(), other, declare=DECLARED).tries.number)
    assert numbers == [1, 2, 3, 4, 1]


def test_another_family_or_number_of_draws_is_another_try(ledger: Path) -> None:  # noqa: F811
    options: list[dict[str, Any]] = [{}, {"family": "catoni"}, {"method": "chernoff"}, {"draws": 200}, {}, {"grid": 3}]
    assert [certify_again(**changed).tries.number for changed in options] == [1, 2, 3, 4, 1, 1]


def test_a_try_that_was_paid_for_is_not_charged_twice(ledger: Path) -> None:  # noqa: F811
    nets = [network() for _ in range(3)]
    for k, net in enumerate(nets):
        with torch.no_grad():
            net[1].bias.add_(k)
    certs = [pp.certify_held_out(net, digits(), certified=2, declare=DECLARED) for net in nets]
    errors = certs[2].record["reference"]["errors"]
    expected = bounds.clopper_pearson(errors, n=certs[2].n, delta=0.05 / (3 * 4))
    assert certs[2].tries.undeclared_bound == expected
    assert f"take {expected:.4f} instead, the bound at delta / (3 x 4)" in str(certs[2])


def test_a_torn_ledger_and_a_user_without_a_home_are_no_error(
    ledger: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger.parent.mkdir(parents=True)
    ledger.write_bytes(b'\xff\xfe\x00 torn\n{"pool": "old", "subject": "form"}\n{"pool": ["a"], "subject": ["b"]}\n')
    assert pp.certify_held_out(network(), digits(), declare=DECLARED).tries.number == 1

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    tries = pp.certify_held_out(network(), digits(), declare=DECLARED).tries
    assert "in this process (the ledger file cannot be written)" in str(tries)


def test_a_packed_file_that_grows_beyond_memory_is_refused(tmp_path: Path) -> None:
    size = 2**20
    blobs = {"0": torch.tensor([0.0, 1.0], dtype=torch.float64), "1": torch.zeros(size // 8, dtype=torch.uint8)}
    index = {"model.safetensors": {f"w{i}": ["float64", [size // 64, 64], "0", "1"] for i in range(20)}}
    folder = held_out().save(tmp_path, packed=True)
    (folder / certificate.PACKED).write_bytes(save(blobs, {"index": json.dumps(index)}) + b"")
    verdict, most = quickly(rewritten(folder, lambda record: None))
    assert "bytes would become 167,772,160" in verdict
    assert most < 50e6


def test_gaps_that_stand_for_more_than_memory_are_refused(tmp_path: Path) -> None:
    blobs = {"0": torch.tensor([0.0, 1.0]), "1": torch.zeros(6, dtype=torch.uint8)}
    index = {"model.safetensors": {"w": ["float32", [2**20, 2**20], "0", None, "1"]}}
    folder = held_out().save(tmp_path, packed=True)
    (folder / certificate.PACKED).write_bytes(save(blobs, {"index": json.dumps(index)}) + b"")
    verdict, most = quickly(rewritten(folder, lambda record: None))
    assert "bytes would become 4,398,046,511,104" in verdict
    assert most < 50e6
