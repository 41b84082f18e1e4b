"""The peer of the transport benches: plain blocking sockets that move the same bytes and do nothing with them.

A round is what a training step sends: so many bytes up, one byte back when they are there, one byte of request,
the same number of bytes down. Both ends send and receive in batches of 4 MiB straight from and to one buffer.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

BATCH_BYTES = 4 << 20
"""As psstore's frames."""

UNIX_BUFFER_BYTES = 1 << 20
"""As psstore sets them."""


class RawLink:
    """The client's end of one connection to a process of its own."""

    def __init__(self, transport: str, num_bytes: int) -> None:
        family = socket.AF_INET if transport == "tcp" else socket.AF_UNIX
        with socket.socket(family) as listener:
            listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(listener.fileno()), str(num_bytes)],
                pass_fds=[listener.fileno()],
            )
            self._socket = socket.socket(family)
            self._socket.connect(listener.getsockname())
        tune(self._socket)

    def round(self, up: memoryview, down: memoryview) -> None:
        send_all(self._socket, up)
        receive_all(self._socket, memoryview(bytearray(1)))
        self._socket.sendall(b"x")
        receive_all(self._socket, down)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def batches(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), BATCH_BYTES):
        yield data[begin : begin + BATCH_BYTES]


def send_all(sock: socket.socket, data: memoryview) -> None:
    for batch in batches(data):
        sock.sendall(batch)


def receive_all(sock: socket.socket, data: memoryview) -> None:
    for batch in batches(data):
        while batch:
            received = sock.recv_into(batch)
            if received == 0:
                raise ConnectionResetError("the peer is gone")
            batch = batch[received:]


def serve(listener: socket.socket, num_bytes: int) -> None:
    """The other end: takes rounds until the client is gone."""
    connection, _ = listener.accept()
    tune(connection)
    data = memoryview(bytearray(num_bytes))
    with connection, contextlib.suppress(ConnectionResetError):
        while True:
            receive_all(connection, data)
            connection.sendall(b"x")
            receive_all(connection, memoryview(bytearray(1)))
            send_all(connection, data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("listener_fd", type=int)
    parser.add_argument("num_bytes", type=int)
    arguments = parser.parse_args()
    serve(socket.socket(fileno=arguments.listener_fd), arguments.num_bytes)
