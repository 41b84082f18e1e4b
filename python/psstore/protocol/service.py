"""What one shard process does with frames: the handshake, facts to verify, and on shard 0 the coordinator.

The driver feeds a connection's bytes to its protocol, sends the replies that it finds there, then what `woken` returns,
calls `frame` with each frame that comes out, `tick` when `next_wake` is reached, and carries the outputs out. One
request's error never harms another's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from psstore import _core
from psstore.errors import (
    AuthFailed,
    BadArgument,
    DeviceFailed,
    HandshakeTimeout,
    NotAllowed,
    NotLeading,
    OutOfMemory,
    Overloaded,
    ProtocolError,
    PsstoreError,
    ShuttingDown,
    TooManyProofs,
    UnexpectedMessage,
)
from psstore.protocol.connection import HANDSHAKE_S, STRANGER_S, VISITOR_S, WORKERS_SHARE, Connection
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.coordinator_feed import CHANGES_NOTHING, CONTROL, Told, feed
from psstore.protocol.frames import Close, Output, Send, failure
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.proof_limits import ProofLimits
from psstore.protocol.replies import Reply
from psstore.protocol.roles import ALLOWED_OPS, NO_TOKENS, Access, Tokens, check_may, check_may_be
from psstore.protocol.saving import Keeper, Saver
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.sharing import MAX_LEASED_BYTES, Lender, OwnShard, See
from psstore.protocol.signing import Signer
from psstore.protocol.standby import Standby
from psstore.protocol.standby_list import StandbyList
from psstore.protocol.standstill import Standstill
from psstore.protocol.states import ConnectionState
from psstore.protocol.table_counters import table_counters
from psstore.protocol.traffic_counters import traffic_counters
from psstore.types import Consistency
from psstore.wire import messages as m
from psstore.wire import records as r

OPS = _core.OPS
CARRIERS = frozenset((OPS["PUSH"], OPS["PULL"], OPS["NORM"], OPS["PULL_ROWS"], OPS["LIST_ROWS"]))
"""Requests for data that bring decisions. They come here if one is new, and go back to their connection's protocol."""

WRITES = frozenset((OPS["PUSH"], OPS["ASSIGN"], OPS["ADD"], OPS["INIT"], OPS["RESTORE"]))
"""Requests with a payload."""

CHECKPOINTS = frozenset((OPS["SAVE"], OPS["BEGIN"], OPS["KEEP"]))
"""Requests of whoever leads the writing of a checkpoint (saving.py)."""

CLOCK_GRAIN_S = 1e-6
"""What is added where a time goes from one clock to another, so that it is over there, too, when it is over here."""


class _ReshardAsked(NamedTuple):
    client: str
    conn: int
    request: int


@dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """What a shard says of itself at WELCOME."""

    store: str
    shard: int
    addresses: tuple[tuple[str, ...], ...]
    consistency: Consistency
    heartbeat_s: float
    tokens: Tokens = NO_TOKENS
    """As the store begins; `ShardService.tokens` are those that count now."""
    lineage: str = ""
    """Id of the first of the runs of which each was restored from the one before; '': this is the first."""
    restored: int = -1
    """The decision that this run was restored at; -1: it began with nothing."""
    returns: bool = False
    """The store starts again by itself when a shard dies."""
    process: int = 0
    """Id of the process that it is, on its host; for people."""


