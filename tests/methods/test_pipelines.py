"""osp, pft and pbp from end to end: exact sparsity, any network, resuming, and errors and bounds on the digits."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp
from pacprune.bounds.numeric import rounded_up
from pacprune.masking import criteria, weights
from pacprune.methods import pipeline
from pacprune.methods.table import METHODS
from pacprune.training import config as config_module

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()

CONFIG = pp.Config(epochs=4, lr=0.1, batch_size=32)
PROCEDURES = {
    "osp": pp.osp,
    "pft": pp.pft,
    "pft-paper": lambda *arguments, **options: pp.pft(*arguments, recipe="paper", **options),
    "pft-coupled": lambda *arguments, **options: pp.pft(*arguments, recipe="coupled", **options),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def fresh_split() -> pp.data.Split:
    """A split on which nothing has been certified: a second prior on one split would have to be paid for."""
    return pp.data.split(X, Y, prior_fraction=0.5, seed=0)


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))


def count_kept(mask: Any) -> int:
    return sum(int(m.sum()) for m in mask.values())


# --- Results.


def test_signatures_name_the_type_that_a_procedure_returns() -> None:
    for verb in {method.verb for method in METHODS.values()}:
        assert inspect.signature(verb).return_annotation is (pp.Certified if verb is pp.pbp else pp.Pruned)


@pytest.mark.parametrize("name", PROCEDURES)
def test_a_criterion_may_be_a_function(name: str, tmp_path: Path) -> None:
    def largest(model: nn.Module, data: Any) -> dict[str, Tensor]:
        return {key: w.detach().abs() for key, w in pp.prunable(model).items()}

    by_name, by_function = net(), net()
    for model, criterion in ((by_name, "snip"), (by_function, criteria.snip)):
        PROCEDURES[name](model, (X, Y), CONFIG, sparsity=0.8, criterion=criterion)
    assert all(torch.equal(a, b) for a, b in zip(by_name.parameters(), by_function.parameters(), strict=True))
    assert (
        count_kept(PROCEDURES[name](net(), (X, Y), CONFIG, sparsity=0.8, criterion=largest, folder=tmp_path).mask) == 36
    )


def test_repr_of_a_result_names_its_sparsity_and_bound() -> None:
    assert repr(pp.osp(net(), (X, Y), CONFIG, sparsity=0.8)).startswith(
        "Pruned(Sequential, sparsity 0.8000, 36 of 180 weights kept, loss "
    )
    assert repr(pp.osp(net(), (X, Y), dataclasses.replace(CONFIG, epochs=0), sparsity=0.8)).endswith("weights kept)")
    certified = pp.pbp(net(), fresh_split(), CONFIG, sparsity=0.8, draws=20)
    assert repr(certified) == (
        f"Certified(Sequential, expected sparsity 0.8000, 36 of 180 weights kept, error at most "
        f"{rounded_up(certified.certificate.bound)} at delta 0.05)"
    )


@pytest.mark.parametrize("criterion", criteria.CRITERIA)
@pytest.mark.parametrize("name", PROCEDURES)
def test_exactly_k_weights_are_kept_and_the_plain_model_takes_them(name: str, criterion: str) -> None:
    model = net()
    result = PROCEDURES[name](model, (X, Y), CONFIG, sparsity=0.85, criterion=criterion, dense=CONFIG)
    assert result.model is model
    assert count_kept(result.mask) == round(0.15 * 180) == 27
    assert result.sparsity == 1 - 27 / 180
    for key, weight in weights.prunable(model).items():
        assert torch.equal(weight != 0, result.mask[key])
    stages = [row["stage"] for row in result.history]
    later = {"osp": ["tune"] * 4, "pft": ["masks"] * 4}
    assert stages == ["dense"] * 4 + later.get(name, ["masks"] * 2 + ["tune"] * 2)
    plain = net()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert pp.error(plain, (X, Y)) == pp.error(model, (X, Y)) < 0.6


def test_pft_and_osp_have_the_same_epochs_and_learning_rates() -> None:
    config = pp.Config(epochs=5, lr=0.1, schedule="cosine", batch_size=60, warmup=0.2)
    osp_rows, *pft_rows = (
        PROCEDURES[name](net(), (X, Y), config, sparsity=0.5).history for name in ("osp", "pft", "pft-coupled")
    )
    for rows in pft_rows:
        assert len(osp_rows) == len(rows) == 5
        assert [row["lr"] for row in osp_rows[2:]] == pytest.approx([row["lr"] for row in rows[2:]])
    coupled = [row["expected_sparsity"] for row in pft_rows[1] if row["stage"] == "masks"]
    assert coupled[-1] == pytest.approx(0.5, abs=1e-6)


def test_prunable_restricts_the_mask_but_not_the_denominator_of_the_sparsity() -> None:
    def body(model: nn.Module) -> dict[str, Tensor]:
        return {name: w for name, w in pp.prunable(model).items() if not name.startswith("3")}

    for procedure in PROCEDURES.values():
        result = procedure(net(), (X, Y), CONFIG, sparsity=0.5, prunable=body)
        assert set(result.mask) == {"0.weight"}
        assert count_kept(result.mask) == 30  # 90 of all 180 weights are zero, and they are all among these 120
        assert result.sparsity == 0.5
        with pytest.raises(ValueError, match=r"sparsity 0\.9 of 180 weights"):
            procedure(net(), (X, Y), CONFIG, sparsity=0.9, prunable=body)


def test_min_per_layer_and_scope_decide_how_many_weights_a_layer_keeps() -> None:
    for procedure in PROCEDURES.values():
        result = procedure(net(), (X, Y), CONFIG, sparsity=0.95, min_per_layer=4)
        assert min(int(m.sum()) for m in result.mask.values()) >= 4
        assert count_kept(result.mask) == 9
    result = pp.osp(net(), (X, Y), CONFIG, sparsity=0.9, scope="layer")
    assert [int(m.sum()) for m in result.mask.values()] == [12, 6]


def test_pft_prunes_at_initialisation_even_a_net_without_a_width() -> None:
    result = pp.pft(pp.models.mlp(classes=3), (X, Y), pp.Config(epochs=10, lr=0.1), sparsity=0.9)
    assert [row["stage"] for row in result.history] == ["masks"] * 10
    assert pp.error(result.model, (X, Y)) < 0.4


@pytest.mark.parametrize("loader", [False, True])
def test_a_long_mask_stage_has_a_smaller_gate_lr_unless_one_is_given(
    loader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "GATE_STEPS", 4)  # the mask stage has 2 epochs of 4 steps: twice as many
    data = DataLoader(TensorDataset(X, Y), batch_size=32) if loader else (X, Y)

    def weight(config: pp.Config) -> Tensor:
        return pp.pft(net(), data, config, sparsity=0.5, recipe="coupled").model[0].weight  # type: ignore[index]

    default, whole, half = (weight(c) for c in (CONFIG, *(dataclasses.replace(CONFIG, gate_lr=r) for r in (10.0, 5.0))))
    assert torch.equal(default, half)
    assert not torch.equal(whole, half)


def paper_stages(monkeypatch: pytest.MonkeyPatch, config: pp.Config, **options: Any) -> tuple[list[Any], list[Any]]:
    """The configs of both stages of the recipe "paper", and the gates that the first begins with."""
    configs, starts, fit = [], [], pipeline.fit

    def noting(model: nn.Module, data: Any, config: pp.Config, **rest: Any) -> Any:
        configs.append(config)
        starts.extend([pp.read(model).keep_prob] if rest["stage"] == "masks" else [])
        return fit(model, data, config, **rest)

    monkeypatch.setattr(pipeline, "fit", noting)
    pp.pft(net(), (X, Y), config, sparsity=0.5, recipe="paper", **options)
    return configs, starts


def test_each_stage_of_the_paper_has_the_whole_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pp.Config(epochs=6, lr=0.1, schedule="step", warmup=0.1)
    (mask, tune), _ = paper_stages(monkeypatch, config, mask_share=1 / 3)
    assert (mask.epochs, tune.epochs) == (2, 4)
    for stage in (mask, tune):
        assert [stage.factor(share) for share in (0.3, 0.6, 0.8)] == [1.0, 0.1, 0.01]
        assert stage.factor(0.05) == pytest.approx(0.5)
    assert (mask.gate_lr, mask.gates_scheduled) == (0.1, True)


@pytest.mark.parametrize("gate_lr", [0.1, 7.0, None])
def test_a_gate_lr_that_is_given_is_that_of_the_paper_recipe(
    gate_lr: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mask, _), _ = paper_stages(monkeypatch, pp.Config(epochs=2, lr=0.1, gate_lr=gate_lr))
    assert mask.gate_lr == gate_lr


@pytest.mark.parametrize("mapping", ["clamp", "sigmoid"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_paper_starts_isotropic_for_random_pruning_alone(
    mapping: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(criterion: Any) -> Tensor:
        options = {"criterion": criterion, "mapping": mapping, "scope": scope}
        _, (keep_prob,) = paper_stages(monkeypatch, pp.Config(epochs=2), **options)
        return torch.cat([p.flatten() for p in keep_prob.values()])

    for criterion in ("random", pp.scores.random):
        torch.testing.assert_close(start(criterion), torch.full((180,), 0.5))
    for criterion in ("magnitude", "snip"):
        assert start(criterion).unique().tolist() == pytest.approx([1e-4, 1 - 1e-4], rel=1e-3)


def test_the_mappings_of_the_paper_train_other_masks_and_no_third_is_known() -> None:
    config = pp.Config(epochs=4, lr=0.1, gate_lr=1.0, batch_size=32)
    results = [
        pp.pft(net(), (X, Y), config, sparsity=0.5, criterion="random", recipe="paper", mapping=mapping)
        for mapping in ("clamp", "sigmoid")
    ]
    assert not torch.equal(results[0].mask["0.weight"], results[1].mask["0.weight"])
    with pytest.raises(ValueError, match="mapping 'softmax' is unknown; use one of clamp, sigmoid"):
        pp.pft(net(), (X, Y), config, sparsity=0.5, recipe="paper", mapping="softmax")


@pytest.mark.parametrize("recipe", ["coupled", "paper"])
def test_a_strong_lottery_ticket_never_changes_a_weight(recipe: str) -> None:
    model = seeded(wide)
    first = {n: w.detach().clone() for n, w in model.named_parameters()}
    config = pp.Config(epochs=30, lr=0.0, gate_lr=20.0 if recipe == "coupled" else 0.5, batch_size=32)
    result = pp.pft(model, (X, Y), config, sparsity=0.5, criterion="random", recipe=recipe, mask_share=1.0)
    assert {row["stage"] for row in result.history} == {"masks"}
    for name, keep in result.mask.items():
        assert torch.equal(model.get_parameter(name), torch.where(keep, first[name], 0.0))
    assert all(torch.equal(model.get_parameter(f"{i}.bias"), first[f"{i}.bias"]) for i in (0, 2))
    chance = pp.osp(seeded(wide), (X, Y), pp.Config(epochs=0), sparsity=0.5, criterion="random")
    assert pp.error(model, (X, Y)) < pp.error(chance.model, (X, Y)) - 0.15


def test_without_epochs_batchnorm_still_learns_the_pruned_network() -> None:
    model = net()
    pp.osp(model, (X, Y), pp.Config(epochs=0), sparsity=0.5)
    with torch.no_grad():
        assert torch.allclose(model[1].running_mean, model[0](X).mean(0), atol=1e-5)  # type: ignore[index, union-attr]


class Everything(nn.Module):
    """Attention, LSTM, and an embedding tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 16)
        self.att = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 8)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h = h + self.att(h, h, h, need_weights=False)[0]
        return self.head(self.lstm(h)[0])


