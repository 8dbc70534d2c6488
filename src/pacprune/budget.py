"""Sparsity controllers: how the mean keep probability is held to its budget while gates are trained."""

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
def enforce_(model: nn.Module, budget: Budget, progress: float) -> None:
    """Brings the mean keep_prob to the budget of this moment (shift, projection) and hardens the gates, in place."""
    sites = layers.attached(model)
    sharpness, density = budget.sharpness(progress), _density(model, budget, progress)
    for site in sites:
        site.sampler.sharpness.fill_(sharpness)
    if budget.control == "shift":
        if sites[0].sampler.mapping == "clamp":
            raise ValueError("control 'shift' moves logits, which the clamp mapping has not; use control='projection'")
        raw = [site.sampler.raw(site.mean, site.gate) for site in sites]
        tau = masks.shift(raw, density, sharpness=sharpness, start=float(sites[0].sampler.shift))
        for site in sites:
            site.sampler.shift.fill_(tau)
    elif budget.control == "projection":
        projected = masks.project([torch.sigmoid(site.logit()) for site in sites], density, eta=ETA)
        for site, p in zip(sites, projected, strict=True):
            if site.sampler.mapping == "clamp":
                site.gate.copy_(p)
            else:  # the gate whose logit is logit(p), given the coupling, the shift and the sharpness
                raw = torch.logit(p) / sharpness + site.sampler.shift
                site.gate.add_(raw - site.sampler.raw(site.mean, site.gate))


def penalty(model: nn.Module, budget: Budget, progress: float) -> Tensor:
    """Augmented Lagrangian m e + strength e^2 / 2 with e = mean(keep_prob) - density; then m += strength e / 10."""
    sites = layers.attached(model)
    size = sum(site.gate.numel() for site in sites)
    mean = torch.stack([torch.sigmoid(site.logit()).sum() for site in sites]).sum() / size
    excess = mean - _density(model, budget, progress)
    value = sites[0].sampler.multiplier.clone() * excess + 0.5 * budget.strength * excess**2
    for site in sites:
        site.sampler.multiplier.add_(budget.strength * excess.detach() / 10)
    return value


def _density(model: nn.Module, budget: Budget, progress: float) -> float:
    """The mean keep_prob that the attached weights need so that all D weights have the budget's density."""
    here = sum(site.gate.numel() for site in layers.attached(model))
    return masks.density(1 - budget.density(progress), size=here, total=layers.total(model))
