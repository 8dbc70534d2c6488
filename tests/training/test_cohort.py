"""A population that does not fit into memory is trained in halves; for a single model, the error says what to do."""

import copy

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.training.population import Population

X = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CONFIG = pp.Config(epochs=2, batch_size=32)


def nets(count: int) -> list[nn.Module]:
    return [pp.models.mlp(20, 2, hidden=(8,), seed=seed) for seed in range(count)]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds two models."""
    losses = Population.losses

    def limited(self: Population, *args, **options) -> torch.Tensor:
        if len(self) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, *args, **options)

    monkeypatch.setattr(Population, "losses", limited)


@pytest.mark.usefixtures("small_memory")
def test_members_that_do_not_fit_are_trained_in_halves_with_the_same_outcome(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, populations, make_population = nets(5), [], Population.__init__

    def record_population(self: Population, members: list[nn.Module]) -> None:
        too_large = [population for population in populations if len(population) > 2]
        assert all(p.numel() == 0 for population in too_large for p in population.stacked.parameters())  # freed
        make_population(self, members)
        populations.append(self)

    monkeypatch.setattr(Population, "__init__", record_population)
    alone = copy.deepcopy(models)
    with pytest.warns(UserWarning, match=r"do not fit into the memory of cpu; they are trained \d at a time"):
        rows = pp.fit(models, (X, Y), CONFIG, seed=list(range(5)), checkpoint=tmp_path / "fit.pt")
    assert [len(population) for population in populations] == [5, 2, 3, 1, 2]
    assert sorted(row["member"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for seed, (model, lone_model) in enumerate(zip(models, alone, strict=True)):
        last = pp.fit(lone_model, (X, Y), CONFIG, seed=seed)[-1]
        for actual, expected in zip(model.parameters(), lone_model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        member_rows = [row for row in rows if row["member"] == seed]
        assert member_rows[-1]["loss"] == pytest.approx(last["loss"], rel=1e-5)


@pytest.mark.usefixtures("small_memory")
def test_posteriors_that_do_not_fit_are_trained_in_halves(tmp_path) -> None:
    split = pp.data.split(X, Y, prior_fraction=0.5, seed=0)
    models = nets(3)
    for model in models:
        pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.01))
    priors, folders = [pp.read(model) for model in models], [tmp_path / str(k) for k in range(3)]
    with pytest.warns(UserWarning, match="do not fit"):
        rows = pp.fit_posterior(models, priors, split, CONFIG, out=folders)
    assert {row["member"] for row in rows} == {0, 1, 2}
    assert all((folder / "prior.safetensors").exists() for folder in folders)


def test_for_a_model_that_does_not_fit_the_error_says_what_to_do() -> None:
    class Greedy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if len(input) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input)

    with pytest.raises(ValueError, match="a batch of 32 does not fit into the memory of cpu; use accumulate=2"):
        pp.fit(Greedy(20, 2), (X, Y), CONFIG)
    with pytest.raises(ValueError, match="at least one model"):
        pp.fit([], (X, Y), CONFIG)


def test_errors_of_a_population_are_those_of_its_members() -> None:
    models = nets(3)
    pp.fit(models, (X, Y), CONFIG)
    assert pp.error(models, (X, Y)) == pytest.approx([pp.error(model, (X, Y)) for model in models])
    pp.attach(models[0], pp.isotropic(models[0], sparsity=0.5), seed=3)
    pp.attach(models[1], pp.isotropic(models[1], sparsity=0.5), seed=4)
    assert pp.error(models[:2], (X, Y)) == pytest.approx([pp.error(model, (X, Y)) for model in models[:2]])


def test_memory_that_runs_out_after_a_validation_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, calls = Population.losses, []

    def limited(self: Population, *args, **options) -> torch.Tensor:
        calls.append(len(self))
        if len(self) > 1 and len(calls) > 3:  # in the second epoch
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, *args, **options)

    monkeypatch.setattr(Population, "losses", limited)
    models = nets(2)
    alone = copy.deepcopy(models)
    with pytest.warns(UserWarning, match="do not fit"):
        pp.fit(models, (X, Y), CONFIG, seed=[0, 1], validation=(X, Y))
    for seed, (model, lone_model) in enumerate(zip(models, alone, strict=True)):
        pp.fit(lone_model, (X, Y), CONFIG, seed=seed)
        for actual, expected in zip(model.parameters(), lone_model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_members_with_different_attributes_are_refused() -> None:
    class Scaled(nn.Linear):
        def __init__(self, scale: float) -> None:
            super().__init__(20, 2)
            self.scale, self.seed = scale, scale

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.scale * super().forward(input)

    with pytest.raises(ValueError, match=r"scale=1\.0 where model 1 has .*scale=-3\.0"):
        pp.fit([Scaled(1.0), Scaled(-3.0)], (X, Y), CONFIG)


@pytest.mark.parametrize("count", [1, 2])
def test_the_compiled_network_serves_accumulated_batches(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], torch.compile

    def counted(function, *, dynamic, **options):
        compiled = real(function, dynamic=dynamic, backend="eager")
        return lambda *arguments: calls.append(1) or compiled(*arguments)

    monkeypatch.setattr(torch, "compile", counted)
    config = pp.Config(epochs=1, batch_size=32, accumulate=2, execution="compiled")
    pp.fit(nets(count) if count > 1 else nets(1)[0], (X, Y), config)
    assert len(calls) == 4
