"""What a client asks of a shard, on whatever connection, and what it gets. The requests themselves, until they are
answered, are csrc/client's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from psstore import _core
from psstore.protocol.sharing import Lease, Placed
from psstore.wire import messages as m

OPS = _core.OPS

READS = (OPS["PULL"], OPS["NORM"], OPS["PULL_ROWS"], OPS["LIST_ROWS"])
"""Requests whose reply has a payload."""

Destination = _core.Segments | Callable[[_core.SliceTable], _core.Segments]
"""Memory to receive into, or what finds it when the table of the answer says how many bytes came of each slice. It may
raise ProtocolError, and is asked again if the connection is lost before all are here. A `Landing` may get an answer
whose values are lent instead, and a `Borrower` is lent them."""

Payload = _core.Segments | Placed
"""What to send; its memory must stay as it is until the answer."""

PATIENT = frozenset((m.Commit, m.Finish, m.Barrier))
"""Bodies that say how long the shard may wait."""


def encoded(body: m.Message, waited_s: float) -> bytes:
    """The body of a request that has waited for so long. The shard's wait began with ours, however often it is asked:
    its error says more, and must come first."""
    if waited_s > 0.0 and type(body) in PATIENT:
        body = replace(body, wait_s=max(0.0, body.wait_s - waited_s))  # type: ignore[attr-defined]
    return m.encode_body(body)


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
    OPS["HANDED_IN"]: None,
    OPS["HANDED_BACK"]: m.HandedBack,
    OPS["STOPPED"]: m.Stopped,
    OPS["BEGUN"]: m.Begun,
    OPS["SAVED"]: m.Saved,
    OPS["KEPT"]: m.Kept,
    OPS["PROMOTED"]: None,
    OPS["WORD"]: m.Word,
    OPS["RESHARDED"]: None,
    OPS["FROZEN"]: m.Frozen,
    OPS["STATISTICS"]: m.Statistics,
    OPS["SHARED"]: m.Shared,
    OPS["FREED"]: None,
}
"""Replies that are control messages, and their bodies, None: no body. Any other reply becomes an `Answer`."""


def understood(op: int, body: bytes) -> object:
    """What the future of a request gets whose reply is a control message. Raises BadBody."""
    kind = REPLIES[op]
    return None if kind is None else m.decode_body(kind, body)


class Future(Protocol):
    """What an awaiting caller holds: asyncio's future in production, the simulator's in tests."""

    def __await__(self) -> Generator[Any, Any, Any]: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def cancel(self) -> object:
        """Nobody waits for it any more. Does nothing if it is done."""

    def cancelled(self) -> bool: ...
    def done(self) -> bool: ...


class IgnoredFuture:
    """The future of a request whose answer nobody waits for."""

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()

    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def cancel(self) -> None: ...
    def cancelled(self) -> bool:
        return True

    def done(self) -> bool:
        return True


IGNORED = IgnoredFuture()


class Answer(NamedTuple):
    """What a data request's future gets."""

    table: _core.SliceTable
    version: int = 0
    """The shard's version when it answered. What a `PULL` reads is as of that decision, unless it named another one."""
    lease: Lease | None = None
    """If not None, the values are to be read where they lie, by the caller that passed a `Landing`; then it calls
    `Session.end_lease`."""
    restored: bool = False
    """Trained values were restored on the shard since that decision, when it answered a `PULL`."""
