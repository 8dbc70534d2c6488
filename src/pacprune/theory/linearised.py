"""Networks as linear models: f(x; w0) + J(x)(w - w0), with one feature per prunable weight. Public as `pp.wide`.

The features psi(x) = df(x; w0)/dw are gradients with respect to the weights, so that a mask on weights is a mask on
features and `pp.linear` applies. The outputs of the network at w0 move into the targets.

`output` is the index of one output, or None for all. With None every output of every example is a row of its own,
(example, output) in that order. The squared loss is then the mean over examples and outputs, and one mask serves all
outputs.

Parameters that are not prunable (biases, norms) stay at their values. The network is evaluated in eval mode and never
changed.

    p = pp.wide.problem(model, x, y)
    pp.linear.gibbs_risk(p, pp.wide.flat(pp.prunable(model)), keep_prob)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacprune.masking import weights
from pacprune.masking.criteria import plain_rnn
from pacprune.theory import linear

__all__ = [
    "BLOCK",
    "features",
    "flat",
    "gradient_flow",
    "kernel",
    "kernel_regression",
    "linearised",
    "problem",
    "targets",
    "unflat",
]

BLOCK = 2**25
"""The most numbers in a block of gradients: 256 MiB in float64."""

Values = Mapping[str, Tensor]


class _Network(NamedTuple):
    """The weights w0, the outputs (n, C) as a function of weights and inputs, and whether the model has an RNN."""

    start: dict[str, Tensor]
    apply: Callable[[Values, Tensor], Tensor]
    recurrent: bool


class _Jacobian(NamedTuple):
    """f(x; w0) of shape (n, C), and two linear maps: a change of the weights -> J(x) change, and its transpose."""

    start_outputs: Tensor
    times: Callable[[Values], Tensor]
    transposed: Callable[[Tensor], dict[str, Tensor]]


def flat(values: Values) -> Tensor:
    """The weights (or keep probabilities, or a mask) of all tensors as one vector, ordered as the features.

    Args:
        values: Tensors by parameter name.

    Returns:
        A vector of shape (D,), detached.

    Example:
        >>> pp.wide.flat(pp.prunable(model)).shape
        torch.Size([1184])
    """
    return torch.cat([value.detach().reshape(-1) for value in values.values()])


def unflat(vector: Tensor, like: Values) -> dict[str, Tensor]:
    """The inverse of `flat`: the names and shapes of `like`, the numbers of `vector`.

    Args:
        vector: One number per weight, of shape (D,).
        like: Tensors by parameter name, such as `pp.prunable(model)`.

    Returns:
        The parts of `vector` by parameter name.

    Raises:
        ValueError: If the vector has another length.

    Example:
        >>> keep_prob = pp.wide.unflat(torch.full((1184,), 0.5), pp.prunable(model))
        >>> {name: tuple(p.shape) for name, p in keep_prob.items()}
        {'1.weight': (16, 64), '3.weight': (10, 16)}
    """
    size = sum(value.numel() for value in like.values())
    if vector.shape != (size,):
        raise ValueError(f"the vector has shape {tuple(vector.shape)}, but there are {size} weights; give ({size},)")
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


# --- The linear model


def linearised(model: nn.Module, values: Values, x: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """f(x; w0) + J(x)(w - w0) for the weights w = `values`, without J itself.

    Args:
        model: A plain model, at w0.
        values: Weights by parameter name; missing ones stay at w0.
        x: Inputs, one per row.
        dtype: The type of all arithmetic.

    Returns:
        All outputs, of shape (n, C).

    Raises:
        ValueError: If a name or shape is not one of the model's weights.

    Example:
        >>> halved = {name: w / 2 for name, w in pp.prunable(model).items()}
        >>> pp.wide.linearised(model, halved, x[:5]).shape
        torch.Size([5, 10])
    """
    net = _network(model, weights.prunable, dtype)
    for name, value in values.items():
        if name not in net.start or value.shape != net.start[name].shape:
            names = ", ".join(f"{n} {tuple(w.shape)}" for n, w in net.start.items())
            raise ValueError(f"{name} with shape {tuple(value.shape)} is no weight of the model, which has {names}")
    step = {n: values[n].detach().to(w) - w if n in values else torch.zeros_like(w) for n, w in net.start.items()}
    jacobian = _jacobian(net, x)
    return jacobian.start_outputs + jacobian.times(step)


def features(
    model: nn.Module,
    x: Tensor,
    *,
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """psi = df/dw at w0, one row per example (per example and output for output=None).

    All rows at once; `problem` and `kernel` need no such matrix.

    Args:
        model: A plain model, at w0.
        x: Inputs, one per row.
        output: The index of one output, or None for all.
        prunable: Which weights have features; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        A matrix of shape (rows, D).

    Example:
        >>> pp.wide.features(model, x[:5], output=3).shape
        torch.Size([5, 1184])
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
    """y - f(x; w0) + psi(x)'w0, one number per row: if psi'w equals it, the linearised network equals y.

    Args:
        model: A plain model, at w0.
        x: Inputs, one per row.
        y: Numbers of shape (n,) with an `output`, (n, C) without; classes one-hot.
        output: The index of one output, or None for all.
        prunable: Which weights have features; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        A vector of shape (rows,).

    Raises:
        ValueError: If y has another shape, or a number is not finite.

    Example:
        >>> pp.wide.targets(model, x[:5], (y[:5] == 3).double(), output=3).shape
        torch.Size([5])
    """
    net = _network(model, prunable, dtype)
    jacobian = _jacobian(net, x)
    return (_residuals(jacobian.start_outputs, y, output) + _column(jacobian.times(net.start), output)).reshape(-1)


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

    Risks, their gradients and linear.flow take it as it is. Functions that need the matrix itself (least_squares,
    best_mask) take linear.problem(features(...), targets(...)).

    Args:
        model: A plain model, at w0.
        x: Inputs, one per row.
        y: Numbers of shape (n,) with an `output`, (n, C) without; classes one-hot.
        output: The index of one output, or None for all.
        prunable: Which weights have features; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        The problem, for the functions of `pp.linear`.

    Example:
        >>> p = pp.wide.problem(model, x[:20], (y[:20] == 3).double(), output=3)
        >>> w = pp.wide.flat(pp.prunable(model))
        >>> bool(pp.linear.gibbs_risk(p, w, torch.full_like(w, 0.5)) > 0)
        True
    """
    net = _network(model, prunable, dtype)
    row_targets = targets(model, x, y, output=output, prunable=prunable, dtype=dtype)
    covariance = _Covariance(net, x, output)
    # The operator has the two abilities of a matrix that risks and gradients use.
    return linear.Problem(
        covariance=cast(Tensor, covariance),
        alignment=covariance.pull(row_targets).double() / len(row_targets),
        power=row_targets.double().square().mean(),
    )


class _Covariance:
    """Sigma = mean of psi psi': products with J and its transpose, one after the other, and the diagonal."""

    def __init__(self, net: _Network, x: Tensor, output: int | None) -> None:
        self.start, self.output, self.jacobian = net.start, output, _jacobian(net, x)
        self.rows = _column(self.jacobian.start_outputs, output).numel()
        squares = sum(_rows(net, part, output).square().sum(0) for part in _blocks(net, x, output))
        self.squares = cast(Tensor, squares).double() / self.rows

    def pull(self, rows: Tensor) -> Tensor:
        """psi' r for one number r per row."""
        outputs = self.jacobian.start_outputs
        if self.output is None:
            full = rows.reshape(outputs.shape)
        else:
            column = torch.tensor([self.output], device=outputs.device)
            full = torch.zeros_like(outputs).index_copy(1, column, rows[:, None])
        # Not `flat`, which would cut the graph.
        return torch.cat([part.reshape(-1) for part in self.jacobian.transposed(full).values()])

    def _times(self, vector: Tensor) -> Tensor:
        change = self.jacobian.times(unflat(vector.to(self.jacobian.start_outputs), self.start))
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
    """The empirical neural tangent kernel psi(x)'psi(x'), one entry per pair of rows (Jacot et al. 2018).

    Gradients are those in the prunable weights alone. They are computed in blocks of at most BLOCK numbers per side;
    those of `other` are computed again for every block of x.

    Args:
        model: A plain model, at w0.
        x: Inputs, one per row.
        other: Other inputs x', or None for x itself.
        output: The index of one output, or None for all.
        prunable: Which weights have features; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        A matrix of shape (rows of x, rows of x').

    Example:
        >>> gram = pp.wide.kernel(model, x[:5], output=3)
        >>> gram.shape, torch.allclose(gram, gram.T)
        (torch.Size([5, 5]), True)
    """
    net = _network(model, prunable, dtype)
    blocks = _blocks(net, x, output)
    if other is None:
        return _symmetric_kernel(net, blocks, output)
    other_blocks = _blocks(net, other, output)
    strips = []
    for block in blocks:
        psi = _rows(net, block, output)
        strips.append(torch.cat([psi @ _rows(net, b, output).mT for b in other_blocks], dim=1))
    return torch.cat(strips)


