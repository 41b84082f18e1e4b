"""Asks one process of a shard how it is, whether it leads or stands by."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping

from psstore.errors import PsstoreError
from psstore.net.asking import counters, tie
from psstore.net.client import Reconnector
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.states import LinkState

LOOK_S = 1.0
"""How often a shard is asked."""

HANGS_S = 10.0
"""A shard that was there and answers nothing for so long hangs: no step, no restart and no collection of garbage takes
so long."""

ANSWER_S = 60.0
"""After which the question is put again, on another connection."""


class ShardProbe:
    """One shard, as it last answered. Any thread may look at it; `run` is a task of an event loop."""

    def __init__(self, shard: int | None, address: str, *, token: bytes | None, clock: Callable[[], float]) -> None:
        """`shard`: its index; None: whichever is there. `clock`: the loop's time."""
        self.shard = shard
        self.address = address
        self.counters: Mapping[str, int | float | str] | None = None
        """What it told; None: it has not been reached."""
        self.answer_s = 0.0
        """How long its last answer took."""
        self.trouble = "it has not been asked yet"
        """Why it was not reached, if it was not."""
        self.is_refused = False
        """Nobody listens there: its process has ended, or has not begun to serve."""
        self._identity = ClientIdentity(client=secrets.token_hex(16), role="operator", token=token)
        self._clock = clock
        self._answered_at = clock()

    def silent_s(self) -> float:
        """For how long it has answered nothing."""
        return max(0.0, self._clock() - self._answered_at)

    def hangs(self) -> bool:
        """Whether it runs and answers nothing, as far as can be told from here."""
        return self.counters is not None and not self.is_refused and self.silent_s() > HANGS_S

    async def run(self) -> None:
        """Asks until it is cancelled, in whatever life of the store."""
        while True:
            reconnector = tie(self._identity, self.address, shard=self.shard or 0)
            watching = asyncio.ensure_future(self._watch_connection(reconnector))
            try:
                await self._ask(reconnector)
            except PsstoreError as error:
                self.trouble = error.message
            finally:
                watching.cancel()
                await reconnector.close()
            await asyncio.sleep(LOOK_S)

    async def _ask(self, reconnector: Reconnector) -> None:
        """Raises PsstoreError if the shard is another one, or not to be reached."""
        while True:
            began = self._clock()
            self.counters = await counters(reconnector, timeout_s=ANSWER_S)
            self._answered_at = self._clock()
            self.answer_s, self.trouble = self._answered_at - began, ""
            await asyncio.sleep(LOOK_S)

    async def _watch_connection(self, reconnector: Reconnector) -> None:
        while True:
            is_up = reconnector.session.state is LinkState.UP
            self.is_refused = not is_up and isinstance(reconnector.trouble, (ConnectionRefusedError, FileNotFoundError))
            if not is_up and reconnector.trouble is not None:
                self.trouble = str(reconnector.trouble)
            await asyncio.sleep(LOOK_S / 2)
