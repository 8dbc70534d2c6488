"""Criteria: each is a function that returns scores, one number per prunable weight, larger = keep."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacprune import philox
from pacprune.data.batches import batches, device_of, example_hashes, isolated_rng
from pacprune.distributed import ranks, sharded
from pacprune.masking import weights
from pacprune.types import Data, Loss

NAMES = ("magnitude", "snip", "grasp", "synflow", "random")
EXAMPLES = 4096
"""How many examples snip and grasp look at unless told otherwise."""


def score(
    criterion: str,
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """The scores of a criterion by its name, for code that takes the name from a user."""
    check(criterion, model)
    if criterion == "magnitude":
        return magnitude(model, prunable=prunable)
    if criterion == "snip":
        return snip(model, data, loss=loss, prunable=prunable)
    if criterion == "grasp":
        return grasp(model, data, loss=loss, prunable=prunable)
    if criterion == "synflow":
        return synflow(model, data, prunable=prunable)
    return random(model, seed=seed, prunable=prunable)


def check(criterion: str, model: nn.Module) -> None:
    """Refuses a criterion that does not exist, or that this model cannot be scored by."""
    if criterion not in NAMES:
        raise ValueError(f"criterion {criterion!r} is unknown; use one of {', '.join(NAMES)}")
    if criterion in ("grasp", "synflow") and sharded.ensure_resharded(model):
        sharded.refuse(model.parameters(), f"the criterion {criterion}", "use magnitude, snip or random")


def magnitude(model: nn.Module, *, prunable: weights.Prunable = weights.prunable) -> dict[str, Tensor]:
    """|w| (Han et al. 2015)."""
    return {name: w.detach().abs() for name, w in prunable(model).items()}


def random(model: nn.Module, *, seed: int = 0, prunable: weights.Prunable = weights.prunable) -> dict[str, Tensor]:
    """One uniform number per weight, a function of (seed, index): the baseline that every criterion must beat."""
    found, start = {}, 0
    for name, w in prunable(model).items():
        own, first = sharded.local(w.detach()), start + sharded.start(w)
        word = philox.words(own.numel(), seed=seed, step=0, stream=philox.SCORE, offset=first, device=w.device)
        found[name] = sharded.like(philox.uniform(word).reshape(own.shape), w)
        start += w.numel()
    return found


def snip(
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = F.cross_entropy,
    examples: int = EXAMPLES,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """|w dL/dw|, the first-order change of the loss when w is removed (Lee et al. 2019)."""
    chosen = prunable(model)
    cut = sharded.some(chosen.values())
    gradient = (_shards_gradient if cut else _gradient)(model, chosen, data, loss, examples)
    return {name: (w.detach() * g).abs() for (name, w), g in zip(chosen.items(), gradient, strict=True)}


def grasp(
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = F.cross_entropy,
    examples: int = EXAMPLES,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """w * (H g): removing w changes the gradient norm g'g by about -2 w (H g), so keep where that is most harmful.

    Wang et al. 2020 prune the largest -w (H g); the sign here is turned so that larger = keep. H g is the gradient of
    g(w)'g with the second g held fixed.
    """
    check("grasp", model)
    chosen = prunable(model)
    fixed = _gradient(model, chosen, data, loss, examples)
    product = _gradient(model, chosen, data, loss, examples, times=fixed)
    return {name: w.detach() * hg for (name, w), hg in zip(chosen.items(), product, strict=True)}


def synflow(model: nn.Module, data: Data, *, prunable: weights.Prunable = weights.prunable) -> dict[str, Tensor]:
    """|w dR/dw| with R = sum of the outputs of the network |w| on an input of ones (Tanaka et al. 2020), one round.

    Only the shape of the first example is used (its values too when the input is integer tokens). In float64, where
    products over deep networks do not overflow.
    """
    check("synflow", model)
    device = device_of(model)
    with isolated_rng(device, data, seed=0):
        x = next(batches(data, 1, device=device, limit=1))[0][:1]
    if not x.is_floating_point():
        weights.mark_seen(model, example_hashes(data))
    chosen = prunable(model)
    state = {n: t.double() if t.is_floating_point() else t for n, t in _copies(model).items()}
    state |= {n: state[n].abs() for n, _ in model.named_parameters()}
    leaves = [state[name].requires_grad_() for name in chosen]
    with torch.enable_grad(), weights.modes_kept(model), _plain_kernels(model):
        model.eval()
        flow = functional_call(model, state, torch.ones_like(x, dtype=torch.float64) if x.is_floating_point() else x)
        flow = flow[0] if isinstance(flow, tuple) else flow
        gradient = torch.autograd.grad(flow.sum(), leaves, materialize_grads=True)
    return {name: (leaf.detach() * g).abs() for name, leaf, g in zip(chosen, leaves, gradient, strict=True)}


@contextmanager
def _plain_kernels(model: nn.Module) -> Iterator[None]:
    """Kernels with all derivatives: not fused attention (only one), nor cuDNN's RNNs (only one, in train mode)."""
    with sdpa_kernel(SDPBackend.MATH), plain_rnn(model):
        yield


