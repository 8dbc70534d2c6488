"""The benchmark: its arithmetic, the networks it compares, and a tiny run of every subject."""

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from pacprune import kernels, models
from pacprune.bench import pattern, sampler, step, subjects, timing
from pacprune.bench.timing import Row, Target, Times
from pacprune.cli import app, console
from pacprune.masking import attachment, weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), ["bench", *words], prog_name="pacprune")


# --- Arithmetic.


def test_calls_run_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.SHORTEST, "cpu", 1e-9)
    order: list[str] = []
    times = timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, seconds=0.0)
    fewest = timing.ROUNDS[0]
    # The shortest reading is one call here, so every round is one call of each.
    assert "".join(order) == "aaaabbbb" + "ab" * fewest
    assert {name: len(readings) for name, readings in times.seconds.items()} == {"a": fewest, "b": fewest}


def test_a_quick_call_is_repeated_until_a_reading_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_per_call, calls = 1 / 1024, []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: len(calls) * seconds_per_call)
    times = timing.alternate({"quick": lambda: calls.append(None)}, CPU, seconds=0.0)
    warm_up, repeats = 4, math.ceil(timing.SHORTEST["cpu"] / seconds_per_call)
    assert repeats > 1
    assert len(calls) == warm_up + repeats * timing.ROUNDS[0]
    assert times.seconds["quick"].tolist() == [seconds_per_call] * timing.ROUNDS[0]


def test_a_ratio_is_the_median_over_rounds_of_readings_taken_side_by_side() -> None:
    times = Times({"a": np.array([2.0, 4.0, 40.0]), "b": np.array([1.0, 2.0, 10.0])}, CPU)
    row = times.row("a step", "a", "b", relative_to="b step", target=Target("ratio", "at most", 2.5))
    assert (row.ratio, row.spread, row.relative_to, row.met) == (2.0, (2.0, 3.0), "b step", True)
    assert (row.value, row.unit) == (None, ""), "a CPU shows ratios alone"


def test_a_gpu_shows_the_time_as_well() -> None:
    times = Times({"a": np.array([0.002, 0.004, 0.003]), "b": np.array([0.001, 0.001, 0.001])}, CUDA)
    row = times.row("a", "b", "a", factor=3.0, timed="a", unit="us per model", per=2.0)
    assert row.value == pytest.approx(1500.0)
    assert (row.unit, row.ratio) == ("us per model", pytest.approx(1.0))


@pytest.mark.parametrize(
    ("sense", "limit", "met"), [("at most", 1.0, True), ("at most", 0.9, False), ("at least", 1.1, False)]
)
def test_a_target_is_met_or_not(sense: str, limit: float, met: bool) -> None:
    assert Row("x", value=7.0, ratio=1.0, target=Target("ratio", sense, limit)).met is met
    assert Row("x", value=1.0, ratio=7.0, target=Target("value", sense, limit)).met is met
    assert Row("x", ratio=1.0).met is None


def test_linearity_finds_the_deviation_from_a_straight_line() -> None:
    sizes = [10**6, 10**7, 10**8, 10**9]
    fixed, slope, deviation = timing.linearity(sizes, [2e-5 + 7e-12 * n for n in sizes])
    assert fixed == pytest.approx(2e-5, rel=1e-6)
    assert slope == pytest.approx(7e-12, rel=1e-6)
    assert deviation < 1e-9
    fixed, _, deviation = timing.linearity(sizes, [1e-13 * n**1.1 for n in sizes])
    assert fixed == 0
    assert deviation > 0.15


def test_a_size_that_does_not_fit_is_reported_and_the_next_smaller_one_measured() -> None:
    def measure(size: int) -> Iterator[timing.Finding]:
        if size > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield Row(f"{size} measured", ratio=1.0)

    first, second, row = timing.largest_that_fits([1000, 100, 10], measure, CPU, unit="weights")
    assert first == (
        "1,000 weights do not fit into the memory; measured with 100 weights: "
        "free the device of other programs, or pass --smoke."
    )
    assert "measured with 10 weights" in str(second)
    assert row == Row("10 measured", ratio=1.0)
    (only,) = timing.largest_that_fits([1000], measure, CPU, unit="weights")
    assert "not measured" in str(only)


# --- The compared networks.


def test_the_literal_mask_has_the_distribution_of_the_fused_one() -> None:
    part = sampler._inputs(40_000, CPU)._replace(mean=torch.ones(40_000), gate=torch.full((40_000,), -1.0))
    (fused,) = kernels.draw([part], kernels.Law())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        other = sampler.literal(part.mean, part.gate)
    for a, b in ((fused, other), (fused**2, other**2), ((fused > 0.5).float(), (other > 0.5).float())):
        error = math.sqrt(float(a.var() + b.var()) / len(a))
        assert abs(float(a.mean() - b.mean())) < 5 * error


def test_the_four_states_of_a_network_match_their_names() -> None:
    nets = {name: make() for name, make in step._variants(lambda: models.mlp(20, hidden=(30,))).items()}
    assert list(nets) == ["dense", "PFT", "torch.nn.utils.prune", "literal F.gumbel_softmax"]
    dense, stochastic, masked, literal = nets.values()
    assert not attachment.sites(dense)
    assert [site.name for site in attachment.sites(stochastic)] == list(weights.prunable(dense))
    zeros = [float((m.weight == 0).float().mean()) for m in masked.modules() if isinstance(m, nn.Linear)]
    assert zeros == [pytest.approx(0.9, abs=0.01)] * 2
    extra = sum(p.numel() for p in literal.parameters()) - sum(p.numel() for p in dense.parameters())
    assert extra == sum(w.numel() for w in weights.prunable(dense).values())


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_trains_every_state(amp: bool) -> None:
    x, y = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)), torch.zeros(8, dtype=torch.int64)
    for name, make in step._variants(lambda: models.mlp(20, hidden=(30,))).items():
        model = make()
        before = [p.detach().clone() for p in model.parameters()]
        step._loop(model, x, y, nn.functional.cross_entropy, amp=amp)()
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), name


