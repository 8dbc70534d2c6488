"""A step of a training loop of one's own with `pp.Pruner` beside the same step without it: eager and compiled."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import models
from pacprune.bench.timing import SPARSITY, Call, Finding, Row, Target, alternate, duration, wait
from pacprune.methods.pruner import Pruner
from pacprune.types import Loss

STEPS = 1_000_000
"""Of the pruner, which begins in the middle of its sparsity's rise: no measurement takes as many."""
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "torch.compile": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
"""How the loop runs its network: as it is, or by torch.compile with these options."""


@dataclass(frozen=True)
class Task:
    """A network and a batch for it.

    Args:
        name: What is measured.
        make: Makes the network, on the device.
        x: Its inputs.
        y: What it is to answer.
        loss: (outputs, y) -> one number.
        limits: The largest ratio by mode that is aimed at.
        amp: Whether it computes in bfloat16.
    """

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    loss: Loss
    limits: Mapping[str, float]
    amp: bool = True


def own_loop(device: torch.device, *, scale: str, modes: tuple[str, ...] = tuple(MODES)) -> Iterator[Finding]:
    """The ratios of all tasks and modes; compiled ones on a GPU alone, where they are what people run."""
    for task in _tasks(device, scale):
        for mode in modes if device.type == "cuda" else ("eager",):
            yield from _ratio(task, device, scale, mode)


def _tasks(device: torch.device, scale: str) -> Iterator[Task]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    small = scale == "smoke"
    hidden = (32, 32) if small else (1000, 1000, 1000)
    labels = torch.randint(10, (128,), device=device, generator=generator)
    yield Task(
        f"MLP {'-'.join(map(str, (784, *hidden, 10)))}, batch 128",
        lambda: models.mlp(784, hidden=hidden).to(device),
        normal(128, 784),
        labels,
        F.cross_entropy,
        {"eager": 1.6, "torch.compile": 1.4, "reduce-overhead": 1.2},
        amp=False,
    )
    if scale == "cpu":
        return
    width, depth, length, batch = (32, 2, 8, 2) if small else (1024, 8, 512, 8)
    limits = {"eager": 1.35, "torch.compile": 1.2, "reduce-overhead": 1.2}
    yield Task(
        f"{depth} transformer blocks of width {width}, batch {batch}x{length}, bfloat16",
        lambda: _transformer(width, depth).to(device),
        normal(batch, length, width),
        normal(batch, length, width),
        lambda out, y: F.mse_loss(out.float(), y),
        limits,
    )
    yield Task(
        "ResNet18 for 32x32 images, batch 128, bfloat16",
        lambda: _resnet18((8, 8, 16, 16) if small else (64, 128, 256, 512)).to(device),
        normal(128, 3, 32, 32) if not small else normal(4, 3, 32, 32),
        labels if not small else labels[:4],
        F.cross_entropy,
        limits | {"torch.compile": 1.25},
    )


def _transformer(width: int, depth: int) -> nn.Module:
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    heads = max(1, width // 64)
    return nn.Sequential(*[nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(depth)])


class _Basic(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        short = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(short, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def _resnet18(widths: tuple[int, int, int, int]) -> nn.Module:
    """He et al. 2015, with a 3x3 convolution first, as it is used for small images."""
    inputs, layers = widths[0], []
    for stage, width in enumerate(widths):
        layers += [_Basic(inputs, width, 1 + (stage > 0)), _Basic(width, width, 1)]
        inputs = width
    first = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    return nn.Sequential(*first, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def _ratio(task: Task, device: torch.device, scale: str, mode: str) -> Iterator[Finding]:
    torch.compiler.reset()
    steps = {name: _loop(task, mode, pruned=name == "Pruner") for name in ("dense", "Pruner")}
    name = f"{task.name}, {mode}"
    if device.type == "cuda" and mode == "eager":
        yield _memory(task, device)
    times = alternate(steps, device, seconds=duration(scale, 4))
    if device.type == "cuda":
        yield Row(f"dense step, {name}", times.absolute("dense"), "ms")
    goal = None if scale == "smoke" or device.type == "cpu" else Target("ratio", "at most", task.limits[mode])
    yield times.row(f"step with a Pruner, {name}", "Pruner", "dense", relative_to="dense step", target=goal)


def _loop(task: Task, mode: str, *, pruned: bool) -> Call:
    """One step of a plain training loop."""
    torch.manual_seed(0)
    model = task.make().train()
    options = MODES[mode]
    network = model if options is None else torch.compile(model, fullgraph=True, **options)
    pruner = Pruner(model, sparsity=SPARSITY, steps=STEPS) if pruned else None
    if pruner is not None:
        pruner.steps_done = STEPS // 4
        pruner.state_dict()  # so that it may be given up unfinished
    # On a GPU, one launch for all parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=task.x.is_cuda or None)

    def call() -> None:
        with torch.autocast(task.x.device.type, torch.bfloat16) if task.amp else nullcontext():
            out = network(task.x)
        task.loss(out, task.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if pruner is not None:
            pruner.step()

    return call


def _memory(task: Task, device: torch.device) -> Row:
    """The peak of a step with a pruner less that of a dense one, in bytes per weight."""

    def peak(pruned: bool) -> int:
        before = torch.cuda.memory_allocated(device)
        call = _loop(task, "eager", pruned=pruned)
        for number in range(5):
            if number == 3:  # gradients and momenta are allocated
                wait(device)
                torch.cuda.reset_peak_memory_stats(device)
            call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak(False)  # the libraries allocate their workspaces, which count for neither
    size = sum(p.numel() for p in task.make().parameters() if p.ndim > 1)
    return Row(f"extra memory of a Pruner, {task.name}", (peak(True) - peak(False)) / size, "bytes per weight")
