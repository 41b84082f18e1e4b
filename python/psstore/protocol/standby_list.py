"""Who follows a shard: standbys from their FOLLOW until they are done without.

    came ─► fill, once no slot waits for anything ─► complete: from now on it counts, and hears so ─► complete: may lead
                                                      │ its connection is lost
                                                      ▼
                        nobody is told anything until somebody who knows says that it will never lead: done_without

It may say so itself, as long as it is there: retired.
Whether one that is gone will lead is not for the shard to say: who says so is the store's supervisor, once it has ended
that process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from psstore import _core
from psstore.protocol import state_copy
from psstore.protocol.connection import Connection
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.sharing import Lender
from psstore.wire import records as r

PATIENCE_S = 10.0
"""A standby that has answered nothing for so long, of what it was sent, is out of reach. One whose process stands still
is noticed sooner, by who watches it; one that may lead by vote, with the end of the lease."""

BEATS_IN_LEASE = 4
"""One that is late does no harm."""

LOOK_S = 1.0
"""Between two looks whether standbys answer."""

ADDRESSES = 1 << 36
"""How far apart what clients push through begins for standbys: more than one of them has."""

OWN, OWN_ADDRESS = 0, 1 << 63
"""The shard's own memory: no client's connection has that number, and no client's memory begins there."""

ASK_AGAIN_S = 0.01
"""How long after it could not be filled a standby is looked at again: a slot waits for what workers are sending."""


@dataclass
class _Following:
    connection: Connection
    client: str
    place: str = ""
    is_sent: bool = False
    """What the shard was is on its way."""
    counts: bool = False
    """Nobody is told what it does not have. It may have heard so, and then it might lead."""
    may_lead: bool = False
    """By its own word: it has heard so."""
    had: int = 0
    """The last record that it had answered when it was looked at last."""
    waited_since: float | None = None
    """Since when it has answered no other."""
    is_lost: bool = False
    is_gone: bool = False
    """Its connection is."""

    @property
    def may_see(self) -> bool:
        """Whether it is sent what changes, and is on this host: it has no place of its own."""
        return self.is_sent and not self.is_gone and not self.place


@dataclass(frozen=True)
class _Memory:
    """Standbys may see it."""

    owner: Connection | None
    """The client that pushes through it; None: what the shard receives is kept there."""
    file: int
    address: int
    """Where it begins, for standbys."""


