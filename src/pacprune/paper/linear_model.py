"""`pacprune reproduce linear-model`: the theory of stochastic masks in linear regression, in five figures."""

import math
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacprune.masking import masks
from pacprune.paper import wide_masks
from pacprune.paper.frame import Drawn, Job, agreement, draw, lines
from pacprune.runs.commands import one_thread
from pacprune.runs.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, title
from pacprune.theory import linear
from pacprune.theory.linear import Problem
from pacprune.types import Table

SKY, RED = "#56B4E9", "#D55E00"


class Sizes(NamedTuple):
    """How much is computed: problems per point, points per curve, steps of a flow."""

    seeds: int
    points: int
    steps: int


SIZES = {"smoke": Sizes(3, 41, 100), "reduced": Sizes(50, 401, 2000), "paper": Sizes(500, 1001, 5000)}
WEIGHTS, EXAMPLES = 14, 60
"""Of every regression problem; so many weights that all masks can be tried."""
KEPT = (2, 4, 7, 10, 12)
DESIGNS = {"random": 0.0, "correlated": 0.9}
"""Correlation of neighbouring features."""
METHODS = {
    "flow": ("budgeted flow", ORANGE, "o"),
    "alignment": ("alignment |A|/√Σ", BLUE, "s"),
    "magnitude": ("magnitude |w|", GREEN, "^"),
    "random": ("random", GREY, "v"),
}
FITS = {
    "best subset": ("best subset", "black", "D"),
    "pft": ("PFT", ORANGE, "o"),
    "lasso": ("lasso", SKY, "v"),
    "lasso, refitted": ("lasso, refitted", BLUE, "s"),
    "dropout": ("dropout, then top k", PURPLE, "P"),
    "magnitude": ("magnitude", GREEN, "^"),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """All five figures; the main numbers are taken from their rows."""
    size = SIZES[job.scale]
    with one_thread():
        penalty = draw(job, "kl_penalty", PENALTY, lambda: penalty_rows(size), paint_penalty)
        point = draw(job, "fixed_point", POINT, lambda: point_rows(size), paint_point)
        kept = draw(job, "kept_weights", KEPT_WEIGHTS, lambda: kept_rows(job, size), paint_kept)
        fits = draw(job, "regression", REGRESSION, lambda: fit_rows(job, size), paint_fits)
        wide = draw(job, "wide_network", wide_masks.CAPTION, lambda: wide_masks.rows(job), wide_masks.paint)
    numbers = {}
    for design in DESIGNS:
        for method in METHODS:
            own = [row for row in kept.rows if (row["design"], row["method"]) == (design, method)]
            numbers[f"mean risk lost, {design} features, {method}"] = _mean([row["risk_lost"] for row in own])
    for method in FITS:
        numbers[f"mean excess risk, {method}"] = _mean([r["excess_risk"] for r in fits.rows if r["method"] == method])
    return [penalty, point, kept, fits, wide], numbers | wide_masks.numbers(wide.rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- The KL penalty.

PENALTY = (
    "What a keep probability pays for leaving its prior, and the force that pulls it back: zero at the prior alone."
)
PRIORS = {0.05: SKY, 0.2: BLUE, 0.5: "black", 0.8: ORANGE, 0.95: RED}


def penalty_rows(size: Sizes) -> Table:
    """kl(lam||lam0) and logit lam - logit lam0 for several lam0; the slope is infinite at the ends, and left out."""
    lam = torch.linspace(0, 1, size.points, dtype=torch.float64)
    rows = []
    for prior in PRIORS:
        kl = linear.kl(lam, torch.full_like(lam, prior))
        slope = torch.logit(lam) - math.log(prior / (1 - prior))
        for x, value, force in zip(lam.tolist(), kl.tolist(), slope.tolist(), strict=True):
            finite = force if math.isfinite(force) else None
            rows.append({"prior": prior, "keep_prob": x, "kl": value, "slope": finite})
    return rows


def paint_penalty(canvas: Any, rows: Table) -> None:
    """The penalty on the left, its derivative on the right."""
    canvas.set_size_inches(8.6, 3.4)
    left, right = canvas.subplots(1, 2)
    for prior, colour in PRIORS.items():
        own = [row for row in rows if row["prior"] == prior]
        left.plot([r["keep_prob"] for r in own], [r["kl"] for r in own], color=colour, lw=2, label=f"λ0 = {prior}")
        inner = [row for row in own if row["slope"] is not None]
        right.plot([r["keep_prob"] for r in inner], [r["slope"] for r in inner], color=colour, lw=2)
    right.axhline(0, color=GREY, lw=0.8)
    left.set_ylabel("kl(λ‖λ0) in nats")
    right.set_ylabel("∂kl/∂λ in nats")
    for axes in (left, right):
        axes.set_xlabel("posterior keep probability λ")
    left.set_ylim(0, 3.2)
    right.set_ylim(-7, 7)
    canvas.legend(ncols=5, loc="outside lower center", fontsize=9)
    title(canvas, "The KL penalty of a keep probability and its derivative", "nothing")


# --- The fixed point.

POINT = (
    "Where the PAC-Bayes objective drives one keep probability, the kl it pays there and the objective's value, with "
    "every approximation: the corrected ones, and those of the paper that fail."
)
PRIOR = 0.3


def point_rows(size: Sizes) -> Table:
    """The exact fixed point at kappa = 1, its limits, and the paper's approximations, against eta = drift / kappa."""
    eta = torch.linspace(-8, 8, size.points, dtype=torch.float64)
    lam0 = torch.full_like(eta, PRIOR)
    kinds = {"exact": linear.fixed_point, "small": linear.small_drift, "large": linear.large_drift}
    columns = {"drift_over_kappa": eta}
    for kind, function in kinds.items():
        found = function(lam0, eta, kappa=1.0)
        columns |= {f"{name}_{kind}": value for name, value in zip(found._fields, found, strict=True)}
    a, b = 1 + eta * (1 - PRIOR), 1 - eta * PRIOR
    columns["keep_prob_paper_small"] = PRIOR * a
    columns["kl_paper_small"] = PRIOR * a * a.log() - (1 - PRIOR) * b * b.log()  # NaN beyond its domain
    columns["kl_paper_large"] = torch.where(eta > 0, eta * PRIOR, eta * PRIOR / (1 - PRIOR) - math.log(PRIOR))
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*(c.tolist() for c in columns.values()), strict=True)
    ]
    return [{name: None if math.isnan(value) else value for name, value in row.items()} for row in rows]


