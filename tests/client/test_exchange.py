"""What a blocking call asks the coordinator in the extension, without a turn of the loop: what it waits for there, and
what it leaves to the loop, and in which state.

Mostly over a pair of sockets, whose other end has answered before it is asked.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.client.store import Store
from psstore.errors import BadMagic, DeviceFailed, UnknownTensor
from psstore.net.client import Reconnector
from psstore.net.client_connection import ClientConnection
from psstore.net.manual_loop import ManualLoop
from psstore.protocol.frames import failure_frame
from psstore.protocol.requests import OPS
from psstore.protocol.states import LinkState
from tests.client.lane_support import ThreadedEnds, interrupt_while_busy
from tests.support.cluster import PATIENCE_S, Cluster, clusters

F32 = np.float32
REQUEST = _core.encode_frame(OPS["COMMIT"], request=1, body=b"asked")
ANSWER = _core.encode_frame(OPS["COMMITTED"], request=1, body=b"answered")
NEWS = _core.encode_frame(OPS["SHARED"], body=b"news")


class Asking(ThreadedEnds):
    """Of the coordinator, whose answers to one request are awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.requests[1] = "asked"

    def exchange(self, request: bytes = REQUEST) -> bool | None:
        async def exchange() -> bool | None:
            return self.thread.lane.exchange(self.line, request)

        return self.thread.run(exchange())

    def came(self) -> list[_core.Frame]:
        """Whole frames, for the session."""
        frames = []
        while (frame := self.line.next_frame(self.decoder, now=0.0)) is not None:
            frames.append(frame)
        return frames


@pytest.fixture
def ends() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.close()


def test_a_request_is_sent_and_its_answer_is_there(ends: Asking) -> None:
    ends.peer.send(ANSWER)
    assert ends.exchange() is True
    assert ends.sent() == REQUEST
    assert [(frame.op, frame.request, frame.body) for frame in ends.came()] == [(OPS["COMMITTED"], 1, b"answered")]


@pytest.mark.parametrize(
    "frames",
    [
        [failure_frame(1, UnknownTensor("no such tensor"))],
        [NEWS, ANSWER],
        [ANSWER, NEWS],
        [_core.encode_frame(OPS["FINISHED"], request=1), ANSWER],
        [_core.encode_frame(OPS["COMMITTED"], request=2), ANSWER],
    ],
    ids=["an error", "news first", "news behind it", "another operation's answer", "another request's answer"],
)
def test_whatever_else_comes_is_for_the_session_in_its_order(frames: list[bytes], ends: Asking) -> None:
    ends.peer.send(b"".join(frames))
    assert ends.exchange() is False
    assert ends.sent() == REQUEST
    assert [frame.op for frame in ends.came()] == [frame[5] for frame in frames]


def test_what_came_before_the_end_of_a_connection_is_told_first(ends: Asking) -> None:
    """Received by a call, and left to the loop, which finds the end before the call can tell it to go on."""
    session = Mock(line=_core.RequestLine({}), state=LinkState.UP, owes_releases=False)
    session.take_output.return_value = []
    connection = ClientConnection(session, ends.thread.loop)
    connection._decoder.feed(failure_frame(0, DeviceFailed("it was told to")))
    connection.connection_lost(None)
    told = [call[0] for call in session.method_calls]
    assert [one for one in told if one in ("frame", "disconnected")] == ["frame", "disconnected"]


def test_an_answer_that_does_not_come_is_left_to_the_loop(ends: Asking) -> None:
    assert ends.exchange() is False
    assert ends.requests == {1: "asked"}
    ends.decoder.feed(ANSWER)
    assert [frame.op for frame in ends.came()] == [OPS["COMMITTED"]]


def test_an_answer_that_is_cut_is_left_to_the_loop(ends: Asking) -> None:
    ends.peer.send(ANSWER[:20])
    ends.peer.shutdown(socket.SHUT_WR)
    assert ends.exchange() is False
    assert ends.decoder.mid_frame
    assert ends.came() == []


