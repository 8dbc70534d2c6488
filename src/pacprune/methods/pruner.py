"""`Pruner`: a method of pruning in a training loop that is the user's own."""

import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from pacprune import imports
from pacprune.distributed import count, is_sharded, local, ranks, unwrapped
from pacprune.masking import weights
from pacprune.masking.criteria import CRITERIA, Criterion, check_weights, score
from pacprune.methods.pipeline import Pruned, Request, as_noted, check_request, make_plan
from pacprune.methods.table import METHODS, Method
from pacprune.training.carrier import Carrier, ForgottenStates, weakly
from pacprune.training.config import Config, whole
from pacprune.training.controls import Stepper, refuse_carried
from pacprune.training.optim import Optimizer as OffsetOptimizer
from pacprune.types import Data, Diverged, Forward, Loss, check_name

_LOOK = 100
"""Every so many steps the host looks at weights, which it has to wait for on a GPU: are they finite, are they ours."""


_FEW_ZEROS = 0.01
"""The share of weights that may be zero by chance, such as those of a row of padding."""


_Place = tuple[dict[str, Any], str, Any, str]
"""A dictionary of a module, the key and what it holds there, and the name of a weight that is reached by it."""


class Unfinished(ValueError):
    """A pruner is to finish before its sparsity is reached."""


