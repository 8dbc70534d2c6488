"""pbp's recipe "paper", stage by stage, and priors that no data shape."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.certification import rules
from pacprune.data import trace
from pacprune.methods import pipeline
from pacprune.methods.pbp import train_prior
from pacprune.methods.pipeline import Stage

CONFIG = pp.Config(epochs=2, lr=0.05, schedule="step")
FAST: dict[str, Any] = {"sparsity": 0.8, "eps": 0.01, "std": 0.02, "draws": 20}


@pytest.fixture(autouse=True)
def _nothing_looked_at() -> None:
    trace._looks.clear()


@pytest.fixture(scope="module")
def half() -> pp.data.Split:
    return pp.data.digits(prior_fraction=0.5, seed=0)


@pytest.fixture(scope="module")
def free() -> pp.data.Split:
    return pp.data.digits(prior_fraction=0, seed=0)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Every stage that is trained, as it was asked for."""
    asked: list[Stage] = []
    train = pipeline._train

    def noting(group: list[Stage]) -> Any:
        asked.extend(group)
        return train(group)

    monkeypatch.setattr(pipeline, "_train", noting)
    return asked


# --- The paper's recipe.


def test_the_papers_gates_have_the_weights_rate_and_schedule_and_nothing_holds_them(
    half: pp.data.Split, stages: list[Stage]
) -> None:
    still = replace(CONFIG, gate_lr=None)
    pp.pbp(network(), half, CONFIG, posterior=still, dense=CONFIG, recipe="paper", **FAST)
    dense, prior, posterior = stages
    assert (prior.config.gate_lr, prior.config.gates_scheduled, prior.config.schedule) == (0.05, True, "step")
    assert [stage.budget for stage in stages] == [None] * 3
    assert (dense.data, prior.data, posterior.data) == (half.prior, half.prior, half)
    assert posterior.config.gate_lr is None
    assert posterior.options["objective"] == "paper"


@pytest.mark.parametrize(
    ("options", "objective", "gate_lr", "held"),
    [
        ({"recipe": "held"}, "seeger", 5.0, True),
        ({"recipe": "paper"}, "paper", 0.05, False),
        ({"recipe": "paper", "objective": "seeger"}, "seeger", 0.05, False),
        ({"recipe": "held", "objective": "paper"}, "paper", 5.0, True),
    ],
)
def test_a_recipe_is_a_rate_a_budget_and_a_bound(
    half: pp.data.Split, stages: list[Stage], options: dict[str, Any], objective: str, gate_lr: float, held: bool
) -> None:
    pp.pbp(network(), half, CONFIG, **options, **FAST)
    prior, posterior = stages
    assert prior.config.gate_lr == posterior.config.gate_lr == gate_lr
    assert (prior.budget is not None, posterior.budget is not None) == (held, held)
    assert posterior.options["objective"] == objective


def test_the_papers_sparsity_is_where_its_gates_go_and_the_other_recipe_holds_it(half: pp.data.Split) -> None:
    config, options = replace(CONFIG, gate_lr=100.0), {"sparsity": 0.8, "eps": 0.1, "std": 0.02}
    free, held = (train_prior(network(), half, config, recipe=recipe, **options).slab for recipe in ("paper", "held"))
    assert abs(held.sparsity - 0.8) < 5e-4
    assert abs(free.sparsity - 0.8) > 2e-3


def test_the_paper_keeps_the_means_of_all_weights(half: pp.data.Split) -> None:
    still = replace(CONFIG, gate_lr=None)
    for recipe, zeros in (("paper", False), ("held", True)):
        result = pp.pbp(network(), half, still, recipe=recipe, **FAST)
        for slab in (result.prior, result.posterior):
            away = {name: slab.mean[name][keep < 0.5] for name, keep in slab.keep_prob.items()}
            assert all(bool((mean == 0).all()) == zeros for mean in away.values())


