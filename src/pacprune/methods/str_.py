"""STR: weights are shrunk by thresholds that every layer learns."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pacprune.distributed import refuse_sharded
from pacprune.masking import weights
from pacprune.methods.pipeline import Pipeline, Pruned, begin_dense, pipeline, pruned, set_up
from pacprune.training.config import Config
from pacprune.training.controls import THRESHOLDS
from pacprune.types import Data, Forward, Loss, Progress


@pipeline
def str_(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float],
    ramp: float = 0.8,
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
    """STR (Kusupati et al. 2020), in place: [dense] -> train weights and their layers' thresholds -> top-k.

    The network computes with sign(w) max(0, |w| - exp(s)), and every layer learns its s by the gradient of the loss. So
    layers share the weights out among themselves. Weights below their threshold get no gradient. They come back when
    the threshold falls below them, and the mask moves to the very end.

    The paper has no means to ask for a sparsity: one is found by trying weight decays and starts of s. Here one number
    is added to all s before every step, so that exactly k weights are above their thresholds, with the density of
    `gmp` and its end at `ramp`. What layers learn is how their thresholds differ. The paper's threshold is sigmoid(s);
    a common factor of all thresholds needs exp(s).

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training. Weight decay applies to s, too, as in the paper.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        ramp: Share of the epochs in which the sparsity rises, such as 0.8. A longer one is gentler on the network.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: Whether layers share the sparsity out (global), or each has its own: the same (layer), or a higher one in
            larger layers (erk). Thresholds then follow from these.
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
        ValueError: If the sparsity cannot be met.

    Example:
        >>> pruned = pp.str_(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    stage, plan = set_up(locals())
    refuse_sharded(plan.prunable(model).values(), "control", "soft")
    budget = plan.budget(control="soft", schedule="cubic", ramp=ramp, min_per_layer=min_per_layer)
    history = (yield stage("dense", dense)) if dense else []
    begin_dense(plan)
    layers = list(plan.prunable(model).values())
    start = torch.zeros(len(layers), device=layers[0].device)  # the first step finds their common level
    weights.notes(model).learned = {THRESHOLDS: nn.Parameter(start)}
    history += yield stage("masks", config, budget)
    return pruned(plan, stage, config, history)
