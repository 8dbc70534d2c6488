"""From counts to bounds: the Monte-Carlo step, and every bound of a certificate with the ledger it is valid under.

A new bound is a function in bounds/risk.py and a row of BOUNDS; verify.py computes it a second time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pacprune import bounds
from pacprune.bounds import Ledger, montecarlo
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import BoundEntry, Draws, Evidence, PacBayesRecord

# --- The Monte-Carlo step.


@dataclass(frozen=True)
class RiskBound:
    """A way from the counts of draws to an upper bound on their Gibbs risk on the whole bound set."""

    upper: Callable[[Counts, float, float], float]
    """Of the counts, the reference network's error rate on the bound set, and delta."""
    at_any_time: bool
    """Whether it holds at every stopping time, so that one may stop drawing when it is good enough."""


def _betting(counts: Counts, reference_risk: float, delta: float) -> float:
    """reference_risk + betting bound of E[(plus - minus)/batch]: the reference network is a control variate."""
    levels, times = np.unique((counts.plus - counts.minus).numpy(), return_counts=True)
    upper = reference_risk + montecarlo.betting_difference(levels / counts.batch, counts=times, delta=delta)
    return min(1.0, max(upper * (1 + 1e-15), 0.0))


def _chernoff(counts: Counts, reference_risk: float, delta: float) -> float:
    """Chernoff's bound, which needs a number of draws that was fixed beforehand."""
    return montecarlo.chernoff(counts.risk, draws=len(counts), delta=delta)


RISK_BOUNDS = {
    "betting": RiskBound(_betting, at_any_time=True),
    "chernoff": RiskBound(_chernoff, at_any_time=False),
}
"""The Monte-Carlo methods that can be declared."""


def summarise(counts: Counts, reference_risk: float, *, delta: float, method: str, seed: int) -> Draws:
    """The Monte-Carlo step in numbers: mean risk and its upper bound by the declared method."""
    return {
        "draws": len(counts),
        "risk": counts.risk,
        "risk_upper": RISK_BOUNDS[method].upper(counts, reference_risk, delta),
        "chernoff": _chernoff(counts, reference_risk, delta),
        "seed": seed,
    }


def slack(counts: Counts, reference_risk: float, risk_upper: float) -> float:
    """How far a bound is above the estimate with the control variate."""
    return risk_upper - (reference_risk + float((counts.plus - counts.minus).double().mean()) / counts.batch)


# --- The bounds.


