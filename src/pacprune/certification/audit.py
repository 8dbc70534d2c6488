"""Verification with the data at hand: the split replayed, deterministic networks counted again, draws replayed."""

import copy
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.bounds import montecarlo
from pacprune.certification import certificate, certify, drawn_networks
from pacprune.certification.certificate import Certificate
from pacprune.certification.verify import Report
from pacprune.certification.verify import verify as check_arithmetic
from pacprune.data.splits import Split
from pacprune.masking import weights
from pacprune.masking.spikeslab import SpikeSlab, draw, gates
from pacprune.types import Progress

AGAIN = 200
"""How many of the issuer's own draws a replay makes again, from a place that it picks."""
CONFIDENCE = 1e-6
"""A replay refutes a certificate only at this level: a true one is called false once in a million replays."""


def verify(
    folder: str | Path,
    *,
    split: Split | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data_dir: str | Path | None = None,
    recount: bool = False,
    replay: bool = False,
    draws: int = 2000,
    seed: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Checks a certificate folder; `report.valid` says whether it holds, `report.failure` which rule does not.

    Level 1, always: all hashes, the KL and every bound, by the independent arithmetic of `verify.py`. Level 2, with
    `recount`, a `split` or a `data_dir`: the split is replayed from its seed and the errors of the deterministic
    networks are counted again. Level 3, with `replay`: `draws` fresh networks, by default with a seed that nobody can
    foresee, must not contradict what is stated, and some of the issuer's own draws are made again.
    A network that is not pacprune's own comes in as `model` (a plain module, or what builds one), data that is not as
    `split`.
    """
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {2**63 - 1}, or left out")
    if not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds {certificate.RECORD}")
    report = check_arithmetic(folder)
    if not report.valid or not (recount or replay or split is not None or data_dir is not None):
        return report
    cert = certificate.load(folder)
    try:
        split = _replayed(cert, data_dir) if split is None else split
        plain = _skeleton(cert, split, model).to(device)
    except (KeyError, TypeError) as error:  # fields that the arithmetic does not need
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} does not say which data to load ({what}); ask the issuer for it again") from error
    checks = list(report.checks)
    seed = secrets.randbits(62) if seed is None else seed
    random = cert.record["kind"] == "pac-bayes"
    for check, said in (
        (_split, "the split: data files, index lists, disjoint parts, standardisation from S_P"),
        (
            _recount,
            "errors of the deterministic networks"
            + (", and that the single one is the draw of its seed" if random else ""),
        ),
        (
            _replay,
            f"fresh draws (seed {seed}) contradict neither risks nor disagreements, and the issuer's own draws come "
            "out again",
        ),
    )[: 3 if replay and random else 2]:
        failure = check(cert, split, plain, draws=draws, seed=seed, progress=progress)
        if failure:
            failure += f" (seed {seed})" if check is _replay else ""  # with it, anyone finds the same
            return replace(report, valid=False, failure=failure, checks=tuple(checks))
        checks.append(said)
    left = [line for line in report.trusted if line.startswith("the order")]
    if random and not replay:
        left.append("the draws: the errors of every one and the disagreements, which a replay compares with fresh ones")
    left.append("the model: that these tensors are the network in use")
    if split.declared:
        left.append("the split: that it is random, as declared by the issuer")
    return replace(report, checks=tuple(checks), trusted=tuple(left))


def _replayed(cert: Certificate, data_dir: str | Path | None) -> Split:
    """The split of the record, made again from its seed."""
    record = cert.record["split"]
    if record["declared"] or cert.record["data"]["dataset"] not in data.NAMES:
        raise ValueError(
            f"the certificate is about {cert.record['data']['dataset']!r}, which pacprune cannot load by itself; "
            "give the data as pp.verify(folder, split=...)"
        )
    return data.load(
        cert.record["data"]["dataset"],
        prior_fraction=record["prior_fraction"],
        seed=record["seed"],
        unlabelled=record["sizes"]["unlabelled"],
        data_dir=data_dir,
    )


def _skeleton(cert: Certificate, split: Split, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """A plain module of the certified shape, in eval mode, with the frozen rest loaded."""
    if model is None:
        if cert.record["model"] not in models.NAMES:
            raise ValueError(
                "the certified network is not one of pacprune's own; give it as model= (--model package.module:factory)"
            )
        model = models.build(cert.record["model"], split)
    plain = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    own = dict((*plain.named_parameters(), *plain.named_buffers()))
    state = cert.tensors["model.safetensors" if cert.record["kind"] == "held-out" else "single_draw.safetensors"]
    for name in own.keys() | state.keys():
        shapes = [tuple(where[name].shape) if name in where else None for where in (own, state)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} has shape {shapes[0]} in the model but {shapes[1]} in the certificate; "
                "give the model it was issued for"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
    return plain.eval()


def _split(cert: Certificate, split: Split, plain: nn.Module, **_: Any) -> str | None:
    """The first difference between the split at hand and the one described."""
    record = cert.record
    found = {part.name: part for part in (split.prior, split.bound, split.unlabelled)}
    pairs: list[tuple[str, Any, Any]] = [("files", record["data"]["files"], dict(split.files))]
    pairs += [(key, record["split"][key], getattr(split, key)) for key in ("seed", "prior_fraction", "declared")]
    for name, part in found.items():
        pairs.append((f"size of {name}", record["split"]["sizes"][name], len(part)))
        pairs.append(
            (
                f"indices of {name}",
                record["split"]["indices"][name],
                hashlib.sha256(part.index.numpy().tobytes()).hexdigest(),
            )
        )
        pairs.append((f"content of {name}", record["split"]["parts"][name], part.hash))
    pairs.append(
        (
            "standardisation",
            [record["standardisation"]["mean"], record["standardisation"]["std"]],
            [list(split.mean), list(split.std)],
        )
    )
    pairs.append(("duplicates", record["split"]["duplicates"], split.duplicates))
    for what, stated, own in pairs:
        if stated != own:
            return f"split: {what} is {str(stated)[:60]} in the certificate but {str(own)[:60]} in the data"
    try:
        certify.refuse_split(split)
    except ValueError as error:
        return f"split: {error}"
    return None


def _recount(cert: Certificate, split: Split, plain: nn.Module, **_: Any) -> str | None:
    """The first deterministic network that is not what it should be, or that errs otherwise than stated."""
    record, known = cert.record, weights.prunable(plain)
    try:
        certify.refuse_batch_statistics(plain)
    except ValueError as error:
        return f"recount: {error}"
    other = [name for name in record.get("kl_per_tensor", {}) if name not in known]
    if other or record["total"] != weights.total(plain):
        # A bias or a running statistic in Q would be in no hash of what is frozen.
        size = weights.total(plain)
        return f"recount: Q is over {other} and {record['total']} weights, but the model has {size}, in {list(known)}"
    if record["kind"] == "held-out":
        networks: dict[str, Mapping[str, Tensor]] = {"reference": {}}
    else:
        prior = _slab(cert, "prior", plain)
        names = list(prior.keep_prob)
        networks = {
            "reference": drawn_networks.thresholded(prior),
            "single_draw": {n: cert.tensors["single_draw.safetensors"][n] for n in names},
            "thresholded": {n: cert.tensors["thresholded.safetensors"][n] for n in names},
        }
        posterior = _slab(cert, "posterior", plain)
        for name, keep in gates(posterior, seed=record["single_draw"]["seed"], step=0).items():
            if not torch.equal(certify.packed(keep), cert.tensors["draws.safetensors"][f"single_draw/{name}"]):
                return f"recount: the mask of the single draw network is not the draw of its seed (another {name})"
        for name, again in draw(posterior, seed=record["single_draw"]["seed"], step=0).items():
            # Gates are equal to the bit on every machine, normal numbers up to rounding.
            off, std = (networks["single_draw"][name].to(again.device) - again).abs(), posterior.std[name]
            if bool((off > 1e-3 * std + 1e-5 * again.abs()).any()):
                return f"recount: the single draw network is not the draw of its seed (another {name})"
    for what, values in networks.items():
        counted, stated = int(drawn_networks.errors(plain, dict(values), split.bound).sum()), record[what]["errors"]
        if counted != stated and not _still_holds(record, what, counted):
            return f"recount: the {what.replace('_', ' ')} network makes {counted} errors, not {stated} as stated"
    return None


def _still_holds(record: Mapping[str, Any], what: str, errors: int) -> bool:
    """Whether the bound stated for a network also covers another count (another machine may round otherwise)."""
    n, entry = record["n"], record["bounds"].get("held_out" if what == "reference" else what)
    if entry is None or abs(errors - record[what]["errors"]) > max(2, n // 1000):
        return False
    delta = bounds.Ledger.from_dict(entry["ledger"]).delta_each
    if what == "reference":
        return bounds.clopper_pearson(errors, n=n, delta=delta) <= entry["bound"] + 1e-4
    if what == "single_draw":
        ratio = record["single_draw"]["log_ratio"]
        return bounds.disintegrated(errors, n=n, log_ratio=ratio, delta=delta) <= entry["bound"] + 1e-4
    return True  # no bound rests on the errors of the thresholded network


def _replay(
    cert: Certificate, split: Split, plain: nn.Module, *, draws: int, seed: int, progress: Progress | None
) -> str | None:
    """The first stated number that fresh draws contradict, or the issuer's draws when they do not come out again."""
    stored = cert.tensors["draws.safetensors"]
    reference = drawn_networks.errors(plain, drawn_networks.thresholded(_slab(cert, "prior", plain)), split.bound)
    for whose in ("posterior", "prior"):
        stated = cert.record["monte_carlo"][whose]
        if seed == stated["seed"]:
            raise ValueError(f"seed {seed} is the certificate's own; replay with another one")
        counts = drawn_networks.monte_carlo(
            plain,
            _slab(cert, whose, plain),
            split.bound,
            reference,
            seed=seed,
            batch=min(certify.BATCH, len(split.bound)),
            draws=draws,
            stage=f"replay {whose}",
            progress=progress,
        )
        own = {
            what: stored[f"{whose}/{what}"].numpy() / cert.record["monte_carlo"]["batch"] for what in ("plus", "minus")
        }
        share = _ledger(cert, "excess").monte_carlo_each / 2
        for what, lower, upper in (
            ("risk", _lower(counts.wrong, counts), stated["risk_upper"]),
            ("share of new errors", _lower(counts.plus, counts), montecarlo.betting(own["plus"], delta=share)),
            ("share of successes", montecarlo.betting_lower(own["minus"], delta=share), _upper(counts.minus, counts)),
        ):
            if lower > upper:
                return f"replay: the {whose}'s {what} is not as stated: {lower:.4f} or more, and {upper:.4f} or less"
        first = seed % max(1, stated["draws"] - AGAIN)
        again = drawn_networks.monte_carlo(
            plain,
            _slab(cert, whose, plain),
            split.bound,
            reference,
            seed=stated["seed"],
            batch=cert.record["monte_carlo"]["batch"],
            draws=min(AGAIN, stated["draws"]),
            first=first,
        )
        off = int((again.wrong - stored[f"{whose}/wrong"][first : first + len(again)]).abs().sum())
        if off > 2 + len(again) * again.batch // 100:  # another machine may round a few examples to the other side
            return f"replay: draws {first} to {first + len(again) - 1} of the {whose} err otherwise on {off} examples"
    if not cert.record["thresholded"]["inputs"]:
        return None
    posterior, inputs = _slab(cert, "posterior", plain), len(split.unlabelled)
    found = drawn_networks.disagreements(
        plain, posterior, drawn_networks.thresholded(posterior), split.unlabelled.x, seed=seed
    )
    lower = 1 - bounds.clopper_pearson(inputs - found, n=inputs, delta=CONFIDENCE)
    stated = cert.record["thresholded"]["disagreements"]
    upper = bounds.clopper_pearson(stated, n=inputs, delta=_ledger(cert, "thresholded").unlabelled_each)
    if lower > upper:
        return f"replay: Q disagrees with the thresholded network on {found} of {inputs} inputs, not on {stated}"
    return None


def _ledger(cert: Certificate, name: str) -> bounds.Ledger:
    return bounds.Ledger.from_dict(cert.record["bounds"][name]["ledger"])


def _lower(errors: Tensor, counts: drawn_networks.Counts) -> float:
    return montecarlo.betting_lower(errors.numpy() / counts.batch, delta=CONFIDENCE)


def _upper(errors: Tensor, counts: drawn_networks.Counts) -> float:
    return montecarlo.betting(errors.numpy() / counts.batch, delta=CONFIDENCE)


def _slab(cert: Certificate, whose: str, plain: nn.Module) -> SpikeSlab:
    """P or Q of a saved certificate, its weights numbered in the model's order."""
    stored = cert.tensors["distributions.safetensors"]
    names = [n for n in weights.prunable(plain) if f"{whose}/keep_prob/{n}" in stored]
    device = next(plain.parameters()).device
    parts = [{n: stored[f"{whose}/{part}/{n}"].to(device) for n in names} for part in ("keep_prob", "mean", "std")]
    rest = {key.removeprefix("rest/"): t for key, t in stored.items() if key.startswith("rest/")}
    return SpikeSlab(*parts, rest=rest, total=cert.record["total"])
