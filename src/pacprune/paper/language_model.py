"""A language model of C code: one-shot pruning, and methods that train, by loss per byte on held-out files.

The text is the package of Linux that `pacprune data fetch linux-c` makes documents of. A document lies in one part by
the hash of its name. The dense model is trained on the part "train", layers are calibrated on "calibration", learning
rates are chosen on "validation" and written to points.json, and losses are reported on "test". Documents of the part
"certify" are not read. Methods that train have equal numbers of tokens.

A method is a setting, so that `--only` computes one of them. All of them share a folder: its tokens, its dense model
and the rows of those that are done. Whoever comes first makes what is missing.
"""

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pacprune import philox
from pacprune.data import datasets, text
from pacprune.data.own import name_share
from pacprune.data.text import Document
from pacprune.files import write_atomically
from pacprune.integrations import language_models as lm
from pacprune.integrations.language_models import HeldOut, Windows
from pacprune.paper import painting
from pacprune.paper.characters import babble
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, digest, in_entries, read
from pacprune.paper.painting import Style
from pacprune.paper.statistics import means
from pacprune.runs import plots
from pacprune.runs.language_models import METHODS, Goal, Work
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.types import Diverged, Table

NAME = "language-model"
DENSE = "dense"
"""The method that prunes nothing."""
POINTS = "points.json"
"""The file that says with which learning rate every method is reported."""
PATTERN = "2:4"
EVERY = 500
"""Steps of dense training between two checkpoints."""
COLUMNS = (
    *("dataset", "model", "method", "pattern", "sparsity", "seed", "lr", "tokens", "zeros", "prunable"),
    *("loss_per_token", "loss_per_byte"),
)
STYLES = {
    "magnitude": Style("magnitude", plots.GREY, "v"),
    "wanda": Style("Wanda", painting.SKY, "^"),
    "sparsegpt": Style("SparseGPT", "black", "o"),
    "alps": Style("ALPS", plots.GREEN, "D"),
    "gmp": painting.method_styles()["gmp"],
    "frozen": Style("PFT, weights frozen", plots.ORANGE, "P"),
    "pft": painting.method_styles()["pft"],
}
"""How a method is drawn; also the order of the settings."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """What a setting needs beyond its two stages.

    Args:
        method: DENSE or a key of METHODS.
        patterns: N:M patterns to prune to, beside the sparsities.
        rates: The learning rates that the method tries, on the first pattern with the first seed.
        windows: Windows that a method trains on, the same number for all.
        calibration: Windows that score weights.
        vocabulary: Number of tokens.
        documents: Documents that the tokenizer is trained on, the first by the hashes of their names.
        length: Tokens of a window.
        measured: Tokens that a loss is measured on, about; in whole documents.
        network: The sizes of the decoder.
    """

    method: str = in_entries(DENSE)
    patterns: tuple[str, ...] = in_entries((PATTERN,))
    rates: tuple[float, ...] = in_entries(())
    windows: int = 0
    calibration: int = 128
    vocabulary: int = 8192
    documents: int = 2000
    length: int = 512
    measured: int = 2**21
    network: Mapping[str, int] = field(default_factory=dict)


class Cell(NamedTuple):
    """One pruned model; `pattern` is empty where a sparsity is asked for."""

    method: str
    pattern: str
    sparsity: float
    seed: int
    lr: float


# --- The settings.

_NETWORK = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
"""A Llama of 29.9 million weights, 25.7 million of them in its blocks."""
_DENSE_STAGE = Config(
    epochs=4,
    lr=1e-3,
    optimizer="adamw",
    weight_decay=0.1,
    schedule="cosine",
    warmup=0.02,
    batch_size=64,
    clip=1.0,
)
_RATES = {"gmp": (1e-4, 3e-4, 1e-3), "frozen": (0.02, 0.05, 0.15), "pft": (1e-4, 3e-4, 1e-3)}
"""Three for each method that trains; of "frozen", of its gates."""


def _settings(
    methods: Sequence[str], rates: Mapping[str, tuple[float, ...]], **changes: Any
) -> tuple[Setting[Any], ...]:
    """A setting per method."""
    whole: Setting[Any] = Setting(
        data="linux-c",
        model="llama",
        seeds=3,
        sparsities=(0.5, 0.7, 0.8, 0.9),
        dense=_DENSE_STAGE,
        pruning=replace(_DENSE_STAGE, epochs=1, batch_size=32, weight_decay=0.0, warmup=0.05),
        options=Language(network=_NETWORK, windows=20_480),
    ).changed(**changes)
    return tuple(whole.changed(label=name, method=name, rates=rates.get(name, ())) for name in (DENSE, *methods))


_TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SETTINGS: dict[str, tuple[Setting[Any], ...]] = {
    "smoke": _settings(
        tuple(STYLES),
        {"gmp": (3e-3, 1e-2), "frozen": (0.02, 0.05), "pft": (3e-3, 1e-2)},
        data="babble",
        seeds=1,
        sparsities=(0.5, 0.8),
        dense=replace(_DENSE_STAGE, epochs=1, lr=1e-2, batch_size=16),
        pruning=replace(_DENSE_STAGE, epochs=1, batch_size=16),
        windows=96,
        calibration=16,
        vocabulary=300,
        length=16,
        measured=500,
        network=_TINY,
    ),
    "reduced": _settings(
        tuple(STYLES), _RATES, seeds=1, sparsities=(0.7,), dense=replace(_DENSE_STAGE, epochs=1), windows=10_240
    ),
    "full": _settings(tuple(STYLES), _RATES),
}
"""`smoke` shows that it runs, on made-up words; `reduced` has a quarter of the dense training and fewer rows."""


# --- The text as tokens, made once.


class Corpus(NamedTuple):
    """What is read of the text, as tokens on the host."""

    tokenizer: Any
    train: Windows
    calibration: Windows
    validation: HeldOut
    test: HeldOut


def corpus(setting: Setting[Language], job: Job) -> Corpus:
    """The tokens of the setting's text, from files of the folder if they are there."""
    return _corpus(_shared(setting, job), setting.data, setting.options.length, job.data_dir, _sizes(setting))


