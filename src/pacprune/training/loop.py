"""The training loop that every stage shares: one model, or a population of K with a leading model dimension."""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from pacprune.data import batches
from pacprune.data.batches import device_of, isolated_rng
from pacprune.distributed import across, is_sharded, local, ranks
from pacprune.files import digest
from pacprune.masking import attachment, weights
from pacprune.training import budget, checkpoint
from pacprune.training.config import Config
from pacprune.training.optim import Group
from pacprune.training.step import Stage, Step
from pacprune.types import Data, History, Progress

_SHARED = (
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
)
"""What all members of a population have in common, since they take their steps together."""


def loop(
    model: nn.Module,
    data: Data,
    configs: Sequence[Config],
    run: Stage,
    *,
    seeds: Sequence[int],
    path: str | Path | None,
    every: int | None,
    progress: Progress | None,
) -> list[History]:
    """Trains until the epochs are done or patience ends; one history per member. See `train.fit` for the contract."""
    config = configs[0]
    if config.patience and run.validate is None:
        raise ValueError(
            f"patience is {config.patience} but there is no validation data to judge by; give some, or patience=0"
        )
    _check_split(data, config)
    device, per_epoch = device_of(model), batches.per_epoch(data, config.batch_size)
    step = Step(model, configs, run, seeds, device)
    trained = [p for group in run.groups for p in group.params]
    known = {id(p) for p in (*trained, *attachment.sample_parameters(model))}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    path = None if path is None else Path(path)
    identity = _identity(model, configs, run, seeds) if path or ranks.world() > 1 else ""

    histories: list[History] = [[] for _ in configs]
    # A DataLoader may leave examples out or repeat some, so those of the present epoch are counted.
    epoch, batch, count = 0, 0, 0
    best: dict[str, Any] | None = None
    stale, done = 0, config.epochs == 0
    save, load = (
        (checkpoint.save_shards, checkpoint.load_shards) if step.sharded else (checkpoint.save, checkpoint.load)
    )
    with isolated_rng(device, data, seed=seeds[0]), ranks.contact(sure=False) if step.sharded else nullcontext():
        epoch_start = checkpoint.random_state(device, data)
        saved = load(path, identity) if path else None
        if saved is not None:
            checkpoint.load_model_state(model, saved["model"])
            step.optimizer.load_state_dict(saved["optimizer"])
            histories, best, stale, done = json.loads(saved["history"]), saved["best"], saved["stale"], saved["done"]
            epoch, batch, epoch_start = saved["epoch"], saved["batch"], saved["epoch_start"]
            count = saved["count"]
            step.total.copy_(saved["total"] if ranks.rank() == 0 else torch.zeros_like(saved["total"]))
            checkpoint.set_random_state(saved["random"] if batch == 0 else epoch_start, device, data)
        found = "none" if saved is None else f"epoch {epoch}, step {batch}"
        # No rank gets past this before all have read; only then is the next one written.
        ranks.require_equal({"checkpoint": (found, "put it where all ranks can read it, or delete it")})

        def settle() -> None:
            """Shares what is each rank's own, BatchNorm's statistics and the sum of losses; rank 0 stores them."""
            ranks.average_(list(model.buffers()))
            ranks.sum_(step.total)

        def store() -> None:
            if path and (step.sharded or ranks.rank() == 0):
                save(
                    path,
                    identity=identity,
                    model=checkpoint.model_state(model),
                    optimizer=step.optimizer.state_dict(),
                    history=json.dumps(histories),
                    best=best,
                    stale=stale,
                    done=done,
                    epoch=epoch,
                    batch=batch,
                    count=count,
                    total=step.total.cpu(),
                    random=checkpoint.random_state(device, data),
                    epoch_start=epoch_start,
                )

        for p in frozen:
            p.requires_grad_(False)
        try:
            take = step.reader(data)
            while not done:
                run.enter()
                if batch == 0:
                    epoch_start = checkpoint.random_state(device, data)
                step.begin(epoch, per_epoch)
                for number, examples in enumerate(take(epoch)):
                    if number < batch:  # already done before the checkpoint; a DataLoader has to be read up to here
                        if number == batch - 1 and saved is not None:
                            checkpoint.set_random_state(saved["random"], device, data)
                        continue
                    taken = step(number, examples)
                    batch, count = number + 1, count + taken
                    if device.type == "cpu":
                        _check_finite(step.value, run, epoch, configs)
                    if progress:
                        shown = _shown(histories) if histories[0] else {}
                        progress(run.stage, epoch * per_epoch + batch, config.epochs * per_epoch, shown)
                    if every and (epoch * per_epoch + batch) % every == 0 and batch < per_epoch:
                        settle()
                        store()
                        if ranks.rank():  # rank 0 carries the sum on
                            step.total.zero_()
                settle()
                _check_finite(step.total, run, epoch, configs)
                rows = [
                    {"stage": run.stage, "epoch": epoch + 1, "loss": value / count, "lr": rate}
                    for value, rate in zip(_listed(step.total), step.rates[batch - 1], strict=True)
                ]
                if step.sites and run.budgets is not None:
                    # The last step moved the gates; what is read from here on meets the budget.
                    budget.enforce_(model, run.plan(), (epoch + 1) / config.epochs)
                _add_sparsity(rows, model, run)
                if run.validate is not None:
                    # Of rank 0 alone, so that all ranks stop at the same epoch; of a sharded model, all have to help.
                    values = run.validate() if step.sharded else []
                    judged = ranks.on_rank0(run.validate if not step.sharded else lambda values=values: values)
                    for row, value in zip(rows, judged, strict=True):
                        row["validation_loss"] = value
                    better = best is None or rows[0]["validation_loss"] < best["validation_loss"]
                    stale = 0 if better else stale + 1
                    if better and config.patience:
                        best = {"validation_loss": rows[0]["validation_loss"], **checkpoint.model_state(model)}
                for history, row in zip(histories, rows, strict=True):
                    history.append(row)
                epoch, batch, count = epoch + 1, 0, 0
                step.total.zero_()
                done = epoch == config.epochs or (config.patience > 0 and stale >= config.patience)
                if done and best is not None:
                    checkpoint.load_model_state(model, best)
                store()
                if progress:
                    progress(run.stage, epoch * per_epoch, config.epochs * per_epoch, _shown(histories))
        finally:
            for p in frozen:
                p.requires_grad_(True)
            step.optimizer.zero_grad()
            model.eval()
    return histories


