"""How far networks can be pruned under a limit that is proved, and what the chain and the paired risk are worth.

For every data set and seed, a dense network and a population of candidates, pruned by PFT, are trained on a part of
S_P. The rest of S_P decides, for drop and for disagreement, which of them are the chain, and in which order they are
tested. The bound set is opened once for all limits. The four arms differ in how they pay for many candidates, and in
how they compare two networks.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.certification import risks
from pacprune.certification.certificate import Certificate
from pacprune.certification.held_out import certify_sequence
from pacprune.certification.risks import Answers, Tally
from pacprune.data.batches import device_of
from pacprune.data.splits import Part, Split
from pacprune.deploy import export
from pacprune.masking import weights
from pacprune.methods.compress import cut_validation, declared_order, expected_bound
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import together
from pacprune.paper import painting
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, dense_networks
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.evaluate import BATCH, evaluating
from pacprune.types import Table

LIMITS = {"drop": (0.005, 0.01, 0.02), "disagreement": (0.01, 0.02, 0.05)}
COUNT = sum(len(limits) for limits in LIMITS.values())
"""How many limits there are: at delta divided by this, all of them hold at once."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The chain, and how the data are cut.

    Args:
        grid: Sparsities of the candidates, rising.
        rates: Factors of the learning rate; of each sparsity, that candidate is in the chain which the validation part
            expects to be the better one. Small steps leave more answers as they were.
        prior_fraction: Share of the training data in S_P; the rest is the bound set.
        validation: Share of S_P that decides on the order.
        delta: Probability with which a certificate may fail.
    """

    grid: tuple[float, ...]
    rates: tuple[float, ...] = (1.0, 0.2)
    prior_fraction: float = 0.8
    validation: float = 0.2
    delta: float = 0.05


def _grid(count: int, least: float) -> tuple[float, ...]:
    """So many sparsities from 0.1 on; each keeps the same share of the weights of the one before, the last `least`."""
    factor = (least / 0.9) ** (1 / (count - 1))
    return tuple(1 - float(f"{0.9 * factor**k:.3g}") for k in range(count))


_GREY = Setting(
    data="mnist",
    model="lenet5",
    seeds=5,
    dense=Config(epochs=12, lr=0.05, schedule="cosine"),
    pruning=Config(epochs=12, lr=0.05, schedule="cosine", warmup=0.05),
    options=Chain(grid=_grid(16, 0.002)),
)
_COLOUR = _GREY.changed(
    data="cifar10",
    model="resnet20",
    seeds=3,
    dense=Config(epochs=30, lr=0.1, schedule="cosine", warmup=0.05, augment=True, weight_decay=5e-4),
    pruning=Config(epochs=16, lr=0.2, schedule="cosine", warmup=0.05, augment=True, weight_decay=5e-4),
    grid=_grid(16, 0.01),
)
SETTINGS: dict[str, tuple[Setting[Chain], ...]] = {
    "smoke": (
        _GREY.changed(
            data="digits",
            model="mlp",
            seeds=2,
            dense=Config(epochs=10, lr=0.1, schedule="cosine"),
            pruning=Config(epochs=4, lr=0.1, schedule="cosine"),
            grid=_grid(4, 0.02),
            rates=(1.0,),
            prior_fraction=0.5,
        ),
    ),
    "reduced": (_GREY, _GREY.changed(data="fashion-mnist"), _COLOUR),
    "full": (
        _GREY.changed(dense=replace(_GREY.dense, epochs=30), pruning=replace(_GREY.pruning, epochs=30)),
        _GREY.changed(
            data="fashion-mnist",
            dense=replace(_GREY.dense, epochs=70),
            pruning=replace(_GREY.pruning, epochs=30),
        ),
        _COLOUR.changed(
            seeds=5,
            dense=replace(_COLOUR.dense, epochs=120),
            pruning=replace(_COLOUR.pruning, epochs=120),
        ),
    ),
}


# --- The arms: which candidate each of them can promise.


@dataclass(frozen=True, eq=False)
class Counts:
    """What all candidates, by sparsity, count on one part, and how often they and the reference err there."""

    tallies: list[Tally]
    errors: list[int]
    reference_errors: int


Arm = Callable[[Counts, Sequence[int], float, float], int | None]
"""(counts on the bound set, declared order, limit, delta) -> the place of the sparsest that is proved; None: none."""


def _last_passed(order: Sequence[int], passes: Callable[[int], bool]) -> int | None:
    """The last place of an order before the first that fails."""
    last = None
    for place in order:
        if not passes(place):
            break
        last = place
    return last


def _chain(counts: Counts, order: Sequence[int], limit: float, delta: float) -> int | None:
    """Each test at the full delta, in the declared order, until one fails."""
    return _last_passed(order, lambda place: counts.tallies[place].p_value(limit) <= delta)


def _union(counts: Counts, order: Sequence[int], limit: float, delta: float) -> int | None:
    """All candidates of the grid, each at its part of delta."""
    share = delta / len(counts.tallies)
    return max((k for k, tally in enumerate(counts.tallies) if tally.p_value(limit) <= share), default=None)


def _difference(counts: Counts, place: int, delta: float, reference_delta: float) -> float:
    """A bound on the drop from two bounds: of the candidate's error from above, of the reference's from below."""
    n = counts.tallies[place].n
    lower = 1 - bounds.clopper_pearson(n - counts.reference_errors, n=n, delta=reference_delta)
    return bounds.clopper_pearson(counts.errors[place], n=n, delta=delta) - lower


def _separate(counts: Counts, order: Sequence[int], limit: float, delta: float) -> int | None:
    """As the chain, with two separate bounds at half of delta each."""
    return _last_passed(order, lambda place: _difference(counts, place, delta / 2, delta / 2) <= limit)


def _ordinary(counts: Counts, order: Sequence[int], limit: float, delta: float) -> int | None:
    """All candidates of the grid, with two separate bounds; the reference's is the same for all of them."""
    share = delta / 2 / len(counts.tallies)
    kept = [k for k in range(len(counts.tallies)) if _difference(counts, k, share, delta / 2) <= limit]
    return max(kept, default=None)