def next_token(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("name", PROCEDURES)
@pytest.mark.parametrize("criterion", ["magnitude", "snip"])
def test_attention_lstm_and_tied_weights_are_pruned_under_a_users_loss(name: str, criterion: str) -> None:
    text = torch.arange(200) % 8
    data = text[:-1].unfold(0, 6, 2).contiguous(), text[1:].unfold(0, 6, 2).contiguous()
    model, config = seeded(Everything), pp.Config(epochs=8, lr=0.01, gate_lr=0.1, optimizer="adam", batch_size=32)
    result = PROCEDURES[name](model, data, config, sparsity=0.6, criterion=criterion, dense=config, loss=next_token)
    total = 8 * 16 + 4 * 16 * 16 + 2 * 4 * 16 * 16
    assert count_kept(result.mask) == round(0.4 * total)
    assert pp.error(model, data) < 0.2
    assert model.head.weight is model.emb.weight
    seeded(Everything).load_state_dict(model.state_dict(), strict=True)


def conv() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(128, 10))


def test_a_convolution_with_batchnorm_is_pruned_and_certified() -> None:
    digits = pp.data.digits()
    config = pp.Config(epochs=4, lr=0.1)
    result = pp.pft(seeded(conv), digits.train, config, sparsity=0.8, dense=config)
    assert count_kept(result.mask) == round(0.2 * (72 + 1280))
    assert pp.error(result.model, digits.test) < 0.15
    options = {"std": 1e-2, "train_std": True, "draws": 50}
    certified = pp.pbp(seeded(conv), digits, config, sparsity=0.5, dense=pp.Config(epochs=15, lr=0.1), **options)
    assert torch.equal(certified.prior.rest["1.running_mean"], certified.posterior.rest["1.running_mean"])
    assert certified.certificate.risk < 0.15


