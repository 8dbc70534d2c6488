"""A user's own loop with a Pruner ends as the method's own function does, whatever else the loop contains."""

import copy
import gc
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import pacprune as pp
from pacprune.data.batches import portions
from pacprune.masking import weights
from pacprune.methods.table import METHODS
from pacprune.training.step import _order

# Tests of single steps let their pruners go.
pytestmark = pytest.mark.filterwarnings("ignore:a Pruner was given up")

CARRIED = [name for name, row in METHODS.items() if row.begin is not None]
MOVING = [name for name in CARRIED if name != "osp"]
G = torch.Generator().manual_seed(0)
X = torch.randn(192, 20, generator=G)
Y = (X[:, :5].argmax(1) + (X[:, 5] > 0)) % 5
CONFIG = pp.Config(epochs=6, lr=0.125, batch_size=32)
"""36 steps, at a rate that float32 holds exactly."""
STEPS = 36


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))


def batches(*, parts: int = 1) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The batches of `fit`, each in so many micro-batches."""
    for epoch in range(CONFIG.epochs):
        for index in portions(_order(len(X), 0, epoch), CONFIG.batch_size):
            yield list(zip(X[index].chunk(parts), Y[index].chunk(parts), strict=True))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """The optimiser of CONFIG, by the kernel that `fit` calls."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.125, "momentum": 0.9, "fused": True, **options})


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def pruned_in_a_loop(
    model: nn.Module,
    *,
    parts: int = 1,
    clip: float | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> pp.Pruned:
    pruner = pp.Pruner(model, steps=STEPS, **{"sparsity": 0.8, **options})
    optimizer = make(model)
    for batch in batches(parts=parts):
        for x, y in batch:
            (loss_of(model, x, y) / parts).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    return pruner.finish()


def by_verb(method: str, model: nn.Module, config: pp.Config = CONFIG, **options: Any) -> pp.Pruned:
    row = METHODS[method]
    return row.verb(model, (X, Y), config, **{"sparsity": 0.8, **row.options, **options})


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def zeros(model: nn.Module) -> int:
    return sum(int((w == 0).sum()) for w in pp.prunable(model).values())


TOTAL = 20 * 24 + 24 * 16 + 16 * 5
KEPT = round(0.2 * TOTAL)


# --- The same weights as the method's own function.


def first_layer(model: Any) -> dict[str, Tensor]:
    return {"0.weight": model[0].weight}


@pytest.mark.parametrize("method", CARRIED)
def test_a_loop_of_ones_own_ends_with_the_same_weights(method: str) -> None:
    first, second = net(), net()
    reference, result = by_verb(method, first), pruned_in_a_loop(second, method=method)
    assert equal(first, second)
    assert all(torch.equal(keep, result.mask[name]) for name, keep in reference.mask.items())
    assert zeros(second) == TOTAL - KEPT


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pft", {"criterion": "random"}),
        ("pft", {"mask_share": 0.5}),
        ("pft", {"min_per_layer": 30}),
        ("pft", {"pattern": "2:4", "sparsity": None}),
        ("gmp", {"mask_share": 0.7}),
        ("gmp", {"pattern": "2:4", "sparsity": None}),
        ("osp", {"criterion": "random"}),
        ("osp", {"pattern": "1:4", "sparsity": None}),
        ("pft", {"prunable": first_layer, "sparsity": 0.4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_options_mean_what_they_mean_to_the_method(method: str, options: dict[str, Any]) -> None:
    first, second = net(), net()
    by_verb(method, first, **options)
    pruned_in_a_loop(second, method=method, **options)
    assert equal(first, second)


def test_the_rate_of_the_offsets_is_a_setting() -> None:
    first, second, third = net(), net(), net()
    by_verb("pft", first, pp.Config(epochs=6, lr=0.125, batch_size=32, gate_lr=4.0))
    pruned_in_a_loop(second, gate_lr=4.0)
    pruned_in_a_loop(third)
    assert equal(first, second)
    assert not equal(second, third)


def test_adamw_and_its_decay() -> None:
    config = pp.Config(epochs=6, lr=2**-7, batch_size=32, optimizer="adamw", weight_decay=0.125)
    first, second = net(), net()
    by_verb("pft", first, config)
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=2**-7, weight_decay=0.125, fused=True)  # noqa: E731
    pruned_in_a_loop(second, make=make)
    assert equal(first, second)


@pytest.mark.parametrize("method", ["pft", "gmp"])
def test_clipping_sees_the_gradients_of_what_is_trained(method: str) -> None:
    first, second, third = net(), net(), net()
    by_verb(method, first, pp.Config(epochs=6, lr=0.125, batch_size=32, clip=0.25))
    pruned_in_a_loop(second, method=method, clip=0.25)
    pruned_in_a_loop(third, method=method)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not equal(second, third)


def test_the_offsets_follow_the_schedule_of_the_weights() -> None:
    first, second = net(), net()
    config = pp.Config(epochs=6, lr=0.125, batch_size=32, schedule="cosine")
    by_verb("pft", first, config)
    pruner, optimizer = pp.Pruner(second, sparsity=0.8, steps=STEPS), sgd(second)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.factor(step / STEPS))
    for ((x, y),) in batches():
        loss_of(second, x, y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        pruner.step()
    pruner.finish()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "factor"),
    [
        ({"lr": 0.05, "initial_lr": 0.1}, 0.5),
        ({"lr": 0.05, "initial_lr": 0.01, "max_lr": 0.1}, 0.5),
        ({"lr": 0.05}, 1.0),
        ({"lr": 0.0, "initial_lr": 0.0}, 1.0),
    ],
)
def test_the_largest_rate_is_that_of_the_scheduler_or_of_the_loop(groups: dict[str, float], factor: float) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model)
    optimizer.param_groups[0].update(groups)
    assert pruner._factor(optimizer) == factor
    if "initial_lr" not in groups:  # a loop that sets its rates itself
        optimizer.param_groups[0]["lr"] = 0.01
        assert pruner._factor(optimizer) == pytest.approx(0.2)


