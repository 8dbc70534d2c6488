"""What a model is worth on data: error, Gibbs error, mean loss; and BatchNorm statistics for a mask that changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import layers, weights
from pacprune.batches import Data, batches, device_of, rows, size
from pacprune.scores import Loss

BATCH = 1000


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode (hard gates, BatchNorm frozen, no dropout), no gradients, float32 without TF32; puts the mode back."""
    modes = {module: module.training for module in model.modules()}
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device_of(model).type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        for module, mode in modes.items():
            module.training = mode


def mistakes(logits: Tensor, y: Tensor) -> Tensor:
    """Which predictions are wrong: argmax over the last dimension, the lowest class among equals."""
    return logits.argmax(dim=-1) != y


def error(model: nn.Module, data: Data) -> float:
    """The fraction of wrong predictions; of an attached model, with its present draw."""
    with evaluating(model):
        wrong = sum(int(mistakes(model(x), y).sum()) for x, y in batches(data, BATCH, device=device_of(model)))
    return wrong / size(data)


def gibbs_error(model: nn.Module, data: Data, *, draws: int = 10) -> float:
    """The mean error of `draws` fresh hard draws of an attached model: an estimate of its Gibbs risk on this data."""
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 is needed")
    layers.attached(model)
    return sum(error(layers.resample_(model), data) for _ in range(draws)) / draws


def mean_loss(model: nn.Module, data: Data, *, loss: Loss = F.cross_entropy) -> float:
    """The mean loss in eval mode, every example weighted alike."""
    with evaluating(model):
        total = sum(float(loss(model(x), y)) * len(x) for x, y in batches(data, BATCH, device=device_of(model)))
    return total / size(data)


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, data: Data, *, batch_size: int = 256) -> nn.Module:
    """Sets BatchNorm's running statistics to the means over `data`, in place; nothing else changes.

    Statistics measured under one mask are wrong for another: call it on training data (for a certificate: on
    split.prior) after a mask has been hardened. An attached model
    takes a fresh hard draw for every batch. The examples are noted as seen.
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return model
    weights.mark_seen(model, rows(data))
    modes, momenta = {module: module.training for module in model.modules()}, [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    for x, _ in batches(data, batch_size, device=device_of(model)):
        if layers.sites(model):
            layers.resample_(model)
        if len(x) > 1:
            model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, mode in modes.items():
        module.training = mode
    return model
