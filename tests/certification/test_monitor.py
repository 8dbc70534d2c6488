"""Monitor: its limit, its file, what it says, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.certification.certificate import Certificate


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    split = pp.data.digits(prior_fraction=0.5, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    pp.fit(model, split.prior, pp.Config(epochs=3, lr=0.1))
    return pp.certify_held_out(model, split)


def refusal(monitor: pp.Monitor, values: object, first: int = 1) -> str:
    """The sentence; nothing changed."""
    before = monitor.watch, monitor.path and monitor.path.exists() and monitor.path.read_bytes()
    with pytest.raises(ValueError, match=r".") as error:
        monitor.update(values, first=first)  # type: ignore[arg-type]
    assert (monitor.watch, monitor.path and monitor.path.exists() and monitor.path.read_bytes()) == before
    return str(error.value)


def test_the_limit_is_the_bound_of_the_certificate(certificate: Certificate, tmp_path: Path) -> None:
    folders = [certificate.save(tmp_path / "plain"), certificate.save(tmp_path / "packed", packed=True)]
    monitors = [pp.Monitor(source) for source in (certificate, str(folders[0]), folders[1])]
    assert {monitor.watch.limit for monitor in monitors} == {certificate.bound}
    assert {monitor.delta for monitor in monitors} == {0.05}
    assert len({monitor._identity for monitor in monitors}) == 1
    assert pp.Monitor(certificate.bound)._identity is None


def test_the_statement_says_both_errors(certificate: Certificate) -> None:
    monitor = pp.Monitor(certificate)
    monitor.update([0] * 50, first=1)
    verdict, error, interval = monitor.statement.splitlines()
    assert verdict.startswith("Quiet after 50 examples: nothing shows that the risk exceeds the certified 0.")
    assert "false with probability at most 0.05" in error
    assert error.endswith("together with the certificate's delta of 0.05 the error is at most 0.1.")
    assert "Mean loss 0.0000." in interval
    assert "at least 95 % at all times at once" in interval
    alone = pp.Monitor(0.1, alpha=0.01)
    alone.update([1] * 20, first=1)
    verdict, error, _ = alone.statement.splitlines()
    assert verdict == f"ALARM at example {alone.watch.alarm_at} of 20: the risk has exceeded the limit 0.1000."
    assert error == "An alarm is false with probability at most 0.01, however long one watches."
    assert repr(alone) == f"Monitor(limit 0.1000, 20 examples, alarm_at {alone.watch.alarm_at})"


def test_a_monitor_goes_on_from_its_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random(900) < 0.2
    path = tmp_path / "state" / "monitor.json"
    for first in (1, 301, 601):
        watch = pp.Monitor(0.1, path=path).update(x[first - 1 : first + 299], first=first)
    whole = pp.Monitor(0.1)
    assert watch == whole.update(torch.from_numpy(x), first=1) == pp.Monitor(0.1, path=path).watch
    assert whole.statement == pp.Monitor(0.1, path=path).statement
    assert watch.alarm_at is not None
    assert path.stat().st_size < 20_000
    assert [file.name for file in path.parent.iterdir()] == ["monitor.json"]


def test_two_monitors_of_one_file_share_their_examples(tmp_path: Path) -> None:
    first, second = (pp.Monitor(0.1, path=tmp_path / "monitor.json") for _ in range(2))
    first.update([0, 0], first=1)
    assert second.update([0], first=3).examples == 3
    with pytest.raises(ValueError, match="examples 1 to 3 are counted already"):
        first.update([0], first=3)


def test_the_same_batch_is_refused(tmp_path: Path) -> None:
    monitor = pp.Monitor(0.1, path=tmp_path / "monitor.json")
    monitor.update([0, 1, 0], first=1)
    for again in (monitor, pp.Monitor(0.1, path=tmp_path / "monitor.json")):
        assert refusal(again, [0, 1, 0]) == (
            "the batch has examples 1 to 3, but examples 1 to 3 are counted already: give those from 4 on"
        )
    assert "the batch has examples 3 to 4" in refusal(monitor, [0, 0], first=3)
    assert "the batch begins with example 9, but the next one is 4" in refusal(monitor, [0], first=9)
    assert "first is 0, but it must be a whole number of at least 1" in refusal(monitor, [0], first=0)
    assert monitor.update([0, 1, 0], first=4).examples == 6, "equal values under new numbers are new"


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "there are 0 values"), ([0, 2], "value 2 of the batch is 2.0"), ([float("nan")], "is nan")],
)
def test_bad_values_leave_everything_as_it_was(values: list[float], message: str, tmp_path: Path) -> None:
    assert message in refusal(pp.Monitor(0.1, path=tmp_path / "monitor.json"), values)
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_monitor_is_refused(certificate: Certificate, tmp_path: Path) -> None:
    path = tmp_path / "monitor.json"
    pp.Monitor(certificate, path=path).update([0], first=1)
    other = replace(certificate, record={**certificate.record, "seed": -1})
    for source, alpha, message in (
        (certificate, 0.01, "alpha is 0.05 there and 0.01 here"),
        (certificate.bound, 0.05, "there and None here"),
        (other, 0.05, "certificate is "),
    ):
        with pytest.raises(ValueError, match=f"belongs to another monitor: .*{message}"):
            pp.Monitor(source, alpha=alpha, path=path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"format": 1}', "cut", "count"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "monitor.json"
    pp.Monitor(0.1, path=path).update([0, 1], first=1)
    state = json.loads(path.read_text())
    text = {"cut": path.read_text()[:-50], "count": json.dumps(state | {"examples": 1})}.get(damage, damage)
    path.write_text(text)
    with pytest.raises(ValueError, match="is no state of a monitor: restore it, or choose another file"):
        pp.Monitor(0.1, path=path)


def test_a_certificate_that_does_not_verify_is_refused(certificate: Certificate, tmp_path: Path) -> None:
    folder = certificate.save(tmp_path / "certificate")
    better = replace(certificate, record=json.loads(json.dumps(certificate.record)))
    better.record["claim"]["bound"] -= 0.01
    better.save(folder)
    with pytest.raises(ValueError, match=r"the certificate in .* is refused \(.*\): watch one that pp.verify accepts"):
        pp.Monitor(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="does not exist"):
        pp.Monitor(folder)


@pytest.mark.parametrize("limit", [0, 1, 1.5])
def test_a_limit_of_zero_or_one_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=f"the limit is {limit}, but it must lie strictly between 0 and 1"):
        pp.Monitor(limit)


def test_several_values_for_an_example_are_refused() -> None:
    assert "the shape (3, 2), but there is one value for each example" in refusal(pp.Monitor(0.1), np.zeros((3, 2)))
