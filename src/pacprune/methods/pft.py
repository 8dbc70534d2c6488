"""Probabilistic fine-tuning: weights and the probabilities to keep them are trained together."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import kernels
from pacprune.data.batches import per_epoch
from pacprune.masking import masks, weights
from pacprune.masking.attachment import attach, final_mask, harden, set_logits_
from pacprune.masking.criteria import Criterion, magnitude, score
from pacprune.masking.spikeslab import block_isotropic, log_scores, score_monotone
from pacprune.methods.feather import COUPLING, RAMP, attach_thresholded, check_theta
from pacprune.methods.pipeline import (
    Pipeline,
    Pruned,
    check_request,
    fine_tune,
    magnitude_mask,
    pipeline,
    split_epochs,
    stage_maker,
)
from pacprune.training.budget import Budget, enforce_
from pacprune.training.checkpoint import stored_scores
from pacprune.training.checks import check_rates, loss_identity, trial_pass
from pacprune.training.config import GATE_STEPS, Config
from pacprune.types import Data, Loss, Progress, check_name

OFFSET_LR = 1.0
"""gate_lr of the recipe "thresholded" unless one is given: that of its SGD, whatever trains the weights.

The gradient in an offset is that in the logarithm of a weight, times a bump: it does not know the weights' scale.
"""


@dataclass(frozen=True)
class _Start:
    """What a recipe begins with."""

    scores: dict[str, Tensor]
    sparsity: float
    pattern: str | None
    eps: float
    fade: bool
    noise: bool | float
    theta: float
    ramp: float
    prunable: weights.Prunable
    seed: int

    @property
    def estimator(self) -> str:
        """How keep probabilities become gates."""
        return kernels.SOFT if self.noise else kernels.NOISELESS


def _attach_coupled(model: nn.Module, start: _Start) -> Budget:
    """Gates tied to log|w|, whose mean keep_prob falls to 1 - sparsity while they harden; returns their budget."""
    slab = score_monotone(model, start.scores, sparsity=start.sparsity)
    mapping = start.pattern or "sigmoid"
    attach(model, slab, mapping=mapping, coupling=COUPLING, estimator=start.estimator, seed=start.seed)
    # keep_prob alone would not tell the smallest scores apart.
    set_logits_(model, {name: COUPLING * s for name, s in log_scores(start.scores).items()})
    control, schedule = ("none", "fixed") if start.pattern else ("shift", "cubic")
    return Budget(start.sparsity, control=control, schedule=schedule, sharpen=4.0, fade=start.fade)


def _attach_paper(model: nn.Module, start: _Start) -> None:
    """The paper's start: block-isotropic around the criterion's mask, clamped probabilities, no budget."""
    mask = masks.top_k(start.scores, sparsity=start.sparsity, total=weights.total(model))
    slab = block_isotropic(model, mask, eps=start.eps)
    attach(model, slab, mapping="clamp", estimator=start.estimator, seed=start.seed)


def _attach_thresholded(model: nn.Module, start: _Start) -> Budget:
    """Feather's threshold on log|w| and a learned offset; what another criterion says is an offset that fades."""
    noise = 0.0 if isinstance(start.noise, bool) else start.noise
    options = {"theta": start.theta, "ramp": start.ramp, "prunable": start.prunable, "seed": start.seed}
    budget = attach_thresholded(model, sparsity=start.sparsity, noise=noise, **options)
    if start.fade:
        set_logits_(model, {name: COUPLING * s for name, s in log_scores(start.scores).items()})
        enforce_(model, budget, 1.0)
    return replace(budget, fade=start.fade)


@dataclass(frozen=True)
class Recipe:
    """How keep probabilities begin, and what they are held to.

    Args:
        attach: Attaches the gates and returns the budget that they are held to.
        mask_share: The share of the epochs that trains the masks, unless one is given.
        gate_lr: The gates' learning rate where the config's follows lr; None leaves it so.
        paced: Whether a gate_lr that follows lr is smaller where the mask stage is long (`Config.paced`).
        takes_pattern: Whether it can learn an N:M pattern.
        fades: Whether what a criterion said at the start is taken away again. Magnitude stays, since it is what the
            coupling says for itself.
    """

    attach: Callable[[nn.Module, _Start], Budget | None]
    mask_share: float = 0.5
    gate_lr: float | None = None
    paced: bool = False
    takes_pattern: bool = False
    fades: bool = False

    def config(self, config: Config, steps: int) -> Config:
        """The config of a mask stage of so many steps."""
        if self.gate_lr is not None and "gate_lr" not in config.changes():
            return replace(config, gate_lr=self.gate_lr * min(1.0, GATE_STEPS / max(1, steps)))
        return config.paced(steps) if self.paced else config


