"""Which weights can be pruned, how many are zero, and what pacprune has noted about a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from pacprune.distributed import sharded

Prunable = Callable[[nn.Module], Mapping[str, Tensor]]
"""The type of `prunable`: pass your own function wherever a `prunable=` is taken to restrict what is pruned."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every floating-point parameter of two or more dimensions, by its name; a tied weight once, under its first name.

    That covers Linear, Conv, Embedding, MultiheadAttention, LSTM and anything nested. To keep a layer out:

        def body(model):
            return {name: w for name, w in pp.prunable(model).items() if not name.startswith("head")}

        pp.osp(model, data, config, sparsity=.9, prunable=body)
    """
    sharded.ensure_resharded(model)
    found = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and p.is_floating_point()}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to prune: none of its {sum(1 for _ in model.parameters())} parameters "
            "has two or more dimensions; give a model with Linear, Conv, Embedding or similar layers"
        )
    _refuse_hooks(model)
    for name, weight in found.items():
        if ".parametrizations." in f".{name}":
            _refuse_parametrized(model, name)
        bad = sharded.count(~torch.isfinite(weight))
        if bad:
            raise ValueError(
                f"{name} has {bad} NaN or infinite weights of {weight.numel()}; train it again with a smaller lr"
            )
    return found


def _refuse_hooks(model: nn.Module) -> None:
    """torch.nn.utils' weight_norm, spectral_norm and prune compute a weight anew before every forward pass."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                kind = type(hook).__name__
                remedy = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}
                raise ValueError(
                    f"the weight of {name or type(module).__name__} is computed by {kind}, so pruning it would not "
                    f"last; call torch.nn.utils.{remedy.get(kind, 'prune.remove')} on that layer first"
                )


def _refuse_parametrized(model: nn.Module, name: str) -> NoReturn:
    owner, _, tensor = name.rpartition(".")[0].rpartition("parametrizations.")
    kind = type(model.get_submodule(f"{owner}parametrizations.{tensor}.0"))
    if kind.__module__ == "pacprune.masking.sampler":
        raise ValueError(
            f"{owner}{tensor} has a stochastic mask, since a run was broken off or attached before: "
            "start from a fresh copy, or call pp.harden(model)"
        )
    raise ValueError(
        f"{owner}{tensor} is parametrized by {kind.__name__}; "
        "call torch.nn.utils.parametrize.remove_parametrizations on it first"
    )


def total(model: nn.Module) -> int:
    """D, the denominator of every sparsity: all weights in tensors of two or more dimensions, pruned or not."""
    return sum(w.numel() for w in prunable(model).values())


def sparsity(model: nn.Module) -> float:
    """The counted fraction of zeros among the D weights of a plain model."""
    return sum(sharded.count(w == 0) for w in prunable(model).values()) / total(model)


def notes(model: nn.Module) -> dict[str, Any]:
    """What pacprune has noted about this model: `seen`, `mask`, `receipt`. A plain attribute, copied by deepcopy."""
    return model.__dict__.setdefault("_pacprune_notes", {})


def noted(model: nn.Module, key: str) -> Iterator[tuple[nn.Module, Any]]:
    """A note wherever it was made, on the model or on a module inside: a wrapper must not make us forget."""
    for module in model.modules():
        if key in module.__dict__.get("_pacprune_notes", {}):
            yield module, notes(module)[key]


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts train and eval mode back at the end, module by module: a frozen BatchNorm stays frozen."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def seen(model: nn.Module) -> Tensor:
    """The hashes (sorted int64) of all examples that any fit, criterion or BatchNorm estimate used on this model."""
    known = [value for _, value in noted(model, "seen")]
    # Most modules share one tensor; the others are few.
    distinct = {id(value): value for value in known}
    return next(iter(distinct.values())) if len(distinct) == 1 else _union(*distinct.values())


def mark_seen(models: nn.Module | Sequence[nn.Module], rows: Tensor) -> None:
    """Adds example hashes to what the models have seen; a certificate is refused when the prior saw the bound set."""
    done: list[tuple[Tensor, Tensor]] = []  # members have mostly seen the same, and sorting millions takes its time
    for model in [models] if isinstance(models, nn.Module) else models:
        before = seen(model)
        known = next((after for same, after in done if torch.equal(same, before)), None)
        if known is None:
            known = before if rows is before else _union(before, rows.cpu())
            done.append((before, known))
        for module in model.modules():
            notes(module)["seen"] = known


def _union(*hashes: Tensor) -> Tensor:
    """All that occur, once, sorted; by numpy, which sorts integers twenty times as fast as torch."""
    return torch.from_numpy(np.unique(np.concatenate([np.empty(0, np.int64), *(each.numpy() for each in hashes)])))


def apply_mask(model: nn.Module, mask: Mapping[str, Tensor] | None) -> nn.Module:
    """Sets the pruned weights to zero, in place; from then on `fit` keeps exactly these at zero. None lets them go."""
    if mask is None:
        notes(model).pop("mask", None)
        return model
    weights = prunable(model)
    unknown = [name for name in mask if name not in weights]
    if unknown:
        raise ValueError(f"the mask names {unknown[0]!r}, which is not among the model's weights: {', '.join(weights)}")
    for name, keep in mask.items():
        if keep.shape != weights[name].shape:
            raise ValueError(
                f"the mask of {name} has shape {tuple(keep.shape)}, its weight {tuple(weights[name].shape)}"
            )
        sharded.check_alike(keep, weights[name], what=f"the mask of {name}")
    notes(model)["mask"] = {n: keep.to(weights[n].device, torch.bool, copy=True) for n, keep in mask.items()}
    notes(model)["total"] = total(model)
    enforce_mask(model)
    return model


def masked(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Every weight with a noted mask, and the mask itself: what is written into it holds from then on."""
    found = []
    for module, mask in noted(model, "mask"):
        weights = dict(module.named_parameters())
        for name, keep in mask.items():
            mask[name] = keep.to(weights[name].device)  # the model may have been moved
            found.append((weights[name], mask[name]))
    return found


@torch.no_grad()
def enforce_mask(model: nn.Module) -> None:
    """Puts the zeros of all noted masks back, whatever an optimiser did to them."""
    for weight, keep in masked(model):
        sharded.local(weight).masked_fill_(~sharded.local(keep), 0)


@contextmanager
def pruned(model: nn.Module) -> Iterator[None]:
    """Zeros by the noted masks, for as long as this lasts; then every weight is what it was."""
    found = [sharded.local(weight.detach()) for weight, _ in masked(model)]
    before = [weight.clone() for weight in found]
    enforce_mask(model)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(found, before)  # type: ignore[attr-defined]
