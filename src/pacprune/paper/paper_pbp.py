"""The paper's PBP as written, against SNIP: the headline figure by the paper's own prior, with its grids.

Stage 2 is `pbp(recipe="paper")`: the magnitude mask of the stage-1 network, a block-isotropic start, random masks and
noise on the weights. The std of P is chosen for every alpha and sparsity by the certificate of the first seed, from a
grid that was declared; all priors of the figure are paid for, at delta / K each. The learning rate of Q is free: it is
chosen by draws that no certificate uses. The gates of Q stay as they are, as in the paper's figure. SNIP's learning
rate is chosen on validation data from as many values as P and Q have together.

The examples of the bound sets have been looked at by earlier results. So these certificates, which pay for each other,
are comparisons, and no claims.
"""

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from pacprune import data, models
from pacprune.certification.choose import choose
from pacprune.data.splits import Split
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.methods.pbp import train_prior
from pacprune.methods.pipeline import together
from pacprune.paper import certificate_grid, comparison, error_vs_sparsity, painting, pair_plot
from pacprune.paper.comparison import Contest, despite_divergence, same_grid
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, dense_networks, digest, in_entries
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

STYLES: Mapping[str, Style] = MappingProxyType(
    error_vs_sparsity.STYLES | {"q_equals_p_certificate": Style("certificate of P (Q = P)", plots.GREY, "D")}
)
_MEASURED = (
    *("n", "gibbs_risk", "prior_risk", "kl", "gibbs_certificate", "paper_certificate", "q_equals_p_certificate"),
    *("held_out_certificate", "single_draw_certificate", "test_error", "prior_test_error", "pruned_test_error"),
    *("expected_sparsity", "draws"),
)
COLUMNS = ("dataset", "model", "method", "alpha", "sparsity", "std", "seed", "chosen", "lr", *_MEASURED)
"""A row per run of PBP, also those that a std was chosen by, and per network of SNIP, which is trained on all of S.

A run that diverged has error and certificate 1.
"""


@dataclass(frozen=True, kw_only=True)
class Grids:
    """What is tried, declared beforehand.

    Args:
        stds: Widths of P.
        rates: Learning rates of Q.
        tolerance: How far Monte Carlo may be from the risk before no more networks are drawn.
        choosing_draws: Networks that are drawn from every Q to choose its learning rate by.
        compiles: Whether a GPU compiles networks for stage 1 and SNIP where it can, which pays in long stages.
        delta: Probability with which any certificate may fail.
        split_seed: Seed of the permutation that splits are cut from, so that a smaller S_P is part of a larger one.
    """

    stds: tuple[float, ...] = in_entries()
    rates: tuple[float, ...]
    tolerance: float
    choosing_draws: int
    compiles: bool = True
    delta: float = 0.05
    split_seed: int = 0


class Cell(NamedTuple):
    """One run of PBP."""

    alpha: float
    sparsity: float
    std: float
    seed: int


def size(setting: Setting[Grids]) -> int:
    """K: the priors that could be certified, all stds of every alpha, sparsity and seed."""
    return len(setting.alphas) * len(setting.sparsities) * len(setting.options.stds) * setting.seeds


# --- Settings.


def exponentials(*exponents: float) -> tuple[float, ...]:
    """e to each of these, to three digits."""
    return tuple(float(f"{math.exp(exponent):.3g}") for exponent in exponents)


def _setting(name: str, model: str, dense: Config, epochs: int, *, rates: tuple[float, ...], **rest: Any) -> Any:
    """Stages 2 and 3 have the optimiser, the learning rate and the schedule of stage 1, and epochs of their own."""
    setting = Setting(
        data=name,
        model=model,
        seeds=5,
        alphas=(0.0, 0.2, 0.4, 0.6, 0.8),
        sparsities=(0.8, 0.9, 0.95, 0.975),
        dense=dense,
        prior=replace(dense, epochs=epochs),
        posterior=replace(dense, epochs=epochs, gate_lr=None),
        pruning=dense,
        draws=20_000,
        options=Grids(
            stds=exponentials(-15, -12, -9, -6, -3), rates=exponentials(*rates), tolerance=0.001, choosing_draws=2_000
        ),
    )
    return setting.changed(**rest)


