"""Attacks by what is done with the bound examples: each worked once, and none works any more."""

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import pacprune as pp
from pacprune.bounds import sequential
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import drawn_networks, monitor, risks, rules
from pacprune.certification.held_out import certify_sequence, tallies_of
from pacprune.cli import app
from pacprune.data import trace
from pacprune.data.splits import Split
from pacprune.masking import weights
from pacprune.training.evaluate import evaluating

SHORT = pp.Config(epochs=2, lr=0.1)


@cache
def made() -> tuple[Split, nn.Module]:
    """Digits, and a network."""
    trace._looks.clear()
    torch.manual_seed(0)
    split, model = pp.data.digits(), small()
    pp.fit(model, split.prior, SHORT)
    return split, model


def small() -> nn.Module:
    return pp.models.mlp(64, hidden=[16])


# --- What a network does while it answers.


class Occluded(nn.Module):
    """Looks at the upper rows alone, and blanks the others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach()
        x[:, :, 3:] = 0
        return self.inner(x)


def test_a_network_that_writes_into_its_input_changes_neither_the_data_nor_what_others_see() -> None:
    """The reference was shown what the network had left: a drop of at most -0.2 was certified, and it was above 0.2."""
    split, dense = made()
    occluded = Occluded()
    pp.fit(occluded, split.prior, SHORT)
    pixels, y = split.bound.x.clone(), split.bound.y
    certificate = pp.certify_held_out(occluded, split, risk="drop", reference=dense)
    pp.certify_held_out(occluded, split)
    pp.error(occluded, split.bound)
    drawn_networks.disagreements(occluded, *drawn(occluded), pixels[:10], seed=0)
    assert torch.equal(split.bound.x, pixels)
    with evaluating(dense), evaluating(occluded):
        wrong = [model(pixels.clone()).argmax(-1) != y for model in (occluded, dense)]
    assert certificate.risk == pytest.approx(float(wrong[0].float().mean() - wrong[1].float().mean()))


def drawn(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    slab = pp.isotropic(model, sparsity=0.5, std=0.01)
    return slab, drawn_networks.thresholded(slab)


def test_a_loss_that_writes_into_its_batch_changes_no_data() -> None:
    split, model = made()
    pixels, labels = split.bound.x.clone(), split.bound.y.clone()

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].zero_()
        batch[1].copy_(output.argmax(-1))
        return output.argmax(-1) != batch[1]

    risks.evaluate(risks.find(loss)[1], model, None, split.bound)
    assert torch.equal(split.bound.x, pixels)
    assert torch.equal(split.bound.y, labels)


class Switch(nn.Module):
    """Normalises by the batch where that is large, and by nothing where it is small."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return (x - 5 * x.mean(0)) / (x.std(0) + 1e-3) if len(x) > self.size else x


@pytest.mark.parametrize("size", [64, 500])
@pytest.mark.parametrize("risk", ["error", "brier"])
def test_batch_statistics_of_large_batches_alone_are_refused(size: int, risk: str) -> None:
    """64 examples as one batch were tried, and counted was in batches of 1,000: 0.04 in place of 0.19."""
    split, _ = made()
    model = nn.Sequential(small(), Switch(size))
    pp.fit(model, split.prior, SHORT)
    with pytest.raises(ValueError, match="of 719 answers of the network depend on what else is in the batch"):
        pp.certify_held_out(model, split, risk=risk)


class Adapting(nn.Module):
    """Moves a buffer with what it is asked, slowly enough for its answers to stay, from or up to some call on."""

    def __init__(self, calls: range) -> None:
        super().__init__()
        self.inner, self.calls, self.count = small(), calls, 0
        self.register_buffer("mean", torch.zeros(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += not self.training
        if not self.training and self.count in self.calls:
            self.mean += 1e-9 * x.mean(0)
        return self.inner(x - self.mean)


@pytest.mark.parametrize("calls", [range(10**6), range(1, 2), range(60, 70)])
@pytest.mark.parametrize("risk", ["error", "top2"])
def test_a_network_that_changes_its_buffers_as_it_answers_is_refused(calls: range, risk: str) -> None:
    split, _ = made()
    model = Adapting(calls)
    pp.fit(model, split.prior, SHORT)
    model.count = 0
    with pytest.raises(ValueError, match="parameters or buffers of the network change when it answers"):
        pp.certify_held_out(model, split, risk=risk)


@pytest.mark.parametrize("huge", [-1e9, -torch.inf])
def test_infinite_and_huge_outputs_hide_no_others(huge: float) -> None:
    """The largest output is the measure of rounding: one of another kind excused whatever depends on the batch."""
    split, _ = made()

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:, :9] - x[:, :9].mean(0), torch.full_like(x[:, :1], huge)], dim=1)

    model = nn.Sequential(small(), Masked())
    pp.fit(model, (split.prior.x, split.prior.y % 9), SHORT)
    with pytest.raises(ValueError, match="depend on what else is in the batch"):
        pp.certify_held_out(model, split, declare="the labels were taken modulo 9")


