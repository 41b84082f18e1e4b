"""Hands shared memory to clients of this machine: SCM_RIGHTS on a unix socket beside the shard's own.

     client                             shard
       │ ticket                           │   one packet each (SOCK_SEQPACKET)
       ├─────────────────────────────────►│
       │ (values, pushes, control)        │   three open files; of a device: `Parcel` and the control file;
       │◄─────────────────────────────────┤   for a standby: the pushes of a client, or values
       │ MAPPED                           │
       ├─────────────────────────────────►│   seals the pushes: nobody can punch holes into them any more
       │ SEALED                           │
       │◄─────────────────────────────────┤

The socket has a random name in Linux's abstract namespace: nothing of it is left in a file system, and who finds it
is on the same machine. Whoever has no ticket, which only the shard's own connections give, gets nothing. Other users
are not even heard, unless the store has a token that they may have, too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psstore import _core
from psstore.errors import PsstoreError
from psstore.net.credentials import is_trusted, peer_user
from psstore.net.listener import Listener
from psstore.protocol.connection import Connection
from psstore.protocol.sharing import described
from psstore.protocol.states import ConnectionState
from psstore.wire.messages import Parcel, Share, Shared, encode_body

TICKET_BYTES = 32

PUSH_ARENA_BYTES = min(4 << 30, _core.machine_memory_bytes())
"""What one connection may push through: addresses, no memory until it is used. What does not fit goes over the stream;
4 GiB hold the gradients of a billion parameters on one shard."""

VISIT_S = 5.0
"""How long a visitor may take. It says two words."""

MAX_VISITORS = 64
"""How many visits there may be at a time. For another one the oldest without a ticket goes: a client that has one shows
it at once. If all have, the other is turned away, and stays with its stream."""

MAPPED, SEALED = b"M", b"S"

_log = logging.getLogger("psstore.server")


class Wrapped(NamedTuple):
    """What a visitor gets."""

    greeting: bytes
    files: Sequence[int]
    mapped: Callable[[], None]
    """Called when it has mapped them."""


class Offer(NamedTuple):
    """What a ticket is good for."""

    visitor: Connection
    owner: Connection | None
    """Whose memory it is; None: the shard's."""
    wrap: Callable[[], Wrapped]


