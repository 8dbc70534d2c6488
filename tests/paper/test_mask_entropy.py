"""Mask entropy: in bits, larger for a larger eps, and drawn over a density that is one."""

import numpy as np
import pytest
import torch

import pacprune as pp
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.paper import mask_entropy
from pacprune.paper.frame import Job
from pacprune.runs import plots

TINY = mask_entropy.SETTINGS["smoke"][0].changed(
    sparsities=(0.9,),
    eps_grid=(1e-3, 1e-2),
    dense=pp.Config(epochs=2, lr=0.1),
    prior=pp.Config(epochs=2, lr=0.1),
    posterior=pp.Config(epochs=1, lr=0.1),
    draws=50,
)


@pytest.mark.parametrize(
    ("values", "bits"), [((0.5, 0.5), 1.0), ((0.0, 1.0), 0.0), ((0.5, 1.0), 0.5), ((0.25,), 0.811278124459)]
)
def test_entropy_is_in_bits_and_a_mean_over_weights(values: tuple[float, ...], bits: float) -> None:
    p = torch.tensor([values])
    slab = SpikeSlab({"w": p}, {"w": torch.ones_like(p)}, {"w": torch.tensor(0.0)}, {}, p.numel())
    assert mask_entropy.entropy(slab) == pytest.approx(bits)


def test_a_larger_eps_has_more_entropy_and_all_priors_are_paid_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mask_entropy.rows(TINY, job)
    assert len(rows) == len(TINY.options.eps_grid) * TINY.seeds
    for seed in job.seeds(TINY.seeds):
        small, large = (row for row in rows if row["seed"] == seed)
        assert small["eps"] < large["eps"]
        assert small["entropy"] < large["entropy"]
        assert 0 <= small["bound"] <= small["paper_bound"] <= 1
    monkeypatch.setattr(mask_entropy, "_runs", lambda *_: pytest.fail("again"))
    assert mask_entropy.rows(TINY, job) == rows
    assert -1 <= mask_entropy.numbers(rows)["r of entropy and paper_bound"] <= 1


def test_the_density_is_that_of_scipy_and_integrates_to_one() -> None:
    from scipy.stats import gaussian_kde

    x, y = np.random.default_rng(0).normal(size=(2, 30)) * [[1.0], [0.1]]
    along, up = np.linspace(-6, 6, 150), np.linspace(-0.6, 0.6, 140)
    height = mask_entropy.kernel_density(list(x), list(y), along, up)
    assert height.shape == (140, 150)
    assert height.sum() * (along[1] - along[0]) * (up[1] - up[0]) == pytest.approx(1, abs=0.01)
    theirs = gaussian_kde([x, y])(np.stack(np.meshgrid(along, up)).reshape(2, -1)).reshape(140, 150)
    np.testing.assert_allclose(height, theirs, rtol=0, atol=0.01 * theirs.max())


def test_runs_that_do_not_vary_or_lie_on_a_line_can_be_painted() -> None:
    common = {"dataset": "digits", "model": "mlp", "sparsity": 0.9, "eps": 1e-3, "test_error": 0.1}
    for slope in (0.0, 1.0):
        rows = [common | {"seed": k, "entropy": k / 10, "paper_bound": 0.2 + slope * k / 10} for k in range(3)]
        assert plots.png_of(mask_entropy.paint, rows)[:4] == b"\x89PNG"
