"""Bounds against the truth: 50-digit arithmetic, exact fractions, scipy, and simulated coverage."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from pacprune import bounds


def exact_kl(q: float, p: mpmath.mpf) -> mpmath.mpf:
    """kl(q||p) in 50 digits, for the float q taken as an exact number."""
    q = mpmath.mpf(q)
    first = q * mpmath.log(q / p) if q > 0 else mpmath.mpf(0)
    return first + ((1 - q) * mpmath.log((1 - q) / (1 - p)) if q < 1 else 0)


def fractions_of_many_scales(size: int, rng: np.random.Generator) -> np.ndarray:
    tiny = 10.0 ** rng.uniform(-15, 0, size)
    values = np.select([rng.random(size) < share for share in (0.4, 0.7)], [rng.random(size), tiny], 1.0 - tiny)
    values[:60] = np.repeat([0.0, 1.0, 1e-12, 1.0 - 1e-12, 0.5, 1e-300], 10)
    return values


def test_kl_inverse_is_never_below_and_tight_on_10000_points():
    rng = np.random.default_rng(0)
    qs, cs = fractions_of_many_scales(10_000, rng), 10.0 ** rng.uniform(-15, 2, 10_000)
    with mpmath.workdps(50):
        for q, c in zip(qs.tolist(), cs.tolist(), strict=True):
            p = bounds.kl_inverse(q, c)
            assert q <= p <= 1.0
            # kl increases in p above q: at least c here means not below the inverse.
            assert p == 1.0 or exact_kl(q, mpmath.mpf(p)) >= c, (q, c)
            # Less than c a little further down means that the excess is at most this little.
            below = mpmath.mpf(p) - 2 * mpmath.mpf(math.ulp(p)) - mpmath.mpf(2e-14) * (mpmath.mpf(p) - q)
            assert below <= q or exact_kl(q, below) < c, (q, c)


def test_kl_bernoulli_is_accurate_next_to_q_and_next_to_the_ends():
    rng = np.random.default_rng(1)
    qs, ps = fractions_of_many_scales(2000, rng), fractions_of_many_scales(2000, rng)[::-1].copy()
    steps = 10.0 ** rng.uniform(-15, 0, 1000) * rng.choice([-1.0, 1.0], 1000)
    ps[500:1500] = np.clip(qs[500:1500] * (1.0 + steps), 0.0, 1.0)
    with mpmath.workdps(80):
        for q, p in zip(qs.tolist(), ps.tolist(), strict=True):
            if p in (0.0, 1.0):
                assert bounds.kl_bernoulli(q, p) == (0.0 if p == q else math.inf)
            else:
                truth = exact_kl(q, mpmath.mpf(p))
                assert abs(bounds.kl_bernoulli(q, p) - truth) <= 5e-15 * truth, (q, p)


def test_xi_against_its_definition_in_exact_fractions():
    for n in (1, 2, 3, 7, 8, 50, 301):
        exact = sum(math.comb(n, k) * Fraction(k, n) ** k * Fraction(n - k, n) ** (n - k) for k in range(n + 1))
        assert 0 < Fraction(bounds.xi(n)) / exact - 1 < 1e-13


def test_xi_lies_between_its_known_ends():
    for n in [*range(1, 300), 12_000, 10**6, 10**9]:
        assert math.sqrt(n) <= bounds.xi(n) <= 2.0 * math.sqrt(n) * (1.0 + 1e-14)
    # xi(n) = sqrt(pi n / 2) + 2/3 + O(1/sqrt(n))
    assert bounds.xi(10**6) == pytest.approx(math.sqrt(math.pi * 1e6 / 2) + 2 / 3, abs=1e-3)


@pytest.mark.parametrize("n", [1, 2, 10, 1437, 60_000])
@pytest.mark.parametrize("delta", [0.5, 0.05, 0.01, 1e-9])
def test_clopper_pearson_against_the_beta_quantile(n, delta):
    for errors in sorted({0, 1, n // 100, n // 10, n // 2, n - 2, n - 1} & set(range(n))):
        bound = bounds.clopper_pearson(errors, n=n, delta=delta)
        truth = stats.beta.isf(delta, errors + 1, n - errors)
        assert -1e-12 <= bound - truth <= 1e-9


@pytest.mark.parametrize(("errors", "n"), [(0, 5), (3, 20), (40, 41), (55, 400)])
@pytest.mark.parametrize("delta", [0.9, 0.3, 0.05, 1e-200])
def test_clopper_pearson_is_never_below_in_50_digits(errors, n, delta):
    with mpmath.workdps(50):
        p = mpmath.mpf(bounds.clopper_pearson(errors, n=n, delta=delta))
        tail = mpmath.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(errors + 1))
        assert tail <= delta


def test_betting_against_its_definition_in_50_digits():
    values = np.random.default_rng(2).binomial(25, 0.1, 40) / 25

    def wealth(mu: mpmath.mpf) -> mpmath.mpf:
        each = [mpmath.fprod(1 + f * (mu - x) / (1 - mu) for x in values.tolist()) for f in bounds.BETTING_GRID]
        return mpmath.fsum(each) / len(each)

    with mpmath.workdps(50):
        for delta in (0.5, 0.01, 1e-100):
            mu = mpmath.mpf(bounds.betting(values, delta=delta))
            assert wealth(mu) >= 1 / mpmath.mpf(delta)
            assert wealth(mu - 1e-12) < 1 / mpmath.mpf(delta)


def test_betting_beats_chernoff_on_minibatch_draws():
    values = np.random.default_rng(3).binomial(25, 0.1, 10_000) / 25
    mean = float(values.mean())
    assert bounds.betting(values, delta=0.01) < mean + 0.003
    assert bounds.chernoff(mean, draws=10_000, delta=0.01) > mean + 0.008


@pytest.mark.parametrize("kind", ["bernoulli", "rare", "beta", "minibatch"])
def test_bounds_on_the_mean_cover_it(kind):
    trials, draws, delta = 1000, 40, 0.1
    rng = np.random.default_rng(4)
    size = (trials, draws)
    mean, values = {
        "bernoulli": (0.3, rng.binomial(1, 0.3, size)),
        "rare": (0.05, rng.binomial(1, 0.05, size)),
        "beta": (0.2, rng.beta(0.5, 2.0, size)),
        "minibatch": (0.1, rng.binomial(10, 0.1, size) / 10),
    }[kind]
    # With a failure rate of delta, more failures than this happen once in 1000 runs.
    allowed = stats.binom.isf(0.001, trials, delta)
    assert sum(bounds.betting(row, delta=delta) < mean for row in values) <= allowed
    assert sum(bounds.chernoff(row.mean(), draws=draws, delta=delta) < mean for row in values) <= allowed


def test_betting_covers_under_optional_stopping():
    # The draws stop at the first time the bound is below the true mean: the worst stopping rule there is.
    trials, draws, delta, mean = 300, 40, 0.1, 0.5
    values = np.random.default_rng(5).binomial(1, mean, (trials, draws))
    failures = sum(any(bounds.betting(row[:t], delta=delta) < mean for t in range(8, draws + 1, 8)) for row in values)
    assert failures <= stats.binom.isf(0.001, trials, delta)


def test_seeger_covers_the_risk_of_a_fixed_predictor():
    n, delta, risk = 200, 0.1, 0.15
    errors = np.random.default_rng(6).binomial(n, risk, 2000)
    failures = sum(bounds.seeger(k / n, n=n, kl=0.0, delta=delta) < risk for k in errors.tolist())
    assert failures <= 2000 * delta
    for k in (0, 30, 100):  # a fixed predictor is the case of Clopper-Pearson, which must be the tighter one
        assert bounds.clopper_pearson(k, n=n, delta=delta) < bounds.seeger(k / n, n=n, kl=0.0, delta=delta)
