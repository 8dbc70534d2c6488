"""Which weights can be pruned, how many are zero, and what pacprune has noted about a model."""

import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pacprune.data import trace
from pacprune.data.trace import Trace
from pacprune.distributed import across_model, check_alike, count, is_sharded, local
from pacprune.types import Diverged

Prunable = Callable[[nn.Module], Mapping[str, Tensor]]
"""The type of `prunable`: pass your own function wherever a `prunable=` is taken to restrict what is pruned."""
Which = str | type[nn.Module] | nn.Module | Sequence["str | type[nn.Module] | nn.Module"]
"""Weights by a pattern of their names, by the type of the modules they lie in, or by these modules; or several such."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every floating-point parameter of two or more dimensions, by its name; a tied weight once, under its first name.

    That covers Linear, Conv, Embedding, MultiheadAttention, LSTM and anything nested. Your own function of the model
    keeps a layer out; the pipelines and criteria take it as their `prunable`.

    Args:
        model: A plain model, without stochastic masks.

    Returns:
        The parameters themselves, in the model's order.

    Raises:
        ValueError: If there are none, if some are NaN or infinite, or if something else computes a weight anew (weight
            norm, a parametrization).

    Example:
        >>> def body(model):
        ...     return {name: w for name, w in pp.prunable(model).items() if not name.startswith("3.")}
        >>> list(pp.prunable(model)), list(body(model))
        (['1.weight', '3.weight'], ['1.weight'])
        >>> pruned = pp.osp(model, split.train, pp.Config(epochs=1), sparsity=0.8, prunable=body)
        >>> round(pruned.sparsity, 3), int((model[3].weight == 0).sum())  # of all weights; none in the last layer
        (0.8, 0)
    """
    weights = all_weights(model)
    refuse_computed(model, weights)
    return weights


def all_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """What D counts: as `prunable`, and with those of which something else computes a weight anew."""
    across_model(model)
    refuse_lazy(model)
    weights = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and p.is_floating_point()}
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has nothing to prune: none of its {sum(1 for _ in model.parameters())} parameters "
            "has two or more dimensions; give a model with Linear, Conv, Embedding or similar layers"
        )
    for name, weight in weights.items():
        _refuse_sampled(model, name)
        bad = count(~torch.isfinite(weight))
        if bad:
            raise Diverged(
                f"{name} has {bad} NaN or infinite weights of {weight.numel()}; train it again with a smaller lr"
            )
    return weights


def select(*, include: Which | None = None, exclude: Which | None = None, among: Prunable = prunable) -> Prunable:
    """What `include=` and `exclude=` of the methods choose, as a function of the model for criteria's `prunable=`.

    A pattern is one of a shell, such as "encoder.*.attention" or "head*". It stands for the weights with such a name,
    and for those inside a module with such a name. A type of module, such as torch.nn.Embedding, or a module itself,
    stands for all weights in it. Parameters with requires_grad=False are left out unless `include` names them.
    Layers whose weight something else computes, such as weight norm, have to be left out.

    Args:
        include: What may be pruned: a pattern, a type, a module or a list of these; None is everything.
        exclude: What of that is left alone, likewise; None is nothing.
        among: What there is to choose from: model -> {name: weight}.

    Returns:
        A function model -> {name: weight}.

    Example:
        >>> body = pp.select(exclude="3")
        >>> list(body(model))
        ['1.weight']
        >>> mask = pp.top_k(pp.scores.magnitude(model, prunable=body), sparsity=0.9)
        >>> pruned = pp.osp(model, split.train, pp.Config(epochs=1), sparsity=0.9, exclude="3")
        >>> round(pruned.selected_sparsity, 3), int((model[3].weight == 0).sum())
        (0.9, 0)
    """

    def selected(model: nn.Module) -> dict[str, Tensor]:
        chosen = choose(model, include=include, exclude=exclude, among=among)
        refuse_computed(model, chosen)
        return chosen

    return selected


def choose(
    model: nn.Module, *, include: Which | None = None, exclude: Which | None = None, among: Prunable = prunable
) -> dict[str, Tensor]:
    """What `select` chooses, and with it the weights that something else computes."""
    weights = all_weights(model) if among is prunable else among(model)
    if include is None:
        chosen = {name for name, weight in weights.items() if weight.requires_grad}
    else:
        chosen = _named(model, weights, include, "include")
    if exclude is not None:
        chosen -= _named(model, weights, exclude, "exclude")
    if not chosen:
        raise ValueError(
            f"include={include!r} and exclude={exclude!r} leave nothing to prune of {some(weights)}; frozen "
            "weights are left alone unless include names them"
        )
    return {name: weight for name, weight in weights.items() if name in chosen}


