"""Stochastic masks on any module: the contract of attach, read, resample_ and harden."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pacprune as pp
from pacprune.masking import attachment, spikeslab, weights
from pacprune.training import budget


class Everything(nn.Module):
    """Attention, LSTM, grouped convolution, a bare parameter, and an embedding tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        self.att = nn.MultiheadAttention(16, 4, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, groups=4, padding=1)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.emb.weight
        self.position = nn.Parameter(torch.randn(1, 7, 16) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x) + self.position
        h = h + self.att(h, h, h, need_weights=False)[0]
        h = h + self.lstm(h)[0]
        return self.head(h + self.conv(h.transpose(1, 2)).transpose(1, 2))


@pytest.fixture
def everything() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Everything()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(1))


def small(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def with_all(slab: pp.SpikeSlab, value: float, **exceptions: torch.Tensor) -> pp.SpikeSlab:
    keep = {n: torch.full_like(p, value) for n, p in slab.keep_prob.items()}
    return dataclasses.replace(slab, keep_prob={**keep, **exceptions})


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_no_weight_is_read_past_its_gate(everything: nn.Module, tokens: torch.Tensor, mode: str) -> None:
    slab = pp.isotropic(everything, sparsity=0.1)
    assert list(slab.keep_prob) == [
        "position",
        "emb.weight",
        "att.in_proj_weight",
        "att.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "conv.weight",
    ]

    def output(values: pp.SpikeSlab) -> torch.Tensor:
        model = pp.attach(copy.deepcopy(everything), values).train(mode == "train")
        with torch.set_grad_enabled(mode != "no_grad"):
            return model(tokens)

    reference = output(with_all(slab, 0.9))
    for name, p in slab.keep_prob.items():
        changed = output(with_all(slab, 0.9, **{name: torch.zeros_like(p)}))
        assert (reference - changed).abs().max() > 1e-4, name


def test_transformer_fast_path_reads_the_sampled_weights() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    slab = pp.isotropic(model, sparsity=0.1)
    for name, p in slab.keep_prob.items():
        outputs = []
        for value in (0.9, 0.0):
            attached = pp.attach(copy.deepcopy(model), with_all(slab, 0.9, **{name: torch.full_like(p, value)}))
            with torch.no_grad():
                outputs.append(attached.eval()(x))
        assert (outputs[0] - outputs[1]).abs().max() > 1e-5, name


def test_two_forwards_agree_and_resample_draws_new_weights(everything: nn.Module, tokens: torch.Tensor) -> None:
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3))
    for mode in (True, False):
        model.train(mode)
        first = model(tokens)
        assert torch.equal(first, model(tokens))
        assert not torch.equal(first, pp.resample_(model)(tokens))


def test_attach_and_forward_consume_no_random_numbers(everything: nn.Module, tokens: torch.Tensor) -> None:
    before = torch.get_rng_state()
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3))
    pp.resample_(model)(tokens)
    pp.harden(model)
    assert torch.equal(before, torch.get_rng_state())


def test_noise_is_a_function_of_seed_step_and_index() -> None:
    def weights(seed: int, steps: int) -> torch.Tensor:
        model = small()
        pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.1), seed=seed).eval()
        for _ in range(steps):
            pp.resample_(model)
        return torch.cat([model[0].weight.reshape(-1), model[4].weight.reshape(-1)]).detach()

    assert torch.equal(weights(3, 2), weights(3, 2))
    assert not torch.equal(weights(3, 2), weights(3, 1))
    assert not torch.equal(weights(3, 2), weights(4, 2))


def test_the_attached_model_draws_what_draw_weights_returns() -> None:
    model = small()
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.1), seed=5).eval()
    pp.resample_(pp.resample_(model))
    weights = spikeslab.draw_weights(pp.read(model), seed=5, step=2)
    assert torch.equal(weights["0.weight"], model[0].weight)
    assert torch.equal(weights["4.weight"], model[4].weight)


def test_parameters_are_means_and_gates_and_a_users_loop_trains_both(
    everything: nn.Module, tokens: torch.Tensor
) -> None:
    plain = sum(p.numel() for p in everything.parameters())
    total = weights.total(everything)
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3)).train()
    assert sum(p.numel() for p in model.parameters()) == plain + total
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(2):
        pp.resample_(model)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).reshape(-1, 20), tokens.reshape(-1)).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert not torch.equal(before[name], p), name