def paint_point(canvas: Any, rows: Table) -> None:
    """lam_inf, kl and value, each with its approximations."""
    canvas.set_size_inches(10.5, 4.0)
    panels = canvas.subplots(1, 3)
    kinds = {
        "exact": ("exact", "black", "-", 2.6),
        "small": ("small drift (right)", BLUE, "--", 1.8),
        "large": ("large drift (right)", GREEN, "--", 1.8),
        "paper_small": ("the paper, small drift (wrong)", ORANGE, ":", 2.2),
        "paper_large": ("the paper, large drift (wrong)", RED, ":", 2.2),
    }
    limits = {"keep_prob": (-0.25, 1.25), "kl": (-0.6, 2.2), "value": (-7.2, 1.2)}
    for axes, (name, span) in zip(panels, limits.items(), strict=True):
        for kind, (label, colour, dash, width) in kinds.items():
            points = [(r["drift_over_kappa"], r.get(f"{name}_{kind}")) for r in rows]
            points = [(x, y) for x, y in points if y is not None]
            # A limit of large drift has two halves, neither of which is meant for small drift.
            for low, high in ((-math.inf, -1), (1, math.inf)) if "large" in kind else ((-math.inf, math.inf),):
                if half := [(x, y) for x, y in points if low <= x <= high]:
                    axes.plot(*zip(*half, strict=True), dash, color=colour, lw=width, label=label)
        axes.set_ylim(*span)
        axes.set_xlabel("drift Δ/κ")
    for axes, label in zip(panels, ("fixed point λ∞", "kl(λ∞‖λ0) in nats", "minimum of Δλ/κ + kl"), strict=True):
        axes.set_ylabel(label)
    handles = [*panels[0].get_lines(), *panels[1].get_lines()]
    unique = {handle.get_label(): handle for handle in handles}
    canvas.legend(unique.values(), unique.keys(), ncols=5, loc="outside lower center", fontsize=8)
    title(canvas, f"Where the bound drives a keep probability of prior {PRIOR}", "nothing")


