"""The three stages of PAC-Bayes pruning as the paper writes them, one by one, for figures that look between them.

Stage 1 trains a dense network on S_P. Stage 2 trains weights and keep probabilities there, with random masks and noise
on the weights: that is P. Stage 3 trains Q on the paper's bound. Both learn with one learning rate, and nothing holds
the sparsity. What is certified, is certified by the whole KL and with all priors of a figure paid for.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pacprune import bounds, models
from pacprune.certification.certify import certify
from pacprune.data.splits import Split
from pacprune.masking import masks
from pacprune.masking.attachment import attach, read
from pacprune.masking.criteria import score
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, isotropic
from pacprune.paper.frame import Job, Setting, dense_networks
from pacprune.training.config import Config
from pacprune.training.evaluate import gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior

TEST_DRAWS = 50
"""Networks drawn from a distribution to estimate its Gibbs error on the test part."""
RANDOM = "random"


class Start(NamedTuple):
    """Where a prior begins; random pruning, which is isotropic, has no eps."""

    criterion: str
    sparsity: float
    eps: float
    seed: int

    @property
    def mapping(self) -> str:
        """The paper found the sigmoid better around a mask, and the clamp where keep probabilities are not extreme."""
        return "clamp" if self.criterion == RANDOM else "sigmoid"


def gated(config: Config) -> Config:
    """The same with gates that have the weights' learning rate, unless one is given, and follow its schedule."""
    gate_lr = config.gate_lr if "gate_lr" in config.changes() else config.lr
    return replace(config, gate_lr=gate_lr, gates_scheduled=True)


def begin(setting: Setting[Any], starts: Sequence[Start], split: Split, job: Job) -> list[nn.Module]:
    """Networks that draw from what stage 2 begins with; the dense networks of stage 1 are kept in files."""
    seeds = sorted({start.seed for start in starts})
    dense = dense_networks(
        setting,
        lambda seed: models.build(setting.model, split, seed=seed),
        split.prior,
        job,
        seeds=seeds,
        name=f"dense-{split.prior_fraction:g}",
    )
    nets = [copy.deepcopy(dense[start.seed]) for start in starts]
    for start, net in zip(starts, nets, strict=True):
        attach(net, _first(setting, start, net, split), mapping=start.mapping, seed=start.seed)
    return nets


def _first(setting: Setting[Any], start: Start, net: nn.Module, split: Split) -> SpikeSlab:
    if start.criterion == RANDOM:
        return isotropic(net, sparsity=start.sparsity, std=setting.std)
    scores = score(start.criterion, net, split.prior, seed=start.seed)
    return block_isotropic(net, masks.top_k(scores, sparsity=start.sparsity), eps=start.eps, std=setting.std)


def train_priors(
    setting: Setting[Any], nets: list[nn.Module], starts: Sequence[Start], split: Split, job: Job
) -> list[SpikeSlab]:
    """Stage 2: the networks then draw from the priors that are returned."""
    seeds = [start.seed for start in starts]
    fit(nets, split.prior, gated(setting.prior), seed=seeds, stage="prior", progress=job.progress)
    return [read(reestimate_batchnorm(net, split.prior)) for net in nets]


def train_posteriors(
    setting: Setting[Any],
    nets: list[nn.Module],
    priors: list[SpikeSlab],
    starts: Sequence[Start],
    split: Split,
    job: Job,
    *,
    kl_weight: float | list[float] = 1.0,
) -> None:
    """Stage 3: networks that draw from the priors then draw from posteriors."""
    options: dict[str, Any] = {"objective": "paper", "kl_weight": kl_weight, "progress": job.progress}
    seeds = [start.seed for start in starts]
    fit_posterior(nets, priors, split, gated(setting.posterior), seed=seeds, **options)


def certificate_numbers(
    setting: Setting[Any],
    net: nn.Module,
    prior: SpikeSlab,
    split: Split,
    job: Job,
    *,
    grid: int,
    certified: int = 1,
) -> dict[str, float]:
    """What a certificate says of Q, which the network draws from, beside the Gibbs error of Q on the test part.

    Args:
        setting: How many networks are drawn.
        net: The network.
        prior: P.
        split: The data.
        job: Who is told of the progress.
        grid: Priors of the figure.
        certified: Posteriors of each.

    Returns:
        `bound` is the certificate, by Seeger's bound; `paper_bound` is that of the paper's theorem at the same risk.
    """
    certificate = certify(
        net,
        prior,
        split,
        grid=grid,
        certified=certified,
        draws=setting.draws,
        progress=job.progress,
    )
    n, nats, delta = certificate.n, certificate.kl, certificate.ledger.pac_bayes_each
    return {
        "gibbs_risk": certificate.risk,
        "kl": nats,
        "n": n,
        "kl_per_n": nats / n,
        "bound": certificate.bound,
        "paper_bound": bounds.paper(certificate.risk_upper, n=n, kl=nats, delta=delta),
        "q_equals_p": certificate.bounds["q_equals_p"],
        "held_out": certificate.bounds["held_out"],
        "sparsity_of_q": certificate.sparsity,
        "test_error": gibbs_error(net, split.test, draws=TEST_DRAWS),
    }
