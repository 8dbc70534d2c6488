"""The training loop: groups, schedules, accumulation, early stop, budgets, determinism, and zeros that stay zero."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune.masking import attachment, weights
from pacprune.training import loop
from pacprune.training.budget import GATE_CONTROLS
from pacprune.training.optim import OPTIMIZERS
from pacprune.types import History

Pair = tuple[torch.Tensor, torch.Tensor]


def net(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def attached(std: float = 0.0, seed: int = 0, **options) -> nn.Module:
    model = net(seed=seed)
    return pp.attach(model, pp.isotropic(model, sparsity=0.5, std=std), **options)


@pytest.fixture
def pair() -> Pair:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(70, 4, generator=g)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# --- Parameter groups.


def test_gates_have_a_separate_group_without_weight_decay() -> None:
    config = pp.Config(lr=0.1, gate_lr=3.0, std_lr=0.01, weight_decay=0.5)
    groups = loop.groups(attached(std=0.1, train_std=True), [config], rest=True)
    assert [(g.base, g.weight_decay, g.scheduled) for g in groups] == [
        ([0.1], [0.5], True),
        ([3.0], [0.0], False),
        ([0.01], [0.0], True),
    ]
    following = pp.Config(lr=0.1, gate_lr=3.0, gates_scheduled=True)
    assert all(g.scheduled for g in loop.groups(attached(), [following], rest=True))
    assert [len(g.params) for g in groups] == [4, 2, 2]  # two means and two biases, gates, log stds
    assert len(loop.groups(attached(), [config], rest=False)[0].params) == 2
    assert len(loop.groups(net(), [config], rest=True)) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_does_not_change_gates(optimizer: str, pair: Pair) -> None:
    config = pp.Config(epochs=2, lr=0.01, gate_lr=1.0, weight_decay=0.9, optimizer=optimizer)
    model = attached()
    before = state(model)
    pp.fit(model, pair, config, loss=lambda out, y: 0.0 * out.sum())  # no gradient, only decay
    for site in attachment.sites(model):
        assert torch.equal(site.gate, before[f"{site.name[0]}.parametrizations.weight.original1"])
        assert not torch.equal(site.mean, before[f"{site.name[0]}.parametrizations.weight.original0"])


def test_gate_lr_none_freezes_gates_and_lr_zero_everything_else(pair: Pair) -> None:
    for options, moved in (({"gate_lr": None}, "0"), ({"lr": 0.0, "gate_lr": 1.0}, "1")):
        model = attached()
        before = state(model)
        pp.fit(model, pair, pp.Config(epochs=2, **options))
        changed = {n for n, t in model.state_dict().items() if not (n.endswith(".step") or torch.equal(t, before[n]))}
        expected = {f"{i}.parametrizations.weight.original{moved}" for i in (0, 3)}
        assert changed == expected | ({"0.bias", "3.bias"} if moved == "0" else set())
        assert all(p.requires_grad for p in model.parameters())


def test_learning_rates_of_zero_are_refused_on_stochastic_masks(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"lr is 0\.0 and gate_lr is 0\.0, .* give gate_lr="):
        pp.fit(attached(), pair, pp.Config(epochs=1, lr=0.0))


def test_a_parameter_that_the_user_froze_stays_frozen(pair: Pair) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    before = state(model)
    pp.fit(model, pair, pp.Config(epochs=1, lr=0.1, weight_decay=0.1))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[3].weight, before["3.weight"])
    assert not model[0].weight.requires_grad


# --- Steps.


def test_accumulation_equals_the_full_batch(pair: Pair) -> None:
    full, accumulated = net(), net()
    pp.fit(full, pair, pp.Config(epochs=3, lr=0.1, batch_size=32))
    rows = pp.fit(
        accumulated, pair, pp.Config(epochs=3, lr=0.1, batch_size=32, accumulate=5)
    )  # the last batch has 6 examples
    for p, q in zip(full.parameters(), accumulated.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert rows[-1]["loss"] == pytest.approx(
        pp.fit(net(), pair, pp.Config(epochs=3, lr=0.1, batch_size=32))[-1]["loss"]
    )


@pytest.mark.parametrize(("options", "draws"), [({}, 3), ({"accumulate": 2}, 6), ({"accumulate": 2, "samples": 4}, 24)])
def test_every_micro_batch_takes_a_new_draw(options: dict, draws: int, pair: Pair) -> None:
    model = attached()
    pp.fit(model, pair, pp.Config(epochs=1, batch_size=32, **options))
    assert [int(site.sampler.step) for site in attachment.sites(model)] == [draws, draws]


@pytest.mark.parametrize("make", [net, attached], ids=["dense", "attached"])
def test_amp_runs_and_learns(make, pair: Pair) -> None:
    dtypes = []
    model = make()
    model.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    rows = pp.fit(model, pair, pp.Config(epochs=6, lr=0.1, gate_lr=1.0, batch_size=16, amp=True))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert torch.bfloat16 in dtypes
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [net, attached], ids=["dense", "attached"])
def test_every_optimizer_learns(optimizer: str, make, pair: Pair) -> None:
    lr = 0.1 if optimizer == "sgd" else 0.01
    rows = pp.fit(make(), pair, pp.Config(epochs=10, lr=lr, gate_lr=lr, batch_size=16, optimizer=optimizer))
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


def test_a_last_batch_of_one_joins_the_one_before(pair: Pair) -> None:
    x, y = pair[0][:65], pair[1][:65]
    sizes, steps = [], []
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if module.training else None)
    for options in ({}, {"accumulate": 31}):  # micro-batches of two; 33 examples end in one of three
        pp.fit(
            model, (x, y), pp.Config(epochs=1, batch_size=32, **options), progress=lambda *call: steps.append(call[1:3])
        )
    assert sizes == [32, 33] + [2] * 16 + [2] * 15 + [3]
    assert steps == [(1, 2), (2, 2), (2, 2)] * 2
    with pytest.raises(ValueError, match=r"a batch holds 1 example, .* drop_last=True"):
        pp.fit(model, DataLoader(TensorDataset(x, y), 32), pp.Config(epochs=1))


def test_augmentation_needs_images(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"augment=True needs images .* x is \(70, 4\)"):
        pp.fit(net(), pair, pp.Config(epochs=1, augment=True))


def test_clip_bounds_the_step(pair: Pair) -> None:
    model = net()
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    pp.fit(model, pair, pp.Config(epochs=1, lr=1.0, momentum=0.0, batch_size=70, clip=1e-3))
    moved = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def _move(count: int, pair: Pair, budget: pp.Budget | None, clip: float | None) -> list[torch.Tensor]:
    """How far one step moves all weights of masked networks; of several as a population."""
    models = [net() for _ in range(count)]
    for model in models:
        pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.8 if budget is None else 0.0))
    before = [torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]) for model in models]
    config = pp.Config(epochs=1, lr=1.0, momentum=0.0, batch_size=70, clip=clip)
    at_the_step = []
    measure = (lambda *call: at_the_step.append(copy.deepcopy(models))) if count == 1 else None
    pp.fit(models[0] if count == 1 else models, pair, config, budget=budget, progress=measure)
    models = at_the_step[0] if at_the_step else models  # before the end, which prunes
    after = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]
    return [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_clip_counts_the_gradients_of_kept_weights_alone(pair: Pair, count: int) -> None:
    for free, clipped in zip(_move(count, pair, None, None), _move(count, pair, None, 1e-3), strict=True):
        assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-3)  # not less, as pruned weights would make it
        torch.testing.assert_close(clipped, free * (1e-3 / free.norm()), rtol=1e-2, atol=1e-7)
    # A bound between the norm of what is trained and the norm of everything leaves the step as it is.
    free = _move(1, pair, None, None)[0]
    assert torch.equal(_move(1, pair, None, float(free.norm()) * 1.01)[0], free)


def test_with_feedback_clip_counts_pruned_weights_too(pair: Pair) -> None:
    budget = pp.Budget(0.8, control="feedback")
    assert float(_move(1, pair, budget, 1e-3)[0].norm()) == pytest.approx(1e-3, rel=1e-3)
    free = _move(1, pair, budget, None)[0]
    assert (free != 0).float().mean() > 0.3  # a fifth is kept


def test_augmentation_follows_from_the_seed() -> None:
    g = torch.Generator().manual_seed(0)
    pair = torch.randn(20, 1, 8, 8, generator=g), torch.randint(0, 3, (20,), generator=g)

    def run(augment: bool) -> float:
        model = pp.models.mlp(64, 3, hidden=(8,))
        return pp.fit(model, pair, pp.Config(epochs=2, augment=augment))[-1]["loss"]

    assert run(True) == run(True) != run(False)


# --- Rows and progress.


def test_a_run_returns_a_row_per_epoch_and_calls_progress_per_step(pair: Pair) -> None:
    calls = []
    rows = pp.fit(
        net(),
        pair,
        pp.Config(epochs=2, lr=0.1, batch_size=32),
        stage="dense",
        validation=pair,
        progress=lambda *call: calls.append(call),
    )
    assert [sorted(row) for row in rows] == [["epoch", "loss", "lr", "stage", "validation_loss"]] * 2
    assert [(row["stage"], row["epoch"], row["lr"]) for row in rows] == [("dense", 1, 0.1), ("dense", 2, 0.1)]
    assert [call[:3] for call in calls] == [("dense", steps, 6) for steps in (1, 2, 3, 3, 4, 5, 6, 6)]
    assert [call[3] for call in calls] == [{}] * 3 + [rows[0]] * 4 + [rows[1]]


def test_the_loss_of_an_epoch_is_the_mean_over_the_examples_it_saw(pair: Pair) -> None:
    no_lr = pp.Config(epochs=1, lr=0.0, batch_size=32)  # the last batch has 6 examples
    model = net()
    everything = F.cross_entropy(model(pair[0]), pair[1]).item()
    first = F.cross_entropy(model(pair[0][:60]), pair[1][:60]).item()
    assert pp.fit(net(), pair, no_lr)[0]["loss"] == pytest.approx(everything, rel=1e-5)
    loader = DataLoader(TensorDataset(*pair), 60, drop_last=True)
    assert pp.fit(net(), loader, pp.Config(epochs=1, lr=0.0))[0]["loss"] == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("control", GATE_CONTROLS)
def test_expected_sparsity_is_in_every_row_and_meets_the_budget(control: str, pair: Pair) -> None:
    trains_std = control == "variational"
    model = attached(std=0.1, train_std=True) if trains_std else attached()
    budget = pp.Budget(0.8, control=control)
    rows = pp.fit(model, pair, pp.Config(epochs=20, lr=0.05, gate_lr=5.0, batch_size=16), budget=budget)
    assert rows[-1]["expected_sparsity"] == pp.read(model).sparsity
    sparsities = [row["expected_sparsity"] for row in rows]
    if control in ("shift", "projection"):  # exact after every epoch, although the last step moved the gates
        assert sparsities == pytest.approx([0.8] * 20, abs=1e-6)
    else:
        assert (
            sparsities[-1] == pytest.approx(0.8, abs=0.05)
            if control == "lagrangian"
            else sparsities[-1] != pytest.approx(0.8)
        )


def test_a_cubic_budget_falls_from_dense_and_sharpens(pair: Pair) -> None:
    model, budget = attached(), pp.Budget(0.8, schedule="cubic", sharpen=3.0)
    rows = pp.fit(model, pair, pp.Config(epochs=5, lr=0.05, batch_size=16), budget=budget)
    expected = [1 - budget.density((epoch + 1) / 5) for epoch in range(5)]
    assert [row["expected_sparsity"] for row in rows] == pytest.approx(expected, abs=1e-6)
    assert float(attachment.sites(model)[0].sampler.sharpness) == pytest.approx(3.0)


# --- Early stop.


def test_patience_stops_and_goes_back_to_the_best_epoch(pair: Pair) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.0, 0.5])
    states = []

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return F.cross_entropy(out, y)
        states.append(state(model))
        return torch.tensor(next(losses))

    model = net()
    config = pp.Config(epochs=9, lr=0.1, patience=2)
    rows = pp.fit(model, pair, config, loss=loss, validation=pair)
    assert [row["validation_loss"] for row in rows] == [3.0, 1.0, 2.0, 2.0]
    assert all(torch.equal(t, states[1][n]) for n, t in model.state_dict().items())


def test_patience_without_validation_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="patience is 2 but there is no validation data"):
        pp.fit(net(), pair, pp.Config(epochs=1, patience=2))


# --- Determinism.


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader", "own generator"])
@pytest.mark.parametrize("kind", ["dropout", "attached"])
def test_a_run_follows_from_its_arguments_and_takes_no_randomness(form: str, kind: str, pair: Pair) -> None:
    pairs, g = TensorDataset(*pair), torch.Generator().manual_seed(4)
    data = {
        "tensors": pair,
        "dataset": pairs,
        "loader": DataLoader(pairs, 16, shuffle=True),
        "own generator": DataLoader(pairs, 16, shuffle=True, generator=g),
    }[form]

    def run(seed: int) -> tuple[nn.Module, History]:
        model = net(dropout=0.5) if kind == "dropout" else attached(std=0.1)
        return model, pp.fit(model, data, pp.Config(epochs=2, lr=0.1, batch_size=16), seed=seed)

    before = torch.get_rng_state()
    (first, rows), (second, again), (other, _) = run(0), run(0), run(1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(g.get_state(), torch.Generator().manual_seed(4).get_state())
    assert same(first, second)
    assert rows == again
    # A loader with a generator keeps its order, and the draws of an attached model follow from the model's seed.
    assert same(first, other) == (form == "own generator" and kind == "attached")
    assert not first.training


def test_tensors_and_a_dataset_give_the_same_run(pair: Pair) -> None:
    from_tensors, from_dataset = net(), net()
    pp.fit(from_tensors, pair, pp.Config(epochs=2, lr=0.1, batch_size=16))
    pp.fit(from_dataset, TensorDataset(*pair), pp.Config(epochs=2, lr=0.1, batch_size=16))
    assert same(from_tensors, from_dataset)


# --- Zeros stay zero.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("start", ["apply_mask", "harden", "deepcopy"])
def test_zeros_stay_exactly_zero(optimizer: str, start: str, pair: Pair) -> None:
    model = net()
    pp.fit(model, pair, pp.Config(epochs=1, lr=0.1))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.75, scope="layer")
    if start == "harden":
        pp.attach(model, pp.block_isotropic(model, mask, eps=1e-2))
        pp.fit(model, pair, pp.Config(epochs=1, lr=0.1))
        pp.harden(model, mask)
    else:
        pp.apply_mask(model, mask)
    if start == "deepcopy":
        model = copy.deepcopy(model)
    config = pp.Config(epochs=3, lr=0.05, momentum=0.9, weight_decay=1e-2, optimizer=optimizer, batch_size=16)
    before = state(model)
    pp.fit(model, pair, config)
    for name, keep in mask.items():
        weight = weights.prunable(model)[name]
        assert torch.equal(weight != 0, keep)
        assert not torch.equal(weight, before[name])
    assert pp.sparsity(model) == 0.75


def test_without_its_mask_a_network_trains_all_weights(pair: Pair) -> None:
    model = net()
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.5))
    pp.apply_mask(model, None)
    pp.fit(model, pair, pp.Config(epochs=1, lr=0.1))
    assert pp.sparsity(model) < 0.1