def _listed(values: Tensor) -> list[float]:
    return values.reshape(-1).tolist()


def _shown(histories: list[History]) -> dict[str, Any]:
    """The last row, for someone who waits: of a population, the members' means."""
    rows = [history[-1] for history in histories]
    if len(rows) == 1:
        return rows[0]
    numbers = {k: sum(row[k] for row in rows) / len(rows) for k, v in rows[0].items() if isinstance(v, float)}
    return {**rows[0], **numbers, "members": len(rows)}


def _add_sparsity(rows: History, model: nn.Module, run: Stage) -> None:
    """To every member's row: sum(1 - keep_prob) / D where there are gates, or the share of D that is masked, if any."""
    if sites := attachment.sites(model):
        name, between = "expected_sparsity", attachment.between_ranks(sites)
        gone = [1 - site.keep_prob().double() for site in sites]
    elif pairs := weights.masked(model):
        name, between = "sparsity", across(weight for weight, _ in pairs)
        gone = [(~local(keep)).double() for _, keep in pairs]
    else:
        return
    each = [one.flatten(1 if run.members else 0).sum(-1) for one in gone]
    everything = sum(each[1:], each[0])
    if between is not None:
        everything = between.sum(everything)
    for row, one in zip(rows, _listed(everything), strict=True):
        if sites or one:  # a member without a mask has a row as if it were alone
            row[name] = one / attachment.total(model)


def _check_finite(value: Tensor, run: Stage, epoch: int, configs: Sequence[Config]) -> None:
    if bool(torch.isfinite(value).all()):
        return
    k, bad = next((k, v) for k, v in enumerate(_listed(value)) if not math.isfinite(v))
    who = f"of member {k} " if run.members else ""
    raise ValueError(
        f"the loss {who}became {bad} in epoch {epoch + 1} of stage {run.stage!r} "
        f"(lr {configs[k].lr}, gate_lr {configs[k].gate_lr}); "
        "use a smaller learning rate, or check the data for NaN"
    )


def in_step(one: Config, other: Config) -> bool:
    """Whether two models with these configs can be trained as one population."""
    same = all(getattr(one, name) == getattr(other, name) for name in _SHARED)
    return same and (one.gate_lr is None) == (other.gate_lr is None) and not (one.samples or one.patience)


