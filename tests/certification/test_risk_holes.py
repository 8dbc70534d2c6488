"""Attacks on certificates of risks that worked once: each is a test by its name, and none works any more.

The forgeries have digests that fit, as those of an issuer who writes whatever he likes.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import pytest
import torch
from mutations import Files, Record, arithmetic, record_of, stored
from test_held_out import WORDS, made
from test_page import Browser, by_page, by_script, in_a_browser, kind, ordinary
from torch import Tensor, nn

import pacprune as pp
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import page, risks
from pacprune.certification.held_out import certify_sequence, tallies_of
from pacprune.certification.recount import RiskAudit
from pacprune.data import trace


@cache
def issued(sort: str) -> Files:
    """A true certificate, in files that are not packed."""
    torch.manual_seed(0)
    trace._looks.clear()
    with tempfile.TemporaryDirectory() as folder:
        return mutations.read(mutations.SORTS[sort]().save(folder))


def forged(sort: str, change: Callable[[Record], Any]) -> Files:
    record = record_of(issued(sort))
    change(record)
    if record["kind"] == "risk":
        record["assumptions"] = arithmetic.assumptions(record)
    return stored(issued(sort), record)


# --- Folders: all three verifiers give one answer.


def lie_at_a_tiny_delta(record: Record) -> None:
    """A p-value of 2e-13, stated as one that passes at 1e-21: the rounding that is allowed was larger than delta."""
    ledger, test = record["bounds"]["held_out"]["ledger"], record["tests"][0]
    ledger.update(delta=1e-12, pac_bayes=1e-12, certified=10**9)
    for test in record["tests"]:
        test["counts"]["plus"] += 20
        test["mean"] = (test["counts"]["plus"] - test["counts"]["minus"]) / test["n"]
        test["p_value"] = 1e-22
    record["statement"] = record["statement"].replace("95 %", "99.9999999999 %")


def speak_as_a_group(record: Record) -> None:
    worst = max(record["tests"], key=lambda test: test["bound"])
    name, worst["group"] = worst["group"], "b. The drop in accuracy of all is at most 0.0001"
    record["statement"] = re.sub(f'"?{name}"?[.]$', f"{worst['group']}.", record["statement"])


def speak_as_a_loss(record: Record) -> None:
    name, record["risk"]["name"] = record["risk"]["name"], "a: it is 0. Besides, the error rate"
    record["statement"] = record["statement"].replace(name, record["risk"]["name"])


def leave_a_group_out(record: Record) -> None:
    """The groups that are left are called all of them."""
    record["statement"] = record["statement"].replace(", which leave out 360 bound examples", "")


def whole_number_as_a_bound(record: Record) -> None:
    """1 in place of 1.0, which one verifier took for another number."""
    record["tests"][0].update(counts={"plus": 719, "minus": 0}, mean=1.0, bound=1)
    record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = 1.0
    record["statement"] = re.sub(r"at most [0-9.]+\.", "at most 1.0000.", record["statement"])


def an_older_version(record: Record) -> None:
    record["version"] = 2
    record["bounds"]["held_out"]["ledger"].pop("share")


def a_share_of_nothing(record: Record) -> None:
    """So small a share, divided by so many certificates, that it is 0."""
    record["shares"]["groups"]["main"].update(certificates=10**9, share=5e-324)
    for entry in record["bounds"].values():
        entry["ledger"]["share"] = 0.0
    record["assumptions"] = arithmetic.assumptions(record)


def other_booleans() -> Files:
    """Members of a group by the byte 255: readers may count them as they like."""
    files = issued("drop by class")
    content = files["examples.safetensors"]
    assert isinstance(content, bytes)
    tensors, metadata = mutations.parsed(content)
    dtype, shape, mask = tensors["group/0"]
    tensors["group/0"] = dtype, shape, mask.replace(b"\1", b"\xff")
    changed = mutations.packed_up(*mutations.header_of(tensors, metadata))
    return stored({**files, "examples.safetensors": changed}, record_of(files))


FOLDERS: dict[str, tuple[str, str, Callable[[], Files]]] = {
    "a delta below the rounding of p-values": (
        "refused",
        "p-values are exact to 1e-12 alone",
        lambda: forged("sequence, packed", lie_at_a_tiny_delta),
    ),
    "a group that speaks": ("refused", "statement", lambda: forged("drop by class", speak_as_a_group)),
    "a loss that speaks": ("refused", "has a space in its name", lambda: forged("loss, declared", speak_as_a_loss)),
    "groups that are not all": ("refused", "statement", lambda: forged("one group", leave_a_group_out)),
    "a bound of 1 as a whole number": ("valid", "", lambda: forged("top-k", whole_number_as_a_bound)),
    "a risk of version 2": ("unreadable", "of the kind 'risk'", lambda: forged("top-k", an_older_version)),
    "a share of 0": ("refused", "has the impossible share", lambda: forged("shares", a_share_of_nothing)),
    "Booleans that are no bits": ("unreadable", "other Booleans than 0 and 1", other_booleans),
}


@pytest.fixture(scope="module", autouse=True)
def one_group() -> Iterator[None]:
    """A certificate about one of two groups."""
    odd = torch.arange(719) % 2 == 1
    mutations.SORTS["one group"] = lambda: mutations._risk("brier", groups={"odd": odd})
    yield
    del mutations.SORTS["one group"]


@pytest.mark.parametrize("name", FOLDERS)
def test_library_and_script_refuse_what_a_forger_writes(name: str, tmp_path: Path) -> None:
    answer, words, files = FOLDERS[name]
    folder = mutations.write(files(), tmp_path / "forged")
    verdict, reason = by_script(folder)
    assert verdict == answer
    assert words in reason or answer == "valid"
    if answer == "unreadable":
        with pytest.raises(ValueError, match=re.escape(words)):
            pp.verify(folder)
    else:
        assert pp.verify(folder).valid == (answer == "valid")


@in_a_browser
def test_the_page_refuses_what_a_forger_writes(tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.PAGE)
        for name, (answer, words, files) in FOLDERS.items():
            (result,) = by_page(browser, [ordinary(files())])
            assert (kind(result), name) == (answer, name)
            assert words in result["verdict"], name
        (result,) = by_page(browser, [ordinary(issued("one group"))])
        assert result["valid"]
    finally:
        browser.close()


# --- Networks and losses that no certificate can be about.


class Scaled(nn.Module):
    """A network whose outputs are changed by a function of them."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = copy.deepcopy(inner), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


