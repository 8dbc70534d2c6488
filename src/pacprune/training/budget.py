"""Sparsity controllers: how keep probabilities, or the masks of plain networks, are held to a budget in training.

A sparsity schedule is one function and one row of SCHEDULES; a control is one function and one row of GATE_CONTROLS or
MASK_CONTROLS.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pacprune.data import trace
from pacprune.distributed import Across, is_sharded, refuse_sharded
from pacprune.masking import attachment, masks, patterns, weights
from pacprune.masking.attachment import AttachedWeight
from pacprune.masking.sampler import Sampler
from pacprune.masking.spikeslab import ETA
from pacprune.training.population import per_member
from pacprune.types import check_name

Schedule = Callable[[float], float]
"""How much of the final sparsity is asked for when this share of the ramp is done; 1 at its end."""

SCHEDULES: dict[str, Schedule] = {
    "fixed": lambda share: 1.0,
    "cubic": lambda share: 1 - (1 - share) ** 3,  # Zhu & Gupta 2017
}
_PROBES = [k / 64 for k in range(65)]
"""Where a schedule of the user's own is read, to check it and to tell it from others."""
NOISE_END = 0.8
"""The share of a stage after which the scores have no noise, so that the mask can settle."""


def _probed(schedule: Schedule) -> list[float]:
    return [schedule(share) for share in _PROBES]


