"""Held-out certificates of any risk: what is counted, what is claimed, what is refused, and what verifiers notice."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from mutations import arithmetic
from torch import Tensor, nn

import pacprune as pp
from pacprune import bounds
from pacprune.bounds import held_out as counts_bounds
from pacprune.bounds import montecarlo
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import decode, risks, tries, verify
from pacprune.certification.held_out import certify_sequence, tallies_of
from pacprune.certification.record import RiskRecord
from pacprune.data import trace

WORDS = "the weights are random numbers of the seed 0"


@cache
def made() -> tuple[pp.data.Split, nn.Module, list[nn.Module]]:
    """Digits, a dense network, and candidates from sparse to sparser."""
    trace._looks.clear()
    torch.manual_seed(0)
    split = pp.data.digits()
    dense = pp.models.mlp(64)
    pp.fit(dense, split.prior, pp.Config(epochs=8, lr=0.1))
    candidates = [copy.deepcopy(dense) for _ in range(4)]
    for candidate, sparsity in zip(candidates, (0.5, 0.8, 0.9, 0.97), strict=True):
        pp.osp(candidate, split.prior, pp.Config(epochs=1, lr=0.05), sparsity=sparsity)
    return split, dense, candidates


def logits(model: nn.Module, part: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(part.x)


def unsure(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 1 - output.softmax(-1).gather(-1, batch[1][:, None])[:, 0]


def far(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return unsure(output, batch) > 0.5


# --- What is counted, and the bound that follows.


def test_every_named_risk_is_what_its_definition_says() -> None:
    split, dense, (_, model, *_) = made()
    out, other, y, n = logits(model, split.bound), logits(dense, split.bound), split.bound.y, len(split.bound)
    wrong, dense_wrong = out.argmax(-1) != y, other.argmax(-1) != y
    plus, minus = int((wrong & ~dense_wrong).sum()), int((~wrong & dense_wrong).sum())
    brier = ((out.double().softmax(-1) - nn.functional.one_hot(y)) ** 2).sum(-1) / 2
    entropy = (-out.double().log_softmax(-1)[torch.arange(n), y]).clamp_max(np.log(1e4)) / np.log(1e4)
    expected = {
        "error": bounds.clopper_pearson(int(wrong.sum()), n=n, delta=0.05),
        "drop": counts_bounds.difference(plus, minus, n=n, delta=0.05),
        "disagreement": bounds.clopper_pearson(int((out.argmax(-1) != other.argmax(-1)).sum()), n=n, delta=0.05),
        "brier": montecarlo.betting(np.ceil(brier.numpy() * 65536) / 65536, delta=0.05),
        "cross-entropy": montecarlo.betting(np.ceil(entropy.numpy() * 65536) / 65536, delta=0.05),
    }
    for k in (2, 3, 5):
        missed = ~(out.topk(k).indices == y[:, None]).any(-1)
        expected[f"top{k}"] = bounds.clopper_pearson(int(missed.sum()), n=n, delta=0.05)
    for risk, bound in expected.items():
        reference = dense if risk in ("drop", "disagreement") else None
        certificate = pp.certify_held_out(model, split, risk=risk, reference=reference)
        assert certificate.bound == pytest.approx(bound, rel=1e-9), risk
        assert certificate.risk < certificate.bound


def test_a_plain_error_has_the_record_that_it_always_had() -> None:
    split, _, (model, *_) = made()
    certificate = pp.certify_held_out(model, split)
    assert certificate.record["kind"] == "held-out"
    assert (certificate.tests, certificate.passed, certificate.limit) == ([], 0, None)


def test_a_loss_of_ones_own_is_rounded_up_and_booleans_are_counted() -> None:
    split, _, (model, *_) = made()
    losses = unsure(logits(model, split.bound), (split.bound.x, split.bound.y)).double()
    certificate = pp.certify_held_out(model, split, risk=unsure)
    assert 0 <= certificate.risk - float(losses.mean()) < 1 / risks.LEVELS
    assert certificate.bound == pytest.approx(montecarlo.betting(losses.numpy(), delta=0.05), abs=2e-5)
    assert "the mean of the loss test_held_out:unsure on new data" in certificate.statement
    counted = pp.certify_held_out(model, split, risk=far)
    assert counted.tests[0]["counts"] == {"plus": int((losses > 0.5).sum()), "minus": 0}


def test_ties_of_outputs_count_as_those_of_argmax() -> None:
    output, y = torch.zeros(6, 4), torch.tensor([0, 1, 2, 3, 0, 3])
    for k, wrong in ((2, [0, 0, 1, 1, 0, 1]), (3, [0, 0, 0, 1, 0, 1])):
        values = risks.RISKS[f"top{k}"].values(risks.Answers(output, None, output, y))
        assert values.int().tolist() == wrong


def test_one_logit_and_several_labels() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 5)
    one, several = nn.Linear(5, 1), nn.Linear(5, 3)
    y = (x[:, 0] > 0).long()
    sign = pp.certify_held_out(one, (x, y), declare=WORDS)
    assert sign.tests[0]["counts"] == {"plus": int(((one(x)[:, 0] > 0) != (y > 0)).sum()), "minus": 0}
    labels = (x[:, :3] > 0).long()
    certificate = pp.certify_held_out(several, (x, labels), declare=WORDS)
    shares = ((several(x) > 0) != (labels > 0)).double().mean(1)
    assert certificate.risk == pytest.approx(float(shares.mean()), abs=2e-5)
    with pytest.raises(ValueError, match=r"labels have the shape \(300, 3\) and one 1 in every row, as classes in one"):
        pp.certify_held_out(several, (x, nn.functional.one_hot(y, 3)), declare=WORDS)


def test_groups_share_delta_and_the_worst_is_named() -> None:
    split, dense, (*_, model) = made()
    certificate = pp.certify_held_out(model, split, risk="error", groups="class")
    wrong = logits(model, split.bound).argmax(-1) != split.bound.y
    for test, label in zip(certificate.tests, range(10), strict=True):
        mask = split.bound.y == label
        bound = bounds.clopper_pearson(int(wrong[mask].sum()), n=int(mask.sum()), delta=0.05 / 10)
        assert (test["group"], test["n"], test["bound"]) == (f"class {label}", int(mask.sum()), bound)
    worst = max(certificate.tests, key=lambda test: test["bound"] or 0)
    assert certificate.bound == worst["bound"]
    assert certificate.statement.endswith(f'in each of the 10 groups; the largest bound is that of "{worst["group"]}".')
    by_key = pp.certify_held_out(model, split, groups=split.bound.y.tolist())
    assert [test["bound"] for test in by_key.tests] == [test["bound"] for test in certificate.tests]
    masks = {"bright": split.bound.x.mean((1, 2, 3)) > 0, "all": torch.ones(len(split.bound), dtype=torch.bool)}
    overlapping = pp.certify_held_out(model, split, risk="drop", reference=dense, groups=masks)
    assert [test["group"] for test in overlapping.tests] == ["bright", "all"]


def test_certified_networks_divide_delta() -> None:
    split, dense, (model, *_) = made()
    once, twice = (pp.certify_held_out(model, split, risk="drop", reference=dense, certified=count) for count in (1, 2))
    counts = once.tests[0]["counts"]
    assert counts is not None
    assert twice.bound == counts_bounds.difference(counts["plus"], counts["minus"], n=719, delta=0.025) > once.bound


# --- Sequences.


def test_a_sequence_passes_up_to_the_first_failure() -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates, split, limit=0.05, reference=dense)
    flags = [test["passed"] for test in certificate.tests]
    assert flags == [True] * certificate.passed + [False]
    assert 0 < certificate.passed < len(candidates)
    assert (certificate.bound, certificate.limit) == (0.05, 0.05)
    for test in certificate.tests:
        counts = test["counts"]
        assert counts is not None
        own = counts_bounds.difference(counts["plus"], counts["minus"], n=719, delta=0.05)
        assert test["passed"] == (own <= 0.05)
        assert test["bound"] == (None if test["passed"] else own)  # its own bound is quoted of the failed one alone
    last = candidates[certificate.passed - 1]
    assert certificate.sparsity == pp.sparsity(last)
    assert all(
        torch.equal(certificate.tensors["model.safetensors"][name], tensor)
        for name, tensor in last.state_dict().items()
    )
    assert f"each of the first {certificate.passed} of 4 candidates, in the declared order," in certificate.statement


def test_a_sequence_in_which_none_passes_says_so_and_is_not_written(tmp_path: Path) -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates[2:], split, limit=-0.2, reference=dense)
    assert (certificate.passed, len(certificate.tests)) == (0, 1)
    assert certificate.statement.startswith("No candidate passed: nothing shows that the drop in accuracy")
    assert certificate.bound == certificate.tests[0]["bound"] > -0.2
    with pytest.raises(ValueError, match="there is nothing to certify: No candidate passed"):
        certificate.save(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_number_of_examples_that_would_do() -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates, split, limit=-0.015, reference=dense)
    needed = int(certificate.statement.partition("about ")[2].partition(" examples")[0].replace(",", ""))
    test = certificate.tests[0]["counts"]
    assert certificate.passed == 0
    assert test is not None
    times = needed // 719
    assert counts_bounds.difference(test["plus"] * times, test["minus"] * times, n=719 * times, delta=0.05) <= -0.015
    hopeless = certify_sequence(candidates[3:], split, limit=-0.5, reference=dense)
    assert "so that more of them would not do" in hopeless.statement


def test_a_front_holds_for_all_candidates_at_once() -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates, split, limit=0.05, reference=dense, front=True)
    assert [test["passed"] for test in certificate.tests] == [None] * 4
    for test in certificate.tests:
        counts = test["counts"]
        assert counts is not None
        assert test["bound"] == counts_bounds.difference(counts["plus"], counts["minus"], n=719, delta=0.05 / 4)
    assert certificate.bound == certificate.tests[-1]["bound"]


# --- Verification.

CERTIFICATES = {
    "top-k": lambda s, d, c: pp.certify_held_out(c[1], s, risk="top2", name="mlp"),
    "drop": lambda s, d, c: pp.certify_held_out(c[1], s, risk="drop", reference=d, name="mlp"),
    "classes": lambda s, d, c: pp.certify_held_out(
        c[1], s, risk="disagreement", reference=d, groups="class", name="mlp"
    ),
    "Brier": lambda s, d, c: pp.certify_held_out(c[1], s, risk="brier", groups=["a", "b", "c"] * 239 + ["a"] * 2),
    "sequence": lambda s, d, c: certify_sequence(c, s, limit=0.05, reference=d, name="mlp"),
    "losses": lambda s, d, c: certify_sequence(c, s, risk="cross-entropy", limit=0.3, name="mlp"),
    "front": lambda s, d, c: certify_sequence(c, s, risk="error", limit=0.3, front=True),
}


@pytest.mark.parametrize("name", CERTIFICATES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_is_valid_at_level_two(name: str, packed: bool, tmp_path: Path) -> None:
    split, dense, candidates = made()
    certificate = CERTIFICATES[name](split, dense, candidates)
    folder = certificate.save(tmp_path, packed=packed)
    report = pp.verify(folder, split=split, model=pp.models.mlp(64))
    assert (report.valid, report.level) == (True, 2), report.failure
    assert arithmetic.verify(folder).verdict.startswith("VALID (level 1")
    saved = decode.load(folder)
    assert saved.statement == certificate.statement
    assert saved.tests == certificate.tests


def test_the_record_is_as_its_type_says(tmp_path: Path) -> None:
    from test_record import misfits

    split, dense, candidates = made()
    for name, issue in CERTIFICATES.items():
        saved = decode.load(issue(split, dense, candidates).save(tmp_path / name)).record
        assert misfits(saved, RiskRecord) == []


FORGERIES = {
    "tests[0].mean": lambda r: r["tests"][0]["counts"].update(plus=0),
    "tests[1].p_value": lambda r: r["tests"][1].update(p_value=1e-6),
    "the network in the folder is not the certified candidate": lambda r: r["tests"][3].update(passed=True),
    "they end with the first that does not pass": lambda r: r["tests"].pop(),
    "tests are not those of the candidates in their declared order": lambda r: r["order"].reverse(),
    "not in the order of their sparsity": lambda r: r["tests"][0].update(sparsity=0.99),
    "tests[0].bound": lambda r: r["tests"][0].update(bound=0.01),
    "bounds.held_out.bound": lambda r: r["bounds"]["held_out"].update(bound=0.04),
    "which do not fit 719 examples": lambda r: r["risk"].update(name="wish"),
    "statement": lambda r: r.update(statement=r["statement"].replace("0.0500", "0.0400")),
    "assumptions are not in the words": lambda r: r["assumptions"].pop(),
    "a limit belongs to a sequence": lambda r: r.update(limit=None),
    "rule is 'some'": lambda r: r.update(rule="some"),
    "do not fit": lambda r: r["tests"][0]["counts"].update(minus=719),
}


@pytest.mark.parametrize("words", FORGERIES)
def test_a_forged_sequence_is_refused(words: str, tmp_path: Path) -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates, split, limit=0.05, reference=dense)
    assert certificate.passed == 3
    files = mutations.read(certificate.save(tmp_path / "true"))
    record = mutations.record_of(files)
    FORGERIES[words](record)
    report = arithmetic.verify(mutations.write(mutations.stored(files, record), tmp_path / "forged"))
    assert not report.valid
    assert words in str(report.failure)


def test_levels_of_another_network_are_noticed(tmp_path: Path) -> None:
    split, _, (first, second, *_) = made()
    brier, other = (pp.certify_held_out(network, split, risk="brier") for network in (first, second))
    levels = {"examples.safetensors": other.tensors["examples.safetensors"]}
    report = pp.verify(pp.Certificate(brier.record, {**brier.tensors, **levels}).save(tmp_path / "stated"))
    assert str(report.failure).startswith("tests[0].mean")
    record: Any = {**other.record, "hashes": brier.record["hashes"], "sparsity": brier.sparsity}
    record |= {"order": brier.record["order"], "statement": other.statement.replace("0.8000)", "0.5000)")}  # type: ignore[typeddict-item]
    record["tests"] = [{**other.tests[0], "network": record["order"][0], "sparsity": brier.sparsity}]
    folder = pp.Certificate(record, {**brier.tensors, **levels}).save(tmp_path / "consistent")
    assert pp.verify(folder).valid
    report = pp.verify(folder, split=split, model=pp.models.mlp(64))
    assert "examples are not as stated" in str(report.failure)


def test_counts_that_fit_but_are_not_those_of_the_network_are_refused(tmp_path: Path) -> None:
    """The certificate of another network, whose tensors were put in place of its own."""
    split, dense, (first, second, *_) = made()
    issued = pp.certify_held_out(first, split, risk="disagreement", reference=dense)
    honest = pp.certify_held_out(second, split, risk="disagreement", reference=dense)
    record: Any = {**issued.record, "hashes": honest.record["hashes"], "sparsity": honest.sparsity}
    record["order"] = [honest.record["hashes"]["model"]]
    record["tests"] = [{**issued.tests[0], "network": record["order"][0], "sparsity": honest.sparsity}]
    record["statement"] = record["statement"].replace("sparsity 0.5000", "sparsity 0.8000")
    folder = pp.Certificate(record, honest.tensors).save(tmp_path)
    assert pp.verify(folder).valid  # level 1 cannot tell
    report = pp.verify(folder, split=split, model=pp.models.mlp(64))
    assert "values are 1 and 0 are -1, not" in str(report.failure)


def test_groups_called_after_classes_must_be_these(tmp_path: Path) -> None:
    split, _, (model, *_) = made()
    certificate = pp.certify_held_out(
        model, split, groups={f"class {k}": split.bound.y == (k + 1) % 10 for k in range(10)}
    )
    report = pp.verify(certificate.save(tmp_path), split=split, model=pp.models.mlp(64))
    assert "the group class 0 does not hold the examples of that class" in str(report.failure)


def test_a_loss_of_ones_own_is_recounted_by_its_function(tmp_path: Path) -> None:
    split, _, (model, *_) = made()
    folder = pp.certify_held_out(model, split, risk=unsure).save(tmp_path)
    assert pp.verify(folder, split=split, model=pp.models.mlp(64), risk=unsure).level == 2
    with pytest.raises(ValueError, match="about the risk test_held_out:unsure; give the function as risk="):
        pp.verify(folder, split=split, model=pp.models.mlp(64))
    report = pp.verify(folder, split=split, model=pp.models.mlp(64), risk=lambda out, batch: 1 - unsure(out, batch))
    assert "examples are not as stated" in str(report.failure)


def test_a_claim_that_the_test_part_refutes_is_refused(tmp_path: Path) -> None:
    """Bound examples on which the network was trained, which nobody could trace."""
    torch.manual_seed(0)
    noise = torch.randn(400, 20), torch.randint(2, (400,))
    split = pp.data.split(*noise, test=(torch.randn(400, 20), torch.randint(2, (400,))))
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(split.bound.x), split.bound.y).backward()
        optimizer.step()
    certificate = pp.certify_held_out(model, split, risk="brier", declare="it was trained on other data alone")
    report = pp.verify(certificate.save(tmp_path), split=split, model=model)
    assert "refuted by the test set: the mean Brier loss is" in str(report.failure)


# --- Pairs, rules and bad input.


def test_all_examples_of_a_pair_are_bound_examples(tmp_path: Path) -> None:
    split, dense, (model, *_) = made()
    pair = split.test.x, split.test.y
    certificate = pp.certify_held_out(model, pair)
    assert certificate.n == len(split.test)
    assert any("nor on a changed copy of one" in line for line in certificate.record["assumptions"])
    folder = certificate.save(tmp_path / "pair")
    assert pp.verify(folder, split=pair, model=pp.models.mlp(64)).level == 2
    unlabelled = pp.certify_held_out(model, (split.test.x.numpy(), None), risk="disagreement", reference=dense)
    report = pp.verify(unlabelled.save(tmp_path / "inputs"), split=(split.test.x, None), model=pp.models.mlp(64))
    assert report.level == 2
    assert not any("labels" in line for line in unlabelled.record["assumptions"])


def test_networks_that_saw_the_examples_are_refused() -> None:
    split, dense, (model, *_) = made()
    with pytest.raises(ValueError, match="the network has seen the bound set: 100 of its 100 examples"):
        pp.certify_held_out(model, (split.prior.x[:100], split.prior.y[:100]))
    seen = copy.deepcopy(dense)
    pp.fit(seen, split.train, pp.Config(epochs=1))
    with pytest.raises(ValueError, match="the reference has seen the bound set"):
        pp.certify_held_out(model, split, risk="drop", reference=seen)
    with pytest.raises(ValueError, match="candidate 2 has seen the bound set"):
        certify_sequence([model, seen], split, limit=0.1, reference=dense)
    with pytest.raises(ValueError, match="pacprune has never trained the network"):
        pp.certify_held_out(pp.models.mlp(64), (split.test.x, split.test.y))


def test_a_bound_set_that_was_looked_at_before_training_is_refused() -> None:
    split, dense, _ = made()
    trace._looks.clear()
    try:
        pp.error(dense, split.bound)
        chosen = copy.deepcopy(dense)
        pp.fit(chosen, split.prior, pp.Config(epochs=1))
        with pytest.raises(ValueError, match="before anything is evaluated on"):
            pp.certify_held_out(chosen, split, risk="disagreement", reference=dense)
    finally:
        trace._looks.clear()


BAD_INPUT = {
    "the loss of example 0 is 2, but a loss must lie in [0, 1]; the losses run from 2 to 2": {
        "risk": lambda out, batch: torch.full((len(out),), 2.0)
    },
    "of a batch of 64 examples has the shape (); give one value for each": {"risk": lambda out, batch: out.mean()},
    "the risk 'drop' compares with a reference network, but there is none": {"risk": "drop"},
    "risk 'wish' is unknown; use one of error, top2": {"risk": "wish"},
    "delta is 1.5; it must lie in [1e-12, 1)": {"risk": "top2", "delta": 1.5},
    "groups is 'shape' and there are 10 classes": {"groups": "shape"},
    "groups have the shape (3,), but there are 719 bound examples": {"groups": ["a", "b", "c"]},
    "the group none has 0 of the 719 bound examples": {"groups": {"none": torch.zeros(719, dtype=torch.bool)}},
    "the mask of some is torch.float32": {"groups": {"some": torch.zeros(719)}},
    "a group is called ''": {"groups": {"": torch.ones(719, dtype=torch.bool)}},
    "top10 needs one label for each row of more than 10 outputs": {"risk": "top10"},
    "the model has stochastic masks": {"risk": "top2", "attached": True},
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_sentence(words: str) -> None:
    split, _, (model, *_) = made()
    options = dict(BAD_INPUT[words])
    if options.pop("attached", False):
        model = pp.attach(copy.deepcopy(model), pp.isotropic(pp.models.mlp(64), sparsity=0.5))
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        pp.certify_held_out(model, split, **options)
    assert "\n" not in str(refusal.value)


def test_bad_references_labels_orders_and_limits_are_one_sentence() -> None:
    split, dense, candidates = made()
    with pytest.raises(ValueError, match="the risk 'error' does not look at a reference network, but one is given"):
        pp.certify_held_out(dense, split, reference=dense)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ValueError, match=r"outputs have shape \(10,\) and those of the reference \(3,\)"):
        pp.certify_held_out(dense, split, risk="disagreement", reference=other, declare=WORDS)
    with pytest.raises(ValueError, match="the risk 'top2' needs labels, but y is None"):
        pp.certify_held_out(dense, (split.test.x, None), risk="top2")
    with pytest.raises(ValueError, match=r"needs a Split or a pair \(x, y\)"):
        pp.certify_held_out(dense, split.test.x, risk="top2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"candidate 2 has sparsity 0.5000, less than the 0.8000 of candidate 1"):
        certify_sequence(candidates[1::-1], split, limit=0.1, reference=dense)
    with pytest.raises(ValueError, match="the limit is 0, but it must lie strictly between 0 and 1"):
        certify_sequence(candidates, split, risk="error", limit=0)
    with pytest.raises(ValueError, match="there are 0 candidates"):
        certify_sequence([], split, limit=0.1, reference=dense)


def test_a_certified_drop_can_be_watched(tmp_path: Path) -> None:
    split, dense, candidates = made()
    certificate = certify_sequence(candidates, split, limit=0.05, reference=dense)
    monitor = pp.Monitor(certificate.save(tmp_path / "certificate"))
    assert monitor.watch.limit == pytest.approx(0.525)
    assert "the certified 0.5250, that is a drop of 0.0500" in monitor.statement
    assert monitor.update([0.0] * 100, first=1).alarm_at is None
    assert monitor.update([1.0] * 100, first=101).alarm_at is not None


def test_tries_are_counted_with_what_the_claim_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACPRUNE_LEDGER", raising=False)
    split, dense, candidates = made()
    first = pp.certify_held_out(candidates[0], split, risk="drop", reference=dense)
    again = pp.certify_held_out(candidates[0], split, risk="drop", reference=dense)
    other = pp.certify_held_out(candidates[0], split, risk="brier")
    assert [c.tries.number for c in (first, again, other) if c.tries] == [1, 1, 2]
    counts = first.tests[0]["counts"]
    assert counts is not None
    assert first.tries is not None
    assert first.tries.undeclared_bound == counts_bounds.difference(counts["plus"], counts["minus"], n=719, delta=0.025)
    tested = certify_sequence(candidates, split, limit=0.05, reference=dense)
    assert tested.tries is not None
    assert tested.tries.undeclared_bound in (0.05, 1.0)


def test_a_walk_says_what_is_left_of_it_at_the_level_of_its_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a walk there is no bound to take instead: its first tests may pass, and it may end earlier."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACPRUNE_LEDGER", raising=False)
    split, dense, candidates = made()
    said = set()
    for limit in (0.012, 0.02, 0.03, 0.04, 0.05, 0.06, 0.2):
        walk = certify_sequence(candidates, split, limit=limit, reference=dense)
        tries, level = walk.tries, 0.05
        assert tries is not None
        assert tries.number is not None
        level /= tries.number * (tries.number + 1)
        p_values = [test["p_value"] for test in walk.tests]
        kept = next((k for k, p in enumerate(p_values) if p > level), len(p_values))
        bound = f"of the densest it is proved there that it is at most {rounded_up(tallies_of(walk)[0].bound(level))}"
        states = {
            "first": (tries.number == 1, "1 declared and paid for"),
            "failed": (walk.passed == 0, f"take {tallies_of(walk)[0].bound(level):.4f} instead, the bound at delta"),
            "nothing": (kept == 0, f"none of the {walk.passed} networks that passed still passes; {bound}"),
            "part": (kept < walk.passed, f"only the first {kept} of the {walk.passed} networks that passed still pass"),
            "all": (True, "still pass, so that the claim stays as it is"),
        }
        state, words = next((state, words) for state, (holds, words) in states.items() if holds)
        assert words in str(tries)
        assert "nothing is proved, since" not in str(tries)
        assert (state == "first") == ("delta / (" not in str(tries))
        said.add(state)
    assert len(said) >= 3, said


def test_walks_that_nobody_declared_hold_together_at_the_levels_that_the_line_names() -> None:
    """Twenty chains whose densest candidate is just above the limit: what is left of them is rarely false."""
    trials, chains, n, limit, delta = 4000, 20, 200, 0.1, 0.05
    errors = np.random.default_rng(0).binomial(n, limit + 1e-9, size=(trials, chains))
    table = np.array([risks.Tally(n, plus=k).p_value(limit) for k in range(n + 1)])
    numbers = np.arange(1, chains + 1)
    false = {
        "each at delta": (table[errors] <= delta).any(1).mean(),
        "at the levels": (table[errors] <= delta / (numbers * (numbers + 1))).any(1).mean(),
    }
    assert false["each at delta"] > 0.3
    assert false["at the levels"] <= delta


class Fixed(torch.nn.Module):
    """Answers that do not depend on weights: of every input, these columns."""

    def __init__(self, *signs: float) -> None:
        super().__init__()
        self.signs = torch.nn.Parameter(torch.tensor([signs]))

    def forward(self, x):
        return x.abs() * self.signs


def test_disagreement_of_several_labels_is_counted_label_by_label():
    x = torch.rand(400, 3) + torch.tensor([5.0, 0.1, 0.1])
    y = torch.ones(400, 3)
    y[::2, 1] = 0
    pair = {"declare": "Nothing was trained.", "risk": "disagreement", "reference": Fixed(1.0, 1.0, 1.0)}
    certificate = pp.certify_held_out(Fixed(1.0, -1.0, -1.0), (x, y), **pair)
    assert certificate.tests[0]["mean"] == pytest.approx(2 / 3, abs=1e-4)


def test_networks_without_classes_cannot_disagree():
    x, y = torch.rand(50, 1), torch.rand(50, 1)
    with pytest.raises(ValueError, match="as in regression"):
        pp.certify_held_out(
            Fixed(1.0), (x, y), risk="disagreement", reference=Fixed(2.0), declare="Nothing was trained."
        )


def test_a_network_is_not_compared_with_itself():
    x = torch.rand(50, 3)
    net = Fixed(1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="weights of the network itself"):
        pp.certify_held_out(net, (x, None), risk="disagreement", reference=net, declare="Nothing was trained.")


def test_classes_need_labels():
    x = torch.rand(50, 3)
    networks = {"risk": "disagreement", "reference": Fixed(1.0, 2.0, 3.0), "declare": "Nothing was trained."}
    with pytest.raises(ValueError, match="y is None; give labels"):
        pp.certify_held_out(Fixed(3.0, 2.0, 1.0), (x, None), groups="class", **networks)


def test_one_example_has_the_singular(tmp_path: Path):
    x, y = torch.rand(1, 3), torch.tensor([2])
    certificate = pp.certify_held_out(Fixed(1.0, -1.0, -1.0), (x, y), declare="Nothing was trained.")
    assert "over the draw of the 1 bound example, the" in certificate.statement
    certificate.save(tmp_path / "one")
    assert pp.verify(tmp_path / "one").valid


def test_every_misfit_is_one_sentence_with_both_values():
    """What torch says of them is of no use to a reader: the sentence has the shapes, and a remedy."""
    split, dense, _ = made()
    x, y = split.test.x, split.test.y
    stated = {"declare": "nothing of it was trained on these data"}
    real = torch.rand(len(y), generator=torch.Generator().manual_seed(0))
    for sentence, arguments, options in (
        (
            "labels are torch.float32 and run from .* class numbers from 0 to 9; give y.long",
            (dense, (x, real)),
            "brier",
        ),
        (
            "labels are torch.float32 and run from .* class numbers from 0 to 9; give",
            (dense, (x, real)),
            "cross-entropy",
        ),
        ("labels are torch.float32 and run from .* class numbers from 0 to 9; give y", (dense, (x, real)), "top3"),
        ("labels run from .* as in regression", (dense, (x, real)), "error"),
        ("labels run from 3 to 12, but the model has 10 outputs", (dense, (x, y % 3 + 3 + 7 * (y == 5))), "brier"),
        (
            r"the network cannot take examples of shape \(1, 8, 8\) in torch.float32 .*; give a network",
            (nn.Linear(65, 10), (x, y)),
            "error",
        ),
        (r"the network cannot take examples of shape \(1, 8, 8\)", (nn.Linear(65, 10), split), "error"),
        (
            r"the reference cannot take examples of shape \(1, 8, 8\) .*; give a network",
            (dense, (x, y)),
            {"risk": "drop", "reference": nn.Linear(65, 10)},
        ),
        (
            r"outputs have shape \(10,\) and those of the reference \(1,\); give a reference",
            (dense, (x, y)),
            {"risk": "disagreement", "reference": nn.Sequential(nn.Flatten(), nn.Linear(64, 1))},
        ),
        (
            r"cannot be computed of outputs of shape \(64, 10\) and labels \(64,\) in torch.int64",
            (dense, (x, y)),
            {"risk": lambda output, batch: output + torch.zeros(3)},
        ),
    ):
        keywords = options if isinstance(options, dict) else {"risk": options}
        with pytest.raises(ValueError, match=sentence) as refusal:
            pp.certify_held_out(*arguments, **keywords, **stated)
        assert "\n" not in str(refusal.value)


def test_answers_that_are_no_numbers_are_no_right_answers_of_a_plain_error():
    """argmax takes NaN for class 0, so that a network of NaN was right on every zero."""
    split, dense, _ = made()

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(dense)

        def forward(self, x):
            return torch.where(x.flatten(1).sum(1)[:, None] > 5, float("nan"), self.inner(x))

    with pytest.raises(ValueError, match=r"\d+ of 7190 outputs of the network are NaN"):
        pp.certify_held_out(Odd(), split, declare="it is made of a trained network")


def test_a_last_batch_of_single_labels_is_no_one_hot_form():
    x, y = torch.rand(1002, 3) + 0.5, torch.ones(1002, 3)
    y[::2, 1] = 0
    y[1000:] = torch.tensor([1.0, 0.0, 0.0])
    certificate = pp.certify_held_out(Fixed(1.0, 1.0, 1.0), (x, y), declare="Nothing was trained.")
    assert certificate.risk == pytest.approx((500 + 4) / 3006, abs=1e-4)


def test_labels_in_a_column_are_counted():
    x = torch.rand(200, 1) - 0.5
    y = (x > 0.1).long()
    certificate = pp.certify_held_out(Fixed(1.0), (x.abs(), y), declare="Nothing was trained.")
    assert certificate.tests[0]["counts"] == {"plus": int((y == 0).sum()), "minus": 0}


def test_a_network_that_was_trained_after_a_certificate_is_called_so(monkeypatch, tmp_path):
    """A certificate leaves no look: what is trained after it is certified, counted, and named for what it may be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACPRUNE_LEDGER", raising=False)
    tries._known.clear()
    trace._looks.clear()
    split = pp.data.digits(seed=7)
    config = pp.Config(epochs=1, lr=0.1)
    networks = [pp.models.mlp(64, hidden=[16], seed=k) for k in range(3)]
    for network in networks[:2]:
        pp.fit(network, split.prior, config)
    first, second = (pp.certify_held_out(network, split) for network in networks[:2])
    pp.fit(networks[2], split.prior, config)
    later = pp.certify_held_out(networks[2], split)
    drop = certify_sequence([networks[2]], split, limit=0.5, reference=networks[0])
    declared = pp.certify_held_out(networks[2], split, certified=9)
    words = "trained or loaded after one of the others was known: if it was made because of that, no level is small"
    said = [words in str(certificate.tries) for certificate in (first, second, later, drop, declared)]
    assert said == [False, False, True, True, False]
    # An evaluation is a look, and is refused.
    pp.error(networks[0], split.bound)
    pp.fit(networks[1], split.prior, config)
    with pytest.raises(ValueError, match="before anything is evaluated on"):
        pp.certify_held_out(networks[1], split)
    trace._looks.clear()


