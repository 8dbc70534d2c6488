"""Data in any form: the same examples, the same hashes, and every random state restored."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from pacprune import data, philox
from pacprune.data import batches, trace

CPU = torch.device("cpu")
X = torch.arange(30.0).reshape(10, 3)
Y = torch.arange(10) % 3


class Noisy(Dataset):
    """A random augmentation, as torchvision's are."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + torch.randn(3), Y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def forms() -> dict[str, batches.Data]:
    pairs = TensorDataset(X, Y)
    part = data.Part("own", X, Y, torch.arange(10))
    return {"tensors": (X, Y), "part": part, "dataset": pairs, "loader": DataLoader(pairs, 4), "of-list": list_loader()}


def list_loader() -> DataLoader:
    return DataLoader(list(zip(X, Y, strict=True)), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["tensors", "part", "dataset", "loader", "of-list"])
def test_every_form_gives_the_same_batches_and_hashes(form: str) -> None:
    examples = forms()[form]
    pairs = list(batches.batches(examples, 4, device=CPU))
    assert [len(x) for x, _ in pairs] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in pairs]), X)
    assert torch.equal(torch.cat([y for _, y in pairs]), Y)
    assert torch.equal(batches.example_hashes(examples), trace.example_hashes(X))
    assert batches.size(examples) == 10


def test_batches_follow_the_order_and_stop_at_the_limit() -> None:
    order = torch.arange(9, -1, -1)
    for form in ("tensors", "part", "dataset"):
        pairs = list(batches.batches(forms()[form], 4, device=CPU, order=order, limit=6))
        assert [len(x) for x, _ in pairs] == [4, 2]
        assert torch.equal(torch.cat([y for _, y in pairs]), Y.flip(0)[:6])
    assert sum(len(x) for x, _ in batches.batches(forms()["loader"], 99, device=CPU, limit=5)) == 8  # whole batches


def test_a_part_is_hashed_by_content_and_by_origin() -> None:
    part = data.Part("own", X, Y, torch.arange(10), source="ab" * 32)
    assert batches.use_of(part).equal(part.trace)
    assert torch.equal(part.trace.examples, part.ids.unique())
    assert batches.use_of(DataLoader(part, 4)).equal(part.trace)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ((X, Y[:9]), "x has 10 examples but y has 9"),
        ((X[:0], Y[:0]), "empty: 0 examples"),
        (TensorDataset(X[:0], Y[:0]), "empty: 0 examples"),
        (DataLoader(TensorDataset(X, Y), 11, drop_last=True), "empty: 0 examples"),
        ([X, Y], "data is a list; give"),
        (("x", Y), "data is a tuple of str, Tensor; give"),
        ("digits", "data is a str; give"),
    ],
)
def test_data_that_cannot_be_read_is_refused(examples: batches.Data, message: str) -> None:
    for use in (batches.tensors, batches.size, batches.example_hashes):
        with pytest.raises(ValueError, match=message):
            use(examples)


def test_hashes_of_a_random_augmentation_repeat_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    first = batches.example_hashes(Noisy())
    assert torch.equal(state, torch.get_rng_state())
    torch.randn(3)
    assert torch.equal(first, batches.example_hashes(DataLoader(Noisy(), 4, shuffle=True)))
    torch.set_rng_state(state)


def test_generators_of_a_loader_are_found_wherever_they_are() -> None:
    pairs, g = TensorDataset(X, Y), torch.Generator()
    sampler = RandomSampler(pairs, generator=g)
    loaders = {
        "shuffle": DataLoader(pairs, 4, shuffle=True, generator=g),
        "sampler": DataLoader(pairs, 4, sampler=sampler),
        "subset": DataLoader(pairs, 4, sampler=SubsetRandomSampler(range(5), generator=g)),
        "batch sampler": DataLoader(pairs, batch_sampler=BatchSampler(sampler, 4, drop_last=False)),
    }
    for name, loader in loaders.items():
        assert any(generator is g for generator in batches.generators(loader)), name
    assert batches.generators(DataLoader(pairs, 4, shuffle=True)) == []
    assert batches.generators((X, Y)) == []


@pytest.mark.parametrize("has_generator", [True, False], ids=["own generator", "global generator"])
def test_isolated_rng_restores_every_random_state(has_generator: bool) -> None:
    g = torch.Generator().manual_seed(3) if has_generator else None
    loader = DataLoader(TensorDataset(X, Y), 4, shuffle=True, generator=g)
    before, orders = torch.get_rng_state(), []
    for _ in range(2):
        with batches.isolated_rng(CPU, loader, seed=5):
            orders.append(torch.cat([y for _, y in loader]).tolist())
            torch.rand(7)
    assert orders[0] == orders[1]

    def broken() -> None:
        list(loader)
        raise KeyError

    with pytest.raises(KeyError), batches.isolated_rng(CPU, loader):
        broken()
    assert torch.equal(before, torch.get_rng_state())
    assert g is None or torch.equal(g.get_state(), torch.Generator().manual_seed(3).get_state())


def test_hashing_uses_the_loaders_collate_function_and_reads_a_dataset_once_per_training() -> None:
    class Ragged(Dataset):
        reads = 0

        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> dict[str, object]:
            self.reads += 1
            return {"x": X[i], "y": Y[i]}

    def collate(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([e["x"] for e in examples]), torch.stack([e["y"] for e in examples])

    ragged = Ragged()
    loader = DataLoader(ragged, 2, collate_fn=collate)
    for training in range(2):
        with batches.reading_once(), batches.reading_once():
            assert torch.equal(batches.example_hashes(loader), trace.example_hashes(X[:5]))
            assert torch.equal(batches.label_hashes(loader), batches.label_hashes((X[:5], Y[:5])))
        assert ragged.reads == 5 * (training + 1)


def test_crop_flip_gives_windows_of_the_padded_image_or_its_mirror():
    x, word = torch.rand(200, 2, 5, 6), philox.words(200, seed=0, step=3, stream=philox.AUGMENT)
    out = batches.crop_flip(x, word)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    windows = [(flip, top, left) for flip in (False, True) for top in range(3) for left in range(3)]
    counts = []
    for flip, top, left in windows:
        window = padded[:, :, top : top + 5, left : left + 6]
        counts.append(int((out == (window.flip(-1) if flip else window)).flatten(1).all(1).sum()))
    assert min(counts) > 0
    assert sum(counts) == 200
    assert torch.equal(out, batches.crop_flip(x.reshape(4, 50, 2, 5, 6), word.reshape(4, 50)).flatten(0, 1))


def test_a_tensor_is_hashed_once_until_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = trace.example_hashes, []
    monkeypatch.setattr(trace, "example_hashes", lambda x: calls.append(len(x)) or real(x))
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)
    first = batches.example_hashes((x, y))
    assert torch.equal(batches.example_hashes((x, y)), first)
    assert len(calls) == 1
    x[2] = 1.0
    assert torch.equal(batches.example_hashes((x, y)), real(x))
    x.data = x.data + 1
    assert torch.equal(batches.example_hashes((x, y)), real(x))
    x.numpy()[0] = 7.0  # does not change the version of x
    assert torch.equal(batches.example_hashes((x, y)), real(x))
    assert torch.equal(batches.example_hashes((x[:3], y[:3])), real(x[:3]))
    entries = len(batches._hashes)
    del x
    assert len(batches._hashes) == entries - 1  # the entry of a deleted tensor is deleted
    with torch.inference_mode():
        frozen = torch.randn(4, 3)
    assert torch.equal(batches.example_hashes((frozen, y[:4])), real(frozen))
