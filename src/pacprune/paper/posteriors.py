"""What a posterior earns: how much lower its bound is than that of Q = P, by what Q may move and how it is trained.

All examples come from the first 40 % of a data set's permutation, which lies in the prior part of every certificate of
results/grid.toml: what is seen here may shape a grid. Bounds are taken at estimated risks, as if endlessly many
networks were drawn, so that they compare posteriors and not Monte-Carlo steps; they are no certificates.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.certification import drawn_networks
from pacprune.data.splits import Part, Split
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, draw_weights, kl
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Pruned, together
from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, dense_networks, in_entries, in_steps
from pacprune.paper.statistics import Interval, groups, interval
from pacprune.runs import plots
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

FIRST = 0.4
"""The share of the permutation that is used."""
GAMMA = 0.5
"""How much of Q1's risk Q2 is compared with."""
DELTA = 0.05
GATES = {"sigmoid": (10.0, "shift"), "clamp": (0.1, "projection")}
"""By mapping: gate_lr / lr, since a logit has farther to go than a probability, and how the density is held."""
COLUMNS = (
    *("dataset", "model", "alpha", "std", "n", "way", "seed", "prior_risk", "gibbs_risk", "kl", "bound", "excess"),
    *("q_equals_p", "held_out"),
)


class Way(NamedTuple):
    """What Q may move and what it is trained on.

    Args:
        gates: The mapping of gates that are trained; None trains none.
        std: Whether the widths are trained.
        everything: Whether Q is trained on the prior part as well.
        objective: The bound that Q is trained on.
        kl_weight: What the KL is multiplied by in training.
    """

    gates: str | None = None
    std: bool = False
    everything: bool = False
    objective: str = "seeger"
    kl_weight: float = 1.0


WAYS = {
    "means": Way(),
    "means and gates": Way(gates="sigmoid"),
    "means and clamped gates": Way(gates="clamp"),
    "means and std": Way(std=True),
    "means, the paper's bound": Way(objective="paper"),
    "means, on all of S": Way(everything=True),
    "means, KL times 3": Way(kl_weight=3.0),
    "means, KL times 0.3": Way(kl_weight=0.3),
    "means, KL times 0.1": Way(kl_weight=0.1),
}
RECURSIVE = "means, twice (recursive)"


@dataclass(frozen=True)
class Steps:
    """Widths of P, and the steps of stages 1 and 2, and of stage 3, the same for all alphas."""

    stds: tuple[float, ...] = in_entries((0.02,))
    steps: int = 400
    late_steps: int = 400


_EARLY = Config(lr=0.05, schedule="cosine", warmup=0.05, clip=1.0)
_GREY = Setting(
    data="mnist",
    model="lenet5",
    alphas=(0.001, 0.01, 0.1, 0.5),
    sparsities=(0.9,),
    seeds=3,
    dense=_EARLY,
    pruning=_EARLY,
    prior=replace(_EARLY, lr=0.025, gate_lr=None),
    posterior=Config(lr=0.1, schedule="cosine", clip=1.0, gate_lr=None),
    amp=False,
    eps=1e-5,
    draws=5,
    options=Steps(),
)
_LONG = _GREY.changed(stds=(0.02, 0.05), seeds=5, steps=3000, late_steps=4000, draws=20)
SETTINGS: dict[str, tuple[Setting[Steps], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits", model="mlp", alphas=(0.2,), stds=(0.05,), seeds=2, steps=30, late_steps=20, draws=3
        ),
    ),
    "reduced": (_GREY, _GREY.changed(data="fashion-mnist")),
    "full": (_LONG, _LONG.changed(data="fashion-mnist")),
}


class Entry(NamedTuple):
    """One posterior."""

    alpha: float
    std: float
    way: str
    seed: int


def figures(setting: Setting[Steps], job: Job) -> Iterator[Figure]:
    """What every posterior earns, and its mean."""
    yield Figure(
        f"posteriors-{setting.name}",
        f"{painting.network(setting)}, {setting.sparsities[0]:.0%} pruned: bounds at delta = {DELTA:g} and at "
        f"estimated risks, from the first {FIRST:.0%} of the training set; mean and 95 % interval over "
        f"{setting.seeds} seeds (weights, data order and draws are random, the split is not).",
        lambda: rows(setting, job),
        paint,
        lambda rows: numbers(setting, rows),
    )


