"""The pruning methods that a new one has to beat, on the same budget: gradual (GMP, DPF), iterative (IMP), L0 gates.

Like osp and pft they are pipelines for one model, which `together` runs for many. `config` is the whole budget after
dense training, so that every method with the same config has trained for the same epochs.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import kernels
from pacprune.masking import masks, patterns, weights
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.criteria import magnitude
from pacprune.masking.spikeslab import SpikeSlab, isotropic, top_mask
from pacprune.methods.pipeline import (
    Pipeline,
    Pruned,
    check_request,
    fine_tune,
    magnitude_mask,
    pipeline,
    split_epochs,
    stages,
)
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.types import Data, Loss, Progress

START = 0.9
"""keep_prob of every gate of l0 at the start: nearer to 1, a gate hardly feels its penalty."""


@pipeline
def gmp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    feedback: bool = False,
    mask_share: float = 0.5,
    every: int | None = None,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Gradual magnitude pruning (Zhu & Gupta 2017), in place: [dense] -> prune while training -> sparse fine-tuning.

    In the first `mask_share` of `config` the density falls as d(t) = 1 - s (1 - (1 - r)^3), r = min(1, t / 0.8): after
    `every` so many steps (16) the largest weights stay and the others are zero for good. With `feedback` (DPF, Lin et
    al. 2020) these are zero in the network alone: its gradient trains them on, and they can come back until it is over;
    the mask then moves at every step.
    With a `pattern`, "2:4" or "1:4", the largest of every group of weights are the last to go.
    """
    sparsity = check_request(model, sparsity, pattern=pattern)
    mask = magnitude_mask(model, sparsity, prunable, min_per_layer, pattern=pattern)
    if pattern is not None:
        sparsity = masks.sparsity(mask, total=weights.total(model))  # `prunable` may leave some of these out
    budget = Budget(
        sparsity,
        control="feedback" if feedback else "magnitude",
        schedule="cubic",
        every=every,
        min_per_layer=min_per_layer,
        pattern=pattern,
    )
    first, second = split_epochs(config, mask_share)
    stage = stages(model, data, loss, seed, folder, progress)
    history = (yield stage("dense", dense)) if dense else []
    weights.apply_mask(model, {name: torch.ones_like(w, dtype=torch.bool) for name, w in prunable(model).items()})
    history += yield stage("masks", first, budget)
    mask = _largest(model, sparsity, prunable, min_per_layer, pattern)
    weights.apply_mask(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, second, stage)), pattern)


@pipeline
def imp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    rounds: int = 3,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Iterative magnitude pruning with learning-rate rewinding (Renda et al. 2020), in place.

    The epochs of `config` are cut into equal rounds, of at least one epoch each. Round i of r keeps the largest weights
    at density (1 - sparsity)^(i / r) and trains these on with the whole learning-rate schedule from its beginning. With
    a `pattern`, "2:4" or "1:4", the largest of every group of weights are the last to go.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 round must prune to the sparsity")
    sparsity = check_request(model, sparsity, pattern=pattern)
    stage = stages(model, data, loss, seed, folder, progress)
    mask = magnitude_mask(model, sparsity, prunable, min_per_layer, pattern=pattern)
    if pattern is not None:
        sparsity = masks.sparsity(mask, total=weights.total(model))
    history = (yield stage("dense", dense)) if dense else []
    rounds = min(rounds, max(1, config.epochs))
    for i in range(1, rounds + 1):
        pruned = sparsity if i == rounds else 1 - (1 - sparsity) ** (i / rounds)
        mask = _largest(model, pruned, prunable, min_per_layer, pattern)
        weights.apply_mask(model, mask)
        epochs = i * config.epochs // rounds - (i - 1) * config.epochs // rounds
        if epochs:
            history += yield stage(f"round {i}", replace(config, epochs=epochs))
        else:
            reestimate_batchnorm(model, data)
    return Pruned(model, mask, history, pattern)


@pipeline
def l0(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float,
    mask_share: float = 0.5,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """L0 regularisation with hard-concrete gates (Louizos et al. 2018), in place: [dense] -> gates -> top-k -> tuning.

    Every weight has a gate clamp(1.2 sigmoid((log alpha + logit u) / beta) - 0.1, 0, 1), beta = 2/3, above 0 with
    keep_prob. The expected number of open gates has a price, learned by dual ascent on an augmented Lagrangian, so that
    it follows the same falling density as in `gmp`, with some lag; then the k largest keep_prob stay.
    """
    check_request(model, sparsity)
    if not config.gate_lr:
        raise ValueError(f"gate_lr is {config.gate_lr}, so the gates of L0 would stay as they are; give one above 0")
    first, second = split_epochs(config, mask_share)
    stage = stages(model, data, loss, seed, folder, progress)
    magnitude_mask(model, sparsity, prunable, min_per_layer)
    history = (yield stage("dense", dense)) if dense else []
    start = isotropic(model, sparsity=0.0, prunable=prunable)
    start = replace(start, keep_prob={name: torch.full_like(p, START) for name, p in start.keep_prob.items()})
    attach(model, start, estimator=kernels.STRETCHED, beta=2 / 3, seed=seed)
    # The gates take hundreds of steps to follow: a multiplier that outran them would close most of them for good.
    strength = _strength(start, config)
    budget = Budget(sparsity, control="lagrangian", schedule="cubic", strength=strength, patience=1000)
    history += yield stage("masks", first, budget)
    mask = top_mask(read(model), sparsity=sparsity, min_per_layer=min_per_layer)
    harden(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, second, stage)))


def _largest(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, pattern: str | None
) -> dict[str, Tensor]:
    """The mask of the largest weights; with a pattern, at a lower sparsity than its own, of more than it keeps."""
    if pattern is None:
        return magnitude_mask(model, sparsity, prunable, min_per_layer)
    found = patterns.first(magnitude(model, prunable=prunable), pattern)
    return masks.top_k(found, sparsity=sparsity, total=weights.total(model))


def _strength(slab: SpikeSlab, config: Config) -> float:
    """The Lagrangian's strength with which the density follows its schedule whatever the size of net and gate_lr.

    The penalty is on the mean of D gates, so that one gate feels a D-th of it. SGD moves a gate by gate_lr / (1 -
    momentum) times that; Adam, by how it compares with the gradient of the loss.
    """
    size = sum(p.numel() for p in slab.keep_prob.values())
    if config.optimizer != "sgd":
        return 0.01 * size
    return 5 * size * (1 - config.momentum) / float(config.gate_lr or 1.0)