@pytest.mark.parametrize("mapping", ["sigmoid", "clamp"])
@pytest.mark.parametrize("std", [0.0, 0.05])
def test_read_returns_the_attached_value(mapping: str, std: float) -> None:
    model = small()
    scores = pp.scores.magnitude(model)
    slab = pp.score_monotone(model, scores, sparsity=0.6, std=std)
    again = pp.read(pp.attach(model, slab, mapping=mapping))
    for name in slab.keep_prob:
        expected = slab.keep_prob[name].clamp(1e-5, 1 - 1e-5) if mapping == "clamp" else slab.keep_prob[name]
        torch.testing.assert_close(again.keep_prob[name], expected, atol=2e-7, rtol=1e-5)
        assert torch.equal(again.mean[name], slab.mean[name])
        assert torch.equal(again.std[name], slab.std[name])
    assert again.rest.keys() == slab.rest.keys()
    assert again.sparsity == pytest.approx(0.6, abs=1e-5)


def test_coupled_gates_follow_the_weight() -> None:
    model = small()
    slab = pp.score_monotone(model, pp.scores.magnitude(model), sparsity=0.5)
    pp.attach(model, slab, coupling=4.0)
    site = attachment.sites(model)[0]
    torch.testing.assert_close(pp.read(model).keep_prob["0.weight"], slab.keep_prob["0.weight"], atol=1e-5, rtol=1e-4)
    before = pp.read(model).keep_prob["0.weight"]
    with torch.no_grad():
        site.mean.mul_(2)
    assert (pp.read(model).keep_prob["0.weight"] > before).all()


def test_harden_leaves_a_plain_model(everything: nn.Module, tokens: torch.Tensor) -> None:
    plain = copy.deepcopy(everything)
    mask = pp.top_k(pp.scores.magnitude(everything), sparsity=0.8)
    model = pp.attach(everything, pp.block_isotropic(everything, mask, eps=1e-3))
    pp.harden(model, mask)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.head.weight is model.emb.weight
    for name, weight in pp.prunable(model).items():
        assert torch.equal(weight, plain.get_parameter(name) * mask[name]), name
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(plain(tokens), model(tokens))


def test_thresholding_breaks_ties_by_magnitude() -> None:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -3.0, 2.0, 0.5]]))
    slab = pp.isotropic(model, sparsity=0.5)
    assert spikeslab.top_mask(slab)["weight"].tolist() == [[False, True, True, False]]
    assert int(spikeslab.top_mask(slab, sparsity=0.75)["weight"].sum()) == 1


def test_harden_without_a_mask_keeps_the_expected_number() -> None:
    model = small()
    slab = pp.score_monotone(model, pp.scores.magnitude(model), sparsity=0.75)
    pp.harden(pp.attach(model, slab))
    assert pp.sparsity(model) == pytest.approx(0.75)


def test_a_state_dict_loads_into_an_equally_attached_model_even_after_deepcopy(
    everything: nn.Module, tokens: torch.Tensor
) -> None:
    other = copy.deepcopy(everything)
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3, std=0.01), train_std=True)
    model(tokens).sum().backward()  # afterwards an LSTM must not hold on to its sample
    with torch.no_grad():
        for site in attachment.sites(model):
            site.gate.add_(torch.randn(site.gate.shape))
    duplicate = copy.deepcopy(model)
    pp.attach(other, pp.isotropic(other, sparsity=0.5, std=0.02), train_std=True)
    for source in (model, duplicate):
        other.load_state_dict(source.state_dict(), strict=True)
        assert pp.read(other).hash == pp.read(model).hash
        assert torch.equal(other.eval()(tokens), model.eval()(tokens))


def test_a_budget_shift_is_part_of_the_state_dict() -> None:
    model, other = small(), small(1)
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    pp.attach(other, pp.isotropic(other, sparsity=0.5))
    budget.enforce_(model, pp.Budget(0.9, sharpen=3.0), 1.0)
    other.load_state_dict(model.state_dict())
    assert pp.read(other).hash == pp.read(model).hash
    assert pp.read(other).sparsity == pytest.approx(0.9, abs=1e-6)


def test_hardening_a_deepcopy_leaves_the_original_alone(everything: nn.Module, tokens: torch.Tensor) -> None:
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3)).eval()
    expected = model(tokens)
    duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(tokens), expected)
    pp.harden(duplicate)
    assert torch.equal(model(tokens), expected)
    assert not attachment.sites(duplicate)
    pp.harden(model)
    duplicate(tokens), model(tokens)


