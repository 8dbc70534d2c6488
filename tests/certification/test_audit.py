"""Verification: true certificates hold at all levels; with the data, every change is found and named."""

import copy
import dataclasses
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_certify import FAST, digits, issued, network, prior_of
from torch import Tensor, nn

import pacprune as pp
from pacprune.bounds import Ledger
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import audit, bounds_table, certify, drawn_networks, rules
from pacprune.data import trace
from pacprune.data.splits import Split
from pacprune.masking.spikeslab import draw_masks, draw_weights, log_ratio

Record = dict[str, Any]
Tensors = dict[str, dict[str, Tensor]]


def forged(folder: Path, change: Callable[[Record, Tensors], None], cert: pp.Certificate | None = None) -> Path:
    """The folder of a changed certificate, in which all digests are right."""
    cert = issued().cert if cert is None else cert
    record, tensors = copy.deepcopy(cert.record), {f: dict(t) for f, t in cert.tensors.items()}
    change(record, tensors)
    return pp.Certificate(record, tensors).save(folder)


def consistent(record: Record, tensors: Tensors) -> None:
    """All that follows from the counts, n and the KL, computed anew, so that arithmetic alone finds nothing."""
    ledger = Ledger.from_dict(record["bounds"]["seeger"]["ledger"])
    choice = {"grid": ledger.grid, "certified": ledger.certified}
    counted = {
        whose: drawn_networks.Counts(
            25, *(tensors["draws.safetensors"][f"{whose}/{w}"] for w in ("wrong", "plus", "minus"))
        )
        for whose in ("posterior", "prior")
    }
    stated, reference_risk = record["monte_carlo"], record["reference"]["errors"] / record["n"]
    for whose, counts in counted.items():
        stated[whose] = bounds_table.summarise(
            counts, reference_risk, delta=ledger.monte_carlo_each, method="betting", seed=stated[whose]["seed"]
        )
    record["bounds"] = bounds_table.all_bounds(record, counted["posterior"], delta=ledger.delta, **choice)
    bound = record["claim"]["bound"] = record["bounds"]["seeger"]["bound"]
    record["statement"] = record["statement"].rsplit(" ", 1)[0] + f" {rounded_up(bound)}."


