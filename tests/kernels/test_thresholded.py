"""Thresholded gates: Feather's closed form, both gradients against their formulas, noise, and members."""

import pytest
import torch
from torch import Tensor

from pacprune import kernels, philox
from pacprune.kernels import CLAMP, THRESHOLDED, Law, SampleInputs, reference

C = 4.0
LAW = Law(coupling=C, mode=THRESHOLDED, beta=1.0, theta=0.25)
SEED, STEP = torch.tensor(5), torch.tensor(3)
BACKENDS = [pytest.param(kernels, id="fast"), pytest.param(reference, id="reference")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def inputs(mean: Tensor, gate: Tensor | None = None, **options: Tensor) -> SampleInputs:
    gate = torch.zeros_like(mean) if gate is None else gate
    part = SampleInputs(mean, gate, None, SEED, STEP, 2, **options)
    return part._replace(**{n: t.to(mean.device) for n, t in part._asdict().items() if isinstance(t, Tensor)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_offsets_it_is_feathers_operator(backend, device: str) -> None:
    """sign(w) (|w|^3 - tau^3)^(1/3) above tau, and exactly 0 below."""
    mean, tau = weights(4000).to(device), 1.2
    (draw,) = backend.draw([inputs(mean, shift=C * torch.tensor(tau).log())], LAW)
    w = mean.double()
    expected = torch.sign(w) * (w.abs() ** 3 - tau**3).clamp_min(0) ** (1 / 3)
    far = (w.abs() - tau).abs() > 1e-3
    torch.testing.assert_close(draw[far], expected.float()[far], rtol=1e-4, atol=0)
    assert (draw[w.abs() < tau - 1e-6] == 0).all()
    assert (draw[w.abs() > tau + 1e-6] != 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_straight_through_and_that_of_a_bump(backend, device: str) -> None:
    mean, gate, out = (t.to(device) for t in weights(3, 1000))
    shift, gamma = torch.tensor(-1.0), torch.tensor(2.5)
    part = inputs(mean, gate, shift=shift, sharpness=gamma)
    to_mean, to_gate, _ = backend.gradients(part, LAW, out, (True, True, False))
    depth = gate.double() + C * torch.log(mean.double().abs() + 1e-8) + 1.0
    far = depth.abs() > 1e-4
    torch.testing.assert_close(to_mean[far], torch.where(depth > 0, out, 0.25 * out)[far])
    s = torch.sigmoid((2.5 * depth).clamp(-14, 14))
    expected = (out.double() * mean.double() * s * (1 - s) * 2.5).float()
    torch.testing.assert_close(to_gate, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_logistic_on_the_score(backend, device: str) -> None:
    n, tau = 4000, C * torch.tensor(1.0).log()
    mean = weights(n).to(device)
    part = inputs(mean, shift=tau, noise=torch.tensor(0.7))
    (draw,) = backend.draw([part], LAW)
    u = philox.uniform(philox.words(n, seed=5, step=3, stream=philox.GATE, offset=2)).double().to(device)
    score = C * torch.log(mean.double().abs() + 1e-8) + 0.7 * torch.logit(u)
    far = score.abs() > 1e-4
    assert torch.equal((draw != 0)[far], (score > 0)[far])
    before = part._replace(step=part.step - 1)
    (following,) = kernels.next_scores([before], LAW)
    torch.testing.assert_close(following, score.float(), rtol=1e-5, atol=1e-5)
    quiet = part._replace(noise=torch.zeros((), device=device))
    torch.testing.assert_close(backend.draw([quiet], LAW)[0], backend.draw([inputs(mean, shift=tau)], LAW)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_everything_is_kept_below_all_scores_and_nan_stays_nan(device: str) -> None:
    mean = weights(100).to(device)
    (draw,) = kernels.draw([inputs(mean, shift=torch.tensor(-1e9))], LAW)
    torch.testing.assert_close(draw, mean, rtol=1e-6, atol=0)
    mean[3] = float("nan")
    assert kernels.draw([inputs(mean, shift=torch.tensor(0.0))], LAW)[0].isnan().nonzero().tolist() == [[3]]


def test_autograd_compile_and_vmap_see_the_same_gradients() -> None:
    mean, gate, out = weights(3, 50)
    part = inputs(mean.requires_grad_(), gate.requires_grad_(), shift=torch.tensor(-1.0), noise=torch.tensor(0.5))
    expected = reference.gradients(part, LAW, out, (True, True, False))[:2]
    eager = torch.autograd.grad(kernels.sample(part, LAW), (mean, gate), out)

    def total(mean: Tensor, gate: Tensor) -> Tensor:
        return (kernels.sample(part._replace(mean=mean, gate=gate), LAW) * out).sum()

    functional = torch.func.grad(total, argnums=(0, 1))(mean.detach(), gate.detach())
    for actual in (eager, functional):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_mapping_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has a threshold for the scores of the sigmoid mapping, not of 'clamp'"):
        kernels.draw([inputs(weights(5))], Law(CLAMP, mode=THRESHOLDED))
