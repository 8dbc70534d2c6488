"""Pruning methods on equal terms: the same dense networks, epochs, schedules, data order and effort in tuning.

All methods of METHODS can take part. Each starts from the same dense networks and has the same epochs after them. Its
learning rates are chosen on a tenth of the training set that it does not train on. The grid of rates is declared
beforehand and has as many points for every method. The test set is looked at once, by the networks that are reported.
Networks of one method are a population.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import data, models, philox
from pacprune.data.splits import Split
from pacprune.masking import weights
from pacprune.methods.pipeline import Pruned, together
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.paper.frame import Job, Setting, compute_rows, dense_networks, in_entries
from pacprune.training.config import GATE_RATIO, Config
from pacprune.training.evaluate import error
from pacprune.types import Data, Diverged, Loss, Table

_T = TypeVar("_T")
_R = TypeVar("_R")

VALIDATION = 0.1
"""The share of the training set that learning rates are chosen on."""
COLUMNS = ("dataset", "model", "method", "criterion", "sparsity", "seed", "epochs", "kept", "total", "test_error")

Point = tuple[float, float]
"""(lr, gate_lr / lr). A ratio of GATE_RATIO stands for the default gate_lr, which is less for long mask stages."""


class Contender(NamedTuple):
    """What takes part in a contest under the name of a method.

    Args:
        method: The key of METHODS whose verb runs.
        options: Names and values of the verb's arguments, beside those of its row.
        config: Names and values of fields of the Config that are other than in the setting.
    """

    method: str
    options: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The options of a setting that compares methods; its `pruning` takes the lr from the grid.

    Args:
        criteria: Criteria that methods with a criterion start from.
        methods: Keys of METHODS; none means all methods that leave a sparse network.
        rates: The lr that a method tries.
        gated: (lr, gate_lr / lr) that methods with tuned gates try, as many as there are rates.
        tuned_at: The sparsity at which learning rates are chosen.
        contenders: What runs under the name of a method, where that is not its row of METHODS alone.
        grids: The points that a contender tries, by its name, where those are not `rates` or `gated`: as many, or one.
            Their gate_lr is always given, whatever the ratio.
    """

    criteria: tuple[str, ...] = in_entries(("magnitude",))
    methods: tuple[str, ...] = in_entries()
    rates: tuple[float, ...] = in_entries((0.1,))
    gated: tuple[Point, ...] = in_entries(((0.1, GATE_RATIO),))
    tuned_at: float = in_entries(0.9)
    contenders: Mapping[str, Contender] = field(default_factory=dict)
    grids: Mapping[str, tuple[Point, ...]] = field(default_factory=dict, metadata={"in_entries": True})

    def __post_init__(self) -> None:
        for name, grid in self.grids.items():
            if len(grid) not in (1, len(self.rates)):
                raise ValueError(
                    f"{name} would try {len(grid)} points of its grid and the others {len(self.rates)}; give as many, "
                    "or one"
                )
        if len(self.rates) != len(self.gated):
            raise ValueError(
                f"pft would try {len(self.gated)} points of its grid and the others {len(self.rates)}; give as many"
            )

    def pairs(self) -> list[tuple[str, str]]:
        """All (method, criterion); a method that is not compared from all criteria ranks by magnitude."""
        pairs = []
        for name in self.methods or pruning_methods():
            pairs += [(name, criterion) for criterion in self._criteria(name)]
        return pairs

    def _criteria(self, name: str) -> tuple[str, ...]:
        return self.criteria if from_criteria(self.contender(name).method) else ("magnitude",)

    def contender(self, name: str) -> Contender:
        """What runs under the name of a method."""
        return self.contenders.get(name, Contender(name))

    def points(self, name: str) -> tuple[Point, ...]:
        """The grid of a method; gates that are not tuned have the default ratio."""
        if name in self.grids:
            return self.grids[name]
        method = METHODS.get(name) or METHODS[self.contender(name).method]
        return self.gated if method.tunes_gates else tuple((lr, GATE_RATIO) for lr in self.rates)


