"""Feather and pft's recipe "thresholded": what they share, what offsets and noise add, and what is refused."""

import copy
import dataclasses
import itertools
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.masking import weights

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=6, lr=0.1, batch_size=32, schedule="cosine")


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def thresholded(model: nn.Module, config: pp.Config = CONFIG, **options: Any) -> pp.Pruned:
    return pp.pft(model, (X, Y), config, **{"sparsity": 0.85, **options})


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())


@pytest.mark.parametrize("theta", [0.5, 0.0])
def test_without_offsets_the_recipe_is_feather_to_the_bit(theta: float) -> None:
    feather = pp.feather(net(), (X, Y), CONFIG, sparsity=0.85, theta=theta)
    for gate_lr in (None, 0.0):
        same = thresholded(net(), dataclasses.replace(CONFIG, gate_lr=gate_lr), theta=theta, limit=None)
        assert equal(same.model, feather.model)
        assert same.history == feather.history
    assert not equal(thresholded(net(), theta=theta, limit=None).model, feather.model)
    assert not equal(pp.feather(net(), (X, Y), CONFIG, sparsity=0.85, theta=1.0).model, feather.model)


@pytest.mark.parametrize("verb", [pp.feather, thresholded])
def test_the_mask_is_open_to_the_end_and_the_sparsity_rises_in_the_first_half(verb: Any) -> None:
    model, masks = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if row.get("epoch", 0) * 4 == step:  # masks are noted at the end of an epoch
            masks.append((step / steps, torch.cat([keep.reshape(-1) for _, keep in weights.masked(model)]).clone()))

    config = pp.Config(epochs=20, lr=0.2, batch_size=30)
    options = {"sparsity": 0.8, "progress": progress}
    result = pp.feather(model, (X, Y), config, **options) if verb is pp.feather else verb(model, config, **options)
    counts = [int(mask.sum()) for share, mask in masks if share > 0.55]
    assert all(abs(count - 36) <= 1 for count in counts)
    late = [mask for share, mask in masks if share > 0.6]
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(late))
    assert {row["stage"] for row in result.history} == {"masks"}
    assert result.history[-1]["sparsity"] == pytest.approx(0.8)


def test_the_network_that_is_left_is_the_one_that_was_trained() -> None:
    """With a learning rate of 0 at the end, the last step computes with the very weights that are left."""
    losses: list[float] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        losses.append(float((value := nn.functional.cross_entropy(out, y)).detach()))
        return value

    model = net()
    config = dataclasses.replace(CONFIG, epochs=8, batch_size=120, schedule=lambda share: float(share < 0.8))
    thresholded(model, config, loss=loss)
    assert set(model.state_dict()) == set(net().state_dict())
    last = nn.functional.cross_entropy(model.train()(X), Y).item()
    assert last == pytest.approx(losses[-1], rel=1e-4)


def test_members_with_other_rates_noise_and_sparsities_equal_their_single_runs() -> None:
    options: dict[str, list[Any]] = {"sparsity": [0.5, 0.8, 0.9], "noise": [0.0, 0.3, 1.0], "seed": [0, 0, 7]}
    configs = [dataclasses.replace(CONFIG, gate_lr=rate, lr=lr) for rate, lr in ((0.0, 0.1), (1.0, 0.05), (10.0, 0.1))]
    models = [net(k) for k in range(3)]
    results = pp.together(pp.pft, models, (X, Y), configs, **options)
    for k, result in enumerate(results):
        alone = thresholded(net(k), configs[k], **{name: values[k] for name, values in options.items()})
        assert [row["loss"] for row in result.history] == pytest.approx([r["loss"] for r in alone.history], rel=1e-3)
        assert result.sparsity == alone.sparsity
        for name, tensor in alone.model.state_dict().items():
            # Next to the threshold a weight rises with the cube root of what rounding leaves.
            torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=1e-2, atol=2e-2)


def test_another_criterion_begins_as_an_offset_that_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = dataclasses.replace(CONFIG, gate_lr=None)
    model, gates = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        gates.extend(
            max(float(p.detach().abs().max()) for p in learned.values())
            for learned in [weights.learned(model)]
            if learned
        )

    thresholded(model, frozen, criterion="random", progress=progress)
    assert gates[0] > 1 > 1e-4 > gates[-1]
    assert not equal(model, thresholded(net(), frozen).model)


def test_a_shorter_mask_stage_leaves_the_rest_to_fine_tuning() -> None:
    result = thresholded(net(), mask_share=0.5)
    assert [row["stage"] for row in result.history] == ["masks"] * 6
    assert result.sparsity == pytest.approx(0.85)


@pytest.mark.parametrize("epochs", [0, 1])
def test_any_number_of_epochs_leaves_exactly_k(epochs: int) -> None:
    result = thresholded(net(), dataclasses.replace(CONFIG, epochs=epochs))
    assert len(result.history) == epochs
    assert result.sparsity == pytest.approx(0.85)


def test_killed_and_resumed_it_ends_the_same(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if step == 13:
            raise Killed

    whole = thresholded(net(), noise=0.5)
    with pytest.raises(Killed):
        thresholded(net(), noise=0.5, folder=tmp_path, progress=kill)
    resumed = thresholded(net(), noise=0.5, folder=tmp_path)
    assert equal(resumed.model, whole.model)
    assert resumed.history == whole.history


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 1.5}, r"theta is 1\.5; it is the share of its gradient that a weight gets, in \[0, 1\]"),
        (
            {"recipe": "paper", "pattern": "2:4", "sparsity": None},
            "the pattern 2:4 is learned by the recipes thresholded",
        ),
        ({"recipe": "coupled", "noise": 0.5}, "noise is 0.5, a size that only the recipe 'thresholded' has"),
        ({"config": dataclasses.replace(CONFIG, samples=3)}, "samples is 3, but the masks of the recipe 'thresholded'"),
        ({"noise": -1.0}, "noise is -1.0 with the control 'threshold'"),
    ],
)
def test_what_the_recipe_has_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thresholded(net(), **options)


def test_feather_beats_gradual_pruning_on_a_very_sparse_convolution() -> None:
    split = pp.data.digits(seed=0)

    def conv(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            body = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)
            head = nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
            return nn.Sequential(*body, *head)

    options = {"lr": 0.1, "schedule": "cosine", "batch_size": 64, "weight_decay": 5e-4, "clip": 1.0}
    config, dense = pp.Config(epochs=16, **options), pp.Config(epochs=12, **{**options, "lr": 0.05})
    errors, trained = {}, [conv(k) for k in range(3)]
    pp.fit(trained, split.train, dense, seed=[0, 1, 2])
    for verb in (pp.gmp, pp.feather):
        models = copy.deepcopy(trained)
        results = pp.together(verb, models, split.train, config, sparsity=0.985, seed=[0, 1, 2])
        errors[verb] = mean(float(pp.error(result.model, split.test)) for result in results)
    assert errors[pp.feather] < errors[pp.gmp] - 0.01, errors