def numbers(setting: Setting[Steps], rows: Table) -> dict[str, float]:
    """The mean over seeds of what every posterior earns."""
    return {
        f"{setting.name}, alpha {alpha:g}, std {std:g}, {way}: earned": interval(
            [row["q_equals_p"] - row["bound"] for row in cell]
        ).mean
        for (alpha, std, way), cell in groups(rows, "alpha", "std", "way").items()
    }


def rows(setting: Setting[Steps], job: Job) -> Table:
    """One row per alpha, std, way and seed, the seeds trained as a population; an interrupted run keeps its alphas."""
    base = data.load(setting.data, prior_fraction=FIRST, seed=0, data_dir=job.data_dir)
    entries = [
        Entry(alpha, std, way, seed)
        for alpha in setting.alphas
        for std in setting.options.stds
        for way in (*WAYS, RECURSIVE)
        for seed in job.seeds(setting.seeds)
    ]
    table = compute_rows(
        entries,
        lambda portion: _alpha_rows(setting, portion, base, job),
        path=job.out / f"posteriors-{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry.alpha,
    )
    common = {"dataset": setting.data, "model": setting.model}
    return [{name: (common | row)[name] for name in COLUMNS} for row in table]


def _alpha_rows(setting: Setting[Steps], entries: list[Entry], base: Split, job: Job) -> Table:
    """All posteriors of one alpha, in the order of the entries."""
    (alpha,) = {entry.alpha for entry in entries}
    part, common = base.prior, {"seed": job.seeds(setting.seeds), "progress": job.progress}
    split = data.split(part.x, part.y, prior_fraction=alpha, seed=job.seed, dataset=setting.data)
    size, steps = len(split.prior), setting.options.steps
    dense = dense_networks(
        replace(setting, dense=in_steps(setting.dense, steps, size)),
        lambda seed: models.build(setting.model, base, seed=seed),
        split.prior,
        job,
        name=f"dense-{alpha:g}",
    )
    pruning, sparsity = in_steps(setting.pruning, steps, size), setting.sparsities[0]
    pruned = together(pft, list(dense.values()), split.prior, pruning, sparsity=sparsity, recipe="coupled", **common)
    results: dict[Entry, dict[str, Any]] = {}
    for std in setting.options.stds:
        nets = _prior_networks(setting, pruned, std, split, common)
        for row in Study(setting, nets, split, common).rows():
            results[Entry(alpha, std, row.pop("way"), row.pop("seed"))] = row
    return [results[entry] for entry in entries]


def _prior_networks(
    setting: Setting[Steps], pruned: list[Pruned], std: float, split: Split, common: dict[str, Any]
) -> list[nn.Module]:
    """Networks that draw from P."""
    nets = [copy.deepcopy(result.model) for result in pruned]
    for net, result, seed in zip(nets, pruned, common["seed"], strict=True):
        attach(net, block_isotropic(net, result.mask, eps=setting.eps, std=std), seed=seed)
    # With noise, so that P is a good random network, and not only a cloud around a good one.
    prior = in_steps(setting.prior, setting.options.steps, len(split.prior))
    fit(nets, split.prior, prior, stage="prior", **common)
    return nets


