"""What a shard and the clients of its machine share: answers that say where values lie instead of bringing them.

The memory itself is csrc/shm/, on a device csrc/device/; how it gets from one process to the other is psstore.net's.
Main memory is read while the answer is handled, or by a `Borrower` as long as it likes. A device is told to read. The
client has a lease of the values meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from psstore import _core
from psstore.protocol.connection import Connection
from psstore.wire.messages import Block, Share, Shared, encode_body

MAX_LEASED_BYTES = 1 << 30
"""How much of its values a shard lends to one connection at a time, unless it knows what its memory allows: each value
may have to be kept beside the one that has replaced it."""

SHARED_FROM_BYTES = 512 << 10
"""A frame of less goes over the stream: two copies by the kernel cost less than a table that says where values lie, and
the word that they were read. Measured (AMD EPYC, processor time of both ends): 256 KiB took 120 to 155 µs over a
socket, in shared memory 170 (pushed) and 310 (pulled); 1 MiB took 400 to 700, and 225."""

Borrow = Callable[[Shared], _core.ClientMemory | None]
"""A client's way to the files that a shard offers. None: they are out of reach, which is no error."""


class Lender(Protocol):
    """A shard's way to hand its files to clients."""

    def offer(self, connection: Connection, asked: Share) -> Shared:
        """Whoever comes with the ticket gets the files, and the connection its push arena."""

    def withdraw(self, connection: Connection) -> None:
        """The connection is gone, and what it was offered is not to be had any more."""


class Near(Protocol):
    """A client's way to the memory of a device that a connection shares with its shard."""

    def learn(self, blocks: Sequence[Block]) -> bool:
        """Values lie there, too. False: they are out of reach, and so is all of it from now on."""


class OwnShard(NamedTuple):
    """A shard on a device, for a client of the same process: they have the device's queues in common."""

    shard: _core.Shard
    protocol: _core.ServerProtocol
    """The shard's end of the client's connection."""


class Placed(Protocol):
    """A payload that lies where a shard can read it, on a device that both have."""

    @property
    def nbytes(self) -> int: ...

    def told(self, near: Near | None, table: _core.SliceTable, request: int) -> _core.SliceTable | None:
        """The table that says so; None if it is not with `near` that the shard shares it."""

    def in_main_memory(self) -> _core.Segments:
        """A copy, to be sent when the connection was lost that it was placed for. Waits for the device."""


class Landing:
    """A destination for an answer that may be lent; `find` makes main memory for one that comes over the stream."""

    def __init__(self, find: Callable[[_core.SliceTable], _core.Segments]) -> None:
        self._find = find

    def __call__(self, table: _core.SliceTable) -> _core.Segments:
        return self._find(table)


class Lease(NamedTuple):
    """An answer's values, which the shard keeps as they are while they are read where they lie."""

    shard: int
    connection: int
    """Which one of the session's: what was lent over one that is lost may have changed."""
    request: int


class Borrower(ABC):
    """A destination for values that are read where they lie, in main memory, for as long as they are borrowed."""

    @abstractmethod
    def __call__(self, table: _core.SliceTable) -> _core.Segments:
        """Memory for an answer that comes over the stream."""

    @abstractmethod
    def borrow(self, memory: _core.ClientMemory, table: _core.SliceTable, lease: Lease) -> bool:
        """The answer's values are the borrower's until it ends the lease. False: it wants them no more."""


def described(block: _core.SharedBlock) -> Block:
    """For a client, which may import it."""
    return Block(address=block.address, num_bytes=block.nbytes, handle=block.handle)


def blocks_frame(blocks: Sequence[_core.SharedBlock]) -> bytes:
    """The frame that tells a client of a device's blocks."""
    news = Shared(blocks=tuple(map(described, blocks)))
    return _core.encode_frame(_core.OPS["SHARED"], body=encode_body(news))
