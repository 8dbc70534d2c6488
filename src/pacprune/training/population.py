"""K models of one architecture as one: every tensor gets a leading model dimension, and one call serves all members.

vmap turns the members' layers into batched matrix products and grouped convolutions, and BatchNorm keeps each member's
own statistics. Random masks are drawn for all members at once, each from its own seed, so a member draws what it would
draw alone.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from pacprune import kernels
from pacprune.data.batches import device_of
from pacprune.kernels.conv.channels_last_pass import compiler_pass
from pacprune.kernels.conv.convolution import FEW, convolution, filled
from pacprune.masking import attachment, weights
from pacprune.masking.sampler import Sampler
from pacprune.types import Loss

AT_ONCE = {"cpu": 8, "cuda": 96}
"""Networks in one population; where they do not fit into memory, `fit` trains them in halves."""
_NARROW = 64
"""Channels up to which cuDNN's strided grouped convolutions are slower than those of `kernels.conv.grouped`."""


def members(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The models of a population, or the only one."""
    return [model] if isinstance(model, nn.Module) else list(model)


def per_member(name: str, value: Any, count: int) -> list[Any]:
    """One value per member: those of a list or tuple in order, anything else for all of them."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} models; give one for each, or one for all")
    return list(value)


class Population:
    """K models with one leading dimension: `stacked` holds their tensors, `models` are the members themselves.

    Train `stacked` like any attached or plain model, with losses from `losses`; `write_back` copies the outcome into
    the members.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        _check_alike(models)
        self.models = list(models)
        self.stacked = _stack(self.models)
        self._sites = attachment.sites(self.stacked)
        self._plain = _skeleton(self.models[0])
        sampled = attachment.sampled_tensors(self.stacked)
        rest = (*self.stacked.named_parameters(), *self.stacked.named_buffers())
        self._rest = {n: t for n, t in rest if id(t) not in sampled}
        self._vmap = not any(isinstance(module, nn.RNNBase) for module in self._plain.modules())  # no rule for them
        self._tried = False
        self._compiled: Callable[..., Any] | None = None
        self._modes = [(module, self.stacked.get_submodule(name)) for name, module in self._plain.named_modules()]

    def __len__(self) -> int:
        return len(self.models)

    def compile(self) -> None:
        """Lets torch.compile fuse the members' layers; batches of every new size are compiled anew."""
        # Inductor leaves grouped convolutions in the layout they come in unless told that channels-last is faster.
        options: dict[str, Any] = {"force_layout_optimization": True, "post_grad_custom_pre_pass": compiler_pass()}
        self._compiled = compile_always(self._apply, options=options)

    def outputs(self, x: Tensor, *, separate: bool) -> Tensor:
        """All members' outputs [K, n, ...]: of x [n, ...], or, when each has `separate` inputs, of x [K, n, ...]."""
        return self._call(None, x, None, separate)

    def losses(self, loss: Loss, x: Tensor, y: Tensor, *, separate: bool, fuse: bool = True) -> Tensor:
        """The loss of every member on its batch: K numbers, whose sum has every member's own gradient.

        Without `fuse`, this batch is not given to the compiler.
        """
        return self._call(loss, x, y, separate, fuse)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies what was trained into the members, in place, and leaves them in eval mode."""
        for (_, kind, name), stacked, modules in _tensors(self.stacked, self.models):
            for module, values in zip(modules, stacked.detach(), strict=True):
                tensor = getattr(module, kind)[name]
                tensor.copy_(values.reshape(tensor.shape))
        for path, module in self.stacked.named_modules():
            for name, keep in (weights.notes(module).mask or {}).items():
                for k, model in enumerate(self.models):
                    note = weights.notes(model.get_submodule(path))
                    note.mask = {**(note.mask or {}), name: keep[k].clone()}
        trained = weights.learned(self.stacked)
        for k, model in enumerate(self.models):
            weights.notes(model).learned = {n: nn.Parameter(p.detach()[k].clone()) for n, p in trained.items()} or None
            model.eval()

    def _call(self, loss: Loss | None, x: Tensor, y: Tensor | None, separate: bool, fuse: bool = True) -> Tensor:
        for module, stacked_module in self._modes:
            module.training = stacked_module.training
        tensors = {site.name: site.where() for site in self._sites} | self._rest
        # On a CPU autocast does not reach into vmap: convolutions and BatchNorm would meet two types.
        if self._vmap and not (x.device.type == "cpu" and torch.is_autocast_enabled("cpu")):
            out = self._call_at_once(tensors, loss, x, y, separate, fuse)
            if out is not None:
                return out
        results = []
        for k in range(len(self)):
            out = functional_call(self._plain, {n: t[k] for n, t in tensors.items()}, (x[k] if separate else x,))
            results.append(out if loss is None or y is None else loss(out, y[k] if separate else y))
        return torch.stack(results)

    def _call_at_once(
        self, tensors: dict[str, Tensor], loss: Loss | None, x: Tensor, y: Tensor | None, separate: bool, fuse: bool
    ) -> Tensor | None:
        """One call for all members; None for a network that looks at its own numbers, which vmap cannot serve."""
        before = {} if self._tried else {n: t.clone() for n, t in self._rest.items() if not t.requires_grad}
        apply = self._compiled if self._compiled is not None and fuse else self._apply
        try:
            with warnings.catch_warnings(), _PlainAttention():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                out = apply(tensors, x, y, loss, separate)
            self._tried = True
            return out
        except RuntimeError as failure:
            if "vmap" not in str(failure):
                raise
        self._vmap = False
        with torch.no_grad():  # BatchNorm may have counted this batch already
            for name, value in before.items():
                self._rest[name].copy_(value)
        return None

    def _apply(
        self, tensors: dict[str, Tensor], x: Tensor, y: Tensor | None, loss: Loss | None, separate: bool
    ) -> Tensor:
        def member(tensors: dict[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
            out = functional_call(self._plain, tensors, (x,))
            return out if loss is None or y is None else loss(out, y)

        data = 0 if separate else None
        return torch.vmap(member, in_dims=(0, data, None if y is None else data), randomness="different")(tensors, x, y)


class _PlainAttention(TorchFunctionMode):
    """While this lasts, attention is computed by matrix products.

    Under vmap on a GPU, the gradients of torch's fused attention are wrong (NaN in bfloat16), and those of its plain
    form meet two types under autocast.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            function = plain_attention
        return function(*args, **(kwargs or {}))


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query key' / sqrt(width) + mask) value, with the softmax in float32; arguments as torch names them."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = torch.softmax(scores.float(), -1).to(value.dtype)
    return F.dropout(shares, dropout_p) @ value


