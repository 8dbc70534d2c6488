"""The data-scarce study: disjoint subsets, ledgers that pay for the grid, a constant that no bound example chose."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import pacprune as pp
from pacprune import bounds, philox
from pacprune.data.splits import Part
from pacprune.paper import data_scarce
from pacprune.paper.frame import Job
from pacprune.paper.statistics import interval
from pacprune.runs import plots

TINY = data_scarce.SETTINGS["smoke"][0].changed(
    sizes=(150, 300),
    dense_steps=10,
    prune_steps=20,
    prior_steps=5,
    posterior_steps=5,
    draws=50,
)
TRAIN = pp.data.digits(seed=0).train


def test_subsets_of_seeds_are_disjoint_and_smaller_ones_lie_in_larger_ones(job: Job) -> None:
    first = {(n, seed): part.index for n, seed, part in data_scarce.subsets(TRAIN, TINY, job)}
    assert {len(index) for (n, _), index in first.items() if n == 150} == {150}
    assert not torch.isin(first[300, 0], first[300, 1]).any()
    assert torch.isin(first[150, 1], first[300, 1]).all()
    second = {(n, seed): part.index for n, seed, part in data_scarce.subsets(TRAIN, TINY, replace(job, seed=1))}
    assert not torch.equal(first[300, 0], second[300, 1000])


def test_subsets_do_not_depend_on_how_the_training_part_is_ordered(job: Job) -> None:
    first, second = (
        {(n, seed): part.index for n, seed, part in data_scarce.subsets(pp.data.digits(seed=s).train, TINY, job)}
        for s in (0, 5)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def _like_mnist(seed: int) -> Part:
    """60,000 examples of next to nothing, in the order of a split of this seed."""
    index = philox.permutation(60_000, seed=seed)
    return Part("train", torch.zeros(60_000, 1), index % 10, index)


@pytest.mark.parametrize(("scale", "seed"), [("reduced", 0), ("reduced", 1), ("full", 0), ("full", 3)])
def test_no_subset_holds_what_the_settings_were_chosen_on(scale: str, seed: int, job: Job) -> None:
    tuned = philox.permutation(60_000, seed=77)[30_000:40_000]
    for setting in data_scarce.SETTINGS[scale]:
        parts = data_scarce.subsets(_like_mnist(5), setting, replace(job, seed=seed))
        examples = torch.cat([part.index for _, _, part in parts])
        assert not torch.isin(examples, tuned).any()
        assert len(examples.unique()) == max(setting.options.sizes) * setting.seeds


def test_published_subsets_are_the_first_30_000_of_one_order(job: Job) -> None:
    """Literal on purpose: other subsets would be other results than those of docs/certificate_tables.md."""
    order = philox.permutation(60_000, seed=77)
    for setting in data_scarce.SETTINGS["reduced"]:
        for n, seed, part in data_scarce.subsets(_like_mnist(0), setting, job):
            assert torch.equal(part.index, order[seed * 10_000 : seed * 10_000 + n])


def test_settings_are_named_without_the_recipe_and_files_with_it(job: Job) -> None:
    settings = data_scarce.SETTINGS["reduced"]
    names = ["mnist-lenet5", "fashion-mnist-lenet5", "mnist-lenet5-weak-prior"]
    assert [setting.name for setting in settings] == names
    figures = [figure.name for setting in settings for figure in data_scarce.figures(setting, job)]
    assert figures == [f"data-scarce-{name}" for name in names]


def test_more_seeds_than_examples_are_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="2 seeds of 900 examples each need more than the 1437 of digits that no"):
        next(data_scarce.subsets(TRAIN, TINY.changed(sizes=(900,)), job))


def test_the_rows_are_certificates_that_pay_for_the_grid(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates, certify = [], data_scarce.certify
    monkeypatch.setattr(
        data_scarce, "certify", lambda *a, **k: certificates.append(certify(*a, **k)) or certificates[-1]
    )
    setting = TINY.changed(sizes=(300,), sparsities=(0.8, 0.95))
    rows = data_scarce.rows(setting, job)
    assert len(rows) == 2 * 2 * 2
    assert {certificate.ledger.grid for certificate in certificates} == {data_scarce.grid_size(setting)} == {4}
    for row, certificate in zip(rows, certificates, strict=True):
        assert row["n"] == 300 - round(300 * row["alpha"])
        delta = 0.04 / 4
        errors = round(row["held_out_error"] * row["n"])
        assert row["held_out"] == bounds.clopper_pearson(errors, n=row["n"], delta=0.05 / 4)
        assert row["seeger"] == bounds.seeger(row["risk_upper"], n=row["n"], kl=row["kl"], delta=delta)
        assert row["catoni"] == bounds.catoni(row["risk_upper"], n=row["n"], kl=row["kl"], delta=delta, c=row["c"])
        assert certificate.sparsity == pytest.approx(row["sparsity"], abs=2e-3)


def test_a_run_that_was_broken_off_goes_on_where_it_stopped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = data_scarce.rows(TINY, job)
    path = job.out / "data-scarce-digits-mlp.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:5]) + "\n")
    calls, certificates = [], data_scarce.certificates

    def count(*args: Any) -> list[dict[str, float]]:
        calls.append(args)
        return certificates(*args)

    monkeypatch.setattr(data_scarce, "certificates", count)
    assert data_scarce.rows(TINY, job) == rows
    assert len(calls) == len(rows) - 5
    with pytest.raises(ValueError, match="begin in another --out"):
        data_scarce.rows(TINY.changed(posterior_steps=6), job)


@pytest.mark.parametrize(("risk", "n"), [(0.02, 3_000), (0.1, 500), (0.4, 5_000), (1.0, 100)])
def test_catonis_constant_is_the_best_for_the_expected_risk(risk: float, n: int) -> None:
    def bound(c: float) -> float:
        return bounds.catoni(risk, n=n, kl=2.0, delta=0.01, c=c)

    chosen = bounds.catoni_constant(risk, n=n, kl=2.0, delta=0.01)
    finest = min(bound(0.01 * 1.005**k) for k in range(1390))
    assert bound(chosen) - risk <= 1.01 * (finest - risk) + 1e-12


def test_every_arm_chooses_its_own_alpha_by_its_own_certificate() -> None:
    arms = list(data_scarce.ARMS)
    rows = [
        {"dataset": "digits", "model": "mlp", "examples": 300, "seed": seed, "alpha": alpha, "sparsity": 0.9}
        | {arm: 0.5 - 0.1 * (alpha == (0.3 if k % 2 else 0.6)) + 0.01 * seed for k, arm in enumerate(arms)}
        for seed in (0, 1)
        for alpha in (0.3, 0.6)
    ]
    (line,) = data_scarce.best_table(rows)
    assert [line[f"{arm}_alpha"] for arm in arms] == ["0.6/0.6", "0.3/0.3", "0.6/0.6", "0.3/0.3"]
    assert [line[arm] for arm in arms] == pytest.approx([interval([0.4, 0.41]).mean] * 4)
    assert plots.png_of(data_scarce.paint, rows)[:4] == b"\x89PNG"
