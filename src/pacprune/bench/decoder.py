"""A decoder with a billion weights: what one step of PFT needs, as `fit` takes it."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from pacprune import models
from pacprune.bench.timing import Finding, Row, largest_that_fits, wait
from pacprune.masking import attachment, spikeslab, weights
from pacprune.methods.pft import COUPLING
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import fit


def decoder_step(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """One step of PFT, as `fit` takes it, on a decoder with a billion weights: its memory and its time."""
    if scale == "cpu":
        return
    shape, sizes = {"width": 64, "depth": 2, "heads": 2, "context": 32}, [2]
    if scale == "cuda":
        shape, sizes = {"width": 2048, "depth": 18, "heads": 16, "context": 1024}, [8, 4, 2]
    yield from largest_that_fits(sizes, lambda n: _decoder(device, shape, n), device, what="sequences")


def _decoder(device: torch.device, shape: dict[str, Any], batch: int) -> Iterator[Finding]:
    steps, vocabulary, length = 5, 50_304, shape["context"]
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with torch.device(device):  # a billion random numbers are not made on the host
        model = models.GPT(vocabulary, **shape, dropout=0.0)
    size = weights.total(model)
    attachment.attach(model, spikeslab.isotropic(model, sparsity=0.9), coupling=COUPLING)
    text = torch.randint(vocabulary, (steps * batch, length + 1), device=device)
    readings: dict[int, tuple[float, int, int]] = {}

    def watch(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        """Seconds, and bytes held and reached since the step before."""
        if device.type != "cuda" or done in readings:  # called once more at the end of an epoch
            return
        wait(device)
        held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        readings[done] = time.perf_counter(), held - before, most - before
        torch.cuda.reset_peak_memory_stats(device)

    config = Config(epochs=1, lr=0.01, batch_size=batch, amp=device.type == "cuda")
    budget = Budget(0.9, schedule="cubic", sharpen=4.0)
    try:
        fit(model, (text[:, :-1], text[:, 1:]), config, loss=models.next_character, budget=budget, progress=watch)
    except ValueError as failure:
        if isinstance(failure.__cause__, torch.OutOfMemoryError):  # a smaller batch is tried then
            raise failure.__cause__ from None
        raise
    name = f"decoder, {size / 1e9:.3g} B weights, batch {batch}x{length}"
    if not readings:  # only a GPU tells
        return
    (start, _, _), (end, held, most) = readings[steps - 1], readings[steps]
    yield Row(f"PFT step, {name}, bfloat16 autocast", (end - start) * 1e3, "ms")
    yield Row(f"memory held between PFT steps, {name}", held / size, "bytes per weight")
    yield Row(f"peak memory of a PFT step, {name}", most / size, "bytes per weight")
    yield Row(f"peak memory of a PFT step, {name}, in all", most / 2**30, "GiB")
