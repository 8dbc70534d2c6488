"""What a draw is made of: the law that all tensors share, and the inputs of one tensor; K models or K draws at once.

A new gate estimator is four places: its row in `MODES`, its function in reference.py's `GATES`, and its branch in
sampler.cpp and in triton_sampler.py, both by the row's number. `attach`, its errors and the tests read the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

SOFT, STRAIGHT_THROUGH, HARD = "concrete", "straight-through", "hard"
STRETCHED, NOISELESS, THRESHOLDED = "hard-concrete", "deterministic", "thresholded"
SIGMOID, CLAMP, GIVEN = "sigmoid", "clamp", "given"

LOGIT_MAX = 14.0
"""Logits live in [-14, 14]: beyond about 17, sigmoid is 1 in float32 and the sampled probability would be a lie."""
ETA = 1e-5
"""Keep probabilities under the clamp mapping live in [ETA, 1 - ETA]: a prior at 0 or 1 makes the KL infinite."""
GAMMA, ZETA = -0.1, 1.1
"""The interval that the hard-concrete gate is stretched to before it is clamped (Louizos et al. 2018)."""
POWER = 3.0
"""p of Feather's threshold operator sign(w) (|w|^p - tau^p)^(1/p) (Glentis Georgoulakis et al. 2023)."""


class Mode(NamedTuple):
    """How a logit and the weight's uniform number u become the gate that multiplies the slab.

    Args:
        number: What sampler.cpp and triton_sampler.py call it.
        gate: The formula.
        is_binary: Whether the gate is 0 or 1.
        is_estimator: Whether `attach` takes it: gates that are drawn, with a gradient in the logit.
    """

    number: int
    gate: str
    is_binary: bool = False
    is_estimator: bool = True


MODES = {
    SOFT: Mode(0, "s = sigmoid((logit + logit u) / beta)"),
    STRAIGHT_THROUGH: Mode(1, "1[u > 1 - keep_prob], with the gradient of s", is_binary=True),
    HARD: Mode(2, "1[u > 1 - keep_prob]", is_binary=True, is_estimator=False),
    # log alpha of Louizos et al. 2018 is logit - beta log(-ZETA / GAMMA) here: the gate is above 0 exactly where the
    # hard gate is open, with probability keep_prob.
    STRETCHED: Mode(3, "clamp(GAMMA + (ZETA - GAMMA) sigmoid((logit + logit u) / beta - log(-ZETA / GAMMA)), 0, 1)"),
    NOISELESS: Mode(4, "sigmoid(logit / beta): s at u = 1/2, the same in every draw"),
    # With gate parameters of 0 it is Feather's operator, since exp(score / coupling) is |mean|. The gradient goes
    # straight through to the mean, times theta where the gate is 0; to the gate parameter it goes as in NOISELESS.
    THRESHOLDED: Mode(
        5, "(1 - exp(-POWER (score - shift) / coupling))^(1 / POWER) where score > shift, else 0", is_estimator=False
    ),
}
ESTIMATORS = {name: mode for name, mode in MODES.items() if mode.is_estimator}
"""The modes that `attach` takes."""


class GateMapping(NamedTuple):
    """How the gate parameter becomes keep_prob.

    Args:
        number: What sampler.cpp and triton_sampler.py call it.
        keep_prob: The formula.
        is_for_hard_gates: Whether it goes with the mode "hard" alone.
    """

    number: int
    keep_prob: str
    is_for_hard_gates: bool = False


MAPPINGS = {
    SIGMOID: GateMapping(0, "sigmoid(sharpness * (gate + coupling * log(|mean| + 1e-8) - shift)), logit in [-14, 14]"),
    CLAMP: GateMapping(1, "the gate itself, clamped to [ETA, 1 - ETA]"),
    GIVEN: GateMapping(2, "the gate itself, which is `quantised` already", is_for_hard_gates=True),
}

PATTERNS = {"1:4": (1, 4), "2:4": (2, 4), "4:8": (4, 8)}
"""(N, M) of every N:M pattern, which are mappings too: of every M neighbours N are kept.

With x = sharpness * (gate + coupling * log(|mean| + 1e-8)) + g, g a Gumbel number for every weight, the hard gate opens
for the N largest x of a group. The relaxed one is the mean of what sets of N keep, under
Pr(set) ~ exp(sum of its x / beta): the hard one is its limit.
"""
GROUPED = (SOFT, NOISELESS, HARD)
"""The modes of patterns; without noise g is 0."""
KEY = 2.0**16
"""The x of a hard gate are compared as integers, round(KEY x), the first of equals first: all backends agree."""
KEY_MAX = 2.0**13
"""The largest x that is told from others."""


@dataclass(frozen=True)
class Law:
    """How a gate becomes a weight, the same for every tensor of a model.

    Args:
        mapping: A key of `MAPPINGS`: how the gate parameter becomes keep_prob. Or one of `PATTERNS`.
        coupling: The factor of log(|mean| + 1e-8) in the logit; 0 leaves it out.
        mode: A key of `MODES`: how keep_prob becomes the gate that multiplies the slab.
        beta: The temperature of relaxed gates.
        log_std: Whether std is given by its logarithm.
        theta: The share of the gradient that a mean gets below the threshold, in the mode "thresholded".
    """

    mapping: str = SIGMOID
    coupling: float = 0.0
    mode: str = SOFT
    beta: float = 0.5
    log_std: bool = False
    theta: float = 0.5

    @cached_property
    def pattern(self) -> tuple[int, int] | None:
        """(N, M) where groups of M weights share what they keep, else None."""
        return PATTERNS.get(self.mapping)

    @property
    def steepness(self) -> float:
        """How fast a gate opens above its threshold, in the mode "thresholded": POWER / coupling."""
        return POWER / (self.coupling or 1.0)


