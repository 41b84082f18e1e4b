"""The other process of a shard, on another host: how it is, and the word that it is to lead. Both block."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from psstore.net.address import parse_address
from psstore.net.client import QuietFuture, Reconnector
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.session import Session
from psstore.wire import messages as m

LOOK_S = 2.0
"""How long it may take to answer."""


class FoundMember(NamedTuple):
    """What a process of a shard says of itself."""

    welcome: m.Welcome
    counters: Mapping[str, int | float | str]

    @property
    def leads(self) -> bool:
        return bool(self.counters["leads"])

    @property
    def may_lead(self) -> bool:
        """Whether it leads, or is a standby that has all that anybody was told."""
        return bool(self.counters["may_lead"])


def look_at(address: str, token: bytes | None, *, timeout_s: float = LOOK_S) -> FoundMember:
    """Raises StoreUnreachable, AuthFailed, DeadlineExceeded."""
    welcome, reply = asyncio.run(_ask(address, token, "STATS", None, timeout_s))
    assert isinstance(reply, m.Statistics)
    return FoundMember(welcome, reply.counters)


def promote(address: str, token: bytes | None, *, force: bool = False, timeout_s: float = LOOK_S) -> None:
    """Says there that the other process of the shard is dead: a standby leads from now on, and a leader does without
    the standby that it has lost. REQUIRES: it is. Raises BadArgument if it can't lead, and as `look_at`.

    `force`: although the two are connected."""
    asyncio.run(_ask(address, token, "PROMOTE", m.Promote(force=force), timeout_s))


async def _ask(
    address: str, token: bytes | None, op: str, body: m.Message | None, timeout_s: float
) -> tuple[m.Welcome, object]:
    session = Session(
        identity=ClientIdentity(client=secrets.token_hex(16), role="operator", token=token),
        decisions=DecisionCache(),
        make_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        address=address,
    )
    loop = asyncio.get_running_loop()
    reconnector = Reconnector(session, [parse_address(address)], loop=loop, patience_s=timeout_s)
    reconnector.start()
    try:
        await asyncio.shield(reconnector.first_up)
        answer = QuietFuture(loop=loop)
        session.request(op, answer, body=body, now=loop.time(), timeout_s=timeout_s)
        reconnector.flush()
        reply = await answer
    finally:
        await reconnector.close()
    assert session.welcome is not None, "it has answered"
    return session.welcome, reply
