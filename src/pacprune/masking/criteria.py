"""Criteria: each is a function that returns scores, one number per prunable weight, larger = keep.

A new criterion is a function `f(model, data) -> scores` and its row in `CRITERIA`. It may name any of the keywords
`loss`, `forward`, `seed` and `prunable`, which `score` then hands on. Its data count as seen by the model, unless
`_declared` says that it does not read them.
Whatever takes a criterion by name takes such a function too.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacprune import philox
from pacprune.data import trace
from pacprune.data.batches import Objective, batches, device_of, first_batch, is_pair, isolated_rng, rows, taken, use_of
from pacprune.distributed import across, across_model, count, first_index, like, local, ranks, refuse_sharded
from pacprune.masking import calibration, solvers, weights
from pacprune.types import Data, Diverged, Forward, Loss, check_name

__all__ = [
    "CRITERIA",
    "EXAMPLES",
    "Criterion",
    "grasp",
    "magnitude",
    "random",
    "score",
    "snip",
    "sparsegpt",
    "synflow",
    "wanda",
]

Criterion = Callable[..., Mapping[str, Tensor]]
"""f(model, data) -> scores, with any of the keywords loss, forward, seed and prunable."""
_P = ParamSpec("_P")
EXAMPLES = 4096
"""How many examples snip and grasp look at, unless `examples` says otherwise."""


@dataclass(frozen=True)
class Declaration:
    """What a criterion says about itself.

    Args:
        reads_data: Whether scores depend on the data, which the model then has seen.
        needs_whole_weights: Whether it cannot score a model that is cut into shards.
        needs_inputs: Whether it scores only weights of layers that show their inputs, Linear and convolutions.
    """

    reads_data: bool
    needs_whole_weights: bool = False
    needs_inputs: bool = False


_DECLARATIONS: list[tuple[Criterion, Declaration]] = []


def declaration(criterion: Criterion) -> Declaration | None:
    """What a criterion says about itself by `_declared`; None for any other function, about which nothing is known."""
    return next((declared for function, declared in _DECLARATIONS if function is criterion), None)


def _declared(
    *, reads_data: bool, needs_whole_weights: bool = False, needs_inputs: bool = False
) -> Callable[[Callable[_P, dict[str, Tensor]]], Callable[_P, dict[str, Tensor]]]:
    """Makes a function a criterion: data that it reads are noted as seen, and its scores carry their trace."""

    def declare(function: Callable[_P, dict[str, Tensor]]) -> Callable[_P, dict[str, Tensor]]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def criterion(*args: _P.args, **kwargs: _P.kwargs) -> dict[str, Tensor]:
            scores = function(*args, **kwargs)
            if reads_data:
                arguments = signature.bind(*args, **kwargs).arguments
                weights.mark_seen(arguments["model"], use_of(arguments["data"]))
            return scores

        traced = _traced(criterion)
        _DECLARATIONS.append((traced, Declaration(reads_data, needs_whole_weights, needs_inputs)))
        return traced

    return declare


def _traced(criterion: Callable[_P, dict[str, Tensor]]) -> Callable[_P, dict[str, Tensor]]:
    """A criterion whose scores carry the trace of what the model, and so they, were computed from."""

    @functools.wraps(criterion)
    def scores_of(*args: _P.args, **kwargs: _P.kwargs) -> dict[str, Tensor]:
        model = next(value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
        weights.note_changes([model])
        scores = criterion(*args, **kwargs)
        trace.note(scores, weights.seen(model))
        return scores

    return scores_of


# --- The criteria


@_declared(reads_data=False)
def magnitude(
    model: nn.Module, data: Data | None = None, *, prunable: weights.Prunable = weights.prunable
) -> dict[str, Tensor]:
    """|w|, the size of a weight (Han et al. 2015).

    Args:
        model: A plain model, usually a trained one.
        data: Not used; every criterion can be called with data.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores by parameter name, larger = keep.

    Example:
        >>> scores = pp.scores.magnitude(model)
        >>> torch.equal(scores["1.weight"], model[1].weight.abs())
        True
    """
    return {name: w.detach().abs() for name, w in prunable(model).items()}


@_declared(reads_data=False)
def random(
    model: nn.Module, data: Data | None = None, *, seed: int = 0, prunable: weights.Prunable = weights.prunable
) -> dict[str, Tensor]:
    """One uniform number per weight, a function of (seed, index): the baseline that every criterion must beat.

    Args:
        model: A plain model.
        data: Not used; every criterion can be called with data.
        seed: Another seed gives other scores.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores in (0, 1) by parameter name, larger = keep.

    Example:
        >>> scores = pp.scores.random(model, seed=1)
        >>> torch.equal(scores["1.weight"], pp.scores.random(model, seed=1)["1.weight"])
        True
    """
    scores, start = {}, 0
    for name, w in prunable(model).items():
        rank_rows, offset = local(w.detach()), start + first_index(w)
        word = philox.words(rank_rows.numel(), seed=seed, step=0, stream=philox.SCORE, offset=offset, device=w.device)
        scores[name] = like(philox.uniform(word).reshape(rank_rows.shape), w)
        start += w.numel()
    return scores


@_declared(reads_data=True)
def snip(
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    examples: int = EXAMPLES,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """|w dL/dw|, the first-order change of the loss when w is removed (Lee et al. 2019).

    Args:
        model: A plain model; it is left as it is, but the data is noted as seen.
        data: Labelled examples, such as `split.train`.
        loss: (outputs, labels) -> the mean loss L of a batch; see `pp.fit` for other batches.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.
        examples: At most so many examples are used, from the first one on.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores by parameter name, larger = keep.

    Raises:
        ValueError: If the loss is not finite on the data.

    Example:
        >>> scores = pp.scores.snip(model, split.train, examples=256)
        >>> [tuple(s.shape) for s in scores.values()]
        [(16, 64), (10, 16)]
    """
    chosen = prunable(model)
    gradient_of = _shards_gradient if across(chosen.values()) is not None else _gradient
    gradient = gradient_of(model, chosen, data, Objective(loss, forward), examples)
    return {name: (w.detach() * g).abs() for (name, w), g in zip(chosen.items(), gradient, strict=True)}


@_declared(reads_data=True, needs_whole_weights=True)
def grasp(
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    examples: int = EXAMPLES,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """w * (H g): removing w changes the gradient norm g'g by about -2 w (H g), so keep where that is most harmful.

    Wang et al. 2020 prune the largest -w (H g); the sign here is turned so that larger = keep. H g is the gradient of
    g(w)'g with the second g held fixed.

    Args:
        model: A plain model; it is left as it is, but the data is noted as seen.
        data: Labelled examples, such as `split.train`.
        loss: (outputs, labels) -> the mean loss of a batch, of which g is the gradient and H the Hessian; see `pp.fit`
            for other batches.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.
        examples: At most so many examples are used, from the first one on.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores of both signs by parameter name, larger = keep.

    Raises:
        ValueError: If the loss is not finite on the data, or the model is sharded.

    Example:
        >>> scores = pp.scores.grasp(model, split.train, examples=256)
        >>> list(scores)
        ['1.weight', '3.weight']
    """
    check("grasp", model)
    chosen = prunable(model)
    objective = Objective(loss, forward)
    fixed = _gradient(model, chosen, data, objective, examples)
    product = _gradient(model, chosen, data, objective, examples, times=fixed)
    return {name: w.detach() * hg for (name, w), hg in zip(chosen.items(), product, strict=True)}


@_declared(reads_data=False, needs_whole_weights=True)  # but for tokens, which it notes itself
def synflow(model: nn.Module, data: Data, *, prunable: weights.Prunable = weights.prunable) -> dict[str, Tensor]:
    """|w dR/dw| with R = sum of the outputs of the network |w| on an input of ones (Tanaka et al. 2020), one round.

    In float64, where products over deep networks do not overflow.

    Args:
        model: A plain model; it is left as it is.
        data: Only the shape of the first example is used. Integer tokens are used as they are, and noted as seen.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores in float64 by parameter name, larger = keep.

    Raises:
        ValueError: If the model is sharded.

    Example:
        >>> scores = pp.scores.synflow(model, split.train)
        >>> first, last = (float(s.sum()) for s in scores.values())
        >>> last > first  # only the flow through weights counts, and biases add to it on the way
        True
    """
    check("synflow", model)
    device = device_of(model)
    with isolated_rng(device, data, seed=0):
        batch = first_batch(data, 1, device=device)
    if not (is_pair(batch) and isinstance(batch[0], Tensor)):
        raise ValueError(
            f"synflow needs the shape of an input x, but a batch is a {type(batch).__name__}; give batches (x, y), or "
            "another criterion"
        )
    x = batch[0][:1]
    if not x.is_floating_point():
        weights.mark_seen(model, use_of(data))
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


@_declared(reads_data=True, needs_whole_weights=True, needs_inputs=True)
def wanda(
    model: nn.Module,
    data: Data,
    *,
    forward: Forward | None = None,
    examples: int = EXAMPLES,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """|w| times the norm of the input it multiplies, over all tokens of the data (Sun et al. 2023).

    Its square is what pruning this weight alone adds to the squared error of the layer's output. The paper compares
    within the weights of one output: `scope="row"`. Only Linear and convolution layers show their inputs. An input of
    a convolution is what one number of the kernel meets at all places.

    Args:
        model: A plain model, usually a trained one; it runs in eval mode and is left as it is.
        data: Calibration data, of the kind the model was trained on; labels are not used.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.
        examples: At most so many examples are used, from the first one on.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores by parameter name, larger = keep.

    Raises:
        ValueError: If a weight is not that of a layer whose inputs can be seen, no batch reached it, or inputs are NaN.

    Example:
        >>> scores = pp.scores.wanda(model, split.train)
        >>> mask = pp.top_k(scores, sparsity=0.5, scope="row")
        >>> sorted({int(kept) for kept in mask["1.weight"].sum(1)})  # of 64
        [32]
    """
    layers = calibration.layers_for(model, prunable(model))
    sums = calibration.sums_of(model, data, layers, calibration.squares, forward=forward, examples=examples)
    return {name: _scored(layer, sums[name].sqrt(), 1) for name, (layer, *_) in layers.items()}


@_declared(reads_data=True, needs_whole_weights=True, needs_inputs=True)
def sparsegpt(
    model: nn.Module,
    data: Data,
    *,
    forward: Forward | None = None,
    examples: int = EXAMPLES,
    damping: float = 0.01,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """w^2 / [H^-1]_jj with H = X'X of the layer's inputs: what pruning w costs when its row makes up for it.

    That is the saliency of optimal brain surgeon (Hassibi and Stork 1993) for the squared error of the layer's output,
    which SparseGPT (Frantar and Alistarh 2023) goes by. This is the score alone; `pp.layerwise` also makes up for what
    is pruned.

    Args:
        model: A plain model, usually a trained one; it runs in eval mode and is left as it is.
        data: Calibration data, of the kind the model was trained on; labels are not used.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.
        examples: At most so many examples are used, from the first one on.
        damping: What is added to the diagonal of H, as a share of its mean.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores by parameter name, larger = keep.

    Raises:
        ValueError: If a weight is not that of a layer whose inputs can be seen, no batch reached it, or inputs are NaN.

    Example:
        >>> scores = pp.scores.sparsegpt(model, split.train, examples=256)
        >>> [tuple(s.shape) for s in scores.values()]
        [(16, 64), (10, 16)]
    """
    layers = calibration.layers_for(model, prunable(model))
    sums = calibration.sums_of(model, data, layers, calibration.second_moments, forward=forward, examples=examples)
    scores = {}
    for name, (layer, *_) in layers.items():
        moments = sums.pop(name)
        dead = moments.diagonal(dim1=-2, dim2=-1) == 0
        costs = 1 / solvers.inverse_diagonal(moments, damping).to(moments.dtype)
        scores[name] = _scored(layer, costs.masked_fill(dead, 0), 2)
    return scores


def _scored(layer: calibration.Layer, of_inputs: Tensor, power: int) -> Tensor:
    """|w|^power times a number of its input, as the weight is stored."""
    size = layer.matrix(layer.weight.detach()).abs().to(of_inputs.dtype)
    return layer.stored(size**power * of_inputs.unsqueeze(1))


CRITERIA: dict[str, Criterion] = {
    "magnitude": magnitude,
    "snip": snip,
    "grasp": grasp,
    "synflow": synflow,
    "random": random,
    "wanda": wanda,
    "sparsegpt": sparsegpt,
}
"""Every criterion by the name that commands and pipelines take."""


# --- Criteria by name


@_traced
def score(
    criterion: str | Criterion,
    model: nn.Module,
    data: Data | None,
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward | None = None,
    seed: int = 0,
    prunable: weights.Prunable = weights.prunable,
) -> dict[str, Tensor]:
    """The scores of a criterion, given by its name or as a function.

    A function is called as f(model, data), with those of the keywords loss, forward, seed and prunable that it names.
    All of `data` is then noted as seen by the model, since nobody knows what the function looked at; of those in this
    module it is known.

    Args:
        criterion: A key of `CRITERIA`, such as "magnitude", or a function f(model, data) -> scores.
        model: A plain model.
        data: Labelled examples, such as `split.train`; None where the criterion reads none.
        loss: (outputs, labels) -> the mean loss of a batch; see `pp.fit` for other batches.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments.
        seed: What "random" follows from.
        prunable: Which weights are scored; by default all tensors of two or more dimensions.

    Returns:
        Scores by parameter name, larger = keep.

    Raises:
        ValueError: If the criterion is unknown, or a function's scores do not fit the weights.

    Example:
        >>> def by_column(model, data):  # what a large input multiplies is kept
        ...     size = data.x.flatten(1).abs().mean(0)
        ...     return {"1.weight": model[1].weight.detach().abs() * size, "3.weight": model[3].weight.detach().abs()}
        >>> scores = pp.scores.score(by_column, model, split.train)
        >>> list(scores) == list(pp.scores.score("snip", model, split.train))
        True
    """
    check(criterion, model)
    options = {"loss": loss, "forward": forward, "seed": seed, "prunable": prunable}
    function = CRITERIA[criterion] if isinstance(criterion, str) else criterion
    scores = _called(function, model, data, options)
    if declaration(function) is not None:
        return dict(scores)
    _check_scores(getattr(function, "__name__", repr(function)), scores, prunable(model))
    weights.mark_seen(model, trace.foreign() if data is None else use_of(data))
    return {name: scores[name].detach() for name in prunable(model)}


def check(criterion: str | Criterion, model: nn.Module) -> None:
    """Refuses a criterion that does not exist, or that this model cannot be scored by."""
    if callable(criterion):
        return
    check_name("criterion", criterion, CRITERIA, alternative="a function f(model, data)")
    declared = declaration(CRITERIA[criterion])
    if declared is not None and declared.needs_whole_weights and across_model(model) is not None:
        refuse_sharded(model.parameters(), "criterion", criterion)


def check_weights(criterion: str | Criterion, model: nn.Module, prunable: weights.Prunable) -> None:
    """Refuses weights that this criterion cannot score, before anything is trained."""
    declared = declaration(CRITERIA[criterion] if isinstance(criterion, str) else criterion)
    if declared is not None and declared.needs_inputs:
        calibration.layers_for(model, prunable(model))


def _called(
    function: Criterion, model: nn.Module, data: Data | None, options: Mapping[str, object]
) -> Mapping[str, Tensor]:
    """The function of (model, data), with those options that it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(model, data, **{name: o for name, o in options.items() if takes_all or name in parameters})


