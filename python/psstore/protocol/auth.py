"""Proof of the token at the handshake. The token itself never travels; both sides prove that they have it."""

from __future__ import annotations

import hmac
from typing import Literal

NONCE_BYTES = 32
"""Fresh per connection and side: a proof can't be replayed."""


def proof(
    token: bytes, side: Literal["client", "shard"], *, client: str, client_nonce: bytes, shard_nonce: bytes
) -> bytes:
    """HMAC-SHA-256 over both nonces and the prover's side, so that neither can mirror the other's proof."""
    parts = (b"psstore-1", side.encode(), client.encode(), client_nonce, shard_nonce)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(token, message, "sha256")


def matches(expected: bytes, came: bytes) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(expected, came)
