"""STR: its operator and gradients, its density, and what it leaves."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pacprune as pp
from pacprune.masking import masks, weights
from pacprune.training.controls import THRESHOLDS

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=20, lr=0.1, batch_size=30)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def with_thresholds(first: float, second: float) -> nn.Module:
    model = net()
    pp.apply_mask(model, masks.all_kept(pp.prunable(model)))
    weights.notes(model).learned = {THRESHOLDS: nn.Parameter(torch.tensor([first, second]))}
    return model


@pytest.mark.parametrize("clip", [None, 0.01])
def test_one_step_is_its_formula(clip: float | None) -> None:
    model, (x, y) = with_thresholds(-3.0, -2.0), (X[:32], Y[:32])
    config = pp.Config(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.01, batch_size=32, clip=clip)
    after = {}

    def progress(*call: Any) -> None:
        after.update({n: p.detach().clone() for n, p in (*model.named_parameters(), *weights.learned(model).items())})

    pp.fit(model, (x, y), config, budget=pp.Budget(0.5, control="soft"), progress=progress)
    twin = with_thresholds(-3.0, -2.0).train()
    names = list(pp.prunable(net()))
    start = {n: p.detach().clone() for n, p in (*twin.named_parameters(), *weights.learned(twin).items())}
    ratios = torch.cat([(start[n].abs() / s.exp()).reshape(-1) for n, s in zip(names, start[THRESHOLDS], strict=True)])
    level = start[THRESHOLDS] + torch.log(ratios.sort().values[89])  # of 180 weights 90 are above
    leaves = {name: t.requires_grad_() for name, t in {**start, THRESHOLDS: level}.items()}
    shrunk = {
        name: leaves[name].sign() * (leaves[name].abs() - leaves[THRESHOLDS][i].exp()).relu()
        for i, name in enumerate(names)
    }
    rest = {name: t for name, t in leaves.items() if name not in (*names, THRESHOLDS)}
    F.cross_entropy(functional_call(twin, {**rest, **shrunk}, (x,)), y).backward()
    gradients = [t.grad for t in leaves.values() if t.grad is not None]
    norm = float(torch.stack([g.norm() for g in gradients]).norm())
    scale = 1.0 if clip is None else clip / (norm + 1e-6)
    for name, moved in after.items():
        before, gradient = leaves[name].detach(), leaves[name].grad
        assert gradient is not None
        expected = before - 0.1 * (scale * gradient + 0.01 * before)
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def observe(**options: Any) -> tuple[pp.Pruned, list[torch.Tensor]]:
    """The result, and the mask of every step."""
    model, seen = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if len(seen) < step:  # the call at the end of an epoch repeats its step
            seen.append(torch.cat([keep.reshape(-1) for _, keep in weights.masked(model)]).clone())

    return pp.str_(model, (X, Y), CONFIG, **{"sparsity": 0.8, "progress": progress, **options}), seen


def test_every_step_keeps_exactly_what_the_schedule_says_and_the_mask_moves_to_the_end() -> None:
    result, seen = observe()
    assert len(seen) == 80
    for step, mask in enumerate(seen):
        r = min(1.0, step / 80 / 0.8)
        assert int(mask.sum()) == round((1 - 0.8 * (1 - (1 - r) ** 3)) * 180)
    late = seen[64:]
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(late))
    assert any((b & ~a).any() for a, b in itertools.pairwise(seen))  # weights come back
    assert {row["stage"] for row in result.history} == {"masks"}
    assert result.history[-1]["sparsity"] == pytest.approx(0.8)


def test_layers_learn_how_their_thresholds_differ() -> None:
    model, levels = net(), []

    def progress(*call: Any) -> None:
        levels.append(weights.learned(model)[THRESHOLDS].detach().clone())

    pp.str_(model, (X, Y), CONFIG, sparsity=0.8, progress=progress)
    assert float((levels[-1][0] - levels[-1][1]).abs()) > 0.01
    assert float(levels[-1].mean() - levels[0].mean()) > 0  # and they rise with the sparsity


def test_a_plain_network_is_left() -> None:
    result, _ = observe(min_per_layer=10)
    assert set(result.model.state_dict()) == set(net().state_dict())
    assert not weights.learned(result.model)
    assert min(int(keep.sum()) for keep in result.mask.values()) >= 10
    assert result.sparsity == pytest.approx(0.8)


def test_a_bad_ramp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ramp 1\.5 must lie in \(0, 1\]"):
        observe(ramp=1.5)