def _symmetric_kernel(net: _Network, blocks: Sequence[Tensor], output: int | None) -> Tensor:
    """The kernel of x with itself: the part below the diagonal, and its mirror image."""
    strips = []
    for i, block in enumerate(blocks):
        psi = _rows(net, block, output)
        strips.append(torch.cat([*(psi @ _rows(net, b, output).mT for b in blocks[:i]), psi @ psi.mT], dim=1))
    size = strips[-1].shape[1]
    full = strips[-1].new_zeros(size, size)
    start = 0
    for strip in strips:
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
    """f(x'; w0) + K(x', x) (K(x, x) + ridge I)^-1 (y - f(x; w0)) for x' = `inputs`.

    The linearised network at the minimiser of sum (output - y)^2 + ridge |w - w0|^2. With ridge = 0 it is the limit of
    training, `gradient_flow` at time infinity: of all minimisers the one nearest to w0.

    Args:
        model: A plain model, at w0.
        x: Training inputs, one per row.
        y: Numbers of shape (n,) with an `output`, (n, C) without; classes one-hot.
        inputs: Where to predict, x'.
        ridge: The price of |w - w0|^2, such as 0.01; at least 0.
        output: The index of one output, or None for all.
        prunable: Which weights have features; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        Predictions of shape (n',) with an `output`, (n', C) without.

    Raises:
        ValueError: If ridge is negative, or y does not fit the outputs.

    Example:
        >>> labels = (y[:20] == 3).double()
        >>> predictions = pp.wide.kernel_regression(model, x[:20], labels, x[:20], ridge=1e-6, output=3)
        >>> bool((predictions - labels).abs().max() < 0.01)
        True
    """
    if not ridge >= 0:
        raise ValueError(f"ridge is {ridge}, but it multiplies a squared norm; give 0 or a positive number")
    if not ridge:
        forever = [math.inf]
        return gradient_flow(model, x, y, inputs, times=forever, output=output, prunable=prunable, dtype=dtype)[0]
    parts = _regression(model, x, y, inputs, output=output, prunable=prunable, dtype=dtype)
    parts.gram.diagonal().add_(ridge)
    change = parts.cross @ torch.linalg.solve(parts.gram, parts.residuals)
    return parts.start_outputs + change.reshape(parts.start_outputs.shape)


