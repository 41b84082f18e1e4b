"""Stores under test over every transport: inside this process, or real processes behind TCP or unix sockets, or with
shared memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import pytest

import psstore
from psstore.client.local import LocalStore
from psstore.client.store import AsyncStore, Store
from tests.support.server_process import StoreProcess

T = TypeVar("T")

UNIX = pytest.param("unix", marks=(pytest.mark.sockets, pytest.mark.one_loop))
SHM = pytest.param("shm", marks=(pytest.mark.sockets, pytest.mark.one_loop))
"""Not under the second loop, too: a shard's hears of its poller and its listeners alone, whatever their sockets are."""

TRANSPORTS = ("local", pytest.param("tcp", marks=pytest.mark.sockets), UNIX)

TO_SHARDS = ("tcp", UNIX, SHM)
"""Ways to shards that are processes."""

MAY_FORK = "ignore:This process:DeprecationWarning"
"""From Python 3.12 on, whoever forks beside other threads is warned."""

PATIENCE_S = 60.0
"""For waits that are to end at once: a machine that does much else may take its time."""

PACE_S = 0.01
"""Between rounds of who trains until something else has happened, which needs the processors that rounds would take."""


class Cluster:
    """A running store, and how to get to it."""

    def __init__(
        self, transport: str, *, shards: int, workers: int, mode: str, staleness: int | None, flags: tuple[str, ...]
    ) -> None:
        self._ends = contextlib.ExitStack()
        self.num_shards = shards
        self.num_workers = workers
        self.transport: Any = transport
        self.local: LocalStore | None = None
        self.process: StoreProcess | None = None
        if transport == "local":
            assert not flags, "an embedded store has no flags"
            bound = 2 if staleness is None else staleness
            self.local = self._ends.enter_context(LocalStore(shards, workers=workers, mode=mode, staleness=bound))
            return
        arguments = ["--shards", str(shards), "--workers", str(workers), "--mode", mode, *flags]
        if staleness is not None:
            arguments += ["--staleness", str(staleness)]
        if transport == "unix":
            folder = self._ends.enter_context(tempfile.TemporaryDirectory())
            arguments += ["--uds", str(Path(folder) / "store")]
        self.process = self._ends.enter_context(StoreProcess(*arguments, port=None if transport == "unix" else 0))

    @property
    def url(self) -> str:
        assert self.process is not None, "an embedded store has no address"
        return self.process.url

    def connect(self, *, rank: int | None = None, role: Any = "worker", wait_s: float = PATIENCE_S) -> Store:
        """A connection; it is closed with the cluster, if not before."""
        if self.local is not None:
            store = self.local.connect(rank=rank, role=role, wait_s=wait_s)
        else:
            store = psstore.connect(self.url, rank=rank, role=role, wait_s=wait_s, transport=self.transport)
        self._ends.callback(store.close)
        return store

    async def connect_async(self, *, role: Any = "worker") -> AsyncStore:
        if self.local is not None:
            return self.local.connect_async(role=role)
        return await psstore.connect_async(self.url, role=role, transport=self.transport)

    def workers(self, wait_s: float = PATIENCE_S) -> list[Store]:
        """All of them, in rank order."""
        return [self.connect(rank=rank, wait_s=wait_s) for rank in range(self.num_workers)]

    def close(self) -> None:
        self._ends.close()


StartCluster = Callable[..., Cluster]


@contextlib.contextmanager
def clusters(transport: str) -> Iterator[StartCluster]:
    """What starts stores over that transport; they end with the block."""
    with contextlib.ExitStack() as ends:

        def start(
            *flags: str, shards: int = 1, workers: int = 1, mode: str = "sync", staleness: int | None = None
        ) -> Cluster:
            cluster = Cluster(transport, shards=shards, workers=workers, mode=mode, staleness=staleness, flags=flags)
            ends.callback(cluster.close)
            return cluster

        yield start


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Runs each call on a thread of its own; returns their results, or raises the first failure."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        for ended in as_completed(futures, PATIENCE_S):
            ended.result()  # the first failure, before the others wait for whoever failed
        return [future.result() for future in futures]
