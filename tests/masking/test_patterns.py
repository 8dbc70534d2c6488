"""N:M patterns: exact for every method and criterion, the gate of a group as a distribution, resuming, refusals."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune import kernels, philox
from pacprune.masking import attachment, criteria, masks, patterns, weights
from pacprune.methods.pft import RECIPES
from pacprune.methods.table import METHODS, Method
from pacprune.runs import options as opt
from pacprune.training.controls import Stepper
from pacprune.training.population import Population

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 8, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
IMAGES = torch.randn(60, 4, 6, 6, generator=G)
LABELS = (IMAGES[:, 0].mean((1, 2)) > 0).long()
CONFIG = pp.Config(epochs=2, lr=0.1, batch_size=32)


def takes_pattern(method: Method) -> bool:
    """Whether a method prunes to a pattern; a recipe of pft may not."""
    recipe = method.options.get("recipe")
    return method.takes("pattern") and (recipe is None or RECIPES[recipe].takes_pattern)


def call(method: Method) -> "partial[pp.Pruned]":
    """The method, with masks that move at every step."""
    return partial(method.verb, **method.options, **({"every": 1} if method.takes("every") else {}))


PATTERN_METHODS = {name: call(method) for name, method in METHODS.items() if takes_pattern(method)}
CASES = [
    (name, options)
    for name in PATTERN_METHODS
    for options in ([{"criterion": c} for c in criteria.CRITERIA] if METHODS[name].takes("criterion") else [{}])
]


def seeded(*modules: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in modules))


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Linear(8, 24), nn.ReLU, lambda: nn.Linear(24, 3), seed=seed)


def convolution() -> nn.Module:
    return seeded(lambda: nn.Conv2d(4, 6, 3), nn.ReLU, nn.Flatten, lambda: nn.Linear(96, 2))


class Tied(nn.Module):
    """One weight with two owners, read twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))))


def kept_per_group(weight: Tensor, m: int = 4) -> Tensor:
    """Nonzero weights per group, counted along each flattened row."""
    return torch.stack([(row.reshape(-1) != 0).float().unfold(0, m, m).sum(-1) for row in weight.detach()])


def attached(model: nn.Module, pattern: str, **options: Any) -> nn.Module:
    return pp.attach(model, pp.isotropic(model, sparsity=patterns.sparsity(pattern)), mapping=pattern, **options)


# --- Masks.


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_method_and_criterion_keeps_exactly_n_of_m(name: str, options: dict[str, Any], pattern: str) -> None:
    n, m = patterns.parse(pattern)
    cases = [(net(), (X, Y)), (convolution(), (IMAGES, LABELS))]
    for model, data in cases[: 1 if m == 8 else 2]:  # the convolution has rows of 36
        plain = list(model.state_dict())
        result = PATTERN_METHODS[name](model, data, CONFIG, pattern=pattern, dense=CONFIG, **options)
        assert result.pattern == pattern
        assert result.sparsity == 1 - n / m == patterns.sparsity(pattern)
        assert list(model.state_dict()) == plain
        for key, weight in weights.prunable(model).items():
            assert (kept_per_group(weight, m) == n).all()
            assert torch.equal(weight != 0, result.mask[key])


def test_top_k_takes_the_largest_of_every_group_and_the_first_of_equals() -> None:
    score = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    assert masks.top_k({"w": score}, pattern="2:4")["w"].nonzero()[:, 1].tolist() == [0, 2, 4, 5]
    assert masks.top_k({"w": score}, pattern="1:4", sparsity=0.75)["w"].nonzero()[:, 1].tolist() == [0, 4]
    ties = {"w": torch.arange(8.0).reshape(1, 8)}
    assert masks.top_k({"w": score}, pattern="2:4", ties=ties)["w"].nonzero()[:, 1].tolist() == [0, 2, 6, 7]