# --- What loops contain.


def test_micro_batches_add_up() -> None:
    first, second = net(), net()
    by_verb("pft", first, pp.Config(epochs=6, lr=0.125, batch_size=32, accumulate=4))
    pruned_in_a_loop(second, parts=4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_two_backward_passes_are_those_of_their_sum(set_to_none: bool) -> None:
    model, twin = net(), net()
    pruners = [pp.Pruner(m, sparsity=0.8, steps=5) for m in (model, twin)]
    optimizers = [sgd(m) for m in (model, twin)]
    for _ in range(4):  # until weights are below the threshold
        for m, optimizer, pruner in zip((model, twin), optimizers, pruners, strict=True):
            (400 * loss_of(m, X, Y)).backward()  # so long that the limit cuts it
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            pruner.step()
            with torch.no_grad():
                torch.testing.assert_close(m[0].weight, model[0].weight)
    loss_of(model, X, Y).backward()
    optimizers[0].zero_grad(set_to_none=set_to_none)  # a batch that the loop throws away
    (400 * loss_of(model, X[:64], Y[:64])).backward()
    (400 * loss_of(model, X[64:], Y[64:])).backward()
    (400 * (loss_of(twin, X[:64], Y[:64]) + loss_of(twin, X[64:], Y[64:]))).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    offsets = [list(weights.learned(m).values()) for m in (model, twin)]
    for a, b in zip(*offsets, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


class Failing(torch.autograd.Function):
    """Passes its input on, and fails in so many backward passes."""

    failures = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        Failing.failures -= 1
        if Failing.failures >= 0:
            raise RuntimeError("out of memory")
        return gradient


@pytest.mark.parametrize("method", ["pft", "gmp"])
def test_a_backward_pass_that_failed_is_taken_again(method: str) -> None:
    first, second = net(), net()
    pruned_in_a_loop(first, method=method, clip=0.25)
    pruner, optimizer = pp.Pruner(second, sparsity=0.8, steps=STEPS, method=method), sgd(second)
    for number, ((x, y),) in enumerate(batches()):
        Failing.failures = 2 if number % 3 == 2 else 0
        while True:  # the last layer has its gradient when the pass breaks off
            try:
                F.cross_entropy(second[4](Failing.apply(second[:4](x))), y).backward()
                break
            except RuntimeError:
                optimizer.zero_grad()
        nn.utils.clip_grad_norm_(second.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    assert equal(pruner.finish().model, first)


def scaled_loop(model: nn.Module, scaler: torch.amp.GradScaler | None, *, fused: bool, bad: int = -1) -> pp.Pruner:
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, scaler=scaler)
    optimizer = sgd(model, fused=fused)
    for number, ((x, y),) in enumerate(batches()):
        loss = loss_of(model, x, y) * (torch.inf if number == bad else 1)
        if scaler is None:
            loss.backward()
            if number != bad:
                optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        pruner.step()
    return pruner


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_changes_nothing(fused: bool) -> None:
    first, second = net(), net()
    scaled_loop(first, None, fused=fused).finish()
    scaled_loop(second, torch.amp.GradScaler("cpu", init_scale=2.0**10), fused=fused).finish()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_moves_nothing_but_the_schedule(fused: bool) -> None:
    model = net()
    pruner = scaled_loop(model, torch.amp.GradScaler("cpu", init_scale=2.0**10), fused=fused, bad=7)
    assert pruner.steps_done == STEPS
    assert zeros(pruner.finish().model) == TOTAL - KEPT
    assert pp.error(model, (X, Y)) < 0.5


def test_a_scaler_that_the_pruner_does_not_know_is_noticed() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model)
    scaler.scale(loss_of(model, X, Y)).backward()
    with pytest.raises(ValueError, match=r"a GradScaler scales .* pp\.Pruner\(\.\.\., scaler=scaler\)"):
        scaler.step(optimizer)
    assert pruner.steps_done == 0


def test_autocast() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS), sgd(model)
    for ((x, y),) in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    assert zeros(pruner.finish().model) == TOTAL - KEPT
    assert pp.error(model, (X, Y)) < 0.6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", CARRIED)
