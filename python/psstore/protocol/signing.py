"""Facts that clients carry and can't forge: MACs over decisions, definitions and tickets."""

from __future__ import annotations

import hashlib
import hmac

from psstore.errors import BadSignature
from psstore.wire.messages import Fact, Signed, decode_fact, encode_body

MAC_BYTES = 16
"""Length of the digest of keyed BLAKE2b (RFC 7693 section 2.9), which may be any: 128 bits of security take this."""


class Signer:
    """Signs and opens facts under the key that only the store's processes share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, fact: Fact) -> Signed:
        blob = encode_body(fact)
        return Signed(blob=blob, mac=self._mac(blob))

    def open(self, signed: Signed) -> Fact:
        """The fact, if the store signed it; else raises BadSignature."""
        self.check(signed)
        return decode_fact(signed.blob)

    def check(self, signed: Signed) -> None:
        """Raises BadSignature if the store did not sign it."""
        if not hmac.compare_digest(signed.mac, self._mac(signed.blob)):
            raise BadSignature("a carried fact was not signed by this store; was the store restarted?")

    def _mac(self, blob: bytes) -> bytes:
        return hashlib.blake2b(blob, digest_size=MAC_BYTES, key=self._key).digest()
