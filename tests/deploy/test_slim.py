"""Slim networks: the same outputs, smaller tensors, and no needed channel removed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pacprune as pp
from pacprune import models
from pacprune.deploy import slim


def with_random_norms(model: nn.Module) -> nn.Module:
    """Gives every BatchNorm random statistics and offsets; sets eval mode."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model.eval()


@torch.no_grad()
def slim_and_compare(model: nn.Module, x: Tensor) -> slim.Slim:
    """The slim network, whose outputs on batches of several sizes were compared with the original's."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slimmed = slim.slim(model, x)
    for batch in (x, x[:1], torch.cat([x, -x, 2 * x])):
        expected = model(batch)
        assert (slimmed.model(batch) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert slimmed.bytes == (slim.size(model), slim.size(slimmed.model))
    assert all(after <= before for before, after in (slimmed.weights, slimmed.bytes, slimmed.flops))
    return slimmed


NETWORKS = {
    "mlp": (lambda: models.mlp(64), (1, 8, 8)),
    "lenet5": (models.lenet5, (1, 28, 28)),
    "resnet20": (models.resnet20, (3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("sparsity", [0.9, 0.995])
def test_outputs_are_equal_at_any_sparsity(name: str, sparsity: float) -> None:
    make, shape = NETWORKS[name]
    model = with_random_norms(make())
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity, min_per_layer=10))
    slimmed = slim_and_compare(model, torch.randn(3, *shape))
    if sparsity > 0.99:
        assert slimmed.removed > 0
        assert slimmed.weights[1] < slimmed.weights[0]


def test_a_dense_network_says_that_nothing_could_be_removed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    slimmed = slim_and_compare(model, torch.randn(3, 5))
    assert str(slimmed).startswith("nothing could be removed")
    assert slimmed.weights == (28, 28)


def test_a_constant_neuron_goes_into_the_next_bias() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[2].weight[2] = 0
        model[2].weight[2, 1] = 5.0  # reads only the constant, so it is constant itself
    slimmed = slim_and_compare(model, torch.randn(3, 5))
    shapes = {name: tuple(t.shape) for name, t in slimmed.model.state_dict().items()}
    assert shapes["0.weight"] == (3, 5)
    assert shapes["2.weight"] == (2, 3)
    assert shapes["2.bias"] == (2,), "a layer without a bias is given one"
    assert shapes["4.weight"] == (2, 2)


def test_an_unread_neuron_is_removed_with_the_inputs_that_only_it_reads() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[4].weight[:, 0] = 0
        model[2].weight[1:, 3] = 0  # neuron 3 of the first layer is read by neuron 0 of the second alone
    slimmed = slim_and_compare(model, torch.randn(3, 5))
    assert [tuple(slimmed.model.state_dict()[f"{k}.weight"].shape) for k in (0, 2, 4)] == [(3, 5), (3, 3), (2, 3)]
    assert "2 channels and columns removed: 44 -> 30 weights" in str(slimmed)


def test_unread_inputs_of_a_linear_layer_are_removed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():
        model[1].weight[:, [0, 5, 11]] = 0
    slimmed = slim_and_compare(model, torch.randn(3, 3, 4))
    assert slimmed.weights == (48, 36)
    assert slimmed.flops == (96, 72)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_constant_channel_before_padding_stays_unless_it_is_zero(padding: int) -> None:
    def network() -> nn.Sequential:
        norm = nn.BatchNorm2d(4)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False), norm, nn.ReLU(), nn.Conv2d(4, 3, 3, padding=padding)
        ).eval()

    for offset in (1.0, -1.0):
        model = network()
        with torch.no_grad():
            model[0].weight[2] = 0
            model[1].bias[2] = offset
        slimmed = slim_and_compare(model, torch.randn(2, 2, 6, 6))
        # 1 becomes a constant 1, which ends at a padded border; -1 becomes 0, as the padding is.
        assert slimmed.removed == (0 if padding and offset > 0 else 1)
        assert (slimmed.removed == 0) == (slimmed.model.state_dict()["1.weight"].shape == (4,))


class Residual(nn.Module):
    """x -> a(x) + b(relu(a(x))), read by c."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(F.relu(h + self.b(F.relu(h))))


def test_channels_that_are_added_are_only_removed_together() -> None:
    model = Residual()
    with torch.no_grad():
        model.b.weight[1] = model.b.weight[:, 1] = 0
    assert slim_and_compare(model, torch.randn(3, 5)).removed == 1, "b's own column; its row is added to a channel of a"
    with torch.no_grad():
        model.a.weight[1] = 0
    slimmed = slim_and_compare(model, torch.randn(3, 5))
    assert [tuple(slimmed.model.state_dict()[f"{n}.weight"].shape) for n in "abc"] == [(3, 5), (3, 3), (2, 3)]


