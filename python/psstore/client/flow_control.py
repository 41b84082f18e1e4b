"""Flow control of a round that was committed early: which pushes and frames go now, and which wait for their turn.

A slice takes its step when its last contribution arrives. Where workers share a link to a shard, TCP gives some of them
more of it than others, and what the fast ones are ahead is of no use to anybody: values come back at the pace of the
slowest, and when all is pushed at last the links back are still to be used. So two things are bounded by a `Window`:

- how far a worker's pushes run ahead of what it reads of them (`Pace`). Eight workers and two shards took 1.7 times
  what the links need without it, and 1.1 with it. Only what is being read counts, as nothing else can come back.
  Nobody waits for ever: a window in which nothing moves opens, so that workers may push in different orders.
- how many frames are not acknowledged (`FramesInFlight`). Frames go to all shards in one order, so that the connection
  that is ahead waits for the one that has the next frame, and no long queue stands in front of the links. There is a
  frame for each shard, or more: with fewer some shards have nothing to receive. Eight workers and eight shards took
  1.39 times what their links need with 4 frames on their way, and 1.07 with 8; four shards 1.08 with 4, and 1.21 with
  8, more than the queues in front of the links hold (plain sockets 1.09 to 1.14).

Measured with `python -m bench.scaling`; see docs/performance.md, Training.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from psstore.net.deadline_timer import DeadlineTimer
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Future
from psstore.types import ITEM_BYTES, Tensor

T = TypeVar("T")

FEWEST_PUSHES = 4
"""Pushes of the largest size: one in each link, and one in front of each. With 3 eight workers and eight shards took
1.3 times as long."""

STALL_S = 0.1
"""With nothing back for so long, and for STALL_TRIPS of the shortest trips, a window is taken to be too small."""

STALL_TRIPS = 4

FIRST_STALL_S = 1.0
"""While no trip was seen yet: longer than one takes around the earth."""

FORGETTING = 1.1
"""By so much in each round the shortest trip is taken to be longer, and the rate to be lower, than they once were:
links and loads change."""

FIRST_CALM_ROUNDS = 8
LAST_CALM_ROUNDS = 1024
"""Rounds without a stall after which the window is narrowed again: twice as many after each stall."""


class Window:
    """How many bytes may be on their way to the shards and back: enough for the links, and few more.

        window = 2 · rate · shortest trip, and no less than a few pushes

    A trip is a push, the step that waits for everybody's push, and the pull of what became of it. The rate is what came
    back in a round per second. The product of both is what keeps the links busy with no queue in front of them, as in
    BBR (Cardwell et al., ACM Queue 14(5), 2016, for a connection; here for all of a worker's together). Twice that
    leaves room for a queue, and has a window that is too small double with every round. A round begins with half of it,
    without the queue: else what is out at once would lengthen even the shortest trip, and the window with it.

    A window lives as long as its worker's connections; rounds begin with `begin`.
    """

    def __init__(self, fewest_pushes: int = FEWEST_PUSHES) -> None:
        self._fewest_pushes = fewest_pushes
        self._largest_bytes = 0
        """The largest push of this round."""
        self._shortest_s = math.inf
        self._rate = 0.0
        """Bytes per second in the rounds before."""
        self._round_rate = 0.0
        """Bytes per second in this round, so far."""
        self._open_bytes = 0.0
        """How wide this round has opened it so far."""
        self._came_bytes = 0
        """Bytes that came back in this round after the first push that did."""
        self._first_came: float | None = None
        self._wider = 1
        """Factor by which stalls have widened it."""
        self._stalled = False
        """Set by a stall in this round."""
        self._calm_rounds = 0
        self._needed_calm = FIRST_CALM_ROUNDS

    @property
    def num_bytes(self) -> float:
        return self._wider * max(self._fewest_bytes, min(self._open_bytes, 2 * self._busy_bytes))

    @property
    def _fewest_bytes(self) -> int:
        return self._fewest_pushes * self._largest_bytes

    @property
    def _busy_bytes(self) -> float:
        return self._rate * self._shortest_s if self._rate else 0.0  # no trip yet: 0 times infinity

    @property
    def patience_s(self) -> float:
        """Nothing back for so long is a stall."""
        return FIRST_STALL_S if math.isinf(self._shortest_s) else max(STALL_S, STALL_TRIPS * self._shortest_s)

    def begin(self) -> None:
        self._largest_bytes = 0
        self._first_came, self._came_bytes = None, 0
        self._shortest_s *= FORGETTING
        self._rate = max(self._rate / FORGETTING, self._round_rate)
        self._round_rate = 0.0
        self._open_bytes = self._busy_bytes
        self._calm_rounds = 0 if self._stalled else self._calm_rounds + 1
        self._stalled = False
        if self._wider > 1 and self._calm_rounds >= self._needed_calm:
            self._wider, self._calm_rounds = self._wider // 2, 0

    def sent(self, num_bytes: int) -> None:
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def came_back(self, num_bytes: int, *, began: float, now: float) -> None:
        """A push that had its turn at `began` has come back."""
        self._shortest_s = min(self._shortest_s, now - began)
        self._open_bytes = max(self._open_bytes, self._fewest_bytes) + num_bytes
        if self._first_came is None:
            self._first_came = now
            return
        self._came_bytes += num_bytes
        if now > self._first_came:
            self._round_rate = self._came_bytes / (now - self._first_came)

    def stall(self) -> None:
        """All that is out waits: for a slow worker, or for one that pushes in another order and waits for us. Waiting
        on may be in vain, so the window is widened."""
        self._wider *= 2
        if not self._stalled:
            self._stalled = True
            self._needed_calm = min(2 * self._needed_calm, LAST_CALM_ROUNDS)


class AdmissionQueue(Generic[T]):
    """Items that wait for room, in order. Call `release` whenever there may be more room."""

    def __init__(self, fits: Callable[[T], bool], go: Callable[[T], object]) -> None:
        self.queue: deque[T] = deque()
        self._fits = fits
        self._go = go
        self._releasing = False
        """Set while items go. If one ends at once, and makes room, the loop that is running sends those behind it: a
        call inside each call could nest deeper than Python allows."""

    def release(self) -> None:
        if self._releasing:
            return
        self._releasing = True
        try:
            while self.queue and self._fits(self.queue[0]):
                self._go(self.queue.popleft())
        finally:
            self._releasing = False


Send = Callable[[Transfer, Future], None]
"""Sends a frame; the future is told what becomes of it."""


class FramesInFlight:
    """One worker's pushed frames that are sent and not acknowledged. Used on the store's loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_shards: int) -> None:
        self._loop = loop
        self._window = Window(max(FEWEST_PUSHES, num_shards))
        self._waiting = AdmissionQueue(self._fits, self._send)
        self._num_bytes = 0
        """Payload bytes in flight."""

    @property
    def is_empty(self) -> bool:
        return not self._num_bytes

    def begin(self) -> None:
        """Begins a round."""
        self._window.begin()

    async def push(self, send: Send, transfers: Iterable[Transfer]) -> list[asyncio.Future[Any]]:
        """Queues frames, and waits until each was acknowledged or failed. Interrupted, it sends no more of them."""
        frames = list(transfers)
        futures: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in frames]
        self.queue(send, frames, futures)
        try:
            for future in futures:
                await asyncio.wait((future,))
        finally:
            for future in futures:
                future.cancel()
        return futures

    def queue(self, send: Send, transfers: Iterable[Transfer], futures: Iterable[Future]) -> None:
        """Sends frames one by one, after those of earlier calls; the futures are told of the acknowledgements."""
        for transfer, future in zip(transfers, futures, strict=True):
            frame = PushedFrame(self, transfer, future, send)
            self._window.sent(frame.num_bytes)
            self._waiting.queue.append(frame)
        self._waiting.release()

    def _fits(self, frame: PushedFrame) -> bool:
        return self.is_empty or self._num_bytes + frame.num_bytes <= self._window.num_bytes

    def _send(self, frame: PushedFrame) -> None:
        if not frame.future.done():
            self._num_bytes += frame.num_bytes
            frame.began = self._loop.time()
            frame.send(frame.transfer, frame)

    def ended(self, frame: PushedFrame, *, acknowledged: bool) -> None:
        """Notes that a frame is no longer in flight: it was acknowledged, or failed."""
        self._num_bytes -= frame.num_bytes
        if acknowledged:
            self._window.came_back(frame.num_bytes, began=frame.began, now=self._loop.time())
        self._waiting.release()


