"""Performance against bound when the KL is down-weighted in training: the paper's figure for MNIST and random pruning.

Q is trained on the bound with its KL multiplied by d. Certificates know nothing of d: they take the whole KL. Every d
starts from the same priors, all of them trained as one population.
"""

import copy
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
from pacprune.masking.spikeslab import block_isotropic
from pacprune.paper import frame
from pacprune.paper.frame import Drawn, Job, on_device
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
class Setting:
    """A data set, a network, the weights d, and how the three stages are trained."""

    data: str
    model: str
    weights: tuple[float, ...]
    seeds: int
    dense: Config
    prior: Config
    posterior: Config
    alpha: float = 0.5
    sparsity: float = 0.9
    criterion: str = "random"
    eps: float = 1e-4
    std: float = 5e-3
    draws: int = 5_000


_GREY = Setting(
    data="mnist",
    model="mlp",
    weights=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    seeds=3,
    dense=Config(epochs=10, lr=0.05, schedule="cosine"),
    prior=Config(epochs=10, lr=0.05, schedule="cosine"),
    posterior=Config(epochs=10, lr=0.1, schedule="cosine"),
)
SETTINGS = {
    "smoke": replace(
        _GREY,
        data="digits",
        weights=(0.001, 0.03, 1.0),
        dense=Config(epochs=10, lr=0.1, schedule="cosine"),
        prior=Config(epochs=40, lr=0.1, schedule="cosine"),
        posterior=Config(epochs=10, lr=0.3, schedule="cosine"),
        std=0.05,
        draws=200,
    ),
    "reduced": _GREY,
    "paper": replace(
        _GREY,
        seeds=5,
        dense=Config(epochs=30, lr=0.01),
        prior=Config(epochs=30, lr=0.01),
        posterior=replace(_GREY.posterior, epochs=30),
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """One figure, and the means at the largest d of at most 1 and at the smallest."""
    setting = SETTINGS[job.scale]
    drawn = frame.draw(
        job,
        f"kl-weight-{setting.data}-{setting.model}",
        f"{setting.data}, {setting.model}, {setting.sparsity:.0%} pruned from a {setting.criterion} mask, alpha "
        f"{setting.alpha:g}: Q trained with d times the KL, certified with the whole KL; mean and 95 % interval over "
        f"{setting.seeds} seeds (weights, masks, data order and draws are random).",
        lambda: rows(setting, job),
        paint,
    )
    numbers = {}
    for d in (max(d for d in setting.weights if d <= 1), min(setting.weights)):
        own = [row for row in drawn.rows if row["kl_weight"] == d]
        for name in ("bound", "test_error", "kl"):
            numbers[f"{name} at d = {d:g}"] = frame.interval([row[name] for row in own]).mean
    for name in ("q_equals_p", "prior_test_error"):
        numbers[name] = frame.interval([row[name] for row in drawn.rows]).mean
    return [drawn], numbers


def rows(setting: Setting, job: Job) -> Table:
    """One row per seed and weight d; certificates pay for all priors, and for all d of one."""
    split = data.load(setting.data, prior_fraction=setting.alpha, seed=job.seed, data_dir=job.data_dir)
    seeds = job.seeds(setting.seeds)
    nets = [models.build(setting.model, split, seed=seed).to(job.device) for seed in seeds]
    given = {"seed": seeds, "progress": job.progress}
    fit(nets, split.prior, on_device(setting.dense, job), stage="dense", **given)
    for net, seed in zip(nets, seeds, strict=True):
        mask = masks.top_k(score(setting.criterion, net, split.prior, seed=seed), sparsity=setting.sparsity)
        attach(net, block_isotropic(net, mask, eps=setting.eps, std=setting.std), seed=seed)
    budget = Budget(setting.sparsity)
    fit(nets, split.prior, on_device(setting.prior, job), stage="prior", budget=budget, **given)
    priors = {seed: read(reestimate_batchnorm(net, split.prior)) for seed, net in zip(seeds, nets, strict=True)}
    before = {
        seed: gibbs_error(copy.deepcopy(net), split.test, draws=TEST_DRAWS)
        for seed, net in zip(seeds, nets, strict=True)
    }
    cells = [(d, seed) for d in setting.weights for seed in seeds]
    crowd = [copy.deepcopy(nets[seeds.index(seed)]) for _, seed in cells]
    fit_posterior(
        crowd,
        [priors[seed] for _, seed in cells],
        split,
        on_device(setting.posterior, job),
        kl_weight=[d for d, _ in cells],
        budget=budget,
        seed=[seed for _, seed in cells],
        progress=job.progress,
    )
    found: Table = []
    for (d, seed), net in zip(cells, crowd, strict=True):
        certificate = certify(
            net,
            priors[seed],
            split,
            grid=len(seeds),
            certified=len(setting.weights),
            draws=setting.draws,
            progress=job.progress,
        )
        own = {"dataset": setting.data, "model": setting.model, "sparsity": setting.sparsity, "alpha": setting.alpha}
        own |= {"kl_weight": d, "seed": seed, "prior_test_error": before[seed]}
        found.append(own | measured(certificate, net, split))
    return found


_LINES = {
    "bound": ("bound, with the whole KL", plots.PURPLE, "o"),
    "gibbs_risk": ("risk on the bound set", plots.BLUE, "^"),
    "test_error": ("test error of Q", plots.ORANGE, "s"),
    "prior_test_error": ("test error of P", plots.GREY, "D"),
}


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


def paint(canvas: Any, found: Table) -> None:
    """Left: everything against d. Right: test error against bound, one mark per run and a line through the means."""
    canvas.set_size_inches(11, 4.4)
    left, right = canvas.subplots(1, 2)
    long = [{"d": row["kl_weight"], "what": name, "value": row[name]} for row in found for name in _LINES]
    frame.lines(left, long, x="d", y="value", by="what", style=_LINES)
    left.set_xscale("log")
    top = max(frame.interval(values).mean for values in _by_weight(found, "bound").values())
    left.set_ylim(0, min(1.0, 1.3 * top))
    left.set_xlabel("d, the factor of the KL in training")
    left.set_ylabel("error rate")
    left.legend(fontsize=8)
    weights = sorted({row["kl_weight"] for row in found})
    bounds, errors = _by_weight(found, "bound"), _by_weight(found, "test_error")
    means = [(frame.interval(bounds[d]).mean, frame.interval(errors[d]).mean) for d in weights]
    right.plot(*zip(*means, strict=True), color=plots.GREY, lw=1, zorder=0)
    for place, d in enumerate(weights):
        share = place / max(1, len(weights) - 1)
        colour = (0.9 - 0.9 * share, 0.45, 0.1 + 0.7 * share)
        right.scatter(bounds[d], errors[d], s=24, color=colour, label=f"d = {d:g}")
    right.set_xlabel("bound on the error (certificate, with the whole KL)")
    right.set_ylabel("test error of Q")
    right.legend(fontsize=8)
    first = found[0]
    plots.title(
        canvas,
        f"{first['dataset']}, {first['model']}, {first['sparsity']:.0%} pruned: the KL times d in training alone",
        f"weights, masks, data order, draws; 95 % intervals over {len({row['seed'] for row in found})} seeds",
    )


def _by_weight(found: Table, name: str) -> dict[float, list[float]]:
    return {d: [row[name] for row in found if row["kl_weight"] == d] for d in {row["kl_weight"] for row in found}}