class Differences(nn.Module):
    """Two numbers and the small difference of them, whose rounding is theirs."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 1), nn.Linear(64, 1)
        with torch.no_grad():
            for one, other in zip(self.first.parameters(), self.second.parameters(), strict=True):
                other.copy_(one + scale * torch.randn_like(one))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        return torch.cat([first, second, second - first], dim=1)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_difference_of_large_numbers_is_no_statistic_of_the_batch(scale: float, dtype: torch.dtype) -> None:
    x = 100 * torch.rand(200, 64, dtype=dtype)
    rules.refuse_unsteady(Differences(scale).to(dtype), x, values=True)


def test_rounding_is_measured_by_what_a_kind_varies_by_and_by_its_size() -> None:
    ruled_out = torch.full((4, 1), -1e9)
    outputs = torch.cat([torch.tensor([[1.0], [3.0], [-1.0], [0.0]]), ruled_out, torch.full((4, 1), -torch.inf)], dim=1)
    rounding = risks.rounding_of(outputs, outputs)
    assert rounding[0] < 1e-3  # not 1e-7 of 1e9
    assert rounding[1] > 10
    assert rounding.isfinite().all()
    half = risks.rounding_of(outputs[:, :1].bfloat16() + 20, outputs[:, :1].bfloat16() + 20)
    assert 0.5 < float(half) < 1.0  # 4 of 20's last places, and an eighth of what it varies by


def test_a_loss_of_large_batches_alone_is_refused() -> None:
    split, model = made()

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = (output.argmax(-1) != batch[1]).double()
        return each if len(each) <= 64 else each.mean() + 0 * each

    with pytest.raises(ValueError, match="the losses of 719 of 719 examples depend on what else is in the batch"):
        pp.certify_held_out(model, split, risk=loss)


# --- What a user does with the examples.


def cut() -> Split:
    x, y = made()[0].train.x.clone(), made()[0].train.y.clone()
    return pp.data.split(x, y, standardise=False, seed=13)


@pytest.mark.parametrize("way", ["torch", "numpy"])
def test_bound_examples_written_over_prior_ones_are_noticed(way: str) -> None:
    """The part's hashes were those of before: a network that was trained on the bound set was VALID at level 2."""
    split = cut()
    pp.fit(small(), split.prior, SHORT)  # which asks for the hashes
    x, y = split.prior.x, split.prior.y
    if way == "torch":
        x.copy_(split.bound.x[: len(x)])
        y.copy_(split.bound.y[: len(x)])
    else:
        x.numpy()[:] = split.bound.x[: len(x)].numpy()
        y.numpy()[:] = split.bound.y[: len(x)].numpy()
    with pytest.raises(ValueError, match="x of the prior part was overwritten since the part was made"):
        pp.fit(small(), split.prior, SHORT)


def test_labels_of_the_bound_set_that_were_edited_are_noticed() -> None:
    split, model = cut(), small()
    pp.fit(model, split.prior, SHORT)
    pp.certify_held_out(model, split)
    with torch.no_grad():
        split.bound.y.copy_(model(split.bound.x).argmax(1))
    for risk in ("error", "brier"):
        with pytest.raises(ValueError, match="y of the bound part was overwritten since the part was made"):
            pp.certify_held_out(model, split, risk=risk)
    with pytest.raises(ValueError, match="y of the bound part was overwritten"):
        pp.error(model, split.bound)


def test_examples_of_a_part_that_changed_places_are_noticed() -> None:
    split = cut()
    split.prior.y.copy_(split.prior.y.flip(0))
    with pytest.raises(ValueError, match="y of the prior part was overwritten"):
        pp.fit(small(), split.prior, SHORT)


class Stop(Exception):
    pass


