"""Budgets: which density a network has at each moment of its training, and how keep probabilities are held to it.

A sparsity schedule is one function and one row of SCHEDULES; a control of stochastic masks is one function and one row
of GATE_CONTROLS. Those of plain networks are in controls.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pacprune.data import trace
from pacprune.distributed import Across, refuse_sharded
from pacprune.masking import attachment, masks, patterns, weights
from pacprune.masking.attachment import AttachedWeight
from pacprune.masking.spikeslab import ETA, dropout_kl, log_alpha
from pacprune.training.controls import CONTROLS
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
            that the mean is exact), "projection" (Euclidean projection of keep_prob onto the capped simplex),
            "lagrangian" (a multiplier learned by dual ascent) or "variational" (sparse variational dropout, Molchanov
            et al. 2017: a price on weights with little noise, where std is trained; see `pp.svd`). Of a network
            without gates, whose mask `apply_mask`
            noted: "magnitude" (gradual magnitude pruning, Zhu & Gupta 2017: every so many steps the mask becomes the
            largest weights, and the others are zero for good), "feedback" (DPF, Lin et al. 2020: the others are zero in
            the network alone, its gradient trains them on, and they can come back), "threshold" (Feather, Glentis
            Georgoulakis et al. 2023: all weights are trained, and shrunk by a threshold in the network; see `pp.pft`),
            "growth" (RigL, Evci et al. 2020: every tensor keeps its number of weights, and the smallest make room for
            pruned ones with the largest gradients, which begin at zero) or "soft" (STR, Kusupati et al. 2020: layers
            learn thresholds; see `pp.str_`).
        schedule: "fixed" is the final sparsity from the start. "cubic" rises as 1 - (1 - r)^3, from dense. Or a
            function of r in [0, 1] that gives the share of the sparsity asked for, 1 at r = 1.
        ramp: The share of the stage in which the schedule, and `fade`, come to their end, in (0, 1].
        until: The share of the stage after which the mask of a plain network stays as it is, in (0, 1].
        sharpen: The logits are multiplied by sharpen^t, which hardens the gates towards the end; 1 leaves them.
        fade: Whether what the gates, or the offsets of scores, begin with is taken away again in proportion to r. They
            then end with what they have learned, and with what their weights say if they are coupled to these.
        noise: Of the control "threshold": the size of logistic noise on the scores. It falls to 0 in the first 80 % of
            the stage.
        theta: Of the control "threshold": the share of its gradient that a weight below the threshold gets.
        limit: Of the control "threshold": the gradient of an output's weights below the threshold has at most this
            share of the norm of all its weights. Else a channel that has lost its weights before a BatchNorm, which
            makes gradients huge there, takes all others' places at once. None sets no limit.
        strength: Of the Lagrangian's quadratic term; of the control "variational", what a nat of its KL costs.
        patience: In so many steps the Lagrangian's multiplier learns what the quadratic term does at once. Of the
            control "variational": in so many steps the price of the KL rises from 0.
        every: Steps from one mask of a plain network to the next; by default 16, with feedback 1, with growth 100.
        min_per_layer: How many weights of every tensor of a plain network are kept at least.
        pattern: "2:4", "1:4" or "4:8", for a plain network: the N largest of every group of M weights are the last to
            go.
        exchange: Of the control "growth": the share of its weights that a tensor exchanges at the start. It falls to 0
            along half a cosine at the end of the ramp.
        layers: The sparsity of every tensor by its name, where each is held by itself; together they have `sparsity`.
            None: all tensors are held together, and one may lose more than another.

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
    until: float = 1.0
    sharpen: float = 1.0
    fade: bool = False
    strength: float = 10.0
    patience: float = 10.0
    every: int | None = None
    min_per_layer: int = 0
    pattern: str | None = None
    noise: float = 0.0
    theta: float = 0.5
    limit: float | None = None
    exchange: float = 0.3
    layers: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for sparsity in (self.sparsity, *(self.layers or {}).values()):
            masks.check_sparsity(sparsity)
        check_name("control", self.control, {**GATE_CONTROLS, **CONTROLS})
        self._check_schedule()
        if not 0 < self.ramp <= 1 or self.sharpen < 1 or self.strength <= 0 or self.patience <= 0:
            raise ValueError(
                f"ramp {self.ramp} must lie in (0, 1], sharpen {self.sharpen} be at least 1, "
                f"and strength {self.strength} positive, like patience {self.patience}"
            )
        if not 0 < self.until <= 1:
            raise ValueError(f"until is {self.until}; it is a share of the stage, in (0, 1]")
        self._check_pattern()
        if self.fade and self.control not in (*GATE_CONTROLS, "threshold"):
            raise ValueError(f"fade is for gates and scores, which the control {self.control!r} has not; leave it out")
        if self.noise < 0 or (self.noise and self.control != "threshold"):
            raise ValueError(
                f"noise is {self.noise} with the control {self.control!r}; it is the size of the noise on the scores "
                "of control 'threshold', at least 0"
            )
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta is {self.theta}; it is the share of its gradient that a weight gets, in [0, 1]")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit is {self.limit}; it is a positive share of the weights' norm, or None")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}; it is the number of steps from mask to mask, at least 1")
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"exchange is {self.exchange}; it is a share of the kept weights, in [0, 1]")

    def _check_pattern(self) -> None:
        if self.pattern is None:
            return
        patterns.parse(self.pattern)
        able = [name for name, traits in CONTROLS.items() if traits.takes_pattern]
        if self.control not in able:
            raise ValueError(
                f"the pattern {self.pattern} is for the controls {', '.join(able)}, not {self.control!r}; "
                f"attach gates with mapping='{self.pattern}' instead"
            )

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
        return CONTROLS[self.control].period if self.every is None else self.every

    def density(self, progress: float) -> float:
        """d(t), the mean keep_prob that this moment of the stage must have.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        schedule = self.schedule if callable(self.schedule) else SCHEDULES[self.schedule]
        return 1 - self.sparsity * schedule(min(1.0, progress / self.ramp))

    def layer_sparsities(self, progress: float) -> dict[str, float] | None:
        """The sparsity that every tensor must have at this moment; None where all are held together.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        if self.layers is None:
            return None
        share = (1 - self.density(progress)) / self.sparsity if self.sparsity else 0.0
        return {name: share * sparsity for name, sparsity in self.layers.items()}

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

    def numbers(self, shares: Sequence[float], steps: int, size: int, total: int) -> list[list[float]]:
        """What a step needs to know, by row: noise, what fades in it, density and sharpness.

        Args:
            shares: The shares of the stage that are done, a column each.
            steps: The steps of the stage.
            size: How many weights are held to the budget.
            total: D, which sparsity is counted in.
        """
        before = [max(0.0, share - 1 / steps) for share in shares]
        return [
            [self.noise_at(share) for share in shares],
            [self.faded(t) - self.faded(t0) for t0, t in zip(before, shares, strict=True)],
            [masks.density(1 - self.density(share), size=size, total=total) for share in shares],
            [self.sharpness(share) for share in shares],
        ]

    def record(self) -> dict[str, Any]:
        """The fields as numbers and strings, which tell this budget from another one; a function by its values."""
        fields = asdict(self)
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


class Penalty(Protocol):
    """What a control adds to the loss, one number per member of a population."""

    def __call__(
        self,
        sites: Sequence[AttachedWeight],
        budget: Budget | Sequence[Budget],
        density: Tensor,
        *,
        between: Across | None = None,
        ratios: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """density as `densities` gives it, on the device, and ratios as `layer_ratios` does."""
        ...


@dataclass(frozen=True)
class GateControl:
    """Holds the mean keep_prob of stochastic masks.

    Args:
        hold: What brings it to the density before every step; None where nothing does.
        penalty: What is added to the loss; None where nothing is.
        std_optimizer: A row of OPTIMIZERS that moves log std whatever moves the weights; None: what moves these.
    """

    hold: Hold | None = None
    penalty: Penalty | None = None
    std_optimizer: str | None = None


def check_budgets(model: nn.Module, budgets: Sequence[Budget]) -> None:
    """Refuses budgets that cannot be held by what the model is made of, or not in one pass."""
    if not budgets:
        return
    control, gates = _one_control(budgets), bool(attachment.sites(model))
    _check_layers(model, budgets)
    if control in GATE_CONTROLS and not gates:
        raise ValueError(
            "a budget holds the keep probabilities of stochastic masks; call pp.attach(model, spikeslab) first"
        )
    if control == "variational" and any(site.log_std is None for site in attachment.sites(model)):
        raise ValueError("control 'variational' prices a std that is not trained here; attach with train_std=True")
    if control in GATE_CONTROLS:
        return
    if not CONTROLS[control].takes_shards:
        refuse_sharded(model.parameters(), "control", control)
    for budget in budgets:
        if budget.pattern is not None:
            refuse_sharded(model.parameters(), "budget pattern", budget.pattern)
    if gates or not weights.masked(model):
        what = "has gates instead" if gates else "has none"
        raise ValueError(
            f"control {control!r} moves the mask of a plain network, but this one {what}; "
            "call pp.apply_mask(model, mask) on a plain one first, with a mask of ones to begin dense"
        )
    if len({together(budget) for budget in budgets}) > 1:
        raise ValueError(
            "the budgets of one population differ in until, theta, limit or pattern, but all members take their steps "
            "together; train one population for each"
        )


def _check_layers(model: nn.Module, budgets: Sequence[Budget]) -> None:
    """Refuses layers that have another sparsity together than the budget says."""
    held = {site.name: site.gate for site in attachment.sites(model)} or dict(
        zip(weights.masked_names(model), (weight for weight, _ in weights.masked(model)), strict=True)
    )
    for budget in budgets:
        if budget.layers is None or not held:
            continue
        by_name = masks.layer_sparsities(held, budget.layers)
        pruned = sum(sparsity * held[name].numel() for name, sparsity in by_name.items()) / len(budgets)
        together = pruned / weights.noted_total(model)
        if abs(together - budget.sparsity) > 1e-4:
            raise ValueError(
                f"the layers of the budget have sparsity {together:.4f} together, but its sparsity is "
                f"{budget.sparsity:.4f}; give the former"
            )


def std_optimizer(budgets: Sequence[Budget] | None) -> str | None:
    """What moves log std under these budgets; None: what moves the weights."""
    control = GATE_CONTROLS.get(budgets[0].control) if budgets else None
    return None if control is None else control.std_optimizer


def together(budget: Budget) -> tuple[Any, ...]:
    """What the budgets of one population have in common, since all are held in one pass."""
    return budget.control, budget.until, budget.theta, budget.limit, budget.pattern, budget.layers is None


@torch.no_grad()
def enforce_(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> None:
    """Brings the mean keep_prob to the budget of this moment (shift, projection) and hardens the gates, in place.

    A population takes one budget for all its members or one for each, of one control.
    """
    sites = attachment.require_sites(model)
    budgets = _budgets(sites, budget)
    ratios = layer_ratios(sites, budgets)
    shape, device = sites[0].sampler.seed.shape, sites[0].gate.device
    density, sharpness = (
        torch.tensor(values, dtype=torch.float64, device=device).reshape(shape)
        for values in (densities(model, budgets, progress), [entry.sharpness(progress) for entry in budgets])
    )
    between = attachment.between_ranks(sites)
    hold_(sites, budgets[0].control, density, sharpness, wait=True, between=between, ratios=ratios)


def layer_ratios(sites: Sequence[AttachedWeight], budgets: Sequence[Budget]) -> list[Tensor] | None:
    """What every tensor's sparsity is of that of all, one number per member; None where all are held together."""
    sizes = {site.name: site.gate.numel() // len(budgets) for site in sites}
    seed = sites[0].sampler.seed
    return masks.layer_ratios([budget.layers for budget in budgets], sizes, shape=seed.shape, device=seed.device)


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
    wait: bool,
    between: Across | None,
    ratios: Sequence[Tensor] | None = None,
) -> None:
    """`enforce_` with its numbers on the device, one per member of a population; waits for the device only to `wait`.

    density as `densities` gives it, ratios as `layer_ratios` does. A shift that does not wait follows from the last one
    in a fixed number of trials.
    """
    # One launch for the buffers of all tensors, where there would be one for each.
    torch._foreach_copy_([site.sampler.sharpness for site in sites], [sharpness.float()] * len(sites))  # type: ignore[attr-defined]
    hold = GATE_CONTROLS[control].hold
    if hold is None:
        return
    if ratios is None:
        hold(sites, density, sharpness, wait=wait, between=between)
    else:
        for part, part_density in _apart(sites, density, ratios):
            hold(part, part_density, sharpness, wait=wait, between=attachment.between_ranks(part))


