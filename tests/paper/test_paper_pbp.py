"""The paper's PBP as written: its constants, what is tried and paid for, and what is said of the runs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import pacprune as pp
from pacprune.data import trace
from pacprune.paper import comparison, paper_pbp
from pacprune.paper.frame import Job
from pacprune.types import Diverged

(SMOKE,) = paper_pbp.SETTINGS["smoke"]
TINY = SMOKE.changed(
    alphas=(0.4,),
    sparsities=(0.9,),
    dense=replace(SMOKE.dense, epochs=1),
    rates=(0.02, 0.2),
)
CONSTANTS = {
    "mnist-mlp": (0.01, "constant", 30, 30, (-4, -1)),
    "fashion-mnist-lenet5": (0.01, "constant", 70, 30, (-7, -4)),
    "cifar10-resnet20": (0.1, "step", 120, 60, (-5, 2)),
}


@pytest.fixture(autouse=True)
def _nothing_looked_at() -> None:
    trace._looks.clear()
    paper_pbp._split.cache_clear()


def test_the_scale_paper_has_the_papers_constants_and_the_ends_of_its_ranges() -> None:
    settings = {setting.name: setting for setting in paper_pbp.SETTINGS["paper"]}
    assert settings.keys() == CONSTANTS.keys()
    for name, (lr, schedule, first, then, ends) in CONSTANTS.items():
        setting = settings[name]
        stages = setting.dense, setting.prior, setting.posterior
        assert [stage.epochs for stage in stages] == [first, then, then]
        for stage in (*stages, setting.pruning):
            assert (stage.lr, stage.schedule, stage.momentum, stage.batch_size) == (lr, schedule, 0.9, 128)
            assert stage.augment == (setting.data == "cifar10")
        assert (setting.eps, setting.options.delta, setting.seeds) == (1e-4, 0.05, 5)
        assert setting.posterior.gate_lr is None
        assert {0.0, 0.2, 0.4, 0.8} <= set(setting.alphas)
        for values, (low, high) in ((setting.options.stds, (-15, -3)), (setting.options.rates, ends)):
            logs = [math.log(value) for value in values]
            assert (min(logs), max(logs)) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize("scale", paper_pbp.SETTINGS)
def test_snip_has_as_many_trials_as_p_and_q_and_every_prior_is_paid_for(scale: str) -> None:
    for setting in paper_pbp.SETTINGS[scale]:
        rates, options = paper_pbp.snip_rates(setting), setting.options
        assert len(set(rates)) == len(options.stds) * len(options.rates)
        assert min(rates) < setting.dense.lr < max(rates)
        cells = len(setting.alphas) * len(setting.sparsities) * setting.seeds
        assert paper_pbp.size(setting) == cells * len(options.stds)


def test_the_first_seed_tries_all_stds_and_the_others_take_the_best(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = paper_pbp.pbp_rows(TINY, job)
    low, high = TINY.options.stds
    assert [row["seed"] for row in rows] == [0, 0, 1]
    best = min(rows[:2], key=lambda row: row["gibbs_certificate"])["std"]
    assert {rows[0]["std"], rows[1]["std"]} == {low, high}
    assert rows[2]["std"] == best
    assert [row["chosen"] for row in rows] == [int(row["std"] == best) for row in rows]
    share = pp.bounds.Ledger.split(0.05, grid=4).pac_bayes_each
    for row in rows:
        paid = pp.bounds.seeger(row["risk_upper"], n=row["n"], kl=row["kl"], delta=share)
        assert row["gibbs_certificate"] == pytest.approx(paid)
        assert row["gibbs_certificate"] <= row["paper_certificate"]
        assert row["lr"] in TINY.options.rates
        assert row["n"] == 1437 - round(0.4 * 1437)
        assert row["expected_sparsity"] == pytest.approx(0.9, abs=1e-3)
    monkeypatch.setattr(paper_pbp, "_certified", lambda *_: pytest.fail("it was trained again"))
    assert paper_pbp.pbp_rows(TINY, job) == rows


def test_a_learning_rate_that_diverges_costs_that_posterior_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    train = paper_pbp.fit_posterior

    def breaking(nets: Any, priors: Any, split: Any, config: pp.Config, **options: Any) -> Any:
        if config.lr == 0.2 or float(priors[0].std["layers.0.weight"]) < 0.01:
            raise Diverged("the loss became nan")
        return train(nets, priors, split, config, **options)

    monkeypatch.setattr(paper_pbp, "fit_posterior", breaking)
    monkeypatch.setattr(comparison, "contest", lambda *_: pytest.fail("SNIP is not asked for"))
    small, large = paper_pbp._certified(TINY, [paper_pbp.Cell(0.4, 0.9, std, 0) for std in TINY.options.stds], job)
    assert (small["gibbs_certificate"], small["test_error"], small["lr"]) == (1.0, 1.0, None)
    assert large["test_error"] < 0.9
    assert large["lr"] == 0.02


def test_short_stages_are_not_compiled() -> None:
    compiled = replace(SMOKE, dense=replace(SMOKE.dense, execution="compiled"))
    assert paper_pbp._by_graphs(compiled).dense.execution == "graph"
    assert paper_pbp._by_graphs(SMOKE) == SMOKE


def run(alpha: float, sparsity: float, std: float, seed: int, p: float, q: float, *, chosen: int = 1) -> dict[str, Any]:
    numbers = dict.fromkeys(paper_pbp.COLUMNS, 0.5)
    cell = {"method": "pbp", "alpha": alpha, "sparsity": sparsity, "std": std, "seed": seed, "chosen": chosen}
    return numbers | cell | {"dataset": "d", "model": "m", "prior_test_error": p, "test_error": q}


def snip(sparsity: float, seed: int, wrong: float) -> dict[str, Any]:
    row = dict.fromkeys(paper_pbp.COLUMNS, None) | {"dataset": "d", "model": "m", "method": "snip", "alpha": 1.0}
    return row | {"sparsity": sparsity, "seed": seed, "chosen": 1, "test_error": wrong}


def test_the_papers_statements_are_numbers_of_paired_runs() -> None:
    rows = [
        *(run(0.4, 0.9, 0.1, seed, 0.20, 0.15) for seed in (0, 1)),
        run(0.4, 0.975, 0.1, 0, 0.40, 0.30),
        run(0.4, 0.975, 0.1, 1, 0.42, 0.30),
        run(0.4, 0.975, 0.3, 0, 0.80, 0.40, chosen=0),
        *(snip(0.9, seed, 0.10) for seed in (0, 1)),
        snip(0.975, 0, 0.20),
        snip(0.975, 1, 0.18),
    ]
    setting = SMOKE.changed(data="d", model="m")
    numbers = paper_pbp.numbers(setting, rows)
    assert numbers["d-m, alpha 0.4, P - Q at 0.975"] == pytest.approx(0.11)
    assert numbers["d-m, alpha 0.4, P - Q at 0.975, low"] < 0.11 < numbers["d-m, alpha 0.4, P - Q at 0.975, high"]
    assert numbers["d-m, alpha 0.4, largest P - Q at 0.975 of all stds"] == pytest.approx(0.4)
    assert numbers["d-m, alpha 0.4, P - certificate of Q at 0.975"] == pytest.approx(-0.09)
    assert numbers["d-m, alpha 0.4, Q - SNIP at 0.9"] == pytest.approx(0.05)
    assert numbers["d-m, alpha 0.4, growth of Q - SNIP from 0.9 to 0.975"] == pytest.approx(0.06)
    assert numbers["d-m, test_error at 0.975, alpha 0.4"] == pytest.approx(0.3)  # the chosen std alone


def test_the_pair_plot_has_the_runs_of_one_std_with_a_prior_from_data() -> None:
    rows = [run(0.0, 0.9, 0.1, 0, 0.9, 0.9)]
    rows += [run(alpha, 0.9, 0.1, 0, 0.2, 0.1) for alpha in (0.4, 0.8)] + [run(0.4, 0.9, 0.3, 0, 0.2, 0.1)]
    assert [(row["alpha"], row["std"]) for row in paper_pbp.at_one_std(rows)] == [(0.4, 0.1), (0.8, 0.1)]


def test_the_first_weights_are_a_prior_on_no_data(job: Job) -> None:
    split = pp.data.digits(prior_fraction=0)
    cells = [paper_pbp.Cell(0.0, 0.9, 0.05, seed) for seed in (0, 1)]
    starts = paper_pbp._starts(SMOKE, cells, split, job)
    for cell, start in zip(cells, starts, strict=True):
        first = pp.models.build("mlp", split, seed=cell.seed).state_dict()
        assert start.prior.seen.count == 0
        assert all(torch.equal(first[name], mean) for name, mean in start.prior.mean.items())
