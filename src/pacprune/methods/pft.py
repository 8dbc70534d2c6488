"""Probabilistic fine-tuning: weights, and what decides which of them are kept, are trained together."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import kernels
from pacprune.data import trace
from pacprune.data.batches import per_epoch
from pacprune.distributed import is_sharded, local, span
from pacprune.masking import masks, patterns, weights
from pacprune.masking.attachment import attach, final_mask, harden, sample_parameters, set_logits_, sites
from pacprune.masking.criteria import Criterion, magnitude, random
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, isotropic, log_scores, score_monotone
from pacprune.methods.feather import RAMP, threshold_budget
from pacprune.methods.pipeline import (
    Pipeline,
    Plan,
    Pruned,
    Request,
    Stages,
    Start,
    begin_dense,
    check_share,
    fine_tune,
    gates_like_weights,
    pipeline,
    pruned,
    set_up,
    split_epochs,
)
from pacprune.training.checkpoint import stored_scores
from pacprune.training.checks import check_rates, loss_identity, trial_pass
from pacprune.training.config import GATE_STEPS, Config
from pacprune.training.controls import COUPLING
from pacprune.training.distillation import distilled
from pacprune.types import Data, Forward, History, Loss, Progress, check_name

OFFSET_LR = 10.0
"""gate_lr of the recipe "thresholded" unless one is given: that of its SGD, whatever trains the weights.

The gradient in an offset is that in the logarithm of a weight, times a bump: it does not know the weights' scale. Of 0,
1 and 10 it was the best on validation data of a ViT, an LSTM, a GPT and LeNet-5, and level on an MLP and ResNet20
(results/new-ground-defaults-trials.csv).
"""
LIMIT = 0.1
"""`Budget.limit` of the recipe "thresholded".

Without a limit ResNet20 ends with an empty layer at 99 % sparsity, as Feather does (results/new-ground). On validation
data of an MLP, which needs none, 0.03, 0.1, 0.3 and no limit were level (results/new-ground-defaults-trials.csv).
"""

PRIOR = 4.0
"""What multiplies the logarithms of the scores that gates of the recipe "frozen" begin with."""
FROZEN_LR = 0.1
"""gate_lr of the recipe "frozen" unless one is given: of its "adamw8"."""
FROZEN_BETA, FROZEN_SHARPEN = 4.0, 16.0
"""Temperature of its relaxed gates, and what their logits are multiplied by at the end.

All were chosen on validation data of a GPT whose weights have the pattern 2:4 (results/frozen-masks-trials.csv).
"""


@dataclass(frozen=True)
class _Task:
    """What a recipe works on, and what it was asked for."""

    plan: Plan
    config: Config
    criterion: str | Criterion
    scores: dict[str, Tensor]
    mask_share: float | None
    eps: float
    mapping: str
    noise: float | None
    theta: float
    limit: float | None
    prior: float
    distill: float
    temperature: float
    stage: Stages

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.plan.model

    @property
    def estimator(self) -> str:
        """How keep probabilities become gates."""
        return kernels.NOISELESS if self.noise == 0 else kernels.SOFT

    def steps(self, config: Config) -> int:
        """How many steps a stage has."""
        return config.epochs * per_epoch(self.stage.data, config.batch_size, config.steps_per_epoch)


def begin(request: Request, *, noise: float = 0.0, theta: float = 0.5, limit: float | None = LIMIT) -> Start:
    """Begins dense, under a threshold on scores with offsets: of 0, or what a criterion says.

    This is the recipe "thresholded".
    """
    share = check_share(1.0 if request.mask_share is None else request.mask_share)
    fade = fades(request.criterion)
    budget = threshold_budget(
        request.plan,
        ramp=min(RAMP, 0.8 * share),
        until=share,
        fade=fade,
        noise=noise,
        theta=theta,
        limit=limit,
    )
    paced = OFFSET_LR * min(1.0, GATE_STEPS / max(1, share * request.steps))
    gate_lr = paced if request.gate_lr == "auto" else None if request.gate_lr is None else float(request.gate_lr)
    begin_dense(request.plan)
    if gate_lr is not None or fade:
        model = request.plan.model
        weights.notes(model).learned = _offsets(request.plan.prunable(model), request.scores() if fade else None)
    return Start(budget, gate_lr)


def fades(criterion: str | Criterion) -> bool:
    """Whether what a criterion says is taken away again: magnitude is what the weights say for themselves."""
    return criterion not in ("magnitude", magnitude)


def _thresholded(task: _Task) -> Pipeline[Pruned]:
    """Feather's threshold on scores with learned offsets, which begin at 0 or with what a criterion says."""
    request = Request(
        plan=task.plan,
        steps=task.steps(task.config),
        criterion=task.criterion,
        scores=lambda: task.scores,
        mask_share=task.mask_share,
        gate_lr=task.config.gate_lr if "gate_lr" in task.config.changes() else "auto",
    )
    start = begin(request, noise=task.noise or 0.0, theta=task.theta, limit=task.limit)
    config = replace(task.config, gate_lr=start.gate_lr)
    history = yield task.stage("masks", config, start.budget)
    return pruned(task.plan, task.stage, config, history)