class Way(NamedTuple):
    """A way to a promise: its look, how it chooses, and for which risks there is such a thing."""

    style: Style
    choose: Arm
    risks: tuple[str, ...] = ("drop",)


ARMS = {
    "chain": Way(Style("chain, paired", plots.BLUE, "o"), _chain, ("drop", "disagreement")),
    "union": Way(Style("union bound, paired", plots.ORANGE, "s"), _union, ("drop", "disagreement")),
    "separate": Way(Style("chain, two bounds", plots.GREEN, "^"), _separate),
    "ordinary": Way(Style("union bound, two bounds", plots.GREY, "v"), _ordinary),
}


# --- Rows.


class Entry(NamedTuple):
    """One promise."""

    seed: int
    risk: str
    limit: float
    arm: str


def entries(seeds: Sequence[int]) -> list[Entry]:
    """All promises of these seeds."""
    return [
        Entry(seed, risk, limit, arm)
        for seed in seeds
        for risk, limits in LIMITS.items()
        for limit in limits
        for arm, way in ARMS.items()
        if risk in way.risks
    ]


def rows(setting: Setting[Chain], job: Job) -> Table:
    """One row per seed, limit and arm; those of an interrupted run are kept."""
    table = compute_rows(
        entries(job.seeds(setting.seeds)),
        partial(promises, setting, job),
        path=job.out / f"compress-{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry.seed,
    )
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def promises(setting: Setting[Chain], job: Job, portion: Sequence[Entry]) -> Table:
    """All promises of one seed, from one chain."""
    seed, options = portion[0].seed, setting.options
    split = data.load(setting.data, seed=seed, prior_fraction=options.prior_fraction, data_dir=job.data_dir)
    fitting, chosen_on = cut_validation(split.prior, options.validation)
    reference, pool = trained(setting, split, fitting, seed, job)
    everybody = [reference, *pool]
    judged = answered(everybody, chosen_on)
    counted = {}
    for risk in LIMITS:
        # Chain and order, the same for all limits, are fixed by the validation part before the others are opened.
        places, planned = chain(setting, count(risk, judged).tallies, len(split.bound))
        counted[risk] = places, declared_order(planned, n=len(split.bound), delta=options.delta)
    parts = [answered(everybody, part) for part in (split.bound, split.test)]
    table = []
    for entry in portion:
        chosen, order = counted[entry.risk]
        candidates = [pool[place] for place in chosen]
        bound, test = (count(entry.risk, answers, chosen) for answers in parts)
        places = [ARMS[entry.arm].choose(bound, order, entry.limit, d) for d in (options.delta, options.delta / COUNT)]
        if entry.arm == "chain" and seed == job.seeds(1)[0]:  # what is promised is what the certificate says
            networks = [candidates[place] for place in order]
            certificate = issue(setting, networks, reference, split, entry, job)
            places[0] = order[certificate.passed - 1] if certificate.passed else None
        sizes = {"dense_bytes": len(export.packed(reference)), "tested": len(order), "delta": options.delta}
        table.append(_row(places, candidates, bound, test) | sizes)
    return table


