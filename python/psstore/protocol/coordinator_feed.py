"""Everything that a coordinator is told, as records: the same ones in the same order make the same coordinator.

A shard's standby is sent them before anybody hears what they led to (standby.py), so that it knows every decision that
anybody was told.
"""

from __future__ import annotations

from psstore import _core
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.replies import Reply
from psstore.wire import messages as m
from psstore.wire import records as r

OPS = _core.OPS

CONTROL: dict[int, type[m.Message] | None] = {
    OPS["JOIN"]: m.Join,
    OPS["CREATE"]: m.Create,
    OPS["READY"]: m.Ready,
    OPS["COMMIT"]: m.Commit,
    OPS["FINISH"]: m.Finish,
    OPS["DECISIONS"]: m.Decisions,
    OPS["DESCRIBE"]: m.Describe,
    OPS["BARRIER"]: m.Barrier,
    OPS["LEAVE"]: None,
    OPS["DROP"]: m.Drop,
    OPS["HAND_IN"]: m.HandIn,
    OPS["HAND_BACK"]: m.HandBack,
    OPS["STOP"]: m.Stop,
}
"""The coordinator's operations and their bodies."""

CHANGES_NOTHING = frozenset((OPS["DESCRIBE"], OPS["DECISIONS"]))
"""Operations that a standby need not hear of."""

Told = r.ClientCame | r.ClientWent | r.WorkerBeat | r.ClientAsked | r.ShardSaid | r.TimePassed


def feed(coordinator: Coordinator, told: Told) -> list[Reply]:
    """What it answers. Raises PsstoreError for a request that fails; what it brought has happened all the same."""
    match told:
        case r.ClientAsked():
            kind = CONTROL[told.op]
            message = m.decode_body(kind, told.body) if kind is not None else None
            return coordinator.handle(told.conn, told.request, message, client=told.client, now=told.now)
        case r.ShardSaid():
            return coordinator.applied(told.fact, told.now)
        case r.WorkerBeat():
            coordinator.heartbeat(
                told.conn, client=told.client, rank=told.rank, incarnation=told.incarnation, now=told.now
            )
        case r.TimePassed():
            return coordinator.tick(told.now)
        case r.ClientCame():
            coordinator.attached(told.conn, told.client, told.now)
        case r.ClientWent():
            coordinator.detached(told.conn, told.now)
    return []
