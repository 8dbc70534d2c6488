"""What a user's own loop pays: the sampler beside a plain copy, and a training step beside the dense one."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from pacprune import kernels, models
from pacprune.bench.decoder import decoder_step
from pacprune.bench.timing import (
    Finding,
    Row,
    Target,
    Thing,
    Times,
    alternate,
    largest_that_fits,
    linearity,
    out_of_memory,
    wait,
)
from pacprune.kernels import reference
from pacprune.masking import attachment, criteria, masks, spikeslab, weights
from pacprune.methods.pft import COUPLING
from pacprune.types import Loss

SPARSITY = 0.9
BANDWIDTH, LITERAL = "copy bandwidth", "literal F.gumbel_softmax"


# --- sample


def sample(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """The sampler alone: bytes that must move against a copy, the reference, the literal form, and its growth."""
    sizes = {"smoke": [20_000], "cuda": [100_000_000, 10_000_000]}.get(scale, [10_000_000])
    yield from largest_that_fits(sizes, lambda n: _bandwidths(n, device, scale), device, what="weights")
    # The slow ones hold many tensors of their own, and on a CPU they take seconds.
    sizes = {"smoke": [20_000], "cuda": [100_000_000, 10_000_000]}.get(scale, [2_000_000])
    yield from largest_that_fits(sizes, lambda n: _slower(n, device, scale), device, what="weights")
    yield from _growth(device, scale)


def _part(
    n: int, device: torch.device, dtype: torch.dtype = torch.float32, *, std: bool = False
) -> kernels.SampleInputs:
    generator = torch.Generator(device).manual_seed(0)
    mean, gate = (torch.randn(n, device=device, generator=generator) for _ in range(2))
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    counter = torch.zeros((), dtype=torch.int64, device=device)
    spread = torch.full((n,), 2e-3, device=device) if std else None
    return kernels.SampleInputs(mean.to(dtype), gate, spread, counter, counter.clone(), 0, zero, one)


def _both(part: kernels.SampleInputs, law: kernels.Law) -> Thing:
    """Forward and backward, as a training step calls them."""
    out = torch.ones_like(part.mean)

    def call() -> None:
        kernels.draw([part], law)
        kernels.gradients(part, law, out, (True, True, False))

    return call


def _bandwidths(n: int, device: torch.device, scale: str) -> Iterator[Finding]:
    """Bytes that must move per second, beside those of tensor.copy_."""
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
        part = _part(n, device, dtype, std=std)
        # mean and gate (and std) are read and the weight written; then the gradient is read, too, and two are written.
        size, inputs = dtype.itemsize, dtype.itemsize + 4 + 4 * std
        forward, backward = inputs + size, size + inputs + size + 4
        things: dict[str, Thing] = {
            "copy": lambda: sink.copy_(source),
            "forward": lambda part=part, law=law: kernels.draw([part], law),
        }
        if law.mode != kernels.HARD:  # evaluation has no backward pass
            things["forward + backward"] = _both(part, law)
        times = alternate(things, device, seconds=_seconds(scale, 1.5))
        if name == "float32" and device.type == "cuda":
            yield Row(f"copy of {n:,} float32", times.absolute("copy"), "ms")
        for what in list(things)[1:]:
            yield times.row(
                f"{what}, {name}, {n:,} weights",
                "copy",
                what,
                relative_to=BANDWIDTH,
                factor=(forward if what == "forward" else forward + backward) / 8,
                timed=what,
                target=goal if what != "forward" else None,
            )
        del part, things


def literal(weight: Tensor, logits: Tensor) -> Tensor:
    """The relaxed mask as it is usually written: Gumbel-softmax over the two classes "keep" and "drop"."""
    two = torch.stack([logits, torch.zeros_like(logits)], dim=-1)
    return F.gumbel_softmax(two, tau=0.5)[..., 0] * weight


def _slower(n: int, device: torch.device, scale: str) -> Iterator[Finding]:
    part, law = _part(n, device), kernels.Law()
    out = torch.ones_like(part.mean)
    mean, gate = (t.clone().requires_grad_() for t in (part.mean, part.gate))

    def plain() -> None:
        reference.draw([part], law)
        reference.gradients(part, law, out, (True, True, False))

    things = {
        "fused": _both(part, law),
        "reference": plain,
        "literal": lambda: torch.autograd.grad(literal(mean, gate), (mean, gate), out),
    }
    times = alternate(things, device, seconds=_seconds(scale, 3))
    for name, words in (("reference", "reference kernels"), ("literal", LITERAL)):
        yield times.row(f"{words}, forward + backward, {n:,} weights", name, "fused", relative_to="fused")


def _growth(device: torch.device, scale: str) -> Iterator[Finding]:
    """Forward and backward at growing sizes, smallest first, and how far the times are from fixed cost + cost * n.

    On a GPU as CUDA graphs: of small sizes one would otherwise see the time that Python takes for a launch.
    """
    millions = {"smoke": [0.01, 0.02, 0.04], "cuda": [1, 10, 100, 1000]}.get(scale, [1, 10, 100])
    if device.type == "cpu" and kernels.backend(device) == "reference":
        millions = millions[:2]  # minutes otherwise
    sizes, seconds = [], []
    for n in (int(m * 1_000_000) for m in millions):
        try:
            both = _both(_part(n, device), kernels.Law())
            both = _graph(both, device) if device.type == "cuda" else both
            times = alternate({"both": both}, device, seconds=_seconds(scale, 1))
        except torch.OutOfMemoryError:
            times = both = None
        if times is None:
            yield out_of_memory(f"{n:,} weights", device, f"{sizes[-1]:,} weights as the largest" if sizes else None)
            break
        sizes.append(n)
        seconds.append(times.median("both"))
        del both
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


# --- step


def step(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A training step with stochastic masks beside the dense, the masked and the literal one."""
    yield from _mlp(device, scale)
    if scale == "cpu":
        return
    small = {"smoke": _Shape(32, 64, 2, 8), "full": _Shape(256, 1024, 4, 64)}
    shape = small.get(scale, _Shape(1024, 4096, 8, 512))
    for amp in (True, False):
        measure = partial(_transformer, device, scale, shape, amp)
        yield from largest_that_fits([8, 4, 2], measure, device, what=f"sequences of {shape.length} tokens")
    yield from decoder_step(device, scale=scale)


