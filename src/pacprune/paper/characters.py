"""A character GPT on Tiny Shakespeare: PFT against one-shot magnitude pruning and GMP, by validation loss.

The text is cut in order into 80 %, 10 % and 10 %. The learning rate of every method is chosen from one grid, by
networks that train on the first part and are judged on the second. The networks that are reported train on both. The
last part, the usual validation text, is looked at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pacprune import models
from pacprune.data import datasets
from pacprune.methods.table import METHODS
from pacprune.paper import comparison, painting
from pacprune.paper.comparison import Contest, Task, same_grid
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.paper.statistics import means
from pacprune.training.config import Config
from pacprune.training.evaluate import mean_loss
from pacprune.types import Table

PARTS = (0.8, 0.9)
"""Where the text is cut."""
COLUMNS = ("method", "sparsity", "seed", "lr", "epochs", "kept", "total", "validation_loss")


@dataclass(frozen=True, kw_only=True)
class Text(Contest):
    """A contest on a text.

    Args:
        stride: Characters from the start of one training window to that of the next.
        context: Characters of a window.
        network: What the network has other than by default.
    """

    stride: int
    context: int = 256
    network: Mapping[str, Any] = field(default_factory=dict)


_DENSE = Config(epochs=3, lr=1e-3, optimizer="adamw", weight_decay=0.1, schedule="cosine", warmup=0.05, batch_size=32)
_REDUCED = Setting(
    data="tinyshakespeare",
    model="gpt",
    sparsities=(0.8, 0.9, 0.95),
    seeds=3,
    dense=_DENSE,
    pruning=replace(_DENSE, epochs=2),
    options=Text(methods=("osp", "pft", "gmp"), stride=64, tuned_at=0.9, **same_grid(3e-4, 1e-3, 3e-3)),
)
SETTINGS: dict[str, tuple[Setting[Text], ...]] = {
    "smoke": (
        _REDUCED.changed(
            data="babble",
            stride=32,
            context=32,
            network={"width": 32, "depth": 2, "heads": 2, "dropout": 0.0},
            dense=replace(_DENSE, epochs=2, lr=3e-3),
            seeds=2,
            **same_grid(1e-3, 3e-3),
        ),
    ),
    "reduced": (_REDUCED,),
    "full": (_REDUCED.changed(dense=replace(_DENSE, epochs=9), pruning=replace(_REDUCED.pruning, epochs=6)),),
}
"""`smoke` shows that it runs, on made-up words; `full` is `reduced` with three times the steps."""

Windows = tuple[Tensor, Tensor]
"""Characters [n, context], and for each of them its successor."""


def figures(setting: Setting[Text], job: Job) -> Iterator[Figure]:
    """Validation loss against sparsity, and by how much PFT is below the others."""
    yield Figure(
        "characters",
        f"{painting.named(setting.data)}: loss per character (nats) on text that was not trained on, after "
        f"{setting.pruning.epochs} epochs that follow {setting.dense.epochs} dense ones; an epoch takes every window "
        f"of {setting.options.context} characters once, which begin every {setting.options.stride}. Mean and 95 % "
        f"interval over {setting.seeds} seeds.",
        lambda: rows(setting, job),
        paint,
        margins,
    )


def rows(setting: Setting[Text], job: Job) -> Table:
    """One row per network, in COLUMNS, the dense ones first; what an interrupted run has finished is kept."""
    tuning, report = tasks(setting, job)
    points = comparison.tune(setting, lambda: tuning, job)
    table = comparison.contest(setting, points, report, job)
    return [{name: row[name] for name in COLUMNS} for row in table]


def tasks(setting: Setting[Text], job: Job) -> tuple[Task, Task]:
    """Training on the first part of the text, losses on the second; training on both, losses on the last."""
    text, vocabulary = encoded(setting, job)
    first, second = (round(len(text) * part) for part in PARTS)
    tuning = task(setting, "tuning", text[:first], text[first:second], vocabulary)
    return tuning, task(setting, "characters", text[:second], text[second:], vocabulary)


def task(setting: Setting[Text], name: str, train: Tensor, validation: Tensor, vocabulary: int) -> Task:
    """Training on one part of the text, losses on another."""
    options, size = setting.options, setting.pruning.batch_size
    x, y = windows(train, options.context, options.stride)
    whole = len(x) // size * size  # a last batch of a few is all noise
    judge = windows(validation, options.context, options.context)
    return Task(
        name=name,
        file=name,
        build=lambda seed: models.gpt(vocabulary, context=options.context, seed=seed, **options.network),
        data=(x[:whole], y[:whole]),
        measure=lambda nets: [mean_loss(net, judge, loss=models.next_character) for net in nets],
        column="validation_loss",
        worst=math.inf,
        loss=models.next_character,
    )


def encoded(setting: Setting[Any], job: Job) -> tuple[Tensor, int]:
    """The text as numbers of its characters, which are sorted, and how many different ones there are."""
    content = babble(4000) if setting.data == "babble" else datasets.read(setting.data, "input.txt", job.data_dir)
    alphabet, text = torch.unique(torch.frombuffer(bytearray(content), dtype=torch.uint8), return_inverse=True)
    return text, len(alphabet)


def babble(words: int) -> bytes:
    """Made-up words of two to seven letters, the k-th of 50 with a chance proportional to 1/k."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (50, 7), generator=generator, dtype=torch.uint8).numpy()
    vocabulary = [row[: 2 + k % 6].tobytes() for k, row in enumerate(letters)]
    chosen = torch.multinomial(1 / torch.arange(1.0, 51.0), words, replacement=True, generator=generator)
    return b" ".join(vocabulary[k] for k in chosen.tolist())


def windows(text: Tensor, context: int, stride: int) -> Windows:
    """Every window of so many characters, and each character's successor."""
    cut = text.unfold(0, context + 1, stride)
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def paint(canvas: Any, rows: Table) -> None:
    """Validation loss against sparsity, a line per method."""
    axes = canvas.subplots()
    sparse = [row for row in rows if row["method"] != "dense"]
    painting.sparsity_lines(axes, sparse, y="validation_loss", by="method", styles=painting.method_styles())
    dense = [row["validation_loss"] for row in rows if row["method"] == "dense"]
    painting.dense_line(axes, dense, "dense, before")
    painting.heading(axes, f"character GPT, {int(rows[0]['total']):,} weights; {painting.over_seeds(rows)}")
    axes.set_ylabel("validation loss (nats per character)")
    painting.label_ends(axes)


def margins(rows: Table) -> dict[str, float]:
    """The mean losses, and by how much PFT is below the other methods."""
    losses = means(rows, "validation_loss", "method", "sparsity")
    others = [method for method in METHODS if method != "pft" and any(key[0] == method for key in losses)]
    numbers = {"dense": losses["dense", 0.0]}
    for sparsity in sorted(sparsity for method, sparsity in losses if method == "pft"):
        pft = losses["pft", sparsity]
        numbers[f"PFT at {sparsity:g}"] = pft
        numbers |= {
            f"{METHODS[method].label} - PFT at {sparsity:g}": losses[method, sparsity] - pft for method in others
        }
    return numbers
