"""Networks as linear models: f(x; w0) + J(x)(w - w0), with one feature per prunable weight.

The features psi(x) = df(x; w0)/dw are gradients with respect to the weights, so that a mask on weights is a mask on
features and pacprune.linear applies; what the network computes at w0 moves into the targets. `output` is the index of
one output, or None for all: every output of every example is then a row of its own, (example, output) in that order, so
that the squared loss is the mean over examples and outputs and one mask serves all outputs. Parameters that are not
prunable (biases, norms) stay at their values; the network is evaluated in eval mode and never changed.

    from pacprune import linear, wide
    p = wide.problem(model, x, y)
    linear.gibbs_risk(p, wide.flat(pp.prunable(model)), keep_prob)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacprune.masking import weights
from pacprune.masking.criteria import plain_rnn
from pacprune.theory import linear

BLOCK = 2**25
"""Gradients are held in blocks of at most so many numbers: 256 MiB in float64."""

Values = Mapping[str, Tensor]


class _Network(NamedTuple):
    """The weights w0, the outputs (n, C) as a function of weights and inputs, and whether there is an RNN in it."""

    start: dict[str, Tensor]
    apply: Callable[[Values, Tensor], Tensor]
    recurrent: bool


class _Jacobian(NamedTuple):
    """f(x; w0) of shape (n, C), and two linear maps: a change of the weights -> J(x) change, and its transpose."""

    now: Tensor
    times: Callable[[Values], Tensor]
    transposed: Callable[[Tensor], dict[str, Tensor]]


def flat(values: Values) -> Tensor:
    """The weights (or keep probabilities, or a mask) of all tensors as one vector (D,), ordered as the features."""
    return torch.cat([value.detach().reshape(-1) for value in values.values()])


def unflat(vector: Tensor, like: Values) -> dict[str, Tensor]:
    """The inverse of `flat`: the names and shapes of `like`, the numbers of `vector`."""
    size = sum(value.numel() for value in like.values())
    if vector.shape != (size,):
        raise ValueError(f"the vector has shape {tuple(vector.shape)}, but there are {size} weights; give ({size},)")
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


# --- The linear model


def linearised(model: nn.Module, values: Values, x: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """f(x; w0) + J(x)(w - w0) for the weights w = `values` (all outputs), without J itself."""
    net = _network(model, weights.prunable, dtype)
    for name, value in values.items():
        if name not in net.start or value.shape != net.start[name].shape:
            known = ", ".join(f"{n} {tuple(w.shape)}" for n, w in net.start.items())
            raise ValueError(f"{name} with shape {tuple(value.shape)} is no weight of the model, which has {known}")
    step = {n: values[n].detach().to(w) - w if n in values else torch.zeros_like(w) for n, w in net.start.items()}
    jacobian = _jacobian(net, x)
    return jacobian.now + jacobian.times(step)


def features(
    model: nn.Module,
    x: Tensor,
    *,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """psi = df/dw at w0, one row per example (per example and output for output=None): (rows, D).

    All rows at once; `problem` and `kernel` need no such matrix.
    """
    net = _network(model, prunable, dtype)
    return torch.cat([_rows(net, part, output) for part in _blocks(net, x, output)])


def targets(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """y - f(x; w0) + psi(x)'w0, one number per row: what psi'w has to meet for the linearised network to meet y.

    y has shape (n,) with an `output`, (n, C) without.
    """
    net = _network(model, prunable, dtype)
    jacobian = _jacobian(net, x)
    return (_wanted(jacobian.now, y, output) + _column(jacobian.times(net.start), output)).reshape(-1)


def problem(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> linear.Problem:
    """The linear problem of `features` and `targets`, for any D: its covariance is an operator, never a D x D matrix.

    Risks, their gradients and linear.flow take it as it is; what needs the matrix itself (least_squares, best_mask)
    takes linear.problem(features(...), targets(...)).
    """
    net = _network(model, prunable, dtype)
    wanted = targets(model, x, y, output=output, prunable=prunable, dtype=dtype)
    covariance = _Covariance(net, x, output)
    # The operator has the two abilities of a matrix that risks and gradients use.
    return linear.Problem(
        covariance=cast(Tensor, covariance),
        alignment=covariance.pull(wanted).double() / len(wanted),
        power=wanted.double().square().mean(),
    )


class _Covariance:
    """Sigma = mean of psi psi': products with J and its transpose, one after the other, and the diagonal."""

    def __init__(self, net: _Network, x: Tensor, output: int | None) -> None:
        self.start, self.output, self.jacobian = net.start, output, _jacobian(net, x)
        self.rows = _column(self.jacobian.now, output).numel()
        squares = sum(_rows(net, part, output).square().sum(0) for part in _blocks(net, x, output))
        self.squares = cast(Tensor, squares).double() / self.rows

    def pull(self, rows: Tensor) -> Tensor:
        """psi' r for one number r per row."""
        now = self.jacobian.now
        if self.output is None:
            full = rows.reshape(now.shape)
        else:
            full = torch.zeros_like(now).index_copy(1, torch.tensor([self.output], device=now.device), rows[:, None])
        # Not `flat`, which would cut the graph.
        return torch.cat([part.reshape(-1) for part in self.jacobian.transposed(full).values()])

    def _times(self, vector: Tensor) -> Tensor:
        change = self.jacobian.times(unflat(vector.to(self.jacobian.now), self.start))
        return self.pull(_column(change, self.output)).double() / self.rows

    def __matmul__(self, columns: Tensor) -> Tensor:
        vectors = columns[..., 0]
        return torch.stack([self._times(v) for v in vectors.reshape(-1, vectors.shape[-1])]).reshape(columns.shape)

    def diagonal(self, *, dim1: int, dim2: int) -> Tensor:
        """Sigma_ii."""
        return self.squares


