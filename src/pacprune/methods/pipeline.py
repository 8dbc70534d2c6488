"""What every method is made of: a pipeline is a generator that yields the stages it wants trained.

A method is written for one model. Alone, its stages are trained one after another; `together` runs many pipelines side
by side, and stages that are alike are trained as one population.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.bounds.numeric import rounded_up
from pacprune.certification.certificate import Certificate
from pacprune.certification.commitment import Commitment
from pacprune.data import trace
from pacprune.data.batches import Objective
from pacprune.distributed import refuse_sharded
from pacprune.masking import criteria, masks, patterns, weights
from pacprune.masking.criteria import Criterion, magnitude
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.training.budget import Budget
from pacprune.training.budget import together as together_
from pacprune.training.checks import check_config, in_step, trial_pass
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.population import alike, per_member
from pacprune.training.posterior import fit_posterior
from pacprune.types import Data, Forward, History, Loss, Progress

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

    Its sparsity is of all weights. Where some could not be pruned, selected_sparsity is of those that could.

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
            plain = weights.all_weights(self.model)
            for name, keep in self.mask.items():
                for tensor in (keep, plain[name]):
                    patterns.check(tensor, *patterns.parse(self.pattern), name=name)

    @property
    def sparsity(self) -> float:
        """The fraction of all weights that was pruned; a kept weight that happens to be zero does not count."""
        return masks.sparsity(dict(self.mask), total=weights.total(self.model))

    @property
    def selected_sparsity(self) -> float:
        """The fraction that was pruned of the weights that could be: all, but for what was excluded or frozen."""
        return masks.sparsity(dict(self.mask))

    def __repr__(self) -> str:
        total, sparsity = weights.total(self.model), self.sparsity
        kept, size = total - round(sparsity * total), sum(keep.numel() for keep in self.mask.values())
        facts = [type(self.model).__name__, f"sparsity {sparsity:.4f}", f"{kept:,} of {total:,} weights kept"]
        if size < total:
            facts.append(f"sparsity {self.selected_sparsity:.4f} of the {size:,} selected")
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
    validation: Any = None

    def like(self, stage: "Stage") -> bool:
        """Whether the two can be trained as one population."""
        if self.data is not stage.data or self.validation is not stage.validation or self.options != stage.options:
            return False
        if self.options.get("forward") is not None:  # which calls one model
            return False
        if weights.masked_names(self.model) != weights.masked_names(stage.model):  # a budget holds the same tensors
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
        history = fit(members("model"), first.data, members("config"), validation=first.validation, **common)
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
        return _drive([_started(steps, *args, **kwargs)])[0]

    return alone


def _started(steps: Callable[..., Pipeline[_R]], *args: Any, **kwargs: Any) -> Pipeline[_R]:
    """The pipeline of these arguments, of which those that say how to train are a Config each."""
    signature, method = inspect.signature(steps), steps.__name__
    for name in kwargs:
        near = get_close_matches(name, signature.parameters, n=1)
        if name not in signature.parameters:
            known = f"did you mean {near[0]}?" if near else f"it has {', '.join(signature.parameters)}"
            raise TypeError(f"{method}() has no argument {name}; {known}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{method}(): {error}") from None
    for name in ("config", "dense", "posterior"):
        value = bound.arguments.get(name)
        if name in bound.arguments and value is not bound.signature.parameters[name].default:
            check_config(name, value)
    return steps(*args, **kwargs)


def together(verb: Callable[..., _R], models: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[_R]:
    """Runs a method for K models at once: stages that are alike are trained as one population.

    Each result is what the method alone would give, up to rounding.

    Args:
        verb: The method, such as `pp.pft`: the verb of any row of METHODS.
        models: K models; they are pruned in place.
        *args: What the method takes after the model. A list has one entry per model; anything else serves all. As
            `include` and `exclude`, a list of patterns serves all, and a list of lists has one per model.
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
        name: per_member(name, value, len(models)) if _one_per_model(name, value) else [value] * len(models)
        for name, value in arguments.items()
    }
    if len(models) > 1 and isinstance(arguments.get("folder"), (str, Path)):
        values["folder"] = [Path(arguments["folder"]) / str(k) for k in range(len(models))]
    return _drive(
        [_started(steps, model, **{name: v[k] for name, v in values.items()}) for k, model in enumerate(models)]
    )


