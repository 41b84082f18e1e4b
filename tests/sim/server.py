"""One shard process: the real service, its real table, and the bytes between them and the network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from psstore import _core
from psstore.config import Credentials
from psstore.errors import ProtocolError, PsstoreError
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.frames import Output, Piece, Send
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.saving import Keeper
from psstore.protocol.service import ShardService
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.wire.messages import DecisionFact, Fact, Signed

from .archive import Archive, SimulatedPlace, SimulatedSaver
from .memory import HostMemory
from .network import Connection, Network
from .world import Action, World

READ_S = 0.05
"""How long a process that stood still takes to read what has come meanwhile."""

MAX_IDLE_TICKS = 100
"""Ticks at one instant after which a server is taken to spin: each should end a wait, or not be asked for."""


class Notary(Signer):
    """The coordinator's signer. Keeps every decision that was ever made: the truth that checks compare with."""

    def __init__(self, world: World, key: bytes, decisions: Sequence[DecisionFact] = ()) -> None:
        """`decisions`: of the lives before."""
        super().__init__(key)
        self.decisions = list(decisions)
        self.decided_at: dict[int, float] = {decision.number: world.now for decision in decisions}
        self._world = world

    def sign(self, fact: Fact) -> Signed:
        """A coordinator's standby makes its decisions, too: the same ones."""
        if isinstance(fact, DecisionFact):
            if fact.number <= len(self.decisions):
                made = self.decisions[fact.number - 1]
                assert made == fact, f"a coordinator and its standby decide differently: {made}, {fact}"
            else:
                self.decisions.append(fact)
                self.decided_at[fact.number] = self._world.now
        return super().sign(fact)

    def forget_after(self, number: int) -> None:
        """Nobody was told of the decisions after this one, and they are made anew."""
        for lost in self.decisions[number:]:
            del self.decided_at[lost.number]
        del self.decisions[number:]


class Mouthpiece(Signer):
    """What one process of the coordinator's signs with. Whoever does not lead any more decides what it likes: nobody is
    to hear of it."""

    def __init__(self, notary: Notary, key: bytes) -> None:
        super().__init__(key)
        self.is_deposed = False
        self._notary = notary

    def sign(self, fact: Fact) -> Signed:
        return super().sign(fact) if self.is_deposed else self._notary.sign(fact)


class ObservedShard:
    """The compiled shard; notes which decisions it was told to apply, and which changed its version."""

    def __init__(self, index: int, *, notes_rows: bool) -> None:
        self.core = _core.Shard(index=index, notes_row_decisions=notes_rows)
        self.applied: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def set_version(self, version: int) -> None:
        self.core.set_version(version)
        self.applied = list(range(1, version + 1))

    def advance(self, decision: _core.Decision) -> None:
        before = self.core.version
        self.core.advance(decision)
        if self.core.version != before:
            self.applied.append(decision.number)


