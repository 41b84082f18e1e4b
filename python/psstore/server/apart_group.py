"""This host's process of a shard whose other process runs on another host. One of the two leads, the other stands by.

    ours dies, and led         ─► we say so to the other one, which leads; ours starts again, as its standby
    ours is told to end        ─► the same before
    the other one is lost      ─► its own host starts it again, as a standby in the same place: the one before is dead;
                                  or somebody who knows says so: psstore promote
    ours, a standby, is cut off ─► it starts again as a standby, once the shard answers

Only who knows that a process is dead says so: its own supervisor here, whoever starts another one in its place, or an
operator. Two hosts that only don't hear of each other wait.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable

from psstore.errors import PsstoreError
from psstore.server.other_member import FoundMember, look_at, promote
from psstore.server.processes import ShardProcess
from psstore.server.settings import CUT, IN_SYNC, LOST, READY
from psstore.server.shard_group import FIRST_PAUSE_S, MAX_PAUSE_S

ASK_S = 0.5
"""Between two questions to the other host, where one has to know how it is there."""

REMIND_S = 60.0
"""How often it is said that the other host is out of reach."""

_log = logging.getLogger("psstore.supervisor")


class ApartGroup:
    """Starts and watches the process here; asks at the other host how the other one is, and says that it leads."""

    def __init__(
        self,
        *,
        index: int,
        other: str,
        token: bytes | None,
        patience_s: float,
        start: Callable[[bool], ShardProcess],
        selector: selectors.BaseSelector,
    ) -> None:
        """`other`: where the other process is reached. `patience_s`: how long it is tried to hand over to it.
        `start`: starts a process here, which begins as the shard, or as a standby of the one that leads there."""
        self.leads = False
        """The process here is the shard, or will be."""
        self._name = f"shard {index}"
        self._other = other
        self._token = token
        self._patience_s = patience_s
        self._start_process = start
        self._selector = selector
        self._child: ShardProcess | None = None
        self._is_ready = False
        self._in_sync = False
        """Both have all that anybody was told."""
        self._fate: tuple[str, float] | None = None
        """How the process here ended, which led, and until when the other one is asked to lead."""
        self._start_at = math.inf
        """When the next standby is started here."""
        self._pause_s = FIRST_PAUSE_S
        self._ask_at = math.inf
        self._remind_at = 0.0

    # ---- what a supervisor wants of its shards ----

    @property
    def leaders(self) -> list[ShardProcess]:
        return self.processes

    @property
    def processes(self) -> list[ShardProcess]:
        return [] if self._child is None else [self._child]

    @property
    def is_up(self) -> bool:
        """The process here serves, or stands by and may lead."""
        return self._is_ready or (not self.leads and self._in_sync)

    def begin(self, *, leads: bool) -> None:
        """Starts the process here."""
        self.leads = leads
        self._start()

    def next_wake(self) -> float:
        return min(self._start_at, self._ask_at)

    def tick(self) -> str | None:
        """Does what is due. How the process here ended, if the shard is lost with it."""
        now = time.monotonic()
        if self._start_at <= now:
            self._start_at = math.inf
            self._start()
        if self._ask_at > now:
            return None
        self._ask_at = time.monotonic() + ASK_S
        if self._fate is not None:
            return self._hand_over(*self._fate)
        member = self._look()
        if member is not None and member.leads:
            self._follow_anew()
        return None

    def heard(self, child: ShardProcess) -> str | None:
        """The process here says something, or has ended. How, if the shard is lost with it."""
        told = child.told()
        if told is None:
            return self._ended(child)
        for line in told:
            what = line.partition(" ")[0]
            if what == READY:
                self._ready()
            elif what == IN_SYNC:
                self._in_sync = True
                self._ask_at = math.inf
                where = f"at {self._other}" if self.leads else "here"
                _log.info("the standby of %s %s may lead", self._name, where)
            elif what == LOST:
                self._ask_soon()
                _log.warning(
                    "%s has lost its standby at %s, which might lead: nobody is told anything before it is back, or"
                    " somebody knows that it is dead, and says so: psstore promote",
                    self._name,
                    self._other,
                )
            elif what == CUT:
                self._ask_soon()
            else:
                _log.warning("%s: %s", child.name, line)
        return None

    def resign(self) -> None:
        """Ends the process here, and has the other one lead, if it can."""
        if not self.leads or not self._in_sync or self._child is None:
            return
        self._end()
        try:
            promote(self._other, self._token, force=True)
            _log.warning("%s is led at %s from now on", self._name, self._other)
        except PsstoreError as error:
            _log.error("%s could not be handed over to %s: %s", self._name, self._other, error.message)

    # ---- how ----

    def _start(self) -> None:
        self._child = self._start_process(self.leads)
        self._is_ready = self._in_sync = False
        self._selector.register(self._child.report, selectors.EVENT_READ, self._child)

    def _end(self) -> None:
        assert self._child is not None
        self._selector.unregister(self._child.report)
        self._child.kill()
        self._child = None

    def _ready(self) -> None:
        self._is_ready = True
        if not self.leads:
            self.leads, self._in_sync = True, False
            self._ask_at = math.inf
            assert self._child is not None
            self._child.name = self._name
            _log.warning("%s is led here from now on", self._name)

    def _ended(self, child: ShardProcess) -> str | None:
        fate, was_in_sync = child.fate(), self._in_sync
        self._end()
        if self.leads:
            if not was_in_sync:
                return fate
            self._fate = fate, time.monotonic() + self._patience_s
            return self._hand_over(*self._fate)
        _log.warning("%s; it is started again", fate)
        self._pause_s = FIRST_PAUSE_S if was_in_sync else min(2 * self._pause_s, MAX_PAUSE_S)
        self._start_at = time.monotonic() + self._pause_s
        return None

    def _hand_over(self, fate: str, until: float) -> str | None:
        """The process here led, and is dead. Its fate, if nobody can lead."""
        try:
            promote(self._other, self._token, force=True)
        except PsstoreError as error:
            if time.monotonic() > until:
                return f"{fate}, and its standby at {self._other} does not lead: {error.message}"
            self._remind(error.message)
            self._ask_soon()
            return None
        _log.warning("%s; its standby at %s leads", fate, self._other)
        self._fate = None
        self._follow_anew()
        return None

    def _follow_anew(self) -> None:
        """The other one leads: the process here starts again as its standby."""
        if self._child is not None:
            if self.leads:
                _log.warning("%s is led at %s: its process here ends, and stands by", self._name, self._other)
            self._end()
        self.leads = False
        self._ask_at = math.inf
        self._start_at = time.monotonic()

    def _look(self) -> FoundMember | None:
        try:
            return look_at(self._other, self._token)
        except PsstoreError as error:
            self._remind(error.message)
            return None

    def _remind(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._remind_at:
            self._remind_at = now + REMIND_S
            _log.warning("%s: %s", self._other, why)

    def _ask_soon(self) -> None:
        self._ask_at = time.monotonic() + ASK_S
