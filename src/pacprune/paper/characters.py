"""A character GPT on Tiny Shakespeare: PFT against one-shot magnitude pruning and GMP, by validation loss.

The text is cut in order into 80 %, 10 % and 10 %. The learning rate of every method is chosen, from one grid that is
declared beforehand, by networks that train on the first part and are judged on the second. The networks that are
reported train on both, and the last part, the usual validation text, is looked at once.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pacprune import models
from pacprune.data import datasets
from pacprune.deploy import export
from pacprune.files import write_atomically
from pacprune.masking import weights
from pacprune.methods.gradual import gmp
from pacprune.methods.one_shot import osp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import together
from pacprune.paper import frame
from pacprune.paper.comparison import surviving
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config
from pacprune.training.evaluate import mean_loss
from pacprune.training.fit import fit
from pacprune.types import Table

METHODS = {"osp": osp, "pft": pft, "gmp": gmp}
PARTS = (0.8, 0.9)
"""Where the text is cut."""
COLUMNS = ("method", "sparsity", "seed", "lr", "epochs", "kept", "total", "validation_loss")
_STYLE = {"osp": ("one-shot", "#999999", "o"), "pft": ("PFT", "#D55E00", "s"), "gmp": ("GMP", "#0072B2", "^")}


@dataclass(frozen=True)
class Setting:
    """A text and a network, and what every method is given on them; `after` has its lr from the grid `rates`."""

    text: str
    stride: int
    """Characters from the start of one training window to that of the next."""
    dense: Config
    after: Config
    rates: tuple[float, ...]
    context: int = 256
    network: Mapping[str, Any] = field(default_factory=dict)
    sparsities: tuple[float, ...] = (0.8, 0.9, 0.95)
    tuned_at: float = 0.9
    seeds: int = 3


_DENSE = Config(epochs=3, lr=1e-3, optimizer="adamw", weight_decay=0.1, schedule="cosine", warmup=0.05, batch_size=32)
_REDUCED = Setting(
    text="tinyshakespeare",
    stride=64,
    dense=_DENSE,
    after=replace(_DENSE, epochs=2),
    rates=(3e-4, 1e-3, 3e-3),
)
SETTINGS = {
    "smoke": replace(
        _REDUCED,
        text="babble",
        stride=32,
        context=32,
        network={"width": 32, "depth": 2, "heads": 2, "dropout": 0.0},
        dense=replace(_DENSE, epochs=2, lr=3e-3),
        rates=(1e-3, 3e-3),
        seeds=2,
    ),
    "reduced": _REDUCED,
    "paper": replace(_REDUCED, dense=replace(_DENSE, epochs=9), after=replace(_REDUCED.after, epochs=6)),
}
"""`smoke` shows that it runs, on made-up words; `paper` is `reduced` with three times the steps."""


class Entry(NamedTuple):
    """One network to be pruned."""

    method: str
    sparsity: float
    seed: int
    lr: float


Windows = tuple[Tensor, Tensor]
"""Characters [n, context], and for each the one that follows it."""


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure and a CSV of validation loss against sparsity, and by how much PFT is below the others."""
    setting = SETTINGS[job.scale]
    if job.device.type == "cuda":
        fast = {"execution": "graph", "amp": True}
        setting = replace(setting, dense=replace(setting.dense, **fast), after=replace(setting.after, **fast))
    caption = (
        f"{setting.text}: loss per character (nats) on text that was not trained on, after {setting.after.epochs} "
        f"epochs that follow {setting.dense.epochs} dense ones; an epoch takes every window of {setting.context} "
        f"characters once, which begin every {setting.stride}. Mean and 95 % interval over {setting.seeds} seeds."
    )
    drawn = frame.draw(job, "characters", caption, lambda: rows(setting, job), paint)
    return [drawn], margins(drawn.rows)


