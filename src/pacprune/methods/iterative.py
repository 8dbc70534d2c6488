"""Iterative magnitude pruning with learning-rate rewinding."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.methods.pipeline import Pipeline, Pruned, pipeline, set_up
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress


@pipeline
def imp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    rounds: int = 3,
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
    """Iterative magnitude pruning with learning-rate rewinding (Renda et al. 2020), in place.

    Round i of r keeps the largest weights at density (1 - sparsity)^(i / r). It trains these on with the whole
    learning-rate schedule from its beginning.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training; its schedule is that of every round.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows. The largest
            of every group are the last to go.
        rounds: Rounds into which the epochs are cut. Each has at least one epoch.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer) or row of weights (row), or a higher one in
            larger layers (erk).
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
        ValueError: If there is no round, or neither a sparsity nor a pattern is given.

    Example:
        >>> pruned = pp.imp(model, (x, y), pp.Config(epochs=2), sparsity=0.9, rounds=2)
        >>> [row["stage"] for row in pruned.history]
        ['round 1', 'round 2']
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 round must prune to the sparsity")
    stage, plan = set_up(locals(), takes_rows=True)
    history = (yield stage("dense", dense)) if dense else []
    rounds, mask = min(rounds, max(1, config.epochs)), {}
    for i in range(1, rounds + 1):
        mask = plan.mask_on_the_way(i / rounds)
        weights.apply_mask(model, mask)
        epochs = i * config.epochs // rounds - (i - 1) * config.epochs // rounds
        if epochs:
            history += yield stage(f"round {i}", replace(config, epochs=epochs))
        else:
            stage.reestimate_batchnorm()
    return Pruned(model, mask, history, pattern)
