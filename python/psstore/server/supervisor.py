"""Starts the shard processes of this host, watches them, and ends them: all of them run, or none.

    start ─► serve ─► asked to end            ─► last checkpoint ─► drain
      ▲         └───► a shard dies            ─► the store is lost ─► the others end
      └───────────────┴ and may start again   ─► all of them, from the latest checkpoint

Each child is bound to us by two pipes: our end of its stdin closes with us, however we die, and its stdout ends
with it, however it dies. A shard's memory is gone with it, and silence about that would be a wrong answer: all go back
together, in a new life of the store, which clients are told. Where other hosts have shards of the same store,
peer_monitor.py tells us what becomes of them.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TextIO

from psstore.exit_codes import EXIT_FAILED, EXIT_OK
from psstore.net.address import TcpAddress
from psstore.server.beginnings import Beginnings
from psstore.server.companions import Companions, bind_metrics
from psstore.server.host_shards import HostShards
from psstore.server.kept_monitor import KeptMonitor
from psstore.server.processes import ShardProcess, Signals
from psstore.server.ready_line import ReadyLine, announce, ready_line
from psstore.server.reports import Event, Reports
from psstore.server.resharding import Resharding, Reshardings
from psstore.server.settings import ServerSettings
from psstore.server.shard_group import ShardGroups
from psstore.server.site import open_site
from psstore.server.store_life import Ending, RestoreFrom, StoreLife
from psstore.server.store_token import StoreToken
from psstore.server.temporary_place import sweep

if TYPE_CHECKING:  # and where it is needed: a store on one host starts faster without asyncio in its supervisor
    from psstore.server.apart_group import ApartGroup

LINGER_S = 10.0
"""How long other hosts may take to go, which hear of the end from this one."""

LAST_CHECKPOINT_S = 600.0
"""How long the last checkpoint of a store that is asked to end may take."""

LOOK_AGAIN_S = 0.2
"""Between two looks whether another host has gone."""

_log = logging.getLogger("psstore.supervisor")


class Supervisor:
    """One life of the shards on this host."""

    def __init__(self, settings: ServerSettings, *, tcp: TcpAddress | None) -> None:
        """`tcp`: where to listen, see site.tcp_address. Raises BadArgument."""
        settings.check()
        self._settings = settings
        self._tcp = tcp
        self._token = StoreToken(settings, tcp)
        self._num_restarts = 0
        self._is_announced = False

    def run(self, *, out: TextIO, ready_fd: int | None) -> int:
        """Returns the exit status, when nothing of it runs any more. Raises BadArgument if it can't start."""
        restore = None
        if self._settings.restore is not None:
            from psstore.server.restore_plan import find_checkpoint

            restore = find_checkpoint(self._settings.restore, own_place=self._settings.checkpoint)
        sweep()
        with contextlib.ExitStack() as opened:
            self._open(opened)
            return self._supervise(restore, partial(announce, out=out, ready_fd=ready_fd))

    def _open(self, opened: contextlib.ExitStack) -> None:
        """What is closed in the end, however that comes. Raises BadArgument."""
        self._site = open_site(self._settings, self._tcp)
        opened.callback(self._site.close)
        metrics_socket = bind_metrics(self._settings, self._tcp)
        if metrics_socket is not None:
            opened.enter_context(metrics_socket)
        self._token.make(self._site.own())
        opened.callback(self._token.close)
        selector = opened.enter_context(selectors.DefaultSelector())
        self._companions = Companions(
            self._settings, self._site, token=self._token, metrics_socket=metrics_socket, selector=selector
        )
        self._reports = Reports(selector, metrics=self._companions.metrics)
        self._shards = HostShards(
            self._settings, self._site, token=self._token, reports=self._reports, selector=selector
        )
        opened.callback(self._shards.close)
        self._monitor = KeptMonitor(
            self._settings, self._site, token=self._token, leads=lambda: self._shards.leads, selector=selector
        )
        opened.callback(self._monitor.end)
        self._beginnings = Beginnings(
            self._settings,
            self._site,
            tcp=self._tcp,
            token=self._token,
            monitor=self._monitor,
            reports=self._reports,
        )
        self._reshardings = Reshardings(
            self._begin_resharding,
            selector,
            checkpoints_end=self._companions.checkpoints.end,
            checkpoints_begin=self._companions.begin_checkpoints,
        )
        signals = opened.enter_context(Signals())
        selector.register(signals.received, selectors.EVENT_READ, signals)
        opened.callback(self._companions.end)
        opened.callback(self._reshardings.end)

    def _supervise(self, restore: RestoreFrom | None, say: Callable[[ReadyLine], None]) -> int:
        self._companions.begin_metrics()
        ending = Ending(EXIT_OK)
        life = self._beginnings.begin(restore)
        while life is not None:
            ending = self._live(life, say)
            life = self._reshard(ending) or self._go_back(life, ending)
        self._site.close()
        if ending.reason is not None:
            _log.error("%s", ending.reason)
        self._monitor.end()
        self._companions.checkpoints.end()
        if self._shards.groups is not None and ending.is_asked:
            self._shards.groups.resign()
        self._shards.stop()
        return ending.status

    def _live(self, life: StoreLife, say: Callable[[ReadyLine], None]) -> Ending:
        """From the shards' start to why they have to end. Raises BadArgument if one can't start."""
        if life.is_joined:  # its end may come before what runs here is up
            self._start_monitor(life)
        too_early = self._shards.start(life, goes_on=self._is_announced)
        if too_early is not None:
            return too_early
        self._reshardings.done()
        self._announce(life, say)
        self._companions.life_begins(began_at=life.began_at)
        ending = self._await_end(life)
        if (
            isinstance(self._shards.groups, ShardGroups)
            and self._reshardings.current is not None
            and ending.written is None
        ):
            self._reshardings.give_up(ending.reason or "it is to end", self._shards.groups)
        if ending.written is None and ending.dead is None:
            return self._conclude(ending)
        return ending

    def _conclude(self, ending: Ending) -> Ending:
        """What is to be done as long as all shards are there, here and on other hosts; and what becomes of the end."""
        groups = self._shards.groups
        assert groups is not None, "all are ready"
        is_written = ending.status != EXIT_OK or self._end_checkpoints()
        if not ending.is_asked:
            if ending.status == EXIT_OK:
                groups.store_ends()
            self._linger(self._site.ended_before(leads=groups.leads))
        if is_written:
            return ending
        return replace(ending, status=EXIT_FAILED, reason="the last checkpoint was not written; the log says why")

    def _await_end(self, life: StoreLife) -> Ending:
        """Until a signal comes, a shard ends by itself, or the monitor says that it is over."""
        if self._monitor.current is None and (self._settings.until_done or not self._site.is_whole):
            self._start_monitor(life)
        groups = self._shards.groups
        assert groups is not None, "all are ready"
        events: list[Event] = []
        while self._monitor.current is None or self._monitor.current not in events:
            lost = groups.tick()
            self._companions.see_to_checkpoints(leads=groups.leads)
            events = self._reports.wait(0.0 if lost else partial(self._next_wake, groups))
            self._companions.heard(events)
            heard = [groups.heard(event) for event in events if isinstance(event, ShardProcess)]
            if groups.is_over:
                return Ending(EXIT_OK)
            if any(isinstance(event, Signals) for event in events):  # whoever can be handed over to is known now
                return Ending(EXIT_OK, is_asked=True)
            dead = [fate for fate in (lost, *heard) if fate is not None]
            if dead:
                told = ", ".join(dead)
                return Ending(EXIT_FAILED, f"{told}; the store is lost, stopping the other shards", dead=told)
            if isinstance(groups, ShardGroups):
                written = self._reshardings.see_to(groups, events)
                if written is not None:
                    return Ending(EXIT_OK, written=written)
        return Ending.heard(self._monitor.current.take())

    def _next_wake(self, groups: ShardGroups | ApartGroup) -> float:
        return min(one.next_wake() for one in (groups, self._reshardings, self._companions))

    def _go_back(self, life: StoreLife, ending: Ending) -> StoreLife | None:
        """Ends what is left of a store whose shards have died, for all to start again from its latest checkpoint. Our
        sockets stay open: who connects meanwhile waits. None: it is over."""
        if ending.dead is None or self._num_restarts == self._settings.restarts:
            return None
        self._end_all()
        self._companions.begin_metrics_anew()
        self._num_restarts += 1
        if self._site.first != 0:
            _log.warning("%s; waiting for shard 0 to go back (restart %s)", ending.dead, self._restart())
            return self._beginnings.begin(life.restore)
        from psstore.server.restore_plan import AUTO

        restore = self._find_again(AUTO) or life.restore
        if restore is None:
            _log.error("%s, before there was a checkpoint to go back to", ending.dead)
            return None
        _log.warning("%s; all shards go back to version %d (restart %s)", ending.dead, restore.version, self._restart())
        return self._beginnings.begin(restore)

    def _find_again(self, asked: str) -> RestoreFrom | None:
        from psstore.server.restore_plan import find_again

        return find_again(
            asked,
            own_place=self._settings.checkpoint,
            patience_s=self._settings.patience_s,
            reports=self._reports,
        )

    def _end_all(self) -> None:
        """Kills whatever runs of this life of the store."""
        self._monitor.end()
        self._shards.kill()
        self._companions.checkpoints.end()

    def _restart(self) -> str:
        return f"{self._num_restarts} of {self._settings.restarts}"

    # ---- another number of shards ----

    def _begin_resharding(self, num_shards: int, leaders: Sequence[ShardProcess]) -> Resharding:
        return Resharding(
            self._settings,
            num_shards,
            site=self._site,
            tcp=self._tcp,
            credentials=self._token.credentials,
            leaders=leaders,
        )

    def _reshard(self, ending: Ending) -> StoreLife | None:
        """Ends the shards of a store that stands still and is written down, for others to go on with that. None: it
        does not."""
        resharding = self._reshardings.current
        if ending.written is None or resharding is None:
            return None
        self._end_all()
        self._reshardings.change(self._site)
        self._settings = resharding.settings
        self._token.also_for(self._site.own())
        restore = self._find_again(f"{resharding.place}@{ending.written}")
        self._companions.begin_metrics_anew()
        _log.warning(
            "the store stands still at version %d, and goes on with %d shards", ending.written, self._settings.shards
        )
        return self._beginnings.begin(restore)

    def _start_monitor(self, life: StoreLife) -> None:
        self._monitor.start(store=life.own, restore=life.restore, is_new=not life.is_joined)

    def _end_checkpoints(self) -> bool:
        """Has the last one written. Another signal ends the wait. False: it is not."""
        process = self._companions.checkpoints.process
        if process is None:
            return not self._companions.checkpoints.is_to_run
        process.finish()
        until = time.monotonic() + LAST_CHECKPOINT_S
        while (events := self._hear(until)) and process not in events:
            pass
        if events == []:
            _log.warning("the last checkpoint was not written within %g s", LAST_CHECKPOINT_S)
        is_written = bool(events) and not process.has_failed()
        self._companions.checkpoints.end()
        return is_written

    def _linger(self, places: Sequence[str]) -> None:
        """Until nobody listens any more where others hear of the end from here, or they had the time for that."""
        from psstore.server.other_member import refuses

        until = time.monotonic() + LINGER_S
        for place in places:
            while not refuses(place) and time.monotonic() < until:
                if self._hear(time.monotonic() + LOOK_AGAIN_S) is None:
                    return

    def _hear(self, deadline: float) -> list[Event] | None:
        """What comes by then as the store ends; standbys lead meanwhile, or are done without. None: there is nothing to
        wait for any more, since a signal has come, or the store is lost."""
        groups = self._shards.groups
        assert groups is not None, "it has not ended yet"
        while True:
            if isinstance(groups, ShardGroups):
                groups.take_wish()  # the store goes on with no shards
            fate = groups.tick()
            events = self._reports.wait(0.0 if fate else min(deadline, groups.next_wake()))
            lost = [fate, *(groups.heard(event) for event in events if isinstance(event, ShardProcess))]
            if self._monitor.current is not None and self._monitor.current in events:
                self._monitor.current.take()  # it knows of the end, as we do
            if any(isinstance(event, Signals) for event in events) or any(one is not None for one in lost):
                return None
            if events or time.monotonic() >= deadline:
                return events

    def _announce(self, life: StoreLife, say: Callable[[ReadyLine], None]) -> None:
        """Says once that it serves, and where; then that it does again."""
        if self._is_announced:
            _log.warning("the store serves again, from version %d on", life.began_at)
            return
        self._is_announced = True
        ready = ready_line(
            self._settings,
            self._site,
            store=life.own,
            is_standby=not self._shards.leads,
            metrics=self._companions.metrics_url(),
        )
        say(ready)