_STEP = Config(lr=0.1, schedule="step", augment=True)
_GREY_RATES, _FASHION_RATES, _COLOUR_RATES = (
    (-4, -3.25, -2.5, -1.75, -1),
    (-7, -6.25, -5.5, -4.75, -4),
    (-5, -3.25, -1.5, 0.25, 2),
)
_SHORT: dict[str, Any] = {
    "seeds": 3,
    "alphas": (0.0, 0.4, 0.8),
    "sparsities": (0.9, 0.975),
    "stds": exponentials(-7, -5, -3),
    "draws": 5_000,
    "tolerance": 0.002,
    "choosing_draws": 500,
    "compiles": False,
}

SETTINGS: dict[str, tuple[Setting[Grids], ...]] = {
    "smoke": (
        _setting(
            *("digits", "mlp", Config(epochs=3, lr=0.1), 1),
            rates=(-2,),
            **_SHORT
            | {"seeds": 2, "alphas": (0.0, 0.4), "stds": exponentials(-5, -3), "draws": 50, "choosing_draws": 20},
        ),
    ),
    "reduced": (
        _setting("mnist", "mlp", Config(epochs=6, lr=0.01), 6, rates=_GREY_RATES[::2], **_SHORT),
        _setting("fashion-mnist", "lenet5", Config(epochs=14, lr=0.01), 6, rates=_FASHION_RATES[::2], **_SHORT),
        _setting(
            *("cifar10", "resnet20", replace(_STEP, epochs=8), 4),
            rates=(-4, -1),
            **_SHORT
            | {"alphas": (0.4, 0.8), "stds": exponentials(-6, -4), "draws": 1_000, "tolerance": 0.005}
            | {"choosing_draws": 300},
        ),
    ),
    "paper": (
        _setting("mnist", "mlp", Config(epochs=30, lr=0.01), 30, rates=_GREY_RATES),
        _setting("fashion-mnist", "lenet5", Config(epochs=70, lr=0.01), 30, rates=_FASHION_RATES),
        _setting("cifar10", "resnet20", replace(_STEP, epochs=120), 60, rates=_COLOUR_RATES),
    ),
}
"""Data sets and networks: `paper` has the paper's constants, `reduced` a fraction of its epochs, cells and grids.

The paper gives ranges, log-uniform, and no grids: of std e^-15 to e^-3, of the learning rates of Q e^-4 to e^-1,
e^-7 to e^-4 and e^-5 to e^2. Of all runs of a setting the paper shows those with alpha .4 and .8.
"""


def figures(setting: Setting[Grids], job: Job) -> Iterator[Figure]:
    """Certificates and errors of P and Q beside SNIP, and the pair plot at one std."""
    if not setting.options.compiles:
        setting = _by_graphs(setting)
    paid = f"The {size(setting)} priors of the grid pay for each other; they compare, and claim nothing"
    yield Figure(
        f"paper-pbp-{setting.name}",
        f"{painting.network(setting)}: the paper's PBP with the std and the learning rate of Q that have the least "
        f"certificate; mean and 95 % interval over {setting.seeds} seeds (weights, data order, masks and draws are "
        f"random, the split is not). {paid}. SNIP prunes a dense network and is trained on all of S, with a tuned "
        "learning rate.",
        lambda: rows(setting, job),
        paint,
        lambda rows: {"K": size(setting)} | numbers(setting, rows),
    )
    yield Figure(
        f"paper-pbp-pairs-{setting.name}",
        f"{painting.network(setting)}: every pair of certificate, test error, alpha and KL/n over all runs with a "
        f"prior from data, at the std that has the most of them; r is Pearson's correlation, with its 95 % interval.",
        lambda: pair_plot.rows(at_one_std(pbp_rows(setting, job))),
        pair_plot.paint,
        lambda rows: {f"{setting.name}, {name}": r for name, r in pair_plot.correlations(rows).items()},
    )


