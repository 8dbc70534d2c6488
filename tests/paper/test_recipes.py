"""`pacprune reproduce`: every recipe at the scale smoke, what it leaves, and the methods that the figures compare."""

import json
import sys
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import Lasso
from typer.testing import CliRunner, Result

from pacprune.cli import app
from pacprune.data import trace
from pacprune.methods.table import METHODS
from pacprune.paper import alignment_change, frame, linear_model, painting, recipes, weight_noise, wide_masks
from pacprune.paper.frame import Figure, Job, Recipe, Setting
from pacprune.paper.statistics import agreement, interval
from pacprune.theory import linear
from pacprune.training.config import Config

NAMES = list(recipes.RECIPES)


def call(*words: str) -> Result:
    return CliRunner().invoke(app.build(), ["reproduce", *words], prog_name="pacprune")


@pytest.fixture(scope="module", params=NAMES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a recipe prints at the scale smoke."""
    folder = tmp_path_factory.mktemp("recipe") / "out"
    trace._looks.clear()  # a recipe is a process of its own
    process = call(request.param, "--scale", "smoke", "--out", str(folder), "--json")
    assert process.exit_code == 0, process.stderr
    return json.loads(process.stdout)


# --- Every recipe


def test_every_figure_has_its_csv_its_picture_and_a_caption(result: dict[str, Any]) -> None:
    folder = Path(result["folder"])
    assert result["figures"]
    for figure in result["figures"]:
        rows = frame.read(folder / figure["csv"])
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)
        assert (folder / figure["png"]).read_bytes()[:4] == b"\x89PNG"
        assert figure["caption"].endswith(".")
    assert all(np.isfinite(value) for value in result["numbers"].values())
    assert (result["scale"], result["seed"]) == ("smoke", 0)


def test_running_again_returns_at_once(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "reproduce", lambda *_: pytest.fail("it was computed again"))
    again = call(result["recipe"], "--scale", "smoke", "--out", result["folder"], "--json")
    assert json.loads(again.stdout) == result
    text = call(result["recipe"], "--scale", "smoke", "--out", result["folder"]).stdout
    assert all(figure["png"] in text for figure in result["figures"])


def test_a_run_that_was_broken_off_keeps_its_rows(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = Path(result["folder"]), {}
    for file in folder.glob("*.csv"):
        before[file] = file.stat().st_mtime_ns
    (folder / "result.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # and where it is not installed, the CSVs do
    for file in folder.glob("*.png"):
        file.unlink()
    again = call(result["recipe"], "--scale", "smoke", "--out", str(folder))
    assert again.exit_code == 0, again.stderr
    assert "matplotlib is not installed" in again.stdout
    assert {file: file.stat().st_mtime_ns for file in folder.glob("*.csv")} == before
    assert json.loads((folder / "result.json").read_text())["numbers"] == result["numbers"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--scale smoke --seed 1", "seed is 0 there and 1 here"), ("--scale reduced", "scale is 'smoke'")],
)
def test_another_run_does_not_touch_the_folder(result: dict[str, Any], flags: str, message: str) -> None:
    process = call(result["recipe"], *flags.split(), "--out", result["folder"])
    assert process.exit_code == 2
    assert message in process.stderr


# --- Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("best-figure", "recipe 'best-figure' is unknown; use one of linear-model"),
        ("", "the name of a recipe is missing; give one, or --list"),
        ("best-figure --list", "recipe 'best-figure' is unknown"),
        ("linear-model --scale huge", "scale 'huge' is unknown; use one of smoke, reduced, full"),
        ("paper-pft --scale full", "scale 'full' is unknown; use one of smoke, reduced, paper"),
        ("new-ground --scale paper", "new-ground has no scale 'paper', since its largest one is not the paper's"),
        ("linear-model --seed -1", "seed is -1"),
        ("linear-model --device abacus", "the device 'abacus' cannot be used here"),
        ("linear-model --data-dir nowhere", "nowhere does not exist"),
        ("linear-model --out .", "is not empty and holds no recipe.json"),
        ("linear-model --out mine.txt", "mine.txt is a file"),
        ("linear-model --only mnist-mlp", "only is 'mnist-mlp', but linear-model has one setting; leave it out"),
        ("pft-vs-osp --only mnist", "the settings of pft-vs-osp at this scale are mnist-mlp, fashion-mnist-mlp,"),
    ],
)
def test_bad_input_gets_one_sentence(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("keep me")
    process = call(*words.split())
    assert (process.exit_code, process.stdout) == (2, "")
    assert process.stderr.startswith("pacprune: error: ")
    assert message in process.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_help_says_which_recipes_have_several_settings_and_where_figures_go() -> None:
    text = " ".join(call("--help").stdout.split()).replace("- ", "-")  # a line may break after a hyphen
    assert f"One setting of {', '.join(recipes.SEVERAL)}; an unknown name lists them" in text
    assert "[default: runs/NAME-SCALE[-ONLY]]" in text
    assert "--list List all figures, or those of NAME" in text


# --- What recipes share


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_whether_it_has_several_settings(name: str) -> None:
    recipe = recipes.RECIPES[name]
    assert recipe.several == any(len(recipe.at(scale)) > 1 for scale in recipe.scales)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_scale_is_called_the_papers_or_full(name: str) -> None:
    assert recipes.RECIPES[name].scales in (("smoke", "reduced", "paper"), ("smoke", "reduced", "full"))
    drawn = [line for line in recipes.RECIPES[name].lines if line.figure]
    if "paper" in recipes.RECIPES[name].scales:
        assert drawn, "a setting of the paper is that of one of its figures"


# --- The list of figures


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_lines_that_can_be_run(name: str) -> None:
    recipe = recipes.RECIPES[name]
    assert recipe.lines
    for line in recipe.lines:
        assert line.scale in recipe.scales
        assert line.only in ("", *(setting.name for setting in recipe.at(line.scale)))
        assert line.title
        if line.figure:
            assert line.procedure in frame.PROCEDURES
            assert line.verdict in frame.VERDICTS
            assert bool(line.see) == (line.verdict != frame.NOT_MEASURED), "a verdict follows from published numbers"
            assert line.procedure != "paper" or line.scale == "paper" or "paper" not in recipe.scales
        else:
            assert (line.procedure, line.verdict) == ("", "")


STAGE_1 = {"mnist": ("constant", 0.01, 30), "fashion-mnist": ("constant", 0.01, 70), "cifar10": ("step", 0.1, 120)}
"""Schedule, learning rate and epochs of the paper's dense training, by data set."""


@pytest.mark.parametrize("name", NAMES)
def test_numbers_by_the_papers_procedure_are_of_a_recipe_with_the_papers_constants(name: str) -> None:
    recipe = recipes.RECIPES[name]
    only = {line.only for line in recipe.lines if line.procedure in ("paper", "reduced")}
    settings = recipe.at("paper") if only and "paper" in recipe.scales else ()
    for setting in settings:
        # The flow chart is of numbers that it makes itself.
        if ("" in only or setting.name in only) and setting.data and setting.dense.epochs:
            dense = setting.dense
            assert (dense.schedule, dense.lr, dense.epochs) == STAGE_1[setting.data]
            assert (dense.momentum, dense.batch_size, dense.weight_decay, dense.warmup) == (0.9, 128, 0.0, 0.0)
            assert dense.augment == (setting.data == "cifar10")


def test_the_list_has_the_papers_figures_in_their_order_and_then_ours() -> None:
    rows = json.loads(call("--list", "--json").stdout)["figures"]
    assert rows == recipes.listing()
    first = [frame.Line("", row["figure"]).numbers[:1] for row in rows]
    drawn = [number for (number,) in filter(None, first)]
    assert drawn == sorted(drawn)
    assert [bool(number) for number in first] == [True] * len(drawn) + [False] * (len(rows) - len(drawn))
    assert {row["recipe"] for row in rows} == set(NAMES)
    assert [row["figure"] for row in recipes.listing("keep-probs")] == ["11", "12-14"]
    for row in rows:
        words = row["command"].split()
        assert words[:3] == ["pacprune", "reproduce", row["recipe"]]
        assert ("--only" in words, "--scale" in words) == (bool(row["only"]), row["scale"] != "reduced")


@pytest.mark.parametrize(("figure", "numbers"), [("", ()), ("4", (4,)), ("1, 6", (1, 6)), ("12-14", (12, 13, 14))])
def test_a_line_knows_the_numbers_of_its_figures(figure: str, numbers: tuple[int, ...]) -> None:
    assert frame.Line("", figure).numbers == numbers


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_fits_the_terminal_and_no_word_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = recipes.RECIPES["linear-model"]
    slow = tuple(line._replace(h200=123.0, cpu=1234.5) for line in linear.lines)
    monkeypatch.setitem(recipes.RECIPES, "linear-model", linear._replace(lines=slow))
    monkeypatch.setenv("COLUMNS", str(columns))
    text = call("--list").stdout
    assert max(map(len, text.splitlines())) <= columns
    words = set(text.split())
    for row in recipes.listing():
        shown = row["figure"], row["title"], row["command"], row["procedure"], row["verdict"]
        assert words.issuperset(" ".join(shown).split())
    assert words.issuperset(("Fig.", "Setting", "H200", "CPU", "123", "1234.5"))
    assert recipes.LEGEND in text


@pytest.mark.parametrize("name", [name for name in recipes.SEVERAL if not recipes.RECIPES[name].together])
def test_one_of_several_settings_has_a_folder_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []
    monkeypatch.setattr(recipes, "reproduce", lambda recipe, job: jobs.append(job) or ([], {}))
    settings = recipes.RECIPES[name].at("reduced")
    assert len({setting.name for setting in settings}) == len(settings) > 1
    assert not any(setting.name.startswith(name) for setting in settings), "the recipe is named already"
    assert call(name, "--only", settings[1].name).exit_code == 0
    assert jobs[0].select(settings) == [settings[1]]
    assert jobs[0].out == Path("runs") / f"{name}-reduced-{settings[1].name}"
    process = call(name, "--out", str(jobs[0].out))
    assert f"only is {settings[1].name!r} there and None here" in process.stderr
    assert call(name).exit_code == 0
    assert jobs[1].select(settings) == list(settings)


@dataclass(frozen=True)
class Options:
    factor: float = 1.0
    values: tuple[float, ...] = frame.in_entries()


@dataclass(frozen=True)
class WiderOptions(Options):
    width: int = 3


class Entry(NamedTuple):
    value: float
    seed: int


def test_a_new_figure_is_a_function_and_a_row(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(setting: Setting[Options], job: Job) -> Any:
        yield Figure(
            f"mine-{setting.name}",
            "What is mine.",
            lambda: [{"seed": seed, "value": seed * setting.options.factor} for seed in job.seeds(setting.seeds)],
            lambda canvas, rows: canvas.subplots().plot([row["value"] for row in rows]),
            lambda rows: {f"{setting.name}: largest": max(row["value"] for row in rows)},
        )

    setting = Setting(data="digits", model="mlp", seeds=3, options=Options())
    settings = (setting, setting.changed(label="twice", factor=2.0))
    monkeypatch.setitem(recipes.RECIPES, "mine", Recipe({"smoke": settings}, figures, several=True))
    process = call("mine", "--scale", "smoke", "--seed", "1", "--out", str(job.out / "mine"), "--json")
    result = json.loads(process.stdout)
    assert result["numbers"] == {"digits-mlp: largest": 1002.0, "digits-mlp-twice: largest": 2004.0}
    assert [figure["name"] for figure in result["figures"]] == ["mine-digits-mlp", "mine-digits-mlp-twice"]


def test_a_setting_changes_its_fields_and_its_options() -> None:
    setting = Setting(data="digits", seeds=3, options=Options())
    changed = setting.changed(seeds=5, factor=2.0)
    assert (changed.seeds, changed.options.factor, changed.data) == (5, 2.0, "digits")
    with pytest.raises(TypeError, match="width"):
        setting.changed(width=3)


def test_rows_are_kept_as_they_are_made_and_computed_once(job: Job) -> None:
    entries = [Entry(value, seed) for value in (0.5, 0.25) for seed in range(3)]
    portions = []

    def compute(portion: list[Entry]) -> list[dict[str, float]]:
        if portion[0].value == 0.25 and not portions[1:]:
            portions.append("interrupted")
            raise KeyboardInterrupt
        portions.append(portion)
        return [{"double": 2 * entry.value} for entry in portion]

    options: dict[str, Any] = {"path": job.out / "rows.jsonl", "terms": "one", "group": lambda entry: entry.value}
    with pytest.raises(KeyboardInterrupt):
        frame.compute_rows(entries, compute, **options)
    rows = frame.compute_rows(entries, compute, **options)
    assert portions == [entries[:3], "interrupted", entries[3:]]
    assert rows == [entry._asdict() | {"double": 2 * entry.value} for entry in entries]
    assert frame.compute_rows(entries[::-1], lambda _: pytest.fail("again"), **options) == rows[::-1]
    with pytest.raises(ValueError, match=r"was filled on the terms one .* those of now are other"):
        frame.compute_rows(entries, compute, **options | {"terms": "other"})


def test_the_terms_are_what_entries_do_not_say() -> None:
    setting = Setting(data="digits", model="mlp", options=Options())
    same = setting.changed(seeds=9, sparsities=(0.5,), alphas=(0.1,), values=(1.0,))
    assert same.terms == setting.terms
    others = [setting.changed(factor=2.0), setting.changed(std=0.1), setting.changed(dense=Config(gate_lr=1.0))]
    schedules = (lambda share: 1 - share), (lambda share: 1 - share**2)
    others += [setting.changed(dense=Config(schedule=schedule)) for schedule in schedules]
    assert len({setting.terms, *(other.terms for other in others)}) == 6


def test_a_field_that_is_added_changes_no_terms() -> None:
    setting = Setting(data="digits", dense=Config(lr=0.3), options=Options(factor=2.0))
    wider = replace(setting, options=WiderOptions(factor=2.0))
    assert wider.terms == setting.terms
    assert frame.digest(wider) == frame.digest(setting)
    assert replace(setting, options=WiderOptions(factor=2.0, width=4)).terms != setting.terms


def test_rows_of_a_figure_on_other_terms_are_refused(job: Job) -> None:
    figure = Figure("mine", "Mine.", lambda: [{"value": 1}], lambda canvas, rows: canvas.subplots())
    assert frame.draw(figure, job, terms="one").rows == [{"value": 1.0}]
    kept = figure._replace(rows=lambda: pytest.fail("again"))
    assert frame.draw(kept, job, terms="one").rows == [{"value": 1.0}]
    with pytest.raises(ValueError, match=r"mine\.csv was filled on the terms one .* those of now are two; go back"):
        frame.draw(kept, job, terms="two")
    (job.out / frame.TERMS).unlink()
    with pytest.raises(ValueError, match=r"on the terms unknown"):
        frame.draw(kept, job, terms="one")


def test_methods_have_one_look_in_all_figures() -> None:
    styles = painting.method_styles()
    assert {name: tuple(style) for name, style in styles.items()} == {
        name: (method.label, method.colour, method.marker) for name, method in METHODS.items()
    }
    assert linear_model.FITS["pft"] == styles["pft"]


@pytest.mark.parametrize("count", [2, 3, 5, 10, 50])
def test_intervals_are_students(count: int) -> None:
    sample = np.random.default_rng(count).normal(size=count)
    low, high = stats.t.interval(0.95, count - 1, loc=sample.mean(), scale=stats.sem(sample))
    assert interval(list(sample)) == pytest.approx((sample.mean(), low, high), rel=1e-6)


def test_one_value_has_no_interval() -> None:
    mean, low, high = interval([0.5])
    assert mean == 0.5
    assert np.isnan([low, high]).all()


def test_seeds_of_two_jobs_do_not_meet(job: Job) -> None:
    first, second = (set(replace(job, seed=seed).seeds(500)) for seed in (0, 1))
    assert len(first) == len(second) == 500
    assert not first & second


def test_agreement_is_0_by_chance_and_1_for_equal_masks_of_kept_and_of_pruned_weights() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = ({"w": torch.rand(100_000, generator=g) < 0.2} for _ in range(2))
    assert abs(agreement(a, b)) < 0.02
    assert agreement(a, a) == 1
    c, d = (linear_model.top(torch.rand(50, generator=g), 10) for _ in range(2))
    assert agreement({"w": c}, {"w": d}) == pytest.approx(agreement({"w": ~c}, {"w": ~d}))


# --- Noise on the weights


def test_noise_has_its_width_on_kept_weights_and_leaves_pruned_ones() -> None:
    net, like = (torch.nn.Linear(500, 400).requires_grad_(False) for _ in range(2))
    net.weight[:, ::2] = 0
    like.weight.mul_(3)
    like.weight[::4] = 0
    rms = float(like.weight[like.weight != 0].square().mean().sqrt())
    noisy = weight_noise.with_noise(net, like, 0.5, seed=0, number=0)
    added = noisy.weight - net.weight
    assert not added[:, ::2].any()
    assert float(added[:, 1::2].std()) == pytest.approx(0.5 * rms, rel=0.01)
    assert torch.equal(noisy.bias, net.bias)
    assert not torch.equal(noisy.weight, weight_noise.with_noise(net, like, 0.5, seed=0, number=1).weight)


def test_the_calibration_error_is_that_of_its_definition() -> None:
    g = torch.Generator().manual_seed(0)
    logits, y = 2 * torch.randn(3000, 4, generator=g), torch.randint(4, (3000,), generator=g)
    confidence, answers = (t.numpy() for t in logits.double().softmax(1).max(1))
    edges = np.linspace(0, 1, weight_noise.BINS + 1)
    expected = 0.0
    for low, high in pairwise(edges.tolist()):
        inside = (confidence >= low) & ((confidence < high) | (high == 1))
        if inside.any():
            expected += inside.mean() * abs((answers == y.numpy())[inside].mean() - confidence[inside].mean())
    net = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(net.weight)
    assert weight_noise.calibration_error(net, (logits, y)) == pytest.approx(expected, abs=1e-6)


# --- The methods in the linear model


def problems(count: int = 3) -> list[linear.Problem]:
    return [linear_model.example(seed, 0.7, scales=True).problem for seed in range(count)]


def test_examples_have_the_moments_they_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_model, "EXAMPLES", 400_000)
    p, weights, truth = linear_model.example(0, 0.9, scales=True)
    scale = truth.diagonal().sqrt()
    assert ((p.covariance - truth) / (scale[:, None] * scale)).abs().max() < 0.02
    noise = float(2 * linear.risk(p, weights))
    assert noise == pytest.approx(float(weights @ truth @ weights) / 2, rel=0.02)


@pytest.mark.parametrize("penalty", [1e-3, 0.05, 0.3])
def test_the_lasso_is_scikit_learns(penalty: float) -> None:
    g = torch.Generator().manual_seed(0)
    psi = torch.randn(40, 10, generator=g, dtype=torch.float64) @ torch.randn(10, 10, generator=g, dtype=torch.float64)
    y = torch.randn(40, generator=g, dtype=torch.float64)
    theirs = Lasso(alpha=penalty, fit_intercept=False, tol=1e-12, max_iter=1_000_000).fit(psi.numpy(), y.numpy())
    ours = linear_model.lasso(linear.problem(psi, y), penalty, tolerance=1e-13)
    np.testing.assert_allclose(ours.numpy(), theirs.coef_, rtol=0, atol=1e-8)


def test_the_lasso_keeps_at_most_so_many() -> None:
    for p in problems():
        sizes = [int((linear_model.lasso_of_size(p, k) != 0).sum()) for k in range(15)]
        assert all(size <= k for k, size in enumerate(sizes))
        assert sum(size == k for k, size in enumerate(sizes)) >= 10


def test_refitting_is_least_squares_on_what_is_kept() -> None:
    batch = linear_model.stacked(problems())
    mask = linear_model.top(torch.rand(3, 14, generator=torch.Generator().manual_seed(0)), 5)
    for p, keep, w in zip(problems(), mask, linear_model.refit(batch, mask), strict=True):
        torch.testing.assert_close(w[keep], torch.linalg.solve(p.covariance[keep][:, keep], p.alignment[keep]))
        assert not w[~keep].any()


def test_the_best_subset_is_the_best() -> None:
    (p,) = problems(1)
    risks = {}
    for chosen in combinations(range(14), 3):
        mask = torch.zeros(14).bool()
        mask[list(chosen)] = True
        risks[chosen] = float(linear.risk(p, linear_model.refit(p, mask)))
    best = linear_model.best_subset(p, 3)
    assert tuple(best.nonzero()[:, 0].tolist()) == min(risks, key=risks.__getitem__)


def test_dropout_weights_minimise_the_gibbs_risk() -> None:
    p = linear_model.stacked(problems())
    lam = 0.05 + 0.95 * torch.rand(3, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = linear.weight_gradient(p, linear_model.dropout_weights(p, lam), lam)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-9)
    torch.testing.assert_close(linear_model.dropout_weights(p, torch.ones_like(lam)), linear.least_squares(p))


def test_pft_ends_on_its_budget_and_near_a_mask() -> None:
    p = linear_model.stacked(problems())
    lam = linear_model.pft_keep_prob(p, 4, steps=2000)
    torch.testing.assert_close(lam.mean(-1), torch.full((3,), 4 / 14, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (torch.minimum(lam, 1 - lam) < 0.1).double().mean() > 0.8


def test_the_rows_follow_from_the_seed(job: Job) -> None:
    tiny = linear_model.SETTINGS["smoke"][0].changed(seeds=2, steps=10)
    for rows in (linear_model.kept_rows, linear_model.fit_rows):
        first, again, second = (rows(tiny, replace(job, seed=seed)) for seed in (0, 0, 1))
        assert first == again
        assert first != second


def test_the_best_mask_loses_nothing_and_no_mask_beats_it(job: Job) -> None:
    rows = linear_model.kept_rows(linear_model.SETTINGS["smoke"][0], job)
    assert all(row["risk_lost"] > -1e-9 for row in rows)
    assert all(row["risk_lost"] < 1e-9 for row in rows if row["agreement"] == 1)


# --- The change of alignment


def test_the_posterior_is_where_the_objective_is_least() -> None:
    for neighbours in alignment_change.DESIGNS.values():
        psi, y = alignment_change.moved(0, neighbours, 1.0)
        p, rest = (linear.problem(x, targets) for x, targets in zip(psi, y, strict=True))
        w, prior = linear.least_squares(p), torch.full((14,), 0.4).double()
        lam = alignment_change.least(rest, w, prior)
        terms = {"prior": prior, "kappa": alignment_change.KAPPA}
        here = linear.catoni_objective(rest, w, lam, **terms)
        for i, other in product(range(14), np.linspace(0, 1, 21)):
            aside = lam.index_fill(0, torch.tensor(i), other)
            assert linear.catoni_objective(rest, w, aside, **terms) >= here - 1e-12
        if not neighbours:  # whitened: the closed form
            torch.testing.assert_close(rest.covariance, torch.eye(14).double())
            drift = rest.covariance.diagonal() * w**2 / 2 - w * rest.alignment
            point = linear.fixed_point(prior, drift, kappa=alignment_change.KAPPA)
            torch.testing.assert_close(lam, point.keep_prob, rtol=0, atol=1e-9)


def test_the_change_of_alignment_is_measured_and_a_learned_prior_pays_for_what_is_lost() -> None:
    rows = alignment_change.rows(list(range(6)))
    same = [row for row in rows if row["move"] == "same data"]
    assert all(row["change"] == row["lost"] == row["halved"] == 0 for row in same)
    for row in rows:
        assert row["change"] >= row["lost"]
        assert row["kl"] >= row["kl_of_halved"] >= 0
        assert row["risk_of_prior"] >= row["bound"] - 1e-12 >= row["risk"] - 2e-12
    numbers = alignment_change.numbers(rows)
    for design in alignment_change.DESIGNS:
        means = {
            (move, prior): numbers[f"mean KL, {move}, {design} features, {prior} prior"]
            for move in ("same data", "shift 2")
            for prior in alignment_change.PRIORS
        }
        assert means["shift 2", "learned"] > 10 * means["same data", "learned"]
        assert means["shift 2", "isotropic"] < 3 * means["same data", "isotropic"]


# --- Wide networks


def test_gates_alone_leave_weights_and_budget_as_they_are() -> None:
    from pacprune import Config, data, models
    from pacprune.masking.masks import sparsity

    model, part = models.mlp(64, 10, hidden=(8,), seed=0), data.digits(seed=0).train
    before = {name: value.clone() for name, value in model.state_dict().items()}
    y = torch.nn.functional.one_hot(part.y[:64], 10).float()
    config = Config(epochs=1, lr=0.0, gate_lr=50.0, momentum=0.0, batch_size=16)
    mask = wide_masks.gates(model, part.x[:64], y, config, sparsity=0.75, seed=0)
    assert sparsity(mask) == pytest.approx(0.75, abs=1e-9)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_step_is_below_the_curvature_that_power_iteration_finds() -> None:
    p = problems(1)[0]
    w = linear.least_squares(p)
    assert wide_masks.steepest(p, w, steps=500) == pytest.approx(linear_model.steepest(p, w), rel=1e-6)
