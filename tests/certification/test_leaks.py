"""Leaks through training that worked once, each by its name; and honest uses beside them that are not refused."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_certify import FAST, digits, ledger, prior_of  # noqa: F401
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import pacprune as pp
from pacprune.certification import rules
from pacprune.data import trace
from pacprune.data.splits import Split

SHORT = pp.Config(epochs=1, lr=0.05)
CHANGED = "weights of the network were made or changed by something other than pacprune"
NEVER = "pacprune has never trained the network, or not every layer of it"
SEEN = "has seen the bound set"


@pytest.fixture(autouse=True)
def _nothing_looked_at() -> None:
    trace._looks.clear()


@cache
def random_labels() -> Split:
    """Random pixels and labels: the true risk of any network is 0.9."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(400, 1, 8, 8, generator=generator), torch.randint(10, (400,), generator=generator)
    return pp.data.split(x, y, classes=10)


def network(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *extra, nn.ReLU(), nn.Linear(32, 10))


def trained(data: Any = None) -> nn.Sequential:
    model = network()
    pp.fit(model, random_labels().prior if data is None else data, SHORT)
    return model


def own_loop(model: nn.Module) -> None:
    """Training on the bound set that pacprune knows nothing about."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(random_labels().bound.x), random_labels().bound.y).backward()
        optimizer.step()
    model.eval()


def refused(model: nn.Module, words: str, split: Split | None = None) -> None:
    with pytest.raises(ValueError, match=words):
        pp.certify_held_out(model, random_labels() if split is None else split)


def issued(model: nn.Module, split: Split | None = None) -> None:
    """There is a certificate without a declaration."""
    cert = pp.certify_held_out(model, random_labels() if split is None else split)
    assert cert.record["declaration"] is None


# --- 6. Every module knows what pacprune left in it.


def test_a_new_network_of_trained_layers_knows_that_they_were_changed() -> None:
    model = trained()
    rebuilt = nn.Sequential(*model.children())
    issued(rebuilt)
    own_loop(rebuilt)
    refused(rebuilt, CHANGED)
    refused(model, CHANGED)


def test_the_network_inside_a_wrapper_knows_that_it_was_changed() -> None:
    model = network()
    pp.fit(nn.Sequential(model), random_labels().prior, SHORT)
    issued(model)
    own_loop(model)
    refused(model, CHANGED)


def test_a_network_that_was_trained_behind_the_compiler_knows_that_it_was_changed() -> None:
    model = network()
    pp.fit(torch.compile(model, backend="eager"), random_labels().prior, SHORT)  # type: ignore[arg-type]
    issued(model)
    own_loop(model)
    refused(model, CHANGED)


def test_a_prior_of_changed_layers_is_untraced() -> None:
    split, rebuilt = random_labels(), nn.Sequential(*trained().children())
    own_loop(rebuilt)
    prior = pp.read(pp.attach(rebuilt, pp.isotropic(rebuilt, sparsity=0.1, std=0.01)))
    pp.fit_posterior(rebuilt, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="weights of the prior were made or changed"):
        pp.certify(rebuilt, prior, split, **FAST)


def test_a_layer_that_pacprune_never_trained_stays_unknown_after_pruning() -> None:
    layers = list(trained().children())
    mixed = nn.Sequential(*layers[:-1], nn.Linear(32, 10))
    refused(mixed, NEVER)
    pp.apply_mask(mixed, pp.top_k(pp.scores.magnitude(mixed), sparsity=0.5))
    refused(mixed, NEVER)
    pp.fit(mixed, random_labels().prior, SHORT)
    issued(mixed)


def test_a_parameter_that_is_put_into_a_trained_layer_is_a_change() -> None:
    model = trained()
    model[3].register_parameter("offset", nn.Parameter(torch.ones(10)))
    refused(model, CHANGED)


def test_a_distribution_that_was_put_together_by_hand_stays_unknown_once_attached() -> None:
    split, model = random_labels(), trained()
    slab = pp.isotropic(model, sparsity=0.1, std=0.01)
    other = pp.SpikeSlab(
        {**slab.keep_prob}, {n: m + 0.1 for n, m in slab.mean.items()}, slab.std, slab.rest, slab.total
    )
    prior = pp.read(pp.attach(model, other))
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="declare="):
        pp.certify(model, prior, split, **FAST)


# --- 7. A training that does not end.


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_network_whose_training_was_interrupted_knows_that_it_was_changed() -> None:
    model = network()
    with pytest.raises(KeyboardInterrupt):
        pp.fit(model, random_labels().prior, pp.Config(epochs=5, lr=0.01), progress=interrupted)
    issued(model)
    own_loop(model)
    refused(model, CHANGED)


def test_a_network_whose_training_diverged_knows_that_it_was_changed() -> None:
    model, losses = network(), iter([1.0, 1.0, 1.0, float("nan")])
    with pytest.raises(ValueError, match="the loss became nan"):
        pp.fit(
            model,
            random_labels().prior,
            pp.Config(epochs=5, lr=0.01, batch_size=20),
            loss=lambda out, y: F.cross_entropy(out, y) * next(losses, float("nan")),
        )
    other = network()
    own_loop(other)
    model.load_state_dict(other.state_dict())
    refused(model, CHANGED)


def test_a_change_by_pacprune_that_fails_is_noted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()

    def fails(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("pacprune.masking.weights.zero_pruned_", fails)
    with pytest.raises(RuntimeError):
        pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.5))
    own_loop(model)
    refused(model, CHANGED)


# --- 8. Data that are filled anew.


class Buffer(Dataset[tuple[Tensor, Tensor]]):
    """Examples that can be exchanged."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.tensors = x, y
        self.reads = 0

    def __len__(self) -> int:
        return len(self.tensors[1])

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.tensors[0][i], self.tensors[1][i]


