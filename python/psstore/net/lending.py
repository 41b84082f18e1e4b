"""Hands the files of shared memory to clients of this machine: SCM_RIGHTS on a unix socket beside the shard's own.

     client                             shard
       │ ticket                           │   one packet each (SOCK_SEQPACKET)
       ├─────────────────────────────────►│
       │ (values, pushes, control)        │   three open files
       │◄─────────────────────────────────┤
       │ MAPPED                           │
       ├─────────────────────────────────►│   seals the pushes: nobody can punch holes into them any more
       │ SEALED                           │
       │◄─────────────────────────────────┤

The socket has a random name in Linux's abstract namespace: nothing of it is left in a file system, and who finds it
is on the same machine. Whoever has no ticket, which only the shard's own connections give, gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket

from psstore import _core
from psstore.protocol.connection import Connection
from psstore.wire.messages import Shared

TICKET_BYTES = 32

PUSH_ARENA_BYTES = min(4 << 30, _core.machine_memory_bytes())
"""Of one connection: addresses, no memory until it is used. What does not fit goes over the stream; 4 GiB hold the
gradients of a billion parameters on one shard."""

VISIT_S = 5.0
"""How long a visitor may take. It says two words."""

MAX_VISITORS = 64
"""At a time; others are turned away, and stay with their streams. Every process of this machine can come here."""

MAPPED, SEALED = b"M", b"S"

_log = logging.getLogger("psstore.server")


class FileLender:
    """The `protocol.sharing.Lender` of a shard process: hands out `values`, and to each visitor a new push arena of
    `push_bytes`. Serves on an event loop from `start` to `close`."""

    def __init__(self, values: _core.ValueArena, *, push_bytes: int = PUSH_ARENA_BYTES) -> None:
        self.values = values
        self._push_bytes = push_bytes
        self._loop: asyncio.AbstractEventLoop
        self._offers: dict[bytes, Connection] = {}
        self._visits: set[asyncio.Task[None]] = set()
        self._name = f"psstore-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind(b"\0" + self._name.encode())
        self._socket.listen(MAX_VISITORS)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for visit in self._visits:
            visit.cancel()

    def offer(self, connection: Connection) -> Shared:
        self.withdraw(connection)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._offers[ticket] = connection
        return Shared(address=self._name, ticket=ticket)

    def withdraw(self, connection: Connection) -> None:
        self._offers = {ticket: other for ticket, other in self._offers.items() if other is not connection}

    # ---- how ----

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already, or there are too many open files
            visitor, _ = self._socket.accept()
            visitor.setblocking(False)
            if len(self._visits) >= MAX_VISITORS:
                visitor.close()
                return
            visit = self._loop.create_task(self._receive(visitor))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)

    async def _receive(self, visitor: socket.socket) -> None:
        with visitor:
            try:
                await asyncio.wait_for(self._hand_over(visitor), VISIT_S)
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:
                _log.warning("a client gets no shared memory, and stays with its stream: %s", error)

    async def _hand_over(self, visitor: socket.socket) -> None:
        connection = self._offers.pop(await self._loop.sock_recv(visitor, TICKET_BYTES), None)
        if connection is None:
            return
        arena = _core.PushArena(self._push_bytes)
        socket.send_fds(visitor, [b"F"], [self.values.fileno(), *arena.filenos()])
        if await self._loop.sock_recv(visitor, 1) == MAPPED:
            arena.seal()
            connection.arena = arena
            visitor.send(SEALED)