def _one_per_model(name: str, value: Any) -> bool:
    """Whether an argument of `together` is a list with one entry per model; a list of patterns is one selection."""
    if name not in ("include", "exclude"):
        return isinstance(value, list)
    return (
        isinstance(value, list) and bool(value) and all(v is None or isinstance(v, list | tuple | set) for v in value)
    )


# --- Steps that methods share.


def check_request(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None,
    criterion: str | Criterion = "magnitude",
    pattern: str | None = None,
    shards: bool = False,
) -> None:
    """Refuses before anything is trained what would be refused after it."""
    plain = weights.all_weights(model)
    criteria.check(criterion, model)
    if pattern is not None and not shards:
        refuse_sharded(plain.values(), "pattern", pattern)
    masks.asked_sparsity(sparsity, pattern)


class Stages:
    """Makes the stages of one pipeline: (name, config, budget) -> stage, with everything bound that they share."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        loss: Loss = F.cross_entropy,
        forward: Forward | None = None,
        validation: Data | None = None,
        seed: int,
        folder: str | Path | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.data, self.validation, self.seed = model, data, validation, seed
        self.objective, self.folder, self.progress = Objective(loss, forward), folder, progress
        trial_pass(model, data, self.objective)

    def __call__(self, name: str, config: Config, budget: Budget | None = None) -> Stage:
        """The stage of this name."""
        if budget is not None and self.validation is not None:
            config = replace(config, patience=0)  # its best epoch may be one before the mask has come to its end
        objective, folder = self.objective, None if self.folder is None else Path(self.folder)
        options = {
            "stage": name,
            "loss": objective.loss,
            "forward": objective.forward,
            "progress": self.progress,
        }
        return Stage(self.model, self.data, config, self.seed, budget, None, folder, options, self.validation)

    def scores(self, criterion: str | Criterion, prunable: weights.Prunable) -> dict[str, Tensor]:
        """What a criterion says of the weights."""
        options = {"loss": self.objective.loss, "forward": self.objective.forward, "seed": self.seed}
        return criteria.score(criterion, self.model, self.data, **options, prunable=prunable)

    def reestimate_batchnorm(self) -> None:
        """BatchNorm learns the statistics of the network as it is now."""
        reestimate_batchnorm(self.model, self.data, forward=self.objective.forward)


@dataclass(frozen=True)
class Plan:
    """What is pruned of a model, and how much.

    Args:
        model: The network.
        prunable: Which weights may be pruned.
        sparsity: The fraction of all D weights to prune; what asks for it may speak of a part of them.
        layers: The sparsity of every tensor, by name, where each has its own; None: one ranking of all.
        min_per_layer: Weights that every tensor keeps at least.
        pattern: The N:M pattern to end in, or None.
        by_row: Whether every row of a tensor keeps the same number.
    """

    model: nn.Module
    prunable: weights.Prunable
    sparsity: float
    layers: Mapping[str, float] | None
    min_per_layer: int
    pattern: str | None
    by_row: bool = False

    @property
    def goal(self) -> float | Mapping[str, float]:
        """The sparsity as `top_k` takes it: one number of all D weights, or one for every tensor."""
        return self.sparsity if self.layers is None else self.layers

    def mask(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mask of the best scores."""
        floor = 0 if self.pattern is not None else self.min_per_layer
        goal = None if self.pattern is not None else self.goal
        total, scope = weights.total(self.model), masks.ROW if self.by_row else "global"
        return masks.top_k(scores, sparsity=goal, pattern=self.pattern, scope=scope, min_per_layer=floor, total=total)

    def magnitude_mask(self) -> dict[str, Tensor]:
        """The mask of the largest weights."""
        return self.mask(magnitude(self.model, prunable=self.prunable))

    def mask_on_the_way(self, share: float) -> dict[str, Tensor]:
        """The mask of the largest weights when the logarithm of the density has come this share of its way.

        On the way to a pattern, at a lower sparsity, those stay that it drops last.
        """
        if share == 1:
            return self.magnitude_mask()
        scores = magnitude(self.model, prunable=self.prunable)
        if self.pattern is not None:
            order = patterns.protected_scores(scores, self.pattern)
            return masks.top_k(order, sparsity=_partly(self.sparsity, share), total=weights.total(self.model))
        layers = None if self.layers is None else {name: _partly(s, share) for name, s in self.layers.items()}
        return replace(self, sparsity=_partly(self.sparsity, share), layers=layers).mask(scores)

    def refuse_rows(self) -> None:
        """Refuses rows of one size where a mask is not ranked but moves in training."""
        if self.by_row:
            raise ValueError(
                "scope='row' is for masks that are ranked anew, as by pp.osp, pp.imp and pp.acdc, but this method "
                "moves its mask tensor by tensor in training; use scope='layer'"
            )

    def budget(self, **options: Any) -> Budget:
        """The budget of a stage that ends with this sparsity."""
        self.refuse_rows()
        return Budget(self.sparsity, layers=self.layers, **options)


