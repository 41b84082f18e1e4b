"""Asks one shard how it is, over a connection of its own: what others ask there does not matter to it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping

from psstore.errors import PsstoreError
from psstore.net.address import parse_address
from psstore.net.client import QuietFuture, Reconnector
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.session import Session
from psstore.protocol.states import LinkState
from psstore.wire.messages import Statistics, Welcome

LOOK_S = 2.0
"""How often a shard is asked."""

HANGS_S = 10.0
"""A shard that was there and answers nothing for so long hangs: no step, no restart and no collection of garbage takes
so long."""

ANSWER_S = 60.0
"""After which the question is put again, on another connection."""


class ShardProbe:
    """One shard, as it last answered. Any thread may look at it; `run` is a task of an event loop."""

    def __init__(self, shard: int, address: str, *, token: bytes | None, clock: Callable[[], float]) -> None:
        """`clock`: seconds that only grow."""
        self.shard = shard
        self.address = address
        self.counters: Mapping[str, int | float | str] | None = None
        """What it told; None: it has not been reached."""
        self.answer_s = 0.0
        """How long its last answer took."""
        self._failure = ""
        self._reconnector: Reconnector | None = None
        self._identity = ClientIdentity(client=secrets.token_hex(16), role="client", token=token)
        self._clock = clock
        self._answered_at = clock()

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
            self.counters = await ask(reconnector, timeout_s=ANSWER_S)
            self._answered_at = self._clock()
            self.answer_s, self._failure = self._answered_at - began, ""
            await asyncio.sleep(LOOK_S)


def tie(identity: ClientIdentity, address: str, *, shard: int = 0, patience_s: float = math.inf) -> Reconnector:
    """Connects to a shard, which `close` ends. To be called on an event loop."""
    session = Session(
        identity=identity,
        decisions=DecisionCache(),
        make_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        address=address,
        shard=shard,
    )
    loop = asyncio.get_running_loop()
    reconnector = Reconnector(session, [parse_address(address)], loop=loop, patience_s=patience_s)
    reconnector.start()
    return reconnector


async def ask(reconnector: Reconnector, *, timeout_s: float) -> Mapping[str, int | float | str]:
    """The shard's counters. Raises PsstoreError."""
    loop = asyncio.get_running_loop()
    answer = QuietFuture(loop=loop)
    reconnector.session.request("STATS", answer, now=loop.time(), timeout_s=timeout_s)
    reconnector.flush()
    reply = await answer
    assert isinstance(reply, Statistics)
    return reply.counters


async def greet(identity: ClientIdentity, address: str, *, patience_s: float) -> Welcome:
    """What a shard says of its store to who knows its token. Raises StoreUnreachable, AuthFailed, ProtocolError."""
    reconnector = tie(identity, address, patience_s=patience_s)
    try:
        await asyncio.shield(reconnector.first_up)
    finally:
        await reconnector.close()
    welcome = reconnector.session.welcome
    assert welcome is not None, "it was up"
    return welcome
