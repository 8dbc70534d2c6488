"""Batches of any kind: mappings, functions of one's own, nests of tensors, arrays and streams."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pacprune as pp
from pacprune.methods.table import METHODS, pruning_methods

G = torch.Generator().manual_seed(1)
X = torch.randn(96, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=2, lr=0.1, batch_size=32)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """Called as classifiers of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.body(inputs)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"inputs": X[i], "labels": Y[i]}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# --- Mappings, and functions of one's own.


def test_a_mapping_is_the_models_arguments_and_its_loss_is_the_outputs() -> None:
    plain, named = net(), Classifier()
    pp.fit(plain, TensorDataset(X, Y), CONFIG)
    pp.fit(named, Named(), CONFIG)
    assert same(plain, named)
    assert pp.error(named, Named()) == pp.error(plain, (X, Y))


def test_forward_and_loss_get_the_batch() -> None:
    plain, own, whole = net(), net(), net()
    batches = DataLoader(Named(), 32)
    pp.fit(plain, DataLoader(TensorDataset(X, Y), 32), CONFIG)
    pp.fit(
        own,
        batches,
        CONFIG,
        forward=lambda model, batch: model(batch["inputs"]),
        loss=lambda output, batch: F.cross_entropy(output, batch["labels"]),
    )
    pp.fit(
        whole, batches, CONFIG, forward=lambda model, batch: F.cross_entropy(model(batch["inputs"]), batch["labels"])
    )
    assert same(plain, own)
    assert same(plain, whole)
    flat = net()
    pp.fit(flat, DataLoader(TensorDataset(X[:, None], Y), 32), CONFIG, forward=lambda m, batch: m(batch[0].flatten(1)))
    assert same(plain, flat)  # of a pair, the loss is still the cross-entropy with its labels


def test_a_loss_of_a_mapping_gets_output_and_batch() -> None:
    own, plain = Classifier(), Classifier()
    pp.fit(own, Named(), CONFIG, loss=lambda output, batch: F.cross_entropy(output.logits, batch["labels"]))
    pp.fit(plain, Named(), CONFIG)
    assert same(own, plain)


@pytest.mark.parametrize("name", pruning_methods())
def test_every_method_takes_mappings(name: str) -> None:
    method = METHODS[name]
    result = method.verb(Classifier(), DataLoader(Named(), 32), CONFIG, sparsity=0.8, **method.options)
    assert result.sparsity == 0.8
    own = method.verb(
        net(),
        DataLoader(Named(), 32),
        CONFIG,
        sparsity=0.8,
        forward=lambda model, batch: F.cross_entropy(model(batch["inputs"]), batch["labels"]),
        validation=DataLoader(Named(), 32),
        **method.options,
    )
    assert own.sparsity == 0.8
    assert "validation_loss" in own.history[-1]


def test_criteria_and_batchnorm_take_mappings() -> None:
    named, plain = Classifier(), net()
    for criterion in ("snip", "grasp"):
        scores, expected = pp.scores.score(criterion, named, Named()), pp.scores.score(criterion, plain, (X, Y))
        for name, values in expected.items():
            torch.testing.assert_close(scores[f"body.{name}"], values)
    with pytest.raises(ValueError, match="synflow needs the shape of an input x, but a batch is a dict"):
        pp.scores.synflow(named, Named())
    norm = nn.BatchNorm1d(6)
    pp.reestimate_batchnorm(nn.Sequential(norm), DataLoader(Named(), 96), forward=lambda m, batch: m(batch["inputs"]))
    torch.testing.assert_close(norm.running_mean, X.mean(0))


class Item(NamedTuple):
    image: Tensor
    more: list[Any]


