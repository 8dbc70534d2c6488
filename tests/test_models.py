import copy

import pytest
import torch

import pacprune as pp
from pacprune import data, models


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def weights(model):
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def random_split(shape, n=20, classes=3):
    return data.split(torch.rand(n, *shape), torch.arange(n) % classes)


def test_mlp_has_the_documented_widths():
    assert [tuple(p.shape) for p in models.mlp().parameters() if p.ndim == 2] == [
        (1000, 784),
        (1000, 1000),
        (1000, 1000),
        (10, 1000),
    ]
    assert [tuple(p.shape) for p in models.mlp(64).parameters() if p.ndim == 2] == [(300, 64), (100, 300), (10, 100)]
    assert weights(models.mlp(5, 2, hidden=(7,))) == 5 * 7 + 7 * 2
    assert weights(models.mlp(5, 2, hidden=())) == 10


def test_mlp_takes_its_width_from_the_first_batch():
    model = models.mlp(seed=3)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    fresh = models.mlp(64, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(ValueError, match="takes 64 inputs but the batch has 784"):
        model(torch.zeros(2, 784))


def test_mlp_keeps_its_width_once_called_or_chosen_or_changed():
    called = models.mlp(hidden=(4,))
    called(torch.zeros(1, 784))
    changed = models.mlp(hidden=(4,))
    torch.nn.init.zeros_(changed.layers[0].weight)
    for model in (called, models.mlp(784, hidden=(4,)), changed):
        with pytest.raises(ValueError, match="takes 784 inputs but the batch has 64"):
            model(torch.zeros(1, 64))


def test_mlp_keeps_type_and_mode_when_it_takes_a_width():
    model = copy.deepcopy(models.mlp(hidden=(4,)).double().eval())
    assert model(torch.zeros(1, 6, dtype=torch.float64)).dtype == torch.float64
    assert not model.layers.training


def test_mlp_compiles_as_one_graph():
    model = models.mlp(hidden=(4,))
    x = torch.rand(3, 9)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (1, 12), (2, 17)])
def test_lenet5_takes_any_size_from_12_on(channels, size):
    assert models.lenet5(channels, size)(torch.rand(2, channels, size, size)).shape == (2, 10)


def test_lenet5_has_61470_weights():
    assert weights(models.lenet5()) == 61_470


