"""One step that learns 2:4 masks of a decoder's frozen weights, beside a dense step that trains the weights."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pacprune.bench.timing import Call, Finding, Row, Target, alternate, duration, out_of_memory, wait
from pacprune.data.batches import Objective
from pacprune.masking import attachment
from pacprune.masking.redrawn import redrawn
from pacprune.masking.weights import select
from pacprune.methods.pft import FROZEN_LR, attach_frozen
from pacprune.models import next_character
from pacprune.training.distillation import distilled
from pacprune.training.optim import Group, Optimizer

LIMIT = 1.2
"""Gates need the gradients that weights need, and what else they need should cost no more than a fifth of a step."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the LLaMA kind, and the tokens that it reads."""

    depth: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    length: int

    @property
    def name(self) -> str:
        """What a row calls it."""
        return f"decoder, {self.depth} x {self.width:,} wide, {self.hidden:,} hidden, 1 x {self.length:,} tokens"


_SHAPE = Shape(32, 4096, 11_008, 32, 32_000, 4096)
SHAPES = {
    "cpu": Shape(2, 256, 704, 4, 512, 64),
    "full": Shape(4, 512, 1408, 8, 2048, 256),
    "smoke": Shape(2, 32, 64, 2, 64, 16),
    "cuda": _SHAPE,
}
"""By the scale of the benchmark; on a GPU the shape of a model with 7 billion weights."""


class _Block(nn.Module):
    """Attention and a gated two-layer network, each on what an RMSNorm gives and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden, self.heads = shape.width, shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, length, vocabulary) of the token after each of x (n, length)."""
        h = self.tokens(x)
        for block in self.blocks:
            if torch.is_grad_enabled():
                h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=False)
            else:
                h = block(h)
        return self.head(self.norm(h))


def frozen(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A step that learns 2:4 masks of frozen weights beside a dense one; the forward pass of distillation apart."""
    shape = SHAPES[scale]
    try:
        findings = list(_measured(device, scale, shape))
    except torch.OutOfMemoryError:
        findings = None
    if findings is None:
        yield out_of_memory(f"the steps of the {shape.name}", device, None)
    else:
        yield from findings


def _measured(device: torch.device, scale: str, shape: Shape) -> Iterator[Finding]:
    gc.collect()
    dtype, before = torch.get_default_dtype(), _allocated(device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Decoder(shape)
    finally:
        torch.set_default_dtype(dtype)
    text = torch.randint(shape.vocabulary, (1, shape.length + 1), device=device)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    size = sum(p.numel() for p in model.parameters())
    name = f"{shape.name}, {size / 1e9:.3g} B weights, bfloat16"
    times: dict[str, float] = {}
    for step in _STEPS:
        call, finish = step(model, batch)
        reading = alternate({step.__name__: call}, device, seconds=duration(scale, 8))
        times[step.__name__] = reading.median(step.__name__)
        peak, held = _peak(call, device)
        yield from _rows(step, name, times, (peak - before, held - before), size, device)
        finish()
        del call, finish
        gc.collect()


def _rows(
    step: Callable[..., Any], name: str, times: dict[str, float], sizes: tuple[int, int], weights: int, device: Any
) -> Iterator[Row]:
    kind, on_cuda = step.__name__.strip("_").replace("_", " "), device.type == "cuda"
    value, unit = (times[step.__name__] * 1e3, "ms") if on_cuda else (None, "")
    ratio = times[step.__name__] / times[_dense_step.__name__]
    goal = Target("ratio", "at most", LIMIT) if on_cuda and step is _gate_step else None
    if step is not _dense_step:
        yield Row(f"{kind}, {name}", value, unit, ratio, relative_to="dense step", target=goal)
    elif on_cuda:
        yield Row(f"{kind}, {name}", value, unit)
    if on_cuda:
        peak, held = sizes
        yield Row(f"peak memory of the {kind}, {name}", peak / 2**30, "GiB")
        yield Row(f"weights, gradients and states of the {kind}, {name}", held / weights, "bytes per weight")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(call: Call, device: torch.device) -> tuple[int, int]:
    """Bytes at the worst moment of a call, and after it, with gradients."""
    if device.type != "cuda":
        call()
        return 0, 0
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    wait(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)


Batch = tuple[Tensor, Tensor]


def _dense_step(model: nn.Module, batch: Batch) -> tuple[Call, Call]:
    """All weights move by SGD without a state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=batch[0].is_cuda or None)

    def call() -> None:
        optimizer.zero_grad()
        next_character(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return call, optimizer.zero_grad


def _dense_forward_of_distillation(model: nn.Module, batch: Batch) -> tuple[Call, Call]:
    """What the dense network answers, without gradients."""

    @torch.no_grad()
    def call() -> None:
        model(batch[0])

    return call, lambda: None


def _gate_step(model: nn.Module, batch: Batch) -> tuple[Call, Call]:
    """Gates alone move, as in the recipe "frozen"."""
    attach_frozen(model, select(include="blocks.*")(model), "2:4")
    return _gates_call(model, batch, 0.0)


def _gate_step_with_distillation(model: nn.Module, batch: Batch) -> tuple[Call, Call]:
    """The same with half of the loss from the dense network's answers; the model has its gates already."""
    return _gates_call(model, batch, 0.5)


def _gates_call(model: nn.Module, batch: Batch, weight: float) -> tuple[Call, Call]:
    model.train()
    sites = attachment.sites(model)
    gates = [site.gate for site in sites]
    rate = torch.tensor(FROZEN_LR, device=gates[0].device)
    optimizer = Optimizer("adamw8", [Group(gates, [FROZEN_LR], [0.9], [0.0], True, rate)])
    objective = Objective(next_character)
    forward = distilled(objective, weight=weight) if weight else None

    def call() -> None:
        attachment.advance_(sites)
        optimizer.zero_grad()
        with redrawn():
            loss = objective(model, batch) if forward is None else forward(model, batch)
        loss.backward()
        optimizer.step()

    return call, optimizer.zero_grad


_STEPS = (_dense_step, _dense_forward_of_distillation, _gate_step, _gate_step_with_distillation)
