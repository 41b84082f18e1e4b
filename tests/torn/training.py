"""Workers that train without a pause, in processes of their own that can be killed at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

import psstore
from psstore.client.store import Store
from psstore.errors import AvailabilityError, WorkerLost
from tests.torn.cases import NUM_WORKERS, specs

JOIN_S = 60.0

_FRESH = multiprocessing.get_context("forkserver")


class Workers:
    """All workers of a store; a killed one's place is taken by a new life."""

    def __init__(self, url: str, transport: str) -> None:
        _FRESH.set_forkserver_preload(["psstore", "numpy", "tests.torn.training"])
        self._where = (url, transport)
        self._processes = [self._start(rank) for rank in range(NUM_WORKERS)]
        self.num_killed = 0

    def kill(self, rank: int) -> None:
        """Wherever it is: in the middle of a frame, between its pushes and its commit, before it told a shard."""
        self._end(rank)
        self.num_killed += 1
        self._processes[rank] = self._start(rank)

    def close(self) -> None:
        for rank in range(NUM_WORKERS):
            self._end(rank)

    def _start(self, rank: int) -> BaseProcess:
        process = _FRESH.Process(target=train, args=(*self._where, rank), daemon=True)
        process.start()
        return process

    def _end(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()


def train(url: str, transport: Any, rank: int) -> None:
    """Every step takes 1 from every element of every tensor: a value says of which version it is."""
    gradients = {spec.name: np.ones(spec.shape, np.float32) for spec in specs()}
    with contextlib.suppress(AvailabilityError):  # the store has ended before
        store = psstore.connect(url, rank=rank, transport=transport, wait_s=JOIN_S)
        store.create_many(specs())
        while True:
            store.push_many(gradients)
            commit(store)
            store.pull_many(list(gradients))


def commit(store: Store) -> None:
    """Returns when the round is decided: who waits for somebody that was lost, waits on for the next life."""
    while True:
        try:
            store.commit({"lr": 1.0})
        except WorkerLost:
            continue
        return
