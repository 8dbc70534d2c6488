"""Errors and losses weighted by size, modes and random states put back, BatchNorm's statistics against direct ones."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import pacprune as pp
from pacprune.data import batches
from pacprune.masking import weights
from pacprune.training import evaluate


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(50, 5, generator=g), torch.randint(0, 3, (50,), generator=g)


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.clone() for n, b in model.named_buffers()}


def test_error_and_mean_loss_weight_a_short_last_batch_by_its_size(
    pair: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = net().eval(), pair
    logits = model(x).detach()
    wrong, loss = int((logits.argmax(1) != y).sum()), float(F.cross_entropy(logits, y))
    for batch in (7, 49, 50, 1000):
        monkeypatch.setattr(evaluate, "BATCH", batch)
        assert pp.error(model, pair) == wrong / 50
        assert evaluate.mean_loss(model, pair) == pytest.approx(loss, rel=1e-6)
    assert evaluate.mean_loss(model, pair, loss=lambda out, y: out.sum() / len(out)) == pytest.approx(
        float(logits.sum()) / 50, abs=1e-6
    )


def test_examples_that_a_loader_drops_are_not_counted(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, everything = net().eval(), TensorDataset(*pair)
    first = (pair[0][:40], pair[1][:40])
    for loader in (
        DataLoader(everything, 40, drop_last=True),
        DataLoader(everything, 16, sampler=SubsetRandomSampler(range(40))),
    ):
        assert pp.error(model, loader) == pp.error(model, first)
        assert evaluate.mean_loss(model, loader) == pytest.approx(evaluate.mean_loss(model, first), rel=1e-6)


def test_the_error_of_a_language_model_is_a_fraction_of_its_tokens() -> None:
    model = nn.Embedding(6, 6)
    tokens = torch.randint(0, 6, (8, 4), generator=torch.Generator().manual_seed(0))
    wrong = (model(tokens).argmax(-1) != tokens).float().mean()
    assert pp.error(model, (tokens, tokens)) == pytest.approx(float(wrong))


def test_several_labels_are_counted_one_by_one() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert pp.error(model, (x, torch.tensor([[1, 0], [0, 1]]))) == 0.25
    with pytest.raises(ValueError, match="labels run from 0 to 2"):
        pp.error(model, (x, torch.tensor([[1, 0], [2, 1]])))


def test_ties_go_to_the_lowest_class() -> None:
    assert evaluate.mistakes(torch.zeros(3, 4), torch.tensor([0, 1, 3])).tolist() == [False, True, True]


def test_modes_gradients_and_random_state_are_restored(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = net().train()
    model[1].eval()  # a user's own frozen BatchNorm
    before, state, moved = [m.training for m in model.modules()], torch.get_rng_state(), buffers(model)
    shuffled = DataLoader(TensorDataset(*pair), 16, shuffle=True)
    assert pp.error(model, shuffled) == pp.error(model, pair)
    evaluate.mean_loss(model, shuffled)
    with pytest.raises(
        ValueError, match=r"the model cannot take examples of shape .*; give a network for such examples"
    ):
        pp.error(model, (pair[0][:, :2], pair[1]))
    assert [m.training for m in model.modules()] == before
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert all(torch.equal(b, moved[n]) for n, b in model.named_buffers())


def test_gibbs_error_is_the_mean_over_fresh_hard_draws(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = net().train()
    slab = pp.isotropic(model, sparsity=0.5)
    pp.attach(model, slab, seed=3)
    gibbs_error = pp.gibbs_error(model, pair, draws=6)
    other = pp.attach(net(), slab, seed=3)
    errors = [pp.error(pp.resample_(other), pair) for _ in range(6)]
    assert gibbs_error == sum(errors) / 6
    assert len(set(errors)) > 1
    assert model.training
    with pytest.raises(ValueError, match="draws is 0"):
        pp.gibbs_error(model, pair, draws=0)
    with pytest.raises(ValueError, match=r"pp\.attach"):
        pp.gibbs_error(net(), pair)


def test_reestimated_batchnorm_equals_direct_statistics(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, x = net(), pair[0]
    with torch.no_grad():
        h = model[0](x)
    pp.reestimate_batchnorm(model, pair)  # one batch
    assert torch.allclose(model[1].running_mean, h.mean(0), atol=1e-6)
    assert torch.allclose(model[1].running_var, h.var(0), rtol=1e-5)
    pp.reestimate_batchnorm(model, pair, batch_size=16)  # 16, 16, 16 and 2: weighted by size
    assert torch.allclose(model[1].running_mean, h.mean(0), atol=1e-6)
    within = sum(len(part) * part.var(0) for part in h.split(16)) / 50
    assert torch.allclose(model[1].running_var, within, rtol=1e-5)
    assert int(model[1].num_batches_tracked) == 4
    pp.reestimate_batchnorm(model, pair, batch_size=7)  # the last batch has one example, and so no variance
    assert torch.allclose(model[1].running_mean, h[:49].mean(0), atol=1e-6)


def test_reestimation_changes_only_batchnorm_statistics(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = net().train()
    model[3].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes, momentum = [m.training for m in model.modules()], model[1].momentum
    pp.reestimate_batchnorm(model, pair)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert [m.training for m in model.modules()] == modes
    assert model[1].momentum == momentum
    assert torch.equal(weights.seen(model).examples, batches.example_hashes(pair).unique())


def test_reestimation_that_fails_leaves_batchnorm_as_it_was(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = pp.reestimate_batchnorm(net().train(), pair)
    before, modes, calls = buffers(model), [m.training for m in model.modules()], []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no memory left")

    model[4].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        pp.reestimate_batchnorm(model, pair, batch_size=16)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert (model[1].momentum, [m.training for m in model.modules()]) == (0.1, modes)


def test_reestimation_under_random_masks_takes_a_draw_for_every_batch(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5), seed=1)
    means = []
    with torch.no_grad():
        for part in pair[0].split(25):
            pp.resample_(model.eval())
            means.append(model[0](part).mean(0))
    again = net()
    pp.attach(again, pp.isotropic(again, sparsity=0.5), seed=1)
    pp.reestimate_batchnorm(again, pair, batch_size=25)
    assert torch.allclose(again[1].running_mean, (means[0] + means[1]) / 2, atol=1e-6)


def test_reestimating_a_model_without_batchnorm_reads_no_example(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = nn.Linear(5, 3)
    assert pp.reestimate_batchnorm(model, pair) is model
    assert len(weights.seen(model).examples) == 0


@pytest.mark.parametrize(
    ("start", "precision"),
    [
        ("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32"),
        ("torch.set_float32_matmul_precision('medium')", "tf32"),
        ("pass", "none"),
    ],
)
def test_precision_is_float32_during_evaluation_and_restored(start: str, precision: str) -> None:
    # In a separate process: torch cannot be reset after its two ways to set the precision were mixed.
    script = f"""
