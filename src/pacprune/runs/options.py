"""The options of a command: one frozen dataclass gives its flags, help, defaults, config file and run name.

A method's dataclass is made from its row of METHODS and the signature of its verb.
"""

import functools
import hashlib
import inspect
import json
import re
import shlex
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pacprune import data, models
from pacprune.certification.bounds_table import FAMILIES
from pacprune.certification.commitment import SOURCE
from pacprune.data.own import FORMS
from pacprune.masking import criteria, patterns
from pacprune.masking.masks import SCOPES
from pacprune.methods.compress import SPARSITIES
from pacprune.methods.pft import FROZEN_LR, OFFSET_LR
from pacprune.methods.table import METHODS, Method, pruning_methods
from pacprune.training.config import GATE_RATIO, GATE_STEPS, SCHEDULES
from pacprune.training.posterior import OBJECTIVES

PARTS = ("train", "prior")
NAME_PATTERNS = ("include", "exclude")
"""Flags that hold patterns of names, separated by commas."""
SHARED = ("recipe", "mapping", "noise", "mask_share", "rounds", *NAME_PATTERNS)
"""Flags of methods that decide which stages and masks there are, and so must be shared by a population."""


def _option(default: Any, help: str, *, unset: str = "", names_run: bool = True, per_member: bool = False) -> Any:
    """One option.

    Args:
        default: Its default.
        help: What it is.
        unset: What counts where the default is None.
        names_run: False if it changes where a run happens but not its outcome.
        per_member: True if runs that differ in it can be trained as one population; whatever touches the data, the
            network or the length of a stage cannot.
    """
    metadata = {"help": help, "unset": unset, "names_run": names_run, "per_member": per_member}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Training:
    """The options of every command that trains a network on a split."""

    command: ClassVar[str]
    """The command whose options these are."""

    data: str = _option("digits", f"Data set: {', '.join(data.NAMES)}; or your own: {FORMS}.")
    model: str = _option("mlp", f"Network: {', '.join(models.NAMES)}; or your own: package.module:factory.")
    seed: int = _option(0, "Seed of the weights, the data order and the draws.")
    split_seed: int = _option(0, "Seed of the split: another one is another try on the same examples.")
    dense_epochs: int = _option(20, "Epochs of dense training before pruning; 0 prunes at initialisation.")
    epochs: int = _option(20, "Epochs after dense training.")
    lr: float = _option(0.1, "Learning rate of the weights.", per_member=True)
    batch_size: int = _option(128, "Examples per step.")
    schedule: str = _option("cosine", f"Learning-rate schedule: {', '.join(SCHEDULES)}.", per_member=True)
    warmup: float = _option(0.0, "Share of each stage's steps in which the learning rate rises.", per_member=True)
    weight_decay: float = _option(0.0, "Weight decay of the weights; keep probabilities have none.", per_member=True)
    dense_lr: float | None = _option(None, "Learning rate of dense training.", unset="--lr", per_member=True)
    dense_weight_decay: float | None = _option(
        None, "Weight decay of dense training.", unset="--weight-decay", per_member=True
    )
    augment: bool = _option(False, "Random crops and flips of the training images.")
    amp: bool = _option(False, "Train in bfloat16 where it is safe.")
    prior_fraction: float = _option(0.5, "Share of the training data in S_P: all that pbp's prior sees; 0: none.")
    device: str = _option("cpu", "Where to compute: cpu, cuda or cuda:N.", names_run=False)
    data_dir: str | None = _option(
        None, "Folder of the data files.", unset="$PACPRUNE_DATA, or a cache", names_run=False
    )


@dataclass(frozen=True)
class Options(Training):
    """The options that all methods share."""

    sparsity: float = _option(0.9, "Fraction of the weights to prune, in [0, 1).", per_member=True)


@dataclass(frozen=True)
class Pruning(Options):
    """The options of every method that leaves a plain sparse network."""

    train_on: str = _option(
        "train", "train: all training data; prior: S_P alone, so that `pacprune certify` can use the rest."
    )


