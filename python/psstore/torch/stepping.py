"""The ways in which a round's gradients become new parameters, and what they share.

StoreStep    the store reduces and applies           (store_step.py; optimizers that it has a rule for)
WorkerStep   the store reduces, the workers apply    (worker_step.py; every other optimizer)
Averaging    the workers train alone, and the store averages their parameters now and then  (averaging.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from psstore.client.store import Store
from psstore.torch.parameters import Trained
from psstore.wire.messages import Exist


@dataclass
class Training:
    """What is trained, and where."""

    optimizer: torch.optim.Optimizer
    """The one that was wrapped: its class says the rule, its groups the hyper-parameters."""
    store: Store
    average: bool
    """Divide the sum of the gradients by the number of workers."""
    prefix: str = ""
    """Of the names in the store; tells optimizers apart that share one."""
    first_group: int = 0
    """Number in the store of parameter group 0; the others follow."""
    exist: Exist = "match"
    trained: list[Trained] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this worker's values are the ones that count where there can be only one: rank 0's."""
        return self.store.rank == 0


@dataclass(frozen=True)
class Overflow:
    """What a GradScaler has to say of this worker's gradients."""

    loss_scale: float = 1.0
    """The gradients are so many times the real ones."""
    found: bool = False
    """They hold NaN or infinity: the round is to be a skip for all."""


class Way(Protocol):
    """One way to take a step."""

    def add(self, trained: Sequence[Trained]) -> None:
        """Creates these parameters in the store, with rank 0's values. On return they hold what the store holds."""

    def step(self, overflow: Overflow) -> bool:
        """Ends this worker's round; the parameters hold the new values on return. False: it was skipped, by all."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the global norm of the reduced gradient in the step that follows; returns the norm before, 0-d."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate."""

    def publish(self) -> None:
        """Makes rank 0's parameters, as they are here, everybody's."""

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer state as torch's state_dict()['state'] has it: by the parameter's number in the groups."""

    def load_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes over such a state. Rank 0's counts."""
