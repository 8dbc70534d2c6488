"""What a model is worth on data: error, Gibbs error, mean loss; and BatchNorm statistics for a mask that changed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pacprune.data.batches import (
    Objective,
    batches,
    device_of,
    is_pair,
    is_stream,
    isolated_rng,
    look_at,
    refusing_unfit,
    rows,
    use_of,
)
from pacprune.data.splits import IGNORED
from pacprune.masking import attachment, weights
from pacprune.training.population import Population
from pacprune.types import Data, Forward, Loss, check_module

BATCH = 1000
_STREAMED = 4096
"""On how many examples of a stream BatchNorm's statistics are measured."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode (hard gates, BatchNorm frozen, no dropout), no gradients, float32 without TF32; puts the mode back."""
    # Not by allow_tf32, which torch refuses to read once a user has set fp32_precision.
    cudnn: Any = torch.backends.cudnn
    backends = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with weights.modes_kept(model), torch.no_grad(), torch.autocast(device_of(model).type, enabled=False):
            model.eval()
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def answers(model: nn.Module, x: Tensor, state: Mapping[str, Tensor] | None = None) -> Any:
    """What a network, perhaps with another state, makes of inputs on its device.

    The network gets a copy of them: some write into their input, as one does that begins with ReLU(inplace=True).
    """
    x = x.to(device_of(model), copy=True)
    return model(x) if state is None else functional_call(model, dict(state), (x,))


def mistakes(logits: Tensor, y: Tensor) -> Tensor:
    """Which predictions are wrong: argmax over the last dimension, the lowest class among equals.

    One output per example is the logit of class 1 against class 0.
    """
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returns a {type(logits).__name__}, but an error needs its logits; wrap it in a module that "
            "returns these alone"
        )
    if _is_one_logit(logits, y):
        return _wrong_sign(logits.reshape(y.shape), y)
    if logits.shape[:-1] != y.shape or logits.shape[-1] < 2:
        raise ValueError(
            f"the model's outputs have shape {tuple(logits.shape)} and the labels {tuple(y.shape)}; an error needs one "
            "label for each row of at least 2 outputs, so reshape the labels or give the model an output per class"
        )
    return logits.argmax(dim=-1) != y


def _is_one_logit(logits: Tensor, y: Tensor) -> bool:
    """Whether the network has one output per example, whose sign is the class."""
    if logits.ndim == 1:
        return logits.shape == y.shape
    return logits.shape[-1] == 1 and y.shape in (logits.shape, logits.shape[:-1])


def _wrong_sign(logit: Tensor, y: Tensor) -> Tensor:
    """Which predictions are wrong where a logit above 0 means class 1."""
    if bool(((y != 0) & (y != 1)).any()):
        raise ValueError(
            f"the network has one output, but the labels run from {float(y.min()):g} to {float(y.max()):g}; one output "
            "tells class 0 from class 1, so give the network an output per class"
        )
    return (logit > 0) != (y > 0)


@overload
def error(model: nn.Module, data: Data, *, forward: Forward | None = None) -> float: ...
@overload
def error(model: Sequence[nn.Module], data: Data, *, forward: None = None) -> list[float]: ...
def error(model: nn.Module | Sequence[nn.Module], data: Data, *, forward: Forward | None = None) -> float | list[float]:
    """The fraction of wrong predictions, in eval mode and float32; an attached model is taken with its present draw.

    There is one prediction per label, so that of a language model every token counts whose label is not -100. The
    examples are noted as looked at: what is trained afterwards may have been chosen by them, so no held-out
    certificate on them is issued for it.

    Args:
        model: The network; or a list of networks of one architecture, which are evaluated in one call.
        data: Examples with labels, such as split.test. Of a mapping, such as transformers have, `labels` are compared
            with the `logits` of model(**batch). One output per example is the logit of class 1 against class 0. Several
            labels of 0 and 1 per example, with a logit for each, are counted one by one.
        forward: (model, batch) -> logits, for one network that is called otherwise. Labels are those of a pair (x, y),
            or `labels`, as without it.

    Returns:
        The error in [0, 1]; of a list of networks, a list of errors.

    Example:
        >>> history = pp.fit(model, split.train, pp.Config(epochs=4, lr=0.1))
        >>> pp.error(model, split.test) < 0.2
        True
    """
    if not isinstance(model, Sequence):
        check_module(model)
    models = [model] if isinstance(model, nn.Module) else model
    look_at(data, [weights.fingerprint(member) for member in models])
    for member in models:
        weights.warn_of_revived(member)
    if not isinstance(model, nn.Module):
        if forward is not None:
            raise ValueError(f"forward= calls one model, but {len(model)} are evaluated at once; evaluate one by one")
        return _errors(Population(model), data)
    wrong, count, device = 0, 0, device_of(model)
    with evaluating(model), isolated_rng(device, data):
        for batch in batches(data, BATCH, device=device):
            out, y = _logits_and_labels(model, batch, forward)
            # Where an example has several labels, with a logit for each, every label is an answer of its own.
            labelled = isinstance(out, Tensor) and y.ndim > 1 and out.shape == y.shape and y.shape[-1] > 1
            counted = y != IGNORED
            wrong += int((mistakes(out[..., None] if labelled else out, y) & counted).sum())
            count += int(counted.sum())
    return wrong / _some(count)


