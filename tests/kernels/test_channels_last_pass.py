"""The pass that moves elementwise operations before views: the same numbers, in the order of the convolutions."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pacprune import models
from pacprune.kernels.conv.channels_last_pass import elementwise_first
from pacprune.training.population import Population


def graphs_around_pass(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[GraphModule, GraphModule]:
    """The graph of a function before and after the pass."""
    before, after = (make_fx(function, tracing_mode="fake")(*inputs) for _ in range(2))
    elementwise_first(after.graph)
    after.recompile()
    return before, after


def shapes(graph: GraphModule, name: str) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in graph.graph.nodes if name in str(node.target)]


def stacked(x: Tensor, weight: Tensor) -> Tensor:
    """The channels of three members, in the view that vmap makes."""
    return F.conv2d(x, weight, padding=1, groups=3).view(2, 3, 4, 5, 5).permute(1, 0, 2, 3, 4)


def test_elementwise_operations_run_on_images_with_channels_last() -> None:
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = stacked(x, weight)
        z = torch.relu(y * scale + 1.0) + y  # a number per channel, a plain number, and the same view again
        return F.conv2d(z.permute(1, 0, 2, 3, 4).reshape(2, 12, 5, 5), weight, padding=1, groups=3)

    inputs = torch.randn(2, 12, 5, 5), torch.randn(12, 4, 3, 3), torch.randn(3, 1, 4, 1, 1)
    before, after = graphs_around_pass(function, *inputs)
    torch.testing.assert_close(after(*inputs), before(*inputs))
    for name in ("relu", "add", "mul"):
        assert set(shapes(before, name)) == {(3, 2, 4, 5, 5)}
        assert set(shapes(after, name)) == {(50, 12)}
    last = [node for node in after.graph.nodes if "convolution" in str(node.target)][-1]
    assert last.args[0].args[0].args[0].meta["val"].shape == (50, 12)  # the views that undid each other are gone


def test_operations_on_different_views_slices_and_copies_are_not_moved() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = stacked(x, weight)
        turned = y + y.transpose(3, 4)  # two different views of one tensor
        folded = torch.relu(y.reshape(3, -1))  # a reshape that has to copy
        return turned.sum() + folded.sum() + torch.relu(y[:, :1]).sum()

    inputs = torch.randn(2, 12, 5, 5), torch.randn(12, 4, 3, 3)
    before, after = graphs_around_pass(function, *inputs)
    torch.testing.assert_close(after(*inputs), before(*inputs))


def test_a_graph_without_convolutions_is_left_alone() -> None:
    x = torch.randn(2, 12, 5, 5)
    before, after = graphs_around_pass(lambda x: torch.relu(x.view(2, 3, 4, 5, 5).permute(1, 0, 2, 3, 4)), x)
    assert [node.target for node in after.graph.nodes] == [node.target for node in before.graph.nodes]


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("separate", [True, False], ids=["own data", "shared data"])
def test_a_compiled_population_of_residual_networks_equals_the_plain_one(separate: bool) -> None:
    class Net(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.first, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.block, self.out = models.resnet20(seed=seed)[6], nn.Linear(32, 3)  # strided, with a wider shortcut
            self.wide = nn.Conv2d(4, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.block(self.wide(torch.relu(self.bn(self.first(x))))).mean((2, 3)))

    def gradients(use_compiler: bool) -> list[Tensor]:
        population = Population([Net(0), Net(1)])
        population.stacked.train()
        if use_compiler:
            population.compile()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(*((2, 6) if separate else (6,)), 3, 8, 8, generator=generator)
        y = torch.randint(3, (2, 6) if separate else (6,), generator=generator)
        losses = population.losses(F.cross_entropy, x, y, separate=separate)
        losses.sum().backward()
        return [losses.detach(), *(p.grad for p in population.stacked.parameters() if p.grad is not None)]

    for compiled, plain in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
