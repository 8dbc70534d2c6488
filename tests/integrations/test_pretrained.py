"""Pruned networks of transformers as files: save_pretrained and back, packed, in shards, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import pacprune as pp
from pacprune.deploy import export
from pacprune.masking import patterns

transformers = pytest.importorskip("transformers")

from pacprune.integrations import pretrained  # noqa: E402

TOKENS, LENGTH = 32, 12


def llama() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **size, **heads, tie_word_embeddings=True))


def gpt2() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def bert() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, num_labels=3, **size)
    return transformers.BertForSequenceClassification(config)


def batches(model: Any) -> DataLoader[Any]:
    words = torch.randint(1, TOKENS, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    classes = isinstance(model, transformers.BertForSequenceClassification)
    sentences: Any = [{"input_ids": x, "labels": x[0] % 3 if classes else x} for x in words]
    return DataLoader(sentences, batch_size=4)


def one_shot(model: Any) -> None:
    pp.osp(model, batches(model), pp.Config(epochs=1, lr=1e-3), sparsity=0.8)


def two_of_four(model: Any) -> None:
    pp.osp(model, batches(model), pp.Config(epochs=1, lr=1e-3), pattern="2:4")


def own_loop(model: Any) -> None:
    pruner = pp.Pruner(model, sparsity=0.8, steps=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(model):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    pruner.finish()


def same_bits(model: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    pairs = [(tensor, theirs[name]) for name, tensor in model.state_dict().items()]
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a Llama, pruned at once": (llama, one_shot),
    "a GPT-2, 2:4": (gpt2, two_of_four),
    "a BERT, pruned in a loop": (bert, own_loop),
}


@pytest.mark.parametrize("case", CASES)
def test_zeros_types_and_ties_survive_a_folder_of_transformers(case: str, tmp_path: Path) -> None:
    make, prune = CASES[case]
    model = make()
    prune(model)
    model.to(torch.bfloat16).eval()
    masks = {name: weight != 0 for name, weight in pp.prunable(model).items()}
    assert 0.45 < pp.sparsity(model) < 0.85
    for folder, options in ((tmp_path / "whole", {}), (tmp_path / "shards", {"max_shard_size": "3KB"})):
        model.save_pretrained(folder, **options)
        loaded = type(model).from_pretrained(folder, dtype="auto")
        assert same_bits(model, loaded)
        weights = pp.prunable(loaded)
        assert all(torch.equal(weights[name] != 0, keep) for name, keep in masks.items())
        ours = pretrained.load(folder)
        assert (type(ours), ours.training) == (type(model), False)
        assert same_bits(model, ours)
        if case != "a BERT, pruned in a loop":
            assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
        state = export.load(folder)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def test_a_packed_file_fills_a_model_from_its_config(tmp_path: Path) -> None:
    model = llama()
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
    export.save(tmp_path / "packed.safetensors", model)
    fresh = transformers.LlamaForCausalLM(model.config)
    fresh.load_state_dict(export.load(tmp_path / "packed.safetensors"))
    assert same_bits(model, fresh)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight


def test_a_model_that_does_not_follow_the_pattern_is_refused(tmp_path: Path) -> None:
    model = llama()
    layers = {name: w for name, w in pp.scores.magnitude(model).items() if "proj" in name}
    pp.apply_mask(model, pp.top_k(layers, pattern="2:4"))
    with pytest.raises(ValueError, match=r"^model.embed_tokens.weight is not 2:4: .*; prune with pattern='2:4'$"):
        export.write(tmp_path / "x", model, format="dense", example=torch.zeros(1, 4), pattern="2:4")
    assert not (tmp_path / "x").exists()
    assert all(patterns.follows(pp.prunable(model)[name], 2, 4) for name in layers)


def test_a_folder_that_is_incomplete_or_foreign_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config.json; name a folder that save_pretrained wrote$"):
        pretrained.load(tmp_path)
    model, shards = llama(), tmp_path / "shards"
    model.save_pretrained(shards, max_shard_size="3KB")
    first = min(shards.glob("*.safetensors"))
    save_file({"other": torch.ones(1)}, first, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack \d+ tensors of LlamaForCausalLM, such as .*; write it again"):
        pretrained.load(shards)
    with pytest.raises(ValueError, match=rf"{first.name} lacks .*, which model.safetensors.index.json has there"):
        export.load(shards)
    first.unlink()
    with pytest.raises(ValueError, match=rf"{first.name} is missing, although .* names it; write the model again"):
        export.load(shards)
    with pytest.raises(ValueError, match=r"cannot be read by transformers .* \(FileNotFoundError: .*; write it again"):
        pretrained.load(shards)
    config = json.loads((shards / "config.json").read_text())
    for architectures in (["LogitsProcessor"], ["pipeline"], None):
        (shards / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        with pytest.raises(ValueError, match="names no architecture that transformers has"):
            pretrained.load(shards)


def test_an_index_that_leaves_its_folder_or_is_none_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor model.safetensors.index.json; name"):
        export.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read as safetensors .*; write the model again$"):
        export.load(tmp_path)
    for content, fault in (
        ("[]", r"cannot be read \(TypeError"),
        ("{", r"cannot be read \(JSONDecodeError"),
        ('{"weight_map": {"w": "../w.safetensors"}}', r"names '../w.safetensors', which is no file of its folder"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=fault):
            export.load(tmp_path)


def test_only_models_that_are_called_with_tokens_have_an_example() -> None:
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(ValueError, match=r"^ViTModel takes pixel_values, but only networks .* with an example$"):
        pretrained.example(transformers.ViTModel(config), length=4)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=TOKENS)
    with pytest.raises(ValueError, match=r"^T5Model takes the tokens of an encoder and a decoder, but only"):
        pretrained.example(transformers.T5Model(config), length=4)
    assert pretrained.example(llama(), length=100).shape == (1, LENGTH)
    assert pretrained.example(gpt2(), length=5).shape == (1, 5)
