"""Coverage of the bounds by simulation: bounds hold, planted faults are caught, the populations are as described."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from pacprune import bounds
from pacprune.bench import coverage, risk_studies, synthetic
from pacprune.bounds import montecarlo
from pacprune.masking import spikeslab

DELTA = 0.05


@pytest.fixture(scope="module")
def rows() -> list[coverage.Row]:
    return coverage.run(200)


def rate(rows: list[coverage.Row], name: str) -> float:
    return max(row.rate for row in rows if row.bound == name)


def test_every_bound_holds_and_every_planted_fault_is_caught(rows):
    assert [row for row in rows if not row.ok] == []
    assert sum(row.planted_fault for row in rows) == 23
    assert rate(rows, "Seeger-Maurer, n counted twice") > 0.2
    assert rate(rows, "Clopper-Pearson, delta not divided") > 0.5
    assert rate(rows, "Seeger-Maurer at the mean of the draws") > 0.3
    assert rate(rows, "Clopper-Pearson after each example") > 0.2
    assert rate(rows, "sequence, in the order of p-values") > 0.3
    assert rate(rows, "sequence, own bound of each") > 0.3
    assert rate(rows, "compress, ordered by the bound set") > 0.2
    assert rate(rows, "bounded loss, bets chosen afterwards") > 0.6
    assert rate(rows, "documents, tokens counted") > 0.3
    assert rate(rows, "documents, windows of the same") > 0.1
    assert rate(rows, "Seeger-Maurer at the draws that chose") > 0.9
    assert rate(rows, "disintegrated, delta not divided") > 0.9


def test_every_kind_of_predictor_is_covered(rows):
    kinds = {"Q = P", "Gibbs", "held-out", "Monte Carlo", "single draw", "thresholded", "vote", "monitor"}
    assert {row.predictor for row in rows} == kinds | {"groups", "front", "sequence"}
    assert {row.bound for row in rows} >= {"error", "top-k", "drop", "disagreement", "bounded loss", "sequence"}
    assert {row.predictor for row in rows if "prunings" in row.population} == kinds - {
        "Q = P",
        "Monte Carlo",
        "monitor",
    }


def test_a_row_has_the_violation_rate_and_its_exact_interval(rows):
    for row in rows:
        assert row.trials == 200
        assert row.rate == row.violations / 200
        assert row.delta == DELTA
        interval = stats.binomtest(row.violations, 200).proportion_ci(0.999, method="exact")
        assert (row.ci_low, row.ci_high) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_the_lines_fit_a_terminal_and_end_with_a_verdict(rows):
    _, *lines, last = coverage.lines(rows)
    assert len(lines) == 2 * len(rows)
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines[::2]} == {"holds", "caught"}
    assert lines[1::2] == [f"       {row.population}" for row in rows]
    assert last == "All bounds hold, and every planted fault was caught."
    fault = next(row for row in rows if row.planted_fault)
    *_, failed, missed = coverage.lines([replace(rows[0], ok=False), replace(fault, ok=False)])
    assert failed == f"A bound fails more often than delta allows: {rows[0].bound}."
    assert missed.startswith(f"A planted fault was missed: {fault.bound}.")


def test_ten_thousand_trials_where_the_bounds_are_worst(monkeypatch):
    monkeypatch.setattr(coverage, "STUDIES", (synthetic._gibbs, synthetic._held_out))
    rows = coverage.run(10_000)
    assert [row for row in rows if not row.ok] == []
    exact = {
        "Seeger-Maurer": DELTA / bounds.xi(1),
        "Catoni, c = 8": DELTA,
        "Clopper-Pearson": DELTA,
        "Clopper-Pearson, delta/20": 1 - (1 - DELTA / 20) ** 20,
        "Clopper-Pearson, delta not divided": 1 - (1 - DELTA) ** 20,
    }
    assert {name: rate(rows, name) for name in exact} == pytest.approx(exact, abs=0.02)
    assert rate(rows, "Seeger-Maurer, n counted twice") > 0.5


def test_ten_thousand_trials_of_a_monitor(monkeypatch, at_full_size):
    monkeypatch.setattr(coverage, "STUDIES", (synthetic._watching,))
    rows = coverage.run(10_000 if at_full_size else coverage.FEWEST)
    assert [row for row in rows if not row.ok] == []


def test_ten_thousand_trials_of_every_risk(monkeypatch, at_full_size):
    monkeypatch.setattr(coverage, "STUDIES", risk_studies.STUDIES)
    rows = coverage.run(10_000 if at_full_size else 100)
    assert [row for row in rows if not row.ok] == []


def test_ten_thousand_trials_of_documents(monkeypatch, at_full_size):
    monkeypatch.setattr(coverage, "STUDIES", (risk_studies.of_documents,))
    rows = coverage.run(10_000 if at_full_size else 100)
    assert [row for row in rows if not row.ok] == []


def test_a_drop_without_its_second_bound_is_caught(monkeypatch):
    """The bound of `Tally`, had it forgotten to bound how often the reference alone errs."""
    monkeypatch.setattr(
        risk_studies.Tally,
        "bound",
        lambda tally, delta: bounds.clopper_pearson(tally.plus, n=tally.n, delta=delta) - tally.minus / tally.n,
    )
    rows = [coverage._row(v, DELTA) for v in risk_studies.drops(np.random.default_rng(0), 1000, DELTA)]
    assert [row for row in rows if not row.ok and not row.planted_fault]


def test_a_monitor_that_resets_its_wealth_is_caught(monkeypatch):
    """Beginning anew after every 100 examples, without paying for it."""
    path = synthetic.sequential.wealth_path

    def with_resets(values, *, limit):
        return None, np.concatenate([path(part, limit=limit)[1] for part in values.reshape(-1, 100)])

    monkeypatch.setattr(synthetic.sequential, "wealth_path", with_resets)
    steady = next(synthetic._watching(np.random.default_rng(0), 100, DELTA))
    assert not coverage._row(steady, DELTA).ok


def test_dependent_losses_have_the_limit_as_their_mean_given_the_past():
    losses = np.stack([synthetic._dependent_losses(np.random.default_rng(seed)) for seed in range(20)])
    after_error = losses[:, 1:][losses[:, :-1] == 1.0]
    assert set(after_error) == {synthetic.LIMIT}
    free = losses[losses != synthetic.LIMIT]
    assert stats.binomtest(int(free.sum()), free.size, synthetic.LIMIT).pvalue > 1e-3


def test_a_wrong_bound_is_caught(monkeypatch):
    seeger = bounds.seeger
    monkeypatch.setattr(bounds, "seeger", lambda risk, *, n, kl, delta: seeger(risk, n=3 * n, kl=kl, delta=delta))
    monkeypatch.setattr(coverage, "STUDIES", (synthetic._gibbs, synthetic._single_draw))
    gibbs_rows = {row.bound: row for row in coverage.run(200) if row.predictor == "Gibbs"}
    assert not gibbs_rows["Seeger-Maurer"].ok
    assert list(coverage.lines([gibbs_rows["Seeger-Maurer"]]))[1].startswith("FAILS")
    assert gibbs_rows["paper"].ok


def test_the_seed_decides_the_rows_and_progress_is_called_per_study(monkeypatch):
    monkeypatch.setattr(coverage, "STUDIES", (synthetic._held_out, synthetic._transfer))
    calls = []
    first = coverage.run(500, seed=1, progress=lambda *message: calls.append(message))
    assert calls == [("coverage", 1, 2, {}), ("coverage", 2, 2, {})]
    assert coverage.run(500, seed=1) == first
    assert coverage.run(500, seed=2) != first


@pytest.mark.parametrize(("trials", "delta", "message"), [(59, 0.05, "trials is 59"), (60, 1.0, "delta is 1.0")])
def test_bad_trials_and_deltas_are_refused(trials, delta, message):
    with pytest.raises(ValueError, match=message):
        coverage.run(trials, delta=delta)


# --- The populations.


@pytest.mark.parametrize("networks", [1, 10_000])
def test_the_worst_case_of_seeger_is_no_error_at_all(networks):
    n, kl = 50, math.log(networks)
    worst = synthetic.worst_case(
        lambda k, n: bounds.seeger(k / n, n=n, kl=kl, delta=DELTA), sizes=(n,), networks=networks
    )
    chance = DELTA / (bounds.xi(n) * networks)
    assert worst == pytest.approx((n, 1.0 - chance ** (1 / n), 1.0 - (1.0 - chance) ** networks), rel=1e-9)


def test_the_worst_case_is_the_worst_of_all_risks():
    n, networks = 20, 100

    def bound(k, n):
        return bounds.catoni(k / n, n=n, kl=math.log(networks), delta=DELTA, c=1.0)

    _, _, worst = synthetic.worst_case(bound, sizes=(n,), networks=networks)
    levels = np.array([bound(k, n) for k in range(n + 1)])
    rates = []
    for risk in np.linspace(0.001, 0.999, 999):
        tail = stats.binom.cdf((levels < risk).sum() - 1, n, risk)
        rates.append(1.0 - (1.0 - tail) ** networks)
    assert 0.9 * worst < max(rates) <= worst


def test_clopper_pearson_is_exact_where_it_is_worst():
    worst = synthetic.worst_case(lambda k, n: bounds.clopper_pearson(k, n=n, delta=DELTA), sizes=(30,))
    assert worst[2] == pytest.approx(DELTA, rel=1e-9)


def test_the_fewest_errors_have_the_law_of_a_minimum():
    fewest = synthetic._fewest(np.random.default_rng(0), 20_000, n=30, risk=0.2, networks=50)
    counts = np.bincount(fewest, minlength=31)
    above = stats.binom.sf(np.arange(-1, 31), 30, 0.2) ** 50
    expected = 20_000 * -np.diff(above)
    big = expected > 5
    assert (
        stats.chisquare(
            np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
        ).pvalue
        > 1e-3
    )


def testever_below_checks_every_time():
    def bound(k, t):
        return montecarlo.chernoff(k / t, draws=t, delta=0.2)

    below = synthetic.ever_below(np.random.default_rng(3), 40, bound, means=0.4, risk=0.4, draws=30)
    errors = (np.random.default_rng(3).random((40, 30)) < 0.4).cumsum(axis=1)
    expected = [any(bound(int(k), t) < 0.4 for t, k in enumerate(row, start=1)) for row in errors]
    assert below.tolist() == expected
    assert 0 < below.sum() < 40


@pytest.fixture(scope="module")
def networks():
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((synthetic.HIDDEN, synthetic.INPUTS)), rng.standard_normal(synthetic.HIDDEN)
    return w, v, *synthetic.small_networks(w, v)


def test_the_small_networks_are_pruned_torch_networks(networks):
    w, v, probability, wrong, _ = networks
    assert probability.sum() == pytest.approx(1.0)
    assert wrong[-1] @ probability == pytest.approx(synthetic.NOISE)
    x = torch.tensor([[1.0 if i >> j & 1 else -1.0 for j in range(synthetic.INPUTS)] for i in range(32)]).double()
    for mask in (0, 1, 1234, 4095):
        gates = torch.tensor([mask >> i & 1 for i in range(12)])
        first, last = torch.nn.Linear(5, 2, bias=False).double(), torch.nn.Linear(2, 1, bias=False).double()
        with torch.no_grad():
            first.weight.copy_(torch.tensor(w) * gates[:10].reshape(2, 5))
            last.weight.copy_(torch.tensor(v) * gates[10:])
            is_class_one = (torch.nn.Sequential(first, torch.nn.ReLU(), last)(x)[:, 0] > 0).numpy()
        for label in (0, 1):
            assert np.array_equal(wrong[mask, label::2], is_class_one != label)


def test_the_small_posteriors_are_spike_and_slab_distributions(networks):
    *_, wrong, gibbs = networks
    centre, kind = 1234, 2
    bits = np.arange(4096)[:, None] >> np.arange(12) & 1
    keep = np.where(bits[centre] == 1, 1.0 - synthetic.FLIPS[kind], synthetic.FLIPS[kind])
    q = np.where(bits == 1, keep, 1.0 - keep).prod(axis=1)
    assert np.allclose(q @ wrong, gibbs[kind, centre], atol=1e-12)

    def slab(keep_prob):
        zero = torch.zeros(12)
        return spikeslab.SpikeSlab({"w": torch.as_tensor(keep_prob)}, {"w": zero}, {"w": torch.tensor(0.0)}, {}, 12)

    kl = 12 * bounds.kl_bernoulli(synthetic.FLIPS[kind], 0.5)
    assert float(spikeslab.kl(slab(keep), slab(np.full(12, 0.5)))) == pytest.approx(kl)
    assert (q * np.log(q * 4096)).sum() == pytest.approx(kl)
