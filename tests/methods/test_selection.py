"""What is pruned: include= and exclude=, frozen weights, sparsities by layer and scopes, of every method."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as prune_by_torch

import pacprune as pp
from pacprune.methods.table import METHODS, pruning_methods

G = torch.Generator().manual_seed(1)
X = torch.randn(96, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=3, lr=0.1, batch_size=32)
NAMES = list(pruning_methods())


def net() -> Any:
    """Tensors of 120, 200 and 30 weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3))


def prune(name: str, model: nn.Module, **options: Any) -> pp.Pruned:
    method = METHODS[name]
    return method.verb(model, (X, Y), CONFIG, **{**method.options, **options})


def kept(pruned: pp.Pruned) -> dict[str, int]:
    return {name: int(keep.sum()) for name, keep in pruned.mask.items()}


@pytest.mark.parametrize("name", NAMES)
def test_with_exclude_the_sparsity_is_of_the_selected_weights_and_exact(name: str) -> None:
    model = net()
    result = prune(name, model, sparsity=0.9, exclude="4")
    assert list(result.mask) == ["0.weight", "2.weight"]
    assert sum(kept(result).values()) == round(0.1 * 320) == 32
    assert result.selected_sparsity == 1 - 32 / 320
    assert result.sparsity == pytest.approx(288 / 350)
    assert not (model[4].weight == 0).any()
    assert int((model[0].weight != 0).sum() + (model[2].weight != 0).sum()) == 32


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_can_have_its_own_sparsity(name: str) -> None:
    result = prune(name, net(), sparsity={"0*": 0.5, "2.weight": 0.9})
    assert kept(result) == {"0.weight": 60, "2.weight": 20}
    for key, keep in result.mask.items():
        assert not result.model.get_parameter(key)[~keep].any()


def test_of_patterns_that_overlap_the_first_that_fits_counts() -> None:
    assert kept(prune("osp", net(), sparsity={"2": 0.9, "*.weight": 0.5})) == {
        "0.weight": 60,
        "2.weight": 20,
        "4.weight": 15,
    }


