"""The three procedures from end to end: one-shot pruning, probabilistic fine-tuning, PAC-Bayes pruning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import masks, weights
from pacprune.batches import Data
from pacprune.budget import Budget
from pacprune.certificate import Certificate
from pacprune.data import Split
from pacprune.evaluate import reestimate_batchnorm
from pacprune.issue import certify, check_declared
from pacprune.layers import attach, harden, read, sites
from pacprune.loop import Config, History, Progress, check_rates
from pacprune.scores import NAMES, Loss, score
from pacprune.spikeslab import SpikeSlab, block_isotropic, log_scores, score_monotone, top_mask
from pacprune.train import check, fit, fit_posterior

COUPLING = 4.0
"""How strongly a gate's logit follows log|w| in the default recipe of pft."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """A sparse network: the trained plain model, its mask (exactly k weights kept), and one history row per epoch."""

    model: nn.Module
    mask: Mapping[str, Tensor]
    history: History

    @property
    def sparsity(self) -> float:
        """The counted fraction of zeros."""
        return weights.sparsity(self.model)


@dataclass(frozen=True, eq=False)
class Certified:
    """A sparse random network with its certificate: the attached model, P, Q and the certificate of Q."""

    model: nn.Module
    prior: SpikeSlab
    posterior: SpikeSlab
    certificate: Certificate
    history: History


