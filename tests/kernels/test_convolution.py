"""Convolutions of a population: under vmap the operator computes every member's convolution, on every device."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune.kernels.conv import convolution as op
from pacprune.training import population

SHAPES = [  # members, inputs, outputs, height, width, stride, padding, taps
    (3, 16, 16, 6, 5, 1, 1, 3),
    (2, 5, 7, 9, 8, 2, 1, 3),
    (2, 3, 16, 7, 7, 1, 1, 3),
    (2, 6, 3, 9, 9, 3, 2, 5),
    (1, 4, 4, 6, 6, 2, 0, 1),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def problem(
    shape: tuple[int, ...], device: str, *, shared: bool = False
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    k, inputs, outputs, high, wide, stride, padding, taps = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*([] if shared else [k]), 3, inputs, high, wide, generator=g).to(device).requires_grad_()
    weight = torch.randn(k, outputs, inputs, taps, taps, generator=g).to(device).requires_grad_()
    return x, weight, [stride] * 2, [padding] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_members_at_once_equal_the_members_one_by_one(shape: tuple[int, ...], shared: bool, device: str) -> None:
    x, weight, stride, padding = problem(shape, device, shared=shared)
    out = torch.vmap(
        lambda x, w: op.convolution(x, w, stride=stride, padding=padding), in_dims=(None if shared else 0, 0)
    )(x, weight)
    exact = [
        F.conv2d((x if shared else x[k]).double(), weight[k].double(), None, stride, padding)
        for k in range(len(weight))
    ]
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    expected = torch.autograd.grad((torch.stack(exact) * slope).sum(), (x, weight))
    gradients = torch.autograd.grad((out * slope).sum(), (x, weight))
    scale = 1e-5 if device == "cpu" else 3e-3  # TF32 may be on
    for value, reference in ((out, torch.stack(exact).float()), *zip(gradients, expected, strict=True)):
        torch.testing.assert_close(value, reference, rtol=scale, atol=scale * float(reference.detach().abs().max()))


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_passes_torchs_opcheck(device: str) -> None:
    x, weight, stride, padding = problem(SHAPES[1], device)
    torch.library.opcheck(op._convolution, (x[0].detach(), weight[0].detach(), stride, padding, 1))
    leaves = [t[0].detach().requires_grad_() for t in (x, weight)]
    torch.library.opcheck(op._convolution, (*leaves, stride, padding, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(5, 3, 16, 8, 8, 1, 1, 3), (3, 1, 6, 9, 7, 1, 2, 5), (2, 2, 5, 8, 9, 2, 0, 3)], ids=str
)
def test_images_of_all_members_at_once_equal_the_members_one_by_one(
    shape: tuple[int, ...], half: bool, device: str
) -> None:
    x, weight, stride, padding = problem(shape, device)
    images, kind = x.detach(), torch.bfloat16 if half else torch.float32
    convolve = torch.vmap(lambda x, w: op.convolution(x, w, stride=stride, padding=padding))
    out = convolve(images.to(kind), weight.to(kind))
    exact = torch.stack(
        [
            F.conv2d(a.to(kind).double(), b.to(kind).double(), None, stride, padding)
            for a, b in zip(images, weight, strict=True)
        ]
    )
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, kind)
    (gradient,), (expected,) = (torch.autograd.grad((y * slope).sum(), weight) for y in (out, exact))
    scale = 2e-2 if half else 1e-5 if device == "cpu" else 3e-3
    for value, reference in ((out, exact), (gradient, expected)):
        torch.testing.assert_close(
            value.float(), reference.float(), rtol=scale, atol=scale * float(reference.detach().abs().max())
        )


def test_only_slow_convolutions_of_a_population_use_the_operator() -> None:
    slow = population._is_slow_in_groups
    assert slow(nn.Conv2d(3, 16, 3, padding=1))
    assert slow(nn.Conv2d(32, 64, 3, stride=2, padding=1))
    assert not slow(nn.Conv2d(16, 32, 3, padding=1))
    assert not slow(nn.Conv2d(64, 128, 3, stride=2, padding=1))
    assert not slow(nn.Conv2d(16, 16, 3, padding="same"))
    assert not slow(nn.Conv2d(16, 16, 3, stride=2, dilation=2))
    assert not slow(nn.Conv2d(16, 16, 3, stride=2, groups=2))
    assert not slow(nn.Conv2d(16, 16, 3, stride=2, padding_mode="reflect"))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_grouped_module_computes_the_plain_convolution(stride: int) -> None:
    plain = nn.Conv2d(4, 6, 3, stride=stride, padding=1)
    grouped = nn.Conv2d(4, 6, 3, stride=stride, padding=1)
    grouped.load_state_dict(plain.state_dict())
    grouped.__class__ = population._Grouped
    x = torch.randn(2, 4, 9, 9)
    torch.testing.assert_close(grouped(x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped(x).dtype == plain(x).dtype == torch.bfloat16


def test_batchnorm_keeps_bfloat16_and_has_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out, self.seen = nn.BatchNorm2d(3), nn.Linear(3, 2), []

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x.bfloat16())
            self.seen.append(normed.dtype)
            return self.out(normed.float().mean((2, 3)))

    pair = population.Population([Net(), Net()])
    pair.stacked.train()
    x, y = torch.randn(2, 5, 3, 4, 4), torch.randint(2, (2, 5))
    pair.losses(F.cross_entropy, x, y, separate=True).sum().backward()
    assert pair._plain.seen == [torch.bfloat16]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pair.stacked.parameters())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_are_exact_in_the_interpreter() -> None:
    """The arithmetic of the kernels, without a GPU."""
    script = f"""
        import torch, torch.nn.functional as F
        from pacprune.kernels.conv import convolution as op, grouped
        for k, inputs, outputs, high, wide, stride, padding, taps in {SHAPES}:
            x, w = torch.randn(3, k * inputs, high, wide), torch.randn(k * outputs, inputs, taps, taps)
            a, b = x.double().requires_grad_(), w.double().requires_grad_()
            exact = F.conv2d(a, b, None, stride, padding, 1, k)
            slope = torch.randn(exact.shape)
            expected = exact, *torch.autograd.grad((exact * slope).sum(), (a, b))
            sizes, m = op._sizes(x, w, [stride] * 2, [padding] * 2, k), op._matrices(w, k)
            slope, images = op._innermost(slope), op._innermost(x)
            values = (
                grouped.forward(images, m, sizes).permute(0, 3, 1, 2),
                grouped.to_input(slope, m.mT.contiguous(), sizes).permute(0, 3, 1, 2),
                grouped.to_weight(slope, images, sizes).unflatten(1, (taps, taps)).permute(0, 4, 3, 1, 2).flatten(0, 1),
            )
            for value, reference in zip(values, expected, strict=True):
                assert ((value - reference).abs().max() < 1e-5 * reference.abs().max()).item()
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_gate_sums_are_exact_in_tritons_interpreter() -> None:
    script = """
        import torch
        from pacprune.kernels import gate_sums
        from pacprune.kernels.law import LOGIT_MAX
        from pacprune.masking import masks
        logits = torch.randn(3, 20_011) * 9
        tau, gamma = torch.randn(3), torch.tensor([1.0, 2.0, 0.5])
        exact = masks._moments([logits[:, 5:]], tau, gamma)
        sums = gate_sums.sums(logits[:, 5:], tau, gamma, most=LOGIT_MAX)
        assert sums.dtype == torch.float64
        assert ((sums - exact).abs() < 1e-6 * exact[0]).all()
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
