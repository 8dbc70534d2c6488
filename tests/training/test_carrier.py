"""Zeros stay zero in a loop of one's own, under any optimiser; and what happens to them without that is said."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pacprune as pp
from pacprune.masking import weights

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 20, generator=G), torch.arange(64) % 5
TOTAL = 20 * 16 + 16 * 5
ZEROS = TOTAL - round(0.1 * TOTAL)


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))


def masked(sparsity: float = 0.9) -> nn.Sequential:
    model = net()
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity))
    return model


def hardened() -> nn.Sequential:
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    pp.harden(model, pp.top_k(pp.scores.magnitude(net()), sparsity=0.9))
    return model


def finished() -> nn.Sequential:
    model = net()
    pp.Pruner(model, sparsity=0.9, steps=1, method="osp").finish()
    return model


def loaded() -> nn.Sequential:
    model = net(1)
    model.load_state_dict(masked().state_dict())
    return model


def zeros(model: nn.Module) -> int:
    return sum(int((w == 0).sum()) for w in pp.prunable(model).values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[int]:
    """Trains in a plain loop; returns the zeros that every forward pass had."""
    counts, x, y = [], X.to(model[0].weight.device), Y.to(model[0].weight.device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        counts.append(zeros(model))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [*counts, zeros(model)]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5),
    "lbfgs wolfe": lambda params: torch.optim.LBFGS(params, max_iter=5, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_zeros_stay_zero_under_every_optimiser(name: str) -> None:
    model, free = masked(), masked()
    optimizer = MAKERS[name](model.parameters())
    pp.keep_zeros(model, optimizer)
    assert set(train(model, optimizer)) == {ZEROS}
    assert pp.sparsity(model) == ZEROS / TOTAL
    assert train(free, MAKERS[name](free.parameters()))[-1] < ZEROS  # what would be without it
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), masked().parameters(), strict=True))


@GPU
@pytest.mark.parametrize("graph", [False, True])
def test_zeros_stay_zero_under_a_capturable_optimiser(graph: bool) -> None:
    model = masked().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, capturable=True)
    pp.keep_zeros(model, optimizer)
    x, y = X.cuda(), Y.cuda()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        for _ in range(3):
            recorded.replay()
    assert zeros(model) == ZEROS


@pytest.mark.parametrize("start", [masked, hardened, finished, loaded], ids=lambda start: start.__name__)
def test_whatever_made_the_zeros(start: Callable[[], nn.Sequential]) -> None:
    model = start()
    optimizer = MAKERS["adamw"](model.parameters())
    pp.keep_zeros(model, optimizer)
    assert set(train(model, optimizer)) == {ZEROS}


def test_it_may_come_late_and_end_again() -> None:
    model = net()
    optimizer = MAKERS["sgd"](model.parameters())
    train(model, optimizer)  # gathers momentum for all weights
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.9)
    pp.apply_mask(model, mask)
    handle = pp.keep_zeros(model, optimizer)
    for name, keep in mask.items():
        assert not optimizer.state[model.get_parameter(name)]["momentum_buffer"][~keep].any()
    assert set(train(model, optimizer)) == {ZEROS}
    assert repr(handle) == "Carrier(Sequential, 360 of 400 weights stay zero)"
    handle.remove()
    assert repr(handle) == "Carrier(Sequential, removed)"
    assert train(model, optimizer)[-1] < ZEROS


def test_gradients_of_pruned_weights_do_not_count_in_a_norm() -> None:
    model = masked()
    optimizer = MAKERS["sgd"](model.parameters())
    pp.keep_zeros(model, optimizer)
    F.cross_entropy(model(X), Y).backward()
    for weight, keep in weights.masked(model):
        assert weight.grad is not None
        assert not weight.grad[~keep].any()
        assert weight.grad[keep].any()


def test_fit_goes_on_from_there() -> None:
    model, other = masked(), masked()
    optimizer = MAKERS["sgd"](model.parameters())
    pp.keep_zeros(model, optimizer)
    for trained in (model, other):
        pp.fit(trained, (X, Y), pp.Config(epochs=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_kept_is_refused() -> None:
    model = net()
    with pytest.raises(ValueError, match="Sequential has no zeros to keep among its 400 weights; prune it first"):
        pp.keep_zeros(model, MAKERS["sgd"](model.parameters()))
    with pytest.raises(ValueError, match=r"the SGD moves none of the pruned weights \(0.weight, 2.weight\)"):
        pp.keep_zeros(masked(), MAKERS["sgd"](model.parameters()))
    model = masked()
    optimizer = MAKERS["sgd"](model.parameters())
    train(model, optimizer)
    with pytest.raises(ValueError, match="of 360 pruned weights are no longer zero, so that there is nothing to keep"):
        pp.keep_zeros(model, optimizer)
    model = masked()
    optimizer = MAKERS["sgd"](model.parameters())
    pp.keep_zeros(model, optimizer)
    model.double()
    with pytest.raises(ValueError, match=r"0\.weight has moved to other memory"):
        optimizer.step()


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "sparsity": pp.sparsity,
    "error": lambda model: pp.error(model, (X, Y)),
    "errors": lambda model: pp.error([model, copy.deepcopy(model)], (X, Y)),
    "fit": lambda model: pp.fit(model, (X, Y), pp.Config(epochs=1)),
    "osp": lambda model: pp.osp(model, (X, Y), pp.Config(epochs=1), sparsity=0.95),
    "save": lambda model: pp.export.save("net.safetensors", model),
    "dense": lambda model: pp.export.save_dense("net.safetensors", model),
    "slim": lambda model: pp.slim.slim(model, X),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_pruned_weight_that_moves_is_noticed(look: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = masked()
    train(model, MAKERS["adamw"](model.parameters()))
    with pytest.warns(UserWarning, match=r"of 360 pruned weights are no longer zero, .* pp\.keep_zeros"):
        LOOKS[look](model)


def test_a_mask_that_is_taken_off_is_not_missed() -> None:
    model = masked()
    train(model, MAKERS["adamw"](model.parameters()))
    pp.apply_mask(model, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pp.sparsity(model) < 0.9


def test_a_carrier_that_is_collected_during_a_step_of_another_optimiser_does_no_harm() -> None:
    """Torch goes through its hooks at that moment."""
    model, other = masked(), masked()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    pruners: list[pp.Pruner] = []

    def collect(*_: Any) -> None:
        pruners.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)  # before those of the pruner
    pruners.append(pp.Pruner(copy.deepcopy(model), sparsity=0.95, steps=3))
    try:
        F.cross_entropy(other(X), Y).backward()
        optimizer.step()
    finally:
        handle.remove()
    assert not pruners


def prune(model: nn.Sequential, optimizer: torch.optim.Optimizer, by: str) -> None:
    """Prunes a network on to a sparsity of 0.95, while something keeps the zeros that it had."""
    if by == "mask":
        pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.95))
    elif by == "osp":
        pp.osp(model, (X, Y), pp.Config(epochs=1, lr=0.05), sparsity=0.95)
    else:
        pruner = pp.Pruner(model, sparsity=0.95, steps=6)
        for _ in range(6):
            train(model, optimizer, 1)
            pruner.step()
        pruner.finish()


@pytest.mark.parametrize("by", ["mask", "osp", "pruner"])
def test_zeros_of_a_later_mask_stay_as_well(by: str) -> None:
    model = masked(0.5)
    optimizer = MAKERS["sgd"](model.parameters())
    handle = pp.keep_zeros(model, optimizer)
    train(model, optimizer)
    prune(model, optimizer, by)
    assert set(train(model, optimizer)) == {380}
    assert repr(handle) == "Carrier(Sequential, 380 of 400 weights stay zero)"


def test_without_a_mask_all_weights_are_trained_again_until_the_next_one() -> None:
    model = masked()
    optimizer = MAKERS["sgd"](model.parameters())
    pp.keep_zeros(model, optimizer)
    pp.apply_mask(model, None)
    assert train(model, optimizer)[-1] < ZEROS
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
    assert set(train(model, optimizer)) == {ZEROS}


def test_optimisers_that_share_the_model_are_all_kept_from_reviving_it() -> None:
    model = net()
    first, second = MAKERS["sgd"](model[0].parameters()), MAKERS["adamw"](model[2].parameters())
    for optimizer in (first, second):
        train(model, optimizer)  # gathers momentum for all weights
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
    pp.keep_zeros(model, first)
    for _ in range(3):
        F.cross_entropy(model(X), Y).backward()
        first.step()
        second.step()
        assert zeros(model) == ZEROS


def test_a_state_that_is_loaded_later_is_forgotten_where_weights_are_pruned() -> None:
    model = net()
    optimizer = MAKERS["sgd"](model.parameters())
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
    pp.keep_zeros(model, optimizer)
    optimizer.load_state_dict(state)
    assert set(train(model, optimizer)) == {ZEROS}
    for weight, keep in weights.masked(model):
        assert not optimizer.state[weight]["momentum_buffer"][~keep].any()


def test_zeros_of_a_loaded_network_stay_where_another_layer_has_weight_norm() -> None:
    def normed() -> nn.Sequential:
        model = net()
        weight_norm(model[2])
        return model

    first, second = normed(), normed()
    pp.osp(first, (X, Y), pp.Config(epochs=0), sparsity=0.9, exclude="2")
    second.load_state_dict(first.state_dict())
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    handle = pp.keep_zeros(second, optimizer)
    before = second[2].weight.detach().clone()
    for _ in range(3):
        F.cross_entropy(second(X), Y).backward()
        optimizer.step()
    assert int((second[0].weight == 0).sum()) == 288
    assert not torch.equal(second[2].weight, before)
    handle.remove()
    alone = nn.Sequential(weight_norm(nn.Linear(20, 5)))
    with pytest.raises(ValueError, match=r"0\.weight is parametrized"):
        pp.keep_zeros(alone, torch.optim.SGD(alone.parameters(), lr=0.1))


def test_the_remedy_for_older_zeros_leaves_weight_norm_out() -> None:
    model = masked()
    weight_norm(model[2])
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    pp.apply_mask(model, None)
    with torch.no_grad():
        model[0].weight[:8] = 0
    pruner = pp.Pruner(model, sparsity={"0": 0.9}, steps=2)
    F.cross_entropy(model(X), Y).backward()
    names = r"pp\.select\(exclude=\['2\.parametrizations\.weight\.original0', .*'\]\)\(model\)"
    with pytest.warns(UserWarning, match=names) as caught:
        optimizer.step()
    pruner.state_dict()  # so that it may be given up
    del pruner
    call = str(caught[0].message).partition("made: ")[2]
    gc.collect()
    eval(call, {"pp": pp, "model": model})
    assert pp.sparsity(model) > 0.4
