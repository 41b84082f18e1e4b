"""The far end of bench.tls's sockets: forgets what comes, and sends as much. DESCRIPTOR NUM_BYTES [CERTIFICATE]."""

from __future__ import annotations

import socket
import ssl
import sys

from bench.tls import CHUNK_BYTES


def main() -> None:
    listener, num_bytes = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if len(sys.argv) > 3:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(sys.argv[3])
        connection = context.wrap_socket(connection, server_side=True)
    memory = memoryview(bytearray(num_bytes))
    while True:
        received = 0
        while received < num_bytes:
            count = connection.recv_into(memory[received : received + CHUNK_BYTES])
            if not count:
                return
            received += count
        connection.sendall(memory)


if __name__ == "__main__":
    main()
