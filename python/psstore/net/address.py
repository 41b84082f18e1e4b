"""The addresses of shards as text: `ps://host:port`, `pss://host:port` with TLS, and `unix:///path`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

from psstore.errors import BadArgument

DEFAULT_PORT = 5700


class TcpAddress(NamedTuple):
    """A TCP endpoint; `host` is a name or an IP address without brackets."""

    host: str
    port: int
    tls: bool = False
    name: str = ""
    """What the certificate there has to be of, if not of `host`: it is reached by another way."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'pss' if self.tls else 'ps'}://{host}:{self.port}{f'?name={self.name}' if self.name else ''}"


class UnixAddress(NamedTuple):
    """A unix stream socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Raises BadArgument saying which forms there are."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix" and rest.startswith("/"):
        return UnixAddress(rest)
    if separator and scheme in _TCP_SCHEMES:
        place, _, name = rest.partition("?name=") if scheme == "pss" else (rest, "", "")
        address = _parse_tcp(place.rstrip("/"))
        if address is not None:
            return address._replace(tls=scheme == "pss", name=name)
    raise BadArgument(
        f"address {text!r}: expected ps://host:port, pss://host:port for a store with TLS, or unix:///absolute/path"
    )


def parse_addresses(text: str) -> list[Address]:
    """The places of one shard: `ps://host:port,host:port` are two, of which one leads. Raises BadArgument."""
    scheme, separator, rest = text.partition("://")
    if scheme not in _TCP_SCHEMES or "," not in rest:
        return [parse_address(text)]
    return [parse_address(f"{scheme}{separator}{one.strip()}") for one in rest.split(",")]


def join_addresses(addresses: Sequence[str]) -> str:
    """What `parse_addresses` takes apart. REQUIRES: they are of TCP, and of one scheme."""
    scheme = addresses[0].partition("://")[0]
    return f"{scheme}://" + ",".join(one.removeprefix(f"{scheme}://") for one in addresses)


_TCP_SCHEMES = ("ps", "pss")


_TCP = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def _parse_tcp(rest: str) -> TcpAddress | None:
    """`host`, `host:port` or `[ipv6]:port`; None if it is none of them."""
    match = _TCP.fullmatch(rest)
    if match is None:
        return None
    port = int(match["port"] or DEFAULT_PORT)
    return TcpAddress(match["ipv6"] or match["host"], port) if port < 1 << 16 else None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach it. A name other than localhost is looked up by nobody: False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