def test_groups_of_a_convolution_lie_along_its_inputs_and_kernel() -> None:
    score = torch.rand(5, 2, 2, 3, generator=torch.Generator().manual_seed(2))
    mask = masks.top_k({"w": score}, pattern="2:4")["w"]
    for row, keep in zip(score.reshape(5, 3, 4), mask.reshape(5, 3, 4), strict=True):
        assert torch.equal(keep.nonzero().reshape(3, 2, 2)[..., 1], row.topk(2).indices.sort().values)


def test_layers_that_prunable_leaves_out_stay_dense() -> None:
    model = net()
    first = pp.pft(
        model, (X, Y), CONFIG, pattern="2:4", prunable=lambda m: {"0.weight": weights.prunable(m)["0.weight"]}
    )
    assert set(first.mask) == {"0.weight"}
    assert first.sparsity == 96 / 264
    assert (kept_per_group(model[0].weight) == 2).all()


def test_a_tied_weight_has_one_gate_and_stays_tied() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied()
    result = pp.pft(model, (X, Y), CONFIG, pattern="2:4")
    assert model.one.weight is model.two.weight
    assert set(result.mask) == {"one.weight", "head.weight"}
    model = attached(Tied(), "2:4")
    assert torch.equal(model.one.weight, model.two.weight)


def test_harden_without_a_mask_takes_the_likeliest_choice() -> None:
    model = attached(net(), "2:4")
    site = attachment.sites(model)[0]
    with torch.no_grad():
        site.gate.copy_(torch.tensor([0.3, 0.2, 0.1, 0.2]).repeat(2).expand_as(site.gate))
        site.mean.copy_(torch.tensor([1.0, 2.0, 1.0, -1.0]).repeat(2).expand_as(site.mean))  # 1 beats its equal 3
    pp.harden(model)
    assert (model[0].weight.reshape(24, 2, 4) != 0).tolist() == [[[True, True, False, False]] * 2] * 24


# --- Refusals.


def test_shapes_that_do_not_divide_are_refused_before_anything_is_trained() -> None:
    model = seeded(lambda: nn.Linear(8, 6), nn.ReLU, lambda: nn.Linear(6, 3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for method in PATTERN_METHODS.values():
        with pytest.raises(ValueError, match=r"2\.weight has rows of 6 weights, .* groups of 4; .* exclude="):
            method(model, (X, Y), CONFIG, pattern="2:4", dense=CONFIG)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    with pytest.raises(ValueError, match=r"0\.weight has rows of 27 weights"):
        masks.top_k({"0.weight": torch.rand(8, 3, 3, 3)}, pattern="1:4")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pattern": "2:4", "sparsity": 0.9}, "sparsity is 0.9, but the pattern 2:4 has sparsity 0.5"),
        ({"pattern": "3:5"}, "pattern '3:5' is unknown"),
        ({}, "neither a sparsity nor a pattern"),
        ({"pattern": "2:4", "min_per_layer": 3}, "min_per_layer=3"),
    ],
)
def test_contradictory_arguments_are_refused(options: dict[str, Any], sentence: str) -> None:
    for method in PATTERN_METHODS.values():
        with pytest.raises(ValueError, match=sentence):
            method(net(), (X, Y), CONFIG, **options)
    with pytest.raises(ValueError, match=sentence):
        pp.top_k(criteria.magnitude(net()), **options)


def test_arguments_that_do_not_go_with_a_pattern_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe='paper'"):
        pp.pft(net(), (X, Y), CONFIG, pattern="2:4", recipe="paper")
    with pytest.raises(ValueError, match="scope='erk'"):
        pp.osp(net(), (X, Y), CONFIG, pattern="2:4", scope="erk")
    with pytest.raises(ValueError, match="estimator='straight-through'"):
        attached(net(), "2:4", estimator="straight-through")
    with pytest.raises(ValueError, match="give the SpikeSlab std=0"):
        pp.attach(net(), pp.isotropic(net(), sparsity=0.5, std=0.1), mapping="2:4")
    with pytest.raises(ValueError, match=r"use pp\.harden"):
        pp.read(attached(net(), "2:4"))
    for control in ("shift", "projection", "lagrangian"):
        with pytest.raises(ValueError, match=r"share what they keep among 4 .* Budget\(control='none'\)"):
            pp.fit(attached(net(), "1:4"), (X, Y), CONFIG, budget=pp.Budget(0.75, control=control))


