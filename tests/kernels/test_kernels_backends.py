"""Every backend against the reference: all modes, mappings, types, odd sizes and offsets, members; noise; the build."""

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from scipy import stats

from pacprune import kernels, philox
from pacprune.kernels import (
    CLAMP,
    GIVEN,
    HARD,
    MAPPINGS,
    MODES,
    NOISELESS,
    SIGMOID,
    SOFT,
    STRAIGHT_THROUGH,
    THRESHOLDED,
    Law,
    SampleInputs,
    cpp,
    dispatch,
    reference,
)

K = 3
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(kernels.backend("cpu") != "cpu", reason="no C++ compiler"), id="cpu"),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), id="cuda"),
]
LAWS = [
    Law(mapping, coupling, mode, beta)
    for (mapping, row), mode in itertools.product(MAPPINGS.items(), MODES)
    for coupling, beta in ((0.0, 0.5), (4.0, 0.3) if mapping == SIGMOID else (0.0, 2 / 3))
    if (mode == HARD or not row.is_for_hard_gates) and (mode != THRESHOLDED or mapping == SIGMOID)
]
"""Every mapping with every mode; the temperature 1/2 has a branch of its own in sampler.cpp."""
STDS = [(None, False), ("one", False), ("member", True), ("full", False), ("full", True)]
TYPES = [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]


def make(
    law: Law,
    *,
    members: str | None,
    std: str | None,
    types: tuple[torch.dtype, torch.dtype | None],
    sizes: tuple[int, ...],
    offset: int,
    device: str,
) -> list[SampleInputs]:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in sizes:
        form = (K, n) if members == "stacked" else (n,)
        mean = torch.randn(form, generator=generator).to(types[0])
        gate = torch.rand(form, generator=generator)
        gate = {SIGMOID: 8 * gate - 4, CLAMP: 1.2 * gate - 0.1, GIVEN: kernels.quantised(gate)}[law.mapping]
        seed, step = torch.arange(K) * 2**33 + 5, torch.arange(K) + 2**31
        shift, sharpness = torch.rand(K, generator=generator), 1 + torch.rand(K, generator=generator)
        noise = 0.3 * torch.rand(K, generator=generator) if law.mode == THRESHOLDED and offset else None
        counters = [t if members or t is None else t[1] for t in (seed, step, shift, sharpness, noise)]
        width = None
        if std:
            width = torch.rand({"one": (), "member": (K,), "full": form}[std], generator=generator)
            width = width - 3 if law.log_std else width
        tensors = [None if t is None else t.to(device) for t in (mean, gate, width, *counters)]
        *tensors, noise = tensors
        parts.append(SampleInputs(*tensors[:5], offset, *tensors[5:], types[1], members == "shared", noise))
        offset += n
    return parts


