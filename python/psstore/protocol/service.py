"""What one shard process does with frames: which part of it answers which request.

The driver feeds a connection's bytes to its protocol, sends the replies that it finds there, then what `woken` returns,
calls `frame` with each frame that comes out, `tick` when `next_wake` is reached, and carries the outputs out. One
request's error never harms another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from psstore import _core
from psstore.errors import (
    AuthFailed,
    BadArgument,
    DeviceFailed,
    OutOfMemory,
    ProtocolError,
    PsstoreError,
    ShuttingDown,
    UnexpectedMessage,
)
from psstore.protocol.connection import Connection
from psstore.protocol.connections import Connections
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.coordinator_feed import CONTROL
from psstore.protocol.coordinator_host import CoordinatorHost
from psstore.protocol.frames import Close, Output, Send, answer, ended_by, failure
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.leadership import Leadership
from psstore.protocol.reshard_request import ReshardRequest
from psstore.protocol.roles import Tokens, check_may
from psstore.protocol.saving import Keeper, Saver
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.sharing import MAX_LEASED_BYTES, Lender, OwnShard, See
from psstore.protocol.signing import Signer
from psstore.protocol.standstill import Standstill
from psstore.protocol.states import ConnectionState
from psstore.protocol.table_counters import table_counters
from psstore.protocol.traffic_counters import traffic_counters
from psstore.protocol.welcoming import ShardIdentity, Welcoming
from psstore.wire import messages as m
from psstore.wire import records as r

OPS = _core.OPS
CARRIERS = frozenset((OPS["PUSH"], OPS["PULL"], OPS["NORM"], OPS["PULL_ROWS"], OPS["LIST_ROWS"]))
"""Requests for data that bring decisions. They come here if one is new, and go back to their connection's protocol."""

WRITES = frozenset((OPS["PUSH"], OPS["ASSIGN"], OPS["ADD"], OPS["INIT"], OPS["RESTORE"]))
"""Requests with a payload."""

