"""The processes of a host's shards: each a leader and, where that was asked for, a standby that leads after it.

A process of this host is dead when the system says so, and a standby leads only after that: so there is one leader. A
leader that has lost its standby tells nobody anything before that one has been ended here.

    leader says   in sync C     its standby C may lead
                  lost C        it can't reach C: we end C, and say `without C`
    we say        lead          to a standby: what led is dead
                  without C     to a leader: C will never lead
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psstore.server.pipe_words import IN_SYNC, LEAD, LOST, OVER, READY, RESHARD, RETIRED, WITHOUT
from psstore.server.processes import ShardProcess

STOPPED_S = 2.0
"""How long a process may stand still, as the system says, before it is done without."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 60.0
"""Before a standby is started in place of one that ended: doubles as long as they end before they are in sync."""

_log = logging.getLogger("psstore.supervisor")


@dataclass
class _Group:
    """A shard."""

    leader: ShardProcess
    standby: ShardProcess | None = None
    in_sync: bool = False
    start_at: float = math.inf
    """When the next standby is started."""
    pause_s: float = FIRST_PAUSE_S
    led_at: float | None = None
    """When a standby was told to lead that does not serve yet."""


class ShardGroups:
    """All of a host's, by the index of the shard."""

    def __init__(
        self,
        leaders: Mapping[int, ShardProcess],
        *,
        start_standby: Callable[[int], ShardProcess] | None,
        selector: selectors.BaseSelector,
        wish: int | None = None,
    ) -> None:
        """`leaders`: they are registered with the selector. `start_standby`: None: there are none. `wish`: for another
        number of shards, of which one of them has spoken already."""
        self._groups = {index: _Group(leader) for index, leader in leaders.items()}
        self._start_standby = start_standby
        self._selector = selector
        self._wish = wish
        for index in self._groups:
            self._start_soon(index)

    @property
    def leaders(self) -> list[ShardProcess]:
        return [group.leader for group in self._groups.values()]

    @property
    def processes(self) -> list[ShardProcess]:
        """All of them."""
        standbys = [group.standby for group in self._groups.values() if group.standby is not None]
        return [*self.leaders, *standbys]

    def next_wake(self) -> float:
        """When `tick` may next do something, or a wish waits to be taken."""
        if self._wish is not None:
            return -math.inf
        stopped = [one.stopped_at + STOPPED_S for one in self.processes if one.stopped_at is not None]
        return min([*stopped, *(group.start_at for group in self._groups.values())], default=math.inf)

    leads = True
    """A shard runs here."""

    def take_wish(self) -> int | None:
        """The number of shards that somebody wants the store to go on with, told once."""
        wish, self._wish = self._wish, None
        return wish

    def tick(self) -> str | None:
        """Starts the standbys whose time has come, and does without what stands still. How a shard has ended that is
        lost with that: none is."""
        now = time.monotonic()
        for index, group in self._groups.items():
            if group.start_at <= now:
                group.start_at = math.inf
                self._start(index, group)
            for one in (group.leader, group.standby):
                if one is not None and _has_stood_still(one, now):
                    self._do_without_one_that_stands_still(group, one, now)
        return None

    over: str | None = None
    """Never told: who watches both processes of a shard knows."""

    def store_ends(self, reason: str) -> None:
        """Has shard 0 say to other hosts that all may go, if it is here: standbys here end with their shards."""
        for leader in self.leaders:
            leader.tell(f"{OVER} {reason}")

    def resign(self) -> None:
        """Does nothing, either."""

    def heard(self, child: ShardProcess) -> str | None:
        """One of them says something, or has ended. How it ended, if the shard is lost with it."""
        found = next(((i, g) for i, g in self._groups.items() if child in (g.leader, g.standby)), None)
        if found is None:
            return None  # its leader has said so at the same moment, and it was ended
        index, group = found
        told = child.told()
        if told is None:
            return self._ended(index, group, child)
        for line in told:
            what, _, rest = line.partition(" ")
            if what == IN_SYNC and group.standby is not None and group.standby.client == rest:
                group.in_sync, group.pause_s = True, FIRST_PAUSE_S
                _log.info("%s may lead", group.standby.name)
            elif what == RETIRED:
                group.in_sync = group.in_sync and group.standby is not None and group.standby.client != rest
            elif what == LOST:
                self._do_without(index, group, rest)
            elif what == RESHARD:
                self._wish = int(rest)
            elif what == OVER:
                pass  # this standby has heard so from its shard
            elif what == READY and group.led_at is not None:
                waited_s, group.led_at = time.monotonic() - group.led_at, None
                _log.warning("%s serves again, from version %s on, %.2f s after that", child.name, rest, waited_s)
            else:
                _log.warning("%s: %s", child.name, line)
        return None

    # ---- how ----

    def _do_without_one_that_stands_still(self, group: _Group, one: ShardProcess, now: float) -> None:
        """Unless it goes on by now, or the other one stands still as well: then the shard waits for either."""
        standby = group.standby
        members = [group.leader] if standby is None else [group.leader, standby]
        for each in members:  # the system's word that it goes on may be unread
            if (pause := each.pause()) is not None:
                _log.warning("%s", pause)
        if not _has_stood_still(one, now):
            return
        if standby is not None and all(each.stopped_at is not None for each in members):
            one.stopped_at = now  # whichever goes on first: then it is time to do without the other one
        elif one is standby or (standby is not None and group.in_sync):
            _log.warning("%s has stood still for %g s and is done without", one.name, STOPPED_S)
            one.stopped_at = None
            one.process.kill()
        else:
            one.stopped_at = math.inf  # there is nobody to lead in its place

    def _start(self, index: int, group: _Group) -> None:
        assert self._start_standby is not None, "else none is due"
        try:
            group.standby, group.in_sync = self._start_standby(index), False
        except OSError as error:  # the machine has no room for another process
            _log.error("%s gets no standby for now: %s", group.leader.name, error)
            self._start_again(index, group)
        else:
            self._selector.register(group.standby.report, selectors.EVENT_READ, group.standby)

    def _start_soon(self, index: int, pause_s: float = 0.0) -> None:
        if self._start_standby is not None:
            self._groups[index].start_at = time.monotonic() + pause_s

    def _start_again(self, index: int, group: _Group) -> None:
        group.standby, group.in_sync = None, False
        self._start_soon(index, group.pause_s)
        group.pause_s = min(2 * group.pause_s, MAX_PAUSE_S)

    def _ended(self, index: int, group: _Group, child: ShardProcess) -> str | None:
        fate = child.fate()
        if child is group.standby:
            self._selector.unregister(child.report)
            child.kill()
            group.leader.tell(f"{WITHOUT} {child.client}")
            _log.warning("%s; another one is started", fate)
            self._start_again(index, group)
            return None
        if group.standby is None or not group.in_sync:
            return fate
        self._selector.unregister(child.report)
        child.kill()
        standby, group.standby = group.standby, None
        _log.warning("%s; its standby leads", fate)
        standby.name = group.leader.name
        group.leader, group.led_at = standby, time.monotonic()
        standby.tell(LEAD)
        self._start_again(index, group)
        return None

    def _do_without(self, index: int, group: _Group, client: str) -> None:
        """The leader has lost its standby. If it has died since, what it told anybody is known to that one."""
        standby = group.standby
        if group.leader.process.poll() is not None or standby is None or standby.client != client:
            return
        is_dead = standby.process.poll() is not None
        what = standby.fate() if is_dead else f"{standby.name} is out of reach of its shard and is ended"
        _log.warning("%s; another one is started", what)
        self._selector.unregister(standby.report)
        standby.kill()
        group.leader.tell(f"{WITHOUT} {client}")
        self._start_again(index, group)


def _has_stood_still(one: ShardProcess, now: float) -> bool:
    """Whether it has for so long, as far as the system has said, that it is done without."""
    return one.stopped_at is not None and one.stopped_at + STOPPED_S <= now
