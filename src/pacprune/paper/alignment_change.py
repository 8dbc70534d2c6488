"""A figure of linear-model: what the KL of a PAC-Bayes bound has to do with the change of feature alignment.

Weights and the prior's keep probabilities come from S_P. Those of the posterior Q are where the bound's objective is
least on the rest of the data. These are the three stages of PBP, in linear regression.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacprune.masking.spikeslab import ETA
from pacprune.paper.frame import Figure
from pacprune.paper.painting import Style
from pacprune.paper.statistics import correlation, groups, means
from pacprune.runs.plots import BLUE, ORANGE, title
from pacprune.theory import linear
from pacprune.theory.linear import Problem
from pacprune.types import Table

CAPTION = (
    "Linear regression, moved from S_P to the rest of the data: the KL that the posterior pays where the bound's "
    "objective is least, against the measured change of feature alignment (above: its size; below: what was lost of "
    "it alone). One mark per problem, from the same data (no change) over new data to data with other true weights."
)
WEIGHTS, EXAMPLES = 14, 60
"""Of every problem; so many examples in S_P, and as many in the rest."""
KAPPA = 1 / EXAMPLES
"""The price of a nat, zeta / n with zeta = 1, in stage 2 as in stage 3."""
MOVES = {"same data": None, "new data": 0.0, "shift 0.25": 0.25, "shift 0.5": 0.5, "shift 1": 1.0, "shift 2": 2.0}
"""How far the true weights of the rest are from those of S_P, relative to each; "new data" is the i.i.d. case."""
DESIGNS = {"uncorrelated": 0.0, "correlated": 0.7}
"""Correlation of neighbouring features; without it both parts are whitened, as in the paper's closed form."""
PRIORS = {
    "isotropic": Style("prior: all λ0 = ½", BLUE, "s"),
    "learned": Style("prior: λ0 learned on S_P", ORANGE, "o"),
}


CHANGES = {
    "change": "size of the change of alignment\n|A(rest) − A(S_P)| / |A(S_P)|",
    "lost": "alignment lost, in the same unit",
}


class Parts(NamedTuple):
    """The problems of S_P and of the rest, a batch each."""

    prior: Problem
    rest: Problem


def figure(seeds: list[int]) -> Figure:
    """KL against the change of alignment."""
    return Figure("alignment_change", CAPTION, lambda: rows(seeds), paint, numbers)


def rows(seeds: list[int]) -> Table:
    """Per design, prior, move and seed: the change of alignment, the KL, who pays it, and the risks."""
    table: Table = []
    cells = [{"move": move, "seed": seed} for move in MOVES for seed in seeds]
    for design, neighbours in DESIGNS.items():
        pairs = [moved(cell["seed"], neighbours, MOVES[cell["move"]]) for cell in cells]
        features, targets = (torch.stack(part, 1) for part in zip(*pairs, strict=True))
        parts = Parts(*(linear.problem(x, y) for x, y in zip(features, targets, strict=True)))
        w = linear.least_squares(parts.prior)
        for prior, lam0 in priors(parts.prior, w).items():
            columns = {name: values.tolist() for name, values in measures(parts, w, lam0).items()}
            table += [
                {"design": design, "prior": prior} | cell | {name: values[k] for name, values in columns.items()}
                for k, cell in enumerate(cells)
            ]
    return table


def moved(seed: int, neighbours: float, shift: float | None) -> tuple[Tensor, Tensor]:
    """Features (2, n, D) and targets (2, n) of S_P and the rest, whose true weights are w and w (1 + shift z).

    z is normal, one number per weight. Without a shift the rest is S_P itself, whose alignment is the same.
    """
    g = torch.Generator().manual_seed(seed)
    place = torch.arange(WEIGHTS, dtype=torch.float64)
    truth = neighbours ** (place[:, None] - place).abs() if neighbours else torch.eye(WEIGHTS, dtype=torch.float64)
    psi = torch.randn(2, EXAMPLES, WEIGHTS, generator=g, dtype=torch.float64) @ torch.linalg.cholesky(truth).mT
    if not neighbours:
        root = torch.linalg.cholesky(psi.mT @ psi / EXAMPLES)
        psi = torch.linalg.solve_triangular(root, psi.mT, upper=False).mT
    sign = torch.randint(0, 2, (WEIGHTS,), generator=g) * 2.0 - 1
    weights = sign * 0.75 ** torch.randperm(WEIGHTS, generator=g).double()
    z = torch.randn(WEIGHTS, generator=g, dtype=torch.float64)
    noise = (weights @ truth @ weights / 2).sqrt() * torch.randn(2, EXAMPLES, generator=g, dtype=torch.float64)
    both = torch.stack([weights, weights * (1 + (shift or 0.0) * z)])
    y = (psi @ both[..., None])[..., 0] + noise
    return (psi, y) if shift is not None else (psi[[0, 0]], y[[0, 0]])


