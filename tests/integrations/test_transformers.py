"""Pruning inside transformers.Trainer, with the real package: no model is downloaded."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from pacprune.integrations.transformers import PruningCallback  # noqa: E402

TOKENS, LENGTH, CLASSES, SPARSITY = 32, 12, 3, 0.8
STEPS = 24  # 3 epochs of 15 batches, two to a step, and the last one alone


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """What accelerate keeps for the whole process is no concern of other tests."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def bert(*, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def sentences(model: nn.Module, n: int = 60) -> list[dict[str, Tensor]]:
    """The class of a sentence follows from its first word; a language model predicts the words themselves."""
    words = torch.randint(1, TOKENS, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    classifies = type(model).__name__.startswith("Bert")
    labels = words[:, 0] % CLASSES if classifies else words
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(words, labels, strict=True)
    ]


def trainer_of(model: Any, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_steps": 5,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **settings | options)
    data = {"train_dataset": sentences(model), "eval_dataset": sentences(model, 12)}
    return Trainer(model, args, **data, callbacks=list(callbacks))


class Failure(TrainerCallback):
    """Breaks a run off, as a machine does that goes down."""

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def zeros(model: nn.Module) -> int:
    return sum(int((w == 0).sum()) for w in pp.prunable(model).values())


def size(model: nn.Module) -> int:
    return sum(w.numel() for w in pp.prunable(model).values())


def equal(one: nn.Module, other: nn.Module) -> bool:
    twin = other.state_dict()
    return all(torch.equal(value, twin[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_trainer_ends_with_exactly_k_weights(make: Callable[[], Any], tmp_path: Path) -> None:
    callback = PruningCallback(sparsity=SPARSITY)
    model = make()
    trainer = trainer_of(model, tmp_path, callback, max_grad_norm=0.5)
    trainer.train()
    kept = round((1 - SPARSITY) * size(model))
    assert zeros(model) == size(model) - kept
    assert callback.pruner is None
    assert callback.pruned is not None
    assert callback.pruned.model is model
    assert sum(int(keep.sum()) for keep in callback.pruned.mask.values()) == kept
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(losses) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[-1])  # of the network as pruned at the last step

    trainer.save_model(str(tmp_path / "whole"))
    model.save_pretrained(tmp_path / "sparse")
    for folder in (tmp_path / "whole", tmp_path / "sparse", tmp_path / f"checkpoint-{STEPS}"):
        loaded = type(model).from_pretrained(folder)
        assert equal(model, loaded)
        assert zeros(loaded) == size(model) - kept
    keys = set(trainer.optimizer.state_dict()["param_groups"][0])
    assert "pacprune" not in keys  # it has let go of the optimiser, too


def test_a_checkpoint_is_the_network_as_pruned_at_that_moment(tmp_path: Path) -> None:
    trainer_of(bert(), tmp_path, PruningCallback(sparsity=SPARSITY)).train()
    sparsities = [
        pp.sparsity(transformers.BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{step}"))
        for step in (5, 10, 15, STEPS)
    ]
    assert 0 < sparsities[0] < sparsities[1] < sparsities[2] <= sparsities[3]


@pytest.mark.parametrize(
    ("make", "method", "stop"),
    [(bert, "pft", 7), (bert, "pft", 18), (gpt2, "pft", 13), (bert, "gmp", 13), (bert, "osp", 13)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_run_that_goes_on_ends_the_same(make: Callable[[], Any], method: str, stop: int, tmp_path: Path) -> None:
    whole, model = make(), make()
    trainer_of(whole, tmp_path / "whole", PruningCallback(sparsity=SPARSITY, method=method)).train()
    callback = PruningCallback(sparsity=SPARSITY, method=method)
    with pytest.raises(InterruptedError):
        trainer_of(make(), tmp_path / "broken", callback, Failure(step=stop)).train()
    moved = (tmp_path / "broken").rename(tmp_path / "moved")  # a checkpoint may lie anywhere
    last = moved / f"checkpoint-{stop // 5 * 5}"
    trainer = trainer_of(model, tmp_path / "other", PruningCallback(sparsity=SPARSITY, method=method))
    trainer.train(resume_from_checkpoint=str(last))
    assert equal(whole, model)


def test_the_same_trainer_goes_on_after_a_failure(tmp_path: Path) -> None:
    whole, model = bert(), bert()
    trainer_of(whole, tmp_path / "whole", PruningCallback(sparsity=SPARSITY)).train()
    failure = Failure(step=13)
    trainer = trainer_of(model, tmp_path / "broken", PruningCallback(sparsity=SPARSITY), failure)
    with pytest.raises(InterruptedError):
        trainer.train()
    failure.step = 0
    trainer.train(resume_from_checkpoint=True)
    assert equal(whole, model)


def test_a_finished_run_that_goes_on_is_finished(tmp_path: Path) -> None:
    whole, model = bert(), bert()
    trainer_of(whole, tmp_path, PruningCallback(sparsity=SPARSITY)).train()
    callback = PruningCallback(sparsity=SPARSITY)
    trainer_of(model, tmp_path, callback).train(resume_from_checkpoint=True)
    assert equal(whole, model)
    assert callback.pruned is not None


def test_the_weights_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    batches: list[Any] = []

    class Recorder(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            batches.append({name: value.clone() for name, value in inputs.items()})
            return super().training_step(model, inputs, *args)

    model, twin = bert(dropout=0), bert(dropout=0)
    options = {"optim": "adamw_torch", "max_grad_norm": 0.5, "max_steps": 20, "gradient_accumulation_steps": 1}
    args = trainer_of(model, tmp_path, save_strategy="no", eval_strategy="no", **options).args
    Recorder(model, args, train_dataset=sentences(model), callbacks=[PruningCallback(sparsity=SPARSITY)]).train()

    pruner = pp.Pruner(twin, sparsity=SPARSITY, steps=20)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    for batch in batches:
        twin(**batch).loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        pruner.step()
    pruner.finish()
    assert equal(model, twin)


def test_zeros_stay_when_training_goes_on(tmp_path: Path) -> None:
    model = bert()
    trainer_of(model, tmp_path, PruningCallback(sparsity=SPARSITY), save_strategy="no").train()
    before = [w.detach().clone() for w in pp.prunable(model).values()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    pp.keep_zeros(model, optimizer)
    args = trainer_of(model, tmp_path, save_strategy="no", eval_strategy="no").args
    Trainer(model, args, train_dataset=sentences(model), optimizers=(optimizer, None)).train()
    assert zeros(model) == size(model) - round((1 - SPARSITY) * size(model))
    assert not all(torch.equal(a, b) for a, b in zip(before, pp.prunable(model).values(), strict=True))


def test_gradients_that_are_scaled(tmp_path: Path) -> None:
    # A power of two changes no bit of the weights; the first scale is too large, so that steps are skipped.
    models = [bert(dropout=0), bert(dropout=0)]
    for model, first_scale in zip(models, (2.0**8, 2.0**127), strict=True):
        callback = PruningCallback(sparsity=SPARSITY)
        trainer = trainer_of(model, tmp_path, callback, max_grad_norm=0, save_strategy="no")
        trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        trainer.train()
        assert callback.pruned is not None
        assert zeros(model) == size(model) - round((1 - SPARSITY) * size(model))
    assert scaler.get_scale() < 2.0**127
    plain = bert(dropout=0)
    trainer_of(plain, tmp_path, PruningCallback(sparsity=SPARSITY), max_grad_norm=0, save_strategy="no").train()
    assert equal(plain, models[0])


# --- What is refused.


def test_options_that_cannot_be_right() -> None:
    with pytest.raises(ValueError, match="given steps, which it learns from the trainer; leave it out"):
        PruningCallback(sparsity=0.8, steps=10)
    with pytest.raises(ValueError, match="given sparsty, which is unknown; a Pruner takes sparsity, method"):
        PruningCallback(sparsty=0.8)


def test_a_best_model_may_not_be_pruned(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 8}
    with pytest.raises(ValueError, match=r"load_best_model_at_end is True, .*; set it to False"):
        trainer_of(bert(), tmp_path, PruningCallback(sparsity=SPARSITY), **options).train()


def test_a_checkpoint_without_a_pruner(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        trainer_of(bert(), tmp_path, Failure(step=6)).train()
    with pytest.raises(ValueError, match="the checkpoint of step 5 holds no state of a pruner; go on from a whole"):
        trainer_of(bert(), tmp_path, PruningCallback(sparsity=SPARSITY)).train(resume_from_checkpoint=True)


def test_a_run_that_stops_before_the_sparsity_is_reached(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    words = (
        f"training stopped after 3 of {STEPS} steps, before sparsity 0.8 was reached; .* set num_train_epochs or max"
    )
    with pytest.raises(ValueError, match=words):
        trainer_of(bert(), tmp_path, PruningCallback(sparsity=SPARSITY), Stop()).train()


def test_shards_whose_checkpoints_would_lack_the_pruner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pacprune.integrations.is_sharded", lambda weight: True)
    with pytest.raises(ValueError, match=r"is cut into shards, and a checkpoint of it .*; set save_strategy='no'"):
        trainer_of(bert(), tmp_path, PruningCallback(sparsity=SPARSITY)).train()


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import pacprune.integrations.{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {package} cannot be imported (")
    assert last.endswith(f'; pip install "pacprune[{package}]"')


# --- Several processes.


def train_on_this_rank(folder: Path) -> None:
    """What each process of the test below does: a whole run, and one that breaks off and goes on."""
    options = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "save_steps": 3}
    whole, model = bert(), bert()
    trainer_of(whole, folder / "whole", PruningCallback(sparsity=SPARSITY), **options).train()
    with contextlib.suppress(InterruptedError):
        trainer_of(bert(), folder / "broken", PruningCallback(sparsity=SPARSITY), Failure(step=8), **options).train()
    trainer = trainer_of(model, folder / "broken", PruningCallback(sparsity=SPARSITY), **options)
    trainer.train(resume_from_checkpoint=True)
    torch.save([whole.state_dict(), model.state_dict()], folder / f"rank{trainer.args.process_index}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_end_with_the_same_weights(tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = [state for rank in range(2) for state in torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)]
    for state in states[1:]:
        assert all(torch.equal(value, state[name]) for name, value in states[0].items())
    model = bert()
    model.load_state_dict(states[0])
    assert zeros(model) == size(model) - round((1 - SPARSITY) * size(model))


# --- accelerate, whose loops are one's own.


def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    def train(model: Any, *, stop: int = 12, folder: Path | None = None, resumed: bool = False) -> pp.Pruner:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(sentences(model), batch_size=5)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        pruner = pp.Pruner(model, sparsity=SPARSITY, steps=12)
        accelerator.register_for_checkpointing(pruner)
        if resumed:
            accelerator.load_state(str(folder))
        while pruner.steps_done < stop:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        pruner.step()
        if folder is not None and not resumed:
            accelerator.save_state(str(folder))
        return pruner

    whole, broken, model = bert(dropout=0), bert(dropout=0), bert(dropout=0)
    assert train(whole).finish().sparsity == pytest.approx(SPARSITY, abs=1e-3)
    train(broken, stop=6, folder=tmp_path)
    train(model, folder=tmp_path, resumed=True).finish()
    assert equal(whole, model)


if __name__ == "__main__":
    train_on_this_rank(Path(sys.argv[1]))