# --- pbp.


def test_pbp_returns_the_distributions_that_its_certificate_names(tmp_path: Path) -> None:
    model, config, split = net(), pp.Config(epochs=5, lr=0.1, batch_size=16), fresh_split()
    result = pp.pbp(model, split, config, sparsity=0.5, eps=0.01, std=0.02, dense=config, draws=50, folder=tmp_path)
    assert [row["stage"] for row in result.history] == ["dense"] * 5 + ["prior"] * 5 + ["posterior"] * 5
    cert = result.certificate
    assert cert.record["hashes"]["prior"] == result.prior.hash
    assert cert.record["hashes"]["posterior"] == result.posterior.hash == pp.read(model).hash
    assert (result.prior.sparsity, result.posterior.sparsity, cert.sparsity) == pytest.approx((0.5,) * 3, abs=1e-6)
    assert not torch.isin(split.bound.example_hashes, result.prior.seen.examples).any()
    assert torch.isin(split.prior.example_hashes, result.prior.seen.examples).all()
    assert (tmp_path / "prior.safetensors").exists()
    assert cert.bound < 1
    pp.harden(model)
    assert weights.sparsity(model) == pytest.approx(0.5, abs=1e-2)


def test_pbp_refuses_a_network_that_has_seen_the_bound_set() -> None:
    model, split = net(), fresh_split()
    pp.fit(model, split.train, CONFIG)
    with pytest.raises(ValueError, match="the prior has seen the bound set: 60 of its 60 examples"):
        pp.pbp(model, split, CONFIG, sparsity=0.5, eps=0.01)


