"""Many draws at a time are the draws one by one, on independent minibatches; the counts are those of a plain loop."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

import pacprune as pp
from pacprune.certification import drawn_networks
from pacprune.masking.spikeslab import SpikeSlab, draw_weights
from pacprune.training.evaluate import evaluating

CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.5)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Curious(nn.Module):
    """Branches on its own numbers, which vmap cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x)
        return out if float(out.sum()) > 0 else 2 * out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.two(torch.relu(self.one(x))))


def convolutional() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model.train()(torch.randn(20, 1, 4, 4))  # running statistics of their own
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 3)), (4,)),
    "convolution with BatchNorm": (convolutional, (1, 4, 4)),
    "attention": (Attention, (5, 4)),
    "lstm": (Recurrent, (5, 4)),
    "own branches": (Curious, (4,)),
    "tied": (Tied, (4,)),
}


def make(name: str = "mlp", std: float = 0.3) -> tuple[nn.Module, SpikeSlab, pp.data.Part]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name][0]()
        x = torch.randn(60, *NETWORKS[name][1])
        y = torch.randint(3, (60,))
    return model, pp.isotropic(model, sparsity=0.4, std=std), pp.data.Part("bound", x, y, torch.arange(60))


def wrong_of(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Plainly: the weights copied into a plain module, the examples one batch."""
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, w in weights.items():
            plain.get_parameter(name).copy_(w)
        return plain(x).argmax(1) != y


@pytest.mark.parametrize("name", NETWORKS)
def test_many_draws_in_one_call_are_the_draws_one_by_one(name: str) -> None:
    model, slab, part = make(name)
    steps = torch.tensor([0, 7, 3, 2**31])
    x = part.x.reshape(4, 15, *part.x.shape[1:])
    with evaluating(model):
        outputs = drawn_networks.outputs(model, slab, x, seed=5, steps=steps)
        for k, step in enumerate(steps.tolist()):
            alone = functional_call(model, draw_weights(slab, seed=5, step=step), (x[k],))
            torch.testing.assert_close(outputs[k], alone, rtol=1e-4, atol=1e-5)
    assert outputs.shape == (4, 15, 3)


def test_an_error_of_the_network_itself_is_not_hidden() -> None:
    model, slab, _ = make()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drawn_networks.outputs(model, slab, torch.randn(2, 5, 9), seed=0, steps=torch.arange(2))


def test_minibatches_are_uniform_independent_and_with_replacement() -> None:
    n, batch, draws = 40, 25, 4000
    batches = drawn_networks.minibatches(n, batch, seed=11, steps=torch.arange(draws), device=CPU)
    assert batches.shape == (draws, batch)
    assert (int(batches.min()), int(batches.max())) == (0, n - 1)
    assert stats.chisquare(np.bincount(batches.reshape(-1).numpy(), minlength=n)).pvalue > 1e-3
    # Within a draw: pairs of neighbours, equal ones included, are as likely as each other.
    pairs = (batches[:, 0::2][:, :12] * n + batches[:, 1::2]).reshape(-1).numpy()
    assert stats.chisquare(np.bincount(pairs, minlength=n * n)).pvalue > 1e-3
    # Across draws: what draw t holds says nothing about draw t + 1. Slices of an epoch would never repeat.
    pairs = (batches[0::2] * n + batches[1::2]).reshape(-1).numpy()
    assert stats.chisquare(np.bincount(pairs, minlength=n * n)).pvalue > 1e-3
    distinct = np.array([len(set(row)) for row in batches.tolist()])
    assert distinct.mean() == pytest.approx(n * (1 - (1 - 1 / n) ** batch), abs=0.15)


def test_minibatches_are_a_function_of_seed_and_step() -> None:
    many = drawn_networks.minibatches(1000, 8, seed=3, steps=torch.arange(10), device=CPU)
    for t in (0, 4, 9):
        assert torch.equal(drawn_networks.minibatches(1000, 8, seed=3, steps=torch.tensor([t]), device=CPU)[0], many[t])
    assert not torch.equal(drawn_networks.minibatches(1000, 8, seed=4, steps=torch.arange(10), device=CPU), many)


def test_the_counts_are_those_of_a_plain_loop() -> None:
    model, slab, part = make("convolution with BatchNorm")
    reference = wrong_of(model, drawn_networks.thresholded(slab), part.x, part.y)
    counts = drawn_networks.monte_carlo(model, slab, part, reference, seed=2, batch=13, draws=40)
    assert (len(counts), counts.batch, counts.wrong.dtype) == (40, 13, torch.int32)
    for t in range(40):
        index = drawn_networks.minibatches(60, 13, seed=2, steps=torch.tensor([t]), device=CPU)[0]
        wrong = wrong_of(model, draw_weights(slab, seed=2, step=t), part.x[index], part.y[index])
        expected = reference[index]
        assert int(counts.wrong[t]) == int(wrong.sum())
        assert int(counts.plus[t]) == int((wrong & ~expected).sum())
        assert int(counts.minus[t]) == int((~wrong & expected).sum())
    assert counts.wrong.unique().numel() > 2


def test_the_mean_is_the_gibbs_risk() -> None:
    model, slab, part = make()
    no_errors = torch.zeros(60, dtype=torch.bool)
    counts = drawn_networks.monte_carlo(model, slab, part, no_errors, seed=8, batch=25, draws=2000)
    full = [wrong_of(model, draw_weights(slab, seed=9, step=t), part.x, part.y).double().mean() for t in range(400)]
    assert float(counts.wrong.double().mean()) / 25 == pytest.approx(float(torch.stack(full).mean()), abs=0.01)
    assert torch.equal(counts.plus, counts.wrong)
    assert int(counts.minus.sum()) == 0


def test_neither_the_chunk_nor_the_number_of_draws_changes_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slab, part = make()
    reference = drawn_networks.errors(model, drawn_networks.thresholded(slab), part)

    def table(draws: int) -> Tensor:
        counts = drawn_networks.monte_carlo(model, slab, part, reference, seed=2, batch=10, draws=draws)
        return torch.stack([counts.wrong, counts.plus, counts.minus])

    whole = table(90)
    monkeypatch.setattr(drawn_networks, "chunk_size", lambda slab, device: 7)
    assert torch.equal(table(90), whole)
    assert torch.equal(table(33), whole[:, :33])
    monkeypatch.setattr(drawn_networks, "chunk_size", lambda slab, device: 1)
    assert torch.equal(table(20), whole[:, :20])


def test_an_early_stop_keeps_the_whole_prefix() -> None:
    model, slab, part = make()
    reference, watched = drawn_networks.errors(model, drawn_networks.thresholded(slab), part), []

    def watch(counts: drawn_networks.Counts) -> tuple[bool, dict[str, float]]:
        watched.append(len(counts))
        return len(watched) == 2, {"bound": 0.5}

    progress_rows: list[tuple[str, int, int]] = []
    stopped = drawn_networks.monte_carlo(
        model,
        slab,
        part,
        reference,
        seed=2,
        batch=5,
        draws=5000,
        watch=watch,
        stage="here",
        progress=lambda stage, done, total, row: progress_rows.append((stage, done, total)),
    )
    assert watched == [1000, 1250]  # on every device, however many it draws at once
    assert len(stopped) == progress_rows[-1][1] == 1250
    assert {(stage, total) for stage, _, total in progress_rows} == {("here", 5000)}
    whole = drawn_networks.monte_carlo(model, slab, part, reference, seed=2, batch=5, draws=len(stopped))
    assert torch.equal(whole.wrong, stopped.wrong)
    with pytest.raises(ValueError, match="draws is 0; at least 1"):
        drawn_networks.monte_carlo(model, slab, part, reference, seed=2, batch=5, draws=0)


def test_the_thresholded_network_keeps_the_expected_number() -> None:
    slab = make()[1]
    keep_prob = {name: torch.linspace(0.1, 0.9, p.numel()).reshape(p.shape) for name, p in slab.keep_prob.items()}
    slab = SpikeSlab(keep_prob, slab.mean, slab.std, slab.rest, slab.total)
    network = drawn_networks.thresholded(slab)
    nonzero = sum(int((w != 0).sum()) for w in network.values())
    assert nonzero == round(sum(float(p.double().sum()) for p in keep_prob.values()))
    least = min(float(keep_prob[n][w != 0].min()) for n, w in network.items())
    assert least >= max(float(keep_prob[n][w == 0].max()) for n, w in network.items())
    assert all(torch.equal(w[w != 0], slab.mean[n][w != 0]) for n, w in network.items())


def test_errors_and_disagreements_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slab, part = make("convolution with BatchNorm")
    model.train()  # whatever mode it is in: evaluation is evaluation, and puts the mode back
    fixed = drawn_networks.thresholded(slab)
    assert torch.equal(drawn_networks.errors(model, fixed, part), wrong_of(model, fixed, part.x, part.y))
    expected, plain = [], copy.deepcopy(model).eval()
    for t in range(60):  # an independent draw for every input
        networks = (
            functional_call(plain, w, (part.x[t : t + 1],)) for w in (fixed, draw_weights(slab, seed=4, step=t))
        )
        fixed_class, drawn_class = (int(out.argmax()) for out in networks)
        expected.append(fixed_class != drawn_class)
    differs = drawn_networks.disagreements(model, slab, fixed, part.x, seed=4)
    assert differs.tolist() == expected
    assert any(expected)
    monkeypatch.setattr(drawn_networks, "chunk_size", lambda slab, device: 11)
    assert drawn_networks.disagreements(model, slab, fixed, part.x, seed=4).tolist() == expected
    assert drawn_networks.disagreements(model, slab, fixed, part.x[:0], seed=4).tolist() == []
    assert model.training


def test_close_calls_are_answers_within_the_rounding_of_float32() -> None:
    """Two classes that float32 can hardly tell apart, two that it can, and outputs that lose all to a large bias."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.1, 0.3], [0.7, 0.9]]))
        model.bias.zero_()
    x = torch.tensor([[0.6, 0.4 - 1e-9], [0.6, 0.41], [0.3, 0.2], [5.0, 1.0]])
    assert drawn_networks.close_calls(model, {}, x).tolist() == [True, False, True, False]
    with torch.no_grad():
        model.bias.fill_(1e7)
    assert drawn_networks.close_calls(model, {}, x).all()


def test_close_calls_know_tokens_and_outputs_that_are_infinite() -> None:
    """Tokens cannot be float64; and where -inf less -inf was no number, two classes that tie seemed far apart."""
    tied = nn.Embedding.from_pretrained(torch.tensor([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0]]))
    tokens = torch.tensor([0, 1, 0])
    assert drawn_networks.close_calls(tied, {}, tokens).tolist() == [True, False, True]
    tied.weight.data[:, 2] = -torch.inf
    assert drawn_networks.close_calls(tied, {}, tokens).tolist() == [True, False, True]


def test_close_calls_of_many_networks_are_those_of_each() -> None:
    model, slab, part = make()
    steps, x = torch.arange(4), part.x.reshape(4, 15, 4)
    networks = draw_weights(slab, seed=1, step=steps)
    together = drawn_networks.close_calls(model, networks, x)
    for k in range(4):
        alone = drawn_networks.close_calls(model, {name: w[k] for name, w in networks.items()}, x[k])
        assert torch.equal(together[k], alone)
    assert together.shape == (4, 15)
    assert not together.any()


def test_the_counts_of_several_workers_merge_in_order_and_without_gaps() -> None:
    model, slab, part = make()
    reference = drawn_networks.errors(model, drawn_networks.thresholded(slab), part)

    def work(first: int, draws: int) -> drawn_networks.Counts:
        return drawn_networks.monte_carlo(model, slab, part, reference, seed=2, batch=5, draws=draws, first=first)

    whole, merged = work(0, 60), drawn_networks.merge([work(40, 20), work(0, 25), work(25, 15)])
    for field in ("wrong", "plus", "minus"):
        assert torch.equal(getattr(whole, field), getattr(merged, field))
    with pytest.raises(ValueError, match="do the missing draws again"):
        drawn_networks.merge([work(0, 25), work(40, 20)])
