"""Pruning methods on equal terms: the same dense networks, epochs, schedules, data order and effort in tuning.

Every method starts from the same dense networks and has the same epochs after them. Its learning rates are chosen on a
tenth of the training set that it does not train on, from a grid that is declared beforehand and has as many points for
each; the test set is looked at once, by the networks that are reported. Networks of one method are a population.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from safetensors.torch import load_file
from torch import Tensor, nn

from pacprune import data, models, philox
from pacprune.data.splits import Split
from pacprune.files import write_atomically
from pacprune.masking import weights
from pacprune.methods.gradual import gmp
from pacprune.methods.iterative import imp
from pacprune.methods.l0 import l0
from pacprune.methods.one_shot import osp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Pruned, together
from pacprune.paper.frame import Job
from pacprune.runs import store
from pacprune.training.config import GATE_RATIO, Config
from pacprune.training.evaluate import error
from pacprune.training.fit import fit
from pacprune.training.population import AT_ONCE

_Any = TypeVar("_Any")
_R = TypeVar("_R")

METHODS: dict[str, tuple[Callable[..., Pruned], dict[str, Any]]] = {
    "osp": (osp, {}),
    "pft": (pft, {}),
    "pft-paper": (pft, {"recipe": "paper"}),
    "pft-still": (pft, {"noise": False}),
    "gmp": (gmp, {}),
    "dpf": (gmp, {"feedback": True}),
    "imp": (imp, {}),
    "l0": (l0, {}),
}
FROM_A_CRITERION = ("osp", "pft", "pft-paper", "pft-still")
"""Methods that begin with a criterion's scores; the others rank by magnitude, or learn their own."""
WITHOUT_A_MASK_STAGE = ("osp", "imp")
VALIDATION = 0.1
_DIVERGED = "the loss .*became|the scores .*hold .*NaN|NaN or infinite (weights|means|values before training)"
COLUMNS = ("dataset", "model", "method", "criterion", "sparsity", "seed", "epochs", "kept", "total", "test_error")


@dataclass(frozen=True)
class Setting:
    """A data set and a network, and what every method is given on them; `after` has its lr from the grid `rates`."""

    data: str
    model: str
    sparsities: tuple[float, ...]
    criteria: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    dense: Config
    after: Config
    rates: tuple[float, ...]
    gated: tuple[tuple[float, float], ...]
    """(lr, gate_lr / lr) that pft tries, as many as the others have rates."""
    tuned_at: float
    """The sparsity at which the learning rates are chosen."""
    mask_share: float = 0.5
    """The share of the epochs after dense training that finds the mask, where a method has such a stage."""

    def __post_init__(self) -> None:
        if len(self.rates) != len(self.gated):
            raise ValueError(
                f"pft would try {len(self.gated)} points of its grid and the others {len(self.rates)}; give as many"
            )

    @property
    def name(self) -> str:
        """How the files of this setting begin."""
        return f"{self.data}-{self.model}"

    @property
    def terms(self) -> str:
        """Names what an entry does not say: networks made on other terms are not taken for these."""
        found = self.data, self.model, self.dense, self.after, self.mask_share
        return hashlib.sha256(repr(found).encode()).hexdigest()[:12]

    def pairs(self) -> list[tuple[str, str]]:
        """All (method, criterion); a method without a criterion of its own ranks by magnitude.

        So do the variants of pft: what they are worth beside the default recipe is seen from one start.
        """
        found = []
        for method in self.methods:
            own = self.criteria if method in ("osp", "pft") else ("magnitude",)
            found += [(method, criterion) for criterion in own]
        return found

    def points(self, method: str) -> tuple[tuple[float, float], ...]:
        """The grid of a method, (lr, gate_lr / lr); the paper's recipe and L0 have gates, too, at the default ratio."""
        return self.gated if method in ("pft", "pft-still") else tuple((lr, GATE_RATIO) for lr in self.rates)


class Entry(NamedTuple):
    """One network to be pruned."""

    method: str
    criterion: str
    sparsity: float
    seed: int
    lr: float
    ratio: float
    """gate_lr / lr, where there are gates; GATE_RATIO stands for the default, which is less for long mask stages."""