def _partly(sparsity: float, share: float) -> float:
    return 1 - (1 - sparsity) ** share


def make_plan(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None,
    *,
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    prunable: weights.Prunable = weights.prunable,
    pattern: str | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
) -> Plan:
    """What a method is to reach; refuses, before anything is trained, what no mask of these weights can have.

    With `include` and `exclude`, with patterns of layers, and of a network with frozen weights, the sparsity is of the
    selected weights. With a `prunable` function alone it is of all weights.
    """
    by_function = counts_all(include=include, exclude=exclude, prunable=prunable)
    chosen = prunable if by_function else weights.select(include=include, exclude=exclude, among=prunable)
    if isinstance(sparsity, Mapping):
        choice = (
            prunable(model) if by_function else weights.choose(model, include=include, exclude=exclude, among=prunable)
        )
        names = masks.layer_sparsities(choice, sparsity)
        weights.refuse_computed(model, names)
        chosen = _only(chosen, names) if by_function else weights.select(include=list(names), among=prunable)
    everything = weights.total(model)
    mask = masks.top_k(
        magnitude(model, prunable=chosen),
        sparsity=sparsity,
        pattern=pattern,
        scope=scope,
        min_per_layer=min_per_layer,
        total=everything if by_function else None,
    )
    size = sum(keep.numel() for keep in mask.values())
    if not masks.kept(mask):
        raise ValueError(
            f"sparsity {masks.asked_sparsity(sparsity, pattern):g} of {size:,} weights keeps none of them; give "
            f"{math.floor(1e4 * (1 - 1 / size)) / 1e4:g} or less"
        )
    layers = None
    if scope != "global" or isinstance(sparsity, Mapping):
        layers = {name: masks.sparsity({name: keep}) for name, keep in mask.items()}
    if pattern is None and layers is None and (by_function or size == everything):
        overall = masks.asked_sparsity(sparsity, pattern)
    else:
        overall = masks.sparsity(mask, total=everything)
    if prunable is weights.prunable and include is None and exclude is None and not isinstance(sparsity, Mapping):
        _warn_of_frozen(masks.asked_sparsity(sparsity, pattern), overall, size, everything)
    refuse_regrowth(model, overall)
    return Plan(model, chosen, overall, layers, min_per_layer, pattern, scope == masks.ROW)


def counts_all(
    *,
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    prunable: weights.Prunable = weights.prunable,
    **_: Any,
) -> bool:
    """Whether the sparsity that is asked for is of all weights: a function alone says which of them are pruned."""
    return prunable is not weights.prunable and include is None and exclude is None


def set_up(arguments: Mapping[str, Any], *, takes_rows: bool = False) -> tuple[Stages, Plan]:
    """What makes a method's stages, and what they are to reach; refuses what cannot be before anything is trained.

    Args:
        arguments: The method's own, `locals()`: whatever methods share has one name in all of them.
        takes_rows: Whether every mask comes from `Plan.mask`, so that rows of one size are possible.
    """

    def named(function: Callable[..., Any]) -> dict[str, Any]:
        return {name: arguments[name] for name in inspect.signature(function).parameters if name in arguments}

    check_request(**named(check_request))
    stages, plan = Stages(**named(Stages)), make_plan(**named(make_plan))
    if not takes_rows:
        plan.refuse_rows()
    criteria.check_weights(arguments.get("criterion", "magnitude"), plan.model, plan.prunable)
    return stages, plan