def _mlp(device: torch.device, scale: str) -> Iterator[Finding]:
    hidden = (32, 32) if scale == "smoke" else (1000, 1000, 1000)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(128, 784, device=device, generator=generator)
    y = torch.randint(10, (128,), device=device, generator=generator)
    variants = _variants(lambda: models.mlp(784, hidden=hidden).to(device).train())
    name = "MLP " + "-".join(map(str, (784, *hidden, 10)))
    limit = None if scale == "smoke" else 2.0 if device.type == "cpu" else 1.25
    goal = None if limit is None else Target("ratio", "at most", limit)
    if device.type == "cuda":
        yield _memory(name, variants, x, y, F.cross_entropy, device)
    steps = {variant: _loop(make(), x, y, F.cross_entropy) for variant, make in variants.items()}
    slow = steps.pop(LITERAL)  # for itself, or it would take the time of most rounds
    yield from _ratios(f"{name}, eager", alternate(steps, device, seconds=_seconds(scale, 10)), goal)
    pair = {"dense": steps["dense"], LITERAL: slow}
    yield from list(_ratios(f"{name}, eager", alternate(pair, device, seconds=_seconds(scale, 2)), goal))[-1:]
    if device.type == "cuda":
        graphs = {v: _graph(_loop(variants[v](), x, y, F.cross_entropy), device) for v in ("dense", "PFT")}
        yield from _ratios(f"{name}, CUDA graph", alternate(graphs, device, seconds=_seconds(scale, 2)), goal)


class _Shape(NamedTuple):
    """A stack of `depth` transformer blocks and the sequences that it reads."""

    width: int
    hidden: int
    depth: int
    length: int


def _transformer(device: torch.device, scale: str, shape: _Shape, amp: bool, batch: int) -> Iterator[Finding]:
    width, hidden, depth, length = shape
    generator = torch.Generator(device).manual_seed(0)
    x, y = (torch.randn(batch, length, width, device=device, generator=generator) for _ in range(2))

    def make() -> nn.Module:
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device}
        heads = max(1, width // 64)
        return nn.Sequential(*[nn.TransformerEncoderLayer(width, heads, hidden, **settings) for _ in range(depth)])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out.float(), y)

    variants = _variants(make)
    size = sum(w.numel() for w in weights.prunable(make()).values())
    kind = "bfloat16 autocast" if amp else "TF32" if device.type == "cuda" else "float32"
    name = f"{depth} transformer blocks, {size / 1e6:.3g} M weights, batch {batch}x{length}, {kind}"
    goal = Target("ratio", "at most", 1.15) if scale == "cuda" and batch == 8 else None
    with nullcontext() if amp else _tf32():
        if device.type == "cuda":
            yield _memory(name, variants, x, y, loss, device, amp=amp)
        chosen = variants if amp else {v: variants[v] for v in ("dense", "PFT")}
        steps = {variant: _loop(build(), x, y, loss, amp=amp) for variant, build in chosen.items()}
        yield from _ratios(f"{name}, eager", alternate(steps, device, seconds=_seconds(scale, 3)), goal)
        if device.type == "cuda":
            graphs = {v: _graph(steps[v], device) for v in ("dense", "PFT")}
            yield from _ratios(f"{name}, CUDA graph", alternate(graphs, device, seconds=_seconds(scale, 2)), goal)


