"""Commitments: prior, split and plan are sealed before Q exists, Q is sealed before the draws are known.

All draws of a certificate follow from its seeds. Where seeds follow from P and Q alone, an issuer can move one weight
of Q and draw again until the draws are lucky. Under a commitment that is of no use: seeds follow from two seals and
from a beacon, randomness that did not exist when the second seal was published.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from pacprune import bounds
from pacprune.bounds import Ledger
from pacprune.certification import rules
from pacprune.certification.record import CommitmentRecord, Plan, Shares
from pacprune.certification.verify import LEAVES, digest
from pacprune.data.splits import Split, check_split, index_hash
from pacprune.files import write_atomically
from pacprune.masking import attachment
from pacprune.masking.spikeslab import SpikeSlab

FORMAT = "pacprune commitment"
FILE = "commitment.json"
SOURCE = "the first round of drand's default network after the second seal was published"
"""Where the beacon comes from, unless another source is sealed."""


@dataclass(frozen=True)
class Commitment:
    """What is sealed: first the prior, the split and the plan; then Q.

    Args:
        prior: The hash of the prior P.
        split: The hashes of the split's parts and of their index lists.
        plan: What is declared: delta, family, catoni_c, grid, certified, shares, method, tolerance and draws.
        source: Where the beacon will come from, and which one of its values is taken.
        posterior: The hash of Q; None before it is sealed.

    Example:
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.01))
        >>> commitment = pp.commit(pp.read(model), split)
        >>> len(commitment.digest), commitment.posterior
        (64, None)
    """

    prior: str
    split: dict[str, dict[str, str]]
    plan: Plan
    source: str
    posterior: str | None = None

    @property
    def digest(self) -> str:
        """The first seal, SHA-256 in hexadecimal: publish it before Q is trained."""
        return digest({"prior": self.prior, "split": self.split, "plan": self.plan, "source": self.source})

    @property
    def seal(self) -> str:
        """The second seal, of the first one and of Q: publish it before the beacon's value is known."""
        if self.posterior is None:
            raise ValueError("the commitment has no second seal yet; make it by commitment.sealed(model)")
        return digest({"commitment": self.digest, "posterior": self.posterior})

    def sealed(self, model: nn.Module) -> "Commitment":
        """The same commitment with the present Q of a model sealed as well.

        Args:
            model: The trained model with stochastic masks, as it will be certified.

        Returns:
            The commitment for `pp.certify`, whose `seal` is to be published.
        """
        if self.posterior is not None:
            raise ValueError("this commitment has sealed a Q already; a second one would be a second try")
        return replace(self, posterior=attachment.read(model).hash)

    def record(self, beacon: str) -> CommitmentRecord:
        """What a certificate says of it.

        Args:
            beacon: The value that `source` gave, in hexadecimal.

        Returns:
            Plan, source, both seals and beacon.
        """
        value = beacon.strip().lower()
        if not LEAVES["beacon"](value):
            raise ValueError(
                f"beacon is {beacon!r:.80}; give the value of {self.source}, as 16 or more hexadecimal digits"
            )
        return {
            "plan": self.plan,
            "source": self.source,
            "digest": self.digest,
            "seal": self.seal,
            "beacon": value,
        }

    def save(self, folder: str | Path) -> Path:
        """Writes commitment.json, which holds nothing secret.

        Args:
            folder: Where to write; it is made if it is missing.

        Returns:
            The file.
        """
        content = {
            "format": FORMAT,
            "version": 2,
            "prior": self.prior,
            "split": self.split,
            "plan": self.plan,
            "source": self.source,
            "posterior": self.posterior,
            "digest": self.digest,
            "seal": None if self.posterior is None else self.seal,
        }
        path = Path(folder) / FILE
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
        return path


def load(folder: str | Path) -> Commitment:
    """The commitment that `save` wrote."""
    path = Path(folder) / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        commitment = Commitment(*(content[key] for key in ("prior", "split", "plan", "source", "posterior")))
        stated, present = content["digest"], commitment.digest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no commitment ({error}); make one by `pacprune commit`") from error
    if stated != present:
        raise ValueError(f"{path} states the seal {stated[:12]}, but its content has {present[:12]}; it was changed")
    if "shares" not in commitment.plan:
        raise ValueError(
            f"{path} was sealed by a version of pacprune that had another account of delta; certify with that version, "
            "or commit again"
        )
    return commitment


def with_posterior(folder: Path, model: nn.Module) -> Commitment:
    """The commitment in a folder with the model's Q sealed, which is written down if it was not sealed before."""
    commitment = load(folder)
    if commitment.posterior is None:
        commitment = commitment.sealed(model)
        commitment.save(folder)
    return commitment


