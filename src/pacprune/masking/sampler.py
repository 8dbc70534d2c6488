"""The parametrization that makes a weight a draw, and the pool through which a model's weights are drawn together."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from pacprune import kernels
from pacprune.distributed import sharded
from pacprune.kernels import Law, SampleInputs
from pacprune.masking import patterns
from pacprune.masking.redrawn import redrawable

_CAST = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


def casts(module: nn.Module) -> bool:
    """Whether this module's forward hands its weight to an operation that autocast would cast anyway."""
    return type(module).forward in _CAST


class _CachedDraw(NamedTuple):
    """One weight's draw, with all that it follows from."""

    value: Tensor
    law: Law
    inputs: SampleInputs
    steps: int
    stamp: tuple[int, ...]
    memory: tuple[Tensor, ...]
    """Holds the memory that was read, so that no new tensor can have its address."""

    def fresh(self, inputs: SampleInputs, law: Law) -> bool:
        """Whether a new draw would give the same: the same tensors, none of them written to, and none given away."""
        if self.steps != _steps[0] or self.law != law:
            return False
        if any(old is not new for old, new in zip(self.inputs, inputs, strict=True)):
            return False
        return self.stamp == _stamp(inputs, self.value)


_steps = [0]
"""How many steps optimisers have taken."""
_unequal = itertools.count()
"""Numbers that occur once."""


def _count_step(*_: object) -> None:
    """Fused optimisers, and those that write through `.data`, leave a tensor's version as it was."""
    if not torch.compiler.is_compiling():
        _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def _stamp(inputs: SampleInputs, value: Tensor) -> tuple[int, ...]:
    """Changes when a tensor is written to or given other memory, and in other modes, streams and graphs."""
    tensors = [t for t in (*inputs[:3], *inputs.counters) if t is not None]
    # Tensors of inference mode have no version: a parameter that is one could be anything at the next read.
    stamp = [next(_unequal) if t.is_inference() else t._version for t in tensors]
    stamp += [t.data_ptr() for t in tensors]
    # Who writes into a drawn weight must not spoil later reads, and what inference mode made is of no use outside it.
    stamp += [-1 if value.is_inference() else value._version, torch.is_inference_mode_enabled()]
    if inputs.mean.is_cuda:
        # The replay of a graph writes without a trace, and memory belongs to the stream that asked for it.
        stamp += [torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(inputs.mean.device).cuda_stream]
    return tuple(stamp)


