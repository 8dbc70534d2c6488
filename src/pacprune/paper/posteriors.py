"""What a posterior earns: how much lower its bound is than that of Q = P, by what Q may move and how it is trained.

All examples come from the first 40 % of a data set's permutation, which lies in the prior part of every certificate of
results/grid.toml: what is seen here may shape a grid. Bounds are taken at estimated risks, as if endlessly many
networks were drawn, so that they compare posteriors and not Monte-Carlo steps; they are no certificates.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.certification import drawn_networks
from pacprune.data.splits import Part, Split
from pacprune.files import write_atomically
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, draw_weights, kl
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import together
from pacprune.paper import frame
from pacprune.paper.frame import Drawn, Job, on_device
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


class Way(NamedTuple):
    """What Q may move and what it is trained on."""

    gates: str | None = None
    """The mapping of gates that are trained."""
    std: bool = False
    everything: bool = False
    """On the prior part as well."""
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
class Setting:
    """A data set and a network; stages are given in steps, the same for all alphas."""

    data: str
    model: str = "lenet5"
    alphas: tuple[float, ...] = (0.001, 0.01, 0.1, 0.5)
    sparsity: float = 0.9
    stds: tuple[float, ...] = (0.02,)
    eps: float = 1e-5
    seeds: int = 3
    steps: int = 400
    late_steps: int = 400
    lr: float = 0.05
    late_lr: float = 0.1
    draws: int = 5

    @property
    def name(self) -> str:
        """What tells this setting from the others."""
        return f"{self.data}-{self.model}"


_GREY = Setting("mnist")
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "smoke": (Setting("digits", "mlp", (0.2,), stds=(0.05,), seeds=2, steps=30, late_steps=20, draws=3),),
    "reduced": (_GREY, replace(_GREY, data="fashion-mnist")),
    "paper": tuple(
        replace(_GREY, data=name, stds=(0.02, 0.05), seeds=5, steps=3000, late_steps=4000, draws=20)
        for name in ("mnist", "fashion-mnist")
    ),
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure per data set, and what every posterior earns on average."""
    drawn, numbers = [], {}
    for setting in job.chosen(SETTINGS[job.scale]):
        caption = (
            f"{setting.data}, {setting.model}, {setting.sparsity:.0%} pruned: bounds at delta = {DELTA:g} and at "
            f"estimated risks, from the first {FIRST:.0%} of the training set; mean and 95 % interval over "
            f"{setting.seeds} seeds (weights, data order and draws are random, the split is not)."
        )
        found = frame.draw(job, f"posteriors-{setting.name}", caption, lambda s=setting: rows(s, job), paint)
        drawn.append(found)
        for (alpha, std, way), own in _cells(found.rows).items():
            earned = frame.interval([row["q_equals_p"] - row["bound"] for row in own]).mean
            numbers[f"{setting.name}, alpha {alpha:g}, std {std:g}, {way}: earned"] = earned
    return drawn, numbers


def rows(setting: Setting, job: Job) -> Table:
    """One row per alpha, std, way and seed, the seeds trained as a population; a broken run keeps whole alphas."""
    base = data.load(setting.data, prior_fraction=FIRST, seed=0, data_dir=job.data_dir)
    path = job.out / f"posteriors-{setting.name}-part.csv"
    found = frame.read(path) if path.is_file() else []
    known = {row["alpha"] for row in found}
    for alpha in setting.alphas:
        if alpha in known:
            continue
        part, seeds = base.prior, job.seeds(setting.seeds)
        split = data.split(part.x, part.y, prior_fraction=alpha, seed=job.seed, dataset=setting.data)
        plain = [models.build(setting.model, base, seed=seed).to(job.device) for seed in seeds]
        given: dict[str, Any] = {"seed": seeds, "progress": job.progress}
        early = _config(setting.steps, len(split.prior), setting.lr, job)
        fit(plain, split.prior, early, stage="dense", **given)
        pruned = together(pft, plain, split.prior, early, sparsity=setting.sparsity, **given)
        for std in setting.stds:
            nets = [copy.deepcopy(one.model) for one in pruned]
            for net, one, seed in zip(nets, pruned, seeds, strict=True):
                attach(net, block_isotropic(net, one.mask, eps=setting.eps, std=std), seed=seed)
            # With noise, so that P is a good random network, and not only a cloud around a good one.
            fit(nets, split.prior, replace(early, gate_lr=None, lr=setting.lr / 2), stage="prior", **given)
            own = {"dataset": setting.data, "model": setting.model, "alpha": alpha, "std": std, "n": len(split.bound)}
            found += [own | row for row in _judged(setting, nets, split, job, given)]
        write_atomically(path, plots.csv_of(found))
    return found


