"""The commands that run no method: a function each, whose parameters are its flags."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from pacprune.bench import coverage, deployment, widths
from pacprune.bench import subjects as benchmark
from pacprune.certification import audit, page
from pacprune.certification.risks import RISKS
from pacprune.cli.console import (
    DATA_DIR,
    Device,
    Json,
    Seed,
    Where,
    default_text,
    show,
    user_errors,
    write,
)
from pacprune.cli.progress import progress_bars
from pacprune.data import datasets, download
from pacprune.data.own import FORMS
from pacprune.deploy.export import FORMATS
from pacprune.files import write_atomically
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.paper import recipes
from pacprune.runs import cluster, commands, events, report, store, sweep_table, watching
from pacprune.runs import sweep as sweeps

PRUNING = ", ".join(name for name, method in pruning_methods().items() if method.flags is not None)
WITH_NETWORK = ", ".join(name for name, method in METHODS.items() if method.flags is not None)

NETWORK = (
    f"Folder of a finished run of {WITH_NETWORK}; or one that save_pretrained of transformers wrote, with a text model."
)

OwnModel = Annotated[
    str | None, typer.Option(help="The run's network, if it is not one of pacprune: package.module:factory.")
]
OwnData = Annotated[
    str | None, typer.Option(help="The run's data, if code of your own loads them: package.module:loader.")
]


def commit(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was begun by pacprune pbp --commit.")],
    model: OwnModel = None,
    data: OwnData = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write seals.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Goes on with a sealed run, to its next seal.

    pacprune pbp --commit trains the prior and seals it with the split and the plan of the certificate; this command
    trains Q and seals that; pacprune certify --beacon then draws networks by randomness that is younger than the seals.
    """
    with user_errors():
        with progress_bars() as progress:
            result = commands.commit(run, progress=progress, model=model, data=data)
        write(out, "seals.json", result)
        show(result, json, *sealed_lines(result))


def sealed_lines(result: dict[str, Any]) -> list[str]:
    """The seals of a run, and what to do next."""
    folder, (first, *second) = result["folder"], result["seals"]
    lines = [f"First seal, of prior, split and plan: {first}", *(f"Second seal, of Q: {seal}" for seal in second)]
    if second:
        wait = f"Publish it, and wait for {result['source']}."
        return [*lines, wait, f"Then, with its hexadecimal value: pacprune certify {folder} --beacon VALUE"]
    return [*lines, f"Publish it where others see all that you publish, then: pacprune commit {folder}"]