class FdServer(ABC):
    """A `protocol.sharing.Lender` of a shard process: hands each visitor what `wrap` makes for it. Serves on an event
    loop from `start` to `close`."""

    max_arenas = 1
    """One connection may have so many: each has open files of this process, and a range of its addresses."""

    def __init__(self, *, for_all_users: bool = False) -> None:
        """`for_all_users`: of this machine, if they have a ticket; else for this process's own, and root."""
        self.on_shared: Callable[[Connection, _core.PushArena], None] = lambda connection, arena: None
        self._for_all_users = for_all_users
        self._loop: asyncio.AbstractEventLoop
        self._offers: dict[bytes, Offer] = {}
        self._visits: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        """The visits of those that have not shown a ticket, oldest first."""
        self.name = f"psstore-{secrets.token_hex(16)}"
        self._listener: Listener

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(b"\0" + self.name.encode())
        # Each may show its ticket before others come that it would have to go for.
        self._listener = Listener(loop, sock, self._accepted, per_turn=1)

    def close(self) -> None:
        self._listener.close()
        for visit in self._visits:
            visit.cancel()

    @abstractmethod
    def wrap(self, connection: Connection, asked: Share) -> Wrapped:
        """A new push arena of that connection, and what leads to it and to the values."""

    def offer(self, connection: Connection, asked: Share) -> Shared:
        if connection.num_arenas >= self.max_arenas:
            return Shared()
        self.withdraw(connection)
        return self._ticket(Offer(connection, connection, lambda: self._wrap(connection, asked)))

    @property
    def own_file(self) -> int | None:
        return None

    def lend(self, standby: Connection, *, owner: Connection | None, file: int, mapped: Callable[[], None]) -> Shared:
        return self._ticket(Offer(standby, owner, lambda: Wrapped(b"F", [file], mapped)))

    def withdraw(self, connection: Connection) -> None:
        self._offers = {
            ticket: offer
            for ticket, offer in self._offers.items()
            if connection is not offer.visitor and connection is not offer.owner
        }

    def take(self, ticket: bytes) -> Offer | None:
        """What it is good for, once."""
        return self._offers.pop(ticket, None)

    # ---- how ----

    def _wrap(self, connection: Connection, asked: Share) -> Wrapped:
        connection.num_arenas += 1
        return self.wrap(connection, asked)

    def _ticket(self, offer: Offer) -> Shared:
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._offers[ticket] = offer
        return Shared(address=self.name, ticket=ticket)

    def _accepted(self, visitor: socket.socket, address: str) -> None:
        visitor.setblocking(False)
        if self._may_come(visitor) and self._make_room():
            self._begin(visitor)
        else:
            visitor.close()

    def _may_come(self, visitor: socket.socket) -> bool:
        return self._for_all_users or is_trusted(peer_user(visitor))

    def _make_room(self) -> bool:
        """False: all visitors have tickets."""
        if len(self._visits) < MAX_VISITORS:
            return True
        if not self._strangers:
            return False
        visit = self._strangers.pop(next(iter(self._strangers)))
        self._visits.discard(visit)
        visit.cancel()
        return True

    def _begin(self, visitor: socket.socket) -> None:
        visit = self._loop.create_task(self._receive(visitor))
        self._visits.add(visit)
        self._strangers[visitor] = visit
        visit.add_done_callback(self._visits.discard)
        visit.add_done_callback(lambda _: self._forget(visitor))

    def _forget(self, visitor: socket.socket) -> None:
        self._strangers.pop(visitor, None)
        visitor.close()

    async def _receive(self, visitor: socket.socket) -> None:
        try:
            await asyncio.wait_for(self._hand_over(visitor), VISIT_S)
        except (OSError, RuntimeError, PsstoreError, asyncio.TimeoutError) as error:
            _log.warning("a client gets no shared memory, and stays with its stream: %s", error)

    async def _hand_over(self, visitor: socket.socket) -> None:
        offer = self.take(await self._loop.sock_recv(visitor, TICKET_BYTES))
        if offer is None:
            return
        self._strangers.pop(visitor, None)
        wrapped = offer.wrap()
        socket.send_fds(visitor, [wrapped.greeting], wrapped.files)
        heard = await self._loop.sock_recv(visitor, 1)
        if heard == MAPPED and offer.visitor.state is not ConnectionState.CLOSED:  # else it never goes
            wrapped.mapped()
            visitor.send(SEALED)


def share(connection: Connection, arena: _core.PushArena) -> None:
    """The connection's client has mapped it: nobody can punch holes into it any more."""
    arena.seal()
    connection.protocol.share(arena)


class MemoryServer(FdServer):
    """Lends the main memory of a shard: `values`, and push arenas of `push_bytes`."""

    def __init__(
        self, values: _core.ValueArena, *, push_bytes: int = PUSH_ARENA_BYTES, for_all_users: bool = False
    ) -> None:
        super().__init__(for_all_users=for_all_users)
        self.values = values
        self._push_bytes = push_bytes

    @property
    def own_file(self) -> int:
        return self.values.fileno()

    def wrap(self, connection: Connection, asked: Share) -> Wrapped:
        arena = _core.PushArena(self._push_bytes)

        def mapped() -> None:
            share(connection, arena)
            self.on_shared(connection, arena)

        return Wrapped(b"F", [self.values.fileno(), *arena.filenos()], mapped)


class DeviceMemoryServer(FdServer):
    """Lends the memory of a shard's device: push arenas of the size that is asked for. Where values lie is told when
    they are asked for."""

    max_arenas = 64
    """A client asks for another one, larger by half, when what it has is too small."""

    def __init__(self, shard: _core.Shard, *, for_all_users: bool = False) -> None:
        super().__init__(for_all_users=for_all_users)
        self._shard = shard
        self._device = shard.device_identity

    def offer(self, connection: Connection, asked: Share) -> Shared:
        return super().offer(connection, asked) if asked.push_bytes > 0 else Shared(device=self._device)

    def wrap(self, connection: Connection, asked: Share) -> Wrapped:
        arena, address = self._shard.make_push_arena(min(asked.push_bytes, PUSH_ARENA_BYTES))
        block = next(b for b in self._shard.shared_blocks(0) if b.address <= address < b.address + b.nbytes)
        parcel = Parcel(
            address=address,
            num_bytes=arena.nbytes,
            block=described(block),
        )
        return Wrapped(encode_body(parcel), arena.filenos()[1:], lambda: share(connection, arena))