def _by_graphs(setting: Setting[Grids]) -> Setting[Grids]:
    """The same setting without the compiler."""

    def plain(config: Config) -> Config:
        return replace(config, execution="graph") if config.execution == "compiled" else config

    return replace(setting, dense=plain(setting.dense), pruning=plain(setting.pruning))


# --- PBP.


def rows(setting: Setting[Grids], job: Job) -> Table:
    """One row per run of PBP, and then one per network of SNIP, in COLUMNS."""
    # SNIP comes last: its validation examples are bound examples, and what looks at these may shape no prior.
    table = pbp_rows(setting, job) + snip_rows(setting, job)
    common = {"dataset": setting.data, "model": setting.model}
    return [{name: (common | row).get(name) for name in COLUMNS} for row in table]


def pbp_rows(setting: Setting[Grids], job: Job) -> Table:
    """All stds at the first seed, and then the best one of every alpha and sparsity at the other seeds."""
    first, *others = job.seeds(setting.seeds)
    table: Table = []
    for alpha in setting.alphas:
        trials = [Cell(alpha, s, std, first) for s in setting.sparsities for std in setting.options.stds]
        tried = _kept_rows(setting, trials, job)
        parts = groups(tried, "sparsity").items()
        best = {s: min(part, key=lambda row: row["gibbs_certificate"])["std"] for (s,), part in parts}
        again = [Cell(alpha, s, std, seed) for s, std in best.items() for seed in others]
        table += [
            {"method": "pbp", "chosen": int(row["std"] == best[row["sparsity"]])} | row
            for row in tried + _kept_rows(setting, again, job)
        ]
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def _kept_rows(setting: Setting[Grids], cells: Sequence[Cell], job: Job) -> Table:
    return compute_rows(
        cells,
        lambda portion: _certified(setting, portion, job),
        path=job.out / f"{setting.name}.jsonl",
        terms=digest(setting),
        group=lambda cell: cell.alpha,
        portions=job.portions,
    )


@functools.lru_cache(maxsize=1)
def _split(name: str, alpha: float, seed: int, data_dir: Path | None) -> Split:
    """The split of an alpha; to read, hash and compare the examples takes longer than some of the training."""
    return data.load(name, prior_fraction=alpha, seed=seed, data_dir=data_dir)


class _Start(NamedTuple):
    """P of a cell, and the network that draws from it."""

    model: nn.Module
    prior: SpikeSlab


def _certified(setting: Setting[Grids], cells: list[Cell], job: Job) -> Table:
    """Stages 1 to 3 and certificates of one alpha; each stage is a population, one for every learning rate of Q."""
    split = _split(setting.data, cells[0].alpha, setting.options.split_seed, job.data_dir)

    def begin(part: list[Cell]) -> list[_Start | None]:
        return [*_starts(setting, part, split, job)]

    starts = despite_divergence(cells, begin, None)
    alive = [(cell, start) for cell, start in zip(cells, starts, strict=True) if start is not None]
    posteriors = {rate: _posteriors(setting, rate, alive, split, job) for rate in setting.options.rates}
    lost = dict.fromkeys(_MEASURED, 1.0) | {"n": len(split.bound), "lr": None}
    results = dict.fromkeys(cells, lost)
    for place, (cell, start) in enumerate(alive):
        candidates = {f"{rate:g}": net for rate, nets in posteriors.items() if (net := nets[place]) is not None}
        if candidates:
            results[cell] = _row(setting, start.prior, candidates, split, job)
    return [results[cell] for cell in cells]