# --- Problems.


def example(seed: int, correlation: float, *, scales: bool) -> tuple[Problem, Tensor, Tensor]:
    """(problem, true weights, true covariance): neighbours correlate, and targets have as much noise as signal / 2."""
    g = torch.Generator().manual_seed(seed)
    place = torch.arange(WEIGHTS, dtype=torch.float64)
    truth = correlation ** (place[:, None] - place).abs() if correlation else torch.eye(WEIGHTS, dtype=torch.float64)
    scale = torch.exp(0.7 * torch.randn(WEIGHTS, generator=g, dtype=torch.float64)) if scales else torch.ones(WEIGHTS)
    truth = scale[:, None] * truth * scale
    psi = torch.randn(EXAMPLES, WEIGHTS, generator=g, dtype=torch.float64) @ torch.linalg.cholesky(truth).mT
    sign = torch.randint(0, 2, (WEIGHTS,), generator=g) * 2.0 - 1
    size = 0.75 ** torch.randperm(WEIGHTS, generator=g).double()  # geometric, so that no sparsity is the true one
    weights = sign * size / scale
    noise = (weights @ truth @ weights / 2).sqrt() * torch.randn(EXAMPLES, generator=g, dtype=torch.float64)
    return linear.problem(psi, psi @ weights + noise), weights, truth


def stacked(problems: list[Problem]) -> Problem:
    """Problems as one batch."""
    return Problem(*(torch.stack([getattr(p, f) for p in problems]) for f in ("covariance", "alignment", "power")))


def steepest(p: Problem, weights: Tensor) -> float:
    """The largest curvature of the risk in keep_prob, over a batch: a step of its inverse is stable."""
    return float(torch.linalg.eigvalsh(weights[..., None] * p.covariance * weights[..., None, :])[..., -1].max())


def top(scores: Tensor, kept: int) -> Tensor:
    """The mask of the `kept` largest scores of every row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(kept, dim=-1).indices, True)


# --- Which weights are kept.

KEPT_WEIGHTS = (
    "Which of the least-squares weights are kept at fixed weights: agreement with the best mask (all were tried), and "
    "the share of the reduction in risk that the chosen mask loses. Bands: 95 % intervals over problems."
)


def kept_rows(job: Job, size: Sizes) -> Table:
    """Per design, problem and number of kept weights: every method's mask against the best one."""
    rows = []
    for design, correlation in DESIGNS.items():
        seeds = job.seeds(size.seeds)
        problems = [example(seed, correlation, scales=True)[0] for seed in seeds]
        p = stacked(problems)
        w = linear.least_squares(p)
        blind = torch.rand(w.shape, generator=torch.Generator().manual_seed(job.seed), dtype=torch.float64)
        scores = {"alignment": linear_alignment(p), "magnitude": w.abs(), "random": blind}
        for number, kept in enumerate(KEPT):
            best = [linear.best_mask(one, v, kept=kept) for one, v in zip(problems, w, strict=True)]
            path = linear.flow(
                lambda lam, p=p, w=w: linear.keep_prob_gradient(p, w, lam),
                torch.full_like(w, kept / WEIGHTS),
                lr=1 / steepest(p, w),
                steps=size.steps,
                sparsity=1 - kept / WEIGHTS,
            )
            for method, score in {"flow": path[-1], **scores}.items():
                mask = top(score, kept)
                risk = linear.risk(p, mask * w)
                for k, seed in enumerate(seeds):
                    lost = float((risk[k] - best[k].risk) / (problems[k].power / 2 - best[k].risk))
                    common = agreement({"w": best[k].mask}, {"w": mask[k]})
                    rows.append(
                        {"design": design, "method": method, "kept": kept, "seed": seed, "agreement": common}
                        | {"risk_lost": lost}
                    )
            job.progress(f"masks, {design}", number + 1, len(KEPT), {})
    return rows