def _judged(setting: Setting, nets: list[nn.Module], split: Split, job: Job, given: dict[str, Any]) -> Table:
    """Every way from the same priors."""
    priors, n, found = [read(net) for net in nets], len(split.bound), []
    late = replace(_config(setting.late_steps, n, setting.late_lr, job), gate_lr=None, warmup=0.0)
    bare = [harden(copy.deepcopy(net)) for net in nets]
    wrong = [_wrong(net, p, split.bound, setting.draws) for net, p in zip(bare, priors, strict=True)]
    kept = [
        drawn_networks.errors(net, drawn_networks.thresholded(p), split.bound)
        for net, p in zip(bare, priors, strict=True)
    ]

    def row(k: int, way: str, risk: float, nats: float, bound: float, excess: float | None = None) -> dict[str, Any]:
        before, errors = float(wrong[k].mean()), int(kept[k].sum())
        return {
            "way": way,
            "seed": given["seed"][k],
            "prior_risk": before,
            "gibbs_risk": risk,
            "kl": nats,
            "bound": bound,
            "excess": excess,
            "q_equals_p": bounds.seeger(before, n=n, kl=0.0, delta=DELTA),
            "held_out": bounds.clopper_pearson(errors, n=n, delta=DELTA),
        }

    for name, way in WAYS.items():
        crowd = [_again(net, p, way) for net, p in zip(bare, priors, strict=True)]
        on = _both(split.prior, split.bound) if way.everything else None
        config, budget = late, None
        if way.gates:
            ratio, control = GATES[way.gates]
            config, budget = replace(late, gate_lr=ratio * late.lr), Budget(setting.sparsity, control=control)
        how: dict[str, Any] = {"objective": way.objective, "kl_weight": way.kl_weight, "data": on, "budget": budget}
        fit_posterior(crowd, priors, split, config, **how, **given)
        for k, net in enumerate(crowd):
            q = read(net)
            errors, nats = _wrong(bare[k], q, split.bound, setting.draws), float(kl(q, priors[k]))
            risk, right = float(errors.mean()), ~kept[k]
            excess = bounds.excess_loss(
                reference_errors=int(kept[k].sum()),
                plus=float((errors * right).mean()),
                minus=float(((1 - errors) * kept[k]).mean()),
                n=n,
                kl=nats,
                delta_reference=DELTA / 2,
                delta=DELTA / 2,
            )
            found.append(row(k, name, risk, nats, bounds.seeger(risk, n=n, kl=nats, delta=DELTA), excess))
    crowd = [_again(net, p, Way()) for net, p in zip(bare, priors, strict=True)]
    for k, (risk, nats, bound) in enumerate(_twice(crowd, priors, bare, split, setting, late, given)):
        found.append(row(k, RECURSIVE, risk, nats, bound))
    return found


