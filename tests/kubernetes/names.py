"""Names of pods and services, as a cluster's DNS has them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import cast

TYPE_A, CLASS_IN = 1, 1
NO_SUCH_NAME = 3
RESPONSE, AUTHORITATIVE = 0x8000, 0x0400

Lookup = Callable[[str], Sequence[str] | None]
"""Addresses that a full name has; None: there is no such name."""


class NameServer(asyncio.DatagramProtocol):
    """Answers over UDP, and only what it is asked: RFC 1035, one question, no compression in it."""

    def __init__(self, lookup: Lookup, *, cache_s: float = 0.0) -> None:
        """`cache_s`: how long an answer is given again, whatever has changed; CoreDNS may do so for 30 s."""
        self._lookup = lookup
        self._cache_s = cache_s
        self._cached: dict[str, tuple[float, Sequence[str] | None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, query: bytes, source: tuple[str, int]) -> None:
        name, kind, question = _question(query)
        found = self._find(name)
        addresses = [] if found is None or kind != TYPE_A else found
        flags = RESPONSE | AUTHORITATIVE | (NO_SUCH_NAME if found is None else 0)
        head = query[:2] + struct.pack("!5H", flags, 1, len(addresses), 0, 0)
        record = struct.pack("!HHHIH", 0xC00C, TYPE_A, CLASS_IN, 0, 4)
        self._transport.sendto(head + question + b"".join(record + socket.inet_aton(one) for one in addresses), source)

    def _find(self, name: str) -> Sequence[str] | None:
        now = asyncio.get_running_loop().time()
        until, found = self._cached.get(name, (0.0, None))
        if now >= until:
            found = self._lookup(name)
            if found:
                self._cached[name] = (now + self._cache_s, found)
        return found


def _question(query: bytes) -> tuple[str, int, bytes]:
    """(name, type, its bytes)."""
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode())
        at += 1 + size
    kind, _ = struct.unpack_from("!HH", query, at + 1)
    return ".".join(labels).lower(), kind, query[12 : at + 5]
