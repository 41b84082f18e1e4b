"""In a round that was committed early, a push waits while too much of what was pushed before has not come back.

A slice takes its step when its last contribution arrives. Where workers share a link to a shard, TCP gives some of them
more of it than others, and what the fast ones are ahead is of no use to anybody: values come back at the pace of the
slowest, and when all is pushed at last the links back are still to be used. Who waits for what has come back is ahead
by a window at most, and leaves the link to the others. Eight workers and two shards took 1.7 times what the links need
without it, and 1.1 with it (`python -m bench.scaling`).

Only what is being read counts, as nothing else can come back. Nobody waits for ever: a window in which nothing moves
opens (window.py), so that workers may push in different orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psstore.client.admission_queue import AdmissionQueue
from psstore.client.flight import Flight
from psstore.client.window import Window
from psstore.net.deadline_timer import DeadlineTimer
from psstore.types import ITEM_BYTES, Tensor


@dataclass(eq=False)
class Trip:
    """A push, from its turn until all of it has come back."""

    began: float
    num_bytes: int
    missing: int
    """Tensors."""


@dataclass(eq=False)
class QueuedPush:
    """A push whose turn has not come."""

    tensors: Sequence[Tensor]
    num_bytes: int
    go: Callable[[], bool]
    """Called when it has come. False: who waited was interrupted, and will not push."""
    reads: list[Callable[[], object]] = field(default_factory=list)
    """What reads some of these tensors, and goes in front of the push: its bytes would be in the way."""


@dataclass(frozen=True)
class Out:
    """A tensor that was pushed and has not come back."""

    num_bytes: int
    trip: Trip


class Pace:
    """Decides when one worker's pushes go. Used on the store's loop only, while a round `is_on`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_shards: int) -> None:
        self.is_on = False
        """A round is under way that was committed early."""
        self.flight = Flight(loop, num_shards)
        """The frames whose turn has come."""
        self._loop = loop
        self._deadline_timer = DeadlineTimer(loop, next_wake=self._next_wake, tick=self._tick)
        self._window = Window()
        self._round = 0
        self._turns = AdmissionQueue(self._fits, self._go)
        self._out: dict[int, Out] = {}
        """By tensor id."""
        self._read: set[int] = set()
        """Ids of what is being read."""
        self._ahead_bytes = 0
        """What is both out and being read."""
        self._moved_at = 0.0
        """When the queue began, or something came back."""

    def begin(self, round: int) -> None:
        """Begins a round, which is being committed: perhaps for the second time."""
        if self._round != round:
            self._round = round
            self.is_on = True
            self._out.clear()
            self._ahead_bytes = 0
            self._window.begin()
            self.flight.begin()

    def end(self) -> None:
        """Everybody has pushed all."""
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
        if not self._turns.queue:
            self._moved_at = self._loop.time()
        self._turns.queue.append(waiting)
        self._release()

    @contextmanager
    def reading(self, ids: frozenset[int]) -> Iterator[asyncio.Future[None]]:
        """Around a read of these tensors. Yields what is done when it may go."""
        turn: asyncio.Future[None] = self._loop.create_future()
        ids = self.begin_read(ids, partial(_tell, turn))
        try:
            yield turn
        finally:
            self.end_read(ids)

    def begin_read(self, ids: frozenset[int], go: Callable[[], object]) -> frozenset[int]:
        """Begins a read of these tensors. Calls `go` when none of their pushes waits for its turn: asked for sooner,
        they would not come sooner, and to ask takes its part of the links. Returns what to end it with."""
        begun = ids - self._read
        self._read |= begun
        self._ahead_bytes += sum(self._out[one].num_bytes for one in begun & self._out.keys())
        for waiting in reversed(self._turns.queue):
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
        self._turns.release()
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
        return self._moved_at + self._window.patience_s if self._turns.queue else None

    def _tick(self, now: float) -> None:
        wake = self._next_wake()
        if wake is not None and now >= wake:
            self._window.stall()
            self._moved_at = now
            self._release()


def _tell(turn: asyncio.Future[Any]) -> bool:
    """False: who waited was interrupted."""
    if turn.done():
        return False
    turn.set_result(None)
    return True


def _num_bytes(tensor: Tensor) -> int:
    return tensor.spec.num_elems * ITEM_BYTES[tensor.spec.dtype]
