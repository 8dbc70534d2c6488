"""Populations as runs: refusals and their messages, histories, resuming, and posteriors of several members."""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_population import CONFIG, NETS, X, Y, assert_alike, budgets, build, fit_both_ways, prepare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune.masking import attachment, weights

SPLIT = pp.data.split(X, Y, prior_fraction=0.5, seed=0)


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def attached_mlp(**options: Any) -> nn.Module:
    model = mlp()
    return pp.attach(model, pp.isotropic(model, sparsity=0.5, std=options.pop("std", 0.0)), **options)


def same_model_twice() -> list[nn.Module]:
    return [mlp()] * 2


def two_models() -> list[nn.Module]:
    return [mlp(), mlp()]


def two_attached() -> list[nn.Module]:
    return [attached_mlp(), attached_mlp()]


# --- Refusals.

ALIKE = "the members of a population must have one architecture, but model 0 has "
APART = "; train them in separate calls"
STEP = "the members of a population take their steps together, but "
SETTINGS = "'in_features=6, out_features={}, bias=True'"
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "width": (
        lambda: [mlp(), mlp(9)],
        {},
        f"{ALIKE}0 of type Linear, settings {SETTINGS.format(8)} where model 1 has 0 of type Linear, "
        f"settings {SETTINGS.format(9)}{APART}",
    ),
    "type": (lambda: [mlp(), mlp().double()], {}, "x is torch.float32 but the model's parameters are torch.float64"),
    "frozen": (
        lambda: [mlp(), nn.Sequential(mlp()[0].requires_grad_(False), nn.ReLU(), mlp()[2])],
        {},
        f"{ALIKE}0.weight of shape (8, 6), torch.float32, on cpu, requires_grad=True where model 1 has 0.weight of "
        f"shape (8, 6), torch.float32, on cpu, requires_grad=False{APART}",
    ),
    "more": (lambda: [mlp(), nn.Sequential(*mlp(), nn.Identity())], {}, f"{APART}"),
    "attached and not": (lambda: [attached_mlp(), mlp()], {}, f"{APART}"),
    "std": (lambda: [attached_mlp(std=0.1), attached_mlp()], {}, f"{APART}"),
    "estimator": (
        lambda: [attached_mlp(), attached_mlp(estimator="straight-through")],
        {},
        f"{ALIKE}0.weight with sigmoid, 0.0, concrete, 0.5 where model 1 has 0.weight with sigmoid, 0.0, "
        f"straight-through, 0.5{APART}",
    ),
    "mapping": (lambda: [attached_mlp(), attached_mlp(mapping="clamp")], {}, f"{APART}"),
    "twice": (same_model_twice, {}, "one model is in the list twice; copy it first"),
    "empty": (list, {}, "a population needs at least one model, but the list is empty"),
    "seeds": (two_models, {"seed": [0, 1, 2]}, "seed has 3 entries for 2 models; give one for each, or one for all"),
    "configs": (
        two_models,
        {"config": [CONFIG]},
        "config has 1 entries for 2 models; give one for each, or one for all",
    ),
    "budgets": (
        two_attached,
        {"budget": [pp.Budget(0.5)] * 3},
        "budget has 3 entries for 2 models; give one for each, or one for all",
    ),
    "controls": (
        two_attached,
        {"budget": [pp.Budget(0.5), pp.Budget(0.5, control="projection")]},
        "the budgets of one population have the controls projection and shift, but all are held in one pass",
    ),
    "some without budget": (two_attached, {"budget": [pp.Budget(0.5), None]}, "budget"),
    "plain with budget": (two_models, {"budget": pp.Budget(0.5)}, "call pp.attach(model, spikeslab) first"),
    "batch sizes": (
        two_models,
        {"config": [CONFIG, dataclasses.replace(CONFIG, batch_size=16)]},
        f"{STEP}batch_size is ['16', '20']{APART}",
    ),
    "optimisers": (
        two_models,
        {"config": [CONFIG, dataclasses.replace(CONFIG, optimizer="adam")]},
        f"{STEP}optimizer is ['adam', 'sgd']{APART}",
    ),
    "patience": (
        two_models,
        {"config": dataclasses.replace(CONFIG, patience=2), "validation": (X, Y)},
        "patience is 2, which a population has no use of; set patience=0, or train one by one",
    ),
    "samples": (
        two_attached,
        {"config": dataclasses.replace(CONFIG, samples=2)},
        "samples is 2, which a population has no use of; set samples=0, or train one by one",
    ),
    "some gates frozen": (
        two_attached,
        {"config": [CONFIG, dataclasses.replace(CONFIG, gate_lr=None)]},
        "gate_lr is None for some members of the population and a number for others; give 0.0 to those that are not "
        "to train their gates",
    ),
    "loader": (
        two_models,
        {"data": DataLoader(TensorDataset(X, Y), 20)},
        "a population needs data that all members can read at once, not a DataLoader; give (x, y) tensors or a Part",
    ),
    "flat images": (
        two_models,
        {"config": dataclasses.replace(CONFIG, augment=True), "seed": [0, 1]},
        "augment=True needs images of shape (n, channels, height, width), but x is (20, 6); set augment=False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_fault_and_change_no_model(case: str) -> None:
    make, arguments, message = REFUSED[case]
    models, calls = make(), []
    before = [copy.deepcopy(model.state_dict()) for model in models]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pp.fit(models, **{"data": (X, Y), "config": CONFIG, "progress": lambda *call: calls.append(call), **arguments})
    assert "\n" not in str(error.value)
    assert calls == []  # before anything is trained
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
        assert model.training
        assert all(p.requires_grad for p in model.parameters()) or case == "frozen"


def test_a_member_that_diverges_is_named() -> None:
    configs = [dataclasses.replace(CONFIG, lr=lr) for lr in (0.05, 1e9, 0.01)]
    models = [mlp() for _ in range(3)]
    with pytest.raises(ValueError, match="of member 1 became") as error:
        pp.fit(models, (X, Y), configs, loss=lambda out, y: out.square().mean())
    assert "in epoch 1 of stage 'fit' (lr 1000000000.0, gate_lr 100000000000.0); use a smaller learning rate" in str(
        error.value
    )
    assert "\n" not in str(error.value)


# --- Histories and progress.


def test_rows_name_their_member_and_progress_shows_the_mean() -> None:
    calls: list[tuple] = []
    models = [prepare(NETS["mlp"][0], "budget", k) for k in range(3)]
    rows = pp.fit(
        models, (X, Y), CONFIG, budget=budgets("budget"), stage="masks", progress=lambda *call: calls.append(call)
    )
    assert [(row["epoch"], row["member"]) for row in rows] == [(e, k) for e in range(1, 6) for k in range(3)]
    assert all(row["stage"] == "masks" for row in rows)
    assert [call[:3] for call in calls[:6]] == [("masks", n, 25) for n in (1, 2, 3, 4, 5, 5)]
    assert len(calls) == 30
    assert calls[0][3] == {}
    last = calls[-1][3]
    assert last["members"] == 3
    assert "member" not in last
    assert last["loss"] == pytest.approx(sum(row["loss"] for row in rows[-3:]) / 3)
    assert [row["expected_sparsity"] for row in rows[-3:]] == pytest.approx([0.3, 0.5, 0.7], abs=1e-6)
    alone = pp.fit(build(NETS["mlp"][0], 0), (X, Y), CONFIG)
    assert all("member" not in row for row in alone)


# --- Resuming.


class Killed(Exception):
    """Raised from the progress callback."""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("state", ["dense", "masked", "budget", "train_std"])
def test_a_killed_population_resumes_to_the_bit(state: str, optimizer: str, tmp_path: Path) -> None:
    configs = [pp.Config(epochs=3, lr=0.01 * (k + 1), optimizer=optimizer, batch_size=20) for k in range(3)]
    make = lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 3))  # noqa: E731

    def run(path: Path | None, stop: int = -1, members: int = 3) -> tuple[list[nn.Module], list[dict]]:
        steps = []

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        models = [prepare(make, state, k) for k in range(members)]
        options = {"seed": [5, 6, 7][:members], "budget": budgets(state, members), "every": 2, "progress": progress}
        return models, pp.fit(models, (X, Y), configs[:members], checkpoint=path, **options)

    whole, rows = run(None)
    for stop in (4, 7, 11):  # in the middle of an epoch, and after one
        path = tmp_path / f"{stop}.pt"
        with pytest.raises(Killed):
            run(path, stop)
        torch.randn(stop)
        resumed, again = run(path)
        assert again == rows
        for a, b in zip(resumed, whole, strict=True):
            tensors = zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True)
            assert all(torch.equal(p, q) for p, q in tensors)
    with pytest.raises(ValueError, match=r"belongs to another run .*choose another folder or delete it"):
        run(tmp_path / "4.pt", members=2)


