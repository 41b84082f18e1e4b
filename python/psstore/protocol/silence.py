"""Whether a shard that somebody waits for still speaks: when to ask it, and since when it has not answered.

A wait for other workers may be long, and a process that stands still, or a link that swallows everything, closes no
connection. So a shard that says nothing meanwhile is asked for a word. Looks are counted, and not only seconds: the
driver reads what has come between two of them, so that a client that stood still itself does not take its own pause for
the shard's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOOKS = 3
"""After the question, without a byte: the connection is of no use then."""

LOOKS_PER_TIMEOUT = 10
"""How often to look in the time that a shard has for an answer: of that a third is over when a connection is given up,
and two thirds are left for others."""

MIN_LOOK_S = 1.0
"""Less is a pause that any busy machine makes."""


def look_interval_s(timeout_s: float) -> float:
    """How long a shard that may take `timeout_s` for an answer can be silent before it is asked."""
    return max(MIN_LOOK_S, timeout_s / LOOKS_PER_TIMEOUT)


@dataclass(kw_only=True)
class Silence:
    """Of one session."""

    interval_s: float = math.inf
    """Between two looks; infinite: never."""
    heard: bool = False
    """Bytes have come since the last look. Whoever receives says so."""
    looked_at: float = -math.inf
    looks_at: float = math.inf
    asked_at: float | None = None
    """When the question was put that has no answer yet."""
    _looks: int = 0

    @property
    def is_broken(self) -> bool:
        """Nothing more is to be expected from this connection."""
        return self._looks >= MAX_LOOKS

    def begin(self, now: float) -> None:
        """Something is asked for from now on."""
        if self.looks_at == math.inf:
            self.looked_at, self.looks_at = now, now + self.interval_s

    def end(self) -> None:
        """Nothing is, or the shard has spoken on a new connection."""
        self.looks_at, self.asked_at, self._looks = math.inf, None, 0

    def disconnected(self) -> None:
        """The question stays, to be put again on the next connection."""
        self.heard, self._looks = False, 0

    def look(self, now: float, *, excused: bool) -> bool:
        """True: ask now. `excused`: it need not say anything yet."""
        heard, self.heard = self.heard, False
        self.looked_at, self.looks_at = now, now + self.interval_s
        if heard or excused:
            self.asked_at, self._looks = None, 0
        elif self.asked_at is not None:
            self._looks += 1
        else:
            self.asked_at = now
            return True
        return False
