"""Sweeps: every combination of some options. Each is a run folder, and a finished run is never repeated.

A sweep's folder holds sweep.toml (the latest sweep file), and a folder and a log for each run.
"""

import copy
import hashlib
import itertools
import math
import shutil
import tomllib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pacprune.data.splits import Split
from pacprune.files import write_atomically
from pacprune.methods.pipeline import together
from pacprune.runs import commands, locks, store, sweep_table
from pacprune.runs import options as opt
from pacprune.runs.commands import Outcome
from pacprune.runs.options import Certifying, Options
from pacprune.training.evaluate import error
from pacprune.training.fit import fit
from pacprune.training.population import AT_ONCE
from pacprune.types import Progress, check_name

SWEEP_FILE, POPULATIONS = "sweep.toml", "populations"
COMMANDS = tuple(name for name, kind in opt.COMMANDS.items() if issubclass(kind, Options))


@dataclass(frozen=True)
class Entry:
    """One run of a sweep: its name, all its options, and those that come from the grid."""

    name: str
    options: Options
    point: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """The table [ray]: what Ray reserves for one run, and how often it restarts a run whose worker died."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_retries: int = 3


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file."""

    command: str
    entries: list[Entry]
    rehearsed: list[Options]
    """Options that use every value of the grid at least once."""
    resources: Resources
    text: bytes


Work = Callable[[Sweep, Path, list[Entry]], None]
"""(sweep, folder, unfinished runs): afterwards each run is finished, or its log says why it failed."""


def read(path: Path, *, device: str | None = None) -> Sweep:
    """A sweep file, every key and every type checked: a command, fixed options, [grid] with lists, perhaps [ray]."""
    try:
        text = path.read_bytes()
        content = tomllib.loads(text.decode())
    except (OSError, ValueError) as failure:
        raise ValueError(f"the sweep file {path} cannot be read ({failure}); give a TOML file") from None
    command = content.pop("command", None)
    check_name(f"in {path}, command", command, COMMANDS)
    grid, ray_table = content.pop("grid", {}), content.pop("ray", {})
    kind, kinds = opt.COMMANDS[command], opt.types_of(opt.COMMANDS[command])
    fixed = {name: opt.checked_value(path, kinds, name, value) for name, value in content.items()}
    grid = _checked_grid(path, kinds, fixed, grid)
    if fixed.get("commit") or True in grid.get("commit", ()):
        raise ValueError(
            f"commit in {path} would stop every run at its first seal; seal runs one by one, by pacprune pbp"
        )
    fixed = _paid(path, kind, fixed, grid)

    def resolve(point: dict[str, Any]) -> Options:
        return opt.resolve(kind, fixed, point, {} if device is None else {"device": device})

    entries = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        entries.append(Entry(opt.run_name(command, resolve(point)), resolve(point), point))
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError(f"[grid] in {path} asks for the same run more than once; leave out what names no run")
    longest = max(map(len, grid.values()))
    rehearsed = [resolve({name: values[i % len(values)] for name, values in grid.items()}) for i in range(longest)]
    return Sweep(command, entries, rehearsed, _resources(path, ray_table, rehearsed[0].device), text)


def _checked_grid(path: Path, kinds: dict[str, type], fixed: dict[str, Any], grid: Any) -> dict[str, list[Any]]:
    """The lists of [grid], each of values of the right type that are not fixed and not named twice."""
    if not isinstance(grid, dict) or not grid:
        raise ValueError(
            f"[grid] in {path} is {grid or 'missing'}; add a table of lists to be crossed, such as sparsity = [.9, .95]"
        )
    lists = {}
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} in [grid] of {path} is {values!r}; it must be a list of at least one value")
        lists[name] = values = [opt.checked_value(path, kinds, name, value) for value in values]
        if name in fixed:
            raise ValueError(f"{name} in {path} is {fixed[name]!r} and also in [grid]; keep one of the two")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} in [grid] of {path} is {values}, which names a value twice; name each once")
    return lists


def _resources(path: Path, table: Any, device: str) -> Resources:
    if not isinstance(table, dict):
        raise ValueError(f"ray in {path} is {table!r}, but it must be a table: write [ray] and num_cpus = 1 below it")
    settings = {name: opt.checked_value(path, opt.types_of(Resources), name, value) for name, value in table.items()}
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} in [ray] of {path} is {value}; it must be a number of at least 0")
    return Resources(**{"num_gpus": 0.0 if device == "cpu" else 1.0, **settings})