def test_tied_weights_stay_tied_and_count_once(everything: nn.Module, tokens: torch.Tensor) -> None:
    model = pp.attach(everything, pp.isotropic(everything, sparsity=0.3)).eval()
    assert torch.equal(model.emb.weight, model.head.weight)
    names = [site.name for site in attachment.sites(model)]
    assert "head.weight" not in names
    assert pp.read(model).total == sum(p.numel() for p in pp.read(model).keep_prob.values())


def test_functional_call_and_grad_agree_with_the_model() -> None:
    model = small().eval()
    pp.attach(model, pp.isotropic(model, sparsity=0.3)).eval()
    for site in attachment.sites(model):
        site.sampler.train()
    x, params = torch.randn(5, 6), dict(model.named_parameters())
    assert torch.equal(functional_call(model, params, (x,)), model(x))
    doubled = {n: p * 2 if n.endswith("original0") else p for n, p in params.items()}
    assert not torch.equal(functional_call(model, doubled, (x,)), model(x))
    gradient = torch.func.grad(lambda p: functional_call(model, p, (x,)).square().sum())(params)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad)


def test_autocast_trains_gates_in_float32() -> None:
    model = small().train()
    pp.attach(model, pp.isotropic(model, sparsity=0.3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(5, 6)).float().square().sum().backward()
    assert all(site.gate.grad is not None and site.gate.grad.dtype == torch.float32 for site in attachment.sites(model))


def test_bfloat16_weights_have_float32_gates() -> None:
    model = nn.Linear(6, 4).to(torch.bfloat16)
    pp.attach(model, pp.isotropic(model, sparsity=0.3, std=0.1))
    out = model(torch.randn(2, 6, dtype=torch.bfloat16))
    out.sum().backward()
    (site,) = attachment.sites(model)
    assert out.dtype == site.mean.dtype == torch.bfloat16
    assert site.gate.dtype == torch.float32
    assert pp.harden(model).weight.dtype == torch.bfloat16


def test_moving_dtype_and_loading_by_assignment_keep_working() -> None:
    model = small()
    pp.attach(model, pp.isotropic(model, sparsity=0.3)).eval()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    expected = model(torch.ones(2, 6))
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(torch.ones(2, 6)), expected)
    model.double()
    assert model(torch.ones(2, 6, dtype=torch.float64)).dtype == torch.float64


def test_pickling_is_refused() -> None:
    import pickle

    model = small()
    pp.attach(model, pp.isotropic(model, sparsity=0.3))
    with pytest.raises(RuntimeError, match=r"[Ss]erializ"):
        pickle.dumps(model)


@pytest.mark.parametrize("case", ["no_grad", "frozen"])
def test_a_slab_without_gradients_carries_the_seen_examples(case: str) -> None:
    """A slab with gradients serves as a penalty, one without as a prior, which must know the examples."""
    model, x = nn.Linear(4, 3, bias=False), torch.randn(8, 4)
    pp.fit(model, (x, torch.zeros(8, dtype=torch.int64)), pp.Config(epochs=1))
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    assert len(pp.read(model, detach=False).seen.examples) == 0
    if case == "frozen":
        for site in attachment.sites(model):
            site.gate.requires_grad_(False)
    with torch.set_grad_enabled(case == "frozen"):
        assert pp.read(model, detach=False).seen.equal(pp.read(model).seen)
    assert len(pp.read(model).seen.examples) == 8


def test_a_state_dict_holds_seed_and_step_so_that_no_draw_is_repeated() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
        return pp.attach(model, pp.isotropic(model, sparsity=0.5), seed=seed)

    model, other, x = make(3), make(0), torch.randn(4, 6)
    for _ in range(2):
        pp.resample_(model)
    state = copy.deepcopy(model.state_dict())
    other.load_state_dict(state)
    assert torch.equal(pp.resample_(other)(x), pp.resample_(model)(x))
    # Without them it is of a distribution alone: draws go on as they would have.
    kept, fresh = make(5), make(5)
    kept.load_state_dict({name: t for name, t in state.items() if not name.endswith((".seed", ".step"))})
    assert torch.equal(pp.resample_(kept)(x), pp.resample_(fresh)(x))
