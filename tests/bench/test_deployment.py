"""The network of a run: every format, refusals that write nothing, and measurements of every form."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pacprune import models
from pacprune.bench import deployment
from pacprune.data import DATA_SETS, split
from pacprune.deploy import export
from pacprune.integrations import pretrained
from pacprune.masking import criteria, masks, weights
from pacprune.runs import commands, store
from pacprune.runs import options as opt


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of pft, as short as can be."""
    folder = tmp_path_factory.mktemp("runs") / "pft"
    options = opt.Pft(dense_epochs=1, epochs=2, sparsity=0.95)
    commands.execute("pft", options, commands.single, out=folder, progress=lambda *_: None)
    return folder


def test_every_format_holds_the_network_of_the_run(run: Path, tmp_path: Path) -> None:
    model, x = deployment.network(run)
    state = load_file(run / "model.safetensors")
    with torch.no_grad():
        expected = model(x)
    exported = deployment.export(run, format="safetensors", out=tmp_path / "packed")
    assert exported["bytes"] == (tmp_path / "packed").stat().st_size
    assert exported["bytes"] <= 1.05 * (2510 * 4 + 50_200 / 8 + 410 * 4)
    assert all(torch.equal(state[n], t) for n, t in export.load(tmp_path / "packed").items())
    assert export.Packed(tmp_path / "packed").metadata["kept"] == "2510"
    deployment.export(run, format="dense", out=tmp_path / "dense")
    assert all(torch.equal(state[n], t) for n, t in load_file(tmp_path / "dense").items())
    sentence = deployment.export(run, format="slim")["said"]
    assert "removed" in sentence
    loaded = torch.export.load(run / "slim.pt2")
    with torch.no_grad():
        assert torch.allclose(loaded.module()(x), expected, atol=1e-5)
    (run / "slim.pt2").unlink()