def issue(
    setting: Setting[Chain],
    networks: Sequence[nn.Module],
    reference: nn.Module,
    split: Split,
    entry: Entry,
    job: Job,
) -> Certificate:
    """The certificate of a chain, which is kept where something passed."""
    risk, limit = entry.risk, entry.limit
    common = {"reference": reference, "delta": setting.options.delta, "name": setting.model}
    certificate = certify_sequence(networks, split, risk=risk, limit=limit, **common)
    if certificate.passed:
        certificate.save(job.out / "certificates" / f"{setting.name}-{risk}-{limit:g}", packed=True)
    return certificate


def trained(
    setting: Setting[Chain], split: Split, fitting: Part, seed: int, job: Job
) -> tuple[nn.Module, list[nn.Module]]:
    """The dense network, and the candidates of every sparsity and learning rate in turn, all from one part of S_P."""
    examples, options = job.tensors(fitting), setting.options
    build = partial(models.build, setting.model, split)
    dense = dense_networks(setting, lambda seed: build(seed=seed), examples, job, seeds=[seed])[seed]
    networks: list[nn.Module] = []
    for portion in job.portions([(sparsity, rate) for sparsity in options.grid for rate in options.rates]):
        members = [copy.deepcopy(dense) for _ in portion]
        configs = [replace(setting.pruning, lr=rate * setting.pruning.lr) for _, rate in portion]
        sparsities = [sparsity for sparsity, _ in portion]
        together(pft, members, examples, configs, sparsity=sparsities, seed=seed, progress=job.progress)
        networks += [member.eval() for member in members]
    return dense.eval(), networks


def chain(setting: Setting[Chain], tallies: Sequence[Tally], n: int) -> tuple[list[int], list[Tally]]:
    """Of every sparsity, the place of the candidate that is expected to have the lower bound, and what it counts."""
    width, delta = len(setting.options.rates), setting.options.delta
    expected = [expected_bound(tally, n=n, delta=delta) for tally in tallies]
    places = [min(range(first, first + width), key=expected.__getitem__) for first in range(0, len(expected), width)]
    return places, [tallies[place] for place in places]


class Answered(NamedTuple):
    """What the reference and the candidates, in this order, answer to a part."""

    outputs: list[Tensor]
    x: Tensor
    y: Tensor


def answered(networks: Sequence[nn.Module], part: Part) -> Answered:
    """The outputs of all networks on a part."""
    device = device_of(networks[0])
    outputs: list[list[Tensor]] = [[] for _ in networks]
    for x in part.x.split(BATCH):
        x = x.to(device)
        for network, batches in zip(networks, outputs, strict=True):
            with evaluating(network):
                batches.append(network(x).cpu())
    return Answered([torch.cat(batches) for batches in outputs], part.x, part.y)


def count(risk: str, answers: Answered, places: Sequence[int] | None = None) -> Counts:
    """What the candidates at these places, or all of them, count."""
    reference, *candidates = answers.outputs

    def tally(name: str, output: Tensor) -> Tally:
        values = risks.RISKS[name].values(Answers(output, reference, answers.x, answers.y))
        return risks.sample(values, risks.RISKS[name].lowest).tally()

    chosen = candidates if places is None else [candidates[place] for place in places]
    errors = [tally("error", output).plus for output in chosen]
    return Counts([tally(risk, output) for output in chosen], errors, tally("error", reference).plus)