def _check_scores(name: str, scores: Mapping[str, Tensor], chosen: Mapping[str, Tensor]) -> None:
    """Refuses what a user's criterion returns unless it is one number per chosen weight."""
    if not isinstance(scores, Mapping) or set(scores) != set(chosen):
        returned = ", ".join(map(str, scores)) if isinstance(scores, Mapping) else type(scores).__name__
        raise ValueError(
            f"the criterion {name} returned {returned or 'nothing'}, but the prunable weights are {', '.join(chosen)}; "
            "return a dictionary with one tensor for each"
        )
    for key, weight in chosen.items():
        if not isinstance(scores[key], Tensor) or scores[key].shape != weight.shape:
            shape = tuple(scores[key].shape) if isinstance(scores[key], Tensor) else type(scores[key]).__name__
            raise ValueError(
                f"the criterion {name} scores {key} by {shape}, but its weights have shape {tuple(weight.shape)}; "
                "return one number per weight"
            )
        bad = count(torch.isnan(scores[key]))
        if bad:
            raise Diverged(
                f"the criterion {name} gives {bad} of the {weight.numel()} weights of {key} the score NaN; "
                "give weights without a score -inf"
            )


# --- Gradients


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
    objective: Objective,
    examples: int,
    times: list[Tensor] | None = None,
) -> list[Tensor]:
    """dL/dw of the mean loss over `examples` examples, or, with `times` = v, the product of the Hessian with v.

    The model is called with copies of its parameters and buffers, in the mode it is in: nothing of it changes. Dropout
    and a shuffling DataLoader draw the same numbers in every call.
    """
    seen, sums = 0, [torch.zeros_like(w) for w in chosen.values()]
    state, device = _copies(model), device_of(model)
    leaves = [state[name].requires_grad_() for name in chosen]
    with torch.enable_grad(), isolated_rng(device, data, seed=0):
        for batch in batches(data, 256, device=device, limit=examples):
            with _plain_kernels(model):
                value = objective.with_tensors(model, state, batch)
            if not torch.isfinite(value):
                raise Diverged(f"the loss is {value.item()} on the scoring data; check the inputs and the labels")
            gradient = torch.autograd.grad(value, leaves, create_graph=times is not None, materialize_grads=True)
            if times is not None:
                dot = torch.stack([(g * v).sum() for g, v in zip(gradient, times, strict=True)]).sum()
                gradient = torch.autograd.grad(dot, leaves, materialize_grads=True)
            sums = [s + g.detach() * rows(batch) for s, g in zip(sums, gradient, strict=True)]
            seen += rows(batch)
    return [s / seen for s in sums]