def _apart(
    sites: Sequence[AttachedWeight], density: Tensor, ratios: Sequence[Tensor]
) -> list[tuple[list[AttachedWeight], Tensor]]:
    """Every tensor by itself, with its density."""
    return [([site], 1 - (1 - density) * ratio) for site, ratio in zip(sites, ratios, strict=True)]


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


def penalty(
    sites: Sequence[AttachedWeight],
    budget: Budget | Sequence[Budget],
    density: Tensor,
    *,
    between: Across | None = None,
    ratios: Sequence[Tensor] | None = None,
) -> Tensor:
    """Augmented Lagrangian m e + strength e^2 / 2, e = mean(keep_prob) - density; then m += strength e / patience.

    One number per member of a population; density as `densities` gives it, on the device. Tensors that are held by
    themselves, with `ratios` as `layer_ratios` gives them, have a multiplier each, and count by their sizes.
    """
    if ratios is not None:
        whole = sum(site.gate.numel() for site in sites)
        return torch.stack(
            [
                part[0].gate.numel() / whole * penalty(part, budget, d, between=attachment.between_ranks(part))
                for part, d in _apart(sites, density, ratios)
            ]
        ).sum(0)
    budgets, multiplier = _budgets(sites, budget), sites[0].sampler.multiplier
    size = sum(site.gate.numel() for site in sites) // multiplier.numel()
    axes = tuple(range(multiplier.ndim, 2))  # of [K, n] the last, of [1, n] both
    sums = torch.stack([torch.sigmoid(site.logit()).reshape(multiplier.numel(), -1).sum(axes) for site in sites]).sum(0)
    excess = (sums if between is None else between.sum(sums)) / size - density
    strength = _filled([b.strength for b in budgets], multiplier)
    ascent = _filled([b.strength / b.patience for b in budgets], multiplier)
    value = multiplier.clone() * excess + 0.5 * strength * excess**2
    for site in sites:
        site.sampler.multiplier.add_(ascent * excess.detach())
    return value