# --- Resuming, and bad input.


class Killed(Exception):
    """Raised from the progress callback."""


def pbp(model: nn.Module, data: Any, config: pp.Config, **options: Any) -> pp.Certified:
    return pp.pbp(model, fresh_split(), config, eps=0.01, std=0.02, draws=3, **options)


@pytest.mark.parametrize("name", [*PROCEDURES, "pbp"])
def test_a_killed_pipeline_resumes_to_the_same_result(name: str, tmp_path: Path) -> None:
    procedure, steps = {**PROCEDURES, "pbp": pbp}[name], []
    # snip reads the shuffled data as well: its scores must not depend on when it is called
    data = DataLoader(TensorDataset(X, Y), 32, shuffle=True)

    def run(folder: Path | None, stop: int = -1) -> Any:
        steps.clear()

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        options = {"sparsity": 0.5, "criterion": "snip", "dense": CONFIG, "folder": folder, "progress": progress}
        return procedure(net(), data, CONFIG, **options)

    whole = run(None)
    count = len(steps)
    for stop in (3, 6, count // 2, count - 8, count):
        with pytest.raises(Killed):
            run(tmp_path / str(stop), stop)
        torch.randn(stop)
        resumed = run(tmp_path / str(stop))
        assert resumed.history == whole.history
        state, expected = resumed.model.state_dict(), whole.model.state_dict()
        assert all(torch.equal(state[n], t) for n, t in expected.items())
        if name == "pbp":
            assert resumed.certificate.record == whole.certificate.record
    again = run(tmp_path / str(count))
    assert again.history == whole.history
    assert all(call[0].endswith("draws") for call in steps)


def by_column(sign: float) -> Callable[..., dict[str, Tensor]]:
    return lambda model, data: {n: sign * w.detach() for n, w in pp.prunable(model).items()}


def body(model: nn.Module) -> dict[str, nn.Parameter]:
    return {"0.weight": pp.prunable(model)["0.weight"]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"prunable": body}),
        ({"criterion": by_column(1.0)}, {"criterion": by_column(-1.0)}),
        ({"loss": lambda out, y: F.cross_entropy(out, y)}, {"loss": lambda out, y: F.cross_entropy(-out, y) ** 2}),
        ({"labels": Y}, {"labels": Y.flip(0)}),
    ],
    ids=["prunable", "criterion", "loss", "labels"],
)
def test_scores_of_another_request_are_not_reused(first: dict, second: dict, tmp_path: Path) -> None:
    def mask(options: dict, folder: Path | None) -> dict[str, Tensor]:
        options = {"criterion": "snip", "sparsity": 0.4, "labels": Y} | options
        data = X, options.pop("labels")
        return pp.pft(net(), data, dataclasses.replace(CONFIG, epochs=0), folder=folder, **options).mask

    mask(first, tmp_path)
    reused, expected = mask(second, tmp_path), mask(second, None)
    assert reused.keys() == expected.keys()
    assert all(torch.equal(reused[n], keep) for n, keep in expected.items())


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    pp.osp(net(), (X, Y), CONFIG, sparsity=0.5, folder=tmp_path)
    with pytest.raises(ValueError, match="belongs to another run"):
        pp.osp(net(), (X, Y), CONFIG, sparsity=0.6, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0 is outside \[0, 1\)"),
        ({"sparsity": -0.1}, r"sparsity -0\.1 is outside"),
        ({"sparsity": 0.5, "criterion": "size"}, "criterion 'size' is unknown; use one of magnitude, snip"),
    ],
)
@pytest.mark.parametrize("name", [*PROCEDURES, "pbp"])
def test_bad_arguments_are_refused_before_anything_is_trained(
    name: str, options: dict, message: str, tmp_path: Path
) -> None:
    procedure = {**PROCEDURES, "pbp": pbp}[name]
    model = net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        procedure(model, (X, Y), CONFIG, dense=CONFIG, folder=tmp_path, **options)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_still_attached_is_refused() -> None:
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    for call in (
        lambda: pp.osp(model, (X, Y), CONFIG, sparsity=0.5, dense=CONFIG),
        lambda: pp.attach(model, pp.read(model)),
    ):
        with pytest.raises(ValueError, match=r"interrupted, or it was attached before: start from a fresh copy"):
            call()


