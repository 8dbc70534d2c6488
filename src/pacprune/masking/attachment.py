"""Stochastic masks on any nn.Module, installed by torch.nn.utils.parametrize; `Sampler` is what it calls.

`attach` turns every prunable weight into a draw of its spike and slab; the module keeps its class, its forward and its
other parameters. A weight's parameters become `mean` (original0), `gate` (original1) and, when std is trained, the
logarithm of `std` (original2).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pacprune import kernels
from pacprune.data import trace
from pacprune.data.trace import Trace
from pacprune.distributed import Across, across, first_index, is_sharded, local, refuse_sharded, sharded
from pacprune.kernels.law import bounded
from pacprune.masking import patterns, weights
from pacprune.masking.sampler import Pool, Sampler, Shards, casts, sample_shards_
from pacprune.masking.spikeslab import ETA, SpikeSlab, check_fits, top_mask
from pacprune.types import check_name

MAPPINGS = (kernels.SIGMOID, kernels.CLAMP, *patterns.PATTERNS)
_ORDER, _SAMPLING = "_pacprune_parameter_order", "_pacprune_sampling"


class AttachedWeight:
    """One attached weight tensor: its plain name, its sampler and the parameters behind it.

    It knows whether fully_shard has cut the weight. What it computes is then of this rank's rows, and of a plain model
    of everything: who works with it need not ask.
    """

    def __init__(self, name: str, where: parametrize.ParametrizationList | Shards) -> None:
        self.name, self.where, self.sharded = name, where, isinstance(where, Shards)
        sampler = where[0]
        assert isinstance(sampler, Sampler)
        self.sampler = sampler
        """The parametrization that samples this weight."""

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

    @property
    def local_mean(self) -> Tensor:
        """This rank's rows of the mean, over the same memory."""
        return sharded.local(self.mean) if self.sharded else self.mean

    @property
    def local_gate(self) -> Tensor:
        """This rank's rows of the gate, over the same memory."""
        return sharded.local(self.gate) if self.sharded else self.gate

    def raw(self) -> Tensor:
        """gate + coupling * log(|mean| + 1e-8): the logit before shift and sharpness."""
        return self.sampler.raw(self.local_mean, self.local_gate)

    def logit(self) -> Tensor:
        """The logit of keep_prob, differentiable in the gate."""
        return self.sampler.logit(self.local_mean, self.local_gate)

    def keep_prob(self) -> Tensor:
        """The probability that the hard gate opens, as `kernels.quantised` stores it."""
        return self.sampler.keep_prob(self.local_mean, self.local_gate)

    def over_ranks(self, rows: Tensor) -> Tensor:
        """What was computed of this rank's rows, as a tensor that is sharded like the gate, differentiable."""
        return sharded.like(rows, self.gate) if self.sharded else rows


def sites(model: nn.Module) -> list[AttachedWeight]:
    """The attached weights in the plain model's parameter order; a tied weight once; empty for a plain model."""
    listed: dict[int, AttachedWeight] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, (parametrize.ParametrizationList, Shards)) or id(module) in listed:
            continue
        if not isinstance(module[0], Sampler):
            continue
        site = AttachedWeight(_plain_name(prefix), module)
        if not site.sharded and is_sharded(site.gate):
            raise ValueError(
                f"{site.name} was attached before it was sharded, so that gates would be gathered with the "
                "weights; call fully_shard on the plain model, and pp.attach after it"
            )
        listed[id(module)] = site
    return sorted(listed.values(), key=lambda site: site.sampler.offset)


def between_ranks(attached_weights: Sequence[AttachedWeight]) -> Across | None:
    """How to reduce over the ranks that hold the rows of these weights; None for a plain model."""
    return across(site.gate for site in attached_weights)


def raw_logits(attached_weights: Sequence[AttachedWeight]) -> list[Tensor]:
    """`raw` of every weight."""
    return [site.raw() for site in attached_weights]


