"""Controls of plain networks: which weights count at every step, what gets gradients, and what is left at the end."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pacprune as pp
from pacprune.masking import masks, weights
from pacprune.training import budget
from pacprune.training.budget import Budget
from pacprune.training.controls import CONTROLS, COUPLING, THRESHOLDS, Stepper
from pacprune.training.population import Population

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 30, generator=G), torch.arange(64) % 5


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))


def plain(seed: int = 0) -> nn.Module:
    """With a mask of ones."""
    model = net(seed)
    return pp.apply_mask(model, masks.all_kept(pp.prunable(model)))


def sparse(seed: int = 0, sparsity: float = 0.8) -> nn.Module:
    model = plain(seed)
    return pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity))


def soft(seed: int = 0) -> nn.Module:
    """With a threshold for every layer."""
    model = plain(seed)
    weights.notes(model).learned = {THRESHOLDS: nn.Parameter(torch.zeros(2))}
    return model


def scored(seed: int = 0) -> nn.Module:
    """With offsets of scores, far from zero."""
    model, generator = plain(seed), torch.Generator().manual_seed(seed)
    weights.notes(model).learned = {
        name: nn.Parameter(torch.randn(w.shape, generator=generator)) for name, w in pp.prunable(model).items()
    }
    return model


START = {"growth": sparse, "soft": soft, "threshold": scored}
"""What the controls begin with, where it is not a mask of ones."""


def start(control: str, seed: int = 0) -> nn.Module:
    return START.get(control, plain)(seed)


def current_mask(model: nn.Module) -> Tensor:
    return torch.cat([keep.reshape(-1) for _, keep in weights.masked(model)])


def numbers(plan: Budget, progress: float, *, fades: float = 0.0, noise: float = 0.0) -> Tensor:
    density = masks.density(1 - plan.density(progress), size=1400, total=1400)
    return torch.tensor([noise, fades, density, plan.sharpness(progress)])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([w.detach().reshape(-1) for w in pp.prunable(model).values()])


# --- All of them.


@pytest.mark.parametrize("control", CONTROLS)
def test_training_leaves_a_plain_network_with_exactly_k_weights(control: str) -> None:
    model, steps = start(control), []
    config = pp.Config(epochs=5, lr=0.1, batch_size=16)
    plan = Budget(0.8, control=control, schedule="cubic", every=2)
    history = pp.fit(model, (X, Y), config, budget=plan, progress=lambda *call: steps.append(call))
    assert int(current_mask(model).sum()) == int((flat(model) != 0).sum()) == 280
    assert history[-1]["sparsity"] == pytest.approx(0.8)
    assert set(model.state_dict()) == set(net().state_dict())
    assert weights.notes(model).learned is None
    pp.fit(model, (X, Y), config)  # the mask holds
    assert int((flat(model) != 0).sum()) == 280


@pytest.mark.parametrize("control", CONTROLS)
def test_members_equal_their_single_runs(control: str) -> None:
    config = pp.Config(epochs=4, lr=0.05, batch_size=16, momentum=0.9, weight_decay=1e-3)
    plans = [Budget(s, control=control, schedule="cubic", every=e) for s, e in ((0.8, 2), (0.8, 3))]
    models = [start(control, seed) for seed in range(2)]
    pp.fit(models, (X, Y), config, budget=plans)
    for seed, plan in enumerate(plans):
        alone = start(control, seed)
        pp.fit(alone, (X, Y), config, budget=plan)
        assert torch.equal(current_mask(alone), current_mask(models[seed]))
        # Next to Feather's threshold a weight rises with the cube root of what rounding leaves.
        torch.testing.assert_close(flat(models[seed]), flat(alone), rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("until", [0.3, 0.5])
@pytest.mark.parametrize("control", CONTROLS)
def test_from_a_moment_on_the_mask_stays(control: str, until: float) -> None:
    model, seen = start(control), []
    config = pp.Config(epochs=5, lr=0.1, batch_size=16)  # 20 steps
    plan = Budget(0.8, control=control, schedule="cubic", every=1, ramp=0.2, until=until)
    pp.fit(model, (X, Y), config, budget=plan, progress=lambda *call: seen.append(flat(model) != 0))
    fixed = [mask for mask, step in zip(seen, range(1, 99), strict=False) if step > until * 20 + until * 5]
    assert all(torch.equal(mask, fixed[0]) for mask in fixed)
    assert int(fixed[0].sum()) == 280


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("until", [0.4, 1.0])
def test_broken_off_and_resumed_it_ends_the_same(control: str, until: float, tmp_path: Any) -> None:
    class Broken(Exception):
        pass

    config = pp.Config(epochs=5, lr=0.1, batch_size=16)
    noise = {"noise": 0.5} if control == "threshold" else {}
    plan = Budget(0.8, control=control, schedule="cubic", every=3, until=until, **noise)
    whole = start(control)
    history = pp.fit(whole, (X, Y), config, budget=plan)
    for last in (5, 11, 20):

        def stop(stage: str, done: int, total: int, row: dict[str, Any], last: int = last) -> None:
            if done == last:
                raise Broken

        path, options = tmp_path / f"{last}.pt", {"budget": plan, "every": 1}
        with pytest.raises(Broken):
            pp.fit(start(control), (X, Y), config, checkpoint=path, progress=stop, **options)
        model = start(control)
        assert pp.fit(model, (X, Y), config, checkpoint=path, **options) == history
        assert torch.equal(flat(model), flat(whole))
        again = start(control)  # from the checkpoint of a run that has ended
        assert pp.fit(again, (X, Y), config, checkpoint=path, **options) == history
        assert torch.equal(flat(again), flat(whole))


@pytest.mark.parametrize("control", CONTROLS)
def test_validation_judges_the_network_as_it_is_pruned(control: str) -> None:
    model, counts = start(control), []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if not out.requires_grad and len(out) == 64:
            counts.append(int((flat(model) != 0).sum()))
        return F.cross_entropy(out, y)

    config = pp.Config(epochs=4, lr=0.1, batch_size=16)
    pp.fit(model, (X, Y), config, budget=Budget(0.8, control=control, every=1), validation=(X, Y), loss=loss)
    assert counts[-1] == pytest.approx(280, abs=1)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_break_leaves_the_weights_that_are_trained(control: str) -> None:
    """Not those that the network computes with, which may be zero."""
    model = start(control)
    stepper = Stepper(model, [Budget(0.8, control=control)])
    stepper.prepare(0, 10)
    before = flat(model)
    stepper.show(numbers(Budget(0.8), 1.0))
    stepper.hide()
    assert torch.equal(flat(model), before)
    stepper.hide()  # once more does nothing
    assert torch.equal(flat(model), before)


@GPU
@pytest.mark.parametrize("control", CONTROLS)
def test_a_captured_step_follows_masks_that_move(control: str) -> None:
    plans = [Budget(s, control=control, schedule="cubic", every=3, until=0.7) for s in (0.5, 0.8)]
    trained = {}
    for execution in ("eager", "graph"):
        models = [start(control, seed).cuda() for seed in range(2)]
        config = pp.Config(epochs=5, lr=0.1, batch_size=8, execution=execution)
        pp.fit(models, (X, Y), config, budget=plans)
        trained[execution] = torch.stack([flat(model) for model in models])
    torch.testing.assert_close(trained["eager"], trained["graph"], rtol=1e-3, atol=3e-3)
    assert torch.equal(trained["eager"] != 0, trained["graph"] != 0)


@GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("control", ["soft", "threshold"])
def test_showing_and_hiding_do_not_wait_for_the_device(control: str) -> None:
    models = [start(control, seed).cuda() for seed in range(2)]
    stacked, plan = Population(models).stacked, Budget(0.5, control=control)
    stepper = Stepper(stacked, [plan] * 2, seeds=(0, 1), members=True)
    row = numbers(plan, 1.0)[:, None].expand(4, 2).cuda()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            stepper.show(row)
            for w, _ in weights.masked(stacked):
                w.grad = torch.ones_like(w)
            stepper.hide()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_control_that_does_not_fit_the_model_is_refused() -> None:
    bare = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"'magnitude' moves the mask of a plain network, but this one has none"):
        pp.fit(bare, (torch.zeros(4, 3), torch.zeros(4).long()), pp.Config(epochs=1), budget=Budget(0.5, "magnitude"))
    attached = pp.attach(net(), pp.isotropic(net(), sparsity=0.5))
    with pytest.raises(ValueError, match=r"'threshold' moves the mask of a plain network, but this one has gates"):
        budget.check_budgets(attached, [Budget(0.5, "threshold")])
    with pytest.raises(ValueError, match=r"keep probabilities of stochastic masks; call pp\.attach"):
        budget.check_budgets(plain(), [Budget(0.5)])
    with pytest.raises(ValueError, match="have the controls feedback and magnitude, but all are held in one pass"):
        budget.check_budgets(plain(), [Budget(0.5, "magnitude"), Budget(0.5, "feedback")])
    with pytest.raises(
        ValueError, match="differ in until, theta, limit or pattern, but all members take their steps together"
    ):
        budget.check_budgets(plain(), [Budget(0.5, "magnitude", until=u) for u in (0.5, 1.0)])


# --- Masks of the largest weights.


@pytest.mark.parametrize("control", ["magnitude", "feedback"])
def test_masks_keep_the_largest_weights_at_the_density_of_the_schedule(control: str) -> None:
    model = plain()
    before = {n: w.detach().clone() for n, w in pp.prunable(model).items()}
    plan = Budget(0.9, control=control, schedule="cubic", every=10)
    stepper = Stepper(model, [plan])
    for step in (0, 5, 10, 50, 80, 95):
        previous = current_mask(model).clone()
        stepper.prepare(step, 100)
        if step % 10:
            assert torch.equal(current_mask(model), previous)
            continue
        expected = pp.top_k({n: w.abs() for n, w in before.items()}, sparsity=1 - plan.density(step / 100))
        assert torch.equal(current_mask(model), torch.cat([m.reshape(-1) for m in expected.values()]))
        assert int(current_mask(model).sum()) == round(plan.density(step / 100) * 1400)
        for name, w in pp.prunable(model).items():
            assert torch.equal(w, before[name] * expected[name] if control == "magnitude" else before[name])


def test_masks_of_members_move_independently() -> None:
    models = [plain(seed) for seed in range(3)]
    plans = [
        Budget(0.5, control="magnitude"),
        Budget(0.9, control="magnitude", schedule="cubic", every=7),
        Budget(0.97, control="magnitude", min_per_layer=15),
    ]
    stacked = Population(models).stacked
    stepper = Stepper(stacked, plans, seeds=(0, 0, 0), members=True)
    alone = [Stepper(model, [plan]) for model, plan in zip(models, plans, strict=True)]
    for step in (0, 7, 14, 16, 32):
        for each in (stepper, *alone):
            each.prepare(step, 40)
    for k, model in enumerate(models):
        for (w, keep), (member_weight, member_keep) in zip(weights.masked(stacked), weights.masked(model), strict=True):
            assert torch.equal(keep[k], member_keep)
            assert torch.equal(w[k], member_weight)
    assert int(weights.masked(models[2])[1][1].sum()) >= 15


def last_step(model: nn.Module, config: pp.Config, plan: Budget | None) -> dict[str, Tensor]:
    """The parameters after the last step, before the network is pruned for good."""
    states: list[dict[str, Tensor]] = []
    batch = X[:32], Y[:32]
    pp.fit(model, batch, config, budget=plan, progress=lambda *call: states.append(copy.deepcopy(model.state_dict())))
    return states[-1]


def test_a_step_of_feedback_is_the_dense_gradient_of_the_masked_network() -> None:
    model, twin = plain(), plain()
    config = pp.Config(epochs=1, lr=0.1, batch_size=32, accumulate=2)
    after = last_step(model, config, Budget(0.5, control="feedback"))
    dense = {n: w.detach().clone() for n, w in twin.named_parameters()}
    mask = pp.top_k({n: dense[n].abs() for n in pp.prunable(twin)}, sparsity=0.5)
    F.cross_entropy(pp.apply_mask(twin, mask)(X[:32]), Y[:32]).backward()
    for name, w in after.items():
        assert torch.allclose(w, dense[name] - 0.1 * twin.get_parameter(name).grad, atol=1e-6)


# --- RigL.


def test_growth_exchanges_the_smallest_weights_for_those_with_the_largest_gradients() -> None:
    x, y = X[:32], Y[:32]
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
def test_growth_leaves_every_tensor_its_number_of_weights_and_stops_at_the_end_of_the_ramp(
    clip: float | None, optimizer: str
) -> None:
    model, seen = sparse(), []
    counts = [int(keep.sum()) for _, keep in weights.masked(model)]
    config = pp.Config(epochs=5, lr=0.01, batch_size=8, clip=clip, optimizer=optimizer, weight_decay=0.01)
    plan = Budget(0.8, control="growth", every=3, ramp=0.5)
    pp.fit(model, (X, Y), config, budget=plan, progress=lambda *call: seen.append(current_mask(model).clone()))
    assert [int(keep.sum()) for _, keep in weights.masked(model)] == counts
    changes = [k + 1 for k, (a, b) in enumerate(itertools.pairwise(seen[:8])) if not torch.equal(a, b)]
    assert changes == [2, 5]  # after steps 3 and 6
    assert all(torch.equal(mask, seen[-1]) for mask in seen[25:])
    for weight, keep in weights.masked(model):
        assert not weight[~keep].any()


# --- Feather's threshold on scores.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", [False, True])
def test_exactly_k_weights_count_at_every_moment_and_they_are_shrunk(offsets: bool, device: str) -> None:
    model = (scored() if offsets else plain()).to(device)
    plan = Budget(0.97, control="threshold", schedule="cubic")
    stepper, before = Stepper(model, [plan]), flat(model)
    learned = torch.cat([p.detach().reshape(-1) for p in weights.learned(model).values()]) if offsets else 0.0
    scores = COUPLING * torch.log(before.double().abs() + 1e-8) + learned
    for progress in (0.0, 0.1, 0.4, 0.79, 0.8, 1.0):
        stepper.show(numbers(plan, progress).to(device))
        shown, kept = flat(model), round(plan.density(progress) * 1400)
        assert int((shown != 0).sum()) == pytest.approx(kept, abs=1)  # a fused logarithm may round otherwise
        if progress:
            tau = scores.sort().values[1400 - kept - 1]
            expected = before * (1 - torch.exp(-3 * (scores - tau).clamp_min(0) / COUPLING)) ** (1 / 3)
            far = (scores - tau).abs() > 1e-3
            torch.testing.assert_close(shown[far].double(), expected[far], rtol=1e-3, atol=1e-6)
        stepper.hide()
        assert torch.equal(flat(model), before)


@pytest.mark.parametrize("theta", [0.0, 0.25, 1.0])
def test_one_step_is_feathers_formula(theta: float) -> None:
    model, twin = plain(), net()
    dense = {name: w.detach().clone() for name, w in pp.prunable(twin).items()}
    tau = flat(twin).abs().sort().values[1400 - 700 - 1]
    config = pp.Config(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.01, batch_size=32, gate_lr=None)
    after = last_step(model, config, Budget(0.5, control="threshold", theta=theta))
    with torch.no_grad():
        for name, w in dense.items():
            shrunk = torch.sign(w) * (w.abs() ** 3 - tau**3).clamp_min(0) ** (1 / 3)
            twin.get_parameter(name).copy_(shrunk)
    F.cross_entropy(twin(X[:32]), Y[:32]).backward()
    for name, w in dense.items():
        gradient = twin.get_parameter(name).grad
        assert gradient is not None
        through = torch.where(w.abs() > tau, gradient, theta * gradient)
        torch.testing.assert_close(after[name], w - 0.1 * (through + 0.01 * w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", [False, True])
def test_what_closed_weights_of_an_output_gain_in_a_step_is_limited_by_its_weights(members: bool) -> None:
    """The other gradients are as they were, and so are those of outputs that stay within the limit."""

    def gradients(limit: float | None) -> list[Tensor]:
        models = [plain(), plain()]
        model, seeds = (Population(models).stacked, (0, 0)) if members else (models[0], (0,))
        plan = Budget(0.5, control="threshold", limit=limit)
        stepper = Stepper(model, [plan] * len(seeds), seeds=seeds, members=members)
        row = numbers(plan, 1.0)
        stepper.show(row[:, None].expand(-1, 2) if members else row)
        for weight, _ in stepper.subject.pairs:
            slope = torch.randn(weight.shape[-2:], generator=torch.Generator().manual_seed(weight.shape[-1]))
            slope[::2] *= 1e-4
            weight.grad = slope.expand_as(weight).clone()
        shown.append([weight.detach().clone() for weight, _ in stepper.subject.pairs])
        stepper.hide()
        trained.append([weight.detach().clone() for weight, _ in stepper.subject.pairs])
        return [weight.grad for weight, _ in stepper.subject.pairs if weight.grad is not None]

    shown: list[list[Tensor]] = []
    trained: list[list[Tensor]] = []
    free, limited = gradients(None), gradients(0.01)
    assert len(free) == len(limited) == len(shown[0])
    for before, after, effective, weight in zip(free, limited, shown[0], trained[0], strict=True):
        closed = effective == 0
        assert torch.equal(after[~closed], before[~closed])
        length, room = (closed * before).norm(dim=-1), 0.01 * weight.norm(dim=-1)
        assert (length > room).any()
        assert (length < room).any()
        expected = before * torch.minimum(torch.ones(()), room / length)[..., None]
        torch.testing.assert_close(after[closed], expected[closed])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_offsets_have_momentum_sgd_on_the_schedule_whatever_the_weights_have(optimizer: str) -> None:
    """And their gradient is that in the weight, times the weight and a bump around the threshold."""
    model, plan = scored(), Budget(0.5, control="threshold", sharpen=4.0)
    first = {name: p.detach().clone() for name, p in weights.learned(model).items()}
    config = pp.Config(epochs=1, lr=0.0, gate_lr=2.0, momentum=0.9, batch_size=32, optimizer=optimizer)
    config = replace(config, schedule=lambda share: 0.5)
    moved: dict[str, Tensor] = {}

    def progress(*call: Any) -> None:
        moved.update({name: p.detach().clone() for name, p in weights.learned(model).items()})

    pp.fit(model, (X[:32], Y[:32]), config, budget=plan, progress=progress)
    twin = scored()
    stepper, dense = Stepper(twin, [plan]), {n: w.detach().clone() for n, w in pp.prunable(twin).items()}
    stepper.show(numbers(plan, 0.0))
    F.cross_entropy(twin(X[:32]), Y[:32]).backward()
    tau = torch.cat([(COUPLING * torch.log(dense[n].abs() + 1e-8) + first[n]).reshape(-1) for n in dense])
    tau = tau.sort().values[699]
    for name, w in dense.items():
        gradient = twin.get_parameter(name).grad
        assert gradient is not None
        s = torch.sigmoid((COUPLING * torch.log(w.abs() + 1e-8) + first[name] - tau).clamp(-14, 14))
        expected = first[name] - 0.5 * 2.0 * gradient * w * s * (1 - s)
        torch.testing.assert_close(moved[name], expected, rtol=1e-3, atol=1e-6)


def test_clipping_leaves_offsets_alone() -> None:
    """They have a scale of their own, and in a user's loop nothing clips them."""
    runs = []
    for clip in (None, 1e-6):
        model, plan = scored(), Budget(0.5, control="threshold")
        config = pp.Config(epochs=1, lr=0.1, gate_lr=1.0, batch_size=32, clip=clip)
        offsets: list[Tensor] = []
        learned = weights.learned(model)
        pp.fit(model, (X[:32], Y[:32]), config, budget=plan)
        offsets += [p.detach() for p in learned.values()]
        runs.append(offsets)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_noise_moves_the_mask_of_a_step_and_leaves_its_size() -> None:
    model, plan = scored(), Budget(0.9, control="threshold", noise=2.0)
    assert [plan.noise_at(t) for t in (0.0, 0.4, 0.8, 1.0)] == [2.0, 1.0, 0.0, 0.0]
    stepper, shown = Stepper(model, [plan], seeds=(3,)), []
    for step in (0, 1, 2, 1):
        stepper.prepare(step, 10)
        stepper.show(numbers(plan, 1.0, noise=2.0))
        shown.append(flat(model) != 0)
        assert int(shown[-1].sum()) == pytest.approx(140, abs=1)
        stepper.hide()
    assert not torch.equal(shown[0], shown[1])
    assert torch.equal(shown[1], shown[3])  # it follows from the number of the step
    with pytest.raises(ValueError, match=r"noise is 1\.0 with the control 'shift'; it is the size of the noise"):
        Budget(0.5, noise=1.0)


