"""SGD, Adam and AdamW whose learning rates are tensors: each member of a population has its own, and no step waits.

torch.optim takes one number for all of a parameter. Here the rates lie on the device, so that a captured step reads new
ones at every replay, and a parameter with a leading model dimension takes K of them. The formulas are torch.optim's.

A new optimiser is one class with the methods of `Rule` and one row of OPTIMIZERS.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pacprune.distributed import across, first_index, local
from pacprune.kernels import block_adam

BETA2, EPS = 0.999, 1e-8
State = dict[str, Tensor]
"""The running means of one parameter."""
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""The weights -> an optimiser of torch's that moves them, with its own learning rate."""


@dataclass
class Group:
    """Parameters with the same rates: per member a base learning rate, what momentum keeps, and a weight decay."""

    params: list[nn.Parameter]
    base: list[float]
    momentum: list[float]
    weight_decay: list[float]
    scheduled: bool
    rate: Tensor = field(default_factory=lambda: torch.zeros(()))
    """The present learning rate: 0-dimensional, or one per member."""
    optimizer: str | torch.optim.Optimizer | None = None
    """What these parameters have for themselves, a row of OPTIMIZERS or an optimiser; None: that of the stage."""

    def columns(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rate, momentum, weight decay), shaped to multiply a parameter with a leading model dimension."""
        shape = (-1, *[1] * (p.ndim - 1)) if self.rate.ndim else ()
        return self.rate.reshape(shape), self._momentum.reshape(shape), self._decay.reshape(shape)

    def place_constants(self) -> None:
        """Puts momentum and decay on the device of the rate: a captured step must not copy from the host."""
        per_member = self.rate.ndim > 0
        self._momentum = self.rate.new_tensor(self.momentum if per_member else self.momentum[0])
        self._decay = self.rate.new_tensor(self.weight_decay if per_member else self.weight_decay[0])


def weights_group(params: list[nn.Parameter], factory: Factory) -> Group:
    """Weights that an optimiser of the user's own moves: its learning rates follow the schedule."""
    optimizer = factory(params)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"the optimizer function made a {type(optimizer).__name__}; make one of torch.optim's of the parameters "
            "that it gets, but not LBFGS, which needs several passes per step"
        )
    for entry in optimizer.param_groups:
        entry["initial_lr"] = float(entry["lr"])
    return Group(params, [optimizer.param_groups[0]["initial_lr"]], [0.0], [0.0], True, optimizer=optimizer)


