"""One step of training as work on tensors alone: on a GPU the host never waits, and a CUDA graph can replay it."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import philox
from pacprune.data.batches import batches, crop_flip, portions, size, tensors
from pacprune.distributed import ranks, sharded
from pacprune.masking import attachment, masks, weights
from pacprune.training import budget, estimators
from pacprune.training.budget import Budget
from pacprune.training.config import EXECUTIONS, MASKS, Config
from pacprune.training.optim import Group, Optimizer
from pacprune.types import Data

_WARM = 3
"""Steps before a capture: libraries choose their algorithms and the optimiser makes its state."""


@dataclass(frozen=True)
class Stage:
    """What tells one stage from another in the shared loop. A population's losses have one number per member."""

    stage: str
    objective: Callable[[Tensor, Tensor], Tensor]
    groups: list[Group]
    enter: Callable[[], Any]
    budgets: Sequence[Budget] | None
    validate: Callable[[], list[float]] | None
    identity: dict[str, Any]
    members: bool = False
    """Whether the model is a population, also one of a single member."""
    after: Callable[[Optimizer], None] | None = None
    """Called after every optimiser step."""
    bound: Callable[[Tensor], Tensor] | None = None
    """Made of the objective's mean over a micro-batch, of all ranks together: what is not linear in it."""

    def plan(self) -> Any:
        """The budgets as budget.py takes them: one, or one per member."""
        assert self.budgets is not None
        return list(self.budgets) if self.members else self.budgets[0]


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a micro-batch: its number of examples, and what its mean counts for there and in the batch."""

    size: int
    share: float
    weight: float


class Step:
    """One optimiser step of a stage.

    Of several ranks, each takes its part of every micro-batch, and the weighted gradients are summed before anything is
    made of them, so that all ranks take the same step to the bit. `value` and `total` are then this rank's part.

    Everything that changes from step to step without being computed lies in `clock`: a row per group with the learning
    rates, then what fades of the gates' start, and the budget's density and sharpness; a column per member. An epoch's
    clocks are made in advance.
    """

    def __init__(
        self, model: nn.Module, configs: Sequence[Config], run: Stage, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.model, self.configs, self.run, self.device = model, configs, run, device
        self.config, self.sites = configs[0], attachment.sites(model)
        shape = (len(configs),) if run.members else ()
        self.clock = torch.zeros(len(run.groups) + 3, *shape, device=device)
        self.value = torch.zeros(shape, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.value)
        self.orders = orders(configs, seeds)
        self.own = len(self.orders) > 1
        alike = not run.members or len({_rates(config) for config in configs}) == 1
        for row, group in zip(self.clock, run.groups, strict=False):
            group.rate = row[0] if alike and run.members else row  # one rate for all: one launch for all parameters
        self.optimizer = Optimizer(self.config.optimizer, run.groups)
        self.control = "none" if run.budgets is None else run.budgets[0].control
        fades = any(plan.fade for plan in run.budgets or ())
        # Taken before a checkpoint is read, whose gates have come further.
        self.start = [sharded.local(site.gate.detach()).clone() for site in self.sites] if fades else []
        self.cold = 2
        self.graph: torch.cuda.CUDAGraph | None = None
        captured = EXECUTIONS[self.config.execution].graph and device.type == "cuda" and ranks.world() == 1
        self.left = _WARM if captured else -1
        """Steps until the capture; below 0 there is none."""
        params = [p for group in run.groups for p in group.params]
        self.gradients = ranks.Gradients([p for p in params if not sharded.is_sharded(p)])
        self.sharded = sharded.some(params)
        self.count = 0
        """How many examples the present batch has, over all ranks."""
        self._plans: dict[int, tuple[Tensor | None, list[_Piece]]] = {}

    def reader(self, data: Data) -> Callable[[int], Iterator[Any]]:
        """A function of the epoch that gives its batches: indices of tensors on the device, or (x, y) of a loader."""
        pair = tensors(data)
        if pair is None:
            if self.run.members:
                raise ValueError(
                    f"a population needs data that all members can read at once, not a {type(data).__name__}; "
                    "give (x, y) tensors or a Part"
                )
            (seed, first), size_ = self.orders[0], self.config.batch_size
            return lambda epoch: batches(data, size_, device=self.device, order=_order(size(data), seed, first + epoch))
        self.x, self.y = (t.to(self.device) for t in pair)  # once, whole: an epoch has no copies in it
        n = len(self.x)

        def read(epoch: int) -> Iterator[Tensor]:
            order = torch.stack([_order(n, seed, first + epoch) for seed, first in self.orders]).to(self.device)
            # `portions` looks at the first dimension; an index is [n], or [K, n] when each member has its own order.
            for part in portions(order.T, self.config.batch_size):
                yield part.T if self.own else part[:, 0]

        return read

    def begin(self, epoch: int, per_epoch: int) -> None:
        """Makes the clocks, and the augmentation's random words, of an epoch."""
        self.steps = self.config.epochs * per_epoch
        shares = [(epoch * per_epoch + number) / self.steps for number in range(per_epoch)]
        plain = {_rates(config)[1:]: config for config in self.configs}
        factors = {key: [config.factor(share) for share in shares] for key, config in plain.items()}
        ones = [1.0] * per_epoch
        table = []
        for group in self.run.groups:
            of = [factors[_rates(config)[1:]] if group.scheduled else ones for config in self.configs]
            table.append([[base * f for f in factor] for base, factor in zip(group.base, of, strict=True)])
        if self.sites and self.run.budgets is not None:
            here = sum(site.gate.numel() for site in self.sites) // len(self.configs)
            sizes = {"size": here, "total": attachment.total(self.model)}
            plans = self.run.budgets
            before = [max(0.0, share - 1 / self.steps) for share in shares]
            table.append([[b.faded(t) - b.faded(t0) for t0, t in zip(before, shares, strict=True)] for b in plans])
            table.append([[masks.density(1 - b.density(share), **sizes) for share in shares] for b in plans])
            table.append([[b.sharpness(share) for share in shares] for b in plans])
        else:
            table += [[ones] * len(self.configs)] * 3
        found = torch.tensor(table, dtype=torch.float64).permute(2, 0, 1)  # [steps, rows, members]
        self.rates = found[:, 0].tolist()
        """The learning rates of the members' weights at every step of the epoch."""
        self.table = (found if self.run.members else found[..., 0]).to(self.device, torch.float32).contiguous()
        self.first = epoch * per_epoch
        if self.config.augment:
            steps = torch.arange(self.first, self.first + per_epoch, device=self.device)
            # A last example may join the batch before it.
            most = self.config.batch_size + 1
            each = [self._words(seed, first * per_epoch + steps, most) for seed, first in self.orders]
            self.words = torch.stack(each, dim=1) if self.own else each[0]

    def __call__(self, number: int, examples: Any) -> int:
        """Takes step `number` of the epoch; returns on how many examples."""
        self.clock.copy_(self.table[number])
        if self.control in budget.PLAIN_CONTROLS:
            budget.move_masks_(self.model, self.run.plan(), self.first + number, self.steps)
        if not isinstance(examples, Tensor):
            x, y = examples
            self.count = len(x)
            (seed, first), per_epoch = self.orders[0], self.steps // self.config.epochs
            now = first * per_epoch + self.first + number
            word = self._words(seed, now, self.count) if self.config.augment else None
            own = self._plan()[0]
            if own is not None:
                x, y, word = x[own], y[own], None if word is None else word[own]
            self._take(x, y, word)
            return self.count
        self.count = examples.shape[-1]
        word = self.words[number, ..., : self.count] if self.config.augment else None
        own = self._plan()[0]
        if own is not None:
            examples, word = examples[..., own], None if word is None else word[..., own]
        if self.left >= 0 and self.count == self.config.batch_size:
            self._replay(examples, word)
        else:
            self._take(self.x[examples], self.y[examples], word)
        return self.count

    def _plan(self) -> tuple[Tensor | None, list[_Piece]]:
        """Which examples of the batch are this rank's (None: all), and how they lie in its micro-batches."""
        count = self.count
        if count not in self._plans:
            pieces, own, world = [], [], ranks.world()
            for micro in portions(torch.arange(count), math.ceil(count / self.config.accumulate)):
                low, high = ranks.part(len(micro))
                share = (high - low) / len(micro)
                if len(micro) < 2 * world:  # too few to split, since BatchNorm cannot train on one: all do all of it
                    low, high, share = 0, len(micro), 1 / world
                own.append(micro[low:high])
                pieces.append(_Piece(high - low, share, share * len(micro) / count))
            self._plans[count] = None if world == 1 else torch.cat(own).to(self.device), pieces
        return self._plans[count]

    def _words(self, seed: int, step: Tensor | int, count: int) -> Tensor:
        return philox.words(count, seed=seed, step=step, stream=philox.AUGMENT, device=self.device)

    def _replay(self, index: Tensor, word: Tensor | None) -> None:
        """The step by its graph, which is captured after a few plain ones; where it cannot be, plain ones go on."""
        if self.graph is None and self.left > 0:
            self.left -= 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._take(self.x[index], self.y[index], word)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self.graph is None:
            self.index, self.word = index.clone(), None if word is None else word.clone()
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad()
            try:
                with torch.cuda.graph(graph):
                    self._take(self.x[self.index], self.y[self.index], self.word)
            except RuntimeError as failure:
                warnings.warn(
                    f"the step could not be captured as a CUDA graph ({str(failure).partition(chr(10))[0]}); "
                    "training goes on without one",
                    stacklevel=2,
                )
                self.left = -1
                self._take(self.x[index], self.y[index], word)
                return
            self.graph = graph
        self.index.copy_(index)
        if self.word is not None and word is not None:
            self.word.copy_(word)
        self.graph.replay()

    def _take(self, x: Tensor, y: Tensor, word: Tensor | None) -> None:
        """One optimiser step on (this rank's part of) a batch; leaves its mean loss in `value` and adds to `total`."""
        model, run, config = self.model, self.run, self.config
        along = 1 if self.own else 0
        if word is not None:
            x = self._augmented(x, word)
        if config.amp and x.ndim - along == 4:
            x = _channels_last(x)
        self.optimizer.zero_grad()
        if self.sites and run.budgets is not None:
            # The first two may have far to go; later ones follow the one before without waiting for the device.
            self._fade()
            look = self.device.type == "cpu" or self.cold > 0
            budget.hold_(model, self.control, self.clock[-2], self.clock[-1], look=look)
            self.cold = max(0, self.cold - 1)
        # With feedback, masked weights get the gradient that they have at zero, and keep what they learn from it.
        with weights.pruned(model) if self.control == "feedback" else nullcontext(), self._own_draws():
            value = self._gradients(x, y, along)
        self.gradients.sum_()
        if self.sites and run.budgets is not None and self.control == "lagrangian":
            budget.penalty(model, run.plan(), self.clock[-2]).sum().backward()
        if config.clip is not None:
            self._clip(config.clip)
        self.optimizer.step()
        if run.after is not None:
            run.after(self.optimizer)
        if self.control != "feedback":
            weights.enforce_mask(model)
        self.value.copy_(value)
        self.total.add_(value * self.count)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """With independent masks, draws that no other rank makes, while this lasts."""
        apart = ranks.rank() * (2**32 // ranks.world()) if MASKS[self.config.masks] else 0
        steps = [site.sampler.step for site in self.sites] if apart else []
        for step in steps:
            step.add_(apart)
        try:
            yield
        finally:
            for step in steps:
                step.sub_(apart)

    def _gradients(self, x: Tensor, y: Tensor, along: int) -> Tensor:
        """Adds the gradients of a batch, one micro-batch after another; returns its mean loss."""
        model, run, config = self.model, self.run, self.config
        pieces = self._plan()[1]
        value, sizes = torch.zeros_like(self.value), [piece.size for piece in pieces]
        for piece, part_x, part_y in zip(pieces, x.split(sizes, along), y.split(sizes, along), strict=True):
            weight = piece.weight
            if self.sites:
                attachment.resample_(model)

            def forward(part_x: Tensor = part_x, part_y: Tensor = part_y, share: float = piece.share) -> Tensor:
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=config.amp):
                    found = run.objective(part_x, part_y)
                    return found if run.bound is None else run.bound(ranks.mean(found, share))

            if self.sites and config.samples:
                value += estimators.algorithm1_(
                    model, lambda weight=weight, forward=forward: weight * forward(), samples=config.samples
                )
            else:
                found = forward()
                with self.gradients.overlapped() if piece is pieces[-1] else nullcontext():
                    # fully_shard takes the mean over ranks of what has to be summed.
                    (weight * (ranks.world() if self.sharded else 1) * found).sum().backward()
                value += weight * found.detach()
        return value

    @torch.no_grad()
    def _fade(self) -> None:
        """Takes away what is due of the gates' start."""
        for site, start in zip(self.sites, self.start, strict=False):
            share = self.clock[-3].reshape(-1, *[1] * (start.ndim - 1)) if self.run.members else self.clock[-3]
            sharded.local(site.gate.detach()).addcmul_(start, share, value=-1)

    def _augmented(self, x: Tensor, word: Tensor) -> Tensor:
        if x.ndim != (5 if self.own else 4):
            shape = tuple(x.shape[1:] if self.own else x.shape)
            raise ValueError(
                f"augment=True needs images of shape (n, channels, height, width), but x is {shape}; set augment=False"
            )
        return crop_flip(x, word, channels_last=self.config.amp)

    def _clip(self, most: float) -> None:
        """Scales every member's gradients so that their norm is at most this."""
        found = [p.grad for group in self.run.groups for p in group.params if p.grad is not None]
        apart, grads = 1 if self.run.members else 0, [sharded.local(g) for g in found]
        norm = torch.stack([g.reshape(*g.shape[:apart], -1).float().norm(dim=-1) for g in grads]).norm(dim=0)
        if self.sharded:
            norm = sharded.total(norm.square(), found).sqrt()
        scale = (most / (norm + 1e-6)).clamp_max(1.0)
        for g in grads:
            g.mul_(scale.reshape(-1, *[1] * (g.ndim - 1)) if apart else scale)


def orders(configs: Sequence[Config], seeds: Sequence[int]) -> list[tuple[int, int]]:
    """(seed, first epoch) of the order of the data: one for all members of a population, or one each."""
    each = [(seed, config.first_epoch) for config, seed in zip(configs, seeds, strict=True)]
    return each if len(set(each)) > 1 else each[:1]


def _rates(config: Config) -> tuple[Any, ...]:
    """All that a member's learning rates follow from; what follows the first entry decides the schedule alone."""
    own = (config.lr, config.gate_lr, config.std_lr, config.momentum, config.weight_decay)
    return own, config.schedule, config.warmup, config.span


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
