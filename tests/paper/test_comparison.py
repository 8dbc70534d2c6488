"""The contest of pruning methods: equal terms, tuning that never sees the test set, and work that is done once."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pacprune as pp
from pacprune import data
from pacprune.paper import comparison, pft_vs_osp
from pacprune.paper.comparison import METHODS, Setting
from pacprune.paper.frame import Job

SETTING = Setting(
    data="digits",
    model="mlp",
    sparsities=(0.9, 0.95),
    criteria=("magnitude", "random"),
    methods=("osp", "pft", "gmp"),
    seeds=2,
    dense=pp.Config(epochs=1, lr=0.1),
    after=pp.Config(epochs=2, schedule="cosine"),
    rates=(0.05, 0.1),
    gated=((0.1, 100.0), (0.1, 500.0)),
    tuned_at=0.95,
)


def job(out: Path, **other) -> Job:
    given = {"scale": "smoke", "seed": 0, "device": torch.device("cpu"), "data_dir": None, "progress": _quiet}
    return Job(**(given | {"out": out} | other))


def _quiet(*_: object) -> None:
    """Says nothing."""


def test_one_row_per_network_with_exactly_k_weights(tmp_path: Path) -> None:
    rows = comparison.run(SETTING, job(tmp_path))
    assert all(tuple(row) == comparison.COLUMNS for row in rows)
    pruned = [row for row in rows if row["method"] != "dense"]
    assert len(pruned) == (2 + 2 + 1) * 2 * 2  # two criteria for osp and pft, one for gmp; sparsities; seeds
    assert len({(row["method"], row["criterion"], row["sparsity"], row["seed"]) for row in pruned}) == len(pruned)
    assert {row["kept"] for row in pruned if row["sparsity"] == 0.9} == {round(0.1 * pruned[0]["total"])}
    assert all(0 <= row["test_error"] <= 1 and row["epochs"] == 2 for row in pruned)


def test_every_method_has_the_same_grid_and_the_rates_come_from_validation(tmp_path, monkeypatch) -> None:
    split = data.load("digits", seed=0)
    judged = []
    monkeypatch.setattr(comparison, "error", lambda nets, on: [judged.append(on) or 0.5] * len(nets))
    chosen = comparison.tune(SETTING, split, job(tmp_path))
    found = {method: {point for (m, _), point in chosen.items() if m == method} for method in SETTING.methods}
    assert found == {"osp": {(0.05, 100.0)}, "pft": {(0.1, 100.0)}, "gmp": {(0.05, 100.0)}}  # all equal: the smaller
    (tried,) = {
        len([k for k in lines if k]) for lines in [(tmp_path / "digits-mlp-tuning.jsonl").read_text().split("\n")]
    }
    assert tried == len(SETTING.pairs()) * len(SETTING.rates)
    seen = {row.numpy().tobytes() for x, _ in judged for row in x}
    assert len(seen) == pytest.approx(0.1 * len(split.train), abs=2)
    assert not seen & {row.numpy().tobytes() for row in split.test.x}


def test_one_rate_needs_no_tuning(tmp_path: Path) -> None:
    one = replace(SETTING, rates=(0.1,), gated=((0.1, 500.0),))
    chosen = comparison.tune(one, data.load("digits"), job(tmp_path))
    assert chosen == {(m, c): (0.1, 500.0 if m == "pft" else 100.0) for m, c in SETTING.pairs()}
    assert not list(tmp_path.iterdir())


def test_a_method_with_more_points_in_its_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="pft would try 2 points of its grid and the others 1; give as many"):
        replace(SETTING, rates=(0.1,))


def test_finished_networks_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SETTING, methods=("osp",), criteria=("magnitude",), rates=(0.1,), gated=((0.1, 100.0),))
    rows = comparison.run(small, job(tmp_path))
    lines = (tmp_path / "digits-mlp.jsonl").read_text().splitlines()
    (tmp_path / "digits-mlp.jsonl").write_text("\n".join(lines[:3]) + "\n")
    trained = []
    real = comparison.together
    monkeypatch.setattr(comparison, "together", lambda *a, **k: trained.extend(k["seed"]) or real(*a, **k))
    monkeypatch.setattr(comparison, "fit", lambda *a, **k: pytest.fail("the dense networks are there"))
    assert comparison.run(small, job(tmp_path)) == rows
    assert len(trained) == 1


def test_methods_with_a_mask_stage_have_the_share_that_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = replace(
        SETTING,
        methods=tuple(METHODS),
        mask_share=1 / 3,
        rates=(0.1,),
        gated=((0.1, 100.0),),
        seeds=1,
        sparsities=(0.9,),
    )
    stages: dict[str, list[tuple[str, int]]] = {}
    real = comparison.together

    def noted(verb, models, on, configs, **given):
        found = real(verb, models, on, configs, **given)
        key = next(m for m, (v, o) in METHODS.items() if v is verb and o.items() <= given.items() and m not in stages)
        stages[key] = list(Counter(row["stage"] for row in found[0].history).items())
        return found

    monkeypatch.setattr(comparison, "together", noted)
    comparison.run(replace(third, after=replace(SETTING.after, epochs=3)), job(tmp_path))
    assert stages.keys() == METHODS.keys()
    assert {m for m, found in stages.items() if dict(found).get("masks") == 1} == METHODS.keys() - {"osp", "imp"}
    assert third.terms != SETTING.terms


def test_a_network_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    wild = replace(SETTING, methods=("osp",), criteria=("magnitude",), rates=(0.1, 1e12))
    assert set(comparison.tune(wild, data.load("digits"), job(tmp_path)).values()) == {(0.1, 100.0)}
    assert '"error": 1.0' in (tmp_path / "digits-mlp-tuning.jsonl").read_text()


def test_a_network_that_overflows_in_its_last_step_does_not_stop_the_others(tmp_path: Path) -> None:
    once = replace(SETTING.after, epochs=1, batch_size=2000, schedule="constant", warmup=0.0)
    wild = replace(SETTING, methods=("osp",), criteria=("magnitude",), rates=(0.1, 1e39), after=once)
    assert set(comparison.tune(wild, data.load("digits"), job(tmp_path)).values()) == {(0.1, 100.0)}


def test_networks_made_on_other_terms_are_not_taken_for_these(tmp_path: Path) -> None:
    small = replace(SETTING, methods=("osp",), criteria=("magnitude",), rates=(0.1,), gated=((0.1, 100.0),), seeds=1)
    comparison.run(small, job(tmp_path))
    with pytest.raises(ValueError, match=f"on the terms {small.terms} .* begin in another --out"):
        comparison.run(replace(small, after=replace(small.after, epochs=7)), job(tmp_path))
    with pytest.raises(ValueError, match="begin in another --out"):
        comparison.run(replace(small, dense=replace(small.dense, epochs=7)), job(tmp_path))


def test_the_smoke_grid_has_every_method() -> None:
    (smoke,) = pft_vs_osp.SETTINGS["smoke"]
    assert smoke.methods == tuple(METHODS)
    for scale, settings in pft_vs_osp.SETTINGS.items():
        assert all(setting.tuned_at in setting.sparsities for setting in settings), scale
