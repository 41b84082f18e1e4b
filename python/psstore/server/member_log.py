"""Logs what becomes of the workers, by comparing the coordinator's members with what they were last."""

from __future__ import annotations

import logging

from psstore.protocol.membership import Membership, Worker
from psstore.protocol.states import WorkerState

_log = logging.getLogger("psstore.server")


class MemberLog:
    """Watches one membership, which changes in few turns of the loop."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._num_changes = membership.num_changes
        self._known = {rank: (worker.incarnation, worker.state) for rank, worker in membership.workers.items()}

    def update(self, now: float) -> None:
        """Logs the changes since the last call."""
        if self._num_changes == self._membership.num_changes:
            return
        self._num_changes = self._membership.num_changes
        for rank, worker in self._membership.workers.items():
            before, after = self._known.get(rank), (worker.incarnation, worker.state)
            if before != after:
                self._known[rank] = after
                level, message = _describe(worker, before, now, rejoin_s=self._membership.liveness.rejoin_s)
                _log.log(level, message, extra={"peer": f"client {worker.client[:8]}"})


def _describe(
    worker: Worker, before: tuple[int, WorkerState] | None, now: float, *, rejoin_s: float
) -> tuple[int, str]:
    who = f"rank {worker.rank} (incarnation {worker.incarnation})"
    if worker.state in (WorkerState.LOST, WorkerState.REFUSED):
        lost = f"{who} is lost in round {worker.clock + 1}: last seen {now - worker.last_seen:.1f} s ago"
        waits = f"; the others wait {rejoin_s:g} s for a new one" if rejoin_s else ""
        return logging.WARNING, lost + waits
    if worker.state is WorkerState.LEFT:
        if worker.dropped:
            return logging.WARNING, f"{who} is not waited for any longer; the others go on without it"
        return logging.INFO, f"{who} has left after round {worker.clock}"
    if before == (worker.incarnation, WorkerState.LOST):
        return logging.WARNING, f"{who} is back"
    return logging.INFO, f"{who} has joined"
