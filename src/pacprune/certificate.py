"""Certificates: a bound on the error on new data, the numbers behind it, and the rules under which it is given."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from pacprune import bounds, layers, masks, montecarlo, philox, train, weights
from pacprune.batches import device_of
from pacprune.checkpoint import write_atomically
from pacprune.data import Part, Split
from pacprune.evaluate import error, evaluating, mistakes
from pacprune.loop import Progress
from pacprune.spikeslab import SpikeSlab, draw, kl

VERSION = 1
BATCH = 256
"""Bound examples per Monte-Carlo draw."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved about the Gibbs risk of Q, and every number that it follows from.

    `bound` is the certificate (Seeger-Maurer at the Monte-Carlo upper bound of the empirical risk); `paper` is the
    paper's theorem on the same numbers; `q_equals_p` is the bound of the untrained prior, and `held_out` the
    Clopper-Pearson bound of the prior's thresholded network, both on the same examples.
    """

    bound: float
    paper: float
    q_equals_p: float
    held_out: float
    risk: float
    risk_upper: float
    draws: int
    batch: int
    kl: float
    n: int
    ledger: bounds.Ledger
    sparsity: float
    held_out_errors: int
    dataset: str
    split: Mapping[str, Any]
    hashes: Mapping[str, str]
    prior: SpikeSlab
    posterior: SpikeSlab
    errors: tuple[int, ...]

    @property
    def statement(self) -> str:
        """What is proved, in one sentence."""
        return (
            f"With probability at least {100 * (1 - self.ledger.delta):g} % over the draw of the "
            f"{self.n:,} bound examples and of the {self.draws:,} sampled networks, "
            f"the error rate on new data of a network drawn from Q (expected sparsity {self.sparsity:.4f}) "
            f"is at most {_up(self.bound)}."
        )

    @property
    def winner(self) -> str:
        """Which of the three certificates is lowest, in words."""
        if self.held_out < min(self.bound, self.q_equals_p):
            return "use the held-out one: it is tighter here"
        if self.bound < self.q_equals_p:
            return "the posterior earned its KL: its certificate is the lowest"
        return "Q = P is as good: the posterior did not earn its KL here"

    def __str__(self) -> str:
        rows = [
            ("Gibbs certificate (Seeger-Maurer)", self.bound),
            ("the paper's theorem, same numbers", self.paper),
            ("Q = P, nothing trained on the bound set", self.q_equals_p),
            ("held-out (Clopper-Pearson), thresholded prior", self.held_out),
        ]
        lines = [self.statement, ""]
        lines += [f"  {name:<46} {_up(value)}" for name, value in rows]
        lines += [
            "",
            f"  {self.winner}",
            f"  empirical risk {self.risk:.4f} (upper {self.risk_upper:.4f} after {self.draws} draws), "
            f"KL {self.kl:.3f} nats, n = {self.n}",
            f"  {self.ledger}",
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tensors, ready for JSON."""
        skip = ("prior", "posterior", "ledger", "errors")
        plain = {k: v for k, v in vars(self).items() if k not in skip}
        return {
            "version": VERSION,
            "statement": self.statement,
            **plain,
            "ledger": self.ledger.as_dict(),
            "winner": self.winner,
        }

    def save(self, folder: str | Path) -> Path:
        """Writes certificate.json, tensors.safetensors (P, Q and all that is frozen) and draws.json into `folder`."""
        folder = Path(folder)
        tensors = {f"prior/{k}": v for k, v in train.flat(self.prior).items()}
        # `rest` is the same in P and Q by rule, so it is stored once.
        tensors |= {f"posterior/{k}": v for k, v in train.flat(self.posterior).items() if not k.startswith("rest/")}
        content = save(tensors)
        draws = json.dumps({"batch": self.batch, "errors": self.errors}).encode()
        files = {"tensors.safetensors": content, "draws.json": draws}
        for name, data in files.items():
            write_atomically(folder / name, data)
        record = {**self.as_dict(), "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}}
        write_atomically(folder / "certificate.json", (json.dumps(record, indent=2) + "\n").encode())
        return folder


def certify(
    model: nn.Module,
    prior: SpikeSlab,
    split: Split,
    *,
    delta: float = 0.05,
    grid: int = 1,
    draws: int = 2000,
    progress: Progress | None = None,
) -> Certificate:
    """The certificate of the model's present distribution Q against P on split.bound, or a refusal with its reason.

    Refuses when P saw the bound set, when no receipt of `fit_posterior` shows that P was written before the bound set
    was read, when the receipt is for another P or another bound set, or when anything outside Q moved. `grid` is the
    number of priors, fixed in advance, among which this one was chosen; each pays delta / grid. The random draws follow
    from the hashes of P and Q, so certifying twice gives the same certificate.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 sampled network is needed, and 2000 are usual")
    posterior = layers.read(model)
    _refuse(model, prior, posterior, split)
    ledger, n = bounds.Ledger.split(delta, grid=grid), len(split.bound)
    plain = layers.harden(copy.deepcopy(model))
    prior_hash, posterior_hash = prior.hash, posterior.hash
    seeds = {purpose: _seed(prior_hash, posterior_hash, purpose) for purpose in ("posterior draws", "prior draws")}
    errors = _monte_carlo(plain, posterior, split.bound, draws, seeds["posterior draws"], progress, "certify Q")
    prior_errors = _monte_carlo(plain, prior, split.bound, draws, seeds["prior draws"], progress, "certify P")
    batch = min(BATCH, n)
    risk_upper = montecarlo.betting([e / batch for e in errors], delta=ledger.monte_carlo_each)
    prior_upper = montecarlo.betting([e / batch for e in prior_errors], delta=ledger.monte_carlo_each)
    divergence = math.nextafter(float(kl(posterior, prior)) * (1 + 1e-12), math.inf)
    common = {"n": n, "delta": ledger.pac_bayes_each}
    wrong = _held_out_errors(plain, prior, split.bound)
    return Certificate(
        bound=bounds.seeger(risk_upper, kl=divergence, **common),
        paper=bounds.paper(risk_upper, kl=divergence, **common),
        q_equals_p=bounds.seeger(prior_upper, kl=0.0, **common),
        held_out=bounds.clopper_pearson(wrong, n=n, delta=ledger.delta_each),
        risk=sum(errors) / (batch * draws),
        risk_upper=risk_upper,
        draws=draws,
        batch=batch,
        kl=divergence,
        n=n,
        ledger=ledger,
        sparsity=posterior.sparsity,
        held_out_errors=wrong,
        dataset=split.dataset,
        split={
            "seed": split.seed,
            "prior_fraction": split.prior_fraction,
            "prior": len(split.prior),
            "bound": n,
            "unlabelled": len(split.unlabelled),
            "duplicates": split.duplicates,
            "mean": list(split.mean),
            "std": list(split.std),
            "files": dict(split.files),
        },
        hashes={
            "prior": prior_hash,
            "posterior": posterior_hash,
            "rest": _rest_hash(prior),
            "prior_part": split.prior.hash,
            "bound_part": split.bound.hash,
        },
        prior=prior,
        posterior=posterior,
        errors=tuple(errors),
    )


def _refuse(model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split) -> None:
    """Raises with the first rule that is broken."""
    train.refuse_if_seen(prior, split)
    receipt = weights.notes(model).get("receipt")
    if receipt is None:
        raise ValueError(
            "there is no receipt that the prior was written before the bound set was read; "
            "train Q with pp.fit_posterior (epochs=0 will do when Q = P)"
        )
    for name, own, given in (
        ("prior", receipt["prior"], prior.hash),
        ("bound set", receipt["bound"], split.bound.hash),
    ):
        if own != given:
            raise ValueError(
                f"fit_posterior was run with another {name} ({own[:12]}) than the one given ({given[:12]}); "
                "use the same one"
            )
    for name, value in prior.rest.items():
        if not torch.equal(value, posterior.rest[name].to(value.device)):
            raise ValueError(
                f"{name} lies outside Q but differs from its value in the prior; everything but Q must stay frozen"
            )


def _seed(prior_hash: str, posterior_hash: str, purpose: str) -> int:
    """The first 63 bits of SHA-256(prior hash, posterior hash, purpose): nobody can fish for a lucky seed."""
    digest = hashlib.sha256(f"{prior_hash}/{posterior_hash}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _monte_carlo(
    plain: nn.Module, slab: SpikeSlab, bound: Part, draws: int, seed: int, progress: Progress | None, stage: str
) -> list[int]:
    """Errors of draw t = 0, 1, ... on its own minibatch, drawn independently with replacement from the bound set."""
    device = device_of(plain)
    x, y, batch, n = bound.x.to(device), bound.y.to(device), min(BATCH, len(bound)), len(bound)
    own = dict(plain.named_parameters())
    found = []
    with evaluating(plain):
        for t in range(draws):
            for name, value in draw(slab, seed=seed, step=t).items():
                own[name].copy_(value)
            # 64 random bits modulo n: the bias is below n / 2**62.
            word = philox.words(2 * batch, seed=seed, step=t, stream=philox.BATCH)
            index = ((word[0::2] << 31) ^ word[1::2]).remainder(n).to(device)
            found.append(int(mistakes(plain(x[index]), y[index]).sum()))
            if progress:
                progress(stage, t + 1, draws, {})
    return found


def _held_out_errors(plain: nn.Module, prior: SpikeSlab, bound: Part) -> int:
    """Mistakes of the prior's thresholded network (top k of keep_prob, ties by magnitude) on the bound set."""
    ties = {name: m.abs() for name, m in prior.mean.items()}
    mask = masks.top_k(prior.keep_prob, sparsity=prior.sparsity, ties=ties, total=prior.total)
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, keep in mask.items():
            own[name].copy_(torch.where(keep, prior.mean[name], 0.0))
    return round(error(plain, bound) * len(bound))


def _rest_hash(slab: SpikeSlab) -> str:
    empty: dict[str, Tensor] = {}
    return SpikeSlab(empty, empty, empty, slab.rest, slab.total).hash


def _up(value: float) -> str:
    """Four digits, rounded up: a certificate must not be rounded in its own favour."""
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
