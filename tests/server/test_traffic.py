"""What a shard sees of its workers: bytes, and for how long they push, pull, and wait for others."""

from __future__ import annotations

import numpy as np
import pytest

from psstore import _core
from psstore.client.store_status import TransferStatus, transfers_of
from psstore.types import Tensor
from psstore.wire import messages as m
from tests.support.raw_client import RawClient, slice_table
from tests.support.server_process import eventually
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.sockets

LARGE_ELEMS = 4 << 20
"""A value of 16 MiB: more than the sockets between a shard and its worker hold."""


def seen(operator: RawClient) -> TransferStatus:
    (worker,) = transfers_of(operator.stats())
    return worker


def head_of_a_push(joined: m.Joined, tensor: Tensor) -> bytes:
    table = slice_table(tensor, with_bytes=True)
    return _core.encode_frame(
        _core.OPS["PUSH"],
        request=77,
        rank=joined.rank,
        incarnation=joined.incarnation,
        round=1,
        table=table,
        payload_bytes=table.payload_bytes,
    )


def test_a_worker_pushes_while_a_frame_of_its_arrives_and_pulls_while_it_does_not_read() -> None:
    with serving(make_service()) as address, RawClient(address) as worker, RawClient(address) as operator:
        for one in (worker, operator):
            one.hello()
        joined = worker.join()
        tensor = worker.create(name="w", shape=(LARGE_ELEMS,), rule="sgd")
        value = np.zeros(LARGE_ELEMS, np.float32)
        worker.send("INIT", table=slice_table(tensor, with_bytes=True), payload=[value])
        worker.reply("INITIALISED")
        before = seen(operator)

        worker.sock.sendall(head_of_a_push(joined, tensor))
        assert eventually(lambda: seen(operator).push_s > before.push_s + 0.1), "it has begun and goes on"
        worker.sock.sendall(value)
        worker.reply("PUSHED")
        pushed = seen(operator)
        assert pushed.pushed_bytes == before.pushed_bytes + value.nbytes

        worker.send("PULL", table=slice_table(tensor, with_bytes=False))
        assert eventually(lambda: seen(operator).pull_s > 0.1)
        worker.reply("PULLED")
        pulled = seen(operator)
        assert pulled.pulled_bytes == value.nbytes
        assert pulled.push_s == pushed.push_s, "all that was pushed is there"
        assert seen(operator).pull_s == pulled.pull_s, "all is read"


def test_who_is_gone_in_the_middle_of_a_frame_pushes_no_longer() -> None:
    with serving(make_service()) as address, RawClient(address) as operator:
        operator.hello()
        with RawClient(address) as worker:
            worker.hello()
            joined = worker.join()
            tensor = worker.create(name="w", shape=(1000,), rule="sgd")
            worker.sock.sendall(head_of_a_push(joined, tensor))
            assert eventually(lambda: seen(operator).push_s > 0.0)
        assert eventually(lambda: operator.stats()["connections"] == 1)
        at_the_end = seen(operator).push_s
        assert not eventually(lambda: seen(operator).push_s > at_the_end, timeout_s=0.1)