class PushedFrame:
    """A frame that waits for its turn, or is in flight. Its session tells it, as a future, what becomes of it."""

    __slots__ = ("_frames", "_over", "began", "future", "num_bytes", "send", "transfer")

    def __init__(self, frames: FramesInFlight, transfer: Transfer, future: Future, send: Send) -> None:
        """`future`: the pusher's. If it is done before the frame's turn, the frame is not sent."""
        self.transfer = transfer
        self.num_bytes: int = transfer.table.payload_bytes
        self.future = future
        self.send = send
        self.began = 0.0
        """When the frame was sent."""
        self._frames = frames
        self._over = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.future.__await__()

    def done(self) -> bool:
        """False while the frame is in flight, even if nobody waits for it any more."""
        return self._over

    def cancel(self) -> None:
        """Does nothing to a frame that is in flight."""
        self.future.cancel()

    def cancelled(self) -> bool:
        return self.future.cancelled()

    def set_result(self, result: Any, /) -> None:
        self._over = True
        self._frames.ended(self, acknowledged=True)
        if not self.future.done():
            self.future.set_result(result)

    def set_exception(self, error: BaseException, /) -> None:
        self._over = True
        self._frames.ended(self, acknowledged=False)
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False)
class Trip:
    """A push, from its turn until all of it has come back."""

    began: float
    num_bytes: int
    missing: int
    """Tensors that have not come back."""


@dataclass(eq=False)
class QueuedPush:
    """A push whose turn has not come."""

    tensors: Sequence[Tensor]
    num_bytes: int
    go: Callable[[], bool]
    """Called when the turn has come. False: the caller was interrupted, and will not push."""
    reads: list[Callable[[], object]] = field(default_factory=list)
    """Reads of some of these tensors. They go in front of the push, whose bytes would be in their way."""


