"""What is looked at before training changes anything: data, labels, weights, and settings that do not go together."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from pacprune.data import trace
from pacprune.data.batches import (
    Objective,
    batches,
    device_of,
    first_batch,
    is_pair,
    is_stream,
    isolated_rng,
    refusing_unfit,
    tensors,
)
from pacprune.data.splits import IGNORED
from pacprune.distributed import across_model, count, ranks, refuse_sharded
from pacprune.masking import weights
from pacprune.training.config import MASKS, Config
from pacprune.training.controls import refuse_carried
from pacprune.types import Data, Diverged

SHARED = (
    "epochs",
    "batch_size",
    "optimizer",
    "accumulate",
    "amp",
    "augment",
    "clip",
    "samples",
    "patience",
    "execution",
    "masks",
    "gates_scheduled",
)
"""Fields of Config that all members of a population have in common, since they take their steps together."""

_OF_ONE_MODEL = ("adamw8",)
"""Optimisers that no population has, since its tensors have a dimension more."""

_BROADCAST = "Using a target size"
"""How a warning of torch's losses begins where outputs (n, 1) and labels (n,) become n x n differences."""

_SUM = 0.02
"""How far from 1 probabilities may add up, in whatever precision."""
_ARRIVAL = 128
"""On how many examples a model is tried that pacprune has not seen before."""


def trial_pass(model: nn.Module, data: Data, objective: Objective) -> str:
    """One forward pass on two examples before anything is changed, so that a bad input is known as such at once.

    Returns the value of a loss of the user's own on that batch, to the bit: a name does not tell two losses apart.
    """
    pair, device = tensors(data), device_of(model)
    across_model(model)
    weights.refuse_lazy(model)
    refuse_carried(model)
    weights.warn_of_revived(model)
    for name, p in model.named_parameters():
        if count(~torch.isfinite(p)):
            raise Diverged(f"{name} holds NaN or infinite values before training; start from other weights")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("every parameter has requires_grad=False, so nothing would be trained; unfreeze some")
    with weights.modes_kept(model), isolated_rng(device, data, seed=0):
        model.eval()
        batch = first_batch(data, 2, device=device)
        with torch.no_grad():
            out = _outputs(model, batch, objective)
        classifies = objective.is_classification(batch)
        if classifies:
            check_labels(batch[1] if pair is None else pair[1], out)
        known = any(note.fingerprint is not None for _, note in weights.noted(model))
        if not known and objective.forward is None and is_pair(batch) and not is_stream(data):
            _note_arrival(model, data, objective)
        return "" if classifies else _number(objective, out, batch).hex()