def test_stage_2_is_trained_with_random_masks_and_noise(half: pp.data.Split, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []
    forward = nn.Linear.forward

    def noting(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.training and layer.out_features == 10:
            drawn.append(layer.weight.detach().clone())
        return forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", noting)
    still = replace(CONFIG, lr=1e-9, gate_lr=None, epochs=1)
    model = network()
    train_prior(model, half, still, recipe="paper", sparsity=0.5, eps=0.01, std=0.3)
    noise = torch.stack(drawn[-4:]).std(0)
    kept = pp.read(model).keep_prob["4.weight"] > 0.5
    assert float(noise[kept].median()) > 0.1
    assert float(noise[~kept].median()) < 0.1


def test_an_unknown_recipe_is_refused(half: pp.data.Split) -> None:
    with pytest.raises(ValueError, match="recipe 'coupled' is unknown; use one of held, paper"):
        pp.pbp(network(), half, CONFIG, recipe="coupled", **FAST)


def test_posteriors_of_one_prior_are_chosen_among_for_nothing(half: pp.data.Split) -> None:
    model, still = network(), replace(CONFIG, gate_lr=None)
    prior = train_prior(model, half, CONFIG, dense=CONFIG, recipe="paper", sparsity=0.8, eps=0.01, std=0.02).slab
    assert prior.hash == pp.read(model).hash
    copies = {f"lr {lr:g}": copy.deepcopy(model) for lr in (0.01, 0.1)}
    configs = [replace(still, lr=lr) for lr in (0.01, 0.1)]
    pp.fit_posterior(list(copies.values()), [prior] * 2, half, configs, objective="paper")
    choice = pp.choose(copies, prior, half, draws=50, choosing_draws=20)
    assert choice.certificate.ledger.candidates == 1
    assert choice.certificate.record["hashes"]["prior"] == prior.hash


# --- A prior on no data.


def blank(split: pp.data.Split, model: nn.Module | None = None, **options: Any) -> pp.Certified:
    posterior = pp.Config(epochs=2, lr=0.05, gate_lr=None)
    model = network() if model is None else model
    return pp.pbp(model, split, pp.Config(epochs=0), posterior=posterior, **{**FAST, **options})


@pytest.mark.parametrize("recipe", ["held", "paper"])
def test_a_prior_on_no_data_has_the_first_weights_and_knows_no_example(free: pp.data.Split, recipe: str) -> None:
    first = network()
    result = blank(free, recipe=recipe)
    assert result.prior.seen.count == 0
    for name, mean in result.prior.mean.items():
        assert torch.equal(torch.where(mean == 0, 0.0, first.state_dict()[name]), mean)
    assert torch.equal(result.prior.rest["2.running_var"], torch.ones(16))
    assert not result.prior.rest["2.running_mean"].any()
    assert [row["stage"] for row in result.history] == ["posterior"] * 2
    assert not torch.equal(result.posterior.mean["4.weight"], result.prior.mean["4.weight"])
    record = result.certificate.record
    assert (record["n"], record["examples_seen"], record["declaration"]) == (1437, 0, None)
    assert record["split"]["sizes"]["prior"] == 0
    assert record["standardisation"] == {"mean": [], "std": []}


def test_a_network_without_a_size_takes_that_of_the_inputs(free: pp.data.Split) -> None:
    assert blank(free, pp.models.mlp(hidden=(8,))).prior.mean["layers.0.weight"].shape == (8, 64)


def test_a_certificate_of_a_prior_on_no_data_is_verified_on_all_levels(free: pp.data.Split, tmp_path: Path) -> None:
    split = pp.data.digits(prior_fraction=0, seed=0, unlabelled=30)
    result = blank(split, pp.models.mlp(64, hidden=(8,)), name="mlp")
    assert result.certificate.bounds["held_out"] > 0.8
    folder = result.certificate.save(tmp_path / "free")
    model = pp.models.mlp(64, hidden=(8,))
    report = pp.verify(folder, model=model, recount=True, replay=True, draws=20, seed=3)
    assert (report.valid, report.level) == (True, 3), report.failure
    assert any("its first weights knew no bound example" in line for line in report.trusted)
    other = pp.verify(folder, split=pp.data.digits(prior_fraction=0.01, unlabelled=30), model=model)
    assert "split: prior_fraction is 0 in the certificate but 0.01" in str(other.failure)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dense": CONFIG}, "no data may shape the prior, but it would be trained for 2 dense and 0 other epochs"),
        ({"config": CONFIG}, "it would be trained for 0 dense and 2 other epochs; set both to 0, and give Q epochs"),
        ({"criterion": "snip"}, "the data is empty: 0 examples; choose another split, fraction or batch size"),
    ],
)
def test_what_needs_data_is_refused_without_them(free: pp.data.Split, options: dict[str, Any], words: str) -> None:
    config = options.pop("config", pp.Config(epochs=0))
    with pytest.raises(ValueError, match=words):
        pp.pbp(network(), free, config, **options, **FAST)


def test_a_trained_network_is_no_prior_on_no_data(free: pp.data.Split, half: pp.data.Split) -> None:
    by_pacprune, elsewhere = network(), network()
    pp.fit(by_pacprune, free.test, pp.Config(epochs=20, lr=0.1))
    elsewhere.load_state_dict(by_pacprune.state_dict())
    with pytest.raises(ValueError, match="trained on 360 examples or labels that are not those of split"):
        blank(free, copy.deepcopy(by_pacprune))
    with pytest.raises(ValueError, match=r"the means of the prior err on 0\.\d+ of the bound examples, less than any"):
        blank(free, elsewhere, recipe="paper")
    pp.fit(by_pacprune, half.prior, CONFIG)
    with pytest.raises(ValueError, match="the prior has seen the bound set: 718 of its 1437 examples"):
        blank(free, by_pacprune)


def test_other_data_may_shape_the_prior_when_the_issuer_says_so(free: pp.data.Split) -> None:
    words = "the prior was trained on digits of another writer"
    options: dict[str, Any] = {"data": free.test, "posterior": pp.Config(epochs=0), **FAST}
    with pytest.raises(ValueError, match="the data was trained on 360 examples"):
        pp.pbp(network(), free, CONFIG, **options)
    result = pp.pbp(network(), free, CONFIG, criterion="snip", declare=words, **options)
    assert [row["stage"] for row in result.history] == ["prior"] * 2
    assert words in result.certificate.record["statement"]


def test_an_untrained_prior_needs_a_declaration_where_there_are_prior_examples(half: pp.data.Split) -> None:
    with pytest.raises(ValueError, match="pacprune has never trained the prior"):
        blank(half)


def test_constants_are_refused_where_no_prior_example_can_have_given_them(free: pp.data.Split) -> None:
    with pytest.raises(ValueError, match="is empty, so that the constants may have seen the bound set"):
        rules.refuse_split(replace(free, mean=(0.3,), std=(0.4,)))
