"""Held-out certificates: what fixed networks do on examples that nothing of their making has seen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacprune.bounds.numeric import rounded_up
from pacprune.certification import certify, documents, risks, rules, tries
from pacprune.certification.bounds_table import BOUNDS
from pacprune.certification.certificate import Certificate, beside_the_claim, percent, rounded_down
from pacprune.certification.commitment import split_hashes
from pacprune.certification.record import FORMAT, VERSION, BoundEntry, RiskRecord, RiskTest
from pacprune.certification.risks import Loss, Risk, Sample, Tally
from pacprune.certification.tries import Tries
from pacprune.certification.verify import LEAST_TESTED, LEAVES, MOST_EFFORT, SIGNED, assumptions, digest
from pacprune.data.batches import tensors
from pacprune.data.splits import Split, refuse_unlabelled
from pacprune.data.splits import whole as whole_split
from pacprune.masking import weights

Groups = str | Mapping[str, Tensor] | Sequence[Any] | Tensor | np.ndarray
""" "class"; or a key for each bound example; or a Boolean mask for each name."""
Pair = tuple[Tensor, Tensor | None] | tuple[np.ndarray, np.ndarray | None]
_MOST = 2**20
"""How many times as many examples are tried to say how many would be needed."""


def certify_held_out(
    model: nn.Module,
    split: Split | Pair,
    *,
    risk: str | Loss = "error",
    reference: nn.Module | None = None,
    groups: Groups | None = None,
    delta: float = 0.05,
    certified: int = 1,
    name: str | None = None,
    declare: str | None = None,
) -> Certificate:
    """Certifies a risk of a deterministic network by examples that it never saw: split.bound, or a pair (x, y).

    It serves any plain network, pruned by anything. Values of 0 and 1 are counted and bounded by Clopper and Pearson;
    the drop by the same twice, at delta/2 each; other losses by betting with 20 fixed bets (`bounds.montecarlo`).

    Args:
        model: A plain network; one with stochastic masks needs pp.harden first.
        split: The split whose `bound` examples the network has not seen. Or a pair (x, y), of which all are bound
            examples; y may be None for a risk that needs no labels.
        risk: "error", "top2" to "top100" (the label is not among the k largest outputs), "drop" (how much more often
            it errs than the reference), "disagreement" with the reference, which needs no labels, "brier" or
            "cross-entropy". Of a language model, "token-error", "token-loss", "token-drop", "token-loss-rise" or
            "token-disagreement": the mean over the tokens of a document, one of which is an example. Or a function
            (output, (x, y)) -> one loss in [0, 1] per example; Booleans are counted.
        reference: The network to compare with, for a drop, a rise and a disagreement; it must not have seen the
            examples, either.
        groups: None for all examples together. Or "class", a key for each bound example, or a Boolean mask for each
            name: the certificate then holds for all groups at once, each at its part of delta. Groups must be fixed
            before anything is known about the bound examples.
        delta: Probability with which the certificate may fail, such as 0.05.
        certified: How many networks this one may be chosen among; delta is divided by it.
        name: Which network it is, for verifiers: one of pacprune's models ("mlp"), or package.module:factory; or None.
        declare: What shaped the networks, where pacprune cannot trace it, in one sentence. The certificate's own
            sentence quotes it.

    Returns:
        The certificate, with the network, and the reference if there is one, in it.

    Raises:
        ValueError: If a rule is broken; the message names the rule and the remedy.

    Example:
        >>> import copy
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> pruned = pp.osp(copy.deepcopy(model), split.prior, pp.Config(epochs=1, lr=0.1), sparsity=0.75)
        >>> certificate = pp.certify_held_out(pruned.model, split)
        >>> pp.error(pruned.model, split.bound) < certificate.bound < 1
        True
        >>> print(pp.certify_held_out(pruned.model, split, risk="disagreement", reference=model).statement)
        With probability at least 95 % over the draw of the 719 bound examples, the rate of disagreement on new data of
        this network (sparsity 0.7500) with the reference network is at most 0...
    """
    if risk == "error" and groups is None and isinstance(split, Split) and split.classes and split.bound.y.ndim == 1:
        _refuse_needless_reference(risks.RISKS["error"], "error", reference)
        return certify.certify_error(model, split, delta=delta, certified=certified, name=name, declare=declare)
    trial = _Trial.begun([model], split, risk, reference, delta=delta, certified=certified, declare=declare)
    if isinstance(groups, str) and not (
        trial.split.bound.has_labels if isinstance(split, Split) else split[1] is not None
    ):
        missing = "the bound examples have no labels" if isinstance(split, Split) else "y is None"
        raise ValueError(f"groups is {groups!r}, but {missing}; give labels, or a key for each example")
    masks = _group_masks(groups, trial.split)
    each = trial.delta_each / len(masks)
    sample = trial.sample(0)
    tallies = {group: sample.tally(mask) for group, mask in masks.items()}
    tests = [trial.test(0, tally, group=group, bound=tally.bound(each)) for group, tally in tallies.items()]
    bound = max(test["bound"] for test in tests if test["bound"] is not None)
    examples = _examples(trial.levels([sample]), masks)
    return trial.certificate(tests, rule="all", limit=None, place=0, bound=bound, name=name, tensors=examples)


def certify_sequence(
    candidates: Sequence[nn.Module],
    split: Split,
    *,
    risk: str = "drop",
    limit: float,
    reference: nn.Module | None = None,
    delta: float = 0.05,
    name: str | None = None,
    declare: str | None = None,
    front: bool = False,
) -> Certificate:
    """Tests candidates in their order, densest first, and certifies "risk <= limit" for those before the first failure.

    Each hypothesis "the risk of candidate i is above the limit" is tested at the full delta, until one is not rejected.
    The first true one is rejected with probability at most delta, so that with probability 1 - delta all that passed
    respect the limit (fixed-sequence testing: Bauer 1991; Angelopoulos et al., "Learn then Test", 2021). What is proved
    of them is the limit, not their own bounds; only the first that failed may quote its own (Hsu and Berger 1999).

    Args:
        candidates: Plain networks in the declared order, which must not depend on the bound examples.
        split: The split whose `bound` examples no candidate has seen.
        risk: A key of RISKS.
        limit: What the risk should not exceed.
        reference: The network to compare with, for a drop, a rise and a disagreement.
        delta: Probability with which the certificate may fail.
        name: Which network the candidates are, for verifiers.
        declare: What shaped the networks, where pacprune cannot trace it, in one sentence.
        front: Whether to give bounds for all candidates at once, each at delta divided by their number, in place of
            tests; the limit is then not used.

    Returns:
        A certificate with the last network that passed (`passed`, `tests` and `limit` say what was found), or with
        the last candidate of a front. If none passed it has the first, says so, and cannot be saved.
    """
    trial = _Trial.begun(candidates, split, risk, reference, delta=delta, certified=1, declare=declare)
    trial.check_order()
    if front:
        return _front(trial, name)
    trial.check_limit(limit)
    tests: list[RiskTest] = []
    samples: list[Sample] = []
    for place in range(len(trial.networks)):
        samples.append(trial.sample(place))
        tally = samples[place].tally()
        p_value = tally.p_value(limit)
        passed = p_value <= trial.delta_each
        bound = None if passed else tally.bound(trial.delta_each)
        tests.append(trial.test(place, tally, bound=bound, p_value=p_value, passed=passed))
        if not passed:
            break
    count = sum(bool(test["passed"]) for test in tests)
    examples = _examples(trial.levels(samples))
    if not count:
        return trial.failure(tests, limit, name, samples[0].tally(), examples)
    return trial.certificate(
        tests, rule="sequence", limit=limit, place=count - 1, bound=limit, name=name, tensors=examples
    )


def _front(trial: "_Trial", name: str | None) -> Certificate:
    """Bounds for all candidates at once."""
    samples = [trial.sample(place) for place in range(len(trial.networks))]
    tallies = [sample.tally() for sample in samples]
    each = trial.delta_each / len(tallies)
    tests = [trial.test(place, tally, bound=tally.bound(each)) for place, tally in enumerate(tallies)]
    last = len(tests) - 1
    bound = tests[last]["bound"]
    assert bound is not None
    examples = _examples(trial.levels(samples))
    return trial.certificate(tests, rule="all", limit=None, place=last, bound=bound, name=name, tensors=examples)


def risk_is_of_classes(risk_name: str, split: Split) -> bool:
    """Whether the largest output alone is looked at, and not the outputs themselves."""
    return risk_name in ("error", "drop", "disagreement") and split.bound.y.ndim == 1


# --- What is certified.


@dataclass(frozen=True, eq=False)
class _Trial:
    """Networks in their order, on the examples and by the risk that they are certified by, once no rule is broken."""

    networks: Sequence[nn.Module]
    reference: nn.Module | None
    split: Split
    risk_name: str
    risk: Risk
    delta: float
    certified: int
    declaration: str | None
    hashes: tuple[str, ...]
    sparsities: tuple[float, ...]
    states: tuple[int | None, ...]

    @classmethod
    def begun(
        cls,
        networks: Sequence[nn.Module],
        data: Split | Pair,
        risk: str | Loss,
        reference: nn.Module | None,
        *,
        delta: float,
        certified: int,
        declare: str | None,
    ) -> "_Trial":
        """The trial, or a ValueError with the first rule that is broken."""
        declaration = rules.checked_declaration(declare)
        rules.check_delta(delta)
        risk_name, entry = risks.find(risk)
        _refuse_needless_reference(entry, risk_name, reference)
        if not networks:
            raise ValueError("there are 0 candidates, but a certificate is about at least 1: give a list of networks")
        split = data if isinstance(data, Split) else _split_of(data, risk_name, entry)
        rules.refuse_cut(split)
        rules.refuse_repeats(split, declaration)
        if entry.labels:
            refuse_unlabelled(split)
        subjects = [("the network", network) for network in networks]
        if len(networks) > 1:
            subjects = [(f"candidate {place}", network) for place, network in enumerate(networks, start=1)]
        for who, network in [*subjects, *([] if reference is None else [("the reference", reference)])]:
            rules.refuse_random(network)
            rules.refuse_batch_statistics(network)
            rules.refuse_untraced(weights.origin(network), split, who, declaration)
            rules.refuse_chosen(network, split, who, declaration)
            rules.refuse_hidden(network, who, declaration)
        documents.refuse_misread(split, entry, risk_name, declaration)
        states = tuple(map(weights.fingerprint, [*networks, *([] if reference is None else [reference])]))
        if isinstance(risk, str):
            risks.refuse_unfit(entry, networks, reference, split)
        for network in [*networks, *([] if reference is None else [reference])]:
            rules.refuse_unsteady(network, split.bound.x, values=not risk_is_of_classes(risk_name, split))
            documents.refuse_foresight(network, split.bound)
        if not isinstance(risk, str):
            risks.refuse_batch_loss(entry, networks[0], reference, split.bound)
        hashes = tuple(certify.tensor_hash(_state(network)) for network in networks)
        if reference is not None and len(networks) == 1 and certify.tensor_hash(_state(reference)) == hashes[0]:
            raise ValueError(
                "the reference has the weights of the network itself, so that nothing is compared; methods prune in "
                "place, so give them copy.deepcopy(model), and the model as it was as the reference"
            )
        sparsities = tuple(weights.sparsity(network) for network in networks)
        return cls(
            networks,
            reference,
            split,
            risk_name,
            entry,
            delta,
            certified,
            declaration,
            hashes,
            sparsities,
            states,
        )

    @property
    def delta_each(self) -> float:
        """What is spent on one of the networks that this one is chosen among."""
        return BOUNDS["held_out"].ledger(self.delta, certified=self.certified).delta_each

    def check_order(self) -> None:
        """The densest candidate comes first."""
        for place, (before, after) in enumerate(zip(self.sparsities, self.sparsities[1:], strict=False), start=1):
            if after < before:
                raise ValueError(
                    f"candidate {place + 1} has sparsity {after:.4f}, less than the {before:.4f} of candidate {place}; "
                    "give the candidates in the order of their sparsity, densest first"
                )

    def check_limit(self, limit: float) -> None:
        """A limit that values can respect and can exceed, at a delta that p-values can be compared with."""
        if self.delta_each < LEAST_TESTED:
            raise ValueError(
                f"delta is {self.delta}, but p-values are exact to 1e-12 alone; test at {LEAST_TESTED} or more"
            )
        if not self.risk.lowest < limit < 1:
            raise ValueError(
                f"the limit is {limit}, but it must lie strictly between {self.risk.lowest} and 1, the least and the "
                f"largest {self.risk.phrase}: give a fraction, such as 0.01"
            )

    def sample(self, place: int) -> Sample:
        """The values of a network on the bound examples."""
        return risks.evaluate(self.risk, self.networks[place], self.reference, self.split.bound)

    def levels(self, samples: Sequence[Sample]) -> dict[int, Sample]:
        """The samples of levels, by the place of their network; a network that occurs twice is there once."""
        places = {hashed: place for place, hashed in reversed(list(enumerate(self.hashes)))}
        return {
            places[hashed]: sample for hashed, sample in zip(self.hashes, samples, strict=False) if not sample.whole
        }

    def test(
        self,
        place: int,
        tally: Tally,
        *,
        group: str | None = None,
        bound: float | None = None,
        p_value: float | None = None,
        passed: bool | None = None,
    ) -> RiskTest:
        """A row of the record."""
        return {
            "network": self.hashes[place],
            "sparsity": self.sparsities[place],
            "group": group,
            "n": tally.n,
            "counts": {"plus": tally.plus, "minus": tally.minus} if tally.levels is None else None,
            "mean": tally.mean,
            "bound": bound,
            "p_value": p_value,
            "passed": passed,
        }

    def certificate(
        self,
        tests: list[RiskTest],
        *,
        rule: str,
        limit: float | None,
        place: int,
        bound: float,
        name: str | None,
        tensors: dict[str, Tensor],
    ) -> Certificate:
        """The certificate that these tests give, with the network at this place in it."""
        if len(tests) * math.sqrt(len(self.split.bound)) > MOST_EFFORT:
            raise ValueError(
                f"there are {len(tests)} tests on {len(self.split.bound)} examples, more than a verifier recomputes; "
                "give fewer groups or candidates"
            )
        for subject, state in zip([*self.networks, self.reference], self.states, strict=False):
            if subject is not None:
                rules.refuse_moved(subject, state)
        network = self.networks[place]
        files = {"model.safetensors": _state(network)}
        if self.reference is not None:
            files["reference.safetensors"] = _state(self.reference)
        hashes = {file.removesuffix(".safetensors"): certify.tensor_hash(state) for file, state in files.items()}
        if tensors:
            files["examples.safetensors"] = tensors
        ledger = BOUNDS["held_out"].ledger(self.delta, certified=self.certified)
        entries: dict[str, BoundEntry] = {"held_out": {"bound": bound, "ledger": ledger.as_dict()}}
        record: RiskRecord = {
            "format": FORMAT,
            "version": VERSION,
            "kind": "risk",
            "model": name,
            "n": len(self.split.bound),
            "sparsity": self.sparsities[place],
            "total": weights.total(network),
            "examples_seen": weights.seen(network).count,
            "risk": {"name": self.risk_name, "whole": tests[0]["counts"] is not None},
            "rule": rule,
            "limit": limit,
            "order": list(self.hashes),
            "tests": tests,
            "bounds": entries,
            "claim": {"family": "held_out", "bound": bound},
            "statement": self.statement(tests, rule, place, bound, _outside(tensors)),
            "declaration": self.declaration,
            "commitment": None,
            **certify.provenance(self.split, hashes),
        }
        record["assumptions"] = assumptions(record)  # type: ignore[arg-type]
        certificate = Certificate(record, files)
        return replace(certificate, tries=self._tries(certificate))

    def statement(self, tests: list[RiskTest], rule: str, place: int, bound: float, outside: int) -> str:
        """What is proved, in one sentence, and what the issuer states beside it; so many examples are in no group."""
        phrase, against = f"the {self.risk.phrase} on new data of", self.risk.against
        network, value = f"this network (sparsity {rounded_down(self.sparsities[place])})", rounded_up(bound)
        count = len(self.hashes)
        if rule == "sequence":
            claim = (
                f"{phrase} each of the first {place + 1} of {count} candidates, in the declared order,{against} is at "
                f"most {value}; the last of these is {network}"
            )
        elif count > 1:
            claim = (
                f"{phrase} each of the {count} candidates{against} is at most its bound in the list; for {network} "
                f"that is {value}"
            )
        elif tests[0]["group"] is not None:
            worst = max(tests, key=lambda test: test["bound"] or -1.0)
            claim = (
                f"{phrase} {network}{against} is at most {value} in each of the {len(tests)} groups"
                f'{_left_out(outside)}; the largest bound is that of "{worst["group"]}"'
            )
        else:
            claim = f"{phrase} {network}{against} is at most {value}"
        chance = f"over the draw of the {rules.bound_examples(len(self.split.bound))}"
        words = f"With probability at least {percent(self.delta)} % {chance}, {claim}."
        return words + beside_the_claim(self.split, self.declaration)

    def failure(
        self, tests: list[RiskTest], limit: float, name: str | None, tally: Tally, examples: dict[str, Tensor]
    ) -> Certificate:
        """What is known when not even the first candidate passed: no more than that one's own bound."""
        bound = tests[0]["bound"]
        assert bound is not None
        certificate = self.certificate(
            tests, rule="sequence", limit=limit, place=0, bound=bound, name=name, tensors=examples
        )
        needed = examples_needed(tally, limit, self.delta_each)
        remedy = (
            f"at this rate about {needed:,} examples would be needed"
            if needed
            else f"on these examples it is {tally.mean:.4f}, so that more of them would not do"
        )
        count = len(self.hashes)
        first = f"the first of {count} candidates" if count > 1 else "the only candidate"
        statement = (
            f"No candidate passed: nothing shows that the {self.risk.phrase} on new data of {first} (sparsity "
            f"{rounded_down(self.sparsities[0])}){self.risk.against} is at most the limit {rounded_up(limit)}. With "
            f"probability at least {percent(self.delta)} % over the draw of the "
            f"{rules.bound_examples(len(self.split.bound))} it is at most {rounded_up(bound)}; {remedy}."
        )
        return replace(certificate, record={**certificate.record, "statement": statement})

    def _tries(self, certificate: Certificate) -> Tries:
        """Counts this certificate among those on the same examples."""
        record = certificate.record
        assert record["kind"] == "risk"
        # Where p-values are compared with it, another delta is another try.
        tested = self.delta if record["rule"] == "sequence" else None
        subject = {key: record[key] for key in ("hashes", "risk", "rule", "limit", "order")} | {"delta": tested}
        # Other groups, or another loss, under the same name are another try.
        counted = [{key: test[key] for key in ("group", "n", "counts", "mean")} for test in record["tests"]]
        examples = certify.tensor_hash(certificate.tensors.get("examples.safetensors", {}))
        hashed = digest({**subject, "counted": counted, "examples": examples, "split": split_hashes(self.split)})

        def bound_at(share: float) -> float:
            return _bound_at(certificate, self.delta * share)

        def walk_at(share: float) -> str:
            return _walk_at(certificate, self.delta * share)

        walk = walk_at if record["rule"] == "sequence" and certificate.passed else None
        trained = max(weights.last_change(network) or 0 for network in self.networks)
        return tries.count(
            self.split.pool,
            hashed,
            declared=self.certified,
            bound_at=bound_at,
            walk_at=walk,
            trained=trained,
            evaluated=certify.evaluated(self.networks, self.split),
        )