def test_nested_batches_are_cut_into_micro_batches() -> None:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> Item:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return Item(x, [{"label": y, "name": "digits"}, torch.tensor(1.0)])

    def forward(model: nn.Module, batch: Item) -> Tensor:
        assert batch.more[0]["name"] == "digits"
        return F.cross_entropy(model(batch.image), batch.more[0]["label"]) * batch.more[1]

    nested = DataLoader(TensorDataset(X, Y), 32, collate_fn=collate)
    plain, own = net(), net()
    config = pp.Config(epochs=2, lr=0.1, accumulate=2)
    pp.fit(plain, DataLoader(TensorDataset(X, Y), 32), config)
    pp.fit(own, nested, config, forward=forward)
    assert same(plain, own)


def test_packed_sequences_are_inputs() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 5), nn.Linear(5, 3)

        def forward(self, x: rnn.PackedSequence) -> Tensor:
            return self.head(self.rnn(x)[1][0])

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[rnn.PackedSequence, Tensor]:
        x, y = zip(*rows, strict=True)
        return rnn.pack_sequence([row.reshape(1, 6) for row in x]), torch.stack(y)

    model, loader = Last(), DataLoader(TensorDataset(X, Y), 32, collate_fn=collate)
    assert len(pp.fit(model, loader, CONFIG)) == 2
    assert pp.osp(model, loader, CONFIG, sparsity=0.5).sparsity == pytest.approx(0.5, abs=0.01)


def test_forward_is_for_one_model_and_together_trains_one_by_one() -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match="forward= calls one model, but 2 are trained as a population; train them one"):
        pp.fit([net(), net()], (X, Y), CONFIG, forward=forward)
    results = pp.together(pp.osp, [net(), net()], (X, Y), CONFIG, sparsity=0.5, forward=forward)
    assert same(results[0].model, pp.osp(net(), (X, Y), CONFIG, sparsity=0.5).model)


