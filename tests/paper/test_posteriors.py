"""What a posterior earns: the examples it may be looked at with, the recursive bound, and the rows."""

import pytest
import torch

from pacprune import bounds
from pacprune.paper import posteriors
from pacprune.paper.certificate_grid import read_grid
from pacprune.paper.error_vs_sparsity import GRID_FILE
from pacprune.paper.frame import Job
from pacprune.paper.posteriors import GAMMA, recursive

ENDLESS = (10**15, 10**15)
TINY = posteriors.SETTINGS["smoke"][0].changed(steps=6, late_steps=4)


def _parts(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    f = a - GAMMA * b
    return float((f >= 0).double().mean()), float((f >= 1 - GAMMA).double().mean()), float((f >= 1).double().mean())


@pytest.mark.parametrize("seed", range(3))
def test_with_endless_examples_the_recursive_bound_is_the_risk_of_q2(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(5, 2000, generator=generator) < share for share in (0.1, 0.25))
    bound = recursive(float(b.double().mean()), _parts(a.double(), b.double()), n=ENDLESS, kl=(0.0, 0.0))
    assert bound == pytest.approx(float(a.double().mean()), abs=1e-5)


def test_the_recursive_bound_pays_for_both_steps() -> None:
    parts = (0.95, 0.1, 0.05)
    free, *costly = (recursive(0.2, parts, n=(1000, 500), kl=kl) for kl in ((0.0, 0.0), (5.0, 0.0), (0.0, 5.0)))
    assert free < min(costly)
    before = bounds.seeger(0.2, n=1000, kl=5.0, delta=0.025) - bounds.seeger(0.2, n=1000, kl=0.0, delta=0.025)
    assert costly[0] - free == pytest.approx(GAMMA * before)


def test_nothing_is_looked_at_that_a_certificate_of_the_grid_is_about() -> None:
    for setting in read_grid(GRID_FILE.read_text()).settings:
        assert min(setting.alphas) >= posteriors.FIRST
        assert setting.options.split_seed == 0  # that of `rows`


def test_every_way_starts_from_the_same_priors(job: Job) -> None:
    rows = posteriors.rows(TINY, job)
    ways = [*posteriors.WAYS, posteriors.RECURSIVE]
    assert [(row["way"], row["seed"]) for row in rows] == [(way, seed) for way in ways for seed in (0, 1)]
    for seed in (0, 1):
        repetition = [row for row in rows if row["seed"] == seed]
        assert len({(row["prior_risk"], row["q_equals_p"], row["held_out"]) for row in repetition}) == 1
        assert all(row["kl"] >= 0 and row["bound"] >= row["gibbs_risk"] for row in repetition)


def test_a_run_that_was_broken_off_computes_the_missing_alpha_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    two = TINY.changed(alphas=(0.2, 0.4))
    rows = posteriors.rows(two, job)
    path = job.out / "posteriors-digits-mlp.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[: len(rows) // 2]) + "\n")
    alphas, study = [], posteriors._alpha_rows
    monkeypatch.setattr(posteriors, "_alpha_rows", lambda s, e, *a: alphas.append(e[0].alpha) or study(s, e, *a))
    assert posteriors.rows(two, job) == rows
    assert alphas == [0.4]
