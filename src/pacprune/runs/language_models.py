"""From the folder of a language model to that of a pruned one: methods, data, memory, and what is written."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pacprune import __version__, imports, philox
from pacprune.data import text
from pacprune.data.own import name_share
from pacprune.data.text import Document
from pacprune.integrations import language_models as lm
from pacprune.integrations.language_models import HeldOut, Losses, Windows
from pacprune.masking import patterns, weights
from pacprune.methods.pft import FROZEN_LR
from pacprune.methods.pipeline import Pruned
from pacprune.runs.commands import check_device
from pacprune.training.config import Config
from pacprune.types import Progress, check_name

RESULT, USED = "result.json", "used_documents.txt"
"""What is written beside the model: the numbers, and which documents shaped the masks."""
LONGEST = 512
"""Tokens of a window, unless a length is given or the model takes fewer."""
CALIBRATION = 128
"""Windows that score weights, unless a number of tokens is given."""
STEPS, BATCH = 1000, 8
"""Steps of methods that train, and windows of each, unless others are given."""
DRAWN = 32
"""Documents that are drawn from a text at a time."""
MEASURED = 2**18
"""Tokens of held-out documents that are measured, about."""


class Goal(NamedTuple):
    """How many weights are to be pruned, and which ones: one of sparsity and pattern is given.

    Args:
        sparsity: Fraction of these weights, or None.
        pattern: N:M pattern, or None.
        names: Of the weights.
        scope: A key of SCOPES; None is the method's own.
    """

    sparsity: float | None
    pattern: str | None
    names: tuple[str, ...]
    scope: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a method."""
        return {"sparsity": self.sparsity, "pattern": self.pattern, "include": list(self.names)}


class Work(NamedTuple):
    """What a method works with.

    Args:
        goal: What is to be pruned.
        data: Windows that score the weights, or train.
        config: How a method trains.
        seed: Seed of what it draws.
        progress: Called after every step.
    """

    goal: Goal
    data: Windows
    config: Config
    seed: int
    progress: Progress | None


@dataclass(frozen=True)
class Method:
    """A row of METHODS.

    Args:
        prune: Prunes a model in place.
        sentence: What it does.
        bytes: Memory per weight beyond the weight itself, at the least.
        lr: The learning rate unless one is given; None where nothing is trained.
        frozen: Whether that is the gates' alone, and the weights stay as they are.
        scope: The key of SCOPES unless one is given; a method that trains nothing has no other.
    """

    prune: Callable[[Any, Work], Pruned]
    sentence: str
    bytes: float = 0.0
    lr: float | None = None
    frozen: bool = False
    scope: str = "layer"

    @property
    def trains(self) -> bool:
        """Whether there are steps and a learning rate."""
        return self.lr is not None

    def config(self, stage: Config, lr: float) -> Config:
        """The stage with a learning rate; where gates alone are trained, their optimiser is the method's own."""
        if not self.frozen:
            return replace(stage, lr=lr)
        plain = Config()
        return replace(stage, gate_lr=lr, lr=plain.lr, optimizer=plain.optimizer, weight_decay=0.0)


def _layerwise(solver: str) -> Callable[[Any, Work], Pruned]:
    def prune(model: Any, work: Work) -> Pruned:
        layerwise = imports.function("pacprune:layerwise")
        return layerwise(
            model, work.data, solver=solver, examples=len(work.data[0]), progress=work.progress, **work.goal.options
        )

    return prune


def _trained(verb: str, *, scope: str, **options: Any) -> Callable[[Any, Work], Pruned]:
    def prune(model: Any, work: Work) -> Pruned:
        terms = {"loss": lm.next_token, "seed": work.seed, "progress": work.progress}
        if work.goal.pattern is None:  # which has the same share of every layer
            terms |= {"scope": work.goal.scope or scope, "min_per_layer": 1}
        return imports.function(f"pacprune:{verb}")(
            model, work.data, work.config, **work.goal.options, **terms, **options
        )

    return prune


