"""`pacprune prune-lm`: its flags are the fields of its options."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from pacprune.cli.console import Json, Where, default_text, show, user_errors
from pacprune.cli.progress import progress_bars
from pacprune.masking.patterns import PATTERNS
from pacprune.runs import language_models as lms

FLAGS = ("sparsity", "pattern", "scope", "exclude", "length", "steps", "batch", "lr", "calibration_tokens")


def prune_lm(
    model: Annotated[Path, typer.Option(help="Folder of a causal language model that save_pretrained wrote.")],
    data: Annotated[
        Path, typer.Option(help="Text: a file, a folder of text files, or a .jsonl file with a field text.")
    ],
    method: Annotated[
        str, typer.Option(help="; ".join(f"{name} {row.sentence}" for name, row in lms.METHODS.items()) + ".")
    ] = "sparsegpt",
    pattern: Annotated[str | None, typer.Option(help=f"Pattern of the weights: {', '.join(PATTERNS)}.")] = None,
    sparsity: Annotated[float | None, typer.Option(help="Or fraction of the weights to prune, such as 0.5.")] = None,
    scope: Annotated[
        str | None,
        typer.Option(
            help="Where the zeros of a sparsity lie: "
            + "; ".join(f"{name}, where {sentence}" for name, sentence in lms.SCOPES.items())
            + "."
            + default_text("global for gmp and pft, layer for all others")
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Pattern of names of weights to leave alone; may be given again.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Text to measure on." + default_text("a part of --data"))
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write." + default_text("runs/MODEL-METHOD"))] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that score the weights, of methods that train nothing." + default_text("128 windows")
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window." + default_text("512, or what the model takes"))
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of methods that train." + default_text(str(lms.STEPS)))
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows of a step, of methods that train." + default_text(str(lms.BATCH)))
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of methods that train." + default_text("that of the method"))
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of which windows are taken, and in which order.")] = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Prunes a language model of transformers, from its folder to another.

    Pruned are the weights of all linear layers but the vocabulary's. The documents of --data are cut into parts by the
    hashes of their names: some prune, others measure the loss, and those kept for certificates and tests are not read.
    To a sparsity, gmp and pft distribute zeros over layers by themselves; any other method prunes all layers alike.
    """
    with user_errors(FLAGS):
        options = lms.Options(
            model=model,
            data=data,
            method=method,
            sparsity=sparsity,
            pattern=pattern,
            scope=scope,
            exclude=tuple(exclude or ()),
            validation=validation,
            calibration_tokens=calibration_tokens,
            length=length,
            steps=steps,
            batch=batch,
            lr=lr,
            seed=seed,
            device=device,
        )
        folder = Path("runs") / f"{model.resolve().name}-{method}" if out is None else out
        with progress_bars() as progress:
            result = lms.prune_lm(options, out=folder, progress=progress)
        show(
            result, json, table_of(result), *(f"Note: {note}" for note in result["notes"]), f"Model: {result['folder']}"
        )


def table_of(result: dict[str, Any]) -> Table:
    """Sparsity, and the loss before and after."""
    table = Table("", Column("Before", justify="right"), Column("After", justify="right"))
    table.add_row("Weights pruned", "", f"{result['zeros']:,} of {result['prunable']:,} ({result['sparsity']:.2%})")
    for name, unit in (("loss_per_token", "token"), ("loss_per_byte", "byte")):
        table.add_row(f"Loss per {unit}, nats", *(f"{result[name][when]:.4f}" for when in ("before", "after")))
    measured = result["held_out"]
    table.caption = f"Measured on {measured['tokens']:,} tokens of {measured['documents']:,} other documents"
    return table
