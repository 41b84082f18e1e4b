"""The processes of the shards that run on this host: all of them start, and all are killed or asked to drain.

Each is bound to us by two pipes: our end of its stdin closes with us, however we die, and its stdout ends with it,
however it dies. What becomes of a shard and its standby meanwhile: shard_group.py, or apart_group.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from psstore.errors import BadArgument
from psstore.exit_codes import EXIT_OK
from psstore.net.limits import ServerLimits
from psstore.server.keep_trying import keep_trying
from psstore.server.pipe_words import READY, RESHARD
from psstore.server.processes import ShardProcess, Signals
from psstore.server.reports import COMPANIONS, Event, Reports
from psstore.server.shard_group import ShardGroups
from psstore.server.shard_settings import Follows, shard_settings
from psstore.server.site import Site
from psstore.server.store_life import Ending, StoreLife
from psstore.server.store_token import StoreToken

if TYPE_CHECKING:  # a store on one host starts faster without asyncio in its supervisor
    from psstore.server.apart_group import ApartGroup

START_S = 60.0
"""How long the shards may take to be ready. They take well under a second; this is for a machine on its knees."""

RESTORE_S = 3600.0
"""START_S where shards read or look at a storage first, which may be slow, or somebody else's for a while."""

STOP_S = ServerLimits().linger_s + 2.0
"""How long they may take to drain: their connections' time to linger, and a little for the process itself."""

_log = logging.getLogger("psstore.supervisor")

StartProcess = Callable[[int, Follows | None], ShardProcess]
"""Starts the process of a shard, or of a standby that follows it."""


