import gzip
import hashlib
import os

import numpy as np
import pytest
import torch

import pacprune as pp
from pacprune import data, philox
from pacprune.data import batches, datasets, trace
from pacprune.training.posterior import refuse_if_touched

REAL = {name: row.load for name, row in data.DATA_SETS.items() if row.source}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def random_split(n=40, **options):
    generator = torch.Generator().manual_seed(1)
    return data.split(torch.rand(n, 3, generator=generator) * 5 + 2, torch.arange(n) % 4, **options)


def idx(values):
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes() + values.tobytes()


def write_official(folder, monkeypatch, name):
    """Ten random images in the official format; the table of md5s is made to expect them."""
    random = np.random.default_rng(0)
    labels = np.arange(10, dtype=np.uint8)
    contents = {}
    for file in datasets.SOURCES[name].contents:
        if name == "cifar10":
            content = np.c_[labels, random.integers(0, 256, (10, 3072), np.uint8)].tobytes()
        else:
            content = idx(random.integers(0, 256, (10, 28, 28), np.uint8) if "images" in file else labels)
        contents[file] = content
        monkeypatch.setitem(datasets.SOURCES[name].contents, file, hashlib.md5(content).hexdigest())
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    return contents


def test_parts_follow_the_documented_permutation():
    split = random_split(prior_fraction=0.25, seed=7, test=0.2, unlabelled=4)
    order = philox.permutation(40, seed=7)
    assert torch.equal(split.prior.index, order[:7])
    assert torch.equal(split.bound.index, order[7:28])
    assert torch.equal(split.train.index, order[:28])
    assert torch.equal(split.unlabelled.index, order[28:32])
    assert torch.equal(split.test.index, order[32:])
    assert torch.equal(split.train.x, torch.cat([split.prior.x, split.bound.x]))
    assert torch.equal(split.bound.y, split.bound.index % 4)
    assert (split.classes, split.dataset, split.seed, split.prior_fraction) == (4, "own", 7, 0.25)


def test_the_split_is_blind_to_labels_and_prior_parts_are_nested():
    x = torch.rand(50, 2)
    narrow = data.split(x, torch.zeros(50, dtype=torch.int64), prior_fraction=0.2)
    wide = data.split(x, torch.arange(50), prior_fraction=0.6)
    assert torch.equal(narrow.train.index, wide.train.index)
    assert torch.equal(narrow.prior.index, wide.prior.index[:10])


def test_without_a_prior_part_all_examples_are_bound_examples_and_none_is_standardised():
    split = random_split(prior_fraction=0, seed=7, test=0.2, unlabelled=4)
    order = philox.permutation(40, seed=7)
    assert (len(split.prior), len(split.bound), len(split.unlabelled), len(split.test)) == (0, 28, 4, 8)
    assert torch.equal(split.bound.index, order[:28])
    assert torch.equal(split.train.index, order[:28])
    assert (split.mean, split.std, split.prior_fraction, split.declared) == ((), (), 0, False)
    assert torch.equal(split.bound.x, random_split(prior_fraction=0, seed=7, standardise=False).train.x[:28])
    digits = data.digits(prior_fraction=0)
    assert (float(digits.bound.x.min()), float(digits.bound.x.max())) == (0.0, 1.0)  # of 16 levels of grey


def test_standardisation_comes_from_the_prior_part_alone():
    split = random_split(test=(torch.rand(5, 3), torch.zeros(5, dtype=torch.int64)))
    assert torch.allclose(split.prior.x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(split.prior.x.std(0, correction=0), torch.ones(3), atol=1e-6)
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(1)) * 5 + 2
    moved = x.clone()
    moved[split.bound.index] += 100.0
    shifted = data.split(moved, torch.arange(40) % 4)
    assert (shifted.mean, shifted.std) == (split.mean, split.std)
    assert torch.allclose(split.bound.x * torch.tensor(split.std) + torch.tensor(split.mean), x[split.bound.index])
    assert torch.equal(random_split(standardise=False).train.x, x[split.train.index])


