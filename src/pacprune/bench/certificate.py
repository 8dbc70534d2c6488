"""A Monte-Carlo certificate: how long it takes, and how its draws compare with a loop over networks."""

import copy
import tempfile
from collections.abc import Iterator

import torch
from torch import nn

from pacprune import data, models
from pacprune.bench.timing import SPARSITY, Finding, Row, Target, alternate, duration, seconds_per_call
from pacprune.certification import drawn_networks
from pacprune.certification.certify import BATCH, certify
from pacprune.certification.record import MonteCarlo
from pacprune.data.splits import Part
from pacprune.masking import attachment, criteria, masks, spikeslab
from pacprune.training.config import Config
from pacprune.training.evaluate import evaluating, mistakes
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior

MOST = 100_000
"""Networks drawn for one certificate at most."""


def certificate(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A Monte-Carlo certificate on synthetic examples: its time, its draws, and a loop over networks beside it."""
    inputs, n, hidden = {"smoke": (16, 400, (16,)), "cuda": (784, 30_000, (1000, 1000, 1000))}.get(
        scale, (64, 5_000, (300, 100))
    )
    slack = {"smoke": 0.02, "cuda": 1e-3}.get(scale, 4e-3)
    generator = torch.Generator().manual_seed(0)
    # Ten classes, well apart; a tenth of the labels is random, so that no network can be perfect.
    y = torch.randint(10, (2 * n,), generator=generator)
    x = torch.randn(2 * n, inputs, generator=generator) + torch.randn(10, inputs, generator=generator)[y]
    wrong = torch.rand(2 * n, generator=generator) < 0.1
    y = torch.where(wrong, torch.randint(10, (2 * n,), generator=generator), y)
    split = data.split(x, y, prior_fraction=0.5)
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
        seconds = seconds_per_call(issue, device) if device.type == "cuda" else 0.0
    counts = [record[distribution]["draws"] for distribution in ("posterior", "prior")]
    draws, reached = sum(counts), max(counts) < MOST
    if not reached:
        yield f"{MOST:,} networks were not enough for a slack of {slack}; what follows is for the slack that they gave."
    if device.type == "cuda":
        goal = Target("value", "at most", 5.0) if scale == "cuda" and reached else None
        yield Row(f"certificate of P and Q, {name}, slack {slack}", seconds, "s", target=goal)
        yield Row(f"networks drawn per second, {name}", draws / seconds, "1/s")
    yield Row(f"networks drawn for Q and for P, {name}, slack {slack}", float(draws), "networks")
    yield _naive(model, prior, split.bound, name, device, scale)


def _naive(model: nn.Module, slab: spikeslab.SpikeSlab, part: Part, name: str, device: torch.device, scale: str) -> Row:
    """The time per draw of a loop over networks, each on one minibatch, beside `monte_carlo`."""
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

    times = alternate({"loop": loop, "batched": batched}, device, seconds=duration(scale, 3.0))
    words = f"{draws} networks drawn one at a time, {name}"
    return times.row(words, "loop", "batched", relative_to="many at once", unit="ms per network", per=draws)
