"""Sampling of spike-and-slab weights: w = gate * (mean + std * z), with noise made on the spot and never stored.

One uniform u per weight gives both gates: relaxed sigmoid((logit + logit u) / beta), which is the two-class
Gumbel-softmax in distribution, and hard 1[u > 1 - keep_prob], the exact Bernoulli. Backward makes the noise again.

A backend is a module with a NAME and three functions, `draw`, `gradients` and `next_scores`. Three of them follow the
same counters: plain torch (`reference`, anywhere), C++ (`cpp`, built at its first use where a compiler is found) and
Triton (`triton_sampler`). `dispatch` chooses one by the device, and plain torch where the fast one cannot read the
tensors.
PACPRUNE_KERNELS=reference asks for plain torch. `torch_ops` makes the draw differentiable; `law` says how a gate
estimator is added.
"""

from pacprune.kernels.dispatch import (
    backend,
    draw,
    draw_fast,
    fast_backend,
    gradients,
    next_scores,
    status,
    thresholded_network,
)
from pacprune.kernels.law import (
    CLAMP,
    ESTIMATORS,
    ETA,
    GIVEN,
    HARD,
    MAPPINGS,
    MODES,
    NOISELESS,
    PATTERNS,
    SIGMOID,
    SOFT,
    STRAIGHT_THROUGH,
    STRETCHED,
    THRESHOLDED,
    Law,
    SampleInputs,
)
from pacprune.kernels.reference import (
    group_logits,
    hard_gate,
    keep_prob,
    logit,
    opening,
    probability,
    quantised,
    raw,
    top_probability,
)
from pacprune.kernels.torch_ops import sample

__all__ = [
    "CLAMP",
    "ESTIMATORS",
    "ETA",
    "GIVEN",
    "HARD",
    "MAPPINGS",
    "MODES",
    "NOISELESS",
    "PATTERNS",
    "SIGMOID",
    "SOFT",
    "STRAIGHT_THROUGH",
    "STRETCHED",
    "THRESHOLDED",
    "Law",
    "SampleInputs",
    "backend",
    "draw",
    "draw_fast",
    "fast_backend",
    "gradients",
    "group_logits",
    "hard_gate",
    "keep_prob",
    "logit",
    "next_scores",
    "opening",
    "probability",
    "quantised",
    "raw",
    "sample",
    "status",
    "thresholded_network",
    "top_probability",
]
