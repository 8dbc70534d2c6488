"""What a held-out certificate can be about: risks by name, what they count on an example, and the bound that follows.

A risk is the mean of one value per example. A new risk is one row of RISKS here, and its words in verify.py and
verify.html. Values that are whole numbers are counted. Others are rounded up to levels, so that every verifier
computes with the same integers.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import bounds
from pacprune.bounds import held_out, montecarlo
from pacprune.bounds.numeric import ROUNDING
from pacprune.data.batches import device_of, refusing_unfit
from pacprune.data.splits import IGNORED, NO_LABEL, Part, Split
from pacprune.training.evaluate import answers as answers_of
from pacprune.training.evaluate import evaluating, mistakes
from pacprune.types import check_name

LEVELS = 2**16
"""Values that are no whole numbers are rounded up to multiples of 1/LEVELS of their range."""
TOPS = (2, 3, 5, 10, 20, 50, 100)
"""The k of top-k errors."""
NEAR = 8
"""Rounding moves a value by at most so many levels, unless it makes it jump."""
_BATCH = 1000
_AT_ONCE = 2**25
"""About how many outputs of a network on tokens are in memory at once: a vocabulary has many for every token."""
_STEADY = 64
"""So many examples are looked at one by one, to see whether a loss looks at its own example alone."""
_OF_SPREAD, _MOST_OF_SPREAD = 1000, 1 / 8
_OF_SIZE, _MOST_OF_SIZE = 100, 1 / 32
"""Rounding moves outputs of one kind by less than so many units in the last place of what they vary by, and of their
size; in half precision, where units are large, by no more than these shares."""


class Answers(NamedTuple):
    """What a network, and perhaps the reference network, makes of a batch (x, y)."""

    output: Any
    reference: Any
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Risk:
    """A risk: the mean of one value per example, in [lowest, 1].

    Args:
        phrase: What it is, in the sentence of a certificate.
        values: Answers to a batch -> one value per example; Booleans and integers are counted, others become levels. A
            value for each of an example's labels is averaged.
        labels: Whether labels are needed.
        against: How the sentence names the reference network; empty for a risk without one.
        lowest: The least value there can be: 0, or -1 for a difference.
        tokens: Whether an example is a document, of whose tokens the values are averaged.
    """

    phrase: str
    values: Callable[[Answers], Tensor]
    labels: bool = True
    against: str = ""
    lowest: int = 0
    tokens: bool = False


def logits_of(output: Any) -> Any:
    """The outputs themselves, or the `logits` among what a network returns."""
    return getattr(output, "logits", output)


def rounding_of(outputs: Tensor, others: Tensor) -> Tensor:
    """By how much rounding may move each output of one network for the same inputs; an infinite one is no measure.

    Outputs of one kind, along the last dimension, are measured by themselves: a class that is ruled out by a huge
    number says nothing of the others, and neither does what all inputs have in common. A kind may also be a small
    difference of large numbers, so that none has less than what its size would be if it were that of most of them.
    """
    both = torch.stack([outputs, others])
    kinds = both.reshape(-1, both.shape[-1] if outputs.ndim > 1 else 1)
    finite = kinds.isfinite()
    least = torch.where(finite, kinds, math.inf).amin(0).double().nan_to_num(0.0, posinf=0.0)
    most = torch.where(finite, kinds, -math.inf).amax(0).double().nan_to_num(0.0, neginf=0.0)
    spread, size = (most - least) / 2, least.abs().maximum(most.abs())
    varied = size[spread > 0].sort().values
    usual = float(varied[len(varied) // 2]) if len(varied) else 0.0
    unit = torch.finfo(both.dtype).eps
    of_spread, of_size = min(_OF_SPREAD * unit, _MOST_OF_SPREAD), min(_OF_SIZE * unit, _MOST_OF_SIZE)
    return (of_spread * spread + of_size * size.clamp_min(usual)).to(both.dtype)


def half_advice(outputs: Tensor) -> str:
    """What else a network can do whose outputs are said to change, where they have few digits."""
    if torch.finfo(outputs.dtype).eps < 1e-4:
        return ""
    name = str(outputs.dtype).removeprefix("torch.")
    return f"; where only rounding in {name} does it, as in a mixture of experts, give the network in float32"


def _has_several_labels(logits: Tensor, y: Tensor) -> bool:
    """Whether an example has several labels, with a logit for each."""
    return y.ndim > 1 and logits.shape == y.shape and y.shape[-1] > 1


def _wrong(output: Any, y: Tensor) -> Tensor:
    """Which answers are wrong, as `pp.error` has it; where an example has several labels, with a logit for each."""
    logits = logits_of(output)
    if isinstance(logits, Tensor) and _has_several_labels(logits, y):
        _refuse_numbers(y)
        logits = logits[..., None]
    elif y.is_floating_point() and not bool((y == y.round()).all()):
        _refuse_numbers(y)
    return mistakes(logits, y)


def is_by_sign(output: Any, y: Tensor) -> bool:
    """Whether answers are signs: of the one output of an example, or of one output for each of its labels."""
    logits = logits_of(output)
    if not isinstance(logits, Tensor):
        return False
    return logits.ndim == 1 or logits.shape[-1] == 1 or _has_several_labels(logits, y)


def _not_among_top(k: int) -> Callable[[Answers], Tensor]:
    """Whether the label is not among the k largest outputs; of equal ones, the lowest classes count as larger."""

    def values(answers: Answers) -> Tensor:
        logits, y = logits_of(answers.output), answers.y
        if logits.shape[:-1] != y.shape or logits.shape[-1] <= k:
            raise ValueError(
                f"the model's outputs have shape {tuple(logits.shape)} and the labels {tuple(y.shape)}; top{k} needs "
                f"one label for each row of more than {k} outputs, so take a smaller k"
            )
        _refuse_no_classes(y, logits.shape[-1])
        own = logits.gather(-1, y[..., None])
        before = torch.arange(logits.shape[-1], device=y.device) < y[..., None]
        return ((logits > own) | (logits == own) & before).sum(-1) >= k

    return values


def _drop(answers: Answers) -> Tensor:
    wrong, reference_wrong = (_wrong(output, answers.y) for output in (answers.output, answers.reference))
    return wrong.int() - reference_wrong.int()


def _disagreement(answers: Answers) -> Tensor:
    _refuse_numbers(answers.y)
    outputs = [logits_of(output) for output in (answers.output, answers.reference)]
    if _has_several_labels(outputs[0], answers.y):
        outputs = [logits[..., None] for logits in outputs]
    return _classes(outputs[0]) != _classes(outputs[1])


def _refuse_numbers(y: Tensor) -> None:
    """Refuses labels of regression; those of examples without any are no such labels."""
    if y.is_floating_point() and not bool(((y == 0) | (y == 1) | (y == NO_LABEL)).all()):
        raise ValueError(
            f"labels run from {float(y.min()):.3g} to {float(y.max()):.3g}, as in regression, where answers have no "
            "class that could be right or wrong; give a loss of your own, such as lambda output, batch: "
            "(output - batch[1]).abs() > 0.1"
        )


def _classes(output: Any) -> Tensor:
    """The class of every answer: by the sign of one output, else the largest of several."""
    logits = logits_of(output)
    return (logits > 0).reshape(len(logits), -1) if logits.ndim == 1 or logits.shape[-1] == 1 else logits.argmax(-1)


def _logits_of_classes(answers: Answers) -> Tensor:
    """The outputs in float64, once there is one for each of several classes."""
    logits, y = logits_of(answers.output), answers.y
    if logits.shape[:-1] != y.shape or logits.shape[-1] < 2:
        raise ValueError(
            f"the model's outputs have shape {tuple(logits.shape)} and the labels {tuple(y.shape)}; this loss needs "
            "one label for each row of at least 2 outputs, so give the model an output per class"
        )
    _refuse_no_classes(y, logits.shape[-1])
    return logits.double()


def _refuse_no_classes(y: Tensor, outputs: int) -> None:
    """Refuses labels that are not numbers of the outputs."""
    low, high = float(y.min()), float(y.max())
    if y.is_floating_point():
        raise ValueError(
            f"labels are {y.dtype} and run from {low:g} to {high:g}, but this loss needs class numbers from 0 to "
            f"{outputs - 1}; give y.long() if they are classes, and for regression a loss of your own, such as "
            "lambda output, batch: (output - batch[1]).abs() > 0.1"
        )
    if low < 0 or high >= outputs:
        raise ValueError(
            f"labels run from {low:g} to {high:g}, but the model has {outputs} outputs (labels 0 to {outputs - 1}); "
            "change the labels or the last layer"
        )


def _brier(answers: Answers) -> Tensor:
    probabilities = F.softmax(_logits_of_classes(answers), dim=-1)
    truth = F.one_hot(answers.y, probabilities.shape[-1])
    return ((probabilities - truth).square().sum(-1) / 2).clamp_max(1.0)


def _cross_entropy(answers: Answers) -> Tensor:
    log_probabilities = F.log_softmax(_logits_of_classes(answers), dim=-1)
    surprise = -log_probabilities.gather(-1, answers.y[..., None]).squeeze(-1)
    return surprise.clamp_max(math.log(1e4)) / math.log(1e4)


def _by_document(values: Callable[[Answers], Tensor]) -> Callable[[Answers], Tensor]:
    """The mean of a value per token over the tokens of every document that count, which are documents' labels."""

    def means(answers: Answers) -> Tensor:
        logits, y = logits_of(answers.output), answers.y
        shape = tuple(getattr(logits, "shape", ()))
        if len(shape) != 3 or shape[-1] < 2 or (y.ndim > 1 and shape[:2] != y.shape):
            raise ValueError(
                f"the model's outputs have shape {shape} and the labels {tuple(y.shape)}; a risk of tokens needs "
                "outputs (n, length, vocabulary) and a label for each of the n * length tokens, as pp.data.documents "
                "makes them"
            )
        # Without labels there is no telling what does not count.
        counted = y != IGNORED if y.ndim > 1 else torch.ones(shape[:2], dtype=torch.bool, device=logits.device)
        each = values(answers._replace(y=y.masked_fill(y == IGNORED, 0))).double()
        return (each * counted).sum(1) / counted.sum(1)

    return means