def require_sites(model: nn.Module) -> list[AttachedWeight]:
    """`sites`, or a ValueError when there are none."""
    listed = sites(model)
    if not listed:
        raise ValueError(f"{type(model).__name__} has no stochastic masks; call pp.attach(model, spikeslab) first")
    return listed


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
    gate_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Makes the weights of `model` samples of `slab`, in place; `model.parameters()` then yields means and gates.

    Every owner of a tied weight gets the same sampler. Sample number t is a function of (seed, t); nothing random is
    consumed.

    Args:
        model: A plain model.
        slab: The distribution to sample from, such as `pp.isotropic(model, sparsity=0.9)`.
        mapping: How a gate becomes a keep_prob: "sigmoid", or "clamp" (the gate is the keep_prob). With an N:M pattern
            such as "2:4", every group of M weights keeps N of them: the N with the largest logit + Gumbel noise. The
            logits begin as those of the slab's keep_prob.
        coupling: Above 0 it adds coupling * log|weight| to every gate's logit, so that a weight that grows is kept more
            surely; 4 is what `pp.pft` uses.
        estimator: How gates are relaxed in training: "concrete", "straight-through", "hard-concrete", or
            "deterministic" for gates without noise (see `kernels.Law`).
        beta: The relaxation's temperature.
        train_std: Whether the std of every weight is trained, too; its logarithm then is a parameter.
        gate_dtype: The type of the gates; torch.bfloat16, of a pattern alone, halves their memory. Train such gates
            with Config(optimizer="adamw8"), which rounds at random: other optimisers lose small steps.
        seed: Of the samples.

    Returns:
        The same model.

    Raises:
        ValueError: If the slab does not fit the model, or two options exclude each other.

    Example:
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.9))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # means, gates, and the biases as before
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(pp.resample_(model)(x), y)  # with the next draw of the weights
        ...     loss.backward()
        ...     optimizer.step()
        >>> pp.read(model)  # the distribution that was trained
        SpikeSlab(2 tensors, 1,184 weights, expected sparsity 0.90...)
    """
    _check_options(mapping, coupling, estimator, train_std, gate_dtype)
    pattern = patterns.parse(mapping) if mapping in patterns.PATTERNS else None
    plain = weights.all_weights(model)
    weights.refuse_computed(model, [name for name in slab.keep_prob if name in plain])
    if train_std or any(std.ndim for std in slab.std.values()):
        refuse_sharded(plain.values(), "std")
    check_fits(plain, slab, pattern)
    with weights.changing(model):
        _take_over(model, slab)
        offset, pool = 0, Pool()
        for name, weight in plain.items():
            if name not in slab.keep_prob:
                continue
            first, constant = _start_values(name, weight, slab, mapping, coupling, train_std)
            first = (first[0], first[1].to(gate_dtype), *first[2:])
            owners = list(_owners(model, weight))
            sampler = Sampler(
                first,
                constant,
                pool,
                offset=offset + first_index(weight),
                seed=seed,
                mapping=mapping,
                coupling=coupling,
                estimator=estimator,
                beta=beta,
                cast=not is_sharded(weight) and all(casts(module) for module, _ in owners),
            )
            sampler.train(model.training)
            if is_sharded(weight):
                Shards(weight, sampler).join(*owners[0])
            else:
                _install(sampler, owners)
            offset += weight.numel()
        shards = _shards(model)
        if shards:
            model.__dict__[_SAMPLING] = model.register_forward_pre_hook(lambda *_: sample_shards_(shards), prepend=True)
        weights.take_over(model, slab.origin)
    return model


def _check_options(mapping: str, coupling: float, estimator: str, train_std: bool, gate_dtype: torch.dtype) -> None:
    """Refuses options of `attach` that are unknown or exclude each other."""
    check_name("mapping", mapping, MAPPINGS)
    check_name("estimator", estimator, kernels.ESTIMATORS)
    if mapping == kernels.CLAMP and coupling:
        raise ValueError(
            f"coupling {coupling} needs the sigmoid mapping; with clamp, keep_prob is the parameter itself"
        )
    if mapping in patterns.PATTERNS and (estimator not in (kernels.SOFT, kernels.NOISELESS) or train_std):
        raise ValueError(
            f"the mapping {mapping} takes the estimators {kernels.SOFT!r} and {kernels.NOISELESS!r} and no std, not "
            f"estimator={estimator!r} and train_std={train_std}; use the sigmoid mapping for these"
        )
    if gate_dtype != torch.float32 and not (gate_dtype == torch.bfloat16 and mapping in patterns.PATTERNS):
        raise ValueError(
            f"gate_dtype is {gate_dtype} with the mapping {mapping!r}; use torch.float32, or torch.bfloat16 with a "
            f"pattern: {', '.join(patterns.PATTERNS)}"
        )


def _take_over(model: nn.Module, slab: SpikeSlab) -> None:
    """Gives the model what a SpikeSlab holds beside its weights: the other tensors and D."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in slab.rest:
            tensor.copy_(slab.rest[name])
    weights.forget_masks(model)
    weights.notes(model).total = slab.total


