"""What is trained together, one model or a population, and what is looked at before anything is changed."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.data.batches import batches, device_of, isolated_rng, tensors
from pacprune.distributed import across_model, count, ranks, refuse_sharded
from pacprune.masking import weights
from pacprune.training.config import Config
from pacprune.training.evaluate import mean_loss
from pacprune.training.loop import check_population, loop
from pacprune.training.population import Population, compile_always, members, per_member
from pacprune.training.step import Stage, orders
from pacprune.types import Data, History, Loss


class Crew:
    """What is trained together: one model, or the members of a population behind one stacked model."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], config: Any, seed: Any) -> None:
        self.models = members(model)
        self.configs: list[Config] = per_member("config", config, len(self.models))
        self.seeds: list[int] = per_member("seed", seed, len(self.models))
        if not self.models:
            raise ValueError("a population needs at least one model, but the list is empty")
        self.device = device_of(self.models[0])
        self.population: Population | None = None
        self._alone = isinstance(model, nn.Module)
        if not self._alone:
            check_population(self.configs)
            for one in self.models:
                across_model(one)
                refuse_sharded(one.parameters(), "population")

    def check(self, data: Data, loss: Loss) -> str:
        """`check` of every model; then the members are stacked, since one may take its shape from the data."""
        found = [check(model, data, loss) for model in self.models]
        _check_shards(self.configs[0], list(self.models[0].parameters()))
        if not self._alone:
            try:
                self.population = Population(self.models)
            except torch.OutOfMemoryError as failure:
                raise ValueError(
                    f"{len(self.models)} models do not fit into the memory of {self.device}; give fewer at once"
                ) from failure
            if self.configs[0].execution == "compiled":
                self.population.compile()
        return found[0]

    @property
    def trained(self) -> nn.Module:
        """The module whose parameters move."""
        return self.models[0] if self.population is None else self.population.stacked

    def mark_seen(self, parts: Iterable[Tensor]) -> None:
        """Notes the examples on every member."""
        for known in parts:
            weights.mark_seen(self.models, known)

    def objective(self, loss: Loss, look: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """(x, y) -> the loss of the model, or of every member."""
        whole = math.ceil(self.configs[0].batch_size / self.configs[0].accumulate) // ranks.world()
        if self.population is not None:
            crew, own = self.population, len(orders(self.configs, self.seeds)) > 1
            return lambda x, y: crew.losses(loss, x, y, separate=own, fuse=y.shape[1 if own else 0] == whole)
        model = self.models[0]
        compiled = compile_always(model) if self.configs[0].execution == "compiled" else model

        def objective(x: Tensor, y: Tensor) -> Tensor:
            try:
                out = (compiled if len(x) == whole else model)(x)
            except ValueError as failure:
                if len(x) > 1:
                    raise
                raise ValueError(
                    "a batch holds 1 example, of which BatchNorm has no variance; give the DataLoader drop_last=True, "
                    "or batches of 2 or more"
                ) from failure
            if look:
                _check_labels(y, out)
            return loss(out, y)

        return objective

    def mean_losses(self, data: Data, loss: Loss) -> list[float]:
        """The mean loss of every member on other data."""
        if self.population is not None:
            self.population.write_back()
        return [mean_loss(model, data, loss=loss) for model in self.models]

    def train(self, data: Data, run: Stage, halves: Callable[[slice, str], History], **options: Any) -> History:
        """The loop, and what it leaves in the members; rows of a population name their member.

        Where the device's memory does not hold all members, `halves` trains those of a slice by themselves; its second
        argument is what to add to the checkpoint's name.
        """
        # A validation writes into the members, and halves have to begin where all of them began.
        start = [copy.deepcopy(one.state_dict()) for one in self.models] if run.validate and self.population else []
        try:
            histories = loop(self.trained, data, self.configs, run, seeds=self.seeds, **options)
        except torch.OutOfMemoryError as failure:
            if len(self.models) == 1 or ranks.world() > 1:  # the other ranks may have memory left
                size = self.configs[0].batch_size
                raise ValueError(
                    f"a batch of {size} does not fit into the memory of {self.device}; "
                    f"use accumulate={2 * self.configs[0].accumulate}, amp=True, or a smaller batch_size"
                ) from failure
            histories = None  # goes on below: the failure holds on to the memory while it is handled
        if histories is None:
            for one, state in zip(self.models, start, strict=False):
                one.load_state_dict(state)
            return self._in_halves(halves)
        if self.population is None:
            return histories[0]
        self.population.write_back()
        return [{**row, "member": k} for rows in zip(*histories, strict=True) for k, row in enumerate(rows)]

    def _in_halves(self, halves: Callable[[slice, str], History]) -> History:
        count, half = len(self.models), len(self.models) // 2
        warnings.warn(
            f"{count} models at once do not fit into the memory of {self.device}; they are trained {count - half} at "
            "a time, with the same outcome",
            stacklevel=4,
        )
        if self.population is not None:
            stacked = self.population.stacked
            for tensor in (*stacked.parameters(), *stacked.buffers()):  # others hold on to them, but not to the memory
                tensor.data, tensor.grad = tensor.data.new_empty(0), None
        self.population = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = halves(slice(0, half), ".a"), halves(slice(half, count), ".b")
        return first + [{**row, "member": row["member"] + half} for row in second]


def _check_shards(config: Config, params: Sequence[Tensor]) -> None:
    """Refuses what a step of a sharded model cannot do."""
    if config.samples:
        refuse_sharded(params, "samples", config.samples)
    if config.masks == "independent":
        refuse_sharded(params, "independent masks")
    if config.amp:
        refuse_sharded(params, "amp")
    if config.execution != "eager":
        refuse_sharded(params, "execution", config.execution)


def check(model: nn.Module, data: Data, loss: Loss) -> str:
    """One forward pass before anything is changed: shapes, labels and weights are told apart from bad luck later.

    Returns the value of a loss of the user's own on that batch, to the bit: a name does not tell two losses apart.
    """
    pair, device = tensors(data), device_of(model)
    across_model(model)
    for name, p in model.named_parameters():
        if count(~torch.isfinite(p)):
            raise ValueError(f"{name} holds NaN or infinite values before training; start from other weights")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("every parameter has requires_grad=False, so nothing would be trained; unfreeze some")
    with weights.modes_kept(model), isolated_rng(device, data, seed=0):
        model.eval()
        x, y = next(batches(data, 2, device=device, limit=2))
        with torch.no_grad():
            out = _outputs(model, x)
        if loss is F.cross_entropy:
            _check_labels(y if pair is None else pair[1], out)
            return ""
        try:
            return float(loss(out, y)).hex()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as failure:
            shape = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            reason = str(failure).partition("\n")[0]
            raise ValueError(
                f"the loss gave no number for outputs of shape {shape} and labels of shape {tuple(y.shape)} "
                f"({y.dtype}): {reason}"
            ) from failure


def _outputs(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except RuntimeError as failure:
        own = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if not x.is_floating_point() or x.dtype in own:
            raise
        raise ValueError(
            f"x is {x.dtype} but the model's parameters are {', '.join(sorted(map(str, own)))}; "
            "cast the data or the model"
        ) from failure


def _check_labels(y: Tensor, out: Any) -> None:
    """What F.cross_entropy takes: class numbers, or probabilities of the classes."""
    if not isinstance(out, Tensor):
        raise ValueError(f"the model returns a {type(out).__name__}; make it return its outputs alone, or give a loss=")
    expected = (len(y), *out.shape[2:])
    if y.is_floating_point():
        if y.shape[1:] != out.shape[1:] or out.ndim < 2:
            raise ValueError(
                f"labels are {y.dtype} of shape {tuple(y.shape)} and outputs {tuple(out.shape)}; for classes use "
                "y.long(), for regression give loss=torch.nn.functional.mse_loss"
            )
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