def linear_alignment(p: Problem) -> Tensor:
    """|A_i| / sqrt(Sigma_ii): what ranks uncorrelated features by the risk they take away (erratum S4)."""
    return p.alignment.abs() / p.covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def paint_kept(canvas: Any, rows: Table) -> None:
    """Designs side by side; agreement above, risk below."""
    canvas.set_size_inches(8.6, 5.6)
    grid = canvas.subplots(2, 2, sharex=True, sharey="row")
    for column, design in zip(grid.T, DESIGNS, strict=True):
        own = [row for row in rows if row["design"] == design]
        for axes, y in zip(column, ("agreement", "risk_lost"), strict=True):
            lines(axes, own, x="kept", y=y, by="method", style=METHODS)
        column[0].axhline(0, color=GREY, lw=0.8)
        column[0].set_title(f"{design} features", loc="left")
        column[1].set_xlabel(f"weights kept, of {WEIGHTS}")
    grid[0, 0].set_ylabel("agreement with the best mask\n(0: chance, 1: the same)")
    grid[1, 0].set_ylabel("share of the best mask's\nreduction in risk that is lost")
    grid[1, 0].set_ylim(bottom=0)
    canvas.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center", fontsize=9)
    title(canvas, "Which weights are kept at fixed weights", "features, weights, noise")


# --- Regression at equal sparsity.

REGRESSION = (
    "Excess risk on new data of sparse linear regression with equally many weights (the lasso: at most as many); all "
    "but the lasso itself fit the kept weights again by least squares. Bands: 95 % intervals over problems."
)


def fit_rows(job: Job, size: Sizes) -> Table:
    """Per problem and number of kept weights: the excess risk (w - w*)'Sigma (w - w*) / 2 of every fit, exactly."""
    seeds, rows = job.seeds(size.seeds), []
    made = [example(seed, 0.7, scales=False) for seed in seeds]
    p, truth = stacked([one[0] for one in made]), torch.stack([one[1] for one in made])
    for number, kept in enumerate(KEPT):
        own = [lasso_of_size(one[0], kept) for one in made]
        shrunk = torch.stack(own)
        fits = {
            "best subset": refit(p, torch.stack([best_subset(one[0], kept) for one in made])),
            "pft": refit(p, top(pft_keep_prob(p, kept, steps=size.steps), kept)),
            "lasso": shrunk,
            "lasso, refitted": refit(p, shrunk != 0),
            "dropout": refit(p, top(dropout_weights(p, torch.full_like(truth, kept / WEIGHTS)).abs(), kept)),
            "magnitude": refit(p, top(linear.least_squares(p).abs(), kept)),
        }
        for method, weights in fits.items():
            for k, seed in enumerate(seeds):
                off = weights[k] - truth[k]
                excess = float(off @ made[k][2] @ off) / 2
                rows.append({"method": method, "kept": kept, "seed": seed, "excess_risk": excess})
        job.progress("regression", number + 1, len(KEPT), {})
    return rows


def refit(p: Problem, mask: Tensor) -> Tensor:
    """Least squares on the kept features, zero elsewhere."""
    m = mask.double()
    kept = m[..., None] * p.covariance * m[..., None, :] + torch.diag_embed(1 - m)
    return m * torch.linalg.solve(kept, (m * p.alignment)[..., None])[..., 0]