def _named(model: nn.Module, weights: Mapping[str, Tensor], which: Which, keyword: str) -> set[str]:
    """The names of the weights that are meant; refuses what means none."""
    names: set[str] = set()
    for entry in which if isinstance(which, (list, tuple, set)) else [which]:
        if isinstance(entry, str):
            meant = {name for name in weights if matches(entry, _names_of(model, weights[name]) or [name])}
        elif isinstance(entry, nn.Module):
            if all(entry is not module for module in model.modules()):
                raise ValueError(
                    f"{keyword} has a {type(entry).__name__} that is not a module of this model; was it taken before a "
                    "deepcopy?"
                )
            meant = _inside(weights, [entry])
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            meant = _inside(weights, [module for module in model.modules() if isinstance(module, entry)])
        else:
            raise ValueError(
                f"{keyword} has {entry!r}, a {type(entry).__name__}; give patterns of names, types of module or modules"
            )
        if not meant:
            shown = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
            raise ValueError(f"{keyword}={shown!r} names no weight of the model; it has {some(weights)}")
        names |= meant
    return names


def matches(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern fits one of a weight's names, or the name of a module that it lies in."""
    return pattern in names or any(
        fnmatchcase(".".join(parts[:length]), pattern)
        for parts in (name.split(".") for name in names)
        for length in range(1, len(parts) + 1)
    )


def _names_of(model: nn.Module, weight: Tensor) -> list[str]:
    """All names of a weight: a tied one has several."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p is weight]


def _inside(weights: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> set[str]:
    """The names of the weights that lie in these modules."""
    inner = {id(p) for module in modules for p in module.parameters()}
    return {name for name, weight in weights.items() if id(weight) in inner}


def some(names: Iterable[str], most: int = 6) -> str:
    """Some names, in words."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def refuse_lazy(model: nn.Module) -> None:
    """Refuses a model whose lazy layers have no shape yet."""
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet, since its layer is lazy; run one batch through the model first")


def refuse_sparse_gradients(model: nn.Module, names: Container[str] | None = None) -> None:
    """Refuses weights whose gradients are sparse tensors: all, or those of these names, which could be left out."""
    for path, module in model.named_modules():
        name = f"{path}.weight".removeprefix(".")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and (names is None or name in names):
            remedy = f"make its {type(module).__name__} with sparse=False"
            remedy += "" if names is None else ", or leave it out by exclude="
            raise ValueError(f"{name} gets sparse gradients; {remedy}")


def refuse_computed(model: nn.Module, names: Iterable[str]) -> None:
    """Refuses weights from which something else computes others: pruning them would not last."""
    for name in names:
        if parametrized := _parametrization(model, name):
            computed, first = parametrized
            raise ValueError(
                f"{computed} is parametrized by {type(first).__name__}; call "
                "torch.nn.utils.parametrize.remove_parametrizations on it first, or leave it out by exclude="
            )
        if (hook := _computing_hook(model, name)) is not None:
            owner, kind = name.rpartition(".")[0], type(hook).__name__
            remedy = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}
            raise ValueError(
                f"the weight of {owner or type(model).__name__} is computed by {kind}, so pruning it would not "
                f"last; call torch.nn.utils.{remedy.get(kind, 'prune.remove')} on that layer first, or leave it "
                "out by exclude="
            )


def computed(model: nn.Module) -> list[str]:
    """The names of the weights from which something else computes others: they stay as they are, or are refused."""
    return [name for name in all_weights(model) if _parametrization(model, name) or _computing_hook(model, name)]


def plain_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All weights but those from which something else computes others."""
    left_alone = computed(model)
    return {name: weight for name, weight in all_weights(model).items() if name not in left_alone}


def refuse_torch_masks(model: nn.Module) -> None:
    """Refuses masks of torch.nn.utils.prune, whose zeros are not in the tensors that a file would hold."""
    by_name = {name: _computing_hook(model, name) for name in all_weights(model)}
    refuse_computed(model, [n for n, hook in by_name.items() if type(hook).__module__ == "torch.nn.utils.prune"])


def _computing_hook(model: nn.Module, name: str) -> object | None:
    """What computes the layer's weight before every forward pass; None where nothing does."""
    for hook in model.get_submodule(name.rpartition(".")[0])._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):  # weight_norm, spectral_norm or prune
            return hook
    return None


