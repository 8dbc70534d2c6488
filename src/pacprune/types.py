"""The types that functions in all folders share: data, losses, progress and rows of numbers."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
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


Data = tuple[Tensor, Tensor] | Labelled | Dataset[Any] | DataLoader[Any]
"""(x, y) tensors, a `Part` of a split, a map-style Dataset of (x, y), or a DataLoader of (x, y) batches."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) -> one number, the mean over the examples."""
History = list[dict[str, Any]]
"""One row per epoch, and of a population per member: stage, epoch, loss, lr, and what else was measured."""
Table = list[dict[str, Any]]
"""Rows of a result, as a CSV file holds them."""
