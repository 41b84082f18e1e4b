"""The coordinator's part of a checkpoint: what it is at a decision, and how it goes on from there in another life."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from psstore.checkpoint.state import (
    ClosedRecord,
    HyperRecord,
    MembersRecord,
    NormsRecord,
    RefusalRecord,
    StoreState,
    TensorRecord,
    WorkerRecord,
)
from psstore.partition.placement import Unplaced, place_tensors
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.hypers import Chosen
from psstore.protocol.membership import Worker
from psstore.protocol.rounds import Closed
from psstore.protocol.states import WorkerState
from psstore.types import Consistency, Tensor
from psstore.wire.messages import Members, Refusal, change_of_members, members_after

LINEAGE = "lineage"
"""Entry of `StoreState.extra`: id of the first of the runs of which each was restored from the one before."""


def store_state(coordinator: Coordinator, *, lineage: str) -> StoreState:
    """As it is now, at its last decision."""
    rounds, membership, schemas = coordinator.rounds, coordinator.membership, coordinator.schemas
    return StoreState(
        decision=rounds.log.last,
        consistency=coordinator.consistency,
        tensors=tuple(
            TensorRecord(id=tensor.id, spec=tensor.spec, slice_elems=tensor.slice_elems) for tensor in schemas.tensors
        ),
        next_tensor_id=schemas.next_id,
        hypers={group: HyperRecord(rule=one.rule, values=one.values) for group, one in rounds.hypers.last.items()},
        workers=tuple(
            WorkerRecord(
                rank=worker.rank,
                incarnation=worker.incarnation,
                client=worker.client,
                clock=worker.clock,
                state=worker.state.name,
                closed=_closed(rounds.closed.get(worker.rank)),
            )
            for _, worker in sorted(membership.workers.items())
        ),
        incarnations=dict(membership.incarnations),
        left=tuple(sorted(membership.left)),
        members=tuple(
            MembersRecord(version=one.version, came=one.came, went=one.went, absent=one.absent)
            for one in coordinator.roster.log
        ),
        norms=tuple(
            NormsRecord(present=present, norms=tuple(norms)) for present, norms in rounds.norm_guard.admitted.items()
        ),
        num_refused=dict(rounds.norm_guard.num_refused),
        extra={LINEAGE: lineage},
    )


def restore_coordinator(
    coordinator: Coordinator,
    state: StoreState,
    tensors: Sequence[Tensor],
    *,
    without_value: Collection[int],
    goes_on: bool = False,
) -> None:
    """Goes on from there: the decisions, the catalogue, and the hyper-parameters. All workers are new lives of their
    ranks. `without_value`: ids of tensors that want their first value still. `goes_on`: for the same workers, of whom
    some may have left for good."""
    coordinator.rounds.log.restore(state.decision)
    coordinator.rounds.hypers.restore(
        {group: Chosen(one.rule, dict(one.values)) for group, one in state.hypers.items()}
    )
    coordinator.rounds.norm_guard.restore(((one.present, one.norms) for one in state.norms), state.num_refused)
    log = _log_so_far(state, coordinator.consistency)
    coordinator.roster.restore(log)
    left = [one for one in state.workers if one.state == WorkerState.LEFT.name]
    awaited = {one.rank for one in state.workers} - {one.rank for one in left}
    if coordinator.roster.is_elastic:  # who was let in by the last decision may not have joined before
        awaited = set(members_after((), log)) - {one.rank for one in left if one.clock == state.decision}
    coordinator.membership.restore(
        state.incarnations,
        [_left(one) for one in left if goes_on],
        awaited=[_awaited(rank, state) for rank in sorted(awaited) if goes_on],
    )
    coordinator.schemas.restore(tensors, next_id=state.next_tensor_id, without_value=without_value)


def placed(state: StoreState, *, num_shards: int) -> list[Tensor]:
    """The catalogue on so many shards: every shard finds the same."""
    unplaced = [Unplaced(tensor.id, tensor.spec, tensor.slice_elems) for tensor in state.tensors]
    return place_tensors(unplaced, [0] * num_shards)


def _log_so_far(state: StoreState, now: Consistency) -> list[Members]:
    """Who took part until then, for whoever comes later; and who does from now on, if their number is fixed."""
    log, before = _member_log(state.members), state.consistency
    if not log and not before.elastic and (now.elastic or now.num_workers != before.num_workers):
        log.append(Members(version=0, came=tuple(range(before.num_workers))))
    there, here = set(members_after((), log)), set(range(now.num_workers))
    if log and not now.elastic and there != here:
        log.append(change_of_members(state.decision, before=there, after=here))
    return log


def _member_log(records: Sequence[MembersRecord]) -> list[Members]:
    log: list[Members] = []
    there: set[int] = set()
    """All members by the last entry, where a checkpoint says them in each."""
    for one in records:
        if one.members is None:
            log.append(Members(version=one.version, came=one.came, went=one.went, absent=one.absent))
        else:
            before, there = there, set(one.members)
            log.append(change_of_members(one.version, before=before, after=there, absent=one.absent))
    return log


def _left(record: WorkerRecord) -> Worker:
    """That life, before it has joined."""
    return Worker(
        rank=record.rank,
        incarnation=record.incarnation,
        client=record.client,
        clock=record.clock,
        last_seen=-math.inf,
    )


def _awaited(rank: int, state: StoreState) -> Worker:
    """The last life of that rank, of which nobody will hear any more: its client comes back as another one."""
    return Worker(
        rank=rank,
        incarnation=state.incarnations.get(rank, 0),
        client="",
        clock=state.decision,
        last_seen=math.inf,
        detached_since=-math.inf,
    )


def _closed(closed: Closed | None) -> ClosedRecord | None:
    if closed is None:
        return None
    return ClosedRecord(
        incarnation=closed.incarnation,
        round=closed.round,
        decision=closed.decision,
        late=closed.late,
        skip=closed.skip,
        refused=None if closed.refused is None else _refusal(closed.refused),
    )


def _refusal(refusal: Refusal) -> RefusalRecord:
    norm = refusal.norm if math.isfinite(refusal.norm) else None
    return RefusalRecord(rank=refusal.rank, norm=norm, median=refusal.median, limit=refusal.limit)
