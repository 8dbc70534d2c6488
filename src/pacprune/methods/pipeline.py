"""What every method is made of: a pipeline is a generator that yields the stages it wants trained.

A method is written for one model. Alone, its stages are trained one after another; `together` runs many pipelines side
by side, and stages that are alike are trained as one population.
"""

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from torch import Tensor, nn

from pacprune.bounds.numeric import rounded_up
from pacprune.certification.certificate import Certificate
from pacprune.certification.commitment import Commitment
from pacprune.data import trace
from pacprune.distributed import refuse_sharded
from pacprune.masking import criteria, masks, patterns, weights
from pacprune.masking.criteria import Criterion, magnitude
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.training.budget import Budget
from pacprune.training.budget import together as together_
from pacprune.training.checks import in_step, trial_pass
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.population import alike, per_member
from pacprune.training.posterior import fit_posterior
from pacprune.types import Data, History, Loss, Progress

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, eq=False, repr=False)
class Pruned:
    """A sparse network as a method leaves it.

    With a `pattern`, mask and model have been checked to follow it.

    Args:
        model: The trained plain model; its pruned weights are zero.
        mask: True where a weight is kept: exactly k weights.
        history: One row per epoch, over all stages.
        pattern: The N:M pattern that the mask follows, or None.

    Example:
        >>> pp.osp(model, (x, y), pp.Config(epochs=1), sparsity=0.9)
        Pruned(Sequential, sparsity 0.9003, 118 of 1,184 weights kept, loss ... after 1 epoch)
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

    def __repr__(self) -> str:
        total, sparsity = weights.total(self.model), self.sparsity
        kept = total - round(sparsity * total)
        facts = [type(self.model).__name__, f"sparsity {sparsity:.4f}", f"{kept:,} of {total:,} weights kept"]
        return f"Pruned({', '.join(facts + _trained(self.history))})"


@dataclass(frozen=True, eq=False, repr=False)
class Certified:
    """A sparse random network with its certificate, as `pbp` leaves it.

    Args:
        model: The attached model, whose forward pass samples Q.
        prior: P, made before the bound examples were read.
        posterior: Q, which the certificate speaks of.
        outcome: The certificate; or the seals, where it is to be issued under them later.
        history: One row per epoch, over all stages.

    Example:
        >>> pp.pbp(model, split, pp.Config(epochs=1), sparsity=0.9, draws=20)
        Certified(Sequential, expected sparsity 0.9..., 1... of 1,184 weights kept, error at most ... at delta 0.05)
    """

    model: nn.Module
    prior: SpikeSlab
    posterior: SpikeSlab
    outcome: Certificate | Commitment
    history: History

    @property
    def certificate(self) -> Certificate:
        """The bound on the error rate of networks drawn from Q."""
        if isinstance(self.outcome, Commitment):
            raise ValueError(
                "nothing is certified yet: publish the seal, then call pbp again, with a beacon once Q is sealed, too"
            )
        return self.outcome

    def __repr__(self) -> str:
        sparsity, size = self.posterior.sparsity, sum(p.numel() for p in self.posterior.keep_prob.values())
        if isinstance(self.outcome, Certificate):
            bound, delta = rounded_up(self.outcome.bound), self.outcome.ledger.delta
            state = f"error at most {bound} at delta {delta:g}"
        else:
            state = f"sealed {self.outcome.digest[:12]}, not certified yet"
        return (
            f"Certified({type(self.model).__name__}, expected sparsity {sparsity:.4f}, "
            f"{round((1 - sparsity) * size):,} of {size:,} weights kept, {state})"
        )


def _trained(history: History) -> list[str]:
    """The last loss and the number of epochs, in words; nothing where nothing was trained."""
    if not history:
        return []
    return [f"loss {history[-1]['loss']:.4f} after {len(history)} epoch{'s' if len(history) > 1 else ''}"]


@dataclass(frozen=True, eq=False)
class Stage:
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

    def like(self, stage: "Stage") -> bool:
        """Whether the two can be trained as one population."""
        if self.data is not stage.data or self.options != stage.options:
            return False
        if any((getattr(self, name) is None) != (getattr(stage, name) is None) for name in _OPTIONAL):
            return False
        if self.budget is not None and stage.budget is not None and together_(self.budget) != together_(stage.budget):
            return False
        if self.budget is not None and weights.masked_names(self.model) != weights.masked_names(stage.model):
            return False  # a budget moves the masks of all tensors that any member has one of
        return in_step(self.config, stage.config) and alike(self.model, stage.model)


_OPTIONAL = ("budget", "prior", "folder")
Pipeline = Generator[Stage, History, _R]


def _train(stages: Sequence[Stage]) -> list[History]:
    """Trains stages that are alike, several of them as one population; returns one history each."""
    first, alone = stages[0], len(stages) == 1

    def members(name: str) -> Any:
        values = [getattr(stage, name) for stage in stages]
        return values[0] if alone else values

    common = {
        "budget": None if first.budget is None else members("budget"),
        "seed": members("seed"),
        "checkpoint": None if first.folder is None else first.folder / f"{first.options['stage']}.pt",
        **first.options,
    }
    if first.prior is None:
        history = fit(members("model"), first.data, members("config"), **common)
    else:
        folders = members("folder")
        history = fit_posterior(
            members("model"), members("prior"), first.data, members("config"), out=folders, **common
        )
    if alone:
        return [history]
    histories: list[History] = [[] for _ in stages]
    for row in history:
        histories[row.pop("member")].append(row)
    return histories


def _drive(pipelines: list[Pipeline[_R]]) -> list[_R]:
    """Runs pipelines side by side to their ends: the first one's stage, and all that wait for one like it, go next."""
    results: dict[int, _R] = {}
    waiting: dict[int, Stage] = {}

    def resume(k: int, history: History | None) -> None:
        try:
            waiting[k] = next(pipelines[k]) if history is None else pipelines[k].send(history)
        except StopIteration as end:
            results[k] = end.value

    for k in range(len(pipelines)):
        resume(k, None)
    while waiting:
        first = min(waiting)
        group = [first, *(k for k in waiting if k != first and waiting[first].like(waiting[k]))]
        stages = [waiting.pop(k) for k in group]
        for k, history in zip(group, _train(stages), strict=True):
            resume(k, history)
    return [results[k] for k in range(len(pipelines))]