@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_on_a_gpu(method: str, fused: bool) -> None:
    model, scaler = net().cuda(), torch.amp.GradScaler("cuda")
    pruner, optimizer = (
        pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method, scaler=scaler),
        sgd(model, fused=fused),
    )
    for ((x, y),) in batches():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model, x.cuda(), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pruner.step()
    result = pruner.finish()
    assert sum(int(keep.sum()) for keep in result.mask.values()) == KEPT
    assert zeros(result.model) >= TOTAL - KEPT
    assert pp.error(model, (X, Y)) < 0.6


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.body[:2], self.body[2:]
        return checkpoint(last, first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    first, second = net(), net()
    pruned_in_a_loop(first)
    pruned_in_a_loop(Checkpointed(second, reentrant))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_torch_compile() -> None:
    first, second = net(), net()
    pruned_in_a_loop(first)
    result = pruned_in_a_loop(torch.compile(second, backend="aot_eager"))
    assert result.model is second
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_average_of_weights_is_that_of_the_network() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS), sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    mean = [p.detach().clone() for p in model.parameters()]
    for ((x, y),) in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        average.update_parameters(model)  # before pruner.step(), as it may come
        optimizer.zero_grad()
        pruner.step()
        first = int(average.n_averaged) == 1
        mean = [
            p.detach().clone() if first else m.lerp(p.detach(), 0.5)
            for m, p in zip(mean, model.parameters(), strict=True)
        ]
        for a, b in zip(average.parameters(), mean, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    result = pruner.finish()
    pp.apply_mask(average.module, result.mask)  # weights that were kept at some time are not zero in a mean
    assert zeros(average.module) == TOTAL - KEPT
    assert pp.error(average.module, (X, Y)) < 0.6


def test_a_closure_is_called_on_the_network() -> None:
    first, second = net(), net()
    pruned_in_a_loop(first)
    pruner, optimizer = pp.Pruner(second, sparsity=0.8, steps=STEPS), sgd(second)
    for number, ((x, y),) in enumerate(batches()):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(second, x, y)
            loss.backward()
            return loss

        assert (optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)) is not None
        pruner.step()
    pruner.finish()
    assert equal(first, second)


@pytest.mark.parametrize("method", ["pft", "osp"])
def test_lbfgs(method: str) -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=4, method=method)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    counts = []
    for _ in range(4):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, X, Y)
            loss.backward()
            counts.append(zeros(model))
            return loss

        optimizer.step(closure)
        pruner.step()
    assert zeros(pruner.finish().model) == TOTAL - KEPT
    assert method == "pft" or set(counts) == {TOTAL - KEPT}


@pytest.mark.parametrize("method", CARRIED)
def test_optimisers_of_one_step_have_one_mask(method: str) -> None:
    model, twin = net(), net()
    by_verb(method, twin)
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method)
    optimizers = [sgd(model[:2]), sgd(model[2:])]
    for number, ((x, y),) in enumerate(batches()):
        loss_of(model, x, y).backward()
        for optimizer in optimizers[:: 1 if number % 2 else -1]:
            optimizer.step()
            optimizer.zero_grad()
            assert pp.sparsity(model) <= 0.8 + 1e-3
            loss_of(model, x, y)  # an evaluation, which changes nothing
        if number % 2:
            pruner.state_dict()  # neither does that
        pruner.step()
        assert pruner.steps_done == number + 1
    assert equal(pruner.finish().model, twin)


@pytest.mark.parametrize("method", MOVING)
def test_a_step_without_one_of_two_optimisers(method: str) -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method)
    optimizers = [sgd(model[:2]), sgd(model[2:])]
    for number in range(STEPS):
        loss_of(model, X, Y).backward()
        for optimizer in optimizers[: 1 if number % 2 else 2]:
            optimizer.step()
        before = pruner.sparsity
        if number % 2:
            assert pruner.steps_done == number
        model.zero_grad()
        if number < STEPS - 1:
            pruner.step()
        assert pruner.sparsity >= before
    assert zeros(pruner.finish().model) == TOTAL - KEPT
    assert pruner.steps_done == STEPS


@pytest.mark.parametrize("method", CARRIED)
def test_a_step_that_one_of_two_pruners_refuses(method: str) -> None:
    models = [net(seed) for seed in range(3)]
    pruners = [pp.Pruner(model, sparsity=0.8, steps=4 - k, method=method) for k, model in enumerate(models[:2])]
    pp.apply_mask(models[2], pp.top_k(pp.scores.magnitude(models[2]), sparsity=0.8))
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
    pp.keep_zeros(models[2], optimizer)
    for _ in range(3):
        torch.stack([loss_of(model, X, Y) for model in models]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for pruner in pruners:
            pruner.step()
    before = copy.deepcopy(models)
    torch.stack([loss_of(model, X, Y) for model in models]).sum().backward()
    refused("the pruner was made for 3 steps, and this is one more", optimizer.step)
    assert all(equal(model, copied) for model, copied in zip(models, before, strict=True))
    optimizer.zero_grad()
    pruners[1].finish()
    loss_of(models[0], X, Y).backward()
    optimizer.step()
    pruners[0].step()
    assert zeros(pruners[0].finish().model) == TOTAL - KEPT


def test_two_optimisers_share_the_weights() -> None:
    model = net()
    optimizers = [sgd(model[:2]), torch.optim.AdamW(model[2:].parameters(), lr=0.01)]  # made before the pruner
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS)
    for ((x, y),) in batches():
        loss_of(model, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pruner.step()
    assert zeros(pruner.finish().model) == TOTAL - KEPT
    assert pp.error(model, (X, Y)) < 0.6


def test_an_optimiser_of_something_else_is_left_alone() -> None:
    model, other = net(), net(1)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=3), sgd(other)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(other, X, Y).backward()
    optimizer.step()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert pruner.steps_done == 0


# --- The network at every moment.