def _twice(
    crowd: list[nn.Module],
    priors: Sequence[SpikeSlab],
    bare: Sequence[nn.Module],
    split: Split,
    setting: Setting,
    late: Config,
    given: dict[str, Any],
) -> list[tuple[float, float, float]]:
    """Risk, nats and bound of Q2: Q1 learns from half of the bound set, and is the prior of Q2 on the other half."""
    half, n = len(split.bound) // 2, len(split.bound)
    one, two = (split.bound.subset(torch.arange(*ends)) for ends in ((0, half), (half, n)))
    both = _both(split.prior, one)
    later = data.split(
        torch.cat([both.x, two.x]),
        torch.cat([both.y, two.y]),
        indices=(torch.arange(len(both)), torch.arange(len(both), len(both) + len(two))),
        standardise=False,
        split_declared_random=True,
    )
    # As many steps in all as the other ways have.
    fit_posterior(crowd, priors, split, late, data=one, **given)
    middle = [read(net) for net in crowd]
    fit_posterior(crowd, middle, later, late, **given)
    found = []
    for net, p, q1, plain in zip(crowd, priors, middle, bare, strict=True):
        q2 = read(net)
        first = float(_wrong(plain, q1, split.bound, setting.draws).mean())
        b = _wrong(plain, q1, two, setting.draws)
        a = _wrong(plain, q2, two, setting.draws).roll(1, 0)  # of another draw than the one it is compared with
        nats = (float(kl(q1, p)), float(kl(q2, q1)))
        bound = recursive(
            first,
            (float((1 - (1 - a) * b).mean()), float(a.mean()), float((a * (1 - b)).mean())),
            n=(n, len(two)),
            kl=nats,
        )
        found.append((float(a.mean()), sum(nats), bound))
    return found


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


def _config(steps: int, count: int, lr: float, job: Job) -> Config:
    """Few examples make short epochs, so that every alpha takes as many steps."""
    epochs = max(1, round(steps / math.ceil(count / 128)))
    return on_device(Config(epochs=epochs, lr=lr, schedule="cosine", warmup=0.05, clip=1.0), job)


def _both(one: Part, other: Part) -> Part:
    raw = None if one.raw is None or other.raw is None else torch.cat([one.raw, other.raw])
    index = torch.cat([one.index, other.index])
    return Part(one.name, torch.cat([one.x, other.x]), torch.cat([one.y, other.y]), index, one.source, raw)


def _again(plain: nn.Module, prior: SpikeSlab, way: Way) -> nn.Module:
    """A network that draws from P, and may move what the way says."""
    return attach(copy.deepcopy(plain), prior, mapping=way.gates or "sigmoid", train_std=way.std)


def _wrong(plain: nn.Module, slab: SpikeSlab, part: Part, draws: int) -> Tensor:
    """[draws, examples], 1 where a drawn network errs; P and Q are drawn with the same noise."""
    return torch.stack(
        [drawn_networks.errors(plain, draw_weights(slab, seed=0, step=t), part) for t in range(draws)]
    ).double()


def _cells(found: Table) -> dict[tuple[float, float, str], Table]:
    cells: dict[tuple[float, float, str], Table] = {}
    for row in found:
        cells.setdefault((row["alpha"], row["std"], row["way"]), []).append(row)
    return cells


def paint(canvas: Any, found: Table) -> None:
    """A panel per alpha and std: what every way earns over Q = P, and beside it the held-out bound."""
    panels = list(dict.fromkeys((row["alpha"], row["std"]) for row in found))
    ways = list(dict.fromkeys(row["way"] for row in found))
    canvas.set_size_inches(max(9.0, 3.2 + 2.6 * len(panels)), 4.2)
    cells = _cells(found)
    for axes, (alpha, std) in zip(canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for place, way in enumerate(ways):
            own = cells[alpha, std, way]
            earned = frame.interval([100 * (row["q_equals_p"] - row["bound"]) for row in own])
            axes.plot([earned.low, earned.high], [place, place], color=plots.BLUE, lw=2)
            axes.plot([earned.mean], [place], color=plots.BLUE, marker="o")
        own = cells[alpha, std, ways[0]]
        aside = frame.interval([100 * (row["q_equals_p"] - row["held_out"]) for row in own]).mean
        axes.axvline(0, color=plots.GREY, lw=1)
        axes.axvline(aside, color=plots.ORANGE, lw=1.5, ls="--", label="held-out")
        axes.set_title(f"alpha {alpha:g}, std {std:g}", loc="left", fontsize=9)
        axes.set_yticks(range(len(ways)), ways, fontsize=8)
        axes.set_xlabel("points below Q = P")
    canvas.axes[0].invert_yaxis()
    canvas.axes[-1].legend(fontsize=8)
    seeds = len({row["seed"] for row in found})
    what = f"{found[0]['dataset']}, {found[0]['model']}: what a posterior earns; 95 % intervals over {seeds} seeds"
    plots.title(canvas, what, "weights, data order, draws")
