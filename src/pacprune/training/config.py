"""The Config that describes how one stage of training is run."""

import math
from dataclasses import dataclass, replace

import numpy as np

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")
EXECUTIONS = ("eager", "graph", "compiled")
MASKS = ("shared", "independent")


GATE_RATIO = 100.0
"""gate_lr / lr unless it is given."""
GATE_STEPS = 3200
"""Just above the longest mask stage, 3,128 steps, that GATE_RATIO was chosen with; see `Config.paced`."""


class _Auto(float):
    """A gate_lr that follows lr, also through dataclasses.replace(config, lr=...)."""


@dataclass(frozen=True)
class Config:
    """How one stage is trained. Gates have their own learning rate, 100 * lr by default, and no weight decay.

    gate_lr None freezes the gates; lr 0 freezes everything else. schedule "cosine" falls to 0, "step" is x0.1 at 50 %
    and at 75 %; `warmup` is the share of steps with a linear rise; `span` is the part of the schedule that this stage
    covers, so that two stages can share one cosine, and one order of the data. The gates' learning rate stays constant.
    A batch of `batch_size` is split into `accumulate` micro-batches, each with its own draw. `samples` > 0 takes the
    gates' gradient from Algorithm 1 with so many draws. With `patience` > 0, stops after so many epochs without a
    better validation loss and goes back to the best one. `amp` computes in bfloat16, images channels-last. execution
    "graph" records the whole step as a CUDA graph and replays it, which a network without Python-side state allows;
    "compiled" hands the network to torch.compile first; on a CPU, and over several ranks, there are no graphs. Under
    torchrun `batch_size` is that of all ranks together; with masks "shared" all draw the same and train what one
    process would, with "independent" each draws its own, so that a step's gradient is a mean over as many draws as
    there are ranks.
    """

    epochs: int = 10
    lr: float = 0.01
    gate_lr: float | str | None = "auto"
    std_lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 128
    optimizer: str = "sgd"
    schedule: str = "constant"
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

    def __post_init__(self) -> None:
        automatic = self.gate_lr == "auto" or isinstance(self.gate_lr, _Auto)
        for name, least in (("epochs", 0), ("batch_size", 1), ("accumulate", 1), ("samples", 0), ("patience", 0)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float, np.integer)) and least <= value < math.inf and value == int(value)):
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
            object.__setattr__(self, name, int(value))
        for name in ("lr", "momentum", "weight_decay", "warmup", "gate_lr", "std_lr", "clip"):
            value = getattr(self, name)
            free = (name == "gate_lr" and automatic) or (value is None and name in ("gate_lr", "std_lr", "clip"))
            if not (free or (isinstance(value, (int, float)) and 0 <= value < math.inf)):
                raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")
        if automatic:
            object.__setattr__(self, "gate_lr", _Auto(GATE_RATIO * self.lr))
        if self.warmup > 1:
            raise ValueError(f"warmup is {self.warmup}; it is a share of the steps and must lie in [0, 1]")
        match self.span:
            case [int() | float() as start, int() | float() as end] if 0 <= start <= end <= 1:
                object.__setattr__(self, "span", (start, end))
            case _:
                raise ValueError(f"span is {self.span!r}; it must be two numbers with 0 <= start <= end <= 1")
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1, or steps would add up without end")
        vocabularies = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "execution": EXECUTIONS, "masks": MASKS}
        for name, known in vocabularies.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(known)}")

    @property
    def first_epoch(self) -> int:
        """How many epochs of the schedule lie before this stage: order and augmentation go on where they ended."""
        start, end = self.span
        return round(self.epochs * start / (end - start)) if end > start else 0

    def paced(self, steps: int) -> "Config":
        """For a stage of so many steps: min(1, GATE_STEPS / steps) of a gate_lr that follows lr; a given one stays.

        The gates' steps add up, so that in a long stage they would outgrow what the weights' sizes say.
        """
        if not isinstance(self.gate_lr, _Auto) or steps <= GATE_STEPS:
            return self
        return replace(self, gate_lr=float(self.gate_lr) * GATE_STEPS / steps)

    def factor(self, progress: float) -> float:
        """What lr is multiplied by when a share `progress` of the stage is done."""
        rise = min(1.0, (progress + 1e-9) / self.warmup) if self.warmup else 1.0
        place = self.span[0] + (self.span[1] - self.span[0]) * progress
        if self.schedule == "cosine":
            return rise * 0.5 * (1 + math.cos(math.pi * place))
        if self.schedule == "step":
            return rise * (1.0 if place < 0.5 else 0.1 if place < 0.75 else 0.01)
        return rise
