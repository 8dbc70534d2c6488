"""The training loop that every stage shares, and the Config that describes one stage."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pacprune import budget, checkpoint, estimators, layers, weights
from pacprune.batches import Data, batches, device_of, forked, portions, size
from pacprune.budget import Budget
from pacprune.data import crop_flip

History = list[dict[str, Any]]
Progress = Callable[[str, int, int, dict[str, Any]], None]
"""Called after every step, and again after every epoch, with (stage, steps done, steps in all, last epoch's row)."""
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")


class _Auto(float):
    """A gate_lr that follows lr, also through dataclasses.replace(config, lr=...)."""


@dataclass(frozen=True)
class Config:
    """How one stage is trained. Gates have their own learning rate, 100 * lr by default, and no weight decay.

    gate_lr None freezes the gates; lr 0 freezes everything else. schedule "cosine" falls to 0, "step" is x0.1 at 50 %
    and at 75 %; `warmup` is the share of steps with a linear rise; `span` is the part of the schedule that this stage
    covers, so that two stages can share one cosine. The gates' learning rate stays constant. A batch of `batch_size` is
    split into `accumulate` micro-batches, each with its own draw. `samples` > 0 takes the gates' gradient from
    Algorithm 1 with so many draws. With `patience` > 0, stops after so many epochs without a better validation loss and
    goes back to the best one.
    """

    epochs: int = 10
    lr: float = 0.01
    gate_lr: float | str | None = "auto"
    std_lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 128
    optimizer: str = "sgd"
    schedule: str = "constant"
    warmup: float = 0.0
    span: tuple[float, float] = (0.0, 1.0)
    accumulate: int = 1
    amp: bool = False
    augment: bool = False
    clip: float | None = None
    samples: int = 0
    patience: int = 0

    def __post_init__(self) -> None:
        automatic = self.gate_lr == "auto" or isinstance(self.gate_lr, _Auto)
        for name, least in (("epochs", 0), ("batch_size", 1), ("accumulate", 1), ("samples", 0), ("patience", 0)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float, np.integer)) and least <= value < math.inf and value == int(value)):
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
            object.__setattr__(self, name, int(value))
        for name in ("lr", "momentum", "weight_decay", "warmup", "gate_lr", "std_lr", "clip"):
            value = getattr(self, name)
            free = (name == "gate_lr" and automatic) or (value is None and name in ("gate_lr", "std_lr", "clip"))
            if not (free or (isinstance(value, (int, float)) and 0 <= value < math.inf)):
                raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")
        if automatic:
            object.__setattr__(self, "gate_lr", _Auto(100 * self.lr))
        if self.warmup > 1:
            raise ValueError(f"warmup is {self.warmup}; it is a share of the steps and must lie in [0, 1]")
        match self.span:
            case [int() | float() as start, int() | float() as end] if 0 <= start <= end <= 1:
                object.__setattr__(self, "span", (start, end))
            case _:
                raise ValueError(f"span is {self.span!r}; it must be two numbers with 0 <= start <= end <= 1")
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1, or steps would add up without end")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")

    def factor(self, progress: float) -> float:
        """What lr is multiplied by when a share `progress` of the stage is done."""
        rise = min(1.0, (progress + 1e-9) / self.warmup) if self.warmup else 1.0
        place = self.span[0] + (self.span[1] - self.span[0]) * progress
        if self.schedule == "cosine":
            return rise * 0.5 * (1 + math.cos(math.pi * place))
        if self.schedule == "step":
            return rise * (1.0 if place < 0.5 else 0.1 if place < 0.75 else 0.01)
        return rise


@dataclass(frozen=True)
class Run:
    """What tells one stage from another in the shared loop."""

    stage: str
    objective: Callable[[Tensor, Tensor], Tensor]
    groups: list[dict[str, Any]]
    enter: Callable[[], Any]
    budget: Budget | None
    validate: Callable[[], float] | None
    identity: dict[str, Any]
    after: Callable[[Callable[[nn.Parameter], Any]], None] | None = None
    """Called after every optimiser step with `_rate` of a parameter."""


