"""A stepper in a loop that somebody else owns: torch's own hooks tell it the moments of a step.

Outside of the optimiser's step the weights are those that the network computes with, so that forward passes,
evaluation, averages of weights and state dicts see the network. Inside of it they are those that are trained.

    backward pass        at its end the gradients become those of what is trained, so that clipping sees these; before
                         another one adds to them, they are the network's again
    optimizer.step()     before it the weights become those that are trained; a closure is called on the network
                         after it the stepper goes on, and the weights are the network's again
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from pacprune.distributed import across_model, count, is_sharded, local
from pacprune.masking import masks, weights
from pacprune.training.controls import CARRIED, Stepper, refuse_carried


class Carrier:
    """Carries a stepper through steps of torch.optim.

    Args:
        stepper: What moves or keeps the masks; its weights are shown already.
        before: Called before an optimiser moves the weights, and may refuse to.
        look: Called when a backward pass begins, and may refuse what something else did to the weights.
        after: Called after that, with the weights as trained; it leaves them shown.
        optimizer: The one that keeps it alive, where nobody else does.
        scale: What losses are multiplied with, where a GradScaler does that.
        refresh: Called before an optimiser's step and when a backward pass begins; False lets these pass by.

    It listens to every optimiser that holds some of the weights.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
        look: Callable[[], None] = lambda: None,
        optimizer: Optimizer | None = None,
        scale: Callable[[], float | None] = lambda: None,
        refresh: Callable[["Carrier"], bool] = lambda _: True,
    ) -> None:
        self._before, self._after, self._look, self._scale, self._refresh = before, after, look, scale, refresh
        self._pass: weakref.ref[Callable[[], None]] | None = None
        """What ends the backward pass that is under way. Only the pass holds it: one that broke off has none."""
        _remove(_FORSAKEN)
        # Global hooks must not keep alive what nobody else holds; those of one optimiser live as long as it does.
        self.handles: list[Any] = [
            register_optimizer_step_pre_hook(weakly(self._before_step)),
            register_optimizer_step_post_hook(weakly(self._after_step)),
        ]
        if optimizer is not None:
            self.handles.append(optimizer.register_step_post_hook(self._hold))
        self._lasting = len(self.handles)
        """How many hooks stay when another stepper is followed."""
        self.stepper = stepper
        self.follow(stepper)
        weakref.finalize(self, _FORSAKEN.extend, self.handles)

    def _hold(self, *_: Any) -> None:
        """A hook that does nothing, by which an optimiser keeps the carrier alive."""

    def follow(self, stepper: Stepper) -> None:
        """Carries this stepper from now on, whose weights are shown already."""
        CARRIED.discard(self.stepper)
        self.stepper = stepper
        CARRIED.add(stepper)
        self.weights = [weight for weight, _ in stepper.subject.pairs]
        self._ids = {id(weight) for weight in self.weights}
        self._addresses = [local(weight).data_ptr() for weight in self.weights]
        for handle in self.handles[self._lasting :]:
            handle.remove()
        del self.handles[self._lasting :]
        self._watch_backward()

    def _watch_backward(self) -> None:
        """Learns when a backward pass begins: by its first gradient or, of a sharded model, by that of its output."""
        begins = weakly(self._backward_begins)
        if any(is_sharded(weight) for weight in self.weights):

            def watch(module: nn.Module, inputs: Any, output: Any) -> None:
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(begins)

            self.handles.append(self.stepper.model.register_forward_hook(watch))
            return
        self.handles += [weight.register_hook(begins) for weight in self.weights if weight.requires_grad]

    def remove(self) -> None:
        """Listens no longer."""
        _remove(self.handles)
        CARRIED.discard(self.stepper)

    def __repr__(self) -> str:
        keeps = self.stepper.subject.keeps
        total = sum(keep.numel() for keep in keeps)
        pruned_count = total - sum(count(keep) for keep in keeps)
        state = f"{pruned_count:,} of {total:,} weights stay zero" if self.handles else "removed"
        return f"Carrier({type(self.stepper.model).__name__}, {state})"

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._in_backward() or not self._refresh(self):
            return
        if not self.stepper.shown:
            raise ValueError(
                "a gradient arrived while the weights are those that the optimiser moves, since its last step broke "
                "off; start again from a checkpoint"
            )
        self._look()
        stepper, converted = self.stepper, sorted(self.stepper.converted)
        stepper.revert()
        before = _gradient_states(self.weights)

        def ends() -> None:
            self._pass = None
            # A pass by autograd.grad leaves .grad as it is: what others copy there later has not been converted.
            after = _gradient_states(self.weights)
            written = {i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
            stepper.convert(self._scale(), written.union(converted))

        self._pass = weakref.ref(ends)
        engine = torch.autograd.Variable._execution_engine
        # What reduces gradients over ranks has its own callback at the end; this one comes after it.
        engine.queue_callback(lambda: engine.queue_callback(ends))

    def _in_backward(self) -> bool:
        """Whether a backward pass is under way."""
        return self._pass is not None and self._pass() is not None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Makes the weights those that are trained, or a closure one that does so at its end."""
        if not self._refresh(self) or not self.holds(optimizer):
            return None
        try:
            self._check_outside()
            self._check_memory()
            self._before(optimizer)
        except Exception:
            _show_again(optimizer)
            raise
        by_keyword = kwargs.get("closure")
        closure = args[1] if by_keyword is None and len(args) > 1 else by_keyword
        if closure is None:
            _HIDDEN.pop(self.stepper, None)  # of a step that broke off, which nothing takes back
            if self.stepper.shown:
                _HIDDEN[self.stepper] = id(optimizer)
            self._hide()
            return None

        def on_the_network() -> Any:
            if not self.stepper.shown:
                self.stepper.show(None)
            value = closure()
            self._hide()
            return value

        if by_keyword is not None:
            return args, {**kwargs, "closure": on_the_network}
        return (args[0], on_the_network, *args[2:]), kwargs

    def _hide(self) -> None:
        self.stepper.convert()
        self.stepper.uncover()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # An optimiser that wraps another one ends its step a second time.
        if self.holds(optimizer) and not self.stepper.shown:
            _HIDDEN.pop(self.stepper, None)
            self._after(optimizer)

    def _check_outside(self) -> None:
        """Refuses a step inside of a backward pass, which still needs the weights that the network computed with."""
        if self._in_backward():
            raise ValueError(
                "an optimiser takes a step inside of a backward pass, such as by a hook of post-accumulated gradients, "
                "where pruned weights cannot be kept; call optimizer.step() after backward()"
            )

    def _check_memory(self) -> None:
        """Refuses weights that are no longer where they were: what is written to the old place would be lost."""
        for name, weight, address in zip(self.stepper.subject.names, self.weights, self._addresses, strict=True):
            if local(weight).data_ptr() != address:
                raise ValueError(
                    f"{name} has moved to other memory (by model.to, .half() or an optimiser with flat storage) since "
                    "its mask is carried through training; do that first"
                )

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether it moves some of the weights."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])


def _gradient_states(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where every gradient is, and how often it has been written to."""
    gradients = [weight.grad for weight in parameters]
    return [(0, 0) if g is None else (id(g), local(g)._version) for g in gradients]


_FORSAKEN: list[Any] = []
"""Hooks of carriers that nobody holds, which do nothing. They are removed when the next carrier is made.

Garbage may be collected while torch goes through its hooks, which must not change then.
"""


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


_HIDDEN: "weakref.WeakKeyDictionary[Stepper, int]" = weakref.WeakKeyDictionary()
"""Steppers whose networks a step of an optimiser has hidden, each with the optimiser's id."""


def _show_again(optimizer: Optimizer) -> None:
    """Takes back what others have done for a step that is refused: its optimiser may have the weights of several."""
    for stepper in [stepper for stepper, number in _HIDDEN.items() if number == id(optimizer)]:
        del _HIDDEN[stepper]
        stepper.show(None)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


@torch.no_grad()
def clear_states_(optimizer: Optimizer, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Forgets what an optimiser has gathered for pruned weights: momenta and other tensors of the weight's shape."""
    for weight, keep in pairs:
        states = [value for value in optimizer.state.get(weight, {}).values() if isinstance(value, Tensor)]
        weights.zero_pruned_([(value, keep) for value in states if value.shape == weight.shape])


class ForgottenStates:
    """The optimisers that have forgotten what they had gathered for the weights that a mask prunes."""

    def __init__(self) -> None:
        self._cleared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._heard: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that tell when a state is loaded into them."""

    def clear_(self, optimizer: Optimizer, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Lets an optimiser forget, once; and again where a state was loaded into it since."""
        if optimizer in self._cleared:
            return
        clear_states_(optimizer, pairs)
        self._cleared.add(optimizer)
        if optimizer not in self._heard:
            optimizer.register_load_state_dict_post_hook(weakly(self._loaded))
            self._heard.add(optimizer)

    def _loaded(self, optimizer: Optimizer) -> None:
        self._cleared.discard(optimizer)

    def start_anew(self) -> None:
        """Of another mask, nothing is forgotten yet."""
        self._cleared.clear()


def keep_zeros(model: nn.Module, optimizer: Optimizer) -> Carrier:
    """Lets pruned weights stay zero in a training loop of your own, whatever the optimiser does to them.

    Pruned are those that `apply_mask`, `harden` or a method left out. A model without such a mask, say after
    load_state_dict, keeps the zeros that its weights have now; those that weight norm or another parametrization
    computes are left alone. Gradients of pruned weights are zero at the end
    of every backward pass, so that they do not count where gradients are clipped, nor in the directions of LBFGS. What
    the optimiser had gathered for them is forgotten.

    Other optimisers that move some of these weights are watched, too. Where the model gets another mask later, that is
    the one that counts. Without a mask all weights are trained.

    Args:
        model: A plain model with zeros, on the device where it is trained.
        optimizer: What trains it: any of torch.optim, also foreach, fused or capturable. The zeros stay as long as it
            lives.

    Returns:
        What does it, with a method `remove()` that ends it.

    Raises:
        ValueError: If there are no zeros to keep, if pruned weights are no longer zero, or if the optimiser has none
            of the pruned weights.

    Example:
        >>> model = pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> handle = pp.keep_zeros(model, optimizer)
        >>> handle
        Carrier(Sequential, 1,066 of 1,184 weights stay zero)
        >>> torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
        >>> round(pp.sparsity(model), 3)
        0.9
    """
    across_model(model)
    refuse_carried(model)
    _note_zeros(model)
    weights.refuse_sparse_gradients(model, weights.masked_names(model))
    keeper = _Keeper(model)
    carrier = Carrier(
        keeper.stepper, before=keeper.forget, after=keeper.settle, refresh=keeper.refresh, optimizer=optimizer
    )
    if not carrier.holds(optimizer):
        carrier.remove()
        names = ", ".join(keeper.stepper.subject.names[:3])
        raise ValueError(
            f"the {type(optimizer).__name__} moves none of the pruned weights ({names}); make it from this model's "
            "parameters"
        )
    keeper.forget(optimizer)
    return carrier


class _Keeper:
    """Keeps the zeros of the mask that a model has at a moment."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stepper = self._present()
        self._forgotten = ForgottenStates()

    def _present(self) -> Stepper:
        self._masks = [(note, note.mask) for _, note in weights.noted(self.model)]
        stepper = Stepper(self.model, None, clean=True)
        stepper.show(None)
        return stepper

    def refresh(self, carrier: Carrier) -> bool:
        """Takes up the present mask; False while something else moves it."""
        if all(note.mask is mask for note, mask in self._masks):
            return True
        if any(note.moving for note, _ in self._masks):
            return False
        if self.stepper.shown and not carrier._in_backward():
            self.stepper = self._present()
            self._forgotten.start_anew()
            carrier.follow(self.stepper)
        return True

    def forget(self, optimizer: Optimizer) -> None:
        """Clears what an optimiser has gathered for pruned weights."""
        self._forgotten.clear_(optimizer, self.stepper.subject.pairs)

    def settle(self, optimizer: Optimizer) -> None:
        """After a step pruned weights are zero."""
        self.stepper.settle()
        self.stepper.show(None)


def _note_zeros(model: nn.Module) -> None:
    """Sees to it that the model has a mask, and that the mask is true."""
    if weights.masked(model):
        revived = weights.revived(model)
        if revived:
            raise ValueError(f"{revived}, so that there is nothing to keep; call pp.apply_mask(model, mask) first")
        return
    mask = {name: weight.detach() != 0 for name, weight in weights.plain_weights(model).items()}
    if masks.kept(mask) == sum(keep.numel() for keep in mask.values()):
        weights.refuse_computed(model, weights.computed(model))  # where the zeros may be
        raise ValueError(
            f"{type(model).__name__} has no zeros to keep among its {masks.kept(mask):,} weights; prune it first, or "
            "load a sparse state dict"
        )
    weights.apply_mask(model, mask)