# --- The kernel


def kernel(
    model: nn.Module,
    x: Tensor,
    other: Tensor | None = None,
    *,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The empirical neural tangent kernel psi(x)'psi(x'), one entry per pair of rows; without `other`, of x itself.

    In blocks: of each side no more than BLOCK gradients are held at a time, and those of `other` are computed again for
    every block of x (Jacot et al. 2018, with gradients in the prunable weights alone).
    """
    net = _network(model, prunable, dtype)
    parts, others = _blocks(net, x, output), None if other is None else _blocks(net, other, output)
    strips = []
    for i, part in enumerate(parts):
        psi = _rows(net, part, output)
        seen = parts[:i] if others is None else others
        blocks = [psi @ _rows(net, them, output).mT for them in seen]
        strips.append(torch.cat([*blocks, psi @ psi.mT] if others is None else blocks, dim=1))
    if others is not None:
        return torch.cat(strips)
    full = torch.zeros(strips[-1].shape[1], strips[-1].shape[1], dtype=dtype, device=strips[-1].device)
    start = 0
    for strip in strips:  # the part below the diagonal, and its mirror image
        end = start + len(strip)
        full[start:end, :end], full[:end, start:end] = strip, strip.mT
        start = end
    return full


def kernel_regression(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    inputs: Tensor,
    *,
    ridge: float = 0.0,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """f(x'; w0) + K(x', x) (K(x, x) + ridge I)^-1 (y - f(x; w0)) for x' = `inputs`, in the shape of y.

    The linearised network at the minimiser of sum (output - y)^2 + ridge |w - w0|^2; ridge = 0 takes the
    pseudo-inverse: training to the end, of all minimisers the one nearest to w0.
    """
    if not ridge >= 0:
        raise ValueError(f"ridge is {ridge}, but it multiplies a squared norm; give 0 or a positive number")
    net = _network(model, prunable, dtype)
    more = {"output": output, "prunable": prunable, "dtype": dtype}
    gram = kernel(model, x, **more)
    short = _wanted(net.apply(net.start, x), y, output).reshape(-1)
    if ridge:
        gram.diagonal().add_(ridge)
        solved = torch.linalg.solve(gram, short)
    else:
        rtol = linear.RANK if dtype == torch.float64 else None
        solved = torch.linalg.pinv(gram, rtol=rtol, hermitian=True) @ short
    now = _column(net.apply(net.start, inputs), output)
    return now + (kernel(model, inputs, x, **more) @ solved).reshape(now.shape)


# --- Parts


def _network(model: nn.Module, prunable: weights.Prunable, dtype: torch.dtype) -> _Network:
    def value(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    start = {name: value(weight) for name, weight in prunable(model).items()}
    every = (*model.named_parameters(), *model.named_buffers())
    rest = {name: value(tensor) for name, tensor in every if name not in start}

    def apply(theta: Values, x: Tensor) -> Tensor:
        with _derivable(model):
            out = functional_call(model, {**rest, **theta}, (value(x),))
        if not isinstance(out, Tensor) or out.ndim not in (1, 2) or len(out) != len(x):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"the model returns {got} for {len(x)} examples; wrap it so that it returns (n, outputs)")
        return out.reshape(len(x), -1)

    return _Network(start, apply, _recurrent(model))


@contextmanager
def _derivable(model: nn.Module) -> Iterator[None]:
    """Eval mode, with attention and RNNs by plain matrix products: fused kernels lack second derivatives."""
    fused, blocked = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    if _recurrent(model):
        torch.backends.mkldnn.enabled = False
    try:
        with weights.modes_kept(model), plain_rnn(model), sdpa_kernel(SDPBackend.MATH):
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.backends.mkldnn.enabled = blocked


def _recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _jacobian(net: _Network, x: Tensor) -> _Jacobian:
    """J as the derivative of its own transpose r -> J'r, which is linear: reverse mode twice, as every layer allows."""
    now, pull = vjp(lambda theta: net.apply(theta, x), net.start)[:2]
    _, push = vjp(lambda rows: pull(rows)[0], torch.zeros_like(now))[:2]
    return _Jacobian(now.detach(), lambda direction: push(direction)[0], lambda rows: pull(rows)[0])