def run(setting: Setting, job: Job) -> list[dict[str, Any]]:
    """One row per network, in COLUMNS, the dense ones first; what a broken run has finished is kept."""
    split = data.load(setting.data, seed=0, data_dir=job.data_dir)
    chosen = tune(setting, split, job)
    seeds = job.seeds(setting.seeds)
    x, y = (t.to(job.device) for t in (split.train.x, split.train.y))
    dense = dense_networks(setting, split, (x, y), seeds, job, "dense")
    entries = [
        Entry(method, criterion, sparsity, seed, *chosen[method, criterion])
        for method, criterion in setting.pairs()
        for sparsity in setting.sparsities
        for seed in seeds
    ]
    test = split.test.x.to(job.device), split.test.y.to(job.device)
    found = _pruned(setting, entries, dense, (x, y), test, job, f"{setting.name}.jsonl")
    rows = [
        {
            "dataset": setting.data,
            "model": setting.model,
            "method": "dense",
            "criterion": "",
            "sparsity": 0.0,
            "seed": seed,
            "epochs": setting.dense.epochs,
            "kept": weights.total(dense[seed]),
            "total": weights.total(dense[seed]),
            "test_error": wrong,
        }
        for seed, wrong in zip(seeds, error([dense[seed] for seed in seeds], test), strict=True)
    ]
    for entry, row in found:
        row = row | entry._asdict() | {"dataset": setting.data, "model": setting.model, "test_error": row["error"]}
        rows.append({name: (row | {"epochs": setting.after.epochs})[name] for name in COLUMNS})
    return rows


def on_device(setting: Setting, job: Job) -> Setting:
    """The same setting by the fastest means of the device: what is asked stays the same."""
    if job.device.type != "cuda":
        return setting
    means: dict[str, Any] = {"execution": "compiled" if setting.model == "resnet20" else "graph", "amp": True}
    return replace(setting, dense=replace(setting.dense, **means), after=replace(setting.after, **means))


def chunks(entries: Sequence[_Any], job: Job) -> Iterator[list[_Any]]:
    """Entries in portions of one population each."""
    most = AT_ONCE.get(job.device.type, AT_ONCE["cpu"])
    for start in range(0, len(entries), most):
        yield list(entries[start : start + most])


def tune(setting: Setting, split: Split, job: Job) -> dict[tuple[str, str], tuple[float, float]]:
    """(lr, gate_lr / lr) of every (method, criterion): the best on validation data, the smaller one of equals."""
    pairs = setting.pairs()
    if len(setting.rates) == 1:
        return {(method, criterion): setting.points(method)[0] for method, criterion in pairs}
    order = philox.permutation(len(split.train), seed=job.seed)
    cut = round(len(order) * VALIDATION)
    held, used = order[:cut], order[cut:]
    x, y = (t.to(job.device) for t in (split.train.x, split.train.y))
    seeds = job.seeds(1)
    dense = dense_networks(setting, split, (x[used], y[used]), seeds, job, "tuning")
    entries = [Entry(m, c, setting.tuned_at, seeds[0], *point) for m, c in pairs for point in setting.points(m)]
    found = _pruned(
        setting, entries, dense, (x[used], y[used]), (x[held], y[held]), job, f"{setting.name}-tuning.jsonl"
    )
    best: dict[tuple[str, str], tuple[float, float, float]] = {}
    for entry, row in found:
        key = entry.method, entry.criterion
        best[key] = min(best.get(key, (2.0, 0.0, 0.0)), (row["error"], entry.lr, entry.ratio))
    return {key: (lr, ratio) for key, (_, lr, ratio) in best.items()}


