"""The optimiser with rates on the device: torch.optim's formulas, a rate for every member, and its stored state."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.training.optim import OPTIMIZERS, Group, Optimizer
from pacprune.training.step import _order

SHAPES = ((3, 4), (4,), (2, 3, 2), ())
STEPS = 6
EXACT = [name for name in OPTIMIZERS if name != "adamw8"]
"""What has the formulas of torch.optim."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-7}  # rates are float32


def make_parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int, like: list[nn.Parameter], member: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 * member + step + 1)
    return [torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) for p in like]


def reference(kind: str, groups: list[dict]) -> torch.optim.Optimizer:
    """The optimiser of torch.optim, whose Adam calls momentum beta1."""
    if kind == "sgd":
        return torch.optim.SGD(groups)
    renamed = [{**g, "betas": (g["momentum"], 0.999)} for g in groups]
    for group in renamed:
        del group["momentum"]
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](renamed)


def single_rate_group(params: list[nn.Parameter], lr: float, momentum: float, decay: float) -> Group:
    return Group(params, [lr], [momentum], [decay], True, torch.tensor(lr))


def group_with_rates(params: list[nn.Parameter], lr: list[float], momentum: list[float], decay: list[float]) -> Group:
    return Group(params, lr, momentum, decay, True, torch.tensor(lr))


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    close = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", EXACT)
def test_a_step_with_one_rate_equals_torchs(kind: str, momentum: float, decay: float, dtype: torch.dtype) -> None:
    pacprune_params, torch_params = make_parameters(dtype), make_parameters(dtype)
    # Two groups, and a parameter that never has a gradient.
    optimizer = Optimizer(
        kind,
        [
            single_rate_group(pacprune_params[:2], 0.05, momentum, decay),
            single_rate_group(pacprune_params[2:], 0.5, momentum, 0.0),
        ],
    )
    other = reference(
        kind,
        [
            {"params": torch_params[:2], "lr": 0.05, "momentum": momentum, "weight_decay": decay},
            {"params": torch_params[2:], "lr": 0.5, "momentum": momentum, "weight_decay": 0.0},
        ],
    )
    for step in range(STEPS):
        for params in (pacprune_params, torch_params):
            for p, grad in zip(params, gradients(step, params), strict=True):
                p.grad = grad
            params[1].grad = None
            if step < 2:
                params[2].grad = None  # its running means begin when it first has a gradient
        optimizer.step()
        other.step()
    for a, b in zip(pacprune_params, torch_params, strict=True):
        assert_equal(a, b)
    assert torch.equal(pacprune_params[1], make_parameters(dtype)[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", EXACT)
def test_every_members_steps_equal_torchs(kind: str, dtype: torch.dtype) -> None:
    rates, momenta, decays = [0.3, 0.01, 0.0], [0.9, 0.0, 0.5], [0.0, 0.1, 0.2]
    alone = [make_parameters(dtype, seed=k) for k in range(3)]
    whole = [nn.Parameter(torch.stack([a.detach() for a in copies])) for copies in zip(*alone, strict=True)]
    population_optimizer = Optimizer(kind, [group_with_rates(whole, rates, momenta, decays)])
    others = [
        reference(kind, [{"params": params, "lr": lr, "momentum": m, "weight_decay": d}])
        for params, lr, m, d in zip(alone, rates, momenta, decays, strict=True)
    ]
    for step in range(STEPS):
        for k, params in enumerate(alone):
            for p, grad in zip(params, gradients(step, params, k), strict=True):
                p.grad = grad
        for p, copies in zip(whole, zip(*alone, strict=True), strict=True):
            p.grad = torch.stack([a.grad for a in copies if a.grad is not None])
        for optimizer in (population_optimizer, *others):
            optimizer.step()
    for p, copies in zip(whole, zip(*alone, strict=True), strict=True):
        for k, a in enumerate(copies):
            assert_equal(p[k], a)


@pytest.mark.parametrize("kind", EXACT)
def test_one_rate_for_all_and_equal_rates_for_each_agree(kind: str) -> None:
    fused, separate = [[nn.Parameter(torch.stack([p.detach()] * 2)) for p in make_parameters()] for _ in range(2)]
    two = [0.9] * 2
    pair = (
        Optimizer(kind, [Group(fused, [0.1] * 2, two, [0.01] * 2, True, torch.tensor(0.1))]),
        Optimizer(kind, [group_with_rates(separate, [0.1] * 2, two, [0.01] * 2)]),
    )
    for step in range(STEPS):
        for params in (fused, separate):
            for p, grad in zip(params, gradients(step, params), strict=True):
                p.grad = grad
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(fused, separate, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("several_rates", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_a_new_rate_is_read_from_its_tensor(kind: str, several_rates: bool) -> None:
    pacprune_params, torch_params = make_parameters(), make_parameters()
    if several_rates:
        pacprune_params = [nn.Parameter(p.detach()[None].clone()) for p in pacprune_params]
    rate = torch.zeros(1 if several_rates else ())
    optimizer = Optimizer(kind, [Group(pacprune_params, [0.1], [0.9], [0.01], True, rate)])
    other = reference(kind, [{"params": torch_params, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}])
    for step in range(STEPS):
        rate.fill_(0.1 / (1 + step))
        other.param_groups[0]["lr"] = 0.1 / (1 + step)
        for p, q, grad in zip(pacprune_params, torch_params, gradients(step, torch_params), strict=True):
            p.grad, q.grad = grad.reshape(p.shape).clone(), grad
        optimizer.step()
        other.step()
    for p, q in zip(pacprune_params, torch_params, strict=True):
        assert_equal(p.reshape(q.shape), q)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", EXACT)
def test_reach_is_how_far_a_lasting_unit_of_gradient_moves_a_parameter(kind: str, momentum: float) -> None:
    params = make_parameters()
    optimizer, before = Optimizer(kind, [single_rate_group(params, 0.01, momentum, 0.0)]), []
    for _ in range(400):  # .9^400 of the start is left
        for p in params:
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in params]
        optimizer.step()
    for p, start in zip(params, before, strict=True):
        expected = 0.01 / (1 - momentum) if kind == "sgd" else 0.01
        assert torch.broadcast_to(optimizer.reach(p), p.shape) == pytest.approx(expected, rel=1e-4)
        assert start - p.detach() == pytest.approx(expected, rel=1e-3)


def test_reach_is_computed_per_member() -> None:
    params = [nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2))]
    optimizer = Optimizer("sgd", [group_with_rates(params, [0.1, 0.02], [0.9, 0.5], [0.0, 0.0])])
    assert optimizer.reach(params[0]).shape == (2, 1, 1)
    assert optimizer.reach(params[1]) == pytest.approx(torch.tensor([1.0, 0.04]))
    adam = Optimizer("adam", [group_with_rates(params, [0.1, 0.02], [0.9, 0.5], [0.0, 0.0])])
    for p in params:
        p.grad = 4 * torch.ones_like(p)  # Adam divides by the usual size of the gradient
    adam.step()
    assert adam.reach(params[0])[:, 0, 0] == pytest.approx(torch.tensor([0.025, 0.005]), rel=1e-4)


@pytest.mark.parametrize("several_rates", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_a_stored_state_resumes_to_the_bit(kind: str, several_rates: bool) -> None:
    params = [nn.Parameter(torch.randn(2, 3, generator=torch.Generator().manual_seed(0))) for _ in range(3)]
    rate = torch.tensor([0.1, 0.2]) if several_rates else torch.tensor(0.1)

    def make_optimizer(params: list[nn.Parameter]) -> Optimizer:
        return Optimizer(kind, [Group(params, [0.1, 0.2], [0.9, 0.8], [0.0, 0.0], True, rate)])

    def step(optimizer: Optimizer, number: int) -> None:
        for p, grad in zip(optimizer.groups[0].params, gradients(number, params), strict=True):
            p.grad = grad
        optimizer.groups[0].params[2].grad = None
        optimizer.step()

    optimizer = make_optimizer(params)
    for number in range(3):
        step(optimizer, number)
    stored, copied = optimizer.state_dict(), copy.deepcopy(params)
    content = copy.deepcopy(stored)
    for number in range(3, 6):
        step(optimizer, number)
    for i, state in content.items():  # the stored state does not change with the run
        assert all(torch.equal(stored[i][key], t) for key, t in state.items())
    assert set(stored) == {"0", "1"}
    again = make_optimizer(copied)
    again.load_state_dict(stored)
    for number in range(3, 6):
        step(again, number)
    assert all(torch.equal(p, q) for p, q in zip(params, copied, strict=True))


def test_zero_grad_removes_all_gradients() -> None:
    params = make_parameters()
    optimizer = Optimizer(
        "sgd", [single_rate_group(params[:2], 0.1, 0.9, 0.0), single_rate_group(params[2:], 0.1, 0.9, 0.0)]
    )
    for p, grad in zip(params, gradients(0, params), strict=True):
        p.grad = grad
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, make_parameters(), strict=True))


