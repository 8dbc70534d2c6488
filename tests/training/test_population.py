"""A population: every member equals its single run, in every state of a model, and is as usable afterwards."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pacprune as pp
from pacprune.certification import drawn_networks
from pacprune.masking import attachment, weights
from pacprune.training.population import Population, per_member, plain_attention

G = torch.Generator().manual_seed(1)
X = torch.randn(96, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
IMAGES = torch.randn(96, 2, 12, 12, generator=G)
MARKS = (IMAGES[:, 0].mean((1, 2)) > 0).long() + (IMAGES[:, 1, 0, 0] > 0).long()
TOKENS = torch.randint(0, 7, (96, 5), generator=G)
NEXT = TOKENS.roll(-1, 1)
CONFIG = pp.Config(epochs=5, lr=0.05, batch_size=20)  # 96 examples: 5 steps an epoch, the last of 16


class Residual(nn.Module):
    """A small convolutional net with BatchNorm, stride 2 and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8))
        self.right = nn.Conv2d(4, 8, 1, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.left(x) + self.right(x)).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class Tied(nn.Module):
    """A recurrent network over tokens whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(7, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class TiedPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)).cumsum(1))


class Branching(nn.Module):
    """BatchNorm, then a branch on the numbers themselves, which vmap refuses when BatchNorm has already counted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.norm(x))
        return out if out.abs().max() > 0 else x[:, :3]


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x)


def tokenwise(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


FLAT, PICTURES, TEXT = ((X, Y), F.cross_entropy), ((IMAGES, MARKS), F.cross_entropy), ((TOKENS, NEXT), tokenwise)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)), FLAT),
    "residual": (Residual, PICTURES),
    "lenet5": (lambda: pp.models.lenet5(channels=2, size=12, classes=3), PICTURES),
    "transformer": (Encoder, TEXT),
    "lstm": (Tied, TEXT),
    "tied": (TiedPlain, TEXT),
}
STATES = ("dense", "masked", "budget", "clamp", "straight-through", "std", "train_std")


def build(make: Callable[[], nn.Module], k: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        model = make()
        with torch.no_grad():  # so that networks with a fixed seed differ too
            for p in model.parameters():
                p.add_(0.02 * torch.randn(p.shape))
    return model


def prepare(make: Callable[[], nn.Module], state: str, k: int) -> nn.Module:
    """Member k, with its own weights, mask, sparsity, std and seed of the draws."""
    model = build(make, k)
    sparsity = 0.3 + 0.2 * k
    if state == "masked":
        pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity))
    elif state != "dense":
        options: dict[str, Any] = {
            "budget": {"coupling": 2.0},
            "clamp": {"mapping": "clamp"},
            "straight-through": {"estimator": "straight-through"},
            "train_std": {"train_std": True},
        }.get(state, {})
        std = 0.02 * (k + 1) if state in ("std", "train_std") else 0.0
        pp.attach(model, pp.isotropic(model, sparsity=sparsity, std=std), seed=k, **options)
    return model


def budgets(state: str, count: int = 3) -> list[pp.Budget] | None:
    if state != "budget":
        return None
    return [pp.Budget(0.3 + 0.2 * k, schedule="cubic", sharpen=1.0 + k) for k in range(count)]


def assert_alike(actual: nn.Module, expected: nn.Module, most: float = 1e-5, floor: float = 0.0) -> None:
    """Every parameter and buffer, even outside the state dict, is within `most` of its norm."""
    expected_tensors = dict((*expected.named_parameters(), *expected.named_buffers()))
    actual_tensors = dict((*actual.named_parameters(), *actual.named_buffers()))
    assert list(actual_tensors) == list(expected_tensors)
    for name, value in expected_tensors.items():
        assert actual_tensors[name].shape == value.shape
        distance = float((actual_tensors[name] - value).detach().double().norm())
        # Shift and multiplier are on the scale of logits; one is solved for, the other a difference of close numbers.
        size = (
            1.0 + 10 * abs(float(value))
            if name.endswith((".shift", ".multiplier"))
            else float(value.detach().double().norm())
        )
        assert distance <= most * size + floor, (name, distance, size)


