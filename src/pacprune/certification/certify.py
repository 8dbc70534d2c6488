"""Issuing certificates: the rules are checked, networks are drawn and counted, and the bounds follow."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import bounds
from pacprune._version import __version__
from pacprune.bounds import Ledger
from pacprune.certification import bounds_table, drawn_networks, rules
from pacprune.certification.bounds_table import BOUNDS, RISK_BOUNDS
from pacprune.certification.certificate import Certificate, percent, rounded_down, rounded_up
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import (
    FORMAT,
    VERSION,
    BoundEntry,
    Conclusion,
    Draws,
    Evaluation,
    Evidence,
    HeldOutRecord,
    PacBayesRecord,
    Provenance,
    SingleDraw,
    Thresholded,
)
from pacprune.data.splits import Part, Split, check_split
from pacprune.distributed import ranks
from pacprune.files import write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_masks, draw_weights, kl_per_layer, log_ratio
from pacprune.training.posterior import flat, refuse_if_touched
from pacprune.types import Progress

BATCH = 25
"""Bound examples per Monte-Carlo draw: at equal cost, many small batches give a tighter bound than few large ones."""
EVALUATION: Evaluation = {"mode": "eval", "dtype": "float32", "autocast": False, "tf32": False, "augmentation": False}
ASSUMPTIONS = (
    "bound examples and new data are independent draws from one distribution, with labels as noisy as these",
    "the split was made as described, before anything was trained",
    "P was written before the bound set was used to train Q (the hash shows which P, not when)",
    "the prior was shaped without the bound examples; what pacprune did not train or score is the issuer's word",
    "bound family, Monte-Carlo method and number of draws were declared before the bound examples were looked at",
    "no prior was tried on these bound examples beyond those counted in the ledger",
)
HELD_OUT_ASSUMPTIONS = (
    *ASSUMPTIONS[:2],
    "the network was trained without the bound examples; what pacprune did not train is the issuer's word",
    "no network was tried on these bound examples beyond those counted in the ledger",
)


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
    progress: Progress | None = None,
) -> Certificate:
    """Certifies the model's present distribution Q against P on split.bound, or refuses with the reason.

    It refuses when P saw the bound set. It refuses without a receipt of `fit_posterior`, which shows that this P was
    written before this bound set was read. It refuses when anything outside Q moved.
    All seeds follow from the hashes of P and Q: certifying twice gives the same certificate. Under torchrun all ranks
    call it; they share the draws, and get one certificate.

    Args:
        model: A model with stochastic masks, trained by `fit_posterior`; its present gates and means are Q.
        prior: The prior P that `fit_posterior` started from.
        split: The split that P and Q were trained on; the bound is about its `bound` examples.
        delta: Probability with which the certificate may fail, such as 0.05.
        family: The bound to claim, declared beforehand: "seeger", "catoni" or "excess".
        expected_risk: A guess of Q's risk, made without the bound set, for which Catoni's constant is the best.
            None takes the best constant of a fixed grid, which costs log 20 nats.
        grid: How many priors, fixed in advance, this one was chosen among; delta is divided by it.
        certified: How many certificates this one may be chosen among; delta is divided by it.
        method: The bound on the Monte-Carlo error. "betting" may stop when it is good enough; "chernoff" makes all
            `draws`.
        tolerance: Sampling stops when the Monte-Carlo slack is at most this. None is 0.001, or 0.1/sqrt(n) where that
            is more, since n examples cannot tell finer.
        draws: The most networks to draw of each of P and Q.
        name: Which of pacprune's models it is ("mlp"), so that verifiers can build it; None for a model of one's own.
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
    rules.check_declared(family, method, expected_risk)
    check_split(split)
    tolerance = max(1e-3, 0.1 / math.sqrt(len(split.bound))) if tolerance is None else tolerance
    posterior = attachment.read(model)
    receipt = _refuse_broken_rules(model, prior, posterior, split, grid)
    ledger = BOUNDS["seeger"].ledger(delta, grid=grid, certified=certified)
    candidate = _candidate(model, prior, posterior, split)
    step = _MonteCarlo(candidate, ledger, method, tolerance, draws, progress)
    of_q, q_counts = step.sample(posterior, "posterior draws")
    of_p, p_counts = step.sample(prior, "prior draws")
    divergences = _rounded_up_kl(posterior, prior)
    single_draw, single_network, single_mask = _single_draw(candidate)
    thresholded, fixed_network = _thresholded(candidate)
    n, sparsity, hashes = len(split.bound), posterior.sparsity, candidate.hashes
    calls = ranks.on_rank0(lambda: _count_calls(Path(receipt["written"]), hashes["prior"]))
    evidence: Evidence = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "pac-bayes",
        "model": name,
        "n": n,
        "kl": math.nextafter(math.fsum(divergences.values()), math.inf),
        "kl_per_tensor": divergences,
        "sparsity": sparsity,
        "total": posterior.total,
        "monte_carlo": {
            "method": method,
            "tolerance": tolerance,
            "batch": step.batch,
            "posterior": of_q,
            "prior": of_p,
        },
        "catoni_c": _catoni_constant(expected_risk, n=n, delta=ledger.pac_bayes_each),
        "reference": {"errors": step.reference_errors},
        "single_draw": single_draw,
        "thresholded": thresholded,
        "examples_seen": len(prior.seen),
        "certify_calls": max(calls, rules.remember(split, hashes["prior"], hashes["posterior"])),
    }
    rules.remember(split, "prior", hashes["prior"])
    entries = bounds_table.all_bounds(evidence, q_counts, delta=delta, grid=grid, certified=certified)
    chance = f"the {n:,} bound examples and of the {len(q_counts):,} sampled networks"
    network = f"a network drawn from Q (expected sparsity {rounded_down(sparsity)})"
    record: PacBayesRecord = {
        **evidence,
        **_conclusion(entries, family, delta, chance, network),
        **_provenance(split, hashes, ASSUMPTIONS),
    }
    tensors = {
        "distributions.safetensors": _distribution_tensors(prior, posterior),
        "draws.safetensors": _draw_tensors(q_counts, p_counts, single_mask),
        "single_draw.safetensors": {**single_network, **prior.rest},
        "thresholded.safetensors": {**fixed_network, **prior.rest},
    }
    return Certificate(record, tensors)