def test_a_constant_feature_is_only_centred():
    x = torch.rand(20, 2)
    x[:, 0] = 0.1
    split = data.split(x, torch.rand(20))
    assert split.std[0] == 1.0
    assert split.train.x[:, 0].abs().max() < 1e-7


@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (2, 3, 3)])
def test_every_shape_of_x_has_one_constant_per_channel(shape):
    split = data.split(torch.rand(30, *shape), torch.rand(30), test=0.1)
    assert len(split.mean) == len(split.std) == (shape[0] if shape else 1)
    assert abs(float(split.prior.x.mean())) < 1e-6
    assert split.test.x.shape == (3, *shape)


def test_types_of_x_and_y_for_bytes_tokens_and_regression():
    images = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 1, 2, 2)
    assert torch.equal(
        data.split(images, torch.arange(20), standardise=False).prior.x[:, 0, 0, 0] * 255,
        philox.permutation(20, seed=0)[:10].float(),
    )
    tokens = data.split(torch.arange(60).view(20, 3), torch.arange(60).view(20, 3))
    assert tokens.train.x.dtype == torch.int64
    assert tokens.mean == ()
    assert tokens.classes == 60
    regression = data.split(torch.rand(20, 1).double(), torch.rand(20).double())
    assert regression.classes == 0
    assert regression.train.x.dtype == regression.train.y.dtype == torch.float32


def test_split_does_not_change_the_users_tensors():
    x, test = torch.rand(20, 2), torch.rand(5, 2)
    before = x.clone(), test.clone()
    data.split(x, torch.rand(20), test=(test, torch.rand(5)))
    assert torch.equal(x, before[0])
    assert torch.equal(test, before[1])


def test_a_part_is_a_dataset_with_hashes():
    part = random_split().bound
    x, y = part[3]
    assert torch.equal(x, part.x[3])
    assert y == part.y[3]
    batch = next(iter(torch.utils.data.DataLoader(part, batch_size=len(part))))
    assert torch.equal(batch[0], part.x)
    expected = hashlib.blake2b(x.numpy().tobytes(), digest_size=8).digest()  # of numbers that are no image
    assert part.example_hashes[3] == int.from_bytes(expected, "little", signed=True)
    assert torch.equal(trace.example_hashes(part.x), part.example_hashes)
    assert part.example_hashes.shape == (len(part),)
    joined = part.x.numpy().tobytes() + part.y.numpy().tobytes() + part.index.numpy().tobytes()
    assert part.hash == hashlib.sha256(joined).hexdigest()
    pair = part.subset(torch.tensor([5, 2]))
    assert torch.equal(pair.example_hashes, part.example_hashes[[5, 2]])
    assert torch.equal(pair.index, part.index[[5, 2]])
    assert pair.hash != part.hash


def test_example_hashes_differ_where_x_differs():
    x = torch.zeros(3, 2)
    x[1, 1] = 1.0
    assert len(set(trace.example_hashes(x).tolist())) == 2
    assert trace.example_hashes(x[:0]).shape == (0,)


@pytest.mark.parametrize("kind", ["raw", "bytes", "one-hot labels", "subset"])
def test_training_on_raw_tensors_counts_as_seeing_the_bound_set(kind):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (60, 5), dtype=torch.uint8, generator=generator), torch.arange(60) % 3
    split = data.split(x, y)
    examples = {
        "raw": (x.float() / 255, y),
        "bytes": (x, y),
        "one-hot labels": (split.train.x, torch.nn.functional.one_hot(split.train.y).float()),
        "subset": (split.bound.subset(torch.tensor([3])).x, y[:1]),
    }[kind]
    with pytest.raises(ValueError, match="the network has seen the bound set"):
        refuse_if_touched(batches.use_of(examples), split, "the network")


