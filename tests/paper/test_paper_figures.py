"""Figures by the paper's own procedure: its constants, what is drawn, and CSVs that were published before."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas

import pacprune as pp
from pacprune.masking import weights
from pacprune.paper import (
    flow_chart,
    frame,
    keep_probs,
    kl_weight,
    mask_entropy,
    mask_stability,
    painting,
    pair_plot,
    paper_pft,
    pbp_stages,
    pft_at_init,
    pft_vs_osp,
    shared_weights,
    strong_tickets,
    weight_noise,
)
from pacprune.paper.frame import Job
from pacprune.paper.painting import Style
from pacprune.paper.paper_pft import EQUAL_EPOCHS, ONE_SHOT, OURS, WRITTEN
from pacprune.paper.pbp_stages import Start
from pacprune.paper.statistics import half_width, interval
from pacprune.runs import plots

RESULTS = Path(__file__).parents[2] / "results"
PAINTERS: dict[str, Callable[[Any, Any], None]] = {
    "shared-weights": shared_weights.paint,
    "weight-noise": weight_noise.paint,
    "strong-tickets": strong_tickets.paint,
    "kl-weight": kl_weight.paint,
    "mask-entropy": mask_entropy.paint,
    "keep-probs": keep_probs.paint_histogram,
    "pair-plot": pair_plot.paint,
    "pft-at-init": pft_at_init.paint,
    "mask-stability": mask_stability.paint,
}
PUBLISHED = sorted(path for name in PAINTERS for path in RESULTS.rglob(f"{name}*.csv"))


def legend_of(canvas: Canvas) -> list[str]:
    """The labels in the legends of a canvas and of its axes."""
    legends = [*canvas.legends, *(axes.get_legend() for axes in canvas.axes)]
    return [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]


def labels_of(canvas: Canvas) -> list[str]:
    """The labels at the ends of lines, from the lowest up."""
    return [text.get_text() for axes in canvas.axes for text in axes.texts]


def visible(canvas: Canvas) -> set[str]:
    """The labels of lines with a point within their axes."""
    labels = set()
    for axes in canvas.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for line in axes.get_lines():
            x, y = (np.atleast_1d(values).astype(float) for values in (line.get_xdata(), line.get_ydata()))
            inside = (low <= y) & (y <= high) & ((left <= x) & (x <= right) | (len(x) == 2))
            labels |= {line.get_label()} if inside.any() else set()
    return labels


# --- What was published before


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_rows_of_older_procedures_can_be_drawn(path: Path) -> None:
    paint = next(paint for name, paint in PAINTERS.items() if path.name.startswith(name))
    canvas = Canvas()
    paint(canvas, frame.read(path))
    assert canvas.axes


def test_older_rows_are_called_what_they_are() -> None:
    canvas = Canvas()
    pft_at_init.paint(canvas, frame.read(RESULTS / "pft-at-init-mnist-mlp.csv"))
    assert legend_of(canvas) == ["one-shot, equal epochs", 'PFT, recipe "coupled"']
    canvas = Canvas()
    shared_weights.paint(canvas, frame.read(RESULTS / "shared-weights-cifar10-resnet20.csv"))
    assert 'PFT from magnitude, recipe "coupled"' in labels_of(canvas)
    canvas = Canvas()
    strong_tickets.paint(canvas, frame.read(RESULTS / "strong-tickets-cifar10-resnet20.csv"))
    assert legend_of(canvas) == ["PFT from random, sparsity held", "PFT from SNIP, sparsity held"]


# --- What is drawn is what the legend says


def test_a_method_that_fails_hides_no_other_and_is_in_the_picture() -> None:
    common = {"dataset": "digits", "model": "mlp", "kept": 5, "epochs": 7}
    rows = [
        common | {"method": name, "criterion": start, "sparsity": s, "seed": seed, "test_error": error + seed / 1e3}
        for name, error in ((ONE_SHOT, 0.887), (EQUAL_EPOCHS, 0.885), (WRITTEN, 0.014), (OURS, 0.0141))
        for start in ("magnitude", "random")
        for s in (0.9, 0.98)
        for seed in range(2)
    ]
    canvas = Canvas()
    pft_at_init.paint(canvas, rows)
    assert len(legend_of(canvas)) == 4
    assert set(legend_of(canvas)) <= visible(canvas)
    renamed = [row | {"method": {ONE_SHOT: "osp", WRITTEN: "pft"}.get(row["method"], "gmp")} for row in rows]
    for paint in (pft_vs_osp.paint, pft_vs_osp.paint_criteria):
        canvas = Canvas()
        paint(canvas, renamed)
        assert labels_of(canvas)
        assert set(labels_of(canvas)) <= visible(canvas)


def test_names_are_written_as_people_write_them() -> None:
    assert painting.subject([{"dataset": "cifar10", "model": "resnet20"}]) == "CIFAR-10, ResNet20"
    assert painting.named("synflow", "weather") == "SynFlow, weather"


def test_labels_stand_where_lines_end_and_do_not_overlap() -> None:
    assert painting.apart([0.1, 0.5, 0.52, 0.9], 0.1) == pytest.approx([0.1, 0.46, 0.56, 0.9])
    assert painting.apart([0.0, 0.0, 0.15], 0.1) == pytest.approx([-0.05, 0.05, 0.15])
    axes = Canvas().subplots()
    axes.plot([1, 2], [3, 8], color="red", label="up")
    axes.plot([1, 2], [3, 1], color="blue", label="down")
    axes.plot([1, 2], [3, 3], label="_unnamed")
    painting.label_ends(axes)
    assert [(text.get_text(), text.get_color()) for text in axes.texts] == [("down", "blue"), ("up", "red")]


def test_lines_side_by_side_are_within_axes_that_nobody_limits() -> None:
    rows = [{"x": x, "y": float(x), "by": by} for x in (1, 9) for by in "ab"]
    canvas = Canvas()
    styles = {by: Style(by, "black", "o") for by in "ab"}
    painting.lines(canvas.subplots(), rows, x="x", y="y", by="by", styles=styles, side_by_side=True)
    assert visible(canvas) == {"a", "b"}
    assert canvas.axes[0].get_ylim()[1] > 9


def test_lines_that_coincide_lie_side_by_side() -> None:
    rows = [{"x": x, "y": 0.5, "by": by} for x in (1, 2) for by in "ab" for _ in range(2)]
    axes = Canvas().subplots()
    styles = {by: Style(by, "black", "o") for by in "abc"}
    painting.lines(axes, rows, x="x", y="y", by="by", styles=styles, side_by_side=True)
    places = [line.get_transform().transform((1, 0.5))[0] for line in axes.get_lines()]
    assert len(places) == 2
    assert places[1] - places[0] == pytest.approx(painting.GAP / 72 * axes.figure.dpi)


def test_errors_far_apart_have_a_logarithmic_axis_in_percent() -> None:
    for errors, scale in (((0.01, 0.02), "linear"), ((0.01, 0.9), "log")):
        axes = Canvas().subplots()
        painting.error_axis(axes, errors)
        assert axes.get_yscale() == scale
        low, high = axes.get_ylim()
        assert low < min(errors) < max(errors) < high
        assert axes.yaxis.get_major_formatter()(0.07, 0) == "7"


def test_half_an_interval_follows_from_the_standard_deviation() -> None:
    sample = [0.2, 0.5, 0.9, 0.4]
    mean, low, high = interval(sample)
    assert half_width(float(np.std(sample, ddof=1)), 4) == pytest.approx((high - low) / 2)
    assert mean == pytest.approx((low + high) / 2)


# --- The paper's constants


def only(settings: Any) -> Any:
    (setting,) = settings
    return setting


def trained(config: pp.Config) -> tuple[Any, ...]:
    return config.epochs, config.lr, config.schedule, config.augment


def test_pft_at_initialisation_is_the_papers_on_three_data_sets() -> None:
    settings = {setting.name: setting for setting in pft_at_init.SETTINGS["paper"]}
    lengths = {"mnist-mlp": (30, 30, 0.01), "fashion-mnist-mlp": (70, 30, 0.01), "cifar10-resnet20": (120, 60, 0.1)}
    assert settings.keys() == lengths.keys()
    for name, (tuning, masks, lr) in lengths.items():
        setting, options = settings[name], settings[name].options
        assert setting.dense.epochs == 0
        assert setting.pruning.epochs == tuning + masks
        assert dict(options.contender(ONE_SHOT).config)["epochs"] == tuning
        written = dict(options.contender(WRITTEN).options)
        assert (written["recipe"], written["mapping"], written["noise"]) == ("paper", "clamp", 1.0)
        assert round(written["mask_share"] * setting.pruning.epochs) == masks
        assert options.points(WRITTEN) == options.points(ONE_SHOT) == ((lr, 1.0),)
        pairs = [criterion for method, criterion in options.pairs() if method == WRITTEN]
        assert pairs == ["magnitude", "snip", "random"]


def test_shared_weights_and_noise_are_of_the_papers_pft_on_cifar10() -> None:
    shared, noise = only(shared_weights.SETTINGS["paper"]), only(weight_noise.SETTINGS["paper"])
    for setting in (shared, noise):
        assert (setting.name, setting.seeds) == ("cifar10-resnet20", 5)
        assert trained(setting.dense) == (120, 0.1, "step", True)
        assert setting.options.points(WRITTEN) == ((0.1, 1.0),)
        assert dict(setting.options.contender(WRITTEN).options)["recipe"] == "paper"
    assert trained(shared.pruning) == (60, 0.1, "step", True)  # masks alone
    assert trained(noise.pruning) == (180, 0.1, "step", True)
    assert noise.sparsities == (0.9,)
    assert {0.6, 0.95} <= set(shared.sparsities)
    assert [c for method, c in shared.options.pairs() if method == WRITTEN] == ["magnitude", "snip", "random"]


def test_strong_tickets_have_the_papers_gates() -> None:
    setting, way = only(strong_tickets.SETTINGS["paper"]), strong_tickets.WAYS[strong_tickets.WRITTEN]
    assert (setting.name, setting.pruning.epochs, setting.pruning.lr) == ("cifar10-resnet20", 100, 0.0)
    assert setting.pruning.augment
    assert (way.gate_lr, way.mapping, way.held) == (0.5, "clamp", False)
    assert (strong_tickets.EPS, strong_tickets.DRAWS) == (0.01, 10)


def test_masks_are_compared_over_30_runs_of_the_papers_networks() -> None:
    grey, colour = mask_stability.SETTINGS["paper"]
    assert (grey.name, grey.options.hidden, grey.options.spans) == ("mnist-mlp", (1000,) * 5, ((2, 5),))
    assert (colour.name, colour.options.spans) == ("cifar10-resnet20", ((1, 6), (9, 15)))
    assert grey.seeds == colour.seeds == 30
    assert trained(grey.dense) == (30, 0.01, "constant", False)
    assert trained(colour.dense) == (120, 0.1, "step", True)


@pytest.mark.parametrize(
    ("module", "name", "dense", "epochs", "lr", "posterior"),
    [
        (kl_weight, "mnist-mlp", 30, 30, 0.01, (-4, -1)),
        (keep_probs, "mnist-mlp", 30, 30, 0.01, (-4, -1)),
        (mask_entropy, "fashion-mnist-mlp", 70, 30, 0.01, (-7, -4)),
        (pair_plot, "cifar10-resnet20", 120, 60, 0.1, (-5, 2)),
    ],
)
def test_priors_and_posteriors_have_the_papers_lengths_and_ranges(
    module: Any, name: str, dense: int, epochs: int, lr: float, posterior: tuple[float, float]
) -> None:
    setting = module.SETTINGS["paper"][0]
    assert (setting.name, setting.seeds) == (name, 5)
    assert (setting.dense.epochs, setting.prior.epochs, setting.posterior.epochs) == (dense, epochs, epochs)
    assert setting.dense.lr == setting.prior.lr == lr
    assert posterior[0] <= math.log(setting.posterior.lr) <= posterior[1]
    assert -15 <= math.log(setting.std) <= -3
    assert setting.eps == 1e-4
    for stage in (setting.prior, setting.posterior):
        assert pbp_stages.gated(stage).gate_lr == stage.lr
        assert pbp_stages.gated(stage).gates_scheduled
    assert all(0.4 <= alpha <= 0.8 for alpha in setting.alphas)


def test_the_pair_plot_has_one_std() -> None:
    setting = only(pair_plot.SETTINGS["paper"])
    assert isinstance(setting.std, float)
    assert setting.alphas == (0.4, 0.8)


def test_as_many_settings_at_other_scales_are_the_same_with_fewer_epochs() -> None:
    (smoke,) = paper_pft.SETTINGS["smoke"]
    longer = paper_pft.lasting(smoke, 8, 4)
    assert (longer.dense.epochs, longer.pruning.epochs) == (8, 12)
    assert dict(longer.options.contender("osp").config) == {"epochs": 8}
    assert dict(longer.options.contender("pft").options)["mask_share"] == pytest.approx(1 / 3)
    written = paper_pft.as_written(longer, ONE_SHOT, WRITTEN)
    assert written.options.contender(WRITTEN) == longer.options.contender("pft")
    assert {method for method, _ in written.options.pairs()} == {ONE_SHOT, WRITTEN}


# --- Shared weights


def test_masks_are_learned_and_not_tuned_and_share_what_overlap_says(job: Job) -> None:
    setting = only(shared_weights.SETTINGS["smoke"]).changed(sparsities=(0.9,), seeds=1)
    rows = shared_weights.rows(setting, job)
    assert [(row["method"], row["criterion"]) for row in rows] == setting.options.pairs()
    shared = {(row["method"], row["criterion"]): row["shared"] for row in rows}
    assert all(row["chance"] == pytest.approx(0.1, abs=1e-3) for row in rows)
    assert shared[WRITTEN, "magnitude"] > 0.9  # two epochs move hardly a gate
    assert shared[WRITTEN, "random"] < 0.2  # isotropic: there was no mask to begin with
    assert shared[shared_weights.FAST, "magnitude"] < shared[WRITTEN, "magnitude"]


# --- Noise


def test_noise_of_one_width_is_the_same_for_all_and_may_reach_pruned_weights() -> None:
    net = pp.models.mlp(64, 10, hidden=(300,), seed=0)
    pp.apply_mask(net, pp.top_k(pp.scores.magnitude(net), sparsity=0.5))
    noisy = weight_noise.with_noise(net, None, 0.3, seed=0, number=0)
    wide = weight_noise.with_noise(net, None, 0.3, seed=0, number=0, everywhere=True)
    for name, w in weights.prunable(net).items():
        added, all_added = ((weights.prunable(other)[name] - w).detach() for other in (noisy, wide))
        assert not added[w == 0].any()
        assert float(all_added.std()) == pytest.approx(0.3, rel=0.05)
        assert torch.equal(added[w != 0], all_added[w != 0])
    assert pp.error(wide, (torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64))) in (0, 1)  # without a warning


def test_the_drop_is_a_fraction_of_the_accuracy_without_noise() -> None:
    common = {"method": "osp", "seed": 0, "units": "one"}
    rows = [common | {"noise": v, "test_error": error} for v, error in ((0.0, 0.2), (0.1, 0.6), (0.2, 0.2))]
    assert [row["drop"] for row in weight_noise.with_drops(rows)] == pytest.approx([0.5, 0.0])


# --- Strong tickets


def test_tickets_leave_the_weights_and_say_what_became_of_the_sparsity(job: Job) -> None:
    setting = only(strong_tickets.SETTINGS["smoke"]).changed(sparsities=(0.9,), seeds=1)
    rows = strong_tickets.rows(setting, job)
    assert [(row["way"], row["start"]) for row in rows] == [
        (way, start) for way in strong_tickets.WAYS for start in strong_tickets.STARTS
    ]
    for row in rows:
        held = strong_tickets.WAYS[row["way"]].held
        assert abs(row["trained_sparsity"] - 0.9) < (1e-4 if held else 0.1)
        assert row["start_error"] > 0.7
        assert row["gibbs_std"] >= 0
    assert {row["trained_sparsity"] for row in rows if row["way"] == "paper"}.isdisjoint({0.9})


# --- Masks over orders of the data


def test_every_figure_has_the_points_of_its_layers_and_counts_of_all(job: Job) -> None:
    smoke = only(mask_stability.SETTINGS["smoke"])
    setting = smoke.changed(seeds=3, dense=pp.Config(epochs=2, lr=0.1))
    table = mask_stability.rows(setting, job)
    for first, last in setting.options.spans:
        rows = mask_stability.shown(lambda: table, first, last)
        assert [number for number in range(1, 7) if any(row["number"] == number for row in rows)] == list(range(1, 7))
        assert {row["number"] for row in rows if row["shown"]} == set(range(first, min(last, 6) + 1))
        hidden = [row for row in rows if not row["shown"]]
        assert len(hidden) == len({row["layer"] for row in hidden})
        canvas = Canvas()
        mask_stability.paint(canvas, rows)
        assert len(canvas.axes) == min(last, 6) - first + 2  # and the colours
    for row in table:
        if row["kept"] is not None:
            assert row["magnitude"] > 0
            assert row["deviation"] >= row["spread"] - 1e-6  # a weight may change its sign
            assert 0 < row["kept"] < 1


# --- Stages of PAC-Bayes pruning


def test_random_pruning_is_isotropic_and_clamped_and_a_mask_is_blocks_by_the_sigmoid(job: Job) -> None:
    setting = kl_weight.SETTINGS["smoke"][0].changed(dense=pp.Config(epochs=1))
    split = pp.data.digits(seed=0)
    for criterion, mapping, values in (("random", "clamp", 1), ("magnitude", "sigmoid", 2)):
        start = Start(criterion, 0.9, 1e-3, 0)
        (net,) = pbp_stages.begin(setting, [start], split, job)
        slab = pp.read(net)
        assert start.mapping == mapping
        assert len(torch.cat([p.flatten() for p in slab.keep_prob.values()]).unique()) == values
        assert slab.sparsity == pytest.approx(0.9, abs=1e-3)
        assert all(float(std) == pytest.approx(setting.std) for std in slab.std.values())


# --- The flow chart


def test_the_flow_chart_has_every_box_and_an_arrow_between_any_two(job: Job) -> None:
    (figure,) = flow_chart.figures(only(flow_chart.SETTINGS["paper"]), job)
    rows = frame.draw(figure, job, terms="one").rows
    canvas = Canvas()
    flow_chart.paint(canvas, rows)
    (axes,) = canvas.axes
    assert len(axes.patches) == len(rows) == len(flow_chart.BOXES)
    columns = {row["procedure"] for row in rows}
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == len(rows) - len(columns)
    words = " ".join(text.get_text().replace("\n", " ") for text in axes.texts)
    assert all(row["text"] in words for row in rows)


def test_no_figure_is_without_a_painter_of_png(job: Job) -> None:
    assert plots.png_of(flow_chart.paint, [box._asdict() for box in flow_chart.BOXES])[:4] == b"\x89PNG"
