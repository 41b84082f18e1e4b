"""What a client asks of a shard, on whatever connection, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from psstore import _core
from psstore.errors import PsstoreError
from psstore.protocol.sharing import Lease, Placed
from psstore.wire import messages as m

OPS = _core.OPS

NUMBERED = ("ASSIGN", "ADD", "RESTORE")
"""Writes that the shard takes in the order of their sequence, each once."""

READS = (OPS["PULL"], OPS["NORM"])
"""Requests whose reply has a payload."""

Destination = _core.Segments | Callable[[_core.SliceTable], _core.Segments]
"""Memory to receive into, or what finds it when the table of the answer says how many bytes came of each slice. It may
raise ProtocolError, and is asked again if the connection is lost before all are here. A `Landing` may get an answer
whose values are lent instead, and a `Borrower` is lent them."""

Payload = _core.Segments | Placed
"""What to send; its memory must stay as it is until the answer."""

PATIENT = (m.Commit, m.Finish, m.Barrier, m.Carry)
"""Bodies that say how long the shard may wait."""

REPLIES: dict[int, type[m.Message] | None] = {
    OPS["DEFINED"]: None,
    OPS["ATTACHED"]: m.Attached,
    OPS["ATTESTED"]: m.Attested,
    OPS["JOINED"]: m.Joined,
    OPS["CREATED"]: m.Created,
    OPS["READIED"]: None,
    OPS["COMMITTED"]: m.Committed,
    OPS["FINISHED"]: m.Finished,
    OPS["DECIDED"]: m.Decided,
    OPS["DESCRIBED"]: m.Described,
    OPS["PASSED"]: None,
    OPS["LEFT"]: None,
    OPS["DROPPED"]: m.Dropped,
    OPS["STATISTICS"]: m.Statistics,
    OPS["SHARED"]: m.Shared,
}
"""Replies that are control messages, and their bodies, None: no body. Any other reply becomes an `Answer`."""


class Future(Protocol):
    """What an awaiting caller holds: asyncio's future in production, the simulator's in tests."""

    def __await__(self) -> Generator[Any, Any, Any]: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def done(self) -> bool: ...


class IgnoredFuture:
    """The future of a request whose answer nobody waits for."""

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()

    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def done(self) -> bool:
        return True


IGNORED = IgnoredFuture()


class Request(Struct, kw_only=True):
    """One request until its answer is there."""

    id: int
    op: int
    future: Future
    deadline: float
    started: float
    table: _core.SliceTable | None = None
    body: m.Message | None = None
    """A `Carry` is completed with decisions each time it is sent."""
    payload: Payload | None = None
    destination: Destination | None = None
    """Where the answer's payload goes."""
    round: int = 0
    sequence: int = 0
    scaled: int = 0
    """The decision whose scale it carried when it was last sent; 0: none."""

    def finish(self, result: object) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: PsstoreError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Answer(NamedTuple):
    """What a data request's future gets."""

    table: _core.SliceTable
    version: int
    """The shard's version when it answered."""
    lease: Lease | None = None
    """If not None, the values are to be read where they lie, by the caller that passed a `Landing`; then it calls
    `Session.end_lease`."""