@pytest.mark.parametrize("several_rates", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_bfloat16_weights_and_float32_gates_share_a_group(kind: str, several_rates: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    gate = nn.Parameter(torch.ones(2, 3))
    rate = torch.tensor([0.25, 0.25]) if several_rates else torch.tensor(0.25)
    optimizer = Optimizer(kind, [Group([weight, gate], [0.25] * 2, [0.5] * 2, [0.0] * 2, True, rate)])
    for p in (weight, gate):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert weight.dtype == torch.bfloat16
    for p in (weight, gate):
        assert p.detach().float() == pytest.approx(torch.full((2, 3), 0.75), abs=1e-6)


# --- An optimiser of the user's own.


def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.02)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
LABELS = (INPUTS[:, 0] > 0).long()


def test_a_function_makes_the_optimiser_of_the_weights_and_its_rate_follows_the_schedule() -> None:
    model, expected = classifier(), classifier()
    config = pp.Config(epochs=4, batch_size=40, optimizer=factory, schedule="step")
    rows = pp.fit(model, (INPUTS, LABELS), config)
    assert [row["lr"] for row in rows] == pytest.approx([0.02, 0.02, 0.002, 0.0002])
    optimizer = factory(list(expected.parameters()))
    for row in rows:
        order = _order(40, 0, row["epoch"] - 1)
        optimizer.param_groups[0]["lr"] = row["lr"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(INPUTS[order]), LABELS[order]).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_run_with_an_optimiser_of_ones_own_goes_on_to_the_bit(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        if done == 3:
            raise KeyboardInterrupt

    config, whole, resumed = pp.Config(epochs=3, batch_size=20, optimizer=factory), classifier(), classifier()
    pp.fit(whole, (INPUTS, LABELS), config)
    with pytest.raises(KeyboardInterrupt):
        pp.fit(classifier(), (INPUTS, LABELS), config, checkpoint=tmp_path / "run", every=1, progress=stop)
    pp.fit(resumed, (INPUTS, LABELS), config, checkpoint=tmp_path / "run", every=1)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
    other = dataclasses.replace(config, optimizer=lambda params: torch.optim.NAdam(params, lr=0.03))
    with pytest.raises(ValueError, match="belongs to another run"):
        pp.fit(classifier(), (INPUTS, LABELS), other, checkpoint=tmp_path / "run", every=1)


@pytest.mark.parametrize("verb", [pp.pft, pp.gmp, pp.l0, pp.str_])
def test_methods_take_an_optimiser_of_ones_own(verb: Any) -> None:
    config = pp.Config(epochs=4, batch_size=20, optimizer=factory, clip=1.0)
    assert verb(classifier(), (INPUTS, LABELS), config, sparsity=0.5).sparsity == 0.5


def test_what_an_optimiser_of_ones_own_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr is 0\.1, but the optimizer is a function, which has its own"):
        pp.Config(lr=0.1, optimizer=factory)
    with pytest.raises(ValueError, match="execution is 'graph', but an optimizer that is a function"):
        pp.Config(execution="graph", optimizer=factory)
    with pytest.raises(ValueError, match="moves one model, but 2 are trained as a population"):
        pp.fit([classifier(), classifier()], (INPUTS, LABELS), pp.Config(optimizer=factory))
    with pytest.raises(ValueError, match="the optimizer function made a LBFGS"):
        pp.fit(classifier(), (INPUTS, LABELS), pp.Config(optimizer=lambda params: torch.optim.LBFGS(params)))
    results = pp.together(
        pp.osp, [classifier(), classifier()], (INPUTS, LABELS), pp.Config(optimizer=factory), sparsity=0.5
    )
    assert [result.sparsity for result in results] == [0.5, 0.5]


# --- The optimiser with a state of one byte.


def test_adamw8_goes_on_from_its_stored_state_to_the_bit() -> None:
    def run(params: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for p, grad in zip(params, gradients(step, params), strict=True):
                p.grad = grad
            optimizer.step()

    def make() -> tuple[list[nn.Parameter], Optimizer]:
        params = make_parameters(torch.bfloat16)
        return params, Optimizer("adamw8", [single_rate_group(params, 0.05, 0.9, 0.1)])

    whole, optimizer = make()
    run(whole, optimizer, range(6))
    params, optimizer = make()
    run(params, optimizer, range(3))
    stored, other = (
        copy.deepcopy(optimizer.state_dict()),
        Optimizer("adamw8", [single_rate_group(params, 0.05, 0.9, 0.1)]),
    )
    other.load_state_dict(stored)
    run(params, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, params, strict=True))
    # Every parameter has random numbers of its own.
    firsts = [int(state["first"]) for state in stored.values()]
    assert len(set(firsts)) == len(firsts)


def test_adamw8_says_how_far_a_unit_of_gradient_moves_a_weight() -> None:
    (p, *_), ones = make_parameters(), torch.ones(3, 4)
    optimizer = Optimizer("adamw8", [single_rate_group([p], 0.05, 0.0, 0.0)])
    before = p.detach().clone()
    p.grad = 2 * ones
    optimizer.step()
    torch.testing.assert_close(before - p.detach(), 2 * optimizer.reach(p), rtol=1e-3, atol=1e-6)


def test_adamw8_is_of_one_model() -> None:
    models = [pp.models.mlp(8, hidden=[4], seed=k) for k in range(2)]
    data = torch.randn(20, 8), torch.zeros(20, dtype=torch.long)
    with pytest.raises(ValueError, match="the optimizer 'adamw8' moves one model, but 2 are trained as a population"):
        pp.fit(models, data, pp.Config(epochs=1, optimizer="adamw8"))
    results = pp.together(
        pp.pft, models, data, pp.Config(epochs=1), recipe="frozen", pattern="2:4"
    )  # one after another
    assert [pruned.sparsity for pruned in results] == [0.5, 0.5]