@pytest.mark.parametrize("method", MOVING)
def test_the_network_has_its_zeros_outside_of_the_optimisers_step(method: str) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method), sgd(model)
    inside: list[int] = []
    optimizer.register_step_post_hook(lambda *_: inside.append(zeros(model)))
    sparsities = []
    for ((x, y),) in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        after = pruner.sparsity
        optimizer.zero_grad()
        pruner.step()
        assert pruner.sparsity == after == pp.sparsity(model)
        sparsities.append(after)
    assert sparsities[-1] == pytest.approx(0.8, abs=1e-3)
    assert sparsities == sorted(sparsities)
    if method in ("pft", "feather"):
        assert set(inside) == {0}
    assert [name for name, _ in model.named_parameters()] == list(dict(net().named_parameters()))


def test_a_final_mask_stays_and_dead_weights_have_no_state() -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, mask_share=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    masks = []
    for ((x, y),) in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        masks.append(torch.cat([(w != 0).flatten() for w in pp.prunable(model).values()]))
    assert all(torch.equal(mask, masks[-1]) for mask in masks[STEPS // 2 :])
    result = pruner.finish()
    for name, keep in result.mask.items():
        state = optimizer.state[model.get_parameter(name)]
        assert not (state["exp_avg"] * ~keep).any()
        assert not (state["exp_avg_sq"] * ~keep).any()


def test_every_optimiser_forgets_dead_weights() -> None:
    model = net()
    optimizers = [sgd(model[:2]), sgd(model[2:])]
    loss_of(model, X, Y).backward()
    for optimizer in optimizers:
        optimizer.step()  # which gathers momentum for all weights
    pruner = pp.Pruner(model, sparsity=0.8, steps=2, method="osp")
    loss_of(model, X, Y).backward()
    for optimizer in optimizers:
        optimizer.step()
    pruner.step()
    for weight in pp.prunable(model).values():
        state = next(optimizer.state[weight] for optimizer in optimizers if weight in optimizer.state)
        assert not state["momentum_buffer"][weight == 0].any()
        assert state["momentum_buffer"].any()


def test_a_pruner_says_where_it_stands() -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method="gmp")
    assert repr(pruner) == "Pruner(Sequential, gmp, step 0 of 36, sparsity 0.0000 of 0.8)"
    pruner = pp.Pruner(net(), sparsity=0.75, steps=STEPS, method="osp", include="0.*")
    share = 360 / TOTAL
    words = f"sparsity {share:.4f} of {share:g}, sparsity 0.7500 of 0.75 of the 480 selected"
    assert repr(pruner) == f"Pruner(Sequential, osp, step 0 of 36, {words})"


def test_the_digits_are_learned_as_by_pft() -> None:
    split = pp.data.digits(seed=0)
    x, y = split.train.x, split.train.y
    first, second = pp.models.mlp(64, hidden=[48], seed=0), pp.models.mlp(64, hidden=[48], seed=1)
    pp.pft(first, (x, y), pp.Config(epochs=12, lr=0.1), sparsity=0.95)
    generator = torch.Generator().manual_seed(5)
    pruner = pp.Pruner(second, sparsity=0.95, steps=12 * 11)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    for _ in range(12):
        for index in torch.randperm(len(x), generator=generator)[: 11 * 128].split(128):
            loss_of(second, x[index], y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()
    second = pruner.finish().model
    errors = [pp.error(model, split.test) for model in (first, second.eval())]
    # Of 360 images: three standard deviations of the difference of two shares of one in twelve.
    assert abs(errors[0] - errors[1]) < 3 * (2 * 0.08 * 0.92 / 360) ** 0.5
    assert max(errors) < 0.15


# --- Runs that go on.


@pytest.mark.parametrize(
    ("method", "options"),
    [*((name, {}) for name in CARRIED), ("pft", {"criterion": "random"}), ("pft", {"mask_share": 0.4})],
    ids=str,
)
@pytest.mark.parametrize("stop", [7, 23, STEPS])
def test_a_run_that_goes_on_ends_the_same(method: str, options: dict[str, Any], stop: int) -> None:
    def new() -> tuple[nn.Module, pp.Pruner, torch.optim.Optimizer]:
        model = net()
        pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method, **options)
        return model, pruner, sgd(model)

    def train(model: nn.Module, pruner: pp.Pruner, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
        for ((x, y),) in list(batches())[first:end]:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()

    whole, pruner, optimizer = new()
    train(whole, pruner, optimizer, 0, stop)
    shown = copy.deepcopy(whole.state_dict())
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict(), pruner.state_dict()], file)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in shown.items())  # looking changes nothing
    train(whole, pruner, optimizer, stop, STEPS)
    pruner.finish()

    model, pruner, optimizer = new()
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for owner, state in zip((model, optimizer, pruner), states, strict=True):
        owner.load_state_dict(state)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in shown.items())
    train(model, pruner, optimizer, stop, STEPS)
    pruner.finish()
    assert equal(whole, model)


def test_a_state_of_another_pruner_is_refused() -> None:
    state = pp.Pruner(net(), sparsity=0.8, steps=9).state_dict()
    with pytest.raises(ValueError, match="the state has steps 9, this pruner 8; make it like the first one"):
        pp.Pruner(net(), sparsity=0.8, steps=8).load_state_dict(state)
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=9), sgd(model)
    loss_of(model, X, Y).backward()
    optimizer.step()
    pruner.step()
    with pytest.raises(ValueError, match="this pruner has taken 1 steps; load the state into a new one"):
        pruner.load_state_dict(state)


