"""pp.compress: what is chosen before the bound set is opened, what is proved after it, and what is refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pacprune as pp
from pacprune.certification import held_out
from pacprune.certification.risks import LEVELS, Tally
from pacprune.masking import weights
from pacprune.methods import compress as module
from pacprune.methods.compress import Compressed, declared_order, expected_bound
from pacprune.training.posterior import touched

CONFIG = pp.Config(epochs=4, lr=0.1, schedule="cosine")
DENSE = pp.Config(epochs=8, lr=0.1, schedule="cosine")
SPLIT = pp.data.digits(seed=0)
GRID = [0.5, 0.8, 0.95]


def network(seed: int = 0) -> nn.Module:
    return pp.models.mlp(64, hidden=[32], seed=seed)


def compress(**changes: Any) -> Compressed:
    options: dict[str, Any] = {"dense": DENSE, "max_drop": 0.08, "sparsities": GRID, "refinements": 2}
    return pp.compress(network(), SPLIT, CONFIG, **options | changes)


@pytest.fixture(scope="module")
def compressed() -> Compressed:
    return compress()


# --- What comes of it.


def test_the_sparsest_that_passed_is_the_network(compressed: Compressed) -> None:
    passed = [row for row in compressed.points if row["passed"]]
    assert compressed.passed == len(passed) > 0
    assert compressed.sparsity == max(row["sparsity"] for row in passed)
    assert compressed.certificate.limit == compressed.limit == compressed.certificate.bound == 0.08
    assert f"Compressed to {round(compressed.sparsity, 4):.2%} sparsity" in compressed.statement
    assert "drop at most 0.08 at delta 0.05" in repr(compressed)


def test_points_are_the_chain_and_the_tests(compressed: Compressed) -> None:
    sparsities = [row["sparsity"] for row in compressed.points]
    assert sparsities == sorted(sparsities)
    assert len(sparsities) == len(compressed.models)
    assert {round(s, 2) for s in sparsities} >= {0.5, 0.8}
    order = [row["order"] for row in compressed.points if row["order"] is not None]
    assert order == list(range(1, len(order) + 1))
    tests = {test["sparsity"]: test for test in compressed.certificate.tests}
    for row in compressed.points:
        test = tests.get(row["sparsity"])
        assert row["risk"] == (None if test is None else test["mean"])
        assert row["passed"] is (None if test is None else test["passed"])


def test_nothing_has_seen_the_bound_set(compressed: Compressed) -> None:
    for model in (*compressed.models, compressed.reference):
        assert model is not None
        assert touched(weights.seen(model), SPLIT.bound, apart_from=SPLIT.prior) == 0
    # What was chosen on the validation part has seen it.
    for model in compressed.models:
        assert torch.isin(SPLIT.prior.example_hashes, weights.seen(model).examples).all()


def test_the_folder_verifies_and_the_packed_file_is_the_network(compressed: Compressed, tmp_path: Path) -> None:
    folder = compressed.save(tmp_path)
    assert pp.verify(folder / "certificate").valid
    state = pp.export.load(folder / "packed.safetensors")
    assert (folder / "packed.safetensors").stat().st_size == compressed.bytes
    for name, tensor in compressed.model.state_dict().items():
        assert torch.equal(state[name], tensor)
    compressed.draw(tmp_path / "chain.png")
    assert (tmp_path / "chain.png").read_bytes().startswith(b"\x89PNG")


def test_a_front_holds_for_all_at_once_and_says_its_price(tmp_path: Path) -> None:
    result = compress(front=True, refinements=0, max_error=0.5, max_drop=None)
    rows = [row for row in result.points if row["order"] is not None]
    assert result.front is not None
    assert [row["bound"] for row in rows] == [test["bound"] for test in result.front.tests]
    assert all(row["price"] > 0 for row in rows)
    chosen = max((row for row in rows if row["passed"]), key=lambda row: row["sparsity"])
    assert result.certificate.bound == chosen["bound"] <= 0.5
    assert result.sparsity == chosen["sparsity"]
    result.save(tmp_path)
    assert pp.verify(tmp_path / "certificate").valid
    assert pp.verify(tmp_path / "front").valid


def test_if_none_passes_it_says_which_bound_there_is_and_how_many_examples_it_needs(tmp_path: Path) -> None:
    result = compress(max_drop=None, max_disagreement=0.03, sparsities=[0.97], refinements=0)
    assert result.passed == 0
    assert "No candidate passed" in result.statement
    assert "at most 0." in result.statement
    assert result.points[0]["passed"] is False
    assert "no candidate keeps the limit 0.03" in repr(result)
    bound, needed = result.certificate.bound, result.examples_needed
    assert f"{bound:.3f}"[:-1] in result.statement
    assert (f"about {needed:,} examples" in result.statement) if needed else ("more of them would" in result.statement)
    with pytest.raises(ValueError, match="nothing to save: No candidate passed"):
        result.save(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_with_a_layer_left_out_the_chain_is_ordered_and_refined_by_what_is_asked_of_the_rest() -> None:
    result = compress(exclude=["*.2"], refinements=2, sparsities=[0.3, 0.98])
    rows = [(row["sparsity"], row["selected_sparsity"]) for row in result.points]
    assert rows == sorted(rows)
    assert [selected for _, selected in rows][:: len(rows) - 1] == pytest.approx([0.3, 0.98], abs=1e-3)
    assert all(total == pytest.approx(selected * 2048 / 2368) for total, selected in rows)
    middle = (0.7 * 0.02) ** 0.5  # what is pruned of the rest is halved, and not what is pruned of all
    assert any(selected == pytest.approx(1 - middle, abs=1e-3) for _, selected in rows)
    assert f"sparsity, {round(result.selected_sparsity, 4):.2%} of the 2,048 selected weights (" in result.statement
    assert f"sparsity {result.selected_sparsity:.4f} of the 2,048 selected, drop" in repr(result)


def test_frozen_weights_are_left_alone_and_said_once() -> None:
    model = network()
    next(model.parameters()).requires_grad_(False)
    options: dict[str, Any] = {"dense": DENSE, "max_error": 0.6, "sparsities": GRID, "refinements": 1}
    with pytest.warns(UserWarning, match="weights are frozen and left alone") as warned:
        result = pp.compress(model, SPLIT, CONFIG, **options)
    assert len(warned) == 1
    assert result.points[0]["sparsity"] == pytest.approx(result.points[0]["selected_sparsity"] * 320 / 2368)


def test_weight_norm_that_is_left_out_is_packed_as_it_is(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 10))

    options: dict[str, Any] = {"max_error": 0.6, "sparsities": [0.5], "refinements": 0, "exclude": "1"}
    result = pp.compress(normed(), SPLIT, CONFIG, dense=DENSE, **options)
    assert f"({result.bytes:,} bytes in place" in result.statement
    folder = result.save(tmp_path)
    assert pp.verify(folder / "certificate").valid
    again = normed()
    again.load_state_dict(pp.export.load(folder / "packed.safetensors"))
    assert torch.equal(again(SPLIT.test.x[:5]), result.model(SPLIT.test.x[:5]))


def test_what_cannot_be_packed_leaves_no_folder(
    compressed: Compressed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module) -> bytes:
        raise ValueError("it cannot be packed")

    monkeypatch.setattr(module.export, "packed", refuse)
    with pytest.raises(ValueError, match="cannot be packed"):
        compressed.save(tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("method", ["osp", "gmp"])
def test_other_methods_and_their_options_serve(method: str) -> None:
    result = compress(method=method, max_drop=None, max_error=0.6, sparsities=[0.6], refinements=0, exclude="*.2")
    assert [round(row["sparsity"], 3) for row in result.points] == [round(0.6 * 2048 / 2368, 3)]  # of all weights
    assert result.reference is None


def test_a_population_has_the_whole_grid_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Task, "at_once", property(lambda task: 8))
    sizes = []
    together = module.together
    monkeypatch.setattr(
        module,
        "together",
        lambda verb, models, *args, **kw: sizes.append(len(models)) or together(verb, models, *args, **kw),
    )
    result = compress(refinements=1)
    assert sizes[0] == 3
    assert len(result.points) == sum(sizes) >= 4


# --- The order in time.


def test_the_order_is_on_disk_before_the_bound_set_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = []

    def opened(candidates: list[nn.Module], *args: Any, **options: Any) -> Any:
        declared.append(json.loads((tmp_path / "order.json").read_text()))
        return held_out.certify_sequence(candidates, *args, **options)

    monkeypatch.setattr(module, "certify_sequence", opened)
    result = compress(folder=tmp_path)
    (order,) = declared
    rows = [row["sparsity"] for row in result.points if row["order"] is not None]
    assert [entry["sparsity"] for entry in order["networks"]] == rows
    assert (order["risk"], order["limit"], order["delta"]) == ("drop", 0.08, 0.05)


def test_a_call_goes_on_from_its_folder_and_refuses_another_order(tmp_path: Path) -> None:
    first = compress(folder=tmp_path, refinements=0)
    trained: list[str] = []
    again = compress(folder=tmp_path, refinements=0, progress=lambda stage, *_: trained.append(stage))
    assert again.points == first.points
    assert trained == []
    with pytest.raises(ValueError, match=r"order.json declares another order.*give another folder"):
        compress(folder=tmp_path, refinements=0, max_drop=0.09)


def test_without_a_folder_the_order_is_written_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = module.write_atomically
    monkeypatch.setattr(module, "write_atomically", lambda path, text: written.append(path) or write(path, text))
    compress(refinements=0, sparsities=[0.5])
    assert len(written) == 1


# --- How the chain is chosen.


def test_what_a_sparser_one_beats_is_left_out() -> None:
    tallies = [Tally(1000, plus=plus) for plus in (20, 60, 22, 40, 90)]
    assert declared_order(tallies, n=1000, delta=0.05) == [0, 2, 3, 4]


def test_a_difference_below_the_noise_leaves_nothing_out() -> None:
    assert declared_order([Tally(100, plus=3), Tally(100, plus=2)], n=500, delta=0.05) == [0, 1]
    assert declared_order([Tally(144, -1, 0, 1), Tally(144, -1, 0, 2)], n=719, delta=0.05) == [0, 1]


def test_the_expected_bound_is_that_of_the_scaled_counts() -> None:
    assert expected_bound(Tally(100, plus=3), n=500, delta=0.05) == Tally(500, plus=15).bound(0.05)
    assert expected_bound(Tally(100, -1, 3, 2), n=500, delta=0.05) == Tally(500, -1, 15, 10).bound(0.05)
    errors = {e: expected_bound(Tally(100, -1, 3, 2), n=500, delta=0.05, errors=e) for e in (-2.0, -1.0, 0.0, 1.0)}
    assert sorted(errors.values()) == list(errors.values())
    assert expected_bound(Tally(10, plus=10), n=20, delta=0.05, errors=3.0) == 1.0


def test_new_points_halve_the_widest_gaps() -> None:
    assert module._points_between([0.0, 0.9], 1) == [pytest.approx(0.684)]
    assert module._points_between([0.5, 0.9, 0.95], 3) == pytest.approx([0.665, 0.776, 0.85])
    assert module._points_between([0.9], 3) == []
    assert module._points_between([0.9, 0.9001], 3) == []


# --- Networks that answer by signs, and bound examples without labels.


def signs(*, labels: int, kind: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples with one label each (0), in a column (1), or with several of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 12, generator=generator)
    y = (x @ torch.randn(12, max(1, labels), generator=generator) > 0).to(kind)
    return x, y if labels else y[:, 0]


def signed(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, outputs))


def compress_signs(split: pp.data.Split, outputs: int, **options: Any) -> Compressed:
    common: dict[str, Any] = {"dense": pp.Config(epochs=4, lr=0.3), "sparsities": [0.3, 0.6], "refinements": 0}
    return pp.compress(signed(outputs), split, pp.Config(epochs=4, lr=0.1), **common | options)


@pytest.mark.parametrize("limit", [{"max_error": 0.4}, {"max_drop": 0.15}, {"max_disagreement": 0.3}])
@pytest.mark.parametrize(
    ("labels", "kind"), [(0, torch.int64), (0, torch.float32), (1, torch.int64), (4, torch.int64), (4, torch.float32)]
)
def test_networks_that_answer_by_signs_are_compressed(
    labels: int, kind: torch.dtype, limit: dict[str, float], tmp_path: Path
) -> None:
    """One logit, or a logit for each label: trained by the cross-entropy of a logit, and counted as signs."""
    split = pp.data.split(*signs(labels=labels, kind=kind), seed=1)
    result = compress_signs(split, max(1, labels), **limit)
    assert result.passed > 0
    assert result.certificate.record["risk"]["whole"] is (labels < 2)  # type: ignore[index]
    report = pp.verify(result.save(tmp_path) / "certificate", split=split, model=signed(max(1, labels)))
    assert report.level == 2, report.failure


def test_a_front_of_several_labels_has_bounds_and_prices() -> None:
    split = pp.data.split(*signs(labels=4), seed=1)
    result = compress_signs(split, 4, max_error=0.4, front=True)
    assert all(row["bound"] > row["risk"] and row["price"] > 0 for row in result.points)


def test_a_loss_of_ones_own_trains_dense_network_and_candidates() -> None:
    used: list[int] = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        used.append(len(y))
        return module.logit_loss(output, y)

    split = pp.data.split(*signs(labels=0), seed=1)
    own = compress_signs(split, 1, max_error=0.4, loss=loss, sparsities=[0.3])
    usual = compress_signs(split, 1, max_error=0.4, sparsities=[0.3])
    assert own.history == usual.history
    assert len(used) > 2 * 4


@pytest.mark.parametrize("labels", [0, 4])
def test_a_disagreement_needs_no_labels_of_the_bound_set(labels: int, tmp_path: Path) -> None:
    x, y = signs(labels=labels)
    split = pp.data.split(x[:900], y[:900], bound=x[900:], split_declared_random=True, test=0.2, seed=1)
    assert (len(split.prior), len(split.bound), len(split.train), len(split.test)) == (720, 700, 720, 180)
    assert not split.bound.has_labels
    result = compress_signs(split, max(1, labels), max_disagreement=0.3)
    assert result.passed > 0
    assert result.certificate.n == 700
    assert not any("labels as noisy" in line for line in result.certificate.record["assumptions"])
    folder = result.save(tmp_path) / "certificate"
    assert pp.verify(folder, split=split, model=signed(max(1, labels))).level == 2
    for name in ("max_error", "max_drop"):
        with pytest.raises(ValueError, match="720 prior examples have labels and the 700 bound examples have none"):
            compress_signs(split, max(1, labels), **{name: 0.3})


def test_several_labels_are_moved_as_counts_are() -> None:
    """Levels, too: what is expected of n examples is that of the same shares, and worse by standard errors."""
    counted, levels = Tally(100, plus=10), Tally(100, levels=((0, 90), (LEVELS, 10)))
    for tally in (counted, levels):
        bounds = [expected_bound(tally, n=500, delta=0.05, errors=errors) for errors in (-2.0, -1.0, 0.0, 1.0, 2.0)]
        assert bounds == sorted(bounds)
    assert expected_bound(levels, n=500, delta=0.05) == Tally(500, levels=((0, 450), (LEVELS, 50))).bound(0.05)
    assert expected_bound(levels, n=250, delta=0.05) > expected_bound(levels, n=500, delta=0.05)
    moved = module._shifted(Tally(7, -1, levels=((LEVELS // 2, 5), (LEVELS, 2))), 3, -1.0)
    assert sum(times for _, times in moved.levels or ()) == moved.n == 3


# --- What is refused.


@pytest.mark.parametrize(
    ("split", "outputs", "sentence"),
    [
        (lambda: signs(labels=0, kind=torch.float32), 2, "labels are torch.float32 of shape"),
        (lambda: (signs(labels=0)[0], signs(labels=0)[0][:, 0]), 1, "the model has one output per label, whose sign"),
        (
            lambda: (signs(labels=0)[0], signs(labels=0)[0][:, :4]),
            4,
            r"the labels run from -\d.* in torch.float32; give",
        ),
        (
            lambda: (signs(labels=0)[0], nn.functional.one_hot(torch.arange(1600) % 4)),
            4,
            "one 1 in every row, as classes in one-hot form have",
        ),
        (lambda: (signs(labels=0)[0], torch.arange(1600) % 3), 1, "but the labels run from 0 to 2"),
        (lambda: (torch.randn(1600, 13), signs(labels=0)[1]), 1, r"the model cannot take examples of shape \(13,\)"),
    ],
)
def test_labels_and_inputs_that_do_not_fit_are_refused_before_training(
    split: Callable[[], tuple[torch.Tensor, torch.Tensor]], outputs: int, sentence: str, tmp_path: Path
) -> None:
    trained: list[str] = []
    with pytest.raises(ValueError, match=sentence) as refusal:
        compress_signs(
            pp.data.split(*split(), seed=1),
            outputs,
            max_error=0.4,
            folder=tmp_path,
            progress=lambda stage, *_: trained.append(stage),
        )
    assert "\n" not in str(refusal.value)
    assert trained == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_drop": None}, "there is no limit; give exactly one of max_error, max_drop, max_disagreement"),
        ({"max_error": 0.1}, "max_error is 0.1 and max_drop is 0.08; give exactly one of"),
        ({"max_drop": 0.0}, "max_drop is 0.0; it must lie strictly between 0 and 1"),
        ({"max_drop": 2}, "max_drop is 2; it must lie strictly between 0 and 1"),
        ({"sparsities": [0.5, 0.9, 0.8]}, "sparsities has 0.9 before 0.8, but the densest is tested first"),
        ({"sparsities": []}, "give at least one fraction of the weights to prune"),
        ({"sparsities": [0.5, 1.0]}, r"give at least one fraction of the weights to prune, in \[0, 1\)"),
        ({"method": "pbp"}, "method 'pbp' is unknown; use one of osp, pft"),
        ({"method": "best"}, "method 'best' is unknown; use one of osp, pft"),
        ({"validation": 0.0}, "validation is 0.0, of 718 examples; it must leave at least 1 to train on"),
        ({"delta": 0.0}, "delta is 0.0; it must lie in"),
        ({"refinements": -1}, "refinements is -1; it must be a whole number of at least 0"),
        ({"dense": None}, "pacprune has never trained the model"),
        ({"max_drop": 0.001}, "the limit is 0.001, but 719 bound examples prove at best 0.005.* at delta 0.05"),
        ({"exclude": "head"}, "exclude='head' names no weight of the model"),
        ({"criteria": "snip"}, "criteria is no argument of the method 'pft'; leave it out"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[str] = []
    with pytest.raises(ValueError, match=sentence):
        compress(**changes, folder=tmp_path, progress=lambda stage, *_: trained.append(stage))
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_a_limit_that_the_dense_network_does_not_keep_is_refused_before_pruning() -> None:
    trained: list[str] = []
    with pytest.raises(ValueError, match=r"limit of the error is 0\.01, but before pruning it is 0\.\d+ on the valid"):
        compress(max_drop=None, max_error=0.01, progress=lambda stage, *_: trained.append(stage))
    assert {*trained} == {"dense"}


def trained_reference(part: Any) -> nn.Module:
    model = network(1)
    pp.fit(model, part, pp.Config(epochs=1, lr=0.1))
    return model


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (lambda: trained_reference(SPLIT.train), "the reference has seen the bound set: 719 of its 719 examples"),
        (lambda: network(1), "pacprune has never trained the reference"),
        (
            lambda: _trained(nn.Sequential(nn.Flatten(), nn.Linear(64, 3))),
            r"the network's outputs have shape \(10,\) and those of the reference \(3,\)",
        ),
    ],
)
def test_a_reference_that_cannot_serve_is_refused(reference: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compress(reference=reference())


def _trained(model: nn.Module) -> nn.Module:
    few = SPLIT.prior.y < 3
    pp.fit(model, SPLIT.prior.subset(few), pp.Config(epochs=1, lr=0.1))
    return model


def test_a_reference_of_ones_own_serves() -> None:
    reference = trained_reference(SPLIT.prior)
    before = copy.deepcopy(reference.state_dict())
    result = compress(reference=reference, max_drop=0.2, sparsities=[0.5], refinements=0)
    assert result.reference is reference
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.state_dict().items())


def test_a_bound_set_that_was_looked_at_before_is_refused() -> None:
    pp.error(trained_reference(SPLIT.prior), SPLIT.bound)
    with pytest.raises(ValueError, match="something was evaluated on 719 of the 719 bound examples before"):
        compress()


def test_a_model_that_has_seen_the_bound_set_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has seen the bound set"):
        pp.compress(trained_reference(SPLIT.train), SPLIT, CONFIG, dense=DENSE, max_error=0.5)


def test_what_holds_a_network_is_no_network() -> None:
    pruned = pp.osp(network(), SPLIT.prior, pp.Config(epochs=0), sparsity=0.5)
    sentence = r"the model is of type Pruned and not a torch\.nn\.Module; give the network inside, its \.model"
    for call in (
        lambda model: pp.compress(model, SPLIT, CONFIG, max_error=0.5),
        lambda model: pp.certify_held_out(model, SPLIT),
        lambda model: pp.error(model, SPLIT.test),
        lambda model: pp.osp(model, SPLIT.prior, CONFIG, sparsity=0.6),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(pruned)


def test_a_front_in_which_nothing_passes_says_so() -> None:
    result = compress(max_drop=None, max_disagreement=0.02, sparsities=[0.9, 0.97], refinements=0, front=True)
    assert result.passed == 0
    assert result.statement.startswith("No candidate is proved to keep the limit 0.02. With probability")
    with pytest.raises(ValueError, match="nothing to save: No candidate is proved"):
        result.save("nothing")


def test_a_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="compress walks along sparsities, and a pattern has one"):
        compress(pattern="2:4")
