"""One contract for every method of METHODS; and gmp (with feedback: DPF), imp, l0 and gates without noise."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune import kernels
from pacprune.kernels import HARD, NOISELESS, STRETCHED, Law, SampleInputs
from pacprune.masking import attachment, criteria, weights
from pacprune.methods.table import METHODS, pruning_methods
from pacprune.runs import commands
from pacprune.runs import options as opt

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
IMAGES = torch.randn(96, 1, 8, 8, generator=G)
CONFIG = pp.Config(epochs=6, lr=0.1, batch_size=32)
STAGES = {"osp": ["tune"] * 6, "imp": ["round 1"] * 2 + ["round 2"] * 2 + ["round 3"] * 2}
each_method = pytest.mark.parametrize("name", pruning_methods())


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)), seed)


def conv() -> nn.Module:
    body = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1)
    return nn.Sequential(*body, nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 3))


def arguments(name: str) -> dict[str, Any]:
    """What makes a verb this method; masks that move often, since stages are short here."""
    method = METHODS[name]
    return dict(method.options) | ({"every": 3} if method.takes("every") else {})


def prune(name: str, model: nn.Module, data: Any, config: pp.Config, **options: Any) -> pp.Pruned:
    return METHODS[name].verb(model, data, config, **{**arguments(name), **options})


def count_kept(mask: Any) -> int:
    return sum(int(m.sum()) for m in mask.values())


def support(model: nn.Module) -> Tensor:
    """Which weights are not zero, as one vector."""
    return torch.cat([(w != 0).reshape(-1) for w in weights.prunable(model).values()])


def current_mask(model: nn.Module) -> Tensor:
    """The current mask, as one vector."""
    return torch.cat([keep.reshape(-1) for _, keep in weights.masked(model)]).clone()


# --- Results.


@each_method
@pytest.mark.parametrize("kind", ["mlp", "convolution"])
def test_exactly_k_weights_are_kept_in_equal_epochs(name: str, kind: str) -> None:
    make, data = (net, (X, Y)) if kind == "mlp" else (lambda: seeded(conv), (IMAGES, Y[:96]))
    model = make()
    total = weights.total(model)
    result = prune(name, model, data, CONFIG, sparsity=0.85, dense=CONFIG)
    assert result.model is model
    assert count_kept(result.mask) == round(0.15 * total)
    assert result.sparsity == 1 - count_kept(result.mask) / total
    for key, weight in weights.prunable(model).items():
        assert torch.equal(weight != 0, result.mask[key])
    stages = [row["stage"] for row in result.history]
    assert stages[:6] == ["dense"] * 6
    assert len(stages) == 12
    if METHODS[name].verb is pp.pft and name != "pft":  # random masks, and then the likeliest one
        assert stages[6:] == ["masks"] * 3 + ["tune"] * 3
    else:
        assert stages[6:] == STAGES.get(name, stages[6:])
    plain = make()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert pp.error(plain, data) == pp.error(model, data)
    if kind == "mlp":
        assert pp.error(model, data) < 0.35


@each_method
def test_zeros_stay_zero_and_the_same_call_gives_the_same_network(name: str) -> None:
    first, second = (prune(name, net(), (X, Y), CONFIG, sparsity=0.8, dense=CONFIG, seed=3) for _ in range(2))
    assert first.history == second.history
    assert all(torch.equal(t, second.model.state_dict()[n]) for n, t in first.model.state_dict().items())
    pp.fit(first.model, (X, Y), CONFIG)
    for key, weight in weights.prunable(first.model).items():
        assert torch.equal(weight != 0, first.mask[key])


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.flags is not None])
def test_every_verb_with_a_command_is_public(name: str) -> None:
    verb = METHODS[name].verb
    assert verb.__name__ in pp.__all__
    assert getattr(pp, verb.__name__) is verb


@pytest.mark.parametrize("criterion", criteria.CRITERIA)
def test_pft_without_noise_starts_from_every_criterion(criterion: str) -> None:
    for recipe in ("coupled", "paper"):
        result = pp.pft(net(), (X, Y), CONFIG, sparsity=0.85, criterion=criterion, recipe=recipe, noise=False)
        assert count_kept(result.mask) == 27
        noisy = pp.pft(net(), (X, Y), CONFIG, sparsity=0.85, criterion=criterion, recipe=recipe)
        assert result.history[0]["loss"] != noisy.history[0]["loss"]


@each_method
@pytest.mark.parametrize("epochs", [0, 1, 2, 7])
def test_any_number_of_epochs_is_spent_exactly(name: str, epochs: int) -> None:
    config = dataclasses.replace(CONFIG, epochs=epochs)
    result = prune(name, net(), (X, Y), config, sparsity=0.5)
    assert len(result.history) == epochs
    assert count_kept(result.mask) == 90
    if not epochs:
        with torch.no_grad():  # BatchNorm has the statistics of the pruned network
            assert torch.allclose(result.model[1].running_mean, result.model[0](X).mean(0), atol=1e-5)  # type: ignore[index]


@each_method
def test_prunable_restricts_the_mask_but_not_the_denominator_of_the_sparsity(name: str) -> None:
    def body(model: nn.Module) -> dict[str, Tensor]:
        return {name: w for name, w in pp.prunable(model).items() if not name.startswith("3")}

    result = prune(name, net(), (X, Y), CONFIG, sparsity=0.5, prunable=body)
    assert set(result.mask) == {"0.weight"}
    assert count_kept(result.mask) == 30
    assert result.sparsity == 0.5


@each_method
def test_no_layer_falls_below_its_minimum(name: str) -> None:
    result = prune(name, net(), (X, Y), CONFIG, sparsity=0.95, min_per_layer=4)
    assert min(int(m.sum()) for m in result.mask.values()) >= 4
    assert count_kept(result.mask) == 9
    assert result.sparsity == 1 - 9 / 180  # so no kept weight is zero


# --- Schedules.


def prune_and_observe(
    name: str, observe: Callable[[nn.Module], Tensor], **options: Any
) -> tuple[pp.Pruned, list[tuple[str, Tensor]]]:
    """The result, and (stage, observe(model)) after every step."""
    model, observations = net(), []

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        # The call at the end of an epoch repeats its step.
        earlier = sum(1 for other_stage, _ in observations if other_stage != stage)
        if len(observations) < earlier + step:
            observations.append((stage, observe(model)))

    config = pp.Config(epochs=20, lr=0.1, batch_size=30)
    return prune(name, model, (X, Y), config, sparsity=0.9, progress=progress, **options), observations


def test_gmp_follows_the_cubic_density_and_its_zeros_stay() -> None:
    result, observations = prune_and_observe("gmp", support, every=4)
    masks, final_masks = [s for _, s in observations][:40], [s for _, s in observations][40:]  # 20 epochs of 4 steps
    for step, now in enumerate(masks):
        r = min(1.0, (step - step % 4) / 40 / 0.8)
        assert int(now.sum()) == round((1 - 0.9 * (1 - (1 - r) ** 3)) * 180)
    for before, now in itertools.pairwise(masks):
        assert not (now & ~before).any()
    final = torch.cat([m.reshape(-1) for m in result.mask.values()])
    assert torch.equal(final, masks[-1])
    sparsities = [row.get("sparsity", 0.0) for row in result.history]
    assert sparsities[:10] == pytest.approx([1 - int(now.sum()) / 180 for now in masks[3::4]])
    assert len(final_masks) == 40
    assert all(torch.equal(now, final) for now in final_masks)


def test_with_feedback_weights_return_until_the_masks_are_final() -> None:
    result, observations = prune_and_observe("dpf", current_mask, every=4)
    masks, final_masks = [s for _, s in observations][:40], [s for _, s in observations][40:]
    for step, now in enumerate(masks):
        r = min(1.0, (step - step % 4) / 40 / 0.8)
        assert int(now.sum()) == round((1 - 0.9 * (1 - (1 - r) ** 3)) * 180)
        assert step % 4 == 0 or torch.equal(now, masks[step - 1])
    back = sum(int((now & ~before).sum()) for before, now in itertools.pairwise(masks))
    assert back > 0
    final = torch.cat([m.reshape(-1) for m in result.mask.values()])
    assert all(torch.equal(now, final) for now in final_masks)
    _, whole = prune_and_observe("dpf", support, every=4)
    assert all(now.all() for _, now in whole[:40])  # only the forward pass sees zeros


@pytest.mark.parametrize(("name", "command", "period"), [("gmp", opt.Gmp, 16), ("dpf", opt.Dpf, 1)])
def test_without_a_period_gmp_moves_its_masks_every_16_steps_and_dpf_every_step(
    name: str, command: type[opt.Gmp], period: int
) -> None:
    _, observations = prune_and_observe(name, current_mask, every=None)
    masks = [s for stage, s in observations if stage == "masks"][:25]  # then the cubic is flat
    assert [k for k in range(1, 25) if not torch.equal(masks[k], masks[k - 1])] == list(range(period, 25, period))
    assert command().every == period


def test_imp_prunes_geometrically_and_replays_the_schedule() -> None:
    config = pp.Config(epochs=8, lr=0.1, schedule="cosine", warmup=0.25, batch_size=30)
    model, kept_per_round = net(), {}

    def progress(stage: str, *rest: Any) -> None:
        kept_per_round[stage] = int(support(model).sum())

    result = pp.imp(model, (X, Y), config, sparsity=0.9, rounds=3, progress=progress)
    assert kept_per_round == {f"round {i}": round(0.1 ** (i / 3) * 180) for i in (1, 2, 3)}
    assert {row["stage"]: round((1 - row["sparsity"]) * 180) for row in result.history} == kept_per_round
    rounds = [[row["lr"] for row in result.history if row["stage"] == f"round {i}"] for i in (1, 2, 3)]
    assert [len(lr) for lr in rounds] == [2, 3, 3]
    assert rounds[1] == rounds[2]
    for lr in rounds:
        alone = pp.fit(net(), (X, Y), dataclasses.replace(config, epochs=len(lr)))
        assert lr == [row["lr"] for row in alone]
    few = pp.imp(net(), (X, Y), dataclasses.replace(config, epochs=2), sparsity=0.9, rounds=5)
    assert [row["stage"] for row in few.history] == ["round 1", "round 2"]


def test_the_lagrangian_of_l0_brings_the_open_gates_to_their_budget(digits: pp.data.Split) -> None:
    config = pp.Config(epochs=20, lr=0.15, schedule="cosine")
    result = pp.l0(pp.models.mlp(64), digits.train, config, sparsity=0.9, dense=pp.Config(epochs=5, lr=0.05))
    expected = [row["expected_sparsity"] for row in result.history if row["stage"] == "masks"]
    assert expected[0] < 0.2
    assert expected[-1] == pytest.approx(0.9, abs=0.03)
    assert result.sparsity == pytest.approx(0.9, abs=1e-5)


# --- The gates of l0, and gates without noise.


def gates(logit: Tensor, mode: str, *, beta: float = 2 / 3, step: int = 3) -> Tensor:
    part = SampleInputs(torch.ones_like(logit), logit, None, torch.tensor(5), torch.tensor(step), 0)
    return kernels.sample(part, Law(mode=mode, beta=beta))


def test_the_hard_concrete_gate_is_open_where_the_hard_gate_is() -> None:
    logit = torch.linspace(-5, 5, 40_000)
    stretched, hard = gates(logit, STRETCHED), gates(logit, HARD)
    assert int(((stretched > 0) != (hard > 0)).sum()) <= 2  # at the edge the clamp rounds, the comparison does not
    assert {0.0, 1.0} < set(stretched.tolist())
    # Louizos et al. 2018: the gate is above 0 with probability sigmoid(log alpha - beta log(-gamma / zeta)).
    alpha = logit.double() + 2 / 3 * math.log(0.1 / 1.1)
    opened = torch.sigmoid(alpha - 2 / 3 * math.log(0.1 / 1.1))
    assert torch.allclose(opened.float(), torch.sigmoid(logit), atol=1e-6)
    assert float((stretched > 0).float().mean()) == pytest.approx(float(opened.mean()), abs=0.01)


@pytest.mark.parametrize("mode", [STRETCHED, NOISELESS])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradients_agree_with_finite_differences(mode: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACPRUNE_KERNELS", backend)
    logit = torch.linspace(-4, 4, 301).requires_grad_()
    (gradient,) = torch.autograd.grad(gates(logit, mode).sum(), logit)
    high, low = (gates(logit.detach() + h, mode).double() for h in (1e-2, -1e-2))
    inside = ((high > 0) == (low > 0)) & ((high < 1) == (low < 1))  # no edge of the clamp between the two
    assert int(inside.sum()) > 290
    assert torch.allclose(gradient.double()[inside], ((high - low) / 2e-2)[inside], rtol=2e-3, atol=2e-4)


def test_gates_without_noise_are_the_sigmoid_in_training_and_chance_in_evaluation() -> None:
    logit = torch.linspace(-5, 5, 1001)
    for beta in (0.3, 0.5, 1.0):
        assert torch.allclose(gates(logit, NOISELESS, beta=beta), torch.sigmoid(logit / beta), atol=1e-6)
    assert torch.equal(gates(logit, NOISELESS, step=3), gates(logit, NOISELESS, step=4))
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5), estimator="deterministic")
    model.train()
    first = model[0].weight.detach().clone()  # type: ignore[index, union-attr]
    pp.resample_(model)
    assert torch.equal(model[0].weight, first)  # type: ignore[index, union-attr]
    model.eval()
    weight = model[0].weight.detach().clone()  # type: ignore[index, union-attr]
    pp.resample_(model)
    assert not torch.equal(model[0].weight, weight)  # type: ignore[index, union-attr]
    assert attachment.sites(model)[0].sampler.estimator == "deterministic"


# --- Populations, resuming, and bad input.


@each_method
def test_each_member_of_a_population_equals_a_single_call(name: str) -> None:
    verb = METHODS[name].verb
    # BatchNorm behind weights that were shrunk to almost nothing divides by as little: rounding grows fast.
    config = dataclasses.replace(CONFIG, **{"str": {"lr": 0.03}, "pft": {"lr": 0.05, "epochs": 3}}.get(name, {}))
    options = arguments(name) | {"sparsity": [0.5, 0.8, 0.9], "seed": [0, 0, 7], "dense": config}
    alone = [
        verb(net(k), (X, Y), config, **{n: v[k] if isinstance(v, list) else v for n, v in options.items()})
        for k in range(3)
    ]
    results = pp.together(verb, [net(k) for k in range(3)], (X, Y), config, **options)
    for result, expected in zip(results, alone, strict=True):
        assert all(torch.equal(result.mask[n], keep) for n, keep in expected.mask.items())
        assert result.sparsity == expected.sparsity
        assert [row["loss"] for row in result.history] == pytest.approx([r["loss"] for r in expected.history], rel=1e-3)
        for key, tensor in expected.model.state_dict().items():
            # Next to Feather's threshold a weight rises with the cube root of what rounding leaves.
            atol = {"feather": 1e-3, "pft": 1e-3, "str": 1e-2}.get(name, 1e-4)
            torch.testing.assert_close(result.model.state_dict()[key], tensor, rtol=1e-3, atol=atol)


def test_gmp_and_dpf_can_share_a_population() -> None:
    options = {"sparsity": 0.8, "feedback": [False, True, False], "every": [1, 3, 5]}
    results = pp.together(pp.gmp, [net() for _ in range(3)], (X, Y), CONFIG, **options)
    for k, result in enumerate(results):
        member_options = {name: value[k] for name, value in options.items() if isinstance(value, list)}
        alone = pp.gmp(net(), (X, Y), CONFIG, sparsity=0.8, **member_options)
        assert all(torch.equal(result.mask[n], keep) for n, keep in alone.mask.items())


class Killed(Exception):
    """Raised from the progress callback."""


@each_method
def test_a_killed_method_resumes_to_the_same_result(name: str, tmp_path: Path) -> None:
    steps = []

    def run(folder: Path | None, stop: int = -1) -> pp.Pruned:
        steps.clear()

        def progress(*call: Any) -> None:
            steps.append(call)
            if len(steps) == stop:
                raise Killed

        return prune(name, net(), (X, Y), CONFIG, sparsity=0.8, dense=CONFIG, folder=folder, progress=progress)

    whole = run(None)
    count = len(steps)
    for stop in (3, count // 2 + 2, count // 2 + 8, count - 8):
        with pytest.raises(Killed):
            run(tmp_path / str(stop), stop)
        resumed = run(tmp_path / str(stop))
        assert resumed.history == whole.history
        assert all(torch.equal(resumed.model.state_dict()[n], t) for n, t in whole.model.state_dict().items())
    assert run(tmp_path / str(stop)).history == whole.history
    assert steps == []


@each_method
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0 is outside \[0, 1\)"),
        (
            {"sparsity": 0.9, "min_per_layer": 50},
            r"min_per_layer=50 needs 100 kept weights, but sparsity 0\.9 keeps 18",
        ),
        ({"sparsity": 0.9, "prunable": lambda m: {"3.weight": pp.prunable(m)["3.weight"]}}, r"0\.9 of 180 weights"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_trained(name: str, options: dict, message: str) -> None:
    model = net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        prune(name, model, (X, Y), CONFIG, **options)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_bad_arguments_of_one_method_are_refused() -> None:
    with pytest.raises(ValueError, match="every is 0; it is the number of steps from mask to mask, at least 1"):
        pp.gmp(net(), (X, Y), CONFIG, sparsity=0.5, every=0)
    with pytest.raises(ValueError, match="rounds is 0; at least 1 round"):
        pp.imp(net(), (X, Y), CONFIG, sparsity=0.5, rounds=0)
    for verb in (pp.gmp, pp.l0):
        with pytest.raises(ValueError, match=r"mask_share is 1\.5"):
            verb(net(), (X, Y), CONFIG, sparsity=0.5, mask_share=1.5)
    with pytest.raises(ValueError, match="gate_lr is None, so the gates of L0 would stay as they are"):
        pp.l0(net(), (X, Y), dataclasses.replace(CONFIG, gate_lr=None), sparsity=0.5)


# --- Runs, and the digits.


SHORT = {"dense_epochs": 1, "epochs": 2, "sparsity": 0.9}


@each_method
def test_options_name_their_method_and_run_it(name: str, tmp_path: Path) -> None:
    method, command, flags = METHODS[name], name, {}
    if method.flags is None:  # a variant, by the flags of the command with the same verb
        command = next(n for n, row in METHODS.items() if row.verb is method.verb and row.flags is not None)
        flags = method.options
    options = opt.COMMANDS[command](**SHORT, **flags)
    split, model = commands.prepare(options)
    commands.rehearse(options, model, split)
    outcome = commands.prune(options, model, split, tmp_path, lambda *call: None)
    called = name if method.names_runs else "pft-coupled"  # which it is without noise
    assert (outcome.method, len(outcome.history)) == (called, 2)
    assert round((1 - outcome.sparsity) * 50_200) == 5020


def test_gradual_pruning_beats_one_shot_pruning_at_98_percent() -> None:
    dense, config = pp.Config(epochs=10, lr=0.05), pp.Config(epochs=20, lr=0.15, schedule="cosine")
    errors: dict[str, list[float]] = {"osp": [], "gmp": []}
    for seed in range(3):
        split = pp.data.digits(seed=seed)
        for name, method_errors in errors.items():
            model = pp.models.mlp(64, seed=seed)
            result = getattr(pp, name)(model, split.train, config, sparsity=0.98, dense=dense, seed=seed)
            assert count_kept(result.mask) == round(0.02 * 50_200)
            method_errors.append(pp.error(model, split.test))
    assert mean(errors["gmp"]) < mean(errors["osp"]), errors
