"""Few examples in all: a posterior that learns from the bound set against a network that leaves it alone.

For every n, alpha and seed: a network is trained and pruned on the prior part, at the end with noise on its weights.
Its thresholded form gets the held-out certificate; the random network around it, trained on by the bound, gets those of
PAC-Bayes pruning. Both choose the best alpha of one declared grid and pay for it in their ledgers. The subsets of
different seeds share no example.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pacprune import bounds, data, models, philox
from pacprune.certification import drawn_networks
from pacprune.certification.certify import certify
from pacprune.data.splits import Part, Split
from pacprune.files import write_atomically
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import block_isotropic
from pacprune.methods.gradual import gmp
from pacprune.methods.pipeline import together
from pacprune.paper import frame
from pacprune.paper.frame import Drawn, Job, on_device
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.evaluate import error, gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

ORDER = 77
"""Seed of the order that subsets are cut from."""
CHOSEN_ON = slice(30_000, 40_000)
"""The examples of that order on which std and learning rates were chosen: in no subset, whatever the seed."""
_TEST_DRAWS = 3
ARMS = {
    "held_out": ("held-out, thresholded net", "#0072B2", "o"),
    "q_equals_p": ("Q = P, Seeger", "#999999", "D"),
    "seeger": ("trained Q, Seeger", "#E69F00", "s"),
    "catoni": ("trained Q, Catoni", "#D55E00", "^"),
}


@dataclass(frozen=True)
class Setting:
    """Sizes, alphas and sparsities of a data set; stages are given in steps, the same for all sizes."""

    data: str
    model: str
    sizes: tuple[int, ...]
    alphas: tuple[float, ...] = (0.01, 0.1, 0.4, 0.7)
    sparsities: tuple[float, ...] = (0.9,)
    seeds: int = 3
    dense_steps: int = 150
    prune_steps: int = 250
    prior_steps: int = 150
    posterior_steps: int = 150
    lr: float = 0.05
    std: float = 0.02
    eps: float = 1e-5
    draws: int = 1_000
    delta: float = 0.05
    expected_kl: float = 1.0
    """Nats that Q is expected to cost, where Catoni's constant is chosen."""
    label: str = ""

    @property
    def name(self) -> str:
        """What tells this setting from the others."""
        return "-".join([self.data, self.model, *([self.label] if self.label else [])])

    @property
    def file(self) -> str:
        """How its files are called."""
        return f"data-scarce-{self.name}"

    @property
    def grid(self) -> int:
        """How many priors the ledger pays for on one subset: all alphas and sparsities."""
        return len(self.alphas) * len(self.sparsities)


_SMALL = Setting(data="mnist", model="lenet5", sizes=(1_000, 3_000, 10_000))
_WEAK = replace(
    _SMALL,
    sizes=(10_000,),
    alphas=(0.005, 0.01, 0.02),
    posterior_steps=500,
    draws=6_000,
    expected_kl=30.0,
    label="weak-prior",
)
"""Priors from at most 200 examples, where Q has much to learn and many examples to learn it from."""
_LARGE = replace(
    _SMALL,
    alphas=(0.005, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8),
    dense_steps=1_000,
    prune_steps=1_500,
    prior_steps=1_000,
    posterior_steps=600,
    draws=6_000,
)
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "smoke": (
        Setting(
            data="digits",
            model="mlp",
            sizes=(300, 600),
            alphas=(0.3, 0.6),
            seeds=2,
            dense_steps=50,
            prune_steps=50,
            prior_steps=20,
            posterior_steps=20,
            draws=200,
        ),
    ),
    "reduced": (_SMALL, replace(_SMALL, data="fashion-mnist"), _WEAK),
    "paper": (replace(_LARGE, seeds=5), replace(_LARGE, data="fashion-mnist", seeds=5)),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure per data set, and every arm's certificate at its best declared alpha."""
    drawn, numbers = [], {}
    for setting in job.chosen(SETTINGS[job.scale]):
        found = frame.draw(
            job,
            setting.file,
            f"{setting.data}, {setting.model}: certificates at delta = {setting.delta:g}, each paying its part of a "
            f"grid of {setting.grid} declared in advance, from so many examples in all; mean and 95 % interval over "
            f"{setting.seeds} seeds (examples, split, weights, data order and draws are random).",
            lambda setting=setting: rows(setting, job),
            paint,
        )
        drawn.append(found)
        for one in table(found.rows):
            for arm in ARMS:
                numbers[f"{setting.name}, n = {one['examples']:g}: best {arm}"] = one[arm]
    return drawn, numbers


