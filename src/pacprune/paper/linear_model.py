"""`pacprune reproduce linear-model`: the theory of stochastic masks in linear regression, in six figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacprune.masking import masks
from pacprune.methods.table import METHODS
from pacprune.paper import alignment_change, wide_masks
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.painting import RED, SKY, Style, lines
from pacprune.paper.statistics import agreement, groups, means
from pacprune.paper.wide_masks import Networks
from pacprune.runs.commands import one_thread
from pacprune.runs.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, title
from pacprune.theory import linear
from pacprune.theory.linear import Problem
from pacprune.types import Table


@dataclass(frozen=True)
class Sizes:
    """Points per curve, steps of a flow, and the networks of the last figure; seeds are regression problems."""

    points: int
    steps: int
    networks: Networks


SETTINGS: dict[str, tuple[Setting[Sizes], ...]] = {
    "smoke": (Setting(seeds=2, options=Sizes(21, 50, Networks((8, 16), 2, 100, 2))),),
    "reduced": (Setting(seeds=50, options=Sizes(401, 2000, Networks((16, 64, 256, 1024), 5, 1000, 20))),),
    "full": (Setting(seeds=500, options=Sizes(1001, 5000, Networks((16, 64, 256, 1024, 4096), 10, 1400, 20))),),
}
WEIGHTS, EXAMPLES = 14, 60
"""Of every regression problem; so many weights that all masks can be tried."""
COUNTS = (2, 4, 7, 10, 12)
"""Weights that are kept."""
DESIGNS = {"random": 0.0, "correlated": 0.9}
"""Correlation of neighbouring features."""
RANKINGS = {
    "flow": Style("budgeted flow", ORANGE, "o"),
    "alignment": Style("alignment |A|/√Σ", BLUE, "s"),
    "magnitude": Style("magnitude |w|", GREEN, "^"),
    "random": Style("random", GREY, "v"),
}
FITS = {
    "best subset": Style("best subset", "black", "D"),
    "pft": Style(METHODS["pft"].label, METHODS["pft"].colour, METHODS["pft"].marker),
    "lasso": Style("lasso", SKY, "v"),
    "lasso, refitted": Style("lasso, refitted", BLUE, "o"),
    "dropout": Style("dropout, then top k", PURPLE, "P"),
    "magnitude": Style("magnitude", GREEN, "^"),
}


def figures(setting: Setting[Sizes], job: Job) -> Iterator[Figure]:
    """All six figures."""
    options = setting.options
    with one_thread():  # until the last of them is drawn
        yield Figure("kl_penalty", PENALTY, lambda: penalty_rows(options.points), paint_penalty)
        yield Figure("fixed_point", POINT, lambda: point_rows(options.points), paint_point)
        yield Figure("kept_weights", KEPT_WEIGHTS, lambda: kept_rows(setting, job), paint_kept, kept_numbers)
        yield Figure("regression", REGRESSION, lambda: fit_rows(setting, job), paint_fits, fit_numbers)
        yield alignment_change.figure(job.seeds(setting.seeds))
        yield wide_masks.figure(options.networks, job)


# --- The KL penalty.

PENALTY = (
    "What a keep probability pays for leaving its prior, and the force that pulls it back: zero at the prior alone."
)
PRIORS = {0.05: SKY, 0.2: BLUE, 0.5: "black", 0.8: ORANGE, 0.95: RED}


def penalty_rows(points: int) -> Table:
    """kl(lam||lam0) and logit lam - logit lam0 for several lam0; the slope is infinite at the ends, and left out."""
    lam = torch.linspace(0, 1, points, dtype=torch.float64)
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
    penalty, slope = canvas.subplots(1, 2)
    for (prior,), curve in groups(rows, "prior").items():
        style = {"color": PRIORS[prior], "lw": 2}
        penalty.plot([r["keep_prob"] for r in curve], [r["kl"] for r in curve], label=f"λ0 = {prior}", **style)
        inner = [row for row in curve if row["slope"] is not None]
        slope.plot([r["keep_prob"] for r in inner], [r["slope"] for r in inner], **style)
    slope.axhline(0, color=GREY, lw=0.8)
    penalty.set_ylabel("kl(λ‖λ0) in nats")
    slope.set_ylabel("∂kl/∂λ in nats")
    for axes in (penalty, slope):
        axes.set_xlabel("posterior keep probability λ")
    penalty.set_ylim(0, 3.2)
    slope.set_ylim(-7, 7)
    canvas.legend(ncols=5, loc="outside lower center", fontsize=9)
    title(canvas, "The KL penalty of a keep probability and its derivative", "nothing")


# --- The fixed point.

POINT = (
    "Where the PAC-Bayes objective drives one keep probability, the kl it pays there and the objective's value, with "
    "every approximation: the corrected ones, and those of the paper that fail."
)
PRIOR = 0.3


def point_rows(points: int) -> Table:
    """The exact fixed point at kappa = 1, its limits, and the paper's approximations, against eta = drift / kappa."""
    eta = torch.linspace(-8, 8, points, dtype=torch.float64)
    lam0 = torch.full_like(eta, PRIOR)
    kinds = {"exact": linear.fixed_point, "small": linear.small_drift, "large": linear.large_drift}
    columns = {"drift_over_kappa": eta}
    for kind, function in kinds.items():
        columns |= {f"{name}_{kind}": value for name, value in function(lam0, eta, kappa=1.0)._asdict().items()}
    a, b = 1 + eta * (1 - PRIOR), 1 - eta * PRIOR
    columns["keep_prob_paper_small"] = PRIOR * a
    columns["kl_paper_small"] = PRIOR * a * a.log() - (1 - PRIOR) * b * b.log()  # NaN beyond its domain
    columns["kl_paper_large"] = torch.where(eta > 0, eta * PRIOR, eta * PRIOR / (1 - PRIOR) - math.log(PRIOR))
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*(c.tolist() for c in columns.values()), strict=True)
    ]
    return [{name: None if math.isnan(value) else value for name, value in row.items()} for row in rows]


