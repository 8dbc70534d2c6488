"""together: osp, pft and pbp of many models side by side give what each alone would."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_population import assert_alike
from torch import Tensor, nn

import pacprune as pp
from pacprune.methods import pipeline
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
SPLIT = pp.data.split(X, Y, prior_fraction=0.5, seed=0)
CONFIG = pp.Config(epochs=4, lr=0.05, gate_lr=0.5, batch_size=32, schedule="cosine")
DENSE = pp.Config(epochs=2, lr=0.05, batch_size=32)
VERBS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "osp": (pp.osp, {}),
    "pft": (pp.pft, {}),
    "pft-paper": (pp.pft, {"recipe": "paper"}),
    "pbp": (pp.pbp, {"eps": 0.01, "std": [0.02, 0.03, 0.04], "draws": 20, "grid": 3}),
}


def net(k: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        return nn.Sequential(nn.Linear(6, 14, bias=False), nn.BatchNorm1d(14), nn.Tanh(), nn.Linear(14, 3))


def nets(count: int = 3) -> list[nn.Module]:
    return [net(k) for k in range(count)]


def lone(verb: Callable[..., Any], data: Any, config: Any, count: int = 3, **how: Any) -> list[Any]:
    """What each call alone gives; lists have an entry for each, a folder is its own."""
    given = {"config": config, **how}
    each = [{n: v[k] if isinstance(v, list) else v for n, v in given.items()} for k in range(count)]
    return [verb(net(k), data, one.pop("config"), **one) for k, one in enumerate(each)]


def fresh() -> pp.data.Split:
    return dataclasses.replace(SPLIT, issued={})  # every run is its own experiment


def assert_same(found: Any, alone: Any) -> None:
    assert type(found) is type(alone)
    assert_alike(found.model, alone.model, 1e-4, 1e-6)  # the mean of centred data is rounding alone
    assert [set(row) for row in found.history] == [set(row) for row in alone.history]
    for mine, theirs in zip(found.history, alone.history, strict=True):
        assert (mine["stage"], mine["epoch"]) == (theirs["stage"], theirs["epoch"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["lr"] == pytest.approx(theirs["lr"])
    if isinstance(alone, pp.Pruned):
        assert list(found.mask) == list(alone.mask)
        assert all(torch.equal(keep, alone.mask[n]) for n, keep in found.mask.items())
        assert found.sparsity == alone.sparsity
    else:
        assert float(pp.kl(found.posterior, found.prior)) == pytest.approx(
            float(pp.kl(alone.posterior, alone.prior)), rel=1e-3
        )
        # 20 draws, which differ since they follow from Q to the bit
        assert found.certificate.bound == pytest.approx(alone.certificate.bound, abs=0.1)
        for n, p in alone.posterior.keep_prob.items():
            torch.testing.assert_close(found.posterior.keep_prob[n], p, atol=1e-4, rtol=1e-4)


def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Fills with (stage, number of members) as stages are trained."""
    seen: list[tuple[str, int]] = []
    for plain in (fit, fit_posterior):

        def watched(model: Any, *args: Any, plain: Any = plain, **how: Any) -> Any:
            seen.append((how["stage"], 1 if isinstance(model, nn.Module) else len(model)))
            return plain(model, *args, **how)

        monkeypatch.setattr(pipeline, plain.__name__, watched)
    return seen