def rows(setting: Setting, job: Job) -> Table:
    """One row per size, alpha, seed and sparsity; those of a run that was broken off are kept in a file."""
    base = data.load(setting.data, seed=job.seed, data_dir=job.data_dir)
    path = job.out / f"{setting.file}-part.csv"
    found = frame.read(path) if path.is_file() else []
    known = {(row["examples"], row["alpha"], row["seed"]) for row in found}
    for n, seed, part in subsets(base.train, setting, job):
        for alpha in setting.alphas:
            if (n, alpha, seed) in known:
                continue
            split = data.split(
                part.x,
                part.y,
                prior_fraction=alpha,
                seed=seed,
                test=(base.test.x, base.test.y),
                dataset=setting.data,
                classes=base.classes,
            )
            own = {"dataset": setting.data, "model": setting.model, "examples": n, "alpha": alpha, "seed": seed}
            found += [own | row for row in certified(setting, split, seed, job)]
            write_atomically(path, plots.csv_of(found))
    return found


def subsets(train: Part, setting: Setting, job: Job) -> Iterator[tuple[int, int, Part]]:
    """(size, seed, examples): every seed has a block of its own, and its smaller subsets lie in the larger ones."""
    largest, first = max(setting.sizes), philox.permutation(len(train), seed=ORDER)
    order = philox.permutation(len(train), seed=ORDER + job.seed)
    order = train.index.argsort()[order[~torch.isin(order, first[CHOSEN_ON])]]
    if largest * setting.seeds > len(order):
        raise ValueError(
            f"{setting.seeds} seeds of {largest} examples each need more than the {len(order)} of {setting.data} that "
            "no setting was chosen on; use fewer seeds or smaller sizes"
        )
    for n in setting.sizes:
        for number, seed in enumerate(job.seeds(setting.seeds)):
            yield n, seed, train.subset(order[number * largest : number * largest + n])


def certified(setting: Setting, split: Split, seed: int, job: Job) -> Iterator[dict[str, float]]:
    """All certificates of one split, a row per sparsity; the sparsities are trained as one population."""

    def config(steps: int, count: int, **more: Any) -> Config:
        # Few examples make short epochs, so that every size and alpha takes as many steps.
        epochs = max(1, round(steps / math.ceil(count / 128)))
        given = {"lr": setting.lr, "clip": 1.0, **more}  # ten examples can throw a network far
        return on_device(Config(epochs=epochs, schedule="cosine", **given), job)

    whole, told = len(split.prior), job.progress
    decay = {"weight_decay": 5e-4}
    # The last fifth of the prior part tells beforehand about which risk to expect; then it is trained on, too.
    first = split.prior.subset(torch.arange(round(0.8 * whole)))
    last = split.prior.subset(torch.arange(len(first), whole))
    nets = [models.build(setting.model, split, seed=seed).to(job.device) for _ in setting.sparsities]
    start = config(setting.dense_steps, len(first), warmup=0.1, **decay)
    crowd = nets if len(nets) > 1 else nets[0]  # one alone is faster than a population of one
    fit(crowd, first, start, seed=seed, stage="dense", progress=told)
    ledger = bounds.Ledger.split(setting.delta, grid=setting.grid)
    expected = [(error(net, last) * len(last) + 1) / (len(last) + 2) for net in nets]
    given = {"n": len(split.bound), "kl": setting.expected_kl, "delta": ledger.pac_bayes_each}
    constants = [bounds.catoni_constant(risk, **given) for risk in expected]
    pruned = together(
        gmp,
        nets,
        split.prior,
        config(setting.prune_steps, whole, warmup=0.1, **decay),
        sparsity=list(setting.sparsities),
        seed=seed,
        progress=told,
    )
    for net, result in zip(nets, pruned, strict=True):
        attach(net, block_isotropic(net, result.mask, eps=setting.eps, std=setting.std), seed=seed)
    frozen = {"gate_lr": None, "lr": setting.lr / 2, **decay}
    fit(crowd, split.prior, config(setting.prior_steps, whole, **frozen), seed=seed, stage="prior", progress=told)
    priors = [read(reestimate_batchnorm(net, split.prior)) for net in nets]
    late = config(setting.posterior_steps, len(split.bound), lr=0.1, gate_lr=None)
    fit_posterior(crowd, priors, split, late, delta=setting.delta, seed=seed, progress=told)
    for net, prior, sparsity, c in zip(nets, priors, setting.sparsities, constants, strict=True):
        found = certify(
            net, prior, split, delta=setting.delta, grid=setting.grid, draws=setting.draws, tolerance=0.0, progress=told
        )
        drawn, n, delta = found.pac_bayes["monte_carlo"], found.n, found.ledger.pac_bayes_each
        wrong = drawn_networks.errors(harden(copy.deepcopy(net)), drawn_networks.thresholded(prior), split.test)
        yield {
            "sparsity": sparsity,
            "n": n,
            "held_out_error": found.record["reference"]["errors"] / n,
            "prior_risk": drawn["prior"]["risk"],
            "gibbs_risk": found.risk,
            "risk_upper": found.risk_upper,
            "kl": found.kl,
            "c": c,
            **{arm: found.bounds[arm] for arm in ("held_out", "q_equals_p", "seeger")},
            "catoni": bounds.catoni(found.risk_upper, n=n, kl=found.kl, delta=delta, c=c),
            # What endlessly many draws would come to; no certificate.
            "catoni_exact_risk": bounds.catoni(found.risk, n=n, kl=found.kl, delta=delta, c=c),
            "q_equals_p_catoni": bounds.catoni(drawn["prior"]["risk_upper"], n=n, kl=0.0, delta=delta, c=c),
            "held_out_test_error": int(wrong.sum()) / len(wrong),
            "test_error": gibbs_error(net, split.test, draws=_TEST_DRAWS),
        }