def _offsets(plain: Mapping[str, Tensor], scores: Mapping[str, Tensor] | None) -> dict[str, nn.Parameter]:
    """What is added to 4 log|w|: nothing, or what makes a criterion's score of it."""
    # Whatever lies in memory how, gradients of offsets are made row by row, and fused optimisers go by the memory.
    form = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
    offsets = {name: torch.zeros_like(weight.detach(), **form) for name, weight in plain.items()}
    if scores is not None:
        logs = log_scores(scores)
        for name, weight in plain.items():
            offsets[name].copy_(COUPLING * (logs[name] - torch.log(weight.detach().abs().float() + 1e-8)))
    return {name: nn.Parameter(offset) for name, offset in offsets.items()}


def _coupled(task: _Task) -> Pipeline[Pruned]:
    """Gates tied to log|w|, whose mean keep_prob falls to 1 - sparsity while they harden."""
    mask_config, tune_config = split_epochs(task.config, 0.5 if task.mask_share is None else task.mask_share)
    slab = score_monotone(task.model, task.scores, sparsity=task.plan.sparsity)
    mapping = task.plan.pattern or "sigmoid"
    attach(task.model, slab, mapping=mapping, coupling=COUPLING, estimator=task.estimator, seed=task.stage.seed)
    # keep_prob alone would not tell the smallest scores apart.
    set_logits_(task.model, {name: COUPLING * s for name, s in log_scores(task.scores).items()})
    control, schedule = ("none", "fixed") if task.plan.pattern else ("shift", "cubic")
    budget = task.plan.budget(control=control, schedule=schedule, sharpen=4.0, fade=fades(task.criterion))
    history = yield task.stage("masks", mask_config.paced(task.steps(mask_config)), budget)
    return (yield from _harden_and_tune(task, tune_config, history))


def _paper(task: _Task) -> Pipeline[Pruned]:
    """The paper's: two stages with the whole schedule each, gates with the weights' learning rate, no budget."""
    config = task.config
    stages = split_epochs(config, 0.5 if task.mask_share is None else task.mask_share)
    mask_config, tune_config = (replace(stage, span=config.span, warmup=config.warmup) for stage in stages)
    attach(task.model, _start(task), mapping=task.mapping, estimator=task.estimator, seed=task.stage.seed)
    history = yield task.stage("masks", gates_like_weights(mask_config))
    return (yield from _harden_and_tune(task, tune_config, history))


