"""The parametrization that makes a weight a draw, and the pool through which a model's weights are drawn together."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from pacprune import kernels
from pacprune.distributed import sharded
from pacprune.kernels import Law, SampleInputs
from pacprune.masking import patterns

_CAST = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


def casts(module: nn.Module) -> bool:
    """Whether this module's forward hands its weight to an operation that autocast would cast anyway."""
    return type(module).forward in _CAST


class _Drawn(NamedTuple):
    """One weight's draw, with all that it follows from."""

    value: Tensor
    law: Law
    part: SampleInputs
    steps: int
    stamp: tuple[int, ...]
    memory: tuple[Tensor, ...]
    """Holds the memory that was read, so that no new tensor can have its address."""

    def fresh(self, part: SampleInputs, law: Law) -> bool:
        """Whether a new draw would give the same: the same tensors, none of them written to, and none given away."""
        if self.steps != _steps[0] or self.law != law or any(a is not b for a, b in zip(self.part, part, strict=True)):
            return False
        return self.stamp == _stamp(part, self.value)


_steps, _never = [0], itertools.count()


def _count_step(*_: object) -> None:
    """Fused optimisers, and those that write through `.data`, leave a tensor's version as it was."""
    if not torch.compiler.is_compiling():
        _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def _stamp(part: SampleInputs, value: Tensor) -> tuple[int, ...]:
    """Changes when a tensor is written to or given other memory, and in other modes, streams and graphs."""
    given = [t for t in (*part[:5], part.shift, part.sharpness) if t is not None]
    # Tensors of inference mode have no version: a parameter that is one could be anything at the next read.
    found = [next(_never) if t.is_inference() else t._version for t in given]
    found += [t.data_ptr() for t in given]
    # Who writes into a drawn weight must not spoil later reads, and what inference mode made is of no use outside it.
    found += [-1 if value.is_inference() else value._version, torch.is_inference_mode_enabled()]
    if part.mean.is_cuda:
        # The replay of a graph writes without a trace, and memory belongs to the stream that asked for it.
        found += [torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(part.mean.device).cuda_stream]
    return tuple(found)


