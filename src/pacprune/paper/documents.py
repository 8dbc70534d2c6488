"""Documents or tokens: what a certificate of a character GPT is worth that counts tokens as if they were independent.

A text is cut into passages, and these at random into two halves. A network trains on the one half and is pruned. Its
errors on the other half are a population whose mean is known. Documents, which are parts of passages, are drawn from it
again and again: a bound that counts their tokens, and one that counts documents, fail where they lie below that mean.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pacprune import bounds, models, philox
from pacprune.bounds import montecarlo
from pacprune.certification import risks
from pacprune.data.documents import documents
from pacprune.data.splits import Part
from pacprune.methods.gradual import gmp
from pacprune.methods.pipeline import together
from pacprune.paper import characters, painting
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, in_entries, in_steps
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.types import Table

ARMS = {
    "tokens": Style("tokens, as if independent\n(Clopper-Pearson)", painting.RED, "o"),
    "documents": Style("documents\n(betting)", plots.BLUE, "s"),
}


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Documents, the network that reads them, and how often they are drawn.

    Args:
        length: Tokens that the network reads at once.
        windows: How many times as long documents are; the last number is that of a passage, which all others divide.
        network: The network's sizes.
        dense_steps: Steps of dense training.
        prune_steps: Steps of pruning.
        sizes: Documents that a bound is computed from.
        trials: How often they are drawn.
        delta: Probability with which a bound may fail.
    """

    length: int = 64
    windows: tuple[int, ...] = in_entries()
    network: Mapping[str, Any] = field(
        default_factory=lambda: {"width": 64, "depth": 2, "heads": 4, "dropout": 0.0, "context": 64}
    )
    dense_steps: int = 800
    prune_steps: int = 300
    sizes: tuple[int, ...] = in_entries()
    trials: int = 10_000
    delta: float = 0.05


_TRAINING = Config(lr=3e-3, optimizer="adamw", weight_decay=0.1, schedule="cosine", warmup=0.05, batch_size=32)
_REDUCED = Setting(
    data="tinyshakespeare",
    model="gpt",
    sparsities=(0.8,),
    seeds=3,
    dense=_TRAINING,
    pruning=_TRAINING,
    options=Passages(windows=(1, 4, 8, 16, 32), sizes=(20, 100)),
)
SETTINGS: dict[str, tuple[Setting[Passages], ...]] = {
    "smoke": (
        _REDUCED.changed(
            data="babble",
            length=24,
            network={"width": 16, "depth": 1, "heads": 2, "dropout": 0.0, "context": 24},
            dense_steps=20,
            prune_steps=10,
            windows=(1, 8),
            sizes=(20,),
            trials=60,
            seeds=1,
        ),
    ),
    "reduced": (_REDUCED,),
    "full": (_REDUCED.changed(seeds=5, dense_steps=6_000, prune_steps=2_000),),
}


class Entry(NamedTuple):
    """One network."""

    seed: int


class Corpus(NamedTuple):
    """Rows of tokens and their successors in two halves, cut at random, and how many different tokens there are."""

    training: tuple[Tensor, Tensor]
    others: tuple[Tensor, Tensor]
    vocabulary: int


def speeches(data: str, length: int, seed: int, job: Job) -> Corpus:
    """The speeches of a text that have more than `length` characters, their first ones; the halves are of the seed."""
    text, vocabulary = characters.encoded(Setting(data=data, options=None), job)
    x, y = documents(_pieces(text, data, length), length=length)
    halves = philox.permutation(len(x), seed=seed).chunk(2)
    training, others = ((x[half], y[half]) for half in halves)
    return Corpus(training, others, vocabulary)


def _pieces(text: Tensor, data: str, length: int) -> list[Tensor]:
    """Speeches end with two newlines, which sort first; made-up words have no speeches, and are cut into pieces."""
    if data == "babble":
        return list(text.unfold(0, length + 1, length + 1))
    newline = 0
    ends = ((text[:-1] == newline) & (text[1:] == newline)).nonzero().flatten() + 2
    pieces = torch.tensor_split(text, ends)
    return [piece for piece in pieces if len(piece) > length]


def passages(setting: Setting[Passages], seed: int, job: Job) -> Corpus:
    """All windows of the passages of a text, one passage after another; the halves are of the seed."""
    options = setting.options
    text, vocabulary = characters.encoded(setting, job)
    size = options.length * options.windows[-1]
    cut = text.unfold(0, size + 1, size)
    halves = philox.permutation(len(cut), seed=seed).chunk(2)
    first, second = (
        (cut[half, :-1].reshape(-1, options.length), cut[half, 1:].reshape(-1, options.length)) for half in halves
    )
    return Corpus(first, second, vocabulary)


def trained(setting: Setting[Any], half: Corpus, seed: int, job: Job) -> tuple[nn.Module, nn.Module, Any]:
    """A dense network that predicts the next token of every document of the first half; a pruned one, and its mask."""
    options, size = setting.options, len(half.training[0])
    x, y = (t.to(job.device) for t in half.training)
    common: dict[str, Any] = {"progress": job.progress, "loss": models.next_character}
    net = models.gpt(half.vocabulary, seed=seed, **options.network).to(job.device)
    fit(net, (x, y), in_steps(setting.dense, options.dense_steps, size), seed=seed, stage="dense", **common)
    dense = models.gpt(half.vocabulary, seed=seed, **options.network).to(job.device)
    dense.load_state_dict(net.state_dict())
    pruning = in_steps(setting.pruning, options.prune_steps, size)
    (pruned,) = together(gmp, [net], (x, y), pruning, sparsity=setting.sparsities[0], seed=seed, **common)
    return dense, net, pruned.mask