def check_population(configs: Sequence[Config]) -> None:
    """Refuses configs that cannot be trained in step with each other."""
    for name in _SHARED:
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


def _check_split(data: Data, config: Config) -> None:
    """Refuses what several ranks cannot take their parts of."""
    if not isinstance(data, DataLoader):
        ranks.check_batch(config.batch_size)
        return
    if data.batch_size is not None:
        ranks.check_batch(data.batch_size)
    if ranks.world() > 1 and isinstance(data.sampler, DistributedSampler):
        raise ValueError(
            f"the DataLoader has a DistributedSampler, which gives each of {ranks.world()} ranks other batches; give a "
            "plain one: all ranks read the same batch, and each takes its part"
        )


def _identity(model: nn.Module, configs: Sequence[Config], run: Stage, seeds: Sequence[int]) -> str:
    """A hash of all that the outcome of a stage follows from; refuses when the ranks do not hold the same."""
    ranks.barrier()
    content = {
        "stage": run.stage,
        # Without the means of execution: a run may go on on another device.
        "config": [config.identity() for config in configs],
        "seed": list(seeds),
        "model": _together(checkpoint.state(model)),
        "trainable": [n for n, p in model.named_parameters() if p.requires_grad],
        "masks": [_together(mask) for _, mask in weights.noted_masks(model)],
        "samplers": [
            [s.mapping, s.coupling, s.estimator, s.beta, s.seed.tolist(), s.step.tolist()]
            for s in (site.sampler for site in attachment.sites(model))
        ],
        **run.identity,
    }
    data, masks, state, prior = ("seen", "labels"), ("masks", "samplers"), ("model",), ("prior",)
    rest = [key for key in content if key not in (*data, *masks, *state, *prior)]
    ranks.require_equal(
        {
            "data": (_hash(content, data), "give every rank all of the data: each takes its part of every batch"),
            "masks": (_hash(content, masks), "make them from the same scores and seed on every rank"),
            "weights": (_hash(content, state), "start every rank from the same weights"),
            "prior": (_hash(content, prior), "give every rank the same prior"),
            "settings": (_hash(content, rest), "call it with the same arguments on every rank"),
        }
    )
    return _hash(content, list(content))


def _together(tensors: dict[str, Tensor]) -> str:
    """A hash of tensors; where each rank has its rows, of all of them."""
    if any(map(is_sharded, tensors.values())):
        return " ".join(ranks.gathered(digest(tensors, rows=local)))
    return digest(tensors)


def _hash(content: dict[str, Any], keys: Sequence[str]) -> str:
    own = {key: content[key] for key in keys if key in content}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def groups(model: nn.Module, configs: Sequence[Config], *, rest: bool) -> list[Group]:
    """Parameter groups: weights (and the rest, when it is trained), gates, log std; empty ones are left out."""
    sites = attachment.sites(model)
    if sites:
        for config in configs:
            check_rates(config)
    if len({config.gate_lr is None for config in configs}) > 1:
        raise ValueError(
            "gate_lr is None for some members of the population and a number for others; give 0.0 to those that are "
            "not to train their gates"
        )
    plain = [site.mean for site in sites] + (attachment.rest_parameters(model) if rest else [])
    gates = [site.gate for site in sites] if configs[0].gate_lr is not None else []
    stds = [site.log_std for site in sites if site.log_std is not None]
    momentum, none = [config.momentum for config in configs], [0.0] * len(configs)
    widths = [config.lr if config.std_lr is None else config.std_lr for config in configs]
    found = [
        Group(plain, [config.lr for config in configs], momentum, [config.weight_decay for config in configs], True),
        Group(gates, [float(config.gate_lr or 0.0) for config in configs], momentum, none, False),
        Group(stds, widths, momentum, none, True),
    ]
    return [group for group in found if group.params]


def check_rates(config: Config) -> None:
    """Refuses to train stochastic masks with learning rates that are all 0."""
    if config.epochs and not (config.lr or config.gate_lr or config.std_lr):
        raise ValueError(
            f"lr is {config.lr} and gate_lr is {config.gate_lr}, so neither weights nor gates would change; "
            "give gate_lr= to train the gates alone"
        )