def test_check_names_the_group_at_fault() -> None:
    weight = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    patterns.check(weight, 3, 4)
    with pytest.raises(ValueError, match="fc is not 2:4: 1 of its 2 groups differ, and group 0 of row 1 keeps 3 of 4"):
        patterns.check(weight, 2, 4, name="fc")
    patterns.check(torch.zeros(2, 4), 2, 4)  # a kept weight may be zero; in a mask, False means pruned
    with pytest.raises(ValueError, match="keeps 0 of 4"):
        patterns.check(torch.zeros(2, 4, dtype=torch.bool), 2, 4)


def test_semi_structured_kernels_need_an_accelerator() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is torch.float32 on cpu, .* model.to\('cuda', torch.bfloat16\)"):
        patterns.to_semi_structured(net())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pattern", ["1:4", "2:4"])
def test_semi_structured_kernels_give_the_same_outputs(pattern: str) -> None:
    model = seeded(lambda: nn.Linear(256, 512), nn.ReLU, lambda: nn.Linear(512, 10)).to("cuda", torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="none of the 2 Linear layers"):
        patterns.to_semi_structured(model)
    pp.apply_mask(model, pp.top_k(criteria.magnitude(model), pattern=pattern))
    with torch.no_grad():
        dense = model(x)
        assert patterns.to_semi_structured(model) == ["0.weight"]
        torch.testing.assert_close(model(x), dense, rtol=2e-2, atol=2e-2)