def osp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float,
    criterion: str = "magnitude",
    dense: Config | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pruned:
    """One-shot pruning, in place: [dense training] -> scores -> top-k -> sparse fine-tuning with `config`."""
    _check(model, sparsity, criterion)
    stage = _stages(model, data, loss, seed, folder, progress)
    history = stage("dense", dense) if dense else []
    found = score(criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    mask = masks.top_k(found, sparsity=sparsity, scope=scope, min_per_layer=min_per_layer, total=weights.total(model))
    weights.apply_mask(model, mask)
    return Pruned(model, mask, history + _tune(model, data, config, stage))


def pft(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float,
    criterion: str = "magnitude",
    recipe: str = "coupled",
    mask_share: float = 0.5,
    eps: float = 1e-2,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pruned:
    """Probabilistic fine-tuning, in place: [dense] -> train weights and keep_prob -> top-k -> sparse fine-tuning.

    `config` is the whole budget after dense training: its first `mask_share` trains the masks, the rest fine-tunes, on
    one learning-rate schedule, so that osp with the same config is the fair comparison. recipe "coupled" (the default)
    ties each gate to its weight's magnitude, holds the mean keep_prob to a budget that falls from dense to
    1 - sparsity, and hardens the gates; "paper" is the paper's: block-isotropic start with `eps`, clamped
    probabilities, no budget. An untrained model gives PFT at initialisation; lr = 0 with mask_share = 1 and a gate_lr
    (say 20 for "coupled", 0.5 for "paper") gives strong lottery tickets.
    """
    _check(model, sparsity, criterion)
    if not 0 < mask_share <= 1:
        raise ValueError(
            f"mask_share is {mask_share}; it must lie in (0, 1]: the share of the epochs that trains the masks"
        )
    if recipe not in ("coupled", "paper"):
        raise ValueError(f"recipe {recipe!r} is unknown; use 'coupled' or 'paper'")
    check_rates(config)
    stage = _stages(model, data, loss, seed, folder, progress)
    history = stage("dense", dense) if dense else []
    found = score(criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    epochs = max(1, round(config.epochs * mask_share)) if config.epochs else 0
    share = epochs / config.epochs if config.epochs else 1.0
    cut = min(config.span[1], config.span[0] + (config.span[1] - config.span[0]) * share)  # rounding may go beyond
    first = replace(config, epochs=epochs, span=(config.span[0], cut))
    second = replace(config, epochs=config.epochs - epochs, span=(cut, config.span[1]), warmup=0.0)
    if recipe == "coupled":
        attach(model, score_monotone(model, found, sparsity=sparsity), coupling=COUPLING, seed=seed)
        _start_gates_(model, found)
        budget = Budget(sparsity, schedule="cubic", sharpen=4.0)
    else:
        start = masks.top_k(found, sparsity=sparsity, total=weights.total(model))
        attach(model, block_isotropic(model, start, eps=eps), mapping="clamp", seed=seed)
        budget = None
    history += stage("masks", first, budget=budget)
    mask = top_mask(read(model), sparsity=sparsity, min_per_layer=min_per_layer)
    harden(model, mask)
    return Pruned(model, mask, history + _tune(model, data, second, stage))


def pbp(
    model: nn.Module,
    split: Split,
    config: Config,
    *,
    sparsity: float,
    criterion: str = "magnitude",
    posterior: Config | None = None,
    dense: Config | None = None,
    eps: float = 1e-4,
    std: float = 2e-3,
    train_std: bool = False,
    delta: float = 0.05,
    objective: str = "seeger",
    family: str = "seeger",
    grid: int = 1,
    method: str = "betting",
    draws: int = 20_000,
    tolerance: float | None = None,
    name: str | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Certified:
    """PAC-Bayes pruning, in place: [dense] and `config` train the prior on S_P, `posterior` trains Q on the bound.

    P is the block-isotropic spike and slab around the criterion's mask, trained on split.prior with its mean keep_prob
    held at 1 - sparsity, and written down before split.bound is read. The certificate holds with probability 1 - delta;
    `family` is the bound that it claims, `grid` the number of priors, fixed in advance, of which this is one.
    """
    _check(model, sparsity, criterion)
    check_declared(family, method)
    if split.classes == 0 or split.prior.y.ndim > 1:
        raise ValueError(
            f"split has {split.classes} classes and labels of shape {tuple(split.prior.y.shape)}; "
            "a certificate bounds the error of a classifier, so give one class number per example"
        )
    for one in (config, config if posterior is None else posterior):
        check_rates(one)
    stage = _stages(model, split.prior, F.cross_entropy, seed, folder, progress)
    history = stage("dense", dense) if dense else []
    found = score(criterion, model, split.prior, seed=seed)
    mask = masks.top_k(found, sparsity=sparsity)
    attach(model, block_isotropic(model, mask, eps=eps, std=std), train_std=train_std, seed=seed)
    history += stage("prior", config, budget=Budget(sparsity))
    reestimate_batchnorm(model, split.prior)
    prior = read(model)
    history += fit_posterior(
        model,
        prior,
        split,
        config if posterior is None else posterior,
        delta=delta,
        objective=objective,
        budget=Budget(sparsity),
        out=folder,
        seed=seed,
        checkpoint=None if folder is None else Path(folder) / "posterior.pt",
        progress=progress,
    )
    certificate = certify(
        model,
        prior,
        split,
        delta=delta,
        family=family,
        grid=grid,
        method=method,
        draws=draws,
        tolerance=tolerance,
        name=name,
        progress=progress,
    )
    return Certified(model, prior, read(model), certificate, history)


@torch.no_grad()
def _start_gates_(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Gates whose coupled logit is COUPLING * log(score); keep_prob alone would not tell the smallest scores apart."""
    start = log_scores(found)
    for site in sites(model):
        site.gate.add_(COUPLING * start[site.name] - site.sampler.raw(site.mean, site.gate))


def _check(model: nn.Module, sparsity: float, criterion: str) -> None:
    """Refuses before anything is trained what would be refused after it."""
    weights.prunable(model)
    masks.check_sparsity(sparsity)
    if criterion not in NAMES:
        raise ValueError(f"criterion {criterion!r} is unknown; use one of {', '.join(NAMES)}")


def _stages(
    model: nn.Module, data: Data, loss: Loss, seed: int, folder: str | Path | None, progress: Progress | None
) -> Callable[..., History]:
    """`fit` with everything bound that the stages of one pipeline share; each stage has its own checkpoint."""
    check(model, data, loss)

    def stage(name: str, config: Config, budget: Budget | None = None) -> History:
        path = None if folder is None else Path(folder) / f"{name}.pt"
        return fit(
            model, data, config, loss=loss, budget=budget, seed=seed, stage=name, checkpoint=path, progress=progress
        )

    return stage


def _tune(model: nn.Module, data: Data, config: Config, stage: Callable[..., History]) -> History:
    """Sparse fine-tuning; without epochs, BatchNorm at least learns the statistics of the pruned network."""
    if config.epochs:
        return stage("tune", config)
    reestimate_batchnorm(model, data)
    return []