class StandbyList:
    """By connection. Single-threaded, as its service."""

    def __init__(
        self,
        facts: ShardFacts,
        coordinator: Coordinator | None,
        *,
        lease_s: float = math.inf,
        lender: Lender | None = None,
    ) -> None:
        """`lease_s`: for so long after a beat that it has answered a standby does nothing to lead by vote; inf: it
        leads by the word of who watches both. `lender`: of memory that standbys may see."""
        self.has_ended = False
        """The workers are done, and what was to come of that was done, too: all processes of the store may go."""
        self.epoch = 0
        """How many leaders the shard has had, this one not counted."""
        self.on_in_sync: Callable[[str], None] = lambda client: None
        """Called when a standby may lead from now on, or answers again."""
        self.on_lost: Callable[[str], None] = lambda client: None
        """Called when one is gone that might lead: nobody is told anything until `done_without`."""
        self.on_retired: Callable[[str], None] = lambda client: None
        """Called when one might lead, and never will, by its own word or an operator's: before anybody is told what it
        does not have."""
        self.on_dropped: Callable[[int, Exception | None], None] = lambda conn, error: None
        """Called with the connection of one that is done without and still there, to be cut. The error: why it could
        not be filled; None: it was."""
        self.next_wake: float | None = None
        """When `look` is to be called again."""
        self._facts = facts
        self._coordinator = coordinator
        self._lease_s = lease_s
        self._look_s = min(LOOK_S, lease_s / BEATS_IN_LEASE)
        facts.data.set_lease(lease_s)
        self._of: dict[int, _Following] = {}
        self._lender = lender
        self._memory: dict[int, _Memory] = {}
        """By the connections of its owners, and OWN."""
        self._addresses = itertools.count(ADDRESSES, ADDRESSES)
        if lender is not None:
            lender.on_shared = self.shared
            if lender.own_file is not None:
                self._memory[OWN] = _Memory(None, lender.own_file, OWN_ADDRESS)

    @property
    def clients(self) -> list[str]:
        """Standbys that may lead, as clients."""
        return [one.client for one in self._of.values() if one.may_lead and not one.is_lost]

    def counters(self) -> dict[str, int]:
        """For STATS."""
        data = self._facts.data
        lags = [data.last_record - has for _, counts, has in data.followers() if counts]
        return {
            "has_ended": int(self.has_ended),
            "led_before": self.epoch,
            "standbys": len(self.clients),
            "standby_lag": max(lags, default=0),
        }

    def came(self, connection: Connection, client: str, *, place: str = "") -> None:
        """Notes a new standby, for the next `look`. `place`: those that were there before will never lead.

        Which of two came last their connections say, not their requests: a process that was ended may have been heard
        so late that another one is in its place.
        """
        at_place = [(conn, one) for conn, one in self._of.items() if place and one.place == place]
        if any(conn > connection.id for conn, _ in at_place):
            self.on_dropped(connection.id, None)
            return
        for _, one in at_place:
            self.done_without(one.client)
        self._of[connection.id] = _Following(connection, client, place)
        self._wake_at(0.0)

    def look(self, now: float) -> None:
        """Sends those that have come what the shard is, unless slots wait for something: then later; and looks whether
        the others answer."""
        if self.next_wake is None or now < self.next_wake:
            return
        self.next_wake = None
        if self._of:
            self._wake_at(now + self._look_s)
        new = [(conn, one) for conn, one in self._of.items() if not one.is_sent]
        if new and not self._facts.shard.is_settled():
            self._wake_at(now + ASK_AGAIN_S)
        else:
            for conn, one in new:
                try:
                    self._send(conn, one)
                except Exception as error:  # it is no fault of whoever is heard now, or waits
                    self._forget(conn)
                    self.on_dropped(conn, error)
        if self._facts.data.is_followed and self._lease_s < math.inf:
            self._facts.data.record_beat(r.encode_record(r.StillLeads()), now)
        last = self._facts.data.last_record
        for conn, _, has in self._facts.data.followers():
            self._look_at(self._of[conn], has, last, now)

    def complete(self, conn: int) -> None:
        """A standby has all that it was filled with, and counts from now on; or it has come to the word that it does,
        which lies behind all that has changed meanwhile: then it may lead."""
        one = self._of.get(conn)
        if one is None or not one.is_sent or one.may_lead:
            return
        if one.counts:
            one.may_lead = True
            self.on_in_sync(one.client)
            return
        one.counts = True
        self._facts.data.count(conn)
        lease_s = self._lease_s if self._lease_s < math.inf else None
        self._facts.data.record_to(conn, r.encode_record(r.InSync(lease_s)))

    def shared(self, client: Connection, arena: _core.PushArena) -> None:
        """Shows standbys what a client pushes through. Frames that refer to a client's memory refer to its first."""
        if client.id in self._memory:
            return
        self._memory[client.id] = _Memory(client, arena.filenos()[0], next(self._addresses))
        for conn, one in self._of.items():
            self._show(conn, one, client.id)

    def went(self, conn: int) -> None:
        """Notes that a connection is gone, if a standby had it, or a client that shares memory."""
        memory = self._memory.pop(conn, None)
        if memory is not None:
            for other, standby in self._of.items():
                if standby.may_see:
                    self._facts.data.record_to(other, r.encode_record(r.MemoryGone(memory.address)))
        one = self._of.get(conn)
        if one is None:
            return
        one.is_gone = True
        if one.counts:
            self._lost(one)
        else:
            del self._of[conn]

    @property
    def lost(self) -> list[str]:
        """Standbys that might lead already, as clients: nobody is told anything."""
        return [one.client for one in self._of.values() if one.is_lost]

    def done_without(self, client: str) -> None:
        """Forgets a standby that will never lead."""
        for conn, one in list(self._of.items()):
            if one.client == client:
                self._forget(conn)
                if not one.is_gone:
                    self.on_dropped(conn, None)

    def store_ends(self, reason: str) -> None:
        """Tells them that the workers are done, or lost for that reason, and whoever asks for counters."""
        self.has_ended = True
        if self._facts.data.is_followed:
            self._facts.data.record(r.encode_record(r.StoreEnds(reason)))

    def retired(self, conn: int) -> None:
        """Forgets a standby that has said that it will never lead."""
        one = self._of.get(conn)
        if one is not None:
            self.on_retired(one.client)
            self._forget(conn)

    def _forget(self, conn: int) -> None:
        del self._of[conn]
        self._facts.data.forget_follower(conn)

    def _show(self, conn: int, one: _Following, owner: int) -> None:
        if not one.may_see:
            return
        assert self._lender is not None, "there would be no memory to see"
        memory = self._memory[owner]

        def mapped() -> None:
            if self._of.get(conn) is one and one.may_see and owner in self._memory:
                self._facts.data.sees(conn, owner=owner, address=memory.address)

        offer = self._lender.lend(one.connection, owner=memory.owner, file=memory.file, mapped=mapped)
        self._facts.data.record_to(conn, r.encode_record(r.MemoryShown(memory.address, offer)))

    def _look_at(self, one: _Following, has: int, last: int, now: float) -> None:
        if has == last or has != one.had or one.waited_since is None:
            one.had, one.waited_since = has, None if has == last else now
            if one.is_lost and not one.is_gone:  # it was slow, or the way to it was closed
                one.is_lost = False
                if one.may_lead:
                    self.on_in_sync(one.client)
        elif now - one.waited_since > min(PATIENCE_S, self._lease_s) and one.counts:
            self._lost(one)

    def _lost(self, one: _Following) -> None:
        if not one.is_lost:
            one.is_lost = True
            self.on_lost(one.client)

    def _wake_at(self, when: float) -> None:
        self.next_wake = when if self.next_wake is None else min(self.next_wake, when)

    def _send(self, conn: int, one: _Following) -> None:
        one.is_sent = True
        one.connection.protocol.follow()
        data = self._facts.data
        coordinator = b"" if self._coordinator is None else state_copy.dump(self._coordinator)
        for record in self._facts.as_it_is(epoch=self.epoch, coordinator=coordinator):
            for body in r.bodies_of(record):
                data.record_to(conn, body)
        for owner in self._memory:
            self._show(conn, one, owner)
        data.fill(conn)
        data.record_to(conn, r.encode_record(r.FillEnds()))