class Server:
    """Accepts connections and carries the service's outputs out."""

    def __init__(
        self,
        world: World,
        *,
        identity: ShardIdentity,
        signer: Signer,
        coordinator: Coordinator | None,
        keeper: Keeper | None,
        place: SimulatedPlace | None,
        archive: Archive,
        lazy: bool,
        notes_rows: bool,
        lease_s: float = math.inf,
        memory: HostMemory | None = None,
    ) -> None:
        self.memory = memory
        self._lender = None if memory is None else memory.lender()
        self.signer = signer
        self._credentials = Credentials(token=next((token for _, token in identity.tokens.grants), None))
        self._place = place
        self.world = world
        self.shard = ObservedShard(identity.shard, notes_rows=notes_rows)
        self.service = ShardService(
            identity=identity,
            shard=self.shard,  # type: ignore[arg-type]  # everything that a Shard has
            signer=signer,
            coordinator=coordinator,
            saver=SimulatedSaver(archive, self.shard.core, identity.shard),
            keeper=keeper,
            make_nonce=lambda: world.rng.randbytes(32),
            lease_s=lease_s,
            lender=self._lender,
        )
        self.service.leadership.standbys.on_dropped = self._drop
        self.stands_still_until = 0.0
        """Nothing is done here before."""
        self.ends: dict[int, ServerEnd] = {}
        self._replied: set[int] = set()
        """Those that were given replies by others, which are not sent yet."""
        self._take_ready = self.service.data.take_ready
        self.leader: LeaderEnd | None = None
        """Where the shard is that this is a standby of."""
        self._ids = itertools.count(1)
        self._lazy = lazy
        """Never settles on its own: every slot is brought up to date by whoever touches it."""
        self._armed = float("inf")
        self._idle_ticks = 0
        self.dead = False
        self.on_leader_lost: Callable[[], None] = lambda: None
        """Called when this standby has lost its shard, whichever way."""

    def accept(self) -> ServerEnd:
        end = ServerEnd(self, next(self._ids))
        self.ends[end.id] = end
        end.protocol = self.service.opened(end.id, self.world.now)
        end.take_replies = end.protocol.take_replies
        self.arm()
        return end

    def follow(self, leader: Server, network: Network, *, place: str = "") -> None:
        """Becomes its standby, in the place of those who followed from there before."""
        end = leader.accept()
        self.follows_as = f"{self.world.rng.getrandbits(128):032x}"
        client = ClientIdentity(client=self.follows_as, role="standby", credentials=self._credentials)
        protocol, hello = self.service.follow(
            0,
            client=client,
            address="sim://leader",
            place=place,
            see=None if self.memory is None else self.memory.see,
        )
        self.leader = LeaderEnd(self, protocol)
        self.leader.connection = end.connection = Connection(network, client=self.leader, server=end)
        self.leader.connection.to_server.write([hello])

    def lead(self) -> None:
        """From now on clients come here."""
        self.leader = None
        self.service.lead(self.world.now)
        self._ids = itertools.count(self.service.leadership.first_connection)
        self.carry_out([])

    def retire(self) -> None:
        """SIGTERM to a standby, which ends once its shard has heard so, or by and by."""
        word = self.service.leadership.retire()
        if word is not None:
            assert self.leader is not None, "it is told nothing where that is lost"
            self.leader.connection.to_server.write([word])

    def kill(self) -> None:
        """kill -9: what clients were sent and have not got may be lost."""
        self.dead = True
        if self.memory is not None and self._lender is not None:
            self.memory.ended(self._lender)
        if self._place is not None:
            self._place.is_gone = True
        if self.leader is not None:
            self.leader.connection.close_from_client(killed=True)
        for end in list(self.ends.values()):
            end.connection.cut_from_server()
        self.ends.clear()

    def _drop(self, conn: int, error: Exception | None) -> None:
        assert error is None
        if conn in self.ends:
            self.ends[conn].close()

    def not_resharded(self) -> None:
        """As the store's supervisor has it."""
        self.carry_out(self.service.not_resharded("", self.world.now))

    def later(self, action: Action) -> bool:
        """Whether this process stands still: then it does so when it goes on."""
        if self.world.now >= self.stands_still_until:
            return False
        self.world.at(self.stands_still_until, action)
        return True

    def carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            end = self.ends.get(output.conn)
            if end is None:
                continue
            if isinstance(output, Send):
                end.protocol.reply(output.pieces)
                self._replied.add(output.conn)
            else:
                self.world.say(f"shard {self.service.identity.shard} closes {output.conn}: {output.reason}")
                self.deliver()
                end.close()
        self.deliver()
        if caught_up := self.service.catch_up(self.world.now):
            self.carry_out(caught_up)
        self.deliver()
        if not self._lazy and self.world.rng.random() < 0.2:
            self.service.settle()
        self.arm()

    def deliver(self) -> None:
        """Sends what need not wait for standbys, as the poller does."""
        ready = self._take_ready() | self._replied
        if not ready:
            return
        self._replied.clear()
        for conn in sorted(ready & self.ends.keys()):
            end = self.ends[conn]
            if replies := end.take_replies():
                end.connection.to_client.write(replies)

    def arm(self) -> None:
        wake = self.service.next_wake()
        if wake is not None and wake < self._armed:
            self._armed = wake
            self.world.at(wake, self._tick)

    def _tick(self) -> None:
        if self.world.now < self.stands_still_until:  # what came meanwhile is read before anything is late
            self.world.at(self.stands_still_until + READ_S, self._tick)
            return
        self._armed = float("inf")
        if self.dead:
            return
        outputs = self.service.tick(self.world.now)
        self.carry_out(outputs)
        self._idle_ticks = 0 if outputs or self._armed > self.world.now else self._idle_ticks + 1
        assert self._idle_ticks < MAX_IDLE_TICKS, "next_wake asks for a tick again and again, and tick does nothing"


