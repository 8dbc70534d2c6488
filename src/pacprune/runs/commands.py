"""The commands of METHODS: from options to a finished run folder."""

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pacprune import __version__, data, imports, models
from pacprune.bounds import Ledger
from pacprune.certification import risks
from pacprune.certification.certificate import RECORD, Certificate
from pacprune.certification.commitment import Commitment, check_source
from pacprune.certification.decode import load
from pacprune.certification.held_out import certify_held_out
from pacprune.certification.rules import check_declared
from pacprune.certification.tries import Tries
from pacprune.certification.verify import Report
from pacprune.data.batches import refusing_unfit
from pacprune.data.splits import Part, Split
from pacprune.deploy import export
from pacprune.distributed import ranks
from pacprune.masking import criteria, weights
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import block_isotropic
from pacprune.methods.pbp import RECIPES, check_untrained
from pacprune.methods.pipeline import make_plan
from pacprune.methods.table import METHODS
from pacprune.runs import locks, report, store
from pacprune.runs import options as opt
from pacprune.runs.options import Certifying, Options, Pruning, Training
from pacprune.training.config import Config
from pacprune.training.evaluate import error, evaluating, gibbs_error
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import History, Progress, check_name

FEW = 64
"""Examples that a rehearsal looks at."""
TEST_DRAWS = 20
"""Networks drawn from Q to estimate its Gibbs error on the test part."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One row of the table, the plain network behind it and how it was trained."""

    method: str
    sparsity: float
    test_error: float
    model: nn.Module
    history: History
    certificate: Certificate | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The table's row; certificate and held-out baseline are None without a certificate."""
        certificate = self.certificate
        return {
            "method": self.method,
            "sparsity": self.sparsity,
            "test_error": self.test_error,
            "certificate": certificate.bound if certificate else None,
            "held_out": certificate.bounds["held_out"] if certificate else None,
        }


class Sealed(Exception):
    """A run that stops at a seal, which has to be published before it goes on."""

    def __init__(self, commitment: Commitment) -> None:
        self.commitment = commitment


Work = Callable[[Any, Callable[[], Path], Progress], dict[str, Any]]
"""(options, begin, progress) -> result; `begin` makes the run folder and is called once all input has been checked."""


def execute(command: str, options: Any, work: Work, *, out: Path | None, progress: Progress) -> dict[str, Any]:
    """Runs a command in its folder. Returns at once if it is finished there, and resumes it if it was interrupted.

    The result of a run that stops at a seal has the `seals` and the `source` of the beacon alone.
    """
    folder = out if out is not None else Path("runs") / opt.run_name(command, options)
    previous = ranks.on_rank0(lambda: store.claim(folder, command, options))
    if previous is not None:
        ranks.on_rank0(lambda: store.drop_checkpoints(folder))
        return previous
    with _held(folder, command, options) as begin:
        try:
            # The networks for the digits are so small that a second thread costs time.
            with one_thread() if opt.identity(options).get("data", "digits") == "digits" else nullcontext():
                numbers = work(options, begin, progress)
        except Sealed as stop:
            commitment = stop.commitment
            ranks.on_rank0(lambda: commitment.save(folder))  # where it stays when the run is finished
            seals = [commitment.digest] + ([] if commitment.posterior is None else [commitment.seal])
            return {"command": command, "folder": str(folder), "seals": seals, "source": commitment.source}
        common = {"command": command, "folder": str(folder), "version": __version__, "torch": torch.__version__}
        result = common | opt.identity(options) | numbers

        def finish() -> None:
            report.write(folder, result)
            store.finish(folder, result)

        ranks.on_rank0(finish)
    return result