class Rule(Protocol):
    """The formulas of one optimiser."""

    def new_state(self, p: Tensor, group: Group) -> State:
        """The running means of a parameter before its first step."""
        ...

    def step_together(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Moves all parameters of a group that have one rate, in one launch."""
        ...

    def step_members(self, group: Group, p: Tensor, grad: Tensor, state: State) -> None:
        """Moves one parameter, whose members have rates of their own."""
        ...

    def reach(self, rate: Tensor, momentum: Tensor, state: State) -> Tensor:
        """How far a lasting unit of gradient moves a parameter per step."""
        ...


class SGD:
    """buffer <- momentum * buffer + grad; p <- p - rate * buffer. Weight decay is part of the gradient."""

    def new_state(self, p: Tensor, group: Group) -> State:
        """A buffer, where there is momentum."""
        return {"mean": torch.zeros_like(p)} if any(group.momentum) else {}

    def step_together(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """By the fused kernel that torch.optim's own `fused=True` calls."""
        torch.ops.aten._fused_sgd_.tensor_lr(
            params,
            grads,
            [state["mean"] for state in states if state],
            weight_decay=group.weight_decay[0],
            momentum=group.momentum[0],
            lr=group.rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def step_members(self, group: Group, p: Tensor, grad: Tensor, state: State) -> None:
        """The same formula, in plain torch."""
        rate, momentum, decay = group.columns(p)
        if any(group.weight_decay):
            grad = grad + decay * p
        if state and len(set(group.momentum)) == 1:  # one pass over memory less
            grad = torch.add(grad, state["mean"], alpha=group.momentum[0], out=state["mean"])
        elif state:
            grad = state["mean"].mul_(momentum).add_(grad)
        p.addcmul_(grad, -rate)

    def reach(self, rate: Tensor, momentum: Tensor, state: State) -> Tensor:
        """What momentum adds up to."""
        return rate / (1 - momentum)


@dataclass(frozen=True)
class Adam:
    """Adam with beta1 = momentum. Weight decay is part of the gradient, or `decoupled` from it (AdamW)."""

    decoupled: bool

    def new_state(self, p: Tensor, group: Group) -> State:
        """Means of the gradient and of its square, and the number of steps."""
        return {
            "mean": torch.zeros_like(p),
            "square": torch.zeros_like(p),
            "step": torch.zeros((), device=p.device),
        }

    def step_together(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """By the fused kernels that torch.optim's own `fused=True` calls."""
        steps = [state["step"] for state in states]
        torch.ops.aten._foreach_add_(steps, 1)
        kernels = torch.ops.aten._fused_adamw_ if self.decoupled else torch.ops.aten._fused_adam_
        kernels.tensor_lr(
            params,
            grads,
            [state["mean"] for state in states],
            [state["square"] for state in states],
            [],
            steps,
            lr=group.rate,
            beta1=group.momentum[0],
            beta2=BETA2,
            weight_decay=group.weight_decay[0],
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )

    def step_members(self, group: Group, p: Tensor, grad: Tensor, state: State) -> None:
        """The same formulas, in plain torch."""
        rate, momentum, decay = group.columns(p)
        if self.decoupled:
            p.mul_(1 - rate * decay)
        elif any(group.weight_decay):
            grad = grad + decay * p
        mean, square, step = state["mean"], state["square"], state["step"].add_(1)
        mean.mul_(momentum).addcmul_(grad, 1 - momentum)
        square.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        size = torch.sqrt(square / (1 - BETA2 ** step.double())).add_(EPS)
        unbiased = (rate / (1 - momentum.double() ** step)).to(mean.dtype) * mean
        p.sub_(unbiased / size)

    def reach(self, rate: Tensor, momentum: Tensor, state: State) -> Tensor:
        """A unit of gradient is divided by the size of what came before."""
        return rate / (torch.sqrt(state["square"] / (1 - BETA2 ** state["step"].double())) + EPS)


class BlockAdam:
    """AdamW in about 1 byte per parameter: an 8-bit mean, and a second moment for every 256 (`kernels.block_adam`)."""

    def new_state(self, p: Tensor, group: Group) -> State:
        """The mean and its scales, the second moments, and the number of steps."""
        return block_adam.new_state(p)._asdict()

    def step_together(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Tensor by tensor; on a GPU in one launch each."""
        torch._foreach_add_([state["step"] for state in states], 1)  # type: ignore[attr-defined]
        rates = group.rate, group.momentum[0], group.weight_decay[0]
        for p, grad, state in zip(params, grads, states, strict=True):
            block_adam.step_(p, grad, block_adam.State(**state), *rates)

    def step_members(self, group: Group, p: Tensor, grad: Tensor, state: State) -> None:
        """Refused: blocks are cut from the rows of one model."""
        raise ValueError("the optimizer 'adamw8' moves one model, not a population; train one by one, or use 'adamw'")

    def reach(self, rate: Tensor, momentum: Tensor, state: State) -> Tensor:
        """A unit of gradient is divided by the size of what came before in its block."""
        mean, square, form = state["mean"], state["square"], block_adam.rows(state["mean"])
        size = torch.sqrt(square / (1 - block_adam.BETA2 ** state["step"].double()))
        by_number = size.repeat_interleave(block_adam.BLOCK, dim=-1)[:, : form.inner].reshape(mean.shape)
        return rate / (by_number + block_adam.EPS)


OPTIMIZERS: dict[str, Rule] = {
    "sgd": SGD(),
    "adam": Adam(decoupled=False),
    "adamw": Adam(decoupled=True),
    "adamw8": BlockAdam(),
}
"""What `Config.optimizer` names."""


def rule_name(optimizer: str | Factory) -> str:
    """The row of OPTIMIZERS that moves what has no optimiser of its own: beside a function, gates have SGD."""
    return optimizer if isinstance(optimizer, str) else "sgd"


def _step_by(optimizer: torch.optim.Optimizer, group: Group) -> None:
    """A step of an optimiser of the user's own, with its learning rates as the schedule has them now."""
    share = float(group.rate) / group.base[0] if group.base[0] else 0.0
    for entry in optimizer.param_groups:
        entry["lr"] = entry["initial_lr"] * share
    optimizer.step()


class Optimizer:
    """Moves the parameters of several groups by the formulas of one of OPTIMIZERS, or of a group's own."""

    def __init__(self, name: str, groups: list[Group]) -> None:
        self.name, self.groups = name, groups
        for group in groups:
            group.place_constants()
        self.state: dict[int, State] = {}
        """Running means by the parameter's number, made when it first has a gradient."""
        params = [p for group in groups for p in group.params]
        self._number = {id(p): i for i, p in enumerate(params)}
        self._sharded = across(params) is not None

    def _rule(self, group: Group) -> Rule:
        if isinstance(group.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"training on a bound needs to know how far a step moves a weight, which "
                f"{type(group.optimizer).__name__} does not say; use optimizer={' or '.join(map(repr, OPTIMIZERS))}"
            )
        return OPTIMIZERS[group.optimizer or self.name]

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for group in self.groups:
            for p in group.params:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        for group in self.groups:
            if isinstance(group.optimizer, torch.optim.Optimizer):
                _step_by(group.optimizer, group)
                continue
            if group.rate.ndim:
                for p in group.params:
                    if p.grad is not None:
                        self._rule(group).step_members(group, p, p.grad, self._state(p, group))
                continue
            buckets: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
            for p in group.params:
                if p.grad is not None:
                    buckets.setdefault((p.device, p.dtype), []).append(p)
            for params in buckets.values():
                grads = [p.grad for p in params if p.grad is not None]
                self._rule(group).step_together(
                    group, self._rows(params), self._rows(grads), [self._state(p, group) for p in params]
                )

    def reach(self, p: nn.Parameter) -> Tensor:
        """How far a lasting unit of gradient moves this parameter per step: momentum adds up, Adam divides by scale.

        A proximal step beside the optimiser's own has to use it, or the two would not weigh their terms alike.
        """
        group = next(group for group in self.groups if any(p is param for param in group.params))
        rate, momentum, _ = group.columns(p)
        return self._rule(group).reach(rate, momentum, self._state(p, group))

    def state_dict(self) -> dict[str, Any]:
        """The running means, as clones; those of optimisers of the user's own by the number of their group."""
        means = {str(i): {key: t.clone() for key, t in state.items()} for i, state in self.state.items()}
        return means | {f"group {i}": copy.deepcopy(optimizer.state_dict()) for i, optimizer in self._own()}

    def _own(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """The optimisers of the user's own, with the numbers of their groups."""
        pairs = ((i, group.optimizer) for i, group in enumerate(self.groups))
        return [(i, optimizer) for i, optimizer in pairs if isinstance(optimizer, torch.optim.Optimizer)]

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Puts `state_dict` back."""
        params = [p for group in self.groups for p in group.params]
        for i, optimizer in self._own():
            optimizer.load_state_dict(content[f"group {i}"])
        means = {int(i): state for i, state in content.items() if i.isdecimal()}
        self.state = {i: {k: t.to(params[i].device) for k, t in state.items()} for i, state in means.items()}

    def _state(self, p: nn.Parameter, group: Group) -> State:
        number = self._number[id(p)]
        if number not in self.state:
            self.state[number] = state = self._rule(group).new_state(self._rows([p])[0], group)
            if "first" in state:
                state["first"].fill_(self._first_block(number, p))
        return self.state[number]

    def _first_block(self, number: int, p: Tensor) -> int:
        """How many blocks of `block_adam` lie before this rank's rows, of this parameter and of all before it."""
        before = [q for group in self.groups for q in group.params][:number]
        forms = [block_adam.rows(q) for q in before]
        inner = block_adam.rows(p)
        rows_before = first_index(p) // max(1, inner.inner)
        return sum(form.rows * form.blocks for form in forms) + rows_before * inner.blocks

    def _rows(self, tensors: list[Any]) -> list[Tensor]:
        """What this rank holds of tensors that may be sharded."""
        return [local(tensor) for tensor in tensors] if self._sharded else tensors