def check_law(law: Law) -> None:
    """Refuses a mode that its mapping has no numbers for."""
    if law.pattern is not None:
        if law.mode not in GROUPED:
            raise ValueError(f"the pattern {law.mapping} has no mode {law.mode!r}; use one of {', '.join(GROUPED)}")
        return
    if MAPPINGS[law.mapping].is_for_hard_gates and law.mode != HARD:
        raise ValueError(f"a given keep_prob is drawn in mode {HARD!r}, not {law.mode!r}; use the sigmoid mapping")
    if law.mode == THRESHOLDED and law.mapping != SIGMOID:
        raise ValueError(
            f"mode {law.mode!r} has a threshold for the scores of the sigmoid mapping, not of {law.mapping!r}; use that"
        )


def no_branch(law: Law, source: str) -> ValueError:
    """The error of a backend whose source has no branch for a law: its draw would be numbers that nobody computed."""
    return ValueError(
        f"{source} cannot draw by mode {law.mode!r} with mapping {law.mapping!r}, since it has no branch for their "
        "numbers; add one there, or set PACPRUNE_KERNELS=reference"
    )


class SampleInputs(NamedTuple):
    """What one tensor is drawn from; its weights have the indices offset, offset + 1, ... of the noise.

    seed, step, shift, sharpness and noise are tensors without dimensions, or of shape [K] for K members. Each member is
    drawn as if it were alone: then mean, gate and std have a leading K, or, when `shared`, serve all K draws.

    Args:
        mean: The slab's mean.
        gate: The parameter behind keep_prob, of mean's shape; float32, or of a pattern bfloat16.
        std: The slab's width: None, one number, one per member, or one per weight.
        seed: With `step`, what the noise follows from.
        step: The number of the draw.
        offset: The index of the first weight in the noise.
        shift: What the sigmoid mapping subtracts from the logit; None for 0.
        sharpness: What the sigmoid mapping multiplies the logit by; None for 1.
        dtype: The draw's type; None for mean's.
        shared: Whether all K draws are made from one mean, gate and std.
        noise: What the mode "thresholded" multiplies logit u by before it adds it to the score; None for 0.
    """

    mean: Tensor
    gate: Tensor
    std: Tensor | None
    seed: Tensor
    step: Tensor
    offset: int
    shift: Tensor | None = None
    sharpness: Tensor | None = None
    dtype: torch.dtype | None = None
    shared: bool = False
    noise: Tensor | None = None

    @property
    def counters(self) -> tuple[Tensor | None, ...]:
        """What has one number for all weights, or one for every member."""
        return self.seed, self.step, self.shift, self.sharpness, self.noise


def members(inputs: SampleInputs) -> int | None:
    """K, or None for a single draw."""
    sizes = {t.shape[0] for t in inputs.counters if t is not None and t.ndim}
    if len(sizes) > 1:
        raise ValueError(f"seed, step, shift and sharpness belong to {sorted(sizes)} members; give one number or K")
    k = next(iter(sizes), None)
    mean = inputs.mean
    if k is not None and not inputs.shared and mean.shape[:1] != (k,):
        raise ValueError(
            f"{k} members need means of shape [{k}, ...], not {list(mean.shape)}; stack them, or say shared=True"
        )
    return k


def shape(inputs: SampleInputs) -> torch.Size:
    """The shape of the draw."""
    k = members(inputs)
    return torch.Size((k, *inputs.mean.shape)) if inputs.shared and k is not None else inputs.mean.shape


class Layout(NamedTuple):
    """One tensor's inputs as K rows of n weights in memory.

    Args:
        shape: The draw's shape.
        k: The number of rows.
        n: The weights of a row.
        row: How far a row of mean and gate lies from the next; 0 where rows share them.
        std: The std as contiguous numbers, or None.
        std_row: How far a row of std lies from the next.
        std_column: How far a number of std lies from the next; 0 where a row has one.
    """

    shape: torch.Size
    k: int
    n: int
    row: int
    std: Tensor | None
    std_row: int
    std_column: int


def layout(inputs: SampleInputs) -> Layout:
    """The rows of one tensor's inputs."""
    k = members(inputs)
    rows, stacked = k or 1, k is not None and not inputs.shared
    n = inputs.mean.numel() // rows if stacked else inputs.mean.numel()
    row = n if stacked else 0
    std, std_row, std_column = inputs.std, row, 1
    if std is None or std.numel() == 1:
        std_row, std_column = 0, 0
    elif std.numel() == inputs.mean.numel():
        std = std.contiguous()
    elif stacked and std.numel() == rows:
        std, std_row, std_column = std.contiguous(), 1, 0
    else:
        std = std.expand(inputs.mean.shape).contiguous()
    return Layout(shape(inputs), rows, n, row, std, std_row, std_column)


def layouts(all_inputs: Sequence[SampleInputs]) -> list[Layout]:
    """The rows of several tensors' inputs."""
    return [layout(inputs) for inputs in all_inputs]


def bounded(logit: Tensor) -> Tensor:
    """The logit held to [-14, 14], where float32 still tells keep_prob from 0 and 1."""
    return logit.clamp(-LOGIT_MAX, LOGIT_MAX)