_KINDS = {
    "exact": ("exact", "black", "-", 2.6),
    "small": ("small drift (right)", BLUE, "--", 1.8),
    "large": ("large drift (right)", GREEN, "--", 1.8),
    "paper_small": ("the paper, small drift (wrong)", ORANGE, ":", 2.2),
    "paper_large": ("the paper, large drift (wrong)", RED, ":", 2.2),
}
"""Label, colour, dashes and width of every approximation."""


def paint_point(canvas: Any, rows: Table) -> None:
    """lam_inf, kl and value, each with its approximations."""
    canvas.set_size_inches(10.5, 4.0)
    panels = canvas.subplots(1, 3)
    quantities = {
        "keep_prob": ("fixed point λ∞", (-0.25, 1.25)),
        "kl": ("kl(λ∞‖λ0) in nats", (-0.6, 2.2)),
        "value": ("minimum of Δλ/κ + kl", (-7.2, 1.2)),
    }
    for axes, (name, (label, span)) in zip(panels, quantities.items(), strict=True):
        for kind in _KINDS:
            points = [(row["drift_over_kappa"], row.get(f"{name}_{kind}")) for row in rows]
            _paint_kind(axes, kind, [(x, y) for x, y in points if y is not None])
        axes.set_ylim(*span)
        axes.set_xlabel("drift Δ/κ")
        axes.set_ylabel(label)
    handles = [*panels[0].get_lines(), *panels[1].get_lines()]
    unique = {handle.get_label(): handle for handle in handles}
    canvas.legend(unique.values(), unique.keys(), ncols=5, loc="outside lower center", fontsize=8)
    title(canvas, f"Where the bound drives a keep probability of prior {PRIOR}", "nothing")


def _paint_kind(axes: Any, kind: str, points: list[tuple[float, float]]) -> None:
    """One approximation; a limit of large drift has two halves, neither of which is meant for small drift."""
    label, colour, dash, width = _KINDS[kind]
    spans = ((-math.inf, -1), (1, math.inf)) if "large" in kind else ((-math.inf, math.inf),)
    for low, high in spans:
        if half := [(x, y) for x, y in points if low <= x <= high]:
            axes.plot(*zip(*half, strict=True), dash, color=colour, lw=width, label=label)


# --- Problems.


class Example(NamedTuple):
    """A regression problem, its true weights and its true covariance."""

    problem: Problem
    weights: Tensor
    covariance: Tensor


def example(seed: int, correlation: float, *, scales: bool) -> Example:
    """A random problem: neighbours correlate, and targets have as much noise as signal / 2."""
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
    return Example(linear.problem(psi, psi @ weights + noise), weights, truth)


