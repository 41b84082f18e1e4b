"""How large packets may be on the way to a shard where large ones are lost and nobody says so: a black hole, as tunnels
and switches are whose MTU is smaller than that of the hosts, and firewalls that let no ICMP through (RFC 2923).

A connection whose segments are bounded at both ends stays below it. So several are tried, each with another bound.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import NamedTuple

from psstore.config import Credentials
from psstore.errors import PsstoreError
from psstore.net.address import TcpAddress, is_loopback, parse_address
from psstore.net.asking import counters, tie
from psstore.net.names import current_host
from psstore.net.user_token import find
from psstore.protocol.handshake import ClientIdentity

PADDING = 18_000 * "."
"""Two packets of jumbo frames, there and back."""

TRIED_BYTES = (8000, 4000, 1500, 1492, 1480, 1450, 1420, 1400, 1380, 1350, 1300, 1280, 1000, 576)
"""Packets' sizes: Ethernet, PPPoE, tunnels of several kinds, and the least that IPv6 and IPv4 promise."""

PATIENCE_S = 3.0
"""How long each may take: a lost SYN and an answer."""

HEADERS_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Beside a segment: IP's and TCP's without options, which count as the segment's."""

_MTU_OF = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
"""IP_MTU and IPV6_MTU of linux/in.h and in6.h, which Python's socket does not name."""


class PacketSizes(NamedTuple):
    """Sizes in bytes, IP's header included."""

    passing: int
    """Packets of so many arrive, each way."""
    sent: int
    """Packets of so many are what this host sends, and they don't."""


async def find_packet_sizes(address: str, shard: int, credentials: Credentials) -> PacketSizes | None:
    """On a way on which large packets are lost. None: it does not leave the host, small ones are lost as well, or large
    ones arrive."""
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress) or is_loopback(parsed.host):
        return None
    try:
        family, sent = await asyncio.to_thread(_mtu_to, parsed)
    except OSError:
        return None
    tried = [sent, *(size for size in TRIED_BYTES if size < sent)]
    answers = [_is_answered(address, shard, credentials, size - HEADERS_BYTES[family]) for size in tried]
    passing = [size for size, is_answered in zip(tried, await asyncio.gather(*answers), strict=True) if is_answered]
    return PacketSizes(max(passing), sent) if passing and sent not in passing else None


async def _is_answered(address: str, shard: int, credentials: Credentials, segment_bytes: int) -> bool:
    identity = ClientIdentity(client=secrets.token_hex(16), role="client", credentials=credentials, find_token=find)
    reconnector = tie(identity, address, shard=shard, patience_s=PATIENCE_S, max_segment_bytes=segment_bytes)
    try:
        asked = counters(reconnector, timeout_s=PATIENCE_S, padding=PADDING)
        await asyncio.wait_for(asked, PATIENCE_S)
    except (PsstoreError, asyncio.TimeoutError):
        return False
    finally:
        await reconnector.close()
    return True


def _mtu_to(address: TcpAddress) -> tuple[socket.AddressFamily, int]:
    """(IP's version, the MTU of the way there, as far as this host knows it). Sends nothing. Raises OSError."""
    host = current_host(address.host)
    family, _, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return family, probe.getsockopt(*_MTU_OF[family])