def loop(
    model: nn.Module,
    data: Data,
    config: Config,
    run: Run,
    *,
    seed: int,
    path: str | Path | None,
    every: int | None,
    progress: Progress | None,
) -> History:
    """Trains until the epochs are done or patience ends; see `train.fit` for what a caller may rely on."""
    if config.patience and run.validate is None:
        raise ValueError(
            f"patience is {config.patience} but there is no validation data to judge by; give some, or patience=0"
        )
    device, n = device_of(model), size(data)
    optimizer = _optimizer(config, run.groups)
    per_epoch = len(data) if isinstance(data, DataLoader) else len(portions(torch.arange(n), config.batch_size))
    sites = layers.sites(model)
    trained = [p for group in run.groups for p in group["params"]]
    frozen = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in trained)]
    path = None if path is None else Path(path)
    identity = _identity(model, config, run, seed) if path else ""

    history: History = []
    # A DataLoader may leave examples out or repeat some, so those of the present epoch are counted.
    epoch, batch, count, total = 0, 0, 0, torch.zeros((), dtype=torch.float64, device=device)
    best: dict[str, Any] | None = None
    stale, done = 0, config.epochs == 0
    with forked(device, data, seed=seed):
        epoch_start = checkpoint.random_state(device, data)
        saved = checkpoint.load(path, identity) if path else None
        if saved is not None:
            checkpoint.load_model_state(model, saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            history, best, stale, done = json.loads(saved["history"]), saved["best"], saved["stale"], saved["done"]
            epoch, batch, epoch_start = saved["epoch"], saved["batch"], saved["epoch_start"]
            count, total = saved["count"], saved["total"].to(device)
            checkpoint.set_random_state(saved["random"] if batch == 0 else epoch_start, device, data)

        def store() -> None:
            if path:
                checkpoint.save(
                    path,
                    identity=identity,
                    model=checkpoint.model_state(model),
                    optimizer=optimizer.state_dict(),
                    history=json.dumps(history),
                    best=best,
                    stale=stale,
                    done=done,
                    epoch=epoch,
                    batch=batch,
                    count=count,
                    total=total.cpu(),
                    random=checkpoint.random_state(device, data),
                    epoch_start=epoch_start,
                )

        for p in frozen:
            p.requires_grad_(False)
        try:
            while not done:
                run.enter()
                if batch == 0:
                    epoch_start = checkpoint.random_state(device, data)
                source = batches(data, config.batch_size, device=device, order=_order(n, seed, epoch))
                for number, (x, y) in enumerate(source):
                    if number < batch:  # already done before the checkpoint; a DataLoader has to be read up to here
                        if number == batch - 1 and saved is not None:
                            checkpoint.set_random_state(saved["random"], device, data)
                        continue
                    share = (epoch * per_epoch + number) / (config.epochs * per_epoch)
                    for group in optimizer.param_groups:
                        group["lr"] = group["base"] * (config.factor(share) if group["scheduled"] else 1.0)
                    value = _step(
                        model,
                        optimizer,
                        run,
                        config,
                        x,
                        y,
                        share,
                        sites,
                        seed=seed * 1_000_003 + epoch * per_epoch + number,
                    )
                    total += value * len(x)
                    batch, count = number + 1, count + len(x)
                    if device.type == "cpu":
                        _check_finite(value, run.stage, epoch, config)
                    if progress:
                        progress(
                            run.stage,
                            epoch * per_epoch + batch,
                            config.epochs * per_epoch,
                            history[-1] if history else {},
                        )
                    if every and (epoch * per_epoch + batch) % every == 0 and batch < per_epoch:
                        store()
                _check_finite(total, run.stage, epoch, config)
                row = {
                    "stage": run.stage,
                    "epoch": epoch + 1,
                    "loss": float(total) / count,
                    "lr": optimizer.param_groups[0]["lr"],
                }
                if sites and run.budget is not None:
                    # The last step moved the gates; what is read from here on meets the budget.
                    budget.enforce_(model, run.budget, (epoch + 1) / config.epochs)
                if sites:
                    row["expected_sparsity"] = layers.read(model).sparsity
                if run.validate is not None:
                    row["validation_loss"] = run.validate()
                    better = best is None or row["validation_loss"] < best["validation_loss"]
                    stale = 0 if better else stale + 1
                    if better and config.patience:
                        best = {"validation_loss": row["validation_loss"], **checkpoint.model_state(model)}
                history.append(row)
                epoch, batch, count, total = epoch + 1, 0, 0, torch.zeros_like(total)
                done = epoch == config.epochs or (config.patience > 0 and stale >= config.patience)
                if done and best is not None:
                    checkpoint.load_model_state(model, best)
                store()
                if progress:
                    progress(run.stage, epoch * per_epoch, config.epochs * per_epoch, row)
        finally:
            for p in frozen:
                p.requires_grad_(True)
            model.eval()
    return history


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
    config: Config,
    x: Tensor,
    y: Tensor,
    share: float,
    sites: list[layers.Site],
    *,
    seed: int,
) -> Tensor:
    """One optimiser step; returns the mean loss of the batch."""
    if config.augment:
        if x.ndim != 4:
            raise ValueError(
                f"augment=True needs images of shape (n, channels, height, width), but x is {tuple(x.shape)}; "
                "set augment=False"
            )
        x = crop_flip(x, generator=torch.Generator(x.device).manual_seed(seed))
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    micro = math.ceil(len(x) / config.accumulate)
    if sites and run.budget is not None:
        budget.enforce_(model, run.budget, share)
    for part_x, part_y in zip(portions(x, micro), portions(y, micro), strict=True):
        weight = len(part_x) / len(x)
        if sites:
            layers.resample_(model)

        def forward(part_x: Tensor = part_x, part_y: Tensor = part_y) -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=config.amp):
                return run.objective(part_x, part_y)

        if sites and config.samples:
            value = estimators.algorithm1_(
                model, lambda weight=weight, forward=forward: weight * forward(), samples=config.samples
            )
            total += value
        else:
            value = forward()
            (weight * value).backward()
            total += weight * value.detach()
    if sites and run.budget is not None and run.budget.control == "lagrangian":
        budget.penalty(model, run.budget, share).backward()
    if config.clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], config.clip)
    optimizer.step()
    if run.after is not None:
        run.after(lambda p: _rate(optimizer, p))
    weights.enforce_mask(model)
    return total


