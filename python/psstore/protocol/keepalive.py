"""Whether a shard that somebody waits for still speaks: when to ask it, and since when it has not answered.

A process that stands still, or a link that swallows everything, closes no connection. So a shard that says nothing is
asked for a word, unless it is seen to take what it is sent, which may be long on its way. Looks are counted, and not
only seconds: the driver reads what has come between two of them, so that a client that stood still itself does not take
its own pause for the shard's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOOKS = 3
"""Looks after the question, without a byte, until the connection counts as broken."""

LOOKS_PER_TIMEOUT = 10
"""How often to look in the time that a shard has for an answer: of that a third is over when a connection is given up,
and two thirds are left for others."""

MIN_LOOK_S = 1.0
"""Shortest pause between looks: any busy machine makes shorter ones."""


def look_interval_s(timeout_s: float) -> float:
    """How long a shard that may take `timeout_s` for an answer can be silent before it is asked."""
    return max(MIN_LOOK_S, timeout_s / LOOKS_PER_TIMEOUT)


@dataclass(kw_only=True)
class Keepalive:
    """One session's questions to a silent shard, and whether its connection is given up."""

    interval_s: float = math.inf
    """Seconds between two looks; infinite: never looks."""
    looked_at: float = -math.inf
    looks_at: float = math.inf
    asked_at: float | None = None
    """When the question was put that has no answer yet."""
    moved_at: float = -math.inf
    """When the shard's system was last seen to have taken more of what it is sent: no word, but a sign of life."""
    is_broken: bool = False
    """True if nothing more is to be expected from this connection."""
    _looks: int = 0
    _taken_bytes: int | None = None
    _missed_since: float = math.inf
    """When the first of the requests was made that passed their deadlines in silence."""

    def begin(self, now: float) -> None:
        """Starts looking: something is asked for from now on."""
        if self.looks_at == math.inf:
            self.looked_at, self.looks_at = now, now + self.interval_s

    def end(self) -> None:
        """Stops looking: nothing is asked for, or the shard has spoken on a new connection."""
        self.looks_at, self.asked_at, self._looks = math.inf, None, 0

    def disconnected(self) -> None:
        """The question stays, to be put again on the next connection."""
        self.is_broken, self._looks, self._taken_bytes, self._missed_since = False, 0, None, math.inf

    def sent(self, taken_bytes: int | None, now: float) -> None:
        """Notes how many bytes the far end's system has taken of what it is sent; None: all, or nobody knows."""
        before, self._taken_bytes = self._taken_bytes, taken_bytes
        if before is not None and taken_bytes is not None and taken_bytes > before:
            self.moved_at = now

    def look(self, now: float, *, heard_at: float) -> bool:
        """Looks whether the shard has spoken since the last look. Returns True if it is to be asked now.

        `heard_at`: when the last byte came."""
        alive = max(heard_at, self.moved_at) > self.looked_at
        self.looked_at, self.looks_at = now, now + self.interval_s
        if alive:
            self.asked_at, self._looks = None, 0
        elif self.asked_at is not None:
            self._looks += 1
            self.is_broken |= self._looks >= MAX_LOOKS
        else:
            self.asked_at = now
            return True
        return False

    def missed(self, now: float, *, began: float, heard_at: float) -> None:
        """A request that began then has passed its deadline. Whoever is in a hurry may ask for an answer so soon that
        no look comes before: the connection is of no use if nothing came in all that time, of one or of several."""
        alive_at = max(heard_at, self.moved_at)
        if alive_at > began:
            return
        self._missed_since = began if alive_at > self._missed_since else min(began, self._missed_since)
        self.is_broken |= now - self._missed_since >= MIN_LOOK_S
