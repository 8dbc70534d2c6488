"""The rules of a certificate: how delta is spent, how tries are counted, and every broken rule refused by its name."""

import copy
import dataclasses
import hashlib
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune import bounds
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import rules, tries
from pacprune.certification.bounds_table import FAMILIES
from pacprune.data import trace
from pacprune.data.splits import Split
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_masks, draw_weights, log_ratio

FAST: dict[str, Any] = {"draws": 300, "tolerance": 1}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def digits(**changed: Any) -> Split:
    """The split of all tests here, with some fields changed."""
    return dataclasses.replace(_digits(), **changed)


@cache
def _digits() -> Split:
    return pp.data.digits(unlabelled=150)


def prior_of(split: Split, *, std: float = 0.02, fit: Any = None) -> tuple[nn.Module, SpikeSlab]:
    model = network()
    pp.fit(model, split.prior if fit is None else fit, pp.Config(epochs=4, lr=0.2))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.6)
    pp.attach(model, pp.block_isotropic(model, mask, eps=0.01, std=std))
    return model, pp.read(model)


@cache
def issued() -> SimpleNamespace:
    """A certificate and everything that it was made from; no test may change them in place."""
    trace._looks.clear()  # of the test that asks first
    split = digits()
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=2, lr=0.1))
    return SimpleNamespace(
        split=split, model=model, prior=prior, posterior=pp.read(model), cert=pp.certify(model, prior, split, **FAST)
    )


def certify_again(**changed: Any) -> pp.Certificate:
    run = issued()
    arguments = {"model": run.model, "prior": run.prior, "split": digits()} | FAST | changed
    return pp.certify(arguments.pop("model"), arguments.pop("prior"), arguments.pop("split"), **arguments)


# --- What one asks for.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_declared_beforehand(family: str) -> None:
    cert = certify_again(family=family)
    assert cert.record["claim"] == {"family": family, "bound": cert.bounds[family]}
    assert cert.bound == issued().cert.bounds[family]
    assert cert.ledger.delta == pytest.approx(0.05)
    assert (cert.ledger.reference > 0) == (family == "excess")


def test_a_smaller_delta_costs() -> None:
    small, usual = certify_again(delta=0.001), issued().cert
    assert all(small.bounds[name] > usual.bounds[name] for name in usual.bounds)
    assert small.statement.startswith("With probability at least 99.9 % ")
    assert small.ledger.delta == pytest.approx(0.001)


def test_sampling_stops_when_the_slack_is_small_enough() -> None:
    run, calls = issued(), []
    cert = certify_again(draws=3000, tolerance=0.5, progress=lambda *sign: calls.append(sign[:3]))
    assert cert.draws == 1000
    assert [stage for stage, done, _ in calls if done == cert.draws] == ["posterior draws", "prior draws"]
    strict = certify_again(draws=4000, tolerance=0.006)
    plus, minus = (strict.tensors["draws.safetensors"][f"posterior/{sign}"].sum() for sign in ("plus", "minus"))
    estimate = strict.record["reference"]["errors"] / strict.n + int(plus - minus) / (25 * strict.draws)
    assert strict.risk_upper - estimate <= 0.006
    assert cert.draws < strict.draws < 4000
    first = strict.tensors["draws.safetensors"]["posterior/wrong"][:300]
    assert torch.equal(first, run.cert.tensors["draws.safetensors"]["posterior/wrong"])  # draw t is a function of t


def test_chernoff_is_an_option_that_does_not_stop_early(tmp_path: Path) -> None:
    cert = certify_again(method="chernoff", draws=1100, tolerance=0.5)
    assert cert.draws == 1100
    assert cert.risk_upper == cert.record["monte_carlo"]["posterior"]["chernoff"]
    assert pp.verify(cert.save(tmp_path)).valid
    with pytest.raises(ValueError, match="method 'luck' is unknown"):
        certify_again(method="luck")


