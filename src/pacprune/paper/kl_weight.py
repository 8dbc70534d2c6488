"""Performance against bound when the KL is down-weighted in training: the paper's figure for MNIST and random pruning.

Q is trained on the bound with its KL multiplied by d. Certificates know nothing of d: they take the whole KL. Every d
starts from the same priors, all of them trained as one population.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pacprune import data, models
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import certify
from pacprune.data.splits import Split
from pacprune.masking import masks
from pacprune.masking.attachment import attach, read
from pacprune.masking.criteria import score
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic
from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, dense_networks
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval, means
from pacprune.runs import plots
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

TEST_DRAWS = 20
"""Networks drawn from Q to estimate its Gibbs error on the test part."""


@dataclass(frozen=True)
class Factors:
    """The factors d of the KL, and the criterion of the mask that P starts from."""

    kl_weights: tuple[float, ...]
    criterion: str = "random"


_GREY = Setting(
    data="mnist",
    model="mlp",
    sparsities=(0.9,),
    alphas=(0.5,),
    seeds=3,
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    prior=Config(epochs=10, lr=0.05, schedule="cosine"),
    posterior=Config(epochs=10, lr=0.1, schedule="cosine"),
    amp=False,
    options=Factors((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
)
SETTINGS: dict[str, tuple[Setting[Factors], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits",
            kl_weights=(0.001, 0.03, 1.0),
            seeds=2,
            dense=Config(epochs=10, lr=0.1, schedule="cosine"),
            prior=Config(epochs=20, lr=0.1, schedule="cosine"),
            posterior=Config(epochs=10, lr=0.3, schedule="cosine"),
            std=0.05,
            draws=200,
        ),
    ),
    "reduced": (_GREY,),
    "paper": (
        _GREY.changed(
            seeds=5,
            dense=Config(epochs=30, lr=0.01),
            prior=Config(epochs=30, lr=0.01),
            posterior=replace(_GREY.posterior, epochs=30),
        ),
    ),
}


def figures(setting: Setting[Factors], job: Job) -> Iterator[Figure]:
    """Errors and bounds against d, and against each other."""
    (sparsity,), (alpha,) = setting.sparsities, setting.alphas
    yield Figure(
        f"kl-weight-{setting.name}",
        f"{setting.data}, {setting.model}, {sparsity:.0%} pruned from a {setting.options.criterion} mask, alpha "
        f"{alpha:g}: Q trained with d times the KL, certified with the whole KL; mean and 95 % interval over "
        f"{setting.seeds} seeds (weights, masks, data order and draws are random).",
        lambda: rows(setting, job),
        paint,
        numbers,
    )


def numbers(rows: Table) -> dict[str, float]:
    """The means at the largest d of at most 1 and at the smallest, and those of P."""
    weights = {row["kl_weight"] for row in rows}
    table = {}
    for d in (max(d for d in weights if d <= 1), min(weights)):
        for name in ("bound", "test_error", "kl"):
            table[f"{name} at d = {d:g}"] = means(rows, name, "kl_weight")[d,]
    return table | {name: interval([row[name] for row in rows]).mean for name in ("q_equals_p", "prior_test_error")}


def rows(setting: Setting[Factors], job: Job) -> Table:
    """One row per seed and factor d; certificates pay for all priors, and for all d of one."""
    (sparsity,), (alpha,) = setting.sparsities, setting.alphas
    split = data.load(setting.data, prior_fraction=alpha, seed=job.seed, data_dir=job.data_dir)
    nets = _prior_networks(setting, split, job)
    priors = {seed: read(reestimate_batchnorm(net, split.prior)) for seed, net in nets.items()}
    before = {seed: gibbs_error(copy.deepcopy(net), split.test, draws=TEST_DRAWS) for seed, net in nets.items()}
    cells = [(d, seed) for d in setting.options.kl_weights for seed in nets]
    posteriors = [copy.deepcopy(nets[seed]) for _, seed in cells]
    fit_posterior(
        posteriors,
        [priors[seed] for _, seed in cells],
        split,
        setting.posterior,
        kl_weight=[d for d, _ in cells],
        budget=Budget(sparsity),
        seed=[seed for _, seed in cells],
        progress=job.progress,
    )
    table: Table = []
    for (d, seed), net in zip(cells, posteriors, strict=True):
        certificate = _certify(setting, net, priors[seed], split, job)
        cell = {"dataset": setting.data, "model": setting.model, "sparsity": sparsity, "alpha": alpha}
        cell |= {"kl_weight": d, "seed": seed, "prior_test_error": before[seed]}
        table.append(cell | certificate_numbers(certificate, net, split))
    return table


def _prior_networks(setting: Setting[Factors], split: Split, job: Job) -> dict[int, nn.Module]:
    """Networks that draw from P, by seed."""
    (sparsity,) = setting.sparsities
    nets = dense_networks(setting, lambda seed: models.build(setting.model, split, seed=seed), split.prior, job)
    for seed, net in nets.items():
        mask = masks.top_k(score(setting.options.criterion, net, split.prior, seed=seed), sparsity=sparsity)
        attach(net, block_isotropic(net, mask, eps=setting.eps, std=setting.std), seed=seed)
    common = {"budget": Budget(sparsity), "seed": list(nets), "stage": "prior", "progress": job.progress}
    fit(list(nets.values()), split.prior, setting.prior, **common)
    return nets


def _certify(setting: Setting[Factors], net: nn.Module, prior: SpikeSlab, split: Split, job: Job) -> Certificate:
    return certify(
        net,
        prior,
        split,
        grid=setting.seeds,
        certified=len(setting.options.kl_weights),
        draws=setting.draws,
        progress=job.progress,
    )


def certificate_numbers(certificate: Certificate, model: nn.Module, split: Split) -> dict[str, float]:
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


_STYLES = {
    "bound": Style("bound, with the whole KL", plots.PURPLE, "o"),
    "gibbs_risk": Style("risk on the bound set", plots.BLUE, "^"),
    "test_error": Style("test error of Q", plots.ORANGE, "s"),
    "prior_test_error": Style("test error of P", plots.GREY, "D"),
}


def paint(canvas: Any, rows: Table) -> None:
    """Errors and bounds against d, and beside that test error against bound."""
    canvas.set_size_inches(11, 4.4)
    over_d, over_bound = canvas.subplots(1, 2)
    _paint_over_d(over_d, rows)
    _paint_over_bound(over_bound, rows)
    sparsity, count = rows[0]["sparsity"], painting.seed_count(rows)
    plots.title(
        canvas,
        f"{painting.subject(rows)}, {sparsity:.0%} pruned: the KL times d in training alone",
        f"weights, masks, data order, draws; 95 % intervals over {count} seeds",
    )


def _paint_over_d(axes: Any, rows: Table) -> None:
    long = [{"d": row["kl_weight"], "what": name, "value": row[name]} for row in rows for name in _STYLES]
    painting.lines(axes, long, x="d", y="value", by="what", styles=_STYLES)
    axes.set_xscale("log")
    axes.set_ylim(0, min(1.0, 1.3 * max(means(rows, "bound", "kl_weight").values())))
    axes.set_xlabel("d, the factor of the KL in training")
    axes.set_ylabel("error rate")
    axes.legend(fontsize=8)


def _paint_over_bound(axes: Any, rows: Table) -> None:
    """One mark per run, and a line through the means."""
    bounds, errors = means(rows, "bound", "kl_weight"), means(rows, "test_error", "kl_weight")
    parts = dict(sorted(groups(rows, "kl_weight").items()))
    axes.plot([bounds[key] for key in parts], [errors[key] for key in parts], color=plots.GREY, lw=1, zorder=0)
    for place, ((d,), part) in enumerate(parts.items()):
        share = place / max(1, len(parts) - 1)
        colour = (0.9 - 0.9 * share, 0.45, 0.1 + 0.7 * share)
        x, y = ([row[name] for row in part] for name in ("bound", "test_error"))
        axes.scatter(x, y, s=24, color=colour, label=f"d = {d:g}")
    axes.set_xlabel("bound on the error (certificate, with the whole KL)")
    axes.set_ylabel("test error of Q")
    axes.legend(fontsize=8)
