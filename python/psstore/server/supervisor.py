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
import math
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from psstore.errors import AvailabilityError, BadArgument, StorageError
from psstore.exit_codes import EXIT_FAILED, EXIT_OK
from psstore.net.address import TcpAddress
from psstore.net.limits import ServerLimits
from psstore.server.kept_companion import KeptCompanion
from psstore.server.listening import LOOPBACKS, bind_tcp
from psstore.server.pipe_words import READY, RESHARD
from psstore.server.processes import (
    CheckpointDuty,
    CheckpointProcess,
    MetricsDuty,
    MetricsProcess,
    ReshardProcess,
    ShardProcess,
    Signals,
)
from psstore.server.ready_line import announce, ready_line
from psstore.server.resharding import Resharding, Reshardings
from psstore.server.settings import ServerSettings
from psstore.server.shard_group import ShardGroups
from psstore.server.shard_settings import Follows, ShardSettings, shard_settings
from psstore.server.site import Site, open_site
from psstore.server.store_life import Ending, RestoreFrom, StoreLife
from psstore.server.store_token import StoreToken
from psstore.server.temporary_place import sweep

if TYPE_CHECKING:  # and where it is needed: a store on one host starts faster without asyncio in its supervisor
    from psstore.server.apart_group import ApartGroup
    from psstore.server.other_member import FoundMember
    from psstore.server.peer_monitor import PeerEvent, PeerMonitor
    from psstore.wire.messages import Welcome

Event: TypeAlias = "ShardProcess | CheckpointProcess | MetricsProcess | ReshardProcess | PeerMonitor | Signals"
"""Who may have something to report."""

COMPANIONS = (CheckpointProcess, MetricsProcess, ReshardProcess)
"""Processes beside the shards."""

START_S = 60.0
"""How long the shards may take to be ready. They take well under a second; this is for a machine on its knees."""

RESTORE_S = 3600.0
"""START_S where shards read or look at a storage first, which may be slow, or somebody else's for a while."""

LINGER_S = 10.0
"""How long other hosts may take to go, which hear of the end from this one."""

LAST_CHECKPOINT_S = 600.0
"""How long the last checkpoint of a store that is asked to end may take."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Before a store that could not start again tries to: doubles from the first to the last."""

LOOK_AGAIN_S = 0.2
"""Between two looks whether the shard is there whose standby runs here."""

STOP_S = ServerLimits().linger_s + 2.0
"""How long they may take to drain: their connections' time to linger, and a little for the process itself."""

_log = logging.getLogger("psstore.supervisor")