# --- Posteriors.


def priors(attach_options: dict[str, Any], count: int = 3) -> tuple[list[nn.Module], list[pp.SpikeSlab]]:
    models = [build(NETS["mlp"][0], k) for k in range(count)]
    pp.fit(models, SPLIT.prior, CONFIG, seed=list(range(count)))
    for k, model in enumerate(models):
        mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.4 + 0.1 * k)
        pp.attach(model, pp.block_isotropic(model, mask, eps=0.05, std=0.02 * (k + 1)), seed=k, **attach_options)
    return models, [pp.read(model) for model in models]


POSTERIORS: dict[str, tuple[dict, dict, dict]] = {
    "gates": ({}, {}, {}),
    "std": ({"train_std": True}, {}, {"std_lr": 0.1}),
    "budget": ({}, {"budget": [pp.Budget(0.4 + 0.1 * k) for k in range(3)]}, {}),
    "paper": ({}, {"objective": "paper"}, {"accumulate": 2}),
    "adam": ({}, {}, {"optimizer": "adam", "lr": 0.001, "gate_lr": 0.05}),
}


@pytest.mark.parametrize("case", POSTERIORS)
def test_posteriors_of_a_population_are_those_of_lone_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    attach_options, options, config_changes = POSTERIORS[case]
    models, slabs = priors(attach_options)
    alone = [copy.deepcopy(model) for model in models]
    plain = {"epochs": 5, "lr": 0.02, "gate_lr": 0.5, "batch_size": 10, **config_changes}
    configs = [pp.Config(**{**plain, "lr": plain["lr"] * (k + 1)}) for k in range(3)]
    out = [tmp_path / str(k) for k in range(3)]
    rows = pp.fit_posterior(models, slabs, SPLIT, configs, seed=[0, 1, 1], out=out, **options)
    for k, model in enumerate(alone):
        member_options = {**options, "budget": options["budget"][k] if "budget" in options else None}
        history = pp.fit_posterior(model, slabs[k], SPLIT, configs[k], seed=[0, 1, 1][k], **member_options)
        assert_alike(models[k], model)
        losses = [row["loss"] for row in rows if row["member"] == k]
        assert losses == pytest.approx([row["loss"] for row in history], rel=1e-5)
        receipt = weights.notes(models[k]).receipt
        assert receipt == {"prior": slabs[k].hash, "bound": SPLIT.bound.hash, "written": str(out[k])}
        stored = load_file(out[k] / "prior.safetensors")
        assert torch.equal(stored["mean/0.weight"], slabs[k].mean["0.weight"])
        rest = pp.read(models[k]).rest
        assert all(torch.equal(t, slabs[k].rest[n]) for n, t in rest.items())
        cert = pp.certify(models[k], slabs[k], SPLIT, draws=20, grid=3, declare="its weights were drawn at random")
        assert cert.bound <= 1
        assert cert.tries is not None
        assert cert.tries.number == k + 1
        assert pp.read(models[k]).hash != slabs[k].hash


