"""In a round that was committed early, frames go to all shards in one order, and few are on their way at a time.

What is pushed together is spread over the shards, and comes back when each of them has its part. TCP divides a link
unevenly among its connections, so that one shard would have more than it has a use for and another less: values come
late then, and when all is pushed at last the links back are still to be used. With a window on what is not
acknowledged, the connection that is ahead waits until the one that has the next frame can take it. Nor do
acknowledgements and requests stand in long queues then (docs/performance.md, Training).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from psstore.client.window import Window
from psstore.protocol.client import Transfer, collect

Push = Callable[[Sequence[Transfer]], Awaitable[None]]
"""Sends these, and returns when they are acknowledged."""


class Flight:
    """Of one worker's pushes. Lives on the store's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._window = Window()
        self._order = asyncio.Lock()
        """Whose frames go now: calls have it in their order."""
        self._out_bytes = 0
        """Not acknowledged."""
        self._landed = asyncio.Event()
        """Something was acknowledged since this was cleared."""

    @property
    def is_empty(self) -> bool:
        return not self._out_bytes

    def begin(self) -> None:
        """A round."""
        self._window.begin()

    async def send(self, push: Push, transfers: Iterable[Transfer]) -> None:
        """Pushes them one by one, after those of earlier calls; returns when all are acknowledged."""
        under_way: list[asyncio.Task[None]] = []
        try:
            async with self._order:
                for transfer in transfers:
                    num_bytes = transfer.table.payload_bytes
                    await self._room(num_bytes)
                    self._out_bytes += num_bytes
                    under_way.append(self._loop.create_task(self._push(push, transfer, num_bytes)))
            await collect(under_way)
        finally:
            for one in under_way:
                one.cancel()

    # ---- how ----

    async def _room(self, num_bytes: int) -> None:
        """Returns when there is room for so many bytes, or nothing out that could make any."""
        self._window.sent(num_bytes)
        while not self.is_empty and self._out_bytes + num_bytes > self._window.num_bytes:
            self._landed.clear()
            await self._landed.wait()

    async def _push(self, push: Push, transfer: Transfer, num_bytes: int) -> None:
        began = self._loop.time()
        try:
            await push([transfer])
            self._window.came_back(num_bytes, began=began, now=self._loop.time())
        finally:
            self._out_bytes -= num_bytes
            self._landed.set()
