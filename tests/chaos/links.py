"""What lies between clients and shards: a TCP proxy for each shard, whose connections can be cut, left half-open,
slowed to a few bytes at a time, or delayed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Manner = Literal["pass", "swallow", "trickle", "delay"]

CHUNK_BYTES = 64 << 10
TRICKLE_BYTES = 7
DELAY_S = 0.2


class Links:
    """Proxies on free ports, on a thread of their own: `with Links(2, find_ports) as links:`."""

    def __init__(self, num_shards: int, ports: Callable[[], Sequence[int]], *, seed: int) -> None:
        """`ports`: where shards listen, asked when somebody first connects."""
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_shards)]
        self.ports: list[int] = [one.getsockname()[1] for one in self._sockets]
        self._find, self._shards = ports, list[int]()
        self._rng = random.Random(seed)
        self._ways: list[set[Way]] = [set() for _ in range(num_shards)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Links:
        self._thread.start()
        for shard, sock in enumerate(self._sockets):
            self._call(asyncio.start_server(partial(self._open, shard), sock=sock))
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for sock in self._sockets:
            sock.close()

    def cut(self, shard: int, of: Collection[int] | None) -> int:
        """Resets all connections to the shard, or those from the ports `of`; returns how many."""
        return self._call(self._on_each(shard, of, Way.cut))

    def set_manner(self, shard: int, of: Collection[int] | None, manner: Manner) -> int:
        """How bytes travel from now on over the connections that there are. 'swallow' is for ever: nothing arrives, and
        neither end hears that the other closes."""

        def become(way: Way) -> None:
            if way.manner != "swallow":
                way.manner = manner

        return self._call(self._on_each(shard, of, become))

    # ---- on the loop ----

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _on_each(self, shard: int, of: Collection[int] | None, do: Callable[[Way], None]) -> int:
        chosen = [way for way in self._ways[shard] if of is None or way.client_port in of]
        for way in chosen:
            do(way)
        return len(chosen)

    async def _open(self, shard: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self._shards:
                self._shards = list(await asyncio.to_thread(self._find))
            there = await asyncio.open_connection("127.0.0.1", self._shards[shard])
        except (OSError, IndexError):
            writer.transport.abort()
            return
        way = Way((reader, writer), there, self._rng)
        self._ways[shard].add(way)
        try:
            await way.carry()
        finally:
            self._ways[shard].discard(way)

    async def _close(self) -> None:
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Way:
    """One connection through a proxy: two, in truth."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        shard: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        rng: random.Random,
    ) -> None:
        self.client_port: int = client[1].get_extra_info("peername")[1]
        self.manner: Manner = "pass"
        self._ends = (client, shard)
        self._rng = rng
        for _, writer in self._ends:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def cut(self) -> None:
        for _, writer in self._ends:
            writer.transport.abort()

    async def carry(self) -> None:
        """Until both ends have closed, or it is cut."""
        (client, to_client), (shard, to_shard) = self._ends
        try:
            await asyncio.gather(self._pump(client, to_shard), self._pump(shard, to_client))
        finally:
            self.cut()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.manner == "delay":
                    await asyncio.sleep(self._rng.uniform(0.0, DELAY_S))
                await self._pass_on(data, writer)
        if self.manner != "swallow":
            with contextlib.suppress(OSError):
                writer.write_eof()
            # Who closes altogether reads no more, which a half-closed connection would not say.
            self._ends[0][1].close()
            self._ends[1][1].close()

    async def _pass_on(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        begin = 0
        while begin < len(data) and self.manner != "swallow":
            end = begin + TRICKLE_BYTES if self.manner == "trickle" else len(data)
            writer.write(data[begin:end])
            await writer.drain()
            if self.manner == "trickle":
                await asyncio.sleep(0)
            begin = end
