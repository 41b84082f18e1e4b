"""One connection of a client to a shard: what the event loop calls as bytes come and go.

The session's core receives large payloads where they are to live, and never copies what it sends. What the kernel does
not take waits there until the loop says that there is room.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from typing import ClassVar

from psstore import _core
from psstore.errors import AuthFailed, InternalError, PsstoreError, TlsFailed
from psstore.net.limits import RELEASE_S
from psstore.net.sockets import sleep_in_recv, taken_bytes, tune
from psstore.protocol.session import Session, is_final
from psstore.protocol.states import LinkState


class ClientConnection:
    """A connected socket, and its session, which outlives it."""

    alive: ClassVar[weakref.WeakSet[ClientConnection]] = weakref.WeakSet()

    def __init__(
        self,
        session: Session,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        tls: _core.TlsSession | None = None,
    ) -> None:
        """`sock`: does not block, and is the connection's from now on. `tls`: None: bytes go as they are."""
        self.session = session
        self.loop = loop
        self.up: asyncio.Future[None] = loop.create_future()
        """Done when the handshake is over."""
        self.lost: asyncio.Future[None] = loop.create_future()
        self.tls = tls
        self._socket = sock
        self._closing = self._has_failed = False
        self._awaits_room = False
        self._release_timer: asyncio.TimerHandle | None = None
        tune(sock)
        sleep_in_recv(sock)
        session.connected()
        session.core.open(sock.fileno(), tls)
        self.alive.add(self)
        loop.add_reader(sock.fileno(), self._on_readable)
        self.flush()

    # ---- what the link calls ----

    def flush(self) -> None:
        """Sends what the session has to say, in order; the rest as soon as there is room."""
        if self._closing:
            return
        awaits_room = not self.session.core.send()
        if awaits_room == self._awaits_room:
            return
        self._awaits_room = awaits_room
        if awaits_room:
            self.loop.add_writer(self._socket.fileno(), self.flush)
        else:
            self.loop.remove_writer(self._socket.fileno())

    @classmethod
    def abort_all(cls, loop: asyncio.AbstractEventLoop) -> None:
        """Closes those that this loop drives."""
        for connection in list(cls.alive):
            if connection.loop is loop:
                connection.abort()

    def resume(self) -> None:
        """Goes on where a call stopped that has sent and received without the loop."""
        if not self._closing:
            self._take_frames()
            self.flush()
            self._go_on_reading()

    def abort(self) -> None:
        """Closes now; the session is told in the next turn."""
        if not self._closing:
            self._closing = True
            self.loop.remove_reader(self._socket.fileno())
            self.loop.remove_writer(self._socket.fileno())
            self.loop.call_soon(self._end)

    def fileno(self) -> int:
        return self._socket.fileno()

    def taken_bytes(self) -> int | None:
        """What the far end's system has taken so far; None if that is all, or it does not tell."""
        return taken_bytes(self._socket)

    # ---- what the loop calls ----

    def _on_readable(self) -> None:
        if self._closing:
            return
        try:
            goes_on = self.session.core.receive(self.loop.time())
        except PsstoreError as error:
            self._fail(error)
        except Exception as error:
            self._blunder(error)
        else:
            self._take_frames()
            if not goes_on:
                self.abort()
            else:
                if self.session.core.has_output:
                    self.flush()
                self._go_on_reading()

    def _go_on_reading(self) -> None:
        """Sees to what was decrypted already, of which the socket tells nothing."""
        if self.tls is not None and not self._closing and self.session.core.holds_bytes:
            self.loop.call_soon(self._on_readable)

    def _take_frames(self) -> None:
        if self._has_failed:
            return  # what came behind the failure may be of no connection any more
        try:
            self.session.take_frames(self.loop.time())
        except PsstoreError as error:
            self._fail(error)
            return
        except Exception as error:
            self._blunder(error)
            return
        if self.session.state is LinkState.UP and not self.up.done():
            self.up.set_result(None)
        if self.session.owes_releases:
            self.session.core.release_if_due()
            self._release_later()

    def _end(self) -> None:
        if self.session.state is LinkState.UP:
            self._take_frames()  # a call without the loop may have left what came before the end
        if self._release_timer is not None:
            self._release_timer.cancel()
        self.session.disconnected()
        self._socket.close()
        if not self.lost.done():
            self.lost.set_result(None)

    # ---- how ----

    def _release_later(self) -> None:
        if self.session.owes_releases and self._release_timer is None:
            self.session.core.release_is_due = True
            self._release_timer = self.loop.call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._release_timer, self.session.core.release_is_due = None, False
        self.session.core.release()
        self.flush()

    def _blunder(self, error: Exception) -> None:
        """Ours, whatever it is: requests end with it, the program goes on."""
        self._fail(InternalError(f"while reading from {self.session.address}: {error!r}"))

    def _fail(self, error: PsstoreError) -> None:
        # A store that was reached may have a certificate that is just being replaced; and we another token by now.
        replaced = TlsFailed if self.session.state is not LinkState.UP else AuthFailed
        may_pass = isinstance(error, replaced) and self.session.welcome is not None
        self._has_failed = True
        if is_final(error) and not may_pass:
            self.session.give_up(error)
        self.session.last_word = error.message
        self.abort()