def _bound_at(certificate: Certificate, delta: float) -> float:
    """The claim, had this been the delta and nothing been divided; 1 where a network of a sequence would not pass."""
    record = certificate.record
    assert record["kind"] == "risk"
    if record["rule"] == "sequence" and certificate.passed:
        return certificate.bound if _passed_at(certificate, delta) == certificate.passed else 1.0
    tests = record["tests"]
    last = [i for i, test in enumerate(tests) if test["network"] == record["hashes"]["model"]]
    tallies = tallies_of(certificate)
    return max(tallies[i].bound(delta / len(tests)) for i in last)


def _passed_at(certificate: Certificate, delta: float) -> int:
    """How many candidates of a sequence pass at a smaller delta: the tests end at the first that does not."""
    p_values = [test["p_value"] for test in certificate.tests if test["passed"]]
    return next((place for place, p in enumerate(p_values) if p is None or p > delta), len(p_values))


def _walk_at(certificate: Certificate, delta: float) -> str:
    """What is left of a sequence at a smaller delta. The first that fails there may quote its own bound."""
    passed, kept = certificate.passed, _passed_at(certificate, delta)
    bound = (
        f"of the densest it is proved there that it is at most {rounded_up(tallies_of(certificate)[0].bound(delta))}"
    )
    networks = f"the {passed} networks that passed" if passed > 1 else "the one network that passed"
    if kept == passed:
        return f"{networks} still {'pass' if passed > 1 else 'passes'}, so that the claim stays as it is"
    if not kept:
        return f"{f'none of {networks} still passes' if passed > 1 else f'{networks} fails'}; {bound}"
    last = rounded_down(certificate.tests[kept - 1]["sparsity"])
    return (
        f"only the first {kept} of {networks} still {'pass' if kept > 1 else 'passes'}, the last with sparsity {last}, "
        "and of this one nothing is proved"
    )


