"""Verification of fixed networks with the data at hand: the split made again, and a risk counted again."""

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.bounds.numeric import rounded_up
from pacprune.certification import documents, drawn_networks, risks, rules
from pacprune.certification.certificate import Certificate
from pacprune.certification.held_out import risk_is_of_classes
from pacprune.certification.record import RiskRecord
from pacprune.certification.risks import Answers, Risk, Sample
from pacprune.data.batches import device_of
from pacprune.data.splits import Split, index_hash
from pacprune.masking import weights
from pacprune.training.evaluate import answers, evaluating

CONFIDENCE = 1e-6
"""Chance refutes a certificate only at this level: a true one is called false once in a million times."""
_EXACT = 0.01
"""By so little of a level values may differ that are computed in float64."""
_SHAKES = 32
"""So many times outputs are moved at random, to see whether a value hangs on rounding."""


def tolerance(close: int, answers: int) -> int:
    """How many of so many answers may be others than stated: those that rounding can turn, and never more than a few.

    A network can be built whose answers hang on rounding alone; what is stated of it could not be told from a lie.
    """
    return min(close, max(3, answers // 1000))


def split_failure(cert: Certificate, split: Split) -> str | None:
    """The first difference between the split at hand and the one described, or a rule that the split breaks."""
    for what, stated, present in _split_pairs(cert, split):
        if stated != present:
            return f"split: {what} is {str(stated)[:60]} in the certificate but {str(present)[:60]} in the data"
    try:
        rules.refuse_cut(split) if cert.record["kind"] == "risk" else rules.refuse_split(split)
    except ValueError as error:
        return f"split: {error}"
    return None


def _split_pairs(cert: Certificate, split: Split) -> Iterator[tuple[str, Any, Any]]:
    """What the certificate states of the split, beside what it is."""
    record = cert.record
    stated, constants = record["split"], record["standardisation"]
    yield "files", record["data"]["files"], dict(split.files)
    yield "number of classes", record["data"]["classes"], split.classes
    yield "seed", stated["seed"], split.seed
    yield "prior_fraction", stated["prior_fraction"], split.prior_fraction
    yield "declared", stated["declared"], split.declared
    for part in (split.prior, split.bound, split.unlabelled):
        yield f"size of {part.name}", stated["sizes"][part.name], len(part)
        yield f"indices of {part.name}", stated["indices"][part.name], index_hash(part)
        yield f"content of {part.name}", stated["parts"][part.name], part.hash
    yield "standardisation", [constants["mean"], constants["std"]], [list(split.mean), list(split.std)]
    yield "duplicates", stated["duplicates"], split.duplicates
    yield "repeats", stated["repeats"], split.repeats


@dataclass(frozen=True, eq=False)
class RiskAudit:
    """A certificate of a risk, with the data, the network and the reference network that it is about."""

    cert: Certificate
    record: RiskRecord
    split: Split
    plain: nn.Module
    reference: nn.Module | None
    risk: Risk
    findings: list[str] = field(default_factory=list)

    def checks(self, *, replay: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """Every check, with the sentence that says what holds when it passes; there are no draws to replay."""
        yield (
            "the split: data files, index lists, disjoint parts, copies, standardisation from S_P",
            lambda: split_failure(self.cert, self.split),
        )
        yield f"the {self.risk.phrase} and the sparsity of the network, on the bound examples", self.recount_failure
        if any(re.fullmatch("class [0-9]+", test["group"] or "") for test in self.record["tests"]):
            yield "the groups that are called after classes are these", self.group_failure
        if len(self.split.test):
            yield f"{len(self.split.test):,} test examples do not refute the claim", self.test_failure

    def recount_failure(self) -> str | None:
        """What the network is not, or does otherwise than stated."""
        try:
            for network in [self.plain, *([] if self.reference is None else [self.reference])]:
                rules.refuse_batch_statistics(network)
                rules.refuse_hidden(network, "the network", self.record["declaration"])
                values = not risk_is_of_classes(self.record["risk"]["name"], self.split)
                rules.refuse_unsteady(network, self.split.bound.x, values=values)
                documents.refuse_foresight(network, self.split.bound)
            documents.refuse_misread(self.split, self.risk, self.record["risk"]["name"], self.record["declaration"])
            if ":" not in self.record["risk"]["name"]:
                risks.refuse_unfit(self.risk, [self.plain], self.reference, self.split)
            else:
                risks.refuse_batch_loss(self.risk, self.plain, self.reference, self.split.bound)
            sample = risks.evaluate(self.risk, self.plain, self.reference, self.split.bound)
        except ValueError as error:
            return f"recount: {error}"
        total, counted = weights.total(self.plain), weights.sparsity(self.plain)
        if total != self.record["total"]:
            return f"recount: the certificate is about {self.record['total']} weights, but the model has {total}"
        if abs(counted - self.record["sparsity"]) > 1e-9:
            return f"recount: the network has sparsity {counted}, not {self.record['sparsity']} as stated"
        if sample.whole != self.record["risk"]["whole"]:
            return "recount: the values are whole numbers in the certificate or here, but not in both"
        return self._counts_failure(sample) if sample.whole else self._levels_failure(sample)

    def _counts_failure(self, sample: Sample) -> str | None:
        """The first test of this network with other counts, but for answers that rounding can turn."""
        stored = self.cert.tensors.get("examples.safetensors", {})
        close, all_turned = None, 0
        tests_of_example = torch.zeros(len(self.split.bound), dtype=torch.int64)
        for place, test in enumerate(self.record["tests"]):
            counts = test["counts"]
            if test["network"] != self.record["hashes"]["model"] or counts is None:
                continue
            mask = stored.get(f"group/{place}")
            tally = sample.tally(mask)
            tests_of_example += 1 if mask is None else mask.long()
            turned = max(abs(tally.plus - counts["plus"]), abs(tally.minus - counts["minus"]))
            all_turned += turned
            if turned:
                close = self._close_answers() if close is None else close
                allowed = int((close if mask is None else close[mask]).sum())
                if turned > tolerance(allowed, tally.n):
                    return (
                        f"recount: {tally.plus} values are 1 and {tally.minus} are -1, not {counts['plus']} and "
                        f"{counts['minus']} as stated ({allowed} answers could be turned by rounding)"
                    )
        # A few answers of each of many groups are many; one answer is turned in every group that it is in.
        most = 0 if close is None else tolerance(int(close.sum()), len(close)) * int(tests_of_example.max())
        if all_turned > most:
            return f"recount: {all_turned} values in all groups are not as stated; rounding can turn {most}"
        return None

    def _levels_failure(self, sample: Sample) -> str | None:
        """Whether values of more than a few examples are others than stated, or one that does not hang on rounding.

        A level is the value rounded up. So it lies below the value by no more than rounding, and above by less than 1
        more. Rounding goes up and down: the sum may lie below that of the values by what chance allows.
        """
        place = self.record["order"].index(self.record["hashes"]["model"])
        stated = self.cert.tensors["examples.safetensors"][f"levels/{place}"]
        assert sample.exact is not None
        low, high = sample.exact - stated, stated - sample.exact - 1
        rounding = _EXACT
        if bool(((low > rounding) | (high > rounding)).any()):
            rounding = self._rounding_of_levels(sample)
        others = ((low > rounding) | (high > rounding)).nonzero().flatten()
        count = len(others)
        moved = count
        if (
            self.risk.tokens
        ):  # rounding turns a few of very many tokens: all that they move is less than a few documents
            shift = (stated[others].long() - sample.values[others].long()).abs().sum()
            moved = math.ceil(float(shift) / risks.LEVELS)
        if moved > tolerance(count, len(stated)) or not self._hang_on_rounding(others, sample.values[others]):
            return f"recount: the values of {count} of {len(stated)} examples are not as stated"
        low[others] = 0
        if float(low.sum()) > len(low) * _EXACT + rounding * math.sqrt(2 * len(low) * math.log(1 / CONFIDENCE)):
            mean = float(low.mean())
            return f"recount: the values of {len(stated)} examples are {mean:.2g} levels more than stated on average"
        return None

    def _rounding_of_levels(self, sample: Sample) -> float:
        """How far values of another machine may lie from these, in levels, but for those that jump."""
        assert sample.exact is not None
        bound, networks = self.split.bound, [self.plain, self.reference]
        plain, reference = (None if net is None else copy.deepcopy(net).double() for net in networks)
        assert plain is not None
        fine = risks.evaluate(self.risk, plain, reference, replace(bound, x=drawn_networks.in_float64(bound.x))).exact
        moved = torch.zeros(1) if fine is None else (fine - sample.exact).abs()
        smooth = torch.where(moved <= risks.NEAR, moved, 0.0)
        return max(_EXACT, min(risks.NEAR, drawn_networks.MACHINES * float(smooth.amax())))

    def _hang_on_rounding(self, index: Tensor, levels: Tensor) -> bool:
        """Whether the values of all these bound examples jump where outputs move as far as rounding can move them."""
        part, generator = self.split.bound.subset(index), torch.Generator().manual_seed(0)
        if not len(part):
            return True
        networks = [network for network in (self.plain, self.reference) if network is not None]
        rounding = max(self._precise(network, part.x.to(device_of(network)))[1] for network in networks)

        def moved(output: Any) -> Any:
            logits = output if ":" in self.record["risk"]["name"] else risks.logits_of(output)
            if not isinstance(logits, Tensor):
                return output
            return logits + 2 * rounding * torch.randn(logits.shape, generator=generator).to(logits)

        def values(answers: Answers) -> Tensor:
            return self.risk.values(answers._replace(output=moved(answers.output), reference=moved(answers.reference)))

        jumps = torch.zeros(len(part), dtype=torch.bool)
        for _ in range(_SHAKES):
            shaken = risks.evaluate(replace(self.risk, values=values), self.plain, self.reference, part)
            jumps |= (shaken.values.long() - levels.long()).abs() > risks.NEAR
        return bool(jumps.all())

    def _close_answers(self) -> Tensor:
        """On which bound examples another machine may answer otherwise."""
        x, close = self.split.bound.x, torch.zeros(len(self.split.bound), dtype=torch.bool)
        for network in [self.plain, *([] if self.reference is None else [self.reference])]:
            parts = [self._close(network, part.to(device_of(network))).cpu() for part in x.split(1000)]
            close |= torch.cat(parts)
        return close

    def _close(self, network: nn.Module, x: Tensor) -> Tensor:
        """Where two outputs that are told apart lie closer together than rounding can tell."""
        fine, rounding = self._precise(network, x)
        if fine.ndim == 1 or fine.shape[-1] == 1 or self.split.bound.y.ndim > 1:
            margins = fine.abs()
        else:
            top = re.fullmatch("top([0-9]+)", self.record["risk"]["name"])
            k = int(top[1]) if top else 1
            best = fine.topk(k + 1, dim=-1).values
            margins = (best[..., k - 1] - best[..., k]) / 2
        return (margins <= rounding).reshape(len(x), -1).any(1)

    def _precise(self, network: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        """The outputs in float64, and how far those of another machine may lie from them."""
        exact = copy.deepcopy(network).double()
        with evaluating(network), evaluating(exact):
            rough, fine = (
                risks.logits_of(output).double()
                for output in (answers(network, x), answers(exact, drawn_networks.in_float64(x)))
            )
        return fine, drawn_networks.MACHINES * float(drawn_networks.distance(rough, fine).max())

    def group_failure(self) -> str | None:
        """The first group that is called after a class and is another one."""
        stored = self.cert.tensors["examples.safetensors"]
        for place, test in enumerate(self.record["tests"]):
            named = re.fullmatch("class ([0-9]+)", test["group"] or "")
            if named and not torch.equal(stored[f"group/{place}"], self.split.bound.y == int(named[1])):
                return f"recount: the group {test['group']} does not hold the examples of that class"
        return None

    def test_failure(self) -> str | None:
        """Whether the test part refutes the claim at CONFIDENCE; groups are not known there."""
        tally = risks.evaluate(self.risk, self.plain, self.reference, self.split.test).tally()
        self.findings.append(f"{self.risk.phrase} on the test examples: {tally.mean:.4f}")
        lower = tally.lower(CONFIDENCE)
        if lower > self.cert.bound and self.record["tests"][0]["group"] is None:
            return (
                f"refuted by the test set: the {self.risk.phrase} is {tally.mean:.4f} on {tally.n} test examples, so "
                f"{lower:.4f} or more on new ones, but at most {rounded_up(self.cert.bound)} is stated"
            )
        return None
