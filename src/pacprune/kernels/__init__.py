"""Sampling of spike-and-slab weights: w = gate * (mean + std * z), with noise made on the spot and never stored.

One uniform u per weight gives both gates: relaxed sigmoid((logit + logit u) / beta), which is the two-class
Gumbel-softmax in distribution, and hard 1[u > 1 - keep_prob], the exact Bernoulli. Backward makes the noise again.

Three backends follow the same counters: plain torch (`reference`, anywhere), C++ (`cpu`, built at its first use where a
compiler is found) and Triton (`gpu`). PACPRUNE_KERNELS=reference asks for the first.
"""

import functools
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pacprune.kernels import reference
from pacprune.kernels.law import (
    CLAMP,
    ETA,
    GIVEN,
    HARD,
    NOISELESS,
    SIGMOID,
    SOFT,
    STRAIGHT_THROUGH,
    STRETCHED,
    Law,
    SampleInputs,
    members,
    shape,
)
from pacprune.kernels.reference import Gradients, hard_gate, keep_prob, logit, probability, quantised, raw

__all__ = [
    "CLAMP",
    "ETA",
    "GIVEN",
    "HARD",
    "NOISELESS",
    "SIGMOID",
    "SOFT",
    "STRAIGHT_THROUGH",
    "STRETCHED",
    "Law",
    "SampleInputs",
    "backend",
    "draw",
    "fast",
    "gradients",
    "hard_gate",
    "keep_prob",
    "logit",
    "members",
    "probability",
    "quantised",
    "raw",
    "sample",
    "shape",
    "status",
]

_FORCE = "PACPRUNE_KERNELS"
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WEIGHTS, _FLOAT, _COUNTER = (torch.float32, torch.bfloat16), (torch.float32,), (torch.int64,)


@functools.cache
def _found(kind: str) -> tuple[ModuleType | None, str]:
    """The fast backend for a kind of device, or None; and a sentence about it that says what to do."""
    if kind == "cpu":
        from pacprune.kernels import cpp

        try:
            return cpp, f"C++ kernels, built by {cpp.library().compiler}"
        except cpp.NoCompiler as missing:
            return None, f"plain torch, since {missing}"
        except OSError as failed:
            sentence = f"plain torch instead of the C++ kernels, since {failed}"
    elif kind == "cuda":
        try:
            from pacprune.kernels import triton_sampler

            return triton_sampler, f"Triton {triton_sampler.VERSION} kernels"
        except ImportError as failed:
            sentence = f"plain torch instead of the Triton kernels, since {failed}; install triton"
    else:
        return None, f"plain torch, since there are no faster kernels for the device {kind!r}"
    warnings.warn(f"weights are sampled by {sentence}", stacklevel=2)  # once: the answer is kept
    return None, sentence


def _for(device: torch.device) -> tuple[ModuleType | None, str]:
    asked = os.environ.get(_FORCE) or "auto"
    if asked == "reference":
        return None, f"plain torch, since {_FORCE} is set to 'reference'; unset it for the faster kernels"
    if asked != "auto":
        raise ValueError(f"{_FORCE} is {asked!r}; set it to 'auto' or 'reference'")
    return _found(device.type)


def backend(device: torch.device | str) -> str:
    """What draws weights on this device: "reference", "cpu" or "triton"."""
    module, _ = _for(torch.device(device))
    return "reference" if module is None else module.NAME


def status(device: torch.device | str) -> str:
    """One sentence: what draws weights on this device, and why it is not something faster."""
    return _for(torch.device(device))[1]


def fast(part: SampleInputs) -> ModuleType | None:
    """The backend that reads this part's memory; None where plain torch must see the tensors (other types, vmap)."""
    if torch._C._len_torch_dispatch_stack():  # something wants to see every operation, or makes tensors without memory
        return None
    wrapped = torch._C._are_functorch_transforms_active()
    mean, gate, std, seed, step, _, shift, sharpness, dtype, _ = part
    device = mean.device
    for tensor, kinds in (
        (mean, _WEIGHTS),
        (gate, _FLOAT),
        (std, _FLOAT),
        (seed, _COUNTER),
        (step, _COUNTER),
        (shift, _FLOAT),
        (sharpness, _FLOAT),
    ):
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or tensor.dtype not in kinds or tensor.device != device:
            return None
        if wrapped and torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
            return None
    if dtype is not None and dtype not in _WEIGHTS:
        return None
    return _for(device)[0]


@torch.no_grad()
def draw(parts: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """One draw of every part, outside autograd; parts of one type are made in one launch into one flat buffer."""
    if law.mapping == GIVEN and law.mode != HARD:
        raise ValueError(f"a given keep_prob is drawn in mode {HARD!r}, not {law.mode!r}; use the sigmoid mapping")
    modules = {fast(part) for part in parts}
    module = modules.pop() if len(modules) == 1 else None
    if module is None or len({part.mean.device for part in parts}) > 1:
        return [reference.draw(part, law) for part in parts]
    return module.draw(parts, law)


@torch.no_grad()
def gradients(
    part: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool] = (True, True, True)
) -> Gradients:
    """(to mean, to gate, to std) of the draw, given the gradient in the draw, in one pass; None where not needed."""
    module = fast(part)
    if module is None or type(out) not in _PLAIN or out.dtype not in (torch.float32, torch.bfloat16):
        return reference.gradients(part, law, out, needs)
    return module.gradients(part, law, out, needs)


class _Sample(torch.autograd.Function):
    """The differentiable draw in eager mode: saves its inputs alone; forward may be handed what is drawn already."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        gate: Tensor,
        std: Tensor | None,
        part: SampleInputs,
        law: Law,
        drawn: tuple[Tensor, ...],
    ) -> Tensor:
        ctx.save_for_backward(mean, gate, std, part.seed, part.step, part.shift, part.sharpness)
        ctx.offset, ctx.dtype, ctx.law = part.offset, part.dtype, law
        # A new tensor over the same memory: autograd marks what it returns, and the slice serves more than one read.
        return drawn[0].detach() if drawn else draw([part], law)[0]

    @staticmethod
    def backward(ctx: Any, *out: Tensor) -> tuple[Tensor | None, ...]:
        mean, gate, std, seed, step, shift, sharpness = ctx.saved_tensors
        part = SampleInputs(mean, gate, std, seed, step, ctx.offset, shift, sharpness, ctx.dtype)
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            found = reference.gradients(part, ctx.law, out[0], ctx.needs_input_grad[:3])
        else:
            found = gradients(part, ctx.law, out[0], ctx.needs_input_grad[:3])
        return *found, None, None, None


def sample(part: SampleInputs, law: Law, drawn: Tensor | None = None) -> Tensor:
    """One draw, differentiable in mean, gate and std; `drawn` is its value where that is known already."""
    if part.shared:
        raise ValueError("draws that share their mean have no gradient; use `draw`, or stack the means")
    mean, gate, std, seed, step, offset, shift, sharpness, dtype, _ = part
    if torch.compiler.is_compiling():
        static = (offset, dtype, law.mapping, law.coupling, law.mode, law.beta, law.log_std)
        return torch.ops.pacprune.sample(mean, gate, std, seed, step, shift, sharpness, *static)
    if torch._C._are_functorch_transforms_active():
        return reference.sample(part, law)
    return _Sample.apply(mean, gate, std, part, law, () if drawn is None else (drawn,))


from pacprune.kernels import torch_ops as torch_ops  # noqa: E402  its operators call this module
