"""Event files of a run, read back as TensorBoard reads them."""

from pathlib import Path
from typing import Any

import pytest

from pacprune.runs import commands, store
from pacprune.runs import events as tracking
from pacprune.runs import options as opt

SHORT = {"dense_epochs": 1, "epochs": 2}


def quiet(*_: Any) -> None:
    pass


def test_without_tensorboard_nothing_is_written_and_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError("none")

    options = opt.Pft()  # whose flags are those of a function that is imported by name
    monkeypatch.setattr("importlib.import_module", missing)
    store.begin(tmp_path, "pft", options)
    with pytest.raises(ValueError, match=r'^tensorboard cannot be imported \(none\); pip install "pacprune\[track\]"$'):
        tracking.write(tmp_path)
    with pytest.raises(ValueError, match=r"^tensorboard cannot"), tracking.following(tmp_path, quiet):
        raise AssertionError("not reached")
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


def events(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    return accumulator.Reload()


def test_a_followed_run_shows_scalars_gates_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options, folder, calls = opt.Pft(**SHORT, recipe="coupled"), tmp_path / "run", []
    with tracking.following(folder, lambda *call: calls.append(call)) as progress:
        assert not folder.exists()
        commands.execute("pft", options, commands.single, out=folder, progress=progress)
    accumulator, tags = events(folder / tracking.EVENTS), events(folder / tracking.EVENTS).Tags()
    rows = store.metrics(folder)
    for row in rows:
        values = {event.step: event.value for event in accumulator.Scalars(f"{row['stage']}/loss")}
        assert values[row["epoch"]] == pytest.approx(row["loss"], rel=1e-6)
    assert set(tags["histograms"]) == {
        f"masks/keep_prob/{name}" for name in ("all", *(f"layers.{k}.weight" for k in (0, 2, 4)))
    }
    (gates,) = accumulator.Histograms("masks/keep_prob/all")
    expected = 1 - next(row["expected_sparsity"] for row in reversed(rows) if row["stage"] == "masks")
    assert gates.histogram_value.num == 50_200
    assert gates.histogram_value.sum / 50_200 == pytest.approx(expected, abs=1e-5)
    assert set(tags["images"]) == {f"figures/{path.stem}" for path in folder.glob("figures/*.png")}
    for path in folder.glob("figures/*.png"):
        (image,) = accumulator.Images(f"figures/{path.stem}")
        assert image.encoded_image_string == path.read_bytes()
    assert calls, "the user's progress is called too"
    with pytest.raises(ValueError, match=r"events already holds 1 files; give another --out, or delete it"):
        tracking.write(folder)


def test_a_finished_run_of_pbp_shows_p_and_q(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = opt.Pbp(**SHORT, posterior_epochs=1, draws=50)
    result = commands.execute("pbp", options, commands.single, out=tmp_path / "run", progress=quiet)
    assert tracking.write(tmp_path / "run", out=tmp_path / "events") == tmp_path / "events"
    accumulator = events(tmp_path / "events")
    (posterior,) = accumulator.Histograms("certificate/posterior/keep_prob/all")
    mean = posterior.histogram_value.sum / posterior.histogram_value.num
    assert mean == pytest.approx(1 - result["expected_sparsity"], abs=1e-5)
    (bound,) = accumulator.Scalars("result/pbp/certificate")
    assert bound.value == pytest.approx(result["certificate"])
    assert {"dense/loss", "prior/loss", "posterior/loss"} <= set(accumulator.Tags()["scalars"])


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("pft", {"recipe": "coupled"}),
        ("pft", {"recipe": "paper"}),
        ("pft", {"recipe": "coupled", "sparsity": 0.5, "pattern": "2:4"}),
        ("l0", {}),
    ],
    ids=["coupled", "paper", "pattern", "l0"],
)
def test_an_unfinished_run_shows_the_rows_and_gates_of_its_checkpoints(
    command: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    options, folder = opt.COMMANDS[command](**SHORT, **flags), tmp_path / "run"

    def stop(stage: str, steps: int, total: int, row: dict[str, Any]) -> None:
        if stage == "tune":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commands.execute(command, options, commands.single, out=folder, progress=stop)
    accumulator = events(tracking.write(folder))
    tags = accumulator.Tags()
    assert {"dense/loss", "masks/loss"} <= set(tags["scalars"])
    assert tags["images"] == []
    (gates,) = accumulator.Histograms("masks/keep_prob/all")
    assert gates.histogram_value.num == 50_200
    # A pattern holds by itself, without a budget that would be measured.
    sparsity = 0.5 if "pattern" in flags else accumulator.Scalars("masks/expected_sparsity")[-1].value
    assert gates.histogram_value.sum / 50_200 == pytest.approx(1 - sparsity, abs=1e-5)
