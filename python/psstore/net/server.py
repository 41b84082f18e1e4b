"""Drives a shard's service: its connections, its one timer, and its idle work. One event loop, one thread."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable

from psstore import _core
from psstore.errors import (
    AuthFailed,
    AvailabilityError,
    DeadlineExceeded,
    DeviceFailed,
    HandshakeTimeout,
    InternalError,
    NotLeading,
    OutOfMemory,
    Overloaded,
    ProtocolError,
    PsstoreError,
    ShuttingDown,
    StorageError,
    UsageError,
)
from psstore.net import loops
from psstore.net.certificates import Certificates
from psstore.net.credentials import is_trusted, peer_user
from psstore.net.leader_link import LEADER, LeaderLink
from psstore.net.limits import EVENTS_PER_TURN, LINGER_S, ServerLimits
from psstore.net.listener import Listener
from psstore.net.server_connection import ServerConnection
from psstore.net.sockets import tune
from psstore.net.token_files import TokenWatch
from psstore.protocol.frames import Close, Output, Send
from psstore.protocol.service import ShardService

_log = logging.getLogger("psstore.server")

TIMER_GRAIN_S = 0.001
"""The timer's resolution in libuv; it may fire so much early, and is then set again."""

SETTLE_S = 0.0002
"""How long the loop does idle work before it looks again at who has sent something. Four slots take about as long."""

RETRY_S = 1.0
"""After a bug in the service's `tick`, this long until the next one: its traceback shall not fill the disk."""

CATCH_UP_S = 1.0
"""How long a shard that ends waits until its standbys have what it has: they take milliseconds."""

REFUSALS = 64
"""Connections over the limit that are told so before they are closed; beyond them they are only closed."""


def _guarded(called: Callable[[Server], None]) -> Callable[[Server], None]:
    """Wraps what the loop calls. A device that fails leaves nothing to serve; a bug costs this call alone."""

    @functools.wraps(called)
    def call(self: Server) -> None:
        try:
            called(self)
        except DeviceFailed as error:
            self._device_failed(error)
        except Exception:
            _log.exception("a bug in psstore; what was waited for may be late")

    return call


