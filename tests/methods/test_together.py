"""together: osp, pft and pbp of many models at once give the results of single calls."""

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

CONFIG = pp.Config(epochs=4, lr=0.05, gate_lr=0.5, batch_size=32, schedule="cosine")
DENSE = pp.Config(epochs=2, lr=0.05, batch_size=32)
VERBS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "osp": (pp.osp, {}),
    "pft": (pp.pft, {}),
    "pft-paper": (pp.pft, {"recipe": "paper"}),
    "pbp": (pp.pbp, {"eps": 0.01, "std": [0.02, 0.03, 0.04], "draws": 20, "grid": 3}),
    "pbp-paper": (pp.pbp, {"recipe": "paper", "eps": 0.01, "std": [0.02, 0.03, 0.04], "draws": 20, "grid": 3}),
}


def net(k: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        return nn.Sequential(nn.Linear(6, 14, bias=False), nn.BatchNorm1d(14), nn.Tanh(), nn.Linear(14, 3))


def nets(count: int = 3) -> list[nn.Module]:
    return [net(k) for k in range(count)]


def run_alone(verb: Callable[..., Any], data: Any, config: Any, count: int = 3, **options: Any) -> list[Any]:
    """The results of single calls; a list has one entry for each call."""
    arguments = {"config": config, **options}
    per_member = [{n: v[k] if isinstance(v, list) else v for n, v in arguments.items()} for k in range(count)]
    return [verb(net(k), data, member.pop("config"), **member) for k, member in enumerate(per_member)]


def fresh_split() -> pp.data.Split:
    """A split on which nothing has been certified."""
    return pp.data.split(X, Y, prior_fraction=0.5, seed=0)


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert_alike(actual.model, expected.model, 1e-4, 1e-6)  # the mean of centred data is only rounding
    assert [set(row) for row in actual.history] == [set(row) for row in expected.history]
    for actual_row, expected_row in zip(actual.history, expected.history, strict=True):
        assert (actual_row["stage"], actual_row["epoch"]) == (expected_row["stage"], expected_row["epoch"])
        assert actual_row["loss"] == pytest.approx(expected_row["loss"], rel=1e-4)
        assert actual_row["lr"] == pytest.approx(expected_row["lr"])
    if isinstance(expected, pp.Pruned):
        assert list(actual.mask) == list(expected.mask)
        assert all(torch.equal(keep, expected.mask[n]) for n, keep in actual.mask.items())
        assert actual.sparsity == expected.sparsity
    else:
        assert float(pp.kl(actual.posterior, actual.prior)) == pytest.approx(
            float(pp.kl(expected.posterior, expected.prior)), rel=1e-3
        )
        # The 20 draws depend on every bit of Q, so they differ.
        assert actual.certificate.bound == pytest.approx(expected.certificate.bound, abs=0.1)
        for n, p in expected.posterior.keep_prob.items():
            torch.testing.assert_close(actual.posterior.keep_prob[n], p, atol=1e-4, rtol=1e-4)


def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A list that fills with (stage, number of members) as stages are trained."""
    calls: list[tuple[str, int]] = []
    for plain in (fit, fit_posterior):

        def record_call(model: Any, *args: Any, plain: Any = plain, **options: Any) -> Any:
            calls.append((options["stage"], 1 if isinstance(model, nn.Module) else len(model)))
            return plain(model, *args, **options)

        monkeypatch.setattr(pipeline, plain.__name__, record_call)
    return calls


@pytest.mark.parametrize("dense", [None, DENSE])
@pytest.mark.parametrize("name", VERBS)
def test_each_result_equals_that_of_a_single_call(
    name: str, dense: pp.Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, options = VERBS[name]
    options = options | {
        "sparsity": [0.5, 0.7, 0.9],
        "criterion": ["magnitude", "snip", "random"],
        "seed": [0, 0, 7],
        "dense": dense,
    }
    posterior = verb is pp.pbp
    expected = run_alone(verb, fresh_split() if posterior else (X, Y), CONFIG, **options)
    calls = sizes(monkeypatch)
    models = nets()
    results = pp.together(verb, models, fresh_split() if posterior else (X, Y), CONFIG, **options)
    for k in range(3):
        assert results[k].model is models[k]
        assert_same(results[k], expected[k])
    stages = {"osp": ["tune"], "pft": ["masks"], "pft-paper": ["masks", "tune"]}
    assert calls == [
        (stage, 3) for stage in ([] if dense is None else ["dense"]) + stages.get(name, ["prior", "posterior"])
    ]


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
def test_members_with_different_stages_are_trained_in_groups(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options, stages = DIFFERENT[case]
    verb, more = VERBS[name]
    options = more | options | {"sparsity": 0.6}
    posterior = verb is pp.pbp
    expected = run_alone(verb, fresh_split() if posterior else (X, Y), **options)
    calls = sizes(monkeypatch)
    results = pp.together(verb, nets(), fresh_split() if posterior else (X, Y), **options)
    for result, lone_result in zip(results, expected, strict=True):
        assert_same(result, lone_result)
    assert calls == stages


def test_members_may_prune_different_layers() -> None:
    def body(model: nn.Module) -> dict[str, Tensor]:
        return {name: w for name, w in pp.prunable(model).items() if not name.startswith("3")}

    for name in ("osp", "pft", "pft-paper"):
        verb, options = VERBS[name]
        options = options | {"sparsity": 0.5, "prunable": [pp.prunable, body, body]}
        lone_results = run_alone(verb, (X, Y), CONFIG, **options)
        for result, lone_result in zip(pp.together(verb, nets(), (X, Y), CONFIG, **options), lone_results, strict=True):
            assert_same(result, lone_result)


def test_models_may_have_different_architectures() -> None:
    models = [net(0), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), net(2)]
    results = pp.together(pp.osp, models, (X, Y), CONFIG, sparsity=0.5)
    for k in (0, 2):
        assert_same(results[k], pp.osp(net(k), (X, Y), CONFIG, sparsity=0.5))
    assert results[1].sparsity == pytest.approx(0.5, abs=0.02)


# --- Folders.


class Killed(Exception):
    """Raised from the progress callback."""


@pytest.mark.parametrize("name", VERBS)
def test_with_folders_a_killed_run_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    verb, options = VERBS[name]

    def run(folder: str | None, stop: int = -1) -> list[Any]:
        steps = []

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        folders = None if folder is None else [tmp_path / folder / str(k) for k in range(3)]
        data = fresh_split() if verb is pp.pbp else (X, Y)
        arguments = options | {"sparsity": [0.5, 0.7, 0.9], "dense": DENSE, "folder": folders, "progress": progress}
        return pp.together(verb, nets(), data, CONFIG, **arguments)

    whole = run(None)
    for stop in (3, 12, 20):
        with pytest.raises(Killed):
            run(str(stop), stop)
        for result, expected in zip(run(str(stop)), whole, strict=True):
            state, other = result.model.state_dict(), expected.model.state_dict()
            assert all(torch.equal(t, other[n]) for n, t in state.items())
            assert result.history == expected.history
    if verb is pp.pbp:
        for k in range(3):
            assert (tmp_path / "20" / str(k) / "prior.safetensors").exists()


@pytest.mark.parametrize("name", ["osp", "pbp"])
def test_in_one_folder_every_member_has_its_own_checkpoints_and_prior(name: str, tmp_path: Path) -> None:
    verb, options = VERBS[name]
    configs = [CONFIG, dataclasses.replace(CONFIG, epochs=2), CONFIG]
    data = fresh_split() if name == "pbp" else (X, Y)
    arguments = {"sparsity": 0.5, "folder": tmp_path, **options}
    assert len(pp.together(verb, nets(), data, configs, **arguments)) == 3
    stages = {"osp": ["tune"], "pbp": ["posterior", "prior"]}[name]
    # Members 0 and 2 are trained together, and share the checkpoints of member 0.
    assert sorted(tmp_path.rglob("*.pt")) == [tmp_path / str(k) / f"{stage}.pt" for k in (0, 1) for stage in stages]
    if name == "pbp":
        assert sorted(tmp_path.rglob("prior.safetensors")) == [
            tmp_path / str(k) / "prior.safetensors" for k in range(3)
        ]


# --- Refusals.


def test_bad_lists_criteria_and_verbs_are_refused() -> None:
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


def test_a_list_of_patterns_is_one_selection_and_a_list_of_lists_has_one_per_model() -> None:
    wide = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)) for _ in range(4)]
    both = pp.together(pp.osp, wide[:2], (X, Y), CONFIG, sparsity=0.5, exclude=["0", "2"])
    assert [list(result.mask) for result in both] == [["1.weight"]] * 2
    each = pp.together(pp.osp, wide[2:], (X, Y), CONFIG, sparsity=0.5, exclude=[["0"], None])
    assert [list(result.mask) for result in each] == [["1.weight", "2.weight"], ["0.weight", "1.weight", "2.weight"]]
    with pytest.raises(ValueError, match="exclude has 1 entries for 2 models"):
        pp.together(pp.osp, nets(2), (X, Y), CONFIG, sparsity=0.5, exclude=[["3"]])