def stacked(problems: list[Problem]) -> Problem:
    """Problems as one batch."""
    return Problem(*(torch.stack([getattr(p, f) for p in problems]) for f in ("covariance", "alignment", "power")))


def steepest(p: Problem, weights: Tensor) -> float:
    """The largest curvature of the risk in keep_prob, over a batch: a step of its inverse is stable."""
    return float(torch.linalg.eigvalsh(weights[..., None] * p.covariance * weights[..., None, :])[..., -1].max())


def top(scores: Tensor, k: int) -> Tensor:
    """The mask of the k largest scores of every row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k, dim=-1).indices, True)


# --- Which weights are kept.

KEPT_WEIGHTS = (
    "Which of the least-squares weights are kept at fixed weights: agreement with the best mask (all were tried), and "
    "the share of the reduction in risk that the chosen mask loses. Bands: 95 % intervals over problems."
)


def kept_rows(setting: Setting[Sizes], job: Job) -> Table:
    """Per design, problem and number of kept weights: every method's mask against the best one."""
    seeds, table = job.seeds(setting.seeds), []
    for design, correlation in DESIGNS.items():
        problems = [example(seed, correlation, scales=True).problem for seed in seeds]
        batch = stacked(problems)
        w = linear.least_squares(batch)
        blind = torch.rand(w.shape, generator=torch.Generator().manual_seed(job.seed), dtype=torch.float64)
        scores = {"alignment": linear_alignment(batch), "magnitude": w.abs(), "random": blind}
        for number, k in enumerate(COUNTS):
            flow = flow_keep_prob(batch, w, k, steps=setting.options.steps)
            method_masks = {method: top(ranking, k) for method, ranking in {"flow": flow, **scores}.items()}
            table += [{"design": design} | row for row in _against_the_best(problems, w, method_masks, k, seeds)]
            job.progress(f"masks, {design}", number + 1, len(COUNTS), {})
    return table


def _against_the_best(
    problems: list[Problem], w: Tensor, method_masks: dict[str, Tensor], k: int, seeds: list[int]
) -> Table:
    """Agreement with the best mask of k weights, and the share of its reduction in risk that is lost."""
    best = [linear.best_mask(problem, v, kept=k) for problem, v in zip(problems, w, strict=True)]
    table = []
    for method, mask in method_masks.items():
        risks = linear.risk(stacked(problems), mask * w)
        for seed, problem, least, keep, risk in zip(seeds, problems, best, mask, risks, strict=True):
            lost = float((risk - least.risk) / (problem.power / 2 - least.risk))
            cell = {"method": method, "kept": k, "seed": seed}
            table.append(cell | {"agreement": agreement({"w": least.mask}, {"w": keep}), "risk_lost": lost})
    return table


def kept_numbers(rows: Table) -> dict[str, float]:
    """The mean loss of every method, by design."""
    losses = means(rows, "risk_lost", "design", "method")
    return {f"mean risk lost, {design} features, {method}": mean for (design, method), mean in losses.items()}


def flow_keep_prob(p: Problem, w: Tensor, k: int, *, steps: int) -> Tensor:
    """Where the budgeted flow at fixed weights ends, for a batch of problems."""
    path = linear.flow(
        lambda lam: linear.keep_prob_gradient(p, w, lam),
        torch.full_like(w, k / WEIGHTS),
        lr=1 / steepest(p, w),
        steps=steps,
        sparsity=1 - k / WEIGHTS,
    )
    return path[-1]


def linear_alignment(p: Problem) -> Tensor:
    """|A_i| / sqrt(Sigma_ii): what ranks uncorrelated features by the risk they take away (erratum S4)."""
    return p.alignment.abs() / p.covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def paint_kept(canvas: Any, rows: Table) -> None:
    """Designs side by side; agreement above, risk below."""
    canvas.set_size_inches(8.6, 5.6)
    grid = canvas.subplots(2, 2, sharex=True, sharey="row")
    for column, design in zip(grid.T, DESIGNS, strict=True):
        part = [row for row in rows if row["design"] == design]
        for axes, y in zip(column, ("agreement", "risk_lost"), strict=True):
            lines(axes, part, x="kept", y=y, by="method", styles=RANKINGS)
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


