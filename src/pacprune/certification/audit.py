"""Verification with the data at hand: the split replayed, deterministic networks counted again, draws replayed."""

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.bounds import Ledger, montecarlo
from pacprune.certification import certify, decode, drawn_networks, rules
from pacprune.certification.certificate import RECORD, Certificate
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import BoundEntry, Draws, PacBayesRecord
from pacprune.certification.verify import Report
from pacprune.certification.verify import verify as check_arithmetic
from pacprune.data.splits import Split
from pacprune.masking import weights
from pacprune.masking.spikeslab import draw_masks, draw_weights
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
    """Checks a certificate folder, by arithmetic alone or with the data at hand.

    Level 1, always: all hashes, the KL and every bound, by the independent arithmetic of `verify.py`.
    Level 2, with `recount`, a `split` or a `data_dir`: the split is replayed from its seed, and the errors of the
    deterministic networks are counted again.
    Level 3, with `replay`: fresh networks must not contradict what is stated, and some of the issuer's own draws are
    made again.

    Args:
        folder: The folder that holds certificate.json.
        split: The data of the certificate, where it is not one of pacprune's data sets.
        model: The certified network, where it is not one of pacprune's own: a plain module, or a function that builds
            one.
        data_dir: Where the files of a data set lie; None for the usual place.
        recount: Whether to check the split and the errors of the deterministic networks.
        replay: Whether to draw networks as well.
        draws: How many fresh networks a replay draws of each of P and Q.
        seed: Seed of the fresh draws; None takes one that nobody can foresee.
        device: Where networks are evaluated, such as "cpu" or "cuda".
        progress: Called as progress(stage, done, total, row) while networks are drawn.

    Returns:
        A report: `valid` says whether the certificate holds, `failure` which rule does not, `checks` what was checked
        and `trusted` what is taken on trust.

    Raises:
        ValueError: If the folder cannot be read, or the data or the model does not fit.

    Example:
        >>> folder = pp.certify_held_out(model, split).save("network")
        >>> pp.verify(folder).valid
        True
        >>> pp.verify(folder, split=split, model=model).valid
        True
    """
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {2**63 - 1}, or left out")
    if not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds {RECORD}")
    report = check_arithmetic(folder)
    if not report.valid or not (recount or replay or split is not None or data_dir is not None):
        return report
    cert = decode.load(folder)
    try:
        split = _replayed_split(cert, data_dir) if split is None else split
        plain = _skeleton(cert, split, model).to(device)
    except (KeyError, TypeError) as error:  # fields that the arithmetic does not need
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} does not say which data to load ({what}); ask the issuer for it again") from error
    audit = _Audit(cert, split, plain, draws, secrets.randbits(62) if seed is None else seed, progress)
    checks = list(report.checks)
    for sentence, check in audit.checks(replay=replay):
        failure = check()
        if failure:
            return replace(report, valid=False, failure=failure, checks=tuple(checks))
        checks.append(sentence)
    return replace(report, checks=tuple(checks), trusted=_still_trusted(report, cert, split, replay=replay))


def _still_trusted(report: Report, cert: Certificate, split: Split, *, replay: bool) -> tuple[str, ...]:
    """What is still taken on trust by somebody who has the data."""
    lines = [line for line in report.trusted if line.startswith("the order")]
    if cert.record["kind"] == "pac-bayes" and not replay:
        lines.append(
            "the draws: the errors of every one and the disagreements, which a replay compares with fresh ones"
        )
    lines.append("the model: that these tensors are the network in use")
    if split.declared:
        lines.append("the split: that it is random, as declared by the issuer")
    return tuple(lines)


# --- The data and the network, made again.


def _replayed_split(cert: Certificate, data_dir: str | Path | None) -> Split:
    """The split of the record, made again from its seed."""
    record, dataset = cert.record["split"], cert.record["data"]["dataset"]
    if record["declared"] or dataset not in data.NAMES:
        raise ValueError(
            f"the certificate is about {dataset!r}, which pacprune cannot load by itself; "
            "give the data as pp.verify(folder, split=...)"
        )
    return data.load(
        dataset,
        prior_fraction=record["prior_fraction"],
        seed=record["seed"],
        unlabelled=record["sizes"]["unlabelled"],
        data_dir=data_dir,
    )


