"""Contracts of every bound: ends, order, monotonicity, refusals; and the ledger of delta."""

import doctest
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pacprune import bounds
from pacprune.bounds import Ledger, montecarlo

N, KL, DELTA = 500, 20.0, 0.05
EXCESS = {"reference_errors": 1200, "plus": 0.011, "minus": 0.011, "n": 12_000, "kl": 500.0}
EXCESS |= {"delta_reference": 0.025, "delta": 0.025}
RISKS = (0.0, 1e-12, 0.004, 0.1, 0.5, 0.9, 0.998, 1.0)


def excess_loss(risk: float, n: int, kl: float, delta: float) -> float:
    # The reference network has the risk of Q and differs from it in error on a tenth of min(risk, 1 - risk).
    part = min(risk, 1.0 - risk) / 20
    errors = math.ceil(risk * n)
    return bounds.excess_loss(
        reference_errors=errors, plus=part, minus=part, n=n, kl=kl, delta_reference=delta, delta=delta
    )


# One row per bound, as a function of (risk, n, kl, delta); a bound without a KL ignores it.
CONTRACT: dict[str, Callable[[float, int, float, float], float]] = {
    "seeger": lambda risk, n, kl, delta: bounds.seeger(risk, n=n, kl=kl, delta=delta),
    "paper": lambda risk, n, kl, delta: bounds.paper(risk, n=n, kl=kl, delta=delta),
    "catoni": lambda risk, n, kl, delta: bounds.catoni(risk, n=n, kl=kl, delta=delta),
    "catoni, c = 1": lambda risk, n, kl, delta: bounds.catoni(risk, n=n, kl=kl, delta=delta, c=1.0),
    "excess_loss": excess_loss,
    "clopper_pearson": lambda risk, n, _, delta: bounds.clopper_pearson(math.ceil(risk * n), n=n, delta=delta),
    "disintegrated": lambda risk, n, kl, delta: bounds.disintegrated(
        math.ceil(risk * n), n=n, log_ratio=kl, delta=delta
    ),
    "agreement": lambda risk, n, kl, delta: bounds.agreement(
        bounds.seeger(risk, n=n, kl=kl, delta=delta), disagreements=n // 100, m=n, delta=delta
    ),
    "vote": lambda risk, n, kl, delta: bounds.vote(bounds.seeger(risk, n=n, kl=kl, delta=delta)),
    "chernoff": lambda risk, n, _, delta: montecarlo.chernoff(risk, draws=n, delta=delta),
    "betting": lambda risk, n, _, delta: montecarlo.betting(np.full(n, risk), delta=delta),
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
        (lambda: bounds.paper(0.1, n=-3, kl=1.0, delta=0.05), "n is -3"),
        (lambda: bounds.paper(0.1, n=10, kl=-1.0, delta=0.05), "kl is -1.0"),
        (lambda: bounds.clopper_pearson(-1, n=10, delta=0.05), "errors is -1"),
        (lambda: bounds.clopper_pearson(11, n=10, delta=0.05), "errors is 11, but there are only n = 10"),
        (lambda: bounds.clopper_pearson(0, n=0, delta=0.05), "n is 0"),
        (lambda: bounds.kl_inverse_lower(-0.5, 1.0), "q is -0.5"),
        (lambda: bounds.kl_inverse_lower(0.5, math.nan), "c is nan"),
        (lambda: bounds.catoni(0.1, n=10, kl=1.0, delta=0.05, c=0.0), "c is 0.0"),
        (lambda: bounds.catoni(0.1, n=10, kl=1.0, delta=0.05, c=math.inf), "c is inf"),
        (lambda: bounds.catoni(0.1, n=10, kl=1.0, delta=0.05, c=math.nan), "c is nan"),
        (lambda: bounds.excess_loss(**EXCESS | {"plus": 1.1}), "plus is 1.1"),
        (lambda: bounds.excess_loss(**EXCESS | {"minus": -0.1}), "minus is -0.1"),
        (lambda: bounds.excess_loss(**EXCESS | {"delta": 1.5}), "delta is 1.5"),
        (lambda: bounds.excess_loss(**EXCESS | {"delta_reference": 0.0}), "delta_reference is 0.0"),
        (lambda: bounds.excess_loss(**EXCESS | {"reference_errors": 12_001}), "only n = 12000"),
        (lambda: bounds.disintegrated(11, n=10, log_ratio=1.0, delta=0.05), "errors is 11, but there are only n = 10"),
        (lambda: bounds.disintegrated(1, n=10, log_ratio=math.nan, delta=0.05), "log_ratio is nan"),
        (lambda: bounds.disintegrated(1, n=10, log_ratio=-math.inf, delta=0.05), "log_ratio is -inf"),
        (lambda: bounds.agreement(1.1, disagreements=1, m=10, delta=0.05), "gibbs_bound is 1.1"),
        (lambda: bounds.agreement(0.1, disagreements=11, m=10, delta=0.05), "disagreements is 11, but .* only m = 10"),
        (lambda: bounds.agreement(0.1, disagreements=1, m=0, delta=0.05), "m is 0"),
        (lambda: bounds.vote(-0.1), "gibbs_bound is -0.1"),
        (lambda: Ledger(pac_bayes=0.0), "pac_bayes = 0.0"),
        (lambda: Ledger(monte_carlo=-0.01), "monte_carlo = -0.01"),
        (lambda: Ledger(pac_bayes=0.6, monte_carlo=0.4), "sum below 1"),
        (lambda: Ledger(pac_bayes=math.nan), "pac_bayes = nan"),
        (lambda: Ledger(grid=0), "grid is 0"),
        (lambda: Ledger.split(1.0), "delta is 1.0"),
        (lambda: Ledger(reference=-0.01), "reference = -0.01"),
        (lambda: Ledger(unlabelled=math.nan), "unlabelled = nan"),
        (lambda: Ledger(certified=0), "certified is 0"),
        (lambda: Ledger(share=0.0), "share is 0.0"),
        (lambda: Ledger(share=1.5), "share is 1.5"),
        (lambda: Ledger.split(0.05, monte_carlo_share=1.0), r"\[1.0, 0.0, 0.0\]"),
        (lambda: Ledger.split(0.05, reference_share=-0.1), "reference = -0.005"),
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


def test_kl_inverse_lower_at_its_ends():
    assert bounds.kl_inverse_lower(0.3, 0.0) == 0.3
    for q, c in [(0.3, math.inf), (0.0, 0.2), (0.5, 1e6)]:
        value = bounds.kl_inverse_lower(q, c)
        assert (value, math.copysign(1.0, value)) == (0.0, 1.0)
    for c in (1e-15, 1e-3, 1.0, 30.0):
        assert bounds.kl_inverse_lower(1.0, c) == pytest.approx(math.exp(-c), rel=1e-12)
        assert bounds.kl_inverse_lower(0.25, c) == pytest.approx(1.0 - bounds.kl_inverse(0.75, c), abs=1e-14)


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
    assert montecarlo.chernoff(0.0, draws=1, delta=0.05) == pytest.approx(0.95, rel=1e-13)


def test_known_values():
    assert bounds.complexity(12_000, 500.0, 0.05) == pytest.approx((500 + math.log(bounds.xi(12_000) / 0.05)) / 12_000)
    assert math.log(2 * math.sqrt(12_000) / bounds.xi(12_000)) == pytest.approx(0.4625, abs=1e-4)
    e = (500 + math.log(2 * math.sqrt(12_000) / 0.05)) / 12_000
    both = (0.1 + e + math.sqrt(e * (e + 0.2)), 0.1 + math.sqrt(e / 2))
    assert bounds.paper(0.1, n=12_000, kl=500.0, delta=0.05) == pytest.approx(min(both), rel=1e-14)
    assert bounds.kl_inverse(0.0103, math.log(2 / 0.01) / 10) == pytest.approx(0.443, abs=5e-4)


def test_the_excess_loss_is_far_below_plain_kl_where_q_and_the_reference_agree():
    # Risk .10, n = 12,000, KL = 500, 2.2 % of the examples differ in error; delta is .05 in all for both.
    assert bounds.seeger(0.1, n=12_000, kl=500.0, delta=0.05) == pytest.approx(0.209, abs=5e-4)
    assert bounds.excess_loss(**EXCESS) == pytest.approx(0.178, abs=5e-4)


def test_excess_loss_stays_a_fraction():
    better = {"reference_errors": 0, "plus": 0.0, "minus": 1.0, "n": 1000, "kl": 0.0}
    assert 0.0 <= bounds.excess_loss(**better, delta_reference=0.05, delta=0.05) < 1e-15
    assert bounds.excess_loss(**EXCESS | {"plus": 0.9, "minus": 0.0}) == 1.0


def test_catoni_pays_for_its_grid():
    assert np.allclose(bounds.CATONI_GRID, np.geomspace(0.02, 8.0, 20), rtol=1e-14, atol=0.0)
    for risk, n, kl in [(0.0, 100, 0.0), (0.1, 12_000, 5.0), (0.5, 60_000, 0.0), (0.02, 500, 400.0)]:
        divided = [bounds.catoni(risk, n=n, kl=kl, delta=0.05 / 20, c=c) for c in bounds.CATONI_GRID]
        assert bounds.catoni(risk, n=n, kl=kl, delta=0.05) == min(divided)
        # log 20 nats are the price: the same bound at KL + log 20 and the whole delta.
        paid = [bounds.catoni(risk, n=n, kl=kl + math.log(20), delta=0.05, c=c) for c in bounds.CATONI_GRID]
        assert min(divided) == pytest.approx(min(paid), rel=1e-13)


def test_the_catoni_grid_is_dense_enough():
    # No c gives less than kl_inverse(risk, (KL + log(1/delta))/n), and the best c gives just that.
    for risk in (0.005, 0.02, 0.1, 0.3, 0.5):
        for n in (500, 5000, 60_000):
            for kl in (0.0, 5.0, 100.0, 0.2 * n, 0.5 * n):
                best = bounds.kl_inverse(risk, (kl + math.log(20 / 0.05)) / n)
                gap = bounds.catoni(risk, n=n, kl=kl, delta=0.05) - risk
                assert best - risk <= gap * (1.0 + 1e-12) < 1.013 * (best - risk)


def test_catoni_with_a_fixed_c_beats_seeger_at_small_kl():
    n, risk, delta = 5000, 0.1, 0.05
    tail = (1.0 - math.log(delta)) / n
    p = bounds.kl_inverse(risk, tail)
    c = math.log(p * (1.0 - risk) / (risk * (1.0 - p)))
    assert bounds.catoni(risk, n=n, kl=1.0, delta=delta, c=c) == pytest.approx(p, rel=1e-12)
    # It pays what `seeger` would pay without xi(n): log xi(5000) is 4.5 nats.
    assert bounds.catoni(risk, n=n, kl=1.0, delta=delta, c=c) < bounds.seeger(risk, n=n, kl=1.0, delta=delta) - 0.005


def test_disintegrated_takes_the_ratio_of_the_draw():
    n, delta = 1000, 0.05
    bound = bounds.disintegrated(100, n=n, log_ratio=30.0, delta=delta)
    assert bound == pytest.approx(bounds.seeger(0.1, n=n, kl=30.0, delta=delta), rel=1e-13)
    values = [bounds.disintegrated(100, n=n, log_ratio=r, delta=delta) for r in (-1e9, -20.0, -5.0, 0.0, 9.0, math.inf)]
    assert values == sorted(values)
    assert values[0] == values[1] == pytest.approx(0.1, rel=1e-14)
    assert 0.1 <= values[0] < values[2]
    assert values[-1] == 1.0


def test_agreement_and_vote_add_and_double():
    assert bounds.agreement(0.1, disagreements=20, m=1000, delta=0.01) == pytest.approx(
        0.1 + bounds.clopper_pearson(20, n=1000, delta=0.01), rel=1e-14
    )
    assert bounds.agreement(0.9, disagreements=200, m=1000, delta=0.01) == 1.0
    assert (bounds.vote(0.1), bounds.vote(0.6), bounds.vote(0.0)) == (0.2, 1.0, 0.0)


def count_calls(function: Callable[[], float]) -> int:
    """How many functions a call of this one calls in turn: its work, whatever the machine."""
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_the_work_of_a_bound_grows_more_slowly_than_n():
    assert count_calls(lambda: bounds.clopper_pearson(30_000, n=60_000, delta=0.05)) < 60_000 / 3
    assert count_calls(lambda: bounds.xi.__wrapped__(10**6)) < 100


def test_ledger_splits_delta_and_divides_by_the_grid():
    default = Ledger()
    assert (default.delta, default.pac_bayes_each, default.monte_carlo_each) == (0.05, 0.04, 0.01)
    ledger = Ledger.split(0.1, monte_carlo_share=0.25, grid=5)
    assert ledger.delta == pytest.approx(0.1)
    assert ledger.pac_bayes_each == pytest.approx(0.015)
    assert ledger.monte_carlo_each == pytest.approx(0.005)
    assert ledger.delta_each == pytest.approx(0.02)
    assert (Ledger.split().pac_bayes, Ledger.split().monte_carlo) == pytest.approx((0.04, 0.01))


def test_ledger_with_every_entry():
    ledger = Ledger.split(0.05, monte_carlo_share=0.2, reference_share=0.1, unlabelled_share=0.3, grid=2, certified=5)
    assert ledger.delta == pytest.approx(0.05)
    assert (ledger.reference, ledger.unlabelled, ledger.pac_bayes) == pytest.approx((0.005, 0.015, 0.02))
    shares = (ledger.pac_bayes_each, ledger.monte_carlo_each, ledger.reference_each, ledger.unlabelled_each)
    # The theorem and the reference network are the same for all five; draws and inputs are not.
    assert shares == pytest.approx((0.01, 0.001, 0.0025, 0.0015))
    assert (ledger.delta_each, ledger.prior_each) == pytest.approx((0.005, 0.025))
    older = replace(ledger, undivided=False)
    shares = (older.pac_bayes_each, older.monte_carlo_each, older.reference_each, older.unlabelled_each)
    assert shares == pytest.approx((0.002, 0.001, 0.0005, 0.0015))
    assert (older.delta_each, older.prior_each) == pytest.approx((0.005, 0.005))
    assert sum(shares) * older.candidates == pytest.approx(older.delta)


def test_a_declared_share_takes_its_part_of_everything():
    whole, part = Ledger.split(0.05, grid=2, certified=3), Ledger.split(0.05, grid=2, certified=3, share=0.25)
    for name in ("pac_bayes_each", "monte_carlo_each", "prior_each", "delta_each"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 4)
    assert Ledger.from_dict(part.as_dict()) == part
    assert "a declared plan gives this certificate 0.25" in str(part)


def test_a_ledger_of_version_2_stays_what_it_was():
    entry = {name: value for name, value in Ledger.split(0.05, certified=4).as_dict().items() if name != "share"}
    older = Ledger.from_dict(entry)
    assert older.as_dict() == entry
    assert older.pac_bayes_each == pytest.approx(0.01)
    assert str(older).endswith("each divided by 4 for a choice among 4 certificates")


def test_ledger_prints_and_saves():
    assert str(Ledger()) == "delta 0.05 = 0.04 PAC-Bayes + 0.01 Monte Carlo"
    saved = json.loads(json.dumps(Ledger(grid=3).as_dict()))
    shares = {"pac_bayes": 0.04, "monte_carlo": 0.01, "reference": 0.0, "unlabelled": 0.0}
    assert saved == {"delta": 0.05, **shares, "grid": 3, "certified": 1, "share": 1.0}
    assert Ledger(**{name: value for name, value in saved.items() if name != "delta"}) == Ledger(grid=3)
    assert str(Ledger(pac_bayes=0.05, monte_carlo=0.0)) == "delta 0.05 = 0.05 PAC-Bayes"
    assert str(Ledger(0.02, 0.01, 0.015, 0.005, grid=3, certified=4)) == (
        "delta 0.05 = 0.02 PAC-Bayes + 0.01 Monte Carlo + 0.015 reference network + 0.005 unlabelled inputs, "
        "each divided by 3 for a grid of 3 priors, Monte Carlo, inputs and networks divided by 4 for a choice among 4 "
        "certificates"
    )


def test_docstring_examples_run():
    result = doctest.testmod(bounds)
    assert result.attempted >= 2
    assert result.failed == 0


def test_catonis_constant_for_an_expected_risk_is_tighter_than_seeger_and_than_the_grid() -> None:
    n, kl, delta = 12_000, 3.0, 0.04 / 100
    c = bounds.catoni_constant(0.01, n=n, kl=0.0, delta=delta)
    for risk in (0.008, 0.01, 0.012):  # the guess need not be exact
        bound = bounds.catoni(risk, n=n, kl=kl, delta=delta, c=c)
        assert risk < bound < bounds.catoni(risk, n=n, kl=kl, delta=delta) < 1
        assert bound < bounds.seeger(risk, n=n, kl=kl, delta=delta)
    with pytest.raises(ValueError, match=r"risk is 1\.5"):
        bounds.catoni_constant(1.5, n=n, kl=0.0, delta=delta)
