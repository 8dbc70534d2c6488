"""A training step with stochastic masks beside the dense one: an MLP, transformer blocks, and a decoder."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from pacprune import models
from pacprune.bench.own_loop import own_loop
from pacprune.bench.sampler import LITERAL, literal
from pacprune.bench.timing import (
    SPARSITY,
    Call,
    Finding,
    Row,
    Target,
    Times,
    alternate,
    cuda_graph,
    duration,
    largest_that_fits,
    wait,
)
from pacprune.masking import attachment, criteria, masks, spikeslab, weights
from pacprune.methods.pft import COUPLING
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.types import Loss


def step(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A training step with stochastic masks beside the dense, the masked and the literal one; loops of one's own."""
    yield from own_loop(device, scale=scale)
    yield from _mlp(device, scale)
    if scale == "cpu":
        return
    small = {"smoke": _Shape(32, 64, 2, 8), "full": _Shape(256, 1024, 4, 64)}
    shape = small.get(scale, _Shape(1024, 4096, 8, 512))
    for amp in (True, False):
        measure = partial(_transformer, device, scale, shape, amp)
        yield from largest_that_fits([8, 4, 2], measure, device, unit=f"sequences of {shape.length} tokens")
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
    slow = steps.pop(LITERAL)  # timed separately, or it would take most of the time
    yield from _ratios(f"{name}, eager", alternate(steps, device, seconds=duration(scale, 10)), goal)
    pair = {"dense": steps["dense"], LITERAL: slow}
    yield from list(_ratios(f"{name}, eager", alternate(pair, device, seconds=duration(scale, 2)), goal))[-1:]
    if device.type == "cuda":
        graphs = {v: cuda_graph(_loop(variants[v](), x, y, F.cross_entropy), device) for v in ("dense", "PFT")}
        yield from _ratios(f"{name}, CUDA graph", alternate(graphs, device, seconds=duration(scale, 2)), goal)


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
        yield from _ratios(f"{name}, eager", alternate(steps, device, seconds=duration(scale, 3)), goal)
        if device.type == "cuda":
            graphs = {v: cuda_graph(steps[v], device) for v in ("dense", "PFT")}
            yield from _ratios(f"{name}, CUDA graph", alternate(graphs, device, seconds=duration(scale, 2)), goal)


def decoder_step(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """One step of PFT, as `fit` takes it, on a decoder with a billion weights: its memory and its time."""
    if scale == "cpu":
        return
    shape, sizes = {"width": 64, "depth": 2, "heads": 2, "context": 32}, [2]
    if scale == "cuda":
        shape, sizes = {"width": 2048, "depth": 18, "heads": 16, "context": 1024}, [8, 4, 2]
    yield from largest_that_fits(sizes, lambda n: _decoder(device, shape, n), device, unit="sequences")


def _decoder(device: torch.device, shape: dict[str, Any], batch: int) -> Iterator[Finding]:
    steps, vocabulary, length = 5, 50_304, shape["context"]
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with torch.device(device):  # a billion random numbers would take long on the host
        model = models.GPT(vocabulary, **shape, dropout=0.0)
    size = weights.total(model)
    attachment.attach(model, spikeslab.isotropic(model, sparsity=0.9), coupling=COUPLING)
    text = torch.randint(vocabulary, (steps * batch, length + 1), device=device)
    readings: dict[int, tuple[float, int, int]] = {}

    def watch(stage: str, steps: int, total: int, row: dict[str, Any]) -> None:
        """Notes the time, the allocated bytes, and their peak since the last step."""
        if device.type != "cuda" or steps in readings:  # called once more at the end of an epoch
            return
        wait(device)
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        readings[steps] = time.perf_counter(), allocated - before, peak - before
        torch.cuda.reset_peak_memory_stats(device)

    config = Config(epochs=1, lr=0.01, batch_size=batch, amp=device.type == "cuda")
    budget = Budget(0.9, schedule="cubic", sharpen=4.0)
    try:
        fit(model, (text[:, :-1], text[:, 1:]), config, loss=models.next_character, budget=budget, progress=watch)
    except ValueError as failure:
        if isinstance(failure.__cause__, torch.OutOfMemoryError):  # the caller tries a smaller batch
            raise failure.__cause__ from None
        raise
    name = f"decoder, {size / 1e9:.3g} B weights, batch {batch}x{length}"
    if not readings:  # only on a GPU
        return
    (start, _, _), (end, allocated, peak) = readings[steps - 1], readings[steps]
    yield Row(f"PFT step, {name}, bfloat16 autocast", (end - start) * 1e3, "ms")
    yield Row(f"memory held between PFT steps, {name}", allocated / size, "bytes per weight")
    yield Row(f"peak memory of a PFT step, {name}", peak / size, "bytes per weight")
    yield Row(f"peak memory of a PFT step, {name}, in all", peak / 2**30, "GiB")


def _variants(make: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    """One network in four states: dense, with stochastic masks, masked by torch.nn.utils.prune, and literal."""

    def stochastic() -> nn.Module:
        model = make()
        mask = masks.top_k(criteria.magnitude(model), sparsity=SPARSITY)
        return attachment.attach(model, spikeslab.block_isotropic(model, mask, eps=1e-2))

    def masked() -> nn.Module:
        model = make()
        for module in model.modules():
            if type(module) is nn.Linear:  # attention reads its projection without calling the hook that masks it
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


def _loop(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *, amp: bool = False) -> Call:
    """One step of a plain training loop."""
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
    """Extra peak memory of a PFT step over a dense one, in tensors of the weights' size.

    The target allows for the transient tensors of one layer.
    """
    sizes = [w.numel() for w in weights.prunable(variants["dense"]()).values()]

    def peak(variant: str) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        call = _loop(variants[variant](), x, y, loss, amp=amp)
        for number in range(5):
            if number == 3:  # gradients and momenta are allocated
                wait(device)
                torch.cuda.reset_peak_memory_stats(device)
            call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak("dense")  # the libraries allocate their workspaces, which count for neither
    extra = (peak("PFT") - peak("dense")) / (4 * sum(sizes))
    # The gate, its gradient, its momentum and the drawn weights; for one layer at a time, a gradient and its cast.
    limit = 4 + 2 * max(sizes) / sum(sizes)
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