class Supervisor:
    """One life of the shards on this host."""

    def __init__(self, settings: ServerSettings, *, tcp: TcpAddress | None) -> None:
        """`tcp`: where to listen, see site.tcp_address. Raises BadArgument."""
        settings.check()
        self._settings = settings
        self._tcp = tcp
        self._token = StoreToken(settings, tcp)
        self._store = secrets.token_hex(8)
        self._joined = False
        """What runs here is of a store that was there before: it goes on with what another process has."""
        self._former = ""
        """Shard 0's id of the life before, where that is another host's."""
        self._num_restarts = 0
        self._restore: RestoreFrom | None = None
        self._reshardings: Reshardings
        self._checkpoints: KeptCompanion[CheckpointProcess]
        self._metrics: KeptCompanion[MetricsProcess]
        self._metrics_socket: socket.socket | None = None
        self._groups: ShardGroups | ApartGroup | None = None
        self._led = False
        """A shard was led here when checkpoints were seen to last."""
        self._starting: list[ShardProcess] = []
        """Shards that are not ready yet, or whose groups are no more."""
        self._monitor: PeerMonitor | None = None
        self._is_announced = False

    def run(self, *, out: TextIO, ready_fd: int | None) -> int:
        """Returns the exit status, when nothing of it runs any more. Raises BadArgument if it can't start."""
        if self._settings.restore is not None:
            from psstore.server.restore_plan import find_checkpoint

            self._restore = find_checkpoint(self._settings.restore, own_place=self._settings.checkpoint)
        sweep()
        site = open_site(self._settings, self._tcp)
        try:
            if self._settings.metrics is not None:
                host = self._tcp.host if self._tcp is not None else "127.0.0.1"
                self._metrics_socket = bind_tcp(host, self._settings.metrics, flag="--metrics")
            self._token.make(site.own())
            with Signals() as signals:
                return self._supervise(site, signals, out=out, ready_fd=ready_fd)
        finally:
            if self._monitor is not None:
                self._monitor.stop()
            if self._metrics_socket is not None:
                self._metrics_socket.close()
            for child in self._processes:
                child.kill()
            self._token.close()
            site.close()

    @property
    def _processes(self) -> list[ShardProcess]:
        return [*self._starting, *(self._groups.processes if self._groups is not None else ())]

    def _supervise(self, site: Site, signals: Signals, *, out: TextIO, ready_fd: int | None) -> int:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as companions:
            selector.register(signals.received, selectors.EVENT_READ, signals)
            self._checkpoints = KeptCompanion(
                partial(self._start_checkpoints, site),
                selector,
                name="writes checkpoints",
                when_let_be="none are written any more",
            )
            self._metrics = KeptCompanion(
                partial(self._start_metrics, site),
                selector,
                name="answers /metrics",
                when_let_be="nothing is answered any more",
            )
            self._reshardings = Reshardings(
                partial(self._begin_resharding, site),
                selector,
                checkpoints_end=self._checkpoints.end,
                checkpoints_begin=partial(self._begin_checkpoints, site),
            )
            companions.callback(self._checkpoints.end)
            companions.callback(self._metrics.end)
            companions.callback(self._reshardings.end)
            self._begin_metrics()
            ending = Ending(EXIT_OK)
            life = self._begin(site, selector)
            while life is not None:
                ending = self._live(site, life, selector, out=out, ready_fd=ready_fd)
                life = self._reshard(ending, site, selector) or self._go_back(ending, site, selector)
            site.close()
            if ending.reason is not None:
                _log.error("%s", ending.reason)
            self._end_monitor(selector)
            self._checkpoints.end()
            if self._groups is not None and ending.is_asked:
                self._groups.resign()
            self._stop(selector)
            return ending.status

    def _live(
        self, site: Site, life: StoreLife, selector: selectors.BaseSelector, *, out: TextIO, ready_fd: int | None
    ) -> Ending:
        """From the shards' start to why they have to end. Raises BadArgument if one can't start."""
        start = self._start_again if self._is_announced else self._start
        too_early = start(site, life, selector)
        if too_early is not None:
            return too_early
        self._reshardings.done()
        self._announce(site, out=out, ready_fd=ready_fd)
        self._led = False
        ending = self._await_end(site, selector)
        if isinstance(self._groups, ShardGroups) and self._reshardings.current is not None and ending.written is None:
            self._reshardings.give_up(ending.reason or "it is to end", self._groups)
        if ending.written is None and ending.dead is None:
            return self._conclude(ending, site, selector)
        return ending

    def _conclude(self, ending: Ending, site: Site, selector: selectors.BaseSelector) -> Ending:
        """What is to be done as long as all shards are there, here and on other hosts; and what becomes of the end."""
        groups = self._groups
        assert groups is not None, "all are ready"
        is_written = ending.status != EXIT_OK or self._end_checkpoints(selector)
        if not ending.is_asked:
            if ending.status == EXIT_OK:
                groups.store_ends()
            self._linger(site.ended_before(leads=groups.leads), selector)
        if is_written:
            return ending
        return replace(ending, status=EXIT_FAILED, reason="the last checkpoint was not written; the log says why")

    # ---- phases: each waits for reports of the children and of the monitor, and for signals ----

    def _begin(self, site: Site, selector: selectors.BaseSelector) -> StoreLife | None:
        """Shard 0 begins a life of the store; a shard on another host hears of it. None: a signal came first."""
        if site.other is not None:
            joined = self._join(site, site.other, selector)
            if joined is None or isinstance(joined, StoreLife):
                return joined
        lineage = self._restore.lineage if self._restore is not None else ""
        if site.is_whole:
            return StoreLife(self._store, secrets.token_bytes(32), lineage)
        if site.first == 0:
            return StoreLife(self._store, self._signing_key(site, self._store), lineage)
        if self._settings.restarts:
            site.refuse()
        monitor = self._start_monitor(site, selector)
        if any(isinstance(event, Signals) for event in self._news(selector)):
            return None
        begun = monitor.take()
        if begun.store is None:
            raise BadArgument(begun.reason or "")
        if self._settings.restarts:
            site.listen(self._settings, self._tcp)
            self._restore = self._as_shard_0(begun.restored)
        self._former = begun.store
        # What its sessions are told begins with the store's, and this shard has lives of its own.
        return StoreLife(f"{begun.store}-{self._store}", self._signing_key(site, begun.store), begun.lineage)

    def _join(self, site: Site, other: str, selector: selectors.BaseSelector) -> StoreLife | Literal["begins"] | None:
        """The life of the store in which the other process of this shard leads; what stands by there leads from now on,
        since the process that was here before is dead. None: a signal came first. Raises AuthFailed, BadArgument."""
        from psstore.server.other_member import look_at, promote, why_not_begin
        from psstore.server.voting import check_never_gone, other_shards

        others, credentials, has_said = other_shards(site.addresses, site.first), self._token.credentials, False
        until = time.monotonic() + self._settings.patience_s
        life: StoreLife | Literal["begins"]
        while True:
            member: FoundMember | None = None
            with contextlib.suppress(AvailabilityError):
                member = look_at(other, credentials)
                if member.leads:
                    life = self._life_of(site, member.welcome)
                    break
                if member.may_lead:
                    with contextlib.suppress(BadArgument):  # it waits for those who know
                        check_never_gone(others, other, credentials)
                        promote(other, credentials, force=True)
            if not self._settings.begins_as_standby() and (member is None or not member.may_lead):
                why_not = None if member is not None else why_not_begin(site.first, other, others, credentials)
                if why_not is None:
                    life = "begins"
                    break
                if time.monotonic() > until:
                    raise BadArgument(why_not)
            if not has_said:
                _log.warning("waiting for shard %d at %s, to stand by here", site.first, other)
                has_said = True
                site.refuse()
            if self._news(selector, time.monotonic() + LOOK_AGAIN_S):
                return None
        if has_said:
            site.listen(self._settings, self._tcp)
        return life

    def _life_of(self, site: Site, welcome: Welcome) -> StoreLife:
        self._joined = True
        if welcome.restored >= 0:
            self._restore = RestoreFrom(url="", version=welcome.restored, lineage=welcome.lineage)
        return StoreLife(welcome.store, self._signing_key(site, welcome.store.partition("-")[0]), welcome.lineage)

    def _signing_key(self, site: Site, store: str) -> bytes:
        return self._token.signing_key([shard[0] for shard in site.addresses], store=store)

    def _as_shard_0(self, version: int) -> RestoreFrom | None:
        """What shard 0 has begun with; -1: nothing. Raises StorageError."""
        from psstore.server.restore_plan import find_checkpoint

        if version < 0 or (self._restore is not None and self._restore.version == version):
            return None if version < 0 else self._restore
        return find_checkpoint(f"{self._settings.checkpoint}@{version}", own_place=self._settings.checkpoint)

    def _start(self, site: Site, life: StoreLife, selector: selectors.BaseSelector) -> Ending | None:
        """Why it is over before all were ready: a signal, or another host's loss. Raises BadArgument if a shard can't
        start."""
        if site.other is not None:
            return self._start_apart(site, site.other, life, selector)
        for index in range(site.first, site.first + len(site.endpoints)):
            child = ShardProcess(self._shard_settings(site, life, index))
            self._starting.append(child)
            selector.register(child.report, selectors.EVENT_READ, child)
        reads_storage = self._restore is not None or self._settings.checkpoint is not None
        start_s = RESTORE_S if reads_storage else START_S
        deadline = time.monotonic() + start_s
        waiting, wishes = list(self._starting), list[int]()
        while waiting:
            events = self._news(selector, deadline)
            if not events:
                raise BadArgument(f"not ready within {start_s:g} s: {', '.join(child.name for child in waiting)}")
            for event in events:
                if isinstance(event, Signals):
                    return Ending(EXIT_OK)
                if isinstance(event, ShardProcess):
                    if self._is_ready(event, wishes):
                        waiting.remove(event)
                    continue
                assert not isinstance(event, COMPANIONS), "_news; they begin when all are ready"
                return self._ended_early(event.take())
        leaders, self._starting = dict(enumerate(self._starting, start=site.first)), []
        self._groups = ShardGroups(
            leaders,
            start_standby=partial(self._start_standby, site, life) if self._settings.standbys else None,
            selector=selector,
            wish=wishes[-1] if wishes else None,
        )
        return None

    def _start_again(self, site: Site, life: StoreLife, selector: selectors.BaseSelector) -> Ending | None:
        """As `_start`, of a store that goes on: what keeps it from that may pass, as storage that fails does. Tries for
        `patience_s`."""
        until, pause_s = time.monotonic() + self._settings.patience_s, FIRST_PAUSE_S
        while True:
            try:
                return self._start(site, life, selector)
            except (BadArgument, OSError) as error:  # there may be no room for another process
                if time.monotonic() >= until:
                    raise
                _log.warning("%s; it is tried again in %g s", error, pause_s)
            self._kill_shards(selector)
            for event in self._news(selector, time.monotonic() + pause_s):
                if isinstance(event, Signals):
                    return Ending(EXIT_OK)
                assert not isinstance(event, (ShardProcess, *COMPANIONS)), "none of them runs"
                return self._ended_early(event.take())
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _start_standby(self, site: Site, life: StoreLife, index: int) -> ShardProcess:
        address = str(site.endpoints[index - site.first].local)
        return ShardProcess(
            self._shard_settings(site, life, index, Follows(address=address, client=secrets.token_hex(16)))
        )

    def _start_apart(self, site: Site, other: str, life: StoreLife, selector: selectors.BaseSelector) -> Ending | None:
        """As `_start`, where the shard's other process has another host."""
        from psstore.server.apart_group import ApartGroup
        from psstore.server.voting import other_shards

        own = str(site.endpoints[0].addresses[0])

        def start(leads: bool) -> ShardProcess:
            follows = None if leads else Follows(address=other, client=secrets.token_hex(16), place=own)
            return ShardProcess(self._shard_settings(site, life, site.first, follows))

        group = self._groups = ApartGroup(
            index=site.first,
            other=other,
            others=other_shards(site.addresses, site.first),
            credentials=self._token.credentials,
            patience_s=self._settings.patience_s,
            start=start,
            selector=selector,
        )
        group.begin(leads=not self._joined)
        if self._joined:  # there is a store, whose end may come before the process here is up
            self._start_monitor(site, selector)
        while not group.is_up:
            group.tick()
            for event in self._news(selector, group.next_wake):
                if isinstance(event, Signals):
                    return Ending(EXIT_OK)
                if isinstance(event, ShardProcess):
                    fate = group.heard(event)
                    if fate is not None:
                        raise BadArgument(f"{fate} before it was ready; its messages are above")
                    continue
                assert not isinstance(event, COMPANIONS), "they begin when all are ready"
                return self._ended_early(event.take())
        return None

    def _ended_early(self, news: PeerEvent) -> Ending:
        """Before what runs here was ready. Raises BadArgument where nothing of the store has been here, and it does not
        start again."""
        ending = Ending.heard(news)
        if not self._joined and (ending.dead is None or not self._settings.restarts):
            raise BadArgument(ending.reason or "")
        return ending

    @staticmethod
    def _is_ready(child: ShardProcess, wishes: list[int]) -> bool:
        """Whether it says so now. Shard 0 may be asked for another number of shards before others are ready: adds that
        to `wishes`. Raises BadArgument if it can't start."""
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

    def _await_end(self, site: Site, selector: selectors.BaseSelector) -> Ending:
        """Until a signal comes, a shard ends by itself, or the monitor says that it is over."""
        if self._monitor is None and (self._settings.until_done or not site.is_whole):
            self._start_monitor(site, selector)
        groups = self._groups
        assert groups is not None, "all are ready"
        events: list[Event] = []
        while self._monitor is None or self._monitor not in events:
            lost = groups.tick()
            self._see_to_checkpoints(site)
            events = self._news(selector, 0.0 if lost else partial(self._next_wake, groups))
            if any(isinstance(event, CheckpointProcess) for event in events):
                self._checkpoints.begin_again()
            self._checkpoints.tick()
            self._metrics.tick()
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
        return Ending.heard(self._monitor.take())

    def _next_wake(self, groups: ShardGroups | ApartGroup) -> float:
        return min(one.next_wake() for one in (groups, self._reshardings, self._checkpoints, self._metrics))

    def _go_back(self, ending: Ending, site: Site, selector: selectors.BaseSelector) -> StoreLife | None:
        """Ends what is left of a store whose shards have died, for all to start again from its latest checkpoint. Our
        sockets stay open: who connects meanwhile waits. None: it is over."""
        if ending.dead is None or self._num_restarts == self._settings.restarts:
            return None
        self._end_all(selector)
        self._begin_metrics_anew()  # of a shard that was there before it would say that it hangs, while it reads
        self._num_restarts += 1
        self._store = secrets.token_hex(8)
        if site.first != 0:
            _log.warning("%s; waiting for shard 0 to go back (restart %s)", ending.dead, self._restart())
            return self._begin(site, selector)
        from psstore.server.restore_plan import AUTO

        self._restore = self._find_again(AUTO, selector) or self._restore
        if self._restore is None:
            _log.error("%s, before there was a checkpoint to go back to", ending.dead)
            return None
        version = self._restore.version
        _log.warning("%s; all shards go back to version %d (restart %s)", ending.dead, version, self._restart())
        return self._begin(site, selector)

    def _find_again(self, asked: str, selector: selectors.BaseSelector) -> RestoreFrom | None:
        """As `find_checkpoint`, of a store that goes on: storage that fails may do so for a while. Tries for
        `patience_s`. Raises StorageError."""
        from psstore.server.restore_plan import find_checkpoint

        until, pause_s = time.monotonic() + self._settings.patience_s, FIRST_PAUSE_S
        while True:
            try:
                return find_checkpoint(asked, own_place=self._settings.checkpoint)
            except StorageError as error:
                if time.monotonic() >= until or self._news(selector, time.monotonic() + pause_s):  # it is to end
                    raise
                _log.warning("%s; it is looked for again", error.message)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _end_all(self, selector: selectors.BaseSelector) -> None:
        """Kills whatever runs of this life of the store."""
        self._end_monitor(selector)
        self._kill_shards(selector)
        self._checkpoints.end()

    def _kill_shards(self, selector: selectors.BaseSelector) -> None:
        for child in self._processes:
            selector.unregister(child.report)
            child.kill()
        self._starting, self._groups = [], None

    def _restart(self) -> str:
        return f"{self._num_restarts} of {self._settings.restarts}"

    def _stop(self, selector: selectors.BaseSelector) -> None:
        """Asks all to drain. What is left after STOP_S, or at the next signal, is killed by `run`."""
        running = self._starting if self._groups is None else self._groups.leaders
        for child in running:
            child.process.terminate()
        deadline = time.monotonic() + STOP_S
        while running:
            events = self._news(selector, deadline)
            if not events or any(isinstance(event, Signals) for event in events):
                _log.warning("killing %s", ", ".join(child.name for child in running))
                return
            for ended in events:
                assert isinstance(ended, ShardProcess), "the monitor has ended"
                if ended.told() is not None:
                    continue
                selector.unregister(ended.report)
                if ended not in running:
                    continue  # a standby, which is not waited for
                running.remove(ended)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended.process.wait(max(0.0, deadline - time.monotonic()))

    def _news(self, selector: selectors.BaseSelector, deadline: float | Callable[[], float] = math.inf) -> list[Event]:
        """Who has something to report: `Signals`, if the store is to end. None by the deadline: nobody has."""
        while True:
            left_s = max(0.0, (deadline() if callable(deadline) else deadline) - time.monotonic())
            events = [key.data for key, _ in selector.select(left_s if left_s < math.inf else None)]
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
        for child in self._processes:
            if (pause := child.pause()) is not None:
                _log.warning("%s", pause)
        return asked

    # ---- another number of shards ----

    def _begin_resharding(self, site: Site, num_shards: int, leaders: Sequence[ShardProcess]) -> Resharding:
        return Resharding(
            self._settings, num_shards, site=site, tcp=self._tcp, credentials=self._token.credentials, leaders=leaders
        )

    def _reshard(self, ending: Ending, site: Site, selector: selectors.BaseSelector) -> StoreLife | None:
        """Ends the shards of a store that stands still and is written down, for others to go on with that. None: it
        does not."""
        resharding = self._reshardings.current
        if ending.written is None or resharding is None:
            return None
        self._end_all(selector)
        selector.unregister(resharding.process.report)
        resharding.change(site)
        self._settings, self._store = resharding.settings, secrets.token_hex(8)
        self._token.also_for(site.own())
        self._restore = self._find_again(f"{resharding.place}@{ending.written}", selector)
        self._begin_metrics_anew()  # it is told where the shards are
        _log.warning(
            "the store stands still at version %d, and goes on with %d shards", ending.written, self._settings.shards
        )
        return self._begin(site, selector)

    # ---- the monitor over other hosts, and over the workers ----

    def _start_monitor(self, site: Site, selector: selectors.BaseSelector) -> PeerMonitor:
        from psstore.server.peer_monitor import Duty, PeerMonitor

        duty = Duty(
            index=site.first,
            addresses=tuple(shard[0] for shard in site.addresses),
            asked_at=site.watched(),
            consistency=self._settings.consistency(),
            credentials=self._token.credentials,
            restored=self._restore.version if self._restore is not None else -1,
            goes_back=self._settings.restarts > 0,
            is_whole=site.is_whole,
            is_new=not self._joined,
            store=self._store,
            former=self._former,
            has_last_word=lambda: site.first == 0 and self._groups is not None and self._groups.leads,
            until_done=self._settings.until_done,
            patience_s=self._settings.patience_s,
        )
        self._monitor = PeerMonitor(duty)
        selector.register(self._monitor.readable, selectors.EVENT_READ, self._monitor)
        return self._monitor

    def _end_monitor(self, selector: selectors.BaseSelector) -> None:
        if self._monitor is not None:
            selector.unregister(self._monitor.readable)
            self._monitor.stop()
            self._monitor = None

    # ---- companions: what writes checkpoints, and what answers /metrics ----

    def _begin_checkpoints(self, site: Site) -> None:
        if self._settings.checkpoint is not None and site.first == 0:
            self._checkpoints.begin()

    def _start_checkpoints(self, site: Site) -> CheckpointProcess:
        assert self._settings.checkpoint is not None, "_begin_checkpoints"
        return CheckpointProcess(
            CheckpointDuty(
                url=site.url,
                credentials=self._token.credentials,
                place=self._settings.checkpoint,
                interval=self._settings.checkpoint_interval(),
                began_at=self._restore.version if self._restore is not None else 0,
                log_level=self._settings.log_level,
                log_format=self._settings.log_format,
            )
        )

    def _see_to_checkpoints(self, site: Site) -> None:
        """Has them written from here as long as shard 0 is led here, which may change."""
        assert self._groups is not None, "all are ready"
        if self._groups.leads == self._led:
            return
        self._led = self._groups.leads
        if self._led:
            self._begin_checkpoints(site)
        else:
            self._checkpoints.end()

    def _end_checkpoints(self, selector: selectors.BaseSelector) -> bool:
        """Has the last one written. Another signal ends the wait. False: it is not."""
        process = self._checkpoints.process
        if process is None:
            return not self._checkpoints.is_to_run
        process.finish()
        until = time.monotonic() + LAST_CHECKPOINT_S
        while (events := self._hear(selector, until)) and process not in events:
            pass
        if events == []:
            _log.warning("the last checkpoint was not written within %g s", LAST_CHECKPOINT_S)
        is_written = bool(events) and not process.has_failed()
        self._checkpoints.end()
        return is_written

    def _linger(self, places: Sequence[str], selector: selectors.BaseSelector) -> None:
        """Until nobody listens any more where others hear of the end from here, or they had the time for that."""
        from psstore.server.other_member import refuses

        until = time.monotonic() + LINGER_S
        for place in places:
            while not refuses(place) and time.monotonic() < until:
                if self._hear(selector, time.monotonic() + LOOK_AGAIN_S) is None:
                    return

    def _hear(self, selector: selectors.BaseSelector, deadline: float) -> list[Event] | None:
        """What comes by then as the store ends; standbys lead meanwhile, or are done without. None: there is nothing to
        wait for any more, since a signal has come, or the store is lost."""
        groups = self._groups
        assert groups is not None, "it has not ended yet"
        while True:
            if isinstance(groups, ShardGroups):
                groups.take_wish()  # the store goes on with no shards
            fate = groups.tick()
            events = self._news(selector, 0.0 if fate else min(deadline, groups.next_wake()))
            lost = [fate, *(groups.heard(event) for event in events if isinstance(event, ShardProcess))]
            if self._monitor is not None and self._monitor in events:
                self._monitor.take()  # it knows of the end, as we do
            if any(isinstance(event, Signals) for event in events) or any(one is not None for one in lost):
                return None
            if events or time.monotonic() >= deadline:
                return events

    def _begin_metrics(self) -> None:
        """Before any shard runs: that one takes its time to restore is no reason to be out of reach."""
        if self._metrics_socket is not None:
            self._metrics.begin()

    def _begin_metrics_anew(self) -> None:
        self._metrics.end()
        self._begin_metrics()

    def _start_metrics(self, site: Site) -> MetricsProcess:
        assert self._metrics_socket is not None, "_begin_metrics"
        return MetricsProcess(
            MetricsDuty(
                first=site.first,
                addresses=tuple(str(endpoint.local) for endpoint in site.endpoints),
                credentials=self._token.credentials,
                socket=self._metrics_socket.fileno(),
                log_level=self._settings.log_level,
                log_format=self._settings.log_format,
            )
        )

    def _metrics_url(self) -> str | None:
        if self._metrics_socket is None:
            return None
        host, port = self._metrics_socket.getsockname()[:2]
        host = LOOPBACKS.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    # ---- what the children and the world are told ----

    def _shard_settings(self, site: Site, life: StoreLife, index: int, follows: Follows | None = None) -> ShardSettings:
        return shard_settings(
            self._settings,
            site,
            life,
            index,
            token=self._token,
            restore=self._restore,
            goes_on=self._is_announced,
            follows=follows,
        )

    def _announce(self, site: Site, *, out: TextIO, ready_fd: int | None) -> None:
        """Says once that it serves, and where; then that it does again."""
        if self._is_announced:
            version = 0 if self._restore is None else self._restore.version
            _log.warning("the store serves again, from version %d on", version)
            return
        self._is_announced = True
        ready = ready_line(
            self._settings,
            site,
            store=self._store,
            is_standby=self._groups is not None and not self._groups.leads,
            metrics=self._metrics_url(),
        )
        announce(ready, out=out, ready_fd=ready_fd)