class Pool:
    """The draws of one attached model: the first read after a change draws all that has changed, in one launch.

    A draw is kept for the tensors it was made from, by identity, address and version, until an optimiser steps. What
    leaves no trace in these (writing in place through `.data`, the replay of a CUDA graph) needs a `resample_`,
    train(), eval() or `forget`.
    """

    def __init__(self) -> None:
        self._cached: weakref.WeakKeyDictionary[Sampler, _CachedDraw | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._holds = False

    def __deepcopy__(self, memo: object) -> "Pool":
        return Pool()  # a copied model has its own; its samplers join it when they are read

    def forget(self) -> None:
        """Drops every draw, and its memory."""
        if self._holds:
            with self._lock:
                for sampler in list(self._cached):
                    self._cached[sampler] = None
                self._holds = False

    def read(self, sampler: "Sampler", inputs: SampleInputs, law: Law) -> Tensor | None:
        """The present draw of this sampler's weight; None where it must be drawn by itself, in plain torch."""
        cached = self._cached.get(sampler)
        if cached is not None and cached.fresh(inputs, law):
            return cached.value
        del cached  # the last one that would hold the old memory
        with self._lock:
            return self._draw_changed(sampler, inputs, law)

    def _draw_changed(self, sampler: "Sampler", inputs: SampleInputs, law: Law) -> Tensor | None:
        """Draws this weight, and every other one that a new draw would change, in one launch."""
        if kernels.fast_backend(inputs, law) is None:
            return None
        changed = {sampler: inputs, **self._changed_beside(sampler, inputs.mean.device, law)}
        for member in changed:
            self._cached[member] = None  # gives the old memory back before the new is asked for
        values = kernels.draw_fast(list(changed.values()), law)
        self._holds = True
        for (member, read), value in zip(changed.items(), values, strict=True):
            if value is not None:
                memory = tuple(t.detach() for t in read[:3] if t is not None)
                self._cached[member] = _CachedDraw(value, law, read, _steps[0], _stamp(read, value), memory)
        return values[0]

    def _changed_beside(self, sampler: "Sampler", device: torch.device, law: Law) -> "dict[Sampler, SampleInputs]":
        """The other samplers of this device and law whose draw is out of date, with what they read."""
        changed = {}
        for member, cached in list(self._cached.items()):
            inputs = None if member is sampler else member.inputs()
            if inputs is None or inputs.mean.device != device or member.law(inputs) != law:
                continue
            if cached is None or not cached.fresh(inputs, law):
                changed[member] = inputs
        return changed


class _Where:
    """A sampler's way to the parameters it is called with: weak, since they own it, and kept right by a deepcopy."""

    def __init__(self, where: parametrize.ParametrizationList | None = None) -> None:
        self._reference = None if where is None else weakref.ref(where)

    def __deepcopy__(self, memo: dict[int, object]) -> "_Where":
        copied = memo.get(id(self()))
        return _Where(copied if isinstance(copied, parametrize.ParametrizationList) else None)

    def __call__(self) -> parametrize.ParametrizationList | None:
        return None if self._reference is None else self._reference()


class Sampler(nn.Module):
    """The parametrization of one weight tensor: (mean, gate[, log std]) -> the draw of the present step.

    The mapping is keep_prob = sigmoid(sharpness * (gate + coupling * log(|mean| + 1e-8) - shift)), or clamp(gate). Soft
    gates in train mode, hard ones in eval mode. seed and step are tensors, since a Python number would recompile every
    step. They are part of the state dict, so that a run that goes on from it repeats no draw. For K models at once,
    seed, step, shift and sharpness have shape [K], and mean, gate and std a leading K.

    With an N:M pattern as its mapping, N of every M neighbours are kept, those with the largest logit + Gumbel noise
    (see `kernels.law.PATTERNS`). Such a draw is not kept for other reads: it is made again wherever it is needed, also
    for the backward pass where `redrawn` says so. `unmasked` gives the mean in place of every draw.
    """

    seed: Tensor
    step: Tensor
    shift: Tensor
    sharpness: Tensor
    multiplier: Tensor
    std: Tensor | None

    def __init__(
        self,
        first: tuple[Tensor, ...],
        std: Tensor | None,
        pool: Pool,
        *,
        offset: int,
        seed: int,
        mapping: str,
        coupling: float,
        estimator: str,
        beta: float,
        cast: bool,
    ) -> None:
        super().__init__()
        self.offset, self.mapping, self.coupling, self.estimator, self.beta = offset, mapping, coupling, estimator, beta
        self.cast, self.pool = cast, pool
        self.pattern = Law(mapping).pattern
        self.unmasked = False
        device = first[0].device
        self.register_buffer("seed", torch.tensor(seed, device=device))
        self.register_buffer("step", torch.tensor(0, device=device))
        for name, value in (("shift", 0.0), ("sharpness", 1.0), ("multiplier", 0.0)):
            self.register_buffer(name, torch.tensor(value, device=device))
        self.register_buffer("std", std)
        self._first: tuple[Tensor, ...] | None = first
        self._where = _Where()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("seed", "step"):  # a state dict without them is of a distribution alone
            state_dict.setdefault(f"{prefix}{name}", getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Hands parametrize the starting values it registers as parameters."""
        first, self._first = self._first, None
        assert first is not None, "a sampler is installed once"
        return first

    def join(self, where: parametrize.ParametrizationList) -> None:
        """Says which parameters this sampler is called with; its weight is then drawn together with its pool's."""
        self._where = _Where(where)

    def train(self, mode: bool = True) -> "Sampler":
        """Soft gates, or with mode=False hard ones; the next read draws anew."""
        self.pool.forget()
        return super().train(mode)

    @property
    def settings(self) -> list[str | float]:
        """All numbers and words that a draw follows from, beside its tensors."""
        return [self.mapping, self.coupling, self.estimator, self.beta]

    def raw(self, mean: Tensor, gate: Tensor) -> Tensor:
        """gate + coupling * log(|mean| + 1e-8): the logit before shift and sharpness."""
        self._refuse_pattern()
        return kernels.raw(Law(self.mapping, self.coupling), mean, gate)

    def logit(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The logit of keep_prob, in [-14, 14], differentiable in the gate."""
        self._refuse_pattern()
        return kernels.logit(Law(self.mapping, self.coupling), mean, gate, self.shift, self.sharpness)

    def keep_prob(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The probability that the hard gate opens, as `kernels.quantised` stores it; a pattern's is not rounded."""
        if self.pattern is not None:
            n, m = self.pattern
            with torch.no_grad():
                logits = self.group_logits(mean, gate).reshape(-1, m)
                return kernels.top_probability(logits, n).reshape(mean.shape)
        return kernels.probability(Law(self.mapping, self.coupling), mean, gate, self.shift, self.sharpness)

    def group_logits(self, mean: Tensor, gate: Tensor) -> Tensor:
        """What the weights of a pattern's group are ranked by, before noise."""
        return kernels.group_logits(Law(self.mapping, self.coupling), mean, gate, self.sharpness)

    def chosen(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The mask of a pattern's likeliest choices, ties by magnitude."""
        with torch.no_grad():
            ties = {"": mean.detach().abs()}
            return patterns.top({"": self.group_logits(mean, gate)}, self.mapping, ties)[""]

    def _refuse_pattern(self) -> None:
        if self.pattern is not None:
            raise ValueError(
                f"the gates of a {self.mapping} pattern share what they keep among {self.pattern[1]} weights, and none "
                "has a logit of its own; use Budget(control='none') and samples=0, or another mapping"
            )

    def law(self, inputs: SampleInputs) -> Law:
        """How gates become weights in the present mode."""
        mode = self.estimator if self.training else kernels.HARD
        # A std that is not the buffer is a parameter, and a parameter is its logarithm.
        log_std = inputs.std is not self._buffers["std"]
        return Law(self.mapping, self.coupling, mode, self.beta, log_std)

    def inputs(self) -> SampleInputs | None:
        """The tensors that the present draw is made of; None for a sampler that was taken out of its model."""
        where = self._where()
        if where is None:
            return None
        return self.inputs_of(where.original0, where.original1, getattr(where, "original2", None))  # type: ignore[arg-type]

    def inputs_of(self, mean: Tensor, gate: Tensor, log_std: Tensor | None) -> SampleInputs:
        """The tensors that the present draw of these parameters is made of."""
        seed, step, shift, sharpness, _, std = self._buffers.values()  # by name each would be searched for
        std = std if log_std is None else log_std
        return SampleInputs(mean, gate, std, seed, step, self.offset, shift, sharpness, self._dtype(mean))  # type: ignore[arg-type]

    def _dtype(self, mean: Tensor) -> torch.dtype | None:
        """bfloat16 where autocast would make the weight that, so that it is written, and its gradient read, once."""
        kind = mean.device.type
        if self.cast and mean.dtype == torch.float32 and torch.is_autocast_enabled(kind):
            return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else None
        return None

    def forward(self, mean: Tensor, gate: Tensor, log_std: Tensor | None = None) -> Tensor:
        """The weight."""
        if self.unmasked:
            return mean
        inputs = self.inputs_of(mean, gate, log_std)
        law = self.law(inputs)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # a tracer sees every draw
            return kernels.sample(inputs, law)
        if torch._C._are_functorch_transforms_active():
            return kernels.sample(inputs, law)
        where = self._where()
        if where is None or where.original0 is not mean:  # called by hand, or a replica in another thread
            return kernels.sample(inputs, law)
        if self.pattern is not None:
            return redrawable(kernels.sample(inputs, law), inputs, law)
        return kernels.sample(inputs, law, self.pool.read(self, inputs, law))


def keep_prob_of(
    mean: Tensor,
    gate: Tensor,
    shift: Tensor,
    sharpness: Tensor,
    *,
    mapping: str,
    coupling: float,
    estimator: str = kernels.SOFT,
) -> Tensor:
    """`Sampler.keep_prob` of stored tensors, as a checkpoint holds them; of K models, shift has shape [K]."""
    law = {"mapping": mapping, "coupling": coupling, "estimator": estimator, "beta": 0.5}
    sampler = Sampler((mean, gate), None, Pool(), offset=0, seed=0, cast=False, **law)
    sampler.shift, sampler.sharpness, sampler.seed = shift, sharpness, torch.zeros_like(shift, dtype=torch.int64)
    return sampler.keep_prob(mean, gate)


class Shards(nn.ModuleList):
    """A weight that fully_shard has cut into rows, as draws: (mean, gate) beside it, and in it the present draw.

    Every rank draws its own rows, with the noise that they have in the whole model; what is gathered for a layer's
    forward pass is drawn already. The gradient in the draw, once it is summed over the ranks and cut into rows, becomes
    that in mean and gate, and is dropped. It stands where torch's parametrize puts its own list.
    """

    def __init__(self, weight: nn.Parameter, sampler: Sampler) -> None:
        super().__init__([sampler])
        mean, gate = sampler.right_inverse(weight)
        self.original0 = nn.Parameter(mean, requires_grad=weight.requires_grad)
        self.original1 = nn.Parameter(gate, requires_grad=weight.requires_grad)
        self._weight = (weight,)  # in a tuple, since it is registered where it belongs
        self._hook = weight.register_post_accumulate_grad_hook(self._backward)

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that fully_shard gathers."""
        return self._weight[0]

    @property
    def unmasked(self) -> bool:
        """Whether the mean stands for the draw."""
        return self[0].unmasked is True

    def inputs(self) -> tuple[SampleInputs, Law]:
        """What this rank's rows are drawn from, and how."""
        sampler = self[0]
        assert isinstance(sampler, Sampler)
        mean, gate = (sharded.local(p.detach()) for p in (self.original0, self.original1))
        inputs = sampler.inputs_of(mean, gate, None)
        return inputs, sampler.law(inputs)

    def _backward(self, weight: Tensor) -> None:
        out, weight.grad = weight.grad, None
        assert out is not None
        pair, (inputs, law) = (self.original0, self.original1), self.inputs()
        needs = (pair[0].requires_grad, pair[1].requires_grad, False)
        gradients = kernels.gradients(inputs, law, sharded.local(out), needs)
        for p, gradient in zip(pair, gradients, strict=False):
            if gradient is not None and p.grad is not None:
                sharded.local(p.grad).add_(gradient)
            elif gradient is not None:
                p.grad = sharded.like(gradient, p)

    def join(self, owner: nn.Module, attribute: str) -> None:
        """Takes its place beside the weight; tied weights are one parameter already, and need it once."""
        if not parametrize.is_parametrized(owner):
            owner.parametrizations = nn.ModuleDict()
        owner.parametrizations[attribute] = self  # type: ignore[index]

    def leave(self, owner: nn.Module, attribute: str, value: Tensor) -> None:
        """Puts this value where the draw was, and takes gradients no more."""
        del owner.parametrizations[attribute]  # type: ignore[operator]
        if not len(owner.parametrizations):  # type: ignore[arg-type]
            del owner.parametrizations
        self._hook.remove()
        sharded.local(self.weight.detach()).copy_(sharded.local(value.detach()))


@torch.no_grad()
def sample_shards_(shards: Sequence[Shards]) -> None:
    """Makes the present draw of all these weights, where fully_shard gathers them from: before every forward pass."""
    by_law: dict[Law, list[tuple[Tensor, SampleInputs]]] = {}
    for weight_shards in shards:
        inputs, law = weight_shards.inputs()
        if weight_shards.unmasked:
            sharded.local(weight_shards.weight.detach()).copy_(inputs.mean)
        elif inputs.mean.numel():  # a rank may have no rows of a small tensor
            by_law.setdefault(law, []).append((sharded.local(weight_shards.weight.detach()), inputs))
    for law, pairs in by_law.items():
        rows, all_inputs = zip(*pairs, strict=True)
        torch._foreach_copy_(rows, kernels.draw(all_inputs, law))  # type: ignore[attr-defined]