@dataclass(frozen=True)
class Budget:
    """What the density must be at each moment, and how it is held there: the mean keep_prob, or the share kept.

    With t in [0, 1] the share of the stage that is done and r = min(1, t / ramp), the density is
    d(t) = 1 - sparsity * schedule(r).

    Args:
        sparsity: Fraction to prune at the end, such as 0.9.
        control: Of stochastic masks: "none" (the paper: nothing holds it), "shift" (one offset tau of all logits, so
            that the mean is exact), "projection" (Euclidean projection of keep_prob onto the capped simplex) or
            "lagrangian" (a multiplier learned by dual ascent). Of the estimator "thresholded": "threshold" (exactly so
            many scores lie above it). Of a network without gates: "magnitude" (gradual
            magnitude pruning, Zhu & Gupta 2017: every so many steps the mask becomes the largest weights, and the
            others are zero for good), "feedback" (DPF, Lin et al. 2020: the others are zero in the network alone, its
            gradient trains them on, and they can come back; the weights are left as trained), "growth" (RigL, Evci
            et al. 2020: every tensor keeps its number of weights, and the smallest make room for pruned ones with the
            largest gradients, which begin at zero) or "soft" (STR, Kusupati et al. 2020: in the network, weights are
            shrunk by learned thresholds; see `pp.str_`).
        schedule: "fixed" is the final sparsity from the start. "cubic" rises as 1 - (1 - r)^3, from dense. Or a
            function of r in [0, 1] that gives the share of the sparsity asked for, 1 at r = 1.
        ramp: The share of the stage in which the schedule, and `fade`, come to their end, in (0, 1].
        sharpen: The logits are multiplied by sharpen^t, which hardens the gates towards the end; 1 leaves them.
        fade: Whether what the gates begin with is taken away again in proportion to r. They then end with what they
            have learned, and with what their weights say if they are coupled to these.
        noise: Size of the logistic noise on the scores of the control "threshold"; it falls to 0 in the first 80 % of
            the stage.
        strength: Of the Lagrangian's quadratic term.
        patience: In so many steps the Lagrangian's multiplier learns what the quadratic term does at once.
        every: Steps from one mask of a plain network to the next; by default 16, with feedback 1, with growth 100.
        min_per_layer: How many weights of every tensor of a plain network are kept at least.
        pattern: "2:4" or "1:4", for a plain network: the N largest of every group of M weights are the last to go.
        exchange: Of the control "growth": the share of its weights that a tensor exchanges at the start. It falls to 0
            along half a cosine at the end of the ramp.

    Example:
        >>> budget = pp.Budget(0.9, schedule="cubic")
        >>> [round(budget.density(t), 3) for t in (0.0, 0.4, 0.8, 1.0)]
        [1.0, 0.213, 0.1, 0.1]
        >>> pp.Budget(0.9, schedule=lambda share: share).density(0.4)
        0.55
    """

    sparsity: float
    control: str = "shift"
    schedule: str | Schedule = "fixed"
    ramp: float = 0.8
    sharpen: float = 1.0
    fade: bool = False
    strength: float = 10.0
    patience: float = 10.0
    every: int | None = None
    min_per_layer: int = 0
    pattern: str | None = None
    noise: float = 0.0
    exchange: float = 0.3

    def __post_init__(self) -> None:
        masks.check_sparsity(self.sparsity)
        controls = {**GATE_CONTROLS, **MASK_CONTROLS}
        check_name("control", self.control, controls)
        self._check_schedule()
        if not 0 < self.ramp <= 1 or self.sharpen < 1 or self.strength <= 0 or self.patience <= 0:
            raise ValueError(
                f"ramp {self.ramp} must lie in (0, 1], sharpen {self.sharpen} be at least 1, "
                f"and strength {self.strength} positive, like patience {self.patience}"
            )
        if self.pattern is not None:
            patterns.parse(self.pattern)
            able = [name for name, control in MASK_CONTROLS.items() if control.moves]
            if self.control not in able:
                raise ValueError(
                    f"the pattern {self.pattern} is for the controls {' and '.join(able)}, not "
                    f"{self.control!r}; attach gates with mapping='{self.pattern}' instead"
                )
        if self.fade and self.control in MASK_CONTROLS:
            raise ValueError(f"fade is for gates, which the control {self.control!r} has not; leave it out")
        if self.noise < 0 or (self.noise and self.control != "threshold"):
            raise ValueError(
                f"noise is {self.noise} with the control {self.control!r}; it is the size of the noise on the scores "
                "of control 'threshold', at least 0"
            )
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}; it is the number of steps from mask to mask, at least 1")
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"exchange is {self.exchange}; it is a share of the kept weights, in [0, 1]")

    def _check_schedule(self) -> None:
        if callable(self.schedule):
            first, last = self.schedule(0.0), self.schedule(1.0)
            if not (0 <= first <= 1 and last == 1):
                raise ValueError(
                    f"the schedule goes from {first} to {last}; it must begin in [0, 1] and end at 1, "
                    "the share of the sparsity that is asked for"
                )
            for share, value in zip(_PROBES, _probed(self.schedule), strict=True):
                density = 1 - self.sparsity * value
                if not 0 <= density <= 1:
                    raise ValueError(
                        f"the schedule gives {value} at the share {share}, and so the density {density:.4g}; "
                        "densities must lie in [0, 1]"
                    )
        else:
            check_name("schedule", self.schedule, SCHEDULES, alternative="a function")

    @property
    def period(self) -> int:
        """Steps from one mask of a plain network to the next: `every`, or else what the control has by default."""
        return MASK_CONTROLS[self.control].period if self.every is None else self.every

    def density(self, progress: float) -> float:
        """d(t), the mean keep_prob that this moment of the stage must have.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        schedule = self.schedule if callable(self.schedule) else SCHEDULES[self.schedule]
        return 1 - self.sparsity * schedule(min(1.0, progress / self.ramp))

    def faded(self, progress: float) -> float:
        """The share that is gone of what the gates began with.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        return min(1.0, progress / self.ramp) if self.fade else 0.0

    def sharpness(self, progress: float) -> float:
        """gamma(t) = sharpen^t.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        return self.sharpen**progress

    def noise_at(self, progress: float) -> float:
        """The size of the scores' noise, which falls linearly to 0 at NOISE_END of the stage.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        return self.noise * max(0.0, 1 - progress / NOISE_END)

    def exchange_at(self, progress: float) -> float:
        """The share of a tensor's weights that make room for others: exchange (1 + cos(pi r)) / 2.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        return self.exchange * 0.5 * (1 + math.cos(math.pi * min(1.0, progress / self.ramp)))

    def record(self) -> dict[str, Any]:
        """The fields as numbers and strings, which tell this budget from another one; a function by its values."""
        fields = asdict(self)
        if not self.noise:  # older checkpoints know no noise
            del fields["noise"]
        if not (self.control in MASK_CONTROLS and MASK_CONTROLS[self.control].grows):  # nor the exchange of weights
            del fields["exchange"]
        if callable(self.schedule):
            fields["schedule"] = _probed(self.schedule)
        return fields


class Hold(Protocol):
    """Brings the mean keep_prob of attached weights to a density, in place."""

    def __call__(
        self, sites: Sequence[AttachedWeight], density: Tensor, sharpness: Tensor, *, wait: bool, between: Across | None
    ) -> None:
        """One density and sharpness per member of a population; waits for the device only where `wait` says so."""
        ...


@dataclass(frozen=True)
class GateControl:
    """Holds the mean keep_prob of stochastic masks.

    Args:
        hold: What brings it to the density before every step; None where nothing does.
        penalised: Whether `penalty` is added to the loss.
    """

    hold: Hold | None = None
    penalised: bool = False


@dataclass(frozen=True)
class MaskControl:
    """Moves the mask of a plain network, which `weights.apply_mask` noted.

    Args:
        period: Steps from one mask to the next, where the budget names none.
        feedback: Whether pruned weights are zero in the network alone, so that its gradient trains them on.
        grows: Whether weights are exchanged by `exchange_weights_` after a step, in place of `move_masks_` before it.
        soft: Whether weights are shrunk by `soft_thresholded` during a step, in place of `move_masks_` before it.
    """

    period: int
    feedback: bool = False
    grows: bool = False
    soft: bool = False

    @property
    def moves(self) -> bool:
        """Whether `move_masks_` says which weights are kept."""
        return not (self.grows or self.soft)


def check_budgets(model: nn.Module, budgets: Sequence[Budget]) -> None:
    """Refuses budgets that cannot be held by what the model is made of, or not in one pass."""
    if not budgets:
        return
    control, gates = _one_control(budgets), bool(attachment.sites(model))
    if control in GATE_CONTROLS and gates:
        _check_estimator(control, attachment.sites(model)[0].sampler)
    if control in GATE_CONTROLS and not gates:
        raise ValueError(
            "a budget holds the keep probabilities of stochastic masks; call pp.attach(model, spikeslab) first"
        )
    if control in MASK_CONTROLS and not MASK_CONTROLS[control].moves:
        refuse_sharded(model.parameters(), "control", control)
    for budget in budgets:
        if budget.pattern is not None:
            refuse_sharded(model.parameters(), "budget pattern", budget.pattern)
    if control in MASK_CONTROLS and (gates or not weights.masked(model)):
        what = "has gates instead" if gates else "has none"
        raise ValueError(
            f"control {control!r} moves the mask of a plain network, but this one {what}; "
            "call pp.apply_mask(model, mask) on a plain one first, with a mask of ones to begin dense"
        )


def _check_estimator(control: str, sampler: Sampler) -> None:
    """Refuses a threshold for random gates, and random gates' controls for thresholded ones."""
    if control != "none" and (control == "threshold") != sampler.thresholded:
        raise ValueError(
            f"control {control!r} cannot hold the gates of estimator {sampler.estimator!r}; control 'threshold' and "
            "estimator 'thresholded' belong together"
        )


