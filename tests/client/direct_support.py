"""Direct calls over one end of a pair of sockets; the other end answers, and reads what has come."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from psstore import _core
from psstore.client.layout import Layout, Pull, Push
from psstore.client.loop_thread import LoopThread
from psstore.net.manual_loop import ManualLoop
from psstore.net.sockets import sleep_in_recv
from psstore.partition.router import Router
from psstore.partition.slicing import SLICE_BYTES
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.requests import OPS, Answer, encoded, understood
from psstore.types import Tensor, TensorSpec

F32 = np.float32
KEY = 1 << _core.SLICE_INDEX_BITS
SLICE_ELEMS = SLICE_BYTES // 4


def never(*_: object) -> Any:
    raise AssertionError("nothing of the kind was asked for")


def reply(op: str, *, request: int = 1, payload: npt.NDArray[Any] | None = None) -> bytes:
    """An answer about the tensor's slices, at version 7."""
    num_bytes = 0 if payload is None else payload.nbytes
    sizes = [min(SLICE_BYTES, num_bytes - begin) for begin in range(0, num_bytes, SLICE_BYTES)] or [0]
    table = _core.SliceTable([(KEY + index, size, _core.DTYPES["float32"]) for index, size in enumerate(sizes)])
    head = _core.encode_frame(OPS[op], request=request, sequence=7, table=table, payload_bytes=num_bytes)
    return head if payload is None else head + payload.tobytes()


def frames_of(data: bytes) -> list[_core.Frame]:
    """The whole frames, without their payloads."""
    decoder, frames = _core.FrameDecoder(), []
    decoder.feed(data)
    while (frame := decoder.next_frame()) is not None:
        if frame.complete:
            frames.append(frame)
        else:
            decoder.discard()
    return frames


