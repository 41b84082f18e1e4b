"""The client's sockets: keeps each session connected, whatever happens to its connections."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import random
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psstore import _core
from psstore.errors import BadArgument, InternalError, StoreClosed, StoreUnreachable, TlsFailed
from psstore.net.address import Address, TcpAddress
from psstore.net.certificates import Certificates
from psstore.net.client_connection import ClientConnection
from psstore.net.deadline_timer import DeadlineTimer
from psstore.net.names import current_host, telling
from psstore.net.sockets import choose_congestion_control, connect_on
from psstore.protocol.connection import HANDSHAKE_S
from psstore.protocol.requests import Future
from psstore.protocol.session import Session

_log = logging.getLogger("psstore.client")

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0
"""Pause before a reconnect: doubles from the first to the last, and each is cut by up to half at random, so that
a fleet does not come back in the same instant."""

_random = random.Random()
"""Its own: a program's `random` must be the same whether connections break or not, or a training that draws from it is
not the one that it would have been."""

DIAL_S = 5.0
"""How long one attempt to connect may take: two lost SYNs (1 s and 2 s, RFC 6298) and a slow answer."""

ONE_OF_MANY_S = 1.5
"""How long that, and a handshake, may take where the shard has a place on another host: one lost SYN, and a process
that stands still is no reason to wait. It comes round again."""

REFUSED_S = 2.0
"""A shard that was there is said to be gone when its host has refused connections to it for so long, at all of its
addresses: a process that ends takes its listening sockets with it, so that nobody is left who might answer. Longer than
what stands between us and the shard, such as a proxy, takes to be started again, if it is quick."""

MUTE = "it takes connections and answers nothing"
CURT = "it takes connections and ends them at once"


@dataclass
class Outage:
    """Since when a shard can't be reached, by the attempts to do so."""

    since: float
    refused_since: float | None = None
    """When it was refused for the first time, if it was every time from then on."""

    def attempted(self, now: float, *, refused: bool) -> None:
        """Notes an attempt to connect that failed."""
        if not refused:
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = now

    def told_at(self, patience_s: float, refused_s: float) -> float:
        """When it is long enough to end what waits for the shard."""
        told_at = self.since + patience_s
        return told_at if self.refused_since is None else min(told_at, self.refused_since + refused_s)


def has_two_hosts(addresses: Sequence[Address]) -> bool:
    """Whether a shard is led at one of several places: where one is silent, another is tried soon."""
    return sum(isinstance(one, TcpAddress) for one in addresses) > 1