def tallies_of(certificate: Certificate) -> list[Tally]:
    """What every test of a certificate follows from: its counts, or its levels in the file beside it."""
    record = certificate.record
    assert record["kind"] == "risk"
    lowest = -1 if record["risk"]["name"] in SIGNED else 0
    stored = certificate.tensors.get("examples.safetensors", {})
    tallies = []
    for place, test in enumerate(record["tests"]):
        counts = test["counts"]
        if counts is not None:
            tallies.append(Tally(test["n"], lowest, counts["plus"], counts["minus"]))
            continue
        levels = stored[f"levels/{record['order'].index(test['network'])}"]
        tallies.append(Sample(levels, False, lowest).tally(stored.get(f"group/{place}")))
    return tallies


def examples_needed(tally: Tally, limit: float, delta: float) -> int | None:
    """About how many examples of the same frequencies would pass; None where no number would."""
    if tally.mean >= limit:
        return None
    low, high = 1, 2
    while high <= _MOST and tally.scaled(high).p_value(limit) > delta:
        low, high = high, 2 * high
    if high > _MOST:
        return None
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if tally.scaled(middle).p_value(limit) <= delta else (middle, high)
    return tally.n * high


# --- The data, and the groups.


def _refuse_needless_reference(risk: Risk, name: str, reference: nn.Module | None) -> None:
    """A reference is given where the risk compares with one, and nowhere else."""
    if bool(risk.against) != (reference is not None):
        fault = "there is none: give reference=" if risk.against else "one is given: leave it out"
        raise ValueError(
            f"the risk {name!r} {'compares with' if risk.against else 'does not look at'} a reference network, but "
            f"{fault}"
        )


