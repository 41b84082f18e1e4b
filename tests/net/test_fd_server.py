"""The socket that hands out shared memory, where its process has no room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from psstore import _core
from psstore.net.fd_server import MemoryServer
from psstore.net.limits import ACCEPT_AGAIN_S


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process can't open another file meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_who_cannot_be_accepted_is_not_asked_for_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        server = MemoryServer(_core.ValueArena())
        server.start(loop)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.setblocking(False)
            with no_more_files():
                visitor.connect(b"\0" + server.name.encode())
                await asyncio.sleep(0.3 * ACCEPT_AGAIN_S)
            visitor.send(b"no ticket")
            heard = await asyncio.wait_for(loop.sock_recv(visitor, 1), 10 * ACCEPT_AGAIN_S)
        server.close()
        return heard

    assert asyncio.run(run()) == b""
    assert [record.getMessage()[:25] for record in caplog.records] == ["can't accept connections,"]
