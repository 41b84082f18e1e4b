"""Starts the shard processes of this host, watches them, and ends them: all of them run, or none.

    start ─► serve ─► asked to end            ─► last checkpoint ─► drain
      ▲         └───► a shard dies            ─► the store is lost ─► the others end
      ├───────────────┴ and may start again   ─► all of them, from the latest checkpoint
      └─────────► another number is wished    ─► all of them, from what the store was written down to

A shard's memory is gone with it, and silence about that would be a wrong answer: all go back together, in a new life of
the store, which clients are told. Where other hosts have shards of the same store, peer_monitor.py tells us what
becomes of them.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TextIO

from psstore.exit_codes import EXIT_FAILED, EXIT_OK
from psstore.net.address import TcpAddress
from psstore.server.beginnings import Beginnings
from psstore.server.companions import Companions, bind_metrics
from psstore.server.conclusion import Conclusion
from psstore.server.host_shards import HostShards
from psstore.server.kept_monitor import KeptMonitor
from psstore.server.processes import ShardProcess, Signals
from psstore.server.ready_line import ReadyLine, announce, ready_line
from psstore.server.reports import Event, Reports
from psstore.server.resharding import Reshardings
from psstore.server.settings import ServerSettings
from psstore.server.shard_group import ShardGroups
from psstore.server.site import open_site
from psstore.server.store_life import Ending, RestoreFrom, StoreLife, of_shard_0
from psstore.server.store_token import StoreToken
from psstore.server.temporary_place import sweep
from psstore.text import counted

if TYPE_CHECKING:  # and where it is needed: a store on one host starts faster without asyncio in its supervisor
    from psstore.server.apart_group import ApartGroup

_log = logging.getLogger("psstore.supervisor")


class Supervisor:
    """Sees to a store's shards on this host, through all of its lives."""

    def __init__(self, settings: ServerSettings, *, tcp: TcpAddress | None) -> None:
        """`tcp`: where to listen, see site.tcp_address. Raises BadArgument."""
        settings.check()
        self._settings = settings
        """As the store begins; then it goes by the site's."""
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

    # ---- lives, one after the other ----

    def _supervise(self, restore: RestoreFrom | None, say: Callable[[ReadyLine], None]) -> int:
        """From the beginning of the first to the end of the last. Returns the exit status."""
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
        groups = self._shards.groups
        assert groups is not None, "all are ready"
        self._reshardings.done()
        self._announce(life, say)
        self._companions.life_begins(began_at=life.began_at)
        ending = self._await_end(life, groups)
        if isinstance(groups, ShardGroups) and self._reshardings.current is not None and ending.written is None:
            self._reshardings.give_up(ending.reason or "it is to end", groups)
        if ending.written is not None or ending.dead is not None:
            return ending
        return Conclusion(
            site=self._site,
            groups=groups,
            checkpoints=self._companions.checkpoints,
            monitor=self._monitor.current,
            reports=self._reports,
        ).conclude(ending)

    def _announce(self, life: StoreLife, say: Callable[[ReadyLine], None]) -> None:
        """Says once that it serves, and where; then that it does again."""
        if self._is_announced:
            _log.warning("the store serves again, from version %d on", life.began_at)
            return
        self._is_announced = True
        is_standby, metrics = not self._shards.leads, self._companions.metrics_url()
        say(ready_line(self._site, store=life.own, is_standby=is_standby, metrics=metrics))

    def _await_end(self, life: StoreLife, groups: ShardGroups | ApartGroup) -> Ending:
        """Until a signal comes, a shard ends by itself, or the monitor says that it is over."""
        if self._monitor.current is None and (self._site.settings.until_done or not self._site.is_whole):
            self._start_monitor(life)
        monitor = self._monitor.current
        events: list[Event] = []
        while monitor is None or monitor not in events:
            lost = groups.tick()
            self._companions.see_to_checkpoints(leads=groups.leads)
            events = self._reports.wait(0.0 if lost else partial(self._next_wake, groups))
            self._companions.heard(events)
            heard = [groups.heard(event) for event in events if isinstance(event, ShardProcess)]
            if groups.over is not None:
                return Ending(EXIT_FAILED, groups.over) if groups.over else Ending(EXIT_OK)
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
        return Ending.heard(monitor.take())

    def _next_wake(self, groups: ShardGroups | ApartGroup) -> float:
        return min(one.next_wake() for one in (groups, self._reshardings, self._companions))

    def _start_monitor(self, life: StoreLife) -> None:
        joined = of_shard_0(life.store) if life.is_joined else ""
        self._monitor.start(store=life.own, joined=joined, restore=life.restore)

    # ---- another life ----

    def _go_back(self, life: StoreLife, ending: Ending) -> StoreLife | None:
        """Ends what is left of a store whose shards have died, for all to start again from its latest checkpoint. Our
        sockets stay open: who connects meanwhile waits. None: it is over."""
        most = self._site.settings.restarts
        if ending.dead is None or self._num_restarts == most:
            return None
        self._end_all()
        self._companions.begin_metrics_anew()
        self._num_restarts += 1
        restart = f"restart {self._num_restarts} of {most}"
        if self._site.first != 0:
            _log.warning("%s; waiting for shard 0 to go back (%s)", ending.dead, restart)
            return self._beginnings.begin(life.restore)
        from psstore.server.restore_plan import AUTO, find_again

        restore = find_again(AUTO, self._site.settings, self._reports) or life.restore
        if restore is None:
            _log.error("%s, before there was a checkpoint to go back to", ending.dead)
            return None
        _log.warning("%s; all shards go back to version %d (%s)", ending.dead, restore.version, restart)
        return self._beginnings.begin(restore)

    def _reshard(self, ending: Ending) -> StoreLife | None:
        """Ends the shards of a store that stands still and is written down, for others to go on with that. None: it
        does not."""
        if ending.written is None:
            return None
        from psstore.server.restore_plan import find_again

        self._end_all()
        place, settings = self._reshardings.change(), self._site.settings
        restore = find_again(f"{place}@{ending.written}", settings, self._reports)
        self._companions.begin_metrics_anew()
        _log.warning(
            "the store stands still at version %d, and goes on with %s",
            ending.written,
            counted(settings.shards, "shard"),
        )
        return self._beginnings.begin(restore)

    def _end_all(self) -> None:
        """Kills whatever runs of this life of the store."""
        self._monitor.end()
        self._shards.kill()
        self._companions.checkpoints.end()

    # ---- what outlives them ----

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Makes all that is closed in the end, however that comes. Raises BadArgument."""
        token = self._token
        site = self._site = open_site(self._settings, self._tcp)
        opened.callback(site.close)
        metrics_socket = bind_metrics(site)
        if metrics_socket is not None:
            opened.enter_context(metrics_socket)
        token.make(site.own())
        opened.callback(token.close)
        selector = opened.enter_context(selectors.DefaultSelector())
        self._companions = Companions(site, token=token, metrics_socket=metrics_socket, selector=selector)
        self._reports = Reports(selector, metrics=self._companions.metrics)
        self._shards = HostShards(site=site, token=token, reports=self._reports, selector=selector)
        opened.callback(self._shards.close)
        self._monitor = KeptMonitor(site=site, token=token, leads=lambda: self._shards.leads, selector=selector)
        opened.callback(self._monitor.end)
        self._beginnings = Beginnings(site=site, token=token, monitor=self._monitor, reports=self._reports)
        self._reshardings = Reshardings(
            site,
            token=token,
            selector=selector,
            checkpoints_end=self._companions.checkpoints.end,
            checkpoints_begin=self._companions.begin_checkpoints,
        )
        signals = opened.enter_context(Signals())
        selector.register(signals.received, selectors.EVENT_READ, signals)
        opened.callback(self._companions.end)
        opened.callback(self._reshardings.end)