def fit_both_ways(
    models: Sequence[nn.Module], data: Any, configs: pp.Config | list[pp.Config], *, seed: Any = 0, **options: Any
) -> tuple[list[nn.Module], list[list[dict]]]:
    """Trains the models as a population and copies of them one by one; returns the copies and their histories."""
    count = len(models)
    plans = per_member("budget", options.pop("budget", None), count)
    alone = [copy.deepcopy(model) for model in models]
    rows = pp.fit(models, data, configs, seed=seed, budget=None if plans[0] is None else plans, **options)
    seeds, member_configs = per_member("seed", seed, count), per_member("config", configs, count)
    histories = [
        pp.fit(model, data, member_configs[k], seed=seeds[k], budget=plans[k], **options)
        for k, model in enumerate(alone)
    ]
    for k, history in enumerate(histories):
        member_rows = [row for row in rows if row["member"] == k]
        assert [set(row) - {"member"} for row in member_rows] == [set(row) for row in history]
        for actual, expected in zip(member_rows, history, strict=True):
            assert actual["stage"] == expected["stage"]
            for key in set(expected) - {"stage"}:
                assert actual[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    return alone, histories


# --- Every member equals its single run.


@pytest.fixture(scope="module")
def epochs(at_full_size: bool) -> int:
    """Of 5 steps each."""
    return 10 if at_full_size else 4


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", NETS)
def test_a_member_equals_its_single_run(name: str, state: str, epochs: int) -> None:
    make, (data, loss) = NETS[name]
    models = [prepare(make, state, k) for k in range(3)]
    config = pp.Config(epochs=epochs, lr=0.02, gate_lr=0.02 if state == "clamp" else 0.5, batch_size=20)
    alone, _ = fit_both_ways(models, data, config, seed=[4, 4, 9], loss=loss, budget=budgets(state))
    ties = 1 if name == "lenet5" else 0
    for k, (model, expected) in enumerate(zip(models, alone, strict=True)):
        # At a tie, rounding decides a maximum or a ReLU: one member may meet a tie, and then diverges a little.
        try:
            assert_alike(model, expected)
        except AssertionError:
            ties -= 1
            assert ties >= 0
            assert_alike(model, expected, 1e-2)
        if state == "masked":
            for key, weight in weights.prunable(model).items():
                assert torch.equal(weight == 0, ~weights.notes(model).mask[key])
            assert weights.sparsity(model) == pytest.approx(0.3 + 0.2 * k, abs=0.02)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs if a.numel() > 1)


@pytest.mark.parametrize("state", ["dense", "masked"])
@pytest.mark.parametrize("name", ["mlp", "residual", "lenet5"])
def test_a_member_in_float64_equals_its_single_run_to_a_billionth(name: str, state: str, epochs: int) -> None:
    make, ((x, y), _) = NETS[name]
    models = [prepare(make, state, k).double() for k in range(3)]
    alone, _ = fit_both_ways(models, (x.double(), y), pp.Config(epochs=epochs, lr=0.02, batch_size=20), seed=[4, 4, 9])
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected, 1e-9)


SETTINGS: dict[str, dict[str, list[Any] | Any]] = {
    "rates": {"lr": [0.1, 0.01, 0.0], "gate_lr": [0.5, 0.0, 2.0], "momentum": [0.9, 0.0, 0.5]},
    "decay": {"weight_decay": [0.0, 0.01, 0.1], "momentum": 0.9},
    "schedules": {"schedule": ["cosine", "step", "constant"], "warmup": [0.0, 0.3, 0.5], "lr": 0.05},
    "spans": {"schedule": "cosine", "span": [(0.0, 0.5), (0.5, 1.0), (0.2, 0.9)]},
    "accumulate": {"accumulate": 2, "batch_size": 21},
    "clip": {"clip": 0.05},
    "clip and rates": {"clip": 0.05, "lr": [0.1, 0.01, 0.05]},
    "adam": {"optimizer": "adam", "lr": 0.003, "gate_lr": 0.03},
    "adamw": {"optimizer": "adamw", "lr": [0.003, 0.001, 0.01], "gate_lr": 0.03, "weight_decay": [0.1, 0.0, 0.2]},
    "frozen gates": {"gate_lr": None},
    "frozen weights": {"lr": 0.0, "gate_lr": 1.0},
    "std": {"std_lr": [0.0, 0.1, 0.5]},
}


