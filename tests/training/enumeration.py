"""The exact Gibbs risk by enumeration, which estimators and sampled networks are tested against."""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pacprune.masking.spikeslab import SpikeSlab


def enumerate_gibbs(q: SpikeSlab, loss: Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
    """The exact Gibbs risk sum_b Pr(b) loss(b * mean) over all 2^D masks, D <= 16.

    Differentiable in keep_prob and mean. The slab has no width.
    """
    names, sizes = list(q.keep_prob), [p.numel() for p in q.keep_prob.values()]
    if sum(sizes) > 16:
        raise ValueError(f"enumeration needs 2^D losses and takes D <= 16, not {sum(sizes)}")
    if any(bool((s != 0).any()) for s in q.std.values()):
        raise ValueError("enumeration is for stochastic masks: std must be 0")
    p = torch.cat([q.keep_prob[n].reshape(-1) for n in names])
    risk = torch.zeros((), dtype=p.dtype)
    for bits in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        b = torch.tensor(bits, dtype=p.dtype)
        parts = dict(zip(names, b.split(sizes), strict=True))
        chance = torch.where(b > 0, p, 1 - p).prod()
        risk = risk + chance * loss({n: parts[n].reshape(q.mean[n].shape) * q.mean[n] for n in names})
    return risk