@pytest.mark.parametrize("method", CARRIED)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_states_are_loaded_in_any_order(method: str, order: Sequence[int]) -> None:
    def new(seed: int) -> list[Any]:
        model = normalised(seed)
        return [model, sgd(model), pp.Pruner(model, sparsity=0.8, steps=6, method=method)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: pp.Pruner) -> None:
        for _ in range(3):
            one_step(model, optimizer)
            pruner.step()

    whole, model = new(0), new(1)
    train(*whole)
    states = [copy.deepcopy(owner.state_dict()) for owner in whole]
    train(*whole)
    for place in order:
        model[place].load_state_dict(states[place])
    train(*model)
    assert equal(whole[2].finish().model, model[2].finish().model)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_model_whose_state_was_not_loaded_is_refused(stop: int) -> None:
    model = normalised(0)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=4), sgd(model)
    for _ in range(stop):
        one_step(model, optimizer)
        pruner.step()
    states = [copy.deepcopy(owner.state_dict()) for owner in (model, optimizer, pruner)]
    model = normalised(0)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=4), sgd(model)
    optimizer.load_state_dict(states[1])
    pruner.load_state_dict(states[2])
    words = f"goes on from its state after step {stop}, but biases or other parameters .*; load the model's state dict"
    for _ in range(2):  # also when it is tried again
        refused(words, pruner.finish if stop == 4 else lambda: one_step(model, optimizer))
    model.load_state_dict(states[0])
    if stop == 4:
        pruner.finish()
    else:
        one_step(model, optimizer)


def half_pruned(method: str, stop: int, make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """The states of model and optimiser after so many steps of 20, without that of the pruner."""
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=20, method=method), make(model)
    for _ in range(stop):
        one_step(model, optimizer)
        pruner.step()
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


BEGINS_AGAIN = (
    "has taken steps before and .* zero without a mask, but the pruner begins at step 0 of 20; .*load_state_dict"
)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("stop", [4, 12])
@pytest.mark.parametrize("method", MOVING)
def test_a_run_that_goes_on_without_the_state_of_its_pruner_warns(
    method: str, stop: int, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    weights_then, optimizer_then = half_pruned(method, stop + 6 * (method == "gmp"), make)
    for loaded_late in (False, True):
        model = net()
        late = pp.Pruner(model, sparsity=0.8, steps=20, method=method) if loaded_late else None
        model.load_state_dict(weights_then)
        pruner = late or pp.Pruner(model, sparsity=0.8, steps=20, method=method)
        optimizer = make(model)
        optimizer.load_state_dict(optimizer_then)
        with pytest.warns(UserWarning, match=BEGINS_AGAIN) as record:
            one_step(model, optimizer)
        assert len(record) == 1
        pruner.step()
        one_step(model, optimizer)  # warnings are errors: it is said once


@pytest.mark.parametrize("method", CARRIED)
def test_older_zeros_and_dense_training_before_a_pruner_do_not_warn(method: str) -> None:
    weights_then, optimizer_then = half_pruned("pft", 12, sgd)
    dense, sparse, noted = net(), net(), net()
    dense_optimizer = sgd(dense)
    one_step(dense, dense_optimizer)
    sparse.load_state_dict(weights_then)
    noted.load_state_dict(weights_then)
    pp.apply_mask(noted, {name: weight != 0 for name, weight in pp.prunable(noted).items()})
    noted_optimizer = sgd(noted)
    noted_optimizer.load_state_dict(optimizer_then)
    for model, optimizer in ((dense, dense_optimizer), (sparse, sgd(sparse)), (noted, noted_optimizer)):
        pruner = pp.Pruner(model, sparsity=0.9, steps=20, method=method)
        one_step(model, optimizer)
        pruner.step()


def test_an_early_end_names_a_state_that_was_not_loaded() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=60), sgd(model)
    for _ in range(29):
        one_step(model, optimizer)
        pruner.step()
    refused(r"after 29 of 60 steps, but sparsity 0\.8 is reached after 30; .*pruner\.load_state_dict", pruner.finish)


# --- Weights that something else changes.

HIDING = ["pft", "feather", "dpf"]
"""Methods that train other weights than those of the network."""


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model, X, Y).backward()
    optimizer.step()


def normalised(seed: int) -> nn.Sequential:
    model = net(seed)
    model.insert(1, nn.BatchNorm1d(24))
    return model


@pytest.mark.parametrize("method", ["gmp", *HIDING])
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_are_loaded_after_the_pruner_was_made(method: str, compiled: bool) -> None:
    first, second = net(1), net(0)
    pruned_in_a_loop(first, method=method)
    network = torch.compile(second, backend="aot_eager") if compiled else second
    pruner, optimizer = pp.Pruner(network, sparsity=0.8, steps=STEPS, method=method), sgd(second)
    second.load_state_dict(net(1).state_dict())
    for ((x, y),) in batches():
        loss_of(network, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    pruner.finish()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4 if compiled else 0, atol=1e-5 if compiled else 0)


@pytest.mark.parametrize("method", HIDING)
def test_a_state_has_the_weights_that_were_loaded(method: str) -> None:
    model = net(0)
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method)
    model.load_state_dict(net(1).state_dict())
    state = pruner.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(state["weights"], pp.prunable(net(1)).values(), strict=True))
    assert equal(model, net(1))


@pytest.mark.parametrize("options", [{"criterion": "random"}, {"method": "osp"}], ids=str)
def test_weights_that_are_loaded_after_they_were_scored(options: dict[str, Any]) -> None:
    model = net(0)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5, **options), sgd(model)
    model.load_state_dict(net(1).state_dict())
    refused("has changed 0.weight after step 0 of the pruner", lambda: one_step(model, optimizer))
    assert pruner.steps_done == 0