def certify_held_out(
    model: nn.Module, split: Split, *, delta: float = 0.05, certified: int = 1, name: str | None = None
) -> Certificate:
    """Certifies a deterministic network that never saw split.bound, by Clopper and Pearson's bound.

    It serves any plain network: one-shot, PFT, dense. The certificate has the same format as that of `certify`.

    Args:
        model: A plain network; one with stochastic masks needs pp.harden first.
        split: The split whose `bound` examples the network has not seen.
        delta: Probability with which the certificate may fail, such as 0.05.
        certified: How many networks this one may be chosen among; delta is divided by it.
        name: Which of pacprune's models it is ("mlp"), so that verifiers can build it; None for a model of one's own.

    Returns:
        The certificate, with the network in it.

    Raises:
        ValueError: If a rule is broken; the message names the rule and the remedy.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> certificate = pp.certify_held_out(model, split)
        >>> pp.error(model, split.bound) < certificate.bound < 1
        True
    """
    rules.refuse_random(model)
    rules.refuse_split(split)
    rules.refuse_batch_statistics(model)
    refuse_if_touched(weights.seen(model), split, "the network")
    n, ledger = len(split.bound), BOUNDS["held_out"].ledger(delta, certified=certified)
    errors = int(drawn_networks.errors(model, {}, split.bound).sum())
    bound = bounds.clopper_pearson(errors, n=n, delta=ledger.delta_each)
    sparsity = weights.sparsity(model)
    state = {key: t.detach().clone() for key, t in (*model.named_parameters(), *model.named_buffers())}
    model_hash = tensor_hash(state)
    rules.refuse_unpaid(split, "network", model_hash, paid=certified, share="certified")
    rules.remember(split, "network", model_hash)
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
        "examples_seen": len(weights.seen(model)),
        **_conclusion(entries, "held_out", delta, f"the {n:,} bound examples", network),
        **_provenance(split, {"model": model_hash}, HELD_OUT_ASSUMPTIONS),
    }
    return Certificate(record, {"model.safetensors": state})