@torch.no_grad()
def move_masks_(pairs: weights.Masked, budget: Budget | Sequence[Budget], step: int, steps: int, *, total: int) -> None:
    """Before step number `step` of `steps`: the masks keep the largest weights at the density of this moment.

    Every member of a population by its own budget, and only when its `period` is over. Waits for the device, and writes
    in place, so that a captured step goes on with the new masks. `total` is D.
    """
    members = not isinstance(budget, Budget)
    for k, member_budget in enumerate([budget] if isinstance(budget, Budget) else budget):
        if step % member_budget.period == 0:
            member_pairs = [(weight[k], keep[k]) for weight, keep in pairs] if members else pairs
            _move_mask_(member_pairs, member_budget, step / steps, total)


def _move_mask_(pairs: Sequence[tuple[Tensor, Tensor]], budget: Budget, progress: float, total: int) -> None:
    """The mask of one network, at the density of this moment."""
    scores = {str(i): weight.abs() for i, (weight, _) in enumerate(pairs)}
    if budget.pattern is not None:
        scores = patterns.protected_scores(scores, budget.pattern)
    # Tensors by themselves only where they have to be: every one more is looked at.
    joined = budget.min_per_layer == 0 and not any(is_sharded(weight) for weight, _ in pairs)
    mask = masks.top_k(
        {"": torch.cat([score.reshape(-1) for score in scores.values()])} if joined else scores,
        sparsity=1 - budget.density(progress),
        min_per_layer=budget.min_per_layer,
        total=total,
    )
    pieces = mask[""].split([keep.numel() for _, keep in pairs]) if joined else mask.values()
    for (weight, keep), piece in zip(pairs, pieces, strict=True):
        keep.copy_(piece.reshape(keep.shape) if joined else piece)
        if not MASK_CONTROLS[budget.control].feedback:
            weight.masked_fill_(~keep, 0)


