"""One connection of a client to a shard: bytes to frames for the session, the session's frames to bytes.

Large payloads are received where they are to live; what is sent is never copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from psstore import _core
from psstore.errors import InternalError, PsstoreError
from psstore.net.limits import RELEASE_S, SMALL_WRITE_BYTES
from psstore.net.sockets import taken_bytes, tune
from psstore.net.stream import Stream
from psstore.protocol.frames import Piece
from psstore.protocol.session import Session, is_final
from psstore.protocol.states import LinkState


class ClientConnection(asyncio.BufferedProtocol):
    """What the event loop calls as bytes come and go. Its session outlives it."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self.session = session
        self.up: asyncio.Future[None] = loop.create_future()
        """Done when the handshake is over."""
        self.lost: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._decoder = _core.FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._unsent: deque[Sequence[Piece]] = deque()
        self._release_timer: asyncio.TimerHandle | None = None

    # ---- what the event loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        tune(transport.get_extra_info("socket"))
        self.session.connected()
        self.flush()

    def receive(self) -> bool:
        """Receives without the event loop what answers calls that were started. False: it has to look, too."""
        now = self._loop.time()
        self.session.line.last_heard = now  # part of an answer is a word, too, and may be all that comes for long
        try:
            if self.session.line.receive(now):
                self._tell_what_was_read()
                return True
        except Exception as error:
            self._blunder(error)
            return True
        self.buffer_updated(0)
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        now = self._loop.time()
        if nbytes:
            self.session.line.last_heard = now
        try:
            self._decoder.buffer_updated(nbytes)
            self._take_frames(now)
        except PsstoreError as error:
            self._fail(error)
        except Exception as error:
            self._blunder(error)
        else:
            self.flush()
            self._release_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.session.state is LinkState.UP:
            self.buffer_updated(0)  # who receives without the loop may have left what came before the end
        self._unsent.clear()
        if self._release_timer is not None:
            self._release_timer.cancel()
        self.session.disconnected()
        if not self.lost.done():
            self.lost.set_result(None)

    # ---- what the link calls ----

    def flush(self) -> None:
        """Writes what the session has to say, in order."""
        self._unsent.extend(self.session.take_output())
        if self._transport is None or self._transport.is_closing():
            return
        while self._unsent:
            self._transport.writelines(self._next_write())

    def exchange(self, lane: _core.FastLane) -> None:
        """`flush`, and waits for the answer to what the session asks, if that is all and as long as it may be near."""
        output = self.session.take_output()
        answered = None
        if len(output) == 1 and len(output[0]) == 1 and not self._unsent:
            answered = lane.exchange(self.session.line, bytes(output[0][0]))
        if answered is None:
            self._unsent.extend(output)
            self.flush()
        elif answered:
            self.buffer_updated(0)
        else:
            self.resume()

    def resume(self) -> None:
        """Goes on where somebody stopped who has sent and received without this."""
        if isinstance(self._transport, Stream) and not self._transport.is_closing():
            self._transport.resume()
            self.buffer_updated(0)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        fd: int = self._socket.fileno()
        return fd

    def taken_bytes(self) -> int | None:
        """What the far end's system has taken so far; None if that is all, or it does not tell."""
        return taken_bytes(self._socket)

    # ---- how ----

    @property
    def _socket(self) -> Any:
        assert self._transport is not None
        return self._transport.get_extra_info("socket")

    def _next_write(self) -> list[Piece]:
        """A frame with what is small before it, and the heads behind it: the shard is not woken for each."""
        pieces = list(self._unsent.popleft())
        while self._unsent and (len(self._unsent[0]) == 1 or sum(map(len, pieces)) < SMALL_WRITE_BYTES):
            pieces += self._unsent.popleft()
        return pieces

    def _take_frames(self, now: float) -> None:
        line = self.session.line
        while (frame := line.next_frame(self._decoder, now)) is not None:
            if frame.complete:
                self.session.frame(frame, now)
            elif (destination := self.session.head(frame)) is not None:
                self._decoder.accept(destination)
            else:
                self._decoder.discard()
        if self.session.state is LinkState.UP and not self.up.done():
            self.up.set_result(None)
            if isinstance(self._transport, Stream):
                stream = self._transport
                stream.receive_first = self.receive
                self.session.line.connect(self.fileno(), self._decoder, stream.unsent)

    def _tell_what_was_read(self) -> None:
        """By calls that were started, without the session: at once where somebody may wait for it."""
        if self.session.owes_releases:
            if not self.session.keeps_releases:
                self.session.release()
                self.flush()
            self._release_later()

    def _release_later(self) -> None:
        if self.session.owes_releases and self._release_timer is None:
            self.session.line.release_is_due = True
            self._release_timer = self._loop.call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._release_timer, self.session.line.release_is_due = None, False
        self.session.release()
        self.flush()

    def _blunder(self, error: Exception) -> None:
        """Ours, whatever it is: requests end with it, the program goes on."""
        self._fail(InternalError(f"while reading from {self.session.address}: {error!r}"))

    def _fail(self, error: PsstoreError) -> None:
        if is_final(error):
            self.session.give_up(error)
        self.session.last_word = error.message
        self.abort()