def _frozen(task: _Task) -> Pipeline[Pruned]:
    """Gates alone are trained, from what a criterion or a mask says, and the likeliest mask is put on the weights."""
    config, tune_config = split_epochs(task.config, 1.0 if task.mask_share is None else task.mask_share)
    defaults = {"optimizer": "adamw8", "gate_lr": FROZEN_LR}
    config = replace(config, **{name: value for name, value in defaults.items() if name not in config.changes()})
    config = replace(config, weight_decay=0.0, gates_scheduled=True)
    # Gates and weights have a schedule each, as nothing is trained in both stages.
    config, tune_config = (
        replace(part, span=task.config.span, warmup=task.config.warmup) for part in (config, tune_config)
    )
    trainable = {name for name, p in task.model.named_parameters() if p.requires_grad}
    pattern, plain = task.plan.pattern, task.plan.prunable(task.model)
    attach_frozen(task.model, plain, pattern, estimator=task.estimator, seed=task.stage.seed)
    weights.mark_seen(task.model, trace.noted(task.scores.values()))
    least = min((span(score)[0] for score in task.scores.values() if score.dtype != torch.bool), default=0.0)
    for name in list(plain):  # scores are as large as weights, and go as they come
        set_logits_(task.model, prior_logits({name: task.scores.pop(name)}, task.prior, pattern, least=least))
    del plain
    budget = task.plan.budget(control="none" if pattern else "shift", sharpen=FROZEN_SHARPEN)
    stage = task.stage("masks", config, budget)
    if task.distill:
        forward = distilled(task.stage.objective, weight=task.distill, temperature=task.temperature)
        stage = replace(stage, options={**stage.options, "loss": F.cross_entropy, "forward": forward})
    try:
        history = yield stage
    finally:
        means = {site.name: site.mean for site in sites(task.model)}
        for name, p in {**dict(task.model.named_parameters()), **means}.items():
            p.requires_grad_(name in trainable)
    return (yield from _harden_and_tune(task, tune_config, history))


def attach_frozen(
    model: nn.Module,
    plain: Mapping[str, Tensor],
    pattern: str | None,
    *,
    estimator: str = kernels.SOFT,
    seed: int = 0,
) -> None:
    """Gates of 0 on weights that no gradient reaches; of a pattern in 16 bits where the weights have no more."""
    # No numbers of the weights' size but the gates: a half for all, and the weights themselves as means.
    half = {name: torch.full((), 0.5, device=w.device).expand(w.shape) for name, w in plain.items()}
    if any(is_sharded(w) for w in plain.values()):
        half = {name: torch.full_like(w.detach(), 0.5, dtype=torch.float32) for name, w in plain.items()}
    means, seen = {name: w.detach() for name, w in plain.items()}, weights.seen(model)
    slab = SpikeSlab(half, means, dict.fromkeys(plain, torch.zeros(())), {}, weights.total(model), seen)
    for part in (half, means, slab.std):  # so that nobody has to hash them
        trace.note(part, seen)
    short = pattern is not None and all(w.dtype == torch.bfloat16 for w in plain.values())
    attach(
        model,
        slab,
        mapping=pattern or "sigmoid",
        estimator=estimator,
        beta=FROZEN_BETA,
        gate_dtype=torch.bfloat16 if short else torch.float32,
        seed=seed,
    )
    for p in model.parameters():
        p.requires_grad_(False)
    for p in (*(site.gate for site in sites(model)), *sample_parameters(model)):
        p.requires_grad_(True)  # of a sharded model, gradients of gates are made from those of its draws


def prior_logits(
    scores: Mapping[str, Tensor], strength: float, pattern: str | None, *, least: float = 0.0
) -> dict[str, Tensor]:
    """What gates begin with: strength * log(score), or of a mask strength where it keeps and 0 elsewhere.

    Where the least score of all is negative, all are raised by it. A pattern's logits are centred in each group.
    """
    logits = {}
    for name, whole in scores.items():
        score = local(whole)
        if score.dtype == torch.bool:
            logits[name] = strength * score.float()
        else:
            logits[name] = strength * torch.log(score.detach().float() - min(least, 0.0) + 1e-8)
        if pattern is not None:
            groups = patterns.grouped(logits[name], patterns.parse(pattern)[1], name=name)
            logits[name] = (groups - groups.mean(-1, keepdim=True)).reshape(score.shape)
    return logits


def _start(task: _Task) -> SpikeSlab:
    """The same keep_prob everywhere for random pruning, and two of them around the mask of any other criterion."""
    if task.criterion in ("random", random):
        return isotropic(task.model, sparsity=task.plan.goal, prunable=task.plan.prunable)
    mask = masks.top_k(task.scores, sparsity=task.plan.goal, total=weights.total(task.model))
    return block_isotropic(task.model, mask, eps=task.eps)