def _loss_rise(answers: Answers) -> Tensor:
    return _cross_entropy(answers) - _cross_entropy(answers._replace(output=answers.reference))


def _other_token(answers: Answers) -> Tensor:
    return logits_of(answers.output).argmax(-1) != logits_of(answers.reference).argmax(-1)


_AGAINST, _WITH = " against the reference network", " with the reference network"
RISKS: dict[str, Risk] = {
    "error": Risk("error rate", lambda answers: _wrong(answers.output, answers.y)),
    **{f"top{k}": Risk(f"top-{k} error rate", _not_among_top(k)) for k in TOPS},
    "drop": Risk("drop in accuracy", _drop, against=_AGAINST, lowest=-1),
    "disagreement": Risk("rate of disagreement", _disagreement, labels=False, against=_WITH),
    "brier": Risk("mean Brier loss", _brier),
    "cross-entropy": Risk("mean bounded cross-entropy", _cross_entropy),
    "token-error": Risk(
        "token error rate per document", _by_document(lambda answers: _wrong(answers.output, answers.y)), tokens=True
    ),
    "token-loss": Risk(
        "token log-loss per document (clipped at log 10000, in units of it)", _by_document(_cross_entropy), tokens=True
    ),
    "token-drop": Risk(
        "drop in token accuracy per document", _by_document(_drop), against=_AGAINST, lowest=-1, tokens=True
    ),
    "token-loss-rise": Risk(
        "rise of the token log-loss per document (clipped at log 10000, in units of it)",
        _by_document(_loss_rise),
        against=_AGAINST,
        lowest=-1,
        tokens=True,
    ),
    "token-disagreement": Risk(
        "rate of token disagreement per document",
        _by_document(_other_token),
        labels=False,
        against=_WITH,
        tokens=True,
    ),
}
"""The risks by name; a function (output, (x, y)) -> one loss in [0, 1] per example serves as well."""