def _check_finite(value: Tensor, stage: str, epoch: int, config: Config) -> None:
    if not torch.isfinite(value):
        raise ValueError(
            f"the loss became {float(value)} in epoch {epoch + 1} of stage {stage!r} "
            f"(lr {config.lr}, gate_lr {config.gate_lr}); "
            "use a smaller learning rate, or check the data for NaN"
        )


def _identity(model: nn.Module, config: Config, run: Run, seed: int) -> str:
    """A hash of all that the outcome of a stage follows from."""
    content = {
        "stage": run.stage,
        "config": asdict(config),
        "seed": seed,
        "model": checkpoint.digest(dict(model.state_dict())),
        "trainable": [n for n, p in model.named_parameters() if p.requires_grad],
        "masks": [checkpoint.digest(mask) for _, mask in weights.noted(model, "mask")],
        "samplers": [
            [s.mapping, s.coupling, s.estimator, s.beta, int(s.seed), int(s.step)]
            for s in (site.sampler for site in layers.sites(model))
        ],
        **run.identity,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def groups(model: nn.Module, config: Config, *, rest: bool) -> list[dict[str, Any]]:
    """Parameter groups: weights (and the rest, when it is trained), gates, log std; empty ones are left out."""
    sites = layers.sites(model)
    if sites:
        check_rates(config)
    plain = [site.mean for site in sites] + (layers.rest_parameters(model) if rest else [])
    gates = [site.gate for site in sites] if config.gate_lr is not None else []
    stds = [site.log_std for site in sites if site.log_std is not None]
    found = [
        {"params": plain, "base": config.lr, "weight_decay": config.weight_decay, "scheduled": True},
        {"params": gates, "base": float(config.gate_lr or 0.0), "weight_decay": 0.0, "scheduled": False},
        {
            "params": stds,
            "base": config.lr if config.std_lr is None else config.std_lr,
            "weight_decay": 0.0,
            "scheduled": True,
        },
    ]
    return [group for group in found if group["params"]]


def check_rates(config: Config) -> None:
    """Refuses to train stochastic masks with learning rates that are all 0."""
    if config.epochs and not (config.lr or config.gate_lr or config.std_lr):
        raise ValueError(
            f"lr is {config.lr} and gate_lr is {config.gate_lr}, so neither weights nor gates would change; "
            "give gate_lr= to train the gates alone"
        )


def _optimizer(config: Config, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups = [{**group, "lr": group["base"]} for group in groups]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=(config.momentum, 0.999))


def _rate(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float | Tensor:
    """How far a lasting unit of gradient moves this weight per step: momentum adds up, Adam divides by its scale.

    A proximal step beside the optimiser's own has to use it, or the two would not weigh their terms alike.
    """
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    if isinstance(optimizer, torch.optim.SGD):
        return group["lr"] / (1 - group["momentum"])
    scale = torch.sqrt(state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"]))
    return group["lr"] / (scale + group["eps"])


def _order(n: int, seed: int, epoch: int) -> Tensor:
    """The permutation of an epoch, from (seed, epoch) alone."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
    return torch.randperm(n, generator=torch.Generator().manual_seed(mixed))
