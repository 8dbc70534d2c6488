"""The command line: a table from commands to functions; flags and help come from the options' dataclasses."""

import inspect
import json as jsons
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from pacprune import __version__, bounds, fetch, montecarlo
from pacprune.checkpoint import write_atomically
from pacprune.experiments import options as opt
from pacprune.experiments import plots, report, runs, store
from pacprune.experiments.demo import demo

WORK: dict[str, runs.Work] = {"demo": demo, "osp": runs.single, "pft": runs.single, "pbp": runs.single}
EXAMPLES = {
    "demo": ["pacprune demo", "pacprune demo --seed 1 --json"],
    "osp": ["pacprune osp --sparsity 0.95", "pacprune osp --data mnist --criterion snip --device cuda"],
    "pft": ["pacprune pft --sparsity 0.95", "pacprune pft --data cifar10 --device cuda --out runs/cifar"],
    "pbp": ["pacprune pbp", "pacprune pbp --data mnist --prior-fraction 0.7 --json"],
    "bound": ["pacprune bound --risk 0.1 --n 12000 --kl 500", "pacprune bound --risk 0.1 --n 12000 --draws 10 --json"],
    "data": ["pacprune data list", "pacprune data fetch mnist", "pacprune data path"],
    "report": ["pacprune report runs/demo"],
}

# Without rich markup, help is plain text: brackets stay brackets, and it can be searched.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; everything else goes to stderr.")]
_UNUSED = "Every command takes it; here nothing is random, and nothing runs on a device."
Seed = Annotated[int, typer.Option(help=_UNUSED, show_default=False)]
Device = Annotated[str, typer.Option(help=_UNUSED, show_default=False)]


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


@contextmanager
def _told() -> Iterator[None]:
    """A user's mistake becomes one sentence on stderr and exit code 2; an interrupt a hint and exit code 130."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo("pacprune: error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("pacprune: interrupted; run the same command again to go on", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> Iterator[Callable[..., None]]:
    """A function to call as (stage or file, done, total, last epoch's row): each gets a progress bar on stderr."""
    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def update(stage: str, done: int, total: int, row: dict[str, Any] | None = None) -> None:
        if not tasks:
            bar.start()  # not before, since an error message should stand alone
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, note="")
        bar.update(tasks[stage], completed=done, total=total or None, note=f"loss {row['loss']:.4f}" if row else "")

    try:
        yield update
    finally:
        if tasks:
            bar.stop()


def _print(result: Any, json: bool, *parts: Any) -> None:
    """The result as JSON, or the parts that rich prints for a reader."""
    if json:
        typer.echo(jsons.dumps(result))
    else:
        for part in parts:
            # rich would break long lines, and a path that is broken cannot be copied.
            typer.echo(part) if isinstance(part, str) else Console().print(part)


def _examples(name: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[name])


def _add(name: str, kind: type) -> None:
    """Adds the command whose flags are the fields of `kind`."""

    def call(*, out: Path | None, config: Path | None, json: bool, **flags: Any) -> None:
        with _told():
            from_file = opt.from_toml(config, name)[1] if config else {}
            options = opt.resolve(kind, from_file, {flag: value for flag, value in flags.items() if value is not None})
            with _progress() as progress:
                result = runs.execute(name, options, WORK[name], out=out, progress=progress)
            _print(result, json, *_shown(result))

    hints: dict[str, Any] = {}
    for f in fields(kind):
        presets = [
            f"{data}: {preset[f.name]}"
            for data, preset in opt.PRESETS.items()
            if preset.get(f.name, f.default) != f.default
        ]
        usual = "; ".join([] if f.default is None else [str(f.default), *presets])
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


def _shown(result: dict[str, Any]) -> Iterator[Any]:
    """The table of a run, what is proved, and where everything lies."""
    columns = report.columns(result["rows"])
    table = Table(*columns.values())
    for row in result["rows"]:
        table.add_row(*(report.cell(name, row[name]) for name in columns))
    yield table
    if "statement" in result:
        yield f"{result['statement']}\n{report.sentence(result['winner'])}"
    folder = Path(result["folder"])
    yield f"Report: {folder / 'report.html'}"
    if not list(folder.glob("figures/*.png")):
        yield plots.HINT


for _name, _kind in opt.COMMANDS.items():
    _add(_name, _kind)


