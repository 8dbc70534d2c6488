"""Sparsity controllers: the schedules, and each control against its budget."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pacprune as pp
from pacprune.masking import attachment, criteria, weights
from pacprune.training import budget
from pacprune.training.budget import GATE_CONTROLS, SCHEDULES, Budget
from pacprune.training.controls import CONTROLS
from pacprune.training.population import Population

PROGRESS = (0.0, 0.1, 0.4, 0.79, 0.8, 1.0)


def attached(seed: int = 0, **options: object) -> nn.Module:
    """A net with magnitudes of many scales and a few exact zeros, its gates far from any budget."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    with torch.no_grad():
        model[0].weight.mul_(torch.exp(2 * torch.randn(40, 30, generator=generator)))
        model[0].weight[:2] = 0
    pp.attach(model, pp.score_monotone(model, criteria.magnitude(model), sparsity=0.5), **options)
    disturb_(model, generator)
    return model


@torch.no_grad()
def disturb_(model: nn.Module, generator: torch.Generator, size: float = 3.0) -> None:
    """Moves the gates at random, as an optimiser might."""
    for site in attachment.sites(model):
        site.gate.add_(size * torch.randn(site.gate.shape, generator=generator))


def density(model: nn.Module) -> float:
    return 1 - pp.read(model).sparsity


def test_the_schedule_is_fixed_or_cubic():
    fixed, cubic = Budget(0.9), Budget(0.9, schedule="cubic", ramp=0.8)
    assert {fixed.density(t) for t in PROGRESS} == {1 - 0.9}
    assert cubic.density(0.0) == 1.0
    assert cubic.density(0.4) == pytest.approx(1 - 0.9 * (1 - 0.5**3))
    assert cubic.density(0.8) == cubic.density(1.0) == pytest.approx(0.1)
    path = [cubic.density(t / 100) for t in range(101)]
    assert path == sorted(path, reverse=True)
    assert [Budget(0.9, sharpen=4.0).sharpness(t) for t in (0.0, 0.5, 1.0)] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_at_the_sparsity(schedule):
    plan = Budget(0.9, schedule=schedule)
    path = [plan.density(t / 50) for t in range(51)]
    assert path == sorted(path, reverse=True)
    assert path[40:] == [1 - 0.9] * 11
    assert plan.record()["schedule"] == schedule


def test_a_schedule_may_be_a_function():
    plan = Budget(0.9, schedule=lambda share: share, ramp=0.5)
    assert [plan.density(t) for t in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert plan.record() == Budget(0.9, schedule=lambda r: 1 - (1 - r), ramp=0.5).record()  # recorded by its values
    assert plan.record() != Budget(0.9, schedule=lambda share: share**2, ramp=0.5).record()


@pytest.mark.parametrize("control", GATE_CONTROLS)
def test_every_control_of_gates_trains(control):
    model, x = attached(), torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    if GATE_CONTROLS[control].std_optimizer is not None:  # it trains a std
        plain = pp.harden(model)
        model = pp.attach(plain, pp.isotropic(plain, sparsity=0.5, std=0.1), train_std=True)
    data = x, (x[:, 0] > 0).long()
    history = pp.fit(model, data, pp.Config(epochs=2, batch_size=10), budget=Budget(0.7, control=control))
    if GATE_CONTROLS[control].hold is not None:
        assert history[-1]["expected_sparsity"] == pytest.approx(0.7, abs=1e-6)
    assert CONTROLS.keys().isdisjoint(GATE_CONTROLS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0 is outside \[0, 1\)"),
        ({"sparsity": 0.9, "control": "shfit"}, "control 'shfit' is unknown; use one of none, shift, projection"),
        ({"sparsity": 0.9, "schedule": "linear"}, "schedule 'linear' is unknown; use one of fixed, cubic"),
        ({"sparsity": 0.9, "schedule": lambda share: 2 * share}, "the schedule goes from 0.0 to 2.0; it must begin in"),
        (
            {"sparsity": 0.9, "schedule": lambda share: 1 - 8 * share * (1 - share)},
            r"the schedule gives -0\.0\S* at the share 0\.15625, and so the density 1\.0\S*; densities must lie in",
        ),
        (
            {"sparsity": 0.9, "schedule": lambda share: 1 + 8 * share * (1 - share)},
            r"the schedule gives 1\.1\S* at the share 0\.015625, and so the density -0\.01",
        ),
        ({"sparsity": 0.9, "schedule": lambda share: share / (share in (0, 1) or math.nan)}, "and so the density nan"),
        ({"sparsity": 0.9, "ramp": 0.0}, r"ramp 0\.0 must lie in \(0, 1\]"),
        ({"sparsity": 0.9, "ramp": 1.5}, r"ramp 1\.5 must lie in \(0, 1\]"),
        ({"sparsity": 0.9, "sharpen": 0.5}, r"sharpen 0\.5 be at least 1"),
        ({"sparsity": 0.9, "strength": 0.0}, r"strength 0\.0 positive"),
        ({"sparsity": 0.9, "patience": 0.0}, r"positive, like patience 0\.0"),
        ({"sparsity": 0.9, "every": 0}, "every is 0; it is the number of steps"),
    ],
)
def test_a_wrong_budget_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)


