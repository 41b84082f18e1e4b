"""The shard's end of bench.counted: a shard in this process, and a worker in another one that asks when it is told.

The shard is what a process of psstore-server has, sockets included, on a loop that turns only when it is told to. So
what it does for one request lies between two lines here: the request is there before the turn begins, and nothing else
comes until it ends. The worker is not counted.
"""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import psstore
from bench.processes import FRESH, child
from psstore import _core
from psstore.net.limits import ServerLimits
from psstore.net.manual_loop import ManualLoop
from psstore.net.server import Server
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.service import ShardService
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.types import Consistency, TensorSpec

PARTS = ("push", "commit", "pull")
"""Of a round, in order."""

HEARTBEAT_S = 5.0
"""Seldom in the middle of what is counted."""

IDLE_S = 0.001
"""How long the loop sleeps at a time while the worker does something that is not counted."""


class ShardsEnd:
    """A shard, and its worker at the other end of `link`."""

    def __init__(self, loop: ManualLoop, server: Server, link: Connection) -> None:
        self.loop = loop
        self._requests = server.poller.fileno()
        self._link = link
        self._idle_until_told()  # it is connected

    @contextlib.contextmanager
    def asked(self, part: str) -> Iterator[None]:
        """Within the block the worker has asked, and its request is there, unread."""
        self._link.send(part)
        self._link.recv()  # all is sent, or about to be
        select.select([self._requests], [], [])
        yield
        self._idle_until_told()  # it has its answer

    def turn(self) -> None:
        """All that there is to do."""
        self.loop.turn(self.loop.poll(0))
        while self.loop.has_ready():
            self.loop.turn(())

    def leave(self) -> None:
        """The worker does."""
        self._link.send("leave")
        with contextlib.suppress(EOFError):
            self._idle_until_told()

    def _idle_until_told(self) -> None:
        while not self._link.poll():
            self.loop.turn(self.loop.poll(0 if self.loop.has_ready() else IDLE_S))
        self._link.recv()


@contextlib.contextmanager
def shards_end(num_tensors: int, num_elems: int) -> Iterator[ShardsEnd]:
    """Of a store of one shard, whose worker pushes and pulls so many tensors."""
    loop = ManualLoop()
    ours, theirs = FRESH.Pipe()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(loop):
        path = str(Path(folder, "shard"))
        url = f"unix://{path}"
        server = Server(_service(url), loop=loop.as_asyncio, limits=ServerLimits())
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        server.listen(sock)
        with child(_work, theirs, url, num_tensors, num_elems), contextlib.closing(ours):
            theirs.close()  # so that the end of that process is the end of the link
            end = ShardsEnd(loop, server, ours)
            yield end
            end.leave()


def _service(url: str) -> ShardService:
    consistency, signer = Consistency(), Signer(bytes(32))
    coordinator = Coordinator(consistency=consistency, liveness=Liveness(), num_shards=1, signer=signer)
    return ShardService(
        identity=ShardIdentity(
            store="counted", shard=0, addresses=((url,),), consistency=consistency, heartbeat_s=HEARTBEAT_S
        ),
        shard=_core.Shard(index=0),
        signer=signer,
        coordinator=coordinator,
        make_nonce=lambda: b"",
    )


def _work(link: Connection, url: str, num_tensors: int, num_elems: int) -> None:
    """In a process of its own: a part of a round whenever it is told to, until it is to leave."""
    names = [f"tensor {index}" for index in range(num_tensors)]
    gradients = {name: np.ones(num_elems, np.float32) for name in names}
    weights = [np.zeros(num_elems, np.float32) for _ in names]
    with psstore.connect(url, rank=0, transport="unix") as store:
        store.create_many([TensorSpec(name=name, shape=(num_elems,), rule="sgd") for name in names])
        link.send("connected")
        while (part := link.recv()) != "leave":
            if part == "push":
                push = store.start_push_many(gradients)  # all of it is sent by now
            link.send("sent")
            if part == "push":
                push.result()
            elif part == "commit":
                store.commit({"lr": 0.1})
            else:
                store.pull_many(names, out=weights)
            link.send("answered")
