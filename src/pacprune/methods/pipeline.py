"""The three procedures from end to end: one-shot pruning, probabilistic fine-tuning, PAC-Bayes pruning.

Each is written for one model, as a generator that yields the stages it wants trained. Alone, its stages are trained one
by one; `together` runs many of them side by side, and stages that are alike are trained as one population.
"""

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import kernels
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import certify, check_declared
from pacprune.data.batches import per_epoch
from pacprune.data.splits import Split, check_split
from pacprune.distributed import sharded
from pacprune.masking import criteria, masks, patterns, weights
from pacprune.masking.attachment import attach, final_mask, harden, read, set_logits_
from pacprune.masking.criteria import magnitude, score
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, log_scores, score_monotone
from pacprune.training.budget import Budget, keep_means_
from pacprune.training.checkpoint import kept
from pacprune.training.config import Config
from pacprune.training.crew import check
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit, fit_posterior
from pacprune.training.loop import check_rates, in_step
from pacprune.training.population import alike, per_member
from pacprune.types import Data, History, Loss, Progress

_P = ParamSpec("_P")
_R = TypeVar("_R")

COUPLING = 4.0
"""How strongly a gate's logit follows log|w| in the default recipe of pft."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """A sparse network: the trained plain model, its mask (exactly k weights kept), and one history row per epoch.

    With a `pattern`, mask and model have been checked to follow it.
    """

    model: nn.Module
    mask: Mapping[str, Tensor]
    history: History
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            plain = weights.prunable(self.model)
            for name, keep in self.mask.items():
                for tensor in (keep, plain[name]):
                    patterns.check(tensor, *patterns.parse(self.pattern), name=name)

    @property
    def sparsity(self) -> float:
        """The counted fraction of zeros."""
        return weights.sparsity(self.model)


@dataclass(frozen=True, eq=False)
class Certified:
    """A sparse random network with its certificate: the attached model, P, Q and the certificate of Q."""

    model: nn.Module
    prior: SpikeSlab
    posterior: SpikeSlab
    certificate: Certificate
    history: History


_OPTIONAL = ("budget", "prior", "folder")


@dataclass(frozen=True, eq=False)
class _Stage:
    """A stage that a pipeline wants trained: `fit`, or with a prior `fit_posterior`."""

    model: nn.Module
    data: Any
    config: Config
    seed: int
    budget: Budget | None
    prior: SpikeSlab | None
    folder: Path | None
    options: Mapping[str, Any]
    """What the members of a population must have in common: the stage's name, loss, delta, ..."""

    def train_with(self, others: Sequence["_Stage"]) -> list[History]:
        """Trains this stage and others like it, as one population when there are any; one history each."""
        every = [self, *others]
        path = None if self.folder is None else self.folder / f"{self.options['stage']}.pt"
        one = [stage.model for stage in every], [stage.config for stage in every]
        budgets = None if self.budget is None else [stage.budget for stage in every]
        more = {"budget": budgets, "seed": [stage.seed for stage in every]}
        if not others:
            one, more = (one[0][0], one[1][0]), {"budget": self.budget, "seed": self.seed}
        if self.prior is None:
            history = fit(one[0], self.data, one[1], checkpoint=path, **more, **self.options)
        else:
            priors = [stage.prior for stage in every] if others else self.prior
            out = [stage.folder for stage in every] if others else self.folder
            history = fit_posterior(one[0], priors, self.data, one[1], out=out, checkpoint=path, **more, **self.options)
        if not others:
            return [history]
        found: list[History] = [[] for _ in every]
        for row in history:
            found[row.pop("member")].append(row)
        return found

    def like(self, other: "_Stage") -> bool:
        """Whether the two can be trained as one population."""
        given = [(a is None) == (b is None) for a, b in ((getattr(self, n), getattr(other, n)) for n in _OPTIONAL)]
        same = self.data is other.data and self.options == other.options and all(given)
        if self.budget is not None and other.budget is not None:
            same = same and self.budget.control == other.budget.control  # all are held in one pass
        return same and in_step(self.config, other.config) and alike(self.model, other.model)


Pipeline = Generator[_Stage, History, _R]