@torch.no_grad()
def _note_arrival(model: nn.Module, data: Data, objective: Objective) -> None:
    """Notes on a model that pacprune has not changed yet whether something else has trained it on such data.

    It has, where the model errs at most a third as often as the best constant answer: no first weights do that.
    """
    wrong, labels = [], []
    for batch in batches(data, _ARRIVAL // 16, device=device_of(model), limit=_ARRIVAL):
        y = batch[1]
        if not isinstance(y, Tensor):
            return
        try:
            out = _outputs(model, batch, objective)
        except torch.OutOfMemoryError:  # training says what to do about it
            return
        if not isinstance(out, Tensor) or y.is_floating_point() or out.shape[:-1] != y.shape or out.shape[-1] < 2:
            return
        counted = y != IGNORED
        wrong.append((out.argmax(-1) != y)[counted])
        labels.append(y[counted])
    if len(torch.cat(labels)) and errs_as_trained(torch.cat(wrong), torch.cat(labels)):
        weights.mark_seen(model, trace.foreign())


def errs_as_trained(wrong: Tensor, labels: Tensor) -> bool:
    """Whether a network errs at most a third as often as the best constant answer, on enough examples to tell."""
    counts = labels.unique(return_counts=True)[1]
    constant = 1 - int(counts.max()) / int(counts.sum())
    return int(counts.sum()) >= _ARRIVAL // 2 and float(wrong.double().mean()) <= constant / 3


def loss_identity(objective: Objective, value: str) -> list[str]:
    """What tells an objective from others: its names, and the value that `trial_pass` returns of it."""
    loss, forward = objective.loss, objective.forward
    # The name alone would take one lambda, or one setting of a loss, for another.
    names = [repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", "")]
    return [*names, *([] if forward is None else [getattr(forward, "__qualname__", "")]), value]


def _outputs(model: nn.Module, batch: Any, objective: Objective) -> Any:
    x = batch[0] if is_pair(batch) and objective.forward is None else None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    try:
        with refusing_unfit(x, "the model"):
            return objective.outputs(model, batch)
    except ValueError as failure:
        if not isinstance(failure.__cause__, RuntimeError) or not isinstance(x, Tensor) or x.dtype in dtypes:
            raise
        if x.dtype == torch.uint8:
            raise ValueError(
                f"x is torch.uint8 of shape {tuple(x.shape)}, which the model does not take; give x.float() / 255 with "
                "channels first, (n, channels, height, width), or the parts of pp.data.split(x, y)"
            ) from failure.__cause__
        if not x.is_floating_point():
            raise
        raise ValueError(
            f"x is {x.dtype} but the model's parameters are {', '.join(sorted(map(str, dtypes)))}; "
            "cast the data or the model"
        ) from failure.__cause__


def _number(objective: Objective, out: Any, batch: Any) -> float:
    """The value of a loss of the user's own."""
    outputs = f"of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"that are a {type(out).__name__}"
    y = batch[1] if is_pair(batch) else None
    labels = f"labels of shape {tuple(y.shape)} ({y.dtype})" if isinstance(y, Tensor) else type(batch).__name__
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _BROADCAST)
            return float(objective.value(out, batch))
    except UserWarning as failure:
        if not str(failure).startswith(_BROADCAST):
            raise
        raise ValueError(
            f"the loss would compare every output with every label, for outputs {outputs} and {labels}; give both the "
            "same shape, by y.reshape(-1, 1), say"
        ) from failure
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as failure:
        if objective.loss is F.cross_entropy and isinstance(failure, ValueError):  # it says itself what is wrong
            raise
        reason = str(failure).partition("\n")[0]
        raise ValueError(f"the loss gave no number for outputs {outputs} and {labels}: {reason}") from failure


def check_labels(y: Tensor, out: Any) -> None:
    """Refuses what F.cross_entropy does not take: neither class numbers nor probabilities of the classes."""
    if not isinstance(out, Tensor):
        raise ValueError(f"the model returns a {type(out).__name__}; make it return its outputs alone, or give a loss=")
    if out.ndim == 2 and out.shape[1] == 1:
        raise ValueError(
            f"the model has 1 output, over which cross_entropy is 0 whatever it says, and labels are {y.dtype}; give "
            "loss=torch.nn.functional.mse_loss for regression, a binary cross-entropy for two classes, or the model an "
            "output per class"
        )
    expected = (len(y), *out.shape[2:])
    if y.is_floating_point():
        if y.shape[1:] != out.shape[1:] or out.ndim < 2:
            raise ValueError(
                f"labels are {y.dtype} of shape {tuple(y.shape)} and outputs {tuple(out.shape)}; for classes use "
                "y.long(), for regression give loss=torch.nn.functional.mse_loss"
            )
        _refuse_no_probabilities(y)
        return
    if y.shape != expected or out.ndim < 2 or y.dtype not in (torch.int64, torch.uint8):
        raise ValueError(
            f"labels are {y.dtype} of shape {tuple(y.shape)}, but cross_entropy on outputs {tuple(out.shape)} takes "
            f"int64 of shape {expected}; use y.long(), y.squeeze(1), or your own loss="
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= out.shape[1]:
        raise ValueError(
            f"labels run from {low} to {high}, but the model has {out.shape[1]} outputs "
            f"(labels 0 to {out.shape[1] - 1}); change the labels or the last layer"
        )


def _refuse_no_probabilities(y: Tensor) -> None:
    """Refuses several labels per example, of which cross_entropy would make one choice among classes."""
    wrong = int((((y.sum(1) - 1).abs() > _SUM) | (y < 0).any(1)).sum())
    if wrong:
        raise ValueError(
            f"labels are {y.dtype} of shape {tuple(y.shape)}, but {wrong} of {y.numel() // y.shape[1]} are no "
            "probabilities of classes, which add up to 1; where an example has several labels, give "
            "loss=torch.nn.functional.binary_cross_entropy_with_logits, and for regression "
            "loss=torch.nn.functional.mse_loss"
        )


def check_batches(data: Data, config: Config) -> None:
    """Refuses batches that several ranks cannot take their parts of."""
    if not isinstance(data, DataLoader):
        ranks.check_batch(config.batch_size)
        return
    if data.batch_size not in (None, config.batch_size) and "batch_size" in config.changes():
        raise ValueError(
            f"batch_size is {config.batch_size}, but the DataLoader makes batches of {data.batch_size}; leave "
            "batch_size out of the config, or give the DataLoader the same"
        )
    if data.batch_size is not None:
        ranks.check_batch(data.batch_size)
    if ranks.world() > 1 and isinstance(data.sampler, DistributedSampler):
        raise ValueError(
            f"the DataLoader has a DistributedSampler, which gives each of {ranks.world()} ranks other batches; give a "
            "plain one: all ranks read the same batch, and each takes its part"
        )


def check_shards(config: Config, params: Iterable[Tensor]) -> None:
    """Refuses what a step of a sharded model cannot do."""
    params = list(params)
    if config.samples:
        refuse_sharded(params, "samples", config.samples)
    if MASKS[config.masks].by_rank:
        refuse_sharded(params, "independent masks")
    if config.amp:
        refuse_sharded(params, "amp")
    if config.execution != "eager":
        refuse_sharded(params, "execution", config.execution)


def check_config(name: str, value: Any) -> None:
    """Refuses what is no Config where one is wanted."""
    if not isinstance(value, Config):
        raise ValueError(f"{name} is of the type {type(value).__name__}; give pp.Config(epochs=10, lr=0.1), say")


def check_rates(config: Config) -> None:
    """Refuses to train stochastic masks with learning rates that are all 0."""
    if config.epochs and not (config.lr or config.gate_lr or config.std_lr):
        raise ValueError(
            f"lr is {config.lr} and gate_lr is {config.gate_lr}, so neither weights nor gates would change; "
            "give gate_lr= to train the gates alone"
        )


def check_population(configs: Sequence[Config]) -> None:
    """Refuses configs that cannot be trained in step with each other."""
    for name in SHARED:
        values = {getattr(config, name) for config in configs}
        if len(values) > 1:
            raise ValueError(
                f"the members of a population take their steps together, but {name} is {sorted(map(str, values))}; "
                "train them in separate calls"
            )
    for name in ("samples", "patience"):
        if getattr(configs[0], name):
            raise ValueError(
                f"{name} is {getattr(configs[0], name)}, which a population has no use of; "
                f"set {name}=0, or train one by one"
            )
    if configs[0].optimizer in _OF_ONE_MODEL:
        raise ValueError(
            f"the optimizer {configs[0].optimizer!r} moves one model, but {len(configs)} are trained as a population; "
            "use 'adamw', or train one by one"
        )
    if callable(configs[0].optimizer):
        raise ValueError(
            f"the optimizer is a function, which moves one model, but {len(configs)} are trained as a population; name "
            "one, or train one by one"
        )
    if len({config.gate_lr is None for config in configs}) > 1:
        raise ValueError(
            "gate_lr is None for some members of the population and a number for others; give 0.0 to those that are "
            "not to train their gates"
        )


def in_step(first: Config, second: Config) -> bool:
    """Whether two models with these configs can be trained as one population."""
    same = all(getattr(first, name) == getattr(second, name) for name in SHARED)
    alone = first.samples or first.patience or callable(first.optimizer) or first.optimizer in _OF_ONE_MODEL
    return same and (first.gate_lr is None) == (second.gate_lr is None) and not alone
