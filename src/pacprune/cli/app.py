"""The command line: a table from commands to functions; flags and help come from the options' dataclasses."""

import inspect
import warnings
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from pacprune import __version__
from pacprune.bench import coverage, deployment
from pacprune.bench import subjects as benchmark
from pacprune.certification import audit
from pacprune.cli import calculator
from pacprune.cli.console import Device, Json, Seed, Where, data_state, show, told, write
from pacprune.cli.progress import progress_bars
from pacprune.data import datasets, download
from pacprune.data.datasets import DATA_SETS
from pacprune.distributed import ranks
from pacprune.paper import frame, recipes
from pacprune.runs import cluster, commands, events, locks, report, store
from pacprune.runs import options as opt
from pacprune.runs import sweep as sweeps
from pacprune.runs.demo import demo

WORK: dict[str, commands.Work] = dict.fromkeys(opt.COMMANDS, commands.single) | {"demo": demo}
PRUNING = ", ".join(name for name, kind in opt.COMMANDS.items() if issubclass(kind, opt.Pruning))
EXAMPLES = {
    "demo": ["pacprune demo", "pacprune demo --seed 1 --json"],
    "certify": ["pacprune certify runs/mine", "pacprune certify runs/mine --certified 3 --json"],
    "verify": ["pacprune verify runs/demo", "pacprune verify runs/demo --replay --json"],
    "selftest": ["pacprune selftest coverage --trials 10000"],
    "reproduce": ["pacprune reproduce linear-model", "pacprune reproduce linear-model --scale smoke --json"],
    "bench": ["pacprune bench step", "pacprune bench sample --device cuda --json"],
    "osp": ["pacprune osp --sparsity 0.95", "pacprune osp --data mnist --criterion snip --device cuda"],
    "pft": ["pacprune pft --sparsity 0.95", "pacprune pft --data cifar10 --device cuda --out runs/cifar"],
    "gmp": ["pacprune gmp --sparsity 0.95", "pacprune gmp --data fashion-mnist --device cuda"],
    "dpf": ["pacprune dpf --sparsity 0.9"],
    "imp": ["pacprune imp --sparsity 0.95 --rounds 4"],
    "l0": ["pacprune l0 --sparsity 0.95"],
    "pbp": ["pacprune pbp", "pacprune pbp --data mnist --prior-fraction 0.7 --json"],
    "bound": [
        "pacprune bound --risk 0.1 --n 12000 --kl 500",
        "pacprune bound --errors 12345 --draws 10 --n 12000 --json",
    ],
    "data": ["pacprune data list", "pacprune data fetch mnist", "pacprune data path"],
    "report": ["pacprune report runs/demo"],
    "export": ["pacprune export runs/mine --format onnx", "pacprune export runs/mine --format slim --out net.pt2"],
    "profile": ["pacprune profile runs/mine", "pacprune profile runs/mine --json"],
    "track": ["pacprune track runs/mine"],
    "sweep": ["pacprune sweep mine.toml --ray auto", "pacprune sweep status runs/mine --json"],
}

# Without rich markup, help is plain text: brackets stay brackets, and it can be searched.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The program `pacprune`."""
    warnings.showwarning = lambda message, *rest, **more: typer.echo(f"pacprune: warning: {message}", err=True)
    app(prog_name="pacprune")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pacprune {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version)] = False,
) -> None:
    """Prune a network to an exact sparsity, and prove how good the pruned network is.

    Begin with: pacprune demo
    """


def _examples(name: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[name])