@dataclass(kw_only=True)
class HostShards:
    """The shards of one life of the store after the other."""

    site: Site
    token: StoreToken
    reports: Reports
    selector: selectors.BaseSelector
    """Where their reports are registered."""
    groups: ShardGroups | ApartGroup | None = None
    """None: not all of them are ready, or none runs."""
    _starting: list[ShardProcess] = field(default_factory=list)
    """Shards that are not ready yet."""

    @property
    def processes(self) -> list[ShardProcess]:
        """All of them."""
        return [*self._starting, *(self.groups.processes if self.groups is not None else ())]

    @property
    def leads(self) -> bool:
        """A shard runs here, and not only a standby."""
        return self.groups is not None and self.groups.leads

    # ---- start ----

    def start(self, life: StoreLife, *, goes_on: bool) -> Ending | None:
        """Why it is over before all were ready: a signal, or another host's loss. Raises BadArgument, OSError if a
        shard can't start. `goes_on`: the store has served before. Then what keeps it from starting may pass, and it is
        tried for `patience_s`."""
        if not goes_on:
            return self._start(life, goes_on)
        return keep_trying(
            partial(self._start, life, goes_on),
            (BadArgument, OSError),
            patience_s=self.site.settings.patience_s,
            pause=partial(self._pause, life),
        )

    def _pause(self, life: StoreLife, error: Exception, pause_s: float) -> Ending | None:
        """Before it is tried again to start them all. Why it is over, if it is meanwhile."""
        _log.warning("%s; it is tried again in %g s", error, pause_s)
        self.kill()
        events = self.reports.wait(time.monotonic() + pause_s)
        return self._ended_early(life, events[0]) if events else None

    def _start(self, life: StoreLife, goes_on: bool) -> Ending | None:
        def start(shard: int, follows: Follows | None) -> ShardProcess:
            told = shard_settings(self.site, life, shard, token=self.token, goes_on=goes_on, follows=follows)
            return ShardProcess(told)

        if self.site.other is not None:
            return self._start_apart(self.site.other, life, start)
        for index in range(self.site.first, self.site.first + len(self.site.endpoints)):
            child = start(index, None)
            self._starting.append(child)
            self.selector.register(child.report, selectors.EVENT_READ, child)
        reads_storage = life.restore is not None or self.site.settings.checkpoint is not None
        start_s = RESTORE_S if reads_storage else START_S
        deadline = time.monotonic() + start_s
        waiting, wishes = list(self._starting), list[int]()
        while waiting:
            events = self.reports.wait(deadline)
            if not events:
                raise BadArgument(f"not ready within {start_s:g} s: {', '.join(child.name for child in waiting)}")
            for event in events:
                if not isinstance(event, ShardProcess):
                    return self._ended_early(life, event)
                if says_ready(event, wishes):
                    waiting.remove(event)
        leaders, self._starting = dict(enumerate(self._starting, start=self.site.first)), []
        self.groups = ShardGroups(
            leaders,
            start_standby=partial(self._start_standby, start) if self.site.settings.standbys else None,
            selector=self.selector,
            wish=wishes[-1] if wishes else None,
        )
        return None

    def _start_apart(self, other: str, life: StoreLife, start: StartProcess) -> Ending | None:
        """Where the shard's other process has another host."""
        from psstore.server.apart_group import ApartGroup
        from psstore.server.voting import other_shards

        shard, own = self.site.first, str(self.site.endpoints[0].addresses[0])
        group = self.groups = ApartGroup(
            index=shard,
            other=other,
            others=other_shards(self.site.addresses, shard),
            credentials=self.token.credentials,
            patience_s=self.site.settings.patience_s,
            start=lambda leads: start(shard, None if leads else _following(other, place=own)),
            selector=self.selector,
        )
        group.begin(leads=not life.is_joined)
        while not group.is_up:
            group.tick()
            for event in self.reports.wait(group.next_wake):
                if not isinstance(event, ShardProcess):
                    return self._ended_early(life, event)
                fate = group.heard(event)
                if fate is not None:
                    raise BadArgument(f"{fate} before it was ready; its messages are above")
        return None

    def _start_standby(self, start: StartProcess, shard: int) -> ShardProcess:
        return start(shard, _following(str(self.site.endpoints[shard - self.site.first].local)))

    def _ended_early(self, life: StoreLife, event: Event) -> Ending:
        """Before what runs here was ready. Raises BadArgument where nothing of the store has been here, and it does not
        start again."""
        if isinstance(event, Signals):
            return Ending(EXIT_OK)
        assert not isinstance(event, (ShardProcess, *COMPANIONS)), "none runs, or they begin when all are ready"
        ending = Ending.heard(event.take())
        if not life.is_joined and (ending.dead is None or not self.site.settings.restarts):
            raise BadArgument(ending.reason or "")
        return ending

    # ---- end ----

    def kill(self) -> None:
        """Ends all of them at once."""
        for child in self.processes:
            self.selector.unregister(child.report)
            child.kill()
        self._starting, self.groups = [], None

    def stop(self) -> None:
        """Asks all to drain. What is left after STOP_S, or at the next signal, is left to `close`."""
        running = self._starting if self.groups is None else self.groups.leaders
        for child in running:
            child.process.terminate()
        deadline = time.monotonic() + STOP_S
        while running:
            events = self.reports.wait(deadline)
            if not events or any(isinstance(event, Signals) for event in events):
                _log.warning("killing %s", ", ".join(child.name for child in running))
                return
            for ended in events:
                assert isinstance(ended, ShardProcess), "the monitor has ended"
                if ended.told() is not None:
                    continue
                self.selector.unregister(ended.report)
                if ended not in running:
                    continue  # a standby, which is not waited for
                running.remove(ended)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended.process.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kills what `stop` has left."""
        for child in self.processes:
            child.kill()


def says_ready(child: ShardProcess, wishes: list[int]) -> bool:
    """Whether it says so now. Shard 0 may be asked for another number of shards before others are ready: adds that to
    `wishes`. Raises BadArgument if it can't start."""
    told = child.told()
    if told is None:
        raise BadArgument(f"{child.fate()} before it was ready; its messages are above")
    is_ready = False
    for line in told:
        what, _, rest = line.partition(" ")
        if what == RESHARD:
            wishes.append(int(rest))
        elif what == READY:
            is_ready = True
        else:
            raise BadArgument("\n".join(told))
    return is_ready


def _following(address: str, *, place: str = "") -> Follows:
    """What a new standby of the shard there is told. `place`: where it listens, if that is on another host."""
    return Follows(address=address, client=secrets.token_hex(16), place=place)