@pytest.mark.parametrize("kind", [Buffer, TensorDataset])
@pytest.mark.parametrize("batched", [True, False])
def test_a_dataset_that_is_filled_anew_is_read_anew(kind: Any, batched: bool) -> None:
    split = random_labels()
    dataset = kind(split.prior.x, split.prior.y)
    data = DataLoader(dataset, batch_size=50, shuffle=True) if batched else dataset
    model = trained(data)
    issued(model)
    dataset.tensors = split.bound.x, split.bound.y
    pp.fit(model, data, SHORT)
    refused(model, SEEN)


def test_a_dataset_is_read_once_for_its_hashes_in_one_training() -> None:
    split = random_labels()
    dataset, validation = Buffer(split.prior.x, split.prior.y), Buffer(split.prior.x, split.prior.y)
    pp.fit(network(), dataset, pp.Config(epochs=2, lr=0.05), validation=validation)
    assert dataset.reads <= 4 * len(dataset)  # hashes, two epochs, and the batch that is tried out
    assert validation.reads <= 3 * len(validation)


# --- 9. Near copies in the bound set.


def test_near_copies_in_the_bound_set_are_repeats() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8, generator=generator), torch.randint(10, (60,), generator=generator)
    x = x.repeat(20, 1, 1, 1)
    for noise, least in ((torch.randn(x.shape, generator=generator), 100), (torch.rand(x.shape) - 0.5, 500)):
        split = pp.data.split(x + 0.4 / 256 * noise, y.repeat(20), classes=10)
        assert least < split.repeats <= 540
        refused(trained(split.prior), "bound examples are copies of others", split)
    exact = pp.data.split(x, y.repeat(20), classes=10)
    assert exact.repeats == len(exact.bound) - len(torch.unique(exact.bound.x, dim=0))


@pytest.mark.parametrize("count", [100, 500, 3000])
def test_signals_that_differ_in_their_amplitude_are_no_repeats(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    amplitude = torch.rand(count, generator=generator) + 0.1
    x = amplitude[:, None, None] * torch.sin(torch.linspace(0, 6.28, 128))
    split = pp.data.split(x, (amplitude > 0.6).long(), classes=2)
    assert split.repeats <= 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 2))
    pp.fit(model, split.prior, SHORT)
    issued(model, split)


def test_images_of_one_value_and_rows_of_numbers_are_repeats_only_where_they_are_equal() -> None:
    constants = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 8, 8).contiguous()
    assert trace.repeats(constants).tolist() == [False] * 6
    assert trace.repeats(torch.cat([constants, constants[2:4]])).tolist() == [False] * 6 + [True] * 2
    rows = torch.randn(5, 100)
    assert trace.repeats(torch.cat([rows, rows + 1e-6, rows[:2]])).tolist() == [False] * 10 + [True] * 2
    assert trace.repeats(torch.tensor([[1, 2], [1, 2], [2, 1]])).tolist() == [False, True, False]


# --- 10. Answers that are no function of their input.


class Layer(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


UNSTEADY = {
    "dropout": (lambda x: F.dropout(x, 0.5), "differ when they are asked for again"),
    "noise": (lambda x: x + torch.randn_like(x), "differ when they are asked for again"),
    "batch": (lambda x: x - x.mean(0), "depend on what else is in the batch"),
    "wide batch": (lambda x: 5 * x - 2 * x.mean(0), "depend on what else is in the batch"),
}


@pytest.mark.parametrize("how", UNSTEADY)
def test_a_network_whose_answers_are_no_function_of_their_input_is_refused(how: str) -> None:
    split, (function, words) = digits(), UNSTEADY[how]
    model = network(Layer(function))
    pp.fit(model, split.prior, pp.Config(epochs=2, lr=0.1))
    refused(model, words, split)
    with pytest.raises(ValueError, match=words):
        rules.refuse_unsteady(model, split.bound.x)
    prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.1, std=0.01)))
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match=words):
        pp.certify(model, prior, split, **FAST)