RECIPES = {
    "coupled": Recipe(_attach_coupled, paced=True, takes_pattern=True, fades=True),
    "paper": Recipe(_attach_paper),
    "thresholded": Recipe(_attach_thresholded, mask_share=1.0, gate_lr=OFFSET_LR, fades=True),
}
"""What `pft` takes as its `recipe`."""


@pipeline
def pft(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    criterion: str | Criterion = "magnitude",
    recipe: str = "coupled",
    mask_share: float | None = None,
    eps: float = 1e-4,
    noise: bool | float = True,
    theta: float = 0.5,
    dense: Config | None = None,
    min_per_layer: int = 0,
    loss: Loss = F.cross_entropy,
    prunable: weights.Prunable = weights.prunable,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Pruned]:
    """Probabilistic fine-tuning, in place: [dense] -> train weights and keep_prob -> top-k -> sparse fine-tuning.

    The recipe "coupled" ties each gate to its weight's magnitude. It holds the mean keep_prob to a budget that falls to
    1 - sparsity, and hardens the gates meanwhile. What another criterion than magnitude said at the start fades. The
    recipe "paper" is the paper's: block-isotropic start with `eps`, clamped probabilities, no budget.

    The recipe "thresholded" is Feather's threshold (see `pp.feather`) on learned scores r = log|w| + a / 4. The k
    largest are kept at every step, with w (1 - exp(-3 (r - tau)))^(1/3) in place of w. The gradient in an offset a is
    that in the weight times w s (1 - s) gamma, s = sigmoid(4 gamma (r - tau)), while gamma rises from 1 to 4. The
    offsets begin at 0, or with what another criterion than magnitude says, which fades. They are trained by momentum
    SGD on the weights' schedule, whatever the optimiser. With gate_lr = 0 and without noise this is `pp.feather`.

    An untrained model gives PFT at initialisation. lr = 0 with mask_share = 1 and a gate_lr (20 for "coupled", 0.5 for
    "paper") gives strong lottery tickets.

    With a `pattern`, every group of 4 weights has one gate: a choice of so many out of 4, relaxed by Gumbel-softmax and
    hardened like the others. The likeliest choice is kept. The pattern holds from the start, in place of the budget.

    Args:
        model: The network; it is pruned in place.
        data: What trains it: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        config: The whole budget after dense training, on one learning-rate schedule; osp with the same config is the
            fair comparison. A gate_lr that is not given is smaller where the mask stage is long (`Config.paced`).
        sparsity: Fraction of the weights to prune, such as 0.9.
        pattern: Keep so many of every 4 weights in a row, "1:4" or "2:4"; `sparsity` follows from it.
        criterion: What ranks the weights. A name, such as "magnitude", or a function f(model, data) -> scores.
        recipe: coupled (keep probabilities follow the weights' sizes while their mean falls to 1 - sparsity), paper or
            thresholded.
        mask_share: Share of the epochs that trains the keep probabilities; the rest fine-tunes. 0.5 unless given; 1 for
            the recipe "thresholded", whose mask moves to the end.
        eps: Keep probability, at the start, of the weights that `criterion` would prune; `recipe` "paper" only.
        noise: Train with random masks; without, each weight is scaled by a smooth function of its keep probability.
            That function is sigmoid(logit / beta), and shows what sampling is worth. For the recipe "thresholded" it is
            a size, such as 0.25, of logistic noise on 4 r, which is gone after 80 % of the mask stage; True is 0 there.
        theta: Share of its gradient that a weight below the threshold gets; `recipe` "thresholded" only.
        dense: How the network is trained before pruning; None prunes it as it is.
        min_per_layer: Weights that every layer keeps at least.
        loss: (outputs, labels) -> one number. That it reads no other data than these is the issuer's word.
        prunable: Which weights may be pruned: model -> {name: weight}.
        seed: Seed of the data order, the masks' noise, and random scores.
        folder: Where checkpoints are kept, so that a broken run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The pruned network, its mask and its history.

    Raises:
        ValueError: If the recipe is unknown, or a pattern is asked of a recipe that cannot learn it.

    Example:
        >>> pruned = pp.pft(model, (x, y), pp.Config(epochs=2), sparsity=0.9)
        >>> pruned.sparsity
        0.900...
        >>> [row["stage"] for row in pruned.history]
        ['masks', 'tune']
    """
    sparsity = check_request(model, sparsity, criterion, pattern)
    _check_recipe(recipe, pattern, config, noise, theta)
    check_rates(config)
    chosen = RECIPES[recipe]
    mask_config, tune_config = split_epochs(config, chosen.mask_share if mask_share is None else mask_share)
    stage = stage_maker(model, data, loss, seed, folder, progress)
    largest = magnitude_mask(model, sparsity, prunable, min_per_layer, pattern=pattern)
    if pattern is not None:  # of all D weights, some of which `prunable` may leave out
        sparsity = masks.sparsity(largest, total=weights.total(model))
    history = (yield stage("dense", dense)) if dense else []
    scores = _scores(criterion, model, data, loss=loss, seed=seed, prunable=prunable, folder=folder)
    mask_config = chosen.config(mask_config, mask_config.epochs * per_epoch(data, mask_config.batch_size))
    fade = chosen.fades and criterion not in ("magnitude", magnitude)
    ramp = min(0.8, RAMP * config.epochs / mask_config.epochs) if mask_config.epochs else RAMP
    start = _Start(scores, sparsity, pattern, eps, fade, noise, theta, ramp, prunable, seed)
    budget = chosen.attach(model, start)
    history += yield stage("masks", mask_config, budget)
    mask = final_mask(model, sparsity=sparsity, min_per_layer=min_per_layer)
    harden(model, mask)
    if chosen.mask_share == 1 and config.epochs == mask_config.epochs > 0:  # it is what it was at the last step
        return Pruned(model, mask, history, pattern)
    return Pruned(model, mask, history + (yield from fine_tune(model, data, tune_config, stage)), pattern)


