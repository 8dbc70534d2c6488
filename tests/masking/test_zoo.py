"""Any model: pft and pbp on an LSTM, a ViT, BERT and GPT-2, with tied embeddings, end in plain models."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pacprune as pp
from pacprune.deploy import export
from pacprune.masking import weights
from pacprune.training import estimators

CLASSES, TOKENS, LENGTH = 4, 24, 8
CONFIG = pp.Config(epochs=2, lr=0.02, gate_lr=0.5, batch_size=24)  # 48 examples: two steps an epoch, one epoch a stage


class Recurrent(nn.Module):
    """Two LSTM layers over tokens; with `tied`, a reconstruction through the embedding's own weight is added."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(TOKENS, 12), nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, TOKENS if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.tokens(x))[0])
        return logits if self.tied else logits[:, -1]


class Vision(nn.Module):
    """A ViT: patches by a convolution, a class token, learned places, torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 16) * 0.02), nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places)[:, 0])


class Decoder(nn.Module):
    """pp.models.gpt as it is, or with a class from its last position."""

    def __init__(self, *, classes: bool) -> None:
        super().__init__()
        self.gpt = pp.models.gpt(TOKENS, width=16, depth=2, heads=2, context=LENGTH)
        self.head = nn.Linear(TOKENS, CLASSES) if classes else nn.Identity()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        out = self.gpt(x)
        return self.head(out[:, -1]) if self.classes else out


class Outputs(nn.Module):
    """A model of transformers that returns its logits alone, which is what a loss takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def _bert(head: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    return Outputs(getattr(transformers, f"BertFor{head}")(config))


def _gpt2(head: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        num_labels=CLASSES,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return Outputs(getattr(transformers, f"GPT2{head}")(config))


def _vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=CLASSES,
    )
    return Outputs(transformers.ViTForImageClassification(config))


class Case(NamedTuple):
    """A model, what it reads and predicts, and the two names of its tied weight."""

    make: Callable[[], nn.Module]
    images: bool = False
    tied: tuple[str, str] | None = None

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make()


CLASSIFIERS = {
    "lstm": Case(lambda: Recurrent(tied=False)),
    "vit": Case(Vision, images=True),
    "gpt": Case(lambda: Decoder(classes=True), tied=("gpt.tokens.weight", "gpt.head.weight")),
    "transformers BERT": Case(lambda: _bert("SequenceClassification")),
    "transformers GPT-2": Case(lambda: _gpt2("ForSequenceClassification")),
    "transformers ViT": Case(_vit, images=True),
}
TAGGERS = {
    "tied lstm": Case(lambda: Recurrent(tied=True), tied=("tokens.weight", "head.weight")),
    "gpt": Case(lambda: Decoder(classes=False), tied=("gpt.tokens.weight", "gpt.head.weight")),
    "transformers BERT": Case(
        lambda: _bert("MaskedLM"),
        tied=("inner.bert.embeddings.word_embeddings.weight", "inner.cls.predictions.decoder.weight"),
    ),
    "transformers GPT-2": Case(
        lambda: _gpt2("LMHeadModel"), tied=("inner.transformer.wte.weight", "inner.lm_head.weight")
    ),
}
KINDS = {"class": CLASSIFIERS, "token": TAGGERS}
ALL = {f"{name}, {kind}": (case, kind) for kind, cases in KINDS.items() for name, case in cases.items()}


def examples(case: Case, kind: str, n: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(1, TOKENS, (n, LENGTH), generator=generator)
    if case.images:
        x = torch.randn(n, 1, 8, 8, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator) if kind == "class" else x.roll(-1, dims=1)


def per_token(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def check_tied(model: nn.Module, case: Case) -> None:
    if case.tied is not None:
        first, second = (model.get_parameter(name) for name in case.tied)
        assert first is second
        assert case.tied[0] in pp.prunable(model)
        assert case.tied[1] not in pp.prunable(model)


@pytest.mark.parametrize("recipe", ["thresholded", "coupled", "paper"])
@pytest.mark.parametrize("name", ALL)
def test_pft_keeps_exactly_k_and_leaves_a_plain_model(name: str, recipe: str) -> None:
    case, kind = ALL[name]
    model, data = case.model(), examples(case, kind)
    loss = per_token if kind == "token" else F.cross_entropy
    check_tied(model, case)
    plain, total = copy.deepcopy(model), weights.total(model)
    before = {name: w.detach().clone() for name, w in pp.prunable(model).items()}
    result = pp.pft(model, data, CONFIG, sparsity=0.9, recipe=recipe, dense=CONFIG, loss=loss)
    assert [row["stage"] for row in result.history] == [
        "dense",
        "dense",
        "masks",
        "masks" if recipe == "thresholded" else "tune",
    ]
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in result.history)
    nonzero = sum(int((w != 0).sum()) for w in pp.prunable(model).values())
    assert nonzero == sum(int(keep.sum()) for keep in result.mask.values()) == round(0.1 * total)
    check_tied(model, case)
    assert all(not torch.equal(w, before[name]) for name, w in pp.prunable(model).items())
    assert set(model.state_dict()) == set(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    check_tied(plain, case)
    with torch.no_grad():
        assert torch.equal(plain.eval()(data[0]), model(data[0]))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_pbp_certifies_every_classifier(name: str, tmp_path: Path) -> None:
    case = CLASSIFIERS[name]
    model = case.model()
    plain = copy.deepcopy(model)
    x, y = examples(case, "class", n=96)
    split = pp.data.split(x, y, classes=CLASSES)
    result = pp.pbp(model, split, CONFIG, sparsity=0.9, dense=CONFIG, draws=50, folder=tmp_path)
    assert [row["stage"] for row in result.history] == ["dense"] * 2 + ["prior"] * 2 + ["posterior"] * 2
    assert result.history[-1]["expected_sparsity"] == pytest.approx(0.9, abs=1e-3)
    assert 0 < result.certificate.bound <= 1
    assert result.posterior.keep_prob.keys() == pp.prunable(plain).keys()
    pp.harden(model, pp.top_k(result.posterior.keep_prob, sparsity=0.9))
    check_tied(model, case)
    assert pp.sparsity(model) == pytest.approx(1 - round(0.1 * weights.total(model)) / weights.total(model))
    plain.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("name", ALL)
def test_no_weight_is_read_past_its_gate(name: str) -> None:
    case, kind = ALL[name]
    model, (x, _) = case.model().eval(), examples(case, kind)
    slab = pp.isotropic(model, sparsity=0.0)
    full = {n: torch.ones_like(p) for n, p in slab.keep_prob.items()}

    def outputs(keep: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return pp.attach(copy.deepcopy(model), replace(slab, keep_prob=keep)).eval()(x)

    whole = outputs(full)
    for key in slab.keep_prob:
        assert not torch.equal(outputs(full | {key: torch.zeros_like(full[key])}), whole), key


# --- A pattern in a transformer, and in its exported file


def patterned() -> tuple[nn.Module, Any]:
    model = pp.models.gpt(TOKENS, width=16, depth=1, heads=2, context=LENGTH, dropout=0.0)
    data = examples(TAGGERS["gpt"], "token")
    return model, pp.pft(model, data, CONFIG, pattern="2:4", loss=per_token)


def test_an_exported_file_claims_a_pattern_only_where_it_holds(tmp_path: Path) -> None:
    model, result = patterned()
    assert result.sparsity == 0.5
    sentence = export.write(
        tmp_path / "packed", model, format="safetensors", example=examples(TAGGERS["gpt"], "token")[0], pattern="2:4"
    )
    assert sentence.endswith(", 2:4")
    assert export.Packed(tmp_path / "packed").metadata["pattern"] == "2:4"
    back = pp.models.gpt(TOKENS, width=16, depth=1, heads=2, context=LENGTH)
    back.load_state_dict(export.load(tmp_path / "packed"))
    assert torch.equal(back.head.weight, model.head.weight)
    export.save(tmp_path / "without", model)
    assert "pattern" not in export.Packed(tmp_path / "without").metadata
    with torch.no_grad():
        model.blocks[0].hidden.weight[3, :4] = 1.0
    for format in export.FORMATS:
        with pytest.raises(ValueError, match=r"blocks\.0\.hidden\.weight is not 2:4: 1 of its .* group 0 of row 3"):
            export.write(tmp_path / "other", model, format=format, example=torch.zeros(2, LENGTH), pattern="2:4")
    with pytest.raises(ValueError, match="pattern '3:4' is unknown"):
        export.save(tmp_path / "other", model, pattern="3:4")
    assert not (tmp_path / "other").exists()


def test_algorithm_1_refuses_a_pattern_which_has_no_gate_per_weight() -> None:
    model = pp.models.gpt(TOKENS, width=16, depth=1, heads=2, context=LENGTH)
    pp.attach(model, pp.isotropic(model, sparsity=0.5), mapping="2:4")
    with pytest.raises(ValueError, match=r"one gate for every weight, but those of the pattern 2:4 .* use samples=0"):
        estimators.algorithm1_(model, lambda: model(torch.zeros(1, 4, dtype=torch.long)).sum(), samples=2)