def test_resnet20_has_269722_parameters():
    model = models.resnet20()
    assert parameters(model) == 269_722
    assert weights(model) == 268_336
    assert len([m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]) == 20
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_resnet20_shortcut_is_option_a():
    block = models.resnet20()[6]
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 16, 8, 8)
    expected = torch.zeros(1, 32, 4, 4)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_decides_the_weights_and_the_global_random_state_stays(name):
    split = random_split((1, 16, 16))
    before = torch.get_rng_state()
    first, repeated, other = (models.build(name, split, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], repeated[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", models.MODELS)
def test_copies_and_state_dicts_give_the_same_outputs(name):
    split = random_split((3, 16, 16))
    model = models.build(name, split, seed=0).eval()
    loaded = models.build(name, split, seed=1).eval()
    loaded.load_state_dict(model.state_dict(), strict=True)
    expected = model(split.train.x)
    assert expected.shape == (20, 3)
    assert torch.equal(copy.deepcopy(model)(split.train.x), expected)
    assert torch.equal(loaded(split.train.x), expected)


def test_build_takes_the_sizes_from_the_data():
    assert models.build("mlp", random_split((5,), classes=4))(torch.zeros(1, 5)).shape == (1, 4)
    regression = data.split(torch.rand(20, 5), torch.rand(20, 2))
    assert models.build("mlp", regression)(torch.zeros(1, 5)).shape == (1, 2)


def test_build_takes_a_function():
    def narrow_mlp(shape, outputs, *, seed):
        return models.mlp(shape[0], outputs, hidden=(2,), seed=seed)

    assert weights(models.build(narrow_mlp, random_split((5,), classes=4))) == 5 * 2 + 2 * 4


def test_build_refuses_unknown_models_and_unfit_shapes():
    with pytest.raises(ValueError, match="model 'vgg' is unknown; use one of mlp, lenet5, resnet20"):
        models.build("vgg", random_split((5,)))
    for name in ("lenet5", "resnet20"):
        with pytest.raises(ValueError, match="at least 12x12 pixels but these are 8x8; use mlp"):
            models.build(name, data.digits())
        with pytest.raises(ValueError, match=r"examples have shape \(5,\)"):
            models.build(name, random_split((5,)))


# --- Networks that have no name on the command line

SMALL = {
    "vit": lambda seed: models.vit(1, 8, 3, patch=4, width=8, depth=1, heads=2, seed=seed),
    "wide_resnet": lambda seed: models.wide_resnet(1, 3, depth=10, width=1, seed=seed),
    "convnext": lambda seed: models.convnext(1, 3, widths=(4, 8), blocks=1, scale=0.5, seed=seed),
    "lstm": lambda seed: models.lstm(8, 3, width=8, seed=seed),
}


def images(n=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


def test_wide_resnets_have_the_sizes_of_their_paper():
    assert parameters(models.wide_resnet()) == 691_674
    assert parameters(models.wide_resnet(depth=28, width=10)) == 36_479_194
    narrow = models.wide_resnet(depth=16, width=1)
    assert len([m for m in narrow.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]) == 16
    with pytest.raises(ValueError, match="depth is 18, but wide_resnet has 6 n \\+ 4 layers"):
        models.wide_resnet(depth=18)


def test_a_wide_block_adds_to_what_came_in_or_to_its_activation():
    model = models.wide_resnet(depth=16, width=2)
    first, second = model[1], model[2]
    for block in (first, second):
        torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 6, 6)
    assert torch.equal(first(x), first.shortcut(torch.relu(first.norm1(x))))
    wider = torch.rand(2, 32, 6, 6)
    assert torch.equal(second(wider), wider)
    assert model[3].conv1.stride == (2, 2)


def test_the_default_vit_and_lstm_have_the_documented_weights():
    assert weights(models.vit()) == 802_048
    assert weights(models.lstm()) == 4 * 128 * (28 + 128) + 10 * 128 == 81_152


def test_a_vit_knows_where_a_patch_lies_by_its_places_alone():
    model = SMALL["vit"](0).eval()
    x, _ = images(2)
    moved = x.roll(4, dims=-1)
    assert not torch.allclose(model(x), model(moved))
    torch.nn.init.zeros_(model.places)
    torch.testing.assert_close(model(x), model(moved))


def test_a_convnext_convolves_channels_one_by_one_and_can_do_without_a_scale():
    model = SMALL["convnext"](0)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [m.groups for m in convolutions if m.kernel_size == (7, 7)] == [4, 8]
    norm, x = model[1], torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(norm(x).mean(1), torch.zeros(2, 3, 3), rtol=0, atol=1e-6)
    plain = models.convnext(1, 3, widths=(4, 8), blocks=1)
    assert parameters(model) - parameters(plain) == 4 + 8
    assert models.convnext(1, 3)(torch.rand(1, 1, 32, 32)).shape == (1, 3)


def test_an_lstm_reads_rows_from_top_to_bottom_and_tokens_one_by_one():
    model = SMALL["lstm"](0)
    x, _ = images(4)
    torch.testing.assert_close(model(x), model(x[:, 0]))
    assert not torch.allclose(model(x), model(x.flip(2)))
    text = models.lstm(5, 5, width=8, tokens=True)
    tokens = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(text(tokens)[:, :3], text(tokens[:, :3]))


def test_sizes_that_do_not_fit_are_one_sentence():
    with pytest.raises(ValueError, match="10x10 pixels cannot be cut into patches of 4x4; choose a patch that divides"):
        models.vit(size=10)
    with pytest.raises(ValueError, match="width 128 cannot be cut into 5 heads"):
        models.vit(heads=5)


@pytest.mark.parametrize("name", SMALL)
def test_a_network_follows_from_its_seed_alone(name):
    before = torch.get_rng_state()
    first, repeated, other = (SMALL[name](seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], repeated[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_can_be_pruned_and_counts(name):
    model = SMALL[name](0)
    assert sum(w.numel() for w in pp.prunable(model).values()) == weights(model)
    assert {"places"} <= set(pp.prunable(model)) or name != "vit"


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("verb", [pp.pft, pp.feather])
def test_a_population_ends_as_each_member_would_alone(name, verb):
    config = pp.Config(epochs=2, lr=1e-3, optimizer="adamw", weight_decay=0.05, clip=1.0, batch_size=8)
    many = pp.together(verb, [SMALL[name](k) for k in range(2)], images(), config, sparsity=[0.5, 0.6], seed=[0, 1])
    for k, sparsity in enumerate((0.5, 0.6)):
        alone = verb(SMALL[name](k), images(), config, sparsity=sparsity, seed=k)
        assert alone.sparsity == pytest.approx(sparsity, abs=0.01)
        for key, value in alone.model.state_dict().items():
            torch.testing.assert_close(many[k].model.state_dict()[key], value, rtol=1e-3, atol=1e-4)
