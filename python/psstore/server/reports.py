"""Waiting for whoever has something to report: the processes, the monitor over other hosts, and signals."""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from psstore.server.kept_companion import KeptCompanion
from psstore.server.processes import CheckpointProcess, MetricsProcess, ReshardProcess, ShardProcess, Signals

if TYPE_CHECKING:  # a store on one host starts faster without asyncio in its supervisor
    from psstore.server.peer_monitor import PeerMonitor

Event: TypeAlias = "ShardProcess | CheckpointProcess | MetricsProcess | ReshardProcess | PeerMonitor | Signals"
"""Who may have something to report."""

COMPANIONS = (CheckpointProcess, MetricsProcess, ReshardProcess)
"""Processes beside the shards."""

_log = logging.getLogger("psstore.supervisor")


class Reports:
    """Reports of all that is registered with a selector, each with an `Event` as data."""

    def __init__(self, selector: selectors.BaseSelector, *, metrics: KeptCompanion[MetricsProcess]) -> None:
        """`metrics`: started again here whenever it ends by itself."""
        self._selector = selector
        self._metrics = metrics

    def wait(self, deadline: float | Callable[[], float] = math.inf) -> list[Event]:
        """Who has something to report: `Signals`, if the store is to end. An empty list at the deadline: nobody has."""
        while True:
            left_s = max(0.0, (deadline() if callable(deadline) else deadline) - time.monotonic())
            events = [key.data for key, _ in self._selector.select(left_s if left_s < math.inf else None)]
            told = [event for event in events if self._is_told(event)]
            if told or not events:
                return told

    def _is_told(self, event: Event) -> bool:
        """Whether it is anybody else's business; what is not is done here."""
        if isinstance(event, MetricsProcess):
            self._metrics.begin_again()
            return False
        return not isinstance(event, Signals) or self._is_to_end(event)

    def _is_to_end(self, signals: Signals) -> bool:
        """Says what else they may be about: a shard that stands still, or goes on."""
        asked = signals.take()
        for key in self._selector.get_map().values():
            if isinstance(key.data, ShardProcess) and (pause := key.data.pause()) is not None:
                _log.warning("%s", pause)
        return asked
