"""Which backend draws: the choice by device, by what the tensors are, and by the environment."""

import functools
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pacprune.kernels import reference
from pacprune.kernels.law import Law, SampleInputs, check_law

_FORCE = "PACPRUNE_KERNELS"
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WEIGHTS, _FLOAT, _COUNTER = (torch.float32, torch.bfloat16), (torch.float32,), (torch.int64,)


# --- By device


def _cpp() -> tuple[ModuleType, str]:
    from pacprune.kernels import cpp

    try:
        return cpp, f"C++ kernels, built by {cpp.library().compiler}"
    except cpp.NoCompiler as missing:  # no fault of the user's, so no warning
        return reference, f"plain torch, since {missing}"


def _triton() -> tuple[ModuleType, str]:
    try:
        from pacprune.kernels import triton_sampler
    except ImportError as missing:
        raise ImportError(f"{missing}; install triton") from missing
    return triton_sampler, f"Triton {triton_sampler.VERSION} kernels"


_FAST = {"cpu": ("C++", _cpp), "cuda": ("Triton", _triton)}
"""By the device's type: the language of its fast backend, and what loads it."""


@functools.cache
def _loaded(device_type: str) -> tuple[ModuleType, str]:
    """The best backend for a type of device, and a sentence about it that says what to do."""
    if device_type not in _FAST:
        return reference, f"plain torch, since there are no faster kernels for the device {device_type!r}"
    language, load = _FAST[device_type]
    try:
        return load()
    except (OSError, ImportError) as failure:
        sentence = f"plain torch instead of the {language} kernels, since {failure}"
    warnings.warn(f"weights are sampled by {sentence}", stacklevel=2)  # once: the answer is kept
    return reference, sentence


def _for_device(device: torch.device) -> tuple[ModuleType, str]:
    setting = os.environ.get(_FORCE) or "auto"
    if setting == "reference":
        return reference, f"plain torch, since {_FORCE} is set to 'reference'; unset it for the faster kernels"
    if setting != "auto":
        raise ValueError(f"{_FORCE} is {setting!r}; set it to 'auto' or 'reference'")
    return _loaded(device.type)


def backend(device: torch.device | str) -> str:
    """What draws weights on this device: "reference", "cpu" or "triton"."""
    return _for_device(torch.device(device))[0].NAME


def status(device: torch.device | str) -> str:
    """One sentence: what draws weights on this device, and why it is not something faster."""
    return _for_device(torch.device(device))[1]


# --- By the tensors


def fast_backend(inputs: SampleInputs, law: Law) -> ModuleType | None:
    """The backend that reads these tensors' memory; None where plain torch must see them (other types, vmap)."""
    if torch._C._len_torch_dispatch_stack():  # something wants to see every operation, or makes tensors without memory
        return None
    transformed = torch._C._are_functorch_transforms_active()
    mean, gate, std, seed, step, _, shift, sharpness, dtype, _, noise = inputs
    device = mean.device
    for tensor, dtypes in (
        (mean, _WEIGHTS),
        (gate, _FLOAT if law.pattern is None else _WEIGHTS),
        (std, _FLOAT),
        (seed, _COUNTER),
        (step, _COUNTER),
        (shift, _FLOAT),
        (sharpness, _FLOAT),
        (noise, _FLOAT),
    ):
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or tensor.dtype not in dtypes or tensor.device != device:
            return None
        if transformed and torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
            return None
    if dtype is not None and dtype not in _WEIGHTS:
        return None
    module = _for_device(device)[0]
    return None if module is reference else module


@torch.no_grad()
def draw(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """One draw of every tensor, outside autograd; by a fast backend in one launch, into one flat buffer."""
    check_law(law)
    return _common_backend(all_inputs, law).draw(all_inputs, law)


@torch.no_grad()
def next_scores(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """What the draw after the present one compares with the shift, in the mode "thresholded"; float32."""
    check_law(law)
    return _common_backend(all_inputs, law).next_scores(all_inputs, law)


def thresholded_network(*, rows: Sequence[Tensor], **others: Any) -> Any:
    """What computes a whole network in the mode "thresholded" in few launches; None where no backend does.

    Its arguments and methods are those of triton_threshold.Network.
    """
    if rows[0].device.type != "cuda" or backend(rows[0].device) != "triton":
        return None
    from pacprune.kernels import triton_threshold

    return triton_threshold.network(rows=rows, **others)


def _common_backend(all_inputs: Sequence[SampleInputs], law: Law) -> ModuleType:
    """The fast backend that reads all of these tensors, or plain torch."""
    backends = {fast_backend(inputs, law) for inputs in all_inputs}
    together = len(backends) == 1 and len({inputs.mean.device for inputs in all_inputs}) == 1
    return (backends.pop() if together else None) or reference


@torch.no_grad()
def draw_fast(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor | None]:
    """`draw` of those tensors, all on one device, that a fast backend reads; None for the others."""
    backends = [fast_backend(inputs, law) for inputs in all_inputs]
    module = next((module for module in backends if module is not None), None)
    if module is None:
        return [None] * len(all_inputs)
    values = iter(module.draw([inputs for inputs, fast in zip(all_inputs, backends, strict=True) if fast], law))
    return [next(values) if fast else None for fast in backends]


@torch.no_grad()
def gradients(
    inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool] = (True, True, True)
) -> reference.Gradients:
    """The gradients in mean, gate and std, from that in the draw, `out`, in one pass; None where not needed."""
    module = fast_backend(inputs, law)
    if module is None or type(out) not in _PLAIN or out.dtype not in _WEIGHTS:
        module = reference
    return module.gradients(inputs, law, out, needs)
