"""Stochastic masks on any nn.Module: the only contact with torch.nn.utils.parametrize.

`attach` turns every prunable weight into a draw of its spike and slab; the module keeps its class, its forward and its
other parameters. A weight's parameters become `mean` (original0), `gate` (original1) and, when std is trained, the
logarithm of `std` (original2).
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pacprune import kernels
from pacprune.distributed import sharded
from pacprune.kernels.law import bounded
from pacprune.masking import patterns, weights
from pacprune.masking.sampler import Pool, Sampler, Shards, casts, draw_shards
from pacprune.masking.spikeslab import ETA, SpikeSlab, check_fits, top_mask

MAPPINGS = (kernels.SIGMOID, kernels.CLAMP, *patterns.PATTERNS)
_ORDER, _DRAWING = "_pacprune_parameter_order", "_pacprune_drawing"


class AttachedWeight:
    """One attached weight tensor: its plain name, its sampler and the parameters behind it."""

    def __init__(self, name: str, where: parametrize.ParametrizationList | Shards) -> None:
        self.name, self.where = name, where

    @property
    def sampler(self) -> Sampler:
        """The parametrization that draws this weight."""
        sampler = self.where[0]
        assert isinstance(sampler, Sampler)
        return sampler

    @property
    def mean(self) -> nn.Parameter:
        """The slab's mean: the weight itself, as long as it is kept."""
        return self.where.original0  # type: ignore[return-value]

    @property
    def gate(self) -> nn.Parameter:
        """The number behind keep_prob."""
        return self.where.original1  # type: ignore[return-value]

    @property
    def log_std(self) -> nn.Parameter | None:
        """log std when it is trained, else None."""
        return getattr(self.where, "original2", None)

    def raw(self) -> Tensor:
        """gate + coupling * log(|mean| + 1e-8): the logit before shift and sharpness."""
        return self._each(self.sampler.raw)

    def logit(self) -> Tensor:
        """The logit of keep_prob, differentiable in the gate."""
        return self._each(self.sampler.logit)

    def keep_prob(self) -> Tensor:
        """The probability that the hard gate opens, as `kernels.quantised` stores it."""
        return self._each(self.sampler.keep_prob)

    def _each(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A function of mean and gate, weight by weight."""
        return sharded.like(function(sharded.local(self.mean), sharded.local(self.gate)), self.gate)


def sites(model: nn.Module) -> list[AttachedWeight]:
    """The attached weights in the plain model's parameter order; a tied weight once; empty for a plain model."""
    found, known = [], set()
    for prefix, module in model.named_modules():
        if not isinstance(module, (parametrize.ParametrizationList, Shards)) or id(module) in known:
            continue
        if not isinstance(module[0], Sampler):
            continue
        if not isinstance(module, Shards) and sharded.some(module.parameters(recurse=False)):
            raise ValueError(
                f"{_plain_name(prefix)} was attached before it was sharded, so that gates would be gathered with the "
                "weights; call fully_shard on the plain model, and pp.attach after it"
            )
        known.add(id(module))
        found.append(AttachedWeight(_plain_name(prefix), module))
    return sorted(found, key=lambda site: site.sampler.offset)


def attached(model: nn.Module) -> list[AttachedWeight]:
    """`sites`, or a ValueError when there are none."""
    found = sites(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no stochastic masks; call pp.attach(model, spikeslab) first")
    return found


def _plain_name(name: str) -> str:
    """fc.parametrizations.weight -> fc.weight."""
    owner, _, tensor = name.rpartition("parametrizations.")
    return owner + tensor


def _owners(model: nn.Module, weight: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """Every (module, attribute) that holds this very parameter: more than one when it is tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is weight:
                yield module, name


@torch.no_grad()
def attach(
    model: nn.Module,
    slab: SpikeSlab,
    *,
    mapping: str = "sigmoid",
    coupling: float = 0.0,
    estimator: str = kernels.SOFT,
    beta: float = 0.5,
    train_std: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Makes the weights of `model` draws of `slab`, in place; `model.parameters()` then yields means and gates.

    mapping "sigmoid", "clamp", or an N:M pattern: then every group of M weights keeps N of them, and its gate begins as
    the choice that gates with the slab's keep_prob make when exactly N of them are open (see `Sampler`). coupling > 0
    adds coupling * log|weight| to every gate's logit, so that a weight that grows is kept more surely; estimator
    "concrete", "straight-through", "hard-concrete" or "deterministic" (gates without noise in training; see
    `kernels.Law`); beta is the relaxation's temperature. Every owner of a tied weight gets the same sampler. Draw
    number t is a function of (seed, t); nothing random is consumed.
    """
    if mapping not in MAPPINGS:
        raise ValueError(f"mapping {mapping!r} is unknown; use one of {', '.join(MAPPINGS)}")
    if estimator not in kernels.ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is unknown; use one of {', '.join(kernels.ESTIMATORS)}")
    if mapping == "clamp" and coupling:
        raise ValueError(
            f"coupling {coupling} needs the sigmoid mapping; with clamp, keep_prob is the parameter itself"
        )
    pattern = patterns.parse(mapping) if mapping in patterns.PATTERNS else None
    if pattern is not None and (estimator not in (kernels.SOFT, kernels.NOISELESS) or train_std):
        raise ValueError(
            f"the mapping {mapping} takes the estimators {kernels.SOFT!r} and {kernels.NOISELESS!r} and no std, not "
            f"estimator={estimator!r} and train_std={train_std}; use the sigmoid mapping for these"
        )
    plain = weights.prunable(model)
    if pattern is not None or train_std or any(std.ndim for std in slab.std.values()):
        what = "a std of its own for every weight" if pattern is None else f"the pattern {mapping}"
        sharded.refuse(plain.values(), what, "attach gates with the sigmoid mapping and one std for each tensor")
    check_fits(plain, slab, pattern)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in slab.rest:
            tensor.copy_(slab.rest[name])
    weights.notes(model)["total"] = slab.total
    weights.notes(model).pop("mask", None)
    weights.mark_seen(model, slab.seen)
    offset, pool = 0, Pool()
    for name in [n for n in plain if n in slab.keep_prob]:
        weight = plain[name]
        p = slab.keep_prob[name].to(weight.device)
        mean = slab.mean[name].to(weight.device, weight.dtype, copy=True)
        gate = p.clamp(ETA, 1 - ETA) if mapping == "clamp" else bounded(torch.logit(p.double())).float()
        if coupling:
            gate = gate - coupling * torch.log(mean.abs().float() + 1e-8)
        if pattern is not None:
            gate = patterns.spread(patterns.grouped(gate, pattern[1]), *pattern)
        std = slab.std[name].to(weight.device, torch.float32)
        first = (mean, gate)
        if train_std:
            if bool((std <= 0).any()):
                raise ValueError(f"{name} has std 0, which cannot be trained; give the SpikeSlab a std above 0")
            first = (mean, gate, torch.log(std).expand(mean.shape).clone())
        constant = None if train_std or not bool((std != 0).any()) else std.clone()
        (owner, attribute), *aliases = owners = list(_owners(model, weight))
        sampler = Sampler(
            first,
            constant,
            pool,
            offset=offset + sharded.start(weight),
            seed=seed,
            mapping=mapping,
            coupling=coupling,
            estimator=estimator,
            beta=beta,
            cast=not sharded.is_sharded(weight) and all(casts(module) for module, _ in owners),
        )
        sampler.train(model.training)
        if sharded.is_sharded(weight):
            Shards(weight, sampler).join(owner, attribute)
            offset += weight.numel()
            continue
        for module, _ in owners:
            module.__dict__.setdefault(_ORDER, list(module._parameters))
        parametrize.register_parametrization(owner, attribute, sampler, unsafe=True)
        shared = owner.parametrizations[attribute]  # type: ignore[index]
        sampler.join(shared)  # type: ignore[arg-type]
        for other, alias in aliases:
            # A second registration builds the property on the other owner; then it is given the first one's sampler.
            parametrize.register_parametrization(other, alias, _Alias(), unsafe=True)
            other.parametrizations[alias] = shared  # type: ignore[index]
        for module, _ in owners:
            if isinstance(module, nn.RNNBase):
                # An RNN lists its weights once and would go on reading, and deepcopying, what it listed.
                module.__dict__.pop("_flat_weights", None)
                type(module)._flat_weights = property(_flat_weights, lambda self, value: None)  # type: ignore[assignment]
        offset += weight.numel()
    shards = held(model)
    if shards:
        model.__dict__[_DRAWING] = model.register_forward_pre_hook(lambda *_: draw_shards(shards), prepend=True)
    return model


def held(model: nn.Module) -> list[Shards]:
    """The attached weights of a sharded model: their own parameters hold draws, which nothing trains or stores."""
    return [site.where for site in sites(model) if isinstance(site.where, Shards)]


def _flat_weights(rnn: nn.RNNBase) -> list[Tensor]:
    return [getattr(rnn, name) for name in rnn._flat_weights_names]


class _Alias(nn.Module):
    """What register_parametrization installs before the tied weight's own sampler takes its place."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


def read(model: nn.Module, *, detach: bool = True) -> SpikeSlab:
    """The model's present distribution as a value.

    With detach=False, keep_prob, mean and std carry gradients, for `kl`; `rest` and `seen` are then left out.
    """
    found = attached(model)
    if found[0].sampler.pattern is not None:
        raise ValueError(
            f"the gates of a {found[0].sampler.mapping} pattern are one choice for every group, and a SpikeSlab has "
            "independent ones; use pp.harden(model)"
        )
    keep_prob, mean, std = {}, {}, {}
    for site in found:
        keep_prob[site.name] = site.keep_prob() if detach else torch.sigmoid(site.logit())
        mean[site.name] = site.mean.detach().clone() if detach else site.mean
        if site.log_std is not None:
            std[site.name] = torch.exp(site.log_std.detach() if detach else site.log_std)
        else:
            constant = site.sampler.std
            std[site.name] = torch.zeros((), device=site.gate.device) if constant is None else constant.clone()
    # A penalty, made at every step, need not know what was seen; a prior must, and by its gradient it is told apart.
    carries = any(p.requires_grad for p in keep_prob.values())
    return SpikeSlab(
        keep_prob=keep_prob,
        mean=mean,
        std=std,
        rest={n: t.detach().clone() for n, t in _rest(model)} if detach else {},
        total=total(model),
        seen=torch.empty(0, dtype=torch.int64) if carries else weights.seen(model),
    )


def total(model: nn.Module) -> int:
    """D of an attached model: all weights of its plain form in tensors of two or more dimensions."""
    return next(value for _, value in weights.noted(model, "total"))


def _rest(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers that belong to no sampler, by their plain names."""
    draws = {id(shards.weight) for shards in held(model)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".parametrizations." not in f".{name}" and id(tensor) not in draws:
            yield name, tensor


def rest_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside the distribution: biases, BatchNorm's scale and offset, ...; all of a plain model's."""
    return [t for _, t in _rest(model) if isinstance(t, nn.Parameter)]


@torch.no_grad()
def resample_(model: nn.Module) -> nn.Module:
    """Draws the next sample, in place: step += 1. Clamped gates that an optimiser pushed out of [0, 1] are put back."""
    found = attached(model)
    torch._foreach_add_([site.sampler.step for site in found], 1)  # type: ignore[attr-defined]
    for site in found:
        if site.sampler.mapping == kernels.CLAMP:
            sharded.local(site.gate).clamp_(ETA, 1 - ETA)
    return model


@torch.no_grad()
def set_logits_(model: nn.Module, logits: Mapping[str, Tensor]) -> nn.Module:
    """Gates with which every weight has this logit before shift and sharpness; under a pattern, choices their sums."""
    for site in attached(model):
        pattern, goal = site.sampler.pattern, logits[site.name]
        if pattern is None:
            site.gate.add_(goal - site.sampler.raw(site.mean, site.gate))
        else:
            own = goal - site.sampler.coupling * torch.log(site.mean.abs().float() + 1e-8)
            site.gate.copy_(patterns.spread(patterns.grouped(own, pattern[1]), *pattern))
    return model


def forget(model: nn.Module) -> nn.Module:
    """Drops the present draw, so that the next read of a weight makes it again: after the replay of a CUDA graph."""
    for site in sites(model):
        site.sampler.pool.forget()
    return model


def final_mask(model: nn.Module, *, sparsity: float | None = None, min_per_layer: int = 0) -> dict[str, Tensor]:
    """The mask that the gates have come to: `top_mask` of their keep_prob, or the likeliest choices of a pattern."""
    found = attached(model)
    if found[0].sampler.pattern is None:
        return top_mask(read(model), sparsity=sparsity, min_per_layer=min_per_layer)
    return {site.name: site.sampler.chosen(site.mean, site.gate) for site in found}


@torch.no_grad()
def harden(model: nn.Module, mask: dict[str, Tensor] | None = None) -> nn.Module:
    """Back to plain Parameters, in place: weight = mean * mask, and `fit` keeps the zeros.

    Without a mask, keeps the top k of keep_prob with k the expected number of kept weights, ties by magnitude; of an
    N:M pattern, the likeliest choice of every group.
    """
    found = attached(forget(model))
    if mask is None:
        mask = final_mask(model)
    values = {site.name: site.mean.detach().clone() for site in found}
    owners = [
        (module, attribute, id(listed))
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for attribute, listed in module.parametrizations.items()  # type: ignore[union-attr]
    ]
    names = {id(site.where): site.name for site in found}
    trainable = {site.name: site.mean.requires_grad for site in found}
    plain = {n: nn.Parameter(v, requires_grad=trainable[n]) for n, v in values.items()}
    for module, attribute, key in owners:
        if key in names:
            _unparametrize(module, attribute, plain[names[key]])
    if _DRAWING in model.__dict__:
        model.__dict__.pop(_DRAWING).remove()
    weights.apply_mask(model, mask)
    return model


def _unparametrize(module: nn.Module, attribute: str, value: nn.Parameter) -> None:
    """Removes one parametrization without touching a deepcopy, which shares its class with the original.

    torch's own remove_parametrizations deletes the property from that shared class, so the module gets a class of its
    own first.
    """
    where = module.parametrizations[attribute]  # type: ignore[index]
    if isinstance(where, Shards):
        where.leave(module, attribute)
        return
    shared = type(module)
    own = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__", attribute)}
    del module.parametrizations[attribute]  # type: ignore[operator]
    if len(module.parametrizations) == 0:  # type: ignore[arg-type]
        del module.parametrizations
        module.__class__ = shared.__bases__[0]
    else:
        module.__class__ = type(shared.__name__, shared.__bases__, own)  # type: ignore[assignment]
    module.register_parameter(attribute, value)
    # A new parameter is appended; the plain model's order is put back, since weights are numbered by it.
    if set(module.__dict__[_ORDER]) == set(module._parameters):
        for name in module.__dict__.pop(_ORDER):
            module._parameters[name] = module._parameters.pop(name)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = _flat_weights(module)