SCOPES = {
    "layer": "every layer has the same sparsity",
    "global": "the method distributes zeros over layers, of which each keeps at least one weight",
}
"""Where the zeros of a sparsity lie."""


METHODS: dict[str, Method] = {
    "magnitude": Method(_layerwise("magnitude"), "keeps the largest weights of every layer"),
    "wanda": Method(_layerwise("wanda"), "ranks a weight by its size times the norm of its input"),
    "sparsegpt": Method(_layerwise("sparsegpt"), "changes the weights that stay, to keep every layer's output"),
    "alps": Method(_layerwise("alps"), "the same with a stronger solver"),
    "gmp": Method(
        _trained("gmp", scope="global"),
        "prunes the smallest weights step by step while it trains",
        12.0,
        1e-4,
        scope="global",
    ),
    "frozen": Method(  # Wanda's scores cannot be compared between layers
        _trained("pft", recipe="frozen", criterion="wanda", distill=1.0, scope="layer"),
        "learns which weights are kept, as they are, from the answers of the whole model",
        5.0,
        FROZEN_LR,
        frozen=True,
    ),
    "pft": Method(
        _trained("pft", scope="global"),
        "trains weights, and which of them are kept, together",
        24.0,
        1e-4,
        scope="global",
    ),
}
"""How a language model can be pruned. Memory of those that train: gradients, moments, and what decides on masks."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `prune_lm` is asked for.

    Args:
        model: Folder of a causal language model that from_pretrained reads.
        data: Text that prunes it.
        method: Key of METHODS.
        sparsity: Fraction of the weights of all linear layers to prune, but for the vocabulary's.
        pattern: Or an N:M pattern.
        scope: Key of SCOPES, for methods that train; None is the method's own.
        exclude: Patterns of names of weights that are left alone.
        validation: Text to measure on; None takes a part of `data`.
        calibration_tokens: Tokens that score the weights; None is 128 windows.
        length: Tokens of a window; None is 512, or what the model takes.
        steps: Steps of methods that train; None is 1000.
        batch: Windows of a step; None is 8.
        lr: Learning rate of methods that train; None is the method's own.
        seed: Seed of which windows are taken, and in which order.
        device: Where to compute.
    """

    model: Path
    data: Path
    method: str = "sparsegpt"
    sparsity: float | None = None
    pattern: str | None = None
    scope: str | None = None
    exclude: tuple[str, ...] = ()
    validation: Path | None = None
    calibration_tokens: int | None = None
    length: int | None = None
    steps: int | None = None
    batch: int | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "cpu"


