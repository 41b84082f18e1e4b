"""What a shard's memory comes back to, after bursts and after many lives of clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import psstore
from psstore import _core
from psstore.config import Transport
from psstore.partition.slicing import SLICE_BYTES
from psstore.types import Tensor
from tests.support.raw_client import RawClient, slice_table
from tests.support.server_process import StoreProcess, eventually
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.sockets

SWEEP_S = 0.25
"""Between two looks at unused memory, of servers in this process."""

LIVES, LIVES_OF_STORES = 300, 6
"""Of one generation, the latter for each transport."""

BYTES_PER_LIFE = 4096
"""What the coordinator remembers of a client for two minutes after it went is 1 KiB with one answer, or 2 with what the
allocator can't use beside it. A receive buffer, or a connection's shared memory, would be twenty times as much."""

VALUE = np.ones(300_000, np.float32)


def begin_to_assign(client: RawClient, tensor: Tensor, num_slices: int) -> None:
    """The head of a frame of so many slices, for which the shard makes room."""
    table = slice_table(tensor, with_bytes=True).select(range(num_slices))
    head = _core.encode_frame(
        _core.OPS["ASSIGN"], request=1, sequence=1, table=table, payload_bytes=table.payload_bytes
    )
    client.sock.sendall(head)


def idle_bytes(client: RawClient) -> int:
    return int(client.stats()["pool_idle_bytes"])


def test_memory_of_frames_that_nobody_finished_is_given_back() -> None:
    """Of each size one: a pool that waits for frames of the same size keeps them all."""
    sizes = range(4, 64, 4)
    with serving(make_service(), stalled_frame_s=4 * SWEEP_S) as address, RawClient(address) as client:
        client.hello()
        tensor = client.create(name="w", shape=(sizes.stop * SLICE_BYTES // 4,), rule="assign")
        kept = []
        for num_slices in sizes:
            with RawClient(address) as other:
                other.hello()
                begin_to_assign(other, tensor, num_slices)
            kept.append(idle_bytes(client))
        assert eventually(lambda: client.stats()["connections"] == 1)
        assert max(kept) >= sizes.start * SLICE_BYTES
        assert eventually(lambda: idle_bytes(client) == 0)


def live_and_go(address: str) -> None:
    """A worker that goes without a word, as when it is killed."""
    with RawClient(address) as client:
        client.hello()
        client.create(name="w", shape=(VALUE.size,), rule="sgd")
        client.join()


def live_and_leave(address: str, transport: Transport) -> None:
    with psstore.connect(address, transport=transport) as store:
        store.create("w", shape=VALUE.shape, rule="sgd")
        store.push("w", VALUE)
        store.commit({"lr": 0.1})
        store.pull("w")


def test_lives_of_workers_leave_nothing_behind(tmp_path: Path) -> None:
    with StoreProcess("--mode", "async", "--uds", str(tmp_path / "store"), "--log-level", "error") as store:
        (shard,) = store.shards()
        unix, tcp = store.ready["shards"][0]
        places: list[tuple[str, Transport]] = [(unix, "shm"), (unix, "unix"), (tcp, "tcp")]

        def generation() -> int:
            """Bytes that the shard has for itself after so many lives."""
            for _ in range(LIVES):
                live_and_go(unix)
            for address, transport in places:
                for _ in range(LIVES_OF_STORES):
                    live_and_leave(address, transport)
            with RawClient(unix) as client:
                client.hello()
                assert eventually(lambda: client.stats()["connections"] == 1)
            return int(shard.memory_full_info().uss)

        generation()
        before, files, maps = generation(), shard.num_fds(), len(shard.memory_maps(grouped=False))
        assert generation() - before < BYTES_PER_LIFE * (LIVES + 3 * LIVES_OF_STORES)
        assert shard.num_fds() - files < LIVES_OF_STORES // 2
        assert len(shard.memory_maps(grouped=False)) - maps < LIVES_OF_STORES // 2