def test_a_bound_set_that_another_network_was_evaluated_on_is_named_as_such() -> None:
    generator = torch.Generator().manual_seed(5)
    split = pp.data.split(torch.randn(200, 6, generator=generator), torch.arange(200) % 2, seed=0)
    pp.error(nn.Linear(6, 2), split.bound)
    model = nn.Linear(6, 2)
    pp.fit(model, split.prior, pp.Config(epochs=1))
    sentence = "the network has seen the bound set: something was evaluated on 100 of its 100 examples before, and the"
    with pytest.raises(ValueError, match=sentence):
        pp.certify_held_out(model, split)
    pp.fit(model, split.bound, pp.Config(epochs=1))
    with pytest.raises(ValueError, match="100 of its 100 examples were used to train"):
        pp.certify_held_out(model, split)


def test_a_plain_certificate_has_no_reference_network_and_its_folder_may_be_that_around(tmp_path: Path) -> None:
    split = pp.data.digits(seed=7)
    model = pp.models.mlp(64, hidden=[8])
    pp.fit(model, split.prior, pp.Config(epochs=1))
    pp.certify_held_out(model, split).save(tmp_path / "certificate")
    report = pp.verify(tmp_path, split=split, model=model)
    assert report.level == 2
    assert any(finding.startswith("test error of the certified network: ") for finding in report.findings)
    assert verify.verify(tmp_path).valid


def test_hashes_that_begin_alike_are_shown_whole() -> None:
    first, second = "a" * 64, "a" * 63 + "b"
    assert str(verify.Report(False, 1, (), f"it is {first} and not {second}")).endswith(
        f"it is {first} and not {second}"
    )
    other = "b" * 64
    assert str(verify.Report(False, 1, (), f"{first} is {other} here")).endswith(
        f"{first[:12]}... is {other[:12]}... here"
    )
