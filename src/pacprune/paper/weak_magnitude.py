"""PFT against Feather where the size of a weight says little about its use.

A case changes a setting of `new_ground`: pruning untrained networks, starting from random scores, training no weight
at all, or keeping N of every M weights in a row. A new case is a function and a row of CASES.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pacprune.masking import patterns
from pacprune.methods.table import METHODS
from pacprune.paper import new_ground
from pacprune.paper.comparison import Contender, same_grid
from pacprune.paper.frame import Setting


def _untrained(setting: Setting[Any]) -> Setting[Any]:
    """Without dense epochs; those are added to the pruning."""
    epochs = setting.dense.epochs + setting.pruning.epochs
    return setting.changed(dense=replace(setting.dense, epochs=0), pruning=replace(setting.pruning, epochs=epochs))


def _random(setting: Setting[Any]) -> Setting[Any]:
    """From random scores, which fade. Feather takes no scores, so that it is PFT with offsets that learn nothing."""
    feather = Contender("pft", config=(("gate_lr", 0.0),))
    return setting.changed(criteria=("random",), contenders={"feather": feather})


def _frozen(setting: Setting[Any]) -> Setting[Any]:
    """Untrained weights that stay: PFT learns the offsets alone, and Feather keeps the largest weights."""
    return _untrained(setting).changed(
        sparsities=(0.5, 0.7, 0.9),
        tuned_at=0.7,
        contenders={"feather": Contender("feather", config=(("epochs", 0),))},
        **same_grid(0.0),
    )


def _patterned(setting: Setting[Any], pattern: str) -> Setting[Any]:
    """N of every M weights are kept, by the methods that can learn that; layers with other rows stay dense."""
    sparsity = patterns.sparsity(pattern)
    methods = tuple(name for name in ("pft", "gmp", "feather") if METHODS[name].takes("pattern"))
    contenders = {name: Contender(name, (("pattern", pattern),)) for name in methods}
    return setting.changed(sparsities=(sparsity,), tuned_at=sparsity, methods=methods, contenders=contenders)


CASES: dict[str, Callable[[Setting[Any]], Setting[Any]]] = {
    "untrained": _untrained,
    "random-start": _random,
    "frozen": _frozen,
    "2of4": functools.partial(_patterned, pattern="2:4"),
    "1of4": functools.partial(_patterned, pattern="1:4"),
}
"""What is changed in a setting."""
_MODELS = {"smoke": ("mlp",), "reduced": ("resnet20", "lenet5"), "full": ("resnet20", "lenet5")}

SETTINGS: dict[str, tuple[Setting[Any], ...]] = {
    scale: tuple(
        change(setting.changed(methods=("pft", "feather"), label=case))
        for setting in settings
        if setting.model in _MODELS[scale]
        for case, change in CASES.items()
    )
    for scale, settings in new_ground.SETTINGS.items()
}

figures = new_ground.figures_of("weak-magnitude", SETTINGS, "PFT and Feather where magnitude says little,")
"""The figures of the recipe."""
