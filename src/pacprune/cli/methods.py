"""The commands that make a run, the demo and the rows of METHODS: their flags are the fields of their options."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pacprune.cli import actions
from pacprune.cli.console import Json, default_text, show, user_errors
from pacprune.cli.progress import progress_bars
from pacprune.data.datasets import DATA_SETS
from pacprune.distributed import ranks
from pacprune.runs import commands, report
from pacprune.runs import options as opt
from pacprune.runs.compressing import compress
from pacprune.runs.demo import demo

WORK: dict[str, commands.Work] = {"demo": demo, "compress": compress}
"""What a command does; all others run one method."""


def run_command(name: str) -> Callable[..., None]:
    """The command that makes a run: its flags are the fields of its options."""
    kind = opt.COMMANDS[name]
    work = WORK.get(name, commands.single)

    def call(*, out: Path | None, config: Path | None, json: bool, **flags: Any) -> None:
        with user_errors():  # of a file, whose keys are no flags
            from_file = opt.from_toml(config, name)[1] if config else {}
        with user_errors(flags):
            options = opt.resolve(kind, from_file, {flag: value for flag, value in flags.items() if value is not None})
            with ranks.joined(options.device) as device:  # under torchrun, only rank 0 prints
                is_rank0 = ranks.rank() == 0
                options = replace(options, device=str(device))
                with progress_bars() if is_rank0 else nullcontext(lambda *_: None) as progress:
                    result = commands.execute(name, options, work, out=out, progress=progress)
            if is_rank0:
                lines = actions.sealed_lines(result) if "seals" in result else report.console_output(result)
                show(result, json, *lines)
        if result.get("passed") == 0:  # of compress: no network keeps the limit
            raise typer.Exit(1)

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
