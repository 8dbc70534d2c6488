"""L0 regularisation: hard-concrete gates, and a price on every gate that stays open."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pacprune import kernels
from pacprune.masking import weights
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import SpikeSlab, isotropic, top_mask
from pacprune.methods.pipeline import Pipeline, Pruned, fine_tune, pipeline, set_up, split_epochs
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress

START = 0.9
"""keep_prob of every gate at the start: nearer to 1, a gate hardly feels its penalty."""


@pipeline
def l0(
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
    """L0 regularisation with hard-concrete gates (Louizos et al. 2018), in place: [dense] -> gates -> top-k -> tuning.

    Every weight has a gate clamp(1.2 sigmoid((log alpha + logit u) / beta) - 0.1, 0, 1), beta = 2/3, above 0 with
    keep_prob. The expected number of open gates has a price, learned by dual ascent on an augmented Lagrangian. So it
    follows the same falling density as in `gmp`, with some lag. Then the k largest keep_prob stay.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule; its gate_lr is above 0.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        mask_share: Share of the epochs that trains the gates; the rest fine-tunes.
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
        seed: Seed of the data order and the gates' noise.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If config.gate_lr is None or 0, so that no gate would ever close.

    Example:
        >>> pruned = pp.l0(model, (x, y), pp.Config(epochs=2, gate_lr=1.0), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    if not config.gate_lr:
        raise ValueError(f"gate_lr is {config.gate_lr}, so the gates of L0 would stay as they are; give one above 0")
    mask_config, tune_config = split_epochs(config, mask_share)
    stage, plan = set_up(locals())
    history = (yield stage("dense", dense)) if dense else []
    start = isotropic(model, sparsity=0.0, prunable=plan.prunable)
    start = replace(start, keep_prob={name: torch.full_like(p, START) for name, p in start.keep_prob.items()})
    attach(model, start, estimator=kernels.STRETCHED, beta=2 / 3, seed=seed)
    # The gates take hundreds of steps to follow: a multiplier that outran them would close most of them for good.
    strength = _strength(start, config)
    budget = plan.budget(control="lagrangian", schedule="cubic", strength=strength, patience=1000)
    history += yield stage("masks", mask_config, budget)
    mask = top_mask(read(model), sparsity=plan.goal, min_per_layer=min_per_layer)
    harden(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(tune_config, stage)))


def _strength(slab: SpikeSlab, config: Config) -> float:
    """The Lagrangian's strength with which the density follows its schedule whatever the size of net and gate_lr.

    The penalty is on the mean of D gates, so that one gate feels a D-th of it. SGD moves a gate by gate_lr / (1 -
    momentum) times that; Adam, by how it compares with the gradient of the loss.
    """
    size = sum(p.numel() for p in slab.keep_prob.values())
    if config.optimizer != "sgd":
        return 0.01 * size
    return 5 * size * (1 - config.momentum) / float(config.gate_lr or 1.0)
