"""A figure of linear-model: which weights stochastic masks keep in wide networks, and what linear models predict."""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import data, models
from pacprune.masking import masks
from pacprune.masking.attachment import attach, read
from pacprune.masking.masks import Mask
from pacprune.masking.spikeslab import isotropic, top_mask
from pacprune.masking.weights import prunable
from pacprune.methods.pft import pft
from pacprune.paper.frame import Figure, Job
from pacprune.paper.painting import Style, lines
from pacprune.paper.statistics import agreement, groups, means
from pacprune.runs.plots import BLUE, GREEN, GREY, ORANGE, title
from pacprune.theory import linear, linearised
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.types import Table

CAPTION = (
    "Masks at initialisation, digits: how well the linearised network predicts which weights are kept. Above, gates "
    "alone are trained, with the loss, start, step and number of steps of the flow; below, PFT as it is. Grey: how far "
    "two runs agree that differ in their draws and data order alone. Bands: 95 % intervals over seeds."
)


class Networks(NamedTuple):
    """Widths of networks 64-width-10, repetitions, examples, epochs."""

    widths: tuple[int, ...]
    seeds: int
    examples: int
    epochs: int


SPARSITIES = (0.1, 0.5, 0.9)
BATCHES = 8
"""Steps per epoch: the noise of a mini-batch is small beside that of the masks."""
TRUTHS = {"gates": "gates alone", "pft": "PFT, weights too"}
PREDICTIONS = {
    "again": Style("the same, drawn again", GREY, "v"),
    "flow": Style("linearised: budgeted flow", ORANGE, "o"),
    "slope": Style("linearised: slope at the start", BLUE, "s"),
    "magnitude": Style("magnitude", GREEN, "^"),
}


def figure(size: Networks, job: Job) -> Figure:
    """Agreement of predictions with what is kept, against the width."""
    return Figure("wide_network", CAPTION, lambda: rows(size, job), paint, numbers)


def rows(size: Networks, job: Job) -> Table:
    """Per width, sparsity and seed: agreement beyond chance of every prediction with what was really kept."""
    table: Table = []
    for number, seed in enumerate(job.seeds(size.seeds)):
        x, y = (values[: size.examples] for values in job.tensors(data.digits(seed=seed).train))
        for width in size.widths:
            model = models.mlp(64, 10, hidden=(width,), seed=seed).to(job.device)
            table += [{"width": width, "seed": seed} | row for row in compare(model, x, y, size.epochs, seed=seed)]
        job.progress("wide networks", number + 1, size.seeds, {})
    return table


def compare(model: nn.Module, x: Tensor, y: Tensor, epochs: int, *, seed: int) -> Table:
    """The rows of one network, for all sparsities."""
    onehot = F.one_hot(y, 10).float()
    # In float32, as the networks are trained; the masks of two runs differ far more than its rounding.
    p, w = linearised.problem(model, x, onehot, dtype=torch.float32), linearised.flat(prunable(model)).double()
    lr = 1 / steepest(p, w)
    # The flow's risk is half the mean squared error, hence half its step here.
    gate_training = Config(epochs=epochs, lr=0.0, gate_lr=lr / 2, momentum=0.0, batch_size=-(-len(x) // BATCHES))
    table: Table = []
    for sparsity in SPARSITIES:
        guesses = predictions(model, p, w, lr, steps=epochs * BATCHES, sparsity=sparsity)
        for truth in TRUTHS:
            actual, again = (
                gates(model, x, onehot, gate_training, sparsity=sparsity, seed=s)
                if truth == "gates"
                else pft(
                    copy.deepcopy(model), (x, y), training(epochs), sparsity=sparsity, recipe="coupled", seed=s
                ).mask
                for s in (seed, seed + 500)
            )
            table += [
                {"sparsity": sparsity, "truth": truth, "foretold_by": name, "agreement": agreement(guess, actual)}
                for name, guess in (guesses | {"again": again}).items()
            ]
    return table


def predictions(
    model: nn.Module, p: linear.Problem, w: Tensor, lr: float, *, steps: int, sparsity: float
) -> dict[str, Mask]:
    """The masks that the linearised network predicts, and the one of magnitude."""
    start = torch.full_like(w, 1 - sparsity)
    path = linear.flow(lambda lam: linear.keep_prob_gradient(p, w, lam), start, lr=lr, steps=steps, sparsity=sparsity)
    scores = {"flow": path[-1], "slope": -linear.keep_prob_gradient(p, w, start), "magnitude": w.abs()}
    like = prunable(model)
    return {name: masks.top_k(linearised.unflat(v, like), sparsity=sparsity) for name, v in scores.items()}


def training(epochs: int) -> Config:
    """PFT's training, with the learning rate that the command line has for the digits."""
    return Config(epochs=epochs, lr=0.1, schedule="cosine")


def steepest(p: linear.Problem, weights: Tensor, *, steps: int = 30) -> float:
    """The largest curvature of the risk in keep_prob: the top eigenvalue of diag(w) Sigma diag(w), by iteration."""
    vector = weights.abs()
    for _ in range(steps):
        vector = vector / vector.norm()
        vector = weights * (p.covariance @ (weights * vector)[:, None])[:, 0]
    return float(vector.norm())


def gates(model: nn.Module, x: Tensor, y: Tensor, config: Config, *, sparsity: float, seed: int) -> Mask:
    """What stochastic masks keep at fixed weights: projected gradient descent from equal keep probabilities."""
    model = attach(copy.deepcopy(model), isotropic(model, sparsity=sparsity), mapping="clamp", seed=seed)
    budget = Budget(sparsity, control="projection")
    fit(model, (x, y), config, loss=F.mse_loss, budget=budget, seed=seed)
    return top_mask(read(model), sparsity=sparsity)


def numbers(rows: Table) -> dict[str, float]:
    """Agreement at the largest width, for all that is compared."""
    widest = max(row["width"] for row in rows)
    table = means([row for row in rows if row["width"] == widest], "agreement", "truth", "sparsity", "foretold_by")
    return {
        f"agreement, width {widest:.0f}, {sparsity:.0%} pruned, {truth}, {name}": table[truth, sparsity, name]
        for truth in TRUTHS
        for sparsity in SPARSITIES
        for name in PREDICTIONS
    }


def paint(canvas: Any, rows: Table) -> None:
    """Sparsities side by side; gates alone above, PFT below."""
    canvas.set_size_inches(10, 6)
    cells = groups(rows, "truth", "sparsity")
    grid = canvas.subplots(len(TRUTHS), len(SPARSITIES), sharex=True, sharey=True)
    for panels, (truth, words) in zip(grid, TRUTHS.items(), strict=True):
        for axes, sparsity in zip(panels, SPARSITIES, strict=True):
            lines(axes, cells[truth, sparsity], x="width", y="agreement", by="foretold_by", styles=PREDICTIONS)
            axes.axhline(0, color=GREY, lw=0.8)
            axes.set_title(f"{words}: {sparsity:.0%} pruned", loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        panels[0].set_ylabel("agreement with what is kept\n(0: chance, 1: the same)")
    for axes in grid[-1]:
        axes.set_xticks(sorted({row["width"] for row in rows}))
        axes.set_xlabel("width of the hidden layer")
    canvas.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center", fontsize=9)
    title(canvas, "Does the linearised network predict the mask?", "split, weights, data order, sampled masks")