@dataclass(frozen=True)
class Out:
    """A tensor that was pushed and has not come back."""

    num_bytes: int
    trip: Trip


class Pace:
    """Decides when one worker's pushes go. Used on the store's loop only, while a round `is_on`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_shards: int) -> None:
        self.is_on = False
        """True while a round is under way that was committed early."""
        self.flight = FramesInFlight(loop, num_shards)
        """Frames of the pushes whose turn has come."""
        self._loop = loop
        self._deadline_timer = DeadlineTimer(loop, next_wake=self._next_wake, tick=self._tick)
        self._window = Window()
        self._round = 0
        self._waiting = AdmissionQueue(self._fits, self._go)
        self._out: dict[int, Out] = {}
        """What was pushed and has not come back, by tensor id."""
        self._read: set[int] = set()
        """Ids of the tensors that are being read."""
        self._ahead_bytes = 0
        """Bytes of the tensors that are both out and being read."""
        self._moved_at = 0.0
        """When the queue began, or something came back last."""

    def begin(self, round: int) -> None:
        """Begins a round, which is being committed. Does nothing if it has begun: a commit may be tried again."""
        if self._round != round:
            self._round = round
            self.is_on = True
            self._out.clear()
            self._ahead_bytes = 0
            self._window.begin()
            self.flight.begin()

    def end(self) -> None:
        """Ends the round: all workers have pushed all."""
        self.is_on = False

    async def turn(self, tensors: Sequence[Tensor]) -> None:
        """Returns when these may be pushed: in the order of the calls."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self.queue(tensors, partial(_tell, turn))
        await turn

    def queue(self, tensors: Sequence[Tensor], go: Callable[[], bool]) -> None:
        """Calls `go` when these may be pushed; it returns whether they are."""
        waiting = QueuedPush(tensors, sum(map(_num_bytes, tensors)), go)
        self._window.sent(waiting.num_bytes)
        if not self._waiting.queue:
            self._moved_at = self._loop.time()
        self._waiting.queue.append(waiting)
        self._release()

    @contextmanager
    def reading(self, ids: frozenset[int]) -> Iterator[asyncio.Future[None]]:
        """Wraps a read of these tensors. Yields a future that is done when the read may go."""
        turn: asyncio.Future[None] = self._loop.create_future()
        ids = self.begin_read(ids, partial(_tell, turn))
        try:
            yield turn
        finally:
            self.end_read(ids)

    def begin_read(self, ids: frozenset[int], go: Callable[[], object]) -> frozenset[int]:
        """Begins a read of these tensors. Calls `go` when none of their pushes waits for its turn: asked for sooner,
        they would not come sooner, and to ask takes its part of the links. Returns the ids for `end_read`."""
        begun = ids - self._read
        self._read |= begun
        self._ahead_bytes += sum(self._out[one].num_bytes for one in begun & self._out.keys())
        for waiting in reversed(self._waiting.queue):
            if not ids.isdisjoint(tensor.id for tensor in waiting.tensors):
                waiting.reads.append(go)
                return begun
        go()
        return begun

    def end_read(self, ids: frozenset[int]) -> None:
        """Ends the read of tensors that have come back, or never will."""
        self._read -= ids
        for one in ids & self._out.keys():
            self._came_back(self._out.pop(one))
        self._moved_at = self._loop.time()
        self._release()

    # ---- how ----

    def _came_back(self, out: Out) -> None:
        self._ahead_bytes -= out.num_bytes
        out.trip.missing -= 1
        if not out.trip.missing:
            self._window.came_back(out.trip.num_bytes, began=out.trip.began, now=self._loop.time())

    def _release(self) -> None:
        self._waiting.release()
        self._deadline_timer.update()

    def _fits(self, waiting: QueuedPush) -> bool:
        return not self._ahead_bytes or self._ahead_bytes + waiting.num_bytes <= self._window.num_bytes

    def _go(self, waiting: QueuedPush) -> None:
        for read in waiting.reads:
            read()
        if not waiting.go():
            return
        trip = Trip(self._loop.time(), waiting.num_bytes, missing=len(waiting.tensors))
        for tensor in waiting.tensors:
            if tensor.id in self._read and tensor.id not in self._out:
                self._ahead_bytes += _num_bytes(tensor)
            self._out[tensor.id] = Out(_num_bytes(tensor), trip)

    # ---- time ----

    def _next_wake(self) -> float | None:
        return self._moved_at + self._window.patience_s if self._waiting.queue else None

    def _tick(self, now: float) -> None:
        wake = self._next_wake()
        if wake is not None and now >= wake:
            self._window.stall()
            self._moved_at = now
            self._release()


def _tell(turn: asyncio.Future[Any]) -> bool:
    """Ends a wait. False: the waiting call was interrupted."""
    if turn.done():
        return False
    turn.set_result(None)
    return True


def _num_bytes(tensor: Tensor) -> int:
    return tensor.spec.num_elems * ITEM_BYTES[tensor.spec.dtype]
