"""What sockets are set to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

import psstore
from psstore.errors import BadArgument
from psstore.net.address import TcpAddress
from psstore.net.sockets import choose_congestion_control, connect_on
from psstore.server.listening import bind_shards
from psstore.server.settings import ServerSettings
from tests.support.server_process import StoreProcess


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_connections_within_a_host_are_not_paced_and_others_stay_as_they_are(host: str) -> None:
    with socket.socket() as sock:
        with contextlib.suppress(OSError):  # a kernel without it, or that keeps it for root
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        before = congestion_control(sock)
        choose_congestion_control(sock, host, None)
        after = congestion_control(sock)
    assert after == before or (before == b"bbr" and host == "127.0.0.1")
    assert after != b"bbr" or host != "127.0.0.1"


def ours() -> set[bytes]:
    """Of this process's TCP connections."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.family == socket.AF_INET and sock.getpeername():
                found.add(congestion_control(sock))
    return found


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_socket_that_met_itself_is_refused(family: socket.AddressFamily, host: str) -> None:
    async def connect() -> None:
        with socket.socket(family) as sock:
            sock.setblocking(False)
            sock.bind((host, 0))
            await connect_on(asyncio.get_running_loop(), sock, sock.getsockname())

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect())


@pytest.mark.sockets
def test_congestion_control_may_be_chosen_on_both_sides() -> None:
    with (
        StoreProcess("--congestion-control", "reno") as server,
        psstore.connect(server.url, role="client", transport="tcp", congestion_control="reno") as store,
    ):
        store.create("w", [1.0])
        assert store.pull("w")[0] == 1.0
        assert ours() == {b"reno"}


def test_shards_accept_with_the_congestion_control_that_was_chosen() -> None:
    (endpoint,) = bind_shards(
        range(1), tcp=TcpAddress("127.0.0.1", 0), uds=None, advertise=None, congestion_control="reno"
    )
    with (
        endpoint.sockets[0] as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as sock,
    ):
        assert congestion_control(sock) == b"reno"


def test_congestion_control_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSSTORE_CONGESTION_CONTROL", "pigeon")
    with pytest.raises(BadArgument, match=r"PSSTORE_CONGESTION_CONTROL is 'pigeon'.*tcp_allowed_congestion"):
        psstore.connect("ps://127.0.0.1:1")
    with pytest.raises(BadArgument, match=r"^congestion_control is 'parrot'"):
        psstore.connect("ps://127.0.0.1:1", congestion_control="parrot")
    with pytest.raises(BadArgument, match="congestion_control is 'pigeon'"):
        ServerSettings(congestion_control="pigeon").check()
