"""The sampler: hard gates as integers, relaxed gates against the Gumbel-softmax, gradients, saved tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from pacprune import kernels, philox
from pacprune.kernels import (
    GIVEN,
    HARD,
    SOFT,
    STRAIGHT_THROUGH,
    THRESHOLDED,
    Law,
    SampleInputs,
    hard_gate,
    keep_prob,
    quantised,
)

SEED, STEP = torch.tensor(5), torch.tensor(3)
N = 40_000


def sample(
    mean: torch.Tensor,
    logit: torch.Tensor,
    std: torch.Tensor | None,
    *,
    seed: torch.Tensor,
    step: torch.Tensor,
    offset: int,
    mode: str,
    beta: float,
) -> torch.Tensor:
    """A draw whose gate parameter is the logit."""
    return kernels.sample(SampleInputs(mean, logit, std, seed, step, offset), Law(mode=mode, beta=beta))


def gates(logit: torch.Tensor, mode: str, *, beta: float = 0.5, step: int = 3, offset: int = 0) -> torch.Tensor:
    """The gate itself: the sample of a weight 1 without width."""
    counters = {"seed": SEED, "step": torch.tensor(step), "offset": offset}
    return sample(torch.ones_like(logit), logit, None, mode=mode, beta=beta, **counters)


def words(n: int, *, step: int = 3, offset: int = 0) -> torch.Tensor:
    return philox.words(n, seed=5, step=step, stream=philox.GATE, offset=offset)


@pytest.mark.parametrize("p", [0.0, 2.0**-32, 3 * 2.0**-32, 1e-6, 0.1, 0.5, 1 - 2.0**-24, 1.0])
def test_the_hard_gate_is_a_comparison_of_integers_with_probability_exactly_p(p):
    stored = quantised(torch.tensor([p], dtype=torch.float64))
    count = float(stored.double()) * 2**32
    assert count == int(count)  # so many of the 2**32 words open the gate
    edge = 2**32 - int(count)
    inside = [w for w in (edge - 1, edge, edge + 1, 0, 2**32 - 1) if 0 <= w < 2**32]
    assert hard_gate(stored.expand(len(inside)), torch.tensor(inside)).tolist() == [w >= edge for w in inside]


def test_quantised_is_exactly_representable_and_near():
    generator = torch.Generator().manual_seed(0)
    p = torch.cat([torch.rand(1000, generator=generator), torch.logspace(-9.6, 0, 1000)]).double()
    q = quantised(p)
    assert q.dtype == torch.float32
    assert torch.equal(q.double() * 2**32, (q.double() * 2**32).round())
    assert torch.equal(quantised(q), q)
    assert (q.double() - p).abs().max() < 2.0**-24
    assert ((q.double() - p).abs() <= p * 2.0**-24 + 2.0**-32).all()


def test_keep_prob_is_the_sigmoid_within_its_grid():
    logit = torch.linspace(-14, 14, 2001)
    assert torch.allclose(keep_prob(logit).double(), torch.sigmoid(logit.double()), rtol=2e-4, atol=0)
    assert (keep_prob(logit).diff() >= 0).all()
    assert float(keep_prob(torch.tensor(-14.0))) > 0
    assert float(keep_prob(torch.tensor(14.0))) < 1


def test_hard_gates_follow_from_the_random_words():
    logit = torch.linspace(-3, 3, N)
    for offset in (0, 7):
        expected = hard_gate(keep_prob(logit), words(N, offset=offset)).float()
        assert torch.equal(gates(logit, HARD, offset=offset), expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_relaxed_gate_is_above_one_half_where_the_hard_gate_is_open(beta):
    logit = torch.linspace(-5, 5, N)
    soft, hard = gates(logit, SOFT, beta=beta), gates(logit, HARD)
    u = philox.uniform(words(N)).double()
    near = (u - (1 - torch.sigmoid(logit.double()))).abs() < 1e-6  # u has 23 bits, the comparison 32
    assert near.sum() < 10
    assert torch.equal((soft > 0.5)[~near], hard.bool()[~near])


@pytest.mark.parametrize("logit", [-14.0, -2.2, 0.0, 1.5, 14.0])
def test_gates_open_with_probability_keep_prob(logit):
    tensor = torch.full((N,), logit)
    opened = sum(int(gates(tensor, HARD, step=step).sum()) for step in range(5))
    expected = float(keep_prob(torch.tensor(logit)).double())
    assert stats.binomtest(opened, 5 * N, expected).pvalue > 1e-3


def test_the_mean_of_the_relaxed_gate_is_not_keep_prob():
    soft = gates(torch.full((N,), math.log(0.1 / 0.9)), SOFT, beta=0.5)
    assert float(soft.mean()) == pytest.approx(0.127, abs=0.003)


@pytest.mark.parametrize(("logit", "beta"), [(-2.2, 0.5), (0.3, 0.5), (1.0, 2.0), (3.0, 0.2)])
def test_the_relaxed_gate_has_the_distribution_of_the_two_class_gumbel_softmax(logit, beta):
    soft = gates(torch.full((N,), logit), SOFT, beta=beta)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classes = torch.tensor([logit, 0.0]).expand(N, 2)
        gumbel = F.gumbel_softmax(classes, tau=beta)[:, 0]
    assert stats.ks_2samp(soft.numpy(), gumbel.numpy()).pvalue > 1e-3


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(6, 5, generator=generator).to(dtype).requires_grad_()
    logit = (2 * torch.randn(6, 5, generator=generator)).requires_grad_()
    std = (0.1 + torch.rand(6, 5, generator=generator)).requires_grad_()
    return mean, logit, std


def draw(mean: torch.Tensor, logit: torch.Tensor, std: torch.Tensor | None, mode: str) -> torch.Tensor:
    return sample(mean, logit, std, seed=SEED, step=STEP, offset=9, mode=mode, beta=0.5)


def gradients(mode: str, values: tuple[torch.Tensor | None, ...], weight: torch.Tensor) -> list[torch.Tensor]:
    tensors = [v for v in values if v is not None]
    return list(torch.autograd.grad((weight * draw(*values, mode)).sum(), tensors))


@pytest.mark.parametrize("wide", [True, False], ids=["std", "no std"])
def test_gradients_of_the_relaxed_sample_agree_with_finite_differences(wide):
    mean, logit, std = inputs()
    values = (mean, logit, std if wide else None)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    for place, gradient in enumerate(gradients(SOFT, values, weight)):
        for i in range(30):
            moved = []
            for h in (1e-2, -1e-2):
                other = [None if v is None else v.detach().clone() for v in values]
                other[place].reshape(-1)[i] += h
                moved.append(draw(*other, SOFT).reshape(-1)[i].double())
            difference = (moved[0] - moved[1]) / 2e-2 * weight.reshape(-1)[i]
            assert float(gradient.reshape(-1)[i]) == pytest.approx(float(difference), rel=2e-3, abs=2e-4)


def test_straight_through_is_hard_forward_and_soft_backward():
    mean, logit, std = inputs()
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(mean, logit, std, STRAIGHT_THROUGH), draw(mean, logit, std, HARD))
    through, soft, hard = (gradients(mode, (mean, logit, std), weight) for mode in (STRAIGHT_THROUGH, SOFT, HARD))
    assert torch.equal(through[0], hard[0])
    assert torch.equal(through[1], soft[1])
    assert torch.equal(through[2], hard[2])
    assert (hard[1] == 0).all()
    open_gate = draw(torch.ones(6, 5), logit, None, HARD)
    assert torch.equal(hard[0], weight * open_gate)


def test_one_std_for_a_whole_tensor_gets_the_sum_of_the_gradients():
    mean, logit, _ = inputs()
    single = torch.tensor(0.3, requires_grad=True)
    per_weight = torch.full((6, 5), 0.3, requires_grad=True)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(mean, logit, single, SOFT), draw(mean, logit, per_weight, SOFT))
    to_single = gradients(SOFT, (mean, logit, single), weight)[2]
    to_each = gradients(SOFT, (mean, logit, per_weight), weight)[2]
    assert to_single.shape == ()
    assert torch.allclose(to_single, to_each.sum(), rtol=1e-5)


@pytest.mark.parametrize("mode", [SOFT, STRAIGHT_THROUGH, HARD])
def test_lower_precision_means_keep_their_type(mode):
    mean, logit, std = inputs(torch.bfloat16)
    out = draw(mean, logit, std, mode)
    assert out.dtype == torch.bfloat16
    to_mean, to_logit, _ = torch.autograd.grad(out.float().sum(), (mean, logit, std))
    assert to_mean.dtype == torch.bfloat16
    assert to_logit.dtype == torch.float32


@pytest.mark.parametrize("mode", [SOFT, STRAIGHT_THROUGH, HARD])
def test_backward_saves_only_the_inputs_and_makes_the_noise_again(mode):
    mean = torch.randn(1000, requires_grad=True)
    logit = torch.randn(1000, requires_grad=True)
    std = torch.full((1000,), 0.1, requires_grad=True)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = sample(mean, logit, std, seed=SEED, step=STEP, offset=0, mode=mode, beta=0.5)
    assert set(saved) <= {t.data_ptr() for t in (mean, logit, std, SEED, STEP)}
    torch.rand(10)  # nothing random is consumed or needed
    first = torch.autograd.grad(out.sum(), mean, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), mean)[0])


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    mean, logit, std = inputs()
    draw(mean, logit, std, SOFT).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_the_slab_is_the_mean_plus_std_times_the_slab_streams_normals():
    mean, logit, std = (t.detach() for t in inputs())
    z = philox.normal(30, seed=5, step=3, stream=philox.SLAB, offset=9).reshape(6, 5)
    gate = draw(torch.ones(6, 5), logit, None, HARD)
    assert torch.allclose(draw(mean, logit, std, HARD), gate * (mean + std * z), rtol=1e-6)


def test_a_gradient_of_the_gradient_can_be_taken():
    mean, logit, _ = inputs()
    first = torch.autograd.grad(draw(mean, logit, None, SOFT).square().sum(), mean, create_graph=True)[0]
    soft = draw(torch.ones(6, 5), logit, None, SOFT)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), mean)[0], 2 * soft**2)


def test_frozen_inputs_cost_no_gradient():
    mean, logit, std = inputs()
    for frozen in (mean, logit, std):
        frozen.requires_grad_(False)
        out = draw(mean, logit, std, SOFT)
        trainable = [t for t in (mean, logit, std) if t.requires_grad]
        assert all(g is not None for g in torch.autograd.grad(out.sum(), trainable))
        frozen.requires_grad_(True)
    part = SampleInputs(mean, logit, std, SEED, STEP, 9)
    assert kernels.gradients(part, Law(), torch.ones(6, 5), (False, False, False)) == (None, None, None)


def test_inputs_that_cannot_be_drawn_are_refused_in_one_sentence():
    p = quantised(torch.rand(4, 3))
    scalar, per_member = torch.tensor(1), torch.arange(3)
    with pytest.raises(ValueError, match="'hard', not 'concrete'"):
        kernels.draw([SampleInputs(p, p, None, scalar, scalar, 0)], Law(GIVEN))
    with pytest.raises(ValueError, match=r"3 members need means of shape \[3, ...\], not \[4, 3\]"):
        kernels.draw([SampleInputs(p, p, None, per_member, scalar, 0)], Law())
    with pytest.raises(ValueError, match=r"\[3, 4\] members"):
        kernels.draw([SampleInputs(p, p, None, per_member, torch.arange(4), 0)], Law())
    with pytest.raises(ValueError, match="have no gradient"):
        kernels.sample(SampleInputs(p, p, None, per_member, scalar, 0, shared=True), Law())


def test_the_environment_can_select_the_reference(monkeypatch):
    monkeypatch.setenv("PACPRUNE_KERNELS", "reference")
    assert kernels.backend("cpu") == "reference"
    assert "PACPRUNE_KERNELS" in kernels.status("cpu")
    monkeypatch.setenv("PACPRUNE_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast'; set it to 'auto' or 'reference'"):
        kernels.backend("cpu")
    monkeypatch.setenv("PACPRUNE_KERNELS", "auto")
    assert kernels.backend("meta") == "reference"
    assert "'meta'" in kernels.status("meta")


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_the_operators_pass_torchs_opcheck():
    mean, logit, std = inputs()
    values = [t.detach() for t in (torch.ones(6, 5), mean, logit, std)]
    for mode, noise in ((SOFT, None), (THRESHOLDED, torch.tensor(0.5))):
        counters = (SEED, STEP, torch.tensor(0.1), torch.tensor(2.0), noise)
        static = (9, None, "sigmoid", 0.0, mode, 0.5, False, 0.25)
        torch.library.opcheck(torch.ops.pacprune.sample.default, (mean, logit, std, *counters, *static))
        torch.library.opcheck(
            torch.ops.pacprune.sample_gradient.default, (*values, *counters, *static, [True, False, True])
        )