class Study:
    """All ways from the same priors, which networks that draw from them give."""

    def __init__(self, setting: Setting[Steps], nets: list[nn.Module], split: Split, common: dict[str, Any]) -> None:
        self.setting, self.split, self.common = setting, split, common
        self.priors = [read(net) for net in nets]
        self.plain = [harden(copy.deepcopy(net)) for net in nets]
        self.config = in_steps(setting.posterior, setting.options.late_steps, len(split.bound))
        pairs = list(zip(self.plain, self.priors, strict=True))
        self.prior_risks = [float(_errors(net, p, split.bound, setting.draws).mean()) for net, p in pairs]
        self.thresholded = [drawn_networks.errors(net, drawn_networks.thresholded(p), split.bound) for net, p in pairs]
        """Per network and example, whether the network that keeps the likeliest weights errs."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per way and seed."""
        for name, way in WAYS.items():
            for k, net in enumerate(self._posteriors(way)):
                yield self._row(k, name, *self._bounds(k, read(net)))
        for k, (risk, nats, bound) in enumerate(self._recursive()):
            yield self._row(k, RECURSIVE, risk, nats, bound, None)

    def _row(self, k: int, way: str, risk: float, nats: float, bound: float, excess: float | None) -> dict[str, Any]:
        n, errors = len(self.split.bound), int(self.thresholded[k].sum())
        return {
            "way": way,
            "seed": self.common["seed"][k],
            "n": n,
            "prior_risk": self.prior_risks[k],
            "gibbs_risk": risk,
            "kl": nats,
            "bound": bound,
            "excess": excess,
            "q_equals_p": bounds.seeger(self.prior_risks[k], n=n, kl=0.0, delta=DELTA),
            "held_out": bounds.clopper_pearson(errors, n=n, delta=DELTA),
        }

    def _attached(self, way: Way) -> list[nn.Module]:
        """Networks that draw from P, and may move what the way says."""
        options: dict[str, Any] = {"mapping": way.gates or "sigmoid", "train_std": way.std}
        pairs = zip(self.plain, self.priors, strict=True)
        return [attach(copy.deepcopy(plain), prior, **options) for plain, prior in pairs]

    def _posteriors(self, way: Way) -> list[nn.Module]:
        """Networks that draw from Q, trained in this way."""
        nets, split = self._attached(way), self.split
        config, budget = self.config, None
        if way.gates:
            ratio, control = GATES[way.gates]
            config = replace(config, gate_lr=ratio * config.lr)
            budget = Budget(self.setting.sparsities[0], control=control)
        part = _union(split.prior, split.bound) if way.everything else None
        options: dict[str, Any] = {"objective": way.objective, "kl_weight": way.kl_weight}
        fit_posterior(nets, self.priors, split, config, data=part, budget=budget, **options, **self.common)
        return nets

    def _bounds(self, k: int, q: SpikeSlab) -> tuple[float, float, float, float]:
        """Risk, nats, bound and excess-loss bound of Q."""
        n, wrong = len(self.split.bound), self.thresholded[k]
        errors, nats = _errors(self.plain[k], q, self.split.bound, self.setting.draws), float(kl(q, self.priors[k]))
        risk = float(errors.mean())
        excess = bounds.excess_loss(
            reference_errors=int(wrong.sum()),
            plus=float((errors * ~wrong).mean()),
            minus=float(((1 - errors) * wrong).mean()),
            n=n,
            kl=nats,
            delta_reference=DELTA / 2,
            delta=DELTA / 2,
        )
        return risk, nats, bounds.seeger(risk, n=n, kl=nats, delta=DELTA), excess

    def _recursive(self) -> Iterator[tuple[float, float, float]]:
        """Risk, nats and bound of Q2: Q1 learns from half of the bound set, and is the prior of Q2 on the rest."""
        nets, split, draws = self._attached(Way()), self.split, self.setting.draws
        half, n = len(split.bound) // 2, len(split.bound)
        early, late = (split.bound.subset(torch.arange(*ends)) for ends in ((0, half), (half, n)))
        # As many steps in all as the other ways have.
        fit_posterior(nets, self.priors, split, self.config, data=early, **self.common)
        middle = [read(net) for net in nets]
        fit_posterior(nets, middle, _resplit(_union(split.prior, early), late), self.config, **self.common)
        for net, p, q1, plain in zip(nets, self.priors, middle, self.plain, strict=True):
            q2 = read(net)
            first = float(_errors(plain, q1, split.bound, draws).mean())
            b = _errors(plain, q1, late, draws)
            a = _errors(plain, q2, late, draws).roll(1, 0)  # of another draw than the one it is compared with
            nats = (float(kl(q1, p)), float(kl(q2, q1)))
            parts = (float((1 - (1 - a) * b).mean()), float(a.mean()), float((a * (1 - b)).mean()))
            yield float(a.mean()), sum(nats), recursive(first, parts, n=(n, len(late)), kl=nats)


