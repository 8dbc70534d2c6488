"""N:M patterns by every backend against the reference, and the 8-bit step: hard gates to the bit."""

import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from pacprune import kernels
from pacprune.kernels import PATTERNS, Law, SampleInputs, block_adam, cpp, reference
from pacprune.kernels.law import GROUPED, HARD

K = 3
TYPES = list(itertools.product((torch.float32, torch.bfloat16), repeat=2))
needs_compiler = pytest.mark.skipif(kernels.backend("cpu") != "cpu", reason="no C++ compiler")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def make(law: Law, types: tuple[torch.dtype, torch.dtype], members: str | None, size: int = 1032) -> SampleInputs:
    generator = torch.Generator().manual_seed(0)
    form = (K, size) if members == "stacked" else (size,)
    mean = torch.randn(form, generator=generator).to(types[0])
    gate = (3 * torch.randn(form, generator=generator)).to(types[1])
    counters = torch.arange(K) * 2**33 + 5, torch.arange(K) + 2**31, 1 + torch.rand(K, generator=generator)
    seed, step, sharpness = counters if members else [t[1] for t in counters]
    return SampleInputs(mean, gate, None, seed, step, 2**34 + 8, None, sharpness, None, members == "shared")


def assert_alike(actual: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    assert actual.dtype == expected.dtype
    if exact:
        assert torch.equal(actual, expected)
    close = 1e-4 if expected.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual, expected, rtol=close, atol=3e-5 * max(1.0, float(expected.abs().max())))


@needs_compiler
@pytest.mark.parametrize("coupling", [0.0, 4.0])
@pytest.mark.parametrize("mode", GROUPED)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_draws_and_gradients_of_the_compiled_kernels_are_the_references(
    pattern: str, mode: str, coupling: float
) -> None:
    law, (n, m) = Law(pattern, coupling, mode, 0.3), PATTERNS[pattern]
    for types, members in itertools.product(TYPES, (None, "stacked", "shared")):
        inputs = make(law, types, members)
        assert kernels.fast_backend(inputs, law) is cpp
        (actual,), (expected,) = kernels.draw([inputs], law), reference.draw([inputs], law)
        assert_alike(actual, expected, exact=mode == HARD)
        if mode == HARD:
            assert ((actual != 0).reshape(-1, m).sum(-1) == n).all()
        if members == "shared":
            continue
        out = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual.dtype)
        for needs in ((True, True, False), (False, True, False)):
            pairs = zip(
                kernels.gradients(inputs, law, out, needs), reference.gradients(inputs, law, out, needs), strict=True
            )
            for a, b in pairs:
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert_alike(a, b, exact=False)


