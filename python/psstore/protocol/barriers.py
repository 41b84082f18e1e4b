"""Where workers wait for each other outside of rounds. Part of the coordinator."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psstore.errors import DeadlineExceeded, PsstoreError, WorkerLost
from psstore.protocol.losses import Losses
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.replies import Reply
from psstore.wire.messages import Barrier

MAX_NAMES = 64
"""Names kept per rank: of barriers that it passed, and of those at which it was told of a loss. Only a call whose
answer was lost is made again, and few of a worker's are under way at once."""


@dataclass(frozen=True)
class AtBarrier:
    """A worker that waits at a barrier."""

    conn: int
    request: int
    barrier: Barrier
    since: float

    @property
    def until(self) -> float:
        return self.since + self.barrier.wait_s

    def reply(self, result: PsstoreError | None) -> Reply:
        return Reply(self.conn, self.request, result)


class Barriers:
    """Opens each barrier for all expected workers at once. A repeated BARRIER of one that has opened passes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._waits: dict[str, dict[int, AtBarrier]] = {}
        """Barrier -> rank -> the worker that waits there."""
        self._passed: dict[int, OrderedDict[str, int]] = {}
        """Rank -> name -> the count with which its present life last passed; the latest at the end."""
        self._losses: defaultdict[int, Losses] = defaultdict(lambda: Losses(MAX_NAMES))
        """Rank -> the losses that its present life was told of, by the name of the barrier."""

    def enter(self, worker: Worker, barrier: Barrier, *, conn: int, request: int, now: float) -> list[Reply]:
        at = AtBarrier(conn, request, barrier, now)
        passed: Mapping[str, int] = self._passed.get(worker.rank, {})
        if barrier.count <= passed.get(barrier.name, 0):
            return [at.reply(None)]
        if barrier.once and barrier.name not in passed and self._others_are_past(barrier.name):
            self._note(worker.rank, barrier.name, barrier.count)
            return [at.reply(None)]
        self._waits.setdefault(barrier.name, {})[worker.rank] = at
        return self.open(now)

    def forget(self, rank: int) -> None:
        """A rank starts a new life: it was the old one that had come to a barrier, and passed others."""
        self._passed.pop(rank, None)
        self._losses.pop(rank, None)
        for waits in self._waits.values():
            waits.pop(rank, None)

    def open(self, now: float | None) -> list[Reply]:
        """Opens every barrier at which all expected workers are, and tells those who wait for one that was given up,
        each once. `now`: None if nobody was."""
        replies = []
        num_expected = self._membership.num_expected
        for name, waits in list(self._waits.items()):
            # Only once there are as many as are expected is it worth looking who they are: there may be thousands.
            if len(waits) < num_expected or self._membership.expected() - set(waits):
                replies += [] if now is None else self._complain(name, waits, now)
                continue
            for rank, at in waits.items():
                self._note(rank, name, at.barrier.count)
                self._losses[rank].forget(name)
                replies.append(at.reply(None))
            del self._waits[name]
        return replies

    def _note(self, rank: int, name: str, count: int) -> None:
        passed = self._passed.setdefault(rank, OrderedDict())
        passed[name] = count
        passed.move_to_end(name)
        if len(passed) > MAX_NAMES:
            passed.popitem(last=False)

    def fail(self, error: PsstoreError) -> list[Reply]:
        """Answers every waiting worker with `error`: no barrier opens any more."""
        replies = [at.reply(error) for waits in self._waits.values() for at in waits.values()]
        self._waits.clear()
        return replies

    def expire(self, now: float) -> list[Reply]:
        replies = []
        for name, waits in list(self._waits.items()):
            late = {rank: at for rank, at in waits.items() if at.until <= now}
            replies += [at.reply(self._too_late(name, rank, at, now)) for rank, at in late.items()]
            for rank in late:
                del waits[rank]
            if not waits:
                del self._waits[name]
        return replies

    def next_wake(self) -> float | None:
        """When `expire` may next find something."""
        if not self._waits:
            return None
        return min((at.until for waits in self._waits.values() for at in waits.values()), default=None)

    def waited_for(self, now: float, *, by: int | None = None) -> str:
        """Which workers are missing at a barrier, described; '': nobody waits. `by`: where this rank waits."""
        names = (name for name, waits in self._waits.items() if (by in waits or (by is None and waits)))
        return next((self._missing_at(name, now) for name in names), "")

    # ---- how ----

    def _others_are_past(self, name: str) -> bool:
        """Whether a worker that is there has passed it and does not wait there again."""
        waits = self._waits.get(name, {})
        past = (rank for rank, names in self._passed.items() if name in names and rank not in waits)
        return any(rank in self._membership.live for rank in past)

    def _complain(self, name: str, waits: dict[int, AtBarrier], now: float) -> list[Reply]:
        """Tells waiting workers of one that is missing and was given up, once each. A worker that was told is at the
        barrier no longer; it may come again, and waits then."""
        replies = []
        lost = self._missing_of(self._membership.given_up(), waits)
        for rank, at in list(waits.items()):
            if lost and self._losses[rank].is_news(name, at.request, lost):
                self._losses[rank].tell(name, at.request, lost)
                replies.append(at.reply(self._worker_lost(f"barrier {name!r}", lost[0], now)))
                del waits[rank]
        return replies

    @staticmethod
    def _missing_of(gone: Sequence[Worker], waits: Mapping[int, AtBarrier]) -> list[Worker]:
        """Who of `gone` is not at the barrier."""
        return [worker for worker in gone if worker.rank not in waits]

    def _worker_lost(self, who: str, missing: Worker, now: float, **waited: float) -> WorkerLost:
        return WorkerLost(
            f"{who} needs {self._membership.describe(missing.rank, now)}, which is lost",
            rank=missing.rank,
            last_seen_s=now - missing.last_seen,
            **waited,
        )

    def _too_late(self, name: str, rank: int, at: AtBarrier, now: float) -> PsstoreError:
        waited_s = at.barrier.wait_s
        lost = self._missing_of(self._membership.lost(), self._waits[name])
        if lost:
            who = f"rank {rank} waited {waited_s:g} s for a replacement: barrier {name!r}"
            return self._worker_lost(who, lost[0], now, waited_s=waited_s)
        who = self._missing_at(name, now)
        return DeadlineExceeded(f"rank {rank} waited {waited_s:g} s at barrier {name!r} for {who}", waited_s=waited_s)

    def _missing_at(self, name: str, now: float) -> str:
        missing = sorted(self._membership.expected() - set(self._waits[name]))
        return self._membership.describe_all(missing, now)