def test_ids_agree_between_splits_of_one_source():
    first, second = random_split(seed=0), random_split(seed=1)
    assert not torch.isin(first.train.example_hashes, second.train.example_hashes).any()
    assert set(first.train.ids[1].tolist()) == set(second.train.ids[1].tolist())
    elsewhere = data.split(torch.rand(40, 3), torch.arange(40) % 4)
    assert not torch.isin(first.train.ids, elsewhere.train.ids).any()
    assert len(data.Part("own", first.train.x, first.train.y, first.train.index).ids) == 1  # its content alone


def test_duplicates_between_prior_and_bound_are_counted():
    x = torch.rand(20, 2)
    assert data.split(x, torch.arange(20)).duplicates == 0
    order = philox.permutation(20, seed=0)
    x[order[15]] = x[order[16]] = x[order[2]]
    assert data.split(x, torch.arange(20)).duplicates == 2


def test_an_empty_test_part_has_a_shape_and_hashes():
    split = random_split()
    assert len(split.test) == len(split.unlabelled) == 0
    assert split.test.x.shape == (0, 3)
    assert split.test.example_hashes.shape == (0,)
    assert len(split.test.hash) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_fraction": 50}, r"prior_fraction is 50; it must lie in \[0, 1\), where 0 is for a prior that no data"),
        ({"prior_fraction": 1.0}, "prior_fraction is 1.0; it must lie"),
        ({"prior_fraction": -0.1}, "prior_fraction is -0.1; it must lie"),
        ({"prior_fraction": 0.0, "unlabelled": 40}, "of 40 examples less 40 unlabelled"),
        ({"prior_fraction": float("nan")}, "prior_fraction is nan; it must lie"),
        ({"prior_fraction": 0.001}, "prior part of 0 and a bound part of 40"),
        ({"prior_fraction": 0.99}, "prior part of 40 and a bound part of 0"),
        ({"unlabelled": 40}, "of 40 examples less 40 unlabelled"),
        ({"unlabelled": -1}, "less -1 unlabelled"),
        ({"test": 1.5}, "test is 1.5, but a fraction"),
        ({"test": (torch.rand(2, 4), torch.zeros(2, dtype=torch.int64))}, r"shape \(3,\) but test examples \(4,\)"),
        ({"test": (torch.rand(2, 3), torch.zeros(3, dtype=torch.int64))}, "x holds 2 examples but y holds 3"),
        ({"classes": 3}, "labels run from 0 to 3 but must lie in 0..2"),
    ],
)
def test_bad_splits_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        random_split(**options)


def test_bad_values_are_refused():
    x = torch.rand(10, 2)
    with pytest.raises(ValueError, match="labels run from -1 to 8"):
        data.split(x, torch.arange(10) - 1)
    x[3, 1] = float("nan")
    with pytest.raises(ValueError, match="x holds 1 NaN or infinite values"):
        data.split(x, torch.arange(10))


def test_digits_have_a_fixed_test_part_and_cover_all_images():
    split, other = data.digits(), data.digits(seed=1, unlabelled=37)
    assert split.train.x.shape == (1437, 1, 8, 8)
    assert split.test.x.shape == (360, 1, 8, 8)
    assert torch.equal(split.test.index, other.test.index)
    assert len(other.prior) == len(other.bound) == 700
    everything = torch.cat([other.train.index, other.unlabelled.index, other.test.index])
    assert torch.equal(everything.sort().values, torch.arange(1797))
    assert split.train.y.bincount().tolist()[0] > 100
    assert split.classes == 10
    assert len(split.mean) == 1
    raw = split.test.x * split.std[0] + split.mean[0]
    assert torch.allclose(raw * 16, (raw * 16).round(), atol=1e-4)
    # The first image of the file is a zero: guards the fixed order of the embedded file.
    assert torch.cat([split.train.y, split.test.y])[torch.cat([split.train.index, split.test.index]) == 0] == 0


