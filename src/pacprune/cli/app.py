"""The command line: a table of commands; a method's command comes from its row of METHODS."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pacprune import __version__
from pacprune.cli import actions
from pacprune.cli.console import Json, default_text, show, user_errors
from pacprune.cli.progress import progress_bars
from pacprune.data.datasets import DATA_SETS
from pacprune.distributed import ranks
from pacprune.methods.table import METHODS
from pacprune.runs import commands, report
from pacprune.runs import options as opt
from pacprune.runs.demo import demo


@dataclass(frozen=True)
class Command:
    """A command: its function, whose docstring is its help, and the examples below that."""

    function: Callable[..., None]
    examples: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "bound": Command(
        actions.bound,
        ("pacprune bound --risk 0.1 --n 12000 --kl 500", "pacprune bound --errors 12345 --draws 10 --n 12000 --json"),
    ),
    "commit": Command(actions.commit, ("pacprune pbp --commit --out runs/mine", "pacprune commit runs/mine")),
    "certify": Command(
        actions.certify, ("pacprune certify runs/mine", "pacprune certify runs/mine --certified 3 --json")
    ),
    "verify": Command(actions.verify, ("pacprune verify runs/demo", "pacprune verify runs/demo --replay --json")),
    "monitor": Command(
        actions.monitor,
        ("pacprune monitor runs/mine --append counts.csv", "pacprune monitor 0.1 --append counts.csv --alpha 0.01"),
    ),
    "selftest": Command(actions.selftest, ("pacprune selftest coverage --trials 10000",)),
    "bench": Command(actions.bench, ("pacprune bench step", "pacprune bench sample --device cuda --json")),
    "reproduce": Command(
        actions.reproduce, ("pacprune reproduce linear-model", "pacprune reproduce linear-model --scale smoke --json")
    ),
    "data": Command(actions.data, ("pacprune data list", "pacprune data fetch mnist", "pacprune data path")),
    "report": Command(actions.rebuild, ("pacprune report runs/demo",)),
    "export": Command(
        actions.export,
        ("pacprune export runs/mine --format onnx", "pacprune export runs/mine --format slim --out net.pt2"),
    ),
    "profile": Command(actions.measure, ("pacprune profile runs/mine", "pacprune profile runs/mine --json")),
    "track": Command(actions.track, ("pacprune track runs/mine",)),
    "sweep": Command(actions.sweep, ("pacprune sweep mine.toml --ray auto", "pacprune sweep status runs/mine --json")),
}
"""The commands that make no run; the demo and the methods make one."""


def main() -> None:
    """The program `pacprune`."""
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"pacprune: warning: {message}", err=True)
    build()(prog_name="pacprune")


def build() -> typer.Typer:
    """The program, built from the tables as they are now: a method that was added to METHODS has a command."""
    # Without rich markup, help is plain text: brackets stay brackets, and it can be searched.
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_program)
    for name, command in all_commands().items():
        epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in command.examples)
        app.command(name, epilog=epilog)(command.function)
    return app


def all_commands() -> dict[str, Command]:
    """Every command, in the order in which they are listed."""
    runs = {
        name: Command(run_command(name), tuple(f"pacprune {name} {flags}".rstrip() for flags in METHODS[name].examples))
        for name in opt.COMMANDS
        if name in METHODS
    }
    return {"demo": Command(run_command("demo"), ("pacprune demo", "pacprune demo --seed 1 --json"))} | runs | COMMANDS


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"pacprune {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version)] = False,
) -> None:
    """Prune a network to an exact sparsity, and prove how good the pruned network is.

    Begin with: pacprune demo
    """


def run_command(name: str) -> Callable[..., None]:
    """The command that makes a run: its flags are the fields of its options."""
    kind = opt.COMMANDS[name]
    work: commands.Work = demo if name == "demo" else commands.single

    def call(*, out: Path | None, config: Path | None, json: bool, **flags: Any) -> None:
        with user_errors():
            from_file = opt.from_toml(config, name)[1] if config else {}
            options = opt.resolve(kind, from_file, {flag: value for flag, value in flags.items() if value is not None})
            with ranks.joined(options.device) as device:  # under torchrun, only rank 0 prints
                is_rank0 = ranks.rank() == 0
                options = replace(options, device=str(device))
                with progress_bars() if is_rank0 else nullcontext(lambda *_: None) as progress:
                    result = commands.execute(name, options, work, out=out, progress=progress)
            if is_rank0:
                lines = actions.sealed_lines(result) if "seals" in result else report.console_output(result)
                show(result, json, *lines)

    # None means that the flag is absent, so that the config file's value counts.
    hints: dict[str, Any] = {
        f.name: Annotated[opt.types_of(kind)[f.name] | None, typer.Option(help=_help(kind, f))] for f in fields(kind)
    }
    hints["config"] = Annotated[Path | None, typer.Option(help="TOML file of these options; flags override it.")]
    folder = f"runs/{name}" if name == "demo" else f"runs/{name}-HASH"
    hints["out"] = Annotated[Path | None, typer.Option(help=f"Run folder.{default_text(folder)}")]
    hints["json"] = Json
    call.__signature__ = inspect.Signature(
        [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False if n == "json" else None, annotation=h)
            for n, h in hints.items()
        ]
    )
    call.__annotations__, call.__doc__ = hints, kind.__doc__
    return call


def _help(kind: type, option: Field[Any]) -> str:
    """The help of an option: its sentence, its default, and the presets that differ from it."""
    presets = {name: opt.preset(kind, name).get(option.name, option.default) for name in DATA_SETS}
    defaults = [option.metadata["unset"] if option.default is None else _word(option.default)]
    defaults += [f"{name}: {_word(value)}" for name, value in presets.items() if value != option.default]
    return option.metadata["help"] + default_text("; ".join(filter(None, defaults)))


def _word(value: Any) -> str:
    """A default as a reader says it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
