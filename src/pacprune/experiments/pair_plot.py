"""How bound, test error, alpha and KL/n of PAC-Bayes pruning go together: the paper's pair plot of its CIFAR-10 runs.

One split per alpha, cut from one permutation, so that the smaller prior part lies in the larger one. All certificates
of the figure hold at once: each is made at delta / (alphas * sparsities * seeds).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from pacprune import data, models
from pacprune.certificate import Certificate
from pacprune.config import Config
from pacprune.data import Split
from pacprune.evaluate import gibbs_error
from pacprune.experiments import figures, plots
from pacprune.experiments.figures import Drawn, Job
from pacprune.experiments.plots import Table
from pacprune.pipelines import pbp, together

TEST_DRAWS = 20
"""Networks drawn from Q to estimate its Gibbs error on the test part."""
SHOWN = {"bound": "bound on the error", "test_error": "test error of Q", "alpha": "alpha", "kl_per_n": "log10 KL/n"}


@dataclass(frozen=True)
class Setting:
    """A data set, a network and the grid of priors on them; `draws` are at most spent on one Monte-Carlo step."""

    data: str
    model: str
    alphas: tuple[float, ...]
    sparsities: tuple[float, ...]
    seeds: int
    dense: Config
    prior: Config
    posterior: Config
    std: float
    eps: float = 1e-4
    criterion: str = "magnitude"
    draws: int = 5_000

    @property
    def name(self) -> str:
        """How the files of this setting end."""
        return f"{self.data}-{self.model}"


_COLOUR = Setting(
    data="cifar10",
    model="resnet20",
    alphas=(0.4, 0.8),
    sparsities=(0.8, 0.9, 0.95, 0.975),
    seeds=3,
    dense=Config(epochs=16, lr=0.1, schedule="cosine", warmup=0.05, augment=True, weight_decay=5e-4),
    prior=Config(epochs=8, lr=0.05, schedule="cosine", augment=True),
    posterior=Config(epochs=4, lr=0.1, schedule="cosine"),
    std=3e-3,
    draws=3_000,
)
SETTINGS = {
    "smoke": replace(
        _COLOUR,
        data="digits",
        model="mlp",
        sparsities=(0.8, 0.95),
        dense=Config(epochs=6, lr=0.1, schedule="cosine"),
        prior=Config(epochs=4, lr=0.05, schedule="cosine"),
        posterior=Config(epochs=4, lr=0.1, schedule="cosine"),
        std=0.02,
        seeds=2,
        draws=200,
    ),
    "reduced": _COLOUR,
    "paper": replace(
        _COLOUR,
        alphas=(0.2, 0.4, 0.6, 0.8),
        seeds=5,
        dense=replace(_COLOUR.dense, epochs=120, schedule="step"),
        prior=replace(_COLOUR.prior, epochs=60),
        posterior=replace(_COLOUR.posterior, epochs=60),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """The pair plot, and how strongly its quantities go together."""
    setting = SETTINGS[job.scale]
    drawn = figures.draw(
        job,
        f"pair-plot-{setting.name}",
        f"{setting.data}, {setting.model}, {setting.criterion}: every pair of bound, test error, alpha and KL/n over "
        f"{len(setting.sparsities)} sparsities and {setting.seeds} seeds for each alpha (weights, data order and draws "
        "are random); r is Pearson's correlation, with its 95 % interval over the runs.",
        lambda: rows(setting, job),
        paint,
    )
    return [drawn], correlations(drawn.rows)


def rows(setting: Setting, job: Job) -> Table:
    """One row per run; the runs of one alpha are trained as a population."""
    found: Table = []
    cells = [(sparsity, seed) for sparsity in setting.sparsities for seed in job.seeds(setting.seeds)]
    deep = setting.model == "resnet20"
    for alpha in setting.alphas:
        split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
        nets = [models.build(setting.model, split, seed=seed).to(job.device) for _, seed in cells]
        results = together(
            pbp,
            nets,
            split,
            on_device(setting.prior, job, amp=deep),
            dense=on_device(setting.dense, job, amp=deep),
            posterior=on_device(setting.posterior, job),
            sparsity=[sparsity for sparsity, _ in cells],
            seed=[seed for _, seed in cells],
            criterion=setting.criterion,
            eps=setting.eps,
            std=setting.std,
            grid=len(cells) * len(setting.alphas),
            draws=setting.draws,
            progress=job.progress,
        )
        for (sparsity, seed), result in zip(cells, results, strict=True):
            own = {"dataset": setting.data, "model": setting.model, "sparsity": sparsity, "alpha": alpha, "seed": seed}
            found.append(own | measured(result.certificate, result.model, split))
    return found


def on_device(config: Config, job: Job, *, amp: bool = False) -> Config:
    """The same stage by the fastest means of the device; `amp` where bfloat16 will do."""
    return replace(config, execution="graph", amp=amp) if job.device.type == "cuda" else config


def measured(certificate: Certificate, model: nn.Module, split: Split) -> dict[str, float]:
    """What a certificate says of Q, beside the Gibbs error of Q on the test part."""
    return {
        "gibbs_risk": certificate.risk,
        "kl": certificate.kl,
        "n": certificate.n,
        "kl_per_n": certificate.kl / certificate.n,
        "bound": certificate.bound,
        "q_equals_p": certificate.bounds["q_equals_p"],
        "held_out": certificate.bounds["held_out"],
        "test_error": gibbs_error(model, split.test, draws=TEST_DRAWS),
    }


def correlation(x: Sequence[float], y: Sequence[float]) -> figures.Interval:
    """Pearson's r and its 95 % interval by Fisher's transform, tanh(artanh r ± 1.96 / sqrt(runs - 3)).

    NaN where one of the two does not vary, an interval of NaN for fewer than four runs.
    """
    spread = [float(np.ptp(values)) for values in (x, y)]
    if not min(spread) > 0:
        return figures.Interval(math.nan, math.nan, math.nan)
    r = float(np.corrcoef(x, y)[0, 1])
    if len(x) < 4:
        return figures.Interval(r, math.nan, math.nan)
    middle, half = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, r))), 1.959964 / math.sqrt(len(x) - 3)
    return figures.Interval(r, math.tanh(middle - half), math.tanh(middle + half))


def _in_decades(found: Table) -> Table:
    """The rows with log10 KL/n for KL/n, which runs over decades; a Q that did not move has the least of the others."""
    least = min((row["kl_per_n"] for row in found if row["kl_per_n"] > 0), default=1.0)
    return [row | {"kl_per_n": math.log10(max(row["kl_per_n"], least))} for row in found]


def correlations(found: Table) -> dict[str, float]:
    """r of the pairs that the paper speaks of, as the figure has them, and the mean KL/n of every alpha."""
    column = {name: [row[name] for row in _in_decades(found)] for name in SHOWN}
    numbers = {
        f"r of {SHOWN[one]} and {SHOWN[two]}": correlation(column[one], column[two]).mean
        for one, two in (("bound", "test_error"), ("bound", "kl_per_n"), ("alpha", "kl_per_n"))
    }
    for alpha in sorted(set(column["alpha"])):
        own = [row["kl_per_n"] for row in found if row["alpha"] == alpha]
        numbers[f"KL/n at alpha {alpha:g}"] = figures.interval(own).mean
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def paint(canvas: Any, found: Table) -> None:
    """A scatter plot of every pair, and histograms on the diagonal; a colour per alpha, larger where sparser."""
    canvas.set_size_inches(10, 9)
    names, alphas = list(SHOWN), sorted({row["alpha"] for row in found})
    colours = dict(zip(alphas, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False))
    sparsities = sorted({row["sparsity"] for row in found})
    size = {sparsity: 14 + 22 * place for place, sparsity in enumerate(sparsities)}
    found = _in_decades(found)
    grid = canvas.subplots(len(names), len(names), squeeze=False)
    for i, below in enumerate(names):
        for j, along in enumerate(names):
            axes = grid[i][j]
            if i == j:
                values = [[row[along] for row in found if row["alpha"] == alpha] for alpha in alphas]
                axes.hist(values, bins=12, stacked=True, color=[colours[alpha] for alpha in alphas])
            else:
                axes.scatter(
                    [row[along] for row in found],
                    [row[below] for row in found],
                    s=[size[row["sparsity"]] for row in found],
                    color=[colours[row["alpha"]] for row in found],
                    alpha=0.7,
                    lw=0,
                )
                r = correlation([row[along] for row in found], [row[below] for row in found])
                if math.isfinite(r.mean):
                    axes.set_title(f"r {r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", fontsize=8)
            if along == "alpha":
                axes.set_xticks(alphas)
            if below == "alpha" and i != j:
                axes.set_yticks(alphas)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(SHOWN[along] if i == len(names) - 1 else "", fontsize=9)
            axes.set_ylabel("runs" if i == j else SHOWN[below] if j == 0 else "", fontsize=9)
    marks = [grid[0][0].scatter([], [], color=colours[alpha], label=f"alpha {alpha:g}") for alpha in alphas]
    marks += [grid[0][0].scatter([], [], s=size[s], color="#7F7F7F", label=f"sparsity {s:g}") for s in sparsities]
    canvas.legend(handles=marks, ncols=len(marks), loc="outside lower center", fontsize=8)
    plots.title(
        canvas,
        f"{found[0]['dataset']}, {found[0]['model']}: {len(found)} runs of PAC-Bayes pruning",
        f"weights, data order, drawn networks; {len({row['seed'] for row in found})} seeds",
    )