class Pruner:
    """Prunes a network while a training loop of your own trains it.

    From here on the model's weights are those that the network computes with, with zeros where they are pruned at this
    moment. Only while an optimiser takes its step they are those that are trained. Optimisers of torch.optim are
    noticed by themselves, made before or after. What decides which weights are kept is learned by the pruner: it is not
    among `model.parameters()`. At the end of a backward pass, gradients are those of what is trained, so that clipping
    does what it does in `pp.fit`. After the last step the network is pruned for good, with exactly k weights.

    A loop on the same batches with the same optimiser ends with the weights that `pp.pft`, or the method's own
    function, ends with.

    Args:
        model: A plain network, on the device where it is trained; also one in DistributedDataParallel, in torch.compile
            or cut by fully_shard.
        sparsity: Fraction of the weights to prune, such as 0.9. Or a mapping from patterns of names to fractions, as
            {"conv*": 0.5, "fc*": 0.9}; the first that fits counts, and other weights are left alone.
        steps: How many steps the optimiser will take; each adds up all micro-batches since the last one.
        method: pft (learn which weights to keep), feather, gmp, dpf or osp.
        criterion: What ranks the weights of pft at the start, and those of osp. A name, such as "magnitude", or a
            function f(model, data) -> scores.
        data: What a criterion such as "snip" reads: (x, y) tensors, a part of a split, a Dataset or a DataLoader.
        loss: What such a criterion takes for the loss: (outputs, labels) -> one number; see `pp.fit` for other batches.
        forward: (model, batch) -> output, where its batches are neither (x, y) nor the model's arguments.
        mask_share: Share of the steps in which the mask moves; the rest fine-tunes. 1 unless given, and 0.5 for gmp and
            dpf.
        pattern: Keep so many of every 4 or 8 weights in a row, "1:4", "2:4" or "4:8"; `sparsity` follows.
        gate_lr: Learning rate of what pft learns beside the weights, by momentum SGD, while the optimiser has its
            largest rate; it follows the optimiser's schedule. "auto" is 10, less in more than 3,200 steps. None learns
            nothing.
        scope: One ranking (global), the same sparsity in each layer (layer), or a higher one in larger layers (erk).
        min_per_layer: Weights that every layer keeps at least.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these. Frozen weights have to be named.
        exclude: Weights that are left alone, likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
        seed: Seed of random scores.
        scaler: The GradScaler of the loop, where it has one. A step that it skips counts as a step.

    Raises:
        ValueError: If method, criterion, sparsity or model do not fit together, if a loss was not finite, if `step` was
            forgotten, if there are more steps than `steps`, or if something else changed weights between two steps.

    Example:
        >>> pruner = pp.Pruner(model, sparsity=0.9, steps=20)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> for _ in range(20):
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     pruner.step()
        >>> pruner
        Pruner(Sequential, pft, step 20 of 20, sparsity 0.9003 of 0.9)
        >>> pruner.finish()
        Pruned(Sequential, sparsity 0.9003, 118 of 1,184 weights kept)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparsity: float | Mapping[str, float] | None = None,
        steps: int,
        method: str = "pft",
        criterion: str | Criterion = "magnitude",
        data: Data | None = None,
        loss: Loss = F.cross_entropy,
        forward: Forward | None = None,
        mask_share: float | None = None,
        pattern: str | None = None,
        gate_lr: float | str | None = "auto",
        scope: str = "global",
        min_per_layer: int = 0,
        include: weights.Which | None = None,
        exclude: weights.Which | None = None,
        prunable: weights.Prunable = weights.prunable,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = model = unwrapped(model)
        self.steps, self.method, self.scaler = whole("steps", steps, least=1), method, scaler
        row = _carried_method(method)
        _check_options(method, row, criterion=criterion, mask_share=mask_share, gate_lr=gate_lr, data=data)
        refuse_carried(model)
        check_request(model, sparsity, criterion, pattern)
        _check_ranks(model)
        choice = {"include": include, "exclude": exclude, "prunable": prunable, "scope": scope}
        self._noted_zeros = sum(keep.numel() - count(keep) for _, keep in weights.masked(model))
        """How many weights were pruned before, as a mask of theirs says."""
        self._plan = plan = make_plan(model, sparsity, **choice, pattern=pattern, min_per_layer=min_per_layer)
        weights.refuse_sparse_gradients(model, plan.prunable(model))
        check_weights(criterion, model, plan.prunable)
        self.final_sparsity = plan.sparsity
        request = Request(
            plan=plan,
            steps=self.steps,
            criterion=criterion,
            scores=lambda: score(criterion, model, data, loss=loss, forward=forward, seed=seed, prunable=plan.prunable),
            mask_share=mask_share,
            gate_lr=gate_lr,
        )
        assert row.begin is not None
        start = imports.function(row.begin)(request, **row.options)
        self.budget, self._gate_lr = start.budget, start.gate_lr
        budgets = None if start.budget is None else [start.budget]
        self._stepper = Stepper(model, budgets, seeds=[seed], clean=True)
        self._places = _places(model, self._stepper.subject.names)
        prunable_weights = [weight for weight, _ in self._stepper.subject.pairs]
        self._sizes = sum(w.numel() for w in prunable_weights), weights.noted_total(model), prunable_weights[0].device
        """How many weights are pruned together and how many there are in all, and where they lie."""
        self._noted_mask = weights.notes(model).mask
        self._offsets = self._offset_optimizer()
        self.steps_done = 0
        """How many steps the optimiser has taken."""
        self._movers: list[Optimizer] = []
        """The optimisers that have taken the present step."""
        self._due = False
        """Whether some of them have moved weights, and the mask of the next step waits for the others."""
        self._forgotten = ForgottenStates()
        self._peak = 0.0
        """The largest learning rate of the weights so far."""
        self._moved_by: float | None = None
        """What the rate of the offsets was multiplied with in the last step, as the device has it."""
        self._rest: int | None = None
        """What the model's other parameters are to be in a run that goes on, until its first step has looked."""
        self._may_end = False
        """Whether somebody knows that it is unfinished: its state was stored, or `finish` has said so."""
        self._outcome: Pruned | None = None
        self._show()
        # Weakly, so that a pruner that nobody holds lets go of its model at once.
        before, after = weakly(self._before_optimizer), weakly(self._after_optimizer)
        look, scale = weakly(self._check_model), weakly(self._scale)
        self._carrier = Carrier(self._stepper, before=before, after=after, look=look, scale=scale)

    # --- What a user's loop calls.

    def step(self) -> None:
        """Ends a step of the loop: call it once for every step of the optimiser, after it.

        Raises:
            ValueError: If no optimiser has moved the weights since the last call, though no `scaler` may have skipped
                that, if some weights belong to no optimiser, or if the model was changed by something else.

        Example:
            >>> pruner = pp.Pruner(model, sparsity=0.9, steps=20)
            >>> pruner.step()
            Traceback (most recent call last):
                ...
            ValueError: no optimiser has moved the pruner's weights since ...
        """
        if self._outcome is not None:
            raise ValueError(
                f"step comes after finish, which let go of the {type(self.model).__name__}; leave it out, and call "
                "pp.keep_zeros(model, optimizer) to train on"
            )
        self._check_model()
        if not self._movers:
            self._skip()
        self._catch_up()
        if self.steps_done == 1 and self._movers:
            self._check_trained()
        self._movers.clear()
        self._stepper.converted.clear()

    def finish(self) -> Pruned:
        """Leaves the plain model with exactly k weights, and lets go of it.

        Zeros no longer stay zero by themselves: call `pp.keep_zeros` to train on.

        Returns:
            The pruned network and its mask.

        Raises:
            ValueError: If it is too early: the sparsity has not been reached. Or if the model was changed by something
                else.

        Example:
            >>> pruner = pp.Pruner(model, sparsity=0.9, steps=20, method="osp")
            >>> pruner.finish().sparsity
            0.900...
        """
        if self._outcome is None:
            self._check_model()
            self._check_rest()
            self._catch_up()
            self._check_end()
            with weights.changing(self.model):
                self._stepper.finish()
            self._carrier.remove()
            self._outcome = as_noted(self._plan, [])
        return self._outcome

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the network as it is now."""
        return weights.sparsity(self.model)

    def __repr__(self) -> str:
        facts = [type(self.model).__name__, self.method, f"step {self.steps_done:,} of {self.steps:,}"]
        facts.append(f"sparsity {self.sparsity:.4f} of {self.final_sparsity:g}")
        values, total = self._stepper.subject.values, weights.total(self.model)
        size = sum(value.numel() for value in values)
        if size < total:
            zero_share = sum(count(value == 0) for value in values) / size
            goal = self.final_sparsity * total / size
            facts.append(f"sparsity {zero_share:.4f} of {goal:g} of the {size:,} selected")
        return f"Pruner({', '.join(facts)})"

    def __del__(self) -> None:
        # One that was refused in the making has no steps.
        done = getattr(self, "steps_done", 0)
        if done and not self._stepper.fixed and not self._may_end:
            warnings.warn(
                f"a Pruner was given up after {done} of {self.steps} steps, and its {type(self.model).__name__} is not "
                f"pruned to sparsity {self.final_sparsity:g}; hold it until pruner.finish()",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What a broken run needs to go on, beside the state dicts of model, optimiser and scheduler.

        Of a model that fully_shard has cut, it has this rank's rows, and all ranks have to ask.

        Returns:
            Tensors, numbers and strings, as torch.save takes them.

        Example:
            >>> pruner = pp.Pruner(model, sparsity=0.9, steps=20)
            >>> pruner.state_dict()["steps_done"]
            0
        """
        subject = self._stepper.subject
        self._check_model()
        self._catch_up()
        self._may_end = True
        with self._stepper.as_trained():
            trained = [local(value).clone() for value in subject.values]
        return {
            "settings": self._settings(),
            "steps_done": self.steps_done,
            "peak": self._peak,
            "weights": trained,
            "masks": [local(keep).clone() for keep in subject.keeps],
            "learned": [local(p.detach()).clone() for p in weights.learned(self.model).values()],
            "memory": [local(tensor).clone() for tensor in self._stepper.control.memory],
            "momenta": self._offsets.state_dict(),
            "rest": self._fingerprint_of_rest(),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Goes on from `state_dict`, in a pruner that was just made with the same arguments.

        The state dict of the model is loaded as well, before or after; the first step looks whether it was.

        Args:
            content: What `state_dict` returned.

        Raises:
            ValueError: If it belongs to a pruner of other settings, or this one has taken steps already.

        Example:
            >>> twin = pp.models.mlp(64, hidden=[16])
            >>> first = pp.Pruner(twin, sparsity=0.9, steps=20)
            >>> state = first.state_dict()
            >>> del first  # which lets go of its model
            >>> pruner = pp.Pruner(twin, sparsity=0.9, steps=20)
            >>> pruner.load_state_dict(state)
        """
        if self.steps_done:
            raise ValueError(f"this pruner has taken {self.steps_done} steps; load the state into a new one")
        mine = self._settings()
        for name, value in content["settings"].items():
            if mine[name] != value:
                raise ValueError(f"the state has {name} {value}, this pruner {mine[name]}; make it like the first one")
        stepper = self._stepper
        stepper.uncover()
        places = {
            "weights": stepper.subject.values,
            "masks": stepper.subject.keeps,
            "learned": list(weights.learned(self.model).values()),
            "memory": stepper.control.memory,
        }
        for name, tensors in places.items():
            # Once the mask is final, nothing is learned and nothing else is needed.
            for tensor, saved in zip(tensors, content[name], strict=name in ("weights", "masks")):
                local(tensor.detach()).copy_(saved)
        self._offsets.load_state_dict(content["momenta"])
        self.steps_done, self._peak, self._rest = content["steps_done"], content["peak"], content["rest"]
        stepper.resume(self.steps_done + 1, self.steps)
        self._show(fading=False)

    # --- What torch's hooks call.

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Refuses a step that cannot be right."""
        if any(optimizer is mover for mover in self._movers):
            raise ValueError(
                f"the {type(optimizer).__name__} takes a second step after step {self.steps_done} of the pruner; call "
                "pruner.step() once after every optimizer.step()"
            )
        if not self._movers and self.steps_done == self.steps:
            raise ValueError(
                f"the pruner was made for {self.steps} steps, and this is one more; call pruner.finish() first, or "
                "give steps= as many as the loop takes"
            )
        if self.scaler is None and self.steps_done == 0 and _in_scaler():
            raise ValueError(
                "a GradScaler scales the gradients of this loop; give it to the pruner: pp.Pruner(..., scaler=scaler)"
            )
        self._check_model()
        if self.steps_done == 0 and not self._movers:
            self._look_for_earlier_steps(optimizer)
        self._check_rest()

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        """Goes on to the next step when all weights have moved, so that several optimisers see one mask."""
        if not self._movers:
            self._due = True
            if not _has_skipped(optimizer):
                self._move_offsets(optimizer)
        self._movers.append(optimizer)
        self._offsets.zero_grad()
        self._stepper.settle()
        if self._due:
            self._check_finite()
        if self._due and next(self._unmoved(), None) is None:
            self._advance()
        else:
            self._stepper.show(None)
            self._forget_pruned()

    def _scale(self) -> float | None:
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler.get_scale()

    # --- Steps.

    def _unmoved(self) -> Iterator[str]:
        """The weights that want gradients, but that belong to no optimiser of the present step."""
        moved_ids = {id(p) for optimizer in self._movers for group in optimizer.param_groups for p in group["params"]}
        for name, weight in zip(self._stepper.subject.names, self._carrier.weights, strict=True):
            if weight.requires_grad and id(weight) not in moved_ids:
                yield name

    def _catch_up(self) -> None:
        """Goes on to the next step without the optimisers that took none."""
        if self._due:
            self._stepper.uncover()
            self._advance()

    def _advance(self) -> None:
        """From one step to the next; after the last one the network is pruned for good."""
        self._due = False
        self.steps_done += 1
        self._stepper.conclude(self.steps_done, self.steps)
        if self.steps_done == self.steps:
            self._stepper.finish()
        self._show()
        self._forget_pruned()

    def _forget_pruned(self) -> None:
        """Clears what optimisers have gathered for weights that the final mask prunes, once each."""
        for optimizer in self._movers if self._stepper.fixed else ():
            self._forgotten.clear_(optimizer, self._stepper.subject.pairs)

    def _show(self, *, fading: bool = True) -> None:
        """Shows the network of this step; what fades of the scores' start has done so in a run that goes on."""
        stepper = self._stepper
        if fading:
            stepper.prepare(self.steps_done, self.steps)
        if stepper.fixed or self.budget is None:
            stepper.show(None)
            return
        size, total, device = self._sizes
        rows = self.budget.numbers([self.steps_done / self.steps], self.steps, size, total)
        # From pinned memory, so that the host need not wait for the device.
        numbers = torch.tensor([row[0] for row in rows], dtype=torch.float32, pin_memory=device.type == "cuda")
        if not fading:
            numbers[1] = 0
        stepper.show(numbers)
        stepper.note()  # copies of the model have the mask of this moment

    def _skip(self) -> None:
        """A step that the scaler has skipped."""
        if self.scaler is None or not self.scaler.is_enabled():
            raise ValueError(
                f"no optimiser has moved the pruner's weights since its step {self.steps_done}; call pruner.step() "
                "once after every step of an optimiser that has this model's parameters"
            )
        if self.steps_done == self.steps:
            raise ValueError(f"the pruner was made for {self.steps} steps, and this is one more; call pruner.finish()")
        self._stepper.uncover()
        self._offsets.zero_grad()
        self._advance()

    def _offset_optimizer(self) -> OffsetOptimizer:
        """Moves what is learned beside the weights."""
        groups = self._stepper.groups([Config(gate_lr=self._gate_lr)])
        for group in groups:
            group.rate = torch.zeros((), device=group.params[0].device)
        return OffsetOptimizer("sgd", groups)

    def _move_offsets(self, optimizer: Optimizer) -> None:
        factor = self._factor(optimizer)
        if factor != self._moved_by:  # a launch less for most loops
            for group in self._offsets.groups:
                group.rate.fill_(group.base[0] * factor)
            self._moved_by = factor
        self._offsets.step()

    def _factor(self, optimizer: Optimizer) -> float:
        """The present learning rate of the weights, as a share of the largest."""
        ids = {id(weight) for weight in self._carrier.weights}
        group = next(group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"]))
        if group.get("lr") is None:  # an optimiser that finds its rate by itself
            return 1.0
        rate = float(group["lr"])
        self._peak = max(self._peak, rate)
        # Schedulers note where they began, or what they rise to; without one, the largest so far is what is known.
        reference = float(group.get("max_lr", group.get("initial_lr", self._peak)))
        return rate / reference if reference else 1.0

    # --- What is refused.

    def _settings(self) -> dict[str, Any]:
        names = self._stepper.subject.names
        shapes = [f"{name} {tuple(weight.shape)}" for name, weight in zip(names, self._carrier.weights, strict=True)]
        settings = {"method": self.method, "steps": self.steps, "sparsity": self.final_sparsity, "weights": shapes}
        if self.budget is not None:
            terms = self.budget.record()
            settings |= {name: terms[name] for name in ("until", "fade", "min_per_layer", "pattern", "layers")}
        return settings | {"gate_lr": self._gate_lr}

    def _check_model(self) -> None:
        """Refuses to go on where something else has replaced weights or masks."""
        for owner, key, held, name in self._places:
            present = owner.get(key)
            if present is not held and not _is_gathered(held, present):
                raise ValueError(
                    f"{name} is another parameter than when the pruner was made; change the model before that, and "
                    "make a new pruner"
                )
        if weights.notes(self.model).mask is not self._noted_mask:
            raise ValueError(
                "the model has another mask than that of its pruner; call pp.apply_mask or pp.attach after "
                "pruner.finish()"
            )
        # Loops that write through weight.data do so before the first step, or again and again.
        names = self._stepper.overwritten(closely=self.steps_done % _LOOK < 2)
        if names and self._begins():
            self._stepper.adopt()
        elif names:
            raise ValueError(
                f"something other than an optimiser has changed {names[0]} after step {self.steps_done} of the pruner, "
                "which the next step would undo; change weights before the pruner is made, or in "
                "optimizer.register_step_post_hook, which sees those that are trained"
            )

    def _begins(self) -> bool:
        """Whether nothing follows from the weights yet: no step, no mask, and no scores. Rows are ranked together."""
        budget = self.budget
        return self.steps_done == 0 and budget is not None and not budget.fade and self._stepper.subject.between is None

    def _fingerprint_of_rest(self) -> int | None:
        return weights.fingerprint_of_rest(self.model, self._carrier.weights)

    def _check_rest(self) -> None:
        """Refuses to go on with the pruned weights of one state and the other parameters of another."""
        if self._rest is not None and self._rest != self._fingerprint_of_rest():
            raise ValueError(
                f"the pruner goes on from its state after step {self.steps_done}, but biases or other parameters of "
                f"the {type(self.model).__name__} are not those of then; load the model's state dict of the same moment"
            )
        self._rest = None

    def _look_for_earlier_steps(self, optimizer: Optimizer) -> None:
        """Warns of a run that goes on without its pruner's state: it would prune once more from the beginning.

        Weights that are trained are hardly ever zero. A new optimiser, or a dense model, is none that goes on.
        """
        if self.budget is None or not any(_has_moved(optimizer, weight) for weight in self._carrier.weights):
            return
        zeros = sum(count(value == 0) for value in self._stepper.subject.values) - self._noted_zeros
        if zeros > _FEW_ZEROS * self._sizes[0]:
            warnings.warn(
                f"the {type(optimizer).__name__} has taken steps before and {zeros:,} of {self._sizes[0]:,} weights "
                f"are zero without a mask, but the pruner begins at step 0 of {self.steps}; if the run goes on from a "
                "checkpoint, call pruner.load_state_dict, too, and if the zeros are older than the pruner, say so "
                f"before it is made: pp.apply_mask(model, {{n: w != 0 for n, w in {self._plain_weights()}.items()}})",
                stacklevel=2,
            )

    def _plain_weights(self) -> str:
        """The call that returns the weights which nothing else computes."""
        left_alone = weights.computed(self.model)
        return f"pp.select(exclude={left_alone!r})(model)" if left_alone else "pp.prunable(model)"

    def _check_trained(self) -> None:
        """Refuses weights that want gradients, but that no optimiser has."""
        name = next(self._unmoved(), None)
        if name is not None:
            raise ValueError(
                f"{name} is to be pruned, but no optimiser that took a step has it; give it to one, or leave it out by "
                "exclude="
            )

    def _check_finite(self) -> None:
        """Says so when weights are no longer finite; on a GPU the host looks now and then."""
        if self._sizes[2].type != "cpu" and self.steps_done % _LOOK:
            return
        values = [local(value) for value in self._stepper.subject.values]
        bad = [not bool(torch.isfinite(value.sum())) for value in values]
        if any(bad):
            name = self._stepper.subject.names[bad.index(True)]
            raise Diverged(
                f"{name} has NaN or infinite weights after step {self.steps_done + 1} of {self.steps}; use a smaller "
                "learning rate, or check the data and the loss for NaN"
            )

    def _check_end(self) -> None:
        """Refuses to finish before the sparsity is reached, and where nothing was trained."""
        budget, share = self.budget, self.steps_done / self.steps
        if budget is None or self._stepper.fixed or share >= budget.ramp:
            return
        self._may_end = True
        raise Unfinished(
            f"finish comes after {self.steps_done} of {self.steps} steps, but sparsity {self.final_sparsity:g} is "
            f"reached after {math.ceil(budget.ramp * self.steps - 1e-9)}; take them all, give steps= as many as the "
            "loop takes, or call pruner.load_state_dict where the loop went on from a checkpoint"
        )


def _carried_method(name: str) -> Method:
    """The row of a method that can go through a loop that it does not own."""
    able = [key for key, row in METHODS.items() if row.begin is not None]
    if name in METHODS and name not in able:
        raise ValueError(f"the method {name} trains in a loop of its own: pp.{name}; a Pruner has {', '.join(able)}")
    check_name("method", name, able)
    return METHODS[name]


def _check_options(name: str, row: Method, *, data: Data | None, criterion: str | Criterion, **options: Any) -> None:
    """Refuses what the method would not look at, and a criterion without the data that it reads."""
    defaults = {"mask_share": None, "gate_lr": "auto"}
    for option, value in {**options, "criterion": criterion}.items():
        takes = option in (row.flags or ()) if option == "gate_lr" else row.takes(option)
        if not takes and value != defaults.get(option, "magnitude"):
            raise ValueError(f"{option} is {value!r}, which the method {name} has no use of; leave it out")
    if data is None and isinstance(criterion, str) and _needs_data(criterion):
        raise ValueError(f"the criterion {criterion} reads data; give it some: pp.Pruner(..., data=(x, y))")


def _needs_data(criterion: str) -> bool:
    return criterion in CRITERIA and inspect.signature(CRITERIA[criterion]).parameters["data"].default is not None


def _check_ranks(model: nn.Module) -> None:
    """Refuses different weights on ranks that train one network: each would prune its own."""
    value = weights.fingerprint(model)
    advice = "wrap the model in DistributedDataParallel before the pruner is made, or start from the same weights"
    ranks.require_equal({"weights": (str(value), advice)})


def _places(model: nn.Module, names: Sequence[str]) -> list[_Place]:
    """The places of all weights, and of the modules on the way to them."""
    places: dict[tuple[int, str], _Place] = {}
    for name in names:
        owner = model
        *path, key = name.split(".")
        for part in path:
            modules: dict[str, Any] = owner._modules
            places[id(owner), part] = (modules, part, modules[part], name)
            owner = modules[part]
        parameters: dict[str, Any] = owner._parameters
        places[id(owner), key] = (parameters, key, parameters[key], name)
    return list(places.values())


def _is_gathered(held: Any, present: Any) -> bool:
    """Whether fully_shard has put a whole weight in the place of its rows, until a backward pass has ended."""
    both = isinstance(held, nn.Parameter) and isinstance(present, nn.Parameter)
    return both and is_sharded(held) and not is_sharded(present)


def _has_moved(optimizer: Optimizer, weight: nn.Parameter) -> bool:
    """Whether its state, perhaps that of a checkpoint, tells of steps with this weight."""
    state = optimizer.state.get(weight, {})
    return bool(state.get("step", 1)) and any(isinstance(value, torch.Tensor) for value in state.values())


def _has_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimiser did nothing, since a GradScaler found infinite gradients."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _in_scaler() -> bool:
    """Whether a GradScaler has called the optimiser's step."""
    frame = sys._getframe(1)
    while frame is not None:
        # Other frames' variables are not read: a frame that has been asked for them keeps them alive.
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return frame.f_locals["self"].is_enabled()
        frame = frame.f_back
    return False
