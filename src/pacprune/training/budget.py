"""Sparsity controllers: how keep probabilities, or the masks of plain networks, are held to a budget in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pacprune.distributed import sharded
from pacprune.masking import attachment, masks, patterns, weights
from pacprune.masking.spikeslab import ETA

CONTROLS = ("none", "shift", "projection", "lagrangian")
"""Of stochastic masks: they hold the mean keep_prob."""
PLAIN_CONTROLS = ("magnitude", "feedback")
"""Of plain networks: they move the mask that `weights.apply_mask` noted."""
SCHEDULES = ("fixed", "cubic")


@dataclass(frozen=True)
class Budget:
    """What the density must be at each moment, and how it is held there: the mean keep_prob, or the share kept.

    control: "none" (the paper: nothing holds it), "shift" (one offset tau of all logits, so that the mean is exact),
    "projection" (Euclidean projection of keep_prob onto the capped simplex), "lagrangian" (a multiplier learned by
    dual ascent: in `patience` steps it learns what the quadratic term of this `strength` does at once). Of a network
    without gates: "magnitude" (gradual magnitude pruning, Zhu & Gupta 2017: every so many steps the mask becomes the
    largest weights, at least `min_per_layer` of each tensor, and the others are zero for good) or "feedback" (DPF, Lin
    et al. 2020: the others are zero in the network alone, its gradient trains them on, and they can come back; the
    weights are left as trained); with a `pattern`, the N largest of every group of M weights are the last to go.
    schedule: "fixed", or "cubic": density d(t) = 1 - s (1 - (1 - r)^3), r = min(1, t / ramp), from dense to 1 - s.
    sharpen: the logits are multiplied by sharpen^t, which hardens the gates towards the end (t in [0, 1]).
    fade: what the gates begin with is taken away again in proportion to r, so that they end with what they have learned
    and with what their weights say, if they are coupled to these.
    """

    sparsity: float
    control: str = "shift"
    schedule: str = "fixed"
    ramp: float = 0.8
    sharpen: float = 1.0
    fade: bool = False
    strength: float = 10.0
    patience: float = 10.0
    every: int | None = None
    min_per_layer: int = 0
    pattern: str | None = None

    def __post_init__(self) -> None:
        masks.check_sparsity(self.sparsity)
        if self.control not in CONTROLS + PLAIN_CONTROLS:
            raise ValueError(f"control {self.control!r} is unknown; use one of {', '.join(CONTROLS + PLAIN_CONTROLS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
        if not 0 < self.ramp <= 1 or self.sharpen < 1 or self.strength <= 0 or self.patience <= 0:
            raise ValueError(
                f"ramp {self.ramp} must lie in (0, 1], sharpen {self.sharpen} be at least 1, "
                f"and strength {self.strength} positive, like patience {self.patience}"
            )
        if self.pattern is not None:
            patterns.parse(self.pattern)
            if self.control not in PLAIN_CONTROLS:
                raise ValueError(
                    f"the pattern {self.pattern} is for the controls {' and '.join(PLAIN_CONTROLS)}, not "
                    f"{self.control!r}; attach gates with mapping='{self.pattern}' instead"
                )
        if self.fade and self.control in PLAIN_CONTROLS:
            raise ValueError(f"fade is for gates, which the control {self.control!r} has not; leave it out")
        if self.period < 1:
            raise ValueError(f"every is {self.every}; it is the number of steps from mask to mask, at least 1")

    @property
    def period(self) -> int:
        """Steps from one mask of a plain network to the next: `every`, or else 16, with feedback 1.

        With feedback and a new mask after 16 steps, very sparse networks ended with layers that have no weight left,
        likely since many of those that grew unseen came back at once (docs/results.md, DPF).
        """
        return self.every if self.every is not None else 1 if self.control == "feedback" else 16

    def density(self, progress: float) -> float:
        """d(t), the mean keep_prob asked for when a share `progress` of the stage is done."""
        if self.schedule == "fixed":
            return 1 - self.sparsity
        done = min(1.0, progress / self.ramp)
        return 1 - self.sparsity * (1 - (1 - done) ** 3)

    def faded(self, progress: float) -> float:
        """The share that is gone of what the gates began with."""
        return min(1.0, progress / self.ramp) if self.fade else 0.0

    def sharpness(self, progress: float) -> float:
        """gamma(t) = sharpen^t."""
        return self.sharpen**progress


def check_budgets(model: nn.Module, budgets: Sequence[Budget]) -> None:
    """Refuses budgets that cannot be held by what the model is made of, or not in one pass."""
    if not budgets:
        return
    control, gates = _one_control(budgets), bool(attachment.sites(model))
    if control in CONTROLS and not gates:
        raise ValueError(
            "a budget holds the keep probabilities of stochastic masks; call pp.attach(model, spikeslab) first"
        )
    for plan in budgets:
        if plan.pattern is not None:
            sharded.refuse(model.parameters(), f"the pattern {plan.pattern}", "leave it out")
    if control in PLAIN_CONTROLS and (gates or not weights.masked(model)):
        what = "has gates instead" if gates else "has none"
        raise ValueError(
            f"control {control!r} moves the mask of a plain network, but this one {what}; "
            "call pp.apply_mask(model, mask) on a plain one first, with a mask of ones to begin dense"
        )


@torch.no_grad()
def move_masks_(model: nn.Module, budget: Budget | Sequence[Budget], step: int, steps: int) -> None:
    """Before step number `step` of `steps`: the noted masks keep the largest weights at the density of this moment.

    Every member of a population by its own budget, and only when its `period` is over. Waits for the device, and writes
    in place, so that a captured step goes on with the new masks.
    """
    plans = [budget] if isinstance(budget, Budget) else budget
    pairs = weights.masked(model)
    for k, plan in enumerate(plans):
        if step % plan.period:
            continue
        own = pairs if isinstance(budget, Budget) else [(weight[k], keep[k]) for weight, keep in pairs]
        scores = {str(i): weight.abs() for i, (weight, _) in enumerate(own)}
        if plan.pattern is not None:
            scores = patterns.first(scores, plan.pattern)
        # Tensors apart only where they have to be: every one more is looked at.
        joined = plan.min_per_layer == 0 and not sharded.some(scores.values())
        found = masks.top_k(
            {"": torch.cat([score.reshape(-1) for score in scores.values()])} if joined else scores,
            sparsity=1 - plan.density(step / steps),
            min_per_layer=plan.min_per_layer,
            total=attachment.total(model),
        )
        each = found[""].split([keep.numel() for _, keep in own]) if joined else found.values()
        for (weight, keep), new in zip(own, each, strict=True):
            keep.copy_(new.reshape(keep.shape) if joined else new)
            if plan.control == "magnitude":
                weight.masked_fill_(~keep, 0)


@torch.no_grad()
def enforce_(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> None:
    """Brings the mean keep_prob to the budget of this moment (shift, projection) and hardens the gates, in place.

    A population takes one budget for all its members or one for each, of one control.
    """
    sites = attachment.attached(model)
    plans = _per_member(sites, budget)
    shape, device = sites[0].sampler.seed.shape, sites[0].gate.device
    density, sharpness = (
        torch.tensor(values, dtype=torch.float64, device=device).reshape(shape)
        for values in (densities(model, plans, progress), [plan.sharpness(progress) for plan in plans])
    )
    hold_(model, plans[0].control, density, sharpness, look=True)


def densities(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> list[float]:
    """Each member's mean keep_prob of the attached weights with which all D weights have its budget's density."""
    sites = attachment.attached(model)
    here = sum(site.gate.numel() for site in sites) // sites[0].sampler.seed.numel()
    everything = attachment.total(model)
    return [
        masks.density(1 - plan.density(progress), size=here, total=everything) for plan in _per_member(sites, budget)
    ]


@torch.no_grad()
def hold_(model: nn.Module, control: str, density: Tensor, sharpness: Tensor, *, look: bool) -> None:
    """`enforce_` with its numbers on the device, one per member of a population; waits for the device only to `look`.

    density as `densities` gives it. Without a look, a shift follows from the last one in a fixed number of steps.
    """
    sites = attachment.attached(model)
    members = sites[0].sampler.seed.ndim == 1
    # One launch for the buffers of all tensors, where there would be one for each.
    torch._foreach_copy_([site.sampler.sharpness for site in sites], [sharpness.float()] * len(sites))  # type: ignore[attr-defined]
    if control == "shift":
        if sites[0].sampler.mapping == "clamp":
            raise ValueError("control 'shift' moves logits, which the clamp mapping has not; use control='projection'")
        raw = [site.raw() for site in sites]
        start = sites[0].sampler.shift
        tau = masks.logit_shift(raw, density, sharpness=sharpness, start=start, members=members, look=look)
        torch._foreach_copy_([site.sampler.shift for site in sites], [tau] * len(sites))  # type: ignore[attr-defined]
    elif control == "projection":
        now = [torch.sigmoid(site.logit()) for site in sites]
        projected = masks.project(now, density, eta=ETA, members=members, look=look)
        for site, new in zip(sites, projected, strict=True):
            gate, p = sharded.local(site.gate), sharded.local(new)
            if site.sampler.mapping == "clamp":
                gate.copy_(p)
            else:  # the gate whose logit is logit(p), given the coupling, the shift and the sharpness
                raw = torch.logit(p) / _over(site.sampler.sharpness, p) + _over(site.sampler.shift, p)
                gate.add_(raw - sharded.local(site.raw()))


def penalty(model: nn.Module, budget: Budget | Sequence[Budget], density: Tensor) -> Tensor:
    """Augmented Lagrangian m e + strength e^2 / 2, e = mean(keep_prob) - density; then m += strength e / patience.

    One number per member of a population; density as `densities` gives it, on the device.
    """
    sites = attachment.attached(model)
    plans, multiplier = _per_member(sites, budget), sites[0].sampler.multiplier
    size = sum(site.gate.numel() for site in sites) // multiplier.numel()
    axes = tuple(range(multiplier.ndim, 2))  # of [K, n] the last, of [1, n] both
    each = [torch.sigmoid(sharded.local(site.logit())).reshape(multiplier.numel(), -1).sum(axes) for site in sites]
    excess = sharded.total(torch.stack(each).sum(0), [site.gate for site in sites]) / size - density
    # Filled on the device, since a tensor of Python numbers would be copied there, for which the host waits.
    numbers = [[plan.strength for plan in plans], [plan.strength / plan.patience for plan in plans]]
    strength, ascent = (
        torch.stack([torch.full((), n, device=excess.device) for n in each]).reshape(multiplier.shape)
        for each in numbers
    )
    value = multiplier.clone() * excess + 0.5 * strength * excess**2
    for site in sites:
        site.sampler.multiplier.add_(ascent * excess.detach())
    return value


def _over(value: Tensor, like: Tensor) -> Tensor:
    """A number per model, in a shape that multiplies the models' tensors."""
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _per_member(sites: list[attachment.AttachedWeight], budget: Budget | Sequence[Budget]) -> list[Budget]:
    """The budget of every member of a population, or of the only model; one budget may be given for all."""
    members = sites[0].sampler.seed.numel()
    plans = [budget] * members if isinstance(budget, Budget) else list(budget)
    if len(plans) != members:
        raise ValueError(f"there are {len(plans)} budgets for {members} models; give one for each, or one for all")
    _one_control(plans)
    return plans


def _one_control(plans: Sequence[Budget]) -> str:
    if any(plan is None for plan in plans):
        raise ValueError("budget is None for some members; give every member a budget (control='none' holds nothing)")
    controls = sorted({plan.control for plan in plans})
    if len(controls) > 1:
        raise ValueError(
            f"the budgets of one population have the controls {' and '.join(controls)}, but all are held in one pass; "
            "train one population for each control"
        )
    return controls[0]


@torch.no_grad()
def keep_means_(model: nn.Module, mask: Mapping[str, Tensor]) -> nn.Module:
    """mean <- mean * mask for the tensors that `mask` names, in place: a weight that is hardly ever kept is then 0."""
    for site in attachment.attached(attachment.forget(model)):
        if site.name in mask:
            site.mean.masked_fill_(~mask[site.name], 0.0)
    return model
