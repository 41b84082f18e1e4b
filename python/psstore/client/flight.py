"""In a round that was committed early, frames go to all shards in one order, and few are on their way at a time.

What is pushed together is spread over the shards, and comes back when each of them has its part. TCP divides a link
unevenly among its connections, so that one shard would have more than it has a use for and another less: values come
late then, and when all is pushed at last the links back are still to be used. With a window on what is not
acknowledged, the connection that is ahead waits until the one that has the next frame can take it. Nor do
acknowledgements and requests stand in long queues then (docs/performance.md, Training).

There is a frame for each shard, or more: with fewer some shards have nothing to receive. Eight workers and eight shards
took 1.39 times what their links need with 4 frames on their way, and 1.07 with 8; four shards 1.08 with 4, and 1.21
with 8, more than the queues in front of the links hold (`python -m bench.scaling`; plain sockets 1.09 to 1.14).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from psstore.client.admission_queue import AdmissionQueue
from psstore.client.window import FEWEST_PUSHES, Window
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Future

Send = Callable[[Transfer, Future], None]
"""Sends a frame, and has the future told what becomes of it."""


class QueuedFrame(NamedTuple):
    """A frame that was not sent."""

    transfer: Transfer
    future: Future
    """The pusher's future. If it is done before the frame's turn, the frame is not sent."""
    send: Send


class Flight:
    """One worker's pushed frames that were not acknowledged. Used on the store's loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_shards: int) -> None:
        self._loop = loop
        self._window = Window(max(FEWEST_PUSHES, num_shards))
        self._turns = AdmissionQueue(self._fits, self._send)
        self._out_bytes = 0
        """Not acknowledged."""

    @property
    def is_empty(self) -> bool:
        return not self._out_bytes

    def begin(self) -> None:
        """A round."""
        self._window.begin()

    async def push(self, send: Send, transfers: Iterable[Transfer]) -> list[asyncio.Future[Any]]:
        """`queue`, and waits for what becomes of them all. Interrupted, it sends no more of them."""
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
        """Sends them one by one, after those of earlier calls; the futures are told of the acknowledgements."""
        for transfer, future in zip(transfers, futures, strict=True):
            self._window.sent(transfer.table.payload_bytes)
            self._turns.queue.append(QueuedFrame(transfer, future, send))
        self._turns.release()

    # ---- how ----

    def _fits(self, waiting: QueuedFrame) -> bool:
        num_bytes = waiting.transfer.table.payload_bytes
        return self.is_empty or self._out_bytes + num_bytes <= self._window.num_bytes

    def _send(self, waiting: QueuedFrame) -> None:
        if not waiting.future.done():
            num_bytes = waiting.transfer.table.payload_bytes
            self._out_bytes += num_bytes
            waiting.send(waiting.transfer, _Flown(self, waiting.future, num_bytes, self._loop.time()))

    def landed(self, num_bytes: int, *, began: float, came: bool) -> None:
        """A frame that was sent then: it was acknowledged, or failed."""
        self._out_bytes -= num_bytes
        if came:
            self._window.came_back(num_bytes, began=began, now=self._loop.time())
        self._turns.release()


class _Flown:
    """What its session tells of a frame, for the flight and for who pushed it."""

    __slots__ = ("_began", "_flight", "_future", "_num_bytes", "_over")

    def __init__(self, flight: Flight, future: Future, num_bytes: int, began: float) -> None:
        self._flight = flight
        self._future = future
        self._num_bytes = num_bytes
        self._began = began
        self._over = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._future.__await__()

    def done(self) -> bool:
        """Even if nobody waits for it any more, it is on its way."""
        return self._over

    def set_result(self, result: Any, /) -> None:
        self._over = True
        self._flight.landed(self._num_bytes, began=self._began, came=True)
        if not self._future.done():
            self._future.set_result(result)

    def set_exception(self, error: BaseException, /) -> None:
        self._over = True
        self._flight.landed(self._num_bytes, began=self._began, came=False)
        if not self._future.done():
            self._future.set_exception(error)
