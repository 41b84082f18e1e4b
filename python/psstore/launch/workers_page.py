"""What workers do, whom they wait for, and why: what `psstore top` says of them, for the board at the metrics port."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psstore.client.store_status import status_of
from psstore.launch.shard_probe import ShardProbe
from psstore.launch.slowness import Look, TimeSpent, busy_shards, times_spent, who_and_why


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that trains: parts of the time between the last two answers, as far as the shards of this host see."""

    rank: int
    computes: float
    pushes: float
    pulls: float
    waits: float
    pushed_mib_s: float
    pulled_mib_s: float


class WorkersTold(msgspec.Struct, frozen=True, kw_only=True):
    """All workers, those first that may be waited for; none where shard 0 is elsewhere, or has said too little yet."""

    waited_for: str = ""
    why: str = ""
    workers: tuple[WorkerTimes, ...] = ()


class WorkersPage:
    """/workers, as JSON."""

    def __init__(self, probes: Sequence[ShardProbe]) -> None:
        self._probes = probes

    def __call__(self) -> bytes:
        return msgspec.json.encode(self._told())

    def _told(self) -> WorkersTold:
        answers = [one.answers for one in self._probes]
        consistency = self._probes[0].consistency
        if self._probes[0].shard != 0 or consistency is None or any(len(one) < 2 for one in answers):
            return WorkersTold()
        before, now = (
            Look(look[0].at_s, status_of([one.counters for one in look], consistency), look[0].took_s)
            for look in zip(*answers, strict=True)
        )
        found = times_spent(before, now)
        who, why = who_and_why(found, busy_shards(before, now), now.status)
        return WorkersTold(waited_for=who, why=why, workers=tuple(map(_times_of, found)))


def _times_of(one: TimeSpent) -> WorkerTimes:
    return WorkerTimes(
        rank=one.worker.rank,
        computes=one.computes,
        pushes=one.pushes,
        pulls=one.pulls,
        waits=one.waits,
        pushed_mib_s=one.pushed_mib_s,
        pulled_mib_s=one.pulled_mib_s,
    )