@needs_compiler
def test_equal_logits_without_a_difference_in_noise_keep_the_first_ones() -> None:
    far = torch.full((8,), 1e6)  # beyond what is told from others: all integers are the largest one
    inputs = SampleInputs(torch.ones(8), far, None, torch.tensor(1), torch.tensor(2), 0)
    for draw in (kernels.draw, reference.draw):
        assert draw([inputs], Law("2:4", mode=HARD))[0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_other_modes_have_no_pattern() -> None:
    with pytest.raises(ValueError, match="the pattern 2:4 has no mode 'straight-through'; use one of concrete"):
        kernels.draw([make(Law("2:4"), TYPES[0], None)], Law("2:4", mode="straight-through"))


def interpreted(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@needs_triton
def test_draws_and_gradients_are_right_in_tritons_interpreter() -> None:
    folder = os.path.dirname(__file__)
    interpreted(f"""
        import sys, itertools, torch
        sys.path.insert(0, {folder!r})
        from test_groups import GROUPED, HARD, PATTERNS, TYPES, Law, assert_alike, make
        from pacprune.kernels import reference, triton_groups
        cases = zip(itertools.product(PATTERNS, GROUPED), itertools.cycle((0.0, 4.0)), itertools.cycle(TYPES),
                    itertools.cycle((None, "stacked", "shared", None, None)))
        for (pattern, mode), coupling, types, members in cases:
            law = Law(pattern, coupling, mode, 0.3)
            inputs = make(law, types, members, 2056)
            actual, (expected,) = triton_groups.draw(inputs, law), reference.draw([inputs], law)
            assert_alike(actual, expected, exact=mode == HARD)
            if members == "shared":
                continue
            out = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual.dtype)
            needs = members is not None, True, False
            pairs = zip(triton_groups.gradients(inputs, law, out, needs),
                        reference.gradients(inputs, law, out, needs))
            for a, b in pairs:
                assert (a is None) == (b is None)
                if a is not None:
                    assert_alike(a, b, exact=False)
    """)


@needs_triton
def test_the_step_in_eight_bits_is_right_in_tritons_interpreter() -> None:
    interpreted("""
        import torch
        from pacprune.kernels import block_adam, triton_block_adam
        for shape in ((7,), (5, 300), (3, 4, 2, 2)):
            for dtype in (torch.float32, torch.bfloat16):
                g = torch.Generator().manual_seed(0)
                p = torch.randn(shape, generator=g).to(dtype)
                q, a, b = p.clone(), block_adam.new_state(p), block_adam.new_state(p)
                a.first.fill_(3), b.first.fill_(3)
                for step in range(4):
                    grad = torch.randn(shape, generator=g).to(dtype)
                    a.step.add_(1), b.step.add_(1)
                    block_adam.step_reference_(p, grad, a, torch.tensor(0.05), 0.9, 0.01)
                    triton_block_adam.step_(q, grad, b, torch.tensor(0.05), 0.9, 0.01)
                assert ((p.float() - q.float()).abs() <= (2.0**-7 if dtype == torch.bfloat16 else 1e-4)).all()
                assert ((a.mean.int() - b.mean.int()).abs() <= 1).all()
                torch.testing.assert_close(a.square, b.square)
    """)


# --- The 8-bit step.


def test_the_mean_in_eight_bits_leads_where_adam_with_one_second_moment_leads() -> None:
    """Against the same formulas in float64, over many steps: rounding errors do not add up."""
    generator = torch.Generator().manual_seed(0)
    p = torch.zeros(4, 300)
    state, target = block_adam.new_state(p), torch.randn(4, 300, generator=generator)
    exact, mean, square = p.double(), torch.zeros(4, 300).double(), torch.zeros(4, 2).double()
    for step in range(1, 201):
        state.step.add_(1)
        noise = 0.5 * torch.randn(4, 300, generator=generator)
        block_adam.step_(p, p - target + noise, state, torch.tensor(0.02), 0.9, 0.0)
        grad = exact - target + noise
        mean = 0.9 * mean + 0.1 * grad
        blocks = torch.stack([grad[:, :256].square().mean(1), grad[:, 256:].square().mean(1)], dim=1)
        square = block_adam.BETA2 * square + (1 - block_adam.BETA2) * blocks
        size = (square / (1 - block_adam.BETA2**step)).sqrt().repeat_interleave(256, 1)[:, :300]
        exact = exact - 0.02 * mean / (1 - 0.9**step) / size
    assert float((p - exact).abs().mean()) < 0.02
    assert float((p - target).square().mean()) < 0.1


def test_steps_below_a_level_of_bfloat16_add_up() -> None:
    """200 steps of 0.001 at a value whose neighbours are 0.0078 away; rounded to nearest, none would be taken."""
    p = torch.ones(2000, dtype=torch.bfloat16)
    state = block_adam.new_state(p)
    for _ in range(200):
        state.step.add_(1)
        block_adam.step_(p, torch.ones_like(p), state, torch.tensor(1e-3), 0.0, 0.0)
    assert float(p.float().mean()) == pytest.approx(0.8, abs=2e-3)
    assert p.float().std() > 0


def test_the_state_takes_little_more_than_a_byte() -> None:
    state = block_adam.new_state(torch.zeros(64, 1024, dtype=torch.bfloat16))
    assert sum(t.numel() * t.itemsize for t in state) / (64 * 1024) < 1.04
