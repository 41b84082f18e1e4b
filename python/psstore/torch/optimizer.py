"""DistributedOptimizer: the face of a torch optimizer, for a step that is taken with a store.

What torch.optim promises is here: groups, state dicts, closures, hooks. How a step is taken is in stepping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, overload

import torch

from psstore.client.store import Store
from psstore.errors import NotAWorker, UsageError
from psstore.torch.parameters import trained_parameters
from psstore.torch.rules import rule_of
from psstore.torch.stepping import Overflow, Training, Way
from psstore.torch.store_step import StoreStep


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

    _step_supports_amp_scaling = True
    """Tells a GradScaler to call step() in any case, with what it found: every round has all its workers."""

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
        for group in optimizer.param_groups:
            rule_of(optimizer, group)
        trained = trained_parameters(optimizer.param_groups, named_parameters)
        self._frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
        self._in_store = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.skipped = False
        """The last step changed nothing: gradients of some worker were not finite."""
        self._training = Training(optimizer, store, average)
        self._way: Way = StoreStep(self._training)
        self._way.add(trained)
        self._training.trained += trained
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
        self._refuse_unfrozen()
        self.skipped = not self._way.step(Overflow())
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers of the wrapped one ask
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the 2-norm of the reduced gradient, over all parameters and workers, in the step that follows: what
        clip_grad_norm_ does under DDP. Returns the norm before, a 0-d tensor. One round trip more."""
        return self._way.clip(max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate gradients; nothing is sent."""
        return self._way.no_sync()

    def publish(self) -> None:
        """Makes rank 0's parameters, as they are here now, everybody's: after editing weights by hand."""
        self._way.publish()

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
        self._way.load_state(state_dict["state"])
        super().load_state_dict(dict(state_dict))
        self.optimizer.param_groups = self.param_groups

    # ---- how ----

    def _refuse_unfrozen(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen when this optimizer"
                    " was made, so the store does not have it; make a new DistributedOptimizer after unfreezing"
                )
