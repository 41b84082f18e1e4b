"""Blocking direct calls: what they do without the loop, and what they leave to it.

Mostly over a pair of sockets, whose other end has answered before it is asked: requests are numbered from 1.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Literal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.client.layout import Layout
from psstore.client.loop_thread import LoopThread
from psstore.errors import BadMagic, UnknownKey, UnknownTensor
from psstore.protocol.frames import failure_frame
from psstore.protocol.requests import IGNORED, OPS
from tests.client.direct_support import (
    F32,
    KEY,
    SLICE_ELEMS,
    ThreadedEnds,
    frames_of,
    interrupt_while_busy,
    layout_of,
    reply,
)
from tests.support.cluster import PATIENCE_S, clusters
from tests.support.server_process import eventually


class Calling(ThreadedEnds):
    """For one tensor of 256 elements or more."""

    def __init__(self, num_elems: int = 256) -> None:
        super().__init__()
        self.array = np.arange(num_elems, dtype=F32)
        self.left: list[_core.Call] = []
        """Calls that were not answered at once."""

    def call(self, op: str = "ASSIGN") -> list[_core.Frame] | None:
        """The answers of a read that was answered at once. None: nothing was done."""
        answers: list[_core.Frame] = []

        def conclude(_: Layout, call: _core.Call) -> list[_core.Frame]:
            self.left.append(call)
            return []

        calls = self.calls(
            self.thread.calls,
            op,
            layout_of(len(self.array), op),
            conclude=conclude,
            sent=lambda op, layout: None,
            received=lambda layout, came: answers.extend(came),
        )
        result = calls.pull("t", out=self.array) if op == "PULL" else calls.push("t", self.array)
        return None if result is NotImplemented else answers

    def leave(self, op: str = "ASSIGN") -> _core.Call:
        """Of a call that is not answered at once."""
        assert self.call(op) is not None
        (call,) = self.left
        assert not call.over
        assert self.session.numbers() == [1]
        return call


@pytest.fixture
def ends() -> Iterator[Calling]:
    made = Calling()
    yield made
    made.close()


def test_a_call_sends_its_frame_and_returns_the_answer(ends: Calling) -> None:
    ends.peer.send(reply("ASSIGNED"))
    assert ends.call() == []
    assert not ends.left
    table = _core.SliceTable([(KEY, ends.array.nbytes, _core.DTYPES["float32"])])
    head = _core.encode_frame(OPS["ASSIGN"], request=1, sequence=1, table=table, payload_bytes=ends.array.nbytes)
    assert ends.sent() == head + ends.array.tobytes()
    assert (ends.session.next_request, ends.session.version, ends.session.num_requests) == (2, 7, 0)


def test_a_read_lands_in_the_array(ends: Calling) -> None:
    values = np.full(256, 3, F32)
    ends.peer.send(reply("PULLED", payload=values))
    answers = ends.call("PULL")
    assert answers is not None
    assert [frame.sequence for frame in answers] == [7]
    assert_array_equal(ends.array, values)


def test_what_the_kernel_does_not_take_is_left_to_the_loop() -> None:
    ends = Calling(num_elems=4 * SLICE_ELEMS)
    try:
        call = ends.leave()
        come = ends.sent()
        assert 0 < len(come) < ends.array.nbytes
        assert ends.session.has_output
        while not ends.session.send():
            come += ends.sent()
        come += ends.sent()
        assert come[-ends.array.nbytes :] == ends.array.tobytes()
        assert len(come) - ends.array.nbytes == (
            _core.HEADER_BYTES + 4 * _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES
        )
        ends.say(reply("ASSIGNED"))
        assert call.over
    finally:
        ends.close()


def test_a_read_that_is_cut_in_its_payload_goes_on_in_the_same_array(ends: Calling) -> None:
    whole = reply("PULLED", payload=np.full(256, 3, F32))
    ends.peer.send(whole[:500])
    call = ends.leave("PULL")
    ends.say(whole[500:])
    assert call.over
    assert_array_equal(ends.array, np.full(256, 3, F32))


def test_a_call_whose_connection_is_lost_is_sent_again_and_answered_on_the_next(ends: Calling) -> None:
    ends.peer.send(reply("ASSIGNED")[:10])
    call = ends.leave()
    first = ends.sent()
    ends.reconnect()
    assert ends.session.send()
    assert ends.sent() == first
    ends.say(reply("ASSIGNED"))
    assert call.over
    assert call.take_error() is None


def test_the_end_of_a_connection_is_for_the_loop(ends: Calling) -> None:
    ends.peer.shutdown(socket.SHUT_WR)
    call = ends.leave()
    assert not ends.session.receive(0.0)
    assert not call.over


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
def test_any_other_frame_is_left_to_whoever_drives_the_session(other: bytes, ends: Calling) -> None:
    ends.peer.send(other + reply("ASSIGNED"))
    call = ends.leave()
    frame = ends.session.next_frame()
    assert frame is not None
    assert frame.op == other[5]
    if not frame.complete:
        ends.session.discard()
    while ends.session.next_frame() is not None:
        pass
    assert call.over, "its answer came behind it"


def test_a_call_that_is_failed_says_with_what_and_keeps_nothing_of_it(ends: Calling) -> None:
    call = ends.leave()
    error = UnknownTensor("no such tensor")
    assert ends.session.fail(1, error)
    assert call.over
    assert call.take_error() is error
    assert call.take_error() is None
    assert call.answers() == [None]


def test_bytes_that_are_no_frame_are_told_to_whoever_drives_the_session(ends: Calling) -> None:
    ends.peer.send(b"nonsense" * 20)
    ends.leave()
    for _ in range(2):
        with pytest.raises(BadMagic):
            ends.session.next_frame()


def test_a_call_does_nothing_while_something_else_is_under_way(ends: Calling) -> None:
    ends.session.ask(OPS["STATS"], IGNORED, 0.0, 10.0)
    assert ends.call() is None
    ends.session.send()
    ends.sent()
    ends.session.finish(1, None)
    ends.fill()
    ends.session.say(bytes(1 << 10))
    ends.session.send()
    assert ends.call() is None
    ends.sent()
    ends.session.send()
    ends.sent()
    ends.session.feed(reply("ASSIGNED")[:5])
    assert ends.call() is None
    ends.session.disconnected()
    assert ends.call() is None
    assert ends.sent() == b""
    assert ends.session.next_request == 2


def test_a_call_does_not_take_arrays_of_another_kind(ends: Calling) -> None:
    ends.array = ends.array.astype(np.float64)
    assert ends.call() is None


def test_a_write_says_decisions_only_where_its_shard_waits_for_them(ends: Calling) -> None:
    ends.decisions.carried.last = 3
    ends.peer.send(reply("ASSIGNED"))
    assert ends.call() == []
    assert frames_of(ends.sent())[0].body == b""


def test_who_wants_the_loop_gets_it(ends: Calling) -> None:
    async def here() -> int:
        return threading.get_ident()

    def forget_all() -> None:
        for number in ends.session.numbers():
            ends.session.finish(number, None)

    with ThreadPoolExecutor(1) as pool:
        wanting = pool.submit(lambda: [ends.thread.run(here()) for _ in range(20)])
        while not wanting.done():
            ends.call()
            forget_all()
        assert len(set(wanting.result(PATIENCE_S))) == 1


def test_what_other_threads_ask_for_after_a_call_is_done_without_another_one(ends: Calling) -> None:
    async def done() -> bool:
        return True

    ends.peer.send(reply("ASSIGNED"))
    assert ends.call() == []
    assert ends.thread.submit(done()).result(PATIENCE_S)
    ends.peer.send(reply("ASSIGNED", request=2))
    assert ends.call() == []
    other = threading.Thread(target=lambda: ends.thread.run(done()))
    other.start()
    other.join(PATIENCE_S)
    assert not other.is_alive()


def test_an_interrupt_ends_the_call_and_gives_the_loop_back(ends: Calling) -> None:
    def call() -> None:
        ends.call("PULL")
        for number in ends.session.numbers():
            ends.session.finish(number, None)

    before = ends.array.copy()
    interrupt_while_busy(ends.thread.calls, call)
    assert not ends.thread.calls.busy
    last = ends.session.next_request - 1
    if ends.session.request(last) is not None:
        ends.say(reply("PULLED", request=last, payload=np.full(256, 3, F32)))
        assert_array_equal(ends.array, before)  # nobody waits for it
    assert ends.call("PULL") is not None


# ---- a whole store ----------------------------------------------------------------------------------


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "shm", "local"])
def test_what_was_done_before_needs_no_turn_of_the_loop(
    transport: Literal["tcp", "shm", "local"], monkeypatch: pytest.MonkeyPatch
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
@pytest.mark.one_loop
@pytest.mark.parametrize("transport", ["tcp", "shm", "local"])
def test_what_was_done_before_takes_few_calls_of_python(transport: str) -> None:
    """They are the first push and pull of their rounds, where a decision is carried to the shard."""
    with clusters(transport) as start, start().connect() as store:
        values = np.ones(2**20, F32)
        store.create("w", values, rule="sgd")
        pushes, pulls = [], []
        for _ in range(8):  # in some of which the store's own thread may have the loop, to tell what was read
            pushes.append(num_calls(lambda: store.push("w", values)))
            store.commit({"lr": 0.1})
            pulls.append(num_calls(lambda: store.pull("w", out=values)))
        assert min(pushes) <= 8
        assert min(pulls) <= 15


def num_calls(call: Callable[[], object]) -> int:
    """How many functions of the package the call calls in Python, on this thread."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"{os.sep}psstore{os.sep}" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.sockets
def test_a_pull_of_what_is_newer_needs_no_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters("tcp") as start:
        store = start(shards=2).connect()
        for name in "abc":
            store.create(name, np.zeros(8, F32))
        out = [np.zeros(8, F32) for _ in "abc"]
        store.pull_many(list("abc"), out=out)
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