def test_rounding_is_no_random_answer() -> None:
    def rounded(x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * torch.randn_like(x))

    layer = nn.Linear(64, 10)
    with torch.no_grad():
        layer.weight.mul_(1e-5)  # so that answers hang on rounding
        layer.bias.fill_(3.0)
    model = nn.Sequential(nn.Flatten(), layer, Layer(rounded))
    rules.refuse_unsteady(model, digits().bound.x)
    rules.refuse_unsteady(nn.Sequential(model, nn.BatchNorm1d(10), nn.Dropout(0.5)), digits().bound.x)


# --- 11. What counts as training, and as a look.


@pytest.mark.parametrize("how", ["no epochs", "no rate", "scores", "statistics"])
def test_a_network_that_pacprune_has_not_moved_is_not_trained_by_it(how: str) -> None:
    split, model = random_labels(), network(nn.BatchNorm1d(32)) if how == "statistics" else network()
    own_loop(model)
    if how == "scores":
        pp.scores.snip(model, split.prior)
    elif how == "statistics":
        pp.reestimate_batchnorm(model, split.prior)
    else:
        pp.fit(model, split.prior, pp.Config(epochs=0) if how == "no epochs" else pp.Config(epochs=1, lr=0.0))
    refused(model, NEVER)
    cert = pp.certify_held_out(model, split, declare="the network was trained on other data")
    assert cert.record["declaration"] is not None


def test_a_mask_of_a_trained_network_does_not_make_another_trained() -> None:
    other = network()
    own_loop(other)
    pp.apply_mask(other, pp.top_k(pp.scores.magnitude(trained()), sparsity=0.5))
    refused(other, NEVER)


@pytest.mark.parametrize("kind", ["pair", "dataset"])
def test_an_evaluation_on_near_copies_of_bound_examples_is_a_look(kind: str) -> None:
    split, model = random_labels(), trained()
    spread = float(split.bound.x.max() - split.bound.x.min())
    noise = spread / 256 * 0.8 * (torch.rand(split.bound.x.shape, generator=torch.Generator().manual_seed(1)) - 0.5)
    near = split.bound.x + noise, split.bound.y
    pp.error(model, near if kind == "pair" else TensorDataset(*near))
    issued(model)
    refused(trained(), SEEN)


def test_an_evaluation_on_other_examples_is_none() -> None:
    pp.error(trained(), (torch.rand(300, 1, 8, 8), torch.zeros(300, dtype=torch.int64)))
    pp.error(trained(), (random_labels().prior.x, random_labels().prior.y))
    issued(trained())


# --- 20. Honest uses.


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "part", "augmented"])
def test_a_sampler_of_fixed_examples_is_followed(kind: str) -> None:
    split = random_labels()
    for indices, honest in ((range(200), True), (torch.arange(200), True), (list(range(150, 250)), False)):
        sampler = SubsetRandomSampler(indices)  # type: ignore[arg-type]
        dataset: Any = TensorDataset(split.train.x, split.train.y)
        if kind == "part":
            dataset = split.train
        elif kind == "augmented":
            dataset = split.train.augmented(lambda image: image + 0.1)
        loader = (
            DataLoader(dataset, batch_sampler=BatchSampler(sampler, 50, drop_last=False))
            if kind == "batch sampler"
            else DataLoader(dataset, batch_size=50, sampler=sampler)
        )
        model = trained(loader)
        if honest:
            issued(model)
        else:
            refused(model, "50 of its 200 examples were used to train, .* or could be read by a DataLoader")


def test_copies_of_a_prior_are_known() -> None:
    split = digits()
    model, prior = prior_of(split)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    for copied in (copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        assert pp.certify(model, copied, split, **FAST).record["declaration"] is None
    changed = copy.deepcopy(prior)
    next(iter(changed.mean.values())).add_(0.01)
    assert trace.UNKNOWN_MASK in changed.origin.labelled


# --- Networks that arrive trained.


@pytest.mark.parametrize("method", ["fit", "pft", "osp"])
def test_a_network_that_arrives_trained_needs_a_declaration_after_pruning_too(method: str) -> None:
    split, model = pp.data.digits(), nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):  # a loop of one's own, on the bound set too
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(split.train.x), split.train.y).backward()
        optimizer.step()
    config, options = pp.Config(epochs=1, lr=0.01), {} if method == "fit" else {"sparsity": 0.5}
    getattr(pp, method)(model, split.prior, config, **options)
    with pytest.raises(ValueError, match="were made or changed by something other than pacprune"):
        pp.certify_held_out(model, split)
    assert pp.certify_held_out(model, split, declare="it was trained on all of the digits").bound < 1


def test_a_network_that_arrives_as_it_was_made_needs_none() -> None:
    split = pp.data.digits()
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        pp.certify_held_out(model, split)
