"""Run folders: named by their options, resumed where they stopped, never shared by two runs."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from pacprune import models
from pacprune.certification import commitment
from pacprune.certification.certificate import RECORD
from pacprune.certification.commitment import Commitment
from pacprune.data import own, trace
from pacprune.data.trace import Trace
from pacprune.files import write_atomically
from pacprune.masking import weights
from pacprune.runs import options as opt
from pacprune.types import History

CONFIG, CHECKPOINTS, CERTIFICATE, TRACE = "config.toml", "checkpoints", "certificate", "trained-on.safetensors"
COMPRESSED = "compressed"
"""Where the demo keeps its network that keeps a promise, with the certificate of that."""


def check_folder(folder: Path, content: str) -> None:
    """Refuses a folder that does not exist."""
    if not folder.is_dir():
        fault = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {fault}; name the folder of {content}")


def claim(folder: Path, command: str, options: Any) -> dict[str, Any] | None:
    """The result if this run is finished in `folder`; None if it has to be begun or resumed.

    Raises, and changes nothing, if the folder holds anything else.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another --out")
    # A process that was killed at its first write leaves only a .part.
    if not folder.exists() or all(file.suffix == ".part" for file in folder.iterdir()):
        return None
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not empty and holds no config.toml, so it is not a run; choose another --out")
    recorded_command, recorded_options = read_config(folder)
    if recorded_command != command:
        raise ValueError(f"{folder} holds a run of {recorded_command!r}, this is {command!r}; choose another --out")
    recorded_values, values = opt.identity(recorded_options), opt.identity(options)
    for name in values:
        if values[name] != recorded_values[name]:
            raise ValueError(
                f"{folder} belongs to another run: {name} is {recorded_values[name]!r} there and {values[name]!r} "
                "here; choose another --out"
            )
    return result(folder) if (folder / "result.json").exists() else None


def begin(folder: Path, command: str, options: Any) -> Path:
    """Makes the folder and writes config.toml, if it is missing; of two processes, one writes it."""
    with suppress(FileExistsError):
        write_atomically(folder / CONFIG, opt.to_toml(command, options).encode(), replace=False)
    return folder


def finish(folder: Path, result: dict[str, Any]) -> None:
    """Writes result.json, which marks the run as finished, and drops the checkpoints."""
    write_atomically(folder / "result.json", (json.dumps(result, indent=2) + "\n").encode())
    drop_checkpoints(folder)


def drop_checkpoints(folder: Path) -> None:
    """Deletes the checkpoints, which a finished run does not need."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def clear(folder: Path, *, keep: bool) -> None:
    """Deletes the run's files, and without `keep` the folder too; does nothing if it holds a trained stage."""
    if (folder / CONFIG).exists() and not any((folder / CHECKPOINTS).rglob("*")):
        for file in folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        if not keep:
            folder.rmdir()


def read_config(folder: Path) -> tuple[str, Any]:
    """(command, options) of the config.toml in a run folder."""
    check_folder(folder, "a run")
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.toml, so it is not a run folder; name one, such as runs/demo")
    command, values = opt.from_toml(path)
    if "seed" in values and "split_seed" in opt.types_of(opt.COMMANDS[command]):
        values.setdefault("split_seed", values["seed"])  # in older runs one seed was both
    return command, opt.COMMANDS[command](**values)


_IMPORTED = {"model": models.is_own, "data": own.is_code}
"""Which names of networks and data are functions that are imported."""


def check_code(folder: Path, options: Any, **named: str | None) -> None:
    """Refuses to import what only a run folder names, which may be somebody else's.

    Args:
        folder: The run.
        options: Its options.
        **named: What the user has named: `model`, and `data` where these are read as well.
    """
    for name, value in named.items():
        recorded = getattr(options, name)
        if _IMPORTED[name](recorded) and value != recorded:
            raise ValueError(
                f"the run in {folder} has the {name} {recorded!r}, which is code that would be imported and called; if "
                f"you trust it, give --{name} {recorded}"
            )