def losses(net: nn.Module, half: tuple[Tensor, Tensor], risk: str = "token-error") -> risks.Sample:
    """The levels of a risk on every document."""
    x, y = half
    return risks.evaluate(risks.RISKS[risk], net, None, Part("bound", x, y, torch.arange(len(x))))


def figures(setting: Setting[Passages], job: Job) -> Iterator[Figure]:
    """The one figure."""
    options = setting.options
    yield Figure(
        f"documents-{setting.name}",
        f"{painting.named(setting.data)}: how often an upper bound at delta = {options.delta:g} on the token error of "
        f"a character GPT ({setting.sparsities[0]:.0%} pruned) lies below it, over the length of a document; "
        f"{options.sizes[-1]} documents, drawn {options.trials:,} times for each of {setting.seeds} networks and "
        "halves of the text; 95 % interval.",
        lambda: rows(setting, job),
        paint,
        lambda table: {
            f"{setting.name}, {n:g} documents of {length:g}: failures by {arm}": interval(
                [row[f"{arm}_failures"] for row in part]
            ).mean
            for (n, length), part in groups(table, "n", "length").items()
            for arm in ARMS
        },
    )


def rows(setting: Setting[Passages], job: Job) -> Table:
    """One row per network, length and number of documents; networks of an interrupted run are kept."""
    table = compute_rows(
        [Entry(seed) for seed in job.seeds(setting.seeds)],
        lambda portion: [{"lines": _network(setting, entry.seed, job)} for entry in portion],
        path=job.out / f"documents-{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry,
    )
    common = {"dataset": setting.data, "model": setting.model}
    return [common | {"seed": row["seed"]} | line for row in table for line in row["lines"]]


def _network(setting: Setting[Passages], seed: int, job: Job) -> Table:
    """The errors of one network on the other half, in documents of every length, and what bounds make of some."""
    options = setting.options
    halves = passages(setting, seed, job)
    _, net, _ = trained(setting, halves, seed, job)
    levels = losses(net, halves.others).values.numpy()
    wrong = np.round(levels / risks.LEVELS * options.length).astype(np.int64)
    rng, table = np.random.default_rng([seed, 26]), []
    for times in options.windows:
        length, counts = options.length * times, wrong.reshape(-1, times).sum(1)
        for n in options.sizes:
            line = {"length": length, "n": n, "population": len(counts), "error": float(counts.mean() / length)}
            line["correlation"] = correlation(counts, length)
            table.append(line | failures(counts, length, n, options, rng))
    return table


def correlation(wrong: np.ndarray, length: int) -> float:
    """The correlation of two errors in one document, by the analysis of variance: (B - W) / (B + (length - 1) W).

    B is the variance between the documents' means times their length, W the mean variance within a document.
    """
    means = wrong / length
    between = length * means.var(ddof=1)
    within = float((means * (1 - means)).mean() * length / (length - 1))
    return float((between - within) / (between + (length - 1) * within))


def failures(wrong: np.ndarray, length: int, n: int, options: Passages, rng: np.random.Generator) -> dict[str, float]:
    """How often a bound that counts tokens, and one that counts documents, lies below the mean of the population."""
    draws = wrong[rng.integers(len(wrong), size=(options.trials, n))]
    error, delta = float(wrong.mean() / length), options.delta
    counts, times = np.unique(draws.sum(1), return_counts=True)
    bound_of = {int(k): bounds.clopper_pearson(int(k), n=n * length, delta=delta) for k in counts}
    below = np.array([bound_of[int(k)] < error for k in counts])
    values, places = np.unique(wrong, return_inverse=True)
    levels = np.ceil(values / length * risks.LEVELS) / risks.LEVELS
    hits = [
        montecarlo.betting_p_value(levels, counts=np.bincount(row, minlength=len(values)), limit=error) < delta
        for row in places[rng.integers(len(wrong), size=(options.trials, n))]
    ]
    return {
        "tokens_failures": float((below * times).sum() / options.trials),
        "documents_failures": float(np.mean(hits)),
        "tokens_bound": float(sum(bound_of[int(k)] * t for k, t in zip(counts, times, strict=True)) / options.trials),
        "documents_bound": _mean_bound(levels, places, n, delta, rng),
    }


def _mean_bound(levels: np.ndarray, places: np.ndarray, n: int, delta: float, rng: np.random.Generator) -> float:
    """The mean of the bound by documents, over a few draws."""
    drawn = places[rng.integers(len(places), size=(20, n))]
    each = [montecarlo.betting(levels, counts=np.bincount(row, minlength=len(levels)), delta=delta) for row in drawn]
    return float(np.mean(each))


def paint(canvas: Any, table: Table) -> None:
    """How often both bounds fail, over the length of a document."""
    canvas.set_size_inches(6.4, 4.2)
    axes = canvas.subplots()
    n = max(row["n"] for row in table)
    part = [row for row in table if row["n"] == n]
    long = [row | {"arm": arm, "failures": row[f"{arm}_failures"]} for row in part for arm in ARMS]
    painting.lines(axes, long, x="length", y="failures", by="arm", styles=ARMS)
    axes.axhline(0.05, color="black", lw=1, ls=":")
    axes.set_xscale("log", base=2)
    lengths = sorted({row["length"] for row in part})
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.set_ylim(-0.004, 1.1 * max(row["failures"] for row in long))
    painting.in_percent(axes.yaxis)
    axes.set_xlabel("characters of a document (dotted: what delta allows)")
    axes.set_ylabel("bounds that lie below the error, in %")
    painting.label_ends(axes)
    painting.heading(axes, f"{painting.subject(table)}: {n:g} documents; {painting.over_seeds(table)}")
