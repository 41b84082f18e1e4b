"""The end of a store while all of its shards are there, here and on other hosts: its last checkpoint, and the word that
all may go."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psstore.exit_codes import EXIT_FAILED, EXIT_OK
from psstore.server.kept_companion import KeptCompanion
from psstore.server.processes import CheckpointProcess, ShardProcess, Signals
from psstore.server.reports import Event, Reports
from psstore.server.shard_group import ShardGroups
from psstore.server.site import Site
from psstore.server.store_life import Ending

if TYPE_CHECKING:  # a store on one host starts faster without asyncio in its supervisor
    from psstore.server.apart_group import ApartGroup
    from psstore.server.peer_monitor import PeerMonitor

LINGER_S = 10.0
"""How long other hosts may take to go, which hear of the end from this one."""

LOOK_AGAIN_S = 0.2
"""Between two looks whether one has gone."""

LAST_CHECKPOINT_S = 600.0
"""How long the last checkpoint of a store that is asked to end may take."""

TELL_S = 3.0
"""After which it is said that it is waited for."""

_log = logging.getLogger("psstore.supervisor")


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Brings one life of a store to its end."""

    site: Site
    groups: ShardGroups | ApartGroup
    checkpoints: KeptCompanion[CheckpointProcess]
    monitor: PeerMonitor | None
    reports: Reports

    def conclude(self, ending: Ending) -> Ending:
        """Does what is left to do, and returns what becomes of the end with that. The shards are there still."""
        is_written = self._end_checkpoints()
        if not ending.is_asked:
            self.groups.store_ends(" ".join((ending.reason or "").split()))
            self._linger(self.site.ended_before(leads=self.groups.leads))
        if is_written or ending.status != EXIT_OK:
            return ending
        return replace(ending, status=EXIT_FAILED, reason="the last checkpoint was not written; the log says why")

    def _end_checkpoints(self) -> bool:
        """Has the last one written. Another signal ends the wait. False: it is not."""
        process = self.checkpoints.process
        if process is None:
            return not self.checkpoints.is_to_run
        process.finish()
        events = self._hear_of(process, for_s=TELL_S)
        if events == []:
            _log.warning("waiting for the last checkpoint; another signal ends that")
            events = self._hear_of(process, for_s=LAST_CHECKPOINT_S - TELL_S)
        if events == []:
            _log.warning("the last checkpoint was not written within %g s", LAST_CHECKPOINT_S)
        is_written = bool(events) and not process.has_failed()
        self.checkpoints.end()
        return is_written

    def _hear_of(self, process: CheckpointProcess, *, for_s: float) -> list[Event] | None:
        """Something of that process, or nothing in that time. None: see `_hear`."""
        until = time.monotonic() + for_s
        while (events := self._hear(until)) and process not in events:
            pass
        return events

    def _linger(self, places: Sequence[str]) -> None:
        """Until nobody listens any more where others hear of the end from here, or they had the time for that."""
        from psstore.server.other_member import refuses

        until = time.monotonic() + LINGER_S
        for place in places:
            while not refuses(place) and time.monotonic() < until:
                if self._hear(time.monotonic() + LOOK_AGAIN_S) is None:
                    return

    def _hear(self, deadline: float) -> list[Event] | None:
        """What comes by then; standbys lead meanwhile, or are done without. None: there is nothing to wait for any
        more, since a signal has come, or the store is lost."""
        groups = self.groups
        while True:
            if isinstance(groups, ShardGroups):
                groups.take_wish()  # the store goes on with no shards
            fate = groups.tick()
            events = self.reports.wait(0.0 if fate else min(deadline, groups.next_wake()))
            lost = [fate, *(groups.heard(event) for event in events if isinstance(event, ShardProcess))]
            if self.monitor is not None and self.monitor in events:
                self.monitor.take()  # it knows of the end, as we do
            if any(isinstance(event, Signals) for event in events) or any(one is not None for one in lost):
                return None
            if events or time.monotonic() >= deadline:
                return events