def test_pbp_refuses_targets_that_are_no_classes() -> None:
    for y in (X[:, 0], Y[:, None]):
        split = pp.data.split(X, y, prior_fraction=0.5, seed=0)
        with pytest.raises(ValueError, match="a certificate bounds the error of a classifier"):
            pp.pbp(net(), split, CONFIG, sparsity=0.5)


def test_a_ticket_without_a_gate_lr_is_refused() -> None:
    no_lr = dataclasses.replace(CONFIG, lr=0.0)
    with pytest.raises(ValueError, match="give gate_lr="):
        pp.pft(net(), (X, Y), no_lr, sparsity=0.5, recipe="coupled", dense=CONFIG)
    with pytest.raises(ValueError, match="give gate_lr="):
        pp.pft(net(), (X, Y), dataclasses.replace(no_lr, gate_lr=0.0), sparsity=0.5)
    with pytest.raises(ValueError, match="give gate_lr="):
        pp.pbp(net(), fresh_split(), CONFIG, sparsity=0.5, posterior=no_lr)


def test_a_ticket_by_learned_scores_moves_no_weight() -> None:
    model = net()
    before = {name: w.detach().clone() for name, w in pp.prunable(model).items()}
    result = pp.pft(model, (X, Y), dataclasses.replace(CONFIG, lr=0.0), sparsity=0.5)
    largest = pp.top_k(pp.scores.magnitude(net()), sparsity=0.5)
    assert any(not torch.equal(result.mask[name], largest[name]) for name in before)
    for name, weight in pp.prunable(model).items():
        ratio = weight[result.mask[name]] / before[name][result.mask[name]]
        assert ((ratio > 0) & (ratio <= 1)).all()  # shrunk by the threshold alone