def _refuse_sampled(model: nn.Module, name: str) -> None:
    """Refuses a weight that has a stochastic mask."""
    parametrized = _parametrization(model, name)
    if parametrized and type(parametrized[1]).__module__ == "pacprune.masking.sampler":
        raise ValueError(
            f"{parametrized[0]} has a stochastic mask, since a run was interrupted, or it was attached before: "
            "start from a fresh copy, or call pp.harden(model)"
        )


def _parametrization(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The weight that is computed from this one, and the first that computes it; None where nothing does."""
    if ".parametrizations." not in f".{name}":
        return None
    layer, _, inner = name.partition("parametrizations.")
    tensor = inner.partition(".")[0]
    return f"{layer}{tensor}", model.get_submodule(f"{layer}parametrizations.{tensor}.0")


def total(model: nn.Module) -> int:
    """D, the denominator of every sparsity: all weights in tensors of two or more dimensions, pruned or not."""
    return sum(w.numel() for w in all_weights(model).values())


def sparsity(model: nn.Module) -> float:
    """The counted fraction of zeros among the D weights of a plain model.

    Args:
        model: A plain model, without stochastic masks.

    Returns:
        A fraction in [0, 1]; biases and other parameters of fewer than two dimensions are not counted.

    Example:
        >>> mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.75)
        >>> pp.sparsity(pp.apply_mask(model, mask))
        0.75
    """
    warn_of_revived(model)
    return sum(count(w == 0) for w in all_weights(model).values()) / total(model)


class Receipt(TypedDict):
    """What training on a bound leaves behind, and without which there is no certificate."""

    prior: str
    """The hash of the prior P."""
    bound: str
    """The hash of the bound set."""
    written: str
    """The folder that P was written to before the bound set was read."""


@dataclass
class Notes:
    """What pacprune has noted about a module: a plain attribute of it, which a deepcopy copies.

    Every module of a model has its own, so that a network that is made of parts knows what its parts know.

    Args:
        seen: What any training or scoring used; None where there was none.
        trained: Whether a `fit` has moved weights of the model that it was part of.
        changed: When pacprune last trained or pruned it, as `trace.now` counts; None where it never did.
        fingerprint: Of its own parameters and buffers, without those of the modules inside, after the last training or
            pruning by pacprune, so that a change by something else is noticed; None where there was none.
        mask: Which weights are kept, by their names in this module; `fit` keeps the others at zero. None: no mask.
        moving: Whether the mask is one on the way, which another may follow.
        learned: What decides beside the weights which of them are kept, while it is trained; None where nothing does.
        total: D, the number of weights that sparsity is counted in; None until a mask or gates were given.
        receipt: What training on a bound left; None where there was no such training.
    """

    seen: Trace | None = None
    trained: bool = False
    changed: int | None = None
    fingerprint: int | None = None
    mask: dict[str, Tensor] | None = None
    moving: bool = False
    learned: dict[str, nn.Parameter] | None = None
    total: int | None = None
    receipt: Receipt | None = None


def notes(module: nn.Module) -> Notes:
    """The notes on this very module, to be read or written; empty ones where there were none."""
    return module.__dict__.setdefault("_pacprune_notes", Notes())


def noted(model: nn.Module) -> Iterator[tuple[nn.Module, Notes]]:
    """All notes, on the model or on a module inside: a wrapper must not make us forget."""
    for module in model.modules():
        if "_pacprune_notes" in module.__dict__:
            yield module, notes(module)


def noted_masks(model: nn.Module) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Every module with a noted mask, and that mask."""
    return [(module, note.mask) for module, note in noted(model) if note.mask is not None]


def forget_masks(model: nn.Module) -> None:
    """Takes every noted mask off, of the model and of the modules inside."""
    for _, note in noted(model):
        note.mask = None


def noted_total(model: nn.Module) -> int:
    """D of a model that has a mask or gates, whatever became of its weights since."""
    return next(note.total for _, note in noted(model) if note.total is not None)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts train and eval mode back at the end, module by module: a frozen BatchNorm stays frozen."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def seen(model: nn.Module) -> Trace:
    """What any fit, criterion, mask or BatchNorm estimate used on this model."""
    together = Trace()
    # Most modules share one trace; the others are few.
    for part in {id(note.seen): note.seen for _, note in noted(model) if note.seen is not None}.values():
        together = together | part
    return together