@dataclass(frozen=True)
class Certifying(Options):
    """The options of every method that leaves a certificate."""

    epochs: int = _option(20, "Epochs of training the prior, after dense training and before --posterior-epochs.")
    posterior_epochs: int = _option(20, "Epochs of training the posterior on the bound.")
    posterior_lr: float = _option(0.02, "Learning rate of the posterior.", per_member=True)
    unlabelled: int = _option(100, "Training inputs kept aside, to certify the thresholded network by.")
    commit: bool = _option(False, "Stop after the prior and seal it; pacprune commit and certify --beacon go on.")
    source: str = _option(SOURCE, "With --commit: where the beacon will come from, which is sealed too.")


@dataclass(frozen=True)
class Compress(Training):
    """The sparsest network that provably keeps a limit.

    Trains the network and a chain of pruned ones on S_P, from dense to very sparse. Refines the chain around the limit
    on a validation part of S_P, writes the order down, and tests it on the rest of the training data, densest first,
    until one fails. With probability 1 - delta, every network that passed keeps the limit. The run folder then holds
    the network (packed.safetensors), the certificate, the figure, and report.html. Exit 0: a network passed, 1: none
    did, 2: bad input.
    """

    command: ClassVar[str] = "compress"

    max_error: float | None = _option(None, "Limit of the error rate on new data. One of the three limits is needed.")
    max_drop: float | None = _option(None, "Limit of the error rate minus that of the dense network.")
    max_disagreement: float | None = _option(
        None, "Limit of the share of inputs that the dense network answers otherwise."
    )
    delta: float = _option(0.05, "Probability with which the certificate may fail.")
    method: str = _option("pft", f"How networks are pruned: {', '.join(pruning_methods())}.")
    sparsities: str | None = _option(
        None,
        "Sparsities of the chain before it is refined, rising, separated by commas.",
        unset=",".join(f"{sparsity:g}" for sparsity in SPARSITIES),
    )
    include: str | None = _option(None, "Weights that may be pruned: patterns of names, separated by commas.")
    exclude: str | None = _option(None, "Weights that are left alone: patterns of names, separated by commas.")
    scope: str = _option("global", f"What weights are ranked in: {', '.join(SCOPES)}; erk: larger layers lose more.")
    refinements: int = _option(4, "How many networks are added where the limit is expected; on a GPU 2**N.")
    validation: float = _option(0.2, "Share of S_P on which the chain is refined.")
    front: bool = _option(False, "Bounds for all networks at once, each at its part of delta, in place of the walk.")
    declare: str | None = _option(
        None, "What pacprune cannot trace, such as what trained a network before --dense-epochs 0; it is quoted."
    )


@dataclass(frozen=True)
class Demo:
    """All procedures on small embedded data.

    Compresses a network for the 8x8 handwritten digits that come with the package as far as a promise allows: at most
    2 points worse than before, on new data. Then it prunes 90 % of one by osp, pft and pbp, and prints test errors and
    the certificate of pbp. All that takes about ten seconds on a CPU and needs no download. The run folder then holds
    the table (result.json), every network (compressed and model-METHOD.safetensors), the certificates, the figures, and
    report.html, which shows them all. A second call prints the finished result.
    """

    seed: int = _option(0, "Seed of the weights, the data order and the draws.")
    device: str = _option("cpu", "Where to compute: cpu, cuda or cuda:N.", names_run=False)


_CHOICES: dict[str, Iterable[str]] = {
    "criterion": criteria.CRITERIA,
    "objective": OBJECTIVES,
    "family": FAMILIES,
    **dict.fromkeys(NAME_PATTERNS, ("patterns of names", "separated by commas")),
}
"""Flags whose help lists the choices, or says in which form they are given."""


@functools.cache
def options_of(command: str, method: Method) -> type[Options]:
    """The options of a method's command: the shared ones, and its flags as the method's verb documents them."""
    parameters = inspect.signature(method.verb).parameters
    flags: list[tuple[str, Any, Any]] = []
    for flag in method.flags or ():
        if flag == "gate_lr":  # a field of the Config that the verb takes
            flags.append((flag, float | None, _gate_lr(method)))
            continue
        default = method.defaults.get(flag, parameters[flag].default)
        plain = _plain_type(parameters[flag].annotation)
        option = _option(default, flag_help(method, flag), per_member=flag not in SHARED)
        flags.append((flag, plain if default is not None else plain | None, option))
    text = f"{method.title}: {method.sentence}.\n\n{method.steps}"
    return make_dataclass(
        command.capitalize(),
        flags,
        bases=(Certifying if method.certifies else Pruning,),
        namespace={"command": command, "__doc__": text, "__module__": __name__},
        frozen=True,
    )


