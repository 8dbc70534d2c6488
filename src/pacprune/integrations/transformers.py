"""Pruning inside `transformers.Trainer`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from pacprune.distributed import is_sharded
from pacprune.integrations import check_options, start_pruner
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
        >>> from pacprune.integrations.transformers import PruningCallback
        >>> from transformers import Trainer, TrainingArguments
        >>> class Classifier(torch.nn.Module):
        ...     def forward(self, x, labels):
        ...         return {"loss": torch.nn.functional.cross_entropy(model(x), labels)}
        ...
        ...     model = model
        >>> classifier = Classifier()
        >>> classifier.model = model
        >>> examples = [{"x": image, "labels": label} for image, label in zip(x, y)]
        >>> args = TrainingArguments("run", max_steps=20, save_strategy="no", report_to="none", disable_tqdm=True)
        >>> callback = PruningCallback(sparsity=0.9)
        >>> outcome = Trainer(classifier, args, train_dataset=examples, callbacks=[callback]).train()
        {...}
        >>> callback.pruned
        Pruned(Classifier, sparsity 0.9003, 118 of 1,184 weights kept)
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
        self.pruned = self.pruner.finish()
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
    if args.save_strategy != "no" and any(is_sharded(weight) for weight in model.parameters()):
        raise ValueError(
            f"save_strategy is {str(args.save_strategy)!r}, but checkpoints of a model that is cut into shards cannot "
            "hold its pruner; set it to 'no'"
        )