def _shards_gradient(
    model: nn.Module, chosen: Mapping[str, Tensor], data: Data, objective: Objective, examples: int
) -> list[Tensor]:
    """`_gradient` of a sharded model, by its own backward pass: each rank takes its part of every batch."""
    seen, sums = 0, [torch.zeros_like(w) for w in chosen.values()]
    device = device_of(model)
    with torch.enable_grad(), isolated_rng(device, data, seed=0), _gradients_and_buffers_kept(model):
        for batch in batches(data, 256, device=device, limit=examples):
            _add_shards_gradient(sums, model, chosen, batch, objective)
            seen += rows(batch)
    return [s / seen for s in sums]


@contextmanager
def _gradients_and_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts every .grad and every buffer back at the end."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in buffers:
                buffer.copy_(old)
        for p, old in gradients:
            p.grad = old


def _add_shards_gradient(
    sums: list[Tensor], model: nn.Module, chosen: Mapping[str, Tensor], batch: Any, objective: Objective
) -> None:
    """Adds the gradient of the loss, summed over the examples of a batch, to `sums`."""
    size = rows(batch)
    low, high = ranks.part(size)
    if high - low < 1 or size < 2 * ranks.world():  # too few to split: all do all of it
        low, high = 0, size
    for p in model.parameters():
        p.grad = None
    value = objective(model, taken(batch, torch.arange(low, high, device=device_of(model)))) * (high - low)
    bad = ranks.sum_((~torch.isfinite(value.detach())).long())
    if bad:
        raise Diverged(f"the loss is {value.item()} on the scoring data; check the inputs and the labels")
    value.backward()
    # fully_shard takes the mean over ranks; of parts, the sum is meant.
    times = 1 if high - low == size else ranks.world()
    for total, w in zip(sums, chosen.values(), strict=True):
        if w.grad is not None:
            total += w.grad * times