def _add(name: str, kind: type) -> None:
    """Adds the command whose flags are the fields of `kind`."""

    def call(*, out: Path | None, config: Path | None, json: bool, **flags: Any) -> None:
        with told():
            from_file = opt.from_toml(config, name)[1] if config else {}
            options = opt.resolve(kind, from_file, {flag: value for flag, value in flags.items() if value is not None})
            with ranks.joined(options.device) as here:  # under torchrun, rank 0 speaks for all
                chief = ranks.rank() == 0
                options = replace(options, device=str(here))
                with progress_bars() if chief else nullcontext(lambda *_: None) as progress:
                    result = commands.execute(name, options, WORK[name], out=out, progress=progress)
            if chief:
                show(result, json, *report.shown(result))

    hints: dict[str, Any] = {}
    for f in fields(kind):
        presets = [
            f"{name}: {usual[f.name]}"
            for name, usual in ((name, opt.preset(kind, name)) for name in DATA_SETS)
            if usual.get(f.name, f.default) != f.default
        ]
        usual = "; ".join([*([] if f.default is None else [str(f.default)]), *presets])
        text = f.metadata["help"] + (f" [{usual}]" if usual else "")
        # None stands for "not given", so that a config file can speak first.
        hints[f.name] = Annotated[opt.types_of(kind)[f.name] | None, typer.Option(help=text)]
    hints["config"] = Annotated[Path | None, typer.Option(help="TOML file of these options; flags override it.")]
    where = f"runs/{name}" if name == "demo" else f"runs/{name}-HASH"
    hints["out"] = Annotated[Path | None, typer.Option(help=f"Run folder [{where}].")]
    hints["json"] = Json
    kinds = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature(
        [inspect.Parameter(n, kinds, default=False if n == "json" else None, annotation=h) for n, h in hints.items()]
    )
    call.__annotations__, call.__doc__ = hints, kind.__doc__
    app.command(name, epilog=_examples(name))(call)


for _name, _kind in opt.COMMANDS.items():
    _add(_name, _kind)


