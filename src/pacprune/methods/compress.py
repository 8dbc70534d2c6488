"""Risk-controlled pruning: the sparsest network of a chain that provably keeps a limit.

Candidates from dense to very sparse are trained on one part of S_P and chosen on another. Their order is written down,
and then the bound set is opened: the densest is tested first, each at the full delta, until one fails.
"""

import copy
import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import imports
from pacprune.certification import risks, rules
from pacprune.certification.certificate import Certificate
from pacprune.certification.commitment import split_hashes
from pacprune.certification.held_out import certify_held_out, certify_sequence, examples_needed, tallies_of
from pacprune.certification.risks import LEVELS, Tally
from pacprune.data import trace
from pacprune.data.batches import device_of, refusing_unfit
from pacprune.data.splits import Part, Split, refuse_unlabelled
from pacprune.deploy import export
from pacprune.distributed import ranks
from pacprune.files import digest, write_atomically
from pacprune.masking import masks, weights
from pacprune.methods.pipeline import FROZEN, Pruned, counts_all, together
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.training.checks import check_config
from pacprune.training.config import Config, whole
from pacprune.training.evaluate import answers, evaluating
from pacprune.training.fit import fit
from pacprune.training.population import AT_ONCE
from pacprune.training.posterior import refuse_if_touched, touched
from pacprune.types import History, Loss, Progress, Table, check_module, check_name

LIMITS = {"max_error": "error", "max_drop": "drop", "max_disagreement": "disagreement"}
"""The keyword of every limit, and the risk that it is a limit of."""
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""The chain before it is refined, unless one is given."""
BEATEN = 0.5
"""A candidate is left out if a sparser one beats it on the validation part by more than so many standard errors.

In simulated chains, 0 leaves out too many where that part is small, and 1 too few where candidates are many.
"""
NARROW = 1.02
"""Two candidates of which one keeps less than this factor of the other's weights have none between them."""
FEW = 64
"""Examples that a rehearsal looks at."""
ORDER = "order.json"
"""The file in which the order is declared."""


# --- What comes of it.


