"""Between an early decision and the next one: who has still to push, and who waits for that. Part of the coordinator.

A worker that has finished may be gone: its contributions are staged. One that has not can't be: what it promised
will never come, and what others pushed may be part of a step already. That tears the round, and the store with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psstore.errors import DeadlineExceeded, PsstoreError, TornRound
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.replies import Reply
from psstore.protocol.waits import Waits
from psstore.wire.messages import Finish, Finished


@dataclass(frozen=True)
class Finishing:
    """A FINISH whose reply is owed."""

    finish: Finish
    conn: int
    request: int
    since: float

    @property
    def until(self) -> float:
        return self.since + self.finish.wait_s

    def reply(self, result: Finished | PsstoreError) -> Reply:
        return Reply(self.conn, self.request, result)


class PromisedPushes:
    """What the members of the last round still owe, if it was decided early. The next decision needs them all."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._round = 0
        self._members: frozenset[int] = frozenset()
        self._owing: set[int] = set()
        """Ranks of members that have not finished."""
        self._waits: Waits[Finishing] = Waits()
        self._waits_s: dict[int, float] = {}
        """Rank -> how long those of its waits that are over have taken, all together, in seconds."""

    @property
    def pending(self) -> bool:
        return bool(self._owing)

    @property
    def num_waiting(self) -> int:
        """Workers that have pushed what they promised, and wait for the others'."""
        return len(self._waits.of)

    @property
    def owing(self) -> list[int]:
        return sorted(self._owing)

    def owes(self, rank: int) -> bool:
        """True if the rank has promised pushes and has not said that they are done."""
        return rank in self._owing

    # ---- events ----

    def begin(self, round: int, *, members: Iterable[int], owing: Iterable[int]) -> None:
        """A round was decided early. Members that do not owe had pushed everything before they committed."""
        self._round, self._members, self._owing = round, frozenset(members), set(owing)
        self._reserve()

    def wait(self, worker: Worker, finishing: Finishing) -> list[Reply]:
        """A worker has finished, and wants to hear when all have. One that asks late is told at once."""
        self._waits.put(worker.rank, finishing)
        return self.finished(worker.rank, finishing.since)

    def waited_s(self, rank: int, now: float) -> float:
        """How long the rank has waited for others' pushes, all together, in seconds."""
        waiting = self._waits.of.get(rank)
        return self._waits_s.get(rank, 0.0) + (max(0.0, now - waiting.since) if waiting is not None else 0.0)

    def finished(self, rank: int, now: float) -> list[Reply]:
        """Everything that this rank promised is pushed."""
        self._owing.discard(rank)
        self._reserve()
        if self._owing:
            return []
        waits = self._take_waits()
        for waiting, one in waits:
            self._waits_s[waiting] = self._waits_s.get(waiting, 0.0) + now - one.since
        clocks = self._membership.workers
        return [one.reply(Finished(next_round=clocks[rank].clock + 1)) for rank, one in waits]

    def forget(self, rank: int) -> None:
        """Drops the rank's wait: nobody listens for its answer any more."""
        self._waits.pop(rank)

    def tear(self, rank: int, why: str) -> TornRound:
        """Ends the round, since `rank`, which owes pushes, is gone. Returns the error for all who wait."""
        self._owing.clear()
        self._reserve()
        return TornRound(
            f"round {self._round} is torn: rank {rank} {why} after its early commit, before it had pushed all that it"
            " promised; the store can't go on: start it anew from a checkpoint",
            rank=rank,
            round=self._round,
        )

    def fail(self, error: TornRound) -> list[Reply]:
        return [one.reply(error) for _, one in self._take_waits()]

    def expire(self, now: float) -> list[Reply]:
        """Ends the waits whose time is up; FINISH may be sent again."""
        return [one.reply(self._too_late(rank, one, now)) for rank, one in self._waits.due(now)]

    def next_wake(self) -> float | None:
        return self._waits.next_wake()

    # ---- how ----

    def _take_waits(self) -> list[tuple[int, Finishing]]:
        """Takes all waits out, in rank order."""
        waits = sorted(self._waits.of.items())
        self._waits.clear()
        return waits

    def _reserve(self) -> None:
        """A new life would push in place of what slots hold of the old one until the round is done."""
        self._membership.reserved = self._members - self._owing if self._owing else frozenset()

    def _too_late(self, rank: int, one: Finishing, now: float) -> DeadlineExceeded:
        who = self._membership.describe_all(self.owing, now, round=self._round)
        return DeadlineExceeded(
            f"rank {rank} waited {one.finish.wait_s:g} s for the pushes that {who} promised for round {self._round}",
            round=self._round,
            waited_s=one.finish.wait_s,
            rank=self.owing[0],
        )
