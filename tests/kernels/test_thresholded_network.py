"""A whole network under its threshold in few launches: the same numbers as tensor by tensor in plain torch."""

import pytest
import torch
from torch import Tensor

from pacprune import kernels
from pacprune.kernels import Law, SampleInputs, reference
from pacprune.masking import masks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAW = Law(coupling=4.0, mode=kernels.THRESHOLDED, beta=1.0, theta=0.5)
SHAPES = ((7, 5, 3, 3), (10, 7), (33, 40), (3, 5000), (64, 64))
DENSITIES = (0.1, 0.25, 1.0)


class Case:
    """Random tensors, the network over them, and what plain torch makes of them."""

    def __init__(
        self, *, members: bool = False, channels_last: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        lead = (len(DENSITIES),) if members else ()

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(*lead, *shape, device="cuda", generator=generator)

        self.members = members
        self.rows = [(0.1 * normal(shape)).to(dtype) for shape in SHAPES]
        self.rows[1][..., 0] = 0
        if channels_last:
            self.rows[0] = self.rows[0].to(memory_format=torch.channels_last)
        self.weights = [row.clone() for row in self.rows]
        self.trained = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in self.rows]
        self.gates = [0.3 * normal(shape) for shape in SHAPES]
        self.keeps = [torch.zeros_like(row, dtype=torch.bool) for row in self.rows]
        density = torch.tensor(DENSITIES, dtype=torch.float64, device="cuda")
        self.density = density if members else density[1]
        self.shift = torch.zeros(lead, device="cuda")
        self.sharpness = torch.full(lead, 2.0, device="cuda")
        self.gradients = [
            normal(shape).to(dtype).as_strided(row.shape, row.stride())
            for shape, row in zip(SHAPES, self.rows, strict=True)
        ]
        self.network = kernels.thresholded_network(
            rows=self.rows,
            trained=self.trained,
            gates=self.gates,
            keeps=self.keeps,
            density=self.density,
            shift=self.shift,
            sharpness=self.sharpness,
            law=LAW,
            members=members,
        )

    def inputs(self, i: int) -> SampleInputs:
        counter = torch.zeros(self.shift.shape, dtype=torch.int64, device="cuda")
        common = {"shift": self.shift, "sharpness": self.sharpness, "seed": counter, "step": counter}
        return SampleInputs(mean=self.weights[i].contiguous(), gate=self.gates[i], std=None, offset=0, **common)

    def limited(self, i: int, gradient: Tensor, limit: float, scale: float) -> Tensor:
        """The gradient in the weights with the limit, as its definition says."""
        (shown,) = reference.draw([self.inputs(i)], LAW)
        axes = tuple(range(2 if self.members else 1, gradient.ndim))
        below = gradient.float().masked_fill(shown != 0, 0)
        norm = torch.linalg.vector_norm(self.weights[i].float(), dim=axes, keepdim=True).clamp_min(1e-3)
        share = (scale * limit * norm / torch.linalg.vector_norm(below, dim=axes, keepdim=True)).clamp_max(1)
        return torch.addcmul(gradient.float(), below, share - 1)


CASES = {
    "one model": {},
    "members": {"members": True},
    "channels last": {"channels_last": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return Case(**request.param)


def test_the_threshold_leaves_exactly_the_asked_number_of_weights(case: Case) -> None:
    case.network.show()
    for k, density in enumerate(case.density.reshape(-1).tolist()):
        keeps = [keep[k] if case.members else keep for keep in case.keeps]
        rows = [row[k] if case.members else row for row in case.rows]
        size = sum(keep.numel() for keep in keeps)
        zeros = sum(int((w == 0).sum()) for w in ([x[k] for x in case.weights] if case.members else case.weights))
        kept = sum(int(keep.sum()) for keep in keeps)
        assert kept == min(round(density * size), size - (zeros if density == 1 else 0))
        assert all(torch.equal(keep, row != 0) for keep, row in zip(keeps, rows, strict=True))


def test_the_threshold_is_that_of_plain_torch(case: Case) -> None:
    case.network.show()
    scores = [kernels.raw(LAW, w.contiguous().float(), g) for w, g in zip(case.weights, case.gates, strict=True)]
    torch.testing.assert_close(case.shift, masks.threshold(scores, case.density, members=case.members))


def test_weights_are_shrunk_as_by_plain_torch_and_kept_as_trained(case: Case) -> None:
    case.network.show()
    expected = reference.draw([case.inputs(i) for i in range(len(SHAPES))], LAW)
    for row, value, weight, trained in zip(case.rows, expected, case.weights, case.trained, strict=True):
        torch.testing.assert_close(row, value, rtol=1e-2 if row.dtype == torch.bfloat16 else 1e-4, atol=1e-6)
        assert torch.equal(trained, weight)


def test_the_network_is_computed_again_to_the_bit(case: Case) -> None:
    case.network.show()
    assert all(torch.equal(a, b) for a, b in zip(case.network.network(), case.rows, strict=True))


@pytest.mark.parametrize("limit", [None, 0.1])
def test_gradients_are_those_of_plain_torch(case: Case, limit: float | None) -> None:
    case.network.show()
    before = [gradient.clone() for gradient in case.gradients]
    to_gates = case.network.room()
    given = [case.gradients[0], None, *case.gradients[2:]]
    assert case.network.convert(given, to_gates, limit=limit, least=1e-3, scale=2.0)
    assert torch.equal(case.gradients[1], before[1])
    for i in (0, 2, 3, 4):
        to_weight, to_gate, _ = reference.gradients(case.inputs(i), LAW, before[i].contiguous(), (True, True, False))
        expected = to_weight if limit is None else case.limited(i, to_weight, limit, 2.0)
        loose = {"rtol": 2e-2, "atol": 2e-3} if before[i].dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(case.gradients[i].float(), expected.float(), **loose)
        torch.testing.assert_close(to_gates[i], to_gate / 2, rtol=1e-3, atol=1e-6)


def test_a_graph_replays_a_step_with_gradients_in_other_memory() -> None:
    case, eager = Case(), Case()
    to_gates = case.network.room()
    case.network.show()
    case.network.convert([g.clone() for g in case.gradients], to_gates, limit=0.1, least=1e-3, scale=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = [g * 1.0 for g in case.gradients]
        case.network.convert(gradients, to_gates, limit=0.1, least=1e-3, scale=1.0)
    graph.replay()
    eager.network.show()
    eager.network.convert(eager.gradients, eager.network.room(), limit=0.1, least=1e-3, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients, eager.gradients, strict=True))


def test_memory_that_no_kernel_reads_is_left_to_plain_torch() -> None:
    case = Case()
    odd = [torch.randn(*row.shape[::-1], device="cuda").permute(*range(row.ndim)[::-1]) for row in case.rows]
    case.network.show()
    before = [gradient.clone() for gradient in odd]
    assert not case.network.convert(odd, [], limit=None, least=1e-3, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(odd, before, strict=True))
