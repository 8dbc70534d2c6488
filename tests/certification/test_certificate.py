"""The story on one slide, what a certificate states and how it follows from its files; saving and loading."""

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
from test_certify import certify_again, digits, issued, network
from torch import nn

import pacprune as pp
from pacprune import bounds
from pacprune.bounds import montecarlo
from pacprune.certification import certificate, decode, drawn_networks
from pacprune.certification.bounds_table import BOUNDS
from pacprune.masking import attachment
from pacprune.masking.spikeslab import draw_masks, draw_weights, kl, log_ratio

STORY = """
split = pp.data.digits(prior_fraction=0.5, seed=0)
model = pp.models.mlp(hidden=(40,))
pp.fit(model, split.prior, pp.Config(epochs=30, lr=0.01))                  # stage 1
mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
pp.attach(model, pp.block_isotropic(model, mask, eps=1e-4, std=2e-3))
pp.fit(model, split.prior, pp.Config(epochs=30, lr=0.01, gate_lr=1.0))     # stage 2
prior = pp.read(model)
pp.fit_posterior(model, prior, split, pp.Config(epochs=30, lr=0.02), delta=0.05)
cert = pp.certify(model, prior, split, delta=0.05)                         # refuses if prior.seen touches split.bound
cert.save("digits-90"); print(cert)
"""
FILES = [
    "certificate.json",
    "distributions.safetensors",
    "draws.safetensors",
    "single_draw.safetensors",
    "thresholded.safetensors",
]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    names: dict[str, Any] = {"pp": pp, "folder": tmp_path_factory.mktemp("story")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(names["folder"])
        exec(STORY, names)
    return SimpleNamespace(**names)


def test_the_story_runs_as_written(story: SimpleNamespace) -> None:
    cert = story.cert
    assert isinstance(cert, pp.Certificate)
    assert isinstance(story.prior, pp.SpikeSlab)
    assert cert.n == len(story.split.bound) == 719
    assert 0 < cert.risk < cert.risk_upper < cert.bound < 0.4
    assert cert.bound <= cert.bounds["paper"]
    assert cert.sparsity == pytest.approx(0.9, abs=1e-3)
    assert cert.kl < 10
    assert cert.risk == pytest.approx(pp.gibbs_error(story.model, story.split.bound, draws=50), abs=0.01)
    assert pp.gibbs_error(story.model, story.split.test) < cert.bound
    assert pp.verify(story.folder / "digits-90").valid


def test_the_printed_certificate(story: SimpleNamespace) -> None:
    text = str(story.cert)
    for words in (story.cert.statement, story.cert.winner, str(story.cert.ledger), f"KL {story.cert.kl:.3f} nats"):
        assert words in text
    for name, bound in story.cert.bounds.items():
        assert re.search(re.escape(BOUNDS[name].label) + r" +" + certificate.rounded_up(bound), text)
    assert text.count("->") == 1
    assert str(story.cert.tries) in text
    assert "a choice among" not in text  # which would have to be paid for
    sentence = re.fullmatch(
        r"With probability at least 95 % over the draw of the 719 bound examples and of the ([\d,]+) sampled networks, "
        r"the error rate on new data of a network drawn from Q \(expected sparsity (0\.\d{4})\) "
        r"is at most (0\.\d{4})\.",
        story.cert.statement,
    )
    assert sentence
    assert int(sentence[1].replace(",", "")) == story.cert.draws
    assert story.cert.sparsity - 1e-4 <= float(sentence[2]) <= story.cert.sparsity + 1e-6  # rounded, but never up
    assert story.cert.bound <= float(sentence[3]) <= story.cert.bound + 1e-4  # rounded, but never down


def test_the_kl_and_the_bound_follow_from_the_saved_files(story: SimpleNamespace) -> None:
    folder = story.folder / "digits-90"
    assert sorted(p.name for p in folder.iterdir()) == FILES
    record = json.loads((folder / "certificate.json").read_text())
    tensors = {name: t.astype(np.float64) for name, t in load_file(folder / "distributions.safetensors").items()}
    divergence = 0.0
    for name in record["kl_per_tensor"]:
        (p, m, s), (p0, m0, s0) = (
            [tensors[f"{who}/{part}/{name}"] for part in ("keep_prob", "mean", "std")] for who in ("posterior", "prior")
        )
        divergence += np.sum(p * np.log(p / p0) + (1 - p) * np.log((1 - p) / (1 - p0)))
        divergence += np.sum(p / 2 * ((m - m0) ** 2 / s0**2 + s**2 / s0**2 - np.log(s**2 / s0**2) - 1))
    assert record["kl"] == pytest.approx(divergence, rel=1e-5)
    upper = record["monte_carlo"]["posterior"]["risk_upper"]
    expected = bounds.seeger(upper, n=719, kl=record["kl"], delta=record["bounds"]["seeger"]["ledger"]["pac_bayes"])
    assert record["claim"] == {"family": "seeger", "bound": pytest.approx(expected)}
    assert {name.removeprefix("rest/") for name in tensors if name.startswith("rest/")} == {
        "layers.0.bias",
        "layers.2.bias",
    }


def test_the_held_out_baseline_is_the_thresholded_prior(story: SimpleNamespace) -> None:
    model = pp.models.mlp(64, hidden=(40,))
    pp.harden(pp.attach(model, story.prior))
    assert pp.sparsity(model) == pytest.approx(0.9, abs=1e-3)
    assert round(pp.error(model, story.split.bound) * 719) == story.cert.record["reference"]["errors"]


# --- What is stated.


def test_the_numbers_follow_from_the_counts_and_the_kl() -> None:
    run = issued()
    record, n = run.cert.record, len(run.split.bound)
    assert (record["n"], record["kind"], record["claim"]["family"]) == (n, "pac-bayes", "seeger")
    divergence = float(kl(run.posterior, run.prior))
    assert divergence <= record["kl"] <= divergence * (1 + 1e-9)
    assert sum(record["kl_per_tensor"].values()) <= record["kl"]
    draws = run.cert.tensors["draws.safetensors"]
    plain = attachment.harden(copy.deepcopy(run.model))
    reference = int(drawn_networks.errors(plain, drawn_networks.thresholded(run.prior), run.split.bound).sum())
    assert record["reference"]["errors"] == reference
    for whose in ("posterior", "prior"):
        stated, wrong = record["monte_carlo"][whose], draws[f"{whose}/wrong"]
        assert stated["draws"] == len(wrong) == 300
        assert stated["risk"] == int(wrong.sum()) / (300 * 25)
        difference = (draws[f"{whose}/plus"] - draws[f"{whose}/minus"]).numpy() / 25
        assert stated["risk_upper"] >= reference / n + montecarlo.betting_difference(difference, delta=0.01)
        assert stated["risk_upper"] == pytest.approx(
            reference / n + montecarlo.betting_difference(difference, delta=0.01)
        )
        # The reference's errors on the minibatches, which the counts imply, are a sample of its errors on all.
        on_batches = int((wrong - draws[f"{whose}/plus"] + draws[f"{whose}/minus"]).sum()) / (300 * 25)
        assert on_batches == pytest.approx(reference / n, abs=0.02)
    upper = record["monte_carlo"]["posterior"]["risk_upper"]
    common = {"n": n, "kl": record["kl"], "delta": 0.04}
    assert run.cert.bound == pytest.approx(bounds.seeger(upper, **common))
    assert run.cert.bounds["paper"] == pytest.approx(bounds.paper(upper, **common))
    assert run.cert.bounds["catoni"] == pytest.approx(bounds.catoni(upper, **common))
    assert run.cert.bounds["vote"] == pytest.approx(min(1, 2 * run.cert.bound))
    assert run.cert.bounds["held_out"] == pytest.approx(bounds.clopper_pearson(reference, n=n, delta=0.05))
    prior_risk = record["monte_carlo"]["prior"]["risk_upper"]
    assert run.cert.bounds["q_equals_p"] == pytest.approx(bounds.seeger(prior_risk, n=n, kl=0.0, delta=0.04))


def test_the_excess_loss_bound_takes_both_sides_from_the_draws() -> None:
    run = issued()
    plus, minus = (run.cert.tensors["draws.safetensors"][f"posterior/{w}"].numpy() / 25 for w in ("plus", "minus"))
    expected = bounds.excess_loss(
        reference_errors=run.cert.record["reference"]["errors"],
        plus=montecarlo.betting(plus, delta=0.005),
        minus=montecarlo.betting_lower(minus, delta=0.005),
        n=run.cert.n,
        kl=run.cert.kl,
        delta_reference=0.01,
        delta=0.03,
    )
    assert run.cert.bounds["excess"] == pytest.approx(expected)


def test_every_bound_is_above_its_empirical_risk_and_pays_its_ledger() -> None:
    run = issued()
    record, n = run.cert.record, run.cert.n
    least = {
        "q_equals_p": record["monte_carlo"]["prior"]["risk"],
        "single_draw": record["single_draw"]["errors"] / n,
        "thresholded": record["thresholded"]["errors"] / n,
        "held_out": record["reference"]["errors"] / n,
    }
    assert set(record["bounds"]) == {"seeger", "paper", "catoni", "excess", "vote", *least}
    for name, entry in record["bounds"].items():
        assert least.get(name, run.cert.risk) < entry["bound"] <= 1
        ledger = entry["ledger"]
        shares = [ledger[share] for share in ("pac_bayes", "monte_carlo", "reference", "unlabelled")]
        assert sum(shares) == pytest.approx(0.05)
        assert ledger["delta"] == pytest.approx(0.05)
        assert (ledger["grid"], ledger["certified"]) == (1, 1)
    assert run.cert.risk == pytest.approx(pp.gibbs_error(copy.deepcopy(run.model), run.split.bound), abs=0.03)


def test_the_deterministic_networks_load_into_the_plain_model() -> None:
    run = issued()
    record, n = run.cert.record, len(run.split.bound)
    for network_name in ("single_draw", "thresholded"):
        model = network()
        model.load_state_dict(run.cert.tensors[f"{network_name}.safetensors"], strict=True)
        assert round(pp.error(model, run.split.bound) * n) == record[network_name]["errors"]
        assert pp.sparsity(model) == record[network_name]["sparsity"]
    assert record["thresholded"]["sparsity"] == pytest.approx(run.posterior.sparsity, abs=1 / run.posterior.total)
    assert record["sparsity"] == run.posterior.sparsity


def test_the_single_network_is_the_draw_of_its_seed() -> None:
    run = issued()
    stated, tensors = run.cert.record["single_draw"], run.cert.tensors
    weights, mask = (f(run.posterior, seed=stated["seed"], step=0) for f in (draw_weights, draw_masks))
    for name, keep in mask.items():
        bits = np.unpackbits(tensors["draws.safetensors"][f"single_draw/{name}"].numpy())[: keep.numel()]
        assert np.array_equal(bits.astype(bool), keep.reshape(-1).numpy())
        assert torch.equal(tensors["single_draw.safetensors"][name], weights[name])
    ratio = log_ratio(run.posterior, run.prior, weights, mask)
    assert ratio <= stated["log_ratio"] <= ratio + 1e-9 * (1 + abs(ratio))
    expected = bounds.disintegrated(stated["errors"], n=run.cert.n, log_ratio=stated["log_ratio"], delta=0.05)
    assert run.cert.bounds["single_draw"] == pytest.approx(expected)


@pytest.mark.parametrize("std", [0.0, 0.05])
def test_the_mean_of_log_ratio_is_the_kl_and_its_scatter_sqrt_2_kl(std: float) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = pp.isotropic(nn.Linear(50, 20, bias=False), sparsity=0.5, std=std)
        moved = {n: 0.5 + 0.31 * torch.randn_like(q).clamp(-1, 1) * (1 if std == 0 else 0.3) for n, q in p.mean.items()}
        means = {n: m + std * 0.42 * torch.randn_like(m) for n, m in p.mean.items()}
    q = dataclasses.replace(p, keep_prob=moved, mean=means if std else p.mean)
    divergence = float(kl(q, p))
    assert 30 < divergence < 150
    ratios = np.array(
        [log_ratio(q, p, draw_weights(q, seed=1, step=t), draw_masks(q, seed=1, step=t)) for t in range(600)]
    )
    assert ratios.mean() == pytest.approx(divergence, abs=5 * ratios.std() / math.sqrt(600))
    assert ratios.std() == pytest.approx(math.sqrt(2 * divergence), rel=0.3)


def test_the_thresholded_bound_needs_unlabelled_inputs() -> None:
    run = issued()
    stated = run.cert.record["thresholded"]
    assert stated["inputs"] == 150
    plain = attachment.harden(copy.deepcopy(run.model))
    fixed = drawn_networks.thresholded(run.posterior)
    x = run.split.unlabelled.x
    differs = drawn_networks.disagreements(plain, run.posterior, fixed, x, seed=stated["seed"])
    assert stated["disagreements"] == int(differs.sum())
    transfer = bounds.seeger(run.cert.risk_upper, n=run.cert.n, kl=run.cert.kl, delta=0.03)
    expected = bounds.agreement(transfer, disagreements=stated["disagreements"], m=150, delta=0.01)
    assert run.cert.bounds["thresholded"] == pytest.approx(expected)
    no_inputs = run.split.unlabelled.subset(torch.arange(0))
    cert = certify_again(split=digits(unlabelled=no_inputs, declared=True))
    assert "thresholded" not in cert.bounds
    assert cert.record["thresholded"]["inputs"] == 0


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
def test_the_winner_in_words(bound: float, q_equals_p: float, held_out: float, words: str) -> None:
    values = {"seeger": bound, "q_equals_p": q_equals_p, "held_out": held_out}
    record = {
        "kind": "pac-bayes",
        "claim": {"family": "seeger", "bound": bound},
        "bounds": {name: {"bound": value} for name, value in values.items()},
    }
    assert certificate.Certificate(record, {}).winner.startswith(words)


@pytest.mark.parametrize(("value", "text"), [(0.1, "0.1000"), (0.10001, "0.1001"), (0.0, "0.0000"), (1.0, "1.0000")])
def test_four_digits_are_never_rounded_down(value: float, text: str) -> None:
    assert certificate.rounded_up(value) == text


# --- Saving and loading.


def test_saving_and_loading_keep_every_bit(tmp_path: Path) -> None:
    cert = issued().cert
    folder = cert.save(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert sorted(p.name for p in folder.iterdir()) == FILES
    first = {name: (folder / name).read_bytes() for name in FILES}
    loaded = decode.load(folder)
    for file, tensors in cert.tensors.items():
        assert loaded.tensors[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded.tensors[file][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[file][name], tensor)
    added = {"files", "digest"}
    assert {key: value for key, value in loaded.record.items() if key not in added} == cert.record
    assert loaded.record["digest"] == certificate.digest(loaded.record)
    assert loaded.tries is None  # which is no part of a certificate
    assert str(loaded) == str(dataclasses.replace(cert, tries=None))
    loaded.save(folder)
    assert {name: (folder / name).read_bytes() for name in FILES} == first


def test_a_folder_holds_no_pickle_and_a_record_that_people_can_read(tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path)
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        assert content[8:9] == b"{"  # a JSON header after its length; a pickle starts with 0x80, an archive with PK
        load_file(path)
    text = (folder / "certificate.json").read_text()
    assert text.startswith('{\n  "format": "pacprune certificate",\n  "version": 3,\n  "kind": "pac-bayes",\n')
    assert issued().cert.statement in text
    assert max(map(len, text.splitlines())) < 400


def test_what_cannot_be_loaded_is_told_in_one_sentence(tmp_path: Path) -> None:
    folder = issued().cert.save(tmp_path / "good")
    path, whole = folder / "certificate.json", (folder / "certificate.json").read_bytes()
    record = json.loads(whole)

    def told(words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            decode.load(folder)
        assert "\n" not in str(caught.value)

    with pytest.raises(ValueError, match=r"other is no whole certificate folder .* ask the issuer"):
        decode.load(tmp_path / "other")
    for content in (whole[:500], b"\xff\xfe{}", b""):
        path.write_bytes(content)
        told(r"certificate\.json is not valid JSON .* ask the issuer")
    for wrong, words in (({"version": 1}, r"certificate', 1\)"), ({"format": "other"}, r"\('other', 3\)")):
        path.write_text(json.dumps(record | wrong))
        told(rf"{words}, but this reads \('pacprune certificate', 2, 3\)")
    path.write_text("[1]")
    told("is list, but this reads")
    path.write_text(json.dumps(record | {"another": 1}))
    told("good is no certificate: 'another' is a key that no certificate has; ask the issuer")
    path.write_bytes(whole)
    (folder / "draws.safetensors").write_bytes(b"\x80\x04junk")
    told(r"good is no certificate: files\.draws\.safetensors: .* is stated, .* is recomputed; ask the issuer")
    (folder / "draws.safetensors").unlink()
    told(r"good is no whole certificate folder .*draws\.safetensors.* ask the issuer")


def test_a_certificate_that_cannot_be_written_leaves_nothing_half(tmp_path: Path) -> None:
    cert = issued().cert
    broken = dataclasses.replace(cert, record={**cert.record, "kl": math.inf})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(tmp_path)
    assert not (tmp_path / "certificate.json").exists()


def test_the_short_form_says_what_is_claimed(story: SimpleNamespace) -> None:
    claim = f"error at most {certificate.rounded_up(story.cert.bound)}, n 719"
    assert repr(story.cert) == f"Certificate(pac-bayes: {claim})"
    assert repr(dataclasses.replace(story.cert, record={**story.cert.record, "model": "mlp"})) == (
        f"Certificate(mlp, pac-bayes: {claim})"
    )
