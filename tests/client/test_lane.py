"""The short way of a blocking call: what it does at once, and what it leaves to the loop, and in which state.

Mostly over a pair of sockets, whose other end has answered before it is asked: requests are numbered from 1.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.client.layout import Layout, Pull, Push
from psstore.client.loop_thread import LoopThread
from psstore.errors import BadMagic, UnknownKey, UnknownTensor
from psstore.net.client import QuietFuture
from psstore.partition.router import Router
from psstore.partition.slicing import SLICE_BYTES
from psstore.protocol.frames import failure_frame
from psstore.protocol.requests import OPS, Request
from psstore.types import Tensor, TensorSpec
from tests.client.lane_support import ThreadedEnds, interrupt_while_busy, never
from tests.support.cluster import PATIENCE_S, clusters
from tests.support.server_process import eventually

F32 = np.float32
KEY = 1 << _core.SLICE_INDEX_BITS
SLICE_ELEMS = SLICE_BYTES // 4


def nothing_is_started() -> _core.StartingParts:
    return _core.StartingParts(
        make=never, ended=never, unfinished=never, look_after=never, catch_up=never, paced=never, under_way=set()
    )


class Calling(ThreadedEnds):
    """For one tensor of 256 elements or more."""

    def __init__(self, num_elems: int = 256) -> None:
        super().__init__()
        spec = TensorSpec(name="t", shape=(num_elems,), rule="assign")
        num_slices = -(-num_elems // SLICE_ELEMS)
        self._tensor = Tensor(id=1, spec=spec, slice_elems=SLICE_ELEMS, shards=(0,) * num_slices)
        self.array = np.arange(num_elems, dtype=F32)

    def call(self, op: str = "ASSIGN") -> tuple[bool, list[Any]] | None:
        """None: nothing was done. Else whether all was answered, and the answers to what has any, or what is left."""
        layout = Layout([self._tensor], ["float32"], ways=Router(1), pull=op == "PULL")
        left: list[list[Any]] = []
        came: list[list[Any]] = [[]]

        def conclude(_: Layout, results: list[Any]) -> list[Any]:
            left.append(results)
            return results

        calls = _core.ShortCalls(
            self.thread.lane,
            _core.Sender([self.line], request=Request, rank=0, incarnation=0, checksum=False, keeps_releases=True),
            habits=[
                {
                    Push(("t",), ()).manner: _core.Habit(op, layout, layout.plan),
                    Pull(("t",), ()).manner: _core.Habit(op, layout, layout.plan),
                }
            ],
            terms=[{op: _core.Terms(OPS[op], timeout_s=PATIENCE_S)}],
            renew=lambda op, layout, wait_s: None,
            future=lambda: QuietFuture(loop=self.thread.loop),
            sent=lambda op, layout: None,
            received=lambda layout, answers: came.append(answers),
            newer=lambda layout, answers, arrays: arrays,
            conclude=conclude,
            starting=nothing_is_started(),
        )
        result = calls.pull("t", out=self.array) if op == "PULL" else calls.push("t", self.array)
        if result is NotImplemented:
            return None
        return (False, left[0]) if left else (True, came[-1])

    def answer(self, op: str = "ASSIGN") -> None:
        """Of a call that is answered."""
        outcome = self.call(op)
        assert outcome is not None
        succeeded, answers = outcome
        assert succeeded
        assert not self.requests
        assert [frame.sequence for frame in answers] == ([7] if op == "PULL" else [])
        assert self.line.version == 7

    def left(self, op: str = "ASSIGN") -> Request:
        """By a call that is not."""
        outcome = self.call(op)
        assert outcome is not None
        succeeded, (request,) = outcome
        assert not succeeded
        assert self.requests == {1: request}
        assert isinstance(request, Request)
        assert request.id == 1
        return request


@pytest.fixture
def ends() -> Iterator[Calling]:
    made = Calling()
    yield made
    made.close()


def reply(op: str, *, request: int = 1, payload: np.ndarray[Any, Any] | None = None) -> bytes:
    num_bytes = 0 if payload is None else payload.nbytes
    table = _core.SliceTable([(KEY, num_bytes, _core.DTYPES["float32"])])
    head = _core.encode_frame(OPS[op], request=request, sequence=7, table=table, payload_bytes=num_bytes)
    return head if payload is None else head + payload.tobytes()


def test_a_call_sends_its_frame_and_returns_the_answer(ends: Calling) -> None:
    ends.peer.send(reply("ASSIGNED"))
    ends.answer()
    table = _core.SliceTable([(KEY, ends.array.nbytes, _core.DTYPES["float32"])])
    head = _core.encode_frame(OPS["ASSIGN"], request=1, sequence=1, table=table, payload_bytes=ends.array.nbytes)
    assert ends.sent() == head + ends.array.tobytes()
    assert (ends.line.next_request, ends.line.last_write) == (2, 1)


def test_a_read_lands_in_the_array(ends: Calling) -> None:
    values = np.full(256, 3, F32)
    ends.peer.send(reply("PULLED", payload=values))
    ends.answer("PULL")
    assert_array_equal(ends.array, values)


def test_what_the_kernel_does_not_take_is_left_to_be_sent() -> None:
    ends = Calling(num_elems=4 * SLICE_ELEMS)
    try:
        ends.left()
        came = ends.sent()
        assert 0 < len(came) < ends.array.nbytes
        whole = b"".join([came, *ends.unsent])
        assert whole[-ends.array.nbytes :] == ends.array.tobytes()
        assert (
            len(whole) == _core.HEADER_BYTES + 4 * _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES + ends.array.nbytes
        )
    finally:
        ends.close()


def test_a_read_that_is_cut_in_its_payload_goes_on_in_the_same_array(ends: Calling) -> None:
    whole = reply("PULLED", payload=np.full(256, 3, F32))
    ends.peer.send(whole[:500])
    request = ends.left("PULL")
    assert request.destination is not None
    assert ends.decoder.mid_frame
    ends.decoder.feed(whole[500:])
    frame = ends.decoder.next_frame()
    assert frame is not None
    assert frame.complete
    assert_array_equal(ends.array, np.full(256, 3, F32))


def test_a_lost_connection_leaves_the_request_to_be_sent_again(ends: Calling) -> None:
    ends.peer.send(reply("ASSIGNED")[:10])
    ends.peer.shutdown(socket.SHUT_WR)
    request = ends.left()
    assert request.payload is not None
    assert (request.sequence, request.payload.nbytes) == (1, ends.array.nbytes)


@pytest.mark.parametrize(
    "other",
    [
        failure_frame(1, UnknownTensor("no such tensor")),
        reply("ASSIGNED", request=9),
        reply("PULLED", request=9, payload=np.zeros(8, F32)),
        reply("PULLED", payload=np.zeros(256, F32)),
    ],
    ids=["an error", "an answer nobody waits for", "a payload nobody waits for", "another operation's answer"],
)
def test_any_other_frame_is_left_to_the_session(other: bytes, ends: Calling) -> None:
    ends.peer.send(other + reply("ASSIGNED"))
    ends.left()
    frame = ends.decoder.next_frame()
    assert frame is not None
    assert frame.op == other[5]
    if not frame.complete:
        ends.decoder.discard()
    while frame is not None and frame.op != OPS["ASSIGNED"]:
        frame = ends.decoder.next_frame()
    assert frame is not None


def test_bytes_that_are_no_frame_are_told_by_the_decoder(ends: Calling) -> None:
    ends.peer.send(b"nonsense" * 20)
    ends.left()
    with pytest.raises(BadMagic):
        ends.decoder.next_frame()


def test_a_call_does_nothing_while_something_else_is_under_way(ends: Calling) -> None:
    ends.requests[5] = "not answered"
    assert ends.call() is None
    ends.requests.clear()
    ends.unsent.append(memoryview(b"not sent"))
    assert ends.call() is None
    ends.unsent.clear()
    ends.decoder.feed(reply("ASSIGNED")[:5])
    assert ends.call() is None
    ends.line.disconnect()
    assert ends.call() is None
    assert ends.sent() == b""
    assert ends.line.next_request == 1


def test_a_call_does_not_take_arrays_of_another_kind(ends: Calling) -> None:
    ends.array = ends.array.astype(np.float64)
    assert ends.call() is None


def test_who_wants_the_loop_gets_it(ends: Calling) -> None:
    async def here() -> int:
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        wanting = pool.submit(lambda: [ends.thread.run(here()) for _ in range(20)])
        while not wanting.done():
            ends.call()
            ends.requests.clear()
        assert len(set(wanting.result(PATIENCE_S))) == 1


def test_what_other_threads_ask_for_after_a_call_is_done_without_another_one(ends: Calling) -> None:
    async def done() -> bool:
        return True

    ends.peer.send(reply("ASSIGNED"))
    ends.answer()
    assert ends.thread.submit(done()).result(PATIENCE_S)
    ends.peer.send(reply("ASSIGNED", request=2))
    ends.answer()
    other = threading.Thread(target=lambda: ends.thread.run(done()))
    other.start()
    other.join(PATIENCE_S)
    assert not other.is_alive()


def test_an_interrupt_ends_the_call_and_gives_the_loop_back(ends: Calling) -> None:
    def call() -> None:
        ends.call()
        ends.requests.clear()

    interrupt_while_busy(ends.thread.lane, call)
    assert not ends.thread.lane.busy
    ends.requests.clear()
    assert ends.call() is not None


# ---- a whole store ----------------------------------------------------------------------------------


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_was_done_before_needs_no_turn_of_the_loop(
    transport: Literal["tcp", "shm"], monkeypatch: pytest.MonkeyPatch
) -> None:
    with clusters(transport) as start:
        store = start(shards=2).connect()
        values = {"a": np.full(8, 1, F32), "b": np.full(8, 2, F32)}
        for name, value in values.items():
            store.create(name, value)
        store.push_many(values)
        store.pull_many(["a", "b"])

        def do_again() -> None:
            before = store.version_of("a")
            values["a"] += 1
            store.push_many(values)
            a, b = store.pull_many(["a", "b"])
            assert_array_equal([a, b], list(values.values()))
            assert store.version_of("a") == before + 1

        assert needs_no_turn(do_again, monkeypatch)


@pytest.mark.sockets
def test_a_pull_of_what_is_newer_needs_no_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters("tcp") as start:
        store = start(shards=2).connect()
        for name in "abc":
            store.create(name, np.zeros(8, F32))
        out = [np.zeros(8, F32) for _ in "abc"]
        store.pull_many("abc", out=out)
        bytes_pulled = store.bytes_pulled

        def ask_again() -> None:
            assert store.pull("b", if_newer_than=store.version_of("b")) is None
            assert store.pull_many(list("abc"), out=out, if_newer_than=store.version_of("b")) == [None] * 3

        assert needs_no_turn(ask_again, monkeypatch)
        assert store.bytes_pulled == bytes_pulled
        store.push("b", np.ones(8, F32))
        found = store.pull_many(list("abc"), out=out, if_newer_than=store.version_of("b"))
        assert found[1] is out[1]
        assert (found[0], found[2]) == (None, None)
        assert_array_equal(out[1], np.ones(8, F32))
        assert store.bytes_pulled == bytes_pulled + out[1].nbytes


@pytest.mark.sockets
def test_what_came_torn_of_what_is_newer_is_pulled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters("tcp") as start:
        store = start(shards=2).connect()
        for name in "ab":
            store.create(name, np.ones(8, F32))
        out = [np.zeros(8, F32), np.zeros(8, F32)]
        store.pull_many(["a", "b"], out=out)
        out[0][:4] = 0  # as if only the other half had come
        with monkeypatch.context() as patched:
            patched.setattr(Layout, "unchanged", lambda layout, answers: ({1}, [0]))
            assert store.pull_many(["a", "b"], out=out, if_newer_than=store.version_of("a"))[1] is None
        assert_array_equal(out[0], np.ones(8, F32))


def needs_no_turn(calls: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """An answer that takes a busy machine longer than a call waits by itself is the loop's."""
    turns: list[object] = []
    run = LoopThread.run

    def counted(thread: LoopThread, work: Any) -> Any:
        turns.append(work)
        return run(thread, work)

    def none_came() -> bool:
        turns.clear()
        calls()
        return not turns

    with monkeypatch.context() as patched:
        patched.setattr(LoopThread, "run", counted)
        return eventually(none_came)


@pytest.mark.sockets
def test_a_slice_that_fails_is_named_and_looked_up_again() -> None:
    with clusters("tcp") as start:
        cluster = start(shards=2, workers=2)
        store, other = cluster.connect(role="client"), cluster.connect(role="client")
        store.create("a", np.zeros(8, F32))
        store.push("a", np.ones(8, F32))
        other.drop("a")
        with pytest.raises(UnknownKey, match="'a'"):
            store.push("a", np.ones(8, F32))
        other.create("a", np.zeros(8, F32))
        store.push("a", np.full(8, 5, F32))
        assert_array_equal(other.pull("a"), np.full(8, 5, F32))