@contextmanager
def _held(folder: Path, command: str, options: Any) -> Iterator[Callable[[], Path]]:
    """A function that makes the run folder; from then on to the end of the block no other process works in it.

    The folder is deleted if the input turns out to be bad, unless something was trained.
    """
    existed, was_begun = ranks.on_rank0(lambda: (folder.exists(), (folder / store.CONFIG).exists()))
    is_ours = False
    with ExitStack() as lock:

        def begin() -> Path:
            nonlocal is_ours
            if not was_begun:
                store.begin(folder, command, options)
                lock.enter_context(locks.alone(folder))
                if (folder / "result.json").exists():
                    raise ValueError(f"another process has just finished the run in {folder}; ask for it again")
                is_ours = True
            return folder

        if was_begun:
            ranks.on_rank0(lambda: lock.enter_context(locks.alone(folder)))
        try:
            yield lambda: ranks.on_rank0(begin)
        except ValueError:
            # The same input fails the same way, so this folder is not worth keeping, unless something was trained.
            if is_ours:
                store.clear(folder, keep=existed)
            raise
        except OSError as error:
            if error.errno is not None and error.filename is None:  # such as that of a full disk
                error.filename = str(folder)
            raise


def single(
    options: Options, begin: Callable[[], Path], progress: Progress, *, beacon: str | None = None
) -> dict[str, Any]:
    """The work of a method's command; a `beacon` is for one that stopped at its second seal."""
    if options.data_dir is not None:
        store.check_folder(Path(options.data_dir), "the data files")
    split, model = prepare(options)
    rehearse(options, model, split)
    folder = begin()
    outcomes = []
    if options.dense_epochs:
        outcomes.append(dense(options, model, split, folder / store.CHECKPOINTS, progress))
    outcomes.append(prune(options, model, split, folder / store.CHECKPOINTS, progress, beacon=beacon))
    return ranks.on_rank0(lambda: store_outcomes(options, outcomes, split, folder))


def store_outcomes(options: Training, outcomes: list[Outcome], split: Split, folder: Path) -> dict[str, Any]:
    """Writes the network and its history; returns the numbers."""
    last = outcomes[-1]
    store.write_model(folder / "model.safetensors", last.model)
    store.write_trace(folder, last.model)
    store.write_metrics(folder, [row for outcome in outcomes for row in outcome.history])
    total, counted = weights.total(last.model), weights.sparsity(last.model)
    numbers = {
        "rows": [outcome.row for outcome in outcomes],
        "sparsity": counted,
        "kept": total - round(counted * total),
        "total": total,
        "test_error": last.test_error,
        "test": {"size": len(split.test), "copies": split.test_copies},
        "dense_error": outcomes[0].test_error if options.dense_epochs else None,
        "test_examples": len(split.test),
        "input": {"shape": list(split.train.x.shape[1:]), "dtype": str(split.train.x.dtype).removeprefix("torch.")},
        "classes": models.outputs_of(split),
        "files": split.files,
        "architecture": architecture(last.model),
    }
    if last.certificate:
        numbers |= save_certificate(folder, last.certificate)
        numbers["expected_sparsity"] = last.sparsity
        numbers["thresholded_error"] = error(last.model, split.test)
    return numbers


def architecture(model: nn.Module) -> str:
    """SHA-256 of the names, types and shapes in the state dict: a factory that changed makes another one."""
    tensors = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def save_certificate(folder: Path, certificate: Certificate) -> dict[str, Any]:
    """Saves the certificate; returns its numbers."""
    certificate.save(folder / store.CERTIFICATE)
    names = ("risk", "risk_upper", "draws", "kl", "n", "bounds", "winner", "statement")
    numbers = {name: getattr(certificate, name) for name in names}
    count = {} if certificate.tries is None else {"tries": asdict(certificate.tries) | {"text": str(certificate.tries)}}
    return {"certificate": certificate.bound, "delta": certificate.ledger.delta, **numbers, **count}


def commit(folder: Path, *, progress: Progress, model: str | None = None, data: str | None = None) -> dict[str, Any]:
    """Goes on with a run that was begun with --commit, to its next seal; returns what `execute` does there.

    Code of the run's model and data is imported if `model` and `data` name it as well.
    """
    command, options = store.read_config(folder)
    store.check_code(folder, options, model=model, data=data)
    if not isinstance(options, Certifying) or not options.commit:
        raise ValueError(
            f"{folder} is a run of {command} that was not begun with --commit, so that nothing of it can be sealed any "
            "more; begin one with pacprune pbp --commit"
        )
    result = execute(command, options, single, out=folder, progress=progress)
    if "seals" not in result:
        raise ValueError(f"the run in {folder} has its certificate already; verify it")
    return result