class Server:
    """All connections of one shard."""

    def __init__(
        self,
        service: ShardService,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: ServerLimits,
        busy_poll_s: float = 0.0,
        for_all_users: bool = False,
        tokens: TokenWatch | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`busy_poll_s`: how long after a request it asks for the next one before it sleeps.
        `for_all_users`: whoever can open a unix socket may come; what keeps others out is a token.
        `tokens`: None: the service's stay as they are. `certificates`: for TCP; None: it is without TLS."""
        self.loop = loop
        self.limits = limits
        self.poller = _core.Poller(service.data, wakeup_fd=loops.bell(loop), busy_s=busy_poll_s)
        """Has the connections' sockets, and answers what is ordinary."""
        self.leader = LeaderLink(service, self.poller, loop.time)
        """To the shard that this is a standby of."""
        loop.add_reader(self.poller.fileno(), self._serve)
        self.on_turn: Callable[[float], None] | None = None
        """Called after each turn of the loop in which something happened that was no request for data."""
        self.on_device_failed: Callable[[DeviceFailed], None] | None = None
        """Called when there is nothing left to serve; perhaps more than once."""
        self._service = service
        service.leadership.standbys.on_dropped = lambda number, error: self._cut(
            number, "the shard goes on without it", error
        )
        self._busy_poll_s = busy_poll_s
        self._for_all_users = for_all_users
        self._tokens = tokens
        self._certificates = certificates
        self._numbers = itertools.count(1)
        self._connections: dict[int, ServerConnection] = {}
        self._lingering: dict[int, ServerConnection] = {}
        """Connections that have ended here, and not at their peers; the oldest first."""
        self._listeners: list[Listener] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._no_tick_before = 0.0
        service.shard.free_unused(0)  # which will be asked for now and then: so it may keep as much as rounds need
        self._sweeper = self._sweep_later()
        self._is_serving = False
        """What becomes due is done before the loop has its next turn, or asked of it then."""
        self._turn_is_due = False
        self._is_settling = False
        """True while idle work is left, for which a turn is due."""
        self._emptied: asyncio.Event | None = None

    def lead(self) -> None:
        """From now on it is the shard, and listens."""
        self.leader.end()
        self._service.lead(self.now())
        self._numbers = itertools.count(self._service.leadership.first_connection)
        self._turn()

    def done_without(self, client: str) -> None:
        """That standby will never lead: what waited for it goes on."""
        self._service.leadership.standbys.done_without(client)
        self.poller.deliver()

    def store_ends(self, reason: str) -> None:
        """The workers are done, or lost for that reason, and this process is about to end: its standbys hear so."""
        self._service.leadership.standbys.store_ends(reason)
        self.poller.deliver()

    def not_resharded(self, why: str) -> None:
        """The store goes on with the shards that it has."""
        self._carry_out(self._service.not_resharded(why, self.now()))

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on a bound socket from now on."""
        self._listeners.append(Listener(self.loop, sock, self._opened))

    async def drain(self, reason: PsstoreError | None = None) -> None:
        """Accepts nobody, refuses requests, tells every peer, and returns once their connections are closed.

        `reason`: what peers are told (default: ShuttingDown)."""
        for listener in self._listeners:
            listener.close()
        self._service.drain()
        self.on_turn = None  # nobody is lost now; we are
        self._emptied = asyncio.Event()
        why = reason or ShuttingDown("the store is shutting down")
        standbys = {number for number, _, _ in self._service.data.followers()}
        for connection in list(self._connections.values()):
            if connection.id not in standbys:
                connection.refuse(why)
        await self._standbys_have_all()  # or nobody who is behind them would be told
        for connection in list(self._connections.values()):
            connection.refuse(why)
        if self._connections:
            await self._emptied.wait()  # each of them lingers for a bounded time
        self.loop.remove_reader(self.poller.fileno())
        self._sweeper.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _standbys_have_all(self) -> None:
        """Returns once those that are there have what the shard has, or had the time for it."""
        data, until = self._service.data, self.now() + CATCH_UP_S
        while any(
            counts and has < data.last_record and number in self._connections
            for number, counts, has in data.followers()
        ):
            if self.now() > until:
                break
            await asyncio.sleep(CATCH_UP_S / 1000)
        self.poller.deliver()

    # ---- connections ----

    def now(self) -> float:
        """The clock of everything here, in seconds."""
        return self.loop.time()

    def _opened(self, sock: socket.socket, address: str) -> None:
        above_limit = len(self._connections) - self.limits.max_connections
        number = next(self._numbers)
        self._look_at_tokens()
        is_tcp = sock.family != socket.AF_UNIX
        protocol = self._service.opened(number, self.now(), address=_host(address) if is_tcp else "")
        tune(sock)
        stranger = self._stranger(sock)
        tls = self._certificates.session() if self._certificates is not None and is_tcp else None
        self.poller.add(number, socket=sock.detach(), protocol=protocol, tls=tls)
        connection = ServerConnection(self, number=number, address=address, protocol=protocol)
        self._connections[number] = connection
        self.log(connection, logging.DEBUG, "connected")
        if self._service.draining:
            connection.refuse(ShuttingDown("the store is shutting down"))
        elif stranger is not None:
            self.log(connection, logging.WARNING, f"refused: it is of user {stranger}")
            connection.refuse(
                AuthFailed(f"this store serves its own user, and not user {stranger}: start it with --token-file")
            )
        elif above_limit >= REFUSALS:
            connection.abort()
        elif above_limit >= 0 and not self._make_room():
            self.log(connection, logging.WARNING, "refused: there are too many connections already")
            connection.refuse(Overloaded(f"this shard has all the {self.limits.max_connections} connections it takes"))
        self._turn()

    def _look_at_tokens(self) -> None:
        """Whoever has proved one that is no more has to go."""
        if self._tokens is not None and self._tokens.look():
            self._carry_out(self._service.change_tokens(self._tokens.tokens))

    def _stranger(self, sock: socket.socket) -> int | None:
        """Another user, who has come by a unix socket, and proves nothing."""
        if sock.family != socket.AF_UNIX or self._for_all_users:
            return None
        user = peer_user(sock)
        return None if is_trusted(user) else user

    def _make_room(self) -> bool:
        """Ends a connection that nobody needs. False: there is none."""
        if self._lingering:
            next(iter(self._lingering.values())).abort()
            return True
        number = self._service.dispensable(self.now())
        if number is None:
            return False
        connection = self._connections[number]
        self.log(connection, logging.INFO, "it has asked nothing yet, and makes room for another")
        connection.refuse(Overloaded("this shard needs the connection for others, and nothing was asked over it"))
        connection.abort()  # now: until its peer has closed it, too, it would count
        return True

    def ended(self, connection: ServerConnection) -> None:
        """Nothing more will come from the connection."""
        self.log(connection, logging.DEBUG, "closed")
        self._lingering[connection.id] = connection
        self._service.closed(connection.id, self.now())
        self._turn()

    def lost(self, connection: ServerConnection, cause: OSError | None) -> None:
        """The connection's socket is closed."""
        if cause is not None:
            self.log(connection, logging.DEBUG, f"the connection broke: {cause}")
        del self._connections[connection.id], self._lingering[connection.id]
        if self._emptied is not None and not self._connections:
            self._emptied.set()

    # ---- events ----

    @_guarded
    def _serve(self) -> None:
        """The poller has something to do."""
        self._is_serving = True
        try:
            self._serve_all()
        finally:
            self._is_serving = False
            if self._turn_is_due:
                self.loop.call_soon(self._end_turn)
            if self._is_settling:
                self.loop.call_soon(self._settle)

    def _serve_all(self) -> None:
        """Events, and behind them what they made due: a decision is applied, and the next request waited for, without
        the loop coming round. The poller lingers if nothing else of ours waits for its turn."""
        linger_s = max(LINGER_S, self._busy_poll_s)
        for _ in range(EVENTS_PER_TURN):
            event = self.poller.turn(0.0 if self._turn_is_due or self._is_settling else linger_s)
            if event is not None and event[0] == LEADER:
                self.leader.heard(event[1])
                self._turn()
            elif event is not None:
                self._handle(self._connections[event[0]], event[1])
            elif self._turn_is_due or self._is_settling:
                if self._turn_is_due:
                    self._end_turn()
                self._settle()
                if self._is_settling:
                    return  # there is more of it than the others shall wait for
            else:
                self._see_to_reads()
                return
        self.loop.call_soon(self._serve)

    def _see_to_reads(self) -> None:
        """Whatever waits, whatever has failed since, and what a device is at work on: it rings no bell when it is done,
        and no other frame may come."""
        wake = self._service.data.next_wake()
        if wake == 0.0:
            self._carry_out(self._service.woken(self.now()))
            if self._service.data.is_filling:
                self._settle_soon()
                return
            wake = self._service.data.next_wake()
        self._set_timer(wake)
        if self._service.leadership.standby is not None and not self._service.is_settled:
            self._settle_soon()  # the records that made slots ready for their step were no events

    def _handle(self, connection: ServerConnection, what: _core.Frame | Exception | None) -> None:
        """What goes wrong ends this connection only, unless it is the device."""
        try:
            if isinstance(what, _core.Frame):
                self._arrived(connection, what)
            elif what is None or isinstance(what, OSError):
                connection.gone(what)
            else:
                raise what
        except ProtocolError as error:
            self._blame(connection, error)
        except DeviceFailed as error:
            connection.refuse(error)
            raise
        except (OutOfMemory, MemoryError):  # in the middle of a frame: no request can be told
            connection.refuse(Overloaded("this shard has no memory for what the connection sends; try again later"))
        except Overloaded as error:  # nor the system for what it says is in shared memory
            connection.refuse(error)
        except Exception as error:
            self._broke(connection, error)

    def _arrived(self, connection: ServerConnection, frame: _core.Frame) -> None:
        """A frame is whole, or announced, and it is not for data alone."""
        self._carry_out(self._service.frame(connection.id, frame, self.loop.time()))
        self._catch_up()
        self._turn()

    def _catch_up(self) -> None:
        """Once who committed is told, and before anybody reads: what was told is what this shard shows."""
        if outputs := self._service.catch_up(self.now()):
            self._carry_out(outputs)

    def _blame(self, connection: ServerConnection, error: ProtocolError) -> None:
        """The peer is at fault."""
        self._carry_out(self._service.failed(connection.id, error))
        self._turn()

    def _broke(self, connection: ServerConnection, error: Exception) -> None:
        """We are at fault: this connection ends, the others don't notice."""
        self.log(connection, logging.ERROR, "a bug in psstore; this connection is closed", error)
        connection.refuse(InternalError(f"the shard failed: {error!r}; its log has the details, please report it"))

    def _carry_out(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            connection = self._connections.get(output.conn)
            if connection is None:
                continue
            if isinstance(output, Send):
                if output.error is not None:
                    self._log_error(connection, output.error)
                connection.send(output.pieces)
            else:
                self._close(connection, output)
        self.poller.deliver()

    def _close(self, connection: ServerConnection, output: Close) -> None:
        level = logging.DEBUG if isinstance(output.error, NotLeading) else logging.INFO
        self.log(connection, level, f"closing the connection: {output.reason}")
        connection.close()

    # ---- time and idle work: once per turn of the loop, not once per frame ----

    def _turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            if not self._is_serving:
                self.loop.call_soon(self._end_turn)

    @_guarded
    def _end_turn(self) -> None:
        self._turn_is_due = False
        self._set_timer(self._service.next_wake())
        self._settle_soon()
        if self.on_turn is not None:
            self.on_turn(self.now())

    def _settle_soon(self) -> None:
        if not self._is_settling:
            self._is_settling = True
            if not self._is_serving:
                self.loop.call_soon(self._settle)

    @_guarded
    def _settle(self) -> None:
        """Some of the work that the last decision left over, unless frames came: their turn ends with it."""
        self._is_settling = False
        if self._turn_is_due:
            return
        settled, data = self._settle_some(), self._service.data
        if data.is_filling:
            self._carry_out(self._service.woken(self.now()))
            settled = settled and not data.is_filling
        if self._service.leadership.standby is not None:
            self.poller.deliver()  # its shard hears what it has let go of
        if not settled:
            self._settle_soon()
        elif self._busy_poll_s and not self._is_serving:
            self._serve()  # asks for what comes next

    def _settle_some(self) -> bool:
        """True: nothing is left."""
        end = time.monotonic() + SETTLE_S
        while not (settled := self._service.settle()) and time.monotonic() < end:
            pass
        return settled

    def _device_failed(self, error: DeviceFailed) -> None:
        if self.on_device_failed is not None:
            self.on_device_failed(error)

    def _set_timer(self, wake: float | None) -> None:
        """A timer that is set too early stays: ticks are cheap, and most waits end before their time."""
        if wake is None or (self._timer is not None and self._timer_at <= wake):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = max(wake, self.now() + TIMER_GRAIN_S, self._no_tick_before)
        self._timer = self.loop.call_at(self._timer_at, self._ring)

    def _ring(self) -> None:
        """Reads once before anything is late: what came while this process stood still lies unread."""
        self._timer = self.loop.call_later(TIMER_GRAIN_S, self._tick)

    @_guarded
    def _tick(self) -> None:
        self._timer = None
        self._turn()
        self._no_tick_before = self.now() + RETRY_S  # unless this one ends well
        self._carry_out(self._service.tick(self.now()))
        self._catch_up()
        self.poller.deliver()  # to standbys, where no turn of the poller follows
        self._no_tick_before = 0.0

    @_guarded
    def _sweep(self) -> None:
        self._sweeper = self._sweep_later()
        self._look_at_tokens()
        self._service.shard.free_unused(self.limits.unused_bytes)
        limit_s = self.limits.stalled_frame_s
        for number in self.poller.stalled(limit_s):
            why = f"a frame was begun and not continued for {limit_s:g} s"
            if number == LEADER:
                self._cut(number, why)
            else:
                self._blame(self._connections[number], HandshakeTimeout(why))
        for number in self.poller.unread(self.limits.unread_s):
            self._cut(number, f"its peer has read nothing for {self.limits.unread_s:g} s of what it is owed")
        for number in self._service.data.reading_since(self.now() - self.limits.lease_s):
            self._cut(number, "its peer has not given back what it was lent to read, and its time is over")

    def _sweep_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(min(self.limits.stalled_frame_s, self.limits.unread_s) / 4, self._sweep)

    def _cut(self, number: int, why: str, error: Exception | None = None) -> None:
        """Ends a connection without a word: its peer does not listen, or has to hear of it at once. `error`: behind the
        reason."""
        if number == LEADER:
            self.leader.cut(why)
            return
        connection = self._connections.get(number)
        if connection is not None:
            self.log(connection, logging.WARNING, f"the connection is cut: {why}", error)
            connection.abort()

    # ---- log ----

    def log(self, connection: ServerConnection, level: int, message: str, error: Exception | None = None) -> None:
        if _log.isEnabledFor(level):
            peer = f"{self._service.peer(connection.id)} at {connection.address}"
            _log.log(level, message, exc_info=error, extra={"peer": peer})

    def _log_error(self, connection: ServerConnection, error: PsstoreError) -> None:
        """An error that a request was answered with. One of the protocol is logged where it ends the connection."""
        if isinstance(error, DeviceFailed):
            self._device_failed(error)
        if isinstance(error, ProtocolError):
            return
        is_read = isinstance(error, DeadlineExceeded) and not error.details  # else it says who was waited for
        if is_read or isinstance(error, (UsageError, NotLeading)):
            level = logging.DEBUG  # a reader asks for the next version, and a client for who leads, again and again
        else:
            level = logging.INFO if isinstance(error, (AvailabilityError, StorageError)) else logging.ERROR
        self.log(connection, level, f"answered {type(error).__name__}: {error.message}")


def _host(address: str) -> str:
    """Who counts as one peer at 'host:port'. A machine may have all addresses of an IPv6 network of 64 bits."""
    host = address.rpartition(":")[0].partition("%")[0]
    parsed = ipaddress.ip_address(host)
    if isinstance(parsed, ipaddress.IPv4Address):
        return host
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((parsed, 64), strict=False))