class Thing:
    """No tensor, and nothing that a device could take."""


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"inputs": X, "thing": Thing()}, {}, r"a batch holds a Thing, which has no \.to\(device\); give tensors"),
        ((X, Y, Y), {}, r"a batch is a tuple of 3, neither a pair \(x, y\) nor a mapping .*; give forward="),
        ({"inputs": X}, {}, r"the output for a batch is a Output without a loss; .* give loss=\(output, batch\)"),
        ({"inputs": X}, {"loss": lambda output, batch: None}, "the loss gave no number for outputs that are a Output"),
        ({"name": "x"}, {"forward": lambda m, b: m(X)}, "a batch is a dict without a tensor whose first dimension"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(batch: Any, options: dict[str, Any], message: str) -> None:
    loader = DataLoader([0], 1, collate_fn=lambda rows: batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        pp.fit(Classifier(), loader, pp.Config(epochs=1), **options)


# --- Streams and arrays.


def test_a_stream_has_epochs_of_as_many_steps_as_it_is_told() -> None:
    stream, plain = net(), net()
    rows = pp.fit(stream, DataLoader(Stream(), 32), pp.Config(epochs=3, lr=0.1, steps_per_epoch=2))
    pp.fit(plain, DataLoader(TensorDataset(X, Y), 32), pp.Config(epochs=2, lr=0.1))
    assert same(stream, plain)  # it goes on where the epoch before has left it, and begins again at its end
    assert len(rows) == 3
    bare = net()
    pp.fit(bare, Stream(), pp.Config(epochs=3, lr=0.1, batch_size=32, steps_per_epoch=2))
    assert same(bare, plain)


def test_a_broken_run_on_a_stream_goes_on(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        if done == broken_at:
            raise KeyboardInterrupt

    config, whole = pp.Config(epochs=4, lr=0.1, steps_per_epoch=2), net()
    pp.fit(whole, DataLoader(Stream(), 20), config)
    for broken_at in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            pp.fit(
                net(), DataLoader(Stream(), 20), config, checkpoint=tmp_path / f"{broken_at}", every=1, progress=stop
            )
        resumed = net()
        pp.fit(resumed, DataLoader(Stream(), 20), config, checkpoint=tmp_path / f"{broken_at}", every=1)
        assert same(resumed, whole)


def test_a_network_is_pruned_on_a_stream_and_the_stream_counts_as_unknown() -> None:
    model, config = nn.Sequential(nn.BatchNorm1d(6), net()), pp.Config(epochs=2, lr=0.1, steps_per_epoch=3)
    assert pp.pft(model, DataLoader(Stream(), 32), config, sparsity=0.8, criterion="snip").sparsity == 0.8
    split = pp.data.split(X + 5, Y, seed=0)
    with pytest.raises(ValueError, match="declar"):
        pp.certify_held_out(model, split)


def test_streams_are_refused_where_all_examples_are_needed() -> None:
    with pytest.raises(ValueError, match=r"steps_per_epoch is None and the data are a stream, a Stream; give Config"):
        pp.fit(net(), Stream(), CONFIG)
    with pytest.raises(ValueError, match=r"steps_per_epoch is 3 and the data are a tuple, no stream; leave it out"):
        pp.fit(net(), (X, Y), pp.Config(steps_per_epoch=3))
    with pytest.raises(ValueError, match="a stream, a Stream, but an evaluation needs all examples; give a map-style"):
        pp.error(net(), DataLoader(Stream(), 4))

    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(ValueError, match="gave no example"):
        pp.fit(net(), Empty(), pp.Config(epochs=1, steps_per_epoch=1))


def test_arrays_are_read_like_tensors() -> None:
    arrays, tensors = net(), net()
    pp.fit(arrays, (X.numpy(), Y.numpy()), CONFIG)
    pp.fit(tensors, (X, Y), CONFIG)
    assert same(arrays, tensors)
    assert pp.error(arrays, (X.numpy(), Y.numpy())) == pp.error(tensors, (X, Y))
    with pytest.raises(ValueError, match=r"x is torch\.float64 but the model's parameters are torch\.float32; cast"):
        pp.fit(net(), (X.double().numpy(), Y.numpy()), CONFIG)


def test_images_of_bytes_are_refused_in_a_sentence() -> None:
    images = torch.randint(256, (8, 6, 6, 3), dtype=torch.uint8)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(ValueError, match=r"x is torch\.uint8 of shape \(2, 6, 6, 3\), .* channels first"):
        pp.fit(model, (images, torch.zeros(8, dtype=torch.int64)), CONFIG)


# --- Small things that cost trust.


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations_of_ones_own_are_trained_and_not_pruned(norm: Any) -> None:
    def make() -> Any:
        model = net()
        norm(model[0])
        return model

    model = make()
    config = pp.Config(epochs=20, lr=0.1, batch_size=32)
    pp.fit(model, (X, Y), config)
    for (name, trained), (_, start) in zip(model.named_parameters(), make().named_parameters(), strict=True):
        assert not torch.equal(trained, start), name
    assert pp.error(model, (X, Y)) < 0.2
    kind = {"weight_norm": "_WeightNorm", "spectral_norm": "_SpectralNorm"}[norm.__name__]
    with pytest.raises(ValueError, match=rf"0\.weight is parametrized by {kind}; call .*remove_parametrizations"):
        pp.osp(model, (X, Y), CONFIG, sparsity=0.5)


def test_a_population_of_parametrized_networks_is_trained() -> None:
    def make() -> Any:
        model = net()
        parametrizations.weight_norm(model[0])
        return model

    alone, members = make(), [make(), make()]
    pp.fit(alone, (X, Y), CONFIG)
    pp.fit(members, (X, Y), CONFIG)
    for p, q in zip(alone.parameters(), members[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("y", [X[:, :1], (X[:, 0] > 0).long()])
def test_cross_entropy_over_one_output_is_refused(y: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 1))
    with pytest.raises(ValueError, match=r"1 output, over which cross_entropy is 0 .*; give loss=.*mse_loss"):
        pp.fit(model, (X, y), CONFIG)
    assert math.isfinite(pp.fit(nn.Linear(6, 1), (X, X[:, :1]), CONFIG, loss=F.mse_loss)[-1]["loss"])


def test_a_loader_and_another_batch_size_are_refused() -> None:
    loader = DataLoader(TensorDataset(X, Y), 16)
    with pytest.raises(
        ValueError, match="batch_size is 32, but the DataLoader makes batches of 16; leave batch_size out"
    ):
        pp.fit(net(), loader, CONFIG)
    pp.fit(net(), loader, pp.Config(epochs=1, batch_size=16))
    pp.fit(net(), loader, pp.Config(epochs=1))


def test_public_modules_are_there_without_an_import() -> None:
    assert callable(pp.export.save)


class Once(IterableDataset):  # type: ignore[type-arg]
    """A stream that can be read once."""

    def __init__(self) -> None:
        self.rows = iter([(x, y) for x, y in zip(X, Y, strict=True)] * 3)

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def test_a_stream_that_does_not_begin_again_is_refused_when_it_ends() -> None:
    config = pp.Config(epochs=1, steps_per_epoch=500, batch_size=32)
    with pytest.raises(ValueError, match="has no more batches when it is read once more; give one that begins again"):
        pp.fit(net(), Once(), config)


def test_a_pair_may_have_a_mapping_for_its_labels() -> None:
    class Named(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> Any:
            return X[index], {"label": Y[index]}

    def loss(output: Tensor, labels: Any) -> Tensor:
        return F.cross_entropy(output, labels["label"])

    rows = pp.fit(net(), Named(), CONFIG, loss=loss)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, nn.MSELoss()])
def test_a_loss_that_compares_every_output_with_every_label_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"every output with every label, .* shape \(2, 1\) .*reshape\(-1, 1\)"):
        pp.fit(nn.Linear(6, 1), (X, X[:, 0]), CONFIG, loss=loss)
    pp.fit(nn.Linear(6, 1), (X, X[:, :1]), CONFIG, loss=loss)
    pp.fit(nn.Linear(6, 1), (X, X[:, 0]), CONFIG, loss=lambda out, y: loss(out.squeeze(1), y))


def test_a_lazy_network_needs_a_batch_first() -> None:
    model = nn.Sequential(nn.LazyLinear(20), nn.Linear(20, 3))
    for call in (pp.fit, lambda *args: pp.pft(*args, sparsity=0.5)):
        with pytest.raises(ValueError, match=r"0\.weight has no shape yet, .* run one batch through the model first"):
            call(model, (X, Y), CONFIG)
    model(X)
    assert pp.pft(model, (X, Y), CONFIG, sparsity=0.5).sparsity == 0.5


def image_batches() -> Any:
    examples: Any = [{"image": image, "labels": label} for image, label in zip(X, Y, strict=True)]
    return DataLoader(examples, 32)


def test_a_mapping_that_the_network_does_not_take_names_forward() -> None:
    for call in (pp.error, lambda model, data: pp.fit(model, data, CONFIG)):
        with pytest.raises(ValueError, match=r"has image, labels, but Sequential does not .* give forward="):
            call(net(), image_batches())


def test_an_error_of_the_networks_own_stays_what_it_is() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 6))

        def forward(self, image: Tensor, labels: Tensor) -> Any:
            return cast("Any", 5)(image)

    with pytest.raises(TypeError, match="not callable"):
        pp.error(Broken(), image_batches())


def test_errors_take_a_forward() -> None:
    model, batches = net(), image_batches()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["image"])

    assert pp.error(model, batches, forward=forward) == pp.error(model, (X, Y))
    assert pp.error(model, (X, Y), forward=lambda model, batch: -model(batch[0])) != pp.error(model, (X, Y))
    models: Any = [net(), net()]
    with pytest.raises(ValueError, match="forward= calls one model, but 2 are evaluated at once"):
        pp.error(models, batches, forward=forward)
    triples: Any = DataLoader(TensorDataset(X, X, Y), 32)
    with pytest.raises(ValueError, match="a batch has 3 parts, but an error needs labels"):
        pp.error(model, triples, forward=lambda model, batch: model(batch[0]))
    attached = pp.attach(model, pp.isotropic(model, sparsity=0.5))
    assert 0 < pp.gibbs_error(attached, batches, draws=2, forward=forward) < 1
