"""The smallest of many numbers that change: deadlines by who waits, clocks by rank. Part of the coordinator.

A heap that learns late: what grew or was dropped stays in it until it comes to the top. Nearly all that is told here
grows, and that costs a look; looking through all cost each event O(n).
"""

from __future__ import annotations

import heapq

SLACK = 64
"""Entries of a heap, beside two for each number, for which it is not made anew."""


class Earliest:
    """Numbers by rank."""

    def __init__(self) -> None:
        self._numbers: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Holds for each rank that has a number at least one entry that is not larger."""

    def put(self, rank: int, number: float) -> None:
        """Sets the rank's number, in place of the one that it had."""
        before = self._numbers.get(rank)
        self._numbers[rank] = number
        if before is not None and before <= number:
            return
        if len(self._heap) < 2 * len(self._numbers) + SLACK:
            heapq.heappush(self._heap, (number, rank))
        else:
            self._heap = [(number, rank) for rank, number in self._numbers.items()]
            heapq.heapify(self._heap)

    def drop(self, rank: int) -> None:
        """The rank has none any more, if it had one."""
        self._numbers.pop(rank, None)

    def __contains__(self, rank: int) -> bool:
        return rank in self._numbers

    def clear(self) -> None:
        self._numbers.clear()
        self._heap.clear()

    def smallest(self) -> float | None:
        """None: nobody has a number."""
        heap, numbers = self._heap, self._numbers
        while heap:
            entry, rank = heap[0]
            number = numbers.get(rank)
            if number == entry:
                return number
            if number is None or number < entry:  # which has another entry
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (number, rank))
        return None

    def take(self, most: float) -> list[int]:
        """Drops the ranks whose numbers are `most` or less, and returns them in their order."""
        taken = []
        while (smallest := self.smallest()) is not None and smallest <= most:
            _, rank = heapq.heappop(self._heap)
            del self._numbers[rank]
            taken.append(rank)
        return sorted(taken)
