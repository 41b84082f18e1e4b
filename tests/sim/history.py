"""What the actors of a run did and saw, for the checks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from psstore.errors import TornRound
from psstore.types import Tensor
from psstore.wire.messages import Committed, DecisionFact
from psstore.wire.ranges import Ranges

from .archive import Archived

Cell = tuple[int, int, int]
"""(rank, life, round): what is counted once or not at all."""


@dataclass(frozen=True)
class Read:
    """One slice that somebody pulled."""

    reader: str
    tensor: str
    begin: int
    end: int
    version: int
    data: bytes


@dataclass(frozen=True)
class Seen:
    """The version at which somebody saw a slice, and the last decision that anybody had been told of before."""

    reader: str
    tensor: str
    version: int
    acknowledged: int


@dataclass(frozen=True)
class Version:
    """Tensors that somebody read as of one decision, and the last decision that anybody had been told of before."""

    reader: str
    number: int
    acknowledged: int
    values: dict[str, bytes]
    dtype: str = "float32"


@dataclass(frozen=True)
class Checkpoint:
    """One that somebody was told is written, and the last decision that anybody had been told of before."""

    leader: str
    version: int
    acknowledged: int


@dataclass(frozen=True)
class RowRead:
    """Rows that somebody pulled as of one decision: the bytes of each id's."""

    reader: str
    table: str
    version: int
    values: dict[int, bytes]
    least: int = -1
    """Number of the last assignment that somebody was told of before it."""


@dataclass(frozen=True)
class RowList:
    """Records of all rows that a table had as of one decision, and what was pulled of the same before."""

    reader: str
    table: str
    version: int
    records: tuple[bytes, ...]
    values: dict[int, bytes]


@dataclass
class Assigned:
    """Values that somebody assigned to rows: after one of the decisions from `since` to `until`."""

    table: str
    number: int
    value: float
    since: int
    until: int = 1 << 62
    """So far."""
    is_acknowledged: bool = False
    is_undone: bool = False
    """The store has gone back since it was sent: an answer that was on its way then says nothing of what there is."""


@dataclass
class Writes:
    """Plain writes of one writer: how many it began, and how many were acknowledged."""

    begun: int = 0
    acknowledged: int = 0
    last: int = 0
    """The last one that was acknowledged."""


@dataclass
class Additions:
    """Additions to one slice, of all that add to it: how many of them were begun, applied and refused, as they were
    told."""

    begun: int = 0
    applied: int = 0
    refused: int = 0


@dataclass
class Wait:
    """One call of an actor. A dead actor's is never finished."""

    who: str
    what: str
    began: float
    limit_s: float
    ended: float | None = None


@dataclass(frozen=True)
class Loss:
    """Somebody was told that a worker is lost."""

    who: str
    rank: int
    last_seen_s: float
    """How long ago that worker had been heard."""
    waited_s: float | None
    """How long whoever was told had waited, if its patience ended; None: it was told when the other was given up."""