def test_load_takes_a_name_and_refuses_an_unknown_one():
    assert torch.equal(data.load("digits", seed=3).train.index, data.digits(seed=3).train.index)
    with pytest.raises(ValueError, match="data set 'svhn' is unknown; use one of digits, mnist, fashion-mnist, cifar"):
        data.load("svhn")


def test_load_takes_a_function():
    calls = []

    def load(**options):
        calls.append(options)
        return random_split()

    assert data.load(load, seed=3).dataset == "own"
    data.load(load, data_dir="there")
    assert calls == [
        {"prior_fraction": 0.5, "seed": 3, "unlabelled": 0},
        {"prior_fraction": 0.5, "seed": 0, "unlabelled": 0, "data_dir": "there"},
    ]


def test_repr_of_a_split_and_a_part_names_their_sizes():
    assert repr(data.digits(seed=2, unlabelled=37)) == (
        "Split(digits, seed 2: 700 prior + 700 bound = 1,400 train, 37 unlabelled, 360 test; 10 classes)"
    )
    assert repr(data.digits().test) == "Part(test: 360 examples of shape (1, 8, 8))"
    half = torch.arange(20)
    declared = data.split(torch.rand(40, 3), torch.rand(40), indices=(half, half + 20), split_declared_random=True)
    assert repr(declared) == "Split(own, declared random: 20 prior + 20 bound = 40 train, 0 test; regression)"


def test_the_table_gives_the_shape_and_classes_that_are_loaded():
    for name in set(data.DATA_SETS) - set(REAL):
        split = data.load(name)
        assert (split.dataset, split.train.x.shape[1:], split.classes) == (
            name,
            data.DATA_SETS[name].shape,
            data.DATA_SETS[name].classes,
        )


@pytest.mark.parametrize("name", REAL)
def test_official_files_are_parsed(name, tmp_path, monkeypatch):
    contents = write_official(tmp_path / datasets.SOURCES[name].folder, monkeypatch, name)
    split = data.load(name, data_dir=tmp_path, prior_fraction=0.4)
    row = data.DATA_SETS[name]
    assert (split.dataset, split.train.x.shape[1:], split.classes) == (name, row.shape, row.classes)
    assert split.files == {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    assert split.train.x.shape == ((50, 3, 32, 32) if name == "cifar10" else (10, 1, 28, 28))
    assert split.classes == 10
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (split.mean, split.std))
    pixels = ((split.test.x * std + mean) * 255).round().to(torch.uint8).numpy()
    assert pixels.tobytes()[:100] in list(contents.values())[-1 if name == "cifar10" else -2]
    assert torch.equal(split.test.y, torch.arange(10))
    assert torch.equal(split.train.y, split.train.index % 10)