# --- Tiny runs of every subject.


def check(result: dict[str, Any], subject: str) -> None:
    assert (result["subject"], result["sizes"], result["notes"]) == (subject, "smoke", [])
    machine = result["environment"]
    assert machine["torch"] == torch.__version__
    assert machine["kernels"] in ("reference", "cpu", "triton")
    assert machine["threads"] == torch.get_num_threads()
    assert {"device", "dtype", "tf32", "pacprune", "commit"} <= machine.keys()
    names = [row["name"] for row in result["rows"]]
    assert len(set(names)) == len(names) > 0
    for row in result["rows"]:
        assert row.keys() == {"name", "value", "unit", "ratio", "spread", "relative_to", "target", "met"}
        assert row["value"] is not None or row["ratio"] is not None
        assert row["ratio"] is None or (row["ratio"] >= 0 and row["relative_to"])
        assert row["spread"] is None or row["spread"][0] <= row["ratio"] <= row["spread"][1]


@pytest.mark.parametrize("subject", subjects.SUBJECTS)
def test_every_subject_runs_on_a_cpu(subject: str) -> None:
    call_result = call(subject, "--smoke", "--json")
    assert call_result.exit_code == 0, call_result.output
    result = json.loads(call_result.stdout)
    check(result, subject)
    assert all(row["value"] is None or row["unit"] == "networks" for row in result["rows"]), "a CPU shows ratios alone"
    assert all(row["target"] is None for row in result["rows"]), "a tiny size has no target"
    text = " ".join(row["name"] + row["relative_to"] for row in result["rows"])
    words = {
        "sample": ("copy bandwidth", "coupled", "hard", "std", "bfloat16", "reference", "gumbel", "cost per weight"),
        "step": ("MLP", "transformer", "torch.nn.utils.prune", "gumbel", "autocast"),
        "population": ("2 models", "one model", "PFT / dense", "in sequence"),
        "certificate": ("slack", "one at a time"),
        "pattern": ("2:4", "CSR"),
        "frozen": ("dense step", "distillation"),
    }
    assert [word for word in words[subject] if word not in text] == []


@pytest.mark.parametrize("subject", subjects.SUBJECTS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_subject_runs_on_a_gpu(subject: str) -> None:
    result = subjects.run(subject, device="cuda", smoke=True)
    check(result, subject)
    assert any(row["unit"].startswith(("ms", "s", "us", "ps")) for row in result["rows"])


# --- The command.


def test_the_table_shows_which_targets_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("step", 1.5, "ms", 1.1, (1.0, 1.2), "dense", Target("ratio", "at most", 1.25)),
        Row("other", None, "", 3.0, None, "dense", Target("ratio", "at most", 2.0)),
    ]
    result = {
        "environment": timing.environment(CPU),
        "rows": [timing.as_dict(row) for row in rows],
        "notes": ["10 weights do not fit."],
    }
    console.show(result, False, *subjects.render(result))
    output = " ".join(capsys.readouterr().out.split())
    for words in ("1.5 ms", "1.1 [1, 1.2]", "ratio at most 1.25", "yes", "NO", "10 weights do not fit.", "threads"):
        assert words in output


def test_out_writes_the_findings_to_a_file(tmp_path: Any) -> None:
    result = call("certificate", "--smoke", "--json", "--out", str(tmp_path))
    assert json.loads((tmp_path / "bench-certificate.json").read_text()) == json.loads(result.stdout)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("speed",), "subject 'speed' is unknown; use one of sample, step, population, certificate"),
        (("step", "--smoke", "--full"), "give only one of the two"),
        (("step", "--device", "meta"), "use --device cpu"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(words: tuple[str, ...], part: str) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_reported_in_one_sentence() -> None:
    result = call("step", "--device", "cuda")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("pacprune: error: the device 'cuda' cannot be used here")


def test_kernels_are_timed_as_many_calls_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, a function stands for the graph; on a GPU, `pattern` takes the same way."""
    counts = {"dense": 0, "sparse": 0}

    def count(kind: str) -> None:
        counts[kind] += 1

    calls = {kind: functools.partial(count, kind) for kind in counts}
    recorded = []

    def record(call: timing.Call, device: torch.device) -> timing.Call:
        recorded.append(call)
        return call

    monkeypatch.setattr(pattern, "cuda_graph", record)
    settings = {"scale": "smoke", "kernels": "kernels (LIB)", "graphs": True}
    eager, graph = pattern._compared("a layer", calls, CPU, **settings)
    assert eager.name == "a layer, called from Python"
    assert (graph.name, graph.relative_to) == ("a layer, 50 calls in one CUDA graph", "2:4 in torch's kernels (LIB)")
    before = counts["sparse"]
    recorded[1]()
    assert counts["sparse"] - before == pattern.CALLS

    def refuse(call: timing.Call, device: torch.device) -> timing.Call:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(pattern, "cuda_graph", refuse)
    _, note = pattern._compared("a layer", calls, CPU, **settings)
    assert note.endswith("since torch says: operation not permitted when stream is capturing")


def test_the_decoder_takes_its_step_and_has_no_finding_for_a_cpu() -> None:
    assert list(step.decoder_step(CPU, scale="cpu")) == []
    assert list(step.decoder_step(CPU, scale="smoke")) == []