def test_training_that_the_bound_set_ends_is_seen() -> None:
    """Looks while a fit runs were known at its beginning alone: early stopping by the bound set was certified."""
    split, model = pp.data.digits(), small()

    def progress(*_: Any) -> None:
        if pp.error(model, split.bound) < 0.9:
            raise Stop
        model.train()

    with pytest.raises(Stop):
        pp.fit(model, split.prior, pp.Config(epochs=9, lr=0.1), progress=progress)
    with pytest.raises(ValueError, match="has seen the bound set: something was evaluated on 719 of its 719"):
        pp.certify_held_out(model, split)


def test_what_is_trained_after_a_loss_on_the_bound_set_needs_a_declaration() -> None:
    """A copy that is trained on the bound set at a rate of 1e-12 tells how good the network is there."""
    split, first = pp.data.digits(), small()
    pp.fit(first, split.prior, SHORT)
    pp.fit(copy.deepcopy(first), split.bound, pp.Config(epochs=1, lr=1e-12))
    assert pp.certify_held_out(first, split).record["declaration"] is None  # it was there before
    second = small()
    pp.fit(second, split.prior, SHORT)
    words = "no setting was chosen by the losses on the digits"
    for risk in ("error", "top2"):
        with pytest.raises(ValueError, match="something else was trained on 719 of the 719 bound examples"):
            pp.certify_held_out(second, split, risk=risk)
        assert words in pp.certify_held_out(second, split, risk=risk, declare=words).statement
    with pytest.raises(ValueError, match="something was trained on bound examples before"):
        pp.compress(small(), split, SHORT, dense=SHORT, max_error=0.4)


def test_what_is_trained_after_a_posterior_needs_a_declaration_and_another_prior_none() -> None:
    split, model = pp.data.digits(), small()
    for _ in range(2):
        model = small()
        pp.fit(model, split.prior, SHORT)
        prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.1, std=0.01)))
        pp.fit_posterior(model, prior, split, pp.Config(epochs=1, lr=1e-12))
        assert pp.certify(model, prior, split, draws=100).record["declaration"] is None
    model = small()
    pp.fit(model, split.prior, SHORT)
    with pytest.raises(ValueError, match="something else was trained on 719 of the 719 bound examples"):
        pp.certify_held_out(model, split)


def test_training_on_the_prior_part_of_another_cut_needs_none() -> None:
    for seed in range(2):
        split, model = pp.data.digits(seed=seed), small()
        pp.fit(model, split.prior, SHORT)
        assert pp.certify_held_out(model, split).record["declaration"] is None


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACPRUNE_LEDGER", raising=False)


@pytest.mark.usefixtures("ledger")
def test_the_best_of_networks_that_were_evaluated_is_one_of_several_tries() -> None:
    """The line said: certificate number 1, 1 declared and paid for."""
    split, networks = pp.data.digits(), [small() for _ in range(3)]
    for seed, network in enumerate(networks):
        pp.fit(network, split.prior, SHORT, seed=seed)
    alone = pp.certify_held_out(networks[0], split).tries
    pp.error(networks[0], split.bound)
    assert "evaluated" not in str(pp.certify_held_out(networks[0], split).tries)
    for network in networks:
        pp.error(network, split.bound)
    best = pp.certify_held_out(networks[0], split).tries
    assert alone is not None
    assert best is not None
    assert "one of 3 networks that were evaluated on them; 1 declared and paid for: if this is chosen" in str(best)
    assert (best.number, best.evaluated) == (1, 3)
    assert best.undeclared_bound == pp.certify_held_out(networks[0], split, delta=0.05 / 12).bound
    assert str(pp.certify_held_out(networks[0], split, certified=3).tries).endswith("3 declared and paid for")
    drop = pp.certify_held_out(networks[0], split, risk="drop", reference=networks[1]).tries
    assert drop is not None
    assert drop.evaluated == 3


@pytest.mark.usefixtures("ledger")
def test_a_delta_that_was_chosen_by_the_p_value_is_another_try() -> None:
    split, dense = made()
    model = copy.deepcopy(dense)
    pp.osp(model, split.prior, SHORT, sparsity=0.5)
    tries = [certify_sequence([model], split, limit=0.1, reference=dense, delta=d).tries for d in (0.05, 0.1, 0.05)]
    assert [counted.number for counted in tries if counted] == [1, 2, 1]


@pytest.mark.usefixtures("ledger")
def test_the_sentence_of_compress_has_the_tries_and_the_declaration() -> None:
    split, first = pp.data.digits(), small()
    pp.fit(first, split.prior, SHORT)
    pp.certify_held_out(first, split)
    common: dict[str, Any] = {"max_error": 0.5, "sparsities": [0.3], "refinements": 0, "dense": SHORT}
    words = "no setting was chosen by that certificate"
    compressed = pp.compress(small(), split, SHORT, **common, declare=words)
    assert compressed.passed
    assert f'The issuer states: "{words}". This is certificate number 2 on these' in compressed.statement


