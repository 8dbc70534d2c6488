"""RigL: how its mask starts, and what never changes."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.masking import weights

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=8, lr=0.1, batch_size=30)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def observe(**options: Any) -> tuple[pp.Pruned, list[dict[str, torch.Tensor]]]:
    """The result, and the masks after every step."""
    model, seen = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if len(seen) < step:  # the call at the end of an epoch repeats its step
            seen.append({name: keep.clone() for name, keep in (weights.notes(model).mask or {}).items()})

    return pp.rigl(model, (X, Y), CONFIG, **{"sparsity": 0.8, "progress": progress, "every": 4, **options}), seen


@pytest.mark.parametrize("scope", ["erk", "layer", "global"])
def test_layers_keep_the_densities_of_their_scope(scope: str) -> None:
    result, seen = observe(scope=scope)
    start = pp.top_k(pp.scores.magnitude(net()), sparsity=0.8, scope=scope)
    counts = {name: int(keep.sum()) for name, keep in start.items()}
    assert all({name: int(keep.sum()) for name, keep in mask.items()} == counts for mask in seen)
    assert all(torch.equal(seen[0][name], keep) for name, keep in start.items())
    changed = [k for k in range(1, 32) if any(not torch.equal(seen[k][n], seen[k - 1][n]) for n in counts)]
    assert set(changed) <= {3, 7, 11, 15, 19}  # after every fourth of 32 steps, until three quarters of them are done
    assert {3, 7} <= set(changed)
    assert all(torch.equal(result.mask[name], keep) for name, keep in seen[-1].items())


def test_a_random_start_follows_from_the_seed() -> None:
    firsts = [observe(start="random", seed=seed)[1][0] for seed in (0, 0, 1)]
    equal = [all(torch.equal(a[name], keep) for name, keep in b.items()) for a, b in itertools.pairwise(firsts)]
    assert equal == [True, False]


def test_without_exchange_it_is_sparse_training() -> None:
    fixed, _ = observe(exchange=0.0)
    model = net()
    pp.fit(pp.apply_mask(model, fixed.mask), (X, Y), CONFIG)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in fixed.model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "snip"}, "start 'snip' is unknown; use one of magnitude, random"),
        ({"scope": "all"}, "scope 'all' is unknown"),
        ({"exchange": 1.5}, r"exchange is 1\.5; it is a share of the kept weights, in \[0, 1\]"),
        ({"every": 0}, "every is 0; it is the number of steps from mask to mask, at least 1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        observe(**options)