@dataclass
class History:
    """Everything that checks need, beside the plan."""

    pushed: set[Cell] = field(default_factory=set)
    """Of which at least one push began."""
    lied: set[Cell] = field(default_factory=set)
    """That were to be committed with nothing pushed."""
    taken: dict[Cell, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = field(default_factory=dict)
    """Of the first tensor: at which value a worker took its gradient, and what it pushed."""
    norms: dict[Cell, tuple[Ranges, float]] = field(default_factory=dict)
    """What was pushed to which tensors: its norm."""
    shares: dict[Cell, tuple[tuple[int, ...], int, list[int]]] = field(default_factory=dict)
    """Where workers come and go: whom a worker took for those that train with it, and which samples of which epoch it
    took."""
    commits: dict[Cell, Committed] = field(default_factory=dict)
    """Answers that workers got."""
    asked_at: dict[Cell, float] = field(default_factory=dict)
    answered_at: dict[Cell, float] = field(default_factory=dict)
    scales: dict[int, set[float | None]] = field(default_factory=dict)
    """Decision that clips -> factors that were found for it."""
    reads: list[Read] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    row_reads: list[RowRead] = field(default_factory=list)
    row_lists: list[RowList] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    num_by_changes: int = 0
    """Of those, how many came by changes alone."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    archived: list[Archived] = field(default_factory=list)
    """What was written."""
    standby_differences: list[str] = field(default_factory=list)
    """What standbys had otherwise than their shards in the end."""
    gone: list[str] = field(default_factory=list)
    """Whoever was told that a version is not kept any longer."""
    writes: dict[str, Writes] = field(default_factory=dict)
    additions: dict[int, Additions] = field(default_factory=dict)
    """By slice of what has no value at first."""
    waits: list[Wait] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    """Actor -> 'finished', or the error that it ended with. The killed are not here."""
    barriers_entered: dict[int, float] = field(default_factory=dict)
    barriers_passed: dict[int, float] = field(default_factory=dict)
    leads: list[int] = field(default_factory=list)
    """Rounds that a worker was ahead of the slowest steady one when it was let go."""

    done: set[int] = field(default_factory=set)
    """Ranks that have left."""

    unapplied: list[tuple[str, int]] = field(default_factory=list)
    """(tensor, index) of slices that waited for contributions when a torn run was over."""

    # ---- the end of the run ----

    torn: TornRound | None = None

    decisions: list[DecisionFact] = field(default_factory=list)
    decided_at: dict[int, float] = field(default_factory=dict)
    """Decision -> when it was made."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    applied: list[list[int]] = field(default_factory=list)
    """Per shard: numbers of the decisions, as it applied them."""
    values: dict[str, bytes] = field(default_factory=dict)
    """Bytes of every tensor."""
    states: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Bytes of rule state, per tensor."""
    rows: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    """What each partition of every table has."""
    unfinished: list[str] = field(default_factory=list)
    """Actors that came to no end."""
    num_duplicates: int = 0
    """Slices that shards acknowledged and ignored: the disturbances did bite."""
    max_staleness: int = 0
    num_slots: int = 0
    """Slices that the shards hold, all together."""

    # ---- the store went back ----

    falls: list[int] = field(default_factory=list)
    """The versions of the checkpoints."""
    there_before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Where workers come and go: by the version at which the store went on, who was to take part in the next round."""
    standstills: list[tuple[float, float]] = field(default_factory=list)
    """From when to when somebody tried to have the store go on with another number of shards, or the silence of a
    host was seen to."""

    held_back: list[tuple[float, float]] = field(default_factory=list)
    """From when to when the coordinator's shard could tell nobody anything: its standby, which might lead, could answer
    nothing, and who watches both had not ended it yet."""

    def stood_still_s(self, began: float, ended: float) -> float:
        """How much of that time the store may have stood still."""
        return _covered_s(self.standstills, began, ended)

    def untold_s(self, began: float, ended: float) -> float:
        """How much of that time no decision could be told: the store stood still, or answers were held back."""
        return _covered_s([*self.standstills, *self.held_back], began, ended)

    def last_assigned(self, table: str, as_of: float = math.inf) -> int:
        """Number of the last assignment of rows of the table that must be there as of that decision; -1: none."""
        return max(
            (
                one.number
                for one in self.assigned
                if one.is_acknowledged and not one.is_undone and one.table == table and one.until <= as_of
            ),
            default=-1,
        )

    def fall(self, cut: int, *, keeps_writes: bool) -> None:
        """What came after that version never was. Whoever did it goes on elsewhere. `keeps_writes`: nothing came that
        anybody was told of."""
        self.falls.append(cut)
        self.there_before = {version: ranks for version, ranks in self.there_before.items() if version < cut}
        for one in self.assigned:
            one.is_undone |= not keeps_writes
        self.commits = {
            cell: replace(committed, last=min(committed.last, cut))
            for cell, committed in self.commits.items()
            if not committed.late and committed.decision <= cut
        }
        self.scales = {number: found for number, found in self.scales.items() if number <= cut}
        for noted in (self.reads, self.seen, self.versions, self.checkpoints, self.gone, self.leads):
            noted.clear()
        for of_rows in (self.row_reads, self.row_lists):
            of_rows.clear()
        self.asked_at = {cell: at for cell, at in self.asked_at.items() if cell in self.commits}
        self.answered_at = {cell: at for cell, at in self.answered_at.items() if cell in self.commits}
        for by_rank in (self.barriers_entered, self.barriers_passed, self.done):
            by_rank.clear()

    def refused_in(self, decision: int) -> set[Cell]:
        """Who was told that this decision is without its contribution, because that is refused."""
        return {cell for cell, told in self.commits.items() if told.refused is not None and told.decision == decision}

    def training_at(self, when: float) -> set[int]:
        """Ranks that have ended a round before, and were answered one after: they were there between, if nobody is
        lost."""
        began = {rank for (rank, _, _), asked in self.asked_at.items() if asked < when}
        return began & {rank for (rank, _, _), answered in self.answered_at.items() if answered > when}

    @property
    def acknowledged(self) -> int:
        """The last decision that anybody was told of so far."""
        return max((committed.last for committed in self.commits.values()), default=0)

    @property
    def factors(self) -> dict[int, float | None]:
        """The factor of each decision that clips."""
        return {number: next(iter(found)) for number, found in self.scales.items()}


def _covered_s(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """How much of the time from `began` to `ended` is in any of the spans."""
    covered_s = 0.0
    for since, until in sorted(spans):
        covered_s += max(0.0, min(ended, until) - max(began, since))
        began = max(began, until)
    return covered_s