@dataclass(frozen=True, eq=False, repr=False)
class Compressed:
    """The sparsest network that keeps a limit, its certificate, and the chain that it was found in.

    What is proved of every network that passed is that its risk is at most the limit. Its own risk on the bound set is
    a measurement, and no bound.

    Args:
        model: The network: the sparsest that passed; the densest candidate if none did.
        certificate: What is proved, with the list of tests.
        front: With `front`, the certificate about all candidates at once; else None.
        points: One row per candidate, by sparsity. `validation_risk` and `expected_bound` are what the order was chosen
            by. `sparsity` is of all weights, `selected_sparsity` of those that may be pruned. `order` is the place in
            the declared order, None if it has none. `risk`, `p_value` and `passed` are those of the test, None if it
            was not tested. With `front`, `bound` holds for all rows at once, and `price` is what that costs.
        models: The candidates themselves, one per row.
        passed: How many networks passed; 0 if not even the first did.
        risk: What is limited: "error", "drop" or "disagreement".
        limit: The limit that was asked for.
        reference: The network that it is compared with; None for a limit of the error.
        history: One row per epoch, over all candidates.

    Example:
        >>> config = pp.Config(epochs=4, lr=0.1)
        >>> compressed = pp.compress(model, split, config, dense=config, max_error=0.4, sparsities=[0.3, 0.6])
        >>> compressed
        Compressed(Sequential, sparsity 0..., error at most 0.4 at delta 0.05, ... bytes)
        >>> folder = compressed.save("small")
        >>> pp.verify(folder / "certificate").valid
        True
    """

    model: nn.Module
    certificate: Certificate
    front: Certificate | None
    points: Table
    models: tuple[nn.Module, ...]
    passed: int
    risk: str
    limit: float
    reference: nn.Module | None
    history: History

    @property
    def sparsity(self) -> float:
        """The counted fraction of zeros of the network."""
        return weights.sparsity(self.model)

    @property
    def selected_sparsity(self) -> float:
        """The fraction that was pruned of the weights that could be: all, but for what was excluded or frozen."""
        keeps = [keep for _, keep in weights.masked(self.model)]
        return masks.sparsity({str(k): keep for k, keep in enumerate(keeps)}) if keeps else self.sparsity

    @property
    def _selected_count(self) -> int:
        """How many weights could be pruned."""
        return sum(keep.numel() for _, keep in weights.masked(self.model)) or weights.total(self.model)

    @cached_property
    def bytes(self) -> int:
        """The size of its packed file."""
        return len(export.packed(self.model))

    @property
    def statement(self) -> str:
        """What a user wants to know, in one sentence; if no network passed, what is missing."""
        if not self.passed and self.front is None:
            return self.certificate.statement
        if not self.passed:
            return f"No candidate is proved to keep the limit {self.limit:g}. {self.certificate.statement}"
        dense = sum(t.numel() * t.element_size() for t in self.model.state_dict().values())
        selected = ""
        if self._selected_count < weights.total(self.model):
            selected = f", {round(self.selected_sparsity, 4):.2%} of the {self._selected_count:,} selected weights"
        return (
            # Rounded as everywhere else, where it is shown as a fraction of four digits.
            f"Compressed to {round(self.sparsity, 4):.2%} sparsity{selected} ({self.bytes:,} bytes in place of "
            f"{dense:,}); certified {self.risk} at most {self.limit:g} at delta {self.certificate.ledger.delta:g}."
            f"{self._beside_the_claim}"
        )

    @property
    def _beside_the_claim(self) -> str:
        """What the issuer states, and the count of tries where it is more than what is paid for."""
        words, tries = self.certificate.record["declaration"], self.certificate.tries
        declared = "" if words is None else f' The issuer states: "{words}".'
        return declared if tries is None or tries.paid or tries.number is None else f"{declared} This is {tries}."

    @property
    def examples_needed(self) -> int | None:
        """About how many bound examples the densest candidate would need to pass; None if no number would do."""
        certificate = self.certificate if self.front is None else self.front
        tally, count = tallies_of(certificate)[0], 1 if self.front is None else len(certificate.tests)
        return examples_needed(tally, self.limit, certificate.ledger.delta / count)

    def __repr__(self) -> str:
        facts = [type(self.model).__name__, f"sparsity {self.sparsity:.4f}"]
        if self._selected_count < weights.total(self.model):
            facts.append(f"sparsity {self.selected_sparsity:.4f} of the {self._selected_count:,} selected")
        if self.passed:
            facts.append(f"{self.risk} at most {self.limit:g} at delta {self.certificate.ledger.delta:g}")
        else:
            facts.append(f"no candidate keeps the limit {self.limit:g}")
        return f"Compressed({', '.join(facts)}, {self.bytes:,} bytes)"

    def draw(self, path: str | Path) -> None:
        """Draws sparsity against risk, with the limit as a line.

        Args:
            path: The PNG file to write.

        Raises:
            ValueError: If matplotlib is not installed.
        """
        # Figures, and matplotlib with them, lie above the methods.
        imports.function("pacprune.runs.plots:draw_compression")(self.points, Path(path))

    def save(self, folder: str | Path) -> Path:
        """Writes the folder `certificate`, perhaps `front`, and the packed network `packed.safetensors`.

        Args:
            folder: Where to write; it is made if it is missing.

        Returns:
            The folder.

        Raises:
            ValueError: If no network passed, so that there is nothing to prove.
        """
        if not self.passed:
            raise ValueError(f"there is nothing to save: {self.statement}")
        folder, content = Path(folder), export.packed(self.model)
        self.certificate.save(folder / "certificate")
        if self.front is not None:
            self.front.save(folder / "front")
        write_atomically(folder / export.FORMATS["safetensors"].file, content)
        return folder


