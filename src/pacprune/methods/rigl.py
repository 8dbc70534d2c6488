"""RigL: sparse from the start, and in every layer small weights make room for those that the gradient asks for."""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.distributed import refuse_sharded
from pacprune.masking import weights
from pacprune.methods.pipeline import Pipeline, Pruned, pipeline, pruned, set_up
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress, check_name

STARTS = ("magnitude", "random")
"""What the first mask of `rigl` can follow."""


@pipeline
def rigl(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float],
    start: str = "magnitude",
    scope: str = "erk",
    exchange: float = 0.3,
    every: int = 100,
    dense: Config | None = None,
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
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        start: What the first mask keeps of every layer: the largest weights (magnitude), or any (random).
        scope: The layers' densities: higher in smaller layers (erk), the same in all (layer), or those of one ranking
            (global).
        exchange: Share of a layer's weights that is exchanged at first, such as 0.3.
        every: Steps from one exchange to the next. Many steps apart, new weights have time to grow.
        dense: How the network is trained before pruning; None prunes it as it is.
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        validation: Data whose loss is measured after every epoch. `Config.patience` goes by it where the mask stays.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
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
    check_name("start", start, STARTS)
    scope = "global" if isinstance(sparsity, Mapping) else scope
    stage, plan = set_up(locals())
    refuse_sharded(plan.prunable(model).values(), "control", "growth")
    budget = plan.budget(control="growth", ramp=0.75, every=every, exchange=exchange)
    history = (yield stage("dense", dense)) if dense else []
    weights.apply_mask(model, plan.mask(stage.scores(start, plan.prunable)))
    history += yield stage("masks", config, budget)
    return pruned(plan, stage, config, history)