def check(folder: Path, split: Split | None = None, **options: Any) -> audit.Report:
    return pp.verify(folder, split=digits() if split is None else split, model=network, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issued().cert.save(tmp_path_factory.mktemp("issued"))


# --- True certificates.


def test_a_true_certificate_is_valid_at_every_level(folder: Path) -> None:
    arithmetic, recounted, replayed = pp.verify(folder), check(folder), check(folder, replay=True, draws=300)
    for level, report in enumerate((arithmetic, recounted, replayed), start=1):
        assert report.valid, report.failure
        assert report.level == level
        assert report.verdict.startswith(f"VALID (level {level}: ")
        assert str(report).endswith(f"\n{report.verdict}")
        assert report.trusted[-len(issued().cert.record["assumptions"]) :] == tuple(issued().cert.record["assumptions"])
    assert len(arithmetic.checks) < len(recounted.checks) < len(replayed.checks)

    def trusts(report: audit.Report, word: str) -> bool:
        return any(line.startswith(word) for line in report.trusted)

    assert trusts(arithmetic, "the data: ")
    assert not trusts(recounted, "the data: ")
    assert trusts(arithmetic, "the counts: ")
    assert trusts(recounted, "the draws: their errors and disagreements")
    assert not trusts(replayed, "the draws: ")
    for report in (arithmetic, recounted, replayed):
        assert trusts(report, "the prior was written before the bound examples were used to train Q")


def test_what_was_computed_on_the_way_is_told(folder: Path) -> None:
    report = check(folder, replay=True, draws=300)
    cert, text = issued().cert, str(report)
    assert f"all 300 draws of Q made again: at most {rounded_up(cert.bound)}" in text
    assert "all 300 draws of P made again" in text
    fresh = re.search(r"by 300 fresh draws of your own, at most (0\.\d+); the claim, .* is (0\.\d+)", text)
    assert fresh
    assert float(fresh[2]) == pytest.approx(cert.bound, abs=1e-4)
    assert float(fresh[1]) == pytest.approx(cert.bound, abs=0.05)
    for network_name in ("reference", "single draw", "thresholded"):
        assert f"test error of the {network_name} network: 0." in text
    assert "test error of networks drawn from Q, one for each of 300 examples: 0." in text
    escape = re.search(
        r"60 of the 300 draws of Q made again: .* with probability (\S+); --draws 300 makes all",
        str(check(folder, replay=True, draws=60)),
    )
    assert escape
    assert float(escape[1]) == pytest.approx(0.8**100, rel=0.1)


def test_the_split_of_a_known_data_set_is_replayed_from_its_seed(folder: Path) -> None:
    report = pp.verify(folder, model=network, recount=True)
    assert report.valid, report.failure


def test_a_model_of_the_package_is_built_by_its_name(tmp_path: Path) -> None:
    split = digits()
    model = pp.models.build("mlp", split)
    pp.osp(model, split.prior, pp.Config(epochs=1, lr=0.1), sparsity=0.5)
    place = pp.certify_held_out(model, split, name="mlp").save(tmp_path)
    report = pp.verify(place, recount=True)
    assert report.valid, report.failure


def test_a_model_can_be_an_instance_which_stays_as_it_is(folder: Path) -> None:
    model = network()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert pp.verify(folder, split=digits(), model=model).valid
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training


def test_own_data_with_a_declared_split_needs_the_split(tmp_path: Path) -> None:
    x, y = digits().train.x[:300], digits().train.y[:300]
    lists = torch.arange(150), torch.arange(150, 300)
    make = partial(pp.data.split, x, y, classes=10)
    split = make(indices=lists, split_declared_random=True)
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    place = pp.certify(model, prior, split, **FAST).save(tmp_path)
    assert pp.verify(place).valid
    with pytest.raises(ValueError, match=r"about 'own', which pacprune cannot load by itself; .*split="):
        pp.verify(place, model=network, recount=True)
    report = check(place, split)
    assert report.valid, report.failure
    assert "the split is random, as the issuer declares" in report.trusted
    reordered = make(indices=(lists[0], lists[1].flip(0)), split_declared_random=True)
    assert "split: indices of bound" in str(check(place, reordered).failure)
    undeclared = dataclasses.replace(split, declared=False)
    assert "split: declared is True" in str(check(place, undeclared).failure)


def test_a_held_out_certificate_at_both_levels(tmp_path: Path) -> None:
    split, model = digits(), network()
    pp.osp(model, split.prior, pp.Config(epochs=3, lr=0.2), sparsity=0.7)
    cert = pp.certify_held_out(model, split)
    place = cert.save(tmp_path / "true")
    for options in ({}, {"replay": True}):
        report = check(place, **options)
        assert report.valid, report.failure
        assert report.level == 2  # there is nothing to draw

    def better(record: Record, tensors: Tensors) -> None:
        errors = record["reference"]["errors"] = record["reference"]["errors"] - 1
        bound = pp.bounds.clopper_pearson(errors, n=record["n"], delta=0.05)
        record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = bound
        record["statement"] = record["statement"].rsplit(" ", 1)[0] + f" {rounded_up(bound)}."

    place = forged(tmp_path / "false", better, cert)
    assert pp.verify(place).valid
    stated = cert.record["reference"]["errors"]
    failure = f"recount: the reference network makes {stated} errors, not {stated - 1} as stated "
    assert str(check(place).failure).startswith(failure)


# --- Rules that a record can break.


def test_n_of_the_whole_set_is_refused(tmp_path: Path) -> None:
    def whole(record: Record, tensors: Tensors) -> None:
        record["n"] = len(issued().split.train)
        consistent(record, tensors)
        record["statement"] = record["statement"].replace("643", f"{record['n']:,}")

    def sizes_too(record: Record, tensors: Tensors) -> None:
        record["reference"]["errors"] *= 2  # the error rate stays
        record["split"]["sizes"]["bound"] = len(issued().split.train)
        whole(record, tensors)

    assert issued().cert.n == 643
    failure = str(pp.verify(forged(tmp_path / "n", whole)).failure)
    assert "1287" in failure
    assert "643" in failure
    place = forged(tmp_path / "sizes", sizes_too)
    assert pp.verify(place).valid  # arithmetic alone cannot know
    assert check(place).failure == "split: size of bound is 1287 in the certificate but 643 in the data"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("evaluation.augmentation", True),
        ("evaluation.mode", "train"),
        ("monte_carlo.posterior.seed", 1),
        ("monte_carlo.prior.seed", 1),
        ("single_draw.seed", 1),
        ("thresholded.seed", 1),
        ("kl", 1e-3),
        ("bounds.seeger.ledger.grid", 2),
        ("hashes.prior", "0" * 64),
    ],
)
def test_a_changed_entry_is_refused_by_its_name(path: str, value: Any, tmp_path: Path) -> None:
    def change(record: Record, tensors: Tensors) -> None:
        *above, last = path.split(".")
        for key in above:
            record = record[key]
        assert record[last] != value
        record[last] = value

    failure = pp.verify(forged(tmp_path, change)).failure
    assert failure
    assert path in failure


