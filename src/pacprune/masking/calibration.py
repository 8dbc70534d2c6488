"""What the layers of a network multiply their weights with, on calibration data: norms and second moments of inputs.

A layer here is one that reads its weight as a matrix: nn.Linear, a convolution in 1, 2 or 3 dimensions, and the Conv1D
of transformers, which is a Linear with a transposed weight. Of a convolution the inputs are the patches under its
kernel. A layer with G groups is G matrices, so that everything here has a leading dimension of groups, mostly 1.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.data.batches import Objective, batches, device_of, isolated_rng, rows, taken
from pacprune.masking import weights
from pacprune.types import Data, Diverged, Forward

Measure = Callable[[Tensor], Tensor]
"""[groups, tokens, inputs] -> what is added up over all tokens."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def squares(inputs: Tensor) -> Tensor:
    """The sum of squares of every input over tokens, [groups, inputs]."""
    return inputs.square().sum(1)


def second_moments(inputs: Tensor) -> Tensor:
    """X'X, the sum of products of every two inputs over tokens, [groups, inputs, inputs]."""
    return inputs.mT @ inputs


# --- Layers.


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer whose weight is a matrix.

    Args:
        name: Of its weight.
        module: The layer.
    """

    name: str
    module: Any

    @property
    def weight(self) -> nn.Parameter:
        """The weight, as the layer stores it."""
        return self.module.weight

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as [inputs, outputs]."""
        return _is_transposed(self.module)

    @property
    def inputs(self) -> int:
        """How many numbers one output is made from."""
        return len(self.weight) if self.transposed else self.weight[0].numel()

    def matrix(self, stored: Tensor) -> Tensor:
        """[groups, outputs, inputs] of a tensor that is stored as the weight is."""
        if self.transposed:
            return stored.T.unsqueeze(0)
        groups = self.module.groups if isinstance(self.module, _CONVOLUTIONS) else 1
        return stored.reshape(groups, len(stored) // groups, -1)

    def stored(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix[0].T.contiguous() if self.transposed else matrix.reshape(self.weight.shape)

    def features(self, inputs: Tensor) -> Tensor:
        """[groups, tokens, inputs] of what the layer is called with."""
        inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        if isinstance(self.module, _CONVOLUTIONS):
            return _patches(self.module, inputs)
        return inputs.reshape(1, -1, inputs.shape[-1])

    @property
    def view(self) -> object:
        """Equal for two layers that see the same numbers in the same input."""
        return self.module if isinstance(self.module, _CONVOLUTIONS) else None


def _is_transposed(module: nn.Module) -> bool:
    """Whether this is a Conv1D of transformers, which need not be installed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _patches(layer: Any, images: Tensor) -> Tensor:
    """What lies under the kernel at every place, by group of channels."""
    dims = len(layer.kernel_size)
    images = images if images.ndim == dims + 2 else images.unsqueeze(0)
    geometry = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padding = list(itertools.chain.from_iterable(reversed(_padding(layer))))
    images = F.pad(images, padding, mode=mode) if any(padding) else images
    for d, (size, stride, dilation) in enumerate(geometry):
        images = images.unfold(d + 2, (size - 1) * dilation + 1, stride)[..., ::dilation]
    # [examples, channels, places..., kernel...] -> [groups, examples and places, channels of a group and kernel]
    images = images.unflatten(1, (layer.groups, -1)).movedim(2, 2 + dims)
    return images.movedim(1, 0).flatten(2 + dims).flatten(1, 1 + dims)


def _padding(layer: Any) -> list[tuple[int, int]]:
    """(before, after) of every dimension."""
    if not isinstance(layer.padding, str):
        return [(size, size) for size in layer.padding]
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    sums = [(size - 1) * dilation for size, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
    return [(total // 2, total - total // 2) for total in sums]


def layers_of(model: nn.Module) -> dict[str, list[Layer]]:
    """The layers that read a weight as a matrix, by its first name; without weights that something else reads, too.

    What else a module does with its own weight, such as an Embedding with one that is tied to the output layer, is
    not known.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    layers: dict[str, list[Layer]] = {}
    other_owners: set[str] = set()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names[id(parameter)]
            if key == "weight" and (isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or _is_transposed(module)):
                layers.setdefault(name, []).append(Layer(name, module))
            else:
                other_owners.add(name)
    return {name: readers for name, readers in layers.items() if name not in other_owners}


def layers_for(model: nn.Module, names: Iterable[str]) -> dict[str, list[Layer]]:
    """The layers of these weights; refuses others, whose inputs cannot be seen."""
    layers, names = layers_of(model), list(names)
    hidden = [name for name in names if name not in layers]
    if hidden:
        raise ValueError(
            f"no inputs can be recorded for {weights.some(hidden)}: only Linear and convolution layers show theirs, "
            "and not those that share a weight with an embedding; leave them out by exclude="
        )
    return {name: layers[name] for name in names}


# --- Statistics.


@contextmanager
def recorded(layers: Mapping[str, Sequence[Layer]], measure: Measure) -> Iterator[dict[str, Tensor]]:
    """Meanwhile, every forward pass adds what is measured of a layer's inputs to the sum of its weight."""
    sums: dict[str, Tensor] = {}
    last: list[Any] = [None, None, None]  # layers side by side, as query, key and value, have one input
    # Held here it cannot be freed, and so no other tensor can be taken for it; its version tells if it was written to.

    def record(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args[0] if args else next(iter(kwargs.values()))
        state = layer.view, None if inputs.is_inference() else inputs._version
        if last[0] is not inputs or last[1] != state or inputs.is_inference():
            last[:] = inputs, state, measure(layer.features(inputs.detach()))
        if layer.name in sums:
            sums[layer.name] += last[2]
        else:
            sums[layer.name] = last[2].clone()

    def hook(layer: Layer) -> Callable[..., None]:
        return lambda module, args, kwargs: record(layer, args, kwargs)

    handles = [
        layer.module.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for readers in layers.values()
        for layer in readers
    ]
    try:
        yield sums
    finally:
        last[:] = None, None, None
        for handle in handles:
            handle.remove()


def check_sums(sums: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuses weights whose layers no batch reached, and inputs that are not finite."""
    names = list(names)
    missed = [name for name in names if name not in sums]
    if missed:
        raise ValueError(
            f"no calibration batch reached the layers of {weights.some(missed)}; give more examples, or leave them "
            "out by exclude="
        )
    for name in names:
        if not bool(torch.isfinite(sums[name]).all()):
            raise Diverged(
                f"the layer of {name} got NaN or infinite inputs from the calibration data; check the batches and the "
                "weights, and that float16 does not overflow where bfloat16 would not"
            )


def outputs(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """What the network makes of a batch, which may also be a tensor of inputs alone."""
    if forward is None and type(batch) in (tuple, list) and len(batch) == 1:
        batch = batch[0]
    if forward is None and isinstance(batch, Tensor):
        return model(batch)
    return Objective(forward=forward).outputs(model, batch)


def first_batches(data: Data, size: int, examples: int, *, device: torch.device) -> Iterator[Any]:
    """Batches of the first examples, of exactly so many or all; refuses data without any."""
    if examples < 1:
        raise ValueError(f"examples is {examples}; calibration needs one at least, such as 128")
    left = examples
    for batch in batches(data, size, device=device, limit=examples):
        count = rows(batch)
        yield batch if count <= left else taken(batch, torch.arange(left, device=device))
        left -= count
    if left == examples:
        raise ValueError(f"the calibration data, a {type(data).__name__}, gave no batch; check what it reads")


@torch.no_grad()
def sums_of(
    model: nn.Module,
    data: Data,
    layers: Mapping[str, Sequence[Layer]],
    measure: Measure,
    *,
    forward: Forward | None,
    examples: int,
) -> dict[str, Tensor]:
    """What is measured of the inputs of these layers, when the whole model runs in eval mode; nothing of it changes."""
    device = device_of(model)
    with isolated_rng(device, data, seed=0), weights.modes_kept(model), recorded(layers, measure) as sums:
        model.eval()
        for batch in first_batches(data, 256, examples, device=device):
            outputs(model, batch, forward)
    check_sums(sums, layers)
    return sums