# --- The chain.


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A trained network of the chain, and what it counts on the validation part.

    `level` is its sparsity as methods are asked for it: of the selected weights, by which the chain is ordered and
    refined. `sparsity` is counted, of all weights.
    """

    model: nn.Module
    level: float
    sparsity: float
    selected_sparsity: float
    tally: Tally
    history: History


@dataclass(frozen=True, eq=False)
class _Task:
    """What the chain is made of, and what it is to keep."""

    start: nn.Module
    reference: nn.Module | None
    split: Split
    fitting: Part
    validation: Part
    config: Config
    method: str
    loss: Loss
    options: Mapping[str, Any]
    risk: str
    limit: float
    delta: float
    seed: int
    folder: Path | None
    progress: Progress | None

    @property
    def n(self) -> int:
        """How many bound examples there are, which tells nothing about them."""
        return len(self.split.bound)

    def tally(self, model: nn.Module, part: Part) -> Tally:
        """What a network counts on a part."""
        return risks.evaluate(risks.RISKS[self.risk], model, self.reference, part).tally()

    def keeps(self, candidate: _Candidate, errors: float) -> bool:
        """Whether a candidate is expected to pass, if its risk is so many standard errors above what was counted."""
        return expected_bound(candidate.tally, n=self.n, delta=self.delta, errors=errors) <= self.limit

    def fit_dense(self, config: Config) -> History:
        """Trains the network before it is pruned."""
        checkpoint = None if self.folder is None else self.folder / "dense.pt"
        options = {"seed": self.seed, "stage": "dense", "checkpoint": checkpoint, "progress": self.progress}
        return fit(self.start, self.fitting, config, loss=self.loss, **options)

    @property
    def at_once(self) -> int:
        """How many candidates are trained as one population: a CPU gains nothing by it, and can start warm instead."""
        return AT_ONCE["cuda"] if device_of(self.start).type == "cuda" else 1

    def train(self, sparsities: Sequence[float], chain: Sequence[_Candidate]) -> list[_Candidate]:
        """The chain with candidates of these sparsities, each from the next denser one that there is."""
        chain = list(chain)
        options = {**METHODS[self.method].options, **self.options}
        for portion in _portions(sparsities, self.at_once):
            denser = [[c.model for c in chain if c.level < sparsity] for sparsity in portion]
            models = [copy.deepcopy(before[-1] if before else self.start) for before in denser]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", FROZEN)  # the rehearsal has said so
                results: list[Pruned] = together(
                    METHODS[self.method].verb,
                    models,
                    self.fitting,
                    self.config,
                    sparsity=portion,
                    loss=self.loss,
                    seed=self.seed,
                    folder=[None if self.folder is None else self.folder / f"{s:.6f}" for s in portion],
                    progress=_labelled(self.progress, portion),
                    **options,
                )
            chain = sorted([*chain, *map(self._candidate, results)], key=lambda candidate: candidate.level)
        return chain

    def _candidate(self, result: Pruned) -> _Candidate:
        """A network with its counts; that the validation part was looked at is noted on it."""
        model, sparsity = result.model.eval(), weights.sparsity(result.model)
        weights.mark_seen(model, self.validation.trace)
        history = [{"candidate": sparsity, **row} for row in result.history]
        selected = result.selected_sparsity
        level = result.sparsity if counts_all(**self.options) else selected
        return _Candidate(model, level, sparsity, selected, self.tally(model, self.validation), history)


def _portions(values: Sequence[float], size: int) -> Iterator[list[float]]:
    for first in range(0, len(values), size):
        yield list(values[first : first + size])


def _labelled(progress: Progress | None, sparsities: Sequence[float]) -> Progress | None:
    """The progress of these candidates, whose stages are called by their sparsities."""
    if progress is None:
        return None
    which = f"{sparsities[0]:g}" if len(sparsities) == 1 else f"{sparsities[0]:g} to {sparsities[-1]:g}"
    return lambda stage, *numbers: progress(f"sparsity {which}: {stage}", *numbers)


def _grow(task: _Task, sparsities: Sequence[float], refinements: int) -> list[_Candidate]:
    """The chain, by sparsity: the grid, and points in the range in which it may cross the limit.

    On a CPU the grid is trained until the first that fails even if its risk is two standard errors better. Then the
    widest gap in the range is halved once per refinement. A population on a GPU has the whole grid at once, and then
    all gaps are cut alike.
    """
    chain: list[_Candidate] = []
    for portion in _portions(sparsities, task.at_once):
        chain = task.train(portion, chain)
        if not task.keeps(chain[-1], -2.0):
            break
    if task.at_once > 1:
        return task.train(_points_between(_open_range(task, chain), 2**refinements), chain)
    for _ in range(refinements):
        chain = task.train(_points_between(_open_range(task, chain), 1), chain)
    return chain


def _open_range(task: _Task, chain: Sequence[_Candidate]) -> list[float]:
    """The sparsities from the last that is sure to pass, or 0, to the first after it that is sure to fail.

    Sure is what is expected even if the risk is one standard error of the validation part worse, or better.
    """
    first = max((k for k, candidate in enumerate(chain) if task.keeps(candidate, 1.0)), default=-1)
    end = next((k for k in range(first + 1, len(chain)) if not task.keeps(chain[k], -1.0)), len(chain) - 1)
    return [
        0.0 if first < 0 else chain[first].level,
        *(candidate.level for candidate in chain[first + 1 : end + 1]),
    ]


def _points_between(sparsities: Sequence[float], count: int) -> list[float]:
    """So many new sparsities between these, each in the middle of the widest gap: of equal factors of kept weights."""
    densities = [1 - sparsity for sparsity in sparsities]
    points: list[float] = []
    for _ in range(count if len(densities) > 1 else 0):
        place = max(range(len(densities) - 1), key=lambda k: densities[k] / densities[k + 1])
        if densities[place] < NARROW * densities[place + 1]:
            break
        # Three digits say as much as a user reads.
        middle = float(f"{math.sqrt(densities[place] * densities[place + 1]):.3g}")
        densities.insert(place + 1, middle)
        points.append(1 - middle)
    return sorted(points)


@lru_cache(maxsize=4096)
def expected_bound(tally: Tally, *, n: int, delta: float, errors: float = 0.0) -> float:
    """The bound that n examples would give if they counted as the validation part does.

    Args:
        tally: What a candidate counts on the validation part.
        n: The number of bound examples.
        delta: The level of the test.
        errors: By how many standard errors the risk is taken to be higher than it was counted.

    Returns:
        The bound.
    """
    if tally.levels is not None:
        return _shifted(tally, n, errors).bound(delta)
    plus, minus = tally.plus + errors * math.sqrt(tally.plus + tally.minus + 4), float(tally.minus)
    if plus < 0:
        plus, minus = 0.0, minus - plus if tally.lowest else 0.0
    scaled_plus = min(n, math.ceil(plus * n / tally.n))
    scaled_minus = min(n - scaled_plus, math.floor(minus * n / tally.n))
    return replace(tally, n=n, plus=scaled_plus, minus=scaled_minus).bound(delta)


def _shifted(tally: Tally, n: int, errors: float) -> Tally:
    """n examples whose levels are distributed as these, all moved by so many standard errors of their mean."""
    assert tally.levels is not None
    unit = (1 - tally.lowest) / LEVELS
    squares = sum(times * (tally.lowest + level * unit) ** 2 for level, times in tally.levels)
    shift = errors * math.sqrt(squares + 4) / (tally.n * unit)
    counts: dict[int, int] = {}
    filled = seen = 0
    for level, times in sorted(tally.levels, reverse=True):  # so that what is rounded is rounded up
        seen += times
        place = min(LEVELS, max(0, math.ceil(level + shift)))
        end = math.ceil(seen * n / tally.n)
        counts[place] = counts.get(place, 0) + end - filled
        filled = end
    return replace(tally, n=n, levels=tuple((level, times) for level, times in counts.items() if times))


def declared_order(tallies: Sequence[Tally], *, n: int, delta: float) -> list[int]:
    """Which candidates are tested: all but those that a sparser one beats on the validation part.

    A test that fails ends the walk. So a candidate that is worse than a sparser one can only do harm.

    Args:
        tallies: What the candidates count on the validation part, by sparsity.
        n: The number of bound examples.
        delta: The level of the tests.

    Returns:
        Their places, rising.
    """
    bounds = [expected_bound(tally, n=n, delta=delta) for tally in tallies]
    best = [expected_bound(tally, n=n, delta=delta, errors=-BEATEN) for tally in tallies]
    return [k for k in range(len(bounds)) if all(bound >= best[k] for bound in bounds[k + 1 :])]


def _write_order(task: _Task, order: Sequence[_Candidate], front: bool) -> str:
    """Writes down what is about to be tested, before the bound set is opened; returns its hash.

    A folder that has an order already must have this one: another would have been chosen after the bound set was read.
    """
    content = {
        "risk": task.risk,
        "limit": task.limit,
        "delta": task.delta,
        "front": front,
        "split": split_hashes(task.split),
        "reference": None if task.reference is None else digest(task.reference.state_dict()),
        "networks": [{"sparsity": c.sparsity, "sha256": digest(c.model.state_dict())} for c in order],
    }
    text = json.dumps(content, indent=2) + "\n"

    def write() -> None:
        folder = Path(_passing().name) if task.folder is None else task.folder
        path = folder / (ORDER if task.folder is not None else f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")
        if path.is_file() and path.read_text() != text:
            raise ValueError(
                f"{path} declares another order, and the bound set may have been read since; give another folder"
            )
        write_atomically(path, text.encode())

    ranks.on_rank0(write)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _passing() -> "tempfile.TemporaryDirectory[str]":
    """Where orders are written that nobody asked to keep."""
    return tempfile.TemporaryDirectory(prefix="pacprune-")


# --- The verb.


def compress(
    model: nn.Module,
    split: Split,
    config: Config,
    *,
    max_error: float | None = None,
    max_drop: float | None = None,
    max_disagreement: float | None = None,
    delta: float = 0.05,
    method: str = "pft",
    sparsities: Sequence[float] | None = None,
    refinements: int = 4,
    dense: Config | None = None,
    loss: Loss | None = None,
    reference: nn.Module | None = None,
    validation: float = 0.2,
    front: bool = False,
    name: str | None = None,
    declare: str | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Compressed:
    """Prunes as far as a limit of the risk on new data allows, and proves that the limit is kept.

    1. [dense training]; candidates of rising sparsity, each pruned from the model by `method`, on the first part of
       split.prior.
    2. On the other part, of share `validation`, the chain is refined where it may cross the limit. A candidate is
       expected to pass if the bound set, counting as this part does, would prove the limit. So the margin below the
       limit is the one that the test needs at this n: at the crossing, a candidate passes in about half of all bound
       sets. The range that is refined is one standard error of the validation part wide on either side.
    3. A candidate that a sparser one beats there, by half a standard error, is left out.
    4. The order is written down and hashed. Only then the bound set is opened. The candidates are tested one after
       another, densest first, each at the full delta, until one fails.

    By fixed-sequence testing, with probability at least 1 - delta the risk of every network that passed is at most the
    limit: the first whose risk exceeds it passes with probability at most delta (Bauer 1991; Angelopoulos et al.,
    "Learn then Test", 2021). There is no union over candidates. What is proved of a network is the limit, not its own
    Clopper-Pearson value.

    Args:
        model: The network to compress. It is trained in place if `dense` says how, and otherwise left as it is.
        split: The data. Everything is trained and chosen on split.prior, and tested on split.bound, which needs no
            labels for `max_disagreement` (pp.data.split(..., bound=inputs)).
        config: How each candidate is pruned, such as pp.Config(epochs=20, lr=0.1, schedule="cosine").
        max_error: Limit of the error rate, such as 0.1. One of the three limits is needed.
        max_drop: Limit of the error rate minus that of the reference, such as 0.01.
        max_disagreement: Limit of the share of inputs on which network and reference answer differently, such as 0.02.
        delta: Probability with which the certificate may fail, such as 0.05.
        method: How candidates are pruned: the name of a method that leaves a plain network, such as "pft" or "osp".
        sparsities: The chain before it is refined, rising; None is 0.5, 0.8, 0.9, 0.95, 0.98, 0.99 and 0.995.
        refinements: How many candidates are added where the limit is expected, such as 4; on a GPU, 2**refinements.
        dense: How the network is trained before pruning; None prunes it as it is.
        loss: What dense network and candidates are trained by, as of `pp.fit`. None is the cross-entropy: over the
            classes; or of a logit, where the network has one output, or one for each label of an example.
        reference: What drop and disagreement are measured against; None is the model before pruning.
        validation: Share of split.prior on which the chain is refined, such as 0.2.
        front: Tests all candidates at delta divided by their number, so that values hold for all of them at once.
        name: Which network it is, for verifiers: one of pacprune's models ("mlp"), or package.module:factory; or None.
        declare: What shaped the network or the reference, where pacprune cannot trace it to split.prior, in one
            sentence. The certificate quotes it.
        seed: Seed of the data order and of what the method draws.
        folder: Where checkpoints and the declared order are kept, so that an interrupted call goes on; None keeps none.
        progress: Called after every step and every epoch.
        **options: What else the method takes, such as criterion="snip" or exclude="head".

    Returns:
        The sparsest network that passed, its certificate, and all candidates. If not even the first passes, its
        `passed` is 0, and its `statement` says which bound there is and how many examples would be needed.

    Raises:
        ValueError: If there is not exactly one limit, if the bound set was looked at before, if the sparsities do not
            rise, if the network does not keep the limit before pruning, or if a rule of certificates is broken.

    Example:
        >>> config = pp.Config(epochs=4, lr=0.1)
        >>> compressed = pp.compress(model, split, config, dense=config, max_drop=0.1, sparsities=[0.3, 0.6, 0.9])
        >>> compressed.certificate.limit, compressed.passed > 0
        (0.1, True)
        >>> [row["passed"] for row in compressed.points if row["order"] == 1]
        [True]
    """
    limits = {"max_error": max_error, "max_drop": max_drop, "max_disagreement": max_disagreement}
    risk, limit = _only_limit(limits)
    grid = _checked_sparsities(SPARSITIES if sparsities is None else sparsities)
    refinements = whole("refinements", refinements, 0)
    _check_request(model, split, config, dense, delta, method, declare)
    if risks.RISKS[risk].labels:
        refuse_unlabelled(split)
    by_sign = _is_by_sign(model, split)
    if reference is not None:
        _check_reference(reference, split, declare)
    _refuse_told(split, declare)
    fitting, chosen_on = cut_validation(split.prior, validation)
    task = _Task(
        start=model,
        reference=reference,
        split=split,
        fitting=fitting,
        validation=chosen_on,
        config=config,
        method=method,
        loss=(logit_loss if by_sign else F.cross_entropy) if loss is None else loss,
        options=options,
        risk=risk,
        limit=limit,
        delta=delta,
        seed=seed,
        folder=None if folder is None else Path(folder),
        progress=progress,
    )
    _check_provable(task)
    _rehearse(task, grid[-1])
    history = [] if dense is None else task.fit_dense(dense)
    if risk != "error":
        task = replace(task, reference=(copy.deepcopy(model) if reference is None else reference).eval())
    _check_start(task)
    chain = _grow(task, grid, refinements)
    tallies = [candidate.tally for candidate in chain]
    order = [chain[k] for k in declared_order(tallies, n=task.n, delta=delta)]
    _write_order(task, order, front)
    common = {"risk": risk, "reference": task.reference, "delta": delta, "name": name, "declare": declare}
    outcome = (_front if front else _walk)(task, [candidate.model for candidate in order], common)
    return Compressed(
        model=order[outcome.chosen].model,
        certificate=outcome.certificate,
        front=outcome.front,
        points=_points(task, chain, order, outcome.tests),
        models=tuple(candidate.model for candidate in chain),
        passed=outcome.passed,
        risk=risk,
        limit=limit,
        reference=task.reference,
        history=history + [row for candidate in chain for row in candidate.history],
    )


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What the bound set has said: rows of the tests in the declared order, how many passed, and which is chosen."""

    certificate: Certificate
    tests: Sequence[Mapping[str, Any]]
    passed: int
    chosen: int
    front: Certificate | None = None