CHECKPOINTS = frozenset((OPS["SAVE"], OPS["BEGIN"], OPS["KEEP"]))
"""Requests of whoever leads the writing of a checkpoint (saving.py)."""


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
        self.draining = False
        """Requests are refused with SHUTTING_DOWN."""
        self.facts = facts = ShardFacts(
            index=identity.shard, shard=shard, signer=signer, max_leased_bytes=max_leased_bytes
        )
        self.data = facts.data
        """Answers requests for data, of all connections."""
        self.standstill = Standstill(shard, self.data, coordinator)
        self.leadership = Leadership(
            facts, coordinator, signer, store=identity.store, shard=identity.shard, lender=lender, lease_s=lease_s
        )
        self.host_counters: Callable[[], Mapping[str, int | float | str]] = dict
        """For STATS: what is known of the process and its machine, which is none of the protocol's business."""
        self.reshard_request = ReshardRequest()
        self._make_nonce = make_nonce
        self._lender = lender
        self._saver = saver
        self._keeper = keeper
        self._head_errors: dict[int, PsstoreError] = {}
        """Why the payload that a connection is sending now is discarded."""
        self._connections = Connections(max_connections)
        self._host = CoordinatorHost(
            coordinator, self.data, shard=identity.shard, leadership=self.leadership, standstill=self.standstill
        )
        self.welcoming = Welcoming(
            identity,
            shard,
            make_nonce=make_nonce,
            connections=self._connections,
            leadership=self.leadership,
            host=self._host,
        )

    # ---- connections ----

    def opened(self, conn: int, now: float, *, address: str = "") -> _core.ServerProtocol:
        """Where the connection's bytes go. `conn`: a number of the driver's, larger than all before it. `address`:
        where it comes from, without a port; '': wrong proofs from there are not counted."""
        protocol = self.data.connect(conn, max_body_bytes=_core.PRE_AUTH_MAX_BYTES, max_payload_bytes=0)
        connection = Connection(id=conn, opened_at=now, protocol=protocol, address=address)
        self._connections.opened(connection)
        return protocol

    def change_tokens(self, tokens: Tokens) -> list[Output]:
        """From now on these count. Who has proved one that does not any more has to go."""
        self.welcoming.tokens = tokens
        outputs: list[Output] = []
        for connection in self._connections.of.values():
            is_open = connection.state is ConnectionState.OPEN and connection.token is not None
            if is_open and (connection.access, connection.token) not in tokens.grants:
                outputs += self.failed(connection.id, AuthFailed("the token that this client proved counts no longer"))
        return outputs

    def share_within(self, conn: int) -> OwnShard:
        """The connection's client is in this process, and uses the shard's device with it."""
        protocol = self._connections.of[conn].protocol
        protocol.is_in_process()
        return OwnShard(self.shard, protocol)

    def follow(
        self, conn: int, *, client: ClientIdentity, address: str, place: str = "", see: See | None = None
    ) -> tuple[_core.ServerProtocol, bytes]:
        """Makes this a standby of the shard at the other end of that connection, with what to send there first. From
        now on `frame` of that connection raises PsstoreError if it can't follow, and on others only operators are
        heard. `place`: where this one listens, if not where its shard does. `see`: None: it sees no memory of that
        shard's. REQUIRES: nothing has happened here yet."""
        protocol = self.data.connect(conn, max_body_bytes=_core.PRE_AUTH_MAX_BYTES, max_payload_bytes=0)
        hello = self.leadership.follow(
            conn, client=client, address=address, protocol=protocol, nonce=self._make_nonce(), place=place, see=see
        )
        return protocol, hello

    def lead(self, now: float) -> None:
        """The shard that this was a standby of is gone for good: this is it from now on. Raises BadArgument unless it
        may lead."""
        self._host.lead(now, clock_ahead_s=self.leadership.lead())

    def drain(self) -> None:
        """Makes the service refuse every request from now on."""
        self.draining = True
        self.data.close()

    def closed(self, conn: int, now: float) -> None:
        """Forgets the connection. What it had staged stays: its client may come back."""
        connection = self._connections.closed(conn)
        if connection is not None and self._lender is not None:
            self._lender.withdraw(connection)
        self._head_errors.pop(conn, None)
        self.data.forget(conn)
        self.leadership.standbys.went(conn)
        self._host.closed(conn, now)

    def dispensable(self, now: float) -> int | None:
        """The connection that makes room where there is none for another; None: there is none such."""
        return self._connections.dispensable(now)

    def failed(self, conn: int, error: PsstoreError) -> list[Output]:
        """What ends a connection that can't go on: the error, and its close."""
        return ended_by(conn, error)

    def peer(self, conn: int) -> str:
        """The other side of a connection, for logs."""
        connection = self._connections.of.get(conn)
        return connection.peer if connection else "a closed connection"

    # ---- events ----

    def frame(self, conn: int, frame: _core.Frame, now: float) -> list[Output]:
        """A frame that came out of the connection's port, whole or announced: what to send now, to anybody."""
        standby = self.leadership.standby
        if standby is not None and self.leadership.is_from_leader(conn):
            return [Send(conn, [said]) for said in standby.heard(frame, now)] + self.woken(now)
        connection, op = self._connections.of.get(conn), frame.op
        if connection is None:
            return []  # closed by what came before in the same read
        try:
            if not frame.complete:
                return self._announced(connection, frame)
            if connection.state is not ConnectionState.OPEN:
                return self.welcoming.heard(connection, frame, now)
            if op == OPS["HEARTBEAT"]:
                check_may(connection.access, op)
                return self._host.tell(r.WorkerBeat(conn, connection.client, frame.rank, frame.incarnation, now))
            outputs = self._dispatch(connection, op, frame, now)
        except ProtocolError as error:
            outputs = self.failed(conn, error)
        except (PsstoreError, MemoryError) as error:
            self._host.refused(conn, frame.request)
            outputs = [failure(conn, frame.request, _refusal(error))]
        self.standstill.look(now)
        return outputs if op in CONTROL else outputs + self.woken(now)  # no read waits for the coordinator

    def tick(self, now: float) -> list[Output]:
        """What time alone brings: silent strangers, lost workers, ended waits."""
        outputs = self._connections.overdue(now)
        self.leadership.look(now)
        if self.standstill.since is None:
            outputs += self._host.tell(r.TimePassed(now))
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
        first = None
        for part in (self.data, self._host, self.leadership, self._connections):
            wake = part.next_wake()
            if wake is not None and (first is None or wake < first):
                first = wake
        return first

    def catch_up(self, now: float) -> list[Output]:
        """Applies what this process's own coordinator has decided. Call it after `frame` and `tick`, when their replies
        are sent, and before anything else is heard: a read here shows every decision that anybody was told of. Returns
        the replies to whoever waited for it. Raises DeviceFailed."""
        self.leadership.standbys.look(now)
        coordinator, version = self.coordinator, self.shard.version
        if coordinator is None or self.leadership.standby is not None or coordinator.rounds.log.last <= version:
            return []
        try:
            self.facts.catch_up(coordinator.rounds.log.made_since(version))
        except DeviceFailed:
            raise
        except PsstoreError:
            return []  # there is no room for what the decision asks for: who carries it is told
        return self._host.shard_said(self.facts.applied(), now) + self.woken(now)

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
            return [answer(connection.id, frame, self.leadership.word(frame))]
        if op in CARRIERS:
            return self._carried(connection, frame)
        if op in CONTROL:
            return self._host.ask(connection, op, frame, now)
        if op == OPS["DEFINE"]:
            self.facts.define(m.decode_body(m.Define, frame.body).facts)
            return [answer(connection.id, frame, None)]
        if op == OPS["ATTACH"]:
            self.facts.attach(connection, m.decode_body(m.Attach, frame.body).ticket)
            return [answer(connection.id, frame, m.Attached(version=self.shard.version))]
        if op == OPS["ATTEST"]:
            attest = m.decode_body(m.Attest, frame.body) if frame.body else m.Attest()
            measured = self.facts.measure(connection, attest) if attest.round else None
            return [answer(connection.id, frame, m.Attested(applied=self.facts.attest(), measured=measured))]
        if op == OPS["SHARE"]:
            asked = m.decode_body(m.Share, frame.body) if frame.body else m.Share()
            offer = m.Shared() if self._lender is None else self._lender.offer(connection, asked)
            return [answer(connection.id, frame, offer)]
        if op in CHECKPOINTS:
            return [answer(connection.id, frame, self._checkpoint(connection, frame))]
        if op in (OPS["FOLLOW"], OPS["COMPLETE"], OPS["RETIRE"]):
            return self._follows(connection, frame)
        if op == OPS["FREEZE"]:
            return [answer(connection.id, frame, self._freeze(connection, frame, now))]
        if op == OPS["STATS"]:
            return [answer(connection.id, frame, self._statistics(connection, frame, now))]
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
            self.leadership.standbys.complete(connection.id)
            return []
        if frame.op == OPS["RETIRE"]:
            self.leadership.standbys.retired(connection.id)
            return [Close(connection.id, "the standby is told to end")]
        self.leadership.followed_by(connection, m.decode_body(m.Follow, frame.body))
        return [answer(connection.id, frame, None)]

    def _freeze(self, connection: Connection, frame: _core.Frame, now: float) -> m.Frozen:
        if not connection.is_resharder:
            raise UnexpectedMessage(f"FREEZE from {connection.peer}, which has not connected as a resharder")
        asked = m.decode_body(m.Freeze, frame.body)
        return m.Frozen(done=self.standstill.ask(connection.client, gather_s=asked.gather_s, now=now))

    def _operated(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        """A request of somebody who sees to the store's processes."""
        if frame.op == OPS["STATS"]:
            return [answer(connection.id, frame, self._statistics(connection, frame, now))]
        if frame.op == OPS["RESHARD"]:
            if self.coordinator is None or self.leadership.standby is not None:
                raise UnexpectedMessage(f"RESHARD is for shard 0 where it leads; this is {self.identity.shard}")
            self.reshard_request.ask(connection, frame)
            return []
        if frame.op != OPS["PROMOTE"]:
            raise UnexpectedMessage(
                f"operation {frame.op} of an operator, who can ask for STATS, PROMOTE and RESHARD only"
            )
        self.leadership.promote(m.decode_body(m.Promote, frame.body))
        return [answer(connection.id, frame, None)]

    def not_resharded(self, why: str, now: float) -> list[Output]:
        """The store goes on with the shards that it has. Who wanted others is told why, and whoever was not heard has
        to say again what it said, on another connection."""
        outputs = self.reshard_request.came_to_nothing(why)
        if self.standstill.since is not None:
            self._host.goes_on(now)
            unheard = [conn for conn, connection in self._connections.of.items() if connection.is_gated]
            outputs += [Close(conn, "the shard stood still, and goes on") for conn in unheard]
        self.standstill.end()
        return outputs

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

    def _statistics(self, connection: Connection, frame: _core.Frame, now: float) -> m.Statistics:
        asked = m.decode_body(m.Stats, frame.body) if frame.body else m.Stats()
        return m.Statistics(counters=self.counters(now, client=connection.client), padding=asked.padding)

    def counters(self, now: float, *, client: str = "") -> dict[str, int | float | str]:
        """Everything STATS tells this client."""
        counters: dict[str, int | float | str] = {
            "shard": self.identity.shard,
            "version": self.shard.version,
            "connections": len(self._connections.of),
            "requests_waiting": self._host.num_owed,
            "process": self.identity.process,
            **self.leadership.counters(),
            **self.shard.stats(),
            **table_counters(self.facts.tensors, self.shard),
            **traffic_counters(self.data.traffic(now)),
            **self.host_counters(),
            **self._host.counters(now, client=client),
        }
        if self._keeper is not None:
            counters.update(self._keeper.counters())
        return counters


def _refusal(error: PsstoreError | MemoryError) -> PsstoreError:
    """What a request is answered with that the shard can't serve."""
    if isinstance(error, MemoryError):
        return OutOfMemory("the shard's process got no memory from its system for this; ask for less at a time")
    return error
