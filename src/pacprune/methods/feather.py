"""Feather's threshold: all weights are trained, and a shrinking threshold decides at every step which ones count."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pacprune import kernels
from pacprune.masking import weights
from pacprune.masking.attachment import attach, final_mask, harden, require_sites
from pacprune.masking.spikeslab import isotropic
from pacprune.methods.pipeline import Pipeline, Pruned, check_reachable, check_request, pipeline, stage_maker
from pacprune.training.budget import Budget, enforce_
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.types import Data, Loss, Progress

COUPLING = 4.0
"""How strongly a score follows log|w|: an offset that a gate has learned counts a quarter of it."""
RAMP = 0.5
"""The share of the epochs in which the sparsity rises; the mask moves on to the end."""


@torch.no_grad()
def attach_thresholded(
    model: nn.Module,
    *,
    sparsity: float,
    theta: float,
    noise: float = 0.0,
    ramp: float = RAMP,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
) -> Budget:
    """Scores of log|w| and a learned offset that begins at 0, and a threshold that they have to pass; its budget."""
    slab = isotropic(model, sparsity=0.0, prunable=prunable)
    attach(model, slab, coupling=COUPLING, estimator=kernels.THRESHOLDED, beta=1.0, theta=theta, seed=seed)
    with weights.changing(model):
        for site in require_sites(model):
            site.local_gate.zero_()
    budget = Budget(sparsity, control="threshold", schedule="cubic", ramp=ramp, sharpen=4.0, noise=noise)
    enforce_(model, budget, 1.0)  # what holds if there is not a single step
    return budget


@pipeline
def feather(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float,
    theta: float = 0.5,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Feather (Glentis Georgoulakis et al. 2023), in place: [dense] -> train all weights under a threshold -> top-k.

    The network computes with sign(w) (|w|^3 - tau^3)^(1/3) where |w| is above tau, the threshold that k weights pass,
    and with 0 elsewhere. The gradient passes to w as it is, below tau times `theta`. In the first half of the epochs
    the sparsity rises as s (1 - (1 - r)^3), r = t / 0.5, and the mask moves to the very end.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training. At 98 % sparsity and above, clip=1.0 keeps it from collapsing.
        sparsity: Fraction of the weights to prune, such as 0.9.
        theta: Share of its gradient that a weight below the threshold gets. 1 lets the mask move most.
        dense: How the network is trained before pruning; None prunes it as it is.
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number.
        prunable: Which weights may be pruned: model -> {name: weight}.
        seed: Seed of the data order.
        folder: Where checkpoints are kept, so that a broken run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the sparsity cannot be met, or theta lies outside [0, 1].

    Example:
        >>> pruned = pp.feather(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    check_request(model, sparsity)
    check_theta(theta)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    check_reachable(model, sparsity, prunable, min_per_layer)
    history = (yield stage("dense", dense)) if dense else []
    budget = attach_thresholded(model, sparsity=sparsity, theta=theta, prunable=prunable, seed=seed)
    history += yield stage("masks", replace(config, gate_lr=None), budget)
    mask = final_mask(model, sparsity=sparsity, min_per_layer=min_per_layer)
    harden(model, mask)
    if not config.epochs:  # else the network is what it was at the last step
        reestimate_batchnorm(model, data)
    return Pruned(model, mask, history)


def check_theta(theta: float) -> None:
    """Refuses a share of a gradient that is none."""
    if not 0 <= theta <= 1:
        raise ValueError(f"theta is {theta}; it is the share of its gradient that a weight gets, in [0, 1]")
