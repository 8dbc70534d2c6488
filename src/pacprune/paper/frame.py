"""What every figure shares: settings -> rows -> CSV -> picture, and one way to go on after a break.

A recipe has settings by scale, and a function `figures(setting, job)` that yields what is to be drawn. The frame picks
the settings, turns on the fastest means of the device, draws, keeps finished work and collects the main numbers.
"""

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from pacprune.data.batches import use_of
from pacprune.data.splits import Part
from pacprune.deploy import export
from pacprune.files import write_atomically
from pacprune.masking import weights
from pacprune.runs import plots
from pacprune.training.config import Config
from pacprune.training.fit import fit
from pacprune.training.population import AT_ONCE
from pacprune.types import Data, Loss, Progress, Table

SCALES = ("smoke", "reduced", "full", "paper")
"""`smoke` shows that a recipe runs. What computes most is `paper` where it is the paper's own setting, else `full`."""
TERMS = "terms.json"
"""The file that says on what terms each figure's CSV was made."""
STRIDE = 1000
"""Seeds of one job; those of --seed 0 and --seed 1 do not meet."""

_T = TypeVar("_T")


# --- What is computed: a job, and the settings of a recipe.


def in_entries(default: Any = ()) -> Any:
    """A field that is no part of the terms, such as the seeds: every row of a result has its own value of it."""
    return field(default=default, metadata={"in_entries": True})


def digest(*values: Any) -> str:
    """Twelve hexadecimal digits that stand for the values.

    Of a dataclass only fields count that have not their default: one that is added later changes no digest.
    """
    return hashlib.sha256(repr([_canonical(value) for value in values]).encode()).hexdigest()[:12]


def _canonical(value: Any) -> Any:
    """The value with every dataclass inside as a list of names and values."""
    if isinstance(value, Config):
        probed = {"schedule": value.identity()["schedule"]} if callable(value.schedule) else {}
        return sorted((value.changes() | probed).items())
    if is_dataclass(value):
        return [(name, _canonical(content)) for name, content in _changes(value)]
    return [_canonical(part) for part in value] if isinstance(value, tuple | list) else value


def _changes(value: Any, *, with_entries: bool = True) -> list[tuple[str, Any]]:
    """Names and values of the fields that have not their default, of all or of those that entries do not say."""
    changes = []
    for part in () if value is None else fields(value):
        default = part.default if part.default_factory is MISSING else part.default_factory()
        if (with_entries or not part.metadata.get("in_entries")) and getattr(value, part.name) != default:
            changes.append((part.name, getattr(value, part.name)))
    return changes


Options = TypeVar("Options", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[Options]):
    """A data set and a network, and how networks are trained on them.

    Args:
        data: Name of the data set.
        model: Name of the network.
        label: What tells it from another setting with the same data and network.
        seeds: How many repetitions there are.
        sparsities: Fractions of the weights to prune.
        alphas: Shares of the training set that priors are made from.
        dense: How dense networks are trained.
        pruning: How they are pruned and fine-tuned after that.
        prior: How a prior P is trained.
        posterior: How a posterior Q is trained.
        amp: Whether a GPU trains and prunes dense networks in bfloat16. P and Q are always trained in float32.
        eps: Keep probability that P has for pruned weights.
        std: Width of P around every weight.
        draws: Networks that are drawn from Q to estimate its risk.
        options: What one figure needs beyond that; None for nothing.
    """

    data: str = ""
    model: str = ""
    label: str = ""
    seeds: int = in_entries(1)
    sparsities: tuple[float, ...] = in_entries()
    alphas: tuple[float, ...] = in_entries()
    dense: Config = field(default_factory=Config)
    pruning: Config = field(default_factory=Config)
    prior: Config = field(default_factory=Config)
    posterior: Config = field(default_factory=Config)
    amp: bool = True
    eps: float = 1e-4
    std: float = 5e-3
    draws: int = 5_000
    options: Options

    @property
    def name(self) -> str:
        """How the files of this setting are called, and what --only takes."""
        return "-".join(part for part in (self.data, self.model, self.label) if part)

    @property
    def terms(self) -> str:
        """Stands for all that entries do not say. Rows and networks made on other terms are not taken for these."""
        setting, options = replace(self, options=None), self.options
        return digest(_changes(setting, with_entries=False), _changes(options, with_entries=False))

    def changed(self, **values: Any) -> "Setting[Options]":
        """The same with other values of fields of the setting, or of its options."""
        names = {part.name for part in fields(self)}
        inner = {name: value for name, value in values.items() if name not in names}
        outer = {name: value for name, value in values.items() if name in names}
        options: Any = self.options
        return replace(self, **({"options": replace(options, **inner)} if inner else {}), **outer)