def fit_rows(setting: Setting[Sizes], job: Job) -> Table:
    """Per problem and number of kept weights: the excess risk (w - w*)'Sigma (w - w*) / 2 of every fit, exactly."""
    seeds, table = job.seeds(setting.seeds), []
    examples = [example(seed, 0.7, scales=False) for seed in seeds]
    for number, k in enumerate(COUNTS):
        for method, weights in fits([part.problem for part in examples], k, steps=setting.options.steps).items():
            for seed, part, w in zip(seeds, examples, weights, strict=True):
                off = w - part.weights
                excess = float(off @ part.covariance @ off) / 2
                table.append({"method": method, "kept": k, "seed": seed, "excess_risk": excess})
        job.progress("regression", number + 1, len(COUNTS), {})
    return table


def fits(problems: list[Problem], k: int, *, steps: int) -> dict[str, Tensor]:
    """The weights of every method with k of them kept, a row per problem."""
    p = stacked(problems)
    shrunk = torch.stack([lasso_of_size(problem, k) for problem in problems])
    return {
        "best subset": refit(p, torch.stack([best_subset(problem, k) for problem in problems])),
        "pft": refit(p, top(pft_keep_prob(p, k, steps=steps), k)),
        "lasso": shrunk,
        "lasso, refitted": refit(p, shrunk != 0),
        "dropout": refit(p, top(dropout_weights(p, torch.full_like(p.alignment, k / WEIGHTS)).abs(), k)),
        "magnitude": refit(p, top(linear.least_squares(p).abs(), k)),
    }


def fit_numbers(rows: Table) -> dict[str, float]:
    """The mean excess risk of every method."""
    return {f"mean excess risk, {method}": mean for (method,), mean in means(rows, "excess_risk", "method").items()}


def refit(p: Problem, mask: Tensor) -> Tensor:
    """Least squares on the kept features, zero elsewhere."""
    m = mask.double()
    system = m[..., None] * p.covariance * m[..., None, :] + torch.diag_embed(1 - m)
    return m * torch.linalg.solve(system, (m * p.alignment)[..., None])[..., 0]


def dropout_weights(p: Problem, keep_prob: Tensor) -> Tensor:
    """argmin over w of the Gibbs risk at lam > 0: Sigma (lam * w) + (1 - lam) * diag(Sigma) * w = A."""
    variances = p.covariance.diagonal(dim1=-2, dim2=-1)
    system = p.covariance * keep_prob[..., None, :] + torch.diag_embed((1 - keep_prob) * variances)
    return torch.linalg.solve(system, p.alignment[..., None])[..., 0]


def pft_keep_prob(p: Problem, k: int, *, steps: int) -> Tensor:
    """PFT without sampling: descent in keep_prob on the exact Gibbs risk, weights refitted to every keep_prob.

    The mean keep_prob falls from 1 to k / D over the first 80 % of the steps, as in pft's recipe "coupled".
    """
    lam, sparsity = torch.ones_like(p.alignment), 1 - k / WEIGHTS
    lr = 0.1 / steepest(p, linear.least_squares(p))
    for step in range(steps):
        density = 1 - sparsity * (1 - (1 - min(1.0, (step + 1) / (0.8 * steps))) ** 3)
        gradient = linear.keep_prob_gradient(p, dropout_weights(p, lam), lam)
        lam = masks.project([lam - lr * gradient], density, eta=1e-3, members=True)[0]
    return lam


def best_subset(p: Problem, k: int) -> Tensor:
    """The mask of the k features with the least risk after refitting: all are tried. Risk = (power - A'w) / 2."""
    chosen = torch.tensor(list(combinations(range(len(p.alignment)), k)))
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


def lasso_of_size(p: Problem, k: int) -> Tensor:
    """The lasso at the last penalty of a falling grid before it keeps more than k weights."""
    penalty = float(p.alignment.abs().max())
    best = w = torch.zeros_like(p.alignment)
    while (w != 0).sum() <= k and penalty > 1e-4 * float(p.alignment.abs().max()):
        best, penalty = w, penalty * 0.95
        w = lasso(p, penalty, start=w, tolerance=1e-7)
    return w if (w != 0).sum() <= k else best


def paint_fits(canvas: Any, rows: Table) -> None:
    """Excess risk against the number of weights."""
    canvas.set_size_inches(7.6, 4.0)
    axes = canvas.subplots()
    lines(axes, rows, x="kept", y="excess_risk", by="method", styles=FITS)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"weights kept, of {WEIGHTS}")
    axes.set_ylabel("excess risk on new data\n(half the squared error)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    title(canvas, f"Sparse regression from {EXAMPLES} examples", "features, weights, noise")
