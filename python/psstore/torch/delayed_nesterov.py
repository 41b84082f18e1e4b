"""DelayedNesterov: an outer optimizer for learners whose contributions are each a step, and stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from psstore import _core
from psstore.client.arguments import number


class DelayedNesterov(torch.optim.Optimizer):
    """Steps by each gradient alone, and moves a momentum by the mean of every so many.

    >>> outer = psstore.torch.DelayedNesterov(model.parameters(), lr=0.7, momentum=0.9, every=8)
    >>> opt = psstore.torch.DiLoCo(model, inner, store, outer=outer)

    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135, algorithm 3: where learners
    are not waited for, momentum that each stale contribution moves makes a training diverge, or slow. Each gradient
    counts a share of 1 / `every` here, so that so many of them make the step of SGD with Nesterov momentum by their
    mean; with every=1 it is `torch.optim.SGD(nesterov=True)`, bit for bit. In a store the rule of the same name takes
    the step; elsewhere this class does.

    Args:
        params: as of any optimizer of torch's.
        lr: the learning rate.
        momentum: of the momentum's step, more than 0 and less than 1.
        every: gradients of a parameter that make a step of the momentum: as many as there are learners at least, and
            with twice as many a larger learning rate is borne (docs/learners.md).
        activation: share of the momentum that each step in between has of it, at most 1 / every; what is left of it
            comes with the momentum's own step. The paper's c, which is 0 there.

    Raises BadHyper for what is out of these ranges, BadArgument for what is no number.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.7, momentum: float = 0.9, every: int = 4, activation: float = 0.0
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "every": every, "activation": activation}
        numbers = {name: number(name, value) for name, value in given.items()}
        _core.check_hyper(_core.RULES["delayed_nesterov"], numbers, _core.DTYPES["float64"])
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the step here."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["gradient_sum"] = torch.zeros_like(parameter)
        state["step"] += 1
        every, momentum, activation = float(group["every"]), float(group["momentum"]), float(group["activation"])
        buffer, total = state["momentum_buffer"], state["gradient_sum"]
        total.add_(gradient)
        share = activation * momentum
        if state["step"] % every == 0:
            buffer.mul_(momentum).add_(total, alpha=1 / every)
            total.zero_()
            share = (1 - activation * every + activation) * momentum
        parameter.add_(gradient.mul(1 / every).add_(buffer, alpha=share), alpha=-float(group["lr"]))
