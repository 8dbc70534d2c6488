"""The Config that describes how one stage of training is run, and the tables that its words come from."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pacprune.training.optim import OPTIMIZERS, Factory
from pacprune.types import check_name

Schedule = Callable[[float], float]
"""The share of the schedule that is done, in [0, 1] -> what the learning rate is multiplied by."""


def constant(share: float) -> float:
    """1 from start to end."""
    return 1.0


def cosine(share: float) -> float:
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * share))


def step(share: float) -> float:
    """0.1 from the half on, and 0.01 from three quarters on."""
    return 1.0 if share < 0.5 else 0.1 if share < 0.75 else 0.01


@dataclass(frozen=True)
class Execution:
    """By what means steps are taken: recorded as a CUDA graph, and through torch.compile."""

    graph: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class MaskDraws:
    """Who draws masks under torchrun: all ranks the same ones, or every rank its own."""

    by_rank: bool = False


SCHEDULES: dict[str, Schedule] = {"constant": constant, "cosine": cosine, "step": step}
"""Schedules of the learning rate, which `Config.schedule` names."""
EXECUTIONS = {
    "eager": Execution(),
    "graph": Execution(graph=True),
    "compiled": Execution(graph=True, compiled=True),
}
"""What `Config.execution` names."""
MASKS = {"shared": MaskDraws(), "independent": MaskDraws(by_rank=True)}
"""What `Config.masks` names."""

GATE_RATIO = 100.0
"""gate_lr / lr unless a gate_lr is given."""
GATE_STEPS = 3200
"""Just above the longest mask stage, 3,128 steps, that GATE_RATIO was chosen with; see `Config.paced`."""

_COUNTS = {"epochs": 0, "batch_size": 1, "accumulate": 1, "samples": 0, "patience": 0}
"""Fields that hold a whole number, and the least that it may be."""
_NUMBERS = ("lr", "momentum", "weight_decay", "warmup", "gate_lr", "std_lr", "clip")
_OPTIONAL = ("gate_lr", "std_lr", "clip")
_PROBES = [k / 16 for k in range(17)]
"""Where a schedule of the user's own is read to tell it from others."""


class _Auto(float):
    """A gate_lr that follows lr, also through dataclasses.replace(config, lr=...)."""