@pytest.mark.parametrize("risk", ["top3", "drop", "disagreement"])
def test_outputs_that_are_no_numbers_are_not_right(risk: str) -> None:
    split, dense, _ = made()
    model = Scaled(dense, lambda out: out * float("nan"))
    reference = None if risk == "top3" else dense
    with pytest.raises(ValueError, match="20 of 20 outputs of the network are NaN"):
        pp.certify_held_out(model, split, risk=risk, reference=reference, declare=WORDS)


def test_outputs_in_a_wrapping_that_depend_on_the_batch_are_refused() -> None:
    split, dense, _ = made()
    model = Scaled(dense, lambda out: SimpleNamespace(logits=out - 5 * out.mean(0)))
    with pytest.raises(ValueError, match="depend on what else is in the batch"):
        pp.certify_held_out(model, split, risk="disagreement", reference=model, declare=WORDS)


def test_a_loss_of_the_whole_batch_is_refused() -> None:
    """Its values are all alike, so that betting took them for certain: 0.0718 in place of 0.0821."""
    split, dense, _ = made()
    with pytest.raises(ValueError, match="the losses of 64 of 64 examples depend on what else is in the batch"):
        pp.certify_held_out(
            dense, split, risk=lambda out, batch: (out.argmax(-1) != batch[1]).double().mean() + 0 * out[:, 0]
        )


def test_values_that_depend_on_the_batch_are_refused_at_level_two(tmp_path: Path) -> None:
    """The largest output is that of the input alone, the Brier loss is not."""
    split, dense, _ = made()
    sharp = Scaled(dense, lambda out: out * (1.0 if len(out) == 1 else 0.1))
    honest = pp.certify_held_out(Scaled(dense, lambda out: out), split, risk="brier", declare=WORDS)
    report = pp.verify(honest.save(tmp_path), split=split, model=sharp)
    assert "depend on what else is in the batch" in str(report.failure)