def refuse_regrowth(model: nn.Module, sparsity: float) -> None:
    """Refuses a lower sparsity than that of the mask the model has: the weights that it lacks are zero."""
    size = weights.total(model)
    before = sum(keep.numel() - masks.kept({"": keep}) for _, keep in weights.masked(model)) / size
    if before > sparsity + 0.5 / size:
        raise ValueError(
            f"the model was pruned to sparsity {before:.4g} before, and now {sparsity:.4g} is asked for; ask for more, "
            "start from a dense copy, or call pp.apply_mask(model, None) to let its zeros be trained again"
        )


FROZEN = r".*weights are frozen and left alone"
"""How the warning about frozen weights begins."""


def _warn_of_frozen(asked: float, overall: float, size: int, everything: int) -> None:
    """Says that a sparsity which was asked for without a word on what it is of is not that of all weights."""
    if size < everything:
        warnings.warn(
            f"{everything - size:,} of the {everything:,} weights are frozen and left alone, so that sparsity "
            f"{asked:.4g} of the others is {overall:.4g} of all; name them by include= to prune them, too, or by "
            "exclude= if they are to stay",
            stacklevel=2,
        )


def _only(prunable: weights.Prunable, names: Container[str]) -> weights.Prunable:
    """What is prunable and has one of these names."""
    return lambda model: {name: weight for name, weight in prunable(model).items() if name in names}


@dataclass(frozen=True, eq=False)
class Request:
    """What a method is asked for where it moves the mask of a plain network step by step, in whatever loop.

    Args:
        plan: What is pruned, and how much.
        steps: How many steps the optimiser takes.
        criterion: What ranks the weights.
        scores: Its scores, which are computed when they are asked for.
        mask_share: Share of the steps in which the mask moves; None: what the method has by default.
        gate_lr: Of what is learned beside the weights; "auto": what the method has by default. None learns nothing.
    """

    plan: Plan
    steps: int
    criterion: str | Criterion
    scores: Callable[[], Mapping[str, Tensor]]
    mask_share: float | None
    gate_lr: float | str | None


@dataclass(frozen=True)
class Start:
    """How a method has begun: what it needs is noted on the model, and a `Stepper` takes it from there.

    Args:
        budget: What the stepper holds; None keeps the mask as it is.
        gate_lr: The learning rate of what is learned beside the weights; None: nothing is.
    """

    budget: Budget | None = None
    gate_lr: float | None = None


def begin_dense(plan: Plan) -> None:
    """Notes which weights are to be pruned in training: a mask of ones."""
    plan.refuse_rows()
    weights.apply_mask(plan.model, masks.all_kept(plan.prunable(plan.model)))


def pruned(plan: Plan, stage: Stages, config: Config, history: History) -> Pruned:
    """The network as training under a budget has left it, and its mask."""
    if not config.epochs:  # else BatchNorm has seen the pruned network
        stage.reestimate_batchnorm()
    return as_noted(plan, history)


def as_noted(plan: Plan, history: History) -> Pruned:
    """The network with the mask that is noted on it."""
    mask = {name: keep.clone() for name, keep in (weights.notes(plan.model).mask or {}).items()}
    trace.note(mask, weights.seen(plan.model))
    return Pruned(plan.model, mask, history, plan.pattern)


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


def gates_like_weights(config: Config) -> Config:
    """The paper's "same learning rates": gates have that of the weights unless one is given, on the same schedule."""
    gate_lr = config.gate_lr if "gate_lr" in config.changes() else config.lr
    return replace(config, gate_lr=gate_lr, gates_scheduled=True)


def fine_tune(config: Config, stage: Stages) -> Pipeline[History]:
    """Sparse fine-tuning; without epochs, BatchNorm at least learns the statistics of the pruned network."""
    if config.epochs:
        return (yield stage("tune", config))
    stage.reestimate_batchnorm()
    return []