def _shared(setting: Setting[Language], job: Job) -> Path:
    """The folder of what all methods share, which another way of training has another one of."""
    options = setting.options
    network = sorted(options.network.items())
    return job.out / DENSE / digest(setting.data, setting.dense, job.seed, network, options.length, _sizes(setting))


def _sizes(setting: Setting[Language]) -> tuple[int, int, int]:
    return setting.options.vocabulary, setting.options.documents, setting.options.measured


@functools.lru_cache(maxsize=1)
def _corpus(folder: Path, data: str, length: int, data_dir: Path | None, sizes: tuple[int, int, int]) -> Corpus:
    place, (vocabulary, count, measured) = folder / "tokens", sizes
    if not (place / "parts.npz").is_file():
        parts = text.by_part(_documents(data, data_dir))
        tokenizer = lm.train_tokenizer(_first(parts["train"], count), size=vocabulary)
        place.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(place)
        _keep_tokens(place / "parts.npz", tokenizer, parts, measured)
    tokenizer = lm.load_tokenizer(place, alone=True)
    end = lm.end_of(tokenizer)
    with np.load(place / "parts.npz") as arrays:
        pieces = {part: _pieces(arrays, part) for part in ("train", "calibration", "validation", "test")}
        sizes_of = {part: torch.from_numpy(arrays[f"{part}_bytes"]) for part in ("validation", "test")}
    train, calibration = (lm.packed(pieces[part], end=end, length=length) for part in ("train", "calibration"))
    judges = (lm.held_out(pieces[part], sizes_of[part], end=end, length=length) for part in ("validation", "test"))
    return Corpus(tokenizer, train, calibration, *judges)


def _documents(data: str, data_dir: Path | None) -> list[Document]:
    if data == "babble":
        words = babble(6000).decode().split(" ")
        return [Document(str(k), " ".join(words[30 * k : 30 * (k + 1)])) for k in range(200)]
    return list(text.of_lines(datasets.read(data, datasets.LINUX_C, data_dir), datasets.LINUX_C))