def _harden_and_tune(task: _Task, config: Config, history: History) -> Pipeline[Pruned]:
    """The likeliest weights as a plain network, and its fine-tuning."""
    mask = final_mask(task.model, sparsity=task.plan.goal, min_per_layer=task.plan.min_per_layer)
    harden(task.model, mask)
    tuned = yield from fine_tune(config, task.stage)
    return Pruned(task.model, mask, history + tuned, task.plan.pattern)


@dataclass(frozen=True)
class Recipe:
    """How masks are learned.

    Args:
        train: Trains them, and leaves the pruned network.
        takes_pattern: Whether it can learn an N:M pattern.
        takes_samples: Whether Algorithm 1 can estimate its gradients, and so its masks are random.
        takes_shards: Whether it can learn a pattern of a model that fully_shard has cut.
        follows_lr: Whether a gate_lr that is not given follows from the weights' lr.
        uses: Which arguments of `pft` it alone reads.
    """

    train: Callable[[_Task], Pipeline[Pruned]]
    takes_pattern: bool = False
    takes_samples: bool = True
    takes_shards: bool = False
    follows_lr: bool = True
    uses: tuple[str, ...] = ()


_MAPPINGS = ("clamp", "sigmoid")
"""What the paper maps trained numbers to keep probabilities by."""

RECIPES = {
    "thresholded": Recipe(
        _thresholded, takes_pattern=True, takes_samples=False, follows_lr=False, uses=("theta", "limit")
    ),
    "coupled": Recipe(_coupled, takes_pattern=True),
    "paper": Recipe(_paper, uses=("eps", "mapping")),
    "frozen": Recipe(
        _frozen, takes_pattern=True, takes_shards=True, follows_lr=False, uses=("prior", "distill", "temperature")
    ),
}
"""What `pft` takes as its `recipe`."""


