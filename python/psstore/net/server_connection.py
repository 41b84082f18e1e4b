"""One accepted connection: bytes to frames, and frames to its server, at the pace at which its peer reads.

While the peer does not read its replies, nothing more is read from it and frames that have arrived wait in
the decoder: what it can make the server hold is one high-water mark, one reply and one receive buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from psstore import _core
from psstore.errors import HandshakeTimeout, ProtocolError, PsstoreError
from psstore.net import limits
from psstore.net.sockets import tune
from psstore.protocol.frames import Piece, failure_frame

if TYPE_CHECKING:
    from psstore.net.server import Server

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
        self._decoder = _core.FrameDecoder(max_body_bytes=_core.PRE_AUTH_MAX_BYTES, max_payload_bytes=0)
        self._open = False
        """The handshake is over, the decoder's limits are the real ones."""
        self._paused = False
        """The peer does not read what we send."""
        self._frame_begun_at: float | None = None
        """When the frame began to arrive that has not arrived yet; None between frames."""
        self._linger: asyncio.TimerHandle | None = None

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.address = _peer_address(transport)
        tune(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=limits.WRITE_HIGH_BYTES, low=limits.WRITE_LOW_BYTES)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._linger is not None:
            self._linger.cancel()
        self._server.lost(self, exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _discarded if self.closed else self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        if not self.closed:
            self._decoder.buffer_updated(nbytes)
            self._take_frames()

    def eof_received(self) -> None:
        """Returns None: the transport sends what is left, and closes."""
        if not self.closed and self._decoder.mid_frame:
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

    # ---- called by the server ----

    def send(self, pieces: Sequence[Piece]) -> None:
        """One write of all pieces, which stay referenced until they are out. Copies none with uvloop, or with
        asyncio from Python 3.12 on."""
        if not self.closed and not self._transport.is_closing():
            self._transport.writelines(pieces)

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
                frame = self._decoder.next_frame()
                if frame is None:
                    break
                if frame.complete:
                    self._server.arrived(self, frame)
                    if not self._open:
                        self._raise_limits()
                else:
                    self._receive_payload(frame)
        except ProtocolError as error:
            self._server.blame(self, error)
        except Exception as error:
            self._server.broke(self, error)
        self._note_progress()

    def _receive_payload(self, frame: _core.Frame) -> None:
        destination = self._server.begun(self, frame)
        if destination is None:
            self._decoder.discard()
        else:
            self._decoder.accept(destination)

    def _raise_limits(self) -> None:
        if self._server.is_open(self):
            self._open = True
            self._decoder.set_limits(max_body_bytes=_core.MAX_BODY_BYTES, max_payload_bytes=_core.MAX_PAYLOAD_BYTES)

    def _note_progress(self) -> None:
        """The clock of the frame that is arriving starts anew with each byte."""
        arriving = not self.closed and self._decoder.mid_frame
        self._frame_begun_at = self._server.now() if arriving else None


def _peer_address(transport: asyncio.Transport) -> str:
    """'host:port'; a unix socket's peer has no name."""
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix socket"
