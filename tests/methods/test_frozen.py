"""Learned masks of weights that are not trained: exact, bit-identical, small in memory, resumed, distilled."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory import live_bytes
from torch import Tensor, nn

import pacprune as pp
from pacprune.data.batches import Objective
from pacprune.masking import attachment, patterns
from pacprune.masking.redrawn import redrawn
from pacprune.training import distillation
from pacprune.training.step import Step

G = torch.Generator().manual_seed(1)
X = torch.randn(160, 16, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=3, batch_size=32)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


class Words(nn.Module):
    """Is called as transformers' models are: model(input_ids=..., labels=...), with loss and logits in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(input_ids)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader([{"input_ids": x, "labels": y} for x, y in zip(X, Y, strict=True)], 32)


@pytest.mark.parametrize("options", [{"pattern": p} for p in patterns.PATTERNS] + [{"sparsity": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_count_is_exact_and_what_is_kept_is_the_dense_network_to_the_bit(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = net(dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = pp.pft(model, (X.to(dtype), Y), CONFIG, recipe="frozen", **options)
    size = sum(mask.numel() for mask in result.mask.values())
    kept = sum(int(mask.sum()) for mask in result.mask.values())
    assert kept == round((1 - options.get("sparsity", patterns.sparsity(options.get("pattern", "2:4")))) * size)
    for name, tensor in model.state_dict().items():
        mask = result.mask.get(name, torch.tensor(True))
        assert torch.equal(tensor, before[name] * mask)
        if "pattern" in options and name in result.mask:
            patterns.check(mask, *patterns.parse(options["pattern"]))
    assert all(p.requires_grad for p in model.parameters())
    assert [row["stage"] for row in result.history] == ["masks"] * 3


def test_gates_alone_have_gradients_and_an_optimisers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[dict[str, Any]] = []
    step = Step.__call__

    def watched(self: Step, *arguments: Any) -> int:
        count = step(self, *arguments)
        gates = {id(site.gate) for site in self.sites}
        for p in self.model.parameters():
            assert p.requires_grad == (id(p) in gates)
            assert id(p) in gates or p.grad is None
        states.append(self.optimizer.state_dict())
        return count

    monkeypatch.setattr(Step, "__call__", watched)
    model = net(torch.bfloat16)
    pp.pft(model, (X.bfloat16(), Y), CONFIG, recipe="frozen", pattern="2:4")
    sizes = [w.numel() for w in pp.prunable(net()).values()]
    assert sorted(state["mean"].numel() for state in states[-1].values()) == sorted(sizes)
    assert {state["mean"].dtype for state in states[-1].values()} == {torch.int8}


def test_what_is_kept_can_be_fine_tuned_for_the_rest_of_the_epochs() -> None:
    config = pp.Config(epochs=6, lr=0.1, batch_size=32)
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = pp.pft(model, (X, Y), config, recipe="frozen", pattern="2:4", mask_share=0.5)
    assert [row["stage"] for row in result.history] == ["masks"] * 3 + ["tune"] * 3
    assert result.history[-1]["loss"] < result.history[2]["loss"]
    assert not torch.equal(model[0].weight, before["0.weight"] * result.mask["0.weight"])
    assert torch.equal(model[0].weight != 0, result.mask["0.weight"])


def test_the_loss_of_distillation_is_that_of_a_second_copy() -> None:
    for make, batch, loss in ((net, (X[:32], Y[:32]), F.cross_entropy), (Words, next(iter(batches())), None)):
        objective = Objective() if loss is None else Objective(loss)
        teacher, model = make().eval(), make()
        pp.attach(model, pp.isotropic(model, sparsity=0.5), mapping="2:4", seed=3).train()
        pp.resample_(model)
        out, dense = objective.outputs(model, batch), objective.outputs(teacher, batch)
        logits = [o if isinstance(o, Tensor) else o["logits"] for o in (dense, out)]
        p, q = (torch.softmax(t / 2.0, -1) for t in logits)
        apart = 4.0 * (p * (p.log() - q.log())).sum(-1).mean()
        expected = 0.3 * objective.value(out, batch) + 0.7 * apart
        forward = distillation.distilled(objective, weight=0.7, temperature=2.0)
        actual = forward(model, batch)
        torch.testing.assert_close(actual, expected)
        gates = [site.gate for site in attachment.sites(model)]
        for a, b in zip(torch.autograd.grad(actual, gates), torch.autograd.grad(expected, gates), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
        assert model.training
        assert torch.equal(forward(model.eval(), batch), objective.value(objective.outputs(model, batch), batch))


def test_distillation_works_with_mappings_and_brings_the_answers_nearer_to_the_dense_ones() -> None:
    model, teacher = Words(), Words()
    data = [{"input_ids": x, "labels": y} for x, y in zip(X, teacher.body(X).argmax(-1), strict=True)]
    start = pp.top_k(pp.scores.magnitude(model), pattern="2:4")

    def apart(mask: dict[str, Tensor]) -> float:
        with torch.no_grad():
            pruned = torch.func.functional_call(
                teacher, {n: w * mask.get(n, 1) for n, w in teacher.named_parameters()}, (X, Y)
            )
            return float(distillation.divergence(teacher(X, Y)["logits"], pruned["logits"], 1.0))

    loader = torch.utils.data.DataLoader(data, 32)
    result = pp.pft(
        model, loader, pp.Config(epochs=20), recipe="frozen", pattern="2:4", criterion=start, distill=1.0, prior=0.5
    )
    assert apart(dict(result.mask)) < 0.7 * apart(start)


def test_a_learned_mask_beats_its_prior_where_magnitude_misleads() -> None:
    """The larger two of every four inputs are noise that the label does not follow."""
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(4))
    model = nn.Sequential(nn.Linear(16, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([2.0, -2.0, 1.0, 1.0]).repeat(4))
    y = x.reshape(-1, 4, 4)[..., 2:].sum((1, 2))[:, None]
    start = pp.top_k(pp.scores.magnitude(model), pattern="2:4")
    assert start["0.weight"].reshape(4, 4).tolist() == [[True, True, False, False]] * 4
    config = pp.Config(epochs=10, batch_size=32, gate_lr=0.2)
    result = pp.pft(model, (x, y), config, recipe="frozen", pattern="2:4", criterion=start, loss=F.mse_loss)
    assert result.mask["0.weight"].reshape(4, 4).tolist() == [[False, False, True, True]] * 4


@pytest.mark.parametrize("options", [{"pattern": "2:4"}, {"sparsity": 0.5}], ids=str)
def test_an_interrupted_run_ends_the_same_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def progress(stage: str, done: int, *_: Any) -> None:
        if done == 8:
            raise Stop

    keywords = {"recipe": "frozen", "distill": 0.5, **options}
    data = X.bfloat16(), Y
    whole = pp.pft(net(torch.bfloat16), data, CONFIG, **keywords)
    model = net(torch.bfloat16)
    with pytest.raises(Stop):
        pp.pft(model, data, CONFIG, folder=tmp_path, progress=progress, **keywords)
    resumed = pp.pft(net(torch.bfloat16), data, CONFIG, folder=tmp_path, **keywords)
    assert resumed.history == whole.history
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_another_weight_of_distillation_is_another_run(tmp_path: Path) -> None:
    options = {"recipe": "frozen", "pattern": "2:4", "folder": tmp_path}
    pp.pft(net(), (X, Y), CONFIG, distill=0.5, **options)
    with pytest.raises(ValueError, match="belongs to another run"):
        pp.pft(net(), (X, Y), CONFIG, distill=0.6, **options)


@pytest.mark.parametrize("goal", [{"sparsity": 0.5}, {"pattern": "2:4"}])
def test_scores_below_zero_can_begin(goal: dict[str, Any]) -> None:
    """GraSP's scores have both signs, and a logarithm of them is no number."""
    result = pp.pft(net(), (X, Y), pp.Config(epochs=1), recipe="frozen", criterion="grasp", **goal)
    assert result.selected_sparsity == pytest.approx(0.5, abs=1e-3)
    assert all(math.isfinite(row["loss"]) for row in result.history)


# --- Memory.


class _Blocks(nn.Module):
    """Square layers, one after another."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_step_takes_less_than_eight_bytes_per_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 2, gates 2, gradients 2, state 1.03, and of draws one layer's; counted after backward and in it."""
    width, depth = 128, 8
    size = depth * width**2
    saved: list[int] = []
    counts: list[float] = []
    before = live_bytes()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _Blocks(width, depth).to(torch.bfloat16)
    original = Step._take

    def take(self: Step, *arguments: Any) -> None:
        original(self, *arguments)
        counts.append((live_bytes() - before) / size)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        saved.append(live_bytes() - before)  # with all that backward will need
        return F.mse_loss(out.float(), y)

    monkeypatch.setattr(Step, "_take", take)
    x = torch.randn(4, width).bfloat16()
    pp.pft(model, (x, x.float()), pp.Config(epochs=3, batch_size=4), recipe="frozen", pattern="2:4", loss=loss)
    assert counts[-1] < 7.2
    # Before backward there are no gradients; what else there is was counted, but for activations.
    assert saved[-1] / size < 5.3


def test_layers_save_what_a_draw_follows_from_in_place_of_the_draw() -> None:
    model = _Blocks(64, 3)
    pp.attach(model, pp.isotropic(model, sparsity=0.5), mapping="2:4", seed=1).train()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def gradients(*, redraw: bool) -> tuple[list[Tensor], int]:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model.zero_grad()
        if redraw:
            with redrawn():
                out = model(x)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = model(x)
        out.square().sum().backward()
        return [site.gate.grad for site in attachment.sites(model) if site.gate.grad is not None], sum(kept.values())

    (first, _), (second, size) = gradients(redraw=True), gradients(redraw=False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # The first layer's input needs no gradient, and so its draw is not saved.
    assert size > 2 * 64 * 64 * 4
    with redrawn():
        out = model(x)
    pp.resample_(model)
    with pytest.raises(RuntimeError, match=r"changed between a forward pass and its|modified by an inplace"):
        out.sum().backward()


# --- Refusals.


def test_one_layer_can_have_a_pattern_of_eight() -> None:
    result = pp.pft(net(), (X, Y), pp.Config(epochs=1), recipe="frozen", pattern="4:8", include="2.weight")
    assert result.pattern == "4:8"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"config": pp.Config(epochs=1, lr=0.1)}, r"lr is 0.1, but the recipe 'frozen' trains gates and no weights"),
        ({"config": pp.Config(epochs=1, gate_lr=None)}, "gate_lr is None, but the recipe 'frozen' trains nothing but"),
        ({"criterion": {"0.weight": torch.ones(2, 2)}}, "criterion one_shot_mask returned 0.weight, but the prunable"),
        ({"recipe": "coupled", "criterion": {}}, "the criterion is a mask, which the recipe 'coupled' cannot begin"),
        ({"distill": 2.0}, "distill is 2.0 and temperature 1.0; the first is a share of the loss"),
        ({"prior": -1.0}, "prior is -1.0; it is how far apart logits begin"),
        ({"recipe": "thresholded", "distill": 0.5}, "distill is 0.5, but the recipe 'thresholded' does not read it"),
        ({"pattern": "2:4", "model": lambda: nn.Sequential(nn.Linear(6, 3))}, r"rows of 6 weights, .* groups of 4"),
        ({"loss": lambda out, y: out.square().mean(), "distill": 1.0, "data": None}, "without logits of shape"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    settings = {"config": pp.Config(epochs=1), "recipe": "frozen", "pattern": "2:4"} | options
    model = settings.pop("model", net)()
    data = (X[:, : model[0].in_features], Y)
    if "data" in settings:
        data, model = (X, Y.float()), nn.Sequential(model, nn.Flatten(0))
        del settings["data"]
    with pytest.raises(ValueError, match=sentence) as caught:
        pp.pft(model, data, settings.pop("config"), **settings)
    assert "\n" not in str(caught.value)


def test_sixteen_bit_gates_are_of_patterns() -> None:
    with pytest.raises(ValueError, match=r"gate_dtype is torch.bfloat16 with the mapping 'sigmoid'"):
        pp.attach(net(), pp.isotropic(net(), sparsity=0.5), gate_dtype=torch.bfloat16)
    model = pp.attach(net(), pp.isotropic(net(), sparsity=0.5), mapping="2:4", gate_dtype=torch.bfloat16)
    assert {site.gate.dtype for site in attachment.sites(model)} == {torch.bfloat16}


def test_unmasked_is_the_dense_network_and_ends_also_after_an_error() -> None:
    dense, model = net(), net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5), mapping="2:4")
    with pp.unmasked(model):
        assert torch.equal(model(X), dense(X))
    with pytest.raises(RuntimeError, match="shapes"), pp.unmasked(model):
        model(X[:, :3])
    assert not torch.equal(model(X), dense(X))
