"""RigL: sparse from the start, and in every layer small weights make room for those that the gradient asks for."""

from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.distributed import refuse_sharded
from pacprune.masking import masks, weights
from pacprune.masking.criteria import score
from pacprune.methods.pipeline import Pipeline, Pruned, check_reachable, check_request, pipeline, pruned, stage_maker
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.types import Data, Loss, Progress, check_name

STARTS = ("magnitude", "random")
"""What the first mask of `rigl` can follow."""


@pipeline
def rigl(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float,
    start: str = "magnitude",
    scope: str = "erk",
    exchange: float = 0.3,
    every: int = 100,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """RigL (Evci et al. 2020), in place: [dense] -> a sparse mask -> train, and exchange small weights for new ones.

    The number of weights in each layer never changes. Every `every` steps the smallest share a(t) of a layer's weights
    loses its place to the pruned weights with the largest |gradient| of that step, which begin at zero. The share is
    a(t) = `exchange` (1 + cos(pi t / 0.75)) / 2, and the last quarter of the steps trains a fixed mask.

    The paper starts untrained networks from a random mask (`start` "random"). Its steps with a new mask move no weight
    and it resets the momentum of new weights. Here all steps move weights, the exchange follows, and a pruned weight's
    momentum fades since it gets no gradient.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training.
        sparsity: Fraction of the weights to prune, such as 0.9.
        start: What the first mask keeps of every layer: the largest weights (magnitude), or any (random).
        scope: The layers' densities: higher in smaller layers (erk), the same in all (layer), or those of one ranking
            (global).
        exchange: Share of a layer's weights that is exchanged at first, such as 0.3.
        every: Steps from one exchange to the next. Many steps apart, new weights have time to grow.
        dense: How the network is trained before pruning; None prunes it as it is.
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        prunable: Which weights may be pruned: model -> {name: weight}.
        seed: Seed of the data order, and of a random start.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the sparsity cannot be met, or the start or the scope is unknown.

    Example:
        >>> pruned = pp.rigl(model, (x, y), pp.Config(epochs=2), sparsity=0.9, every=2)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    check_request(model, sparsity)
    refuse_sharded(prunable(model).values(), "control", "growth")
    check_name("start", start, STARTS)
    budget = Budget(sparsity, control="growth", ramp=0.75, every=every, exchange=exchange)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    check_reachable(model, sparsity, prunable, min_per_layer, scope=scope)
    history = (yield stage("dense", dense)) if dense else []
    scores = score(start, model, data, loss=loss, seed=seed, prunable=prunable)
    total = weights.total(model)
    mask = masks.top_k(scores, sparsity=sparsity, scope=scope, min_per_layer=min_per_layer, total=total)
    weights.apply_mask(model, mask)
    history += yield stage("masks", config, budget)
    return pruned(model, data, config, history)
