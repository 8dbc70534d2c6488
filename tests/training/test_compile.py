"""torch.compile(fullgraph=True) on attached models: the same draws, no graph break, no recompilation per step."""

import pytest
import torch
from torch import nn

import pacprune as pp


def transformer() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))


CASES = {
    "mlp": (lambda: pp.models.mlp(16, hidden=(8,)), torch.linspace(-1, 1, 64).reshape(4, 16), "aot_eager"),
    "lenet5": (lambda: pp.models.lenet5(size=12), torch.linspace(-1, 1, 288).reshape(2, 1, 12, 12), "aot_eager"),
    "transformer": (transformer, torch.arange(10).reshape(2, 5), "aot_eager"),
    "inductor": (lambda: nn.Linear(6, 4), torch.linspace(-1, 1, 12).reshape(2, 6), "inductor"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_compiled_equals_eager_in_value_and_gradient(case: str) -> None:
    build, x, backend = CASES[case]
    model = build()
    pp.attach(model, pp.isotropic(model, sparsity=0.3, std=0.05)).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            pp.resample_(model)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        compiled(x).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(expected) == len(list(model.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_every_population_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, *, dynamic, options: real(fn, dynamic=dynamic, backend="eager"))
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    data = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    most = torch._dynamo.config.recompile_limit
    for k in range(1, most + 3):
        pp.fit([nn.Linear(6, 4) for _ in range(k)], data, pp.Config(epochs=1, batch_size=4, execution="compiled"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == most + 2
