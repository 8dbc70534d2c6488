"""The kl inverse to train on: the bounds themselves need no torch."""

from typing import Any

import torch
from torch import Tensor

NEWTON_STEPS = 7
"""Five give every digit from the first guess (the grid in tests/bounds/test_differentiable.py); two are spare."""


def kl_inverse(q: Tensor, c: Tensor) -> Tensor:
    """sup{p in [q, 1]: kl(q||p) <= c} of every element, differentiable, and without waiting for the device.

    dp/dc = p(1-p)/(p-q) and dp/dq = dp/dc * log(p(1-q)/(q(1-p))), held finite at q = 0 and c = 0. In float64, returned
    in the wider type of q and c. It is for training: near bounds.kl_inverse (to 1e-12), but not rounded upward.
    """
    value = _KlInverse.apply(*torch.broadcast_tensors(q.double(), c.double()))
    return value.to(torch.promote_types(q.dtype, c.dtype))


class _KlInverse(torch.autograd.Function):
    """Newton's method in r = log((1-q)/(1-p)), where kl = (1-q) r - q log(p/q) is convex with the slope (p-q)/p.

    It starts to the right of the root, so that it falls towards it: kl >= (p-q)^2/(2p) bounds p - q, and kl >=
    (1-q)(r - 1 + exp(-r)) >= (1-q) r^2/(2+r) bounds r; the nearer of the two is within a factor of two.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, c: Tensor) -> Tensor:
        # Numbers that change no digit: q / q and 0 log 0 stay finite, and exp(-r) is 0 long before r = 1000.
        q, c = q.clamp(1e-300, 1 - 2.0**-53), c.clamp(0.0, 1000.0)
        rest = 1 - q
        a = c / rest
        far = ((c + torch.sqrt(c * (c + 2 * q))) / rest).clamp_max(1.0)
        r = torch.minimum((a + torch.sqrt(a * (a + 8))) / 2, -torch.log1p(-far))
        for _ in range(NEWTON_STEPS):
            d = -rest * torch.expm1(-r)
            excess = rest * r - q * torch.log1p(d / q) - c
            r = torch.minimum(r, r - excess * (q + d) / d.clamp_min(1e-300)).clamp_min(0.0)
        d = -rest * torch.expm1(-r)
        p, least = q + d, d.clamp_min(1e-12)  # the limit of the slopes at c = 0, to a distance of 1e-12
        to_c = p.clamp_min(1e-12) / least * rest * torch.exp(-r)
        log_odds = torch.log1p(least / q.clamp_min(1e-9)) + torch.maximum(r, least / rest.clamp_min(1e-9))
        ctx.save_for_backward(to_c * log_odds, to_c)
        return p

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        to_q, to_c = ctx.saved_tensors
        return gradients[0] * to_q, gradients[0] * to_c