def test_a_posterior_without_slabs_or_without_training() -> None:
    split = digits()
    model, prior = prior_of(split, std=0.0)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.1))
    assert 0 < pp.certify(model, prior, split, **FAST).kl < math.inf
    split = digits()
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    cert = pp.certify(model, prior, split, **FAST)
    assert 0 <= cert.kl < 1e-12
    assert cert.record["hashes"]["prior"] == cert.record["hashes"]["posterior"]
    assert cert.record["single_draw"]["log_ratio"] == pytest.approx(0, abs=1e-9)


# --- The same certificate every time, and every other one counted.


def seed_of(base: str, purpose: str) -> int:
    """A seed as docs and verifiers have it: 63 bits of SHA-256 of what the draws follow from, and their purpose."""
    return int(hashlib.sha256(f"{base}/{purpose}".encode()).hexdigest()[:16], 16) >> 1


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a count that begins with this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "pacprune" / tries.FILE


def test_certifying_twice_gives_the_same_certificate_and_counts_once(ledger: Path, tmp_path: Path) -> None:
    run = issued()
    before = {n: t.clone() for n, t in run.model.state_dict().items()}
    state = torch.get_rng_state()
    before_noise = certify_again()
    torch.set_rng_state(state)
    torch.randn(3)
    after_noise = certify_again(model=pp.resample_(copy.deepcopy(run.model)))
    assert before_noise.record == after_noise.record
    assert before_noise.tries == after_noise.tries
    assert str(before_noise) == str(after_noise)
    assert len(ledger.read_text().splitlines()) == 1
    first, second = (cert.save(tmp_path / name) for cert, name in ((before_noise, "first"), (after_noise, "second")))
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    assert all(torch.equal(t, before[n]) for n, t in run.model.state_dict().items())


def test_every_seed_is_another_and_follows_from_p_and_q() -> None:
    record = issued().cert.record
    base = f"{record['hashes']['prior']}/{record['hashes']['posterior']}"
    seeds = {
        "posterior draws": record["monte_carlo"]["posterior"]["seed"],
        "prior draws": record["monte_carlo"]["prior"]["seed"],
        "single draw": record["single_draw"]["seed"],
        "unlabelled draws": record["thresholded"]["seed"],
    }
    assert seeds == {purpose: seed_of(base, purpose) for purpose in seeds}
    assert len(set(seeds.values())) == 4
    assert all(0 <= seed < 2**63 for seed in seeds.values())


def test_a_second_prior_on_the_same_examples_is_counted_and_both_numbers_are_printed(ledger: Path) -> None:
    split, certs = digits(), []
    for std in (0.02, 0.03):
        model, prior = prior_of(split, std=std)
        pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
        certs.append(pp.certify(model, prior, split, **FAST))
    first, second = (cert.tries for cert in certs)
    assert (first.number, first.declared, second.number, second.declared) == (1, 1, 2, 1)
    assert "certificate number 1 on these examples on this machine; 1 declared and paid for" in str(certs[0])
    undeclared = pp.certify(model, prior, split, delta=0.05 / 6, **FAST).bounds["seeger"]
    assert second.undeclared_bound == pytest.approx(undeclared, abs=1e-12)
    assert second.undeclared_bound > certs[1].bound
    assert f"take {undeclared:.4f} instead, the bound at delta / (2 x 3)" in str(certs[1])
    assert certs[1].statement.endswith(f"is at most {rounded_up(certs[1].bound)}.")
    paid = pp.certify(model, prior, split, grid=2, **FAST)
    assert (paid.tries.number, paid.tries.declared, paid.ledger.grid) == (2, 2, 2)
    assert "instead" not in str(paid)
    assert all(paid.bounds[name] > certs[1].bounds[name] for name in paid.bounds)
    assert paid.bounds["held_out"] == bounds.clopper_pearson(paid.record["reference"]["errors"], n=paid.n, delta=0.025)


