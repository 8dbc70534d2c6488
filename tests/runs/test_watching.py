"""`pacprune monitor`: its CSV, its folder, its sentence, its exit codes and its refusals."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import pacprune as pp
from pacprune.cli import app
from pacprune.paper import frame


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), ["monitor", *words], prog_name="pacprune")


def write(name: str, losses: list[float], first: int = 1) -> str:
    lines = [f"{example},{loss:g}" for example, loss in enumerate(losses, start=first)]
    Path(name).write_text("\n".join(["example,loss", *lines]) + "\n")
    return name


def errors(risk: float, count: int) -> list[float]:
    return (np.random.default_rng(0).random(count) < risk).astype(float).tolist()


def test_a_quiet_monitor_exits_0_and_an_alarm_1() -> None:
    quiet = call("0.1", "--append", write("a.csv", errors(0.05, 400)))
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert quiet.stdout.startswith("Quiet after 400 examples: nothing shows that the risk exceeds the limit 0.1000")
    assert quiet.stdout.endswith("Course: runs/monitor/monitor.png\n")
    alarm = call("0.1", "--append", write("b.csv", errors(0.5, 100), first=401))
    assert alarm.exit_code == 1
    assert alarm.stdout.startswith("ALARM at example 4")
    assert {file.name for file in Path("runs/monitor").iterdir()} == {"monitor.json", "monitor.csv", "monitor.png"}
    later = call("0.1", "--json")
    state = json.loads(later.stdout)
    assert later.exit_code == 1, "an alarm stays"
    assert 400 < state["alarm_at"] < state["examples"] == 500
    assert state["statement"] in alarm.stdout
    rows = frame.read(Path("runs/monitor/monitor.csv"))
    assert [row["examples"] for row in rows] == sorted({row["examples"] for row in rows})
    assert rows[-1]["examples"] == 500
    assert (rows[-1]["lower"], rows[-1]["upper"]) == (state["lower"], state["upper"])
    assert Path("runs/monitor/monitor.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_the_course_is_a_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("0.1", "--append", write("a.csv", [0.0, 0.25]), "--out", "mine", "--json")
    assert json.loads(result.stdout)["course"] == "mine/monitor.csv"


def test_a_certificate_is_the_limit() -> None:
    split = pp.data.digits(prior_fraction=0.5, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    pp.fit(model, split.prior, pp.Config(epochs=3, lr=0.1))
    certificate = pp.certify_held_out(model, split)
    certificate.save("certificate")
    state = json.loads(call("certificate", "--append", write("a.csv", [0.0] * 20), "--json").stdout)
    assert (state["limit"], state["alpha"], state["delta"]) == (certificate.bound, 0.05, 0.05)
    assert "the error is at most 0.1." in state["statement"]
    text = Path("certificate/certificate.json").read_text()
    Path("certificate/certificate.json").write_text(text.replace('"n": ', '"n": 1', 1))
    result = call("certificate", "--append", write("b.csv", [0.0], first=21))
    assert result.exit_code == 2
    assert "the certificate in certificate is refused (digest: " in result.stderr


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        ("0.1", "example,loss\n1,0\n2,1\n", "the batch has examples 1 to 2, but examples 1 to 3 are counted already"),
        ("0.1", "example,loss\n5,0\n", "the batch begins with example 5, but the next one is 4"),
        ("0.1", "example,loss\n", "new.csv has 0 examples; give at least 1, a line each"),
        ("0.1", "", "new.csv begins with '', but its first line must be example,loss"),
        ("0.1", "wrong,right\n1,2\n", "new.csv begins with 'wrong,right', but its first line must be example,loss"),
        ("0.1", "example,loss\n4,no\n", "line 2 of new.csv is '4,no', but it must be the number of an example"),
        ("0.1", "example,loss\n4\n", "line 2 of new.csv is '4', but it must be"),
        ("0.1", "example,loss\n4,0\n4,0\n", "line 3 of new.csv has example 4, but after the line before it must be 5"),
        ("0.1", "example,loss\n4,1.5\n", "value 1 of the batch is 1.5, but every value must lie in [0, 1]"),
        ("0.1", "example,loss\n4,nan\n", "value 1 of the batch is nan"),
        ("0.1", None, "new.csv is no file; name a CSV file with the columns example,loss"),
        ("0.2", "example,loss\n4,0\n", "belongs to another monitor: limit is 0.1 there and 0.2 here"),
        ("0.1 --alpha 0.01", "example,loss\n4,0\n", "belongs to another monitor: alpha is 0.05 there and 0.01 here"),
        ("0.1 --alpha 2", "example,loss\n4,0\n", "alpha is 2.0, but it must lie strictly between 0 and 1"),
        ("0", "example,loss\n4,0\n", "the limit is 0.0, but it must lie strictly between 0 and 1"),
        ("1", "example,loss\n4,0\n", "the limit is 1.0, but it must lie strictly between 0 and 1"),
        ("nowhere", "example,loss\n4,0\n", "nowhere does not exist"),
    ],
)
def test_bad_input_gets_one_sentence_and_changes_nothing(words: str, content: str | None, message: str) -> None:
    assert call("0.1", "--append", write("old.csv", [0.0, 1.0, 0.0])).exit_code == 0
    before = {file: file.read_bytes() for file in Path("runs/monitor").iterdir()}
    if content is not None:
        Path("new.csv").write_text(content)
    result = call(*words.split(), "--append", "new.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pacprune: error: ")
    assert message in result.stderr
    assert {file: file.read_bytes() for file in Path("runs/monitor").iterdir()} == before
