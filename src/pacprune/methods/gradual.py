"""Gradual magnitude pruning: the smallest weights go while the network trains (GMP), and may come back (DPF)."""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.methods.pipeline import (
    Pipeline,
    Plan,
    Pruned,
    Request,
    Start,
    begin_dense,
    check_share,
    pipeline,
    pruned,
    set_up,
)
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress

RAMP = 0.8
"""The share of the steps with moving masks in which the sparsity rises."""


MASK_SHARE = 0.5
"""The share of the steps with moving masks, unless one is given."""


def gradual_budget(plan: Plan, *, feedback: bool, mask_share: float, every: int | None = None) -> Budget:
    """The largest weights of every moment, with masks that move in the first `mask_share` of the steps."""
    return plan.budget(
        control="feedback" if feedback else "magnitude",
        schedule="cubic",
        ramp=RAMP * check_share(mask_share),
        until=mask_share,
        every=every,
        min_per_layer=plan.min_per_layer,
        pattern=plan.pattern,
    )


def begin(request: Request, *, feedback: bool = False) -> Start:
    """Begins dense; the smallest weights go step by step."""
    share = MASK_SHARE if request.mask_share is None else request.mask_share
    begin_dense(request.plan)
    return Start(gradual_budget(request.plan, feedback=feedback, mask_share=share))


@pipeline
def gmp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    feedback: bool = False,
    mask_share: float = MASK_SHARE,
    every: int | None = None,
    dense: Config | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    validation: Data | None = None,
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
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
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows. The largest
            of every group are the last to go.
        feedback: Whether pruned weights are trained on and can come back: DPF.
        mask_share: Share of the steps after which the mask is final, such as 0.5; the rest fine-tunes.
        every: Steps from one mask to the next. 16 unless given; with `feedback`, 1.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        validation: Data whose loss is measured after every epoch. `Config.patience` goes by it where the mask stays.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
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
    stage, plan = set_up(locals())
    budget = gradual_budget(plan, feedback=feedback, mask_share=mask_share, every=every)
    history = (yield stage("dense", dense)) if dense else []
    begin_dense(plan)
    history += yield stage("masks", config, budget)
    return pruned(plan, stage, config, history)