@pytest.mark.parametrize("coupling", [0.0, 1.0, 4.0], ids=["free", "coupled", "strongly coupled"])
@pytest.mark.parametrize("control", ["shift", "projection"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_exact_controls_hold_the_budget_under_the_sigmoid(control, sparsity, coupling):
    model, generator = attached(coupling=coupling), torch.Generator().manual_seed(1)
    plan = Budget(sparsity, control=control, schedule="cubic", sharpen=4.0)
    for progress in PROGRESS:
        disturb_(model, generator)
        budget.enforce_(model, plan, progress)
        reachable = min(plan.density(progress), 1 - (1.5e-6 if control == "shift" else 1e-5))
        assert density(model) == pytest.approx(reachable, abs=1e-6)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_projection_holds_the_budget_under_the_clamp(sparsity):
    model, generator = attached(mapping="clamp"), torch.Generator().manual_seed(1)
    plan = Budget(sparsity, control="projection", schedule="cubic")
    for progress in PROGRESS:
        disturb_(model, generator)
        budget.enforce_(model, plan, progress)
        assert density(model) == pytest.approx(min(plan.density(progress), 1 - 1e-5), abs=1e-6)
        values = torch.cat([site.gate.detach().reshape(-1) for site in attachment.sites(model)])
        assert float(values.min()) > 0.9e-5
        assert float(values.max()) < 1 - 0.9e-5


def test_a_shift_moves_all_logits_equally_and_no_gate():
    model = attached(coupling=4.0)
    gates = [site.gate.detach().clone() for site in attachment.sites(model)]
    before = [site.logit().detach() for site in attachment.sites(model)]
    budget.enforce_(model, Budget(0.9), 0.0)
    assert all(torch.equal(g, site.gate) for g, site in zip(gates, attachment.sites(model), strict=True))
    moved = torch.cat(
        [(b - s.logit().detach()).reshape(-1) for b, s in zip(before, attachment.sites(model), strict=True)]
    )
    edge = torch.cat([(site.logit().detach().abs() > 13.9).reshape(-1) for site in attachment.sites(model)])
    edge |= torch.cat([(b.abs() > 13.9).reshape(-1) for b in before])
    assert float(moved[~edge].max() - moved[~edge].min()) < 1e-4


def test_the_control_none_changes_only_the_sharpness():
    model = attached()
    before = [site.logit().detach() for site in attachment.sites(model)]
    budget.enforce_(model, Budget(0.9, control="none", sharpen=2.0), 1.0)
    for old, site in zip(before, attachment.sites(model), strict=True):
        inside = old.abs() < 6.9
        assert torch.allclose(site.logit()[inside], 2 * old[inside], rtol=1e-6)


def test_a_restricted_model_holds_the_budget_of_all_its_weights():
    def first(model: nn.Module) -> dict[str, torch.Tensor]:
        return {"0.weight": weights.prunable(model)["0.weight"]}

    for control in ("shift", "projection"):
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))
        pp.attach(model, pp.isotropic(model, sparsity=0.1, prunable=first))
        budget.enforce_(model, Budget(0.5, control=control), 0.0)
        assert pp.read(model).sparsity == pytest.approx(0.5, abs=1e-6)
        with pytest.raises(ValueError, match=r"of 900 weights cannot be met by pruning 600 of them"):
            budget.enforce_(model, Budget(0.7, control=control), 0.0)


def test_shift_is_refused_under_the_clamp():
    with pytest.raises(ValueError, match=r"control 'shift' moves logits.*use control='projection'"):
        budget.enforce_(attached(mapping="clamp"), Budget(0.9), 0.0)


def test_a_budget_of_gates_is_refused_on_a_plain_model():
    with pytest.raises(ValueError, match=r"has no stochastic masks; call pp\.attach"):
        budget.enforce_(nn.Linear(3, 2), Budget(0.9), 0.0)