def certify_sealed(
    folder: Path, *, beacon: str, progress: Progress, model: str | None = None, data: str | None = None
) -> Certificate:
    """The certificate of a run that was begun with --commit, drawn by a beacon that is younger than its seals.

    Code of the run's model and data is imported if `model` and `data` name it as well.
    """
    command, options = store.read_config(folder)
    store.check_code(folder, options, model=model, data=data)
    if not isinstance(options, Certifying) or not options.commit:
        raise ValueError(f"{folder} is a run of {command} without seals; a beacon is for one begun with --commit")
    if (folder / store.CERTIFICATE / RECORD).is_file():
        _refuse_second_beacon(folder, beacon)
    elif not ((sealed := store.sealed(folder)) and sealed.posterior):
        raise ValueError(
            f"Q of {folder} is not sealed yet, so that no beacon can be younger; run pacprune commit first"
        )
    result = execute(command, options, partial(single, beacon=beacon), out=folder, progress=progress)
    counted = {name: value for name, value in result.get("tries", {}).items() if name != "text"}
    return replace(load(folder / store.CERTIFICATE), tries=Tries(**counted) if counted else None)


def _refuse_second_beacon(folder: Path, beacon: str) -> None:
    """Refuses to draw again by another beacon: that would be a second try."""
    commitment = load(folder / store.CERTIFICATE).record["commitment"]
    if commitment is not None and commitment["beacon"] != beacon.strip().lower():
        raise ValueError(
            f"{folder} has its certificate already, drawn by the beacon {commitment['beacon'][:12]}..., and this is "
            f"{beacon.strip()[:12]}...; a second beacon would be a second try, so verify that certificate"
        )


def certify(
    folder: Path,
    *,
    risk: str,
    reference: Path | None,
    groups: str | None,
    delta: float,
    certified: int,
    declare: str | None,
    device: str,
    out: Path | None,
    model: str | None = None,
    data: str | None = None,
    reference_model: str | None = None,
) -> Certificate:
    """Certifies the sparse network of a finished run by held-out examples, saves that, and shows it in the report.

    What the network was trained on is what its training wrote down, and so it is with the run of a reference network. A
    certificate that was issued before is returned as it is, and never replaced. Code of the runs' model and data is
    imported if `model` and `data` name it as well, and for the reference `reference_model`, where that is another.
    """
    options, split, net = _trained(folder, device, model=model, data=data)
    dense = None
    if reference is not None:
        try:
            dense = _trained(reference, device, model=model if reference_model is None else reference_model, data=data)[
                2
            ]
        except ValueError as error:
            raise ValueError(str(error).replace("give --model", "give --reference-model")) from None
    place, loss = folder / store.CERTIFICATE if out is None else out, loss_of(risk)
    if (place / RECORD).is_file():  # before anything is counted
        names = {"risk": risks.find(loss)[0], "delta": delta, "certified": certified, "groups": groups is not None}
        _refuse_other(place, load(place), names)
    certificate = certify_held_out(
        net,
        split,
        risk=loss,
        reference=dense,
        groups=groups,
        delta=delta,
        certified=certified,
        name=options.model,
        declare=declare,
    )
    if (place / RECORD).is_file():
        certificate = _issued(place, certificate)
    else:
        certificate.save(place)
    if out is None:
        report.write(folder, store.result(folder))
    return certificate


