"""The key that signs a store's facts, where its shards have no common parent that could hand them a random one.

Shards on one host get theirs from the supervisor. Shards on several hosts have in common: the token, the list of their
addresses, and the id that shard 0 drew for this life of the store and tells every client. HKDF makes the key of them.
The list is the salt, so that two stores with one token have different keys; the id is the context, so that a fact
from before a restart is worth nothing after it. The token is the secret: whoever has it can train, and sign.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

CONTEXT = b"psstore signing key 1"


def signing_key(token: bytes, *, addresses: Sequence[str], store: str) -> bytes:
    """The store's signing key, equal on every host. `addresses`: all shards', in order; `store`: shard 0's id of this
    life."""
    return hkdf(token, salt="\n".join(addresses).encode(), info=CONTEXT + b"\0" + store.encode())


def hkdf(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA-256 (RFC 5869) for a key of 32 bytes: one block is all that has to be expanded."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")
