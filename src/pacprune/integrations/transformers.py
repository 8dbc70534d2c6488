"""Pruning inside `transformers.Trainer`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from pacprune.integrations import check_options, check_storable, finish_pruner, start_pruner
from pacprune.methods.pipeline import Pruned
from pacprune.methods.pruner import Pruner

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f'transformers cannot be imported ({error}); pip install "pacprune[transformers]"') from None

__all__ = ["PruningCallback"]

_KEY = "pacprune"
"""Where the pruner's state lies in the first parameter group of a stored optimiser."""


class PruningCallback(TrainerCallback):
    """Prunes the model of a `transformers.Trainer` while it trains, as `pp.Pruner` does in a loop of one's own.

    How many steps there will be, and whether gradients are scaled, it learns from the Trainer. Evaluations and
    checkpoints see the network as it is pruned at that moment; when `train` returns, the model has exactly k weights.
    The pruner's state is stored with that of the optimiser, so that `train(resume_from_checkpoint=...)` ends with the
    weights of a run that was not broken off.

    Attributes:
        pruner: The `pp.Pruner` at work; None before and after training.
        pruned: The outcome of training, with the model and its mask; None before its end.

    Args:
        **options: What `pp.Pruner` takes: sparsity, method, criterion, data, mask_share, pattern and so on.

    Raises:
        ValueError: If an option is unknown or is the Trainer's to say, if the Trainer is to load its best model at the
            end, if a checkpoint holds no pruner, or if training ends before the sparsity is reached.

    Example:
        >>> import transformers
        >>> from pacprune.integrations.transformers import PruningCallback
        >>> sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        >>> config = transformers.BertConfig(vocab_size=32, max_position_embeddings=12, **sizes)
        >>> classifier = transformers.BertForSequenceClassification(config)
        >>> sentences = [{"input_ids": row, "labels": row[0] % 2} for row in torch.randint(32, (64, 12))]
        >>> args = transformers.TrainingArguments("run", max_steps=20, report_to="none", disable_tqdm=True)
        >>> callback = PruningCallback(sparsity=0.9)
        >>> trainer = transformers.Trainer(classifier, args, train_dataset=sentences, callbacks=[callback])
        >>> outcome = trainer.train()
        {...}
        >>> callback.pruned
        Pruned(BertForSequenceClassification, sparsity 0.9001, 307 of 3,072 weights kept)
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        self._options = options
        self._hook: Any = None
        self.pruner: Pruner | None = None
        self.pruned: Pruned | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the pruner; weights and optimiser are those of the checkpoint already, where a run goes on."""
        model, wrapper = kwargs["model"], kwargs["optimizer"]
        optimizer = getattr(wrapper, "optimizer", wrapper)  # accelerate wraps the one that takes the steps
        self._release()
        _check_arguments(args, model)
        self.pruner = start_pruner(
            model,
            self._options,
            steps=state.max_steps,
            steps_before=state.global_step,
            scaler=getattr(wrapper, "scaler", None),
            state=optimizer.param_groups[0].pop(_KEY, None),
        )
        self._hook = optimizer.register_state_dict_post_hook(self._add_state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends a step: the optimiser has moved the weights, or the scaler has skipped that."""
        assert self.pruner is not None
        self.pruner.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the plain model with exactly k weights."""
        assert self.pruner is not None
        self.pruned = finish_pruner(self.pruner, settings="num_train_epochs or max_steps")
        self._release()

    def _release(self) -> None:
        """Lets go of the model and of the optimiser, also those of a run that broke off."""
        self.pruner = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _add_state(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        # A callback is not told which folder a run goes on from. What a group holds comes back with the optimiser.
        if self.pruner is not None:
            content["param_groups"][0][_KEY] = self.pruner.state_dict()


def _check_arguments(args: TrainingArguments, model: nn.Module) -> None:
    """Refuses what would undo the pruning, or lose it."""
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end is True, but the best checkpoint may be one that is not pruned to the end; set it "
            "to False"
        )
    if args.save_strategy != "no":
        check_storable(model, remedy="set save_strategy='no'")
