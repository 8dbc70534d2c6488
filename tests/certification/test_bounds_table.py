"""Every row of the tables of bounds and of Monte-Carlo methods keeps what a row promises."""

import importlib
from functools import cache
from pathlib import Path

import pytest
from test_certify import FAST, certify_again, digits, issued, prior_of

import pacprune as pp
from pacprune.certification import bounds_table, decode
from pacprune.certification.bounds_table import BOUNDS, FAMILIES, RISK_BOUNDS

arithmetic = importlib.import_module("pacprune.certification.verify")


def test_the_verifier_knows_every_bound() -> None:
    assert set(arithmetic.SHARES) == set(BOUNDS)
    assert list(FAMILIES) == arithmetic.FAMILIES


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_spends_its_delta_as_the_verifier_expects(name: str) -> None:
    ledger = BOUNDS[name].ledger(0.05, grid=3, certified=2)
    assert (ledger.delta, ledger.candidates) == (pytest.approx(0.05), 6)
    shares = (ledger.monte_carlo / 0.05, ledger.reference / 0.05, ledger.unlabelled / 0.05)
    assert shares == pytest.approx(arithmetic.SHARES[name])


def test_the_account_of_version_2_divides_everything() -> None:
    evidence, counts = issued().cert.pac_bayes, decode.counts(issued().cert, "posterior")
    older = bounds_table.claimed_bound(evidence, counts, delta=0.05, certified=5, undivided=False)
    assert older == pytest.approx(bounds_table.claimed_bound(evidence, counts, delta=0.01), abs=1e-12)
    now = bounds_table.claimed_bound(evidence, counts, delta=0.05, certified=5)
    assert issued().cert.bound < now < older


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_lies_in_the_unit_interval_and_falls_with_delta(name: str) -> None:
    evidence, counts = issued().cert.pac_bayes, decode.counts(issued().cert, "posterior")
    values = [BOUNDS[name].value(evidence, counts, BOUNDS[name].ledger(delta)) for delta in (1e-6, 0.05, 0.5)]
    assert 1 >= values[0] > values[1] > values[2] > 0
    assert issued().cert.bounds[name] == values[1]


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_left_out_only_without_its_inputs(name: str) -> None:
    no_inputs = digits().unlabelled.subset(slice(0))
    assert (name in certify_again(split=digits(unlabelled=no_inputs, declared=True)).bounds) != BOUNDS[
        name
    ].needs_unlabelled
    assert name in issued().cert.bounds
    assert BOUNDS[name].label in str(issued().cert)


@cache
def after_a_look() -> pp.Certificate:
    """A certificate of a Q that was trained after something was evaluated on the bound examples."""
    split = digits()
    model, prior = prior_of(split)
    pp.error(model, split.bound)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    return pp.certify(model, prior, split, **FAST)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_about_one_drawn_network_needs_examples_that_nobody_looked_at(name: str, tmp_path: Path) -> None:
    cert = after_a_look()
    assert cert.pac_bayes["single_draw"]["fresh"] is False
    assert issued().cert.pac_bayes["single_draw"]["fresh"] is True
    assert (name in cert.bounds) != BOUNDS[name].needs_fresh
    report = pp.verify(cert.save(tmp_path))
    assert report.valid, report.failure


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", RISK_BOUNDS)
def test_every_declaration_gives_a_certificate_that_verifies(family: str, method: str, tmp_path: Path) -> None:
    cert = certify_again(family=family, method=method)
    assert cert.record["claim"]["family"] == family
    assert cert.pac_bayes["monte_carlo"]["method"] == method
    report = pp.verify(cert.save(tmp_path))
    assert report.valid, report.failure


@pytest.mark.parametrize("method", RISK_BOUNDS)
def test_a_risk_bound_is_above_the_risk_and_falls_with_delta(method: str) -> None:
    counts, stated = decode.counts(issued().cert, "posterior"), issued().cert.pac_bayes
    reference_risk = stated["reference"]["errors"] / stated["n"]
    values = [RISK_BOUNDS[method].upper(counts, reference_risk, delta) for delta in (1e-6, 0.01, 0.5)]
    assert 1 >= values[0] > values[1] > values[2] > counts.risk - 0.02  # the control variate moves the estimate
    assert bounds_table.slack(counts, reference_risk, values[1]) > 0


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"declare one of {', '.join(FAMILIES)}"):
        certify_again(family="vote")
    with pytest.raises(ValueError, match=f"use one of {', '.join(RISK_BOUNDS)}"):
        certify_again(method="hoeffding")
