"""Issuing certificates: the rules are checked, networks are drawn and counted, and the bounds follow."""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import bounds
from pacprune._version import __version__
from pacprune.bounds import Ledger
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import bounds_table, drawn_networks, risks, rules, tries
from pacprune.certification.bounds_table import BOUNDS, RISK_BOUNDS
from pacprune.certification.certificate import Certificate, beside_the_claim, percent, rounded_down
from pacprune.certification.commitment import Commitment, choices, plan_of, split_hashes
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import (
    FORMAT,
    VERSION,
    BoundEntry,
    CommitmentRecord,
    Conclusion,
    Draws,
    Evaluation,
    Evidence,
    HeldOutRecord,
    PacBayesRecord,
    Plan,
    Provenance,
    SingleDraw,
    Thresholded,
)
from pacprune.certification.tries import Tries
from pacprune.certification.verify import assumptions, digest
from pacprune.data import trace
from pacprune.data.splits import Split, check_split
from pacprune.distributed import ranks
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_masks, draw_weights, kl_per_layer, log_ratio
from pacprune.training.posterior import flat, touched
from pacprune.types import Progress

BATCH = 25
"""Bound examples per Monte-Carlo draw: at equal cost, many small batches give a tighter bound than few large ones."""
EVALUATION: Evaluation = {"mode": "eval", "dtype": "float32", "autocast": False, "tf32": False, "augmentation": False}


def certify(
    model: nn.Module,
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
    name: str | None = None,
    declare: str | None = None,
    shares: Mapping[str, tuple[int, float]] | None = None,
    group: str | None = None,
    commitment: Commitment | None = None,
    beacon: str | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Certifies the model's present distribution Q against P on split.bound, or refuses with the reason.

    It refuses when P saw the bound set, or something that pacprune cannot trace. It refuses without a receipt of
    `fit_posterior`, which shows that this P was written before this bound set was read. It refuses when anything
    outside Q moved.
    All seeds follow from the hashes of P and Q, or from a commitment: certifying twice gives the same certificate.
    Every certificate on a pool of examples is counted, and the count is printed with it (see certification/tries.py).
    Under torchrun all ranks call it; they share the draws, and get one certificate.

    Args:
        model: A model with stochastic masks, trained by `fit_posterior`; its present gates and means are Q.
        prior: The prior P that `fit_posterior` started from.
        split: The split that P and Q were trained on; the bound is about its `bound` examples.
        delta: Probability with which the certificate may fail, such as 0.05.
        family: The bound to claim, declared beforehand: "seeger", "catoni" or "excess".
        expected_risk: A guess of Q's risk, made without the bound set, for which Catoni's constant is the best.
            None takes the best constant of a fixed grid, which costs log 20 nats.
        grid: How many priors, fixed in advance, this one was chosen among; delta is divided by it.
        certified: How many certificates of posteriors of this prior, made by one plan, this one may be chosen among.
            The theorem holds for all of them at once; draws, inputs and single networks pay, each delta / certified.
        method: The bound on the Monte-Carlo error. "betting" may stop when it is good enough; "chernoff" makes all
            `draws`.
        tolerance: Sampling stops when the Monte-Carlo slack is at most this. None is 0.001, or 0.1/sqrt(n) where that
            is more, since n examples cannot tell finer.
        draws: The most networks to draw of each of P and Q.
        name: Which network it is, for verifiers: one of pacprune's models ("mlp"), or package.module:factory; or None.
        declare: What shaped the prior, where pacprune cannot trace it to split.prior, in one sentence. The
            certificate's own sentence quotes it.
        shares: How delta is divided among the certificates of a plan that was declared beforehand: for every group, how
            many certificates it has and what all of these get together, as {"headline": (12, 0.5), "rest": (540, 0.5)}.
            The shares add up to at most 1. None gives this certificate all of delta.
        group: The group of `shares` that this certificate is of.
        commitment: What `pp.commit` sealed before Q was trained, with Q sealed by its `sealed`; the settings here must
            be those of its plan.
        beacon: Under a commitment: what its `source` gave after the second seal, in hexadecimal.
        progress: Called as progress(stage, done, total, row) while networks are drawn.

    Returns:
        The certificate, with the declared bound, its alternatives and all that is needed to check them.

    Raises:
        ValueError: If a rule is broken; the message names the rule and the remedy.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> slab = pp.isotropic(model, sparsity=0.5, std=0.01)
        >>> prior = pp.read(pp.attach(model, slab))
        >>> history = pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=0.01))
        >>> certificate = pp.certify(model, prior, split, draws=200)
        >>> certificate.risk < certificate.bound <= 1
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
    declaration = rules.checked_declaration(declare)
    posterior = attachment.read(model)
    _refuse_broken_rules(model, prior, posterior, split, declaration)
    sealed = _sealed(commitment, beacon, plan, prior, posterior, split)
    candidate = _candidate(model, prior, posterior, split, sealed)
    rules.refuse_hidden(candidate.plain, "the network", declaration)
    rules.refuse_trained_start(candidate.plain, prior, split, declaration)
    evidence, tensors, q_counts = _evidence(candidate, plan, _is_fresh(model, split), name, progress)
    certificate = Certificate(_record(evidence, q_counts, candidate, plan, declaration), tensors)
    return replace(certificate, tries=_tries(certificate, split, plan, q_counts))