class Pool:
    """The draws of one attached model: the first read after a change draws all that has changed, in one launch.

    A draw is kept for the tensors it was made from, by identity, address and version, until an optimiser steps. What
    leaves no trace in these (writing in place through `.data`, the replay of a CUDA graph) needs a `resample_`,
    train(), eval() or `forget`.
    """

    def __init__(self) -> None:
        self._drawn: weakref.WeakKeyDictionary[Sampler, _Drawn | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._holds = False

    def __deepcopy__(self, memo: object) -> "Pool":
        return Pool()  # a copied model has its own; its samplers join it when they are read

    def forget(self) -> None:
        """Drops every draw, and its memory."""
        if self._holds:
            with self._lock:
                for sampler in list(self._drawn):
                    self._drawn[sampler] = None
                self._holds = False

    def read(self, sampler: "Sampler", part: SampleInputs, law: Law) -> Tensor | None:
        """The present draw of this sampler's weight; None where it must be drawn by itself, in plain torch."""
        drawn = self._drawn.get(sampler)
        if drawn is not None and drawn.fresh(part, law):
            return drawn.value
        del drawn  # the last one that would hold the old memory
        with self._lock:
            return self._draw(sampler, part, law)

    def _draw(self, sampler: "Sampler", part: SampleInputs, law: Law) -> Tensor | None:
        if kernels.fast_backend(part) is None:
            return None
        changed = {sampler: part}
        for other in list(self._drawn):
            theirs = None if other is sampler else other.part()
            if theirs is None or theirs.mean.device != part.mean.device or other.law(theirs) != law:
                continue
            if not self._fresh(other, theirs, law):
                changed[other] = theirs
        for other in changed:
            self._drawn[other] = None  # gives the old memory back before the new is asked for
        values = kernels.draw_fast(list(changed.values()), law)
        self._holds = True
        for (other, theirs), value in zip(changed.items(), values, strict=True):
            if value is None:
                continue
            memory = tuple(t.detach() for t in theirs[:3] if t is not None)
            self._drawn[other] = _Drawn(value, law, theirs, _steps[0], _stamp(theirs, value), memory)
        return values[0]

    def _fresh(self, sampler: "Sampler", part: SampleInputs, law: Law) -> bool:
        drawn = self._drawn.get(sampler)
        return drawn is not None and drawn.fresh(part, law)


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
    step, and not part of the state dict: they belong to a run, not to a distribution. For K models at once, seed, step,
    shift and sharpness have shape [K], and mean, gate and std a leading K.

    With an N:M pattern as its mapping, the gate has shape [C(M, N), rows, groups]: a group's choice c has the logit
    sharpness * (gate_c + coupling * sum_{i in c} log(|mean_i| + 1e-8)), and a weight is multiplied by the share of the
    choices that keep it: under softmax((logit + Gumbel noise) / beta), or of the largest alone where gates are hard.
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
        self.pattern = patterns.parse(mapping) if mapping in patterns.PATTERNS else None
        device = first[0].device
        self.register_buffer("seed", torch.tensor(seed, device=device), persistent=False)
        self.register_buffer("step", torch.tensor(0, device=device), persistent=False)
        for name, value in (("shift", 0.0), ("sharpness", 1.0), ("multiplier", 0.0)):
            self.register_buffer(name, torch.tensor(value, device=device))
        self.register_buffer("std", std)
        self._first: tuple[Tensor, ...] | None = first
        self._where = _Where()

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
            with torch.no_grad():
                return self._kept(patterns.relaxed(self.choice_logits(mean, gate), 1.0), mean)
        return kernels.probability(Law(self.mapping, self.coupling), mean, gate, self.shift, self.sharpness)

    def choice_logits(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The logits of a pattern's choices, [C(M, N), rows, groups], differentiable in the gate."""
        n, m = self._pattern()
        sharpness = self.sharpness.reshape(self.sharpness.shape + (1,) * (gate.ndim - self.sharpness.ndim))
        if self.coupling:
            size = torch.log(mean.detach().abs().float() + 1e-8)
            groups = patterns.grouped(size, m, members=self.seed.ndim == 1)
            gate = gate + self.coupling * patterns.spread(groups, n, m)
        return sharpness * gate

    def chosen(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The mask of a pattern's likeliest choices."""
        return self._kept(patterns.hard(self.choice_logits(mean, gate)), mean) != 0

    def _pattern(self) -> tuple[int, int]:
        assert self.pattern is not None, "only a pattern has choices"
        return self.pattern

    def _kept(self, choice: Tensor, mean: Tensor) -> Tensor:
        return patterns.membership(choice, *self._pattern()).reshape(mean.shape)

    def _refuse_pattern(self) -> None:
        if self.pattern is not None:
            raise ValueError(
                f"the gates of a {self.mapping} pattern choose among {self.pattern[1]} weights and have no logit for "
                "each; use Budget(control='none') and samples=0, or another mapping"
            )

    def _masked(self, mean: Tensor, gate: Tensor) -> Tensor:
        """The weight under its pattern in the present mode."""
        n, m = self._pattern()
        logits = self.choice_logits(mean, gate)
        if not self.training or self.estimator != kernels.NOISELESS:
            offset = self.offset // m * len(patterns.choices(n, m))  # tensors of whole groups come before this one
            logits = logits + patterns.gumbel(logits, seed=self.seed, step=self.step, offset=offset)
        choice = patterns.relaxed(logits, self.beta) if self.training else patterns.hard(logits)
        return mean * self._kept(choice, mean).to(mean.dtype)

    def law(self, part: SampleInputs) -> Law:
        """How gates become weights in the present mode."""
        mode = self.estimator if self.training else kernels.HARD
        # A std that is not the buffer is a parameter, and a parameter is its logarithm.
        return Law(self.mapping, self.coupling, mode, self.beta, part.std is not self._buffers["std"])

    def part(self) -> SampleInputs | None:
        """The tensors that the present draw is made of; None for a sampler that was taken out of its model."""
        where = self._where()
        if where is None:
            return None
        return self._part(where.original0, where.original1, getattr(where, "original2", None))  # type: ignore[arg-type]

    def _part(self, mean: Tensor, gate: Tensor, log_std: Tensor | None) -> SampleInputs:
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
        if self.pattern is not None:
            return self._masked(mean, gate)
        part = self._part(mean, gate, log_std)
        law = self.law(part)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # a tracer sees every draw
            return kernels.sample(part, law)
        if torch._C._are_functorch_transforms_active():
            return kernels.sample(part, law)
        where = self._where()
        if where is None or where.original0 is not mean:  # called by hand, or a replica in another thread
            return kernels.sample(part, law)
        return kernels.sample(part, law, self.pool.read(self, part, law))


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

    def part(self) -> tuple[SampleInputs, Law]:
        """What this rank's rows are drawn from, and how."""
        sampler = self[0]
        assert isinstance(sampler, Sampler)
        part = sampler._part(sharded.local(self.original0.detach()), sharded.local(self.original1.detach()), None)
        return part, sampler.law(part)

    def _backward(self, weight: Tensor) -> None:
        out, weight.grad = weight.grad, None
        assert out is not None
        pair, (part, law) = (self.original0, self.original1), self.part()
        needs = (pair[0].requires_grad, pair[1].requires_grad, False)
        gradients = kernels.gradients(part, law, sharded.local(out), needs)
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

    def leave(self, owner: nn.Module, attribute: str) -> None:
        """Puts the mean where the draw was, and takes gradients no more."""
        del owner.parametrizations[attribute]  # type: ignore[operator]
        if not len(owner.parametrizations):  # type: ignore[arg-type]
            del owner.parametrizations
        self._hook.remove()
        sharded.local(self.weight.detach()).copy_(sharded.local(self.original0.detach()))


@torch.no_grad()
def sample_shards_(shards: Sequence[Shards]) -> None:
    """Makes the present sample of all these weights, where fully_shard gathers them from: before every forward pass."""
    by_law: dict[Law, list[tuple[Tensor, SampleInputs]]] = {}
    for weight_shards in shards:
        part, law = weight_shards.part()
        if part.mean.numel():  # a rank may have no rows of a small tensor
            by_law.setdefault(law, []).append((sharded.local(weight_shards.weight.detach()), part))
    for law, pairs in by_law.items():
        rows, parts = zip(*pairs, strict=True)
        torch._foreach_copy_(rows, kernels.draw(parts, law))  # type: ignore[attr-defined]
