"""`pacprune prune-lm`: real folders of transformers, with models from configs and a tokenizer of made-up words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.data import text
from pacprune.data.text import Document
from pacprune.integrations import language_models as lm
from pacprune.paper.characters import babble
from pacprune.runs import language_models as lms

transformers = pytest.importorskip("transformers")

LENGTH = 16
HALF = ("--method", "gmp", "--sparsity", "0.5")


def made_up(count: int = 120) -> list[Document]:
    """Documents of made-up words."""
    words = babble(count * 30).decode().split(" ")
    return [Document(f"text/{k}.txt", " ".join(words[30 * k : 30 * k + 20 + k % 11])) for k in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return lm.train_tokenizer(made_up(), size=300)


def small(kind: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(tokenizer)}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lm.llama(vocabulary=len(tokenizer), length=32, end=0, seed=0, **sizes)


@pytest.fixture(scope="module")
def folders(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models llama and gpt2, and text.jsonl."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        lm.save(small(kind, tokenizer), tokenizer, root / kind)
    (root / "text.jsonl").write_bytes(text.lines(made_up()))
    return root


def call(folders: Path, out: Path, *words: str, model: str = "llama", data: str = "text.jsonl") -> Result:
    options = ["--model", str(folders / model), "--data", str(folders / data), "--out", str(out)]
    method = words[words.index("--method") + 1]
    trains = method not in lms.METHODS or lms.METHODS[method].trains
    use = ["--steps", "6", "--batch", "4", "--lr", "0.01"] if trains else ["--calibration-tokens", "320"]
    every = ["prune-lm", *options, "--length", str(LENGTH), *use, *words]
    return CliRunner().invoke(app.build("prune-lm"), every, prog_name="pacprune")


# --- From a folder to a pruned folder


@pytest.mark.parametrize("method", lms.METHODS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_method_writes_a_folder_that_loads_anywhere(
    kind: str, method: str, folders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    goal = ("--pattern", "2:4") if kind == "llama" else ("--sparsity", "0.7")
    process = call(folders, out, "--method", method, *goal, "--json", model=kind)
    assert process.exit_code == 0, process.stderr
    result = json.loads(process.stdout)
    assert json.loads((out / "result.json").read_text()) == result
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folders / kind)
    assert set(model.state_dict()) == set(dense.state_dict())
    names = lm.block_weights(model)
    weights = {name: model.get_parameter(name) for name in names}
    zeros = sum(int((weight == 0).sum()) for weight in weights.values())
    assert (result["zeros"], result["prunable"]) == (zeros, sum(w.numel() for w in weights.values()))
    assert result["sparsity"] == pytest.approx(0.5 if kind == "llama" else 0.7, abs=1e-3)
    if kind == "llama":
        assert all(int((w.reshape(-1, 4) == 0).sum(1).min()) == 2 for w in weights.values())
    assert not any((p == 0).any() for name, p in model.named_parameters() if "emb" in name or "wte" in name)
    assert result["loss_per_token"]["after"] != result["loss_per_token"]["before"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer("some words")["input_ids"]])
    assert torch.isfinite(model(ids).logits).all()


def test_a_pattern_of_gpt2_lies_along_the_inputs_of_a_layer(folders: Path, tmp_path: Path) -> None:
    process = call(folders, tmp_path / "out", "--method", "wanda", "--pattern", "2:4", model="gpt2")
    assert process.exit_code == 0, process.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in lm.block_weights(model):  # of shape [inputs, outputs]
        assert (model.get_parameter(name).t().reshape(-1, 4) == 0).sum(1).eq(2).all()


def test_the_losses_are_those_of_the_written_model_on_other_documents(folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = json.loads(call(folders, out, *HALF, "--json").stdout)
    parts = text.by_part(made_up())
    tokenizer, model = lm.load_tokenizer(out), lm.load_model(out)
    measured = lms.measured_part(tokenizer, parts["validation"], length=LENGTH)
    losses = lm.losses(model, measured)
    assert losses.per_byte == pytest.approx(result["loss_per_byte"]["after"], rel=1e-5)
    assert losses.per_token == pytest.approx(result["loss_per_token"]["after"], rel=1e-5)
    used = [line.split(" ", 1)[1] for line in (out / lms.USED).read_text().splitlines()]
    assert set(used) <= {document.name for part in ("train", "calibration") for document in parts[part]}
    assert result["used"]["documents"] == len(used) == len(set(used)) > 0
    assert result["held_out"]["documents"] == len(parts["validation"])


def test_a_reader_gets_a_short_table(folders: Path, tmp_path: Path) -> None:
    process = call(folders, tmp_path / "out", *HALF)
    assert process.exit_code == 0, process.stderr
    assert "Loss per byte" in process.stdout
    assert f"Model: {tmp_path / 'out'}" in process.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", lms.METHODS)
def test_weights_keep_their_type(
    method: str, dtype: torch.dtype, tokenizer: Any, folders: Path, tmp_path: Path
) -> None:
    lm.save(small("llama", tokenizer).to(dtype), tokenizer, tmp_path / "halves")
    model = ("--model", str(tmp_path / "halves"))
    process = call(folders, tmp_path / "out", "--method", method, "--pattern", "2:4", *model, "--json")
    pruned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads(process.stdout)["dtype"] == str(dtype).removeprefix("torch.")
    assert {parameter.dtype for parameter in pruned.parameters()} == {dtype}
    weights = [pruned.get_parameter(name) for name in lm.block_weights(pruned)]
    assert all((weight.reshape(-1, 4) == 0).sum(1).eq(2).all() for weight in weights)


def test_the_result_says_what_was_used_and_what_was_not(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path / "models")
    texts = tmp_path / "models" / "texts"
    texts.mkdir()
    for document in made_up():
        (texts / document.name.replace("/", "-")).write_text(document.text)
    (texts / "latin.txt").write_bytes("Jos\xe9".encode("latin-1"))
    words = ("--method", "wanda", "--sparsity", "0.5")
    few = call(tmp_path / "models", tmp_path / "a", *words, "--calibration-tokens", "99999", data="texts")
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["left_out"] == 1
    assert result["calibration_tokens"] == result["used"]["tokens"] < 99999
    assert [result[name] for name in ("steps", "batch", "lr")] == [None] * 3
    assert "Note: files that are no UTF-8 text were left out, 1 in all: latin.txt" in few.stdout
    assert f"Note: the text has {result['used']['windows']:,} windows of 16 tokens, where 6,249" in few.stdout
    call(folders, tmp_path / "b", *HALF)
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    assert [result[name] for name in ("steps", "batch", "lr", "calibration_tokens")] == [6, 4, 0.01, None]
    process = call(folders, tmp_path / "c", *words, "--lr", "0.1")
    assert "--lr is 0.1, but wanda trains nothing; leave it out, or give another method" in process.stderr


def layer_sparsities(out: Path) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    weights = [model.get_parameter(name) for name in lm.block_weights(model)]
    return [float((weight == 0).double().mean()) for weight in weights]


def test_frozen_masks_have_the_same_sparsity_in_every_layer(folders: Path, tmp_path: Path) -> None:
    call(folders, tmp_path / "out", "--method", "frozen", "--sparsity", "0.75")
    assert layer_sparsities(tmp_path / "out") == pytest.approx([0.75] * 14)


@pytest.mark.parametrize("method", ["gmp", "pft"])
def test_a_method_that_distributes_zeros_leaves_no_layer_empty(method: str, folders: Path, tmp_path: Path) -> None:
    call(folders, tmp_path / "out", "--method", method, "--sparsity", "0.995")
    assert 0.99 < max(layer_sparsities(tmp_path / "out")) < 1
    call(folders, tmp_path / "even", "--method", method, "--sparsity", "0.75", "--scope", "layer")
    assert layer_sparsities(tmp_path / "even") == pytest.approx([0.75] * 14)


def test_one_seed_gives_one_model(folders: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        call(folders, tmp_path / name, *HALF, "--seed", "3")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


# --- What is refused


def without(name: str) -> Callable[[Path], None]:
    return lambda model: [path.unlink() for path in model.glob(name)] and None


MISTAKES: dict[str, tuple[tuple[str, ...], Callable[[Path], None] | None, str]] = {
    "no model": (("--model", "nowhere"), None, "the model's folder nowhere does not exist"),
    "no config": ((), without("config.json"), "holds no config.json, so no model"),
    "no tokenizer": ((), without("tokenizer*"), "holds a model without a tokenizer"),
    "no weights": ((), without("model.safetensors"), "cannot be loaded"),
    "a tensor less": ((), lambda model: lose_tensor(model), "lack 1 tensors of LlamaForCausalLM, such as model.norm"),
    "no end": ((), lambda model: strip_end(model), "no token for the end of a text"),
    "no text": (("--data", "short.txt"), None, "does not exist"),
    "long window": (("--length", "64"), None, "length is 64, but the model takes at most 32 tokens"),
    "unknown method": (("--method", "snap"), None, "method 'snap' is unknown; use one of magnitude"),
    "unknown pattern": (("--pattern", "3:5"), None, "pattern '3:5' is unknown"),
    "both": (("--sparsity", "0.5"), None, "sparsity and pattern are both given; give one of them"),
    "unknown scope": (("--scope", "row"), None, "scope 'row' is unknown; use one of layer, global"),
    "scope of a pattern": (("--scope", "layer"), None, "the pattern 2:4 keeps the same share of every layer"),
    "nothing": (("--steps", "0"), None, "--steps is 0; it must be a whole number"),
    "device": (("--device", "cuda:77"), None, "the device 'cuda:77' cannot be used here"),
    "exclude": (
        ("--exclude", "head*"),
        None,
        "'head*' names none of the weights that could be pruned, such as model.layers.0.",
    ),
    "out below a file": (("--out", "models/llama/config.json/x"), None, "config.json is no folder; give another --out"),
    "calibration": (("--calibration-tokens", "9"), None, "--calibration-tokens is 9, but gmp takes its windows by"),
}


def strip_end(model: Path) -> None:
    path = model / "tokenizer_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in content.items() if not k.startswith(("eos", "bos", "pad"))}))


def lose_tensor(model: Path) -> None:
    """Takes a tensor out of a folder's file; transformers would begin it anew."""
    content = load_file(model / "model.safetensors")
    del content["model.norm.weight"]
    save_file(content, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    mistake: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, damage, message = MISTAKES[mistake]
    shutil.copytree(folders, tmp_path / "models")
    if damage is not None:
        damage(tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    process = call(tmp_path / "models", tmp_path / "out", "--method", "gmp", "--pattern", "2:4", *words)
    assert process.exit_code == 2, process.stdout
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_text_that_is_too_short_is_refused(folders: Path, tmp_path: Path) -> None:
    parts, path = text.by_part(made_up()), tmp_path / "short.jsonl"
    path.write_bytes(text.lines([document._replace(text=document.part) for document in parts["validation"]]))
    process = call(folders, tmp_path / "out", *HALF, "--data", str(path))
    assert "has 1 document, none of them in the part train and calibration; give more documents" in process.stderr
    short = [document._replace(text=document.part) for part in ("train", "validation") for document in parts[part]]
    path.write_bytes(text.lines(short))
    process = call(folders, tmp_path / "out", *HALF, "--data", str(path))
    assert "fewer than one window of 16; give more text, or --length" in process.stderr
    assert not (tmp_path / "out").exists()


def test_validation_documents_that_were_used_are_refused(folders: Path, tmp_path: Path) -> None:
    common, path = next(document for document in made_up() if document.part == "train"), tmp_path / "held.jsonl"
    path.write_bytes(text.lines([common._replace(name="other")]))
    process = call(folders, tmp_path / "out", *HALF, "--validation", str(path))
    assert "were used to prune as well, such as other" in process.stderr
    path.write_bytes(text.lines([Document(f"new{k}", f"words {k} which are nowhere else") for k in range(3)]))
    process = call(folders, tmp_path / "out", *HALF, "--json", "--validation", str(path))
    assert json.loads(process.stdout)["held_out"]["documents"] == 3


def test_documents_that_shaped_earlier_masks_are_not_measured_on(folders: Path, tmp_path: Path) -> None:
    call(folders, tmp_path / "once", *HALF)
    name = (tmp_path / "once" / lms.USED).read_text().splitlines()[0].partition(" ")[2]
    common, path = next(document for document in made_up() if document.name == name), tmp_path / "held.jsonl"
    path.write_bytes(text.lines([common._replace(name="other")]))
    fresh = tmp_path / "fresh.jsonl"
    fresh.write_bytes(text.lines([Document(f"new{k}", "words that are new " * 9 + str(k)) for k in range(60)]))
    words = ("--model", str(tmp_path / "once"), "--data", str(fresh))
    process = call(folders, tmp_path / "twice", *HALF, *words, "--validation", str(path))
    assert "1 of the documents to measure on shaped the masks of" in process.stderr
    assert "such as other (see its used_documents.txt); give --validation with others" in process.stderr
    assert call(folders, tmp_path / "twice", *HALF, *words).exit_code == 0


def test_a_pattern_that_does_not_divide_names_the_weight(tokenizer: Any, folders: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm.save(lm.llama(vocabulary=len(tokenizer), length=32, end=0, seed=0, **sizes), tokenizer, tmp_path / "odd")
    words = ("--method", "gmp", "--pattern", "2:4", "--model", str(tmp_path / "odd"))
    process = call(folders, tmp_path / "out", *words)
    assert "0.mlp.down_proj.weight has 26 inputs, which 4 does not divide; leave it out by --exclude" in process.stderr
    process = call(folders, tmp_path / "out", *words, "--exclude", "*.down_proj", "--json")
    assert json.loads(process.stdout)["sparsity"] == 0.5


def test_a_model_that_does_not_fit_is_told_what_would(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm, "free_memory", lambda device: 100_000)
    process = call(folders, tmp_path / "out", "--method", "pft", "--sparsity", "0.5")
    assert "has 0.0001 GB free: a model of at most 3,571 weights fits; a one-shot method such as" in process.stderr


def test_a_folder_that_exists_stays_as_it_is(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    process = call(folders, tmp_path / "mine", *HALF)
    assert "mine exists, and is not written over; give another --out" in process.stderr
    assert (tmp_path / "mine").read_text() == "kept"


# --- Tokens and windows


def test_a_tokenizer_follows_from_its_documents_in_any_order(tokenizer: Any) -> None:
    again = lm.train_tokenizer(made_up()[::-1], size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 300
    for sentence in ("ab\tcd\n\n  é漢", made_up()[0].text):
        assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence


def test_packed_windows_are_the_documents_with_ends_between() -> None:
    tokens = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6, 7, 8])]
    x, y = lm.packed(tokens, end=0, length=4)
    assert x.tolist() == [[0, 1, 2, 3], [0, 4, 0, 5]]
    assert y.tolist() == [[1, 2, 3, 0], [4, 0, 5, 6]]


def test_held_out_windows_predict_every_token_once() -> None:
    documents = [Document("a", "abcde"), Document("b", "é")]
    held_out = lm.held_out([np.array([1, 2, 3, 4, 5]), np.array([6])], lm.sizes_of(documents), end=0, length=4)
    assert held_out.x.tolist() == [[0, 1, 2, 3], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert held_out.y.tolist() == [[1, 2, 3, 4], [5, -100, -100, -100], [6, -100, -100, -100]]
    assert held_out.document.tolist() == [0, 0, 1]
    assert held_out.bytes.tolist() == [5, 2]


def test_losses_are_sums_over_documents(tokenizer: Any) -> None:
    model, documents = small("llama", tokenizer).eval(), made_up(8)
    tokens = lm.tokens_of(tokenizer, documents)
    losses = lm.losses(model, lm.held_out(tokens, lm.sizes_of(documents), end=0, length=32))
    for k, document in enumerate(tokens):
        row = torch.tensor([0, *document.tolist()])[:33]
        with torch.no_grad():
            logits = torch.log_softmax(model(row[None, :-1]).logits[0], -1)
        if len(document) <= 32:
            expected = -float(logits.gather(1, row[1:, None]).sum())
            assert float(losses.total[k]) == pytest.approx(expected, rel=1e-4)
    assert losses.tokens.tolist() == [len(document) for document in tokens]
    assert losses.per_byte == pytest.approx(float(losses.total.sum()) / sum(len(d.text.encode()) for d in documents))


def test_conv1d_layers_are_linear_ones_for_a_while(tokenizer: Any) -> None:
    model = small("gpt2", tokenizer).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        shape, layer = model.transformer.h[0].attn.c_attn.weight.shape, model.transformer.h[0].attn.c_attn
        with lm.as_linear(model):
            names = lm.block_weights(model)
            assert model.get_parameter(names[0]).shape == shape[::-1]
            torch.testing.assert_close(model(ids).logits, before)
            model.get_parameter(names[0]).data[0] = 0
        assert model.transformer.h[0].attn.c_attn is layer
        assert not layer.weight[:, 0].any()
    assert names == lm.block_weights(model)
    assert len(names) == 8