def _first(documents: Sequence[Document], count: int) -> list[Document]:
    """So many documents: as if drawn at random, and the same ones every time."""
    return sorted(documents, key=lambda document: name_share(document.name))[:count]


def _keep_tokens(path: Path, tokenizer: Any, parts: Mapping[str, list[Document]], measured: int) -> None:
    """Writes the tokens of all documents but those kept for certificates, in 16 bits, and where each one ends."""
    arrays: dict[str, np.ndarray] = {}
    for part in ("train", "calibration", "validation", "test"):
        documents = parts[part]
        if part in ("validation", "test"):
            documents = _first(documents, len(documents))
        tokens = lm.tokens_of(tokenizer, documents)
        ends = np.cumsum([len(document) for document in tokens])
        if part in ("validation", "test"):
            count = int(np.searchsorted(ends, measured)) + 1
            documents, tokens, ends = documents[:count], tokens[:count], ends[:count]
        arrays |= {part: np.concatenate(tokens).astype(np.uint16), f"{part}_ends": ends}
        arrays[f"{part}_bytes"] = np.array([len(document.text.encode()) for document in documents])
    unfinished = path.with_suffix(".part.npz")
    np.savez(unfinished, **arrays)  # pyright: ignore[reportArgumentType]
    unfinished.rename(path)


def _pieces(arrays: Mapping[str, np.ndarray], part: str) -> list[np.ndarray]:
    return np.split(arrays[part].astype(np.int32), arrays[f"{part}_ends"][:-1])


# --- The dense model, and what becomes of it.


def dense_model(setting: Setting[Language], job: Job) -> Any:
    """The dense model on the device: from its folder, or trained, going on from the last checkpoint."""
    folder, options = _shared(setting, job), setting.options
    if not (folder / "model" / "config.json").is_file():
        texts = corpus(setting, job)
        (seed,) = job.seeds(1)
        end = lm.end_of(texts.tokenizer)
        sizes = {"vocabulary": len(texts.tokenizer), "length": options.length, "end": end, "seed": seed}
        model = lm.llama(**sizes, **options.network).to(job.device)
        named = {"stage": DENSE, "checkpoint": folder / "dense.pt", "every": EVERY}
        fit(
            model,
            _to(texts.train, job.device),
            setting.dense,
            loss=lm.next_token,
            seed=seed,
            progress=job.progress,
            **named,
        )
        lm.save(model, texts.tokenizer, folder / "model.part")
        (folder / "model.part").rename(folder / "model")
    return lm.load_model(folder / "model", device=job.device, dtype=torch.float32, causal=True)


def _to(windows: Windows, device: torch.device) -> Windows:
    return windows[0].to(device), windows[1].to(device)


def _train_windows(setting: Setting[Language], cell: Cell, texts: Corpus, device: torch.device) -> Windows:
    """Windows that a seed chooses: of the training part for methods that train, else of the calibration part."""
    trains = METHODS[cell.method].trains
    x, y = texts.train if trains else texts.calibration
    order = philox.permutation(len(x), seed=cell.seed)
    chosen = order[: setting.options.windows if trains else setting.options.calibration]
    return _to((x[chosen], y[chosen]), device)


def prune(setting: Setting[Language], cell: Cell, model: Any, job: Job) -> tuple[Any, Goal, int]:
    """A pruned copy of the dense model, what was pruned of it, and how many tokens that took."""
    method, texts = METHODS[cell.method], corpus(setting, job)
    data = _train_windows(setting, cell, texts, job.device)
    goal = Goal(None if cell.pattern else cell.sparsity, cell.pattern or None, tuple(lm.block_weights(model)))
    config = method.config(setting.pruning, cell.lr) if method.trains else setting.pruning
    network = copy.deepcopy(model)
    method.prune(network, Work(goal, data, config, cell.seed, job.progress))
    return network, goal, data[0].numel() * (setting.pruning.epochs if method.trains else 1)