def _paid(path: Path, kind: type, fixed: dict[str, Any], grid: dict[str, list[Any]]) -> dict[str, Any]:
    """The fixed options, in which certificates on the same examples pay for a choice among all of them.

    A sweep invites choosing the best, and another seed, also of the split, is another try on the same examples. So the
    sweep declares the number of its certificates on a data set as `grid`; a file that names a smaller one is refused.
    """
    if not issubclass(kind, Certifying):
        return fixed
    count = math.prod(len(values) for name, values in grid.items() if name not in ("data", "device"))
    stated = [fixed["grid"]] if "grid" in fixed else grid.get("grid", [])
    if stated and min(stated) < count:
        raise ValueError(
            f"{path} asks for {count} certificates on the same examples, but grid is {min(stated)}, so that a choice "
            f"among them is not paid for; leave grid out, and it is {count}"
        )
    return fixed if stated else {**fixed, "grid": count}


def run(file: Path, *, out: Path | None = None, device: str | None = None, work: Work | None = None) -> dict[str, Any]:
    """Runs the unfinished runs of a sweep, on this machine or by `work`; returns the `status` at the end."""
    sweep = read(file, device=device)
    folder = Path("runs") / file.stem if out is None else out
    if folder.is_file() or (folder / store.CONFIG).exists():
        raise ValueError(f"{folder} is a file or the folder of one run; choose another --out, for one folder per run")
    waiting = [e for e in sweep.entries if store.claim(folder / e.name, sweep.command, e.options) is None]
    if waiting:
        (run_here if work is None else work)(sweep, folder, waiting)
    else:
        begin(sweep, folder)
    return status(folder)


def status(folder: Path) -> dict[str, Any]:
    """Every run of the sweep in a folder, with its state, and how many there are of each state."""
    store.check_folder(folder, "a sweep")
    if not (folder / SWEEP_FILE).is_file():
        raise ValueError(
            f"{folder} holds no {SWEEP_FILE}, so it is not the folder of a sweep; name one, such as runs/mine"
        )
    return status_of(folder, read(folder / SWEEP_FILE))


def status_of(folder: Path, sweep: Sweep) -> dict[str, Any]:
    """`status` of a sweep file that was read before."""
    rows = [{"run": e.name, "point": e.point, **locks.state(folder, e.name)} for e in sweep.entries]
    counts = {state: sum(row["state"] == state for row in rows) for state in locks.STATES}
    return {"folder": str(folder), "command": sweep.command, **counts, "runs": rows}


def begin(sweep: Sweep, folder: Path) -> None:
    """Writes the sweep file into the folder."""
    write_atomically(folder / SWEEP_FILE, sweep.text)


def rehearse(samples: Sequence[Options]) -> None:
    """Refuses bad options before anything is written."""
    for options in samples:
        if options.data_dir is not None:
            store.check_folder(Path(options.data_dir), "the data files")
        split, model = commands.prepare(options)
        commands.rehearse(options, model, split)


def run_alone(folder: Path, command: str, entry: Entry) -> None:
    """One run by itself, as its command would do it, unless it is finished; a failure goes into its log."""
    with locks.exclusive(folder, entry.name) as note:
        try:
            if store.claim(folder / entry.name, command, entry.options) is None:
                locks.begin(note)
                out = folder / entry.name
                commands.execute(command, entry.options, commands.single, out=out, progress=locks.watch([note]))
                note("finished")
        except Exception as failure:  # the failure of one run must not end the others
            locks.fail(note, failure)


# --- On this machine.


def run_here(sweep: Sweep, folder: Path, waiting: list[Entry]) -> None:
    """Runs that have enough in common as populations, the others one after another."""
    rehearse(sweep.rehearsed)
    begin(sweep, folder)
    names = {entry.name for entry in waiting}
    with sweep_table.live(partial(status_of, folder, sweep)):
        for chunk in _chunks(sweep, folder):
            # Checkpoints of a population fit the same members only, so finished members are trained along.
            has_checkpoints = _scratch(folder, chunk).exists()
            members = [entry for entry in chunk if has_checkpoints or entry.name in names]
            if any(entry.name in names for entry in members):
                _population(folder, sweep.command, members)


def _chunks(sweep: Sweep, folder: Path) -> list[list[Entry]]:
    """All runs, in the groups that are trained together; a run that was interrupted alone is resumed alone."""
    groups: dict[Any, list[Entry]] = {}
    for entry in sweep.entries:
        by_itself = entry.name if (folder / entry.name / store.CHECKPOINTS).exists() else ""
        key = by_itself, *opt.shared(entry.options).values()
        groups.setdefault(key, []).append(entry)
    chunks = []
    for group in groups.values():
        most = AT_ONCE["cpu" if group[0].options.device == "cpu" else "cuda"]
        chunks += [group[start : start + most] for start in range(0, len(group), most)]
    return chunks


