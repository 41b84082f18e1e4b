"""Where training ends: after which decision a worker's commits count no more. Part of the coordinator."""

from __future__ import annotations

from collections.abc import Iterable


class Stops:
    """By rank, of its present life."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._first: float = float("inf")
        """The earliest of them: asked after each decision, and set seldom."""

    def stop(self, ranks: Iterable[int], version: int) -> None:
        """Commits of these ranks count up to that decision. The latest word holds."""
        self._after.update(dict.fromkeys(ranks, version))
        self._first = min(self._after.values(), default=float("inf"))

    def forget(self, rank: int) -> None:
        """Its life is over."""
        if self._after.pop(rank, None) is not None:
            self._first = min(self._after.values(), default=float("inf"))

    def is_over(self, rank: int, last: int) -> bool:
        """Whether this rank is done when `last` is the last decision."""
        return last >= self._first and rank in self._after and last >= self._after[rank]

    def is_anyone_over(self, last: int) -> bool:
        """Whether some rank is."""
        return last >= self._first