def rows(setting: Setting, job: Job) -> Table:
    """One row per network, in COLUMNS, the dense ones first; what a broken run has finished is kept."""
    text, vocabulary = encoded(setting, job)
    first, second = (round(len(text) * part) for part in PARTS)
    seeds = job.seeds(setting.seeds)

    def contest(entries: Sequence[Entry], train: Tensor, judged: Tensor, what: str) -> tuple[Table, Table]:
        x, y = windows(train, setting.context, setting.stride)
        whole = len(x) // setting.after.batch_size * setting.after.batch_size  # a last batch of a few is all noise
        on, by = (x[:whole], y[:whole]), windows(judged, setting.context, setting.context)
        dense = _dense(setting, vocabulary, on, list(dict.fromkeys(entry.seed for entry in entries)), job, what)
        return _judged_dense(setting, dense, by), _pruned(setting, entries, dense, on, by, job, what)

    tried = [Entry(method, setting.tuned_at, seeds[0], lr) for method in METHODS for lr in setting.rates]
    _, found = contest(tried, text[:first], text[first:second], "tuning")
    best = {m: min((r["validation_loss"], r["lr"]) for r in found if r["method"] == m)[1] for m in METHODS}
    entries = [Entry(m, sparsity, seed, best[m]) for m in METHODS for sparsity in setting.sparsities for seed in seeds]
    plain, found = contest(entries, text[:second], text[second:], "characters")
    return plain + found


def encoded(setting: Setting, job: Job) -> tuple[Tensor, int]:
    """The text as numbers of its characters, which are sorted, and how many different ones there are."""
    content = babble(4000) if setting.text == "babble" else datasets.read(setting.text, "input.txt", job.data_dir)
    known, text = torch.unique(torch.frombuffer(bytearray(content), dtype=torch.uint8), return_inverse=True)
    return text, len(known)


def babble(words: int) -> bytes:
    """Made-up words of two to seven letters, the k-th of 50 with a chance proportional to 1/k."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (50, 7), generator=generator, dtype=torch.uint8).numpy()
    known = [row[: 2 + k % 6].tobytes() for k, row in enumerate(letters)]
    chosen = torch.multinomial(1 / torch.arange(1.0, 51.0), words, replacement=True, generator=generator)
    return b" ".join(known[k] for k in chosen.tolist())


def windows(text: Tensor, context: int, stride: int) -> Windows:
    """Every window of so many characters, and each character's successor."""
    cut = text.unfold(0, context + 1, stride)
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def _dense(
    setting: Setting, vocabulary: int, on: Windows, seeds: list[int], job: Job, what: str
) -> dict[int, nn.Module]:
    """The dense networks that all methods start from, by seed; trained once, as one population."""
    nets: dict[int, nn.Module] = {
        seed: models.gpt(vocabulary, context=setting.context, seed=seed, **setting.network).to(job.device)
        for seed in seeds
    }
    paths = {seed: job.out / "dense" / f"{what}-{seed}.safetensors" for seed in seeds}
    missing = [seed for seed in seeds if not paths[seed].is_file()]
    if missing:
        chosen = [nets[seed] for seed in missing]
        options = {"loss": models.next_character, "seed": missing, "stage": f"dense, {what}", "progress": job.progress}
        fit(chosen, on, setting.dense, **options)
        for seed in missing:
            export.save_dense(paths[seed], nets[seed])
    for seed, net in nets.items():
        net.load_state_dict(load_file(paths[seed]))
        net.eval()
    return nets


def _judged_dense(setting: Setting, dense: Mapping[int, nn.Module], by: Windows) -> Table:
    found = []
    for seed, net in dense.items():
        size, loss = weights.total(net), mean_loss(net, by, loss=models.next_character)
        found.append(_row("dense", 0.0, seed, setting.dense.lr, setting.dense.epochs, size, size, loss))
    return found


def _row(*values: Any) -> dict[str, Any]:
    return dict(zip(COLUMNS, values, strict=True))