def certify_error(
    model: nn.Module, split: Split, *, delta: float, certified: int, name: str | None, declare: str | None
) -> Certificate:
    """The certificate of a network that never saw split.bound, about its error, by Clopper and Pearson's bound."""
    declaration = rules.checked_declaration(declare)
    rules.check_delta(delta)
    rules.refuse_random(model)
    rules.refuse_split(split)
    rules.refuse_repeats(split, declaration)
    rules.refuse_batch_statistics(model)
    rules.refuse_untraced(weights.origin(model), split, "the network", declaration)
    rules.refuse_chosen(model, split, "the network", declaration)
    rules.refuse_hidden(model, "the network", declaration)
    before = weights.fingerprint(model)
    risks.evaluate(risks.RISKS["error"], model, None, split.bound)  # which says of outputs and labels what does not fit
    n, ledger = len(split.bound), BOUNDS["held_out"].ledger(delta, certified=certified)
    errors = int(drawn_networks.errors(model, {}, split.bound).sum())
    rules.refuse_unsteady(model, split.bound.x)
    rules.refuse_moved(model, before)
    bound = bounds.clopper_pearson(errors, n=n, delta=ledger.delta_each)
    sparsity = weights.sparsity(model)
    state = {key: t.detach().clone() for key, t in (*model.named_parameters(), *model.named_buffers())}
    entries: dict[str, BoundEntry] = {"held_out": {"bound": bound, "ledger": ledger.as_dict()}}
    network = f"this network (sparsity {rounded_down(sparsity)})"
    record: HeldOutRecord = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "held-out",
        "model": name,
        "n": n,
        "sparsity": sparsity,
        "total": weights.total(model),
        "reference": {"errors": errors},
        "examples_seen": weights.seen(model).count,
        **_conclusion(entries, "held_out", delta, f"the {rules.bound_examples(n)}", network, declaration, None, split),
        **provenance(split, {"model": tensor_hash(state)}),
    }
    record["assumptions"] = assumptions(record)  # type: ignore[arg-type]
    certificate = Certificate(record, {"model.safetensors": state})
    return replace(certificate, tries=_tries(certificate, split, network=model))


# --- Who is certified.


def _refuse_broken_rules(
    model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split, declaration: str | None
) -> None:
    """A ValueError with the first rule that is broken."""
    rules.refuse_split(split)
    rules.refuse_repeats(split, declaration)
    rules.refuse_untraced_prior(prior, split, declaration)
    rules.refuse_seen_unlabelled(posterior, split)
    rules.refuse_without_receipt(model, prior, split)
    rules.refuse_moved_rest(prior, posterior)


def _is_fresh(model: nn.Module, split: Split) -> bool:
    """Whether nothing was evaluated on the bound set before Q was trained: a drawn network could have been aimed at."""
    return touched(trace.looked(before=weights.notes(model).changed), split.bound, apart_from=split.prior) == 0


