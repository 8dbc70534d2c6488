"""The KL down-weighted in training: what fit_posterior does with kl_weight, what certify does not, and the figure."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import pacprune as pp
from pacprune.paper import kl_weight, pbp_stages
from pacprune.paper.frame import Job

SPLIT = pp.data.digits(seed=0)
CONFIG = pp.Config(epochs=3, lr=0.3, batch_size=64)


def attached(seed: int = 0) -> torch.nn.Module:
    model = pp.models.mlp(64, 10, hidden=(16,), seed=seed)
    pp.fit(model, SPLIT.prior, pp.Config(epochs=3, lr=0.1), seed=seed)
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
    return pp.attach(model, pp.block_isotropic(model, mask, eps=0.01, std=0.05), seed=seed)


def kl_and_history(weight: float | None, **options: Any) -> tuple[float, list[dict]]:
    """KL(Q||P) after training with this weight, and the history."""
    model = attached()
    prior = pp.read(model)
    options |= {} if weight is None else {"kl_weight": weight}
    history = pp.fit_posterior(model, prior, SPLIT, CONFIG, **options)
    return float(pp.kl(pp.read(model), prior)), history


def test_a_weight_of_1_is_the_bound_itself() -> None:
    (kl, rows), (plain_kl, plain_rows) = kl_and_history(1.0), kl_and_history(None)
    assert kl == plain_kl
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain_rows]


@pytest.mark.parametrize("objective", ["seeger", "paper"])
def test_a_smaller_weight_lets_q_go_further(objective: str) -> None:
    far, middle, near = (kl_and_history(d, objective=objective)[0] for d in (0.0, 0.1, 10.0))
    assert far > 2 * middle > 4 * near > 0


def test_the_weight_is_in_every_row_of_the_history() -> None:
    assert {row["kl_weight"] for row in kl_and_history(0.3)[1]} == {0.3}
    assert {row["kl_weight"] for row in kl_and_history(None)[1]} == {1.0}


def test_members_of_a_population_have_their_own_weights_and_end_as_they_would_alone() -> None:
    weights = [0.01, 1.0]
    models = [attached() for _ in weights]
    prior = pp.read(models[0])
    rows = pp.fit_posterior(models, prior, SPLIT, CONFIG, kl_weight=weights)
    assert {(row["member"], row["kl_weight"]) for row in rows} == set(enumerate(weights))
    for model, weight in zip(models, weights, strict=True):
        assert float(pp.kl(pp.read(model), prior)) == pytest.approx(kl_and_history(weight)[0], rel=1e-3)


def test_the_certificate_takes_the_whole_kl() -> None:
    model = attached()
    prior = pp.read(model)
    pp.fit_posterior(model, prior, SPLIT, CONFIG, kl_weight=0.001)
    certificate = pp.certify(model, prior, SPLIT, draws=100)
    whole = float(pp.kl(pp.read(model), prior))
    assert whole > 1
    assert certificate.kl == pytest.approx(whole, rel=1e-9)
    common = {"n": certificate.n, "kl": certificate.kl, "delta": certificate.ledger.pac_bayes_each}
    assert certificate.bound == pp.bounds.seeger(certificate.risk_upper, **common)


def test_another_weight_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    model, path = attached(), tmp_path / "posterior.pt"
    prior = pp.read(model)
    pp.fit_posterior(copy.deepcopy(model), prior, SPLIT, CONFIG, kl_weight=0.1, checkpoint=path, out=tmp_path)
    with pytest.raises(ValueError, match="checkpoint"):
        pp.fit_posterior(model, prior, SPLIT, CONFIG, kl_weight=0.2, checkpoint=path, out=tmp_path)


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_before_anything_is_written(weight: float, tmp_path: Path) -> None:
    model = attached()
    with pytest.raises(ValueError, match=r"kl_weight is .* at least 0"):
        pp.fit_posterior(model, pp.read(model), SPLIT, CONFIG, kl_weight=weight, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_rows_of_the_figure_pay_for_every_prior_and_every_posterior(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = kl_weight.SETTINGS["smoke"][0].changed(
        kl_weights=(0.001, 1.0),
        seeds=2,
        dense=pp.Config(epochs=2, lr=0.1),
        prior=pp.Config(epochs=20, lr=0.1),
        posterior=pp.Config(epochs=2, lr=0.3),
        draws=50,
    )
    certificates, certify = [], pbp_stages.certify
    monkeypatch.setattr(
        pbp_stages, "certify", lambda *a, **k: certificates.append(certify(*a, **k)) or certificates[-1]
    )
    rows = kl_weight.rows(tiny, job)
    cells = [(row["mapping"], row["kl_weight"], row["seed"]) for row in rows]
    assert sorted(cells) == [(m, d, s) for m in ("clamp", "sigmoid") for d in (0.001, 1.0) for s in (0, 1)]
    assert {(c.ledger.grid, c.ledger.certified) for c in certificates} == {(2, 4)}
    for seed in (0, 1):  # one prior for every weight, and more KL where it costs less
        of_seed = [row for row in rows if row["seed"] == seed]
        assert len({(row["prior_test_error"], row["held_out"]) for row in of_seed}) == 1
        far, near = sorted((row for row in of_seed if row["mapping"] == "sigmoid"), key=lambda row: row["kl_weight"])
        assert far["kl"] > near["kl"]
    for row in rows:
        assert row["bound"] <= row["paper_bound"] <= 1  # the theorem relaxes Seeger's bound
    monkeypatch.setattr(kl_weight, "_posteriors", lambda *_: pytest.fail("again"))
    assert kl_weight.rows(tiny, job) == rows
