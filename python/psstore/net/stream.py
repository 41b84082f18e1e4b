"""A connected socket on a `ManualLoop`: asyncio's transport, as far as psstore's client uses it.

What is written goes to the kernel at once, from where it lies; what the kernel does not take waits. The protocol is a
BufferedProtocol, whose memory the kernel writes to.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from psstore.net.sockets import sleep_in_recv

if TYPE_CHECKING:
    from psstore.net.manual_loop import ManualLoop

MAX_PIECES = 1024
"""Linux's UIO_MAXIOV: pieces of one sendmsg."""

READS_PER_TURN = 16
"""Reads that one connection has before others have theirs: 4 MiB at most, as slices have 256 KiB."""


class Stream(asyncio.Transport):
    """Calls its protocol as asyncio's own transports do. Made by `ManualLoop.create_connection`."""

    def __init__(self, loop: ManualLoop, sock: socket.socket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._loop = loop
        self._socket = sock
        self._fd = sock.fileno()
        self._protocol = protocol
        self.unsent: deque[memoryview] = deque()
        """What the kernel did not take yet: where it lies, be it ever so much."""
        self.receive_first: Callable[[], bool] | None = None
        """The protocol's method that receives by itself, and returns whether that was all for this turn."""
        self._closing = False
        sleep_in_recv(sock)
        loop.watch(self._fd, select.EPOLLIN, self._on_events)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def is_closing(self) -> bool:
        return self._closing

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Sends the pieces, in order; memory that is not sent yet must stay as it is."""
        if self._closing:
            return
        pieces = list_of_data if isinstance(list_of_data, (list, tuple)) else list(list_of_data)
        if not self.unsent:
            sent = self._try(pieces[:MAX_PIECES])
            if sent == sum(map(len, pieces)) or self._closing:
                return
            self._keep(pieces, sent)
            self._send()  # the kernel is full, or there were too many pieces for one call
        else:
            self._keep(pieces, 0)
        self._mark()

    def resume(self) -> None:
        """Goes on after compiled code has sent, and put what the kernel did not take at the end of `unsent`."""
        self._mark()

    def abort(self) -> None:
        """Closes now; `connection_lost` is called in the next turn."""
        self._lose(None)

    # ---- sending ----

    def _try(self, pieces: Any) -> int:
        """Sends once without blocking. Returns how many bytes the kernel has taken."""
        try:
            return self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._lose(error)
            return 0

    def _keep(self, pieces: Iterable[Any], sent: int) -> None:
        for piece in pieces:
            view = memoryview(piece)
            if sent < len(view):
                self.unsent.append(view[sent:])
            sent = max(0, sent - len(view))

    def _send(self) -> None:
        """Sends from `unsent` until it is empty or the kernel takes no more."""
        while self.unsent:
            offered = list(itertools.islice(self.unsent, MAX_PIECES))
            sent = self._try(offered)
            whole = sent == sum(map(len, offered))
            while self.unsent and sent >= len(self.unsent[0]):
                sent -= len(self.unsent.popleft())
            if sent:
                self.unsent[0] = self.unsent[0][sent:]
            if not whole:
                return

    def _mark(self) -> None:
        """Has the loop say when there is room, if something waits for it."""
        if self._closing:
            return
        mask = select.EPOLLIN | select.EPOLLOUT if self.unsent else select.EPOLLIN
        self._loop.watch(self._fd, mask, self._on_events)

    # ---- what the loop calls ----

    def _on_events(self, mask: int) -> None:
        if mask & ~select.EPOLLOUT:
            self._receive()
        if mask & select.EPOLLOUT and not self._closing:
            self._send()
            self._mark()

    def _receive(self) -> None:
        if self.receive_first is not None and self.receive_first():
            return
        for _ in range(READS_PER_TURN):
            if self._closing:
                return
            buffer = memoryview(self._protocol.get_buffer(-1))
            try:
                received = self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lose(error)
                return
            if not received:
                self._lose(None)
                return
            self._protocol.buffer_updated(received)
            if received < len(buffer):
                return  # that was all

    def _lose(self, error: OSError | None) -> None:
        if not self._closing:
            self._closing = True
            self._loop.forget(self._fd)
            self.unsent.clear()
            self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        self._socket.close()
        self._protocol.connection_lost(error)
