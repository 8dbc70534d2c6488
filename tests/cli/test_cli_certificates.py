"""Certificates on the command line: certify, verify and selftest, and what they say to damaged folders."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pacprune.bench import coverage
from pacprune.bench.synthetic import STUDIES
from pacprune.certification import audit, decode
from pacprune.cli import app
from pacprune.runs import store

SHORT = "--dense-epochs 8 --epochs 6"
PBP = f"pbp {SHORT} --posterior-epochs 1 --draws 100 --unlabelled 50"


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app.build(), [str(word) for word in words], prog_name="pacprune")


def run(line: str, out: Path) -> Path:
    done = call(*line.split(), "--out", out)
    assert done.exit_code == 0, done.stderr
    return out


def refusal(*words: str | Path) -> str:
    """The one sentence on stderr; nothing on stdout, no traceback, exit code 2."""
    done = call(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pacprune: error: ")
    return line


@pytest.fixture(scope="module")
def pbp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(PBP, tmp_path_factory.mktemp("runs") / "pbp")


@pytest.fixture(scope="module")
def osp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(f"osp {SHORT} --train-on prior", tmp_path_factory.mktemp("runs") / "osp")


@pytest.fixture
def folder(pbp: Path, tmp_path: Path) -> Path:
    """A copy of a certificate, to be damaged."""
    return shutil.copytree(pbp / "certificate", tmp_path / "certificate")


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes the record and makes all digests fit again."""
    found = decode.load(folder)
    record = json.loads(json.dumps(found.record))
    change(record)
    replace(found, record=record).save(folder)


# --- verify.