class Ends:
    """A session that is up, and the other end of its connection."""

    def __init__(self) -> None:
        self.ours, self.peer = socket.socketpair()
        for end in (self.ours, self.peer):
            end.setblocking(False)
        sleep_in_recv(self.ours)
        self.decisions = DecisionCache()
        self.session = _core.ClientSession(self.decisions.carried, answer=Answer, understand=understood, encode=encoded)
        self.session.connected()
        self.session.open(self.ours.fileno())
        self.session.speaks_as(rank=0, incarnation=0, checksum=False, keeps_releases=True)
        self.session.welcomed(0, 0, 0.0)

    def close(self) -> None:
        self.session.disconnected()
        self.ours.close()
        self.peer.close()

    def sent(self) -> bytes:
        """All that has come to the other end."""
        pieces = []
        while True:
            try:
                pieces.append(self.peer.recv(1 << 20))
            except BlockingIOError:
                return b"".join(pieces)

    def fill(self) -> int:
        """Takes all the room that the kernel has for what is sent. Returns how much there was."""
        num_bytes = 0
        while True:
            try:
                num_bytes += self.ours.send(bytes(1 << 10), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return num_bytes

    def say(self, data: bytes) -> None:
        """Has the other end send that, and receives it all, as the loop would."""
        left = memoryview(data)
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[self.peer.send(left) :]
            assert self.session.receive(0.0)

    def reconnect(self) -> None:
        """The connection is lost, and there is a new one."""
        self.session.disconnected()
        self.session.connected()
        self.session.open(self.ours.fileno())
        self.session.welcomed(0, 0, 0.0)

    def calls(
        self,
        driver: _core.CallDriver,
        op: str,
        layout: Layout,
        *,
        conclude: Callable[..., Any] = never,
        received: Callable[..., Any] = never,
        sent: Callable[..., Any] = never,
        starting: _core.StartingParts | None = None,
    ) -> _core.DirectCalls:
        """Direct calls of tensor 't', which went like that before."""
        plan = _core.CallPlan(op, layout, layout.frame_plan)
        nothing = _core.StartingParts(
            make=never, ended=never, look_after=never, catch_up=never, paced=never, under_way=set()
        )
        return _core.DirectCalls(
            driver,
            [self.session],
            plans=[{Push(("t",), ()).cache_key: plan, Pull(("t",), ()).cache_key: plan}],
            terms=[{self: {op: _core.CallTerms(OPS[op], 10.0)}}],
            whose=self,
            renew=lambda op, layout, wait_s: None,
            sent=sent,
            received=received,
            newer=never,
            conclude=conclude,
            reads_consistently=False,
            starting=starting or nothing,
        )


def layout_of(num_elems: int, op: str) -> Layout:
    spec = TensorSpec(name="t", shape=(num_elems,), rule="assign")
    shards = (0,) * -(-num_elems // SLICE_ELEMS)
    tensor = Tensor(id=1, spec=spec, slice_elems=SLICE_ELEMS, shards=shards)
    return Layout([tensor], ["float32"], ways=Router(1), pull=op == "PULL")


class ThreadedEnds(Ends):
    """The ends of a connection whose store has a loop with a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = LoopThread()

    def close(self) -> None:
        self.thread.stop()
        super().close()


def interrupt_while_busy(driver: _core.CallDriver, call: Callable[[], object]) -> None:
    """Calls again and again, until Ctrl-C comes in the middle of a call."""
    over = threading.Event()

    def interrupt() -> None:
        while not driver.busy and not over.is_set():
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


class Ended(NamedTuple):
    """What was told of a started call when all its requests had ended."""

    whole: Whole
    op: str
    answers: Sequence[_core.Frame | None]
    error: BaseException | None
    results: Any


class Starter(Ends):
    """Starts calls, and hears what becomes of them. Its loop has no thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self._idle = ManualLoop(), select.epoll()
        self._idle.register(self.loop.fileno(), select.EPOLLIN)
        self.corked: list[_core.ClientSession] = []
        self.driver = _core.CallDriver(
            mutex=threading.Lock(),
            queue=threading.Lock(),
            callers=[],
            ready=self.loop.ready,
            corked=self.corked,
            loop=self.loop,
            wakeup_fd=self.loop.wakeup_fd,
            sockets=self.loop.fileno(),
            idle=self._idle.fileno(),
        )
        self.loop.add_reader(self.ours.fileno(), never)
        self.looked_after = self.caught_up = 0
        self.wholes: list[Whole] = []
        """Of the calls that were started."""
        self.ended: list[Ended] = []

    def close(self) -> None:
        super().close()
        self._idle.close()
        self.loop.close()

    def start(self, op: str = "ASSIGN", num_elems: int = 8, *, out: npt.NDArray[np.float32] | None = None) -> bool:
        """False: it can't be started like this now."""

        def look_after(_: Layout) -> None:
            self.looked_after += 1

        def catch_up() -> None:
            self.caught_up += 1
            self.loop.turn(())

        def ended(whole: Whole, op: str, layout: Layout, answers: Any, error: Any, results: Any) -> None:
            self.ended.append(Ended(whole, op, answers, error, results))

        starting = _core.StartingParts(
            make=Whole,
            ended=ended,
            look_after=look_after,
            catch_up=catch_up,
            paced=lambda: False,
            under_way=set(),
        )
        calls = self.calls(self.driver, op, layout_of(num_elems, op), starting=starting)
        array = np.zeros(num_elems, F32) if out is None else out
        items: Mapping[str, Any] = {"t": array}
        started: Any = calls.start_pull_many(["t"], out=[array]) if op == "PULL" else calls.start_push_many(items)
        if started is NotImplemented:
            return False
        self.wholes.append(started)
        return True

    def came(self) -> int:
        """Bytes, to the other end."""
        return len(self.sent())

    def awaits_room(self) -> bool:
        """The loop goes on when there is room for what is unsent: so there has to be some now."""
        return any(mask & select.EPOLLOUT for _, mask in self.loop.poll(0))
