"""What every stream socket of psstore is set to, on both sides.

TCP's kernel buffers stay as the system sizes them. Measured over loopback, 100 MB in frames of 4 MiB, as times of raw
sockets in the same run: with TCP's autotuning pushes took 0.9 to 1.4 and pulls 0.8 to 1.2; with SO_SNDBUF and
SO_RCVBUF of 256 KiB, which switch it off (tcp(7)), pushes 1.3 to 1.4 and pulls 0.6 to 0.7; with 4 MiB about the same
as without. So small a fixed window would cap a link with real latency.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any, Protocol

from psstore.errors import BadArgument
from psstore.net.address import is_loopback

if TYPE_CHECKING:  # a supervisor does without, and checks settings here
    import asyncio

UNIX_SEND_BUFFER_BYTES = 1 << 20
"""Unix sockets do not tune themselves: with Linux's 208 KiB a round of ResNet-50 took 1.5 times raw sockets on one
shard and 2.1 on two, with this 1.3 and 1.8 to 2.0 (`python -m bench.dense`, alternating). The system may grant less
(net.core.wmem_max)."""

RECV_SLEEP_S = 0.001
"""How long a call may sleep in recv: nobody else can have the connection meanwhile, and most small calls end sooner.
The kernel counts in its own ticks, which may be 4 ms."""

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A peer whose machine is gone is noticed after 60 s of silence, not after Linux's two hours. Not every system has
all of them."""


UNPACED = (b"cubic", b"reno")
"""Congestion control for connections that never leave their host, in place of bbr, which paces what it sends: 64 MiB
each way over loopback took 1.25 times as long with it (best of 9 alternating runs). The first that the kernel allows;
reno it allows everybody."""


_BYTES_ACKED = struct.Struct("@120xQ")
"""tcpi_bytes_acked of Linux's struct tcp_info (linux/tcp.h), since Linux 4.1."""


class _Options(Protocol):
    """A socket, or what an event loop shows of one."""

    @property
    def family(self) -> int: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


async def connect_on(loop: asyncio.AbstractEventLoop, sock: socket.socket, where: Any) -> None:
    """`loop.sock_connect`, but that uvloop's starts libuv's threads to resolve even an IP address. Raises OSError.

    A socket that the system has given the very port that it is to connect to, where nobody listens, is connected to
    itself (RFC 9293, 3.5: a simultaneous open), and would keep the port from whoever is to listen there: that is
    refused, too."""
    code = sock.connect_ex(where)
    if code == errno.EINPROGRESS:
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(sock, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_writer(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if not code and sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        code = errno.ECONNREFUSED
    if code:
        raise OSError(code, os.strerror(code))


def tune(sock: _Options) -> None:
    """TCP: small frames leave at once, dead machines are noticed. Unix: large frames go out in few turns."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def sleep_in_recv(sock: socket.socket) -> None:
    """A plain recv of the socket waits for a moment from now on: who waits for an answer then does it with one system
    call, and need not poll before. Whoever is not to wait says MSG_DONTWAIT."""
    microseconds = round(1e6 * RECV_SLEEP_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, microseconds))  # a timeval
    os.set_blocking(sock.fileno(), True)  # but not for Python, which would poll itself


def taken_bytes(sock: socket.socket) -> int | None:
    """How much the far end's system has acknowledged of what was sent over TCP. None: all of it; or nobody can tell, as
    of a unix socket, where what is sent is not long on its way."""
    if sock.family == socket.AF_UNIX or not _num_unacknowledged(sock):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0]) if len(info) == _BYTES_ACKED.size else None


def _num_unacknowledged(sock: socket.socket) -> int:
    """Bytes in the send queue, those included that are on their way (SIOCOUTQ, tcp(7))."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def choose_congestion_control(sock: socket.socket, host: str, chosen: str | None) -> None:
    """For a socket of `host`, before it connects or listens: pacing that has begun goes on. `chosen`: by the user, and
    checked; None: the system's, but on loopback."""
    if chosen is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen.encode())
    else:
        _unpace(sock, host)


def check_congestion_control(what: str, name: str) -> str:
    """Raises BadArgument if the system has none of that name, or keeps it for root."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except (OSError, AttributeError) as error:
        raise BadArgument(
            f"{what} is {name!r}, which this system does not let us use ({error}); Linux lists what it does in"
            " net.ipv4.tcp_allowed_congestion_control"
        ) from None
    return name


def _unpace(sock: socket.socket, host: str) -> None:
    name = getattr(socket, "TCP_CONGESTION", None)
    if name is None or sock.family == socket.AF_UNIX or not is_loopback(host):
        return
    if sock.getsockopt(socket.IPPROTO_TCP, name, 16).startswith(b"bbr"):
        for other in UNPACED:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, name, other)
                return
