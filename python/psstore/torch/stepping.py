"""The ways in which a round's gradients become new parameters, and what they share.

StoreStep    the store reduces and applies           (store_step.py; optimizers that it has a rule for)
WorkerStep   the store reduces, the workers apply    (worker_step.py; every other optimizer)
Averaging    the workers train alone, and the store averages their parameters now and then  (averaging.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.errors import NotInitialised
from psstore.torch.claims import claim
from psstore.torch.compression import compression_for
from psstore.torch.parameters import Names, Trained, trainable
from psstore.torch.telling import explained
from psstore.wire.messages import Exist

Overlap = Literal["auto", "backward", "eager", "none"]
"""When gradients travel: 'backward', while it runs; 'eager', so, with new parameters on their way back already; 'none',
in step(); 'auto', while backward runs if that does not take its processor time, see gradients.py."""


@dataclass
class Training:
    """What is trained, and where."""

    optimizer: torch.optim.Optimizer
    """The one that was wrapped: its class says the rule, its groups the hyper-parameters."""
    store: Store
    names: Names
    average: bool = True
    """Divide the sum of the gradients by the number of workers."""
    overlap: Overlap = "auto"
    first_group: int = 0
    """Number in the store of parameter group 0; the others follow."""
    exist: Exist = "match"
    compression: Compression = field(default_factory=Compression)
    """Of the groups that say nothing of their own."""
    trained: list[Trained] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)
    """The id() of each parameter that is trained, which `trained` keeps alive."""

    @property
    def is_first(self) -> bool:
        """Whether this worker's values are the ones that count where there can be only one: rank 0's."""
        return self.store.rank == 0

    def compression_of(self, one: Trained) -> Compression:
        return compression_for(one, self.optimizer.param_groups, self.compression)

    def newcomers(self) -> list[Trained]:
        """What is in the groups, requires a gradient and is not trained yet: unfrozen since, or of a new group."""
        groups = self.optimizer.param_groups
        if all(self._known.issuperset(map(id, group["params"])) for group in groups):
            return []
        return trainable(groups, self.names, known=self._known)

    def admit(self, way: Way) -> None:
        """Takes in the newcomers, if there are any. Every worker must, in the same round."""
        new = self.newcomers()
        if new:
            try:
                way.add(new)
            except NotInitialised as error:
                raise explained(
                    error, "it is rank 0's to send: what is trained and what is frozen must be alike on every worker"
                ) from None
            self.trained += new
            self._known.update(id(one.parameter) for one in new)
            claim(self.store, way, new)


@dataclass(frozen=True)
class Overflow:
    """What a GradScaler has to say of this worker's gradients."""

    loss_scale: float = 1.0
    """The gradients are so many times the real ones."""
    found: bool = False
    """They hold NaN or infinity: the round is to be a skip for all."""
    rewritten: bool = False
    """They were divided in place, by unscale_, which leaves no trace in their version counters."""


class Way(Protocol):
    """One way to take a step."""

    def add(self, trained: Sequence[Trained]) -> None:
        """Creates these parameters in the store, with rank 0's values. On return they hold what the store holds."""

    def retire(self) -> None:
        """Another optimizer has been made for some of these tensors, under the same names: from now on nothing is sent
        but by a call."""

    @property
    def shares_next(self) -> bool:
        """Whether the next step is a round, and not this worker's alone."""

    def admit_closure(self) -> None:
        """Raises UsageError if no backward pass may run within step() now."""

    def step(self, overflow: Overflow) -> bool:
        """Ends this worker's round; the parameters hold the new values on return. False: it was skipped, by all."""

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        """Clips the global norm of the reduced gradient in the step that follows; returns the norm before, 0-d."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate."""

    def expect(self, loss_scale: float) -> None:
        """The gradients to come are so many times the real ones, as far as is known."""

    def publish(self) -> None:
        """Makes rank 0's parameters, as they are here, everybody's; every worker calls it."""

    def synchronize(self) -> None:
        """Makes the parameters the same on every worker, which calls it, should they have been trained apart."""

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's state by parameter, as torch has it. `whole`: that of parameters that have not stepped, too,
        as it is before their first step."""

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """By parameter: what this worker's codecs kept back."""

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Takes them over. Nothing was kept back of the parameters that are not named."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over groups and state of a state_dict() of the wrapped optimizer's class."""