def _walk(task: _Task, models: Sequence[nn.Module], common: Mapping[str, Any]) -> _Outcome:
    """Opens the bound set: one certificate by fixed-sequence testing."""
    certificate = certify_sequence(models, task.split, limit=task.limit, **common)
    return _Outcome(certificate, certificate.tests, certificate.passed, max(0, certificate.passed - 1))


def _front(task: _Task, models: Sequence[nn.Module], common: Mapping[str, Any]) -> _Outcome:
    """Opens the bound set: bounds at delta divided by the number of candidates, which hold for all of them at once."""
    front = certify_sequence(models, task.split, limit=task.limit, front=True, **common)
    tests = []
    for test, tally in zip(front.tests, tallies_of(front), strict=True):
        bound = test["bound"]
        assert bound is not None
        price = bound - tally.bound(task.delta)
        tests.append({**test, "passed": bound <= task.limit, "price": price})
    chosen = max((k for k, test in enumerate(tests) if test["passed"]), default=0)
    # The same bound, in a certificate about this network.
    certificate = certify_held_out(models[chosen], task.split, certified=len(models), **common)
    return _Outcome(certificate, tests, sum(test["passed"] for test in tests), chosen, front)


def _points(
    task: _Task, chain: Sequence[_Candidate], order: Sequence[_Candidate], tests: Sequence[Mapping[str, Any]]
) -> Table:
    """A row for every candidate."""
    places = {id(candidate): k for k, candidate in enumerate(order)}
    points = []
    for candidate in chain:
        place = places.get(id(candidate))
        test = tests[place] if place is not None and place < len(tests) else {}
        points.append(
            {
                "sparsity": candidate.sparsity,
                "selected_sparsity": candidate.selected_sparsity,
                "validation_risk": candidate.tally.mean,
                "expected_bound": expected_bound(candidate.tally, n=task.n, delta=task.delta),
                "order": None if place is None else place + 1,
                "risk": test.get("mean"),
                **{key: test.get(key) for key in ("p_value", "passed", "bound", "price")},
                "limit": task.limit,
            }
        )
    return points