def pair_split(x: Tensor | np.ndarray, y: Tensor | np.ndarray | None) -> Split:
    """A split all of whose examples are bound examples; without labels, all are 0."""
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else torch.as_tensor(y)
    pair = tensors((torch.as_tensor(x), labels))
    assert pair is not None
    return whole_split(*pair)


def _split_of(data: Any, risk_name: str, risk: Risk) -> Split:
    """A split all of whose examples are bound examples."""
    if not isinstance(data, tuple) or len(data) != 2:
        raise ValueError(
            f"the data is a {type(data).__name__}, but a held-out certificate needs a Split or a pair (x, y); make a "
            "split by pp.data.split(x, y)"
        )
    if data[1] is None and risk.labels:
        raise ValueError(
            f"the risk {risk_name!r} needs labels, but y is None; give (x, y), or take the risk 'disagreement'"
        )
    return pair_split(*data)


def _group_masks(groups: Groups | None, split: Split) -> dict[str | None, Tensor | None]:
    """The groups by name, each as a mask of the bound examples that is not empty."""
    if groups is None:
        return {None: None}
    n = len(split.bound)
    masks: dict[str, Tensor] = {}
    if isinstance(groups, str):
        if groups != "class" or not split.classes or split.bound.y.ndim > 1:
            raise ValueError(
                f"groups is {groups!r} and there are {split.classes} classes; use 'class' with one class per example, "
                "or give a key for each bound example"
            )
        masks = {f"class {label}": split.bound.y == label for label in range(split.classes)}
    elif isinstance(groups, Mapping):
        masks = {name: torch.as_tensor(mask) for name, mask in groups.items()}
    else:
        keys = np.asarray(groups)
        masks = {str(key): torch.from_numpy(keys == key) for key in np.unique(keys)}
        if keys.shape != (n,):
            raise ValueError(
                f"groups have the shape {keys.shape}, but there are {n} bound examples; give one key for each"
            )
    for name, mask in masks.items():
        _check_group(name, mask, n)
    return {name: mask.bool().cpu() for name, mask in masks.items()}


