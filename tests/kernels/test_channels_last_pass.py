"""The pass that moves elementwise operations before views: the same numbers, in the order of the convolutions."""

import importlib
import shutil
from collections.abc import Callable

import networks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import pacprune as pp
from pacprune import models
from pacprune.kernels.conv import channels_last_pass
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


def test_a_graph_that_cannot_be_rewritten_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = stacked(x, weight)
        return torch.sin(torch.relu(y) + 1.0)

    def tags(node: torch.fx.Node) -> object:
        if "sin" in str(node.target):
            raise TypeError(f"{node} is unknown")
        return getattr(node.target, "tags", ())

    inputs = torch.randn(2, 12, 5, 5), torch.randn(12, 4, 3, 3)
    monkeypatch.setattr(channels_last_pass, "_tags", tags)
    before, after = graphs_around_pass(function, *inputs)
    assert after.code == before.code
    torch.testing.assert_close(after(*inputs), before(*inputs), rtol=0, atol=0)


def test_what_depends_on_the_order_in_memory_is_left_alone() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(stacked(x, weight)).contiguous().as_strided((3, 5), (1, 2))

    before, after = graphs_around_pass(function, torch.randn(2, 12, 5, 5), torch.randn(12, 4, 3, 3))
    assert after.code == before.code


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


# --- Networks of all kinds: the graphs that the compiler would get, rewritten and run without it.

QUICK = ("residual of a transpose", "group norm", "U-Net", "as_strided", "LeNet-5", "vision transformer", "mixer")


def gradients_of(make: Callable[[], nn.Module], backend: Callable[..., object] | None) -> list[Tensor]:
    """Losses and gradients of two members, through a backend of torch.compile or without."""
    members = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        members.append(make())
    population = Population(members)
    population.stacked.train()
    if backend is not None:
        population._compiled = torch.compile(population._apply, backend=backend, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, networks.SIZE, networks.SIZE, generator=generator)
    losses = population.losses(F.cross_entropy, x, torch.randint(4, (2, 5), generator=generator), separate=True)
    losses.sum().backward()
    assert population._vmap or any(isinstance(module, nn.LSTM) for module in members[0].modules())
    return [losses.detach(), *(p.grad for p in population.stacked.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
@pytest.mark.parametrize("everywhere", [False, True], ids=["images", "all of four dimensions"])
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_the_graphs_of_every_network_give_the_same_numbers(
    name: str, everywhere: bool, at_full_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `everywhere`, all tensors of four dimensions pass for images: more is moved than a network ever asks for."""
    if name not in QUICK and not at_full_size:
        pytest.skip("make test-all runs it")
    if everywhere:
        monkeypatch.setattr(channels_last_pass, "_is_image", lambda node: node.meta["val"].ndim == 4)
    failures: list[str] = []
    monkeypatch.setattr(channels_last_pass._LOG, "debug", lambda *args, **options: failures.append(args[0]))

    def compiler(graph: GraphModule, inputs: list[Tensor]) -> GraphModule:
        elementwise_first(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return graph

    torch._dynamo.reset()
    importlib.import_module("torch._inductor.lowering")  # some decompositions expect that it is there
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table)
    rewritten, plain = (gradients_of(networks.NETWORKS[name], b) for b in (backend, None))
    assert not failures
    for ours, theirs in zip(rewritten, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
def test_a_population_of_vision_transformers_is_compiled(at_full_size: bool) -> None:
    if not at_full_size:
        pytest.skip("make test-all runs it")
    members = [networks.NETWORKS["vision transformer"]() for _ in range(2)]
    data = torch.randn(8, 3, networks.SIZE, networks.SIZE), torch.arange(8) % 4
    pp.fit(members, data, pp.Config(epochs=2, batch_size=4, lr=0.1, execution="compiled"))
    alone = networks.NETWORKS["vision transformer"]()
    pp.fit(alone, data, pp.Config(epochs=2, batch_size=4, lr=0.1))
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(members[0].state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
