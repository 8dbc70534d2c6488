"""Bounds against the truth: 50-digit arithmetic, exact fractions, scipy, and simulated coverage."""

import math
from fractions import Fraction
from functools import partial

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


def test_kl_inverse_lower_is_never_above_and_tight():
    rng = np.random.default_rng(8)
    qs, cs = fractions_of_many_scales(5000, rng), 10.0 ** rng.uniform(-15, 2, 5000)
    with mpmath.workdps(50):
        for q, c in zip(qs.tolist(), cs.tolist(), strict=True):
            p = bounds.kl_inverse_lower(q, c)
            assert 0.0 <= p <= q
            assert p == 0.0 or exact_kl(q, mpmath.mpf(p)) >= c, (q, c)
            # The slope of kl in p is (p - q) / (p (1 - p)): what the margin in c means for p.
            step = mpmath.mpf(4e-14) * c * p * (1 - mpmath.mpf(p)) / (q - mpmath.mpf(p)) if p < q else 0
            above = mpmath.mpf(p) + 2 * mpmath.mpf(math.ulp(p)) + step
            assert above >= q or exact_kl(q, above) < c, (q, c)


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


def test_seeger_covers_the_risk_of_a_fixed_predictor():
    n, delta, risk = 200, 0.1, 0.15
    errors = np.random.default_rng(6).binomial(n, risk, 2000)
    failures = sum(bounds.seeger(k / n, n=n, kl=0.0, delta=delta) < risk for k in errors.tolist())
    assert failures <= 2000 * delta
    for k in (0, 30, 100):  # a fixed predictor is the case of Clopper-Pearson, which must be the tighter one
        assert bounds.clopper_pearson(k, n=n, delta=delta) < bounds.seeger(k / n, n=n, kl=0.0, delta=delta)


# --- Populations that bite: M independent hypotheses of equal true risk, P uniform on them, Q chosen by the bound set.

N, M, RISK, TRIALS, DELTA = 200, 1000, 0.2, 1000, 0.1
ALLOWED = stats.binom.isf(0.001, TRIALS, DELTA)  # with a failure rate of delta, more happen once in 1000 runs


def test_gibbs_bounds_cover_the_empirical_best_of_many():
    least = np.random.default_rng(9).binomial(N, RISK, (TRIALS, M)).min(axis=1)

    def failures(bound) -> int:
        values = {k: bound(k / N) for k in set(least.tolist())}
        return sum(values[k] < RISK for k in least.tolist())

    common = {"kl": math.log(M), "delta": DELTA}
    for bound in (bounds.seeger, bounds.paper, bounds.catoni, partial(bounds.catoni, c=0.7)):
        assert failures(partial(bound, n=N, **common)) <= ALLOWED
    # The population can tell: a bound that counts its examples twice fails on it, and so does one that forgets the KL.
    assert failures(partial(bounds.seeger, n=2 * N, **common)) > ALLOWED
    assert failures(partial(bounds.catoni, n=N, kl=0.0, delta=DELTA)) > ALLOWED


@pytest.mark.parametrize("temperature", [0.3, 2.0, 1e6])
def test_disintegrated_covers_one_draw_from_a_gibbs_posterior(temperature):
    rng = np.random.default_rng(10)
    errors = rng.binomial(N, RISK, (TRIALS, M))
    # Q(h) is proportional to exp(-errors/temperature): the greatest score plus Gumbel noise is one draw from it.
    scores = -errors / temperature
    networks = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    failures = 0
    for k, score, h in zip(errors, scores, networks.tolist(), strict=True):
        log_ratio = float(score[h]) - float(np.logaddexp.reduce(score)) + math.log(M)
        failures += bounds.disintegrated(int(k[h]), n=N, log_ratio=log_ratio, delta=DELTA) < RISK
    assert failures <= ALLOWED


def test_excess_loss_covers_the_empirical_best_against_a_reference():
    rng = np.random.default_rng(11)
    trials, plus, minus = 300, 0.03, 0.02  # of the examples on which hypothesis and reference differ in error
    failures = 0
    for reference in rng.binomial(N, RISK, trials).tolist():
        worse = rng.binomial(N - reference, plus / (1.0 - RISK), M)
        better = rng.binomial(reference, minus / RISK, M)
        best = int((worse - better).argmin())
        bound = bounds.excess_loss(
            reference_errors=reference,
            plus=worse[best] / N,
            minus=better[best] / N,
            n=N,
            kl=math.log(M),
            delta_reference=DELTA / 2,
            delta=DELTA / 2,
        )
        failures += bound < RISK + plus - minus
    assert failures <= stats.binom.isf(0.001, trials, DELTA)


@pytest.mark.parametrize("c", [None, 0.05, 0.5, 5.0])
def test_catoni_covers_a_fixed_predictor_in_exact_arithmetic(c):
    for n, risk in [(20, 0.3), (200, 0.02), (200, 0.15), (1000, 0.5)]:
        k = np.arange(n + 1)
        fails = [bounds.catoni(i / n, n=n, kl=0.0, delta=DELTA, c=c) < risk for i in k.tolist()]
        assert stats.binom.pmf(k, n, risk)[fails].sum() <= (DELTA if c else DELTA / 20)


def test_agreement_covers_where_every_disagreement_is_an_error_in_exact_arithmetic():
    for m, rate in [(50, 0.1), (500, 0.01), (5000, 0.02)]:
        k = np.arange(m + 1)
        fails = [bounds.agreement(0.15, disagreements=i, m=m, delta=DELTA) < 0.15 + rate for i in range(m // 5)]
        failure = stats.binom.pmf(k[: len(fails)], m, rate)[fails].sum()
        assert DELTA / 4 < failure <= DELTA  # counts are whole: not all of delta can be used


def test_the_vote_errs_at_most_twice_as_often():
    rng = np.random.default_rng(12)
    for classes in (2, 3, 10):
        votes = rng.dirichlet(np.full(classes, 0.5), 2000)  # the share of Q for each class, on 2000 inputs
        labels = np.where(rng.random(2000) < 0.7, votes.argmax(axis=1), rng.integers(0, classes, 2000))
        gibbs = 1.0 - votes[np.arange(2000), labels].mean()
        assert (votes.argmax(axis=1) != labels).mean() <= bounds.vote(gibbs)