def _starts(setting: Setting[Grids], cells: list[Cell], split: Split, job: Job) -> list[_Start]:
    """Stages 1 and 2; a prior on no data has neither."""
    trained = len(split.prior) > 0
    nets = _dense(setting, split, job) if trained else _first_networks(setting, split, job)
    members = [copy.deepcopy(nets[cell.seed]) for cell in cells]
    priors = together(
        train_prior,
        members,
        split,
        setting.prior if trained else replace(setting.prior, epochs=0),
        recipe="paper",
        sparsity=[cell.sparsity for cell in cells],
        std=[cell.std for cell in cells],
        seed=[cell.seed for cell in cells],
        eps=setting.eps,
        progress=job.progress,
    )
    return [_Start(model, prior.slab) for model, prior in zip(members, priors, strict=True)]


def _dense(setting: Setting[Grids], split: Split, job: Job) -> dict[int, nn.Module]:
    def build(seed: int) -> nn.Module:
        return models.build(setting.model, split, seed=seed)

    return dense_networks(setting, build, split.prior, job, name=f"dense-{split.prior_fraction:g}")


def _first_networks(setting: Setting[Grids], split: Split, job: Job) -> dict[int, nn.Module]:
    seeds = job.seeds(setting.seeds)
    return {seed: models.build(setting.model, split, seed=seed).to(job.device) for seed in seeds}


def _posteriors(
    setting: Setting[Grids], rate: float, alive: Sequence[tuple[Cell, _Start]], split: Split, job: Job
) -> list[nn.Module | None]:
    """Stage 3 at one learning rate, of every prior; None where it diverged."""
    config = replace(setting.posterior, lr=rate)

    def attempt(part: list[tuple[Cell, _Start]]) -> list[nn.Module | None]:
        nets = [copy.deepcopy(start.model) for _, start in part]
        fit_posterior(
            nets,
            [start.prior for _, start in part],
            split,
            config,
            delta=setting.options.delta,
            objective="paper",
            seed=[cell.seed for cell, _ in part],
            progress=job.progress,
        )
        return [*nets]

    return despite_divergence(list(alive), attempt, None)


def _row(
    setting: Setting[Grids], prior: SpikeSlab, candidates: Mapping[str, nn.Module], split: Split, job: Job
) -> dict[str, Any]:
    """The certificate of the best Q, and what it and P do on the test part."""
    options = setting.options
    choice = choose(
        candidates,
        prior,
        split,
        delta=options.delta,
        grid=size(setting),
        tolerance=options.tolerance,
        draws=setting.draws,
        choosing_draws=options.choosing_draws,
        name=setting.model,
        progress=job.progress,
    )
    certificates = choice.certificate.bounds
    return certificate_grid.measures(choice.model, prior, choice.certificate, split) | {
        "lr": float(choice.name),
        "paper_certificate": certificates["paper"],
        "q_equals_p_certificate": certificates["q_equals_p"],
    }


def at_one_std(rows: Table) -> Table:
    """The runs with a prior from data at the std that has the most of them, the smaller one of equals."""
    parts = groups([row for row in rows if row["alpha"]], "std")
    return min(parts.items(), key=lambda part: (-len(part[1]), part[0]))[1]


# --- SNIP.


def snip_rows(setting: Setting[Grids], job: Job) -> Table:
    """SNIP with the learning rate that is best on validation data at every sparsity, fine-tuned as stage 1 trains."""
    contest = Setting(
        data=setting.data,
        model=setting.model,
        label="snip",
        seeds=setting.seeds,
        dense=setting.dense,
        pruning=setting.pruning,
        options=Contest(criteria=("snip",), methods=("osp",), **same_grid(*snip_rates(setting))),
    )
    split = _split(setting.data, setting.alphas[-1], setting.options.split_seed, job.data_dir)
    table: Table = []
    for sparsity in setting.sparsities:
        alone = contest.changed(sparsities=(sparsity,), tuned_at=sparsity)
        points = comparison.tune(alone, lambda alone=alone: comparison.validation_task(alone, split, job), job)
        table += comparison.contest(alone, points, comparison.report_task(alone, split, job), job)
    return [
        {"method": "snip", "alpha": 1.0, "chosen": 1}
        | {name: row[name] for name in ("sparsity", "seed", "lr", "test_error")}
        for row in table
        if row["method"] != "dense"
    ]


