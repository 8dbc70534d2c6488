"""Certificates on the command line: certify, verify and selftest, and their messages about damaged folders."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pacprune.bench import coverage
from pacprune.bench.synthetic import STUDIES
from pacprune.certification import decode, tries
from pacprune.cli import app
from pacprune.runs import store

SHORT = "--dense-epochs 4 --epochs 3"
PBP = f"pbp {SHORT} --posterior-epochs 1 --draws 100 --unlabelled 50"


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app.build(), [str(word) for word in words], prog_name="pacprune")


def run(line: str, out: Path) -> Path:
    result = call(*line.split(), "--out", out)
    assert result.exit_code == 0, result.stderr
    return out


def refusal(*words: str | Path) -> str:
    """The one sentence on stderr; nothing on stdout, no traceback, exit code 2."""
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
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
    certificate = decode.load(folder)
    record = json.loads(json.dumps(certificate.record))
    change(record)
    replace(certificate, record=record).save(folder)


# --- pbp.


def test_a_prior_on_no_data_is_pruned_certified_and_verified(tmp_path: Path) -> None:
    run("pbp --prior-fraction 0 --dense-epochs 0 --epochs 0 --posterior-epochs 1 --draws 50", tmp_path / "free")
    record = decode.load(tmp_path / "free" / "certificate").record
    assert (record["split"]["sizes"]["prior"], record["examples_seen"]) == (0, 0)
    assert "VALID (level 2" in call("verify", tmp_path / "free", "--recount").stdout


def test_the_papers_recipe_is_a_flag(tmp_path: Path) -> None:
    run(f"{PBP} --recipe paper", tmp_path / "paper")
    assert decode.load(tmp_path / "paper" / "certificate").record["kind"] == "pac-bayes"
    assert 'recipe = "paper"' in (tmp_path / "paper" / "config.toml").read_text()


# --- verify.


def test_verify_lists_what_it_checked_and_what_it_trusts(pbp: Path) -> None:
    result = call("verify", pbp / "certificate")
    assert (result.exit_code, result.stderr) == (0, "")
    *lines, last = result.stdout.splitlines()
    assert last == "VALID (level 1: the arithmetic follows from the stated counts)"
    assert {line.split(":")[0].strip() for line in lines} == {"checked", "on trust"}
    for place in (pbp, pbp / "certificate" / "certificate.json"):
        assert call("verify", place).stdout == result.stdout, "the run and the record name the same certificate"


def test_the_page_is_named_and_the_verdict_stays_last(pbp: Path, tmp_path: Path) -> None:
    first, *_, last = call("verify", pbp, "--html", tmp_path / "page.html").stdout.splitlines()
    assert first == f"Page: {tmp_path / 'page.html'}"
    assert last.startswith("VALID ")
    assert (tmp_path / "page.html").is_file()


def test_every_level_checks_more_and_trusts_less(pbp: Path, tmp_path: Path) -> None:
    reports = []
    for flags in ([], ["--recount"], ["--replay", "--seed", "5", "--draws", "200"]):
        result = call("verify", pbp, *flags, "--json", "--out", tmp_path)
        reports.append(json.loads(result.stdout))
        assert result.exit_code == 0
        assert list(reports[-1]) == ["valid", "level", "checks", "failure", "trusted", "findings", "verdict"]
        assert reports[-1]["level"] == len(reports)
        assert (reports[-1]["valid"], reports[-1]["failure"]) == (True, None)
        assert json.loads((tmp_path / "verify.json").read_text()) == reports[-1]
    first, second, third = reports
    assert len(first["checks"]) < len(second["checks"]) < len(third["checks"])
    assert any(line.startswith("the data") for line in first["trusted"])
    assert not any(line.startswith("the data") for line in second["trusted"])
    again = json.loads(call("verify", pbp, "--data-dir", tmp_path, "--device", "cpu:0", "--json").stdout)
    findings = [report.pop("findings") for report in (again, second)]
    assert again == second, "a data folder implies a recount"
    assert [line.split(":")[0] for line in findings[0]] == [line.split(":")[0] for line in findings[1]]


def test_a_replay_draws_and_names_a_random_seed(pbp: Path) -> None:
    def seed(*words: str) -> str:
        output = call("verify", pbp, "--replay", "--draws", "20", *words).stdout
        match = re.search(r"fresh draws \(seed (\d+)\)", output)
        assert match
        return match[1]

    assert len({seed(), seed()}) == 2
    assert seed("--seed", "5") == "5"
    assert "seed is -1; it must be a whole number from 0 to" in refusal("verify", pbp, "--replay", "--seed", "-1")
    assert "[default: random]" in " ".join(call("verify", "--help").stdout.split())


def test_a_changed_number_is_invalid(folder: Path) -> None:
    text = (folder / "certificate.json").read_text()
    (folder / "certificate.json").write_text(text.replace('"n": ', '"n": 1', 1))
    result = call("verify", folder)
    assert result.exit_code == 1
    assert re.fullmatch("INVALID: digest: [0-9a-f]{12}... is stated, [0-9a-f]{12}... is recomputed\n", result.stdout)
    report = json.loads(call("verify", folder, "--json").stdout)
    assert not report["valid"]
    assert report["failure"].startswith("digest: ")


def test_a_better_claim_is_invalid_though_all_digests_fit(folder: Path) -> None:
    rewrite(folder, lambda record: record["claim"].update(bound=record["claim"]["bound"] - 0.01))
    result = call("verify", folder)
    assert result.exit_code == 1
    *others, last = result.stdout.splitlines()
    assert last.startswith("INVALID: claim")
    assert {line.split(":")[0] for line in others} == {"  checked"}, "an invalid certificate lists no trust"


def test_another_count_is_invalid_with_the_data_at_hand(osp: Path, tmp_path: Path) -> None:
    shutil.copytree(osp, tmp_path / "osp")
    assert call("certify", tmp_path / "osp").exit_code == 0
    rewrite(tmp_path / "osp/certificate", lambda record: record["split"]["parts"].update(bound="0" * 64))
    assert call("verify", tmp_path / "osp").exit_code == 0
    result = call("verify", tmp_path / "osp", "--recount")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("INVALID: split: content of bound")


def _truncate(folder: Path) -> None:
    path = folder / "certificate.json"
    path.write_bytes(path.read_bytes()[:1000])


def _tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the distributions; the hashes of the files are made to fit."""

    def damage(folder: Path) -> None:
        certificate = decode.load(folder)
        tensors = {**certificate.tensors["distributions.safetensors"]}
        change(tensors)
        replace(certificate, tensors={**certificate.tensors, "distributions.safetensors": tensors}).save(folder)

    return damage


