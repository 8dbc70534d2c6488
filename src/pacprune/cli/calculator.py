"""`pacprune bound`, a calculator of bounds: what a risk, a number of examples and a KL prove about new data."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pacprune import bounds
from pacprune.bounds import montecarlo
from pacprune.bounds.numeric import check_count, rounded_up
from pacprune.cli.console import Device, Json, Seed, show, user_errors, write


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
            help="How many networks drawn from Q the risk is a mean over, each on all n examples. Chernoff's bound for "
            "that mean costs a fifth of delta."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write bound.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """A calculator of bounds on the error on new data.

    Give the error on examples that the prior did not see, as --risk or as --errors.
    """
    with user_errors():
        fraction = risk_of(risk, errors, n=n, draws=draws)
        values = calculate(fraction, n=n, kl=kl, delta=delta, draws=draws)
        write(out, "bound.json", values)
        show(values, json, table(values, draws))


def risk_of(risk: float | None, errors: int | None, *, n: int, draws: int | None) -> float:
    """The risk itself, or `errors` as a fraction of all answers."""
    if risk is not None and errors is not None:
        raise ValueError(f"--risk is {risk} and --errors is {errors}; give only one of the two")
    if risk is not None:
        return risk
    if errors is None:
        raise ValueError("neither --risk nor --errors is given; give the fraction of wrong answers, or their number")
    answers = check_count("n", n) * check_count("draws", 1 if draws is None else draws)
    if not 0 <= errors <= answers:
        sources = f"{n} examples" if draws is None else f"{draws} networks on {n} examples"
        raise ValueError(f"--errors is {errors}, but {sources} give from 0 to {answers} errors; check both numbers")
    return errors / answers


def calculate(risk: float, *, n: int, kl: float, delta: float, draws: int | None) -> dict[str, Any]:
    """Every bound; with `draws`, a share of delta pays for the risk being a mean over drawn networks (Chernoff)."""
    upper, remaining_delta = risk, delta
    if draws is not None:
        ledger = bounds.Ledger.split(delta)
        upper, remaining_delta = montecarlo.chernoff(risk, draws=draws, delta=ledger.monte_carlo), ledger.pac_bayes
    return {
        "risk": risk,
        "risk_upper": upper,
        "n": n,
        "kl": kl,
        "delta": delta,
        "seeger": bounds.seeger(upper, n=n, kl=kl, delta=remaining_delta),
        "paper": bounds.paper(upper, n=n, kl=kl, delta=remaining_delta),
        "catoni": bounds.catoni(upper, n=n, kl=kl, delta=remaining_delta),
        "held_out": bounds.clopper_pearson(round(risk * n), n=n, delta=delta),
    }


def table(values: dict[str, Any], draws: int | None) -> Table:
    """The bounds for a reader, rounded up."""
    output = Table("Bound", "Error rate on new data, at most", "What it needs")
    if draws is not None:
        output.add_row(
            "risk_upper", rounded_up(values["risk_upper"]), f"{draws} drawn networks, each on all n (Chernoff)"
        )
    output.add_row("seeger", rounded_up(values["seeger"]), "a prior that did not see the n examples")
    output.add_row("paper", rounded_up(values["paper"]), "the same; never below seeger")
    output.add_row("catoni", rounded_up(values["catoni"]), "the same; best of 20 fixed constants")
    output.add_row("held_out", rounded_up(values["held_out"]), "one fixed network with round(risk n) errors; no KL")
    return output
