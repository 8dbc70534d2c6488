"""pp.choose: posteriors of one prior are tried by draws of their own, and the best is certified at no price."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.certification import certify, drawn_networks

FAST: dict[str, Any] = {"draws": 300, "choosing_draws": 100}


class Run(NamedTuple):
    """Networks that draw from several posteriors of one prior."""

    split: Any
    prior: pp.SpikeSlab
    models: dict[str, nn.Module]


@cache
def trained() -> Run:
    torch.manual_seed(0)
    split = pp.data.digits(prior_fraction=0.5, seed=0, unlabelled=50)
    model = pp.models.mlp(64, 10, hidden=(32,))
    pp.fit(model, split.prior, pp.Config(epochs=5, lr=0.05))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.8)
    pp.attach(model, pp.block_isotropic(model, mask, eps=1e-2, std=0.03))
    prior = pp.read(model)
    models = {f"kl_weight {weight}": copy.deepcopy(model) for weight in (0.3, 1.0, 30.0)}
    config = pp.Config(epochs=3, lr=0.05, gate_lr=None)
    pp.fit_posterior(list(models.values()), [prior] * 3, split, config, kl_weight=[0.3, 1.0, 30.0])
    narrow = pp.attach(pp.harden(copy.deepcopy(model)), replace(prior, std={k: s * 0.9 for k, s in prior.std.items()}))
    pp.fit_posterior(narrow, prior, split, pp.Config(epochs=0))
    return Run(split, prior, models | {"std 0.027": narrow})


def chosen(models: Any = None, **options: Any) -> pp.Choice:
    run = trained()
    arguments = {"prior": run.prior, "split": run.split} | FAST | options
    return pp.choose(run.models if models is None else models, **arguments)


def test_the_best_is_certified_at_no_price(tmp_path: Path) -> None:
    choice = chosen()
    assert choice.name == min(choice.table, key=lambda row: row["bound"])["name"]
    assert choice.model is trained().models[choice.name]
    assert [row["name"] for row in choice.table] == list(trained().models)
    ledger = choice.certificate.ledger
    assert (ledger.certified, ledger.grid) == (1, 1)
    assert (ledger.pac_bayes_each, ledger.monte_carlo_each) == pytest.approx((0.04, 0.01))
    assert pp.verify(choice.certificate.save(tmp_path)).valid
    alone = pp.certify(choice.model, trained().prior, trained().split, draws=300)
    assert choice.certificate.record == alone.record
    assert f"-> {choice.name}" in str(choice)
    assert f"{choice.name!r} of 4 posteriors" in repr(choice)


def test_draws_that_choose_are_of_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, original = [], drawn_networks.monte_carlo

    def watched(*args: Any, **options: Any) -> Any:
        seeds.append(options["seed"])
        return original(*args, **options)

    monkeypatch.setattr(drawn_networks, "monte_carlo", watched)
    choice = chosen()
    *choosing, of_q, of_p = seeds
    assert len(set(choosing)) == 1  # the same noise for all, so that they can be compared
    assert len(choosing) == len(choice.table)
    drawn = choice.certificate.pac_bayes
    assert (of_q, of_p) == tuple(drawn["monte_carlo"][whose]["seed"] for whose in ("posterior", "prior"))
    certifying = {of_q, of_p, drawn["single_draw"]["seed"], drawn["thresholded"]["seed"]}
    assert len(certifying | set(choosing)) == 5


def test_a_generator_may_train_one_network_again_and_again() -> None:
    run = trained()
    model = copy.deepcopy(run.models["kl_weight 1.0"])

    def posteriors() -> Iterator[tuple[str, nn.Module]]:
        for epochs in (3, 0):
            pp.attach(pp.harden(model), run.prior)
            pp.fit_posterior(model, run.prior, run.split, pp.Config(epochs=epochs, lr=0.05, gate_lr=None))
            yield f"epochs {epochs}", model

    choice = chosen(posteriors())
    assert choice.name == "epochs 3"
    assert choice.model is not model
    assert choice.certificate.record["hashes"]["posterior"] == pp.read(choice.model).hash != pp.read(model).hash


def test_every_family_can_be_chosen_by() -> None:
    for family in certify.bounds_table.FAMILIES:
        choice = chosen(family=family, expected_risk=0.2 if family == "catoni" else None)
        assert choice.certificate.record["claim"]["family"] == family


def test_a_chosen_posterior_can_be_sealed() -> None:
    run = trained()
    commitment = pp.commit(run.prior, run.split, draws=300)
    choice = chosen()
    sealed = commitment.sealed(choice.model)
    options = {"draws": 300, "commitment": sealed, "beacon": "9f2c51d0a3b6e874"}
    assert pp.certify(choice.model, run.prior, run.split, **options).record["commitment"]["seal"] == sealed.seal


# --- What is refused.


def test_nothing_to_choose_from_is_refused() -> None:
    for nothing in ({}, [], iter(())):
        with pytest.raises(ValueError, match="there is no posterior to choose from"):
            chosen(nothing)


def test_a_claim_about_single_networks_has_a_price() -> None:
    for family in ("single_draw", "thresholded", "held_out"):
        with pytest.raises(ValueError, match=f"family is '{family}', whose choice has a price: the best of m networks"):
            chosen(family=family)
    with pytest.raises(ValueError, match="family 'luck' is unknown"):
        chosen(family="luck")


def test_a_posterior_of_another_prior_is_refused() -> None:
    run = trained()
    other = replace(run.prior, std={name: 0.9 * std for name, std in run.prior.std.items()})
    with pytest.raises(ValueError, match=r"posterior 'kl_weight 0.3': fit_posterior was run with another prior"):
        chosen(prior=other, declare="the std was written in this test")
    fresh = pp.attach(pp.models.mlp(64, 10, hidden=(32,)), run.prior)
    with pytest.raises(ValueError, match=r"posterior 'untrained': .* no receipt that the prior was written"):
        chosen({**run.models, "untrained": fresh})


def test_a_posterior_whose_rest_moved_is_refused() -> None:
    moved = copy.deepcopy(trained().models["kl_weight 1.0"])
    with torch.no_grad():
        next(p for name, p in moved.named_parameters() if name.endswith("bias")).add_(1e-3)
    with pytest.raises(ValueError, match=r"posterior 'moved': .*bias lies outside Q but differs"):
        chosen({"moved": moved})


def test_what_is_no_posterior_is_refused() -> None:
    models = trained().models
    with pytest.raises(ValueError, match="models is one network"):
        chosen(models["kl_weight 1.0"])
    with pytest.raises(ValueError, match="a posterior is given as "):
        chosen(list(models.values()))
    with pytest.raises(ValueError, match="two posteriors have the name 'a'"):
        chosen([("a", models["kl_weight 1.0"]), ("a", models["kl_weight 0.3"])])
    with pytest.raises(ValueError, match=r"posterior 'plain': .* has no stochastic masks"):
        chosen({"plain": pp.models.mlp(64, 10, hidden=(32,))})
    with pytest.raises(ValueError, match="draws is 0; at least 1 is needed"):
        chosen(choosing_draws=0)
