"""`fit`: training a model, or a population, in whatever state it is."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.data.batches import (
    Objective,
    device_of,
    example_hashes,
    label_hashes,
    reading_once,
    rows,
    tensors,
    train_on,
    use_of,
)
from pacprune.distributed import across_model, ranks, refuse_sharded
from pacprune.files import digest
from pacprune.masking import weights
from pacprune.training.budget import Budget, check_budgets, std_optimizer
from pacprune.training.checks import (
    check_config,
    check_labels,
    check_population,
    check_shards,
    loss_identity,
    trial_pass,
)
from pacprune.training.config import EXECUTIONS, Config
from pacprune.training.controls import Stepper
from pacprune.training.evaluate import mean_loss
from pacprune.training.loop import Loop, groups
from pacprune.training.population import Population, compile_always, members, per_member
from pacprune.training.step import Stage, orders
from pacprune.types import Data, Forward, History, Loss, Progress

TrainSlice = Callable[[slice, str], History]
"""Trains the members of a slice by themselves; the second argument is what to add to the checkpoint's name."""


@reading_once()
def fit(
    model: nn.Module | Sequence[nn.Module],
    data: Data,
    config: Config | Sequence[Config],
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    budget: Budget | Sequence[Budget] | None = None,
    validation: Data | None = None,
    seed: int | Sequence[int] = 0,
    stage: str = "fit",
    checkpoint: str | Path | None = None,
    every: int | None = None,
    progress: Progress | None = None,
) -> History:
    """Trains the model in the state it is in: dense, attached (means and gates), or masked (zeros stay zero).

    A run is a function of (model, data, config, seed): the order of the data, the draws and dropout follow from them.
    torch's global random state and a DataLoader's own generators are left as they were. The examples of `data` and of
    `validation` are noted as seen. The model is left in eval mode.

    Args:
        model: The network, trained in place; or a list of networks of one architecture, trained as a population.
        data: What to train on: (x, y) tensors or arrays, a part of a split, a Dataset or a DataLoader. A batch is a
            pair (x, y), or a mapping, such as {"input_ids": ..., "labels": ...}, with which model(**batch) is called.
            A stream (IterableDataset) needs `Config.steps_per_epoch`.
        config: How to train: epochs, learning rates, optimiser and more.
        loss: (outputs, labels) -> the mean loss of a batch (x, y). Of a mapping, and with a `forward`, it is called as
            (output, batch), and without one it is the output's own `loss`. That it reads no other data, such as a
            teacher's answers or the bound set, is the issuer's word.
        forward: (model, batch) -> output, for batches of any other form; None calls the model as said above. That it
            reads no other data is the issuer's word, too.
        budget: Which sparsity to hold during training, and by what means; None holds none.
        validation: Data whose loss is measured after every epoch, and which `Config.patience` goes by.
        seed: What the order of the data, augmentation and dropout follow from.
        stage: A name for rows, progress and messages, such as "dense".
        checkpoint: A file that is written after every epoch. A second call with the same arguments goes on from it.
        every: Writes the checkpoint after so many steps, too.
        progress: Called after every step and epoch with (stage, steps done, steps in all, the last epoch's row). What
            it evaluates on counts as seen, and weights that it changes as made by something else.

    Returns:
        One row per epoch: stage, epoch, loss, lr, and where they apply validation_loss, sparsity (of a mask) or
        expected_sparsity (of gates). The rows of a population name their member, too.

    Raises:
        ValueError: If data, labels, weights and config do not fit together (nothing has changed then), or if the loss
            is no longer finite.

    Example:
        >>> history = pp.fit(model, (x, y), pp.Config(epochs=2, lr=0.1))
        >>> [row["epoch"] for row in history]
        [1, 2]
        >>> history[1]["loss"] < history[0]["loss"]
        True
        >>> targets = torch.nn.functional.one_hot(y, 10).float()
        >>> history = pp.fit(model, (x, targets), pp.Config(epochs=1), loss=torch.nn.functional.mse_loss)
        >>> images = torch.utils.data.DataLoader([{"image": image, "label": label} for image, label in zip(x, y)], 64)
        >>> def forward(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        >>> history = pp.fit(model, images, pp.Config(epochs=1), forward=forward)

    Populations. K models of one architecture are trained in one call of every layer. config, budget and seed are then
    one for all, or a list of one each. A member ends as it would alone, up to rounding; only dropout draws differently.

    torchrun. Under it (see `ranks.joined`) all ranks call `fit` with the same arguments, and each takes its part of
    every batch of config.batch_size. Of a Dataset or a DataLoader every rank reads all. All ranks end with the same
    weights, up to rounding those of one process. BatchNorm (not SyncBatchNorm) sees the examples of its rank alone; its
    running statistics are averaged after every epoch and at every checkpoint. Dropout draws the same on all ranks. Rank
    0 writes the checkpoint, which any number of ranks can go on from, and measures `validation`. `progress` is called
    on every rank.

    Shards. A model that torch.distributed.fsdp.fully_shard has cut (its parts, then itself, before `attach`) is trained
    in shards: every rank keeps, draws and moves its rows alone, and writes its own part of the checkpoint.
    """
    cohort = Cohort(model, config, seed)
    objective = Objective(loss, forward)
    loss_value = cohort.try_out(data, objective)
    cohort.stack()
    budgets = cohort.budgets(budget)
    seen = {"data": example_hashes(data), **({} if validation is None else {"validation": example_hashes(validation)})}
    cohort.mark_seen(data, *([] if validation is None else [validation]))
    # `try_out` saw the labels of tensors only; on an accelerator, looking at every batch would cost a stop.
    check_each = tensors(data) is None and cohort.device.type == "cpu"
    stepper = cohort.stepper(budgets)
    definition = Stage(
        name=stage,
        objective=cohort.objective(objective, check_each=check_each),
        groups=groups(cohort.trained, cohort.configs, rest=True, std_optimizer=std_optimizer(budgets))
        + stepper.groups(cohort.configs),
        set_modes=cohort.trained.train,
        budgets=budgets,
        stepper=stepper,
        validate=None if validation is None else lambda: cohort.mean_losses(validation, objective),
        identity={
            "budget": None if budgets is None else [entry.record() for entry in budgets],
            "loss": loss_identity(objective, loss_value),
            "seen": digest(seen),
            "labels": [digest({"y": label_hashes(part)}) for part in (data, validation) if part is not None],
        },
        members=cohort.population is not None,
    )

    train_slice = cohort.slices(
        fit,
        checkpoint,
        members={"budget": budgets},
        shared={
            "data": data,
            "loss": loss,
            "forward": forward,
            "validation": validation,
            "stage": stage,
            "every": every,
            "progress": progress,
        },
    )
    return cohort.train(data, definition, train_slice, path=checkpoint, every=every, progress=progress)


