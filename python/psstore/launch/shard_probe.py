"""Asks one process of a shard how it is, whether it leads or stands by."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

from psstore.config import Credentials
from psstore.errors import PsstoreError
from psstore.net.asking import counters, tie
from psstore.net.client import Reconnector
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.states import LinkState
from psstore.types import Consistency

LOOK_S = 2.0
"""How often a shard is asked."""

HANGS_S = 10.0
"""A shard that was there and answers nothing for so long hangs: no step, no restart and no collection of garbage takes
so long."""

ANSWER_S = 60.0
"""After which the question is put again, on another connection."""


class ToldCounters(NamedTuple):
    """What a shard told."""

    at_s: float
    took_s: float
    counters: Mapping[str, int | float | str]


class ShardProbe:
    """One shard, as it last answered. Any thread may look at it; `run` is a task of an event loop."""

    def __init__(self, shard: int, address: str, *, credentials: Credentials, clock: Callable[[], float]) -> None:
        """`clock`: seconds that only grow."""
        self.shard = shard
        self.address = address
        self.answers: tuple[ToldCounters, ...] = ()
        """Its last two, the older one first, or as many as there are."""
        self._failure = ""
        self._reconnector: Reconnector | None = None
        self._identity = ClientIdentity(client=secrets.token_hex(16), role="operator", credentials=credentials)
        self._clock = clock
        self._answered_at = clock()

    @property
    def counters(self) -> Mapping[str, int | float | str] | None:
        """What it told last; None: it has not been reached."""
        answers = self.answers
        return answers[-1].counters if answers else None

    @property
    def consistency(self) -> Consistency | None:
        """The store's, as the shard says it to whom it is connected with."""
        reconnector = self._reconnector
        welcome = None if reconnector is None else reconnector.session.welcome
        return None if welcome is None else welcome.consistency

    def silent_s(self) -> float:
        """For how long it has answered nothing."""
        return max(0.0, self._clock() - self._answered_at)

    @property
    def trouble(self) -> str:
        """Why it can't be reached, as far as is known."""
        reconnector = self._reconnector
        if reconnector is None or reconnector.session.state is LinkState.UP:
            return self._failure
        return self._failure or str(reconnector.trouble or "")

    @property
    def is_refused(self) -> bool:
        """Nobody listens there: its process has ended, or has not begun to serve."""
        reconnector = self._reconnector
        if reconnector is None or reconnector.session.state is LinkState.UP:
            return False
        return isinstance(reconnector.trouble, (ConnectionRefusedError, FileNotFoundError))

    def hangs(self) -> bool:
        """Whether it runs and answers nothing, as far as can be told from here."""
        return self.counters is not None and not self.is_refused and self.silent_s() > HANGS_S

    async def run(self) -> None:
        """Asks until it is cancelled, in whatever life of the store."""
        while True:
            self._reconnector = tie(self._identity, self.address, shard=self.shard)
            try:
                await self._ask(self._reconnector)
            except PsstoreError as error:
                self._failure = error.message
            finally:
                await self._reconnector.close()
            await asyncio.sleep(LOOK_S)

    async def _ask(self, reconnector: Reconnector) -> None:
        """Raises PsstoreError if the shard is another one, or not to be reached."""
        while True:
            began = self._clock()
            told = await counters(reconnector, timeout_s=ANSWER_S)
            self._answered_at, self._failure = self._clock(), ""
            self.answers = (*self.answers[-1:], ToldCounters(self._answered_at, self._answered_at - began, told))
            await asyncio.sleep(LOOK_S)
