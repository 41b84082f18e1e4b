"""One of the workers of bench.scaling: what each contestant's round is to it.

Methods of the same name are called on all workers at once (far.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist

import psstore
from bench.virtual_hosts import VirtualHosts
from psstore.client.store import Store
from psstore.errors import StoreUnreachable
from psstore.net.address import TcpAddress
from psstore.net.baseline import RawLinks
from psstore.types import TensorSpec

WORKERS = 8

TENSOR_ELEMS = 4 << 10
"""Of a slice each. What one of them takes on its way is lost at a round's beginning and end."""

LINK_BYTES = 4 << 20
"""By which the rate of a link is measured: so many that what it carries at once after a pause is next to nothing."""

RING_PORT = 5900

HYPERS = {"lr": 1e-3}


class Worker:
    """One of the workers, in the process and the network that it has to itself."""

    def __init__(self, rank: int, hosts: VirtualHosts) -> None:
        self._rank = rank
        self._hosts = hosts
        self._rounds = 0
        self._store: Store | None = None

    def take_model(self, num_bytes: int, num_shards: int) -> None:
        """Comes before all else."""
        num_tensors = num_bytes // (4 * TENSOR_ELEMS)
        self._num_shards = num_shards
        self._flat = np.full((num_tensors, TENSOR_ELEMS), self._rank + 1, np.float32)
        self._into = np.zeros((num_tensors, TENSOR_ELEMS), np.float32)
        self._names = [f"t{index}" for index in range(num_tensors)]
        self._gradients = dict(zip(self._names, self._flat, strict=True))
        self._parameters = dict(zip(self._names, self._into, strict=True))
        self._reduced = torch.ones(self._flat.size)

    # ---- psstore ----

    def join_store(self, url: str, token: str) -> None:
        self._store = psstore.connect(url, rank=self._rank, num_workers=WORKERS, token=token, connect_timeout_s=30.0)
        specs = [TensorSpec(name=name, shape=(TENSOR_ELEMS,), rule="sgd") for name in self._names]
        self._store.create_many(specs)
        self._rounds = 0

    def leave_store(self) -> None:
        """Raises if the parameters are not what so many steps make of them."""
        expected = -HYPERS["lr"] * self._rounds * (WORKERS + 1) / 2
        assert np.allclose(self._into, expected, rtol=1e-3), f"{self._into.flat[0]} after {self._rounds} rounds"
        self._joined.close()

    def late(self) -> None:
        store = self._joined
        store.push_many(self._gradients)
        store.commit(HYPERS)
        store.pull_many(self._names, out=list(self._parameters.values()))
        self._rounds += 1

    def early(self) -> None:
        """In buckets of one tensor for each shard. A bucket's pull is started after its push, and so goes with it when
        it has its turn."""
        store = self._joined
        store.start_commit(HYPERS, present=self._names, early=True).result()
        pulls = []
        for begin in range(0, len(self._names), self._num_shards):
            names = self._names[begin : begin + self._num_shards]
            store.start_push_many({name: self._gradients[name] for name in names})
            pulls.append(store.start_pull_many(names, out=[self._parameters[name] for name in names]))
        for pull in pulls:
            pull.result()
        store.settle()
        store.finish()
        self._rounds += 1

    @property
    def _joined(self) -> Store:
        assert self._store is not None, "join_store comes first"
        return self._store

    # ---- plain sockets ----

    def dial_peers(self, port: int) -> None:
        peers = [TcpAddress(self._hosts.address(WORKERS + shard), port) for shard in range(self._num_shards)]
        self._ups, self._downs = ([patiently_dialled(peer) for peer in peers] for _ in range(2))
        self._pool = ThreadPoolExecutor(2 * self._num_shards)

    def hang_up(self) -> None:
        for links in (*self._ups, *self._downs):
            links.close()
        self._pool.shutdown()

    def one_link(self) -> None:
        """LINK_BYTES from rank 0 to the first shard's host, and nobody else sends."""
        if self._rank == 0:
            self._ups[0].up(memoryview(bytes(LINK_BYTES)))

    def raw_in_sequence(self) -> None:
        _wait(self._move_up())
        _wait(self._move_down())

    def raw_both_ways(self) -> None:
        _wait([*self._move_up(), *self._move_down()])

    def _move_up(self) -> list[Callable[[], None]]:
        parts = np.array_split(self._flat.reshape(-1).view(np.uint8), len(self._ups))
        return [self._pool.submit(links.up, part.data).result for links, part in zip(self._ups, parts, strict=True)]

    def _move_down(self) -> list[Callable[[], None]]:
        parts = np.array_split(np.empty(self._flat.nbytes, np.uint8), len(self._downs))
        return [self._pool.submit(links.down, part.data).result for links, part in zip(self._downs, parts, strict=True)]

    # ---- gloo ----

    def join_ring(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        where = f"tcp://{self._hosts.address(0)}:{RING_PORT}"
        dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=WORKERS)

    def ring(self) -> None:
        dist.all_reduce(self._reduced)

    def ready(self) -> None:
        """Answered when what came before is done, everywhere."""


def _wait(results: Sequence[Callable[[], None]]) -> None:
    for result in results:
        result()


def patiently_dialled(peer: TcpAddress, patience_s: float = 20.0) -> RawLinks:
    """It may be starting still."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return RawLinks(peer, 1)
        except StoreUnreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