class ServerEnd:
    """The server's end of one connection."""

    connection: Connection
    protocol: _core.ServerProtocol
    take_replies: Callable[[], Sequence[Piece]]
    """The protocol's: bound once."""

    def __init__(self, server: Server, conn: int) -> None:
        self.id = conn
        self._server = server

    def received(self, data: bytes) -> None:
        service = self._server.service
        if self._server.later(lambda: self.received(data)):
            return
        self.protocol.feed(data)
        try:
            while self.id in self._server.ends:
                frame = self.protocol.next_frame(self._server.world.now)
                replies = self.take_replies()
                if replies:
                    self.connection.to_client.write(replies)
                self._server.deliver()
                if woken := service.woken(self._server.world.now):
                    self._server.carry_out(woken)
                if frame is not None:
                    self._server.carry_out(service.frame(self.id, frame, self._server.world.now))
                elif not replies:
                    break
        except ProtocolError as error:
            self._server.carry_out(service.failed(self.id, error))

    def lost(self) -> None:
        if not self._server.later(self.lost):
            self._forget()

    def close(self) -> None:
        self.connection.close_from_server()
        self._forget()

    def _forget(self) -> None:
        if self._server.ends.pop(self.id, None) is not None:
            self._server.service.closed(self.id, self._server.world.now)
            self._server.arm()


class LeaderEnd:
    """A standby's end of the connection to its shard. What it can't follow is its end."""

    connection: Connection

    def __init__(self, server: Server, protocol: _core.ServerProtocol) -> None:
        self._server = server
        self._protocol = protocol

    def received(self, data: bytes) -> None:
        server = self._server
        if server.dead or server.leader is not self or server.later(lambda: self.received(data)):
            return
        self._protocol.feed(data)
        try:
            while True:
                frame = self._protocol.next_frame(server.world.now)
                for output in [] if frame is None else server.service.frame(0, frame, server.world.now):
                    assert isinstance(output, Send)
                    self._protocol.reply(output.pieces)
                replies = self._protocol.take_replies()
                if replies:
                    self.connection.to_server.write(replies)
                if frame is None and not replies:
                    break
            if server.memory is not None:
                self._let_go()
            server.arm()
        except PsstoreError as error:
            server.world.say(f"a standby of shard {server.service.identity.shard} fails: {error}")
            server.kill()

    def _let_go(self) -> None:
        """Tells the shard of what clients pushed, and is needed here no more."""
        if self._server.world.rng.random() < 0.5:
            self._server.service.settle()
        delivered, failed = self._server.service.data.wake(self._server.world.now)
        assert not failed, "nobody asks a standby for data"
        for conn, pieces in delivered:
            assert conn == 0, "nobody asks a standby for data"
            self.connection.to_server.write(pieces)

    def lost(self) -> None:
        server = self._server
        if server.leader is self and not server.dead and not server.later(self.lost):
            server.on_leader_lost()
