"""One shard's `Server` in a thread of the test, with limits and a service that the test chooses."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from psstore import _core
from psstore.net import loops
from psstore.net.fd_server import MemoryServer
from psstore.net.limits import ServerLimits
from psstore.net.server import Server
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.service import ShardService
from psstore.protocol.sharing import MAX_LEASED_BYTES
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.types import Consistency

JOIN_S = 30.0


def make_service(
    arena: _core.ValueArena | None = None,
    lender: MemoryServer | None = None,
    max_connections: int | None = None,
    max_leased_bytes: int = MAX_LEASED_BYTES,
    **liveness: Any,
) -> ShardService:
    """Shard 0 of a store of one, for one worker."""
    consistency, signer = Consistency(), Signer(bytes(32))
    coordinator = Coordinator(consistency=consistency, liveness=Liveness(**liveness), num_shards=1, signer=signer)
    return ShardService(
        identity=ShardIdentity(store="test", shard=0, addresses=(("",),), consistency=consistency, heartbeat_s=1.0),
        shard=_core.Shard(index=0, arena=arena),
        signer=signer,
        coordinator=coordinator,
        make_nonce=lambda: os.urandom(32),
        lender=lender,
        max_connections=max_connections,
        max_leased_bytes=max_leased_bytes,
    )


@contextmanager
def serving(service: ShardService, *, lender: MemoryServer | None = None, **limits: Any) -> Iterator[str]:
    """The address at which the service is served, on the loop under test."""
    sock = socket.create_server(("127.0.0.1", 0))
    address = f"ps://127.0.0.1:{sock.getsockname()[1]}"
    started: threading.Event = threading.Event()
    stop: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        server = Server(service, loop=loop, limits=ServerLimits(linger_s=0.5, **limits))
        server.listen(sock)
        if lender is not None:
            lender.start(loop)
        started.set()
        await stopped.wait()
        if lender is not None:
            lender.close()
        await server.drain()

    name = cast(loops.LoopName, os.environ.get("PSSTORE_LOOP", "auto"))
    thread = threading.Thread(target=loops.run, args=(main(), name))
    thread.start()
    try:
        assert started.wait(JOIN_S)
        yield address
    finally:
        stop[0]()
        thread.join(JOIN_S)
        assert not thread.is_alive(), "the server did not drain"