def _skeleton(cert: Certificate, split: Split, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """A plain module of the certified shape, in eval mode, with the frozen rest loaded."""
    if model is None:
        name = cert.record["model"]
        if name not in models.NAMES:
            raise ValueError(
                "the certified network is not one of pacprune's own; give it as model= (--model package.module:factory)"
            )
        model = models.build(name, split)
    plain = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    tensors = dict((*plain.named_parameters(), *plain.named_buffers()))
    state = cert.tensors["model.safetensors" if cert.record["kind"] == "held-out" else "single_draw.safetensors"]
    for name in tensors.keys() | state.keys():
        shapes = [tuple(where[name].shape) if name in where else None for where in (tensors, state)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} has shape {shapes[0]} in the model but {shapes[1]} in the certificate; "
                "give the model it was issued for"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
    return plain.eval()


# --- The checks. Each returns what is wrong, or None.


@dataclass(frozen=True, eq=False)
class _Audit:
    """A certificate, the data and the network it is about, and how fresh draws are made."""

    cert: Certificate
    split: Split
    plain: nn.Module
    draws: int
    seed: int
    progress: Progress | None

    def checks(self, *, replay: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """Every check, with the sentence that says what holds when it passes."""
        yield "the split: data files, index lists, disjoint parts, standardisation from S_P", self.split_failure
        networks = "errors of the deterministic networks"
        if self.cert.record["kind"] == "held-out":
            yield networks, self.recount_failure
            return
        yield f"{networks}, and that the single one is the draw of its seed", self.recount_failure
        if replay:
            yield (
                f"fresh draws (seed {self.seed}) contradict neither risks nor disagreements, and the issuer's own "
                "draws come out again",
                self.replay_failure,
            )

    # --- Level 2.

    def split_failure(self) -> str | None:
        """The first difference between the split at hand and the one described, or a rule that the split breaks."""
        for what, stated, present in self._split_pairs():
            if stated != present:
                return f"split: {what} is {str(stated)[:60]} in the certificate but {str(present)[:60]} in the data"
        try:
            rules.refuse_split(self.split)
        except ValueError as error:
            return f"split: {error}"
        return None

    def _split_pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """What the certificate states of the split, beside what it is."""
        record, split = self.cert.record, self.split
        stated, constants = record["split"], record["standardisation"]
        yield "files", record["data"]["files"], dict(split.files)
        yield "seed", stated["seed"], split.seed
        yield "prior_fraction", stated["prior_fraction"], split.prior_fraction
        yield "declared", stated["declared"], split.declared
        for part in (split.prior, split.bound, split.unlabelled):
            yield f"size of {part.name}", stated["sizes"][part.name], len(part)
            yield f"indices of {part.name}", stated["indices"][part.name], certify.index_hash(part)
            yield f"content of {part.name}", stated["parts"][part.name], part.hash
        yield "standardisation", [constants["mean"], constants["std"]], [list(split.mean), list(split.std)]
        yield "duplicates", stated["duplicates"], split.duplicates

    def recount_failure(self) -> str | None:
        """The first deterministic network that is not what it should be, or that errs otherwise than stated."""
        try:
            rules.refuse_batch_statistics(self.plain)
        except ValueError as error:
            return f"recount: {error}"
        record, prunable = self.cert.record, weights.prunable(self.plain)
        terms = record["kl_per_tensor"] if record["kind"] == "pac-bayes" else {}
        unknown, total = [name for name in terms if name not in prunable], weights.total(self.plain)
        if unknown or record["total"] != total:
            # A bias or a running statistic in Q would be in no hash of what is frozen.
            return (
                f"recount: Q is over {unknown} and {record['total']} weights, but the model has {total}, "
                f"in {list(prunable)}"
            )
        failure = self._single_draw_failure(record) if record["kind"] == "pac-bayes" else None
        return failure or self._errors_failure()

    def _single_draw_failure(self, record: PacBayesRecord) -> str | None:
        """Whether mask or weights of the single network are another draw than that of its seed."""
        posterior, seed = decode.distribution(self.cert, "posterior", self.plain), record["single_draw"]["seed"]
        masks, network = self.cert.tensors["draws.safetensors"], self.cert.tensors["single_draw.safetensors"]
        for name, mask in draw_masks(posterior, seed=seed, step=0).items():
            if not torch.equal(certify.mask_bits(mask), masks[f"single_draw/{name}"]):
                return f"recount: the mask of the single draw network is not the draw of its seed (another {name})"
        for name, drawn in draw_weights(posterior, seed=seed, step=0).items():
            # Gates are equal to the bit on every machine, normal numbers up to rounding.
            distance = (network[name].to(drawn.device) - drawn).abs()
            if bool((distance > 1e-3 * posterior.std[name] + 1e-5 * drawn.abs()).any()):
                return f"recount: the single draw network is not the draw of its seed (another {name})"
        return None

    def _errors_failure(self) -> str | None:
        """The first deterministic network whose errors are not as stated."""
        for what, network, stated in self._networks():
            errors = int(drawn_networks.errors(self.plain, dict(network), self.split.bound).sum())
            if errors != stated and not self._still_holds(what, errors, stated):
                return f"recount: the {what.replace('_', ' ')} network makes {errors} errors, not {stated} as stated"
        return None

    def _networks(self) -> Iterator[tuple[str, Mapping[str, Tensor], int]]:
        """Every deterministic network by the field that describes it: its weights, and the errors that are stated."""
        record, tensors = self.cert.record, self.cert.tensors
        if record["kind"] == "held-out":
            yield "reference", {}, record["reference"]["errors"]
            return
        prior = decode.distribution(self.cert, "prior", self.plain)
        single, fixed = (
            {name: tensors[file][name] for name in prior.keep_prob}
            for file in ("single_draw.safetensors", "thresholded.safetensors")
        )
        yield "reference", drawn_networks.thresholded(prior), record["reference"]["errors"]
        yield "single_draw", single, record["single_draw"]["errors"]
        yield "thresholded", fixed, record["thresholded"]["errors"]

    def _still_holds(self, what: str, errors: int, stated: int) -> bool:
        """Whether the bound stated for a network also covers another count (another machine may round otherwise)."""
        record, n = self.cert.record, self.cert.n
        entry = record["bounds"].get("held_out" if what == "reference" else what)
        if entry is None or abs(errors - stated) > max(2, n // 1000):
            return False
        delta = _ledger(entry).delta_each
        if what == "reference":
            return bounds.clopper_pearson(errors, n=n, delta=delta) <= entry["bound"] + 1e-4
        if what == "single_draw":
            ratio = self.cert.pac_bayes["single_draw"]["log_ratio"]
            return bounds.disintegrated(errors, n=n, log_ratio=ratio, delta=delta) <= entry["bound"] + 1e-4
        return True  # no bound rests on the errors of the thresholded network

    # --- Level 3.

    def replay_failure(self) -> str | None:
        """The first stated number that fresh draws contradict, or the issuer's draws when they do not come out again.

        The seed is named: with it, anyone finds the same.
        """
        prior = decode.distribution(self.cert, "prior", self.plain)
        reference = drawn_networks.errors(self.plain, drawn_networks.thresholded(prior), self.split.bound)
        stated = self.cert.pac_bayes["monte_carlo"]
        failure = (
            self._draws_failure("posterior", stated["posterior"], reference)
            or self._draws_failure("prior", stated["prior"], reference)
            or self._disagreements_failure()
        )
        return failure and f"{failure} (seed {self.seed})"

    def _draws_failure(self, whose: str, stated: Draws, reference: Tensor) -> str | None:
        """What fresh draws of P or Q contradict, or which of the issuer's own do not come out again."""
        if self.seed == stated["seed"]:
            raise ValueError(f"seed {self.seed} is the certificate's own; replay with another one")
        return self._risk_failure(whose, stated, reference) or self._repeated_failure(whose, stated, reference)

    def _counts(self, whose: str, reference: Tensor, **options: Any) -> Counts:
        slab = decode.distribution(self.cert, whose, self.plain)
        return drawn_networks.monte_carlo(self.plain, slab, self.split.bound, reference, **options)

    def _risk_failure(self, whose: str, stated: Draws, reference: Tensor) -> str | None:
        """The first share of errors that lies elsewhere, with high confidence, than the issuer's draws say."""
        fresh = self._counts(
            whose,
            reference,
            seed=self.seed,
            batch=min(certify.BATCH, len(self.split.bound)),
            draws=self.draws,
            stage=f"replay {whose}",
            progress=self.progress,
        )
        issued, delta = (
            decode.counts(self.cert, whose),
            _ledger(self.cert.record["bounds"]["excess"]).monte_carlo_each / 2,
        )
        for what, lower, upper in (
            ("risk", _lower(fresh.wrong, fresh, CONFIDENCE), stated["risk_upper"]),
            ("share of new errors", _lower(fresh.plus, fresh, CONFIDENCE), _upper(issued.plus, issued, delta)),
            ("share of successes", _lower(issued.minus, issued, delta), _upper(fresh.minus, fresh, CONFIDENCE)),
        ):
            if lower > upper:
                return f"replay: the {whose}'s {what} is not as stated: {lower:.4f} or more, and {upper:.4f} or less"
        return None

    def _repeated_failure(self, whose: str, stated: Draws, reference: Tensor) -> str | None:
        """Whether some of the issuer's own draws, made again, err otherwise."""
        issued, first = decode.counts(self.cert, whose), self.seed % max(1, stated["draws"] - AGAIN)
        repeated = self._counts(
            whose,
            reference,
            seed=stated["seed"],
            batch=issued.batch,
            draws=min(AGAIN, stated["draws"]),
            first=first,
        )
        end = first + len(repeated)
        different = int((repeated.wrong - issued.wrong[first:end]).abs().sum())
        if different > 2 + len(repeated) * repeated.batch // 100:  # another machine may round a few to the other side
            return f"replay: draws {first} to {end - 1} of the {whose} err otherwise on {different} examples"
        return None

    def _disagreements_failure(self) -> str | None:
        """Whether Q disagrees with the thresholded network on more inputs than stated."""
        record, inputs = self.cert.pac_bayes, len(self.split.unlabelled)
        if not record["thresholded"]["inputs"]:
            return None
        posterior = decode.distribution(self.cert, "posterior", self.plain)
        network = drawn_networks.thresholded(posterior)
        counted = drawn_networks.disagreements(self.plain, posterior, network, self.split.unlabelled.x, seed=self.seed)
        stated, delta = record["thresholded"]["disagreements"], _ledger(record["bounds"]["thresholded"]).unlabelled_each
        lower = 1 - bounds.clopper_pearson(inputs - counted, n=inputs, delta=CONFIDENCE)
        if lower > bounds.clopper_pearson(stated, n=inputs, delta=delta):
            return f"replay: Q disagrees with the thresholded network on {counted} of {inputs} inputs, not on {stated}"
        return None


def _ledger(entry: BoundEntry) -> Ledger:
    return Ledger.from_dict(entry["ledger"])


def _lower(errors: Tensor, counts: Counts, delta: float) -> float:
    """A lower bound on the mean share of errors per draw."""
    return montecarlo.betting_lower(errors.numpy() / counts.batch, delta=delta)


def _upper(errors: Tensor, counts: Counts, delta: float) -> float:
    """An upper bound on the mean share of errors per draw."""
    return montecarlo.betting(errors.numpy() / counts.batch, delta=delta)
