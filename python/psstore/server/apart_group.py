"""This host's process of a shard whose other process runs on another host. One of the two leads, the other stands by.

    ours dies, and led          ─► we say so to the other one, which leads; ours starts again, as its standby
    ours is told to end         ─► the same before; a standby says so itself, and its shard goes on without it
    ours, a standby, is cut off ─► it starts again as a standby, once the shard answers; or it leads, by the word of all
                                   other shards
    ours has lost its standby   ─► it waits for the next one from there, which says that the one before is dead; or goes
                                   on without it, by the word of one other shard

Who knows that a process is dead says so: its own supervisor here, whoever starts another one in its place, or an
operator; or it says itself that it ends, as one does whose supervisor is killed. Of two hosts that only don't hear of
each other the other shards decide (protocol/election.py); where there are none, or they don't answer, both wait.
"""

from __future__ import annotations

import logging
import math
import select
import selectors
import time
from collections.abc import Callable

from psstore.config import Credentials
from psstore.errors import PsstoreError
from psstore.protocol.election import Succession
from psstore.server.other_member import LOOK_S, FoundMember, look_at, promote
from psstore.server.pipe_words import CUT, IN_SYNC, LEAD, LOST, OVER, READY, RETIRED, WITHOUT
from psstore.server.processes import ShardProcess
from psstore.server.shard_group import FIRST_PAUSE_S, MAX_PAUSE_S
from psstore.server.voting import Places, vote

ASK_S = 0.5
"""Between two questions to the other host, where one has to know how it is there."""