@pytest.mark.parametrize("scope", ["layer", "erk"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_scopes(name: str, scope: str) -> None:
    expected = {key: int(keep.sum()) for key, keep in pp.top_k(_sizes(), sparsity=0.8, scope=scope).items()}
    assert kept(prune(name, net(), sparsity=0.8, scope=scope)) == expected


RANKING = {"osp", "imp", "acdc"}
"""Methods whose masks are ranked anew each time."""


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_size_are_for_methods_that_rank(name: str) -> None:
    model = net()
    if name not in RANKING:
        with pytest.raises(
            ValueError, match=r"scope='row' is for masks that are ranked anew, as by pp\.osp, .*'layer'"
        ):
            prune(name, model, sparsity=0.5, scope="row", dense=CONFIG)
        assert all(torch.equal(t, net().state_dict()[key]) for key, t in model.state_dict().items())
        return
    result = prune(name, model, sparsity=0.5, scope="row")
    assert {key: keep.sum(1).tolist() for key, keep in result.mask.items()} == {
        "0.weight": [3] * 20,
        "2.weight": [10] * 10,
        "4.weight": [5] * 3,
    }
    assert all(torch.equal(model.get_parameter(key) != 0, keep) for key, keep in result.mask.items())


def test_wanda_compares_within_rows() -> None:
    model = net()
    expected = pp.top_k(pp.scores.wanda(model, (X, Y)), sparsity=0.5, scope="row")
    result = pp.osp(model, (X, Y), pp.Config(epochs=0), sparsity=0.5, scope="row", criterion="wanda")
    assert all(torch.equal(keep, expected[key]) for key, keep in result.mask.items())


def _sizes() -> dict[str, Tensor]:
    return pp.scores.magnitude(net())


@pytest.mark.parametrize("name", ["pft", "pft-coupled", "l0", "str"])
def test_members_with_layers_of_their_own_equal_their_single_runs(name: str) -> None:
    method, goals = METHODS[name], [{"0": 0.5, "2": 0.9}, {"0": 0.8, "2": 0.6}]
    results = pp.together(method.verb, [net(), net()], (X, Y), CONFIG, sparsity=goals, **method.options)
    for result, goal in zip(results, goals, strict=True):
        alone = prune(name, net(), sparsity=goal)
        assert kept(result) == kept(alone)
        for key, weight in alone.model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[key], weight, rtol=1e-2, atol=5e-3)


def test_frozen_weights_are_left_alone_unless_they_are_named() -> None:
    model = net()
    model[2].requires_grad_(False)
    before = model[2].weight.clone()
    words = "200 of the 350 weights are frozen and left alone, so that sparsity 0.8 of the others is 0.3429 of all"
    with pytest.warns(UserWarning, match=words):
        result = prune("osp", model, sparsity=0.8)
    assert kept(result).keys() == {"0.weight", "4.weight"}
    assert sum(kept(result).values()) == 30
    assert torch.equal(model[2].weight, before)
    again = net()
    again[2].requires_grad_(False)
    assert kept(prune("osp", again, sparsity=0.8, include=["2", "0"])).keys() == {"0.weight", "2.weight"}


def test_a_result_prints_both_sparsities() -> None:
    result = pp.osp(net(), (X, Y), CONFIG, sparsity=0.9, include="2")
    assert "sparsity 0.5143, 170 of 350 weights kept, sparsity 0.9000 of the 200 selected" in repr(result)
    assert "selected" not in repr(pp.osp(net(), (X, Y), CONFIG, sparsity=0.9))


def test_a_kept_weight_that_is_zero_is_not_counted_as_pruned() -> None:
    model: Any = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
    tokens = torch.randint(1, 10, (90, 3), generator=G)

    def keep_padding(model: nn.Module, data: Any) -> dict[str, Tensor]:
        scores = {name: weight.detach().abs() for name, weight in pp.prunable(model).items()}
        scores["0.weight"][0] = torch.inf
        return scores

    result = pp.osp(model, (tokens, tokens[:, 0] % 3), CONFIG, sparsity=0.5, criterion=keep_padding)
    assert not model[0].weight[0].any()
    assert (result.sparsity, round(152 * pp.sparsity(model))) == (0.5, 76 + 8)


def test_a_lower_sparsity_than_that_of_the_mask_is_refused() -> None:
    model: Any = pp.osp(net(), (X, Y), CONFIG, sparsity=0.8).model
    with pytest.raises(ValueError, match=r"pruned to sparsity 0\.8 before, and now 0\.2 is asked for; .*apply_mask"):
        pp.osp(model, (X, Y), CONFIG, sparsity=0.2)
    assert pp.osp(model, (X, Y), CONFIG, sparsity=0.9).sparsity == 0.9
    pp.apply_mask(model, None)
    result = pp.osp(model, (X, Y), CONFIG, sparsity=0.2)
    assert result.sparsity == 0.2
    assert pp.sparsity(model) < 0.8  # zeros that get a gradient have moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exclude": "head*"},
            r"exclude='head\*' names no weight of the model; it has 0\.weight, 2\.weight, 4\.weight",
        ),
        ({"include": nn.Conv2d}, "include='Conv2d' names no weight"),
        ({"include": 3}, "include has 3, a int; give patterns of names, types of module or modules"),
        ({"exclude": "*"}, r"exclude='\*' leave nothing to prune of 0\.weight"),
        ({"sparsity": {"head": 0.5}}, "sparsity names 'head', which fits none of the 3 weights; they are 0.weight"),
        ({"sparsity": {"0": 1.5}}, r"sparsity 1\.5 is outside \[0, 1\)"),
        ({"sparsity": {"0": 0.5}, "scope": "erk"}, "scope='erk' has nothing to decide"),
        ({"sparsity": {}}, "sparsity has 0 names of tensors"),
        (
            {"sparsity": {"*.weight": 0.5, "2": 0.9}},
            r"'2', but patterns before it fit all of its weights, 2\.weight; the first that fits counts",
        ),
        ({"sparsity": {nn.Linear: 0.5}}, r"Linear'>, a type; give patterns of the weights' names"),
        ({"exclude": net()[4]}, r"exclude has a Linear that is not a module of this model; was it taken before a deep"),
    ],
)
def test_what_names_no_weight_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    for verb in (pp.osp, pp.pft):
        model = net()
        with pytest.raises(ValueError, match=message):
            verb(model, (X, Y), CONFIG, dense=CONFIG, **{"sparsity": 0.5, **options})
        assert torch.equal(model[0].weight, net()[0].weight)


