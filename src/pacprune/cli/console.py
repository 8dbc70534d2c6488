"""What all commands share: flags, errors as one sentence, results as JSON or for a reader."""

import json as jsons
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pacprune.certification.verify import printable
from pacprune.files import write_atomically

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; everything else goes to stderr.")]
_UNUSED = "Accepted by every command; not used here."
Seed = Annotated[int, typer.Option(help=_UNUSED, show_default=False)]
Device = Annotated[str, typer.Option(help=_UNUSED, show_default=False)]
Where = Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")]


def default_text(default: str) -> str:
    """The end of a help text, as typer itself writes a default; for those that it cannot know."""
    return f"  [default: {default}]" if default else ""


DATA_DIR = "Folder of the data files." + default_text("$PACPRUNE_DATA, or a cache")


def as_flags(message: str, names: Iterable[str]) -> str:
    """A message of the library for a reader of flags: where it names a parameter, it names the flag."""
    for name in names:
        flag = "--" + name.replace("_", "-")
        message = re.sub(rf"(?<![\w.]){name}= \(({flag}\b[^)]*)\)", r"\1", message)  # which names both
        message = re.sub(
            rf"(?<![\w.-]){name}=(\"[^\"]*\"|'[^']*'|[\w.:]+)?",
            lambda match, flag=flag: flag if match[1] in (None, "True") else f"{flag} {match[1]}",
            message,
        )
        if "_" in name:  # which is no word of a sentence
            message = re.sub(rf"(?<![\w.'\"/=-]){name}(?![\w.'\"/=(])", flag, message)
        message = re.sub(rf"^{name}(?= (?:is|has|are)\b)", flag, message)
    return message


@contextmanager
def user_errors(flags: Iterable[str] = ()) -> Iterator[None]:
    """A user's mistake becomes one sentence on stderr and exit code 2; an interrupt a hint and exit code 130.

    The sentence, and that of a warning, has flags where those of the library have parameters of these names.
    """
    names, show_warning = list(flags), warnings.showwarning

    def in_flags(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        show_warning(category(as_flags(str(message), names)), category, *place, **more)

    warnings.showwarning = in_flags
    try:
        yield
    except (ValueError, OSError) as error:
        message = as_flags(str(error), names) if isinstance(error, ValueError) else str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename} cannot be read or written ({error.strerror or error}); choose another place"
        typer.echo("pacprune: error: " + printable(" ".join(message.split())), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("pacprune: interrupted; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    finally:
        warnings.showwarning = show_warning


def show(result: Any, json: bool, *parts: Any) -> None:
    """Prints the result as JSON, or the parts for a reader: text, and tables by rich."""
    if json:
        typer.echo(jsons.dumps(result))
    else:
        for part in parts:
            # rich would break long lines, and a path that is broken cannot be copied.
            typer.echo(part) if isinstance(part, str) else Console().print(part)


def write(out: Path | None, name: str, result: Any) -> None:
    """Writes the result as a JSON file into the folder `out`, unless it is None."""
    if out is not None:
        write_atomically(out / name, (jsons.dumps(result, indent=2) + "\n").encode())
