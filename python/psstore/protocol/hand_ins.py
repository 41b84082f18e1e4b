"""What workers hand in for their next lives: each its last, and who is asked for it when. Part of the coordinator.

A checkpoint holds what a worker has handed in as of the checkpoint's decision: schedulers, samplers, random states.
Only the worker knows when it is between two steps, so it is asked with the answer to its commit, and hands in before
it goes on. Where each round has all workers, the next round can't be decided before each has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from psstore.errors import BadArgument
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.states import WorkerState
from psstore.wire.messages import HandedBack, HandIn


class HandedIn(Struct, frozen=True, kw_only=True):
    """What a rank has handed in last."""

    incarnation: int
    version: int
    """The decision that it had come to."""
    state: bytes


class HandIns:
    """All that is handed in, by rank."""

    def __init__(self, membership: Membership) -> None:
        self.of: dict[int, HandedIn] = {}
        self._gathered: dict[int, HandedIn] = {}
        """The first of each rank as of the decision that is asked for or later: it may hand in again before the
        checkpoint begins."""
        self._membership = membership
        self._wanted_from: int | None = None
        """A checkpoint of this decision, or of the next one if it has not been made, wants what is handed in."""
        self._is_made = False
        self._on_made: Callable[[], None] = lambda: None

    def restore(self, of: Mapping[int, HandedIn]) -> None:
        """Goes on from a checkpoint."""
        self.of = dict(of)

    def take(self, worker: Worker, handed: HandIn, *, last: int) -> None:
        """Raises BadArgument: no worker has come to a decision that was not made, nor goes back."""
        before = self.of.get(worker.rank)
        known = before is not None and before.incarnation == worker.incarnation
        at_least = before.version if before is not None and known else 0
        if not at_least <= handed.version <= last:
            raise BadArgument(
                f"rank {worker.rank} hands in as of version {handed.version}; expected {at_least} to {last}"
            )
        found = HandedIn(incarnation=worker.incarnation, version=handed.version, state=bytes(handed.state))
        self.of[worker.rank] = found
        if self._is_made and self._wanted_from is not None and handed.version >= self._wanted_from:
            self._gathered.setdefault(worker.rank, found)

    @property
    def nearest(self) -> Mapping[int, HandedIn]:
        """By rank, what is nearest to the decision that was asked for, or else the last."""
        return {**self.of, **self._gathered}

    def give_back(self, worker: Worker) -> HandedBack:
        """What the rank's last life, or this one, has handed in."""
        found = self.of.get(worker.rank)
        return HandedBack() if found is None else HandedBack(version=found.version, state=found.state)

    def missing(self, version: int) -> list[int]:
        """Ranks whose present life is one that hands in, and has not done so as of that decision."""
        return [
            rank
            for rank, handed in sorted(self.of.items())
            if handed.version < version
            and (worker := self._membership.workers.get(rank)) is not None
            and worker.state is WorkerState.LIVE
            and worker.incarnation == handed.incarnation
        ]

    def want_next(self, last: int, on_made: Callable[[], None]) -> None:
        """Asks every worker that hands in for what it has after the next decision. `on_made`: called once when that is
        made, before anybody hears of it."""
        self._wanted_from, self._is_made, self._on_made = last + 1, False, on_made
        self._gathered = {}

    def enough(self) -> None:
        """Nobody is asked any more."""
        self._wanted_from, self._gathered = None, {}

    def decided(self) -> None:
        """There is another decision."""
        if self._wanted_from is not None and not self._is_made:
            self._is_made = True
            self._on_made()

    def is_wanted(self, worker: Worker) -> bool:
        """Whether to ask this worker with the answer that it gets now."""
        if self._wanted_from is None or not self._is_made:
            return False
        handed = self.of.get(worker.rank)
        return handed is not None and handed.incarnation == worker.incarnation and handed.version < self._wanted_from
