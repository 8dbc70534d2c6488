"""What can be asked of a command: one frozen dataclass gives its flags, help, defaults, config file and run name."""

import hashlib
import json
import shlex
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pacprune import data, models
from pacprune.certification.bounds_table import FAMILIES
from pacprune.masking import criteria, patterns
from pacprune.training.config import GATE_STEPS, SCHEDULES
from pacprune.training.fit import OBJECTIVES

PARTS = ("train", "prior")


def _option(default: Any, help: str, *, names_run: bool = True) -> Any:
    """One option; `names_run` is False for what changes where a run happens but not what is asked."""
    return field(default=default, metadata={"help": help, "names_run": names_run})


@dataclass(frozen=True)
class Options:
    """What all methods share."""

    data: str = _option("digits", f"Data set: {', '.join(data.NAMES)}.")
    model: str = _option("mlp", f"Network: {', '.join(models.NAMES)}.")
    sparsity: float = _option(0.9, "Fraction of the weights to prune, in [0, 1).")
    seed: int = _option(0, "Seed of the split, the weights, the data order and the draws.")
    dense_epochs: int = _option(20, "Epochs of dense training before pruning; 0 prunes at initialisation.")
    epochs: int = _option(20, "Epochs after dense training.")
    lr: float = _option(0.1, "Learning rate of the weights.")
    batch_size: int = _option(128, "Examples per step.")
    schedule: str = _option("cosine", f"Learning-rate schedule: {', '.join(SCHEDULES)}.")
    warmup: float = _option(0.0, "Share of each stage's steps in which the learning rate rises.")
    weight_decay: float = _option(0.0, "Weight decay of the weights; keep probabilities have none.")
    dense_lr: float | None = _option(None, "Learning rate of dense training; --lr unless given.")
    dense_weight_decay: float | None = _option(None, "Weight decay of dense training; --weight-decay unless given.")
    augment: bool = _option(False, "Random crops and flips of the training images.")
    amp: bool = _option(False, "Train in bfloat16 where it is safe.")
    prior_fraction: float = _option(0.5, "Share of the training data in S_P: all that pbp's prior sees.")
    device: str = _option("cpu", "Where to compute: cpu, cuda or cuda:N.", names_run=False)
    data_dir: str | None = _option(None, "Folder of the data files [$PACPRUNE_DATA, or a cache].", names_run=False)


_CRITERION = f"What ranks the weights: {', '.join(criteria.CRITERIA)}."
_GATE_LR = "Learning rate of the keep probabilities; 100 times --lr unless given{}."
_MASK_SHARE = "Share of --epochs that trains the {}; the rest fine-tunes."
_FLOOR = "Weights that every layer keeps at least."
_EVERY = "Steps from one mask to the next."
_PATTERN = f"Keep so many of every 4 weights in a row: {', '.join(patterns.PATTERNS)}; --sparsity follows from it."


@dataclass(frozen=True)
class Pruning(Options):
    """What every method shares that leaves a plain sparse network."""

    train_on: str = _option(
        "train", "train: all training data; prior: S_P alone, so that `pacprune certify` can use the rest."
    )


@dataclass(frozen=True)
class Osp(Pruning):
    """One-shot pruning: rank the weights once.

    Dense training, the top k of the criterion's scores, sparse fine-tuning.
    """

    criterion: str = _option("magnitude", _CRITERION)
    scope: str = _option("global", "One ranking (global), the same sparsity in each layer (layer), or erk budgets.")
    min_per_layer: int = _option(0, _FLOOR)
    pattern: str | None = _option(None, _PATTERN)


@dataclass(frozen=True)
class Pft(Pruning):
    """Probabilistic fine-tuning: learn which weights to keep.

    Dense training, weights and keep probabilities trained together, the top k of the latter, sparse fine-tuning.
    """

    criterion: str = _option("magnitude", _CRITERION)
    gate_lr: float | None = _option(None, _GATE_LR.format(f", less where they have more than {GATE_STEPS} steps"))
    recipe: str = _option(
        "coupled",
        "coupled (keep probabilities follow the weights' sizes while their mean falls to 1 - sparsity) or paper.",
    )
    mask_share: float = _option(0.5, _MASK_SHARE.format("keep probabilities"))
    eps: float = _option(
        1e-4, "Keep probability, at the start, of the weights that --criterion would prune; --recipe paper only."
    )
    noise: bool = _option(
        True, "Train with random masks; without, each weight is scaled by a smooth function of its keep probability."
    )
    min_per_layer: int = _option(0, _FLOOR)
    pattern: str | None = _option(None, _PATTERN)


@dataclass(frozen=True)
class Gmp(Pruning):
    """Gradual magnitude pruning: prune while training.

    Dense training, the smallest weights set to zero a few at a time, sparse fine-tuning.
    """

    mask_share: float = _option(0.5, _MASK_SHARE.format("masks"))
    every: int = _option(16, _EVERY)
    min_per_layer: int = _option(0, _FLOOR)
    pattern: str | None = _option(None, _PATTERN)