@pytest.mark.parametrize("method", HIDING)
def test_weights_that_are_changed_between_steps_are_refused(method: str) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5, method=method), sgd(model)
    one_step(model, optimizer)
    pruner.step()
    with torch.no_grad():
        model[4].weight.clamp_(-0.05, 0.05)
    words = r"other than an optimiser has changed 4\.weight after step 1 of the pruner, .*register_step_post_hook"
    for act in (pruner.step, pruner.state_dict, lambda: loss_of(model, X, Y).backward(), optimizer.step):
        refused(words, act)


@pytest.mark.parametrize("method", CARRIED)
def test_weights_are_changed_in_a_hook_of_the_optimiser(method: str) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5, method=method), sgd(model)

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        model[4].weight.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    for _ in range(5):
        one_step(model, optimizer)
        pruner.step()
        assert 0 < model[4].weight.abs().max() <= 0.2
    pruner.finish()


@pytest.mark.parametrize("method", [*HIDING, "osp"])
@pytest.mark.parametrize("late", [False, True])
def test_writes_through_data_are_noticed(method: str, late: bool) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=3, method=method), sgd(model)
    loss_of(model, X, Y).backward()
    optimizer.step()
    if late:
        pruner.step()
    model[2].weight.data.add_(1.0)  # which revives what is pruned
    refused(r"something other than an optimiser has changed 2\.weight", optimizer.step if late else pruner.step)


@pytest.mark.parametrize("method", HIDING)
def test_writes_through_data_before_the_first_step_count(method: str) -> None:
    model, twin = net(), net(1)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method), sgd(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.data.copy_(other.data)
    for ((x, y),) in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    by_verb(method, twin)
    assert equal(pruner.finish().model, twin)


@pytest.mark.parametrize("method", ["gmp", "osp"])
def test_a_method_that_trains_the_weights_of_the_network_takes_changes(method: str) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5, method=method), sgd(model)
    for _ in range(5):
        one_step(model, optimizer)
        with torch.no_grad():
            model[4].weight.clamp_(-0.05, 0.05)
        pruner.step()
    with torch.no_grad():
        model[4].weight.fill_(1)
    refused("has changed 4.weight after step 5", pruner.finish)  # which revives pruned weights


