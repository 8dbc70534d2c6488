"""Traces: examples are known whatever their form, labels count, looks have a time, and masks have an origin."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.data import trace
from pacprune.data.trace import FOREIGN, UNKNOWN_MASK, Trace, example_hashes, label_hashes, labelled, near_copies
from pacprune.masking import attachment, masks, patterns, spikeslab, weights
from pacprune.masking.criteria import CRITERIA, declaration


def images(count: int = 20, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    """8-bit images of noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, channels, side, side), generator=generator, dtype=torch.uint8)


def noise(x: Tensor, size: float) -> Tensor:
    return x + size * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) - 1)


def shared(first: Tensor, second: Tensor) -> int:
    """How many of the first examples have the hash of one of the second."""
    return int(torch.isin(example_hashes(first), example_hashes(second)).sum())


# --- Images.

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of 8 bits": lambda x: x,
    "in [0, 255]": lambda x: x.float(),
    "in [0, 1]": lambda x: x.float() / 255,
    "standardised": lambda x: (x.float() / 255 - 0.1307) / 0.3081,
    "standardised by channel": lambda x: (
        (x.float() - torch.arange(60.0, 60.0 + x.shape[1]).view(-1, 1, 1))
        / torch.arange(9.0, 9.0 + x.shape[1]).view(-1, 1, 1)
    ),
    "of float64": lambda x: x.double() / 255,
    "with noise of 1e-7": lambda x: noise(x.float() / 255, 1e-7),
    "far from zero": lambda x: x.float() + 1000,
    "small": lambda x: x.float() * 1e-20,
    "laid out otherwise": lambda x: x.float().to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_has_one_hash_in_every_form(form: str, channels: int) -> None:
    for side in (8, 28):
        x = images(channels=channels, side=side)
        assert torch.equal(example_hashes(FORMS[form](x)), example_hashes(x))


@pytest.mark.parametrize("low", [0, 3, 200])
def test_an_image_has_one_hash_whatever_its_range(low: int) -> None:
    """Ranges of 1 to 255 levels, of which some do not divide 256."""
    for levels in (2, 3, 17, 56):
        x = images() % levels + low
        for form in FORMS.values():
            assert torch.equal(example_hashes(form(x)), example_hashes(x))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: (x.float() / 255).bfloat16(),
    "noise of a hundredth": lambda x: noise(x.float() / 255, 0.01),
    "flipped": lambda x: x.flip(-1),
    "inverted": lambda x: 255 - x,
    "moved": lambda x: x.roll(1, -1),
    "channels exchanged": lambda x: x.flip(1),
    "flat": lambda x: x.float().flatten(1),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_changed_image_has_another_hash(change: str) -> None:
    assert shared(OTHERS[change](images()), images()) == 0


def test_one_grey_level_in_one_pixel_is_another_hash() -> None:
    x = images()
    x[:, 0, 0, :2] = torch.tensor([0, 255], dtype=torch.uint8)  # the range stays
    changed = x.clone()
    changed[:, 0, 4, 4] = torch.where(x[:, 0, 4, 4] > 100, x[:, 0, 4, 4] - 1, x[:, 0, 4, 4] + 1)
    assert shared(changed, x) == 0


def test_hashes_are_those_of_single_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(50)
    hashes = example_hashes(x)
    assert len(hashes.unique()) == 50
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(example_hashes(x[order]), hashes[order])
    monkeypatch.setattr(trace, "_PORTION", 7)
    assert torch.equal(example_hashes(x), hashes)
    assert example_hashes(x[:0]).shape == (0,)


def test_constant_channels_are_known_by_their_value() -> None:
    """They have no shape that could tell them apart."""
    grey = torch.arange(10.0).view(-1, 1, 1, 1).expand(10, 1, 8, 8)
    assert len(example_hashes(grey).unique()) == 10
    assert torch.equal(example_hashes(grey.double()), example_hashes(grey))
    x = images(10).float()
    x[:, 1] = 7
    other = x.clone()
    other[:, 1] = 8
    assert shared(x, other) == 0
    assert torch.equal(example_hashes(x.double()), example_hashes(x))


# --- Other examples.


