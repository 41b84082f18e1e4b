"""Lanes over one end of a pair of sockets; the other end answers, and reads what has come."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest

from psstore import _core
from psstore.client.layout import Layout, Pull, Push
from psstore.client.loop_thread import LoopThread
from psstore.net.manual_loop import ManualLoop
from psstore.net.sockets import sleep_in_recv
from psstore.partition.router import Router
from psstore.protocol.requests import OPS, Request
from psstore.types import Tensor, TensorSpec

F32 = np.float32
KEY = 1 << _core.SLICE_INDEX_BITS
TIMEOUT_S = 1.0


def all_at(end: socket.socket) -> bytes:
    """What has come to an end that does not block."""
    pieces = []
    while True:
        try:
            pieces.append(end.recv(1 << 20))
        except BlockingIOError:
            return b"".join(pieces)


def never(*_: object) -> Any:
    raise AssertionError("nothing of the kind was asked for")


class Ends:
    """One connection of a lane, and its other end."""

    def __init__(self) -> None:
        self.ours, self.peer = socket.socketpair()
        for end in (self.ours, self.peer):
            end.setblocking(False)
        sleep_in_recv(self.ours)
        self.decoder, self.unsent = _core.FrameDecoder(), deque[memoryview]()
        self.requests: dict[int, Any] = {}
        self.line = _core.RequestLine(self.requests)
        self.line.connect(self.ours.fileno(), self.decoder, self.unsent)

    def close(self) -> None:
        self.ours.close()
        self.peer.close()

    def sent(self) -> bytes:
        """All that has come to the other end."""
        return all_at(self.peer)

    def fill(self) -> int:
        """Takes all the room that the kernel has for what is sent. Returns how much there was."""
        num_bytes = 0
        while True:
            try:
                num_bytes += self.ours.send(bytes(1 << 10), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return num_bytes


class ThreadedEnds(Ends):
    """The same of a store's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = LoopThread()

    def close(self) -> None:
        self.thread.stop()
        super().close()


def interrupt_while_busy(lane: _core.FastLane, call: Callable[[], object]) -> None:
    """Calls again and again, until Ctrl-C comes in the middle of a call."""
    over = threading.Event()

    def interrupt() -> None:
        while not lane.busy and not over.is_set():
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)

    def call_until_interrupted() -> None:
        while not over.wait(0):
            call()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        call_until_interrupted()
    over.set()
    interrupting.join()


class Whole:
    """What the caller of a started call has."""

    is_cancelled = False

    def cancelled(self) -> bool:
        return self.is_cancelled


class Heard(NamedTuple):
    """Of a started call: that it was answered, or left to its session."""

    whole: Whole
    op: str
    answers: list[Any]
    results: Any


class Lane(Ends):
    """Starts calls, and hears what becomes of them. Its loop has no thread of its own."""

    def __init__(self) -> None:
        super().__init__()
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
        self.loop.watch(self.ours.fileno(), select.EPOLLIN, never)
        self.looked_after = self.caught_up = 0
        self.wholes: list[Whole] = []
        """Of the calls that were started."""
        self.ended: list[Heard] = []
        self.unfinished: list[Heard] = []
        self._sender = _core.Sender(
            [self.line], request=Request, rank=0, incarnation=0, checksum=False, keeps_releases=True
        )

    def close(self) -> None:
        super().close()
        self._idle.close()
        self.loop.close()

    def start(self, op: str = "ASSIGN", num_elems: int = 8, *, out: npt.NDArray[np.float32] | None = None) -> bool:
        """False: it can't be started like this now."""
        tensor = Tensor(
            id=1, spec=TensorSpec(name="t", shape=(num_elems,), rule="assign"), slice_elems=1 << 18, shards=(0,)
        )
        layout = Layout([tensor], ["float32"], ways=Router(1), pull=op == "PULL")
        habit = _core.Habit(op, layout, layout.plan)
        calls = _core.ShortCalls(
            self.lane,
            self._sender,
            habits=[{Push(("t",), ()).manner: habit, Pull(("t",), ()).manner: habit}],
            terms=[{op: _core.Terms(OPS[op], timeout_s=TIMEOUT_S)}],
            renew=lambda op, layout, wait_s: None,
            future=never,
            sent=never,
            received=never,
            newer=never,
            conclude=never,
            starting=self._starting(),
        )
        array = np.zeros(num_elems, F32) if out is None else out
        started = calls.start_pull_many(["t"], out=[array]) if op == "PULL" else calls.start_push_many({"t": array})
        if started is NotImplemented:
            return False
        self.wholes.append(cast(Whole, started))
        return True

    def _starting(self) -> _core.StartingParts:
        def look_after(_: Layout) -> None:
            self.looked_after += 1

        def catch_up() -> None:
            self.caught_up += 1
            self.loop.turn(())

        def ended(whole: Whole, op: str, layout: Layout, answers: list[Any], results: Any) -> None:
            self.ended.append(Heard(whole, op, answers, results))

        def unfinished(whole: Whole, op: str, layout: Layout, answers: list[Any], results: Any) -> list[Any]:
            self.unfinished.append(Heard(whole, op, answers, results))
            return [self.loop.create_future() for answer in answers if answer is None]

        return _core.StartingParts(
            make=Whole,
            ended=ended,
            unfinished=unfinished,
            look_after=look_after,
            catch_up=catch_up,
            paced=lambda: False,
            under_way=set(),
        )

    def left(self) -> list[int]:
        """Numbers of the requests that are not answered, now that the session has them."""
        self.line.hand_over()
        return sorted(self.requests)

    def answer(self, request: int, reply: int = OPS["ASSIGN"] + 1) -> _core.Frame | None:
        """Takes that answer; returns what is for the session."""
        self.feed(_core.encode_frame(reply, request=request))
        return self.line.next_frame(self.decoder, now=0.0)

    def feed(self, data: bytes) -> None:
        self.decoder.feed(data)

    def say(self, data: bytes) -> None:
        """Has the other end send that, and receives it all, as the loop would."""
        left = memoryview(data)
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[self.peer.send(left) :]
            assert self.line.receive(0.0)

    def came(self) -> int:
        """Bytes, to the other end."""
        return len(self.sent())

    def awaits_room(self) -> bool:
        """The loop goes on when there is room for what is unsent: so there has to be some now."""
        return any(mask & select.EPOLLOUT for _, mask in self.loop.poll(0))