def close(actual: torch.Tensor, expected: torch.Tensor, *, scale: float) -> None:
    """Within 1e-5 relative and 2e-6 of the largest, or a step of bfloat16."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    step = 2.0**-7 if expected.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=step, atol=2e-6 * max(1.0, scale))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.mapping} {law.mode} {law.coupling:.0f} {law.beta:.1f}")
@pytest.mark.parametrize("device", DEVICES)
def test_draws_and_gradients_equal_the_references(device: str, law: Law) -> None:
    flipped = total = 0
    cases = itertools.product((None, "stacked", "shared"), STDS, TYPES, ((0, (64, 1000, 4)), (2**34 + 3, (1, 5, 1003))))
    for members, (std, log_std), types, (offset, sizes) in cases:
        if std == "member" and members != "stacked":
            continue
        full_law = Law(law.mapping, law.coupling, law.mode, law.beta, log_std)
        parts = make(full_law, members=members, std=std, types=types, sizes=sizes, offset=offset, device=device)
        draws = kernels.draw(parts, full_law)
        assert len({w.untyped_storage().data_ptr() for w in draws}) <= 2  # one buffer; on a GPU one per alignment
        for part, actual in zip(parts, draws, strict=True):
            expected = reference.draw([part], full_law)[0]
            agree = (actual == 0) == (expected == 0)
            flipped, total = flipped + int((~agree).sum()), total + agree.numel()
            if law.mode == THRESHOLDED:  # next to the threshold a gate rises steeply from the logarithms' last bits
                agree &= expected.abs() > 0.1 * part.mean.abs().max()
            close(torch.where(agree, actual, 0), torch.where(agree, expected, 0), scale=1.0)
            if members == "shared":
                continue
            out = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(device, actual.dtype)
            needs = (True, True, std is not None)
            for a, b in zip(
                kernels.gradients(part, full_law, out, needs),
                reference.gradients(part, full_law, out, needs),
                strict=True,
            ):
                assert (a is None) == (b is None)
                if a is not None and b is not None and (law.coupling == 0 or law.mode == SOFT) and part.noise is None:
                    close(a, b, scale=float(b.abs().max()) if b.numel() else 1.0)
    # The gate is a comparison of integers; only the coupling's logarithm may be rounded otherwise.
    assert flipped <= (total * 1e-5 if law.coupling or law.mode == THRESHOLDED else 0)


@pytest.mark.parametrize("table", ["MODES", "MAPPINGS"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_its_branch_is_refused(device: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = getattr(kernels, table)
    monkeypatch.setitem(rows, "new", rows["concrete" if table == "MODES" else SIGMOID]._replace(number=len(rows)))
    law = Law(mode="new") if table == "MODES" else Law("new")
    counters = torch.tensor(1, device=device), torch.tensor(1, device=device)
    part = SampleInputs(torch.ones(5, device=device), torch.zeros(5, device=device), None, *counters, 0)
    for attempt in (lambda: kernels.draw([part], law), lambda: kernels.gradients(part, law, part.mean)):
        with pytest.raises(ValueError, match=r"has no branch for their numbers; add one there"):
            attempt()


@pytest.mark.parametrize("mode", [SOFT, STRAIGHT_THROUGH, NOISELESS])
@pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu"), DEVICES[1]])
def test_the_gradient_of_a_clamped_gate_next_to_one_keeps_its_digits(device: str, mode: str) -> None:
    """Compares with soft (1 - soft) / (p (1 - p)) in float64, by the sigmoids of x and -x: 1 - soft loses digits."""
    n, law = 4000, Law(CLAMP, mode=mode)
    gate = 1 - torch.logspace(-4.9, -1, n)
    counters = torch.tensor(3, device=device), torch.tensor(4, device=device)
    part = SampleInputs(torch.ones(n, device=device), gate.to(device), None, *counters, 0)
    p = gate.double()
    x = torch.logit(p)
    if mode != NOISELESS:
        x = x + torch.logit(philox.uniform(philox.words(n, seed=3, step=4, stream=philox.GATE)).double())
    expected = (torch.sigmoid(x / law.beta) * torch.sigmoid(-x / law.beta) / law.beta / (p * (1 - p))).float()
    for differentiate in (kernels.gradients, reference.gradients):
        (_, to_gate, _) = differentiate(part, law, torch.ones(n, device=device), (True, True, False))
        assert to_gate is not None
        torch.testing.assert_close(to_gate.cpu(), expected, rtol=3e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_million_hard_gates_equal_the_references(device: str) -> None:
    n = 1_000_000
    generator = torch.Generator().manual_seed(2)
    gate = (28 * torch.rand(n, generator=generator) - 14).to(device)
    counters = torch.tensor(11, device=device), torch.tensor(7, device=device)
    for law in (Law(mode=HARD), Law(coupling=4.0, mode=HARD)):
        mean = torch.randn(n, generator=generator).to(device)
        part = SampleInputs(mean, gate, None, *counters, 1)
        differ = int(((kernels.draw([part], law)[0] != 0) != (reference.draw([part], law)[0] != 0)).sum())
        assert differ <= (10 if law.coupling else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_draw_depends_on_neither_the_other_members_nor_the_place_in_memory(device: str, mode: str) -> None:
    law = Law(mode=mode, coupling=2.0)
    (part,) = make(law, members="stacked", std="member", types=TYPES[0], sizes=(1003,), offset=2, device=device)
    (together,), out = kernels.draw([part], law), torch.randn(K, 1003, generator=torch.Generator().manual_seed(3))
    to_mean, to_gate, _ = kernels.gradients(part, law, out.to(device))
    assert to_mean is not None
    assert to_gate is not None
    for k in range(K):
        for cut in (0, 1, 37):  # a piece that begins elsewhere has the numbers of its indices
            tensors = [t[k].contiguous() for t in (part.mean, part.gate)]
            counters = [t[k] for t in (part.seed, part.step, part.shift, part.sharpness)]
            alone = SampleInputs(
                *[t[cut:].contiguous() for t in tensors],
                part.std[k],
                *counters[:2],
                part.offset + cut,
                *counters[2:],
                noise=None if part.noise is None else part.noise[k],
            )
            assert torch.equal(kernels.draw([alone], law)[0], together[k, cut:])
            single = kernels.gradients(alone, law, out[k, cut:].to(device))
            assert torch.equal(single[0], to_mean[k, cut:])
            assert torch.equal(single[1], to_gate[k, cut:])


@pytest.mark.parametrize("device", DEVICES)
def test_transposed_tensors_are_drawn_by_their_logical_order(device: str) -> None:
    mean, gate = torch.randn(7, 9, device=device), torch.randn(7, 9, device=device)
    counters = torch.tensor(1, device=device), torch.tensor(2, device=device)
    plain = SampleInputs(mean, gate, None, *counters, 0)
    turned = SampleInputs(mean.t().contiguous().t(), gate.t().contiguous().t(), None, *counters, 0)
    assert torch.equal(kernels.draw([plain], Law())[0], kernels.draw([turned], Law())[0])


@pytest.mark.parametrize("device", DEVICES)
def test_the_noise_is_uniform_and_independent_across_index_step_and_seed(device: str) -> None:
    n, zero = 200_000, torch.zeros((), device=device)

    def noise(seed: int, step: int, offset: int = 0) -> torch.Tensor:
        """sigmoid(logit u) = u: the relaxed gate of logit 0 at temperature 1."""
        counters = torch.tensor(seed, device=device), torch.tensor(step, device=device)
        part = SampleInputs(torch.ones(n, device=device), zero.expand(n), None, *counters, offset)
        return kernels.draw([part], Law(beta=1.0))[0].cpu().double()

    base = noise(1, 1)
    assert stats.kstest(base.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(noise(1, 1, 4)[:-4], base[4:])
    others = [base.roll(1), base.roll(4), base.roll(1024), noise(1, 2), noise(2, 1), noise(2**32 + 1, 1)]
    for other in others:
        table = torch.histogramdd(torch.stack([base, other], 1), [8, 8], [0, 1, 0, 1])[0]
        assert stats.chisquare(table.reshape(-1).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_the_slab_is_normal_and_independent_of_the_gate(device: str) -> None:
    n = 200_000
    std = torch.ones((), device=device)
    counters = torch.tensor(5, device=device), torch.tensor(6, device=device)
    part = SampleInputs(torch.zeros(n, device=device), torch.full((n,), 20.0, device=device), std, *counters, 0)
    weights = kernels.draw([part], Law(mode=HARD))[0].cpu()
    z = weights[weights != 0].double()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    soft = SampleInputs(torch.ones(n, device=device), torch.zeros(n, device=device), None, *counters, 0)
    u = kernels.draw([soft], Law(beta=1.0))[0].cpu()[weights != 0].double()
    table = torch.histogramdd(torch.stack([u, torch.special.ndtr(z)], 1), [8, 8], [0, 1, 0, 1])[0]
    assert stats.chisquare(table.reshape(-1).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_gate_gives_a_nan_weight(device: str) -> None:
    gate = torch.tensor([0.0, float("nan"), 1.0, 2.0], device=device)
    counters = torch.tensor(1, device=device), torch.tensor(1, device=device)
    for mapping in (SIGMOID, CLAMP):
        weights = kernels.draw([SampleInputs(torch.ones_like(gate), gate, None, *counters, 0)], Law(mapping))[0]
        assert weights.isnan().tolist() == [False, True, False, False]


@pytest.mark.skipif(kernels.backend("cpu") != "cpu", reason="no C++ compiler")
def test_draws_do_not_depend_on_the_number_of_threads() -> None:
    law = Law(mode=SOFT)
    parts = make(law, members=None, std="full", types=TYPES[0], sizes=(40_001, 70_000), offset=1, device="cpu")
    with_one_thread = kernels.draw(parts, law)
    try:
        torch.set_num_threads(2)
        with_two_threads = kernels.draw(parts, law)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(with_one_thread, with_two_threads, strict=True))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[pytest.MonkeyPatch]:
    """No compiled library is loaded or cached, before the test and after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch._loaded.cache_clear()
    cpp.library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    dispatch._loaded.cache_clear()
    cpp.library.cache_clear()