@torch.no_grad()
def exchange_weights_(
    pairs: weights.Masked, gradients: Sequence[Tensor], budget: Budget | Sequence[Budget], step: int, steps: int
) -> None:
    """After `step` of `steps` steps: every tensor's smallest weights make room for those with the largest gradients.

    Of n kept weights the round((1 - exchange_at) n) largest stay. Of all others, also of those that just lost their
    place, the ones with the largest |gradient| fill the tensor up to n. A weight that was zero begins there. Every
    member of a population goes by its own budget, and only when its `period` is over and its ramp is not.
    """
    members = not isinstance(budget, Budget)
    for k, member_budget in enumerate([budget] if isinstance(budget, Budget) else budget):
        if step % member_budget.period or step >= member_budget.ramp * steps:
            continue
        share = member_budget.exchange_at(step / steps)
        for (weight, keep), gradient in zip(pairs, gradients, strict=True):
            if members:
                weight, keep, gradient = weight[k], keep[k], gradient[k]
            _exchange_(weight, keep, gradient, share)


def _exchange_(weight: Tensor, keep: Tensor, gradient: Tensor, share: float) -> None:
    """The exchange in one tensor."""
    kept_count = int(keep.sum())
    staying_count = round((1 - share) * kept_count)
    size = torch.where(keep, weight.abs(), -1.0).reshape(-1)
    mask = torch.zeros_like(size, dtype=torch.bool)
    mask[size.topk(staying_count).indices] = True
    growth = gradient.abs().reshape(-1).masked_fill(mask, -1.0)
    mask[growth.topk(kept_count - staying_count).indices] = True
    keep.copy_(mask.reshape(keep.shape))
    weight.masked_fill_(~keep, 0)


THRESHOLDS = "soft_thresholds"
"""The parameter of a model with the logarithms of its layers' thresholds, in the order of `weights.masked`."""
_LEAST_LEVEL = -30.0
"""The logarithm of a threshold that every weight is above: below that of 1e-12, which `soft_scores` counts zeros as."""


def soft_scores(pairs: weights.Masked, thresholds: Tensor) -> list[Tensor]:
    """log|w| - s with a tensor's own s: above 0 where a weight is kept."""
    columns = thresholds.detach().unbind(-1)
    return [
        torch.log(weight.detach().abs() + 1e-12) - _over(column, weight)
        for (weight, _), column in zip(pairs, columns, strict=True)
    ]


@contextmanager
def soft_thresholded(pairs: weights.Masked, thresholds: Tensor, density: Tensor, *, members: bool) -> Iterator[None]:
    """While this lasts, every weight is sign(w) max(0, |w| - exp(s)), with its tensor's s; then it is what it was.

    First, one number is added to all s, so that the share `density` of the weights is above its threshold. The masks
    become what is above. Nothing waits for the device.
    """
    with torch.no_grad():
        scores = soft_scores(pairs, thresholds)
        tau = masks.threshold(scores, density, members=members)
        # Below all scores where everything is kept, but near enough for float32 to tell the layers apart.
        tau = torch.maximum(tau, _LEAST_LEVEL - thresholds.amax(-1))
        thresholds.add_(tau[:, None] if members else tau)
        rows = [weight.detach() for weight, _ in pairs]
        before = [weight.clone() for weight in rows]
        for (weight, keep), score, limit in zip(pairs, scores, thresholds.exp().unbind(-1), strict=True):
            keep.copy_(score > _over(tau, score))
            weight.copy_(weight.sign() * (weight.abs() - _over(limit, weight)).clamp_min(0) * keep)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(rows, before)  # type: ignore[attr-defined]