def _sealed(
    commitment: Commitment | None,
    beacon: str | None,
    plan: Plan,
    prior: SpikeSlab,
    posterior: SpikeSlab,
    split: Split,
) -> CommitmentRecord | None:
    """What a certificate says of its commitment, once that has sealed this prior, split, plan and Q."""
    if commitment is None or beacon is None:
        if commitment is not None or beacon is not None:
            raise ValueError("a commitment and a beacon come together; give both, or neither")
        return None
    for what, sealed, present in (
        ("prior", commitment.prior, prior.hash),
        ("split", commitment.split, split_hashes(split)),
        *((f"{key} of the plan", commitment.plan[key], value) for key, value in plan.items()),
        ("posterior", commitment.posterior, posterior.hash),
    ):
        if sealed != present:
            raise ValueError(
                f"the commitment has sealed another {what} ({str(sealed)[:40]}) than the one here "
                f"({str(present)[:40]}); certify what was sealed"
            )
    return commitment.record(beacon)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Q and P on a split, as they are certified."""

    plain: nn.Module
    """The network without masks: draws are loaded into it."""
    prior: SpikeSlab
    posterior: SpikeSlab
    split: Split
    hashes: dict[str, str]
    """Of prior, posterior and the rest that they share."""
    commitment: CommitmentRecord | None
    """Under which seals it is certified."""

    def seed(self, purpose: str) -> int:
        """The seed of some draws: the first 63 bits of SHA-256 of what was sealed, or of P and Q, and the purpose."""
        sealed = self.commitment
        base = (
            f"{sealed['seal']}/{sealed['beacon']}" if sealed else f"{self.hashes['prior']}/{self.hashes['posterior']}"
        )
        return int.from_bytes(hashlib.sha256(f"{base}/{purpose}".encode()).digest()[:8], "big") >> 1

    def errors(self, network: dict[str, Tensor]) -> int:
        """Wrong answers on the bound set of the network with these weights."""
        return int(drawn_networks.errors(self.plain, network, self.split.bound).sum())

    def sparsity(self, network: dict[str, Tensor]) -> float:
        """Counted share of zeros of the network with these weights."""
        return sum(int((w == 0).sum()) for w in network.values()) / self.posterior.total


def _candidate(
    model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split, commitment: CommitmentRecord | None
) -> _Candidate:
    """The candidate, which is the same on all ranks."""
    plain = attachment.harden(copy.deepcopy(model))
    rules.refuse_batch_statistics(plain)
    rules.refuse_unsteady(plain, split.bound.x)
    hashes = {"prior": prior.hash, "posterior": posterior.hash, "rest": tensor_hash(prior.rest)}
    ranks.require_equal(
        {
            "prior": (prior.hash, "certify the same model on every rank"),
            "posterior": (posterior.hash, "certify the same model on every rank"),
            "bound set": (split.bound.hash, "make the same split on every rank"),
        }
    )
    return _Candidate(plain, prior, posterior, split, hashes, commitment)


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """The SpikeSlab hash of plain tensors: of what P and Q share, or of a whole network."""
    return SpikeSlab({}, {}, {}, tensors, 0).hash


# --- What is counted.


@dataclass(frozen=True, eq=False)
class _MonteCarlo:
    """The Monte-Carlo step: networks are drawn until the bound on their risk is good enough."""

    candidate: _Candidate
    plan: Plan
    progress: Progress | None

    @cached_property
    def ledger(self) -> Ledger:
        """How delta is spent on the draws and the theorem."""
        return BOUNDS["seeger"].ledger(self.plan["delta"], **choices(self.plan))

    @cached_property
    def reference(self) -> Tensor:
        """Which bound examples the reference network, the thresholded prior, gets wrong."""
        network = drawn_networks.thresholded(self.candidate.prior)
        return drawn_networks.errors(self.candidate.plain, network, self.candidate.split.bound)

    @cached_property
    def reference_errors(self) -> int:
        """How many these are."""
        return int(self.reference.sum())

    @property
    def batch(self) -> int:
        """Bound examples per draw."""
        return min(BATCH, len(self.candidate.split.bound))

    def sample(self, slab: SpikeSlab, purpose: str) -> tuple[Draws, Counts]:
        """Draws networks of a distribution; its risk in numbers, and the counts of every draw."""
        n, seed = len(self.candidate.split.bound), self.candidate.seed(purpose)
        delta, reference_risk = self.ledger.monte_carlo_each, self.reference_errors / n

        def watch(counts: Counts) -> tuple[bool, dict[str, float]]:
            upper = RISK_BOUNDS[self.plan["method"]].upper(counts, reference_risk, delta)
            enough = bounds_table.slack(counts, reference_risk, upper) <= self.plan["tolerance"]
            bound = bounds.seeger(upper, n=n, kl=0.0, delta=self.ledger.pac_bayes_each)
            return enough and RISK_BOUNDS[self.plan["method"]].at_any_time, {"bound": bound}

        counts = drawn_networks.monte_carlo(
            self.candidate.plain,
            slab,
            self.candidate.split.bound,
            self.reference,
            seed=seed,
            batch=self.batch,
            draws=self.plan["draws"],
            watch=watch,
            stage=purpose,
            progress=self.progress,
            over_ranks=True,
        )
        return bounds_table.summarise(
            counts, reference_risk, delta=delta, method=self.plan["method"], seed=seed
        ), counts


def _rounded_up_kl(posterior: SpikeSlab, prior: SpikeSlab) -> dict[str, float]:
    """KL(Q||P) of every tensor in nats, by more than its rounding error above what is computed."""
    terms = kl_per_layer(posterior, prior)
    return {name: math.nextafter(float(term) * (1 + 1e-12), math.inf) for name, term in terms.items()}


def _single_draw(candidate: _Candidate, fresh: bool) -> tuple[SingleDraw, dict[str, Tensor], dict[str, Tensor]]:
    """One network h ~ Q for deployment: its numbers, its weights and its mask."""
    posterior, seed = candidate.posterior, candidate.seed("single draw")
    network, mask = draw_weights(posterior, seed=seed, step=0), draw_masks(posterior, seed=seed, step=0)
    ratio = log_ratio(posterior, candidate.prior, network, mask)
    entry: SingleDraw = {
        "seed": seed,
        "errors": candidate.errors(network),
        "log_ratio": ratio + abs(ratio) * 1e-12 + 1e-12,
        "sparsity": candidate.sparsity(network),
        "fresh": fresh,
    }
    return entry, network, mask


def _thresholded(candidate: _Candidate) -> tuple[Thresholded, dict[str, Tensor]]:
    """The thresholded network, and how often it disagrees with draws of Q on inputs that no fit has seen."""
    plain, posterior, unlabelled = candidate.plain, candidate.posterior, candidate.split.unlabelled
    seed, network = candidate.seed("unlabelled draws"), drawn_networks.thresholded(posterior)
    entry: Thresholded = {
        "seed": seed,
        "inputs": len(unlabelled),
        "disagreements": int(drawn_networks.disagreements(plain, posterior, network, unlabelled.x, seed=seed).sum()),
        "errors": candidate.errors(network),
        "sparsity": candidate.sparsity(network),
    }
    return entry, network


def _evidence(
    candidate: _Candidate, plan: Plan, fresh: bool, name: str | None, progress: Progress | None
) -> tuple[Evidence, dict[str, dict[str, Tensor]], Counts]:
    """What the bounds follow from, the files beside it, and the counts of Q's draws."""
    prior, posterior, split = candidate.prior, candidate.posterior, candidate.split
    step = _MonteCarlo(candidate, plan, progress)
    of_q, q_counts = step.sample(posterior, "posterior draws")
    of_p, p_counts = step.sample(prior, "prior draws")
    divergences = _rounded_up_kl(posterior, prior)
    single_draw, single_network, single_mask = _single_draw(candidate, fresh)
    thresholded, fixed_network = _thresholded(candidate)
    evidence: Evidence = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "pac-bayes",
        "model": name,
        "n": len(split.bound),
        "kl": math.nextafter(math.fsum(divergences.values()), math.inf),
        "kl_per_tensor": divergences,
        "sparsity": posterior.sparsity,
        "total": posterior.total,
        "monte_carlo": {
            "method": plan["method"],
            "tolerance": plan["tolerance"],
            "batch": step.batch,
            "posterior": of_q,
            "prior": of_p,
        },
        "catoni_c": plan["catoni_c"],
        "reference": {"errors": step.reference_errors},
        "single_draw": single_draw,
        "thresholded": thresholded,
        "shares": plan.get("shares"),
        "examples_seen": prior.seen.count,
    }
    tensors = {
        "distributions.safetensors": _distribution_tensors(prior, posterior),
        "draws.safetensors": _draw_tensors(q_counts, p_counts, single_mask),
        "single_draw.safetensors": {**single_network, **prior.rest},
        "thresholded.safetensors": {**fixed_network, **prior.rest},
    }
    return evidence, tensors, q_counts


