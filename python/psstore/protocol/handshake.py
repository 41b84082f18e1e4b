"""The client's side of a handshake: from HELLO to a WELCOME that is believed. Sans-IO; one for each connection.

client              shard
  │── HELLO ─────────►│
  │◄──── CHALLENGE ───│   if the store has a token
  │── AUTH ──────────►│
  │◄────── WELCOME ───│   with the shard's own proof then
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from psstore import _core
from psstore.config import NO_CREDENTIALS, Credentials
from psstore.errors import AuthFailed, Overloaded, UnexpectedMessage, from_code
from psstore.protocol import auth
from psstore.wire import messages as m

OPS = _core.OPS


@dataclass(kw_only=True)
class ClientIdentity:
    """Who the client is, on every shard."""

    client: str
    role: m.Role
    credentials: Credentials = NO_CREDENTIALS
    """What the user gave; without a token the one that is found for each connection counts, if any."""
    find_token: Callable[[str], bytes | None] = lambda address: None
    """Finds the token of the store at an address, if the store is on this machine and of this user. Blocks for as long
    as a small file takes to read. Raises OSError if there is no room for one."""
    found: bytes | None = None
    """What was found last and proved to be right: all shards have one token, also those whose address tells nothing."""
    features: int = 0
    rank: int = 0
    incarnation: int = 0
    ticket: m.Signed | None = None
    """The worker's ticket, set by JOIN; from then on every session attaches with it first."""


class Handshake:
    """What a client says until it may send requests."""

    def __init__(self, identity: ClientIdentity, *, nonce: bytes, address: str) -> None:
        """`nonce`: fresh random bytes."""
        self._identity = identity
        self._nonce = nonce
        self._address = address
        self._shard_nonce: bytes | None = None
        """The nonce of the shard's challenge; None: there was none."""
        self._token = identity.credentials.secret()

    def hello(self, channel: int) -> bytes:
        """The first frame."""
        who = self._identity
        hello = m.Hello(client=who.client, role=who.role, nonce=self._nonce, features=who.features, channel=channel)
        return _core.encode_frame(OPS["HELLO"], body=m.encode_body(hello))

    def heard(self, frame: _core.Frame) -> bytes | m.Welcome:
        """The next frame to send, or the WELCOME that ends it. Raises what the shard says is wrong, AuthFailed, or
        UnexpectedMessage."""
        if frame.op == OPS["ERROR"]:
            failure = m.decode_body(m.Failure, frame.body)
            raise from_code(failure.code, failure.message, **failure.details)
        if frame.op == OPS["CHALLENGE"] and self._shard_nonce is None:
            return self._answer(m.decode_body(m.Challenge, frame.body))
        if frame.op == OPS["WELCOME"]:
            return self._believed(m.decode_body(m.Welcome, frame.body))
        raise UnexpectedMessage(f"the shard at {self._address} sent operation {frame.op} during the handshake")

    def _answer(self, challenge: m.Challenge) -> bytes:
        token = self._needed_token()
        if token is None:
            raise AuthFailed(
                f"the store at {self._address} needs a token: connect with token=, or set PSSTORE_TOKEN_FILE"
                " (found without it by programs of the same user, machine and container only)"
            )
        self._shard_nonce = challenge.nonce
        proof = self._proof("client", token, challenge.nonce)
        return _core.encode_frame(OPS["AUTH"], body=m.encode_body(m.Auth(proof=proof)))

    def _believed(self, welcome: m.Welcome) -> m.Welcome:
        token, nonce = self._needed_token(), self._shard_nonce
        if token is not None and (nonce is None or not auth.matches(self._proof("shard", token, nonce), welcome.proof)):
            raise AuthFailed(f"the store at {self._address} did not prove that it has the token")
        self._identity.found = token
        return welcome

    def _needed_token(self) -> bytes | None:
        """The token of this handshake, if there is one. Unless it was given, it is looked for once, when the shard has
        answered, so that its store is there; the client and the shard prove the same one."""
        if self._token is None:
            self._token = self._found_token() or self._identity.found
        return self._token

    def _found_token(self) -> bytes | None:
        try:
            return self._identity.find_token(self._address)
        except OSError as error:
            if self._identity.found is not None:
                return None
            why = f"this process has no room to look for the token of the store at {self._address}: {error.strerror}"
            raise Overloaded(why) from None

    def _proof(self, side: Literal["client", "shard"], token: bytes, shard_nonce: bytes) -> bytes:
        who = self._identity.client
        return auth.proof(token, side, client=who, client_nonce=self._nonce, shard_nonce=shard_nonce)
