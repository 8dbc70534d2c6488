"""Statistics against the truth: the KL, keep rates, slabs and Gibbs risks by sampling."""

import functools

import numpy as np
import pytest
import torch
from enumeration import enumerate_gibbs
from scipy import stats
from torch import nn

import pacprune as pp
from pacprune.masking import criteria
from pacprune.masking.spikeslab import SpikeSlab, draw_weights, kl

DRAWS = 2000


@functools.cache
def pair(size: int = 60) -> tuple[SpikeSlab, SpikeSlab]:
    """Two distributions over one tensor that overlap but differ in gates, means and widths."""
    generator = torch.Generator().manual_seed(0)

    def slab(shift: float, std: float) -> SpikeSlab:
        keep_prob = torch.sigmoid(2 * torch.randn(size, generator=generator) + shift)
        mean = 0.3 * torch.randn(size, generator=generator)
        return SpikeSlab({"w": keep_prob}, {"w": mean}, {"w": torch.tensor(std)}, {}, size)

    return slab(0.5, 0.4), slab(-0.5, 0.5)


@functools.cache
def many(q: SpikeSlab) -> np.ndarray:
    return torch.stack([draw_weights(q, seed=1, step=t)["w"] for t in range(DRAWS)]).double().numpy()


def log_ratio(w: np.ndarray, q: SpikeSlab, p: SpikeSlab) -> np.ndarray:
    """log dQ/dP at drawn weights, one number per draw."""
    (lam, mean), (lam0, mean0) = ((s.keep_prob["w"].numpy(), s.mean["w"].numpy()) for s in (q, p))
    slab = stats.norm.logpdf(w, mean, float(q.std["w"])) - stats.norm.logpdf(w, mean0, float(p.std["w"]))
    return np.where(w != 0, np.log(lam / lam0) + slab, np.log((1 - lam) / (1 - lam0))).sum(axis=1)


def test_kl_is_the_mean_of_the_log_ratio_over_draws():
    q, p = pair()
    for posterior, prior in ((q, p), (p, q)):
        ratio = log_ratio(many(posterior), posterior, prior)
        assert abs(ratio.mean() - float(kl(posterior, prior))) < 4 * ratio.std() / DRAWS**0.5
        assert ratio.std() / DRAWS**0.5 < 0.02 * float(kl(posterior, prior))  # the test can tell


def test_every_weight_is_kept_as_often_as_its_keep_prob_says_and_independently():
    q, _ = pair()
    is_nonzero = many(q) != 0
    p = q.keep_prob["w"].double().numpy()
    z = (is_nonzero.sum(axis=0) - DRAWS * p) / np.sqrt(DRAWS * p * (1 - p))
    assert stats.chi2.sf((z**2).sum(), len(p)) > 1e-3
    assert stats.binomtest(int(is_nonzero.sum()), DRAWS * len(p), p.mean()).pvalue > 1e-3
    # No two gates of a draw and no two draws of a gate go together.
    centred = (is_nonzero - p) / np.sqrt(p * (1 - p))
    for later, earlier in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs((later * earlier).mean()) * later.size**0.5 < 4


def test_a_slab_has_its_moments_where_it_is_kept_and_is_exactly_zero_elsewhere():
    q, _ = pair()
    w = many(q)
    is_nonzero = w != 0
    z = ((w - q.mean["w"].double().numpy()) / float(q.std["w"]))[is_nonzero]
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) * len(z) ** 0.5 < 4
    assert abs((z**2).mean() - 1) * (len(z) / 2) ** 0.5 < 4
    assert set(np.unique(w[~is_nonzero])) == {0.0}


@pytest.mark.parametrize("mapping", ["sigmoid", "clamp"])
def test_attached_models_keep_as_often_as_they_read(mapping):
    model = nn.Linear(300, 100, bias=False)
    pp.attach(model, pp.score_monotone(model, criteria.random(model), sparsity=0.9), mapping=mapping, seed=3).eval()
    p = pp.read(model).keep_prob["weight"].double()
    total = torch.zeros_like(p)
    for _ in range(40):
        total += pp.resample_(model).weight.detach() != 0
    z = (total - 40 * p).sum() / (40 * p * (1 - p)).sum().sqrt()
    assert abs(float(z)) < 3.5
    for low, high in ((0.0, 0.05), (0.05, 0.3), (0.3, 1.0)):  # rare gates are as honest as frequent ones
        inside = (p >= low) & (p < high)
        z = (total - 40 * p)[inside].sum() / (40 * p * (1 - p))[inside].sum().sqrt()
        assert abs(float(z)) < 3.5


def test_the_gibbs_risk_by_enumeration_is_that_of_sampled_networks():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
        x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    q = pp.score_monotone(model, criteria.magnitude(model), sparsity=0.4)

    def wrong(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.func.functional_call(model, dict(w), (x,)).argmax(1) != y).float().mean()

    with torch.no_grad():
        exact = float(enumerate_gibbs(q, wrong))
        sampled = np.array([float(wrong(draw_weights(q, seed=2, step=t))) for t in range(DRAWS)])
        assert abs(sampled.mean() - exact) < 4 * sampled.std() / DRAWS**0.5
        pp.attach(model, q, seed=7).eval()
        attached = np.array([float((pp.resample_(model)(x).argmax(1) != y).float().mean()) for _ in range(500)])
    assert abs(attached.mean() - exact) < 4 * attached.std() / 500**0.5
    assert sampled.std() > 0.02  # the masks matter here
