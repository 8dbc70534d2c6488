"""Data sets cut into parts that are named by their use."""

from pacprune.data.download import data_folder, fetch
from pacprune.data.splits import NAMES, Part, Split, cifar10, digits, fashion_mnist, load, mnist, split

__all__ = [
    "NAMES",
    "Part",
    "Split",
    "cifar10",
    "data_folder",
    "digits",
    "fashion_mnist",
    "fetch",
    "load",
    "mnist",
    "split",
]