def mark_seen(models: nn.Module | Sequence[nn.Module], use: Trace) -> None:
    """Adds to what the models have seen; a certificate is refused when the prior saw the bound set."""
    use = use.without(trace.UNTRAINED)  # which says nothing about data, and `Notes.trained` knows it
    unions: list[tuple[Trace, Trace]] = []  # members have mostly seen the same, and sorting millions takes its time
    for model in [models] if isinstance(models, nn.Module) else models:
        before = seen(model)
        after = next((union for same, union in unions if same.equal(before)), None)
        if after is None:
            after = before | use
            unions.append((before, after))
        for module in model.modules():
            notes(module).seen = after


@contextmanager
def changing(model: nn.Module, *, chosen: bool = True) -> Iterator[None]:
    """While pacprune changes the weights: what something else did to them before is noted, and so is their new state.

    A model that pacprune has not changed yet is taken as it is. What was evaluated before may have been the reason for
    the change, unless it is not `chosen`.
    """
    note_changes([model])
    forget_stamps([model])
    if chosen:
        mark_seen(model, trace.looked())
    try:
        yield
    finally:
        stamp([model])


@contextmanager
def training(models: Sequence[nn.Module]) -> Iterator[None]:
    """While `fit` trains: as `changing`, and where weights have moved at the end, pacprune has trained the model."""
    note_changes(models)
    before, looks = [_fingerprints(model) for model in models], trace.count_looks()
    forget_stamps(models)
    try:
        yield
    finally:
        if trace.count_looks() > looks:  # by a progress, or anything else that runs meanwhile
            mark_seen(models, trace.looked())
        stamp(models)
        for model, start in zip(models, before, strict=True):
            if None in start.values() or any(notes(module).fingerprint != start.get(module) for module in start):
                _mark_trained(model, trained=True)


@contextmanager
def watched(model: nn.Module, *, closely: bool) -> Iterator[None]:
    """While a function of the user's runs in the middle of training: that it has changed weights is noted as foreign.

    What is written through `.data` changes no version of a tensor, and is noticed `closely` alone, by all numbers.
    """

    def state() -> list[int | None]:
        return [*(trace.version_of(t) for t in _tensors(model)), fingerprint(model) if closely else None]

    before = state()
    try:
        yield
    finally:
        if state() != before:
            mark_seen(model, trace.foreign())


def last_change(model: nn.Module) -> int | None:
    """When pacprune last trained, pruned or loaded the model or a part of it; None where it never did."""
    return max((note.changed for _, note in noted(model) if note.changed is not None), default=None)


def _mark_trained(model: nn.Module, *, trained: bool) -> None:
    for module in model.modules():
        notes(module).trained = trained


def take_over(models: nn.Module | Sequence[nn.Module], known: Trace) -> None:
    """Notes that the models' weights now are those of something with this `origin`."""
    mark_seen(models, known)
    for model in [models] if isinstance(models, nn.Module) else models:
        _mark_trained(model, trained=trace.UNTRAINED not in known.labelled)
        stamp([model])


def origin(model: nn.Module) -> Trace:
    """What shaped the model's present weights, and what pacprune does not know about that.

    The trace holds FOREIGN where something else has changed weights, and UNTRAINED where pacprune has never trained a
    layer.
    """
    note_changes([model])
    owners = [module for module in model.modules() if any(p is not None for p in module._parameters.values())]
    trained = all(notes(module).trained for module in owners)
    return seen(model) | (Trace() if trained else trace.foreign(trace.UNTRAINED))


def note_changes(models: Sequence[nn.Module]) -> None:
    """Notes on every model whether something other than pacprune has changed its weights since `stamp`."""
    for model in models:
        stamped = [(module, note.fingerprint) for module, note in noted(model) if note.fingerprint is not None]
        if any(_own_fingerprint(module) != known for module, known in stamped):
            mark_seen(model, trace.foreign())


def forget_stamps(models: Sequence[nn.Module]) -> None:
    """While pacprune itself changes the weights, no stamp is right."""
    for model in models:
        for _, note in noted(model):
            note.fingerprint = None


def stamp(models: Sequence[nn.Module]) -> None:
    """Notes the present state of every model's weights as pacprune's own."""
    for model in models:
        moment = trace.now()
        for module, value in _fingerprints(model).items():
            notes(module).fingerprint, notes(module).changed = value, moment


