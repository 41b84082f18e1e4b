"""Asks one process of a store something, over a connection of its own: what others ask there does not matter to it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping

from psstore.net.address import parse_address
from psstore.net.client import QuietFuture, Reconnector
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.session import Session
from psstore.wire import messages as m


def tie(
    identity: ClientIdentity,
    address: str,
    *,
    shard: int = 0,
    patience_s: float = math.inf,
    max_segment_bytes: int | None = None,
) -> Reconnector:
    """Connects to a process, which `close` ends. To be called on an event loop. `max_segment_bytes`: of TCP, each way;
    None: as large as the way is thought to allow."""
    session = Session(
        identity=identity,
        decisions=DecisionCache(),
        make_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        address=address,
        shard=shard,
    )
    loop = asyncio.get_running_loop()
    reconnector = Reconnector(
        session, [parse_address(address)], loop=loop, patience_s=patience_s, max_segment_bytes=max_segment_bytes
    )
    reconnector.start()
    return reconnector


async def ask(reconnector: Reconnector, op: str, body: m.Message | None = None, *, timeout_s: float) -> object:
    """The answer. Raises PsstoreError."""
    loop = asyncio.get_running_loop()
    answer = QuietFuture(loop=loop)
    reconnector.session.request(op, answer, body=body, now=loop.time(), timeout_s=timeout_s)
    reconnector.flush()
    return await answer


async def counters(reconnector: Reconnector, *, timeout_s: float, padding: str = "") -> Mapping[str, int | float | str]:
    """What STATS tells of the process. `padding`: travels there and back. Raises PsstoreError."""
    body = m.Stats(padding=padding) if padding else None
    reply = await ask(reconnector, "STATS", body, timeout_s=timeout_s)
    assert isinstance(reply, m.Statistics)
    return reply.counters


async def greet(identity: ClientIdentity, address: str, *, patience_s: float) -> m.Welcome:
    """What a process says of its store to who knows its token. Raises StoreUnreachable, AuthFailed, ProtocolError."""
    reconnector = tie(identity, address, patience_s=patience_s)
    try:
        return await greeted(reconnector)
    finally:
        await reconnector.close()


async def greeted(reconnector: Reconnector) -> m.Welcome:
    """As `greet`, over that connection."""
    await asyncio.shield(reconnector.first_up)
    welcome = reconnector.session.welcome
    assert welcome is not None, "it was up"
    return welcome
