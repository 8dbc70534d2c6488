"""What decides, while a plain network trains, which of its weights count.

The loop of `fit`, and in a user's own loop `pp.Pruner`, tell a control of the moments of a step:

    prepare   before it, on the host: new masks
    show      the weights become those that the network computes with
    convert   after the backward pass: the gradients are those of what is trained
    hide      the weights are as trained again
    settle    after the optimiser's step: pruned weights are zero again
    conclude  after it, on the host

and of the end, `finish`, which leaves the pruned network. Nothing between prepare and conclude waits for the device, so
that a CUDA graph can replay it.

A new control is one class, a function that says at which moments it acts, and one row of CONTROLS.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pacprune import kernels
from pacprune.distributed import Across, across, first_index, is_sharded, like, local
from pacprune.kernels import Law, SampleInputs
from pacprune.masking import masks, patterns, weights
from pacprune.training.optim import Group

if TYPE_CHECKING:
    from pacprune.training.budget import Budget
    from pacprune.training.config import Config

NUMBERS = 4
"""How many numbers a step has for every member: noise, what fades of the scores' start, density and sharpness."""
COUPLING = 4.0
"""How strongly a score follows log|w|: an offset that was learned counts a quarter of it."""
THRESHOLDS = "thresholds"
"""What the logarithms of the layers' thresholds are noted as, in the order of `weights.masked`."""


