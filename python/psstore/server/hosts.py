"""Lists of hosts as they are written on a command line: `h1:2222,h2:2222`."""

from __future__ import annotations

from collections.abc import Sequence

from psstore.errors import BadArgument
from psstore.net.address import TcpAddress, parse_address

MAX_PORT = 65535


def split_hosts(text: str) -> tuple[str, ...]:
    """'h1:2222, h2:2222' -> ('h1:2222', 'h2:2222')."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def parse_hosts(what: str, entries: Sequence[str]) -> tuple[TcpAddress, ...]:
    """Where each of them listens; one without a port has psstore's (DEFAULT_PORT).

    `what`: how the list is called where it comes from. Raises BadArgument naming the entry.
    """
    if not entries:
        raise BadArgument(f"{what} is empty; expected host:port,host:port,… with every host in it")
    addresses: list[TcpAddress] = []
    for entry in entries:
        address = _parse(what, entry)
        if address in addresses:
            raise BadArgument(f"{what} names {entry!r} twice; each needs a place of its own")
        addresses.append(address)
    return tuple(addresses)


def advertised_hosts(text: str, num_shards: int) -> tuple[tuple[str, int | None], ...]:
    """Where each shard is found: (host, port), or (host, None) at the port that it listens at. Raises BadArgument."""
    entries = [_advertised(entry) for entry in split_hosts(text)]
    if len(entries) not in (1, num_shards):
        raise BadArgument(
            f"advertise names {len(entries)} places for {num_shards} shards; expected a host, the host:port of shard 0"
            " with the others at the ports after it, or a place for each shard"
        )
    if len(entries) == 1:
        ((host, port),) = entries
        entries = [(host, None if port is None else port + index) for index in range(num_shards)]
    ports = [place for place in entries if place[1] is not None]
    if len(set(ports)) < len(ports):
        raise BadArgument(
            f"advertise is {text!r}: two shards would be found at one place; each needs a port of its own"
        )
    if any(port is not None and port > MAX_PORT for _, port in entries):
        raise BadArgument(f"advertise is {text!r}: {num_shards} shards from there on go beyond port {MAX_PORT}")
    return tuple(entries)


def _advertised(entry: str) -> tuple[str, int | None]:
    num_colons = entry.rpartition("]")[2].count(":")
    if num_colons > 1:  # an IPv6 address without brackets, and so without a port
        return entry, None
    address = _parse("advertise", entry)
    return address.host, address.port if num_colons else None


def _parse(what: str, entry: str) -> TcpAddress:
    try:
        address = parse_address(f"ps://{entry}")
    except BadArgument:
        address = None
    if not isinstance(address, TcpAddress) or not address.port:
        raise BadArgument(f"{what}: {entry!r} is no host:port; write for example ps0.example:2222 or [fd00::1]:2222")
    return address