def test_what_scores_begin_with_fades() -> None:
    model, sizes = scored(), []
    config = pp.Config(epochs=5, lr=0.1, gate_lr=None, batch_size=16)
    first = {name: p.detach().clone() for name, p in weights.learned(model).items()}

    def progress(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        learned = weights.learned(model)
        sizes.append((done, max(float((p.detach() - first[name]).abs().max()) for name, p in learned.items())))

    learned = weights.learned(model)
    plan = Budget(0.8, control="threshold", schedule="cubic", ramp=0.5, fade=True)
    pp.fit(model, (X, Y), config, budget=plan, progress=progress)
    assert sizes[0][1] == 0
    assert sizes == sorted(sizes)
    assert all(float(p.detach().abs().max()) < 1e-5 for p in learned.values())


@pytest.mark.parametrize("pattern", ["1:4", "2:4"])
@pytest.mark.parametrize("members", [False, True])
def test_under_a_pattern_the_best_of_every_group_stay_and_the_others_go_by_one_threshold(
    pattern: str, members: bool
) -> None:
    models = [nn.Linear(24, 10, bias=False) for _ in range(2)]
    models = [pp.apply_mask(model, masks.all_kept(pp.prunable(model))) for model in models]
    subject = Population(models).stacked if members else models[0]
    n, sparsity = int(pattern[0]), pp.patterns.sparsity(pattern)
    plan = Budget(sparsity, control="threshold", schedule="cubic", pattern=pattern)
    stepper = Stepper(subject, [plan] * (2 if members else 1), seeds=(0, 0)[: 2 if members else 1], members=members)
    before = subject.weight.detach().clone()
    for progress in (0.0, 0.3, 0.8, 1.0):
        density = torch.tensor([0.0, 0.0, plan.density(progress), 1.0])
        stepper.show(density[:, None].expand(4, 2) if members else density)
        for shown, dense in zip(subject.weight.detach().reshape(-1, 240), before.reshape(-1, 240), strict=True):
            kept, groups = shown.reshape(-1, 4) != 0, dense.abs().reshape(-1, 4)
            assert int(kept.sum()) == pytest.approx(round(plan.density(progress) * 240), abs=1)
            best = groups >= groups.topk(n, dim=-1).values[:, -1:]
            assert bool((kept | ~best).all())
        if progress == 1.0:
            assert bool((kept.sum(-1) == n).all())
        stepper.hide()
        assert torch.equal(subject.weight.detach(), before)
    stepper.finish()
    for weight in subject.weight.detach().reshape(-1, 10, 24):
        pp.patterns.check(weight, *pp.patterns.PATTERNS[pattern])
        assert int((weight != 0).sum()) == 60 * n


def test_equal_weights_are_kept_exactly_k_at_a_time() -> None:
    model = nn.Linear(10, 10)
    nn.init.constant_(model.weight, 0.5)
    stepper = Stepper(pp.apply_mask(model, masks.all_kept(pp.prunable(model))), [Budget(0.7, control="threshold")])
    stepper.finish()
    assert int((model.weight != 0).sum()) == int(current_mask(model).sum()) == 30


@pytest.mark.parametrize("members", [False, True])
def test_a_layer_keeps_its_least_number_at_every_step(members: bool) -> None:
    models = [plain(seed) for seed in range(2)]
    for model in models:
        with torch.no_grad():
            model[2].weight.mul_(1e-3)
    subject = Population(models).stacked if members else models[0]
    plans = [Budget(0.9, control="threshold", min_per_layer=least) for least in (15, 40)[: 2 if members else 1]]
    stepper = Stepper(subject, plans, seeds=(0, 0)[: len(plans)], members=members)
    row = numbers(plans[0], 1.0)
    stepper.show(row[:, None].expand(4, 2) if members else row)
    for k, plan in enumerate(plans):
        shown = [w.detach()[k] if members else w.detach() for w, _ in weights.masked(subject)]
        assert [int((w != 0).sum()) for w in shown] == [140 - plan.min_per_layer, plan.min_per_layer]
    stepper.finish()
    for k, plan in enumerate(plans):
        left = [w.detach()[k] if members else w.detach() for w, _ in weights.masked(subject)]
        assert [int((w != 0).sum()) for w in left] == [140 - plan.min_per_layer, plan.min_per_layer]
