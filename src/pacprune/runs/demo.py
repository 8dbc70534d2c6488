"""The demo: one table of dense training, one-shot pruning, PFT and PBP on the digits that come with the package."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pacprune.runs import commands, store
from pacprune.runs.options import COMMANDS, Demo
from pacprune.types import Progress


def demo(options: Demo, begin: Callable[[], Path], progress: Progress) -> dict[str, Any]:
    """Each method at its own defaults; osp and pft start from one dense network, pbp trains its own on S_P alone."""
    osp, pft, pbp = (COMMANDS[name](seed=options.seed, device=options.device) for name in ("osp", "pft", "pbp"))
    split, shared = commands.prepare(osp)
    pbp_split, model = commands.prepare(pbp)
    folder = begin()
    checkpoints = folder / store.CHECKPOINTS

    def labelled(method: str) -> Progress:
        return lambda stage, *numbers: progress(f"{method}: {stage}", *numbers)

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
    return {"rows": rows, "test_examples": len(split.test), **commands.save_certificate(folder, certificate)}
