"""Criteria: one contract for all of them, and each against its definition."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune.data import batches
from pacprune.masking import criteria, weights
from pacprune.masking.criteria import CRITERIA, declaration, grasp, magnitude, random, score, snip, synflow


class Attention(nn.Module):
    """Embedding, attention, normalisation, dropout, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8)
        self.block = nn.ModuleDict({"att": nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)})
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.emb(tokens)
        return self.head(self.norm(h + self.block["att"](h, h, h, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(1))


class Case(NamedTuple):
    model: nn.Module
    data: tuple[Tensor, Tensor]


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return Case(model, (torch.randn(300, 6), torch.randint(0, 3, (300,))))


def conv2d() -> Case:
    body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(body, nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))
    return Case(model, (torch.randn(20, 2, 4, 4), torch.randint(0, 3, (20,))))


def conv1d() -> Case:
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    model[1].eval()  # frozen statistics in a model that is in train mode
    return Case(model, (torch.randn(20, 3, 5), torch.randint(0, 3, (20,))))


def attention() -> Case:
    return Case(Attention(), (torch.randint(0, 9, (20, 6)), torch.randint(0, 9, (20,))))


def recurrent() -> Case:
    return Case(Recurrent(), (torch.randn(20, 6, 4), torch.randint(0, 3, (20,))))


def make(case: Callable[[], Case]) -> Case:
    """The case, with the same random numbers every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case()


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Everything that a criterion must not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {n: (id(t), t._version, t.requires_grad) for n, t in tensors.items()},
        {n: t.detach().numpy().tobytes() for n, t in tensors.items()},
        {n: p.grad.numpy().tobytes() for n, p in model.named_parameters() if p.grad is not None},
        [m.training for m in model.modules()],
        torch.get_rng_state().numpy().tobytes(),
        torch.is_grad_enabled(),
    )


def first_two(model: nn.Module) -> dict[str, Tensor]:
    return dict(list(weights.prunable(model).items())[:2])


def scores_all(case: Callable[[], Case], criterion: str) -> bool:
    """Whether a criterion scores all weights of a case: some need layers that show their inputs."""
    declared = declaration(CRITERIA[criterion])
    return declared is None or not declared.needs_inputs or case not in (attention, recurrent)


CASES = [
    pytest.param(case, criterion, id=f"{case.__name__}-{criterion}")
    for case in (mlp, conv2d, conv1d, attention, recurrent)
    for criterion in CRITERIA
    if scores_all(case, criterion)
]


@pytest.mark.parametrize(("case", "criterion"), CASES)
class TestContract:
    def test_one_finite_number_per_prunable_weight(self, case, criterion):
        model, data = make(case)
        scores = score(criterion, model, data)
        assert {n: s.shape for n, s in scores.items()} == {n: w.shape for n, w in weights.prunable(model).items()}
        for name, s in scores.items():
            assert torch.isfinite(s).all(), name
            assert s.is_floating_point(), name
            assert not s.requires_grad, name
            assert (s != 0).any(), name

    def test_the_model_and_the_random_state_do_not_change(self, case, criterion):
        model, data = make(case)
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
        next(model.parameters()).requires_grad_(False)
        before = fingerprint(model)
        score(criterion, model, data)
        assert fingerprint(model) == before

    def test_the_same_call_gives_the_same_scores_with_gradients_off_too(self, case, criterion):
        model, data = make(case)
        first = score(criterion, model, data)
        torch.rand(3)
        with torch.no_grad():
            second = score(criterion, model, data)
        assert all(torch.equal(first[n], second[n]) for n in first)

    def test_prunable_restricts_the_scores(self, case, criterion):
        model, data = make(case)
        scores = score(criterion, model, data, prunable=first_two)
        assert list(scores) == list(first_two(model))
        if criterion not in ("grasp", "random"):  # their scores depend on all chosen weights together
            whole = score(criterion, model, data)
            assert all(torch.allclose(scores[n], whole[n], rtol=1e-5, atol=1e-9) for n in scores)

    def test_bad_models_are_refused(self, case, criterion):
        model, data = make(case)
        with pytest.raises(ValueError, match="nothing to prune"):
            score(criterion, nn.PReLU(), data)
        with torch.no_grad():
            list(weights.prunable(model).values())[-1].reshape(-1)[0] = float("nan")
        with pytest.raises(ValueError, match="1 NaN or infinite weights"):
            score(criterion, model, data)


def test_gradients_and_buffers_are_restored_even_after_an_error():
    model, _ = make(conv2d)
    weight, mean = model[0][0].weight, model[0][1].running_mean
    weight.grad, before = torch.ones_like(weight), mean.clone()

    def change_and_fail() -> None:
        with criteria._gradients_and_buffers_kept(model):
            weight.grad = None
            mean.add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert torch.equal(mean, before)
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_an_unknown_criterion_is_refused():
    model, data = make(mlp)
    names = ", ".join(CRITERIA)
    with pytest.raises(ValueError, match=f"criterion 'magnitud' is unknown; use one of {names}, or a function"):
        score("magnitud", model, data)


def test_magnitude_is_the_absolute_value():
    model, _ = make(attention)
    scores = magnitude(model)
    assert list(scores) == ["emb.weight", "block.att.in_proj_weight", "block.att.out_proj.weight"]
    assert torch.equal(scores["emb.weight"], model.emb.weight.abs())


def test_random_is_uniform_and_a_function_of_the_seed_alone():
    model, _ = make(mlp)
    wide, other = nn.Linear(300, 100), nn.Linear(300, 100)
    assert torch.equal(random(wide, seed=1)["weight"], random(other, seed=1)["weight"])
    assert not torch.equal(random(wide, seed=1)["weight"], random(wide, seed=2)["weight"])
    assert stats.kstest(random(wide, seed=1)["weight"].reshape(-1).numpy(), "uniform").pvalue > 1e-3
    scores = torch.cat([s.reshape(-1) for s in random(model, seed=1).values()])
    assert len(scores.unique()) == len(scores)  # no two weights share a number


@pytest.mark.parametrize("case", [mlp, attention, recurrent], ids=lambda f: f.__name__)
def test_snip_is_weight_times_gradient_of_the_mean_loss(case):
    model, (x, y) = make(case)
    model.eval()
    chosen = weights.prunable(model)
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(chosen.values()))
    scores = snip(model, (x, y))
    for (name, w), g in zip(chosen.items(), gradient, strict=True):
        assert torch.allclose(scores[name], (w * g).abs(), rtol=1e-4, atol=1e-8), name


def test_snip_takes_any_loss_and_a_number_of_examples():
    model, (x, _) = make(mlp)
    target = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    scores = snip(model, (x, target), loss=F.mse_loss, examples=64)
    gradient = torch.autograd.grad(F.mse_loss(model(x[:64]), target[:64]), model[0].weight)[0]
    assert torch.allclose(scores["0.weight"], (model[0].weight * gradient).abs(), rtol=1e-4, atol=1e-8)


def test_datasets_and_loaders_give_the_same_scores_as_tensors():
    model, (x, y) = make(mlp)
    tensors = snip(model, (x, y))
    for data in (TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=50)):
        assert torch.allclose(snip(model, data)["0.weight"], tensors["0.weight"], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("has_generator", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize("criterion", ["snip", "grasp", "synflow"])
def test_a_shuffling_loader_gives_the_same_scores_every_time(criterion, has_generator):
    model, (x, y) = make(mlp)
    g = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True, generator=g if has_generator else None)
    before = torch.get_rng_state()
    first, second = (score(criterion, model, loader)["0.weight"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(g.get_state(), torch.Generator().manual_seed(3).get_state())


def test_grasp_is_weight_times_hessian_times_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    x, y = torch.randn(300, 3, dtype=torch.float64), torch.randint(0, 2, (300,))
    flat = torch.cat([w.detach().reshape(-1) for w in model.parameters()])

    def loss(w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ w[:12].reshape(4, 3).T) @ w[12:].reshape(2, 4).T, y)

    gradient = torch.autograd.functional.jacobian(loss, flat)
    # Two batches of 256 and 44 examples: the Hessian of the mean loss times the gradient of the mean loss.
    expected = flat * (torch.autograd.functional.hessian(loss, flat) @ gradient)
    scores = torch.cat([s.reshape(-1) for s in grasp(model, (x, y)).values()])
    assert torch.allclose(scores, expected, rtol=1e-9, atol=1e-12)


def test_grasp_is_the_change_of_the_squared_gradient_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    x, y = torch.randn(200, 3, dtype=torch.float64), torch.randint(0, 2, (200,))

    def flow() -> float:
        gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        return float(torch.stack([(g**2).sum() for g in gradient]).sum())

    before = flow()
    for name, s in grasp(model, (x, y)).items():
        for i in (int(s.argmax()), int(s.argmin())):
            smaller = copy.deepcopy(dict(model.named_parameters())[name].data)
            with torch.no_grad():
                dict(model.named_parameters())[name].data.reshape(-1)[i] *= 1 - 1e-6
            # Shrinking w by a share h changes the squared norm of the gradient by -2 h w (H g).
            assert (flow() - before) / -2e-6 == pytest.approx(float(s.reshape(-1)[i]), rel=1e-3)
            dict(model.named_parameters())[name].data.copy_(smaller)


def test_synflow_is_conserved_from_layer_to_layer():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(12, 7, bias=False), nn.ReLU(),
        nn.Linear(7, 4, bias=False),
    )  # fmt: skip
    scores = synflow(model, (torch.randn(5, 2, 4, 4), torch.zeros(5)))
    sums = [float(s.sum()) for s in scores.values()]
    with torch.no_grad():
        for w in model.parameters():
            w.abs_()
        flow = float(model.double()(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum())
    assert sums == pytest.approx([flow] * 3, rel=1e-6)
    last = scores["5.weight"]
    hidden = model[:5](torch.ones(1, 2, 4, 4, dtype=torch.float64))
    assert torch.allclose(last, model[5].weight.abs() * hidden, rtol=1e-5)


def test_synflow_ignores_the_values_of_the_data_and_stays_finite_in_deep_networks():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(80)])
    first, second = (synflow(model, (torch.randn(3, 100), torch.zeros(3))) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert max(float(s.max()) for s in first.values()) > 1e40  # beyond float32
    assert all(torch.isfinite(s).all() for s in first.values())


@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_a_loss_that_is_not_a_number_is_refused(criterion):
    model, (x, y) = make(mlp)
    x[3, 2] = float("nan")
    with pytest.raises(ValueError, match="the loss is nan on the scoring data"):
        score(criterion, model, (x, y))


@pytest.mark.parametrize("case", [attention, recurrent], ids=lambda f: f.__name__)
@pytest.mark.parametrize("criterion", [name for name in CRITERIA if declaration(CRITERIA[name]).needs_inputs])
def test_weights_whose_inputs_cannot_be_seen_are_refused_by_what_needs_them(case, criterion):
    model, data = make(case)
    hidden = "emb.weight, block.att.in_proj_weight" if case is attention else "lstm.weight_ih_l0"
    with pytest.raises(ValueError, match=rf"no inputs can be recorded for {hidden}.*leave them out by exclude="):
        score(criterion, model, data)
    with pytest.raises(ValueError, match=r"no inputs can be recorded"):  # before anything is trained
        pp.pft(model, data, pp.Config(epochs=1), sparsity=0.5, criterion=criterion, dense=pp.Config(epochs=1))
    assert not len(weights.seen(model).examples)


@pytest.mark.parametrize(("case", "criterion"), [c for c in CASES if c.values[0] in (mlp, conv2d, attention)])
def test_examples_that_a_criterion_reads_are_noted_as_seen(case, criterion):
    model, data = make(case)
    scores = score(criterion, model, data)
    noted = weights.seen(model).examples
    if declared_to_read(criterion) or len(noted):  # synflow reads tokens, and not other inputs
        assert torch.equal(noted, torch.unique(batches.example_hashes(data)))
        return
    others = data[0].flip(0) + 1, data[1].flip(0)
    scores_of_others = CRITERIA[criterion](model, others)
    assert all(torch.equal(scores_of_others[n], s) for n, s in scores.items())
    assert not len(weights.seen(model).examples)


def declared_to_read(criterion: str) -> bool:
    declared = declaration(CRITERIA[criterion])
    return declared is None or declared.reads_data


def test_a_row_that_says_nothing_about_its_data_reads_them(monkeypatch):
    monkeypatch.setitem(CRITERIA, "by-column", lambda model, data: {"0.weight": data[0].abs().mean(0).expand(8, 6)})
    model, data = make(mlp)
    score("by-column", model, data, prunable=lambda model: {"0.weight": model[0].weight})
    assert torch.equal(weights.seen(model).examples, torch.unique(batches.example_hashes(data)))


def test_a_users_function_is_a_criterion():
    model, data = make(mlp)
    options = []

    def times_seed(model, data, *, seed, prunable):
        options.append((seed, prunable))
        return {name: w * seed for name, w in prunable(model).items()}

    scores = score(times_seed, model, data, seed=3, prunable=first_two)
    assert options == [(3, first_two)]
    assert all(torch.equal(scores[name], 3 * w) for name, w in first_two(model).items())
    assert not any(s.requires_grad for s in scores.values())
    assert torch.equal(weights.seen(model).examples, torch.unique(batches.example_hashes(data)))
    everything = score(lambda model, data, **options: options["prunable"](model), model, data)
    assert list(everything) == list(weights.prunable(model))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"0.weight": torch.ones(8, 6)}, r"returned 0\.weight, but the prunable weights are 0\.weight, 2\.weight; ret"),
        (torch.ones(3), r"criterion returned Tensor, but the prunable weights are"),
        ({}, r"returned nothing, but"),
        (
            {"0.weight": torch.ones(8), "2.weight": torch.ones(3, 8)},
            r"scores 0\.weight by \(8,\), but .* shape \(8, 6\)",
        ),
        ({"0.weight": 1.0, "2.weight": torch.ones(3, 8)}, r"scores 0\.weight by float, but"),
        (
            {"0.weight": torch.ones(8, 6), "2.weight": torch.full((3, 8), torch.nan)},
            r"24 of the 24 weights of 2\.weight",
        ),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores, message):
    model, data = make(mlp)

    def criterion(model, data):
        return scores

    with pytest.raises(ValueError, match=message):
        score(criterion, model, data)
