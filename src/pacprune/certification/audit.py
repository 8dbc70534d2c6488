"""Verification with the data at hand: the split replayed, networks counted again, draws made again and made anew."""

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pacprune import bounds, models, philox
from pacprune.bounds import Ledger, montecarlo
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import bounds_table, certify, decode, drawn_networks, risks, rules
from pacprune.certification import verify as arithmetic
from pacprune.certification.certificate import RECORD, Certificate
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.held_out import pair_split
from pacprune.certification.record import BoundEntry, PacBayesRecord, RiskRecord
from pacprune.certification.recount import CONFIDENCE, RiskAudit, split_failure, tolerance
from pacprune.certification.risks import Loss, Risk
from pacprune.certification.verify import Report
from pacprune.data import datasets
from pacprune.data.splits import Split
from pacprune.masking import weights
from pacprune.masking.spikeslab import SpikeSlab, draw_masks, draw_weights
from pacprune.training.evaluate import mistakes
from pacprune.types import Progress


def verify(
    folder: str | Path,
    *,
    split: Split | tuple[Tensor, Tensor | None] | None = None,
    data: str | Callable[..., Split] | None = None,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    reference: nn.Module | Callable[[], nn.Module] | str | None = None,
    risk: Loss | None = None,
    data_dir: str | Path | None = None,
    recount: bool = False,
    replay: bool = False,
    draws: int = 2000,
    seals: tuple[str, ...] = (),
    seed: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Checks a certificate folder, by arithmetic alone or with the data at hand.

    Level 1, always: all hashes, the KL and every bound, by the independent arithmetic of `verify.py`. It shows that the
    claim follows from the stated counts, and nothing about the network.
    Level 2, with `recount`, a `split`, `data` or a `data_dir`: the split is replayed from its seed, the errors and the
    sparsity of the fixed networks are counted again, and the test part must not refute the claim. The weights come
    from the certificate: `model` gives the network's form alone. Where its weights are others, `findings` says so.
    Level 3, with `replay`: the issuer's draws are made again, and so are fresh ones, which nobody could have foreseen.

    Args:
        folder: The folder that holds certificate.json, or that whose folder `certificate` does.
        split: The data of the certificate, where it is not one of pacprune's data sets: a Split, or the pair (x, y).
        data: The same by a name or a function that `pp.data.load` takes, to be split as the certificate says.
        model: The form of the certified network, where it is not one of pacprune's own: a plain module, a function that
            builds one, or package.module:factory as `pp.models.build` takes it.
        reference: The reference network of a certificate that compares with one, likewise, if its shapes are others.
        risk: The loss of a certificate about a loss of the issuer's own: the function (output, (x, y)) that it names.
        data_dir: Where the files of a data set lie; None for the usual place.
        recount: Whether to check the split and the errors of the fixed networks.
        replay: Whether to draw networks as well.
        draws: How many of the issuer's draws of each of P and Q are made again, at random, and how many fresh ones
            beside them; as many as the certificate has, or more, make all of them again.
        seals: Digests that the issuer published before; the certificate must have been made under them.
        seed: Seed of what is drawn here; None takes one that nobody can foresee.
        device: Where networks are evaluated, such as "cpu" or "cuda".
        progress: Called as progress(stage, done, total, row) while networks are drawn.

    Returns:
        A report: `valid` says whether the certificate holds, `level` how far that was checked, `failure` which rule
        does not hold, `checks` what was checked, `findings` what was computed beside it, and `trusted` what is taken on
        trust.

    Raises:
        ValueError: If the folder cannot be read, or the data or the model does not fit.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> folder = pp.certify_held_out(model, split).save("network")
        >>> pp.verify(folder).verdict
        'VALID (level 1: the arithmetic follows from the stated counts)'
        >>> pp.verify(folder, split=split, model=model).level
        2
    """
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {2**63 - 1}, or left out")
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 must be made again")
    folder = arithmetic.place(folder)
    if not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds {RECORD}")
    try:
        contents = arithmetic.read(folder)  # once: every level looks at the same bytes
    except arithmetic.Refused as refusal:
        return Report(False, 1, (), str(refusal))
    report = arithmetic.check(contents, seals)
    has_data = any(source is not None for source in (split, data, data_dir))
    if not report.valid or not (recount or replay or has_data):
        return report
    cert = decode.certificate(contents)
    if isinstance(split, tuple):
        split = pair_split(*split)
    split = _replayed_split(cert, data, data_dir) if split is None else split
    plain = _skeleton(cert, split, model).to(device)
    audit: _Audit | RiskAudit
    if cert.record["kind"] == "risk":
        compared = _reference(cert, split, model if reference is None else reference, device)
        audit = RiskAudit(cert, cert.record, split, plain, compared, _risk_of(cert.record, risk))
    else:
        audit = _Audit(cert, split, plain, draws, secrets.randbits(62) if seed is None else seed, progress)
    level = 3 if replay and cert.record["kind"] == "pac-bayes" else 2
    checks = list(report.checks)
    for sentence, find_failure in audit.checks(replay=replay):
        failure = find_failure()
        if failure:
            return Report(False, level, tuple(checks), failure)
        checks.append(sentence)
    trusted = arithmetic.trusted(contents.record, level)
    findings = (*audit.findings, *_other_weights(cert, model))
    return replace(report, level=level, checks=tuple(checks), findings=findings, trusted=trusted)


def _other_weights(cert: Certificate, model: object) -> list[str]:
    """Says so where the verifier's network is another one than was certified, and served as its architecture alone."""
    certified_hash = cert.record["hashes"].get("model")
    if not isinstance(model, nn.Module) or certified_hash is None:
        return []
    state = {key: t.detach() for key, t in (*model.named_parameters(), *model.named_buffers())}
    if certify.tensor_hash(state) == certified_hash:
        return []
    return ["the model that was given has other weights; those in the folder were checked, and hold for no others"]


# --- The data and the network, made again.


def _replayed_split(cert: Certificate, data: str | Callable[..., Split] | None, data_dir: str | Path | None) -> Split:
    """The split of the record, made again from its seed, of the user's `data` or of the data set it names."""
    record, dataset = cert.record["split"], cert.record["data"]["dataset"]
    # A certificate may come from anybody: what it names is never imported or opened, unless pacprune knows it.
    if data is None and (record["declared"] or dataset not in datasets.NAMES):
        raise ValueError(
            f"the certificate is about {dataset!r}, which pacprune cannot load by itself; "
            "give the data as --data, or as pp.verify(folder, split=...)"
        )
    return datasets.load(
        dataset if data is None else data,
        prior_fraction=record["prior_fraction"],
        seed=record["seed"],
        unlabelled=record["sizes"]["unlabelled"],
        data_dir=data_dir,
    )


Network = nn.Module | Callable[[], nn.Module] | str | None
_STATES = {"held-out": "model", "risk": "model", "pac-bayes": "single_draw"}
"""The file that has all tensors of the certified network."""


def _skeleton(cert: Certificate, split: Split, model: Network) -> nn.Module:
    """A plain module of the certified shape, in eval mode, with the frozen rest loaded."""
    state = cert.tensors[f"{_STATES[cert.record['kind']]}.safetensors"]
    return _loaded(_built(cert, split, model), state, "give the model it was issued for")


def _reference(cert: Certificate, split: Split, reference: Network, device: str) -> nn.Module | None:
    """The reference network, where a certificate has one."""
    state = cert.tensors.get("reference.safetensors")
    if state is None:
        return None
    remedy = "give the reference network as reference= (--reference package.module:factory)"
    return _loaded(_built(cert, split, reference), state, remedy).to(device)


def _risk_of(record: RiskRecord, loss: Loss | None) -> Risk:
    """The risk of a record; of the issuer's own loss, by the function that the verifier gives."""
    name = record["risk"]["name"]
    if (":" in name) != (loss is not None):
        remedy = "give the function as risk= (--risk package.module:function)" if loss is None else "leave risk= out"
        raise ValueError(f"the certificate is about the risk {name}; {remedy}")
    if loss is not None:
        return replace(risks.find(loss)[1], phrase=f"mean of the loss {name}")
    return risks.find(name)[1]


def _built(cert: Certificate, split: Split, model: Network) -> nn.Module:
    """A network of the shape that the user, or the certificate, names."""
    if model is None:
        model = cert.record["model"]
        if model not in models.NAMES:
            unnamed = "not named in the certificate (name= when it was issued)"
            known = f"{model}, which pacprune does not have" if model else unnamed
            raise ValueError(f"the certified network is {known}; give it as model= (--model package.module:factory)")
    if isinstance(model, str):
        model = models.build(model, split)
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model()


def _loaded(plain: nn.Module, state: Mapping[str, Tensor], remedy: str) -> nn.Module:
    """The network with these tensors, in eval mode."""
    tensors = dict((*plain.named_parameters(), *plain.named_buffers()))
    for name in tensors.keys() | state.keys():
        shapes = [tuple(where[name].shape) if name in where else None for where in (tensors, state)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} has shape {shapes[0]} in the model but {shapes[1]} in the certificate; {remedy}")
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
    findings: list[str] = field(default_factory=list)

    def checks(self, *, replay: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """Every check, with the sentence that says what holds when it passes."""
        yield (
            "the split: data files, index lists, disjoint parts, copies, standardisation from S_P",
            partial(split_failure, self.cert, self.split),
        )
        random = self.cert.record["kind"] == "pac-bayes"
        single = ", and that the single one is the draw of its seed" if random else ""
        yield f"errors and sparsity of the fixed networks{single}", self.recount_failure
        if len(self.split.test):
            yield f"{len(self.split.test):,} test examples do not refute the claim", self.test_failure
        if replay and random:
            yield f"the issuer's draws come out again (picked by the seed {self.seed})", self.repeat_failure
            yield f"fresh draws (seed {self.seed}) contradict neither risks nor disagreements", self.fresh_failure

    # --- Level 2.

    def recount_failure(self) -> str | None:
        """The first fixed network that is not what it should be, or that errs otherwise than stated."""
        try:
            rules.refuse_batch_statistics(self.plain)
            rules.refuse_hidden(self.plain, "the network", self.cert.record["declaration"])
            rules.refuse_unsteady(self.plain, self.split.bound.x)
        except ValueError as error:
            return f"recount: {error}"
        record, prunable = self.cert.record, weights.all_weights(self.plain)
        terms = record["kl_per_tensor"] if record["kind"] == "pac-bayes" else {}
        unknown, total = [name for name in terms if name not in prunable], weights.total(self.plain)
        if unknown or record["total"] != total:
            # A bias or a running statistic in Q would be in no hash of what is frozen.
            subject = f"Q is over {unknown} and" if terms else "the certificate is about"
            return f"recount: {subject} {record['total']} weights, but the model has {total}, in {list(prunable)}"
        failure = None
        if record["kind"] == "pac-bayes":
            failure = self._single_draw_failure(record) or self._thresholded_failure()
        return failure or self._sparsity_failure() or self._errors_failure()

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
            if bool((distance > 2e-5 * posterior.std[name] + 1e-6 * drawn.abs()).any()):
                return f"recount: the single draw network is not the draw of its seed (another {name})"
        return None

    def _thresholded_failure(self) -> str | None:
        """Whether the thresholded network is another than Q's: where keep_prob tie, others have as many weights."""
        network = self.cert.tensors["thresholded.safetensors"]
        for name, weight in drawn_networks.thresholded(self._distribution("posterior")).items():
            if not torch.equal(network[name].to(weight.device), weight):
                return f"recount: the thresholded network is not that of Q (another {name})"
        return None

    def _sparsity_failure(self) -> str | None:
        """The first fixed network that has fewer zeros, or more, than stated."""
        record, total = self.cert.record, self.cert.record["total"]
        for what, network, _ in self._networks():
            if record["kind"] == "held-out":
                stated, tensors = record["sparsity"], dict(weights.all_weights(self.plain))
            elif what == "reference":  # whose sparsity no field states
                continue
            else:
                stated, tensors = record[what]["sparsity"], network
            counted = sum(int((w == 0).sum()) for w in tensors.values()) / total
            if abs(counted - stated) > 1e-9:
                return f"recount: the {what.replace('_', ' ')} network has sparsity {counted}, not {stated} as stated"
        return None

    def _errors_failure(self) -> str | None:
        """The first fixed network whose errors are not as stated, but for answers that rounding can turn."""
        for what, network, stated in self._networks():
            errors = int(drawn_networks.errors(self.plain, dict(network), self.split.bound).sum())
            if errors == stated:
                continue
            close = int(self._close_answers(network, self.split.bound.x).sum())
            if abs(errors - stated) > tolerance(close, len(self.split.bound)):
                return (
                    f"recount: the {what.replace('_', ' ')} network makes {errors} errors, not {stated} as stated "
                    f"({close} of its answers could be turned by rounding)"
                )
        return None

    def _close_answers(self, network: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Which answers of a fixed network another machine may give otherwise."""
        device = self._device
        tensors = {name: w.to(device) for name, w in network.items()}
        parts = [drawn_networks.close_calls(self.plain, tensors, part.to(device)).cpu() for part in x.split(1000)]
        return torch.cat(parts)

    def _networks(self) -> Iterator[tuple[str, Mapping[str, Tensor], int]]:
        """Every fixed network by the field that describes it: its weights, and the errors that are stated."""
        if self.cert.record["kind"] == "held-out":
            yield "reference", {}, self.cert.record["reference"]["errors"]
            return
        record, tensors = self.cert.pac_bayes, self.cert.tensors
        prior = decode.distribution(self.cert, "prior", self.plain)
        single, fixed = (
            {name: tensors[file][name] for name in prior.keep_prob}
            for file in ("single_draw.safetensors", "thresholded.safetensors")
        )
        yield "reference", drawn_networks.thresholded(prior), record["reference"]["errors"]
        yield "single_draw", single, record["single_draw"]["errors"]
        yield "thresholded", fixed, record["thresholded"]["errors"]

    def test_failure(self) -> str | None:
        """The first bound that the errors on the test part refute at CONFIDENCE."""
        for what, stated, errors, size in self._test_errors():
            lower = 1 - bounds.clopper_pearson(size - errors, n=size, delta=CONFIDENCE)
            if lower > stated:
                return (
                    f"refuted by the test set: {what} errs on {errors} of {size} test examples, so on {lower:.4f} or "
                    f"more of new ones, but at most {rounded_up(stated)} is stated"
                )
        return None

    def _test_errors(self) -> Iterator[tuple[str, float, int, int]]:
        """Each bound about something that can be tried: what it is, the bound, and its errors of so many examples."""
        record, test = self.cert.record, self.split.test
        stated = {name: entry["bound"] for name, entry in record["bounds"].items()}
        about = {"reference": "held_out", "single_draw": "single_draw", "thresholded": "thresholded"}
        names = {what: f"the {what.replace('_', ' ')} network" for what in about}
        if record["kind"] == "held-out":  # whose only network is called so in the format
            names["reference"] = "the certified network"
        for what, network, _ in self._networks():
            if about[what] in stated:
                errors = int(drawn_networks.errors(self.plain, dict(network), test).sum())
                self.findings.append(f"test error of {names[what]}: {errors / len(test):.4f}")
                yield names[what], stated[about[what]], errors, len(test)
        if record["kind"] == "held-out":
            return
        size = min(len(test), self.draws)
        some = test.subset(philox.permutation(len(test), seed=self.seed % 2**32)[:size])
        posterior, errors = decode.distribution(self.cert, "posterior", self.plain), 0
        labels = some.y.to(next(self.plain.parameters()).device)
        for steps, _, drawn in drawn_networks.one_draw_each(self.plain, posterior, some.x, seed=self.seed):
            errors += int(mistakes(drawn, labels[steps]).sum())
        self.findings.append(
            f"test error of networks drawn from Q, one for each of {size:,} examples: {errors / size:.4f}"
        )
        gibbs = min(stated[name] for name in (*arithmetic.FAMILIES, "paper") if name in stated)
        yield "a network drawn from Q", gibbs, errors, size

    # --- Level 3.

    def repeat_failure(self) -> str | None:
        """The issuer's draws that do not come out again, but for answers that rounding can turn."""
        return (
            self._repeated_failure("posterior")
            or self._repeated_failure("prior")
            or self._repeated_disagreements_failure()
        )

    def _repeated_failure(self, whose: str) -> str | None:
        """The first of the issuer's draws of P or Q, among those that are made again, that errs otherwise."""
        stated, slab = self.cert.pac_bayes["monte_carlo"][whose], self._distribution(whose)
        issued = decode.counts(self.cert, whose)
        picked = philox.permutation(len(issued), seed=self.seed % 2**32)[: self.draws].sort().values
        batch, seed = issued.batch, stated["seed"]
        count = drawn_networks.draw_counter(self.plain, slab, self.split.bound, self._reference, seed=seed, batch=batch)
        table = torch.stack([issued.wrong, issued.plus, issued.minus], dim=1).long()
        repeated, turned = [], 0
        for steps in picked.split(drawn_networks.chunk_size(slab, self._device)):
            rows = count(steps.to(self._device))
            repeated.append(rows)
            differs = (rows != table[steps]).any(1)
            for step, row in zip(steps[differs].tolist(), rows[differs], strict=True):
                close, (wrong, plus, minus) = (
                    self._close_draw(slab, seed, batch, step),
                    (row - table[step]).abs().tolist(),
                )
                turned += wrong
                if wrong > close[0] or max(plus, minus) > close[1]:
                    return (
                        f"replay: draw {step} of the {whose} makes {_errors(row)} on its {batch} examples, not "
                        f"{_errors(table[step])} as stated ({close[0]} of its answers could be turned by rounding)"
                    )
            if self.progress:
                done = sum(len(part) for part in repeated)
                self.progress(f"replay {whose}", done, len(picked), {})
        answers = len(picked) * batch
        if turned > tolerance(turned, answers):
            return f"replay: {turned} of the {answers} answers of draws of the {whose} are not as stated"
        self._add_repeated(whose, issued, picked, torch.cat(repeated))
        return None

    def _add_repeated(self, whose: str, issued: Counts, picked: Tensor, rows: Tensor) -> None:
        """Says how many draws were made again, and which bound follows from all of them, or who would escape."""
        kind = "Q" if whose == "posterior" else "P"
        if len(picked) < len(issued):
            escape = (1 - len(picked) / len(issued)) ** 100
            self.findings.append(
                f"{len(picked):,} of the {len(issued):,} draws of {kind} made again: whoever changed 100 of them would "
                f"escape with probability {escape:.2g}; --draws {len(issued)} makes all"
            )
            return
        if whose == "posterior":
            wrong, plus, minus = rows.int().unbind(1)
            counts = Counts(issued.batch, wrong, plus, minus)
            self.findings.append(
                f"all {len(issued):,} draws of {kind} made again: at most {rounded_up(self._bound_from(counts))}"
            )
        else:
            self.findings.append(f"all {len(issued):,} draws of {kind} made again")

    def _close_draw(self, slab: SpikeSlab, seed: int, batch: int, step: int) -> tuple[int, int]:
        """On how many examples of its minibatch rounding can turn a draw's answer, and that or the reference's."""
        steps, part = torch.tensor([step], device=self._device), self.split.bound
        index = drawn_networks.minibatches(len(part), batch, seed=seed, steps=steps, device=self._device)[0].cpu()
        network = draw_weights(slab, seed=seed, step=step)
        close = drawn_networks.close_calls(self.plain, network, part.x[index].to(self._device)).cpu()
        return int(close.sum()), int((close | self._close_reference[index]).sum())

    @cached_property
    def _close_reference(self) -> Tensor:
        """On which bound examples rounding can turn the reference's answer; on none, once there are too many."""
        network = drawn_networks.thresholded(self._distribution("prior"))
        close = self._close_answers(network, self.split.bound.x)
        count = int(close.sum())
        return close if count == tolerance(count, len(close)) else torch.zeros_like(close)

    def _repeated_disagreements_failure(self) -> str | None:
        """Whether the issuer's draws disagree with the thresholded network on other inputs than stated."""
        stated = self.cert.pac_bayes["thresholded"]
        if not stated["inputs"]:
            return None
        posterior, x = self._distribution("posterior"), self.split.unlabelled.x
        network = drawn_networks.thresholded(posterior)
        differs = drawn_networks.disagreements(self.plain, posterior, network, x, seed=stated["seed"])
        counted = int(differs.sum())
        if counted == stated["disagreements"]:
            return None
        close = int(self._close_answers(network, x).sum())
        for steps, inputs, _ in drawn_networks.one_draw_each(self.plain, posterior, x, seed=stated["seed"]):
            drawn = draw_weights(posterior, seed=stated["seed"], step=steps)
            close += int(drawn_networks.close_calls(self.plain, drawn, inputs[:, None]).sum())
        if abs(counted - stated["disagreements"]) > tolerance(close, stated["inputs"]):
            return (
                f"replay: the draws disagree with the thresholded network on {counted} of {stated['inputs']} inputs, "
                f"not on {stated['disagreements']} as stated ({close} answers could be turned by rounding)"
            )
        return None

    def fresh_failure(self) -> str | None:
        """The first stated number that fresh draws contradict. The seed is named: with it, anyone finds the same."""
        failure = self._risk_failure("posterior") or self._risk_failure("prior") or self._fresh_disagreements_failure()
        return failure and f"{failure} (seed {self.seed})"

    def _risk_failure(self, whose: str) -> str | None:
        """The first share of errors that lies elsewhere, with high confidence, than the issuer's draws say."""
        stated = self.cert.pac_bayes["monte_carlo"][whose]
        if self.seed == stated["seed"]:
            raise ValueError(f"seed {self.seed} is the certificate's own; replay with another one")
        fresh = drawn_networks.monte_carlo(
            self.plain,
            self._distribution(whose),
            self.split.bound,
            self._reference,
            seed=self.seed,
            batch=min(certify.BATCH, len(self.split.bound)),
            draws=self.draws,
            stage=f"fresh draws of {whose}",
            progress=self.progress,
        )
        issued = decode.counts(self.cert, whose)
        delta = _ledger(self.cert.record["bounds"]["excess"]).monte_carlo_each / 2
        for what, lower, upper in (
            ("risk", _lower(fresh.wrong, fresh, CONFIDENCE), stated["risk_upper"]),
            ("share of new errors", _lower(fresh.plus, fresh, CONFIDENCE), _upper(issued.plus, issued, delta)),
            ("share of successes", _lower(issued.minus, issued, delta), _upper(fresh.minus, fresh, CONFIDENCE)),
        ):
            if lower > upper:
                return f"replay: the {whose}'s {what} is not as stated: {lower:.4f} or more, and {upper:.4f} or less"
        if whose == "posterior":
            self.findings.append(
                f"by {len(fresh):,} fresh draws of your own, at most {rounded_up(self._bound_from(fresh))}; the claim, "
                f"by {stated['draws']:,} draws of the issuer, is {rounded_up(self.cert.bound)}"
            )
        return None

    def _fresh_disagreements_failure(self) -> str | None:
        """Whether Q disagrees with the thresholded network on more inputs than stated."""
        record, inputs = self.cert.pac_bayes, len(self.split.unlabelled)
        if not record["thresholded"]["inputs"]:
            return None
        posterior = self._distribution("posterior")
        network = drawn_networks.thresholded(posterior)
        differs = drawn_networks.disagreements(self.plain, posterior, network, self.split.unlabelled.x, seed=self.seed)
        counted, stated = int(differs.sum()), record["thresholded"]["disagreements"]
        delta = _ledger(record["bounds"]["thresholded"]).unlabelled_each
        lower = 1 - bounds.clopper_pearson(inputs - counted, n=inputs, delta=CONFIDENCE)
        if lower > bounds.clopper_pearson(stated, n=inputs, delta=delta):
            return f"replay: Q disagrees with the thresholded network on {counted} of {inputs} inputs, not on {stated}"
        return None

    def _bound_from(self, counts: Counts) -> float:
        """The claimed bound, had the issuer made these draws of Q."""
        ledger = _ledger(self.cert.record["bounds"]["seeger"])
        return bounds_table.claimed_bound(self.cert.pac_bayes, counts, delta=ledger.delta, **ledger.choices)

    @property
    def _device(self) -> torch.device:
        return next(self.plain.parameters()).device

    @property
    def _reference(self) -> Tensor:
        """Which bound examples the reference network gets wrong."""
        network = drawn_networks.thresholded(self._distribution("prior"))
        return drawn_networks.errors(self.plain, network, self.split.bound)

    def _distribution(self, whose: str) -> SpikeSlab:
        return decode.distribution(self.cert, whose, self.plain)


def _ledger(entry: BoundEntry) -> Ledger:
    return Ledger.from_dict(entry["ledger"])


def _errors(row: Tensor) -> str:
    """Errors of a draw, and how they differ from the reference's on the same examples."""
    return "{} errors (+{} -{} beside the reference)".format(*row.tolist())


def _lower(errors: Tensor, counts: Counts, delta: float) -> float:
    """A lower bound on the mean share of errors per draw."""
    return montecarlo.betting_lower(errors.numpy() / counts.batch, delta=delta)


def _upper(errors: Tensor, counts: Counts, delta: float) -> float:
    """An upper bound on the mean share of errors per draw."""
    return montecarlo.betting(errors.numpy() / counts.batch, delta=delta)
