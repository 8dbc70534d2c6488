"""Contracts of every bound: ends, order, monotonicity, refusals; and the ledger of delta."""

import doctest
import json
import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from pacprune import bounds
from pacprune.bounds import Ledger

N, KL, DELTA = 500, 20.0, 0.05
RISKS = (0.0, 1e-12, 0.004, 0.1, 0.5, 0.9, 0.998, 1.0)

# One row per bound, as a function of (risk, n, kl, delta); a bound without a KL ignores it.
CONTRACT: dict[str, Callable[[float, int, float, float], float]] = {
    "seeger": lambda risk, n, kl, delta: bounds.seeger(risk, n=n, kl=kl, delta=delta),
    "paper": lambda risk, n, kl, delta: bounds.paper(risk, n=n, kl=kl, delta=delta),
    "chernoff": lambda risk, n, _, delta: bounds.chernoff(risk, draws=n, delta=delta),
    "clopper_pearson": lambda risk, n, _, delta: bounds.clopper_pearson(math.ceil(risk * n), n=n, delta=delta),
    "betting": lambda risk, n, _, delta: bounds.betting(np.full(n, risk), delta=delta),
}
every_bound = pytest.mark.parametrize("bound", CONTRACT.values(), ids=CONTRACT)


@every_bound
@pytest.mark.parametrize("risk", RISKS)
def test_lies_between_the_empirical_risk_and_one(bound, risk):
    for n in (1, 2, N):
        value = bound(risk, n, KL, DELTA)
        assert type(value) is float
        assert risk <= value <= 1.0
        assert value > risk or risk == 1.0


@every_bound
@pytest.mark.parametrize("risk", RISKS)
def test_grows_with_kl_with_fewer_examples_and_with_smaller_delta(bound, risk):
    # Multiples of 500 keep the number of errors of Clopper-Pearson in proportion.
    by_n = [bound(risk, n, KL, DELTA) for n in (500, 1000, 5000, 20_000)]
    by_kl = [bound(risk, N, kl, DELTA) for kl in (0.0, 1e-9, 1.0, 100.0, 1e5, math.inf)]
    by_delta = [bound(risk, N, KL, delta) for delta in (0.5, 0.05, 0.01, 1e-6, 1e-100)]
    assert by_n == sorted(by_n, reverse=True)
    assert by_kl == sorted(by_kl)
    assert by_delta == sorted(by_delta)


@every_bound
def test_grows_with_the_risk_and_is_one_at_one(bound):
    values = [bound(risk, N, KL, DELTA) for risk in RISKS]
    assert values == sorted(values)
    assert values[-1] == 1.0


@every_bound
@pytest.mark.parametrize(
    ("risk", "delta"), [(-0.1, DELTA), (1.1, DELTA), (0.1, 0.0), (0.1, 1.0), (0.1, -0.05), (0.1, math.nan)]
)
def test_refuses_bad_risk_and_delta(bound, risk, delta):
    with pytest.raises(ValueError, match=r"is \S+, but (it|every value) must|only n = 500"):
        bound(risk, N, KL, delta)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.kl_bernoulli(1.5, 0.5), "q is 1.5"),
        (lambda: bounds.kl_bernoulli(0.5, -0.1), "p is -0.1"),
        (lambda: bounds.kl_inverse(0.5, -1.0), "c is -1.0"),
        (lambda: bounds.kl_inverse(0.5, math.nan), "c is nan"),
        (lambda: bounds.xi(0), "n is 0"),
        (lambda: bounds.complexity(2.5, 1.0, 0.05), "n is 2.5"),
        (lambda: bounds.complexity(10, math.nan, 0.05), "kl is nan"),
        (lambda: bounds.seeger(0.1, n=0, kl=1.0, delta=0.05), "n is 0"),
        (lambda: bounds.seeger(12.0, n=10, kl=1.0, delta=0.05), "risk is 12.0"),
        (lambda: bounds.seeger(0.1, n=10, kl=-1e-9, delta=0.05), "kl is -1e-09"),
        (lambda: bounds.seeger(math.nan, n=10, kl=1.0, delta=0.05), "risk is nan"),
        (lambda: bounds.paper(math.nan, n=10, kl=1.0, delta=0.05), "risk is nan"),
        (lambda: bounds.chernoff(math.nan, draws=10, delta=0.05), "risk is nan"),
        (lambda: bounds.paper(0.1, n=-3, kl=1.0, delta=0.05), "n is -3"),
        (lambda: bounds.paper(0.1, n=10, kl=-1.0, delta=0.05), "kl is -1.0"),
        (lambda: bounds.chernoff(0.1, draws=0, delta=0.05), "draws is 0"),
        (lambda: bounds.clopper_pearson(-1, n=10, delta=0.05), "errors is -1"),
        (lambda: bounds.clopper_pearson(11, n=10, delta=0.05), "errors is 11, but there are only n = 10"),
        (lambda: bounds.clopper_pearson(0, n=0, delta=0.05), "n is 0"),
        (lambda: bounds.betting([0.1, 1.2], delta=0.05), "value 1 is 1.2"),
        (lambda: bounds.betting([math.nan], delta=0.05), "value 0 is nan"),
        (lambda: Ledger(pac_bayes=0.0), "pac_bayes = 0.0"),
        (lambda: Ledger(monte_carlo=-0.01), "monte_carlo = -0.01"),
        (lambda: Ledger(pac_bayes=0.6, monte_carlo=0.4), "sum below 1"),
        (lambda: Ledger(pac_bayes=math.nan), "pac_bayes = nan"),
        (lambda: Ledger(grid=0), "grid is 0"),
        (lambda: Ledger.split(1.0), "delta is 1.0"),
        (lambda: Ledger.split(0.05, monte_carlo_share=1.0), "monte_carlo_share is 1.0"),
    ],
)
def test_refusals_name_the_argument_and_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kl_inverse_at_its_ends():
    assert bounds.kl_inverse(0.3, 0.0) == 0.3
    assert bounds.kl_inverse(0.3, math.inf) == 1.0
    assert bounds.kl_inverse(1.0, 0.2) == 1.0
    for c in (1e-15, 1e-3, 1.0, 30.0):
        assert bounds.kl_inverse(0.0, c) == pytest.approx(-math.expm1(-c), rel=2e-14)
    assert bounds.kl_inverse(np.float32(0.1), 0.01) == bounds.kl_inverse(float(np.float32(0.1)), 0.01)