def _start_values(
    name: str, weight: Tensor, slab: SpikeSlab, mapping: str, coupling: float, train_std: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What a weight's parameters begin with, (mean, gate[, log std]), and the std that is not trained, if any."""
    p = slab.keep_prob[name].to(weight.device)
    mean = slab.mean[name].to(weight.device, weight.dtype, copy=True)
    gate = p.clamp(ETA, 1 - ETA) if mapping == kernels.CLAMP else bounded(torch.logit(p.double())).float()
    if coupling:
        gate = gate - coupling * torch.log(mean.abs().float() + 1e-8)
    std = slab.std[name].to(weight.device, torch.float32)
    if not train_std:
        return (mean, gate), std.clone() if bool((std != 0).any()) else None
    if bool((std <= 0).any()):
        raise ValueError(f"{name} has std 0, which cannot be trained; give the SpikeSlab a std above 0")
    return (mean, gate, torch.log(std).expand(mean.shape).clone()), None


def _install(sampler: Sampler, owners: list[tuple[nn.Module, str]]) -> None:
    """Makes a weight a sample, in every module that owns it."""
    (owner, attribute), *aliases = owners
    for module, _ in owners:
        module.__dict__.setdefault(_ORDER, list(module._parameters))
    parametrize.register_parametrization(owner, attribute, sampler, unsafe=True)
    shared = owner.parametrizations[attribute]  # type: ignore[index]
    sampler.join(shared)  # type: ignore[arg-type]
    for module, alias in aliases:
        # A second registration builds the property on this owner, too; then it is given the first one's sampler.
        parametrize.register_parametrization(module, alias, _Alias(), unsafe=True)
        module.parametrizations[alias] = shared  # type: ignore[index]
    for module, _ in owners:
        if isinstance(module, nn.RNNBase):
            # An RNN lists its weights once and would go on reading, and deepcopying, what it listed.
            module.__dict__.pop("_flat_weights", None)
            type(module)._flat_weights = property(_flat_weights, lambda self, value: None)  # type: ignore[assignment]


def _shards(model: nn.Module) -> list[Shards]:
    """The attached weights of a sharded model; empty for a plain one."""
    return [site.where for site in sites(model) if isinstance(site.where, Shards)]


def sample_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a sharded model that hold the present sample: nothing trains or stores them."""
    return [shards.weight for shards in _shards(model)]


def _flat_weights(rnn: nn.RNNBase) -> list[Tensor]:
    return [getattr(rnn, name) for name in rnn._flat_weights_names]


class _Alias(nn.Module):
    """What register_parametrization installs before the tied weight's own sampler takes its place."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


def read(model: nn.Module, *, detach: bool = True) -> SpikeSlab:
    """The model's present distribution as a value.

    Args:
        model: With stochastic masks, as `attach` leaves it.
        detach: Whether it is a value by itself. With False, keep_prob, mean and std carry gradients, for `kl`; `rest`
            and `seen` are then left out.

    Returns:
        A SpikeSlab: keep_prob, mean and std of every attached weight, and copies of all other tensors.

    Raises:
        ValueError: If the model has no stochastic masks, or those of an N:M pattern.

    Example:
        >>> pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.9)))
        SpikeSlab(2 tensors, 1,184 weights, expected sparsity 0.9000)
    """
    listed = require_sites(model)
    if listed[0].sampler.pattern is not None:
        raise ValueError(
            f"the gates of a {listed[0].sampler.mapping} pattern are one choice for every group, and a SpikeSlab has "
            "independent ones; use pp.harden(model)"
        )
    keep_prob, mean, std = {}, {}, {}
    for site in listed:
        keep_prob[site.name] = site.over_ranks(site.keep_prob() if detach else torch.sigmoid(site.logit()))
        mean[site.name] = site.mean.detach().clone() if detach else site.mean
        if site.log_std is not None:
            std[site.name] = torch.exp(site.log_std.detach() if detach else site.log_std)
        else:
            constant = site.sampler.std
            std[site.name] = torch.zeros((), device=site.gate.device) if constant is None else constant.clone()
    # A penalty, made at every step, need not know what was seen; a prior must, and by its gradient it is told apart.
    carries = any(p.requires_grad for p in keep_prob.values())
    slab = SpikeSlab(
        keep_prob=keep_prob,
        mean=mean,
        std=std,
        rest={n: t.detach().clone() for n, t in _rest(model)} if detach else {},
        total=weights.noted_total(model),
        seen=Trace() if carries else weights.origin(model),
    )
    if not carries:
        slab.note()
    return slab


def _rest(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers that belong to no sampler, by their plain names."""
    known = sampled_tensors(model) | {id(p) for p in sample_parameters(model)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in known:
            yield name, tensor


def sampled_tensors(model: nn.Module) -> set[int]:
    """The ids of all that samplers own: means, gates, counters; not of what a user's parametrization owns."""
    lists = [site.where for site in sites(model)]
    return {id(tensor) for where in lists for tensor in (*where.parameters(), *where.buffers())}


def rest_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside the distribution: biases, BatchNorm's scale and offset, ...; all of a plain model's."""
    return [t for _, t in _rest(model) if isinstance(t, nn.Parameter)]


@torch.no_grad()
def resample_(model: nn.Module) -> nn.Module:
    """Makes the weights the next sample, in place: step += 1; until then every forward pass has the same weights.

    Clamped gates that an optimiser pushed out of [0, 1] are put back.

    Args:
        model: With stochastic masks, as `attach` leaves it.

    Returns:
        The same model.

    Example:
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.5))
        >>> first = model(x)
        >>> torch.equal(first, model(x)), torch.equal(first, pp.resample_(model)(x))
        (True, False)
    """
    listed = require_sites(model)
    moves_gates = any(site.sampler.mapping == kernels.CLAMP for site in listed)
    with weights.changing(model, chosen=False) if moves_gates else nullcontext():
        advance_(listed)
    return model


@torch.no_grad()
def advance_(attached_weights: Sequence[AttachedWeight]) -> None:
    """`resample_` of weights that are listed already, as they are in a training step."""
    torch._foreach_add_([site.sampler.step for site in attached_weights], 1)  # type: ignore[attr-defined]
    for site in attached_weights:
        if site.sampler.mapping == kernels.CLAMP:
            site.local_gate.clamp_(ETA, 1 - ETA)


@torch.no_grad()
def set_logits_(model: nn.Module, logits: Mapping[str, Tensor]) -> nn.Module:
    """Gates with which weights have these logits before shift and sharpness; those of other tensors stay."""
    with weights.changing(model):
        for site in require_sites(model):
            if site.name not in logits:
                continue
            goal, size = local(logits[site.name]), site.local_mean.abs().float()
            if site.sampler.pattern is None:
                site.local_gate.add_(goal - site.raw())
            else:
                site.local_gate.copy_(goal - site.sampler.coupling * torch.log(size + 1e-8))
    return model


@contextmanager
def unmasked(model: nn.Module) -> Iterator[nn.Module]:
    """While this lasts, every weight is its mean: the dense network, without a copy of it.

    Args:
        model: With stochastic masks, as `attach` leaves it.

    Returns:
        A context, which gives the same model.

    Example:
        >>> dense = model(x)
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.5))
        >>> with pp.unmasked(model):
        ...     torch.equal(model(x), dense)
        True
    """
    samplers = [site.sampler for site in require_sites(model)]
    for sampler in samplers:
        sampler.unmasked = True
    try:
        yield model
    finally:
        for sampler in samplers:
            sampler.unmasked = False


def forget(model: nn.Module) -> nn.Module:
    """Drops the present sample, so that the next read of a weight makes it again: after the replay of a CUDA graph."""
    for site in sites(model):
        site.sampler.pool.forget()
    return model


def final_mask(
    model: nn.Module, *, sparsity: float | Mapping[str, float] | None = None, min_per_layer: int = 0
) -> dict[str, Tensor]:
    """The mask that the gates have come to: `top_mask` of their keep_prob, or the likeliest choices of a pattern."""
    listed = require_sites(model)
    if listed[0].sampler.pattern is None:
        return top_mask(read(model), sparsity=sparsity, min_per_layer=min_per_layer)
    mask = {site.name: site.over_ranks(site.sampler.chosen(site.local_mean, site.local_gate)) for site in listed}
    trace.note(mask, weights.seen(model))
    return mask


@torch.no_grad()
def harden(model: nn.Module, mask: dict[str, Tensor] | None = None) -> nn.Module:
    """Back to plain Parameters, in place: weight = mean * mask, and `fit` keeps the zeros.

    Args:
        model: With stochastic masks, as `attach` leaves it.
        mask: Which weights are kept. Without one, those are kept that have the largest keep_prob, ties by magnitude,
            as many as the gates keep in expectation; of an N:M pattern, the likeliest choice of every group.

    Returns:
        The same model, with the names and the state dict of the plain one.

    Example:
        >>> model = pp.attach(model, pp.isotropic(model, sparsity=0.9))
        >>> round(pp.sparsity(pp.harden(model)), 3)
        0.9
    """
    listed = require_sites(forget(model))
    if mask is None:
        mask = final_mask(model)
    with weights.changing(model):
        plain = {
            id(site.where): nn.Parameter(site.mean.detach().clone(), requires_grad=site.mean.requires_grad)
            for site in listed
        }
        owners = [
            (module, attribute, id(parametrization))
            for module in model.modules()
            if parametrize.is_parametrized(module)
            for attribute, parametrization in module.parametrizations.items()  # type: ignore[union-attr]
        ]
        for module, attribute, key in owners:
            if key in plain:
                _unparametrize(module, attribute, plain[key])
        if _SAMPLING in model.__dict__:
            model.__dict__.pop(_SAMPLING).remove()
        weights.apply_mask(model, mask)
    return model


def _unparametrize(module: nn.Module, attribute: str, value: nn.Parameter) -> None:
    """Removes one parametrization without touching a deepcopy, which shares its class with the original.

    torch's own remove_parametrizations deletes the property from that shared class, so the module gets a class of its
    own first.
    """
    where = module.parametrizations[attribute]  # type: ignore[index]
    if isinstance(where, Shards):
        where.leave(module, attribute, value)
        return
    shared = type(module)
    members = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__", attribute)}
    del module.parametrizations[attribute]  # type: ignore[operator]
    if len(module.parametrizations) == 0:  # type: ignore[arg-type]
        del module.parametrizations
        module.__class__ = shared.__bases__[0]
    else:
        module.__class__ = type(shared.__name__, shared.__bases__, members)  # type: ignore[assignment]
    module.register_parameter(attribute, value)
    # A new parameter is appended; the plain model's order is put back, since weights are numbered by it.
    if set(module.__dict__[_ORDER]) == set(module._parameters):
        for name in module.__dict__.pop(_ORDER):
            module._parameters[name] = module._parameters.pop(name)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = _flat_weights(module)