def pipeline(steps: Callable[_P, Pipeline[_R]]) -> Callable[_P, _R]:
    """The function that runs one pipeline alone."""
    steps.__annotations__["return"] = get_args(steps.__annotations__["return"])[-1]  # what help() is to say of `alone`

    @functools.wraps(steps)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return _drive([steps(*args, **kwargs)])[0]

    return alone


def together(verb: Callable[..., _R], models: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[_R]:
    """Runs a method for K models at once: stages that are alike are trained as one population.

    Each result is what the method alone would give, up to rounding.

    Args:
        verb: The method, such as `pp.pft`: the verb of any row of METHODS.
        models: K models; they are pruned in place.
        *args: What the method takes after the model. A list has one entry per model; anything else serves all.
        **kwargs: The method's keywords, by the same rule. One `folder` gets a folder inside it for every model, 0, 1,
            ...; a population's checkpoints lie in that of its first member.

    Returns:
        K results, in the order of the models.

    Raises:
        ValueError: If `verb` is no such method, or a list has not K entries.

    Example:
        >>> models = [pp.models.mlp(64, hidden=[16], seed=k) for k in range(2)]
        >>> results = pp.together(pp.pft, models, (x, y), pp.Config(epochs=2), sparsity=[0.9, 0.95])
        >>> [round(pruned.sparsity, 2) for pruned in results]
        [0.9, 0.95]
    """
    steps = getattr(verb, "__wrapped__", None)
    if not inspect.isgeneratorfunction(steps):
        raise ValueError(
            f"{getattr(verb, '__name__', verb)} is not a pipeline such as pp.osp, pp.pft or pp.pbp; "
            "pp.fit and pp.fit_posterior take a list of models themselves"
        )
    arguments = dict(zip(list(inspect.signature(verb).parameters)[1:], args, strict=False)) | kwargs
    values = {
        name: per_member(name, value, len(models)) if isinstance(value, list) else [value] * len(models)
        for name, value in arguments.items()
    }
    if len(models) > 1 and isinstance(arguments.get("folder"), (str, Path)):
        values["folder"] = [Path(arguments["folder"]) / str(k) for k in range(len(models))]
    return _drive([steps(model, **{name: v[k] for name, v in values.items()}) for k, model in enumerate(models)])


# --- Steps that methods share.


@dataclass(frozen=True, eq=False)
class Request:
    """What a method is asked for where it moves the mask of a plain network step by step, in whatever loop.

    Args:
        sparsity: Fraction to prune, that a mask of these weights can have.
        steps: How many steps the optimiser takes.
        criterion: What ranks the weights.
        scores: Its scores, which are computed when they are asked for.
        mask_share: Share of the steps in which the mask moves; None: what the method has by default.
        gate_lr: Of what is learned beside the weights; "auto": what the method has by default. None learns nothing.
        min_per_layer: Weights that every layer keeps at least.
        pattern: The N:M pattern of the mask, or None.
        prunable: Which weights may be pruned.
    """

    sparsity: float
    steps: int
    criterion: str | Criterion
    scores: Callable[[], Mapping[str, Tensor]]
    mask_share: float | None
    gate_lr: float | str | None
    min_per_layer: int
    pattern: str | None
    prunable: weights.Prunable


@dataclass(frozen=True)
class Start:
    """How a method has begun: what it needs is noted on the model, and a `Stepper` takes it from there.

    Args:
        budget: What the stepper holds; None keeps the mask as it is.
        gate_lr: The learning rate of what is learned beside the weights; None: nothing is.
    """

    budget: Budget | None = None
    gate_lr: float | None = None


def check_request(
    model: nn.Module,
    sparsity: float | None,
    criterion: str | Criterion = "magnitude",
    pattern: str | None = None,
) -> float:
    """Refuses before anything is trained what would be refused after it; returns the sparsity asked for."""
    plain = weights.prunable(model)
    criteria.check(criterion, model)
    if pattern is not None:
        refuse_sharded(plain.values(), "pattern", pattern)
    return masks.asked_sparsity(sparsity, pattern)


def stage_maker(
    model: nn.Module, data: Data, loss: Loss, seed: int, folder: str | Path | None, progress: Progress | None
) -> Callable[..., Stage]:
    """A function (name, config, budget) -> stage, with everything bound that the stages of one pipeline share."""
    trial_pass(model, data, loss)

    def stage(name: str, config: Config, budget: Budget | None = None) -> Stage:
        options = {"stage": name, "loss": loss, "progress": progress}
        return Stage(model, data, config, seed, budget, None, None if folder is None else Path(folder), options)

    return stage


def magnitude_mask(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, **options: Any
) -> dict[str, Tensor]:
    """The mask of the largest weights; `options` go to top_k. Refuses what no mask can be."""
    scores = magnitude(model, prunable=prunable)
    return masks.top_k(
        scores, sparsity=sparsity, total=weights.total(model), **{"min_per_layer": min_per_layer, **options}
    )


def check_reachable(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, **options: Any
) -> None:
    """Refuses, before anything is trained, a sparsity that no mask of these weights can have."""
    magnitude_mask(model, sparsity, prunable, min_per_layer, **options)


def reachable_sparsity(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, pattern: str | None
) -> float:
    """The sparsity that a mask of the largest weights has, found before anything is trained.

    That of a pattern is a share of what `prunable` names, which may be less than all weights.
    """
    mask = magnitude_mask(model, sparsity, prunable, min_per_layer, pattern=pattern)
    return sparsity if pattern is None else masks.sparsity(mask, total=weights.total(model))


def reachable_mask(
    model: nn.Module, sparsity: float, prunable: weights.Prunable, min_per_layer: int, pattern: str | None
) -> dict[str, Tensor]:
    """The mask of the largest weights; on the way to a pattern, at a lower sparsity, those that it drops last."""
    if pattern is None:
        return magnitude_mask(model, sparsity, prunable, min_per_layer)
    order = patterns.protected_scores(magnitude(model, prunable=prunable), pattern)
    return masks.top_k(order, sparsity=sparsity, total=weights.total(model))


def begin_dense(model: nn.Module, prunable: weights.Prunable) -> None:
    """Notes which weights are to be pruned in training: a mask of ones."""
    weights.apply_mask(model, masks.all_kept(prunable(model)))


def pruned(model: nn.Module, data: Data, config: Config, history: History, pattern: str | None = None) -> Pruned:
    """The network as training under a budget has left it, and its mask."""
    if not config.epochs:  # else BatchNorm has seen the pruned network
        reestimate_batchnorm(model, data)
    return as_noted(model, history, pattern)


def as_noted(model: nn.Module, history: History, pattern: str | None) -> Pruned:
    """The network with the mask that is noted on it."""
    mask = {name: keep.clone() for name, keep in (weights.notes(model).mask or {}).items()}
    trace.note(mask, weights.seen(model))
    return Pruned(model, mask, history, pattern)


def check_share(mask_share: float) -> float:
    """Refuses a share of the epochs that is none."""
    if not 0 < mask_share <= 1:
        raise ValueError(
            f"mask_share is {mask_share}; it must lie in (0, 1]: the share of the epochs that trains the masks"
        )
    return mask_share


def split_epochs(config: Config, mask_share: float) -> tuple[Config, Config]:
    """One budget as two stages on one learning-rate schedule: the masks' share of the epochs, and what is left."""
    check_share(mask_share)
    epochs = max(1, round(config.epochs * mask_share)) if config.epochs else 0
    share = epochs / config.epochs if config.epochs else 1.0
    cut = min(config.span[1], config.span[0] + (config.span[1] - config.span[0]) * share)  # rounding may go beyond
    mask_stage = replace(config, epochs=epochs, span=(config.span[0], cut))
    return mask_stage, replace(config, epochs=config.epochs - epochs, span=(cut, config.span[1]), warmup=0.0)


def fine_tune(model: nn.Module, data: Data, config: Config, stage: Callable[..., Stage]) -> Pipeline[History]:
    """Sparse fine-tuning; without epochs, BatchNorm at least learns the statistics of the pruned network."""
    if config.epochs:
        return (yield stage("tune", config))
    reestimate_batchnorm(model, data)
    return []
