"""One-shot pruning: rank the weights once, keep the best, fine-tune."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.masking import masks, weights
from pacprune.masking.criteria import Criterion, score
from pacprune.methods.pipeline import (
    Pipeline,
    Pruned,
    Request,
    Start,
    check_reachable,
    check_request,
    fine_tune,
    pipeline,
    stage_maker,
)
from pacprune.training.config import Config
from pacprune.types import Data, Loss, Progress


def begin(model: nn.Module, request: Request) -> Start:
    """Prunes at once; the mask stays."""
    _prune_(model, request.scores(), request.sparsity, pattern=request.pattern, min_per_layer=request.min_per_layer)
    return Start()


def _prune_(
    model: nn.Module, scores: Mapping[str, Tensor], sparsity: float, *, pattern: str | None, **options: Any
) -> dict[str, Tensor]:
    """Keeps the best scores, in place; returns the mask."""
    wish = {"pattern": pattern} if pattern else {"sparsity": sparsity}
    mask = masks.top_k(scores, total=weights.total(model), **wish, **options)
    weights.apply_mask(model, mask)
    return mask


@pipeline
def osp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    criterion: str | Criterion = "magnitude",
    dense: Config | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
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
        sparsity: Fraction of the weights to prune, such as 0.9.
        pattern: Keep so many of every 4 weights in a row, "1:4" or "2:4"; `sparsity` follows from it.
        criterion: What ranks the weights. A name, such as "magnitude", or a function f(model, data) -> scores.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        prunable: Which weights may be pruned: model -> {name: weight}.
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
    sparsity = check_request(model, sparsity, criterion, pattern)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    check_reachable(model, sparsity, prunable, min_per_layer, pattern=pattern, scope=scope)
    history = (yield stage("dense", dense)) if dense else []
    scores = score(criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    mask = _prune_(model, scores, sparsity, pattern=pattern, scope=scope, min_per_layer=min_per_layer)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, config, stage)), pattern)
