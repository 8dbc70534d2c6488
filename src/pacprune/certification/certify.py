"""Issuing certificates: the rules that must hold, the counts, and the bounds that follow from them."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import bounds
from pacprune._version import __version__
from pacprune.bounds import Ledger
from pacprune.certification import bounds_table, drawn_networks
from pacprune.certification.certificate import FORMAT, VERSION, Certificate, percent, rounded_down, rounded_up
from pacprune.certification.drawn_networks import Counts
from pacprune.data.splits import Part, Split, check_split
from pacprune.distributed import ranks
from pacprune.files import write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw, gates, kl_per_layer, log_ratio
from pacprune.training import fit
from pacprune.types import Progress

FAMILIES = ("seeger", "catoni", "excess")
BATCH = 25
"""Bound examples per Monte-Carlo draw: at equal cost, many small batches give a tighter bound than few large ones."""
EVALUATION = {"mode": "eval", "dtype": "float32", "autocast": False, "tf32": False, "augmentation": False}
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
    """The certificate of the model's present distribution Q against P on split.bound, or a refusal with its reason.

    Refuses when P saw the bound set, when no receipt of `fit_posterior` shows that P was written before the bound set
    was read, when the receipt is for another P or another bound set, or when anything outside Q moved. `family` is the
    bound declared beforehand: "seeger", "catoni" or "excess"; Catoni's constant is the best for the `expected_risk`, a
    guess made without the bound set; without one it is the best of a fixed grid, which costs log 20 nats. `grid` counts
    the priors, fixed in advance, among which this one was chosen, `certified` the certificates among which this one may
    be chosen: delta is divided by both.
    Sampling stops when the Monte-Carlo slack is at most `tolerance` (default: .001, or 0.1/sqrt(n) where that is more,
    since n examples cannot tell finer), or after `draws`; with method "chernoff", which may not look, after `draws`.
    All seeds follow from the hashes of P and Q: certifying twice gives the same certificate. `name` tells verifiers
    which of pacprune's models it is. Under torchrun all ranks call it; they share the draws, and get one certificate.
    """
    check_declared(family, method, expected_risk)
    check_split(split)
    tolerance = max(1e-3, 0.1 / math.sqrt(len(split.bound))) if tolerance is None else tolerance
    posterior = attachment.read(model)
    receipt = _refuse(model, prior, posterior, split, grid)
    ledgers = bounds_table.ledgers(delta, grid=grid, certified=certified)
    plain = attachment.harden(copy.deepcopy(model))
    refuse_batch_statistics(plain)
    n, bound_set, each = len(split.bound), split.bound, ledgers["gibbs"].pac_bayes_each
    hashes = {"prior": prior.hash, "posterior": posterior.hash, "rest": tensor_hash(prior.rest)}
    same = {what: (hashes[what], "certify the same model on every rank") for what in ("prior", "posterior")}
    ranks.require_equal(same | {"bound set": (bound_set.hash, "make the same split on every rank")})
    reference = drawn_networks.errors(plain, drawn_networks.thresholded(prior), bound_set)
    reference_errors = int(reference.sum())

    def sample(slab: SpikeSlab, purpose: str) -> tuple[dict[str, Any], Counts]:
        seed, delta_mc = seed_of(hashes, purpose), ledgers["gibbs"].monte_carlo_each

        def summary(counts: Counts) -> dict[str, Any]:
            return bounds_table.summarise(counts, reference_errors, n, delta_mc, method) | {"seed": seed}

        def watch(counts: Counts) -> tuple[bool, dict[str, float]]:
            now = bounds.seeger(summary(counts)["risk_upper"], n=n, kl=0.0, delta=each)
            done = method == "betting" and bounds_table.slack(counts, reference_errors, n, delta_mc) <= tolerance
            return done, {"bound": now}

        counts = drawn_networks.monte_carlo(
            plain,
            slab,
            bound_set,
            reference,
            seed=seed,
            batch=min(BATCH, n),
            draws=draws,
            watch=watch,
            stage=purpose,
            progress=progress,
            over_ranks=True,
        )
        return summary(counts), counts

    q, q_counts = sample(posterior, "posterior draws")
    p, p_counts = sample(prior, "prior draws")
    divergences = {
        name: math.nextafter(float(v) * (1 + 1e-12), math.inf) for name, v in kl_per_layer(posterior, prior).items()
    }
    divergence = math.nextafter(math.fsum(divergences.values()), math.inf)
    single, single_weights, single_mask = _single_draw(plain, posterior, prior, bound_set, hashes)
    flat_weights = drawn_networks.thresholded(posterior)
    flat = _thresholded(plain, posterior, flat_weights, split, hashes)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "pac-bayes",
        "model": name,
        "n": n,
        "kl": divergence,
        "kl_per_tensor": divergences,
        "sparsity": posterior.sparsity,
        "total": posterior.total,
        "monte_carlo": {
            "method": method,
            "tolerance": tolerance,
            "batch": min(BATCH, n),
            "posterior": q,
            "prior": p,
        },
        "catoni_c": None if expected_risk is None else bounds.catoni_constant(expected_risk, n=n, kl=0.0, delta=each),
        "reference": {"errors": reference_errors},
        "single_draw": single,
        "thresholded": flat,
        "examples_seen": len(prior.seen),
        "certify_calls": max(
            ranks.on_rank0(lambda: _count_calls(Path(receipt["written"]), hashes["prior"])),
            _note(split, hashes["prior"], hashes["posterior"]),
        ),
    }
    _note(split, "prior", hashes["prior"])
    record["bounds"] = bounds_table.all_bounds(record, ledgers, q_counts)
    record["claim"] = {"family": family, "bound": record["bounds"][family]["bound"]}
    record["statement"] = (
        f"With probability at least {percent(delta)} % over the draw of the {n:,} bound examples and of the "
        f"{len(q_counts):,} sampled networks, the error rate on new data of a network drawn from Q "
        f"(expected sparsity {rounded_down(posterior.sparsity)}) is at most {rounded_up(record['claim']['bound'])}."
    )
    record |= _provenance(split, hashes)
    tensors = {
        "distributions.safetensors": {
            **{f"prior/{key}": t for key, t in fit.flat(prior).items() if not key.startswith("rest/")},
            **{f"posterior/{key}": t for key, t in fit.flat(posterior).items() if not key.startswith("rest/")},
            **{f"rest/{key}": t for key, t in prior.rest.items()},
        },
        "draws.safetensors": {
            f"{whose}/{what}": getattr(counts, what)
            for whose, counts in (("posterior", q_counts), ("prior", p_counts))
            for what in ("wrong", "plus", "minus")
        }
        | {f"single_draw/{key}": packed(keep) for key, keep in single_mask.items()},
        "single_draw.safetensors": {**single_weights, **prior.rest},
        "thresholded.safetensors": {**flat_weights, **prior.rest},
    }
    return Certificate(record, tensors)


def check_declared(family: str, method: str, expected_risk: float | None) -> None:
    """Refuses an unknown declaration before anything is trained or drawn."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; declare one of {', '.join(FAMILIES)}")
    if method not in bounds_table.METHODS:
        raise ValueError(f"method {method!r} is unknown; use one of {', '.join(bounds_table.METHODS)}")
    if expected_risk is not None and not 0 < expected_risk < 1:
        raise ValueError(
            f"expected_risk is {expected_risk}; it must lie strictly between 0 and 1: give a fraction, or None for "
            "a constant that is chosen on a fixed grid and paid for"
        )


