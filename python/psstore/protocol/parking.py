"""Reads that wait, each by the first thing that it waits for. Part of the shard's service.

While the layers of an early round arrive hundreds of reads may be parked, and each event looks at those alone that it
concerns.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from psstore import _core
from psstore.errors import Overloaded
from psstore.protocol.connection import Connection
from psstore.wire.messages import Carry

MAX_PARKED = 1024
"""Reads of one connection that may wait at a time, since each holds its table and its body. In frames of 4 MiB
they ask for 4 GiB."""


@dataclass(frozen=True, eq=False)
class Parked:
    """A PULL or NORM that waits for a decision, for what a decision lacks, or for a first value."""

    connection: Connection
    frame: _core.Frame
    carry: Carry
    since: float

    @property
    def until(self) -> float:
        return self.since + self.carry.wait_s


class Version(NamedTuple):
    """The shard is at this version, or later."""

    number: int


class Touched(NamedTuple):
    """Something was done to the slot of this key."""

    key: int


Wanted = Version | Touched
Group = dict[Parked, None]
"""A set in the order of arrival, so that equal seeds give equal runs."""


class Parking:
    """A read is here from `park` until `take_due` or `forget` gives it up; it may be parked again."""

    def __init__(self) -> None:
        self._wanted: dict[Parked, Wanted] = {}
        self._versions: dict[int, Group] = {}
        self._keys: dict[int, Group] = {}
        self._due: Group = {}
        """What they wait for may be there."""
        self._ends: list[tuple[float, int, Parked]] = []
        """Heap by `until`. Who has gone before its end stays in it until then, or until they are too many."""
        self._order = itertools.count()
        self._per_connection: Counter[int] = Counter()

    def park(self, parked: Parked, wanted: Wanted) -> None:
        """Raises Overloaded if too many reads of its connection wait."""
        conn = parked.connection.id
        if self._per_connection[conn] >= MAX_PARKED:
            raise Overloaded(f"{MAX_PARKED} reads of this connection wait already; await some before asking for more")
        self._per_connection[conn] += 1
        self._wanted[parked] = wanted
        self._group(wanted)[parked] = None
        heapq.heappush(self._ends, (parked.until, next(self._order), parked))
        if len(self._ends) > 2 * len(self._wanted) + MAX_PARKED:
            self._ends = [(waiting.until, next(self._order), waiting) for waiting in self._wanted]
            heapq.heapify(self._ends)

    def forget(self, conn: int) -> None:
        """The connection is gone: nobody waits there."""
        for parked in [parked for parked in self._wanted if parked.connection.id == conn]:
            self._remove(parked)

    # ---- events ----

    def reached(self, version: int) -> None:
        """The shard is at this version now."""
        for number in [number for number in self._versions if number <= version]:
            self._due |= self._versions[number]

    def touched(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._due |= self._keys.get(key, {})

    def touched_all(self) -> None:
        for group in self._keys.values():
            self._due |= group

    @property
    def awaits_keys(self) -> bool:
        """`touched` may concern somebody."""
        return bool(self._keys)

    def take_due(self, now: float) -> list[Parked]:
        """Those whose wait may be over, by an event or by time. They are no longer parked."""
        while self._ends and self._ends[0][0] <= now:
            parked = heapq.heappop(self._ends)[2]
            if parked in self._wanted:
                self._due[parked] = None
        due, self._due = list(self._due), {}
        for parked in due:
            self._remove(parked)
        return due

    def next_wake(self) -> float | None:
        """When `take_due` may next give something: at once after an event."""
        if self._due:
            return 0.0
        while self._ends and self._ends[0][2] not in self._wanted:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    # ---- how ----

    def _group(self, wanted: Wanted) -> Group:
        if isinstance(wanted, Version):
            return self._versions.setdefault(wanted.number, {})
        return self._keys.setdefault(wanted.key, {})

    def _remove(self, parked: Parked) -> None:
        wanted = self._wanted.pop(parked)
        group = self._group(wanted)
        del group[parked]
        if not group:
            if isinstance(wanted, Version):
                del self._versions[wanted.number]
            else:
                del self._keys[wanted.key]
        self._due.pop(parked, None)
        self._per_connection[parked.connection.id] -= 1
        if not self._per_connection[parked.connection.id]:
            del self._per_connection[parked.connection.id]