def compile_always(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """torch.compile for every new shape and model: from the ninth on, torch would silently compile no more."""
    compiled = torch.compile(function, dynamic=False, **options)

    def apply(*args: Any) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
            return compiled(*args)

    return apply


def _stack(models: list[nn.Module]) -> nn.Module:
    """A copy of the first model with every parameter and buffer, and every noted mask, stacked over the members."""
    stacked = copy.deepcopy(models[0])
    shared: dict[int, Tensor] = {}  # a tied weight stays tied
    for (module, kind, name), first, modules in _tensors(stacked, models, with_ties=True):
        if id(first) not in shared:
            tensor = torch.stack([getattr(member, kind)[name].detach() for member in modules])
            shared[id(first)] = (
                nn.Parameter(tensor, requires_grad=first.requires_grad) if isinstance(first, nn.Parameter) else tensor
            )
        getattr(module, kind)[name] = shared[id(first)]
    for site in attachment.sites(stacked):
        std = site.sampler.std
        if std is not None and std.ndim == 1:  # one number per member, which has to multiply that member's weights
            site.sampler.std = std.reshape(-1, *[1] * (site.mean.ndim - 1))
    for name, module in stacked.named_modules():
        masks = [weights.notes(model.get_submodule(name)).mask for model in models]
        names = {key: keep for mask in masks if mask for key, keep in mask.items()}
        if names:
            weights.notes(module).mask = {
                key: torch.stack([(mask or {}).get(key, torch.ones_like(like)) for mask in masks])
                for key, like in names.items()
            }
    learned = [weights.learned(model) for model in models]
    if learned[0]:
        weights.notes(stacked).learned = {
            name: nn.Parameter(torch.stack([tensors[name].detach() for tensors in learned])) for name in learned[0]
        }
    return stacked


def _tensors(
    stacked: nn.Module, models: list[nn.Module], *, with_ties: bool = False
) -> Iterator[tuple[tuple[nn.Module, str, str], Tensor, list[nn.Module]]]:
    """(module, its dictionary, name), the tensor there, and the members' modules.

    A tied weight comes once, or `with_ties` at every place.
    """
    known: set[int] = set()
    for path, module in stacked.named_modules():
        modules = [model.get_submodule(path) for model in models]
        for kind in ("_parameters", "_buffers"):
            for name, tensor in list(getattr(module, kind).items()):
                if tensor is not None and (with_ties or id(tensor) not in known):
                    known.add(id(tensor))
                    yield (module, kind, name), tensor, modules


def _skeleton(model: nn.Module) -> nn.Module:
    """The plain form of a model without its numbers, for functional_call."""
    plain = copy.deepcopy(model)
    sites = attachment.sites(plain)
    if sites:
        attachment.harden(plain, {site.name: torch.ones_like(site.mean, dtype=torch.bool) for site in sites})
    if kernels.backend(device_of(model)) == "triton":
        _use_grouped_layers(plain)
    for module in plain.modules():
        module.__class__ = _NORMS.get(type(module), type(module))
    _drop_numbers(plain)
    return plain


def _use_grouped_layers(plain: nn.Module) -> None:
    """Gives layers that are slow for many members at once a forward pass of ours."""
    for module in plain.modules():
        if type(module) is nn.Conv2d and _is_slow_in_groups(module):
            module.__class__ = _Grouped
        elif type(module) is nn.Linear:
            module.__class__ = _Linear


def _drop_numbers(plain: nn.Module) -> None:
    """Replaces all tensors by empty ones; .to("meta") would make two parameters of a tied one."""
    empty: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, so that no other gets its id
    for module in plain.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    getattr(module, kind)[name] = empty.setdefault(id(tensor), (tensor, _meta(tensor)))[1]


def _meta(tensor: Tensor) -> Tensor:
    shape = torch.empty_like(tensor, device="meta")
    return nn.Parameter(shape, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def _is_slow_in_groups(conv: nn.Conv2d) -> bool:
    """Whether cuDNN is slow at this convolution of many members at once."""
    plain = conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    slow = conv.in_channels < FEW if conv.stride == (1, 1) else max(conv.in_channels, conv.out_channels) <= _NARROW
    return plain and slow and not isinstance(conv.padding, str)


class _Grouped(nn.Conv2d):
    """A convolution that is fast for all members at once."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = torch.is_autocast_enabled(input.device.type)
        if half:
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
        if self.stride == (1, 1) and half:
            out = super()._conv_forward(*filled(input, weight), None)
        else:
            padding = [int(width) for width in self.padding]
            out = convolution(input, weight, stride=list(self.stride), padding=padding)
        return out if bias is None else out + bias[:, None, None].to(out.dtype)


class _KeepsType(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm whose outputs have its inputs' type, as outside of vmap; inside, float32 weights would change it.

    Not compiled, it computes in float32: torch has no gradient of vmap's BatchNorm for bfloat16.
    """

    def forward(self, input: Tensor) -> Tensor:
        wider = input.float() if input.dtype.itemsize == 2 and not torch.compiler.is_compiling() else input
        return super().forward(wider).to(input.dtype)


_NORMS: dict[type[nn.Module], Any] = {
    kind: type(f"_{kind.__name__}", (_KeepsType, kind), {}) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


class _Linear(nn.Linear):
    """x W^T as (W x^T)^T: the gradient in W is then laid out as W is, and nothing has to transpose it."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 2:
            return super().forward(input)
        out = (self.weight @ input.T).T
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _check_alike(models: Sequence[nn.Module]) -> None:
    if not models:
        raise ValueError("a population needs at least one model, but the list is empty")
    if len({id(model) for model in models}) < len(models):
        raise ValueError(
            "a population trains every member by itself, but one model is in the list twice; copy it first"
        )
    first = _form(models[0])
    for k, model in enumerate(models[1:], start=1):
        form = _form(model)
        for (first_name, first_trait), (name, trait) in zip(first, form, strict=False):
            if (first_name, first_trait) != (name, trait):
                raise ValueError(
                    f"the members of a population must have one architecture, but model 0 has {first_name} "
                    f"{first_trait} where model {k} has {name} {trait}; train them in separate calls"
                )
        if len(first) != len(form):
            raise ValueError(
                f"the members of a population must have one architecture, but model 0 has {len(first)} modules and "
                f"tensors and model {k} has {len(form)}; train them in separate calls"
            )


def alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models can be members of one population."""
    return _form(first) == _form(second)


def _form(model: nn.Module) -> list[tuple[str, str]]:
    """All that members must share: modules, shapes, types, devices, what is trained, and how masks are sampled."""
    modules = [
        (n or "the root", m)
        for n, m in model.named_modules()
        if not isinstance(m, (nn.utils.parametrize.ParametrizationList, Sampler))
    ]
    kinds = [(n, f"of type {type(m).__name__}, settings {m.extra_repr()!r}") for n, m in modules]
    tensors = [
        (n, f"of shape {tuple(t.shape)}, {t.dtype}, on {t.device}, requires_grad={t.requires_grad}")
        for n, t in (*model.named_parameters(), *model.named_buffers())
    ]
    samplers = [(site.name, site.sampler) for site in attachment.sites(model)]
    masks = [(n, f"with {', '.join(map(str, s.settings))}") for n, s in samplers]
    return kinds + tensors + masks + [(n, f"with {_settings(m)}") for n, m in modules]


def _settings(module: nn.Module) -> str:
    """What a module has noted as plain attributes: one skeleton, the first member's, computes for all.

    A seed or a name says which member it is, not what it computes.
    """
    plain, ignored = (bool, int, float, str, tuple, type(None)), ("training", "seed", "name")
    settings = {
        name: value
        for name, value in vars(module).items()
        if name not in ignored and not name.startswith("_") and isinstance(value, plain)
    }
    return ", ".join(f"{name}={settings[name]!r}" for name in sorted(settings))
