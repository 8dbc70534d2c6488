"""AC/DC: dense and sparse phases take turns, and the last one is sparse."""

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
def acdc(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    rounds: int = 5,
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
    """AC/DC (Peste et al. 2021), in place: [dense] -> dense and sparse phases in turn -> the last phase is sparse.

    A sparse phase keeps the largest weights at its start and trains these. A dense phase trains all weights, and pruned
    ones start from zero. With r rounds a phase has 1 / (2 r) of the epochs, the first one, which is dense, half of it,
    and the last one half of it more. That is the authors' schedule for CIFAR with r = 5. All phases lie on one
    learning-rate schedule.

    The optimiser begins anew with every phase. The authors set momentum to zero before dense phases only.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows.
        rounds: Sparse phases into which the epochs are cut. There are at most a third as many as epochs.
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
        >>> pruned = pp.acdc(model, (x, y), pp.Config(epochs=6), sparsity=0.9)
        >>> [row["stage"] for row in pruned.history]
        ['sparse 1', 'sparse 1', 'dense 2', 'sparse 2', 'sparse 2', 'sparse 2']
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 sparse phase must prune to the sparsity")
    stage, plan = set_up(locals(), takes_rows=True)
    history = (yield stage("dense", dense)) if dense else []
    phases, mask = _phases(config, rounds), {}
    for number, phase in enumerate(phases):
        name = f"{'sparse' if number % 2 else 'dense'} {number // 2 + 1}"
        if number % 2:
            mask = plan.magnitude_mask()
        weights.apply_mask(model, mask if number % 2 else None)
        if phase.epochs:
            history += yield stage(name, phase)
    if not config.epochs:
        stage.reestimate_batchnorm()
    return Pruned(model, mask, history, pattern)


def _phases(config: Config, rounds: int) -> list[Config]:
    """Dense, sparse, dense, ..., sparse: the parts of one budget, each with at least one epoch but for the first."""
    rounds = min(rounds, max(1, config.epochs // 3))
    ends = [0, *((2 * k + 1) * config.epochs // (4 * rounds) for k in range(2 * rounds - 1)), config.epochs]
    start, length = config.span[0], config.span[1] - config.span[0]
    cuts = [start + length * end / config.epochs if config.epochs else start for end in ends]
    cuts[-1] = config.span[1]  # rounding may go beyond
    return [
        replace(
            config,
            epochs=ends[k + 1] - ends[k],
            span=(cuts[k], cuts[k + 1]),
            warmup=_warmup(config, ends[k], ends[k + 1]),
        )
        for k in range(2 * rounds)
    ]


def _warmup(config: Config, start: int, end: int) -> float:
    """The share of a phase in which the learning rate rises: the first phase that has epochs holds all of it."""
    return min(1.0, config.warmup * config.epochs / end) if start == 0 and end else 0.0
