"""What a posterior earns: the examples it may be looked at with, the recursive bound, and the rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacprune import bounds
from pacprune.paper import posteriors
from pacprune.paper.certificate_grid import read_grid
from pacprune.paper.error_vs_sparsity import DECLARED
from pacprune.paper.frame import Job
from pacprune.paper.posteriors import GAMMA, recursive

ENDLESS = (10**15, 10**15)


def _parts(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    f = a - GAMMA * b
    return float((f >= 0).double().mean()), float((f >= 1 - GAMMA).double().mean()), float((f >= 1).double().mean())


@pytest.mark.parametrize("seed", range(3))
def test_with_endless_examples_the_recursive_bound_is_the_risk_of_q2(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(5, 2000, generator=generator) < share for share in (0.1, 0.25))
    found = recursive(float(b.double().mean()), _parts(a.double(), b.double()), n=ENDLESS, kl=(0.0, 0.0))
    assert found == pytest.approx(float(a.double().mean()), abs=1e-5)


def test_the_recursive_bound_pays_for_both_steps() -> None:
    parts = (0.95, 0.1, 0.05)
    found = [recursive(0.2, parts, n=(1000, 500), kl=kl) for kl in ((0.0, 0.0), (5.0, 0.0), (0.0, 5.0))]
    assert found[0] < min(found[1:])
    before = bounds.seeger(0.2, n=1000, kl=5.0, delta=0.025) - bounds.seeger(0.2, n=1000, kl=0.0, delta=0.025)
    assert found[1] - found[0] == pytest.approx(GAMMA * before)


def test_nothing_is_looked_at_that_a_certificate_of_the_grid_is_about() -> None:
    for setting in read_grid(DECLARED.read_text()).settings:
        assert min(setting.alphas) >= posteriors.FIRST
        assert setting.split_seed == 0  # that of `rows`


def test_every_way_starts_from_the_same_priors(tmp_path: Path) -> None:
    setting = replace(posteriors.SETTINGS["smoke"][0], steps=6, late_steps=4)
    rows = posteriors.rows(setting, Job("smoke", tmp_path, 0, torch.device("cpu"), None, lambda *_: None))
    ways = [*posteriors.WAYS, posteriors.RECURSIVE]
    assert [(row["way"], row["seed"]) for row in rows] == [(way, seed) for way in ways for seed in (0, 1)]
    for seed in (0, 1):
        own = [row for row in rows if row["seed"] == seed]
        assert len({(row["prior_risk"], row["q_equals_p"], row["held_out"]) for row in own}) == 1
        assert all(row["kl"] >= 0 and row["bound"] >= row["gibbs_risk"] for row in own)