@app.command(epilog=_examples("bound"))
def bound(
    n: Annotated[int, typer.Option(help="Number of bound examples.")],
    risk: Annotated[float | None, typer.Option(help="Empirical (Gibbs) risk on the n examples, a fraction.")] = None,
    errors: Annotated[
        int | None,
        typer.Option(help="Instead of --risk: errors on the n examples; with --draws, those of all draws."),
    ] = None,
    kl: Annotated[float, typer.Option(help="KL(Q||P) in nats.")] = 0.0,
    delta: Annotated[float, typer.Option(help="Probability with which the bound may fail.")] = 0.05,
    draws: Annotated[
        int | None,
        typer.Option(
            help="The risk is the mean over so many networks drawn from Q, each on all n examples: costs delta/5, by "
            "Chernoff's bound (a mean alone does not do for the tighter betting bound of pbp)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write bound.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """A calculator of bounds on the error on new data."""
    with told():
        fraction = calculator.risk_of(risk, errors, n=n, draws=draws)
        found = calculator.calculate(fraction, n=n, kl=kl, delta=delta, draws=draws)
        write(out, "bound.json", found)
        show(found, json, calculator.table(found, draws))


@app.command(epilog=_examples("certify"))
def certify(
    run: Annotated[Path, typer.Argument(help=f"Folder of a finished run, with --train-on prior, of {PRUNING}.")],
    delta: Annotated[float, typer.Option(help="Probability with which the certificate may fail.")] = 0.05,
    certified: Annotated[int, typer.Option(help="Networks among which you may choose; each pays delta / so many.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the certificate [RUN/certificate].")] = None,
    seed: Seed = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """A certificate for the network of a run."""
    with told():
        found = commands.certify(run, delta=delta, certified=certified, device=device, out=out)
        place = str(run / store.CERTIFICATE if out is None else out)
        numbers = {name: getattr(found, name) for name in ("bound", "n", "risk", "sparsity", "statement")}
        show({"folder": place, "delta": delta, **numbers}, json, found.statement, f"Certificate: {place}")


@app.command(epilog=_examples("verify"))
def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of a certificate, or of its run; or its certificate.json.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data files; implies --recount.")] = None,
    recount: Annotated[
        bool, typer.Option("--recount", help="With the data: make the split again, count the networks' errors again.")
    ] = False,
    replay: Annotated[bool, typer.Option("--replay", help="The same, and draw fresh networks from P and Q.")] = False,
    model: Annotated[
        str | None, typer.Option(help="What makes a network that is not pacprune's own: package.module:factory.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write verify.json to.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fresh draws; random unless given.")] = None,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Checks a certificate, without data or with them.

    Hashes, the KL and every bound are computed again from the files; what is taken on trust is named. Exit 0: VALID,
    1: INVALID, with the first rule that fails, 2: it cannot be read.
    """
    with told():
        commands.check_device(device)
        place = store.certificate(folder)
        if data_dir is not None:
            store.check_folder(data_dir, "the data files")
        given = commands.own_model(model) if model else None
        with progress_bars() as progress:
            found = audit.verify(
                place,
                model=given,
                data_dir=data_dir,
                recount=recount,
                replay=replay,
                seed=seed,
                device=device,
                progress=progress,
            )
        write(out, "verify.json", asdict(found))
        show(asdict(found), json, str(found))
    if not found.valid:
        raise typer.Exit(1)


@app.command(epilog=_examples("selftest"))
def selftest(
    what: Annotated[str, typer.Argument(help="coverage: how often every bound fails where the truth is known.")],
    trials: Annotated[int, typer.Option(help=f"Samples per population, at least {coverage.FEWEST}.")] = 1000,
    delta: Annotated[float, typer.Option(help="Probability with which a bound may fail.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder to write coverage.json to.")] = None,
    json: Json = False,
) -> None:
    """Tests the bounds themselves, by simulation.

    Exit 0: no bound exceeds its delta beyond the interval, and every planted fault is caught; otherwise 1.
    """
    with told():
        if what != "coverage":
            raise ValueError(f"unknown self-test {what!r}; use coverage")
        with progress_bars() as progress:
            rows = coverage.run(trials, seed=seed, delta=delta, progress=progress)
        ok = all(row.ok for row in rows)
        result = {"ok": ok, "trials": trials, "seed": seed, "delta": delta, "rows": [asdict(row) for row in rows]}
        write(out, "coverage.json", result)
        show(result, json, *coverage.lines(rows))
    if not ok:
        raise typer.Exit(1)


@app.command(epilog=_examples("bench"))
def bench(
    subject: Annotated[str, typer.Argument(help=f"{', '.join(benchmark.SUBJECTS)}.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, which only show that it runs.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On a CPU: the slow sizes as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write bench-SUBJECT.json to.")] = None,
    seed: Seed = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Measures speed, as ratios within one run."""
    with told():
        with progress_bars() as progress:
            found = benchmark.run(subject, device=device, smoke=smoke, full=full, progress=progress)
        write(out, f"bench-{subject}.json", found)
        show(found, json, *benchmark.shown(found))


@app.command(epilog=_examples("reproduce"))
def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join(recipes.RECIPES)}.")],
    scale: Annotated[str, typer.Option(help=f"How much is computed: {', '.join(frame.SCALES)}.")] = "reduced",
    out: Annotated[Path | None, typer.Option(help="Folder of the figures and CSVs [runs/NAME-SCALE[-ONLY]].")] = None,
    only: Annotated[
        str | None,
        typer.Option(help=f"One setting of {', '.join(recipes.PARTED)}; an unknown name lists them [all of them]."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data files [$PACPRUNE_DATA, or a cache].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything; each is a fresh set of repetitions.")] = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Makes figures of the paper, each with its CSV."""
    with told():
        with progress_bars() as progress:
            found = recipes.run(
                name, scale=scale, only=only, out=out, seed=seed, device=device, data_dir=data_dir, progress=progress
            )
        show(found, json, *recipes.shown(found))


@app.command(epilog=_examples("data"))
def data(
    action: Annotated[str, typer.Argument(help="list, fetch or path.")],
    name: Annotated[str | None, typer.Argument(help=f"For fetch and path: {', '.join(datasets.SOURCES)}.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", "--out", help="Folder of the files [$PACPRUNE_DATA, or a cache].")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """The data sets: which are here, and how to get them."""
    with told():
        if name not in datasets.SOURCES and (name or action == "fetch"):
            raise ValueError(
                f"the data set for `pacprune data {action}` is {repr(name) if name else 'missing'}; "
                f"use one of {', '.join(datasets.SOURCES)} (the digits come with the package)"
            )
        if action == "path":
            folder = str(download.data_folder(data_dir) / (datasets.SOURCES[name].folder if name else ""))
            show({"folder": folder}, json, folder)
        elif action == "fetch":
            with progress_bars() as progress:
                folder = str(datasets.fetch(name or "", data_dir, progress=progress))
            show({"name": name, "folder": folder}, json, f"{name} is complete in {folder}")
        elif action == "list":
            found = [{"name": "digits", "folder": "inside the package", "present": True, "usable": True, "detail": ""}]
            found += [data_state(name, data_dir) for name in datasets.SOURCES]
            table = Table("Data set", Column("Folder", overflow="fold"), "State")
            for row in found:
                table.add_row(row["name"], row["folder"], (row["detail"] or "ready") if row["present"] else "missing")
            show({"data": found}, json, table, "To get one that is missing: pacprune data fetch NAME")
        else:
            raise ValueError(f"unknown action {action!r}; use list, fetch or path")


@app.command("report", epilog=_examples("report"))
def rebuild(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path | None, typer.Option(help="Write report.html and figures there instead.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Draws figures and report of a finished run again."""
    with told():
        found = store.result(folder)
        page = str(report.write(folder, found, out=out))
        show({"report": page, "folder": str(folder)}, json, f"Report: {page}")


@app.command(epilog=_examples("export"))
def export(
    run: Annotated[Path, typer.Argument(help=f"Folder of a finished run of {PRUNING}, pbp.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(deployment.FILES)}.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="File to write [in RUN, named by the format].")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Writes the network of a run to a file."""
    with told():
        found = deployment.export(run, format=format, out=out)
        show(found, json, found["said"])


@app.command("profile", epilog=_examples("profile"))
def measure(
    run: Annotated[Path, typer.Argument(help=f"Folder of a finished run of {PRUNING}, pbp.")],
    seconds: Annotated[float, typer.Option(help="Time to measure, per batch size.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Folder to write profile.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Size on disk, FLOPs and CPU latency of every form of a network."""
    with told():
        with progress_bars() as progress:
            found = deployment.profile(run, seconds=seconds, progress=progress)
        write(out, "profile.json", found)
        show(found, json, *deployment.shown(found))


@app.command(epilog=_examples("track"))
def track(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or going.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the event files [RUN/events].")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """TensorBoard event files of a run."""
    with told():
        place = str(events.write(run, out=out))
        show({"run": str(run), "events": place}, json, f"Events: tensorboard --logdir {place}")


@app.command(epilog=_examples("sweep"))
def sweep(
    what: Annotated[str, typer.Argument(help="TOML file: a command, its options, a [grid] of lists; or: status.")],
    folder: Annotated[Path | None, typer.Argument(help="For status: the folder of a sweep.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run on a Ray cluster: auto, or HOST:PORT of its head node.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs' folders [runs/FILE without .toml].")] = None,
    seed: Seed = 0,
    device: Annotated[str | None, typer.Option(help="Where to compute, instead of what the file says.")] = None,
    json: Json = False,
) -> None:
    """Runs every combination of some options, once.

    Finished runs are skipped, those that were broken off go on. Runs of one network and seed are trained together; with
    --ray, each is a task of its own. Exit 0: none failed, 1: some did, and the table says why, 2: nothing was begun.
    """
    with told():
        if what == "status":
            if folder is None:
                raise ValueError("the folder for `pacprune sweep status` is missing; name one, such as runs/mine")
            found = sweeps.status(folder)
        elif folder is not None:
            raise ValueError(f"there is a second argument, {folder}, after {what}; give the runs' folder as --out")
        else:
            found = sweeps.run(Path(what), out=out, device=device, work=None if ray is None else cluster.work_at(ray))
        show(found, json, locks.table(found), f"Runs: {found['folder']}")
    if found["failed"]:
        raise typer.Exit(1)