import torch
from pacprune.training import evaluate
{start}
kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
with evaluate.evaluating(torch.nn.Linear(2, 2)):
    assert [kind.fp32_precision for kind in kinds] == ["ieee"] * 3
assert [kind.fp32_precision for kind in kinds] == ["{precision}", "tf32", "tf32"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


@pytest.mark.parametrize("shape", [(50, 1), (50, 3), (25,)])
def test_labels_that_do_not_pair_up_with_the_outputs_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"outputs have shape \(50, 3\) and the labels .* reshape the labels"):
        evaluate.mistakes(torch.zeros(50, 3), torch.zeros(shape, dtype=torch.int64))


def test_an_error_needs_logits() -> None:
    class Named(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(input)}

    with pytest.raises(ValueError, match="the model returns a dict, but an error needs its logits"):
        pp.error(Named(3, 2), (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)))


@pytest.mark.parametrize("shape", ["column", "flat"])
def test_one_logit_tells_two_classes_apart(shape: str) -> None:
    class Signed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x[:, :1] if shape == "column" else x[:, 0])

    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]])
    y = torch.tensor([1, 0, 0, 0])
    assert pp.error(Signed(), (x, y)) == 0.25
    assert pp.error(Signed(), (x, y.float())) == 0.25
    assert pp.error([Signed(), Signed()], (x, y)) == [0.25, 0.25]
    if shape == "column":
        assert pp.error(Signed(), (x, y[:, None].float())) == 0.25
    with pytest.raises(
        ValueError, match="one output, but the labels run from 0 to 2; one output tells class 0 from class"
    ):
        pp.error(Signed(), (x, 2 * y))
