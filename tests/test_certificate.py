"""The story on one slide as it is written, the certificate's numbers, its files, and everything that it refuses."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import pacprune as pp
from pacprune import bounds, certificate, layers, montecarlo, weights

STORY = """
split = pp.data.digits(prior_fraction=0.5, seed=0)
model = pp.models.mlp()
pp.fit(model, split.prior, pp.Config(epochs=30, lr=0.01))                  # stage 1
mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
pp.attach(model, pp.block_isotropic(model, mask, eps=1e-4, std=2e-3))
pp.fit(model, split.prior, pp.Config(epochs=30, lr=0.01, gate_lr=1.0))     # stage 2
prior = pp.read(model)
pp.fit_posterior(model, prior, split, pp.Config(epochs=30, lr=0.02), delta=0.05)
cert = pp.certify(model, prior, split, delta=0.05)                         # refuses if prior.seen touches split.bound
cert.save("digits-90"); print(cert)
"""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    found: dict[str, Any] = {"pp": pp, "folder": tmp_path_factory.mktemp("story")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found["folder"])
        exec(STORY, found)
    return SimpleNamespace(**found)


def test_the_story_runs_as_written(story: SimpleNamespace) -> None:
    cert = story.cert
    assert isinstance(cert, pp.Certificate)
    assert isinstance(story.prior, pp.SpikeSlab)
    assert cert.n == len(story.split.bound) == 719
    assert 0 < cert.risk < cert.risk_upper < cert.bound < 0.3
    assert cert.bound <= cert.paper
    assert cert.sparsity == pytest.approx(0.9, abs=1e-3)
    assert cert.kl < 10
    assert cert.risk == pytest.approx(pp.gibbs_error(story.model, story.split.bound, draws=50), abs=0.01)
    assert pp.gibbs_error(story.model, story.split.test) < cert.bound


def test_the_printed_certificate(story: SimpleNamespace) -> None:
    text = str(story.cert)
    assert story.cert.statement in text
    assert story.cert.winner in text
    assert str(story.cert.ledger) in text
    for name in ("Seeger-Maurer", "the paper's theorem", "Q = P", "held-out (Clopper-Pearson)"):
        assert name in text
    assert re.fullmatch(
        r"With probability at least 95 % over the draw of the 719 bound examples and of the 2,000 sampled networks, "
        r"the error rate on new data of a network drawn from Q \(expected sparsity 0\.9000\) is at most 0\.\d{4}\.",
        story.cert.statement,
    )
    shown = float(story.cert.statement.rsplit(" ", 1)[1].rstrip("."))
    assert story.cert.bound <= shown <= story.cert.bound + 1e-4  # rounded, but never down


def test_every_number_follows_from_the_saved_files(story: SimpleNamespace) -> None:
    folder = story.folder / "digits-90"
    assert sorted(p.name for p in folder.iterdir()) == ["certificate.json", "draws.json", "tensors.safetensors"]
    record, draws = (json.loads((folder / name).read_text()) for name in ("certificate.json", "draws.json"))
    tensors = {name: t.astype(np.float64) for name, t in load_file(folder / "tensors.safetensors").items()}
    kl = 0.0
    for name in [n.removeprefix("prior/mean/") for n in tensors if n.startswith("prior/mean/")]:
        (p, m, s), (p0, m0, s0) = (
            [tensors[f"{who}/{part}/{name}"] for part in ("keep_prob", "mean", "std")] for who in ("posterior", "prior")
        )
        kl += np.sum(p * np.log(p / p0) + (1 - p) * np.log((1 - p) / (1 - p0)))
        kl += np.sum(p / 2 * ((m - m0) ** 2 / s0**2 + s**2 / s0**2 - np.log(s**2 / s0**2) - 1))
    assert record["kl"] == pytest.approx(kl, rel=1e-5)
    ledger, n = record["ledger"], record["n"]
    assert ledger["delta"] == pytest.approx(0.05)
    assert len(draws["errors"]) == record["draws"] == 2000
    upper = montecarlo.betting([e / draws["batch"] for e in draws["errors"]], delta=ledger["monte_carlo"])
    assert record["risk"] == pytest.approx(sum(draws["errors"]) / (2000 * draws["batch"]))
    assert record["risk_upper"] == pytest.approx(upper)
    common = {"n": n, "kl": record["kl"], "delta": ledger["pac_bayes"]}
    assert record["bound"] == pytest.approx(bounds.seeger(upper, **common))
    assert record["paper"] == pytest.approx(bounds.paper(upper, **common))
    assert record["held_out"] == pytest.approx(bounds.clopper_pearson(record["held_out_errors"], n=n, delta=0.05))
    assert record["split"] | {"seed": 0, "prior": 718, "bound": 719, "prior_fraction": 0.5} == record["split"]
    assert record["statement"] == story.cert.statement
    assert set(record["files"]) == {"draws.json", "tensors.safetensors"}
    rest = {n.removeprefix("prior/rest/") for n in tensors if n.startswith("prior/rest/")}
    assert rest == {f"layers.{i}.bias" for i in (0, 2, 4)}


def test_the_held_out_baseline_is_the_thresholded_prior(story: SimpleNamespace) -> None:
    model = pp.models.mlp(64)
    pp.harden(pp.attach(model, story.prior))
    assert pp.sparsity(model) == pytest.approx(0.9, abs=1e-4)
    assert round(pp.error(model, story.split.bound) * 719) == story.cert.held_out_errors


# --- A small network, for the rules.

G = torch.Generator().manual_seed(1)
X = torch.randn(300, 4, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
SPLIT = pp.data.split(X, Y, prior_fraction=0.5, seed=0)


def trained(std: float = 0.02, fit: object = SPLIT.prior) -> tuple[nn.Module, pp.SpikeSlab]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    pp.fit(model, fit, pp.Config(epochs=10, lr=0.1, batch_size=16))
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
    pp.attach(model, pp.block_isotropic(model, mask, eps=0.01, std=std))
    return model, pp.read(model)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, pp.SpikeSlab]:
    model, prior = trained()
    pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=3, lr=0.1))
    return model, prior


def test_certifying_twice_gives_the_same_and_changes_nothing(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = small
    state, counters = torch.get_rng_state(), [int(s.sampler.step) for s in layers.sites(model)]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    one = pp.certify(model, prior, SPLIT, draws=50)
    pp.resample_(model)
    torch.randn(3)
    two = pp.certify(copy.deepcopy(model), prior, SPLIT, draws=50)
    assert one.as_dict() == two.as_dict()
    assert one.errors == two.errors
    torch.set_rng_state(state)
    three = pp.certify(model, prior, SPLIT, draws=80)
    assert three.errors[:50] == one.errors  # draw t is a function of t
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [int(s.sampler.step) - 1 for s in layers.sites(model)] == counters


def test_the_draws_depend_on_p_and_q(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    seeds = {
        certificate._seed(p, q, purpose) for p in "ab" for q in "ab" for purpose in ("posterior draws", "prior draws")
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_risk_is_an_unbiased_estimate(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = small
    cert = pp.certify(model, prior, SPLIT, draws=500)
    assert cert.risk == pytest.approx(pp.gibbs_error(model, SPLIT.bound, draws=300), abs=0.01)
    assert (cert.n, cert.batch, len(cert.errors)) == (150, 150, 500)


def test_q_equals_p(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = trained()
    pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=0))
    cert = pp.certify(model, prior, SPLIT, draws=100)
    assert 0 <= cert.kl < 1e-12
    assert cert.bound == pytest.approx(cert.q_equals_p, abs=0.03)


def test_without_a_std_only_the_gates_count() -> None:
    model, prior = trained(std=0.0)
    pp.fit_posterior(model, prior, SPLIT, pp.Config(epochs=2, lr=0.1))
    assert 0 < pp.certify(model, prior, SPLIT, draws=20).kl < math.inf


def test_a_grid_of_priors_pays_for_its_size(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    one, ten = (pp.certify(*small, SPLIT, draws=50, grid=grid) for grid in (1, 10))
    assert ten.errors == one.errors
    assert (ten.bound > one.bound, ten.held_out > one.held_out, ten.ledger.grid) == (True, True, 10)


def test_the_rest_is_frozen_by_rule(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = copy.deepcopy(small[0]), small[1]
    with torch.no_grad():
        model[3].bias[1] += 1e-6
    with pytest.raises(ValueError, match=r"^3\.bias lies outside Q but differs from its value in the prior"):
        pp.certify(model, prior, SPLIT, draws=1)
    model = copy.deepcopy(small[0])
    model.train()(SPLIT.bound.x)
    with pytest.raises(ValueError, match=r"^1\.running_mean lies outside Q"):
        pp.certify(model, prior, SPLIT, draws=1)


def test_a_receipt_is_needed_for_this_prior_and_this_bound_set(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = small
    fresh = copy.deepcopy(model)
    weights.notes(fresh).pop("receipt")
    with pytest.raises(ValueError, match=r"no receipt .* train Q with pp\.fit_posterior"):
        pp.certify(fresh, prior, SPLIT, draws=1)
    other = dataclasses.replace(prior, std={n: 2 * s for n, s in prior.std.items()})
    with pytest.raises(
        ValueError, match=f"another prior \\({prior.hash[:12]}\\) than the one given \\({other.hash[:12]}"
    ):
        pp.certify(model, other, SPLIT, draws=1)
    fewer = dataclasses.replace(SPLIT, bound=SPLIT.bound.subset(torch.arange(100)))
    with pytest.raises(ValueError, match="another bound set"):
        pp.certify(model, prior, fewer, draws=1)


def test_a_prior_that_saw_the_bound_set_is_refused(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = small
    seen = dataclasses.replace(prior, seen=weights.seen(model))  # the posterior's, which did see it
    with pytest.raises(ValueError, match="the prior has seen the bound set: 150 of its 150 examples"):
        pp.certify(model, seen, SPLIT, draws=1)
    with pytest.raises(ValueError, match="the prior has seen the bound set"):
        pp.certify(model, pp.read(model), SPLIT, draws=1)


def test_other_refusals(small: tuple[nn.Module, pp.SpikeSlab]) -> None:
    model, prior = small
    with pytest.raises(ValueError, match="draws is 0"):
        pp.certify(model, prior, SPLIT, draws=0)
    with pytest.raises(ValueError, match="delta is 0"):
        pp.certify(model, prior, SPLIT, delta=0.0)
    with pytest.raises(ValueError, match=r"pp\.attach"):
        pp.certify(nn.Linear(4, 3), prior, SPLIT)
    moved, start = trained(std=0.0)
    pp.fit_posterior(moved, start, SPLIT, pp.Config(epochs=0))
    with torch.no_grad():
        layers.sites(moved)[0].mean.add_(0.1)
    with pytest.raises(ValueError, match="train the gates only, or give a std"):
        pp.certify(moved, start, SPLIT, draws=1)


@pytest.mark.parametrize(
    ("bound", "q_equals_p", "held_out", "words"),
    [
        (0.10, 0.11, 0.09, "use the held-out one: it is tighter here"),
        (0.11, 0.10, 0.09, "use the held-out one: it is tighter here"),
        (0.10, 0.11, 0.12, "the posterior earned its KL"),
        (0.11, 0.10, 0.12, "Q = P is as good"),
        (0.10, 0.10, 0.10, "Q = P is as good"),
    ],
)
def test_the_winner_in_words(
    small: tuple[nn.Module, pp.SpikeSlab], bound: float, q_equals_p: float, held_out: float, words: str
) -> None:
    cert = dataclasses.replace(
        pp.certify(*small, SPLIT, draws=1), bound=bound, q_equals_p=q_equals_p, held_out=held_out
    )
    assert cert.winner.startswith(words)
    assert cert.as_dict()["winner"] == cert.winner


def test_saving_leaves_plain_files_only(small: tuple[nn.Module, pp.SpikeSlab], tmp_path: Path) -> None:
    cert = pp.certify(*small, SPLIT, draws=5)
    folder = cert.save(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    names = ["certificate.json", "draws.json", "tensors.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == names
    first = {name: (folder / name).read_bytes() for name in names}
    cert.save(folder)
    assert {name: (folder / name).read_bytes() for name in names} == first
    tensors = load_file(folder / "tensors.safetensors")
    assert "prior/rest/1.running_var" in tensors
    assert not any(name.startswith("posterior/rest") for name in tensors)
