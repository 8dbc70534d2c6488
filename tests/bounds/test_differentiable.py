"""The kl inverse that is trained on: against the rounded one of the bounds, at its ends, and its slopes."""

import itertools
import math

import pytest
import torch

from pacprune import bounds
from pacprune.bounds import differentiable

RISKS = (0.0, 1e-300, 1e-30, 1e-12, 1e-9, 1e-6, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.8, 0.9, 0.99, 1 - 1e-6, 1 - 1e-12, 1.0)
COSTS = (0.0, 1e-300, 1e-30, 1e-16, 1e-12, 1e-8, 1e-5, 1e-3, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1e4, math.inf)


def grid() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = list(itertools.product(RISKS, COSTS))
    q, c = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    return q, c, torch.tensor([bounds.kl_inverse(*pair) for pair in pairs], dtype=torch.float64)


def test_it_is_the_inverse_of_the_bounds_on_a_grid():
    q, c, expected = grid()
    inverse = differentiable.kl_inverse(q, c)
    assert torch.allclose(inverse, expected, rtol=1e-12, atol=1e-299)
    random = torch.Generator().manual_seed(0)
    q = torch.rand(2000, generator=random, dtype=torch.float64) ** 3
    c = torch.exp(torch.empty(2000, dtype=torch.float64).uniform_(-25, 3, generator=random))
    exact = [bounds.kl_inverse(a, b) for a, b in zip(q.tolist(), c.tolist(), strict=True)]
    assert torch.allclose(differentiable.kl_inverse(q, c), torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=0)


def test_five_steps_are_enough_everywhere(monkeypatch):
    q, c, expected = grid()
    monkeypatch.setattr(differentiable, "NEWTON_STEPS", 5)
    assert torch.allclose(differentiable.kl_inverse(q, c), expected, rtol=1e-12, atol=1e-299)


def test_shapes_and_types_are_those_of_arithmetic():
    q, c = torch.rand(3, 1), torch.rand(4, dtype=torch.float64).requires_grad_()
    inverse = differentiable.kl_inverse(q.requires_grad_(), c)
    assert (inverse.shape, inverse.dtype) == ((3, 4), torch.float64)
    inverse.sum().backward()
    assert q.grad is not None
    assert c.grad is not None
    assert (q.grad.shape, q.grad.dtype) == ((3, 1), torch.float32)
    assert (c.grad.shape, c.grad.dtype) == ((4,), torch.float64)
    assert differentiable.kl_inverse(torch.tensor(0.1), torch.tensor(0.2)).dtype == torch.float32


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("c", [1e-5, 1e-3, 0.05, 1.0])
def test_its_slopes_are_those_of_finite_differences_and_of_the_formula(q, c):
    a, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (q, c))
    p = differentiable.kl_inverse(a, b)
    to_q, to_c = (float(g) for g in torch.autograd.grad(p, (a, b)))
    p = p.item()
    assert to_c == pytest.approx(p * (1 - p) / (p - q), rel=1e-9)
    assert to_q == pytest.approx(p * (1 - p) / (p - q) * math.log(p * (1 - q) / (q * (1 - p))), rel=1e-9)
    for slope, point, along in (
        (to_q, q, lambda t: bounds.kl_inverse(t, c)),
        (to_c, c, lambda t: bounds.kl_inverse(q, t)),
    ):
        h = 1e-4 * point
        assert slope == pytest.approx((along(point + h) - along(point - h)) / (2 * h), rel=1e-3)


def test_its_slopes_are_finite_at_the_ends_and_right_where_there_is_a_limit():
    q, c, _ = grid()
    gradients = torch.autograd.grad(differentiable.kl_inverse(q.requires_grad_(), c.requires_grad_()).sum(), (q, c))
    assert all(torch.isfinite(g).all() and (g >= 0).all() for g in gradients)

    def slopes(*point: float) -> list[float]:
        leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in point]
        return [float(g) for g in torch.autograd.grad(differentiable.kl_inverse(*leaves), leaves)]

    assert slopes(0.0, 0.3)[1] == pytest.approx(math.exp(-0.3))
    assert slopes(0.0, 0.0)[1] == pytest.approx(1.0)
    assert slopes(0.4, 0.0)[0] == pytest.approx(1.0)
    assert slopes(0.4, 2000.0) == [0.0, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_captured_and_does_not_wait():
    q, c, expected = (t.cuda() for t in grid())
    q.requires_grad_()
    torch.autograd.grad(differentiable.kl_inverse(q, c).sum(), q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiable.kl_inverse(q, c)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiable.kl_inverse(q, c)
    graph.replay()
    assert torch.allclose(captured, expected, rtol=1e-12, atol=1e-299)