Loss = Callable[[Any, tuple[Tensor, Tensor]], Tensor]


def find(risk: str | Loss) -> tuple[str, Risk]:
    """The risk of a name, or that of a function of one's own, and the name under which it is certified."""
    if isinstance(risk, str):
        check_name("risk", risk, RISKS, alternative="a function (output, batch) -> losses in [0, 1]")
        return risk, RISKS[risk]
    name = name_of(risk)
    return name, Risk(f"mean of the loss {name}", lambda answers: risk(answers.output, (answers.x, answers.y)))


def name_of(loss: Loss) -> str:
    """module:function, as a certificate can hold it; no name of RISKS has a colon."""
    place = getattr(loss, "__module__", None) or "loss", getattr(loss, "__qualname__", type(loss).__name__)
    return re.sub(r'[^!-~]|"', "_", ":".join(place))[-200:]


# --- Values on examples.


@dataclass(frozen=True)
class Tally:
    """How often values occurred on n examples, and the bounds that follow.

    Args:
        n: Number of examples.
        lowest: The least value there can be: 0 or -1.
        plus: How often the value was 1; of whole numbers.
        minus: How often it was -1; of whole numbers.
        levels: (level, how often) of values that are no whole numbers, from 0 to LEVELS of the range; else None.
    """

    n: int
    lowest: int = 0
    plus: int = 0
    minus: int = 0
    levels: tuple[tuple[int, int], ...] | None = None

    @property
    def mean(self) -> float:
        """The empirical risk."""
        if self.levels is None:
            return (self.plus - self.minus) / self.n
        return self._risk(sum(level * times for level, times in self.levels) / (self.n * LEVELS))

    def bound(self, delta: float) -> float:
        """The upper bound on the risk at delta.

        Clopper-Pearson for 0 and 1, the same twice for differences, and betting for levels.
        """
        if self.levels is not None:
            return min(1.0, self._risk(montecarlo.betting(**self._histogram, delta=delta)) + ROUNDING)
        if self.lowest:
            return held_out.difference(self.plus, self.minus, n=self.n, delta=delta)
        return bounds.clopper_pearson(self.plus, n=self.n, delta=delta)

    def p_value(self, limit: float) -> float:
        """The p-value of "the risk is above the limit": at most delta where the bound at delta is at most the limit."""
        if self.levels is not None:
            share = (limit - self.lowest) / (1 - self.lowest)
            return montecarlo.betting_p_value(**self._histogram, limit=share)
        if self.lowest:
            return held_out.difference_p_value(self.plus, self.minus, n=self.n, limit=limit)
        return held_out.binomial_p_value(self.plus, n=self.n, limit=limit)

    def lower(self, delta: float) -> float:
        """The lower bound on the risk at delta, by the same rules."""
        if self.levels is not None:
            return self._risk(montecarlo.betting_lower(**self._histogram, delta=delta))
        if self.lowest:
            return -held_out.difference(self.minus, self.plus, n=self.n, delta=delta)
        return 1.0 - bounds.clopper_pearson(self.n - self.plus, n=self.n, delta=delta)

    def scaled(self, times: int) -> "Tally":
        """What so many times as many examples would give at the same frequencies."""
        levels = None if self.levels is None else tuple((level, count * times) for level, count in self.levels)
        return Tally(self.n * times, self.lowest, self.plus * times, self.minus * times, levels)

    def _risk(self, share: float) -> float:
        """The risk at this share of the range."""
        return self.lowest + (1 - self.lowest) * share

    @property
    def _histogram(self) -> dict[str, Any]:
        levels, times = np.array(self.levels).T
        return {"values": levels / LEVELS, "counts": times}