def _scores(
    criterion: str | Criterion,
    model: nn.Module,
    data: Data,
    *,
    loss: Loss,
    seed: int,
    prunable: weights.Prunable,
    folder: str | Path | None,
) -> dict[str, Tensor]:
    """The criterion's scores; by a named criterion they are kept in the folder for a run that goes on."""
    compute = functools.partial(score, criterion, model, data, loss=loss, seed=seed, prunable=prunable)
    if folder is None or not isinstance(criterion, str):  # two functions may have one name
        return compute()
    request = {
        "criterion": criterion,
        "seed": seed,
        "loss": loss_identity(loss, trial_pass(model, data, loss)),
        "prunable": list(prunable(model)),
    }
    return stored_scores(folder, request, model, data, compute)


def _check_recipe(recipe: str, pattern: str | None, config: Config, noise: bool | float, theta: float) -> None:
    """Refuses a recipe that does not exist, or that cannot learn the pattern or have the noise."""
    check_name("recipe", recipe, RECIPES)
    check_theta(theta)
    if recipe == "thresholded" and config.samples:
        raise ValueError(
            f"samples is {config.samples}, but the masks of the recipe {recipe!r} are not random; use samples=0"
        )
    if recipe != "thresholded" and not isinstance(noise, bool):
        raise ValueError(f"noise is {noise!r}, a size that only the recipe 'thresholded' has; use True or False")
    if pattern is not None and (not RECIPES[recipe].takes_pattern or config.samples):
        able = next(name for name, row in RECIPES.items() if row.takes_pattern)
        raise ValueError(
            f"the pattern {pattern} is learned by relaxed gates of the recipe {able!r}, not by recipe={recipe!r} with "
            f"samples={config.samples}; use recipe={able!r} and samples=0"
        )
