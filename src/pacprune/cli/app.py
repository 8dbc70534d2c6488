"""The command line: a table of commands; a method's command comes from its row of METHODS.

A command's function is imported when that command is called: help and the calculator need no torch.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from pacprune import __version__, imports
from pacprune.methods.table import METHODS

WIDEST = 160
"""Help is as wide as the terminal, up to so many characters: longer lines are hard to read."""


@dataclass(frozen=True)
class Command:
    """A command: its line in the list of commands, the examples below its help, and where its function lies.

    The function's docstring is its help, and begins with that line. A command without a place makes a run.
    """

    summary: str
    examples: tuple[str, ...]
    place: str = ""


COMMANDS: dict[str, Command] = {
    "bound": Command(
        "A calculator of bounds on the error on new data.",
        ("pacprune bound --risk 0.1 --n 12000 --kl 500", "pacprune bound --errors 12345 --draws 10 --n 12000 --json"),
        "pacprune.cli.calculator:bound",
    ),
    "commit": Command(
        "Goes on with a sealed run, to its next seal.",
        ("pacprune pbp --commit --out runs/mine", "pacprune commit runs/mine"),
        "pacprune.cli.actions:commit",
    ),
    "certify": Command(
        "A certificate for the network of a run.",
        ("pacprune certify runs/mine", "pacprune certify runs/mine --risk drop --reference runs/dense --json"),
        "pacprune.cli.actions:certify",
    ),
    "verify": Command(
        "Checks a certificate, without data or with them.",
        ("pacprune verify runs/demo", "pacprune verify runs/demo --replay --json"),
        "pacprune.cli.actions:verify",
    ),
    "monitor": Command(
        "Watches a deployed network for a risk above its certificate.",
        ("pacprune monitor runs/mine --append counts.csv", "pacprune monitor 0.1 --append counts.csv --alpha 0.01"),
        "pacprune.cli.actions:monitor",
    ),
    "selftest": Command(
        "Tests the bounds themselves, by simulation.",
        ("pacprune selftest coverage --trials 10000", "pacprune selftest widths"),
        "pacprune.cli.actions:selftest",
    ),
    "bench": Command(
        "Measures speed, as ratios within one run.",
        ("pacprune bench step", "pacprune bench sample --device cuda --json"),
        "pacprune.cli.actions:bench",
    ),
    "reproduce": Command(
        "Makes figures of the paper, each with its CSV.",
        ("pacprune reproduce --list", "pacprune reproduce linear-model --scale smoke --json"),
        "pacprune.cli.actions:reproduce",
    ),
    "data": Command(
        "The data sets: which are here, and how to get them.",
        ("pacprune data list", "pacprune data fetch mnist", "pacprune data path"),
        "pacprune.cli.actions:data",
    ),
    "report": Command(
        "Draws figures and report of a finished run again.",
        ("pacprune report runs/demo",),
        "pacprune.cli.actions:rebuild",
    ),
    "export": Command(
        "Writes the network of a run to a file.",
        (
            "pacprune export runs/mine --format slim --out net.pt2",
            "pacprune export models/llama --format onnx --out llama.onnx",
        ),
        "pacprune.cli.actions:export",
    ),
    "profile": Command(
        "Size on disk, FLOPs and CPU latency of every form of a network.",
        ("pacprune profile runs/mine", "pacprune profile models/llama --json"),
        "pacprune.cli.actions:measure",
    ),
    "prune-lm": Command(
        "Prunes a language model of transformers, from its folder to another.",
        (
            "pacprune prune-lm --model gpt --data text --method sparsegpt --pattern 2:4",
            "pacprune prune-lm --model gpt --data text.jsonl --method pft --sparsity 0.7 --device cuda",
        ),
        "pacprune.cli.language_models:prune_lm",
    ),
    "track": Command("TensorBoard event files of a run.", ("pacprune track runs/mine",), "pacprune.cli.actions:track"),
    "sweep": Command(
        "Runs every combination of some options, once.",
        ("pacprune sweep mine.toml --ray auto", "pacprune sweep status runs/mine --json"),
        "pacprune.cli.actions:sweep",
    ),
}
"""The commands that make no run; the demo, compress and the methods make one."""


def main() -> None:
    """The program `pacprune`."""
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"pacprune: warning: {message}", err=True)
    name = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    build(name)(prog_name="pacprune")


def build(name: str | None = None) -> typer.Typer:
    """The program, built from the tables as they are now: a method that was added to METHODS has a command.

    Args:
        name: The command that is called, the only one whose flags have to be known; None builds all of them.
    """
    # Without rich markup, help is plain text: brackets stay brackets, and it can be searched.
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": WIDEST},
    )
    app.callback()(_program)
    for command_name, command in all_commands().items():
        epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in command.examples)
        function = _function(command_name, command) if name in (None, command_name) else _summary_only
        app.command(command_name, short_help=command.summary, epilog=epilog)(function)
    return app


def all_commands() -> dict[str, Command]:
    """Every command, in the order in which they are listed."""
    summary = "All procedures on small embedded data."
    runs = {
        "demo": Command(summary, ("pacprune demo", "pacprune demo --seed 1 --json")),
        "compress": Command(
            "The sparsest network that provably keeps a limit.",
            (
                "pacprune compress --max-drop 0.02",
                "pacprune compress --data mnist --model lenet5 --max-disagreement 0.01 --json",
            ),
        ),
    }
    for name, method in METHODS.items():
        if method.flags is not None:
            examples = tuple(f"pacprune {name} {flags}".rstrip() for flags in method.examples)
            runs[name] = Command(f"{method.title}: {method.sentence}.", examples)
    return runs | COMMANDS


def _function(name: str, command: Command) -> Callable[..., None]:
    """The function of a command."""
    if command.place:
        return imports.function(command.place)
    return imports.function("pacprune.cli.methods:run_command")(name)


def _summary_only() -> None:
    """Stands for a command that is listed, and not called."""


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