def rows(setting: Setting[Language], job: Job) -> Table:
    """One row per cell of the setting's method, in COLUMNS, on test documents; what is finished is kept."""
    method = setting.options.method
    seeds = job.seeds(1 if method in (DENSE, "magnitude") else setting.seeds)  # these two draw nothing
    if method == DENSE:
        cells = [Cell(DENSE, "", 0.0, seeds[0], setting.dense.lr)]
    else:
        lr = frozen_rate(setting, job)
        goals = [*((name, 0.5) for name in setting.options.patterns), *(("", s) for s in setting.sparsities)]
        cells = [Cell(method, *goal, seed, lr) for goal in goals for seed in seeds]
    table = _measured(setting, cells, job, "test")
    common = {"dataset": setting.data, "model": setting.model}
    return [{name: (common | row)[name] for name in COLUMNS} for row in table]


def frozen_rate(setting: Setting[Language], job: Job) -> float:
    """The learning rate with the least loss on validation documents, which points.json keeps from then on."""
    method, rates = setting.options.method, setting.options.rates
    if not METHODS[method].trains:
        return 0.0
    path = job.out / POINTS
    points = json.loads(path.read_text()) if path.is_file() else {}
    terms = digest(setting.terms, rates)
    point = points.get(method)
    if point is None:
        (seed,) = job.seeds(1)
        trials = _measured(setting, [Cell(method, PATTERN, 0.5, seed, lr) for lr in rates], job, "validation")
        best = min(trials, key=lambda row: row["loss_per_byte"])
        point = {"terms": terms, "lr": best["lr"], "tried": {row["lr"]: row["loss_per_byte"] for row in trials}}
        write_atomically(path, (json.dumps(points | {method: point}, indent=1) + "\n").encode())
    if point["terms"] != terms:
        raise ValueError(
            f"{path} froze {method} on the terms {point['terms']}, but those of now are {terms}; go back to those "
            "terms, or begin in another --out"
        )
    return point["lr"]


def _measured(setting: Setting[Language], cells: Sequence[Cell], job: Job, part: str) -> Table:
    """One row per cell, each computed by itself and kept as soon as it is known."""
    dense: list[Any] = []  # loaded if a row is missing

    def compute(members: list[Cell]) -> Table:
        (cell,) = members
        model = dense[0] if dense else dense_model(setting, job)
        dense[:] = [model]
        return [_row(setting, cell, model, job, part)]

    path = job.out / f"{setting.name}-{part}.jsonl"
    return compute_rows(cells, compute, path=path, terms=setting.terms, group=lambda cell: cell)


def _row(setting: Setting[Language], cell: Cell, model: Any, job: Job, part: str) -> dict[str, Any]:
    """The loss of a pruned model on documents of a part; one that diverged guesses among all tokens."""
    texts = corpus(setting, job)
    judges = texts.test if part == "test" else texts.validation
    amp = job.device.type == "cuda"
    if cell.method == DENSE:
        network, names, tokens = model, lm.block_weights(model), setting.dense.epochs * texts.train[0].numel()
    else:
        try:
            network, goal, tokens = prune(setting, cell, model, job)
        except Diverged:
            guess = float(np.log(len(texts.tokenizer)))
            per_byte = guess * int((judges.y != lm.IGNORED).sum()) / int(judges.bytes.sum())
            return {"tokens": 0, "zeros": 0, "prunable": 0, "loss_per_token": guess, "loss_per_byte": per_byte}
        names = goal.names
    losses = lm.losses(network, judges, amp=amp)
    weights = [network.get_parameter(name) for name in names]
    return {
        "tokens": tokens,
        "zeros": sum(int((w == 0).sum()) for w in weights),
        "prunable": sum(w.numel() for w in weights),
        "loss_per_token": losses.per_token,
        "loss_per_byte": losses.per_byte,
    }


# --- What is drawn.


def figures(setting: Setting[Language], job: Job) -> Iterator[Figure]:
    """The rows of one method, and in the end those of all."""
    setting = _on_device(setting, job)
    settings = SETTINGS[job.scale]
    yield Figure(
        f"{NAME}-{setting.label}",
        f"{painting.network(setting)}: {_label(setting.label)}, loss per byte on test documents.",
        lambda: rows(setting, job),
        paint,
    )
    if job.only is None and setting.label == settings[-1].label:
        tables = [read(job.out / f"{NAME}-{choice.label}.csv") for choice in settings]
        yield overview([row for table in tables for row in table])