@app.command(epilog=_examples("bound"))
def bound(
    risk: Annotated[float, typer.Option(help="Empirical (Gibbs) risk on the bound examples, a fraction.")],
    n: Annotated[int, typer.Option(help="Number of bound examples.")],
    kl: Annotated[float, typer.Option(help="KL(Q||P) in nats.")] = 0.0,
    delta: Annotated[float, typer.Option(help="Probability with which the bound may fail.")] = 0.05,
    draws: Annotated[
        int | None, typer.Option(help="--risk is the mean over so many networks drawn from Q; costs delta/5.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write bound.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """A calculator of bounds on the error on new data."""
    with _told():
        upper, left = risk, delta
        if draws is not None:
            ledger = bounds.Ledger.split(delta)
            upper, left = montecarlo.chernoff(risk, draws=draws, delta=ledger.monte_carlo), ledger.pac_bayes
        found = {
            "risk": risk,
            "risk_upper": upper,
            "n": n,
            "kl": kl,
            "delta": delta,
            "seeger": bounds.seeger(upper, n=n, kl=kl, delta=left),
            "paper": bounds.paper(upper, n=n, kl=kl, delta=left),
            "held_out": bounds.clopper_pearson(round(risk * n), n=n, delta=delta),
        }
        if out is not None:
            write_atomically(out / "bound.json", (jsons.dumps(found, indent=2) + "\n").encode())
        table = Table("Bound", "Error rate on new data, at most", "What it needs")
        if draws is not None:
            table.add_row("risk_upper", plots.up(upper), f"{draws} drawn networks, each on all n (Chernoff)")
        table.add_row("seeger", plots.up(found["seeger"]), "a prior that did not see the n examples")
        table.add_row("paper", plots.up(found["paper"]), "the same; never below seeger")
        table.add_row("held_out", plots.up(found["held_out"]), "one fixed network with round(risk n) errors; no KL")
        _print(found, json, table)


@app.command(epilog=_examples("data"))
def data(
    action: Annotated[str, typer.Argument(help="list, fetch or path.")],
    name: Annotated[str | None, typer.Argument(help="For fetch: mnist, fashion-mnist or cifar10.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", "--out", help="Folder of the files [$PACPRUNE_DATA, or a cache].")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """The data sets: which are here, and how to get them."""
    with _told():
        folder = str(fetch.data_folder(data_dir))
        if action == "path":
            _print({"folder": folder}, json, folder)
        elif action == "fetch":
            with _progress() as progress:
                folder = str(fetch.fetch(name or "", data_dir, progress=progress))
            _print({"name": name, "folder": folder}, json, f"{name} is complete in {folder}")
        elif action == "list":
            found = [{"name": "digits", "folder": "inside the package", "present": True, "md5_ok": True, "detail": ""}]
            found += [_state(name, data_dir) for name in fetch.SOURCES]
            table = Table("Data set", Column("Folder", overflow="fold"), "State")
            for row in found:
                table.add_row(row["name"], row["folder"], (row["detail"] or "ready") if row["present"] else "missing")
            _print({"data": found}, json, table, "To get one that is missing: pacprune data fetch NAME")
        else:
            raise ValueError(f"unknown action {action!r}; use list, fetch or path")


def _state(of: str, data_dir: Path | None) -> dict[str, Any]:
    """Whether the official files are there with the right content, and if not, what is wrong with the first bad one."""
    source, folder, detail = fetch.SOURCES[of], fetch.data_folder(data_dir), ""
    try:
        for file in source.contents:
            fetch.read(of, file, data_dir)
    except ValueError as error:
        detail = str(error)
    places = (folder / source.folder, folder)
    present = all(any((p / f).is_file() for p in places for f in (name, f"{name}.gz")) for name in source.contents)
    return {
        "name": of,
        "folder": str(folder / source.folder),
        "present": present,
        "md5_ok": not detail,
        "detail": detail,
    }


@app.command("report", epilog=_examples("report"))
def rebuild(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path | None, typer.Option(help="Write report.html and figures there instead.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Draws figures and report of a finished run again."""
    with _told():
        found = store.result(folder)
        page = str(report.write(folder, found, out=out))
        _print({"report": page, "folder": str(folder)}, json, f"Report: {page}")