def best(found: Table, arm: str) -> dict[float, dict[str, Any]]:
    """Per seed, the row whose certificate by this arm is lowest: over alphas and sparsities, all paid for."""
    seeds = sorted({row["seed"] for row in found})
    return {seed: min((row for row in found if row["seed"] == seed), key=lambda row: row[arm]) for seed in seeds}


def table(found: Table) -> Table:
    """One row per size: every arm's mean certificate at its best declared alpha, and the alphas that were chosen."""
    lines = []
    for n in sorted({row["examples"] for row in found}):
        own = [row for row in found if row["examples"] == n]
        line: dict[str, Any] = {"dataset": own[0]["dataset"], "examples": n}
        for arm in ARMS:
            chosen = best(own, arm).values()
            line[arm] = frame.interval([row[arm] for row in chosen]).mean
            line[f"{arm}_alpha"] = "/".join(f"{row['alpha']:g}" for row in chosen)
        lines.append(line)
    return lines


def paint(canvas: Any, found: Table) -> None:
    """A panel per size: every arm's certificate against alpha, at the sparsity that is least."""
    sizes = sorted({row["examples"] for row in found})
    least = min(row["sparsity"] for row in found)
    canvas.set_size_inches(max(9, 4 * len(sizes)), 4.2)
    for axes, n in zip(canvas.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        own = [row for row in found if row["examples"] == n and row["sparsity"] == least]
        long = [{"alpha": row["alpha"], "arm": arm, "value": row[arm]} for row in own for arm in ARMS]
        frame.lines(axes, long, x="alpha", y="value", by="arm", style=ARMS)
        means = [float(value) for line in axes.get_lines() for value in line.get_ydata()]
        axes.set_ylim(0, min(1.0, 1.15 * max(means)))
        axes.set_title(f"{int(n):,} examples in all", fontsize=9)
        alphas = sorted({row["alpha"] for row in own})
        axes.set_xscale("log")
        axes.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("alpha, the prior part's share")
    canvas.axes[0].set_ylabel("certificate")
    canvas.axes[-1].legend(fontsize=8)
    seeds = len({row["seed"] for row in found})
    plots.title(
        canvas,
        f"{found[0]['dataset']}, {found[0]['model']}, {least:.0%} pruned",
        f"examples, split, weights, order, draws; 95 % intervals over {seeds} seeds",
    )