def gradient_flow(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    inputs: Tensor,
    *,
    times: Sequence[float],
    output: int | None = None,
    prunable: weights.Prunable = weights.prunable,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """f_t(x') = f(x'; w0) + K(x', x) K^-1 (I - e^(-K t / rows)) (y - f(x; w0)), K = K(x, x), for x' = `inputs`.

    The outputs of the linearised network after gradient flow of the weights for time t, dw/dt = -dR/dw, on half the
    mean squared error R over all rows. Exact for that flow, without ridge. Networks of growing width follow it at
    every t, since their kernel hardly moves (Jacot et al. 2018; Lee et al. 2019, theorem 2.1). t steps of gradient
    descent with a small learning rate lr are time t * lr. Directions in which K is 0 never move.

    Args:
        model: A plain model, at w0.
        x: Training inputs, one per row.
        y: Numbers of shape (n,) with an `output`, (n, C) without; classes one-hot.
        inputs: Where to predict, x'.
        times: The times t, each at least 0; infinity is the end of training.
        output: The index of one output, or None for all.
        prunable: Which weights have features, and are trained; by default all tensors of two or more dimensions.
        dtype: The type of all arithmetic.

    Returns:
        Predictions at every time, of shape (T, n') with an `output`, (T, n', C) without.

    Raises:
        ValueError: If a time is negative, or y does not fit the outputs.

    Example:
        >>> labels = (y[:20] == 3).double()
        >>> path = pp.wide.gradient_flow(model, x[:20], labels, x[:20], times=[0.0, 1.0, float("inf")], output=3)
        >>> [round(float((outputs - labels).square().mean()), 3) for outputs in path]
        [0.829, 0.095, 0.0]
    """
    for t in times:
        if not t >= 0:
            raise ValueError(f"a time is {t}, but training starts at 0; give times of at least 0")
    parts = _regression(model, x, y, inputs, output=output, prunable=prunable, dtype=dtype)
    values, vectors = torch.linalg.eigh(parts.gram)
    rtol = linear.RANK if dtype == torch.float64 else len(values) * torch.finfo(dtype).eps
    positive = values > rtol * values[-1]
    values, vectors = values[positive], vectors[:, positive]
    # In the basis of eigenvectors every coefficient goes its own way: (1 - e^(-value t / rows)) / value.
    exponents = torch.tensor(times, dtype=dtype, device=values.device)[:, None] * values / len(parts.residuals)
    coefficients = -torch.expm1(-exponents) / values * (vectors.mT @ parts.residuals)
    change = coefficients @ (parts.cross @ vectors).mT
    return parts.start_outputs + change.reshape(len(times), *parts.start_outputs.shape)


class _Regression(NamedTuple):
    """K(x, x), K(x', x), y - f(x; w0) by rows, and f(x'; w0)."""

    gram: Tensor
    cross: Tensor
    residuals: Tensor
    start_outputs: Tensor


def _regression(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    inputs: Tensor,
    *,
    output: int | None,
    prunable: weights.Prunable,
    dtype: torch.dtype,
) -> _Regression:
    """What predictions at `inputs` from training on x and y are made of."""
    net = _network(model, prunable, dtype)
    return _Regression(
        gram=kernel(model, x, output=output, prunable=prunable, dtype=dtype),
        cross=kernel(model, inputs, x, output=output, prunable=prunable, dtype=dtype),
        residuals=_residuals(net.apply(net.start, x), y, output).reshape(-1),
        start_outputs=_column(net.apply(net.start, inputs), output),
    )


# --- Parts


def _network(model: nn.Module, prunable: weights.Prunable, dtype: torch.dtype) -> _Network:
    def value(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    start = {name: value(weight) for name, weight in prunable(model).items()}
    tensors = (*model.named_parameters(), *model.named_buffers())
    rest = {name: value(tensor) for name, tensor in tensors if name not in start}

    def apply(theta: Values, x: Tensor) -> Tensor:
        with _derivable(model):
            out = functional_call(model, {**rest, **theta}, (value(x),))
        if not isinstance(out, Tensor) or out.ndim not in (1, 2) or len(out) != len(x):
            returned = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the model returns {returned} for {len(x)} examples; wrap it so that it returns (n, outputs)"
            )
        return out.reshape(len(x), -1)

    return _Network(start, apply, _recurrent(model))


@contextmanager
def _derivable(model: nn.Module) -> Iterator[None]:
    """Eval mode, with attention and RNNs by plain matrix products: fused kernels lack second derivatives."""
    mha_before, mkldnn_before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    if _recurrent(model):
        torch.backends.mkldnn.enabled = False
    try:
        with weights.modes_kept(model), plain_rnn(model), sdpa_kernel(SDPBackend.MATH):
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(mha_before)
        torch.backends.mkldnn.enabled = mkldnn_before


def _recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _jacobian(net: _Network, x: Tensor) -> _Jacobian:
    """J as the derivative of its own transpose r -> J'r, which is linear: reverse mode twice, as every layer allows."""
    outputs, pull = vjp(lambda theta: net.apply(theta, x), net.start)[:2]
    _, push = vjp(lambda rows: pull(rows)[0], torch.zeros_like(outputs))[:2]
    return _Jacobian(outputs.detach(), lambda direction: push(direction)[0], lambda rows: pull(rows)[0])


def _column(outputs: Tensor, output: int | None) -> Tensor:
    """One output (n,), or all of them (n, C)."""
    if output is None:
        return outputs
    if not 0 <= output < outputs.shape[1]:
        raise ValueError(f"output is {output}, but the model has {outputs.shape[1]} outputs; count from 0")
    return outputs[:, output]


def _residuals(outputs: Tensor, y: Tensor, output: int | None) -> Tensor:
    """y - f(x; w0), once y has the shape of the chosen outputs."""
    outputs = _column(outputs, output).detach()
    if y.shape != outputs.shape:
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but there are outputs of shape {tuple(outputs.shape)} to compare it with; "
            "give one number for each, for classes one-hot"
        )
    residuals = y.to(outputs) - outputs
    if not bool(residuals.isfinite().all()):
        bad = int((~y.isfinite()).sum()), int((~outputs.isfinite()).sum())
        raise ValueError(f"{bad[0]} targets and {bad[1]} outputs are not finite; remove those examples")
    return residuals


def _blocks(net: _Network, x: Tensor, output: int | None) -> tuple[Tensor, ...]:
    """x in parts whose gradients fit into BLOCK."""
    if not len(x):
        raise ValueError(f"x has shape {tuple(x.shape)}, so there are no examples; give at least 1")
    outputs = _column(net.apply(net.start, x[:1]), output).numel()
    return x.split(max(1, BLOCK // (outputs * sum(weight.numel() for weight in net.start.values()))))


def _rows(net: _Network, x: Tensor, output: int | None) -> Tensor:
    """psi for every row of these examples: (rows, D)."""

    def outputs_of(theta: Values, example: Tensor) -> Tensor:
        return _column(net.apply(theta, example[None]), output)[0].reshape(-1)

    if net.recurrent:  # vmap cannot run an RNN
        per_example = [jacrev(outputs_of)(net.start, example) for example in x]
        jacobians = {name: torch.stack([jacobian[name] for jacobian in per_example]) for name in net.start}
    else:
        jacobians = vmap(jacrev(outputs_of), (None, 0))(net.start, x)
    return torch.cat([jacobians[name].flatten(2) for name in net.start], dim=2).flatten(0, 1)