def _row(places: Sequence[int | None], candidates: Sequence[nn.Module], bound: Counts, test: Counts) -> dict[str, Any]:
    """What is known of the candidate that an arm promises, and the sparsity of the one that it promises at delta/COUNT.

    Without one there is the dense network, of which nothing has to be proved.
    """
    sparsities = [0.0 if place is None else weights.sparsity(candidates[place]) for place in places]
    place, examples = places[0], test.tallies[0].n
    values = {
        "bound_set_value": None if place is None else bound.tallies[place].mean,
        "test_value": None if place is None else test.tallies[place].mean,
        "test_error": (test.reference_errors if place is None else test.errors[place]) / examples,
        "bytes": None if place is None else len(export.packed(candidates[place])),
    }
    return {
        "sparsity": sparsities[0],
        **values,
        "dense_test_error": test.reference_errors / examples,
        "sparsity_all": sparsities[1],
        "candidates": len(candidates),
        "n": bound.tallies[0].n,
    }


# --- The figure.


def figures(setting: Setting[Chain], job: Job) -> Iterator[Figure]:
    """The sparsity that each arm reaches under every limit."""
    yield Figure(
        f"compress-{setting.name}",
        f"{painting.network(setting)}: the sparsest network of a chain of {len(setting.options.grid)} that is "
        f"proved to keep a limit, at delta = {setting.options.delta:g}; {setting.seeds} seeds "
        "(split, weights and data order are random). Every row of the CSV is a promise of its own, at the full "
        f"delta; for all {COUNT} limits at once, the column sparsity_all has each at delta/{COUNT}. Sparsity 0 is the "
        "dense network, where no candidate could be proved to keep the limit.",
        lambda: rows(setting, job),
        paint,
        lambda rows: numbers(setting, rows),
    )


def numbers(setting: Setting[Chain], rows: Table) -> dict[str, float]:
    """The mean sparsity of every arm under every limit."""
    return {
        f"{setting.name}, {risk} {limit:g}, {arm}: sparsity": interval([row["sparsity"] for row in part]).mean
        for (risk, limit, arm), part in groups(rows, "risk", "limit", "arm").items()
    }


def paint(canvas: Any, rows: Table) -> None:
    """A panel per risk: how many of the weights are left under every limit, arms side by side, a mark per seed."""
    from matplotlib.ticker import LogLocator, NullLocator

    canvas.set_size_inches(9, 4)
    panels = groups(rows, "risk")
    widths = [len(groups(part, "arm")) for part in panels.values()]
    all_axes = canvas.subplots(1, len(panels), sharey=True, width_ratios=widths)
    for axes, ((risk,), part) in zip(all_axes, panels.items(), strict=True):
        arms = [arm for arm, way in ARMS.items() if risk in way.risks]
        limits = sorted({row["limit"] for row in part})
        for number, arm in enumerate(arms):
            style, side = ARMS[arm].style, 0.2 * (number - (len(arms) - 1) / 2)
            for place, limit in enumerate(limits):
                promised = [row for row in part if (row["arm"], row["limit"]) == (arm, limit)]
                left = [100 * (1 - row["sparsity"]) for row in promised]
                painting.seed_marks(axes, place + side, left, style, label=None if place else style.label)
        axes.axhline(100, color=plots.GREY, lw=0.8, ls=":", zorder=0)
        axes.set_xticks(range(len(limits)), [f"{100 * limit:g} %" for limit in limits])
        axes.set_xlabel(f"promised: {risk} at most")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    canvas.axes[0].set_ylabel("weights left, in % (100: nothing is promised)")
    canvas.axes[0].legend(fontsize=8, loc="lower left")
    painting.canvas_heading(
        canvas,
        f"{painting.subject(rows)}: a mark per seed ({painting.seed_count(rows)}) and their mean; lower is better",
    )
