"""Strategy `average`: every worker trains alone, and every few steps the store averages the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import psstore
from psstore.cli.demo.settings import Settings
from psstore.torch import DistributedOptimizer


class ModelAveraging:
    """A worker's store as Peers. Its own steps are what counts as rounds: the store sees one in every few."""

    staleness = 0

    def __init__(self, store: psstore.Store, every: int) -> None:
        assert store.rank is not None, "a store is joined as a worker unless it is told otherwise"
        self.rank = store.rank
        self.round = 1
        self._store = store
        self._every = every
        self._optimizer: DistributedOptimizer | None = None

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._store.bytes_pushed, self._store.bytes_pulled

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._optimizer = DistributedOptimizer(
            optimizer, self._store, named_parameters=model.named_parameters(), mode="average", every=self._every
        )
        self._optimizer.register_step_post_hook(self._stepped)
        return model, self._optimizer

    def _stepped(self, *_: object) -> None:
        self.round += 1

    def meet(self, name: str) -> None:
        self._store.barrier(name)

    def finish(self, model: nn.Module) -> None:
        """Averages what the last steps made of it."""
        assert self._optimizer is not None, "distribute() comes first"
        self._optimizer.synchronize()


@contextmanager
def model_averaging(settings: Settings) -> Iterator[ModelAveraging]:
    with psstore.connect() as store:
        yield ModelAveraging(store, settings.every)