def _logits_and_labels(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Any, Tensor]:
    """What the network says to a batch, and what is right: (x, y), or a mapping that has `labels`."""
    with refusing_unfit(batch[0] if is_pair(batch) and forward is None else None, "the model"):
        out = Objective(forward=forward).outputs(model, batch)
    if is_pair(batch):
        return getattr(out, "logits", out), batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return getattr(out, "logits", out), batch["labels"]
    content = ", ".join(map(str, batch)) or "nothing" if isinstance(batch, Mapping) else f"{len(batch)} parts"
    raise ValueError(f"a batch has {content}, but an error needs labels; call them 'labels', or give batches (x, y)")


def _errors(population: Population, data: Data) -> list[float]:
    device = device_of(population.stacked)
    wrong, count = torch.zeros(len(population), dtype=torch.int64, device=device), 0
    with evaluating(population.stacked), isolated_rng(device, data):
        for x, y in batches(data, BATCH, device=device):
            out = population.outputs(x, separate=False)
            out = out[..., None] if out.ndim == 2 and y.ndim == 1 else out  # one logit
            counted = y != IGNORED
            wrong += (mistakes(out, y.expand(len(population), *y.shape)) & counted).flatten(1).sum(1)
            count += int(counted.sum())
    return (wrong.double() / _some(count)).tolist()


def _some(count: int) -> int:
    """The number of labels that count, once there is one."""
    if not count:
        raise ValueError(f"all labels are {IGNORED}, which does not count, so there are 0 answers; give labels")
    return count


def gibbs_error(model: nn.Module, data: Data, *, draws: int = 10, forward: Forward | None = None) -> float:
    """The mean error of fresh hard draws of an attached model: an estimate of its Gibbs risk on this data.

    Args:
        model: A network with stochastic masks; it is left with the last draw.
        data: Examples with labels, such as split.test.
        draws: How many networks to draw, such as 10.
        forward: (model, batch) -> logits, for a network that is called otherwise; see `pp.error`.

    Returns:
        The mean of the draws' errors, in [0, 1].

    Example:
        >>> history = pp.fit(model, split.train, pp.Config(epochs=4, lr=0.1))
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.5))
        >>> pp.gibbs_error(model, split.test, draws=3) > 0.1
        True
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 is needed")
    attachment.require_sites(model)
    return sum(error(attachment.resample_(model), data, forward=forward) for _ in range(draws)) / draws


def mean_loss(model: nn.Module, data: Data, *, loss: Loss = F.cross_entropy, forward: Forward | None = None) -> float:
    """The mean loss in eval mode, every example weighted alike."""
    objective = Objective(loss, forward)
    look_at(data, [weights.fingerprint(model)])
    total, count, device = 0.0, 0, device_of(model)
    with evaluating(model), isolated_rng(device, data):
        for batch in batches(data, BATCH, device=device):
            total, count = total + float(objective(model, batch)) * rows(batch), count + rows(batch)
    return total / count


@torch.no_grad()
def reestimate_batchnorm(
    model: nn.Module, data: Data, *, batch_size: int = 256, forward: Forward | None = None
) -> nn.Module:
    """Sets BatchNorm's running statistics to the means over `data`, in place; nothing else changes.

    Statistics measured under one mask are wrong for another. So call it after a mask has been hardened. The examples
    are noted as seen.

    Args:
        model: The network; one without BatchNorm is left as it is. An attached one takes a fresh hard draw per batch.
        data: Training data; for a certificate, split.prior.
        batch_size: Examples per forward pass; batches are weighted by their size.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.

    Returns:
        The same model.

    Example:
        >>> norm = torch.nn.BatchNorm1d(64)
        >>> network = pp.reestimate_batchnorm(torch.nn.Sequential(torch.nn.Flatten(), norm), split.prior)
        >>> torch.allclose(norm.running_mean, split.prior.x.flatten(1).mean(0), atol=1e-5)
        True
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    if not norms:
        return model
    with weights.changing(model):
        weights.mark_seen(model, use_of(data))
        _reestimate(model, norms, data, batch_size, Objective(forward=forward))
    return model


def _reestimate(model: nn.Module, norms: Sequence[Any], data: Data, batch_size: int, objective: Objective) -> None:
    """Each of these BatchNorms' statistics, as means over the data."""
    device, count = device_of(model), 0
    with weights.modes_kept(model), isolated_rng(device, data), _batchnorm_kept_on_error(norms):
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        for batch in batches(data, batch_size, device=device, limit=_STREAMED if is_stream(data) else None):
            size = rows(batch)
            if size == 1 and count:  # one example has no variance
                continue
            count += size
            for norm in norms:
                norm.momentum = size / count
            if attachment.sites(model):
                attachment.resample_(model)
            objective.outputs(model, batch)


@contextmanager
def _batchnorm_kept_on_error(norms: Sequence[Any]) -> Iterator[None]:
    """Puts momentum back at the end, and after an error the statistics, too."""
    momenta = [norm.momentum for norm in norms]
    before = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
    try:
        yield
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for buffer, old in zip(norm.buffers(), buffers, strict=True):
                buffer.copy_(old)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