def commit(
    prior: SpikeSlab,
    split: Split,
    *,
    delta: float = 0.05,
    family: str = "seeger",
    expected_risk: float | None = None,
    grid: int = 1,
    certified: int = 1,
    method: str = "betting",
    tolerance: float | None = None,
    draws: int = 20_000,
    shares: Mapping[str, tuple[int, float]] | None = None,
    group: str | None = None,
    source: str = SOURCE,
) -> Commitment:
    """Seals prior, split and plan of a certificate before Q exists. No seed is sealed: nobody can aim Q at the noise.

    Publish `.digest` where others see all that you publish, and when. Then train Q, seal it by `.sealed(model)`,
    publish `.seal` in the same place, wait for the beacon, and certify.

    Args:
        prior: The prior P, as `pp.read(model)` gives it.
        split: The split whose `bound` examples the certificate will be about.
        delta: Probability with which the certificate may fail, such as 0.05.
        family: The bound to claim: "seeger", "catoni" or "excess".
        expected_risk: A guess of Q's risk for which Catoni's constant is the best; None takes a fixed grid.
        grid: How many priors, fixed in advance, this one is chosen among.
        certified: How many certificates this one may be chosen among.
        method: The bound on the Monte-Carlo error: "betting" or "chernoff".
        tolerance: Sampling stops when the Monte-Carlo slack is at most this; None is as of `pp.certify`.
        draws: The most networks to draw of each of P and Q.
        shares: How delta is divided among several certificates, as of `pp.certify`; None gives this one all of it.
        group: The group of `shares` that this certificate is of.
        source: Where the beacon will come from and which of its values is taken, so that nobody can wait for a lucky
            one. Any public randomness will do, and so will a number that the verifier draws once it has the second
            seal.

    Returns:
        The commitment.

    Raises:
        ValueError: If the plan is not one that can be certified.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.01)))
        >>> commitment = pp.commit(prior, split, draws=200)
        >>> history = pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.01))
        >>> commitment = commitment.sealed(model)
        >>> certificate = pp.certify(model, prior, split, draws=200, commitment=commitment, beacon="9f2c51d0a3b6e874")
        >>> certificate.record["commitment"]["seal"] == commitment.seal
        True
    """
    check_split(split)
    plan = plan_of(
        split,
        delta=delta,
        family=family,
        expected_risk=expected_risk,
        grid=grid,
        certified=certified,
        method=method,
        tolerance=tolerance,
        draws=draws,
        shares=shares,
        group=group,
    )
    check_source(source, commit=True)
    return Commitment(prior.hash, split_hashes(split), plan, source)


def check_source(source: str, *, commit: bool) -> None:
    """Refuses a source that cannot be quoted, and one of its own where nothing is sealed."""
    if not LEAVES["name"](source):
        raise ValueError(f"source is {source!r:.80}; give a line of plain text without double quotes")
    if source != SOURCE and not commit:
        raise ValueError(f"source is {source!r:.80}, but without commit nothing is sealed; ask for commit as well")


def plan_of(
    split: Split,
    *,
    delta: float,
    family: str,
    expected_risk: float | None,
    grid: int,
    certified: int,
    method: str,
    tolerance: float | None,
    draws: int,
    shares: Mapping[str, tuple[int, float]] | None,
    group: str | None,
) -> Plan:
    """The plan with these settings, once it is one that can be certified."""
    rules.check_declared(family, method, expected_risk)
    rules.check_delta(delta)
    declared = rules.checked_shares(shares, group)
    n, ledger = len(split.bound), Ledger.split(delta, grid=grid, certified=certified, share=declared_share(declared))
    constant = None
    if expected_risk is not None:
        constant = bounds.catoni_constant(expected_risk, n=n, kl=0.0, delta=ledger.pac_bayes_each)
    return {
        "delta": delta,
        "family": family,
        "catoni_c": constant,
        "grid": grid,
        "certified": certified,
        "shares": declared,
        "method": method,
        "tolerance": max(1e-3, 0.1 / math.sqrt(n)) if tolerance is None else tolerance,
        "draws": draws,
    }


def declared_share(shares: Shares | None) -> float:
    """What one certificate of its group gets of delta."""
    group = shares and shares["groups"][shares["group"]]
    return group["share"] / group["certificates"] if group else 1.0


def choices(plan: Plan) -> dict[str, Any]:
    """What the plan divides delta by, as `Ledger.split` takes it."""
    return {"grid": plan["grid"], "certified": plan["certified"], "share": declared_share(plan.get("shares"))}


def split_hashes(split: Split) -> dict[str, dict[str, str]]:
    """The hashes of the parts that a certificate rests on, and of their index lists."""
    parts = (split.prior, split.bound, split.unlabelled)
    return {
        "parts": {part.name: part.hash for part in parts},
        "indices": {part.name: index_hash(part) for part in parts},
    }
