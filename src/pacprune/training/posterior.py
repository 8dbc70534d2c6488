"""`fit_posterior`: training Q on the PAC-Bayes bound itself, from a prior P that is written down before."""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from pacprune import bounds
from pacprune.bounds import differentiable
from pacprune.data import trace
from pacprune.data.batches import Objective, example_hashes, label_hashes, reading_once
from pacprune.data.splits import Part, Split, check_split, refuse_overwritten
from pacprune.data.trace import Trace
from pacprune.distributed import ranks, refuse_sharded
from pacprune.files import digest, write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.criteria import plain_rnn
from pacprune.masking.spikeslab import SpikeSlab, kl
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.fit import Cohort
from pacprune.training.loop import groups
from pacprune.training.optim import Optimizer
from pacprune.training.population import per_member
from pacprune.training.step import Stage
from pacprune.types import Data, History, Progress, check_name

# --- What is minimised.


def bounded_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log max(p_y, 1e-4) / log(1e4): cross-entropy in [0, 1], the surrogate of the 0-1 loss under a bound.

    Args:
        logits: Outputs of a network, one row per example.
        y: The classes, one number per example.

    Returns:
        The mean over the examples: 0 where all are certain and right, 1 where all are certain and wrong.

    Example:
        >>> logits = torch.tensor([[100.0, 0.0], [0.0, 0.0]])
        >>> round(float(pp.bounded_cross_entropy(logits, torch.tensor([0, 1]))), 4)
        0.0376
    """
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1).clamp_min(math.log(1e-4)), y) / math.log(1e4)


def seeger(risk: Tensor, divergence: Tensor, n: int, delta: float) -> Tensor:
    """`bounds.seeger` with gradients: kl_inverse(risk, (KL + log(xi(n)/delta)) / n)."""
    return differentiable.kl_inverse(risk, (divergence + math.log(bounds.xi(n) / delta)) / n)


def paper(risk: Tensor, divergence: Tensor, n: int, delta: float) -> Tensor:
    """`bounds.paper` with gradients: risk + min{e + sqrt(e(e + 2 risk)), sqrt(e/2)}.

    e = (KL + log(2 sqrt(n)/delta)) / n.
    """
    excess = (divergence + math.log(2 * math.sqrt(n) / delta)) / n
    return risk + torch.minimum(excess + torch.sqrt(excess * (excess + 2 * risk)), torch.sqrt(excess / 2))


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, int, float], Tensor]] = {"seeger": seeger, "paper": paper}
"""Bounds that `fit_posterior` can train on: (risk, KL, n, delta) -> bound."""


class BoundTraining:
    """What training on a bound does with a batch: its risk, the bound made of that, and the pull of the means to P."""

    def __init__(
        self,
        cohort: Cohort,
        priors: Sequence[SpikeSlab],
        objective: str,
        *,
        n: int,
        delta: float,
        kl_weights: Sequence[float],
    ) -> None:
        self.model, self.members = cohort.trained, cohort.population is not None
        self.prior = stacked(priors) if self.members else priors[0]
        self._bound, self._n, self._delta = OBJECTIVES[objective], n, delta
        self._risks = cohort.objective(Objective(bounded_cross_entropy), check_each=False)
        number = {"dtype": torch.float64, "device": cohort.device}
        self._kl_weight = torch.tensor(kl_weights if self.members else kl_weights[0], **number)
        # Added to the KL, so that its gradient after a backward pass is the price d bound / d KL.
        self._tap = torch.zeros(len(priors) if self.members else (), requires_grad=True, **number)
        kl(attachment.read(self.model, detach=False), self.prior, members=self.members)  # refuses an infinite KL, once

    def set_modes(self) -> None:
        """Freezes BatchNorm and dropout, which are part of what P and Q share; the gates are drawn as in training."""
        self.model.eval()
        for site in attachment.sites(self.model):
            site.sampler.train()

    def risk(self, batch: Any) -> Tensor:
        """The bounded cross-entropy of a batch, of every member."""
        with plain_rnn(self.model):  # the model is in eval mode
            return self._risks(batch)

    def bound(self, risk: Tensor) -> Tensor:
        """The bound at this risk and at the present KL(Q || P)."""
        q = attachment.read(self.model, detach=False)
        # `pull` takes the means' part of the KL; here it only counts.
        fixed = replace(q, mean={name: m.detach() for name, m in q.mean.items()})
        divergence = kl(fixed, self.prior, dtype=torch.float32, members=self.members, check=False)
        return self._bound(risk, self._kl_weight * (divergence + self._tap), self._n, self._delta)

    @torch.no_grad()
    def pull(self, optimizer: Optimizer) -> None:
        """The proximal step of price * KL in the means: m <- (m + h m0)/(1 + h), h = rate * price * keep_prob / std0^2.

        An explicit gradient step would diverge once rate > 2 std0^2 / price, which a small std makes tiny.
        """
        price = ranks.sum_(torch.zeros_like(self._tap) if self._tap.grad is None else self._tap.grad)
        self._tap.grad = None
        for site in attachment.sites(self.model):
            if site.mean.grad is None:  # frozen by the user
                continue
            column = price.float().reshape((-1, *[1] * (site.mean.ndim - 1)) if price.ndim else ())
            std0, mean0 = self.prior.std[site.name], self.prior.mean[site.name]
            h = optimizer.reach(site.mean) * column * torch.sigmoid(site.logit()) / std0**2
            site.mean.copy_(torch.where(torch.isfinite(h), (site.mean + h * mean0) / (1 + h), mean0))


# --- The verb.


@reading_once()
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
    in [0, 1]. P is written to `out` and hashed before the bound set is read, and the model gets a receipt of that;
    `certify` refuses a model without one.

    Args:
        model: A network with stochastic masks, as it was when `prior` was read; or a list of them, each with its prior.
        prior: P, as `pp.read(model)` gives it; it must not have seen split.bound.
        split: Where the bound set, split.bound, comes from.
        config: How to train; lr moves the means, gate_lr the gates.
        delta: The probability with which the bound may fail, such as 0.05.
        objective: The bound to train on: "seeger" (tighter) or "paper".
        kl_weight: What multiplies the KL in what is minimised, and nowhere else: any Q may be certified, and `certify`
            takes the whole KL. 1 trains on the bound itself; where P is weak, 3 gave lower bounds
            (docs/certificate_tables.md).
        budget: Which expected sparsity of Q to hold; None holds none.
        data: Other data to train Q on, which may be anything; n and the KL stay the bound set's. None is split.bound.
        out: The folder that P is written to; None is one that goes when Python ends. A list of one for each model.
        seed: What the order of the data and the draws follow from.
        stage: A name for rows, progress and messages.
        checkpoint: A file that is written after every epoch. A second call with the same arguments goes on from it.
        every: Writes the checkpoint after so many steps, too.
        progress: Called after every step and epoch with (stage, steps done, steps in all, the last epoch's row).

    Returns:
        One row per epoch, as of `fit`; the loss is the bound that was minimised. Every row has the kl_weight, too.

    Raises:
        ValueError: If P has seen the bound set, or if KL(Q || P) is infinite.

    Example:
        >>> mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
        >>> model = pp.attach(model, pp.block_isotropic(model, mask, eps=1e-2, std=0.02))
        >>> prior = pp.read(model)
        >>> history = pp.fit_posterior(model, prior, split, pp.Config(epochs=2, lr=0.02, gate_lr=0.1))
        >>> history[1]["loss"] < history[0]["loss"] < 1
        True

    Several models are trained as a population, and several ranks train together, as with `fit`. Rank 0 writes P, and
    the others wait for that.
    """
    check_name("objective", objective, OBJECTIVES)
    check_split(split)
    refuse_overwritten(split.prior, split.bound)
    cohort = Cohort(model, config, seed)
    count = len(cohort.models)
    kl_weights = _kl_weights(kl_weight, count)
    priors: list[SpikeSlab] = per_member("prior", prior, count)
    _check_priors(cohort.models, priors, split)
    pac_bayes, n = bounds.Ledger.split(delta).pac_bayes, len(split.bound)
    folders, hashes = _write_priors(priors, out)  # no rank goes on to the bound set before
    data = split.bound if data is None else data
    cohort.try_out(data, Objective())
    cohort.stack()
    training = BoundTraining(cohort, priors, objective, n=n, delta=pac_bayes, kl_weights=kl_weights)
    seen = example_hashes(data)
    cohort.mark_seen(data)
    budgets = cohort.budgets(budget)
    definition = Stage(
        name=stage,
        objective=training.risk,
        bound=training.bound,
        groups=groups(cohort.trained, cohort.configs, rest=False),
        set_modes=training.set_modes,
        budgets=budgets,
        stepper=cohort.stepper(None),
        validate=None,
        identity={
            "prior": hashes,
            "n": n,
            "seen": digest({"data": seen, "labels": label_hashes(data)}),
            "delta": delta,
            "objective": objective,
            "kl_weight": kl_weights,
            "budget": None if budgets is None else [entry.record() for entry in budgets],
        },
        members=training.members,
        after=training.pull,
    )

    train_slice = cohort.slices(
        fit_posterior,
        checkpoint,
        members={"prior": priors, "kl_weight": kl_weights, "budget": budgets, "out": folders},
        shared={
            "split": split,
            "delta": delta,
            "objective": objective,
            "data": data,
            "stage": stage,
            "every": every,
            "progress": progress,
        },
    )
    history = cohort.train(data, definition, train_slice, path=checkpoint, every=every, progress=progress)
    for row in history:
        row["kl_weight"] = kl_weights[row.get("member", 0)]
    for member, written, folder in zip(cohort.models, hashes, folders, strict=True):
        weights.notes(member).receipt = {"prior": written, "bound": split.bound.hash, "written": str(folder)}
    return history