def test_verify_says_what_it_checked_and_what_it_trusts(pbp: Path) -> None:
    done = call("verify", pbp / "certificate")
    assert (done.exit_code, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last == "VALID"
    assert {line.split(":")[0].strip() for line in lines} == {"checked", "on trust"}
    for place in (pbp, pbp / "certificate" / "certificate.json"):
        assert call("verify", place).stdout == done.stdout, "the run and the record itself stand for the certificate"


def test_every_level_checks_more_and_trusts_less(pbp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "verify", partial(audit.verify, draws=200))
    found = []
    for flags in ([], ["--recount"], ["--replay", "--seed", "5"]):
        done = call("verify", pbp, *flags, "--json", "--out", tmp_path)
        found.append(json.loads(done.stdout))
        assert done.exit_code == 0
        assert list(found[-1]) == ["valid", "checks", "failure", "trusted"]
        assert (found[-1]["valid"], found[-1]["failure"]) == (True, None)
        assert json.loads((tmp_path / "verify.json").read_text()) == found[-1]
    first, second, third = found
    assert len(first["checks"]) < len(second["checks"]) < len(third["checks"])
    assert any(line.startswith("the split") for line in first["trusted"])
    assert not any(line.startswith("the split") for line in second["trusted"])
    again = json.loads(call("verify", pbp, "--data-dir", tmp_path, "--device", "cpu:0", "--json").stdout)
    assert again == second, "a data folder asks for a recount"


def test_a_replay_says_its_seed_which_nobody_can_foresee(pbp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "verify", partial(audit.verify, draws=20))

    def seed(*words: str) -> str:
        found = re.search(r"fresh draws \(seed (\d+)\)", call("verify", pbp, "--replay", *words).stdout)
        assert found
        return found[1]

    assert len({seed(), seed()}) == 2
    assert seed("--seed", "5") == "5"
    assert "seed is -1; it must be a whole number from 0 to" in refusal("verify", pbp, "--replay", "--seed", "-1")
    assert "random unless given" in " ".join(call("verify", "--help").stdout.split())


def test_a_changed_number_is_invalid(folder: Path) -> None:
    text = (folder / "certificate.json").read_text()
    (folder / "certificate.json").write_text(text.replace('"n": ', '"n": 1', 1))
    done = call("verify", folder)
    assert done.exit_code == 1
    assert re.fullmatch("INVALID: digest: [0-9a-f]{12}... is stated, [0-9a-f]{12}... is recomputed\n", done.stdout)
    found = json.loads(call("verify", folder, "--json").stdout)
    assert not found["valid"]
    assert found["failure"].startswith("digest: ")


def test_a_better_claim_is_invalid_though_all_digests_fit(folder: Path) -> None:
    rewrite(folder, lambda record: record["claim"].update(bound=record["claim"]["bound"] - 0.01))
    done = call("verify", folder)
    assert done.exit_code == 1
    first, *others = done.stdout.splitlines()
    assert first.startswith("INVALID: claim")
    assert {line.split(":")[0] for line in others} == {"  checked"}, "what is taken on trust does not matter then"


def test_another_count_is_invalid_with_the_data_at_hand(osp: Path, tmp_path: Path) -> None:
    shutil.copytree(osp, tmp_path / "osp")
    assert call("certify", tmp_path / "osp").exit_code == 0
    rewrite(tmp_path / "osp/certificate", lambda record: record["split"]["parts"].update(bound="0" * 64))
    assert call("verify", tmp_path / "osp").exit_code == 0
    done = call("verify", tmp_path / "osp", "--recount")
    assert done.exit_code == 1
    assert done.stdout.startswith("INVALID: split: content of bound")


def _truncate(folder: Path) -> None:
    path = folder / "certificate.json"
    path.write_bytes(path.read_bytes()[:1000])


def _tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the distributions; the hashes of the files are made to fit."""

    def damage(folder: Path) -> None:
        found = decode.load(folder)
        own = {**found.tensors["distributions.safetensors"]}
        change(own)
        replace(found, tensors={**found.tensors, "distributions.safetensors": own}).save(folder)

    return damage


def _poison(tensors: dict[str, Any]) -> None:
    name = next(key for key in tensors if key.startswith("posterior/mean/"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, "is not valid JSON"),
        (lambda folder: (folder / "draws.safetensors").unlink(), "draws.safetensors"),
        (_tensors(lambda tensors: tensors.pop("prior/std/layers.0.weight")), "prior/std/layers.0.weight"),
        (_tensors(_poison), "holds NaN"),
        (lambda folder: rewrite(folder, lambda record: record.update(version=99)), "99"),
        (lambda folder: rewrite(folder, lambda record: record.update(format="other")), "other"),
        (lambda folder: (folder / "certificate.json").unlink(), "holds neither certificate.json nor "),
    ],
)
def test_what_cannot_be_read_gets_one_sentence(damage: Callable[[Path], None], said: str, folder: Path) -> None:
    damage(folder)
    assert said in refusal("verify", folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("data"), "does not say which data to load (KeyError: 'data')"),
        (lambda record: record["split"].update(seed=None), "does not say which data to load (TypeError"),
        (lambda record: record["data"].update(dataset="mine"), "give the data as pp.verify(folder, split=...)"),
        (lambda record: record.update(model=None), "--model package.module:factory"),
    ],
)
def test_a_recount_needs_data_and_model(change: Callable[[Any], None], said: str, folder: Path) -> None:
    rewrite(folder, change)
    assert call("verify", folder).exit_code == 0, "no bound rests on it"
    assert said in refusal("verify", folder, "--recount")


def test_a_data_folder_of_another_data_set_is_refused(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda record: record["data"].update(dataset="mnist"))
    assert "pacprune data fetch mnist" in refusal("verify", folder, "--data-dir", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"of another data set")
    assert "train-images-idx3-ubyte" in refusal("verify", folder, "--data-dir", tmp_path)


def test_a_certificate_is_looked_for_in_two_places_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "deep/er/certificate")
    assert call("verify", tmp_path).exit_code == 0
    assert "holds neither" in refusal("verify", tmp_path / "deep")
    assert "nowhere does not exist" in refusal("verify", folder, "--data-dir", tmp_path / "nowhere")


def test_a_run_without_a_certificate_is_told_how_to_get_one(tmp_path: Path) -> None:
    bare = run("osp --dense-epochs 0 --epochs 1", tmp_path / "bare")
    assert f"run pacprune certify {bare}" in refusal("verify", bare)


# --- Networks that are not pacprune's own.


def test_an_own_network_is_built_by_its_factory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("skeletons.py").write_text(
        "from pacprune import models\ndef right(): return models.mlp(64)\ndef wrong(): return models.mlp(784)\n"
        "def number(): return 5\ndef broken(): raise RuntimeError('out of order')\n"
    )
    rewrite(folder, lambda record: record.update(model=None))
    assert call("verify", folder, "--recount", "--model", "skeletons:right").stdout.endswith("VALID\n")
    for factory, said in {
        "skeletons:wrong": "give the model it was issued for",
        "skeletons:number": "made a int; it must make a torch.nn.Module",
        "skeletons:broken": "RuntimeError: out of order",
        "skeletons:absent": "AttributeError",
        "nothing.of_the_kind:make": "ModuleNotFoundError",
        "skeletons": "cannot be made",
        ":right": "cannot be made",
    }.items():
        assert said in refusal("verify", folder, "--recount", "--model", factory)
    assert "the device 'abacus' cannot be used here" in refusal("verify", folder, "--device", "abacus")


# --- certify.


def test_certify_gives_the_folder_that_verify_takes(osp: Path) -> None:
    result = store.result(osp)
    done = call("certify", osp, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["folder"] == str(osp / "certificate")
    assert found["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert 0 < found["risk"] < found["bound"] < 1
    assert call("verify", osp, "--replay").exit_code == 0
    assert found["statement"] in (osp / "report.html").read_text()
    assert (osp / "figures" / "certificate.csv").read_text().count("\n") == 2
    assert store.result(osp) == result
    again = call("certify", osp)
    assert again.stdout == f"{found['statement']}\nCertificate: {osp / 'certificate'}\n"


def test_a_choice_among_networks_is_paid_for(osp: Path, tmp_path: Path) -> None:
    before = sorted(f for f in osp.rglob("*") if f.is_file())
    one, five = (
        json.loads(call("certify", osp, "--json", "--out", tmp_path / count, "--certified", count).stdout)["bound"]
        for count in ("1", "5")
    )
    assert one < five
    assert sorted(f for f in osp.rglob("*") if f.is_file()) == before
    assert call("verify", tmp_path / "5").exit_code == 0


def test_an_issued_certificate_is_never_replaced(osp: Path, pbp: Path, tmp_path: Path) -> None:
    def files() -> dict[Path, tuple[bytes, int]]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.rglob("*") if f.is_file()}

    first = call("certify", osp, "--out", tmp_path / "one")
    shutil.copytree(pbp / "certificate", tmp_path / "drawn")
    other = run(f"osp {SHORT} --train-on prior --seed 1", tmp_path / "other")
    before = files()
    assert call("certify", osp, "--out", tmp_path / "one").stdout == first.stdout
    for words, said in {
        "--delta 0.1": "delta is 0.05 there and 0.1 here; choose another --out",
        "--certified 3": "certified is 1 there and 3 here",
    }.items():
        assert said in refusal("certify", osp, "--out", tmp_path / "one", *words.split())
    assert "kind is pac-bayes there and held-out here" in refusal("certify", osp, "--out", tmp_path / "drawn")
    assert "network is " in refusal("certify", other, "--out", tmp_path / "one")
    assert files() == before


def test_certify_refuses_what_saw_the_bound_set(tmp_path: Path, pbp: Path) -> None:
    seen = run("osp --dense-epochs 0 --epochs 1", tmp_path / "seen")
    line = refusal("certify", seen)
    assert "was trained on the bound set too" in line
    assert "--train-on prior" in line
    assert not (seen / "certificate").exists()
    assert f"has its certificate in {pbp / 'certificate'}" in refusal("certify", pbp)
    assert "holds no config.toml" in refusal("certify", tmp_path)
    (seen / "result.json").unlink()
    assert "is not finished" in refusal("certify", seen)


@pytest.mark.parametrize(("words", "said"), [("--delta 2", "delta is 2.0"), ("--certified 0", "certified is 0")])
def test_certify_checks_its_numbers(words: str, said: str, osp: Path) -> None:
    assert said in refusal("certify", osp, *words.split())


# --- pbp's own part.


def test_family_and_grid_are_declared_beforehand(tmp_path: Path, pbp: Path) -> None:
    out = run(f"{PBP} --family excess --grid 4", tmp_path / "run")
    found, usual = decode.load(out / "certificate"), decode.load(pbp / "certificate")
    assert found.record["claim"]["family"] == "excess"
    assert found.ledger.grid == 4
    assert found.bound == found.bounds["excess"] > usual.bounds["excess"]
    assert found.record["model"] == "mlp"
    assert found.record["thresholded"]["inputs"] == 50
    assert call("verify", out).exit_code == 0
    assert "posterior Q, excess" in (out / "figures" / "certificate.csv").read_text()


# --- selftest.


def test_selftest_counts_violations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(coverage, "STUDIES", STUDIES[:1])
    words = ("selftest", "coverage", "--trials", "100", "--seed", "3")
    done = call(*words, "--json", "--out", tmp_path)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["ok"], found["trials"], found["seed"]) == (True, 100, 3)
    assert all(row["trials"] == 100 and row["ok"] for row in found["rows"])
    assert json.loads((tmp_path / "coverage.json").read_text()) == found
    assert "All bounds hold" in call(*words).stdout
    rows = coverage.run(100)
    monkeypatch.setattr(coverage, "run", lambda *_, **__: [replace(rows[0], ok=False)])
    assert call(*words).exit_code == 1


@pytest.mark.parametrize(
    ("words", "said"), [("speed", "unknown self-test 'speed'"), ("coverage --trials 0", "trials is 0")]
)
def test_selftest_refuses(words: str, said: str) -> None:
    assert said in refusal("selftest", *words.split())