@pytest.mark.parametrize("method", CARRIED)
def test_averages_that_are_swapped_in_and_out_again(method: str) -> None:
    first, second = net(), net()
    pruned_in_a_loop(first, method=method)
    pruner, optimizer = pp.Pruner(second, sparsity=0.8, steps=STEPS, method=method), sgd(second)
    for ((x, y),) in batches():
        loss_of(second, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = copy.deepcopy(second.state_dict())
        second.load_state_dict(net(1).state_dict())
        second.load_state_dict(kept)
        pruner.step()
    pruner.finish()
    assert equal(first, second)


# --- What is refused, and what is let go.


def refused(match: str, act: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=match) as error:
        act()
    assert "\n" not in str(error.value)


def test_frozen_weights_that_make_the_sparsity_another_one_warn() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    words = "480 of the 944 weights are frozen and left alone, so that sparsity 0.9 of the others is 0.4428 of all"
    with pytest.warns(UserWarning, match=words) as record:
        pruner = pp.Pruner(model, sparsity=0.9, steps=3)
    assert len(record) == 1
    assert pruner.final_sparsity == pytest.approx(0.4428, abs=1e-4)
    del pruner
    for options in ({"exclude": "0"}, {"include": ["2", "4"]}, {"include": "*"}, {"sparsity": {"2": 0.9}}):
        pp.Pruner(model, **{"sparsity": 0.9, "steps": 3, **options})


def test_what_is_no_network_gets_one_sentence() -> None:
    begin: Any = pp.Pruner
    refused("the model is of type list and not a torch.nn.Module; give a network", lambda: begin([1], steps=3))
    states = net().state_dict()
    for act in (lambda: begin(states, sparsity=0.9, steps=3), lambda: pp.pft(states, (X, Y), CONFIG, sparsity=0.9)):
        refused("of type OrderedDict and not a torch.nn.Module; call load_state_dict of a network", act)


def test_requests_that_cannot_be_met() -> None:
    model = net()
    attached = pp.attach(net(), pp.isotropic(net(), sparsity=0.5))
    refused("has a stochastic mask", lambda: pp.Pruner(attached, sparsity=0.8, steps=3))
    refused("has nothing to prune", lambda: pp.Pruner(nn.BatchNorm1d(3), sparsity=0.8, steps=3))
    refused("steps is 0; it must be a whole number of at least 1", lambda: pp.Pruner(model, sparsity=0.8, steps=0))
    refused("steps is 2.5; it must be", lambda: pp.Pruner(model, sparsity=0.8, steps=2.5))  # type: ignore[arg-type]
    refused("neither a sparsity nor a pattern", lambda: pp.Pruner(model, steps=3))
    refused("method 'best' is unknown; use one of osp", lambda: pp.Pruner(model, sparsity=0.8, steps=3, method="best"))
    refused("imp trains in a loop of its own: pp.imp", lambda: pp.Pruner(model, sparsity=0.8, steps=3, method="imp"))
    refused(
        "criterion is 'snip', .* gmp", lambda: pp.Pruner(model, sparsity=0.8, steps=3, method="gmp", criterion="snip")
    )
    refused("gate_lr is 1.0, .* gmp", lambda: pp.Pruner(model, sparsity=0.8, steps=3, method="gmp", gate_lr=1.0))
    refused("mask_share is 0.5, .* osp", lambda: pp.Pruner(model, sparsity=0.8, steps=3, method="osp", mask_share=0.5))
    refused("the criterion snip reads data", lambda: pp.Pruner(model, sparsity=0.8, steps=3, criterion="snip"))
    refused("mask_share is 2", lambda: pp.Pruner(model, sparsity=0.8, steps=3, mask_share=2.0))
    pp.Pruner(model, sparsity=0.8, steps=3, criterion="snip", data=(X, Y))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_get_one_sentence(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(30, 8, sparse=True), nn.Flatten(), nn.Linear(8, 5))
    x, y = torch.arange(30)[:, None], torch.arange(30) % 5
    line = f"0.weight gets sparse gradients; make its {kind.__name__} with sparse=False, or leave it out by exclude="
    refused(line, lambda: pp.Pruner(model, sparsity=0.5, steps=3))
    assert not weights.masked(model)
    refused(line.partition(",")[0], lambda: pp.pft(model, (x, y), pp.Config(epochs=1), sparsity=0.5))
    weights.apply_mask(model, None)
    pruner = pp.Pruner(model, sparsity=0.5, steps=1, exclude="0.*")
    loss_of(model, x, y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    pruner.step()
    assert zeros(pruner.finish().model) == 20


def test_a_criterion_of_ones_own_needs_no_data() -> None:
    model = net()
    pruner = pp.Pruner(
        model,
        sparsity=0.8,
        steps=1,
        method="osp",
        criterion=lambda model, data: {name: -w.detach().abs() for name, w in pp.prunable(model).items()},
    )
    kept = torch.cat([w[w != 0].abs() for w in pp.prunable(model).values()])
    assert kept.max() < torch.cat([w.abs().flatten() for w in pp.prunable(net()).values()]).median()
    assert pruner.sparsity == pytest.approx(0.8, abs=1e-3)


def test_steps_that_do_not_fit_together() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=2), sgd(model)
    refused("no optimiser has moved the pruner's weights since its step 0", pruner.step)
    refused("finish comes after 0 of 2 steps, but sparsity 0.8 is reached after 1; take them all", pruner.finish)
    loss_of(model, X, Y).backward()
    optimizer.step()
    refused("the SGD takes a second step after step 1 of the pruner; call pruner.step", optimizer.step)
    pruner.step()
    optimizer.step()
    pruner.step()
    refused("the pruner was made for 2 steps, and this is one more", optimizer.step)
    assert pruner.finish() is pruner.finish()
    refused(r"step comes after finish, .* Sequential; leave it out, and call pp\.keep_zeros", pruner.step)
    optimizer.step()  # let go


def test_an_early_end_is_one_after_the_schedule() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=10), sgd(model)
    for number in range(6):
        loss_of(model, X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        if number < 4:
            refused("finish comes after", pruner.finish)
    assert zeros(pruner.finish().model) == TOTAL - KEPT


def test_a_model_that_changes_under_the_pruner() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model)
    refused("a Pruner moves the mask of this Sequential", lambda: pp.Pruner(model, sparsity=0.5, steps=5))
    refused("a Pruner moves the mask", lambda: pp.fit(model, (X, Y), pp.Config(epochs=1)))
    refused("a Pruner moves the mask", lambda: pp.osp(model, (X, Y), pp.Config(epochs=1), sparsity=0.5))
    refused("a Pruner moves the mask", lambda: pp.keep_zeros(model, optimizer))
    pp.fit(copy.deepcopy(model), (X, Y), pp.Config(epochs=1))
    loss_of(model, X, Y).backward()
    kept = model[2].weight
    model[2].weight = nn.Parameter(kept.detach().clone())
    refused("2.weight is another parameter than when the pruner was made", optimizer.step)
    model[2].weight = kept
    pp.apply_mask(model, {"0.weight": torch.ones_like(model[0].weight, dtype=torch.bool)})
    refused("the model has another mask than that of its pruner", optimizer.step)
    assert pruner.steps_done == 0


@pytest.mark.parametrize("method", CARRIED)
def test_a_layer_that_is_replaced_is_noticed_at_the_next_call(method: str) -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=2, method=method), sgd(model)
    whole = model[4]
    for _ in range(2):
        one_step(model, optimizer)
        model[4] = nn.Linear(16, 5)
        refused("4.weight is another parameter than when the pruner was made", pruner.step)
        model[4] = nn.Identity()
        refused("4.weight is another parameter than when the pruner was made", pruner.step)
        model[4] = whole
        pruner.step()
    model[4] = nn.Linear(16, 5)
    refused("4.weight is another parameter than when the pruner was made", pruner.finish)
    model[4] = whole
    pruner.finish()


def test_a_pruner_that_is_given_up_on_its_way_says_so() -> None:
    def after(steps: int, **options: Any) -> pp.Pruner:
        model = net()
        pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=4, **options), sgd(model)
        for _ in range(steps):
            one_step(model, optimizer)
            pruner.step()
        return pruner

    with pytest.warns(UserWarning, match=r"given up after 1 of 4 steps, .* not pruned to sparsity 0.8; hold it until"):
        after(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after(0)
        after(4)  # pruned for good
        after(1, method="osp")
        after(3, mask_share=0.5)  # its mask stays
        after(2).state_dict()  # to go on from
        with pytest.raises(ValueError, match="finish comes after 1 of 4 steps"):
            after(1).finish()


def test_weights_that_move_to_other_memory() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model)
    model.double()
    refused("0.weight has moved to other memory", optimizer.step)
    assert pruner.steps_done == 0


