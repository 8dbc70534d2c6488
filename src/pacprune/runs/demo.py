"""The demo: one table of dense training, one-shot pruning, PFT and PBP on the digits that come with the package."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pacprune.runs import commands, store
from pacprune.runs.options import Demo, Osp, Pbp, Pft
from pacprune.types import Progress


def demo(options: Demo, begin: Callable[[], Path], progress: Progress) -> dict[str, Any]:
    """Each method at its own defaults; osp and pft start from one dense network, pbp trains its own on S_P alone."""
    given = {"seed": options.seed, "device": options.device}
    split, trained = commands.prepare(Osp(**given))
    cut, model = commands.prepare(Pbp(**given))
    folder = begin()
    outcomes = []

    def shown(method: str) -> Progress:
        return lambda stage, *rest: progress(f"{method}: {stage}", *rest)

    checkpoints = folder / store.CHECKPOINTS
    outcomes.append(commands.dense(Osp(**given), trained, split, checkpoints, shown("osp, pft")))
    for kind in (Osp, Pft):
        name = kind.__name__.lower()
        outcomes.append(commands.prune(kind(**given), copy.deepcopy(trained), split, checkpoints / name, shown(name)))
    own = checkpoints / "pbp"
    first = commands.dense(Pbp(**given), model, cut, own, shown("pbp"))
    outcomes.append(commands.prune(Pbp(**given), model, cut, own, shown("pbp")))

    history = []
    for outcome in outcomes:
        store.write_model(folder / f"model-{outcome.method}.safetensors", outcome.model)
        rows = first.history + outcome.history if outcome.method == "pbp" else outcome.history
        history += [{"method": outcome.method, **row} for row in rows]
    store.write_metrics(folder, history)
    certificate = outcomes[-1].certificate
    assert certificate is not None, "pbp certifies"
    return {"rows": [outcome.row for outcome in outcomes], **commands.certified(folder, certificate)}
