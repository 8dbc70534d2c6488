"""fit with any data and any loss, and its refusals."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune.masking import weights

CONFIG = pp.Config(epochs=2, lr=0.1, batch_size=16)
G = torch.Generator().manual_seed(1)
X = torch.randn(80, 4, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


# --- Bad input.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y + 2), "labels run from 2 to 4, but the model has 3 outputs"),
        ((X, Y - 1), "labels run from -1 to 1"),
        (TensorDataset(X, Y + 2), "labels run from 2 to 4"),
        (DataLoader(TensorDataset(X, Y - 1), 80), "labels run from -1 to 1"),
        ((X, Y[:-1]), "x has 80 examples but y has 79"),
        ((X[:0], Y[:0]), "empty"),
        ([X, Y], "data is a list"),
        (
            (X.double(), Y),
            "x is torch.float64 but the model's parameters are torch.float32; cast the data or the model",
        ),
        ((X, Y[:, None]), r"labels are torch.int64 of shape \(80, 1\), .* y.squeeze\(1\)"),
        ((X, Y.int()), r"labels are torch.int32 .* y.long\(\)"),
        ((X, Y.float()), r"labels are torch.float32 of shape \(80,\) .*mse_loss"),
        ((X * math.nan, Y), r"the loss became nan in epoch 1 of stage 'fit' \(lr 0.1, gate_lr 10.0\)"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pp.fit(net(), data, CONFIG)
    assert "\n" not in str(error.value)


def test_nothing_changes_when_the_input_is_refused(tmp_path: Path) -> None:
    model = net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="labels"):
        pp.fit(model, (X, Y + 2), CONFIG, checkpoint=tmp_path / "run.pt")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert len(weights.seen(model).examples) == 0
    assert list(tmp_path.iterdir()) == []
    assert model.training


def test_errors_name_nan_weights_and_losses() -> None:
    model = net()
    with torch.no_grad():
        model[4].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"4\.weight holds NaN or infinite values before training"):
        pp.fit(model, (X, Y), CONFIG)
    with pytest.raises(ValueError, match=r"the loss became (inf|nan) in epoch .* use a smaller learning rate"):
        pp.fit(net(), (X, Y), pp.Config(epochs=50, lr=1e30), loss=lambda out, y: out.square().sum())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net().requires_grad_(False), "every parameter has requires_grad=False"),
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.LSTM(4, 3), "the model returns a tuple"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pp.fit(model, (X, Y), CONFIG)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    for loss in (nn.CrossEntropyLoss(reduction="none"), lambda out, y: out[0].no_such_thing):
        with pytest.raises(ValueError, match=r"the loss gave no number for outputs of shape \(2, 3\)"):
            pp.fit(net(), (X, Y), CONFIG, loss=loss)


def test_a_budget_needs_stochastic_masks() -> None:
    with pytest.raises(ValueError, match=r"call pp\.attach\(model, spikeslab\) first"):
        pp.fit(net(), (X, Y), CONFIG, budget=pp.Budget(0.5))


# --- fit: any loss.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm, self.head = nn.Embedding(8, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.emb(x))[0])


class Transformer(nn.Module):
    """One layer of causal attention; the output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.emb(x), src_mask=hidden, is_causal=True))


def next_token(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("kind", [Recurrent, Transformer])
@pytest.mark.parametrize("form", ["tensors", "loader"])
def test_language_models_learn_the_next_token(kind: type[nn.Module], form: str) -> None:
    text = torch.arange(400) % 8  # the next token follows from the last
    x, y = text[:-1].unfold(0, 6, 3).contiguous(), text[1:].unfold(0, 6, 3).contiguous()
    data = (x, y) if form == "tensors" else DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind()
    config = pp.Config(epochs=6, lr=0.01, gate_lr=0.1, optimizer="adam", batch_size=32)
    rows = pp.fit(model, data, config, loss=next_token)
    pp.attach(model, pp.score_monotone(model, pp.scores.magnitude(model), sparsity=0.3))
    rows += pp.fit(model, data, config, loss=next_token, budget=pp.Budget(0.3), validation=data)
    pp.harden(model)
    rows += pp.fit(model, data, config, loss=next_token)
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    assert pp.sparsity(model) == pytest.approx(0.3, abs=1e-3)
    assert pp.error(model, data) < 0.2


@pytest.mark.parametrize("kind", ["dense", "attached"])
def test_a_regression_learns_dense_and_with_gates(kind: str) -> None:
    y = X @ torch.tensor([[1.0], [-2.0], [0.0], [0.5]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
    if kind == "attached":
        pp.attach(model, pp.isotropic(model, sparsity=0.1))
    rows = pp.fit(model, (X, y), pp.Config(epochs=20, lr=0.05, gate_lr=1.0, batch_size=16), loss=F.mse_loss)
    assert rows[-1]["loss"] < 0.1 * rows[0]["loss"]


def test_several_labels_of_an_example_are_no_probabilities_of_classes() -> None:
    several = (torch.rand(len(X), 3) > 0.5).float()
    for y in (several, torch.zeros(len(X), 3), several - 0.5):
        with pytest.raises(ValueError, match=r"are no probabilities of classes.*binary_cross_entropy_with_logits"):
            pp.fit(net(), (X, y), CONFIG)
        with pytest.raises(ValueError, match="are no probabilities of classes"):
            pp.pft(net(), (X, y), CONFIG, sparsity=0.5)
    history = pp.fit(net(), (X, several), CONFIG, loss=F.binary_cross_entropy_with_logits)
    assert history[-1]["loss"] < 1


def test_a_loss_without_a_gradient_is_refused() -> None:
    def hits(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output.argmax(-1) == y).float().mean()

    with pytest.raises(ValueError, match="the loss has no gradient in what is trained; compute it from the network's"):
        pp.fit(net(), (X, Y), CONFIG, loss=hits)


def test_class_probabilities_serve_as_labels() -> None:
    soft = F.one_hot(Y, 3).float()
    losses = [pp.fit(net(), (X, y), CONFIG)[-1]["loss"] for y in (soft, Y)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