# --- What is written.


def _record(
    evidence: Evidence, q_counts: Counts, candidate: _Candidate, plan: Plan, declaration: str | None
) -> PacBayesRecord:
    """The evidence with its bounds, the claim, and where everything came from."""
    delta = plan["delta"]
    entries = bounds_table.all_bounds(evidence, q_counts, delta=delta, **choices(plan))
    chance = f"the {rules.bound_examples(evidence['n'])} and of the {len(q_counts):,} sampled networks"
    network = f"a network drawn from Q (expected sparsity {rounded_down(evidence['sparsity'])})"
    commitment = candidate.commitment
    record: PacBayesRecord = {
        **evidence,
        **_conclusion(entries, plan["family"], delta, chance, network, declaration, commitment, candidate.split),
        **provenance(candidate.split, candidate.hashes),
    }
    record["assumptions"] = assumptions(record)  # type: ignore[arg-type]
    return record


def _tries(
    certificate: Certificate,
    split: Split,
    plan: Plan | None = None,
    q_counts: Counts | None = None,
    network: nn.Module | None = None,
) -> Tries:
    """Counts this certificate among those on the same examples."""
    record, ledger, sealed = certificate.record, certificate.ledger, certificate.record["commitment"]

    def bound_at(share: float) -> float:
        delta = ledger.delta * share
        if q_counts is None:
            return bounds.clopper_pearson(round(certificate.risk * certificate.n), n=certificate.n, delta=delta)
        return bounds_table.claimed_bound(certificate.pac_bayes, q_counts, delta=delta)

    # Another share of delta is no other try; another family, number of draws or beacon is one.
    done = {key: value for key, value in (plan or {}).items() if key not in ("delta", "grid", "certified", "shares")}
    subject = digest({"hashes": record["hashes"], "split": split_hashes(split), "plan": done, "sealed": sealed})
    groups = ((plan or {}).get("shares") or {"groups": {}})["groups"].values()
    declared = ledger.candidates * max(1, sum(entry["certificates"] for entry in groups))
    if network is None:
        return tries.count(split.pool, subject, declared=declared, bound_at=bound_at)
    trained, among = weights.last_change(network), evaluated([network], split)
    return tries.count(split.pool, subject, declared=declared, bound_at=bound_at, trained=trained, evaluated=among)


