"""What a model is worth on data: error, Gibbs error, mean loss; and BatchNorm statistics for a mask that changed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.data.batches import batches, device_of, example_hashes, isolated_rng
from pacprune.masking import attachment, weights
from pacprune.training.population import Population
from pacprune.types import Data, Loss

BATCH = 1000


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode (hard gates, BatchNorm frozen, no dropout), no gradients, float32 without TF32; puts the mode back."""
    # Not by allow_tf32, which torch refuses to read once a user has set fp32_precision.
    cudnn: Any = torch.backends.cudnn
    kinds = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        with weights.modes_kept(model), torch.no_grad(), torch.autocast(device_of(model).type, enabled=False):
            model.eval()
            yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def mistakes(logits: Tensor, y: Tensor) -> Tensor:
    """Which predictions are wrong: argmax over the last dimension, the lowest class among equals."""
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returns a {type(logits).__name__}, but an error needs its logits; wrap it in a module that "
            "returns these alone"
        )
    if logits.shape[:-1] != y.shape or logits.shape[-1] < 2:
        raise ValueError(
            f"the model's outputs have shape {tuple(logits.shape)} and the labels {tuple(y.shape)}; an error needs one "
            "label for each row of at least 2 outputs, so reshape the labels or give the model an output per class"
        )
    return logits.argmax(dim=-1) != y


@overload
def error(model: nn.Module, data: Data) -> float: ...
@overload
def error(model: Sequence[nn.Module], data: Data) -> list[float]: ...
def error(model: nn.Module | Sequence[nn.Module], data: Data) -> float | list[float]:
    """The fraction of wrong predictions (one per label: of every token, too); of an attached model, with its draw.

    A list of models of one architecture is evaluated as a population: one call for all, and a list of errors.
    """
    if not isinstance(model, nn.Module):
        return _errors(Population(model), data)
    wrong, count, device = 0, 0, device_of(model)
    with evaluating(model), isolated_rng(device, data):
        for x, y in batches(data, BATCH, device=device):
            wrong, count = wrong + int(mistakes(model(x), y).sum()), count + y.numel()
    return wrong / count


def _errors(population: Population, data: Data) -> list[float]:
    device = device_of(population.stacked)
    wrong, count = torch.zeros(len(population), dtype=torch.int64, device=device), 0
    with evaluating(population.stacked), isolated_rng(device, data):
        for x, y in batches(data, BATCH, device=device):
            out = population.outputs(x, own=False)
            wrong += mistakes(out, y.expand(len(population), *y.shape)).flatten(1).sum(1)
            count += y.numel()
    return (wrong.double() / count).tolist()


def gibbs_error(model: nn.Module, data: Data, *, draws: int = 10) -> float:
    """The mean error of `draws` fresh hard draws of an attached model: an estimate of its Gibbs risk on this data."""
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 is needed")
    attachment.attached(model)
    return sum(error(attachment.resample_(model), data) for _ in range(draws)) / draws


def mean_loss(model: nn.Module, data: Data, *, loss: Loss = F.cross_entropy) -> float:
    """The mean loss in eval mode, every example weighted alike."""
    total, count, device = 0.0, 0, device_of(model)
    with evaluating(model), isolated_rng(device, data):
        for x, y in batches(data, BATCH, device=device):
            total, count = total + float(loss(model(x), y)) * len(x), count + len(x)
    return total / count


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, data: Data, *, batch_size: int = 256) -> nn.Module:
    """Sets BatchNorm's running statistics to the means over `data`, in place; nothing else changes.

    Statistics measured under one mask are wrong for another: call it on training data (for a certificate: on
    split.prior) after a mask has been hardened. Batches are weighted by size. An attached model takes a fresh hard draw
    for every batch. The examples are noted as seen.
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return model
    weights.mark_seen(model, example_hashes(data))
    momenta, device, seen = [norm.momentum for norm in norms], device_of(model), 0
    with weights.modes_kept(model), isolated_rng(device, data):
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        for x, _ in batches(data, batch_size, device=device):
            if len(x) == 1 and seen:  # one example has no variance
                continue
            seen += len(x)
            for norm in norms:
                norm.momentum = len(x) / seen
            if attachment.sites(model):
                attachment.resample_(model)
            model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model
