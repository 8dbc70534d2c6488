"""`choose`: any number of posteriors of one prior are tried on the bound set, and the best is certified at no price.

A PAC-Bayes bound holds for all posteriors of one prior at once, so that a choice among them costs nothing. What would
cost are Monte-Carlo draws that were chosen by: those that choose are of another stream than those that certify.
"""

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from pacprune.certification import drawn_networks, rules
from pacprune.certification.bounds_table import BOUNDS, FAMILIES
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import BATCH, certify
from pacprune.certification.commitment import choices, plan_of
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import Evidence, Plan
from pacprune.data.splits import Split, check_split
from pacprune.masking import attachment
from pacprune.masking.spikeslab import SpikeSlab, kl
from pacprune.types import Progress, Table


@dataclass(frozen=True, eq=False)
class Choice:
    """The best of several posteriors of one prior, its certificate, and what was tried.

    Args:
        name: The name of the best one.
        model: The network that draws from it.
        certificate: Its certificate, by draws that no choice was made by.
        table: A row for each posterior that was tried: name, sparsity, risk, kl and bound. Risk and bound are estimates
            by the draws that chose; they are no certificates.

    Example:
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.01))
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> prior = pp.read(model)
        >>> history = pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
        >>> choice = pp.choose({"Q = P": model}, prior, split, draws=200, choosing_draws=50)
        >>> choice.name, len(choice.table)
        ('Q = P', 1)
    """

    name: str
    model: nn.Module
    certificate: Certificate
    table: Table

    def __repr__(self) -> str:
        return f"Choice({self.name!r} of {len(self.table)} posteriors, {self.certificate!r})"

    def __str__(self) -> str:
        lines = [f"   {'posterior':<24} {'sparsity':>8} {'risk':>7} {'KL':>9} {'bound':>7}  (estimates that chose)"]
        for row in self.table:
            arrow, name = "->" if row["name"] == self.name else "  ", f"{row['name']:<24.24}"
            numbers = f"{row['sparsity']:8.4f} {row['risk']:7.4f} {row['kl']:9.3f} {row['bound']:7.4f}"
            lines.append(f"{arrow} {name} {numbers}")
        return "\n".join([*lines, "", str(self.certificate)])


def choose(
    models: Mapping[str, nn.Module] | Iterable[tuple[str, nn.Module]],
    prior: SpikeSlab,
    split: Split,
    *,
    delta: float = 0.05,
    family: str = "seeger",
    expected_risk: float | None = None,
    grid: int = 1,
    method: str = "betting",
    tolerance: float | None = None,
    draws: int = 20_000,
    choosing_draws: int = 2_000,
    name: str | None = None,
    declare: str | None = None,
    shares: Mapping[str, tuple[int, float]] | None = None,
    group: str | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Tries any number of posteriors of one prior on split.bound, and certifies the best at no price.

    With probability 1 - delta_pb over the bound examples, kl(risk on them || risk) <= (KL(Q||P) + log(xi(n)/delta_pb))
    / n for all Q at once: learning rates, stopping times, stds, sparsities and kl_weight may be chosen by the bound
    (Seeger 2002; Maurer 2004). The choice is made by draws of its own; the certificate takes fresh ones.

    Args:
        models: Networks with stochastic masks by name, each trained by `fit_posterior` from this prior. Or pairs of
            name and network, made one after another, such as by a generator that trains one network anew each time.
        prior: The prior P of all of them.
        split: The split that P and all Q were trained on.
        delta: Probability with which the certificate may fail, such as 0.05.
        family: The bound to choose by and to claim, declared beforehand: "seeger", "catoni" or "excess".
        expected_risk: A guess of the risk, made without the bound set, for which Catoni's constant is the best.
        grid: How many priors, fixed in advance, this one was chosen among; delta is divided by it.
        method: The bound on the Monte-Carlo error: "betting" or "chernoff".
        tolerance: Sampling stops when the Monte-Carlo slack is at most this, as of `pp.certify`.
        draws: The most networks to draw of each of P and the best Q for the certificate.
        choosing_draws: Networks to draw of every Q to choose by, with the same noise for all.
        name: Which network it is, for verifiers: one of pacprune's models ("mlp"), or package.module:factory; or None.
        declare: What shaped the prior, where pacprune cannot trace it to split.prior, in one sentence.
        shares: How delta is divided among several certificates, as of `pp.certify`.
        group: The group of `shares` that this certificate is of.
        progress: Called as progress(stage, done, total, row) while networks are drawn.

    Returns:
        The best posterior with its certificate, and the table of what was tried. Under a commitment: seal
        `choice.model`, and certify that by `pp.certify` once the beacon is known.

    Raises:
        ValueError: If there is nothing to choose from, if a posterior is of another prior or moved what lies outside Q,
            or if the claim is about a single network, for which choosing has a price.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=2, lr=0.1))
        >>> prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.02)))
        >>> def posteriors():
        ...     for weight in (0.5, 1.0, 2.0):
        ...         pp.attach(pp.harden(model), prior)
        ...         pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.02), kl_weight=weight)
        ...         yield f"kl_weight {weight}", model
        >>> choice = pp.choose(posteriors(), prior, split, draws=200, choosing_draws=50)
        >>> choice.certificate.ledger.certified, [row["name"] for row in choice.table]
        (1, ['kl_weight 0.5', 'kl_weight 1.0', 'kl_weight 2.0'])
    """
    refuse_networks(family)
    check_split(split)
    settings: dict[str, Any] = {
        "delta": delta,
        "family": family,
        "expected_risk": expected_risk,
        "grid": grid,
        "method": method,
        "tolerance": tolerance,
        "draws": draws,
        "shares": shares,
        "group": group,
    }
    plan = plan_of(split, certified=1, **settings)
    declaration = rules.checked_declaration(declare)
    rules.refuse_split(split)
    rules.refuse_repeats(split, declaration)
    rules.refuse_untraced_prior(prior, split, declaration)
    trial = _Trial(prior, split, plan, choosing_draws, progress)
    best: tuple[str, nn.Module] | None = None
    table: Table = []
    for label, model in _pairs(models):
        table.append(trial.row(label, model, table))
        if best is None or table[-1]["bound"] < min(row["bound"] for row in table[:-1]):
            # What a generator gives may be trained on; what a mapping holds is the user's own.
            best = label, model if isinstance(models, Mapping) else copy.deepcopy(model)
    if best is None:
        raise ValueError("there is no posterior to choose from; train at least one from this prior by pp.fit_posterior")
    certificate = certify(best[1], prior, split, name=name, declare=declare, progress=progress, **settings)
    return Choice(*best, certificate, table)


def refuse_networks(family: str) -> None:
    """Refuses to choose by a bound on a single network: that of the best of m holds at delta/m."""
    if family in BOUNDS and family not in FAMILIES:
        raise ValueError(
            f"family is {family!r}, whose choice has a price: the best of m networks holds at delta/m; choose by one "
            f"of {', '.join(FAMILIES)}, or certify every one by pp.certify(..., certified=m)"
        )


def _pairs(models: Mapping[str, nn.Module] | Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Names and networks; one network, or a list without names, is refused."""
    if isinstance(models, nn.Module):
        raise ValueError('models is one network; give networks by name, such as {"lr 0.01": model}')
    pairs: Any = models.items() if isinstance(models, Mapping) else models
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"a posterior is given as {type(pair).__name__}; give (name, network), or networks by name"
            )
        yield pair


