"""What becomes of the requests of calls that were started: answered without their session, or left to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore import _core
from psstore.errors import BadMagic
from psstore.net.client_connection import ClientConnection
from psstore.protocol.requests import OPS
from tests.client.lane_support import F32, KEY, TIMEOUT_S, Heard, Lane

VALUES = OPS["PULL"] + 1

HEAD_BYTES = _core.HEADER_BYTES + _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES

NUM_ELEMS = 1 << 17
"""Of a pull whose answer is received where it is to live, and not at once."""


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


def answer_to(request: int) -> bytes:
    return _core.encode_frame(OPS["ASSIGN"] + 1, request=request)


def news() -> bytes:
    return _core.encode_frame(OPS["SHARED"], body=b"news")


def frame_of(data: bytes) -> _core.Frame:
    """That begins there."""
    decoder = _core.FrameDecoder()
    decoder.feed(data)
    frame = decoder.next_frame()
    assert frame is not None
    return frame


def values(num_elems: int) -> tuple[_core.SliceTable, bytes]:
    """Of an answer to a pull."""
    table = _core.SliceTable([(KEY, 4 * num_elems, _core.DTYPES["float32"])])
    return table, np.arange(num_elems, dtype=F32).tobytes()


def test_calls_end_with_their_answers_in_whatever_order_they_come(lane: Lane) -> None:
    out = np.zeros(8, F32)
    lane.start("PULL", out=out)
    lane.start()
    assert lane.answer(2) is None
    assert lane.ended == [Heard(lane.wholes[1], "ASSIGN", [], None)]
    table, payload = values(8)
    lane.feed(_core.encode_frame(VALUES, request=1, sequence=7, table=table, payload_bytes=32) + payload)
    assert lane.line.next_frame(lane.decoder, 5.0) is None
    (whole, op, (answer,), results) = lane.ended[1]
    assert (whole, op, answer.sequence) == (lane.wholes[0], "PULL", 7)
    assert results[0] is out
    assert_array_equal(out, np.arange(8))
    assert (lane.line.version, lane.line.last_heard) == (7, 5.0)
    assert not lane.line.has_started
    assert not lane.requests


def test_a_large_answer_is_received_where_it_is_to_live(lane: Lane) -> None:
    out = np.zeros(NUM_ELEMS, F32)
    lane.start("PULL", NUM_ELEMS, out=out)
    table, payload = values(NUM_ELEMS)
    lane.feed(_core.encode_frame(VALUES, request=1, table=table, payload_bytes=len(payload)))
    assert lane.line.next_frame(lane.decoder, 0.0) is None
    assert not lane.ended
    lane.feed(payload)
    assert lane.line.next_frame(lane.decoder, 0.0) is None
    assert len(lane.ended) == 1
    assert_array_equal(out, np.arange(NUM_ELEMS))


def test_answers_are_received_piece_by_piece_without_the_loop(lane: Lane) -> None:
    out = np.zeros(NUM_ELEMS, F32)
    lane.start("PULL", NUM_ELEMS, out=out)
    lane.start()
    table, payload = values(NUM_ELEMS)
    head = _core.encode_frame(VALUES, request=1, table=table, payload_bytes=len(payload))
    pieces = [head[:10], head[10:] + payload[:20], payload[20:1000], payload[1000:], answer_to(2)]
    for piece in pieces[:-1]:
        assert not lane.ended
        lane.say(piece)
    assert [heard.whole for heard in lane.ended] == lane.wholes[:1]
    assert_array_equal(out, np.arange(NUM_ELEMS))
    lane.say(pieces[-1])
    assert [heard.whole for heard in lane.ended] == lane.wholes
    assert not lane.line.has_started


def test_part_of_an_answer_is_a_word_of_the_shard(lane: Lane) -> None:
    """Who counted whole answers only would give up a connection that takes long for one."""
    session: Any = SimpleNamespace(owes_releases=False, line=lane.line)
    loop: Any = lane.loop
    connection = ClientConnection(session, loop)
    lane.start()
    lane.peer.send(answer_to(1)[:10])
    before = lane.loop.time()
    assert connection.receive()
    assert lane.line.last_heard >= before


@pytest.mark.parametrize("other", [answer_to(9), news()], ids=["another request's answer", "news"])
def test_what_else_is_received_is_for_the_session(lane: Lane, other: bytes) -> None:
    lane.start()
    lane.peer.send(answer_to(1) + other + answer_to(1))
    assert not lane.line.receive(0.0)
    assert len(lane.ended) == 1
    frame = lane.line.next_frame(lane.decoder, 0.0)
    assert frame is not None
    assert frame.op == frame_of(other).op
    assert lane.line.next_frame(lane.decoder, 0.0) is not None, "what came behind it"


def test_bytes_that_are_no_frame_are_told_to_whoever_drives_the_connection(lane: Lane) -> None:
    lane.start()
    lane.peer.send(b"what" * 64)
    assert not lane.line.receive(0.0)
    with pytest.raises(BadMagic):
        lane.line.next_frame(lane.decoder, 0.0)


def test_the_end_of_a_connection_is_for_whoever_drives_it(lane: Lane) -> None:
    lane.start()
    lane.peer.shutdown(socket.SHUT_WR)
    assert not lane.line.receive(0.0)
    lane.line.disconnect()
    assert not lane.line.receive(0.0)
    assert lane.left() == [1]


def test_what_comes_for_a_cancelled_call_goes_nowhere(lane: Lane) -> None:
    out = np.zeros(8, F32)
    lane.start("PULL", out=out)
    lane.wholes[0].is_cancelled = True
    table, payload = values(8)
    lane.feed(_core.encode_frame(VALUES, request=1, table=table, payload_bytes=32) + payload)
    assert lane.line.next_frame(lane.decoder, 0.0) is None
    assert not lane.line.has_started
    assert not out.any()


def test_a_request_that_is_answered_with_an_error_is_its_sessions(lane: Lane) -> None:
    lane.start()
    lane.start()
    error = lane.answer(1, OPS["ERROR"])
    assert error is not None
    assert error.request == 1
    assert lane.unfinished == [Heard(lane.wholes[0], "ASSIGN", [None], None)]
    assert list(lane.requests) == [1], "the other one may still be answered plainly"


def test_a_session_gets_the_requests_in_order_with_all_it_needs_to_send_them_again(lane: Lane) -> None:
    lane.start()
    lane.start("PULL")
    assert lane.left() == [1, 2]
    assert not lane.line.has_started
    push, pull = lane.requests[1], lane.requests[2]
    assert (push.op, push.sequence, push.payload.nbytes) == (OPS["ASSIGN"], 1, 32)
    assert (pull.op, pull.sequence, pull.destination.nbytes) == (OPS["PULL"], 0, 32)
    assert push.deadline == push.started + TIMEOUT_S
    assert lane.answer(1) is not None, "its session's, too"


def test_what_the_kernel_does_not_take_is_left_to_the_loop_in_order(lane: Lane) -> None:
    filled = lane.fill()
    assert lane.start(num_elems=NUM_ELEMS)
    assert not lane.awaits_room()
    assert lane.start("PULL")
    lane.lane.send_held()
    assert lane.came() == filled
    assert lane.awaits_room()
    sent = b"".join(lane.unsent)
    push, pull = HEAD_BYTES + 4 * NUM_ELEMS, HEAD_BYTES
    assert len(sent) == push + pull
    assert [frame_of(sent).request, frame_of(sent[push:]).request] == [1, 2]


@pytest.mark.parametrize("op", ["ASSIGN", "PULL"])
def test_nothing_overtakes_what_the_kernel_did_not_take_though_it_has_room_again(lane: Lane, op: str) -> None:
    lane.fill()
    lane.start(num_elems=NUM_ELEMS)
    lane.sent()
    assert lane.start(op)
    lane.lane.send_held()
    assert lane.came() == 0
    assert [frame_of(b"".join(lane.unsent)).request] == [1]


def test_what_was_asked_of_the_loop_before_begins_before(lane: Lane) -> None:
    begun: list[bool] = []
    lane.loop.call_soon(lambda: begun.append(lane.came() == 0))
    assert lane.start()
    assert begun == [True]
    assert lane.caught_up == 1
    assert lane.came() > 0


def test_nothing_starts_before_what_can_not_begin_now(lane: Lane) -> None:
    lane.loop.call_soon(lambda: lane.loop.call_soon(lambda: None))
    assert not lane.start()
    assert lane.came() == 0


def test_sessions_are_told_of_deadlines_that_they_do_not_look_at_anyhow(lane: Lane) -> None:
    lane.start()
    assert lane.looked_after == 1
    lane.line.looks_at = lane.line.next_deadline() or 0.0
    lane.start()
    assert lane.looked_after == 1