def test_weights_that_no_optimiser_has() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model[:2])
    loss_of(model, X, Y).backward()
    optimizer.step()
    refused("2.weight is to be pruned, but no optimiser that took a step has it", pruner.step)


def test_a_loss_that_is_not_finite() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=5), sgd(model)
    (loss_of(model, X, Y) * torch.nan).backward()
    refused("0.weight has NaN or infinite weights after step 1 of 5; use a smaller learning rate", optimizer.step)
    assert pruner.steps_done == 0


def test_a_pruner_that_nobody_holds_lets_go() -> None:
    from torch.optim import optimizer as torch_optimizer

    hooks = torch_optimizer._global_optimizer_pre_hooks
    gc.collect()
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=5)
    before = len(hooks)
    del pruner
    pruner = pp.Pruner(model, sparsity=0.8, steps=5)
    assert len(hooks) == before  # those of the first one are gone when the second is made
    del pruner
    pp.Pruner(model, sparsity=0.8, steps=5)


def test_what_a_loop_trained_on_is_not_known_to_a_certificate() -> None:
    split = pp.data.digits(prior_fraction=0.5, seed=0)
    model = pp.models.mlp(64, hidden=[16])
    pp.fit(model, split.prior, pp.Config(epochs=1))
    pp.certify_held_out(model, split, delta=0.05)
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=2), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(model, split.bound.x, split.bound.y).backward()
        optimizer.step()
        pruner.step()
    pruner.finish()
    with pytest.raises(ValueError, match="something other than pacprune"):
        pp.certify_held_out(model, split, delta=0.05)


# --- What an attack found.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_offsets_do_not_depend_on_how_weights_lie_in_memory(dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y
    models = []
    for transposed in (False, True):
        model = net().to(dtype)
        for module in model.modules():
            if transposed and isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.T.contiguous().T
        pp.pft(model, (x, y), pp.Config(epochs=1, lr=0.05, batch_size=32), sparsity=0.8)
        models.append(model)
    for plain, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["pft", "feather", "dpf"])
def test_a_copy_made_on_the_way_keeps_its_zeros(method: str) -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=20, method=method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(15):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    twin = copy.deepcopy(model)
    before = pp.sparsity(twin)
    pp.fit(twin, (X, Y), pp.Config(epochs=1, lr=0.05))
    assert pp.sparsity(twin) >= before > 0.7


def test_gradients_that_were_thrown_away_move_no_offsets() -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    F.cross_entropy(model(X), Y).backward()
    optimizer.zero_grad()
    optimizer.step()
    pruner.step()
    assert all(not p.detach().any() for p in weights.learned(model).values())


@pytest.mark.parametrize(
    "options", [{"mask_share": 0.5}, {"criterion": "random"}, {"min_per_layer": 3}, {"gate_lr": None}]
)
def test_a_state_of_other_options_is_refused(options: dict[str, Any]) -> None:
    state = pp.Pruner(net(), sparsity=0.8, steps=20).state_dict()
    with pytest.raises(ValueError, match="make it like the first one"):
        pp.Pruner(net(), sparsity=0.8, steps=20, **options).load_state_dict(state)


@pytest.mark.parametrize("method", MOVING)
def test_gradients_that_are_copied_into_existing_ones_train_the_same(method: str) -> None:
    """torch.autograd.grad leaves .grad alone, which still holds the zeros of the step before."""
    models = net(), net()
    for model, copies in zip(models, (False, True), strict=True):
        pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method), sgd(model)
        for ((x, y),) in batches():
            loss = loss_of(model, x, y)
            if copies:
                parameters = list(model.parameters())
                for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = gradient.clone() if p.grad is None else p.grad.copy_(gradient)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            pruner.step()
        pruner.finish()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["pft", "feather"])
def test_no_kept_weight_is_shrunk_to_zero_in_few_bits(method: str, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    with torch.no_grad():
        for weight in pp.prunable(model).values():
            weight.mul_(1e-4)
    pruner, optimizer = pp.Pruner(model, sparsity=0.5, steps=12, method=method), torch.optim.SGD(model.parameters(), 0)
    for ((x, y),) in itertools.islice(batches(), 12):
        loss_of(model, x.to(dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    kept = sum(int(keep.sum()) for keep in pruner.finish().mask.values())
    assert sum(int((weight != 0).sum()) for weight in pp.prunable(model).values()) == kept


@pytest.mark.parametrize("method", CARRIED)
def test_an_optimiser_that_steps_inside_of_a_backward_pass_is_refused(method: str) -> None:
    model = net()
    pruner = pp.Pruner(model, sparsity=0.8, steps=STEPS, method=method)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(ValueError, match=r"takes a step inside of a backward pass.*call optimizer\.step"):
        loss_of(model, X, Y).backward()
    assert pruner.steps_done == 0


def test_a_state_that_is_loaded_into_an_optimiser_forgets_what_the_final_mask_prunes() -> None:
    model = net()
    pruner, optimizer = pp.Pruner(model, sparsity=0.8, steps=STEPS, method="gmp"), sgd(model)
    for step, ((x, y),) in enumerate(batches()):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
        elif step == STEPS - 3:
            optimizer.load_state_dict(state)
    mask = pruner.finish().mask
    for name, keep in mask.items():
        assert not optimizer.state[model.get_parameter(name)]["momentum_buffer"][~keep].any()
