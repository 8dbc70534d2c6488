"""Data sets cut into parts that are named by their use."""

from pacprune.data.datasets import DATA_SETS, NAMES, DataSet, cifar10, digits, fashion_mnist, fetch, load, mnist
from pacprune.data.documents import documents, one_token
from pacprune.data.download import data_folder
from pacprune.data.splits import Part, Split, split

__all__ = [
    "DATA_SETS",
    "NAMES",
    "DataSet",
    "Part",
    "Split",
    "cifar10",
    "data_folder",
    "digits",
    "documents",
    "fashion_mnist",
    "fetch",
    "load",
    "mnist",
    "one_token",
    "split",
]