# --- The gate of a group.


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
def test_hard_draws_have_the_distribution_of_the_logits(pattern: str) -> None:
    n, m = patterns.parse(pattern)
    model = attached(seeded(lambda: nn.Linear(8, 250, bias=False)), pattern, seed=3).eval()
    site = attachment.sites(model)[0]
    logits = torch.linspace(-1, 1.5, m)
    with torch.no_grad():
        site.gate.copy_(logits.repeat(8 // m).expand(250, 8))
    counts = torch.zeros(m)
    for _ in range(20):
        pp.resample_(model)
        keep = site.where().reshape(-1, m) != 0
        assert (keep.sum(1) == n).all()
        counts += keep.sum(0)
    draws = 20 * 250 * 8 / m
    # N draws without replacement, each in proportion to exp(logit): by enumeration of their orders.
    a, expected = torch.softmax(logits.double(), 0), torch.zeros(m, dtype=torch.float64)
    for order in itertools.permutations(range(m), n):
        p, left = 1.0, 1.0
        for i in order:
            p, left = p * float(a[i]) / left, left - float(a[i])
        expected[list(order)] += p
    torch.testing.assert_close(site.keep_prob()[0, :m], expected.float())
    spread = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() < 4.5 * spread).all()


def test_attach_begins_with_the_logits_of_keep_prob() -> None:
    model = seeded(lambda: nn.Linear(4, 1))
    p = torch.tensor([[0.1, 0.4, 0.6, 0.9]])
    slab = pp.isotropic(model, sparsity=0.5)
    slab.keep_prob["0.weight"].copy_(p)  # type: ignore[index]
    site = attachment.sites(pp.attach(model, slab, mapping="2:4", coupling=2.0))[0]
    torch.testing.assert_close(site.sampler.group_logits(site.mean, site.gate), torch.logit(p), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
def test_the_relaxed_gate_is_the_mean_of_the_sets_and_has_their_gradient(pattern: str) -> None:
    """By enumeration of all sets, differentiated by torch: the kernels' values and gradients of one draw."""
    n, m = patterns.parse(pattern)
    generator = torch.Generator().manual_seed(2)
    mean, gate, out = (torch.randn(2, 3 * m, generator=generator) for _ in range(3))
    law = kernels.Law(pattern, coupling=2.0, beta=0.5)
    sharpness = torch.tensor(1.5)
    inputs = kernels.SampleInputs(mean, gate, None, torch.tensor(5), torch.tensor(2), 8, None, sharpness)
    word = philox.words(mean.numel(), seed=5, step=2, stream=philox.GATE, offset=8).reshape(mean.shape)
    leaf = gate.double().requires_grad_()
    x = 1.5 * (leaf + 2.0 * torch.log(mean.double().abs() + 1e-8)) - torch.log(
        -torch.log(philox.uniform(word).double())
    )
    sets = list(itertools.combinations(range(m), n))
    sums = torch.stack([x.reshape(-1, m)[:, list(kept)].sum(-1) for kept in sets], dim=-1)
    probs = torch.softmax(sums / 0.5, dim=-1)
    gates = torch.stack([sum(probs[:, c] for c, kept in enumerate(sets) if i in kept) for i in range(m)], dim=-1)  # type: ignore[arg-type]
    expected = gates.reshape(mean.shape) * mean
    torch.testing.assert_close(kernels.draw([inputs], law)[0], expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gates.sum(-1), torch.full((len(gates),), float(n), dtype=torch.float64))
    (slope,) = torch.autograd.grad((expected * out).sum(), leaf)
    actual = kernels.gradients(inputs, law, out, (True, True, False))
    assert actual[0] is not None
    assert actual[1] is not None
    torch.testing.assert_close(actual[0], (gates.reshape(mean.shape) * out).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1], slope.float(), rtol=1e-3, atol=1e-5 * float(slope.abs().max()))


def test_gradients_of_gate_and_mean_agree_with_finite_differences() -> None:
    model = attached(seeded(lambda: nn.Linear(8, 2, bias=False)), "2:4", coupling=4.0, seed=1).train()
    pp.resample_(model)
    site, out = attachment.sites(model)[0], torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    (site.where() * out).sum().backward()
    with torch.no_grad():
        share = site.where() / site.mean
        torch.testing.assert_close(site.mean.grad, share * out)
        for index in ((0, 0), (0, 5), (1, 3)):
            values = []
            for h in (1e-2, -2e-2):
                site.gate[index] += h
                values.append(float((site.where().double() * out).sum()))
            site.gate[index] += 1e-2
            assert float(site.gate.grad[index]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2, abs=1e-4)


def test_a_draw_follows_from_seed_and_step_and_no_two_groups_share_noise() -> None:
    def draw(seed: int, steps: int) -> list[Tensor]:
        model = attached(net(), "2:4", seed=seed).train()
        for _ in range(steps):
            pp.resample_(model)
        return [site.where().detach() for site in attachment.sites(model)]

    first, again, later, other = draw(0, 1), draw(0, 1), draw(0, 2), draw(1, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    shares = torch.cat(
        [
            w.reshape(-1, 4) / mean.detach().reshape(-1, 4)
            for w, mean in zip(first, weights.prunable(net()).values(), strict=True)
        ]
    )
    assert len({tuple(round(float(x), 5) for x in row) for row in shares}) == len(shares)


def test_without_noise_draws_are_equal_in_training_and_differ_in_evaluation() -> None:
    model = attached(net(), "2:4", estimator="deterministic").train()
    first = model[0].weight.detach().clone()
    assert torch.equal(pp.resample_(model)[0].weight, first)  # type: ignore[index]
    model.eval()
    first = model[0].weight.detach().clone()
    assert (kept_per_group(first) == 2).all()
    assert not torch.equal(pp.resample_(model)[0].weight, first)  # type: ignore[index]


def test_an_interrupted_run_resumes_to_the_bit(tmp_path: Path) -> None:
    config = pp.Config(epochs=4, lr=0.1, batch_size=32)

    def run(folder: Path | None, stop: int = 10**9) -> nn.Module:
        model, steps = net(), [0]

        def watch(*_: Any) -> None:
            steps[0] += 1
            if steps[0] == stop:
                raise KeyboardInterrupt

        pp.pft(model, (X, Y), config, pattern="2:4", seed=5, folder=folder, progress=watch)
        return model

    whole = run(None)
    for stop in (7, 3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, stop)
    for name, t in run(tmp_path).state_dict().items():
        assert torch.equal(t, whole.state_dict()[name])


# --- Many models at once, and gradual pruning.


@pytest.mark.parametrize("name", PATTERN_METHODS)
def test_models_pruned_together_equal_models_pruned_alone(name: str) -> None:
    verb = PATTERN_METHODS[name].func
    options: dict[str, Any] = {"pattern": "2:4", "dense": CONFIG, **PATTERN_METHODS[name].keywords}
    seeds = [0, 1, 2]
    crowd = pp.together(verb, [net(seed) for seed in seeds], (X, Y), CONFIG, seed=seeds, **options)
    for seed, result in zip(seeds, crowd, strict=True):
        alone = verb(net(seed), (X, Y), CONFIG, seed=seed, **options)
        for key, keep in alone.mask.items():
            assert torch.equal(result.mask[key], keep)
        for key, t in alone.model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[key], t, rtol=1e-4, atol=1e-5)


def test_a_population_draws_what_its_members_draw_alone() -> None:
    models = [attached(net(seed), "2:4", coupling=4.0, seed=seed).train() for seed in range(3)]
    stacked = Population(models).stacked
    for step in range(2):
        pp.resample_(stacked)
        for k, model in enumerate(models):
            pp.resample_(model)
            for site, member_site in zip(attachment.sites(stacked), attachment.sites(model), strict=True):
                torch.testing.assert_close(
                    site.where()[k], member_site.where(), msg=f"step {step}, model {k}, {member_site.name}"
                )


@pytest.mark.parametrize("feedback", [False, True])
def test_gradual_pruning_follows_its_schedule_and_leaves_the_pattern_possible(feedback: bool) -> None:
    model = net()
    pp.apply_mask(model, {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.prunable(model).items()})
    plan = pp.Budget(0.75, control="feedback" if feedback else "magnitude", schedule="cubic", every=1, pattern="1:4")
    before, stepper = 264, Stepper(model, [plan])
    for step in range(11):
        stepper.prepare(step, 10)
        count = sum(int(keep.sum()) for _, keep in weights.masked(model))
        assert count == round(264 * plan.density(step / 10)) <= before
        assert all((kept_per_group(keep) >= 1).all() for _, keep in weights.masked(model))
        before = count
    assert all((kept_per_group(keep) == 1).all() for _, keep in weights.masked(model))
    with pytest.raises(ValueError, match="attach gates with mapping='1:4'"):
        pp.Budget(0.75, pattern="1:4")


# --- Options of the commands.


def test_a_pattern_gives_the_command_its_sparsity_and_names_the_run() -> None:
    options = opt.resolve(opt.Pft, {"pattern": "1:4", "data": "mnist"})
    assert options.sparsity == 0.75
    assert opt.changes(options) == {"data": "mnist", "pattern": "1:4"}
    assert opt.command_line("pft", options) == "pacprune pft --data mnist --pattern 1:4"
    assert opt.resolve(opt.Osp, {"pattern": "2:4", "sparsity": 0.9}).sparsity == 0.9  # osp refuses it later
    assert opt.resolve(opt.Dpf, {"pattern": "2:4"}).sparsity == opt.resolve(opt.Imp, {"pattern": "2:4"}).sparsity == 0.5
    assert opt.run_name("pft", options) != opt.run_name("pft", opt.resolve(opt.Pft, {"data": "mnist"}))
