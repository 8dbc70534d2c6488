"""What is prunable, how zeros are counted and kept, and what is noted about a model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import pacprune as pp
from pacprune.data import trace
from pacprune.data.trace import Trace
from pacprune.masking import weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.table = nn.Embedding(5, 3)
        self.inner = nn.ModuleDict({"head": nn.Linear(3, 5), "conv": nn.Conv1d(3, 2, 4)})
        self.inner["head"].weight = self.table.weight
        self.register_buffer("grid", torch.ones(4, 4))
        self.count = nn.Parameter(torch.zeros(2, 2, dtype=torch.int64), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def used(hashes: list[int] | Tensor) -> Trace:
    """The trace of examples with these hashes."""
    return trace.of(torch.as_tensor(hashes), torch.as_tensor(hashes) + 100)


def mask_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows).bool()


def test_prunable_is_every_float_parameter_of_two_dimensions_and_a_tied_one_once():
    model = Tied()
    assert {name: tuple(w.shape) for name, w in pp.prunable(model).items()} == {
        "frozen": (2, 2),
        "table.weight": (5, 3),
        "inner.conv.weight": (2, 3, 4),
    }
    assert weights.total(model) == 4 + 15 + 24


def test_sparsity_counts_exact_zeros_in_all_of_it():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[1].bias.zero_()
        model[1].weight[0, 0] = -0.0
    assert pp.sparsity(model) == 4 / 10


def test_a_model_without_matrices_has_nothing_to_prune():
    with pytest.raises(ValueError, match="BatchNorm1d has nothing to prune: none of its 2 parameters"):
        pp.prunable(nn.BatchNorm1d(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused(bad):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1, :2] = bad
    with pytest.raises(ValueError, match="weight has 2 NaN or infinite weights of 6"):
        pp.prunable(model)


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))], ids=["root", "nested"])
def test_an_attached_model_is_not_counted_as_a_plain_one(model):
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    for call in (pp.prunable, pp.sparsity, weights.total):
        with pytest.raises(
            ValueError, match=r"weight has a stochastic mask, since a run was interrupted, or .* pp\.harden\(model\)"
        ):
            call(model)


def test_a_foreign_parametrization_is_refused():
    with pytest.raises(ValueError, match=r"weight is parametrized by _WeightNorm; .*remove_parametrizations"):
        pp.prunable(parametrizations.weight_norm(nn.Linear(3, 2)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("hook", "remedy"),
    [
        (nn.utils.weight_norm, "computed by WeightNorm, .*remove_weight_norm"),
        (nn.utils.spectral_norm, "computed by SpectralNorm, .*remove_spectral_norm"),
        (
            lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
            r"computed by L1Unstructured, .*prune\.remove",
        ),
    ],
)
def test_a_weight_that_a_hook_computes_is_refused(hook, remedy):
    with pytest.raises(ValueError, match=f"the weight of 0 is {remedy}"):
        pp.prunable(nn.Sequential(hook(nn.Linear(3, 2))))


def test_a_mask_makes_zeros_and_keeps_them():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    keep = mask_of([1, 0, 1], [0, 0, 1])
    untouched = model[1].weight.detach().clone()
    assert pp.apply_mask(model, {"0.weight": keep}) is model
    assert torch.equal(model[0].weight != 0, keep)
    assert torch.equal(model[1].weight, untouched)
    with torch.no_grad():
        model[0].weight.fill_(7)
    weights.zero_pruned_(weights.masked(model))
    assert torch.equal(model[0].weight, 7 * keep.float())
    pp.apply_mask(model, None)
    with torch.no_grad():
        model[0].weight.fill_(7)
    weights.zero_pruned_(weights.masked(model))
    assert (model[0].weight == 7).all()


def test_a_mask_zeroes_infinite_weights():
    model = nn.Linear(2, 1)
    pp.apply_mask(model, {"weight": mask_of([0, 1])})
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    weights.zero_pruned_(weights.masked(model))
    assert model.weight[0, 0].item() == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"wieght": mask_of([1, 1])}, "the mask names 'wieght', which is not among the model's weights: weight"),
        ({"weight": mask_of([1], [1])}, r"the mask of weight has shape \(2, 1\), its weight \(1, 2\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_and_changes_nothing(mask, message):
    model = pp.apply_mask(nn.Linear(2, 1), {"weight": mask_of([0, 1])})
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        pp.apply_mask(model, mask)
    assert torch.equal(model.weight, before)
    assert torch.equal(weights.notes(model).mask["weight"], mask_of([0, 1]))


def test_seen_is_a_growing_sorted_set_that_a_copy_takes_along():
    model = nn.Linear(2, 1)
    assert len(weights.seen(model).examples) == 0
    weights.mark_seen(model, used([5, -3, 5]))
    weights.mark_seen(model, used([7, -3]))
    assert weights.seen(model).examples.tolist() == [-3, 5, 7]
    other = copy.deepcopy(model)
    weights.mark_seen(other, used([1]))
    assert weights.seen(other).examples.tolist() == [-3, 1, 5, 7]
    assert weights.seen(model).examples.tolist() == [-3, 5, 7]
    assert set(model.state_dict()) == {"weight", "bias"}


def test_training_modes_are_restored_module_by_module_even_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()

    def interrupted() -> None:
        with weights.modes_kept(model):
            model.train()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert [m.training for m in model.modules()] == [True, True, False]


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_wrapper_keeps_the_mask_and_the_seen_examples() -> None:
    x, y = torch.randn(32, 4), torch.zeros(32, dtype=torch.int64)
    for wrap in (lambda m: nn.Sequential(m, nn.ReLU()), lambda m: torch.compile(m, backend="eager")):
        inner = nn.Linear(4, 3)
        pp.apply_mask(inner, pp.top_k(pp.scores.magnitude(inner), sparsity=0.5))
        pp.fit(wrap(inner), (x, y), pp.Config(epochs=2, lr=0.1))
        assert pp.sparsity(inner) == 0.5
        assert len(weights.seen(inner).examples) == 32


def test_a_mask_of_a_module_inside_is_replaced_and_taken_off_by_its_wrapper() -> None:
    inner = nn.Linear(2, 1)
    wrapper = nn.Sequential(nn.Flatten(), inner)
    pp.apply_mask(inner, {"weight": mask_of([1, 0])})
    assert weights.masked(pp.apply_mask(wrapper, None)) == []
    pp.apply_mask(inner, {"weight": mask_of([1, 0])})
    pp.apply_mask(wrapper, {"1.weight": mask_of([0, 1])})
    assert [keep.tolist() for _, keep in weights.masked(wrapper)] == [[[False, True]]]
    pp.attach(pp.apply_mask(inner, {"weight": mask_of([1, 0])}), pp.isotropic(inner, sparsity=0.5))
    pp.apply_mask(pp.harden(inner), {"weight": mask_of([1, 0])})
    pp.attach(wrapper, pp.isotropic(wrapper, sparsity=0.5))
    assert weights.noted_masks(wrapper) == []


def test_a_noted_mask_belongs_to_the_model_and_can_be_changed() -> None:
    model = nn.Linear(2, 1)
    mask = {"weight": torch.tensor([[True, False]])}
    pp.apply_mask(model, mask)
    ((weight, keep),) = weights.masked(model)
    assert weight is model.weight
    keep.fill_(False)
    weights.zero_pruned_(weights.masked(model))
    assert pp.sparsity(model) == 1
    assert mask["weight"].tolist() == [[True, False]]
    assert weights.masked(pp.apply_mask(model, None)) == []


def test_members_that_saw_the_same_examples_share_one_tensor() -> None:
    models, rows = [nn.Linear(2, 2) for _ in range(3)], torch.tensor([5, 3, 5, 9])
    weights.mark_seen(models[2], used([7]))
    weights.mark_seen(models, used(rows))
    assert [weights.seen(model).examples.tolist() for model in models] == [[3, 5, 9], [3, 5, 9], [3, 5, 7, 9]]
    assert weights.seen(models[0]) is weights.seen(models[1])
    weights.mark_seen(models[0], weights.seen(models[0]))
    assert weights.seen(models[0]) is weights.seen(models[1])


# --- What is selected.


class LanguageModel(nn.Module):
    """A language model whose last layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def selected(**options: Any) -> list[str]:
    return list(pp.select(**options)(LanguageModel()))


def test_weights_are_selected_by_pattern_type_and_module() -> None:
    everything = ["embedding.weight", "blocks.0.weight", "blocks.1.weight"]
    assert selected() == everything
    assert (
        selected(include="blocks") == selected(include="blocks.*") == selected(exclude=nn.Embedding) == everything[1:]
    )
    assert selected(include="*.weight", exclude=["blocks.0"]) == [everything[0], everything[2]]
    assert selected(exclude="head") == everything[1:]  # a tied weight has all its names
    model = LanguageModel()
    assert list(pp.select(include=[model.blocks[0], "embedding"])(model)) == everything[:2]


def test_frozen_weights_are_selected_by_name_alone() -> None:
    model = LanguageModel()
    model.blocks.requires_grad_(False)
    assert list(pp.select()(model)) == ["embedding.weight"]
    assert list(pp.select(include="*")(model)) == ["embedding.weight", "blocks.0.weight", "blocks.1.weight"]


def test_an_error_about_names_lists_some() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    with pytest.raises(ValueError, match=r"it has 0\.weight, .*, 5\.weight and 3 more$"):
        pp.select(exclude="classifier")(model)