class ShardService:
    """One per shard process. Single-threaded; every method returns at once."""

    def __init__(
        self,
        *,
        identity: ShardIdentity,
        shard: _core.Shard,
        signer: Signer,
        coordinator: Coordinator | None,
        make_nonce: Callable[[], bytes],
        lender: Lender | None = None,
        saver: Saver | None = None,
        keeper: Keeper | None = None,
        max_connections: int | None = None,
        max_leased_bytes: int = MAX_LEASED_BYTES,
        lease_s: float = math.inf,
    ) -> None:
        """`lender`: hands shared memory to clients; None: there is none.
        `saver`, and where there is a coordinator `keeper`: None: this store can't write checkpoints.
        `max_connections`: that the driver takes; None: any number.
        `max_leased_bytes`: of values that one connection may read in shared memory at a time.
        `lease_s`: see StandbyList."""
        self.identity = identity
        self.shard = shard
        self.coordinator = coordinator
        self.tokens = identity.tokens
        self._proofs = ProofLimits()
        self.draining = False
        """Requests are refused with SHUTTING_DOWN."""
        self._make_nonce = make_nonce
        self._lender = lender
        self._saver = saver
        self._keeper = keeper
        self._connections: dict[int, Connection] = {}
        self.facts = ShardFacts(index=identity.shard, shard=shard, signer=signer, max_leased_bytes=max_leased_bytes)
        self.data = self.facts.data
        """Answers requests for data, of all connections."""
        self._strangers: dict[int, Connection] = {}
        """Connections that have not proved themselves, oldest first. Every turn looks at their times, and there may be
        thousands of other connections."""
        self._silent: dict[int, Connection] = {}
        """Visitors that had asked nothing when they were looked at last, oldest first."""
        self.host_counters: Callable[[], Mapping[str, int | float | str]] = dict
        """For STATS: what is known of the process and its machine, which is none of the protocol's business."""
        self._max_visitors = math.inf if max_connections is None else max_connections - max_connections // WORKERS_SHARE
        self._head_errors: dict[int, PsstoreError] = {}
        """Why the payload that a connection is sending now is discarded."""
        self._owed: dict[tuple[int, int], int] = {}
        """(connection, request) of an unanswered control request -> op of its reply."""
        self._due: tuple[float | None] | None = None
        """When time alone brings something to the coordinator; None: it has to be asked anew. Data goes past it."""
        self.standbys = StandbyList(self.facts, coordinator, lease_s=lease_s, lender=lender)
        """Who follows this shard."""
        self.standby: Standby | None = None
        """What this process is as long as it does not lead."""
        self.on_promoted: Callable[[], None] = lambda: None
        """Called when this standby is to lead, by the word of somebody who knows that its shard is dead."""
        self.on_reshard: Callable[[int], None] = _refuse_to_reshard
        """Called with the number of shards that the store is to go on with. Raises BadArgument."""
        self._reshard_asked: _ReshardAsked | None = None
        """Who has asked for that, until it has come to nothing: the store may be on its way without its connection."""
        self.standstill = Standstill(shard, self.data, coordinator)
        self._followed = 0
        """The connection to the shard that this is a standby of."""
        self._signer = signer
        self._clock_ahead_s = 0.0
        """By how much the coordinator's clock is ahead of the driver's: it goes on where a leader on another machine
        has left it."""

    # ---- connections ----

    def opened(self, conn: int, now: float, *, address: str = "") -> _core.ServerProtocol:
        """Where the connection's bytes go. `conn`: a number of the driver's, larger than all before it. `address`:
        where it comes from, without a port; '': wrong proofs from there are not counted."""
        protocol = self.data.connect(conn, max_body_bytes=_core.PRE_AUTH_MAX_BYTES, max_payload_bytes=0)
        connection = Connection(id=conn, opened_at=now, protocol=protocol, address=address)
        self._connections[conn] = self._strangers[conn] = connection
        return protocol

    def change_tokens(self, tokens: Tokens) -> list[Output]:
        """From now on these count. Who has proved one that does not any more has to go."""
        self.tokens = tokens
        outputs: list[Output] = []
        for connection in self._connections.values():
            is_open = connection.state is ConnectionState.OPEN and connection.token is not None
            if is_open and (connection.access, connection.token) not in tokens.grants:
                outputs += self.failed(connection.id, AuthFailed("the token that this client proved counts no longer"))
        return outputs

    def share_within(self, conn: int) -> OwnShard:
        """The connection's client is in this process, and uses the shard's device with it."""
        protocol = self._connections[conn].protocol
        protocol.is_in_process()
        return OwnShard(self.shard, protocol)

    def follow(
        self, conn: int, *, client: ClientIdentity, address: str, place: str = "", see: See | None = None
    ) -> tuple[_core.ServerProtocol, bytes]:
        """Makes this a standby of the shard at the other end of that connection, with what to send there first. From
        now on `frame` of that connection raises PsstoreError if it can't follow, and on others only operators are
        heard. `place`: where this one listens, if not where its shard does. `see`: None: it sees no memory of that
        shard's. REQUIRES: nothing has happened here yet."""
        self._followed = conn
        protocol = self.data.connect(conn, max_body_bytes=_core.PRE_AUTH_MAX_BYTES, max_payload_bytes=0)
        self.standby = Standby(
            identity=client,
            address=address,
            store=self.identity.store,
            shard=self.identity.shard,
            facts=self.facts,
            coordinator=self.coordinator,
            signer=self._signer,
            nonce=self._make_nonce(),
            protocol=protocol,
            place=place,
            see=see,
        )
        return protocol, self.standby.hello()

    def retire(self) -> bytes | None:
        """Never leads. What to tell the shard that this is a standby of, if that is to hear of it."""
        return None if self.standby is None else self.standby.retire()

    def lead(self, now: float) -> None:
        """The shard that this was a standby of is gone for good: this is it from now on. Raises BadArgument unless it
        may lead."""
        assert self.standby is not None, "it leads already"
        self.standby.check_may_lead(force=True)
        self.standbys.epoch = self.standby.epoch + 1
        self._clock_ahead_s = self.standby.clock_ahead_s
        self.standby = None
        self.data.forget(self._followed)
        self.shard.own_staged()  # else what the shard before had in memory would stay, all of it
        if self.coordinator is not None:
            self.coordinator.all_went(now + self._clock_ahead_s)

    @property
    def first_connection(self) -> int:
        """The smallest number that no connection of an earlier leader had."""
        return 1 + (self.standbys.epoch << 32)

    def drain(self) -> None:
        """Makes the service refuse every request from now on."""
        self.draining = True
        self.data.close()

    def closed(self, conn: int, now: float) -> None:
        """Forgets the connection. What it had staged stays: its client may come back."""
        connection = self._connections.pop(conn, None)
        if connection is not None:
            connection.end()
            if self._lender is not None:
                self._lender.withdraw(connection)
        self._strangers.pop(conn, None)
        self._silent.pop(conn, None)
        self._head_errors.pop(conn, None)
        self.data.forget(conn)
        self._owed = {key: op for key, op in self._owed.items() if key[0] != conn}
        self.standbys.went(conn)
        self._tell(r.ClientWent(conn, now))

    def dispensable(self, now: float) -> int | None:
        """The connection that makes room where there is none for another: the oldest stranger, or else the oldest
        visitor that has not asked anything; None: all are in use, or have only just come."""
        for connection in itertools.islice(self._strangers.values(), 1):
            if now - connection.opened_at >= STRANGER_S:
                return connection.id
        for connection in list(self._silent.values()):
            if not connection.protocol.has_asked:
                return connection.id if now - connection.opened_at >= VISITOR_S else None
            del self._silent[connection.id]
        return None

    def failed(self, conn: int, error: PsstoreError) -> list[Output]:
        """What ends a connection that can't go on: the error, and its close."""
        return [failure(conn, 0, error), Close(conn, error.message, error)]

    def peer(self, conn: int) -> str:
        """The other side of a connection, for logs."""
        connection = self._connections.get(conn)
        return connection.peer if connection else "a closed connection"

    # ---- events ----

    def frame(self, conn: int, frame: _core.Frame, now: float) -> list[Output]:
        """A frame that came out of the connection's port, whole or announced: what to send now, to anybody."""
        if self.standby is not None and conn == self._followed:
            return [Send(conn, [answer]) for answer in self.standby.heard(frame, now)] + self.woken(now)
        connection, op = self._connections.get(conn), frame.op
        if connection is None:
            return []  # closed by what came before in the same read
        try:
            if not frame.complete:
                return self._announced(connection, frame)
            if connection.state is not ConnectionState.OPEN:
                return self._handshake(connection, frame, now)
            if op == OPS["HEARTBEAT"]:
                check_may(connection.access, op)
                return self._heartbeat(conn, frame, now)
            outputs = self._dispatch(connection, op, frame, now)
        except ProtocolError as error:
            outputs = self.failed(conn, error)
        except (PsstoreError, MemoryError) as error:
            self._owed.pop((conn, frame.request), None)
            outputs = [failure(conn, frame.request, _refusal(error))]
        self.standstill.look(now)
        return outputs if op in CONTROL else outputs + self.woken(now)  # no read waits for the coordinator

    def tick(self, now: float) -> list[Output]:
        """What time alone brings: silent strangers, lost workers, ended waits."""
        outputs: list[Output] = []
        for connection in self._strangers.values():
            if now - connection.opened_at >= HANDSHAKE_S:
                outputs += self.failed(connection.id, HandshakeTimeout(f"no handshake within {HANDSHAKE_S:g} s"))
        if self.standby is not None:
            self.standby.look(now)
        if self.standstill.since is None:
            outputs += self._tell(r.TimePassed(now))
        return outputs + self.woken(now)

    def woken(self, now: float) -> list[Output]:
        """What requests for data have come to since, but for the replies that their own connections have: answers to
        reads that waited, and errors."""
        wake = self.data.next_wake()
        if wake is None or wake > now:
            return []
        delivered, failed = self.data.wake(now)
        return [
            *(Send(conn, pieces) for conn, pieces in delivered),
            *(failure(conn, request, error) for conn, request, error in failed),
        ]

    def next_wake(self) -> float | None:
        """When `tick` may next do something."""
        wake = _sooner(_sooner(self.data.next_wake(), self._coordinator_wake()), self.standbys.next_wake)
        if self.standby is not None:
            wake = _sooner(wake, self.standby.next_wake)
        oldest = next(iter(self._strangers.values()), None)
        return wake if oldest is None else _sooner(wake, oldest.opened_at + HANDSHAKE_S)

    def catch_up(self, now: float) -> list[Output]:
        """Applies what this process's own coordinator has decided. Call it after `frame` and `tick`, when their replies
        are sent, and before anything else is heard: a read here shows every decision that anybody was told of. Returns
        the replies to whoever waited for it. Raises DeviceFailed."""
        self.standbys.look(now)
        coordinator, version = self.coordinator, self.shard.version
        if coordinator is None or self.standby is not None or coordinator.rounds.log.last <= version:
            return []
        try:
            self.facts.catch_up(coordinator.rounds.log.made_since(version))
        except DeviceFailed:
            raise
        except PsstoreError:
            return []  # there is no room for what the decision asks for: who carries it is told
        due_before, fact = self._due, self.facts.applied()
        outputs = self._tell(r.ShardSaid(fact, now))
        if not fact.missing:
            self._keep_due(due_before, now)
        return outputs + self.woken(now)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing that `settle` could do."""
        return self.shard.settle(0)

    def settle(self) -> bool:
        """Does a little of the work that the last decision left over; True: nothing is left, or there is no memory for
        it, which who needs it is told. Raises DeviceFailed."""
        try:
            return self.facts.settle_some()
        except OutOfMemory:
            return True

    def _announced(self, connection: Connection, frame: _core.Frame) -> list[Output]:
        """A payload is about to come: after a decision that is new here, or in vain."""
        if not connection.may_write or frame.op not in WRITES:
            raise UnexpectedMessage(f"operation {frame.op} from {connection.peer} can't have a payload")
        if not self.draining:
            try:
                self._hear(connection, frame)
            except ProtocolError:
                raise
            except (PsstoreError, MemoryError) as error:
                self._head_errors[connection.id] = _refusal(error)
            else:
                return []
        connection.protocol.discard()
        return []

    # ---- handshake and liveness ----

    def _handshake(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        identity = self.identity
        try:
            challenge = connection.handshake(frame, self.tokens, self._make_nonce())
        except AuthFailed:
            if connection.address and frame.op == OPS["AUTH"]:
                self._proofs.failed(connection.address, connection.client, now)
            raise
        if challenge is not None and connection.address:
            wait_s = self._proofs.wait_s(connection.address, connection.client, now)
            if wait_s > 0.0:
                return self.failed(connection.id, _too_many_proofs(wait_s))
        if not connection.is_gated:
            connection.protocol.ungate()
        if challenge is not None:
            return [_answer(connection.id, frame, challenge, op=OPS["CHALLENGE"])]
        self._strangers.pop(connection.id, None)
        hello = connection.hello
        assert hello is not None, "handshake returns None only after HELLO"
        if connection.token is not None and connection.address:
            self._proofs.proved(connection.client)
        try:
            check_may_be(connection.access, hello.role)
        except NotAllowed as error:
            return self.failed(connection.id, error)
        if connection.access < Access.ADMIN:
            connection.protocol.allow(ALLOWED_OPS[connection.access])
        if not (connection.is_operator or connection.is_elector) and (why_not := self._why_not_served(connection)):
            return self.failed(connection.id, NotLeading(why_not))
        if connection.is_visitor:
            self._silent[connection.id] = connection
            if sum(one.is_visitor for one in self._connections.values()) > self._max_visitors:
                return self.failed(connection.id, _no_room_for_visitors(self._max_visitors))
        connection.protocol.set_limits(max_body_bytes=_core.MAX_BODY_BYTES, max_payload_bytes=_core.MAX_PAYLOAD_BYTES)
        older, newer = self._siblings(connection, hello)
        if newer:
            return [Close(connection.id, "its client has a newer connection")]
        if connection.has_data:
            connection.protocol.open(writer=connection.writer, wants_checksum=connection.wants_checksum)
        if connection.is_first:
            self._tell(r.ClientCame(connection.id, hello.client, now))
        welcome = m.Welcome(
            store=identity.store,
            shard=identity.shard,
            addresses=identity.addresses,
            num_workers=identity.consistency.num_workers,
            quorum=identity.consistency.quorum,
            staleness=identity.consistency.staleness,
            version=self.shard.version,
            last_sequence=self.shard.last_sequence(connection.writer),
            features=hello.features,
            proof=connection.own_proof(),
            heartbeat_s=identity.heartbeat_s,
            lineage=identity.lineage or identity.store,
            restored=identity.restored,
            fewest=identity.consistency.fewest,
            grace_s=identity.consistency.grace_s,
            refuse_norm=identity.consistency.refuse_norm,
            returns=identity.returns,
        )
        if connection.is_gated:
            connection.protocol.freeze_with_shard()
        closing = [Close(conn, "its client has a newer connection") for conn in older]
        return [*closing, _answer(connection.id, frame, welcome, op=OPS["WELCOME"])]

    def _why_not_served(self, connection: Connection) -> str | None:
        """What a client is told that came to a standby. None: this leads, and did when the connection was accepted."""
        if self.standby is not None:
            return self.standby.describe()
        if connection.id < self.first_connection:  # an answer may be owed to one of that number of the process before
            return f"this process has come to lead shard {self.identity.shard} since: connect again"
        return None

    def _siblings(self, connection: Connection, hello: m.Hello) -> tuple[list[int], list[int]]:
        """Open connections of the same client in the same role on the same channel, accepted before and after this one.

        Only the newest may speak: all that was unanswered is sent again on it, and what an older one still brings
        would come out of order, and take answers to where nobody listens.
        """
        others = [
            other.id
            for other in self._connections.values()
            if other is not connection and other.state is ConnectionState.OPEN and other.is_of(hello)
        ]
        return [conn for conn in others if conn < connection.id], [conn for conn in others if conn > connection.id]

    def _heartbeat(self, conn: int, frame: _core.Frame, now: float) -> list[Output]:
        client = self._connections[conn].client
        return self._tell(r.WorkerBeat(conn, client, frame.rank, frame.incarnation, now))

    # ---- requests ----

    def _dispatch(self, connection: Connection, op: int, frame: _core.Frame, now: float) -> list[Output]:
        if self.draining:
            raise ShuttingDown("the store is shutting down")
        check_may(connection.access, op)
        if connection.only_beats:
            raise UnexpectedMessage(f"operation {op} on a heartbeat connection; it is for heartbeats alone")
        if connection.is_operator:
            return self._operated(connection, frame, now)
        if connection.is_elector:
            return [_answer(connection.id, frame, self._word(frame))]
        if op in CARRIERS:
            return self._carried(connection, frame)
        if op in CONTROL:
            return self._control(connection, op, frame, now)
        if op == OPS["DEFINE"]:
            self.facts.define(m.decode_body(m.Define, frame.body).facts)
            return [_answer(connection.id, frame, None)]
        if op == OPS["ATTACH"]:
            self.facts.attach(connection, m.decode_body(m.Attach, frame.body).ticket)
            return [_answer(connection.id, frame, m.Attached(version=self.shard.version))]
        if op == OPS["ATTEST"]:
            attest = m.decode_body(m.Attest, frame.body) if frame.body else m.Attest()
            measured = self.facts.measure(connection, attest) if attest.round else None
            return [_answer(connection.id, frame, m.Attested(applied=self.facts.attest(), measured=measured))]
        if op == OPS["SHARE"]:
            asked = m.decode_body(m.Share, frame.body) if frame.body else m.Share()
            offer = m.Shared() if self._lender is None else self._lender.offer(connection, asked)
            return [_answer(connection.id, frame, offer)]
        if op in CHECKPOINTS:
            return [_answer(connection.id, frame, self._checkpoint(connection, frame))]
        if op in (OPS["FOLLOW"], OPS["COMPLETE"], OPS["RETIRE"]):
            return self._follows(connection, frame)
        if op == OPS["FREEZE"]:
            return [_answer(connection.id, frame, self._freeze(connection, frame, now))]
        if op == OPS["STATS"]:
            return [_answer(connection.id, frame, self._statistics(frame, now))]
        raise UnexpectedMessage(f"operation {op} is not a request")

    def _checkpoint(self, connection: Connection, frame: _core.Frame) -> m.Message:
        if frame.op == OPS["SAVE"] and self._saver is not None:
            fact = self.facts.may_save(m.decode_body(m.Save, frame.body))
            if self._keeper is not None:
                self._keeper.led(fact.attempt)
            record = self._saver.save(fact, self.facts.tensors)
            return m.Saved(saved=None if record is None else self.facts.has_saved(fact.attempt, record))
        if frame.op == OPS["BEGIN"] and self._keeper is not None:
            return self._keeper.begin(m.decode_body(m.Begin, frame.body), at_any_place=connection.is_resharder)
        if frame.op == OPS["KEEP"] and self._keeper is not None:
            return self._keeper.keep(m.decode_body(m.Keep, frame.body))
        raise BadArgument(
            f"shard {self.identity.shard} of this store writes no checkpoint: it lives inside a program, or another"
            " shard is to be asked; psstore-server's stores write them"
        )

    def _follows(self, connection: Connection, frame: _core.Frame) -> list[Output]:
        if frame.op == OPS["COMPLETE"]:
            self.standbys.complete(connection.id)
            return []
        if frame.op == OPS["RETIRE"]:
            self.standbys.retired(connection.id)
            return [Close(connection.id, "the standby is told to end")]
        fact = self.facts.may_follow(connection, m.decode_body(m.Follow, frame.body))
        self.standbys.came(connection, fact.client, place=fact.place)
        return [_answer(connection.id, frame, None)]

    def _freeze(self, connection: Connection, frame: _core.Frame, now: float) -> m.Frozen:
        if not connection.is_resharder:
            raise UnexpectedMessage(f"FREEZE from {connection.peer}, which has not connected as a resharder")
        asked = m.decode_body(m.Freeze, frame.body)
        return m.Frozen(done=self.standstill.ask(connection.client, gather_s=asked.gather_s, now=now))

    def _operated(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        """A request of somebody who sees to the store's processes."""
        if frame.op == OPS["STATS"]:
            return [_answer(connection.id, frame, self._statistics(frame, now))]
        if frame.op == OPS["RESHARD"]:
            self._reshard(connection, frame)
            return []
        if frame.op != OPS["PROMOTE"]:
            raise UnexpectedMessage(
                f"operation {frame.op} of an operator, who can ask for STATS, PROMOTE and RESHARD only"
            )
        asked = m.decode_body(m.Promote, frame.body)
        if self.standby is None:
            for client in self.standbys.lost:
                self.standbys.on_retired(client)
                self.standbys.done_without(client)
        else:
            self.standby.check_may_lead(force=asked.force)
            self.on_promoted()
        return [_answer(connection.id, frame, None)]

    def _reshard(self, connection: Connection, frame: _core.Frame) -> None:
        if self.coordinator is None or self.standby is not None:
            raise UnexpectedMessage(f"RESHARD is for shard 0 where it leads; this is {self.identity.shard}")
        asked, client = self._reshard_asked, connection.client
        if asked is None:
            self.on_reshard(m.decode_body(m.Reshard, frame.body).shards)
        elif asked.client != client:  # that one's may be gone, and the store on its way all the same
            raise Overloaded("somebody else has asked for another number of shards already; ask again in a while")
        self._reshard_asked = _ReshardAsked(client, connection.id, frame.request)

    def not_resharded(self, why: str, now: float) -> list[Output]:
        """The store goes on with the shards that it has. Who wanted others is told why, and whoever was not heard has
        to say again what it said, on another connection."""
        asked, self._reshard_asked = self._reshard_asked, None
        outputs: list[Output] = [] if asked is None else [failure(asked.conn, asked.request, BadArgument(why))]
        if self.standstill.since is not None:
            self._clock_ahead_s -= now - self.standstill.since  # nobody could be heard, and so nobody is late
            unheard = [conn for conn, connection in self._connections.items() if connection.is_gated]
            outputs += [Close(conn, "the shard stood still, and goes on") for conn in unheard]
        self.standstill.end()
        return outputs

    def _word(self, frame: _core.Frame) -> m.Word:
        """What is said of another shard's standby."""
        if frame.op != OPS["ASK_WORD"]:
            raise UnexpectedMessage(f"operation {frame.op} of an elector, who can ask for words only")
        asked, words = m.decode_body(m.AskWord, frame.body), self.facts.words
        if self.standby is not None:
            may_lead = self.standby.may_lead and self.standby.is_cut
            return m.Word(gone=words.gone, standby=self.standby.client, may_lead=may_lead)
        leads = self.facts.give_word(asked.client, leads=asked.leads) if asked.client else None
        return m.Word(leads=leads, gone=words.gone)

    def _carried(self, connection: Connection, frame: _core.Frame) -> list[Output]:
        """A request for data brings a decision that is new here."""
        error = self._head_errors.pop(connection.id, None)
        if error is not None:
            raise error
        self._hear(connection, frame)
        return []

    def _hear(self, connection: Connection, frame: _core.Frame) -> None:
        self.facts.hear(m.decode_body(m.Carry, frame.carry))
        connection.protocol.again(frame)

    def _control(self, connection: Connection, op: int, frame: _core.Frame, now: float) -> list[Output]:
        due_before = self._due
        if self.coordinator is None:
            raise UnexpectedMessage(f"operation {op} is the coordinator's; ask shard 0, this is {self.identity.shard}")
        if not connection.is_first:
            raise UnexpectedMessage(f"operation {op} is the coordinator's; ask it on the client's channel 0")
        asked = conn, request = connection.id, frame.request
        self._owed[asked] = op + 1
        outputs = self._tell(r.ClientAsked(conn, request, op, frame.body, connection.client, now))
        if asked not in self._owed:
            self._keep_due(due_before, now)
        return outputs

    def _keep_due(self, before: tuple[float | None] | None, now: float) -> None:
        """The coordinator was told what makes nobody wait: a request that was answered, a decision that a shard has
        applied. Who has just spoken is not lost within `silence_s`: what was due before is so still, at the latest."""
        wake = None if before is None else before[0]
        if wake is not None and self.coordinator is not None:
            is_soon = wake <= now + self._clock_ahead_s + self.coordinator.membership.liveness.silence_s
            self._due = before if is_soon else None

    def _send_replies(self, replies: Sequence[Reply]) -> list[Output]:
        """Replies to connections that are gone are dropped: whoever comes back asks again."""
        outputs: list[Output] = []
        for reply in replies:
            op = self._owed.pop((reply.conn, reply.request), None)
            if op is None:
                continue
            if isinstance(reply.result, PsstoreError):
                outputs.append(failure(reply.conn, reply.request, reply.result))
                continue
            body = m.encode_body(reply.result) if reply.result is not None else b""
            if len(body) > _core.MAX_BODY_BYTES:
                outputs.append(failure(reply.conn, reply.request, _too_large(body)))
            else:
                outputs.append(Send(reply.conn, [_core.encode_frame(op, request=reply.request, body=body)]))
        return outputs

    def _tell(self, told: Told) -> list[Output]:
        """Tells the coordinator, if it is here, and its standbys."""
        if self.coordinator is None or self.standby is not None:
            return []
        if self._clock_ahead_s or self.standstill.since is not None:
            told = replace(told, now=self._coordinators_time(told.now))
        self._due = None
        if self.data.is_followed and not (isinstance(told, r.ClientAsked) and told.op in CHANGES_NOTHING):
            for body in r.bodies_of(told):
                self.data.record(body)
        return self._send_replies(feed(self.coordinator, told))

    def _coordinators_time(self, now: float) -> float:
        """Its clock goes on where that of the process went which led before, and stands still with the shard."""
        since = self.standstill.since
        return (now if since is None else since) + self._clock_ahead_s

    def _coordinator_wake(self) -> float | None:
        if self.coordinator is None or self.standby is not None or self.standstill.since is not None:
            return None
        if self._due is None:
            self._due = (self.coordinator.next_wake(),)
        wake = self._due[0]
        if wake is None or not self._clock_ahead_s:
            return wake
        return wake - self._clock_ahead_s + CLOCK_GRAIN_S

    def _statistics(self, frame: _core.Frame, now: float) -> m.Statistics:
        asked = m.decode_body(m.Stats, frame.body) if frame.body else m.Stats()
        return m.Statistics(counters=self.counters(now), padding=asked.padding)

    def counters(self, now: float) -> dict[str, int | float | str]:
        """Everything STATS tells."""
        counters: dict[str, int | float | str] = {
            "shard": self.identity.shard,
            "version": self.shard.version,
            "connections": len(self._connections),
            "requests_waiting": len(self._owed),
            "process": self.identity.process,
            "leads": int(self.standby is None),
            "may_lead": int(self.standby is None or self.standby.may_lead),
            **self.standbys.counters(),
            **self.shard.stats(),
            **table_counters(self.facts.tensors, self.shard),
            **traffic_counters(self.data.traffic(now)),
            **self.host_counters(),
        }
        if self.coordinator is not None:
            counters.update(self.coordinator.counters(self._coordinators_time(now)))
        if self._keeper is not None:
            counters.update(self._keeper.counters())
        return counters


