"""PAC-Bayes pruning: a random sparse network whose error on new data is bounded by a proof."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.certification import commitment as seals
from pacprune.certification.certify import certify
from pacprune.certification.rules import check_declared, checked_declaration, refuse_untraced
from pacprune.data.batches import use_of
from pacprune.data.splits import Part, Split, check_split
from pacprune.distributed import refuse_sharded
from pacprune.masking import weights
from pacprune.masking.attachment import attach, read
from pacprune.masking.criteria import Criterion, score
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic
from pacprune.methods.pipeline import (
    Certified,
    Pipeline,
    Plan,
    Stage,
    Stages,
    check_request,
    gates_like_weights,
    make_plan,
    pipeline,
)
from pacprune.training.budget import Budget, keep_means_
from pacprune.training.checks import check_rates
from pacprune.training.config import Config
from pacprune.training.evaluate import reestimate_batchnorm
from pacprune.types import Data, History, Progress, check_name


@dataclass(frozen=True)
class Recipe:
    """How P and Q are trained.

    Args:
        config: The Config of their stages, from the one that is given.
        holds: Whether the expected sparsity is held while gates are trained, and where they are not, the weights
            outside the mask have mean 0.
        objective: The bound that trains Q, unless one is given.
    """

    config: Callable[[Config], Config]
    holds: bool
    objective: str

    def budget(self, config: Config, plan: Plan) -> Budget | None:
        """What holds the mean keep_prob; frozen gates need nothing."""
        return plan.budget() if self.holds and config.gate_lr is not None else None


RECIPES = {
    "held": Recipe(lambda config: config, holds=True, objective="seeger"),
    "paper": Recipe(gates_like_weights, holds=False, objective="paper"),
}
"""What `pbp` takes as its `recipe`."""


@dataclass(frozen=True, eq=False)
class TrainedPrior:
    """P, as stages 1 and 2 leave it.

    Args:
        slab: The distribution.
        plan: What was to be pruned.
        cleared: A mask of the weights whose mean is not 0, where the others stay at 0 with frozen gates; else empty.
        history: One row per epoch, over both stages.
    """

    slab: SpikeSlab
    plan: Plan
    cleared: Mapping[str, Tensor]
    history: History


def _prior_steps(
    model: nn.Module,
    split: Split,
    config: Config,
    *,
    sparsity: float | Mapping[str, float],
    recipe: str = "held",
    criterion: str | Criterion = "magnitude",
    scope: str = "global",
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    dense: Config | None = None,
    data: Data | None = None,
    eps: float = 1e-4,
    std: float = 2e-3,
    train_std: bool = False,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[TrainedPrior]:
    """Stages 1 and 2 of `pbp`, in place: the model is left as a sampler of P, which has not read split.bound."""
    check_name("recipe", recipe, RECIPES)
    chosen, prior_data = RECIPES[recipe], split.prior if data is None else data
    config, is_blank = chosen.config(config), isinstance(prior_data, Part) and not len(prior_data)
    check_rates(config)
    if is_blank:
        check_untrained(0 if dense is None else dense.epochs, config.epochs)
    trial = _blank(split) if is_blank else prior_data
    stage = Stages(model, trial, seed=seed, folder=folder, progress=progress)
    plan = make_plan(model, sparsity, include=include, exclude=exclude, scope=scope)
    plan.refuse_rows()
    history = (yield stage("dense", dense)) if dense and not is_blank else []
    scored = split.prior if len(split.prior) else prior_data
    mask = plan.mask(score(criterion, model, scored, seed=seed, prunable=plan.prunable))
    attach(model, block_isotropic(model, mask, eps=eps, std=std), train_std=train_std, seed=seed)
    if not is_blank:
        history += yield stage("prior", config, chosen.budget(config, plan))
    cleared = mask if chosen.holds and config.gate_lr is None else {}
    keep_means_(model, cleared)
    if len(split.prior):
        reestimate_batchnorm(model, split.prior)
    return TrainedPrior(read(model), plan, cleared, history)


train_prior = pipeline(_prior_steps)
"""Stages 1 and 2 of `pbp` alone, for whoever trains several posteriors of one prior."""


def check_untrained(dense_epochs: int, epochs: int) -> None:
    """Refuses to train a prior that no data may shape."""
    if dense_epochs or epochs:
        raise ValueError(
            f"prior_fraction is 0, so that no data may shape the prior, but it would be trained for {dense_epochs} "
            f"dense and {epochs} other epochs; set both to 0, and give Q epochs of its own (posterior=, "
            "--posterior-epochs)"
        )


def _blank(split: Split) -> tuple[Tensor, Tensor]:
    """Zeros in place of two examples, for a network to show that it takes inputs of this shape."""
    return split.bound.x.new_zeros(2, *split.bound.x.shape[1:]), torch.zeros(2, dtype=torch.int64)


@pipeline
def pbp(
    model: nn.Module,
    split: Split,
    config: Config,
    *,
    sparsity: float | Mapping[str, float],
    recipe: str = "held",
    criterion: str | Criterion = "magnitude",
    posterior: Config | None = None,
    scope: str = "global",
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    dense: Config | None = None,
    data: Data | None = None,
    eps: float = 1e-4,
    std: float = 2e-3,
    train_std: bool = False,
    delta: float = 0.05,
    objective: str | None = None,
    family: str = "seeger",
    expected_risk: float | None = None,
    grid: int = 1,
    method: str = "betting",
    draws: int = 20_000,
    tolerance: float | None = None,
    name: str | None = None,
    declare: str | None = None,
    shares: Mapping[str, tuple[int, float]] | None = None,
    group: str | None = None,
    commit: bool = False,
    source: str = seals.SOURCE,
    beacon: str | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Pipeline[Certified]:
    """PAC-Bayes pruning, in place: [dense] and `config` train the prior on S_P, `posterior` trains Q on the bound.

    P is the block-isotropic spike and slab around the criterion's mask, trained with random masks and noise on the
    weights, and written down before split.bound is read.

    The recipe "held" holds the mean keep_prob of P and Q at 1 - sparsity. Where gate_lr is None the gates stay as they
    are, and the weights outside the mask have mean 0. P is then a small cloud around a network that pft has pruned on
    split.prior.

    The recipe "paper" is PBP as the paper writes it. Nothing holds the sparsity, which the paper states and does not
    enforce. Gates have the weights' learning rate unless a gate_lr is given, and follow its schedule. Q is trained on
    the paper's bound. The means of all weights stay. In the paper's figures the gates of Q are frozen: give `posterior`
    gate_lr=None. The same with the sparsity enforced is "held" with objective="paper", and with gate_lr and
    gates_scheduled in the Configs.

    A split with prior_fraction=0 has no data for P: it is made around the first weights, and neither `dense` nor
    `config` trains anything.

    Args:
        model: The network; it becomes a sampler of Q in place.
        split: The data: split.prior trains P, split.bound trains Q and is certified on.
        config: How the prior is trained, after dense training.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        recipe: held (the expected sparsity is) or paper.
        criterion: What ranks the weights. A name, such as "magnitude", or a function f(model, data) -> scores.
        posterior: How Q is trained on the bound; as `config` unless given.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these; that of the certificate is of all weights. All others, frozen
            ones too, are the same in P and Q.
        exclude: Weights that are left alone. Given likewise.
        dense: How the network is trained on split.prior before that; None takes it as it is.
        data: What trains dense network and prior in place of split.prior, such as split.prior.augmented(transform).
            Other data than split.prior needs a declaration.
        eps: Keep probability of the weights outside the prior's mask, at the start.
        std: Standard deviation of a kept weight.
        train_std: Whether the standard deviations of Q are trained.
        delta: Probability with which the certificate may fail.
        objective: Bound that trains the posterior. "seeger" or "paper"; None is the recipe's, which is "paper" for the
            recipe "paper" and "seeger" otherwise.
        family: Bound that the certificate claims. "seeger", "catoni" or "excess".
        expected_risk: Risk that Catoni's constant is made for: a guess without the bound set.
        grid: Priors, fixed in advance, of which this is one: each pays delta / grid.
        method: How the risk of Q is bounded from drawn networks: "betting" or "chernoff".
        draws: Most networks to draw in estimating the risk of Q, and of P.
        tolerance: Stop drawing once the estimate costs the certificate at most this much.
        name: The network's name in the certificate, such as "mlp".
        declare: What shaped the prior, where pacprune cannot trace it to split.prior, in one sentence that the
            certificate quotes.
        shares: How delta is divided among several certificates, declared beforehand; as of `pp.certify`.
        group: The group of `shares` that this certificate is of.
        commit: Seal prior, split and plan before Q is trained, and Q before anything is drawn. The first call stops
            after the first seal, the second after the second one. A call with a `beacon` then certifies. Needs a
            `folder`, in which the seals are kept.
        source: With `commit`: where the beacon will come from, which is sealed too. Any public randomness will do, and
            so will "a number that the verifier draws".
        beacon: Randomness that is younger than the second seal, in hexadecimal: the value that `source` gave after it.
        seed: Seed of the data order and the draws.
        folder: Where checkpoints and the prior are kept, so that an interrupted run goes on from them; None keeps none.
        progress: Called after every step and every epoch.

    Returns:
        The attached network, P, Q and the certificate, which holds with probability 1 - delta; with `commit` and
        without a `beacon`, the seals in place of a certificate.

    Raises:
        ValueError: If the split was trained on before, or the claim is not one that can be certified.

    Example:
        >>> dense, config = pp.Config(epochs=20, lr=0.1), pp.Config(epochs=10, lr=0.1)
        >>> certified = pp.pbp(model, split, config, dense=dense, sparsity=0.8, draws=200)
        >>> certified.certificate.bound < 0.2  # the share of new digits that is misread, at most
        True
        >>> folder = certified.certificate.save("digits-80")
        >>> pp.verify(folder).valid
        True
    """
    check_request(model, sparsity, criterion)
    refuse_sharded(model.parameters(), "certificate")
    check_declared(family, method, expected_risk)
    check_split(split)
    check_name("recipe", recipe, RECIPES)
    posterior = RECIPES[recipe].config(config if posterior is None else posterior)
    check_rates(posterior)
    declaration = checked_declaration(declare)
    if declaration is None and data is not None:
        refuse_untraced(use_of(data), split, "the data", None)
    seals.check_source(source, commit=commit)
    place = None if folder is None else Path(folder)
    if commit and place is None:
        raise ValueError("commit keeps its seals in a folder; give folder=")
    common: dict[str, Any] = {"seed": seed, "folder": folder, "progress": progress}
    which = {"scope": scope, "include": include, "exclude": exclude, "criterion": criterion}
    shape = {"sparsity": sparsity, "recipe": recipe, "eps": eps, "std": std, "train_std": train_std}
    start = yield from _prior_steps(model, split, config, dense=dense, data=data, **which, **shape, **common)
    prior, history = start.slab, start.history
    sampling = {"method": method, "draws": draws, "tolerance": tolerance}
    plan = {"delta": delta, "family": family, "expected_risk": expected_risk, "grid": grid, **sampling}
    plan |= {"shares": shares, "group": group}
    if commit and place is not None and not (place / seals.FILE).is_file():
        first = seals.commit(prior, split, source=source, **plan)
        first.save(place)
        return Certified(model, prior, prior, first, history)
    objective = RECIPES[recipe].objective if objective is None else objective
    options = {"stage": "posterior", "delta": delta, "objective": objective, "progress": progress}
    budget = RECIPES[recipe].budget(posterior, start.plan)
    history += yield Stage(model, split, posterior, seed, budget, prior, place, options)
    keep_means_(model, start.cleared if posterior.gate_lr is None else {})
    sealed = None if place is None or not commit else seals.with_posterior(place, model)
    if sealed is not None and beacon is None:
        return Certified(model, prior, read(model), sealed, history)
    words = {"name": name, "declare": declare, "progress": progress}
    certificate = certify(model, prior, split, **plan, **words, commitment=sealed, beacon=beacon)
    return Certified(model, prior, read(model), certificate, history)
