"""The contest of pruning methods: equal terms, tuning that never sees the test set, and work that is done once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure as Canvas
from torch import nn

import pacprune as pp
from pacprune import data
from pacprune.masking import weights
from pacprune.methods.pipeline import Pipeline, Pruned, Stages, fine_tune, pipeline, split_epochs
from pacprune.methods.table import METHODS, Method, pruning_methods
from pacprune.paper import comparison, frame, pft_vs_osp
from pacprune.paper.comparison import Contest
from pacprune.paper.frame import Job, Setting
from pacprune.types import Data, Diverged, History, Loss, Progress

SETTING = Setting(
    data="digits",
    model="mlp",
    sparsities=(0.9, 0.95),
    seeds=2,
    dense=pp.Config(epochs=1, lr=0.1),
    pruning=pp.Config(epochs=2, schedule="cosine"),
    options=Contest(
        criteria=("magnitude", "random"),
        methods=("osp", "pft", "pft-coupled", "gmp"),
        rates=(0.05, 0.1),
        gated=((0.1, 100.0), (0.1, 500.0)),
        tuned_at=0.95,
    ),
)
SMALL = SETTING.changed(methods=("osp",), criteria=("magnitude",), rates=(0.1,), gated=((0.1, 100.0),))


def tune(setting: Setting[Contest], job: Job) -> dict[tuple[str, str], comparison.Point]:
    split = data.load("digits", seed=0)
    return comparison.tune(setting, lambda: comparison.validation_task(setting, split, job), job)


def test_one_row_per_network_with_exactly_k_weights(job: Job) -> None:
    rows = comparison.run(SETTING, job)
    assert all(tuple(row) == comparison.COLUMNS for row in rows)
    pruned = [row for row in rows if row["method"] != "dense"]
    assert len(pruned) == (2 + 2 + 1 + 1) * 2 * 2  # two criteria for osp and pft, one for others; sparsities; seeds
    assert len({(row["method"], row["criterion"], row["sparsity"], row["seed"]) for row in pruned}) == len(pruned)
    assert {row["kept"] for row in pruned if row["sparsity"] == 0.9} == {round(0.1 * pruned[0]["total"])}
    assert all(0 <= row["test_error"] <= 1 and row["epochs"] == 2 for row in pruned)


def test_every_method_has_the_same_grid_and_the_rates_come_from_validation(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges = []
    monkeypatch.setattr(comparison, "error", lambda nets, part: [judges.append(part) or 0.5] * len(nets))
    points = tune(SETTING, job)
    chosen = {method: {point for (name, _), point in points.items() if name == method} for method, _ in points}
    smallest = {"osp": 0.05, "pft": 0.05, "pft-coupled": 0.1, "gmp": 0.05}
    assert chosen == {method: {(lr, 100.0)} for method, lr in smallest.items()}  # all are equal
    trials = (job.out / "digits-mlp-tuning.jsonl").read_text().splitlines()
    assert len(trials) == len(SETTING.options.pairs()) * len(SETTING.options.rates)
    split = data.load("digits", seed=0)
    examples = {row.numpy().tobytes() for x, _ in judges for row in x}
    assert len(examples) == pytest.approx(0.1 * len(split.train), abs=2)
    assert not examples & {row.numpy().tobytes() for row in split.test.x}


def test_one_rate_needs_no_tuning(job: Job) -> None:
    setting = SETTING.changed(rates=(0.1,), gated=((0.1, 500.0),))
    points = {(m, c): (0.1, 500.0 if m == "pft-coupled" else 100.0) for m, c in SETTING.options.pairs()}
    assert tune(setting, job) == points
    assert not list(job.out.iterdir())


def test_a_method_with_more_points_in_its_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="pft would try 2 points of its grid and the others 1; give as many"):
        SETTING.changed(rates=(0.1,))


def test_finished_networks_are_not_trained_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = comparison.run(SMALL, job)
    path = job.out / "digits-mlp.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + "\n")
    seeds, together = [], comparison.together
    monkeypatch.setattr(comparison, "together", lambda *a, **k: seeds.extend(k["seed"]) or together(*a, **k))
    monkeypatch.setattr(frame, "fit", lambda *a, **k: pytest.fail("the dense networks are there"))
    assert comparison.run(SMALL, job) == rows
    assert len(seeds) == 1


def test_methods_with_a_mask_stage_have_the_share_that_the_setting_says(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = {name for name, method in pruning_methods().items() if method.takes("mask_share")}
    third = SETTING.changed(
        methods=(),
        contenders={name: comparison.Contender(name, (("mask_share", 1 / 3),)) for name in staged},
        rates=(0.1,),
        gated=((0.1, 100.0),),
        criteria=("magnitude",),
        seeds=1,
    )
    stages: dict[str, dict[str, int]] = {}
    prune = comparison.prune

    def count_stages(setting: Any, entries: list[comparison.Entry], *args: Any, **options: Any) -> list[Pruned]:
        results = prune(setting, entries, *args, **options)
        stages[entries[0].method] = Counter(row["stage"] for row in results[0].history)
        return results

    monkeypatch.setattr(comparison, "prune", count_stages)
    comparison.run(third.changed(sparsities=(0.9,), pruning=replace(SETTING.pruning, epochs=3)), job)
    assert stages.keys() == pruning_methods().keys()
    for name in staged:  # an epoch of its own, or a third of one stage
        assert stages[name]["masks"] == (1 if "tune" in stages[name] else 3)
    assert third.terms != SETTING.terms


def test_a_network_that_diverges_does_not_stop_the_others(job: Job) -> None:
    wild = SETTING.changed(methods=("osp",), criteria=("magnitude",), rates=(0.1, 1e12))
    assert set(tune(wild, job).values()) == {(0.1, 100.0)}
    assert '"validation_error": 1.0' in (job.out / "digits-mlp-tuning.jsonl").read_text()


def test_divergence_is_known_by_its_kind_and_not_by_its_words() -> None:
    def attempt(entries: list[int]) -> list[int]:
        if 3 in entries:
            raise Diverged("in any words")
        if 7 in entries:
            raise ValueError("the loss became nan")
        return entries

    assert comparison.despite_divergence([1, 2, 3, 4], attempt, -1) == [1, 2, -1, 4]
    with pytest.raises(ValueError, match="the loss became nan"):
        comparison.despite_divergence([7, 8], attempt, -1)


def test_a_network_that_overflows_in_its_last_step_does_not_stop_the_others(job: Job) -> None:
    once = replace(SETTING.pruning, epochs=1, batch_size=2000, schedule="constant", warmup=0.0)
    wild = SETTING.changed(methods=("osp",), criteria=("magnitude",), rates=(0.1, 1e39), pruning=once)
    assert set(tune(wild, job).values()) == {(0.1, 100.0)}


def test_networks_made_on_other_terms_are_not_taken_for_these(job: Job) -> None:
    comparison.run(SMALL, job)
    with pytest.raises(ValueError, match=rf"on the terms {SMALL.terms} .* begin in another --out"):
        comparison.run(SMALL.changed(pruning=replace(SMALL.pruning, epochs=7)), job)
    with pytest.raises(ValueError, match="begin in another --out"):
        comparison.run(SMALL.changed(dense=replace(SMALL.dense, epochs=7)), job)


def test_another_method_or_seed_leaves_the_terms_as_they_are() -> None:
    assert SETTING.changed(methods=("osp",), seeds=7, sparsities=(0.5,)).terms == SETTING.terms


def test_the_smoke_grid_has_every_method() -> None:
    (smoke,) = pft_vs_osp.SETTINGS["smoke"]
    assert list(dict(smoke.options.pairs())) == list(pruning_methods())
    for scale, settings in pft_vs_osp.SETTINGS.items():
        assert all(setting.options.tuned_at in setting.sparsities for setting in settings), scale


# --- A method of somebody else


@pipeline
def exchange_globally(
    model: nn.Module,
    data: Data,
    config: pp.Config,
    *,
    sparsity: float,
    mask_share: float = 0.5,
    exchange: float = 0.3,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    folder: Any = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Like RigL (Evci et al. 2020) over all layers: after every epoch the smallest weights go, and others grow."""
    stage = Stages(model, data, loss=loss, seed=seed, folder=folder, progress=progress)
    mask_config, tune_config = split_epochs(config, mask_share)
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=sparsity)
    weights.apply_mask(model, mask)
    history: History = []
    for epoch in range(mask_config.epochs):
        low, high = (mask_config.span[1] * (epoch + k) / mask_config.epochs for k in (0, 1))
        history += yield stage("masks", replace(mask_config, epochs=1, span=(low, high), warmup=0.0))
        mask = regrown(model, mask, data, loss, exchange)
        weights.apply_mask(model, None)
        weights.apply_mask(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(tune_config, stage)))


