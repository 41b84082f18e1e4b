"""Starts psstore-server as a child and learns its address."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

import msgspec

from psstore.errors import StoreUnreachable
from psstore.launch.group import Child, ProcessGroup
from psstore.launch.output import read_pipe
from psstore.types import UNBOUNDED, Consistency, workers_text

READY_S = 60.0
"""How long the store may take to be ready. It takes about a second; a loaded machine takes longer."""

RESTORED_S = 3700.0
"""And where it reads or looks at a storage first: longer than it tries that itself, since it says more of why."""

PLACES = ("PSSTORE_CHECKPOINT", "PSSTORE_RESTORE")
"""Variables by which it does."""


class StoreUrl(msgspec.Struct):
    """The line that psstore-server writes to --ready-fd."""

    url: str


def server_command(*, num_shards: int, consistency: Consistency, ready_fd: int) -> list[str]:
    """On a port that is free, so that any number of stores run side by side."""
    options = {
        "--shards": num_shards,
        "--workers": workers_text(consistency),
        "--quorum": consistency.quorum,
        "--staleness": "unbounded" if consistency.staleness == UNBOUNDED else consistency.staleness,
        "--host": "127.0.0.1",
        "--port": 0,
        "--ready-fd": ready_fd,
        "--log-level": "warning",
    }
    spelled = [text for name, value in options.items() for text in (name, str(value))]
    return [sys.executable, "-m", "psstore.cli.server", *spelled]


class StoreProcess:
    """A running psstore-server."""

    def __init__(self, child: Child, ready: asyncio.StreamReader, *, ready_s: float) -> None:
        self.child = child
        self._ready = ready
        self._ready_s = ready_s

    @classmethod
    async def start(
        cls, group: ProcessGroup, *, num_shards: int, consistency: Consistency, environ: Mapping[str, str]
    ) -> StoreProcess:
        """Returns at once; `url` waits until it serves."""
        read_fd, write_fd = os.pipe()
        reader = await read_pipe(os.fdopen(read_fd, "rb", buffering=0))
        command = server_command(num_shards=num_shards, consistency=consistency, ready_fd=write_fd)
        try:
            child = group.spawn(command, environ=environ, pass_fds=[write_fd])
        finally:
            os.close(write_fd)
        return cls(child, reader, ready_s=RESTORED_S if any(map(environ.get, PLACES)) else READY_S)

    async def url(self) -> str:
        """Raises StoreUnreachable if the store ends before it is ready, or takes too long."""
        try:
            line = await asyncio.wait_for(self._ready.readline(), self._ready_s)
        except asyncio.TimeoutError:
            why = f"the store was not ready after {self._ready_s:g} s"
            raise StoreUnreachable(why, tried_s=self._ready_s) from None
        if not line:
            code = await self.child.ended
            raise StoreUnreachable(f"the store ended with exit code {code} before it was ready; its output says why")
        return msgspec.json.decode(line, type=StoreUrl).url