def _poison(tensors: dict[str, Any]) -> None:
    name = next(key for key in tensors if key.startswith("posterior/mean/"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))


@pytest.mark.parametrize(
    ("damage", "message"),
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
def test_an_unreadable_certificate_is_refused_in_one_sentence(
    damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    damage(folder)
    assert message in refusal("verify", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record["data"].update(dataset="mine"),
            "give the data as --data, or as pp.verify(folder, split=...)",
        ),
        (lambda record: record.update(model=None), "--model package.module:factory"),
    ],
)
def test_a_recount_needs_data_and_model(change: Callable[[Any], None], message: str, folder: Path) -> None:
    rewrite(folder, change)
    assert call("verify", folder).exit_code == 0, "no bound depends on it"
    assert message in refusal("verify", folder, "--recount")


def test_a_data_folder_of_another_data_set_is_refused(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda record: record["data"].update(dataset="mnist"))
    assert "pacprune data fetch mnist" in refusal("verify", folder, "--data-dir", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"of another data set")
    assert "train-images-idx3-ubyte" in refusal("verify", folder, "--data-dir", tmp_path)


def test_a_certificate_is_searched_in_two_places_only(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "deep/er/certificate")
    assert call("verify", tmp_path).exit_code == 0
    assert "holds neither" in refusal("verify", tmp_path / "deep")
    assert "nowhere does not exist" in refusal("verify", folder, "--data-dir", tmp_path / "nowhere")


def test_for_a_run_without_a_certificate_the_error_names_the_command(tmp_path: Path) -> None:
    bare = run("osp --dense-epochs 0 --epochs 1", tmp_path / "bare")
    assert f"run pacprune certify {bare}" in refusal("verify", bare)


# --- Networks of the user.


def test_the_users_network_is_built_by_its_factory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("skeletons.py").write_text(
        "from pacprune import models\n"
        "def right(): return models.mlp(64)\ndef wrong(): return models.mlp(64, hidden=(9,))\n"
        "def number(): return 5\ndef broken(): raise RuntimeError('out of order')\n"
    )
    rewrite(folder, lambda record: record.update(model=None))
    assert call("verify", folder, "--recount", "--model", "skeletons:right").exit_code == 0
    for factory, message in {
        "skeletons:wrong": "give the model it was issued for",
        "skeletons:number": "made a int; it must make a torch.nn.Module",
        "skeletons:broken": "RuntimeError: out of order",
        "skeletons:absent": "AttributeError",
        "nothing.of_the_kind:make": "ModuleNotFoundError",
        "skeletons": "model 'skeletons' is unknown; use one of mlp, lenet5, resnet20, or",
        ":right": "cannot be made",
    }.items():
        assert message in refusal("verify", folder, "--recount", "--model", factory)
    assert "the device 'abacus' cannot be used here" in refusal("verify", folder, "--device", "abacus")