# --- Who is certified.


def _refuse_broken_rules(
    model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split, grid: int
) -> weights.Receipt:
    """The receipt of fit_posterior, or a ValueError with the first rule that is broken."""
    rules.refuse_split(split)
    refuse_if_touched(prior.seen, split, "the prior")
    rules.refuse_seen_unlabelled(posterior, split)
    receipt = rules.receipt(model, prior, split)
    rules.refuse_moved_rest(prior, posterior)
    rules.refuse_unpaid(split, "prior", prior.hash, paid=grid, share="grid")
    return receipt


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Q and P on a split, as they are certified."""

    plain: nn.Module
    """The network without masks: draws are loaded into it."""
    prior: SpikeSlab
    posterior: SpikeSlab
    split: Split
    hashes: dict[str, str]
    """Of prior, posterior and the rest that they share; all seeds follow from them."""

    def errors(self, network: dict[str, Tensor]) -> int:
        """Wrong answers on the bound set of the network with these weights."""
        return int(drawn_networks.errors(self.plain, network, self.split.bound).sum())

    def sparsity(self, network: dict[str, Tensor]) -> float:
        """Counted share of zeros of the network with these weights."""
        return sum(int((w == 0).sum()) for w in network.values()) / self.posterior.total


def _candidate(model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split) -> _Candidate:
    """The candidate, which is the same on all ranks."""
    plain = attachment.harden(copy.deepcopy(model))
    rules.refuse_batch_statistics(plain)
    hashes = {"prior": prior.hash, "posterior": posterior.hash, "rest": tensor_hash(prior.rest)}
    ranks.require_equal(
        {
            "prior": (prior.hash, "certify the same model on every rank"),
            "posterior": (posterior.hash, "certify the same model on every rank"),
            "bound set": (split.bound.hash, "make the same split on every rank"),
        }
    )
    return _Candidate(plain, prior, posterior, split, hashes)


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """The SpikeSlab hash of plain tensors: of what P and Q share, or of a whole network."""
    return SpikeSlab({}, {}, {}, tensors, 0).hash


def seed_of(hashes: Mapping[str, str], purpose: str) -> int:
    """The first 63 bits of SHA-256(prior hash, posterior hash, purpose): nobody can fish for a lucky seed."""
    content = f"{hashes['prior']}/{hashes['posterior']}/{purpose}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 1


# --- What is counted.


@dataclass(frozen=True, eq=False)
class _MonteCarlo:
    """The Monte-Carlo step: networks are drawn until the bound on their risk is good enough."""

    candidate: _Candidate
    ledger: Ledger
    method: str
    tolerance: float
    draws: int
    progress: Progress | None

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
        n, seed = len(self.candidate.split.bound), seed_of(self.candidate.hashes, purpose)
        delta, reference_risk = self.ledger.monte_carlo_each, self.reference_errors / n

        def watch(counts: Counts) -> tuple[bool, dict[str, float]]:
            upper = RISK_BOUNDS[self.method].upper(counts, reference_risk, delta)
            enough = bounds_table.slack(counts, reference_risk, upper) <= self.tolerance
            bound = bounds.seeger(upper, n=n, kl=0.0, delta=self.ledger.pac_bayes_each)
            return enough and RISK_BOUNDS[self.method].at_any_time, {"bound": bound}

        counts = drawn_networks.monte_carlo(
            self.candidate.plain,
            slab,
            self.candidate.split.bound,
            self.reference,
            seed=seed,
            batch=self.batch,
            draws=self.draws,
            watch=watch,
            stage=purpose,
            progress=self.progress,
            over_ranks=True,
        )
        return bounds_table.summarise(counts, reference_risk, delta=delta, method=self.method, seed=seed), counts


def _rounded_up_kl(posterior: SpikeSlab, prior: SpikeSlab) -> dict[str, float]:
    """KL(Q||P) of every tensor in nats, by more than its rounding error above what is computed."""
    terms = kl_per_layer(posterior, prior)
    return {name: math.nextafter(float(term) * (1 + 1e-12), math.inf) for name, term in terms.items()}


def _single_draw(candidate: _Candidate) -> tuple[SingleDraw, dict[str, Tensor], dict[str, Tensor]]:
    """One network h ~ Q for deployment: its numbers, its weights and its mask."""
    posterior, seed = candidate.posterior, seed_of(candidate.hashes, "single draw")
    network, mask = draw_weights(posterior, seed=seed, step=0), draw_masks(posterior, seed=seed, step=0)
    ratio = log_ratio(posterior, candidate.prior, network, mask)
    entry: SingleDraw = {
        "seed": seed,
        "errors": candidate.errors(network),
        "log_ratio": ratio + abs(ratio) * 1e-12 + 1e-12,
        "sparsity": candidate.sparsity(network),
    }
    return entry, network, mask


def _thresholded(candidate: _Candidate) -> tuple[Thresholded, dict[str, Tensor]]:
    """The thresholded network, and how often it disagrees with draws of Q on inputs that no fit has seen."""
    plain, posterior, unlabelled = candidate.plain, candidate.posterior, candidate.split.unlabelled
    seed, network = seed_of(candidate.hashes, "unlabelled draws"), drawn_networks.thresholded(posterior)
    entry: Thresholded = {
        "seed": seed,
        "inputs": len(unlabelled),
        "disagreements": drawn_networks.disagreements(plain, posterior, network, unlabelled.x, seed=seed),
        "errors": candidate.errors(network),
        "sparsity": candidate.sparsity(network),
    }
    return entry, network


def _catoni_constant(expected_risk: float | None, *, n: int, delta: float) -> float | None:
    """The constant that is the best for a guessed risk; None leaves it to the grid."""
    return None if expected_risk is None else bounds.catoni_constant(expected_risk, n=n, kl=0.0, delta=delta)


def _count_calls(folder: Path, prior_hash: str) -> int:
    """How often this prior has been certified against, kept beside the written prior so that processes add up."""
    path = folder / "certify-calls.json"
    calls = json.loads(path.read_text()) if path.is_file() else {}
    calls[prior_hash] = calls.get(prior_hash, 0) + 1
    write_atomically(path, json.dumps(calls).encode())
    return calls[prior_hash]


# --- What is written.


def _conclusion(entries: dict[str, BoundEntry], family: str, delta: float, chance: str, network: str) -> Conclusion:
    """The bounds, the declared one among them, and the sentence about it."""
    bound = entries[family]["bound"]
    return {
        "bounds": entries,
        "claim": {"family": family, "bound": bound},
        "statement": (
            f"With probability at least {percent(delta)} % over the draw of {chance}, the error rate on new data of "
            f"{network} is at most {rounded_up(bound)}."
        ),
    }


def _provenance(split: Split, hashes: dict[str, str], assumptions: tuple[str, ...]) -> Provenance:
    """Where the data came from, how it was cut and standardised, what was hashed, and what is assumed."""
    parts = {part.name: part for part in (split.prior, split.bound, split.unlabelled)}
    declared = ["the split is random as declared by the issuer"] if split.declared else []
    return {
        "data": {"dataset": split.dataset, "files": dict(split.files), "classes": split.classes},
        "split": {
            "seed": split.seed,
            "prior_fraction": split.prior_fraction,
            "sizes": {name: len(part) for name, part in parts.items()},
            "declared": split.declared,
            "duplicates": split.duplicates,
            "parts": {name: part.hash for name, part in parts.items()},
            "indices": {name: index_hash(part) for name, part in parts.items()},
        },
        "standardisation": {"mean": list(split.mean), "std": list(split.std)},
        "evaluation": EVALUATION,
        "hashes": hashes,
        "assumptions": [*assumptions, *declared],
        "software": {"pacprune": __version__, "torch": torch.__version__},
    }


def index_hash(part: Part) -> str:
    """SHA-256 of the positions of a part's examples in their source."""
    return hashlib.sha256(part.index.numpy().tobytes()).hexdigest()


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
