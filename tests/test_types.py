"""What all folders share: one sentence for an unknown name, and one error for numbers that are no longer finite."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.bench import subjects
from pacprune.paper import recipes
from pacprune.training.checks import trial_pass
from pacprune.types import Diverged, check_name

X, Y = torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def broken() -> nn.Module:
    model = net()
    model[0].weight.data[0, 0] = torch.nan
    return model


def pruned(**options: Any) -> Any:
    return pp.pft(net(), (X, Y), pp.Config(epochs=1), **{"sparsity": 0.5, **options})


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: check_name("colour", "rde", {"red": 1, "blue": 2}), "colour 'rde' is unknown; use one of red, blue$"),
        (
            lambda: check_name("colour", "rde", ("red",), alternative="a function"),
            "'rde' is unknown; use one of red, or a function$",
        ),
        (lambda: check_name("colour", ["red"], ("red",)), r"colour \['red'\] is unknown; use one of red$"),
        (lambda: pp.Config(optimizer="sdg"), "optimizer 'sdg' is unknown; use one of sgd, "),
        (lambda: pp.Budget(0.5, control="tight"), "control 'tight' is unknown; use one of none, "),
        (lambda: pp.Budget(0.5, schedule="square"), "schedule 'square' is unknown; use one of fixed, cubic, or a func"),
        (lambda: pp.models.build_for("vgg", (64,), 10), "model 'vgg' is unknown; use one of mlp, lenet5, resnet20, "),
        (lambda: pp.data.load("svhn"), "data set 'svhn' is unknown; use one of digits, mnist, "),
        (lambda: pp.scores.score("size", net(), (X, Y)), "criterion 'size' is unknown; use one of magnitude, "),
        (lambda: pp.top_k(pp.scores.magnitude(net()), sparsity=0.5, scope="all"), "scope 'all' is unknown; use one of"),
        (lambda: pp.patterns.sparsity("3:4"), "pattern '3:4' is unknown; use one of 1:4, 2:4, 4:8"),
        (lambda: pp.attach(net(), pp.isotropic(net(), sparsity=0.5), mapping="tanh"), "mapping 'tanh' is unknown; use"),
        (lambda: pp.attach(net(), pp.isotropic(net(), sparsity=0.5), estimator="x"), "estimator 'x' is unknown; use"),
        (lambda: pruned(recipe="best"), "recipe 'best' is unknown; use one of thresholded, coupled"),
        (lambda: pp.export.write("net", net(), format="zip", example=X), "format 'zip' is unknown; use one of "),
        (lambda: recipes.run("figure-9", progress=lambda *call: None), "recipe 'figure-9' is unknown; use one of "),
        (lambda: subjects.run("weather"), "subject 'weather' is unknown; use one of sample, step"),
    ],
)
def test_an_unknown_name_is_refused_with_all_that_are_known(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: pp.fit(net(), (X, Y), pp.Config(epochs=30, lr=1e30), loss=lambda out, y: (out**2).mean()),
        lambda: pp.prunable(broken()),
        lambda: trial_pass(broken(), (X, Y), nn.functional.cross_entropy),
        lambda: pp.top_k({"w": torch.full((2, 2), torch.nan)}, sparsity=0.5),
        lambda: pp.scores.snip(net(), (X * torch.nan, Y)),
        lambda: pp.scores.score(
            lambda model, data: {n: w * torch.nan for n, w in pp.prunable(model).items()}, net(), X
        ),
        lambda: pp.attach(net(), nan_means()),
    ],
    ids=["loss", "weights", "before training", "scores", "loss of scores", "a user's scores", "means"],
)
def test_numbers_that_are_no_longer_finite_are_one_error(attempt: Callable[[], object]) -> None:
    with pytest.raises(Diverged, match=r"NaN|nan|inf"):
        attempt()
    assert issubclass(Diverged, ValueError)


def nan_means() -> pp.SpikeSlab:
    slab = pp.isotropic(net(), sparsity=0.5)
    slab.mean["0.weight"][0, 0] = torch.nan
    return slab