def _gate_lr(method: Method) -> Any:
    """The option --gate-lr: a field of the Config, which trains the masks, or with a certificate the prior."""
    unset = f"{GATE_RATIO:g} times --lr"
    if method.certifies:
        unset += "; recipe paper: --lr"
        posterior = "the posterior's follows likewise from --posterior-lr"
        return _option(
            None, f"Learning rate of the prior's keep probabilities; {posterior}.", unset=unset, per_member=True
        )
    if not method.takes("recipe"):
        return _option(None, "Learning rate of the keep probabilities.", unset=unset, per_member=True)
    unset = f"{OFFSET_LR:g}; recipe coupled: {unset}, both less in more than {GATE_STEPS} steps; recipe paper: --lr"
    unset += f"; recipe frozen: {FROZEN_LR:g}"
    return _option(None, "Learning rate of what decides which weights are kept.", unset=unset, per_member=True)


def flag_help(method: Method, flag: str) -> str:
    """The first sentence about a parameter under `Args:` of the verb, as help: `other` becomes --other, quotes go."""
    entry = re.search(rf"^    {flag}: (.+(?:\n {{8}}.+)*)", inspect.getdoc(method.verb) or "", re.M)
    if entry is None:
        raise ValueError(
            f"{method.title} offers the flag {flag!r}, but its docstring says nothing of it; add it to Args"
        )
    sentence = re.split(r"(?<=\.) (?=\S)", " ".join(entry[1].split()))[0]
    sentence = re.sub(r"`(\w+)`", lambda name: "--" + name[1].replace("_", "-"), sentence).replace('"', "")
    return f"{sentence[:-1]}: {', '.join(_CHOICES[flag])}." if flag in _CHOICES else sentence


def _plain_type(hint: Any) -> Any:
    """The type that a flag or a config file can hold: float of `float | None`, str of `str | Criterion`."""
    return next(part for part in typing.get_args(hint) or (hint,) if part in (bool, int, float, str))


class _Commands(Mapping[str, type]):
    """The options of every command that makes a run: the demo, compress, and each row of METHODS with a command."""

    def __getitem__(self, command: str) -> type:
        if command in _FIXED:
            return _FIXED[command]
        if command not in METHODS or METHODS[command].flags is None:
            raise KeyError(command)
        return options_of(command, METHODS[command])

    def __iter__(self) -> Iterator[str]:
        return iter([*_FIXED, *(name for name, method in METHODS.items() if method.flags is not None)])

    def __len__(self) -> int:
        return len(list(iter(self)))


_FIXED: dict[str, type] = {"demo": Demo, "compress": Compress}
"""Commands that run no single method."""
COMMANDS = _Commands()


def __getattr__(name: str) -> type[Any]:
    """The options of a method by their class name, such as `Pft`; unpickling looks here."""
    if name == name.capitalize() and name.lower() in COMMANDS:
        return COMMANDS[name.lower()]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LARGE = {"unlabelled": 5000, "draws": 20_000, "tolerance": 0.001}
