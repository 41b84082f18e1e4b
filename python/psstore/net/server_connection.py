"""One accepted connection: bytes to frames, and frames to its server, at the pace at which its peer reads.

While the peer does not read its replies, nothing more is read from it and frames that have arrived wait in
the decoder: what it can make the server hold is one high-water mark, one reply and one receive buffer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from psstore import _core
from psstore.errors import HandshakeTimeout, ProtocolError, PsstoreError
from psstore.net import limits
from psstore.net.sockets import tune
from psstore.protocol.frames import Piece, failure_frame

if TYPE_CHECKING:
    from psstore.net.server import Server

_IOV_MAX = os.sysconf("SC_IOV_MAX")

_discarded = memoryview(bytearray(limits.DISCARD_BYTES))
"""Written to by all connections that are being closed, read by nobody."""


class ServerConnection(asyncio.BufferedProtocol):
    """The transport's protocol. Frames go to `server`, which calls `send` and `close` with what comes of them."""

    def __init__(self, server: Server, number: int) -> None:
        self.id = number
        self.address = ""
        """The peer's, for logs."""
        self.closed = False
        """Nothing more is decoded or sent; what was sent may still be on its way."""
        self._server = server
        self._transport: asyncio.Transport
        self._port: _core.Port
        self._fd = -1
        self._window_bytes = 0
        """What the current read can bring."""
        self._paused = False
        """The peer does not read what we send."""
        self._frame_begun_at: float | None = None
        """When the frame began to arrive that has not arrived yet; None between frames."""
        self._linger: asyncio.TimerHandle | None = None

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.address = _peer_address(transport)
        sock = transport.get_extra_info("socket")
        tune(sock)
        self._fd = sock.fileno()
        transport.set_write_buffer_limits(high=limits.WRITE_HIGH_BYTES, low=limits.WRITE_LOW_BYTES)
        self._port = self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._linger is not None:
            self._linger.cancel()
        self._server.lost(self, exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.closed:
            return _discarded
        window = self._port.get_buffer(sizehint)
        if len(window) > limits.READ_BYTES:
            window = window[: limits.READ_BYTES]
        self._window_bytes = len(window)
        return window

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed:
            return
        if nbytes == self._window_bytes:
            self._give_way()
        self._port.buffer_updated(nbytes)
        self._take_frames()

    def eof_received(self) -> None:
        """Returns None: the transport sends what is left, and closes."""
        if not self.closed and self._port.mid_frame:
            self._server.log(self, logging.DEBUG, "closed by the peer in the middle of a frame")

    def pause_writing(self) -> None:
        self._paused = True
        if not self.closed:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self.closed:
            return
        if self._frame_begun_at is not None:
            self._frame_begun_at = self._server.now()  # the delay was ours
        self._take_frames()
        if not self._paused and not self.closed:
            self._transport.resume_reading()

    def _give_way(self) -> None:
        """There is more to read, and libuv would: the others come first."""
        self._transport.pause_reading()
        self._server.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if (self.closed or not self._paused) and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- called by the server ----

    def send(self, pieces: Sequence[Piece]) -> None:
        """One write of all pieces, at once; those that the socket has no room for stay referenced until they are out.
        Copies none with uvloop, or with asyncio from Python 3.12 on."""
        if self.closed or self._transport.is_closing():
            return
        rest = pieces if self._transport.get_write_buffer_size() else _write_now(self._fd, pieces)
        if rest:
            self._transport.writelines(rest)

    def refuse(self, error: PsstoreError) -> None:
        """Tells the peer why the connection ends, and ends it."""
        self.send([failure_frame(0, error)])
        self.close()

    def close(self) -> None:
        """Ends the connection once what was sent is out. The peer's unread bytes are read and dropped until it
        closes too: closing over them would reset the connection, and lose the reply that says why."""
        if self.closed:
            return
        self._end()
        if self._transport.is_closing():
            return
        if self._paused:
            self._transport.resume_reading()
        self._transport.write_eof()
        self._linger = self._server.loop.call_later(self._server.limits.linger_s, self._transport.abort)

    def abort(self) -> None:
        """Cuts it off."""
        self._end()
        self._transport.abort()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._frame_begun_at = None
            self._server.ended(self)

    def check_stalled(self, now: float) -> None:
        """Closes the connection if its peer stopped in the middle of a frame."""
        begun, limit_s = self._frame_begun_at, self._server.limits.stalled_frame_s
        if begun is not None and not self._paused and now - begun >= limit_s:
            self._server.blame(self, HandshakeTimeout(f"a frame was begun and not continued for {limit_s:g} s"))

    # ---- frames ----

    def _take_frames(self) -> None:
        """All frames that have arrived, while the peer takes our replies. What goes wrong ends this connection only."""
        try:
            while not self._paused and not self.closed:
                frame = self._port.next_frame()
                if replies := self._port.take_replies():
                    self.send(replies)
                elif frame is None:
                    break
                if frame is not None:
                    self._server.arrived(self, frame)
        except ProtocolError as error:
            self._server.blame(self, error)
        except Exception as error:
            self._server.broke(self, error)
        self._note_progress()

    def _note_progress(self) -> None:
        """The clock of the frame that is arriving starts anew with each byte."""
        arriving = not self.closed and self._port.mid_frame
        self._frame_begun_at = self._server.now() if arriving else None


def _write_now(fd: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Writes what the socket takes; returns what is left. A transport would only do so once all that has arrived on all
    connections was handled."""
    try:
        written = os.writev(fd, pieces[:_IOV_MAX])
    except OSError:
        return pieces  # the socket is full, or broken: the transport finds that out, too
    for position, piece in enumerate(pieces):
        if written < len(piece):
            return [memoryview(piece)[written:], *pieces[position + 1 :]]
        written -= len(piece)
    return ()


def _peer_address(transport: asyncio.Transport) -> str:
    """'host:port'; a unix socket's peer has no name."""
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix socket"