def test_one_folder_for_several_priors_is_refused(tmp_path: Path) -> None:
    models, slabs = priors({}, count=2)
    with pytest.raises(ValueError, match=r"out is the one folder .* for 2 priors; give a list of one for each"):
        pp.fit_posterior(models, slabs, SPLIT, CONFIG, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_each_member_needs_a_prior_that_has_not_seen_the_bound_set() -> None:
    models, slabs = priors({}, count=2)
    with pytest.raises(ValueError, match="prior has 1 entries for 2 models; give one for each, or one for all"):
        pp.fit_posterior(models, slabs[:1], SPLIT, CONFIG)
    leaked = dataclasses.replace(slabs[1], seen=SPLIT.bound.trace)
    with pytest.raises(ValueError, match="has seen the bound set"):
        pp.fit_posterior(models, [slabs[0], leaked], SPLIT, CONFIG)
    for model in models:
        assert weights.notes(model).receipt is None
        assert all(attachment.sites(model))


def test_a_posterior_population_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(path: Path | None, stop: int = -1) -> list[nn.Module]:
        models, slabs = priors({}, count=2)
        steps = []

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        pp.fit_posterior(models, slabs, SPLIT, CONFIG, checkpoint=path, every=1, progress=progress)
        return models

    whole = run(None)
    with pytest.raises(Killed):
        run(tmp_path / "posterior.pt", 8)
    for a, b in zip(run(tmp_path / "posterior.pt"), whole, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_lone_posterior_after_a_population_is_the_same_as_one_before() -> None:
    models, slabs = priors({}, count=2)
    lone_model = copy.deepcopy(models[0])
    pp.fit_posterior(lone_model, slabs[0], SPLIT, CONFIG)
    alone, _ = fit_both_ways(models, SPLIT.prior, CONFIG)
    for model, expected in zip(models, alone, strict=True):
        assert_alike(model, expected)
        pp.fit_posterior(model, pp.read(model), SPLIT, CONFIG)
