"""The lives of a client's link, a server's connection, a worker and a standby: one table each, (state, event) → state.

Everything that changes one of these states is here. Who owns a state assigns what its table says, and nothing else;
docs/protocol.md shows the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from psstore.errors import InternalError


class Entry(Enum):
    """A state or an event."""

    __hash__ = object.__hash__  # there is one object of each; Enum's own is a function of Python, and takes longer


State = TypeVar("State", bound=Entry)
Event = TypeVar("Event", bound=Entry)


class StateTable(Generic[State, Event]):
    """What each event makes of each state. An event that a state does not list cannot happen in it."""

    def __init__(self, rows: Mapping[State, Mapping[Event, State]]) -> None:
        self.rows = rows

    def after(self, state: State, event: Event) -> State:
        """The state that follows. Raises InternalError if the event cannot happen in this state."""
        try:
            return self.rows[state][event]
        except KeyError:
            kind = type(state).__name__
            raise InternalError(f"{kind} {state.name}: '{event.value}' cannot happen here; please report it") from None


# ---- a client's link to one shard: Session.state ------------------------------------------------------


class LinkState(Entry):
    """Only an UP link sends requests; a FAILED one refuses them, and ignores what still comes."""

    DOWN = "down"
    HANDSHAKE = "handshake"
    UP = "up"
    FAILED = "failed"


class LinkEvent(Entry):
    """What happens to a link, in words for docs/protocol.md."""

    CONNECTED = "connected"
    WELCOMED = "`WELCOME`"
    DISCONNECTED = "connection lost"
    GIVEN_UP = "given up"


LINK = StateTable(
    {
        LinkState.DOWN: {
            LinkEvent.CONNECTED: LinkState.HANDSHAKE,
            LinkEvent.DISCONNECTED: LinkState.DOWN,  # lost before anybody could say hello on it
            LinkEvent.GIVEN_UP: LinkState.FAILED,
        },
        LinkState.HANDSHAKE: {
            LinkEvent.WELCOMED: LinkState.UP,
            LinkEvent.DISCONNECTED: LinkState.DOWN,
            LinkEvent.GIVEN_UP: LinkState.FAILED,
        },
        LinkState.UP: {
            LinkEvent.DISCONNECTED: LinkState.DOWN,
            LinkEvent.GIVEN_UP: LinkState.FAILED,
        },
        LinkState.FAILED: {
            LinkEvent.CONNECTED: LinkState.FAILED,  # a connection that was being made when the link was given up
            LinkEvent.DISCONNECTED: LinkState.FAILED,
            LinkEvent.GIVEN_UP: LinkState.FAILED,
        },
    }
)


# ---- a server's connection: Connection.state ----------------------------------------------------------


class ConnectionState(Entry):
    """HELLO and AUTH are named after the frame that is awaited; requests are taken when OPEN."""

    HELLO = "hello"
    AUTH = "auth"
    OPEN = "open"
    CLOSED = "closed"


class ConnectionEvent(Entry):
    """What happens to a connection, in words for docs/protocol.md. Any other frame before OPEN is the peer's error."""

    ADMITTED = "`HELLO`, no token needed"
    CHALLENGED = "`HELLO`, token needed"
    PROVED = "`AUTH` with the right proof"
    ENDED = "connection ends"


CONNECTION = StateTable(
    {
        ConnectionState.HELLO: {
            ConnectionEvent.ADMITTED: ConnectionState.OPEN,
            ConnectionEvent.CHALLENGED: ConnectionState.AUTH,
            ConnectionEvent.ENDED: ConnectionState.CLOSED,
        },
        ConnectionState.AUTH: {
            ConnectionEvent.PROVED: ConnectionState.OPEN,
            ConnectionEvent.ENDED: ConnectionState.CLOSED,
        },
        ConnectionState.OPEN: {ConnectionEvent.ENDED: ConnectionState.CLOSED},
        ConnectionState.CLOSED: {},
    }
)


# ---- one life of a worker: Worker.state ---------------------------------------------------------------


class WorkerState(Entry):
    """LOST is a suspicion, REFUSED is final: both count as lost for the others, who wait for the next life."""

    ABSENT = "absent"
    LIVE = "live"
    LOST = "lost"
    REFUSED = "refused"
    LEFT = "left"
    REPLACED = "replaced"


class WorkerEvent(Entry):
    """What happens to a worker, in words for docs/protocol.md."""

    JOINED = "`JOIN`"
    SILENT = "silent for too long"
    HEARD = "any word from it"
    REFUSED = "contribution missing"
    LEAVES = "`LEAVE`"
    REPLACED = "next life joins"


WORKER = StateTable(
    {
        WorkerState.ABSENT: {WorkerEvent.JOINED: WorkerState.LIVE},
        WorkerState.LIVE: {
            WorkerEvent.SILENT: WorkerState.LOST,
            WorkerEvent.REFUSED: WorkerState.REFUSED,
            WorkerEvent.LEAVES: WorkerState.LEFT,
            WorkerEvent.REPLACED: WorkerState.REPLACED,  # it has no connection any more
        },
        WorkerState.LOST: {
            WorkerEvent.HEARD: WorkerState.LIVE,
            WorkerEvent.REFUSED: WorkerState.REFUSED,
            WorkerEvent.LEAVES: WorkerState.LEFT,
            WorkerEvent.REPLACED: WorkerState.REPLACED,
        },
        WorkerState.REFUSED: {
            WorkerEvent.LEAVES: WorkerState.LEFT,
            WorkerEvent.REPLACED: WorkerState.REPLACED,
        },
        WorkerState.LEFT: {
            WorkerEvent.LEAVES: WorkerState.LEFT,  # sent again
            WorkerEvent.REPLACED: WorkerState.REPLACED,
        },
        WorkerState.REPLACED: {},
    }
)


# ---- a shard's standby: Standby.state -------------------------------------------------------------------


class StandbyState(Entry):
    """One that is IN_SYNC has all that anybody was told, and may lead; all others may not. One that is RETIRED never
    will."""

    HANDSHAKE = "handshake"
    ASKING = "asking"
    FILLING = "filling"
    FOLLOWING = "following"
    IN_SYNC = "in sync"
    RETIRED = "retired"


class StandbyEvent(Entry):
    """What its shard says to a standby, in words for docs/protocol.md, and that it is told to end. Anything else that
    the shard says is its end."""

    WELCOMED = "`WELCOME`"
    FOLLOWED = "`FOLLOWED`"
    FILLED = "`FillEnds`"
    TOLD = "`InSync`"
    ENDS = "is told to end"


STANDBY = StateTable(
    {
        StandbyState.HANDSHAKE: {StandbyEvent.WELCOMED: StandbyState.ASKING},
        StandbyState.ASKING: {StandbyEvent.FOLLOWED: StandbyState.FILLING},
        StandbyState.FILLING: {StandbyEvent.FILLED: StandbyState.FOLLOWING, StandbyEvent.ENDS: StandbyState.RETIRED},
        StandbyState.FOLLOWING: {StandbyEvent.TOLD: StandbyState.IN_SYNC, StandbyEvent.ENDS: StandbyState.RETIRED},
        StandbyState.IN_SYNC: {StandbyEvent.ENDS: StandbyState.RETIRED},
        StandbyState.RETIRED: {},
    }
)
