"""What a draw is made of: the law shared by all tensors, and one tensor's inputs; K models or K draws at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SOFT, STRAIGHT_THROUGH, HARD = "concrete", "straight-through", "hard"
STRETCHED, NOISELESS = "hard-concrete", "deterministic"
SIGMOID, CLAMP, GIVEN = "sigmoid", "clamp", "given"

LOGIT_MAX = 14.0
"""Logits live in [-14, 14]: beyond about 17, sigmoid is 1 in float32 and the sampled probability would be a lie."""
ETA = 1e-5
"""Keep probabilities under the clamp mapping live in [ETA, 1 - ETA]: a prior at 0 or 1 makes the KL infinite."""
GAMMA, ZETA = -0.1, 1.1
"""The interval that the hard-concrete gate is stretched to before it is clamped (Louizos et al. 2018)."""


@dataclass(frozen=True)
class Law:
    """How a gate becomes a weight, the same for every tensor of a model.

    mapping "sigmoid": logit = sharpness * (gate + coupling * log(|mean| + 1e-8) - shift), held to [-14, 14];
    "clamp": keep_prob = gate held to [ETA, 1 - ETA]; "given": the gate is a `quantised` keep_prob and the mode is hard.
    With u the weight's uniform number, the gate that multiplies the slab is, by mode,

        concrete          s = sigmoid((logit + logit u) / beta)
        straight-through  1[u > 1 - keep_prob], with the gradient of s
        hard              1[u > 1 - keep_prob]
        hard-concrete     clamp(GAMMA + (ZETA - GAMMA) sigmoid((logit + logit u) / beta - log(-ZETA / GAMMA)), 0, 1)
        deterministic     sigmoid(logit / beta): s at u = 1/2, the same in every draw

    The hard-concrete gate of Louizos et al. 2018 has log alpha = logit - beta log(-ZETA / GAMMA) here, so that it is
    above 0 exactly where the hard gate is open, with probability keep_prob. With `log_std`, std is given by its
    logarithm.
    """

    mapping: str = SIGMOID
    coupling: float = 0.0
    mode: str = SOFT
    beta: float = 0.5
    log_std: bool = False


class SampleInputs(NamedTuple):
    """One tensor's inputs; its weights have the indices offset, offset + 1, ... of the noise.

    seed, step, shift and sharpness are tensors without dimensions, or of shape [K] for K members, each drawn as if it
    were alone: then mean, gate and std have a leading K, or, when `shared`, serve all K draws. std is None, one number,
    one per member, or one per weight. `dtype` is the draw's, when it is not mean's.
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


def members(part: SampleInputs) -> int | None:
    """K, or None for a single draw."""
    found = {t.shape[0] for t in (part.seed, part.step, part.shift, part.sharpness) if t is not None and t.ndim}
    if len(found) > 1:
        raise ValueError(f"seed, step, shift and sharpness belong to {sorted(found)} members; give one number or K")
    k = next(iter(found), None)
    if k is not None and not part.shared and part.mean.shape[:1] != (k,):
        raise ValueError(
            f"{k} members need means of shape [{k}, ...], not {list(part.mean.shape)}; stack them, or say shared=True"
        )
    return k


def shape(part: SampleInputs) -> torch.Size:
    """The shape of the draw."""
    k = members(part)
    return torch.Size((k, *part.mean.shape)) if part.shared and k is not None else part.mean.shape


class Layout(NamedTuple):
    """A part as K rows of n weights: how far a row lies from the next in mean and gate, and in std (rows, columns)."""

    k: int
    n: int
    row: int
    std_row: int
    std_column: int


def layout(part: SampleInputs) -> tuple[Layout, Tensor | None]:
    """The rows of a part, and std as numbers in that layout."""
    k = members(part)
    rows, stacked = k or 1, k is not None and not part.shared
    n = part.mean.numel() // rows if stacked else part.mean.numel()
    row = n if stacked else 0
    std = part.std
    if std is None or std.numel() == 1:
        return Layout(rows, n, row, 0, 0), std
    if std.numel() == part.mean.numel():
        return Layout(rows, n, row, row, 1), std.contiguous()
    if stacked and std.numel() == rows:
        return Layout(rows, n, row, 1, 0), std.contiguous()
    return Layout(rows, n, row, row, 1), std.expand(part.mean.shape).contiguous()


def bounded(logit: Tensor) -> Tensor:
    """The logit held to [-14, 14], where float32 still tells keep_prob from 0 and 1."""
    return logit.clamp(-LOGIT_MAX, LOGIT_MAX)