def evaluated(networks: Sequence[nn.Module], split: Split) -> int:
    """Among how many networks, evaluated on bound examples in this process, these may have been chosen."""
    ids = split.bound.ids.reshape(-1)
    looks = trace.networks_on(ids[~torch.isin(ids, split.prior.known.examples)])
    return 1 + len(looks - {weights.fingerprint(network) for network in networks})


def _conclusion(
    entries: dict[str, BoundEntry],
    family: str,
    delta: float,
    chance: str,
    network: str,
    declaration: str | None,
    commitment: CommitmentRecord | None,
    split: Split,
) -> Conclusion:
    """The bounds, the declared one among them, and the sentence about it."""
    bound = entries[family]["bound"]
    statement = (
        f"With probability at least {percent(delta)} % over the draw of {chance}, the error rate on new data of "
        f"{network} is at most {rounded_up(bound)}."
    )
    if commitment is not None:
        statement += f" The draws follow from the commitment {commitment['digest'][:12]} and a later beacon."
    statement += beside_the_claim(split, declaration)
    return {
        "bounds": entries,
        "claim": {"family": family, "bound": bound},
        "statement": statement,
        "declaration": declaration,
        "commitment": commitment,
    }


def provenance(split: Split, hashes: dict[str, str]) -> Provenance:
    """Where the data came from, how it was cut and standardised, and what was hashed."""
    parts, hashed = {part.name: part for part in (split.prior, split.bound, split.unlabelled)}, split_hashes(split)
    return {
        "data": {"dataset": split.dataset, "files": dict(split.files), "classes": split.classes},
        "split": {
            "seed": split.seed,
            "prior_fraction": split.prior_fraction,
            "sizes": {name: len(part) for name, part in parts.items()},
            "declared": split.declared,
            "duplicates": split.duplicates,
            "repeats": split.repeats,
            "parts": hashed["parts"],
            "indices": hashed["indices"],
        },
        "standardisation": {"mean": list(split.mean), "std": list(split.std)},
        "evaluation": EVALUATION,
        "hashes": hashes,
        "assumptions": [],
        "software": {"pacprune": __version__, "torch": torch.__version__},
    }


def _distribution_tensors(prior: SpikeSlab, posterior: SpikeSlab) -> dict[str, Tensor]:
    """P, Q and the rest that they share, by path; `decode.distribution` reads them."""
    slabs = {
        f"{whose}/{key}": t
        for whose, slab in (("prior", prior), ("posterior", posterior))
        for key, t in flat(slab).items()
        if not key.startswith("rest/")
    }
    return slabs | {f"rest/{key}": t for key, t in prior.rest.items()}


def _draw_tensors(q_counts: Counts, p_counts: Counts, single_mask: dict[str, Tensor]) -> dict[str, Tensor]:
    """The counts of every draw, which `decode.counts` reads, and the mask of the single network."""
    counts = {
        f"{whose}/{what}": getattr(counts, what)
        for whose, counts in (("posterior", q_counts), ("prior", p_counts))
        for what in ("wrong", "plus", "minus")
    }
    return counts | {f"single_draw/{name}": mask_bits(mask) for name, mask in single_mask.items()}


def mask_bits(mask: Tensor) -> Tensor:
    """A mask as bits, eight to a byte, first weight in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))
