"""A standby follows its shard until it is to lead, or to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from psstore import _core
from psstore.config import Credentials
from psstore.errors import ShuttingDown, StoreUnreachable
from psstore.net.address import TcpAddress, UnixAddress, parse_address
from psstore.net.certificates import Certificates
from psstore.net.names import current_host
from psstore.net.server import Server
from psstore.protocol.connection import FEATURE_CHECKSUM
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.service import ShardService
from psstore.server.orders import Orders, report
from psstore.server.pipe_words import CUT, IN_SYNC, OVER
from psstore.server.shard_settings import Follows, ShardSettings

RETIRE_S = 1.0
"""How long a standby that ends waits until its shard has heard so."""

CONNECT_S = 5.0
"""How long a standby tries to connect to its shard: two lost SYNs, and a slow answer."""


async def stand_by(
    settings: ShardSettings,
    follows: Follows,
    server: Server,
    service: ShardService,
    orders: Orders,
    stopped: asyncio.Event,
    sockets: Sequence[socket.socket],
) -> bool:
    """Follows the shard until this process is to lead. False: it has ended before. Raises PsstoreError, OSError."""
    failed, cut, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    why: list[Exception] = []

    def lost(error: Exception | None) -> None:
        if error is not None:
            why.append(error)
        standby = service.leadership.standby
        assert standby is not None, "it follows"
        standby.is_cut = True
        cut.set()
        # The shard may be dead, or says that it ends: this one leads.
        if standby.may_lead and (error is None or isinstance(error, (OSError, ShuttingDown))):
            if follows.place and isinstance(error, ShuttingDown) and not over.is_set():
                orders.lead.set()  # it refuses whatever is asked from then on; who watches it may be dead
            elif follows.place:  # who watches both knows anyhow
                report(CUT, f"{max(0.0, standby.may_ask_at - server.now()):.3f}")
        else:
            failed.set()

    def store_ends(reason: str) -> None:
        over.set()
        report(OVER, reason)

    server.leader.on_lost = lost
    sock, tls = _connect(follows.address, settings.credentials)
    client = ClientIdentity(
        client=follows.client,
        role="standby",
        credentials=settings.credentials,
        features=FEATURE_CHECKSUM if follows.place else 0,
    )
    server.leader.follow(sock, client=client, address=follows.address, place=follows.place, tls=tls)
    if follows.place:
        assert service.leadership.standby is not None, "it follows"
        service.leadership.standby.on_in_sync = lambda: report(IN_SYNC)
        service.leadership.standby.on_over = store_ends
        service.leadership.standby.on_silent = server.leader.lose
        service.leadership.on_promoted = orders.lead.set
        for own in sockets:
            server.listen(own)
    waits = [asyncio.ensure_future(event.wait()) for event in (orders.lead, stopped, failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stopped.is_set():
        if server.leader.retire():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(cut.wait(), RETIRE_S)
        return False
    if not orders.lead.is_set():
        raise (
            why[0] if why else StoreUnreachable(f"the shard at {follows.address} is gone, and this has not all it had")
        )
    server.lead()
    return True


def _connect(place: str, credentials: Credentials) -> tuple[socket.socket, _core.TlsSession | None]:
    """A socket that is connected to the shard there, and how what goes over it is encrypted. Raises StoreUnreachable,
    TlsFailed, BadArgument."""
    address = parse_address(place)
    try:
        if isinstance(address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.path)
        else:
            sock = socket.create_connection((current_host(address.host), address.port), timeout=CONNECT_S)
    except OSError as error:
        raise StoreUnreachable(f"no connection to the shard at {place}: {error}") from error
    tls = None
    if isinstance(address, TcpAddress) and address.tls:
        tls = Certificates(credentials, server=False).session(address.name or address.host)
    sock.setblocking(False)
    return sock, tls
