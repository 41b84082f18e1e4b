"""What is started while an answer is near waits, to go out in one write with what comes after it.

A lane without a thread of its own, over one end of a pair of sockets; the other end reads what has come.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from psstore import _core
from psstore.client.layout import Layout
from psstore.net.manual_loop import ManualLoop
from psstore.partition.ways import Ways
from psstore.protocol.session import OPS, Request
from psstore.types import Tensor, TensorSpec

F32 = np.float32
HEAD_BYTES = _core.HEADER_BYTES + _core.SLICE_ENTRY_BYTES
HELD_BYTES = 64 << 10
"""attempt.h's kMaxHeldBytes."""


class Lane:
    def __init__(self) -> None:
        self.loop, self._idle = ManualLoop(), select.epoll()
        self._idle.register(self.loop.fileno(), select.EPOLLIN)
        self.holding: list[_core.RequestLine] = []
        self.lane = _core.FastLane(
            mutex=threading.Lock(),
            queue=threading.Lock(),
            callers=[],
            ready=self.loop.ready,
            holding=self.holding,
            loop=self.loop,
            bell=self.loop.bell,
            sockets=self.loop.fileno(),
            idle=self._idle.fileno(),
        )
        self._ours, self._peer = socket.socketpair()
        for end in (self._ours, self._peer):
            end.setblocking(False)
        self.requests: dict[int, Any] = {}
        self.unsent: deque[memoryview] = deque()
        self.resumed = 0
        self.line = _core.RequestLine(self.requests)
        self.line.connect(self._ours.fileno(), _core.FrameDecoder(), self.unsent, self._resume)
        self._sender = _core.Sender([self.line], request=Request, rank=0, incarnation=0, checksum=False)

    def _resume(self) -> None:
        self.resumed += 1

    def close(self) -> None:
        self._ours.close()
        self._peer.close()
        self._idle.close()
        self.loop.close()

    def start(self, op: str = "ASSIGN", num_elems: int = 8) -> bool | None:
        tensor = Tensor(
            id=1, spec=TensorSpec(name="t", shape=(num_elems,), rule="assign"), slice_elems=1 << 18, shards=(0,)
        )
        layout = Layout([tensor], ["float32"], ways=Ways(1), pull=op == "PULL")
        terms = _core.Terms(OPS[op], timeout_s=1.0)
        array = np.zeros(num_elems, F32)
        return self.lane.start(self._sender, layout.plan, [array], terms, [self.loop.create_future()], None, None)

    def came(self) -> int:
        """Bytes, to the other end."""
        num_bytes = 0
        while True:
            try:
                num_bytes += len(self._peer.recv(1 << 20))
            except BlockingIOError:
                return num_bytes

    def fill(self) -> int:
        """Takes all the room that the kernel has for what is sent. Returns how much there was."""
        num_bytes = 0
        while True:
            try:
                num_bytes += self._ours.send(bytes(1 << 10))
            except BlockingIOError:
                return num_bytes


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


SMALL_BYTES = HEAD_BYTES + 8 * 4


def test_what_is_started_behind_a_write_waits_until_it_is_sent_together(lane: Lane) -> None:
    assert lane.start()
    assert lane.came() == SMALL_BYTES
    for _ in range(3):
        assert lane.start()
    assert lane.came() == 0
    assert lane.holding == [lane.line]
    assert sorted(lane.requests) == [1, 2, 3, 4]
    lane.lane.send_held()
    assert lane.came() == 3 * SMALL_BYTES
    assert not lane.holding


def test_nothing_waits_where_no_answer_is_near(lane: Lane) -> None:
    lane.start()
    lane.requests.clear()  # answered
    lane.start()
    assert lane.came() == 2 * SMALL_BYTES


def test_nothing_waits_for_the_answer_to_a_read(lane: Lane) -> None:
    lane.start("PULL")
    lane.start()
    assert lane.came() == HEAD_BYTES + SMALL_BYTES


def test_what_was_held_is_a_write_whose_answer_is_near_once_it_is_sent(lane: Lane) -> None:
    lane.start()
    lane.start()
    lane.lane.send_held()
    del lane.requests[1]
    lane.came()
    lane.start()
    assert lane.came() == 0


@pytest.mark.parametrize(
    "more",
    [
        lambda lane: lane.start(num_elems=HELD_BYTES // 4),
        lambda lane: [lane.start(num_elems=1 << 12) for _ in range(5)],
    ],
    ids=["a large one", "many"],
)
def test_much_does_not_wait_and_what_waits_goes_before_it(lane: Lane, more: Callable[[Lane], object]) -> None:
    lane.start()
    lane.start()
    more(lane)
    assert lane.came() >= HELD_BYTES
    assert not lane.holding


def test_what_waits_for_a_connection_that_is_lost_is_left_to_be_sent_on_the_next(lane: Lane) -> None:
    lane.start()
    lane.start()
    lane.line.disconnect()
    lane.lane.send_held()
    assert lane.came() == SMALL_BYTES
    assert sorted(lane.requests) == [1, 2]


def test_what_the_kernel_does_not_take_of_it_is_left_to_the_loop(lane: Lane) -> None:
    lane.start()
    lane.start()
    filled = lane.fill()
    lane.lane.send_held()
    assert lane.came() == SMALL_BYTES + filled
    assert sum(map(len, lane.unsent)) == SMALL_BYTES
    assert lane.start() is None  # what was started before has to go before
    lane.loop.turn(())
    assert lane.resumed == 1