@dataclass(frozen=True, eq=False)
class Sample:
    """One value per example: whole numbers from `lowest` to 1, or levels from 0 to LEVELS of that range.

    `exact` are the levels before they were rounded up, where these were computed.
    """

    values: Tensor
    whole: bool
    lowest: int
    exact: Tensor | None = None

    def tally(self, mask: Tensor | None = None) -> Tally:
        """The counts of all examples, or of some."""
        values = self.values if mask is None else self.values[mask]
        if self.whole:
            return Tally(len(values), self.lowest, int((values == 1).sum()), int((values == -1).sum()))
        levels, times = np.unique(values.numpy(), return_counts=True)
        return Tally(len(values), self.lowest, levels=tuple(zip(levels.tolist(), times.tolist(), strict=True)))


def evaluate(risk: Risk, model: nn.Module, reference: nn.Module | None, part: Part, *, batch: int = _BATCH) -> Sample:
    """The values of a risk on every example of a part, in eval mode and float32."""
    device = device_of(model)
    pieces: list[Tensor] = []
    batch = at_once(model, part.x, batch)
    for x, y in zip(part.x.split(batch), part.y.split(batch), strict=True):
        x, y = x.to(device), y.to(device)
        with evaluating(model), refusing_unfit(x, "the network"):
            output = answers_of(model, x)
        _refuse_nan("the network", output)
        compared = None if reference is None else _reference_output(reference, x, output)
        values = _values(risk, Answers(output, compared, x.clone(), y.clone()))  # a loss may write into them
        if values.ndim == 0 or len(values) != len(x):
            raise ValueError(
                f"the loss of a batch of {len(x)} examples has the shape {tuple(values.shape)}; give one value for each"
            )
        if values.ndim > 1 and values.shape == y.shape and not y.is_floating_point() and bool((y == IGNORED).any()):
            raise ValueError(
                f"the loss has a value for each of {tuple(y.shape)} tokens, and {int((y == IGNORED).sum())} of these "
                f"have the label {IGNORED}, which does not count; return the mean over each document's other tokens"
            )
        pieces.append(values.cpu())
    return sample(torch.cat(pieces), risk.lowest)