# --- What is refused.


def _only_limit(limits: Mapping[str, float | None]) -> tuple[str, float]:
    """The risk that is limited, and the limit."""
    values = {name: value for name, value in limits.items() if value is not None}
    if len(values) != 1:
        state = " and ".join(f"{name} is {value}" for name, value in values.items()) or "there is no limit"
        raise ValueError(f"{state}; give exactly one of {', '.join(limits)}")
    ((name, limit),) = values.items()
    if not 0 < limit < 1:
        raise ValueError(f"{name} is {limit}; it must lie strictly between 0 and 1: give a fraction, such as 0.02")
    return LIMITS[name], float(limit)


def _checked_sparsities(sparsities: Sequence[float]) -> list[float]:
    """The chain, if it rises from dense to sparse."""
    values = [float(sparsity) for sparsity in sparsities]
    if not values or not all(0 <= value < 1 for value in values):
        raise ValueError(f"sparsities are {values}; give at least one fraction of the weights to prune, in [0, 1)")
    for lower, higher in pairwise(values):
        if lower >= higher:
            raise ValueError(
                f"sparsities has {lower:g} before {higher:g}, but the densest is tested first; give them rising"
            )
    return values


def _check_request(
    model: nn.Module, split: Split, config: Config, dense: Config | None, delta: float, method: str, declare: str | None
) -> None:
    """Refuses before anything is trained what a certificate would be refused for."""
    check_module(model)
    if not isinstance(split, Split):
        raise ValueError(
            f"the data is a {type(split).__name__}, but a limit is proved on the part of a Split that nothing is "
            "trained on; make one by pp.data.split(x, y)"
        )
    check_config("config", config)
    if dense is not None:
        check_config("dense", dense)
    check_name("method", method, pruning_methods())
    rules.check_delta(delta)
    rules.refuse_random(model)
    rules.refuse_cut(split)
    rules.refuse_repeats(split, declaration := rules.checked_declaration(declare))
    count = touched(trace.looked(), split.bound, apart_from=split.prior)
    if count:
        raise ValueError(
            f"something was evaluated on {count} of the {len(split.bound)} bound examples before, and what is trained "
            "now may have been chosen by it; use a split whose bound part was never looked at, in a new process"
        )
    if dense is None:
        rules.refuse_untraced(weights.origin(model), split, "the model", declaration)
    else:  # which trains what has never been trained
        refuse_if_touched(weights.seen(model), split, "the model")


