"""Learning from the dense network that a masked one is made of: its answers are those of the same weights, unmasked."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.data.batches import Objective, is_pair
from pacprune.masking.attachment import unmasked
from pacprune.masking.weights import modes_kept


def distilled(objective: Objective, *, weight: float, temperature: float = 1.0) -> Callable[[nn.Module, Any], Tensor]:
    """(model, batch) -> (1 - weight) * loss + weight * temperature^2 KL(dense || masked), as a `forward` of `pp.fit`.

    Both distributions are softmax(logits / temperature). Those of the dense network come from the same weights without
    masks, in eval mode: there is no second copy. Where the model is in eval mode it is the loss alone.
    """

    def forward(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            output = objective.outputs(model, batch)
            logits_of(output)
            return objective.value(output, batch)
        with torch.no_grad(), unmasked(model), modes_kept(model):
            dense = _classes_last(objective, batch, logits_of(objective.outputs(model.eval(), batch)))
        output = objective.outputs(model, batch)
        masked = _classes_last(objective, batch, logits_of(output))
        apart = divergence(dense, masked, temperature)
        return apart if weight == 1 else (1 - weight) * objective.value(output, batch) + weight * apart

    names = [getattr(f, "__qualname__", repr(f)) for f in (objective.loss, objective.forward)]
    forward.__qualname__ = f"distilled({', '.join(names)}, weight={weight}, temperature={temperature})"
    return forward


def divergence(dense: Tensor, masked: Tensor, temperature: float) -> Tensor:
    """temperature^2 KL(dense || masked) of logits whose last dimension is classes, its mean over all positions."""
    p, q = (F.log_softmax(logits.float() / temperature, dim=-1).flatten(0, -2) for logits in (dense, masked))
    return temperature**2 * F.kl_div(q, p, reduction="batchmean", log_target=True)


def logits_of(output: Any) -> Tensor:
    """The logits of an output: itself, or what it has under that name."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ValueError(
            f"the output for a batch is a {type(output).__name__} without logits of shape (n, ..., classes), which the "
            "masked network would learn from the dense one; return them, or leave distill at 0"
        )
    return logits


def _classes_last(objective: Objective, batch: Any, logits: Tensor) -> Tensor:
    """Logits with their classes last; those that F.cross_entropy reads have them second."""
    second = objective.is_classification(batch) and is_pair(batch)
    return logits.movedim(1, -1) if second else logits
