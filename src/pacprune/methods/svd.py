"""Sparse variational dropout: weights learn how much noise they stand, and the noisiest for their size are pruned."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pacprune import kernels
from pacprune.data import trace
from pacprune.data.batches import is_stream, per_epoch, size
from pacprune.distributed import refuse_sharded
from pacprune.masking import masks, weights
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import isotropic, log_alpha
from pacprune.methods.pipeline import Pipeline, Pruned, fine_tune, pipeline, set_up, split_epochs
from pacprune.training.config import Config
from pacprune.types import Data, Forward, Loss, Progress

WARM_UP = 0.1
"""The share of the steps in which the price of the KL rises: the authors' 20 of 200 epochs."""

REACH = 2.0
"""How far log s can go in the mask stage at a constant learning rate, unless a std_lr is given."""


@pipeline
def svd(
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
    """Sparse variational dropout (Molchanov et al. 2017), in place: [dense] -> noise -> top-k -> sparse fine-tuning.

    Every weight is drawn from N(m, s^2). The loss trains m and log s, and so does the KL divergence from a log-uniform
    prior, which costs 1 / n with n examples. Its price rises from 0 in the first 10 % of the mask stage's steps. The KL
    falls with alpha = s^2 / m^2: weights that the loss does not need become small or noisy. Then the k weights with the
    smallest log alpha stay, as m. The authors keep all below log alpha = 3, so that no sparsity can be asked for.

    The authors draw the outputs of layers, once for every example. Here a step draws all weights once. It serves every
    kind of layer, and is the draw that populations and CUDA graphs have for other methods, but its gradients vary more.
    Nor are weights above log alpha = 3 zero in training.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule. Its std_lr is that of log s,
            which Adam moves whatever moves the weights: 2 / steps of the mask stage unless it is given.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        mask_share: Share of the epochs that trains the weights with noise; the rest fine-tunes.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> the mean loss of a batch, in nats for a KL of this price. That it reads no other data
            than these is the issuer's word.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        validation: Data whose loss is measured after every epoch. `Config.patience` goes by it where the mask stays.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
        seed: Seed of the data order and the weights' noise.
        folder: Where checkpoints are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the sparsity cannot be met.

    Example:
        >>> pruned = pp.svd(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> sum(int(keep.sum()) for keep in pruned.mask.values())
        118
    """
    mask_config, tune_config = split_epochs(config, mask_share)
    stage, plan = set_up(locals())
    refuse_sharded(plan.prunable(model).values(), "std")
    history = (yield stage("dense", dense)) if dense else []
    steps = per_epoch(data, config.batch_size, config.steps_per_epoch)
    examples = steps * config.batch_size if is_stream(data) else size(data)
    # By this width the KL has curvature 1 at m = 0, so that SGD is stable also with few examples.
    start = isotropic(model, sparsity=0.0, std=examples**-0.5, prunable=plan.prunable)
    attach(model, start, estimator=kernels.NOISELESS, train_std=True, seed=seed)
    steps = max(1, steps * mask_config.epochs)
    budget = plan.budget(control="variational", strength=1 / examples, patience=max(1.0, WARM_UP * steps))
    std_lr = REACH / steps if config.std_lr is None else config.std_lr
    # The gates stay open: what is pruned shows in the noise.
    history += yield stage("masks", replace(mask_config, gate_lr=None, std_lr=std_lr), budget)
    slab = read(model)
    scores = {name: -log_alpha(mean, torch.log(slab.std[name])) for name, mean in slab.mean.items()}
    mask = masks.top_k(scores, sparsity=plan.goal, min_per_layer=min_per_layer, total=slab.total)
    trace.note(mask, slab.origin.without(trace.UNTRAINED))
    harden(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(tune_config, stage)))