def _scratch(folder: Path, members: Sequence[Entry]) -> Path:
    """Where these runs have their checkpoints as a population."""
    names = " ".join(entry.name for entry in members)
    return folder / POPULATIONS / hashlib.sha256(names.encode()).hexdigest()[:10]


def _population(folder: Path, command: str, members: list[Entry]) -> None:
    """Trains runs together. If one of them fails, trains the halves, until it is alone."""
    if len(members) == 1:
        return run_alone(folder, command, members[0])
    scratch, failed = _scratch(folder, members), False
    with ExitStack() as stack:
        # In the order of their names, so that two processes never wait for each other.
        notes = {name: stack.enter_context(locks.exclusive(folder, name)) for name in sorted(e.name for e in members)}
        missing = [entry for entry in members if store.claim(folder / entry.name, command, entry.options) is None]
        try:
            if missing:
                _train_and_store(
                    folder, command, members, {entry.name: notes[entry.name] for entry in missing}, scratch
                )
        except Exception:  # the run that fails alone notes why
            failed = True
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # it may hold other populations
            scratch.parent.rmdir()
    if failed:
        half = len(missing) // 2
        for part in (missing[:half], missing[half:]):
            if part:
                _population(folder, command, part)
    return None


def _train_and_store(
    folder: Path, command: str, members: list[Entry], missing: dict[str, locks.Note], scratch: Path
) -> None:
    """Trains all members, and stores those that are missing."""
    for note in missing.values():
        locks.begin(note)
    progress = locks.watch(list(missing.values()))
    outcomes, split = _train_together([entry.options for entry in members], scratch, progress)
    for entry, runs in zip(members, outcomes, strict=True):
        if entry.name in missing:
            work = partial(_store_outcomes, runs, split, f"population of {len(members)}")
            commands.execute(command, entry.options, work, out=folder / entry.name, progress=_quiet)
            missing[entry.name]("finished")


def _quiet(*_: Any) -> None:
    """A progress that does nothing."""


def _train_together(
    population: Sequence[Options], scratch: Path, progress: Progress
) -> tuple[list[list[Outcome]], Split]:
    """The outcomes of every run of a population, and the data they share."""
    first = population[0]
    with commands.one_thread() if first.data == "digits" else nullcontext():
        split, model = commands.prepare(first)
        part = commands.training_part(first, split)
        dense = _dense(population, model, split, scratch, progress) if first.dense_epochs else []
        verbs: list[Any] = [commands.procedure(options) for options in population]
        results = together(
            verbs[0].func,
            [copy.deepcopy(dense[k].model if dense else model) for k in range(len(population))],
            split if isinstance(first, Certifying) else part,
            [commands.stage(options) for options in population],
            folder=[scratch / str(k) for k in range(len(population))],
            progress=progress,
            **{name: [verb.keywords[name] for verb in verbs] for name in verbs[0].keywords},
        )
        pairs = zip(population, results, strict=True)
        pruned = [commands.measure(options, result, split) for options, result in pairs]
    return [[*dense[k : k + 1], pruned[k]] for k in range(len(population))], split


def _dense(population: Sequence[Options], model: Any, split: Split, scratch: Path, progress: Progress) -> list[Outcome]:
    """Dense training of every run; runs with equal Configs are trained once."""
    # A dense network has no gates, so their rate must not tell Configs apart.
    run_configs = [replace(commands.dense_stage(options), gate_lr=None) for options in population]
    configs = list(dict.fromkeys(run_configs))
    nets = [copy.deepcopy(model) for _ in configs]
    model_or_models, config_or_configs = (nets[0], configs[0]) if len(configs) == 1 else (nets, configs)
    path, seed = scratch / "dense.pt", population[0].seed
    part = commands.training_part(population[0], split)
    history = fit(
        model_or_models, part, config_or_configs, seed=seed, stage="dense", checkpoint=path, progress=progress
    )
    outcomes = {}
    for k, config in enumerate(configs):
        rows = [{n: v for n, v in row.items() if n != "member"} for row in history if row.get("member", 0) == k]
        outcomes[config] = Outcome("dense", 0.0, error(nets[k], split.test), nets[k], rows)
    return [outcomes[config] for config in run_configs]


def _store_outcomes(
    outcomes: list[Outcome], split: Split, route: str, options: Options, begin: Callable[[], Path], progress: Progress
) -> dict[str, Any]:
    """The work of a run whose outcomes exist already: stores them with the route by which they were made."""
    return commands.store_outcomes(options, outcomes, split, begin()) | {"route": route}
