"""Gives a sans-IO machine its time: calls it when it wants to be called."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """Calls `tick(now)` when `next_wake()` is reached. Call `update` after every event of the machine."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        next_wake: Callable[[], float | None],
        tick: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._next_wake = next_wake
        self._tick = tick
        self._timer: asyncio.Handle | None = None
        self._rings_at = math.inf
        """When the timer rings. Not every timer can tell: uvloop's are mere handles if their time has come already."""

    def update(self) -> None:
        """Rings no later than the machine wants; too early does no harm, so a later wish is left for then."""
        wake = self._next_wake()
        if wake is None or wake == math.inf:
            return
        if self._timer is None or wake < self._rings_at:
            self.cancel()
            self._timer = self._loop.call_at(wake, self._ring)
            self._rings_at = wake

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._tick(self._loop.time())
        self.update()
