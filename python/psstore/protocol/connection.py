"""The server's side of one connection: the handshake, and what the connection has proved about itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from psstore import _core
from psstore.config import MAX_CONNECTIONS
from psstore.errors import AuthFailed, BadBody, UnexpectedMessage
from psstore.protocol.auth import NONCE_BYTES, proof
from psstore.protocol.roles import Access, Tokens
from psstore.protocol.states import CONNECTION, ConnectionEvent, ConnectionState
from psstore.wire.messages import Auth, Challenge, Hello, TicketFact, decode_body

HANDSHAKE_S = 10.0
"""A connection that has not proved itself by then is closed: it holds a file descriptor and says nothing."""

STRANGER_S, VISITOR_S = 1.0, 10.0
"""Where there is no room for another connection, one makes room that has not proved itself, or has proved itself and
asked nothing, for so long: a handshake takes milliseconds, and a client has a reason to connect."""

WORKERS_SHARE = 8
"""One in so many connections is kept for workers: readers, however many there are, end no training."""

FEATURE_CHECKSUM = 1
"""HELLO feature bit: payloads on this connection carry a CRC-32C, in both directions. TCP's 16-bit sum lets
errors through at rates seen in the field (Stone & Partridge 2000, "When the CRC and TCP checksum disagree")."""

_CLIENT_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(kw_only=True)
class Connection:
    """State of one accepted connection."""

    id: int
    opened_at: float
    protocol: _core.ServerProtocol
    """The decoder and encoder of this connection's bytes."""
    address: str = ""
    """Where it comes from, without a port; '': wrong proofs are not counted."""
    state: ConnectionState = ConnectionState.HELLO
    hello: Hello | None = None
    client: str = ""
    """Who is at the other end, once it has said HELLO."""
    is_first: bool = False
    """True if the client speaks to the coordinator over this connection: channel 0, no heartbeats, no standby."""
    only_beats: bool = False
    """True for a worker's heartbeat connection, which the native thread writes to."""
    is_operator: bool = False
    """True for a connection that only asks how the process is, and says which one is dead."""
    is_elector: bool = False
    """True for a connection that asks for this shard's word on another one's standby."""
    is_resharder: bool = False
    """True for a connection of who writes the store down to have it go on with another number of shards."""
    has_data: bool = False
    """True if requests for data may come, or what is sent to a standby goes there."""
    nonce: bytes = b""
    access: Access = Access.ADMIN
    """What its client may do, once it is OPEN."""
    token: bytes | None = None
    """The one that was proved; None: none was needed."""
    ticket: TicketFact | None = None
    """The worker that the connection pushes for, once attached."""

    num_arenas: int = 0
    """Ranges of memory that its client was given to push through."""

    @property
    def writer(self) -> str:
        """Who numbers the plain writes of this connection: each of a client's channels does so for itself."""
        return f"{self.client}.{self.hello.channel}" if self.hello and self.hello.channel else self.client

    @property
    def wants_checksum(self) -> bool:
        return self.hello is not None and bool(self.hello.features & FEATURE_CHECKSUM)

    @property
    def is_gated(self) -> bool:
        """False if what it is told need not wait for standbys, nor what it says for the end of a standstill: who sees
        to these is at the other end."""
        return self.hello is None or self.hello.role not in ("standby", "operator", "resharder")

    @property
    def may_write(self) -> bool:
        """Whether its requests for data may have a payload: those of others are nobody's to answer."""
        is_open = self.state is ConnectionState.OPEN
        return is_open and self.has_data and self.hello is not None and self.hello.role != "standby"

    @property
    def is_visitor(self) -> bool:
        """True if the connection is OPEN and its client is no worker."""
        return self.state is ConnectionState.OPEN and self.hello is not None and self.hello.role == "client"

    @property
    def peer(self) -> str:
        """The other side, for messages: its rank, or the beginning of its client id."""
        if self.ticket:
            return f"rank {self.ticket.rank}"
        return f"client {self.client[:8]}" if self.client else "a client before its HELLO"

    def is_of(self, hello: Hello) -> bool:
        """True if this connection's client, role and channel are those of `hello`."""
        mine = self.hello
        return mine is not None and (mine.client, mine.role, mine.channel) == (hello.client, hello.role, hello.channel)

    def end(self) -> None:
        """The driver has closed the connection."""
        self.state = CONNECTION.after(self.state, ConnectionEvent.ENDED)

    def handshake(self, frame: _core.Frame, tokens: Tokens, nonce: bytes) -> Challenge | None:
        """Takes one handshake frame. Returns a challenge to send, or None: the connection is open.

        `nonce`: fresh random bytes, used if a challenge is needed.
        """
        if self.state is ConnectionState.HELLO and frame.op == _core.OPS["HELLO"]:
            hello = decode_body(Hello, frame.body)
            if not _CLIENT_ID.fullmatch(hello.client):  # before it is in a line of a log
                raise BadBody("HELLO: client must be 32 hex digits, random per client")
            self.hello = hello
            self.client, self.only_beats = hello.client, hello.role == "heartbeat"
            self.is_operator, self.is_elector = hello.role == "operator", hello.role == "elector"
            self.is_resharder = hello.role == "resharder"
            self.has_data = hello.role in ("worker", "client", "standby", "resharder")
            self.is_first = hello.channel == 0 and hello.role in ("worker", "client", "resharder")
            if not 0 <= self.hello.channel < MAX_CONNECTIONS:
                raise BadBody(f"HELLO: channel is {self.hello.channel}; there are 0 to {MAX_CONNECTIONS - 1}")
            if not tokens.grants:
                self.state = CONNECTION.after(self.state, ConnectionEvent.ADMITTED)
                return None
            if len(self.hello.nonce) < NONCE_BYTES // 2:
                raise AuthFailed("this store needs a token: connect with token= or PSSTORE_TOKEN_FILE")
            self.state = CONNECTION.after(self.state, ConnectionEvent.CHALLENGED)
            self.nonce = nonce
            return Challenge(nonce=nonce)
        if self.state is ConnectionState.AUTH and frame.op == _core.OPS["AUTH"]:
            came = decode_body(Auth, frame.body).proof
            proved = tokens.proved(lambda token: self._proof(token, "client"), came)
            if proved is None:
                raise AuthFailed("the token proof is wrong: client and store have different tokens")
            self.access, self.token = proved
            self.state = CONNECTION.after(self.state, ConnectionEvent.PROVED)
            return None
        raise UnexpectedMessage(f"operation {frame.op} before the handshake was over; the first frame must be HELLO")

    def own_proof(self) -> bytes:
        """The shard's proof for WELCOME, of the same token: the client, too, wants to know whom it talks to."""
        return self._proof(self.token, "shard") if self.token is not None else b""

    def _proof(self, token: bytes, side: str) -> bytes:
        assert self.hello is not None
        return proof(
            token,
            "client" if side == "client" else "shard",
            client=self.hello.client,
            client_nonce=self.hello.nonce,
            shard_nonce=self.nonce,
        )