def _refuse_other(place: Path, issued: Certificate, names: dict[str, Any]) -> None:
    """Refuses to issue another certificate than the one that lies there: a published certificate must not change."""
    issued_risk: Any = issued.record.get("risk") or {"name": "error"}
    there = {
        "risk": issued_risk["name"],
        "delta": issued.ledger.delta,
        "certified": issued.ledger.certified,
        "groups": any(test["group"] for test in issued.tests),
    }
    for name, value in names.items():
        if there[name] != value:
            raise ValueError(
                f"{place} holds a certificate already: {name} is {there[name]} there and {value} here; choose another "
                "--out"
            )


def loss_of(risk: str) -> Any:
    """The name of a risk, or the user's own loss at package.module:function."""
    return imports.own_function(risk, what="loss") if ":" in risk else risk


def _trained(folder: Path, device: str, *, model: str | None, data: str | None) -> tuple[Any, Split, nn.Module]:
    """Options, data and network of a finished run that was trained on the prior part alone."""
    command, options = store.read_config(folder)
    store.check_code(folder, options, model=model, data=data)
    store.refuse_failed(folder, store.result(folder))  # and a run that is not finished
    if not isinstance(options, Pruning):
        certificate_folder = folder / store.CERTIFICATE
        raise ValueError(
            f"{folder} is a run of {command}, which has its certificate in {certificate_folder}; verify that one"
        )
    if options.train_on != "prior":
        raise ValueError(
            f"the network in {folder} was trained on the bound set too (train_on is {options.train_on!r}), so nothing "
            f"is left to certify it by; run pacprune {command} with --train-on prior"
        )
    split, net = prepare(replace(options, device=device))
    store.read_model(folder / "model.safetensors", net)
    store.read_trace(folder, net)
    return options, split, net


def with_packed(checked: Report, place: Path) -> Report:
    """The report, once the packed network that compress has put beside a certificate is the certified one."""
    path = place.parent / export.FORMATS["safetensors"].file
    if not checked.valid or place.name != store.CERTIFICATE or not path.is_file():
        return checked
    certified = load(place).tensors.get("model.safetensors")
    if certified is None:
        return checked
    try:
        packed = export.load(path)
    except ValueError as failure:
        return replace(checked, valid=False, failure=str(failure))
    for name, tensor in packed.items():
        # A tied tensor has several names, of which the certificate has one.
        alike = [certified[name]] if name in certified else certified.values()
        if not any(torch.equal(tensor, other) for other in alike):
            return replace(checked, valid=False, failure=f"{path.name}: {name} is not that of the certified network")
    missing = [name for name, tensor in certified.items() if name not in packed and tensor.ndim > 1]
    if missing:
        return replace(checked, valid=False, failure=f"{path.name}: {missing[0]} of the certified network is missing")
    return replace(checked, checks=(*checked.checks, f"{path.name} beside the certificate is the certified network"))


def _issued(place: Path, certificate: Certificate) -> Certificate:
    """The certificate in `place`, if it agrees with this one: a published certificate must not change."""
    issued = load(place)
    for name, issued_value, value in (
        ("kind", issued.record["kind"], certificate.record["kind"]),
        ("groups", [test["group"] for test in issued.tests], [test["group"] for test in certificate.tests]),
        ("reference", issued.record["hashes"].get("reference"), certificate.record["hashes"].get("reference")),
        ("network", issued.record["hashes"].get("model"), certificate.record["hashes"]["model"]),
    ):
        if issued_value != value:
            raise ValueError(
                f"{place} holds a certificate already: {name} is {issued_value} there and {value} here; "
                "choose another --out"
            )
    return replace(issued, tries=certificate.tries)  # which no file holds


def prepare(options: Any) -> tuple[Split, nn.Module]:
    """The data and the untrained network, on the device."""
    device = check_device(options.device)
    for name in ("seed", "split_seed"):
        if not 0 <= getattr(options, name) < 2**32:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be a whole number from 0 to {2**32 - 1}")
    load = partial(data.load, options.data, seed=options.split_seed, data_dir=options.data_dir)
    aside = options.unlabelled if isinstance(options, Certifying) else 0
    try:
        split = load(prior_fraction=options.prior_fraction, unlabelled=aside)
    except ValueError:
        # The split's own error is about the remaining parts, which are empty when too much is kept aside.
        if aside and not 0 <= aside <= (most := len(load().train) - 2):
            raise ValueError(
                f"unlabelled is {aside}, but of the {most + 2} training examples of {options.data}, from 0 to "
                f"{most} can be kept aside; choose another --unlabelled"
            ) from None
        raise
    model = models.build(options.model, split, seed=options.seed)
    if not isinstance(options, opt.Compress):
        _refuse_signs(options, model, split)
    return split, model.to(device)


