"""Says in the log whom a worker waits for, while it waits: a training that stands still should not look like one that
hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref

from psstore.errors import PsstoreError
from psstore.protocol.client import Client

FIRST_NOTICE_S = 10.0
"""A wait so long is told of. Each further notice comes when it is twice as long as at the last one."""

_log = logging.getLogger("psstore.client")


class WaitNotices:
    """Looks from time to time whether the client waits for other workers, as long as it does now and then."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = weakref.ref(client)
        """Weak: it is held by the client, and by a timer for some seconds more."""
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._since: float | None = None
        """When the wait began of which `_next_s` is the next notice."""
        self._next_s = FIRST_NOTICE_S
        client.worker.on_wait = self._begun

    def _begun(self) -> None:
        """Called before each wait: a timer for each would cost more than most of them."""
        if self._timer is None:
            self._timer = self._loop.call_later(FIRST_NOTICE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        client = self._client()
        since = None if client is None else client.worker.waits_since
        if client is None or since is None:
            return
        if since != self._since:
            self._since, self._next_s = since, FIRST_NOTICE_S
        waited_s = self._loop.time() - since
        if waited_s >= self._next_s:
            self._task = self._loop.create_task(self._tell(client, since))
            self._next_s = 2.0 * waited_s
        self._timer = self._loop.call_later(self._next_s - waited_s, self._look)

    async def _tell(self, client: Client, since: float) -> None:
        with contextlib.suppress(PsstoreError):  # whoever waits hears of it
            who = await client.waited_for()
            if who and client.worker.waits_since == since:
                waited_s = self._loop.time() - since
                _log.warning("rank %d has waited %.0f s so far for %s", client.identity.rank, waited_s, who)
