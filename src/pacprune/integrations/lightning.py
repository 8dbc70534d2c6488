"""Pruning inside `lightning.pytorch.Trainer`."""

from typing import Any

from pacprune.integrations import check_options, check_storable, finish_pruner, start_pruner
from pacprune.methods.pipeline import Pruned
from pacprune.methods.pruner import Pruner

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
except ImportError as error:
    raise ImportError(f'lightning cannot be imported ({error}); pip install "pacprune[lightning]"') from None

__all__ = ["PruningCallback"]


class PruningCallback(Callback):
    """Prunes a LightningModule while `Trainer.fit` trains it, as `pp.Pruner` does in a loop of one's own.

    How many steps there will be, and whether gradients are scaled, it learns from the Trainer. Validation and
    checkpoints see the network as it is pruned at that moment; when `fit` returns, the module has exactly k weights.
    The pruner's state is part of every checkpoint, so that `fit(ckpt_path=...)` ends with the weights of a run that
    was not broken off.

    Attributes:
        pruner: The `pp.Pruner` at work; None before and after training.
        pruned: The outcome of training, with the module and its mask; None before its end.

    Args:
        **options: What `pp.Pruner` takes: sparsity, method, criterion, data, mask_share, pattern and so on.

    Raises:
        ValueError: If an option is unknown or is the Trainer's to say, if the Trainer does not know how many steps
            there will be, if a checkpoint holds no pruner, if another callback averages the weights, or if training
            ends before the sparsity is reached.

    Example:
        >>> import lightning.pytorch as pl
        >>> from pacprune.integrations.lightning import PruningCallback
        >>> class Classifier(pl.LightningModule):
        ...     def __init__(self, net):
        ...         super().__init__()
        ...         self.net = net
        ...     def training_step(self, batch, index):
        ...         return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128)
        >>> callback = PruningCallback(sparsity=0.9)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = pl.Trainer(max_steps=20, callbacks=[callback], **quiet)
        >>> trainer.fit(Classifier(model), loader)
        >>> callback.pruned
        Pruned(Classifier, sparsity 0.9003, 118 of 1,184 weights kept)
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        self._options = options
        self._state: dict[str, Any] | None = None
        """The pruner's state in the checkpoint that a run goes on from."""
        self._steps_before = 0
        self.pruner: Pruner | None = None
        self.pruned: Pruned | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the pruner; weights and optimisers are those of the checkpoint already, where a run goes on."""
        _refuse_averages(trainer)
        if trainer.global_step and trainer.ckpt_path is None and self._state is None:
            raise ValueError(
                f"this Trainer has taken {trainer.global_step} steps already, and a PruningCallback prunes once; make "
                "a new Trainer and a new PruningCallback, or train on with pp.keep_zeros in configure_optimizers"
            )
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            epochs = trainer.max_epochs
            if epochs is not None and epochs > 0:
                raise ValueError(
                    f"the Trainer does not know how many steps there will be, since the data have no length and "
                    f"max_epochs is {epochs}; give it max_steps"
                )
            raise ValueError("the Trainer does not know how many steps there will be; give it max_epochs or max_steps")
        if trainer.checkpoint_callbacks:
            check_storable(pl_module, remedy="give the Trainer enable_checkpointing=False")
        self.pruner = None  # one of a run that broke off lets go of its model
        self._steps_before = trainer.global_step
        self.pruner = start_pruner(
            pl_module,
            self._options,
            steps=int(steps),
            steps_before=self._steps_before,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            state=self._state,
        )
        self._state = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step where this batch was the last of those whose gradients are added up."""
        assert self.pruner is not None
        if trainer.global_step > self._steps_before:
            self._steps_before = trainer.global_step
            self.pruner.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the plain module with exactly k weights."""
        assert self.pruner is not None
        self.pruned = finish_pruner(self.pruner, settings="max_epochs or max_steps")
        self.pruner = None

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint holds of the pruner."""
        return {} if self.pruner is None else self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state for the pruner, which is made when training starts."""
        self._state = state_dict


def _refuse_averages(trainer: Trainer) -> None:
    """Refuses callbacks that replace the weights when training ends: an average of masks is not sparse."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} puts averages in place of the weights when training ends, which are not "
                "sparse; leave it out, or average in a loop of your own with pp.Pruner"
            )