@dataclass(frozen=True)
class Config:
    """How one stage is trained. Gates have their own learning rate, 100 * lr by default, and no weight decay.

    Args:
        epochs: Passes over the data.
        lr: Learning rate of the weights, such as 0.01; 0 freezes all but the gates.
        gate_lr: Learning rate of the gates, which no schedule changes; of thresholded ones, it follows lr's schedule.
            "auto" is 100 * lr; None freezes them.
        gates_scheduled: Whether gate_lr follows lr's schedule and warm-up also where it would stay.
        std_lr: Learning rate of the logarithms of a trained std; None is lr.
        momentum: What SGD keeps of the last step; beta1 of Adam and AdamW.
        weight_decay: L2 penalty of the weights (of AdamW: decoupled), such as 5e-4.
        batch_size: Examples per step, over all ranks together. A DataLoader has its own.
        steps_per_epoch: Steps that count as an epoch of a stream (an IterableDataset); None for all other data.
        optimizer: "sgd", "adam", "adamw", or "adamw8" (AdamW with a state of 1 byte per parameter: an 8-bit mean, and
            one second moment for every 256). Or a function from the weights to an optimiser of torch.optim, such as
            lambda params: torch.optim.NAdam(params, lr=1e-3): its learning rate follows the schedule, and lr, momentum
            and weight_decay are its own. Gates then have SGD.
        schedule: What lr follows: "constant", "cosine" (falls to 0), "step" (0.1 times at 50 % and again at 75 %), or a
            function from the share that is done, in [0, 1], to a factor.
        warmup: Share of the steps with a linear rise from 0, such as 0.05.
        span: The part of the schedule that this stage covers. Two stages with (0, 0.5) and (0.5, 1) share one schedule
            and one order of the data.
        accumulate: Micro-batches that a batch is split into, each with its own draw of the masks.
        amp: Whether to compute in bfloat16, with images channels-last.
        augment: Whether images are shifted by up to 4 pixels (small ones by a seventh) and mirrored at random. Mirrored
            digits or letters are others: for these take `Part.augmented` with a transform of your own.
        clip: The largest norm of a step's gradient in what is trained, such as 1.0; None leaves it as it is.
        samples: With more than 0, the gates' gradient is that of Algorithm 1 with so many draws.
        patience: With more than 0, stops after so many epochs without a better validation loss, and goes back to the
            best one.
        execution: By what means steps are taken; up to rounding, the outcome is the same. "eager" is plain PyTorch.
            "graph" records the whole step as a CUDA graph and replays it, which a network without Python-side state
            allows. "compiled" hands the network to torch.compile first. On a CPU, and over several ranks, there are no
            graphs.
        masks: Under torchrun. With "shared" all ranks draw the same masks and train what one process would. With
            "independent" each draws its own, so that a step's gradient is a mean over as many draws as there are ranks.

    Example:
        >>> config = pp.Config(epochs=5, lr=0.1, schedule="cosine")
        >>> config.gate_lr
        10.0
        >>> config
        Config(epochs=5, lr=0.1, schedule='cosine')
        >>> pp.Config(schedule=lambda share: 1 - share).factor(0.25)
        0.75
    """

    epochs: int = 10
    lr: float = 0.01
    gate_lr: float | str | None = "auto"
    std_lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 128
    optimizer: str | Factory = "sgd"
    schedule: str | Schedule = "constant"
    warmup: float = 0.0
    span: tuple[float, float] = (0.0, 1.0)
    accumulate: int = 1
    amp: bool = False
    augment: bool = False
    clip: float | None = None
    samples: int = 0
    patience: int = 0
    execution: str = "eager"
    masks: str = "shared"
    steps_per_epoch: int | None = None
    gates_scheduled: bool = False

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.steps_per_epoch is not None:
            object.__setattr__(self, "steps_per_epoch", whole("steps_per_epoch", self.steps_per_epoch, 1))
        follows_lr = self.gate_lr == "auto" or isinstance(self.gate_lr, _Auto)
        for name in _NUMBERS:
            if not (follows_lr and name == "gate_lr"):
                _check_number(name, getattr(self, name))
        if follows_lr:
            object.__setattr__(self, "gate_lr", _Auto(GATE_RATIO * self.lr))
        if self.warmup > 1:
            raise ValueError(f"warmup is {self.warmup}; it is a share of the steps and must lie in [0, 1]")
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1, or steps would add up without end")
        object.__setattr__(self, "span", _ordered(self.span))
        if callable(self.schedule):
            _check_schedule(self.schedule)
        else:
            check_name("schedule", self.schedule, SCHEDULES)
        if callable(self.optimizer):
            self._check_factory()
        else:
            check_name("optimizer", self.optimizer, OPTIMIZERS, alternative="a function")
        check_name("execution", self.execution, EXECUTIONS)
        check_name("masks", self.masks, MASKS)

    def _check_factory(self) -> None:
        """Refuses settings that an optimiser of the user's own has itself, or that it cannot have."""
        changed = [name for name in ("lr", "momentum", "weight_decay") if name in self.changes()]
        if changed:
            raise ValueError(
                f"{changed[0]} is {getattr(self, changed[0])}, but the optimizer is a function, which has its own; say "
                "it there"
            )
        if self.execution != "eager":
            raise ValueError(
                f"execution is {self.execution!r}, but an optimizer that is a function cannot be recorded; use 'eager'"
            )

    def __eq__(self, other: object) -> bool:
        # A gate_lr that follows lr is another setting than a number that equals it now: only the first can change.
        return isinstance(other, Config) and self.changes() == other.changes()

    def __repr__(self) -> str:
        # Everyone who looks at a Config wants to know these two.
        values = {"epochs": self.epochs, "lr": self.lr} | self.changes()
        return f"Config({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def changes(self) -> dict[str, Any]:
        """The fields that have not their default value, in their order."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        if isinstance(self.gate_lr, _Auto):
            del values["gate_lr"]
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def first_epoch(self) -> int:
        """How many epochs of the schedule lie before this stage: order and augmentation go on where they ended."""
        start, end = self.span
        return round(self.epochs * start / (end - start)) if end > start else 0

    def paced(self, steps: int) -> "Config":
        """For a stage of so many steps: min(1, GATE_STEPS / steps) of a gate_lr that follows lr; a given one stays.

        The gates' steps add up, so that in a long stage they would outgrow what the weights' sizes say.

        Args:
            steps: The number of steps of the stage.
        """
        if not isinstance(self.gate_lr, _Auto) or steps <= GATE_STEPS:
            return self
        return replace(self, gate_lr=float(self.gate_lr) * GATE_STEPS / steps)

    def factor(self, progress: float) -> float:
        """What lr is multiplied by at one moment of the stage.

        Args:
            progress: The share of the stage that is done, in [0, 1].
        """
        rise = min(1.0, (progress + 1e-9) / self.warmup) if self.warmup else 1.0
        start, end = self.span
        schedule = self.schedule if callable(self.schedule) else SCHEDULES[self.schedule]
        return rise * schedule(start + (end - start) * progress)

    def identity(self) -> dict[str, Any]:
        """All that the outcome of training follows from, as JSON holds it; `execution` is no part of that."""
        content = asdict(replace(self, execution="eager"))
        if self.steps_per_epoch is None:
            del content["steps_per_epoch"]
        if not self.gates_scheduled:
            del content["gates_scheduled"]
        if self.gate_lr == GATE_RATIO * self.lr and not isinstance(self.gate_lr, _Auto):
            content["gate_lr"] = [self.gate_lr, "given"]  # any other number tells itself from one that follows lr
        if callable(self.optimizer):  # what it makes tells more than a name
            content["optimizer"] = repr(self.optimizer([nn.Parameter(torch.zeros(1))]))
        if callable(self.schedule):  # a name does not tell two functions apart
            content["schedule"] = [float(self.schedule(share)) for share in _PROBES]
        return content


def whole(name: str, value: Any, least: int) -> int:
    """A whole number as int, of whatever type it is."""
    if isinstance(value, (int, float, np.integer)) and least <= value < math.inf and value == int(value):
        return int(value)
    raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _check_number(name: str, value: Any) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")


def _ordered(span: Any) -> tuple[float, float]:
    """The two ends of a span, in order and in [0, 1]."""
    match span:
        case [int() | float() as start, int() | float() as end] if 0 <= start <= end <= 1:
            return start, end
    raise ValueError(f"span is {span!r}; it must be two numbers with 0 <= start <= end <= 1")


def _check_schedule(schedule: Schedule) -> None:
    for share in _PROBES:
        factor = schedule(share)
        if not (isinstance(factor, (int, float)) and 0 <= factor < math.inf):
            raise ValueError(
                f"the schedule gives {factor!r} at the share {share}; it must give a number of at least 0 for every "
                "share in [0, 1]"
            )