@pytest.mark.parametrize("dense", [None, DENSE])
@pytest.mark.parametrize("name", VERBS)
def test_each_result_is_what_the_verb_alone_gives(
    name: str, dense: pp.Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, how = VERBS[name]
    how = how | {
        "sparsity": [0.5, 0.7, 0.9],
        "criterion": ["magnitude", "snip", "random"],
        "seed": [0, 0, 7],
        "dense": dense,
    }
    posterior = name == "pbp"
    alone = lone(verb, fresh() if posterior else (X, Y), CONFIG, **how)
    seen = sizes(monkeypatch)
    models = nets()
    found = pp.together(verb, models, fresh() if posterior else (X, Y), CONFIG, **how)
    for k in range(3):
        assert found[k].model is models[k]
        assert_same(found[k], alone[k])
    stages = {"osp": ["tune"], "pft": ["masks", "tune"], "pft-paper": ["masks", "tune"], "pbp": ["prior", "posterior"]}
    assert seen == [(stage, 3) for stage in ([] if dense is None else ["dense"]) + stages[name]]


DIFFERENT: dict[str, tuple[str, dict[str, Any], list[tuple[str, int]]]] = {
    "epochs": (
        "osp",
        {"config": [CONFIG, dataclasses.replace(CONFIG, epochs=2), CONFIG]},
        [("tune", 2), ("tune", 1)],
    ),
    "some dense": (
        "osp",
        {"config": CONFIG, "dense": [DENSE, None, DENSE]},
        [("dense", 2), ("tune", 3)],
    ),
    "recipes": (
        "pft",
        {"config": CONFIG, "recipe": ["coupled", "paper", "coupled"]},
        [("masks", 2), ("tune", 2), ("masks", 1), ("tune", 1)],
    ),
    "samples": (
        "osp",
        {"config": [CONFIG, dataclasses.replace(CONFIG, samples=2), CONFIG]},
        [("tune", 2), ("tune", 1)],
    ),
    "no epochs": (
        "osp",
        {"config": [CONFIG, dataclasses.replace(CONFIG, epochs=0), CONFIG]},
        [("tune", 2)],
    ),
    "std trained": (
        "pbp",
        {"config": CONFIG, "train_std": [True, False, True]},
        [("prior", 2), ("posterior", 2), ("prior", 1), ("posterior", 1)],
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_not_alike_is_trained_apart_and_right(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, how, stages = DIFFERENT[case]
    verb, more = VERBS[name]
    how = more | how | {"sparsity": 0.6}
    posterior = name == "pbp"
    alone = lone(verb, fresh() if posterior else (X, Y), **how)
    seen = sizes(monkeypatch)
    found = pp.together(verb, nets(), fresh() if posterior else (X, Y), **how)
    for one, expected in zip(found, alone, strict=True):
        assert_same(one, expected)
    assert seen == stages


def test_members_may_prune_different_layers() -> None:
    def body(model: nn.Module) -> dict[str, Tensor]:
        return {name: w for name, w in pp.prunable(model).items() if not name.startswith("3")}

    for name in ("osp", "pft", "pft-paper"):
        verb, how = VERBS[name]
        how = how | {"sparsity": 0.5, "prunable": [pp.prunable, body, body]}
        alone = lone(verb, (X, Y), CONFIG, **how)
        for one, expected in zip(pp.together(verb, nets(), (X, Y), CONFIG, **how), alone, strict=True):
            assert_same(one, expected)


def test_models_may_have_different_architectures() -> None:
    models = [net(0), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), net(2)]
    found = pp.together(pp.osp, models, (X, Y), CONFIG, sparsity=0.5)
    for k in (0, 2):
        assert_same(found[k], pp.osp(net(k), (X, Y), CONFIG, sparsity=0.5))
    assert found[1].sparsity == pytest.approx(0.5, abs=0.02)


# --- Folders.


class Killed(Exception):
    """Raised from the progress callback."""


@pytest.mark.parametrize("name", VERBS)
def test_with_folders_a_run_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    verb, how = VERBS[name]

    def run(folder: str | None, stop: int = -1) -> list[Any]:
        steps = []

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        where = None if folder is None else [tmp_path / folder / str(k) for k in range(3)]
        data = fresh() if name == "pbp" else (X, Y)
        given = how | {"sparsity": [0.5, 0.7, 0.9], "dense": DENSE, "folder": where, "progress": progress}
        return pp.together(verb, nets(), data, CONFIG, **given)

    whole = run(None)
    for stop in (3, 12, 20):
        with pytest.raises(Killed):
            run(str(stop), stop)
        for one, expected in zip(run(str(stop)), whole, strict=True):
            state, other = one.model.state_dict(), expected.model.state_dict()
            assert all(torch.equal(t, other[n]) for n, t in state.items())
            assert one.history == expected.history
    if name == "pbp":
        for k in range(3):
            assert (tmp_path / "20" / str(k) / "prior.safetensors").exists()


@pytest.mark.parametrize("name", ["osp", "pbp"])
def test_one_folder_for_all_is_refused_or_kept_apart(name: str, tmp_path: Path) -> None:
    """Members that are not alike would take each other's checkpoints, and several priors would be one file."""
    verb, how = VERBS[name]
    configs = [CONFIG, dataclasses.replace(CONFIG, epochs=2), CONFIG]
    data = fresh() if name == "pbp" else (X, Y)
    given = {"sparsity": 0.5, "folder": tmp_path, **how}
    said = ""
    try:
        assert len(pp.together(verb, nets(), data, configs, **given)) == 3
    except ValueError as refusal:
        said = str(refusal)
    if said:
        assert "folder" in said
        assert "belongs to another run" not in said  # which would come too late, and name the wrong reason
    elif name == "pbp":
        assert len(list(tmp_path.rglob("prior.safetensors"))) == 3


# --- Refusals.


def test_refusals() -> None:
    with pytest.raises(ValueError, match="sparsity has 2 entries for 3 models; give one for each, or one for all"):
        pp.together(pp.osp, nets(), (X, Y), CONFIG, sparsity=[0.5, 0.6])
    with pytest.raises(ValueError, match=r"criterion 'best' is unknown"):
        pp.together(pp.osp, nets(), (X, Y), CONFIG, sparsity=0.5, criterion=["magnitude", "best", "snip"])
    model = net(0)
    with pytest.raises(ValueError, match="one model is in the list twice; copy it first"):
        pp.together(pp.osp, [model, model], (X, Y), CONFIG, sparsity=[0.5, 0.6])
    with pytest.raises(ValueError, match=r"fit is not a pipeline such as pp\.osp"):
        pp.together(pp.fit, nets(), (X, Y), CONFIG)
    assert pp.together(pp.osp, [], (X, Y), CONFIG, sparsity=0.5) == []
