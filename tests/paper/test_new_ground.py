"""Methods on new networks: frozen rates, test data that are read last, paired statistics, and weak magnitude."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas
from scipy import stats

import pacprune as pp
from pacprune import data
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.paper import comparison, frame, new_ground, weak_magnitude
from pacprune.paper.comparison import Contender, Entry
from pacprune.paper.frame import Job, Setting
from pacprune.paper.statistics import cells, highest, holm, interval, paired, share, verdict

VIT, GPT, MLP = new_ground.SETTINGS["smoke"]
TINY = MLP.changed(
    methods=("pft", "gmp"),
    examples=256,
    network={"hidden": (8,)},
    dense=replace(MLP.dense, epochs=1),
    pruning=replace(MLP.pruning, epochs=2),
)


# --- Paired differences


@pytest.mark.parametrize("count", [2, 3, 5, 40])
@pytest.mark.parametrize("shift", [0.0, 0.7, 30.0])
def test_paired_differences_have_students_interval_and_p_value(count: int, shift: float) -> None:
    generator = np.random.default_rng(count)
    first, second = generator.normal(size=count) + shift, generator.normal(size=count)
    theirs = stats.ttest_rel(first, second)
    ours = paired(list(first - second))
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6)
    low, high = theirs.confidence_interval(0.95)
    assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(first - second), low, high), rel=1e-6)


def test_equal_differences_leave_no_doubt_and_one_leaves_all() -> None:
    assert paired([0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0)
    assert paired([0.0, 0.0]).p == 1.0
    assert np.isnan(paired([0.5])[1:]).all()
    assert verdict(paired([7.0])) == "level"


def test_holms_p_value_is_the_least_level_at_which_his_procedure_rejects() -> None:
    p = [0.01, 0.04, 0.03, 0.005, 0.005, 0.9]

    def rejected(level: float) -> set[int]:
        names: set[int] = set()
        for place, k in enumerate(np.argsort(p, kind="stable")):
            if p[k] > level / (len(p) - place):
                break
            names.add(int(k))
        return names

    for k, adjusted in enumerate(holm(p)):
        assert k in rejected(adjusted + 1e-12)
        assert adjusted == 1.0 or k not in rejected(adjusted - 1e-12)
    assert holm([0.01, float("nan")]) == [0.02, 1.0]
    assert holm([]) == []


def rows_of(values: dict[str, list[float]], **changes: Any) -> list[dict[str, Any]]:
    common = {"dataset": "digits", "model": "mlp", "label": "", "sparsity": 0.9} | changes
    return [
        common | {"method": method, "seed": seed, "value": value}
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]


def test_a_cell_is_worse_beyond_interval_and_margin_better_beyond_the_interval() -> None:
    rows = rows_of(
        {
            "dense": [0.05] * 3,
            "pft": [0.100, 0.110, 0.120],
            "gmp": [0.110, 0.121, 0.130],  # one point more in every seed, up to a tenth
            "osp": [0.0991, 0.1091, 0.1191],  # 0.09 points less: within the margin
            "imp": [0.098, 0.108, 0.118],
            "dpf": [0.090, 0.110, 0.130],
        }
    )
    table = {row["method"]: row for row in cells(rows)}
    assert {method: row["verdict"] for method, row in table.items()} == {
        "gmp": "better",
        "osp": "level",
        "imp": "worse",
        "dpf": "level",
    }
    gmp = table["gmp"]
    assert (gmp["pft"], gmp["other"], gmp["seeds"]) == pytest.approx((0.11, 0.361 / 3, 3))
    assert (gmp["difference"], gmp["low"], gmp["high"]) == pytest.approx(interval([-1.0, -1.1, -1.0]))
    assert [table[method]["holm"] for method in table] == holm([table[method]["p"] for method in table])


def test_pairs_are_of_one_seed_and_cells_of_one_contest() -> None:
    values = {"pft": [0.1, 0.2, 0.3], "gmp": [0.2, 0.3, 0.4]}
    rows = rows_of(values)[::-1] + rows_of({"gmp": [0.9]}, model="vit") + rows_of(values, label="frozen")
    table = cells([row for row in rows if (row["method"], row["seed"]) != ("pft", 2)])
    assert [(row["model"], row["label"], row["seeds"]) for row in table] == [("mlp", "", 2), ("mlp", "frozen", 2)]
    assert all(row["difference"] == pytest.approx(-10) for row in table)


def test_shares_are_those_of_the_two_highest_sparsities_of_each_contest() -> None:
    better, level = {"pft": [0.1, 0.2], "gmp": [0.2, 0.3]}, {"pft": [0.1, 0.2], "gmp": [0.1, 0.2]}
    rows = rows_of(level, sparsity=0.5) + rows_of(better) + rows_of(level, sparsity=0.95)
    rows += rows_of(better, model="vit", sparsity=0.4)
    table = cells(rows)
    assert [(row["model"], row["sparsity"]) for row in highest(table)] == [("mlp", 0.9), ("mlp", 0.95), ("vit", 0.4)]
    numbers = new_ground.summary(table)
    assert numbers["two highest sparsities: share of cells below GMP"] == share(highest(table), "better") == 2 / 3
    assert numbers["cells"] == 4


def test_the_summary_counts_what_is_worse_before_and_after_holm() -> None:
    sure = {"pft": [0.20, 0.21, 0.22], "imp": [0.10, 0.11, 0.12]}
    unsure = {"pft": [0.20, 0.21, 0.225], "imp": [0.18, 0.191, 0.2]}
    table = cells(rows_of(sure) + rows_of(unsure, model="vit") + rows_of(unsure, model="lstm"))
    assert [row["verdict"] for row in table] == ["worse"] * 3
    table[1]["holm"] = 0.051
    numbers = new_ground.summary(table)
    assert numbers["cells where PFT is worse by more than interval + 0.1 points"] == 3
    assert numbers["of these, after Holm's correction"] == sum(row["holm"] <= 0.05 for row in table) == 2
    assert numbers["the most that another method is ahead on average, points"] == pytest.approx(10)


# --- Frozen learning rates


def test_tuning_freezes_the_rates_before_test_data_are_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    split = data.digits(seed=0)
    test, train = ({row.numpy().tobytes() for row in x} for x in (split.test.x, split.train.x[:256]))
    path, looks = job.out / new_ground.POINTS, []
    error = comparison.error

    def judge(nets: Any, part: Any) -> list[float]:
        read = {row.numpy().tobytes() for row in part[0]}
        looks.append("test" if read & test else "validation")
        assert looks[-1] == "validation" or {"pft", "gmp"} <= set(path.read_text().split('"'))
        assert looks[-1] == "test" or read <= train
        return error(nets, part)

    monkeypatch.setattr(comparison, "error", judge)
    new_ground.tune(TINY, job)
    assert set(looks) == {"validation"}
    rows = new_ground.report(TINY, job)
    assert set(looks[2:]) == {"test"}
    assert all(tuple(row) == new_ground.COLUMNS for row in rows)
    assert [row["method"] for row in rows[:2]] == ["dense"] * 2
    assert len(rows) == 2 + 2 * 3 * 2
    points = {entry["method"]: entry["lr"] for entry in json.loads(path.read_text())[TINY.name]["points"]}
    assert all(row["lr"] == points[row["method"]] and row["epochs"] == 2 for row in rows[2:])
    assert {row["kept"] for row in rows if row["sparsity"] == 0.9} == {round(0.1 * rows[0]["total"])}
    trials = new_ground.trials(TINY, job)
    for method, lr in points.items():
        tried = {row["lr"]: row["value"] for row in trials if row["method"] == method}
        assert len(tried) == len(TINY.options.rates)
        assert tried[lr] == min(tried.values())


def test_nothing_is_reported_without_frozen_rates_or_on_other_terms(job: Job) -> None:
    with pytest.raises(ValueError, match=r"points\.json has no learning rates for digits-mlp; run `tune` before"):
        new_ground.report(TINY, job)
    new_ground.tune(TINY.changed(methods=("gmp",)), job)
    with pytest.raises(ValueError, match="no learning rates of pft for digits-mlp; tune them first"):
        new_ground.report(TINY, job)
    others = {"seeds": 5, "sparsities": (0.9, 0.99), "rates": (0.1, 0.2), "pruning": replace(TINY.pruning, clip=1.0)}
    for name, value in others.items():
        for phase in (new_ground.report, new_ground.tune):
            with pytest.raises(ValueError, match=r"froze digits-mlp on the terms .* begin in another --out"):
                phase(TINY.changed(**{name: value}), job)
    with pytest.raises(ValueError, match="froze digits-mlp on the terms"):
        new_ground.report(TINY, replace(job, seed=1))


def test_methods_can_be_tuned_and_reported_one_by_one(
    make_job: Callable[..., Job], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, in_parts = make_job(tmp_path / "at-once"), make_job(tmp_path / "in-parts")
    new_ground.tune(TINY, at_once)
    rows = new_ground.report(TINY, at_once)
    for method in ("gmp", "pft"):
        part = new_ground.prepared(TINY, in_parts, methods=(method,))
        new_ground.tune(part, in_parts)
        assert {row["method"] for row in new_ground.report(part, in_parts)} == {"dense", method}
    monkeypatch.setattr(comparison, "together", lambda *_, **__: pytest.fail("all networks are there"))
    monkeypatch.setattr(frame, "fit", lambda *_, **__: pytest.fail("the dense networks are there"))
    assert new_ground.report(TINY, in_parts) == rows
    records = [json.loads((job.out / new_ground.POINTS).read_text())[TINY.name] for job in (at_once, in_parts)]
    assert records[0]["terms"] == records[1]["terms"]
    assert records[0]["setting"]["sparsities"] == [0.8, 0.9, 0.95]
    names = [{entry["method"]: entry for entry in record["points"]} for record in records]
    assert names[0] == names[1]


def test_a_character_network_that_diverges_counts_as_a_guess(job: Job) -> None:
    wild = GPT.changed(methods=("osp",), seeds=1, sparsities=(0.9,), **comparison.same_grid(1e30))
    new_ground.tune(wild, job)
    dense, diverged = new_ground.report(wild, job)
    letters = len(set(new_ground.characters.babble(4000)))
    assert (diverged["measure"], diverged["kept"]) == ("validation_loss", 0)
    assert diverged["value"] == pytest.approx(np.log(letters))
    assert dense["value"] < diverged["value"]


# --- The settings


def test_every_network_has_decay_three_rates_and_three_sparsities() -> None:
    settings = new_ground.SETTINGS["reduced"]
    optimisers = {setting.model: setting.dense.optimizer for setting in settings}
    assert optimisers == {
        "vit": "adamw",
        "convnext": "adamw",
        "wide-resnet": "sgd",
        "resnet20": "sgd",
        "gpt": "adamw",
        "lstm": "adam",
        "mlp": "adam",
        "lenet5": "sgd",
        "vgg": "sgd",
        "mixer": "adamw",
    }
    assert [setting.model for setting in settings if setting.label == "untouched"] == ["vgg", "mixer"]
    for setting in settings:
        assert setting.dense.weight_decay > 0
        assert replace(setting.dense, epochs=1) == replace(setting.pruning, epochs=1)
        assert len(setting.sparsities) == len(setting.options.rates) == setting.seeds == 3
        assert setting.options.tuned_at == setting.sparsities[1]
        assert set(setting.options.methods) == {name for name in pruning_methods() if not name.startswith("pft-")}
        assert {ratio for _, ratio in setting.options.gated} == {100.0}  # the default of every method


def test_on_a_gpu_steps_are_graphs_and_convolutions_are_compiled(job: Job) -> None:
    job = replace(job, device=torch.device("cuda"))
    for setting in new_ground.SETTINGS["reduced"]:
        setting = new_ground.prepared(setting, job)
        expected = "compiled" if setting.model in ("convnext", "resnet20", "vgg", "wide-resnet") else "graph"
        assert {setting.dense.execution, setting.pruning.execution} == {expected}
        assert setting.dense.amp
        assert new_ground.prepared(frame.on_device(setting, job.device), job) == setting  # as `reproduce` has it
        assert not new_ground.prepared(setting.changed(amp=False), job).pruning.amp


@pytest.mark.parametrize("setting", new_ground.SETTINGS["reduced"], ids=lambda setting: setting.model)
def test_the_networks_take_the_data_they_are_declared_for(setting: Setting[Any]) -> None:
    if setting.model == "gpt":
        return
    row = data.DATA_SETS[setting.data]
    net = new_ground.NETWORKS[setting.model](row.shape, row.classes, seed=0, **setting.options.network)
    assert net.eval()(torch.zeros(2, *row.shape)).shape == (2, 10)


# --- The pictures


def test_there_is_a_panel_per_network_and_a_legend_for_all(job: Job) -> None:
    values = {"dense": [0.05], "pft": [0.1], "gmp": [0.2], "rigl": [0.9]}
    measure = {"epochs": 2.0, "measure": "test_error"}
    rows = rows_of(values, **measure) + rows_of(values, sparsity=0.99, **measure)
    rows += rows_of(values, model="gpt", **measure | {"measure": "validation_loss"})
    rows += rows_of(values, label="frozen", **measure | {"epochs": 0.0})
    canvas = Canvas()
    new_ground.paint(canvas, rows)
    panels = [axes for axes in canvas.axes if axes.get_title(loc="left")]
    titles = ["MLP, digits", "GPT, digits", "MLP, digits, frozen"]
    assert [axes.get_title(loc="left") for axes in panels] == titles
    assert [axes.get_ylabel() for axes in panels] == ["error, %", "loss, nats", "error, %"]
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["PFT", "GMP", "RigL", "dense"]
    assert len(panels[2].get_lines()) == 3  # an untrained network is no dense one
    low, high = panels[0].get_ylim()
    assert low < 5
    assert 20 < high < 30  # what is far above the others does not hide them


def test_the_map_of_cells_says_how_far_pft_is_below(job: Job) -> None:
    canvas = Canvas()
    rows = cells(rows_of({"pft": [0.1, 0.2], "gmp": [0.2, 0.3], "osp": [0.1, 0.2004]}))
    new_ground.paint_cells(canvas, rows)
    (axes,) = canvas.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["one-shot", "GMP"]
    assert {text.get_text() for text in axes.texts} == {"10.0", "0.0"}


# --- Where magnitude says little


def weak(case: str) -> Setting[Any]:
    (setting,) = [setting for setting in weak_magnitude.SETTINGS["smoke"] if setting.label == case]
    return setting


def pruned(setting: Setting[Any], method: str, job: Job, sparsity: float) -> tuple[Any, Any, Any]:
    """(what it came from, the result, its data)."""
    task = new_ground._tasks(setting, job)[1]
    criterion = dict(setting.options.pairs())[method]
    entry = Entry(method, criterion, sparsity, 0, *setting.options.points(method)[0])
    (result,) = comparison.prune(setting, [entry], {0: task.build(0)}, task.data, job)
    return task.build(0), result, task.data


def test_frozen_weights_are_kept_by_size_or_by_learned_scores(job: Job) -> None:
    setting = weak("frozen")
    masks = {}
    for method in setting.options.methods:
        start, result, _ = pruned(setting, method, job, 0.7)
        masks[method] = result.mask
        largest = pp.top_k(pp.scores.magnitude(start), sparsity=0.7)
        moved = any(not torch.equal(largest[name], keep) for name, keep in result.mask.items())
        assert moved == (method == "pft")
        ends = dict(result.model.named_parameters())
        for name, before in start.named_parameters():
            if name not in result.mask:
                assert torch.equal(before, ends[name])
    assert setting.dense.epochs == 0


def test_from_random_scores_feather_is_pft_whose_offsets_learn_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = weak("random-start")
    assert setting.options.pairs() == [("pft", "random"), ("feather", "random")]
    calls, together = [], comparison.together
    monkeypatch.setattr(comparison, "together", lambda *a, **k: calls.append((a, k)) or together(*a, **k))
    pruned(setting, "feather", job, 0.9)
    ((verb, _, _, (config,)), options) = calls[0]
    assert verb is METHODS["pft"].verb
    assert (config.gate_lr, options["criterion"]) == (0.0, ["random"])


def test_untrained_networks_have_the_epochs_of_both_stages() -> None:
    setting = weak("untrained")
    assert (setting.dense.epochs, setting.pruning.epochs) == (0, MLP.dense.epochs + MLP.pruning.epochs)


@pytest.mark.parametrize(("case", "pattern", "density"), [("2of4", "2:4", 0.5), ("1of4", "1:4", 0.25)])
def test_patterns_hold_in_all_layers_whose_rows_can_be_cut(case: str, pattern: str, density: float, job: Job) -> None:
    setting = weak(case).changed(network={"hidden": (10,)})  # the rows of the last layer cannot be cut
    assert all(METHODS[method].takes("pattern") for method in setting.options.methods)
    for method in setting.options.methods:
        _, result, _ = pruned(setting, method, job, setting.sparsities[0])
        first, last = pp.prunable(result.model).values()
        assert result.pattern == pattern
        assert float((first != 0).float().mean()) == density
        assert (last != 0).all()


def test_a_contender_can_have_other_options_than_its_row(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Contender("gmp", (("every", 3),), (("clip", 0.5),))
    setting = TINY.changed(contenders={"gmp": patient})
    assert setting.terms != TINY.terms
    calls, together = [], comparison.together
    monkeypatch.setattr(comparison, "together", lambda *a, **k: calls.append((a, k)) or together(*a, **k))
    for method in ("gmp", "pft"):
        pruned(setting, method, job, 0.9)
    assert [call[1].get("every") for call in calls] == [3, None]
    assert [call[0][3][0].clip for call in calls] == [0.5, None]