def test_a_certificate_of_a_part_states_the_sparsity_of_all_weights() -> None:
    split = pp.data.split(X, Y, prior_fraction=0.5, seed=0)
    certified = pp.pbp(net(), split, CONFIG, dense=CONFIG, sparsity=0.8, exclude="4", draws=20)
    assert list(certified.posterior.keep_prob) == ["0.weight", "2.weight"]
    assert certified.posterior.sparsity == pytest.approx(0.8 * 320 / 350, abs=1e-5)
    by_layer = pp.pbp(net(), pp.data.split(X, Y, seed=1), CONFIG, sparsity={"0": 0.5, "2": 0.9}, draws=20)
    shares = {name: float(1 - p.mean()) for name, p in by_layer.posterior.keep_prob.items()}
    assert shares == pytest.approx({"0.weight": 0.5, "2.weight": 0.9}, abs=1e-5)


@pytest.mark.parametrize("verb", [pp.osp, pp.pft, pp.gmp])
def test_validation_is_measured_in_every_stage_and_patience_spares_moving_masks(verb: Callable[..., pp.Pruned]) -> None:
    patient = dataclasses.replace(CONFIG, epochs=4, patience=1, lr=5.0)
    result = verb(net(), (X, Y), patient, sparsity=0.5, validation=(X[:40], Y[:40]))
    assert all("validation_loss" in row for row in result.history)
    if verb is not pp.osp:
        assert len(result.history) == 4
    assert result.sparsity == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_computed_weight_that_is_left_out_is_trained_and_stays(name: str) -> None:
    model = net()
    parametrizations.weight_norm(model[0])
    before = model[0].parametrizations.weight.original1.detach().clone()
    result = prune(name, model, sparsity=0.9, exclude="0")
    assert sum(kept(result).values()) == round(0.1 * 230)
    assert result.sparsity == pp.sparsity(model) == pytest.approx(207 / (350 + 20))  # each output has a length, too
    assert not torch.equal(model[0].parametrizations.weight.original1, before)


def test_a_sparsity_that_keeps_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sparsity 0\.999 of 30 weights keeps none of them; give 0\.9666 or less"):
        prune("osp", net(), sparsity=0.999, include="4")
    assert sum(kept(prune("osp", net(), sparsity=0.9666, include="4")).values()) == 1


def test_a_computed_weight_that_no_sparsity_names_is_left_alone() -> None:
    model = net()
    parametrizations.weight_norm(model[0])
    assert list(prune("osp", copy.deepcopy(model), sparsity={"2*": 0.9}).mask) == ["2.weight"]
    pruner = pp.Pruner(model, sparsity={"4*": 0.5}, steps=1, method="osp")
    assert list(pruner.finish().mask) == ["4.weight"]
    for sparsity in ({"0*": 0.5}, {"*": 0.5}, 0.5):
        with pytest.raises(ValueError, match=r"^0\.weight is parametrized by _WeightNorm"):
            pp.Pruner(model, sparsity=sparsity, steps=1)


def test_hooks_on_a_layer_that_is_left_out_are_no_hindrance() -> None:
    model = net()
    prune_by_torch.identity(model[0], "weight")
    with pytest.raises(ValueError, match=r"call torch\.nn\.utils\.prune\.remove .* first, or leave it out by exclude="):
        prune("osp", model, sparsity=0.9)
    assert list(prune("osp", model, sparsity=0.9, exclude="0").mask) == ["2.weight", "4.weight"]