def _fingerprints(model: nn.Module) -> dict[nn.Module, int | None]:
    """The fingerprint of every module's own tensors; the samplers' are not weights."""
    modules = (module for module in model.modules() if type(module).__module__ != "pacprune.masking.sampler")
    return {module: _own_fingerprint(module) for module in modules}


def _own_fingerprint(module: nn.Module) -> int | None:
    return _fingerprint([t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None])


def fingerprint_of_rest(model: nn.Module, pruned: Iterable[Tensor]) -> int | None:
    """64 bits of the model's parameters but for these; forward passes do not change them, as they do statistics."""
    ids = {id(weight) for weight in pruned}
    return _fingerprint([p for p in model.parameters() if id(p) not in ids])


def fingerprint(model: nn.Module) -> int | None:
    """64 bits that another value anywhere in the model's parameters or buffers is almost sure to change.

    The samplers' own numbers (seeds, steps, budgets) do not count. A model that is cut into shards has none.
    """
    return _fingerprint(_tensors(model))


def _tensors(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers but those of samplers."""
    samplers = {id(b) for m in model.modules() if type(m).__module__ == "pacprune.masking.sampler" for b in m.buffers()}
    return [t for t in (*model.parameters(), *model.buffers()) if id(t) not in samplers]


@torch.no_grad()
def _fingerprint(tensors: Sequence[Tensor]) -> int | None:
    tensors = [t for t in tensors if t.numel()]
    if any(is_sharded(t) or t.is_meta for t in tensors):
        return None
    sums = [_sum_of_bits(t.detach().contiguous().view(-1)) for t in tensors]
    value = 0
    for part in torch.stack([s.to(sums[0].device) for s in sums]).tolist() if sums else []:
        value = (value * 1_000_003 + part) % 2**64
    return value


def _sum_of_bits(flat: Tensor) -> Tensor:
    """The sum of all numbers' bits, each multiplied by an odd number that follows from its place, modulo 2^64."""
    size = flat.element_size()
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), 2**22):
        part = bits[start : start + 2**22].long()
        place = torch.arange(start, start + len(part), device=flat.device)
        total += (part * (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F | 1)).sum()
    return total


def hidden(model: nn.Module) -> list[str]:
    """Tensors, arrays and modules that a model keeps beside its parameters, buffers and modules, by their places.

    They are in plain attributes, or in dictionaries, lists and dataclasses there. No training notes what they know, and
    no hash has them. What is a parameter or a buffer of the model under another name is none, and neither is a weight
    that weight norm or another hook of torch computes anew.
    """
    known = _tensors(model)
    places = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _REGISTERED or any(f"{name}{end}" in module._parameters for end in ("_orig", "_g")):
                continue
            places += [f"{path}.{place}".removeprefix(".") for place in _loose(value, name, {id(model)}, model, known)]
    return places


_REGISTERED = ("_parameters", "_buffers", "_modules", "_pacprune_notes")


def _loose(value: object, place: str, met: set[int], model: nn.Module, known: Sequence[Tensor]) -> Iterator[str]:
    """The places of what is in no parameter, buffer or module of the model, inside a value."""
    if id(value) in met:
        return
    met.add(id(value))
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value) if value.dtype.kind in "biuf" else None
    if isinstance(value, Tensor) and value.numel() and not any(_same(value, other) for other in known):
        yield place
    is_other = isinstance(value, nn.Module) and all(value is not module for module in model.modules())
    if is_other and any(True for _ in _inside_of(value)):
        yield place
    for part, entry in _entries(value):
        yield from _loose(entry, f"{place}{part}", met, model, known)


def _entries(value: object) -> Iterator[tuple[str, object]]:
    """What lies in a dictionary, a list or a dataclass, and where."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r:.40}]", entry) for key, entry in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{number}]", entry) for number, entry in enumerate(value))
    elif (is_dataclass(value) and not isinstance(value, type)) or isinstance(value, SimpleNamespace):
        yield from ((f".{name}", entry) for name, entry in getattr(value, "__dict__", {}).items())


def _inside_of(module: Any) -> Iterator[object]:
    """What a module could keep: its tensors, and whatever it hides."""
    yield from (*module.parameters(), *module.buffers(), *hidden(module))


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one: the same object, the same memory, or equal numbers."""
    if tensor is other or tensor.shape != other.shape or tensor.dtype != other.dtype:
        return tensor is other or (
            tensor.device == other.device
            and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and tensor.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        )
    return bool(torch.equal(tensor.detach().cpu(), other.detach().cpu()))