@pipeline
def pft(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    criterion: str | Criterion | Mapping[str, Tensor] = "magnitude",
    recipe: str = "thresholded",
    mask_share: float | None = None,
    eps: float = 1e-4,
    mapping: str = "clamp",
    noise: float | None = None,
    theta: float = 0.5,
    limit: float | None = LIMIT,
    prior: float = PRIOR,
    distill: float = 0.0,
    temperature: float = 1.0,
    dense: Config | None = None,
    scope: str = "global",
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    validation: Data | None = None,
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Probabilistic fine-tuning, in place: [dense] -> train weights and which of them are kept, together.

    The recipe "thresholded" is Feather's threshold (see `pp.feather`) on learned scores r = log|w| + a / 4. The k
    largest are kept at every step, with w (1 - exp(-3 (r - tau)))^(1/3) in place of w. The sparsity rises in the first
    half, and the mask moves to the end. The gradient passes to w, below tau times `theta` and within `limit`. The
    gradient in an offset a is that in the weight times w s (1 - s) gamma, s = sigmoid(4 gamma (r - tau)), while gamma
    rises from 1 to 4. The offsets begin at 0, or with what another criterion than magnitude says, which fades. They are
    trained by momentum SGD on the weights' schedule, whatever the optimiser. With gate_lr = 0 and without a limit this
    is `pp.feather`.

    The recipe "coupled" trains random masks: [dense] -> train weights and keep_prob -> top-k -> sparse fine-tuning. It
    ties each gate to its weight's magnitude, holds the mean keep_prob to a budget that falls to 1 - sparsity, and
    hardens the gates meanwhile. With a `pattern`, the gates of every group share what they keep, a choice of so many
    weights that is relaxed by Gumbel-softmax. The pattern then holds from the start, in place of the budget.

    The recipe "paper" has the steps of "coupled", as the paper writes them. It starts from keep_prob = 1 - sparsity
    everywhere for random pruning, and block-isotropic with `eps` around the mask of any other criterion. Nothing holds
    the budget. Each of the two stages has the whole learning-rate schedule of `config`. The gates have the weights'
    learning rate unless a gate_lr is given, and follow the schedule either way. For
    CIFAR-10 the paper has 60 + 120 epochs: Config(epochs=180, lr=0.1, schedule="step") and mask_share = 1/3.

    The recipe "frozen" learns masks of weights that are not trained: [dense] -> train gates -> top-k, or the likeliest
    choice of every group -> fine-tuning of what is kept, if mask_share says so. Kept weights are those of the dense
    network to the bit. The gates begin with what a criterion says of the weights, or with a mask. `distill` trains them
    on the dense network's answers. Of 16-bit weights under a pattern, everything together takes some 7 bytes per
    weight; see the page on language models.

    An untrained model gives PFT at initialisation. lr = 0 gives strong lottery tickets; "coupled" and "paper" need
    mask_share = 1 and a gate_lr as well, 20 and 0.5.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule, or one for each stage of the
            recipes "paper" and "frozen"; osp with the same config is the fair comparison. A gate_lr that is not given
            is smaller where the mask is learned in many steps, and lr for the recipe "paper". The recipe "frozen" has
            0.1, on the schedule, and an optimizer that is not given is "adamw8" for its gates.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows from it.
        criterion: What ranks the weights. A name, such as "magnitude", or a function f(model, data) -> scores. For the
            recipe "frozen" also a mask, from which the gates begin.
        recipe: thresholded (the k best scores at every step), coupled (keep probabilities whose mean falls to
            1 - sparsity), paper, or frozen (weights stay as they are).
        mask_share: Share of the epochs in which the mask is learned; the rest fine-tunes. 1 unless given, and 0.5 for
            the recipes "coupled" and "paper".
        eps: Keep probability, at the start, of the weights that `criterion` would prune; `recipe` "paper" only.
            Random pruning has none.
        mapping: How a trained number becomes a keep probability, clamp or sigmoid; `recipe` "paper" only.
        noise: Size of the masks' noise. None is 0 for the recipe "thresholded", where it is the size of logistic noise
            on 4 r, which is gone after 80 % of the mask stage. The others have 1, random masks, or 0: each weight is
            scaled by sigmoid(logit / beta), a smooth function of its keep probability.
        theta: Share of its gradient that a weight below the threshold gets; `recipe` "thresholded" only.
        limit: The gradient of an output's weights below the threshold has at most this share of the norm of all its
            weights; `recipe` "thresholded" only. None sets no limit, and very sparse networks may lose whole layers.
        prior: What multiplies the logarithms of the scores, whose product the gates begin with, or how far the logits
            of a mask's kept weights lie above the others'; `recipe` "frozen" only.
        distill: Share of the loss that is the Kullback-Leibler divergence from the dense network's answers; `recipe`
            "frozen" only. They come from the same weights without a mask, so that there is no second copy.
        temperature: What logits are divided by before the two are compared; `recipe` "frozen" only.
        dense: How the network is trained before pruning; None prunes it as it is.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        validation: Data whose loss is measured after every epoch. `Config.patience` goes by it where the mask stays.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
        seed: Seed of the data order, the masks' noise, and random scores.
        folder: Where checkpoints are kept, so that a broken run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the recipe is unknown, if it cannot learn the pattern, or if it does not read an argument that is
            not the default.

    Example:
        >>> pruned = pp.pft(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> pruned.sparsity
        0.900...
        >>> [row["stage"] for row in pruned.history]
        ['masks', 'masks']
    """
    _check_recipe(recipe, pattern, config, noise)
    used = {"eps": eps, "mapping": mapping, "theta": theta, "limit": limit}
    _check_used(recipe, used | {"prior": prior, "distill": distill, "temperature": temperature})
    check_name("mapping", mapping, _MAPPINGS)
    if RECIPES[recipe].follows_lr or "gate_lr" in config.changes():
        check_rates(config)
    if recipe == "frozen":
        _check_frozen(config, mask_share, prior, distill, temperature)
    criterion = _criterion(criterion, recipe)
    stage, plan = set_up({**locals(), "shards": RECIPES[recipe].takes_shards})
    history = (yield stage("dense", dense)) if dense else []
    task = _Task(
        plan=plan,
        config=config,
        criterion=criterion,
        scores=_scores(criterion, plan, stage),
        mask_share=mask_share,
        eps=eps,
        mapping=mapping,
        noise=noise,
        theta=theta,
        limit=limit,
        prior=prior,
        distill=float(distill),
        temperature=temperature,
        stage=stage,
    )
    result = yield from RECIPES[recipe].train(task)
    return replace(result, history=history + result.history)


def _scores(criterion: str | Criterion, plan: Plan, stage: Stages) -> dict[str, Tensor]:
    """The criterion's scores; by a named criterion they are kept in the folder for a run that goes on."""
    compute = functools.partial(stage.scores, criterion, plan.prunable)
    if stage.folder is None or not isinstance(criterion, str):  # two functions may have one name
        return compute()
    request = {
        "criterion": criterion,
        "seed": stage.seed,
        "loss": loss_identity(stage.objective, trial_pass(plan.model, stage.data, stage.objective)),
        "prunable": list(plan.prunable(plan.model)),
    }
    return stored_scores(stage.folder, request, plan.model, stage.data, compute)


def _check_recipe(recipe: str, pattern: str | None, config: Config, noise: float | None) -> None:
    """Refuses a recipe that does not exist, or that cannot have the noise or the samples."""
    check_name("recipe", recipe, RECIPES)
    chosen = RECIPES[recipe]
    if config.samples and not chosen.takes_samples:
        raise ValueError(
            f"samples is {config.samples}, but the masks of the recipe {recipe!r} are not random; use samples=0, or "
            "recipe='coupled'"
        )
    if chosen.takes_samples and noise not in (None, 0, 1):
        raise ValueError(f"noise is {noise!r}, a size that only the recipe 'thresholded' has; use 0 or 1")
    if pattern is not None and (not chosen.takes_pattern or config.samples):
        able = [name for name, row in RECIPES.items() if row.takes_pattern]
        raise ValueError(
            f"the pattern {pattern} is learned by the recipes {' and '.join(able)} without samples, not by "
            f"recipe={recipe!r} with samples={config.samples}; use recipe={able[0]!r} and samples=0"
        )


def _check_frozen(config: Config, mask_share: float | None, prior: float, distill: float, temperature: float) -> None:
    """Refuses rates of weights that are not trained, and a loss that is no mixture."""
    if mask_share in (None, 1) and config.changes().get("lr", 0):
        raise ValueError(
            f"lr is {config.lr}, but the recipe 'frozen' trains gates and no weights; leave lr out, or give "
            "mask_share=0.8, say, to fine-tune what is kept for the rest of the epochs"
        )
    if config.gate_lr is None:
        raise ValueError(
            "gate_lr is None, but the recipe 'frozen' trains nothing but the gates; leave it out, or use pp.osp"
        )
    if not 0 <= prior < math.inf:
        raise ValueError(f"prior is {prior}; it is how far apart logits begin, a number of at least 0, such as {PRIOR}")
    if not 0 <= distill <= 1 or not 0 < temperature < math.inf:
        raise ValueError(
            f"distill is {distill} and temperature {temperature}; the first is a share of the loss, in [0, 1], and the "
            "second a positive number"
        )


def _criterion(criterion: str | Criterion | Mapping[str, Tensor], recipe: str) -> str | Criterion:
    """A mask as a criterion that returns it."""
    if not isinstance(criterion, Mapping):
        return criterion
    if recipe != "frozen":
        raise ValueError(
            f"the criterion is a mask, which the recipe {recipe!r} cannot begin with; use recipe='frozen', or a name"
        )
    mask = dict(criterion)

    def one_shot_mask(model: nn.Module, data: Data) -> dict[str, Tensor]:
        return mask

    return one_shot_mask


def _check_used(recipe: str, values: Mapping[str, float | str | None]) -> None:
    """Refuses an argument that only another recipe reads, unless it has its default."""
    for other, row in RECIPES.items():
        for name in row.uses if other != recipe else ():
            default = inspect.signature(pft).parameters[name].default
            if values[name] != default:
                raise ValueError(
                    f"{name} is {values[name]}, but the recipe {recipe!r} does not read it; leave it at {default}, "
                    f"or use recipe={other!r}"
                )
