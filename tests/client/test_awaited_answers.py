"""What a blocking call asks the coordinator in the extension, without a turn of the loop: what it waits for there, and
what it leaves to the loop.

Mostly over a pair of sockets, whose other end has answered before it is asked.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.client.store import Store
from psstore.errors import BadBody, BadMagic, DeviceFailed, UnknownTensor
from psstore.net.client import SocketDriver
from psstore.net.client_connection import ClientConnection
from psstore.net.manual_loop import ManualLoop
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.frames import failure_frame
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.requests import IGNORED, OPS, IgnoredFuture
from psstore.protocol.session import Session
from psstore.wire import messages as m
from tests.client.direct_support import ThreadedEnds, frames_of, interrupt_while_busy
from tests.support.cluster import PATIENCE_S, Cluster, clusters
from tests.support.server_process import eventually

F32 = np.float32
ANSWER = _core.encode_frame(OPS["LEFT"], request=1)
TRIES = 5
NEWS = _core.encode_frame(OPS["SHARED"], body=b"news")


class Answered(IgnoredFuture):
    """The future of a request: notes in a list when that is answered."""

    def __init__(self, came: list[int | str]) -> None:
        self._came = came

    def set_result(self, result: object, /) -> None:
        self._came.append("the answer")

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return False


class Asking(ThreadedEnds):
    """Of the coordinator, whose answers to one request are awaited."""

    def __init__(self) -> None:
        super().__init__()
        self._came: list[int | str] = []

    def ask(self, message: m.Message | None = None, *, op: str = "LEAVE") -> bool | None:
        """Asks once more, and waits for the answer if that can be done here."""

        async def ask() -> bool | None:
            self.session.ask(OPS[op], Answered(self._came), 0.0, 10.0, message=message)
            return self.thread.calls.await_answer(self.session)

        return self.thread.run(ask())

    def came(self) -> list[int | str]:
        """The answer, and operations of whole frames for whoever drives the session."""
        while (frame := self.session.next_frame()) is not None:
            self._came.append(frame.op)
        return self._came

    def forget_all(self) -> None:
        for number in self.session.numbers():
            self.session.finish(number, None)


@pytest.fixture
def ends() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.close()


def test_a_request_is_sent_and_its_answer_is_there(ends: Asking) -> None:
    ends.peer.send(ANSWER)
    assert ends.ask() is True
    assert [(frame.op, frame.request) for frame in frames_of(ends.sent())] == [(OPS["LEAVE"], 1)]
    assert ends.came() == ["the answer"]
    assert ends.session.numbers() == []


@pytest.mark.parametrize(
    ("frames", "came"),
    [
        ([failure_frame(1, UnknownTensor("no such tensor"))], [OPS["ERROR"]]),
        ([NEWS, ANSWER], [OPS["SHARED"], "the answer"]),
        ([ANSWER, NEWS], ["the answer", OPS["SHARED"]]),
        ([_core.encode_frame(OPS["FINISHED"], request=1), ANSWER], [OPS["FINISHED"], "the answer"]),
        ([_core.encode_frame(OPS["LEFT"], request=2), ANSWER], [OPS["LEFT"], "the answer"]),
    ],
    ids=["an error", "news first", "news behind it", "another operation's answer", "another request's answer"],
)
def test_whatever_comes_is_told_by_whoever_drives_the_session_in_its_order(
    frames: list[bytes], came: list[int | str], ends: Asking
) -> None:
    ends.peer.send(b"".join(frames))
    assert ends.ask() is False
    assert ends.came() == came


def test_what_came_before_the_end_of_a_connection_is_told_first(ends: Asking) -> None:
    """Received by a call, and left to the loop, which finds the end before the call can tell it to go on."""
    identity = ClientIdentity(client="c" * 32, role="client")
    session = Session(identity=identity, decisions=DecisionCache(), make_nonce=lambda: b"", address="here")
    ours, peer = socket.socketpair()
    ours.setblocking(False)

    async def connect() -> ClientConnection:
        return ClientConnection(session, ends.thread.loop, ours)

    connection = ends.thread.run(connect())
    fields = {"shard": 0, "addresses": (("here",),), "num_workers": 1, "quorum": 1, "staleness": 0}
    welcome = m.Welcome(version=0, last_sequence=0, store="a store", **fields)  # type: ignore[arg-type]
    peer.send(_core.encode_frame(OPS["WELCOME"], body=m.encode_body(welcome)))
    assert eventually(connection.up.done)

    async def fail() -> None:
        session.core.feed(failure_frame(0, DeviceFailed("it was told to")))
        connection.abort()

    ends.thread.run(fail())
    assert eventually(connection.lost.done)
    assert isinstance(session.failure, DeviceFailed)
    peer.close()


def test_an_answer_that_does_not_come_is_left_to_the_loop(ends: Asking) -> None:
    assert ends.ask() is False
    assert ends.session.numbers() == [1]
    ends.session.feed(ANSWER)
    assert ends.came() == ["the answer"]


def test_an_answer_that_is_cut_is_left_to_the_loop(ends: Asking) -> None:
    ends.peer.send(ANSWER[:20])
    ends.peer.shutdown(socket.SHUT_WR)
    assert ends.ask() is False
    assert ends.came() == []
    assert not ends.session.receive(0.0)


def test_bytes_that_are_no_frame_are_told_to_whoever_drives_the_session(ends: Asking) -> None:
    ends.peer.send(b"nonsense" * 20)
    assert ends.ask() is False
    with pytest.raises(BadMagic):
        ends.came()


def test_an_answer_that_nobody_understands_is_told_to_whoever_drives_the_session(ends: Asking) -> None:
    ends.peer.send(_core.encode_frame(OPS["COMMITTED"], request=1, body=b"\xc1") + NEWS)
    assert ends.ask(op="COMMIT") is False
    assert ends.session.numbers() == []
    for _ in range(2):
        with pytest.raises(BadBody):
            ends.came()


def test_what_the_kernel_does_not_take_is_left_to_be_sent(ends: Asking) -> None:
    assert ends.ask(m.Describe(names=tuple(f"a rather long name {i}" for i in range(50_000)))) is False
    sent = ends.sent()
    assert sent
    assert ends.session.has_output
    while not ends.session.send():
        sent += ends.sent()
    (frame,) = frames_of(sent + ends.sent())
    assert len(m.decode_body(m.Describe, frame.body).names or ()) == 50_000


def test_nothing_is_awaited_while_something_else_is_under_way(ends: Asking) -> None:
    ends.session.ask(OPS["STATS"], IGNORED, 0.0, 10.0)
    assert ends.ask() is None
    ends.forget_all()
    ends.session.ask(OPS["LEAVE"], IGNORED, 0.0, 10.0)
    ends.thread.loop.call_soon(int)
    assert ends.thread.calls.await_answer(ends.session) is None  # and no caller waits
    ends.forget_all()
    ends.session.feed(ANSWER[:20])
    assert ends.ask() is None
    ends.session.disconnected()
    assert ends.ask() is None


def test_who_wants_the_loop_gets_it(ends: Asking) -> None:
    async def here() -> int:
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        wanting = pool.submit(lambda: [ends.thread.run(here()) for _ in range(20)])
        while not wanting.done():
            ends.ask()
            ends.forget_all()
        assert len(set(wanting.result(PATIENCE_S))) == 1


def test_an_interrupt_ends_the_wait_and_gives_the_loop_back(ends: Asking) -> None:
    def ask() -> None:
        ends.ask()
        ends.forget_all()

    interrupt_while_busy(ends.thread.calls, ask)
    assert not ends.thread.calls.busy
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
    """Where it is answered soon: on a busy machine one of several is."""
    turns: list[ManualLoop] = []
    turn = ManualLoop._turn

    def counted(self: ManualLoop, events: Sequence[tuple[int, int]]) -> None:
        turns.append(self)
        turn(self, events)

    def num_turns(call: Callable[[], object]) -> int:
        before = len(turns)
        call()
        return len(turns) - before

    monkeypatch.setattr(ManualLoop, "_turn", counted)
    with clusters(transport) as start:
        store = trained(start(shards=2))
        found = []
        for number in range(1, 1 + TRIES):
            early = functools.partial(store.commit, {"lr": 1.0}, early=True, present=["w"])
            in_turn = [num_turns(functools.partial(store.commit, {"lr": 1.0}))]
            store.push("w", np.ones(8, F32))
            found.append([*in_turn, *(num_turns(call) for call in (early, store.finish, store.barrier))])
            assert store.version == 2 * number
            store.push("w", np.ones(8, F32))
        assert np.array(found).min(axis=0).tolist() == [0, 0, 0, 0], found
        assert_array_equal(store.pull("w"), np.full(8, -2 * TRIES, F32))


@pytest.mark.sockets
def test_what_is_awaited_or_started_is_never_waited_for_in_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters("tcp") as start:
        cluster = start()
        store = trained(cluster)
        await_answer = SocketDriver.await_answer

        def on_the_loop(self: SocketDriver, session: Session) -> None:
            monkeypatch.setattr(self, "_calls", None)
            await_answer(self, session)

        monkeypatch.setattr(SocketDriver, "await_answer", on_the_loop)
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
