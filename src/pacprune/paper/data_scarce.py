"""Few examples in all: a posterior that learns from the bound set against a network that leaves it alone.

For every n, alpha and seed: a network is trained and pruned on the prior part, at the end with noise on its weights.
Its thresholded form gets the held-out certificate; the random network around it, trained on by the bound, gets those of
PAC-Bayes pruning. Both choose the best alpha of one declared grid and pay for it in their ledgers. The subsets of
different seeds share no example.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from pacprune import bounds, data, models, philox
from pacprune.certification import drawn_networks
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import certify
from pacprune.data.splits import Part, Split
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic
from pacprune.methods.gradual import gmp
from pacprune.methods.pipeline import together
from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, in_entries, in_steps
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.evaluate import gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

ORDER = 77
"""Seed of the order that subsets are cut from."""
CHOSEN_ON = slice(30_000, 40_000)
"""The examples of that order on which std and learning rates were chosen: in no subset, whatever the seed."""
_TEST_DRAWS = 3
ARMS = {
    "held_out": Style("held-out, thresholded net", plots.BLUE, "o"),
    "q_equals_p": Style("Q = P, Seeger", "#999999", "D"),
    "seeger": Style("trained Q, Seeger", plots.ORANGE, "s"),
    "catoni": Style("trained Q, Catoni", painting.RED, "^"),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many examples there are in all, and the steps of every stage, the same for all sizes.

    Args:
        sizes: Numbers of examples.
        dense_steps: Steps of dense training.
        prune_steps: Steps of pruning.
        prior_steps: Steps with noise on the weights, after which P is read.
        posterior_steps: Steps of Q.
        delta: Probability with which a certificate may fail.
        expected_kl: Nats that Q is expected to cost, where Catoni's constant is chosen.
    """

    sizes: tuple[int, ...] = in_entries()
    dense_steps: int = 150
    prune_steps: int = 250
    prior_steps: int = 150
    posterior_steps: int = 150
    delta: float = 0.05
    expected_kl: float = 1.0


