"""One-shot pruning: rank the weights once, keep the best, fine-tune."""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.masking.criteria import Criterion
from pacprune.methods.pipeline import Pipeline, Pruned, Request, Start, fine_tune, pipeline, set_up
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress


def begin(request: Request) -> Start:
    """Prunes at once; the mask stays."""
    weights.apply_mask(request.plan.model, request.plan.mask(request.scores()))
    return Start()


@pipeline
def osp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    criterion: str | Criterion = "magnitude",
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
    """One-shot pruning, in place: [dense] -> scores -> top-k -> sparse fine-tuning.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: How the pruned network is fine-tuned; 0 epochs leave the weights as they are.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows.
        criterion: What ranks the weights. A name, such as "magnitude", or a function f(model, data) -> scores.
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
        seed: Seed of the data order, and of random scores.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If neither a sparsity nor a pattern is given, or the two disagree.

    Example:
        >>> pruned = pp.osp(model, (x, y), pp.Config(epochs=1), sparsity=0.9, criterion="snip")
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    stage, plan = set_up(locals(), takes_rows=True)
    history = (yield stage("dense", dense)) if dense else []
    mask = plan.mask(stage.scores(criterion, plan.prunable))
    weights.apply_mask(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(config, stage)), pattern)