def priors(p: Problem, w: Tensor) -> dict[str, Tensor]:
    """lam0 of both kinds. Stage 2 has the objective of stage 3: without a KL it would end at lam0 = 1 (erratum S5)."""
    half = torch.full_like(w, 0.5)
    return {"isotropic": half, "learned": least(p, w, half).clamp(ETA, 1 - ETA)}


def least(p: Problem, w: Tensor, prior: Tensor, *, sweeps: int = 1000) -> Tensor:
    """Where catoni_objective is least along every lam_i, from the prior on: the risk is linear there, so it is known.

    Without correlations one sweep is the exact minimum; with them it is a local one, as of any descent.
    """
    lam = prior.clone()
    for _ in range(sweeps):
        last = lam.clone()
        for i in range(lam.shape[-1]):
            slope = linear.keep_prob_gradient(p, w, lam)
            lam[..., i] = linear.fixed_point(prior[..., i], slope[..., i], kappa=KAPPA).keep_prob
        if bool((lam - last).abs().max() < 1e-9):
            break
    return lam


def measures(parts: Parts, w: Tensor, lam0: Tensor) -> dict[str, Tensor]:
    """One number for every problem."""
    before, after = parts.prior.alignment, parts.rest.alignment
    lam = least(parts.rest, w, lam0)
    kl, halved = linear.kl(lam, lam0), before * after < before.square() / 2
    bound = linear.catoni_objective(parts.rest, w, lam, prior=lam0, kappa=KAPPA)
    return {
        "change": (after - before).norm(dim=-1) / before.norm(dim=-1),
        "lost": (before.sign() * (before - after)).clamp_min(0).norm(dim=-1) / before.norm(dim=-1),
        "halved": halved.sum(-1),
        "kl": kl.sum(-1),
        "kl_of_halved": (kl * halved).sum(-1),
        "risk_of_prior": linear.gibbs_risk(parts.rest, w, lam0),
        "risk": linear.gibbs_risk(parts.rest, w, lam),
        "bound": bound,
    }


def numbers(rows: Table) -> dict[str, float]:
    """How closely the KL follows the change of alignment, and its mean without and with the largest change."""
    table = {}
    for (design, prior), part in groups(rows, "design", "prior").items():
        name, kl = f"{design} features, {prior} prior", means(part, "kl", "move")
        for x in CHANGES:
            table[f"correlation of KL and {x}, {name}"] = correlation(
                [r[x] for r in part], [r["kl"] for r in part]
            ).mean
        paid, total = (sum(row[y] for row in part) for y in ("kl_of_halved", "kl"))
        table[f"share of the KL paid by features that lost half, {name}"] = paid / total
        table |= {f"mean KL, {move}, {name}": kl[move,] for move in MOVES}
    return table


def paint(canvas: Any, rows: Table) -> None:
    """Designs side by side; against the size of the change above, against what was lost below."""
    canvas.set_size_inches(8.6, 6.4)
    grid = canvas.subplots(len(CHANGES), len(DESIGNS), sharex="row", sharey=True)
    cells = groups(rows, "design", "prior")
    for panels, (x, label) in zip(grid, CHANGES.items(), strict=True):
        for axes, design in zip(panels, DESIGNS, strict=True):
            for prior, style in PRIORS.items():
                part = cells[design, prior]
                look = {"color": style.colour, "marker": style.marker, "s": 14, "alpha": 0.6, "label": style.label}
                axes.scatter([row[x] for row in part], [row["kl"] for row in part], **look)
            axes.set_title(f"{design} features", loc="left")
            axes.set_xlabel(label)
        panels[0].set_ylabel("KL(Q‖P) in nats")
    canvas.legend(*grid[0, 0].get_legend_handles_labels(), ncols=2, loc="outside lower center", fontsize=9)
    title(canvas, "What the bound pays when feature alignment changes", "features, weights, noise")
