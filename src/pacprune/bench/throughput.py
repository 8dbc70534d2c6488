"""What the library reaches as a whole: a population of K models, a certificate's draws, 2:4 weights at work."""

import copy
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import models
from pacprune.bench.timing import Finding, Row, Target, alternate, clocked, largest_that_fits, wait
from pacprune.certification import drawn_networks
from pacprune.certification.certify import BATCH, certify
from pacprune.certification.record import MonteCarlo
from pacprune.data.splits import Part
from pacprune.data.splits import split as cut
from pacprune.masking import attachment, criteria, masks, patterns, spikeslab
from pacprune.methods.pft import COUPLING
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import evaluating, mistakes
from pacprune.training.fit import fit, fit_posterior

SPARSITY = 0.9
MOST = 100_000
"""Networks drawn for one certificate at most."""

# --- population


def population(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """K models at once beside the same K one after another, dense and with the masks and the budget of pft."""
    sizes = {"smoke": [2], "cuda": [32, 16, 8]}.get(scale, [8])
    yield from largest_that_fits(sizes, lambda k: _population(k, device, scale), device, what="models at once")


def _population(k: int, device: torch.device, scale: str) -> Iterator[Finding]:
    if device.type == "cuda":
        name, make, shape = "ResNet20", lambda seed: models.resnet20(seed=seed), (3, 32, 32)
        fast = {"compiled, bfloat16": _config("compiled", amp=True)}
        alone = {"eager": _config(), "graph": _config("graph"), "graph, bfloat16": _config("graph", amp=True), **fast}
        together = fast
    else:
        name, make, shape = "MLP 64-300-100-10", lambda seed: models.mlp(64, seed=seed), (64,)
        alone = together = {"eager": _config()}
    steps, epochs = {"smoke": (2, 3), "cuda": (30, 5)}.get(scale, (20, 3))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(128 * steps, *shape, device=device, generator=generator)
    y = torch.randint(10, (128 * steps,), device=device, generator=generator)
    found: dict[str, list[float]] = {}
    told: set[str] = set()

    def measure(what: str, members: int, config: Config, masked: bool) -> str | None:
        """Adds the seconds per model-step of every epoch but the first; returns what went wrong."""
        nets: list[nn.Module] = [make(seed).to(device) for seed in range(members)]
        try:
            readings = _epochs(nets, (x, y), config, epochs, masked=masked)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as failed:
            return f"{what} could not be run: {str(failed).partition(chr(10))[0]}"
        found.setdefault(what, []).extend(readings)
        return None

    plan = [
        (f"{stage} step, one model, {how}", 1, config, stage == "PFT")
        for stage in ("dense", "PFT")
        for how, config in alone.items()
        if stage == "dense" or how == "graph, bfloat16" or device.type == "cpu"
    ]
    plan += [
        (f"{stage} step, {k} models, {how}", k, config, stage == "PFT")
        for how, config in together.items()
        for stage in ("dense", "PFT")
    ]
    if device.type == "cuda":
        # There and back again: what was measured first is measured last, too. What is compiled is compiled once.
        plan += [one for one in reversed(plan) if one[2].execution != "compiled"]
    else:
        plan *= 1 if scale == "smoke" else 5
    for what, members, config, masked in plan:
        problem = measure(what, members, config, masked)
        if problem is not None and problem not in told:
            told.add(problem)
            yield problem
    yield from _compared(name, k, found, device, scale)


def _config(execution: str = "eager", *, amp: bool = False) -> Config:
    return Config(lr=0.01, gate_lr=0.1, execution=execution, amp=amp)


def _epochs(
    nets: list[nn.Module], data: tuple[Tensor, Tensor], config: Config, epochs: int, *, masked: bool
) -> list[float]:
    """Seconds per model-step of every epoch but the first, in which memory is found and kernels are built."""
    device, per_epoch = data[0].device, len(data[1]) // config.batch_size
    budget = Budget(SPARSITY, schedule="cubic", sharpen=4.0)
    if masked:
        for net in nets:
            found = spikeslab.score_monotone(net, criteria.magnitude(net), sparsity=SPARSITY)
            attachment.attach(net, found, coupling=COUPLING)
    ends: dict[int, float] = {}

    def progress(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        if done % per_epoch == 0:  # called twice: after the last step of an epoch, and after its row is written
            wait(device)
            ends[done] = time.perf_counter()

    config = replace(config, epochs=epochs)
    if len(nets) == 1:
        fit(nets[0], data, config, budget=budget if masked else None, progress=progress)
    else:
        seeds = list(range(len(nets)))
        fit(nets, data, config, seed=seeds, budget=[budget] * len(nets) if masked else None, progress=progress)
    return list(np.diff([ends[done] for done in sorted(ends)]) / (per_epoch * len(nets)))


def _compared(name: str, k: int, found: dict[str, list[float]], device: torch.device, scale: str) -> Iterator[Finding]:
    """Rows: each way beside the best way of a single model, and the PFT stage beside the dense one."""
    best = {}
    for stage in ("dense", "PFT"):
        for members in (1, k):
            start = f"{stage} step, {'one model' if members == 1 else f'{k} models'}"
            ways = [what for what in found if what.startswith(start)]
            if ways:
                best[stage, members] = min(ways, key=lambda what: float(np.median(found[what])))
    full = scale == "cuda" and k == 32

    def goal(of: str, sense: str, limit: float) -> Target | None:
        return Target(of, sense, limit) if full else None

    for what in found:
        stage = what.partition(" ")[0]
        value = float(np.median(found[what])) * 1e3 if device.type == "cuda" else None
        limit = None
        if what == best.get(("dense", k)):
            limit = goal("value", "at most", 0.40)
        elif what == best.get(("dense", 1)):
            limit = goal("value", "at most", 2.0)
        to = best.get((stage, 1))
        if to is None:
            continue
        yield _ratio(f"{name}, {what}", found, what, to, "best single model", value, limit)
    if ("PFT", k) in best and ("dense", k) in best:
        what, to = best["PFT", k], best["dense", k]
        limit = goal("ratio", "at most", 1.25)
        yield _ratio(f"{name}, PFT / dense, {k} models", found, what, to, "dense, best", None, limit)
    for stage in ("dense", "PFT"):
        if (stage, k) in best and (stage, 1) in best:
            what, to = best[stage, 1], best[stage, k]
            words = f"{name}, {k} {stage} models in sequence / as a population"
            yield _ratio(words, found, what, to, "population, best", None, goal("ratio", "at least", 4.0))


def _ratio(
    name: str,
    found: dict[str, list[float]],
    of: str,
    to: str,
    relative_to: str,
    value: float | None,
    target: Target | None,
) -> Row:
    readings = np.array(found[of]) / np.median(found[to])
    low, ratio, high = (float(q) for q in np.quantile(readings, (0.25, 0.5, 0.75)))
    return Row(name, value, "ms per model-step" if value is not None else "", ratio, (low, high), relative_to, target)


# --- certificate


def certificate(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A Monte-Carlo certificate on synthetic examples: how long, how many draws, and beside a loop over networks."""
    inputs, n, hidden = {"smoke": (16, 400, (16,)), "cuda": (784, 30_000, (1000, 1000, 1000))}.get(
        scale, (64, 5_000, (300, 100))
    )
    slack = {"smoke": 0.02, "cuda": 1e-3}.get(scale, 4e-3)
    generator = torch.Generator().manual_seed(0)
    # Ten classes, well apart; a tenth of the labels is drawn at random, which no network can know.
    y = torch.randint(10, (2 * n,), generator=generator)
    x = torch.randn(2 * n, inputs, generator=generator) + torch.randn(10, inputs, generator=generator)[y]
    wrong = torch.rand(2 * n, generator=generator) < 0.1
    y = torch.where(wrong, torch.randint(10, (2 * n,), generator=generator), y)
    split = cut(x, y, prior_fraction=0.5)
    model = models.mlp(inputs, hidden=hidden).to(device)
    fit(model, split.prior, Config(epochs=2, lr=0.05))
    mask = masks.top_k(criteria.magnitude(model), sparsity=SPARSITY)
    attachment.attach(model, spikeslab.block_isotropic(model, mask, eps=1e-4, std=2e-3))
    prior = attachment.read(model)
    name = f"MLP {'-'.join(map(str, (inputs, *hidden, 10)))}, n = {n:,}"
    with tempfile.TemporaryDirectory() as folder:
        fit_posterior(model, prior, split, Config(epochs=0), out=folder)

        def issue() -> MonteCarlo:
            return certify(model, prior, split, tolerance=slack, draws=MOST).pac_bayes["monte_carlo"]

        record = issue()  # builds kernels and fills caches; a second time gives the same certificate
        seconds = clocked(issue, device) if device.type == "cuda" else 0.0
    found = [record[whose]["draws"] for whose in ("posterior", "prior")]
    draws, reached = sum(found), max(found) < MOST
    if not reached:
        yield f"{MOST:,} networks were not enough for a slack of {slack}; what follows is for the slack that they gave."
    if device.type == "cuda":
        goal = Target("value", "at most", 5.0) if scale == "cuda" and reached else None
        yield Row(f"certificate of P and Q, {name}, slack {slack}", seconds, "s", target=goal)
        yield Row(f"networks drawn per second, {name}", draws / seconds, "1/s")
    yield Row(f"networks drawn for Q and for P, {name}, slack {slack}", float(draws), "networks")
    yield _naive(model, prior, split.bound, name, device, scale)


def _naive(model: nn.Module, slab: spikeslab.SpikeSlab, part: Part, name: str, device: torch.device, scale: str) -> Row:
    """The time per draw of a loop that draws a network, evaluates a minibatch and goes on, beside `monte_carlo`."""
    plain, draws = attachment.harden(copy.deepcopy(model)), 20 if scale == "smoke" else 400
    on_device = Part(part.name, part.x.to(device), part.y.to(device), part.index)
    right = torch.zeros(len(part), dtype=torch.bool, device=device)

    def loop() -> None:
        with evaluating(model):
            for _ in range(draws):
                attachment.resample_(model)
                index = torch.randint(len(part), (BATCH,), device=device)
                mistakes(model(on_device.x[index]), on_device.y[index]).sum().item()

    def batched() -> None:
        drawn_networks.monte_carlo(plain, slab, on_device, right, seed=0, batch=BATCH, draws=draws)

    times = alternate({"loop": loop, "batched": batched}, device, seconds=0.0 if scale == "smoke" else 3.0)
    words = f"{draws} networks drawn one at a time, {name}"
    return times.row(words, "loop", "batched", relative_to="many at once", unit="ms per network", per=draws)


# --- pattern


def pattern(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A Linear layer in inference, its weight 2:4 and held dense, beside the same weight in torch's sparse kernels."""
    on_cuda = device.type == "cuda"
    dtype, what = (torch.bfloat16, "semi-structured kernels") if on_cuda else (torch.float32, "CSR")
    sizes = {"smoke": [(64, 32)], "cuda": [(1024, 8192), (4096, 32), (4096, 512), (4096, 8192), (8192, 8192)]}
    for width, inputs in sizes.get(scale, [(1024, 32)]):
        dense = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            dense.weight.mul_(masks.top_k({"weight": dense.weight.float().abs()}, pattern="2:4")["weight"])
        sparse = copy.deepcopy(dense)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that sparse tensors are in beta state
            if on_cuda:
                patterns.to_semi_structured(nn.Sequential(sparse))
            else:
                sparse.weight = nn.Parameter(dense.weight.detach().to_sparse_csr(), requires_grad=False)
        x = torch.randn(inputs, width, device=device, dtype=dtype)
        things = {"dense": partial(dense, x), "sparse": partial(sparse, x)}
        with torch.no_grad():
            times = alternate(things, device, seconds=0.0 if scale == "smoke" else 1.0)
        name = f"Linear {width:,} x {width:,}, 2:4 held dense, {inputs:,} inputs, {str(dtype).removeprefix('torch.')}"
        yield times.row(name, "dense", "sparse", relative_to=f"2:4 in torch's {what}")