@dataclass(frozen=True)
class Job:
    """One call of a recipe.

    Args:
        scale: How much is computed, a scale of the recipe.
        out: Folder of all files.
        seed: Seed of everything.
        device: Where to compute.
        data_dir: Folder of the data files; None is the default one.
        progress: Called after every step.
        only: Name of the one setting to compute; None computes all.
    """

    scale: str
    out: Path
    seed: int
    device: torch.device
    data_dir: Path | None
    progress: Progress
    only: str | None = None

    def select(self, settings: Sequence[Setting[Options]]) -> list[Setting[Options]]:
        """The settings to compute."""
        return [setting for setting in settings if self.only in (None, setting.name)]

    def seeds(self, count: int) -> list[int]:
        """The seeds of `count` independent repetitions."""
        return [self.seed * STRIDE + k for k in range(count)]

    def tensors(self, part: Part) -> tuple[Tensor, Tensor]:
        """The examples of a part on the device."""
        return part.x.to(self.device), part.y.to(self.device)

    def portions(self, values: Sequence[_T]) -> Iterator[list[_T]]:
        """The values, so many at a time as one population has members."""
        size = AT_ONCE.get(self.device.type, AT_ONCE["cpu"])
        for start in range(0, len(values), size):
            yield list(values[start : start + size])


def on_device(setting: Setting[Options], device: torch.device) -> Setting[Options]:
    """The same setting by the fastest means of the device; up to rounding, the results are the same."""
    if device.type != "cuda":
        return setting
    early = {"execution": "compiled" if setting.model == "resnet20" else "graph", "amp": setting.amp}
    late = {"execution": "graph"}  # in float32, in which Q is evaluated
    means = {"dense": early, "pruning": early, "prior": late, "posterior": late}
    return replace(setting, **{stage: replace(getattr(setting, stage), **mean) for stage, mean in means.items()})


def in_steps(config: Config, steps: int, examples: int) -> Config:
    """The stage with about so many steps, however many examples there are: few of them make short epochs."""
    return replace(config, epochs=max(1, round(steps / math.ceil(examples / config.batch_size))))


# --- What is drawn: the figures of a recipe.


class Figure(NamedTuple):
    """A figure that is to be drawn.

    Args:
        name: What its files are called.
        caption: What a reader should see in it.
        rows: Computes the rows of its CSV.
        paint: Draws the rows of the CSV on a canvas of matplotlib.
        numbers: The main numbers, from the rows of the CSV.
    """

    name: str
    caption: str
    rows: Callable[[], Table]
    paint: Callable[[Any, Table], None]
    numbers: Callable[[Table], dict[str, float]] = lambda rows: {}


class Drawing(NamedTuple):
    """A figure that was drawn: its files, and its rows as the CSV has them."""

    name: str
    caption: str
    csv: Path
    png: Path | None
    rows: Table


Settings = Sequence[Setting[Any]]


PROCEDURES = ("paper", "reduced", "other")
"""How published numbers were made: as the paper says, so with fewer epochs or seeds, or in another way."""
NOT_MEASURED = "not yet measured"
VERDICTS = ("agrees", "agrees in direction", "does not agree", NOT_MEASURED)
"""How published numbers compare with what the paper says of its figure."""


