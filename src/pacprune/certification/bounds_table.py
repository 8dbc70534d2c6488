"""From counts to bounds: the Monte-Carlo step, and every bound of a certificate with the ledger it is valid under."""

from typing import Any

import numpy as np

from pacprune import bounds
from pacprune.bounds import Ledger, montecarlo
from pacprune.certification.drawn_networks import Counts

METHODS = ("betting", "chernoff")


def ledgers(delta: float, *, grid: int, certified: int) -> dict[str, Ledger]:
    """How each kind of bound spends the same delta, divided by the number of certificates to choose among."""
    shares = {"grid": grid, "certified": certified}
    return {
        "gibbs": Ledger.split(delta, **shares),
        "excess": Ledger.split(delta, reference_share=0.2, **shares),
        "thresholded": Ledger.split(delta, unlabelled_share=0.2, **shares),
        "one": Ledger.split(delta, monte_carlo_share=0.0, **shares),
    }


def summarise(counts: Counts, reference_errors: int, n: int, delta: float, method: str = "betting") -> dict[str, Any]:
    """The Monte-Carlo step: mean risk and its upper bound by betting with the control variate, or by Chernoff.

    betting: reference's error rate on all n examples + betting bound of E[(plus - minus)/batch], valid at any stopping
    time. Chernoff's bound, always shown, is valid for a number of draws that was fixed beforehand.
    """
    difference = (counts.plus - counts.minus).numpy()
    levels, times = np.unique(difference, return_counts=True)
    upper = reference_errors / n + montecarlo.betting_difference(levels / counts.batch, counts=times, delta=delta)
    mean = int(counts.wrong.sum()) / (len(counts) * counts.batch)
    chernoff = montecarlo.chernoff(mean, draws=len(counts), delta=delta)
    return {
        "draws": len(counts),
        "risk": mean,
        "risk_upper": chernoff if method == "chernoff" else min(1.0, max(upper * (1 + 1e-15), 0.0)),
        "chernoff": chernoff,
    }


def slack(counts: Counts, reference_errors: int, n: int, delta: float) -> float:
    """How far the betting bound is above the estimate with the control variate, which is what it is about."""
    estimate = reference_errors / n + float((counts.plus - counts.minus).double().mean()) / counts.batch
    return summarise(counts, reference_errors, n, delta)["risk_upper"] - estimate


def all_bounds(record: dict[str, Any], ledgers: dict[str, Ledger], counts: Counts) -> dict[str, Any]:
    """Every bound of a PAC-Bayes certificate, with the ledger that it is valid under by itself."""
    n, kl = record["n"], record["kl"]
    q, p = (record["monte_carlo"][whose]["risk_upper"] for whose in ("posterior", "prior"))
    gibbs_ledger, excess, transfer, one = (ledgers[key] for key in ("gibbs", "excess", "thresholded", "one"))
    delta = gibbs_ledger.pac_bayes_each
    plus, minus = (getattr(counts, what).numpy() / counts.batch for what in ("plus", "minus"))
    seeger = bounds.seeger(q, n=n, kl=kl, delta=delta)
    found = {
        "seeger": (seeger, gibbs_ledger),
        "paper": (bounds.paper(q, n=n, kl=kl, delta=delta), gibbs_ledger),
        "catoni": (bounds.catoni(q, n=n, kl=kl, delta=delta, c=record.get("catoni_c")), gibbs_ledger),
        "excess": (
            bounds.excess_loss(
                reference_errors=record["reference"]["errors"],
                plus=montecarlo.betting(plus, delta=excess.monte_carlo_each / 2),
                minus=montecarlo.betting_lower(minus, delta=excess.monte_carlo_each / 2),
                n=n,
                kl=kl,
                delta_reference=excess.reference_each,
                delta=excess.pac_bayes_each,
            ),
            excess,
        ),
        "q_equals_p": (bounds.seeger(p, n=n, kl=0.0, delta=delta), gibbs_ledger),
        "vote": (bounds.vote(seeger), gibbs_ledger),
        "single_draw": (
            bounds.disintegrated(
                record["single_draw"]["errors"], n=n, log_ratio=record["single_draw"]["log_ratio"], delta=one.delta_each
            ),
            one,
        ),
        "held_out": (bounds.clopper_pearson(record["reference"]["errors"], n=n, delta=one.delta_each), one),
    }
    if record["thresholded"]["inputs"]:
        found["thresholded"] = (
            bounds.agreement(
                bounds.seeger(q, n=n, kl=kl, delta=transfer.pac_bayes_each),
                disagreements=record["thresholded"]["disagreements"],
                m=record["thresholded"]["inputs"],
                delta=transfer.unlabelled_each,
            ),
            transfer,
        )
    return {key: {"bound": value, "ledger": ledger.as_dict()} for key, (value, ledger) in found.items()}