def density_after_training(control: str) -> float:
    """The density after a short training in which every kept weight helps; the budget is a density of 0.2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    target = x @ torch.randn(20, 10, generator=generator)
    model = nn.Linear(20, 10, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, target).solution.T)
    pp.attach(model, pp.isotropic(model, sparsity=0.8))
    gates = [site.gate for site in attachment.sites(model)]
    optimizer, plan = torch.optim.SGD(gates, lr=20.0), Budget(0.8, control=control, strength=50.0)
    for step in range(200):
        pp.resample_(model)
        budget.enforce_(model, plan, step / 200)
        loss = F.mse_loss(model(x), target)
        if control == "lagrangian":
            loss = loss + budget.penalty(attachment.sites(model), plan, torch.tensor(1 - plan.sparsity))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    budget.enforce_(model, plan, 1.0)
    return density(model)


def test_every_control_except_none_holds_the_density_in_training():
    densities = {control: density_after_training(control) for control in GATE_CONTROLS}
    assert densities["none"] > 0.5
    assert densities["shift"] == pytest.approx(0.2, abs=1e-6)
    assert densities["projection"] == pytest.approx(0.2, abs=1e-6)
    assert densities["lagrangian"] == pytest.approx(0.2, abs=0.05)


def test_the_penalty_is_the_augmented_lagrangian():
    model = attached()
    plan = Budget(0.9, control="lagrangian", strength=10.0)
    excess = density(model) - 0.1
    first = budget.penalty(attachment.sites(model), plan, torch.tensor(0.1))
    assert first.item() == pytest.approx(5 * excess**2, rel=1e-5)
    second = budget.penalty(attachment.sites(model), plan, torch.tensor(0.1))
    assert second.item() == pytest.approx(excess * excess + 5 * excess**2, rel=1e-5)
    gradient = torch.autograd.grad(second, [site.gate for site in attachment.sites(model)])
    assert all((g >= 0).all() for g in gradient)
    assert all((g > 0).any() for g in gradient)


def test_a_patient_multiplier_learns_more_slowly():
    excess, multipliers = 0.0, {}
    for patience in (10.0, 1000.0):
        model = attached()
        excess = density(model) - 0.1
        budget.penalty(
            attachment.sites(model),
            Budget(0.9, control="lagrangian", strength=10.0, patience=patience),
            torch.tensor(0.1),
        )
        multipliers[patience] = float(attachment.sites(model)[0].sampler.multiplier)
    assert multipliers == pytest.approx({10.0: excess, 1000.0: excess / 100}, rel=1e-5)


# --- Populations


PLANS = [Budget(0.5), Budget(0.9, schedule="cubic", sharpen=4.0, strength=3.0), Budget(0.97, sharpen=2.0)]


def population(control: str, **options: object) -> tuple[nn.Module, list[nn.Module], list[Budget]]:
    """Three models stacked as one, the same three separately, and a budget for each."""
    models = [attached(seed, **options) for seed in range(3)]
    return Population(models).stacked, models, [replace(plan, control=control) for plan in PLANS]


@pytest.mark.parametrize(
    ("control", "options"),
    [
        ("none", {}),
        ("shift", {}),
        ("shift", {"coupling": 1.0}),
        ("projection", {}),
        ("projection", {"coupling": 1.0}),
        ("projection", {"mapping": "clamp"}),
    ],
)
def test_members_are_held_to_their_budgets_independently(control, options):
    stacked, models, plans = population(control, **options)
    for progress in PROGRESS:
        budget.enforce_(stacked, plans, progress)
        for model, plan in zip(models, plans, strict=True):
            budget.enforce_(model, plan, progress)
        for k, model in enumerate(models):
            for site, member_site in zip(attachment.sites(stacked), attachment.sites(model), strict=True):
                assert torch.equal(site.sampler.sharpness[k], member_site.sampler.sharpness)
                actual, expected = (torch.sigmoid(logit.detach()) for logit in (site.logit()[k], member_site.logit()))
                assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
    assert budget.densities(stacked, plans, 1.0) == [
        budget.densities(m, p, 1.0)[0] for m, p in zip(models, plans, strict=True)
    ]
    assert budget.densities(stacked, plans[0], 0.5) == budget.densities(models[0], plans[0], 0.5) * 3


@pytest.mark.parametrize("control", ["shift", "projection"])
def test_without_waiting_the_budget_is_held_from_step_to_step(control):
    stacked, _, plans = population(control, coupling=1.0)
    generator = torch.Generator().manual_seed(1)
    budget.enforce_(stacked, plans, 0.5)
    for step in range(50, 60):
        disturb_(stacked, generator, size=0.3)
        densities = torch.tensor(budget.densities(stacked, plans, step / 100), dtype=torch.float64)
        sharpness = torch.tensor([plan.sharpness(step / 100) for plan in plans])
        budget.hold_(attachment.sites(stacked), control, densities, sharpness, wait=False, between=None)
        p = torch.cat([torch.sigmoid(s.logit().detach().double()).flatten(1) for s in attachment.sites(stacked)], dim=1)
        assert torch.allclose(p.mean(1), densities, rtol=1e-6, atol=1e-6)


def test_members_are_penalised_independently():
    stacked, models, plans = population("lagrangian")
    density = torch.tensor(budget.densities(stacked, plans, 1.0))
    for _ in range(2):  # the second time with a multiplier
        penalties = budget.penalty(attachment.sites(stacked), plans, density)
        member_penalties = [
            budget.penalty(attachment.sites(m), p, d) for m, p, d in zip(models, plans, density, strict=True)
        ]
        assert all(penalty.shape == () for penalty in member_penalties)
        assert torch.allclose(penalties, torch.stack(member_penalties), rtol=1e-5)
    gradients = torch.autograd.grad(penalties.sum(), [site.gate for site in attachment.sites(stacked)])
    for k, value in enumerate(member_penalties):
        member_gradients = torch.autograd.grad(value, [site.gate for site in attachment.sites(models[k])])
        assert all(
            torch.allclose(g[k], o, rtol=1e-4, atol=1e-9) for g, o in zip(gradients, member_gradients, strict=True)
        )


def test_wrong_budgets_of_a_population_are_refused():
    stacked, models, plans = population("shift")
    with pytest.raises(ValueError, match="budget has 2 entries for 3 models; give one for each, or one for all"):
        budget.enforce_(stacked, plans[:2], 0.0)
    with pytest.raises(ValueError, match="budget has 2 entries for 1 models"):
        budget.enforce_(models[0], plans[:2], 0.0)
    with pytest.raises(ValueError, match="have the controls none and shift, but all are held in one pass"):
        budget.enforce_(stacked, [*plans[:2], Budget(0.5, control="none")], 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("control", ["shift", "projection", "lagrangian"])
def test_holding_a_population_does_not_wait_for_the_device(control):
    stacked, _, plans = population(control, coupling=1.0)
    stacked.cuda()
    density = torch.tensor(budget.densities(stacked, plans, 1.0), device="cuda")
    sharpness, sites = torch.ones(3, device="cuda"), attachment.sites(stacked)

    def once() -> None:
        budget.hold_(sites, control, density, sharpness, wait=False, between=None)
        if control == "lagrangian":
            budget.penalty(attachment.sites(stacked), plans, density).sum().backward()

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("control", ["shift", "projection", "lagrangian"])
def test_layers_are_held_by_themselves(control: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))
    mapping = "clamp" if control == "projection" else "sigmoid"
    pp.attach(model, pp.isotropic(model, sparsity=0.1), mapping=mapping)
    layers = {"0.weight": 0.5, "1.weight": 0.8}
    plan = Budget(0.6, control=control, schedule="cubic", layers=layers)
    assert plan.layer_sparsities(0.0) == {"0.weight": 0.0, "1.weight": 0.0}
    assert plan.layer_sparsities(1.0) == pytest.approx(layers)
    if control != "lagrangian":
        budget.enforce_(model, plan, 1.0)
        shares = {name: float(1 - p.mean()) for name, p in pp.read(model).keep_prob.items()}
        assert shares == pytest.approx(layers, abs=1e-5)
        return
    sites = attachment.sites(model)
    ratios = budget.layer_ratios(sites, [plan])
    value = budget.penalty(sites, plan, torch.tensor(0.4), ratios=ratios)
    errors = [float(site.keep_prob().mean()) - (1 - s) for site, s in zip(sites, layers.values(), strict=True)]
    assert float(value.detach()) == pytest.approx((600 * 5 * errors[0] ** 2 + 300 * 5 * errors[1] ** 2) / 900, rel=1e-4)
    multipliers = [float(site.sampler.multiplier) for site in sites]
    assert multipliers == pytest.approx(errors, rel=1e-4)  # strength e / patience = e


def test_layers_that_do_not_make_up_the_sparsity_are_refused() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))
    pp.attach(model, pp.isotropic(model, sparsity=0.1))
    plan = Budget(0.7, layers={"0.weight": 0.5, "1.weight": 0.8})
    with pytest.raises(
        ValueError, match=r"have sparsity 0\.6000 together, but its sparsity is 0\.7000; give the former"
    ):
        budget.check_budgets(model, [plan])
    with pytest.raises(ValueError, match=r"sparsity 1\.2 is outside"):
        Budget(0.7, layers={"0.weight": 1.2})