def _kl_weights(kl_weight: float | Sequence[float], count: int) -> list[float]:
    """A weight of the KL for every member."""
    kl_weights: list[float] = per_member("kl_weight", kl_weight, count)
    if not all(0 <= weight < math.inf for weight in kl_weights):
        raise ValueError(
            f"kl_weight is {kl_weight}; it must be a number of at least 0: 1 trains on the bound itself, 0 on the risk"
        )
    return kl_weights


# --- The prior.


def _check_priors(models: Sequence[nn.Module], priors: Sequence[SpikeSlab], split: Split) -> None:
    """Refuses models and priors of which there can be no certificate."""
    for model, prior in zip(models, priors, strict=True):
        refuse_sharded(model.parameters(), "certificate")
        attachment.require_sites(model)
        if any(t.requires_grad for t in prior.keep_prob.values()):
            raise ValueError("the prior carries gradients and forgot what it has seen; take it by pp.read(model)")
        refuse_if_touched(prior.seen, split, "the prior")


def _write_priors(
    priors: Sequence[SpikeSlab], out: str | Path | Sequence[str | Path] | None
) -> tuple[list[Path], list[str]]:
    """The folders that rank 0 has written the priors to, and the priors' hashes."""
    if len(priors) > 1 and isinstance(out, (str, Path)):
        raise ValueError(f"out is the one folder {str(out)!r} for {len(priors)} priors; give a list of one for each")
    wanted: list[str | Path | None] = per_member("out", out, len(priors))

    def write() -> tuple[list[Path], list[str]]:
        folders = [Path(tempfile.mkdtemp(dir=_passing().name) if o is None else o) for o in wanted]
        paths = [folder / "prior.safetensors" for folder in folders]
        return folders, [write_prior(prior, path) for prior, path in zip(priors, paths, strict=True)]

    folders, hashes = ranks.on_rank0(write)
    if ranks.rank():  # what rank 0 wrote must be what this one goes on with
        hashes = [prior.hash for prior in priors]
    return folders, hashes


