"""What workers did between two looks at a store, whom the others wait for, and why, as far as the store itself sees it.
Looks at what was told only: who asks is elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from psstore.client.store_status import ShardStatus, StoreStatus, TransferStatus, WorkerStatus

MIB = float(1 << 20)

CLEARLY = 0.1
"""Part of the time by which one waits less than the others do if it is waited for."""

BUSY = 0.85
"""Processors that a shard's process takes from which on requests wait for it: one thread answers them."""

SILENT_S = 3.0
"""Three heartbeats: so long nothing is heard of a process that stands still."""


class Look(NamedTuple):
    """A store at one moment."""

    at_s: float
    status: StoreStatus
    answer_s: float
    """How long the slowest shard took to answer."""


class TimeSpent(NamedTuple):
    """What one worker did between two looks, in parts of the time between them, as the store sees it."""

    worker: WorkerStatus
    pushes: float
    """Gradients of its were arriving, at the shard where they took longest."""
    pulls: float
    """Values were on their way to it, likewise."""
    waits: float
    """Others were waited for."""
    computes: float
    """Nothing of it was under way: it computes, loads data, or stands still."""
    pushed_mib_s: float
    pulled_mib_s: float
    push_shard: int
    """Where its gradients took longest."""
    pull_shard: int
    push_link_mib_s: float
    """How fast they arrived there while they did."""
    pull_link_mib_s: float


def seconds_between(before: Look, now: Look) -> float:
    """More than 0, to divide by."""
    return max(now.at_s - before.at_s, 1e-9)


def times_spent(before: Look, now: Look) -> list[TimeSpent]:
    """Each worker that trains, those first that may be waited for."""
    seconds = seconds_between(before, now)
    waited_s = {one.rank: one.waited_s for one in before.status.workers}
    grown = _grown(before.status, now.status)
    found = [
        _time_spent(one, one.waited_s - waited_s.get(one.rank, 0.0), grown.get(one.rank, []), seconds)
        for one in now.status.workers
    ]
    return sorted(found, key=lambda one: (one.worker.clock, one.waits, one.worker.rank))


def waited_for(found: Sequence[TimeSpent]) -> TimeSpent | None:
    """Whom the others wait for: it is behind them, or waits clearly less. None: nobody stands out. `found`: as of
    `times_spent`."""
    if len(found) < 2:
        return None
    first, others = found[0], found[1:]
    is_behind = first.worker.clock < min(one.worker.clock for one in others)
    waits_less = statistics.median(one.waits for one in others) > first.waits + CLEARLY
    return first if is_behind or waits_less else None


def who_and_why(found: Sequence[TimeSpent], busy: Sequence[float], status: StoreStatus) -> tuple[str, str]:
    """Whom the others wait for, '' if nobody stands out, and why; or what all do then. `busy`: as of `busy_shards`."""
    if status.commits_waiting and (status.lost or status.absent):
        rank, why = (status.lost[0], "it is lost") if status.lost else (status.absent[0], "it has not come yet")
        return f"rank {rank}", why
    slowest = waited_for(found)
    if slowest is not None:
        return f"rank {slowest.worker.rank}", _why(slowest, busy)
    if not found:
        return "", ""
    parts = zip(*((one.computes, one.pushes, one.pulls, one.waits) for one in found), strict=True)
    mean = map(statistics.fmean, parts)
    return "", "workers compute {:.0%} of the time, push {:.0%}, pull {:.0%}, wait {:.0%}".format(*mean)


def busy_shards(before: Look, now: Look) -> list[float]:
    """How many processors each shard's process took."""
    seconds = seconds_between(before, now)
    pairs = zip(before.status.shards, now.status.shards, strict=True)
    return [(one.processor_s - (was.processor_s if _is_same(was, one) else 0.0)) / seconds for was, one in pairs]


def _why(one: TimeSpent, busy: Sequence[float]) -> str:
    if one.worker.silent_s > SILENT_S:
        return f"nothing was heard of it for {one.worker.silent_s:.0f} s: its process stands still, or is cut off"
    if one.computes >= max(one.pushes, one.pulls):
        return f"it computes, or loads data: for {one.computes:.0%} of the time nothing of it is under way"
    if one.pushes >= one.pulls:
        what, share, shard, speed = "its gradients arrive", one.pushes, one.push_shard, one.push_link_mib_s
    else:
        what, share, shard, speed = "its values travel", one.pulls, one.pull_shard, one.pull_link_mib_s
    slow = (
        f"they wait for shard {shard}, which takes {busy[shard]:.0%} of a processor"
        if busy[shard] > BUSY
        else f"{speed:.1f} MiB/s, its link or that of shard {shard}"
    )
    return f"{what} for {share:.0%} of the time: {slow}"


def _grown(before: StoreStatus, now: StoreStatus) -> dict[int, list[TransferStatus]]:
    """Rank -> what each shard saw of it since; since its start, of a process that leads since."""
    same = {one.shard for was, one in zip(before.shards, now.shards, strict=True) if _is_same(was, one)}
    then = {(one.rank, one.shard): one for one in before.transfers if one.shard in same}
    grown: dict[int, list[TransferStatus]] = {}
    for one in now.transfers:
        was = then.get((one.rank, one.shard))
        grown.setdefault(one.rank, []).append(one if was is None else _difference(one, was))
    return grown


def _difference(one: TransferStatus, was: TransferStatus) -> TransferStatus:
    return TransferStatus(
        rank=one.rank,
        shard=one.shard,
        pushed_bytes=one.pushed_bytes - was.pushed_bytes,
        pulled_bytes=one.pulled_bytes - was.pulled_bytes,
        push_s=one.push_s - was.push_s,
        pull_s=one.pull_s - was.pull_s,
        waited_s=one.waited_s - was.waited_s,
    )


def _time_spent(worker: WorkerStatus, waited_s: float, seen: Sequence[TransferStatus], seconds: float) -> TimeSpent:
    """`seen`: by the shards. What it does at several shards at once counts as pushing first, then as pulling."""
    push, pull = (max(seen, key=lambda one: getattr(one, name), default=None) for name in ("push_s", "pull_s"))
    pushes = _share(push.push_s if push else 0.0, seconds, 1.0)
    pulls = _share(pull.pull_s if pull else 0.0, seconds, 1.0 - pushes)
    waits = _share(waited_s + max((one.waited_s for one in seen), default=0.0), seconds, 1.0 - pushes - pulls)
    return TimeSpent(
        worker=worker,
        pushes=pushes,
        pulls=pulls,
        waits=waits,
        computes=max(0.0, 1.0 - pushes - pulls - waits),
        pushed_mib_s=sum(one.pushed_bytes for one in seen) / MIB / seconds,
        pulled_mib_s=sum(one.pulled_bytes for one in seen) / MIB / seconds,
        push_shard=push.shard if push else 0,
        pull_shard=pull.shard if pull else 0,
        push_link_mib_s=push.pushed_bytes / MIB / push.push_s if push and push.push_s > 0 else 0.0,
        pull_link_mib_s=pull.pulled_bytes / MIB / pull.pull_s if pull and pull.pull_s > 0 else 0.0,
    )


def _share(part_s: float, seconds: float, most: float) -> float:
    return min(max(0.0, most), max(0.0, part_s) / seconds)


def _is_same(was: ShardStatus, now: ShardStatus) -> bool:
    """Whether one process has led the shard in between, so that its counters have gone on."""
    return was.process == now.process and was.received_bytes <= now.received_bytes