@contextmanager
def plain_rnn(model: nn.Module) -> Iterator[None]:
    """Turns cuDNN off around a model with RNNs, of which cuDNN has no derivatives in eval mode."""
    # Not by cudnn.flags, which fails once a user has set fp32_precision.
    before = torch.backends.cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Detached copies of all parameters and buffers; a tied weight once, so that functional_call ties it again."""
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def _gradient(
    model: nn.Module,
    chosen: Mapping[str, Tensor],
    data: Data,
    loss: Loss,
    examples: int,
    times: list[Tensor] | None = None,
) -> list[Tensor]:
    """dL/dw of the mean loss over `examples` examples, or, with `times` = v, the product of the Hessian with v.

    The model is called with copies of its parameters and buffers, in the mode it is in: nothing of it changes, but the
    examples are noted as seen. Dropout and a shuffling DataLoader draw the same numbers in every call.
    """
    seen, sums = 0, [torch.zeros_like(w) for w in chosen.values()]
    state, device = _copies(model), device_of(model)
    leaves = [state[name].requires_grad_() for name in chosen]
    with torch.enable_grad(), isolated_rng(device, data, seed=0):
        for x, y in batches(data, 256, device=device, limit=examples):
            with _plain_kernels(model):
                value = loss(functional_call(model, state, (x,)), y)
            if not torch.isfinite(value):
                raise ValueError(f"the loss is {value.item()} on the scoring data; check the inputs and the labels")
            gradient = torch.autograd.grad(value, leaves, create_graph=times is not None, materialize_grads=True)
            if times is not None:
                dot = torch.stack([(g * v).sum() for g, v in zip(gradient, times, strict=True)]).sum()
                gradient = torch.autograd.grad(dot, leaves, materialize_grads=True)
            sums = [s + g.detach() * len(x) for s, g in zip(sums, gradient, strict=True)]
            seen += len(x)
    weights.mark_seen(model, example_hashes(data))
    return [s / seen for s in sums]


def _shards_gradient(
    model: nn.Module, chosen: Mapping[str, Tensor], data: Data, loss: Loss, examples: int
) -> list[Tensor]:
    """`_gradient` of a sharded model, by its own backward pass: each rank takes its part of every batch."""
    seen, sums = 0, [torch.zeros_like(w) for w in chosen.values()]
    device, buffers = device_of(model), [(b, b.clone()) for b in model.buffers()]
    before = [(p, p.grad) for p in model.parameters()]
    with torch.enable_grad(), isolated_rng(device, data, seed=0):
        for x, y in batches(data, 256, device=device, limit=examples):
            low, high = ranks.part(len(x))
            if high - low < 1 or len(x) < 2 * ranks.world():  # too few to split: all do all of it
                low, high = 0, len(x)
            for p, _ in before:
                p.grad = None
            value = loss(model(x[low:high]), y[low:high]) * (high - low)
            bad = ranks.sum_((~torch.isfinite(value.detach())).long())
            if bad:
                raise ValueError(f"the loss is {value.item()} on the scoring data; check the inputs and the labels")
            value.backward()
            # fully_shard takes the mean over ranks; of parts, the sum is meant.
            times = 1 if high - low == len(x) else ranks.world()
            for total, w in zip(sums, chosen.values(), strict=True):
                if w.grad is not None:
                    total += w.grad * times
            seen += len(x)
    with torch.no_grad():
        for buffer, old in buffers:
            buffer.copy_(old)
    for p, old in before:
        p.grad = old
    weights.mark_seen(model, example_hashes(data))
    return [s / seen for s in sums]