def certify(
    run: Annotated[Path, typer.Argument(help=f"Folder of a finished run, with --train-on prior, of {PRUNING}.")],
    risk: Annotated[
        str, typer.Option(help=f"What to bound: {', '.join(RISKS)}, or your own loss as package.module:function.")
    ] = "error",
    reference: Annotated[
        Path | None,
        typer.Option(help="For drop and disagreement: run of the network to compare with, such as one of sparsity 0."),
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="'class' for bounds of all classes at once, each at its part of delta.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability with which the certificate may fail.")] = 0.05,
    certified: Annotated[
        int, typer.Option(help="How many networks you certify to choose among; each pays its part of delta.")
    ] = 1,
    declare: Annotated[
        str | None, typer.Option(help="What else shaped the network, in one sentence, which is quoted.")
    ] = None,
    beacon: Annotated[
        str | None,
        typer.Option(help="For a sealed run of pbp: the public randomness after its second seal, in hexadecimal."),
    ] = None,
    model: OwnModel = None,
    reference_model: Annotated[
        str | None, typer.Option(help="The network of the reference's run, if that is of another factory than --model.")
    ] = None,
    data: OwnData = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the certificate." + default_text("RUN/certificate"))
    ] = None,
    seed: Seed = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """A certificate for the network of a run.

    Counts the errors of the network on the training data that it was not trained on, and bounds its error on new data
    (Clopper-Pearson), or another risk. Runs of pbp have a certificate already, unless they are sealed.
    """
    with user_errors(("risk", "reference", "groups", "delta", "certified", "declare", "model", "data")):
        code: dict[str, Any] = {"model": model, "data": data}
        if beacon is None:
            what = {"risk": risk, "reference": reference, "groups": groups}
            options = {"delta": delta, "certified": certified, "declare": declare, "device": device, "out": out}
            certificate = commands.certify(run, **what, **options, **code, reference_model=reference_model)
        else:
            with progress_bars() as progress:
                certificate = commands.certify_sealed(run, beacon=beacon, progress=progress, **code)
        place = str(run / store.CERTIFICATE if out is None or beacon is not None else out)
        numbers = {name: getattr(certificate, name) for name in ("bound", "n", "risk", "sparsity", "statement")}
        lines = [certificate.statement] + ([] if certificate.tries is None else [str(certificate.tries)])
        show({"folder": place, "delta": certificate.ledger.delta, **numbers}, json, *lines, f"Certificate: {place}")


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of a certificate, or of its run; or its certificate.json.")],
    data: Annotated[
        str | None, typer.Option(help=f"The data, if they are not one of pacprune: {FORMS}; implies --recount.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data files; implies --recount.")] = None,
    recount: Annotated[
        bool, typer.Option("--recount", help="With the data: make the split again, count the networks' errors again.")
    ] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="The same, and make draws of P and Q: the issuer's again, and fresh ones.")
    ] = False,
    draws: Annotated[
        int, typer.Option(help="How many draws --replay makes of each kind; of the issuer's, at most all.")
    ] = 2000,
    seal: Annotated[
        list[str] | None, typer.Option(help="A seal that was published before; may be given twice.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Function that makes the network, if it is not one of pacprune: package.module:factory."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The same for the reference network, if it is of another shape.")
    ] = None,
    risk: Annotated[
        str | None, typer.Option(help="The loss of a certificate about the issuer's own: package.module:function.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write: a verifier for the browser, with this certificate inside.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write verify.json to.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of what is drawn here." + default_text("random"))] = None,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Checks a certificate, without data or with them.

    Hashes, the KL and every bound are computed again from the files; what is taken on trust is named. The verdict names
    its level: 1, the arithmetic alone; 2, with --recount; 3, with --replay. Exit 0: VALID, 1: INVALID, with the first
    rule that fails, 2: it cannot be read.
    """
    with user_errors(("data_dir", "risk", "model", "reference", "draws", "seed")):
        commands.check_device(device)
        place = store.certificate(folder)
        if data_dir is not None:
            store.check_folder(data_dir, "the data files")
        with progress_bars() as progress:
            report = audit.verify(
                place,
                data=data,
                model=model,
                reference=reference,
                risk=None if risk is None else commands.loss_of(risk),
                data_dir=data_dir,
                recount=recount,
                replay=replay,
                draws=draws,
                seals=tuple(seal or ()),
                seed=seed,
                device=device,
                progress=progress,
            )
        report = commands.with_packed(report, place)
        if replay and report.valid and report.level < 3:
            finding = "a held-out certificate has no draws, so that level 2 is the highest"
            report = replace(report, findings=(*report.findings, finding))
        if html is not None:
            write_atomically(html, page.embedded(place).encode())
        content = asdict(report) | {"verdict": report.verdict}
        write(out, "verify.json", content)
        show(content, json, *([] if html is None else [f"Page: {html}"]), str(report))
    if not report.valid:
        raise typer.Exit(1)


def monitor(
    certificate: Annotated[
        str, typer.Argument(help="Folder of a certificate, or of its run; or a limit, such as 0.1.")
    ],
    append: Annotated[
        Path | None,
        typer.Option(help="CSV file of new examples: the columns example (1, 2, ...) and loss (from 0 to 1)."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Probability with which there is ever a false alarm.")] = 0.05,
    out: Annotated[Path, typer.Option(help=f"Folder of {watching.STATE}, its figure and the CSV behind that.")] = Path(
        "runs/monitor"
    ),
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Watches a deployed network for a risk above its certificate.

    Counts new examples, each once and in their order. Without --append, says what is known so far. Exit 0: quiet, 1:
    ALARM, 2: nothing was counted.
    """
    with user_errors():
        result = watching.watch(certificate, counts=append, alpha=alpha, out=out)
        show(result, json, result["statement"], *([] if result["course"] is None else [f"Course: {result['course']}"]))
    if result["alarm_at"] is not None:
        raise typer.Exit(1)


def selftest(
    what: Annotated[
        str,
        typer.Argument(
            help="coverage: how often every bound fails where the truth is known; widths: how tight four rules are."
        ),
    ],
    trials: Annotated[int, typer.Option(help=f"Samples per population, at least {coverage.FEWEST}.")] = 1000,
    delta: Annotated[float, typer.Option(help="Probability with which a bound may fail.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder to write coverage.json or widths.json to.")] = None,
    json: Json = False,
) -> None:
    """Tests the bounds themselves, by simulation.

    Exit 0: no bound exceeds its delta beyond the interval, and every planted fault is caught; otherwise 1.
    """
    with user_errors():
        if what == "widths":
            table = widths.table(seed=seed, delta=delta)
            write(out, "widths.json", table)
            show(table, json, *widths.lines(table))
            return
        if what != "coverage":
            raise ValueError(f"unknown self-test {what!r}; use coverage or widths")
        with progress_bars() as progress:
            rows = coverage.run(trials, seed=seed, delta=delta, progress=progress)
        ok = all(row.ok for row in rows)
        result = {"ok": ok, "trials": trials, "seed": seed, "delta": delta, "rows": [asdict(row) for row in rows]}
        write(out, "coverage.json", result)
        show(result, json, *coverage.lines(rows))
    if not ok:
        raise typer.Exit(1)


def bench(
    subject: Annotated[str, typer.Argument(help=f"What to measure: {', '.join(benchmark.SUBJECTS)}.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, which only show that it runs.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On a CPU: the slow sizes as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write bench-SUBJECT.json to.")] = None,
    seed: Seed = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Measures speed, as ratios within one run."""
    with user_errors():
        with progress_bars() as progress:
            timings = benchmark.run(subject, device=device, smoke=smoke, full=full, progress=progress)
        write(out, f"bench-{subject}.json", timings)
        show(timings, json, *benchmark.render(timings))


def reproduce(
    name: Annotated[str | None, typer.Argument(help=f"Which figures: {', '.join(recipes.RECIPES)}.")] = None,
    every: Annotated[
        bool, typer.Option("--list", help="List all figures, or those of NAME: command, time, and what the paper says.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="How much is computed: smoke, reduced, or as much as there is, which is called paper where it is the "
            "paper's own setting, and full elsewhere."
        ),
    ] = "reduced",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures and CSVs." + default_text("runs/NAME-SCALE[-ONLY]"))
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help=f"One setting of {', '.join(recipes.SEVERAL)}; an unknown name lists them."
            + default_text("all of them")
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help=DATA_DIR)] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything; another one is another set of repetitions.")] = 0,
    device: Where = "cpu",
    json: Json = False,
) -> None:
    """Makes figures of the paper, each with its CSV."""
    with user_errors():
        if every:
            lines = recipes.listing(name)
            show({"figures": lines}, json, *recipes.render_listing(lines))
            return
        if name is None:
            raise ValueError("the name of a recipe is missing; give one, or --list, which shows all of them")
        with progress_bars() as progress:
            figures = recipes.run(
                name, scale=scale, only=only, out=out, seed=seed, device=device, data_dir=data_dir, progress=progress
            )
        show(figures, json, *recipes.render(figures))


def data(
    action: Annotated[
        str, typer.Argument(help="list (what is here), fetch (download one) or path (where the files lie).")
    ],
    name: Annotated[str | None, typer.Argument(help=f"For fetch and path: {', '.join(datasets.SOURCES)}.")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", "--out", help=DATA_DIR)] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """The data sets: which are here, and how to get them."""
    with user_errors():
        if name not in datasets.SOURCES and (name or action == "fetch"):
            raise ValueError(
                f"the data set for `pacprune data {action}` is {repr(name) if name else 'missing'}; "
                f"use one of {', '.join(datasets.SOURCES)} (the digits come with the package)"
            )
        if action not in DATA_ACTIONS:
            raise ValueError(f"unknown action {action!r}; use {', '.join(DATA_ACTIONS)}")
        DATA_ACTIONS[action](name, data_dir, json)


def _data_path(name: str | None, data_dir: Path | None, json: bool) -> None:
    """Where the files of a data set lie, or would lie."""
    folder = str(download.data_folder(data_dir) / (datasets.SOURCES[name].folder if name else ""))
    show({"folder": folder}, json, folder)


def _data_fetch(name: str | None, data_dir: Path | None, json: bool) -> None:
    """Downloads a data set."""
    with progress_bars() as progress:
        folder = str(datasets.fetch(name or "", data_dir, progress=progress))
    show({"name": name, "folder": folder}, json, f"{name} is complete in {folder}")


def _data_list(name: str | None, data_dir: Path | None, json: bool) -> None:
    """Lists which data sets are usable, and what is wrong with the others."""
    states = [{"name": "digits", "folder": "inside the package", "present": True, "usable": True, "detail": ""}]
    states += [_data_state(name, data_dir) for name in datasets.SOURCES]
    table = Table("Data set", Column("Folder", overflow="fold"), "State")
    for state in states:
        table.add_row(state["name"], state["folder"], (state["detail"] or "ready") if state["present"] else "missing")
    show({"data": states}, json, table, "To get one that is missing: pacprune data fetch NAME")


def _data_state(data_set: str, data_dir: Path | None) -> dict[str, Any]:
    """Whether the official files exist with the right content; `detail` says what is wrong with the first bad one."""
    source, folder, detail = datasets.SOURCES[data_set], download.data_folder(data_dir), ""
    try:
        for file in source.contents:
            datasets.read(data_set, file, data_dir)
    except ValueError as error:
        detail = str(error)
    present = all(download.place_of(source, file, data_dir) for file in source.contents)
    place = str(folder / source.folder)
    return {"name": data_set, "folder": place, "present": present, "usable": not detail, "detail": detail}


DATA_ACTIONS = {"list": _data_list, "fetch": _data_fetch, "path": _data_path}


def rebuild(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write report.html and figures to." + default_text("that of the run"))
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Draws figures and report of a finished run again."""
    with user_errors():
        page = str(report.write(folder, store.result(folder), out=out))
        show({"report": page, "folder": str(folder)}, json, f"Report: {page}")


def export(
    run: Annotated[Path, typer.Argument(help=NETWORK)],
    format: Annotated[
        str, typer.Option(help=", ".join(f"{name} ({row.sentence})" for name, row in FORMATS.items()) + ".")
    ] = "safetensors",
    model: OwnModel = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write." + default_text("in RUN, named by the format"))
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Writes the network of a run to a file.

    Of a text model of transformers, ONNX has the inputs input_ids and attention_mask and the output output, for any
    number of sequences of any length; packed files are for pacprune, and transformers reads the folder itself.
    """
    with user_errors(("model",)):
        exported = deployment.export(run, format=format, out=out, model=model)
        show(exported, json, exported["said"])


def measure(
    run: Annotated[Path, typer.Argument(help=NETWORK)],
    seconds: Annotated[float, typer.Option(help="Time to measure, per batch size.")] = 5.0,
    model: OwnModel = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write profile.json to.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Size on disk, FLOPs and CPU latency of every form of a network.

    Of a text model of transformers: bytes on disk, and tokens per second in one window, by torch and by onnxruntime.
    """
    with user_errors(("model",)):
        with progress_bars() as progress:
            forms = deployment.profile(run, seconds=seconds, model=model, progress=progress)
        write(out, "profile.json", forms)
        show(forms, json, *deployment.render(forms))


def track(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or going.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the event files." + default_text("RUN/events"))] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """TensorBoard event files of a run."""
    with user_errors():
        place = str(events.write(run, out=out))
        show({"run": str(run), "events": place}, json, f"Events: tensorboard --logdir {place}")


def sweep(
    what: Annotated[str, typer.Argument(help="TOML file: a command, its options, a [grid] of lists; or: status.")],
    folder: Annotated[Path | None, typer.Argument(help="For status: the folder of a sweep.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run on a Ray cluster: auto, or HOST:PORT of its head node.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs' folders." + default_text("runs/FILE without .toml"))
    ] = None,
    seed: Seed = 0,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: cpu, cuda or cuda:N." + default_text("as the file says"))
    ] = None,
    json: Json = False,
) -> None:
    """Runs every combination of some options, once.

    Finished runs are skipped, interrupted ones resumed. Runs of one network, seed and split are trained together; with
    --ray, each is a separate task. Exit 0: none failed, 1: some did, and the table says why, 2: nothing was begun.
    """
    with user_errors():
        if what == "status":
            if folder is None:
                raise ValueError("the folder for `pacprune sweep status` is missing; name one, such as runs/mine")
            state = sweeps.status(folder)
        elif folder is not None:
            raise ValueError(f"there is a second argument, {folder}, after {what}; give the runs' folder as --out")
        else:
            state = sweeps.run(Path(what), out=out, device=device, work=None if ray is None else cluster.work_at(ray))
        show(state, json, sweep_table.table(state), f"Runs: {state['folder']}", *sweep_table.payment(state))
    if state["failed"]:
        raise typer.Exit(1)