@torch.no_grad()
def soft_gradients_(pairs: weights.Masked, thresholds: nn.Parameter) -> None:
    """The derivatives of `soft_thresholded`: 1 above the threshold, 0 below, and -sign(w) exp(s) in s."""
    slopes = []
    for (weight, keep), limit in zip(pairs, thresholds.exp().unbind(-1), strict=True):
        if weight.grad is None:
            slopes.append(torch.zeros_like(limit))
            continue
        weight.grad.masked_fill_(~keep, 0)
        slopes.append(-limit * (weight.grad * weight.sign()).flatten(limit.ndim).sum(-1))
    thresholds.grad = torch.stack(slopes, dim=-1)


@torch.no_grad()
def enforce_(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> None:
    """Brings the mean keep_prob to the budget of this moment (shift, projection) and hardens the gates, in place.

    A population takes one budget for all its members or one for each, of one control.
    """
    sites = attachment.require_sites(model)
    budgets = _budgets(sites, budget)
    shape, device = sites[0].sampler.seed.shape, sites[0].gate.device
    density, sharpness = (
        torch.tensor(values, dtype=torch.float64, device=device).reshape(shape)
        for values in (densities(model, budgets, progress), [entry.sharpness(progress) for entry in budgets])
    )
    between = attachment.between_ranks(sites)
    hold_(sites, budgets[0].control, density, sharpness, wait=True, between=between)


def densities(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> list[float]:
    """Each member's mean keep_prob of the attached weights with which all D weights have its budget's density."""
    sites = attachment.require_sites(model)
    size = sum(site.gate.numel() for site in sites) // sites[0].sampler.seed.numel()
    sizes = {"size": size, "total": weights.noted_total(model)}
    return [masks.density(1 - entry.density(progress), **sizes) for entry in _budgets(sites, budget)]


@torch.no_grad()
def hold_(
    sites: Sequence[AttachedWeight],
    control: str,
    density: Tensor,
    sharpness: Tensor,
    *,
    noise: Tensor | None = None,
    wait: bool,
    between: Across | None,
) -> None:
    """`enforce_` with its numbers on the device, one per member of a population; waits for the device only to `wait`.

    density as `densities` gives it. A shift that does not wait follows from the last one in a fixed number of trials.
    Where `noise` is given, it is that of the scores from the next draw on, and they meet the budget with it.
    """
    for site in sites:
        site.sampler.noisy = noise is not None
    if noise is not None:
        torch._foreach_copy_([site.sampler.noise for site in sites], [noise.float()] * len(sites))  # type: ignore[attr-defined]
    # One launch for the buffers of all tensors, where there would be one for each.
    torch._foreach_copy_([site.sampler.sharpness for site in sites], [sharpness.float()] * len(sites))  # type: ignore[attr-defined]
    hold = GATE_CONTROLS[control].hold
    if hold is not None:
        hold(sites, density, sharpness, wait=wait, between=between)


def _shift_(
    sites: Sequence[AttachedWeight], density: Tensor, sharpness: Tensor, *, wait: bool, between: Across | None
) -> None:
    """One offset of all logits."""
    first = sites[0].sampler
    if first.mapping == "clamp":
        raise ValueError("control 'shift' moves logits, which the clamp mapping has not; use control='projection'")
    tau = masks.logit_shift(
        attachment.raw_logits(sites),
        density,
        sharpness=sharpness,
        start=first.shift,
        members=first.seed.ndim == 1,
        wait=wait,
        between=between,
    )
    torch._foreach_copy_([site.sampler.shift for site in sites], [tau] * len(sites))  # type: ignore[attr-defined]


def _threshold_(
    sites: Sequence[AttachedWeight], density: Tensor, sharpness: Tensor, *, wait: bool, between: Across | None
) -> None:
    """The threshold of all scores."""
    members = sites[0].sampler.seed.ndim == 1
    tau = masks.threshold(attachment.next_scores(sites), density, members=members, between=between)
    torch._foreach_copy_([site.sampler.shift for site in sites], [tau] * len(sites))  # type: ignore[attr-defined]


def _project_(
    sites: Sequence[AttachedWeight], density: Tensor, sharpness: Tensor, *, wait: bool, between: Across | None
) -> None:
    """Gates whose keep_prob is the nearest point with this mean."""
    members = sites[0].sampler.seed.ndim == 1
    before = [torch.sigmoid(site.logit()) for site in sites]
    projected = masks.project(before, density, eta=ETA, members=members, wait=wait, between=between)
    for site, p in zip(sites, projected, strict=True):
        if site.sampler.mapping == "clamp":
            site.local_gate.copy_(p)
        else:  # the gate whose logit is logit(p), given the coupling, the shift and the sharpness
            raw = torch.logit(p) / _over(site.sampler.sharpness, p) + _over(site.sampler.shift, p)
            site.local_gate.add_(raw - site.raw())


GATE_CONTROLS = {
    "none": GateControl(),
    "shift": GateControl(hold=_shift_),
    "projection": GateControl(hold=_project_),
    "lagrangian": GateControl(penalised=True),
    "threshold": GateControl(hold=_threshold_),
}
"""Of stochastic masks."""
MASK_CONTROLS = {
    "magnitude": MaskControl(period=16),
    # With feedback and a new mask after 16 steps, very sparse networks ended with layers that have no weight left,
    # likely since many of those that grew unseen came back at once (docs/results.md, DPF).
    "feedback": MaskControl(period=1, feedback=True),
    "growth": MaskControl(period=100, grows=True),
    "soft": MaskControl(period=1, feedback=True, soft=True),
}
"""Of plain networks."""


def penalty(
    sites: Sequence[AttachedWeight],
    budget: Budget | Sequence[Budget],
    density: Tensor,
    *,
    between: Across | None = None,
) -> Tensor:
    """Augmented Lagrangian m e + strength e^2 / 2, e = mean(keep_prob) - density; then m += strength e / patience.

    One number per member of a population; density as `densities` gives it, on the device.
    """
    budgets, multiplier = _budgets(sites, budget), sites[0].sampler.multiplier
    size = sum(site.gate.numel() for site in sites) // multiplier.numel()
    axes = tuple(range(multiplier.ndim, 2))  # of [K, n] the last, of [1, n] both
    sums = torch.stack([torch.sigmoid(site.logit()).reshape(multiplier.numel(), -1).sum(axes) for site in sites]).sum(0)
    excess = (sums if between is None else between.sum(sums)) / size - density
    # Filled on the device, since a tensor of Python numbers would be copied there, for which the host waits.
    numbers = [[b.strength for b in budgets], [b.strength / b.patience for b in budgets]]
    strength, ascent = (
        torch.stack([torch.full((), n, device=excess.device) for n in values]).reshape(multiplier.shape)
        for values in numbers
    )
    value = multiplier.clone() * excess + 0.5 * strength * excess**2
    for site in sites:
        site.sampler.multiplier.add_(ascent * excess.detach())
    return value


def _over(value: Tensor, like: Tensor) -> Tensor:
    """A number per model, in a shape that multiplies the models' tensors."""
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _budgets(sites: Sequence[AttachedWeight], budget: Budget | Sequence[Budget]) -> list[Budget]:
    """The budget of every member of a population, or of the only model; one budget may be given for all."""
    budgets: list[Budget] = per_member("budget", budget, sites[0].sampler.seed.numel())
    _one_control(budgets)
    return budgets


def _one_control(budgets: Sequence[Budget]) -> str:
    if any(budget is None for budget in budgets):
        raise ValueError("budget is None for some members; give every member a budget (control='none' holds nothing)")
    controls = sorted({budget.control for budget in budgets})
    if len(controls) > 1:
        raise ValueError(
            f"the budgets of one population have the controls {' and '.join(controls)}, but all are held in one pass; "
            "train one population for each control"
        )
    return controls[0]


@torch.no_grad()
def keep_means_(model: nn.Module, mask: Mapping[str, Tensor]) -> nn.Module:
    """mean <- mean * mask for the tensors that `mask` names, in place: a weight that is hardly ever kept is then 0."""
    with weights.changing(model):
        weights.mark_seen(model, trace.noted(mask.values()))
        for site in attachment.require_sites(attachment.forget(model)):
            if site.name in mask:
                site.mean.masked_fill_(~mask[site.name], 0.0)
    return model
