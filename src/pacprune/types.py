"""What functions in all folders share: types of data, losses, progress and rows, and two kinds of error."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Labelled(Protocol):
    """Examples with their labels as two tensors, such as a part of a split."""

    @property
    def x(self) -> Tensor:
        """The inputs, one example per row."""
        ...

    @property
    def y(self) -> Tensor:
        """The labels, one per example."""
        ...

    def __len__(self) -> int: ...


class Progress(Protocol):
    """A function that is called after every step, and once more after every epoch."""

    def __call__(self, stage: str, done: int, total: int, row: dict[str, Any], /) -> None:
        """Takes the name of the stage, the steps done, the steps in all, and the last epoch's row ({} before one)."""
        ...


Data = tuple[Tensor, Tensor] | tuple[np.ndarray, np.ndarray] | Labelled | Dataset[Any] | DataLoader[Any]
"""(x, y) tensors or arrays, a `Part` of a split, a Dataset, or a DataLoader; see `Objective` for its batches."""
Forward = Callable[[nn.Module, Any], Any]
"""(model, batch) -> what the model makes of a batch."""
Loss = Callable[[Any, Any], Tensor]
"""(outputs, labels) -> one number, the mean over the examples; (output, batch) where a batch is no pair (x, y)."""
History = list[dict[str, Any]]
"""One row per epoch, and of a population per member: stage, epoch, loss, lr, and what else was measured."""
Table = list[dict[str, Any]]
"""Rows of a result, as a CSV file holds them."""


class Diverged(ValueError):
    """Losses, scores or weights are no longer finite, mostly since a learning rate was too large."""


def check_module(model: Any) -> None:
    """Refuses what is no network."""
    if not isinstance(model, nn.Module):
        advice = "call load_state_dict of a network, and give that" if isinstance(model, Mapping) else "give a network"
        if isinstance(getattr(model, "model", None), nn.Module):  # such as Pruned
            advice = "give the network inside, its .model"
        raise ValueError(f"the model is of type {type(model).__name__} and not a torch.nn.Module; {advice}")


def check_name(what: str, name: Any, table: Iterable[str], *, alternative: str = "") -> None:
    """Refuses a name that a table does not have; the error lists those that it has, and perhaps an `alternative`."""
    names = list(table)
    if name not in names:
        choice = f"{', '.join(names)}, or {alternative}" if alternative else ", ".join(names)
        raise ValueError(f"{what} {name!r} is unknown; use one of {choice}")
