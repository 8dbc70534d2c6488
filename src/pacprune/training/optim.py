"""SGD, Adam and AdamW whose learning rates are tensors: each member of a population has its own, and no step waits.

torch.optim takes one number for all of a parameter. Here the rates lie on the device, so that a captured step reads new
ones at every replay, and a parameter with a leading model dimension takes K of them. The formulas are torch.optim's.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.distributed.sharded import local

BETA2, EPS = 0.999, 1e-8


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

    def columns(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rate, momentum, weight decay), shaped to multiply a parameter with a leading model dimension."""
        shape = (-1, *[1] * (p.ndim - 1)) if self.rate.ndim else ()
        return self.rate.reshape(shape), self._momentum.reshape(shape), self._decay.reshape(shape)

    def settle(self) -> None:
        """Puts the constants on the device of the rate: a captured step must not copy from the host."""
        one = (lambda values: values) if self.rate.ndim else (lambda values: values[0])
        self._momentum, self._decay = (self.rate.new_tensor(one(v)) for v in (self.momentum, self.weight_decay))


class Optimizer:
    """One step of SGD with momentum, Adam or AdamW (`kind`) over several groups."""

    def __init__(self, kind: str, groups: list[Group]) -> None:
        self.kind, self.groups = kind, groups
        for group in groups:
            group.settle()
        self.state: dict[int, dict[str, Tensor]] = {}
        """Running means by the parameter's number, made when it first has a gradient."""
        self._number = {id(p): i for i, p in enumerate(p for group in groups for p in group.params)}

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for group in self.groups:
            for p in group.params:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        for group in self.groups:
            buckets: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
            for p in group.params:
                if p.grad is not None:
                    buckets.setdefault((p.device, p.dtype), []).append(p)
            for params in buckets.values():
                states = [self._state(p, group) for p in params]
                if group.rate.ndim == 0:
                    self._together(group, params, states)
                else:
                    self._one_by_one(group, params, states)

    def reach(self, p: nn.Parameter) -> Tensor:
        """How far a lasting unit of gradient moves this parameter per step: momentum adds up, Adam divides by scale.

        A proximal step beside the optimiser's own has to use it, or the two would not weigh their terms alike.
        """
        group = next(g for g in self.groups if any(p is q for q in g.params))
        rate, momentum, _ = group.columns(p)
        if self.kind == "sgd":
            return rate / (1 - momentum)
        state = self._state(p, group)
        return rate / (torch.sqrt(state["square"] / (1 - BETA2 ** state["step"].double())) + EPS)

    def state_dict(self) -> dict[str, Any]:
        """The running means, as clones."""
        return {str(i): {key: t.clone() for key, t in state.items()} for i, state in self.state.items()}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Puts `state_dict` back."""
        params = [p for group in self.groups for p in group.params]
        self.state = {int(i): {k: t.to(params[int(i)].device) for k, t in s.items()} for i, s in content.items()}

    def _state(self, p: nn.Parameter, group: Group) -> dict[str, Tensor]:
        number = self._number[id(p)]
        if number not in self.state:
            zeros = torch.zeros_like(local(p))
            made = {"mean": zeros} if self.kind != "sgd" or any(group.momentum) else {}
            if self.kind != "sgd":
                made |= {"square": zeros.clone(), "step": torch.zeros((), device=p.device)}
            self.state[number] = made
        return self.state[number]

    def _together(self, group: Group, params: list[nn.Parameter], states: list[dict[str, Tensor]]) -> None:
        """One launch for all parameters, by the fused kernels that torch.optim's own `fused=True` calls."""
        grads, means = [local(p.grad) for p in params], [state["mean"] for state in states if state]  # type: ignore[arg-type]
        params = [local(p) for p in params]  # type: ignore[misc]
        momentum, decay = group.momentum[0], group.weight_decay[0]
        if self.kind == "sgd":
            torch.ops.aten._fused_sgd_.tensor_lr(
                params,
                grads,
                means,
                weight_decay=decay,
                momentum=momentum,
                lr=group.rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        steps = [state["step"] for state in states]
        torch.ops.aten._foreach_add_(steps, 1)
        kernel = (
            torch.ops.aten._fused_adam_.tensor_lr if self.kind == "adam" else torch.ops.aten._fused_adamw_.tensor_lr
        )
        kernel(
            params,
            grads,
            means,
            [state["square"] for state in states],
            [],
            steps,
            lr=group.rate,
            beta1=momentum,
            beta2=BETA2,
            weight_decay=decay,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )

    def _one_by_one(self, group: Group, params: list[nn.Parameter], states: list[dict[str, Tensor]]) -> None:
        """The same with rates that differ between the members of a population."""
        for p, state in zip(params, states, strict=True):
            rate, momentum, decay = group.columns(p)
            grad = p.grad
            assert grad is not None
            if self.kind == "adamw":
                p.mul_(1 - rate * decay)
            elif any(group.weight_decay):
                grad = grad + decay * p
            if self.kind == "sgd":
                if state and len(set(group.momentum)) == 1:  # one pass over memory less
                    grad = torch.add(grad, state["mean"], alpha=group.momentum[0], out=state["mean"])
                elif state:
                    grad = state["mean"].mul_(momentum).add_(grad)
                p.addcmul_(grad, -rate)
                continue
            mean, square, step = state["mean"], state["square"], state["step"].add_(1)
            mean.mul_(momentum).addcmul_(grad, 1 - momentum)
            square.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            size = torch.sqrt(square / (1 - BETA2 ** step.double())).add_(EPS)
            unbiased = (rate / (1 - momentum.double() ** step)).to(mean.dtype) * mean
            p.sub_(unbiased / size)
