"""Inputs of layers on calibration data, the criteria that need them, and one layer's solvers, each against a plain one.

The plain implementations work on the unfolded inputs with loops and explicit inverses, in float64.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pacprune as pp
from pacprune.masking import calibration, masks, patterns, solvers
from pacprune.masking.solvers import SOLVERS, Target

CONVOLUTIONS = {
    "1 dimension": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), (5, 4, 11)),
    "2 dimensions": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(1, 0)), (5, 3, 7, 8)),
    "3 dimensions": (lambda: nn.Conv3d(2, 4, 2, padding=1), (3, 2, 4, 3, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 5, 5)),
    "by channel": (lambda: nn.Conv2d(4, 8, 3, groups=4), (5, 4, 6, 5)),
    "same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (2, 3, 7, 6)),
    "valid": (lambda: nn.Conv1d(3, 4, 3, padding="valid"), (2, 3, 7)),
    "reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 7, 6)),
    "circular": (lambda: nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"), (2, 3, 7)),
    "one example": (lambda: nn.Conv2d(3, 4, 3), (3, 7, 6)),
}


class Recorder:
    """A measure that keeps the inputs themselves."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs)
        return inputs.sum(1)


def the_layer(module: nn.Module) -> calibration.Layer:
    (layer,) = calibration.layers_of(module)["weight"]
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_is_its_matrix_times_its_unfolded_inputs(case: str) -> None:
    make, shape = CONVOLUTIONS[case]
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    layer = the_layer(module)
    matrix, inputs = layer.matrix(module.weight.detach()), layer.features(x)
    outputs = (inputs @ matrix.mT).movedim(0, 1).flatten(1)  # [examples and places, channels]
    with torch.no_grad():
        expected = module(x if x.ndim == len(module.kernel_size) + 2 else x[None]) - module.bias.reshape(
            -1, *[1] * len(module.kernel_size)
        )
    torch.testing.assert_close(outputs, expected.movedim(1, -1).flatten(0, -2))
    assert torch.equal(layer.stored(matrix), module.weight)


def test_patches_are_those_of_torchs_unfold() -> None:
    module, x = nn.Conv2d(3, 4, (2, 3), stride=2, padding=1, dilation=(2, 1)), torch.randn(5, 3, 9, 8)
    expected = F.unfold(x, (2, 3), dilation=(2, 1), padding=1, stride=2).movedim(1, 2).flatten(0, 1)
    assert torch.equal(the_layer(module).features(x)[0], expected)


def test_the_layer_of_gpt2_stores_its_weight_the_other_way_round() -> None:
    transformers = pytest.importorskip("transformers")
    module = transformers.pytorch_utils.Conv1D(6, 4).double()  # 4 inputs, 6 outputs
    layer, x = the_layer(module), torch.randn(2, 5, 4, dtype=torch.float64)
    assert (layer.transposed, layer.inputs) == (True, 4)
    matrix = layer.matrix(module.weight.detach())
    assert matrix.shape == (1, 6, 4)
    torch.testing.assert_close((layer.features(x) @ matrix.mT)[0], (module(x) - module.bias).flatten(0, 1))
    assert torch.equal(layer.stored(matrix), module.weight)