def _check_group(name: str, mask: Tensor, n: int) -> None:
    if not LEAVES["name"](name):
        raise ValueError(f"a group is called {name!r:.80}; give it a name of plain text without double quotes")
    if mask.shape != (n,) or mask.dtype != torch.bool:
        raise ValueError(
            f"the mask of {name} is {mask.dtype} of shape {tuple(mask.shape)}, but there are {n} bound examples; give "
            "one Boolean for each"
        )
    if not bool(mask.any()):
        raise ValueError(f"the group {name} has 0 of the {n} bound examples; leave it out, or join it with another")


def _examples(
    samples: Mapping[int, Sample], masks: Mapping[str | None, Tensor | None] = MappingProxyType({})
) -> dict[str, Tensor]:
    """What is stored of every example: levels of values that are no whole numbers, and who is in which group."""
    levels = {f"levels/{place}": sample.values for place, sample in samples.items()}
    groups = {f"group/{place}": mask for place, mask in enumerate(masks.values()) if mask is not None}
    return levels | groups


def _outside(examples: Mapping[str, Tensor]) -> int:
    """How many examples are in no group."""
    masks = [mask for name, mask in examples.items() if name.startswith("group/")]
    return int((~torch.stack(masks).any(0)).sum()) if masks else 0


def _left_out(count: int) -> str:
    return f", which leave out {rules.bound_examples(count)}" if count else ""


def _state(network: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a network, by name."""
    return {key: t.detach().clone() for key, t in (*network.named_parameters(), *network.named_buffers())}