def _column(outputs: Tensor, output: int | None) -> Tensor:
    """One output (n,), or all of them (n, C)."""
    if output is None:
        return outputs
    if not 0 <= output < outputs.shape[1]:
        raise ValueError(f"output is {output}, but the model has {outputs.shape[1]} outputs; count from 0")
    return outputs[:, output]


def _wanted(now: Tensor, y: Tensor, output: int | None) -> Tensor:
    """y - f(x; w0), once y has the shape of the outputs asked for."""
    now = _column(now, output).detach()
    if y.shape != now.shape:
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but there are outputs of shape {tuple(now.shape)} to compare it with; "
            "give one number for each, for classes one-hot"
        )
    short = y.to(now) - now
    if not bool(short.isfinite().all()):
        bad = int((~y.isfinite()).sum()), int((~now.isfinite()).sum())
        raise ValueError(f"{bad[0]} targets and {bad[1]} outputs are not finite; remove those examples")
    return short


def _blocks(net: _Network, x: Tensor, output: int | None) -> tuple[Tensor, ...]:
    """x in parts whose gradients fit into BLOCK."""
    if not len(x):
        raise ValueError(f"x has shape {tuple(x.shape)}, so there are no examples; give at least 1")
    outputs = _column(net.apply(net.start, x[:1]), output).numel()
    return x.split(max(1, BLOCK // (outputs * sum(weight.numel() for weight in net.start.values()))))


def _rows(net: _Network, x: Tensor, output: int | None) -> Tensor:
    """psi for every row of these examples: (rows, D)."""

    def one(theta: Values, example: Tensor) -> Tensor:
        return _column(net.apply(theta, example[None]), output)[0].reshape(-1)

    if net.recurrent:  # which vmap cannot run
        each = [jacrev(one)(net.start, example) for example in x]
        found = {name: torch.stack([jacobian[name] for jacobian in each]) for name in net.start}
    else:
        found = vmap(jacrev(one), (None, 0))(net.start, x)
    return torch.cat([found[name].flatten(2) for name in net.start], dim=2).flatten(0, 1)