def _pruned(
    setting: Setting,
    entries: Sequence[Entry],
    dense: Mapping[int, nn.Module],
    on: Windows,
    by: Windows,
    job: Job,
    what: str,
) -> Table:
    """Prunes every entry, a method's as one population, and judges it; one line of WHAT.jsonl per network."""
    path, known = job.out / f"{what}.jsonl", dict[Entry, dict[str, Any]]()
    if path.is_file():
        found = [json.loads(line) for line in path.read_text().splitlines()]
        known = {Entry(*(row[name] for name in Entry._fields)): row for row in found}
    for method in dict.fromkeys(entry.method for entry in entries):
        waiting = [entry for entry in entries if entry.method == method and entry not in known]
        if waiting:
            for entry, (kept, loss) in zip(waiting, _losses(setting, waiting, dense, on, by, job), strict=True):
                known[entry] = _row(*entry, setting.after.epochs, kept, weights.total(dense[entry.seed]), loss)
            lines = "".join(json.dumps(row) + "\n" for row in known.values())
            write_atomically(path, lines.encode())
    return [known[entry] for entry in entries]


def _losses(
    setting: Setting,
    entries: Sequence[Entry],
    dense: Mapping[int, nn.Module],
    on: Windows,
    by: Windows,
    job: Job,
) -> list[tuple[int, float]]:
    """(weights kept, loss) of entries of one method; one that diverges has no finite loss."""

    def attempt(entries: list[Entry]) -> list[tuple[int, float]]:
        results = together(
            METHODS[entries[0].method],
            [copy.deepcopy(dense[entry.seed]) for entry in entries],
            on,
            [replace(setting.after, lr=entry.lr) for entry in entries],
            sparsity=[entry.sparsity for entry in entries],
            seed=[entry.seed for entry in entries],
            loss=models.next_character,
            progress=job.progress,
        )
        kept = [sum(int((w != 0).sum()) for w in weights.prunable(one.model).values()) for one in results]
        return [(k, mean_loss(one.model, by, loss=models.next_character)) for k, one in zip(kept, results, strict=True)]

    return surviving(list(entries), attempt, (0, math.inf))


def paint(canvas: Any, rows: Table) -> None:
    """Validation loss against sparsity, a line per method."""
    axes = canvas.subplots()
    # Every factor of kept weights has the same width.
    shown = [row | {"place": -math.log(1 - row["sparsity"])} for row in rows if row["method"] in _STYLE]
    frame.lines(axes, shown, x="place", y="validation_loss", by="method", style=_STYLE)
    dense = frame.interval([row["validation_loss"] for row in rows if row["method"] == "dense"])
    axes.axhline(dense.mean, color="black", lw=1, ls=":", label="dense, before")
    places = {row["place"]: f"{row['sparsity']:g}" for row in shown}
    axes.set_xticks(list(places), list(places.values()))
    seeds, size = len({row["seed"] for row in rows}), int(rows[0]["total"])
    title = f"character GPT, {size:,} weights; mean and 95 % interval over {seeds} seeds"
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("sparsity (fraction of the weights pruned)")
    axes.set_ylabel("validation loss (nats per character)")
    axes.legend(frameon=False, fontsize=8)


def margins(rows: Table) -> dict[str, float]:
    """The mean losses, and by how much PFT is below the other methods."""

    def mean(method: str, sparsity: float) -> float:
        own = [row["validation_loss"] for row in rows if (row["method"], row["sparsity"]) == (method, sparsity)]
        return frame.interval(own).mean

    found = {"dense": mean("dense", 0.0)}
    for sparsity in sorted({row["sparsity"] for row in rows if row["method"] == "pft"}):
        found |= {f"PFT at {sparsity:g}": mean("pft", sparsity)}
        found |= {
            f"{label} - PFT at {sparsity:g}": mean(method, sparsity) - mean("pft", sparsity)
            for method, (label, _, _) in _STYLE.items()
            if method != "pft"
        }
    return found
