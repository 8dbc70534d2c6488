"""Sparsity controllers: the schedules, and each control against its budget."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pacprune as pp
from pacprune.masking import attachment, criteria, weights
from pacprune.training import budget
from pacprune.training.budget import GATE_CONTROLS, MASK_CONTROLS, SCHEDULES, Budget
from pacprune.training.population import Population

PROGRESS = (0.0, 0.1, 0.4, 0.79, 0.8, 1.0)
THRESHOLDED = {"estimator": "thresholded", "coupling": 4.0}


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
    options = THRESHOLDED if control == "threshold" else {}
    model, x = attached(**options), torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    data = x, (x[:, 0] > 0).long()
    history = pp.fit(model, data, pp.Config(epochs=2, batch_size=10), budget=Budget(0.7, control=control))
    if GATE_CONTROLS[control].hold is not None:
        assert history[-1]["expected_sparsity"] == pytest.approx(0.7, abs=1e-6)
    assert MASK_CONTROLS.keys().isdisjoint(GATE_CONTROLS)


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


# --- Masks of plain networks


def plain(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    return pp.apply_mask(model, {n: torch.ones_like(w, dtype=torch.bool) for n, w in pp.prunable(model).items()})


def move_masks_(model: nn.Module, plan: Budget | list[Budget], step: int, steps: int) -> None:
    budget.move_masks_(weights.masked(model), plan, step, steps, total=1400)


def current_mask(model: nn.Module) -> torch.Tensor:
    return torch.cat([keep.reshape(-1) for _, keep in weights.masked(model)])


@pytest.mark.parametrize("control", [name for name, control in MASK_CONTROLS.items() if control.moves])
def test_masks_keep_the_largest_weights_at_the_density_of_the_schedule(control):
    model = plain()
    before = {n: w.detach().clone() for n, w in pp.prunable(model).items()}
    plan = Budget(0.9, control=control, schedule="cubic", every=10)
    for step in (0, 5, 10, 50, 80, 95):
        previous = current_mask(model).clone()
        move_masks_(model, plan, step, 100)
        if step % 10:
            assert torch.equal(current_mask(model), previous)
            continue
        expected = pp.top_k({n: w.abs() for n, w in before.items()}, sparsity=1 - plan.density(step / 100))
        assert torch.equal(current_mask(model), torch.cat([m.reshape(-1) for m in expected.values()]))
        assert int(current_mask(model).sum()) == round(plan.density(step / 100) * 1400)
        for name, w in pp.prunable(model).items():
            assert torch.equal(w, before[name] * expected[name] if control == "magnitude" else before[name])


def test_masks_of_members_move_independently():
    models = [plain(seed) for seed in range(3)]
    plans = [
        Budget(0.5, control="magnitude"),
        Budget(0.9, control="magnitude", schedule="cubic", every=7),
        Budget(0.97, control="magnitude", min_per_layer=15),
    ]
    stacked = Population(models).stacked
    for step in (0, 7, 14, 16, 32):
        move_masks_(stacked, plans, step, 40)
        for model, plan in zip(models, plans, strict=True):
            move_masks_(model, plan, step, 40)
    for k, model in enumerate(models):
        for (w, keep), (member_weight, member_keep) in zip(weights.masked(stacked), weights.masked(model), strict=True):
            assert torch.equal(keep[k], member_keep)
            assert torch.equal(w[k], member_weight)
    assert int(weights.masked(models[2])[1][1].sum()) >= 15


def test_a_step_of_feedback_is_the_dense_gradient_of_the_masked_network():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 30, generator=generator), torch.arange(32) % 5
    model, twin = plain(), plain()
    config = pp.Config(epochs=1, lr=0.1, batch_size=32, accumulate=2)
    pp.fit(model, (x, y), config, budget=Budget(0.5, control="feedback"))
    dense = {n: w.detach().clone() for n, w in twin.named_parameters()}
    mask = pp.top_k({n: dense[n].abs() for n in pp.prunable(twin)}, sparsity=0.5)
    F.cross_entropy(pp.apply_mask(twin, mask)(x), y).backward()
    for name, w in model.named_parameters():
        assert torch.allclose(w, dense[name] - 0.1 * twin.get_parameter(name).grad, atol=1e-6)
    assert torch.equal(current_mask(model), current_mask(twin))


def sparse(seed: int = 0, sparsity: float = 0.8) -> nn.Module:
    model = plain(seed)
    return pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity))


def test_growth_exchanges_the_smallest_weights_for_those_with_the_largest_gradients():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 30, generator=generator), torch.arange(32) % 5
    model, twin = sparse(), sparse()
    before = [keep.clone() for _, keep in weights.masked(model)]
    config = pp.Config(epochs=4, lr=0.1, momentum=0.9, batch_size=32)
    plan = Budget(0.8, control="growth", every=2, ramp=0.75, exchange=0.4)  # of 4 steps, one exchange after 2
    pp.fit(model, (x, y), replace(config, lr=0.0), budget=plan)
    F.cross_entropy(twin(x), y).backward()
    share = plan.exchange_at(0.5)
    assert share == pytest.approx(0.4 * 0.5 * (1 + math.cos(math.pi * 0.5 / 0.75)))
    for old, (weight, keep), (twin_weight, _) in zip(before, weights.masked(model), weights.masked(twin), strict=True):
        count = int(old.sum())
        size, gradient = (t.detach().abs().reshape(-1) for t in (twin_weight, twin_weight.grad))
        staying = size.topk(round((1 - share) * count)).indices
        expected = torch.zeros_like(size, dtype=torch.bool).index_fill_(0, staying, True)
        grown = gradient.masked_fill(expected, -1).topk(count - len(staying)).indices
        expected[grown] = True
        assert torch.equal(keep.reshape(-1), expected)
        assert torch.equal(weight, twin_weight * keep)  # those that are new begin at zero
        assert (keep & ~old).any()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_growth_leaves_every_tensor_its_number_of_weights_and_stops_at_the_end_of_the_ramp(clip, optimizer):
    x, y = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5
    model, seen = sparse(), []
    counts = [int(keep.sum()) for _, keep in weights.masked(model)]
    config = pp.Config(epochs=5, lr=0.01, batch_size=8, clip=clip, optimizer=optimizer, weight_decay=0.01)
    plan = Budget(0.8, control="growth", every=3, ramp=0.5)
    pp.fit(model, (x, y), config, budget=plan, progress=lambda *call: seen.append(current_mask(model).clone()))
    assert [int(keep.sum()) for _, keep in weights.masked(model)] == counts
    changes = [k + 1 for k, (a, b) in enumerate(itertools.pairwise(seen[:8])) if not torch.equal(a, b)]
    assert changes == [2, 5]  # after steps 3 and 6
    assert all(torch.equal(mask, seen[-1]) for mask in seen[25:])
    for weight, keep in weights.masked(model):
        assert not weight[~keep].any()


def test_members_exchange_weights_by_their_own_budgets():
    x, y = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5
    config = pp.Config(epochs=4, lr=0.05, batch_size=16)
    plans = [Budget(0.8, control="growth", every=every, exchange=0.5) for every in (2, 3)]
    models = [sparse(seed) for seed in range(2)]
    pp.fit(models, (x, y), config, budget=plans)
    for seed, plan in enumerate(plans):
        alone = sparse(seed)
        pp.fit(alone, (x, y), config, budget=plan)
        assert torch.equal(current_mask(alone), current_mask(models[seed]))


def test_after_training_every_member_of_a_population_has_its_mask():
    models, x = [plain(seed) for seed in range(2)], torch.randn(32, 30)
    plans = [Budget(s, control="magnitude") for s in (0.5, 0.9)]
    pp.fit(models, (x, torch.arange(32) % 5), pp.Config(epochs=2, lr=0.1, batch_size=8), budget=plans)
    for model, plan in zip(models, plans, strict=True):
        assert int(current_mask(model).sum()) == round((1 - plan.sparsity) * 1400)
        assert torch.equal(current_mask(model), torch.cat([(w != 0).reshape(-1) for w in pp.prunable(model).values()]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("control", MASK_CONTROLS)
def test_a_captured_step_follows_masks_that_move(control):
    x, y = torch.randn(64, 30), torch.arange(64) % 5
    plans = [Budget(s, control=control, schedule="cubic", every=3) for s in (0.5, 0.9)]
    masks = {}
    for execution in ("eager", "graph"):
        models = [(sparse if control == "growth" else plain)(seed).cuda() for seed in range(2)]
        start = torch.stack([current_mask(model) for model in models])
        config = pp.Config(epochs=5, lr=0.1, batch_size=8, execution=execution)
        pp.fit(models, (x, y), config, budget=plans)
        masks[execution] = torch.stack([current_mask(model) for model in models])
        assert not torch.equal(masks[execution], start)
    assert torch.equal(masks["eager"], masks["graph"])


def test_a_control_that_does_not_fit_the_model_is_refused():
    bare = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"'magnitude' moves the mask of a plain network, but this one has none"):
        pp.fit(bare, (torch.zeros(4, 3), torch.zeros(4).long()), pp.Config(epochs=1), budget=Budget(0.5, "magnitude"))
    with pytest.raises(ValueError, match=r"'feedback' moves the mask of a plain network, but this one has gates"):
        budget.check_budgets(attached(), [Budget(0.5, "feedback")])
    with pytest.raises(ValueError, match=r"keep probabilities of stochastic masks; call pp\.attach"):
        budget.check_budgets(plain(), [Budget(0.5)])
    with pytest.raises(ValueError, match="have the controls feedback and magnitude, but all are held in one pass"):
        budget.check_budgets(plain(), [Budget(0.5, "magnitude"), Budget(0.5, "feedback")])


# --- Thresholds


def test_a_threshold_keeps_exactly_k_at_every_moment():
    model, plan = attached(**THRESHOLDED), Budget(0.97, control="threshold", schedule="cubic")
    size = weights.noted_total(model)
    for progress in PROGRESS:
        budget.enforce_(model, plan, progress)
        kept = sum(int((w != 0).sum()) for w in (model[0].weight, model[2].weight))
        zeros = 60 if progress == 0 else 0  # weights that are zero themselves
        assert kept == round(plan.density(progress) * size) - zeros
        assert density(model) == pytest.approx(plan.density(progress), abs=0.5 / size)


def test_noise_moves_the_mask_of_a_step_and_leaves_its_size():
    model, plan = attached(**THRESHOLDED), Budget(0.9, control="threshold", noise=2.0)
    sites, size = attachment.sites(model), weights.noted_total(model)
    assert [plan.noise_at(t) for t in (0.0, 0.4, 0.8, 1.0)] == [2.0, 1.0, 0.0, 0.0]
    model.train()
    numbers = torch.tensor(0.1, dtype=torch.float64), torch.tensor(1.0)
    masks = []
    for _ in range(3):
        budget.hold_(sites, "threshold", *numbers, noise=torch.tensor(2.0), wait=False, between=None)
        pp.resample_(model)
        masks.append(torch.cat([(w != 0).reshape(-1) for w in (model[0].weight, model[2].weight)]))
        assert int(masks[-1].sum()) == pytest.approx(0.1 * size, abs=1)
    assert not torch.equal(masks[0], masks[1])
    budget.enforce_(model, plan, 1.0)  # what is read has none
    assert density(model) == pytest.approx(0.1, abs=0.5 / size)


def test_a_threshold_and_random_gates_do_not_mix():
    with pytest.raises(ValueError, match=r"'threshold' cannot hold the gates of estimator 'concrete'; .* together"):
        budget.check_budgets(attached(), [Budget(0.5, "threshold")])
    with pytest.raises(ValueError, match=r"'shift' cannot hold the gates of estimator 'thresholded'"):
        budget.check_budgets(attached(**THRESHOLDED), [Budget(0.5)])
    with pytest.raises(ValueError, match=r"noise is 1\.0 with the control 'shift'; it is the size of the noise"):
        Budget(0.5, noise=1.0)


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
        ("threshold", THRESHOLDED),
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
@pytest.mark.parametrize("control", ["shift", "projection", "lagrangian", "threshold"])
def test_holding_a_population_does_not_wait_for_the_device(control):
    stacked, _, plans = population(control, **(THRESHOLDED if control == "threshold" else {"coupling": 1.0}))
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
