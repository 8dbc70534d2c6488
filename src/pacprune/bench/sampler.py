"""The sampler alone: beside a copy of the same bytes, the reference kernels, and the usual form of the mask."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pacprune import kernels
from pacprune.bench.timing import (
    Call,
    Finding,
    Row,
    Target,
    alternate,
    cuda_graph,
    duration,
    largest_that_fits,
    linearity,
    out_of_memory,
)
from pacprune.kernels import reference
from pacprune.methods.pft import COUPLING

BANDWIDTH, LITERAL = "copy bandwidth", "literal F.gumbel_softmax"


def sample(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """The sampler alone: its bandwidth beside a copy's, the reference, the literal form, and its growth."""
    sizes = {"smoke": [20_000], "cuda": [100_000_000, 10_000_000]}.get(scale, [10_000_000])
    yield from largest_that_fits(sizes, lambda n: _bandwidths(n, device, scale), device, unit="weights")
    # The slow forms allocate many tensors, and on a CPU they take seconds.
    sizes = {"smoke": [20_000], "cuda": [100_000_000, 10_000_000]}.get(scale, [2_000_000])
    yield from largest_that_fits(sizes, lambda n: _alternatives(n, device, scale), device, unit="weights")
    yield from _growth(device, scale)


def _inputs(
    n: int, device: torch.device, dtype: torch.dtype = torch.float32, *, std: bool = False
) -> kernels.SampleInputs:
    generator = torch.Generator(device).manual_seed(0)
    mean, gate = (torch.randn(n, device=device, generator=generator) for _ in range(2))
    shift, sharpness = torch.zeros((), device=device), torch.ones((), device=device)
    counter = torch.zeros((), dtype=torch.int64, device=device)
    spread = torch.full((n,), 2e-3, device=device) if std else None
    return kernels.SampleInputs(mean.to(dtype), gate, spread, counter, counter.clone(), 0, shift, sharpness)


def _forward_and_backward(inputs: kernels.SampleInputs, law: kernels.Law) -> Call:
    """Forward and backward, as a training step calls them."""
    out = torch.ones_like(inputs.mean)

    def call() -> None:
        kernels.draw([inputs], law)
        kernels.gradients(inputs, law, out, (True, True, False))

    return call


def _bandwidths(n: int, device: torch.device, scale: str) -> Iterator[Finding]:
    """Bytes per second that have to be read and written, beside those of tensor.copy_."""
    source, sink = torch.ones(n, device=device), torch.empty(n, device=device)
    soft, coupled = kernels.Law(), kernels.Law(coupling=COUPLING)
    cases = {
        "float32": (torch.float32, False, soft),
        "float32, coupled gates": (torch.float32, False, coupled),
        "float32, std": (torch.float32, True, soft),
        "bfloat16": (torch.bfloat16, False, soft),
        "bfloat16, std": (torch.bfloat16, True, soft),
        "float32, hard": (torch.float32, False, kernels.Law(mode=kernels.HARD)),
    }
    goal = Target("ratio", "at least", 0.75) if scale == "cuda" and n == 100_000_000 else None
    for name, (dtype, std, law) in cases.items():
        inputs = _inputs(n, device, dtype, std=std)
        # Forward reads mean and gate (and std) and writes the weight. Backward also reads its gradient, and writes two.
        size, read = dtype.itemsize, dtype.itemsize + 4 + 4 * std
        forward, backward = read + size, size + read + size + 4
        calls: dict[str, Call] = {
            "copy": lambda: sink.copy_(source),
            "forward": lambda inputs=inputs, law=law: kernels.draw([inputs], law),
        }
        if law.mode != kernels.HARD:  # evaluation has no backward pass
            calls["forward + backward"] = _forward_and_backward(inputs, law)
        times = alternate(calls, device, seconds=duration(scale, 1.5))
        if name == "float32" and device.type == "cuda":
            yield Row(f"copy of {n:,} float32", times.absolute("copy"), "ms")
        for phase in list(calls)[1:]:
            yield times.row(
                f"{phase}, {name}, {n:,} weights",
                "copy",
                phase,
                relative_to=BANDWIDTH,
                factor=(forward if phase == "forward" else forward + backward) / 8,
                timed=phase,
                target=goal if phase != "forward" else None,
            )
        del inputs, calls


def literal(weight: Tensor, logits: Tensor) -> Tensor:
    """The relaxed mask in its usual form: Gumbel-softmax over the two classes "keep" and "drop"."""
    classes = torch.stack([logits, torch.zeros_like(logits)], dim=-1)
    return F.gumbel_softmax(classes, tau=0.5)[..., 0] * weight


def _alternatives(n: int, device: torch.device, scale: str) -> Iterator[Finding]:
    inputs, law = _inputs(n, device), kernels.Law()
    out = torch.ones_like(inputs.mean)
    mean, gate = (t.clone().requires_grad_() for t in (inputs.mean, inputs.gate))

    def plain() -> None:
        reference.draw([inputs], law)
        reference.gradients(inputs, law, out, (True, True, False))

    calls = {
        "fused": _forward_and_backward(inputs, law),
        "reference": plain,
        "literal": lambda: torch.autograd.grad(literal(mean, gate), (mean, gate), out),
    }
    times = alternate(calls, device, seconds=duration(scale, 3))
    for name, words in (("reference", "reference kernels"), ("literal", LITERAL)):
        yield times.row(f"{words}, forward + backward, {n:,} weights", name, "fused", relative_to="fused")


def _growth(device: torch.device, scale: str) -> Iterator[Finding]:
    """Forward and backward at growing sizes, smallest first, and how far the times are from fixed cost + cost * n.

    On a GPU they run as CUDA graphs: for small sizes, Python's time for a launch would dominate.
    """
    millions = {"smoke": [0.01, 0.02, 0.04], "cuda": [1, 10, 100, 1000]}.get(scale, [1, 10, 100])
    if device.type == "cpu" and kernels.backend(device) == "reference":
        millions = millions[:2]  # minutes otherwise
    sizes, seconds = [], []
    for n in (int(m * 1_000_000) for m in millions):
        try:
            call = _forward_and_backward(_inputs(n, device), kernels.Law())
            call = cuda_graph(call, device) if device.type == "cuda" else call
            times = alternate({"both": call}, device, seconds=duration(scale, 1))
        except torch.OutOfMemoryError:
            times = call = None
        if times is None:
            yield out_of_memory(f"{n:,} weights", device, f"{sizes[-1]:,} weights as the largest" if sizes else None)
            break
        sizes.append(n)
        seconds.append(times.median("both"))
        del call
    for n, t in zip(sizes, seconds, strict=True):
        value = t / n * 1e12 if device.type == "cuda" else None
        name, last = f"cost per weight at {n:,} weights", f"{sizes[-1]:,} weights"
        yield Row(name, value, "ps" if value else "", (t / n) / (seconds[-1] / sizes[-1]), None, last)
    if len(sizes) > 2:
        goal = Target("ratio", "at most", 0.15) if sizes[-1] == 1_000_000_000 else None
        fixed, _, deviation = linearity(sizes, seconds)
        value = fixed * 1e6 if device.type == "cuda" else None
        name = "largest deviation from fixed cost + cost per weight"
        yield Row(name, value, "us fixed" if value is not None else "", deviation, None, "the straight line", goal)
