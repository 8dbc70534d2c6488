"""Linearised networks against autograd, enumeration of all masks, and ridge regression on the gradients themselves."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.theory import linear, linearised

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


class _Last(nn.Module):
    """A sequence model and a head on its last state."""

    def __init__(self, body: nn.Module, size: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


class _Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)).mean(1))


def _convolution() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(2 * 9, 3)
    )
    model(torch.randn(20, 1, 5, 5))  # BatchNorm statistics other than its first ones
    return model


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (pp.models.mlp(6, 3, hidden=(5, 4), seed=1), torch.randn(7, 6)),
    "convolution": lambda: (_convolution(), torch.randn(7, 1, 5, 5)),
    "transformer": lambda: (_Last(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 4), torch.randn(7, 3, 4)),
    "lstm": lambda: (_Last(nn.LSTM(3, 4, batch_first=True), 4), torch.randn(7, 5, 3)),
    "tied": lambda: (_Tied(), torch.randint(0, 6, (7, 4))),
}


def example(name: str = "mlp") -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and targets for all outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = MODELS[name]()
        return model, x, torch.randn(len(x), plainly(model, x).shape[1], dtype=torch.float64)


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    """The outputs of an ordinary forward pass in float64 and eval mode."""
    twin = copy.deepcopy(model).double().eval()
    return twin(x.double() if x.is_floating_point() else x)


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """(n, C, D): one backward pass for every output of every example."""
    twin = copy.deepcopy(model).double().eval()
    out = twin(x.double() if x.is_floating_point() else x)
    parameters = list(pp.prunable(twin).values())
    rows = [torch.autograd.grad(value, parameters, retain_graph=True) for value in out.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]).reshape(*out.shape, -1)


# --- Features


@pytest.mark.parametrize("name", MODELS)
def test_features_are_gradients_in_the_prunable_weights(name: str):
    model, x, _ = example(name)
    truth = gradients(model, x)
    torch.testing.assert_close(linearised.features(model, x), truth.flatten(0, 1), **TIGHT)
    torch.testing.assert_close(linearised.features(model, x, output=1), truth[:, 1], **TIGHT)


@pytest.mark.parametrize("name", MODELS)
def test_the_linearised_network_is_f_plus_j_times_the_change(name: str):
    model, x, _ = example(name)
    w = pp.prunable(model)
    torch.testing.assert_close(linearised.linearised(model, w, x), plainly(model, x).detach(), **TIGHT)
    half = {n: 0.5 * v for n, v in w.items()}
    change = gradients(model, x) @ (linearised.flat(half) - linearised.flat(w)).double()
    torch.testing.assert_close(linearised.linearised(model, half, x), plainly(model, x).detach() + change, **TIGHT)


def test_the_linearised_network_agrees_to_first_order():
    model, x, _ = example()
    w = pp.prunable(model)
    errors = []
    for step in (1e-3, 1e-4):
        moved = copy.deepcopy(model).double()
        with torch.no_grad():
            for value in pp.prunable(moved).values():
                value.mul_(1 - step)
        shrunk = {n: v.double() * (1 - step) for n, v in w.items()}
        errors.append((linearised.linearised(model, shrunk, x) - plainly(moved, x)).abs().max())
    assert errors[1] < errors[0] / 50


def test_linearising_a_linear_network_is_exact_under_every_mask():
    layer, x = nn.Linear(4, 2), torch.randn(5, 4)
    mask = {"weight": torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]]).bool()}
    pruned = pp.apply_mask(copy.deepcopy(layer), mask)
    torch.testing.assert_close(
        linearised.linearised(layer, {"weight": mask["weight"] * layer.weight}, x), plainly(pruned, x).detach(), **TIGHT
    )


def test_flat_and_unflat_are_inverse():
    model, _, _ = example("convolution")
    w = pp.prunable(model)
    again = linearised.unflat(linearised.flat(w), w)
    assert list(again) == list(w)
    assert all(torch.equal(again[n], w[n]) for n in w)


def test_parameters_that_are_not_prunable_stay_at_their_values():
    model, x, y = example()
    head = lambda m: {n: w for n, w in pp.prunable(m).items() if n == "layers.4.weight"}  # noqa: E731
    psi = linearised.features(model, x, prunable=head)
    torch.testing.assert_close(psi, gradients(model, x).flatten(0, 1)[:, -12:], **TIGHT)
    w = linearised.flat(head(model)).double()
    p = linearised.problem(model, x, y, prunable=head)
    # The last layer is linear in its weights, so that the linearisation is exact when it is pruned.
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        pruned.get_parameter("layers.4.weight").mul_(torch.arange(12).reshape(3, 4) % 2)
    risk = (plainly(pruned, x) - y).square().mean() / 2
    torch.testing.assert_close(linear.risk(p, w * (torch.arange(12) % 2)), risk.detach(), **TIGHT)


def test_the_model_is_not_changed():
    model, x, y = example("convolution")
    model[1].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    linearised.problem(model, x, y), linearised.kernel(model, x), linearised.linearised(model, {}, x)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mkldnn.enabled


# --- The problem


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("output", [None, 1])
def test_the_covariance_operator_equals_the_matrix(name: str, output: int | None):
    model, x, y = example(name)
    y = y if output is None else y[:, output]
    free = linearised.problem(model, x, y, output=output)
    full = linear.problem(linearised.features(model, x, output=output), linearised.targets(model, x, y, output=output))
    w = linearised.flat(pp.prunable(model)).double()
    lam = torch.rand(3, len(w), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for call in (linear.gibbs_risk, linear.keep_prob_gradient, linear.weight_gradient, linear.variance_penalty):
        torch.testing.assert_close(call(free, w, lam), call(full, w, lam), **TIGHT)
    paths = [
        linear.flow(lambda at, p=p: linear.keep_prob_gradient(p, w, at), lam, lr=0.1, steps=5, sparsity=0.5)
        for p in (free, full)
    ]
    torch.testing.assert_close(*paths, **TIGHT)


@pytest.mark.parametrize("output", [None, 2])
def test_the_covariance_operator_is_differentiable(output: int | None):
    model, x, y = example()
    p = linearised.problem(model, x, y if output is None else y[:, output], output=output)
    w = linearised.flat(pp.prunable(model)).double().requires_grad_()
    lam = torch.full((62,), 0.3).double().requires_grad_()
    d_w, d_lam = torch.autograd.grad(linear.gibbs_risk(p, w, lam), (w, lam))
    torch.testing.assert_close(d_w, linear.weight_gradient(p, w, lam).detach(), **TIGHT)
    torch.testing.assert_close(d_lam, linear.keep_prob_gradient(p, w, lam).detach(), **TIGHT)


def test_the_gibbs_risk_is_the_mean_over_all_masks_of_the_linearised_network():
    model, x = pp.models.mlp(2, 2, hidden=(3,), seed=3), torch.randn(5, 2)
    w, y = pp.prunable(model), torch.randn(5, 2).double()
    lam = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.tensor(0.0).double()
    for bits in product((0.0, 1.0), repeat=12):
        b = torch.tensor(bits).double()
        out = linearised.linearised(model, linearised.unflat(b * linearised.flat(w), w), x)
        total += torch.where(b > 0, lam, 1 - lam).prod() * (out - y).square().mean() / 2
    p = linearised.problem(model, x, y)
    torch.testing.assert_close(linear.gibbs_risk(p, linearised.flat(w), lam), total, **TIGHT)


@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_float64(name: str):
    model, x, y = example(name)
    assert linearised.features(model, x, dtype=torch.float32).dtype == torch.float32
    assert linearised.kernel(model, x, dtype=torch.float32).dtype == torch.float32
    w = linearised.flat(pp.prunable(model))
    problems = [linearised.problem(model, x, y, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    slopes = [linear.keep_prob_gradient(p, w, torch.full_like(w, 0.5)) for p in problems]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


# --- The kernel


@pytest.mark.parametrize("output", [None, 0])
@pytest.mark.parametrize("block", [1, 400, 2**25])
def test_the_kernel_is_that_of_the_features_in_blocks_of_any_size(
    block: int, output: int | None, monkeypatch: pytest.MonkeyPatch
):
    model, x, _ = example()
    psi = linearised.features(model, x, output=output)
    monkeypatch.setattr(linearised, "BLOCK", block)
    torch.testing.assert_close(linearised.features(model, x, output=output), psi, **TIGHT)
    torch.testing.assert_close(linearised.kernel(model, x, output=output), psi @ psi.T, **TIGHT)
    part = psi[: len(psi) // 7 * 3]
    torch.testing.assert_close(linearised.kernel(model, x, x[:3], output=output), psi @ part.T, **TIGHT)
    torch.testing.assert_close(linearised.kernel(model, x[:3], x, output=output), part @ psi.T, **TIGHT)


@pytest.mark.parametrize("output", [None, 2])
@pytest.mark.parametrize("ridge", [0.0, 0.3, 100.0])
def test_kernel_regression_is_ridge_regression_around_the_start(ridge: float, output: int | None):
    model, x, y = example()
    inputs, y = torch.randn(4, 6), y if output is None else y[:, output]
    psi, new_psi = (linearised.features(model, part, output=output) for part in (x, inputs))
    outputs, new_outputs = (plainly(model, part).detach() for part in (x, inputs))
    outputs, new_outputs = (out if output is None else out[:, output] for out in (outputs, new_outputs))
    if ridge:
        system = psi.T @ psi + ridge * torch.eye(psi.shape[1]).double()
        step = torch.linalg.solve(system, psi.T @ (y - outputs).reshape(-1))
    else:
        step = torch.linalg.pinv(psi, rtol=1e-6) @ (y - outputs).reshape(-1)
    predictions = linearised.kernel_regression(model, x, y, inputs, ridge=ridge, output=output)
    torch.testing.assert_close(
        predictions, new_outputs + (new_psi @ step).reshape(new_outputs.shape), rtol=1e-6, atol=1e-8
    )
    # The same predictions from the linearised network with its weights moved there, all outputs at once.
    w = pp.prunable(model)
    expected = linearised.linearised(model, linearised.unflat(linearised.flat(w).double() + step, w), inputs)
    torch.testing.assert_close(predictions, expected if output is None else expected[:, output], rtol=1e-6, atol=1e-8)


def test_without_ridge_a_wide_network_fits_the_training_examples():
    model, x = pp.models.mlp(6, 3, hidden=(60,), seed=0), torch.randn(7, 6)
    y = torch.randn(7, 3).double()
    torch.testing.assert_close(linearised.kernel_regression(model, x, y, x), y, rtol=1e-6, atol=1e-6)


# --- Training for a finite time

TIMES = [0.0, 0.3, 2.0, 40.0]


@pytest.mark.parametrize("output", [None, 2])
def test_gradient_flow_is_the_flow_of_the_linearised_weights(output: int | None):
    model, x, y = example()
    y = y if output is None else y[:, output]
    inputs, psi = torch.randn(4, 6), linearised.features(model, x, output=output)
    residuals = linearised.targets(model, x, y, output=output) - psi @ linearised.flat(pp.prunable(model)).double()
    covariance, pull = psi.T @ psi / len(psi), psi.T @ residuals / len(psi)
    path = linearised.gradient_flow(model, x, y, inputs, times=TIMES, output=output)
    for t, outputs in zip(TIMES, path, strict=True):
        # dw/dt = pull - covariance (w - w0), solved in the space of weights: one exponential of (w - w0, 1).
        generator = torch.zeros(psi.shape[1] + 1, psi.shape[1] + 1).double()
        generator[:-1, :-1], generator[:-1, -1] = -covariance, pull
        step = torch.linalg.matrix_exp(t * generator)[:-1, -1]
        values = linearised.unflat(linearised.flat(pp.prunable(model)).double() + step, pp.prunable(model))
        expected = linearised.linearised(model, values, inputs)
        torch.testing.assert_close(outputs, expected if output is None else expected[:, output], **TIGHT)


def test_gradient_flow_goes_from_the_start_to_kernel_regression():
    model, x, y = example()
    inputs = torch.randn(4, 6)
    path = linearised.gradient_flow(model, x, y, inputs, times=[0.0, 1e12, float("inf")])
    torch.testing.assert_close(path[0], plainly(model, inputs).detach(), **TIGHT)
    torch.testing.assert_close(path[2], linearised.kernel_regression(model, x, y, inputs), **TIGHT)
    torch.testing.assert_close(path[1], path[2], rtol=1e-6, atol=1e-6)
    assert linearised.gradient_flow(model, x, y, inputs, times=[]).shape == (0, 4, 3)


def _descent(width: int, *, steps: int, every: int) -> tuple[Tensor, Tensor]:
    """Outputs on new inputs of a trained network of this width, and what gradient_flow says, at several times."""
    g = torch.Generator().manual_seed(0)
    x, inputs = torch.randn(12, 4, generator=g).double(), torch.randn(20, 4, generator=g).double()
    y = torch.sin(2 * x[:, :1])
    model = pp.models.mlp(4, 1, hidden=(width,), seed=0).double()
    gram = linearised.kernel(model, x)
    lr = 0.02 * len(x) / float(torch.linalg.eigvalsh(gram)[-1])  # a small part of the largest stable step
    times = [lr * step for step in range(every, steps + 1, every)]
    foretold = linearised.gradient_flow(model, x, y, inputs, times=times)
    trained, path = list(pp.prunable(model).values()), []
    for step in range(1, steps + 1):
        gradients = torch.autograd.grad((model(x) - y).square().mean() / 2, trained)
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                weight -= lr * gradient
            if step % every == 0:
                path.append(model(inputs))
    return torch.stack(path), foretold


def test_a_wide_network_under_gradient_descent_follows_gradient_flow_at_every_time():
    (narrow, narrow_foretold), (wide, wide_foretold) = (_descent(width, steps=800, every=200) for width in (16, 2048))
    assert bool(((wide_foretold[1:] - wide_foretold[:-1]).square().mean((1, 2)).sqrt() > 0.01).all())  # it moves on
    off = (wide - wide_foretold).square().mean((1, 2)).sqrt()
    assert bool((off < 0.002).all())  # most of it from steps that are not infinitely small
    assert bool(((narrow - narrow_foretold).square().mean((1, 2)).sqrt() > 20 * off).all())


# --- Refusals


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


M, X, Y = example()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linearised.features(M, X, output=3), "output is 3, but the model has 3 outputs"),
        (lambda: linearised.features(M, X, output=-1), "output is -1"),
        (lambda: linearised.features(_Pair(), X), "returns tuple for"),
        (lambda: linearised.problem(M, X, Y[:, 0]), r"y has shape \(7,\), but there are outputs of shape \(7, 3\)"),
        (lambda: linearised.problem(M, X, Y, output=0), r"y has shape \(7, 3\), but there are outputs of shape \(7,\)"),
        (lambda: linearised.linearised(M, {"w": torch.ones(2)}, X), r"w with shape \(2,\) is no weight"),
        (lambda: linearised.unflat(torch.ones(3), pp.prunable(M)), r"shape \(3,\), but there are 62"),
        (lambda: linearised.kernel_regression(M, X, Y, X, ridge=-1.0), "ridge is -1.0"),
        (lambda: linearised.gradient_flow(M, X, Y, X, times=[1.0, -2.0]), "a time is -2.0"),
        (lambda: linearised.features(nn.ReLU(), X), "nothing to prune"),
        (lambda: linearised.features(M, X[:0]), r"x has shape \(0, 6\), so there are no examples"),
        (lambda: linearised.problem(M, X, Y / 0), "21 targets and 0 outputs are not finite"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], words: str):
    with pytest.raises(ValueError, match=words):
        call()
