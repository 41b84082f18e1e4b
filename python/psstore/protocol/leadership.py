"""Whether a shard's process leads the shard or follows another one that does, and who follows this one."""

from __future__ import annotations

import math
from collections.abc import Callable

from psstore import _core
from psstore.errors import UnexpectedMessage
from psstore.protocol.connection import Connection
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.sharing import Lender, See
from psstore.protocol.signing import Signer
from psstore.protocol.standby import Standby
from psstore.protocol.standby_list import StandbyList
from psstore.wire import messages as m

OPS = _core.OPS


class Leadership:
    """Who leads one shard, as one of its processes knows it. Single-threaded, as its service."""

    def __init__(
        self,
        facts: ShardFacts,
        coordinator: Coordinator | None,
        signer: Signer,
        *,
        store: str,
        shard: int,
        lender: Lender | None = None,
        lease_s: float = math.inf,
    ) -> None:
        """`store`, `shard`: which one it is. `lender`, `lease_s`: see StandbyList."""
        self.standbys = StandbyList(facts, coordinator, lease_s=lease_s, lender=lender)
        """Who follows this shard."""
        self.standby: Standby | None = None
        """What this process is as long as it does not lead."""
        self.on_promoted: Callable[[], None] = lambda: None
        """Called when this standby is to lead, by the word of somebody who knows that its shard is dead."""
        self._facts = facts
        self._coordinator = coordinator
        self._signer = signer
        self._store = store
        self._shard = shard
        self._followed = 0
        """The connection to the shard that this is a standby of."""

    # ---- one of a shard's processes takes another's place ----

    def follow(
        self,
        conn: int,
        *,
        client: ClientIdentity,
        address: str,
        protocol: _core.ServerProtocol,
        nonce: bytes,
        place: str = "",
        see: See | None = None,
    ) -> bytes:
        """Makes this a standby of the shard at the other end of that connection. What to send there first."""
        self._followed = conn
        self.standby = Standby(
            identity=client,
            address=address,
            store=self._store,
            shard=self._shard,
            facts=self._facts,
            coordinator=self._coordinator,
            signer=self._signer,
            nonce=nonce,
            protocol=protocol,
            place=place,
            see=see,
        )
        return self.standby.hello()

    def is_from_leader(self, conn: int) -> bool:
        """Whether the shard that this is a standby of is at the other end of that connection."""
        return conn == self._followed

    def lead(self) -> float:
        """Makes this the shard. By how much the coordinator's clock is ahead of the one here. Raises BadArgument unless
        it may lead."""
        assert self.standby is not None, "it leads already"
        self.standby.check_may_lead(force=True)
        self.standbys.epoch = self.standby.epoch + 1
        clock_ahead_s = self.standby.clock_ahead_s
        self.standby = None
        self._facts.data.forget(self._followed)
        self._facts.shard.own_staged()  # else what the shard before had in memory would stay, all of it
        return clock_ahead_s

    @property
    def first_connection(self) -> int:
        """The smallest number that no connection of an earlier leader had."""
        return 1 + (self.standbys.epoch << 32)

    def why_not_served(self, connection: Connection) -> str | None:
        """What a client is told that came to a standby. None: this leads, and did when the connection was accepted."""
        if self.standby is not None:
            return self.standby.describe()
        if connection.id < self.first_connection:  # an answer may be owed to one of that number of the process before
            return f"this process has come to lead shard {self._shard} since: connect again"
        return None

    def retire(self) -> bytes | None:
        """Never leads. What to tell the shard that this is a standby of, if that is to hear of it."""
        return None if self.standby is None else self.standby.retire()

    # ---- what the store's other processes ask ----

    def promote(self, asked: m.Promote) -> None:
        """The other one of the shard's processes is dead, as an operator says. Raises BadArgument."""
        if self.standby is None:
            for client in self.standbys.lost:
                self.standbys.on_retired(client)
                self.standbys.done_without(client)
        else:
            self.standby.check_may_lead(force=asked.force)
            self.on_promoted()

    def word(self, frame: _core.Frame) -> m.Word:
        """What is said to an elector, of another shard's standby."""
        if frame.op != OPS["ASK_WORD"]:
            raise UnexpectedMessage(f"operation {frame.op} of an elector, who can ask for words only")
        asked, words = m.decode_body(m.AskWord, frame.body), self._facts.words
        if self.standby is not None:
            may_lead = self.standby.may_lead and self.standby.is_cut
            return m.Word(gone=words.gone, standby=self.standby.client, may_lead=may_lead)
        leads = self._facts.give_word(asked.client, leads=asked.leads) if asked.client else None
        return m.Word(leads=leads, gone=words.gone)

    def followed_by(self, connection: Connection, asked: m.Follow) -> None:
        """A standby comes, as a process of the store says. Raises BadSignature, BadArgument."""
        fact = self._facts.may_follow(connection, asked)
        self.standbys.came(connection, fact.client, place=fact.place)

    # ---- time ----

    def look(self, now: float) -> None:
        """Notices, as a standby, that its shard is silent."""
        if self.standby is not None:
            self.standby.look(now)

    def next_wake(self) -> float | None:
        """When `look`, or that of the standbys, is to be called."""
        wake = self.standbys.next_wake
        if self.standby is None or (own := self.standby.next_wake) is None:
            return wake
        return own if wake is None else min(wake, own)

    def counters(self) -> dict[str, int]:
        """For STATS."""
        return {
            "leads": int(self.standby is None),
            "may_lead": int(self.standby is None or self.standby.may_lead),
            **self.standbys.counters(),
        }