def test_loose_and_recompressed_files_are_read_and_damaged_ones_refused(tmp_path, monkeypatch):
    contents = write_official(tmp_path, monkeypatch, "mnist")
    loose = data.mnist(data_dir=tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    images.unlink()
    packed = images.with_suffix(".gz")
    packed.write_bytes(gzip.compress(contents[images.name], compresslevel=1))
    monkeypatch.setenv("PACPRUNE_DATA", str(tmp_path))
    assert data.mnist().train.hash == loose.train.hash
    packed.write_bytes(packed.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"idx3-ubyte.gz cannot be read .*; delete it and run `pacprune data fetch"):
        data.mnist()
    packed.write_bytes(gzip.compress(b"other"))
    official = datasets.SOURCES["mnist"].contents[images.name]
    with pytest.raises(ValueError, match=f"md5 {hashlib.md5(b'other').hexdigest()}, the official .* has {official}"):
        data.mnist()
    packed.unlink()
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte of mnist is neither in .* run `pacprune data fetch"):
        data.mnist()


def test_data_folder_comes_from_the_argument_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PACPRUNE_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.data_folder() == tmp_path / "pacprune"
    monkeypatch.setenv("PACPRUNE_DATA", "/somewhere")
    assert str(data.data_folder()) == "/somewhere"
    assert data.data_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("name", REAL)
def test_real_files_have_the_published_sizes_and_moments(name):
    if "PACPRUNE_DATA" not in os.environ or not (data.data_folder() / datasets.SOURCES[name].folder).is_dir():
        pytest.skip(f"the files of {name} are not in $PACPRUNE_DATA")
    split = REAL[name](seed=0, unlabelled=1000)
    n = 50_000 if name == "cifar10" else 60_000
    assert len(split.train) == n - 1000
    assert len(split.test) == 10_000
    assert split.test.y.bincount(minlength=10).min() > 800
    assert abs(float(split.prior.x.mean())) < 1e-4
    expected = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530), "cifar10": (0.4914, 0.2470)}[name]
    assert abs(split.mean[0] - expected[0]) < 2e-3
    assert abs(split.std[0] - expected[1]) < 2e-3


def test_images_of_bytes_are_standardised_by_channel_wherever_their_channels_are() -> None:
    g = torch.Generator().manual_seed(0)
    first = torch.randint(256, (20, 3, 8, 8), generator=g, dtype=torch.uint8)
    y = torch.arange(20) % 2
    expected, last = data.split(first, y), data.split(first.permute(0, 2, 3, 1).contiguous(), y)
    assert len(expected.mean) == 3
    assert torch.equal(expected.train.x, last.train.x)
    assert expected.mean == last.mean
    assert data.split(first[:, 0].numpy(), y.numpy()).train.x.shape == (20, 1, 8, 8)
    with pytest.raises(ValueError, match=r"torch\.uint8 of shape \(20, 8, 8, 7\), of which neither dimension 1 nor"):
        data.split(torch.zeros(20, 8, 8, 7, dtype=torch.uint8), y)


def test_inputs_without_labels_are_the_bound_part():
    x, y, inputs = torch.rand(100, 5), torch.randint(3, (100,)), torch.rand(40, 5)
    made = data.split(x, y, bound=inputs, split_declared_random=True, test=0.2, seed=4)
    assert [len(part) for part in (made.prior, made.bound, made.train, made.unlabelled, made.test)] == [
        80,
        40,
        80,
        0,
        20,
    ]
    assert made.declared
    assert (made.bound.y == -1).all()
    assert (made.bound.has_labels, made.prior.has_labels, made.unlabelled.has_labels) == (False, True, True)
    assert torch.allclose(made.bound.x * torch.tensor(made.std) + torch.tensor(made.mean), inputs, atol=1e-6)
    assert made.prior.x.mean(0).abs().max() < 1e-5
    assert made.files.keys() == {"x", "y", "bound_x"}
    assert repr(made) == "Split(own, declared random: 80 prior = train, 40 bound without labels, 20 test; 3 classes)"
    other = data.split(x, y, bound=inputs + 1, split_declared_random=True, test=0.2, seed=4)
    assert torch.equal(other.prior.y, made.prior.y)
    assert other.bound.hash != made.bound.hash


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bound": torch.rand(0, 5)}, "bound has 0 inputs of shape"),
        ({"bound": torch.rand(9, 4)}, r"bound has 9 inputs of shape \(4,\) .* and x has 100 of shape \(5,\)"),
        ({"bound": torch.rand(9, 5).double()}, "in torch.float64, and x has 100 .* torch.float32; give at least one"),
        ({"bound": torch.rand(9, 5), "unlabelled": 5}, "bound has 9 inputs, .*, and unlabelled is 5; give one of both"),
        ({"bound": torch.rand(9, 5), "y": torch.rand(100)}, "y runs from .* as in regression; leave bound out"),
        ({"bound": torch.full((9, 5), float("nan")), "split_declared_random": True}, "x holds 45 NaN"),
    ],
)
def test_inputs_that_cannot_be_the_bound_part_are_refused(options, sentence):
    torch.manual_seed(0)
    y = options.get("y", torch.randint(3, (100,)))
    with pytest.raises(ValueError, match=sentence):
        data.split(torch.rand(100, 5), y, **{name: value for name, value in options.items() if name != "y"})


def test_training_inputs_are_no_bound_inputs_unless_new_data_repeat_them():
    x, y = torch.rand(100, 5), torch.randint(3, (100,))
    with pytest.raises(ValueError, match="the 30 inputs of bound, and 30 of them are among the 100 of x"):
        data.split(x, y, bound=x[:30])
    made = data.split(x, y, bound=x[:30], split_declared_random=True)
    assert made.duplicates == 30


def test_what_needs_labels_refuses_a_bound_part_without_any():
    split = data.split(torch.rand(60, 4), torch.arange(60) % 2, bound=torch.rand(30, 4), split_declared_random=True)
    model = torch.nn.Linear(4, 2)
    for attempt in (
        lambda: pp.certify_held_out(model, split, declare="nothing was trained"),
        lambda: pp.certify_held_out(model, split, risk="brier", declare="nothing was trained"),
        lambda: pp.pbp(model, split, pp.Config(epochs=1), sparsity=0.5),
    ):
        with pytest.raises(ValueError, match="the 60 prior examples have labels and the 30 bound examples have none"):
            attempt()
    pair = {"risk": "disagreement", "reference": torch.nn.Linear(4, 2), "declare": "nothing was trained"}
    with pytest.raises(ValueError, match="groups is 'class', but the bound examples have no labels"):
        pp.certify_held_out(model, split, groups="class", **pair)
    with pytest.raises(ValueError, match="the 30 examples of the bound part have no labels"):
        pp.error(model, split.bound)
    with pytest.raises(ValueError, match="labels run from -1 to -1"):
        pp.fit(model, split.bound, pp.Config(epochs=1))


@pytest.mark.parametrize("y", [None, ["cat"] * 3, object()])
def test_labels_that_are_no_numbers(y: object) -> None:
    with pytest.raises(ValueError, match=r"y is a .* that is no array of numbers"):
        pp.data.split(torch.zeros(3, 2), y, seed=0)  # type: ignore[arg-type]


def test_test_examples_among_those_of_training_are_counted_and_warned_about():
    x, y = torch.rand(200, 5), torch.randint(3, (200,))
    with pytest.warns(
        UserWarning, match="50 of the 50 test examples are also among the 200 that networks are trained on"
    ):
        made = data.split(x, y, test=(x[:50], y[:50]))
    assert made.test_copies == 50
    with pytest.warns(UserWarning, match="of the 80 test examples are also among"):
        repeated = data.split(torch.cat([x, x]), torch.cat([y, y]), test=0.2)
    assert 0 < repeated.test_copies < 80
    images = torch.randint(256, (200, 8, 8), dtype=torch.uint8)
    fewer = torch.randint(256, (200, 8, 8), dtype=torch.uint8)
    fewer[0] = images[3]
    assert data.split(images, y, test=(fewer, y)).test_copies == 1  # of 200, without a warning
    assert data.digits().test_copies == 0


def test_inputs_without_labels_have_to_be_declared_random():
    x, y = torch.rand(100, 5), torch.randint(3, (100,))
    sentence = "no seed has drawn the 30 inputs of bound, and 0 of them .* say split_declared_random=True"
    with pytest.raises(ValueError, match=sentence):
        data.split(x, y, bound=torch.rand(30, 5))


def test_bound_inputs_that_nobody_has_certified_on_are_another_pool():
    x, y, inputs = torch.rand(100, 5), torch.randint(3, (100,)), torch.rand(80, 5)
    cuts = [data.split(x, y, bound=part, split_declared_random=True) for part in (inputs[:40], inputs[40:])]
    assert not set(cuts[0].pool) & set(cuts[1].pool)
    assert not set(cuts[0].pool) & set(data.split(x, y).pool)
