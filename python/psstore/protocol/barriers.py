"""Where workers wait for each other outside of rounds. Part of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from psstore.errors import DeadlineExceeded, PsstoreError, WorkerLost
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.replies import Reply
from psstore.wire.messages import Barrier


@dataclass(frozen=True)
class AtBarrier:
    """One worker that waits."""

    conn: int
    request: int
    incarnation: int
    barrier: Barrier
    since: float

    @property
    def until(self) -> float:
        return self.since + self.barrier.wait_s

    def reply(self, result: PsstoreError | None) -> Reply:
        return Reply(self.conn, self.request, result)


class Barriers:
    """Opens each for all who are expected at once. A repeated call of one that has opened passes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._waits: dict[str, dict[int, AtBarrier]] = {}
        """By name and rank."""
        self._passed: dict[tuple[str, int], tuple[int, int]] = {}
        """(name, rank) -> (incarnation, count) that it last passed."""

    def enter(self, worker: Worker, barrier: Barrier, *, conn: int, request: int, now: float) -> list[Reply]:
        at = AtBarrier(conn, request, worker.incarnation, barrier, now)
        incarnation, count = self._passed.get((barrier.name, worker.rank), (0, 0))
        if incarnation == worker.incarnation and barrier.count <= count:
            return [at.reply(None)]
        self._waits.setdefault(barrier.name, {})[worker.rank] = at
        return self.open(now)

    def forget(self, rank: int) -> None:
        """A rank starts a new life: it was the old one that had come to a barrier."""
        for waits in self._waits.values():
            waits.pop(rank, None)

    def open(self, now: float | None) -> list[Reply]:
        """Opens every barrier at which all expected workers are, and tells those who wait for a lost one."""
        replies = []
        expected = self._membership.expected()
        lost = {worker.rank: worker for worker in self._membership.lost()}
        for name, waits in list(self._waits.items()):
            missing = expected - set(waits)
            if not missing:
                for rank, at in waits.items():
                    self._passed[name, rank] = (at.incarnation, at.barrier.count)
                    replies.append(at.reply(None))
                del self._waits[name]
            elif now is not None and missing & lost.keys():
                rank = min(missing & lost.keys())
                error = WorkerLost(
                    f"barrier {name!r} needs {self._membership.describe(rank, now)}, which is lost",
                    rank=rank,
                    last_seen_s=now - lost[rank].last_seen,
                )
                replies += [at.reply(error) for at in waits.values()]
                del self._waits[name]
        return replies

    def fail(self, error: PsstoreError) -> list[Reply]:
        """Nobody will pass any more."""
        replies = [at.reply(error) for waits in self._waits.values() for at in waits.values()]
        self._waits.clear()
        return replies

    def expire(self, now: float) -> list[Reply]:
        replies = []
        for name, waits in list(self._waits.items()):
            missing = sorted(self._membership.expected() - set(waits))
            who = ", ".join(self._membership.describe(rank, now) for rank in missing)
            for rank, at in list(waits.items()):
                if at.until <= now:
                    text = f"rank {rank} waited {at.barrier.wait_s:g} s at barrier {name!r} for {who}"
                    replies.append(at.reply(DeadlineExceeded(text, waited_s=at.barrier.wait_s)))
                    del waits[rank]
            if not waits:
                del self._waits[name]
        return replies

    def next_wake(self) -> float | None:
        """When `expire` may next find something."""
        if not self._waits:
            return None
        return min((at.until for waits in self._waits.values() for at in waits.values()), default=None)