def test_bad_arguments_of_pft_are_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"mask_share is {share}"):
            pp.pft(net(), (X, Y), CONFIG, sparsity=0.5, mask_share=share)
    with pytest.raises(ValueError, match="recipe 'best' is unknown; use one of thresholded, coupled, paper"):
        pp.pft(net(), (X, Y), CONFIG, sparsity=0.5, recipe="best")
    with pytest.raises(ValueError, match="nothing to prune"):
        pp.pft(nn.BatchNorm1d(6), (X, Y), CONFIG, sparsity=0.5)


# --- Errors and bounds on the digits: mlp 64-300-100-10, seeds 0 to 4. Settings were chosen inside the training part.


@pytest.mark.parametrize("sparsity", [0.9, 0.95])
def test_pft_beats_one_shot_pruning_from_random_masks(sparsity: float) -> None:
    dense = pp.Config(epochs=10, lr=0.05)
    config = pp.Config(epochs=20, lr=0.15, gate_lr=50.0, schedule="cosine")
    errors: dict[str, list[float]] = {"osp": [], "pft": []}
    for seed in range(5):
        split = pp.data.digits(seed=seed)
        assert (len(split.train), len(split.test)) == (1437, 360)
        for name, method_errors in errors.items():
            model = pp.models.mlp(64, seed=seed)
            options = {"sparsity": sparsity, "criterion": "random", "dense": dense, "seed": seed}
            result = PROCEDURES[name](model, split.train, config, **options)
            assert count_kept(result.mask) == round((1 - sparsity) * 50_200)
            method_errors.append(pp.error(model, split.test))
    assert mean(errors["pft"]) < mean(errors["osp"]) - 0.01, errors
    assert mean(errors["pft"]) < 0.05


def test_pbp_certifies_below_15_percent_on_every_seed() -> None:
    dense, config, posterior = pp.Config(epochs=20, lr=0.1), pp.Config(epochs=15, lr=0.05), pp.Config(epochs=5, lr=0.05)
    for seed in range(5):
        split = pp.data.digits(prior_fraction=0.5, seed=seed)
        options = {"sparsity": 0.9, "dense": dense, "posterior": posterior, "draws": 300, "seed": seed}
        result = pp.pbp(pp.models.mlp(64, seed=seed), split, config, **options)
        assert result.certificate.bound < 0.15
        assert round(result.certificate.sparsity, 6) >= 0.9
        assert pp.gibbs_error(result.model, split.test) < result.certificate.bound


