"""DistributedOptimizer: a torch optimizer whose step is taken by the store.

A step has three moves, each a method of its own: push this round's gradients, commit the round with the
hyper-parameters of now, pull the new values into the parameters' own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch

from psstore.client.store import Store
from psstore.errors import NotAWorker, UsageError
from psstore.torch.parameters import STORED_AS, trained_parameters
from psstore.torch.rules import hyper_of, rule_of
from psstore.types import TensorSpec


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains the parameters of a torch optimizer on a store.

    >>> opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    >>> opt = psstore.torch.DistributedOptimizer(opt, store, named_parameters=model.named_parameters())

    It stands in for the optimizer that it wraps (SGD, Adam, AdamW, Adagrad or RMSprop of torch.optim), and
    shares its `param_groups`: schedulers made for either work, and hyper-parameters are read at every step.
    Momenta and other optimizer state live in the store, so `state` stays empty.

    Construction creates the tensors in the store, which rank 0's values initialise; on return the parameters
    hold what the store holds, on every worker. It blocks until rank 0 has been there. `step()` blocks until the
    round is decided, as the store's mode has it. Frozen parameters and buffers (batch-norm statistics) stay
    local to each worker.

    Args:
        optimizer: whose class says the update rule, and whose groups say the hyper-parameters.
        store: a connected worker's `psstore.Store`. Optimizers of one class may share it: each step is a round.
        named_parameters: `model.named_parameters()`; must cover every parameter that requires a gradient.
        average: divide the sum of the gradients by the number of workers in the round; False: don't.

    Raises UsageError for what can't be trained, NotAWorker for a client's store, before anything is created; the
    store's own errors otherwise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        average: bool = True,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is distributed already; wrap the torch.optim optimizer itself, once")
        if store.rank is None:
            raise NotAWorker(
                "only a worker's store can train: connect with role='worker' (the default), before leave()"
            )
        self._rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
        self._trained = trained_parameters(optimizer.param_groups, named_parameters)
        self._frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
        self._store = store
        self._average = average
        self._in_store = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self._initialise()
        self._in_store = True

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Ends this worker's round: the parameters hold the store's new values on return.

        A parameter whose gradient is None counts as zero in the round's average; if no worker has a gradient
        for it, it stays as it is. A worker that is too late for its round (mode 'backup') only catches up.
        Returns the closure's loss. Raises UsageError for gradients that can't be sent, and the store's errors
        (WorkerLost, DeadlineExceeded, StoreClosed, ...), which leave the parameters as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        self._store.push_many(gradients)
        self._commit()
        self._pull()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers of the wrapped one ask
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only during construction: later, the other workers would not know of it."""
        if self._in_store:
            raise UsageError(
                "a parameter group can't be added once the store trains: add it to the torch optimizer first, with"
                " requires_grad as it shall be, then make the DistributedOptimizer"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the hyper-parameters of a `state_dict()`, which holds nothing else: the state is the store's.

        Raises UsageError for one that does have state, such as a plain torch optimizer's after a step.
        """
        if state_dict["state"]:
            raise UsageError(
                "this state_dict holds optimizer state (momenta and the like) of a plain torch optimizer; the store"
                " keeps that state itself and can't take it over: start from the model's weights, or clear"
                " state_dict['state'] to load the hyper-parameters only"
            )
        super().load_state_dict(dict(state_dict))
        self.optimizer.param_groups = self.param_groups

    # ---- the three moves ----

    def _gradients(self) -> dict[str, torch.Tensor]:
        """By name, those that are there."""
        found = {}
        for name, parameter, _ in self._trained:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise UsageError(
                        f"the gradient of {name!r} has layout {gradient.layout}; the store trains dense gradients: make"
                        " the embedding with sparse=False"
                    )
                found[name] = gradient
        self._refuse_unfrozen()
        return found

    def _commit(self) -> None:
        groups = sorted({trained.group for trained in self._trained})
        hypers = {group: hyper_of(self._rules[group], self.param_groups[group]) for group in groups}
        self._store.commit(hypers, average=self._average)

    def _pull(self) -> None:
        names = [name for name, _, _ in self._trained]
        self._store.pull_many(names, out=[parameter.detach() for _, parameter, _ in self._trained])

    # ---- how ----

    def _initialise(self) -> None:
        specs = [
            TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=STORED_AS[parameter.dtype],
                rule=self._rules[group],
                group=group,
                zeros=False,
            )
            for name, parameter, group in self._trained
        ]
        first = self._store.rank == 0
        values = [parameter.detach() for _, parameter, _ in self._trained] if first else None
        self._store.create_many(specs, values, offer=first)
        self._pull()

    def _refuse_unfrozen(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen when this optimizer"
                    " was made, so the store does not have it; make a new DistributedOptimizer after unfreezing"
                )
