"""The command line: a table from commands to functions; flags and help come from the options' dataclasses."""

import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pacprune import __version__, bounds, data, fetch
from pacprune.experiments import options as opt
from pacprune.experiments import plots, report, runs, store
from pacprune.experiments.demo import demo

WORK: dict[str, runs.Work] = {"demo": demo, "osp": runs.single, "pft": runs.single, "pbp": runs.single}
EXAMPLES = {
    "demo": ["pacprune demo", "pacprune demo --seed 1 --out runs/second --json"],
    "osp": ["pacprune osp --sparsity 0.95", "pacprune osp --data mnist --criterion snip --device cuda"],
    "pft": ["pacprune pft --sparsity 0.95", "pacprune pft --data cifar10 --device cuda --out runs/cifar"],
    "pbp": ["pacprune pbp", "pacprune pbp --data mnist --prior-fraction 0.5 --std 0.01 --json"],
    "bound": ["pacprune bound --risk 0.1 --n 12000 --kl 500", "pacprune bound --risk 0.1 --n 12000 --draws 10 --json"],
    "data": ["pacprune data list", "pacprune data fetch mnist", "pacprune data path"],
    "report": ["pacprune report runs/demo"],
}

app = typer.Typer(
    name="pacprune",
    help="Prune a network to an exact sparsity, and prove how good the pruned network is. Begin with: pacprune demo",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