def dropout_weights(p: Problem, keep_prob: Tensor) -> Tensor:
    """argmin over w of the Gibbs risk at lam > 0: Sigma (lam * w) + (1 - lam) * diag(Sigma) * w = A."""
    variances = p.covariance.diagonal(dim1=-2, dim2=-1)
    system = p.covariance * keep_prob[..., None, :] + torch.diag_embed((1 - keep_prob) * variances)
    return torch.linalg.solve(system, p.alignment[..., None])[..., 0]


def pft_keep_prob(p: Problem, kept: int, *, steps: int) -> Tensor:
    """PFT without sampling: descent in keep_prob on the exact Gibbs risk, weights refitted to every keep_prob.

    The mean keep_prob falls from 1 to kept / D over the first 80 % of the steps, as in pft's default recipe.
    """
    lam, sparsity = torch.ones_like(p.alignment), 1 - kept / WEIGHTS
    lr = 0.1 / steepest(p, linear.least_squares(p))
    for step in range(steps):
        density = 1 - sparsity * (1 - (1 - min(1.0, (step + 1) / (0.8 * steps))) ** 3)
        gradient = linear.keep_prob_gradient(p, dropout_weights(p, lam), lam)
        lam = masks.project([lam - lr * gradient], density, eta=1e-3, members=True)[0]
    return lam


def best_subset(p: Problem, kept: int) -> Tensor:
    """The mask of the `kept` features with the least risk after refitting: all are tried. Risk = (power - A'w) / 2."""
    chosen = torch.tensor(list(combinations(range(len(p.alignment)), kept)))
    a = p.alignment[chosen]
    w = torch.linalg.solve(p.covariance[chosen[:, :, None], chosen[:, None, :]], a[..., None])[..., 0]
    mask = torch.zeros_like(p.alignment, dtype=torch.bool)
    mask[chosen[(a * w).sum(-1).argmax()]] = True
    return mask


def lasso(p: Problem, penalty: float, *, start: Tensor | None = None, tolerance: float = 1e-10) -> Tensor:
    """argmin of risk(w) + penalty |w|_1 by coordinate descent: w_i = soft(A_i - sum_{j != i} Sigma_ij w_j)/Sigma_ii."""
    sigma, a = p.covariance.tolist(), p.alignment.tolist()
    w = [0.0] * len(a) if start is None else start.tolist()
    while True:
        moved = 0.0
        for i, row in enumerate(sigma):
            rest = a[i] - sum(s * v for s, v in zip(row, w, strict=True)) + row[i] * w[i]
            new = math.copysign(max(abs(rest) - penalty, 0.0), rest) / row[i] if row[i] > 0 else 0.0
            moved, w[i] = max(moved, abs(new - w[i])), new
        if moved <= tolerance:
            return torch.tensor(w, dtype=torch.float64)


def lasso_of_size(p: Problem, kept: int) -> Tensor:
    """The lasso at the last penalty of a falling grid before it keeps more than `kept` weights."""
    penalty = float(p.alignment.abs().max())
    best = w = torch.zeros_like(p.alignment)
    while (w != 0).sum() <= kept and penalty > 1e-4 * float(p.alignment.abs().max()):
        best, penalty = w, penalty * 0.95
        w = lasso(p, penalty, start=w, tolerance=1e-7)
    return w if (w != 0).sum() <= kept else best


def paint_fits(canvas: Any, rows: Table) -> None:
    """Excess risk against the number of weights."""
    canvas.set_size_inches(7.6, 4.0)
    axes = canvas.subplots()
    lines(axes, rows, x="kept", y="excess_risk", by="method", style=FITS)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"weights kept, of {WEIGHTS}")
    axes.set_ylabel("excess risk on new data\n(half the squared error)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    title(canvas, f"Sparse regression from {EXAMPLES} examples", "features, weights, noise")