def certify_held_out(
    model: nn.Module, split: Split, *, delta: float = 0.05, certified: int = 1, name: str | None = None
) -> Certificate:
    """The Clopper-Pearson certificate of a deterministic network that never saw split.bound, in the same format.

    For any plain network: one-shot, PFT, dense. `certified` counts the networks among which this one may be chosen.
    """
    if attachment.sites(model):
        raise ValueError(
            "the model has stochastic masks; call pp.harden(model) first, or pp.certify for the random network"
        )
    refuse_split(split)
    refuse_batch_statistics(model)
    fit.refuse_if_touched(weights.seen(model), split, "the network")
    n, ledger = len(split.bound), Ledger.split(delta, monte_carlo_share=0.0, certified=certified)
    errors = int(drawn_networks.errors(model, {}, split.bound).sum())
    bound = bounds.clopper_pearson(errors, n=n, delta=ledger.delta_each)
    sparsity = weights.sparsity(model)
    state = {key: t.detach().clone() for key, t in (*model.named_parameters(), *model.named_buffers())}
    _refuse_more(split, "network", tensor_hash(state), certified, "certified")
    _note(split, "network", tensor_hash(state))
    record = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "held-out",
        "model": name,
        "n": n,
        "sparsity": sparsity,
        "total": weights.total(model),
        "reference": {"errors": errors},
        "examples_seen": len(weights.seen(model)),
        "bounds": {"held_out": {"bound": bound, "ledger": ledger.as_dict()}},
        "claim": {"family": "held_out", "bound": bound},
        "statement": (
            f"With probability at least {percent(delta)} % over the draw of the {n:,} bound examples, "
            f"the error rate on new data of this network (sparsity {rounded_down(sparsity)}) "
            f"is at most {rounded_up(bound)}."
        ),
        **_provenance(split, {"model": tensor_hash(state)}, assumptions=HELD_OUT_ASSUMPTIONS),
    }
    return Certificate(record, {"model.safetensors": state})


