"""Training in words of the method: `fit` in whatever state the model is, `fit_posterior` on the PAC-Bayes bound."""

import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from pacprune import bounds
from pacprune.bounds import numeric
from pacprune.data.batches import example_hashes, label_hashes, tensors
from pacprune.data.splits import Part, Split, check_split
from pacprune.distributed import ranks, refuse_sharded
from pacprune.files import digest, write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.criteria import plain_rnn
from pacprune.masking.spikeslab import SpikeSlab, kl
from pacprune.training.budget import Budget, check_budgets
from pacprune.training.config import Config
from pacprune.training.crew import Crew
from pacprune.training.loop import groups
from pacprune.training.optim import Optimizer
from pacprune.training.population import per_member
from pacprune.training.step import Stage
from pacprune.types import Data, History, Loss, Progress

OBJECTIVES = ("seeger", "paper")


def fit(
    model: nn.Module | Sequence[nn.Module],
    data: Data,
    config: Config | Sequence[Config],
    *,
    loss: Loss = F.cross_entropy,
    budget: Budget | Sequence[Budget] | None = None,
    validation: Data | None = None,
    seed: int | Sequence[int] = 0,
    stage: str = "fit",
    checkpoint: str | Path | None = None,
    every: int | None = None,
    progress: Progress | None = None,
) -> History:
    """Trains the model in the state it is in: dense, attached (means and gates), or masked (zeros stay zero).

    A run is a function of (model, data, config, seed): the order of the data, the draws and dropout follow from them;
    torch's global random state and a DataLoader's own generators are left as they were. The examples of `data` and of
    `validation` are noted as seen. With a `checkpoint` path, saves there every epoch (or `every` steps), and a second
    call with the same arguments goes on from there. Leaves the model in eval mode; returns one row per epoch.

        pp.fit(model, (x, y), pp.Config(epochs=5, lr=.1), loss=torch.nn.functional.mse_loss)

    A list of K models of one architecture is trained as a population, K networks in one call of every layer; config,
    budget and seed are then one for all or a list of one each, and every row names its `member`. A member ends as it
    would alone, up to rounding (dropout apart, whose draws differ).

    Under torchrun (see `ranks.joined`) all ranks call it with the same arguments; each takes its part of every batch of
    config.batch_size (of a Dataset or a DataLoader every rank reads it all), and all end with the same weights, up to
    rounding those of one process. BatchNorm (not SyncBatchNorm) sees the examples of its rank alone, and its running
    statistics are averaged after every epoch and at every checkpoint. Dropout draws the same on all ranks. Rank 0
    writes the checkpoint, which any number of ranks can go on from; `validation` is looked at by rank 0. `progress` is
    called on every rank.

    A model that torch.distributed.fsdp.fully_shard has cut (its parts, then itself, before `attach`) is trained in
    shards: every rank keeps, draws and moves its rows alone, and writes its own part of the checkpoint.
    """
    crew = Crew(model, config, seed)
    value = crew.check(data, loss)
    budgets = None if budget is None else per_member("budget", budget, len(crew.models))
    check_budgets(crew.trained, budgets or [])
    seen = {"data": example_hashes(data), **({} if validation is None else {"validation": example_hashes(validation)})}
    crew.mark_seen(seen.values())
    # `check` saw the labels of tensors only; on an accelerator, looking at every batch would cost a stop.
    look = loss is F.cross_entropy and tensors(data) is None and crew.device.type == "cpu"
    run = Stage(
        stage=stage,
        objective=crew.objective(loss, look),
        groups=groups(crew.trained, crew.configs, rest=True),
        enter=crew.trained.train,
        budgets=budgets,
        validate=None if validation is None else lambda: crew.mean_losses(validation, loss),
        identity={
            "budget": None if budgets is None else [plan.record() for plan in budgets],
            # The name alone would take one lambda, or one setting of a loss, for another.
            "loss": [repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", ""), value],
            "seen": digest(seen),
            "labels": [digest({"y": label_hashes(one)}) for one in (data, validation) if one is not None],
        },
        members=crew.population is not None,
    )

    def halves(some: slice, suffix: str) -> History:
        return fit(
            crew.models[some],
            data,
            crew.configs[some],
            loss=loss,
            budget=None if budgets is None else budgets[some],
            validation=validation,
            seed=crew.seeds[some],
            stage=stage,
            checkpoint=None if checkpoint is None else f"{checkpoint}{suffix}",
            every=every,
            progress=progress,
        )

    return crew.train(data, run, halves, path=checkpoint, every=every, progress=progress)


def fit_posterior(
    model: nn.Module | Sequence[nn.Module],
    prior: SpikeSlab | Sequence[SpikeSlab],
    split: Split,
    config: Config | Sequence[Config],
    *,
    delta: float = 0.05,
    objective: str = "seeger",
    kl_weight: float | Sequence[float] = 1.0,
    budget: Budget | Sequence[Budget] | None = None,
    data: Data | None = None,
    out: str | Path | Sequence[str | Path] | None = None,
    seed: int | Sequence[int] = 0,
    stage: str = "posterior",
    checkpoint: str | Path | None = None,
    every: int | None = None,
    progress: Progress | None = None,
) -> History:
    """Trains the posterior Q from the prior P on the PAC-Bayes bound itself, with everything outside Q frozen.

    The risk in the bound is the cross-entropy with probabilities clamped at 1e-4, divided by log(1e4), so that it lies
    in [0, 1]. Refuses when P has seen the bound set; writes P to `out` (by default a folder that goes when Python ends)
    and hashes it before the bound set is read; leaves a receipt without which `certify` refuses. `objective` is
    "seeger" or "paper". A `budget` holds the expected sparsity of Q. `data` may be other training data (Q may be
    trained on anything); n and the KL stay the bound set's. `kl_weight` multiplies the KL in what is minimised and
    nowhere else: any Q may be certified, and `certify` takes the whole KL; every row of the history has it. Where P is
    weak, 3 gave lower bounds than 1 (docs/results.md). A list of models, each with its own prior, is trained as a
    population, and several ranks train together (see `fit`); rank 0 writes P, and the others wait for that.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    check_split(split)
    crew = Crew(model, config, seed)
    count = len(crew.models)
    factors: list[float] = per_member("kl_weight", kl_weight, count)
    if not all(0 <= one < math.inf for one in factors):
        raise ValueError(
            f"kl_weight is {kl_weight}; it must be a number of at least 0: 1 trains on the bound itself, 0 on the risk"
        )
    priors: list[SpikeSlab] = per_member("prior", prior, count)
    for one, p in zip(crew.models, priors, strict=True):
        refuse_sharded(one.parameters(), "certificate")
        attachment.attached(one)
        if any(t.requires_grad for t in p.keep_prob.values()):
            raise ValueError("the prior carries gradients and forgot what it has seen; take it by pp.read(model)")
        refuse_if_touched(p.seen, split, "the prior")
    ledger = bounds.Ledger.split(delta)
    if count > 1 and isinstance(out, (str, Path)):
        raise ValueError(f"out is the one folder {str(out)!r} for {count} priors; give a list of one for each")
    given: list[Any] = per_member("out", out, count)

    def write() -> tuple[list[Path], list[str]]:
        folders = [Path(tempfile.mkdtemp(dir=_passing().name) if o is None else o) for o in given]
        return folders, [write_prior(p, where / "prior.safetensors") for p, where in zip(priors, folders, strict=True)]

    folders, hashes = ranks.on_rank0(write)  # no rank goes on to the bound set before
    if ranks.rank():  # what rank 0 wrote must be what this one goes on with
        hashes = [p.hash for p in priors]
    data = split.bound if data is None else data
    crew.check(data, F.cross_entropy)
    n, trained, alone = len(split.bound), crew.trained, crew.population is None
    pinned = priors[0] if alone else stacked(priors)
    kl(attachment.read(trained, detach=False), pinned, members=not alone)  # refuses what has no finite KL, once

    # Added to the KL, so that its gradient after a backward pass is the price d bound / d KL.
    tap = torch.zeros(() if alone else count, dtype=torch.float64, device=crew.device, requires_grad=True)
    factor = torch.tensor(factors[0] if alone else factors, dtype=torch.float64, device=crew.device)
    risks = crew.objective(bounded_cross_entropy, False)

    def risk_of(x: Tensor, y: Tensor) -> Tensor:
        with plain_rnn(trained):  # the model is in eval mode
            return risks(x, y)

    def bound(risk: Tensor) -> Tensor:
        q = attachment.read(trained, detach=False)
        # `pull` takes the means' part of the KL; here it only counts.
        fixed = replace(q, mean={name: m.detach() for name, m in q.mean.items()})
        divergence = factor * (kl(fixed, pinned, dtype=torch.float32, members=not alone, check=False) + tap)
        if objective == "seeger":
            constant = math.log(bounds.xi(n) / ledger.pac_bayes)
            return numeric.kl_inverse(risk, (divergence + constant) / n)
        excess = (divergence + math.log(2 * math.sqrt(n) / ledger.pac_bayes)) / n
        return risk + torch.minimum(excess + torch.sqrt(excess * (excess + 2 * risk)), torch.sqrt(excess / 2))

    @torch.no_grad()
    def pull(optimizer: Optimizer) -> None:
        """The proximal step of price * KL in the means: m <- (m + h m0)/(1 + h), h = rate * price * keep_prob / std0^2.

        An explicit gradient step would diverge once rate > 2 std0^2 / price, which a small std makes tiny.
        """
        price, tap.grad = ranks.sum_(torch.zeros_like(tap) if tap.grad is None else tap.grad), None
        for site in attachment.sites(trained):
            if site.mean.grad is None:  # frozen by the user
                continue
            column = price.float().reshape((-1, *[1] * (site.mean.ndim - 1)) if price.ndim else ())
            std0, mean0 = pinned.std[site.name], pinned.mean[site.name]
            h = optimizer.reach(site.mean) * column * torch.sigmoid(site.logit()) / std0**2
            site.mean.copy_(torch.where(torch.isfinite(h), (site.mean + h * mean0) / (1 + h), mean0))

    def enter() -> None:
        trained.eval()  # BatchNorm and dropout are part of what P and Q share: frozen
        for site in attachment.sites(trained):
            site.sampler.train()

    known = example_hashes(data)
    crew.mark_seen([known])
    budgets = None if budget is None else per_member("budget", budget, count)
    check_budgets(trained, budgets or [])
    run = Stage(
        stage=stage,
        objective=risk_of,
        bound=bound,
        groups=groups(trained, crew.configs, rest=False),
        enter=enter,
        budgets=budgets,
        validate=None,
        identity={
            "prior": hashes,
            "n": n,
            "seen": digest({"data": known, "labels": label_hashes(data)}),
            "delta": delta,
            "objective": objective,
            "kl_weight": factors,
            "budget": None if budgets is None else [plan.record() for plan in budgets],
        },
        members=not alone,
        after=pull,
    )

    def halves(some: slice, suffix: str) -> History:
        return fit_posterior(
            crew.models[some],
            priors[some],
            split,
            crew.configs[some],
            delta=delta,
            objective=objective,
            kl_weight=factors[some],
            budget=None if budgets is None else budgets[some],
            data=data,
            out=folders[some],
            seed=crew.seeds[some],
            stage=stage,
            checkpoint=None if checkpoint is None else f"{checkpoint}{suffix}",
            every=every,
            progress=progress,
        )

    history = crew.train(data, run, halves, path=checkpoint, every=every, progress=progress)
    for row in history:
        row["kl_weight"] = factors[row.get("member", 0)]
    for one, written, where in zip(crew.models, hashes, folders, strict=True):
        weights.notes(one).receipt = {"prior": written, "bound": split.bound.hash, "written": str(where)}
    return history


@functools.cache
def _passing() -> "tempfile.TemporaryDirectory[str]":
    """Where priors are written that nobody asked to keep."""
    return tempfile.TemporaryDirectory(prefix="pacprune-")


def stacked(slabs: Sequence[SpikeSlab]) -> SpikeSlab:
    """Several distributions over the same tensors as one, with a leading dimension; `rest` and `seen` stay behind."""
    first = slabs[0]

    def over(part: str) -> dict[str, Tensor]:
        found = {name: torch.stack([getattr(slab, part)[name] for slab in slabs]) for name in getattr(first, part)}
        # One std per member has to multiply that member's weights.
        return {n: t.reshape(-1, *[1] * first.mean[n].ndim) if t.ndim == 1 else t for n, t in found.items()}

    return replace(first, keep_prob=over("keep_prob"), mean=over("mean"), std=over("std"), rest={})


def refuse_if_touched(seen: Tensor, split: Split, who: str) -> None:
    """Raises when the examples `seen` include one of the bound set (exact duplicates of prior examples apart)."""
    count = touched(seen, split.bound, apart_from=split.prior)
    if count:
        raise ValueError(
            f"{who} has seen the bound set: {count} of its {len(split.bound)} examples "
            f"were used to train or to score it; train {who} on split.prior alone"
        )


def touched(seen: Tensor, part: Part, *, apart_from: Part) -> int:
    """How many examples of a part are among `seen`, exact duplicates of another part's examples not counted."""
    if not len(part):
        return 0
    known = example_hashes(part)
    own = torch.isin(known, seen) & ~torch.isin(known, example_hashes(apart_from))
    # An example is known by its content and by its origin; either is enough.
    return int(own.reshape(-1, len(part)).any(dim=0).sum())


def write_prior(prior: SpikeSlab, path: Path) -> str:
    """Writes P as safetensors and returns its hash: from now on it is known which P was meant."""
    write_atomically(path, save(flat(prior)))
    return prior.hash


def flat(slab: SpikeSlab) -> dict[str, Tensor]:
    """The tensors of a SpikeSlab by path: keep_prob/NAME, mean/NAME, std/NAME, rest/NAME."""
    parts = {"keep_prob": slab.keep_prob, "mean": slab.mean, "std": slab.std, "rest": slab.rest}
    return {f"{part}/{n}": t.detach().cpu().contiguous() for part, values in parts.items() for n, t in values.items()}


def bounded_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log max(p_y, 1e-4) / log(1e4): cross-entropy in [0, 1], the surrogate of the 0-1 loss under a bound."""
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1).clamp_min(math.log(1e-4)), y) / math.log(1e4)
