"""Opens a store that lives in other processes: asks one shard for the map, then keeps a connection to each.

A worker's heartbeats have a connection of their own, and a native thread that needs neither GIL nor loop: a program
that computes for minutes in one C call is silent on its other connections and must not be taken for dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from psstore import _core
from psstore.client.arguments import Options
from psstore.client.direct import Direct
from psstore.client.flow_control import Pace
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.wait_notices import WaitNotices
from psstore.config import Transport
from psstore.errors import BadArgument, BadSignature, RankTaken, RolledBack, TooManyWorkers
from psstore.net.address import Address, TcpAddress, UnixAddress, is_loopback, parse_address
from psstore.net.client import REFUSED_S, Reconnector, SocketDriver, has_two_hosts
from psstore.net.client_connection import ClientConnection
from psstore.net.fd_client import borrow
from psstore.net.user_token import find
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.client import Client
from psstore.protocol.connection import FEATURE_CHECKSUM
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.keepalive import MIN_LOOK_S, Keepalive, look_interval_s
from psstore.protocol.session import Session
from psstore.wire.messages import Welcome

OF_TWO_LIVES = (RolledBack, BadSignature)
"""What one hears who meets some shards before they have gone back to a checkpoint, and others after. Where they do not
start again by themselves that is RolledBack: as somebody has started them again, or with others."""

AGAIN_S = 0.2
"""Between two looks whether all have, or whether a rank is free by now."""

ROOM_AGAIN_S = 1.0
"""Between two looks whether this process has room for what sends heartbeats."""

_log = logging.getLogger("psstore.client")


class Heartbeats:
    """Keeps a heartbeat connection to the coordinator. The loop makes it, `_core.Heartbeat` writes to it."""

    def __init__(
        self, worker: ClientIdentity, welcome: Welcome, addresses: Sequence[Address], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`addresses`: of the coordinator, best first."""
        identity = ClientIdentity(
            client=worker.client,
            role="heartbeat",
            credentials=worker.credentials,
            find_token=worker.find_token,
            found=worker.found,
        )
        session = Session(
            identity=identity,
            decisions=DecisionCache(),
            make_nonce=lambda: secrets.token_bytes(32),
            address=str(addresses[0]),
            welcome=welcome,
        )
        self._frame = _core.encode_frame(_core.OPS["HEARTBEAT"], rank=worker.rank, incarnation=worker.incarnation)
        self._interval_s = welcome.heartbeat_s
        self._beating: _core.Heartbeat | None = None
        self._reconnector = Reconnector(session, addresses, loop=loop, patience_s=math.inf, on_up=self._hand_over)
        self._reconnector.start()

    async def begun(self, patience_s: float) -> None:
        """Waits for the first beat, so that what the program does next may hold the GIL for as long as it likes.

        Without one in that time the worker goes on: its other connections speak for it, and this one is tried again.
        """
        await asyncio.wait([self._reconnector.first_up], timeout=patience_s)

    def renew(self) -> None:
        """Connects anew."""
        self._reconnector.renew()

    def _hand_over(self, connection: ClientConnection, *, again: bool = False) -> None:
        if connection.lost.done():
            return
        self._stop_beating()
        try:
            self._beating = _core.Heartbeat(connection.fileno(), self._frame, self._interval_s, connection.tls)
        except OSError as error:  # no room for its files, or its thread
            if not again:
                _log.warning("no heartbeats are sent for now, which is tried again: %s", error)
            connection.loop.call_later(ROOM_AGAIN_S, partial(self._hand_over, connection, again=True))

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.stop()
            self._beating = None

    async def close(self) -> None:
        self._stop_beating()
        await self._reconnector.close()

    def abandon(self) -> None:
        """Lets go of the socket, in a forked child, without a word."""
        self._stop_beating()
        self._reconnector.abandon()


