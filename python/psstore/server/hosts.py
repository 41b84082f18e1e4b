"""Lists of hosts as they are written on a command line: `h1:2222,h2:2222`."""

from __future__ import annotations

from collections.abc import Sequence

from psstore.errors import BadArgument
from psstore.net.address import TcpAddress, parse_address


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


def _parse(what: str, entry: str) -> TcpAddress:
    try:
        address = parse_address(f"ps://{entry}")
    except BadArgument:
        address = None
    if not isinstance(address, TcpAddress) or not address.port:
        raise BadArgument(f"{what}: {entry!r} is no host:port; write for example ps0.example:2222 or [fd00::1]:2222")
    return address