def _refuse(model: nn.Module, prior: SpikeSlab, posterior: SpikeSlab, split: Split, candidates: int) -> dict[str, Any]:
    """The receipt of fit_posterior, or a ValueError with the first rule that is broken."""
    refuse_split(split)
    fit.refuse_if_touched(prior.seen, split, "the prior")
    touched = fit.touched(posterior.seen, split.unlabelled, apart_from=split.train)
    if touched:
        raise ValueError(
            f"the posterior has seen {touched} of the {len(split.unlabelled)} unlabelled inputs; "
            "no fit may use them: train on split.prior and split.bound alone, or split with unlabelled=0"
        )
    receipt = weights.notes(model).get("receipt")
    if receipt is None:
        raise ValueError(
            "there is no receipt that the prior was written before the bound set was read; "
            "train Q with pp.fit_posterior (epochs=0 will do when Q = P)"
        )
    pairs = ("prior", receipt["prior"], prior.hash), ("bound set", receipt["bound"], split.bound.hash)
    for what, own, given in pairs:
        if own != given:
            raise ValueError(
                f"fit_posterior was run with another {what} ({own[:12]}) than the one given ({given[:12]}); "
                "use the same one"
            )
    for key in sorted(prior.rest.keys() | posterior.rest.keys()):
        both = [slab.rest[key].cpu() for slab in (prior, posterior) if key in slab.rest]
        if len(both) < 2 or not torch.equal(*both):
            raise ValueError(
                f"{key} lies outside Q but differs from its value in the prior; everything but Q must stay frozen"
            )
    _refuse_more(split, "prior", prior.hash, candidates, "grid")
    return receipt


def _refuse_more(split: Split, kind: str, found: str, paid: int, share: str) -> None:
    """Raises when more of a kind were certified on these examples than the ledger pays for."""
    tried = {*split.issued.get(kind, []), found}
    if len(tried) > paid:
        raise ValueError(
            f"this is {kind} number {len(tried)} certified on these bound examples, but the ledger pays for "
            f"{share}={paid}; fix the number of candidates in advance and give it as {share}=: each pays its part"
        )


def _note(split: Split, kind: str, found: str) -> int:
    """Remembers on the split what was certified on it; returns how many certificates of this kind it has seen."""
    split.issued.setdefault(kind, []).append(found)
    return len(split.issued[kind])


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises when an answer would depend on the other inputs of its batch, so that there is no network to certify."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"{name} uses batch statistics in evaluation (track_running_stats=False), so that an answer depends on "
                "its batch; give it running statistics"
            )


def refuse_split(split: Split) -> None:
    """Rules about the data alone: disjoint parts, and standardisation by the prior part."""
    check_split(split)
    for one, other in combinations((split.prior, split.bound, split.unlabelled), 2):
        shared = int(torch.isin(other.index, one.index).sum())
        if shared:
            raise ValueError(
                f"{one.name} and {other.name} share {shared} of {len(other)} examples; they must be disjoint"
            )
    if split.mean:
        x, over = split.prior.x, [d for d in range(split.prior.x.ndim) if d != 1]
        mean, std = (t.reshape(-1) for t in (x.mean(over, dtype=torch.float64), x.std(over, correction=0)))
        # float32 leaves this much of a mean that is large beside its standard deviation; a constant channel has std 0.
        left = 1e-4 + 2e-7 * (torch.tensor(split.mean) / torch.tensor(split.std)).abs()
        for channel in ((mean.abs() > left) | ((std - 1).abs() > left) & (std > left)).nonzero().flatten().tolist():
            raise ValueError(
                f"the inputs are not standardised by the prior part, whose mean and std are {float(mean[channel]):.2g} "
                f"and {float(std[channel]):.4g} in channel {channel}, not 0 and 1; constants from elsewhere may have "
                "seen the bound set: use those of split.prior"
            )