def recursive(
    first: float,
    parts: tuple[float, float, float],
    *,
    n: tuple[int, int],
    kl: tuple[float, float],
    delta: float = DELTA,
) -> float:
    """Bound on the Gibbs risk of Q2, whose prior Q1 has learned from part of the examples.

    With h from Q2, h' from Q1 and g = GAMMA, F = 1[h wrong] - g 1[h' wrong] takes the values -g, 0, 1 - g and 1, so

        R(Q2) = g R(Q1) - g + g Pr[F >= 0] + (1 - g) Pr[F >= 1 - g] + g Pr[F >= 1].

    R(Q1), whose prior P is free of all n[0] examples, is bounded by Seeger's inequality with `first` and KL(Q1 || P);
    the three probabilities, with empirical means `parts` on the n[1] examples that Q1 has not seen, each by kl_inverse
    with KL(Q2 || Q1). delta is spent in halves, the second in thirds. (Recursive PAC-Bayes: Wu, Zhang,
    Chérief-Abdellatif and Seldin 2024.)
    """
    before = bounds.seeger(first, n=n[0], kl=kl[0], delta=delta / 2)
    c = bounds.complexity(n[1], kl[1], delta / 6)
    low, middle, high = (bounds.kl_inverse(part, c) for part in parts)
    return min(1.0, GAMMA * before - GAMMA + GAMMA * low + (1 - GAMMA) * middle + GAMMA * high)


def _union(part: Part, addition: Part) -> Part:
    """Both parts as one, with the name of the first."""
    raw = None if part.raw is None or addition.raw is None else torch.cat([part.raw, addition.raw])
    x, y = torch.cat([part.x, addition.x]), torch.cat([part.y, addition.y])
    return Part(part.name, x, y, torch.cat([part.index, addition.index]), part.source, raw)


def _resplit(prior: Part, bound: Part) -> Split:
    """A split with these two parts."""
    cut, size = len(prior), len(prior) + len(bound)
    return data.split(
        torch.cat([prior.x, bound.x]),
        torch.cat([prior.y, bound.y]),
        indices=(torch.arange(cut), torch.arange(cut, size)),
        standardise=False,
        split_declared_random=True,
    )


def _errors(plain: nn.Module, slab: SpikeSlab, part: Part, draws: int) -> Tensor:
    """[draws, examples], 1 where a drawn network errs; P and Q are drawn with the same noise."""
    return torch.stack(
        [drawn_networks.errors(plain, draw_weights(slab, seed=0, step=t), part) for t in range(draws)]
    ).double()


def paint(canvas: Any, rows: Table) -> None:
    """A panel per alpha and std: what every way earns over Q = P, and beside it the held-out bound."""
    panels = list(groups(rows, "alpha", "std"))
    cells, ways = groups(rows, "alpha", "std", "way"), list(dict.fromkeys(row["way"] for row in rows))
    canvas.set_size_inches(max(9.0, 3.2 + 2.6 * len(panels)), 4.2)
    for axes, (alpha, std) in zip(canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for place, way in enumerate(ways):
            earned = _points_below(cells[alpha, std, way], "bound")
            axes.plot([earned.low, earned.high], [place, place], color=plots.BLUE, lw=2)
            axes.plot([earned.mean], [place], color=plots.BLUE, marker="o")
        aside = _points_below(cells[alpha, std, ways[0]], "held_out").mean
        axes.axvline(0, color=plots.GREY, lw=1)
        axes.axvline(aside, color=plots.ORANGE, lw=1.5, ls="--", label="held-out")
        axes.set_title(f"alpha {alpha:g}, std {std:g}", loc="left", fontsize=9)
        axes.set_yticks(range(len(ways)), ways, fontsize=8)
        axes.set_xlabel("points below Q = P")
    canvas.axes[0].invert_yaxis()
    canvas.axes[-1].legend(fontsize=8)
    what = f"{painting.subject(rows)}: what a posterior earns"
    plots.title(canvas, f"{what}; 95 % intervals over {painting.seed_count(rows)} seeds", "weights, data order, draws")


def _points_below(rows: Table, bound: str) -> Interval:
    """By how many percentage points a bound is below that of Q = P."""
    return interval([100 * (row["q_equals_p"] - row[bound]) for row in rows])