@dataclass(frozen=True)
class Bound:
    """One bound of a PAC-Bayes certificate."""

    label: str
    """What it is about, for readers."""
    value: Callable[[Evidence, Counts, Ledger], float]
    """Of the evidence, the counts of Q's draws, and the ledger that pays for it."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """What it spends of delta otherwise than `Ledger.split` does by default."""
    claimable: bool = False
    """Whether a certificate may claim it: a bound on the error of a network drawn from Q."""
    needs_unlabelled: bool = False
    """Whether it rests on unlabelled inputs, and is left out without them."""
    needs_fresh: bool = False
    """Whether it is left out when something was evaluated on the bound set before Q was trained."""

    def is_stated(self, evidence: Evidence) -> bool:
        """Whether the evidence allows it."""
        has_inputs, is_fresh = evidence["thresholded"]["inputs"] > 0, evidence["single_draw"]["fresh"]
        return (has_inputs or not self.needs_unlabelled) and (is_fresh or not self.needs_fresh)

    def ledger(self, delta: float, **choices: Any) -> Ledger:
        """How this bound spends delta, with the choices that `Ledger.split` takes: grid, certified and share."""
        return Ledger.split(delta, **self.shares, **choices)


def _gibbs(bound: Callable[..., float]) -> Callable[[Evidence, Counts, Ledger], float]:
    """A bound on the Gibbs risk of Q, at the upper bound of its empirical risk."""

    def value(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
        risk = evidence["monte_carlo"]["posterior"]["risk_upper"]
        return bound(risk, n=evidence["n"], kl=evidence["kl"], delta=ledger.pac_bayes_each)

    return value


_seeger = _gibbs(bounds.seeger)


def _catoni(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    def bound(risk: float, *, n: int, kl: float, delta: float) -> float:
        return bounds.catoni(risk, n=n, kl=kl, delta=delta, c=evidence["catoni_c"])

    return _gibbs(bound)(evidence, counts, ledger)


def _excess(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    plus, minus = counts.plus.numpy() / counts.batch, counts.minus.numpy() / counts.batch
    return bounds.excess_loss(
        reference_errors=evidence["reference"]["errors"],
        plus=montecarlo.betting(plus, delta=ledger.monte_carlo_each / 2),
        minus=montecarlo.betting_lower(minus, delta=ledger.monte_carlo_each / 2),
        n=evidence["n"],
        kl=evidence["kl"],
        delta_reference=ledger.reference_each,
        delta=ledger.pac_bayes_each,
    )


def _q_equals_p(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    risk = evidence["monte_carlo"]["prior"]["risk_upper"]
    return bounds.seeger(risk, n=evidence["n"], kl=0.0, delta=ledger.pac_bayes_each)


def _vote(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    return bounds.vote(_seeger(evidence, counts, ledger))


def _single_draw(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    drawn = evidence["single_draw"]
    return bounds.disintegrated(drawn["errors"], n=evidence["n"], log_ratio=drawn["log_ratio"], delta=ledger.delta_each)


def _thresholded(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    return bounds.agreement(
        _seeger(evidence, counts, ledger),
        disagreements=evidence["thresholded"]["disagreements"],
        m=evidence["thresholded"]["inputs"],
        delta=ledger.unlabelled_each,
    )


def _held_out(evidence: Evidence, counts: Counts, ledger: Ledger) -> float:
    # The thresholded prior is one network for all posteriors of its prior: a choice among them is none among networks.
    return bounds.clopper_pearson(evidence["reference"]["errors"], n=evidence["n"], delta=ledger.prior_each)


_NO_DRAWS = {"monte_carlo_share": 0.0}

BOUNDS = {
    "seeger": Bound("Gibbs, Seeger-Maurer", _seeger, claimable=True),
    "paper": Bound("Gibbs, the paper's theorem (follows from Seeger-Maurer)", _gibbs(bounds.paper)),
    "catoni": Bound("Gibbs, Catoni", _catoni, claimable=True),
    "excess": Bound(
        "Gibbs, excess loss over the thresholded prior", _excess, shares={"reference_share": 0.2}, claimable=True
    ),
    "q_equals_p": Bound("Gibbs of the prior, Q = P", _q_equals_p),
    "vote": Bound("majority vote, twice the Gibbs bound", _vote),
    "single_draw": Bound("one drawn sparse network, disintegrated", _single_draw, shares=_NO_DRAWS, needs_fresh=True),
    "thresholded": Bound(
        "thresholded network, by agreement with Q",
        _thresholded,
        shares={"unlabelled_share": 0.2},
        needs_unlabelled=True,
    ),
    "held_out": Bound("thresholded prior, held-out Clopper-Pearson", _held_out, shares=_NO_DRAWS),
}
"""Every bound by its name in a certificate, in the order of printing."""

FAMILIES = tuple(name for name, bound in BOUNDS.items() if bound.claimable)
"""The bounds of which one is declared beforehand and claimed."""


def all_bounds(evidence: Evidence, counts: Counts, *, delta: float, **choices: Any) -> dict[str, BoundEntry]:
    """Every bound that the evidence allows, each with the ledger that it is valid under by itself."""
    entries: dict[str, BoundEntry] = {}
    # In the file, what rests on unlabelled inputs comes last.
    for name, bound in sorted(BOUNDS.items(), key=lambda row: row[1].needs_unlabelled):
        if bound.is_stated(evidence):
            ledger = bound.ledger(delta, **choices)
            entries[name] = {"bound": bound.value(evidence, counts, ledger), "ledger": ledger.as_dict()}
    return entries


def claimed_bound(record: PacBayesRecord, counts: Counts, *, delta: float, **choices: Any) -> float:
    """The bound of the declared family, had these been the draws of Q and this the delta: both steps pay by it."""
    step = record["monte_carlo"]
    summary = summarise(
        counts,
        record["reference"]["errors"] / record["n"],
        delta=BOUNDS["seeger"].ledger(delta, **choices).monte_carlo_each,
        method=step["method"],
        seed=step["posterior"]["seed"],
    )
    redrawn: PacBayesRecord = {**record, "monte_carlo": {**step, "posterior": summary}}
    return all_bounds(redrawn, counts, delta=delta, **choices)[record["claim"]["family"]]["bound"]
