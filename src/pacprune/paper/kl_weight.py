"""Performance against bound when the KL is down-weighted in training: the paper's figure for MNIST and random pruning.

Q is trained on the bound with its KL multiplied by d. Certificates know nothing of d: they take the whole KL. P starts
from the isotropic prior, and every d starts from the same P.

The paper found the clamp better where keep probabilities are not extreme. But the gradient in a clamped keep_prob p is
that in its logit, divided by p (1 - p). So gates near 0 or 1 leap: on the digits Q is 9 nats from P at d = 1, where it
is 0.01 with the sigmoid (results/paper/kl-weight-digits-mlp.csv). Posteriors of the same P with the sigmoid are beside.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pacprune import data
from pacprune.data.splits import Split
from pacprune.masking.attachment import attach, harden
from pacprune.paper import painting, pbp_stages
from pacprune.paper.frame import Figure, Job, Setting, compute_rows
from pacprune.paper.painting import Style
from pacprune.paper.pbp_stages import RANDOM, TEST_DRAWS, Start
from pacprune.paper.statistics import groups, interval, means
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.evaluate import gibbs_error
from pacprune.types import Table


@dataclass(frozen=True)
class Factors:
    """The factors d of the KL, and how gates of Q become keep probabilities."""

    kl_weights: tuple[float, ...]
    mappings: tuple[str, ...] = ("clamp", "sigmoid")


_PAPER = Setting(
    data="mnist",
    model="mlp",
    sparsities=(0.9,),
    alphas=(0.8,),
    seeds=5,
    dense=Config(epochs=30, lr=0.01),
    prior=Config(epochs=30, lr=0.01),
    posterior=Config(epochs=30, lr=math.exp(-2.5)),
    std=math.exp(-5),
    amp=False,
    options=Factors((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
)
_DIGITS = _PAPER.changed(
    data="digits",
    alphas=(0.5,),
    dense=Config(epochs=40, lr=0.1),
    prior=Config(epochs=150, lr=0.1),
    posterior=Config(epochs=40, lr=math.exp(-3)),
    draws=2_000,
)
SETTINGS: dict[str, tuple[Setting[Factors], ...]] = {
    "smoke": (
        _DIGITS.changed(
            kl_weights=(0.001, 0.03, 1.0),
            seeds=2,
            dense=Config(epochs=20, lr=0.1),
            prior=Config(epochs=50, lr=0.1),
            posterior=Config(epochs=8, lr=math.exp(-3)),
            draws=100,
        ),
    ),
    "reduced": (_PAPER.changed(seeds=2, kl_weights=(0.001, 0.01, 0.1, 1.0), draws=2_000), _DIGITS),
    "paper": (_PAPER,),
}
"""`paper` has the paper's data, network and epochs, and one std and one learning rate of Q out of the paper's ranges.
`reduced` has as many epochs, since the isotropic prior needs them, but fewer d and seeds; and the digits, for a CPU."""


def figures(setting: Setting[Factors], job: Job) -> Iterator[Figure]:
    """Errors and bounds against d, and against each other."""
    (sparsity,), (alpha,) = setting.sparsities, setting.alphas
    yield Figure(
        f"kl-weight-{setting.name}",
        f"{painting.network(setting)}, random pruning ({100 * sparsity:g} % at the start, which nothing holds), "
        f"alpha {alpha:g}: Q trained on the paper's bound with d times the KL, bounds with the whole KL; mean and 95 % "
        f"interval over {setting.seeds} seeds (weights, masks, data order and draws are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: {f"{setting.name}, {name}": number for name, number in numbers(rows).items()},
    )


def numbers(rows: Table) -> dict[str, float]:
    """The means at the largest d of at most 1 and at the smallest, and those of P."""
    weights = {row["kl_weight"] for row in rows}
    table = {}
    for d in (max(d for d in weights if d <= 1), min(weights)):
        for name in ("paper_bound", "bound", "test_error", "kl"):
            for (mapping, weight), mean in means(rows, name, "mapping", "kl_weight").items():
                if weight == d:
                    table[f"{name} at d = {d:g}, {mapping}"] = mean
    return table | {name: interval([row[name] for row in rows]).mean for name in ("q_equals_p", "prior_test_error")}


class Cell(NamedTuple):
    """One posterior of the prior of a seed."""

    mapping: str
    kl_weight: float
    seed: int


def rows(setting: Setting[Factors], job: Job) -> Table:
    """One row per seed and factor d; certificates pay for all priors, and for all d of one."""
    (sparsity,), (alpha,) = setting.sparsities, setting.alphas
    split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
    table = compute_rows(
        [
            Cell(mapping, d, seed)
            for mapping in setting.options.mappings
            for d in setting.options.kl_weights
            for seed in job.seeds(setting.seeds)
        ],
        lambda portion: _posteriors(setting, portion, split, job),
        path=job.out / f"{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda cell: cell.seed,  # whose P all of them share
    )
    common = {"dataset": setting.data, "model": setting.model, "sparsity": sparsity, "alpha": alpha}
    return [common | row for row in table]


def _posteriors(setting: Setting[Factors], cells: list[Cell], split: Split, job: Job) -> Table:
    """Trains the prior of one seed and its posteriors; returns what is to be known of each."""
    (seed,) = {cell.seed for cell in cells}
    start = Start(RANDOM, setting.sparsities[0], setting.eps, seed)
    nets = pbp_stages.begin(setting, [start], split, job)
    (prior,) = pbp_stages.train_priors(setting, nets, [start], split, job)
    before = gibbs_error(copy.deepcopy(nets[0]), split.test, draws=TEST_DRAWS)
    plain = harden(nets[0])
    posteriors = [attach(copy.deepcopy(plain), prior, mapping=cell.mapping, seed=seed) for cell in cells]
    for mapping in setting.options.mappings:
        part = [k for k, cell in enumerate(cells) if cell.mapping == mapping]
        pbp_stages.train_posteriors(
            setting,
            [posteriors[k] for k in part],
            [prior] * len(part),
            [start] * len(part),
            split,
            job,
            kl_weight=[cells[k].kl_weight for k in part],
        )
    pays = {"grid": setting.seeds, "certified": len(setting.options.mappings) * len(setting.options.kl_weights)}
    return [
        {"prior_test_error": before, "prior_sparsity": prior.sparsity}
        | pbp_stages.certificate_numbers(setting, net, prior, split, job, **pays)
        for net in posteriors
    ]


_STYLES = {
    "paper_bound": Style("bound (the paper's theorem)", plots.PURPLE, "v"),
    "bound": Style("certificate (Seeger's bound)", painting.SKY, "o"),
    "gibbs_risk": Style("risk on the bound set", plots.BLUE, "^"),
    "test_error": Style("test error of Q", plots.ORANGE, "s"),
    "prior_test_error": Style("test error of P", plots.GREY, "D"),
}


_MAPPINGS = {"clamp": "clamped gates, as in the paper", "sigmoid": "gates by the sigmoid"}


def paint(canvas: Any, rows: Table) -> None:
    """A row of panels per mapping: errors and bounds against d, and beside that test error against bound."""
    # The first published rows are all of the sigmoid, and do not name it.
    table = [{"mapping": "sigmoid"} | row for row in rows]
    parts = groups(table, "mapping")
    canvas.set_size_inches(11, 0.6 + 4 * len(parts))
    grid = canvas.subplots(len(parts), 2, squeeze=False)
    for (over_d, over_bound), ((mapping,), part) in zip(grid, parts.items(), strict=True):
        _paint_over_d(over_d, part)
        _paint_over_bound(over_bound, part)
        painting.heading(over_d, _MAPPINGS[mapping])
    sparsity = f"{100 * rows[0]['sparsity']:g} % pruned at random at the start"
    what = f"{painting.subject(rows)}, {sparsity}, alpha {rows[0]['alpha']:g}: the KL times d in training alone"
    painting.canvas_heading(canvas, f"{what}; {painting.over_seeds(rows)}")


def _paint_over_d(axes: Any, rows: Table) -> None:
    # The first published rows have no bound by the paper's theorem.
    names = [name for name in _STYLES if name in rows[0]]
    long = [{"d": row["kl_weight"], "what": name, "value": row[name]} for row in rows for name in names]
    painting.lines(axes, long, x="d", y="value", by="what", styles=_STYLES, side_by_side=True)
    axes.set_xscale("log")
    levels = sorted({row["kl_weight"] for row in rows})
    axes.set_xlim(levels[0] / 1.6, levels[-1] * 1.6)
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.set_xticks([], minor=True)
    painting.error_axis(axes, means(long, "value", "d", "what").values(), "error in %")
    axes.set_xlabel("d, the factor of the KL in training")
    axes.legend(fontsize=8)


def _paint_over_bound(axes: Any, rows: Table) -> None:
    """One mark per run, and a line through the means."""
    name = "paper_bound" if "paper_bound" in rows[0] else "bound"
    bounds, errors = means(rows, name, "kl_weight"), means(rows, "test_error", "kl_weight")
    parts = dict(sorted(groups(rows, "kl_weight").items()))
    axes.plot([bounds[key] for key in parts], [errors[key] for key in parts], color=plots.GREY, lw=1, zorder=0)
    for place, ((d,), part) in enumerate(parts.items()):
        share = place / max(1, len(parts) - 1)
        colour = (0.9 - 0.9 * share, 0.45, 0.1 + 0.7 * share)
        x, y = ([row[column] for row in part] for column in (name, "test_error"))
        axes.scatter(x, y, s=24, color=colour, label=f"d = {d:g}")
    axes.set_xlabel(f"{_STYLES[name].label.split(' (')[0]}, with the whole KL, in %")
    axes.set_ylabel("test error of Q in %")
    for axis in (axes.xaxis, axes.yaxis):
        painting.in_percent(axis)
    axes.legend(fontsize=8)
