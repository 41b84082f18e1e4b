"""What every strategy is to a worker of the demo: its way to train one model together with the others."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Peers(Protocol):
    """The other workers, as one of them sees them; connected from the start."""

    @property
    def rank(self) -> int:
        """This worker's."""

    @property
    def round(self) -> int:
        """The one that the next step ends; the first is 1."""

    @property
    def staleness(self) -> int:
        """Rounds by which this worker is ahead of the slowest."""

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Sent and received since it was connected."""

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What to call and what to step instead of these two. On return the model has rank 0's values."""

    def meet(self, name: str) -> None:
        """Blocks until every worker is here."""

    def finish(self, model: nn.Module) -> None:
        """Gives the model the final weights, once all have met after the last round."""