# --- certify.


def test_certify_gives_the_folder_that_verify_takes(osp: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(osp, tmp_path / "osp")
    run_result = store.result(run_folder)
    result = call("certify", run_folder, "--json")
    assert result.exit_code == 0, result.stderr
    numbers = json.loads(result.stdout)
    assert numbers["folder"] == str(run_folder / "certificate")
    assert numbers["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert 0 < numbers["risk"] < numbers["bound"] < 1
    replayed = call("verify", run_folder, "--replay").stdout
    assert "  found: a held-out certificate has no draws, so that level 2 is the highest\n" in replayed
    assert replayed.splitlines()[-1].startswith("VALID (level 2")
    assert numbers["statement"] in (run_folder / "report.html").read_text()
    assert (run_folder / "figures" / "certificate.csv").read_text().count("\n") == 2
    assert store.result(run_folder) == run_result
    again = call("certify", run_folder)
    statement, tries, place = again.stdout.splitlines()
    assert (statement, place) == (numbers["statement"], f"Certificate: {run_folder / 'certificate'}")
    assert tries.startswith("certificate number ")


def test_certify_takes_a_risk_a_reference_and_groups(
    osp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = run(f"osp {SHORT} --train-on prior --sparsity 0", tmp_path / "dense")
    run_folder = shutil.copytree(osp, tmp_path / "osp")
    compared = json.loads(call("certify", run_folder, "--risk", "drop", "--reference", dense, "--json").stdout)
    assert "the drop in accuracy on new data of this network" in compared["statement"]
    assert call("verify", run_folder, "--recount").stdout.splitlines()[-1].startswith("VALID (level 2")
    assert compared["statement"] in (run_folder / "report.html").read_text()
    count = len((tries.folder() / tries.FILE).read_text().splitlines())
    assert "risk is drop there and error here" in refusal("certify", run_folder)
    assert len((tries.folder() / tries.FILE).read_text().splitlines()) == count  # what is refused is no try
    assert "compares with a reference network" in refusal("certify", osp, "--risk", "drop", "--out", tmp_path / "x")
    by_class = call("certify", osp, "--groups", "class", "--out", tmp_path / "classes")
    assert 'in each of the 10 groups; the largest bound is that of "class ' in by_class.stdout
    (tmp_path / "own_loss.py").write_text("def unsure(out, batch):\n    return 1 - out.softmax(-1).amax(-1)\n")
    monkeypatch.chdir(tmp_path)
    assert call("certify", osp, "--risk", "own_loss:unsure", "--out", "own").exit_code == 0
    assert call("verify", "own", "--recount", "--risk", "own_loss:unsure").exit_code == 0
    assert "give the function as --risk package.module:function" in refusal("verify", "own", "--recount")
    assert "the loss 'own_loss:sure' cannot be imported" in refusal("certify", osp, "--risk", "own_loss:sure")
    assert not (tmp_path / "x").exists()


def test_a_choice_among_networks_is_paid_for(osp: Path, tmp_path: Path) -> None:
    before = sorted(f for f in osp.rglob("*") if f.is_file())
    bound, bound_of_five = (
        json.loads(call("certify", osp, "--json", "--out", tmp_path / count, "--certified", count).stdout)["bound"]
        for count in ("1", "5")
    )
    assert bound < bound_of_five
    assert sorted(f for f in osp.rglob("*") if f.is_file()) == before
    assert call("verify", tmp_path / "5").exit_code == 0


def test_an_issued_certificate_is_never_replaced(osp: Path, pbp: Path, tmp_path: Path) -> None:
    def files() -> dict[Path, tuple[bytes, int]]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.rglob("*") if f.is_file()}

    first = call("certify", osp, "--out", tmp_path / "one")
    shutil.copytree(pbp / "certificate", tmp_path / "drawn")
    other = run(f"osp {SHORT} --train-on prior --seed 1", tmp_path / "other")
    before = files()
    assert "on these examples" in first.stdout
    assert call("certify", osp, "--out", tmp_path / "one").stdout == first.stdout  # with the same count of tries
    for words, message in {
        "--delta 0.1": "delta is 0.05 there and 0.1 here; choose another --out",
        "--certified 3": "certified is 1 there and 3 here",
    }.items():
        assert message in refusal("certify", osp, "--out", tmp_path / "one", *words.split())
    assert "kind is pac-bayes there and held-out here" in refusal("certify", osp, "--out", tmp_path / "drawn")
    assert "network is " in refusal("certify", other, "--out", tmp_path / "one")
    assert files() == before


def test_certify_refuses_a_network_that_saw_the_bound_set(tmp_path: Path, pbp: Path) -> None:
    run_folder = run("osp --dense-epochs 0 --epochs 1", tmp_path / "seen")
    line = refusal("certify", run_folder)
    assert "was trained on the bound set too" in line
    assert "--train-on prior" in line
    assert not (run_folder / "certificate").exists()
    assert f"has its certificate in {pbp / 'certificate'}" in refusal("certify", pbp)
    assert "holds no config.toml" in refusal("certify", tmp_path)
    (run_folder / "result.json").unlink()
    assert "is not finished" in refusal("certify", run_folder)


@pytest.mark.parametrize(("words", "message"), [("--delta 2", "delta is 2.0"), ("--certified 0", "certified is 0")])
def test_certify_checks_its_numbers(words: str, message: str, osp: Path) -> None:
    assert message in refusal("certify", osp, *words.split())


# --- pbp.


def test_family_and_grid_are_declared_beforehand(tmp_path: Path, pbp: Path) -> None:
    out = run(f"{PBP} --family excess --grid 4", tmp_path / "run")
    certificate, usual = decode.load(out / "certificate"), decode.load(pbp / "certificate")
    assert certificate.record["claim"]["family"] == "excess"
    assert certificate.ledger.grid == 4
    assert certificate.bound == certificate.bounds["excess"] > usual.bounds["excess"]
    assert certificate.record["model"] == "mlp"
    assert certificate.record["thresholded"]["inputs"] == 50
    assert call("verify", out).exit_code == 0
    assert "posterior Q, excess" in (out / "figures" / "certificate.csv").read_text()


def test_the_count_of_tries_stands_below_the_statement(pbp: Path) -> None:
    result = store.result(pbp)
    text = result["tries"]["text"]
    assert "declared and paid for" in text
    assert f"{result['statement']}\n{text}\n" in call(*PBP.split(), "--out", pbp).stdout


def test_a_sealed_run_says_at_every_step_what_comes_next(tmp_path: Path) -> None:
    source, out, (first, second) = "a number that the verifier draws", tmp_path / "run", ("9d0c51e07ab2f846", "a" * 16)
    begun = call(*PBP.split(), "--commit", "--source", source, "--out", out)
    assert begun.exit_code == 0, begun.stderr
    for command in ("certify", "verify"):
        line = refusal(command, out)
        assert "is sealed and has no certificate yet: Q is not trained" in line
        assert f"run pacprune commit {out}" in line
    assert "run pacprune commit first" in refusal("certify", out, "--beacon", first)
    sealed = call("commit", out)
    assert f"Publish it, and wait for {source}." in sealed.stdout.splitlines()
    for command in ("certify", "verify"):
        line = refusal(command, out)
        assert f"its draws wait for a beacon, {source}" in line
        assert f"pacprune certify {out} --beacon VALUE" in line
    certified = call("certify", out, "--beacon", first)
    assert certified.exit_code == 0, certified.stderr
    statement, tries, place = certified.stdout.splitlines()
    assert (statement, tries) == (store.result(out)["statement"], store.result(out)["tries"]["text"])
    assert place == f"Certificate: {out / 'certificate'}"
    commitment = decode.load(out / "certificate").record["commitment"]
    assert commitment is not None
    assert (commitment["source"], commitment["beacon"]) == (source, first)
    assert call("certify", out, "--beacon", first.upper()).stdout == certified.stdout
    assert f"drawn by the beacon {first[:12]}..." in refusal("certify", out, "--beacon", second)
    seals = re.findall("[0-9a-f]{64}", sealed.stdout)
    assert call("verify", out, "--seal", seals[0], "--seal", seals[1]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--source", "a number that the verifier draws"), "but without commit nothing is sealed"),
        (("--commit", "--source", 'a "number"'), "give a line of plain text without double quotes"),
    ],
)
def test_a_source_is_checked_before_anything_is_trained(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal("pbp", *words, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- selftest.


def test_selftest_counts_violations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(coverage, "STUDIES", STUDIES[:1])
    words = ("selftest", "coverage", "--trials", "100", "--seed", "3")
    result = call(*words, "--json", "--out", tmp_path)
    assert result.exit_code == 0
    numbers = json.loads(result.stdout)
    assert (numbers["ok"], numbers["trials"], numbers["seed"]) == (True, 100, 3)
    assert all(row["trials"] == 100 and row["ok"] for row in numbers["rows"])
    assert json.loads((tmp_path / "coverage.json").read_text()) == numbers
    assert "All bounds hold" in call(*words).stdout
    rows = coverage.run(100)
    monkeypatch.setattr(coverage, "run", lambda *_, **__: [replace(rows[0], ok=False)])
    assert call(*words).exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [("speed", "unknown self-test 'speed'; use coverage or widths"), ("coverage --trials 0", "trials is 0")],
)
def test_selftest_refuses_bad_arguments(words: str, message: str) -> None:
    assert message in refusal("selftest", *words.split())