def _single_draw(
    plain: nn.Module, posterior: SpikeSlab, prior: SpikeSlab, bound_set: Part, hashes: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """One network h ~ Q for deployment: its errors, its log dQ/dP, its counted sparsity; its weights and its mask."""
    seed = seed_of(hashes, "single draw")
    drawn, mask = draw(posterior, seed=seed, step=0), gates(posterior, seed=seed, step=0)
    ratio = log_ratio(posterior, prior, drawn, mask)
    zeros = sum(int((w == 0).sum()) for w in drawn.values())
    return (
        {
            "seed": seed,
            "errors": int(drawn_networks.errors(plain, drawn, bound_set).sum()),
            "log_ratio": ratio + abs(ratio) * 1e-12 + 1e-12,
            "sparsity": zeros / posterior.total,
        },
        drawn,
        mask,
    )


def _thresholded(
    plain: nn.Module, posterior: SpikeSlab, fixed: dict[str, Tensor], split: Split, hashes: dict[str, str]
) -> dict[str, Any]:
    """The thresholded network and how often it disagrees with draws of Q on inputs that no fit has seen."""
    seed, inputs = seed_of(hashes, "unlabelled draws"), len(split.unlabelled)
    zeros = sum(int((w == 0).sum()) for w in fixed.values())
    found = drawn_networks.disagreements(plain, posterior, fixed, split.unlabelled.x, seed=seed) if inputs else 0
    return {
        "seed": seed,
        "inputs": inputs,
        "disagreements": found,
        "errors": int(drawn_networks.errors(plain, fixed, split.bound).sum()),
        "sparsity": zeros / posterior.total,
    }


def packed(mask: Tensor) -> Tensor:
    """A mask as bits, eight to a byte, first weight in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def seed_of(hashes: dict[str, str], purpose: str) -> int:
    """The first 63 bits of SHA-256(prior hash, posterior hash, purpose): nobody can fish for a lucky seed."""
    content = f"{hashes['prior']}/{hashes['posterior']}/{purpose}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 1


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """The SpikeSlab hash of plain tensors: of what P and Q share, or of a whole network."""
    return SpikeSlab({}, {}, {}, tensors, 0).hash


def _count_calls(folder: Path, prior_hash: str) -> int:
    """How often this prior has been certified against, kept beside the written prior so that processes add up."""
    path = folder / "certify-calls.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[prior_hash] = known.get(prior_hash, 0) + 1
    write_atomically(path, json.dumps(known).encode())
    return known[prior_hash]


def _provenance(split: Split, hashes: dict[str, str], *, assumptions: tuple[str, ...] = ASSUMPTIONS) -> dict[str, Any]:
    """Where the data came from, how it was cut and standardised, what was hashed, and what is assumed."""
    parts = {part.name: part for part in (split.prior, split.bound, split.unlabelled)}
    return {
        "data": {"dataset": split.dataset, "files": dict(split.files), "classes": split.classes},
        "split": {
            "seed": split.seed,
            "prior_fraction": split.prior_fraction,
            "sizes": {name: len(part) for name, part in parts.items()},
            "declared": split.declared,
            "duplicates": split.duplicates,
            "parts": {name: part.hash for name, part in parts.items()},
            "indices": {name: hashlib.sha256(part.index.numpy().tobytes()).hexdigest() for name, part in parts.items()},
        },
        "standardisation": {"mean": list(split.mean), "std": list(split.std)},
        "evaluation": EVALUATION,
        "hashes": hashes,
        "assumptions": [*assumptions, *(["the split is random as declared by the issuer"] if split.declared else [])],
        "software": {"pacprune": __version__, "torch": torch.__version__},
    }