def dense_networks(
    setting: Setting, split: Split, on: tuple[Tensor, Tensor], seeds: Sequence[int], job: Job, what: str
) -> dict[int, nn.Module]:
    """The dense networks that all methods start from, by seed; trained once, as one population."""
    nets = {seed: models.build(setting.model, split, seed=seed).to(job.device) for seed in seeds}
    if not setting.dense.epochs:
        return nets
    folder = job.out / "dense" / setting.terms
    paths = {seed: folder / f"{setting.name}-{what}-{seed}.safetensors" for seed in seeds}
    missing = [seed for seed in seeds if not paths[seed].is_file()]
    if missing:
        fit([nets[seed] for seed in missing], on, setting.dense, seed=missing, stage=what, progress=job.progress)
        for seed in missing:
            store.write_model(paths[seed], nets[seed])
    for seed, net in nets.items():
        net.load_state_dict(load_file(paths[seed]))
        net.eval()
    return nets


def _pruned(
    setting: Setting,
    entries: list[Entry],
    dense: dict[int, nn.Module],
    on: tuple[Tensor, Tensor],
    judged: tuple[Tensor, Tensor],
    job: Job,
    file: str,
) -> list[tuple[Entry, dict[str, Any]]]:
    """Prunes every entry, method by method in populations, and judges it; one line of `file` per network."""
    path = job.out / file
    known: dict[Entry, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if (terms := row.pop("terms")) != setting.terms:
                raise ValueError(
                    f"{path} was filled on the terms {terms} (data, network, epochs, schedule, device), but those of "
                    f"now are {setting.terms}; begin in another --out"
                )
            known[Entry(*(row.pop(name) for name in Entry._fields))] = row
    for method in dict.fromkeys(entry.method for entry in entries):
        waiting = [entry for entry in entries if entry.method == method and entry not in known]
        for part in chunks(waiting, job):
            known |= zip(part, _contest(setting, part, dense, on, judged, job), strict=True)
            lines = [json.dumps({"terms": setting.terms, **entry._asdict(), **row}) for entry, row in known.items()]
            write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [(entry, known[entry]) for entry in entries]


def _contest(
    setting: Setting,
    entries: list[Entry],
    dense: dict[int, nn.Module],
    on: tuple[Tensor, Tensor],
    judged: tuple[Tensor, Tensor],
    job: Job,
) -> list[dict[str, Any]]:
    """Prunes entries of one method as a population; one that diverges has error 1."""
    verb, options = METHODS[entries[0].method]
    total = weights.total(dense[entries[0].seed])

    def attempt(entries: list[Entry]) -> list[dict[str, Any]]:
        own: dict[str, Any] = {}
        if entries[0].method in FROM_A_CRITERION:
            own["criterion"] = [entry.criterion for entry in entries]
        if entries[0].method not in WITHOUT_A_MASK_STAGE:
            own["mask_share"] = setting.mask_share
        results = together(
            verb,
            [copy.deepcopy(dense[entry.seed]) for entry in entries],
            on,
            [_config(setting.after, entry) for entry in entries],
            sparsity=[entry.sparsity for entry in entries],
            seed=[entry.seed for entry in entries],
            progress=job.progress,
            **options,
            **own,
        )
        errors = error([result.model for result in results], judged)
        return [
            {"kept": total - round(weights.sparsity(result.model) * total), "total": total, "error": wrong}
            for result, wrong in zip(results, errors, strict=True)
        ]

    return surviving(entries, attempt, {"kept": 0, "total": total, "error": 1.0})


def _config(after: Config, entry: Entry) -> Config:
    config = replace(after, lr=entry.lr)
    return config if entry.ratio == GATE_RATIO else replace(config, gate_lr=entry.lr * entry.ratio)


def surviving(entries: list[_Any], attempt: Callable[[list[_Any]], list[_R]], lost: _R) -> list[_R]:
    """attempt(entries); where one of them diverges, the others go on without it, and it has the result `lost`."""
    try:
        return attempt(entries)
    except ValueError as failure:
        # Whoever looks first notices it: the loss, the scores, or the next one to take the weights.
        if not re.search(_DIVERGED, str(failure)):
            raise
        if len(entries) == 1:
            return [lost]
        half = len(entries) // 2
        return [one for part in (entries[:half], entries[half:]) for one in surviving(part, attempt, lost)]