def variational_penalty(
    sites: Sequence[AttachedWeight],
    budget: Budget | Sequence[Budget],
    density: Tensor,
    *,
    between: Across | None = None,
    ratios: Sequence[Tensor] | None = None,
) -> Tensor:
    """strength m sum KL, with the `dropout_kl` of every weight; then m, which begins at 0, rises by 1 / patience to 1.

    One number per member of a population. It does not depend on the density.
    """
    budgets, multiplier = _budgets(sites, budget), sites[0].sampler.multiplier
    axes = tuple(range(multiplier.ndim, 2))  # of [K, n] the last, of [1, n] both
    kls = [dropout_kl(log_alpha(site.mean, cast(Tensor, site.log_std))) for site in sites]
    total = torch.stack([kl.reshape(multiplier.numel(), -1).sum(axes) for kl in kls]).sum(0)
    value = _filled([b.strength for b in budgets], multiplier) * multiplier.clone() * total
    rise = _filled([1 / b.patience for b in budgets], multiplier)
    for site in sites:
        site.sampler.multiplier.add_(rise).clamp_(max=1)
    return value


GATE_CONTROLS = {
    "none": GateControl(),
    "shift": GateControl(hold=_shift_),
    "projection": GateControl(hold=_project_),
    "lagrangian": GateControl(penalty=penalty),
    # One draw of all weights says little of one std, and its price is small: steps in proportion to the gradients were
    # too small for that, or ran away.
    "variational": GateControl(penalty=variational_penalty, std_optimizer="adam"),
}
"""Of stochastic masks."""


def _filled(numbers: Sequence[float], like: Tensor) -> Tensor:
    """One number per member, filled on the device: a tensor of Python numbers would be copied, and waited for."""
    return torch.stack([torch.full((), number, device=like.device) for number in numbers]).reshape(like.shape)


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
