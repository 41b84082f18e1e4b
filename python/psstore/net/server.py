"""Drives a shard's service: its connections, its one timer, and its idle work. One event loop, one thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable

from psstore import _core
from psstore.errors import (
    AvailabilityError,
    DeviceFailed,
    InternalError,
    Overloaded,
    ProtocolError,
    PsstoreError,
    ShuttingDown,
    UsageError,
)
from psstore.net.limits import BACKLOG, ServerLimits
from psstore.net.server_connection import ServerConnection
from psstore.protocol.frames import Close, Output, Send
from psstore.protocol.service import ShardService

_log = logging.getLogger("psstore.server")

TIMER_GRAIN_S = 0.001
"""The timer's resolution in libuv; it may fire so much early, and is then set again."""

SETTLE_S = 0.0002
"""Of idle work at a time, after which whoever has sent something has a turn. A slot of 1 MiB takes about as long."""

RETRY_S = 1.0
"""After a bug in the service's `tick`, this long until the next one: its traceback shall not fill the disk."""

REFUSALS = 64
"""Connections over the limit that are told so before they are closed; beyond them they are only closed."""


class Server:
    """All connections of one shard."""

    def __init__(self, service: ShardService, *, loop: asyncio.AbstractEventLoop, limits: ServerLimits) -> None:
        self.loop = loop
        self.limits = limits
        self.on_turn: Callable[[float], None] | None = None
        """Called after each turn of the loop in which something happened."""
        self.on_device_failed: Callable[[DeviceFailed], None] | None = None
        """Called when there is nothing left to serve; perhaps more than once."""
        self._service = service
        self._numbers = itertools.count(1)
        self._connections: dict[int, ServerConnection] = {}
        self._listeners: list[asyncio.AbstractServer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._no_tick_before = 0.0
        self._sweeper = loop.call_later(limits.stalled_frame_s / 4, self._sweep)
        self._turn_is_due = False
        self._events = 0
        """Frames and ticks so far: settling goes on only while there are no new ones."""
        self._emptied: asyncio.Event | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accepts connections on a bound socket from now on."""
        start = self.loop.create_unix_server if sock.family == socket.AF_UNIX else self.loop.create_server
        self._listeners.append(await start(self._accept, sock=sock, backlog=BACKLOG))

    async def drain(self, reason: PsstoreError | None = None) -> None:
        """Accepts nobody, refuses requests, tells every peer, and returns once their connections are closed.

        `reason`: what peers are told (default: ShuttingDown)."""
        for listener in self._listeners:
            listener.close()
        self._service.drain()
        self._emptied = asyncio.Event()
        for connection in list(self._connections.values()):
            connection.refuse(reason or ShuttingDown("the store is shutting down"))
        if self._connections:
            await self._emptied.wait()  # each of them lingers for a bounded time
        self._sweeper.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # ---- connections ----

    def now(self) -> float:
        """The clock of everything here, in seconds."""
        return self.loop.time()

    def _accept(self) -> ServerConnection:
        return ServerConnection(self, next(self._numbers))

    def opened(self, connection: ServerConnection) -> _core.Port:
        """Where its bytes go."""
        above_limit = len(self._connections) - self.limits.max_connections
        self._connections[connection.id] = connection
        port = self._service.opened(connection.id, self.now())
        self.log(connection, logging.DEBUG, "connected")
        if self._service.draining:
            connection.refuse(ShuttingDown("the store is shutting down"))
        elif above_limit >= REFUSALS:
            connection.abort()
        elif above_limit >= 0:
            self.log(connection, logging.WARNING, "refused: there are too many connections already")
            connection.refuse(Overloaded(f"this shard has all the {self.limits.max_connections} connections it takes"))
        self._turn()
        return port

    def ended(self, connection: ServerConnection) -> None:
        """Nothing more will come from it."""
        self.log(connection, logging.DEBUG, "closed")
        self._service.closed(connection.id, self.now())
        self._turn()

    def lost(self, connection: ServerConnection, cause: Exception | None) -> None:
        """Its socket is closed."""
        if cause is not None:
            self.log(connection, logging.DEBUG, f"the connection broke: {cause}")
        del self._connections[connection.id]
        if self._emptied is not None and not self._connections:
            self._emptied.set()

    def blame(self, connection: ServerConnection, error: ProtocolError) -> None:
        """The peer is at fault."""
        self._carry_out(self._service.failed(connection.id, error))
        self._turn()

    def broke(self, connection: ServerConnection, error: Exception) -> None:
        """We are at fault: this connection ends, the others don't notice."""
        self.log(connection, logging.ERROR, "a bug in psstore; this connection is closed", error)
        connection.refuse(InternalError(f"the shard failed: {error!r}; its log has the details, please report it"))

    # ---- events ----

    def arrived(self, connection: ServerConnection, frame: _core.Frame) -> None:
        """A frame is whole, or announced, and the connection's port could not answer it."""
        self._events += 1
        self._carry_out(self._service.frame(connection.id, frame, self.loop.time()))
        self._turn()

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

    def _close(self, connection: ServerConnection, output: Close) -> None:
        self.log(connection, logging.INFO, f"closing the connection: {output.reason}")
        connection.close()

    # ---- time and idle work: once per turn of the loop, not once per frame ----

    def _turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_is_due = False
        self._set_timer(self._service.next_wake())
        self.loop.call_soon(self._settle, self._events)
        if self.on_turn is not None:
            self.on_turn(self.now())

    def _settle(self, events: int) -> None:
        """Some of the work that the last decision left over, unless frames came: they have their own turn."""
        if events != self._events:
            return
        try:
            settled = self._settle_some()
        except DeviceFailed as error:
            self._device_failed(error)
            return
        if self._service.is_filling:
            self._carry_out(self._service.filled())
        if not settled or self._service.is_filling:
            self.loop.call_soon(self._settle, events)

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

    def _tick(self) -> None:
        self._timer = None
        self._events += 1
        try:
            self._carry_out(self._service.tick(self.now()))
        except Exception:
            self._no_tick_before = self.now() + RETRY_S
            _log.exception("a bug in psstore: time-outs may be late")
        self._turn()

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(self.limits.stalled_frame_s / 4, self._sweep)
        for connection in list(self._connections.values()):
            connection.check_stalled(self.now())

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
        ours = not isinstance(error, (UsageError, AvailabilityError))
        level = logging.ERROR if ours else logging.INFO if isinstance(error, AvailabilityError) else logging.DEBUG
        self.log(connection, level, f"answered {type(error).__name__}: {error.message}")