class _Trial:
    """How one posterior after another is tried: by draws with the same noise, on the same minibatches."""

    def __init__(
        self, prior: SpikeSlab, split: Split, plan: Plan, choosing_draws: int, progress: Progress | None
    ) -> None:
        self.prior, self.split, self.plan, self.progress = prior, split, plan, progress
        self.choosing_draws = choosing_draws
        # No certificate has a seed of this purpose, and it is the same for all posteriors.
        words = f"{prior.hash}/{split.bound.hash}/choosing draws"
        self.seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1
        self.reference: Tensor | None = None
        """Which bound examples the reference network, the thresholded prior, gets wrong."""

    def row(self, label: str, model: nn.Module, table: Table) -> dict[str, Any]:
        """The numbers of a posterior, once it is one of this prior and has a name of its own."""
        if any(label == row["name"] for row in table):
            raise ValueError(f"two posteriors have the name {label!r}; give each a name of its own")
        try:
            attachment.require_sites(model)
            posterior = attachment.read(model)
            rules.refuse_seen_unlabelled(posterior, self.split)
            rules.refuse_without_receipt(model, self.prior, self.split)
            rules.refuse_moved_rest(self.prior, posterior)
            nats = float(kl(posterior, self.prior))
        except ValueError as error:
            raise ValueError(f"posterior {label!r}: {error}") from error
        counts = self._counts(label, model, posterior)
        risk = self._reference_risk + float((counts.plus - counts.minus).double().mean()) / counts.batch
        risk = min(1.0, max(0.0, risk))
        numbers = {"name": label, "sparsity": posterior.sparsity, "risk": risk, "kl": nats}
        return numbers | {"bound": self._estimate(risk, nats, counts)}

    @property
    def _reference_risk(self) -> float:
        assert self.reference is not None
        return int(self.reference.sum()) / len(self.reference)

    def _counts(self, label: str, model: nn.Module, posterior: SpikeSlab) -> Counts:
        bound = self.split.bound
        plain = attachment.harden(copy.deepcopy(model))
        if self.reference is None:
            self.reference = drawn_networks.errors(plain, drawn_networks.thresholded(self.prior), bound)
        return drawn_networks.monte_carlo(
            plain,
            posterior,
            bound,
            self.reference,
            seed=self.seed,
            batch=min(BATCH, len(bound)),
            draws=self.choosing_draws,
            stage=f"trying {label}",
            progress=self.progress,
            over_ranks=True,
        )

    def _estimate(self, risk: float, nats: float, counts: Counts) -> float:
        """The declared bound at the estimated risk."""
        plan, errors = self.plan, int(cast(Tensor, self.reference).sum())
        evidence = {
            "n": len(self.split.bound),
            "kl": math.nextafter(nats, math.inf),
            "catoni_c": plan["catoni_c"],
            "reference": {"errors": errors},
            "monte_carlo": {"posterior": {"risk_upper": risk}},
        }
        bound = BOUNDS[plan["family"]]
        return bound.value(cast(Evidence, evidence), counts, bound.ledger(plan["delta"], **choices(plan)))
