"""Until when a round that has its quorum waits for those who are missing. Part of the coordinator.

A grace is of so many seconds, or as long as it pays. What a contribution brings is what one of those who are there has
done since the last round; what waiting costs is their time, all together. How long a missing worker has taken for its
last contributions says how likely it is to come by when: of the times at which it would come by these, the round waits
until the one at which the gain exceeds the cost by most, on average. Whoever has never taken as long as it does now is
not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

KEPT = 32
"""Contributions of a worker by which it is judged. With 8, a worker that varies by a few per cent is too often later
than it was in any of them: four like that spent 0.92 of their time on contributions, and 0.96 with 32 (in
bench/graces.py)."""

SLACK = 1.25
"""How many times as long it waits as is worth it: whoever comes at about the time at which it came before shall not be
late. Without, those four spent 0.94 of their time on contributions."""


class Grace:
    """What was seen of workers, by commits that came and answers that they got."""

    def __init__(self) -> None:
        self._took_s: dict[int, list[float]] = {}
        """Rank -> of its last contributions, the latest at the end: from the answer to the one before to its commit."""
        self._answered_at: dict[int, float] = {}
        """Rank -> when its last contribution was answered, until the next one comes."""
        self._decided_at = 0.0
        """When the last decision was made."""
        self._came_at = 0.0
        """When somebody came last to the open round."""

    # ---- events ----

    def came(self, rank: int, now: float, *, brings: bool, late: bool = False) -> None:
        """A commit has come. `brings`: a contribution; else it says nothing of how long one takes. `late`: for a round
        that is decided."""
        self._came_at = self._came_at if late else now
        since = self._answered_at.pop(rank, None) if brings else None
        if since is not None:
            took_s = self._took_s.setdefault(rank, [])
            took_s.append(now - since)
            del took_s[:-KEPT]

    def answered(self, rank: int, now: float, *, brings: bool) -> None:
        """Its commit was: the next contribution is begun."""
        if brings:
            self._answered_at[rank] = now

    def decided(self, now: float) -> None:
        self._decided_at = now

    def forget(self, rank: int) -> None:
        """The rank's next life may be on another machine."""
        self._took_s.pop(rank, None)
        self._answered_at.pop(rank, None)

    # ---- the answer ----

    def ends(self, *, num_there: int, missing: Iterable[int]) -> float:
        """When the open round, which has its quorum since then and so many commits by now, goes on without whoever is
        missing."""
        gain_s = self._came_at - self._decided_at
        longest_s = max((self._worth_s(rank, gain_s, num_there) for rank in missing), default=0.0)
        return self._came_at + SLACK * longest_s

    def _worth_s(self, rank: int, gain_s: float, cost: int) -> float:
        """How long it pays to wait for the rank, from when somebody came last. `gain_s`: what it brings if it comes;
        `cost`: what a second costs."""
        began = self._answered_at.get(rank)
        if began is None:
            return 0.0
        ends = (began + took_s - self._came_at for took_s in self._took_s.get(rank, ()))
        after_s = sorted(one for one in ends if one > 0.0)
        best, worth_s, waited_s = 0.0, 0.0, 0.0
        for num_come, one in enumerate(after_s, start=1):
            waited_s += one  # for each time at which it has come by then; the others are waited for until then
            pays = num_come * gain_s - cost * (waited_s + (len(after_s) - num_come) * one)
            if pays > best:
                best, worth_s = pays, one
        return worth_s