def test_seeger_is_never_above_the_paper():
    for n in (1, 2, 10, 1000, 12_000, 10**6, 10**12):
        for kl in (0.0, 1.0, 500.0, math.inf):
            for delta in (0.999, 0.05, 1e-10):
                for risk in RISKS:
                    assert bounds.seeger(risk, n=n, kl=kl, delta=delta) <= bounds.paper(risk, n=n, kl=kl, delta=delta)


def test_one_example_and_no_information():
    # n = 1, KL = 0: xi(1) = 2, so that the bound at risk 0 is 1 - delta/2.
    assert bounds.seeger(0.0, n=1, kl=0.0, delta=0.05) == pytest.approx(0.975, rel=1e-13)
    assert bounds.clopper_pearson(0, n=1, delta=0.05) == pytest.approx(0.95, rel=1e-13)
    assert bounds.clopper_pearson(7, n=7, delta=0.05) == 1.0
    assert bounds.chernoff(0.0, draws=1, delta=0.05) == pytest.approx(0.95, rel=1e-13)


def test_known_values():
    assert bounds.complexity(12_000, 500.0, 0.05) == pytest.approx((500 + math.log(bounds.xi(12_000) / 0.05)) / 12_000)
    assert math.log(2 * math.sqrt(12_000) / bounds.xi(12_000)) == pytest.approx(0.4625, abs=1e-4)
    e = (500 + math.log(2 * math.sqrt(12_000) / 0.05)) / 12_000
    both = (0.1 + e + math.sqrt(e * (e + 0.2)), 0.1 + math.sqrt(e / 2))
    assert bounds.paper(0.1, n=12_000, kl=500.0, delta=0.05) == pytest.approx(min(both), rel=1e-14)
    assert bounds.kl_inverse(0.0103, math.log(2 / 0.01) / 10) == pytest.approx(0.443, abs=5e-4)


def test_betting_at_its_ends():
    assert bounds.betting([], delta=0.05) == 1.0
    assert bounds.betting([1.0], delta=0.05) == 1.0
    assert bounds.betting(np.ones(1000), delta=0.05) == 1.0
    assert 0.98 < bounds.betting([0.0], delta=0.05) < 1.0
    assert bounds.betting(np.zeros(10_000), delta=0.01) < 8.5 / 10_000


def test_the_betting_grid_is_geometric():
    assert np.allclose(bounds.BETTING_GRID, np.geomspace(0.001, 0.95, 20), rtol=1e-14, atol=0.0)


def test_speed_of_the_long_inputs():
    values = np.random.default_rng(0).random(10_000)
    calls: list[Callable[[], float]] = [
        lambda: bounds.betting(values, delta=0.01),
        lambda: bounds.clopper_pearson(30_000, n=60_000, delta=0.05),
        lambda: bounds.xi.__wrapped__(10**6),
    ]
    for call in calls:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            call()
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.1


def test_ledger_splits_delta_and_divides_by_the_grid():
    default = Ledger()
    assert (default.delta, default.pac_bayes_each, default.monte_carlo_each) == (0.05, 0.04, 0.01)
    ledger = Ledger.split(0.1, monte_carlo_share=0.25, grid=5)
    assert ledger.delta == pytest.approx(0.1)
    assert ledger.pac_bayes_each == pytest.approx(0.015)
    assert ledger.monte_carlo_each == pytest.approx(0.005)
    assert ledger.delta_each == pytest.approx(0.02)
    assert (Ledger.split().pac_bayes, Ledger.split().monte_carlo) == pytest.approx((0.04, 0.01))


def test_ledger_prints_and_saves():
    assert str(Ledger()) == "delta 0.05 = 0.04 PAC-Bayes + 0.01 Monte Carlo"
    saved = json.loads(json.dumps(Ledger(grid=3).as_dict()))
    assert saved == {"delta": 0.05, "pac_bayes": 0.04, "monte_carlo": 0.01, "grid": 3}
    assert "grid of 3 priors" in str(Ledger(grid=3))


def test_docstring_examples_run():
    result = doctest.testmod(bounds)
    assert result.attempted >= 2
    assert result.failed == 0