def _refuse_told(split: Split, declare: str | None) -> None:
    """What is trained after a loss on the bound set was told may have been chosen by it."""
    if declare is None and touched(trace.looked(trained=True), split.bound, apart_from=split.prior):
        raise ValueError(
            "something was trained on bound examples before, and what is trained now may have been chosen by its "
            'losses; do so in a new process, or say that nothing was: declare="no setting was chosen by ..."'
        )


def _is_by_sign(model: nn.Module, split: Split) -> bool:
    """Whether the network answers by signs; refuses inputs that it cannot take, and labels that are no classes."""
    network, few, y = copy.deepcopy(model), split.prior.x[:2].to(device_of(model)), split.prior.y
    with evaluating(network), refusing_unfit(few, "the model"):
        output = answers(network, few)
    risks.refuse_one_hot(output, split)
    by_sign = risks.is_by_sign(output, y[:2])
    if (by_sign or y.is_floating_point()) and not bool(((y == 0) | (y == 1)).all()):
        kind = "one output per label, whose sign tells 0 from 1," if by_sign else "an output per class,"
        raise ValueError(
            f"the model has {kind} but the labels run from {float(y.min()):g} to {float(y.max()):g} in {y.dtype}; give "
            "classes, as y.long(), and the model an output for each; for regression there is pp.certify_held_out with "
            "a loss of your own"
        )
    return by_sign


