"""The training loop that every stage shares: one model, or a population of K with a leading model dimension."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.data import batches
from pacprune.data.batches import device_of, isolated_rng
from pacprune.distributed import across, local, ranks
from pacprune.masking import attachment, weights
from pacprune.training import budget, checkpoint
from pacprune.training.checks import check_batches, check_rates
from pacprune.training.config import Config
from pacprune.training.optim import Group, weights_group
from pacprune.training.step import Stage, Step
from pacprune.types import Data, Diverged, History, Progress


class Loop:
    """One stage of training under way: its step, where it stands, and what it has measured."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        configs: Sequence[Config],
        stage: Stage,
        *,
        seeds: Sequence[int],
        path: str | Path | None,
        every: int | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.data, self.configs, self.stage = model, data, configs, stage
        self.seeds, self.every, self.progress = seeds, every, progress
        self.config = configs[0]
        if self.config.patience and stage.validate is None:
            raise ValueError(
                f"patience is {self.config.patience} but there is no validation data to judge by; "
                "give some, or patience=0"
            )
        check_batches(data, self.config)
        self.device = device_of(model)
        self.per_epoch = batches.per_epoch(data, self.config.batch_size, self.config.steps_per_epoch)
        self.step = Step(model, configs, stage, seeds, self.device)
        self.path = None if path is None else Path(path)
        needed = self.path or ranks.world() > 1
        self.identity = checkpoint.identity(model, configs, stage, seeds) if needed else ""

        self.histories: list[History] = [[] for _ in configs]
        self.epoch, self.batch = 0, 0
        self.count = 0
        """Examples of the present epoch so far: a DataLoader may leave some out or repeat some."""
        self.best: dict[str, Any] | None = None
        """The model at the end of the epoch with the lowest validation loss, and that loss."""
        self.stale = 0
        """Epochs since the best one."""
        self.done = self.config.epochs == 0

    def train(self) -> list[History]:
        """Trains until the epochs are done or patience ends; one history per member."""
        contact = ranks.contact(sure=False) if self.step.sharded else nullcontext()
        with isolated_rng(self.device, self.data, seed=self.seeds[0]), contact:
            self._resume()
            with _frozen(self._untrained()):
                try:
                    read = self.step.reader(self.data)
                    while not self.done:
                        self._begin_epoch()
                        for number, examples in self._remaining(read(self.epoch)):
                            self._take(number, examples)
                        self._end_epoch()
                    self.stage.stepper.finish()
                finally:
                    self.stage.stepper.hide()
                    self.step.optimizer.zero_grad()
                    self.model.eval()
        return self.histories

    def _untrained(self) -> list[nn.Parameter]:
        """Parameters that would get gradients though no group trains them."""
        trained = [p for group in self.stage.groups for p in group.params]
        known = {id(p) for p in (*trained, *attachment.sample_parameters(self.model))}
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]

    # --- One epoch.

    def _begin_epoch(self) -> None:
        self.stage.set_modes()
        if self.batch == 0:
            self.epoch_start = checkpoint.random_state(self.device, self.data)
        self.step.begin(self.epoch, self.per_epoch)

    def _remaining(self, examples: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """The numbered batches of the epoch without those that were done before the checkpoint."""
        resumed = self.batch
        for number, batch in enumerate(examples):
            if number >= resumed:
                yield number, batch
            elif number == resumed - 1:  # a DataLoader has to be read up to here
                checkpoint.set_random_state(self.resume_state, self.device, self.data)

    def _take(self, number: int, examples: Any) -> None:
        self.count += self.step(number, examples)
        self.batch = number + 1
        if self.device.type == "cpu":  # elsewhere, looking at the number would be a stop
            self._check_finite(self.step.value)
        steps_done = self.epoch * self.per_epoch + self.batch
        self._report(steps_done)
        if self.every and steps_done % self.every == 0 and self.batch < self.per_epoch:
            self._share()
            self._store()
            if ranks.rank():  # rank 0 carries the sum on
                self.step.total.zero_()

    def _end_epoch(self) -> None:
        self._share()
        self._check_finite(self.step.total)
        rows = [
            {"stage": self.stage.name, "epoch": self.epoch + 1, "loss": total / self.count, "lr": rate}
            for total, rate in zip(_listed(self.step.total), self.step.rates[self.batch - 1], strict=True)
        ]
        if self.step.sites and self.stage.budgets is not None:
            # The last step moved the gates; what is read from here on meets the budget.
            budget.enforce_(self.model, self.stage.budget_per_member(), (self.epoch + 1) / self.config.epochs)
        self.stage.stepper.note()
        _add_sparsity(rows, self.model, self.stage)
        if self.stage.validate is not None:
            self._judge(rows)
        for history, row in zip(self.histories, rows, strict=True):
            history.append(row)
        self.epoch, self.batch, self.count = self.epoch + 1, 0, 0
        self.step.total.zero_()
        self.done = self.epoch == self.config.epochs or 0 < self.config.patience <= self.stale
        if self.done and self.best is not None:
            checkpoint.load_model_state(self.model, self.best)
        self._store()
        self._report(self.epoch * self.per_epoch)

    def _judge(self, rows: History) -> None:
        """Adds the validation losses, and keeps the model if it is the best so far."""
        assert self.stage.validate is not None
        with self.stage.stepper.as_network():
            if self.step.sharded:  # all ranks have to help
                losses = self.stage.validate()
                losses = ranks.on_rank0(lambda: losses)
            else:
                losses = ranks.on_rank0(self.stage.validate)  # of rank 0 alone: all ranks stop at the same epoch
        for row, loss in zip(rows, losses, strict=True):
            row["validation_loss"] = loss
        better = self.best is None or losses[0] < self.best["validation_loss"]
        self.stale = 0 if better else self.stale + 1
        if better and self.config.patience:
            self.best = {"validation_loss": losses[0], **checkpoint.model_state(self.model)}

    def _report(self, steps_done: int) -> None:
        if self.progress:
            row = _mean_row([history[-1] for history in self.histories]) if self.histories[0] else {}
            with weights.watched(self.model, closely=self.batch == 0):
                self.progress(self.stage.name, steps_done, self.config.epochs * self.per_epoch, row)

    def _check_finite(self, losses: Tensor) -> None:
        if bool(torch.isfinite(losses).all()):
            return
        k, loss = next((k, loss) for k, loss in enumerate(_listed(losses)) if not math.isfinite(loss))
        member = f"of member {k} " if self.stage.members else ""
        raise Diverged(
            f"the loss {member}became {loss} in epoch {self.epoch + 1} of stage {self.stage.name!r} "
            f"(lr {self.configs[k].lr}, gate_lr {self.configs[k].gate_lr}); "
            "use a smaller learning rate, or check the data for NaN"
        )

    # --- Checkpoints.

    def _resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        self.epoch_start = checkpoint.random_state(self.device, self.data)
        load = checkpoint.load_shards if self.step.sharded else checkpoint.load
        saved = load(self.path, self.identity) if self.path else None
        if saved is not None:
            self._restore(saved)
        place = "none" if saved is None else f"epoch {self.epoch}, step {self.batch}"
        # No rank gets past this before all have read; only then is the next one written.
        ranks.require_equal({"checkpoint": (place, "put it where all ranks can read it, or delete it")})

    def _restore(self, saved: dict[str, Any]) -> None:
        checkpoint.load_model_state(self.model, saved["model"])
        self.step.optimizer.load_state_dict(saved["optimizer"])
        total = saved["total"]
        self.step.total.copy_(total if ranks.rank() == 0 else torch.zeros_like(total))
        self.histories = json.loads(saved["history"])
        for name in ("best", "stale", "done", "epoch", "batch", "count", "epoch_start"):
            setattr(self, name, saved[name])
        self.stage.stepper.resume(self.epoch * self.per_epoch + self.batch, self.config.epochs * self.per_epoch)
        self.resume_state = saved["random"]
        start = self.resume_state if self.batch == 0 else self.epoch_start
        checkpoint.set_random_state(start, self.device, self.data)

    def _store(self) -> None:
        if not self.path or (ranks.rank() and not self.step.sharded):
            return
        save = checkpoint.save_shards if self.step.sharded else checkpoint.save
        save(
            self.path,
            identity=self.identity,
            model=checkpoint.model_state(self.model),
            optimizer=self.step.optimizer.state_dict(),
            history=json.dumps(self.histories),
            best=self.best,
            stale=self.stale,
            done=self.done,
            epoch=self.epoch,
            batch=self.batch,
            count=self.count,
            total=self.step.total.cpu(),
            random=checkpoint.random_state(self.device, self.data),
            epoch_start=self.epoch_start,
        )

    def _share(self) -> None:
        """Shares what every rank has of its own: BatchNorm's statistics and the sum of losses, which rank 0 stores."""
        ranks.average_(list(self.model.buffers()))
        ranks.sum_(self.step.total)


@contextmanager
def _frozen(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Without gradients for these parameters."""
    for p in params:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in params:
            p.requires_grad_(True)


def _listed(values: Tensor) -> list[float]:
    return values.reshape(-1).tolist()


def _mean_row(rows: History) -> dict[str, Any]:
    """What is shown of an epoch's rows: of a population, the members' means."""
    if len(rows) == 1:
        return rows[0]
    means = {key: sum(row[key] for row in rows) / len(rows) for key, v in rows[0].items() if isinstance(v, float)}
    return {**rows[0], **means, "members": len(rows)}


def _add_sparsity(rows: History, model: nn.Module, stage: Stage) -> None:
    """To every member's row: sum(1 - keep_prob) / D where there are gates, or the share of D that is masked, if any."""
    if sites := attachment.sites(model):
        key, between = "expected_sparsity", attachment.between_ranks(sites)
        counts = [_pruned(site, members=stage.members) for site in sites]
    elif pairs := weights.masked(model):
        key, between = "sparsity", across(weight for weight, _ in pairs)
        counts = [(~local(keep)).double().flatten(1 if stage.members else 0).sum(-1) for _, keep in pairs]
    else:
        return
    totals = sum(counts[1:], counts[0])
    if between is not None:
        totals = between.sum(totals)
    for row, total in zip(rows, _listed(totals), strict=True):
        if sites or total:  # a member without a mask has a row as if it were alone
            row[key] = total / weights.noted_total(model)


def _pruned(site: attachment.AttachedWeight, *, members: bool) -> Tensor:
    """How many weights of this rank's rows the gates prune in expectation, of every member."""
    if site.sampler.pattern is None:
        return (1 - site.keep_prob().double()).flatten(1 if members else 0).sum(-1)
    n, m = site.sampler.pattern  # whatever the gates are, so that nobody has to look at them
    seed = site.sampler.seed
    return torch.full(seed.shape, (1 - n / m) * site.local_mean.numel() / seed.numel(), device=seed.device).double()


def groups(model: nn.Module, configs: Sequence[Config], *, rest: bool, std_optimizer: str | None = None) -> list[Group]:
    """Parameter groups: weights (and the rest, when it is trained), gates, log std; empty ones are left out."""
    sites = attachment.sites(model)
    if sites:
        for config in configs:
            check_rates(config)
    plain = [site.mean for site in sites] + (attachment.rest_parameters(model) if rest else [])
    gates = [site.gate for site in sites] if configs[0].gate_lr is not None else []
    log_stds = [site.log_std for site in sites if site.log_std is not None]
    momentum, no_decay = [config.momentum for config in configs], [0.0] * len(configs)
    std_rates = [config.lr if config.std_lr is None else config.std_lr for config in configs]
    decay, factory = [config.weight_decay for config in configs], configs[0].optimizer
    gate_rates, scheduled = [float(config.gate_lr or 0.0) for config in configs], configs[0].gates_scheduled
    candidates = [
        Group(plain, [config.lr for config in configs], momentum, decay, True)
        if isinstance(factory, str) or not plain
        else weights_group([p for p in plain if p.requires_grad], factory),
        Group(gates, gate_rates, momentum, no_decay, scheduled),
        Group(log_stds, std_rates, momentum, no_decay, True, optimizer=std_optimizer),
    ]
    return [group for group in candidates if group.params]
