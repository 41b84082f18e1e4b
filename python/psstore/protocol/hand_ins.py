"""What workers hand in for their next lives: each its last, and who is asked for it when. Part of the coordinator.

A checkpoint holds what a worker has handed in as of the checkpoint's decision: schedulers, samplers, random states.
Only the worker knows when it is between two steps, so it is asked with the answer to its commit, and hands in before
it goes on. Where each round has all workers, the next round can't be decided before each has done so. What is larger
than a message comes and goes in several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from psstore.errors import BadArgument, OutOfMemory
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.states import WorkerState
from psstore.wire import messages as m


class HandedIn(Struct, frozen=True, kw_only=True):
    """What a rank has handed in last."""

    incarnation: int
    version: int
    """The decision that it had come to."""
    state: bytes


class _Arriving(Struct, kw_only=True):
    """What has come so far of one that is handed in."""

    incarnation: int
    version: int
    data: bytearray


class HandIns:
    """All that is handed in, by rank."""

    def __init__(self, membership: Membership, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: that all of it may take together."""
        self.of: dict[int, HandedIn] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._gathered: dict[int, HandedIn] = {}
        """The first of each rank as of the decision that is asked for or later: it may hand in again before the
        checkpoint begins."""
        self._membership = membership
        self._max_bytes = max_bytes
        self._wanted_from: int | None = None
        """A checkpoint of this decision, or of the next one if it has not been made, wants what is handed in."""
        self._is_made = False
        self._on_made: Callable[[], None] | None = None
        """What the checkpoint that has asked does when that decision is made; None: none has asked."""

    def restore(self, of: Mapping[int, HandedIn]) -> None:
        """Goes on from a checkpoint."""
        self.of = dict(of)

    def take(self, worker: Worker, handed: m.HandIn, *, last: int) -> None:
        """REQUIRES: each message comes here once. Raises BadArgument: no worker has come to a decision that was not
        made, nor goes back; OutOfMemory."""
        before = self.of.get(worker.rank)
        known = before is not None and before.incarnation == worker.incarnation
        at_least = before.version if before is not None and known else 0
        if not at_least <= handed.version <= last:
            raise BadArgument(
                f"rank {worker.rank} hands in as of version {handed.version}; expected {at_least} to {last}"
            )
        arriving = self._arriving.get(worker.rank)
        if handed.offset == 0 or arriving is None or arriving.incarnation != worker.incarnation:
            arriving = _Arriving(incarnation=worker.incarnation, version=handed.version, data=bytearray())
        if handed.offset != len(arriving.data) or handed.version != arriving.version:
            raise BadArgument(
                f"rank {worker.rank} hands in from byte {handed.offset} on as of version {handed.version};"
                f" expected byte {len(arriving.data)} as of version {arriving.version}"
            )
        self._make_room(worker.rank, len(arriving.data) + len(handed.state))
        arriving.data += handed.state
        if handed.more:
            self._arriving[worker.rank] = arriving
            return
        self._arriving.pop(worker.rank, None)
        found = HandedIn(incarnation=worker.incarnation, version=handed.version, state=bytes(arriving.data))
        self.of[worker.rank] = found
        if self._is_made and self._wanted_from is not None and handed.version >= self._wanted_from:
            self._gathered.setdefault(worker.rank, found)

    @property
    def nearest(self) -> Mapping[int, HandedIn]:
        """By rank, what is nearest to the decision that was asked for, or else the last."""
        return {**self.of, **self._gathered}

    def _make_room(self, rank: int, num_bytes: int) -> None:
        """Lets go of what has come of that rank's, if it would be too much. Raises OutOfMemory."""
        if self._max_bytes is None:
            return
        others = sum(len(one.data) for other, one in self._arriving.items() if other != rank)
        held = {id(one): len(one.state) for one in (*self.of.values(), *self._gathered.values())}
        if others + sum(held.values()) + num_bytes > self._max_bytes:
            self._arriving.pop(rank, None)
            raise OutOfMemory(
                f"rank {rank} hands in {num_bytes:,} bytes or more, and with what is there that is more than the"
                f" {self._max_bytes:,} kept for it: hand in less, or raise --max-memory"
            )

    def give_back(self, worker: Worker, offset: int) -> m.HandedBack:
        """What the rank's last life, or this one, has handed in, from that byte on."""
        found = self.of.get(worker.rank)
        if found is None:
            return m.HandedBack()
        end = offset + m.HANDED_PIECE_BYTES
        return m.HandedBack(version=found.version, state=found.state[offset:end], more=end < len(found.state))

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

    @property
    def is_gathered(self) -> bool:
        """Whether a checkpoint has asked, and waits: it is to be of the decision that it has asked for."""
        return self._on_made is not None

    def want_next(self, last: int, on_made: Callable[[], None] | None = None) -> None:
        """Asks every worker that hands in for what it has after the next decision. `on_made`: called once when that is
        made, before anybody hears of it. REQUIRES without it: not `is_gathered`."""
        self._wanted_from, self._is_made, self._on_made = last + 1, False, on_made
        self._gathered = {}

    def enough(self) -> None:
        """Nobody is asked any more."""
        self._wanted_from, self._on_made, self._gathered = None, None, {}

    def decided(self) -> None:
        """There is another decision."""
        if self._wanted_from is not None and not self._is_made:
            self._is_made = True
            if self._on_made is not None:
                self._on_made()

    def is_wanted(self, worker: Worker) -> bool:
        """Whether to ask this worker with the answer that it gets now."""
        if self._wanted_from is None or not self._is_made:
            return False
        handed = self.of.get(worker.rank)
        return handed is not None and handed.incarnation == worker.incarnation and handed.version < self._wanted_from
