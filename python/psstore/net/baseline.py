"""Plain sockets that move bytes and do nothing with them: what a network carries, for `psstore bench` to compare with.

    client                        peer
    'u' + u64 n, then n bytes ──►           up:    what comes is forgotten
                           ◄── 1 byte       when all has come
    'd' + u64 n             ──►
                           ◄── n bytes      down:  zeros

Blocking, one thread per connection; it knows nothing of stores, and tells nobody anything but zeros.
"""

from __future__ import annotations

import mmap
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from psstore.errors import StoreUnreachable
from psstore.net.address import Address, TcpAddress, UnixAddress
from psstore.net.names import current_host
from psstore.net.sockets import tune

REQUEST = struct.Struct("<cQ")

ALL_HERE = b"x"

SCRATCH_BYTES = 64 << 20
"""What a peer receives into and sends from, again and again: more than most last-level caches, as a store's values
are."""

SMALL_BYTES = 64 << 10
"""Up to here one connection carries it all, as a store's small tensor has one slice."""

DIAL_S = 5.0


class RawLinks:
    """Connections to one peer that share what is to be moved, as a store's shards do."""

    def __init__(self, peer: Address, count: int) -> None:
        """Raises StoreUnreachable, as what moves bytes does."""
        self._peer = peer
        try:
            self._sockets = [_dial(peer) for _ in range(count)]
        except OSError as error:
            raise StoreUnreachable(
                f"no peer at {peer} ({error}); `psstore bench --serve` starts one there", address=str(peer)
            ) from error
        self._pool = ThreadPoolExecutor(count)

    def up(self, data: memoryview) -> None:
        """Returns when the peer has all of it."""
        self._each(_up, data)

    def down(self, into: memoryview) -> None:
        """Fills it with what the peer sends."""
        self._each(_down, into)

    def close(self) -> None:
        self._pool.shutdown()
        for sock in self._sockets:
            sock.close()

    def _each(self, move: Callable[[socket.socket, memoryview], None], data: memoryview) -> None:
        try:
            self._share_out(move, data)
        except OSError as error:
            raise StoreUnreachable(
                f"what is at {self._peer} is no peer, or has ended ({error}); `psstore bench --serve` starts one there",
                address=str(self._peer),
            ) from error

    def _share_out(self, move: Callable[[socket.socket, memoryview], None], data: memoryview) -> None:
        if len(data) <= SMALL_BYTES:
            move(self._sockets[0], data)
            return
        share = -(-len(data) // len(self._sockets))
        shares = [data[index * share : (index + 1) * share] for index in range(len(self._sockets))]
        list(self._pool.map(move, self._sockets, shares))


def serve(listener: socket.socket) -> None:
    """The peer: until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve_one, args=[connection], daemon=True).start()


def listen(address: Address) -> socket.socket:
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.path)
    listener.listen()
    return listener


@contextmanager
def peer_here(like: Address) -> Iterator[Address]:
    """A peer in a process of its own on this machine, over the same kind of socket as `like`."""
    with tempfile.TemporaryDirectory() as folder:
        at: Address = (
            TcpAddress(like.host, 0) if isinstance(like, TcpAddress) else UnixAddress(str(Path(folder, "raw")))
        )
        with listen(at) as listener:
            if isinstance(at, TcpAddress):
                at = TcpAddress(at.host, listener.getsockname()[1])
            command = [sys.executable, "-m", "psstore.net.baseline", str(listener.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        try:
            yield at
        finally:
            process.kill()
            process.communicate()


# ---- how ----


def _dial(peer: Address) -> socket.socket:
    if isinstance(peer, TcpAddress):
        sock = socket.create_connection((current_host(peer.host), peer.port), DIAL_S)
        sock.settimeout(None)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(peer.path)
    tune(sock)
    return sock


def _up(sock: socket.socket, data: memoryview) -> None:
    sock.sendall(REQUEST.pack(b"u", len(data)))
    sock.sendall(data)
    answer = bytearray(1)
    _receive(sock, memoryview(answer))
    if answer != ALL_HERE:
        raise ConnectionError("it answers what no peer does")


def _down(sock: socket.socket, into: memoryview) -> None:
    sock.sendall(REQUEST.pack(b"d", len(into)))
    _receive(sock, into)


def _serve_one(connection: socket.socket) -> None:
    tune(connection)
    scratch = memoryview(mmap.mmap(-1, SCRATCH_BYTES))  # zeros that take no memory before they are used
    request = memoryview(bytearray(REQUEST.size))
    with closing(connection), suppress(OSError):
        while True:
            _receive(connection, request)
            direction, left = REQUEST.unpack(request)
            while left:
                part = scratch[: min(left, SCRATCH_BYTES)]
                if direction == b"u":
                    _receive(connection, part)
                else:
                    connection.sendall(part)
                left -= len(part)
            if direction == b"u":
                connection.sendall(ALL_HERE)


def _receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        received = sock.recv_into(into)
        if received == 0:
            raise ConnectionResetError("the peer is gone")
        into = into[received:]


if __name__ == "__main__":
    threading.Thread(target=serve, args=[socket.socket(fileno=int(sys.argv[1]))], daemon=True).start()
    sys.stdin.read()  # until who started this has ended, in whatever way