def test_bytes_that_are_no_frame_are_told_by_the_decoder(ends: Asking) -> None:
    ends.peer.send(b"nonsense" * 20)
    assert ends.exchange() is False
    with pytest.raises(BadMagic):
        ends.came()


def test_what_the_kernel_does_not_take_is_left_to_be_sent(ends: Asking) -> None:
    long = _core.encode_frame(OPS["COMMIT"], request=1, body=bytes(1 << 20))
    assert ends.exchange(long) is False
    came = ends.sent()
    assert 0 < len(came) < len(long)
    assert b"".join([came, *ends.unsent]) == long


def test_nothing_is_done_while_something_else_is_under_way(ends: Asking) -> None:
    ends.requests[2] = "asked, too"
    assert ends.exchange() is None
    del ends.requests[2]
    ends.unsent.append(memoryview(b"not sent"))
    assert ends.exchange() is None
    ends.unsent.clear()
    ends.thread.loop.call_soon(int)
    assert ends.thread.lane.exchange(ends.line, REQUEST) is None  # and no caller waits
    ends.decoder.feed(ANSWER[:20])
    assert ends.exchange() is None
    ends.line.disconnect()
    assert ends.exchange() is None
    assert ends.sent() == b""


def test_who_wants_the_loop_gets_it(ends: Asking) -> None:
    async def here() -> int:
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        wanting = pool.submit(lambda: [ends.thread.run(here()) for _ in range(20)])
        while not wanting.done():
            ends.exchange()
        assert len(set(wanting.result(PATIENCE_S))) == 1


def test_an_interrupt_ends_the_wait_and_gives_the_loop_back(ends: Asking) -> None:
    interrupt_while_busy(ends.thread.lane, ends.exchange)
    assert not ends.thread.lane.busy
    ends.thread.at_once(int)


# ---- a whole store ----------------------------------------------------------------------------------


def trained(cluster: Cluster) -> Store:
    """Rank 0, after a push of its first round."""
    store = cluster.connect(rank=0)
    store.create("w", np.zeros(8, F32), rule="sgd")
    store.push("w", np.ones(8, F32))
    return store


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_commit_needs_no_turn_of_the_loop(transport: Literal["tcp", "shm"], monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters(transport) as start:
        store = trained(start(shards=2))
        with monkeypatch.context() as patched:
            patched.setattr(ManualLoop, "_turn", None)
            assert store.commit({"lr": 1.0}).decision == 1
            store.push("w", np.ones(8, F32))
            assert store.commit({"lr": 1.0}, early=True, present=["w"]).decision == 2
            store.finish()
            store.barrier()
        assert_array_equal(store.pull("w"), np.full(8, -2, F32))


@pytest.mark.sockets
def test_what_is_awaited_or_started_is_never_waited_for_in_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters("tcp") as start:
        cluster = start()
        store = trained(cluster)
        monkeypatch.setattr(Reconnector, "exchange", None)
        assert store.start_commit({"lr": 1.0}).result(PATIENCE_S).decision == 1
        store.close()

        async def commit() -> None:
            async with await cluster.connect_async() as again:
                await again.push("w", np.ones(8, F32))
                assert (await again.commit({"lr": 1.0})).decision == 2

        asyncio.run(commit())


@pytest.mark.sockets
def test_other_threads_call_while_a_commit_waits_for_other_workers() -> None:
    with clusters("tcp") as start:
        cluster = start(workers=2)
        store, other = trained(cluster), cluster.connect(rank=1)
        store.create("v", np.full(8, 3, F32))
        store.pull("v")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.commit, {"lr": 1.0})
            for _ in range(50):
                assert_array_equal(store.pull("v"), np.full(8, 3, F32))
            assert not waiting.done()
            other.push("w", np.ones(8, F32))
            other.commit({"lr": 1.0})
            assert waiting.result(PATIENCE_S).decision == 1
        assert_array_equal(store.pull("w"), np.full(8, -1, F32))
