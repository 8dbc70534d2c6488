"""Feather's threshold: all weights are trained, and a shrinking threshold decides at every step which ones count."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from pacprune.masking import weights
from pacprune.methods.pipeline import Pipeline, Plan, Pruned, Request, Start, begin_dense, pipeline, pruned, set_up
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress

RAMP = 0.5
"""The share of the steps in which the sparsity rises; the mask moves on to the end."""


def threshold_budget(plan: Plan, **options: object) -> Budget:
    """Feather's threshold, which rises with the sparsity."""
    control = {"control": "threshold", "schedule": "cubic", "ramp": RAMP, "sharpen": 4.0}
    return plan.budget(**{**control, "min_per_layer": plan.min_per_layer, "pattern": plan.pattern, **options})


def begin(request: Request) -> Start:
    """Begins dense, under a threshold that rises."""
    begin_dense(request.plan)
    return Start(threshold_budget(request.plan))


@pipeline
def feather(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    theta: float = 0.5,
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
    """Feather (Glentis Georgoulakis et al. 2023), in place: [dense] -> train all weights under a threshold -> top-k.

    The network computes with sign(w) (|w|^3 - tau^3)^(1/3) where |w| is above tau, the threshold that k weights pass,
    and with 0 elsewhere. The gradient passes to w as it is, below tau times `theta`. In the first half of the epochs
    the sparsity rises as s (1 - (1 - r)^3), r = t / 0.5, and the mask moves to the very end.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training. At 98 % sparsity and above, clip=1.0 keeps it from collapsing.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows. A weight then
            is shrunk by the largest one of its group that is pruned.
        theta: Share of its gradient that a weight below the threshold gets. 1 lets the mask move most.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        validation: Data whose loss is measured after every epoch. `Config.patience` goes by it where the mask stays.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
        seed: Seed of the data order.
        folder: Where checkpoints are kept, so that a broken run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the sparsity cannot be met, or theta lies outside [0, 1].

    Example:
        >>> pruned = pp.feather(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    stage, plan = set_up(locals())
    budget = threshold_budget(plan, theta=theta)
    history = (yield stage("dense", dense)) if dense else []
    begin_dense(plan)
    history += yield stage("masks", replace(config, gate_lr=None), budget)
    return pruned(plan, stage, config, history)
