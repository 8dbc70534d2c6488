"""ProbMask: a probability for every weight, and the expected number of kept weights projected onto a budget."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import isotropic, top_mask
from pacprune.methods.pipeline import Pipeline, Pruned, fine_tune, pipeline, set_up, split_epochs
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress

HELD, RAMP = 0.16, 0.6
"""The authors' shares of the epochs that are dense, and after which the density is the final one."""
BETA = 0.5
"""The temperature of the gates."""
GATE_RATIO = 10.0
"""gate_lr / lr unless a gate_lr is given. A probability has less far to go than the logits that others train."""


def held_cubic(share: float) -> float:
    """0 while everything is kept, then 1 - (1 - r)^3."""
    return 1 - (1 - max(0.0, share - HELD / RAMP) / (1 - HELD / RAMP)) ** 3


@pipeline
def probmask(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float],
    mask_share: float = 0.5,
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
    """ProbMask (Zhou et al. 2021), in place: [dense] -> weights and probabilities -> top-k -> sparse fine-tuning.

    Every weight has a probability p of being kept, which is trained itself: w times sigmoid((logit p + logit u) / 0.5)
    with uniform u. After every step all p are projected onto those with mean d(t), as clamp(p - tau). The density d(t)
    is 1 for 16 % of the mask stage, falls along a cubic until 60 % of it, and is then the final one. All p are 1 at the
    start: which weights are large does not matter, only what their gradients say.

    The authors harden the gates by a temperature that falls from 1 to 0.03, average two draws in a step, train p by
    Adam, and take a drawn mask. Here the temperature stays, a step has one draw, p has the weights' optimiser, and the
    k likeliest weights are kept.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule. Its gate_lr is that of the
            probabilities: 10 * lr unless it is given.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        mask_share: Share of the epochs that trains the probabilities; the rest fine-tunes.
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
        seed: Seed of the data order and the masks' noise.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If config.gate_lr is None or 0, so that no probability would be learned.

    Example:
        >>> pruned = pp.probmask(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    if not config.gate_lr:
        raise ValueError(f"gate_lr is {config.gate_lr}, so that all weights stay equally likely; give one above 0")
    if "gate_lr" not in config.changes():
        config = replace(config, gate_lr=GATE_RATIO * config.lr)
    mask_config, tune_config = split_epochs(config, mask_share)
    stage, plan = set_up(locals())
    history = (yield stage("dense", dense)) if dense else []
    attach(model, isotropic(model, sparsity=0.0, prunable=plan.prunable), mapping="clamp", beta=BETA, seed=seed)
    budget = plan.budget(control="projection", schedule=held_cubic, ramp=RAMP)
    history += yield stage("masks", mask_config, budget)
    mask = top_mask(read(model), sparsity=plan.goal, min_per_layer=min_per_layer)
    harden(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(tune_config, stage)))
