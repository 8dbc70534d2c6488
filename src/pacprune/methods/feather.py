"""Feather's threshold: all weights are trained, and a shrinking threshold decides at every step which ones count."""

from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.methods.pipeline import (
    Pipeline,
    Pruned,
    Request,
    Start,
    begin_dense,
    check_request,
    pipeline,
    pruned,
    reachable_sparsity,
    stage_maker,
)
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.types import Data, Loss, Progress

RAMP = 0.5
"""The share of the steps in which the sparsity rises; the mask moves on to the end."""


def threshold_budget(sparsity: float, **options: object) -> Budget:
    """Feather's threshold, which rises with the sparsity."""
    return Budget(sparsity, **{"control": "threshold", "schedule": "cubic", "ramp": RAMP, "sharpen": 4.0, **options})


def begin(model: nn.Module, request: Request) -> Start:
    """Begins dense, under a threshold that rises."""
    begin_dense(model, request.prunable)
    return Start(threshold_budget(request.sparsity, min_per_layer=request.min_per_layer, pattern=request.pattern))


@pipeline
def feather(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
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
        pattern: Keep so many of every 4 weights in a row, "1:4" or "2:4"; `sparsity` follows from it. A weight then is
            shrunk by the largest one of its group that is pruned.
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
    sparsity = check_request(model, sparsity, pattern=pattern)
    sparsity = reachable_sparsity(model, sparsity, prunable, min_per_layer, pattern)
    budget = threshold_budget(sparsity, theta=theta, min_per_layer=min_per_layer, pattern=pattern)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    history = (yield stage("dense", dense)) if dense else []
    begin_dense(model, prunable)
    history += yield stage("masks", replace(config, gate_lr=None), budget)
    return pruned(model, data, config, history, pattern)