GLANCE_S = 0.5
"""How long the other process is asked whether it leads, before others are asked what becomes of it."""

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
        others: Places,
        credentials: Credentials,
        patience_s: float,
        start: Callable[[bool], ShardProcess],
        selector: selectors.BaseSelector,
    ) -> None:
        """`other`: where the other process is reached. `others`: where the other shards are. `patience_s`: how long it
        is tried to hand over to it.
        `start`: starts a process here, which begins as the shard, or as a standby of the one that leads there."""
        self.leads = False
        """The process here is the shard, or will be."""
        self._name = f"shard {index}"
        self._other = other
        self._others = others
        self._credentials = credentials
        self._patience_s = patience_s
        self._start_process = start
        self._selector = selector
        self._child: ShardProcess | None = None
        self._is_ready = False
        self._in_sync = False
        """Both have all that anybody was told."""
        self._lost = ""
        """The standby that the process here has lost, as a client; '': none."""
        self._asked = ""
        """A standby that others were asked about, as a client: one may have said that it is gone, so it will never
        lead."""
        self.over: str | None = None
        """The shard has said that the store ends: why, if that is a failure, or ''."""
        self._may_ask_at = math.inf
        """When others may be asked whether the process here leads, which has lost its shard."""
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
            try:
                self._start()
            except OSError as error:  # the machine has no room for another process
                _log.error("%s can't be started here: %s", self._name, error)
                self._start_after_pause()
        if self._ask_at > now:
            return None
        self._ask_at = time.monotonic() + ASK_S
        if self._fate is not None:
            return self._hand_over(*self._fate)
        if self._is_decided(now):
            return None
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
            what, _, rest = line.partition(" ")
            if what == READY:
                self._ready(rest)
            elif what == IN_SYNC:
                self._in_sync = True
                if not rest or rest != self._asked:
                    self._lost, self._ask_at = "", math.inf
                where = f"at {self._other}" if self.leads else "here"
                _log.info("the standby of %s %s may lead", self._name, where)
            elif what == LOST:
                self._lost, self._ask_at = rest, time.monotonic()
                _log.warning(
                    "%s has lost its standby at %s, which might lead: nobody is told anything before it is back, or"
                    " another shard says that it is gone, or somebody who knows: psstore promote",
                    self._name,
                    self._other,
                )
            elif what == RETIRED:
                self._in_sync, self._lost, self._ask_at = False, "", math.inf
                _log.info("%s goes on without its standby at %s, which is to end, or dead", self._name, self._other)
            elif what == OVER:
                self.over = rest
            elif what == CUT:
                self._may_ask_at = time.monotonic() + float(rest)
                self._ask_soon()
            else:
                _log.warning("%s: %s", child.name, line)
        return None

    def store_ends(self, reason: str) -> None:
        """Has the other process hear that the store ends, whatever its host has heard, and other hosts that they may
        go. To be called before the one here is told to end. `reason`: one line; '': the workers are done."""
        if self.leads and self._child is not None:
            self._child.tell(f"{OVER} {reason}")

    def resign(self) -> None:
        """Ends the process here, and has the other one lead. Until that one can, the process here serves: the other one
        may have another address by now, of which names tell late, or is being filled."""
        if not self.leads or self._child is None:
            return
        until = time.monotonic() + self._patience_s
        while (can_lead := self._can_other_lead()) is None and time.monotonic() < until:
            if select.select([self._child.report], [], [], ASK_S)[0]:
                self.heard(self._child)
            if self._child is None:
                return  # it has died, and that was seen to
        if can_lead is None:
            _log.error("%s could not be handed over to %s within %g s", self._name, self._other, self._patience_s)
        if not can_lead:
            return
        self._end()
        try:
            promote(self._other, self._credentials, force=True)
            _log.warning("%s is led at %s from now on", self._name, self._other)
        except PsstoreError as error:
            _log.error("%s could not be handed over to %s: %s", self._name, self._other, error.message)

    def _can_other_lead(self) -> bool | None:
        """Whether the other process can take over from the one here. None: not now, and it may soon."""
        member = self._look()
        if member is None:
            return None if self._in_sync else False  # nobody was to be expected there
        if self._in_sync and member.may_lead:
            return True
        return False if member.leads else None  # it is being filled, or was done without, whatever it says itself

    # ---- who leads, where nobody knows ----

    def _is_decided(self, now: float) -> bool:
        """Asks the other shards, if the two of this one have lost each other: they have said what becomes of ours."""
        assert self._child is not None, "it has told us"
        if self.leads and self._lost:
            member = self._look(timeout_s=GLANCE_S)
            if member is not None and member.leads:
                self._follow_anew()
                return True
            self._asked = self._lost
            if vote(self._others, self._lost, leads=False, credentials=self._credentials) is not Succession.GONE:
                return False
            _log.warning("%s goes on without its standby at %s, which does not answer", self._name, self._other)
            self._in_sync = False  # before anybody is told what it does not have
            self._child.tell(f"{WITHOUT} {self._lost}")
            self._lost, self._ask_at = "", math.inf
            return True
        if self.leads or now < self._may_ask_at:
            return False
        found = vote(self._others, self._child.client, leads=True, credentials=self._credentials)
        if found is Succession.LEADS:
            _log.warning("%s does not answer at %s, and its standby here leads", self._name, self._other)
            self._child.tell(LEAD)
            self._ask_at = math.inf
        elif found is Succession.GONE:
            _log.warning("%s goes on without its standby here, which starts again", self._name)
            self._follow_anew()
        return found is not Succession.OPEN

    # ---- how ----

    def _start(self) -> None:
        self._child = self._start_process(self.leads)
        self._is_ready = self._in_sync = False
        self._lost, self._may_ask_at = "", math.inf
        self._selector.register(self._child.report, selectors.EVENT_READ, self._child)

    def _end(self) -> None:
        """With the process goes what it has asked for."""
        assert self._child is not None
        self._selector.unregister(self._child.report)
        self._child.kill()
        self._child = None
        self._ask_at = math.inf

    def _ready(self, version: str) -> None:
        self._is_ready = True
        if not self.leads:
            self.leads, self._in_sync = True, False
            self._ask_at = math.inf
            assert self._child is not None
            self._child.name = self._name
            _log.warning("%s is led here, from version %s on", self._name, version)

    def _ended(self, child: ShardProcess) -> str | None:
        fate, was_in_sync = child.fate(), self._in_sync
        self._end()
        if self.leads:
            if not was_in_sync:
                return fate
            self._fate = fate, time.monotonic() + self._patience_s
            return self._hand_over(*self._fate)
        _log.warning("%s; it is started again", fate)
        self._start_after_pause(is_first=was_in_sync)
        return None

    def _start_after_pause(self, *, is_first: bool = False) -> None:
        self._pause_s = FIRST_PAUSE_S if is_first else min(2 * self._pause_s, MAX_PAUSE_S)
        self._start_at = time.monotonic() + self._pause_s

    def _hand_over(self, fate: str, until: float) -> str | None:
        """The process here led, and is dead. Its fate, if nobody can lead."""
        try:
            promote(self._other, self._credentials, force=True)
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
        self.leads, self._ask_at = False, math.inf
        self._start_at = time.monotonic()

    def _look(self, timeout_s: float = LOOK_S) -> FoundMember | None:
        try:
            return look_at(self._other, self._credentials, timeout_s=timeout_s)
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