@dataclass(frozen=True)
class Dpf(Gmp):
    """Gradual pruning with feedback: pruned weights can come back.

    Like gmp, but pruned weights are still trained, by the sparse network's gradient, until the masks are final.
    """

    every: int = _option(1, _EVERY)


@dataclass(frozen=True)
class Imp(Pruning):
    """Iterative magnitude pruning with learning-rate rewinding.

    Dense training, then rounds of pruning the smallest weights and training with the whole schedule again.
    """

    rounds: int = _option(3, "Rounds into which --epochs are cut.")
    min_per_layer: int = _option(0, _FLOOR)
    pattern: str | None = _option(None, _PATTERN)


@dataclass(frozen=True)
class L0(Pruning):
    """L0 regularisation: hard-concrete gates at a price.

    Dense training, weights and gates trained together, the most open gates, sparse fine-tuning.
    """

    gate_lr: float | None = _option(None, _GATE_LR.format(""))
    mask_share: float = _option(0.5, _MASK_SHARE.format("gates"))
    min_per_layer: int = _option(0, _FLOOR)


@dataclass(frozen=True)
class Pbp(Options):
    """PAC-Bayes pruning: a certificate for new data.

    A prior over sparse networks is trained on a part S_P of the training data; a posterior, on a bound that the rest of
    the training data gives; the certificate holds for networks drawn from the posterior.
    """

    criterion: str = _option("magnitude", _CRITERION)
    epochs: int = _option(20, "Epochs of training the prior, after dense training and before --posterior-epochs.")
    gate_lr: float | None = _option(None, _GATE_LR.format(""))
    posterior_epochs: int = _option(20, "Epochs of training the posterior on the bound.")
    posterior_lr: float = _option(0.02, "Learning rate of the posterior.")
    eps: float = _option(1e-4, "Keep probability of the weights outside the prior's mask, at the start.")
    std: float = _option(2e-3, "Standard deviation of a kept weight.")
    delta: float = _option(0.05, "Probability with which the certificate may fail.")
    objective: str = _option("seeger", f"Bound that trains the posterior: {', '.join(OBJECTIVES)}.")
    family: str = _option("seeger", f"Bound that the certificate claims: {', '.join(FAMILIES)}.")
    expected_risk: float | None = _option(
        None, "Risk that Catoni's constant is made for: a guess without the bound set."
    )
    grid: int = _option(1, "Priors, fixed in advance, of which this is one: each pays delta / grid.")
    unlabelled: int = _option(100, "Training inputs kept aside, to certify the thresholded network by.")
    draws: int = _option(4000, "Most networks to draw in estimating the risk of Q, and of P.")
    tolerance: float = _option(0.005, "Stop drawing once the estimate costs the certificate at most this much.")


@dataclass(frozen=True)
class Demo:
    """All three procedures on small embedded data.

    Trains a network for 8x8 handwritten digits, prunes 90 % of it by osp, pft and pbp, and compares the results.
    """

    seed: int = _option(0, "Seed of the split, the weights, the data order and the draws.")
    device: str = _option("cpu", "Where to compute: cpu, cuda or cuda:N.", names_run=False)


COMMANDS: dict[str, type] = {
    "demo": Demo,
    "osp": Osp,
    "pft": Pft,
    "gmp": Gmp,
    "dpf": Dpf,
    "imp": Imp,
    "l0": L0,
    "pbp": Pbp,
}

_LARGE = {"unlabelled": 5000, "draws": 20_000, "tolerance": 0.001}
_BOUND: dict[str, dict[str, Any]] = {
    "mnist": _LARGE | {"lr": 0.01, "schedule": "constant", "dense_epochs": 30, "epochs": 30, "posterior_epochs": 30},
    "fashion-mnist": _LARGE
    | {"lr": 0.01, "schedule": "constant", "dense_epochs": 70, "epochs": 30, "posterior_epochs": 30},
    "cifar10": _LARGE
    | {
        "model": "resnet20",
        "lr": 0.1,
        "schedule": "step",
        "augment": True,
        "dense_epochs": 120,
        "epochs": 60,
        "posterior_epochs": 60,
    },
}
"""pbp has the paper's constants, and a finer certificate, where there is more data."""

_GREY = {"lr": 0.1, "dense_lr": 0.05, "dense_epochs": 12, "epochs": 12, "warmup": 0.05}
_PRUNED: dict[str, dict[str, Any]] = {
    "mnist": _GREY,
    "fashion-mnist": _GREY,
    "cifar10": {
        "model": "resnet20",
        "augment": True,
        "lr": 0.2,
        "dense_lr": 0.1,
        "dense_weight_decay": 5e-4,
        "dense_epochs": 20,
        "epochs": 16,
        "warmup": 0.05,
    },
}
"""The others have what docs/results.md compares them by."""