def same_grid(*rates: float) -> dict[str, Any]:
    """The same rates for all methods, the gates at their default."""
    return {"rates": rates, "gated": tuple((lr, GATE_RATIO) for lr in rates)}


def from_criteria(name: str) -> bool:
    """Whether a method is compared from all criteria.

    It needs a criterion to begin with. Variants, such as pft-paper, start from magnitude alone: what they are worth is
    seen from one start.
    """
    return METHODS[name].takes("criterion") and not METHODS[name].options


class Entry(NamedTuple):
    """One network to be pruned; (lr, ratio) is a point of the grid."""

    method: str
    criterion: str
    sparsity: float
    seed: int
    lr: float
    ratio: float


class Task(NamedTuple):
    """What the methods are compared on.

    Args:
        name: What tells its dense networks from others of the setting.
        file: The file of its rows, without the suffix.
        build: seed -> an untrained network.
        data: What all networks are trained on.
        measure: networks -> one number each, less is better.
        column: What the number is called in the rows.
        worst: The number of a network that diverged.
        loss: (outputs, labels) -> one number.
    """

    name: str
    file: str
    build: Callable[[int], nn.Module]
    data: Data
    measure: Callable[[list[nn.Module]], list[float]]
    column: str
    worst: float = 1.0
    loss: Loss = F.cross_entropy


def run(setting: Setting[Contest], job: Job) -> Table:
    """One row per network, in COLUMNS, the dense ones first; what an interrupted run has finished is kept."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    points = tune(setting, lambda: validation_task(setting, split, job), job)
    rows = contest(setting, points, report_task(setting, split, job), job)
    return [{name: ({"dataset": setting.data, "model": setting.model} | row)[name] for name in COLUMNS} for row in rows]


def report_task(setting: Setting[Contest], split: Split, job: Job) -> Task:
    """Training on the whole training set, test errors."""
    test = job.tensors(split.test)
    return Task(
        name="dense",
        file=setting.name,
        build=lambda seed: models.build(setting.model, split, seed=seed),
        data=job.tensors(split.train),
        measure=lambda nets: error(nets, test),
        column="test_error",
    )


def validation_task(setting: Setting[Contest], split: Split, job: Job) -> Task:
    """Training on nine tenths of the training set, errors on the others."""
    order = philox.permutation(len(split.train), seed=job.seed)
    cut = round(len(order) * VALIDATION)
    x, y = job.tensors(split.train)
    held_out = x[order[:cut]], y[order[:cut]]
    return report_task(setting, split, job)._replace(
        name="tuning",
        file=f"{setting.name}-tuning",
        data=(x[order[cut:]], y[order[cut:]]),
        measure=lambda nets: error(nets, held_out),
        column="validation_error",
    )


def tune(setting: Setting[Contest], make_task: Callable[[], Task], job: Job) -> dict[tuple[str, str], Point]:
    """The point of every (method, criterion) with the least number, the smaller point of equals.

    A grid of one point needs no trial.
    """
    options = setting.options
    grids = {(method, criterion): options.points(method) for method, criterion in options.pairs()}
    settled = {pair: grid[0] for pair, grid in grids.items() if len(grid) == 1}
    if settled.keys() == grids.keys():
        return settled
    task, (seed,) = make_task(), job.seeds(1)
    entries = [
        Entry(*pair, options.tuned_at, seed, *point)
        for pair, grid in grids.items()
        if pair not in settled
        for point in grid
    ]
    best: dict[tuple[str, str], tuple[float, float, float]] = {}
    for row in entry_rows(setting, entries, _dense(setting, [seed], task, job), task, job):
        key, trial = (row["method"], row["criterion"]), (row[task.column], row["lr"], row["ratio"])
        best[key] = min(best.get(key, trial), trial)
    return settled | {key: (lr, ratio) for key, (_, lr, ratio) in best.items()}


def contest(setting: Setting[Contest], points: Mapping[tuple[str, str], Point], task: Task, job: Job) -> Table:
    """One row per dense network, and one per method, criterion, sparsity and seed."""
    dense = _dense(setting, job.seeds(setting.seeds), task, job)
    numbers = zip(dense.items(), task.measure(list(dense.values())), strict=True)
    rows: Table = [
        {"method": "dense", "criterion": "", "sparsity": 0.0, "seed": seed, "lr": setting.dense.lr}
        | {"epochs": setting.dense.epochs, "kept": weights.total(net), "total": weights.total(net)}
        | {task.column: number}
        for (seed, net), number in numbers
    ]
    entries = [
        Entry(method, criterion, sparsity, seed, *points[method, criterion])
        for method, criterion in setting.options.pairs()
        for sparsity in setting.sparsities
        for seed in dense
    ]
    sparse = entry_rows(setting, entries, dense, task, job)
    return rows + [row | {"epochs": setting.pruning.epochs} for row in sparse]


def entry_rows(
    setting: Setting[Contest], entries: Sequence[Entry], dense: Mapping[int, nn.Module], task: Task, job: Job
) -> Table:
    """One row per entry: the weights kept, the weights in all, and the task's number."""
    total = weights.total(next(iter(dense.values())))

    def attempt(portion: list[Entry]) -> Table:
        nets = [result.model for result in prune(setting, portion, dense, task.data, job, loss=task.loss)]
        return [
            {"kept": total - round(weights.sparsity(net) * total), "total": total, task.column: number}
            for net, number in zip(nets, task.measure(nets), strict=True)
        ]

    return compute_rows(
        entries,
        lambda portion: despite_divergence(portion, attempt, {"kept": 0, "total": total, task.column: task.worst}),
        path=job.out / f"{task.file}.jsonl",
        terms=setting.terms,
        group=lambda entry: entry.method,
        portions=job.portions,
    )


