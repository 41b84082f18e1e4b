"""Requests of workers whose replies are owed, and whose time is up. Part of the coordinator."""

from __future__ import annotations

import math
from typing import Generic, Protocol, TypeVar

from psstore.protocol.earliest import Earliest


class Wait(Protocol):
    """A request that waits until some time."""

    @property
    def until(self) -> float:
        """When the wait ends; may be infinite."""


W = TypeVar("W", bound=Wait)


class Waits(Generic[W]):
    """The waits of one kind, at most one for each rank."""

    def __init__(self) -> None:
        self.of: dict[int, W] = {}
        """Rank -> wait; to be read only."""
        self._ends = Earliest()
        self._changed: set[int] = set()
        """Ranks whose ends `_ends` has to be told of: most waits are over before anybody asks when."""

    def put(self, rank: int, wait: W) -> None:
        """Sets the rank's wait, in place of the one that it had."""
        self.of[rank] = wait
        self._changed.add(rank)

    def pop(self, rank: int) -> W | None:
        self._changed.add(rank)
        return self.of.pop(rank, None)

    def clear(self) -> None:
        self._changed.update(self.of)
        self.of.clear()

    def due(self, now: float) -> list[tuple[int, W]]:
        """The waits, by rank, whose time is up at `now`. Each is returned once, and stays."""
        self._note_changes()
        return [(rank, self.of[rank]) for rank in self._ends.take(now)]

    def next_wake(self) -> float | None:
        """When `due` may next find something."""
        self._note_changes()
        return self._ends.smallest()

    def _note_changes(self) -> None:
        for rank in self._changed:
            wait = self.of.get(rank)
            if wait is not None and wait.until < math.inf:
                self._ends.put(rank, wait.until)
            else:
                self._ends.drop(rank)
        self._changed.clear()
