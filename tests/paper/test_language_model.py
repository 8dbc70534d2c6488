"""The recipe of the language model: one dense model for all methods, rates from validation documents, equal tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.data import text
from pacprune.integrations import language_models as lm
from pacprune.paper import frame
from pacprune.paper import language_model as recipe
from pacprune.paper.frame import Job, Setting
from pacprune.runs.language_models import METHODS

pytest.importorskip("transformers")

SMOKE = {setting.label: setting.changed(patterns=("2:4",), sparsities=(0.8,)) for setting in recipe.SETTINGS["smoke"]}


def call(out: Path, *words: str) -> Result:
    options = ["reproduce", "language-model", "--scale", "smoke", "--out", str(out), "--json", *words]
    return CliRunner().invoke(app.build("reproduce"), options, prog_name="pacprune")


@pytest.fixture(scope="module")
def shared(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose folder has the dense model."""
    job = make_job(tmp_path_factory.mktemp("language"))
    recipe.rows(SMOKE["dense"], job)
    return job


def test_every_method_of_the_table_is_drawn_and_is_a_setting() -> None:
    assert set(recipe.STYLES) == set(METHODS)
    for scale in ("smoke", "reduced", "full"):
        assert [setting.label for setting in recipe.SETTINGS[scale]] == ["dense", *recipe.STYLES]
        for setting in recipe.SETTINGS[scale]:
            trains = setting.label in METHODS and METHODS[setting.label].trains
            assert bool(setting.options.rates) == trains
    full = {setting.options.windows * setting.options.length for setting in recipe.SETTINGS["full"]}
    assert full == {20_480 * 512}


def test_the_full_model_has_thirty_million_weights() -> None:
    options = recipe.SETTINGS["full"][0].options
    model = lm.llama(vocabulary=options.vocabulary, length=options.length, end=0, seed=0, **options.network)
    assert sum(p.numel() for p in model.parameters()) == 29_893_120
    assert sum(model.get_parameter(name).numel() for name in lm.block_weights(model)) == 25_690_112


@pytest.mark.parametrize("method", ["sparsegpt", "gmp"])
def test_rows_are_kept_and_hold_exact_counts(method: str, shared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = recipe.rows(SMOKE[method], shared)
    assert [(row["pattern"], row["sparsity"]) for row in rows] == [("2:4", 0.5), ("", 0.8)]
    for row in rows:
        assert tuple(row) == recipe.COLUMNS
        assert row["zeros"] == round(row["sparsity"] * row["prunable"])
    monkeypatch.setattr(recipe, "prune", lambda *_: pytest.fail("it was pruned again"))
    monkeypatch.setattr(recipe, "dense_model", lambda *_: pytest.fail("the model was read again"))
    assert recipe.rows(SMOKE[method], shared) == rows


def test_the_rate_is_chosen_on_validation_documents_and_kept(shared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[float, str]] = []

    def row(setting: Setting[Any], cell: recipe.Cell, model: Any, job: Job, part: str) -> dict[str, Any]:
        parts.append((cell.lr, part))
        return {"tokens": 1, "zeros": 0, "prunable": 1, "loss_per_token": 1.0, "loss_per_byte": abs(cell.lr - 0.01)}

    monkeypatch.setattr(recipe, "_row", row)
    rows = recipe.rows(SMOKE["pft"], shared)
    assert parts == [(0.003, "validation"), (0.01, "validation"), (0.01, "test"), (0.01, "test")]
    assert {row["lr"] for row in rows} == {0.01}
    point = json.loads((shared.out / recipe.POINTS).read_text())["pft"]
    assert (point["lr"], set(point["tried"])) == (0.01, {"0.003", "0.01"})
    with pytest.raises(ValueError, match=r"points\.json froze pft on the terms .* begin in another --out"):
        recipe.rows(SMOKE["pft"].changed(windows=64), shared)


def test_what_diverges_guesses(shared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> Any:
        raise recipe.Diverged("the loss became nan")

    monkeypatch.setattr(recipe, "prune", diverge)
    (row, _) = recipe.rows(SMOKE["wanda"], shared)
    assert row["loss_per_token"] == pytest.approx(5.70378)  # log 300
    assert row["loss_per_byte"] < row["loss_per_token"]


def test_certification_documents_are_not_read_and_parts_do_not_meet(shared: Job) -> None:
    texts = recipe.corpus(SMOKE["dense"], shared)
    parts = text.by_part(recipe._documents("babble", None))
    assert texts.test.bytes.tolist() == [
        len(document.text) for document in recipe._first(parts["test"], len(texts.test.bytes))
    ]
    words = texts.tokenizer.decode(texts.train[0].flatten())
    assert parts["train"][0].text in words
    for part in ("calibration", "validation", "certify", "test"):
        assert not any(document.text in words for document in parts[part])


def test_dense_training_goes_on_where_it_stopped(
    shared: Job, make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "EVERY", 10)

    def stop(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe.dense_model(SMOKE["dense"], make_job(tmp_path, progress=stop))
    (checkpoint,) = tmp_path.rglob("dense.pt")
    steps: list[int] = []
    count = make_job(tmp_path, progress=lambda stage, done, *_: steps.append(done))
    again, whole = recipe.dense_model(SMOKE["dense"], count), recipe.dense_model(SMOKE["dense"], shared)
    assert steps[0] == 21
    assert checkpoint.is_file()
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_only_adds_to_the_folder_of_the_whole(tmp_path: Path) -> None:
    names, trained = [setting.name for setting in recipe.SETTINGS["smoke"]], set()
    for name in (names[0], names[2]):
        process = call(tmp_path / "out", "--only", name)
        assert process.exit_code == 0, process.stderr
        assert [figure["name"] for figure in json.loads(process.stdout)["figures"]] == [f"language-model-{name[13:]}"]
        trained.add(next((tmp_path / "out").rglob("model.safetensors")).stat().st_mtime_ns)
    assert len(trained) == 1  # the second call found the dense model
    assert not (tmp_path / "out" / "result.json").exists()
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["only"] is None
    assert len(frame.read(tmp_path / "out" / "language-model-wanda.csv")) == 3
    process = call(tmp_path / "out", "--seed", "1")
    assert "belongs to another run" in process.stderr


def test_the_share_of_the_gap_is_between_sparsegpt_and_dense() -> None:
    losses = {"dense": 0.6, "sparsegpt": 1.0, "pft": 0.7, "frozen": 0.8}
    table = [
        {"method": name, "pattern": "" if name == "dense" else "2:4", "loss_per_byte": loss, "seed": 0}
        for name, loss in losses.items()
    ]
    numbers = recipe.numbers(table)
    assert numbers["share of SparseGPT's gap that PFT closes at 2:4"] == pytest.approx(0.75)
    assert numbers["share of SparseGPT's gap that PFT, weights frozen closes at 2:4"] == pytest.approx(0.5)
    assert numbers["dense"] == 0.6