def at_once(model: nn.Module, x: Tensor, most: int) -> int:
    """How many of these examples a network answers in one call: of documents, as many as memory has room for."""
    if x.is_floating_point() or x.ndim != 2 or most < 2:
        return most
    with evaluating(model), refusing_unfit(x, "the network"):
        logits = logits_of(answers_of(model, x[:1]))
    return min(most, max(2, _AT_ONCE // max(1, logits.numel()))) if isinstance(logits, Tensor) else most


@torch.no_grad()
def _values(risk: Risk, answers: Answers) -> Tensor:
    """The values on a batch; what torch raises since they cannot be computed becomes one sentence."""
    try:
        return torch.as_tensor(risk.values(answers))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as failure:
        shape = tuple(getattr(logits_of(answers.output), "shape", ()))
        reason = str(failure).strip().partition("\n")[0]
        raise ValueError(
            f"the {risk.phrase} cannot be computed of outputs of shape {shape} and labels {tuple(answers.y.shape)} in "
            f"{answers.y.dtype} ({reason}); give outputs and labels that it is made for"
        ) from failure


def refuse_unfit(risk: Risk, networks: Sequence[nn.Module], reference: nn.Module | None, split: Split) -> None:
    """Refuses networks, a reference and labels that a risk of RISKS cannot be counted of, by two examples each."""
    few = split.bound.subset(torch.arange(min(2, len(split.bound))))
    for network in networks:
        evaluate(risk, network, reference, few)
    with evaluating(networks[0]):
        output = answers_of(networks[0], few.x)
    refuse_one_hot(output, split)


def refuse_one_hot(output: Any, split: Split) -> None:
    """Refuses classes in one-hot form: label by label, a classifier looks better than it is."""
    for part in (split.bound, split.prior):
        y = part.y
        if not len(y) or not _has_several_labels(logits_of(output)[:1], y[:1]):
            continue
        if bool((y.sum(-1) == 1).all()):
            raise ValueError(
                f"labels have the shape {tuple(y.shape)} and one 1 in every row, as classes in one-hot form have; give "
                "class numbers, y.argmax(-1): label by label, the error of a classifier looks too small"
            )


def refuse_batch_loss(risk: Risk, model: nn.Module, reference: nn.Module | None, part: Part) -> None:
    """A loss looks at one example at a time: that of a batch hardly varies, and a bound would take it for certain."""
    backwards = torch.arange(len(part)).flip(0)
    for order, together, alone in (
        (torch.arange(min(_STEADY, len(part))), _STEADY, 1),
        (backwards, _BATCH, _STEADY - 1),
    ):
        some = part.subset(order)
        sample, other = (evaluate(risk, model, reference, some, batch=size) for size in (together, alone))
        near = 0 if sample.whole else NEAR
        count = int(((sample.values.long() - other.values.long()).abs() > near).sum())
        # A few of them may lie where rounding makes a value jump.
        if count > max(1, len(some) // 1000) or sample.whole != other.whole:
            raise ValueError(
                f"the losses of {count} of {len(some)} examples depend on what else is in the batch; let the loss look "
                "at one example at a time"
            )


def _reference_output(reference: nn.Module, x: Tensor, output: Any) -> Any:
    """The reference network's answer, once it has the form of the other one."""
    with evaluating(reference), refusing_unfit(x, "the reference"):
        compared = answers_of(reference, x)
    shapes = [tuple(getattr(logits_of(answer), "shape", ())[1:]) for answer in (output, compared)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the network's outputs have shape {shapes[0]} and those of the reference {shapes[1]}; give a reference "
            "with the same outputs"
        )
    _refuse_nan("the reference", compared)
    logits = logits_of(compared)
    return logits.to(x.device)


def _refuse_nan(who: str, output: Any) -> None:
    """What is no number is neither larger nor smaller than another, so that an answer would be called right."""
    logits = logits_of(output)
    if isinstance(logits, Tensor) and bool(logits.isnan().any()):
        raise ValueError(
            f"{int(logits.isnan().sum())} of {logits.numel()} outputs of {who} are NaN; give one whose outputs are "
            "numbers"
        )


def sample(values: Tensor, lowest: int) -> Sample:
    """Values as a sample: Booleans and integers are counted, all others become levels of [lowest, 1]."""
    if values.ndim > 1 and values[:1].numel() == 1:  # such as those of labels (n, 1)
        values = values.flatten()
    if not values.is_floating_point() and values.ndim == 1:
        _check_range(values.double(), lowest)
        return Sample(values.long(), True, lowest)
    means = values.double().flatten(1).mean(1) if values.ndim > 1 else values.double()
    _check_range(means, lowest)
    # Rounded up: the risk of the levels is at least that of the values.
    exact = (means - lowest) / (1 - lowest) * LEVELS
    return Sample(exact.ceil().int(), False, lowest, exact)


def _check_range(values: Tensor, lowest: int) -> None:
    outside = (~((values >= lowest) & (values <= 1))).nonzero().flatten()
    if len(outside):
        finite = values[values.isfinite()]
        ends = f"from {float(finite.min()):g} to {float(finite.max()):g}" if len(finite) else "without a finite one"
        raise ValueError(
            f"the loss of example {int(outside[0])} is {float(values[outside[0]]):g}, but a loss must lie in "
            f"[{lowest}, 1]; the losses run {ends}, so divide by the largest one that is possible"
        )