class Cohort:
    """What is trained together: one model, or the members of a population behind one stacked model."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], config: Any, seed: Any) -> None:
        self.models = members(model)
        self.configs: list[Config] = per_member("config", config, len(self.models))
        for member_config in self.configs:
            check_config("config", member_config)
        self.seeds: list[int] = per_member("seed", seed, len(self.models))
        if not self.models:
            raise ValueError("a population needs at least one model, but the list is empty")
        self.device = device_of(self.models[0])
        self.population: Population | None = None
        self._alone = isinstance(model, nn.Module)
        if not self._alone:
            check_population(self.configs)
            for member in self.models:
                across_model(member)
                refuse_sharded(member.parameters(), "population")

    def try_out(self, data: Data, objective: Objective) -> str:
        """Refuses bad input before anything changes, by a `trial_pass` of every model; returns what the first gives."""
        if objective.forward is not None and not self._alone:
            raise ValueError(
                f"forward= calls one model, but {len(self.models)} are trained as a population; train them one by one"
            )
        values = [trial_pass(model, data, objective) for model in self.models]
        check_shards(self.configs[0], self.models[0].parameters())
        # Optimisers of the user's own may take sparse gradients, but masks do not.
        own = callable(self.configs[0].optimizer)
        weights.refuse_sparse_gradients(self.models[0], weights.masked_names(self.models[0]) if own else None)
        return values[0]

    def stack(self) -> None:
        """Puts the members of a population behind one model: after `try_out`, which may give a member its shape."""
        if self._alone:
            return
        try:
            self.population = Population(self.models)
        except torch.OutOfMemoryError as failure:
            raise ValueError(
                f"{len(self.models)} models do not fit into the memory of {self.device}; give fewer at once"
            ) from failure
        if EXECUTIONS[self.configs[0].execution].compiled:
            self.population.compile()

    @property
    def trained(self) -> nn.Module:
        """The module whose parameters move."""
        return self.models[0] if self.population is None else self.population.stacked

    def budgets(self, budget: Budget | Sequence[Budget] | None) -> list[Budget] | None:
        """A budget for every member, checked against what is trained."""
        budgets = None if budget is None else per_member("budget", budget, len(self.models))
        check_budgets(self.trained, budgets or [])
        if budgets and len({tuple(weights.masked_names(model)) for model in self.models}) > 1:
            raise ValueError(
                "a budget moves the masks of one population, whose members have masks of different tensors; "
                "train one population for each choice of tensors, as pp.together does"
            )
        return budgets

    def stepper(self, budgets: list[Budget] | None) -> Stepper:
        """What keeps or moves the masks of what is trained."""
        clean, members = self.configs[0].clip is not None, self.population is not None
        return Stepper(self.trained, budgets, seeds=self.seeds, members=members, clean=clean)

    def mark_seen(self, *used: Data) -> None:
        """Notes on every member that it is trained on, or judged by, these data, and that losses on them are told."""
        states = [weights.fingerprint(model) for model in self.models]
        for data in used:
            weights.mark_seen(self.models, use_of(data))
            train_on(data, states)

    def objective(self, objective: Objective, *, check_each: bool) -> Callable[[Any], Tensor]:
        """batch -> the loss of the model, or of every member; `check_each` looks at the labels of every batch."""
        config = self.configs[0]
        # The size of all micro-batches but the last ones: others are not worth compiling for.
        usual = math.ceil(config.batch_size / config.accumulate) // ranks.world()
        if self.population is not None:
            population, separate = self.population, len(orders(self.configs, self.seeds)) > 1
            axis = 1 if separate else 0

            def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
                x, y = batch
                return population.losses(objective.loss, x, y, separate=separate, fuse=y.shape[axis] == usual)

            return losses
        model = self.models[0]
        compiled: Any = compile_always(model) if EXECUTIONS[config.execution].compiled else model

        def loss_of(batch: Any) -> Tensor:
            try:
                out = objective.outputs(compiled if rows(batch) == usual else model, batch)
            except ValueError as failure:
                if rows(batch) > 1:
                    raise
                raise ValueError(
                    "a batch holds 1 example, of which BatchNorm has no variance; give the DataLoader drop_last=True, "
                    "or batches of 2 or more"
                ) from failure
            if check_each and objective.is_classification(batch):
                check_labels(batch[1], out)
            return objective.value(out, batch)

        return loss_of

    def mean_losses(self, data: Data, objective: Objective) -> list[float]:
        """The mean loss of every member on other data."""
        if self.population is not None:
            self.population.write_back()
        return [mean_loss(model, data, loss=objective.loss, forward=objective.forward) for model in self.models]

    def train(self, data: Data, stage: Stage, train_slice: TrainSlice, **options: Any) -> History:
        """The loop, and what it leaves in the members; rows of a population name their member.

        Where the device's memory does not hold all members, `train_slice` trains them in halves.
        """
        with weights.training(self.models):
            return self._train(data, stage, train_slice, **options)

    def _train(self, data: Data, stage: Stage, train_slice: TrainSlice, **options: Any) -> History:
        # A validation writes into the members, and halves have to begin where all of them began.
        validated = self.models if stage.validate and self.population else []
        start = [copy.deepcopy(model.state_dict()) for model in validated]
        try:
            histories = Loop(self.trained, data, self.configs, stage, seeds=self.seeds, **options).train()
        except torch.OutOfMemoryError as failure:
            if len(self.models) == 1 or ranks.world() > 1:  # the other ranks may have memory left
                size = self.configs[0].batch_size
                raise ValueError(
                    f"a batch of {size} does not fit into the memory of {self.device}; "
                    f"use accumulate={2 * self.configs[0].accumulate}, amp=True, or a smaller batch_size"
                ) from failure
            histories = None  # goes on below: the failure holds on to the memory while it is handled
        if histories is None:
            for model, state in zip(self.models, start, strict=False):
                model.load_state_dict(state)
            return self._train_halves(train_slice)
        if self.population is None:
            return histories[0]
        self.population.write_back()
        return [{**row, "member": k} for rows in zip(*histories, strict=True) for k, row in enumerate(rows)]

    def slices(
        self,
        train: Callable[..., History],
        checkpoint: str | Path | None,
        *,
        members: dict[str, list[Any] | None],
        shared: dict[str, Any],
    ) -> TrainSlice:
        """`train` of some members by themselves: their part of what the `members` have each, and what is `shared`."""
        each = {"model": self.models, "config": self.configs, "seed": self.seeds, **members}

        def train_slice(part: slice, suffix: str) -> History:
            arguments = {name: None if values is None else values[part] for name, values in each.items()}
            path = None if checkpoint is None else f"{checkpoint}{suffix}"
            return train(**arguments, **shared, checkpoint=path)

        return train_slice

    def _train_halves(self, train_slice: TrainSlice) -> History:
        count, half = len(self.models), len(self.models) // 2
        warnings.warn(
            f"{count} models at once do not fit into the memory of {self.device}; they are trained {count - half} at "
            "a time, with the same outcome",
            stacklevel=4,
        )
        if self.population is not None:
            stacked = self.population.stacked
            # The optimiser and the loop still hold these tensors, but not their memory.
            for tensor in (*stacked.parameters(), *stacked.buffers()):
                tensor.data, tensor.grad = tensor.data.new_empty(0), None
        self.population = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = train_slice(slice(0, half), ".a"), train_slice(slice(half, count), ".b")
        return first + [{**row, "member": row["member"] + half} for row in second]