def test_without_a_compiler_the_reference_is_used_without_a_warning(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setenv("PATH", "/nowhere")
    unloaded.delenv("CXX", raising=False)
    assert kernels.backend("cpu") == "reference"
    assert "no C++ compiler" in kernels.status("cpu")
    part = SampleInputs(torch.ones(5), torch.zeros(5), None, torch.tensor(1), torch.tensor(1), 0)
    assert torch.equal(kernels.draw([part], Law())[0], reference.draw([part], Law())[0])


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_a_broken_compiler_gives_one_sentence_and_the_reference(unloaded: pytest.MonkeyPatch, compiler: str) -> None:
    unloaded.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match="plain torch instead of the C\\+\\+ kernels.*set CXX"):
        assert kernels.backend("cpu") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend("cpu") == "reference"  # the warning comes once
    assert compiler in kernels.status("cpu")


@pytest.mark.skipif(kernels.backend("cpu") != "cpu", reason="no C++ compiler")
def test_a_library_that_draws_other_weights_is_refused(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(reference, "draw", lambda all_inputs, law: [torch.zeros(301)])
    with pytest.warns(UserWarning, match="draws other weights"):
        assert kernels.backend("cpu") == "reference"


@pytest.mark.skipif(kernels.backend("cpu") != "cpu", reason="no C++ compiler")
def test_processes_that_build_at_once_do_not_collide(tmp_path) -> None:
    code = "from pacprune import kernels; print(kernels.backend('cpu'))"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", code]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=600)[0] for p in running] == ["cpu\n"] * 2
    assert len([f for f in tmp_path.rglob("*") if f.is_file()]) == 1