def regrown(model: nn.Module, mask: Any, data: Any, loss: Loss, exchange: float) -> dict[str, torch.Tensor]:
    """The mask with the smallest share `exchange` of its weights replaced by those with the largest gradients."""
    x, y = data
    layers = weights.prunable(model)
    gradients = torch.autograd.grad(loss(model(x[:128]), y[:128]), list(layers.values()))
    size = sum(int(keep.sum()) for keep in mask.values())
    survivors = round((1 - exchange) * size)
    sizes = torch.cat([(w.detach().abs() * mask[name]).flatten() for name, w in layers.items()])
    keep = torch.zeros_like(sizes, dtype=torch.bool).index_fill_(0, sizes.topk(survivors).indices, True)
    growth = torch.cat([g.abs().flatten() for g in gradients]).masked_fill(keep, -1.0)
    keep[growth.topk(size - survivors).indices] = True
    parts = keep.split([w.numel() for w in layers.values()])
    return {name: part.view_as(w) for part, (name, w) in zip(parts, layers.items(), strict=True)}


@pytest.fixture
def _another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in METHODS, and nothing else."""
    row = Method(exchange_globally, "Global exchange", "weights die and grow", "exchange", "#661100", "8")
    monkeypatch.setitem(METHODS, "exchange", row)


@pytest.mark.usefixtures("_another")
def test_a_new_row_in_the_table_of_methods_is_compared_and_drawn(job: Job) -> None:
    (smoke,) = pft_vs_osp.SETTINGS["smoke"]
    smoke = smoke.changed(rates=(0.1,), gated=((0.1, 100.0),))  # nothing is tuned
    assert ("exchange", "magnitude") in smoke.options.pairs()
    rows = comparison.run(smoke, job)
    pruned = [row for row in rows if row["method"] == "exchange"]
    assert {(row["sparsity"], row["seed"]) for row in pruned} == {(s, seed) for s in (0.9, 0.98) for seed in range(2)}
    assert all(row["kept"] == round((1 - row["sparsity"]) * row["total"]) for row in pruned)
    assert max(row["test_error"] for row in pruned) < 0.2
    (figure,) = pft_vs_osp.figures(smoke, job)
    canvas = Canvas()
    figure.paint(canvas, rows)
    (axes,) = canvas.axes
    lines = {line.get_label(): line for line in axes.get_lines() if str(line.get_label())[0] != "_"}
    assert {text.get_text() for text in axes.texts} == set(lines)
    assert list(lines) == [*(method.label for method in pruning_methods().values()), "dense"]
    assert (lines["exchange"].get_color(), lines["exchange"].get_marker()) == ("#661100", "8")
