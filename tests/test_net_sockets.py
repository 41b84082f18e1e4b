"""What sockets are set to."""

from __future__ import annotations

import contextlib
import socket

import pytest

from psstore.net.sockets import unpace


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_connections_within_a_host_are_not_paced_and_others_stay_as_they_are(host: str) -> None:
    with socket.socket() as sock:
        with contextlib.suppress(OSError):  # a kernel without it, or that keeps it for root
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        before = congestion_control(sock)
        unpace(sock, host)
        after = congestion_control(sock)
    assert after == before or (before == b"bbr" and host == "127.0.0.1")
    assert after != b"bbr" or host != "127.0.0.1"