def test_an_onnx_file_of_a_run_gives_its_outputs(run: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = deployment.network(run)
    deployment.export(run, format="onnx", out=tmp_path / "net.onnx")
    (outputs,) = runtime.InferenceSession(tmp_path / "net.onnx").run(None, {"input": x.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(outputs), model(x), atol=1e-5)


@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize("name", models.MODELS)
def test_the_network_is_built_without_its_data(data: str, name: str, tmp_path: Path) -> None:
    if data == "digits" and name != "mlp":
        return  # too small for these
    row = DATA_SETS[data]
    x, y = torch.zeros(20, *row.shape), torch.arange(20) % row.classes
    model = models.build(name, split(x, y, standardise=False))
    store.begin(tmp_path, "osp", opt.Osp(data=data, model=name, data_dir="/nowhere"))
    store.write_model(tmp_path / "model.safetensors", model)
    store.finish(tmp_path, {})
    loaded_model, batch = deployment.network(tmp_path)
    assert loaded_model(batch[:2]).shape == (2, 10)


def test_a_refused_export_names_the_fault_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    store.begin(unfinished, "pft", opt.Pft())
    out = tmp_path / "out"
    for folder, format, message in (
        (
            unfinished,
            "dense",
            r"^the run in .*unfinished is not finished: it has no result.json; run its command again$",
        ),
        (run, "zip", r"^format 'zip' is unknown; use one of safetensors, onnx, dense, slim$"),
        (tmp_path, "dense", r"holds no config.toml, so it is not a run folder, and no config.json, .*; name one"),
        (tmp_path / "none", "dense", r"does not exist; name the folder of a run"),
    ):
        with pytest.raises(ValueError, match=message):
            deployment.export(folder, format=format, out=out)
    with pytest.raises(ValueError, match="is not finished"):
        deployment.profile(unfinished)
    store.finish(unfinished, {})
    with pytest.raises(ValueError, match=r"holds no model.safetensors: name the folder of one finished run"):
        deployment.export(unfinished, format="dense", out=out)
    assert not out.exists()


def test_a_run_on_data_without_a_name_here_is_refused_in_one_line(tmp_path: Path) -> None:
    store.begin(tmp_path, "osp", opt.Osp(data="svhn"))
    store.write_model(tmp_path / "model.safetensors", torch.nn.Linear(2, 2))
    store.finish(tmp_path, {})
    known = ", ".join(DATA_SETS)
    with pytest.raises(ValueError, match=rf"^in .*config.toml, data 'svhn' is unknown; use one of {known}$"):
        deployment.network(tmp_path)


def test_a_profile_measures_all_forms_against_dense(run: Path) -> None:
    calls: list[Any] = []
    profile = deployment.profile(run, seconds=0.0, progress=lambda *call: calls.append(call))
    rows = {row["form"]: row for row in profile["rows"]}
    assert list(rows)[:4] == ["dense", "packed", "CSR", "BSR"]
    assert "slim" in rows
    assert rows["dense"]["flops"] == 2 * profile["weights"] == 100_400
    assert rows["CSR"]["flops"] == 2 * 2510
    assert rows["packed"]["bytes"] < 0.15 * rows["dense"]["bytes"]
    for name, row in rows.items():
        if name != "packed":
            assert row["difference"] <= 1e-5
            assert [latency["batch"] for latency in row["latency"]] == list(deployment.BATCHES)
            assert all(latency["gain"] == (latency["spread"][1] < 1) for latency in row["latency"])
    assert all(latency["ratio"] == 1 and not latency["gain"] for latency in rows["dense"]["latency"])
    assert profile["sparsity"] == weights.sparsity(deployment.network(run)[0])
    assert calls[-1][:3] == ("profile", 2, 2)


def test_a_form_without_gain_is_printed_as_no_gain() -> None:
    quick = {"batch": 1, "ms": 1.0, "ratio": 0.5, "spread": [0.4, 0.6], "gain": True}
    slow = {**quick, "ratio": 1.2, "spread": [0.9, 1.3], "gain": False}
    assert deployment._latency(quick, False) == "1 ms, 0.50 [0.40, 0.60]"
    assert deployment._latency(slow, False) == "1 ms, 1.20 [0.90, 1.30], no gain"
    assert deployment._latency(quick, True) == "1 ms"
    assert deployment._number(50, 100, False) == "50, 50.0%"
    assert deployment._number(101, 100, False) == "101, no gain"
    assert deployment._number(None, 100, False) == ""


def test_a_missing_extra_is_a_note_of_the_profile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, group: str) -> None:
        raise ValueError(f'{name} cannot be imported; pip install "pacprune[{group}]"')

    monkeypatch.setattr(deployment.formats, "extra", missing)
    profile = deployment.profile(run, seconds=0.0)
    assert 'ONNX: not measured: onnx cannot be imported; pip install "pacprune[export]"' in profile["notes"]
    *texts, _ = [part for part in deployment.render(profile) if isinstance(part, str)]
    assert "sparsity 0.9500" in texts[0]


# --- Folders of transformers.


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, in several files, its linear layers 2:4."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, **tokens))
    layers = {name: scores for name, scores in criteria.magnitude(model).items() if "proj" in name}
    weights.apply_mask(model, masks.top_k(layers, pattern="2:4"))
    folder = tmp_path_factory.mktemp("models") / "llama"
    model.bfloat16().save_pretrained(folder, max_shard_size="8KB")
    return folder


def test_a_folder_of_transformers_is_exported(language_model: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = pretrained.load(language_model)
    exported = deployment.export(language_model, format="safetensors", out=tmp_path / "packed")
    assert exported["bytes"] < 0.8 * sum(file.stat().st_size for file in language_model.glob("*.safetensors"))
    state = export.load(tmp_path / "packed")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    said = deployment.export(language_model, format="onnx", out=tmp_path / "net.onnx")["said"]
    assert said.endswith(", in float32, since onnxruntime has no bfloat16 on a CPU")
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    model.float()
    for shape in ((3, 24), (1, 5)):
        x = torch.randint(40, shape)
        mask = torch.ones_like(x)
        mask[0, -2:] = 0  # padding
        feeds = {"input_ids": x.numpy(), "attention_mask": mask.numpy()}
        (outputs,) = session.run(["output"], feeds)
        with torch.no_grad():
            logits = model(input_ids=x, attention_mask=mask).logits
        assert np.allclose(outputs[mask == 1], logits[mask == 1].numpy(), atol=1e-5)


def test_a_profile_of_a_language_model_has_bytes_and_tokens_per_second(language_model: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    profile = deployment.profile(language_model, seconds=0.0)
    rows = {row["form"]: row for row in profile["rows"]}
    assert list(rows) == ["dense", "dense, gzip", "packed", "ONNX", "CSR"]
    assert rows["dense"]["bytes"] == sum(file.stat().st_size for file in language_model.glob("*.safetensors"))
    assert rows["packed"]["bytes"] < 0.8 * rows["dense"]["bytes"]
    assert rows["dense, gzip"]["bytes"] < rows["dense"]["bytes"]
    assert profile["window"] == 24
    for name in ("dense", "ONNX", "CSR"):
        (latency,) = rows[name]["latency"]
        assert latency["tokens_per_second"] == pytest.approx(24 / latency["ms"] * 1e3)
        assert rows[name]["difference"] <= 1e-4
    assert not rows["packed"]["latency"]
    notes = " ".join(profile["notes"])
    for words in ("2:4: 7 of 8 linear layers", "The files hold bfloat16", "Not measured: generation token by token"):
        assert words in notes
    text, table, *_ = deployment.render(profile)
    assert "sparsity 0.4" in text
    assert [column.header for column in table.columns][2:] == ["Latency, 1 x 24 tokens", "Tokens per second"]


def test_an_exported_file_in_the_folder_does_not_count_as_its_weights(language_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(language_model, tmp_path / "copy")
    before = deployment._weight_files(folder)
    deployment.export(folder, format="dense")
    assert (folder / "dense.safetensors").is_file()
    assert deployment._weight_files(folder) == before
    assert [file.name for file in before] == sorted(file.name for file in language_model.glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"^model='mine:net' makes the network of a run, but .* leave it out$"):
        deployment.export(folder, format="dense", model="mine:net")