def result(folder: Path) -> dict[str, Any]:
    """The result of a finished run, with its present folder."""
    check_folder(folder, "a finished run")
    path = folder / "result.json"
    if not path.is_file():
        _refuse_sealed(folder)
        raise ValueError(f"the run in {folder} is not finished: it has no result.json; run its command again")
    try:
        return {**json.loads(path.read_text()), "folder": str(folder)}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and run the command again") from None


def sealed(folder: Path) -> Commitment | None:
    """What the unfinished run in a folder has sealed so far; None if it has no seal."""
    place = folder / CHECKPOINTS
    return commitment.load(place) if (place / commitment.FILE).is_file() else None


def _refuse_sealed(folder: Path) -> None:
    """Refuses a run that waits at a seal, and says how it goes on."""
    seals = sealed(folder)
    if seals is None:
        return
    if seals.posterior is None:
        raise ValueError(
            f"the run in {folder} is sealed and has no certificate yet: Q is not trained; publish its first seal, then "
            f"run pacprune commit {folder}, and after that pacprune certify {folder} --beacon VALUE"
        )
    raise ValueError(
        f"the run in {folder} is sealed and has no certificate yet: its draws wait for a beacon, {seals.source}; give "
        f"it by pacprune certify {folder} --beacon VALUE"
    )


def certificate(folder: Path) -> Path:
    """The folder of a certificate: this one, the one in this run, or that of this very certificate.json."""
    if folder.name == RECORD and folder.is_file():
        return folder.parent
    check_folder(folder, "a certificate, or of a run that holds one")
    for place in (folder, folder / CERTIFICATE):
        if (place / RECORD).is_file():
            return place
    if (folder / CONFIG).is_file():
        command, _ = read_config(folder)
        refuse_failed(folder, result(folder))
        if issubclass(opt.COMMANDS[command], opt.Pruning):
            raise ValueError(f"{folder} is a run of {command} without a certificate; run pacprune certify {folder}")
    raise ValueError(
        f"{folder} holds neither {RECORD} nor {CERTIFICATE}/{RECORD}; name the folder of a certificate, or of a run "
        "that holds one"
    )


def refuse_failed(folder: Path, finished: dict[str, Any]) -> None:
    """Refuses a run of compress in which no network kept the limit, and says what is known."""
    if finished.get("passed") == 0:
        raise ValueError(f"there is no certificate in {folder}: {finished['headline']}")


def write_model(path: Path, model: nn.Module) -> None:
    """The plain state dict, zeros included, as safetensors; a tied tensor under each of its names."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(path, save(state))


def read_model(path: Path, model: nn.Module) -> None:
    """Loads what `write_model` wrote into a network of the same shape."""
    try:
        model.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(
            f"the network that was built is not that of {path} ({' '.join(str(error).split())[:200]}); if its factory "
            "was changed, give it back as it was, or run the command again elsewhere"
        ) from None


def write_trace(folder: Path, model: nn.Module) -> None:
    """What the network was trained on, as the training itself has noted it, and which weights came of it."""
    use, stamp = weights.origin(model), weights.fingerprint(model)
    tensors = {"examples": use.examples, "labelled": use.labelled}
    write_atomically(folder / TRACE, save(tensors, metadata={"fingerprint": str(stamp)}))


def read_trace(folder: Path, model: nn.Module) -> None:
    """Notes on the network, whose weights are loaded, what its training wrote down."""
    path = folder / TRACE
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {TRACE}, in which training writes down what it used; run its command again, or "
            "certify by pp.certify_held_out with a declaration"
        )
    with safe_open(path, framework="pt") as file:
        use, stamp = Trace(file.get_tensor("examples"), file.get_tensor("labelled")), file.metadata()["fingerprint"]
    changed = str(weights.fingerprint(model)) != stamp
    weights.take_over(model, use | trace.foreign() if changed else use)


def write_metrics(folder: Path, history: History) -> None:
    """One JSON line per epoch."""
    write_atomically(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in history).encode())


def metrics(folder: Path) -> History:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
