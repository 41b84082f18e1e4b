"""Whether the workers of a job are still coming, at work, or done: from what shard 0 counts.

What has not started yet is waited for without an end; what was there and is lost, for `patience_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REMIND_S = 30.0
"""How often it is said again who is waited for."""


@dataclass(frozen=True)
class Verdict:
    """The job is over. `reason`: why it failed; None: every worker has joined and left."""

    reason: str | None


class JobState:
    """Fed with the coordinator's counters about once a second. `now` is any monotonic clock."""

    def __init__(self, *, num_workers: int, patience_s: float, elastic: bool = False) -> None:
        """`elastic`: not all ranks need ever be there."""
        self._ranks = set(range(num_workers))
        self._is_elastic = elastic
        self._patience_s = patience_s
        self._lost_since: float | None = None
        """Since when nobody is at work any more, of those who were."""
        self._said = ""
        self._said_at: float | None = None

    def update(self, counters: Mapping[str, int | float | str], now: float, *, may_come: bool = True) -> Verdict | None:
        """None: go on. `may_come`: the store was whole, so that who is lost could come back."""
        left, lost, live = _left_lost_live(counters)
        if left == self._ranks or (self._is_elastic and left and not live | lost):
            return Verdict(None)
        if live or not lost:
            self._lost_since = None
        elif self._lost_since is None or not may_come:
            self._lost_since = now
        elif now - self._lost_since >= self._patience_s:
            return Verdict(
                f"{names_of(lost)} went without leaving, and nobody came back within {self._patience_s:g} s; a worker"
                " that has finished closes its store (`with`, or close())"
            )
        return None

    def reminder(self, counters: Mapping[str, int | float | str], now: float) -> str | None:
        """Who is waited for: a loss at once, and everybody every REMIND_S; else None."""
        left, lost, live = _left_lost_live(counters)
        absent = set() if self._is_elastic else self._ranks - left - lost - live
        parts = [f"{names_of(lost)} (lost)"] * bool(lost) + [f"{names_of(absent)} (not joined yet)"] * bool(absent)
        text = " and ".join(parts)
        if self._said_at is None:
            self._said_at = now
        if not text or not ((lost and text != self._said) or now - self._said_at >= REMIND_S):
            return None
        self._said, self._said_at = text, now
        return f"waiting for {text}"


def _left_lost_live(counters: Mapping[str, int | float | str]) -> tuple[set[int], set[int], set[int]]:
    """The ranks; who is gone of a group without its end is lost, though nobody is there who would wait."""
    left, lost, live, gone = (ranks_in(counters, f"ranks_{what}") for what in ("left", "lost", "live", "gone"))
    return left - gone, lost | gone, live


def ranks_in(counters: Mapping[str, int | float | str], name: str) -> set[int]:
    """'0,2' -> {0, 2}; of an older shard 0, which does not tell, none."""
    return {int(rank) for rank in str(counters.get(name, "")).split(",") if rank}


def names_of(ranks: set[int]) -> str:
    """'rank 1', or 'ranks 1, 3'."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