@dataclass(frozen=True)
class Subject:
    """What a control works on: one model, or the members of a population.

    Args:
        pairs: The weights, each with its mask; what is written into a mask holds from then on.
        names: Their names.
        learned: What the control trains beside the weights, by name, as `weights.learned` has it.
        budgets: One for every member; of a fixed mask, none.
        seeds: Of every member's noise.
        total: D, which sparsity is counted in.
        members: Whether the first dimension of every tensor is K models.
        clean: Whether gradients of pruned weights are to be zero, since something else looks at them.
    """

    pairs: weights.Masked
    names: Sequence[str]
    learned: dict[str, nn.Parameter]
    budgets: "Sequence[Budget]"
    seeds: Sequence[int]
    total: int
    members: bool = False
    clean: bool = False

    @property
    def values(self) -> list[Tensor]:
        """The weights, without gradients, over the same memory."""
        return [weight.detach() for weight, _ in self.pairs]

    @property
    def keeps(self) -> list[Tensor]:
        """The masks."""
        return [keep for _, keep in self.pairs]

    @property
    def between(self) -> Across | None:
        """How to reduce over the ranks that hold the rows; None for a plain model."""
        return across(weight for weight, _ in self.pairs)

    def member(self, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
        """Member k's part of tensors, over the same memory."""
        return [tensor[k] for tensor in tensors] if self.members else list(tensors)

    def layer_ratios(self) -> list[Tensor] | None:
        """What every tensor's sparsity is of that of all, one number per member; None where all are held together."""
        sizes = [weight.numel() // len(self.budgets) for weight, _ in self.pairs]
        layers = [budget.layers for budget in self.budgets]
        shape, device = (len(layers),) if self.members else (), self.pairs[0][0].device
        return masks.layer_ratios(layers, dict(zip(self.names, sizes, strict=True)), shape=shape, device=device)

    def over(self, number: Tensor, tensor: Tensor) -> Tensor:
        """A number per member, in a shape that multiplies the members' tensors; one number as it is."""
        return number.reshape(-1, *[1] * (tensor.ndim - 1)) if self.members else number


def _nothing(*_: Any) -> None:
    """A moment at which a control does not act."""


@dataclass(frozen=True)
class Control:
    """What is done at the moments of a step (see the module), and at the end.

    Args:
        prepare: (step, steps), before that step, on the host.
        show: Makes the weights those of the network; takes the NUMBERS of the step, a row each, or None for the last
            ones.
        convert: (which weights, by number; the factor of a scaled loss or None), makes the gradients those of what is
            trained.
        revert: (which weights) takes `convert` back, so that another backward pass can add to the gradients.
        hide: Makes the weights those that are trained.
        network: What `show` has left in the weights, computed again; None where only `fit` has the control.
        settle: Puts zeros back after the optimiser's step.
        conclude: (step, steps), after so many steps, on the host.
        note: Brings the masks up to date, where steps do not.
        mark: The same while the network is shown.
        finish: Leaves the pruned network: weights and masks, with exactly k kept.
        groups: What is trained beside the weights, with its rates.
        memory: Tensors that a run needs to go on, beside weights, masks and what is learned.
    """

    prepare: Callable[[int, int], None] = _nothing
    show: Callable[[Tensor | None], None] = _nothing
    convert: Callable[[Sequence[int], float | None], None] = _nothing
    revert: Callable[[Sequence[int]], None] = _nothing
    hide: Callable[[], None] = _nothing
    network: Callable[[], list[Tensor]] | None = None
    settle: Callable[[], None] = _nothing
    conclude: Callable[[int, int], None] = _nothing
    note: Callable[[], None] = _nothing
    mark: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    groups: "Callable[[Sequence[Config]], list[Group]]" = lambda configs: []
    memory: Sequence[Tensor] = ()


# --- Masks that stay, and masks of the largest weights.


def fixed(subject: Subject) -> Control:
    """A mask that stays: pruned weights are zero after every step, and without gradients where these are looked at."""
    return Control(
        convert=(lambda *_: clean_gradients_(subject.pairs)) if subject.clean else _nothing,
        network=lambda: _pruned(subject.values, subject.keeps),
        settle=lambda: weights.zero_pruned_(subject.pairs),
    )


def _pruned(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> list[Tensor]:
    """This rank's rows of weights, with zeros where they are pruned, in other memory."""
    return [local(value).masked_fill(~local(keep), 0) for value, keep in zip(values, keeps, strict=True)]


def clean_gradients_(pairs: weights.Masked) -> None:
    """Pruned weights get no gradient."""
    weights.zero_pruned_([(weight.grad, keep) for weight, keep in pairs if weight.grad is not None])


def magnitude(subject: Subject) -> Control:
    """GMP (Zhu & Gupta 2017): every so many steps the largest weights are kept; the others are zero for good."""

    def prepare(step: int, steps: int) -> None:
        for k in _due(subject, step):
            keep_largest_(subject, k, step / steps)
            weights.zero_pruned_(_member_pairs(subject, k))

    still = fixed(subject)
    return replace(still, prepare=prepare, finish=lambda: _prune_finally_(subject))


def feedback(subject: Subject) -> Control:
    """DPF (Lin et al. 2020): pruned weights are zero in the network alone, and its gradient trains them on."""
    rows = [local(value) for value in subject.values]
    trained = [torch.empty_like(row) for row in rows]

    def prepare(step: int, steps: int) -> None:
        for k in _due(subject, step):
            keep_largest_(subject, k, step / steps)

    def show(numbers: Tensor | None) -> None:
        _copy_(trained, rows)
        weights.zero_pruned_(subject.pairs)

    return Control(
        prepare=prepare,
        show=show,
        hide=lambda: _copy_(rows, trained),
        network=lambda: [row.masked_fill(~local(keep), 0) for row, keep in zip(trained, subject.keeps, strict=True)],
        finish=lambda: _prune_finally_(subject),
    )


def _due(subject: Subject, step: int) -> list[int]:
    """The members that have a new mask before this step."""
    return [k for k, budget in enumerate(subject.budgets) if step % budget.period == 0]


def _member_pairs(subject: Subject, k: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(subject.member(subject.values, k), subject.member(subject.keeps, k), strict=True))


def _prune_finally_(subject: Subject) -> None:
    """The mask of the final sparsity, and zeros elsewhere."""
    for k in range(len(subject.budgets)):
        keep_largest_(subject, k, 1.0)
    weights.zero_pruned_(subject.pairs)


@torch.no_grad()
def keep_largest_(subject: Subject, k: int, progress: float) -> None:
    """Member k's masks keep the largest weights at the density of this moment; in place, and waits for the device."""
    budget, pairs = subject.budgets[k], _member_pairs(subject, k)
    layers = budget.layer_sparsities(progress)
    names = map(str, range(len(pairs))) if layers is None else subject.names
    scores = {name: weight.abs() for name, (weight, _) in zip(names, pairs, strict=True)}
    if budget.pattern is not None:
        scores = patterns.protected_scores(scores, budget.pattern)
    # Tensors by themselves only where they have to be: every one more is looked at.
    joined = budget.min_per_layer == 0 and layers is None and not any(is_sharded(weight) for weight, _ in pairs)
    mask = masks.top_k(
        {"": torch.cat([score.reshape(-1) for score in scores.values()])} if joined else scores,
        sparsity=1 - budget.density(progress) if layers is None else layers,
        min_per_layer=budget.min_per_layer,
        total=subject.total,
    )
    pieces = mask[""].split([keep.numel() for _, keep in pairs]) if joined else mask.values()
    for (_, keep), piece in zip(pairs, pieces, strict=True):
        keep.copy_(piece.reshape(keep.shape) if joined else piece)


# --- RigL.


def growth(subject: Subject) -> Control:
    """RigL (Evci et al. 2020): every tensor's smallest weights make room for pruned ones with large gradients."""
    gradients = [torch.zeros_like(value) for value in subject.values]

    @torch.no_grad()
    def convert(which: Sequence[int], scale: float | None) -> None:
        """Copies the gradients, then takes those of pruned weights away, so that they gather no momentum."""
        for copied, (weight, _) in zip(gradients, subject.pairs, strict=True):
            if weight.grad is not None:
                copied.copy_(weight.grad)
        clean_gradients_(subject.pairs)

    def conclude(step: int, steps: int) -> None:
        for k, budget in enumerate(subject.budgets):
            if step % budget.period == 0 and step < budget.ramp * steps:
                exchange_(subject, gradients, k, budget.exchange_at(step / steps))

    return Control(convert=convert, settle=fixed(subject).settle, conclude=conclude)


@torch.no_grad()
def exchange_(subject: Subject, gradients: Sequence[Tensor], k: int, share: float) -> None:
    """This share of every tensor of member k loses its place to the weights with the largest gradients.

    Of n kept weights the round((1 - share) n) largest stay. Of all others, also of those that just lost their place,
    the ones with the largest |gradient| fill the tensor up to n. A weight that was zero begins there.
    """
    for (weight, keep), gradient in zip(_member_pairs(subject, k), subject.member(gradients, k), strict=True):
        kept_count = int(keep.sum())
        staying_count = round((1 - share) * kept_count)
        size = torch.where(keep, weight.abs(), -1.0).reshape(-1)
        mask = torch.zeros_like(size, dtype=torch.bool)
        mask[size.topk(staying_count).indices] = True
        growing = gradient.abs().reshape(-1).masked_fill(mask, -1.0)
        mask[growing.topk(kept_count - staying_count).indices] = True
        keep.copy_(mask.reshape(keep.shape))
        weight.masked_fill_(~keep, 0)


# --- STR.

_LEAST_LEVEL = -30.0
"""The logarithm of a threshold that every weight is above: below that of 1e-12, which zeros count as."""


class SoftThreshold:
    """STR (Kusupati et al. 2020): sign(w) max(0, |w| - exp(s)), with an s of every tensor that the loss trains.

    Before every step one number is added to all s, so that the asked share of the weights is above its threshold.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.thresholds = subject, subject.learned[THRESHOLDS]
        self.trained = [torch.empty_like(value) for value in subject.values]
        shape = (len(subject.budgets),) if subject.members else ()
        self.density = torch.ones(shape, device=self.thresholds.device)
        self.ratios = subject.layer_ratios()

    def levels(self, scores: Sequence[Tensor]) -> Tensor:
        """What is added to every tensor's s: one number for all, or one for each where these have their own density."""
        members = self.subject.members
        if self.ratios is None:
            tau = masks.threshold(list(scores), self.density, members=members)
            # Below all scores where everything is kept, but near enough for float32 to tell the layers apart.
            tau = torch.maximum(tau, _LEAST_LEVEL - self.thresholds.amax(-1))
            return tau[..., None].expand(self.thresholds.shape)
        shares = [1 - (1 - self.density) * ratio for ratio in self.ratios]
        taus = [masks.threshold([score], d, members=members) for score, d in zip(scores, shares, strict=True)]
        return torch.maximum(torch.stack(taus, dim=-1), _LEAST_LEVEL - self.thresholds)

    def scores(self) -> list[Tensor]:
        """log|w| - s: above 0 where a weight is kept."""
        columns = self.thresholds.detach().unbind(-1)
        return [
            torch.log(value.abs() + 1e-12) - self.subject.over(column, value)
            for value, column in zip(self.subject.values, columns, strict=True)
        ]

    @torch.no_grad()
    def show(self, numbers: Tensor | None) -> None:
        """Brings the thresholds to the density, and shrinks the weights; the masks become what is above."""
        subject, scores = self.subject, self.scores()
        if numbers is not None:
            self.density.copy_(numbers[2])
        taus = self.levels(scores)
        self.thresholds.add_(taus)
        limits = self.thresholds.exp().unbind(-1)
        _copy_(self.trained, subject.values)
        for (weight, keep), score, tau, limit in zip(subject.pairs, scores, taus.unbind(-1), limits, strict=True):
            keep.copy_(score > subject.over(tau, score))
            weight.copy_(weight.sign() * (weight.abs() - subject.over(limit, weight)).clamp_min(0) * keep)

    @torch.no_grad()
    def convert(self, *_: Any) -> None:
        """The derivatives: 1 above the threshold, 0 below, and -sign(w) exp(s) in s."""
        slopes, limits = [], self.thresholds.exp().unbind(-1)
        for (weight, keep), trained, limit in zip(self.subject.pairs, self.trained, limits, strict=True):
            if weight.grad is None:
                slopes.append(torch.zeros_like(limit))
                continue
            weight.grad.masked_fill_(~keep, 0)
            slopes.append(-limit * (weight.grad * trained.sign()).flatten(limit.ndim).sum(-1))
        self.thresholds.grad = torch.stack(slopes, dim=-1)

    def hide(self) -> None:
        """The weights as they are trained."""
        _copy_(self.subject.values, self.trained)

    @torch.no_grad()
    def finish(self) -> None:
        """The k weights that are furthest above their thresholds, shrunk."""
        subject, scores = self.subject, self.scores()
        for k in range(len(subject.budgets)):
            member_scores = subject.member(scores, k)
            kept = keep_best_(subject, k, member_scores)
            if self.ratios is None:
                tau = masks.threshold(member_scores, kept / sum(score.numel() for score in member_scores))
                taus = [tau] * len(member_scores)
            else:
                shares = [float(keep.double().mean()) for keep in subject.member(subject.keeps, k)]
                taus = [masks.threshold([score], d) for score, d in zip(member_scores, shares, strict=True)]
            for weight, score, tau in zip(subject.member(subject.values, k), member_scores, taus, strict=True):
                # At least 0.001 of it: a mask with a minimum may name some that are below.
                shrink_(weight, 1 - torch.exp(tau - score))
        weights.zero_pruned_(subject.pairs)

    def groups(self, configs: "Sequence[Config]") -> list[Group]:
        """Thresholds are trained like weights, and decay like these, as in the paper."""
        rates, momentum = [config.lr for config in configs], [config.momentum for config in configs]
        return [Group([self.thresholds], rates, momentum, [config.weight_decay for config in configs], True)]


def soft(subject: Subject) -> Control:
    """STR's thresholds."""
    control = SoftThreshold(subject)
    moments = {name: getattr(control, name) for name in ("show", "convert", "hide", "finish", "groups")}
    return Control(**moments)


LEAST_OPENING = 1e-3
"""What is left at least of a weight that is kept: a mask of exactly k may name some that are at the threshold."""


@torch.no_grad()
def shrink_(weight: Tensor, opening: Tensor) -> None:
    """Multiplies weights with their openings; none becomes zero that was not, also where numbers have few bits."""
    numbers = torch.finfo(weight.dtype)
    # Numbers below `tiny` have fewer bits. Only float16 needs them, and has them everywhere.
    least = numbers.tiny * (numbers.eps if weight.dtype == torch.float16 else 1.0)
    size = (weight.abs() * opening.clamp_min(LEAST_OPENING)).clamp_min(least)
    weight.copy_(weight.sign() * size)


@torch.no_grad()
def keep_best_(subject: Subject, k: int, scores: Sequence[Tensor]) -> int:
    """Member k's masks become those of its k best scores, for good; returns how many that are."""
    budget, keeps = subject.budgets[k], subject.member(subject.keeps, k)
    named = dict(zip(subject.names, scores, strict=True))
    if budget.pattern is not None:
        mask = patterns.top(named, budget.pattern)
    else:
        goal = budget.sparsity if budget.layers is None else budget.layers
        mask = masks.top_k(named, sparsity=goal, min_per_layer=budget.min_per_layer, total=subject.total)
    for name, keep in zip(subject.names, keeps, strict=True):
        keep.copy_(mask[name])
    return masks.kept(mask)


# --- Feather's threshold on learned scores.


_ROUNDING = 1e-4
"""By how much the best N scores of a group have to be above the next one: what rounding may add to a score is less."""


_LEAST_NORM = 1e-3
"""What the weights of an output count as at least: those that are all zero could never come back."""


class Threshold:
    """Scores r = 4 log|w| + a, of which exactly k lie above a threshold tau at every step.

    The network computes with w (1 - exp(-3 (r - tau) / 4))^(1/3) where r is above tau, which is Feather's operator
    (Glentis Georgoulakis et al. 2023) for offsets a of 0, and with 0 elsewhere. The gradient goes straight through to
    w, below tau times theta and within `Budget.limit`. Offsets are trained where they are noted on the model
    (`weights.learned`).

    With an N:M pattern, tau is at most the score that is number N + 1 of its group: the N best of a group stay, and
    the others go by the common threshold. Likewise the best of a layer, where it keeps some at least.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        first, budget = subject.pairs[0][0], subject.budgets[0]
        self.rows = [local(value) for value in subject.values]
        self.trained = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in self.rows]
        self.offsets = [subject.learned[name] for name in subject.names] if subject.learned else []
        fades = any(entry.fade for entry in subject.budgets)
        self.start = [offset.detach().clone() for offset in self.offsets] if fades else []
        device, shape = first.device, (len(subject.budgets),) if subject.members else ()
        self.law = Law(coupling=COUPLING, mode=kernels.THRESHOLDED, beta=1.0, theta=budget.theta)
        self.numbers = torch.ones(NUMBERS, *shape, device=device)
        self.noise, self.faded, self.density, self.sharpness = self.numbers
        self.seed = torch.tensor(subject.seeds, device=device).reshape(shape)
        self.step = torch.zeros(shape, dtype=torch.int64, device=device)
        self.noisy = any(entry.noise for entry in subject.budgets)
        self.limit = budget.limit
        self.shares: dict[int, Callable[[], Tensor]] = {}
        """By tensor, what the limit has left of every output's gradient below the threshold."""
        self.pattern = None if budget.pattern is None else patterns.parse(budget.pattern)
        self.floors, self.ratios = self._floors(), subject.layer_ratios()
        self.is_common = self.pattern is None and self.floors is None and self.ratios is None
        """Whether all tensors have one threshold."""
        count = 1 if self.is_common else len(subject.pairs)
        shifts = [torch.zeros(shape, device=device) for _ in range(count)]
        self.shifts = shifts * len(subject.pairs) if self.is_common else shifts
        zero = torch.zeros(0 if self.offsets else max(row.numel() for row in self.rows), device=device)
        self.gates = [local(offset.detach()) for offset in self.offsets]
        self.gates = self.gates or [zero[: row.numel()].view(row.shape) for row in self.rows]
        self.inputs = self._inputs()
        self.whole = self._whole()
        """What computes all tensors together, where a device has it."""

    def _whole(self) -> Any:
        if not self.is_common or self.noisy or self.subject.between is not None:
            return None
        return kernels.thresholded_network(
            rows=self.rows,
            trained=self.trained,
            gates=self.gates,
            keeps=self.subject.keeps,
            density=self.density,
            shift=self.shifts[0],
            sharpness=self.sharpness,
            law=self.law,
            members=self.subject.members,
            recorded=self.subject.clean,  # in a loop that somebody else owns, nothing else records it
        )

    def _inputs(self) -> list[SampleInputs]:
        """What every tensor is drawn from; under a pattern, its gates hold the threshold, which every group has."""
        sizes = [weight.numel() // len(self.subject.budgets) for weight, _ in self.subject.pairs]
        gates = self.gates if self.pattern is None else [torch.zeros_like(gate) for gate in self.gates]
        return [
            SampleInputs(
                mean=mean,
                gate=gate,
                std=None,
                seed=self.seed,
                step=self.step,
                offset=sum(sizes[:i]) + first_index(weight),
                shift=self.shifts[i],
                sharpness=self.sharpness,
                noise=self.noise if self.noisy else None,
            )
            for i, (mean, gate, (weight, _)) in enumerate(zip(self.trained, gates, self.subject.pairs, strict=True))
        ]

    def prepare(self, step: int, steps: int) -> None:
        """The noise of a step follows from its number, also where a broken run goes on."""
        if self.noisy:
            self.step.fill_(step)

    @torch.no_grad()
    def show(self, numbers: Tensor | None) -> None:
        """Finds the threshold of this step, and shrinks the weights."""
        if numbers is not None:
            self._take(numbers)
        if self.whole is not None:
            self.whole.show()
            torch.autograd.graph.increment_version(self.rows)  # as other writes do
            return
        _copy_(self.trained, self.rows)
        free = [inputs._replace(gate=gate) for inputs, gate in zip(self.inputs, self.gates, strict=True)]
        thresholds = self._thresholds(kernels.next_scores(free, self.law))
        self.step.add_(1)
        if self.is_common:
            self.shifts[0].copy_(thresholds[0])
        elif self.pattern is None:
            _copy_(self.shifts, thresholds)
        else:
            for inputs, gate, tau in zip(self.inputs, self.gates, thresholds, strict=True):
                torch.sub(gate, tau, out=inputs.gate)
        _copy_(self.rows, self.network())

    @torch.no_grad()
    def network(self) -> list[Tensor]:
        """The weights that the network computes with."""
        return kernels.draw(self.inputs, self.law) if self.whole is None else self.whole.network()

    def _take(self, numbers: Tensor) -> None:
        """The numbers of a new step."""
        self.numbers.copy_(numbers, non_blocking=True)
        for offset, start in zip(self.offsets, self.start, strict=False):
            local(offset.detach()).addcmul_(local(start), self.subject.over(self.faded, start), value=-1)

    def _thresholds(self, scores: list[Tensor], density: Tensor | None = None) -> list[Tensor]:
        """For every tensor the threshold that the asked share of all scores is above: one number, or one per weight.

        What a group or a layer keeps at least is above it, too.
        """
        subject, options = self.subject, {"members": self.subject.members, "between": self.subject.between}
        density = self.density.double() if density is None else density
        if self.ratios is not None:
            return self._layer_thresholds(scores, density)
        if self.pattern is not None:
            edges = [self._group_edges(score) for score in scores]
        elif self.floors is not None:
            edges = [
                subject.over(masks.threshold([score], share, members=subject.members, between=across([weight])), score)
                for score, share, (weight, _) in zip(scores, self.floors, subject.pairs, strict=True)
            ]
        else:
            return [masks.threshold(scores, density, **options)] * len(scores)
        free = [torch.where(score > edge, torch.inf, score) for score, edge in zip(scores, edges, strict=True)]
        tau = masks.threshold(free, density, **options)
        thresholds = [torch.minimum(edge, subject.over(tau, edge)) for edge in edges]
        return thresholds if self.pattern is not None else [t.reshape(tau.shape) for t in thresholds]

    def _layer_thresholds(self, scores: list[Tensor], density: Tensor) -> list[Tensor]:
        """For every tensor the threshold that its own share of its scores is above."""
        thresholds = []
        for i, (score, ratio, (weight, _)) in enumerate(
            zip(scores, self.ratios or [], self.subject.pairs, strict=True)
        ):
            share = 1 - (1 - density) * ratio
            share = share if self.floors is None else torch.maximum(share, self.floors[i])
            options = {"members": self.subject.members, "between": across([weight])}
            thresholds.append(masks.threshold([score], share, **options))
        return thresholds

    def _floors(self) -> list[Tensor] | None:
        """For every tensor, the share of it that every member keeps at least."""
        if not any(budget.min_per_layer for budget in self.subject.budgets):
            return None
        least = [budget.min_per_layer for budget in self.subject.budgets]
        sizes = [weight.numel() // len(least) for weight, _ in self.subject.pairs]
        shares = [self.density.new_tensor([min(1.0, m / n) for m in least], dtype=torch.float64) for n in sizes]
        return [share.reshape(self.density.shape) for share in shares]

    def _group_edges(self, score: Tensor) -> Tensor:
        """For every weight, the score that is number N + 1 of its group."""
        assert self.pattern is not None
        n, m = self.pattern
        groups = patterns.grouped(score, m, members=self.subject.members)
        return groups.topk(n + 1, dim=-1).values[..., n:].expand_as(groups).reshape(score.shape) + _ROUNDING

    @torch.no_grad()
    def convert(self, which: Sequence[int], scale: float | None) -> None:
        """Gradients in the weights and in the offsets, from those in what the network computed with."""
        needs = True, bool(self.offsets), False
        for offset, (weight, _) in zip(self.offsets, self.subject.pairs, strict=False):
            if weight.grad is None:  # it was thrown away, and what follows from it goes, too
                offset.grad = None
        if which and self._convert_together(which, scale):
            return
        for i in which:
            gradient = self._gradient(i)
            to_weight, to_offset, _ = kernels.gradients(self.inputs[i], self.law, gradient, needs)
            assert to_weight is not None
            gradient.copy_(to_weight if self.limit is None else self._limited(to_weight, i, scale))
            if to_offset is not None:
                to_offset = (to_offset if scale is None else to_offset / scale).contiguous()  # as offsets lie
                self.offsets[i].grad = like(to_offset, self.offsets[i])

    def _convert_together(self, which: Sequence[int], scale: float | None) -> bool:
        """The same for all tensors in one launch, where that can be done."""
        if self.whole is None:
            return False
        gradients: list[Tensor | None] = [None] * len(self.rows)
        for i in which:
            gradients[i] = self._gradient(i)
        to_offsets = self.whole.room() if self.offsets else []
        limits = {"limit": self.limit, "least": _LEAST_NORM}
        if not self.whole.convert(gradients, to_offsets, **limits, scale=1.0 if scale is None else scale):
            return False
        for i in which if self.offsets else ():
            self.offsets[i].grad = to_offsets[i]
        if self.limit is not None:
            self.shares |= {i: functools.partial(self.whole.share, i) for i in which}
        return True

    def _gradient(self, i: int) -> Tensor:
        gradient = self.subject.pairs[i][0].grad
        assert gradient is not None
        return local(gradient)

    def _limited(self, gradient: Tensor, i: int, scale: float | None) -> Tensor:
        """A gradient whose part below the threshold is not too long for the weights of its output."""
        axes = tuple(range(2 if self.subject.members else 1, gradient.ndim)) or (-1,)
        below = gradient.masked_fill(self.rows[i] != 0, 0)
        room = self.limit * torch.linalg.vector_norm(self.trained[i], dim=axes, keepdim=True).clamp_min(_LEAST_NORM)
        room = room if scale is None else room * scale
        share = (room / torch.linalg.vector_norm(below, dim=axes, keepdim=True)).clamp_max(1)
        self.shares[i] = lambda: share
        return torch.addcmul(gradient, below, share - 1)

    @torch.no_grad()
    def revert(self, which: Sequence[int]) -> None:
        """Divides by what `convert` has multiplied with; the offsets' gradients follow from the weights' anew."""
        for i in which:
            if self.offsets:
                self.offsets[i].grad = None
            if self.subject.pairs[i][0].grad is None:
                continue
            gradient = self._gradient(i)
            through = kernels.gradients(self.inputs[i], self.law, torch.ones_like(gradient), (True, False, False))[0]
            assert through is not None
            if i in self.shares:
                through = torch.where(self.rows[i] == 0, through * self.shares[i](), through)
            gradient.div_(torch.where(through == 0, 1.0, through))

    def hide(self) -> None:
        """The weights as they are trained."""
        _copy_(self.rows, self.trained)

    def _over(self, tau: Tensor, score: Tensor) -> Tensor:
        """A threshold in a shape that goes with the scores."""
        return tau if self.pattern is not None else self.subject.over(tau, score)

    def _scores(self) -> list[Tensor]:
        """The scores without noise, of the weights as they are trained."""
        return [kernels.raw(self.law, row, gate) for row, gate in zip(self.rows, self.gates, strict=True)]

    @torch.no_grad()
    def note(self) -> None:
        """The masks become what is above the threshold now."""
        scores = self._scores()
        for keep, score, tau in zip(self.subject.keeps, scores, self._thresholds(scores), strict=True):
            local(keep).copy_(score > self._over(tau, score))

    def mark(self) -> None:
        """The masks become what is not zero in the network that is shown."""
        if self.whole is not None:  # it writes them as well
            return
        for keep, row in zip(self.subject.keeps, self.rows, strict=True):
            torch.ne(row, 0, out=local(keep))

    @torch.no_grad()
    def finish(self) -> None:
        """The k weights with the best scores, shrunk by how near they are to the threshold."""
        subject, scores = self.subject, self._scores()
        whole = [like(score, weight) for score, (weight, _) in zip(scores, subject.pairs, strict=True)]
        counts = [keep_best_(subject, k, subject.member(whole, k)) for k in range(len(subject.budgets))]
        size = sum(weight.numel() for weight, _ in subject.pairs) // len(counts)
        shares = [count / size for count in counts]
        density = torch.tensor(shares, dtype=torch.float64, device=self.density.device).reshape(self.density.shape)
        for row, score, tau in zip(self.rows, scores, self._thresholds(scores, density), strict=True):
            shrink_(row, kernels.opening(self.law, score - self._over(tau, score)))
        weights.zero_pruned_(subject.pairs)

    def groups(self, configs: "Sequence[Config]") -> list[Group]:
        """Offsets have momentum SGD on the weights' schedule, whatever the weights have, and do not decay.

        Adam would give offsets that hardly matter steps as large as those of all others.
        """
        if not self.offsets or configs[0].gate_lr is None:
            return []
        rates = [float(config.gate_lr or 0.0) for config in configs]
        momentum, no_decay = [config.momentum for config in configs], [0.0] * len(configs)
        return [Group(self.offsets, rates, momentum, no_decay, scheduled=True, optimizer="sgd")]


def threshold(subject: Subject) -> Control:
    """Feather's threshold on learned scores."""
    control = Threshold(subject)
    names = ("prepare", "show", "convert", "revert", "hide", "network", "note", "mark", "finish", "groups")
    return Control(**{name: getattr(control, name) for name in names}, memory=control.start)


def _copy_(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies all tensors, in one launch where the device has one for it."""
    with torch.no_grad():
        torch._foreach_copy_(list(to), list(values))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Traits:
    """One row of CONTROLS.

    Args:
        make: Makes the control.
        period: Steps from one mask to the next, where the budget names none.
        takes_pattern: Whether it can end in an N:M pattern.
        takes_shards: Whether it can train a model that fully_shard has cut.
    """

    make: Callable[[Subject], Control]
    period: int = 1
    takes_pattern: bool = False
    takes_shards: bool = True


CONTROLS = {
    "magnitude": Traits(magnitude, period=16, takes_pattern=True),
    # With feedback and a new mask after 16 steps, very sparse networks ended with layers that have no weight left,
    # likely since many of those that grew unseen came back at once (docs/protocol.md, DPF).
    "feedback": Traits(feedback, takes_pattern=True),
    "growth": Traits(growth, period=100, takes_shards=False),
    "soft": Traits(soft, takes_shards=False),
    "threshold": Traits(threshold, takes_pattern=True),
}
"""What `Budget.control` names for plain networks."""


CARRIED: "weakref.WeakSet[Stepper]" = weakref.WeakSet()
"""Steppers that go through loops which pacprune does not own."""


def refuse_carried(model: nn.Module) -> None:
    """Refuses to train or prune a network whose masks another loop moves at the same time."""
    params = {id(p) for p in model.parameters()}
    if any(not stepper.fixed and id(weight) in params for stepper in CARRIED for weight, _ in stepper.subject.pairs):
        raise ValueError(
            f"a Pruner moves the mask of this {type(model).__name__}; call its finish() first, or take a deepcopy"
        )


class Stepper:
    """Carries the budgets of a plain network through its steps, and leaves it pruned.

    A network without a noted mask is left alone.

    Args:
        model: Has a mask noted on it by `weights.apply_mask`, of ones to begin dense.
        budgets: One for every member; None keeps the mask as it is.
        seeds: Of every member's noise.
        members: Whether the model is a population.
        clean: Whether gradients of pruned weights are to be zero.
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: "Sequence[Budget] | None",
        *,
        seeds: Sequence[int] = (0,),
        members: bool = False,
        clean: bool = False,
    ) -> None:
        pairs = weights.masked(model)
        budgets = budgets if pairs and budgets else ()
        total = weights.noted_total(model) if pairs else 0
        names, learned = weights.masked_names(model), weights.learned(model)
        self.model, self.shown = model, False
        self._versions: list[tuple[int, int]] = []
        """How often every weight had been written to when it was last shown."""
        self.converted: set[int] = set()
        """The numbers of the weights whose gradients are those of what is trained."""
        self.subject = Subject(pairs, names, learned, budgets, seeds, total, members, clean)
        self._sharded = any(is_sharded(weight) for weight, _ in pairs)
        self.until = budgets[0].until if budgets else 0.0
        self.fixed = not budgets
        """Whether the masks no longer change."""
        self.control = CONTROLS[budgets[0].control].make(self.subject) if budgets else fixed(self.subject)
        if budgets:
            weights.notes(model).moving = True

    def groups(self, configs: "Sequence[Config]") -> list[Group]:
        """What is trained beside the weights."""
        return self.control.groups(configs)

    def resume(self, step: int, steps: int) -> None:
        """Goes on after so many steps, with weights and masks of then."""
        if not self.fixed and step > 0 and step - 1 >= self.until * steps:
            self._fix()

    def prepare(self, step: int, steps: int) -> None:
        """Before step number `step` of `steps`: new masks, or the last ones."""
        if not self.fixed and step >= self.until * steps:
            self.finish()
        self.control.prepare(step, steps)

    def show(self, numbers: Tensor | None) -> None:
        """The weights become those that the network computes with; without numbers, by those of the last step."""
        self.control.show(numbers)
        self.shown = True
        if self.subject.clean:
            self._versions = self._count_writes()

    def _count_writes(self) -> list[tuple[int, int]]:
        # What is written into a sharded tensor, and into its rows, counts at different places.
        return [
            (weight._version, local(weight.detach())._version if self._sharded else 0)
            for weight, _ in self.subject.pairs
        ]

    def overwritten(self, *, closely: bool = False) -> list[str]:
        """The names of shown weights that something else has changed since, so that the next step would undo it.

        A write that leaves the values as they were is none: averages that are swapped in and out, or a state dict that
        is loaded twice. Writes are counted on the host; values are looked at where the count has changed. Writes
        through `weight.data` do not count: looking closely, values are looked at in any case, and waited for.
        """
        counts = self._count_writes()
        if not self.shown or self.control.network is None or (counts == self._versions and not closely):
            return []
        triples = zip(self.subject.names, self.subject.values, self.control.network(), strict=True)
        names = [name for name, value, expected in triples if not torch.equal(local(value), expected)]
        if not names:
            self._versions = counts
        return names

    def adopt(self) -> None:
        """Takes what something else has written into the shown weights for those that are trained.

        This is for a network that is still dense: its weights keep their values, also for a backward pass under way.
        """
        keep_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
        with keep_versions(tuple(self.subject.values)):
            self.show(None)

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """While this lasts, the weights of a shown network are those that are trained."""
        self.uncover()
        try:
            yield
        finally:
            self.show(None)

    @contextmanager
    def as_network(self) -> Iterator[None]:
        """While this lasts, the weights are those that the network computes with at this moment."""
        self.show(None)
        try:
            yield
        finally:
            self.hide()

    def hide(self) -> None:
        """The weights become those that are trained, and the gradients theirs; a second call does nothing."""
        if self.shown:
            self.convert()
            self.uncover()
        self.converted.clear()

    def convert(self, scale: float | None = None, among: Container[int] | None = None) -> None:
        """The gradients become those of what is trained; what has been converted stays as it is.

        Args:
            scale: What the loss was multiplied with, where the gradients are still scaled.
            among: Only of these weights, by number; None is all.
        """
        gradients = (weight.grad for weight, _ in self.subject.pairs)
        which = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in self.converted]
        which = which if among is None else [i for i in which if i in among]
        self.control.convert(which, scale)
        self.converted.update(which)

    def revert(self) -> None:
        """Takes `convert` back, so that another backward pass can add to the gradients."""
        self.control.revert(sorted(self.converted))
        self.converted.clear()

    def uncover(self) -> None:
        """The weights become those that are trained; the gradients stay as they are."""
        if self.shown:
            self.control.hide()
            self.shown = False

    def settle(self) -> None:
        """After the optimiser's step: pruned weights are zero."""
        self.control.settle()

    def conclude(self, step: int, steps: int) -> None:
        """After `step` of `steps` steps: weights may be exchanged."""
        self.control.conclude(step, steps)

    def note(self) -> None:
        """Brings the noted masks up to date."""
        if self.shown:
            self.control.mark()
        else:
            self.control.note()

    def finish(self) -> None:
        """Leaves the pruned network; from now on its masks are fixed."""
        if not self.fixed:
            self.hide()
            self.control.finish()
            self._fix()

    def _fix(self) -> None:
        self.control, self.fixed = fixed(self.subject), True
        weights.notes(self.model).learned = None
        weights.notes(self.model).moving = False
