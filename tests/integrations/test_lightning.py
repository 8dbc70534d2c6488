"""Pruning inside lightning.pytorch.Trainer, with the real package."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pacprune as pp

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from pacprune.integrations.lightning import PruningCallback  # noqa: E402

# What goes on lies where the broken run lies.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(72, 8, generator=GENERATOR), torch.randint(3, (72,), generator=GENERATOR)
SPARSITY, TOTAL = 0.8, 8 * 16 + 16 * 3
KEPT = round((1 - SPARSITY) * TOTAL)
STEPS = 20  # 4 epochs of 9 batches, two to a step, and the last one alone


class Classifier(pl.LightningModule):
    def __init__(self, *, fails_at: int = -1, manual: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.fails_at, self.automatic_optimization, self.factor = fails_at, not manual, factor
        self.sparsities: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise InterruptedError  # as a machine that goes down
        loss = self.factor * F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.sparsities.append(pp.sparsity(self))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def fit(module: Classifier, folder: Path, *callbacks: Any, start: str | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    every_epoch = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(**settings | quiet | options, callbacks=[*callbacks, every_epoch])
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=start, weights_only=None if start is None else True)
    return trainer


def zeros(module: nn.Module) -> int:
    return sum(int((w == 0).sum()) for w in pp.prunable(module).values())


def equal(one: nn.Module, other: nn.Module) -> bool:
    twin = other.state_dict()
    return all(torch.equal(value, twin[name]) for name, value in one.state_dict().items())


def test_a_trainer_ends_with_exactly_k_weights(tmp_path: Path) -> None:
    module, callback = Classifier(), PruningCallback(sparsity=SPARSITY)
    trainer = fit(module, tmp_path, callback)
    assert trainer.global_step == STEPS
    assert zeros(module) == TOTAL - KEPT
    assert callback.pruner is None
    assert callback.pruned is not None
    assert callback.pruned.model is module
    assert module.sparsities[0] == 0  # before training
    # The sparsity rises; a weight at the threshold may count as zero.
    assert all(later >= sooner - 2 / TOTAL for sooner, later in itertools.pairwise(module.sparsities))
    assert module.sparsities[-1] == 1 - KEPT / TOTAL

    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    assert equal(module, loaded)


def test_the_weights_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    module, twin = Classifier(), Classifier()
    fit(module, tmp_path, PruningCallback(sparsity=SPARSITY))
    pruner = pp.Pruner(twin, sparsity=SPARSITY, steps=STEPS)
    (optimizer,), (scheduler,) = twin.configure_optimizers()
    for _ in range(4):
        for number, (x, y) in enumerate(zip(X.split(8), Y.split(8), strict=True)):
            (F.cross_entropy(twin.net(x), y) / 2).backward()
            if number % 2 or number == 8:
                nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                pruner.step()
        scheduler.step()
    pruner.finish()
    assert equal(module, twin)


@pytest.mark.parametrize("method", ["pft", "gmp", "osp"])
def test_a_run_that_goes_on_ends_the_same(method: str, tmp_path: Path) -> None:
    whole, module = Classifier(), Classifier()
    fit(whole, tmp_path / "whole", PruningCallback(sparsity=SPARSITY, method=method))
    with pytest.raises(InterruptedError):
        fit(Classifier(fails_at=12), tmp_path / "broken", PruningCallback(sparsity=SPARSITY, method=method))
    start = str(tmp_path / "broken" / "epoch=1.ckpt")
    fit(module, tmp_path / "broken", PruningCallback(sparsity=SPARSITY, method=method), start=start)
    assert equal(whole, module)


def test_the_same_module_goes_on_after_a_failure(tmp_path: Path) -> None:
    whole, module, callback = Classifier(), Classifier(fails_at=12), PruningCallback(sparsity=SPARSITY)
    fit(whole, tmp_path / "whole", PruningCallback(sparsity=SPARSITY))
    with pytest.raises(InterruptedError):
        fit(module, tmp_path / "broken", callback)
    module.fails_at = -1
    fit(module, tmp_path / "broken", callback, start=str(tmp_path / "broken" / "epoch=1.ckpt"))
    assert equal(whole, module)


def test_a_finished_run_that_goes_on_is_finished(tmp_path: Path) -> None:
    whole, module = Classifier(), Classifier()
    fit(whole, tmp_path, PruningCallback(sparsity=SPARSITY))
    fit(module, tmp_path, PruningCallback(sparsity=SPARSITY), start=str(tmp_path / "epoch=3.ckpt"))
    assert equal(whole, module)


def test_gradients_that_are_scaled(tmp_path: Path) -> None:
    # A power of two changes no bit of the weights; the first scale is too large, so that steps are skipped.
    modules = [Classifier(), Classifier(factor=16.0)]
    for module, first_scale in zip(modules, (2.0**8, 2.0**127), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        precision = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        precision.forward_context = torch.enable_grad  # full precision, of which autocast is no part
        fit(module, tmp_path / str(first_scale), PruningCallback(sparsity=SPARSITY), plugins=[precision])
        assert zeros(module) == TOTAL - KEPT
    assert scaler.get_scale() < 2.0**127
    plain = Classifier()
    fit(plain, tmp_path / "plain", PruningCallback(sparsity=SPARSITY))
    assert equal(plain, modules[0])


def test_optimisation_by_hand(tmp_path: Path) -> None:
    module = Classifier(manual=True)
    fit(module, tmp_path, PruningCallback(pattern="2:4"), accumulate_grad_batches=1, gradient_clip_val=None)
    assert zeros(module) == TOTAL // 2


def test_zeros_stay_when_training_goes_on(tmp_path: Path) -> None:
    class Kept(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
            pp.keep_zeros(self, optimizer)
            return optimizer

    module = Classifier()
    fit(module, tmp_path / "first", PruningCallback(sparsity=SPARSITY))
    kept = Kept()
    kept.load_state_dict(module.state_dict())
    fit(kept, tmp_path / "second")
    assert zeros(kept) == TOTAL - KEPT
    assert not equal(kept, module)


def test_a_trainer_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not know how many steps there will be; give it max_epochs or max_steps"):
        fit(Classifier(), tmp_path, PruningCallback(sparsity=SPARSITY), max_epochs=-1)


def test_data_without_a_length_need_a_number_of_steps(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(X, Y, strict=True)

    trainer = pl.Trainer(
        max_epochs=4,
        callbacks=[PruningCallback(sparsity=SPARSITY)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(Endless(), batch_size=8)
    with pytest.raises(ValueError, match="since the data have no length and max_epochs is 4; give it max_steps"):
        trainer.fit(Classifier(), loader, loader)


def test_shards_whose_checkpoints_would_lack_the_pruner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pacprune.integrations.is_sharded", lambda weight: True)
    with pytest.raises(ValueError, match=r"Classifier is cut into shards, .*; give the Trainer enable_checkpointing"):
        fit(Classifier(), tmp_path, PruningCallback(sparsity=SPARSITY))


def test_a_checkpoint_without_a_pruner(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        fit(Classifier(fails_at=12), tmp_path / "broken")
    start = str(tmp_path / "broken" / "epoch=1.ckpt")
    with pytest.raises(ValueError, match="the checkpoint of step 10 holds no state of a pruner; go on from a whole"):
        fit(Classifier(), tmp_path / "broken", PruningCallback(sparsity=SPARSITY), start=start)


def test_a_run_that_stops_before_the_sparsity_is_reached(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    words = (
        f"training stopped after 5 of {STEPS} steps, before sparsity 0.8 was reached; .* set max_epochs or max_steps"
    )
    with pytest.raises(ValueError, match=words):
        fit(Classifier(), tmp_path, PruningCallback(sparsity=SPARSITY), Stop())


@pytest.mark.parametrize("average", [EMAWeightAveraging(decay=0.9), StochasticWeightAveraging(1e-2)])
def test_averages_in_place_of_the_weights_are_refused(average: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{type(average).__name__} puts averages in place of the weights"):
        fit(Classifier(), tmp_path, PruningCallback(sparsity=0.8), average)


def test_a_trainer_that_has_trained_already() -> None:
    module, loader = Classifier(), DataLoader(TensorDataset(X, Y), batch_size=8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callback = PruningCallback(sparsity=0.8)
    trainer = pl.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **quiet)
    trainer.fit(module, loader, loader)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match=r"has taken .* steps already, and a PruningCallback prunes once"):
        trainer.fit(module, loader, loader)
