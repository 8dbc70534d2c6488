"""`pacprune compress`: from options to a folder with the smallest network that keeps its limit, and the proof."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pacprune.certification import risks
from pacprune.data.splits import Split
from pacprune.deploy import export
from pacprune.distributed import ranks
from pacprune.files import write_atomically
from pacprune.methods import compress as methods
from pacprune.methods.compress import Compressed
from pacprune.methods.table import METHODS
from pacprune.runs import commands, store
from pacprune.runs.commands import Outcome
from pacprune.runs.options import NAME_PATTERNS, Compress
from pacprune.types import Progress

PACKED = export.FORMATS["safetensors"].file


def compress(options: Compress, begin: Callable[[], Path], progress: Progress) -> dict[str, Any]:
    """The work of the command."""
    if options.data_dir is not None:
        store.check_folder(Path(options.data_dir), "the data files")
    _numbers(options.sparsities)
    split, model = commands.prepare(options)
    folder = begin()
    checkpoints = folder / store.CHECKPOINTS
    try:
        compressed = chain(options, model, split, checkpoints, progress)
    except ValueError:
        # The same input fails the same way. But once an order is declared, the bound set may have been read.
        if not (checkpoints / methods.ORDER).is_file():
            ranks.on_rank0(lambda: store.drop_checkpoints(folder))
        raise
    outcomes = _outcomes(options, compressed, model, split)
    return ranks.on_rank0(lambda: _store(options, compressed, outcomes, split, folder))


def chain(options: Compress, model: nn.Module, split: Split, folder: Path, progress: Progress) -> Compressed:
    """Trains the chain that the options ask for and tests it; its checkpoints are kept in the folder."""
    return methods.compress(
        model,
        split,
        commands.stage(options),
        **{name: getattr(options, name) for name in methods.LIMITS},
        delta=options.delta,
        method=options.method,
        sparsities=_numbers(options.sparsities),
        refinements=options.refinements,
        dense=commands.dense_stage(options) if options.dense_epochs else None,
        validation=options.validation,
        front=options.front,
        name=options.model,
        declare=options.declare,
        seed=options.seed,
        folder=folder,
        progress=progress,
        **_method_options(options),
    )


def _method_options(options: Compress) -> dict[str, Any]:
    """What the method takes: the defaults of its command, and which weights are pruned, where flags say so."""
    defaults = METHODS[options.method].defaults if options.method in METHODS else {}
    values = {name: commands.argument(options, name) for name in ("scope", *NAME_PATTERNS)}
    return {**defaults, **{name: value for name, value in values.items() if value != getattr(Compress, name)}}


def _numbers(text: str | None) -> list[float] | None:
    """The sparsities of a flag."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"sparsities is {text!r}; give fractions separated by commas, such as 0.5,0.8,0.9") from None


def _outcomes(options: Compress, compressed: Compressed, model: nn.Module, split: Split) -> list[Outcome]:
    """The rows of the table: the network before pruning, and the one that was chosen."""
    which = compressed.sparsity
    dense_history = [row for row in compressed.history if "candidate" not in row]
    history = [row for row in compressed.history if row.get("candidate") == which]
    return [
        Outcome("dense", 0.0, _error(model, split), model, dense_history),
        Outcome(options.method, which, _error(compressed.model, split), compressed.model, history),
    ]


def _error(model: nn.Module, split: Split) -> float:
    """The test error, by the same rule as that of the certificate."""
    return risks.evaluate(risks.RISKS["error"], model, None, split.test).tally().mean


def _store(
    options: Compress, compressed: Compressed, outcomes: list[Outcome], split: Any, folder: Path
) -> dict[str, Any]:
    """Writes network, certificate and declared order; returns the numbers."""
    numbers = commands.store_outcomes(options, outcomes, split, folder)
    write_atomically(folder / methods.ORDER, (folder / store.CHECKPOINTS / methods.ORDER).read_bytes())
    if compressed.passed:
        compressed.save(folder)
    certificate = compressed.certificate
    tries = {} if certificate.tries is None else {"tries": {"text": str(certificate.tries)}}
    return numbers | {
        "headline": compressed.statement,
        "limit": compressed.limit,
        "passed": compressed.passed,
        "certificate": certificate.bound if compressed.passed else None,
        "densest": None if compressed.passed else _densest(compressed),
        "n": certificate.n,
        "statement": certificate.statement,
        "packed": PACKED if compressed.passed else None,
        "bytes": compressed.bytes,
        "points": compressed.points,
        **tries,
    }


def _densest(compressed: Compressed) -> dict[str, Any]:
    """What is known of the densest candidate, where no network keeps the limit."""
    bound, needed = compressed.certificate.bound, compressed.examples_needed
    return {"sparsity": compressed.sparsity, "bound": bound, "examples_needed": needed}
