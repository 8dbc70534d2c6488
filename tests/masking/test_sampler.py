"""Drawing a model's weights together: one launch, never a stale weight; stacked models; bfloat16 under autocast."""

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pacprune as pp
from pacprune import kernels
from pacprune.kernels import reference
from pacprune.masking import attachment

if kernels.backend("cpu") != "cpu":
    pytest.skip("no C++ compiler: weights are drawn one by one, and nothing is kept", allow_module_level=True)


def build(seed: int = 0, *, std: float = 0.05, sparsity: float = 0.4, **options: object) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.Embedding(3, 7))
    pp.attach(model, pp.isotropic(model, sparsity=sparsity, std=std), seed=seed, **options)  # type: ignore[arg-type]
    return model.train()


def draws(model: nn.Module) -> list[torch.Tensor]:
    return [site.where().detach() for site in attachment.sites(model)]


def is_fresh(model: nn.Module) -> bool:
    """Whether every weight equals a new draw from the current parameters."""
    expected = []
    for site in attachment.sites(model):
        part = site.sampler.inputs()
        assert part is not None
        expected.append(kernels.draw([part], site.sampler.law(part))[0].detach())
    return all(torch.equal(a, b) for a, b in zip(draws(model), expected, strict=True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each launch drew."""
    sizes: list[int] = []
    plain = kernels.draw_fast

    def count_and_draw(parts: list[kernels.SampleInputs], law: kernels.Law) -> list[torch.Tensor | None]:
        sizes.append(len(parts))
        return plain(parts, law)

    monkeypatch.setattr(kernels, "draw_fast", count_and_draw)
    return sizes


def test_one_launch_draws_a_models_weights(launches: list[int]) -> None:
    model = build()
    draws(model)  # the samplers join as they are read
    launches.clear()
    pp.resample_(model)
    first, second = draws(model), draws(model)
    assert launches == [3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({w.untyped_storage().data_ptr() for w in first}) == 1
    with torch.no_grad():
        attachment.sites(model)[1].gate.add_(1)
    draws(model)
    assert launches == [3, 1]  # only the changed weight is drawn again


def sgd(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: bool) -> None:
    optimizer = kind(model.parameters(), lr=0.5, **options)
    sum(w.where().square().sum() for w in attachment.sites(model)).backward()  # type: ignore[union-attr]
    optimizer.step()


def set_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2
        p.data = p.data * 2  # may reuse the memory of the first


def half_and_back(model: nn.Module) -> None:
    model.to(torch.float64)
    draws(model)
    model.to(torch.float32)
    for p in model.parameters():
        p.data = p.data + 1e-3


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "resample_": pp.resample_,
    "SGD": sgd,
    "SGD foreach": lambda m: sgd(m, foreach=True),
    "SGD fused": lambda m: sgd(m, fused=True),
    "eval": lambda m: m.eval(),
    "one sampler in eval": lambda m: attachment.sites(m)[1].sampler.eval(),
    "Adam fused": lambda m: sgd(m, torch.optim.Adam, fused=True),
    "in place, resample_": lambda m: [p.data.mul_(1.1) for p in m.parameters()] and pp.resample_(m),
    "in place, eval, train": lambda m: [p.data.mul_(1.1) for p in m.parameters()] and m.eval().train(),
    "in place, forget": lambda m: [p.data.mul_(1.1) for p in m.parameters()] and attachment.forget(m),
    "load_state_dict": lambda m: m.load_state_dict(build(7).state_dict()),
    "load_state_dict assign": lambda m: m.load_state_dict(build(7).state_dict(), assign=True),
    "data": set_data,
    "to": half_and_back,
    "shift": lambda m: [s.sampler.shift.fill_(0.7) for s in attachment.sites(m)],
    "sharpness": lambda m: [s.sampler.sharpness.fill_(3.0) for s in attachment.sites(m)],
    "std": lambda m: [s.sampler.std.mul_(2) for s in attachment.sites(m)],  # type: ignore[union-attr]
    "seed": lambda m: [s.sampler.seed.add_(1) for s in attachment.sites(m)],
    "parameters replaced": lambda m: [
        s.where._parameters.update(original1=nn.Parameter(s.gate.detach() + 1)) for s in attachment.sites(m)
    ],
    "buffers replaced": lambda m: [s.sampler._buffers.update(step=s.sampler.step + 5) for s in attachment.sites(m)],
    "the draw itself": lambda m: attachment.sites(m)[0].where().detach().zero_(),
    "harden": lambda m: pp.harden(m),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_leaves_a_stale_weight(change: str) -> None:
    model = build()
    draws(model)
    before = [w.clone() for w in draws(model)]
    CHANGES[change](model)
    assert is_fresh(model)
    if change not in ("the draw itself", "harden"):
        assert not all(torch.equal(a, b) for a, b in zip(before, draws(model), strict=True))


def test_functional_call_reads_its_tensors() -> None:
    model = build(std=0.0).eval()
    x, params = torch.randn(4, 6), dict(model.named_parameters())
    body = nn.Sequential(model[0], model[1], model[2])
    inner = {n: p for n, p in params.items() if not n.startswith("3")}
    plain = body(x)
    for factor in (2.0, 3.0, 2.0):  # temporaries that may reuse the memory of the last ones
        scaled = {n: p * factor if n.endswith("original0") else p for n, p in inner.items()}
        expected = F.linear(F.relu(F.linear(x, factor * model[0].weight, model[0].bias)), factor * model[2].weight)
        torch.testing.assert_close(functional_call(body, scaled, (x,)), expected)
        del scaled
    assert torch.equal(body(x), plain)


def test_a_deepcopy_draws_its_weights_in_one_launch(launches: list[int]) -> None:
    model = build()
    draws(model)
    other = copy.deepcopy(model)
    assert attachment.sites(other)[0].sampler.pool is attachment.sites(other)[2].sampler.pool
    assert attachment.sites(other)[0].sampler.pool is not attachment.sites(model)[0].sampler.pool
    assert all(torch.equal(a, b) for a, b in zip(draws(model), draws(other), strict=True))
    with torch.no_grad():
        for site in attachment.sites(other):
            site.mean.add_(1)
    launches.clear()
    assert not any(torch.equal(a, b) for a, b in zip(draws(model), draws(other), strict=True))
    assert launches == [3]  # the copy's alone, and all of them
    assert is_fresh(model)
    assert is_fresh(other)
    part = copy.deepcopy(model[2])  # a single layer draws alone
    assert torch.equal(part.weight, model[2].weight)


def test_inference_mode_leaves_no_cached_weight_behind() -> None:
    model = build()
    with torch.inference_mode():
        first = draws(model)
    attachment.sites(model)[0].where().sum().backward()  # a tensor of inference mode could not be saved for this
    assert all(torch.equal(a, b) for a, b in zip(first, draws(model), strict=True))
    with torch.inference_mode():
        model = build()
        before = [w.clone() for w in draws(model)]
        for p in model.parameters():
            p.mul_(2)
        assert not any(torch.equal(a, b) for a, b in zip(before, draws(model), strict=True))


def test_the_old_draw_is_freed_before_the_new_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    draws(model)
    draws(model)
    pp.resample_(model)
    old = weakref.ref(attachment.sites(model)[0].sampler.pool._cached[attachment.sites(model)[0].sampler].value)  # type: ignore[union-attr]
    plain = kernels.draw_fast
    alive = []
    monkeypatch.setattr(kernels, "draw_fast", lambda parts, law: alive.append(old()) or plain(parts, law))
    draws(model)
    assert alive == [None]


def model_in_state(k: int, **options: object) -> nn.Module:
    """A model whose noise, step, shift and sharpness differ from those of another k."""
    model = build(k, std=0.05 * (k + 1), sparsity=0.3 + 0.1 * k, **options)
    for _ in range(k):
        pp.resample_(model)
    for site in attachment.sites(model):
        site.sampler.shift.fill_(0.1 * k)
        site.sampler.sharpness.fill_(1.0 + k)
    return model


def stack(models: list[nn.Module]) -> nn.Module:
    """One model that holds the parameters and buffers of all, with a leading dimension."""
    together = copy.deepcopy(models[0])
    for sites in zip(attachment.sites(together), *(attachment.sites(m) for m in models), strict=True):
        stacked, *alone = sites
        for name in list(stacked.where._parameters):
            values = [site.where._parameters[name].detach() for site in alone]  # type: ignore[union-attr]
            stacked.where._parameters[name] = nn.Parameter(torch.stack(values))
        for name, buffer in list(stacked.sampler._buffers.items()):
            if buffer is not None:
                values = [site.sampler.get_buffer(name) for site in alone]
                stacked.sampler._buffers[name] = torch.stack(values)
    return together


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "options",
    [{}, {"coupling": 2.0}, {"mapping": "clamp"}, {"train_std": True}, {"estimator": "straight-through"}],
    ids=str,
)
def test_stacked_models_have_the_draws_and_gradients_of_single_ones(options: dict[str, object], mode: bool) -> None:
    models = [model_in_state(k, **options).train(mode) for k in range(3)]
    together = stack(models)
    pp.resample_(together)
    for model in models:
        pp.resample_(model)
    for i, site in enumerate(attachment.sites(together)):
        weight, out = site.where(), torch.randn(site.where().shape)
        weight.backward(out)
        logit = site.logit()
        for k, model in enumerate(models):
            alone = attachment.sites(model)[i]
            assert torch.equal(alone.where(), weight[k])
            alone.where().backward(out[k])
            assert torch.equal(alone.mean.grad, site.mean.grad[k])
            assert torch.equal(alone.gate.grad, site.gate.grad[k])
            torch.testing.assert_close(alone.logit(), logit[k])
            if alone.log_std is not None:
                assert torch.equal(alone.log_std.grad, site.log_std.grad[k])


def test_under_autocast_a_linear_weight_is_drawn_in_bfloat16_and_others_are_not() -> None:
    model = build()
    full = draws(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear, other, embedding = (site.where() for site in attachment.sites(model))
        assert linear.dtype == other.dtype == torch.bfloat16
        assert embedding.dtype == torch.float32
        model[2](torch.randn(4, 8)).float().sum().backward()
    assert torch.equal(linear, full[0].bfloat16())
    site = attachment.sites(model)[1]
    assert site.mean.grad.dtype == site.gate.grad.dtype == torch.float32
    assert torch.equal(attachment.sites(model)[0].where(), full[0])


def test_a_step_saves_only_the_samplers_inputs_and_the_draw() -> None:
    model = build()
    x = torch.randn(2, 6)
    saved: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        model[2](model[1](model[0](x))).sum()
    allowed = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    allowed |= {attachment.sites(model)[i].where().untyped_storage().data_ptr() for i in (0, 1)}
    extra = saved - allowed - {x.untyped_storage().data_ptr()}
    assert len(extra) <= 1  # the activation between the layers


def test_the_reference_draws_the_same_up_to_rounding() -> None:
    model = build()
    for mode in (True, False):
        for site in attachment.sites(model.train(mode)):
            part = site.sampler.inputs()
            assert part is not None
            law = site.sampler.law(part)
            torch.testing.assert_close(site.where(), reference.draw([part], law)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_step_equals_an_eager_one_and_leaves_no_stale_weight() -> None:
    models = [build().cuda() for _ in range(2)]
    x = torch.randn(16, 6, device="cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pp.resample_(model)
        optimizer.zero_grad(set_to_none=False)
        model[2](model[1](model[0](x))).square().mean().backward()  # type: ignore[index,operator]
        optimizer.step()

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for _ in range(8):
        step(models[0], optimizers[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(models[1], optimizers[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(models[1], optimizers[1])
    for _ in range(5):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert is_fresh(models[1])
    graph.replay()
    assert is_fresh(attachment.forget(models[1]))