class Reconnector:
    """Keeps one session connected, from `start` to `close`: the first address that answers, again and again."""

    def __init__(
        self,
        session: Session,
        addresses: Sequence[Address],
        *,
        loop: asyncio.AbstractEventLoop,
        patience_s: float,
        refused_s: float = REFUSED_S,
        on_up: Callable[[ClientConnection], None] | None = None,
        congestion_control: str | None = None,
        max_segment_bytes: int | None = None,
    ) -> None:
        """`patience_s`: what is asked of a shard that can't be reached for so long fails. `refused_s`: the same of one
        that was there, and whose host refuses every connection to it.
        `congestion_control`: TCP's; None: the system's. `max_segment_bytes`: TCP's, each way; None: the way's."""
        self.session = session
        self.first_up: asyncio.Future[None] = loop.create_future()
        """Done when the session was up once; failed if it never can be."""
        self.trouble: OSError | None = None
        """Why the last attempt to connect failed."""
        self._addresses = addresses
        self._has_two_hosts = has_two_hosts(addresses)
        self._avoided = ""
        """Where somebody has just answered who is not the shard: tried last."""
        self._loop = loop
        self._patience_s = patience_s
        self._refused_s = refused_s
        self._refused = False
        """The last attempt to connect was, at every address."""
        self._on_up = on_up
        self._congestion_control = congestion_control
        self._max_segment_bytes = max_segment_bytes
        self._certificates: Certificates | None = None
        """As soon as there is an address with TLS."""
        self._connection: ClientConnection | None = None
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline_timer = DeadlineTimer(loop, next_wake=session.next_wake, tick=self._tick)

    def start(self) -> None:
        self._task = self._loop.create_task(self._stay_connected())

    def flush(self) -> None:
        """The session has a new request, perhaps with a nearer deadline."""
        if self._connection is not None:
            self._connection.flush()
        self._deadline_timer.update()

    def renew(self) -> None:
        """Connects anew: what is there may be of a process that is silent."""
        if self._connection is not None:
            self._connection.abort()

    def resume(self) -> None:
        """The session may have frames and requests that it was not told of."""
        if self._connection is not None:
            self._connection.resume()
        if not self.session.idle:
            self._deadline_timer.update()

    async def close(self) -> None:
        """Ends what is still asked for with StoreClosed, and the connection."""
        self.session.give_up(StoreClosed("this store is closed; connect again"))
        self._deadline_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._connection is not None:
            self._connection.abort()
            await self._connection.lost
        if self.first_up.done() and not self.first_up.cancelled():
            self.first_up.exception()  # seen

    def abandon(self) -> None:
        """In a forked child: lets go of the socket without a word, and without its event loop.

        The descriptor becomes /dev/null rather than free: whoever still holds its number can't harm another file.
        """
        if self._socket is not None and self._socket.fileno() >= 0:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._socket.fileno(), inheritable=False)
            os.close(null)

    # ---- how ----

    async def _stay_connected(self) -> None:
        try:
            await self._connect_again_and_again()
        except Exception as error:  # whoever waits for the connection would wait for ever
            _log.exception("a bug in psstore")
            self.session.give_up(InternalError(f"the connection can't be kept: {error!r}; please report it"))
        assert self.session.failure is not None, "that is when it ends"
        if not self.first_up.done():
            self.first_up.set_exception(self.session.failure)

    async def _connect_again_and_again(self) -> None:
        """Until the session has given up."""
        backoff_s, outage = FIRST_BACKOFF_S, Outage(self._loop.time())
        while self.session.failure is None:
            if await self._connect_once(outage):
                backoff_s, outage = FIRST_BACKOFF_S, Outage(self.session.keepalive.asked_at or self._loop.time())
            else:
                outage.attempted(self._loop.time(), refused=self._refused)
            pause_s = backoff_s * _random.uniform(0.5, 1.0)
            left_s = self._tell(outage)
            if self.session.failure is None:
                await asyncio.sleep(min(pause_s, left_s) if left_s > 0.0 else pause_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def _tell(self, outage: Outage) -> float:
        """Ends what is asked for, if it is time. Returns how much is left of it.

        A shard that was there may come back, if it only stood still or the way to it was closed: with all that it
        held, as one that has lost it has another id."""
        now, was_up = self._loop.time(), self.first_up.done()
        left_s = outage.told_at(self._patience_s, self._refused_s if was_up else math.inf) - now
        if left_s <= 0.0 and self.session.failure is None:
            error = self._unreachable(now - outage.since)
            if was_up:
                self.session.fail_requests(error)
            else:
                self.session.give_up(error)
        return left_s

    def _say_back(self, outage: Outage) -> None:
        """One line for all channels, heartbeats' included: of a store with standbys, all that a worker notices of a
        takeover."""
        if self.session.channel == 0 and self.session.identity.role != "heartbeat":
            _log.warning(
                "shard %d serves again, %.2f s after the connection to it was lost (%s)",
                self.session.shard,
                self._loop.time() - outage.since,
                self.session.address,
            )

    def _tick(self, now: float) -> None:
        if self._connection is None:
            self.session.tick(now)
            return
        self.session.tick(now, self._connection.taken_bytes)
        if self.session.keepalive.is_broken:
            self.trouble = TimeoutError(MUTE)
            self._connection.abort()
        else:
            self._connection.flush()

    def _unreachable(self, tried_s: float) -> StoreUnreachable:
        """The shard is not there, or no longer."""
        session = self.session
        heard_at = session.core.last_heard
        said = session.last_word
        hint = f"it said: {said}" if said else "is it running? `psstore-server --shards 1` starts one"
        if heard_at:
            ago_s = self._loop.time() - heard_at
            hint = f"last heard {ago_s:.1f} s ago" + (f": {said}" if said else "")
        what = f"shard {session.shard}" if heard_at else "the store"
        if heard_at and self._has_two_hosts:
            hint += (
                "; if one of its two hosts is gone for good, `psstore promote` has the other lead (docs/failures.md)"
            )
        return StoreUnreachable(
            f"no connection to {what} at {session.address} in {tried_s:.1f} s ({self.trouble}); {hint}",
            address=session.address,
            tried_s=tried_s,
        )

    async def _connect_once(self, outage: Outage) -> bool:
        """Connects and stays until the connection is lost. True: the handshake succeeded, which ended the outage."""
        try:
            connection = await self._dial()
        except (BadArgument, TlsFailed) as error:  # our own token or certificates can't be used
            if not self.first_up.done():
                self.session.give_up(error)
            self.trouble = OSError(error.message)  # a file may be about to be replaced
            return False
        if connection is None:
            return False
        self._refused = False
        if self.session.failure is not None:  # closed meanwhile: wait_for may prefer its result to a cancellation
            connection.abort()
            return False
        self._connection = connection
        patience_s = ONE_OF_MANY_S if self._has_two_hosts else HANDSHAKE_S
        await asyncio.wait((connection.up, connection.lost), timeout=patience_s, return_when="FIRST_COMPLETED")
        if not connection.up.done():
            self.trouble = ConnectionError(CURT) if connection.lost.done() else TimeoutError(MUTE)
            connection.abort()
            self._avoided = self.session.address
        else:
            self._avoided = ""
            self._deadline_timer.update()  # the session may be watched
            if not self.first_up.done():
                self.first_up.set_result(None)
            else:
                self._say_back(outage)
            if self._on_up is not None and not connection.lost.done():  # it may be up and gone by now
                self._on_up(connection)
        await asyncio.wait((connection.lost,))  # not `await lost`: our end must not be taken for its end
        self._connection = None
        return connection.up.done()

    async def _dial(self) -> ClientConnection | None:
        """Tries every place that the addresses stand for once, in order."""
        answers: list[bool] = []
        patience_s = ONE_OF_MANY_S if self._has_two_hosts else DIAL_S
        for address in sorted(self._addresses, key=lambda one: str(one) == self._avoided):
            self.session.address = str(address)
            troubles: list[OSError] = []
            for family, where in await self._endpoints(address):
                try:
                    return await asyncio.wait_for(self._open(address, family, where), patience_s)
                except asyncio.TimeoutError:
                    troubles.append(TimeoutError(f"no answer within {patience_s:g} s"))
                except OSError as error:
                    troubles.append(error)
            if troubles:
                troubles = telling(troubles)
                self.trouble = troubles[-1]
            answers += [isinstance(one, (ConnectionRefusedError, FileNotFoundError)) for one in troubles] or [False]
        self._refused = all(answers)
        return None

    async def _endpoints(self, address: Address) -> list[tuple[int, Any]]:
        """(family, what to connect to) of each."""
        if not isinstance(address, TcpAddress):
            return [(socket.AF_UNIX, address.path)]
        try:
            host = current_host(address.host)
            resolve = functools.partial(socket.getaddrinfo, host, address.port, type=socket.SOCK_STREAM)
            try:
                found = resolve(flags=socket.AI_NUMERICHOST)
            except OSError:  # a name: ask, on a thread of Python's, as libuv's own crash forked children when they exit
                found = await asyncio.to_thread(resolve)
        except UnicodeError as error:  # of a name that can't be one, as of an empty label
            self.trouble = OSError(f"{host!r} is no name of a host: {error}")
            return []
        except OSError as error:
            self.trouble = error
            return []
        except RuntimeError as error:  # the system has no room for that thread
            self.trouble = OSError(f"{host!r} could not be looked up: {error}")
            return []
        return [(family, where) for family, _, _, _, where in found]

    async def _open(self, address: Address, family: int, where: Any) -> ClientConnection:
        """Connects a socket of ours, known from its first moment on: a fork in the middle of connecting finds it."""
        sock = self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if family != socket.AF_UNIX:
                choose_congestion_control(sock, where[0], self._congestion_control)
                if self._max_segment_bytes is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._max_segment_bytes)
            tls = self._tls(address)
            await connect_on(self._loop, sock, where)
            return ClientConnection(self.session, self._loop, sock, tls=tls)
        except BaseException:
            sock.close()
            raise

    def _tls(self, address: Address) -> _core.TlsSession | None:
        """Raises TlsFailed if our own certificates can't be used."""
        if not isinstance(address, TcpAddress) or not address.tls:
            return None
        if self._certificates is None:
            self._certificates = Certificates(self.session.identity.credentials, server=False)
        return self._certificates.session(address.name or address.host)


