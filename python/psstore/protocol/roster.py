"""Who trains in which round, where workers come and go. Part of the coordinator.

They do so at decisions, and never inside a round: one that comes waits for the end of the open round and takes part
in the next, one that goes is missing in the round that it was in. So all that take part in a round know before it
begins who does, and with its decision who did: from the log of both, anybody can tell what each of them had to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from psstore.errors import DeadlineExceeded, PsstoreError
from psstore.protocol.membership import Membership
from psstore.protocol.replies import Reply
from psstore.wire.messages import Join, Joined, Members, change_of_members, members_after

MAX_TOLD = 1 << 20
"""Numbers that are told of the log at once, beside whatever else is in the message: 5 MiB at most."""

NUMBERS = 5
"""What an entry counts for, beside its ranks."""


class Arrival(Struct, frozen=True):
    """A worker that waits for its first round."""

    join: Join
    client: str
    conn: int
    request: int
    since: float
    rank: int
    """The one that it will have."""

    @property
    def until(self) -> float:
        return self.since + self.join.wait_s

    def reply(self, result: Joined | PsstoreError) -> Reply:
        return Reply(self.conn, self.request, result)


class Roster:
    """The log, and who waits. With a fixed number of workers it is asked nothing."""

    def __init__(self, membership: Membership, *, fewest: int | None) -> None:
        """`fewest`: workers without whom no round is decided; None: their number is fixed."""
        self.log: list[Members] = []
        """What came of each change, since the training began: who takes part follows from all of it."""
        self.is_elastic = fewest is not None
        self._membership = membership
        self._fewest = fewest
        self._members: tuple[int, ...] = ()
        """Who takes part, by the log."""
        self._arrivals: dict[str, Arrival] = {}
        """By client, in the order in which they came."""
        self._let_in: list[Arrival] = []
        """Who takes part from now on, and has not been told."""

    @property
    def has_enough(self) -> bool:
        """Whether a round may be decided: there are enough workers for the next one."""
        return not self.is_elastic or self.num_missing == 0

    @property
    def num_missing(self) -> int:
        """Workers that have to come before a round is decided."""
        if self._fewest is None:
            return 0
        there = self._membership.num_expected + len(self._arrivals) + len(self._let_in)
        return max(0, self._fewest - there)

    def since(self, known: int) -> tuple[Members, ...]:
        """What the log has behind so many entries, or the first of it."""
        told: list[Members] = []
        num_numbers = 0
        for one in self.log[known:]:
            num_numbers += NUMBERS + len(one.came) + len(one.went) + len(one.absent)
            if told and num_numbers > MAX_TOLD:
                break
            told.append(one)
        return tuple(told)

    def restore(self, log: Collection[Members]) -> None:
        """Goes on from a checkpoint."""
        self.log = list(log)
        self._members = members_after((), log)

    # ---- events ----

    def arrived(self, join: Join, *, client: str, conn: int, request: int, now: float) -> bool:
        """Whether that one waits now, or again. Raises RankTaken, TooManyWorkers, BadArgument. False: it takes a lost
        one's place, for which the others wait, and need not wait itself."""
        for index, one in enumerate(self._let_in):
            if one.client == client:  # its connection was lost before the round was done
                self._let_in[index] = replace(one, conn=conn, request=request)
                return True
        if client in self._arrivals:
            self._arrivals[client] = replace(self._arrivals[client], conn=conn, request=request)
            return True
        rank = self._membership.choose(join.rank, now)
        if rank in self._membership.expected():
            return False
        self._arrivals[client] = Arrival(join, client, conn, request, now, rank)
        self._note_claims()
        return True

    def detached(self, conn: int) -> None:
        """A connection is gone: who waits there will ask again on another one."""
        for arrival in [arrival for arrival in self._arrivals.values() if arrival.conn == conn]:
            del self._arrivals[arrival.client]
        self._note_claims()

    def decided(self, number: int, took: Collection[int]) -> None:
        """These ranks are in that decision. REQUIRES: workers come and go, and nobody heard of the decision."""
        absent = tuple(rank for rank in self._members if rank not in took)
        self._open()
        self._note(number, absent)

    def begin(self, number: int) -> None:
        """Where nobody trains: a first round of those who wait, if they are enough; or for those who have come in the
        place of others of a group that has ended meanwhile, none. `number`: of the last decision."""
        if self._fewest is None or self._membership.num_expected:
            return
        if self._membership.has_ended and (late := [one for one in self._arrivals.values() if one.join.goes_on]):
            self._let_in += late
            for one in late:
                del self._arrivals[one.client]
            return
        if len(self._arrivals) < max(1, self._fewest):
            return
        self._open()
        self._note(number)

    def take_let_in(self) -> list[Arrival]:
        """Who is to be told now to take part."""
        let_in, self._let_in = self._let_in, []
        self._note_claims()
        return let_in

    def fail(self, error: PsstoreError) -> list[Reply]:
        """Nobody will train any more."""
        self._open()
        arrivals = self.take_let_in()
        return [arrival.reply(error) for arrival in arrivals]

    def expire(self, now: float, *, awaited: Callable[[], Sequence[int]]) -> list[Reply]:
        """Ends the waits whose time is up. `awaited`: the ranks that the open round waits for."""
        late = [arrival for arrival in self._arrivals.values() if arrival.until <= now]
        for arrival in late:
            del self._arrivals[arrival.client]
        self._note_claims()
        return [arrival.reply(self._too_late(arrival, awaited(), now)) for arrival in late]

    def next_wake(self) -> float | None:
        """When `expire` may next find somebody."""
        return min((arrival.until for arrival in self._arrivals.values()), default=None)

    # ---- how ----

    def _note(self, number: int, absent: tuple[int, ...] = ()) -> None:
        """Who takes part after that decision, if others do than before, or were to be in it."""
        members = tuple(sorted({*self._membership.expected(), *(arrival.rank for arrival in self._let_in)}))
        if absent or members != self._members:
            before, after = set(self._members), set(members)
            self.log.append(change_of_members(number, before=before, after=after, absent=absent))
            self._members = members

    def _open(self) -> None:
        self._let_in += self._arrivals.values()
        self._arrivals.clear()
        self._note_claims()

    def _note_claims(self) -> None:
        self._membership.claimed = frozenset(one.rank for one in (*self._arrivals.values(), *self._let_in))

    def _too_late(self, arrival: Arrival, awaited: Sequence[int], now: float) -> DeadlineExceeded:
        waited_s = arrival.join.wait_s
        if awaited:
            who = self._membership.describe_all(awaited, now)
            what = f"{who} to end the open round, which it would have come after"
        else:
            what = f"{self._fewest} workers to be there"
        return DeadlineExceeded(
            f"rank {arrival.rank} waited {waited_s:g} s for {what}",
            waited_s=waited_s,
            rank=awaited[0] if awaited else arrival.rank,
        )
