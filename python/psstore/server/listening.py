"""The bound sockets of all shards, made before any shard runs: what is in the way is known at once.

Also what goes with them: addresses to tell clients, stale unix sockets, and who holds a port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from psstore.errors import BadArgument
from psstore.net.address import Address, TcpAddress, UnixAddress, is_loopback
from psstore.net.limits import BACKLOG
from psstore.net.sockets import choose_congestion_control
from psstore.server.port_owner import describe_owner

PROBE_S = 1.0
"""How long a unix socket that exists already may take to accept a connection before it counts as stale."""

LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a socket that listens on all addresses is reached from its own host."""


@dataclass
class Endpoint:
    """Where one shard is reached. Owns its sockets."""

    sockets: list[socket.socket] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    """As clients are told."""
    bound: list[Address] = field(default_factory=list)
    """Where the sockets listen."""
    local: Address | None = None
    """As it is reached from this host."""
    _files: dict[str, int] = field(default_factory=dict)
    """Inode of each unix socket: another server may bind the path when ours is done."""

    def add_unix(self, path: str) -> None:
        self.sockets.append(_bind_unix(path))
        self.addresses.append(UnixAddress(path))
        self.bound.append(UnixAddress(path))
        self.local = UnixAddress(path)
        self._files[path] = os.stat(path).st_ino

    def add_tcp(
        self, host: str, port: int, advertise: tuple[str, int | None], *, congestion_control: str | None, tls: bool
    ) -> None:
        sock = bind_tcp(host, port, congestion_control, flag=None if advertise[1] else "--port")
        self.sockets.append(sock)
        bound, port = sock.getsockname()[:2]
        self.addresses.append(TcpAddress(advertise[0], advertise[1] or port, tls))
        self.bound.append(TcpAddress(bound, port))
        # A certificate is for those who come from elsewhere: of this host's own way here it knows nothing.
        here = LOOPBACKS.get(bound, bound)
        self.local = self.local or TcpAddress(here, port, tls, advertise[0] if tls and advertise[0] != here else "")

    def close(self) -> None:
        """The shard's process has the sockets now."""
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()

    def remove_files(self) -> None:
        """Removes the socket files that are still ours. While a socket is open, no other server's has its inode."""
        for path, inode in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._files.clear()


def bind_shards(
    indices: Iterable[int],
    *,
    tcp: TcpAddress | None,
    uds: str | None,
    advertise: Sequence[tuple[str, int | None]] | None,
    congestion_control: str | None,
    tls: bool = False,
) -> list[Endpoint]:
    """One endpoint for the shard of each index; unix sockets come first in its addresses. Raises BadArgument, with
    nothing left bound.

    `advertise`: host and port at which clients find each shard, None for the port that it listens at; None: as they
    listen. `tls`: what comes by TCP. `congestion_control`: of TCP connections that are accepted; None: the system's."""
    endpoints = {index: Endpoint() for index in indices}
    try:
        for index, endpoint in endpoints.items():
            if uds is not None:
                endpoint.add_unix(os.path.abspath(uds if index == 0 else f"{uds}.{index}"))
            if tcp is not None:
                port = tcp.port + index if tcp.port else 0
                where = advertise[index] if advertise is not None else (_reachable(tcp.host), None)
                endpoint.add_tcp(tcp.host, port, where, congestion_control=congestion_control, tls=tls)
    except BaseException:
        for endpoint in endpoints.values():
            endpoint.close()
            endpoint.remove_files()
        raise
    return list(endpoints.values())


def bind_tcp(
    host: str, port: int, congestion_control: str | None = None, *, flag: str | None = "--port"
) -> socket.socket:
    """A socket that listens there. `flag`: what says where; None: no other port would do. Raises BadArgument."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BadArgument(f"host {host!r}: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        choose_congestion_control(sock, str(address[0]), congestion_control)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            advice = "" if flag is None else f"; use {flag} 0"
            raise BadArgument(f"port {port} is taken by {describe_owner(port)}{advice}") from None
        raise BadArgument(f"can't listen on {host} port {port}: {error.strerror}") from None
    return sock


def _bind_unix(path: str) -> socket.socket:
    """Readable and writable for this user only: a unix socket needs no token."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadArgument(f"can't listen on unix socket {path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    return sock


def _remove_stale(path: str) -> None:
    """Removes a socket that nobody listens on any more; anything else in the way is an error."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise BadArgument(f"{path} exists and is no socket; choose another --uds")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise BadArgument(f"unix socket {path} is in the way: {error.strerror or error}") from None
    raise BadArgument(f"unix socket {path} is taken by a server that runs; choose another --uds")


def _reachable(host: str) -> str:
    """What a client on another machine connects to, when we listen on `host`."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(name)
        if not is_loopback(found):
            return found
    return name