def test_networks_with_several_labels_disagree_label_by_label() -> None:
    """Their largest outputs agree, and three of four labels do not."""
    x, y = torch.randn(300, 5), (torch.rand(300, 4) > 0.5).float()
    first, second = nn.Linear(5, 4), nn.Linear(5, 4)
    with torch.no_grad():
        for network, sign in ((first, 1.0), (second, -1.0)):
            network.weight.zero_()
            network.bias.copy_(torch.tensor([5.0, 4 * sign, 3 * sign, 2 * sign]))
    certificate = pp.certify_held_out(first, (x, y), risk="disagreement", reference=second, declare=WORDS)
    assert certificate.risk == 0.75


@pytest.mark.parametrize("risk", ["brier", "cross-entropy"])
def test_one_output_has_no_loss_of_several_classes(risk: str) -> None:
    with pytest.raises(ValueError, match="at least 2 outputs"):
        pp.certify_held_out(nn.Linear(5, 1), (torch.randn(300, 5), torch.zeros(300).long()), risk=risk, declare=WORDS)


def test_a_delta_that_no_p_value_can_be_compared_with_is_refused() -> None:
    split, dense, candidates = made()
    with pytest.raises(ValueError, match="delta is 1e-10, but p-values are exact to 1e-12 alone"):
        certify_sequence(candidates, split, limit=0.05, reference=dense, delta=1e-10)


@pytest.mark.parametrize("share", [(10**9, 1e-4), (1, 1e-13), (10**10, 1.0)])
def test_shares_that_no_verifier_accepts_are_refused_before_anything_is_drawn(share: tuple[int, float]) -> None:
    split, dense, _ = made()
    prior = pp.read(pp.attach(copy.deepcopy(dense), pp.isotropic(dense, sparsity=0.5, std=0.01)))
    with pytest.raises(ValueError, match="at least 1e-12 for each"):
        pp.commit(prior, split, shares={"all": share}, group="all")


# --- Level 2: what may be other than stated.


def test_values_of_a_small_group_cannot_be_edited(tmp_path: Path) -> None:
    """Three of 719 examples might differ by rounding; in a group of three these were all of it."""
    split, _, (model, *_) = made()
    worst = pp.certify_held_out(model, split, risk="brier").tensors["examples.safetensors"]["levels/0"].topk(3).indices
    mask = torch.zeros(719, dtype=torch.bool)
    mask[worst] = True
    honest = pp.certify_held_out(model, split, risk="brier", groups={"few": mask, "rest": ~mask})
    examples = dict(honest.tensors["examples.safetensors"])
    examples["levels/0"] = examples["levels/0"].clone()
    examples["levels/0"][worst] = 0
    edited = pp.Certificate(honest.record, {**honest.tensors, "examples.safetensors": examples})
    record: Any = copy.deepcopy(honest.record)
    tallies = tallies_of(edited)
    for test, tally in zip(record["tests"], tallies, strict=True):
        test |= {"mean": tally.mean, "bound": tally.bound(0.025)}
    bound = max(test["bound"] for test in record["tests"])
    record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = bound
    figure = f"at most {rounded_up(bound)} in"
    record["statement"] = re.sub(r"at most [0-9.]+ in", figure, record["statement"])
    folder = pp.Certificate(record, edited.tensors).save(tmp_path)
    assert pp.verify(folder).valid  # level 1 cannot tell
    report = pp.verify(folder, split=split, model=pp.models.mlp(64))
    assert "the values of 3 of 719 examples are not as stated" in str(report.failure)


def test_a_few_errors_of_each_of_many_groups_cannot_be_kept_quiet(tmp_path: Path) -> None:
    """All answers of a network hang on rounding: up to three were excused in each of 240 groups."""
    split, dense, _ = made()
    model = Scaled(dense, lambda out: 1e6 + 1e-3 * out)
    keys = torch.arange(719) // 3
    honest = pp.certify_held_out(model, split, groups=keys, declare=WORDS)
    record: Any = copy.deepcopy(honest.record)
    each = 0.05 / len(record["tests"])
    for test in record["tests"]:
        test |= {"counts": {"plus": 0, "minus": 0}, "mean": 0.0}
        test["bound"] = pp.bounds.clopper_pearson(0, n=test["n"], delta=each)
    bound = max(test["bound"] for test in record["tests"])
    worst = max(record["tests"], key=lambda test: test["bound"])
    record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = bound
    figure = f"at most {rounded_up(bound)} in"
    record["statement"] = re.sub(r"at most [0-9.]+ in", figure, record["statement"])
    record["statement"] = re.sub('that of "[0-9]+"', f'that of "{worst["group"]}"', record["statement"])
    folder = pp.Certificate(record, honest.tensors).save(tmp_path)
    assert pp.verify(folder).valid  # level 1 cannot tell
    report = pp.verify(folder, split=split, model=model)
    assert "values in all groups are not as stated; rounding can turn 3" in str(report.failure)