@pytest.mark.parametrize("way", ["optimizer", "data"])
def test_a_progress_that_trains_is_foreign(way: str) -> None:
    """Weights that a function changed between two steps passed for those of the fit."""
    split, model = pp.data.digits(), small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def progress(*_: Any) -> None:
        if way == "data":
            for parameter in model.parameters():
                parameter.data.mul_(1.001)
            return
        with torch.enable_grad():
            nn.functional.cross_entropy(model(split.bound.x), split.bound.y).backward()
        optimizer.step()
        optimizer.zero_grad()

    pp.fit(model, split.prior, SHORT, progress=progress)
    with pytest.raises(ValueError, match="were made or changed by something other than pacprune"):
        pp.certify_held_out(model, split)


@pytest.mark.parametrize("random", [False, True])
def test_a_progress_that_looks_at_other_data_changes_nothing(random: bool) -> None:
    split, model = pp.data.digits(), nn.Sequential(small(), nn.BatchNorm1d(10))
    if random:
        pp.attach(model, pp.isotropic(model, sparsity=0.1, std=0.01))

    def progress(*_: Any) -> None:
        pp.error(model, split.test)
        if random:
            pp.gibbs_error(model, split.test, draws=2)
        model.train()

    pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1), progress=progress)
    assert pp.certify_held_out(pp.harden(model) if random else model, split).record["declaration"] is None


# --- What a network is beside its parameters and buffers.