def _refuse_to_reshard(shards: int) -> None:
    raise BadArgument(
        f"this store can't go on with {shards} shards while it runs: they live inside a program, or on hosts of their"
        " own. End it and start it with so many and --restore auto: a checkpoint fits any number"
    )


def _no_room_for_visitors(limit: float) -> Overloaded:
    return Overloaded(
        f"this shard has all the {limit:g} connections that it takes of clients that are no workers;"
        " raise its --max-connections"
    )


def _too_many_proofs(wait_s: float) -> TooManyProofs:
    return TooManyProofs(
        f"too many wrong proofs of a token came from this address: none is heard from there for {wait_s:.1f} s",
        wait_s=wait_s,
    )


def _sooner(one: float | None, other: float | None) -> float | None:
    """The earlier of two times, of which None is never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _refusal(error: PsstoreError | MemoryError) -> PsstoreError:
    """What a request is answered with that the shard can't serve."""
    if isinstance(error, MemoryError):
        return OutOfMemory("the shard's process got no memory from its system for this; ask for less at a time")
    return error


def _too_large(body: bytes) -> PsstoreError:
    return BadArgument(
        f"the reply is {len(body)} bytes, and one holds {_core.MAX_BODY_BYTES}; ask for fewer tensors at a time"
    )


def _answer(conn: int, frame: _core.Frame, body: m.Message | None, *, op: int | None = None) -> Send:
    """The reply to a request: the next op number, unless the handshake says otherwise."""
    encoded = m.encode_body(body) if body is not None else b""
    return Send(conn, [_core.encode_frame(op if op is not None else frame.op + 1, request=frame.request, body=encoded)])
