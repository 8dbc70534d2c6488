"""The demo, on the digits that come with the package: a network that keeps a promise, and a table of three methods."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pacprune.methods.compress import Compressed
from pacprune.runs import commands, compressing, store
from pacprune.runs.options import COMMANDS, Compress, Demo
from pacprune.types import Progress

LIMIT = 0.02
"""What is promised: a drop of at most 2 points."""


def demo(options: Demo, begin: Callable[[], Path], progress: Progress) -> dict[str, Any]:
    """The promise first; then each method at its own defaults.

    osp and pft start from one dense network, pbp trains its own on S_P alone. Its certificate is the second one on
    these examples, and pays for two.
    """
    promise = Compress(seed=options.seed, device=options.device, max_drop=LIMIT)
    choices: dict[str, dict[str, Any]] = {"osp": {}, "pft": {}, "pbp": {"grid": 2}}
    osp, pft, pbp = (COMMANDS[name](seed=options.seed, device=options.device, **more) for name, more in choices.items())
    split, shared = commands.prepare(osp)
    pbp_split, model = commands.prepare(pbp)
    folder = begin()
    checkpoints = folder / store.CHECKPOINTS

    def labelled(method: str) -> Progress:
        return lambda stage, *numbers: progress(f"{method}: {stage}", *numbers)

    chain_split, chain_model = commands.prepare(promise)
    compressed = compressing.chain(
        promise, chain_model, chain_split, checkpoints / store.COMPRESSED, labelled("compress")
    )
    outcomes = [commands.dense(osp, shared, split, checkpoints, labelled("osp, pft"))]
    for method in (osp, pft):
        name = method.command
        outcomes.append(commands.prune(method, copy.deepcopy(shared), split, checkpoints / name, labelled(name)))
    pbp_dense = commands.dense(pbp, model, pbp_split, checkpoints / "pbp", labelled("pbp"))
    outcomes.append(commands.prune(pbp, model, pbp_split, checkpoints / "pbp", labelled("pbp")))

    history = []
    for outcome in outcomes:
        store.write_model(folder / f"model-{outcome.method}.safetensors", outcome.model)
        rows = pbp_dense.history + outcome.history if outcome.method == "pbp" else outcome.history
        history += [{"method": outcome.method, **row} for row in rows]
    store.write_metrics(folder, history)
    certificate = outcomes[-1].certificate
    assert certificate is not None, "pbp certifies"
    rows = [outcome.row for outcome in outcomes]
    numbers = {"rows": rows, "test_examples": len(split.test), **commands.save_certificate(folder, certificate)}
    return numbers | _kept_promise(folder, compressed)


def _kept_promise(folder: Path, compressed: Compressed) -> dict[str, Any]:
    """Stores the compressed network with its certificate; what is said of it."""
    if compressed.passed:
        compressed.save(folder / store.COMPRESSED)
    facts = {"sparsity": compressed.sparsity, "bytes": compressed.bytes, "limit": compressed.limit}
    promise = {**facts, "passed": compressed.passed, "statement": compressed.certificate.statement}
    return {"headline": compressed.statement, store.COMPRESSED: promise, "points": compressed.points}