def test_a_choice_among_certificates_is_paid_for() -> None:
    ten, usual = certify_again(certified=10), issued().cert
    assert ten.ledger.certified == 10
    # The held-out network is the thresholded prior: posteriors of one prior share it.
    assert [name for name in usual.bounds if ten.bounds[name] <= usual.bounds[name]] == ["held_out"]
    assert "a choice among 10 certificates" in str(ten)
    # Only the draws have to be paid for: the theorem holds for all posteriors of a prior at once.
    risk, rates = ten.risk_upper, {"n": ten.n, "kl": ten.kl, "delta": 0.04}
    assert ten.bounds["seeger"] == bounds.seeger(risk, **rates)
    assert risk > usual.risk_upper
    drawn = ten.pac_bayes["single_draw"]
    assert ten.bounds["single_draw"] == bounds.disintegrated(
        drawn["errors"], n=ten.n, log_ratio=drawn["log_ratio"], delta=0.005
    )


SHARES = {"headline": (2, 0.5), "rest": (10, 0.5)}


def test_a_plan_divides_delta_by_declared_shares(tmp_path: Path) -> None:
    first, other = (certify_again(shares=SHARES, group=group) for group in SHARES)
    assert first.record["shares"] == {
        "group": "headline",
        "groups": {
            "headline": {"certificates": 2, "share": 0.5},
            "rest": {"certificates": 10, "share": 0.5},
        },
    }
    assert (first.ledger.share, other.ledger.share) == (0.25, 0.05)
    equal = certify_again(grid=12)
    assert all(first.bounds[name] < equal.bounds[name] < other.bounds[name] for name in first.bounds)
    assert first.tries.declared == 12
    assert "any number of its posteriors may have been tried" in " ".join(first.record["assumptions"])
    assert "times the 12 certificates that share delta" in " ".join(first.record["assumptions"])
    assert pp.verify(first.save(tmp_path)).valid


@pytest.mark.parametrize(
    ("shares", "group", "words"),
    [
        ({"a": (1, 0.6), "b": (2, 0.5)}, "a", "add up to 1.1, but must be 1 or less"),
        ({"a": (1, 0.6)}, "b", r"group is 'b' and shares has \['a'\]"),
        (None, "b", "give both"),
        ({"a": (1, 0.6)}, None, "give both"),
        ({"a": (0, 0.6)}, "a", r"the share 'a' is \(0, 0.6\)"),
        ({"a": (1, 0.0)}, "a", r"the share 'a' is \(1, 0.0\)"),
        ({'"': (1, 0.5)}, '"', "give a plain name"),
    ],
)
def test_impossible_shares_are_refused(shares: dict[str, tuple[int, float]], group: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        certify_again(shares=shares, group=group)


# --- Rules that must hold.


def test_parts_that_overlap_are_refused() -> None:
    split = _digits()
    first, last = split.bound.subset(torch.arange(5)), torch.arange(5, len(split.bound))
    joined = dataclasses.replace(
        split.prior,
        **{field: torch.cat([getattr(split.prior, field), getattr(first, field)]) for field in ("x", "y", "index")},
    )
    n = len(split.bound)
    with pytest.raises(ValueError, match=f"prior and bound share 5 of {n} examples; they must be disjoint"):
        certify_again(split=digits(prior=joined))
    with pytest.raises(ValueError, match="bound and unlabelled share 5 of 5 examples"):
        certify_again(split=digits(unlabelled=dataclasses.replace(first, name="unlabelled")))
    with pytest.raises(ValueError, match="another bound set"):
        certify_again(split=digits(bound=split.bound.subset(last), declared=True))


@pytest.mark.parametrize("constant", ["mean", "std"])
def test_standardisation_by_more_than_the_prior_part_is_refused(constant: str) -> None:
    split = _digits()
    shift, scale = (split.train.x.mean(), 1.0) if constant == "mean" else (0.0, split.train.x.std())
    parts = {
        name: dataclasses.replace(part, x=(part.x - shift) / scale)
        for name, part in (("prior", split.prior), ("bound", split.bound), ("unlabelled", split.unlabelled))
    }
    with pytest.raises(ValueError, match=r"not standardised by the prior part.*use those of split\.prior"):
        certify_again(split=digits(**parts))


def test_honest_standardisation_of_awkward_columns_is_accepted() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(400, 4) * torch.tensor([1.0, 0.1, 0.0, 1e-3]) + torch.tensor([0.0, 5e3, 7.0, 300.0])
    rules.refuse_split(pp.data.split(x, torch.arange(400) % 2))


def test_what_lies_outside_q_is_frozen() -> None:
    model = copy.deepcopy(issued().model)
    with torch.no_grad():
        model[4].bias[1] += 1e-6
    with pytest.raises(ValueError, match=r"^4\.bias lies outside Q but differs from its value in the prior"):
        certify_again(model=model)
    model = copy.deepcopy(issued().model)
    model[2].running_var[3] *= 1.001
    with pytest.raises(ValueError, match=r"^2\.running_var lies outside Q"):
        certify_again(model=model)


def test_a_prior_that_changed_is_refused() -> None:
    run = issued()
    wider = dataclasses.replace(run.prior, std={n: 2 * s for n, s in run.prior.std.items()})
    with pytest.raises(ValueError, match=f"another prior \\({run.prior.hash[:12]}\\) than .*\\({wider.hash[:12]}\\)"):
        certify_again(prior=wider, declare="the width was doubled afterwards")


@pytest.mark.parametrize("case", ["fit", "validation", "snip", "batchnorm"])
def test_a_prior_that_saw_the_bound_set_is_refused(case: str) -> None:
    split, model = digits(), network()
    few = split.bound.subset(torch.arange(7))
    pp.fit(model, split.prior, pp.Config(epochs=0), validation=few if case == "validation" else None)
    if case == "fit":
        pp.fit(model, few, pp.Config(epochs=1, lr=0.0))
    elif case == "snip":
        pp.scores.snip(model, few)
    elif case == "batchnorm":
        pp.reestimate_batchnorm(model, few)
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.02))
    prior, n = pp.read(model), len(split.bound)
    with pytest.raises(ValueError, match=f"the prior has seen the bound set: 7 of its {n} examples"):
        pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="the prior has seen the bound set"):
        pp.certify(model, prior, split, **FAST)