@pytest.mark.parametrize("state", ["dense", "budget", "train_std"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_members_may_differ_in_their_settings(setting: str, state: str) -> None:
    settings = {"epochs": 3, "batch_size": 20, "gate_lr": 0.5, "lr": 0.05, **SETTINGS[setting]}
    configs = [pp.Config(**{n: v[k] if isinstance(v, list) else v for n, v in settings.items()}) for k in range(3)]
    models = [prepare(NETS["mlp"][0], state, k) for k in range(3)]
    alone, _ = fit_both_ways(models, (X, Y), configs, seed=[0, 1, 2], budget=budgets(state))
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)


@pytest.mark.parametrize("seed", [3, [3, 4, 5]])
def test_different_seeds_give_different_batches_and_equal_seeds_share_one(
    seed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, plain = [], Population.losses

    def losses(self: Population, loss: Any, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        shapes.append((tuple(x.shape), tuple(y.shape)))
        return plain(self, loss, x, y, **options)

    monkeypatch.setattr(Population, "losses", losses)
    models = [prepare(NETS["residual"][0], "dense", k) for k in range(3)]
    config = pp.Config(epochs=2, lr=0.02, batch_size=19, augment=True)  # 96 = 4 x 19 + 20: the last one joins
    alone, _ = fit_both_ways(models, (IMAGES, MARKS), config, seed=seed)
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)
    leading = () if seed == 3 else (3,)
    assert shapes == [((*leading, n, 2, 12, 12), (*leading, n)) for n in (19, 19, 19, 19, 20)] * 2


@pytest.mark.parametrize("control", ["projection", "lagrangian", "none"])
@pytest.mark.parametrize("mapping", ["sigmoid", "clamp"])
def test_members_under_every_control_equal_their_single_runs(control: str, mapping: str) -> None:
    models = [build(NETS["mlp"][0], k) for k in range(3)]
    for k, model in enumerate(models):
        pp.attach(model, pp.isotropic(model, sparsity=0.5), mapping=mapping, seed=k)
    plans = [pp.Budget(0.4 + 0.1 * k, control=control, strength=5.0 + k) for k in range(3)]
    config = pp.Config(epochs=4, lr=0.05, gate_lr=0.02 if mapping == "clamp" else 0.5, batch_size=20)
    alone, _ = fit_both_ways(models, (X, Y), config, budget=plans, seed=[0, 1, 2])
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)


@pytest.mark.parametrize(
    "make",
    [
        Branching,
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)),
        Scaled,
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double(),
    ],
    ids=["branches on its numbers", "cumulative BatchNorm", "0-dimensional", "no statistics", "LayerNorm", "float64"],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_unusual_networks_equal_their_single_runs(make: Callable[[], nn.Module], clip: float | None) -> None:
    models = [build(make, k) for k in range(2)]
    x = X.to(next(models[0].parameters()).dtype)
    alone, _ = fit_both_ways(models, (x, Y), pp.Config(epochs=2, lr=0.05, batch_size=20, clip=clip), seed=[0, 1])
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)


@pytest.mark.parametrize("name", ["mlp", "residual", "transformer"])
def test_a_population_in_bfloat16_is_close_to_its_single_runs(name: str) -> None:
    make, (data, loss) = NETS[name]
    models = [prepare(make, "budget", k) for k in range(2)]
    config = pp.Config(epochs=1, lr=0.02, gate_lr=0.5, batch_size=20, amp=True)
    alone = copy.deepcopy(models)
    pp.fit(models, data, config, loss=loss, budget=budgets("budget", 2), seed=[0, 1])
    for k, model in enumerate(alone):
        pp.fit(
            model, data, config, loss=loss, budget=pp.Budget(0.3 + 0.2 * k, schedule="cubic", sharpen=1.0 + k), seed=k
        )
        for p, q in zip(models[k].parameters(), model.parameters(), strict=True):
            assert (p - q).norm() <= 0.02 * (1 + q.norm())  # with 8 bits, the order of a sum matters


def test_masks_of_members_may_cover_different_tensors() -> None:
    models = [build(NETS["mlp"][0], k) for k in range(3)]
    first = pp.top_k(pp.scores.magnitude(models[0]), sparsity=0.5)
    pp.apply_mask(models[0], first)
    pp.apply_mask(models[1], {"0.weight": first["0.weight"]})
    alone, _ = fit_both_ways(models, (X, Y), CONFIG)
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)
    assert [float((m[0].weight == 0).float().mean()) > 0.3 for m in models] == [True, True, False]


def test_frozen_parameters_stay_and_every_member_has_its_validation_loss() -> None:
    models = [build(NETS["mlp"][0], k) for k in range(2)]
    for model in models:
        model[0].weight.requires_grad_(False)
    before = [model[0].weight.clone() for model in models]
    alone, histories = fit_both_ways(models, (X[:64], Y[:64]), CONFIG, validation=(X[64:], Y[64:]))
    for k in range(2):
        assert torch.equal(models[k][0].weight, before[k])
        assert_alike(models[k], alone[k])
    assert histories[0][-1]["validation_loss"] != histories[1][-1]["validation_loss"]
    assert len(weights.seen(models[1]).examples) == 96