_RATES: dict[tuple[str, str], dict[str, float]] = {
    ("mnist", "mlp"): {"osp": 0.2, "pft": 0.1, "gmp": 0.1, "dpf": 0.1, "imp": 0.2, "l0": 0.2},
    ("fashion-mnist", "mlp"): {"osp": 0.2, "pft": 0.1, "gmp": 0.2, "dpf": 0.1, "imp": 0.2, "l0": 0.2},
    ("fashion-mnist", "lenet5"): {"osp": 0.1, "pft": 0.05, "gmp": 0.1, "dpf": 0.02, "imp": 0.05, "l0": 0.1},
    ("cifar10", "resnet20"): {"osp": 0.2, "pft": 0.2, "gmp": 0.2, "dpf": 0.05, "imp": 0.1, "l0": 0.2},
}
"""Learning rates that were best on validation data, from magnitude (results/pft-vs-osp-tuning.csv)."""


def preset(kind: type, data: str, model: str | None = None) -> dict[str, Any]:
    """What a command takes by itself on a data set, with its usual network or the one that is named."""
    if not issubclass(kind, Options):
        return {}
    if not issubclass(kind, Pruning):
        return _BOUND.get(data, {})
    found = _PRUNED.get(data, {})
    rates = _RATES.get((data, model or found.get("model", kind.model)), {})
    name = next(name for name, known in COMMANDS.items() if known is kind)
    return found | ({"lr": rates[name]} if name in rates else {})


_Kind = TypeVar("_Kind")


def resolve(kind: type[_Kind], *given: Mapping[str, Any]) -> _Kind:
    """Options from the defaults, the presets, what a pattern says, and `given`; the later ones win."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    asked = {name: value for part in given for name, value in part.items()}
    usual = preset(kind, asked.get("data", ""), asked.get("model"))
    if asked.get("pattern") is not None:
        usual = usual | {"sparsity": patterns.sparsity(asked["pattern"])}
    return kind(**{name: value for name, value in usual.items() if name in names} | asked)


def identity(options: Any) -> dict[str, Any]:
    """What the outcome follows from: every option that names the run."""
    return {f.name: getattr(options, f.name) for f in fields(options) if f.metadata["names_run"]}


def changed(options: Any) -> dict[str, Any]:
    """The options that name the run and are not what the command takes by itself for this data, network and pattern."""
    own = identity(options)
    asked = {name: own[name] for name in own if name in ("data", "model", "pattern")}
    usual = asdict(resolve(type(options), asked)) | {"data": Options.data, "pattern": None}
    if "model" in own:
        usual["model"] = resolve(type(options), {"data": own["data"]}).model
    return {name: value for name, value in own.items() if value != usual[name]}


def run_name(command: str, options: Any) -> str:
    """COMMAND-HASH: 10 hex digits of SHA-256 of the canonical JSON of `changed`; the demo as it is needs no hash."""
    asked = changed(options)
    if command == "demo" and not asked:
        return command
    canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return f"{command}-{hashlib.sha256(canonical.encode()).hexdigest()[:10]}"


def command_line(command: str, options: Any) -> str:
    """The shortest command that asks for this run."""
    words = ["pacprune", command]
    for name, value in changed(options).items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value else flag.replace("--", "--no-", 1)] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join(words)


def to_toml(command: str, options: Any) -> str:
    """All options as a config file; None is left out."""
    lines = [f'command = "{command}"']
    for name, value in asdict(options).items():
        if value is not None:
            # JSON writes strings, Booleans and numbers as TOML reads them.
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def from_toml(path: Path, command: str | None = None) -> tuple[str, dict[str, Any]]:
    """(command, options) of a config file, every key and type checked; it must be for `command` when one is given."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the config file {path} cannot be read ({error}); give a TOML file") from None
    found = content.pop("command", command)
    if found not in COMMANDS or command not in (None, found):
        raise ValueError(
            f"{path} is for the command {found!r}, not for {command or ' or '.join(COMMANDS)}; use another one"
        )
    kinds = types_of(COMMANDS[found])
    if "criterion" not in kinds and content.get("criterion") == "magnitude":
        del content["criterion"]  # older run folders name it for every method, with this value alone
    for name, value in content.items():
        if name not in kinds:
            raise ValueError(f"{path} has an unknown key {name!r}; pacprune {found} knows {', '.join(kinds)}")
        if kinds[name] is float and type(value) is int:
            content[name] = float(value)
        elif type(value) is not kinds[name]:
            raise ValueError(f"{name} in {path} is {value!r}, but it must be a {kinds[name].__name__}; change it")
    return found, content


def types_of(kind: type) -> dict[str, type]:
    """The plain type of every option: float for `float | None`."""
    hints = typing.get_type_hints(kind)
    return {
        name: next(part for part in typing.get_args(hint) or (hint,) if part is not types.NoneType)
        for name, hint in hints.items()
    }