def test_a_value_that_rounding_makes_jump_is_no_fraud(tmp_path: Path) -> None:
    """An error as 0.0 or 1.0, on an example whose two largest outputs are equal up to rounding."""
    split, dense, _ = made()
    model = Scaled(dense, lambda out: torch.where(torch.arange(10) < 2, 1e3 + 1e-5 * out, -1e3 + 0 * out))
    certificate = pp.certify_held_out(model, split, risk=wrong, declare=WORDS)
    examples = dict(certificate.tensors["examples.safetensors"])
    levels = examples["levels/0"] = examples["levels/0"].clone()
    turned = int((split.bound.y < 2).nonzero()[0])
    levels[turned] = 2**16 - levels[turned]
    assert certificate.record["kind"] == "risk"
    audited = RiskAudit(
        pp.Certificate(certificate.record, {"examples.safetensors": examples}),
        certificate.record,
        split,
        model,
        None,
        risks.find(wrong)[1],
    )
    assert audited.recount_failure() is None


def wrong(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output.argmax(-1) != batch[1]).double()


# --- Tries, and the monitor.


def test_other_groups_and_losses_of_the_same_name_are_other_tries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACPRUNE_LEDGER", raising=False)
    split, dense, candidates = made()
    mask = torch.arange(719) < 300
    certificates = [
        *(pp.certify_held_out(dense, split, groups={"a": m, "b": ~m}) for m in (mask, mask.flip(0))),
        *(
            pp.certify_held_out(dense, split, risk=lambda out, batch, power=power: out.softmax(-1)[:, 0] ** power)
            for power in (1, 2)
        ),
        *(certify_sequence(order, split, limit=0.05, reference=dense) for order in (candidates, candidates[1:])),
    ]
    assert [c.tries.number for c in certificates if c.tries] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["leave out", "overlap"])
def test_a_monitor_does_not_watch_all_by_the_bounds_of_some(kind: str) -> None:
    """Where groups leave examples out, or overlap, the risk of all may be above the largest bound of a group."""
    split, dense, _ = made()
    mask = torch.arange(719) < 300
    groups = {"a": mask} if kind == "leave out" else {"a": mask, "b": torch.ones(719, dtype=torch.bool)}
    with pytest.raises(ValueError, match="are in no group of the certificate, or in several"):
        pp.Monitor(pp.certify_held_out(dense, split, groups=groups))
    assert pp.Monitor(pp.certify_held_out(dense, split, groups={"a": mask, "b": ~mask})).watch.limit < 1


def test_a_certified_gain_is_watched_as_a_drop_below_zero() -> None:
    split, dense, _ = made()
    worse = Scaled(dense, lambda out: out.flip(-1))
    certificate = pp.certify_held_out(dense, split, risk="drop", reference=worse, declare=WORDS)
    monitor = pp.Monitor(certificate)
    assert certificate.bound < 0 < monitor.watch.limit < 0.5
    assert f"a drop of {rounded_up(certificate.bound)}" in monitor.statement


def test_a_drop_is_watched_by_differences_so_that_plain_errors_cannot_pass_for_them() -> None:
    split, dense, _ = made()
    worse = Scaled(dense, lambda out: out.flip(-1))
    certificate = pp.certify_held_out(dense, split, risk="drop", reference=worse, declare=WORDS)
    monitor = pp.Monitor(certificate)
    quiet = monitor.update([-1.0] * 500, first=1)
    assert quiet.alarm_at is None
    assert quiet.point.mean == 0.0
    assert monitor.update([0.0, 1.0] * 500, first=501).alarm_at is not None