class Hiding(nn.Module):
    """Keeps something where no state dict has it."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.inner, self.kept = small(), kept

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


HIDDEN: dict[str, Any] = {
    "a tensor": (torch.ones(3), "kept"),
    "an array": (np.ones(3), "kept"),
    "in a list": ([0, torch.ones(3)], r"kept\[1\]"),
    "in a dictionary": ({"bank": {"x": torch.ones(3)}}, r"kept\['bank'\]\['x'\]"),
    "in a dataclass": (pp.data.Part("prior", torch.ones(3), torch.ones(3), torch.arange(3)), "kept.x, kept.y"),
    "a module in a list": ([nn.Linear(3, 3)], r"kept\[0\]"),
    "a tensor of a module in a list": ([Hiding((torch.ones(3),))], r"kept\[0\]"),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_what_a_network_keeps_in_plain_attributes_needs_a_declaration(way: str, tmp_path: Path) -> None:
    """The bound set itself lay there, and a network that had been trained on it."""
    split, (kept, place) = made()[0], HIDDEN[way]
    model = Hiding(None)
    pp.fit(model, split.prior, SHORT)
    model.kept = kept
    for risk in ("error", "brier"):
        with pytest.raises(ValueError, match=f"the network keeps {place}.* as a plain attribute"):
            pp.certify_held_out(model, split, risk=risk)
    model.kept = None
    honest = pp.certify_held_out(model, split).save(tmp_path)
    model.kept = kept
    report = pp.verify(honest, split=split, model=model)
    assert "as a plain attribute" in str(report.failure)


def test_a_prior_of_a_network_with_plain_attributes_needs_a_declaration() -> None:
    split, model = made()[0], Hiding(torch.ones(3))
    pp.fit(model, split.prior, SHORT)
    prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.1, std=0.01)))
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="the network keeps kept as a plain attribute"):
        pp.certify(model, prior, split, draws=50)
    words = "the attribute holds three ones"
    assert words in pp.certify(model, prior, split, draws=50, declare=words).statement


def test_other_names_of_what_a_network_is_are_no_secrets() -> None:
    split = made()[0]
    model = Hiding(None)
    pp.fit(model, split.prior, SHORT)
    first = next(model.parameters())
    model.kept = {
        "module": [model.inner],
        "self": model,
        "weight": first,
        "view": first[:2],
        "relu": [nn.ReLU()],
        "n": 3,
    }
    assert pp.certify_held_out(model, split).record["declaration"] is None
    for layer in (
        nn.LSTM(8, 4),
        torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
    ):
        assert weights.hidden(copy.deepcopy(layer) if isinstance(layer, nn.LSTM) else layer) == []


# --- What a verifier excuses.


def restated(certificate: pp.Certificate, levels: Tensor) -> pp.Certificate:
    """The certificate with other levels, and all that follows from them."""
    record: Any = copy.deepcopy(certificate.record)
    changed = pp.Certificate(record, {**certificate.tensors, "examples.safetensors": {"levels/0": levels}})
    tally = tallies_of(changed)[0]
    bound = tally.bound(0.05)
    record["tests"][0] |= {"mean": tally.mean, "bound": bound}
    record["bounds"]["held_out"]["bound"] = record["claim"]["bound"] = bound
    figure = f"at most {rounded_up(bound)}."
    record["statement"] = re.sub(r"at most [0-9.]+\.", figure, record["statement"])
    return changed


def tiny(output: Tensor, _: Any) -> Tensor:
    return torch.full((len(output),), 8 / 65536, dtype=torch.float64)


@pytest.mark.parametrize("less", [1, 8])
def test_no_value_can_be_stated_lower_than_it_is(less: int, tmp_path: Path) -> None:
    """8 levels of 65,536 were excused on every example: 0 was VALID for a risk of 8/65536."""
    x, words = torch.randn(2000, 4), "the weights are random numbers"
    model = nn.Linear(4, 2)
    honest = pp.certify_held_out(model, (x, torch.zeros(2000).long()), risk=tiny, declare=words)
    levels = honest.tensors["examples.safetensors"]["levels/0"]
    for change, valid in ((0, True), (-less, False)):
        folder = restated(honest, levels + change).save(tmp_path / str(change))
        assert pp.verify(folder).valid  # level 1 cannot tell
        report = pp.verify(folder, split=(x, torch.zeros(2000).long()), model=model, risk=tiny)
        assert report.valid == valid
    assert "the values of 2000 of 2000 examples are not as stated" in str(report.failure)


def test_losses_stated_one_level_lower_are_refused_and_those_of_another_machine_are_not(tmp_path: Path) -> None:
    split, model = made()
    honest = pp.certify_held_out(model, split, risk="brier")
    levels = honest.tensors["examples.safetensors"]["levels/0"]
    lower = restated(honest, (levels - 1).clamp_min(0)).save(tmp_path / "lower")
    assert "are not as stated" in str(pp.verify(lower, split=split, model=small()).failure)
    other = copy.deepcopy(model).double()
    fine = risks.evaluate(risks.RISKS["brier"], other, None, replace(split.bound, x=split.bound.x.double())).values
    report = pp.verify(restated(honest, fine).save(tmp_path / "other"), split=split, model=small())
    assert report.valid, report.failure


# --- Beside a certificate, and two processes at once.


def test_another_packed_network_beside_a_certificate_is_noticed(tmp_path: Path) -> None:
    split = pp.data.digits()
    common: dict[str, Any] = {"max_error": 0.5, "sparsities": [0.3], "refinements": 0, "dense": SHORT}
    compressed = pp.compress(small(), split, SHORT, **common)
    folder = compressed.save(tmp_path / "small")
    honest = CliRunner().invoke(app.build(), ["verify", str(folder)], prog_name="pacprune")
    assert honest.exit_code == 0, honest.output
    assert "packed.safetensors beside the certificate is the certified network" in honest.output
    other = copy.deepcopy(compressed.model)
    with torch.no_grad():
        next(other.parameters()).mul_(-1)
    pp.export.save(folder / "packed.safetensors", other)
    forged = CliRunner().invoke(app.build(), ["verify", str(folder / "certificate")], prog_name="pacprune")
    assert forged.exit_code == 1
    assert "INVALID: packed.safetensors: layers.0.weight is not that of the certified network" in forged.output
    (folder / "packed.safetensors").write_bytes(b"nothing")
    assert CliRunner().invoke(app.build(), ["verify", str(folder)], prog_name="pacprune").exit_code == 1


def test_two_processes_do_not_overwrite_what_the_other_has_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and writing, another process wrote: its examples, all of them errors, were lost."""
    first, second = (pp.Monitor(0.1, path=tmp_path / "monitor.json") for _ in range(2))
    first.update([0] * 10, first=1)
    advance = sequential.advance
    monkeypatch.setattr(monitor, "PATIENCE", 0.05)

    def between(watch: Any, x: Any) -> Any:
        monkeypatch.setattr(sequential, "advance", advance)
        with pytest.raises(ValueError, match="another process has been writing in"):
            second.update([1] * 10, first=11)
        return advance(watch, x)

    monkeypatch.setattr(sequential, "advance", between)
    first.update([0] * 10, first=11)
    with pytest.raises(ValueError, match="examples 1 to 20 are counted already"):
        second.update([1] * 10, first=11)
    assert second.update([1] * 10, first=21).examples == 30