def logit_loss(output: Any, y: Tensor) -> Tensor:
    """The mean cross-entropy of logits, whose signs are the answers, with labels 0 and 1."""
    logits = risks.logits_of(output).reshape(y.shape)
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))


def _check_reference(reference: nn.Module, split: Split, declare: str | None) -> None:
    """Refuses a reference that has seen the bound set."""
    check_module(reference)
    rules.refuse_random(reference)
    rules.refuse_untraced(weights.origin(reference), split, "the reference", rules.checked_declaration(declare))


def cut_validation(part: Part, validation: float) -> tuple[Part, Part]:
    """What candidates are trained on, and what they are chosen on; the order of a part is random already."""
    size = round(validation * len(part)) if 0 < validation < 1 else 0
    if not 0 < size < len(part):
        raise ValueError(
            f"validation is {validation}, of {len(part)} examples; it must leave at least 1 to train on and 1 to "
            "choose on: give a share, such as 0.2"
        )
    cut = len(part) - size
    return part.subset(torch.arange(cut)), part.subset(torch.arange(cut, len(part)))


def _check_provable(task: _Task) -> None:
    """Refuses what cannot be counted, by two examples, and a limit that no bound set of this size can prove."""
    model, risk = copy.deepcopy(task.start), risks.RISKS[task.risk]
    reference = (model if task.reference is None else task.reference) if risk.against else None
    few = task.validation.subset(torch.arange(min(2, len(task.validation))))
    sample = risks.evaluate(risk, model, reference, few)
    zero = ((LEVELS if risk.lowest else 0) // 2, task.n)
    best = Tally(task.n, risk.lowest, levels=None if sample.whole else (zero,)).bound(task.delta)
    if best > task.limit:
        raise ValueError(
            f"the limit is {task.limit:g}, but {rules.bound_examples(task.n)} prove{'s' * (task.n == 1)} at best "
            f"{best:.4g} at delta {task.delta:g}, without a single mistake; give more bound examples, or a larger limit"
        )


def _rehearse(task: _Task, sparsity: float) -> None:
    """Prunes a copy without an epoch, on a few examples, so that what the method refuses is refused at once."""
    row = METHODS[task.method]
    if "pattern" in task.options:
        raise ValueError(
            f"pattern is {task.options['pattern']!r}, but compress walks along sparsities, and a pattern has one; "
            f"prune by pp.{task.method}, and certify the outcome with pp.certify_held_out"
        )
    for name in task.options:
        if not row.takes(name):
            raise ValueError(f"{name} is no argument of the method {task.method!r}; leave it out, or see its help")
    few = task.fitting.subset(torch.arange(min(FEW, len(task.fitting))))
    options = {**row.options, **task.options, "loss": task.loss}
    row.verb(copy.deepcopy(task.start), few, replace(task.config, epochs=0), sparsity=sparsity, **options)


def _check_start(task: _Task) -> None:
    """Refuses a limit that the network does not keep before pruning."""
    risk = task.tally(task.start, task.validation).mean
    if risk > task.limit:
        raise ValueError(
            f"the limit of the {task.risk} is {task.limit:g}, but before pruning it is {risk:.4f} on the validation "
            "part; train the network longer, or give a larger limit"
        )