class Remote:
    """The backend of a store behind sockets: owns its thread, its connections and its heartbeats."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        self.direct: Direct
        self.returns = False
        """The store starts again by itself when a shard of it dies."""
        self.store = ""
        """Its id, once shard 0 has told it."""
        self._driver: SocketDriver | None = None
        self._heartbeats: Heartbeats | None = None

    async def open(self, seeds: Sequence[Address], options: Options) -> Operations:
        """Connects to every shard and, as a worker, joins. Raises StoreUnreachable, AuthFailed, RankTaken, …;
        call `close` then, too."""
        identity = ClientIdentity(
            client=options.client or secrets.token_hex(16),
            role=options.role,
            credentials=options.credentials,
            find_token=find,
        )
        welcome = await self._discover(seeds, identity, options)
        routes = [_usable(addresses, options.transport) for addresses in welcome.addresses]
        identity.features = 0 if all(_is_local(route[0]) for route in routes) else FEATURE_CHECKSUM
        decisions = DecisionCache(len(routes))
        # What stays on this machine has no link to fill; whoever asks for TCP here has a reason.
        num_channels = options.connections if identity.features or options.transport == "tcp" else 1
        sessions = [
            Session(
                identity=identity,
                decisions=decisions,
                make_nonce=_nonce,
                address=str(route[0]),
                shard=shard,
                channel=channel,
                borrow=borrow if options.transport in ("auto", "shm") and channel == 0 else None,
                welcome=welcome if shard == welcome.shard else None,
                # Whoever leads in a silent coordinator's place would take a worker for lost that computes for long.
                is_watched=options.role == "worker" and shard == channel == 0 and has_two_hosts(route),
                keepalive=Keepalive(
                    interval_s=MIN_LOOK_S if has_two_hosts(route) else look_interval_s(options.timeout_s)
                ),
            )
            for channel in range(num_channels)
            for shard, route in enumerate(routes)
        ]
        self.returns = welcome.returns
        # Where shards start again by themselves, an address that refuses may be one of tomorrow.
        refused_s = options.timeout_s if welcome.returns else REFUSED_S
        self._driver = self._tie(sessions, routes * num_channels, options, refused_s=refused_s)
        await asyncio.gather(*[asyncio.shield(one.first_up) for one in self._driver.reconnectors.values()])
        _check_one_life(sessions)
        client = Client(
            driver=self._driver, identity=identity, decisions=decisions, sessions=sessions, timeout_s=options.timeout_s
        )
        client.worker.num_workers = welcome.num_workers
        if options.transport == "shm":
            await client.stats()  # each shard has answered what it was asked before: whether it shares memory
            _check_shares_memory(client.shards)
        coordinator = sessions[0]
        assert coordinator.welcome is not None, "it was up"
        self.store = coordinator.welcome.store
        if options.role == "worker":
            await client.worker.join(
                rank=options.rank, num_workers=options.num_workers, wait_s=options.wait_s, goes_on=options.goes_on
            )
            self._heartbeats = Heartbeats(identity, coordinator.welcome, routes[0], self.thread.loop)
            await self._heartbeats.begun(options.connect_timeout_s)
            WaitNotices(client, self.thread.loop)
        pace = Pace(self.thread.loop, len(client.shards)) if identity.features else None
        operations = Operations(client, wait_s=options.wait_s, pace=pace, over_sockets=True)
        self.direct = Direct(operations, self._driver, self.thread)
        return operations

    def _coordinator_is_up(self, _: ClientConnection) -> None:
        """Over a new connection: the heartbeats' one, which nobody answers, may be to a process that is silent."""
        if self._heartbeats is not None:
            self._heartbeats.renew()

    async def close(self) -> None:
        if self._heartbeats is not None:
            await self._heartbeats.close()
        if self._driver is not None:
            await self._driver.close()

    def release(self) -> None:
        self.thread.stop()

    def abandon(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.abandon()
        if self._driver is not None:
            self._driver.abandon()

    # ---- how ----

    async def _discover(self, seeds: Sequence[Address], identity: ClientIdentity, options: Options) -> Welcome:
        """Asks a shard for the addresses of the whole store."""
        session = Session(identity=identity, decisions=DecisionCache(), make_nonce=_nonce, address=str(seeds[0]))
        reconnector = Reconnector(session, seeds, loop=self.thread.loop, patience_s=options.connect_timeout_s)
        reconnector.start()
        try:
            await asyncio.shield(reconnector.first_up)
        finally:
            await reconnector.close()
        assert session.welcome is not None, "it was up"
        return session.welcome

    def _tie(
        self, sessions: Sequence[Session], routes: Sequence[Sequence[Address]], options: Options, *, refused_s: float
    ) -> SocketDriver:
        reconnectors = [
            Reconnector(
                session,
                route,
                loop=self.thread.loop,
                patience_s=max(options.timeout_s, options.connect_timeout_s),
                refused_s=refused_s,
                congestion_control=options.congestion_control,
                on_up=self._coordinator_is_up if session is sessions[0] else None,
            )
            for session, route in zip(sessions, routes, strict=True)
        ]
        for reconnector in reconnectors:
            reconnector.start()
        return SocketDriver(self.thread.loop, reconnectors, self.thread.calls)


class RankHolder:
    """The worker that has the rank which one asks for (of all ranks: the one silent for longest), as the store sees it.

    A host that crashes closes no connection: its workers count as live until they have been silent for a while, and
    those that are started in their place may ask before. A worker that lives is heard of meanwhile.
    """

    def __init__(self) -> None:
        self._last_seen_s: float = 0.0

    def may_be_gone(self, error: BaseException) -> bool:
        """Whether it has said nothing since its rank was asked for before."""
        if not isinstance(error, RankTaken | TooManyWorkers):
            return False
        last_seen_s = error.details.get("last_seen_s")
        if not isinstance(last_seen_s, int | float) or last_seen_s < self._last_seen_s:
            return False
        self._last_seen_s = last_seen_s
        return True


def open_remote(seeds: Sequence[Address], options: Options) -> tuple[Operations, Remote]:
    """Connects, on a thread of its own. Blocks; a store that is going back to a checkpoint is waited for, and so is a
    rank whose worker may be gone without a word. Raises as `Remote.open`, with nothing left open."""
    began = time.monotonic()
    holder = RankHolder()
    while True:
        thread = LoopThread(busy_s=1e-6 * options.busy_poll_us)
        remote = Remote(thread)
        opening = thread.submit(remote.open(seeds, options))
        try:
            return opening.result(), remote
        except BaseException as error:
            opening.cancel()
            thread.submit(remote.close()).result()
            thread.stop()
            waited_s = time.monotonic() - began
            is_of_two = isinstance(error, OF_TWO_LIVES if remote.returns else RolledBack)
            goes_back = is_of_two and waited_s <= max(options.timeout_s, options.connect_timeout_s)
            if not goes_back and not (holder.may_be_gone(error) and waited_s <= options.wait_s):
                if isinstance(error, RankTaken | TooManyWorkers):
                    error.details["store"] = remote.store
                raise
        time.sleep(AGAIN_S)


def _check_one_life(sessions: Sequence[Session]) -> None:
    """Raises RolledBack if some shards have not gone back yet, and others have. What a shard on a host of its own says
    of its life begins with what shard 0 says."""
    welcomes = [session.welcome for session in sessions if session.welcome is not None]
    first = next(one for one in welcomes if one.shard == 0)
    if any(one.returns and not one.store.startswith(first.store) for one in welcomes):
        raise RolledBack(
            "the store is going back to a checkpoint just now: connect again", version=first.restored, undone=0
        )


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _usable(addresses: Sequence[str], transport: Transport) -> list[Address]:
    """The addresses that can be tried from here, best first: unix sockets that exist on this host, then TCP."""
    unix: list[Address] = []
    tcp: list[Address] = []
    for address in map(parse_address, addresses):
        if isinstance(address, TcpAddress):
            if transport != "unix":
                tcp.append(address)
        elif transport != "tcp" and Path(address.path).is_socket():
            unix.append(address)
    if not unix and not tcp:
        raise BadArgument(
            f"the store can be reached at {', '.join(addresses)} only, and not from this host by transport"
            f" {transport!r}"
        )
    return unix + tcp


def _check_shares_memory(sessions: Sequence[Session]) -> None:
    for session in sessions:
        if not session.shares_memory:
            raise BadArgument(
                f"transport is 'shm', but shard {session.shard} at {session.address} shares no memory with this"
                " process: it is on another machine or in another container, or its system can't; use 'auto'"
            )


def _is_local(address: Address) -> bool:
    """True if no wire lies in between: memory checks its own bits."""
    return isinstance(address, UnixAddress) or is_loopback(address.host)
