"""Shared memory of a shard and the clients of its machine: answers that say where values lie instead of bringing them.

The memory itself is csrc/shm/, on a device csrc/device/; how it gets from one process to the other is psstore.net's. A
client has a lease of the values as long as it reads them. In main memory it reads while it handles the answer, or for
as long as a `Borrower` likes. On a device it has a queue read them; what a client does there is
psstore.client.device's, which implements `Near` and `Placed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from psstore import _core
from psstore.protocol.connection import Connection
from psstore.wire.messages import Block, Share, Shared, encode_body

MAX_LEASED_BYTES = 1 << 30
"""Bytes of values that one connection may read where they lie, unless a shard knows what its memory allows: each may
have to be kept beside the value that has replaced it."""

SHARED_FROM_BYTES = _core.SHARED_FROM_BYTES
"""Smallest frame whose payload is shared. A smaller one goes over the stream: two copies by the kernel cost less than a
table that says where values lie, and the word that they were read. Measured (AMD EPYC, processor time of both ends):
256 KiB took 120 to 155 µs over a socket, in shared memory 170 (pushed) and 310 (pulled); 1 MiB took 400 to 700, and
225."""


class Lease(NamedTuple):
    """Names an answer whose values the shard keeps as they are while they are read where they lie."""

    shard: int
    connection: int
    """Number of the session's connection: values that were leased over one that is lost may have changed."""
    request: int


# ---- main memory -----------------------------------------------------------------------------------

Borrow = Callable[[Shared], _core.ClientMemory | None]
"""Gets a client the files that a shard offers. None: they are out of reach, which is no error."""


See = Callable[[Shared, int], _core.SeenMemory | None]
"""Gets a standby the memory that its shard offers, from an address on. None: it is out of reach, which is no error."""


class Lender(Protocol):
    """Hands a shard's files to clients."""

    on_shared: Callable[[Connection, _core.PushArena], None]
    """Called when a client pushes through that main memory from now on."""

    def offer(self, connection: Connection, asked: Share) -> Shared:
        """Makes a push arena for the connection, and a ticket: a client that comes with it gets the files."""

    @property
    def own_file(self) -> int | None:
        """The main memory in which the shard keeps what it receives; None: there is none."""

    def lend(self, standby: Connection, *, owner: Connection | None, file: int, mapped: Callable[[], None]) -> Shared:
        """Makes a ticket for a standby, which gets the file. `owner`: the client whose memory it is, or None. `mapped`:
        called when the standby has it."""

    def withdraw(self, connection: Connection) -> None:
        """Ends the offers to a connection that is gone, and of what is its."""


class Borrower(ABC):
    """A destination for values that are read where they lie, in main memory, for as long as they are borrowed."""

    @abstractmethod
    def __call__(self, table: _core.SliceTable) -> _core.Segments:
        """Memory for an answer that comes over the stream."""

    @abstractmethod
    def borrow(self, memory: _core.ClientMemory, table: _core.SliceTable, lease: Lease) -> bool:
        """Takes the answer's values, until the borrower ends the lease. False: it wants them no more."""


# ---- devices ---------------------------------------------------------------------------------------


class OwnShard(NamedTuple):
    """A shard on a device, as a client of the same process has it: they share the device's queues."""

    shard: _core.Shard
    protocol: _core.ServerProtocol
    """The shard's end of the client's connection."""


class Near(Protocol):
    """A client's side of the device memory that a connection shares with its shard."""

    def learn(self, blocks: Sequence[Block]) -> bool:
        """Adds blocks in which values lie, too. False: they are out of reach, and so is all of it from now on."""


class Placed(Protocol):
    """A payload that a client has placed where its shard can read it, on a device that they share."""

    @property
    def nbytes(self) -> int: ...

    def told(self, near: Near | None, table: _core.SliceTable, request: int) -> _core.SliceTable | None:
        """Returns the table that says where the payload lies; None if it was placed for another connection."""

    def in_main_memory(self) -> _core.Segments:
        """Returns a copy, to be sent when the connection was lost that it was placed for. Waits for the device."""


class Landing:
    """A destination for an answer whose values may be leased on a device. `find`: makes main memory for one that comes
    over the stream."""

    def __init__(self, find: Callable[[_core.SliceTable], _core.Segments]) -> None:
        self._find = find

    def __call__(self, table: _core.SliceTable) -> _core.Segments:
        return self._find(table)


def described(block: _core.SharedBlock) -> Block:
    """Describes a block for a client, which may import it."""
    return Block(address=block.address, num_bytes=block.nbytes, handle=block.handle)


def blocks_frame(blocks: Sequence[_core.SharedBlock]) -> bytes:
    """Encodes the frame that tells a client of a device's blocks."""
    news = Shared(blocks=tuple(map(described, blocks)))
    return _core.encode_frame(_core.OPS["SHARED"], body=encode_body(news))
