"""Where training ends: after which decision a worker's commits count no more. Part of the coordinator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

NEVER = 1 << 62
"""A version that no store comes to. A worker that ends there takes back what was said of its end, by itself or by
others: that training is over, and the next one of this life has an end of its own."""

NOWHERE = float("inf")


class Stops:
    """A rank has a limit of its own, which its latest word sets, and one that was set for everybody, which nobody's own
    word puts off: it counts up to the lower one."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._everyones: dict[int, int] = {}
        self._ends: list[int] = []
        """All of them, ascending: looked at after each decision, and set seldom."""
        self._num_changes = 0

    def limit(self, rank: int, version: int) -> None:
        """A rank's own word."""
        self._own[rank] = version
        if version >= NEVER:
            self._everyones.pop(rank, None)
        self._note()

    def end(self, ranks: Iterable[int], version: int) -> None:
        """Somebody's word for these: an end that was set before is not put off."""
        for rank in ranks:
            self._everyones[rank] = min(version, self._everyones.get(rank, version))
        self._note()

    def replace(self, rank: int, others: Iterable[int]) -> None:
        """A new life of this rank, which takes up what was said for everybody when others of its group were there."""
        self._own.pop(rank, None)
        self._everyones.pop(rank, None)
        told = [self._everyones[other] for other in others if other in self._everyones]
        if told:
            self._everyones[rank] = min(told)
        self._note()

    def is_over(self, rank: int, last: int) -> bool:
        """Whether this rank is done when `last` is the last decision."""
        return bool(self._ends and last >= self._ends[0]) and (
            last >= self._own.get(rank, NOWHERE) or last >= self._everyones.get(rank, NOWHERE)
        )

    def at(self, last: int) -> tuple[int, int]:
        """As long as it is the same, no rank has come to be done."""
        return self._num_changes, bisect_right(self._ends, last)

    def _note(self) -> None:
        self._ends = sorted([*self._own.values(), *self._everyones.values()])
        self._num_changes += 1
