"""Training in words of the method: `fit` in whatever state the model is, `fit_posterior` on the PAC-Bayes bound."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from pacprune import bounds, layers, weights
from pacprune.batches import Data, batches, device_of, forked, labels, rows, tensors
from pacprune.budget import Budget
from pacprune.checkpoint import digest, write_atomically
from pacprune.data import Part, Split
from pacprune.evaluate import mean_loss
from pacprune.loop import Config, History, Progress, Run, groups, loop
from pacprune.scores import Loss, plain_rnn
from pacprune.spikeslab import SpikeSlab, kl

OBJECTIVES = ("seeger", "paper")


def fit(
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    loss: Loss = F.cross_entropy,
    budget: Budget | None = None,
    validation: Data | None = None,
    seed: int = 0,
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
    """
    value = check(model, data, loss)
    if budget is not None and not layers.sites(model):
        raise ValueError(
            "a budget holds the keep probabilities of stochastic masks; call pp.attach(model, spikeslab) first"
        )
    seen = {"data": rows(data), **({} if validation is None else {"validation": rows(validation)})}
    for known in seen.values():
        weights.mark_seen(model, known)
    # `check` saw the labels of tensors only; on an accelerator, looking at every batch would cost a stop.
    look = loss is F.cross_entropy and tensors(data) is None and device_of(model).type == "cpu"

    def objective(x: Tensor, y: Tensor) -> Tensor:
        try:
            out = model(x)
        except ValueError as failure:
            if len(x) > 1:
                raise
            raise ValueError(
                "a batch holds 1 example, of which BatchNorm has no variance; give the DataLoader drop_last=True, or "
                "batches of 2 or more"
            ) from failure
        if look:
            _check_labels(y, out)
        return loss(out, y)

    run = Run(
        stage=stage,
        objective=objective,
        groups=groups(model, config, rest=True),
        enter=model.train,
        budget=budget,
        validate=None if validation is None else lambda: mean_loss(model, validation, loss=loss),
        identity={
            "budget": None if budget is None else asdict(budget),
            # The name alone would take one lambda, or one setting of a loss, for another.
            "loss": [repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", ""), value],
            "seen": digest(seen),
            "labels": [digest({"y": labels(one)}) for one in (data, validation) if one is not None],
        },
    )
    return loop(model, data, config, run, seed=seed, path=checkpoint, every=every, progress=progress)


def fit_posterior(
    model: nn.Module,
    prior: SpikeSlab,
    split: Split,
    config: Config,
    *,
    delta: float = 0.05,
    objective: str = "seeger",
    budget: Budget | None = None,
    data: Data | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    stage: str = "posterior",
    checkpoint: str | Path | None = None,
    every: int | None = None,
    progress: Progress | None = None,
) -> History:
    """Trains the posterior Q from the prior P on the PAC-Bayes bound itself, with everything outside Q frozen.

    The risk in the bound is the cross-entropy with probabilities clamped at 1e-4, divided by log(1e4), so that it lies
    in [0, 1]. Refuses when P has seen the bound set; writes P to `out` (default: a new temporary folder) and hashes it
    before the bound set is read; leaves a receipt without which `certify` refuses. `objective` is "seeger" or "paper".
    A `budget` holds the expected sparsity of Q. `data` may be other training data (Q may be trained on anything); n
    and the KL stay the bound set's.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    layers.attached(model)
    refuse_if_touched(prior.seen, split, "the prior")
    ledger = bounds.Ledger.split(delta)
    where = Path(tempfile.mkdtemp(prefix="pacprune-") if out is None else out)
    prior_hash = write_prior(prior, where / "prior.safetensors")
    n = len(split.bound)

    # Added to the KL, so that its gradient after a backward pass is the price d bound / d KL.
    tap = torch.zeros((), dtype=torch.float64, device=device_of(model), requires_grad=True)

    def bound(x: Tensor, y: Tensor) -> Tensor:
        with plain_rnn(model):  # the model is in eval mode
            risk = bounded_cross_entropy(model(x), y)
        q = layers.read(model, detach=False)
        # `pull` takes the means' part of the KL; here it only counts.
        fixed = replace(q, mean={name: m.detach() for name, m in q.mean.items()})
        divergence = kl(fixed, prior, dtype=torch.float32) + tap
        if objective == "seeger":
            constant = math.log(bounds.xi(n) / ledger.pac_bayes)
            return _KlInverse.apply(risk, (divergence + constant) / n)
        excess = (divergence + math.log(2 * math.sqrt(n) / ledger.pac_bayes)) / n
        return risk + torch.minimum(excess + torch.sqrt(excess * (excess + 2 * risk)), torch.sqrt(excess / 2))

    @torch.no_grad()
    def pull(rate: Callable[[nn.Parameter], Any]) -> None:
        """The proximal step of price * KL in the means: m <- (m + h m0)/(1 + h), h = rate * price * keep_prob / std0^2.

        An explicit gradient step would diverge once rate > 2 std0^2 / price, which a small std makes tiny.
        """
        price, tap.grad = 0.0 if tap.grad is None else tap.grad.float(), None
        for site in layers.attached(model):
            if site.mean.grad is None:  # frozen by the user
                continue
            h = rate(site.mean) * price * torch.sigmoid(site.logit()) / prior.std[site.name] ** 2
            mean0 = prior.mean[site.name]
            site.mean.copy_(torch.where(torch.isfinite(h), (site.mean + h * mean0) / (1 + h), mean0))

    def enter() -> None:
        model.eval()  # BatchNorm and dropout are part of what P and Q share: frozen
        for site in layers.attached(model):
            site.sampler.train()

    data = split.bound if data is None else data
    check(model, data, F.cross_entropy)
    known = rows(data)
    weights.mark_seen(model, known)
    run = Run(
        stage=stage,
        objective=bound,
        groups=groups(model, config, rest=False),
        enter=enter,
        budget=budget,
        validate=None,
        identity={
            "prior": prior_hash,
            "n": n,
            "seen": digest({"data": known, "labels": labels(data)}),
            "delta": delta,
            "objective": objective,
            "budget": None if budget is None else asdict(budget),
        },
        after=pull,
    )
    history = loop(model, data, config, run, seed=seed, path=checkpoint, every=every, progress=progress)
    weights.notes(model)["receipt"] = {"prior": prior_hash, "bound": split.bound.hash, "written": str(where)}
    return history


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
    known = rows(part)
    own = torch.isin(known, seen) & ~torch.isin(known, rows(apart_from))
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


class _KlInverse(torch.autograd.Function):
    """p = kl_inverse(q, c); implicitly, dp/dc = p(1-p)/(p-q) and dp/dq = dp/dc * log(p(1-q)/(q(1-p)))."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, c: Tensor) -> Tensor:
        risk = min(max(float(q), 1e-9), 1 - 1e-9)
        p = min(bounds.kl_inverse(risk, float(c)), 1 - 1e-12)
        slope = p * (1 - p) / max(p - risk, 1e-12)
        ctx.slopes = (slope * math.log(p * (1 - risk) / (risk * (1 - p))), slope)
        return torch.tensor(p, dtype=q.dtype, device=q.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] * ctx.slopes[0], gradients[0] * ctx.slopes[1]


def check(model: nn.Module, data: Data, loss: Loss) -> str:
    """One forward pass before anything is changed: shapes, labels and weights are told apart from bad luck later.

    Returns the value of a loss of the user's own on that batch, to the bit: a name does not tell two losses apart.
    """
    pair, device = tensors(data), device_of(model)
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            raise ValueError(f"{name} holds NaN or infinite values before training; start from other weights")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("every parameter has requires_grad=False, so nothing would be trained; unfreeze some")
    with weights.modes_kept(model), forked(device, data, seed=0):
        model.eval()
        x, y = next(batches(data, 2, device=device, limit=2))
        with torch.no_grad():
            out = _outputs(model, x)
        if loss is F.cross_entropy:
            _check_labels(y if pair is None else pair[1], out)
            return ""
        try:
            return float(loss(out, y)).hex()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as failure:
            shape = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            reason = str(failure).partition("\n")[0]
            raise ValueError(
                f"the loss gave no number for outputs of shape {shape} and labels of shape {tuple(y.shape)} "
                f"({y.dtype}): {reason}"
            ) from failure


def _outputs(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except RuntimeError as failure:
        own = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if not x.is_floating_point() or x.dtype in own:
            raise
        raise ValueError(
            f"x is {x.dtype} but the model's parameters are {', '.join(sorted(map(str, own)))}; "
            "cast the data or the model"
        ) from failure


def _check_labels(y: Tensor, out: Any) -> None:
    """What F.cross_entropy takes: class numbers, or probabilities of the classes."""
    if not isinstance(out, Tensor):
        raise ValueError(f"the model returns a {type(out).__name__}; make it return its outputs alone, or give a loss=")
    expected = (len(y), *out.shape[2:])
    if y.is_floating_point():
        if y.shape[1:] != out.shape[1:] or out.ndim < 2:
            raise ValueError(
                f"labels are {y.dtype} of shape {tuple(y.shape)} and outputs {tuple(out.shape)}; for classes use "
                "y.long(), for regression give loss=torch.nn.functional.mse_loss"
            )
        return
    if y.shape != expected or out.ndim < 2 or y.dtype not in (torch.int64, torch.uint8):
        raise ValueError(
            f"labels are {y.dtype} of shape {tuple(y.shape)}, but cross_entropy on outputs {tuple(out.shape)} takes "
            f"int64 of shape {expected}; use y.long(), y.squeeze(1), or your own loss="
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= out.shape[1]:
        raise ValueError(
            f"labels run from {low} to {high}, but the model has {out.shape[1]} outputs "
            f"(labels 0 to {out.shape[1] - 1}); change the labels or the last layer"
        )
