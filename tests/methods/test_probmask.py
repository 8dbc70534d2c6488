"""ProbMask: its density, its probabilities, and their learning rate."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.masking import attachment
from pacprune.methods.probmask import HELD, RAMP, held_cubic

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=20, lr=0.1, batch_size=30)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def test_the_schedule_is_the_authors() -> None:
    budget = pp.Budget(0.9, schedule=held_cubic, ramp=RAMP)
    for share in (0.0, 0.1, HELD, 0.3, 0.5, RAMP, 0.8, 1.0):
        r = min(1.0, max(0.0, (share - 0.16) / (0.6 - 0.16)))
        assert budget.density(share) == pytest.approx(0.1 + 0.9 * (1 - r) ** 3)


def test_probabilities_have_the_mean_of_the_budget_at_every_epoch() -> None:
    result = pp.probmask(net(), (X, Y), CONFIG, sparsity=0.8)
    budget = pp.Budget(0.8, schedule=held_cubic, ramp=RAMP)
    rows = [row for row in result.history if row["stage"] == "masks"]
    expected = [1 - budget.density((epoch + 1) / 10) for epoch in range(10)]
    assert [row["expected_sparsity"] for row in rows] == pytest.approx(
        expected, abs=2e-5
    )  # no p is nearer to 1 than 1e-5


def test_a_probability_is_the_parameter_and_is_1_while_everything_is_kept() -> None:
    model, kept = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        if stage == "masks" and row.get("epoch") == 1 and not kept:  # the call at the end of the first epoch of ten
            kept.extend(site.keep_prob() for site in attachment.sites(model))
            assert {site.sampler.mapping for site in attachment.sites(model)} == {"clamp"}

    pp.probmask(model, (X, Y), CONFIG, sparsity=0.8, progress=progress)
    assert min(float(p.min()) for p in kept) > 0.9999


def test_gate_lr_is_ten_times_lr_unless_it_is_given() -> None:
    def final(config: pp.Config) -> torch.Tensor:
        return pp.probmask(net(), (X, Y), config, sparsity=0.8).model.state_dict()["0.weight"]

    default = final(CONFIG)
    assert torch.equal(default, final(dataclasses.replace(CONFIG, gate_lr=1.0)))
    assert not torch.equal(default, final(dataclasses.replace(CONFIG, gate_lr=5.0)))
    for rate in (None, 0.0):
        with pytest.raises(ValueError, match=f"gate_lr is {rate}, so that all weights stay equally likely"):
            final(dataclasses.replace(CONFIG, gate_lr=rate))