class Line(NamedTuple):
    """A line of `pacprune reproduce --list`: what a recipe shows, and what is known of it.

    Args:
        title: What is shown, in a few words.
        figure: The figure of the paper, such as "4", "1, 6" or "12-14"; empty where the paper has none.
        procedure: One of PROCEDURES, for a figure of the paper.
        verdict: One of VERDICTS, for a figure of the paper.
        see: Where the numbers are told, a page of docs/ and its section; empty before there are any.
        scale: The scale of the command, which verdict and minutes are of.
        only: The setting of the command; empty for all.
        h200: Minutes that it took on an H200; None if nobody took the time.
        cpu: Minutes that it took on two cores; None if nobody took the time.
    """

    title: str
    figure: str = ""
    procedure: str = ""
    verdict: str = ""
    see: str = ""
    scale: str = "reduced"
    only: str = ""
    h200: float | None = None
    cpu: float | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its figures."""
        spans = [[int(number) for number in re.findall(r"\d+", part)] for part in self.figure.split(",") if part]
        return tuple(number for span in spans for number in range(span[0], span[-1] + 1))


class Recipe(NamedTuple):
    """A row of RECIPES.

    Args:
        settings: The settings of every scale; or a function from smoke, reduced and full to them.
        figures: Yields the figures of one setting.
        several: Whether a scale has several settings, of which --only can name one.
        together: Whether they share one folder, which --only adds to.
        lines: What `pacprune reproduce --list` says of it.
    """

    settings: Mapping[str, Settings] | Callable[[str], Settings]
    figures: Callable[[Any, Job], Iterator[Figure]]
    several: bool = False
    together: bool = False
    lines: tuple[Line, ...] = ()

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it has."""
        return SCALES[:3] if callable(self.settings) else tuple(self.settings)

    def at(self, scale: str) -> Settings:
        """The settings of a scale."""
        return self.settings(scale) if callable(self.settings) else self.settings[scale]


def reproduce(recipe: Recipe, job: Job) -> tuple[list[Drawing], dict[str, float]]:
    """Draws the figures of a recipe into job.out; returns them with the main numbers."""
    drawings: list[Drawing] = []
    numbers: dict[str, float] = {}
    for setting in job.select(recipe.at(job.scale)):
        setting = on_device(setting, job.device)
        for figure in recipe.figures(setting, job):
            drawings.append(draw(figure, job, terms=digest(setting)))
            numbers |= figure.numbers(drawings[-1].rows)
    return drawings, numbers


def draw(figure: Figure, job: Job, *, terms: str) -> Drawing:
    """Leaves NAME.csv and, with matplotlib, NAME.png; a CSV that was made on the same terms stays as it is."""
    path, noted = job.out / f"{figure.name}.csv", job.out / TERMS
    terms_by_name = json.loads(noted.read_text()) if noted.is_file() else {}
    if not path.is_file():
        rows = figure.rows()
        # Before the CSV: terms without one do no harm.
        write_atomically(noted, (json.dumps(terms_by_name | {figure.name: terms}, indent=1) + "\n").encode())
        write_atomically(path, plots.csv_of(rows))
    elif terms_by_name.get(figure.name) != terms:
        raise _other_terms(path, terms_by_name.get(figure.name), terms)
    rows = read(path)
    picture = plots.png_of(figure.paint, rows)
    if picture is not None:
        write_atomically(path.with_suffix(".png"), picture)
    return Drawing(figure.name, figure.caption, path, None if picture is None else path.with_suffix(".png"), rows)