@functools.cache
def _passing() -> "tempfile.TemporaryDirectory[str]":
    """Where priors are written that nobody asked to keep."""
    return tempfile.TemporaryDirectory(prefix="pacprune-")


def write_prior(prior: SpikeSlab, path: Path) -> str:
    """Writes P as safetensors and returns its hash: from now on it is known which P was meant."""
    write_atomically(path, save(flat(prior)))
    return prior.hash


def flat(slab: SpikeSlab) -> dict[str, Tensor]:
    """The tensors of a SpikeSlab by path: keep_prob/NAME, mean/NAME, std/NAME, rest/NAME."""
    parts = {"keep_prob": slab.keep_prob, "mean": slab.mean, "std": slab.std, "rest": slab.rest}
    return {f"{part}/{n}": t.detach().cpu().contiguous() for part, values in parts.items() for n, t in values.items()}


def stacked(slabs: Sequence[SpikeSlab]) -> SpikeSlab:
    """Several distributions over the same tensors as one, with a leading dimension; `rest` and `seen` stay behind."""
    first = slabs[0]

    def stack(part: str) -> dict[str, Tensor]:
        tensors = {name: torch.stack([getattr(slab, part)[name] for slab in slabs]) for name in getattr(first, part)}
        # One std per member has to multiply that member's weights.
        return {n: t.reshape(-1, *[1] * first.mean[n].ndim) if t.ndim == 1 else t for n, t in tensors.items()}

    return replace(first, keep_prob=stack("keep_prob"), mean=stack("mean"), std=stack("std"), rest={})


def refuse_if_touched(seen: Trace, split: Split, who: str) -> None:
    """Raises when the examples `seen` include one of the bound set (duplicates of prior examples apart)."""
    count = touched(seen, split.bound, apart_from=split.prior)
    trained = bool(torch.isin(split.bound.known.labelled, seen.labelled).any())
    if count and not trained and touched(trace.looked(), split.bound, apart_from=split.prior) >= count:
        raise ValueError(
            f"{who} has seen the bound set: something was evaluated on {count} of its {len(split.bound)} examples "
            f"before, and {who} may have been chosen by it; use a split whose bound part was never looked at, in a new "
            f"process, and train {who} before anything is evaluated on split.bound"
        )
    if count:
        raise ValueError(
            f"{who} has seen the bound set: {count} of its {len(split.bound)} examples were used to train, to score or "
            f"to choose it, or could be read by a DataLoader that was; train {who} on split.prior alone, before "
            "anything is evaluated on split.bound"
        )


def touched(seen: Trace, part: Part, *, apart_from: Part) -> int:
    """How many examples of a part are among `seen`, duplicates of another part's examples not counted."""
    if not len(part):
        return 0
    # An example is known by its content and by its origin; either is enough.
    leaks = torch.isin(part.ids, seen.examples) & ~torch.isin(part.ids, apart_from.known.examples)
    near = trace.near_looks(part.x, seen)
    if near.any():
        near &= ~trace.near_copies(part.x, apart_from.x)
    return int((leaks.any(dim=0) | near).sum())