def test_unlabelled_inputs_must_be_fresh() -> None:
    split = digits()
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.1), data=split.unlabelled.subset(torch.arange(9)))
    with pytest.raises(ValueError, match="the posterior has seen 9 of the 150 unlabelled inputs"):
        pp.certify(model, prior, split, **FAST)


def test_other_refusals() -> None:
    model = copy.deepcopy(issued().model)
    weights.notes(model).receipt = None
    with pytest.raises(ValueError, match=r"no receipt .* train Q with pp\.fit_posterior"):
        certify_again(model=model)
    with pytest.raises(ValueError, match="the prior has seen the bound set"):
        certify_again(prior=pp.read(issued().model))
    with pytest.raises(ValueError, match="family 'hoeffding' is unknown; declare one of seeger, catoni, excess"):
        certify_again(family="hoeffding")
    with pytest.raises(ValueError, match="expected_risk is 5; it must lie strictly between 0 and 1"):
        certify_again(family="catoni", expected_risk=5)
    with pytest.raises(ValueError, match="draws is 0"):
        certify_again(draws=0)
    with pytest.raises(ValueError, match="delta is 0"):
        certify_again(delta=0.0)
    with pytest.raises(ValueError, match="certified"):
        certify_again(certified=0)
    with pytest.raises(ValueError, match=r"pp\.attach"):
        certify_again(model=network())
    split = digits()
    model, prior = prior_of(split, std=0.0)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with torch.no_grad():
        attachment.sites(model)[0].mean.add_(0.1)
    with pytest.raises(ValueError, match="train the gates only, or give a std"):
        pp.certify(model, prior, split, **FAST)