def _drive(pipelines: list[Pipeline[_R]]) -> list[_R]:
    """Runs pipelines side by side to their ends: the first one's stage, and all that wait for one like it, go next."""
    results: dict[int, _R] = {}
    waiting: dict[int, _Stage] = {}

    def go_on(k: int, history: History | None) -> None:
        try:
            waiting[k] = next(pipelines[k]) if history is None else pipelines[k].send(history)
        except StopIteration as end:
            results[k] = end.value

    for k in range(len(pipelines)):
        go_on(k, None)
    while waiting:
        first = min(waiting)
        group = [first, *(k for k in waiting if k != first and waiting[first].like(waiting[k]))]
        stages = [waiting.pop(k) for k in group]
        for k, history in zip(group, stages[0].train_with(stages[1:]), strict=True):
            go_on(k, history)
    return [results[k] for k in range(len(pipelines))]


def pipeline(steps: Callable[_P, Pipeline[_R]]) -> Callable[_P, _R]:
    """The function that runs one pipeline alone."""
    steps.__annotations__["return"] = get_args(steps.__annotations__["return"])[-1]  # what help() is to say of `alone`

    @functools.wraps(steps)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return _drive([steps(*args, **kwargs)])[0]

    return alone


def together(verb: Callable[..., _R], models: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[_R]:
    """Any of the pipelines for K models at once: stages that are alike are trained as one population.

    Every argument is one for all, or a list with one entry per model; each result is what the verb alone would give, up
    to rounding. One `folder` gets a folder for every model, 0, 1, ...; a population's checkpoints lie in that of its
    first member.

        pp.together(pp.pft, models, (x, y), pp.Config(epochs=20), sparsity=[.9, .95, .98], seed=0)
    """
    given = dict(zip(list(inspect.signature(verb).parameters)[1:], args, strict=False)) | kwargs
    each = {
        name: per_member(name, value, len(models)) if isinstance(value, list) else [value] * len(models)
        for name, value in given.items()
    }
    if len(models) > 1 and isinstance(given.get("folder"), (str, Path)):
        each["folder"] = [Path(given["folder"]) / str(k) for k in range(len(models))]
    steps = getattr(verb, "__wrapped__", None)
    if steps is None:
        raise ValueError(
            f"{getattr(verb, '__name__', verb)} is not a pipeline such as pp.osp, pp.pft or pp.pbp; "
            "pp.fit and pp.fit_posterior take a list of models themselves"
        )
    return _drive([steps(model, **{n: v[k] for n, v in each.items()}) for k, model in enumerate(models)])


@pipeline
def osp(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    criterion: str = "magnitude",
    dense: Config | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """One-shot pruning, in place: [dense] -> scores -> top-k, or the `pattern` "2:4" or "1:4" -> sparse fine-tuning."""
    sparsity = check_request(model, sparsity, criterion, pattern)
    stage = stages(model, data, loss, seed, folder, progress)
    magnitude_mask(
        model, sparsity, prunable, min_per_layer, pattern=pattern, scope=scope
    )  # refuses what no mask can be
    history = (yield stage("dense", dense)) if dense else []
    found = score(criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    how = {"pattern": pattern, "scope": scope, "min_per_layer": min_per_layer, "total": weights.total(model)}
    mask = masks.top_k(found, sparsity=sparsity, **how)
    weights.apply_mask(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, config, stage)), pattern)


@pipeline
def pft(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    criterion: str = "magnitude",
    recipe: str = "coupled",
    mask_share: float = 0.5,
    eps: float = 1e-4,
    noise: bool = True,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Probabilistic fine-tuning, in place: [dense] -> train weights and keep_prob -> top-k -> sparse fine-tuning.

    `config` is the whole budget after dense training: its first `mask_share` trains the masks, the rest fine-tunes, on
    one learning-rate schedule, so that osp with the same config is the fair comparison. recipe "coupled" (the default)
    ties each gate to its weight's magnitude, holds the mean keep_prob to a budget that falls to 1 - sparsity,
    and hardens the gates, while what another criterion said at the start fades; a gate_lr that is not given
    is smaller where the mask stage is long (`Config.paced`); "paper" is the paper's: block-isotropic start with `eps`,
    clamped probabilities, no budget. An untrained model gives PFT at initialisation; lr = 0 with mask_share = 1 and a
    gate_lr (say 20 for "coupled", 0.5 for "paper") gives strong lottery tickets. Without `noise` the relaxed gates are
    not sampled but sigmoid(logit / beta), to see what sampling is worth. With a `pattern`, "2:4" or "1:4", every group
    of weights has one gate, a choice of so many out of 4 that is relaxed by Gumbel-softmax and hardened like the
    others, and the likeliest choice is kept; the pattern holds from the start, in place of the falling budget.
    """
    sparsity = check_request(model, sparsity, criterion, pattern)
    if recipe not in ("coupled", "paper"):
        raise ValueError(f"recipe {recipe!r} is unknown; use 'coupled' or 'paper'")
    if pattern is not None and (recipe == "paper" or config.samples):
        raise ValueError(
            f"the pattern {pattern} is learned by relaxed gates of the recipe 'coupled', not by recipe={recipe!r} with "
            f"samples={config.samples}; use recipe='coupled' and samples=0"
        )
    check_rates(config)
    first, second = split_epochs(config, mask_share)
    stage = stages(model, data, loss, seed, folder, progress)
    biggest = magnitude_mask(model, sparsity, prunable, min_per_layer, pattern=pattern)  # refuses what no mask can be
    if pattern is not None:  # of all D weights, some of which `prunable` may leave out
        sparsity = masks.sparsity(biggest, total=weights.total(model))
    history = (yield stage("dense", dense)) if dense else []
    scored = functools.partial(score, criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    found = kept(folder, f"{criterion} {seed} {getattr(loss, '__qualname__', loss)}", model, data, scored)
    estimator = kernels.SOFT if noise else kernels.NOISELESS
    if recipe == "coupled":
        first = first.paced(first.epochs * per_epoch(data, first.batch_size))
        slab = score_monotone(model, found, sparsity=sparsity)
        attach(model, slab, mapping=pattern or "sigmoid", coupling=COUPLING, estimator=estimator, seed=seed)
        # keep_prob alone would not tell the smallest scores apart.
        set_logits_(model, {name: COUPLING * s for name, s in log_scores(found).items()})
        control, schedule = ("none", "fixed") if pattern else ("shift", "cubic")
        # Magnitude is what the coupling says for itself; another criterion's say has faded when the budget has fallen.
        budget = Budget(sparsity, control=control, schedule=schedule, sharpen=4.0, fade=criterion != "magnitude")
    else:
        start = masks.top_k(found, sparsity=sparsity, total=weights.total(model))
        attach(model, block_isotropic(model, start, eps=eps), mapping="clamp", estimator=estimator, seed=seed)
        budget = None
    history += yield stage("masks", first, budget)
    mask = final_mask(model, sparsity=sparsity, min_per_layer=min_per_layer)
    harden(model, mask)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, second, stage)), pattern)


@pipeline
def pbp(
    model: nn.Module,
    split: Split,
    config: Config,
    *,
    sparsity: float,
    criterion: str = "magnitude",
    posterior: Config | None = None,
    dense: Config | None = None,
    data: Data | None = None,
    eps: float = 1e-4,
    std: float = 2e-3,
    train_std: bool = False,
    delta: float = 0.05,
    objective: str = "seeger",
    family: str = "seeger",
    expected_risk: float | None = None,
    grid: int = 1,
    method: str = "betting",
    draws: int = 20_000,
    tolerance: float | None = None,
    name: str | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Certified]:
    """PAC-Bayes pruning, in place: [dense] and `config` train the prior on S_P, `posterior` trains Q on the bound.

    P is the block-isotropic spike and slab around the criterion's mask, trained on split.prior (or on `data`, an
    augmented form of it) with its mean keep_prob held at 1 - sparsity, and written down before split.bound is read.
    Where gate_lr is None the gates stay as they are and the weights outside the mask have mean 0: of a network that
    pft has pruned on split.prior, P is then a small cloud around it. The certificate holds with probability 1 - delta;
    `family` is the bound that it claims, Catoni's for an `expected_risk`, if that is given; `grid` is the number of
    priors, fixed in advance, of which this is one.
    """
    check_request(model, sparsity, criterion)
    sharded.refuse(model.parameters(), "a certificate", "use pp.pft")
    check_declared(family, method, expected_risk)
    check_split(split)
    last = config if posterior is None else posterior
    for one in (config, last):
        check_rates(one)
    stage = stages(model, split.prior if data is None else data, F.cross_entropy, seed, folder, progress)
    history = (yield stage("dense", dense)) if dense else []
    mask = masks.top_k(score(criterion, model, split.prior, seed=seed), sparsity=sparsity)
    attach(model, block_isotropic(model, mask, eps=eps, std=std), train_std=train_std, seed=seed)
    history += yield stage("prior", config, None if config.gate_lr is None else Budget(sparsity))
    fixed = mask if config.gate_lr is None else {}
    keep_means_(model, fixed)
    reestimate_batchnorm(model, split.prior)
    prior, budget = read(model), None if last.gate_lr is None else Budget(sparsity)
    options = {"stage": "posterior", "delta": delta, "objective": objective, "progress": progress}
    where = None if folder is None else Path(folder)
    history += yield _Stage(model, split, last, seed, budget, prior, where, options)
    keep_means_(model, fixed if last.gate_lr is None else {})
    sampling = {"method": method, "draws": draws, "tolerance": tolerance, "progress": progress}
    claim = {"family": family, "expected_risk": expected_risk, "grid": grid, "name": name}
    certificate = certify(model, prior, split, delta=delta, **claim, **sampling)
    return Certified(model, prior, read(model), certificate, history)


def magnitude_mask(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, **how: Any
) -> dict[str, Tensor]:
    """The mask of the largest weights; `how` goes to top_k."""
    found, how = magnitude(model, prunable=prunable), {"min_per_layer": min_per_layer, **how}
    return masks.top_k(found, sparsity=sparsity, total=weights.total(model), **how)


def split_epochs(config: Config, mask_share: float) -> tuple[Config, Config]:
    """One budget as two stages on one learning-rate schedule: the masks' share of the epochs, and what is left."""
    if not 0 < mask_share <= 1:
        raise ValueError(
            f"mask_share is {mask_share}; it must lie in (0, 1]: the share of the epochs that trains the masks"
        )
    epochs = max(1, round(config.epochs * mask_share)) if config.epochs else 0
    share = epochs / config.epochs if config.epochs else 1.0
    cut = min(config.span[1], config.span[0] + (config.span[1] - config.span[0]) * share)  # rounding may go beyond
    first = replace(config, epochs=epochs, span=(config.span[0], cut))
    return first, replace(config, epochs=config.epochs - epochs, span=(cut, config.span[1]), warmup=0.0)


def check_request(
    model: nn.Module, sparsity: float | None, criterion: str = "magnitude", pattern: str | None = None
) -> float:
    """Refuses before anything is trained what would be refused after it; returns the sparsity asked for."""
    plain = weights.prunable(model)
    criteria.check(criterion, model)
    if pattern is not None:
        sharded.refuse(plain.values(), f"the pattern {pattern}", "give a sparsity")
    return masks.asked_sparsity(sparsity, pattern)


def stages(
    model: nn.Module, data: Data, loss: Loss, seed: int, folder: str | Path | None, progress: Progress | None
) -> Callable[..., _Stage]:
    """A maker of stages with everything bound that those of one pipeline share; each has its own checkpoint."""
    check(model, data, loss)

    def stage(name: str, config: Config, budget: Budget | None = None) -> _Stage:
        options = {"stage": name, "loss": loss, "progress": progress}
        return _Stage(model, data, config, seed, budget, None, None if folder is None else Path(folder), options)

    return stage


def fine_tune(model: nn.Module, data: Data, config: Config, stage: Callable[..., _Stage]) -> Pipeline[History]:
    """Sparse fine-tuning; without epochs, BatchNorm at least learns the statistics of the pruned network."""
    if config.epochs:
        return (yield stage("tune", config))
    reestimate_batchnorm(model, data)
    return []