def test_a_prior_edited_on_disk_is_refused(tmp_path: Path) -> None:
    def nearer(record: Record, tensors: Tensors) -> None:
        """P moved to Q, which would make the KL small."""
        slabs = tensors["distributions.safetensors"]
        slabs.update({key.replace("posterior", "prior"): t for key, t in slabs.items() if key.startswith("posterior")})

    assert "hashes.prior" in str(pp.verify(forged(tmp_path, nearer)).failure)


def test_a_frozen_tensor_edited_on_disk_is_refused(tmp_path: Path) -> None:
    def moved(record: Record, tensors: Tensors, file: str, name: str) -> None:
        tensors[file][name] = tensors[file][name] * 1.01 + 0.1

    place = forged(tmp_path / "a", partial(moved, file="distributions.safetensors", name="rest/2.running_mean"))
    assert "hashes." in str(pp.verify(place).failure)
    place = forged(tmp_path / "b", partial(moved, file="single_draw.safetensors", name="4.bias"))
    assert "frozen" in str(pp.verify(place).failure)


# --- Rules about the data.


def test_the_wrong_data_is_refused(folder: Path) -> None:
    split = digits()
    assert "split: files" in str(check(folder, digits(files={"digits.npz": "0" * 64})).failure)
    assert "split: seed is 0 in the certificate but 1" in str(check(folder, pp.data.digits(seed=1)).failure)
    reseeded = pp.data.digits(seed=1, unlabelled=150)
    assert "split: indices of prior" in str(check(folder, dataclasses.replace(reseeded, seed=0)).failure)
    augmented = dataclasses.replace(split.bound, x=split.bound.x.flip(-1))
    assert "split: content of bound" in str(check(folder, digits(bound=augmented)).failure)