def apply_mask(model: nn.Module, mask: Mapping[str, Tensor] | None) -> nn.Module:
    """Sets the pruned weights to zero, in place; from then on `fit` keeps exactly these at zero.

    Args:
        model: A plain model, without stochastic masks.
        mask: By tensor, True where a weight is kept; tensors without a mask are kept whole. None takes the mask off:
            `fit` then trains all weights again.

    Returns:
        The same model.

    Raises:
        ValueError: If the mask names a tensor that the model has not, or has another shape.

    Example:
        >>> mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
        >>> history = pp.fit(pp.apply_mask(model, mask), (x, y), pp.Config(epochs=1, lr=0.1))
        >>> round(pp.sparsity(model), 3)
        0.9
    """
    if mask is None:
        forget_masks(model)
        return model
    weights = all_weights(model)
    refuse_computed(model, [name for name in mask if name in weights])
    unknown = [name for name in mask if name not in weights]
    if unknown:
        raise ValueError(f"the mask names {unknown[0]!r}, which is not among the model's weights: {', '.join(weights)}")
    for name, keep in mask.items():
        if keep.shape != weights[name].shape:
            raise ValueError(
                f"the mask of {name} has shape {tuple(keep.shape)}, its weight {tuple(weights[name].shape)}; "
                "make it from this model"
            )
        check_alike(keep, weights[name], what=f"the mask of {name}")
    with changing(model):
        mark_seen(model, trace.noted(mask.values()))
        note_mask(model, mask)
        zero_pruned_(masked(model))
    return model


def note_mask(model: nn.Module, mask: Mapping[str, Tensor]) -> None:
    """Notes a mask, whatever the weights are, in place of all masks before."""
    weights, note = dict(model.named_parameters()), notes(model)
    forget_masks(model)
    note.moving = False
    note.mask = {n: keep.to(weights[n].device, torch.bool, copy=True) for n, keep in mask.items()}
    note.total = total(model)


Masked = list[tuple[nn.Parameter, Tensor]]
"""Weights, each with its mask."""


def masked(model: nn.Module) -> Masked:
    """Every weight with a noted mask, and the mask itself: what is written into it holds from then on."""
    pairs = []
    for module, mask in noted_masks(model):
        weights = dict(module.named_parameters())
        for name, keep in mask.items():
            mask[name] = keep.to(weights[name].device)  # the model may have been moved
            pairs.append((weights[name], mask[name]))
    return pairs


def masked_names(model: nn.Module) -> list[str]:
    """The names of `masked`."""
    return [name for _, mask in noted_masks(model) for name in mask]


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is noted as learned beside the weights, by name, on the model's device; empty where nothing is."""
    note = notes(model)
    device = next(model.parameters()).device
    if note.learned is not None and any(p.device != device for p in note.learned.values()):  # the model was moved
        note.learned = {name: nn.Parameter(p.detach().to(device)) for name, p in note.learned.items()}
    return note.learned or {}


def revived(model: nn.Module) -> str:
    """How many pruned weights are no longer zero, in words; empty where all are."""
    across_model(model)
    revived_count = pruned_count = 0
    for module, mask in noted_masks(model):
        for name, weight in module.named_parameters():
            if name in mask and mask[name].shape == weight.shape:  # else something has cut the weight
                away = ~mask[name].to(weight.device)
                revived_count += count((weight.detach() != 0) & away)
                pruned_count += count(away)
    return f"{revived_count:,} of {pruned_count:,} pruned weights are no longer zero" if revived_count else ""


def warn_of_revived(model: nn.Module) -> None:
    """Says so where something has moved pruned weights away from zero, unless the mask moves itself."""
    if not notes(model).moving and (sentence := revived(model)):
        warnings.warn(
            f"{sentence}, since something else, such as an optimiser, moved them; call pp.apply_mask(model, mask) to "
            "prune them again and pp.keep_zeros(model, optimizer) before training goes on, or pp.apply_mask(model, "
            "None) to keep them",
            stacklevel=3,
        )


@torch.no_grad()
def zero_pruned_(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Puts the zeros of these masks back, whatever an optimiser did to them; of weights, or of their gradients."""
    for weight, keep in pairs:
        local(weight).masked_fill_(~local(keep), 0)
