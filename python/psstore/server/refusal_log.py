"""Logs whose contributions are refused: each rank's first, its second, its fourth and so on, so that a learner which is
astray for long fills no disk."""

from __future__ import annotations

import logging

from psstore.protocol.norm_guard import NormGuard

_log = logging.getLogger("psstore.server")


class RefusalLog:
    """Watches one guard, which refuses in few turns of the loop."""

    def __init__(self, guard: NormGuard) -> None:
        self._guard = guard
        self._told = dict(guard.num_refused)

    def update(self) -> None:
        """Logs what was refused since the last call."""
        if self._told == self._guard.num_refused:
            return
        for rank, count in self._guard.num_refused.items():
            before = self._told.get(rank, 0)
            if count.bit_length() > before.bit_length():
                _log.warning("%s (of this rank so far: %d)", self._guard.latest[rank].describe(), count)
            self._told[rank] = count
