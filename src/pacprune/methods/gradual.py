"""Gradual magnitude pruning: the smallest weights go while the network trains (GMP), and may come back (DPF)."""

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
    check_share,
    pipeline,
    pruned,
    reachable_sparsity,
    stage_maker,
)
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.types import Data, Loss, Progress

RAMP = 0.8
"""The share of the steps with moving masks in which the sparsity rises."""


MASK_SHARE = 0.5
"""The share of the steps with moving masks, unless one is given."""


def gradual_budget(sparsity: float, *, feedback: bool, mask_share: float, **options: object) -> Budget:
    """The largest weights of every moment, with masks that move in the first `mask_share` of the steps."""
    control, ramp = "feedback" if feedback else "magnitude", RAMP * check_share(mask_share)
    return Budget(sparsity, **{"control": control, "schedule": "cubic", "ramp": ramp, "until": mask_share, **options})


def begin(model: nn.Module, request: Request, *, feedback: bool = False) -> Start:
    """Begins dense; the smallest weights go step by step."""
    share = MASK_SHARE if request.mask_share is None else request.mask_share
    shape = {"min_per_layer": request.min_per_layer, "pattern": request.pattern}
    budget = gradual_budget(request.sparsity, feedback=feedback, mask_share=share, **shape)
    begin_dense(model, request.prunable)
    return Start(budget)


@pipeline
def gmp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    feedback: bool = False,
    mask_share: float = MASK_SHARE,
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

    In 80 % of the first `mask_share` of the steps the density falls as 1 - s (1 - (1 - r)^3), with r from 0 to 1. At
    every new mask the largest weights stay and the others are zero for good. With `feedback` (DPF, Lin et al. 2020)
    these are zero in the network alone: its gradient trains them on, and they can come back until the mask is final.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule.
        sparsity: Fraction of the weights to prune, such as 0.9.
        pattern: Keep so many of every 4 weights in a row, "1:4" or "2:4"; `sparsity` follows from it. The largest of
            every group are the last to go.
        feedback: Whether pruned weights are trained on and can come back: DPF.
        mask_share: Share of the steps after which the mask is final, such as 0.5; the rest fine-tunes.
        every: Steps from one mask to the next. 16 unless given; with `feedback`, 1.
        dense: How the network is trained before pruning; None prunes it as it is.
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        prunable: Which weights may be pruned: model -> {name: weight}.
        seed: Seed of the data order.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If neither a sparsity nor a pattern is given, or the two disagree.

    Example:
        >>> pruned = pp.gmp(model, (x, y), pp.Config(epochs=2), sparsity=0.9, feedback=True)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    sparsity = check_request(model, sparsity, pattern=pattern)
    sparsity = reachable_sparsity(model, sparsity, prunable, min_per_layer, pattern)
    shape = {"min_per_layer": min_per_layer, "pattern": pattern}
    budget = gradual_budget(sparsity, feedback=feedback, mask_share=mask_share, every=every, **shape)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    history = (yield stage("dense", dense)) if dense else []
    begin_dense(model, prunable)
    history += yield stage("masks", config, budget)
    return pruned(model, data, config, history, pattern)