def read(path: Path) -> Table:
    """The rows of a CSV: numbers as floats, nothing as None."""

    def value(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text or None

    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


# --- What is kept: rows and dense networks.


class Entry(Protocol):
    """What one row is about: any NamedTuple."""

    def _asdict(self) -> dict[str, Any]: ...
    def __hash__(self) -> int: ...


_Entry = TypeVar("_Entry", bound=Entry)


def compute_rows(
    entries: Sequence[_Entry],
    compute: Callable[[list[_Entry]], Sequence[Mapping[str, Any]]],
    *,
    path: Path,
    terms: str,
    group: Callable[[_Entry], Hashable],
    portions: Callable[[list[_Entry]], Iterable[list[_Entry]]] = lambda members: [members],
) -> Table:
    """One row per entry, in their order: its own values, and those that `compute` gives it.

    Rows are kept as they are made, so that an interrupted run goes on where it stopped.

    Args:
        entries: NamedTuples of one type.
        compute: Computes entries of one group together; returns what is to be known of each.
        path: The file that keeps the rows, one JSON line each.
        terms: Stands for what entries do not say; a file made on other terms is refused.
        group: Entries with equal values are computed together.
        portions: Cuts a group that is too large for one population.

    Returns:
        The rows.

    Raises:
        ValueError: If the file was made on other terms.
    """
    names = list(entries[0]._asdict()) if entries else []
    rows = _kept_rows(path, terms, names)
    missing: dict[Hashable, list[_Entry]] = {}
    for entry in entries:
        if entry not in rows:
            missing.setdefault(group(entry), []).append(entry)
    for members in missing.values():
        for portion in portions(members):
            rows |= zip(portion, compute(portion), strict=True)
            lines = [
                json.dumps({"terms": terms, **dict(zip(names, key, strict=True)), **row}) for key, row in rows.items()
            ]
            write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [{**entry._asdict(), **rows[entry]} for entry in entries]


def _kept_rows(path: Path, terms: str, names: list[str]) -> dict[Any, Mapping[str, Any]]:
    """What the file says of every entry; a tuple of its values equals the entry itself."""
    rows = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        before = row.pop("terms", None)
        if before != terms:
            raise _other_terms(path, before, terms)
        rows[tuple(row.pop(name) for name in names)] = row
    return rows


def _other_terms(path: Path, before: str | None, terms: str) -> ValueError:
    return ValueError(
        f"{path} was filled on the terms {before or 'unknown'} (data, network, epochs, schedule, device), but those of "
        f"now are {terms}; go back to those terms, or begin in another --out"
    )


def dense_networks(
    setting: Setting[Any],
    build: Callable[[int], nn.Module],
    data: Data,
    job: Job,
    *,
    seeds: Sequence[int] | None = None,
    name: str = "dense",
    loss: Loss = F.cross_entropy,
) -> dict[int, nn.Module]:
    """Dense networks by seed, trained once as a population and kept in files.

    Args:
        setting: How they are trained; without dense epochs they are returned as they are built.
        build: seed -> an untrained network.
        data: What they are trained on.
        job: Where files lie and what device trains.
        seeds: Seeds of the networks and of the data order; None takes those of the setting.
        name: What tells these networks of the setting from others of it.
        loss: (outputs, labels) -> one number.

    Returns:
        The networks, on the device.
    """
    seeds = job.seeds(setting.seeds) if seeds is None else seeds
    nets = {seed: build(seed).to(job.device) for seed in seeds}
    if not setting.dense.epochs:
        return nets
    folder = job.out / "dense" / setting.terms
    paths = {seed: folder / f"{setting.name}-{name}-{seed}.safetensors" for seed in seeds}
    missing = [seed for seed in seeds if not paths[seed].is_file()]
    for portion in job.portions(missing):
        members = [nets[seed] for seed in portion]
        fit(members, data, setting.dense, loss=loss, seed=portion, stage=name, progress=job.progress)
        for seed in portion:
            export.save_dense(paths[seed], nets[seed])
    for seed, net in nets.items():
        net.load_state_dict(load_file(paths[seed]))
        net.eval()
    if loaded := [nets[seed] for seed in seeds if seed not in missing]:
        weights.take_over(loaded, use_of(data))
    return nets
