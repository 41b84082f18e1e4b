"""When a shard hears nobody but who writes the store down, to have it go on with another number of shards.

    allowed ─► asked ─► nothing is on its way ─► frozen: nothing changes ─► the shard's process is ended
       ▲                     │ else: asked again    │ it came to nothing
       └─────────────────────┴──────────────────────┘ all others begin with connections anew, and nothing has happened

What is told then was known before, and is in what is written; what was asked and is not heard was promised to nobody.
Who allows it, and ends it, is the store's supervisor, which alone knows what becomes of the process that writes: if a
lost connection ended it, a shard would go on that somebody takes for frozen.
"""

from __future__ import annotations

from psstore import _core
from psstore.protocol.coordinator import Coordinator


class Standstill:
    """Whether a shard stands still. Single-threaded, as its service."""

    def __init__(self, shard: _core.Shard, data: _core.DataService, coordinator: Coordinator | None) -> None:
        self.since: float | None = None
        """When the shard was frozen; None: it is not."""
        self._shard = shard
        self._data = data
        self._coordinator = coordinator
        self._allowed = ""
        """The client that may ask for it."""
        self._gather_until: float | None = None
        """How long workers may take to hand in; None: nobody has asked."""
        self._wanted: int | None = None
        """The decision as of which workers are to hand in."""

    def allow(self, client: str) -> None:
        """From now on that client may ask for it."""
        self._allowed = client

    def end(self) -> None:
        """Nobody may ask for it any more, and the shard is not frozen."""
        self._allowed, self._gather_until, self._wanted, self.since = "", None, None, None
        self._data.freeze(False)

    def ask(self, client: str, *, gather_s: float, now: float) -> bool:
        """Whether the shard is frozen for that client, which wants it to be."""
        if client != self._allowed:
            return False
        if self._gather_until is None:
            self._gather_until = now + gather_s
        self.look(now)
        return self.since is not None

    def look(self, now: float) -> None:
        """Freezes the shard if that is wanted and this is a moment for it. To be called after whatever was heard: the
        next thing may be one too many."""
        if self._gather_until is not None and self.since is None and self._is_quiet(self._gather_until <= now):
            self.since = now
            self._data.freeze(True)

    def _is_quiet(self, has_gathered: bool) -> bool:
        """Whether no slot waits for anything, and on shard 0 the last decision is done and handed in for, unless
        workers have had their time for that."""
        if not self._shard.is_settled():
            return False
        if self._coordinator is None:
            return True
        rounds = self._coordinator.rounds
        if rounds.log.last != self._shard.version or not rounds.is_done:
            return False
        return has_gathered or self._is_handed_in()

    def _is_handed_in(self) -> bool:
        """Whether workers have handed in as of the last decision; else they are asked to, as of the next one. Where
        rounds have all workers, no round can end before each has done so."""
        assert self._coordinator is not None, "only it hears of that"
        rounds = self._coordinator.rounds
        last, hand_ins = rounds.log.last, rounds.hand_ins
        wanted = last if self._wanted is None or self._coordinator.consistency.lockstep else self._wanted
        if not hand_ins.missing(wanted):
            return True
        if (self._wanted is None or self._wanted < last) and not hand_ins.is_gathered:
            hand_ins.want_next(last)
            self._wanted = last + 1
        return False