class Mixed(nn.Module):
    """Layers that share an input, a layer that is called by name, a weight with two readers, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.named = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.named.weight
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(torch.relu(self.first(x) + self.second(x))))
        return self.again(torch.relu(self.named(input=h)))


def inputs_by_hand(model: Any, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        model.eval()
        h = model.norm(torch.relu(model.first(x) + model.second(x)))
        both = torch.cat([h, torch.relu(model.named(h))])
    model.train()
    return {"first.weight": x, "second.weight": x, "named.weight": both}


def test_inputs_are_those_of_eval_mode_over_all_batches_and_readers() -> None:
    model, x = Mixed(), torch.randn(600, 6)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    layers = calibration.layers_for(model, dict(pp.prunable(model)))
    sums = calibration.sums_of(
        model, (x, torch.zeros(600)), layers, calibration.second_moments, forward=None, examples=600
    )
    for name, inputs in inputs_by_hand(model, x).items():
        torch.testing.assert_close(sums[name][0], inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_input_that_is_written_to_between_two_layers_is_another() -> None:
    class InPlace(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            first = self.first(x)
            return first + self.second(x.mul_(2))

    model, x = InPlace(), torch.randn(40, 6)
    scores = pp.scores.wanda(
        model,
        (x, torch.zeros(40)),
        prunable=lambda m: {f"{n}.weight": getattr(m, n).weight for n in ("first", "second")},
    )
    for name, times in (("first.weight", 1), ("second.weight", 2)):
        torch.testing.assert_close(scores[name], model.get_parameter(name).abs() * times * x.norm(dim=0))


def whole_numbers(model: nn.Module) -> nn.Module:
    """The same network with weights for which sums of squares are exact in any order."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 16).round())
    return model


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_wanda_is_the_weight_times_the_norm_of_its_input_exactly(kind: str) -> None:
    layer = nn.Linear(6, 5) if kind == "linear" else nn.Conv2d(2, 5, 3, padding=1)
    x = torch.randint(-9, 9, (300, 6) if kind == "linear" else (300, 2, 4, 4)).float()
    model = nn.Sequential(whole_numbers(layer))
    scores = pp.scores.wanda(model, (x, torch.zeros(300)))["0.weight"]
    columns = x.T if kind == "linear" else F.unfold(x, 3, padding=1).movedim(1, 0).flatten(1)
    expected = layer.weight.detach().clone().flatten(1)
    for j, column in enumerate(columns):
        expected[:, j] = expected[:, j].abs() * torch.sqrt(sum((v * v).sum() for v in column.split(100)))
    assert torch.equal(scores, expected.reshape(scores.shape))