def _refuse_signs(options: Any, model: nn.Module, split: Split) -> None:
    """Refuses labels and outputs of networks that answer by signs: all commands but `compress` train classes."""
    y, remedy = split.train.y, "or use pacprune compress"
    if y.ndim > 1:
        raise ValueError(
            f"{options.data} has labels of shape {tuple(y.shape[1:])} for each example, but pacprune {options.command} "
            f"trains networks that choose one of several classes; give one class number for each, {remedy}"
        )
    few = split.train.x[:2]
    with evaluating(model), refusing_unfit(few, f"the network of {options.model}"):
        output = model(few)
    if risks.is_by_sign(output, y[:2]):
        raise ValueError(
            f"the network of {options.model} has 1 output for {split.classes} classes, but pacprune {options.command} "
            f"trains networks with an output for each; give it {split.classes} outputs, {remedy}"
        )


def check_device(name: str) -> torch.device:
    """The device, if it can compute."""
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {name!r} cannot be used here ({reason}); use --device cpu") from None


def rehearse(options: Options, model: nn.Module, split: Split) -> None:
    """The run without a single epoch, on a copy and a few examples: bad input is found before anything is written."""
    model = copy.deepcopy(model)
    dense_stage(options)
    config = replace(stage(options), epochs=0)
    if isinstance(options, Certifying):
        _rehearse_certificate(options, model, split)
    else:
        part = training_part(options, split)
        procedure(options)(model, part.subset(torch.arange(min(FEW, len(part)))), config)


def _rehearse_certificate(options: Any, model: nn.Module, split: Split) -> None:
    """The checks of a certificate, the prior's start, and its posterior without an epoch."""
    check_declared(options.family, "betting", options.expected_risk)
    check_source(options.source, commit=options.commit)
    Ledger.split(options.delta, grid=options.grid)
    if options.draws < 1:
        raise ValueError(f"draws is {options.draws}; at least 1 network must be drawn to estimate the risk")
    if not options.tolerance > 0:
        raise ValueError(
            f"tolerance is {options.tolerance}; it must be more than 0: a tiny --tolerance makes all --draws"
        )
    if not len(split.prior):
        check_untrained(options.dense_epochs, options.epochs)
    few = {part.name: part.subset(torch.arange(min(FEW, len(part)))) for part in (split.prior, split.bound)}
    split = replace(split, **few)
    which = {name: argument(options, name) for name in ("scope", *opt.NAME_PATTERNS)}
    plan = make_plan(model, options.sparsity, **which)
    mask = plan.mask(criteria.score(options.criterion, model, split.prior, seed=options.seed, prunable=plan.prunable))
    attach(model, block_isotropic(model, mask, eps=options.eps, std=options.std))
    config = replace(posterior(options), epochs=0)
    check_name("recipe", options.recipe, RECIPES)
    objective = options.objective or RECIPES[options.recipe].objective
    with tempfile.TemporaryDirectory() as out:
        fit_posterior(model, read(model), split, config, delta=options.delta, objective=objective, out=out)


def stage(options: Training) -> Config:
    """The Config of the stages after dense training."""
    gate_lr = getattr(options, "gate_lr", None)  # not every method has gates
    on_gpu = torch.device(options.device).type == "cuda"
    frozen = getattr(options, "recipe", None) == "frozen" and getattr(options, "mask_share", None) in (None, 1)
    return Config(
        epochs=options.epochs,
        lr=0.0 if frozen else options.lr,  # which all commands have, and weights that stay have no use of
        gate_lr="auto" if gate_lr is None else gate_lr,
        batch_size=options.batch_size,
        schedule=options.schedule,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        augment=options.augment,
        amp=options.amp,
        execution="graph" if on_gpu else "eager",  # a step of these networks is mostly launches
    )