def _dense(setting: Setting[Contest], seeds: Sequence[int], task: Task, job: Job) -> dict[int, nn.Module]:
    return dense_networks(setting, task.build, task.data, job, seeds=seeds, name=task.name, loss=task.loss)


def prune(
    setting: Setting[Contest],
    entries: Sequence[Entry],
    dense: Mapping[int, nn.Module],
    train: Data,
    job: Job,
    *,
    loss: Loss = F.cross_entropy,
) -> list[Pruned]:
    """Prunes copies of dense networks, all entries by one method, as a population."""
    (name,) = {entry.method for entry in entries}
    contender = setting.options.contender(name)
    method = METHODS[contender.method]
    options: dict[str, Any] = dict(method.options)
    if method.takes("criterion"):
        options["criterion"] = [entry.criterion for entry in entries]
    if loss is not F.cross_entropy:
        options["loss"] = loss
    options |= dict(contender.options)
    if "pattern" in options:
        options["prunable"] = in_fours
    return together(
        method.verb,
        [copy.deepcopy(dense[entry.seed]) for entry in entries],
        train,
        [replace(_config(setting, entry), **dict(contender.config)) for entry in entries],
        sparsity=[entry.sparsity for entry in entries],
        seed=[entry.seed for entry in entries],
        progress=job.progress,
        **options,
    )


def in_fours(model: nn.Module) -> dict[str, Tensor]:
    """The weights whose rows can be cut into groups of 4, as N:M patterns want; the others stay dense."""
    return {name: w for name, w in weights.prunable(model).items() if w[0].numel() % 4 == 0}


def _config(setting: Setting[Contest], entry: Entry) -> Config:
    config = replace(setting.pruning, lr=entry.lr)
    by_default = entry.ratio == GATE_RATIO and entry.method not in setting.options.grids
    return config if by_default else replace(config, gate_lr=entry.lr * entry.ratio)


def despite_divergence(entries: list[_T], attempt: Callable[[list[_T]], list[_R]], lost: _R) -> list[_R]:
    """attempt(entries); where one of them diverges, the others go on without it, and its result is `lost`."""
    try:
        return attempt(entries)
    except Diverged:  # by the loss, the scores, or the next stage that takes the weights
        if len(entries) == 1:
            return [lost]
        half = len(entries) // 2
        return [
            result for part in (entries[:half], entries[half:]) for result in despite_divergence(part, attempt, lost)
        ]