class SocketDriver:
    """The `protocol.links.Driver` of a store whose shards are behind sockets: one reconnector per session."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reconnectors: Iterable[Reconnector], calls: _core.CallDriver
    ) -> None:
        """`calls`: of callers that drive the loop."""
        self.reconnectors = {(one.session.shard, one.session.channel): one for one in reconnectors}
        self._loop = loop
        self._calls = calls

    def now(self) -> float:
        return self._loop.time()

    def future(self) -> Future:
        return QuietFuture(loop=self._loop)

    def flush(self, session: Session) -> None:
        self._reconnector(session).flush()

    def await_answer(self, session: Session) -> None:
        """Lets the extension wait for the answer, if no task asks and nothing else is under way; else only flushes."""
        for other in self.reconnectors.values():
            if other.session is not session and not other.session.idle:
                self.flush(session)
                return
        if asyncio.current_task(self._loop) is not None:
            self.flush(session)
            return
        answered = self._calls.await_answer(session.core)
        if answered is None:
            self.flush(session)
        elif not answered:
            self.resume(session)

    def resume(self, session: Session) -> None:
        """A call has sent and received for the session without the loop, and left the rest to it."""
        self._reconnector(session).resume()

    def look_after(self, sessions: Collection[Session]) -> None:
        """A call has made requests without the loop, and left something of them to it. Any thread may call it."""
        for session in sessions:
            self._loop.call_soon_threadsafe(self._reconnector(session).resume)

    async def close(self) -> None:
        for reconnector in self.reconnectors.values():
            await reconnector.close()

    def abandon(self) -> None:
        for reconnector in self.reconnectors.values():
            reconnector.abandon()

    def _reconnector(self, session: Session) -> Reconnector:
        return self.reconnectors[session.shard, session.channel]


class QuietFuture(asyncio.Future[object]):
    """A future whose failure nobody has to collect: its caller may have been interrupted."""

    __slots__ = ()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self.exception()  # seen