def test_a_few_numbers_are_hashed_exactly() -> None:
    """Rows of numbers and small images may mean another thing at another scale."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((30, 20), (30, 784), (30, 1, 7, 9), (30, 5, 60)):
        x = torch.randn(shape, generator=generator)
        assert torch.equal(example_hashes(x.double()), example_hashes(x))
        assert torch.equal(example_hashes(x.T.contiguous().T if x.ndim == 2 else x.clone()), example_hashes(x))
        for other in (2 * x, x + 1, x * (1 + 1e-6), x.bfloat16(), x.half()):
            assert shared(other, x) == 0


def test_whole_numbers_are_hashed_by_value() -> None:
    tokens = torch.randint(1000, (30, 128), generator=torch.Generator().manual_seed(0))
    assert torch.equal(example_hashes(tokens.int()), example_hashes(tokens))
    assert torch.equal(example_hashes(tokens.short()), example_hashes(tokens))
    assert shared(tokens + 1, tokens) == shared(tokens.float(), tokens) == 0
    grey = torch.randint(256, (30, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert shared(grey + 1, grey) == 0  # of 64 bits: no image of 8 bits, which could be scaled


def test_single_numbers_are_examples_too() -> None:
    assert len(example_hashes(torch.arange(5.0)).unique()) == 5


# --- Labels.


def test_labels_are_hashed_by_value() -> None:
    y = torch.arange(10)
    assert torch.equal(label_hashes(y.int()), label_hashes(y))
    assert torch.equal(label_hashes(y.byte()), label_hashes(y))
    assert torch.equal(label_hashes(y.double()), label_hashes(y.float()))
    assert not torch.isin(label_hashes(y.float()), label_hashes(y)).any()
    assert len(label_hashes(torch.randn(10, 4)).unique()) == 10


def test_an_example_with_another_label_is_another() -> None:
    x = example_hashes(images(40))
    pairs = torch.stack([labelled(x, label_hashes(torch.full((40,), y))) for y in range(10)])
    assert len(pairs.unique()) == 400
    assert not torch.isin(pairs, x).any()
    assert not torch.isin(pairs, torch.tensor([FOREIGN, UNKNOWN_MASK])).any()


# --- Near copies.


def slow_near_copies(x: Tensor, others: Tensor) -> Tensor:
    """Every pair of 8-bit images whose range is 0 to 255 in every channel, compared pixel by pixel."""
    scaled = [(t.double() * 256 / 255).round() for t in (x, others)]
    return (scaled[0][:, None] - scaled[1][None]).abs().flatten(2).amax(-1).le(1).any(1)


def full_range(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 0, 0], x[:, :, 0, 1] = 0, 255
    return x


def nudged(x: Tensor, levels: int) -> Tensor:
    """Each pixel but two moved by up to so many levels, one of them by exactly that many."""
    steps = torch.randint(-levels, levels + 1, x.shape, generator=torch.Generator().manual_seed(3))
    moved = (x.int() + steps).clamp(0, 255).to(torch.uint8)
    moved[:, :, 4, 4] = torch.where(x[:, :, 4, 4] > 127, x[:, :, 4, 4] - levels, x[:, :, 4, 4] + levels)
    return full_range(moved)


@pytest.mark.parametrize(("rows", "portion"), [(256, 4096), (7, 11)])
@pytest.mark.parametrize("channels", [1, 3])
def test_near_copies_are_those_of_a_plain_comparison(
    channels: int, rows: int, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_ROWS", rows)
    monkeypatch.setattr(trace, "_PORTION", portion)
    others = full_range(images(60, channels))
    x = torch.cat(
        [full_range(images(20, channels, seed=9)), nudged(others[:30], 1), nudged(others[30:50], 3), others[50:]]
    )
    near = near_copies(x, others)
    assert torch.equal(near, slow_near_copies(x, others))
    assert near[:20].sum() == near[50:70].sum() == 0
    assert near[70:].all()
    assert near[20:50].sum() > 0
    assert torch.equal(near_copies(FORMS["standardised"](x), FORMS["of float64"](others)), near)


def test_the_longest_way_between_near_copies_is_found_in_images_of_few_levels() -> None:
    """Nearly black images, all means of which are alike."""
    others = torch.zeros(50, 1, 8, 8)
    others[torch.arange(50), 0, torch.arange(50) // 8, torch.arange(50) % 8] = 256.0
    x = others.clone()
    x[:, 0, 7, 7] = 1.0
    assert near_copies(x, others).all()
    x[:, 0, 7, 7] = 2.0
    assert not near_copies(x, others).any()


def test_near_copies_of_what_is_no_image_are_equal() -> None:
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    assert near_copies(x, x.double()).all()
    assert not near_copies(noise(x, 1e-6), x).any()
    black = torch.zeros(3, 1, 8, 8)
    assert near_copies(black, black).all()
    assert not near_copies(black, black + 1).any()


def test_near_copies_of_nothing_and_among_nothing() -> None:
    x = images(5)
    assert near_copies(x[:0], x).shape == (0,)
    assert near_copies(x, x[:0]).tolist() == [False] * 5
    assert near_copies(x[:1], x[:1]).tolist() == [True]


# --- Traces.


def trace_of(*numbers: int) -> Trace:
    return trace.of(torch.tensor(numbers), torch.tensor([10 * n for n in numbers]))


def test_the_union_of_traces() -> None:
    both = trace_of(3, 1) | trace_of(2, 3)
    assert both.examples.tolist() == [1, 2, 3]
    assert both.labelled.tolist() == [10, 20, 30]
    assert both.equal(trace_of(3, 2, 1, 1))
    assert not both.equal(trace_of(1, 2))
    assert repr(both) == "Trace(3 labelled examples)"


def test_a_union_with_nothing_is_the_same_trace() -> None:
    some = trace_of(1, 2)
    assert some | Trace() is some
    assert Trace() | some is some
    assert some | some is some
    assert len((Trace() | Trace()).examples) == 0


def test_the_foreign_is_known_as_such() -> None:
    assert trace.foreign().labelled.tolist() == [FOREIGN]
    both = trace.foreign() | trace.foreign(UNKNOWN_MASK) | trace_of(1)
    assert {FOREIGN, UNKNOWN_MASK} < set(both.labelled.tolist())
    assert both.examples.tolist() == [1]


# --- Looks.


def test_looks_have_a_time() -> None:
    first, second = torch.tensor([1, 2]), torch.tensor([2, 3])
    begin = trace.now()
    trace.look(first)
    between = trace.now()
    trace.look(second)
    assert begin < between < trace.now()
    assert trace.looked().examples.tolist() == [1, 2, 3]
    assert trace.looked(before=between).examples.tolist() == [1, 2]
    assert len(trace.looked(before=begin).examples) == 0
    assert len(trace.looked().labelled) == 0


def test_a_second_look_does_not_change_when_the_first_was() -> None:
    hashes = torch.tensor([5])
    trace.look(hashes)
    moment = trace.now()
    trace.look(hashes)
    assert trace.looked(before=moment).examples.tolist() == [5]


def test_what_is_trained_after_a_look_has_used_it(digits: pp.data.Split) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = pp.Config(epochs=1, lr=0.1)
    pp.fit(model, digits.prior, config)
    bound = digits.bound.example_hashes
    pp.error(model, digits.bound)
    assert not torch.isin(bound, weights.seen(model).examples).any()
    pp.fit(model, digits.prior, config)
    assert torch.isin(bound, weights.seen(model).examples).all()
    assert not torch.isin(digits.bound.known.labelled, weights.seen(model).labelled).any()  # its labels were not learnt


# --- Scores and masks.


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 8))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scores_know_what_the_model_has_seen_and_what_they_read(criterion: str, digits: pp.data.Split) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    seen = trace_of(1, 2, 3)
    weights.mark_seen(model, seen)
    scores = pp.scores.score(criterion, model, digits.prior)
    origin = trace.noted(scores.values())
    assert torch.isin(seen.labelled, origin.labelled).all()
    assert UNKNOWN_MASK not in origin.labelled
    reads = torch.isin(digits.prior.trace.labelled, origin.labelled).all()
    assert bool(reads) == declaration(CRITERIA[criterion]).reads_data


def noted_scores(model: nn.Module) -> tuple[dict[str, Tensor], Trace]:
    weights.mark_seen(model, trace_of(4, 5))
    return pp.scores.magnitude(model), trace_of(4, 5)


MASKS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "top_k": lambda model: pp.top_k(pp.scores.magnitude(model), sparsity=0.5),
    "top_k of each layer": lambda model: pp.top_k(pp.scores.magnitude(model), sparsity=0.5, scope="layer"),
    "pattern": lambda model: pp.top_k(pp.scores.magnitude(model), pattern="2:4"),
    "patterns.top": lambda model: patterns.top(pp.scores.magnitude(model), "1:4"),
    "protected scores": lambda model: patterns.protected_scores(pp.scores.magnitude(model), "2:4"),
    "top_mask": lambda model: spikeslab.top_mask(pp.isotropic(model, sparsity=0.5)),
    "final_mask": lambda model: attachment.final_mask(pp.attach(model, pp.isotropic(model, sparsity=0.5))),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_know_what_their_scores_are_from(name: str) -> None:
    model = small()
    weights.mark_seen(model, trace_of(4, 5))
    assert trace.noted(MASKS[name](model).values()).equal(trace_of(4, 5))


def test_a_mask_of_everything_is_from_nothing() -> None:
    origin = trace.noted(masks.all_kept(dict(small().named_parameters())).values())
    assert len(origin.examples) == len(origin.labelled) == 0


def test_a_mask_of_two_sources_knows_both() -> None:
    model, other = small(), small()
    weights.mark_seen(model, trace_of(1))
    weights.mark_seen(other, trace_of(2))
    scores, ties = pp.scores.magnitude(model), pp.scores.magnitude(other)
    assert trace.noted(masks.top_k(scores, sparsity=0.5, ties=ties).values()).equal(trace_of(1, 2))
    mixed = {"1.weight": scores["1.weight"], "3.weight": ties["3.weight"]}
    assert trace.noted(pp.top_k(mixed, sparsity=0.5).values()).equal(trace_of(1, 2))


def test_scores_of_ones_own_make_an_unknown_mask() -> None:
    model = small()
    scores, _ = noted_scores(model)
    own = {name: score.sqrt() for name, score in scores.items()}
    assert UNKNOWN_MASK in trace.noted(pp.top_k(own, sparsity=0.5).values()).labelled
    assert UNKNOWN_MASK in trace.noted(pp.top_k(scores | {"3.weight": own["3.weight"]}, sparsity=0.5).values()).labelled


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.clone(),
        copy.deepcopy,
        lambda mask: ~mask,
        lambda mask: mask.view(mask.shape),
        lambda mask: mask.float(),
        lambda mask: mask.logical_not_(),
        lambda mask: mask.fill_(True),
    ],
    ids=["clone", "deepcopy", "not", "view", "float", "not in place", "fill in place"],
)
def test_a_changed_or_copied_mask_is_unknown(change: Callable[[Tensor], Tensor]) -> None:
    model = small()
    mask = pp.top_k(noted_scores(model)[0], sparsity=0.5)
    changed = {name: change(keep) for name, keep in mask.items()}
    assert trace.noted(changed.values()).labelled.tolist() == [UNKNOWN_MASK]


def test_one_unknown_tensor_is_enough() -> None:
    mask = pp.top_k(noted_scores(small())[0], sparsity=0.5)
    origin = trace.noted([*mask.values(), torch.ones(2, dtype=torch.bool)])
    assert UNKNOWN_MASK in origin.labelled
    assert torch.isin(trace_of(4, 5).labelled, origin.labelled).all()


def test_tensors_of_inference_mode_can_be_noted() -> None:
    with torch.inference_mode():
        mask = {"w": torch.ones(3, dtype=torch.bool)}
    trace.note(mask, trace_of(1))
    assert trace.noted(mask.values()).equal(trace_of(1))


def test_notes_go_with_their_tensors() -> None:
    before = len(trace._origins)
    mask = {"w": torch.ones(1000, dtype=torch.bool)}
    trace.note(mask, trace_of(1))
    trace.note(mask, trace_of(2))
    assert len(trace._origins) == before + 1
    assert trace.noted(mask.values()).equal(trace_of(2))
    mask.clear()
    gc.collect()
    assert len(trace._origins) == before


def test_a_copied_model_has_seen_the_same() -> None:
    model = small()
    weights.mark_seen(model, trace_of(1, 2))
    copied = copy.deepcopy(model)
    assert weights.seen(copied).equal(trace_of(1, 2))
    weights.mark_seen(copied, trace_of(3))
    assert weights.seen(model).equal(trace_of(1, 2))
    assert weights.seen(nn.Sequential(copied)).equal(trace_of(1, 2, 3))
    assert weights.seen(copied[1]).equal(trace_of(1, 2, 3))