def test_a_population_of_one_model_and_a_population_with_dropout() -> None:
    models = [build(NETS["mlp"][0], 0)]
    alone, _ = fit_both_ways(models, (X, Y), CONFIG)
    assert_alike(models[0], alone[0])
    random = [nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)) for _ in range(2)]
    random[1].load_state_dict(random[0].state_dict())
    state = torch.get_rng_state()
    history = pp.fit(random, (X, Y), CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(random[0][0].weight, random[1][0].weight)  # each member has its own dropout
    assert history[-1]["loss"] < history[0]["loss"]


# --- Afterwards.


@pytest.mark.parametrize("state", ["dense", "masked", "budget", "train_std"])
@pytest.mark.parametrize("name", ["mlp", "lstm", "tied"])
def test_members_are_as_usable_as_before(name: str, state: str) -> None:
    make, (data, loss) = NETS[name]
    models = [prepare(make, state, k) for k in range(2)]
    keys, parameters = list(models[1].state_dict()), list(models[1].parameters())
    pp.fit(models, data, CONFIG, loss=loss, budget=budgets(state, 2), seed=[0, 1])
    for k, model in enumerate(models):
        assert list(model.state_dict()) == keys
        assert all(p.grad is None and p.requires_grad and p.is_leaf for p in model.parameters())
        assert not any(module.training for module in model.modules())
        again = copy.deepcopy(model)
        assert torch.equal(again(data[0]), model(data[0]))
        if name != "mlp" and state in ("dense", "masked"):
            assert model.head.weight is model.embed.weight
        if attachment.sites(model):
            assert pp.read(model).sparsity == pytest.approx(0.3 + 0.2 * k, abs=1e-6 if state == "budget" else 1.0)
            again = pp.harden(again)
        pp.fit(again, data, CONFIG, loss=loss)
        pp.fit(model, data, CONFIG, loss=loss)
        assert list(again.state_dict()) == list(build(make, 0).state_dict())
        if name != "mlp":
            assert again.head.weight is again.embed.weight
    # A user's optimiser may hold these parameters.
    assert all(a is b for a, b in zip(models[1].parameters(), parameters, strict=True))


def test_members_change_only_when_they_are_written_back() -> None:
    models = [build(NETS["mlp"][0], k) for k in range(2)]
    population = Population(models)
    assert len(population) == 2
    before = [m[0].weight.clone() for m in models]
    with torch.no_grad():
        population.stacked[0].weight.add_(1)
    assert all(torch.equal(m[0].weight, b) for m, b in zip(models, before, strict=True))
    population.write_back()
    assert all(torch.equal(m[0].weight, b + 1) for m, b in zip(models, before, strict=True))
    population.stacked.eval()
    out = population.outputs(X, separate=False)
    torch.testing.assert_close(out, torch.stack([m(X) for m in models]))
    torch.testing.assert_close(population.outputs(torch.stack([X, X.flip(0)]), separate=True)[1], models[1](X.flip(0)))


# --- What vmap cannot do.


class Broken(nn.Linear):
    """Fails in its first call, by an error that has nothing to do with vmap."""

    calls = 0

    def __init__(self, failure: Exception) -> None:
        super().__init__(6, 3)
        self._failure = failure

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            raise self._failure
        return super().forward(input)


def test_a_lack_of_memory_is_not_answered_by_a_loop() -> None:
    failure = torch.OutOfMemoryError("no memory left")
    model = Broken(failure)
    slab = pp.isotropic(model, sparsity=0.5)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        drawn_networks.outputs(model, slab, X[:20].reshape(2, 10, 6), seed=0, steps=torch.arange(2))
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        Population([Broken(failure), Broken(failure)]).outputs(X, separate=False)


@pytest.mark.parametrize("form", ["plain", "causal", "chosen", "added", "grouped"])
def test_plain_attention_is_torchs(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 8, generator=generator, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "chosen": {"attn_mask": torch.eye(5, dtype=torch.bool).logical_not()},
        "added": {"attn_mask": torch.randn(5, 5, generator=generator), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[form]
    if form == "grouped":
        key, value = key[:, :2], value[:, :2]
    outputs = [f(query, key, value, **options) for f in (plain_attention, nn.functional.scaled_dot_product_attention)]
    torch.testing.assert_close(*outputs)
    slopes = [torch.autograd.grad(out.square().sum(), query, retain_graph=True)[0] for out in outputs]
    torch.testing.assert_close(*slopes)


def test_members_whose_masks_a_budget_moves_have_masks_of_the_same_tensors() -> None:
    models = [pp.models.mlp(6, 3, hidden=[5], seed=k) for k in range(2)]
    names = list(pp.prunable(models[0]))
    for model, chosen in zip(models, (names, names[:1]), strict=True):
        pp.apply_mask(model, {name: torch.ones_like(model.get_parameter(name), dtype=torch.bool) for name in chosen})
    budget = pp.Budget(0.5, control="magnitude")
    with pytest.raises(
        ValueError, match="whose members have masks of different tensors; train one population for each"
    ):
        pp.fit(models, (X, Y), pp.Config(epochs=1), budget=budget)