def prune_lm(options: Options, *, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Prunes the language model of a folder, and writes another folder that loads wherever transformers is.

    Args:
        options: What is pruned, how, and with what text.
        out: The folder to write; it must not be there.
        progress: Called after every step.

    Returns:
        The numbers that are written to result.json.

    Raises:
        ValueError: If anything does not fit. Nothing is written then.
    """
    method, device = _check(options, out)
    tokenizer = lm.load_tokenizer(options.model)
    _check_memory(options, method, device)
    documents = _documents(options)
    model = lm.load_model(options.model, device=device)
    length = _length(options, model)
    windows, used = sample_windows(
        tokenizer, documents.used, count=_count(options, method, length), length=length, seed=options.seed
    )
    measured = measured_part(tokenizer, documents.judges, length=length)
    with lm.as_linear(model):
        goal = _goal(options, model)
        before = lm.losses(model, measured)
        windows_there = windows[0].to(device), windows[1].to(device)
        config = _config(options, method, len(windows[0]), device)
        work = Work(goal, windows_there, config, options.seed, progress)
        with _computed(model, in_float=_in_float(method)):
            method.prune(model, work)
        counts = _counts(model, goal)
        after = lm.losses(model, measured)
    use = _use(documents, used, windows, method, options)
    result = _result(options, counts, before, after, use, length) | {"folder": str(out)}
    _write(out, model, tokenizer, result, used)
    return result


@contextmanager
def _computed(model: Any, *, in_float: bool) -> Iterator[None]:
    """Has all tensors in float32 meanwhile, if need be; then each in its own type again. Zeros stay zeros."""
    types = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if in_float:
        model.float()
    yield
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(types[name])


# --- What is refused before anything is computed.


def _check(options: Options, out: Path) -> tuple[Method, torch.device]:
    check_name("method", options.method, METHODS)
    _check_scope(options)
    _check_use(options)
    if (options.sparsity is None) == (options.pattern is None):
        shown = "neither sparsity nor pattern is" if options.sparsity is None else "sparsity and pattern are both"
        raise ValueError(f"{shown} given; give one of them, such as --pattern 2:4 or --sparsity 0.5")
    if options.pattern is not None:
        patterns.parse(options.pattern)
    elif options.sparsity is not None and not 0 < options.sparsity < 1:
        raise ValueError(f"sparsity is {options.sparsity}; it is a fraction between 0 and 1, such as 0.5")
    for name in ("length", "steps", "batch", "calibration_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1")
    _check_out(out)
    return METHODS[options.method], check_device(options.device)


def _check_scope(options: Options) -> None:
    if options.scope is None:
        return
    check_name("scope", options.scope, SCOPES)
    if options.pattern is not None:
        raise ValueError(
            f"scope is {options.scope}, but the pattern {options.pattern} keeps the same share of every layer; leave "
            "the scope out"
        )
    if options.scope != "layer" and not METHODS[options.method].trains:
        raise ValueError(
            f"scope is {options.scope}, but {options.method} prunes every layer to the same sparsity; leave it out, or "
            "give a method that trains"
        )


def _check_use(options: Options) -> None:
    """Refuses what the method would not use."""
    trains = METHODS[options.method].trains
    for name in ("calibration_tokens",) if trains else ("steps", "batch", "lr"):
        if getattr(options, name) is not None:
            use = "takes its windows by steps and batch" if trains else "trains nothing"
            raise ValueError(
                f"{name} is {getattr(options, name)}, but {options.method} {use}; leave it out, or give another method"
            )


def _check_out(out: Path) -> None:
    """Refuses a folder that is there, or that cannot be made."""
    if out.exists():
        raise ValueError(f"{out} exists, and is not written over; give another --out, or remove it")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{out} cannot be made, since {above} is no folder; give another --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be made, since {above} cannot be written to; give another --out")


def _check_memory(options: Options, method: Method, device: torch.device) -> None:
    """Refuses a model whose weights alone, with what the method keeps of each, do not fit; activations come on top."""
    count, free = lm.size_of(options.model), lm.free_memory(device)
    each = method.bytes + (4 if _in_float(method) else lm.stored_bytes(options.model) / count)
    if free is not None and count * each > free:
        smaller = "; a one-shot method such as --method sparsegpt takes the weights alone" if method.trains else ""
        raise ValueError(
            f"{options.model} has {count:,} weights, which take {_gb(count * each)} with {options.method}, but "
            f"{device} has {_gb(free)} free: a model of at most {int(free / each):,} weights fits{smaller}"
        )


def _in_float(method: Method) -> bool:
    """Whether the weights are trained, which takes 32 bits of each."""
    return method.trains and not method.frozen


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g} GB"


class _Documents(NamedTuple):
    """Documents that prune, those that are measured on, and files that are no text."""

    used: list[Document]
    judges: list[Document]
    skipped: list[str]


def _documents(options: Options) -> _Documents:
    """What prunes, and what is measured on: of one text, documents of other parts by the hashes of their names."""
    skipped: list[str] = []
    parts = text.by_part(text.read(options.data, skipped=skipped))
    used = parts["train"] + parts["calibration"]
    judges = parts["validation"] if options.validation is None else text.read(options.validation, skipped=skipped)
    if options.validation is not None:
        text.check_apart(used, judges, what=f"documents of {options.validation}")
    check_unused(options.model, judges)
    for documents, part in ((used, "train and calibration"), (judges, "validation")):
        if not documents:
            count = sum(map(len, parts.values()))
            raise ValueError(
                f"{options.data} has {count} document{'s' * (count != 1)}, none of them in the part {part}; give more "
                "documents, or for validation --validation TEXT"
            )
    return _Documents(used, judges, skipped)


def check_unused(folder: Path, documents: Sequence[Document]) -> None:
    """Refuses documents that shaped the masks of a folder which `prune_lm` wrote: nothing held out may have.

    Args:
        folder: Of a model; one that was not written by `prune_lm` says nothing about documents.
        documents: What is to be measured or certified on.

    Raises:
        ValueError: If any of them, by its SHA-256, is among the folder's used_documents.txt.
    """
    lines = (folder / USED).read_text().splitlines() if (folder / USED).is_file() else []
    used = {line.partition(" ")[0] for line in lines}
    common = [document.name for document in documents if _sha256(document) in used]
    if common:
        raise ValueError(
            f"{len(common)} of the documents to measure on shaped the masks of {folder}, such as {common[0]} (see its "
            f"{USED}); give --validation with others"
        )


def _sha256(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()


def _length(options: Options, model: Any) -> int:
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST
    if options.length is None:
        return min(longest, LONGEST)
    if options.length > longest:
        raise ValueError(f"length is {options.length}, but the model takes at most {longest} tokens; give fewer")
    return options.length


def _goal(options: Options, model: Any) -> Goal:
    """The weights to prune; refuses a pattern that does not divide their rows."""
    shapes = {name: model.get_parameter(name).shape for name in lm.block_weights(model)}
    for entry in options.exclude:
        left = [name for name in shapes if weights.matches(entry, [name])]
        if not left:
            raise ValueError(
                f"exclude={entry!r} names none of the weights that could be pruned, such as {weights.some(shapes, 3)}"
            )
        shapes = {name: shape for name, shape in shapes.items() if name not in left}
    if not shapes:
        raise ValueError("there is no linear layer to prune but that of the vocabulary; give another model")
    if options.pattern is not None:
        _, m = patterns.parse(options.pattern)
        odd = [(name, shape[1]) for name, shape in shapes.items() if shape[1] % m]
        if odd:
            name, inputs = odd[0]
            raise ValueError(
                f"pattern is {options.pattern}, but {name} has {inputs} inputs, which {m} does not divide; leave it "
                f"out by --exclude, or give --sparsity {patterns.sparsity(options.pattern):g}"
            )
    return Goal(options.sparsity, options.pattern, tuple(shapes), options.scope)


# --- Text as windows.


def sample_windows(
    tokenizer: Any, documents: Sequence[Document], *, count: int, length: int, seed: int
) -> tuple[Windows, list[Document]]:
    """So many windows of a text, or fewer if it is shorter, at random from documents in a random order; and these.

    Raises:
        ValueError: If the text is shorter than one window.
    """
    order = philox.permutation(len(documents), seed=seed).tolist()
    tokens, drawn, size = [], [], 0
    for start in range(0, len(order), DRAWN):
        portion = [documents[k] for k in order[start : start + DRAWN]]
        drawn += portion
        tokens += lm.tokens_of(tokenizer, portion)
        size = sum(map(len, tokens))
        if size > 4 * count * length:
            break
    x, y = lm.packed(tokens, end=lm.end_of(tokenizer), length=length)
    if not len(x):
        raise ValueError(
            f"the text to prune with has {size} tokens, fewer than one window of {length}; give more text, or --length "
            f"{max(1, size // 2)}"
        )
    chosen = philox.permutation(len(x), seed=seed)[:count]
    return (x[chosen], y[chosen]), drawn


def measured_part(tokenizer: Any, documents: Sequence[Document], *, length: int) -> HeldOut:
    """Whole documents to measure on, in the order of the hashes of their names, until there are MEASURED tokens."""
    order = sorted(documents, key=lambda document: name_share(document.name))
    chosen, numbers = [], []
    for document in order:
        chosen.append(document)
        numbers += lm.tokens_of(tokenizer, [document])
        if sum(map(len, numbers)) >= MEASURED:
            break
    return lm.held_out(numbers, lm.sizes_of(chosen), end=lm.end_of(tokenizer), length=length)


def _count(options: Options, method: Method, length: int) -> int:
    """How many windows are taken."""
    if method.trains:
        return (options.steps or STEPS) * (options.batch or BATCH)
    return CALIBRATION if options.calibration_tokens is None else max(1, options.calibration_tokens // length)


def _config(options: Options, method: Method, windows: int, device: torch.device) -> Config:
    """About `steps` steps: in several epochs where the text has too few windows for one."""
    steps, batch = options.steps or STEPS, options.batch or BATCH
    stage = Config(
        epochs=max(1, round(steps / math.ceil(windows / batch))),
        batch_size=batch,
        optimizer="adamw",
        schedule="cosine",
        warmup=0.05,
        clip=1.0,
        amp=device.type == "cuda",
    )
    return stage if method.lr is None else method.config(stage, method.lr if options.lr is None else options.lr)


# --- What is written.


def _counts(model: Any, goal: Goal) -> dict[str, Any]:
    """Zeros and weights of what could be pruned, counted in the model itself; and their type."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in goal.names]
    zeros, size = sum(int((w == 0).sum()) for w in chosen), sum(w.numel() for w in chosen)
    everything = sum(parameter.numel() for parameter in parameters.values())
    dtype = str(chosen[0].dtype).removeprefix("torch.")
    return {"zeros": zeros, "prunable": size, "weights": everything, "dtype": dtype}


def _use(
    documents: "_Documents", used: Sequence[Document], windows: Windows, method: Method, options: Options
) -> dict[str, Any]:
    """What the text served for, and notes on what it did not."""
    count, length = windows[0].shape
    wanted, notes = _count(options, method, length), []
    if documents.skipped:
        some = weights.some(documents.skipped, 3)
        notes.append(f"files that are no UTF-8 text were left out, {len(documents.skipped):,} in all: {some}")
    if count < wanted:
        again = "; each was trained on several times" if method.trains else ""
        notes.append(f"the text has {count:,} windows of {length} tokens, where {wanted:,} were to be used{again}")
    steps, batch, lr = _training(options, method)
    return {
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "calibration_tokens": None if method.trains else windows[0].numel(),
        "used": {"documents": len(used), "windows": count, "tokens": windows[0].numel()},
        "left_out": len(documents.skipped),
        "notes": notes,
    }


def _training(options: Options, method: Method) -> tuple[int | None, int | None, float | None]:
    """Steps, windows of each, and learning rate; None where nothing is trained."""
    if not method.trains:
        return None, None, None
    return options.steps or STEPS, options.batch or BATCH, method.lr if options.lr is None else options.lr


def _result(
    options: Options,
    counts: Mapping[str, Any],
    before: Losses,
    after: Losses,
    use: Mapping[str, Any],
    length: int,
) -> dict[str, Any]:
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    scope = None if options.pattern is not None else options.scope or METHODS[options.method].scope
    return {
        **asked,
        "version": __version__,
        "length": length,
        "scope": scope,
        "sparsity": counts["zeros"] / counts["prunable"],
        "asked_sparsity": options.sparsity,
        **counts,
        "loss_per_token": {"before": before.per_token, "after": after.per_token},
        "loss_per_byte": {"before": before.per_byte, "after": after.per_byte},
        "held_out": {
            "documents": len(after.bytes),
            "tokens": int(after.tokens.sum()),
            "bytes": int(after.bytes.sum()),
        },
        **use,
    }


def _write(out: Path, model: Any, tokenizer: Any, result: Mapping[str, Any], used: Sequence[Document]) -> None:
    """The whole folder under another name, which it loses at the end: what is there is complete."""
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        lm.save(model, tokenizer, part)
        lines = [f"{_sha256(document)} {document.name}\n" for document in used]
        (part / USED).write_text("".join(lines))
        (part / RESULT).write_text(json.dumps(result, indent=2) + "\n")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