def test_examples_and_forward_say_what_is_calibrated_on() -> None:
    model, x = nn.Linear(6, 5), torch.randn(64, 6)
    scores = pp.scores.wanda(model, (x, torch.zeros(64)), examples=10)["weight"]
    assert torch.allclose(scores, model.weight.abs() * x[:10].norm(dim=0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=8)
    assert torch.allclose(pp.scores.wanda(model, loader, examples=10)["weight"], scores)

    def twice(model: nn.Module, batch: Any) -> Tensor:
        return model(2 * batch[0])

    assert torch.allclose(pp.scores.wanda(model, loader, forward=twice, examples=10)["weight"], 2 * scores)


@pytest.mark.parametrize("dead", [0, 2])
def test_the_score_of_sparsegpt_is_what_pruning_costs_when_its_row_makes_up_for_it(dead: int) -> None:
    model, x = nn.Linear(6, 5).double(), correlated(200, 6)
    x[:, :dead] = 0
    scores = pp.scores.sparsegpt(model, (x, torch.zeros(200)), damping=0.01)["weight"]
    moments = x.T @ x
    moments += 0.01 * moments.diagonal().mean() * torch.eye(6, dtype=x.dtype)
    for row, weights in enumerate(model.weight.detach()):
        for j in range(6):
            rest = [i for i in range(6) if i != j]
            # min over v of v'Hv with v_j = w_j: the other weights answer as well as they can.
            answer = -torch.linalg.solve(moments[rest][:, rest], moments[rest, j] * weights[j])
            change = torch.zeros(6, dtype=x.dtype)
            change[j], change[rest] = weights[j], answer
            cost = 0.0 if j < dead else float(change @ moments @ change)
            assert float(scores[row, j]) == pytest.approx(cost, rel=1e-9)


# --- Solvers.


def correlated(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Inputs that depend on each other, of different sizes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    mixing = torch.randn(width, width, generator=g, dtype=torch.float64) / width**0.5
    sizes = torch.logspace(-1, 0.5, width, dtype=torch.float64)[torch.randperm(width, generator=g)]
    return (x @ (mixing + 0.1 * torch.ones(width, width))) * sizes


def eliminated(
    weight: Tensor, moments: Tensor, *, zeros: int, pattern: tuple[int, int] | None, damping: float, columns: int
) -> tuple[Tensor, Tensor]:
    """SparseGPT by its definition: input after input, with the inverse of what is left of H by Gaussian elimination."""
    weight, width = weight.clone(), weight.shape[1]
    dead = moments.diagonal() == 0
    damped = moments + damping * moments.diagonal().mean() * torch.eye(width, dtype=weight.dtype)
    inverses, inverse = [], torch.linalg.inv(damped)
    for _ in range(width):
        inverses.append(inverse.clone())
        j = len(inverses) - 1
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    keep = torch.ones_like(weight, dtype=torch.bool)

    def costs(first: int, last: int) -> Tensor:
        """w_j^2 / [H_j^-1]_jj of these inputs, where H_j is what is left of H at input j."""
        table = torch.empty(len(weight), last - first, dtype=weight.dtype)
        for j in range(first, last):
            table[:, j - first] = weight[:, j] ** 2 / inverses[j][j, j]
            if dead[j]:
                table[:, j - first] = -1 / (1 + weight[:, j].abs())
        return table

    for j in range(width):
        if pattern is None and j % columns == 0:
            last = min(j + columns, width)
            least = zeros * last // width - zeros * j // width
            order = costs(j, last).flatten().argsort()[:least]
            keep[:, j:last] = (
                torch.ones(len(weight) * (last - j)).bool().scatter_(0, order, False).reshape(-1, last - j)
            )
        if pattern is not None and j % pattern[1] == 0:
            worst = costs(j, j + pattern[1]).argsort(dim=1)[:, : pattern[1] - pattern[0]]
            keep[:, j : j + pattern[1]].scatter_(1, worst, False)
        for row in (~keep[:, j]).nonzero().flatten().tolist():
            step = inverses[j][j, j:] * (weight[row, j] / inverses[j][j, j])
            weight[row, j:] -= step
            weight[row, j] = 0.0
    return weight, keep


@pytest.mark.parametrize("dead", [(), (3, 17)])
@pytest.mark.parametrize("goal", [0.5, 0.73, "2:4", "4:8", "1:4"])
def test_sparsegpt_is_elimination_input_by_input(goal: float | str, dead: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(solvers, "COLUMNS", 16)
    x, weight = correlated(300, 40), torch.randn(7, 40, dtype=torch.float64)
    x[:, list(dead)] = 0
    moments = x.T @ x
    pattern = patterns.parse(goal) if isinstance(goal, str) else None
    kept = 280 * pattern[0] // pattern[1] if pattern else round((1 - float(goal)) * 280)
    result, keep = solvers.sparsegpt(weight[None], moments[None], Target(kept, pattern, 0.01))
    expected = eliminated(weight, moments, zeros=280 - kept, pattern=pattern, damping=0.01, columns=16)
    assert torch.equal(keep[0], expected[1])
    torch.testing.assert_close(result[0], expected[0], rtol=1e-9, atol=1e-10)
    assert int(keep.sum()) == kept
    assert torch.equal(result != 0, keep)
    for j in dead:  # pruned first, and not changed where kept
        assert torch.equal(result[0, keep[0, :, j], j], weight[keep[0, :, j], j])
    narrow, _ = solvers.sparsegpt(weight[None].float(), moments[None].float(), Target(kept, pattern, 0.01))
    if not dead:
        torch.testing.assert_close(narrow[0].double(), expected[0], rtol=1e-3, atol=1e-3)


def error(change: Tensor, moments: Tensor) -> float:
    return float((change @ moments * change).sum())


@pytest.mark.parametrize("goal", [0.5, 0.8, "2:4", "4:8"])
def test_solvers_that_do_more_leave_less_error(goal: float | str) -> None:
    x, weight = correlated(2000, 64), torch.randn(48, 64, dtype=torch.float64)
    moments = x.T @ x
    pattern = patterns.parse(goal) if isinstance(goal, str) else None
    kept = weight.numel() * pattern[0] // pattern[1] if pattern else round((1 - float(goal)) * weight.numel())
    errors = {}
    for name, solver in SOLVERS.items():
        sums = torch.empty(0) if solver.measure is None else solver.measure(x[None])
        result, keep = solver.solve(weight[None], sums, Target(kept, pattern, 0.01))
        assert int(keep.sum()) == kept
        assert not result[~keep].any()
        if pattern:
            assert (keep.unflatten(-1, (-1, pattern[1])).sum(-1) == pattern[0]).all()
        errors[name] = error(result[0] - weight, moments)
    assert list(errors) == ["magnitude", "wanda", "sparsegpt", "alps"]
    values = list(errors.values())
    assert values == sorted(values, reverse=True)


def test_alps_ends_with_the_best_weights_of_its_support() -> None:
    x, weight = correlated(500, 24), torch.randn(6, 24, dtype=torch.float64)
    moments = x.T @ x
    result, keep = solvers.alps(weight[None], moments[None], Target(72, None, 0.01))
    damped = solvers.damped(moments[None], 0.01)[0]
    for row, support, values in zip(weight, keep[0], result[0], strict=True):
        best = torch.linalg.solve(damped[support][:, support], (damped @ row)[support])
        torch.testing.assert_close(values[support], best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_groups_of_a_convolution_are_solved_by_themselves(solver: str) -> None:
    row, target = SOLVERS[solver], Target(2 * 15, (2, 4), 0.01)
    weight = torch.randn(2, 5, 12, dtype=torch.float64)
    x = torch.stack([correlated(200, 12, seed) for seed in range(2)])
    sums = torch.empty(0) if row.measure is None else row.measure(x)
    both, _ = row.solve(weight, sums, target)
    for g in range(2):
        one, _ = row.solve(weight[g : g + 1], sums[g : g + 1], Target(30, (2, 4), 0.01))
        torch.testing.assert_close(both[g : g + 1], one)


def test_inputs_that_are_always_zero_lose_their_smallest_weights_first() -> None:
    weight = torch.tensor([[[3.0, 1.0, 2.0, 1e-3]]], dtype=torch.float64)
    x = torch.tensor([[[0.0, 0.0, 0.0, 1.0]]], dtype=torch.float64)
    for name in ("wanda", "sparsegpt", "alps"):
        row = SOLVERS[name]
        result, keep = row.solve(weight, row.measure(x), Target(2))
        assert keep.tolist() == [[[True, False, False, True]]]
        torch.testing.assert_close(result, weight * keep)
        nothing, kept = row.solve(weight, row.measure(0 * x), Target(2))
        assert (int(kept.sum()), bool(torch.isfinite(nothing).all())) == (2, True)
        assert kept[0, 0, 0]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kept", [0, 1, 83, 84])
def test_any_number_of_weights_can_be_kept(solver: str, kept: int) -> None:
    row, x = SOLVERS[solver], correlated(100, 12)[None]
    weight = torch.randn(1, 7, 12, dtype=torch.float64)
    result, keep = row.solve(weight, torch.empty(0) if row.measure is None else row.measure(x), Target(kept))
    assert int(keep.sum()) == kept
    if kept == 84:
        torch.testing.assert_close(result, weight, rtol=1e-3, atol=1e-3)


def test_inputs_that_depend_on_each_other_need_damping() -> None:
    x = torch.randn(20, 4, dtype=torch.float64)
    x[:, 3] = x[:, :3].sum(1)
    moments = (x.T @ x)[None]
    moments[0, 3, 3] -= 1e-3  # as rounding could
    with pytest.raises(ValueError, match=r"damping=0 leaves H without an inverse; take more, such as damping=0\.01"):
        solvers.sparsegpt(torch.randn(1, 2, 4, dtype=torch.float64), moments, Target(4, None, 0.0))
    with pytest.raises(ValueError, match="damping=0 leaves H without"):
        solvers.inverse_diagonal(moments, 0.0)


def test_rows_of_wanda_keep_the_same_number() -> None:
    x, weight = correlated(100, 16), torch.randn(1, 6, 16, dtype=torch.float64)
    _, keep = solvers.wanda(weight, calibration.squares(x[None]), Target(6 * 5))
    assert keep.sum(-1).tolist() == [[5] * 6]
    _, keep = solvers.wanda(weight, calibration.squares(x[None]), Target(6 * 5 + 2))
    assert sorted(keep.sum(-1)[0].tolist()) == [5, 5, 5, 5, 6, 6]
    assert masks.largest(weight, 3).sum() == 3


def test_scores_leave_a_deep_copy_equal() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(30, 6)
    again = copy.deepcopy(model)
    for name in ("wanda", "sparsegpt"):
        first = pp.scores.score(name, model, (x, torch.zeros(30)))
        second = pp.scores.score(name, again, (x, torch.zeros(30)))
        assert all(torch.equal(first[key], second[key]) for key in first)
