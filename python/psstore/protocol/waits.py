"""Requests of workers whose replies are owed, and whose time is up. Part of the coordinator."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, Protocol, TypeVar

from psstore.protocol.earliest import Earliest


class Wait(Protocol):
    """What ends at some time."""

    @property
    def until(self) -> float:
        """May be infinite."""


W = TypeVar("W", bound=Wait)


class Waits(Generic[W]):
    """One wait at most for each rank."""

    def __init__(self) -> None:
        self._waits: dict[int, W] = {}
        self._ends = Earliest()

    def put(self, rank: int, wait: W) -> None:
        """In place of the one that the rank had."""
        self._waits[rank] = wait
        if wait.until < math.inf:
            self._ends.put(rank, wait.until)
        else:
            self._ends.drop(rank)

    def pop(self, rank: int) -> W | None:
        self._ends.drop(rank)
        return self._waits.pop(rank, None)

    def clear(self) -> None:
        self._waits.clear()
        self._ends.clear()

    def due(self, now: float) -> list[tuple[int, W]]:
        """Those whose time is up: each is told once, and stays."""
        return [(rank, self._waits[rank]) for rank in self._ends.take(now)]

    def next_wake(self) -> float | None:
        """When `due` may next find something."""
        return self._ends.smallest()

    # ---- as of a dict ----

    def get(self, rank: int) -> W | None:
        return self._waits.get(rank)

    def values(self) -> ValuesView[W]:
        return self._waits.values()

    def items(self) -> ItemsView[int, W]:
        return self._waits.items()

    def __getitem__(self, rank: int) -> W:
        return self._waits[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._waits

    def __iter__(self) -> Iterator[int]:
        return iter(self._waits)

    def __len__(self) -> int:
        return len(self._waits)