@pytest.mark.parametrize("call", ["pbp", "certify", "fit_posterior"])
def test_a_certificate_needs_a_split(call: str) -> None:
    model, pair = pp.models.mlp(4, 2, hidden=(3,)), (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    prior = pp.read(pp.attach(copy.deepcopy(model), pp.isotropic(model, sparsity=0.5, std=0.1)))
    calls = {
        "pbp": lambda: pp.pbp(model, pair, pp.Config(epochs=1), sparsity=0.5),
        "certify": lambda: pp.certify(model, prior, pair),
        "fit_posterior": lambda: pp.fit_posterior(model, prior, pair, pp.Config(epochs=1)),
    }
    with pytest.raises(ValueError, match=r"the data is a tuple, but a certificate needs a Split; make one by pp\.data"):
        calls[call]()


def test_a_sparsity_that_is_a_string_is_refused() -> None:
    pair = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"sparsity '90%' is outside \[0, 1\)"):
        pp.pft(pp.models.mlp(4, 2), pair, pp.Config(epochs=1), sparsity="90%")


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("thresholded", {"eps": 0.1}, r"eps is 0\.1, but the recipe 'thresholded' does not read it; .* recipe='paper'"),
        ("coupled", {"eps": 0.1}, "eps is 0.1, but the recipe 'coupled' does not read it; leave it at 0.0001"),
        ("coupled", {"limit": None}, "limit is None, but the recipe 'coupled' does not read it; leave it at 0.1"),
        ("coupled", {"mapping": "sigmoid"}, r"mapping is sigmoid, .* leave it at clamp, or use recipe='paper'"),
        ("paper", {"theta": 1.0}, "theta is 1.0, but the recipe 'paper' does not read it"),
    ],
)
def test_an_argument_that_a_recipe_does_not_read_is_refused(recipe: str, options: dict[str, Any], message: str) -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    with pytest.raises(ValueError, match=message):
        pp.pft(torch.nn.Linear(4, 2), (x, y), pp.Config(epochs=1), sparsity=0.5, recipe=recipe, **options)


@pytest.mark.parametrize("name", METHODS)
def test_a_config_that_is_none_is_refused_by_its_type(name: str) -> None:
    method: Any = METHODS[name]
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    net = torch.nn.Linear(4, 2)
    options: dict[str, Any] = {"sparsity": 0.5, **method.options}
    with pytest.raises(ValueError, match=r"config is of the type dict; give pp\.Config\("):
        method.verb(net, (x, y), {"epochs": 2}, **options)
    with pytest.raises(ValueError, match="dense is of the type int"):
        method.verb(net, (x, y), pp.Config(epochs=1), dense=5, **options)
    with pytest.raises(ValueError, match="config is of the type dict"):
        pp.together(method.verb, [net, net], (x, y), {"epochs": 2}, **options)


def test_fit_takes_no_dictionary_for_a_config() -> None:
    config: Any = {"epochs": 2}
    with pytest.raises(ValueError, match=r"config is of the type dict; give pp\.Config\("):
        pp.fit(torch.nn.Linear(4, 2), (torch.randn(8, 4), torch.arange(8) % 2), config)


def test_a_misspelt_argument_is_named_with_the_one_that_is_near() -> None:
    call: Any = pp.pft
    with pytest.raises(TypeError, match=r"^pft\(\) has no argument sparcity; did you mean sparsity\?$"):
        call(None, None, pp.Config(epochs=1), sparcity=0.9)
    with pytest.raises(TypeError, match=r"^osp\(\) has no argument zzz; it has model, data, config, "):
        pp.together(pp.osp, [nn.Linear(2, 2)], None, pp.Config(epochs=1), zzz=1)
    with pytest.raises(TypeError, match=r"^pft\(\): missing a required argument: 'data'$"):
        call(None)