def dense_stage(options: Training) -> Config:
    """The Config of dense training."""
    rates = {
        "lr": options.lr if options.dense_lr is None else options.dense_lr,
        "weight_decay": options.dense_weight_decay,
    }
    changes = {name: value for name, value in rates.items() if value is not None}
    return replace(stage(options), epochs=options.dense_epochs, **changes)


def posterior(options: Certifying) -> Config:
    """The Config of Q: its own epochs and learning rate, and no augmentation of the bound examples."""
    return Config(epochs=options.posterior_epochs, lr=options.posterior_lr, batch_size=options.batch_size)


def procedure(options: Options) -> "partial[Any]":
    """The pipeline of these options, with all arguments but model, data, config, folder and progress."""
    method = METHODS[options.command]
    flags = (flag for flag in method.flags or () if flag != "gate_lr")  # the Config has it
    arguments = {name: argument(options, name) for name in ("sparsity", "seed", *flags)} | dict(method.options)
    if isinstance(options, Certifying):
        arguments |= {"name": options.model, "posterior": posterior(options)}
        arguments |= {"commit": options.commit, "source": options.source}
    return partial(method.verb, **arguments)


def argument(options: Training, name: str) -> Any:
    """An option as a verb takes it: text with patterns of names becomes several."""
    value = getattr(options, name)
    if name not in opt.NAME_PATTERNS or value is None:
        return value
    return tuple(pattern.strip() for pattern in value.split(","))


def method_name(options: Options) -> str:
    """The method's name in tables: the name of the variant with these options, else the command's."""
    verb, values = METHODS[options.command].verb, vars(options)
    for name, method in METHODS.items():
        variant = method.flags is None and method.names_runs and method.verb is verb
        if variant and method.options.items() <= values.items():
            return name
    return options.command


def training_part(options: Options, split: Split) -> Part:
    """The examples for dense training: S_P before a certificate, whose prior sees nothing else; otherwise S or S_P."""
    if not isinstance(options, Pruning):
        return split.prior
    if options.train_on not in opt.PARTS:
        raise ValueError(f"train_on is {options.train_on!r}; use one of {', '.join(opt.PARTS)}")
    return getattr(split, options.train_on)


def dense(options: Options, model: nn.Module, split: Split, folder: Path, progress: Progress) -> Outcome:
    """Dense training, in place."""
    part = training_part(options, split)
    config = dense_stage(options)
    path = folder / "dense.pt"
    history = fit(model, part, config, seed=options.seed, stage="dense", checkpoint=path, progress=progress)
    return Outcome("dense", 0.0, error(model, split.test), copy.deepcopy(model), history)


def prune(
    options: Options, model: nn.Module, split: Split, folder: Path, progress: Progress, *, beacon: str | None = None
) -> Outcome:
    """Prunes the network in place by the procedure of its options, and measures it."""
    run, config = partial(procedure(options), folder=folder, progress=progress), stage(options)
    if not isinstance(options, Certifying):
        return measure(options, run(model, training_part(options, split), config), split)
    result = run(model, split, config, beacon=beacon)
    if isinstance(result.outcome, Commitment):
        raise Sealed(result.outcome)
    return measure(options, result, split)


def measure(options: Options, result: Any, split: Split) -> Outcome:
    """The outcome of a pipeline, with its error on the test part."""
    name, model = method_name(options), result.model
    if not isinstance(options, Certifying):
        return Outcome(name, result.sparsity, error(model, split.test), model, result.history)
    gibbs = gibbs_error(model, split.test, draws=TEST_DRAWS)
    plain = harden(copy.deepcopy(model))
    return Outcome(name, result.posterior.sparsity, gibbs, plain, result.history, result.certificate)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