def test_index_lists_of_ones_own_must_be_declared_random() -> None:
    x, y = _digits().train.x[:200], _digits().train.y[:200]
    lists = torch.arange(100), torch.arange(100, 200)
    with pytest.raises(ValueError, match=r"random.*split_declared_random=True"):
        pp.data.split(x, y, indices=lists)
    with pytest.raises(ValueError, match=r"100 of the indices lie outside 0\.\.199"):
        pp.data.split(x, y, indices=(lists[0], -1 - lists[0]), split_declared_random=True)
    split = pp.data.split(x, y, indices=lists, split_declared_random=True, classes=10)
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    cert = pp.certify(model, prior, split, **FAST)
    assert cert.record["split"]["declared"] is True
    declared, seeded = (" ".join(record["assumptions"]) for record in (cert.record, issued().cert.record))
    assert "the split is random, as the issuer declares" in declared
    assert "as the issuer declares" not in seeded
    assert "the seed of the split was fixed before" in seeded


# --- Deterministic networks.


def test_a_pruned_network_has_a_held_out_certificate() -> None:
    split, model = digits(), network()
    pp.osp(model, split.prior, pp.Config(epochs=3, lr=0.1), sparsity=0.7, dense=pp.Config(epochs=3, lr=0.2))
    cert = pp.certify_held_out(model, split, delta=0.01)
    errors = round(pp.error(model, split.bound) * cert.n)
    assert cert.bound == bounds.clopper_pearson(errors, n=cert.n, delta=0.01)
    assert (cert.kl, cert.draws, cert.risk, cert.risk_upper) == (0.0, 0, errors / cert.n, errors / cert.n)
    assert cert.sparsity == pp.sparsity(model) == pytest.approx(0.7, abs=1e-3)
    assert cert.statement.startswith(f"With probability at least 99 % over the draw of the {cert.n} bound examples, ")
    chosen = pp.certify_held_out(model, split, delta=0.01, certified=20)
    assert chosen.bound == bounds.clopper_pearson(errors, n=cert.n, delta=0.01 / 20)
    loaded = network()
    loaded.load_state_dict(cert.tensors["model.safetensors"], strict=True)
    assert pp.error(loaded, split.bound) == cert.risk
    pp.fit(model, split.train, pp.Config(epochs=1, lr=0.0))
    with pytest.raises(ValueError, match=f"the network has seen the bound set: {cert.n} of its {cert.n} examples"):
        pp.certify_held_out(model, split)
    with pytest.raises(ValueError, match=r"stochastic masks; call pp\.harden"):
        pp.certify_held_out(issued().model, split)


def test_the_best_of_several_networks_is_counted(ledger: Path) -> None:
    split = digits()
    model, rival = network(), network()
    pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
    pp.fit(rival, split.prior, pp.Config(epochs=1, lr=0.2))
    numbers = [pp.certify_held_out(subject, split).tries.number for subject in (model, model, rival, model)]
    assert numbers == [1, 1, 2, 1]  # the same network again is no choice
    cert = pp.certify_held_out(rival, split)
    expected = bounds.clopper_pearson(cert.record["reference"]["errors"], n=cert.n, delta=0.05 / 6)
    assert cert.tries.undeclared_bound == expected
    assert f"take {expected:.4f} instead" in str(cert)
    paid = pp.certify_held_out(rival, split, certified=2)
    assert paid.ledger.certified == 2
    assert "instead" not in str(paid)


def test_batch_statistics_in_evaluation_are_refused() -> None:
    split = digits()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10, track_running_stats=False)
    )
    with pytest.raises(ValueError, match="uses batch statistics in evaluation"):
        pp.certify_held_out(model, split)


def test_a_std_below_the_resolution_of_the_weights_has_no_density() -> None:
    split = digits()
    _, prior = prior_of(split)
    tiny = dataclasses.replace(prior, std={name: torch.tensor(1e-11) for name in prior.std})
    weights, mask = (f(tiny, seed=0, step=0) for f in (draw_weights, draw_masks))
    with pytest.raises(ValueError, match="stored in steps of"):
        log_ratio(tiny, tiny, weights, mask)
