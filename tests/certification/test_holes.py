"""Attacks on certificates that worked once: each is a test by its name, and none works any more.

Most forgeries here have digests that fit, as those of an issuer who writes whatever he likes.
"""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_audit import Record, Tensors, check, consistent, forged
from test_certify import FAST, certify_again, digits, issued, ledger, network, prior_of, seed_of  # noqa: F401
from test_verify import read, write
from torch import Tensor, nn
from typer.testing import CliRunner

import pacprune as pp
from pacprune import bounds
from pacprune.certification import audit, certificate, decode, drawn_networks, rules
from pacprune.cli import app
from pacprune.data import trace
from pacprune.data.splits import Split

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
    begin = time.monotonic()
    for options in LEVELS:
        verdict = verdict_of(folder, **options)
        assert not verdict.startswith("VALID")
        assert words in verdict
        assert verdict.isprintable()
    assert time.monotonic() - begin < 10


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
    """A buffer of zeros could be a pruned weight as far as the file tells; the model knows better."""

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

    def sparse(record: Record, tensors: Tensors) -> None:
        record["sparsity"] = 600 / 640
        record["statement"] = record["statement"].replace("sparsity 0.0000", "sparsity 0.9375")

    folder = forged(tmp_path, sparse, cert)
    assert "sparsity 0.9375" in decode.load(folder).statement
    assert pp.verify(folder).valid
    failure = str(pp.verify(folder, split=split, model=model).failure)
    assert failure == "recount: the reference network has sparsity 0.0, not 0.9375 as stated"


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
    line = "no more was tried on these bound examples than the ledger pays for: grid 1, certified 1"
    assert line in report.trusted
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
    cert = pp.certify(model, prior, split, grid=3, commitment=second, beacon="round 7: 9f2c", **FAST)
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
    assert line in report.trusted
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
        for rule in ("refuse_untraced", "refuse_if_touched"):
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
    arguments = {"commitment": run.second, "beacon": "round 7: 9f2c", "grid": 3} | FAST | changed
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
    again, later = certify_sealed(), certify_sealed(beacon="round 8: 77aa")
    assert again.record == run.cert.record
    assert not set(seeds(run.cert.record)) & set(seeds(later.record))
    base = f"{run.second.seal}/round 7: 9f2c"
    purposes = ("posterior draws", "prior draws", "single draw", "unlabelled draws")
    assert seeds(run.cert.record) == [seed_of(base, purpose) for purpose in purposes]
    assert not any("seed" in key for key in (*run.first.plan, *vars(run.first)))
    assert not any("Q was not changed" in line for line in run.cert.record["assumptions"])
    assert any("the beacon is younger than the second seal" in line for line in run.cert.record["assumptions"])
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


def test_a_commitment_needs_a_second_seal_and_a_beacon() -> None:
    run = sealed_run()
    with pytest.raises(ValueError, match="a commitment and a beacon come together"):
        certify_sealed(beacon=None)
    with pytest.raises(ValueError, match="a commitment and a beacon come together"):
        certify_sealed(commitment=None)
    with pytest.raises(ValueError, match="the commitment has sealed another posterior"):
        certify_sealed(commitment=run.first)
    for beacon in ("", "  ", "\x1b[2J", "9" * 501):
        with pytest.raises(ValueError, match="give the value of a public round"):
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


@pytest.mark.xfail(strict=True, reason="Split.pool leaves out a test part that the seed cuts from the same examples")
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
