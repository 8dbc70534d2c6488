"""One step of training as work on tensors alone: on a GPU the host never waits, and a CUDA graph can replay it."""

import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import philox
from pacprune.data.batches import (
    batches,
    crop_flip,
    endless,
    is_pair,
    is_stream,
    isolated_rng,
    pieces,
    portions,
    rows,
    size,
    taken,
    tensors,
)
from pacprune.distributed import across, is_sharded, local, ranks
from pacprune.masking import attachment, weights
from pacprune.masking.redrawn import redrawn
from pacprune.training import budget, estimators
from pacprune.training.budget import Budget
from pacprune.training.config import EXECUTIONS, MASKS, Config
from pacprune.training.controls import NUMBERS, Stepper
from pacprune.training.optim import Group, Optimizer, rule_name
from pacprune.types import Data


@dataclass(frozen=True)
class Stage:
    """What tells one stage from another in the shared loop. A population's losses have one number per member."""

    name: str
    objective: Callable[[Any], Tensor]
    """batch -> its mean loss."""
    groups: list[Group]
    set_modes: Callable[[], Any]
    """Called before every epoch: which modules are in training mode."""
    budgets: Sequence[Budget] | None
    stepper: Stepper
    """What keeps or moves the masks of a plain network; it does nothing for a dense or an attached one."""
    validate: Callable[[], list[float]] | None
    identity: dict[str, Any]
    members: bool = False
    """Whether the model is a population, also one of a single member."""
    after: Callable[[Optimizer], None] | None = None
    """Called after every optimiser step."""
    bound: Callable[[Tensor], Tensor] | None = None
    """What is trained on, as a function of the objective's mean over a micro-batch; None: that mean itself.

    It need not be linear in the mean, which is therefore taken over all ranks first.
    """

    def budget_per_member(self) -> Any:
        """The budgets as budget.py takes them: one, or one per member."""
        assert self.budgets is not None
        return list(self.budgets) if self.members else self.budgets[0]


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a micro-batch.

    Args:
        size: How many examples it has.
        share: The weight of their mean loss in the mean loss of the micro-batch.
        weight: The weight of their mean loss in the mean loss of the whole batch.
    """

    size: int
    share: float
    weight: float


class Step:
    """One optimiser step of a stage.

    Of several ranks, each takes its part of every micro-batch, and the weighted gradients are summed before anything is
    made of them, so that all ranks take the same step to the bit. `value` and `total` are then this rank's part.

    Everything that changes from step to step without being computed lies in `clock`: a row per group with the learning
    rates, then the NUMBERS of a budget: the scores' noise, what fades of their start, density and sharpness. It has a
    column per member. An epoch's clocks are made in advance, and the model's attached weights are listed once.
    """

    def __init__(
        self, model: nn.Module, configs: Sequence[Config], stage: Stage, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.model, self.configs, self.stage, self.device, self.config = model, configs, stage, device, configs[0]
        self.sites, self.stepper = attachment.sites(model), stage.stepper
        self.between = attachment.between_ranks(self.sites)
        self.redraws = any(site.sampler.pattern for site in self.sites) and self.config.execution == "eager"
        """Whether layers need not keep their draws."""
        shape = (len(configs),) if stage.members else ()
        self.clock = torch.zeros(len(stage.groups) + NUMBERS, *shape, device=device)
        self.value = torch.zeros(shape, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.value)
        self.orders = orders(configs, seeds)
        self.separate = len(self.orders) > 1
        """Whether every member reads the data in an order of its own."""
        alike = not stage.members or len({_rates(config) for config in configs}) == 1
        for row, group in zip(self.clock, stage.groups, strict=False):
            group.rate = row[0] if alike and stage.members else row  # one rate for all: one launch for all parameters
        self.optimizer = Optimizer(rule_name(self.config.optimizer), stage.groups)
        self.holds = bool(self.sites) and stage.budgets is not None
        """Whether a budget holds the gates."""
        self.control = stage.budgets[0].control if stage.budgets else "none"
        self.ratios = budget.layer_ratios(self.sites, stage.budgets or ()) if self.holds else None
        fades = self.holds and any(entry.fade for entry in stage.budgets or ())
        # Taken before a checkpoint is read, whose gates have come further.
        self.start = [site.local_gate.detach().clone() for site in self.sites] if fades else []
        self.cold = 2
        captured = EXECUTIONS[self.config.execution].graph and device.type == "cuda" and ranks.world() == 1
        self.capture = _Capture() if captured else None
        params = [p for group in stage.groups for p in group.params]
        self.across = across(params)
        plain = [p for p in params if not is_sharded(p)]
        self.exchange = ranks.Gradients(plain) if ranks.world() > 1 else None
        self.count = 0
        """How many examples the present batch has, over all ranks."""
        self._rank_parts: dict[int, tuple[Tensor | None, list[_Piece]]] = {}

    @property
    def sharded(self) -> bool:
        """Whether fully_shard has cut the model into rows."""
        return self.across is not None

    def reader(self, data: Data) -> Callable[[int], Iterator[Any]]:
        """A function of the epoch that gives its batches: indices of tensors on the device, or what a loader gives."""
        pair = tensors(data)
        self.indexed = pair is not None
        if pair is None:
            if self.stage.members:
                raise ValueError(
                    f"a population needs data that all members can read at once, not a {type(data).__name__}; "
                    "give (x, y) tensors or a Part"
                )
            (seed, first), size_ = self.orders[0], self.config.batch_size
            if is_stream(data):
                return self._stream_reader(data)
            return lambda epoch: batches(data, size_, device=self.device, order=_order(size(data), seed, first + epoch))
        self.x, self.y = (t.to(self.device) for t in pair)  # once, whole: an epoch has no copies in it
        n = len(self.x)

        def read(epoch: int) -> Iterator[Tensor]:
            order = torch.stack([_order(n, seed, first + epoch) for seed, first in self.orders]).to(self.device)
            # `portions` looks at the first dimension; an index is [n], or [K, n] when each member has its own order.
            for part in portions(order.T, self.config.batch_size):
                yield part.T if self.separate else part[:, 0]

        return read

    def _stream_reader(self, data: Data) -> Callable[[int], Iterator[Any]]:
        """A function of the epoch that goes on where the epoch before has left the stream."""
        stream, steps = endless(data, self.config.batch_size, device=self.device), self.config.steps_per_epoch or 0
        epochs_read = 0

        def read(epoch: int) -> Iterator[Any]:
            nonlocal epochs_read
            with isolated_rng(self.device, data):
                for _ in range((epoch - epochs_read) * steps):  # a run that goes on has read these before
                    next(stream)
            epochs_read = epoch + 1
            return itertools.islice(stream, steps)

        return read

    def begin(self, epoch: int, per_epoch: int) -> None:
        """Makes the clocks, and the augmentation's random words, of an epoch."""
        self.steps = self.config.epochs * per_epoch
        shares = [(epoch * per_epoch + number) / self.steps for number in range(per_epoch)]
        rows = self._rate_rows(shares) + self._budget_rows(shares)
        table = torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)  # [steps, rows, members]
        self.rates = table[:, 0].tolist()
        """The learning rates of the members' weights at every step of the epoch."""
        self.table = (table if self.stage.members else table[..., 0]).to(self.device, torch.float32).contiguous()
        self.first = epoch * per_epoch
        if self.config.augment:
            steps = torch.arange(self.first, self.first + per_epoch, device=self.device)
            # A last example may join the batch before it.
            most = self.config.batch_size + 1
            words = [self._words(seed, first * per_epoch + steps, most) for seed, first in self.orders]
            self.words = torch.stack(words, dim=1) if self.separate else words[0]

    def _rate_rows(self, shares: list[float]) -> list[list[list[float]]]:
        """By group, the learning rates of every member at every step."""
        schedules = {_rates(config)[1:]: config for config in self.configs}
        factors = {key: [config.factor(share) for share in shares] for key, config in schedules.items()}
        constant = [1.0] * len(shares)
        rows = []
        for group in self.stage.groups:
            by_member = [factors[_rates(config)[1:]] if group.scheduled else constant for config in self.configs]
            rows.append([[base * f for f in factor] for base, factor in zip(group.base, by_member, strict=True)])
        return rows

    def _budget_rows(self, shares: list[float]) -> list[list[list[float]]]:
        """NUMBERS rows, of every member at every step."""
        if self.stage.budgets is None:
            return [[[1.0] * len(shares)] * len(self.configs)] * NUMBERS
        held = [site.gate for site in self.sites] or self.stepper.subject.values
        size = sum(tensor.numel() for tensor in held) // len(self.configs)
        total = weights.noted_total(self.model)
        by_member = [entry.numbers(shares, self.steps, size, total) for entry in self.stage.budgets]
        return [list(rows) for rows in zip(*by_member, strict=True)]

    def __call__(self, number: int, examples: Any) -> int:
        """Takes step `number` of the epoch; returns on how many examples."""
        self.clock.copy_(self.table[number])
        step = self.first + number
        moving = not self.stepper.fixed
        self.stepper.prepare(step, self.steps)
        if moving and self.stepper.fixed and self.capture is not None:  # from now on steps are other ones
            self.capture = _Capture()
        (self._take_indexed if self.indexed else self._take_loaded)(number, examples)
        self.stepper.conclude(step + 1, self.steps)  # here, since a checkpoint holds no gradients
        return self.count

    def _take_loaded(self, number: int, batch: Any) -> None:
        """The step on a batch that a loader gave."""
        self.count = rows(batch)
        (seed, first), per_epoch = self.orders[0], self.steps // self.config.epochs
        step = first * per_epoch + self.first + number
        word = self._words(seed, step, self.count) if self.config.augment else None
        rank_rows = self._rank_part()[0]
        if rank_rows is not None:
            batch, word = taken(batch, rank_rows), None if word is None else word[rank_rows]
        self._take(batch, word)

    def _take_indexed(self, number: int, index: Tensor) -> None:
        """The step on examples of the tensors that lie on the device."""
        self.count = index.shape[-1]
        word = self.words[number, ..., : self.count] if self.config.augment else None
        rank_rows = self._rank_part()[0]
        if rank_rows is not None:
            index, word = index[..., rank_rows], None if word is None else word[..., rank_rows]
        if self.capture is not None and self.count == self.config.batch_size:
            self.capture(self, index, word)
        else:
            self.take_index(index, word)

    def take_index(self, index: Tensor, word: Tensor | None) -> None:
        """The step on these examples, operation by operation."""
        self._take((self.x[index], self.y[index]), word)

    def _rank_part(self) -> tuple[Tensor | None, list[_Piece]]:
        """Which examples of the batch are this rank's (None: all), and how they lie in its micro-batches."""
        count = self.count
        if count not in self._rank_parts:
            parts, rank_rows, world = [], [], ranks.world()
            for micro in portions(torch.arange(count), math.ceil(count / self.config.accumulate)):
                low, high = ranks.part(len(micro))
                share = (high - low) / len(micro)
                if len(micro) < 2 * world:  # too few to split, since BatchNorm cannot train on one: all do all of it
                    low, high, share = 0, len(micro), 1 / world
                rank_rows.append(micro[low:high])
                parts.append(_Piece(high - low, share, share * len(micro) / count))
            self._rank_parts[count] = None if world == 1 else torch.cat(rank_rows).to(self.device), parts
        return self._rank_parts[count]

    def _words(self, seed: int, step: Tensor | int, count: int) -> Tensor:
        return philox.words(count, seed=seed, step=step, stream=philox.AUGMENT, device=self.device)

    def _take(self, batch: Any, word: Tensor | None) -> None:
        """One optimiser step on (this rank's part of) a batch; leaves its mean loss in `value` and adds to `total`."""
        stage, config = self.stage, self.config
        along = 1 if self.separate else 0
        if is_pair(batch):
            x, y = batch
            x = x if word is None else self._augmented(x, word)
            batch = (_channels_last(x) if config.amp and isinstance(x, Tensor) and x.ndim - along == 4 else x), y
        elif word is not None:
            raise ValueError(f"augment=True needs batches (x, y), not a {type(batch).__name__}; set augment=False")
        self.optimizer.zero_grad()
        if self.holds:
            self._hold_budget()
        self.stepper.show(self.clock[-NUMBERS:])
        with self._rank_samples():
            value = self._gradients(batch, along)
        if self.exchange is not None:
            self.exchange.sum_()
        penalty = budget.GATE_CONTROLS[self.control].penalty if self.holds else None
        if penalty is not None:
            options = {"between": self.between, "ratios": self.ratios}
            penalty(self.sites, stage.budget_per_member(), self.clock[-2], **options).sum().backward()
        self.stepper.hide()
        if config.clip is not None:
            self._clip(config.clip)
        self.optimizer.step()
        if stage.after is not None:
            stage.after(self.optimizer)
        self.stepper.settle()
        self.value.copy_(value)
        self.total.add_(value * self.count)

    def _hold_budget(self) -> None:
        """Brings the gates to the budget of this step."""
        self._fade()
        # The first two may have far to go; later ones follow the one before without waiting for the device.
        wait = self.device.type == "cpu" or self.cold > 0
        options = {"wait": wait, "between": self.between, "ratios": self.ratios}
        budget.hold_(self.sites, self.control, self.clock[-2], self.clock[-1], **options)
        self.cold = max(0, self.cold - 1)

    @contextmanager
    def _rank_samples(self) -> Iterator[None]:
        """With independent masks, samples that no other rank has, while this lasts."""
        offset = ranks.rank() * (2**32 // ranks.world()) if MASKS[self.config.masks].by_rank else 0
        steps = [site.sampler.step for site in self.sites] if offset else []
        for step in steps:
            step.add_(offset)
        try:
            yield
        finally:
            for step in steps:
                step.sub_(offset)

    def _gradients(self, batch: Any, along: int) -> Tensor:
        """Adds the gradients of a batch, one micro-batch after another; returns its mean loss."""
        shares = self._rank_part()[1]
        value, sizes = torch.zeros_like(self.value), [piece.size for piece in shares]
        for piece, part in zip(shares, pieces(batch, sizes, along), strict=True):
            if self.sites:
                attachment.advance_(self.sites)
            if self.sites and self.config.samples:
                weighted = partial(self._weighted_loss, part, piece)
                value += estimators.algorithm1_(self.model, weighted, samples=self.config.samples)
                continue
            loss = self._loss(part, piece)
            last = piece is shares[-1]
            with self.exchange.overlapped() if last and self.exchange is not None else nullcontext():
                # fully_shard takes the mean over ranks of what has to be summed.
                (piece.weight * (ranks.world() if self.sharded else 1) * loss).sum().backward()
            value += piece.weight * loss.detach()
        return value

    def _loss(self, batch: Any, piece: _Piece) -> Tensor:
        """The mean loss of this part of a micro-batch; the bound, where that is trained on, is of all ranks' mean."""
        saving = redrawn() if self.redraws else nullcontext()
        with saving, torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.amp):
            loss = self.stage.objective(batch)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss has no gradient in what is trained; compute it from the network's outputs by torch "
                    "alone, without argmax, .item(), .detach() or numpy"
                )
            return loss if self.stage.bound is None else self.stage.bound(ranks.mean(loss, piece.share))

    def _weighted_loss(self, batch: Any, piece: _Piece) -> Tensor:
        """What this part of a micro-batch adds to the loss of the batch."""
        return piece.weight * self._loss(batch, piece)

    @torch.no_grad()
    def _fade(self) -> None:
        """Takes away what is due of the gates' start."""
        for site, start in zip(self.sites, self.start, strict=False):
            share = self.clock[-3].reshape(-1, *[1] * (start.ndim - 1)) if self.stage.members else self.clock[-3]
            site.local_gate.detach().addcmul_(start, share, value=-1)

    def _augmented(self, x: Any, word: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim != (5 if self.separate else 4):
            shape = tuple(x.shape[1:] if self.separate else x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"augment=True needs images of shape (n, channels, height, width), but x is {shape}; set augment=False"
            )
        return crop_flip(x, word)

    def _clip(self, most: float) -> None:
        """Scales every member's gradients so that their norm is at most this; that of what is not trained is zero."""
        # Those with a rule of their own have a scale of their own.
        groups = [group for group in self.stage.groups if not isinstance(group.optimizer, str)]
        grads = [local(p.grad) for group in groups for p in group.params if p.grad is not None]
        members = 1 if self.stage.members else 0
        norm = torch.stack([g.reshape(*g.shape[:members], -1).float().norm(dim=-1) for g in grads]).norm(dim=0)
        if self.across is not None:
            norm = self.across.sum(norm.square()).sqrt()
        scale = (most / (norm + 1e-6)).clamp_max(1.0)
        for g in grads:
            g.mul_(scale.reshape(-1, *[1] * (g.ndim - 1)) if members else scale)


class _Capture:
    """The step as a CUDA graph, which is captured after a few plain steps; where it cannot be, plain ones go on."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_up = 3
        """Plain steps before the capture: libraries choose their algorithms and the optimiser makes its state."""
        self.failed = False

    def __call__(self, step: Step, index: Tensor, word: Tensor | None) -> None:
        """The step on these examples."""
        if self.warm_up > 0:
            self.warm_up -= 1
            self._beside(step, index, word)
            return
        if self.graph is None and not self.failed:
            self._capture(step, index, word)
        if self.graph is None:
            step.take_index(index, word)
            return
        self.index.copy_(index)
        if self.word is not None and word is not None:
            self.word.copy_(word)
        self.graph.replay()

    def _beside(self, step: Step, index: Tensor, word: Tensor | None) -> None:
        """A plain step on a stream of its own, as torch asks for before a capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.take_index(index, word)
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, step: Step, index: Tensor, word: Tensor | None) -> None:
        self.index, self.word = index.clone(), None if word is None else word.clone()
        graph = torch.cuda.CUDAGraph()
        step.optimizer.zero_grad()
        try:
            with torch.cuda.graph(graph):
                step.take_index(self.index, self.word)
        except RuntimeError as failure:
            warnings.warn(
                f"the step could not be captured as a CUDA graph ({str(failure).partition(chr(10))[0]}); "
                "training goes on without one",
                stacklevel=3,
            )
            self.failed = True
            return
        self.graph = graph


def orders(configs: Sequence[Config], seeds: Sequence[int]) -> list[tuple[int, int]]:
    """(seed, first epoch) of the order of the data: one for all members of a population, or one each."""
    by_member = [(seed, config.first_epoch) for config, seed in zip(configs, seeds, strict=True)]
    return by_member if len(set(by_member)) > 1 else by_member[:1]


def _rates(config: Config) -> tuple[Any, ...]:
    """All that a member's learning rates follow from; what follows the first entry decides the schedule alone."""
    rates = (config.lr, config.gate_lr, config.std_lr, config.momentum, config.weight_decay)
    return rates, config.schedule, config.warmup, config.span


def _channels_last(x: Tensor) -> Tensor:
    """Images with their channels innermost, the layout that convolutions in bfloat16 are fastest in."""
    if x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    # A population's convolution sees one image with K times the channels: [n, height, width, K, channels] in memory.
    return x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


def _order(n: int, seed: int, epoch: int) -> Tensor:
    """The permutation of an epoch, from (seed, epoch) alone."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
    return torch.randperm(n, generator=torch.Generator().manual_seed(mixed))
