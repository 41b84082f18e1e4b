"""What becomes of the requests of direct calls that were started."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.errors import BadMagic, UnknownTensor
from psstore.net.client_connection import ClientConnection
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.frames import failure_frame
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.requests import OPS
from psstore.protocol.session import Session
from tests.client.direct_support import F32, Ended, Starter, frames_of, reply

HEAD_BYTES = _core.HEADER_BYTES + _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES

NUM_ELEMS = 1 << 16
"""As many as fill one slice: the answer to their pull is received where it is to live, and not at once."""


@pytest.fixture
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    made.close()


def news() -> bytes:
    return _core.encode_frame(OPS["SHARED"], body=b"news")


def values(num_elems: int, *, request: int = 1) -> bytes:
    return reply("PULLED", request=request, payload=np.arange(num_elems, dtype=F32))


def test_calls_end_with_their_answers_in_whatever_order_they_come(starter: Starter) -> None:
    out = np.zeros(8, F32)
    starter.start("PULL", out=out)
    starter.start()
    starter.say(reply("ASSIGNED", request=2))
    assert starter.ended == [Ended(starter.wholes[1], "ASSIGN", [], None, None)]
    starter.say(values(8))
    whole, op, answers, error, results = starter.ended[1]
    assert (whole, op, error) == (starter.wholes[0], "PULL", None)
    assert [answer and answer.sequence for answer in answers] == [7]
    assert results[0] is out
    assert_array_equal(out, np.arange(8))
    assert starter.session.version == 7
    assert not starter.session.num_requests


def test_a_large_answer_is_received_piece_by_piece_where_it_is_to_live(starter: Starter) -> None:
    out = np.zeros(NUM_ELEMS, F32)
    starter.start("PULL", NUM_ELEMS, out=out)
    starter.start()
    answer = values(NUM_ELEMS)
    cuts = [0, 10, 500, 1500, len(answer)]
    for begin, end in itertools.pairwise(cuts):
        assert not starter.ended
        starter.say(answer[begin:end])
    assert [one.whole for one in starter.ended] == starter.wholes[:1]
    assert_array_equal(out, np.arange(NUM_ELEMS))
    starter.say(reply("ASSIGNED", request=2))
    assert [one.whole for one in starter.ended] == starter.wholes


def test_part_of_an_answer_is_a_word_of_the_shard(starter: Starter) -> None:
    """Who counted whole answers only would give up a connection that takes long for one."""
    identity = ClientIdentity(client="c" * 32, role="client")
    session = Session(identity=identity, decisions=DecisionCache(), make_nonce=lambda: b"", address="here")
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    connection = ClientConnection(session, starter.loop.as_asyncio, ours)
    peer.send(reply("ASSIGNED")[:10])
    before = starter.loop.time()
    starter.loop.turn(starter.loop.poll(1.0))
    assert session.core.last_heard >= before
    connection.abort()
    starter.loop.turn(())
    peer.close()


@pytest.mark.parametrize("other", [reply("ASSIGNED", request=9), news()], ids=["another answer", "news"])
def test_what_else_is_received_is_for_whoever_drives_the_session(starter: Starter, other: bytes) -> None:
    starter.start()
    starter.start("PULL")
    starter.say(reply("ASSIGNED") + other + values(8, request=2))
    assert [one.whole for one in starter.ended] == starter.wholes[:1]
    frame = starter.session.next_frame()
    assert frame is not None
    assert frame.op == frames_of(other)[0].op
    assert starter.session.next_frame() is None
    assert [one.whole for one in starter.ended] == starter.wholes, "what came behind it"


def test_bytes_that_are_no_frame_are_told_to_whoever_drives_the_session(starter: Starter) -> None:
    starter.start()
    starter.peer.send(b"what" * 64)
    for _ in range(2):
        with pytest.raises(BadMagic):
            starter.session.receive(0.0)
    with pytest.raises(BadMagic):
        starter.session.next_frame()


def test_a_call_outlives_its_connection(starter: Starter) -> None:
    out = np.zeros(8, F32)
    starter.start("PULL", out=out)
    first = starter.sent()
    starter.peer.shutdown(socket.SHUT_WR)
    assert not starter.session.receive(0.0)
    starter.session.disconnected()
    assert not starter.ended
    starter.session.connected()
    starter.session.welcomed(0, 0, 0.0)
    assert b"".join(piece for pieces in starter.session.take_output() for piece in pieces) == first
    starter.session.feed(values(8))
    assert_array_equal(out, np.arange(8))
    assert len(starter.ended) == 1


def test_what_comes_for_a_cancelled_call_goes_nowhere(starter: Starter) -> None:
    out = np.zeros(8, F32)
    starter.start("PULL", out=out)
    starter.wholes[0].is_cancelled = True
    starter.say(values(8))
    assert not starter.session.num_requests
    assert not out.any()


def test_an_error_is_for_whoever_drives_the_session_and_ends_the_call(starter: Starter) -> None:
    starter.start()
    starter.start()
    starter.say(failure_frame(1, UnknownTensor("no such tensor")))
    frame = starter.session.next_frame()
    assert frame is not None
    assert (frame.op, frame.request) == (OPS["ERROR"], 1)
    error = UnknownTensor("no such tensor")
    starter.session.fail(1, error)
    assert starter.ended == [Ended(starter.wholes[0], "ASSIGN", [None], error, None)]
    assert starter.session.numbers() == [2]


def test_requests_say_when_they_began_and_end(starter: Starter) -> None:
    starter.start()
    starter.start("PULL")
    push, pull = map(starter.session.request, starter.session.numbers())
    assert push is not None
    assert pull is not None
    assert (push.op, push.sequence) == (OPS["ASSIGN"], 1)
    assert (pull.op, pull.sequence) == (OPS["PULL"], 0)
    assert push.deadline == push.began + 10.0 == starter.session.next_deadline()
    assert starter.session.expired(push.deadline) == [1]
    assert starter.session.numbers(reads_only=True) == [2]


def test_what_the_kernel_does_not_take_is_left_to_the_loop_in_order(starter: Starter) -> None:
    filled = starter.fill()
    assert starter.start(num_elems=2 * NUM_ELEMS)
    assert not starter.awaits_room()
    assert starter.start("PULL")
    starter.driver.uncork()
    assert starter.came() == filled
    assert starter.awaits_room()
    sent = b""
    while not starter.session.send():
        sent += starter.sent()
    sent += starter.sent()
    assert [frame.request for frame in frames_of(sent)] == [1, 2]


def test_what_was_asked_of_the_loop_before_begins_before(starter: Starter) -> None:
    begun: list[bool] = []
    starter.loop.call_soon(lambda: begun.append(starter.came() == 0))
    assert starter.start()
    assert begun == [True]
    assert starter.caught_up == 1
    assert starter.came() > 0


def test_nothing_starts_before_what_can_not_begin_now(starter: Starter) -> None:
    starter.loop.call_soon(lambda: starter.loop.call_soon(lambda: None))
    assert not starter.start()
    assert starter.came() == 0


def test_nothing_starts_where_there_is_no_connection(starter: Starter) -> None:
    starter.session.disconnected()
    assert not starter.start()
    assert not starter.session.num_requests


def test_sessions_are_told_of_deadlines_that_they_do_not_look_at_anyhow(starter: Starter) -> None:
    starter.start()
    assert starter.looked_after == 1
    starter.session.looks_at = starter.session.next_deadline() or 0.0
    starter.start()
    assert starter.looked_after == 1