def test_option_a_shortcuts_lose_their_padding_with_the_channels() -> None:
    model = with_random_norms(models.resnet20())
    with torch.no_grad():
        for name, module in model.named_modules():
            if name == "0" or name.endswith("conv2"):
                # Channel 3 of the first stage is channel 11 of the second and 27 of the last; 2 is new in the second.
                module.weight[{16: [3], 32: [2, 11], 64: [18, 27, 0]}[len(module.weight)]] = 0
            elif name == "1" or name.endswith("norm2"):
                for tensor in (module.bias, module.running_mean):
                    tensor[{16: [3], 32: [2, 11], 64: [18, 27, 0]}[len(tensor)]] = 0
    slimmed = slim_and_compare(model, torch.randn(2, 3, 32, 32))
    rows = {name: len(t) for name, t in slimmed.model.state_dict().items() if name.endswith("conv2.weight")}
    assert set(rows.values()) == {15, 30, 61}
    assert "-" in str(slimmed)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Mixed(nn.Module):
    """Concatenation, pooling, grouped convolution, LayerNorm, softmax: some of them cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3)
        self.group = nn.Conv2d(8, 8, 3, groups=2)
        self.three, self.norm = nn.Conv2d(8, 6, 1), nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(torch.cat([self.one(x), self.two(x)], dim=1), inplace=True)
        h = F.avg_pool2d(self.three(self.group(h) + h[:, :, 1:-1, 1:-1]), 2).mean((2, 3))
        return self.last(self.norm(h).softmax(-1))


def test_channels_that_cannot_be_followed_stay() -> None:
    for model, shape in ((Tied(), (4,)), (Mixed(), (1, 12, 12))):
        for name, weight in pp.prunable(model).items():
            if "last" not in name and "c." not in name:
                weight.data[1] = 0
                weight.data[:, 0] = 0
        assert slim_and_compare(model, torch.randn(3, *shape)).removed == 0


def test_a_concatenation_and_a_transformer_block_are_followed() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.one(x), self.two(x)], 1).relu_())

    joined, block = Joined(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1).eval()
    with torch.no_grad():
        joined.two.weight[1] = 0
        block.linear1.weight[3] = block.linear2.weight[:, 4] = 0
    assert slim_and_compare(joined, torch.randn(2, 1, 6, 6)).removed == 1
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slimmed = slim_and_compare(block, torch.randn(2, 5, 8))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert slimmed.model.state_dict()["linear1.weight"].shape == (14, 8)


def test_random_networks_with_dead_parts_keep_their_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(6):
        model = with_random_norms(nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=trial % 2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 5, 2), nn.GELU(), nn.Flatten(), nn.Linear(5 * (9 if trial % 2 else 4), 7), nn.Sigmoid(),
            nn.Linear(7, 4),
        ))  # fmt: skip
        for weight in pp.prunable(model).values():
            weight.data[torch.rand(len(weight), generator=generator) < 0.4] = 0
            weight.data[:, torch.rand(weight.shape[1], generator=generator) < 0.3] = 0
        x = torch.randn(4, 2, 8, 8, generator=generator)
        assert slim_and_compare(model, x).removed > 0


def test_half_precision_keeps_its_type() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    with torch.no_grad():
        model[0].weight[1] = 0
    slimmed = slim.slim(model, torch.randn(3, 5, dtype=torch.bfloat16))
    assert {t.dtype for t in slimmed.model.parameters()} == {torch.bfloat16}
    assert slimmed.weights == (28, 21)


def test_untraceable_models_and_bad_examples_are_refused() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else -self.a(x)

    with pytest.raises(ValueError, match=r"^Choosy cannot be traced .* rewrite the part"):
        slim.slim(Choosy(), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"^the example has shape \(3,\), which is no batch; give"):
        slim.slim(nn.Linear(3, 2), torch.randn(3))
    model = pp.models.mlp(64)
    attached = pp.attach(copy.deepcopy(model), pp.isotropic(model, sparsity=0.5))
    with pytest.raises(ValueError, match="has a stochastic mask"):
        slim.slim(attached, torch.randn(2, 64))


def test_dead_channels_of_a_language_model_go_at_every_length() -> None:
    model = models.gpt(20, width=16, depth=1, heads=2, context=12).eval()
    hidden = next(layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear) and layer.in_features == 64)
    with torch.no_grad():
        hidden.weight[:, ::2] = 0
    slimmed = slim.slim(model, torch.randint(20, (1, 7)))
    assert slimmed.removed == 32
    with torch.no_grad():
        for shape in ((2, 7), (3, 12), (1, 3)):
            x = torch.randint(20, shape)
            assert torch.allclose(slimmed.model(x), model(x), atol=1e-5)


def test_a_recurrent_layer_is_traced_without_a_warning() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)[0][:, -1])

    assert pp.slim.slim(Last(), torch.randn(6, 5, 4)).removed == 0
