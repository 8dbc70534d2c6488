"""The gradient of the Gibbs risk in keep_prob beyond the relaxation: the paper's Algorithm 1."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pacprune import kernels, philox
from pacprune.masking import attachment, weights


def algorithm1_(model: nn.Module, loss: Callable[[], Tensor], *, samples: int) -> Tensor:
    """The paper's Algorithm 1: adds to .grad the estimate from `samples` hard draws, and returns their mean loss.

    For every gate, zeta = mean loss where b = 1 minus mean loss where b = 0, over the same draws; 0 where all draws
    agree. Its expectation is the true derivative times 1 - p^m - (1-p)^m: shrunk, most of all for extreme p. The
    indicator 0 < sum b < m concerns zeta alone, never a KL term that the caller adds. Weights get the mean gradient.
    """
    if samples < 2:
        raise ValueError(f"Algorithm 1 compares draws and needs at least 2 samples, not {samples}")
    sites = attachment.require_sites(model)
    pattern = sites[0].sampler.pattern
    if pattern is not None:
        raise ValueError(
            f"Algorithm 1 needs one gate for every weight, but those of the pattern {pattern[0]}:{pattern[1]} choose "
            f"among groups of {pattern[1]}; use samples=0, or another mapping"
        )
    open_counts = [torch.zeros_like(site.gate) for site in sites]
    losses_when_open = [torch.zeros_like(site.gate) for site in sites]
    total = torch.zeros((), device=sites[0].gate.device)
    with weights.modes_kept(model):
        for site in sites:
            site.sampler.eval()
        for k in range(samples):
            if k:
                attachment.advance_(sites)
            value = loss()
            (value / samples).backward()
            total += value.detach()
            for site, count, when_open in zip(sites, open_counts, losses_when_open, strict=True):
                gate = _present_gate(site).to(count.dtype)
                count += gate
                when_open += gate * value.detach()
    for site, count, when_open in zip(sites, open_counts, losses_when_open, strict=True):
        if site.gate.requires_grad:
            both = (count > 0) & (count < samples)
            zeta = when_open / count.clamp_min(1) - (total - when_open) / (samples - count).clamp_min(1)
            torch.sigmoid(site.logit()).backward(torch.where(both, zeta, 0.0))
    return total / samples


def _present_gate(site: attachment.AttachedWeight) -> Tensor:
    """The hard gates of the present step."""
    sampler, gate = site.sampler, site.gate
    counter = {"seed": sampler.seed, "step": sampler.step, "offset": sampler.offset}
    word = philox.words(gate.numel(), stream=philox.GATE, device=gate.device, **counter)
    return kernels.hard_gate(site.keep_prob(), word)