_CERTIFIED: dict[str, dict[str, Any]] = {
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
"""Methods that certify have the paper's constants, and a finer certificate on larger data."""

_GREY = {"lr": 0.1, "dense_lr": 0.05, "dense_epochs": 12, "epochs": 12, "warmup": 0.05}
_PRUNED: dict[str, dict[str, Any]] = {
    "mnist": _GREY,
    "fashion-mnist": _GREY,
    "cifar10": {
        "model": "resnet20",
        "augment": True,
        "lr": 0.2,
        "dense_lr": 0.1,
        "weight_decay": 5e-4,
        "dense_epochs": 20,
        "epochs": 16,
        "warmup": 0.05,
    },
}
"""The other methods have the settings with which docs/tables.md compares them."""


def preset(kind: type, data: str, model: str | None = None, method: str | None = None) -> dict[str, Any]:
    """The values that a command chooses for a data set, with `model` or the data set's usual network."""
    if not issubclass(kind, Training):
        return {}
    if issubclass(kind, Certifying):
        return _CERTIFIED.get(data, {})
    usual = _PRUNED.get(data, {})
    row = METHODS.get(method or getattr(kind, "method", kind.command))  # an unknown method is refused later
    lr = None if row is None else row.rates.get((data, model or usual.get("model", kind.model)))
    return usual if lr is None else usual | {"lr": lr}


_Kind = TypeVar("_Kind")


def resolve(kind: type[_Kind], *layers: Mapping[str, Any]) -> _Kind:
    """Options from the defaults, the presets, the pattern's sparsity, and the layers; later ones win."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values = {name: value for layer in layers for name, value in layer.items()}
    usual = preset(kind, values.get("data", ""), values.get("model"), values.get("method"))
    if values.get("pattern") is not None:
        usual = usual | {"sparsity": patterns.sparsity(values["pattern"])}
    return kind(**{name: value for name, value in usual.items() if name in names} | values)


def identity(options: Any) -> dict[str, Any]:
    """The options that decide the outcome, and so name the run."""
    return {f.name: getattr(options, f.name) for f in fields(options) if f.metadata["names_run"]}


def shared(options: Any) -> dict[str, Any]:
    """The options in which runs must agree to be trained as one population: data and split, network and stages."""
    return {f.name: getattr(options, f.name) for f in fields(options) if not f.metadata["per_member"]}


def changes(options: Any) -> dict[str, Any]:
    """The options that name the run and differ from the command's choice for this data, network and pattern."""
    values = identity(options)
    chosen = {name: values[name] for name in values if name in ("data", "model", "pattern", "method")}
    usual = asdict(resolve(type(options), chosen)) | {"data": Training.data, "pattern": None, "method": Compress.method}
    if "model" in values:
        usual["model"] = resolve(type(options), {"data": values["data"]}).model
    return {name: value for name, value in values.items() if value != usual[name]}


def run_name(command: str, options: Any) -> str:
    """COMMAND-HASH: 10 hex digits of SHA-256 of the canonical JSON of `changes`; an unchanged demo has no hash."""
    values = changes(options)
    if command == "demo" and not values:
        return command
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return f"{command}-{hashlib.sha256(canonical.encode()).hexdigest()[:10]}"


def command_line(command: str, options: Any) -> str:
    """The shortest command for this run."""
    words = ["pacprune", command]
    for name, value in changes(options).items():
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
    """(command, options) of a config file, every key and type checked; refuses a file of another `command`."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the config file {path} cannot be read ({error}); give a TOML file") from None
    named = content.pop("command", command)
    if named not in COMMANDS or command not in (None, named):
        raise ValueError(
            f"{path} is for the command {named!r}, not for {command or ' or '.join(COMMANDS)}; use another one"
        )
    plain_types = types_of(COMMANDS[named])
    if "criterion" not in plain_types and content.get("criterion") == "magnitude":
        del content["criterion"]  # older run folders name it for every method, with this value alone
    return named, {name: checked_value(path, plain_types, name, value) for name, value in content.items()}


def checked_value(path: Path, plain_types: Mapping[str, type], name: str, value: Any) -> Any:
    """The value of a key in a TOML file, if key and type are right; a whole number may stand for a float."""
    if name not in plain_types:
        if (spelled := name.replace("-", "_")) in plain_types:
            raise ValueError(f"{path} has an unknown key {name!r}; did you mean {spelled}?")
        raise ValueError(f"{path} has an unknown key {name!r}; use one of {', '.join(plain_types)}")
    plain = plain_types[name]
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise ValueError(f"{name} in {path} is {value!r}, but it must be a {plain.__name__}; change it")
    return value


def types_of(kind: type) -> dict[str, type]:
    """The plain type of every option: float for `float | None`."""
    hints = typing.get_type_hints(kind)
    return {f.name: _plain_type(hints[f.name]) for f in fields(kind)}