def reissued(split: Split, **fit: Any) -> pp.Certificate:
    """A certificate of a given split, without the refusals of certify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "refuse_split", lambda split: None)
        model, prior = prior_of(split, **fit)
        pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
        return pp.certify(model, prior, split, **FAST)


def test_another_seed_than_the_one_stated_is_refused(tmp_path: Path) -> None:
    lucky = dataclasses.replace(pp.data.digits(seed=5, unlabelled=150), seed=0)
    place = reissued(lucky).save(tmp_path)
    assert pp.verify(place).valid
    assert "split: indices of prior" in str(pp.verify(place, model=network, recount=True).failure)


def test_augmented_bound_examples_are_refused(tmp_path: Path) -> None:
    split = digits()
    easy = split.bound.x + 0.01
    place = reissued(digits(bound=dataclasses.replace(split.bound, x=easy))).save(tmp_path)
    assert "split: content of bound" in str(pp.verify(place, model=network, recount=True).failure)


def test_standardisation_on_all_examples_is_refused(tmp_path: Path) -> None:
    split = digits()
    shift, scale = split.train.x.mean(), split.train.x.std()
    parts = {
        part.name: dataclasses.replace(part, x=(part.x - shift) / scale)
        for part in (split.prior, split.bound, split.train, split.unlabelled)
    }
    mean, std = (split.mean[0] + split.std[0] * float(shift),), (split.std[0] * float(scale),)
    leaky = digits(**parts, mean=mean, std=std)
    place = reissued(leaky).save(tmp_path)
    assert "split: content of prior" in str(pp.verify(place, model=network, recount=True).failure)
    assert "split: the inputs are not standardised by the prior part" in str(check(place, leaky).failure)


def test_overlapping_parts_are_refused(tmp_path: Path) -> None:
    split = digits()
    joined = {w: torch.cat([getattr(split.prior, w), getattr(split.bound, w)[:9]]) for w in ("x", "y", "index", "raw")}
    overlapping = digits(prior=dataclasses.replace(split.prior, **joined))
    place = reissued(overlapping, fit=split.prior).save(tmp_path)
    assert check(place, overlapping).failure == (
        "split: prior and bound share 9 of 643 examples; they must be disjoint"
    )


def test_a_skeleton_that_does_not_fit_is_an_error(folder: Path) -> None:
    def wider() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 10))

    with pytest.raises(ValueError, match=r"has shape .*17.* in the model but .*16.* in the certificate"):
        pp.verify(folder, split=digits(), model=wider)
    with pytest.raises(ValueError, match=r"has shape None in the model but .* in the certificate"):
        pp.verify(folder, split=digits(), model=nn.Sequential(nn.Flatten(), nn.Linear(64, 16)))
    with pytest.raises(ValueError, match=r"not named in the certificate .*; give it as model="):
        pp.verify(folder, split=digits())


# --- Counts that arithmetic cannot know.


def test_a_fished_network_is_refused(tmp_path: Path) -> None:
    run = issued()
    slabs = run.posterior, run.prior
    plain = network()
    plain.load_state_dict(run.cert.tensors["single_draw.safetensors"])

    def fish(record: Record, tensors: Tensors) -> None:
        """The best of 50 drawn networks, under the seed of the first."""
        errors = {
            t: int(drawn_networks.errors(plain, draw_weights(slabs[0], seed=9, step=t), run.split.bound).sum())
            for t in range(50)
        }
        best = min(errors, key=errors.__getitem__)
        weights, mask = (f(slabs[0], seed=9, step=best) for f in (draw_weights, draw_masks))
        zeros = sum(int((w == 0).sum()) for w in weights.values())
        record["single_draw"] |= {
            "errors": errors[best],
            "log_ratio": log_ratio(*slabs, weights, mask) + 1e-11,
            "sparsity": zeros / record["total"],
        }
        tensors["single_draw.safetensors"].update(weights)
        tensors["draws.safetensors"].update({f"single_draw/{n}": certify.mask_bits(m) for n, m in mask.items()})
        consistent(record, tensors)

    place = forged(tmp_path, fish)
    assert pp.verify(place).valid
    assert "recount: the mask of the single draw network is not the draw of its seed" in str(check(place).failure)


@pytest.mark.parametrize(("network_name", "hidden"), [("reference", 1), ("single_draw", 1), ("thresholded", 9)])
def test_errors_of_a_network_that_are_too_few_are_refused(network_name: str, hidden: int, tmp_path: Path) -> None:
    def lower(record: Record, tensors: Tensors) -> None:
        record[network_name]["errors"] -= hidden
        consistent(record, tensors)

    place = forged(tmp_path, lower)
    assert pp.verify(place).valid
    assert f"recount: the {network_name.replace('_', ' ')} network makes" in str(check(place).failure)


@pytest.mark.parametrize("whose", ["posterior", "prior"])
def test_draws_that_err_too_little_are_refused_by_a_replay(whose: str, tmp_path: Path) -> None:
    def lower(record: Record, tensors: Tensors) -> None:
        draws = tensors["draws.safetensors"]
        draws[f"{whose}/wrong"] = draws[f"{whose}/wrong"] - draws[f"{whose}/plus"]
        draws[f"{whose}/plus"] = torch.zeros_like(draws[f"{whose}/plus"])
        consistent(record, tensors)

    place = forged(tmp_path, lower, noisy())
    assert pp.verify(place).valid
    untested = digits(test=digits().test.subset(torch.arange(0)))
    report = check(place, untested, replay=True, draws=1000)
    errors = r"\d+ errors \(\+\d+ -\d+ beside the reference\)"
    words = rf"replay: draw \d+ of the {whose} makes {errors} on its 25 examples, not {errors} as stated \(0 of"
    assert re.match(words, str(report.failure))
    with pytest.MonkeyPatch.context() as patch:  # fresh draws find it as well, without any of the issuer's
        patch.setattr(audit._Audit, "repeat_failure", lambda self: None)
        report = check(place, untested, replay=True, draws=1000)
    assert f"replay: the {whose}'s risk is not as stated" in str(report.failure)
    assert re.search(r" \(seed \d+\)$", str(report.failure)), "others could not find the same"


def test_too_few_disagreements_are_refused_by_a_replay(tmp_path: Path) -> None:
    cert = noisy()
    disagreements = cert.record["thresholded"]["disagreements"]
    assert disagreements > 20

    def agree(record: Record, tensors: Tensors) -> None:
        record["thresholded"]["disagreements"] = 0
        consistent(record, tensors)

    place = forged(tmp_path, agree, cert)
    assert check(place).valid
    failure = f"replay: the draws disagree with the thresholded network on {disagreements} of 150 inputs, not on 0 "
    assert str(check(place, replay=True, draws=50).failure).startswith(failure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit._Audit, "repeat_failure", lambda self: None)
        assert "replay: Q disagrees with the thresholded network on" in str(check(place, replay=True, draws=50).failure)


@cache
def noisy() -> pp.Certificate:
    """A certificate of a Q whose draws are far worse than its thresholded network."""
    trace._looks.clear()
    split = digits()
    model, prior = prior_of(split, std=0.3)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    return pp.certify(model, prior, split, **FAST)


def test_a_replay_needs_another_seed(folder: Path) -> None:
    seed = issued().cert.record["monte_carlo"]["posterior"]["seed"]
    with pytest.raises(ValueError, match="is the certificate's own; replay with another one"):
        check(folder, replay=True, draws=10, seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_is_none_is_refused(folder: Path, seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed is {seed}; it must be a whole number from 0 to "):
        check(folder, replay=True, seed=seed)


def test_a_folder_that_fails_at_level_one_is_not_looked_at_further(folder: Path, tmp_path: Path) -> None:
    place = issued().cert.save(tmp_path)
    content = bytearray((place / "draws.safetensors").read_bytes())
    content[-1] ^= 1
    (place / "draws.safetensors").write_bytes(bytes(content))
    report = check(place, replay=True)
    assert not report.valid
    assert "draws.safetensors" in str(report.failure)


def test_a_folder_that_is_not_there_is_not_blamed_on_the_issuer(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text("{}")
    with pytest.raises(ValueError, match="nowhere does not exist; name the folder that holds"):
        pp.verify(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"certificate\.json is a file; name the folder"):
        pp.verify(tmp_path / "certificate.json")


def test_a_model_with_other_weights_is_named(tmp_path):
    split = pp.data.digits(seed=0)
    model, other = pp.models.mlp(64, hidden=[8], seed=0), pp.models.mlp(64, hidden=[8], seed=1)
    pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
    folder = pp.certify_held_out(model, split).save(tmp_path / "network")
    words = "the model that was given has other weights"
    assert not any(words in finding for finding in pp.verify(folder, split=split, model=model).findings)
    assert any(words in finding for finding in pp.verify(folder, split=split, model=other).findings)