def overview(table: Table) -> Figure:
    """The figure of all methods, from the rows of each."""
    trained = max(
        (row["tokens"] for row in table if row["method"] in METHODS and METHODS[row["method"]].trains), default=0
    )
    return Figure(
        NAME,
        f"{table[0]['dataset']}: loss per byte (nats) on test documents of a decoder of {_millions(table)} million "
        f"weights in blocks. Methods that train have {trained / 1e6:.3g} million tokens each; mean and 95 % interval "
        f"over {painting.seed_count(table)} seeds of the pruning.",
        lambda: table,
        paint,
        numbers,
    )


def _on_device(setting: Setting[Language], job: Job) -> Setting[Language]:
    """By the fastest means of the device: on a GPU in bfloat16; compiled where it pays, and as a graph if it may be."""
    if job.device.type != "cuda":
        return setting
    dense = replace(setting.dense, execution="compiled", amp=True)
    execution = "eager" if setting.options.method == "frozen" else "graph"  # whose masks go off and on in every step
    return replace(setting, dense=dense, pruning=replace(setting.pruning, execution=execution, amp=True))


def _label(method: str) -> str:
    return STYLES[method].label if method in STYLES else method


def _millions(table: Table) -> str:
    return f"{max(row['prunable'] for row in table) / 1e6:.3g}"


def paint(canvas: Any, table: Table) -> None:
    """2:4 on the left, a mark per seed; sparsities on the right, a line per method."""
    dense = [row["loss_per_byte"] for row in table if row["method"] == DENSE]
    grouped = [row for row in table if row["pattern"]]
    free = [row for row in table if row["method"] != DENSE and not row["pattern"]]
    left, right = canvas.subplots(1, 2, sharey=True, width_ratios=(1, 1.6))
    present = [name for name in STYLES if any(row["method"] == name for row in grouped)]
    for place, name in enumerate(present):
        values = [row["loss_per_byte"] for row in grouped if row["method"] == name]
        painting.seed_marks(left, place, values, STYLES[name])
    left.set_xticks([])
    left.set_xlim(-0.6, max(len(present), 1) - 0.4)
    left.set_xlabel("2:4, weights in fours")
    if free:
        painting.sparsity_lines(right, free, y="loss_per_byte", by="method", styles=STYLES)
    for axes in (left, right) if dense else ():
        painting.dense_line(axes, dense)
    _loss_axis(left, [row["loss_per_byte"] for row in table])
    if free or dense:
        handles, labels = right.get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _loss_axis(axes: Any, values: Sequence[float]) -> None:
    """Room for all of them; logarithmic where they lie far apart, as a network that guesses does."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    low, high = min(values), max(values)
    axes.set_ylabel("loss per byte, nats")
    if high > 2 * low:
        axes.set_yscale("log", subs=(1, 2, 3, 5, 7))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter() if high < 10 * low else NullFormatter())
        axes.set_ylim(low / 1.05, high * 1.05)
    else:
        room = 0.08 * (high - low) or 0.05 * high
        axes.set_ylim(low - room, high + room)


def numbers(table: Table) -> dict[str, float]:
    """Losses at 2:4, and how much of the gap between SparseGPT and dense each method closes."""
    losses = means([row for row in table if row["pattern"] == PATTERN], "loss_per_byte", "method")
    dense = means([row for row in table if row["method"] == DENSE], "loss_per_byte", "method")[DENSE,]
    values = {"dense": dense}
    for (method,), loss in losses.items():
        values[f"{_label(method)} at {PATTERN}"] = loss
    gap = losses["sparsegpt",] - dense if ("sparsegpt",) in losses else 0.0
    for (method,), loss in losses.items():
        if gap > 0 and METHODS[method].trains:
            values[f"share of SparseGPT's gap that {_label(method)} closes at {PATTERN}"] = 1 - (loss - dense) / gap
    return values
