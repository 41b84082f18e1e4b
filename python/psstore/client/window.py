"""How many bytes may be on their way to the shards and back: enough for the links, and few more.

    window = 2 · rate · shortest trip, and no less than a few pushes

A trip is a push, the step that waits for everybody's push, and the pull of what became of it. The rate is what came
back in a round per second. The product of both is what keeps the links busy with no queue in front of them, as in BBR
(Cardwell et al., ACM Queue 14(5), 2016, for a connection; here for all of a worker's together). Twice that leaves room
for a queue, and has a window that is too small double with every round. A round begins with half of it, without the
queue: else what is out at once would lengthen even the shortest trip, and the window with it.
"""

from __future__ import annotations

import math

FEWEST_PUSHES = 4
"""Pushes of the largest size: one in each link, and one in front of each. With 3 eight workers and eight shards took
1.3 times as long."""

STALL_S = 0.1
"""With nothing back for so long, and for STALL_TRIPS of the shortest trips, a window is taken to be too small."""

STALL_TRIPS = 4

FIRST_STALL_S = 1.0
"""While no trip was seen yet: longer than one takes around the earth."""

FORGETTING = 1.1
"""By so much in each round the shortest trip is taken to be longer, and the rate to be lower, than they once were:
links and loads change."""

FIRST_CALM_ROUNDS = 8
LAST_CALM_ROUNDS = 1024
"""Rounds without a stall after which the window is narrowed again: twice as many after each stall."""


class Window:
    """How far one worker's pushes may run ahead. Lives as long as its connection; rounds begin with `begin`."""

    def __init__(self, fewest_pushes: int = FEWEST_PUSHES) -> None:
        self._fewest_pushes = fewest_pushes
        self._largest_bytes = 0
        """Push of this round."""
        self._shortest_s = math.inf
        self._rate = 0.0
        """Bytes per second, of the rounds before."""
        self._round_rate = 0.0
        """Bytes per second in this round, so far."""
        self._open_bytes = 0.0
        """How wide this round has opened it so far."""
        self._came_bytes = 0
        """In this round, after the first push that came back."""
        self._first_came: float | None = None
        self._wider = 1
        """So many times, after stalls."""
        self._stalled = False
        """In this round."""
        self._calm_rounds = 0
        self._needed_calm = FIRST_CALM_ROUNDS

    @property
    def num_bytes(self) -> float:
        return self._wider * max(self._fewest_bytes, min(self._open_bytes, 2 * self._busy_bytes))

    @property
    def _fewest_bytes(self) -> int:
        return self._fewest_pushes * self._largest_bytes

    @property
    def _busy_bytes(self) -> float:
        return self._rate * self._shortest_s if self._rate else 0.0  # no trip yet: 0 times infinity

    @property
    def patience_s(self) -> float:
        """Nothing back for so long is a stall."""
        return FIRST_STALL_S if math.isinf(self._shortest_s) else max(STALL_S, STALL_TRIPS * self._shortest_s)

    def begin(self) -> None:
        self._largest_bytes = 0
        self._first_came, self._came_bytes = None, 0
        self._shortest_s *= FORGETTING
        self._rate = max(self._rate / FORGETTING, self._round_rate)
        self._round_rate = 0.0
        self._open_bytes = self._busy_bytes
        self._calm_rounds = 0 if self._stalled else self._calm_rounds + 1
        self._stalled = False
        if self._wider > 1 and self._calm_rounds >= self._needed_calm:
            self._wider, self._calm_rounds = self._wider // 2, 0

    def sent(self, num_bytes: int) -> None:
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def came_back(self, num_bytes: int, *, began: float, now: float) -> None:
        """A push that had its turn then."""
        self._shortest_s = min(self._shortest_s, now - began)
        self._open_bytes = max(self._open_bytes, self._fewest_bytes) + num_bytes
        if self._first_came is None:
            self._first_came = now
            return
        self._came_bytes += num_bytes
        if now > self._first_came:
            self._round_rate = self._came_bytes / (now - self._first_came)

    def stall(self) -> None:
        """All that is out waits for something: for a slow worker, or for one that pushes in another order and waits
        for us. To wait on may be in vain."""
        self._wider *= 2
        if not self._stalled:
            self._stalled = True
            self._needed_calm = min(2 * self._needed_calm, LAST_CALM_ROUNDS)
