"""Sparsity controllers: how the mean keep probability is held to its budget while gates are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pacprune import layers, masks
from pacprune.spikeslab import ETA

CONTROLS = ("none", "shift", "projection", "lagrangian")
SCHEDULES = ("fixed", "cubic")


@dataclass(frozen=True)
class Budget:
    """What the mean keep_prob must be at each moment, and how it is held there.

    control: "none" (the paper: nothing holds it), "shift" (one offset tau of all logits, so that the mean is exact),
    "projection" (Euclidean projection of keep_prob onto the capped simplex), "lagrangian" (a multiplier learned by
    dual ascent). schedule: "fixed", or "cubic": density d(t) = 1 - s (1 - (1 - r)^3), r = min(1, t / ramp), from dense
    to 1 - s. sharpen: the logits are multiplied by sharpen^t, which hardens the gates towards the end (t in [0, 1]).
    """

    sparsity: float
    control: str = "shift"
    schedule: str = "fixed"
    ramp: float = 0.8
    sharpen: float = 1.0
    strength: float = 10.0

    def __post_init__(self) -> None:
        masks.check_sparsity(self.sparsity)
        if self.control not in CONTROLS:
            raise ValueError(f"control {self.control!r} is unknown; use one of {', '.join(CONTROLS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
        if not 0 < self.ramp <= 1 or self.sharpen < 1 or self.strength <= 0:
            raise ValueError(
                f"ramp {self.ramp} must lie in (0, 1], sharpen {self.sharpen} be at least 1 "
                f"and strength {self.strength} positive"
            )

    def density(self, progress: float) -> float:
        """d(t), the mean keep_prob asked for when a share `progress` of the stage is done."""
        if self.schedule == "fixed":
            return 1 - self.sparsity
        done = min(1.0, progress / self.ramp)
        return 1 - self.sparsity * (1 - (1 - done) ** 3)

    def sharpness(self, progress: float) -> float:
        """gamma(t) = sharpen^t."""
        return self.sharpen**progress


@torch.no_grad()
def enforce_(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> None:
    """Brings the mean keep_prob to the budget of this moment (shift, projection) and hardens the gates, in place.

    A population takes one budget for all its members or one for each, of one control.
    """
    sites = layers.attached(model)
    plans = _per_member(sites, budget)
    shape, device = sites[0].sampler.seed.shape, sites[0].gate.device
    density, sharpness = (
        torch.tensor(values, dtype=torch.float64, device=device).reshape(shape)
        for values in (densities(model, plans, progress), [plan.sharpness(progress) for plan in plans])
    )
    hold_(model, plans[0].control, density, sharpness, look=True)


def densities(model: nn.Module, budget: Budget | Sequence[Budget], progress: float) -> list[float]:
    """Each member's mean keep_prob of the attached weights with which all D weights have its budget's density."""
    sites = layers.attached(model)
    here = sum(site.gate.numel() for site in sites) // sites[0].sampler.seed.numel()
    everything = layers.total(model)
    return [
        masks.density(1 - plan.density(progress), size=here, total=everything) for plan in _per_member(sites, budget)
    ]


@torch.no_grad()
def hold_(model: nn.Module, control: str, density: Tensor, sharpness: Tensor, *, look: bool) -> None:
    """`enforce_` with its numbers on the device, one per member of a population; waits for the device only to `look`.

    density as `densities` gives it. Without a look, a shift follows from the last one in a fixed number of steps.
    """
    sites = layers.attached(model)
    members = sites[0].sampler.seed.ndim == 1
    # One launch for the buffers of all tensors, where there would be one for each.
    torch._foreach_copy_([site.sampler.sharpness for site in sites], [sharpness.float()] * len(sites))  # type: ignore[attr-defined]
    if control == "shift":
        if sites[0].sampler.mapping == "clamp":
            raise ValueError("control 'shift' moves logits, which the clamp mapping has not; use control='projection'")
        raw = [site.sampler.raw(site.mean, site.gate) for site in sites]
        start = sites[0].sampler.shift
        tau = masks.shift(raw, density, sharpness=sharpness, start=start, members=members, look=look)
        torch._foreach_copy_([site.sampler.shift for site in sites], [tau] * len(sites))  # type: ignore[attr-defined]
    elif control == "projection":
        now = [torch.sigmoid(site.logit()) for site in sites]
        projected = masks.project(now, density, eta=ETA, members=members, look=look)
        for site, p in zip(sites, projected, strict=True):
            if site.sampler.mapping == "clamp":
                site.gate.copy_(p)
            else:  # the gate whose logit is logit(p), given the coupling, the shift and the sharpness
                raw = torch.logit(p) / _over(site.sampler.sharpness, p) + _over(site.sampler.shift, p)
                site.gate.add_(raw - site.sampler.raw(site.mean, site.gate))


def penalty(model: nn.Module, budget: Budget | Sequence[Budget], density: Tensor) -> Tensor:
    """Augmented Lagrangian m e + strength e^2 / 2 with e = mean(keep_prob) - density; then m += strength e / 10.

    One number per member of a population; density as `densities` gives it, on the device.
    """
    sites = layers.attached(model)
    plans, multiplier = _per_member(sites, budget), sites[0].sampler.multiplier
    size = sum(site.gate.numel() for site in sites) // multiplier.numel()
    axes = tuple(range(multiplier.ndim, 2))  # of [K, n] the last, of [1, n] both
    each = [torch.sigmoid(site.logit()).reshape(multiplier.numel(), -1).sum(axes) for site in sites]
    excess = torch.stack(each).sum(0) / size - density
    # Filled on the device, since a tensor of Python numbers would be copied there, for which the host waits.
    strength = torch.stack([torch.full((), plan.strength, device=excess.device) for plan in plans])
    strength = strength.reshape(multiplier.shape)
    value = multiplier.clone() * excess + 0.5 * strength * excess**2
    for site in sites:
        site.sampler.multiplier.add_(strength * excess.detach() / 10)
    return value


def _over(value: Tensor, like: Tensor) -> Tensor:
    """A number per model, in a shape that multiplies the models' tensors."""
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _per_member(sites: list[layers.Site], budget: Budget | Sequence[Budget]) -> list[Budget]:
    """The budget of every member of a population, or of the only model; one budget may be given for all."""
    members = sites[0].sampler.seed.numel()
    plans = [budget] * members if isinstance(budget, Budget) else list(budget)
    if len(plans) != members:
        raise ValueError(f"there are {len(plans)} budgets for {members} models; give one for each, or one for all")
    controls = sorted({plan.control for plan in plans})
    if len(controls) > 1:
        raise ValueError(
            f"the budgets of one population have the controls {' and '.join(controls)}, but all are held in one pass; "
            "train one population for each control"
        )
    return plans
