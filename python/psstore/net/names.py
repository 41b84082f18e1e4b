"""Where a host is that a name stands for: as the hosts file says, else as the system does.

A launcher that moves shards between hosts, and has no DNS to say so, writes such a file on each host. It is read for
each connection, as a DNS would be asked.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from psstore.config import hosts_file

NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What this machine says of an address to which it has no way itself."""


def telling(troubles: list[OSError]) -> list[OSError]:
    """What tells of the host, of why each of its addresses could not be connected to: where a name has an IPv6 address,
    too, and this machine none, only the other one does."""
    return [one for one in troubles if one.errno not in NO_WAY] or troubles


def current_host(host: str) -> str:
    """The address that the hosts file has for the name, or `host` itself. Raises OSError if the file can't be read."""
    path = hosts_file()
    return host if path is None else read_hosts(path).get(host, host)


def read_hosts(path: Path) -> dict[str, str]:
    """Addresses by names. Raises OSError."""
    hosts: dict[str, str] = {}
    for line in path.read_text().splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        hosts.update(dict.fromkeys(names, address))
    return hosts


def write_hosts(path: Path, hosts: dict[str, str]) -> None:
    """Who reads meanwhile finds all of the file, the former one or this one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
    os.replace(fresh, path)