_EARLY = Config(lr=0.05, schedule="cosine", clip=1.0, warmup=0.1, weight_decay=5e-4)  # ten examples can throw one far
_SMALL = Setting(
    data="mnist",
    model="lenet5",
    alphas=(0.01, 0.1, 0.4, 0.7),
    sparsities=(0.9,),
    seeds=3,
    dense=_EARLY,
    pruning=_EARLY,
    prior=replace(_EARLY, lr=0.025, gate_lr=None, warmup=0.0),
    posterior=Config(lr=0.1, schedule="cosine", clip=1.0, gate_lr=None),
    amp=False,
    eps=1e-5,
    std=0.02,
    draws=1_000,
    options=Sizes(sizes=(1_000, 3_000, 10_000)),
)
_WEAK = _SMALL.changed(
    sizes=(10_000,),
    alphas=(0.005, 0.01, 0.02),
    posterior_steps=500,
    draws=6_000,
    expected_kl=30.0,
    label="weak-prior",
)
"""Priors from at most 200 examples, where Q has much to learn and many examples to learn it from."""
_LARGE = _SMALL.changed(
    alphas=(0.005, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8),
    dense_steps=1_000,
    prune_steps=1_500,
    prior_steps=1_000,
    posterior_steps=600,
    draws=6_000,
    seeds=5,
)
SETTINGS: dict[str, tuple[Setting[Sizes], ...]] = {
    "smoke": (
        _SMALL.changed(
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
    "reduced": (_SMALL, _SMALL.changed(data="fashion-mnist"), _WEAK),
    "full": (_LARGE, _LARGE.changed(data="fashion-mnist")),
}


class Entry(NamedTuple):
    """One certified network."""

    examples: int
    alpha: float
    seed: int
    sparsity: float


def figures(setting: Setting[Sizes], job: Job) -> Iterator[Figure]:
    """Certificates against alpha, and every arm's certificate at its best declared alpha."""
    yield Figure(
        f"data-scarce-{setting.name}",
        f"{painting.network(setting)}: certificates at delta = {setting.options.delta:g}, each paying its part of "
        f"a grid of {grid_size(setting)} declared in advance, from so many examples in all; mean and 95 % interval "
        f"over {setting.seeds} seeds (examples, split, weights, data order and draws are random).",
        lambda: rows(setting, job),
        paint,
        lambda rows: {
            f"{setting.name}, n = {line['examples']:g}: best {arm}": line[arm]
            for line in best_table(rows)
            for arm in ARMS
        },
    )


def grid_size(setting: Setting[Sizes]) -> int:
    """How many priors the ledger pays for on one subset: all alphas and sparsities."""
    return len(setting.alphas) * len(setting.sparsities)


def rows(setting: Setting[Sizes], job: Job) -> Table:
    """One row per size, seed, alpha and sparsity; those of an interrupted run are kept."""
    base = data.load(setting.data, seed=job.seed, data_dir=job.data_dir)
    parts = {(n, seed): part for n, seed, part in subsets(base.train, setting, job)}
    entries = [
        Entry(n, alpha, seed, sparsity)
        for n, seed in parts
        for alpha in setting.alphas
        for sparsity in setting.sparsities
    ]

    def compute(portion: list[Entry]) -> Table:
        first = portion[0]
        part = parts[first.examples, first.seed]
        split = data.split(
            part.x,
            part.y,
            prior_fraction=first.alpha,
            seed=first.seed,
            test=(base.test.x, base.test.y),
            dataset=setting.data,
            classes=base.classes,
        )
        return certificates(setting, [entry.sparsity for entry in portion], split, first.seed, job)

    table = compute_rows(
        entries,
        compute,
        path=job.out / f"data-scarce-{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry[:3],
    )
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def subsets(train: Part, setting: Setting[Sizes], job: Job) -> Iterator[tuple[int, int, Part]]:
    """(size, seed, examples): every seed has a block of its own, and its smaller subsets lie in the larger ones."""
    sizes = setting.options.sizes
    largest, first = max(sizes), philox.permutation(len(train), seed=ORDER)
    order = philox.permutation(len(train), seed=ORDER + job.seed)
    order = train.index.argsort()[order[~torch.isin(order, first[CHOSEN_ON])]]
    if largest * setting.seeds > len(order):
        raise ValueError(
            f"{setting.seeds} seeds of {largest} examples each need more than the {len(order)} of {setting.data} that "
            "no setting was chosen on; use fewer seeds or smaller sizes"
        )
    for n in sizes:
        for number, seed in enumerate(job.seeds(setting.seeds)):
            yield n, seed, train.subset(order[number * largest : number * largest + n])


def certificates(setting: Setting[Sizes], sparsities: list[float], split: Split, seed: int, job: Job) -> Table:
    """All certificates of one split, a row per sparsity; the sparsities are trained as one population."""
    options, size = setting.options, len(split.prior)
    common: dict[str, Any] = {"seed": seed, "progress": job.progress}
    nets = [models.build(setting.model, split, seed=seed).to(job.device) for _ in sparsities]
    members = nets if len(nets) > 1 else nets[0]  # one alone is faster than a population of one
    # The last fifth of the prior part tells beforehand about which risk to expect; then it is trained on, too.
    early, last = _cut(split.prior, 0.8)
    fit(members, early, in_steps(setting.dense, options.dense_steps, len(early)), stage="dense", **common)
    # Not by `error`, which notes a look: other splits, which are other experiments, have these examples as bound sets.
    risks = [float(drawn_networks.errors(net, {}, last).double().mean()) for net in nets]
    constants = [_catoni_constant(setting, risk, len(last), len(split.bound)) for risk in risks]
    pruning = in_steps(setting.pruning, options.prune_steps, size)
    pruned = together(gmp, nets, split.prior, pruning, sparsity=sparsities, **common)
    for net, result in zip(nets, pruned, strict=True):
        attach(net, block_isotropic(net, result.mask, eps=setting.eps, std=setting.std), seed=seed)
    fit(members, split.prior, in_steps(setting.prior, options.prior_steps, size), stage="prior", **common)
    priors = [read(reestimate_batchnorm(net, split.prior)) for net in nets]
    posterior = in_steps(setting.posterior, options.posterior_steps, len(split.bound))
    fit_posterior(members, priors, split, posterior, delta=options.delta, **common)
    share = {"delta": options.delta, "grid": grid_size(setting), "draws": setting.draws}
    table = []
    for net, prior, c in zip(nets, priors, constants, strict=True):
        certificate = certify(net, prior, split, tolerance=0.0, progress=job.progress, **share)
        table.append(_numbers(certificate, c) | _test_errors(net, prior, split))
    return table


def _cut(part: Part, share: float) -> tuple[Part, Part]:
    """The first examples of a part, and the others."""
    cut = round(share * len(part))
    return part.subset(torch.arange(cut)), part.subset(torch.arange(cut, len(part)))


def _catoni_constant(setting: Setting[Sizes], risk: float, examples: int, n: int) -> float:
    """Catoni's constant for the risk that so many examples let expect."""
    options = setting.options
    delta = bounds.Ledger.split(options.delta, grid=grid_size(setting)).pac_bayes_each
    expected = (risk * examples + 1) / (examples + 2)
    return bounds.catoni_constant(expected, n=n, kl=options.expected_kl, delta=delta)


def _numbers(certificate: Certificate, c: float) -> dict[str, float]:
    """What a certificate says, and Catoni's bounds with the constant c."""
    drawn_risks, n, delta = certificate.pac_bayes["monte_carlo"], certificate.n, certificate.ledger.pac_bayes_each
    common = {"n": n, "delta": delta, "c": c}
    return {
        "n": n,
        "held_out_error": certificate.pac_bayes["reference"]["errors"] / n,
        "prior_risk": drawn_risks["prior"]["risk"],
        "gibbs_risk": certificate.risk,
        "risk_upper": certificate.risk_upper,
        "kl": certificate.kl,
        "c": c,
        **{arm: certificate.bounds[arm] for arm in ("held_out", "q_equals_p", "seeger")},
        "catoni": bounds.catoni(certificate.risk_upper, kl=certificate.kl, **common),
        # What endlessly many draws would come to; no certificate.
        "catoni_exact_risk": bounds.catoni(certificate.risk, kl=certificate.kl, **common),
        "q_equals_p_catoni": bounds.catoni(drawn_risks["prior"]["risk_upper"], kl=0.0, **common),
    }


def _test_errors(net: nn.Module, prior: SpikeSlab, split: Split) -> dict[str, float]:
    """Test errors of the thresholded network and of Q."""
    wrong = drawn_networks.errors(harden(copy.deepcopy(net)), drawn_networks.thresholded(prior), split.test)
    return {
        "held_out_test_error": int(wrong.sum()) / len(wrong),
        "test_error": gibbs_error(net, split.test, draws=_TEST_DRAWS),
    }


def best(rows: Table, arm: str) -> Table:
    """Per seed, the row whose certificate by this arm is lowest: over alphas and sparsities, all paid for."""
    return [min(part, key=lambda row: row[arm]) for _, part in sorted(groups(rows, "seed").items())]


def best_table(rows: Table) -> Table:
    """One row per size: every arm's mean certificate at its best declared alpha, and the alphas that were chosen."""
    table = []
    for (n,), part in sorted(groups(rows, "examples").items()):
        line: dict[str, Any] = {"dataset": part[0]["dataset"], "examples": n}
        for arm in ARMS:
            chosen = best(part, arm)
            line[arm] = interval([row[arm] for row in chosen]).mean
            line[f"{arm}_alpha"] = "/".join(f"{row['alpha']:g}" for row in chosen)
        table.append(line)
    return table


def paint(canvas: Any, rows: Table) -> None:
    """A panel per size: every arm's certificate against alpha, at the sparsity that is least."""
    least = min(row["sparsity"] for row in rows)
    panels = sorted(groups([row for row in rows if row["sparsity"] == least], "examples").items())
    canvas.set_size_inches(max(9, 4 * len(panels)), 4.2)
    for axes, ((n,), part) in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        long = [{"alpha": row["alpha"], "arm": arm, "value": row[arm]} for row in part for arm in ARMS]
        painting.lines(axes, long, x="alpha", y="value", by="arm", styles=ARMS, side_by_side=True)
        certificates = [float(value) for line in axes.get_lines() for value in line.get_ydata()]
        painting.error_axis(axes, certificates, "")
        axes.set_title(f"{int(n):,} examples in all", fontsize=9)
        alphas = sorted({row["alpha"] for row in part})
        axes.set_xscale("log")
        axes.set_xlim(alphas[0] / 1.4, alphas[-1] * 1.4)
        axes.set_xticks(alphas, [f"{100 * alpha:g}" for alpha in alphas], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("alpha, the prior part's share, in %")
    canvas.axes[0].set_ylabel("certificate in %")
    canvas.legend(*canvas.axes[0].get_legend_handles_labels(), ncols=4, loc="outside lower center", fontsize=8)
    plots.title(
        canvas,
        f"{painting.subject(rows)}, {100 * least:g} % pruned",
        f"examples, split, weights, order, draws; 95 % intervals over {painting.seed_count(rows)} seeds",
    )
