"""Strategy `ps`: the store reduces the gradients and takes the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import psstore
from psstore.cli.demo.settings import Settings
from psstore.torch import DistributedOptimizer


class ParameterServer:
    """A worker's store as Peers."""

    def __init__(self, store: psstore.Store, compression: str) -> None:
        assert store.rank is not None, "a store is joined as a worker unless it is told otherwise"
        self.rank = store.rank
        self._store = store
        self._compression = compression

    @property
    def round(self) -> int:
        """The store's, not a count of steps: so a backup worker that was late catches up."""
        return self._store.round

    @property
    def staleness(self) -> int:
        return self._store.staleness

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._store.bytes_pushed, self._store.bytes_pulled

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, DistributedOptimizer(
            optimizer, self._store, named_parameters=model.named_parameters(), compression=self._compression
        )

    def meet(self, name: str) -> None:
        self._store.barrier(name)

    def finish(self, model: nn.Module) -> None:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._store.pull_many(list(weights), out=list(weights.values()))


@contextmanager
def parameter_server(settings: Settings) -> Iterator[ParameterServer]:
    with psstore.connect() as store:
        yield ParameterServer(store, settings.compression)