def snip_rates(setting: Setting[Grids]) -> tuple[float, ...]:
    """As many learning rates as P and Q have settings together, around that of stage 1: from a fifth to five times."""
    count, lr = len(setting.options.stds) * len(setting.options.rates), setting.dense.lr
    return tuple(float(f"{lr * 5 ** (2 * k / (count - 1) - 1):.3g}") for k in range(count))


# --- The figure.


def _long(rows: Table) -> Table:
    """A row for every number that is drawn."""
    pbp, snip = ([row for row in rows if row["method"] == method and row["chosen"]] for method in ("pbp", "snip"))
    subject = Setting(data=rows[0]["dataset"], model=rows[0]["model"], options=None)
    return error_vs_sparsity.rows(subject, pbp, snip, STYLES)


def paint(canvas: Any, rows: Table) -> None:
    """One panel per alpha, each on its own scale."""
    error_vs_sparsity.paint(canvas, _long(rows), STYLES, one_scale=False)


def numbers(setting: Setting[Grids], rows: Table) -> dict[str, float]:
    """The means of all lines, and what the paper says of them: how far Q is below P, and how far above SNIP.

    The paper has Q 10 points below P on CIFAR-10 at alpha 0.4 and 97.5 %, and the certificate of Q below the error of
    P there. And it has Q - SNIP grow with the sparsity.
    """
    result = error_vs_sparsity.numbers(setting, _long(rows))
    runs = _differences(rows)
    for (alpha, sparsity), part in groups(runs, "alpha", "sparsity").items():
        chosen = [run for run in part if run["chosen"]]
        for name in ("P - Q", "P - certificate of Q", "Q - SNIP"):
            result |= _spread(f"{setting.name}, alpha {alpha:g}, {name} at {sparsity:g}", [run[name] for run in chosen])
        largest = f"{setting.name}, alpha {alpha:g}, largest P - Q at {sparsity:g} of all stds"
        result[largest] = max(interval([run["P - Q"] for run in at]).mean for at in groups(part, "std").values())
    low, high = min(setting.sparsities), max(setting.sparsities)
    for (alpha,), part in groups([run for run in runs if run["chosen"]], "alpha").items():
        gaps = {(run["sparsity"], run["seed"]): run["Q - SNIP"] for run in part}
        growth = [gaps[high, seed] - gaps[low, seed] for seed in sorted({run["seed"] for run in part})]
        result |= _spread(f"{setting.name}, alpha {alpha:g}, growth of Q - SNIP from {low:g} to {high:g}", growth)
    return result


def _differences(rows: Table) -> Table:
    """Every run of PBP with the differences of test errors that the paper speaks of; SNIP has the same seed."""
    snip = {(row["sparsity"], row["seed"]): row["test_error"] for row in rows if row["method"] == "snip"}
    return [
        row
        | {
            "P - Q": row["prior_test_error"] - row["test_error"],
            "P - certificate of Q": row["prior_test_error"] - row["gibbs_certificate"],
            "Q - SNIP": row["test_error"] - snip[row["sparsity"], row["seed"]],
        }
        for row in rows
        if row["method"] == "pbp"
    ]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean and the ends of its 95 % interval, where there is one."""
    mean, low, high = interval(values)
    spread = {name: mean, f"{name}, low": low, f"{name}, high": high}
    return {key: value for key, value in spread.items() if math.isfinite(value)}