def _variants(make: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    """One network in four states: dense, with stochastic masks, masked by torch.nn.utils.prune, and literal."""

    def stochastic() -> nn.Module:
        model = make()
        mask = masks.top_k(criteria.magnitude(model), sparsity=SPARSITY)
        return attachment.attach(model, spikeslab.block_isotropic(model, mask, eps=1e-2))

    def masked() -> nn.Module:
        model = make()
        for module in model.modules():
            if type(module) is nn.Linear:  # the projection inside attention is read past the hook that masks it
                prune.random_unstructured(module, "weight", amount=SPARSITY)
        return model

    def gumbel() -> nn.Module:
        model = make()
        names = {id(weight) for weight in weights.prunable(model).values()}
        for module in list(model.modules()):
            for attribute in [a for a, p in module.named_parameters(recurse=False) if id(p) in names]:
                parametrize.register_parametrization(module, attribute, _Literal(getattr(module, attribute)))
        return model

    return {"dense": make, "PFT": stochastic, "torch.nn.utils.prune": masked, LITERAL: gumbel}


class _Literal(nn.Module):
    """A weight times its `literal` mask."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return literal(weight, self.logits)


def _loop(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *, amp: bool = False) -> Thing:
    """One step of a loop as a user writes it."""
    # On a GPU, one launch for all parameters; on a CPU, what SGD does by default.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=x.is_cuda or None)
    stochastic = bool(attachment.sites(model))

    def call() -> None:
        if stochastic:
            attachment.resample_(model)
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16) if amp else nullcontext():
            out = model(x)
        loss(out, y).backward()
        optimizer.step()

    return call


def _graph(call: Thing, device: torch.device) -> Thing:
    """The whole step recorded once and replayed."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(held: Thing = call) -> None:  # `held` keeps the tensors that the graph points at
        graph.replay()

    return replay


def _ratios(name: str, times: Times, goal: Target | None) -> Iterator[Finding]:
    if times.device.type == "cuda":
        yield Row(f"dense step, {name}", times.absolute("dense"), "ms")
    for variant in list(times.seconds)[1:]:
        target = goal if variant == "PFT" else None
        yield times.row(f"{variant} step, {name}", variant, "dense", relative_to="dense step", target=target)


def _memory(
    name: str,
    variants: dict[str, Callable[[], nn.Module]],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    device: torch.device,
    *,
    amp: bool = False,
) -> Row:
    """Peak memory of a PFT step beyond a dense one's, in tensors of the weights' size; one layer's transients apart."""
    found = [w.numel() for w in weights.prunable(variants["dense"]()).values()]

    def peak(variant: str) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        call = _loop(variants[variant](), x, y, loss, amp=amp)
        for done in range(5):
            if done == 3:  # gradients and momenta are there
                wait(device)
                torch.cuda.reset_peak_memory_stats(device)
            call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak("dense")  # the libraries take their workspaces, which are nobody's extra
    extra = (peak("PFT") - peak("dense")) / (4 * sum(found))
    # gate, its gradient, its momentum and the drawn weights; a layer's gradient comes in, and is cast, while it lasts.
    limit = 4 + 2 * max(found) / sum(found)
    unit = "tensors of the weights' size"
    return Row(f"extra memory of PFT, {name}", extra, unit, target=Target("value", "at most", round(limit, 3)))


@contextmanager
def _tf32() -> Iterator[None]:
    """Matrix products of float32 in TF32, which only a GPU has."""
    kind = torch.backends.cuda.matmul
    before = kind.fp32_precision
    kind.fp32_precision = "tf32"
    try:
        yield
    finally:
        kind.fp32_precision = before


def _seconds(scale: str, usual: float) -> float:
    """How long to measure; the smallest sizes only show that everything runs."""
    return 0.0 if scale == "smoke" else usual
