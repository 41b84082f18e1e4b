"""How a client comes in: the handshake, from its HELLO to the shard's WELCOME."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psstore import _core
from psstore.errors import AuthFailed, NotAllowed, NotLeading, Overloaded, TooManyProofs
from psstore.protocol.connection import Connection
from psstore.protocol.connections import Connections
from psstore.protocol.coordinator_host import CoordinatorHost
from psstore.protocol.frames import Close, Output, answer, ended_by
from psstore.protocol.leadership import Leadership
from psstore.protocol.proof_limits import ProofLimits
from psstore.protocol.roles import ALLOWED_OPS, NO_TOKENS, Access, Tokens, check_may_be
from psstore.types import Consistency
from psstore.wire import messages as m
from psstore.wire import records as r

OPS = _core.OPS


@dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """What a shard says of itself at WELCOME."""

    store: str
    shard: int
    addresses: tuple[tuple[str, ...], ...]
    consistency: Consistency
    heartbeat_s: float
    tokens: Tokens = NO_TOKENS
    """As the store begins; `Welcoming.tokens` are those that count now."""
    lineage: str = ""
    """Id of the first of the runs of which each was restored from the one before; '': this is the first."""
    restored: int = -1
    """The decision that this run was restored at; -1: it began with nothing."""
    returns: bool = False
    """The store starts again by itself when a shard dies."""
    process: int = 0
    """Id of the process that it is, on its host; for people."""


class Welcoming:
    """Takes one shard's connections through their handshakes."""

    def __init__(
        self,
        identity: ShardIdentity,
        shard: _core.Shard,
        *,
        make_nonce: Callable[[], bytes],
        connections: Connections,
        leadership: Leadership,
        host: CoordinatorHost,
    ) -> None:
        self.identity = identity
        self.tokens = identity.tokens
        self._shard = shard
        self._make_nonce = make_nonce
        self._connections = connections
        self._leadership = leadership
        self._host = host
        self._proofs = ProofLimits()

    def heard(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        """A frame of a connection that is not open. Raises ProtocolError."""
        try:
            challenge = connection.handshake(frame, self.tokens, self._make_nonce())
        except AuthFailed:
            if connection.address and frame.op == OPS["AUTH"]:
                self._proofs.failed(connection.address, connection.client, now)
            raise
        if challenge is not None and connection.address:
            wait_s = self._proofs.wait_s(connection.address, connection.client, now)
            if wait_s > 0.0:
                return ended_by(connection.id, _too_many_proofs(wait_s))
        if not connection.is_gated:
            connection.protocol.ungate()
        if challenge is not None:
            return [answer(connection.id, frame, challenge, op=OPS["CHALLENGE"])]
        self._connections.proved(connection)
        if connection.token is not None and connection.address:
            self._proofs.proved(connection.client)
        return self._proved(connection, frame, now)

    def _proved(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        hello = connection.hello
        assert hello is not None, "handshake returns None only after HELLO"
        try:
            check_may_be(connection.access, hello.role)
        except NotAllowed as error:
            return ended_by(connection.id, error)
        if connection.access < Access.ADMIN:
            connection.protocol.allow(ALLOWED_OPS[connection.access])
        sees_to_processes = connection.is_operator or connection.is_elector
        if not sees_to_processes and (why_not := self._leadership.why_not_served(connection)):
            return ended_by(connection.id, NotLeading(why_not))
        if connection.is_visitor and not self._connections.takes_visitor(connection):
            return ended_by(connection.id, _no_room_for_visitors(self._connections.max_visitors))
        connection.protocol.set_limits(max_body_bytes=_core.MAX_BODY_BYTES, max_payload_bytes=_core.MAX_PAYLOAD_BYTES)
        older, newer = self._connections.siblings(connection, hello)
        if newer:
            return [Close(connection.id, "its client has a newer connection")]
        if connection.has_data:
            connection.protocol.open(writer=connection.writer, wants_checksum=connection.wants_checksum)
        if connection.is_first:
            self._host.tell(r.ClientCame(connection.id, hello.client, now))
        welcome = self._welcome(connection, hello)
        if connection.is_gated:
            connection.protocol.freeze_with_shard()
        closing = [Close(conn, "its client has a newer connection") for conn in older]
        return [*closing, answer(connection.id, frame, welcome, op=OPS["WELCOME"])]

    def _welcome(self, connection: Connection, hello: m.Hello) -> m.Welcome:
        identity = self.identity
        return m.Welcome(
            store=identity.store,
            shard=identity.shard,
            addresses=identity.addresses,
            num_workers=identity.consistency.num_workers,
            quorum=identity.consistency.quorum,
            staleness=identity.consistency.staleness,
            version=self._shard.version,
            last_sequence=self._shard.last_sequence(connection.writer),
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
